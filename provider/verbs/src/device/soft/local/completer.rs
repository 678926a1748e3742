//! The completing half of an end's requester: what becomes of requests that were made.
//!
//! A request is done once its place in the channel is given back, or the peer's own requests say that it was
//! executed, or with its answer; then its WQE completes, in order. What was refused, or finds nobody, is
//! asked for again or fails.

use starverbs_core::env::SendQueue;
use starverbs_core::transport::{RNR_TIMER_10US, slices};
use starverbs_core::{Nanos, QpState, WcStatus};

use super::end::{Ctx, LocalEnd, TriesLeft};
use super::record::{LocalRecord, answer, flag};
use super::requester::{Progress, RequestedWqe};
use crate::clock;

/// How long after which a peer that is not ready is asked again.
const RETRY: Nanos = 2_000_000;

/// No answer comes to a record behind which so many were written: a turn would have taken it meanwhile.
const LATE: u32 = 1 << 12;

/// A peer is not silent before that, ns. On a busy host the scheduler leaves a process out for half a second,
/// where a card would answer; of one that has ended the kernel tells at once.
const LEAST_SILENCE: Nanos = 2_000_000_000;

impl LocalEnd {
    /// Whether a WQE that was asked for is done.
    #[inline]
    fn is_done(&self, asked: &RequestedWqe) -> bool {
        match asked.progress {
            Progress::Done => true,
            Progress::Executes => {
                self.given.wrapping_sub(asked.end) as i32 >= 0
                    || self.acked.wrapping_sub(asked.seq) as i32 > 0
            }
            Progress::Answers => false,
        }
    }

    /// Places in the channel up to `given` were given back.
    #[inline]
    pub(super) fn on_progress(&mut self, ctx: &mut Ctx<'_>, given: u32) {
        self.given = given;
        self.go_on(ctx);
    }

    /// The peer has executed so many requests of this end in all.
    #[inline]
    pub(super) fn on_ack(&mut self, ctx: &mut Ctx<'_>, executed: u32) {
        if std::mem::replace(&mut self.acked, executed) != executed && self.una != self.next {
            self.go_on(ctx);
        }
    }

    #[inline(always)]
    fn go_on(&mut self, ctx: &mut Ctx<'_>) {
        self.complete_here(ctx);
        if self.next != self.of.sq.posted() {
            self.ask(ctx);
        }
    }

    /// Completes WQEs that are done, as far as they are the oldest.
    #[inline(never)]
    pub(super) fn complete(&mut self, ctx: &mut Ctx<'_>) {
        self.complete_here(ctx);
    }

    /// The same in the place of the call.
    #[inline(always)]
    fn complete_here(&mut self, ctx: &mut Ctx<'_>) {
        let first = self.una;
        if self.state == QpState::Err {
            return;
        }
        while self.una != self.next {
            let asked = self.asked[self.slot(self.una)];
            if !self.is_done(&asked) {
                break;
            }
            self.answered |= asked.progress == Progress::Executes;
            self.reads = self.reads.saturating_sub(u8::from(asked.reads));
            self.complete_one(ctx, asked.completes);
        }
        if self.una != first {
            ctx.env.channels.forget(self.of.channels[0], self.una.wrapping_sub(first));
            return self.completed(ctx);
        }
        self.raise_fault(ctx);
    }

    /// WQEs have completed.
    #[inline(always)]
    pub(super) fn completed(&mut self, ctx: &mut Ctx<'_>) {
        self.rnr_left = self.terms.rnr_retry;
        if self.passed != 0 && !self.begins_anew(ctx) {
            self.passed = 0;
        }
        if !matches!(self.tries, TriesLeft::Gone | TriesLeft::Silent) && !self.has_given_up() {
            (self.gone_at, self.tries) = (0, TriesLeft::Many);
        }
        self.look_if_drained(ctx);
        self.raise_fault(ctx);
    }

    /// The WQE with a request of this number, which is not done.
    pub(super) fn find(&self, seq: u32) -> Option<u32> {
        let under_way = self.next.wrapping_sub(self.una);
        (0..under_way).map(|n| self.una.wrapping_add(n)).find(|index| {
            let asked = &self.asked[self.slot(*index)];
            asked.seq == seq && !self.is_done(asked)
        })
    }

    /// Whether an answer asks for a request anew that has begun so since. A peer of an older version names no
    /// record.
    fn is_passed(&self, ctx: &mut Ctx<'_>, record: &LocalRecord) -> bool {
        let asks = matches!(record.op, answer::GONE | answer::RNR | answer::COPY) && record.at != 0;
        asks && self.begins_anew(ctx) && self.passed.wrapping_sub(record.at) < LATE
    }

    /// Whether answers to what has begun anew may still come.
    fn begins_anew(&self, ctx: &mut Ctx<'_>) -> bool {
        let mut written = || ctx.env.channels.written(self.of.channels[0]);
        self.passed != 0 && written().wrapping_sub(self.passed) <= LATE
    }

    /// An answer came; `data` are its bytes.
    pub(super) fn on_answer(&mut self, ctx: &mut Ctx<'_>, record: &LocalRecord, data: *const u8) {
        let ours = record.from == self.of.peer && record.epoch == self.of.epochs[0];
        if !ours || self.state == QpState::Err || self.is_passed(ctx, record) {
            return;
        }
        self.answered |= record.op != answer::GONE;
        match record.op {
            answer::DATA | answer::VALUE => self.on_data(ctx, record, data),
            answer::RNR | answer::GONE if self.of.unreliable => self.on_no_taker(ctx, record),
            answer::RNR => self.on_rnr(ctx, record),
            answer::REFUSED => self.on_refusal(ctx, record),
            answer::COPY => self.on_copy(ctx, record),
            _ => self.on_gone(ctx, record),
        }
    }

    fn on_data(&mut self, ctx: &mut Ctx<'_>, record: &LocalRecord, data: *const u8) {
        let Some(index) = self.find(record.seq) else { return };
        let wqe = self.of.sq.wqe(index);
        let slot = self.slot(index);
        let begins = if record.op == answer::DATA { record.total } else { 0 };
        let fits = begins.checked_add(record.len).is_some_and(|end| end <= wqe.length);
        if !wqe.op.brings_data() || self.asked[slot].progress != Progress::Answers || !fits {
            return;
        }
        // SAFETY: so many bytes can be read there, by the record's look or the reader's.
        if record.len > 0 && unsafe { self.scatter(ctx, index, begins, record.len, data) }.is_none() {
            /* what is asked already goes on; this is as far as the program sees it */
            self.fault = Some((index, WcStatus::LocProtErr));
        }
        ctx.stats().rx_bytes.add(u64::from(record.len));
        if record.has(flag::LAST) {
            if self.fault.is_none_or(|(at, _)| at != index) {
                self.asked[slot].progress = Progress::Done;
            }
            self.reads = self.reads.saturating_sub(1);
            self.complete(ctx);
            self.ask(ctx);
        }
    }

    /// Copies what a READ or an atomic brought to where its WQE says.
    ///
    /// # Safety
    /// [from, from + len) can be read.
    unsafe fn scatter(
        &mut self,
        ctx: &mut Ctx<'_>,
        index: u32,
        begins: u32,
        len: u32,
        from: *const u8,
    ) -> Option<()> {
        let ((env, mrs), pd) = (ctx.memory(), self.of.pd);
        let mut at = from;
        slices(self.of.sq.sges(index), begins, len, |sge, skip, n| {
            let addr = sge.addr.wrapping_add(u64::from(skip));
            let host = mrs.resolve_local(sge.lkey, pd, addr, n, true).ok()?;
            // SAFETY: the slices are `len` bytes in all.
            let there = unsafe { env.copy_in(at, host, n as usize) };
            at = at.wrapping_add(n as usize);
            there.then_some(())
        })
    }

    /// The requests before this one were executed, those from it on were not. Gives its WQE.
    pub(super) fn stop_at(&mut self, ctx: &mut Ctx<'_>, seq: u32) -> Option<u32> {
        let index = match self.find(seq) {
            Some(index) => index,
            None if seq == self.seq && self.offset > 0 => self.next,
            None => return None,
        };
        self.answered |= self.una != index;
        self.done_up_to(index);
        self.complete(ctx);
        (self.una == index && self.state != QpState::Err).then_some(index)
    }

    fn done_up_to(&mut self, index: u32) {
        let mut at = self.una;
        while at != index {
            let slot = self.slot(at);
            self.asked[slot].progress = Progress::Done;
            at = at.wrapping_add(1);
        }
    }

    /// All that was asked for completes, whatever becomes of it.
    #[cold]
    pub(super) fn stop_asking(&mut self, ctx: &mut Ctx<'_>) {
        self.rnr_until = 0;
        self.wait_no_more(ctx);
        self.done_up_to(self.next);
        self.complete(ctx);
    }

    /// Room in the channel is of no use.
    #[cold]
    pub(super) fn wait_no_more(&mut self, ctx: &mut Ctx<'_>) {
        if std::mem::take(&mut self.waits) {
            ctx.env.channels.await_room_no_more(self.of.channels[0], self.of.qpn);
        }
    }

    /// Begins anew with this request, in a while.
    pub(super) fn go_back(&mut self, ctx: &mut Ctx<'_>, index: u32, seq: u32, wait: Nanos) {
        ctx.env.channels.forget(self.of.channels[0], self.next.wrapping_sub(index));
        (self.next, self.offset, self.seq, self.reads) = (index, 0, seq, 0);
        /* their numbers are used again: what is refused of them says nothing of those */
        self.passed = ctx.env.channels.written(self.of.channels[0]).max(1);
        /* what cannot be asked for is found anew when its turn comes */
        self.fault = None;
        self.rnr_until = clock::now() + wait;
    }

    /// The peer has no receive (IBTA 9.7.5.2.8): it is asked again when it may have one.
    #[cold]
    fn on_rnr(&mut self, ctx: &mut Ctx<'_>, record: &LocalRecord) {
        ctx.stats().rcvd_rnr.inc();
        let left = self.rnr_left;
        let Some(index) = self.stop_at(ctx, record.seq) else { return };
        let wait = Nanos::from(RNR_TIMER_10US[record.imm as usize & 31]) * 10_000;
        self.go_back(ctx, index, record.seq, wait);
        self.rnr_left = left;
        if self.terms.rnr_retry != 7 {
            if left == 0 {
                ctx.stats().rnr_retry_exceeded.inc();
                return self.fail_oldest(ctx, WcStatus::RnrRetryExcErr);
            }
            self.rnr_left = left - 1;
        }
    }

    /// The peer's queue pair does not answer, as one that is not ready yet, or not any more: it is asked
    /// again until RC's retries would be used up.
    #[cold]
    fn on_gone(&mut self, ctx: &mut Ctx<'_>, record: &LocalRecord) {
        let Some(index) = self.stop_at(ctx, record.seq) else { return };
        match self.tries {
            TriesLeft::Many | TriesLeft::Gone | TriesLeft::Silent => self.await_the_end(),
            TriesLeft::One => {}
            TriesLeft::None => {
                ctx.stats().retry_exceeded.inc();
                return self.fail_oldest(ctx, WcStatus::RetryExcErr);
            }
        }
        self.go_back(ctx, index, record.seq, RETRY);
    }

    #[cold]
    fn on_refusal(&mut self, ctx: &mut Ctx<'_>, record: &LocalRecord) {
        let status = u8::try_from(record.imm).ok().and_then(WcStatus::from_code);
        match status {
            Some(WcStatus::RemInvReqErr) => ctx.stats().rcvd_nak_invalid.inc(),
            Some(WcStatus::RemAccessErr) => ctx.stats().rcvd_nak_access.inc(),
            Some(WcStatus::RemOpErr) => ctx.stats().rcvd_nak_op.inc(),
            _ => return,
        }
        if let (Some(_), Some(status)) = (self.stop_at(ctx, record.seq), status) {
            self.fail_oldest(ctx, status);
        }
    }

    /// The peer's process is gone.
    #[cold]
    pub(super) fn lose_peer(&mut self) {
        if self.state == QpState::Err {
            return;
        }
        self.end_patience();
        (self.tries, self.rnr_until) = (TriesLeft::Gone, 0);
        if self.una != self.of.sq.posted() {
            self.await_the_end();
        }
    }

    /// One that waits for ever would never know that its peer is gone.
    pub(super) fn end_patience(&mut self) {
        self.terms.patience = self.terms.patience.max(1);
    }

    /// What was posted fails when RC's would have, without an answer.
    #[cold]
    pub(super) fn await_the_end(&mut self) {
        if self.gone_at == 0 && self.terms.patience != 0 {
            self.gone_at = clock::now() + self.terms.patience;
        }
    }

    /// Nobody has answered anything in this channel for so long.
    #[cold]
    pub(super) fn on_silence(&mut self, ctx: &mut Ctx<'_>, quiet: Nanos) {
        let waits = self.una != self.of.sq.posted() && self.rnr_until == 0 && self.state != QpState::Err;
        if waits && self.of.unreliable && self.tries != TriesLeft::Gone && quiet >= LEAST_SILENCE {
            return self.stop_waiting(ctx);
        }
        if waits && self.terms.patience != 0 && quiet >= self.terms.patience.max(LEAST_SILENCE) {
            ctx.stats().retry_exceeded.inc();
            self.fail_oldest(ctx, WcStatus::RetryExcErr);
        }
    }
}
