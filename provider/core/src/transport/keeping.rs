//! Requests behind a missing one, at a responder whose peer repeats selectively: see `nic::keep`.

use super::Ctx;
use crate::env::Env;
use crate::nic::keep::GapId;
use crate::types::{Psn, QpState};
use crate::wire::headers::SackEth;
use crate::wire::packet::Packet;
use crate::wire::{HeaderBuf, PKEY_DEFAULT, code};

impl<E: Env> Ctx<'_, E> {
    /// The QP is connected: its requests advertise selective repeat from now on, if it may and there is
    /// memory for it.
    pub(crate) fn offer_repeat(&mut self) {
        if self.sh.cfg.repeat && self.qp.qp_type.is_reliable() {
            let (frames, gaps) = (self.sh.cfg.kept, self.sh.cfg.gaps);
            let made = self.sh.keep.make(frames, gaps) && self.sh.repairs.make(gaps);
            self.qp.flags.advertises = u8::from(made);
        }
    }

    /// A request's flag of its sender, which may be another from one to the next. A QP whose messages may
    /// go to other cards keeps nothing: its progress then depends on them.
    #[inline]
    pub(super) fn note_repeat(&mut self, packet: &Packet<'_>) {
        let may = self.sh.cfg.repeat && self.qp.resp.fwd.is_none();
        self.qp.flags.answers = packet.bth().repeats() & u8::from(may);
    }

    /// Keeps a request, `n` behind the missing one. False: it is dropped, and no SACK tells the peer of
    /// the gap.
    pub(super) fn keep_ahead(&mut self, psn: Psn, n: u32, packet: &Packet<'_>) -> bool {
        if n > SackEth::SPAN {
            return self.gap().is_some();
        }
        let (own, keep) = (self.gap(), &mut self.sh.keep);
        let Some(gap) = own.or_else(|| keep.open(self.qp.qpn, self.now)) else { return false };
        self.qp.resp.gap = Some(gap);
        if keep.has(gap, psn) {
            keep.peer_spoke(gap, self.now);
            self.sh.stats.duplicate_request.inc();
            return true;
        }
        let kept = keep.put(gap, self.now, psn, packet.parts(), packet.bth().pad());
        if kept {
            self.sh.stats.kept_ahead.inc();
        }
        self.end_gap_if_empty(gap);
        kept
    }

    /// The QP's gap, unless others needed the room while its peer was silent: then it has none, as if nothing
    /// had come.
    pub(super) fn gap(&mut self) -> Option<GapId> {
        let (keep, own) = (&self.sh.keep, self.qp.qpn);
        self.qp.resp.gap = self.qp.resp.gap.filter(|gap| keep.is_of(*gap, own));
        self.qp.resp.gap
    }

    fn end_gap_if_empty(&mut self, gap: GapId) {
        if self.sh.keep.is_empty(gap) {
            self.sh.keep.close(gap);
            self.qp.resp.gap = None;
        }
    }

    /// The request at `from`, which was missing, came: executes what is kept behind it, in order. A request
    /// that must wait for a receive WQE is dropped like one from the wire, and answered with an RNR NAK.
    pub(super) fn fill_gap(&mut self, mut from: Psn) {
        while let Some(gap) = self.gap() {
            let next = self.qp.resp.epsn;
            let packets = next.since(from);
            if packets > 1 {
                self.sh.keep.skip(gap, from.plus(1), packets as u32 - 1);
            }
            let alive = matches!(self.qp.state, QpState::Rtr | QpState::Rts | QpState::Sqd);
            let kept = if packets > 0 && alive { self.sh.keep.take(gap, next) } else { None };
            let Some(kept) = kept else { return self.end_gap_if_empty(gap) };
            let bytes = self.sh.keep.take_bytes();
            let frame = self.sh.keep.frame(&bytes, kept);
            let speaks = self.qp.rpc.is_some();
            let packet =
                Packet::parse(frame).or_else(|e| if speaks { Packet::parse_rpc(frame) } else { Err(e) });
            if let Ok(packet) = packet {
                self.expected(next, &packet);
            }
            self.sh.keep.give_back(bytes, kept);
            from = next;
        }
    }

    /// The ACK that is owed, with what is kept.
    pub(super) fn emit_sack(&mut self, gap: GapId, psn: Psn) {
        self.sh.stats.sent_sack.inc();
        let kept = self.sh.keep.sack(gap, self.qp.resp.epsn);
        let header = HeaderBuf::bth(code::SACK, self.qp.attr.dest_qpn, psn, false, false, 0, PKEY_DEFAULT)
            .repeats(self.qp.flags.answers)
            .aeth(self.ack_syndrome(), self.qp.resp.msn)
            .sack(&kept);
        self.env.send_frame(&self.qp.attr.av, &header, &[], 0, false);
    }

    /// The QP ends, fails or begins anew: nothing is kept for it, and it repairs nothing.
    pub(crate) fn forget_gaps(&mut self) {
        if let Some(gap) = self.gap() {
            self.qp.resp.gap = None;
            self.sh.keep.close(gap);
        }
        self.end_repair();
    }
}
