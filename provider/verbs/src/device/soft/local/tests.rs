//! How two ends come to agree, in every order: two cards of one process, which run only when a test says so.
//!
//! A schedule is a list of steps: the next thing that a program does with its queue pair, a card that takes
//! what has come to it, a proposal that has waited for too long. Whatever the order, both ends come to be
//! local or both on the wire, and what the programs send arrives.

use std::sync::Arc;
use std::time::{Duration, Instant};

use starverbs_core::mr::WindowType;
use starverbs_core::qp::QpAttrMask;
use starverbs_core::rng::SplitMix64;
use starverbs_core::types::QPN_BLOCK_SHIFT;
use starverbs_core::{Cqe, Mtu, QpType, SendFlags, WcOpcode, WcStatus};
use starverbs_free_port::free_port;
use starverbs_settings::LinkTrust;

use super::agreement::PATIENCE;
use super::record::{LocalRecord, control};
use super::*;
use crate::clock;
use crate::device::idle::Idle;
use crate::device::soft::Shard;
use crate::device::tests::send as plain_send;
use crate::device::{Device, Soft};
use crate::{AhAttr, Context, Cq, Mr, Mw, MwBind, Pd, Qp, QpAttr, QpInit, RecvWr};

/// Steps of the schedules that are all tried, and how many of the longer ones are.
const LENGTH: usize = 6;
const SEEDS: u64 = 1000;
/// Of a card's memory.
const BYTES: u64 = 64;
/// Messages that are sent at once.
const MESSAGES: usize = 2;
/// RC's retries take 0.54 s here; three are less than the silence that ends a connection.
const STALL: Nanos = 600_000_000;
/// What two ends may do.
const STEPS: [Step; 3] = [Step::Next, Step::Take, Step::Late];

/// A step is made by one of two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Its program goes on
    Next,
    /// Its card takes what has come
    Take,
    /// Its proposal has waited for too long
    Late,
    /// Another process says something to its queue pair in the other one's name
    Forged(u8),
}

/// What a program does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Connect,
    Send,
    /// Posts what its own card does alone: it binds a window
    Bind,
    Reset,
}

type Schedule = Vec<(usize, Step)>;

/// A card and what belongs to it.
pub(super) struct Card {
    pub(super) soft: Arc<Soft>,
    pub(super) ctx: Context,
    pub(super) pd: Pd,
    pub(super) cq: Cq,
    mr: Mr,
    memory: u64,
}

impl Card {
    pub(super) fn new(port: u16) -> Card {
        Card::of(port, LinkTrust::None)
    }

    pub(super) fn of(port: u16, link_trust: LinkTrust) -> Card {
        let addrs = Some(vec!["127.0.0.1".parse().unwrap()]);
        let settings = Settings {
            port,
            addrs,
            link_trust,
            progress_thread: false,
            link: LinkMode::Auto,
            ..Settings::default()
        };
        let ctx = Context::open_with(settings).unwrap();
        let (pd, cq) = (Pd::alloc(&ctx).unwrap(), Cq::create(&ctx, 64, None, 0).unwrap());
        let memory = Box::leak(Box::new([0_u64; BYTES as usize / 8])).as_ptr() as u64;
        // SAFETY: memory that never ends, which nobody looks at.
        let mr = unsafe { Mr::reg(&pd, memory, BYTES, memory, Access::LOCAL_WRITE | Access::MW_BIND) };
        let Device::Soft(soft) = ctx.device().unwrap().clone() else { panic!("the card in software") };
        Card { soft, ctx, pd, cq, mr: mr.unwrap(), memory }
    }

    pub(super) fn qp(&self) -> Qp {
        let init = QpInit {
            qp_type: QpType::Rc,
            send_cq: &self.cq,
            recv_cq: &self.cq,
            srq: None,
            max_send_wr: 8,
            max_recv_wr: 8,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
            sq_sig_all: true,
            block_own_multicast: false,
            star: None,
            rpc: false,
            cookie: 0,
        };
        Qp::create(&self.pd, &init).unwrap()
    }

    /// A window of its memory, bound by a queue pair.
    fn bind(&self, qp: &Qp) -> Mw {
        let mw = Mw::alloc(&self.pd, WindowType::Two).unwrap();
        let bind =
            MwBind { mr: self.mr.lkey(), addr: self.memory, length: BYTES, access: Access::REMOTE_WRITE };
        let mut poster = qp.post_send();
        poster.push(&mw.bind_wr(9, SendFlags::SIGNALED, mw.rkey() ^ 1, &bind)).unwrap();
        poster.ring();
        mw
    }

    /// Takes what has come: frames, news, records.
    pub(super) fn take(&self) {
        self.soft.with(|shard, now| {
            while shard.intake.rx.recv() > 0 && shard.take_frames(now, || false) {}
            shard.local.run((&mut shard.nic, &mut shard.env), now);
            shard.run_timers(now);
        });
    }

    fn late(&self) {
        for _ in 0..PATIENCE {
            self.soft.with(|shard, now| shard.local.end_waiting((&mut shard.nic, &mut shard.env), now));
        }
    }

    fn path(&self, qp: &Qp) -> Path {
        let path = |shard: &mut Shard| match shard.local.qps.get(&qp.number()).map(|entry| entry.path) {
            /* its peer's packets came: it is on the wire, and the next look at those that wait says so */
            Some(Path::Asking) if !shard.nic.is_held(qp.number()) => Path::Wire,
            path => path.unwrap_or(Path::Wire),
        };
        self.soft.with(|shard, _| path(shard))
    }
}

pub(super) fn connect(qp: &Qp, to: &Card, peer: &Qp) {
    let dgid = to.ctx.query_gid(1, 0).unwrap().gid;
    let attr = QpAttr {
        port_num: 1,
        av: AhAttr { dgid, is_global: true, port: 1, hop_limit: 64, ..AhAttr::default() },
        path_mtu: Mtu::M1024,
        dest_qpn: peer.number(),
        max_dest_rd_atomic: 4,
        min_rnr_timer: 1,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry: 7,
        max_rd_atomic: 4,
        ..QpAttr::default()
    };
    let modify = |state, mask| qp.modify(&QpAttr { state, ..attr }, QpAttrMask::STATE | mask).unwrap();
    modify(QpState::Init, QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::ACCESS_FLAGS);
    for wr_id in 0..8 {
        qp.post_recv().push(&RecvWr { wr_id, sges: &[] }).unwrap();
    }
    let rtr = QpAttrMask::AV | QpAttrMask::PATH_MTU | QpAttrMask::DEST_QPN | QpAttrMask::RQ_PSN;
    modify(QpState::Rtr, rtr | QpAttrMask::MAX_DEST_RD_ATOMIC | QpAttrMask::MIN_RNR_TIMER);
    let rts = QpAttrMask::SQ_PSN | QpAttrMask::TIMEOUT | QpAttrMask::RETRY_CNT | QpAttrMask::RNR_RETRY;
    modify(QpState::Rts, rts | QpAttrMask::MAX_QP_RD_ATOMIC);
}

pub(super) fn send(qp: &Qp) {
    let wr = plain_send(7);
    let mut poster = qp.post_send();
    for _ in 0..MESSAGES {
        poster.push(&wr).unwrap();
    }
    poster.ring();
}

/// Two cards that talk, and a third one that belongs to neither.
struct World {
    cards: [Card; 3],
}

/// A queue pair of each of two cards, and how far their programs are.
struct Run<'a> {
    world: &'a World,
    qps: [Qp; 2],
    programs: [Vec<Act>; 2],
    at: [usize; 2],
    /// Completions that are to come: of sends, of receives
    due: [[usize; 2]; 2],
    windows: Vec<Mw>,
}

impl World {
    /// Their processes have not met.
    fn unmet() -> World {
        let port = free_port();
        World { cards: [(); 3].map(|()| Card::new(port)) }
    }

    /// The first two have channels to each other.
    fn new() -> World {
        let world = World::unmet();
        let [a, b, _] = &world.cards;
        let mut run = world.run([vec![Act::Connect, Act::Send], vec![Act::Connect, Act::Send]]);
        run.end(&[]);
        assert_eq!([a.path(&run.qps[0]), b.path(&run.qps[1])], [Path::Local; 2]);
        drop(run);
        world
    }

    fn run(&self, programs: [Vec<Act>; 2]) -> Run<'_> {
        let qps = [self.cards[0].qp(), self.cards[1].qp()];
        Run { world: self, qps, programs, at: [0; 2], due: [[0; 2]; 2], windows: Vec::new() }
    }

    /// Says `op` to a queue pair of a card's, as if it were of `from`.
    fn forge(&self, op: u8, to: Qpn, from: Qpn, epoch: u16) {
        self.cards[2].soft.with(|shard, _| {
            let channels = &mut shard.env.channels;
            let channel = channels.channel_to(to >> QPN_BLOCK_SHIFT).expect("a channel");
            channels.send_control(channel, LocalRecord { op, epoch, to, from, ..LocalRecord::default() });
        });
    }
}

impl Run<'_> {
    /// Makes a step. False: there is nothing to do.
    fn step(&mut self, side: usize, step: Step) -> bool {
        let card = &self.world.cards[side];
        match step {
            Step::Next => {
                let Some(act) = self.programs[side].get(self.at[side]).copied() else { return false };
                if act == Act::Send && self.is_connecting_anew(1 - side) {
                    return false;
                }
                self.at[side] += 1;
                match act {
                    Act::Connect => {
                        connect(&self.qps[side], &self.world.cards[1 - side], &self.qps[1 - side])
                    }
                    Act::Send => self.send(side),
                    Act::Bind => {
                        self.windows.push(self.world.cards[side].bind(&self.qps[side]));
                        self.due[side][0] += 1;
                    }
                    Act::Reset => {
                        let reset = QpAttr { state: QpState::Reset, ..QpAttr::default() };
                        self.qps[side].modify(&reset, QpAttrMask::STATE).unwrap();
                    }
                }
            }
            Step::Take => card.take(),
            Step::Late if card.soft.with(|shard, _| shard.local.asking == 0) => return false,
            Step::Late => card.late(),
            Step::Forged(op) => self.forge(side, op),
        }
        true
    }

    /// Programs that connect once more send once both have.
    fn is_connecting_anew(&self, side: usize) -> bool {
        let program = &self.programs[side];
        program.contains(&Act::Reset) && program[self.at[side]..].contains(&Act::Connect)
    }

    fn send(&mut self, side: usize) {
        send(&self.qps[side]);
        self.due[side][0] += MESSAGES;
        self.due[1 - side][1] += MESSAGES;
    }

    /// With all numbers right, though nobody has told them.
    fn forge(&self, side: usize, op: u8) {
        let [own, other] = [side, 1 - side].map(|side| self.qps[side].number());
        let ours = |side: usize| {
            self.world.cards[side].soft.with(|shard, _| {
                let entry = shard.local.qps.get(&self.qps[side].number());
                entry.and_then(|entry| entry.ours).map_or(0, |ours| ours.epoch)
            })
        };
        match op {
            /* of a queue pair of its own */
            control::PROPOSE => {
                let from = self.world.cards[2].soft.with(|shard, _| shard.intake.rx.blocks().next());
                self.world.forge(op, own, from.unwrap_or_default() << QPN_BLOCK_SHIFT | 5, 1);
            }
            control::WITHDRAW => self.world.forge(op, own, other, ours(1 - side)),
            _ => self.world.forge(op, own, other, ours(side)),
        }
        self.world.cards[2].take();
    }

    /// Whatever is left to do is done, in some order; then each sends once more.
    fn end(&mut self, steps: &[(usize, Step)]) {
        while self.step(0, Step::Next) | self.step(1, Step::Next) {}
        self.await_all(steps);
        [0, 1].into_iter().for_each(|side| self.send(side));
        self.await_all(steps);
        let paths = [0, 1].map(|side| self.world.cards[side].path(&self.qps[side]));
        let ends = [[Path::Local; 2], [Path::Wire; 2]];
        assert!(ends.contains(&paths), "{paths:?} after {steps:?} of {:?}", self.programs);
    }

    fn await_all(&mut self, steps: &[(usize, Step)]) {
        let begin = Instant::now();
        let mut rounds = 0;
        loop {
            for side in [0, 1] {
                self.step(side, Step::Take);
                self.look(side, steps);
            }
            if self.due == [[0; 2]; 2] {
                return;
            }
            rounds += 1;
            if rounds % 4 == 0 {
                for side in [0, 1] {
                    self.step(side, Step::Late);
                }
            }
            let due = self.due;
            assert!(
                begin.elapsed() < Duration::from_secs(60),
                "{due:?} after {steps:?} of {:?}",
                self.programs
            );
        }
    }

    fn look(&mut self, side: usize, steps: &[(usize, Step)]) {
        let mut cqes = [Cqe::default(); 8];
        let count = self.world.cards[side].cq.poll(&mut cqes).unwrap();
        for cqe in &cqes[..count] {
            assert_eq!(cqe.status, WcStatus::Success, "side {side} after {steps:?} of {:?}", self.programs);
            let due = &mut self.due[side][usize::from(cqe.opcode == WcOpcode::Recv)];
            *due = due.checked_sub(1).expect("no completion twice");
        }
    }
}

/// Programs: both send; one sends; neither sends before all is settled.
fn programs() -> [[Vec<Act>; 2]; 3] {
    let (sends, is_quiet) = (vec![Act::Connect, Act::Send], vec![Act::Connect]);
    [[sends.clone(), sends.clone()], [sends, is_quiet.clone()], [is_quiet.clone(), is_quiet]]
}

/// All schedules of a length: each step that has something to do.
fn try_all(world: &World, programs: &[Vec<Act>; 2], length: usize) -> usize {
    let mut tried = 0;
    let mut choice = vec![0; length];
    loop {
        let mut run = world.run(programs.clone());
        let schedule: Schedule = choice.iter().map(|n| (n % 2, STEPS[n / 2])).collect();
        let stop = schedule.iter().position(|(side, step)| !run.step(*side, *step));
        if stop.is_none() {
            run.end(&schedule);
            tried += 1;
        }
        /* the next one: those that begin with a step that has nothing to do are passed over */
        let mut at = stop.unwrap_or(length - 1);
        loop {
            choice[at] += 1;
            choice[at + 1..].fill(0);
            if choice[at] < 2 * STEPS.len() {
                break;
            }
            if at == 0 {
                return tried;
            }
            at -= 1;
        }
    }
}

/// A stream of numbers that a seed gives.
fn draws(seed: u64) -> impl FnMut(usize) -> usize {
    let mut rng = SplitMix64::new(seed);
    move |below| rng.below(below as u64) as usize
}

/// Schedules at random, longer than all can be.
fn try_some(world: &World, programs: &[Vec<Act>; 2], steps: &[Step]) {
    (1..=SEEDS).for_each(|seed| try_one(world, programs, seed, steps));
}

fn try_one(world: &World, programs: &[Vec<Act>; 2], seed: u64, steps: &[Step]) {
    let mut draw = draws(seed);
    let length = 4 + draw(16);
    let schedule: Schedule = (0..length).map(|_| (draw(2), steps[draw(steps.len())])).collect();
    let mut run = world.run(programs.clone());
    for (side, step) in &schedule {
        run.step(*side, *step);
    }
    run.end(&schedule);
}

#[test]
fn two_ends_agree_in_every_order() {
    let world = World::new();
    let tried: Vec<usize> = programs().iter().map(|programs| try_all(&world, programs, LENGTH)).collect();
    println!("{tried:?} schedules");
    assert!(tried.iter().all(|tried| *tried > 1000), "{tried:?}");
}

#[test]
fn two_ends_agree_in_long_orders() {
    let world = World::new();
    programs().iter().for_each(|programs| try_some(&world, programs, &STEPS));
}

/// What a card does by itself is nothing that the peer has heard of.
#[test]
fn two_ends_agree_beside_what_they_do_alone() {
    let world = World::new();
    let binds = vec![Act::Connect, Act::Bind];
    let sends = vec![Act::Connect, Act::Send];
    for programs in [[binds.clone(), sends.clone()], [sends, binds.clone()], [binds.clone(), binds]] {
        try_some(&world, &programs, &STEPS);
    }
}

/// The first connection of two processes makes their session and their channels, too.
#[test]
fn two_ends_agree_where_their_processes_meet() {
    for seed in 1..=10 {
        for programs in programs() {
            try_one(&World::unmet(), &programs, seed, &STEPS);
        }
    }
}

/// Connections of the same two queue pairs, one after the other.
#[test]
fn two_ends_agree_once_more_after_a_reset() {
    let world = World::new();
    let again = vec![Act::Connect, Act::Reset, Act::Connect, Act::Send];
    let is_quiet = vec![Act::Connect, Act::Reset, Act::Connect];
    for programs in [[again.clone(), again.clone()], [again, is_quiet.clone()], [is_quiet.clone(), is_quiet]]
    {
        try_some(&world, &programs, &STEPS);
    }
}

/// A process that did not run for long has not asked, and was told nothing.
#[test]
fn two_ends_agree_though_their_processes_stand_still() {
    let world = World::new();
    let again = vec![Act::Connect, Act::Reset, Act::Connect, Act::Send];
    let mut all = vec![[again.clone(), again]];
    all.extend(programs());
    for programs in all {
        for seed in 1..=SEEDS {
            clock::stalls::begin(seed, 3, STALL);
            try_one(&world, &programs, seed, &STEPS);
        }
    }
}

/// The other end has no local connections.
#[test]
fn both_ends_come_to_the_wire_where_one_refuses() {
    let world = World::new();
    world.cards[1].soft.with(|shard, _| shard.local.enabled = false);
    for programs in programs() {
        try_all(&world, &programs, LENGTH - 1);
        try_some(&world, &programs, &STEPS);
    }
}

/// Nothing that a third process says has one end local and the other on the wire.
#[test]
fn nobody_else_has_a_say() {
    let world = World::new();
    let mut steps = STEPS.to_vec();
    for op in [control::PROPOSE, control::WITHDRAW, control::REFUSE] {
        steps.push(Step::Forged(op));
        for programs in programs() {
            try_some(&world, &programs, &steps);
        }
        steps.pop();
    }
}

/// A card that the scheduler leaves out for long finds its peer's proposal there, if it looks once more.
#[test]
fn who_looks_late_has_not_waited() {
    let world = World::new();
    let mut run = world.run([vec![Act::Connect, Act::Send], vec![Act::Connect, Act::Send]]);
    let [card, _, _] = &world.cards;
    let begun = clock::now();
    assert!(run.step(0, Step::Next) && run.step(0, Step::Next));
    let path_at = |later: Nanos| {
        card.soft.with(|shard, _| {
            shard.local.check((&mut shard.nic, &mut shard.env), begun + later * 1_000_000_000);
        });
        card.path(&run.qps[0])
    };
    assert_eq!([9, 18, 27].map(path_at), [Path::Asking; 3]);
    assert_eq!(path_at(36), Path::Wire);
}

/// RC's retries would be over after 0.6 s; a process that the scheduler leaves out for so long is not gone.
#[test]
fn a_peer_is_not_silent_before_two_seconds() {
    let world = World::new();
    let mut run = world.run([vec![Act::Connect, Act::Send], vec![Act::Connect, Act::Send]]);
    run.end(&[]);
    let [card, _, _] = &world.cards;
    send(&run.qps[0]);
    let status_at = |later: Nanos| {
        card.soft.with(|shard, now| shard.local.check((&mut shard.nic, &mut shard.env), now + later));
        let mut cqes = [Cqe::default(); 8];
        (card.cq.poll(&mut cqes).unwrap() > 0).then_some(cqes[0].status)
    };
    let second = 1_000_000_000;
    assert_eq!([second, 2 * second, 29 * second / 10].map(status_at), [None; 3]);
    assert_eq!(status_at(3 * second + second / 10), Some(WcStatus::RetryExcErr));
}

/// Most of what comes through memory is taken by polls that look at no clock: one that does is not idle
/// behind them, nor where it has taken something itself.
#[test]
fn polls_amid_messages_are_not_idle() {
    let world = World::new();
    let mut run = world.run([vec![Act::Connect, Act::Send], vec![Act::Connect, Act::Send]]);
    run.end(&[]);
    let [from, to, _] = &world.cards;
    to.soft.with(|shard, _| shard.idle = Idle::default());
    let mut cqes = [Cqe::default(); 8];
    for wr_id in 0..256 {
        run.qps[1].post_recv().push(&RecvWr { wr_id, sges: &[] }).unwrap();
        let mut poster = run.qps[0].post_send();
        poster.push(&plain_send(wr_id)).unwrap();
        poster.ring();
        for card in [to, from] {
            while card.cq.poll(&mut cqes).unwrap() == 0 {}
        }
    }
    assert_ne!(to.soft.with(|shard, _| shard.idle.since()), 0);
}
