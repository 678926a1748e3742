//! XRC domains that cards share: receive WQEs leased to other cards, and the requests that these forward.
//!
//! Owns the leases. A leased WQE is out of its queue. It is completed when its message is here; unused, it
//! comes back to the queue's head, in order. No message of another card reaches beyond that card's leases.

mod serve;
mod table;

pub(crate) use table::{LeaseTable, Revocable, TakenRecvWqe};
use table::{LeasedWqe, RemoteConn};

use super::{MAX_SGE, Nic, QpShared, Srq};
use crate::env::{CompletionQueue, Env, RecvQueue, TakenWqe};
use crate::error::NicError;
use crate::relay::{LinkId, MessageEnd, MessagePart, Relay, RelayOutcome, Returned, TargetMemory};
use crate::transport::{Ctx, Qp, slices};
use crate::types::{
    Access, AsyncEvent, Cqe, Nanos, PdId, QPN_BLOCK_SHIFT, QpId, Qpn, Sge, SrqId, WcFlags, WcOpcode, WcStatus,
};

/// Most leases, of all cards.
const MAX_LEASES: usize = 4096;
/// Most leases of one card.
const MAX_PER_CARD: usize = 256;
/// One of so many WQEs in the queue is leased at a time, at least one.
const SHARE: u32 = 4;

impl<E: Env> QpShared<E> {
    /// Whether other cards are in this XRC domain.
    pub(crate) fn is_shared(&self, domain: PdId) -> bool {
        self.pds.get(domain.0 as usize).is_some_and(|pd| pd.shared)
    }

    /// Takes a WQE of an XRC SRQ, of which some may have come back.
    pub(crate) fn take_returned(&mut self, env: &mut E, id: SrqId, sges: &mut [Sge]) -> Option<TakenRecvWqe> {
        let srq = self.srqs.get_mut(id.0 as usize)?;
        let fresh = |TakenWqe { wr_id, num_sge }| TakenRecvWqe { wr_id, sges: num_sge, order: None };
        let taken = self.leases.take(id, sges).or_else(|| srq.rq.take(sges).map(fresh));
        if srq.limit > 0 && srq.rq.len() + self.leases.waiting(id) < srq.limit {
            srq.limit = 0;
            env.event(AsyncEvent::SrqLimit(id));
        }
        taken
    }

    /// The SRQ of a shared domain that has this number.
    fn srq_of(&self, domain: PdId, number: u32) -> Option<(SrqId, &Srq<E>)> {
        if number >> QPN_BLOCK_SHIFT != self.remote_srqs.block || !self.is_shared(domain) {
            return None;
        }
        let id = SrqId(number & ((1 << QPN_BLOCK_SHIFT) - 1));
        let srq = self.srqs.get(id.0 as usize)?;
        let its = srq.xrc.as_ref().is_some_and(|(of, _)| *of == domain);
        its.then_some((id, srq))
    }

    /// Leases WQEs, or refuses.
    fn grant_leases(&mut self, env: &mut E, link: LinkId, domain: PdId, number: u32, count: u32) {
        let Some((id, srq)) = self.srq_of(domain, number) else {
            env.relay(link, &Relay::Refuse { srq: number, gone: true });
            return;
        };
        let (waiting, most) = (srq.rq.len() + self.leases.waiting(id), srq.rq.max_sge().min(MAX_SGE));
        let held = self.leases.of_link(link);
        let live = self.leases.wqes.len() - self.leases.free.len();
        let room = MAX_PER_CARD.saturating_sub(held).min(MAX_LEASES.saturating_sub(live)) as u32;
        let count = count.min((waiting / SHARE).max(1)).min(room);
        let mut granted = 0;
        let mut sges = [Sge::default(); MAX_SGE];
        for _ in 0..count {
            /* a WQE that is taken must have a place */
            if self.leases.make_place(most).is_err() {
                break;
            }
            let Some(taken) = self.take_returned(env, id, &mut sges) else { break };
            let sges = &sges[..taken.sges];
            let Some(at) = self.leases.add(id, link, &taken, sges) else { break };
            let room: u64 = sges.iter().map(|sge| u64::from(sge.len)).sum();
            let room = u32::try_from(room).unwrap_or(u32::MAX).min(self.cfg.max_msg);
            env.relay(link, &Relay::Lease { srq: number, lease: self.leases.id(at), room });
            granted += 1;
        }
        if let Some(srq) = self.srqs.get_mut(id.0 as usize).filter(|_| granted > 0) {
            srq.revocable = Revocable::Any;
        }
        if granted == 0 {
            env.relay(link, &Relay::Refuse { srq: number, gone: false });
            self.revoke_leases(env, id, Some(link));
        }
    }

    /// Revokes the unused leases of `srq`, once per card. A queue that stays empty is not searched again
    /// until some of it is leased.
    pub(crate) fn revoke_leases(&mut self, env: &mut E, id: SrqId, but: Option<LinkId>) {
        let number = self.remote_srqs.block << QPN_BLOCK_SHIFT | id.0;
        let Some(srq) = self.srqs.get_mut(id.0 as usize) else { return };
        match srq.revocable {
            Revocable::No => return,
            Revocable::Of(link) if Some(link) == but => return,
            _ => srq.revocable = but.map_or(Revocable::No, Revocable::Of),
        }
        let wqes = &mut self.leases.wqes;
        let unused = |lease: &LeasedWqe| {
            lease.srq == Some(id)
                && !lease.begun
                && !lease.revoked
                && lease.link.is_some()
                && lease.link != but
        };
        while let Some(link) = wqes.iter().find(|lease| unused(lease)).and_then(|lease| lease.link) {
            env.relay(link, &Relay::Revoke { srq: number });
            for lease in wqes.iter_mut().filter(|lease| lease.link == Some(link) && lease.srq == Some(id)) {
                lease.revoked = true;
            }
        }
    }

    /// A packet of a forwarded message. `None`: more follow.
    fn take_part(
        &mut self,
        env: &mut E,
        link: LinkId,
        part: &MessagePart,
        what: impl FnOnce(&mut Self, &mut E) -> Option<RelayOutcome>,
    ) -> Option<RelayOutcome> {
        let conn = RemoteConn { link, qpn: part.qpn, epoch: part.epoch };
        if self.leases.has_failed(conn) {
            if let Some(at) = self.leases.find(link, part.lease).filter(|_| part.end.is_some()) {
                self.end_lease(at, part.qpn, Returned::Unused);
            }
            return None;
        }
        self.in_turn(env, conn, what)
    }

    /// Bytes of an RDMA WRITE.
    fn write_forwarded(
        &mut self,
        env: &mut E,
        link: LinkId,
        domain: PdId,
        part: &MessagePart,
        place: &TargetMemory,
        data: &[u8],
    ) -> Option<RelayOutcome> {
        let Some((_, srq)) = self.srq_of(domain, place.srq) else { return Some(RelayOutcome::Invalid) };
        let (mrs, of) = (&self.mrs, QpId { pd: srq.pd, qpn: part.qpn });
        let may = |len: u32| mrs.resolve_remote(place.key, of, place.va, len, Access::REMOTE_WRITE).ok();
        let len = data.len() as u32;
        if part.offset == 0 && may(place.total).is_none() {
            return Some(self.deny_write(link, part));
        }
        self.stats.rx_bytes.add(u64::from(len));
        if len > 0 && !may(len).is_some_and(|host| env.dma_write(host, data)) {
            return Some(self.deny_write(link, part));
        }
        let end = part.end?;
        if !end.flags.contains(WcFlags::WITH_IMM) {
            return Some(RelayOutcome::Success);
        }
        let Some(at) = self.leases.find(link, part.lease) else { return Some(RelayOutcome::Invalid) };
        let Some(id) = self.leases.wqes[at].srq else { return Some(RelayOutcome::Invalid) };
        self.leases.wqes[at].qpn = part.qpn;
        let opcode = WcOpcode::RecvRdmaWithImm;
        let cqe = Cqe { byte_len: place.total, opcode, ..end.cqe() };
        let kept = self.complete_lease(at, id, &cqe, end.solicited);
        Some(if kept { RelayOutcome::Success } else { RelayOutcome::Operation })
    }

    /// A WRITE is denied access. The WQE that one with immediate has taken completes with the error.
    fn deny_write(&mut self, link: LinkId, part: &MessagePart) -> RelayOutcome {
        let takes = part.end.is_some_and(|end| end.flags.contains(WcFlags::WITH_IMM));
        if let Some(at) = self.leases.find(link, part.lease).filter(|_| takes)
            && let Some(id) = self.leases.wqes[at].srq
        {
            self.leases.wqes[at].qpn = part.qpn;
            self.complete_lease(at, id, &Cqe { status: WcStatus::LocAccessErr, ..Cqe::default() }, true);
        }
        RelayOutcome::Access
    }

    /// Bytes of a message for a leased WQE.
    fn place_forwarded(
        &mut self,
        env: &mut E,
        link: LinkId,
        part: &MessagePart,
        data: &[u8],
    ) -> Option<RelayOutcome> {
        let Some(at) = self.leases.find(link, part.lease) else { return Some(RelayOutcome::Invalid) };
        let lease = &mut self.leases.wqes[at];
        (lease.begun, lease.qpn) = (true, part.qpn);
        let Some((id, srq)) = lease.srq.and_then(|id| Some((id, self.srqs.get(id.0 as usize)?))) else {
            return Some(RelayOutcome::Invalid);
        };
        let (mrs, pd) = (&self.mrs, srq.pd);
        let mut rest = data;
        self.stats.rx_bytes.add(data.len() as u64);
        let placed = slices(lease.sges.iter().copied(), part.offset, data.len() as u32, |sge, skip, n| {
            let addr =
                mrs.resolve_local(sge.lkey, pd, sge.addr.wrapping_add(u64::from(skip)), n, true).ok()?;
            let (now, later) = rest.split_at_checked(n as usize)?;
            rest = later;
            env.dma_write(addr, now).then_some(())
        });
        if placed.is_none() {
            self.complete_lease(at, id, &Cqe { status: WcStatus::LocProtErr, ..Cqe::default() }, true);
            return Some(RelayOutcome::Operation);
        }
        let end = part.end?;
        if end.flags.contains(WcFlags::WITH_INV)
            && self.mrs.invalidate_remote(end.imm, QpId { pd, qpn: part.qpn }).is_err()
        {
            self.complete_lease(at, id, &Cqe { status: WcStatus::RemInvReqErr, ..Cqe::default() }, true);
            return Some(RelayOutcome::ReceivedInError);
        }
        let byte_len = part.offset.wrapping_add(data.len() as u32);
        let cqe = Cqe { byte_len, opcode: WcOpcode::Recv, ..end.cqe() };
        let kept = self.complete_lease(at, id, &cqe, end.solicited);
        Some(if kept { RelayOutcome::Success } else { RelayOutcome::Operation })
    }

    /// Completes a leased WQE. False: its CQ is full.
    fn complete_lease(&mut self, at: usize, id: SrqId, cqe: &Cqe, solicited: bool) -> bool {
        let lease = &self.leases.wqes[at];
        let cqe = Cqe { wr_id: lease.wr_id, qpn: lease.qpn, ..*cqe };
        self.leases.end(at);
        self.stats.completions.inc();
        if cqe.status != WcStatus::Success {
            self.stats.error_completions.inc();
        }
        let cq = self.srqs.get(id.0 as usize).and_then(|srq| srq.xrc.as_ref());
        let kept = cq.is_some_and(|(_, cq)| cq.push(&cqe, solicited).is_ok());
        if !kept {
            self.stats.cq_overrun.inc();
        }
        kept
    }

    /// A lease ends without a whole message.
    fn end_lease(&mut self, at: usize, qpn: Qpn, why: Returned) {
        let lease = &mut self.leases.wqes[at];
        let Some(id) = lease.srq else { return };
        if why == Returned::Unused && !lease.begun {
            return self.leases.put_back(at);
        }
        lease.qpn = qpn;
        let status = if why == Returned::TooLong { WcStatus::LocLenErr } else { WcStatus::WrFlushErr };
        self.complete_lease(at, id, &Cqe { status, ..Cqe::default() }, true);
    }
}

impl MessageEnd {
    fn cqe(&self) -> Cqe {
        let MessageEnd { src_qp, imm, flags, .. } = *self;
        Cqe { src_qp, imm, flags, ..Cqe::default() }
    }
}

/// Sends the outcome of a message.
fn send_done<E: Env>(env: &mut E, link: LinkId, part: &MessagePart, outcome: Option<RelayOutcome>) {
    if let Some(outcome) = outcome {
        env.relay(link, &Relay::Done { qpn: part.qpn, serial: part.serial, outcome, found: 0 });
    }
}

impl<E: Env> Nic<E> {
    /// The XRC domain that `xrcd` stands for is shared with other cards from now on; numbers of its SRQs
    /// begin with `block`, which is one of this card's.
    ///
    /// # Errors
    /// `NotFound`; `Invalid`: the card gave another block before; `Exhausted`: no memory.
    pub fn share_domain(&mut self, xrcd: PdId, block: u16) -> Result<(), NicError> {
        let current = self.shared.remote_srqs.block;
        if block == 0 || (current != 0 && current != u32::from(block)) {
            return Err(NicError::Invalid);
        }
        self.shared.leases.make_ready()?;
        self.shared.remote_srqs.make_ready()?;
        self.shared.pds.get_mut(xrcd.0 as usize).ok_or(NicError::NotFound)?.shared = true;
        self.shared.remote_srqs.block = u32::from(block);
        Ok(())
    }

    /// The number by which requests name an SRQ.
    pub fn srq_number(&self, srq: SrqId) -> u32 {
        let domain = self.shared.srqs.get(srq.0 as usize).and_then(|srq| srq.xrc.as_ref());
        match domain {
            Some((domain, _)) if self.shared.is_shared(*domain) => {
                self.shared.remote_srqs.block << QPN_BLOCK_SHIFT | srq.0
            }
            _ => srq.0,
        }
    }

    /// A message from the card at the other end of `link`, which is in `domain`.
    pub fn handle_relay(&mut self, env: &mut E, now: Nanos, link: LinkId, domain: PdId, message: &Relay<'_>) {
        match *message {
            Relay::RequestLease { srq, count } => self.shared.grant_leases(env, link, domain, srq, count),
            Relay::Data { part, data } => {
                let place = |sh: &mut QpShared<E>, env: &mut E| sh.place_forwarded(env, link, &part, data);
                let outcome = self.shared.take_part(env, link, &part, place);
                send_done(env, link, &part, outcome);
            }
            Relay::Write { part, place, data } => {
                let write = |sh: &mut QpShared<E>, env: &mut E| {
                    sh.write_forwarded(env, link, domain, &part, &place, data)
                };
                let outcome = self.shared.take_part(env, link, &part, write);
                send_done(env, link, &part, outcome);
            }
            Relay::Execute { from, place, what } => {
                self.shared.execute_forwarded(env, link, domain, &from, &place, what);
            }
            Relay::Fetch { from, place, wanted } => {
                self.shared.fetch_forwarded(env, link, domain, &from, &place, &wanted);
            }
            Relay::Return { lease, qpn, why } => {
                if let Some(at) = self.shared.leases.find(link, lease) {
                    self.shared.end_lease(at, qpn, why);
                }
            }
            Relay::Lease { srq, lease, room } => {
                if !self.shared.remote_srqs.leased(link, srq, lease, room) {
                    env.relay(link, &Relay::Return { lease, qpn: 0, why: Returned::Unused });
                    return;
                }
                self.resume_waiting(env, now, link, srq, |cx| cx.resume_deferred(true));
            }
            Relay::Refuse { srq, gone } => {
                self.shared.remote_srqs.refused(link, srq, gone);
                let what =
                    |cx: &mut Ctx<'_, E>| if gone { cx.srq_is_gone() } else { cx.resume_deferred(false) };
                self.resume_waiting(env, now, link, srq, what);
            }
            Relay::Done { qpn, serial, outcome, found } => {
                if let Some(mut cx) = self.context(env, qpn, now) {
                    cx.on_done(link, serial, outcome, found);
                }
            }
            Relay::Bytes { qpn, epoch, psn, outcome, data } => {
                if let Some(mut cx) = self.context(env, qpn, now) {
                    cx.on_bytes(link, epoch, psn, outcome, data);
                }
            }
            Relay::Revoke { srq } => {
                while let Some(lease) = self.shared.remote_srqs.revoked(link, srq) {
                    env.relay(link, &Relay::Return { lease, qpn: 0, why: Returned::Unused });
                }
            }
        }
    }

    /// The card at the other end of `link` is gone: its leases come back, and its answers will not come.
    pub fn handle_unlink(&mut self, env: &mut E, now: Nanos, link: LinkId) {
        for at in 0..self.shared.leases.wqes.len() {
            if self.shared.leases.wqes[at].link == Some(link) {
                let qpn = self.shared.leases.wqes[at].qpn;
                self.shared.end_lease(at, qpn, Returned::Unused);
            }
        }
        self.shared.leases.failed.retain(|conn| conn.link != link);
        /* after `peer_lost` a QP no longer depends on the link */
        for _ in 0..self.qps.len() {
            let remote_srqs = &self.shared.remote_srqs;
            let waits = |qp: &&Qp<E>| qp.resp.depends_on(remote_srqs, qp.pd, link);
            let Some(qpn) = self.qps.each().find(waits).map(|qp| qp.qpn) else { break };
            if let Some(mut cx) = self.context(env, qpn, now) {
                cx.peer_lost(link);
            }
        }
        self.shared.remote_srqs.unlink(link);
    }

    /// Resumes the QPs that wait for a WQE of another card's SRQ.
    fn resume_waiting(
        &mut self,
        env: &mut E,
        now: Nanos,
        link: LinkId,
        srq: u32,
        what: impl Fn(&mut Ctx<'_, E>),
    ) {
        while let Some(qpn) = self.shared.remote_srqs.next_waiting(link, srq) {
            if let Some(mut cx) = self.context(env, qpn, now)
                && cx.waits_for_srq(link, srq)
            {
                what(&mut cx);
            }
        }
    }
}
