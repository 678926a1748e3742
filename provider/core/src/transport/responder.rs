//! RC requests from the peer (IBTA 9.7.4, 9.7.5.1, table 58 for faults).

use super::recv::PlaceError;
use super::remote_srq::SrqLocation;
use super::{Ctx, MessageInProgress, OwedResponse, Quiesce, enter_error};
use crate::engine::Call;
use crate::env::{Env, SendQueue};
use crate::room::Room;
use crate::types::{Access, AsyncEvent, Cqe, Psn, QpState, WcFlags, WcOpcode, WcStatus};
use crate::wire::headers::{NakCode, Syndrome};
use crate::wire::opcode::PacketKind;
use crate::wire::packet::Packet;

impl<E: Env> Ctx<'_, E> {
    /// A packet from the peer's requester.
    pub(super) fn receive_request(&mut self, packet: &Packet<'_>) {
        if !matches!(self.qp.state, QpState::Rtr | QpState::Rts | QpState::Sqd) {
            return self.sh.stats.drop_state.inc();
        }
        let psn = packet.bth().psn();
        self.note_repeat(packet);
        match psn.since(self.qp.resp.epsn) {
            0 => {
                self.establish();
                self.expected(psn, packet);
                if self.qp.resp.gap.is_some() {
                    self.fill_gap(psn);
                }
            }
            n @ 1.. => self.ahead(psn, n as u32, packet),
            _ => self.duplicate(psn, packet),
        }
    }

    /// The request that everything waited for.
    pub(super) fn expected(&mut self, psn: Psn, packet: &Packet<'_>) {
        self.qp.resp.nak_sent = false;
        /* one that could not leave yet, for want of this packet, and that would stand behind it */
        self.qp.resp.nak = None;
        match self.name_srq(packet) {
            SrqLocation::Local => self.execute(psn, packet),
            SrqLocation::Remote => self.forward(packet),
            SrqLocation::Busy => self.defer_request(),
            SrqLocation::Unknown => self.refuse(NakCode::InvalidRequest),
        }
    }

    /// First packet of a connection: the program in RTR may go on (IBV_EVENT_COMM_EST).
    pub(super) fn establish(&mut self) {
        if !self.qp.flags.established {
            self.qp.flags.established = true;
            if self.qp.state == QpState::Rtr {
                self.env.event(AsyncEvent::CommEst(self.qp.qpn));
            }
        }
    }

    /// `n` packets are missing before this one: keep it, if the peer knows SACKs, or report once
    /// what is missing (IBTA 9.7.5.2.8).
    fn ahead(&mut self, psn: Psn, n: u32, packet: &Packet<'_>) {
        self.sh.stats.out_of_sequence.inc();
        if matches!(self.qp.resp.cur, MessageInProgress::Running) {
            /* nothing is missing: its kernel is not done */
            if !self.qp.resp.nak_sent {
                self.not_ready();
            }
            return;
        }
        self.sh.paths.saw_loss(self.qp.path);
        if self.qp.flags.answers != 0 && self.keep_ahead(psn, n, packet) {
            return self.owe_ack();
        }
        if !self.qp.resp.nak_sent {
            self.owe_nak(Syndrome::Nak(NakCode::SequenceError));
        }
    }

    pub(super) fn owe_nak(&mut self, syndrome: Syndrome) {
        let stats = &self.sh.stats;
        match syndrome {
            Syndrome::Ack { .. } => return,
            Syndrome::Rnr { .. } => &stats.sent_rnr,
            Syndrome::Nak(NakCode::SequenceError) => &stats.sent_nak_seq,
            Syndrome::Nak(NakCode::InvalidRequest) => &stats.sent_nak_invalid,
            Syndrome::Nak(NakCode::RemoteAccess) => &stats.sent_nak_access,
            Syndrome::Nak(NakCode::RemoteOperation) => &stats.sent_nak_op,
        }
        .inc();
        self.qp.resp.nak_sent = true;
        self.qp.resp.nak = Some(syndrome.to_byte());
        self.ready();
    }

    /// The request that was expected.
    fn execute(&mut self, psn: Psn, packet: &Packet<'_>) {
        let info = packet.op();
        let begins = info.is_first();
        let fits = match (self.qp.resp.cur, info.kind) {
            (MessageInProgress::Idle, _) => begins,
            (MessageInProgress::Send { .. } | MessageInProgress::Tagged { .. }, PacketKind::Send)
            | (MessageInProgress::Write { .. }, PacketKind::Write)
            | (MessageInProgress::Rpc { .. }, PacketKind::RpcWrite) => !begins,
            _ => false,
        };
        if !fits {
            if matches!(self.qp.resp.cur, MessageInProgress::Running) {
                return self.not_ready();
            }
            return self.refuse(NakCode::InvalidRequest);
        }
        if matches!(info.kind, PacketKind::AtomicWrite | PacketKind::Flush) {
            self.qp.quiesce = Quiesce::Never;
        }
        match info.kind {
            PacketKind::Send => self.execute_send(packet),
            PacketKind::Write => self.execute_write(packet),
            PacketKind::ReadRequest => self.execute_read(psn, packet),
            PacketKind::CmpSwap | PacketKind::FetchAdd => self.execute_atomic(psn, packet),
            PacketKind::AtomicWrite => self.execute_atomic_write(psn, packet),
            PacketKind::Flush => self.execute_flush(psn, packet),
            PacketKind::Rpc | PacketKind::RpcWrite => self.execute_rpc(packet),
            _ => self.sh.stats.drop_opcode.inc(),
        }
    }

    fn execute_send(&mut self, packet: &Packet<'_>) {
        let data = packet.payload();
        let (first, last) = (packet.op().is_first(), packet.op().is_last());
        if !self.middle_is_full(data.len(), last) {
            return self.refuse(NakCode::InvalidRequest);
        }
        let begun = match self.qp.resp.cur {
            MessageInProgress::Idle if self.qp.req.own => self.begin_tagged(packet),
            MessageInProgress::Idle => self.begin_send(WcOpcode::Recv).map(|cur| (cur, data)),
            cur => Some((cur, data)),
        };
        let Some((cur, data)) = begun else { return };
        let received = cur.received();
        if !self.place_or_refuse(received, data) {
            return;
        }
        let total = received + data.len() as u32;
        if let Some(key) = packet.ieth()
            && self.sh.mrs.invalidate_remote(key, self.remote_qp()).is_err()
        {
            return self.cannot_invalidate(packet);
        }
        if last {
            self.qp.resp.cur = MessageInProgress::Idle;
            self.accept(packet, 1, true);
            self.deliver_send(packet, cur, total);
        } else {
            self.qp.resp.cur = cur.with_received(total);
            self.accept(packet, 1, false);
            if let (true, MessageInProgress::Tagged { tag, app_ctx, .. }) = (first, cur) {
                self.matched(tag, app_ctx);
            }
        }
    }

    /// Writes a request's bytes into the held receive. False: they have no place there, which the receive and
    /// the peer were told.
    pub(super) fn place_or_refuse(&mut self, offset: u32, data: &[u8]) -> bool {
        let (status, code) = match self.place(offset, data) {
            Ok(()) => return true,
            Err(PlaceError::TooLong) => (WcStatus::LocLenErr, NakCode::InvalidRequest),
            Err(PlaceError::Protection) => (WcStatus::LocProtErr, NakCode::RemoteOperation),
        };
        self.fail_recv(status);
        self.refuse(code);
        false
    }

    /// A message into the next receive WQE. `None`: there is none, and the peer must come again.
    pub(super) fn begin_send(&mut self, opcode: WcOpcode) -> Option<MessageInProgress> {
        if self.take_recv() {
            return Some(MessageInProgress::Send { received: 0, opcode });
        }
        self.not_ready();
        None
    }

    /// All packets but the last of a message carry exactly the path MTU (IBTA 9.7.4.1.5).
    pub(super) fn middle_is_full(&self, len: usize, last: bool) -> bool {
        let mtu = self.qp.mtu as usize;
        if last { len <= mtu } else { len == mtu }
    }

    fn execute_write(&mut self, packet: &Packet<'_>) {
        let data = packet.payload();
        let last = packet.op().is_last();
        let (va, key, left, total) = match (self.qp.resp.cur, packet.reth()) {
            (MessageInProgress::Write { va, key, left, total }, _) => (va, key, left, total),
            (_, Some(reth)) => (reth.va(), reth.rkey(), reth.dma_len(), reth.dma_len()),
            _ => return self.refuse(NakCode::InvalidRequest),
        };
        let len = data.len() as u32;
        let right_size = if last { len == left } else { len < left || left == 0 };
        if !self.middle_is_full(data.len(), last) || !right_size || len > left {
            return self.refuse(NakCode::InvalidRequest);
        }
        if !self.qp.attr.access.contains(Access::REMOTE_WRITE) {
            return self.violate();
        }
        let imm = packet.imm().is_some();
        if imm && !self.take_recv() {
            return self.not_ready();
        }
        if packet.op().is_first() && self.check_remote(key, va, total, Access::REMOTE_WRITE).is_none() {
            return self.violate_write();
        }
        if len > 0 {
            let Some(host) = self.check_remote(key, va, len, Access::REMOTE_WRITE) else {
                return self.violate_write();
            };
            self.sh.stats.rx_bytes.add(u64::from(len));
            if !self.env.dma_write(host, data) {
                return self.violate_write();
            }
        }
        self.qp.resp.cur = match last {
            true => MessageInProgress::Idle,
            false => {
                MessageInProgress::Write { va: va.wrapping_add(u64::from(len)), key, left: left - len, total }
            }
        };
        self.accept(packet, 1, last);
        if imm {
            self.deliver(packet, WcOpcode::RecvRdmaWithImm, total);
        }
    }

    pub(super) fn check_remote(&self, key: u32, va: u64, len: u32, need: Access) -> Option<u64> {
        self.sh.mrs.resolve_remote(key, self.remote_qp(), va, len, need).ok()
    }

    fn execute_read(&mut self, psn: Psn, packet: &Packet<'_>) {
        let Some(reth) = packet.reth() else { return };
        let (va, key, len) = (reth.va(), reth.rkey(), reth.dma_len());
        if len > self.sh.cfg.max_msg || !self.may_answer_more(false) {
            return self.refuse(NakCode::InvalidRequest);
        }
        if !self.qp.attr.access.contains(Access::REMOTE_READ)
            || self.check_remote(key, va, len, Access::REMOTE_READ).is_none()
        {
            return self.violate();
        }
        self.qp.resp.out.push_in_room(OwedResponse::Read {
            psn,
            va,
            key,
            left: len,
            begun: false,
            again: false,
            remote: None,
        });
        self.accept(packet, len.div_ceil(self.qp.mtu).max(1), true);
        self.ready();
    }

    fn execute_atomic(&mut self, psn: Psn, packet: &Packet<'_>) {
        let Some(eth) = packet.atomic_eth() else { return };
        if !self.may_answer_more(false) || eth.va() & 7 != 0 {
            return self.refuse(NakCode::InvalidRequest);
        }
        let allowed = self.qp.attr.access.contains(Access::REMOTE_ATOMIC);
        let Some(host) =
            self.check_remote(eth.rkey(), eth.va(), 8, Access::REMOTE_ATOMIC).filter(|_| allowed)
        else {
            return self.violate();
        };
        if host & 7 != 0 {
            return self.refuse(NakCode::InvalidRequest);
        }
        let value = match packet.op().kind {
            PacketKind::CmpSwap => self.env.dma_compare_swap(host, eth.compare(), eth.swap_add()),
            _ => self.env.dma_fetch_add(host, eth.swap_add()),
        };
        let Some(value) = value else { return self.violate() };
        let resp = &mut self.qp.resp;
        if let Some(results) = &mut resp.results {
            results.push(psn, value);
        }
        resp.out.push_in_room(OwedResponse::Atomic { psn, value });
        self.accept(packet, 1, true);
        self.ready();
    }

    /// A requester may have `max_dest_rd_atomic` READs and the like outstanding. Answers to repeated
    /// requests may wait beside them, and are not the requester's fault: the network repeats too.
    pub(super) fn may_answer_more(&self, again: bool) -> bool {
        let limit = usize::from(self.qp.attr.max_dest_rd_atomic);
        self.qp.resp.out.len() < if again { limit } else { 2 * limit }
    }

    /// The packet was executed: expect the next, count the message, acknowledge if asked.
    pub(super) fn accept(&mut self, packet: &Packet<'_>, packets: u32, message: bool) {
        let resp = &mut self.qp.resp;
        resp.epsn = resp.epsn.plus(packets);
        if message {
            resp.msn = resp.msn.wrapping_add(1) & 0x00ff_ffff;
        }
        if packet.bth().ack_req() && !packet.op().kind.is_answered() {
            self.owe_ack();
        }
    }

    /// The last packet of a SEND is in memory.
    fn deliver_send(&mut self, packet: &Packet<'_>, message: MessageInProgress, byte_len: u32) {
        match message {
            MessageInProgress::Tagged { tag, app_ctx, .. } => {
                let mut cqe = match packet.op().is_first() {
                    true => Cqe::matched(tag, app_ctx),
                    false => Cqe { opcode: WcOpcode::TmRecv, ..Cqe::default() },
                };
                cqe.byte_len = byte_len;
                cqe.flags |= WcFlags::TM_DATA_VALID;
                if let Some(imm) = packet.imm() {
                    cqe.imm = imm;
                    cqe.flags |= WcFlags::WITH_IMM;
                }
                self.complete_recv(cqe, packet.bth().solicited());
            }
            MessageInProgress::Send { opcode, .. } => self.deliver(packet, opcode, byte_len),
            _ => {}
        }
    }

    /// The held receive WQE has its message.
    pub(super) fn deliver(&mut self, packet: &Packet<'_>, opcode: WcOpcode, byte_len: u32) {
        let mut flags = WcFlags::empty();
        let imm = packet.imm().or(packet.ieth()).unwrap_or_default();
        flags.set(WcFlags::WITH_IMM, packet.imm().is_some());
        flags.set(WcFlags::WITH_INV, packet.ieth().is_some());
        let cqe = Cqe { byte_len, imm, opcode, flags, src_qp: self.qp.attr.dest_qpn, ..Cqe::default() };
        self.complete_recv(cqe, packet.bth().solicited());
    }

    /// No receive WQE: the peer tries again later (IBTA 9.7.5.2.8).
    pub(super) fn not_ready(&mut self) {
        self.owe_nak(Syndrome::Rnr { timer: self.qp.attr.min_rnr_timer & 31 });
    }

    /// The request breaks the protocol: NAK, and this end goes to ERR.
    pub(super) fn refuse(&mut self, code: NakCode) {
        self.die(code, AsyncEvent::QpReqErr(self.qp.qpn));
    }

    /// The request asks for what it may not have.
    pub(super) fn violate(&mut self) {
        self.die(NakCode::RemoteAccess, AsyncEvent::QpAccessErr(self.qp.qpn));
    }

    /// A WRITE is denied access. One with immediate has taken a receive, which completes with the error
    /// (class C).
    fn violate_write(&mut self) {
        if self.qp.resp.recv.held {
            self.fail_recv(WcStatus::LocAccessErr);
        }
        self.violate();
    }

    /// The key that a SEND names cannot be invalidated (class J). The message has arrived and is
    /// acknowledged; its receive has the error, and this end goes to ERR without a NAK, as rdma_rxe's does.
    fn cannot_invalidate(&mut self, packet: &Packet<'_>) {
        self.accept(packet, 1, true);
        self.fail_recv(WcStatus::RemInvReqErr);
        enter_error(self, QpState::Err);
        self.owe_ack();
    }

    fn die(&mut self, code: NakCode, event: AsyncEvent) {
        enter_error(self, QpState::Err);
        self.owe_nak(Syndrome::Nak(code));
        self.env.event(event);
    }

    /// A request from the past: its answer was lost, or it was duplicated (IBTA 9.7.5.1.3).
    fn duplicate(&mut self, psn: Psn, packet: &Packet<'_>) {
        self.sh.stats.duplicate_request.inc();
        self.sh.paths.saw_loss(self.qp.path);
        match packet.op().kind {
            PacketKind::ReadRequest => self.duplicate_read(psn, packet),
            PacketKind::CmpSwap | PacketKind::FetchAdd => self.duplicate_atomic(psn),
            PacketKind::AtomicWrite | PacketKind::Flush => self.duplicate_placement(psn, packet),
            PacketKind::Send | PacketKind::Write | PacketKind::Rpc | PacketKind::RpcWrite => {
                self.acknowledge_again(psn);
            }
            _ => {}
        }
    }

    /// Answers from `psn` on will be asked for again: those not sent yet are not owed twice.
    pub(super) fn drop_answers_from(&mut self, psn: Psn) {
        let mtu = self.qp.mtu;
        self.qp.resp.out.retain_mut(|answer| {
            if !answer.psn().before(psn) {
                return false;
            }
            if let OwedResponse::Read { psn: at, left, .. } = answer {
                let keep = psn.since(*at) as u32;
                *left = (*left).min(keep.saturating_mul(mtu));
            }
            true
        });
    }

    /// Whether an answer with `psn` is owed already.
    pub(super) fn will_answer(&self, psn: Psn) -> bool {
        let mtu = self.qp.mtu;
        self.qp.resp.out.iter().any(|answer| !psn.before(answer.psn()) && psn.before(answer.end(mtu)))
    }

    /// Whether the answer that is owed with `psn` may have arrived.
    fn repeats_answer(&self, psn: Psn) -> bool {
        let after = |answer: &&OwedResponse| !psn.before(answer.psn());
        let owed = self.qp.resp.out.iter().rev().find(after);
        matches!(owed, Some(OwedResponse::Read { again: true, .. }))
    }

    fn duplicate_read(&mut self, psn: Psn, packet: &Packet<'_>) {
        let Some(reth) = packet.reth() else { return };
        let Ok(remote) = self.remote_srq_of(packet) else { return };
        let on_its_way = remote.is_some() && self.will_answer(psn);
        let again = !on_its_way || self.repeats_answer(psn);
        /* A peer that repeats selectively asks for nothing twice that it need not. */
        if self.qp.flags.answers == 0 {
            self.drop_answers_from(psn);
        } else if self.will_answer(psn) {
            return;
        }
        let (va, key, len) = (reth.va(), reth.rkey(), reth.dma_len());
        let end = psn.plus(len.div_ceil(self.qp.mtu).max(1));
        /* a longer one would come round in PSN space, and end where it begins */
        let legal = len <= self.sh.cfg.max_msg
            && !self.qp.resp.epsn.before(end)
            && self.may_answer_more(true)
            && (remote.is_some() || self.check_answer(key, va, len).is_some());
        if legal && self.qp.attr.access.contains(Access::REMOTE_READ) {
            self.qp.resp.out.push_in_room(OwedResponse::Read {
                psn,
                va,
                key,
                left: len,
                begun: false,
                again,
                remote,
            });
            if remote.is_some() && !on_its_way {
                self.refetch_from(psn);
            }
            self.ready();
        }
    }

    fn duplicate_atomic(&mut self, psn: Psn) {
        if self.qp.flags.answers == 0 {
            self.drop_answers_from(psn);
        } else if self.will_answer(psn) {
            return;
        }
        let found = self.qp.resp.results.as_ref().and_then(|results| results.find(psn));
        if let Some(value) = found
            && self.may_answer_more(true)
        {
            self.qp.resp.out.push_in_room(OwedResponse::Atomic { psn, value });
            self.ready();
        }
    }

    /// Something was posted to the send queue.
    pub(crate) fn doorbell(&mut self) {
        if self.qp.flags.held && (self.run_engine(Call::Doorbell).is_some() || self.qp.state == QpState::Rts)
        {
            return;
        }
        match self.qp.state {
            QpState::Err | QpState::Sqe => super::flush_posted(self),
            QpState::Rts | QpState::Sqd if self.qp.req.next != self.qp.sq.posted() => self.ready(),
            _ => {}
        }
    }
}
