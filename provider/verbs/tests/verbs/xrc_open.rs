//! Receiving XRC QPs that more than one has open (ibv_open_qp), on one card and on two, here of one process:
//! tests/abi/xrc.c has real processes.

use std::fs::File;
use std::os::fd::AsRawFd;

use crate::common::*;
use starverbs_core::qp::QpAttrMask;
use starverbs_core::{QpState, QpType, WcStatus};
use starverbs_settings::Settings;
use starverbs_verbs::{Context, Cq, Qp, QpAttr, RecvWr, SendWr, Srq, VerbsEvent, Xrcd, kind};

const OWNER: u64 = 5;
const ATTACHED: u64 = 6;
const OTHER: u64 = 7;

fn open(node: &Node, file: &File) -> Xrcd {
    Xrcd::open(&node.ctx, Some(file.as_raw_fd()), true, false).unwrap()
}

/// The process that makes the QP, the one that opens it, and a sender. SRQs are those of the second.
struct Three {
    owner: Node,
    made: Qp,
    domain: Xrcd,
    attached: Node,
    opened: Qp,
    remote_domain: Xrcd,
    cq: Cq,
    srq: Srq,
    sender: Node,
    send: Qp,
}

impl Three {
    /// The attached process takes the QP to RTS.
    fn new(settings: &Settings) -> Three {
        let file = domain_file();
        let [owner, attached, sender] = [(); 3].map(|()| Node::new(settings));
        let (domain, remote_domain) = (open(&owner, &file), open(&attached, &file));
        let made = domain.create_qp(&owner.ctx, OWNER).unwrap();
        let opened = remote_domain.open_qp(&attached.ctx, made.number(), ATTACHED).unwrap();
        assert_eq!((opened.number(), opened.state()), (made.number(), QpState::Reset));
        let send = Qp::create(&sender.pd, &sender.init(QpType::XrcSend, None)).unwrap();
        connect_xrc(&sender, &send, &attached, &opened);
        let cq = Cq::create(&attached.ctx, 16, None, 0).unwrap();
        let srq = Srq::create_xrc(&attached.pd, &remote_domain, &cq, 16, 1, 0).unwrap();
        for node in [&owner, &attached] {
            // SAFETY: a flag of a descriptor of the node's.
            unsafe { libc::fcntl(node.ctx.async_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        }
        Three { owner, made, domain, attached, opened, remote_domain, cq, srq, sender, send }
    }

    fn post(&self, srq: u32) -> WcStatus {
        let sges = [self.sender.sge(0, 100)];
        post(&self.send, &SendWr { remote_qpn: srq, ..send(1, &sges) }).unwrap();
        self.sender.completions(1)[0].status
    }

    fn message_arrives(&self) {
        self.srq.post(&RecvWr { wr_id: 9, sges: &[self.attached.sge(0, 100)] }).unwrap();
        assert_eq!(self.post(self.srq.number()), WcStatus::Success);
        assert_eq!(poll(&self.cq, 1)[0].qpn, self.made.number());
    }
}

/// Waits for an event of a QP, whatever comes before it.
fn await_event(ctx: &Context, kind: u32, cookie: u64) {
    let wanted = VerbsEvent::Qp { kind, cookie };
    wait_for("the event", || ctx.get_async_event().is_ok_and(|event| event == wanted));
}

#[test]
fn who_opened_it_connects_it_and_all_see_its_state() {
    let three = Three::new(&settings());
    three.message_arrives();
    let (here, there) = (three.made.query().unwrap(), three.opened.query().unwrap());
    assert_eq!((here, here.state), (there, QpState::Rts));
    assert_eq!((there.dest_qpn, there.timeout), (three.send.number(), 14));
    let wrong = QpAttr { state: QpState::Rtr, ..QpAttr::default() };
    let refused = three.opened.modify(&wrong, QpAttrMask::STATE).unwrap_err();
    assert_eq!(refused.errno(), libc::EINVAL, "by the owner's card");
    let (send, attached) = (three.send.number(), &three.attached.ctx);
    for qpn in [send, three.made.number() + 1, 0xff_ffff] {
        let refused = three.remote_domain.open_qp(attached, qpn, OTHER).err().unwrap();
        assert_eq!(refused.errno(), libc::EINVAL, "{qpn:#x} is none of the domain's");
    }
    let error = QpAttr { state: QpState::Err, ..QpAttr::default() };
    three.opened.modify(&error, QpAttrMask::STATE).unwrap();
    assert_eq!(three.made.state(), QpState::Err);
}

#[test]
fn it_lives_until_all_have_closed_it() {
    let three = Three::new(&settings());
    let again = three.remote_domain.open_qp(&three.attached.ctx, three.made.number(), OTHER).unwrap();
    three.made.close(OWNER).unwrap();
    let Three { made, domain, .. } = &three;
    assert_eq!(three.remote_domain.close().unwrap_err().errno(), libc::EBUSY);
    three.opened.close(ATTACHED).unwrap();
    assert_eq!(again.state(), QpState::Rts);
    three.message_arrives();
    assert_eq!(domain.close().unwrap_err().errno(), libc::EBUSY, "an attached process has a QP of it");
    assert_eq!(made.state(), QpState::Rts);
    let Three { opened, made, domain, remote_domain, srq, .. } = three;
    let number = made.number();
    drop((opened, made));
    assert_eq!(again.state(), QpState::Rts, "the owner's program has no handle any more");
    again.close(OTHER).unwrap();
    drop(again);
    srq.destroy().unwrap();
    remote_domain.close().unwrap();
    wait_for("the QP's end", || domain.open_qp(&three.owner.ctx, number, OTHER).is_err());
    wait_for("the domain's end", || domain.close().is_ok());
}

#[test]
fn all_are_told_of_its_events() {
    let three = Three::new(&settings());
    let _second = three.remote_domain.open_qp(&three.attached.ctx, three.made.number(), OTHER).unwrap();
    assert_eq!(three.post(0xff_f000), WcStatus::RemInvReqErr);
    await_event(&three.owner.ctx, kind::QP_REQ_ERR, OWNER);
    await_event(&three.attached.ctx, kind::QP_REQ_ERR, ATTACHED);
    await_event(&three.attached.ctx, kind::QP_REQ_ERR, OTHER);
}

#[test]
fn it_ends_with_its_owner() {
    let three = Three::new(&settings());
    three.message_arrives();
    three.owner.ctx.close();
    await_event(&three.attached.ctx, kind::QP_FATAL, ATTACHED);
    wait_for("the connection's end", || {
        three.opened.query().is_err_and(|error| error.errno() == libc::ENODEV)
    });
    let error = QpAttr { state: QpState::Err, ..QpAttr::default() };
    let refused = three.opened.modify(&error, QpAttrMask::STATE).unwrap_err();
    assert_eq!(refused.errno(), libc::ENODEV);
    three.opened.close(ATTACHED).unwrap();
    let Three { opened, srq, remote_domain, .. } = three;
    drop(opened);
    srq.destroy().unwrap();
    remote_domain.close().unwrap();
}

/// A handle that is closed hears nothing more, though others of the same QP do: its name may be another
/// object's by then.
#[test]
fn a_closed_handle_is_told_nothing() {
    let three = Three::new(&settings());
    let second = three.domain.open_qp(&three.owner.ctx, three.made.number(), OTHER).unwrap();
    three.made.close(OWNER).unwrap();
    assert_eq!(three.post(0xff_f000), WcStatus::RemInvReqErr);
    let mut heard = Vec::new();
    wait_for("the event", || {
        heard.extend(three.owner.ctx.get_async_event());
        heard.contains(&VerbsEvent::Qp { kind: kind::QP_REQ_ERR, cookie: OTHER })
    });
    assert!(!heard.contains(&VerbsEvent::Qp { kind: kind::QP_REQ_ERR, cookie: OWNER }), "{heard:?}");
    drop(second);
}
