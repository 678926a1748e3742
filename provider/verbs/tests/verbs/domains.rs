//! Parent domains and thread domains, and what completion queues may be asked for beyond the plain ones.

use crate::common::*;
use starverbs_core::{Cqe, QpType, SendFlags, WcStatus};
use starverbs_verbs::{Context, Cq, CqInit, Pd, Qp, QpInit, Srq, Td, raw_clock, wallclock};

const EBUSY: i32 = 16;
const EINVAL: i32 = 22;

fn errno(result: starverbs_verbs::Result<()>) -> i32 {
    result.expect_err("must fail").errno()
}

#[test]
fn a_parent_domain_is_in_use_as_long_as_its_objects() {
    let (a, b) = Node::pair();
    let td = Td::alloc(&a.ctx).unwrap();
    let parent = Pd::parent_of(&a.pd, Some(&td), None).unwrap();
    assert_eq!(parent.id(), a.pd.id());
    assert_eq!(Pd::parent_of(&parent, None, None).err().unwrap().errno(), EINVAL, "a parent of a parent");
    assert_eq!((errno(td.dealloc()), errno(a.pd.dealloc())), (EBUSY, EBUSY));

    /* a QP of the parent domain uses an MR of the plain one */
    let cq = Cq::create_ex(&a.ctx, &CqInit { cqe: 16, parent: Some(&parent), ..CqInit::default() }).unwrap();
    let srq = Srq::create(&parent, 4, 1, 0, 0).unwrap();
    let qa = Qp::create(&parent, &QpInit { send_cq: &cq, recv_cq: &cq, ..a.init(QpType::Rc, None) }).unwrap();
    let qb = b.qp(QpType::Rc);
    connect(&a, &qa, &b, &qb);
    b.post_recv(&qb, 1, 0, 100).unwrap();
    post(&qa, &send(5, &[a.sge(0, 9)])).unwrap();
    assert_eq!(poll(&cq, 1)[0].wr_id, 5);
    assert_eq!(b.completions(1)[0].byte_len, 9);

    let mr = reg(&parent, &a.buf[..64], all_access()).unwrap();
    for object in [Box::new(qa) as Box<dyn std::any::Any>, Box::new(srq), Box::new(cq), Box::new(mr)] {
        assert_eq!(errno(parent.dealloc()), EBUSY);
        drop(object);
    }
    parent.dealloc().unwrap();
    assert_eq!(errno(parent.dealloc()), EINVAL, "gone already");
    td.dealloc().unwrap();
    assert_eq!(errno(a.pd.dealloc()), EBUSY, "the node's MR is still there");
}

#[test]
fn a_completion_queue_takes_parent_domains_only() {
    let (a, _) = Node::pair();
    let plain = Cq::create_ex(&a.ctx, &CqInit { cqe: 16, parent: Some(&a.pd), ..CqInit::default() });
    assert_eq!(plain.err().unwrap().errno(), EINVAL);
}

/// Posts `count` sends of nothing that the peer never receives: a QP in error flushes them all at once.
fn flushed(node: &Node, cq: &Cq, count: u64) -> Qp {
    let qp =
        Qp::create(&node.pd, &QpInit { send_cq: cq, recv_cq: cq, ..node.init(QpType::Rc, None) }).unwrap();
    to_init(&qp);
    to_rtr(&qp, way_to(node), qp.number());
    to_rts(&qp);
    to_err(&qp);
    for id in 0..count {
        post(&qp, &send(id, &[])).unwrap();
    }
    qp
}

#[test]
fn stamps_tell_when_completions_were_made() {
    let (a, _) = Node::pair();
    let cq = Cq::create_ex(&a.ctx, &CqInit { cqe: 16, stamped: true, ..CqInit::default() }).unwrap();
    let before = raw_clock();
    let _qp = flushed(&a, &cq, 3);
    let mut stamps = Vec::new();
    let mut note = |cqe: &Cqe, stamp| {
        assert_eq!(cqe.status, WcStatus::WrFlushErr);
        stamps.push(stamp);
    };
    let mut taken = 0;
    wait_for("the completions", || {
        taken += cq.poll_stamped(16, &mut note).unwrap();
        taken == 3
    });
    let after = raw_clock();
    assert!(stamps.is_sorted() && before <= stamps[0] && stamps[2] <= after, "{before} {stamps:?} {after}");
    /* the other clock: after this was written, and the same distance apart but for the time between two
     * looks */
    let (first, last) = (wallclock(stamps[0]), wallclock(stamps[2]));
    assert!(first > 1_700_000_000_000_000_000 && last < first + 60_000_000_000);
}

#[test]
fn a_queue_that_ignores_overruns_goes_on() {
    let (a, _) = Node::pair();
    let init = CqInit { cqe: 4, ignore_overrun: true, ..CqInit::default() };
    let cq = Cq::create_ex(&a.ctx, &init).unwrap();
    let qp = flushed(&a, &cq, u64::from(cq.depth()) + 3);
    assert_eq!(poll(&cq, 4).iter().map(|cqe| cqe.wr_id).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(cq.poll(&mut [Cqe::default()]).unwrap(), 0, "what found it full is lost, and nothing else");
    let last = starverbs_verbs::SendWr { flags: SendFlags::SIGNALED, ..send(99, &[]) };
    post(&qp, &last).unwrap();
    assert_eq!(poll(&cq, 1)[0].wr_id, 99);
}

#[test]
fn handles_of_one_domain_share_its_parents_and_its_end() {
    let ctx = Context::open_with(settings()).unwrap();
    let own = Pd::alloc(&ctx).unwrap();
    let import = Pd::import(&ctx, own.handle()).unwrap();
    let parent = Pd::parent_of(&own, None, None).unwrap();
    assert_eq!(errno(import.dealloc()), EBUSY, "the other handle has a parent domain");
    parent.dealloc().unwrap();
    import.dealloc().unwrap();
    assert_eq!(errno(Pd::import(&ctx, own.handle()).map(drop)), EINVAL);

    /* the number is used again, by a domain that the old handles have nothing to do with */
    let next = Pd::alloc(&ctx).unwrap();
    assert_eq!(next.handle(), own.handle());
    assert_eq!((errno(own.dealloc()), errno(import.dealloc())), (EINVAL, EINVAL));
    assert_eq!(errno(Pd::parent_of(&own, None, None).map(drop)), EINVAL);
    drop(own);
    Pd::import(&ctx, next.handle()).unwrap();
    next.dealloc().unwrap();
}
