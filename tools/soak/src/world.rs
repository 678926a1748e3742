//! Hosts, their programs and the network of a run, and how time goes on in it.

use std::collections::{BTreeMap, HashMap};

use starverbs_core::{AsyncEvent, CardLimits, Nanos, NicConfig, PdId, QpState, Qpn, SrqId};
use starverbs_sim::{Faults, Net, Rng, SimCq, SimRq};

use crate::conn::{Conn, RecvWr};
use crate::datagram::Station;
use crate::plan::{Chaos, Plan};
use crate::pool::Pool;
use crate::post::RECV;
use crate::stall::Stalls;
use crate::star::Forbidden;
use crate::strom::Kernels;
use crate::summary::Summary;
use crate::tags::Matching;

/// Longest message that the cards take.
pub(crate) const MAX_MSG: u32 = 1 << 20;
/// Deep enough for all that may be posted.
const CQ_DEPTH: usize = 1 << 16;
/// A run that takes so many turns goes round in a circle.
const STEPS: usize = 3_000_000;
/// Frames on the wire that no set of windows allows.
const MOST_IN_FLIGHT: usize = 200_000;

/// A shared receive queue and what is posted to it.
pub(crate) struct SharedQueue {
    pub(crate) id: SrqId,
    pub(crate) rq: SimRq,
    pub(crate) posted: BTreeMap<u64, RecvWr>,
    pub(crate) next: u64,
    /// A receive with a bad key was posted
    pub(crate) bad: bool,
    /// Likewise, before the host was restarted: its answer may still be on the wire
    pub(crate) was_bad: bool,
    /// XRC: where its receives complete
    pub(crate) cq: Option<SimCq>,
}

/// What the programs of a host share.
pub(crate) struct Site {
    pub(crate) cqs: [SimCq; 2],
    pub(crate) pool: Pool,
    pub(crate) srq: SharedQueue,
    pub(crate) xrcd: PdId,
    pub(crate) xrc: [SharedQueue; 2],
    /// Where there is StaR: memory that no peer may reach
    pub(crate) forbidden: Forbidden,
    /// Where there is StRoM: what answers peers
    pub(crate) kernels: Option<Kernels>,
}

impl Site {
    /// What the wire may still know of the site before a restart.
    pub(crate) fn remember(&mut self, before: &Site) {
        let was_bad = |srq: &SharedQueue| srq.bad || srq.was_bad;
        self.srq.was_bad = was_bad(&before.srq);
        if let (Some(kernels), Some(before)) = (&mut self.kernels, &before.kernels) {
            kernels.remember(before);
        }
        for (srq, before) in self.xrc.iter_mut().zip(&before.xrc) {
            srq.was_bad = was_bad(before);
        }
    }
}

/// Whose a QP is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Who {
    Conn(usize, usize),
    Station(usize),
    Matching,
}

/// A run.
pub struct World {
    /// Hosts and network
    pub net: Net,
    pub(crate) rng: Rng,
    pub(crate) plan: Plan,
    pub(crate) sites: Vec<Site>,
    pub(crate) conns: Vec<Conn>,
    pub(crate) stations: Vec<Station>,
    pub(crate) matching: Vec<Matching>,
    pub(crate) who: HashMap<(usize, Qpn), Who>,
    /// Whose each number was first, over all restarts
    pub(crate) had: HashMap<(usize, Qpn), (usize, usize)>,
    /// What happened so far
    pub summary: Summary,
    pub(crate) stalls: Stalls,
    /// Hosts whose cards send the paper's packets of StaR
    pub(crate) papers: Vec<usize>,
    /// Hosts of which nothing comes through to StaR's ports, and until when, ns
    shut: Vec<(usize, Nanos)>,
    pub(crate) step: usize,
    trace: bool,
}

/// In one run of six windows are moved by delays, with a target from this, ns, to five hundred times as much.
const DELAY_TARGET: Nanos = 20_000;

impl World {
    /// The world of a seed; with `trace`, each frame, post, completion and event is printed to standard
    /// error.
    pub fn new(seed: u64, plan: Plan, trace: bool) -> Self {
        /* small pools come to their end, and cost less to make */
        let pools = [(8, 2), (16, 4), (48, 16), (1024, 64)][if plan.is_long { 3 } else { seed as usize % 3 }];
        let limits = CardLimits { qps: 4096, ..CardLimits::default() };
        let cfg = NicConfig {
            mtu: plan.mtu,
            max_msg: MAX_MSG,
            window: plan.window,
            delay_target: (seed % 6 == 1).then(|| DELAY_TARGET << (seed / 6 % 10)),
            contexts: plan.contexts,
            limits,
            kept: pools.0,
            gaps: pools.1,
            ..NicConfig::default()
        };
        let mut net = Net::new(plan.hosts as u8, cfg, Faults::default(), seed);
        for (at, credits) in plan.credits.iter().copied().enumerate() {
            let ample = plan.ample.contains(&at);
            if credits || ample {
                let contexts = cfg.contexts.filter(|_| !ample);
                net.replace_card(at, NicConfig { credits, contexts, ..cfg });
            }
        }
        net.trace = trace;
        for (from, to, faults) in &plan.links {
            net.set_link(*from, *to, *faults);
        }
        let mut world = World {
            net,
            rng: Rng::new(seed ^ 0x50a_c0de),
            stalls: Stalls::new(plan.conns.len(), plan.hosts),
            plan,
            sites: vec![],
            conns: vec![],
            stations: vec![],
            matching: vec![],
            who: HashMap::new(),
            had: HashMap::new(),
            summary: Summary { runs: 1, ..Summary::default() },
            papers: vec![],
            shut: vec![],
            step: 0,
            trace,
        };
        world.open_star(seed);
        for at in 0..world.plan.hosts {
            let site = world.make_site(at);
            world.sites.push(site);
        }
        world.make_conns();
        world.make_stations();
        world.make_matching();
        world
    }

    /// What a host has before its programs make queue pairs.
    pub(crate) fn make_site(&mut self, at: usize) -> Site {
        let host = &mut self.net.hosts[at];
        host.env.memory.watch();
        host.env.port = self.plan.ports[at];
        let (pd, slots) = (host.pd, self.plan.srq_slots);
        let queue = |id, rq, cq| SharedQueue {
            id,
            rq,
            posted: BTreeMap::new(),
            next: 0,
            bad: false,
            was_bad: false,
            cq,
        };
        let rq = SimRq::new(slots, 4);
        let srq = queue(host.nic.create_srq(pd, rq.clone(), 0, 0).expect("an SRQ"), rq, None);
        let xrcd = host.nic.alloc_pd().expect("a PD");
        let xrc = [(); 2].map(|()| {
            let (rq, cq) = (SimRq::new(slots, 4), SimCq::new(CQ_DEPTH));
            let id = host.nic.create_xrc_srq(pd, xrcd, rq.clone(), cq.clone(), 0).expect("an SRQ");
            queue(id, rq, Some(cq))
        });
        let mut pool = Pool::default();
        if let Some(star) = &self.plan.star {
            pool.together = star.together;
            /* a stateful end that asked twice hears only the first answer */
            self.net.hosts[at].env.memory.read_at_will();
        }
        let forbidden = self.make_forbidden(at);
        let kernels = self.make_kernels(at);
        Site { cqs: [(); 2].map(|()| SimCq::new(CQ_DEPTH)), pool, srq, xrcd, xrc, forbidden, kernels }
    }

    /// One line of the trace.
    pub(crate) fn say(&self, line: impl FnOnce() -> String) {
        if self.trace {
            eprintln!("{:>12} {}", self.net.now(), line());
        }
    }

    /// State of an end's queue pair, as `ibv_query_qp` tells it.
    pub(crate) fn state(&self, c: usize, e: usize) -> QpState {
        let end = &self.conns[c].ends[e];
        self.net.hosts[end.host].state(end.qpn)
    }

    /// Runs to the end.
    ///
    /// # Panics
    /// Something is not as it must be.
    pub fn run(&mut self) {
        let chaos = std::mem::take(&mut self.plan.chaos);
        loop {
            self.step += 1;
            assert!(self.step < STEPS, "no end after {STEPS} steps");
            let now = self.step;
            chaos.iter().filter(|(step, _)| *step == now).for_each(|(_, one)| self.befall(*one));
            self.open_ports();
            self.reload();
            self.act(false);
            let happened = self.go_on();
            self.look_for_stalls();
            self.look_at_packets();
            self.look_at_rpcs();
            assert!(self.net.in_flight() < MOST_IN_FLIGHT, "the wire fills");
            self.events();
            self.dooms();
            for at in 0..self.plan.hosts {
                if self.rng.chance(self.plan.poll) {
                    self.poll(at);
                }
            }
            if !happened && !self.poll_all() && !self.act(true) && !self.wake() {
                break;
            }
        }
        self.plan.chaos = chaos;
        self.finish();
    }

    /// Nothing happens: hosts that sleep may have something to say, queue pairs that failed may begin anew.
    fn wake(&mut self) -> bool {
        for at in 0..self.plan.hosts {
            self.net.sleep(at, 0);
        }
        self.go_on() || self.poll_all() || self.act(true) || self.doom_all()
    }

    /// What comes next happens, if a connection waits for anything: a card with too many looks at them for
    /// ever.
    fn go_on(&mut self) -> bool {
        self.net.transmit();
        self.net.is_busy() && self.net.step()
    }

    /// Programs post. `eager`: all that they can.
    fn act(&mut self, eager: bool) -> bool {
        let mut acted = false;
        for c in 0..self.conns.len() {
            for e in 0..2 {
                if eager || self.rng.chance(self.plan.feed) {
                    acted |= self.feed(c, e, eager);
                }
                if !self.conns[c].over && (eager || self.rng.chance(self.plan.act)) {
                    acted |= self.post_list(c, e, eager);
                }
            }
        }
        for at in 0..self.plan.hosts {
            if eager || self.rng.chance(self.plan.feed) {
                acted |= self.feed_shared(at, eager);
            }
        }
        for at in 0..self.plan.hosts {
            acted |= self.act_sends(at, eager);
        }
        self.turn_over();
        acted |= self.act_stations(eager);
        acted | self.act_matching(eager)
    }

    /// Posts receives to the shared queues of a host.
    fn feed_shared(&mut self, at: usize, eager: bool) -> bool {
        let mut any = false;
        let uses = |w: &World, xrc: bool| {
            let on = |c: &Conn, e: usize| match xrc {
                true => e == 1 && c.plan.kind == crate::plan::Transport::Xrc && c.plan.hosts[1] == at,
                false => c.plan.shared[e] && c.plan.hosts[e] == at,
            };
            w.conns.iter().any(|c| on(c, 0) || on(c, 1))
        };
        let (plain, xrc) = (uses(self, false), uses(self, true));
        let bad = self.conns.iter().map(|c| c.plan.bad_recv).fold(0.0, f64::max) / 2.0;
        for which in 0..3 {
            if if which == 0 { !plain } else { !xrc } {
                continue;
            }
            loop {
                let srq = self.shared(at, which);
                if srq.rq.is_full() || !(eager || self.rng.chance(0.6)) {
                    break;
                }
                let id = self.shared(at, which).next;
                let (recv, wr) = self.make_recv(at, id, bad);
                let srq = self.shared(at, which);
                srq.next += 1;
                srq.bad |= wr.bad;
                srq.rq.post(recv).expect("there is room");
                srq.posted.insert(wr.id, wr);
                any = true;
            }
        }
        any
    }

    fn shared(&mut self, at: usize, which: usize) -> &mut SharedQueue {
        let site = &mut self.sites[at];
        if which == 0 { &mut site.srq } else { &mut site.xrc[which - 1] }
    }

    /// What programs learn beside their completions.
    pub(crate) fn events(&mut self) {
        for at in 0..self.plan.hosts {
            for event in std::mem::take(&mut self.net.hosts[at].env.events) {
                self.say(|| format!("host {at} {event:?}"));
                self.summary.count("events", kind_of(event));
                let qpn = match event {
                    AsyncEvent::QpFatal(q)
                    | AsyncEvent::QpReqErr(q)
                    | AsyncEvent::QpAccessErr(q)
                    | AsyncEvent::CommEst(q)
                    | AsyncEvent::SqDrained(q)
                    | AsyncEvent::LastWqeReached(q)
                    | AsyncEvent::PeerLacksDialect(q) => q,
                    AsyncEvent::SrqLimit(_) | AsyncEvent::Mads => {
                        panic!("host {at}: {event:?}, which nobody armed")
                    }
                };
                match self.who.get(&(at, qpn)) {
                    Some(Who::Conn(c, e)) => self.event(*c, *e, event),
                    Some(Who::Matching) if matches!(event, AsyncEvent::CommEst(_)) => {}
                    who => panic!("host {at}: {event:?} of {who:?}"),
                }
            }
        }
    }

    /// Polls all completion queues of a host. Whether there was anything.
    pub(crate) fn poll(&mut self, at: usize) -> bool {
        self.events();
        let mut any = self.poll_matching(at);
        for which in 0..4 {
            let site = &self.sites[at];
            let cq = match which {
                0 | 1 => site.cqs[which].clone(),
                _ => site.xrc[which - 2].cq.clone().expect("it has one"),
            };
            while let Some((cqe, solicited)) = cq.poll() {
                any = true;
                self.say(|| format!("host {at} polls {cqe:?}"));
                let recv = cqe.wr_id & RECV != 0;
                self.summary
                    .count(if recv { "receives completed" } else { "requests completed" }, cqe.status);
                match self.who.get(&(at, cqe.qpn)).copied() {
                    Some(Who::Conn(c, e)) if recv => {
                        self.received(c, e, which.saturating_sub(2), &cqe, solicited);
                    }
                    Some(Who::Conn(c, e)) => self.sent(c, e, &cqe),
                    Some(Who::Station(s)) if recv => self.datagram(s, &cqe, solicited),
                    Some(Who::Station(s)) => self.datagram_sent(s, &cqe),
                    who => panic!("host {at}: a completion of {who:?}: {cqe:?}"),
                }
            }
        }
        any
    }

    pub(crate) fn poll_all(&mut self) -> bool {
        (0..self.plan.hosts).fold(false, |any, at| self.poll(at) | any)
    }

    /// What befalls.
    fn befall(&mut self, chaos: Chaos) {
        self.look_at_packets();
        self.say(|| format!("{chaos:?}"));
        let name = format!("{chaos:?}");
        self.summary.add("befell", name.split('(').next().unwrap_or(""), 1);
        match chaos {
            Chaos::Cut(from, to, both, time) => self.cut(from, to, both, time),
            Chaos::Nap(host, time) => {
                self.stalls.hold_up_host(host, self.net.now() + time);
                self.net.sleep(host, time);
            }
            Chaos::Kill((c, e)) => self.kill(c, e),
            Chaos::Abandon((c, e), time) => self.abandon(c, e, time),
            Chaos::Destroy((c, e), time) => self.destroy(c, e, time),
            Chaos::Restart(host, time) => {
                self.stalls.hold_up_host(host, self.net.now());
                self.restart(host, time);
            }
            Chaos::Drain((c, e)) => self.drain(c, e),
            Chaos::Crowd(host, threshold) => self.net.crowd(host, threshold),
            Chaos::Want((c, e), preference) => self.want(c, e, preference),
            Chaos::Unload(host, time) => self.unload(host, time),
            Chaos::Shut(host, time) => self.shut.push((host, self.net.now() + time)),
        }
    }

    /// StaR's ports that were closed for some time are open again.
    fn open_ports(&mut self) {
        if !self.shut.is_empty() {
            self.shut.retain(|(_, until)| *until > self.net.now());
            self.net.star_cut = self.shut.iter().map(|(host, _)| *host).collect();
        }
    }

    /// A link, or both ways of it, carries nothing for `time`.
    fn cut(&mut self, from: usize, to: usize, both: bool, time: Nanos) {
        self.net.cut(from, to, time);
        if both {
            self.net.cut(to, from, time);
        }
        for (from, to) in [(from, to), (to, from)] {
            self.stalls.hold_up(from, to, self.net.now() + time);
        }
        for conn in &mut self.conns {
            if conn.plan.hosts == [from, to] || conn.plan.hosts == [to, from] {
                conn.silent += time;
            }
        }
    }
}

/// An event's name without its number.
fn kind_of(event: AsyncEvent) -> &'static str {
    match event {
        AsyncEvent::QpFatal(_) => "QpFatal",
        AsyncEvent::QpReqErr(_) => "QpReqErr",
        AsyncEvent::QpAccessErr(_) => "QpAccessErr",
        AsyncEvent::CommEst(_) => "CommEst",
        AsyncEvent::SqDrained(_) => "SqDrained",
        AsyncEvent::LastWqeReached(_) => "LastWqeReached",
        AsyncEvent::SrqLimit(_) => "SrqLimit",
        AsyncEvent::Mads => "Mads",
        AsyncEvent::PeerLacksDialect(_) => "PeerLacksDialect",
    }
}
