//! The short way of what is short: a SEND that leaves as one packet, with SL's completion, into a receive
//! of one place, a WRITE of one packet in its turn, and a READ of one packet into one place. They wait for
//! nothing that is under way, and leave in one go, from the WQE to the place in the window; the answer that
//! was expected next completes one in one go, and receives of one place that come in order are stored so.
//! All else goes the general way (`begin`, `packets`, `rdc`, `answers`, `finish`), which makes the same
//! packets and leaves the same state: it takes over wherever this way ends.

use starverbs_core::env::{SendQueue, SendRequest};
use starverbs_core::nic::PACKET_OVERHEAD;
use starverbs_core::{Access, Psn, QpState, Seg, SendFlags, SendOp, SendWqe, Sge, WcStatus};

use super::events::Completions;
use super::finish::recv_done;
use super::packets::{TURN, slot_of};
use super::rdc::front_len;
use super::stream::{OrderClass, WqeProgress};
use super::window::{FirstAnswer, InFlight, Kind, Of};
use super::{CardCtx, Ended, Stateful};
use crate::bundle::{SHORT, ShortRdc, is_short};
use crate::carried::{CARRIED_LEN, Carried};
use crate::env::StarEnv;
use crate::message::CqeMsg;
use crate::packed::short_recv;
use crate::registry::{Claim, FoundRule, SendCtx};
use crate::ring::{CQE_SLOT, write_slot};
use crate::turn::{DataTurn, TURN_LEN};
use crate::wire::{Opt, Ptype, Queue, StarHeader};

impl<E: StarEnv> Stateful<E> {
    /// Sends those short messages that are next; gives how many left.
    #[inline]
    pub(super) fn send_short(&mut self, card: &mut CardCtx<'_, E>) -> u32 {
        if !self.goes_short() {
            return 0;
        }
        let mut sent = 0;
        while sent < TURN && card.env.can_send_star() && self.send_one(card, sent == 0).is_some() {
            sent += 1;
        }
        if sent > 0 {
            self.turn = Of::Remote;
            self.arm(card.now + self.timeout(card));
        }
        sent
    }

    /// Whether nothing of this end goes before what our program posted. That stays so while such begin.
    fn goes_short(&self) -> bool {
        let ours = &self.streams[Of::Local as usize];
        self.state == QpState::Rts
            && self.ended == Ended::Not
            && self.open
            && !self.quiescing
            && !self.inquiry.is_open()
            && !(ours.stopped || ours.begun)
            && !self.has_old()
            && !self.has_new(Of::Remote)
            && self.completions.iter().all(Completions::has_sent_all)
    }

    /// Begins our next WQE and sends its packet, which may leave with others behind it unless it is `alone`.
    /// `None`: there is none, or it goes the general way; nothing has changed then.
    #[inline]
    fn send_one(&mut self, card: &mut CardCtx<'_, E>, alone: bool) -> Option<()> {
        let index = self.streams[0].next;
        if index == self.local.sq.posted() {
            return None;
        }
        let request = self.local.sq.request(index);
        match request.op {
            SendOp::Send | SendOp::SendImm => self.send_message(card, index, &request, alone),
            SendOp::Write => self.send_write(card, index),
            SendOp::Read => self.send_read(card, index),
            _ => None,
        }
    }

    /// Whether so many bytes may leave now, and there is room for one WQE and packet more.
    #[inline]
    fn is_free(&mut self, card: &CardCtx<'_, E>, length: u32) -> bool {
        length <= self.max_msg()
            && !self.waits_for_peer()
            && card.path.admits(self.local.qpn, length + PACKET_OVERHEAD)
            && self.streams[0].has_room()
            && self.window.has_room()
    }

    /// A SEND: behind nothing that may change its receive, or whose completion does not travel so.
    #[inline]
    fn send_message(
        &mut self,
        card: &mut CardCtx<'_, E>,
        index: u32,
        request: &SendRequest,
        alone: bool,
    ) -> Option<()> {
        let SendRequest { op: kind, length, .. } = *request;
        let (seq, ours) = (self.next_recv, &self.streams[Of::Local as usize]);
        /* of no more packets than one, in its turn or not */
        let short = is_short(length as usize, self.mtu()) && self.turns(length, true) == 1;
        let [Sge { addr, len, lkey }] = *self.recv_sges(seq) else { return None };
        if !short || length > len || ours.changes() || !ours.all_carry() || !self.is_free(card, length) {
            return None;
        }
        let FoundRule { rule, addr } = card.registry.find(self.conn, lkey, addr, len, Access::LOCAL_WRITE)?;
        let entry =
            InFlight { last: true, len: length as u16, wqe: index, addr, rule, ..InFlight::default() };
        let mut room = [0; CARRIED_LEN + SHORT];
        let bytes = room.get_mut(..CARRIED_LEN + length as usize)?;
        let (completion, data) = bytes.split_first_chunk_mut()?;
        self.copy(card, &entry, data).ok()?;

        self.asks(card.now);
        self.next_recv = seq.plus(1);
        let op = WqeProgress {
            class: OrderClass::Send,
            rule,
            base: addr,
            carries: true,
            recv: Some(seq.get()),
            length,
            ..WqeProgress::default()
        };
        self.streams[0].begin_whole(op);
        let psn = self.window.push(entry, card.now);
        self.charge(card);

        let at = self.completion_slot(card.registry, Queue::Recv, seq);
        let slot = Seg { addr: at, len: CQE_SLOT as u32 };
        let imm = if kind == SendOp::SendImm { self.local.sq.imm(index) } else { 0 };
        let cqe = CqeMsg { slot: slot.addr, ..recv_done(request, imm) };
        *completion = Carried { queue: Queue::Recv, seq, cqe, stored: self.stored_word() }.encode();
        let header = self.rdc_header(psn, &entry, &op, length as u16);
        let (need, slots) = (Access::LOCAL_WRITE, [Some(slot), None]);
        let claim = Claim::WithSlots { rule, addr, len: length, need, slots };
        let ctx = SendCtx { env: &mut *card.env, stats: card.stats, now: card.now };
        let left = if alone && self.streams[0].next == self.local.sq.posted() {
            card.registry.send(ctx, self.conn, &claim, header, bytes, &[])
        } else {
            let rdc = ShortRdc { header, completion, data };
            card.registry.collect(ctx, self.conn, &claim, &rdc, self.mtu())
        };
        if !left {
            self.abandon(card, Of::Local, index, WcStatus::RemOpErr);
        }
        Some(())
    }

    /// A WRITE that has a turn, behind such alone, on a path that loses nothing.
    #[inline]
    fn send_write(&mut self, card: &mut CardCtx<'_, E>, index: u32) -> Option<()> {
        let SendWqe { length, remote_addr, rkey, flags, .. } = self.local.sq.wqe(index);
        let (need, ours) = (Access::REMOTE_WRITE, &self.streams[Of::Local as usize]);
        let short = length as usize <= SHORT && self.turns(length, false) == 1;
        let has_turn = ours.takes_turn() && self.turns.limit().is_none() && !card.path.rtt.is_lossy();
        let plain = !flags.contains(SendFlags::CARD) && self.terms.access().contains(need);
        if !short || !has_turn || !plain || !self.is_free(card, length) {
            return None;
        }
        let FoundRule { rule, addr } = card.registry.find(self.conn, rkey, remote_addr, length, need)?;
        if card.registry.rights(rule).contains(Access::RELAXED_ORDERING) {
            return None;
        }
        let entry =
            InFlight { last: true, len: length as u16, wqe: index, addr, rule, ..InFlight::default() };
        let mut room = [0; TURN_LEN + SHORT];
        let bytes = room.get_mut(..TURN_LEN + length as usize)?;
        let (front, data) = bytes.split_first_chunk_mut()?;
        self.copy(card, &entry, data).ok()?;

        self.asks(card.now);
        self.overlaps = false;
        let slot = write_slot(self.replay(card.registry), self.terms.replay_slots());
        let turn = DataTurn { slot, number: self.writes, send: false };
        *front = turn.encode();
        self.writes = turn.number.wrapping_add(1);
        self.streams[0].begin_whole(WqeProgress {
            class: OrderClass::Write,
            rule,
            base: addr,
            in_turn: true,
            number: turn.number,
            length,
            ..WqeProgress::default()
        });
        let psn = self.window.push(entry, card.now);
        self.charge(card);

        let (ptype, opt, len) = (Ptype::Rd, Opt::Recv, bytes.len() as u16);
        let qpn = self.local.qpn;
        let header = StarHeader { ptype, opt, migrate: false, ack: true, qpn, epoch: 0, psn, addr, len };
        let slots = [Some(slot_of(&turn)), None];
        let claim = Claim::WithSlots { rule, addr, len: length, need, slots };
        let ctx = SendCtx { env: &mut *card.env, stats: card.stats, now: card.now };
        if !card.registry.send(ctx, self.conn, &claim, header, bytes, &[]) {
            self.abandon(card, Of::Local, index, WcStatus::RemAccessErr);
        }
        Some(())
    }

    /// A READ, behind nothing that changes memory.
    fn send_read(&mut self, card: &mut CardCtx<'_, E>, index: u32) -> Option<()> {
        let SendWqe { length, remote_addr, rkey, flags, .. } = self.local.sq.wqe(index);
        let (need, ours) = (Access::REMOTE_READ, &self.streams[Of::Local as usize]);
        let (answered, limit) = (ours.answered(), self.local.max_rd_atomic.into());
        let short = (1..=self.mtu()).contains(&length) && self.terms.access().contains(need);
        let waits = answered >= limit || ours.changes() || flags.contains(SendFlags::FENCE) && answered > 0;
        if !short || waits || !self.is_free(card, length) {
            return None;
        }
        self.place_of_read(card, index, 0, length)?;
        let FoundRule { rule, addr } = card.registry.find(self.conn, rkey, remote_addr, length, need)?;
        let (len, kind) = (length as u16, Kind::Get);
        let entry = InFlight { kind, last: true, len, wqe: index, addr, rule, ..InFlight::default() };

        self.asks(card.now);
        let op = WqeProgress { class: OrderClass::Read, rule, base: addr, length, ..WqeProgress::default() };
        self.streams[0].begin_whole(op);
        let psn = self.window.push(entry, card.now);
        self.charge(card);

        let (ptype, opt) = (Ptype::Gd, Opt::Read);
        let qpn = self.local.qpn;
        let header = StarHeader { ptype, opt, migrate: false, ack: true, qpn, epoch: 0, psn, addr, len };
        let claim = Claim::Memory { rule, addr, len: length, need };
        let ctx = SendCtx { env: &mut *card.env, stats: card.stats, now: card.now };
        if !card.registry.send(ctx, self.conn, &claim, header, &[], &[]) {
            self.abandon(card, Of::Local, index, WcStatus::RemAccessErr);
        }
        Some(())
    }

    /// Where in our memory `len` bytes of a READ of one SGE go, from its byte `offset` on. What the WQE says
    /// of its length need not be what the SGE has.
    fn place_of_read(&self, card: &CardCtx<'_, E>, index: u32, offset: u32, len: u32) -> Option<u64> {
        let mut sges = self.local.sq.sges(index);
        let sge = sges.next().filter(|_| sges.next().is_none())?;
        let covers = offset.checked_add(len).is_some_and(|end| end <= sge.len);
        let va = sge.addr.wrapping_add(offset.into());
        let found = covers.then(|| card.mrs.resolve_local(sge.lkey, self.local.pd, va, len, true))?;
        found.ok()
    }

    /// The answer to the oldest packet: if that brought data, left once, and is all that our oldest WQE waits
    /// for, it completes that by itself. `echoed`: address and length of an answer to it alone. False: it is
    /// another's, or says something else, and nothing has changed.
    #[inline]
    pub(super) fn answered_short(
        &mut self,
        card: &mut CardCtx<'_, E>,
        psn: Psn,
        echoed: Option<(u64, u16)>,
    ) -> bool {
        let Some(&InFlight { kind: Kind::Put, wqe, addr, len, .. }) = self.is_all_of(psn) else {
            return false;
        };
        let op = self.streams[Of::Local as usize].get(wqe);
        let (front, carries) = (front_len(op), op.carries);
        let says = |(at, bytes)| at == addr && (bytes == front + len || carries && bytes == front);
        let known = len > 0 && echoed.is_none_or(says);
        if known {
            self.complete_short(card, wqe);
        }
        known
    }

    /// As [`answered_short`](Stateful::answered_short), of the last packet of a READ: its answer, which names
    /// `addr`, has brought `data`.
    #[inline]
    pub(super) fn read_short(
        &mut self,
        card: &mut CardCtx<'_, E>,
        (psn, addr): (Psn, u64),
        data: &[u8],
    ) -> bool {
        let Some(&InFlight { kind: Kind::Get, wqe, offset, len, addr: asked, .. }) = self.is_all_of(psn)
        else {
            return false;
        };
        if addr != asked || data.len() != usize::from(len) {
            return false;
        }
        let place = self.place_of_read(card, wqe, offset, len.into());
        let placed = place.is_some_and(|place| card.env.dma_write(place, data));
        if placed {
            self.complete_short(card, wqe);
        }
        placed
    }

    /// The oldest packet, if this is its PSN, it left once, and is all that our oldest WQE waits for.
    #[inline]
    fn is_all_of(&self, psn: Psn) -> Option<&InFlight> {
        let entry = self.window.first_once(psn)?;
        let ours = &self.streams[Of::Local as usize];
        if entry.of != Of::Local || !entry.last || ours.una != entry.wqe || self.state != QpState::Rts {
            return None;
        }
        let op = ours.get(entry.wqe);
        let waits = op.copies > 0 || op.until > 0 || op.probed || op.status != WcStatus::Success;
        (op.all && op.left == 1 && !waits).then_some(entry)
    }

    /// The oldest packet is answered, and with it this WQE, our oldest, is done.
    #[inline]
    fn complete_short(&mut self, card: &mut CardCtx<'_, E>, wqe: u32) {
        let &WqeProgress { carries, in_turn, recv, .. } = self.streams[Of::Local as usize].get(wqe);
        let before = self.window.in_flight();
        let FirstAnswer { sent, overtaken } = self.window.done_first();
        (self.met, self.backoff) = (true, 0);
        self.release_path(card, before);
        card.path.rtt.seen(card.now, card.now.saturating_sub(sent));
        card.path.rtt.was_overtaken(overtaken);
        if in_turn {
            self.turns.grow();
        }
        self.streams[0].retire();
        self.complete_local(card, wqe, &WqeProgress { recv, carries, ..WqeProgress::default() });
        /* SL's may have waited for this: for a place of an answer, or as copies could be under way */
        if self.streams.iter().any(|stream| stream.oldest().is_some_and(|op| op.all && op.left == 0)) {
            self.finish(card);
        }
    }

    /// Stores the receives that these records begin with, if they are those that come next, of one SGE, and
    /// there is room for them. Gives the rest.
    #[inline]
    pub(super) fn store_recvs<'p>(&mut self, card: &CardCtx<'_, E>, records: &'p [u8]) -> &'p [u8] {
        let (mut rest, mut count) = (records, 0);
        while let Some((seq, sge, behind)) = short_recv(rest)
            && self.completions[Queue::Recv as usize].growth(self.recvs.oldest(), seq) == 0
            && self.recvs.store_next(seq, sge)
        {
            self.ack_wqe(Queue::Recv, Opt::Recv, seq);
            (rest, count) = (behind, count + 1);
        }
        if count > 0 {
            card.stats.star_rcvd_wqep.add(count);
            self.met = true;
        }
        rest
    }
}
