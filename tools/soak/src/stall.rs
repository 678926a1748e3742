//! Queue pairs are independent: one whose peer lives makes progress within a bound, whatever its neighbours
//! do.
//!
//! Progress is what the card alone makes: a posted request that is done with. Where a program, a cut link or
//! a host without CPU is what a queue pair waits for, its time begins anew.

use starverbs_core::env::RecvQueue;
use starverbs_core::{Nanos, QpState};
use starverbs_star::control::Preference;

use crate::conn::Source;
use crate::world::World;

const SECOND: Nanos = 1_000_000_000;
/// How long a queue pair may make no progress on links that lose nothing, ns. Everybody's turn comes sooner.
const BOUND: Nanos = 2 * SECOND;
/// Times that a packet may be lost in a row on links that lose up to one in two exchanges.
const LOSSES: Nanos = 40;

/// What is known of the progress of each end.
pub(crate) struct Stalls {
    /// Requests that were outstanding at the last look, and when that changed, by connection and end
    ends: Vec<[(u32, Nanos); 2]>,
    /// Until when what befell holds up the link from one host to another, ns
    trouble: Vec<Nanos>,
    hosts: usize,
}

impl Stalls {
    pub(crate) fn new(conns: usize, hosts: usize) -> Self {
        Stalls { ends: vec![[(0, 0); 2]; conns], trouble: vec![0; hosts * hosts], hosts }
    }

    /// Nothing comes from `from` to `to` before `until`.
    pub(crate) fn hold_up(&mut self, from: usize, to: usize, until: Nanos) {
        let at = &mut self.trouble[from * self.hosts + to];
        *at = until.max(*at);
    }

    /// Since when nothing holds up the links between two hosts.
    fn clear_from(&self, [a, b]: [usize; 2]) -> Nanos {
        self.trouble[a * self.hosts + b].max(self.trouble[b * self.hosts + a])
    }

    /// Whether anything held up the links between two hosts so far, or does.
    pub(crate) fn had_trouble(&self, hosts: [usize; 2]) -> bool {
        self.clear_from(hosts) > 0
    }

    /// Nothing comes to or from `host` before `until`.
    pub(crate) fn hold_up_host(&mut self, host: usize, until: Nanos) {
        for other in 0..self.hosts {
            self.hold_up(host, other, until);
            self.hold_up(other, host, until);
        }
    }
}

impl World {
    /// Looks at the progress of all queue pairs.
    ///
    /// # Panics
    /// When one makes none.
    pub(crate) fn look_for_stalls(&mut self) {
        let now = self.net.now();
        for c in 0..self.conns.len() {
            for e in 0..2 {
                let left = self.conns[c].ends[e].sq.outstanding();
                let (was, since) = self.stalls.ends[c][e];
                /* between two looks a link may have been cut and come back */
                let clear = self.stalls.clear_from(self.conns[c].plan.hosts);
                if left != was || clear > now || !self.must_progress(c, e) {
                    self.stalls.ends[c][e] = (left, now);
                } else {
                    let (bound, since) = (self.bound(c), since.max(clear));
                    assert!(
                        now - since < bound,
                        "conn {c}.{e}: no progress in {bound} ns, and its peer lives"
                    );
                }
            }
        }
    }

    /// Whether all that an end waits for is its card and its peer's.
    fn must_progress(&self, c: usize, e: usize) -> bool {
        let conn = &self.conns[c];
        let (me, peer) = (&conn.ends[e], &conn.ends[1 - e]);
        let lives = |end: usize| !conn.ends[end].down() && self.state(c, end) == QpState::Rts;
        conn.reliable()
            && !conn.over
            && conn.plan.preferences == [Preference::Off; 2]
            && me.rung
            && !me.draining
            && me.sq.outstanding() > 0
            && lives(0)
            && lives(1)
            && self.has_receives(&peer.source, peer.host)
            /* its card waits with what it is asked until its peer takes answers */
            && (conn.plan.strom.is_none() || self.has_receives(&me.source, me.host))
    }

    fn has_receives(&self, source: &Source, host: usize) -> bool {
        let site = &self.sites[host];
        match source {
            Source::Own(rq) => rq.len() > 0,
            Source::Shared => site.srq.rq.len() > 0,
            Source::Xrc => site.xrc.iter().all(|srq| srq.rq.len() > 0),
            Source::None => true,
        }
    }

    /// Whether links between a connection's hosts lose frames, or hold them back.
    pub(crate) fn is_lossy(&self, c: usize) -> bool {
        let [a, b] = self.conns[c].plan.hosts;
        self.plan.links.iter().any(|(from, to, faults)| {
            let on = (*from, *to) == (a, b) || (*from, *to) == (b, a);
            on && (faults.loss > 0.0 || faults.corrupt > 0.0 || faults.reorder > 0.0 || faults.queue > 0)
        })
    }

    /// How long an end of a connection may make no progress.
    fn bound(&self, c: usize) -> Nanos {
        let plan = &self.conns[c].plan;
        let timeout = if plan.setup.timeout == 0 { SECOND } else { (4096 << plan.setup.timeout).min(SECOND) };
        if self.is_lossy(c) { BOUND + LOSSES * timeout } else { BOUND }
    }
}
