//! Connections of StaR among the others.

use starverbs_core::star::control::{Role, Wish};
use starverbs_core::star::negotiate::Outcome;
use starverbs_core::{Nanos, Qpn, SendOp};
use starverbs_sim::{Rng, StarCard};

use crate::plan::{Kind, Plan};
use crate::world::World;

/// How late frames come that others overtake, ns: after so long a stateful end takes what it repeats for gone.
const LATE: Nanos = 100_000;
/// Receives of a shared queue that a connection holds at most.
const AHEAD: usize = 64;

/// What the cards of a run have of StaR.
#[derive(Clone, Debug)]
pub(crate) struct StarPlan {
    /// From how many stateful connections on a card wants no more
    pub(crate) threshold: u32,
    /// Of each host: the number of its key, 0 for none; `None`: it has no StaR
    pub(crate) cards: Vec<Option<u8>>,
    /// Buffers of a region: where each has one of its own, its rule is told first
    pub(crate) together: u64,
}

impl Plan {
    /// Three runs in ten have cards with StaR, most of whose connections of RC wish for it.
    pub(crate) fn mix_star(&mut self, rng: &mut Rng) {
        let share = rng.pick(&[0.4, 0.8, 1.0]);
        let keys: &[Option<u8>] = match rng.below(8) {
            0..=2 => &[Some(0)],
            3 | 4 => &[Some(1)],
            5 => &[Some(0), Some(0), None],
            6 => &[Some(1), Some(1), Some(2)],
            _ => &[Some(0), Some(1)],
        };
        let threshold = rng.pick(&[0, 0, 1, 120]);
        let cards = (0..self.hosts).map(|_| rng.pick(keys)).collect();
        let plan = StarPlan { threshold, cards, together: rng.pick(&[1, 16, 16]) };
        let wishes = [
            [Wish::Stateless, Wish::Stateful],
            [Wish::Stateful, Wish::Stateless],
            [Wish::Stateless, Wish::Auto],
            [Wish::Auto, Wish::Stateless],
            [Wish::Auto, Wish::Auto],
            [Wish::Stateful, Wish::Auto],
            [Wish::Off, Wish::Stateless],
            [Wish::Stateful, Wish::Stateful],
        ];
        if !rng.chance(0.3) {
            return;
        }
        for (_, _, faults) in &mut self.links {
            faults.late = faults.late.min(LATE);
        }
        for conn in self.conns.iter_mut().filter(|conn| conn.kind == Kind::Rc) {
            if rng.chance(share) {
                conn.wishes = rng.pick(&wishes);
                /* an end of StaR takes neither */
                conn.kinds.retain(|op| !matches!(op, SendOp::Flush | SendOp::AtomicWrite));
                if conn.kinds.is_empty() {
                    conn.kinds.push(SendOp::Write);
                }
            }
        }
        self.star = Some(plan);
    }
}

impl World {
    /// The cards get their StaR.
    pub(crate) fn open_star(&mut self, seed: u64) {
        let Some(StarPlan { threshold, cards, .. }) = &self.plan.star else { return };
        for (host, card) in cards.iter().enumerate() {
            let Some(key) = card else { continue };
            let key = (*key > 0).then_some([*key; 32]);
            /* random, as a card's is: what tells lives of a card apart is its lower half */
            let boot = Rng::new(seed ^ ((host as u64 + 1) << 56)).bits();
            self.net.open_star(host, StarCard { threshold: *threshold, key, boot });
        }
    }

    /// Whether the program of an end has asked for StaR, so that it may be one of its ends.
    pub(crate) fn wishes(&self, c: usize, e: usize) -> bool {
        self.conns[c].plan.wishes[e] != Wish::Off && self.plan.star.is_some()
    }

    /// What an end is of StaR, once that is settled.
    pub(crate) fn role(&self, c: usize, e: usize) -> Option<Role> {
        let end = &self.conns[c].ends[e];
        self.role_of(end.host, end.qpn)
    }

    fn role_of(&self, at: usize, qpn: Qpn) -> Option<Role> {
        match self.net.hosts[at].star.as_ref()?.roles.outcome(qpn)? {
            Outcome::Star { role, .. } => Some(role),
            Outcome::Plain => None,
        }
    }

    /// Receives of a host's shared queue that a connection may hold, as its stateful end has them already.
    pub(crate) fn held_ahead(&self, c: usize, at: usize) -> usize {
        let conn = &self.conns[c];
        let holds = |e: usize| conn.plan.shared[e] && conn.ends[e].host == at && self.is_stateless(c, e);
        if conn.over { 0 } else { (0..2).filter(|e| holds(*e)).count() * AHEAD }
    }

    /// All queue pairs are gone: their peers hear of it, or are gone as well, and then there is nothing left to do.
    pub(crate) fn last_words(&mut self) {
        assert!(self.net.run_until_idle(1_000_000), "last words have no end");
        for (at, host) in self.net.hosts.iter().enumerate() {
            let left = host.star.as_ref().and_then(|star| star.next_deadline());
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
