//! Kernels that a card's own program calls send by its queue pairs (StRoM's send kernels): all of it, once,
//! in order, and by nobody else's.

use crate::common::any_faults;
use crate::common::for_seeds;
use crate::common::rpc::{RpcPair, SLOTS, speak};
use starverbs_core::nic::OwnRequest;
use starverbs_core::qp::RecvSource;
use starverbs_core::strom::{Code, Input, Kernel, KernelRun, MAX_REPLY, Poll};
use starverbs_core::{NicConfig, QpState, QpType, Qpn, SendOp, SendWqe, WcStatus};
use starverbs_sim::{Faults, Rng, Send, Setup, SimCq, SimRq, SimSq};

const OP: u64 = 0x53;

/// Sends the rest of its parameters so often, each behind the last.
struct Sender;

impl Kernel for Sender {
    fn start(&mut self, _: &mut KernelRun, _: Input) -> Result<(), Code> {
        Ok(())
    }

    fn step(&mut self, run: &mut KernelRun) -> Poll {
        let word = |at| run.param_u32(at).unwrap_or_default();
        let (qpn, key, times) = (word(0), word(4), word(8));
        let va = run.param_u64(12).unwrap_or_default();
        let data = run.bytes()[20..].to_vec();
        while run.regs[0] < times.into() {
            let numbered = [&run.regs[0].to_le_bytes()[..], &data].concat();
            if !run.send(qpn, key, va + run.regs[0] * numbered.len() as u64, &numbered) {
                return Poll::Pending;
            }
            run.regs[0] += 1;
        }
        Poll::Ready(if run.reply(&times.to_le_bytes()) { Code::Ok } else { Code::Overflow })
    }
}

fn params((qpn, key, times): (Qpn, u32, u32), va: u64, data: &[u8]) -> Vec<u8> {
    let words = [qpn, key, times].map(u32::to_le_bytes).concat();
    [&words[..], &va.to_le_bytes(), data].concat()
}

/// Calls host 0's kernel.
fn call(pair: &mut RpcPair, params: &[u8]) -> Code {
    finish(pair, &mut OwnRequest::new(params).expect("memory"))
}

/// Has host 0's kernel come to its end, with time between its turns.
fn finish(pair: &mut RpcPair, own: &mut OwnRequest) -> Code {
    for _ in 0..200_000 {
        let now = pair.net.now();
        let host = &mut pair.net.hosts[0];
        if let Some(code) = host.nic.call_kernel(&mut host.env, now, host.pd, OP, own) {
            return code;
        }
        pair.net.transmit();
        pair.net.run_for(10_000);
    }
    panic!("the kernel does not end");
}

fn sending(faults: Faults, setup: &Setup, seed: u64) -> RpcPair {
    let mut pair = RpcPair::new(faults, [NicConfig::default(); 2], setup, seed);
    let host = &mut pair.net.hosts[0];
    host.nic.load_kernel(host.pd, OP, Box::new(Sender)).expect("the op-code is free");
    pair
}

#[test]
fn what_a_kernel_sends_arrives_once_and_in_order() {
    for_seeds("send kernels", 40, |seed| {
        let mut rng = Rng::new(seed);
        let faults = any_faults(&mut rng);
        let mut pair = sending(faults, &Setup { timeout: rng.pick(&[0, 18]), ..Setup::default() }, seed);
        let (times, len) = (rng.within(1, 60) as u32, rng.within(0, 1000) as usize);
        let data = vec![seed as u8; len];
        let (va, key) = pair.page[1];
        let params = params((pair.qpn[0], key, times), va, &data);
        assert_eq!(call(&mut pair, &params), Code::Ok);
        /* what the program posts then stands behind it */
        let sge = pair.bytes(b"behind");
        let (at, whole) = (va + u64::from(times) * (8 + len as u64), (8 + len) * times as usize);
        let wqe = SendWqe { wr_id: 7, op: SendOp::Write, remote_addr: at, rkey: key, ..SendWqe::default() };
        assert!(pair.try_post(wqe, vec![sge]));
        pair.run();
        assert_eq!(pair.polled(0), [(7, WcStatus::Success)]);
        let there = pair.net.hosts[1].env.memory.read(va, whole + 6);
        let wanted = (0..u64::from(times)).flat_map(|n| [&n.to_le_bytes()[..], &data].concat());
        assert_eq!(*there, *wanted.chain(*b"behind").collect::<Vec<_>>());
        assert_eq!(pair.net.hosts[0].nic.counters().tx_kernel_writes.get(), u64::from(times));
    });
}

/// Slots that are used up come back, and the answers to the peer's RPCs find theirs meanwhile.
#[test]
fn the_longest_ones_wait_for_room_and_leave_some() {
    let mut pair = sending(Faults::default(), &Setup::default(), 1);
    let (va, key) = pair.page[1];
    let data = vec![5; MAX_REPLY - 20];
    let (step, times) = (data.len() + 8, 3 * u32::from(SLOTS) + 1);
    let params = params((pair.qpn[0], key, times), va, &data);
    /* nothing is acknowledged yet: all slots but one are taken */
    let (mut own, now) = (OwnRequest::new(&params).unwrap(), pair.net.now());
    let host = &mut pair.net.hosts[0];
    assert_eq!(host.nic.call_kernel(&mut host.env, now, host.pd, OP, &mut own), None);
    assert!(own.waits());
    assert_eq!(host.nic.counters().tx_kernel_writes.get(), u64::from(SLOTS) - 1);
    assert_eq!(finish(&mut pair, &mut own), Code::Ok);
    pair.run();
    assert_eq!(pair.net.hosts[0].nic.counters().tx_kernel_writes.get(), u64::from(times));
    let there = pair.net.hosts[1].env.memory.read(va, times as usize * step).to_vec();
    for (n, one) in there.chunks(step).enumerate() {
        assert!(one[..8] == (n as u64).to_le_bytes() && one[8..].iter().all(|byte| *byte == 5), "{n}");
    }
}

/// A queue pair that fails, or a kernel that goes, ends what waits.
#[test]
fn what_waits_ends_with_its_queue_pair_and_its_kernel() {
    for unload in [false, true] {
        let setup = Setup { timeout: 14, retry_cnt: 1, ..Setup::default() };
        let mut pair = sending(Faults::default(), &setup, 1);
        let (va, key) = pair.page[1];
        pair.net.cut(0, 1, u64::MAX / 4);
        let params = params((pair.qpn[0], key, 100), va, &[1; 1000]);
        let (mut own, now) = (OwnRequest::new(&params).unwrap(), pair.net.now());
        let host = &mut pair.net.hosts[0];
        assert_eq!(host.nic.call_kernel(&mut host.env, now, host.pd, OP, &mut own), None);
        if unload {
            let id = host.nic.kernels()[0].id;
            assert!(host.nic.unload_kernel(id).is_ok());
        }
        assert_eq!(finish(&mut pair, &mut own), Code::Access);
        assert_eq!(pair.net.hosts[0].nic.query_qp(pair.qpn[0]).unwrap().state, QpState::Err);
    }
}

#[test]
fn others_queue_pairs_are_denied() {
    let mut pair = sending(Faults::default(), &Setup::default(), 1);
    let (va, key) = pair.page[1];
    let denied = |pair: &mut RpcPair, qpn| {
        let before = pair.net.hosts[0].nic.counters().tx_kernel_writes.get();
        assert_eq!(call(pair, &params((qpn, key, 1), va, b"x")), Code::Access);
        assert_eq!(pair.net.hosts[0].nic.counters().tx_kernel_writes.get(), before);
    };
    let nobody = pair.qpn[0] + 1;
    denied(&mut pair, nobody);
    /* one that does not speak the dialect; one that is not connected */
    for speaks in [false, true] {
        let (sq, rq, cq) = (SimSq::new(4), SimRq::new(4, 1), SimCq::new(16));
        let host = &mut pair.net.hosts[0];
        let qpn = host.qp(QpType::Rc, &sq, RecvSource::Own(rq), [&cq, &cq], false);
        if speaks {
            speak(host, qpn);
        }
        denied(&mut pair, qpn);
    }
    /* one of another protection domain */
    let host = &mut pair.net.hosts[0];
    let other = host.nic.alloc_pd().unwrap();
    host.nic.load_kernel(other, OP, Box::new(Sender)).unwrap();
    let mut own = OwnRequest::new(&params((pair.qpn[0], key, 1), va, b"x")).unwrap();
    let code = host.nic.call_kernel(&mut host.env, 0, other, OP, &mut own);
    assert_eq!(code, Some(Code::Access));
}

/// A kernel that works for a peer sends by no queue pair: it has its answer.
#[test]
fn a_peer_has_nothing_sent() {
    let mut pair = RpcPair::quiet();
    pair.load(OP, Sender);
    let (va, key) = pair.page[0];
    let asked = params((pair.qpn[1], key, 1), va, b"x");
    assert_eq!(pair.ask(OP, &asked, 64).0, Code::Access as u32);
    assert_eq!(pair.net.hosts[1].nic.counters().tx_kernel_writes.get(), 0);
}

/// One datagram after the other while a kernel sends all that it may: each leaves about as soon as alone.
#[test]
fn datagrams_leave_while_a_kernel_sends() {
    let mut pair = sending(Faults::default(), &Setup::default(), 1);
    let setup = Setup::default();
    let (sq, rq, cq) = (SimSq::new(16), SimRq::new(256, 1), SimCq::new(256));
    let [from, to] = [0, 1].map(|at| {
        let (own, source) = (if at == 0 { sq.clone() } else { SimSq::new(1) }, RecvSource::Own(rq.clone()));
        let host = &mut pair.net.hosts[at];
        let qpn = host.qp(QpType::Ud, &own, source, [&cq, &SimCq::new(256)], true);
        host.to_rts_ud(qpn, &setup, 0);
        qpn
    });
    let (gid, host) = (pair.net.hosts[1].gid, &mut pair.net.hosts[0]);
    let av = host.nic.create_av(host.pd, host.av(gid)).expect("an AV");
    let qkey = setup.qkey;
    let datagram = |pair: &mut RpcPair, mut between: Option<&mut OwnRequest>| {
        let begun = pair.net.now();
        let wqe = SendWqe { op: SendOp::Send, av, remote_qpn: to, qkey, ..SendWqe::default() };
        sq.post(Send { wqe, sges: vec![], inline: None }).expect("there is room");
        pair.net.doorbell(0, from);
        while cq.poll().is_none() {
            if let Some(own) = &mut between {
                let (now, host) = (pair.net.now(), &mut pair.net.hosts[0]);
                let ended = host.nic.call_kernel(&mut host.env, now, host.pd, OP, own);
                assert_eq!(ended, None, "it is to send for longer");
                pair.net.transmit();
            }
            pair.net.run_for(1_000);
            assert!(pair.net.now() - begun < 100_000_000, "a datagram does not leave");
        }
        pair.net.now() - begun
    };
    let alone = (0..200).map(|_| datagram(&mut pair, None)).max();
    let (va, key) = pair.page[1];
    let asked = params((pair.qpn[0], key, u32::MAX), va, &[1; 8]);
    let mut own = OwnRequest::new(&asked).expect("memory");
    let beside = (0..200).map(|_| datagram(&mut pair, Some(&mut own))).max();
    let sent = pair.net.hosts[0].nic.counters().tx_kernel_writes.get();
    assert!(sent > 100, "it sent {sent} messages");
    assert!(beside <= alone.map(|alone| 3 * alone), "{beside:?} ns, {alone:?} alone");
}
