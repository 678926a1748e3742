//! Commands and objects: B8, B10 to B14.

use std::mem::{offset_of, size_of};
use std::sync::atomic::Ordering;
use std::time::Instant;

use starverbs_queues::board::*;
use starverbs_queues::{SendOp, SendWqe, WcStatus};
use zerocopy::IntoBytes;

use crate::bench::{Bench, Pair};
use crate::fault::{RuleFault, Tested, ensure, expect};
use crate::qp::{SLOTS, address, data, request};
use crate::raw::{Basics, DATA, QP_BYTES, QPS, RawDriver};

const EINVAL: u32 = libc::EINVAL as u32;
const EBUSY: u32 = libc::EBUSY as u32;
const EOPNOTSUPP: u32 = libc::EOPNOTSUPP as u32;
const HEAD: usize = size_of::<CommandHead>();

pub(super) fn capabilities(bench: &mut Bench) -> Tested {
    let mut raw = bench.open()?;
    let caps = raw.long(REG_CAPS)?;
    let known = CONSTANTS.iter().filter(|(name, _)| name.starts_with("STARVERBS_CAP_"));
    let known = known.fold(0, |all, (_, bit)| all | bit);
    expect("bits of REG_CAPS that the headers do not name", caps & !known, 0)?;
    let takes = |cap: u64| caps & cap != 0;
    for op in [0, 0x0f, 0x7f, 0x500, u16::MAX] {
        expect(&format!("status of command {op:#x}"), raw.object(op, 77)?, Err(EOPNOTSUPP))?;
    }
    for (cap, op) in [
        (CAP_STAR, OP_STAR_QUERY),
        (CAP_STROM, OP_LOAD_KERNEL),
        (CAP_RMA, OP_RMA),
        (CAP_XRC, OP_CREATE_XRC_SRQ),
    ] {
        if !takes(cap) {
            expect(&format!("status of command {op:#x}"), raw.object(op, 77)?, Err(EOPNOTSUPP))?;
        }
    }
    let Basics { pd, cq, .. } = raw.basics()?;
    /* the kernel makes tables of its own */
    if !takes(CAP_MTT) && raw.link.context().is_none() {
        let pieces = Region { pieces: 1, ..RawDriver::region(pd, 0, 4096) };
        let done = raw.command::<NumberReply>(OP_REG_MR, pieces.as_bytes())?.map(drop);
        expect("status of a region of pieces", done, Err(EOPNOTSUPP))?;
    }
    if !takes(CAP_XRC) {
        for kind in [9, 10] {
            let xrc = CreateQp { kind, ..RawDriver::create_qp(pd, cq.number, QPS) };
            let done = raw.command::<NumberReply>(OP_CREATE_QP, xrc.as_bytes())?.map(drop);
            expect("status of an XRC QP", done, Err(EOPNOTSUPP))?;
        }
    }
    let window = raw.command::<NumberReply>(OP_ALLOC_MW, Window { pd, kind: 1 }.as_bytes())?.map(drop);
    let wanted = if takes(CAP_WINDOWS) { Ok(()) } else { Err(EOPNOTSUPP) };
    expect("status of ALLOC_MW, as CAP_WINDOWS says", window, wanted)
}

pub(super) fn answers(bench: &mut Bench) -> Tested {
    let mut raw = bench.open()?;
    let nothing = Object { number: 0x7fff_ffff, reserved: 0 };
    let region = Region { pd: 0x7fff_ffff, ..RawDriver::region(0, 0, 4096) };
    let fail = [
        (0, nothing.as_bytes()),
        (OP_DEALLOC_PD, nothing.as_bytes()),
        (OP_QUERY_QP, nothing.as_bytes()),
        (OP_QUERY_GID, nothing.as_bytes()),
        (OP_REG_MR, region.as_bytes()),
    ];
    for (op, body) in fail {
        let mut whole = [0xa5; BODY_BYTES];
        whole[..body.len()].copy_from_slice(body);
        let at = raw.put_command(op, &whole);
        raw.post_commands()?;
        let status = raw.status(at);
        let failed = status != 0 && status != PENDING && status < 4096;
        ensure(failed, &format!("an errno for command {op:#x}"), format_args!("status {status:#x}"))?;
        expect("the body of a command that failed", raw.bytes(at + HEAD, BODY_BYTES), whole.to_vec())?;
    }
    let wanted: DeviceReply = raw.ask(OP_QUERY_DEVICE, &[])?;
    for _ in 0..100 {
        let at = raw.put_command(OP_QUERY_DEVICE, &[0xa5; BODY_BYTES]);
        let seen = first_look(&mut raw, at)?;
        expect("the answer when the status is stored", seen, wanted.as_bytes().to_vec())?;
    }
    Ok(())
}

/// Posts the command at `at` while another thread looks; gives the answer as it is when the status is seen.
fn first_look(raw: &mut RawDriver, at: usize) -> Tested<Vec<u8>> {
    let (tail, patience, begun) = (raw.tail.to_le_bytes(), raw.patience, Instant::now());
    let RawDriver { link, memory, .. } = raw;
    std::thread::scope(|scope| {
        let looker = scope.spawn(|| {
            let status = memory.word(at + offset_of!(CommandHead, status));
            while begun.elapsed() < patience {
                if status.load(Ordering::Acquire) != PENDING {
                    return Some(memory.bytes(at + HEAD, size_of::<DeviceReply>()));
                }
            }
            None
        });
        link.write(REG_COMMANDS_TAIL, &tail)?;
        let seen = looker.join().ok().flatten();
        seen.ok_or_else(|| RuleFault::failed("a status", format_args!("none in {patience:?}")))
    })
}

pub(super) fn counts(bench: &mut Bench) -> Tested {
    let mut raw = bench.connect()?;
    raw.write(REG_COMMANDS_TAIL, &1u32.to_le_bytes())?;
    expect("REG_ERROR of a command before enabling", raw.register(REG_ERROR)?, libc::ENXIO as u32)?;
    raw.write(REG_ERROR, &[0; 4])?;
    raw.enable()?;
    let most = 1 << crate::raw::COMMANDS_LOG;
    for wild in [most + 1, u32::MAX, 1 << 31] {
        raw.write(REG_COMMANDS_TAIL, &wild.to_le_bytes())?;
        let with = format!("a count of {wild:#x}");
        expect(&format!("REG_ERROR of {with}"), raw.register(REG_ERROR)?, EINVAL)?;
        expect(&format!("REG_COMMANDS_HEAD behind {with}"), raw.register(REG_COMMANDS_HEAD)?, 0)?;
        raw.write(REG_ERROR, &[0; 4])?;
    }
    for _ in 0..most {
        raw.put_command(OP_ALLOC_PD, &[]);
    }
    raw.post_commands()?;
    let last = raw.status(RawDriver::command_at(most - 1));
    expect("status of the last of a whole queue", last, 0)?;
    expect("REG_COMMANDS_HEAD", raw.register(REG_COMMANDS_HEAD)?, most)
}

pub(super) fn order(bench: &mut Bench) -> Tested {
    let Pair { mut raw, pd, key, cq, mut a, b, .. } = bench.pair()?;
    /* what a command undoes is there for those before it, and gone for those behind it */
    let small = raw.number(OP_REG_MR, RawDriver::region(pd, DATA, 4096).as_bytes())?.number;
    let named = Object { number: small, reserved: 0 };
    let ops = [OP_QUERY_MR, OP_QUERY_MR, OP_DEREG_MR, OP_QUERY_MR, OP_DEREG_MR];
    let at = ops.map(|op| raw.put_command(op, named.as_bytes()));
    raw.post_commands()?;
    let done = at.map(|at| raw.status(at));
    expect("statuses of QUERY, QUERY, DEREG, QUERY, DEREG of a key", done, [0, 0, 0, EINVAL, EINVAL])?;
    /* nothing is written behind DEREG_MR's status, of what was asked for before it or after */
    const LEN: usize = 0x8000;
    for round in 0..8 {
        let target = DATA + 2 * LEN;
        let rkey = raw.number(OP_REG_MR, RawDriver::region(pd, target, LEN).as_bytes())?.number;
        for n in 0..16 {
            let wqe = SendWqe { remote_addr: address(2 * LEN), rkey, ..request(SendOp::Write, n) };
            raw.put_send(&mut a, wqe, data(0, LEN as u32, key));
        }
        let asked_before = round % 2 == 0;
        if asked_before {
            raw.doorbell(&a)?;
        }
        raw.done(OP_DEREG_MR, rkey)?;
        raw.put(target, &[0x55; LEN]);
        if !asked_before {
            raw.doorbell(&a)?;
        }
        for _ in 0..16 {
            raw.completion()?;
        }
        raw.settle()?;
        let touched = raw.bytes(target, LEN).iter().position(|byte| *byte != 0x55);
        expect(&format!("a byte written behind DEREG_MR's status, round {round}"), touched, None)?;
        for qp in [a, b] {
            raw.to_state(qp, crate::qp::state::RESET)?;
        }
        raw.connect_qp(a, b.qpn)?;
        raw.connect_qp(b, a.qpn)?;
    }
    no_late_completion(&mut raw, pd, key, cq)
}

/// No completion of a QP comes behind DESTROY_QP's status.
fn no_late_completion(raw: &mut RawDriver, pd: u32, key: u32, cq: u32) -> Tested {
    for round in 0..8 {
        let (mut c, mut d) = (raw.qp(pd, cq, 2)?, raw.qp(pd, cq, 3)?);
        raw.connect_qp(c, d.qpn)?;
        raw.connect_qp(d, c.qpn)?;
        for n in 0..u64::from(SLOTS / 2) {
            raw.post_recv(&mut d, n, data(4096, 64, key));
            raw.put_send(&mut c, request(SendOp::Send, n), data(0, 64, key));
        }
        raw.doorbell(&c)?;
        raw.done(OP_DESTROY_QP, c.qpn)?;
        while raw.poll().is_some() {}
        raw.settle()?;
        raw.done(OP_DESTROY_QP, d.qpn)?;
        while let Some(cqe) = raw.poll() {
            let seen = format_args!("one, round {round}");
            ensure(cqe.qpn != c.qpn, "no completion of a QP behind DESTROY_QP's status", seen)?;
        }
        raw.settle()?;
        expect("a completion behind DESTROY_QP's status", raw.poll(), None)?;
    }
    Ok(())
}

pub(super) fn busy(bench: &mut Bench) -> Tested {
    let mut pair = bench.pair()?;
    let queues = RawDriver::create_qp(pair.pd, pair.cq, QPS + 2 * QP_BYTES).queues;
    let srq = CreateSrq { queues, pd: pair.pd, limit: 0 };
    let srq = pair.raw.number(OP_CREATE_SRQ, srq.as_bytes())?.number;
    let with = CreateQp { srq, ..RawDriver::create_qp(pair.pd, pair.cq, QPS + 3 * QP_BYTES) };
    let qp = pair.raw.qp_of(3, &with)?;
    let other = pair.raw.number(OP_ALLOC_PD, &[])?.number;
    let ah = AddressHandle { pd: other, address: Address::default() };
    let gid = pair.raw.gid()?;
    let ah = AddressHandle { address: Address { dgid: gid, sgid: gid, ..ah.address }, ..ah };
    let ah = pair.raw.number(OP_CREATE_AH, ah.as_bytes())?.number;
    let needed = [
        (OP_DEALLOC_PD, pair.pd, "a PD with regions and QPs"),
        (OP_DEALLOC_PD, other, "a PD with an address handle"),
        (OP_DESTROY_CQ, pair.cq, "a CQ of QPs"),
        (OP_DESTROY_SRQ, srq, "an SRQ of a QP"),
    ];
    for (op, number, what) in needed {
        expect(&format!("status of ending {what}"), pair.raw.object(op, number)?, Err(EBUSY))?;
    }
    pair.exchange(1)?;
    for (op, number) in [
        (OP_DESTROY_QP, qp.qpn),
        (OP_DESTROY_SRQ, srq),
        (OP_DESTROY_AH, ah),
        (OP_DEALLOC_PD, other),
        (OP_DESTROY_QP, pair.a.qpn),
        (OP_DESTROY_QP, pair.b.qpn),
        (OP_DESTROY_CQ, pair.cq),
        (OP_DEREG_MR, pair.key),
        (OP_DEALLOC_PD, pair.pd),
    ] {
        pair.raw.done(op, number)?;
    }
    Ok(())
}

pub(super) fn own_objects(bench: &mut Bench) -> Tested {
    bench.second()?;
    let one = bench.pair()?;
    let mut two = bench.second_pair()?;
    for (op, number) in [
        (OP_DEALLOC_PD, one.pd),
        (OP_DEREG_MR, one.key),
        (OP_QUERY_MR, one.key),
        (OP_QUERY_QP, one.a.qpn),
        (OP_DESTROY_QP, one.a.qpn),
    ] {
        /* small numbers may be the other's as well, and are another object then */
        let own = [two.pd, two.key, two.a.qpn, two.b.qpn, two.cq].contains(&number);
        if !own {
            let done = two.raw.object(op, number)?;
            expect(&format!("status of command {op:#x} on another function's object"), done, Err(EINVAL))?;
        }
    }
    if one.pd != two.pd {
        let region = RawDriver::region(one.pd, DATA, 4096);
        let done = two.raw.command::<NumberReply>(OP_REG_MR, region.as_bytes())?.map(drop);
        expect("status of a region in another function's domain", done, Err(EINVAL))?;
        let create = RawDriver::create_qp(one.pd, two.cq, QPS + 2 * QP_BYTES);
        let done = two.raw.command::<NumberReply>(OP_CREATE_QP, create.as_bytes())?.map(drop);
        expect("status of a QP in another function's domain", done, Err(EINVAL))?;
    }
    if one.key == two.key {
        return Err(RuleFault::failed("keys of their own for two functions", format_args!("{:#x}", one.key)));
    }
    let Pair { raw, a, .. } = &mut two;
    raw.put_send(a, request(SendOp::Send, 5), data(0, 8, one.key));
    raw.doorbell(a)?;
    let status = raw.completion()?.status;
    expect("completion of a send with another function's key", status, WcStatus::LocProtErr)
}
