//! ATOMIC WRITE and FLUSH, one at a time (IBTA annex A19). `rc.rs` and `xrc.rs` mix them with all the others
//! on a hostile wire.

use crate::common::pair::{PAGE, Pair};
use starverbs_core::qp::{QpAttr, QpAttrMask};
use starverbs_core::wire::PKEY_DEFAULT;
use starverbs_core::wire::builder::HeaderBuf;
use starverbs_core::wire::headers::Feth;
use starverbs_core::wire::opcode::code;
use starverbs_core::{
    Access, AsyncEvent, FlushLevel, FrameMeta, Placement, Psn, QpState, QpType, SendOp, SendWqe, WcOpcode,
    WcStatus,
};
use starverbs_sim::Setup;

const GLOBAL: u32 = Feth::word(Placement::GLOBAL, FlushLevel::Range);
const GLOBAL_MR: u32 = Feth::word(Placement::GLOBAL, FlushLevel::Mr);
const PERSISTENT: u32 = Feth::word(Placement::PERSISTENT, FlushLevel::Range);

fn flush(p: &Pair, word: u32, bytes: u64) -> SendWqe {
    SendWqe { imm: word, compare_add: bytes, ..p.wqe(2, SendOp::Flush) }
}

#[test]
fn a_word_is_written_and_made_visible() {
    let mut p = Pair::rc();
    p.net.hosts[0].env.memory.set_word(p.page[0].0, 0x0123_4567_89ab_cdef);
    p.post(SendWqe { remote_addr: p.page[1].0 + 16, ..p.wqe(1, SendOp::AtomicWrite) }, &[p.sge(0, 8)]);
    p.post(flush(&p, GLOBAL, PAGE), &[]);
    p.post(SendWqe { remote_addr: 7, ..flush(&p, GLOBAL_MR, u64::from(u32::MAX)) }, &[]);
    p.run();
    let done: Vec<_> =
        std::iter::from_fn(|| p.cq[0].poll()).map(|(c, _)| (c.status, c.opcode, c.byte_len)).collect();
    let ok = WcStatus::Success;
    assert_eq!(done, [(ok, WcOpcode::AtomicWrite, 0), (ok, WcOpcode::Flush, 0), (ok, WcOpcode::Flush, 0)]);
    assert_eq!(p.net.hosts[1].env.memory.word(p.page[1].0 + 16), 0x0123_4567_89ab_cdef);
    assert_eq!(p.net.hosts[1].nic.counters().sent_ack.get(), 0, "each has an answer of its own");
}

/// As many are under way as the peer answers, READs and the like together.
#[test]
fn they_take_turns_with_reads() {
    for rd_atomic in [1, 2] {
        let mut p = Pair::of(QpType::Rc, &Setup { rd_atomic, ..Setup::default() });
        for (op, len) in [(SendOp::Flush, 0), (SendOp::AtomicWrite, 8), (SendOp::Read, 8), (SendOp::Flush, 0)]
        {
            p.post(SendWqe { imm: GLOBAL, ..p.wqe(1, op) }, &[p.sge(0, len)]);
        }
        p.run();
        assert_eq!(p.polled(0), [(1, WcStatus::Success); 4]);
    }
    let mut p = Pair::of(QpType::Rc, &Setup { rd_atomic: 0, ..Setup::default() });
    p.fails_with(p.wqe(2, SendOp::AtomicWrite), &[p.sge(0, 8)], WcStatus::LocQpOpErr);
}

#[test]
fn what_is_no_word_is_refused() {
    for len in [0, 4, 9, 16] {
        let mut p = Pair::rc();
        p.fails_with(p.wqe(2, SendOp::AtomicWrite), &[p.sge(0, len)], WcStatus::LocLenErr);
    }
    for off in [1, 4] {
        let mut p = Pair::rc();
        let bad = SendWqe { remote_addr: p.page[1].0 + off, ..p.wqe(2, SendOp::AtomicWrite) };
        let event = AsyncEvent::QpReqErr(p.qpn[1]);
        p.refused_with(bad, &[p.sge(0, 8)], WcStatus::RemInvReqErr, event);
    }
}

#[test]
fn ranges_and_keys_are_checked() {
    let cases: [fn(&Pair) -> SendWqe; 7] = [
        |p| SendWqe { remote_addr: p.page[1].0 + PAGE, ..p.wqe(2, SendOp::AtomicWrite) },
        |p| SendWqe { rkey: 0, ..p.wqe(2, SendOp::AtomicWrite) },
        |p| flush(p, GLOBAL, PAGE + 1),
        |p| SendWqe { rkey: 0, ..flush(p, GLOBAL, 0) },
        |p| SendWqe { rkey: 0, ..flush(p, GLOBAL_MR, 8) },
        /* no region is known to be persistent */
        |p| flush(p, PERSISTENT, 8),
        |p| flush(p, PERSISTENT | GLOBAL, 8),
    ];
    for case in cases {
        let mut p = Pair::rc();
        let event = AsyncEvent::QpAccessErr(p.qpn[1]);
        let bad = case(&p);
        let len = if bad.op == SendOp::Flush { 0 } else { 8 };
        p.refused_with(bad, &[p.sge(0, len)], WcStatus::RemAccessErr, event);
    }
}

/// The right must be given by the MR and by the QP.
#[test]
fn rights_of_mr_and_qp() {
    let remote = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    let all = Access::LOCAL_WRITE | remote | Access::FLUSH_GLOBAL;
    for (op, right) in [(SendOp::AtomicWrite, Access::REMOTE_WRITE), (SendOp::Flush, Access::FLUSH_GLOBAL)] {
        for of_qp in [false, true] {
            let mut p = Pair::rc();
            let mut bad = SendWqe { imm: GLOBAL, compare_add: 8, ..p.wqe(2, op) };
            if of_qp {
                let attr = QpAttr { access: all - right, ..QpAttr::default() };
                let now = p.net.now();
                p.net.hosts[1].modify(p.qpn[1], &attr, QpAttrMask::ACCESS_FLAGS, now).expect("RTS to RTS");
            } else {
                (bad.remote_addr, bad.rkey) = p.net.hosts[1].region(64, all - right);
            }
            p.post(bad, &[p.sge(0, if op == SendOp::Flush { 0 } else { 8 })]);
            p.run();
            assert_eq!(p.polled(0), [(2, WcStatus::RemAccessErr)]);
            assert_eq!(p.events(1), [AsyncEvent::QpAccessErr(p.qpn[1])]);
        }
    }
}

/// Reserved placement types and levels, as only a peer of another kind sends them.
#[test]
fn reserved_headers_are_invalid_requests() {
    for word in [0, 4, 8, 0x21, 0x31] {
        let mut p = Pair::rc();
        let event = AsyncEvent::QpReqErr(p.qpn[1]);
        p.refused_with(flush(&p, word, 8), &[], WcStatus::RemInvReqErr, event);
    }
}

/// An old ATOMIC WRITE that comes again is answered, and not executed: somebody may have written since.
#[test]
fn what_was_executed_is_not_executed_again() {
    let mut p = Pair::rc();
    let (addr, rkey) = p.page[1];
    p.net.hosts[0].env.memory.set_word(p.page[0].0, 1);
    p.post(p.wqe(1, SendOp::AtomicWrite), &[p.sge(0, 8)]);
    p.post(SendWqe { wr_id: 3, ..p.wqe(3, SendOp::Write) }, &[p.sge(0, 8)]);
    p.run();
    p.net.hosts[1].env.memory.set_word(addr, 2);
    let mut frame =
        HeaderBuf::bth(code::RC_ATOMIC_WRITE, p.qpn[1], Psn::new(0), true, false, 0, PKEY_DEFAULT)
            .reth(addr, rkey, 8)
            .as_bytes()
            .to_vec();
    frame.extend(9u64.to_ne_bytes());
    let meta = FrameMeta { src: p.net.hosts[0].gid, dst: p.net.hosts[1].gid, ..FrameMeta::default() };
    let (now, host) = (p.net.now(), &mut p.net.hosts[1]);
    host.nic.handle_frame(&mut host.env, now, &meta, &frame);
    p.run();
    assert_eq!(p.net.hosts[1].env.memory.word(addr), 2);
    assert_eq!(p.net.hosts[1].nic.counters().duplicate_request.get(), 1);
    assert_eq!(p.net.hosts[0].nic.counters().drop_stale_response.get(), 1, "it was answered");
    assert_eq!(p.states(), [QpState::Rts; 2]);
}

/// Room for answers is there whatever the right that brings them.
#[test]
fn one_right_is_enough() {
    for (op, access) in [(SendOp::AtomicWrite, Access::REMOTE_WRITE), (SendOp::Flush, Access::FLUSH_GLOBAL)] {
        let mut p = Pair::of(QpType::Rc, &Setup { access, ..Setup::default() });
        p.post(SendWqe { imm: GLOBAL, ..p.wqe(1, op) }, &[p.sge(0, if op == SendOp::Flush { 0 } else { 8 })]);
        p.run();
        assert_eq!(p.polled(0), [(1, WcStatus::Success)]);
    }
}
