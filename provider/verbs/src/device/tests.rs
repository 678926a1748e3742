//! What the objects promise whatever the device: each test runs on the card in software and on one that fails
//! every request.

use std::sync::atomic::Ordering;

use starverbs_core::mr::WindowType;
use starverbs_core::qp::QpAttrMask;
use starverbs_core::{Access, AvId, Cqe, QpState, QpType, SendFlags, SendOp, Sge, WcStatus};
use starverbs_free_port::free_port;
use starverbs_settings::Settings;

use super::Device;
use super::failing::Failing;
use crate::{
    Ah, AhAttr, CompChannel, Context, Cq, Moderation, Mr, Mw, Pd, Qp, QpAttr, QpInit, RecvWr, Result, SendWr,
    Srq,
};

/// Runs `test` on each device.
fn on_each(test: impl Fn(&Context)) {
    let settings = || {
        let addrs = Some(vec!["127.0.0.1".parse().unwrap()]);
        Settings { port: free_port(), addrs, ..Settings::default() }
    };
    test(&Context::open_with(settings()).unwrap());
    let failing = Context::on(|_| Failing::open(settings())).unwrap();
    assert!(matches!(failing.device().unwrap(), Device::Failing(_)));
    test(&failing);
}

/// The errno of a call that fails.
fn errno<T>(result: Result<T>) -> i32 {
    result.err().map_or(0, |error| error.errno())
}

fn init<'a>(cq: &'a Cq, srq: Option<&'a Srq>) -> QpInit<'a> {
    QpInit {
        qp_type: QpType::Rc,
        send_cq: cq,
        recv_cq: cq,
        srq,
        max_send_wr: 4,
        max_recv_wr: 4,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline: 0,
        sq_sig_all: true,
        block_own_multicast: false,
        star: None,
        rpc: false,
        cookie: 5,
    }
}

/// A SEND without data.
pub(crate) fn send(wr_id: u64) -> SendWr<'static> {
    SendWr {
        wr_id,
        op: SendOp::Send,
        flags: SendFlags::SIGNALED,
        imm: 0,
        sges: &[],
        remote_addr: 0,
        rkey: 0,
        compare_add: 0,
        swap: 0,
        ah: AvId(0),
        remote_qpn: 0,
        qkey: 0,
    }
}

fn post(qp: &Qp, wr_id: u64) -> Result<()> {
    qp.post_send().push(&send(wr_id))
}

fn post_recv(qp: &Qp, wr_id: u64) -> Result<()> {
    qp.post_recv().push(&RecvWr { wr_id, sges: &[] })
}

fn to(qp: &Qp, state: QpState) {
    let mut mask = QpAttrMask::STATE;
    if state == QpState::Init {
        mask |= QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::ACCESS_FLAGS;
    }
    qp.modify(&QpAttr { state, port_num: 1, ..QpAttr::default() }, mask).unwrap();
}

fn poll(cq: &Cq, count: usize) -> Vec<Cqe> {
    let mut all = Vec::new();
    while all.len() < count {
        let mut out = [Cqe::default(); 8];
        let got = cq.poll(&mut out[..(count - all.len()).min(8)]).unwrap();
        all.extend_from_slice(&out[..got]);
    }
    all
}

/// For local use, of bytes that nothing is posted for.
fn region(pd: &Pd, bytes: &[u8; 64]) -> Mr {
    // SAFETY: no request names it.
    unsafe { Mr::reg(pd, bytes.as_ptr() as u64, 64, 0, Access::LOCAL_WRITE) }.unwrap()
}

fn address(ctx: &Context) -> AhAttr {
    AhAttr { dgid: ctx.query_gid(1, 0).unwrap().gid, is_global: true, port: 1, ..AhAttr::default() }
}

#[test]
fn a_domain_outlives_what_is_made_in_it() {
    on_each(|ctx| {
        let (pd, buf) = (Pd::alloc(ctx).unwrap(), [0u8; 64]);
        let busy = || assert_eq!(errno(pd.dealloc()), libc::EBUSY);
        let mr = region(&pd, &buf);
        busy();
        mr.dereg().unwrap();
        let mw = Mw::alloc(&pd, WindowType::One).unwrap();
        busy();
        mw.dealloc().unwrap();
        let ah = Ah::create(&pd, &address(ctx)).unwrap();
        busy();
        ah.destroy().unwrap();
        let srq = Srq::create(&pd, 4, 1, 0, 1).unwrap();
        busy();
        srq.destroy().unwrap();
        let parent = Pd::parent_of(&pd, None, None).unwrap();
        busy();
        parent.dealloc().unwrap();
        pd.dealloc().unwrap();
        assert_eq!(errno(Mw::alloc(&pd, WindowType::One)), libc::EINVAL);
    });
}

#[test]
fn what_has_ended_ends_no_more() {
    on_each(|ctx| {
        let (pd, buf) = (Pd::alloc(ctx).unwrap(), [0u8; 64]);
        let cq = Cq::create(ctx, 8, None, 0).unwrap();
        let mr = region(&pd, &buf);
        let (mw, ah) = (Mw::alloc(&pd, WindowType::Two).unwrap(), Ah::create(&pd, &address(ctx)).unwrap());
        let srq = Srq::create(&pd, 4, 1, 0, 1).unwrap();
        let qp = Qp::create(&pd, &init(&cq, Some(&srq))).unwrap();
        assert_eq!(errno(srq.destroy()), libc::EBUSY);
        assert_eq!(errno(cq.destroy()), libc::EBUSY);
        qp.destroy().unwrap();
        srq.destroy().unwrap();
        cq.destroy().unwrap();
        mr.dereg().unwrap();
        mw.dealloc().unwrap();
        ah.destroy().unwrap();
        pd.dealloc().unwrap();
        let again = [qp.destroy(), srq.destroy(), mr.dereg(), mw.dealloc(), ah.destroy(), pd.dealloc()];
        assert_eq!(again.map(errno), [libc::EINVAL; 6]);
        assert_eq!(errno(qp.query()), libc::EINVAL);
    });
}

#[test]
fn groups_of_commands_are_the_devices() {
    on_each(|ctx| {
        let soft = matches!(ctx.device().unwrap(), Device::Soft(_));
        let (pd, cq) = (Pd::alloc(ctx).unwrap(), Cq::create(ctx, 8, None, 0).unwrap());
        let qp = Qp::create(&pd, &init(&cq, None)).unwrap();
        assert_eq!(errno(qp.star()), if soft { 0 } else { libc::EOPNOTSUPP });
    });
}

#[test]
fn handles_that_are_dropped_end_their_objects() {
    on_each(|ctx| {
        let (pd, cq) = (Pd::alloc(ctx).unwrap(), Cq::create(ctx, 8, None, 0).unwrap());
        let srq = Srq::create(&pd, 4, 1, 0, 1).unwrap();
        drop(Qp::create(&pd, &init(&cq, Some(&srq))).unwrap());
        drop(srq);
        cq.destroy().unwrap();
        pd.dealloc().unwrap();
    });
}

#[test]
fn limits_are_the_devices() {
    on_each(|ctx| {
        let (pd, attr) = (Pd::alloc(ctx).unwrap(), ctx.device_attr());
        assert_eq!(errno(Cq::create(ctx, 0, None, 0)), libc::EINVAL);
        assert_eq!(errno(Cq::create(ctx, attr.max_cqe + 1, None, 0)), libc::EINVAL);
        assert_eq!(errno(Srq::create(&pd, attr.max_srq_wr + 1, 1, 0, 0)), libc::EINVAL);
        let cq = Cq::create(ctx, 8, None, 0).unwrap();
        let over = QpInit { max_send_wr: attr.max_qp_wr + 1, ..init(&cq, None) };
        assert_eq!(errno(Qp::create(&pd, &over)), libc::EINVAL);
        let qp = Qp::create(&pd, &init(&cq, None)).unwrap();
        assert!(qp.caps().max_send_wr >= 4 && qp.caps().max_recv_wr >= 4);
        assert_eq!(errno(ctx.query_port(2)), libc::EINVAL);
        assert_eq!(ctx.gid_table().len(), 1);
    });
}

#[test]
fn posting_goes_by_the_state() {
    on_each(|ctx| {
        let (pd, cq) = (Pd::alloc(ctx).unwrap(), Cq::create(ctx, 16, None, 0).unwrap());
        let qp = Qp::create(&pd, &init(&cq, None)).unwrap();
        assert_eq!(qp.state(), QpState::Reset);
        assert_eq!((errno(post(&qp, 1)), errno(post_recv(&qp, 1))), (libc::EINVAL, libc::EINVAL));
        to(&qp, QpState::Init);
        assert_eq!(errno(post(&qp, 1)), libc::EINVAL);
        (0..4).for_each(|wr_id| post_recv(&qp, wr_id).unwrap());
        assert_eq!(errno(post_recv(&qp, 4)), libc::ENOMEM);
        to(&qp, QpState::Err);
        let flushed = poll(&cq, 4);
        assert!((0..4).eq(flushed.iter().map(|cqe| cqe.wr_id)), "{flushed:?}");
        assert!(flushed.iter().all(|cqe| cqe.status == WcStatus::WrFlushErr && cqe.qpn == qp.number()));
        post(&qp, 9).unwrap();
        let failed = poll(&cq, 1);
        assert!(failed[0].wr_id == 9 && failed[0].status != WcStatus::Success, "{failed:?}");
        post_recv(&qp, 10).unwrap();
        assert_eq!(poll(&cq, 1)[0].wr_id, 10);
        to(&qp, QpState::Reset);
        assert_eq!((qp.state(), errno(post(&qp, 1))), (QpState::Reset, libc::EINVAL));
    });
}

#[test]
fn completions_of_a_queue_pair_end_with_it() {
    on_each(|ctx| {
        let (pd, cq) = (Pd::alloc(ctx).unwrap(), Cq::create(ctx, 16, None, 0).unwrap());
        let [gone, stays] = [(); 2].map(|()| Qp::create(&pd, &init(&cq, None)).unwrap());
        for qp in [&gone, &stays] {
            to(qp, QpState::Init);
            post_recv(qp, u64::from(qp.number())).unwrap();
            to(qp, QpState::Err);
        }
        gone.destroy().unwrap();
        assert_eq!(poll(&cq, 1)[0].wr_id, u64::from(stays.number()));
        assert_eq!(cq.poll(&mut [Cqe::default()]).unwrap(), 0);
    });
}

#[test]
fn a_channel_tells_of_a_completion() {
    on_each(|ctx| {
        let (pd, channel) = (Pd::alloc(ctx).unwrap(), CompChannel::create(ctx).unwrap());
        let cq = Cq::create(ctx, 16, Some(&channel), 42).unwrap();
        let qp = Qp::create(&pd, &init(&cq, None)).unwrap();
        to(&qp, QpState::Init);
        post_recv(&qp, 1).unwrap();
        cq.req_notify(false).unwrap();
        to(&qp, QpState::Err);
        assert_eq!(channel.get_event().unwrap(), 42);
        cq.resize(32).unwrap();
        assert_eq!(poll(&cq, 1)[0].wr_id, 1, "a resized queue has what was in it");
        assert_eq!(errno(channel.destroy()), libc::EBUSY);
    });
}

/// A program that has events to read comes back, so that the thread is left alone until it has none.
#[test]
fn the_thread_is_told_when_the_last_event_is_read() {
    let settings = Settings { port: free_port(), ..Settings::default() };
    let ctx = Context::on(|_| Failing::open(settings)).unwrap();
    let Device::Failing(device) = ctx.device().unwrap() else { panic!() };
    let armed = || device.armed.load(Ordering::Relaxed);
    let (pd, channel) = (Pd::alloc(&ctx).unwrap(), CompChannel::create(&ctx).unwrap());
    let cqs = [1, 2, 3].map(|cookie| Cq::create(&ctx, 16, Some(&channel), cookie).unwrap());
    let qps = cqs.each_ref().map(|cq| Qp::create(&pd, &init(cq, None)).unwrap());
    for (cq, qp) in cqs.iter().zip(&qps) {
        cq.req_notify(false).unwrap();
        to(qp, QpState::Init);
        post_recv(qp, 1).unwrap();
        to(qp, QpState::Err);
    }
    let before = armed();
    assert_eq!(channel.get_event().unwrap(), 1);
    cqs[0].req_notify(false).unwrap();
    assert_eq!(armed(), before, "two are to be read");
    cqs[1].destroy().unwrap_err();
    drop(qps);
    cqs[1].destroy().unwrap();
    assert_eq!(armed(), before, "one is to be read");
    assert_eq!(channel.get_event().unwrap(), 3);
    assert_eq!(armed(), before + 1);
    cqs[2].req_notify(false).unwrap();
    assert_eq!(armed(), before + 2);
}

/// The device may hold on to a queue for a moment, and so be the last that does.
#[test]
fn the_device_may_drop_a_moderated_queue_last() {
    on_each(|ctx| {
        let channel = CompChannel::create(ctx).unwrap();
        let cq = Cq::create(ctx, 16, Some(&channel), 1).unwrap();
        cq.moderate(Moderation { count: 2, period: 1 }).unwrap();
        let half = cq.card_half();
        drop(cq);
        match ctx.device().unwrap() {
            Device::Soft(soft) => soft.with(|_, _| drop(half)),
            Device::Board(_) | Device::Failing(_) => drop(half),
        }
        channel.destroy().unwrap();
    });
}

#[test]
fn a_shared_queue_changes_its_size_and_limit() {
    on_each(|ctx| {
        let pd = Pd::alloc(ctx).unwrap();
        let srq = Srq::create(&pd, 4, 1, 0, 1).unwrap();
        let sge = Sge::default();
        (0..4).for_each(|wr_id| srq.post(&RecvWr { wr_id, sges: &[sge] }).unwrap());
        assert_eq!(errno(srq.post(&RecvWr { wr_id: 4, sges: &[sge] })), libc::ENOMEM);
        assert_eq!(errno(srq.modify(Some(2), None)), libc::EINVAL, "below what is posted");
        assert_eq!(errno(srq.modify(None, Some(5))), libc::EINVAL, "above the size");
        srq.modify(Some(8), Some(6)).unwrap();
        assert_eq!(srq.query().unwrap().max_wr, 8);
        assert_eq!(srq.query().unwrap().limit, 6);
    });
}
