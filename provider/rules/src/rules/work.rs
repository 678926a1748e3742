//! Work queues: B19 to B25.

use std::mem::offset_of;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use starverbs_backend::sealed;
use starverbs_queues::board::*;
use starverbs_queues::format::CardIndex;
use starverbs_queues::{SendFlags, SendOp, SendWqe, Sge, WcStatus};
use zerocopy::{IntoBytes, transmute};

use crate::bench::{Bench, Pair};
use crate::fault::{Tested, expect};
use crate::qp::{RawQp, SEND_STRIDE, SENDS, SLOTS, address, data, request, state};
use crate::raw::{BASE, BYTES, Basics, DATA, QPS, RawDriver};

const EINVAL: u32 = libc::EINVAL as u32;
const EFAULT: u32 = libc::EFAULT as u32;

pub(super) fn sizes(bench: &mut Bench) -> Tested {
    let mut raw = bench.open()?;
    let Basics { pd, cq, .. } = raw.basics()?;
    let end = BASE + BYTES as u64;
    let (_map, file) = sealed::create(c"starverbs-read-only", 4096, sealed::SIZE_STAYS)?;
    raw.link.map_read_only(file.as_fd(), end, 4096)?;
    let create = RawDriver::create_qp(pd, cq.number, QPS);
    let q = create.queues;
    let nowhere = end + 4096;
    let queues = [
        (Queues { program: q.program + 8, ..q }, EINVAL, "a program's line that is not aligned"),
        (Queues { card: q.card + 32, ..q }, EINVAL, "a card's line that is not aligned"),
        (Queues { send: q.send + 8, ..q }, EINVAL, "send slots that are not aligned"),
        (Queues { recv: q.recv + 4, ..q }, EINVAL, "receive slots that are not aligned"),
        (Queues { send_stride: 96, ..q }, EINVAL, "a send slot of no whole blocks"),
        (Queues { send_stride: 64, ..q }, EINVAL, "a send slot without room for its SGEs"),
        (Queues { recv_stride: 24, ..q }, EINVAL, "a receive slot without room for its SGEs"),
        (Queues { send_log: 17, ..q }, EINVAL, "send slots beyond 65,536"),
        (Queues { recv_log: 17, ..q }, EINVAL, "receive slots beyond 65,536"),
        (Queues { send_log: 255, ..q }, EINVAL, "2^255 send slots"),
        (Queues { program: nowhere, ..q }, EFAULT, "a program's line that is not mapped"),
        (Queues { card: nowhere, ..q }, EFAULT, "a card's line that is not mapped"),
        (Queues { card: end, ..q }, EFAULT, "a card's line that may not be written"),
        (Queues { send: end - 128, ..q }, EFAULT, "send slots that run over a map's end"),
        (Queues { recv: end - 64, ..q }, EFAULT, "receive slots that run over a map's end"),
        (Queues { send: u64::MAX - 63, ..q }, EFAULT, "send slots that wrap"),
    ];
    for (queues, wanted, what) in queues {
        let create = CreateQp { queues, ..create };
        let done = raw.command::<NumberReply>(OP_CREATE_QP, create.as_bytes())?.map(drop);
        expect(&format!("status of {what}"), done, Err(wanted))?;
    }
    let (taken, entries) = (BASE + 0x8000, BASE + 0x8040);
    let cq = CreateCq { entries, taken, log: 4, flags: 0 };
    for (create, wanted, what) in [
        (CreateCq { entries: entries + 32, ..cq }, EINVAL, "CQEs that are not aligned"),
        (CreateCq { taken: taken + 2, ..cq }, EINVAL, "a word that is not aligned"),
        (CreateCq { log: 32, ..cq }, EINVAL, "2^32 CQEs"),
        (CreateCq { entries: nowhere, ..cq }, EFAULT, "CQEs that are not mapped"),
        (CreateCq { entries: end, ..cq }, EFAULT, "CQEs that may not be written"),
        (CreateCq { entries: end - 64, ..cq }, EFAULT, "CQEs that run over a map's end"),
        (CreateCq { taken: nowhere, ..cq }, EFAULT, "a word that is not mapped"),
    ] {
        let done = raw.command::<NumberReply>(OP_CREATE_CQ, create.as_bytes())?.map(drop);
        expect(&format!("status of {what}"), done, Err(wanted))?;
    }
    raw.number(OP_CREATE_QP, create.as_bytes()).map(drop)
}

pub(super) fn fetched_once(bench: &mut Bench) -> Tested {
    let Pair { mut raw, key, mut a, mut b, .. } = bench.pair()?;
    raw.put(DATA, b"as it was");
    let before = raw.counter(COUNTER_SEND_FETCHES)?;
    raw.put_send(&mut a, request(SendOp::Send, 1), data(0, 9, key));
    raw.doorbell(&a)?;
    raw.wait("a fetch of the WQE", |raw| Ok((raw.counter(COUNTER_SEND_FETCHES)? != before).then_some(())))?;
    /* it waits for a receive; meanwhile its slot gets other bytes */
    raw.put(a.at + SENDS, &[0xaa; SEND_STRIDE]);
    raw.post_recv(&mut b, 2, data(4096, 16, key));
    let mut came = [raw.completion()?, raw.completion()?].map(|cqe| (cqe.wr_id, cqe.status));
    came.sort_by_key(|(wr_id, _)| *wr_id);
    let wanted = [(1, WcStatus::Success), (2, WcStatus::Success)];
    expect("completions of a WQE that was written over when it was fetched", came, wanted)?;
    expect("its bytes", raw.bytes(DATA + 4096, 9), b"as it was".to_vec())?;
    expect("fetches of the WQE", raw.counter(COUNTER_SEND_FETCHES)? - before, 1)
}

pub(super) fn contradictions(bench: &mut Bench) -> Tested {
    let send = SendWqe { num_sge: 1, length: 8, blocks: 2, ..request(SendOp::Send, 1) };
    let inline = SendWqe { flags: SendFlags::SIGNALED | SendFlags::INLINE, num_sge: 0, length: 64, ..send };
    let wrong = [
        (SendWqe { length: 9, ..send }, "a length that is not that of its SGEs"),
        (SendWqe { num_sge: 5, ..send }, "more SGEs than the slot has"),
        (SendWqe { blocks: 1, ..send }, "an SGE behind its blocks"),
        (SendWqe { blocks: 3, ..send }, "more blocks than the slot has"),
        (SendWqe { length: 65, ..inline }, "inline bytes beyond its blocks"),
        (SendWqe { blocks: 1, length: 1, ..inline }, "inline bytes without a block"),
        (SendWqe { num_sge: 1, ..inline }, "SGEs beside inline bytes"),
        (SendWqe { op: SendOp::Read, length: 8, ..inline }, "inline bytes of a READ"),
        (SendWqe { op: SendOp::Malformed, ..send }, "an operation that there is not"),
    ];
    let Pair { mut raw, key, mut a, b, .. } = bench.pair()?;
    for (wqe, what) in wrong {
        let at = a.at + SENDS + (a.sends % SLOTS) as usize * SEND_STRIDE;
        raw.put_send(&mut a, send, data(0, 8, key));
        let words: [u64; 8] = transmute!(wqe);
        raw.put(at, words.as_bytes());
        raw.doorbell(&a)?;
        let status = raw.completion()?.status;
        expect(&format!("completion of a WQE with {what}"), status, WcStatus::LocQpOpErr)?;
        for qp in [a, b] {
            raw.to_state(qp, state::RESET)?;
        }
        raw.connect_qp(a, b.qpn)?;
        raw.connect_qp(b, a.qpn)?;
    }
    Ok(())
}

pub(super) fn released(bench: &mut Bench) -> Tested {
    let mut pair = bench.pair()?;
    expect("send_released of a new QP", pair.raw.released(&pair.a), 0)?;
    /* more than once around the queue */
    for n in 1..=SLOTS + 6 {
        pair.exchange(n.into())?;
        expect("send_released behind a completion", pair.raw.released(&pair.a), n)?;
    }
    Ok(())
}

pub(super) fn receives(bench: &mut Bench) -> Tested {
    let Pair { mut raw, key, mut a, mut b, .. } = bench.pair()?;
    let starved = b.at + 64 + offset_of!(CardIndex, recv_starved);
    /* `post_recv` rings no doorbell, so that every exchange shows this */
    raw.exchange(key, &mut a, &mut b, 1)?;
    let taken = raw.word(b.at + 64 + offset_of!(CardIndex, recv_taken)).load(Ordering::Acquire);
    expect("recv_taken behind a completion", taken, 1)?;
    let before = raw.word(starved).load(Ordering::Acquire);
    raw.put_send(&mut a, request(SendOp::Send, 5), data(0, 8, key));
    raw.doorbell(&a)?;
    raw.wait("recv_starved counted up where no receive is posted", |raw| {
        Ok((raw.word(starved).load(Ordering::Acquire) != before).then_some(()))
    })?;
    raw.post_recv(&mut b, 6, data(4096, 8, key));
    let came = [raw.completion()?.status, raw.completion()?.status];
    expect("completions when it is", came, [WcStatus::Success; 2])?;
    /* in ERR what comes late needs the cell */
    raw.to_state(b, state::ERR)?;
    raw.post_recv(&mut b, 7, data(4096, 8, key));
    raw.doorbell(&b)?;
    let cqe = raw.completion()?;
    expect("a receive of a QP in ERR", (cqe.wr_id, cqe.status), (7, WcStatus::WrFlushErr))
}

/// Posts one request, and looks at how it ends; then the QP is in ERR.
fn refused(raw: &mut RawDriver, a: &mut RawQp, rkey: u32, sge: Sge, what: &str) -> Tested {
    let wqe = SendWqe { remote_addr: address(4096), rkey, ..request(SendOp::Write, 1) };
    raw.put_send(a, wqe, sge);
    raw.doorbell(a)?;
    let status = raw.completion()?.status;
    expect(&format!("completion of a request with {what}"), status, WcStatus::LocProtErr)?;
    expect(&format!("state of its QP, {what}"), raw.state(*a)?, state::ERR)
}

pub(super) fn keys(bench: &mut Bench) -> Tested {
    let Pair { mut raw, pd, key, mut a, mut b, .. } = bench.pair()?;
    let other = raw.number(OP_ALLOC_PD, &[])?.number;
    let others = raw.number(OP_REG_MR, RawDriver::region(other, 0, BYTES).as_bytes())?.number;
    let small = raw.number(OP_REG_MR, RawDriver::region(pd, DATA, 8).as_bytes())?.number;
    let read_only = Region { access: 0, ..RawDriver::region(pd, DATA, 4096) };
    let read_only = raw.number(OP_REG_MR, read_only.as_bytes())?.number;
    let key_of_none = key ^ 0x55;
    let tried = [
        (data(0, 8, key_of_none), "a key that there is not"),
        (data(0, 8, others), "a key of another domain"),
        (data(0, 9, small), "a byte beyond its region"),
        (data(8, 1, small), "bytes behind its region"),
        (Sge { addr: address(0) - 1, len: 8, lkey: small }, "bytes before its region"),
        (Sge { addr: u64::MAX - 3, len: 8, lkey: key }, "bytes that wrap"),
    ];
    for (sge, what) in tried {
        refused(&mut raw, &mut a, key, sge, what)?;
        for qp in [a, b] {
            raw.to_state(qp, state::RESET)?;
        }
        raw.connect_qp(a, b.qpn)?;
        raw.connect_qp(b, a.qpn)?;
    }
    /* a receive that may not be written */
    raw.put(DATA, &[1; 8]);
    raw.post_recv(&mut b, 3, data(0, 8, read_only));
    raw.put_send(&mut a, request(SendOp::Send, 4), data(64, 8, key));
    raw.doorbell(&a)?;
    let mut came = [raw.completion()?, raw.completion()?].map(|cqe| (cqe.wr_id, cqe.status));
    came.sort_by_key(|(wr_id, _)| *wr_id);
    let wanted = [(3, WcStatus::LocProtErr), (4, WcStatus::RemOpErr)];
    expect("completions of a receive into a region without the right to be written", came, wanted)?;
    expect("its bytes", raw.bytes(DATA, 8), vec![1; 8])
}

pub(super) fn flushes(bench: &mut Bench) -> Tested {
    let mut pair = bench.pair()?;
    let Pair { raw, key, a, b, .. } = &mut pair;
    for n in 0..3 {
        raw.post_recv(b, n, data(4096, 8, *key));
    }
    raw.to_state(*b, state::ERR)?;
    for n in 0..3 {
        let cqe = raw.completion()?;
        expect("a receive of a QP that went to ERR", (cqe.wr_id, cqe.status), (n, WcStatus::WrFlushErr))?;
    }
    raw.post_recv(b, 7, data(4096, 8, *key));
    raw.put_send(b, request(SendOp::Send, 8), data(0, 8, *key));
    raw.doorbell(b)?;
    let mut came = [raw.completion()?, raw.completion()?].map(|cqe| (cqe.wr_id, cqe.status));
    came.sort_by_key(|(wr_id, _)| *wr_id);
    expect("what comes to a QP in ERR", came, [7, 8].map(|wr_id| (wr_id, WcStatus::WrFlushErr)))?;
    expect("its state", raw.state(*b)?, state::ERR)?;
    /* RESET forgets what is posted */
    for qp in [*a, *b] {
        raw.to_state(qp, state::RESET)?;
    }
    raw.connect_qp(*b, a.qpn)?;
    for n in 20..24 {
        raw.post_recv(b, n, data(4096, 8, *key));
    }
    raw.doorbell(b)?;
    raw.to_state(*b, state::RESET)?;
    raw.settle()?;
    expect("a completion of what RESET forgets", raw.poll(), None)?;
    raw.connect_qp(*a, b.qpn)?;
    raw.connect_qp(*b, a.qpn)?;
    /* the receives from before are none: the next message takes the next one */
    pair.exchange(30)
}
