//! The asking half of an end: WQEs into requests, and what becomes of them.

use starverbs_core::env::SendQueue;
use starverbs_core::mr::{WindowBind, WindowType};
use starverbs_core::transport::{RNR_TIMER_10US, slices};
use starverbs_core::types::{SendOp, SendWqe};
use starverbs_core::{Nanos, QpState, SendFlags, WcStatus};
use starverbs_rings::{DataRoom, SendRemote, SendRequest};

use super::direct::DirectResult;
use super::end::{Ctx, LocalEnd, TriesLeft};
use super::record::{BODY, CHUNK, LocalRecord, answer, flag};
use crate::clock;
use crate::info::MAX_MSG;

/// How long after which a peer that is not ready is asked again.
const RETRY: Nanos = 2_000_000;

/// A peer is not silent before that, ns. On a busy host the scheduler leaves a process out for half a second,
/// where a card would answer; of one that has ended the kernel tells at once.
const LEAST_SILENCE: Nanos = 2_000_000_000;

/// No answer comes to a record behind which so many were written: a turn would have taken it meanwhile.
const LATE: u32 = 1 << 12;

/// How it stands with a WQE that was asked for.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Progress {
    /// Done; or done by ourselves
    #[default]
    Done,
    /// It is, once its place in the channel is given back
    Executes,
    /// It is, once it is answered
    Answers,
}

/// A WQE that was asked for.
#[derive(Clone, Copy, Default)]
pub(super) struct RequestedWqe {
    /// Records up to the end of its request
    end: u32,
    /// Its number
    seq: u32,
    progress: Progress,
    /// It is one of the READs and the like, and its place says that it is done
    reads: bool,
    /// It makes a completion
    completes: bool,
}

/// How a step ended.
pub(super) enum StepEnd {
    Asked,
    NoRoom,
    Failed(WcStatus),
}

impl LocalEnd {
    #[inline]
    fn slot(&self, index: u32) -> usize {
        index as usize & (self.asked.len() - 1)
    }

    /// Asks for what is posted, as far as it may begin and there is room.
    #[inline(never)]
    pub(super) fn ask(&mut self, ctx: &mut Ctx<'_>) {
        let may = matches!(self.state, QpState::Rts | QpState::Sqd) && self.fault.is_none();
        if matches!(self.tries, TriesLeft::Gone | TriesLeft::Silent) && (!may || self.finds_nobody(ctx)) {
            return;
        }
        if !may || self.waits || self.rnr_until != 0 {
            return;
        }
        let posted = self.of.sq.posted();
        while self.next != posted {
            let wqe = self.of.sq.request(self.next);
            if self.offset == 0 {
                if self.state == QpState::Sqd || self.must_wait(&wqe) {
                    return;
                }
                if let Err(status) = self.admit(&wqe) {
                    return self.fail_next(ctx, status);
                }
                if !wqe.op.is_send() && self.direct.is_some() {
                    match self.execute_direct(ctx, &wqe) {
                        DirectResult::Done => continue,
                        DirectResult::Wait => return,
                        DirectResult::Ask => {}
                    }
                }
            }
            let step = match wqe.op {
                SendOp::LocalInv | SendOp::BindMw => self.do_own(ctx, &self.whole(&wqe)),
                SendOp::Read | SendOp::CmpSwap | SendOp::FetchAdd | SendOp::Flush => {
                    self.ask_word(ctx, &self.whole(&wqe))
                }
                _ => self.ask_data(ctx, &wqe),
            };
            match step {
                StepEnd::Asked => {}
                StepEnd::NoRoom => {
                    self.waits = ctx.env.channels.await_room(self.of.channels[0], self.of.qpn);
                    return;
                }
                StepEnd::Failed(status) => return self.fail_next(ctx, status),
            }
        }
    }

    /// All of WQE `next`, of which this is known.
    #[inline(never)]
    pub(super) fn whole(&self, known: &SendRequest) -> SendWqe {
        let SendRequest { op, flags, length } = *known;
        SendWqe { op, flags, length, ..self.of.sq.wqe(self.next) }
    }

    /// Checks that need nothing but the WQE.
    #[inline]
    pub(super) fn admit(&self, wqe: &SendRequest) -> Result<(), WcStatus> {
        if wqe.op.is_send() {
            return if wqe.length > MAX_MSG { Err(WcStatus::LocLenErr) } else { Ok(()) };
        }
        let word = wqe.op.is_atomic() || wqe.op == SendOp::AtomicWrite;
        if wqe.op == SendOp::Malformed
            || wqe.op.is_rpc()
            || (wqe.op.is_answered() && self.terms.max_rd_atomic == 0)
        {
            return Err(WcStatus::LocQpOpErr);
        }
        if wqe.length > MAX_MSG || (word && wqe.length != 8) {
            return Err(WcStatus::LocLenErr);
        }
        Ok(())
    }

    /// Fences, and READs and the like beyond what the peer accepts.
    #[inline]
    fn must_wait(&self, wqe: &SendRequest) -> bool {
        self.reads > 0
            && (wqe.flags.contains(SendFlags::FENCE)
                || (wqe.op.is_answered() && self.reads >= self.terms.max_rd_atomic))
    }

    /// Of WQE `next`, without data.
    #[inline]
    pub(super) fn record(&self, wqe: &SendRequest) -> LocalRecord {
        let SendRemote { addr, rkey, imm } = self.of.sq.remote(self.next);
        let mut record = LocalRecord {
            op: wqe.op as u8,
            epoch: self.of.epochs[0],
            to: self.of.peer,
            from: self.of.qpn,
            seq: self.seq,
            imm,
            rkey,
            total: wqe.length,
            ..LocalRecord::default()
        };
        record.set_addr(addr);
        record
    }

    /// A piece of a SEND or WRITE.
    #[inline]
    fn ask_data(&mut self, ctx: &mut Ctx<'_>, wqe: &SendRequest) -> StepEnd {
        let (channel, offset) = (self.of.channels[0], self.offset);
        if let Some(record) = self.rendezvous(ctx, wqe, offset) {
            return self.ask_rendezvous(ctx, wqe, record);
        }
        let len = (wqe.length - offset).min(CHUNK);
        let in_area = if len as usize <= BODY { 0 } else { len };
        let Some(room) = ctx.env.channels.room(channel, in_area) else { return StepEnd::NoRoom };
        let mut flags = self.flags_of(wqe, len);
        if self.absent && !wqe.op.is_send() {
            flags |= flag::ABSENT;
        }
        let at = if in_area == 0 { self.expected } else { room.at };
        if in_area == 0 {
            flags |= flag::ACKS;
        }
        let mut record = LocalRecord { len, flags, at, ..self.record(wqe) };
        record.set_addr(record.addr().wrapping_add(u64::from(offset)));
        let body = record.write_to(room);
        let to = if in_area == 0 { body } else { room.to };
        // SAFETY: the body or the piece of the data area has room for so many bytes.
        if len > 0 && unsafe { self.gather(ctx, wqe, len, to) }.is_none() {
            return StepEnd::Failed(WcStatus::LocProtErr);
        }
        self.asked_piece(ctx, wqe, room, len);
        StepEnd::Asked
    }

    /// Of a record with the next `len` bytes of WQE `next`.
    #[inline]
    fn flags_of(&self, wqe: &SendRequest, len: u32) -> u8 {
        let first = if self.offset == 0 { flag::FIRST } else { 0 };
        let last = if self.offset + len == wqe.length { flag::LAST } else { 0 };
        let solicited = if wqe.flags.contains(SendFlags::SOLICITED) { flag::SOLICITED } else { 0 };
        let no_more = if self.tries == TriesLeft::None { flag::NO_MORE } else { 0 };
        first | last | solicited | no_more
    }

    /// A piece of a SEND that the peer fetches.
    fn ask_rendezvous(&mut self, ctx: &mut Ctx<'_>, wqe: &SendRequest, of_piece: LocalRecord) -> StepEnd {
        let Some(room) = ctx.env.channels.room(self.of.channels[0], 0) else { return StepEnd::NoRoom };
        let mut record = LocalRecord { at: self.expected, flags: of_piece.flags | flag::ACKS, ..of_piece };
        record.flags |= self.flags_of(wqe, record.len);
        record.write_to(room);
        self.asked_piece(ctx, wqe, room, record.len);
        StepEnd::Asked
    }

    /// A record was written with a piece of this length.
    #[inline]
    fn asked_piece(&mut self, ctx: &mut Ctx<'_>, wqe: &SendRequest, room: DataRoom, len: u32) {
        ctx.stats.tx_bytes.add(u64::from(len));
        let last = self.offset + len == wqe.length;
        let end = ctx.env.channels.ask(self.of.channels[0], room, last.then_some(self.of.qpn));
        if last {
            self.begun(ctx, end, wqe, Progress::Executes);
        } else {
            self.offset += len;
        }
    }

    /// A READ, an atomic or a FLUSH.
    #[inline(never)]
    fn ask_word(&mut self, ctx: &mut Ctx<'_>, wqe: &SendWqe) -> StepEnd {
        let channel = self.of.channels[0];
        let Some(room) = ctx.env.channels.room(channel, 0) else { return StepEnd::NoRoom };
        let absent = if self.absent { flag::ABSENT } else { 0 };
        let flags = flag::FIRST | flag::LAST | flag::ACKS | absent;
        let request = SendRequest { op: wqe.op, flags: wqe.flags, length: wqe.length };
        let mut record = LocalRecord { flags, at: self.expected, ..self.record(&request) };
        let mut progress = Progress::Answers;
        match wqe.op {
            SendOp::Read => {}
            SendOp::Flush => {
                record.total = wqe.compare_add as u32;
                progress = Progress::Executes;
            }
            _ => record.set_operands([wqe.compare_add, wqe.swap]),
        }
        record.write_to(room);
        let end = ctx.env.channels.ask(channel, room, Some(self.of.qpn));
        self.begun(ctx, end, &request, progress);
        StepEnd::Asked
    }

    /// What the card does by itself (IBTA 10.6.7.2).
    #[cold]
    #[inline(never)]
    pub(super) fn do_own(&mut self, ctx: &mut Ctx<'_>, wqe: &SendWqe) -> StepEnd {
        let done = if wqe.op == SendOp::BindMw {
            let bound = ctx.mrs.bind(&WindowBind::of(wqe, self.id()));
            self.windows |= bound == Ok(WindowType::Two);
            bound.is_ok()
        } else {
            ctx.mrs.invalidate(wqe.rkey, self.id()).is_ok()
        };
        if !done {
            return StepEnd::Failed(WcStatus::MwBindErr);
        }
        self.did_own(ctx, wqe.flags);
        StepEnd::Asked
    }

    /// WQE `next`, with these flags, is done, without a request.
    #[inline]
    pub(super) fn did_own(&mut self, ctx: &mut Ctx<'_>, flags: SendFlags) {
        let completes = self.completes(flags);
        let slot = self.slot(self.next);
        self.asked[slot] = RequestedWqe { seq: self.seq, completes, ..RequestedWqe::default() };
        self.next = self.next.wrapping_add(1);
        ctx.env.channels.count(self.of.channels[0]);
        self.complete(ctx);
    }

    /// WQE `next` was asked for as a whole.
    #[inline]
    fn begun(&mut self, ctx: &mut Ctx<'_>, end: u32, wqe: &SendRequest, progress: Progress) {
        if self.una == self.next {
            /* what was given back before is of no request under way */
            self.given = end.wrapping_sub(1);
        }
        let reads = wqe.op.is_answered();
        let slot = self.slot(self.next);
        self.asked[slot] = RequestedWqe {
            end,
            seq: self.seq,
            progress,
            reads: reads && progress == Progress::Executes,
            completes: self.completes(wqe.flags),
        };
        self.next = self.next.wrapping_add(1);
        (self.seq, self.offset) = (self.seq.wrapping_add(1), 0);
        self.reads += u8::from(reads);
        ctx.stats.local_requests.inc();
    }

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

    /// Copies `len` bytes of WQE `next`, from where it is, to memory of the channel.
    ///
    /// # Safety
    /// [to, to + len) can be written.
    #[inline]
    unsafe fn gather(&mut self, ctx: &mut Ctx<'_>, wqe: &SendRequest, len: u32, to: *mut u8) -> Option<()> {
        let (sq, offset) = (&self.of.sq, self.offset);
        if wqe.flags.contains(SendFlags::INLINE) {
            let from = sq.inline(self.next);
            let there = offset.checked_add(len)? <= from.len;
            // SAFETY: the caller's terms, and the look before.
            return (there && unsafe { ctx.env.copy_out(from.addr + u64::from(offset), to, len as usize) })
                .then_some(());
        }
        let (mrs, env, pd) = (&*ctx.mrs, &mut *ctx.env, self.of.pd);
        let mut at = to;
        slices(sq.sges(self.next), offset, len, |sge, skip, n| {
            let addr = sge.addr.wrapping_add(u64::from(skip));
            let host = mrs.resolve_local(sge.lkey, pd, addr, n, false).ok()?;
            // SAFETY: the slices are `len` bytes in all, and so lie in the room.
            let there = unsafe { env.copy_out(host, at, n as usize) };
            at = at.wrapping_add(n as usize);
            there.then_some(())
        })
    }

    /// WQE `next` cannot be asked for: earlier ones finish first.
    #[cold]
    pub(super) fn fail_next(&mut self, ctx: &mut Ctx<'_>, status: WcStatus) {
        self.fault = Some((self.next, status));
        self.raise_fault(ctx);
    }

    fn raise_fault(&mut self, ctx: &mut Ctx<'_>) {
        if let Some((at, status)) = self.fault
            && at == self.una
        {
            self.fault = None;
            self.fail_oldest(ctx, status);
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

    #[inline]
    fn go_on(&mut self, ctx: &mut Ctx<'_>) {
        self.complete(ctx);
        if self.next != self.of.sq.posted() {
            self.ask(ctx);
        }
    }

    /// Completes WQEs that are done, as far as they are the oldest.
    #[inline]
    fn complete(&mut self, ctx: &mut Ctx<'_>) {
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
            self.rnr_left = self.terms.rnr_retry;
            if self.passed != 0 && !self.begins_anew(ctx) {
                self.passed = 0;
            }
            if !matches!(self.tries, TriesLeft::Gone | TriesLeft::Silent) && !self.has_given_up() {
                (self.gone_at, self.tries) = (0, TriesLeft::Many);
            }
            self.look_if_drained(ctx);
        }
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
        ctx.stats.rx_bytes.add(u64::from(record.len));
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
        let (mrs, env, pd) = (&*ctx.mrs, &mut *ctx.env, self.of.pd);
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
        ctx.stats.rcvd_rnr.inc();
        let left = self.rnr_left;
        let Some(index) = self.stop_at(ctx, record.seq) else { return };
        let wait = Nanos::from(RNR_TIMER_10US[record.imm as usize & 31]) * 10_000;
        self.go_back(ctx, index, record.seq, wait);
        self.rnr_left = left;
        if self.terms.rnr_retry != 7 {
            if left == 0 {
                ctx.stats.rnr_retry_exceeded.inc();
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
                ctx.stats.retry_exceeded.inc();
                return self.fail_oldest(ctx, WcStatus::RetryExcErr);
            }
        }
        self.go_back(ctx, index, record.seq, RETRY);
    }

    #[cold]
    fn on_refusal(&mut self, ctx: &mut Ctx<'_>, record: &LocalRecord) {
        let status = u8::try_from(record.imm).ok().and_then(WcStatus::from_code);
        match status {
            Some(WcStatus::RemInvReqErr) => ctx.stats.rcvd_nak_invalid.inc(),
            Some(WcStatus::RemAccessErr) => ctx.stats.rcvd_nak_access.inc(),
            Some(WcStatus::RemOpErr) => ctx.stats.rcvd_nak_op.inc(),
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
            ctx.stats.retry_exceeded.inc();
            self.fail_oldest(ctx, WcStatus::RetryExcErr);
        }
    }
}
