//! StRoM on functions and contexts of a board: whose kernels are whose, and what a client cannot do with
//! answers. What one sees from outside is in the rules of `starverbs-rules`.

use starverbs_core::strom::{MAX_KERNELS, ReplyFlags, ReplyHead, ReplyRecord, ReplyTarget, TARGET_LEN};

use super::*;

const EINVAL: u32 = libc::EINVAL as u32;
const OP: u64 = 0x53;

fn load(raw: &mut Raw, pd: u32, op: u64) -> Result<(), u32> {
    let kernel = RpcKernel { op, pd, kernel: KERNEL_HLL, ..RpcKernel::default() };
    raw.command::<Object>(OP_LOAD_KERNEL, kernel.as_bytes()).map(drop)
}

fn unload(raw: &mut Raw, pd: u32, op: u64) -> Result<(), u32> {
    let kernel = RpcKernel { op, pd, ..RpcKernel::default() };
    raw.command::<Object>(OP_UNLOAD_KERNEL, kernel.as_bytes()).map(drop)
}

/// Two queue pairs that speak the dialect, connected, whose answers stand at `answers`.
fn speaking(raw: &mut Raw, of: Basics, answers: u64) -> [RawQp; 2] {
    let qps = [0, 1].map(|n| {
        let plain = Raw::create_qp(of.pd, of.cq.number, raw.at(QPS + n * QP_BYTES));
        let create = CreateQp { flags: plain.flags | QP_RPC, answer_slots: 4, answers, ..plain };
        raw.qp_of(n, &create).unwrap()
    });
    raw.connect_qp(qps[0], qps[1].qpn);
    raw.connect_qp(qps[1], qps[0].qpn);
    qps
}

/// Posts an RPC without parameters, which no kernel likes, and waits for its completion; its answer ends in
/// front of byte 128.
fn call(raw: &mut Raw, key: u32, qp: &mut RawQp) {
    let (addr, flags) = (data(64, 0, key).addr, ReplyFlags::empty());
    let head = ReplyHead::new(&ReplyTarget { addr, rkey: key, len: 64, imm: 0, flags });
    let wqe = SendWqe { op: SendOp::Rpc, remote_addr: OP, ..signaled_send(5) };
    raw.put(DATA + 64, &[0; 64]);
    raw.put_inline(qp, wqe, head.as_bytes());
    raw.doorbell(qp);
    let cqe = raw.completion();
    assert_eq!((cqe.wr_id, cqe.status), (5, WcStatus::Success));
}

/// B70: a context loads kernels into its own domains, as many as the function may have, and they end with it.
#[test]
fn kernels_are_their_contexts_alone() {
    const SHARE: u64 = MAX_KERNELS as u64 / 2;
    let board = with_board(2, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let of = raw.basics();
        let one = raw.open_context(1);
        let other = raw.number(OP_ALLOC_PD, &[]).number;
        assert_eq!(load(&mut raw, of.pd, OP), Err(EINVAL), "another context's domain");
        (0..SHARE - 1).for_each(|op| load(&mut raw, other, op).unwrap());
        raw.enter(0);
        assert_eq!(unload(&mut raw, other, 0), Err(EINVAL), "another context's kernel");
        load(&mut raw, of.pd, OP).unwrap();
        assert_eq!(load(&mut raw, of.pd, OP + 1), Err(libc::ENOMEM as u32), "the function's share");
        let mut second = Raw::open(&paths[1]);
        let pd = second.number(OP_ALLOC_PD, &[]).number;
        load(&mut second, pd, OP).unwrap();
        raw.close_context(one);
        load(&mut raw, of.pd, OP + 1).unwrap();
        let answers = BASE + (QPS + 2 * QP_BYTES) as u64;
        let [mut a, b] = speaking(&mut raw, of, answers);
        call(&mut raw, of.key, &mut a);
        let record = |raw: &Raw| ReplyRecord::decode(&raw.bytes(DATA + 64, 64));
        raw.until("the answer", |raw| record(raw).is_some());
        raw.object(OP_DESTROY_QP, b.qpn).unwrap();
    });
    let counters = board.card.nic.counters();
    assert_eq!((counters.qps.get(), counters.mrs.get()), (0, 0));
    assert!(board.card.nic.kernels().is_empty(), "they end with their clients");
}

/// B66: answers whose memory is gone are not sent, and harm nobody.
#[test]
fn an_answer_whose_memory_is_gone_is_none() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let of = raw.basics();
        let (at, len) = (BASE + BYTES as u64, 64 << 10);
        let (_map, file) = sealed::create(c"answers", len as usize, sealed::SIZE_STAYS).unwrap();
        raw.client().dma_map(file.as_fd(), 0, at, len).unwrap();
        let [mut a, mut b] = speaking(&mut raw, of, at);
        load(&mut raw, of.pd, OP).unwrap();
        call(&mut raw, of.key, &mut a);
        raw.until("the answer", |raw| ReplyRecord::decode(&raw.bytes(DATA + 64, 64)).is_some());
        raw.client().dma_unmap(at, len).unwrap();
        let misses = raw.counter(COUNTER_DMA_MISSES);
        call(&mut raw, of.key, &mut a);
        exchange(&mut raw, of.key, &mut b, &mut a, 1);
        assert_eq!(ReplyRecord::decode(&raw.bytes(DATA + 64, 64)), None);
        assert_eq!(raw.counter(COUNTER_DMA_MISSES), misses + 1);
    });
}

/// B21: no bit of a client's WQE makes it the board's own, which completes to nobody.
#[test]
fn no_client_posts_what_is_the_boards() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let of = raw.basics();
        let [mut a, mut b] = speaking(&mut raw, of, BASE + (QPS + 2 * QP_BYTES) as u64);
        raw.post_recv(&mut b, 1, data(4096, 64, of.key));
        let flags = SendFlags::SIGNALED | SendFlags::CARD;
        raw.put_send(&mut a, SendWqe { flags, ..signaled_send(2) }, data(0, 64, of.key));
        /* nor one that is none */
        let short = SendWqe { op: SendOp::Rpc, flags, length: TARGET_LEN as u32, ..signaled_send(3) };
        raw.put_wqe(&mut a, SendWqe { blocks: 1, num_sge: 1, ..short }, &[]);
        raw.doorbell(&a);
        let mut came =
            [raw.completion(), raw.completion(), raw.completion()].map(|cqe| (cqe.wr_id, cqe.status));
        came.sort_unstable_by_key(|(wr_id, _)| *wr_id);
        let wanted = [(1, WcStatus::Success), (2, WcStatus::Success), (3, WcStatus::LocQpOpErr)];
        assert_eq!(came, wanted);
    });
}

/// B66: an RPC to a queue pair without the dialect fails, and its end hears why.
#[test]
fn a_peer_that_speaks_no_strom_is_told_of() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let of = raw.basics();
        let [mut a, _] = speaking(&mut raw, of, BASE + (QPS + 4 * QP_BYTES) as u64);
        let plain = raw.qp(of.pd, of.cq.number, 2);
        raw.connect_qp(plain, a.qpn);
        let again = ModifyQp { qpn: a.qpn, mask: 1, ..ModifyQp::default() };
        raw.command::<Object>(OP_MODIFY_QP, again.as_bytes()).unwrap();
        raw.connect_qp(a, plain.qpn);
        let wqe = SendWqe { op: SendOp::Rpc, remote_addr: OP, ..signaled_send(5) };
        raw.put_inline(&mut a, wqe, &[0; TARGET_LEN]);
        raw.doorbell(&a);
        assert_eq!(raw.completion().status, WcStatus::LocQpOpErr);
        assert_eq!(raw.wait_for_event(0), RaisedEvent { kind: EVENT_NO_DIALECT, number: a.qpn });
    });
}
