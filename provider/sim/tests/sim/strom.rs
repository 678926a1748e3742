//! StRoM: kernels run once each, in order, whatever the wire does; and nobody else notices.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::common::rpc::{Echo, Endless, Journal, PAGE, RpcPair, SLOTS, Seen, speak};
use crate::common::{all_rights, any_bytes, any_faults, for_seeds};
use starverbs_core::qp::RecvSource;
use starverbs_core::strom::{
    ANY_OP, Code, Input, Kernel, KernelId, KernelRun, MAX_RUNNING, Poll, RegionRange, ReplyHead, ReplyTarget,
    RpcHandler, TARGET_LEN,
};
use starverbs_core::wire::headers::Feth;
use starverbs_core::{
    Access, AsyncEvent, FlushLevel, Mtu, NicConfig, NicError, Placement, QpState, QpType, Qpn, SendFlags,
    SendOp, SendWqe, Sge, WcFlags, WcOpcode, WcStatus,
};
use starverbs_kernels::Get;
use starverbs_kernels::get::{Bucket, HashEntry, Params};
use starverbs_sim::{Faults, Net, QpAt, Recv, Rng, Send, Setup, SimCq, SimRq, SimSq};
use zerocopy::IntoBytes;

const OP: u64 = 0x5354_0001;

fn journal(pair: &mut RpcPair) -> Arc<Mutex<Vec<Seen>>> {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let word = RegionRange { key: pair.page[1].1, va: pair.page[1].0, len: 8 };
    pair.load(OP, Journal { seen: seen.clone(), word, stream: vec![], calls: 0 });
    seen
}

/// WRITEs of a word, RPCs that read it, streams: each happens once, in the order in which it was posted,
/// and each answer comes once.
fn once_and_in_order(seed: u64) {
    let mut rng = Rng::new(seed);
    let faults = any_faults(&mut rng);
    let mtu = rng.pick(&[Mtu::M256, Mtu::M1024, Mtu::M4096]);
    let setup =
        Setup { mtu, timeout: rng.pick(&[0, 18]), psn: rng.pick(&[0, 0xff_fff0]), ..Setup::default() };
    let cfgs = [(); 2].map(|()| NicConfig { repeat: rng.chance(0.7), ..NicConfig::default() });
    let mut pair = RpcPair::new(faults, cfgs, &setup, seed);
    let seen = journal(&mut pair);
    let (mut expected, mut answers) = (Vec::new(), Vec::new());
    let (mut word, mut posted) = (0u64, Vec::new());
    for wr_id in 0..rng.within(1, 40) {
        match rng.below(3) {
            0 => {
                word = rng.bits();
                let sge = pair.bytes(&word.to_le_bytes());
                let (remote_addr, rkey) = pair.page[1];
                let wqe = SendWqe { wr_id, op: SendOp::Write, remote_addr, rkey, ..SendWqe::default() };
                pair.try_post(wqe, vec![sge]);
            }
            1 => {
                let steps: u32 = rng.pick(&[0, 0, 1, 600, 3000]);
                let imm = rng.chance(0.3);
                if imm {
                    pair.post_recv(0, wr_id);
                }
                let more = rng.below(64) as u32;
                let params = [&steps.to_le_bytes()[..], &any_bytes(&mut rng, more)].concat();
                answers.push(pair.call(wr_id, OP, &params, 64, imm));
                expected.push(Seen::Call(params, word));
            }
            _ => {
                let len = rng.pick(&[0, 1, 3, 4, 5, 8, 255, 256, 257, 5000]);
                let data = any_bytes(&mut rng, len);
                let sge = pair.bytes(&data);
                let wqe = SendWqe { wr_id, op: SendOp::RpcWrite, remote_addr: OP, ..SendWqe::default() };
                pair.try_post(wqe, vec![sge]);
                expected.push(Seen::Stream(data));
            }
        }
        posted.push(wr_id);
        for _ in 0..rng.below(30) {
            pair.net.step();
        }
    }
    assert!(pair.net.run_until_idle(2_000_000), "it ends");
    let sent = pair.polled(0);
    let own: Vec<u64> = sent.iter().filter(|(_, s)| *s == WcStatus::Success).map(|(id, _)| *id).collect();
    let immediates = own.len() - posted.len();
    assert_eq!(sent.len(), own.len(), "all succeeded");
    assert!(immediates <= answers.len() && posted.iter().all(|id| own.contains(id)));
    assert!(*seen.lock().unwrap() == expected, "each once, and in order");
    for (n, answer) in answers.iter().enumerate() {
        let wanted = (OP as u32, 0, 8, (n as u64 + 1).to_le_bytes().to_vec());
        assert_eq!(pair.answer(*answer), Some(wanted), "answer {n}");
    }
    assert!(pair.polled(1).is_empty(), "the card's own requests complete to nobody");
    assert_eq!(pair.sq[1].outstanding(), 0);
    let stats = pair.net.hosts[1].nic.counters();
    assert_eq!((stats.tx_rpc_replies.get(), stats.rpc_failed.get()), (answers.len() as u64, 0));
    assert!(pair.net.hosts.iter().all(|host| host.env.memory.gaps_intact()));
}

#[test]
fn kernels_run_once_and_in_order() {
    for_seeds("once_and_in_order", 300, once_and_in_order);
}

/// A table with a chain: key n has n bytes n.
fn table(pair: &mut RpcPair) -> Params {
    let (table, key) = pair.page[1];
    let bucket =
        |key: u64, value: u64, len: u32| Bucket { key: key.into(), value: value.into(), len: len.into() };
    let values = table + 4096;
    let mut first = HashEntry { next: 5.into(), ..HashEntry::default() };
    first.buckets[0] = bucket(7, values, 7);
    first.buckets[2] = bucket(9, values + 16, 9);
    let mut second = HashEntry::default();
    second.buckets[1] = bucket(200, values + 64, 200);
    second.buckets[0] = bucket(0, 0, 0);
    let memory = &mut pair.net.hosts[1].env.memory;
    memory.write(table + 3 * 64, first.as_bytes());
    memory.write(table + 5 * 64, second.as_bytes());
    memory.write(values, &[7; 7]);
    memory.write(values + 16, &[9; 9]);
    memory.write(values + 64, &[200; 200]);
    Params {
        table: table.into(),
        index: 3.into(),
        table_key: key.into(),
        value_key: key.into(),
        hops: 8.into(),
        ..Params::default()
    }
}

#[test]
fn get_finds_what_is_there() {
    let mut pair = RpcPair::quiet();
    pair.load(OP, Get);
    let base = table(&mut pair);
    let mut get = |params: Params, room| pair.ask(OP, params.as_bytes(), room);
    let key = |key: u64| Params { key: key.into(), ..base };
    assert_eq!(get(key(7), 64), (Code::Ok as u32, vec![7; 7]));
    assert_eq!(get(key(9), 25), (Code::Ok as u32, vec![9; 9]), "exactly as much room");
    assert_eq!(get(key(200), 256), (Code::Ok as u32, vec![200; 200]), "the next of the chain");
    assert_eq!(get(key(8), 64), (Code::NotFound as u32, vec![]));
    assert_eq!(get(key(0), 64), (Code::NotFound as u32, vec![]), "an empty bucket has no key");
    assert_eq!(get(Params { hops: 1.into(), ..key(200) }, 256).0, Code::Retries as u32);
    assert_eq!(get(key(200), 64).0, Code::Overflow as u32);
    assert_eq!(get(Params { table_key: 1.into(), ..key(7) }, 64).0, Code::Access as u32);
    assert_eq!(get(Params { value_key: 1.into(), ..key(7) }, 64).0, Code::Access as u32);
    assert_eq!(get(Params { table: u64::MAX.into(), ..key(7) }, 64).0, Code::Access as u32);
    assert_eq!(pair.ask(OP, &base.as_bytes()[1..], 64).0, Code::BadParam as u32);
    assert_eq!(pair.ask(OP + 1, base.as_bytes(), 64).0, Code::NoKernel as u32);
}

/// What the peer may not READ, a kernel does not read for it.
#[test]
fn a_kernel_has_the_peers_rights() {
    for (qp, region) in
        [(all_rights() - Access::REMOTE_READ, all_rights()), (all_rights(), Access::LOCAL_WRITE)]
    {
        let setup = Setup { access: qp, ..Setup::default() };
        let mut pair = RpcPair::new(Faults::default(), [NicConfig::default(); 2], &setup, 1);
        pair.load(OP, Get);
        let mut params = Params { key: 7.into(), ..table(&mut pair) };
        let (table, key) = pair.net.hosts[1].region(PAGE, region);
        (params.table, params.table_key) = (table.into(), key.into());
        assert_eq!(pair.ask(OP, params.as_bytes(), 64).0, Code::Access as u32);
    }
    /* nor what belongs to another protection domain */
    let mut pair = RpcPair::quiet();
    pair.load(OP, Get);
    let pd = pair.net.hosts[1].nic.alloc_pd().unwrap();
    let other = pair.net.hosts[1].region_in(pd, 4096, all_rights());
    let params = Params { table_key: other.lkey.into(), table: other.addr.into(), ..table(&mut pair) };
    assert_eq!(pair.ask(OP, params.as_bytes(), 64).0, Code::Access as u32);
    let host = &mut pair.net.hosts[1];
    let there = host.nic.load_kernel(pd, OP, Box::new(Get)).unwrap();
    assert_eq!(host.nic.load_kernel(pd, OP, Box::new(Get)).err(), Some(NicError::Busy));
    assert!(host.nic.unload_kernel(there).is_ok() && host.nic.unload_kernel(there).is_err());
}

#[test]
fn a_peer_of_no_dialect_fails_the_first_rpc() {
    for speaks in [[true, false], [false, true]] {
        let (faults, cfgs) = (Faults::default(), [NicConfig::default(); 2]);
        let mut pair = RpcPair::between(faults, cfgs, &Setup::default(), 1, speaks);
        let at = pair.call(1, OP, &[], 64, false);
        pair.call(2, OP, &[], 64, false);
        pair.run();
        assert_eq!(pair.polled(0), [(1, WcStatus::LocQpOpErr), (2, WcStatus::WrFlushErr)]);
        assert_eq!(pair.answer(at), None);
        let lacks = AsyncEvent::PeerLacksDialect(pair.qpn[0]);
        assert_eq!(pair.net.hosts[0].env.events.contains(&lacks), speaks[0]);
        assert_eq!(pair.net.hosts[1].state(pair.qpn[1]), QpState::Rts);
    }
}

/// Cards that know no dialects say nothing.
#[test]
fn a_silent_peer_has_no_dialect() {
    let mut pair = RpcPair::quiet();
    pair.net.cut(1, 0, u64::MAX / 2);
    pair.call(1, OP, &[], 64, false);
    pair.net.run_for(1_000_000_000);
    assert_eq!(pair.polled(0), [(1, WcStatus::LocQpOpErr)]);
}

/// A peer that sends RPCs speaks the dialect: what waits for its answer need not wait for it.
#[test]
fn an_rpc_from_the_peer_says_what_it_speaks() {
    let mut pair = RpcPair::quiet();
    pair.load(OP, Echo);
    let host = &mut pair.net.hosts[1];
    let target = host.region_in(host.pd, 24, Access::LOCAL_WRITE);
    host.env.memory.write(target.addr, &[0; 24]);
    let wqe = SendWqe { op: SendOp::Rpc, remote_addr: OP, flags: SendFlags::SIGNALED, ..SendWqe::default() };
    pair.sq[1].post(Send { wqe, sges: vec![target], inline: None }).unwrap();
    pair.net.doorbell(1, pair.qpn[1]);
    /* host 1 has its answer; the question of host 0 is lost */
    pair.net.run_for(3_000);
    pair.net.cut(0, 1, 100_000);
    let at = pair.call(1, OP, b"echo", 64, false);
    pair.run();
    assert_eq!([0, 1].map(|at| pair.polled(at)), [[(1, WcStatus::Success)], [(0, WcStatus::Success)]]);
    assert_eq!(pair.answer(at), Some((OP as u32, 0, 4, b"echo".to_vec())));
}

/// An end of another connection between the pair's cards.
struct Beside {
    qpn: Qpn,
    peer: Qpn,
    sq: SimSq,
    cq: SimCq,
}

impl Beside {
    fn new(pair: &mut RpcPair) -> Beside {
        let [(qpn, sq, cq), (peer, ..)] = [0, 1].map(|at| {
            let (sq, cq) = (SimSq::new(16), SimCq::new(16));
            let host = &mut pair.net.hosts[at];
            let qpn = host.qp(QpType::Rc, &sq, RecvSource::Own(SimRq::new(1, 1)), [&cq, &cq], true);
            speak(host, qpn);
            (qpn, sq, cq)
        });
        let ends = (QpAt { host: 0, qpn }, QpAt { host: 1, qpn: peer });
        pair.net.connect(QpType::Rc, ends.0, ends.1, &Setup::default());
        Beside { qpn, peer, sq, cq }
    }

    /// An RPC that wants no answer.
    fn call(&self, pair: &mut RpcPair, op: u64) {
        let data = pair.bytes(&[[0; 24], [7; 24]].concat());
        let wqe = SendWqe { op: SendOp::Rpc, remote_addr: op, ..SendWqe::default() };
        self.sq.post(Send { wqe, sges: vec![data], inline: None }).unwrap();
        pair.net.doorbell(0, self.qpn);
    }

    fn polled(&self) -> Option<WcStatus> {
        self.cq.poll().map(|(cqe, _)| cqe.status)
    }
}

#[test]
fn an_endless_kernel_harms_its_queue_pair_alone() {
    let mut pair = RpcPair::quiet();
    let endless = pair.load(OP, Endless);
    pair.load(OP + 1, Echo);
    let stuck = pair.call(1, OP, &[], 64, false);
    pair.net.run_for(1_000_000);
    let other = Beside::new(&mut pair);
    other.call(&mut pair, OP + 1);
    pair.net.run_for(1_000_000);
    assert_eq!(other.polled(), Some(WcStatus::Success));
    assert!(pair.polled(0).is_empty());
    /* the kernel goes in mid-stream */
    assert!(pair.net.hosts[1].nic.unload_kernel(endless).is_ok());
    pair.run();
    assert_eq!(pair.polled(0), [(1, WcStatus::Success)]);
    assert_eq!(pair.answer(stuck).map(|(_, code, ..)| code), Some(Code::NoKernel as u32));
}

/// A kernel that does not end, reads all the time, and counts its steps for each queue pair.
struct Reader {
    steps: Arc<Mutex<BTreeMap<Qpn, u64>>>,
    memory: RegionRange,
}

impl Reader {
    /// The kernel loaded, and its counts.
    fn load(pair: &mut RpcPair) -> (KernelId, Arc<Mutex<BTreeMap<Qpn, u64>>>) {
        let steps = Arc::new(Mutex::new(BTreeMap::new()));
        let memory = RegionRange { key: pair.page[1].1, va: pair.page[1].0, len: 4096 };
        (pair.load(OP, Reader { steps: steps.clone(), memory }), steps)
    }
}

impl Kernel for Reader {
    fn start(&mut self, _: &mut KernelRun, _: Input) -> Result<(), Code> {
        Ok(())
    }
    fn step(&mut self, run: &mut KernelRun) -> Poll {
        *self.steps.lock().unwrap().entry(run.qpn()).or_default() += 1;
        assert!(run.read(self.memory));
        Poll::Pending
    }
}

/// Who comes when as many kernels are at work as a card has room for finds it not ready, until one ends.
#[test]
fn a_card_has_room_for_so_many_kernels() {
    let mut pair = RpcPair::quiet();
    let (reader, steps) = Reader::load(&mut pair);
    pair.load(OP + 1, Echo);
    let others: Vec<Beside> = (0..MAX_RUNNING).map(|_| Beside::new(&mut pair)).collect();
    others.iter().for_each(|other| other.call(&mut pair, OP));
    pair.net.run_for(10_000_000);
    assert_eq!(steps.lock().unwrap().len(), others.len(), "all are at work");
    let answer = pair.call(1, OP + 1, b"late", 64, false);
    pair.net.run_for(1_000_000);
    assert!(pair.polled(0).is_empty() && others.iter().all(|other| other.polled().is_none()));
    assert!(pair.net.hosts[1].nic.counters().sent_rnr.get() > 0);
    assert!(pair.net.hosts[1].nic.unload_kernel(reader).is_ok());
    pair.run();
    assert_eq!(pair.polled(0), [(1, WcStatus::Success)]);
    assert_eq!(pair.answer(answer).map(|(_, code, ..)| code), Some(Code::Ok as u32));
}

/// Kernels that do not end have as many turns as each other, whoever began first.
#[test]
fn kernels_of_many_have_turns_alike() {
    let mut pair = RpcPair::quiet();
    let (_, steps) = Reader::load(&mut pair);
    let others: Vec<Beside> = (0..8).map(|_| Beside::new(&mut pair)).collect();
    others.iter().for_each(|other| other.call(&mut pair, OP));
    pair.net.run_for(1_000_000);
    let begun = std::mem::take(&mut *steps.lock().unwrap());
    assert!(others.iter().all(|other| begun.contains_key(&other.peer)));
    pair.net.run_for(10_000_000);
    let steps = steps.lock().unwrap();
    let (least, most) = (steps.values().min().unwrap(), steps.values().max().unwrap());
    assert!(steps.len() == others.len() && *least > 1000 && most - least < most / 10, "{least}, {most}");
}

/// A kernel that takes another's place ends what that is in the middle of, and answers what comes then.
#[test]
fn a_kernel_takes_another_ones_place() {
    let mut pair = RpcPair::quiet();
    pair.load(OP, Endless);
    let stuck = pair.call(1, OP, &[], 64, false);
    pair.net.run_for(1_000_000);
    let next = pair.call(2, OP, b"who?", 64, false);
    let host = &mut pair.net.hosts[1];
    let (echo, old) = host.nic.replace_kernel(host.pd, OP, Box::new(Echo)).unwrap();
    assert!(old.is_some() && host.nic.kernels().iter().map(|k| (k.pd, k.op, k.id)).eq([(host.pd, OP, echo)]));
    pair.run();
    assert_eq!(pair.polled(0), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    assert_eq!(pair.answer(stuck).map(|(_, code, ..)| code), Some(Code::NoKernel as u32));
    assert_eq!(pair.answer(next).map(|(_, code, ..)| code), Some(Code::Ok as u32));
    /* each is counted among its domain's users once */
    let nic = &mut pair.net.hosts[1].nic;
    let pd = nic.alloc_pd().unwrap();
    let (_, none) = nic.replace_kernel(pd, OP, Box::new(Echo)).unwrap();
    let (last, old) = nic.replace_kernel(pd, OP, Box::new(Echo)).unwrap();
    assert!(none.is_none() && old.is_some());
    assert_eq!(nic.dealloc_pd(pd), Err(NicError::Busy));
    assert!(nic.unload_kernel(last).is_ok());
    assert_eq!(nic.dealloc_pd(pd), Ok(()));
}

/// What no kernel is for is the program's, where it said so: it finds the request in a receive.
#[test]
fn the_program_answers_what_no_kernel_is_for() {
    let mut pair = RpcPair::quiet();
    pair.load(OP, Echo);
    let pd = pair.net.hosts[1].pd;
    let nic = &mut pair.net.hosts[1].nic;
    let any = nic.load_kernel(pd, ANY_OP, RpcHandler::Program).unwrap();
    assert_eq!(nic.load_kernel(pd, ANY_OP, Box::new(Echo)).err(), Some(NicError::Busy));
    assert_eq!(pair.ask(OP, b"a kernel's", 64), (Code::Ok as u32, b"a kernel's".to_vec()));
    /* no receive is there yet: the peer comes again */
    let at = pair.call(1, OP + 1, b"the program's", 64, false);
    pair.net.run_for(100_000);
    assert!(pair.polled(0).is_empty());
    let (addr, lkey) = pair.page[1];
    let sges = vec![Sge { addr, len: 128, lkey }];
    pair.rq[1].post(Recv { wr_id: 9, sges }).unwrap();
    pair.run();
    assert_eq!(pair.polled(0), [(1, WcStatus::Success)]);
    let (cqe, _) = pair.cq[1].poll().expect("a receive");
    let len = TARGET_LEN + b"the program's".len();
    assert_eq!((cqe.wr_id, cqe.opcode, cqe.byte_len as usize), (9, WcOpcode::Recv, len));
    assert_eq!((cqe.imm, cqe.flags), ((OP as u32 + 1).to_be(), WcFlags::WITH_IMM));
    let request = pair.net.hosts[1].env.memory.read(addr, len).to_vec();
    let (target, params) = ReplyHead::decode(&request).unwrap();
    assert_eq!((target.addr, target.len, params), (at.0, at.1, &b"the program's"[..]));
    /* of another op-code, once nobody is there for it */
    assert!(pair.net.hosts[1].nic.unload_kernel(any).is_ok());
    assert_eq!(pair.ask(OP + 1, b"", 64).0, Code::NoKernel as u32);
}

/// One that is too long for its receive, and a stream, end the connection.
#[test]
fn what_a_program_cannot_take_is_a_nak() {
    for stream in [false, true] {
        let mut pair = RpcPair::quiet();
        let pd = pair.net.hosts[1].pd;
        pair.net.hosts[1].nic.load_kernel(pd, OP, RpcHandler::Program).unwrap();
        pair.post_recv(1, 9);
        if stream {
            let sge = pair.bytes(&[1; 64]);
            let wqe = SendWqe { wr_id: 1, op: SendOp::RpcWrite, remote_addr: OP, ..SendWqe::default() };
            pair.try_post(wqe, vec![sge]);
        } else {
            pair.call(1, OP, b"more than no bytes", 64, false);
        }
        pair.run();
        let (mine, theirs) = match stream {
            true => (WcStatus::RemOpErr, WcStatus::WrFlushErr),
            false => (WcStatus::RemInvReqErr, WcStatus::LocLenErr),
        };
        assert_eq!((pair.polled(0), pair.polled(1)), (vec![(1, mine)], vec![(9, theirs)]));
    }
}

/// A queue pair that goes while a kernel works for it.
#[test]
fn a_queue_pair_ends_in_mid_kernel() {
    let mut pair = RpcPair::quiet();
    pair.load(OP, Endless);
    pair.call(1, OP, &[], 64, false);
    pair.net.run_for(1_000_000);
    let now = pair.net.now();
    let host = &mut pair.net.hosts[1];
    host.to_state(pair.qpn[1], QpState::Reset, now).unwrap();
    let starverbs_sim::SimHost { nic, env, .. } = host;
    nic.destroy_qp(env, pair.qpn[1]).unwrap();
    pair.net.run_for(1_000_000);
    assert!(pair.net.hosts[1].nic.next_deadline().is_none_or(|at| at > pair.net.now()));
}

/// More calls than answers have room: the peer waits, and none is lost.
#[test]
fn answers_without_room_hold_the_peer_back() {
    let mut pair = RpcPair::quiet();
    pair.load(OP, Echo);
    pair.call(0, OP, b"", 64, false);
    pair.run();
    /* what host 1 sends is lost: its answers stay in their slots */
    pair.net.cut(1, 0, 400_000);
    let all: Vec<_> = (1..=20u8).map(|n| pair.call(n.into(), OP, &[n; 8], 64, false)).collect();
    pair.net.run_for(300_000);
    let answered = pair.net.hosts[1].nic.counters().tx_rpc_replies.get();
    assert_eq!(answered, 1 + u64::from(SLOTS));
    pair.run();
    for (n, at) in all.iter().enumerate() {
        assert_eq!(pair.answer(*at).map(|answer| answer.3), Some(vec![n as u8 + 1; 8]));
    }
    assert_eq!(pair.polled(0).len(), 21);
}

/// What is not answered waits for no slot.
#[test]
fn streams_do_not_wait_for_answers() {
    let mut pair = RpcPair::quiet();
    pair.load(OP, Echo);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let word = RegionRange { key: pair.page[1].1, va: pair.page[1].0, len: 8 };
    pair.load(OP + 1, Journal { seen: seen.clone(), word, stream: vec![], calls: 0 });
    pair.call(0, OP, b"", 64, false);
    pair.run();
    /* the answers stay in their slots */
    pair.net.cut(1, 0, 400_000);
    (1..=u64::from(SLOTS)).for_each(|n| _ = pair.call(n, OP, b"", 64, false));
    let stream = pair.bytes(b"stream");
    pair.try_post(SendWqe { op: SendOp::RpcWrite, remote_addr: OP + 1, ..SendWqe::default() }, vec![stream]);
    let unanswered = pair.bytes(&[&[0; 24][..], &0u32.to_le_bytes(), b"call"].concat());
    pair.try_post(SendWqe { op: SendOp::Rpc, remote_addr: OP + 1, ..SendWqe::default() }, vec![unanswered]);
    pair.net.run_for(300_000);
    let call = [&0u32.to_le_bytes()[..], b"call"].concat();
    assert_eq!(*seen.lock().unwrap(), [Seen::Stream(b"stream".to_vec()), Seen::Call(call, 0)]);
    pair.run();
    assert_eq!(pair.polled(0).len(), 3 + usize::from(SLOTS));
}

/// An answer that the peer's memory is not open for ends the connection; the program that has nothing posted
/// hears of it.
#[test]
fn an_answer_that_fails_is_an_event() {
    let mut pair = RpcPair::quiet();
    pair.load(OP, Echo);
    let reply =
        ReplyTarget { addr: pair.page[0].0, rkey: pair.page[0].1 ^ 0x100, len: 64, ..ReplyTarget::default() };
    let data = pair.bytes(ReplyHead::new(&reply).as_bytes());
    pair.try_post(SendWqe { op: SendOp::Rpc, remote_addr: OP, ..SendWqe::default() }, vec![data]);
    pair.run();
    let [asks, answers] = [0, 1].map(|at| &pair.net.hosts[at].env.events);
    assert!(asks.contains(&AsyncEvent::QpAccessErr(pair.qpn[0])), "{asks:?}");
    assert!(answers.contains(&AsyncEvent::QpFatal(pair.qpn[1])), "{answers:?}");
    assert_eq!([0, 1].map(|at| pair.net.hosts[at].state(pair.qpn[at])), [QpState::Err; 2]);
    assert!(pair.polled(1).is_empty());
}

/// The dialect has no FLUSH: its op-code is an RPC WRITE there. Verbs refuse to post it; so does the card to
/// send it.
#[test]
fn a_flush_does_not_leave() {
    let mut pair = RpcPair::quiet();
    let imm = Feth::word(Placement::GLOBAL, FlushLevel::Range);
    let (remote_addr, rkey) = pair.page[1];
    let wqe = SendWqe { op: SendOp::Flush, remote_addr, rkey, imm, compare_add: 8, ..SendWqe::default() };
    pair.try_post(wqe, vec![]);
    pair.run();
    assert_eq!(pair.polled(0), [(0, WcStatus::LocQpOpErr)]);
    assert_eq!(pair.net.hosts[1].state(pair.qpn[1]), QpState::Rts);
}

/// Streams that the kernel refuses are a NAK; parameters without a target, too.
#[test]
fn what_has_nowhere_to_answer_is_a_nak() {
    let mut pair = RpcPair::quiet();
    pair.load(OP, Get);
    let sge = pair.bytes(&[1; 64]);
    pair.try_post(SendWqe { op: SendOp::RpcWrite, remote_addr: OP, ..SendWqe::default() }, vec![sge]);
    pair.run();
    assert_eq!(pair.polled(0), [(0, WcStatus::RemOpErr)]);
    let mut pair = RpcPair::quiet();
    let sge = pair.bytes(&[1; 8]);
    pair.try_post(SendWqe { op: SendOp::Rpc, remote_addr: OP, ..SendWqe::default() }, vec![sge]);
    pair.run();
    assert_eq!(pair.polled(0), [(0, WcStatus::RemInvReqErr)]);
    let mut pair = RpcPair::quiet();
    let sge = pair.bytes(&[0; 1025]);
    pair.try_post(SendWqe { op: SendOp::Rpc, remote_addr: OP, ..SendWqe::default() }, vec![sge]);
    pair.run();
    assert_eq!(pair.polled(0), [(0, WcStatus::LocLenErr)], "no more parameters than a packet carries");
}

/// What a plain queue pair puts on the wire is the same beside kernels and queue pairs that speak the
/// dialect; and its 0x1c is FLUSH.
#[test]
fn plain_queue_pairs_are_as_they_were() {
    let frames = |with: bool| {
        let mut net = Net::new(2, NicConfig::default(), Faults { loss: 0.05, ..Faults::default() }, 5);
        let (sq, cq) = ([(); 2].map(|()| SimSq::new(64)), SimCq::new(256));
        let qpn = [0, 1].map(|at| {
            let own = RecvSource::Own(SimRq::new(1, 1));
            net.hosts[at].qp(QpType::Rc, &sq[at], own, [&cq, &cq], true)
        });
        let pages = [0, 1].map(|at| net.hosts[at].region(8192, all_rights()));
        if with {
            for host in &mut net.hosts {
                host.nic.load_kernel(host.pd, OP, Box::new(Echo)).unwrap();
                let qpn =
                    host.qp(QpType::Rc, &SimSq::new(4), RecvSource::Own(SimRq::new(1, 1)), [&cq, &cq], true);
                speak(host, qpn);
            }
        }
        net.connect(
            QpType::Rc,
            QpAt { host: 0, qpn: qpn[0] },
            QpAt { host: 1, qpn: qpn[1] },
            &Setup::default(),
        );
        let log = Arc::new(Mutex::new(Vec::new()));
        let tap = log.clone();
        net.tap = Some(Box::new(move |host, bytes| tap.lock().unwrap().push((host, bytes.to_vec()))));
        for wr_id in 0..60u64 {
            let op = [SendOp::Write, SendOp::Read, SendOp::Flush][wr_id as usize % 3];
            let (remote_addr, rkey) = pages[1];
            let imm = Feth::word(Placement::GLOBAL, FlushLevel::Range);
            let wqe = SendWqe { wr_id, op, remote_addr, rkey, imm, compare_add: 8, ..SendWqe::default() };
            let len = if op == SendOp::Flush { 0 } else { 3000 };
            let sge = Sge { addr: pages[0].0, len, lkey: pages[0].1 };
            let sges = if len == 0 { vec![] } else { vec![sge] };
            sq[0].post(Send { wqe, sges, inline: None }).unwrap();
            net.doorbell(0, qpn[0]);
        }
        assert!(net.run_until_idle(100_000));
        let done = std::iter::from_fn(|| cq.poll()).filter(|(c, _)| c.status == WcStatus::Success).count();
        assert_eq!(done, 60);
        drop(net.tap.take());
        std::mem::take(&mut *log.lock().unwrap())
    };
    assert!(frames(false) == frames(true));
}
