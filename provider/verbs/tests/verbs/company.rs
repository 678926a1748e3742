//! Small messages of many queue pairs: they wait in company for a system call that takes them all, and never
//! for long. And a process that has several QPN blocks.

use std::time::{Duration, Instant};

use crate::common::*;
use starverbs_core::{Cqe, QpType, SendOp};
use starverbs_settings::Settings;
use starverbs_verbs::{Qp, QpInit, SendWr};

/// Messages that leave before others wait in their company, and as many as wait at most.
const COMPANY: usize = 16;
const WAIT: usize = 32;

/// A card with many queue pairs, and its peer, whose card runs when it is polled and not before: nothing is
/// acknowledged meanwhile.
struct Crowd {
    a: Node,
    b: Node,
    qps: Vec<(Qp, Qp)>,
    port: u16,
}

impl Crowd {
    fn new() -> Crowd {
        let settings = settings();
        let a = Node::new(&settings);
        let b = Node::new(&Settings { progress_thread: false, ..settings.clone() });
        let pair = |_| {
            let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
            connect((&a, &qa), (&b, &qb));
            (qa, qb)
        };
        let qps = (0..COMPANY + WAIT).map(pair).collect();
        Crowd { a, b, qps, port: settings.port }
    }

    /// Writes 8 bytes over each of these queue pairs, one after the other.
    fn write(&self, which: std::ops::Range<usize>) {
        for at in which {
            write(&self.qps[at].0, &self.a, &self.b, at);
        }
    }

    fn counter(&self, name: &str) -> u64 {
        counters(self.port, name)[0]
    }
}

fn write(qp: &Qp, a: &Node, b: &Node, at: usize) {
    let sges = [a.sge(0, 8)];
    let to = b.addr(8 * at);
    let wr = SendWr { op: SendOp::Write, remote_addr: to, rkey: b.mr.rkey(), ..send(at as u64, &sges) };
    post(qp, &wr).unwrap();
}

#[test]
fn what_waits_in_company_goes_though_nobody_answers_and_the_program_is_away() {
    let crowd = Crowd::new();
    let (packets, calls) = (crowd.counter("tx_packets"), crowd.counter("tx_syscalls"));
    crowd.write(0..COMPANY);
    assert!(crowd.counter("tx_packets") - packets >= COMPANY as u64, "the first ones have no company");
    crowd.write(COMPANY..COMPANY + WAIT);
    wait_for("the last message", || crowd.counter("tx_packets") - packets >= (COMPANY + WAIT) as u64);
    let calls = crowd.counter("tx_syscalls") - calls;
    assert!(calls < (COMPANY + WAIT) as u64, "{calls} system calls: none waited for another");
    let mut done = 0;
    wait_for("the completions", || {
        assert_eq!(crowd.b.cq.poll(&mut [Cqe::default()]).unwrap(), 0, "WRITEs complete at their requester");
        done += crowd.a.cq.poll(&mut [Cqe::default(); COMPANY]).unwrap();
        done == COMPANY + WAIT
    });
}

#[test]
fn who_asked_for_an_event_waits_in_nobodys_company() {
    let crowd = Crowd::new();
    let packets = crowd.counter("tx_packets");
    crowd.a.cq.req_notify(false).unwrap();
    for sent in 0..COMPANY + WAIT {
        crowd.write(sent..sent + 1);
        assert!(crowd.counter("tx_packets") - packets > sent as u64, "message {sent} waits");
    }
}

#[test]
fn what_waits_goes_before_the_program_sleeps() {
    let crowd = Crowd::new();
    let packets = crowd.counter("tx_packets");
    crowd.write(0..COMPANY + WAIT);
    crowd.a.cq.req_notify(false).unwrap();
    assert!(crowd.counter("tx_packets") - packets >= (COMPANY + WAIT) as u64);
}

/// A block has 4096 QPNs. While a card does not know that its frames come to itself it looks into its socket
/// at each post, and so the program finds each completion without ever running the card by a poll.
#[test]
fn a_process_of_two_blocks_settles_though_no_poll_of_it_is_in_vain() {
    let settings = Settings { progress_thread: false, ..settings() };
    let node = Node::new(&settings);
    let small = QpInit { max_send_wr: 1, max_recv_wr: 1, max_inline: 0, ..node.init(QpType::Rc, None) };
    let qps: Vec<Qp> = (0..4100).map(|_| Qp::create(&node.pd, &small).unwrap()).collect();
    let (first, last) = (&qps[0], &qps[qps.len() - 1]);
    assert_ne!(first.number() >> 12, last.number() >> 12, "two blocks");
    connect((&node, first), (&node, last));
    let looks = || counters(settings.port, "rx_syscalls")[0];
    let start = Instant::now();
    loop {
        let before = looks();
        write(first, &node, &node, 1);
        if looks() == before {
            break;
        }
        assert_eq!(node.cq.poll(&mut [Cqe::default()]).unwrap(), 1, "its completion is there");
        assert!(start.elapsed() < Duration::from_secs(30), "it looks for its frames for ever");
    }
    node.completions(1);
}
