//! Attacks on another process's objects: numbers, keys, doorbells.

use libc::{EINVAL, EOPNOTSUPP};
use starverbs_queues::board::*;
use starverbs_queues::{SendOp, SendWqe, WcStatus};

use super::Attacker;
use crate::inside::expect_errno;
use crate::inside::pair::{ALL, DATA_BYTES, Pair, create_qp, queues_at, region};
use crate::inside::raw::{AsBody, Map, PAGE, Tested, expect};

/// Commands that name an object, each with what it names.
const NAMING: [u16; 10] = [
    OP_DEALLOC_PD,
    OP_DEREG_MR,
    OP_QUERY_MR,
    OP_DEALLOC_MW,
    OP_DESTROY_AH,
    OP_DESTROY_CQ,
    OP_QUERY_SRQ,
    OP_DESTROY_SRQ,
    OP_QUERY_QP,
    OP_DESTROY_QP,
];

pub(super) fn by_number(attacker: &mut Attacker) -> Tested {
    let device = attacker.open()?;
    let facts = attacker.facts;
    let numbers =
        [facts.pd, facts.key, facts.cq, facts.srq, facts.ah, facts.mw, facts.qpns[0], facts.qpns[1]];
    for op in NAMING {
        for number in numbers {
            let errno = device.object(op, number)?;
            expect_errno(&format!("command {op:#x} of {number:#x}"), errno, &[EINVAL])?;
        }
    }
    for qpn in facts.qpns {
        let modify = ModifyQp { qpn, mask: 1, attr: QpAttr { state: 6, ..QpAttr::default() } };
        let errno = device.command(OP_MODIFY_QP, &modify).map_err(|e| e.to_string())?.err();
        expect("the victim's queue pair to ERR", errno, Some(EINVAL))?;
    }
    let limit = SrqLimit { srq: facts.srq, limit: 1 };
    let errno = device.command(OP_MODIFY_SRQ, &limit).map_err(|e| e.to_string())?.err();
    expect("the victim's SRQ gets a limit", errno, Some(EINVAL))
}

pub(super) fn of_all_numbers(attacker: &mut Attacker) -> Tested {
    let device = attacker.open()?;
    let numbers: Vec<u32> = (0..512).chain((0..512).map(|_| attacker.random.bits() as u32)).collect();
    for op in NAMING {
        for &number in &numbers {
            let errno = device.object(op, number)?;
            expect_errno(&format!("command {op:#x} of {number:#x}"), errno, &[EINVAL])?;
        }
    }
    Ok(())
}

pub(super) fn keys(attacker: &mut Attacker) -> Tested {
    let facts = attacker.facts;
    let read = |rkey, remote_addr| SendWqe { op: SendOp::Read, rkey, remote_addr, ..SendWqe::default() };
    let write = |rkey, remote_addr| SendWqe { op: SendOp::Write, rkey, remote_addr, ..SendWqe::default() };
    let add = |rkey, remote_addr| SendWqe { op: SendOp::FetchAdd, compare_add: 1, ..read(rkey, remote_addr) };
    /* with its own key all of it works */
    let mut pair = Pair::new(&attacker.path)?;
    let (own, key) = (pair.piece(0, 8), pair.key);
    for wqe in [read(key, own.0 + 64), write(key, own.0 + 64), add(key, own.0 + 64)] {
        expect("with its own key", pair.outcome(wqe, own)?, WcStatus::Success)?;
    }
    /* each failure ends the queue pairs */
    for wqe in [read(facts.key, facts.addr), write(facts.key, facts.addr), add(facts.key, facts.addr)] {
        let mut pair = Pair::new(&attacker.path)?;
        let own = pair.piece(0, 8);
        pair.data.store(0, 0);
        expect("with the victim's rkey", pair.outcome(wqe, own)?, WcStatus::RemAccessErr)?;
        expect("what was read", pair.data.load(0), 0)?;
    }
    for lkey in [facts.key, facts.mw, 0, u32::MAX] {
        let mut pair = Pair::new(&attacker.path)?;
        let write = write(pair.key, pair.data.address());
        let status = pair.outcome(write, (facts.addr, 8, lkey))?;
        expect("with the victim's lkey", status, WcStatus::LocProtErr)?;
        expect("what was written", pair.data.load(0), 0)?;
    }
    /* the key one away, and bytes around its own region */
    for (addr, lkey) in [(-8, 0), (DATA_BYTES as i64, 0), (0, 1), (0, 0x100)] {
        let mut pair = Pair::new(&attacker.path)?;
        let (begin, len, key) = pair.piece(0, 8);
        let write = write(pair.key, begin);
        let status = pair.outcome(write, (begin.wrapping_add_signed(addr), len, key.wrapping_add(lkey)))?;
        expect("beyond its own region", status, WcStatus::LocProtErr)?;
    }
    Ok(())
}

pub(super) fn made_of_others(attacker: &mut Attacker) -> Tested {
    let facts = attacker.facts;
    let device = attacker.open()?;
    let begin = device.queue_memory(4 * PAGE as u64).map_err(|e| e.to_string())?;
    let own = device.make(OP_ALLOC_PD, &Object::default())?.number;
    let refused = |what: &str, errno: Option<i32>| expect(what, errno, Some(EINVAL));
    let memory = Map::anonymous(PAGE, false).map_err(|e| e.to_string())?;
    let answer = |op, body: &dyn AsBody| {
        let head = CommandHead { op, context: 0, status: 0 };
        device.command_of(head, body.bytes()).map(Result::err).map_err(|e| e.to_string())
    };
    let in_domain = region(facts.pd, memory.address(), PAGE as u64, ALL);
    refused("a region in the victim's domain", answer(OP_REG_MR, &in_domain)?)?;
    refused("a window there", answer(OP_ALLOC_MW, &Window { pd: facts.pd, kind: 1 })?)?;
    refused("its region elsewhere", answer(OP_REREG_MR, &Region { key: facts.key, ..in_domain })?)?;
    let qp = create_qp(queues_at(begin), facts.pd, facts.cq);
    refused("a queue pair in its domain", answer(OP_CREATE_QP, &qp)?)?;
    refused("a queue pair on its completion queue", answer(OP_CREATE_QP, &CreateQp { pd: own, ..qp })?)?;
    let kernel = RpcKernel { op: 1, pd: facts.pd, kernel: KERNEL_GET, ..RpcKernel::default() };
    refused("a kernel in its domain", answer(OP_LOAD_KERNEL, &kernel)?)?;
    let on_srq = CreateQp { srq: facts.srq, pd: own, ..qp };
    refused("a queue pair on its SRQ", answer(OP_CREATE_QP, &on_srq)?)?;
    let null = answer(OP_ALLOC_NULL_MR, &Object { number: facts.pd, reserved: 0 })?;
    expect("a null region in the victim's domain", null.is_some(), true)?;
    for number in 0..256 {
        if number != own && answer(OP_ALLOC_MW, &Window { pd: number, kind: 1 })?.is_none() {
            return Err(format!("a window in domain {number}"));
        }
    }
    Ok(())
}

pub(super) fn garbage_in_queues(attacker: &mut Attacker) -> Tested {
    for round in 0..4 {
        let mut pair = Pair::new(&attacker.path)?;
        pair.exchange(1)?;
        for at in (0..pair.page.len).step_by(8) {
            let value = attacker.random.bits() >> attacker.random.below(64);
            pair.page.store(at, value);
        }
        for at in (0..pair.queues.len).step_by(8) {
            let value = attacker.random.bits() >> attacker.random.below(64);
            pair.queues.store(at, value);
            if round % 2 == 1 && at % 512 == 0 {
                pair.page.store(pair.qps[0].cell as usize * 8, at as u64);
            }
        }
        /* the victim's cell in one's own page is nobody's */
        pair.page.store(attacker.facts.cell as usize * 8, attacker.random.bits());
        let errno = pair.device.object(OP_QUERY_MR, pair.key)?;
        expect_errno("the board goes on", errno, &[0, EOPNOTSUPP])?;
    }
    Ok(())
}
