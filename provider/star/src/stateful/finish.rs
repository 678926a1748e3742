//! Completions, in order: SF's when the data is moved, SL's through CQEPs (docs/star.md, "Completions").

use starverbs_core::env::{CompletionQueue, SendQueue, SendRequest};
use starverbs_core::{Cqe, Psn, QpId, QpState, SendFlags, SendOp, WcFlags, WcOpcode, WcStatus};

use super::stream::{OrderClass, WqeProgress};
use super::window::Of;
use super::{CardCtx, Ended, Stateful};
use crate::env::StarEnv;
use crate::message::CqeMsg;
use crate::wire::Queue;

impl<E: StarEnv> Stateful<E> {
    /// Completes what is complete, of both streams.
    pub(super) fn finish(&mut self, card: &mut CardCtx<'_, E>) {
        while let Some(index) = self.finished(card, Of::Local) {
            let op = *self.streams[0].get(index);
            let status = self.end_of_local(card, index, &op);
            if status != WcStatus::Success {
                return self.fail_local(card, status, op.recv);
            }
            self.streams[0].retire();
            self.complete_local(card, index, &op);
        }
        while let Some(index) = self.finished(card, Of::Remote) {
            let op = *self.streams[1].get(index);
            let status = match op.class {
                OrderClass::Rpc | OrderClass::Stream if op.status == WcStatus::Success => {
                    match self.kernel_turn(card, index, op.class) {
                        Some(status) => status,
                        None => return,
                    }
                }
                _ => self.end_of(card, index, &op),
            };
            if status != WcStatus::Success {
                return self.fail_remote(card, status, op.recv);
            }
            self.streams[1].retire();
            self.complete_remote(card, index, &op);
        }
    }

    /// The oldest WQE of a stream, if all its data is where it belongs, and no copy of a packet of it can
    /// come any more.
    #[inline]
    fn finished(&mut self, card: &mut CardCtx<'_, E>, of: Of) -> Option<u32> {
        let stream = &self.streams[of as usize];
        if stream.una == stream.next {
            return None;
        }
        let index = stream.una;
        let WqeProgress { all, left, until, probed, .. } = *stream.get(index);
        /* what ended SL's end stays the oldest of its WQEs */
        let over = self.state != QpState::Rts || of == Of::Remote && self.ended != Ended::Not;
        if over || !all || left > 0 {
            return None;
        }
        if until > card.now && !self.has_no_copies(card, self.streams[of as usize].get(index)) {
            self.arm(until);
            return None;
        }
        if probed {
            self.forget_probe(card, of, index);
        }
        Some(index)
    }

    /// How a WQE of ours ends whose data is here: the result of an atomic may still find no place.
    fn end_of_local(&mut self, card: &mut CardCtx<'_, E>, index: u32, op: &WqeProgress) -> WcStatus {
        let brings = op.status == WcStatus::Success && op.class == OrderClass::Atomic;
        if brings && self.scatter(card, index, 0, &op.value.to_ne_bytes()).is_none() {
            return WcStatus::LocProtErr;
        }
        op.status
    }

    pub(super) fn complete_local(&mut self, card: &mut CardCtx<'_, E>, index: u32, op: &WqeProgress) {
        let sq = &self.local.sq;
        let (request, wr_id) = (sq.request(index), sq.wr_id(index));
        let done = op.recv.filter(|_| !op.carries).map(|_| recv_done(&request, sq.imm(index)));
        let of_card = request.flags.contains(SendFlags::CARD).then(|| sq.wqe(index));
        /* before the completion: who polls it may post at once */
        sq.release(index.wrapping_add(1));
        if let Some(seq) = op.recv.map(Psn::new) {
            self.recvs.release(seq.plus(1));
            if let Some(done) = done {
                self.completions[Queue::Recv as usize].push(seq, done, 0);
            }
        }
        if let Some(wqe) = of_card {
            card.rpc.reply_done(&wqe);
        } else if self.local.sig_all || request.flags.contains(SendFlags::SIGNALED) {
            let byte_len = if request.op.brings_data() { request.length } else { 0 };
            let (qpn, opcode) = (self.local.qpn, request.op.wc_opcode());
            self.push_send(card, &Cqe { wr_id, byte_len, qpn, opcode, ..Cqe::default() });
        }
    }

    /// How a WQE of SL ends whose data is here: a SEND with invalidate may still fail.
    fn end_of(&mut self, card: &mut CardCtx<'_, E>, index: u32, op: &WqeProgress) -> WcStatus {
        let wqe = self.sends.get(Psn::new(index)).copied().unwrap_or_default();
        let owner = QpId { pd: self.local.pd, qpn: self.local.qpn };
        let fails = op.status == WcStatus::Success
            && wqe.op == SendOp::SendInv
            && card.mrs.invalidate_remote(wqe.imm, owner).is_err();
        if fails { WcStatus::RemAccessErr } else { op.status }
    }

    fn complete_remote(&mut self, card: &mut CardCtx<'_, E>, index: u32, op: &WqeProgress) {
        let seq = Psn::new(index);
        let Some(wqe) = self.sends.get(seq).copied() else { return };
        self.sends.release(seq.plus(1));
        if op.recv.is_some() {
            let (flags, imm, opcode) = recv_says(wqe.op, wqe.imm);
            let src_qp = self.peer_qpn;
            let cqe = Cqe { byte_len: wqe.length, imm, opcode, flags, src_qp, ..Cqe::default() };
            self.complete_recv(card, index, cqe, wqe.flags.contains(SendFlags::SOLICITED));
        }
        let reported = wqe.flags.contains(SendFlags::SIGNALED) || seq.plus(1) == self.report_at;
        if reported && !op.carries {
            self.completions[Queue::Send as usize].push(seq, send_done(wqe.op, wqe.length), 0);
        }
    }

    /// The receive WQE of ours that WQE `index` of SL has taken is done.
    pub(super) fn complete_recv(&mut self, card: &mut CardCtx<'_, E>, index: u32, cqe: Cqe, solicited: bool) {
        let wr_id = self.held[index].wr_id;
        self.push_recv(card, &Cqe { wr_id, ..cqe }, solicited);
    }

    pub(super) fn push_recv(&mut self, card: &mut CardCtx<'_, E>, cqe: &Cqe, solicited: bool) {
        let cqe = Cqe { qpn: self.local.qpn, ..*cqe };
        let error = count(card, &cqe);
        if self.local.recv_cq.push(&cqe, solicited || error).is_err() {
            self.overrun(card);
        }
    }

    pub(super) fn push_send(&mut self, card: &mut CardCtx<'_, E>, cqe: &Cqe) {
        let error = count(card, cqe);
        if self.local.send_cq.push(cqe, error).is_err() {
            self.overrun(card);
        }
    }

    /// A packet of a WQE cannot leave, or its data cannot be placed: it ends so, once all before it has
    /// ended.
    pub(super) fn abandon(&mut self, card: &mut CardCtx<'_, E>, of: Of, index: u32, status: WcStatus) {
        self.forget_packets(card, |entry| entry.of == of && entry.wqe == index);
        let stream = self.stream(of);
        if stream.begun && stream.next == index {
            stream.advance(0, 0, true);
        }
        stream.carried(index, status);
        stream.let_go(index);
        let op = stream.op(index);
        (op.status, op.left, op.all) = (status, 0, true);
        stream.stopped = true;
        self.finish(card);
    }
}

/// Counts a completion; gives whether it tells of an error.
fn count<E: StarEnv>(card: &CardCtx<'_, E>, cqe: &Cqe) -> bool {
    card.stats.completions.inc();
    let error = cqe.status != WcStatus::Success;
    if error {
        card.stats.error_completions.inc();
    }
    error
}

/// The completion of a send WQE of SL of so many bytes.
pub(super) fn send_done(op: SendOp, length: u32) -> CqeMsg {
    let byte_len = if op.brings_data() { length } else { 0 };
    CqeMsg { opcode: op.wc_opcode(), byte_len, ..CqeMsg::default() }
}

/// The completion of a receive WQE of SL that has this message, with the word that it may bring.
pub(super) fn recv_done(request: &SendRequest, imm: u32) -> CqeMsg {
    let (flags, imm, opcode) = recv_says(request.op, imm);
    let solicited = request.flags.contains(SendFlags::SOLICITED);
    CqeMsg { opcode, flags, imm, solicited, byte_len: request.length, ..CqeMsg::default() }
}

/// What the completion of a receive says of the message that it took.
fn recv_says(op: SendOp, imm: u32) -> (WcFlags, u32, WcOpcode) {
    let mut flags = WcFlags::empty();
    flags.set(WcFlags::WITH_IMM, op.has_imm());
    flags.set(WcFlags::WITH_INV, op == SendOp::SendInv);
    let imm = if flags.is_empty() { 0 } else { imm };
    let write = OrderClass::of(op) == OrderClass::Write;
    (flags, imm, if write { WcOpcode::RecvRdmaWithImm } else { WcOpcode::Recv })
}
