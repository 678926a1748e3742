//! The security registry (III-D): what SL cards let this card's stateful half do, and the one gate through
//! which its packets leave.
//!
//! A rule is <server address, QPN, PD, MR or MW>. Each connection is registered with where its packets go,
//! its slot memory and the protection domain of a server that it belongs to; each domain has the rules of its
//! keys. A rule is found by its key when a request begins, and checked by number and generation for each
//! packet. So a packet costs no search, and a rule that was removed allows no packet any more, repeated ones
//! included. A connection's slots need no rule: its token opens them, as it does at SL's card.
//!
//! It must not know what packets are for.

use alloc::vec::Vec;

use slab::Slab;
use starverbs_core::env::Host;
use starverbs_core::mr::MemoryRule;
use starverbs_core::nic::MAX_SGE;
use starverbs_core::room::{exact, make_room_in};
use starverbs_core::{Access, Av, Counters, Gid, Nanos, NicError, PdId, Qpn, Seg};

use super::bundle::{Bundle, ShortRdc};
use super::control::Sum;
use super::env::{StarDest, StarEnv};
use super::token::{SlotArea, Token};
use super::wire::{HeadTail, Prefix, Ptype, StarHead, StarHeader};

/// Most rules of a protection domain of a server.
pub const MAX_RULES: usize = 1 << 16;

/// A rule, found once. Of none by default.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RuleRef {
    slot: u32,
    /// 0: of no rule
    generation: u32,
}

/// A rule that lets a connection reach memory, and where that memory lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FoundRule {
    /// The rule
    pub rule: RuleRef,
    /// The first byte, as an address of SL's memory
    pub addr: u64,
}

/// Number of a registered connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ConnId(u32);

/// Whose memory a connection reaches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryOwner {
    /// SL's address
    pub gid: Gid,
    /// Boot ID of SL's card
    pub boot: u64,
    /// Protection domain there
    pub pd: PdId,
}

/// What a packet leaves by.
pub struct SendCtx<'a, E> {
    /// The host
    pub env: &'a mut E,
    /// Counters of the card
    pub stats: &'a Counters,
    /// The time
    pub now: Nanos,
}

/// SL, as was settled with it.
#[derive(Clone, Copy, Debug)]
pub struct SlPeer {
    /// Where its packets go
    pub av: Av,
    /// UDP port of its stateless half
    pub port: u16,
    /// UDP port of its control messages
    pub control_port: u16,
    /// SL's QPN
    pub qpn: Qpn,
    /// The connection's epoch
    pub epoch: u32,
}

impl SlPeer {
    fn prefix(&self) -> Prefix {
        Prefix { qpn: self.qpn, epoch: self.epoch }
    }
}

/// What a packet would do with SL's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Claim {
    /// Nothing: an EA
    None,
    /// Fills a slot of the connection
    Slot(Seg),
    /// This much, by this rule
    Memory {
        /// What allows it
        rule: RuleRef,
        /// Its first byte
        addr: u64,
        /// Its bytes
        len: u32,
        /// Right that the rule must give
        need: Access,
    },
    /// That, and fills slots of the connection
    WithSlots {
        /// What allows the first
        rule: RuleRef,
        /// Its first byte
        addr: u64,
        /// Its bytes
        len: u32,
        /// Right that the rule must give
        need: Access,
        /// Which
        slots: [Option<Seg>; 2],
    },
}

struct RegisteredConn {
    domain: u32,
    /// Not released
    holds: bool,
    /// What its packets show
    tail: HeadTail,
    /// SL's card lets them fill slots of this memory, as they show its token, and so does the gate
    slots: SlotArea,
    peer: SlPeer,
}

#[derive(Clone, Copy)]
struct RuleSlot {
    generation: u32,
    domain: u32,
    live: bool,
    rule: MemoryRule,
    /// When a packet last left by it
    used: Nanos,
}

/// The rules of a protection domain of a server.
struct Domain {
    server: MemoryOwner,
    conns: u32,
    /// Connections that were not released
    holders: u32,
    /// Keys and slots, by key
    keys: Vec<(u32, u32)>,
    /// Their rules
    sum: Sum,
    /// Keys taken away, and until when packets for them may be under way
    closing: Vec<(u32, Nanos)>,
}

/// The rules of a card, and its stateful connections.
#[derive(Default)]
pub struct RuleRegistry {
    domains: Slab<Domain>,
    conns: Slab<RegisteredConn>,
    slots: Vec<RuleSlot>,
    free: Vec<u32>,
    /// Room for what the packet that leaves next brings
    segs: Vec<Seg>,
    /// What leaves together with the next packet, and whose it is
    bundle: Bundle,
    bundled: ConnId,
}

impl RuleRegistry {
    /// A connection to `peer` begins, whose packets show `token`. `Exhausted`: no memory.
    pub fn join(&mut self, server: MemoryOwner, peer: SlPeer, token: Token) -> Result<ConnId, NicError> {
        make_room_in(&mut self.conns)?;
        exact(&mut self.segs, MAX_SGE)?;
        self.bundle.make_room()?;
        let known = self.domains.iter().find(|(_, d)| d.server == server).map(|(id, _)| id);
        let domain = match known {
            Some(id) => id,
            None => {
                make_room_in(&mut self.domains)?;
                self.domains.insert(Domain {
                    server,
                    conns: 0,
                    holders: 0,
                    keys: Vec::new(),
                    sum: Sum::default(),
                    closing: Vec::new(),
                })
            }
        };
        self.domains[domain].conns += 1;
        self.domains[domain].holders += 1;
        let (tail, slots) = (HeadTail::new(peer.prefix(), &token), token.slots);
        let conn = RegisteredConn { domain: domain as u32, holds: true, tail, slots, peer };
        Ok(ConnId(self.conns.insert(conn) as u32))
    }

    /// An empty list with room for the segments of any packet, once there is a connection; it is to be given
    /// back ([`keep_segs`](RuleRegistry::keep_segs)).
    pub fn take_segs(&mut self) -> Vec<Seg> {
        core::mem::take(&mut self.segs)
    }

    /// Keeps that list for the next packet.
    pub fn keep_segs(&mut self, mut segs: Vec<Seg>) {
        segs.clear();
        self.segs = segs;
    }

    /// A connection makes no request any more: SL may have none left to send the end of a rule by. The last
    /// one of a domain takes the rules with it. Slots may still be filled, with completions.
    pub fn release(&mut self, conn: ConnId) {
        let Some(conn) = self.conns.get_mut(conn.0 as usize).filter(|conn| conn.holds) else { return };
        conn.holds = false;
        let Some(domain) = self.domains.get_mut(conn.domain as usize) else { return };
        domain.holders -= 1;
        if domain.holders == 0 {
            domain.sum = Sum::default();
            let keys = core::mem::take(&mut domain.keys);
            keys.iter().for_each(|(_, slot)| self.end(*slot));
        }
    }

    /// A connection ends.
    pub fn leave(&mut self, conn: ConnId) {
        self.release(conn);
        let Some(gone) = self.conns.try_remove(conn.0 as usize) else { return };
        let Some(domain) = self.domains.get_mut(gone.domain as usize) else { return };
        domain.conns -= 1;
        if domain.conns == 0 {
            self.domains.remove(gone.domain as usize);
        }
    }

    /// Counts connections and rules.
    pub fn count(&self, stats: &Counters) {
        stats.star_stateful_qps.set(self.conns.len() as u64);
        stats.star_rules.set((self.slots.len() - self.free.len()) as u64);
    }

    fn domain_of(&self, conn: ConnId) -> Option<usize> {
        self.conns.get(conn.0 as usize).map(|conn| conn.domain as usize)
    }

    /// A rule comes, or comes again, or changes what its key opens. `Invalid`: it is of another protection
    /// domain; `Exhausted`: too many.
    pub fn add(&mut self, conn: ConnId, rule: MemoryRule) -> Result<(), NicError> {
        let id = self.domain_of(conn).ok_or(NicError::NotFound)?;
        let domain = &mut self.domains[id];
        if rule.pd != domain.server.pd {
            return Err(NicError::Invalid);
        }
        if domain.holders == 0 {
            /* nobody could use it, nor learn of its end */
            return Ok(());
        }
        match domain.keys.binary_search_by_key(&rule.key, |(key, _)| *key) {
            Ok(at) if self.slots[domain.keys[at].1 as usize].rule == rule => Ok(()),
            Ok(at) => {
                let (_, old) = domain.keys[at];
                domain.sum.remove(&self.slots[old as usize].rule);
                self.end(old);
                /* there is room: a slot came free */
                let slot = self.take(id, rule)?;
                let domain = &mut self.domains[id];
                domain.keys[at].1 = slot;
                domain.sum.add(&rule);
                Ok(())
            }
            Err(_) if domain.keys.len() >= MAX_RULES => Err(NicError::Exhausted),
            Err(at) => {
                domain.keys.try_reserve(1).map_err(|_| NicError::Exhausted)?;
                let slot = self.take(id, rule)?;
                let domain = &mut self.domains[id];
                domain.keys.insert(at, (rule.key, slot));
                domain.sum.add(&rule);
                Ok(())
            }
        }
    }

    /// Address of a connection's first slot in SL's memory.
    #[inline]
    pub fn first_slot(&self, conn: ConnId) -> u64 {
        self.conns.get(conn.0 as usize).map_or(0, |conn| conn.slots.first())
    }

    /// The rules of the domain of a connection.
    pub fn sum(&self, conn: ConnId) -> Option<Sum> {
        self.domain_of(conn).and_then(|id| self.domains.get(id)).map(|domain| domain.sum)
    }

    /// A rule is removed. Gives when no packet that left by it can be under way any more, if one may be for
    /// `lifetime`.
    pub fn remove(&mut self, conn: ConnId, key: u32, now: Nanos, lifetime: Nanos) -> Nanos {
        let Some(id) = self.domain_of(conn) else { return now };
        let domain = &mut self.domains[id];
        domain.closing.retain(|(_, until)| *until > now);
        let closing = domain.closing.iter().filter(|(closing, _)| *closing == key).map(|(_, until)| *until);
        let before = closing.max().unwrap_or(now);
        let Ok(at) = domain.keys.binary_search_by_key(&key, |(key, _)| *key) else { return before };
        let (_, slot) = domain.keys.remove(at);
        domain.sum.remove(&self.slots[slot as usize].rule);
        let until = match self.slots[slot as usize].used {
            0 => before,
            used => before.max(used.saturating_add(lifetime)),
        };
        if until > now && domain.closing.try_reserve(1).is_ok() {
            domain.closing.push((key, until));
        }
        self.end(slot);
        until
    }

    fn take(&mut self, domain: usize, rule: MemoryRule) -> Result<u32, NicError> {
        let fresh = RuleSlot { generation: 1, domain: domain as u32, live: true, rule, used: 0 };
        if let Some(slot) = self.free.pop() {
            let generation = self.slots[slot as usize].generation;
            self.slots[slot as usize] = RuleSlot { generation, ..fresh };
            return Ok(slot);
        }
        self.slots.try_reserve(1).map_err(|_| NicError::Exhausted)?;
        let slots = self.slots.len() + 1;
        if self.free.capacity() < slots {
            exact(&mut self.free, slots.next_power_of_two())?;
        }
        self.slots.push(fresh);
        Ok(self.slots.len() as u32 - 1)
    }

    /// A slot's rule is none from now on.
    fn end(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        entry.live = false;
        /* 0 is nobody's */
        entry.generation = entry.generation.wrapping_add(1).max(1);
        self.free.push(slot);
    }

    fn live(&self, rule: RuleRef) -> Option<&RuleSlot> {
        let slot = self.slots.get(rule.slot as usize)?;
        (slot.live && slot.generation == rule.generation).then_some(slot)
    }

    /// The rule that lets a connection do so with `len` bytes at `va` under `key`.
    pub fn find(&self, conn: ConnId, key: u32, va: u64, len: u32, need: Access) -> Option<FoundRule> {
        let conn = self.conns.get(conn.0 as usize)?;
        let domain = self.domains.get(conn.domain as usize)?;
        let at = domain.keys.binary_search_by_key(&key, |(key, _)| *key).ok()?;
        let (_, number) = domain.keys[at];
        let slot = self.slots.get(number as usize)?;
        let rule = &slot.rule;
        let mine = rule.qpn == 0 || rule.qpn == conn.peer.qpn;
        let offset = va.wrapping_sub(rule.iova);
        let inside = offset < rule.len && u64::from(len) <= rule.len - offset;
        let found = FoundRule {
            rule: RuleRef { slot: number, generation: slot.generation },
            addr: rule.addr.wrapping_add(offset),
        };
        (mine && inside && rule.access.contains(need)).then_some(found)
    }

    /// Whether a message of this connection may take a key away: it is that of a window bound for SL's QP.
    pub fn is_window(&self, conn: ConnId, key: u32) -> bool {
        let found = || {
            let conn = self.conns.get(conn.0 as usize)?;
            let domain = self.domains.get(conn.domain as usize)?;
            let at = domain.keys.binary_search_by_key(&key, |(key, _)| *key).ok()?;
            let (_, number) = domain.keys[at];
            Some(self.slots.get(number as usize)?.rule.qpn == conn.peer.qpn)
        };
        found().unwrap_or(false)
    }

    /// A packet of a connection leaves soon.
    #[inline]
    pub fn expect<E: Host>(&self, env: &E, conn: ConnId) {
        if let Some(conn) = self.conns.get(conn.0 as usize) {
            env.prefetch(conn);
        }
    }

    /// Whether a rule is there.
    pub fn is_live(&self, rule: RuleRef) -> bool {
        self.live(rule).is_some()
    }

    /// Rights of a rule; none if it is no more.
    pub fn rights(&self, rule: RuleRef) -> Access {
        self.live(rule).map_or(Access::empty(), |slot| slot.rule.access)
    }

    /// Whether a packet of a connection may leave.
    fn allows(&self, conn: &RegisteredConn, claim: &Claim) -> bool {
        let has = |slot: Seg| conn.slots.has_slot(slot.addr, slot.len.into());
        match *claim {
            Claim::None => true,
            Claim::Slot(slot) => has(slot),
            Claim::Memory { rule, addr, len, need } => self.opens(conn, rule, (addr, len), need),
            Claim::WithSlots { rule, addr, len, need, slots } => {
                self.opens(conn, rule, (addr, len), need) && slots.into_iter().flatten().all(has)
            }
        }
    }

    /// Whether a rule lets a connection do so with this memory.
    fn opens(&self, conn: &RegisteredConn, rule: RuleRef, (addr, len): (u64, u32), need: Access) -> bool {
        let Some(slot) = self.live(rule) else { return false };
        let rule = &slot.rule;
        let offset = addr.wrapping_sub(rule.addr);
        slot.domain == conn.domain
            && (rule.qpn == 0 || rule.qpn == conn.peer.qpn)
            && rule.access.contains(need)
            && offset < rule.len
            && u64::from(len) <= rule.len - offset
    }

    /// Where control messages of a connection go, which are for SL's host and pass no gate.
    pub fn control_dest(&self, conn: ConnId) -> Option<StarDest<'_>> {
        let peer = &self.conns.get(conn.0 as usize)?.peer;
        Some(StarDest { av: &peer.av, port: peer.control_port })
    }

    /// The gate: a packet for SL's card leaves here, and nowhere else, if a rule allows it: `header`, `data`,
    /// then the memory of `payload`. False: none does, and it has not left.
    pub fn send<E: StarEnv>(
        &mut self,
        ctx: SendCtx<'_, E>,
        conn: ConnId,
        claim: &Claim,
        header: StarHeader,
        data: &[u8],
        payload: &[Seg],
    ) -> bool {
        let SendCtx { env, stats, now } = ctx;
        self.flush(env);
        if !self.admit(stats, now, conn, claim, header.ptype) {
            return false;
        }
        self.post(env, conn, header, data, payload);
        true
    }

    /// As [`send`](RuleRegistry::send), of an RDC that is [short](super::bundle::is_short). It leaves with
    /// those of its connection that come at once behind it, in one packet of `most` bytes of data at most,
    /// before any other packet, and at the latest by [`flush`](RuleRegistry::flush).
    pub fn collect<E: StarEnv>(
        &mut self,
        ctx: SendCtx<'_, E>,
        conn: ConnId,
        claim: &Claim,
        rdc: &ShortRdc<'_>,
        most: u32,
    ) -> bool {
        let SendCtx { env, stats, now } = ctx;
        if !self.admit(stats, now, conn, claim, rdc.header.ptype) {
            return false;
        }
        if self.bundled == conn && self.bundle.add(rdc, most) {
            return true;
        }
        self.flush(env);
        self.bundled = conn;
        self.bundle.add(rdc, most)
    }

    /// What was collected leaves.
    #[inline]
    pub fn flush<E: StarEnv>(&mut self, env: &mut E) {
        if let Some((header, data)) = self.bundle.packet() {
            self.post(env, self.bundled, header, data, &[]);
            self.bundle.clear();
        }
    }

    /// Whether a rule allows it; counts what leaves.
    fn admit(&mut self, stats: &Counters, now: Nanos, conn: ConnId, claim: &Claim, ptype: Ptype) -> bool {
        let conn = self.conns.get(conn.0 as usize);
        if !conn.is_some_and(|conn| self.allows(conn, claim)) {
            stats.star_rejects.inc();
            return false;
        }
        match ptype {
            Ptype::Rd => stats.star_sent_rd.inc(),
            Ptype::Rdc | Ptype::Rdcs => {
                stats.star_sent_rd.inc();
                stats.star_sent_cqep.inc();
            }
            Ptype::Gd => stats.star_sent_gd.inc(),
            Ptype::Cqep => stats.star_sent_cqep.inc(),
            Ptype::Wqep | Ptype::Wqeps | Ptype::Ea | Ptype::Rda | Ptype::Rdas | Ptype::Gda | Ptype::Ed => (),
        }
        if let Claim::Memory { rule, .. } | Claim::WithSlots { rule, .. } = claim
            && let Some(slot) = self.slots.get_mut(rule.slot as usize)
        {
            slot.used = now.max(1);
        }
        true
    }

    fn post<E: StarEnv>(&self, env: &mut E, conn: ConnId, header: StarHeader, data: &[u8], payload: &[Seg]) {
        if let Some(conn) = self.conns.get(conn.0 as usize) {
            let SlPeer { av, port, .. } = &conn.peer;
            let head = StarHead::with_tail(header, &conn.tail);
            env.send_star(StarDest { av, port: *port }, &head, data, payload, false);
        }
    }
}

#[cfg(test)]
#[path = "registry_tests.rs"]
mod tests;
