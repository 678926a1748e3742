//! What a board takes if a capability says so: completion queues that change, null regions, multicast, XRC.

use std::sync::atomic::Ordering;

use starverbs_core::AvId;
use starverbs_queues::board::*;
use starverbs_queues::{SendOp, SendWqe, Sge, WcStatus};
use zerocopy::IntoBytes;

use crate::bench::{Bench, Pair};
use crate::fault::{RuleFault, Tested, expect};
use crate::qp::{QKEY, RawQp, UD, XRC_RECV, XRC_SEND, data, request};
use crate::raw::{BASE, CQ, CQ_LOG, DATA, QP_BYTES, QPS, RaisedEvent, RawDriver, arm};

const EINVAL: u32 = libc::EINVAL as u32;
const EBUSY: u32 = libc::EBUSY as u32;
const EFAULT: u32 = libc::EFAULT as u32;
/// Where a completion queue lies that was moved.
const MOVED: usize = 0x8000;
/// Bytes of the GRH before a datagram.
const GRH: usize = 40;

/// Skips what the board does not take.
pub(super) fn needs(raw: &mut RawDriver, cap: u64, name: &str) -> Tested {
    let takes = raw.long(REG_CAPS)? & cap != 0;
    if takes { Ok(()) } else { Err(RuleFault::Skipped(format!("the board has no {name}"))) }
}

/// The completion queue of [`RawDriver::basics`] moves to [`MOVED`]; gives how many entries it had written.
fn resize(raw: &mut RawDriver, cq: u32, log: u32) -> Tested<Result<u32, u32>> {
    let (taken, entries) = (BASE + MOVED as u64, BASE + MOVED as u64 + 64);
    let to = ResizeCq { entries, taken, cq, log };
    Ok(raw.command::<NumberReply>(OP_RESIZE_CQ, to.as_bytes())?.map(|reply| reply.number))
}

pub(super) fn resized(bench: &mut Bench) -> Tested {
    const LOG: u32 = 3;
    let Pair { mut raw, key, cq, cq_cell, mut a, mut b, .. } = bench.pair()?;
    needs(&mut raw, CAP_CQ_CHANGES, "CAP_CQ_CHANGES")?;
    /* one message whose completions are not taken; the queue is armed for what comes behind them */
    raw.post_recv(&mut b, 1, data(4096, 8, key));
    raw.put_send(&mut a, request(SendOp::Send, 2), data(0, 8, key));
    raw.doorbell(&a)?;
    raw.wait("two completions", |raw| Ok(raw.cqe(CQ, CQ_LOG, 1)))?;
    raw.ring(cq_cell, arm(2, 1, false))?;
    raw.settle()?;
    let wild = ResizeCq { entries: 0, taken: BASE, cq, log: LOG };
    let done = raw.command::<NumberReply>(OP_RESIZE_CQ, wild.as_bytes())?.map(drop);
    expect("status of a place that is not mapped", done, Err(EFAULT))?;
    expect("status of a size that no queue has", resize(&mut raw, cq, 32)?, Err(EINVAL))?;
    expect("status of a queue that there is not", resize(&mut raw, cq + 100, LOG)?, Err(EINVAL))?;
    expect("entries written where it was", resize(&mut raw, cq, LOG)?, Ok(2))?;
    expect("an event of what was there before it was armed", raw.event(0), None)?;
    /* twice around the new ring: its indices, and its phase, began anew */
    for n in 0..8 {
        raw.post_recv(&mut b, 10 + n, data(4096, 8, key));
        raw.put_send(&mut a, request(SendOp::Send, 20 + n), data(0, 8, key));
        raw.doorbell(&a)?;
        for index in [2 * n as u32, 2 * n as u32 + 1] {
            let cqe = raw.wait("a completion", |raw| Ok(raw.cqe(MOVED, LOG, index)))?;
            expect("status", cqe.status, WcStatus::Success)?;
            raw.word(MOVED).store(index + 1, Ordering::Release);
        }
    }
    expect("an entry where it was", raw.cqe(CQ, CQ_LOG, 2), None)?;
    let event = RaisedEvent { kind: EVENT_COMPLETION, number: cq };
    expect("the event of a queue that was armed before", raw.wait_for_event(0)?, event)
}

pub(super) fn moderated(bench: &mut Bench) -> Tested {
    let Pair { mut raw, key, cq, cq_cell, mut a, mut b, .. } = bench.pair()?;
    needs(&mut raw, CAP_CQ_CHANGES, "CAP_CQ_CHANGES")?;
    let event = RaisedEvent { kind: EVENT_COMPLETION, number: cq };
    let moderate = |raw: &mut RawDriver, count, period| -> Tested {
        raw.ask::<Object>(OP_MODIFY_CQ, ModifyCq { cq, count, period }.as_bytes()).map(drop)
    };
    moderate(&mut raw, 4, 0)?;
    raw.ring(cq_cell, arm(raw.taken, 1, false))?;
    raw.exchange(key, &mut a, &mut b, 1)?;
    raw.settle()?;
    expect("an event at the second of four completions", raw.event(0), None)?;
    raw.exchange(key, &mut a, &mut b, 2)?;
    expect("the event at the fourth", raw.wait_for_event(0)?, event)?;
    /* after a time */
    moderate(&mut raw, 100, 1000)?;
    raw.ring(cq_cell, arm(raw.taken, 2, false))?;
    raw.exchange(key, &mut a, &mut b, 3)?;
    expect("the event after a millisecond", raw.wait_for_event(1)?, event)?;
    /* one that is held back for ever is raised when nothing is to be held back */
    moderate(&mut raw, 100, 0)?;
    raw.ring(cq_cell, arm(raw.taken, 3, false))?;
    raw.exchange(key, &mut a, &mut b, 4)?;
    raw.settle()?;
    expect("an event at the second of a hundred completions", raw.event(2), None)?;
    moderate(&mut raw, 0, 0)?;
    expect("the event when it is not moderated any more", raw.wait_for_event(2)?, event)
}

pub(super) fn null(bench: &mut Bench) -> Tested {
    let Pair { mut raw, pd, key, mut a, mut b, .. } = bench.pair()?;
    needs(&mut raw, CAP_NULL, "CAP_NULL")?;
    let null = raw.number(OP_ALLOC_NULL_MR, Object { number: pd, reserved: 0 }.as_bytes())?.number;
    /* zeroes are sent */
    raw.put(DATA + 4096, &[0x55; 16]);
    raw.post_recv(&mut b, 1, data(4096, 16, key));
    let send = request(SendOp::Send, 2);
    raw.put_send(&mut a, send, Sge { addr: 0x1234, len: 16, lkey: null });
    raw.doorbell(&a)?;
    let came = [raw.completion()?, raw.completion()?].map(|cqe| cqe.status);
    expect("status of what is sent from a null region", came, [WcStatus::Success; 2])?;
    expect("its bytes", raw.bytes(DATA + 4096, 16), vec![0; 16])?;
    /* what is received there is gone; and no peer reaches it */
    let misses = raw.counter(COUNTER_DMA_MISSES)?;
    raw.post_recv(&mut b, 3, Sge { addr: 0, len: 16, lkey: null });
    raw.put_send(&mut a, request(SendOp::Send, 4), data(0, 16, key));
    raw.doorbell(&a)?;
    let came = [raw.completion()?, raw.completion()?].map(|cqe| cqe.status);
    expect("status of what is received into a null region", came, [WcStatus::Success; 2])?;
    expect("misses", raw.counter(COUNTER_DMA_MISSES)? - misses, 0)?;
    let write = SendWqe { remote_addr: 0, rkey: null, ..request(SendOp::Write, 5) };
    raw.put_send(&mut a, write, data(0, 8, key));
    raw.doorbell(&a)?;
    expect("status of a peer's WRITE", raw.completion()?.status, WcStatus::RemAccessErr)?;
    raw.done(OP_DEREG_MR, null)
}

pub(super) fn groups(bench: &mut Bench) -> Tested {
    let Pair { mut raw, pd, key, cq, a: rc, .. } = bench.pair()?;
    needs(&mut raw, CAP_MULTICAST, "CAP_MULTICAST")?;
    let mut made = Vec::new();
    for n in 2..4 {
        let create = RawDriver::create_qp(pd, cq, QPS + n * QP_BYTES);
        let qp = raw.qp_of(n, &CreateQp { kind: UD, ..create })?;
        raw.connect_as(qp, 0, UD)?;
        made.push(qp);
    }
    let [mut a, mut b] = [made[0], made[1]];
    /* 239.77.0.9 */
    let mut gid = [0; 16];
    gid[10..].copy_from_slice(&[0xff, 0xff, 239, 77, 0, 9]);
    let group = |qp: RawQp, gid| Group { gid, qpn: qp.qpn, reserved: 0 };
    let change = |raw: &mut RawDriver, op, group: Group| -> Tested<Result<(), u32>> {
        Ok(raw.command::<Object>(op, group.as_bytes())?.map(drop))
    };
    let own = raw.gid()?;
    expect("an address of no group", change(&mut raw, OP_ATTACH_GROUP, group(b, own))?, Err(EINVAL))?;
    expect("an RC queue pair", change(&mut raw, OP_ATTACH_GROUP, group(rc, gid))?, Err(EINVAL))?;
    expect("leaving before joining", change(&mut raw, OP_DETACH_GROUP, group(b, gid))?, Err(EINVAL))?;
    expect("joining", change(&mut raw, OP_ATTACH_GROUP, group(b, gid))?, Ok(()))?;
    expect("a member is destroyed", raw.object(OP_DESTROY_QP, b.qpn)?, Err(EBUSY))?;
    let address = Address { dgid: gid, sgid: own, hop_limit: 1, ..Address::default() };
    let ah = raw.number(OP_CREATE_AH, AddressHandle { pd, address }.as_bytes())?.number;
    raw.put(DATA, b"to all of you");
    raw.post_recv(&mut b, 1, data(4096, 2000, key));
    let to = SendWqe { av: AvId(ah), remote_qpn: 0xff_ffff, qkey: QKEY, ..request(SendOp::Send, 2) };
    raw.put_send(&mut a, to, data(0, 13, key));
    raw.doorbell(&a)?;
    let came = [raw.completion()?, raw.completion()?].map(|cqe| cqe.status);
    expect("status of a datagram to a group", came, [WcStatus::Success; 2])?;
    expect("its bytes", raw.bytes(DATA + 4096 + GRH, 13), b"to all of you".to_vec())?;
    expect("leaving", change(&mut raw, OP_DETACH_GROUP, group(b, gid))?, Ok(()))?;
    raw.done(OP_DESTROY_QP, b.qpn)
}

pub(super) fn xrc(bench: &mut Bench) -> Tested {
    let Pair { mut raw, pd, key, cq, .. } = bench.pair()?;
    needs(&mut raw, CAP_XRC, "CAP_XRC")?;
    let domain = raw.number(OP_ALLOC_PD, &[])?.number;
    let at = |n: usize| QPS + n * QP_BYTES;
    let srq_at = at(4);
    raw.put(srq_at, &[0; 128]);
    let queues = RawDriver::create_qp(pd, cq, srq_at).queues;
    let create = CreateXrcSrq { queues, pd, domain, cq, reserved: 0 };
    let srq = raw.number(OP_CREATE_XRC_SRQ, create.as_bytes())?;
    let mut receives = RawQp { qpn: srq.number, cell: srq.cell, at: srq_at, sends: 0, recvs: 0 };
    let send = RawDriver::create_qp(pd, cq, at(2));
    let mut ini = raw.qp_of(2, &CreateQp { kind: XRC_SEND, ..send })?;
    let recv = CreateQp { kind: XRC_RECV, pd: domain, ..RawDriver::create_qp(pd, cq, at(3)) };
    let tgt = raw.qp_of(3, &recv)?;
    raw.connect_as(ini, tgt.qpn, XRC_SEND)?;
    raw.connect_as(tgt, ini.qpn, XRC_RECV)?;
    expect("a domain with an SRQ is deallocated", raw.object(OP_DEALLOC_PD, domain)?, Err(EBUSY))?;
    raw.put(DATA, b"by its number");
    raw.post_recv(&mut receives, 1, data(4096, 64, key));
    let named = SendWqe { remote_qpn: srq.number, ..request(SendOp::Send, 2) };
    raw.put_send(&mut ini, named, data(0, 13, key));
    raw.doorbell(&ini)?;
    let mut came = [raw.completion()?, raw.completion()?];
    came.sort_by_key(|cqe| cqe.wr_id);
    let said = came.map(|cqe| (cqe.wr_id, cqe.status, cqe.qpn));
    let wanted = [(1, WcStatus::Success, tgt.qpn), (2, WcStatus::Success, ini.qpn)];
    expect("completions of a message to an SRQ of the domain", said, wanted)?;
    expect("its bytes", raw.bytes(DATA + 4096, 13), b"by its number".to_vec())?;
    /* what names another queue finds none */
    let wild = SendWqe { remote_qpn: srq.number + 77, ..request(SendOp::Send, 3) };
    raw.put_send(&mut ini, wild, data(0, 13, key));
    raw.doorbell(&ini)?;
    let failed = raw.completion()?;
    expect("a message to an SRQ that there is not", failed.status == WcStatus::Success, false)
}

/// A service ID of nobody else's: of the IP port space, at port 1.
const SERVICE: u64 = 0x0106_0001;
/// Where datagrams lie, among the queues: a kernel takes them from there alone.
const OUT: usize = 0xe000;
const BACK: usize = 0xf000;

/// Sends a message of communication management to this board's own queue pair 1.
fn send_mad(raw: &mut RawDriver, attribute: u16, transaction: u64, ids: [u32; 2], service: u64) -> Tested {
    let sent = try_send_mad(raw, attribute, transaction, ids, service)?;
    expect("a datagram is sent", sent, Ok(()))
}

/// As [`send_mad`]; what the board says of it.
fn try_send_mad(
    raw: &mut RawDriver,
    attribute: u16,
    transaction: u64,
    ids: [u32; 2],
    service: u64,
) -> Tested<Result<(), u32>> {
    let mut mad = [0; MAD_BYTES as usize];
    mad[..4].copy_from_slice(&[1, 7, 2, 3]);
    mad[8..16].copy_from_slice(&transaction.to_be_bytes());
    mad[16..18].copy_from_slice(&attribute.to_be_bytes());
    mad[24..28].copy_from_slice(&ids[0].to_be_bytes());
    mad[28..32].copy_from_slice(&ids[1].to_be_bytes());
    mad[32..40].copy_from_slice(&service.to_be_bytes());
    raw.put(OUT, &mad);
    let gid = raw.gid()?;
    let address = Address { dgid: gid, sgid: gid, hop_limit: 64, ..Address::default() };
    let mad = Mad { addr: BASE + OUT as u64, address, reserved: 0 };
    Ok(raw.command::<Object>(OP_SEND_MAD, mad.as_bytes())?.map(drop))
}

/// The oldest datagram that waits: its transaction, and its attribute.
fn receive_mad(raw: &mut RawDriver) -> Tested<Option<(u64, u16)>> {
    let room = Mad { addr: BASE + BACK as u64, ..Mad::default() };
    match raw.command::<Mad>(OP_RECEIVE_MAD, room.as_bytes())? {
        Err(errno) if errno == libc::ENODATA as u32 => Ok(None),
        Err(errno) => Err(RuleFault::failed("a datagram, or ENODATA", errno)),
        Ok(came) => {
            expect("who sent it", came.address.dgid, raw.gid()?)?;
            let bytes = raw.bytes(BACK, 24);
            let number =
                |at: usize, len: usize| bytes[at..at + len].iter().fold(0, |n, b| n << 8 | u64::from(*b));
            Ok(Some((number(8, 8), number(16, 2) as u16)))
        }
    }
}

pub(super) fn mads(bench: &mut Bench) -> Tested {
    const REQ: u16 = 0x10;
    const REJ: u16 = 0x12;
    const DREQ: u16 = 0x15;
    const DREP: u16 = 0x16;
    let mut raw = bench.open()?;
    needs(&mut raw, CAP_MADS, "CAP_MADS")?;
    let service = Service { id: SERVICE, scope: SCOPE_IPV4, ..Service::default() };
    let change = |raw: &mut RawDriver, op, service: Service| -> Tested<Result<(), u32>> {
        Ok(raw.command::<Object>(op, service.as_bytes())?.map(drop))
    };
    expect("a service without queue pair 1", change(&mut raw, OP_CLAIM_SERVICE, service)?, Err(EINVAL))?;
    let owner = raw.number(OP_OPEN_MADS, &[])?.number;
    expect(
        "a wild scope",
        change(&mut raw, OP_CLAIM_SERVICE, Service { scope: 9, ..service })?,
        Err(EINVAL),
    )?;
    expect("a service", change(&mut raw, OP_CLAIM_SERVICE, service)?, Ok(()))?;
    let taken = Err(libc::EADDRINUSE as u32);
    expect("the service again", change(&mut raw, OP_CLAIM_SERVICE, service)?, taken)?;
    expect("a datagram before there is any", receive_mad(&mut raw)?, None)?;
    /* nobody speaks for another's connections */
    let mut send = |attribute, ids| try_send_mad(&mut raw, attribute, 1, ids, SERVICE);
    expect("an ID of nobody", send(DREQ, [owner << 20 ^ 1 << 31 | 5, 7])?, Err(libc::EPERM as u32))?;
    expect("no message of a connection manager", send(0x7777, [owner << 20 | 5, 7])?, Err(EINVAL))?;
    /* a request for the service, and a message for an ID, come here */
    send_mad(&mut raw, REQ, 1, [owner << 20 | 5, 0], SERVICE)?;
    let event = RaisedEvent { kind: EVENT_MADS, number: 0 };
    expect("the event of a datagram", raw.wait_for_event(0)?, event)?;
    expect("a request for the service", receive_mad(&mut raw)?, Some((1, REQ)))?;
    send_mad(&mut raw, DREP, 2, [owner << 20 | 7, owner << 20 | 9], 0)?;
    expect("the event of the next one", raw.wait_for_event(1)?, event)?;
    expect("a message for an ID", receive_mad(&mut raw)?, Some((2, DREP)))?;
    expect("a datagram behind it", receive_mad(&mut raw)?, None)?;
    /* what is for nobody is answered by the board: a request is rejected, a connection is not there */
    expect("release", change(&mut raw, OP_RELEASE_SERVICE, service)?, Ok(()))?;
    expect("a second release", change(&mut raw, OP_RELEASE_SERVICE, service)?, Err(EINVAL))?;
    for (transaction, attribute, answer) in [(3, REQ, REJ), (4, DREQ, DREP)] {
        send_mad(&mut raw, attribute, transaction, [owner << 20 | 11, 0xfff << 20 | 1], SERVICE)?;
        let came = raw.wait("an answer for nobody", receive_mad)?;
        expect("the answer to what is for nobody", came, (transaction, answer))?;
    }
    Ok(())
}
