//! WQEs into packets: RC, UC and UD (IBTA 9.7.2 to 9.7.3, 9.8.2, 9.8.3).

use super::{Ctx, Quiesce, SendPause, Track};
use crate::env::{Env, SendQueue};
use crate::nic::path::{PACKET_OVERHEAD, PathId};
use crate::room::Room;
use crate::types::{Psn, QPN_MASK, QpState, QpType, Seg, SendFlags, SendOp, SendWqe, Sge, WcStatus};
use crate::wire::PKEY_DEFAULT;
use crate::wire::builder::HeaderBuf;
use crate::wire::headers::Reth;
use crate::wire::opcode::{code, request_code};

/// A READ is asked for in pieces of at most this, so that its answers do not flood our own socket.
pub(super) const READ_CHUNK: u32 = 64 << 10;
/// Longest stretch without asking for an ACK, bytes: no more than the smallest window, or a QP whose
/// window was cut could wait for an ACK that it never asked for. A receiver answers a whole batch of
/// such packets with one ACK.
const ASK_EVERY: u32 = 16 << 10;

impl<E: Env> Ctx<'_, E> {
    /// Sends one request packet if there is one that may go.
    pub(super) fn emit_request(&mut self) -> SendPause {
        if let Some(id) = self.qp.req.repair
            && !self.next_lost(id)
        {
            return SendPause::Idle;
        }
        let req = &self.qp.req;
        if !matches!(self.qp.state, QpState::Rts | QpState::Sqd)
            || req.fault.is_some_and(|(at, _)| at == req.next)
        {
            return SendPause::Idle;
        }
        if req.rnr_until > self.now || req.next == self.qp.sq.posted() {
            return SendPause::Idle;
        }
        if req.repair.is_none()
            && req.after_loss().is_some_and(|most| req.psn.since(req.una_psn) >= most as i32)
        {
            return SendPause::Idle;
        }
        let new = req.next == req.fresh;
        if new && (self.qp.state == QpState::Sqd || self.qp.quiesce == Quiesce::Asked) {
            return SendPause::Idle;
        }
        let wqe = self.qp.sq.wqe(req.next);
        if new {
            if let Err(status) = self.admit(&wqe) {
                return self.fail_wqe(status);
            }
            let waits = self.must_wait(&wqe) || (self.qp.req.counted && self.lacks_credit(&wqe));
            if waits || (wqe.op.is_rpc() && self.awaits_agreement()) {
                return SendPause::Idle;
            }
            self.begin(&wqe);
        } else if (self.qp.req.alone && self.waits_for_first())
            || (self.qp.req.offset == 0 && !self.repeats_packet() && self.must_wait(&wqe))
        {
            return SendPause::Idle;
        }
        match self.qp.qp_type {
            QpType::Ud => self.emit_datagram(&wqe),
            _ if self.qp.req.own && wqe.op == SendOp::Send => self.emit_fin(&wqe),
            _ if wqe.op.is_local() => self.do_local(&wqe, new),
            _ if wqe.op.is_answered() => self.emit_answered(&wqe),
            _ => self.emit_data(&wqe),
        }
    }

    /// Checks that need no packet: op-code against transport, length.
    fn admit(&self, wqe: &SendWqe) -> Result<(), WcStatus> {
        let allowed = match self.qp.qp_type {
            _ if wqe.op == SendOp::Malformed => false,
            QpType::Rc => wqe.op != SendOp::Flush || self.qp.rpc.is_none(),
            QpType::XrcSend => !wqe.op.is_rpc(),
            QpType::XrcRecv => false,
            QpType::Uc => !wqe.op.is_answered() && !wqe.op.is_rpc() && wqe.op != SendOp::SendInv,
            QpType::Ud => matches!(wqe.op, SendOp::Send | SendOp::SendImm),
        };
        let limit = if self.qp.qp_type == QpType::Ud { self.qp.mtu } else { self.sh.cfg.max_msg };
        if !allowed {
            return Err(WcStatus::LocQpOpErr);
        }
        let word = wqe.op.is_atomic() || wqe.op == SendOp::AtomicWrite;
        if wqe.length > limit || (word && wqe.length != 8) {
            return Err(WcStatus::LocLenErr);
        }
        if wqe.op.is_answered() && self.qp.attr.max_rd_atomic == 0 {
            return Err(WcStatus::LocQpOpErr);
        }
        if wqe.op.is_rpc() { self.admit_rpc(wqe) } else { Ok(()) }
    }

    /// Fences, and READs and the like beyond what the peer accepts.
    fn must_wait(&self, wqe: &SendWqe) -> bool {
        let reads = self.qp.req.reads;
        (wqe.flags.contains(SendFlags::FENCE) && reads > 0)
            || (wqe.op.is_answered() && reads >= self.qp.attr.max_rd_atomic)
    }

    fn begin(&mut self, wqe: &SendWqe) {
        let mtu = self.qp.mtu;
        let req = &mut self.qp.req;
        let packets = match wqe.op {
            SendOp::CmpSwap | SendOp::FetchAdd => 1,
            SendOp::LocalInv | SendOp::BindMw => 0,
            _ => wqe.length.div_ceil(mtu).max(1),
        };
        let slot = req.slot(req.next);
        req.track[slot] = Track { first: req.psn, packets };
        req.fresh = req.fresh.wrapping_add(1);
    }

    /// WQE `next` is refused here: earlier ones finish first.
    pub(super) fn fail_wqe(&mut self, status: WcStatus) -> SendPause {
        self.qp.req.fault = Some((self.qp.req.next, status));
        self.raise_fault();
        SendPause::Idle
    }

    /// One packet of a SEND or WRITE.
    fn emit_data(&mut self, wqe: &SendWqe) -> SendPause {
        let (mtu, offset) = (self.qp.mtu, self.qp.req.offset);
        let len = (wqe.length - offset).min(mtu);
        let (unreliable, av) = (self.qp.qp_type == QpType::Uc, self.qp.attr.av);
        if unreliable && !self.pace_admits(self.qp.path, &av, self.qp.attr.dest_qpn, len) {
            return SendPause::Idle;
        }
        if !unreliable && !self.needs_no_room() && !self.window_admits(self.qp.path, len) {
            return SendPause::Idle;
        }
        let Some(()) = self.gather(wqe, offset, len) else {
            return self.fail_wqe(WcStatus::LocProtErr);
        };
        let (first, last) = (offset == 0, offset + len == wqe.length);
        let ask = self.asks_ack(last, len);
        let pad = (len.wrapping_neg() & 3) as u8;
        let solicited = last && wqe.op.takes_recv() && wqe.flags.contains(SendFlags::SOLICITED);
        let Some(code) = request_code(self.qp.qp_type, wqe.op, first, last) else {
            return self.fail_wqe(WcStatus::LocQpOpErr);
        };
        let (peer, psn) = (self.qp.attr.dest_qpn, self.qp.req.psn);
        let mut header = HeaderBuf::bth(code, peer, psn, ask, solicited, pad, PKEY_DEFAULT)
            .repeats(self.qp.flags.advertises);
        if self.qp.qp_type.is_xrc() {
            header.append(&(wqe.remote_qpn & QPN_MASK).to_be_bytes());
        }
        if first && matches!(wqe.op, SendOp::Write | SendOp::WriteImm | SendOp::Rpc | SendOp::RpcWrite) {
            header.append(&Reth::new(wqe.remote_addr, wqe.rkey, wqe.length));
        }
        if last && wqe.op.has_imm() {
            header.append(&wqe.imm.to_ne_bytes());
        } else if last && wqe.op == SendOp::SendInv {
            header.append(&wqe.imm.to_be_bytes());
        }
        /* A UC send completes before the port is flushed, so its payload must be copied now. */
        self.env.send_frame(&self.qp.attr.av, &header, &self.sh.segs, pad, unreliable);
        if unreliable {
            self.paced(self.qp.path, len);
        }
        self.advance(wqe, len, 1);
        SendPause::Sent
    }

    /// The request packet of a READ (or of its next piece), an atomic, ATOMIC WRITE or FLUSH.
    fn emit_answered(&mut self, wqe: &SendWqe) -> SendPause {
        let again = self.repeats_packet();
        if !again && self.must_wait(wqe) {
            return SendPause::Idle;
        }
        let offset = self.qp.req.offset;
        let atomic = wqe.op.is_atomic();
        /* Pieces end where they ended the first time, wherever a repetition begins: the responder knows
        no READ that goes on behind the PSNs it has seen (IBTA 9.7.5.1.3). */
        let piece = (wqe.length - offset).min(READ_CHUNK - offset % READ_CHUNK);
        let len = match again || self.qp.req.is_silent() {
            _ if atomic => 8,
            false => piece,
            true => self.missing_of(piece),
        };
        let packets = len.div_ceil(self.qp.mtu).max(1);
        /* half of the answers have to fit: a window of less than two pieces would leave one alone under way,
         * and nothing would show that it was lost */
        let room = (len + (packets - 1) * PACKET_OVERHEAD).div_ceil(2);
        if !self.needs_no_room() && !self.window_admits(self.qp.path, room) {
            return SendPause::Idle;
        }
        /* Local memory is checked before the peer is asked: a late failure would have moved data for
         * nothing. */
        let usable =
            if wqe.op.brings_data() { self.writable(wqe) } else { self.gather(wqe, 0, len).is_some() };
        if !usable {
            return self.fail_wqe(WcStatus::LocProtErr);
        }
        let (peer, psn) = (self.qp.attr.dest_qpn, self.qp.req.psn);
        let (xrc, advertises) = (self.qp.qp_type.is_xrc(), self.qp.flags.advertises);
        let begin = |code| {
            if xrc {
                HeaderBuf::bth(code::XRC + code, peer, psn, true, false, 0, PKEY_DEFAULT)
                    .repeats(advertises)
                    .xrceth(wqe.remote_qpn)
            } else {
                HeaderBuf::bth(code, peer, psn, true, false, 0, PKEY_DEFAULT).repeats(advertises)
            }
        };
        let (va, key) = (wqe.remote_addr.wrapping_add(u64::from(offset)), wqe.rkey);
        let header = match wqe.op {
            SendOp::CmpSwap => begin(code::RC_CMP_SWAP).atomic_eth(va, key, wqe.swap, wqe.compare_add),
            SendOp::FetchAdd => begin(code::RC_FETCH_ADD).atomic_eth(va, key, wqe.compare_add, 0),
            SendOp::AtomicWrite => begin(code::RC_ATOMIC_WRITE).reth(va, key, len),
            SendOp::Flush => begin(code::RC_FLUSH).feth(wqe.imm).reth(va, key, wqe.compare_add as u32),
            _ => begin(code::RC_READ_REQUEST).reth(va, key, len),
        };
        let payload = if wqe.op == SendOp::AtomicWrite { &self.sh.segs[..] } else { &[] };
        if matches!(wqe.op, SendOp::AtomicWrite | SendOp::Flush) {
            self.qp.quiesce = Quiesce::Never;
        }
        self.env.send_frame(&self.qp.attr.av, &header, payload, 0, false);
        /* of what is asked for again the first asking counts, of a piece in parts the last */
        self.qp.req.reads += u8::from(!again && len >= piece);
        self.qp.req.unasked = 0;
        self.advance(wqe, len, packets);
        SendPause::Sent
    }

    /// One UD packet; the WQE is done when it is sent.
    fn emit_datagram(&mut self, wqe: &SendWqe) -> SendPause {
        let Some((av, path)) = super::datagram_path(self.sh, wqe.av) else {
            return self.fail_wqe(WcStatus::LocQpOpErr);
        };
        if !self.pace_admits(path, &av, wqe.remote_qpn, wqe.length) {
            return SendPause::Idle;
        }
        if self.gather(wqe, 0, wqe.length).is_none() {
            return self.fail_wqe(WcStatus::LocProtErr);
        }
        let pad = (wqe.length.wrapping_neg() & 3) as u8;
        let code = if wqe.op.has_imm() { code::UD_SEND_ONLY_IMM } else { code::UD_SEND_ONLY };
        let solicited = wqe.flags.contains(SendFlags::SOLICITED);
        let psn = self.qp.req.psn;
        /* A Q_Key with its top bit set stands for the QP's own (IBTA 3.5.3). */
        let qkey = if wqe.qkey >> 31 == 1 { self.qp.attr.qkey } else { wqe.qkey };
        let mut header = HeaderBuf::bth(code, wqe.remote_qpn, psn, false, solicited, pad, PKEY_DEFAULT)
            .deth(qkey, self.qp.qpn);
        if wqe.op.has_imm() {
            header = header.imm(wqe.imm);
        }
        self.env.send_frame(&av, &header, &self.sh.segs, pad, true);
        self.paced(path, wqe.length);
        self.advance(wqe, wqe.length, 1);
        SendPause::Sent
    }

    /// Moves the cursor behind what was just sent.
    pub(super) fn advance(&mut self, wqe: &SendWqe, len: u32, packets: u32) {
        let now = self.now;
        let req = &mut self.qp.req;
        let again = req.psn.before(req.max_psn);
        if again {
            self.sh.stats.retransmitted.add(u64::from(packets));
        }
        if let Some(id) = req.repair {
            self.sh.repairs.get(id).sent(req.psn, packets, again);
        }
        req.psn = req.psn.plus(packets);
        req.offset += len;
        if req.offset == wqe.length || wqe.op.is_atomic() {
            req.next = req.next.wrapping_add(1);
            req.offset = 0;
        }
        let idle = !req.outstanding();
        let fresh = req.max_psn.before(req.psn);
        if fresh {
            req.max_psn = req.psn;
        }
        if !self.qp.qp_type.is_reliable() {
            self.qp.req.una_psn = self.qp.req.psn;
            if self.qp.req.offset == 0 {
                self.complete_sent();
            }
            return;
        }
        if again && req.psn == req.rtt_psn {
            req.rtt_since = 0;
        }
        if fresh && req.rtt_since == 0 {
            (req.rtt_psn, req.rtt_since) = (req.psn, now);
        }
        if idle {
            req.progress = now;
            req.backoff = 0;
        }
        if !req.is_silent() {
            let bytes = len + packets * PACKET_OVERHEAD;
            req.inflight += bytes;
            self.sh.paths.get(self.qp.path).add(bytes);
        }
        if self.qp.req.deadline == 0 {
            self.start_timer();
        }
    }

    pub(super) fn window_admits(&mut self, path: PathId, len: u32) -> bool {
        let qpn = self.qp.qpn;
        if self.sh.paths.get(path).admits(qpn, len + PACKET_OVERHEAD) {
            return true;
        }
        self.await_window(path);
        false
    }

    /// Waits for room in the window of `path`.
    pub(crate) fn await_window(&mut self, path: PathId) {
        let qpn = self.qp.qpn;
        if self.qp.flags.window_wait != Some(path) {
            self.leave_window();
            self.qp.flags.window_wait = Some(path);
            if self.sh.paths.get(path).wait(qpn) {
                self.sh.open_path(path);
            }
        }
        if self.qp.qp_type.is_reliable() {
            self.watch_pace(path);
        }
    }

    /// Whether this packet asks for an ACK: the last of a message, and some in long ones, so that
    /// the window moves.
    fn asks_ack(&mut self, last: bool, len: u32) -> bool {
        if !self.qp.qp_type.is_reliable() {
            return false;
        }
        /* Behind the packet that fills the window nobody can ask any more. */
        let two = len + self.qp.mtu + 2 * PACKET_OVERHEAD;
        let tight = !self.sh.paths.get(self.qp.path).has_room(two);
        let req = &mut self.qp.req;
        req.unasked += len + PACKET_OVERHEAD;
        let ask = last
            || tight
            || req.alone
            || req.rewound != 0
            || req.repair.is_some()
            || req.unasked >= ASK_EVERY;
        if ask {
            req.unasked = 0;
        }
        ask
    }

    /// Collects the host memory of bytes `offset..offset + len` of a WQE in the scratch list.
    fn gather(&mut self, wqe: &SendWqe, offset: u32, len: u32) -> Option<()> {
        let segs = &mut self.sh.segs;
        segs.clear();
        self.env.begin_payload();
        if len == 0 {
            return Some(());
        }
        let index = self.qp.req.next;
        if wqe.flags.contains(SendFlags::INLINE) {
            let seg = self.qp.sq.inline(index);
            segs.push_in_room(Seg { addr: seg.addr + u64::from(offset), len });
            return Some(());
        }
        let (mrs, env, pd) = (&self.sh.mrs, &mut *self.env, self.qp.pd);
        slices(self.qp.sq.sges(index), offset, len, |sge, skip, n| {
            let addr =
                mrs.resolve_local(sge.lkey, pd, sge.addr.wrapping_add(u64::from(skip)), n, false).ok()?;
            segs.push_in_room(env.dma_read(Seg { addr, len: n })?);
            Some(())
        })
    }

    /// Whether the card may write the WQE's buffers (READ and atomic results).
    fn writable(&self, wqe: &SendWqe) -> bool {
        let sges = self.qp.sq.sges(self.qp.req.next);
        slices(sges, 0, wqe.length, |sge, _, n| {
            self.sh.mrs.resolve_local(sge.lkey, self.qp.pd, sge.addr, n, true).ok().map(|_| ())
        })
        .is_some()
    }

    /// QPs that waited for room in the path's window may get their turn.
    pub(super) fn wake_path(&mut self) {
        self.sh.open_path(self.qp.path);
    }
}

/// Walks bytes `offset..offset + len` of an SGE list: `f(sge, bytes to skip in it, bytes)`.
/// `None` when the list is too short or `f` returns `None`.
pub fn slices(
    sges: impl IntoIterator<Item = Sge>,
    mut offset: u32,
    mut len: u32,
    mut f: impl FnMut(Sge, u32, u32) -> Option<()>,
) -> Option<()> {
    if len == 0 {
        return Some(());
    }
    for sge in sges {
        if offset >= sge.len {
            offset -= sge.len;
            continue;
        }
        let n = (sge.len - offset).min(len);
        f(sge, offset, n)?;
        if n == len {
            return Some(());
        }
        len -= n;
        offset = 0;
    }
    None
}

/// Where `psn` lies against the outstanding span.
pub(super) fn in_flight(psn: Psn, una: Psn, max: Psn) -> bool {
    !psn.before(una) && psn.before(max)
}
