//! Frames to processes of this host that go through memory: UD and XRC, with what the wire would have given.

use crate::common::*;
use starverbs_core::{Cqe, QpType, SendFlags, SendOp, WcStatus};
use starverbs_settings::{FaultSpec, Settings};
use starverbs_verbs::{Ah, Cq, Qp, RecvWr, SendWr, Srq, Xrcd};

/// Two cards and a queue pair of each.
struct Pair {
    a: Node,
    b: Node,
    qa: Qp,
    qb: Qp,
    ah: Ah,
    port: u16,
}

impl Pair {
    fn of(settings: &Settings) -> Pair {
        let (a, b) = (Node::new(settings), Node::new(settings));
        let (qa, qb) = (a.qp(QpType::Ud), b.qp(QpType::Ud));
        ud_ready(&qa);
        ud_ready(&qb);
        let ah = Ah::create(&a.pd, &way_to(&b)).unwrap();
        Pair { a, b, qa, qb, ah, port: settings.port }
    }

    fn count(&self, name: &str) -> u64 {
        counters(self.port, name).iter().sum()
    }

    /// Sends `len` bytes to `b`; they have left.
    fn send(&self, len: usize) {
        let sges = [self.a.sge(0, len)];
        let (ah, remote_qpn) = (self.ah.id(), self.qb.number());
        post(&self.qa, &SendWr { ah, remote_qpn, qkey: QKEY, ..send(1, &sges) }).unwrap();
        assert_eq!(self.a.completions(1)[0].status, WcStatus::Success);
    }
}

#[test]
fn datagrams_go_without_a_system_call() {
    let pair = Pair::of(&local());
    let (a, b) = (&pair.a, &pair.b);
    /* the first one finds the way */
    for (round, len) in [8, 1000, 4096].into_iter().enumerate() {
        let sent = ["tx_packets", "tx_local_frames"].map(|name| pair.count(name));
        let calls = pair.count("tx_syscalls");
        a.fill(0, &vec![round as u8 + 1; len]);
        b.post_recv(&pair.qb, 7, 0, 4200).unwrap();
        pair.send(len);
        let got = b.completions(1)[0];
        assert_eq!((got.status, got.byte_len as usize), (WcStatus::Success, len + 40));
        assert_eq!(b.bytes(40, len), vec![round as u8 + 1; len]);
        let now = ["tx_packets", "tx_local_frames"].map(|name| pair.count(name));
        assert_eq!(now[0] - sent[0], now[1] - sent[1], "all by memory");
        assert_eq!(pair.count("tx_syscalls"), calls);
    }
    wait_for("the count", || pair.count("rx_local_frames") == pair.count("tx_local_frames"));
    assert_eq!(pair.count("handed_in"), 0, "none was on a wire");
}

#[test]
fn messages_of_many_packets_come_whole() {
    let settings = local();
    let (a, b, len) = (Node::new(&settings), Node::new(&settings), BUF / 2);
    let domain = Xrcd::open(&b.ctx, None, true, false).unwrap();
    let cq = Cq::create(&b.ctx, 16, None, 0).unwrap();
    let srq = Srq::create_xrc(&b.pd, &domain, &cq, 4, 1, 0).unwrap();
    let recv = domain.create_qp(&b.ctx, 5).unwrap();
    let sender = Qp::create(&a.pd, &a.init(QpType::XrcSend, None)).unwrap();
    connect_xrc(&a, &sender, &b, &recv);
    let data: Vec<u8> = (0..len).map(|n| ((n * 7) >> 3) as u8).collect();
    a.fill(0, &data);
    let sges = [a.sge(0, len)];
    srq.post(&RecvWr { wr_id: 3, sges: &[b.sge(len, len)] }).unwrap();
    let write = SendWr { op: SendOp::Write, remote_addr: b.addr(0), rkey: b.mr.rkey(), ..send(1, &sges) };
    post(&sender, &SendWr { flags: SendFlags::empty(), ..write }).unwrap();
    post(&sender, &SendWr { remote_qpn: srq.number(), ..send(2, &sges) }).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    assert_eq!(poll(&cq, 1)[0].byte_len as usize, len);
    assert!(b.bytes(0, len) == data && b.bytes(len, len) == data);
    let frames: u64 = counters(settings.port, "tx_local_frames").iter().sum();
    assert!(frames >= 2 * (len / 1024) as u64);
}

/// What finds the ring full goes by the wire, and what finds its socket full is lost: nobody waits.
#[test]
fn nobody_waits_for_a_process_that_does_not_read() {
    let settings = Settings { progress_thread: false, ..local() };
    let pair = Pair::of(&settings);
    for _ in 0..2000 {
        pair.send(1000);
    }
    let (all, local) = (pair.count("tx_packets"), pair.count("tx_local_frames"));
    assert!(local > 500 && all - local > 500, "{local} of {all} by memory");
    for wr_id in 0..16 {
        pair.b.post_recv(&pair.qb, wr_id, 0, 1100).unwrap();
    }
    assert!(pair.b.completions(16).iter().all(|cqe| cqe.byte_len == 1040));
}

#[test]
fn the_wire_has_what_was_asked_of_it() {
    let hurt = FaultSpec { duplicate: 0.001, ..FaultSpec::default() };
    for settings in [wire(), Settings { fault: hurt, ..local() }] {
        let pair = Pair::of(&settings);
        pair.b.post_recv(&pair.qb, 7, 0, 100).unwrap();
        pair.send(8);
        assert_eq!(pair.b.completions(1)[0].byte_len, 48);
        assert_eq!(pair.count("tx_local_frames"), 0);
    }
}

#[test]
fn a_process_that_ends_takes_nothing_with_it() {
    let settings = local();
    let Pair { a, b, qa, qb, ah, port } = Pair::of(&settings);
    b.post_recv(&qb, 7, 0, 100).unwrap();
    let pair = Pair { a, b, qa, qb, ah, port };
    pair.send(8);
    assert_eq!(pair.b.completions(1)[0].wr_id, 7);
    let Pair { a, b, qa, qb, ah, .. } = pair;
    let number = qb.number();
    drop(qb);
    b.ctx.close();
    drop(b);
    let sges = [a.sge(0, 8)];
    let to = |remote_qpn| SendWr { ah: ah.id(), remote_qpn, qkey: QKEY, ..send(1, &sges) };
    for _ in 0..100 {
        post(&qa, &to(number)).unwrap();
        assert_eq!(a.completions(1)[0].status, WcStatus::Success, "a datagram that nobody gets");
    }
    let c = Node::new(&settings);
    let qc = c.qp(QpType::Ud);
    ud_ready(&qc);
    c.post_recv(&qc, 9, 0, 100).unwrap();
    /* the wire may lose the first ones, while the two find each other */
    wait_for("one of many", || {
        post(&qa, &to(qc.number())).unwrap();
        a.completions(1);
        c.cq.poll(&mut [Cqe::default()]).unwrap() == 1
    });
}
