//! UC, receiving side: a message is delivered whole or not at all (IBTA 9.8.2.2).

use super::recv::PlaceError;
use super::{Ctx, MessageInProgress};
use crate::env::Env;
use crate::types::{Access, Psn, QpState, WcOpcode, WcStatus};
use crate::wire::opcode::PacketKind;
use crate::wire::packet::Packet;

impl<E: Env> Ctx<'_, E> {
    /// A UC packet. Whatever is wrong with it, the message is dropped and the next one may begin.
    pub(super) fn receive_unreliable(&mut self, packet: &Packet<'_>) {
        if !matches!(self.qp.state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe) {
            return self.sh.stats.drop_state.inc();
        }
        self.establish();
        let psn = packet.bth().psn();
        if !self.in_sequence(psn, packet) {
            self.qp.resp.cur = MessageInProgress::Idle;
            return self.sh.stats.drop_uc_sequence.inc();
        }
        self.qp.resp.epsn = psn.plus(1);
        let placed = match packet.op().kind {
            PacketKind::Send => self.unreliable_send(packet),
            PacketKind::Write => self.unreliable_write(packet),
            _ => None,
        };
        if placed.is_none() {
            self.qp.resp.cur = MessageInProgress::Idle;
            self.sh.stats.drop_no_recv.inc();
        }
    }

    /// A first packet may come at any PSN; others continue the message in hand.
    fn in_sequence(&self, psn: Psn, packet: &Packet<'_>) -> bool {
        if packet.op().is_first() {
            return true;
        }
        let continues = matches!(
            (self.qp.resp.cur, packet.op().kind),
            (MessageInProgress::Send { .. }, PacketKind::Send)
                | (MessageInProgress::Write { .. }, PacketKind::Write)
        );
        continues && psn == self.qp.resp.epsn
    }

    fn unreliable_send(&mut self, packet: &Packet<'_>) -> Option<()> {
        let (data, last) = (packet.payload(), packet.op().is_last());
        let received = match self.qp.resp.cur {
            MessageInProgress::Send { received, .. } if !packet.op().is_first() => received,
            _ => 0,
        };
        if !self.middle_is_full(data.len(), last) || !self.take_recv() {
            return None;
        }
        match self.place(received, data) {
            Ok(()) => {}
            Err(PlaceError::TooLong) => return None,
            Err(PlaceError::Protection) => {
                self.fail_recv(WcStatus::LocProtErr);
                super::enter_error(self, QpState::Err);
                return Some(());
            }
        }
        let total = received + data.len() as u32;
        self.qp.resp.cur = MessageInProgress::Send { received: total, opcode: WcOpcode::Recv };
        if last {
            self.qp.resp.cur = MessageInProgress::Idle;
            self.deliver(packet, WcOpcode::Recv, total);
            self.look_for_receives();
        }
        Some(())
    }

    fn unreliable_write(&mut self, packet: &Packet<'_>) -> Option<()> {
        let (data, last) = (packet.payload(), packet.op().is_last());
        let (va, key, left, total) = match (packet.reth(), self.qp.resp.cur) {
            (Some(reth), _) => (reth.va(), reth.rkey(), reth.dma_len(), reth.dma_len()),
            (None, MessageInProgress::Write { va, key, left, total }) => (va, key, left, total),
            _ => return None,
        };
        let len = data.len() as u32;
        let whole = if last { len == left } else { len < left };
        if !self.middle_is_full(data.len(), last)
            || !whole
            || !self.qp.attr.access.contains(Access::REMOTE_WRITE)
        {
            return None;
        }
        if packet.imm().is_some() && !self.take_recv() {
            return None;
        }
        /* all that the message is for, before any of it is written */
        if packet.op().is_first() {
            self.check_remote(key, va, total, Access::REMOTE_WRITE)?;
        }
        let host = self.check_remote(key, va, len, Access::REMOTE_WRITE)?;
        self.sh.stats.rx_bytes.add(u64::from(len));
        if len > 0 && !self.env.dma_write(host, data) {
            return None;
        }
        self.qp.resp.cur = match last {
            true => MessageInProgress::Idle,
            false => {
                MessageInProgress::Write { va: va.wrapping_add(u64::from(len)), key, left: left - len, total }
            }
        };
        if packet.imm().is_some() {
            self.deliver(packet, WcOpcode::RecvRdmaWithImm, total);
            self.look_for_receives();
        }
        Some(())
    }
}
