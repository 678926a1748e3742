//! Connections of StaR among the others.

use starverbs_core::{Nanos, Qpn, SendOp, Sge};
use starverbs_sim::{Rng, StarCard};
use starverbs_star::control::{Preference, Role};
use starverbs_star::form::Form;
use starverbs_star::negotiate::Outcome;
use starverbs_star::wire::{Opt, Ptype, StarHeader};

use crate::conn::{Bad, Bound, ConnEnd, Source, Wr};
use crate::forger::forger;
use crate::lifecycle::all_rights;
use crate::plan::{Chaos, Plan, Transport};
use crate::world::{Who, World};

/// How late frames come that others overtake, ns: after so long a stateful end takes what it repeats for
/// gone.
const LATE: Nanos = 100_000;
/// A threshold beyond the connections of any run.
pub const ROOMY: u32 = 120;
/// Receives of a shared queue that a connection holds at most.
const AHEAD: usize = 64;

/// What the cards of a run have of StaR.
#[derive(Clone, Debug)]
pub struct StarPlan {
    /// From how many stateful connections on a card wants no more
    pub threshold: u32,
    /// Of each host: the number of its key, 0 for none; `None`: it has no StaR
    pub cards: Vec<Option<u8>>,
    /// Buffers of a region: where each has one of its own, its rule is sent first
    pub together: u64,
    /// Somebody on the wire says what the ends did not, without a key
    pub forged: bool,
}

impl StarPlan {
    /// Two cards without keys that have room for all connections.
    pub fn roomy() -> Self {
        StarPlan { threshold: ROOMY, cards: vec![Some(0); 2], together: 16, forged: false }
    }
}

impl Plan {
    /// The cards have StaR, and links hold no frame back for longer than its ends take it for gone.
    pub fn have_star(&mut self, star: StarPlan) {
        self.links.iter_mut().for_each(|(_, _, faults)| faults.late = faults.late.min(LATE));
        self.star = Some(star);
    }

    /// Three runs in ten have cards with StaR, most of whose connections of RC have a preference for it.
    pub(crate) fn mix_star(&mut self, rng: &mut Rng) {
        let share = rng.pick(&[0.4, 0.8, 1.0]);
        let keys: &[Option<u8>] = match rng.below(8) {
            0..=2 => &[Some(0)],
            3 | 4 => &[Some(1)],
            5 => &[Some(0), Some(0), None],
            6 => &[Some(1), Some(1), Some(2)],
            _ => &[Some(0), Some(1)],
        };
        let threshold = rng.pick(&[0, 0, 1, ROOMY]);
        let cards = (0..self.hosts).map(|_| rng.pick(keys)).collect();
        let plan = StarPlan { threshold, cards, together: rng.pick(&[1, 16, 16]), ..StarPlan::roomy() };
        let preferences = [
            [Preference::Stateless, Preference::Stateful],
            [Preference::Stateful, Preference::Stateless],
            [Preference::Stateless, Preference::Auto],
            [Preference::Auto, Preference::Stateless],
            [Preference::Auto, Preference::Auto],
            [Preference::Stateful, Preference::Auto],
            [Preference::Off, Preference::Stateless],
            [Preference::Stateful, Preference::Stateful],
        ];
        if !rng.chance(0.3) {
            return;
        }
        let roomy = plan.threshold == ROOMY;
        self.have_star(plan);
        for conn in self.conns.iter_mut().filter(|conn| conn.kind == Transport::Rc) {
            if rng.chance(share) {
                conn.preferences = rng.pick(&preferences);
                /* an end of StaR takes neither */
                conn.kinds.retain(|op| !matches!(op, SendOp::Flush | SendOp::AtomicWrite));
                if conn.kinds.is_empty() {
                    conn.kinds.push(SendOp::Write);
                }
            }
        }
        /* last, so that other seeds' plans are what they were before there was this */
        if roomy && self.contexts.is_none() {
            self.mix_switches(rng);
        }
    }

    /// Cards with room for all connections come to have too many, while these run, and to have room again:
    /// connections that leave it to the cards what they are change.
    fn mix_switches(&mut self, rng: &mut Rng) {
        let (hosts, steps) = (self.hosts as u64, if self.is_long { 50_000 } else { 300 });
        for conn in self.conns.iter_mut().filter(|conn| conn.preferences != [Preference::Off; 2]) {
            if rng.chance(0.8) {
                conn.preferences = [Preference::Auto; 2];
            }
        }
        for _ in 0..rng.within(1, if self.is_long { 40 } else { 6 }) {
            let (host, at) = (rng.below(hosts) as usize, rng.below(steps) as usize);
            self.chaos.push((at, Chaos::Crowd(host, rng.pick(&[0, 0, 1]))));
            if rng.chance(0.7) {
                let later = at + rng.within(10, steps / 2) as usize;
                self.chaos.push((later, Chaos::Crowd(host, ROOMY)));
            }
        }
    }
}

/// Memory of a host that no peer may reach, though peers try.
#[derive(Default)]
pub(crate) struct Forbidden {
    /// In a domain that no connection is of: first byte and key
    foreign: Option<(u64, u32)>,
    /// Registered for all to reach, for a while
    passing: Option<(u64, u32)>,
    /// It is no longer, which stateful cards are to know
    leaving: Option<(u64, u32)>,
    /// They know
    revoked: Option<(u64, u32)>,
}

/// Bytes of such memory.
const FORBIDDEN: u32 = 20_480;
/// So long an end that has said what it becomes asks before it gives up: 32 offers, less one that may have
/// gone before the cut.
const GIVEN_UP: Nanos = 1_600_000_000;

impl World {
    pub(crate) fn make_forbidden(&mut self, at: usize) -> Forbidden {
        if self.plan.star.is_none() {
            return Forbidden::default();
        }
        let host = &mut self.net.hosts[at];
        let pd = host.nic.alloc_pd().expect("a PD");
        let region = host.region_in(pd, FORBIDDEN, all_rights());
        Forbidden { foreign: Some((region.addr, region.lkey)), ..Forbidden::default() }
    }

    /// Regions come and go while connections are at work.
    pub(crate) fn turn_over(&mut self) {
        if self.plan.star.is_none() {
            return;
        }
        for (host, site) in self.net.hosts.iter_mut().zip(&mut self.sites) {
            let f = &mut site.forbidden;
            if f.leaving.is_some_and(|(_, key)| host.is_forgotten(key)) {
                f.revoked = f.leaving.take();
            } else if f.leaving.is_none() && self.rng.chance(0.01) {
                match f.passing.take() {
                    Some((addr, key)) => {
                        host.dereg_mr(key).expect("it was registered");
                        f.leaving = Some((addr, key));
                    }
                    None => {
                        let region = host.region_in(host.pd, FORBIDDEN, all_rights());
                        f.passing = Some((region.addr, region.lkey));
                    }
                }
            }
        }
    }

    /// What the peer of an end has that the end may not reach.
    pub(crate) fn forbidden(&self, c: usize, e: usize) -> Vec<(Bad, u64, u32)> {
        if self.plan.star.is_none() || self.conns[c].plan.bad == 0.0 {
            return Vec::new();
        }
        let at = self.conns[c].ends[1 - e].host;
        let Forbidden { foreign, revoked, .. } = self.sites[at].forbidden;
        let named = |bad: Bad, what: Option<(u64, u32)>| what.map(|(addr, key)| (bad, addr, key));
        let others = self.conns.iter().enumerate().filter(|(other, _)| *other != c);
        let others = others.flat_map(|(_, conn)| &conn.ends).filter(|end| end.host == at);
        let window = others.filter_map(|end| end.window.as_ref()).find(|w| w.bound == Bound::Yes);
        let window = window.map(|w| (w.arena.addr, w.key));
        let all = [named(Bad::Foreign, foreign), named(Bad::Revoked, revoked), named(Bad::Others, window)];
        all.into_iter().flatten().collect()
    }

    /// Each packet that asks for a stateless end's memory, or writes there, is of a request that may do so:
    /// what is refused, is refused before anything of it leaves.
    pub(crate) fn look_at_packets(&mut self) {
        let Some(sent) = &mut self.net.star_sent else { return };
        for (from, header) in std::mem::take(sent) {
            let who = self.who.get(&(from, header.qpn));
            let Some(Who::Conn(c, e)) = who else { panic!("host {from}: {header:?} of {who:?}") };
            let (c, e) = (*c, *e);
            let [me, peer] = [e, 1 - e].map(|e| &self.conns[c].ends[e]);
            if me.down() || peer.down() {
                continue;
            }
            assert!(self.is_permitted(me, peer, &header), "conn {c}.{e}: {header:?} is of no request");
            self.summary.count("packets looked at", header.ptype);
        }
    }

    fn is_permitted(&self, me: &ConnEnd, peer: &ConnEnd, header: &StarHeader) -> bool {
        let (from, to) = (header.addr, header.addr + u64::from(header.len));
        let within = |addr: u64, len: u32| addr <= from && to <= addr + u64::from(len);
        let named = |pieces: &[Sge]| pieces.iter().any(|piece| within(piece.addr, piece.len));
        let mine = |fits: fn(SendOp) -> bool| {
            me.sends.iter().any(|wr| wr.bad.is_none() && fits(wr.op) && within(wr.remote, wr.len))
        };
        match (header.ptype, header.opt) {
            (Ptype::Rd, Opt::Write) => {
                mine(|op| matches!(op, SendOp::Write | SendOp::WriteImm)) || peer.awaits_answer(from, to)
            }
            (Ptype::Gd, Opt::Read) => mine(|op| op == SendOp::Read),
            (Ptype::Gd, Opt::Recv) => {
                me.sends.iter().any(|wr| wr.bad.is_none() && wr.op.is_atomic() && wr.remote == from)
            }
            (Ptype::Rd, _) => {
                let shared = self.sites[peer.host].srq.posted.values();
                let shared = shared.filter(|_| matches!(peer.source, Source::Shared));
                let mut recvs = peer.recvs.iter().chain(shared);
                let brings = |wr: &&Wr| wr.bad.is_none() && wr.op.brings_data();
                recvs.any(|wr| !wr.bad && named(&wr.pieces))
                    || peer.sends.iter().filter(brings).any(|wr| named(&wr.pieces))
            }
            _ => {
                let gives = |wr: &&Wr| !wr.bad.is_some_and(Bad::is_local) && !wr.op.brings_data();
                peer.sends.iter().filter(gives).any(|wr| named(&wr.pieces))
            }
        }
    }

    /// The cards get their StaR.
    pub(crate) fn open_star(&mut self, seed: u64) {
        let Some(StarPlan { threshold, cards, forged, .. }) = &self.plan.star else { return };
        self.net.star_sent = Some(Vec::new());
        if *forged {
            self.net.forger = Some(forger(seed));
        }
        for (host, card) in cards.iter().enumerate() {
            let Some(key) = card else { continue };
            let key = (*key > 0).then_some([*key; 32]);
            /* random, as a card's is: its lower half is the card's boot epoch */
            let boot = Rng::new(seed ^ ((host as u64 + 1) << 56)).bits();
            /* one card in four sends the paper's packets; that is no draw of the plan */
            let form = if boot >> 62 == 0 { Form::Paper } else { Form::Packed };
            if form == Form::Paper {
                self.papers.push(host);
            }
            self.net.open_star(host, StarCard { threshold: *threshold, key, boot, form });
        }
    }

    /// Whether the program of an end has asked for StaR, so that it may be one of its ends.
    pub(crate) fn preferences(&self, c: usize, e: usize) -> bool {
        self.conns[c].plan.preferences[e] != Preference::Off && self.plan.star.is_some()
    }

    /// What an end is of StaR, once that is settled.
    pub(crate) fn role(&self, c: usize, e: usize) -> Option<Role> {
        let end = &self.conns[c].ends[e];
        self.role_of(end.host, end.qpn)
    }

    /// Whether it is settled that an end is plain.
    pub(crate) fn is_plain(&self, c: usize, e: usize) -> bool {
        let end = &self.conns[c].ends[e];
        let star = self.net.hosts[end.host].star.as_ref();
        star.is_some_and(|star| star.roles.outcome(end.qpn) == Some(Outcome::Plain))
    }

    fn role_of(&self, at: usize, qpn: Qpn) -> Option<Role> {
        match self.net.hosts[at].star.as_ref()?.roles.outcome(qpn)? {
            Outcome::Star { role, .. } => Some(role),
            Outcome::Plain => None,
        }
    }

    /// The ends of a running connection are what they are together.
    pub(crate) fn assert_agreed(&self, c: usize) {
        let [a, b] = [0, 1].map(|e| self.role(c, e));
        let agreed = a.map(Role::other) == b || (0..2).any(|e| self.waits_for_nobody(c, e));
        assert!(self.conns[c].over || agreed, "conn {c}: {a:?} and {b:?}");
    }

    /// Whether an end waits, without a request, to be begun by one that is plain, as it gave up while the way
    /// was cut. A request would find that out.
    fn waits_for_nobody(&self, c: usize, e: usize) -> bool {
        let (conn, end) = (&self.conns[c], &self.conns[c].ends[e]);
        let waits = self.role(c, e) == Some(Role::Stateful) && self.net.hosts[end.host].nic.is_held(end.qpn);
        waits && self.role(c, 1 - e).is_none() && conn.silent >= GIVEN_UP
    }

    /// Receives of a host's shared queue that a connection may hold, as its stateful end has them already.
    pub(crate) fn held_ahead(&self, c: usize, at: usize) -> usize {
        let conn = &self.conns[c];
        let holds = |e: usize| conn.plan.shared[e] && conn.ends[e].host == at && self.is_stateless(c, e);
        if conn.over { 0 } else { (0..2).filter(|e| holds(*e)).count() * AHEAD }
    }

    /// All queue pairs are gone: their peers know, or are gone as well, and then there is nothing left
    /// to do.
    pub(crate) fn settle_final_acks(&mut self) {
        assert!(self.net.run_until_idle(1_000_000), "final ACKs have no end");
        for (at, host) in self.net.hosts.iter().enumerate() {
            let left = host.star.as_ref().and_then(|star| star.next_deadline(host.nic.connection_count()));
            assert!(left.is_none(), "host {at}: a timer of StaR's for nobody");
        }
    }

    /// Whether it is one of StaR.
    pub(crate) fn is_star(&self, c: usize) -> bool {
        (0..2).any(|e| self.role(c, e).is_some())
    }

    /// Whether an end is one whose card keeps nothing of it.
    pub(crate) fn is_stateless(&self, c: usize, e: usize) -> bool {
        self.role(c, e) == Some(Role::Stateless)
    }
}
