//! Messages by which the ends of an RC connection settle whether it is one of StaR: on the wire, and what a card says that has none.

use super::Nic;
use crate::env::Env;
use crate::star::control::{Control, MAX_CONTROL};
use crate::types::{Av, FrameMeta, Psn, QpState, QpType, Qpn};
use crate::wire::{HeaderBuf, PKEY_DEFAULT, Packet, code};

/// Bytes of BTH and DETH.
const HEADERS: usize = 20;
/// Bytes of the longest message: a [`Control`], and what sealing adds.
pub const MAX_NEGOTIATION: usize = MAX_CONTROL + 48;

impl<E: Env> Nic<E> {
    /// Sends `message` from the QP `from` to the QP `to`, who is at `av`. One that the port has no room for, or that is longer than
    /// [`MAX_NEGOTIATION`], is lost, as on any wire.
    pub fn send_negotiation(env: &mut E, (from, to): (Qpn, Qpn), av: &Av, message: &[u8]) {
        if message.len() > MAX_NEGOTIATION || !env.can_send() {
            return;
        }
        let pad = (message.len().wrapping_neg() & 3) as u8;
        let header =
            HeaderBuf::bth(code::STAR, to, Psn::default(), false, false, pad, PKEY_DEFAULT).deth(0, from);
        let mut frame = [0; HEADERS + MAX_NEGOTIATION];
        let (front, rest) = frame.split_at_mut(HEADERS);
        front.copy_from_slice(&header);
        rest[..message.len()].copy_from_slice(message);
        env.send_frame(av, &frame[..HEADERS + message.len()], &[], pad, false);
    }

    /// Such a message came.
    pub(super) fn handle_negotiation(&mut self, env: &mut E, meta: &FrameMeta, packet: &Packet<'_>) {
        let (to, message) = (packet.bth().dest_qpn(), packet.payload());
        let Some(from) = packet.deth().map(|deth| deth.src_qp()) else { return };
        if env.negotiate(meta, (from, to), message) {
            return;
        }
        let answer = Control::decode(message).and_then(|said| self.answer(meta, (from, to), &said));
        /* no QP here has a wish, so nobody needs to wait for one: strangers hear nothing of QPs that have no peer */
        let Some(answer) = answer.filter(|answer| matches!(answer, Control::Plain)) else {
            return self.shared.stats.star_drops.inc();
        };
        let av = Av { dgid: meta.src, sgid: meta.dst, hop_limit: 64, ..Av::default() };
        let mut room = [0; MAX_CONTROL];
        if let Some(len) = answer.encode(&mut room) {
            Self::send_negotiation(env, (to, from), &av, &room[..len]);
        }
    }

    /// What a QP says to its peer that is, or will be, one of plain RoCEv2. `None`: nothing, as the QP is not there, not its peer's, or asked
    /// nothing. In INIT it has no peer yet, and whoever asks hears that it is there ([`Control::NotYet`]): for a card with StaR alone, as the
    /// peer of an end with a wish must not take it for plain. One in RESET is as one that is not there.
    pub fn answer(&self, meta: &FrameMeta, (from, to): (Qpn, Qpn), said: &Control) -> Option<Control> {
        if !matches!(said, Control::Offer { .. } | Control::Accept { .. }) {
            return None;
        }
        let qp = self.qps.get(to).filter(|qp| qp.qp_type == QpType::Rc)?;
        match qp.state {
            QpState::Reset => None,
            QpState::Init => Some(Control::NotYet),
            _ => (qp.attr.av.dgid == meta.src && qp.attr.dest_qpn == from).then_some(Control::Plain),
        }
    }
}
