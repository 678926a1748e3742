//! Packets: from WQEs at first, and again from the same WQEs when they are lost. Their data is not kept.

use alloc::vec::Vec;

use starverbs_core::engine::TransmitStatus;
use starverbs_core::env::SendQueue;
use starverbs_core::room::Room;
use starverbs_core::transport::slices;
use starverbs_core::{Access, Nanos, Psn, QpId, QpState, Seg, SendFlags, Sge, WcStatus};

use super::begin::Begin;
use super::clock::KEEPALIVE;
use super::events::Completions;
use super::rdc::carried_len;
use super::stream::{OrderClass, WqeProgress, WqeStream};
use super::window::{InFlight, Kind, Of};
use super::{CardCtx, Ended, Stateful};
use crate::carried::CARRIED_LEN;
use crate::env::StarEnv;
use crate::form::Form;
use crate::message::{ATOMIC_LEN, Atomic};
use crate::registry::{Claim, FoundRule, RuleRef, RuleRegistry, SendCtx};
use crate::ring::{REPLAY_SLOT, slot, write_slot};
use crate::turn::{DataTurn, TURN_LEN};
use crate::wire::{Opt, Ptype, StarHeader};

/// Packets that a connection may send before another gets its turn.
pub(super) const TURN: u32 = 64;

/// SGE in which byte `offset` of a list lies, and how far into it.
fn sge_at(sges: &[Sge], mut offset: u32) -> Option<(&Sge, u32)> {
    for sge in sges {
        if offset < sge.len {
            return Some((sge, offset));
        }
        offset -= sge.len;
    }
    None
}

impl<E: StarEnv> Stateful<E> {
    /// Sends what there is to send: what was lost, what is new, and with that what SL waits for. That alone
    /// may wait for what the program answers.
    pub fn transmit(&mut self, card: &mut CardCtx<'_, E>) -> TransmitStatus {
        let status = self.send_all(card);
        card.registry.flush(card.env);
        status
    }

    fn send_all(&mut self, card: &mut CardCtx<'_, E>) -> TransmitStatus {
        self.crowded = false;
        let (mut old, before) = (true, self.window.in_flight());
        let short = self.send_short(card);
        if short > 0 && !self.has_new(Of::Local) {
            return self.end_turn(card, TransmitStatus::Idle);
        }
        for _ in short..TURN {
            if !card.env.can_send_star() {
                return TransmitStatus::PortFull;
            }
            /* once nothing old is left, nothing becomes so but what new WQEs complete at once */
            let sends = if old && self.send_old(card) {
                true
            } else {
                let was = core::mem::take(&mut old);
                self.complete_before_new(card);
                self.send_new(card) || !was && self.send_old(card)
            };
            if !sends {
                let rest = if self.crowded { TransmitStatus::Crowded } else { TransmitStatus::Idle };
                let sent = self.window.in_flight() > before && !self.window.ends_eager();
                let waits = !sent && !self.crowded && self.local.form != Form::Paper;
                return if waits { self.left() } else { self.end_turn(card, rest) };
            }
        }
        self.end_turn(card, TransmitStatus::More)
    }

    /// SL's completions leave before what this end's program has posted since, which may be while this turn
    /// runs: SL's program sees them first, as RC's. One that waits for events of two queues in turn relies on
    /// that.
    fn complete_before_new(&mut self, card: &mut CardCtx<'_, E>) {
        let begins = self.local.form != Form::Paper && self.has_new(Of::Local);
        while begins && card.env.can_send_star() && self.send_completion(card) {}
    }

    /// Whether completions or EAs are left.
    fn left(&self) -> TransmitStatus {
        let owes = self.owed_acks.is_owed() || !self.completions.iter().all(Completions::has_sent_all);
        if owes { TransmitStatus::Owes } else { TransmitStatus::Idle }
    }

    /// Sends completions and EAs.
    pub fn acknowledge(&mut self, card: &mut CardCtx<'_, E>) -> TransmitStatus {
        self.end_turn(card, TransmitStatus::Idle)
    }

    /// What a turn may find to send: nothing, completions and EAs alone, or more.
    pub fn wants(&self) -> TransmitStatus {
        let no_more = self.state == QpState::Rts
            && self.ended == Ended::Not
            && !self.quiescing
            && !self.has_new(Of::Local)
            && !self.has_new(Of::Remote)
            && !self.has_old();
        if no_more { self.left() } else { TransmitStatus::More }
    }

    /// Whether a WQE of a queue is leaving, or is there to begin.
    #[inline]
    pub(super) fn has_new(&self, of: Of) -> bool {
        let WqeStream { begun, next, .. } = self.streams[of as usize];
        begun
            || match of {
                Of::Local => next != self.local.sq.posted(),
                Of::Remote => self.sends.get(Psn::new(next)).is_some(),
            }
    }

    /// Whether [`send_old`](Stateful::send_old) may find something. What is in flight waits for its answer
    /// alone.
    pub(super) fn has_old(&self) -> bool {
        self.window.has_lost()
            || self.streams.iter().any(WqeStream::has_waiting)
            || self.has_messages()
            || self.local.form == Form::Paper
    }

    /// Sends one packet of what does not begin now. False: there is none.
    fn send_old(&mut self, card: &mut CardCtx<'_, E>) -> bool {
        if !self.has_old() {
            return false;
        }
        self.local.form == Form::Paper && self.send_ack(card)
            || self.send_control(card)
            || self.local.form == Form::Paper && self.send_completion(card)
            || self.state == QpState::Rts
                && (self.send_lost(card)
                    || self.send_probe(card)
                    || self.send_result(card)
                    || self.send_held(card, Of::Local)
                    || self.send_held(card, Of::Remote))
    }

    /// Completions, and EAs that are owed after them, leave at the end of the turn.
    fn end_turn(&mut self, card: &mut CardCtx<'_, E>, status: TransmitStatus) -> TransmitStatus {
        while self.left() == TransmitStatus::Owes {
            if !card.env.can_send_star() {
                return TransmitStatus::PortFull;
            }
            if !self.send_completion(card) && !self.send_ack(card) {
                break;
            }
        }
        status
    }

    /// Sends a lost packet again if one may go.
    fn send_lost(&mut self, card: &mut CardCtx<'_, E>) -> bool {
        let settled = self.settled();
        /* a packet whose answer would be refused again is not asked for yet */
        let may = |entry: &InFlight| {
            let op = self.streams[entry.of as usize].get(entry.wqe);
            match op.class {
                OrderClass::Write if entry.of == Of::Remote && entry.kind == Kind::Get => {
                    settled == entry.wqe && (!entry.last || op.left == 1)
                }
                OrderClass::Stream => self.wants_piece(entry.offset) || self.window.is_probing(),
                _ => true,
            }
        };
        let Some((psn, entry)) = self.window.next_lost(may) else { return false };
        if !card.registry.is_live(entry.rule) && self.leaves_it_to_the_last(&entry) {
            /* SL may have the completion, and either program have taken its memory away: the last packet
            will tell, here and below */
            self.forget_others(card, &entry);
            return true;
        }
        if !self.window.is_probing() && !self.is_admitted(card, entry.cost()) {
            return false;
        }
        card.stats.star_retransmitted.inc();
        self.asks(card.now);
        let psn = self.window.sent_again(psn, card.now);
        let op = *self.streams[entry.of as usize].get(entry.wqe);
        match self.send_entry(card, psn, &entry, &op) {
            Ok(()) => self.arm(card.now + self.timeout(card)),
            Err(_) if entry.is_probe() => self.forget_probe(card, entry.of, entry.wqe),
            Err(_) if self.leaves_it_to_the_last(&entry) => self.forget_others(card, &entry),
            Err(status) => self.abandon(card, entry.of, entry.wqe, status),
        }
        self.charge(card);
        true
    }

    /// Sends a packet without data for a WQE that waits for copies of its packets alone: its answer shows
    /// that they are gone.
    fn send_probe(&mut self, card: &mut CardCtx<'_, E>) -> bool {
        for of in [Of::Local, Of::Remote] {
            let stream = &self.streams[of as usize];
            let due = stream.oldest().filter(|op| op.probe != 0 && op.probe <= card.now).copied();
            let Some((index, op)) = due.map(|op| (stream.una, op)) else { continue };
            if self.has_no_copies(card, &op) {
                self.stream(of).op(index).probe = 0;
                self.finish(card);
                return true;
            }
            if !self.has_room(card.now) {
                continue;
            }
            let probe = InFlight { of, wqe: index, ..InFlight::default() };
            let Some((addr, _, rule)) = self.target(card, of, index, &op, 0) else { continue };
            if !self.is_admitted(card, probe.cost()) {
                return false;
            }
            let probe = InFlight { addr, rule, ..probe };
            self.asks(card.now);
            let psn = self.window.push(probe, card.now);
            let progress = self.stream(of).op(index);
            (progress.probe, progress.probed) = (0, true);
            match self.send_entry(card, psn, &probe, &op) {
                Ok(()) => self.arm(card.now + self.timeout(card)),
                /* the rule is gone: its WQE is done all the same, and waits as long as it would have
                 * without
                 */
                Err(_) => self.forget_probe(card, of, index),
            }
            self.charge(card);
            return true;
        }
        false
    }

    /// The answer to a WQE's packet without data is waited for no more.
    pub(super) fn forget_probe(&mut self, card: &mut CardCtx<'_, E>, of: Of, index: u32) {
        self.stream(of).op(index).probed = false;
        self.forget_packets(card, |entry| entry.is_probe() && entry.of == of && entry.wqe == index);
    }

    /// Whether the path takes so much more of this connection now; it waits for that otherwise. A silent peer
    /// is asked by what was lost, and gets no more until it answers.
    pub(super) fn is_admitted(&mut self, card: &CardCtx<'_, E>, cost: u32) -> bool {
        if self.waits_for_peer() {
            return false;
        }
        let admitted = card.path.admits(self.local.qpn, cost);
        self.crowded |= !admitted;
        admitted
    }

    /// Whether the peer is silent, and was asked.
    #[inline]
    pub(super) fn waits_for_peer(&self) -> bool {
        self.backoff > 0 && self.window.asks()
    }

    /// Begins a WQE or sends the next packet of one: of our queue and of SL's by turns. False: there is none
    /// that may.
    fn send_new(&mut self, card: &mut CardCtx<'_, E>) -> bool {
        for _ in 0..2 {
            let of = self.turn;
            self.turn = if of == Of::Local { Of::Remote } else { Of::Local };
            if self.has_new(of) && self.step(card, of) {
                return true;
            }
        }
        false
    }

    /// Gives whether something was done.
    pub(super) fn step(&mut self, card: &mut CardCtx<'_, E>, of: Of) -> bool {
        if self.state != QpState::Rts || self.streams[of as usize].stopped {
            return false;
        }
        if self.streams[of as usize].begun {
            return self.send_next(card, of);
        }
        if self.quiescing {
            return false;
        }
        if !self.streams[of as usize].has_room() {
            if self.streams[of as usize].under_way() == 0 {
                self.arm(card.now + KEEPALIVE);
            }
            return false;
        }
        let begin = match of {
            /* they may name memory whose rules SL has not sent; once it has ended, ours fail */
            _ if !self.open && (of == Of::Remote || self.ended == Ended::Not) => return false,
            Of::Local if self.inquiry.is_open() => return false,
            Of::Local => self.begin_local(card),
            Of::Remote => self.begin_remote(card),
        };
        let Begin::Go(op) = begin else { return false };
        let stream = self.stream(of);
        stream.begin(op);
        if op.all {
            stream.advance(0, 0, true);
            stream.stopped |= op.status != WcStatus::Success;
            self.finish(card);
            return true;
        }
        self.send_next(card, of);
        true
    }

    /// Sends the next packet of the WQE that has begun. False: it may not go yet.
    fn send_next(&mut self, card: &mut CardCtx<'_, E>, of: Of) -> bool {
        if !self.has_room(card.now) {
            return false;
        }
        let stream = &self.streams[of as usize];
        let (index, offset, op) = (stream.next, stream.offset, *stream.get(stream.next));
        let kind = kind_of(of, op.class);
        if op.class == OrderClass::Stream && !self.wants_piece(offset) {
            return false;
        }
        let Some((addr, room, rule)) = self.target(card, of, index, &op, offset) else {
            card.stats.star_rejects.inc();
            self.abandon(card, of, index, refused(of, &op));
            return true;
        };
        let most = match op.class {
            _ if op.in_turn => self.turn_bytes(&op),
            OrderClass::Stream => self.mtu() - offset % self.mtu(),
            _ => self.mtu(),
        };
        let mut len = (op.length - offset).min(most).min(room);
        if op.carries && offset + len == op.length {
            /* the completion goes with the last of it, whatever fits beside that */
            len = len.min(self.mtu() - CARRIED_LEN as u32);
        }
        let last = offset + len == op.length;
        if last && op.carries && !op.in_turn && (op.left > 0 || op.copies > 0) {
            self.stream(of).hold(offset);
            if op.left == 0 {
                self.await_copies(card, of, index);
            }
            return true;
        }
        let limit = self.turns.limit().filter(|_| op.in_turn && !op.quiet);
        if limit.is_some_and(|limit| self.streams[of as usize].has_in_turn(limit)) {
            return false;
        }
        let seen = of == Of::Local && op.class == OrderClass::Write && !op.relaxed && !op.in_turn;
        if seen && last && op.left > 0 {
            return false;
        }
        let fresh = InFlight {
            of,
            kind,
            last,
            len: len as u16,
            wqe: index,
            offset,
            addr,
            rule,
            quiet: op.quiet,
            eager: op.eager,
            ..InFlight::default()
        };
        if !self.is_admitted(card, fresh.cost()) {
            return false;
        }
        self.stream(of).advance(len, 1, last);
        self.launch(card, &fresh, &op);
        true
    }

    /// Whether the window has room for one more packet. Where there is no memory for the first, it is looked
    /// for again later.
    pub(super) fn has_room(&mut self, now: Nanos) -> bool {
        let room = self.window.has_room();
        if !room && self.window.is_empty() {
            self.arm(now + KEEPALIVE);
        }
        room
    }

    /// A packet of a WQE that was admitted, and for which the window has room, leaves for the first time, or
    /// need not, as its answer comes by itself.
    pub(super) fn launch(&mut self, card: &mut CardCtx<'_, E>, fresh: &InFlight, op: &WqeProgress) {
        self.asks(card.now);
        let psn = self.window.push(*fresh, card.now);
        if fresh.eager && fresh.offset == 0 {
            self.stream(fresh.of).op(fresh.wqe).number = psn.get();
        }
        let sent = if fresh.eager { Ok(()) } else { self.send_entry(card, psn, fresh, op) };
        match sent {
            Ok(()) => self.arm(card.now + self.timeout(card)),
            Err(status) => self.abandon(card, fresh.of, fresh.wqe, status),
        }
        self.charge(card);
    }

    /// Where byte `offset` of a WQE lies in SL's memory, how many bytes follow there, and the rule that opens
    /// them.
    pub(super) fn target(
        &self,
        card: &CardCtx<'_, E>,
        of: Of,
        index: u32,
        op: &WqeProgress,
        offset: u32,
    ) -> Option<(u64, u32, RuleRef)> {
        let sges = match (of, op.recv) {
            (Of::Remote, _) => self.send_sges(Psn::new(index)),
            (Of::Local, Some(seq)) if op.class == OrderClass::Send && op.rule == RuleRef::default() => {
                self.recv_sges(Psn::new(seq))
            }
            (Of::Local, _) => {
                return Some((op.base.wrapping_add(offset.into()), op.length - offset, op.rule));
            }
        };
        let (sge, skip) = sge_at(sges, offset)?;
        let (va, room) = (sge.addr.wrapping_add(skip.into()), sge.len - skip);
        let FoundRule { rule, addr } =
            card.registry.find(self.conn, sge.lkey, va, room, need_of(of, op.class))?;
        Some((addr, room, rule))
    }

    /// One packet of a WQE through the gate. Why it cannot leave, otherwise.
    fn send_entry(
        &mut self,
        card: &mut CardCtx<'_, E>,
        psn: Psn,
        entry: &InFlight,
        op: &WqeProgress,
    ) -> Result<(), WcStatus> {
        let mut segs = card.registry.take_segs();
        let sent = if op.carries && entry.last {
            self.send_last(card, psn, entry, op, &mut segs)
        } else {
            self.send_plain(card, psn, entry, op, &mut segs)
        };
        card.registry.keep_segs(segs);
        sent
    }

    /// A packet that carries no completion. `segs`: empty, with room.
    fn send_plain(
        &mut self,
        card: &mut CardCtx<'_, E>,
        psn: Psn,
        entry: &InFlight,
        op: &WqeProgress,
        segs: &mut Vec<Seg>,
    ) -> Result<(), WcStatus> {
        let (rule, addr, len) = (entry.rule, entry.addr, u32::from(entry.len));
        let (need, turn) = (need_of(entry.of, op.class), self.turn_of(card.registry, entry, op));
        let claim = match turn {
            Some(turn) => Claim::WithSlots { rule, addr, len, need, slots: [Some(slot_of(&turn)), None] },
            None => Claim::Memory { rule, addr, len, need },
        };
        let (ptype, opt) = match (entry.kind, op.class) {
            (Kind::Put, _) if turn.is_some() => (Ptype::Rd, Opt::Recv),
            (Kind::Put, class) => (Ptype::Rd, opt_of(class)),
            (Kind::Get, class) => (Ptype::Gd, opt_of(class)),
            (Kind::Atomic, _) => (Ptype::Gd, Opt::Recv),
        };
        let len = match (entry.kind, turn) {
            (Kind::Atomic, _) => ATOMIC_LEN as u16,
            (_, Some(_)) => TURN_LEN as u16 + entry.len,
            (_, None) => entry.len,
        };
        let quiet = entry.tries == 0 && op.quiet;
        let header = StarHeader {
            ptype,
            opt,
            migrate: false,
            ack: !quiet,
            qpn: self.local.qpn,
            epoch: 0,
            psn,
            addr: entry.addr,
            len,
        };
        let mut word = [0; ATOMIC_LEN];
        let front;
        let data: &[u8] = match (entry.kind, entry.of, op.class) {
            (Kind::Atomic, ..) => {
                word = self.atomic(card.registry, entry.wqe, op);
                &word
            }
            (Kind::Put, ..) if entry.len == 0 => &[],
            (Kind::Put, Of::Remote, OrderClass::Atomic) => {
                word[..8].copy_from_slice(&op.value.to_ne_bytes());
                let (from, len) = (entry.offset as usize, usize::from(entry.len));
                word.get(from..from + len).unwrap_or(&[])
            }
            (Kind::Put, ..) => {
                self.gather(card, entry, segs)?;
                front = turn.map(|turn| turn.encode());
                front.as_ref().map_or(&[], |front| front)
            }
            (Kind::Get, ..) => &[],
        };
        let ctx = SendCtx { env: &mut *card.env, stats: card.stats, now: card.now };
        let left = card.registry.send(ctx, self.conn, &claim, header, data, segs);
        if left { Ok(()) } else { Err(refused(entry.of, op)) }
    }

    fn atomic(&self, registry: &RuleRegistry, index: u32, op: &WqeProgress) -> [u8; ATOMIC_LEN] {
        let wqe = self.local.sq.wqe(index);
        let slot = slot(self.replay(registry), self.terms.replay_slots(), op.number, REPLAY_SLOT);
        let (seq, slots) = (op.number, self.terms.replay_log);
        Atomic { op: wqe.op, seq, slots, slot, compare_add: wqe.compare_add, swap: wqe.swap }.encode()
    }

    /// Packets of a message of so many bytes that goes in its turn, the last of them with SL's completion if
    /// it `carries` one.
    pub(super) fn turns(&self, length: u32, carries: bool) -> u32 {
        let each = self.mtu() - (TURN_LEN + carried_len(carries)) as u32;
        /* most messages: no division */
        if length <= each { u32::from(length > 0) } else { length.div_ceil(each) }
    }

    /// Bytes of each of them but the last, which are no more than what that has with its completion: packets
    /// of one size, and a shorter one behind them, leave together.
    fn turn_bytes(&self, op: &WqeProgress) -> u32 {
        (op.length + carried_len(op.carries) as u32).div_ceil(self.turns(op.length, op.carries))
    }

    /// The turn of a packet, if it is of a message that has turns.
    pub(super) fn turn_of(
        &self,
        registry: &RuleRegistry,
        entry: &InFlight,
        op: &WqeProgress,
    ) -> Option<DataTurn> {
        op.in_turn.then(|| DataTurn {
            slot: write_slot(self.replay(registry), self.terms.replay_slots()),
            number: op.number.wrapping_add(entry.offset / self.turn_bytes(op)),
            send: op.class == OrderClass::Send,
        })
    }

    /// Collects our memory that a packet carries. Why not, otherwise.
    pub(super) fn gather(
        &self,
        card: &mut CardCtx<'_, E>,
        entry: &InFlight,
        segs: &mut Vec<Seg>,
    ) -> Result<(), WcStatus> {
        card.env.begin_payload();
        self.each_piece(card, entry, |env, piece| {
            segs.push_in_room(env.dma_read(piece)?);
            Some(())
        })
    }

    /// As [`gather`](Stateful::gather), but copies that memory to `to`, which is as long.
    pub(super) fn copy(
        &self,
        card: &mut CardCtx<'_, E>,
        entry: &InFlight,
        mut to: &mut [u8],
    ) -> Result<(), WcStatus> {
        self.each_piece(card, entry, |env, piece| {
            let place = to.split_off_mut(..piece.len as usize)?;
            (place.is_empty() || env.dma_copy(piece.addr, place)).then_some(())
        })
    }

    /// Has `take` see the memory of this end that a packet carries, piece by piece. How the packet's WQE
    /// ends, if that is not to be had.
    fn each_piece(
        &self,
        card: &mut CardCtx<'_, E>,
        entry: &InFlight,
        mut take: impl FnMut(&mut E, Seg) -> Option<()>,
    ) -> Result<(), WcStatus> {
        let len = u32::from(entry.len);
        let env = &mut *card.env;
        if entry.of == Of::Remote {
            let Some(wqe) = self.sends.get(Psn::new(entry.wqe)) else { return Err(WcStatus::RemOpErr) };
            let va = wqe.remote_addr.wrapping_add(entry.offset.into());
            let owner = QpId { pd: self.local.pd, qpn: self.local.qpn };
            let addr = card.mrs.resolve_remote(wqe.rkey, owner, va, len, Access::REMOTE_READ);
            let taken = addr.ok().and_then(|addr| take(env, Seg { addr, len }));
            return taken.ok_or(WcStatus::RemAccessErr);
        }
        if self.local.sq.request(entry.wqe).flags.contains(SendFlags::INLINE) {
            let inline = self.local.sq.inline(entry.wqe);
            let piece = Seg { addr: inline.addr + u64::from(entry.offset), len };
            return take(env, piece).ok_or(WcStatus::LocProtErr);
        }
        let (mrs, pd) = (&card.mrs, self.local.pd);
        let taken = slices(self.local.sq.sges(entry.wqe), entry.offset, len, |sge, skip, n| {
            let addr = mrs.resolve_local(sge.lkey, pd, sge.addr.wrapping_add(skip.into()), n, false).ok()?;
            take(env, Seg { addr, len: n })
        });
        taken.ok_or(WcStatus::LocProtErr)
    }
}

/// The slot of a turn.
pub(super) fn slot_of(turn: &DataTurn) -> Seg {
    Seg { addr: turn.slot, len: REPLAY_SLOT as u32 }
}

/// What a WQE's packets do.
pub(super) fn kind_of(of: Of, class: OrderClass) -> Kind {
    match (of, class) {
        (Of::Local, OrderClass::Atomic) => Kind::Atomic,
        (Of::Local, OrderClass::Read)
        | (Of::Remote, OrderClass::Send | OrderClass::Write | OrderClass::Rpc | OrderClass::Stream) => {
            Kind::Get
        }
        _ => Kind::Put,
    }
}

/// The right that they need on SL's memory.
pub(super) fn need_of(of: Of, class: OrderClass) -> Access {
    match (of, class) {
        (Of::Local, OrderClass::Write) => Access::REMOTE_WRITE,
        (Of::Local, OrderClass::Read) => Access::REMOTE_READ,
        (Of::Local, OrderClass::Atomic) => Access::REMOTE_ATOMIC,
        (Of::Local, _) | (Of::Remote, OrderClass::Read | OrderClass::Atomic) => Access::LOCAL_WRITE,
        (Of::Remote, _) => Access::empty(),
    }
}

pub(super) fn opt_of(class: OrderClass) -> Opt {
    match class {
        OrderClass::Send | OrderClass::Rpc | OrderClass::Stream | OrderClass::Own => Opt::Send,
        OrderClass::Write => Opt::Write,
        OrderClass::Read | OrderClass::Atomic => Opt::Read,
    }
}

/// How a WQE ends whose rule is no more.
pub(super) fn refused(of: Of, op: &WqeProgress) -> WcStatus {
    match (of, op.class) {
        (Of::Local, OrderClass::Send) => WcStatus::RemOpErr,
        (Of::Local, _) => WcStatus::RemAccessErr,
        (Of::Remote, _) => WcStatus::LocProtErr,
    }
}
