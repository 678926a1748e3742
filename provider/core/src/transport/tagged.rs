//! Messages to an SRQ that matches tags: eager ones go straight to the buffer of their tag, the data of
//! others is fetched from the sender, which is notified then (rdma-core, Documentation/tag_matching.md).
//!
//! The send queue of such a QP is the card's: a READ for each rendezvous, then a SEND of its headers.

use super::{Ctx, MessageInProgress, SendPause};
use crate::env::{CompletionQueue, Env, SendQueue};
use crate::qp::RecvSource;
use crate::tags::{MAX_TAG_SGE, Slot, TagList};
use crate::types::{Cqe, QpState, SendOp, SendWqe, Sge, WcFlags, WcOpcode, WcStatus};
use crate::wire::PKEY_DEFAULT;
use crate::wire::builder::HeaderBuf;
use crate::wire::opcode::code;
use crate::wire::packet::Packet;
use crate::wire::tags::{Rendezvous, Tagged};

use zerocopy::IntoBytes;

impl<E: Env> Ctx<'_, E> {
    /// The list of the QP's SRQ.
    fn tags(&mut self) -> Option<&mut TagList> {
        let RecvSource::Shared(srq) = &self.qp.rq else { return None };
        self.sh.srqs.get_mut(srq.0 as usize)?.tags.as_mut().map(|tags| &mut tags.list)
    }

    /// Begins a message: where it goes, and the bytes of this packet that go there. `None`: all is done, or
    /// the peer must come again.
    pub(super) fn begin_tagged<'p>(&mut self, packet: &Packet<'p>) -> Option<(MessageInProgress, &'p [u8])> {
        let data = packet.payload();
        let mut opcode = WcOpcode::TmRecv;
        match Tagged::parse(data) {
            Tagged::Eager(tmh, rest) => {
                if let Some(slot) = self.tags()?.take(tmh.tag()) {
                    self.hold_tagged(slot);
                    let (tag, app_ctx) = (tmh.tag(), tmh.app_ctx());
                    return Some((MessageInProgress::Tagged { received: 0, app_ctx, tag }, rest));
                }
            }
            Tagged::Rendezvous(rendezvous) => {
                if self.may_fetch(packet)
                    && let Some(slot) = self.tags()?.take(rendezvous.tmh().tag())
                {
                    self.meet(packet, slot, rendezvous);
                    return None;
                }
            }
            Tagged::Untagged => opcode = WcOpcode::TmNoTag,
        }
        let begun = self.begin_send(opcode)?;
        if opcode == WcOpcode::TmRecv {
            self.tags()?.note_unexpected();
        }
        Some((begun, data))
    }

    /// Whether the card can fetch data: else the program may.
    fn may_fetch(&self, packet: &Packet<'_>) -> bool {
        packet.op().is_only() && self.qp.state == QpState::Rts && self.qp.attr.max_rd_atomic > 0
    }

    /// A matched buffer is what the message goes to.
    fn hold_tagged(&mut self, slot: Slot) {
        let Some(tags) = self.tags() else { return };
        let buffer = *tags.buffer(slot);
        tags.release(slot);
        self.qp.resp.recv.hold(buffer.wr_id, buffer.sges());
    }

    /// The QP begins anew: what it matched is lost.
    pub(crate) fn forget_tags(&mut self) {
        let qpn = self.qp.qpn;
        if let Some(tags) = self.tags() {
            tags.forget(qpn);
        }
    }

    /// The first packet of a longer message matched.
    pub(super) fn matched(&mut self, tag: u64, app_ctx: u32) {
        let wr_id = self.qp.resp.recv.wr_id();
        self.push_tagged(Cqe { wr_id, ..Cqe::matched(tag, app_ctx) });
    }

    /// A rendezvous matched.
    fn meet(&mut self, packet: &Packet<'_>, slot: Slot, rendezvous: Rendezvous) {
        let qpn = self.qp.qpn;
        let Some(tags) = self.tags() else { return };
        let (wr_id, room) = (tags.buffer(slot).wr_id, tags.buffer(slot).room());
        let tmh = *rendezvous.tmh();
        let cqe = Cqe { wr_id, ..Cqe::matched(tmh.tag(), tmh.app_ctx()) };
        self.accept(packet, 1, true);
        if u64::from(rendezvous.len()) <= room {
            if let Some(tags) = self.tags() {
                tags.suspend(slot, qpn, rendezvous);
            }
            self.push_tagged(cqe);
            return self.fetch();
        }
        /* the program gets the headers instead, as far as they fit, and goes on by itself */
        self.hold_tagged(slot);
        let headers = rendezvous.as_bytes();
        let headers = headers.get(..room as usize).unwrap_or(headers);
        let status = match self.place(0, headers) {
            Ok(()) => WcStatus::TmRndvIncomplete,
            Err(_) => WcStatus::LocProtErr,
        };
        self.qp.resp.recv.drop_held();
        self.push_tagged(Cqe { status, byte_len: headers.len() as u32, ..cqe });
    }

    /// Asks for the data of what waits, as far as the send queue has room.
    pub(super) fn fetch(&mut self) {
        let qpn = self.qp.qpn;
        while let Some(slot) = self.tags().and_then(|tags| tags.waiting(qpn)) {
            let Some(tags) = self.tags() else { return };
            let (buffer, rendezvous) = (*tags.buffer(slot), *tags.rendezvous(slot));
            let wqe = SendWqe {
                wr_id: u64::from(slot),
                op: SendOp::Read,
                remote_addr: rendezvous.va(),
                rkey: rendezvous.rkey(),
                ..SendWqe::default()
            };
            let mut sges = [Sge::default(); MAX_TAG_SGE];
            let count = cut(buffer.sges(), rendezvous.len(), &mut sges);
            if !self.qp.sq.post_own(wqe, &sges[..count]) {
                /* whatever completes next comes here again */
                return;
            }
            if let Some(tags) = self.tags() {
                tags.resume(slot);
            }
            self.ready();
        }
    }

    /// One of the card's own requests is done, well or not.
    pub(super) fn own_done(&mut self, wqe: &SendWqe, status: WcStatus) {
        if wqe.op == SendOp::Read {
            let slot = wqe.wr_id as Slot;
            let Some(tags) = self.tags() else { return };
            let (wr_id, rendezvous) = (tags.buffer(slot).wr_id, *tags.rendezvous(slot));
            tags.release(slot);
            let mut cqe = Cqe { wr_id, status, opcode: WcOpcode::TmRecv, ..Cqe::default() };
            if status == WcStatus::Success {
                (cqe.byte_len, cqe.flags) = (wqe.length, WcFlags::TM_DATA_VALID);
                self.send_fin(rendezvous);
            }
            self.push_tagged(cqe);
        }
        if status == WcStatus::Success {
            self.fetch();
        }
    }

    /// What waits for a QP that failed.
    pub(super) fn flush_waiting(&mut self) {
        let qpn = self.qp.qpn;
        while let Some(slot) = self.tags().and_then(|tags| tags.waiting(qpn)) {
            let Some(tags) = self.tags() else { return };
            tags.resume(slot);
            self.own_done(
                &SendWqe { op: SendOp::Read, wr_id: u64::from(slot), ..SendWqe::default() },
                WcStatus::WrFlushErr,
            );
        }
    }

    /// Notifies the sender that its data is fetched. The READ has just left its place in the queue. The
    /// headers travel in the WQE.
    fn send_fin(&mut self, rendezvous: Rendezvous) {
        let fin = rendezvous.fin();
        let wqe = SendWqe {
            op: SendOp::Send,
            imm: fin.tmh().app_ctx(),
            compare_add: fin.tmh().tag(),
            remote_addr: fin.va(),
            rkey: fin.rkey(),
            swap: u64::from(fin.len()),
            ..SendWqe::default()
        };
        self.qp.sq.post_own(wqe, &[]);
        self.ready();
    }

    /// The packet of a FIN.
    pub(super) fn emit_fin(&mut self, wqe: &SendWqe) -> SendPause {
        let fin = Rendezvous::new(wqe.compare_add, wqe.imm, wqe.remote_addr, wqe.rkey, wqe.swap as u32).fin();
        if !self.window_admits(self.qp.path, size_of::<Rendezvous>() as u32) {
            return SendPause::Idle;
        }
        let (peer, psn) = (self.qp.attr.dest_qpn, self.qp.req.psn);
        let header = HeaderBuf::bth(code::RC_SEND_ONLY, peer, psn, true, false, 0, PKEY_DEFAULT)
            .repeats(self.qp.flags.advertises)
            .tags(&fin);
        self.env.send_frame(&self.qp.attr.av, &header, &[], 0, false);
        self.qp.req.unasked = 0;
        self.advance(wqe, 0, 1);
        SendPause::Sent
    }

    fn push_tagged(&mut self, cqe: Cqe) {
        let cqe = Cqe { qpn: self.qp.qpn, ..cqe };
        self.sh.stats.completions.inc();
        if cqe.status != WcStatus::Success {
            self.sh.stats.error_completions.inc();
        }
        let failed = cqe.status != WcStatus::Success;
        if self.srq_cq().is_some_and(|cq| cq.push(&cqe, failed).is_err()) {
            self.overrun();
        }
    }
}

/// The first `len` bytes of an SGE list; gives how many SGEs that takes.
fn cut(from: &[Sge], len: u32, to: &mut [Sge; MAX_TAG_SGE]) -> usize {
    let mut left = len;
    let mut count = 0;
    for (sge, place) in from.iter().zip(to) {
        if left == 0 {
            break;
        }
        *place = Sge { len: sge.len.min(left), ..*sge };
        left -= place.len;
        count += 1;
    }
    count
}
