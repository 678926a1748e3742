//! Doorbell coalescing across QPs: small messages of many queue pairs wait for one system call that sends
//! them all, and never for long. And a process that has several QPN blocks.

use std::time::{Duration, Instant};

use crate::common::*;
use starverbs_core::{Cqe, QpType, SendOp};
use starverbs_settings::{LinkTrust, Settings};
use starverbs_verbs::{Qp, QpInit, SendWr};

/// Messages that leave at once, before any is coalesced; and doorbells that wait at most.
const AT_ONCE: usize = 16;
const COALESCED: usize = 32;

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
        Crowd::of(&wire(), AT_ONCE + COALESCED)
    }

    fn of(settings: &Settings, pairs: usize) -> Crowd {
        let a = Node::new(settings);
        let b = Node::new(&Settings { progress_thread: false, ..settings.clone() });
        let pair = |_| {
            let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
            connect(&a, &qa, &b, &qb);
            (qa, qb)
        };
        let qps = (0..pairs).map(pair).collect();
        Crowd { a, b, qps, port: settings.port }
    }

    /// Writes 8 bytes over each of these queue pairs, one after the other.
    fn write(&self, which: std::ops::Range<usize>) {
        for at in which {
            write(&self.qps[at].0, &self.a, &self.b, at);
        }
    }

    /// Polls until so many messages are complete.
    fn complete(&self, count: usize) {
        let mut done = 0;
        wait_for("the completions", || {
            assert_eq!(self.b.cq.poll(&mut [Cqe::default()]).unwrap(), 0, "a requester completes them");
            done += self.a.cq.poll(&mut [Cqe::default(); AT_ONCE]).unwrap();
            done == count
        });
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
fn coalesced_messages_leave_though_nobody_answers_and_the_program_is_away() {
    let crowd = Crowd::new();
    let coalesces = || {
        let (packets, calls) = (crowd.counter("tx_packets"), crowd.counter("tx_syscalls"));
        crowd.write(0..AT_ONCE);
        let at_once = crowd.counter("tx_packets") - packets >= AT_ONCE as u64;
        crowd.write(AT_ONCE..AT_ONCE + COALESCED);
        let all = (AT_ONCE + COALESCED) as u64;
        wait_for("the last message", || crowd.counter("tx_packets") - packets >= all);
        let calls = crowd.counter("tx_syscalls") - calls;
        crowd.complete(AT_ONCE + COALESCED);
        at_once && calls < all
    };
    /* not where the card's thread has the lock, or takes each message, as it is posted */
    assert!((0..8).any(|_| coalesces()), "the first ones left late, or none waited for another");
}

#[test]
fn a_program_that_asked_for_an_event_gets_no_coalescing() {
    let crowd = Crowd::of(&Settings { progress_thread: false, ..wire() }, AT_ONCE + COALESCED);
    let packets = crowd.counter("tx_packets");
    crowd.a.cq.req_notify(false).unwrap();
    for sent in 0..AT_ONCE + COALESCED {
        crowd.write(sent..sent + 1);
        /* at once, or by another thread that is at the card: what is coalesced leaves at 16, or at a poll */
        wait_for("the message", || crowd.counter("tx_packets") - packets > sent as u64);
    }
}

#[test]
fn coalesced_messages_leave_before_the_program_sleeps() {
    let crowd = Crowd::new();
    let leave = || {
        let packets = crowd.counter("tx_packets");
        crowd.write(0..AT_ONCE + COALESCED);
        crowd.a.cq.req_notify(false).unwrap();
        crowd.counter("tx_packets") - packets >= (AT_ONCE + COALESCED) as u64
    };
    /* not where the card's thread has the lock at that moment: its turn takes them */
    assert!((0..8).any(|_| leave()));
}

/// More local connections than a CPU's caches hold.
const MANY: usize = 300;

/// Many local connections, which have carried something, of cards that ask each other for all.
fn many(progress_thread: bool) -> Crowd {
    let crowd = Crowd::of(&Settings { link_trust: LinkTrust::None, progress_thread, ..local() }, MANY);
    for at in 0..MANY {
        crowd.write(at..at + 1);
        crowd.complete(1);
    }
    crowd
}

#[test]
fn local_doorbells_of_many_queue_pairs_wait_for_the_next_poll_or_until_they_are_many() {
    let crowd = many(false);
    let before = crowd.counter("local_requests");
    let asked = || (crowd.counter("local_requests") - before) as usize;
    crowd.write(0..AT_ONCE);
    assert_eq!(asked(), AT_ONCE, "the first ones are asked for at once");
    crowd.write(AT_ONCE..AT_ONCE + COALESCED);
    assert_eq!(asked(), AT_ONCE, "others wait");
    crowd.write(AT_ONCE + COALESCED..AT_ONCE + COALESCED + 1);
    assert_eq!(asked(), AT_ONCE + COALESCED, "until there are too many");
    /* one poll may find completions, or another thread at the card */
    let mut polled = 0;
    wait_for("the last request, as the program polls", || {
        polled += crowd.a.cq.poll(&mut [Cqe::default()]).unwrap();
        asked() == AT_ONCE + COALESCED + 1
    });
    crowd.complete(AT_ONCE + COALESCED + 1 - polled);
}

#[test]
fn local_doorbells_that_wait_are_rung_though_the_program_is_away() {
    let crowd = many(true);
    let before = crowd.counter("local_requests");
    crowd.write(0..AT_ONCE + COALESCED);
    let all = (AT_ONCE + COALESCED) as u64;
    wait_for("the last request", || crowd.counter("local_requests") - before == all);
}

#[test]
fn a_program_that_asked_for_an_event_leaves_no_local_doorbell() {
    let crowd = many(false);
    let before = crowd.counter("local_requests");
    crowd.a.cq.req_notify(false).unwrap();
    for sent in 0..AT_ONCE + COALESCED {
        crowd.write(sent..sent + 1);
        /* at once, or by another thread that is at the card */
        wait_for("the request", || crowd.counter("local_requests") - before > sent as u64);
    }
}

/// A block has 4096 QPNs. While a card does not know that its frames come to itself it looks into its socket
/// at each post, and so the program finds each completion without ever running the card by a poll.
#[test]
fn a_process_of_two_blocks_settles_though_each_poll_finds_a_completion() {
    let settings = Settings { progress_thread: false, ..wire() };
    let node = Node::new(&settings);
    let small = QpInit { max_send_wr: 1, max_recv_wr: 1, max_inline: 0, ..node.init(QpType::Rc, None) };
    let qps: Vec<Qp> = (0..4100).map(|_| Qp::create(&node.pd, &small).unwrap()).collect();
    let first = &qps[0];
    let other = |qp: &&Qp| qp.number() >> 12 != first.number() >> 12;
    let last = qps.iter().find(other).expect("two blocks");
    connect(&node, first, &node, last);
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
