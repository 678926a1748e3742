//! Messages by which the ends of an RC connection settle whether it is one of StaR: on the wire, and what
//! ends say that are none.

use starverbs_core::env::Env;
use starverbs_core::nic::Nic;
use starverbs_core::wire::{HeaderBuf, PKEY_DEFAULT, code};
use starverbs_core::{Av, FrameMeta, Psn, QpState, QpType, Qpn};

use super::control::{Control, MAX_CONTROL};
use super::env::StarEnv;

/// Bytes of BTH and DETH.
const HEADERS: usize = 20;
/// Bytes of the longest message: a [`Control`], and what sealing adds.
pub const MAX_NEGOTIATION: usize = MAX_CONTROL + 48;

/// Sends `message` from the first QP to the second, who is at `av`. One that the port has no room for, or
/// that is longer than [`MAX_NEGOTIATION`], is lost, as on any wire.
pub fn send(env: &mut impl Env, (from, to): (Qpn, Qpn), av: &Av, message: &[u8]) {
    if message.len() > MAX_NEGOTIATION || !env.can_send() {
        return;
    }
    let pad = (message.len().wrapping_neg() & 3) as u8;
    let header = HeaderBuf::bth(code::NEGOTIATE, to, Psn::default(), false, false, pad, PKEY_DEFAULT);
    let mut frame = [0; HEADERS + MAX_NEGOTIATION];
    let (front, rest) = frame.split_at_mut(HEADERS);
    front.copy_from_slice(&header.deth(0, from));
    rest[..message.len()].copy_from_slice(message);
    env.send_frame(av, &frame[..HEADERS + message.len()], &[], pad, false);
}

/// Such a message came. The host has it for its [`Ends`](super::host::Ends), or this card answers that it has
/// none.
pub(crate) fn handle<E: StarEnv>(
    nic: &Nic<E>,
    env: &mut E,
    meta: &FrameMeta,
    (from, to): (Qpn, Qpn),
    message: &[u8],
) {
    if env.negotiate(meta, (from, to), message) {
        return;
    }
    let answer = Control::decode(message).and_then(|said| answer(nic, meta, (from, to), &said));
    /* no QP here has a wish, so nobody needs to wait for one: strangers hear nothing of QPs that have no
     * peer
     */
    let Some(answer) = answer.filter(|answer| matches!(answer, Control::Plain)) else {
        return nic.counters().star_drops.inc();
    };
    let av = Av { dgid: meta.src, sgid: meta.dst, hop_limit: 64, ..Av::default() };
    let mut room = [0; MAX_CONTROL];
    if let Some(len) = answer.encode(&mut room) {
        send(env, (to, from), &av, &room[..len]);
    }
}

/// What a QP says to its peer that is, or will be, one of plain RoCEv2. `None`: nothing, as the QP is not
/// there, not its peer's, or asked nothing. In INIT it has no peer yet, and whoever asks hears that it is
/// there ([`Control::NotYet`]): for a card with StaR alone, as the peer of an end with a wish must not take
/// it for plain. One in RESET is as one that is not there.
pub(crate) fn answer<E: Env>(
    nic: &Nic<E>,
    meta: &FrameMeta,
    (from, to): (Qpn, Qpn),
    said: &Control,
) -> Option<Control> {
    if !matches!(said, Control::Offer { .. } | Control::Accept { .. }) {
        return None;
    }
    nic.qp_type(to).filter(|qp_type| *qp_type == QpType::Rc)?;
    let attr = nic.query_qp(to).ok()?;
    match attr.state {
        QpState::Reset => None,
        QpState::Init => Some(Control::NotYet),
        _ => (attr.av.dgid == meta.src && attr.dest_qpn == from).then_some(Control::Plain),
    }
}
