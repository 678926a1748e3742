//! A QPC-limited card as the stateful end of StaR connections, on virtual time: its work completes, and
//! misses are charged.

use starverbs_core::qpc::Policy;
use starverbs_core::{Access, ContextCache, Nanos, NicConfig, SendFlags, SendOp, SendWqe, Sge, WcStatus};
use starverbs_sim::Send;
use starverbs_star::control::Preference;

use crate::common::roles::{Conn, SECOND, STAR, World};

const MISS: Nanos = 500;
const FETCH: Nanos = 500;
const MS: Nanos = 1_000_000;
const POLICIES: [Policy; 3] = [Policy::Fcfs, Policy::NonBlocking, Policy::LatencyHiding];
/// The stateless end, and the other.
const SL: usize = 0;
const SF: usize = 1;

/// Connections to a card with room for one context, which is their stateful end.
fn connected(policy: Policy, count: usize) -> (World, Vec<Conn>) {
    let contexts = Some(ContextCache { entries: 1, policy, miss: MISS, fetch: FETCH });
    let limited = NicConfig { contexts, ..NicConfig::default() };
    let mut w = World::with_cards([(Some(100), NicConfig::default()), (Some(100), limited)]);
    let conns: Vec<Conn> = (0..count).map(|_| w.connect()).collect();
    conns.iter().for_each(|conn| w.want(conn, SF, Preference::Stateful));
    w.net.run_for(SECOND);
    for conn in &conns {
        assert_eq!(w.roles(conn), STAR, "{policy:?}");
    }
    (w, conns)
}

/// Memory of each end that the other writes.
type Regions = [(u64, u32); 2];

/// Time from the doorbell of a WRITE to its completion, all being quiet before.
fn latency(w: &mut World, conn: &Conn, regions: &Regions, at: usize) -> Nanos {
    let ((addr, lkey), (remote_addr, rkey)) = (regions[at], regions[1 - at]);
    let op = SendOp::Write;
    let wqe = SendWqe { op, flags: SendFlags::SIGNALED, length: 8, remote_addr, rkey, ..SendWqe::default() };
    let before = w.net.now();
    conn.sqs[at].post(Send { wqe, sges: vec![Sge { addr, len: 8, lkey }], inline: None }).expect("room");
    w.net.doorbell(conn.hosts[at], conn.qpns[at]);
    let ends = loop {
        let ends = w.completions(conn);
        if !ends.is_empty() {
            break ends;
        }
        assert!(w.net.step(), "it completes");
    };
    assert!(ends.len() == 1 && ends[0].status == WcStatus::Success, "{ends:?}");
    let took = w.net.now() - before;
    w.net.run_for(MS);
    took
}

/// A miss costs its time: of a request of SF as RC's, of one of SL when its WQE arrives.
#[test]
fn requests_of_both_ends_pay_for_a_miss() {
    for policy in POLICIES {
        for at in [SL, SF] {
            let (mut w, conns) = connected(policy, 2);
            let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
            let regions = [0, 1].map(|host| w.net.hosts[host].region(8, all));
            w.net.run_for(MS);
            latency(&mut w, &conns[0], &regions, at);
            let hit = latency(&mut w, &conns[0], &regions, at);
            let hidden = at == SF && policy == Policy::LatencyHiding;
            let fetched = |w: &World| {
                let c = w.net.hosts[SF].nic.counters();
                c.qpc_misses.get() + c.qpc_prefetched.get()
            };
            let before = fetched(&w);
            for n in 0..6 {
                let miss = latency(&mut w, &conns[1 - n % 2], &regions, at);
                assert_eq!(miss, hit + if hidden { 0 } else { MISS }, "{policy:?}, end {at}, {n}");
            }
            assert_eq!(fetched(&w) - before, 6, "{policy:?}, end {at}: each was evicted");
        }
    }
}

/// Messages of both ends of many connections, with one context in the cache: all arrive, and none is sent
/// again.
#[test]
fn many_connections_work_with_one_context() {
    for policy in POLICIES {
        let (mut w, conns) = connected(policy, 20);
        let mut rooms = Vec::new();
        for word in 0..6 {
            for conn in &conns {
                rooms.push((SL, w.post_recv(conn, SL), word));
                rooms.push((SF, w.post_recv(conn, SF), word));
                w.post_send(conn, SF, word);
                w.post_send(conn, SL, word);
            }
        }
        w.net.run_for(SECOND);
        for conn in &conns {
            let ends = w.completions(conn);
            assert!(ends.len() == 24 && ends.iter().all(|cqe| cqe.status == WcStatus::Success), "{ends:?}");
        }
        for (host, room, word) in rooms {
            assert_eq!(w.net.hosts[host].env.memory.word(room), word, "{policy:?}");
        }
        let c = w.net.hosts[SF].nic.counters();
        assert!(c.qpc_misses.get() + c.qpc_prefetched.get() >= 40, "{policy:?}");
        assert_eq!((c.timeouts.get(), c.star_retransmitted.get()), (0, 0), "{policy:?}");
    }
}
