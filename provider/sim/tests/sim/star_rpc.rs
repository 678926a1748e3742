//! RPCs on connections of StaR: towards the stateful end, whose kernels run once each, in order.

use std::sync::{Arc, Mutex};

use crate::common::rpc::{Echo, Endless, Journal, RpcPair, Seen};
use crate::common::{any_bytes, for_seeds};
use starverbs_core::strom::{Code, RegionRange, ReplyFlags, RpcHandler, TARGET_LEN};
use starverbs_core::{Access, AsyncEvent, Nanos, QpState, SendFlags, SendOp, SendWqe, WcOpcode, WcStatus};
use starverbs_sim::{Faults, Rng, Send, Setup};
use starverbs_star::control::Preference;

const OP: u64 = 0x5354_0001;
const MS: Nanos = 1_000_000;
/// Host 0 asks, and its card keeps nothing.
const ENDS: [Preference; 2] = [Preference::Stateless, Preference::Stateful];

fn quiet() -> RpcPair {
    let mut pair = RpcPair::star(Faults::default(), &Setup::default(), 1, ENDS);
    pair.net.run_for(100 * MS);
    assert!(pair.net.hosts[0].nic.qp_state(pair.qpn[0]).is_none(), "the card keeps nothing of it");
    pair
}

fn journal(pair: &mut RpcPair) -> Arc<Mutex<Vec<Seen>>> {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let word = RegionRange { key: pair.page[1].1, va: pair.page[1].0, len: 8 };
    pair.load(OP, Journal { seen: seen.clone(), word, stream: vec![], calls: 0 });
    seen
}

/// All that goes wrong on a wire that StaR is for (docs/star.md, "Loss recovery").
fn faults(rng: &mut Rng) -> Faults {
    let mut some = || rng.pick(&[0.0, 0.01, 0.2]);
    let (loss, duplicate, reorder, corrupt) = (some(), some(), some(), some() / 10.0);
    Faults { loss, duplicate, reorder, corrupt, late: 100_000, ..Faults::default() }
}

/// WRITEs of a word, and RPCs that read it: each happens once, in the order in which it was posted, and each
/// answer comes once. Some are posted before it is settled what the ends are.
fn once_and_in_order(seed: u64) {
    let mut rng = Rng::new(seed);
    let faults = faults(&mut rng);
    let mut pair = RpcPair::star(faults, &Setup { timeout: 0, ..Setup::default() }, seed, ENDS);
    let seen = journal(&mut pair);
    let (mut expected, mut answers, mut posted) = (Vec::new(), Vec::new(), Vec::new());
    let mut word = 0u64;
    for wr_id in 0..rng.within(1, 40) {
        if rng.chance(0.4) {
            word = rng.bits();
            let sge = pair.bytes(&word.to_le_bytes());
            let (remote_addr, rkey) = pair.page[1];
            let wqe = SendWqe { wr_id, op: SendOp::Write, remote_addr, rkey, ..SendWqe::default() };
            assert!(pair.try_post(wqe, vec![sge]));
        } else {
            let steps: u32 = rng.pick(&[0, 0, 1, 600, 3000]);
            let imm = rng.chance(0.3);
            if imm {
                pair.post_recv(0, 1000 + wr_id);
            }
            /* beyond 488 they are fetched */
            let more = rng.pick(&[0, 5, 480, 600, 990]);
            let params = [&steps.to_le_bytes()[..], &any_bytes(&mut rng, more)].concat();
            answers.push(pair.call(wr_id, OP, &params, 64, imm));
            expected.push(Seen::Call(params, word));
        }
        posted.push(wr_id);
        for _ in 0..rng.below(30) {
            pair.net.step();
        }
    }
    pair.run();
    let sent = pair.polled(0);
    assert!(sent.iter().all(|(_, status)| *status == WcStatus::Success), "{sent:?}");
    let own: Vec<u64> = sent.iter().map(|(id, _)| *id).filter(|id| *id < 1000).collect();
    assert_eq!(own, posted, "all succeeded, in order");
    assert!(*seen.lock().unwrap() == expected, "each once, and in order");
    for (n, answer) in answers.iter().enumerate() {
        let wanted = (OP as u32, 0, 8, (n as u64 + 1).to_le_bytes().to_vec());
        assert_eq!(pair.answer(*answer), Some(wanted), "answer {n}");
    }
    assert!(pair.polled(1).is_empty(), "the card's own requests complete to nobody");
    assert_eq!(pair.sq[1].outstanding(), 0);
    let nic = &pair.net.hosts[1].nic;
    let stats = nic.counters();
    assert_eq!((stats.tx_rpc_replies.get(), stats.rpc_failed.get()), (answers.len() as u64, 0));
    assert_eq!((nic.kernels_running(), stats.star_stateful_qps.get()), (0, 1));
    assert!(pair.net.hosts.iter().all(|host| host.env.memory.gaps_intact()));
}

#[test]
fn kernels_run_once_and_in_order() {
    for_seeds("star rpc", 200, once_and_in_order);
}

/// Messages come while a kernel works, and have timers of their own: it goes on.
#[test]
fn a_kernel_goes_on_beside_other_timers() {
    let mut pair = quiet();
    journal(&mut pair);
    let answer = pair.call(1, OP, &2_000_000u32.to_le_bytes(), 64, false);
    let pd = pair.net.hosts[0].pd;
    for _ in 0..50 {
        pair.net.run_for(MS / 10);
        pair.net.hosts[0].region_in(pd, 4096, Access::LOCAL_WRITE);
    }
    assert!(pair.answer(answer).is_none(), "it was too short");
    pair.net.run_for(10 * MS);
    assert!(pair.answer(answer).is_some(), "it has not ended in 15 ms");
    assert_eq!(pair.polled(0), [(1, WcStatus::Success)]);
}

#[test]
fn errors_of_rpcs_are_answers() {
    let mut pair = quiet();
    pair.load(OP, Echo);
    assert_eq!(pair.ask(OP, b"some", 64), (Code::Ok as u32, b"some".to_vec()));
    assert_eq!(pair.ask(OP, &[7; 100], 64).0, Code::Overflow as u32);
    assert_eq!(pair.ask(OP + 1, b"", 64).0, Code::NoKernel as u32);
    /* no answer is wanted */
    pair.call(2, OP, b"", 0, false);
    pair.run();
    assert_eq!(pair.polled(0), [(2, WcStatus::Success)]);
    assert_eq!(pair.net.hosts[1].nic.counters().rx_rpc.get(), 4);
}

/// An answer without a record, and with immediate data, is its bytes alone.
#[test]
fn bare_answers_complete_a_receive() {
    let mut pair = quiet();
    pair.load(OP, Echo);
    pair.post_recv(0, 7);
    let (addr, room) = pair.call_with(1, OP, b"some", 64, ReplyFlags::IMM | ReplyFlags::BARE);
    pair.run();
    let mut ended: Vec<_> = std::iter::from_fn(|| pair.cq[0].poll()).map(|(cqe, _)| cqe).collect();
    ended.sort_by_key(|cqe| cqe.wr_id);
    let recv = ended.pop().expect("two");
    assert_eq!((recv.wr_id, recv.opcode, recv.byte_len, recv.imm), (7, WcOpcode::RecvRdmaWithImm, 4, 1));
    let at = addr + u64::from(room) - 20;
    assert_eq!(pair.net.hosts[0].env.memory.read(at, 20), [&b"some"[..], &[0; 16]].concat());
}

/// What no kernel is for is the program's, as a SEND.
#[test]
fn a_program_answers_what_it_has_asked_for() {
    let mut pair = quiet();
    let host = &mut pair.net.hosts[1];
    host.nic.load_kernel(host.pd, OP, RpcHandler::Program).expect("the op-code is free");
    let (addr, lkey) = pair.page[1];
    let room = starverbs_core::Sge { addr, len: 100, lkey };
    pair.rq[1].post(starverbs_sim::Recv { wr_id: 9, sges: vec![room] }).expect("there is room");
    pair.call(1, OP, b"some", 64, false);
    pair.run();
    assert_eq!(pair.polled(0), [(1, WcStatus::Success)]);
    let (cqe, _) = pair.cq[1].poll().expect("a receive");
    let said = (cqe.wr_id, cqe.opcode, cqe.byte_len, cqe.imm);
    assert_eq!(said, (9, WcOpcode::Recv, TARGET_LEN as u32 + 4, (OP as u32).to_be()));
    assert_eq!(pair.net.hosts[1].env.memory.read(addr + TARGET_LEN as u64, 4), b"some");
}

/// RPCs and RPC WRITEs of the stateful end, and to an end without the dialect.
#[test]
fn what_star_does_not_carry_ends_with_an_error() {
    let ends = [(1, [true; 2]), (0, [true, false])];
    let each = ends.into_iter().flat_map(|end| [(end, SendOp::Rpc), (end, SendOp::RpcWrite)]);
    for ((of, speaks), op) in each {
        let mut pair = RpcPair::star_between(Faults::default(), &Setup::default(), 1, (ENDS, speaks));
        let (addr, lkey) = pair.page[of];
        let sges = vec![starverbs_core::Sge { addr, len: 64, lkey }];
        let wqe = SendWqe { wr_id: 5, op, remote_addr: OP, flags: SendFlags::SIGNALED, ..SendWqe::default() };
        assert!(pair.sq[of].post(Send { wqe, sges, inline: None }).is_ok());
        pair.net.doorbell(of, pair.qpn[of]);
        pair.run();
        assert_eq!(pair.polled(of), [(5, WcStatus::LocQpOpErr)], "{of} {op:?} {speaks:?}");
    }
}

/// Parameters without a whole head, and more of them than a packet has.
#[test]
fn bad_parameters_end_the_connection() {
    for (len, status) in [(TARGET_LEN - 1, WcStatus::RemInvReqErr), (1025, WcStatus::LocLenErr)] {
        let mut pair = quiet();
        let sge = pair.bytes(&vec![0; len]);
        let wqe = SendWqe { wr_id: 5, op: SendOp::Rpc, remote_addr: OP, ..SendWqe::default() };
        assert!(pair.try_post(wqe, vec![sge]));
        pair.run();
        assert_eq!(pair.polled(0), [(5, status)], "{len}");
    }
}

/// A kernel that does not end works for a connection that ends: nothing is left of it.
#[test]
fn a_kernel_ends_with_its_connection() {
    for of in [0, 1] {
        let mut pair = quiet();
        pair.load(OP, Endless);
        pair.call(1, OP, b"some", 64, false);
        pair.net.run_for(10 * MS);
        assert_eq!(pair.net.hosts[1].nic.kernels_running(), 1);
        let now = pair.net.now();
        pair.net.hosts[of].to_state(pair.qpn[of], QpState::Err, now).expect("from every state");
        pair.run();
        assert_eq!(pair.net.hosts[1].nic.kernels_running(), 0, "{of}");
        assert_eq!(pair.polled(0).len(), 1);
    }
}

/// The memory that an answer was to go to is not open: its card's program learns of it by an event.
#[test]
fn an_answer_that_fails_is_an_event() {
    let mut pair = quiet();
    pair.load(OP, Echo);
    let (addr, _) = pair.page[0];
    let reply = starverbs_core::strom::ReplyTarget { addr, rkey: 1, len: 64, ..Default::default() };
    let head = starverbs_core::strom::ReplyHead::new(&reply);
    let sge = pair.bytes(zerocopy::IntoBytes::as_bytes(&head));
    let wqe = SendWqe { wr_id: 5, op: SendOp::Rpc, remote_addr: OP, ..SendWqe::default() };
    assert!(pair.try_post(wqe, vec![sge]));
    pair.run();
    assert_eq!(pair.polled(0)[0], (5, WcStatus::Success));
    assert!(pair.net.hosts[1].env.events.contains(&AsyncEvent::QpFatal(pair.qpn[1])));
    assert!(pair.polled(1).is_empty());
}

/// The stateful end's host ends without a word, in the middle of a kernel: the request fails.
#[test]
fn a_request_whose_host_is_gone_fails() {
    let setup = Setup { timeout: 8, retry_cnt: 3, ..Setup::default() };
    let mut pair = RpcPair::star(Faults::default(), &setup, 1, ENDS);
    pair.net.run_for(100 * MS);
    pair.load(OP, Endless);
    pair.call(1, OP, b"some", 64, false);
    pair.net.run_for(10 * MS);
    pair.net.restart(1);
    pair.run();
    assert_eq!(pair.polled(0), [(1, WcStatus::RetryExcErr)]);
}
