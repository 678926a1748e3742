//! The StaR paper's call over many connections, with nothing left to chance: two cards in one thread, which
//! takes turns as client and server.
//!
//! A call is three SENDs of 32 B up and one down; connections take turns. Or it is one message of a stream
//! towards the server: a SEND, WRITE or READ of 64 B, signaled. Says what a call costs: CPU time (of the user
//! and of the kernel), and of each side system calls and packets. Under callgrind, what happens below
//! `measured` counts.
//!
//! usage: rpc rc|star[-send|-write|-read] CONNECTIONS UNDER_WAY CALLS [CONTEXTS]; with CONTEXTS, the server's
//! card has room for so many

#[path = "../tests/common/mod.rs"]
mod common;

use std::collections::VecDeque;
use std::sync::atomic::AtomicU8;

use common::*;
use starverbs_core::{Cqe, Mtu, QpType, SendFlags, SendOp, Sge, WcOpcode, WcStatus};
use starverbs_settings::{LinkMode, QpcSpec, Settings, StarPreference};
use starverbs_verbs::{Cq, Mr, Qp, QpInit, RecvWr, SendWr, Settled};

/// SENDs of a call towards the server.
const UP: usize = 3;
/// Bytes of each.
const BYTES: usize = 32;
/// Bytes of a stream's message.
const STREAM_BYTES: usize = 64;
/// Bytes that a connection's receives fill.
const SLOTS: usize = UP * BYTES;
/// Counters of the two cards, by call.
const NAMES: [&str; 12] = [
    "tx_packets",
    "rx_packets",
    "tx_syscalls",
    "rx_syscalls",
    "retransmitted",
    "timeouts",
    "star_retransmitted",
    "star_wqep",
    "star_wqep_again",
    "star_cqep",
    "star_stale",
    "handed_on",
];

/// One side.
struct Side {
    node: Node,
    cq: Cq,
    qps: Vec<Qp>,
    memory: &'static [AtomicU8],
    mr: Mr,
    /// SENDs that came of each connection's call
    came: Vec<usize>,
    /// WQEs of each queue
    depth: u32,
}

impl Side {
    fn new(settings: &Settings, connections: usize, depth: usize) -> Side {
        let node = Node::new(settings);
        let cqes = (connections * (2 * depth + 2) + 64) as u32;
        let cq = Cq::create(&node.ctx, cqes, None, 0).expect("a completion queue");
        let memory = memory(connections * SLOTS);
        let mr = reg(&node.pd, memory, all_access()).expect("a memory region");
        Side { node, cq, qps: Vec::new(), memory, mr, came: vec![0; connections], depth: depth as u32 }
    }

    fn make_qps(&mut self) {
        let plain = self.node.init(QpType::Rc, None);
        for cookie in 0..self.came.len() {
            let init = QpInit {
                send_cq: &self.cq,
                recv_cq: &self.cq,
                max_send_wr: self.depth,
                max_recv_wr: self.depth,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline: STREAM_BYTES as u32,
                cookie: cookie as u64,
                ..plain
            };
            self.qps.push(Qp::create(&self.node.pd, &init).expect("a queue pair"));
        }
    }

    fn addr(&self, at: usize) -> u64 {
        self.memory.as_ptr() as u64 + (at * SLOTS) as u64
    }

    fn receive(&self, at: usize, count: usize) {
        let mut poster = self.qps[at].post_recv();
        for slot in 0..count {
            /* long enough for a stream's */
            let (addr, len) = (self.addr(at) + (slot % 2 * BYTES) as u64, STREAM_BYTES as u32);
            let sges = [Sge { addr, len, lkey: self.mr.lkey() }];
            poster.push(&RecvWr { wr_id: at as u64, sges: &sges }).expect("room for a receive");
        }
        poster.ring();
    }

    fn send(&self, at: usize, count: usize) {
        let sges = [Sge { addr: self.memory.as_ptr() as u64, len: BYTES as u32, lkey: 0 }];
        let mut poster = self.qps[at].post_send();
        for n in 0..count {
            let flags = if n + 1 == count { SendFlags::SIGNALED } else { SendFlags::empty() };
            let wr = SendWr { flags: flags | SendFlags::INLINE, ..send(at as u64, &sges) };
            // SAFETY: the side's memory, which never ends.
            unsafe { poster.push_inline(&wr) }.expect("room for a send");
        }
        poster.ring();
    }

    /// Posts one message of a stream.
    fn post(&self, at: usize, op: SendOp, peer: &Side) {
        let sges = [Sge { addr: self.addr(at), len: STREAM_BYTES as u32, lkey: self.mr.lkey() }];
        let (remote_addr, rkey) = (peer.addr(at), peer.mr.rkey());
        let wr = SendWr { op, remote_addr, rkey, ..send(at as u64, &sges) };
        let mut poster = self.qps[at].post_send();
        if op == SendOp::Read {
            poster.push(&wr).expect("room for a READ");
        } else {
            // SAFETY: the side's memory, which never ends.
            unsafe { poster.push_inline(&SendWr { flags: wr.flags | SendFlags::INLINE, ..wr }) }
                .expect("room for a message");
        }
        poster.ring();
    }

    fn poll(&self, out: &mut [Cqe; 32]) -> usize {
        let got = self.cq.poll(out).expect("a poll");
        assert!(out[..got].iter().all(|cqe| cqe.status == WcStatus::Success), "{:?}", &out[..got]);
        got
    }
}

/// What is under way, and what is idle.
struct Calls {
    /// What a stream's messages are; `None`: calls
    op: Option<SendOp>,
    idle: VecDeque<usize>,
    begun: usize,
    done: usize,
    most: usize,
}

/// Begins what may be under way, polls once.
#[inline(never)]
fn client_turn(side: &mut Side, server: &Side, calls: &mut Calls, count: usize) {
    while calls.begun < count && calls.begun - calls.done < calls.most {
        if let Some(op) = calls.op {
            side.post(calls.begun % side.qps.len(), op, server);
            calls.begun += 1;
            continue;
        }
        let Some(at) = calls.idle.pop_front() else { break };
        side.send(at, UP);
        calls.begun += 1;
    }
    let mut out = [Cqe::default(); 32];
    let got = side.poll(&mut out);
    if calls.op.is_some() {
        calls.done += got;
        return;
    }
    for cqe in out[..got].iter().filter(|cqe| cqe.opcode == WcOpcode::Recv) {
        let at = cqe.wr_id as usize;
        side.receive(at, 1);
        calls.idle.push_back(at);
        calls.done += 1;
    }
}

/// Polls once; answers each third SEND of a call.
#[inline(never)]
fn server_turn(side: &mut Side, stream: bool) {
    let mut out = [Cqe::default(); 32];
    let got = side.poll(&mut out);
    for cqe in out[..got].iter().filter(|cqe| cqe.opcode == WcOpcode::Recv) {
        let at = cqe.wr_id as usize;
        if stream {
            side.receive(at, 1);
            continue;
        }
        side.came[at] += 1;
        if side.came[at] == UP {
            side.came[at] = 0;
            side.receive(at, UP);
            side.send(at, 1);
        }
    }
}

/// CPU time of this thread, of the user and of the kernel, seconds.
fn cpu() -> [f64; 2] {
    // SAFETY: all zeroes are a valid rusage: integers; the call fills it.
    let usage = unsafe {
        let mut usage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &mut usage);
        usage
    };
    [usage.ru_utime, usage.ru_stime].map(|time| time.tv_sec as f64 + time.tv_usec as f64 / 1e6)
}

/// Until so many calls are done.
fn go(client: &mut Side, server: &mut Side, calls: &mut Calls, count: usize) {
    while calls.done < count {
        client_turn(client, server, calls, count);
        server_turn(server, calls.op.is_some());
    }
}

#[inline(never)]
fn measured(client: &mut Side, server: &mut Side, calls: &mut Calls, count: usize) {
    go(client, server, calls, count);
}

/// Polls both until nothing has come for long.
fn settle(client: &mut Side, server: &mut Side, calls: &mut Calls) {
    for _ in 0..2000 {
        client_turn(client, server, calls, 0);
        server_turn(server, calls.op.is_some());
    }
}

/// What a stream's messages are; `None`: calls.
fn stream_of(name: &str) -> Option<SendOp> {
    match name {
        "send" => Some(SendOp::Send),
        "write" => Some(SendOp::Write),
        "read" => Some(SendOp::Read),
        _ => None,
    }
}

fn main() {
    let mut args = std::env::args().skip(1);
    let what = args.next().unwrap_or_default();
    let (who, op) = what.split_once('-').map_or((what.as_str(), None), |(who, op)| (who, stream_of(op)));
    let numbers: Vec<usize> = args.filter_map(|n| n.parse().ok()).collect();
    let (star, &[connections, most, count, ref room @ ..]) = (who == "star", &numbers[..]) else {
        eprintln!("usage: rpc rc|star[-send|-write|-read] CONNECTIONS UNDER_WAY CALLS [CONTEXTS]");
        std::process::exit(2);
    };
    /* twice as many receives as come at once: who posts them again may be late */
    let (depth, receives) = match op {
        Some(SendOp::Send) => (2 * (most / connections + 2), 2 * (most / connections + 2)),
        Some(_) => (2 * (most / connections + 2), 1),
        None => (2 * UP, UP),
    };
    let wire = Settings { link: LinkMode::Udp, progress_thread: false, ..settings() };
    let preference = |preference| if star { preference } else { StarPreference::Off };
    let cache =
        room.first().and_then(|room| QpcSpec::parse(&format!("{room},miss=1us,policy=fcfs")).ok().flatten());
    let theirs = Settings { star: preference(StarPreference::Stateless), qpc_cache: cache, ..wire.clone() };
    let ours = Settings { star: preference(StarPreference::Stateful), ..wire.clone() };
    let (mut server, mut client) =
        (Side::new(&theirs, connections, depth), Side::new(&ours, connections, depth));
    server.make_qps();
    client.make_qps();
    for at in 0..connections {
        connect_with(&server.node, &server.qps[at], &client.node, &client.qps[at], Mtu::M1024);
        server.receive(at, receives);
        client.receive(at, 1);
        /* ends that are not heard for long take each other for gone */
        if at % 16 == 0 {
            server.poll(&mut [Cqe::default(); 32]);
            client.poll(&mut [Cqe::default(); 32]);
        }
    }
    let mut calls = Calls { op, idle: (0..connections).collect(), begun: 0, done: 0, most };
    let is = |qp: &Qp, role| qp.star().expect("a queue pair").role == role;
    while star && server.qps.iter().any(|qp| is(qp, Settled::Waiting)) {
        settle(&mut client, &mut server, &mut calls);
    }
    let wanted = if star { Settled::Stateless } else { Settled::Plain };
    assert!(server.qps.iter().all(|qp| is(qp, wanted)), "the machine was too busy to settle all roles");
    go(&mut client, &mut server, &mut calls, 2 * connections.max(most));
    settle(&mut client, &mut server, &mut calls);
    calls = Calls { begun: 0, done: 0, ..calls };
    let counted = NAMES.map(|name| counters(wire.port, name));
    let before = cpu();
    measured(&mut client, &mut server, &mut calls, count);
    let after = cpu();
    let per = |n: f64| n / count as f64;
    println!(
        "user_us {:.3}\nkernel_us {:.3}",
        per(after[0] - before[0]) * 1e6,
        per(after[1] - before[1]) * 1e6
    );
    println!("# server client");
    for (name, before) in NAMES.iter().zip(counted) {
        let after = counters(wire.port, name);
        let [server, client] = [0, 1].map(|side| per((after[side] - before[side]) as f64));
        println!("{name} {server:.3} {client:.3}");
    }
}
