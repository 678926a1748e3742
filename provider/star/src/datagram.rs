//! Role messages, by which the ends of an RC connection settle whether it is one of StaR: on the wire, and
//! the answers of QPs without StaR.

use starverbs_core::env::Env;
use starverbs_core::nic::Nic;
use starverbs_core::wire::{HeaderBuf, PKEY_DEFAULT, code};
use starverbs_core::{Av, FrameMeta, Psn, QpState, QpType};

use super::control::{Control, MAX_CONTROL};
use super::env::{QpPair, StarEnv};
use super::role_message::RoleMessage;

/// Bytes of BTH and DETH.
const HEADERS: usize = 20;
/// Bytes of the longest message: a [`Control`], and what sealing adds.
pub const MAX_NEGOTIATION: usize = MAX_CONTROL + 48;

/// Sends `message` between these QPs, the receiver at `av`. One that the port has no room for, or
/// that is longer than [`MAX_NEGOTIATION`], is lost, as on any wire.
pub fn send(env: &mut impl Env, qps: QpPair, av: &Av, message: &[u8]) {
    if message.len() > MAX_NEGOTIATION || !env.can_send() {
        return;
    }
    let pad = (message.len().wrapping_neg() & 3) as u8;
    let header = HeaderBuf::bth(code::NEGOTIATE, qps.to, Psn::default(), false, false, pad, PKEY_DEFAULT);
    let mut frame = [0; HEADERS + MAX_NEGOTIATION];
    let (front, rest) = frame.split_at_mut(HEADERS);
    front.copy_from_slice(&header.deth(0, qps.from));
    rest[..message.len()].copy_from_slice(message);
    env.send_frame(av, &frame[..HEADERS + message.len()], &[], pad, false);
}

/// Such a message came. The host has it for its [`Ends`](super::host::Ends), or this card answers that it has
/// none.
pub(crate) fn handle<E: StarEnv>(nic: &Nic<E>, env: &mut E, meta: &FrameMeta, qps: QpPair, message: &[u8]) {
    if env.negotiate(meta, qps, message) {
        return;
    }
    let answer = RoleMessage::decode(message).and_then(|message| answer(nic, meta, qps, &message));
    /* no QP here has a preference, so nobody needs to wait for one; QPs without a peer answer nothing */
    let Some(answer) = answer.filter(|answer| answer.message == Control::Plain) else {
        return nic.counters().star_drops.inc();
    };
    let av = Av { dgid: meta.src, sgid: meta.dst, hop_limit: 64, ..Av::default() };
    let mut room = [0; MAX_CONTROL];
    if let Some(len) = answer.encode(&mut room) {
        send(env, QpPair { from: qps.to, to: qps.from }, &av, &room[..len]);
    }
}

/// The answer of a QP that is, or will be, plain RC. `None`: there is none, as the QP is in RESET or does not
/// exist, has another peer, or the message is no question. In INIT it has no peer yet, and answers
/// [`Control::NotYet`] to anybody, so that the peer of an end with a preference does not take it for plain;
/// cards without StaR do not send that. One that is held answers so to its peer, as something else than StaR
/// may come to carry its connection.
pub(crate) fn answer<E: Env>(
    nic: &Nic<E>,
    meta: &FrameMeta,
    qps: QpPair,
    asked: &RoleMessage,
) -> Option<RoleMessage> {
    if !matches!(asked.message, Control::Offer { .. } | Control::Accept { .. }) {
        return None;
    }
    nic.qp_type(qps.to).filter(|qp_type| *qp_type == QpType::Rc)?;
    let attr = nic.query_qp(qps.to).ok()?;
    let answer = match attr.state {
        QpState::Reset => return None,
        QpState::Init => Control::NotYet,
        _ if attr.av.dgid != meta.src || attr.dest_qpn != qps.from => return None,
        _ if nic.is_held(qps.to) => Control::NotYet,
        _ => Control::Plain,
    };
    Some(asked.answered(0, answer))
}
