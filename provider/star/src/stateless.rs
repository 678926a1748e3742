//! The card of SL: it handles a packet by what the packet says, and forgets it.
//!
//! There is no struct of any connection here, and nothing that must be kept between two turns; what came
//! before its turn may be (`ahead`). Answers go where packets came from. What must happen once (a completion,
//! an atomic, a WRITE in its turn) has a slot in host memory, whose address is in the packet; its stamp shows
//! duplicates. That a packet is of a connection which is open, its token says and the gate that it names
//! ([`token`](super::token)).

use starverbs_core::{Av, Counters, Gid, Psn, Qpn, Seg, SendOp};

use super::answers::{self, Answers};
use super::bounds::{Bounds, Use};
use super::bundle::Bundled;
use super::carried::Carried;
use super::control::{Control, MAX_CONTROL};
use super::env::{News, SlEvent, StarDest, StarEnv, StarSource};
use super::form::Upto;
use super::message::{Atomic, CqeMsg};
use super::packed::PackedWqes;
use super::ring::{Age, CQE_SLOT, REPLAY_SLOT, Stamp};
use super::token::{CardSecret, SlotArea, Token};
use super::turn::DataTurn;
use super::wire::{Opt, Prefix, Ptype, Queue, StarHead, StarHeader, StarPacket};

/// What a stateless card knows beside the packet: nothing of connections.
#[derive(Clone, Copy, Debug)]
pub struct StatelessCard<'a> {
    /// What memory packets may reach. `None`: all that SF's registry lets through, as in the paper
    pub bounds: Option<&'a Bounds>,
    /// What it knows packets of its connections by
    pub secret: &'a CardSecret,
    /// Where it counts
    pub stats: &'a Counters,
}

/// The card's boot epoch: the upper half of a connection's epoch. The lower half counts connections.
pub const fn boot_epoch_of(epoch: u32) -> u16 {
    (epoch >> 16) as u16
}

/// Whether the epoch of a connection is later than the one of before, or of another boot of the card.
pub const fn is_later(epoch: u32, before: u32) -> bool {
    boot_epoch_of(epoch) != boot_epoch_of(before) || (epoch as u16).wrapping_sub(before as u16) as i16 > 0
}

/// Why a packet does nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Discard {
    /// It is malformed
    Bad,
    /// It has no token of this card, or its connection is not open
    Unknown,
    /// It may not reach that memory, or there is none
    Refused,
    /// Its slot has been used for something later, or by another connection
    Stale,
}

/// A packet from `from` that came to the stateless half. See [`StarPacket::open`]. What is owed to packets of
/// this turn is in `owed`.
pub fn handle<E: StarEnv>(
    card: &StatelessCard<'_>,
    owed: &mut Answers,
    env: &mut E,
    from: StarSource<'_>,
    packet: &StarPacket<'_>,
) {
    let stats = card.stats;
    let drop = match (packet.prefix, &packet.token) {
        (Some(prefix), Some(token)) if is_open(card, owed, env, &from, prefix, token) => {
            let slots = token.slots;
            let mut job = PacketJob { card, owed, env, from, header: &packet.header, prefix, slots };
            let done = match packet.header.ptype {
                Ptype::Rd if packet.header.opt == Opt::Recv => job.place_in_turn(packet.data),
                Ptype::Rd => job.place(packet.data),
                Ptype::Rdc => job.place_last(packet.data),
                Ptype::Rdcs => job.place_each(packet.data),
                Ptype::Gd if packet.header.opt == Opt::Recv => job.atomic(packet.data),
                Ptype::Gd => job.gather(),
                Ptype::Cqep => job.complete(packet.data),
                Ptype::Ea => job.stored(),
                Ptype::Wqep | Ptype::Wqeps | Ptype::Rda | Ptype::Rdas | Ptype::Gda | Ptype::Ed => {
                    Err(Discard::Bad)
                }
            };
            if let Some((slot, number)) = job.owed.passed.take() {
                job.go_on(slot, number);
            }
            done
        }
        (Some(_), Some(_)) => Err(Discard::Unknown),
        _ => Err(Discard::Bad),
    };
    count(stats, drop);
}

/// Counts a packet that did nothing.
fn count(stats: &Counters, done: Result<(), Discard>) {
    match done {
        Ok(()) => (),
        Err(Discard::Bad) => stats.star_bad.inc(),
        Err(Discard::Unknown) => stats.star_drops.inc(),
        Err(Discard::Refused) => stats.star_refused.inc(),
        Err(Discard::Stale) => stats.star_stale.inc(),
    }
}

/// Whether a packet is of a connection that is open. The gate is looked at only if the token is right: else
/// its address is anybody's.
#[inline]
fn is_open<E: StarEnv>(
    card: &StatelessCard<'_>,
    owed: &mut Answers,
    env: &mut E,
    from: &StarSource<'_>,
    of: Prefix,
    token: &Token,
) -> bool {
    owed.admits(card.secret, &from.meta.src, of, token)
        && env.star_load(token.slots.gate()).map(u64::from_ne_bytes) == Some(token.mac)
}

/// How the turn of a packet stands to the last one that was done.
enum Place {
    /// Something before it is missing
    Early,
    Next,
    /// It has been
    Past,
}

/// What data that has a turn needs its memory for.
fn use_of(turn: &DataTurn) -> Use {
    if turn.send { Use::Place } else { Use::Write }
}

/// One packet's work.
struct PacketJob<'a, E> {
    card: &'a StatelessCard<'a>,
    owed: &'a mut Answers,
    env: &'a mut E,
    from: StarSource<'a>,
    header: &'a StarHeader,
    prefix: Prefix,
    slots: SlotArea,
}

impl<E: StarEnv> PacketJob<'_, E> {
    /// RD: to memory, and only then the answer.
    fn place(&mut self, data: &[u8]) -> Result<(), Discard> {
        let what = if self.header.opt == Opt::Write { Use::Write } else { Use::Place };
        self.write(data, what)?;
        self.card.stats.star_rd.inc();
        self.done();
        Ok(())
    }

    /// RD in its turn: to memory, once, behind the one before it. Whatever comes again is answered, and
    /// nothing is written nor looked at.
    fn place_in_turn(&mut self, all: &[u8]) -> Result<(), Discard> {
        let (turn, data) = DataTurn::decode(all).ok_or(Discard::Bad)?;
        if data.is_empty() {
            return Err(Discard::Bad);
        }
        match self.place_of(&turn)? {
            Place::Early => {
                self.early(&turn, all, data);
                return Ok(());
            }
            Place::Next => {
                self.write(data, use_of(&turn))?;
                self.pass(&turn)?;
                self.card.stats.star_rd.inc();
            }
            Place::Past => self.card.stats.star_stale.inc(),
        }
        self.done();
        Ok(())
    }

    /// Where a packet's turn stands to the last one that was done.
    fn place_of(&mut self, turn: &DataTurn) -> Result<Place, Discard> {
        let DataTurn { slot, number, .. } = *turn;
        if !slot.is_multiple_of(REPLAY_SLOT) {
            return Err(Discard::Bad);
        }
        self.check_slot(slot, REPLAY_SLOT)?;
        let stamp = Stamp { epoch: self.prefix.epoch, seq: number };
        let last = self.stamp_at(slot)?;
        match last.age_of_atomic(stamp) {
            Age::Newer if last != stamp.one_before() => Ok(Place::Early),
            Age::Newer => Ok(Place::Next),
            Age::Same | Age::Older => Ok(Place::Past),
            Age::Foreign => Err(Discard::Stale),
        }
    }

    /// The turn is the next one's.
    fn pass(&mut self, turn: &DataTurn) -> Result<(), Discard> {
        let stamp = Stamp { epoch: self.prefix.epoch, seq: turn.number };
        if !self.store(turn.slot, stamp.word()) {
            return Err(Discard::Refused);
        }
        if !self.owed.ahead.is_empty() {
            self.owed.passed = Some((turn.slot, turn.number));
        }
        Ok(())
    }

    /// The turn of this number was done: so is what was kept until then, as if it came now.
    fn go_on(&mut self, slot: u64, mut number: u32) {
        let PacketJob { card, from, prefix, slots, .. } = *self;
        let mut ahead = core::mem::take(&mut self.owed.ahead);
        /* a copy of that one may have been kept */
        ahead.take(slot, prefix.epoch, number);
        while let Some((header, data)) = ahead.take(slot, prefix.epoch, number.wrapping_add(1)) {
            number = number.wrapping_add(1);
            let (owed, env) = (&mut *self.owed, &mut *self.env);
            let mut job = PacketJob { card, owed, env, from, header: &header, prefix, slots };
            let done = match header.ptype {
                Ptype::Rdc => job.place_last(data),
                _ => job.place_in_turn(data),
            };
            let failed = done.is_err();
            count(card.stats, done);
            if failed {
                break;
            }
        }
        self.owed.ahead = ahead;
    }

    /// The packet, of these bytes, is early: nothing of it is done, and its answer says 0 bytes, or that it
    /// is kept. It is only if its data may be written now: memory that is taken away and comes back is
    /// another.
    fn early(&mut self, turn: &DataTurn, all: &[u8], data: &[u8]) {
        self.card.stats.star_writes_early.inc();
        if self.header.ack {
            let kept = self.check(self.header.addr, data.len() as u64, use_of(turn)).is_ok()
                && self.owed.ahead.keep(turn, self.prefix.epoch, self.header, all);
            self.owed.early(self.env, &self.from, self.header, kept);
        }
    }

    /// Data to where the packet says. Nobody sees a stamp that is stored later without it, and its answer
    /// leaves behind a fence ([`Answers`]).
    fn write(&mut self, data: &[u8], what: Use) -> Result<(), Discard> {
        self.check(self.header.addr, data.len() as u64, what)?;
        if data.is_empty() || self.env.dma_write(self.header.addr, data) {
            Ok(())
        } else {
            Err(Discard::Refused)
        }
    }

    /// RDC: to memory, then its completion into its slot, and one answer for both; all of that in its turn,
    /// if it has one. Once that is there, nothing is written however often it comes, nor looked at: the
    /// program may have its buffer back. Without data it asks whether that is so; no is a GDA without data.
    fn place_last(&mut self, all: &[u8]) -> Result<(), Discard> {
        let (carried, data) = Carried::decode(all).ok_or(Discard::Bad)?;
        let (turn, data) = match self.header.opt {
            Opt::Recv => DataTurn::decode(data).map(|(turn, data)| (Some(turn), data)).ok_or(Discard::Bad)?,
            _ => (None, data),
        };
        let Carried { queue, seq, cqe, stored } = carried;
        if !cqe.slot.is_multiple_of(CQE_SLOT) {
            return Err(Discard::Bad);
        }
        self.check_slot(cqe.slot, CQE_SLOT)?;
        let stamp = Stamp { epoch: self.prefix.epoch, seq: seq.get() };
        match self.stamp_at(cqe.slot)?.age_of(stamp) {
            Age::Newer if data.is_empty() => {
                /* it does not overtake those before it */
                self.owed.send_owed(self.env);
                self.answer(Ptype::Gda, 0, &[], &[]);
                return Ok(());
            }
            Age::Newer => {
                if let Some(turn) = &turn {
                    match self.place_of(turn)? {
                        Place::Early => {
                            self.early(turn, all, data);
                            return Ok(());
                        }
                        /* what has had its turn has its completion */
                        Place::Past => return Err(Discard::Stale),
                        Place::Next => (),
                    }
                }
                let of_write = self.header.opt == Opt::Write;
                let what = turn.map_or(if of_write { Use::Write } else { Use::Place }, |turn| use_of(&turn));
                self.write(data, what)?;
                self.fill(&cqe, stamp)?;
                turn.map_or(Ok(()), |turn| self.pass(&turn))?;
                self.card.stats.star_rd.inc();
                self.post_event(queue, News::Completed, Upto::of(stored));
            }
            Age::Same | Age::Older => self.card.stats.star_stale.inc(),
            Age::Foreign => return Err(Discard::Stale),
        }
        self.done();
        Ok(())
    }

    /// RDCS: one RDC behind the other. Those behind one that does nothing do nothing, either.
    fn place_each(&mut self, data: &[u8]) -> Result<(), Discard> {
        for one in Bundled::new(self.header, data) {
            let (header, data) = one.ok_or(Discard::Bad)?;
            let PacketJob { card, from, prefix, slots, .. } = *self;
            let (owed, env) = (&mut *self.owed, &mut *self.env);
            PacketJob { card, owed, env, from, header: &header, prefix, slots }.place_last(data)?;
        }
        Ok(())
    }

    /// Body, then stamp.
    fn fill(&mut self, cqe: &CqeMsg, stamp: Stamp) -> Result<(), Discard> {
        if !self.env.dma_write(cqe.slot + 8, &cqe.body()) || !self.store(cqe.slot, stamp.word()) {
            return Err(Discard::Refused);
        }
        self.card.stats.star_cqep.inc();
        Ok(())
    }

    /// GD: the answer is what memory holds.
    fn gather(&mut self) -> Result<(), Discard> {
        let StarHeader { addr, len, opt, .. } = *self.header;
        /* SF asks for no bytes without naming some */
        if len == 0 {
            return Err(Discard::Bad);
        }
        let what = if opt == Opt::Read { Use::Read } else { Use::Gather };
        self.check(addr, len.into(), what)?;
        self.card.stats.star_gd.inc();
        self.env.begin_payload();
        let seg = self.env.dma_read(Seg { addr, len: len.into() }).ok_or(Discard::Refused)?;
        self.answer(Ptype::Gda, len, &[], &[seg]);
        Ok(())
    }

    /// GD of an atomic: once, behind the one before it, then as often as asked what it gave. The answer to
    /// one that is early has no data.
    fn atomic(&mut self, data: &[u8]) -> Result<(), Discard> {
        let atomic = Atomic::decode(data).ok_or(Discard::Bad)?;
        let addr = self.header.addr;
        if !addr.is_multiple_of(8) || !atomic.slot.is_multiple_of(REPLAY_SLOT) {
            return Err(Discard::Bad);
        }
        let what = if atomic.op == SendOp::AtomicWrite { Use::Write } else { Use::Atomic };
        self.check(addr, 8, what)?;
        let before = atomic.slot_before().ok_or(Discard::Refused)?;
        for slot in [atomic.slot, before] {
            self.check_slot(slot, REPLAY_SLOT)?;
        }
        let stamp = Stamp { epoch: self.prefix.epoch, seq: atomic.seq };
        let result = match self.stamp_at(atomic.slot)?.age_of_atomic(stamp) {
            Age::Newer if self.stamp_at(before)? != stamp.one_before() => {
                self.card.stats.star_atomics_early.inc();
                self.answer(Ptype::Gda, 0, &[], &[]);
                return Ok(());
            }
            Age::Newer => {
                let before = self.execute(addr, &atomic).ok_or(Discard::Refused)?;
                self.card.stats.star_atomics.inc();
                let kept = self.store(atomic.slot + 8, before) && self.store(atomic.slot, stamp.word());
                if !kept {
                    return Err(Discard::Refused);
                }
                before
            }
            Age::Same => {
                self.card.stats.star_atomics_again.inc();
                self.load(atomic.slot + 8)?
            }
            Age::Older | Age::Foreign => return Err(Discard::Stale),
        };
        self.env.dma_fence();
        self.answer(Ptype::Gda, 8, &result.to_be_bytes(), &[]);
        Ok(())
    }

    fn execute(&mut self, addr: u64, atomic: &Atomic) -> Option<u64> {
        let Atomic { op, compare_add, swap, .. } = *atomic;
        match op {
            SendOp::CmpSwap => self.env.dma_compare_swap(addr, compare_add, swap),
            SendOp::FetchAdd => self.env.dma_fetch_add(addr, compare_add),
            /* its eight bytes have an order of their own */
            _ => self.env.dma_store(addr, compare_add.to_be_bytes()).then_some(0),
        }
    }

    /// CQEP: into its slot unless that has it already; then an event for the host, and the EA.
    fn complete(&mut self, data: &[u8]) -> Result<(), Discard> {
        let cqe = CqeMsg::decode(data).ok_or(Discard::Bad)?;
        if !cqe.slot.is_multiple_of(CQE_SLOT) {
            return Err(Discard::Bad);
        }
        self.check_slot(cqe.slot, CQE_SLOT)?;
        let stamp = Stamp { epoch: self.prefix.epoch, seq: self.header.psn.get() };
        match self.stamp_at(cqe.slot)?.age_of(stamp) {
            Age::Newer => {
                self.fill(&cqe, stamp)?;
                self.post_event(self.header.opt.queue(), News::Completed, Upto::of(self.header.addr));
            }
            /* the host has it, and may have made room since: only the EA was lost */
            Age::Same | Age::Older => self.card.stats.star_stale.inc(),
            Age::Foreign => return Err(Discard::Stale),
        }
        self.done();
        Ok(())
    }

    /// EA: an event for the host.
    fn stored(&mut self) -> Result<(), Discard> {
        self.post_event(self.header.opt.queue(), News::Stored(self.header.psn), Upto::of(self.header.addr));
        Ok(())
    }

    fn post_event(&mut self, queue: Queue, what: News, upto: Option<Upto>) {
        let Prefix { qpn, epoch } = self.prefix;
        self.env.star_event(SlEvent { qpn, epoch, queue, what, upto });
    }

    #[inline]
    fn check(&self, addr: u64, len: u64, what: Use) -> Result<(), Discard> {
        let permitted = self.card.bounds.is_none_or(|bounds| bounds.permits(addr, len, what));
        /* no bytes are nobody's */
        if permitted && (len == 0 || self.env.is_of_program(self.slots.gate(), addr)) {
            Ok(())
        } else {
            Err(Discard::Refused)
        }
    }
    #[inline]
    fn check_slot(&self, addr: u64, len: u64) -> Result<(), Discard> {
        if self.slots.has_slot(addr, len) { Ok(()) } else { Err(Discard::Refused) }
    }

    fn load(&mut self, addr: u64) -> Result<u64, Discard> {
        self.env.star_load(addr).map(u64::from_ne_bytes).ok_or(Discard::Refused)
    }
    fn stamp_at(&mut self, slot: u64) -> Result<Stamp, Discard> {
        self.load(slot).map(Stamp::of)
    }
    fn store(&mut self, addr: u64, word: u64) -> bool {
        self.env.dma_store(addr, word.to_ne_bytes())
    }

    /// What brought data or a completion is done: its answer, if one is wanted.
    fn done(&mut self) {
        if self.header.ack {
            self.owed.done(self.env, &self.from, self.header);
        }
    }

    /// Sends back what came with another type, if an answer is wanted.
    fn answer(&mut self, ptype: Ptype, len: u16, data: &[u8], payload: &[Seg]) {
        if !self.header.ack {
            return;
        }
        let StarSource { port, .. } = self.from;
        let head = StarHead::to_stateful(StarHeader { ptype, ack: false, len, ..*self.header });
        let to = answers::back(&self.from);
        /* others write only to what SF reads: a buffer that is being sent stays as it is */
        let volatile = self.header.opt == Opt::Read;
        self.env.send_star(StarDest { av: &to, port }, &head, data, payload, volatile);
    }
}

/// Where a connection's stateful end is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SfPeer {
    /// Where its packets go
    pub av: Av,
    /// UDP port of its stateful half
    pub port: u16,
    /// SF's QPN
    pub qpn: Qpn,
    /// Epoch of the connection
    pub epoch: u32,
}

impl SfPeer {
    /// Where its packets go.
    fn dest(&self) -> StarDest<'_> {
        StarDest { av: &self.av, port: self.port }
    }

    /// Whether a packet that came from `source` is of this end of this connection.
    pub(super) fn has_sent(&self, source: &Gid, packet: &StarPacket<'_>) -> bool {
        let sender = Prefix { qpn: self.qpn, epoch: self.epoch };
        *source == self.av.dgid && packet.prefix == Some(sender)
    }
}

/// Sends a WQE, as [`message`](super::message) encodes it, for the host: all that is needed is in the
/// arguments. `inline` are bytes of host memory that belong to it.
pub fn send_wqep<E: StarEnv>(env: &mut E, to: &SfPeer, opt: Opt, seq: Psn, wqe: &[u8], inline: Option<Seg>) {
    env.begin_payload();
    let payload = match inline {
        None => None,
        Some(bytes) => match env.dma_read(bytes) {
            /* as if it were lost on the wire */
            None => return,
            seg => seg,
        },
    };
    let len = wqe.len() + inline.map_or(0, |bytes| bytes.len as usize);
    let header = StarHeader {
        ptype: Ptype::Wqep,
        opt,
        migrate: false,
        ack: true,
        qpn: to.qpn,
        epoch: (to.epoch & 0xff) as u8,
        psn: seq,
        addr: 0,
        len: len as u16,
    };
    let (head, payload) = (StarHead::to_stateful(header), payload.as_slice());
    env.send_star(to.dest(), &head, wqe, payload, false);
}

/// Sends records of WQEs for the host ([`packed`](super::packed)); nothing of an empty batch.
pub fn send_wqeps<E: StarEnv>(env: &mut E, to: &SfPeer, batch: &PackedWqes) {
    if batch.is_empty() {
        return;
    }
    let (queue, psn) = batch.first();
    let header = StarHeader {
        ptype: Ptype::Wqeps,
        opt: if queue == Queue::Recv { Opt::Recv } else { Opt::Send },
        migrate: false,
        ack: true,
        qpn: to.qpn,
        epoch: (to.epoch & 0xff) as u8,
        psn,
        addr: 0,
        len: batch.bytes().len() as u16,
    };
    let head = StarHead::to_stateful(header);
    env.send_star(to.dest(), &head, batch.bytes(), &[], false);
}

/// Sends data of the send WQE `seq`, which has just left, for the host: these bytes of host memory, which lie
/// at `addr` by the WQE's SGE.
pub fn send_eager<E: StarEnv>(env: &mut E, to: &SfPeer, seq: Psn, addr: u64, bytes: Seg) {
    env.begin_payload();
    /* as if it were lost on the wire */
    let Some(payload) = env.dma_read(bytes) else { return };
    let header = StarHeader {
        ptype: Ptype::Ed,
        opt: Opt::Send,
        migrate: false,
        ack: false,
        qpn: to.qpn,
        epoch: (to.epoch & 0xff) as u8,
        psn: seq,
        addr,
        len: bytes.len as u16,
    };
    /* a buffer that is being sent stays as it is */
    env.send_star(to.dest(), &StarHead::to_stateful(header), &[], &[payload], false);
}

/// Sends a control message to the peer's QP `to`, or the answer to one.
pub fn send_control<E: StarEnv>(env: &mut E, to: &SfPeer, from: Qpn, seq: Psn, message: Option<&Control>) {
    let prefix = Prefix { qpn: from, epoch: to.epoch };
    let mut room = [0; MAX_CONTROL];
    let len = message.and_then(|message| message.encode(&mut room)).unwrap_or(0);
    let head = match message {
        Some(_) => StarHead::control(to.qpn, prefix, seq, len as u16),
        None => StarHead::control_ack(to.qpn, prefix, seq),
    };
    env.send_star(to.dest(), &head, room.get(..len).unwrap_or(&[]), &[], false);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_of_a_boot_follow_each_other() {
        assert!(is_later(0x7_0003, 0x7_0002) && is_later(0x7_0000, 0x7_ffff), "its numbers come round");
        assert!(!is_later(0x7_0002, 0x7_0002) && !is_later(0x7_ffff, 0x7_0000));
        assert!(is_later(0x6_0001, 0x7_0002), "another boot has numbers of its own");
    }

    #[test]
    fn nobody_else_speaks_for_a_peer() {
        let at = |last| Gid::from_ipv4([10, 0, 0, last]);
        let av = Av { dgid: at(1), ..Av::default() };
        let peer = SfPeer { av, port: 1, qpn: 7, epoch: 0x1_0002 };
        let header = StarHeader {
            ptype: Ptype::Ea,
            opt: Opt::Send,
            migrate: true,
            ack: false,
            qpn: 9,
            epoch: 2,
            psn: Psn::new(0),
            addr: 0,
            len: 0,
        };
        let from =
            |qpn, epoch| StarPacket { header, prefix: Some(Prefix { qpn, epoch }), token: None, data: &[] };
        assert!(peer.has_sent(&at(1), &from(7, 0x1_0002)));
        assert!(!peer.has_sent(&at(2), &from(7, 0x1_0002)), "from another address");
        assert!(!peer.has_sent(&at(1), &from(8, 0x1_0002)), "of another of its QPs");
        assert!(!peer.has_sent(&at(1), &from(7, 0x1_0003)), "of another connection");
        assert!(!peer.has_sent(&at(1), &StarPacket { prefix: None, ..from(7, 0x1_0002) }));
    }
}
