//! What a program must not do, and what it gets: errnos, flushed work, events.

use crate::common::*;
use starverbs_core::{Access, QpState, QpType, SendFlags, SendOp, Sge, WcStatus};
use starverbs_settings::{Settings, StarPreference};
use starverbs_verbs::{
    Ah, AhAttr, CompChannel, Cq, Mr, Pd, Preference, Qp, QpInit, RecvWr, SendWr, Settled, Srq, VerbsEvent,
    kind,
};

fn errno<T>(result: starverbs_verbs::Result<T>) -> i32 {
    result.err().map_or(0, |error| error.errno())
}

#[test]
fn objects_in_use_are_not_destroyed() {
    let node = Node::new(&settings());
    let srq = Srq::create(&node.pd, 4, 1, 0, 0).unwrap();
    let qp = node.qp_with_srq(&srq);
    assert_eq!(errno(node.pd.dealloc()), libc::EBUSY);
    assert_eq!(errno(node.cq.destroy()), libc::EBUSY);
    assert_eq!(errno(srq.destroy()), libc::EBUSY);
    assert_eq!(errno(node.channel.destroy()), libc::EBUSY);
    qp.destroy().unwrap();
    assert_eq!(errno(qp.destroy()), libc::EINVAL);
    srq.destroy().unwrap();
    node.cq.destroy().unwrap();
    node.channel.destroy().unwrap();
    assert_eq!(errno(node.pd.dealloc()), libc::EBUSY, "the memory region is left");
    node.mr.dereg().unwrap();
    node.pd.dealloc().unwrap();
    assert_eq!(errno(node.pd.dealloc()), libc::EINVAL);
}

#[test]
fn limits_and_arguments_are_checked() {
    let node = Node::new(&settings());
    assert_eq!(errno(Cq::create(&node.ctx, 0, None, 0)), libc::EINVAL);
    assert_eq!(errno(Cq::create(&node.ctx, u32::MAX, None, 0)), libc::EINVAL);
    assert_eq!(errno(Srq::create(&node.pd, u32::MAX, 1, 0, 0)), libc::EINVAL);
    assert_eq!(errno(Srq::create(&node.pd, 4, 1000, 0, 0)), libc::EINVAL);
    let base = node.init(QpType::Rc, None);
    for init in [
        QpInit { max_send_wr: u32::MAX, ..base },
        QpInit { max_recv_wr: u32::MAX, ..base },
        QpInit { max_send_sge: 1000, ..base },
        QpInit { max_inline: 1 << 20, ..base },
    ] {
        assert_eq!(errno(Qp::create(&node.pd, &init)), libc::EINVAL);
    }
    let srq = Srq::create(&node.pd, 4, 1, 0, 0).unwrap();
    assert_eq!(errno(Qp::create(&node.pd, &node.init(QpType::XrcSend, Some(&srq)))), libc::EINVAL);
    for qp_type in [QpType::Uc, QpType::Ud] {
        assert!(Qp::create(&node.pd, &node.init(qp_type, Some(&srq))).is_ok());
    }
    assert_eq!(errno(node.ctx.query_port(2)), libc::EINVAL);
    let gids = node.ctx.query_port(1).unwrap().gid_tbl_len;
    assert_eq!(errno(node.ctx.query_gid(1, gids - 1)), libc::ENODATA, "an empty place");
    assert_eq!(errno(node.ctx.query_gid(1, gids)), libc::EINVAL, "past the end");
    assert_eq!(errno(node.ctx.query_pkey(1, 1)), libc::EINVAL);
    let way = way_to(&node);
    for ah in [
        AhAttr { is_global: false, ..way },
        AhAttr { port: 0, ..way },
        AhAttr { sgid_index: 200, ..way },
        AhAttr { dgid: starverbs_core::Gid([0xfe; 16]), ..way },
    ] {
        assert_eq!(errno(Ah::create(&node.pd, &ah)), libc::EINVAL);
    }
    // SAFETY: they are refused.
    let [far, wraps] = unsafe {
        [Mr::reg(&node.pd, 64, 64, 64, Access::empty()), Mr::reg(&node.pd, u64::MAX, 64, 0, Access::empty())]
    };
    assert_eq!((errno(far), errno(wraps)), (libc::EFAULT, libc::EINVAL));
}

#[test]
fn posting_needs_the_right_state_and_room() {
    let (a, b) = Node::pair();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    let one = [a.sge(0, 8)];
    assert_eq!(errno(post(&qa, &send(1, &one))), libc::EINVAL, "RESET");
    assert_eq!(errno(a.post_recv(&qa, 1, 0, 8)), libc::EINVAL, "RESET");
    to_init(&qa);
    assert_eq!(errno(post(&qa, &send(1, &one))), libc::EINVAL, "INIT");
    assert_eq!(errno(a.post_recv(&qa, 1, 0, 8)), 0, "INIT takes receives");
    to_rtr(&qa, way_to(&b), qb.number());
    assert_eq!(errno(post(&qa, &send(1, &one))), libc::EINVAL, "RTR");
    to_rts(&qa);
    let many = [a.sge(0, 1); 40];
    assert_eq!(errno(post(&qa, &send(1, &many))), libc::EINVAL, "too many SGEs");
    assert_eq!(errno(post_inline(&qa, &send(1, &[]), &[0; 60_000])), libc::EINVAL, "inline too long");
    let inline = SendWr { flags: SendFlags::INLINE, ..send(1, &one) };
    assert_eq!(errno(post(&qa, &inline)), libc::EINVAL, "inline, and nobody vouches for the data");
    /* the peer is not ready, so nothing completes and the queue fills */
    let mut room = 0;
    while errno(post(&qa, &send(1, &one))) == 0 {
        room += 1;
    }
    assert_eq!(room, qa.caps().max_send_wr);
    assert_eq!(errno(post(&qa, &send(1, &one))), libc::ENOMEM);
    let srq = Srq::create(&a.pd, 2, 1, 0, 0).unwrap();
    for expect in [0, 0, libc::ENOMEM] {
        assert_eq!(errno(srq.post(&RecvWr { wr_id: 0, sges: &one })), expect);
    }
    let ud = a.qp(QpType::Ud);
    ud_ready(&ud);
    assert_eq!(errno(post(&ud, &SendWr { op: SendOp::Write, ..send(1, &one) })), libc::EINVAL);
}

#[test]
fn work_on_a_failed_qp_is_flushed_late_posts_too() {
    let (a, b) = Node::pair();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    a.post_recv(&qa, 1, 0, 8).unwrap();
    to_err(&qa);
    let flushed = a.completions(1)[0];
    assert_eq!((flushed.wr_id, flushed.status), (1, WcStatus::WrFlushErr));
    a.post_recv(&qa, 2, 0, 8).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::WrFlushErr);
    post(&qa, &send(3, &[a.sge(0, 8)])).unwrap();
    a.post_recv(&qa, 4, 0, 8).unwrap();
    let rest = a.completions(2);
    assert!(rest.iter().all(|cqe| cqe.status == WcStatus::WrFlushErr));
    assert_eq!(qa.state(), QpState::Err);
    /* through RESET it is as new, and its old completions are gone */
    a.post_recv(&qa, 5, 0, 8).unwrap();
    let reset = starverbs_verbs::QpAttr { state: QpState::Reset, ..Default::default() };
    qa.modify(&reset, starverbs_core::qp::QpAttrMask::STATE).unwrap();
    assert_eq!(a.cq.poll(&mut [Default::default()]).unwrap(), 0);
    qb.modify(&reset, starverbs_core::qp::QpAttrMask::STATE).unwrap();
    connect(&a, &qa, &b, &qb);
    b.post_recv(&qb, 6, 0, 8).unwrap();
    post(&qa, &send(7, &[a.sge(0, 8)])).unwrap();
    assert_eq!(b.completions(1)[0].wr_id, 6);
    let sent = a.completions(1)[0];
    assert_eq!((sent.wr_id, sent.status), (7, WcStatus::Success), "what was posted before is forgotten");
}

#[test]
fn a_wrong_key_fails_the_request_and_both_qps() {
    let (a, b) = Node::pair();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    let sges = [a.sge(0, 8)];
    let wr = SendWr { op: SendOp::Write, remote_addr: b.addr(0), rkey: 0x5555, ..send(1, &sges) };
    post(&qa, &wr).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::RemAccessErr);
    assert_eq!(qa.state(), QpState::Err);
    let event = b.ctx.get_async_event().unwrap();
    assert!(matches!(event, VerbsEvent::Qp { cookie: 99, .. }), "{event:?}");
    let local = Sge { addr: 64, len: 8, lkey: 0x7777 };
    let (c, d) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &c, &b, &d);
    post(&c, &send(2, &[local])).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::LocProtErr);
}

#[test]
fn nobody_there_is_found_out() {
    let (a, b) = Node::pair();
    let qa = a.qp(QpType::Rc);
    to_init(&qa);
    to_rtr(&qa, way_to(&b), 0x12);
    to_rts_with(&qa, 8, 7, 7);
    post(&qa, &send(1, &[a.sge(0, 8)])).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::RetryExcErr);
}

#[test]
fn an_overrun_is_told_and_the_queue_fails() {
    let (a, b) = Node::pair();
    let small = Cq::create(&a.ctx, 2, None, 4321).unwrap();
    let init = QpInit { send_cq: &small, ..a.init(QpType::Rc, None) };
    let (qa, qb) = (Qp::create(&a.pd, &init).unwrap(), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    let sges = [a.sge(0, 8)];
    for id in 0..5 {
        let write =
            SendWr { op: SendOp::Write, remote_addr: b.addr(0), rkey: b.mr.rkey(), ..send(id, &sges) };
        post(&qa, &write).unwrap();
    }
    /* the thread takes the ACKs, as nobody polls */
    loop {
        if let VerbsEvent::Cq { kind: what, cookie } = a.ctx.get_async_event().unwrap() {
            assert_eq!((what, cookie), (kind::CQ_ERR, 4321));
            break;
        }
    }
    assert_eq!(poll(&small, 2).len(), 2, "what fitted is there");
    assert_eq!(errno(small.poll(&mut [Default::default()])), libc::EIO);
}

#[test]
fn a_queue_grows_with_what_it_holds() {
    let (a, b) = Node::pair();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    for id in 0..6 {
        b.post_recv(&qb, id, 0, 8).unwrap();
        post(&qa, &send(id, &[a.sge(0, 8)])).unwrap();
    }
    a.completions(6);
    /* acknowledged, so all six are in the queue */
    assert_eq!(errno(b.cq.resize(4)), libc::EINVAL);
    b.cq.resize(1000).unwrap();
    assert!(b.cq.depth() >= 1000);
    assert_eq!(b.completions(6).iter().map(|cqe| cqe.wr_id).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    assert_eq!(errno(b.cq.resize(0)), libc::EINVAL);
}

#[test]
fn a_forked_child_is_refused() {
    let node = Node::new(&settings());
    // SAFETY: the child calls only what does not allocate or lock, and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = node.cq.poll(&mut [Default::default()]).map_err(|error| error.errno());
        // SAFETY: ends the child without running anything of the parent's.
        unsafe { libc::_exit(if refused == Err(libc::EIO) { 7 } else { 8 }) };
    }
    let mut status = 0;
    // SAFETY: waits for the child just made.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(libc::WEXITSTATUS(status), 7);
    assert_eq!(node.cq.poll(&mut [Default::default()]).unwrap(), 0, "the parent's card lives on");
}

#[test]
fn sleepers_are_woken_and_solicited_only_if_they_asked() {
    let (a, b) = Node::pair();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    for id in 0..3 {
        b.post_recv(&qb, id, 0, 8).unwrap();
    }
    let sges = [a.sge(0, 8)];
    // SAFETY: sets a flag of a descriptor.
    unsafe { libc::fcntl(b.channel.fd(), libc::F_SETFL, libc::O_NONBLOCK) };
    assert_eq!(errno(b.channel.get_event()), libc::EAGAIN);
    b.cq.req_notify(true).unwrap();
    post(&qa, &send(1, &sges)).unwrap();
    a.completions(1);
    assert_eq!(errno(b.channel.get_event()), libc::EAGAIN, "not solicited");
    post(&qa, &SendWr { flags: SendFlags::SIGNALED | SendFlags::SOLICITED, ..send(2, &sges) }).unwrap();
    a.completions(1);
    wait_for("the event", || b.channel.get_event().is_ok_and(|cookie| cookie == 77));
    // SAFETY: as above.
    unsafe { libc::fcntl(b.channel.fd(), libc::F_SETFL, 0) };
    b.cq.req_notify(false).unwrap();
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| b.channel.get_event().unwrap());
        post(&qa, &send(3, &sges)).unwrap();
        assert_eq!(sleeper.join().unwrap(), 77);
    });
    assert_eq!(b.completions(3).len(), 3);
    let other = CompChannel::create(&b.ctx).unwrap();
    assert_ne!(other.fd(), b.channel.fd());
    assert!(Pd::alloc(&b.ctx).is_ok());
}

#[test]
fn closed_cards_are_in_nobodys_way() {
    let settings = settings();
    let closed: Vec<Node> = (0..24).map(|_| Node::new(&settings)).collect();
    closed.iter().for_each(|node| node.ctx.close());
    let (a, b) = (Node::new(&settings), Node::new(&settings));
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    for id in 0..16 {
        /* who comes and goes changes the others' places at the port */
        drop(Node::new(&settings));
        b.post_recv(&qb, id, 0, 8).unwrap();
        post(&qa, &send(id, &[a.sge(0, 8)])).unwrap();
        assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    }
    assert_eq!(b.completions(16).len(), 16);
    /* what is left of a closed card is handles */
    assert!(closed.iter().all(|node| node.mr.dereg().is_ok() && node.pd.dealloc().is_ok()));
}

#[test]
fn a_role_is_for_rc_alone() {
    let card = Settings { star: StarPreference::Auto, ..settings() };
    let node = Node::new(&card);
    let made = |init: &QpInit<'_>| Qp::create(&node.pd, init);
    let rc = node.init(QpType::Rc, None);
    assert_eq!(made(&rc).unwrap().preference(), Preference::Auto, "what the setting says");
    for preference in [Preference::Off, Preference::Auto, Preference::Stateless, Preference::Stateful] {
        let qp = made(&QpInit { star: Some(preference), ..rc }).unwrap();
        let star = qp.star().unwrap();
        let role = if preference == Preference::Off { Settled::Plain } else { Settled::Waiting };
        assert_eq!((qp.preference(), star.preference, star.role), (preference, preference, role));
        for qp_type in [QpType::Uc, QpType::Ud] {
            let other = QpInit { star: Some(preference), ..node.init(qp_type, None) };
            match preference {
                Preference::Off => assert_eq!(made(&other).unwrap().preference(), Preference::Off),
                _ => assert_eq!(errno(made(&other)), libc::EOPNOTSUPP, "{qp_type:?}, {preference:?}"),
            }
        }
    }
    let ud = made(&node.init(QpType::Ud, None)).unwrap();
    assert_eq!(
        (ud.preference(), ud.star().unwrap().role),
        (Preference::Off, Settled::Plain),
        "the setting is for RC"
    );
}
