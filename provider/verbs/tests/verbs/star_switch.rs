//! Connections that leave plain RoCEv2 while their programs post and poll, as their card has come to have too
//! many, and come back when it has room, or when a program says so.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::wire as settings;
use crate::common::*;
use starverbs_core::mr::WindowType;
use starverbs_core::qp::QpAttrMask;
use starverbs_core::{Access, Cqe, QpState, QpType, SendFlags, SendOp, WcOpcode, WcStatus};
use starverbs_settings::{FaultSpec, QpcSpec, Settings, StarKey, StarPreference};
use starverbs_verbs::{Mr, Mw, MwBind, Preference, Qp, QpAttr, QpInit, SendWr, Settled, Srq};

/// Beyond so many connections a card has too many.
const THRESHOLD: u32 = 6;
/// Messages under way each way.
const DEPTH: u64 = 8;
/// Bytes of a message.
const SIZE: usize = 1500;

fn role(qp: &Qp) -> Settled {
    qp.star().unwrap().role
}

fn auto(wire: &Settings) -> [Node; 2] {
    each_auto([wire, wire])
}

fn each_auto(wires: [&Settings; 2]) -> [Node; 2] {
    wires.map(|wire| {
        Node::new(&Settings { star: StarPreference::Auto, star_threshold: THRESHOLD, ..wire.clone() })
    })
}

/// `n` pairs of connections, all of this node, that stay plain.
fn crowd(node: &Node, n: usize) -> Vec<[Qp; 2]> {
    let init = QpInit { star: Some(Preference::Off), ..node.init(QpType::Rc, None) };
    let plain = || Qp::create(&node.pd, &init).unwrap();
    let pairs: Vec<_> = (0..n).map(|_| [plain(), plain()]).collect();
    pairs.iter().for_each(|[a, b]| connect(node, a, node, b));
    pairs
}

/// A program at one end that sends and receives numbered messages, reads and writes, each in its place.
struct Program<'a> {
    node: &'a Node,
    qp: &'a Qp,
    peer: &'a Node,
    srq: Option<&'a Srq>,
    sent: u64,
    done: u64,
    received: u64,
}

/// Where message `n` lies at its sender, and at its receiver.
fn place(n: u64, receives: bool) -> usize {
    (n % DEPTH) as usize * 2048 + if receives { 0x8000 } else { 0 }
}

impl Program<'_> {
    fn receive(&self, n: u64) {
        match self.srq {
            Some(srq) => {
                let sges = [self.node.sge(place(n, true), SIZE)];
                srq.post(&starverbs_verbs::RecvWr { wr_id: n, sges: &sges }).unwrap();
            }
            None => self.node.post_recv(self.qp, n, place(n, true), SIZE).unwrap(),
        }
    }

    fn send(&mut self) {
        let n = self.sent;
        /* SAFETY of the test's own: nobody else writes there until this message is done */
        let word = self.node.addr(place(n, false)) as *mut u64;
        // SAFETY: inside the buffer, aligned, and the send that used it before is done.
        unsafe { word.write_volatile(n) };
        let sges = [self.node.sge(place(n, false), SIZE)];
        let wr = match n % 4 {
            3 => SendWr {
                op: SendOp::Read,
                remote_addr: self.peer.addr(0x7000),
                rkey: self.peer.mr.rkey(),
                ..send(n, &sges)
            },
            _ => send(n, &sges),
        };
        post(self.qp, &wr).unwrap();
        self.sent += 1;
    }

    fn took(&mut self, cqe: &Cqe) {
        assert_eq!((cqe.status, cqe.qpn), (WcStatus::Success, self.qp.number()));
        if cqe.opcode != WcOpcode::Recv {
            assert_eq!(cqe.wr_id, self.done, "completions come in order, each once");
            self.done += 1;
            return;
        }
        let n = self.received;
        assert_eq!((cqe.wr_id, cqe.byte_len as usize), (n, SIZE));
        /* every fourth request is a READ */
        assert_eq!(self.node.word(place(n, true)), n / 3 * 4 + n % 3);
        self.received += 1;
        self.receive(n + DEPTH);
    }

    /// Sends until it is told to stop, or something is wrong; gives how many.
    fn run(mut self, stop: &AtomicBool, sent: &[AtomicU64; 2], me: usize) {
        let mut out = [Cqe::default(); 16];
        let start = Instant::now();
        loop {
            let stops = stop.load(Ordering::Acquire);
            while !stops && self.sent - self.done < DEPTH {
                self.send();
                sent[me].store(self.sent, Ordering::Release);
            }
            let got = self.node.cq.poll(&mut out).unwrap();
            out[..got].iter().for_each(|cqe| self.took(cqe));
            let theirs = sent[1 - me].load(Ordering::Acquire);
            if stops && self.done == self.sent && self.received == theirs - theirs / 4 {
                return;
            }
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "{} {} {}",
                self.sent,
                self.done,
                self.received
            );
        }
    }
}

/// Both ends' programs run while `call` does; then they stop, and all that was sent has come. What `call`
/// gets waits until both have sent some more.
fn talking(nodes: &[Node; 2], qps: &[Qp; 2], srqs: [Option<&Srq>; 2], call: impl FnOnce(&dyn Fn())) {
    let (stop, sent) = (AtomicBool::new(false), <[AtomicU64; 2]>::default());
    std::thread::scope(|scope| {
        for me in 0..2 {
            let (node, peer) = (&nodes[me], &nodes[1 - me]);
            let program = Program { node, qp: &qps[me], peer, srq: srqs[me], sent: 0, done: 0, received: 0 };
            (0..DEPTH).for_each(|n| program.receive(n));
            let (stop, sent) = (&stop, &sent);
            scope.spawn(move || program.run(stop, sent, me));
        }
        call(&|| {
            let aims = sent.each_ref().map(|sent| sent.load(Ordering::Acquire) + 4 * DEPTH);
            wait_for("messages", || {
                sent.iter().zip(aims).all(|(sent, aim)| sent.load(Ordering::Acquire) >= aim)
            });
        });
        stop.store(true, Ordering::Release);
    });
}

fn switches(nodes: &[Node; 2]) -> [u64; 2] {
    nodes.each_ref().map(|node| node.ctx.counters().unwrap().star_switches.get())
}

fn returns(nodes: &[Node; 2]) -> [u64; 2] {
    nodes.each_ref().map(|node| node.ctx.counters().unwrap().star_returns.get())
}

fn are(qps: &[Qp; 2], roles: [Settled; 2]) -> bool {
    [role(&qps[0]), role(&qps[1])] == roles
}

const PLAIN: [Settled; 2] = [Settled::Plain; 2];
const STAR: [Settled; 2] = [Settled::Stateless, Settled::Stateful];
const EXCHANGED: [Settled; 2] = [Settled::Stateful, Settled::Stateless];

fn is_star(qps: &[Qp; 2]) -> bool {
    are(qps, STAR)
}

fn connected(nodes: &[Node; 2], srqs: [Option<&Srq>; 2]) -> [Qp; 2] {
    let [a, b] = [0, 1].map(|at| match srqs[at] {
        Some(srq) => nodes[at].qp_with_srq(srq),
        None => nodes[at].qp(QpType::Rc),
    });
    connect(&nodes[0], &a, &nodes[1], &b);
    let qps = [a, b];
    wait_for("an agreement", || qps.iter().all(|qp| role(qp) != Settled::Waiting));
    assert_eq!([role(&qps[0]), role(&qps[1])], [Settled::Plain; 2]);
    qps
}

/// A connection with an end that takes from a shared receive queue stays what it is, whatever its cards and
/// that end's program want.
#[test]
fn a_connection_with_shared_receives_stays_plain() {
    for at in 0..2 {
        let nodes = auto(&settings());
        let srq = Srq::create(&nodes[at].pd, 64, 1, 0, 99).unwrap();
        let srqs = std::array::from_fn(|end| (end == at).then_some(&srq));
        let qps = connected(&nodes, srqs);
        let other = connected(&nodes, [None; 2]);
        let mut others = Vec::new();
        talking(&nodes, &qps, srqs, |talk| {
            talk();
            others = crowd(&nodes[0], 3);
            wait_for("a switch of another", || is_star(&other));
            talk();
        });
        assert!(are(&qps, PLAIN) && others.len() == 3);
        let refused = qps[at].change_preference(Some(Preference::Stateless)).map_err(|error| error.errno());
        assert_eq!(refused, Err(libc::EOPNOTSUPP));
    }
}

/// Messages for the receives 0 to 15 of either end, each in its place.
fn sixteen_each_way(nodes: &[Node; 2], qps: &[Qp; 2]) {
    for (from, to) in [(0, 1), (1, 0)] {
        for id in 0..16 {
            post(&qps[from], &send(100 + id, &[nodes[from].sge(place(id, false), SIZE)])).unwrap();
        }
        let got: Vec<_> = nodes[to].completions(16).iter().map(|cqe| (cqe.wr_id, cqe.status)).collect();
        assert_eq!(got, (0..16).map(|id| (id, WcStatus::Success)).collect::<Vec<_>>());
        assert!(nodes[from].completions(16).iter().all(|cqe| cqe.status == WcStatus::Success));
    }
}

/// Nobody's programs talk: it becomes StaR all the same, and what is posted before is found.
#[test]
fn an_idle_connection_leaves_too() {
    let nodes = auto(&settings());
    let qps = connected(&nodes, [None; 2]);
    for node in 0..2 {
        (0..16).for_each(|id| nodes[node].post_recv(&qps[node], id, place(id, true), SIZE).unwrap());
    }
    let _others = crowd(&nodes[0], 3);
    wait_for("a switch", || is_star(&qps));
    sixteen_each_way(&nodes, &qps);
}

/// A request for which the peer's program has no receive keeps nobody from going on.
#[test]
fn a_request_that_waits_for_a_receive_does_not_keep_others_waiting() {
    let nodes = auto(&settings());
    let [a, b] = &nodes;
    let qps = connected(&nodes, [None; 2]);
    let other = connected(&nodes, [None; 2]);
    post(&qps[0], &send(1, &[a.sge(0, 64)])).unwrap();
    let _others = crowd(a, 3);
    wait_for("a switch of another", || is_star(&other));
    /* b's program posts a receive once it has been heard */
    a.post_recv(&qps[0], 2, 0, 64).unwrap();
    post(&qps[1], &send(3, &[b.sge(0, 64)])).unwrap();
    let ends: Vec<_> = [a, b].iter().map(|node| node.completions(1)[0].wr_id).collect();
    assert_eq!(ends, [2, 3]);
    b.post_recv(&qps[1], 4, 0, 64).unwrap();
    assert_eq!([a.completions(1)[0].wr_id, b.completions(1)[0].wr_id], [1, 4]);
    wait_for("a switch, now", || is_star(&qps));
}

/// What StaR does not carry keeps a connection plain.
#[test]
fn a_connection_that_flushes_stays_plain() {
    let nodes = auto(&settings());
    let [a, b] = &nodes;
    let qps = connected(&nodes, [None; 2]);
    let flush =
        |id| SendWr { op: SendOp::AtomicWrite, remote_addr: b.addr(0), rkey: b.mr.rkey(), ..send(id, &[]) };
    let word = [a.sge(0, 8)];
    post(&qps[0], &SendWr { sges: &word, ..flush(1) }).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    let other = connected(&nodes, [None; 2]);
    let _others = crowd(a, 3);
    wait_for("a switch of another", || is_star(&other));
    assert_eq!([role(&qps[0]), role(&qps[1])], [Settled::Plain; 2]);
    post(&qps[0], &SendWr { sges: &word, ..flush(2) }).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
}

/// There, and back when the card has room again, and there again: the programs talk all the time.
fn comes_back(wires: [&Settings; 2]) {
    let nodes = each_auto(wires);
    let qps = connected(&nodes, [None; 2]);
    let go = |away: &str| {
        let others = crowd(&nodes[0], 3);
        wait_for(away, || is_star(&qps));
        others
    };
    let mut kept = Vec::new();
    talking(&nodes, &qps, [None; 2], |talk| {
        let others = go("a switch");
        talk();
        others.iter().flatten().for_each(|qp| qp.destroy().unwrap());
        wait_for("the way back", || are(&qps, PLAIN));
        talk();
        kept = go("a second switch");
        talk();
    });
    assert_eq!(kept.len(), 3);
    if !board::are_in_place() {
        assert_eq!((switches(&nodes), returns(&nodes)), ([2, 2], [1, 1]));
        let counters = nodes[0].ctx.counters().unwrap();
        assert_eq!((counters.star_stateless_qps.get(), counters.star_plain_qps.get()), (1, 0));
        assert_eq!(counters.star_stateless_connection_bytes.get(), 0);
    }
}

#[test]
fn a_connection_comes_back_when_its_card_has_room() {
    comes_back([&settings(); 2]);
}

#[test]
fn a_connection_comes_back_under_a_key() {
    comes_back([&Settings { star_key: Some(StarKey::Given([7; 32].into())), ..settings() }; 2]);
}

#[test]
fn a_connection_comes_back_on_a_bad_wire() {
    let fault = FaultSpec { loss: 0.03, duplicate: 0.05, reorder: 0.05, ..FaultSpec::default() };
    comes_back([&Settings { fault, ..settings() }; 2]);
}

/// The card of either end is QPC-limited.
#[test]
fn a_connection_of_a_qpc_limited_card_comes_back() {
    for cache in ["2,miss=20us", "1,miss=1us,policy=fcfs"] {
        let all = settings();
        let limited = Settings { qpc_cache: QpcSpec::parse(cache).unwrap(), ..all.clone() };
        comes_back([&limited, &all]);
        comes_back([&all, &limited]);
    }
}

#[test]
fn roles_change_places_when_the_other_card_is_crowded() {
    let nodes = auto(&settings());
    let qps = connected(&nodes, [None; 2]);
    let mut theirs = Vec::new();
    talking(&nodes, &qps, [None; 2], |talk| {
        let others = crowd(&nodes[0], 3);
        wait_for("a switch", || is_star(&qps));
        theirs = crowd(&nodes[1], 3);
        others.iter().flatten().for_each(|qp| qp.destroy().unwrap());
        wait_for("an exchange", || are(&qps, EXCHANGED));
        talk();
    });
    assert_eq!(theirs.len(), 3);
    if !board::are_in_place() {
        assert_eq!(returns(&nodes), [1, 1]);
    }
}

/// A program says again and again what its end is to be; so does its peer's, of which nothing is known here.
#[test]
fn programs_may_say_what_their_ends_are_to_be() {
    let nodes = auto(&settings());
    let qps = connected(&nodes, [None; 2]);
    talking(&nodes, &qps, [None; 2], |talk| {
        for (at, preference, roles) in [
            (0, Preference::Stateless, STAR),
            (0, Preference::Stateful, EXCHANGED),
            (0, Preference::Off, PLAIN),
            (0, Preference::Auto, PLAIN),
            (1, Preference::Stateless, EXCHANGED),
            (1, Preference::Stateful, STAR),
            (1, Preference::Off, PLAIN),
        ] {
            qps[at].change_preference(Some(preference)).unwrap();
            assert_eq!(qps[at].preference(), preference);
            wait_for("what a program wants", || are(&qps, roles));
            talk();
        }
    });
    let off = crowd(&nodes[0], 1);
    let refused = off[0][0].change_preference(Some(Preference::Stateless)).map_err(|error| error.errno());
    assert_eq!(refused, Err(libc::EOPNOTSUPP), "it was made without");
    qps[0].modify(&QpAttr { state: QpState::Err, ..QpAttr::default() }, QpAttrMask::STATE).unwrap();
    assert_eq!(qps[0].change_preference(None).map_err(|error| error.errno()), Err(libc::EINVAL));
}

/// Nobody talks: receives that were posted before, and at the other end meanwhile, are taken in their order.
#[test]
fn an_idle_connection_comes_back_too() {
    let nodes = auto(&settings());
    let qps = connected(&nodes, [None; 2]);
    let receive = |ids: std::ops::Range<u64>| {
        for node in 0..2 {
            ids.clone().for_each(|id| nodes[node].post_recv(&qps[node], id, place(id, true), SIZE).unwrap());
        }
    };
    receive(0..8);
    qps[0].change_preference(Some(Preference::Stateless)).unwrap();
    wait_for("a switch", || is_star(&qps));
    receive(8..12);
    qps[0].change_preference(Some(Preference::Off)).unwrap();
    wait_for("the way back", || are(&qps, PLAIN));
    receive(12..16);
    sixteen_each_way(&nodes, &qps);
    /* in ERR what came back is flushed before what was posted since, in RESET it is forgotten */
    receive(16..20);
    qps[0].change_preference(Some(Preference::Stateless)).unwrap();
    wait_for("a switch", || is_star(&qps));
    qps[0].change_preference(Some(Preference::Off)).unwrap();
    wait_for("the way back", || are(&qps, PLAIN));
    receive(20..22);
    let to = |qp: &Qp, state| qp.modify(&QpAttr { state, ..QpAttr::default() }, QpAttrMask::STATE).unwrap();
    to(&qps[0], QpState::Err);
    let flushed: Vec<_> = nodes[0].completions(6).iter().map(|cqe| (cqe.wr_id, cqe.status)).collect();
    assert_eq!(flushed, (16..22).map(|id| (id, WcStatus::WrFlushErr)).collect::<Vec<_>>());
    to(&qps[0], QpState::Reset);
    assert_eq!(qps[0].query().unwrap().state, QpState::Reset);
}

/// Windows that either end has bound stay bound on the way, and are taken away as ever.
#[test]
fn windows_come_along() {
    let nodes = auto(&settings());
    let qps = connected(&nodes, [None; 2]);
    qps[0].change_preference(Some(Preference::Stateless)).unwrap();
    wait_for("a switch", || is_star(&qps));
    let bound: [(Mr, Mw, u32); 2] = std::array::from_fn(|at| {
        let node = &nodes[at];
        let rights = Access::LOCAL_WRITE | Access::MW_BIND;
        let mr = node.reg(0, 4096, rights);
        let mw = Mw::alloc(&node.pd, WindowType::Two).unwrap();
        let bind = MwBind { mr: mr.lkey(), addr: node.addr(64), length: 64, access: Access::REMOTE_WRITE };
        let rkey = mw.rkey() ^ 1;
        post(&qps[at], &mw.bind_wr(1, SendFlags::SIGNALED, rkey, &bind)).unwrap();
        assert_eq!(node.completions(1)[0].status, WcStatus::Success);
        (mr, mw, rkey)
    });
    let write = |from: usize, id| {
        let (to, sges) = (1 - from, [nodes[from].sge(1024, 64)]);
        let op = SendOp::Write;
        let wr = SendWr { op, remote_addr: nodes[to].addr(64), rkey: bound[to].2, ..send(id, &sges) };
        post(&qps[from], &wr).unwrap();
        nodes[from].completions(1)[0].status
    };
    assert_eq!([write(0, 2), write(1, 2)], [WcStatus::Success; 2]);
    qps[0].change_preference(Some(Preference::Off)).unwrap();
    wait_for("the way back", || are(&qps, PLAIN));
    assert_eq!([write(0, 3), write(1, 3)], [WcStatus::Success; 2]);
    for at in 0..2 {
        let inv = SendWr { op: SendOp::LocalInv, rkey: bound[at].2, sges: &[], ..send(4, &[]) };
        post(&qps[at], &inv).unwrap();
        assert_eq!(nodes[at].completions(1)[0].status, WcStatus::Success);
    }
    assert_eq!(write(0, 5), WcStatus::RemAccessErr);
    for (mr, mw, _) in &bound {
        mr.dereg().unwrap();
        mw.dealloc().unwrap();
    }
}
