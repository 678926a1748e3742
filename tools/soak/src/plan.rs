//! What a run is: drawn from its seed, and printed when the run fails.

use starverbs_core::qpc::Policy;
use starverbs_core::{Access, ContextCache, Mtu, Nanos, SendOp};
use starverbs_sim::{Faults, RC_OPS, Rng, Setup};
use starverbs_star::control::Preference;

use crate::star::StarPlan;
use crate::strom::StromPlan;

/// Transport of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transport {
    /// Reliable connection
    Rc,
    /// Unreliable connection
    Uc,
    /// Only the first end asks
    Xrc,
}

/// A host's number.
pub type At = usize;

/// An end of a connection: the connection's number, and which of its ends.
pub type Whose = (usize, usize);

/// Something that befalls the world. Times are in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub enum Chaos {
    /// The link from one host to another, or both ways of it, carries nothing for so long
    Cut(At, At, bool, Nanos),
    /// A host gets no CPU for so long
    Nap(At, Nanos),
    /// A program takes a QP to ERR
    Kill(Whose),
    /// Likewise, and for so long nobody does anything about it, while its peer asks
    Abandon(Whose, Nanos),
    /// A program destroys a QP with all that is posted to it, and for so long nobody does anything about it
    Destroy(Whose, Nanos),
    /// A host ends without a word and comes up again; for so long nobody does anything about its connections
    Restart(At, Nanos),
    /// A program drains a send queue and goes on
    Drain(Whose),
    /// A card with StaR is to keep so many connections from now on
    Crowd(At, u32),
    /// A program wants its end of StaR to be that from now on
    Want(Whose, Preference),
    /// Of what a host sends nothing comes through to StaR's ports for so long
    Shut(At, Nanos),
    /// The kernel that a host's peers ask most is unloaded, whatever it is in the middle of, for so long
    Unload(At, Nanos),
}

/// A connection.
#[derive(Clone, Debug)]
pub struct ConnPlan {
    /// Its transport
    pub kind: Transport,
    /// Where its ends are
    pub hosts: [At; 2],
    /// How it is connected
    pub setup: Setup,
    /// Slots of the send queues
    pub sq: [u32; 2],
    /// Slots of the receive queues
    pub rq: [usize; 2],
    /// Receives come from the host's SRQ
    pub shared: [bool; 2],
    /// All requests are signaled
    pub all_signaled: bool,
    /// Operations that each end posts
    pub ops: [u32; 2],
    /// Those to choose from
    pub kinds: Vec<SendOp>,
    /// Bytes of the regions
    pub region: u32,
    /// Share of signaled requests
    pub signaled: f64,
    /// Share of requests that must fail
    pub bad: f64,
    /// Share of receives that must fail
    pub bad_recv: f64,
    /// Share of requests whose length is the longest that the peer takes
    pub long: f64,
    /// How often it may be set up anew after it failed
    pub reconnects: u32,
    /// What its ends would be of StaR
    pub preferences: [Preference; 2],
    /// What it has of StRoM's dialect, if it is RC's
    pub strom: Option<StromPlan>,
}

/// A run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// One of the rare long ones
    pub(crate) is_long: bool,
    pub(crate) hosts: usize,
    pub(crate) window: u32,
    pub(crate) ports: Vec<usize>,
    pub(crate) mtu: Mtu,
    /// The cards are QPC-limited
    pub contexts: Option<ContextCache>,
    /// Hosts whose cards have room for all of them
    pub ample: Vec<At>,
    /// Hosts whose cards say how many receives are posted
    pub(crate) credits: Vec<bool>,
    /// Every link that is not quiet
    pub(crate) links: Vec<(At, At, Faults)>,
    /// The connections
    pub conns: Vec<ConnPlan>,
    /// Hosts of the UD QPs
    pub(crate) datagrams: Vec<At>,
    pub(crate) datagram_ops: u32,
    /// Hosts and number of messages of tag matching
    pub(crate) tags: Vec<([At; 2], u32)>,
    /// Room of each receive
    pub(crate) room: u32,
    pub(crate) srq_slots: usize,
    /// Chance that a program polls, posts receives, posts sends, at each step
    pub(crate) poll: f64,
    pub(crate) feed: f64,
    pub(crate) act: f64,
    /// What befalls, by step
    pub chaos: Vec<(usize, Chaos)>,
    /// What the cards have of StaR, if some have it
    pub star: Option<StarPlan>,
}

const MS: Nanos = 1_000_000;
/// What StaR takes a wire to hold packets back at most, before it has seen more (docs/star.md), ns.
const STAR_LATE: Nanos = 100_000;
/// What a queue pair does to its peer's memory window, and its peer to its own.
const WINDOW_OPS: [SendOp; 3] = [SendOp::BindMw, SendOp::LocalInv, SendOp::SendInv];

/// A link's faults as a seed has them: one trouble or all of them.
pub fn any_link(rng: &mut Rng) -> Faults {
    let mut f = Faults {
        jitter: rng.pick(&[0, 500, 20_000]),
        delay: rng.pick(&[200, 2_000, 2_000, 50_000, 5 * MS]),
        late: rng.pick(&[3_000, STAR_LATE, 10 * MS]),
        ..Faults::default()
    };
    if f.late == STAR_LATE {
        f.late -= f.jitter;
    }
    let some = |rng: &mut Rng| rng.pick(&[0.001, 0.01, 0.05, 0.2]);
    match rng.below(7) {
        0 => f.loss = some(rng),
        1 => f.reorder = some(rng),
        2 => f.duplicate = some(rng),
        3 => f.corrupt = some(rng),
        4 => {
            f.service = rng.pick(&[500, 5_000]);
            f.queue = rng.within(2, 40);
        }
        _ => {
            f.loss = some(rng);
            f.reorder = some(rng);
            f.duplicate = some(rng);
            f.corrupt = some(rng) / 2.0;
        }
    }
    f
}

fn any_setup(rng: &mut Rng) -> Setup {
    let timeout = rng.pick(&[0, 20, 20, 20, 22, 8, 12]);
    let remote = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    Setup {
        mtu: rng.pick(&[Mtu::M256, Mtu::M256, Mtu::M512, Mtu::M1024, Mtu::M2048, Mtu::M4096]),
        timeout,
        retry_cnt: if timeout >= 20 { 7 } else { rng.within(0, 7) as u8 },
        rnr_retry: rng.pick(&[7, 7, 7, 7, 3, 0]),
        min_rnr_timer: rng.within(1, 14) as u8,
        rd_atomic: rng.pick(&[1, 2, 4, 16, 128]),
        psn: rng.pick(&[0, 1, 0xff_ffff, 0xff_fff0, rng.clone().bits() as u32 & 0xff_ffff]),
        qkey: 0x1111_1111,
        access: Access::LOCAL_WRITE | remote | Access::FLUSH_GLOBAL,
    }
}

/// A connection as a seed has it, of some of `hosts` hosts, with up to `ops` operations each way; `trouble`:
/// some of them must fail.
pub fn any_conn(rng: &mut Rng, hosts: usize, ops: u64, trouble: bool) -> ConnPlan {
    let kind = rng.pick(&[
        Transport::Rc,
        Transport::Rc,
        Transport::Rc,
        Transport::Rc,
        Transport::Uc,
        Transport::Xrc,
    ]);
    let a = rng.below(hosts as u64) as usize;
    let mut b = rng.below(hosts as u64) as usize;
    if a == b && (kind == Transport::Xrc || rng.chance(0.8)) {
        b = (a + 1) % hosts;
    }
    let all = [&RC_OPS[..], &WINDOW_OPS].concat();
    let kinds = match rng.below(3) {
        0 => vec![rng.pick(&RC_OPS), rng.pick(&all)],
        _ => all,
    };
    let mut two = |f: fn(&mut Rng) -> u64| [f(rng), f(rng)];
    let sq = two(|r| 1 << r.below(7)).map(|n| n as u32);
    let rq = two(|r| r.pick(&[1, 2, 3, 8, 64])).map(|n| n as usize);
    let shared = two(|r| r.below(3)).map(|n| n == 0 && kind != Transport::Xrc);
    let mut count = || rng.below(ops + 1) as u32;
    let ops = [count(), if kind == Transport::Xrc { 0 } else { count() }];
    ConnPlan {
        kind,
        hosts: [a, b],
        setup: any_setup(rng),
        sq,
        rq,
        shared,
        all_signaled: rng.chance(0.2),
        ops,
        kinds,
        region: rng.pick(&[64, 1024, 1024, 4096, 4096, 20_000]),
        signaled: rng.pick(&[0.0, 0.1, 0.6, 1.0]),
        bad: if trouble { rng.pick(&[0.0, 0.02, 0.1]) } else { 0.0 },
        bad_recv: if trouble { rng.pick(&[0.0, 0.0, 0.03]) } else { 0.0 },
        long: rng.pick(&[0.0, 0.05, 0.5]),
        reconnects: rng.below(5) as u32,
        preferences: [Preference::Off; 2],
        strom: None,
    }
}

fn any_chaos(rng: &mut Rng, plan: &Plan, steps: u64) -> (usize, Chaos) {
    let host = rng.below(plan.hosts as u64) as usize;
    let to = rng.below(plan.hosts as u64) as usize;
    let conn = rng.below(plan.conns.len() as u64) as usize;
    let end = rng.below(2) as usize;
    let time = rng.pick(&[MS / 10, 5 * MS, 100 * MS, 1_000 * MS]);
    let chaos = match rng.below(9) {
        0..=2 => Chaos::Cut(host, to, rng.chance(0.5), 2 * time),
        3 | 4 => Chaos::Nap(host, time),
        5 => Chaos::Kill((conn, end)),
        6 if plan.tags.is_empty() => Chaos::Restart(host, 0),
        _ => Chaos::Drain((conn, end)),
    };
    (rng.below(steps) as usize, chaos)
}

/// One run in four has QPC-limited cards.
fn any_contexts(rng: &mut Rng) -> Option<ContextCache> {
    let cache = ContextCache {
        entries: rng.within(1, 4) as u32,
        policy: rng.pick(&[Policy::Fcfs, Policy::NonBlocking, Policy::LatencyHiding]),
        miss: rng.pick(&[1, 500, 5_000]),
        fetch: rng.pick(&[0, 500]),
    };
    rng.chance(0.25).then_some(cache)
}

impl Plan {
    /// Two hosts with these connections, whose links are both alike: nothing befalls them, and what else
    /// there is of a plan, as the size of queues, is as a seed has it.
    pub fn of_two(rng: &mut Rng, link: Faults, conns: Vec<ConnPlan>) -> Plan {
        let any = Plan::new(rng);
        Plan {
            is_long: false,
            hosts: 2,
            contexts: None,
            ample: vec![],
            credits: any.credits[..2].to_vec(),
            links: vec![(0, 1, link), (1, 0, link)],
            conns,
            datagrams: vec![],
            tags: vec![],
            chaos: vec![],
            star: None,
            ..any
        }
    }

    /// The plan of a seed. One run in a few hundred is a long one.
    pub fn new(rng: &mut Rng) -> Plan {
        let long = rng.chance(0.003);
        let big = long || rng.chance(0.1);
        let hosts = if big { rng.within(2, 8) } else { rng.within(2, 3) } as usize;
        let clean = rng.chance(0.15);
        let mut links = Vec::new();
        for from in 0..hosts {
            for to in 0..hosts {
                if !clean && rng.chance(0.7) {
                    links.push((from, to, any_link(rng)));
                }
            }
        }
        let conns = if big { rng.within(3, 12) } else { rng.within(1, 3) };
        let ops = if long { 2_000 } else { rng.pick(&[4, 12, 30, 60]) };
        let trouble = rng.chance(0.5);
        let datagrams = if rng.chance(0.3) { rng.within(1, 4) } else { 0 };
        let tags = if rng.chance(0.12) { 1 } else { 0 };
        let mut plan = Plan {
            is_long: long,
            hosts,
            window: rng.pick(&[4 << 10, 16 << 10, 64 << 10, 512 << 10]),
            ports: (0..hosts).map(|_| rng.pick(&[1, 3, 64])).collect(),
            mtu: rng.pick(&[Mtu::M256, Mtu::M1024, Mtu::M4096]),
            contexts: None,
            ample: vec![],
            credits: vec![],
            links,
            conns: (0..conns).map(|_| any_conn(rng, hosts, ops, trouble)).collect(),
            datagrams: (0..datagrams).map(|_| rng.below(hosts as u64) as usize).collect(),
            datagram_ops: ops as u32,
            tags: vec![],
            room: rng.pick(&[16, 300, 1200, 1200, 5000, 5000]),
            srq_slots: rng.pick(&[1, 2, 8, 64]),
            poll: rng.pick(&[0.02, 0.3, 1.0]),
            feed: rng.pick(&[0.02, 0.3, 1.0]),
            act: rng.pick(&[0.05, 0.3, 1.0]),
            chaos: vec![],
            star: None,
        };
        for _ in 0..tags {
            let from = rng.below(hosts as u64) as usize;
            plan.tags.push(([from, (from + 1) % hosts], rng.within(1, ops.min(60)) as u32));
        }
        if rng.chance(0.5) {
            for _ in 0..if long { rng.within(1, 40) } else { rng.within(1, 5) } {
                let one = any_chaos(rng, &plan, if long { 100_000 } else { 600 });
                plan.chaos.push(one);
            }
        }
        /* drawn last, so that a seed's plan is otherwise what it was before there was this */
        plan.contexts = any_contexts(rng);
        plan.credits = (0..hosts).map(|_| rng.chance(0.4)).collect();
        plan.mix_star(rng);
        plan.abandon_some(rng);
        plan.mix_strom(rng);
        plan
    }

    /// One run in five has queue pairs whose peers are gone, and their neighbours on the same path do not
    /// wait for them.
    fn abandon_some(&mut self, rng: &mut Rng) {
        if !rng.chance(0.2) {
            return;
        }
        let hosts = self.conns[0].hosts;
        if hosts[0] != hosts[1] {
            self.conns.iter_mut().for_each(|conn| conn.hosts = hosts);
        }
        for _ in 0..rng.within(1, 3) {
            let (conn, end) = (rng.below(self.conns.len() as u64) as usize, rng.below(2) as usize);
            let time = rng.pick(&[10 * MS, 1_000 * MS, 40_000 * MS]);
            self.chaos.push((rng.below(200) as usize, Chaos::Abandon((conn, end), time)));
        }
    }
}
