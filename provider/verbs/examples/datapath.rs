//! The data path, with nothing left to chance: two cards in one thread, which takes turns as requester
//! and responder.
//!
//! tools/scripts/instructions.sh runs it under callgrind and strace. What happens below `measured`, in
//! the turns of the two sides, is what counts; everything before warms up. Says what the counters of both
//! cards did meanwhile.
//!
//! usage: datapath pingpong|dialect|stream|spread|write|read|mapped|idle|crowd MESSAGES
//!     udp|local|board:SOCKET
//! The last says what carries them: packets, shared memory, or functions of a board, which counts for itself.
//! A dialect's are a ping-pong's, on queue pairs that may call kernels. Of idle and crowd the messages are
//! polls that find nothing, of a card with one peer or with a hundred.

#[path = "../tests/common/mod.rs"]
mod common;

use std::cell::Cell;
use std::sync::atomic::AtomicU8;
use std::time::Duration;

use common::*;
use starverbs_core::{Access, Mtu, QpType, SendFlags, SendOp, Sge, WcStatus};
use starverbs_settings::{DeviceChoice, LinkMode, Settings};
use starverbs_verbs::{Dm, Mr, Qp, QpInit, RecvWr, SendWr};

/// Bytes of a long message: 256 packets of 4 KiB.
const LONG: usize = 1 << 20;
/// Messages that a stream has under way.
const SHORT_DEPTH: usize = 32;
/// Queue pairs that take turns with one message each, and how many of these are under way.
const SPREAD: usize = 256;
const SPREAD_DEPTH: usize = 64;
const LONG_DEPTH: usize = 2;
/// Counters of the two cards.
const NAMES: [&str; 6] =
    ["tx_packets", "tx_syscalls", "rx_syscalls", "retransmitted", "timeouts", "handed_on"];
/// Messages before those that count.
const WARM: usize = 64;
/// Peers of a card in a crowd, and polls before those that count: until all know how to tell it of something.
const CROWD: usize = 100;
const POLLS: usize = 320_000;

/// One end of the connections.
struct Side {
    node: Node,
    qps: Vec<Qp>,
    /// Whose turn it is
    next: Cell<usize>,
    memory: &'static [AtomicU8],
    /// Of its memory, read once, as programs do
    lkey: u32,
    /// Where peers write, and the key to it
    target: u64,
    rkey: u32,
    _mr: Mr,
}

impl Side {
    fn new(settings: &Settings, qps: usize, rpc: bool) -> Side {
        let node = Node::new(settings);
        let init = QpInit { max_send_wr: 64, max_recv_wr: 64, rpc, ..node.init(QpType::Rc, None) };
        let qps = (0..qps).map(|_| Qp::create(&node.pd, &init).expect("a queue pair")).collect();
        let memory = memory(LONG);
        let mr = reg(&node.pd, memory, all_access()).expect("a memory region");
        let (lkey, rkey) = (mr.lkey(), mr.rkey());
        let target = memory.as_ptr() as u64;
        Side { node, qps, next: Cell::new(0), memory, lkey, target, rkey, _mr: mr }
    }

    fn addr(&self) -> u64 {
        self.memory.as_ptr() as u64
    }

    /// Peers write to device memory, which they map, from now on.
    fn use_device_memory(&mut self) -> (Mr, Dm) {
        let dm = Dm::alloc(&self.node.ctx, 4096, 12).expect("device memory");
        let access = all_access() | Access::ZERO_BASED;
        let mr = Mr::device(&self.node.pd, &dm, 0, 4096, access).expect("a memory region");
        (self.target, self.rkey) = (0, mr.rkey());
        (mr, dm)
    }

    fn post(&self, op: SendOp, len: usize, peer: &Side, signaled: bool) {
        let sges = [Sge { addr: self.addr(), len: len as u32, lkey: self.lkey }];
        let mut wr = SendWr { op, remote_addr: peer.target, rkey: peer.rkey, ..send(1, &sges) };
        if !signaled {
            wr.flags = SendFlags::empty();
        }
        let turn = self.next.get();
        self.next.set(if turn + 1 < self.qps.len() { turn + 1 } else { 0 });
        post(&self.qps[turn], &wr).expect("room in the send queue");
    }

    fn post_receives(&self, count: usize) {
        let sges = [Sge { addr: self.addr(), len: 64, lkey: self.lkey }];
        let mut poster = self.qps[0].post_recv();
        (0..count).for_each(|_| poster.push(&RecvWr { wr_id: 2, sges: &sges }).expect("room"));
        poster.ring();
    }

    /// One poll; gives how many completions it brought.
    fn poll(&self) -> usize {
        /* one by one, as the C interface takes them */
        self.node.cq.poll_with(16, |cqe| assert_eq!(cqe.status, WcStatus::Success)).expect("a poll")
    }
}

/// What is measured.
#[derive(Clone, Copy)]
struct Work {
    op: SendOp,
    len: usize,
    depth: usize,
}

/// The requester's turn: posts what may be under way, polls once. Gives how many are done now.
#[inline(never)]
fn requester_turn(a: &Side, b: &Side, work: Work, posted: &mut usize, done: usize, count: usize) -> usize {
    while *posted < count && *posted - done < work.depth {
        a.post(work.op, work.len, b, true);
        *posted += 1;
    }
    done + a.poll()
}

/// The responder's turn: polls once, and posts a receive for each that was used.
#[inline(never)]
fn responder_turn(b: &Side, receives: bool) {
    let got = b.poll();
    if receives {
        b.post_receives(got);
    }
}

/// A ping-pong's turn, alike on both sides: polls until the message is there, sends one back.
#[inline(never)]
fn pingpong_turn(me: &Side, peer: &Side, work: Work) {
    receive(me, peer);
    me.post(work.op, work.len, peer, false);
}

/// Polls until a message is there.
fn receive(me: &Side, peer: &Side) {
    let mut polls = 0;
    while me.poll() == 0 {
        polls += 1;
        /* the frame may have come to the other card, as long as the kernel does not know whose it is */
        if polls % 64 == 0 {
            peer.poll();
        }
    }
    me.post_receives(1);
}

/// `count` messages.
fn go(a: &Side, b: &Side, work: Work, count: usize) {
    let (mut posted, mut done) = (0, 0);
    while done < count {
        done = requester_turn(a, b, work, &mut posted, done, count);
        responder_turn(b, work.op.takes_recv());
    }
}

/// `count` messages there and back.
fn volley(a: &Side, b: &Side, work: Work, count: usize) {
    a.post(work.op, work.len, b, false);
    for _ in 0..count {
        pingpong_turn(b, a, work);
        pingpong_turn(a, b, work);
    }
    /* the last one is under way to b */
    receive(b, a);
}

/// `count` polls of one that has nothing to do.
fn idle(a: &Side, b: &Side, work: Work, count: usize) {
    (0..count).for_each(|_| assert_eq!(requester_turn(a, b, work, &mut 0, 0, 0), 0, "nothing is under way"));
}

/// Others that are connected with `a`, and have said something.
fn crowd(a: &Node, settings: &Settings) -> Vec<(Side, Qp)> {
    let join = |_| {
        let side = Side::new(settings, 1, false);
        let ours = Qp::create(&a.pd, &a.init(QpType::Rc, None)).expect("a queue pair");
        connect_with(a, &ours, &side.node, &side.qps[0], Mtu::M4096);
        (side, ours)
    };
    let peers = (1..CROWD).map(join).collect::<Vec<_>>();
    for polls in 0..POLLS {
        assert_eq!(a.cq.poll_with(16, |_| {}).expect("a poll"), 0, "nobody has sent");
        if polls % 1000 == 0 {
            peers.iter().for_each(|(side, _)| assert_eq!(side.poll(), 0, "nobody has sent"));
        }
    }
    peers
}

/// Until nothing is under way any more and all that is done now and then was done: the kernel knows by
/// then whose frames are whose, which takes some rounds of probes.
fn settle(a: &Side, b: &Side) {
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(20));
        for _ in 0..600 {
            assert_eq!(a.poll() + b.poll(), 0, "all was polled");
        }
    }
}

#[inline(never)]
fn measured(work: impl FnOnce()) {
    work();
}

fn connect(a: &Side, b: &Side) {
    for (qa, qb) in a.qps.iter().zip(&b.qps) {
        connect_with(&a.node, qa, &b.node, qb, Mtu::M4096);
    }
}

fn main() {
    let mut args = std::env::args().skip(1);
    let (what, count) = (args.next().unwrap_or_default(), args.next().and_then(|n| n.parse().ok()));
    let qps = if what == "spread" { SPREAD } else { 1 };
    let work = |op, len, depth| Work { op, len, depth };
    let (work, count) = match (what.as_str(), count) {
        ("pingpong" | "dialect", Some(count)) => (work(SendOp::Send, 8, 1), count),
        ("stream", Some(count)) => (work(SendOp::Send, 8, SHORT_DEPTH), count),
        ("spread", Some(count)) => (work(SendOp::Write, 8, SPREAD_DEPTH), count),
        ("mapped", Some(count)) => (work(SendOp::Write, 8, 1), count),
        ("write", Some(count)) => (work(SendOp::Write, LONG, LONG_DEPTH), count),
        ("read", Some(count)) => (work(SendOp::Read, LONG, LONG_DEPTH), count),
        ("idle" | "crowd", Some(count)) => (work(SendOp::Send, 8, 1), count),
        _ => {
            eprintln!(
                "usage: datapath pingpong|dialect|stream|spread|write|read|mapped|idle|crowd MESSAGES \
                 udp|local|board:SOCKET"
            );
            std::process::exit(2);
        }
    };
    let carrier = args.next().unwrap_or_default();
    let link = if carrier == "local" { LinkMode::Local } else { LinkMode::Udp };
    let settings = Settings { progress_thread: false, link, ..settings() };
    let board = carrier.strip_prefix("board:");
    let side = |socket: Option<String>| {
        let device = socket.map_or(DeviceChoice::Soft, |socket| DeviceChoice::Board(socket.into()));
        Side::new(&Settings { device, ..settings.clone() }, qps, what == "dialect")
    };
    let (a, mut b) = (side(board.map(str::to_owned)), side(board.map(|first| format!("{first}.1"))));
    let _device_memory = (what == "mapped").then(|| b.use_device_memory());
    connect(&a, &b);
    [&a, &b].iter().for_each(|side| side.post_receives(SHORT_DEPTH));
    let run = |count| match what.as_str() {
        "pingpong" | "dialect" => volley(&a, &b, work, count),
        "idle" | "crowd" => idle(&a, &b, work, count),
        _ => go(&a, &b, work, count),
    };
    if matches!(what.as_str(), "idle" | "crowd") {
        go(&a, &b, work, WARM);
    }
    run(WARM.max(qps));
    settle(&a, &b);
    let _peers = if what == "crowd" { crowd(&a.node, &settings) } else { Vec::new() };
    if board.is_some() {
        return measured(|| run(count));
    }
    let before = NAMES.map(|name| counters(settings.port, name));
    measured(|| run(count));
    for (name, before) in NAMES.iter().zip(before) {
        let after = counters(settings.port, name);
        println!("{name} {} {}", after[0] - before[0], after[1] - before[1]);
    }
}
