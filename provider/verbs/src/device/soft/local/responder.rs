//! The answering half of an end: requests of the peer's queue pair, executed with this card's memory and
//! queues.
//!
//! A request that is not executed is refused in the answers before its place in the channel is given back,
//! and so are all behind it, silently, until the requester has begun anew with it.

use starverbs_core::transport::slices;
use starverbs_core::types::SendOp;
use starverbs_core::wire::headers::Feth;
use starverbs_core::{
    Access, AsyncEvent, Cqe, Dma, FlushLevel, Host, QpState, QpType, Qpn, Sge, WcFlags, WcOpcode, WcStatus,
};

use super::direct::Direct;
use super::end::{Ctx, LocalEnd};
use super::record::{BODY, CHUNK, LocalRecord, answer, flag};
use crate::info::MAX_MSG;
use crate::memory;
use crate::post::offered;

/// The message that is being received.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum LocalInbound {
    /// None: the next record begins one
    #[default]
    Idle,
    /// A SEND, of which so many bytes are there
    Send(u32),
    /// A WRITE, likewise
    Write(u32),
    /// One of UC that is dropped
    Dropped,
}

/// A READ that is being answered.
#[derive(Clone, Copy)]
pub(super) struct ReadAnswer {
    /// The QP that answers
    pub(super) qpn: Qpn,
    request: LocalRecord,
    /// Bytes that were answered
    sent: u32,
}

impl ReadAnswer {
    /// Of a READ that was admitted.
    pub(super) fn new(qpn: Qpn, request: LocalRecord) -> ReadAnswer {
        ReadAnswer { qpn, request, sent: 0 }
    }

    /// Bytes of its next record.
    pub(super) fn next_len(&self) -> u32 {
        (self.request.total - self.sent).min(CHUNK)
    }
}

/// Why bytes found no place in a receive.
pub(super) enum DeliveryError {
    TooLong,
    Protection,
}

/// Whether a list has room for so many bytes.
#[inline]
fn have_room(sges: &[Sge], bytes: u64) -> bool {
    let mut left = bytes;
    for sge in sges {
        if left <= u64::from(sge.len) {
            return true;
        }
        left -= u64::from(sge.len);
    }
    left == 0
}

/// Whether the requester is right in that nothing is mapped where its request leads. It may also have found
/// what the kernel lets no other process reach.
#[inline]
fn is_absent(record: &LocalRecord, host: u64, len: u32, write: bool) -> bool {
    let looks = record.has(flag::ABSENT) && !memory::marked(host);
    looks && memory::probe(host, host.saturating_add(len.into()), write).is_err()
}

/// What the responder has to answer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum LocalReply {
    /// Nothing: that its place is given back says it
    None,
    /// The same, and no request stands behind it
    Last,
    /// The record that lies in [`Channels::reply`](super::channels::Channels::reply)
    Record,
    /// A READ's bytes
    Read,
    /// Not executed: it is to be looked first what of ours is done
    Look,
    /// Not executed: the record is none
    Broken,
}

impl LocalEnd {
    /// A request of the peer; `data` are its bytes.
    #[inline]
    pub(super) fn on_request(
        &mut self,
        ctx: &mut Ctx<'_>,
        record: &LocalRecord,
        data: *const u8,
    ) -> LocalReply {
        if self.state == QpState::Err {
            return ctx.env.channels.reply_with(record.answer(answer::GONE));
        }
        /* what it has executed completes before its message is received */
        if record.has(flag::ACKS) {
            self.on_ack(ctx, record.at);
        }
        let first = record.has(flag::FIRST);
        if record.seq != self.expected || !(first || self.inbound != LocalInbound::Idle) {
            /* behind one that was refused */
            return LocalReply::None;
        }
        if first {
            /* its requester gave the one before up */
            self.inbound = LocalInbound::Idle;
        }
        let op = record.send_op();
        let done = if self.inbound == LocalInbound::Dropped {
            Ok(LocalReply::None)
        } else if self.of.unreliable && !offered(QpType::Uc, op) {
            /* IBTA table 38: UC carries nothing else */
            Err(self.drop_message(ctx))
        } else if op.is_send() {
            self.execute_send(ctx, record, op, data)
        } else if op == SendOp::Read {
            return self.execute_read(ctx, record);
        } else {
            self.execute_other(ctx, record, op, data)
        };
        match done {
            Err(reply) if self.inbound != LocalInbound::Dropped => reply,
            Ok(reply) | Err(reply) => {
                if record.has(flag::LAST) {
                    self.expected = self.expected.wrapping_add(1);
                    self.inbound = LocalInbound::Idle;
                }
                reply
            }
        }
    }

    /// What is neither a SEND nor a READ: the loop of requests is small without it.
    #[inline(never)]
    fn execute_other(
        &mut self,
        ctx: &mut Ctx<'_>,
        record: &LocalRecord,
        op: SendOp,
        data: *const u8,
    ) -> Result<LocalReply, LocalReply> {
        match op {
            SendOp::Write | SendOp::WriteImm => self.execute_write(ctx, record, data),
            SendOp::CmpSwap | SendOp::FetchAdd => self.execute_atomic(ctx, record),
            SendOp::AtomicWrite => self.execute_atomic_write(ctx, record),
            SendOp::Flush => self.execute_flush(ctx, record),
            _ => Err(self.refuse(ctx, record)),
        }
    }

    #[inline]
    fn execute_send(
        &mut self,
        ctx: &mut Ctx<'_>,
        record: &LocalRecord,
        op: SendOp,
        data: *const u8,
    ) -> Result<LocalReply, LocalReply> {
        let received = if let LocalInbound::Send(received) = self.inbound {
            received
        } else if self.take_recv(ctx) {
            0
        } else {
            return Err(self.not_ready(ctx, record));
        };
        let placed = if u64::from(received) + u64::from(record.len) > u64::from(MAX_MSG) {
            Err(DeliveryError::TooLong)
        } else if record.is_rendezvous() {
            let Some(placed) = self.fetch(ctx, record, received) else {
                return Err(self.want_a_copy(ctx, record));
            };
            placed
        } else {
            self.place(ctx, record, data, received)
        };
        match placed {
            Ok(()) => {}
            Err(why) => return self.fail_delivery(ctx, record, &why),
        }
        let total = received + record.len;
        if !record.has(flag::LAST) {
            self.inbound = LocalInbound::Send(total);
            return Ok(LocalReply::None);
        }
        if op == SendOp::SendInv && !self.invalidate(ctx, record.imm) {
            /* the message has arrived, and is acknowledged (class J) */
            self.fail_recv(ctx, WcStatus::RemInvReqErr);
            self.enter_error(ctx);
            return Ok(LocalReply::None);
        }
        self.deliver(ctx, record, op, WcOpcode::Recv, total);
        Ok(LocalReply::None)
    }

    /// The peer unbinds a memory window. False: it may not.
    #[inline(never)]
    fn invalidate(&self, ctx: &mut Ctx<'_>, key: u32) -> bool {
        ctx.mrs_mut().invalidate_remote(key, self.id()).is_ok()
    }

    /// A message found no place in the held receive WQE.
    #[cold]
    #[inline(never)]
    fn fail_delivery(
        &mut self,
        ctx: &mut Ctx<'_>,
        record: &LocalRecord,
        why: &DeliveryError,
    ) -> Result<LocalReply, LocalReply> {
        match why {
            DeliveryError::TooLong if self.of.unreliable => Err(self.drop_message(ctx)),
            DeliveryError::TooLong => {
                self.fail_recv(ctx, WcStatus::LocLenErr);
                Err(self.refuse(ctx, record))
            }
            DeliveryError::Protection => {
                self.fail_recv(ctx, WcStatus::LocProtErr);
                if self.of.unreliable {
                    self.enter_error(ctx);
                    return Ok(LocalReply::None);
                }
                ctx.stats().sent_nak_op.inc();
                let event = AsyncEvent::QpReqErr(self.of.qpn);
                Err(self.die(ctx, record, WcStatus::RemOpErr, event))
            }
        }
    }

    /// The held receive WQE has its message.
    #[inline]
    fn deliver(
        &mut self,
        ctx: &mut Ctx<'_>,
        record: &LocalRecord,
        op: SendOp,
        opcode: WcOpcode,
        byte_len: u32,
    ) {
        let (flags, imm) = match op {
            SendOp::SendImm | SendOp::WriteImm => (WcFlags::WITH_IMM, record.imm),
            SendOp::SendInv => (WcFlags::WITH_INV, record.imm),
            _ => (WcFlags::empty(), 0),
        };
        let cqe = Cqe { byte_len, imm, opcode, flags, src_qp: self.of.peer, ..Cqe::default() };
        self.complete_recv(ctx, cqe, record.has(flag::SOLICITED));
    }

    /// Writes a record's data at `offset` of the held receive WQE.
    #[inline(always)]
    fn place(
        &mut self,
        ctx: &mut Ctx<'_>,
        record: &LocalRecord,
        data: *const u8,
        offset: u32,
    ) -> Result<(), DeliveryError> {
        let (len, pd) = (record.len, self.recv.pd);
        ctx.stats().rx_bytes.add(u64::from(len));
        match self.recv.sges.first() {
            Some(sge) if len > 0 && offset == 0 && self.recv.count > 0 && len <= sge.len => {
                let host = ctx.mrs().resolve_local(sge.lkey, pd, sge.addr, len, true).ok();
                // SAFETY: the record's bytes can be read there.
                let there = host.is_some_and(|host| unsafe { ctx.env.copy_in(data, host, len as usize) });
                if there { Ok(()) } else { Err(DeliveryError::Protection) }
            }
            _ => self.place_pieces(ctx, record, data, offset),
        }
    }

    /// The same where the first SGE has no room for all of it.
    #[inline(never)]
    pub(super) fn place_pieces(
        &mut self,
        ctx: &mut Ctx<'_>,
        record: &LocalRecord,
        data: *const u8,
        offset: u32,
    ) -> Result<(), DeliveryError> {
        if record.len == 0 {
            return Ok(());
        }
        let (env, mrs) = ctx.memory();
        let sges = self.recv.sges.get(..usize::from(self.recv.count)).unwrap_or(&[]);
        if !have_room(sges, u64::from(offset) + u64::from(record.len)) {
            return Err(DeliveryError::TooLong);
        }
        let mut from = data;
        let pd = self.recv.pd;
        slices(sges.iter().copied(), offset, record.len, |sge, skip, n| {
            let addr = sge.addr.wrapping_add(u64::from(skip));
            let host = mrs.resolve_local(sge.lkey, pd, addr, n, true).ok()?;
            // SAFETY: the slices are the record's bytes in all, which can be read there.
            let there = unsafe { env.copy_in(from, host, n as usize) };
            from = from.wrapping_add(n as usize);
            there.then_some(())
        })
        .ok_or(DeliveryError::Protection)
    }

    #[inline(never)]
    fn execute_write(
        &mut self,
        ctx: &mut Ctx<'_>,
        record: &LocalRecord,
        data: *const u8,
    ) -> Result<LocalReply, LocalReply> {
        let (need, id) = (Access::REMOTE_WRITE, self.id());
        if !self.terms.access.contains(need) {
            return Err(self.violate(ctx, record));
        }
        let written = match self.inbound {
            LocalInbound::Write(written) => written,
            _ => {
                if record.send_op() == SendOp::WriteImm && !self.take_recv(ctx) {
                    return Err(self.not_ready(ctx, record));
                }
                let whole = ctx.mrs().resolve_remote(record.rkey, id, record.addr(), record.total, need);
                if whole.is_err() {
                    return Err(self.violate_write(ctx, record));
                }
                0
            }
        };
        let Some(total) = written.checked_add(record.len).filter(|total| *total <= record.total) else {
            return Err(self.refuse(ctx, record));
        };
        if record.len > 0 {
            let open = ctx.mrs().resolve_remote(record.rkey, id, record.addr(), record.len, need);
            let Some(host) = open.ok().filter(|host| !is_absent(record, *host, record.len, true)) else {
                return Err(self.violate_write(ctx, record));
            };
            ctx.stats().rx_bytes.add(u64::from(record.len));
            // SAFETY: so many bytes can be read there, by the record's look or the reader's.
            if !unsafe { ctx.env.copy_in(data, host, record.len as usize) } {
                return Err(self.violate_write(ctx, record));
            }
        }
        if !record.has(flag::LAST) {
            self.inbound = LocalInbound::Write(total);
            return Ok(LocalReply::None);
        }
        if record.send_op() == SendOp::WriteImm {
            self.deliver(ctx, record, SendOp::WriteImm, WcOpcode::RecvRdmaWithImm, total);
        }
        Ok(LocalReply::None)
    }

    #[inline(never)]
    fn execute_read(&mut self, ctx: &mut Ctx<'_>, record: &LocalRecord) -> LocalReply {
        let need = Access::REMOTE_READ;
        let open = ctx.mrs().resolve_remote(record.rkey, self.id(), record.addr(), record.total, need);
        if record.total > MAX_MSG {
            return self.refuse(ctx, record);
        }
        let open = open.ok().filter(|host| !is_absent(record, *host, record.total, false));
        if open.is_none() || !self.terms.access.contains(need) {
            return self.violate(ctx, record);
        }
        self.expected = self.expected.wrapping_add(1);
        LocalReply::Read
    }

    /// Answers more of a READ that came by this channel: the next record, for whose data `to` has room; and
    /// whether more is left.
    ///
    /// # Safety
    /// [to, to + [`ReadAnswer::next_len`]) can be written.
    pub(super) unsafe fn answer_read(
        &mut self,
        ctx: &mut Ctx<'_>,
        read: &mut ReadAnswer,
        channel: u32,
        to: *mut u8,
    ) -> (LocalRecord, bool) {
        let request = read.request;
        if self.state == QpState::Err || !self.is_peer(&request, channel) {
            /* of a connection that is over */
            return (request.answer(answer::GONE), false);
        }
        let len = read.next_len();
        let mut record = LocalRecord { len, total: read.sent, ..request.answer(answer::DATA) };
        let to = if len as usize <= BODY { record.body.as_mut_ptr() } else { to };
        if len > 0 {
            let addr = request.addr().wrapping_add(u64::from(read.sent));
            let open = ctx.mrs().resolve_remote(request.rkey, self.id(), addr, len, Access::REMOTE_READ);
            // SAFETY: the caller's terms, or the body.
            let there = open.is_ok_and(|host| unsafe { ctx.env.copy_out(host, to, len as usize) });
            if !there {
                let refused = request.refused(WcStatus::RemAccessErr);
                ctx.stats().sent_nak_access.inc();
                self.enter_error(ctx);
                ctx.env.event(AsyncEvent::QpAccessErr(self.of.qpn));
                return (refused, false);
            }
        }
        ctx.stats().tx_bytes.add(u64::from(len));
        read.sent += len;
        let more = read.sent < request.total;
        record.flags = if more { 0 } else { flag::LAST };
        (record, more)
    }

    /// Where the eight bytes lie that a request asks for: aligned, and open to it.
    fn word_of(&mut self, ctx: &mut Ctx<'_>, record: &LocalRecord, need: Access) -> Result<u64, LocalReply> {
        let addr = record.addr();
        if addr & 7 != 0 {
            return Err(self.refuse(ctx, record));
        }
        let open = ctx.mrs().resolve_remote(record.rkey, self.id(), addr, 8, need).ok();
        let Some(host) = open.filter(|_| self.terms.access.contains(need)) else {
            return Err(self.violate(ctx, record));
        };
        if host & 7 != 0 {
            return Err(self.refuse(ctx, record));
        }
        Ok(host)
    }

    #[inline(never)]
    fn execute_atomic(&mut self, ctx: &mut Ctx<'_>, record: &LocalRecord) -> Result<LocalReply, LocalReply> {
        let host = self.word_of(ctx, record, Access::REMOTE_ATOMIC)?;
        let [operand, swap] = record.operands();
        let value = match record.send_op() {
            SendOp::CmpSwap => ctx.env.dma_compare_swap(host, operand, swap),
            _ => ctx.env.dma_fetch_add(host, operand),
        };
        let Some(value) = value else { return Err(self.violate(ctx, record)) };
        let mut answer = LocalRecord { len: 8, flags: flag::LAST, ..record.answer(answer::VALUE) };
        answer.set_operands([value, 0]);
        Ok(ctx.env.channels.reply_with(answer))
    }

    #[inline(never)]
    fn execute_atomic_write(
        &mut self,
        ctx: &mut Ctx<'_>,
        record: &LocalRecord,
    ) -> Result<LocalReply, LocalReply> {
        if record.len != 8 {
            return Err(self.refuse(ctx, record));
        }
        let host = self.word_of(ctx, record, Access::REMOTE_WRITE)?;
        let [word, _] = record.operands();
        if !ctx.env.dma_store(host, word.to_ne_bytes()) {
            return Err(self.violate(ctx, record));
        }
        ctx.stats().rx_bytes.add(8);
        Ok(LocalReply::None)
    }

    #[inline(never)]
    fn execute_flush(&mut self, ctx: &mut Ctx<'_>, record: &LocalRecord) -> Result<LocalReply, LocalReply> {
        let feth = Feth::new(record.imm);
        let (Some(placement), Some(level)) = (feth.placement(), feth.level()) else {
            return Err(self.refuse(ctx, record));
        };
        let (need, id) = (placement.needs(), self.id());
        let range = match level {
            FlushLevel::Range => {
                ctx.mrs().resolve_remote(record.rkey, id, record.addr(), record.total, need).is_ok()
            }
            FlushLevel::Mr => true,
        };
        let permitted = ctx.mrs().permits(record.rkey, id, need).is_ok();
        if !range || !permitted || !self.terms.access.contains(need) {
            return Err(self.violate(ctx, record));
        }
        ctx.env.dma_fence();
        Ok(LocalReply::None)
    }

    /// No receive WQE: the peer tries again later (IBTA 9.7.5.2.8), also one of UC, which gives up soon.
    #[cold]
    fn not_ready(&mut self, ctx: &mut Ctx<'_>, record: &LocalRecord) -> LocalReply {
        if self.of.unreliable && record.has(flag::NO_MORE) {
            return self.drop_message(ctx);
        }
        ctx.stats().sent_rnr.inc();
        let timer = u32::from(self.terms.min_rnr_timer & 31);
        ctx.env.channels.reply_with(LocalRecord { imm: timer, ..record.answer(answer::RNR) })
    }

    /// The request breaks the protocol: this end goes to ERR.
    #[cold]
    fn refuse(&mut self, ctx: &mut Ctx<'_>, record: &LocalRecord) -> LocalReply {
        if self.of.unreliable {
            return self.drop_message(ctx);
        }
        ctx.stats().sent_nak_invalid.inc();
        self.die(ctx, record, WcStatus::RemInvReqErr, AsyncEvent::QpReqErr(self.of.qpn))
    }

    /// The request asks for what it may not have.
    #[cold]
    fn violate(&mut self, ctx: &mut Ctx<'_>, record: &LocalRecord) -> LocalReply {
        if self.of.unreliable {
            return self.drop_message(ctx);
        }
        ctx.stats().sent_nak_access.inc();
        self.die(ctx, record, WcStatus::RemAccessErr, AsyncEvent::QpAccessErr(self.of.qpn))
    }

    /// A WRITE is denied access. One with immediate has taken a receive, which completes with the error
    /// (class C).
    #[cold]
    fn violate_write(&mut self, ctx: &mut Ctx<'_>, record: &LocalRecord) -> LocalReply {
        if self.recv.held && !self.of.unreliable {
            self.fail_recv(ctx, WcStatus::LocAccessErr);
        }
        self.violate(ctx, record)
    }

    fn die(
        &mut self,
        ctx: &mut Ctx<'_>,
        record: &LocalRecord,
        status: WcStatus,
        event: AsyncEvent,
    ) -> LocalReply {
        self.enter_error(ctx);
        ctx.env.event(event);
        ctx.env.channels.reply_with(record.refused(status))
    }

    /// Whether it is to be looked what of ours is done before this request is executed.
    ///
    /// A peer that answers a message has executed it: our request completes before its message is received,
    /// and programs count on that (`ib_send_lat -e` waits for one event of two queues). A short request says
    /// what its sender has executed; answers to READs and the like it does not say.
    #[inline]
    pub(super) fn must_look(&self, record: &LocalRecord) -> bool {
        !record.has(flag::ACKS) || self.reads > 0
    }

    /// Whether a request of this record's sender is for this end.
    #[inline]
    pub(super) fn is_peer(&self, record: &LocalRecord, channel: u32) -> bool {
        self.is_with(record) && channel == self.of.channels[1]
    }

    /// The peer has proposed once more: what it proposed before was of a connection that was over.
    pub(super) fn meet_again(&mut self, record: &LocalRecord, channel: u32, direct: Option<Direct>) {
        if !self.met && record.from == self.of.peer {
            (self.of.epochs[1], self.of.channels[1]) = (record.epoch, channel);
            self.direct = direct;
        }
    }

    /// Whether the peer of a connection of UC, which this end goes on with, has begun another one.
    pub(super) fn is_left_by(&self, record: &LocalRecord) -> bool {
        self.of.unreliable && !self.is_fresh() && record.from == self.of.peer && !self.is_with(record)
    }

    /// Whether a record is of the connection's peer, in its incarnation.
    #[inline]
    pub(super) fn is_with(&self, record: &LocalRecord) -> bool {
        record.from == self.of.peer && record.epoch == self.of.epochs[1]
    }
}
