//! The asking half of an end: WQEs into requests. What becomes of them: `completer.rs`.

use starverbs_core::env::{SendQueue, SendRequest};
use starverbs_core::mr::{WindowBind, WindowType};
use starverbs_core::transport::slices;
use starverbs_core::types::{SendOp, SendWqe};
use starverbs_core::{QpState, SendFlags, WcStatus};
use starverbs_rings::{DataRoom, SendRemote};

use super::direct::DirectResult;
use super::end::{Ctx, LocalEnd, TriesLeft};
use super::record::{BODY, CHUNK, LocalRecord, flag};
use crate::info::MAX_MSG;
use crate::memory;

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
    pub(super) end: u32,
    /// Its number
    pub(super) seq: u32,
    pub(super) progress: Progress,
    /// It is one of the READs and the like, and its place says that it is done
    pub(super) reads: bool,
    /// It makes a completion
    pub(super) completes: bool,
}

/// How a step ended.
pub(super) enum StepEnd {
    Asked,
    NoRoom,
    Failed(WcStatus),
}

impl LocalEnd {
    #[inline]
    pub(super) fn slot(&self, index: u32) -> usize {
        index as usize & (self.asked.len() - 1)
    }

    /// Where the next WQE that is asked for stands.
    #[inline]
    pub(super) fn next_asked(&self) -> &RequestedWqe {
        &self.asked[self.slot(self.next)]
    }

    /// Asks for what is posted, as far as it may begin and there is room.
    #[inline(never)]
    pub(super) fn ask(&mut self, ctx: &mut Ctx<'_>) {
        if !matches!(self.state, QpState::Rts | QpState::Sqd) || self.fault.is_some() {
            return;
        }
        if matches!(self.tries, TriesLeft::Gone | TriesLeft::Silent) && self.finds_nobody(ctx) {
            return;
        }
        if self.waits || self.rnr_until != 0 {
            return;
        }
        let posted = self.of.sq.posted();
        while self.next != posted {
            let wqe = self.of.sq.request(self.next);
            let short = self.is_short_send(&wqe) && self.ask_short(ctx, &wqe);
            if !short && !self.ask_next(ctx, &wqe) {
                return;
            }
        }
    }

    /// Whether WQE `next` is a SEND that a record has room for, and that waits for nothing.
    #[inline]
    fn is_short_send(&self, wqe: &SendRequest) -> bool {
        wqe.op.is_send() && wqe.length as usize <= BODY && self.reads == 0 && self.state == QpState::Rts
    }

    /// Asks for WQE `next`, or a piece of it. False: nothing more can be asked for now.
    #[inline(never)]
    fn ask_next(&mut self, ctx: &mut Ctx<'_>, wqe: &SendRequest) -> bool {
        if self.offset == 0 {
            if self.state == QpState::Sqd || self.must_wait(wqe) {
                return false;
            }
            if let Err(status) = self.admit(wqe) {
                self.fail_next(ctx, status);
                return false;
            }
            if !wqe.op.is_send() && self.direct.is_some() {
                match self.execute_direct(ctx, wqe) {
                    DirectResult::Done => return true,
                    DirectResult::Wait => return false,
                    DirectResult::Ask => {}
                }
            }
        }
        let step = match wqe.op {
            SendOp::LocalInv | SendOp::BindMw => self.do_own(ctx, &self.whole(wqe)),
            SendOp::Read | SendOp::CmpSwap | SendOp::FetchAdd | SendOp::Flush => {
                self.ask_word(ctx, &self.whole(wqe))
            }
            SendOp::Write | SendOp::WriteImm if wqe.length as usize <= BODY && self.ask_short(ctx, wqe) => {
                return true;
            }
            _ => self.ask_data(ctx, wqe),
        };
        match step {
            StepEnd::Asked => return true,
            StepEnd::NoRoom => {
                self.waits = ctx.env.channels.await_room(self.of.channels[0], self.of.qpn);
            }
            StepEnd::Failed(status) => self.fail_next(ctx, status),
        }
        false
    }

    /// All of WQE `next`, of which this is known.
    #[inline(never)]
    pub(super) fn whole(&self, known: &SendRequest) -> SendWqe {
        let SendRequest { op, flags, length } = *known;
        SendWqe { op, flags, length, ..self.of.sq.wqe(self.next) }
    }

    /// Checks that need nothing but the WQE.
    #[inline(always)]
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

    /// Asks for WQE `next`, a SEND or WRITE that a record has room for, if its data lies in one piece. False:
    /// [`LocalEnd::ask_data`] is to look why that is not so, or finds no room.
    #[inline(always)]
    fn ask_short(&mut self, ctx: &mut Ctx<'_>, wqe: &SendRequest) -> bool {
        let record = self.record(wqe);
        let Some(from) = self.one_piece(ctx, wqe, false) else { return false };
        let Some(asker) = ctx.env.channels.open_asker(self.of.channels[0]) else { return false };
        let Ok(Some(room)) = asker.room(0) else { return false };
        let flags = flag::FIRST | flag::LAST | flag::ACKS | self.plain_flags(wqe);
        let record = LocalRecord { len: wqe.length, flags, at: self.expected, ..record };
        let body = record.write_to(room);
        if wqe.length > 0 {
            // SAFETY: so many bytes lie there, for which the body has room.
            unsafe { memory::copy_short(body, from, wqe.length as usize) };
        }
        let end = asker.ask(room, Some(self.of.qpn));
        ctx.env.channels.note_asked(self.of.channels[0]);
        ctx.stats().tx_bytes.add(u64::from(wqe.length));
        self.begun(ctx, end, wqe, Progress::Executes);
        true
    }

    /// Where all of WQE `next`'s data lies, which may be written if `write`. `None`: in several pieces, or
    /// not in plain memory, or no key opens it.
    #[inline(always)]
    pub(super) fn one_piece(&self, ctx: &Ctx<'_>, wqe: &SendRequest, write: bool) -> Option<*mut u8> {
        let sq = &self.of.sq;
        if wqe.flags.contains(SendFlags::INLINE) {
            let from = sq.inline(self.next);
            return (!write && wqe.length <= from.len).then_some(from.addr as *mut u8);
        }
        let Some(sge) = sq.sges(self.next).next() else {
            return (wqe.length == 0).then_some(std::ptr::null_mut());
        };
        let host = ctx.mrs().resolve_local(sge.lkey, self.of.pd, sge.addr, wqe.length, write).ok()?;
        (sge.len >= wqe.length && !memory::marked(host)).then_some(host as *mut u8)
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
        first | last | self.plain_flags(wqe)
    }

    /// Of any record of WQE `next`.
    #[inline]
    fn plain_flags(&self, wqe: &SendRequest) -> u8 {
        let solicited = if wqe.flags.contains(SendFlags::SOLICITED) { flag::SOLICITED } else { 0 };
        let no_more = if self.tries == TriesLeft::None { flag::NO_MORE } else { 0 };
        let absent = if self.absent && !wqe.op.is_send() { flag::ABSENT } else { 0 };
        solicited | no_more | absent
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
        ctx.stats().tx_bytes.add(u64::from(len));
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
            let bound = ctx.mrs_mut().bind(&WindowBind::of(wqe, self.id()));
            self.windows |= bound == Ok(WindowType::Two);
            bound.is_ok()
        } else {
            ctx.mrs_mut().invalidate(wqe.rkey, self.id()).is_ok()
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
        if self.una == self.next && self.state != QpState::Err {
            self.next = self.next.wrapping_add(1);
            self.complete_one(ctx, completes);
            return self.completed(ctx);
        }
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
        ctx.stats().local_requests.inc();
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
        let ((env, mrs), pd) = (ctx.memory(), self.of.pd);
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

    pub(super) fn raise_fault(&mut self, ctx: &mut Ctx<'_>) {
        if let Some((at, status)) = self.fault
            && at == self.una
        {
            self.fault = None;
            self.fail_oldest(ctx, status);
        }
    }
}
