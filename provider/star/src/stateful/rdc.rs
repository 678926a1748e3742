//! RDC: the last packet of a message, with SL's completion (docs/star.md, "Completions").
//!
//! SL's program has its buffer back once the completion is in its slot. So the packet leaves when all others
//! of the message are answered, and no copy of them can arrive any more; at once, where all have turns. The
//! card answers data and completion at once, and a copy of the packet changes nothing.

use alloc::vec::Vec;

use starverbs_core::env::SendQueue;
use starverbs_core::{Psn, QpState, Seg, SendOp, SendWqe, WcStatus};

use super::finish::{recv_done, send_done};
use super::packets::{kind_of, need_of, opt_of, refused, slot_of};
use super::stream::WqeProgress;
use super::window::{InFlight, Of};
use super::{CardCtx, Ended, Stateful};
use crate::ahead::KEPT;
use crate::bundle::{SHORT, ShortRdc, is_short};
use crate::carried::{CARRIED_LEN, Carried};
use crate::env::StarEnv;
use crate::form::Form;
use crate::message::CqeMsg;
use crate::registry::{Claim, SendCtx};
use crate::ring::CQE_SLOT;
use crate::turn::TURN_LEN;
use crate::wire::{Opt, Ptype, Queue, StarHeader, StarPacket};

/// Bytes of the completion before the data of a packet that `carries` one.
pub(super) const fn carried_len(carries: bool) -> usize {
    if carries { CARRIED_LEN } else { 0 }
}

/// Bytes before the data of the last packet of a WQE.
pub(super) fn front_len(op: &WqeProgress) -> u16 {
    let turn = if op.in_turn { TURN_LEN } else { 0 };
    (carried_len(op.carries) + turn) as u16
}

impl<E: StarEnv> Stateful<E> {
    /// Whether the last packet of a WQE may bring SL's completion with it, if there is room for that. What
    /// was begun before it must not be needed for that, but by other completions.
    pub(super) fn may_carry(&self, of: Of, wqe: &SendWqe) -> bool {
        self.local.form == Form::Packed && wqe.length > 0 && self.streams[of as usize].all_carry()
    }

    /// Sends the last packet of a WQE, which has waited until all others are answered and none of their
    /// copies can come any more: its completion gives SL's program the buffer. False: there is none that may
    /// go.
    pub(super) fn send_held(&mut self, card: &mut CardCtx<'_, E>, of: Of) -> bool {
        let Some(index) = self.stream(of).held() else { return false };
        if self.ended != Ended::Not || !self.has_room(card.now) {
            return false;
        }
        let op = *self.streams[of as usize].get(index);
        if op.left > 1 {
            return false;
        }
        if op.until > card.now && !self.has_no_copies(card, &op) {
            self.arm(op.until);
            return false;
        }
        let offset = op.held;
        let Some((addr, _, rule)) = self.target(card, of, index, &op, offset) else {
            card.stats.star_rejects.inc();
            self.abandon(card, of, index, refused(of, &op));
            return true;
        };
        let (kind, len) = (kind_of(of, op.class), (op.length - offset) as u16);
        let fresh =
            InFlight { of, kind, last: true, len, wqe: index, offset, addr, rule, ..InFlight::default() };
        if !self.is_admitted(card, fresh.cost()) {
            return false;
        }
        if op.probed {
            self.forget_probe(card, of, index);
        }
        let stream = self.stream(of);
        stream.let_go(index);
        let progress = stream.op(index);
        (progress.copies, progress.until, progress.probe) = (0, 0, 0);
        self.launch(card, &fresh, &op);
        true
    }

    /// The last packet of a WQE, with SL's completion. SL may have that, and the answer was lost; and either
    /// program may have taken its memory away since. Then the packet asks whether that is so: it has no data.
    pub(super) fn send_last(
        &mut self,
        card: &mut CardCtx<'_, E>,
        psn: Psn,
        entry: &InFlight,
        op: &WqeProgress,
        segs: &mut Vec<Seg>,
    ) -> Result<(), WcStatus> {
        if entry.tries == 0 && !op.in_turn && is_short(entry.len.into(), self.mtu()) {
            return self.collect_short(card, psn, entry, op);
        }
        let (queue, seq, cqe) = self.completion_of(entry, op);
        let slot = Seg { addr: self.completion_slot(card.registry, queue, seq), len: CQE_SLOT as u32 };
        let (rule, addr, len) = (entry.rule, entry.addr, u32::from(entry.len));
        let asks = match self.collect_last(card, entry, op, segs) {
            Err(status) if entry.tries == 0 => return Err(status),
            collected => collected.is_err(),
        };
        let turn = self.turn_of(card.registry, entry, op);
        let claim = if asks {
            Claim::Slot(slot)
        } else {
            let slots = [Some(slot), turn.map(|turn| slot_of(&turn))];
            Claim::WithSlots { rule, addr, len, need: need_of(entry.of, op.class), slots }
        };
        let cqe = CqeMsg { slot: slot.addr, ..cqe };
        let mut front = [0; CARRIED_LEN + TURN_LEN];
        let (carried, behind) = front.split_at_mut(CARRIED_LEN);
        carried.copy_from_slice(&Carried { queue, seq, cqe, stored: self.stored_word() }.encode());
        behind.copy_from_slice(&turn.map_or([0; TURN_LEN], |turn| turn.encode()));
        let data = if asks { 0 } else { entry.len };
        let header = self.rdc_header(psn, entry, op, data);
        let front = front.get(..usize::from(front_len(op))).unwrap_or(&front);
        let ctx = SendCtx { env: &mut *card.env, stats: card.stats, now: card.now };
        let left = card.registry.send(ctx, self.conn, &claim, header, front, segs);
        if left { Ok(()) } else { Err(refused(entry.of, op)) }
    }

    /// Of an RDC with so many bytes of the message.
    pub(super) fn rdc_header(&self, psn: Psn, entry: &InFlight, op: &WqeProgress, data: u16) -> StarHeader {
        StarHeader {
            ptype: Ptype::Rdc,
            opt: if op.in_turn { Opt::Recv } else { opt_of(op.class) },
            migrate: false,
            ack: true,
            qpn: self.local.qpn,
            epoch: 0,
            psn,
            addr: entry.addr,
            len: front_len(op) + data,
        }
    }

    /// The last packet of a WQE, with SL's completion, for the first time: those of short messages that are
    /// posted together leave as one packet.
    fn collect_short(
        &mut self,
        card: &mut CardCtx<'_, E>,
        psn: Psn,
        entry: &InFlight,
        op: &WqeProgress,
    ) -> Result<(), WcStatus> {
        let mut room = [0; SHORT];
        let data = room.get_mut(..entry.len.into()).unwrap_or_default();
        self.copy(card, entry, data)?;
        let (queue, seq, cqe) = self.completion_of(entry, op);
        let slot = Seg { addr: self.completion_slot(card.registry, queue, seq), len: CQE_SLOT as u32 };
        let (rule, addr, len) = (entry.rule, entry.addr, u32::from(entry.len));
        let need = need_of(entry.of, op.class);
        let claim = Claim::WithSlots { rule, addr, len, need, slots: [Some(slot), None] };
        let cqe = CqeMsg { slot: slot.addr, ..cqe };
        let header = self.rdc_header(psn, entry, op, entry.len);
        let completion = &Carried { queue, seq, cqe, stored: self.stored_word() }.encode();
        let ctx = SendCtx { env: &mut *card.env, stats: card.stats, now: card.now };
        let rdc = ShortRdc { header, completion, data };
        let left = card.registry.collect(ctx, self.conn, &claim, &rdc, self.mtu());
        if left { Ok(()) } else { Err(refused(entry.of, op)) }
    }

    /// Whether there is another packet of an entry's WQE that is done in its turn, with SL's completion, and
    /// has left.
    pub(super) fn leaves_it_to_the_last(&self, entry: &InFlight) -> bool {
        let op = self.streams[entry.of as usize].get(entry.wqe);
        op.in_turn && op.carries && op.all && !entry.last
    }

    /// The last packet of an entry's WQE says of all others what it says of itself, as each had its turn
    /// before it.
    pub(super) fn forget_others(&mut self, card: &mut CardCtx<'_, E>, entry: &InFlight) {
        let InFlight { of, wqe, .. } = *entry;
        self.forget_packets(card, |other| other.of == of && other.wqe == wqe && !other.last);
        self.stream(of).op(wqe).left = 1;
    }

    /// Collects what the last packet of a WQE brings. Why that is not to be had any more, otherwise.
    fn collect_last(
        &self,
        card: &mut CardCtx<'_, E>,
        entry: &InFlight,
        op: &WqeProgress,
        segs: &mut Vec<Seg>,
    ) -> Result<(), WcStatus> {
        if !card.registry.is_live(entry.rule) {
            return Err(refused(entry.of, op));
        }
        self.gather(card, entry, segs).inspect_err(|_| segs.clear())
    }

    /// SL's completion that the last packet of a WQE carries: of the receive that our WQE took, or of SL's
    /// READ.
    fn completion_of(&self, entry: &InFlight, op: &WqeProgress) -> (Queue, Psn, CqeMsg) {
        match (entry.of, op.recv) {
            (Of::Local, recv) => {
                let seq = Psn::new(recv.unwrap_or_default());
                let sq = &self.local.sq;
                (Queue::Recv, seq, recv_done(&sq.request(entry.wqe), sq.imm(entry.wqe)))
            }
            (Of::Remote, _) => (Queue::Send, Psn::new(entry.wqe), send_done(SendOp::Read, op.length)),
        }
    }

    /// What a packet that carries a completion has done, or that it was not done before memory of its was
    /// taken away. False: it is no answer to such.
    pub(super) fn answered_last(
        &mut self,
        card: &mut CardCtx<'_, E>,
        packet: &StarPacket<'_>,
        entry: &InFlight,
        op: &WqeProgress,
    ) -> bool {
        let (header, alone) = (&packet.header, front_len(op));
        let not = header.ptype == Ptype::Gda && header.len == 0;
        let early = op.in_turn && header.ptype == Ptype::Rda && header.len == 0;
        let kept = op.in_turn && header.ptype == Ptype::Rda && header.len == KEPT;
        let done = header.ptype == Ptype::Rda && (header.len == alone + entry.len || header.len == alone);
        if !(done || not || early || kept) || header.addr != entry.addr || self.state != QpState::Rts {
            return false;
        }
        if done {
            self.count_answer(card, header.psn);
            return true;
        }
        if early {
            self.refused_early(card, header.psn, entry);
            return true;
        }
        if kept {
            self.kept_ahead(card, header.psn);
            return true;
        }
        let mut segs = card.registry.take_segs();
        let collected = self.collect_last(card, entry, op, &mut segs);
        card.registry.keep_segs(segs);
        let Err(status) = collected else { return false };
        self.abandon(card, entry.of, entry.wqe, status);
        true
    }
}
