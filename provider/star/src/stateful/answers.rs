//! Packets of SL: answers of its card (RDA, GDA, EA), and the WQEs that its host sends.

use starverbs_core::env::SendQueue;
use starverbs_core::transport::slices;
use starverbs_core::{Access, Gid, Psn, QpId, QpState, SendOp, SendWqe, WcStatus};

use super::events::Acked;
use super::remote::Stored;
use super::stream::{OrderClass, WqeProgress, WqeStream};
use super::window::{AnsweredPacket, InFlight, Kind, Of};
use super::{CardCtx, Stateful};
use crate::ahead::KEPT;
use crate::answers::MOST_ANSWERED;
use crate::env::StarEnv;
use crate::form::Form;
use crate::message::Wqe;
use crate::packed::{PackedWqe, Records};
use crate::turn::TURN_LEN;
use crate::wire::{Opt, PSN_STEP, Ptype, Queue, StarHeader, StarPacket};

impl<E: StarEnv> Stateful<E> {
    /// A packet for this connection came from `source`.
    pub fn handle_packet(&mut self, card: &mut CardCtx<'_, E>, source: &Gid, packet: &StarPacket<'_>) {
        self.handle_packets(card, source, packet, || None);
    }

    /// The same, and those behind it that `more` gives, which are none of control. What follows from all is
    /// done once.
    pub(crate) fn handle_packets<'p>(
        &mut self,
        card: &mut CardCtx<'_, E>,
        source: &Gid,
        packet: &StarPacket<'_>,
        mut more: impl FnMut() -> Option<StarPacket<'p>>,
    ) {
        let [ours, theirs] = &self.streams;
        let done = [ours.una, theirs.una];
        let mut known = if packet.header.migrate {
            self.take_control(card, source, packet)
        } else {
            self.take_packet(card, source, packet)
        };
        let mut drops = u64::from(!known);
        while let Some(packet) = more() {
            let taken = self.take_packet(card, source, &packet);
            known |= taken;
            drops += u64::from(!taken);
        }
        self.infer(card);
        self.await_kept(card);
        self.charge(card);
        /* what was done is told to the program, whose answer takes the EA along */
        let [ours, theirs] = &self.streams;
        if [ours.una, theirs.una] == done {
            self.ack_recvs(card);
        }
        if known {
            (self.last_inbound, self.silent) = (card.now, false);
            self.disarm_if_idle();
        }
        if drops > 0 {
            card.stats.star_drops.add(drops);
        }
    }

    fn take_packet(&mut self, card: &mut CardCtx<'_, E>, source: &Gid, packet: &StarPacket<'_>) -> bool {
        let header = &packet.header;
        let mine = card.path.leads_to(source)
            && header.qpn == self.local.qpn
            && header.epoch == self.epoch.to_be_bytes()[3];
        mine && match header.ptype {
            Ptype::Wqep => self.take_wqe(card, packet),
            Ptype::Wqeps => self.take_wqes(card, packet),
            Ptype::Ea => self.on_ack(card, header),
            Ptype::Rda => {
                let echoed = (header.addr, header.len);
                self.answered_short(card, header.psn, Some(echoed)) || self.answered(card, packet)
            }
            Ptype::Gda => {
                let to = (header.psn, header.addr);
                self.read_short(card, to, packet.data) || self.answered(card, packet)
            }
            Ptype::Rdas => self.answered_all(card, header),
            Ptype::Ed => self.take_eager(card, packet),
            Ptype::Rd | Ptype::Rdc | Ptype::Rdcs | Ptype::Gd | Ptype::Cqep => false,
        }
    }

    /// A WQEP: answered as soon as it is stored, and each time it comes again (III-C2).
    fn take_wqe(&mut self, card: &mut CardCtx<'_, E>, packet: &StarPacket<'_>) -> bool {
        let header = &packet.header;
        let Some(wqe) = Wqe::decode(packet.data) else { return false };
        let queue = header.opt.queue();
        if wqe.recv != (queue == Queue::Recv) {
            return false;
        }
        let stored = self.store(card, header.psn, &wqe);
        if stored {
            self.ack_wqe(queue, header.opt, header.psn);
        }
        stored
    }

    /// An EA is owed for a stored WQE: a cumulative one, or one of its own if a WQE before it is missing.
    pub(super) fn ack_wqe(&mut self, queue: Queue, opt: Opt, seq: Psn) {
        let stored = if queue == Queue::Recv { self.recvs.stored() } else { self.sends.stored() };
        if self.local.form == Form::Packed && seq.before(stored) {
            self.owed_acks.push_all(queue);
        } else {
            let most = self.most_acks();
            self.owed_acks.push(&mut self.rare, most, opt, seq);
        }
    }

    /// Many WQEs. False: one of them is malformed, or cannot be stored; those before it are.
    fn take_wqes(&mut self, card: &mut CardCtx<'_, E>, packet: &StarPacket<'_>) -> bool {
        for record in Records::new(self.store_recvs(card, packet.data)) {
            let Some(PackedWqe { seq, wqe }) = record else { return false };
            if !self.store(card, seq, &wqe) {
                return false;
            }
            let (queue, opt) = if wqe.recv { (Queue::Recv, Opt::Recv) } else { (Queue::Send, Opt::Send) };
            self.ack_wqe(queue, opt, seq);
        }
        true
    }

    /// Keeps a WQE of SL, if it is new. False: it cannot be kept.
    fn store(&mut self, card: &CardCtx<'_, E>, seq: Psn, wqe: &Wqe<'_>) -> bool {
        let queue = if wqe.recv { Queue::Recv } else { Queue::Send };
        let depth = self.completions[queue as usize].depth();
        let (oldest, more) = match queue {
            Queue::Recv => (self.recvs.oldest(), self.recvs.growth(&self.rare, depth, seq, wqe)),
            Queue::Send => (self.sends.oldest(), self.sends.growth(&self.rare, depth, seq, wqe)),
        };
        let Some(more) = more else { return false };
        if !seq.before(oldest) {
            /* for its completion, too: that cannot be refused later */
            let more = more + self.completions[queue as usize].growth(oldest, seq);
            if more > 0 && !self.grows(card, queue, more, (oldest, seq)) {
                return false;
            }
        }
        let stored = match queue {
            Queue::Recv => self.recvs.store(&mut self.rare, depth, seq, wqe),
            Queue::Send => self.sends.store(&mut self.rare, depth, seq, wqe),
        };
        if stored == Stored::Refused {
            return false;
        }
        card.stats.star_rcvd_wqep.inc();
        self.met = true;
        if stored == Stored::New && !wqe.recv {
            self.report_ended(card.now);
        }
        true
    }

    /// Whether this end may keep so many bytes more, for WQEs of a queue of SL between these and their
    /// completions. If so, there is room for the completions.
    #[cold]
    fn grows(&mut self, card: &CardCtx<'_, E>, queue: Queue, more: usize, (oldest, seq): (Psn, Psn)) -> bool {
        self.may_grow(card, more) && self.completions[queue as usize].make_room(oldest, seq).is_ok()
    }

    /// Whether this end may keep so many bytes more.
    #[inline]
    pub(super) fn may_grow(&self, card: &CardCtx<'_, E>, more: usize) -> bool {
        more == 0 || card.env.may_keep(&self.local.sq, self.bytes() + more)
    }

    /// An EA, of one CQEP or of several. False: it answers nothing.
    fn on_ack(&mut self, card: &mut CardCtx<'_, E>, header: &StarHeader) -> bool {
        let mut known = false;
        if header.len > MOST_ANSWERED {
            return false;
        }
        for seq in run(header.psn, header.len.max(1), 1) {
            match self.completions[header.opt.queue() as usize].on_ack(seq) {
                Acked::Unknown => continue,
                Acked::Duplicate => (),
                Acked::New(sent) => {
                    if let Some(sent) = sent {
                        card.path.rtt.seen(card.now, card.now.saturating_sub(sent));
                    }
                    self.backoff = 0;
                }
            }
            known = true;
        }
        known
    }

    /// RDA or GDA. False: it answers nothing that is under way.
    fn answered(&mut self, card: &mut CardCtx<'_, E>, packet: &StarPacket<'_>) -> bool {
        let (header, data) = (&packet.header, packet.data);
        let Some(entry) = self.window.get(header.psn).copied() else {
            return self.answered_again(card, header.psn);
        };
        let op = *self.streams[entry.of as usize].get(entry.wqe);
        if op.carries && entry.last {
            return self.answered_last(card, packet, &entry, &op);
        }
        let kept = op.in_turn && header.ptype == Ptype::Rda && header.len == KEPT;
        let early = entry.kind == Kind::Atomic && header.ptype == Ptype::Gda && data.is_empty()
            || op.in_turn && header.ptype == Ptype::Rda && header.len == 0;
        let front = if op.in_turn { TURN_LEN as u16 } else { 0 };
        let asked = early
            || kept
            || match entry.kind {
                Kind::Put => header.ptype == Ptype::Rda && header.len == front + entry.len,
                Kind::Get => header.ptype == Ptype::Gda && data.len() == usize::from(entry.len),
                Kind::Atomic => header.ptype == Ptype::Gda && data.len() == 8,
            };
        if !asked || header.addr != entry.addr || self.state != QpState::Rts {
            return false;
        }
        if early {
            self.refused_early(card, header.psn, &entry);
            return true;
        }
        if kept {
            self.kept_ahead(card, header.psn);
            return true;
        }
        if op.class == OrderClass::Stream && !self.takes_piece(entry.offset) {
            self.refuse_piece(card, header.psn, &entry);
            return true;
        }
        if self.too_early(&entry, &op) {
            self.window.refuse(header.psn);
            return true;
        }
        self.place_answer(card, header.psn, &entry, data);
        true
    }

    /// A packet's data is here, or its answer needs none.
    pub(super) fn place_answer(
        &mut self,
        card: &mut CardCtx<'_, E>,
        psn: Psn,
        entry: &InFlight,
        data: &[u8],
    ) {
        let op = *self.streams[entry.of as usize].get(entry.wqe);
        match self.place(card, entry, &op, data) {
            Ok(()) => self.count_answer(card, psn),
            Err(status) => self.abandon(card, entry.of, entry.wqe, status),
        }
    }

    /// SL's card has neither done nor kept a packet, as one before it is missing there: lost, or late, which
    /// is as bad for what has turns.
    pub(super) fn refused_early(&mut self, card: &mut CardCtx<'_, E>, psn: Psn, entry: &InFlight) {
        self.window.refuse_early(psn);
        if entry.kind == Kind::Put {
            card.path.rtt.was_lost();
            let op = *self.streams[entry.of as usize].get(entry.wqe);
            if let Some(turn) = self.turn_of(card.registry, entry, &op) {
                self.turns.shrink(turn.number, self.writes);
            }
        }
    }

    /// SL's card has what has a turn, and does it once what is missing before it is there.
    pub(super) fn kept_ahead(&mut self, card: &mut CardCtx<'_, E>, psn: Psn) {
        let before = self.window.in_flight();
        let Some((entry, newest)) = self.window.keep(psn) else { return };
        self.release_path(card, before);
        self.backoff = 0;
        card.path.rtt.was_lost();
        if newest && entry.tries == 1 {
            card.path.rtt.seen(card.now, card.now.saturating_sub(entry.sent));
        }
    }

    /// An answer came, before which packets of so much cost were in flight: the path has room for what it
    /// took.
    pub(super) fn release_path(&mut self, card: &mut CardCtx<'_, E>, before: u32) {
        let freed = (before - self.window.in_flight()).min(self.charged);
        card.path.acked(freed);
        self.charged -= freed;
    }

    /// What SL's card keeps, and has nothing missing before it any more, is waited for as if it left now.
    pub(super) fn await_kept(&mut self, card: &CardCtx<'_, E>) {
        if self.window.await_kept(card.now) {
            self.arm(card.now + self.timeout(card));
        }
    }

    /// Answers to these packets are waited for no more, nor do those behind them wait. Gives how many had
    /// none.
    pub(super) fn forget_packets(
        &mut self,
        card: &mut CardCtx<'_, E>,
        which: impl Fn(&InFlight) -> bool,
    ) -> u32 {
        let count = self.window.forget(which);
        self.await_kept(card);
        self.charge(card);
        count
    }

    /// RDAS: RDAs of packets of which this is the last. False: they answer nothing that is under way.
    fn answered_all(&mut self, card: &mut CardCtx<'_, E>, header: &StarHeader) -> bool {
        let StarHeader { psn: last, addr, len: count, .. } = *header;
        if count > MOST_ANSWERED || !self.window.has_put(last, addr) {
            return false;
        }
        let mut known = false;
        for psn in run(last, count, PSN_STEP) {
            if self.answered_short(card, psn, None) {
                known = true;
                continue;
            }
            known |= match self.window.get(psn) {
                Some(entry) if entry.kind != Kind::Put || self.state != QpState::Rts => false,
                Some(_) => {
                    self.count_answer(card, psn);
                    true
                }
                None => self.answered_again(card, psn),
            };
        }
        known
    }

    /// SL's WRITEs are seen in our memory as they land: one lands when all before it is there, and its last
    /// packet behind its others.
    fn too_early(&mut self, entry: &InFlight, op: &WqeProgress) -> bool {
        let seen = entry.of == Of::Remote && entry.kind == Kind::Get && op.class == OrderClass::Write;
        seen && (self.settled() != entry.wqe || entry.last && op.left > 1)
    }

    pub(super) fn count_answer(&mut self, card: &mut CardCtx<'_, E>, psn: Psn) {
        while let Some(earlier) = self.first_turn_before(psn) {
            self.count_earlier(card, earlier);
        }
        let before = self.window.in_flight();
        let Some(answered) = self.window.done(psn) else { return };
        self.met = true;
        let AnsweredPacket { entry, sent, overtaken } = answered;
        let op = self.stream(entry.of).get(entry.wqe);
        if op.in_turn {
            if op.carries && entry.last && op.left > 1 {
                self.forget_others(card, &entry);
            }
            self.turns.grow();
        }
        self.release_path(card, before);
        self.backoff = 0;
        if let Some(sent) = sent {
            card.path.rtt.seen(card.now, card.now.saturating_sub(sent));
            /* those before it would have been answered before; nothing behind what is alone says so */
            if entry.copies() > 0 {
                card.path.rtt.was_lost();
            }
        }
        card.path.rtt.was_overtaken(overtaken);
        if entry.is_probe() {
            self.stream(entry.of).op(entry.wqe).probed = false;
            self.await_copies(card, entry.of, entry.wqe);
            return self.finish(card);
        }
        self.stream(entry.of).carried(entry.wqe, WcStatus::Success);
        let op = self.stream(entry.of).op(entry.wqe);
        op.left -= 1;
        /* a copy of one that carries a completion changes nothing, nor one of what had its turn */
        let once = op.in_turn || op.carries && entry.last;
        if entry.kind == Kind::Put && entry.copies() > 0 && !once {
            op.copies += entry.copies();
            op.copied = op.copied.max(answered.copied());
        }
        /* its last packet may wait for that */
        if op.all && op.left == u32::from(op.held > 0) {
            self.await_copies(card, entry.of, entry.wqe);
            self.finish(card);
        }
    }

    /// The first packet without an answer before this one, if both have turns: as this one had its turn, so
    /// had that.
    #[inline]
    fn first_turn_before(&mut self, psn: Psn) -> Option<Psn> {
        if !self.streams.iter().any(WqeStream::has_turns) {
            return None;
        }
        let before = self.window.first_put_before(psn)?;
        let in_turn = |psn| {
            let entry = self.window.get(psn)?;
            Some(self.streams[entry.of as usize].get(entry.wqe).in_turn)
        };
        (in_turn(psn) == Some(true) && in_turn(before) == Some(true)).then_some(before)
    }

    /// A packet that had its turn was done, as one behind it was: its answer is lost, or late.
    fn count_earlier(&mut self, card: &mut CardCtx<'_, E>, psn: Psn) {
        let before = self.window.in_flight();
        let Some(entry) = self.window.done_by_turn(psn) else { return };
        self.release_path(card, before);
        self.turns.grow();
        let op = self.stream(entry.of).op(entry.wqe);
        op.left -= 1;
        if op.all && op.left == 0 {
            self.await_copies(card, entry.of, entry.wqe);
            self.finish(card);
        }
    }

    /// Which packets are lost, as the answers show that came.
    fn infer(&mut self, card: &mut CardCtx<'_, E>) {
        let lost = self.window.infer(card.path.rtt.disorder());
        if lost > 0 {
            card.path.lost(lost);
            card.path.rtt.was_lost();
        }
    }

    /// Whether no copy of a packet of a WQE can be under way any more: each was answered, or what left well
    /// behind them was.
    pub(super) fn has_no_copies(&self, card: &CardCtx<'_, E>, op: &WqeProgress) -> bool {
        let newest = self.window.newest_put();
        op.copies == 0 || card.path.rtt.order().is_some_and(|order| op.copied + order <= newest)
    }

    /// All of a WQE is answered. It waits while a late copy of an RD may overwrite memory in use again,
    /// as SL does not recognise copies (docs/star.md, "Loss recovery"). An RD without data shows that none is
    /// under way, if nothing else does.
    pub(super) fn await_copies(&mut self, card: &CardCtx<'_, E>, of: Of, index: u32) {
        let op = self.stream(of).op(index);
        op.probe = 0;
        if op.copies == 0 {
            op.until = 0;
            return;
        }
        let (now, order) = (card.now, card.path.rtt.order());
        let gone = self.has_no_copies(card, self.streams[of as usize].get(index));
        let lifetime = self.lifetime(card.path);
        let op = self.stream(of).op(index);
        if gone {
            op.until = 0;
        } else if op.until == 0 {
            op.until = now + lifetime;
            if let Some(order) = order {
                let at = now.max(op.copied + order);
                op.probe = if at + order < op.until { at } else { 0 };
            }
        }
        let probe = op.probe;
        if probe > now {
            self.arm(probe);
        }
    }

    /// An answer to a packet that has one: SL's card answers twice, or it is that to another transmission. A
    /// copy that was answered is under way no more: its WQE need not wait for it. False: no packet is known.
    fn answered_again(&mut self, card: &mut CardCtx<'_, E>, psn: Psn) -> bool {
        let Some(entry) = self.window.done_again(psn) else { return self.window.remembers(psn) };
        let stream = self.stream(entry.of);
        if entry.kind == Kind::Put && !entry.is_probe() && stream.holds(entry.wqe) {
            let op = stream.op(entry.wqe);
            op.copies = op.copies.saturating_sub(1);
            if op.copies == 0 && op.until > 0 {
                op.until = 0;
                self.finish(card);
            }
        }
        true
    }

    /// Puts what a GDA brought where it belongs. How the WQE ends, otherwise.
    fn place(
        &mut self,
        card: &mut CardCtx<'_, E>,
        entry: &InFlight,
        op: &WqeProgress,
        data: &[u8],
    ) -> Result<(), WcStatus> {
        match (entry.of, entry.kind, op.class) {
            (_, Kind::Put, _) => Ok(()),
            (Of::Local, Kind::Atomic, _) => {
                /* it is placed in its turn: another may go to the same place */
                self.streams[0].op(entry.wqe).value = <[u8; 8]>::try_from(data).map_or(0, u64::from_be_bytes);
                Ok(())
            }
            (Of::Local, ..) => self.scatter(card, entry.wqe, entry.offset, data).ok_or(WcStatus::LocProtErr),
            (Of::Remote, _, OrderClass::Send) => {
                self.place_recv(card, op, entry.offset, data).ok_or(WcStatus::RemOpErr)
            }
            (Of::Remote, _, OrderClass::Rpc) => {
                card.rpc.put(entry.offset as usize, data).ok_or(WcStatus::RemOpErr)
            }
            (Of::Remote, _, OrderClass::Stream) => self.put_piece(card, entry, data),
            (Of::Remote, ..) => {
                let Some(wqe) = self.sends.get(Psn::new(entry.wqe)) else { return Err(WcStatus::RemOpErr) };
                self.place_write(card, wqe, entry.offset, data).ok_or(WcStatus::RemAccessErr)
            }
        }
    }

    /// Into the buffers of our own WQE.
    pub(super) fn scatter(
        &self,
        card: &mut CardCtx<'_, E>,
        index: u32,
        offset: u32,
        data: &[u8],
    ) -> Option<()> {
        let (mrs, env, pd) = (&card.mrs, &mut *card.env, self.local.pd);
        let mut rest = data;
        slices(self.local.sq.sges(index), offset, data.len() as u32, |sge, skip, n| {
            let addr = mrs.resolve_local(sge.lkey, pd, sge.addr.wrapping_add(skip.into()), n, true).ok()?;
            let (now, later) = rest.split_at_checked(n as usize)?;
            rest = later;
            env.dma_write(addr, now).then_some(())
        })
    }

    /// Into a receive WQE of ours.
    pub(super) fn place_recv(
        &self,
        card: &mut CardCtx<'_, E>,
        op: &WqeProgress,
        offset: u32,
        data: &[u8],
    ) -> Option<()> {
        let index = op.recv?;
        let pd = self.held[index].pd;
        let (mrs, env) = (&card.mrs, &mut *card.env);
        let mut rest = data;
        slices(self.held_sges(index).iter().copied(), offset, data.len() as u32, |sge, skip, n| {
            let addr = mrs.resolve_local(sge.lkey, pd, sge.addr.wrapping_add(skip.into()), n, true).ok()?;
            let (now, later) = rest.split_at_checked(n as usize)?;
            rest = later;
            env.dma_write(addr, now).then_some(())
        })
    }

    /// Where a WRITE of SL goes in our memory.
    pub(super) fn place_write(
        &self,
        card: &mut CardCtx<'_, E>,
        wqe: &SendWqe,
        offset: u32,
        data: &[u8],
    ) -> Option<()> {
        debug_assert!(matches!(wqe.op, SendOp::Write | SendOp::WriteImm));
        let (va, owner) =
            (wqe.remote_addr.wrapping_add(offset.into()), QpId { pd: self.local.pd, qpn: self.local.qpn });
        let len = data.len() as u32;
        let host = card.mrs.resolve_remote(wqe.rkey, owner, va, len, Access::REMOTE_WRITE).ok()?;
        (len == 0 || card.env.dma_write(host, data)).then_some(())
    }
}

/// So many PSNs, of which this is the last.
fn run(last: Psn, count: u16, step: u32) -> impl Iterator<Item = Psn> {
    let before = move |n: u32| Psn::new(last.get().wrapping_sub(n * step));
    (0..u32::from(count)).rev().map(before)
}
