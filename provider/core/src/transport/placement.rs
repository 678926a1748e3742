//! ATOMIC WRITE and FLUSH at the responder (IBTA vol. 1, annex A19: memory placement extensions).
//!
//! Both are executed once, in order, and answered with a READ response of no bytes. A requester sends them
//! again until that answer arrives; what was executed is then answered, and not executed again.

use super::{Ctx, OwedResponse};
use crate::env::Env;
use crate::room::Room;
use crate::types::{Access, FlushLevel, Psn};
use crate::wire::headers::NakCode;
use crate::wire::packet::Packet;

impl<E: Env> Ctx<'_, E> {
    /// Eight aligned bytes, written at once behind all that was written before.
    pub(super) fn execute_atomic_write(&mut self, psn: Psn, packet: &Packet<'_>) {
        let (Some(reth), Ok(bytes)) = (packet.reth(), <[u8; 8]>::try_from(packet.payload())) else {
            return self.refuse(NakCode::InvalidRequest);
        };
        if reth.dma_len() != 8 || reth.va() & 7 != 0 || !self.may_answer_more(false) {
            return self.refuse(NakCode::InvalidRequest);
        }
        let allowed = self.qp.attr.access.contains(Access::REMOTE_WRITE);
        let Some(host) =
            self.check_remote(reth.rkey(), reth.va(), 8, Access::REMOTE_WRITE).filter(|_| allowed)
        else {
            return self.violate();
        };
        if host & 7 != 0 {
            return self.refuse(NakCode::InvalidRequest);
        }
        if !self.env.dma_store(host, bytes) {
            return self.violate();
        }
        self.sh.stats.rx_bytes.add(8);
        self.answer_placement(psn, packet);
    }

    /// All that was written before is visible. The key must open the range, or be good at all where the
    /// whole region is meant. Persistence needs a right that only persistent memory is registered with.
    pub(super) fn execute_flush(&mut self, psn: Psn, packet: &Packet<'_>) {
        if self.qp.rpc.is_some()
            && let Some(packet) = packet.as_rpc()
        {
            return self.execute_rpc(&packet);
        }
        let (Some(feth), Some(reth)) = (packet.feth(), packet.reth()) else { return };
        let (Some(placement), Some(level)) = (feth.placement(), feth.level()) else {
            return self.refuse(NakCode::InvalidRequest);
        };
        if !self.may_answer_more(false) {
            return self.refuse(NakCode::InvalidRequest);
        }
        let (need, qp) = (placement.needs(), self.remote_qp());
        let range = match level {
            FlushLevel::Range => self.check_remote(reth.rkey(), reth.va(), reth.dma_len(), need).is_some(),
            FlushLevel::Mr => true,
        };
        let permitted = self.sh.mrs.permits(reth.rkey(), qp, need).is_ok();
        if !range || !permitted || !self.qp.attr.access.contains(need) {
            return self.violate();
        }
        self.env.dma_fence();
        self.answer_placement(psn, packet);
    }

    fn answer_placement(&mut self, psn: Psn, packet: &Packet<'_>) {
        self.qp.resp.out.push_in_room(OwedResponse::done(psn));
        self.accept(packet, 1, true);
        self.ready();
    }

    /// One that came before, and so was executed, if there is the right to it.
    pub(super) fn duplicate_placement(&mut self, psn: Psn, packet: &Packet<'_>) {
        if self.qp.rpc.is_some() && packet.feth().is_some() {
            return self.owe_ack();
        }
        if self.qp.flags.answers == 0 {
            self.drop_answers_from(psn);
        } else if self.will_answer(psn) {
            return;
        }
        let need = match packet.feth() {
            Some(feth) => feth.placement().map(|placement| placement.needs()),
            None => Some(Access::REMOTE_WRITE),
        };
        let executed = need.is_some_and(|need| self.qp.attr.access.contains(need));
        if executed && self.may_answer_more(true) {
            self.qp.resp.out.push_in_room(OwedResponse::done(psn));
            self.ready();
        }
    }
}
