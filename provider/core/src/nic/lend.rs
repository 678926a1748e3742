//! XRC domains that cards share: receive WQEs lent to other cards, and what comes for them.
//!
//! Owns the loans. A WQE that is lent is out of its queue; it is completed when its message is here, and
//! comes back to the queue's head, in order, when it was not used. Nothing that a borrower says reaches
//! beyond the loans that it has.

mod loans;
mod serve;

use loans::Loan;
pub(crate) use loans::{Callable, Lending, Taken};

use super::{MAX_SGE, Nic, Shared, Srq};
use crate::env::{CompletionQueue, Env, RecvQueue};
use crate::error::NicError;
use crate::relay::{End, LinkId, Outcome, Part, Place, Relay, Returned};
use crate::transport::{Ctx, Qp, slices};
use crate::types::{
    Access, AsyncEvent, Cqe, Nanos, PdId, QPN_BLOCK_SHIFT, Qpn, Sge, SrqId, WcFlags, WcOpcode, WcStatus,
};

/// Most loans, of all cards.
const LOANS: usize = 4096;
/// Most loans of one card.
const OF_ONE: usize = 256;
/// Of WQEs that wait, one of so many is lent at a time; one if there are few.
const SHARE: u32 = 4;

impl<E: Env> Shared<E> {
    /// Whether other cards are in this XRC domain.
    pub(crate) fn is_shared(&self, domain: PdId) -> bool {
        self.pds.get(domain.0 as usize).is_some_and(|pd| pd.shared)
    }

    /// Takes a WQE of an XRC SRQ, of which some may have come back.
    pub(crate) fn take_returned(&mut self, env: &mut E, id: SrqId, sges: &mut [Sge]) -> Option<Taken> {
        let srq = self.srqs.get_mut(id.0 as usize)?;
        let fresh = |(wr_id, sges)| Taken { wr_id, sges, order: None };
        let taken = self.lending.take(id, sges).or_else(|| srq.rq.take(sges).map(fresh));
        if srq.limit > 0 && srq.rq.len() + self.lending.waiting(id) < srq.limit {
            srq.limit = 0;
            env.event(AsyncEvent::SrqLimit(id));
        }
        taken
    }

    /// The SRQ of a shared domain that has this number.
    fn srq_of(&self, domain: PdId, number: u32) -> Option<(SrqId, &Srq<E>)> {
        if number >> QPN_BLOCK_SHIFT != self.abroad.home || !self.is_shared(domain) {
            return None;
        }
        let id = SrqId(number & ((1 << QPN_BLOCK_SHIFT) - 1));
        let srq = self.srqs.get(id.0 as usize)?;
        let its = srq.xrc.as_ref().is_some_and(|(of, _)| *of == domain);
        its.then_some((id, srq))
    }

    /// Lends WQEs, or says that there are none.
    fn lend(&mut self, env: &mut E, link: LinkId, domain: PdId, number: u32, count: u32) {
        let Some((id, srq)) = self.srq_of(domain, number) else {
            env.relay(link, &Relay::Refuse { srq: number, gone: true });
            return;
        };
        let (waiting, most) = (srq.rq.len() + self.lending.waiting(id), srq.rq.max_sge().min(MAX_SGE));
        let held = self.lending.of_link(link);
        let live = self.lending.loans.len() - self.lending.free.len();
        let room = OF_ONE.saturating_sub(held).min(LOANS.saturating_sub(live)) as u32;
        let count = count.min((waiting / SHARE).max(1)).min(room);
        let mut lent = 0;
        let mut sges = [Sge::default(); MAX_SGE];
        for _ in 0..count {
            /* a WQE that is taken must have a place */
            if self.lending.make_place(most).is_err() {
                break;
            }
            let Some(taken) = self.take_returned(env, id, &mut sges) else { break };
            let sges = &sges[..taken.sges];
            let Some(at) = self.lending.add(id, link, &taken, sges) else { break };
            let room: u64 = sges.iter().map(|sge| u64::from(sge.len)).sum();
            let room = u32::try_from(room).unwrap_or(u32::MAX).min(self.cfg.max_msg);
            env.relay(link, &Relay::Lend { srq: number, loan: self.lending.id(at), room });
            lent += 1;
        }
        if let Some(srq) = self.srqs.get_mut(id.0 as usize).filter(|_| lent > 0) {
            srq.callable = Callable::Any;
        }
        if lent == 0 {
            env.relay(link, &Relay::Refuse { srq: number, gone: false });
            self.recall(env, id, Some(link));
        }
    }

    /// Asks others, each once, for what they have of `srq` and do not use. A queue that stays empty is not
    /// looked through again until something of it is lent.
    pub(crate) fn recall(&mut self, env: &mut E, id: SrqId, but: Option<LinkId>) {
        let number = self.abroad.home << QPN_BLOCK_SHIFT | id.0;
        let Some(srq) = self.srqs.get_mut(id.0 as usize) else { return };
        match srq.callable {
            Callable::No => return,
            Callable::Of(link) if Some(link) == but => return,
            _ => srq.callable = but.map_or(Callable::No, Callable::Of),
        }
        let loans = &mut self.lending.loans;
        let unused = |loan: &Loan| {
            loan.srq == Some(id) && !loan.begun && !loan.recalled && loan.link.is_some() && loan.link != but
        };
        while let Some(link) = loans.iter().find(|loan| unused(loan)).and_then(|loan| loan.link) {
            env.relay(link, &Relay::Recall { srq: number });
            for loan in loans.iter_mut().filter(|loan| loan.link == Some(link) && loan.srq == Some(id)) {
                loan.recalled = true;
            }
        }
    }

    /// A packet of a message. `None`: it goes on.
    fn take_part(
        &mut self,
        env: &mut E,
        link: LinkId,
        part: &Part,
        what: impl FnOnce(&mut Self, &mut E) -> Option<Outcome>,
    ) -> Option<Outcome> {
        if self.lending.has_failed(link, part.qpn, part.epoch) {
            if let Some(at) = self.lending.find(link, part.loan).filter(|_| part.end.is_some()) {
                self.end_loan(at, part.qpn, Returned::Unused);
            }
            return None;
        }
        self.in_turn(env, (link, part.qpn, part.epoch), what)
    }

    /// Bytes of an RDMA WRITE.
    fn write_lent(
        &mut self,
        env: &mut E,
        (link, domain): (LinkId, PdId),
        part: &Part,
        place: &Place,
        data: &[u8],
    ) -> Option<Outcome> {
        let Some((_, srq)) = self.srq_of(domain, place.srq) else { return Some(Outcome::Invalid) };
        let (mrs, of) = (&self.mrs, (srq.pd, part.qpn));
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
            return Some(Outcome::Success);
        }
        let Some(at) = self.lending.find(link, part.loan) else { return Some(Outcome::Invalid) };
        let Some(id) = self.lending.loans[at].srq else { return Some(Outcome::Invalid) };
        self.lending.loans[at].qpn = part.qpn;
        let opcode = WcOpcode::RecvRdmaWithImm;
        let cqe = Cqe { byte_len: place.total, opcode, ..end.cqe() };
        let kept = self.finish_lent(at, id, &cqe, end.solicited);
        Some(if kept { Outcome::Success } else { Outcome::Operation })
    }

    /// A WRITE may not go where it wants to. The WQE that one with immediate has taken says so.
    fn deny_write(&mut self, link: LinkId, part: &Part) -> Outcome {
        let takes = part.end.is_some_and(|end| end.flags.contains(WcFlags::WITH_IMM));
        if let Some(at) = self.lending.find(link, part.loan).filter(|_| takes)
            && let Some(id) = self.lending.loans[at].srq
        {
            self.lending.loans[at].qpn = part.qpn;
            self.finish_lent(at, id, &Cqe { status: WcStatus::LocAccessErr, ..Cqe::default() }, true);
        }
        Outcome::Access
    }

    /// Bytes of a message for a WQE that was lent.
    fn place_lent(&mut self, env: &mut E, link: LinkId, part: &Part, data: &[u8]) -> Option<Outcome> {
        let Some(at) = self.lending.find(link, part.loan) else { return Some(Outcome::Invalid) };
        let loan = &mut self.lending.loans[at];
        (loan.begun, loan.qpn) = (true, part.qpn);
        let Some((id, srq)) = loan.srq.and_then(|id| Some((id, self.srqs.get(id.0 as usize)?))) else {
            return Some(Outcome::Invalid);
        };
        let (mrs, pd) = (&self.mrs, srq.pd);
        let mut rest = data;
        self.stats.rx_bytes.add(data.len() as u64);
        let placed = slices(loan.sges.iter().copied(), part.offset, data.len() as u32, |sge, skip, n| {
            let addr =
                mrs.resolve_local(sge.lkey, pd, sge.addr.wrapping_add(u64::from(skip)), n, true).ok()?;
            let (now, later) = rest.split_at_checked(n as usize)?;
            rest = later;
            env.dma_write(addr, now).then_some(())
        });
        if placed.is_none() {
            self.finish_lent(at, id, &Cqe { status: WcStatus::LocProtErr, ..Cqe::default() }, true);
            return Some(Outcome::Operation);
        }
        let end = part.end?;
        if end.flags.contains(WcFlags::WITH_INV)
            && self.mrs.invalidate_remote(end.imm, (pd, part.qpn)).is_err()
        {
            self.finish_lent(at, id, &Cqe { status: WcStatus::RemInvReqErr, ..Cqe::default() }, true);
            return Some(Outcome::ReceivedInError);
        }
        let byte_len = part.offset.wrapping_add(data.len() as u32);
        let cqe = Cqe { byte_len, opcode: WcOpcode::Recv, ..end.cqe() };
        let kept = self.finish_lent(at, id, &cqe, end.solicited);
        Some(if kept { Outcome::Success } else { Outcome::Operation })
    }

    /// A WQE that was lent is done. False: its CQ is full.
    fn finish_lent(&mut self, at: usize, id: SrqId, cqe: &Cqe, solicited: bool) -> bool {
        let loan = &self.lending.loans[at];
        let cqe = Cqe { wr_id: loan.wr_id, qpn: loan.qpn, ..*cqe };
        self.lending.end(at);
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

    /// A loan ends without a whole message.
    fn end_loan(&mut self, at: usize, qpn: Qpn, why: Returned) {
        let loan = &mut self.lending.loans[at];
        let Some(id) = loan.srq else { return };
        if why == Returned::Unused && !loan.begun {
            return self.lending.give_back(at);
        }
        loan.qpn = qpn;
        let status = if why == Returned::TooLong { WcStatus::LocLenErr } else { WcStatus::WrFlushErr };
        self.finish_lent(at, id, &Cqe { status, ..Cqe::default() }, true);
    }
}

impl End {
    fn cqe(&self) -> Cqe {
        let End { src_qp, imm, flags, .. } = *self;
        Cqe { src_qp, imm, flags, ..Cqe::default() }
    }
}

/// Says what became of a message.
fn tell_done<E: Env>(env: &mut E, link: LinkId, part: &Part, outcome: Option<Outcome>) {
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
        let home = self.shared.abroad.home;
        if block == 0 || (home != 0 && home != u32::from(block)) {
            return Err(NicError::Invalid);
        }
        self.shared.lending.make_ready()?;
        self.shared.abroad.make_ready()?;
        self.shared.pds.get_mut(xrcd.0 as usize).ok_or(NicError::NotFound)?.shared = true;
        self.shared.abroad.home = u32::from(block);
        Ok(())
    }

    /// The number by which requests name an SRQ.
    pub fn srq_number(&self, srq: SrqId) -> u32 {
        let domain = self.shared.srqs.get(srq.0 as usize).and_then(|srq| srq.xrc.as_ref());
        match domain {
            Some((domain, _)) if self.shared.is_shared(*domain) => {
                self.shared.abroad.home << QPN_BLOCK_SHIFT | srq.0
            }
            _ => srq.0,
        }
    }

    /// A message from the card at the other end of `link`, which is in `domain`.
    pub fn handle_relay(&mut self, env: &mut E, now: Nanos, link: LinkId, domain: PdId, message: &Relay<'_>) {
        match *message {
            Relay::Ask { srq, count } => self.shared.lend(env, link, domain, srq, count),
            Relay::Data { part, data } => {
                let place = |sh: &mut Shared<E>, env: &mut E| sh.place_lent(env, link, &part, data);
                let outcome = self.shared.take_part(env, link, &part, place);
                tell_done(env, link, &part, outcome);
            }
            Relay::Write { part, place, data } => {
                let from = (link, domain);
                let write = |sh: &mut Shared<E>, env: &mut E| sh.write_lent(env, from, &part, &place, data);
                let outcome = self.shared.take_part(env, link, &part, write);
                tell_done(env, link, &part, outcome);
            }
            Relay::Execute { from, place, what } => {
                self.shared.execute_lent(env, (link, domain), &from, &place, what);
            }
            Relay::Fetch { from, place, wanted } => {
                self.shared.fetch_lent(env, (link, domain), &from, &place, &wanted);
            }
            Relay::Return { loan, qpn, why } => {
                if let Some(at) = self.shared.lending.find(link, loan) {
                    self.shared.end_loan(at, qpn, why);
                }
            }
            Relay::Lend { srq, loan, room } => {
                if !self.shared.abroad.lent(link, srq, loan, room) {
                    env.relay(link, &Relay::Return { loan, qpn: 0, why: Returned::Unused });
                    return;
                }
                self.tell_waiting(env, now, (link, srq), |cx| cx.awaited(true));
            }
            Relay::Refuse { srq, gone } => {
                self.shared.abroad.refused(link, srq, gone);
                let what = |cx: &mut Ctx<'_, E>| if gone { cx.nobodys() } else { cx.awaited(false) };
                self.tell_waiting(env, now, (link, srq), what);
            }
            Relay::Done { qpn, serial, outcome, found } => {
                if let Some(mut cx) = self.context(env, qpn, now) {
                    cx.confirmed(link, serial, outcome, found);
                }
            }
            Relay::Bytes { qpn, epoch, psn, outcome, data } => {
                if let Some(mut cx) = self.context(env, qpn, now) {
                    cx.fetched((link, epoch), psn, outcome, data);
                }
            }
            Relay::Recall { srq } => {
                while let Some(loan) = self.shared.abroad.recalled(link, srq) {
                    env.relay(link, &Relay::Return { loan, qpn: 0, why: Returned::Unused });
                }
            }
        }
    }

    /// The card at the other end of `link` is gone: what it had comes back, and what it owes will not come.
    pub fn handle_unlink(&mut self, env: &mut E, now: Nanos, link: LinkId) {
        for at in 0..self.shared.lending.loans.len() {
            if self.shared.lending.loans[at].link == Some(link) {
                let qpn = self.shared.lending.loans[at].qpn;
                self.shared.end_loan(at, qpn, Returned::Unused);
            }
        }
        self.shared.lending.failed.retain(|(of, ..)| *of != link);
        /* one that is cut off waits for nothing of that link any more */
        for _ in 0..self.qps.len() {
            let abroad = &self.shared.abroad;
            let waits = |qp: &&Qp<E>| qp.resp.depends_on(abroad, qp.pd, link);
            let Some(qpn) = self.qps.each().find(waits).map(|qp| qp.qpn) else { break };
            if let Some(mut cx) = self.context(env, qpn, now) {
                cx.cut(link);
            }
        }
        self.shared.abroad.cut(link);
    }

    /// Tells the QPs that wait for a WQE of another card's SRQ.
    fn tell_waiting(
        &mut self,
        env: &mut E,
        now: Nanos,
        (link, srq): (LinkId, u32),
        what: impl Fn(&mut Ctx<'_, E>),
    ) {
        while let Some(qpn) = self.shared.abroad.next_waiting(link, srq) {
            if let Some(mut cx) = self.context(env, qpn, now)
                && cx.waits_for(link, srq)
            {
                what(&mut cx);
            }
        }
    }
}
