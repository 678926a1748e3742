//! WRITE and READ that a queue pair executes by itself on the memory of a peer of this host.

use crate::common::*;
use starverbs_core::mr::WindowType;
use starverbs_core::qp::QpAttrMask;
use starverbs_core::{Access, QpState, QpType, SendFlags, SendOp, Sge, WcStatus};
use starverbs_settings::{Link, LinkTrust, Settings};
use starverbs_verbs::{Mw, MwBind, Qp, QpAttr, SendWr};

struct Pair {
    a: Node,
    b: Node,
    qa: Qp,
    qb: Qp,
    port: u16,
}

impl Pair {
    /// A connection over which one request went.
    fn of(settings: &Settings) -> Pair {
        let (a, b) = (Node::new(settings), Node::new(settings));
        let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
        connect(&a, &qa, &b, &qb);
        let pair = Pair { a, b, qa, qb, port: settings.port };
        if settings.link != Link::Udp {
            wait_for("the agreement", || pair.count("local_qps") == 2);
        }
        assert_eq!(pair.run(SendOp::Write, &[pair.a.sge(0, 1)], 0), WcStatus::Success);
        pair
    }

    fn new() -> Pair {
        Pair::of(&settings())
    }

    fn count(&self, name: &str) -> u64 {
        counters(self.port, name).iter().sum()
    }

    fn wr<'a>(&self, op: SendOp, sges: &'a [Sge], at: usize) -> SendWr<'a> {
        SendWr { op, remote_addr: self.b.addr(at), rkey: self.b.mr.rkey(), ..send(1, sges) }
    }

    fn status(&self, wr: &SendWr<'_>) -> WcStatus {
        post(&self.qa, wr).unwrap();
        self.a.completions(1)[0].status
    }

    fn run(&self, op: SendOp, sges: &[Sge], at: usize) -> WcStatus {
        self.status(&self.wr(op, sges, at))
    }

    /// What is done meanwhile, counted.
    fn direct(&self, run: impl FnOnce(&Pair)) -> u64 {
        let before = self.count("local_direct");
        run(self);
        self.count("local_direct") - before
    }
}

#[test]
fn writes_and_reads_are_executed_without_the_peer() {
    const LEN: usize = 30_000;
    let pair = Pair::new();
    let (a, b) = (&pair.a, &pair.b);
    let data: Vec<u8> = (0..LEN).map(|n| ((n * 31) >> 3) as u8).collect();
    a.fill(0, &data);
    let executed = pair.count("local_executed");
    for len in [1, 7, 8, 9, 16, 4096, LEN] {
        let pieces = [a.sge(0, len / 3), a.sge(len / 3, len - len / 3)];
        let back = [a.sge(LEN, len / 2), a.sge(LEN + len / 2, len - len / 2)];
        b.fill(0, &vec![0; LEN]);
        let made = pair.direct(|pair| {
            assert_eq!(pair.run(SendOp::Write, &pieces, 5), WcStatus::Success);
            assert!(b.bytes(5, len) == data[..len], "WRITE of {len}");
            assert_eq!(b.bytes(5 + len, 1), [0]);
            assert_eq!(pair.run(SendOp::Read, &back, 5), WcStatus::Success);
        });
        assert!(a.bytes(LEN, len) == data[..len], "READ of {len}");
        assert_eq!(made, 2, "{len} bytes");
    }
    let made = pair.direct(|pair| {
        post_inline(&pair.qa, &pair.wr(SendOp::Write, &[], 100), b"in the queue").unwrap();
        assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    });
    assert_eq!((made, b.bytes(100, 12)), (1, b"in the queue".to_vec()));
    assert_eq!(pair.count("local_executed"), executed, "the peer's card did nothing");
}

#[test]
fn nobody_is_trusted_where_the_setting_says_so() {
    let pair = Pair::of(&Settings { link_trust: LinkTrust::None, ..settings() });
    let made = pair.direct(|pair| {
        assert_eq!(pair.run(SendOp::Write, &[pair.a.sge(0, 8)], 0), WcStatus::Success);
        assert_eq!(pair.run(SendOp::Read, &[pair.a.sge(0, 8)], 0), WcStatus::Success);
    });
    assert_eq!(made, 0);
}

#[test]
fn mistakes_end_as_on_the_wire() {
    type Mistake = fn(&Pair) -> WcStatus;
    let cases: [(&str, Mistake); 5] = [
        ("a wrong key", |p| {
            let sges = [p.a.sge(0, 8)];
            p.status(&SendWr { rkey: 0x5555, ..p.wr(SendOp::Write, &sges, 0) })
        }),
        ("beyond the region", |p| p.run(SendOp::Read, &[p.a.sge(0, 8)], BUF - 4)),
        ("a key of too few rights", |p| {
            let mr = p.b.reg(0, 4096, Access::LOCAL_WRITE | Access::REMOTE_READ);
            let sges = [p.a.sge(0, 8)];
            p.status(&SendWr { rkey: mr.rkey(), ..p.wr(SendOp::Write, &sges, 0) })
        }),
        ("an own key that is wrong", |p| p.run(SendOp::Write, &[Sge { lkey: 0x7777, ..p.a.sge(0, 8) }], 0)),
        ("a region that has ended", |p| {
            let mr = p.b.reg(0, 4096, all_access());
            let (sges, rkey) = ([p.a.sge(0, 8)], mr.rkey());
            let first = p.status(&SendWr { rkey, ..p.wr(SendOp::Write, &sges, 0) });
            assert_eq!(first, WcStatus::Success);
            mr.dereg().unwrap();
            p.status(&SendWr { rkey, ..p.wr(SendOp::Write, &sges, 0) })
        }),
    ];
    for (what, make) in cases {
        let local = Pair::new();
        assert_eq!(make(&local), make(&Pair::of(&wire())), "{what}");
        assert_eq!(local.qa.state(), QpState::Err, "{what}");
    }
}

#[test]
fn windows_are_the_affair_of_their_card() {
    let pair = Pair::new();
    let (a, b) = (&pair.a, &pair.b);
    a.fill(0, b"a window");
    let mr = b.reg(0, 4096, Access::LOCAL_WRITE | Access::MW_BIND);
    let mw = Mw::alloc(&b.pd, WindowType::Two).unwrap();
    let bind = MwBind { mr: mr.lkey(), addr: b.addr(64), length: 64, access: Access::REMOTE_WRITE };
    let rkey = mw.rkey() ^ 1;
    post(&pair.qb, &mw.bind_wr(1, SendFlags::SIGNALED, rkey, &bind)).unwrap();
    assert_eq!(b.completions(1)[0].status, WcStatus::Success);
    let sges = [a.sge(0, 8)];
    let made = pair.direct(|pair| {
        let write = SendWr { rkey, ..pair.wr(SendOp::Write, &sges, 64) };
        assert_eq!(pair.status(&write), WcStatus::Success);
        b.post_recv(&pair.qb, 3, 1024, 64).unwrap();
        assert_eq!(pair.status(&SendWr { op: SendOp::SendInv, imm: rkey, ..write }), WcStatus::Success);
        assert_eq!(pair.status(&write), WcStatus::RemAccessErr);
    });
    assert_eq!((made, b.bytes(64, 8)), (0, b"a window".to_vec()));
}

#[test]
fn a_queue_pair_in_error_is_not_written_any_more() {
    let pair = Pair::new();
    let (a, b) = (&pair.a, &pair.b);
    a.fill(0, b"too late");
    assert_eq!(pair.direct(|p| assert_eq!(p.run(SendOp::Write, &[a.sge(0, 8)], 0), WcStatus::Success)), 1);
    to_err(&pair.qb);
    let made = pair.direct(|p| assert_eq!(p.run(SendOp::Write, &[a.sge(0, 8)], 64), WcStatus::RetryExcErr));
    assert_eq!((made, b.bytes(64, 8)), (0, vec![0; 8]));
}

#[test]
fn a_queue_pair_of_changed_rights_is_asked() {
    let pair = Pair::new();
    let change = |access| {
        pair.qb.modify(&QpAttr { access, ..QpAttr::default() }, QpAttrMask::ACCESS_FLAGS).unwrap();
    };
    let write = |pair: &Pair| pair.run(SendOp::Write, &[pair.a.sge(0, 8)], 0);
    change(all_access().difference(Access::LOCAL_WRITE));
    assert_eq!(pair.direct(|pair| assert_eq!(write(pair), WcStatus::Success)), 1, "the same rights");
    change(Access::REMOTE_WRITE);
    assert_eq!(pair.direct(|pair| assert_eq!(write(pair), WcStatus::Success)), 0);
    change(Access::REMOTE_READ);
    assert_eq!(pair.direct(|pair| assert_eq!(write(pair), WcStatus::RemAccessErr)), 0);
}

#[test]
fn what_stands_behind_a_send_waits_for_it() {
    let pair = Pair::new();
    let (a, b) = (&pair.a, &pair.b);
    a.fill(0, b"in order");
    let sges = [a.sge(0, 8)];
    let made = pair.direct(|pair| {
        post(&pair.qa, &send(1, &sges)).unwrap();
        post(&pair.qa, &SendWr { wr_id: 2, ..pair.wr(SendOp::Write, &sges, 500) }).unwrap();
        wait_for("an RNR NAK", || {
            assert_eq!(a.cq.poll(&mut [Default::default()]).unwrap(), 0);
            pair.count("rcvd_rnr") > 0
        });
        assert_eq!(b.bytes(500, 8), [0; 8], "the WRITE stands behind the SEND");
        b.post_recv(&pair.qb, 9, 100, 64).unwrap();
        assert_eq!(a.completions(2).iter().map(|cqe| cqe.wr_id).collect::<Vec<_>>(), [1, 2]);
    });
    assert_eq!((made, b.bytes(500, 8)), (0, b"in order".to_vec()));
}

#[test]
fn completions_come_in_order_and_only_where_they_are_wanted() {
    let pair = Pair::new();
    let a = &pair.a;
    a.fill(0, b"once and");
    let half = BUF / 2;
    let (put, got) = ([a.sge(0, half)], [a.sge(half, half)]);
    let made = pair.direct(|pair| {
        let mut poster = pair.qa.post_send();
        poster.push(&SendWr { flags: SendFlags::empty(), ..pair.wr(SendOp::Write, &put, 7) }).unwrap();
        poster.push(&SendWr { wr_id: 3, ..pair.wr(SendOp::Read, &got, 7) }).unwrap();
        poster.push(&SendWr { wr_id: 4, ..pair.wr(SendOp::Write, &put, 70) }).unwrap();
        poster.ring();
        assert_eq!(a.completions(2).iter().map(|cqe| cqe.wr_id).collect::<Vec<_>>(), [3, 4]);
    });
    assert_eq!((made, a.bytes(half, 8)), (3, b"once and".to_vec()));
}

#[test]
fn short_requests_in_a_row_go_by_the_ring() {
    let pair = Pair::new();
    let a = &pair.a;
    let put = [a.sge(0, 8)];
    let made = pair.direct(|pair| {
        let mut poster = pair.qa.post_send();
        for at in 0..8 {
            poster.push(&pair.wr(SendOp::Write, &put, 8 * at)).unwrap();
        }
        poster.ring();
        a.completions(8);
    });
    assert_eq!(made, 1, "the first one stands alone");
}
