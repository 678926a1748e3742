//! Attacks on memory: regions, queue memory, limits.

use libc::{EBUSY, EFAULT, EINVAL, ENODATA, ENOMEM, ENOSPC, EOPNOTSUPP};
use starverbs_queues::board::*;
use starverbs_queues::{SendOp, SendWqe, WcStatus};

use super::{Attacker, in_child};
use crate::inside::expect_errno;
use crate::inside::pair::{ALL, Pair, create_qp, queues_at, region};
use crate::inside::raw::{AsBody, Device, Map, PAGE, Tested, errno, expect};

/// The errno of a region's registration; 0: it is one.
fn register(device: &Device, region: &Region) -> Tested<i32> {
    let answer = device.command(OP_REG_MR, region).map_err(|e| e.to_string())?;
    Ok(answer.err().unwrap_or(0))
}

pub(super) fn of_others(attacker: &mut Attacker) -> Tested {
    let device = attacker.open()?;
    let pd = device.make(OP_ALLOC_PD, &Object::default())?.number;
    let refused = |what: &str, addr: u64, length: u64, access: u32| {
        let errno = register(&device, &region(pd, addr, length, access))?;
        let what = format!("{what}: {length:#x} bytes at {addr:#x}, access {access}");
        expect_errno(&what, errno, &[EFAULT, EINVAL, ENOMEM])
    };
    let page = device.map(0, PAGE).map_err(|e| e.to_string())?;
    let events = device.map(device.info.events, PAGE).map_err(|e| e.to_string())?;
    let memory = Map::anonymous(4 * PAGE, false).map_err(|e| e.to_string())?;
    let at = memory.address();
    memory.unmap(2 * PAGE, PAGE);
    for access in [0, ALL] {
        for addr in [0, 0xffff_8880_0000_0000, 0xffff_ffff_8100_0000, u64::MAX - 4095, u64::MAX << 47] {
            refused("the kernel's, or none", addr, PAGE as u64, access)?;
        }
        for length in [u64::MAX, u64::MAX - at, 1 << 63, 1 << 62, 1 << 47, 1 << 44] {
            refused("a wild length", at, length, access)?;
        }
        refused("across a hole", at, 4 * PAGE as u64, access)?;
        refused("the doorbell page", page.address(), PAGE as u64, access)?;
        refused("queue memory", events.address(), PAGE as u64, access)?;
    }
    // SAFETY: changes the rights of this function's own mapping.
    unsafe { libc::mprotect(memory.at.cast(), PAGE, libc::PROT_NONE) };
    refused("memory without rights", at, PAGE as u64, ALL)?;
    // SAFETY: as above.
    unsafe { libc::mprotect(memory.at.cast(), PAGE, libc::PROT_READ) };
    refused("memory that is only read, for writing", at, PAGE as u64, 1)?;
    expect("memory that is only read, for reading", register(&device, &region(pd, at, 64, 0))?, 0)
}

pub(super) fn tables(attacker: &mut Attacker) -> Tested {
    let device = attacker.open()?;
    let pd = device.make(OP_ALLOC_PD, &Object::default())?.number;
    let memory = Map::anonymous(PAGE, false).map_err(|e| e.to_string())?;
    let plain = region(pd, memory.address(), 64, ALL);
    for table in [
        Region { pieces: 1, page_log: 12, ..plain },
        Region { pieces: u32::MAX, ..plain },
        Region { page_log: 30, ..plain },
        Region { offset: 8, ..plain },
    ] {
        expect("a table of one's own", register(&device, &table)?, EINVAL)?;
    }
    /* no answer tells where memory is */
    let made = device.make(OP_REG_MR, &plain)?.number;
    let said: Region = device.answer(OP_QUERY_MR, &Object { number: made, reserved: 0 })?;
    expect("what a region's query says", (said.addr, said.pieces), (memory.address(), 0))
}

pub(super) fn twice(attacker: &mut Attacker) -> Tested {
    let mut pair = Pair::new(&attacker.path)?;
    let memory = Map::anonymous(PAGE, false).map_err(|e| e.to_string())?;
    let (addr, len) = (memory.address(), PAGE as u64);
    let key = pair.device.make(OP_REG_MR, &region(pair.pd, addr, len, ALL))?.number;
    memory.store(0, 1);
    memory.unmap(0, PAGE);
    memory.forget();
    /* what lies there now is not the region's */
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping in the place of the one that was just given up.
    let at = unsafe { libc::mmap(addr as *mut _, PAGE, prot, flags, -1, 0) };
    expect("new memory in its place", at as u64, addr)?;
    let memory = Map { at: at.cast(), len: PAGE };
    let write = SendWqe { op: SendOp::Write, rkey: key, remote_addr: addr, ..SendWqe::default() };
    pair.data.store(0, 0x1111);
    let own = pair.piece(0, 8);
    expect("a write to memory that has gone", pair.outcome(write, own)?, WcStatus::Success)?;
    expect("what lies there now", memory.load(0), 0)?;
    expect("ended", pair.device.object(OP_DEREG_MR, key)?, 0)?;
    expect("ended twice", pair.device.object(OP_DEREG_MR, key)?, EINVAL)?;
    let again = Region { key, ..region(pair.pd, addr, len, ALL) };
    let answer = pair.device.command(OP_REREG_MR, &again).map_err(|e| e.to_string())?;
    expect("moved when it is ended", answer.err(), Some(EINVAL))?;
    /* one that cannot be moved stays */
    let key = pair.device.make(OP_REG_MR, &region(pair.pd, addr, len, ALL))?.number;
    let nowhere = Region { key, ..region(pair.pd, 64, len, ALL) };
    let answer = pair.device.command(OP_REREG_MR, &nowhere).map_err(|e| e.to_string())?;
    expect("moved to where nothing is", answer.err(), Some(EFAULT))?;
    let write = SendWqe { rkey: key, ..write };
    expect("a write to it", pair.outcome(write, own)?, WcStatus::Success)?;
    expect("what it has", memory.load(0), 0x1111)?;
    /* all sizes, many times: what is pinned is unpinned */
    for round in 0..200 {
        let region = region(pair.pd, addr + round, len - 2 * round, (round & 1) as u32);
        let key = pair.device.make(OP_REG_MR, &region)?.number;
        expect("ended", pair.device.object(OP_DEREG_MR, key)?, 0)?;
    }
    Ok(())
}

pub(super) fn queue_memory(attacker: &mut Attacker) -> Tested {
    let device = attacker.open()?;
    let sizes = [0, u64::MAX, u64::MAX - 4095, 1 << 63, (1 << 30) + 1, 1 << 40];
    for bytes in sizes {
        expect_errno(&format!("{bytes:#x} bytes"), errno(device.queue_memory(bytes)), &[EINVAL, ENOMEM])?;
    }
    let begin = device.queue_memory(4 * PAGE as u64).map_err(|e| e.to_string())?;
    let pd = device.make(OP_ALLOC_PD, &Object::default())?.number;
    let create = CreateCq { entries: begin + 64, taken: begin, log: 4, flags: 0 };
    let cq = device.make(OP_CREATE_CQ, &create)?.number;
    expect("with a queue there", errno(device.free_queue_memory(begin)), EBUSY)?;
    let qp = create_qp(queues_at(begin + PAGE as u64), pd, cq);
    let qp = device.make(OP_CREATE_QP, &qp)?.number;
    expect("a CQ that is used", device.object(OP_DESTROY_CQ, cq)?, EBUSY)?;
    expect("its QP ends", device.object(OP_DESTROY_QP, qp)?, 0)?;
    expect("with a CQ there still", errno(device.free_queue_memory(begin)), EBUSY)?;
    expect("the CQ ends", device.object(OP_DESTROY_CQ, cq)?, 0)?;
    expect("ended twice", device.object(OP_DESTROY_CQ, cq)?, EINVAL)?;
    expect("from its middle", errno(device.free_queue_memory(begin + PAGE as u64)), EINVAL)?;
    expect("without queues", errno(device.free_queue_memory(begin)), 0)?;
    expect("given back twice", errno(device.free_queue_memory(begin)), EINVAL)?;
    expect("the event queue", errno(device.free_queue_memory(device.info.events)), EBUSY)?;
    for offset in [0, 1, PAGE as u64, u64::MAX, u64::MAX << 12] {
        expect("what is no piece", errno(device.free_queue_memory(offset)), EINVAL)?;
    }
    let pieces = (0..1100).map(|_| errno(device.queue_memory(1))).find(|&errno| errno != 0);
    expect_errno("pieces without end", pieces.unwrap_or(0), &[ENOSPC, ENOMEM])
}

pub(super) fn queues_elsewhere(attacker: &mut Attacker) -> Tested {
    let device = attacker.open()?;
    let begin = device.queue_memory(4 * PAGE as u64).map_err(|e| e.to_string())?;
    let end = begin + 4 * PAGE as u64;
    let pd = device.make(OP_ALLOC_PD, &Object::default())?.number;
    let good = CreateCq { entries: begin + 64, taken: begin, log: 4, flags: 0 };
    let cq = device.make(OP_CREATE_CQ, &good)?.number;
    let addr = addr_of(&good);
    for at in [0, 64, begin - 64, end, end - 64, addr, 1 << 40, u64::MAX - 63, u64::MAX << 47] {
        for create in [CreateCq { entries: at, ..good }, CreateCq { taken: at, ..good }] {
            /* in the event queue, before the piece, it harms its own process alone */
            let is_in_events = at == begin - 64 && create.taken == at;
            let is_inside = at == end - 64 && create.taken == at;
            let errno = device.command(OP_CREATE_CQ, &create).map_err(|e| e.to_string())?.err();
            let wanted: &[i32] = if is_in_events || is_inside { &[0] } else { &[EFAULT, EINVAL] };
            expect_errno(&format!("a CQ at {at:#x}"), errno.unwrap_or(0), wanted)?;
        }
        let good = create_qp(queues_at(begin + 512), pd, cq);
        for queues in [
            Queues { program: at, ..good.queues },
            Queues { card: at, ..good.queues },
            Queues { send: at, ..good.queues },
            Queues { recv: at, ..good.queues },
        ] {
            let answer = device.command(OP_CREATE_QP, &CreateQp { queues, ..good });
            let errno = answer.map_err(|e| e.to_string())?.err().unwrap_or(0);
            let is_line = at == end - 64 || at == begin - 64;
            let wanted: &[i32] = if is_line { &[0, EFAULT, EINVAL] } else { &[EFAULT, EINVAL] };
            expect_errno(&format!("queues at {at:#x}"), errno, wanted)?;
        }
        let answers = CreateQp { flags: QP_RPC, answers: at, answer_slots: MAX_ANSWERS as u8, ..good };
        let errno = device.command(OP_CREATE_QP, &answers).map_err(|e| e.to_string())?.err();
        expect_errno(&format!("answers at {at:#x}"), errno.unwrap_or(0), &[EFAULT, EINVAL])?;
        for flags in [QP_STAR, 0x10, 0x80] {
            /* what it says may be an address that nobody has looked at */
            let strange = device.command(OP_CREATE_QP, &CreateQp { flags, answers: at, ..good });
            let errno = strange.map_err(|e| e.to_string())?.err().unwrap_or(0);
            expect_errno(&format!("flags {flags:#x}"), errno, &[EOPNOTSUPP])?;
        }
    }
    for log in [9, 31, 32, 63, 64, 255, u32::MAX] {
        let errno = device.command(OP_CREATE_CQ, &CreateCq { log, ..good }).map_err(|e| e.to_string())?.err();
        expect_errno(&format!("2^{log} entries"), errno.unwrap_or(0), &[EFAULT, EINVAL])?;
    }
    let good = create_qp(queues_at(begin), pd, cq);
    for log in [16, 31, 32, 255] {
        for queues in [Queues { send_log: log, ..good.queues }, Queues { recv_log: log, ..good.queues }] {
            let answer = device.command(OP_CREATE_QP, &CreateQp { queues, ..good });
            let errno = answer.map_err(|e| e.to_string())?.err().unwrap_or(0);
            expect_errno(&format!("2^{log} slots"), errno, &[EFAULT, EINVAL])?;
        }
    }
    let queues = Queues { send_stride: u16::MAX, recv_stride: u16::MAX, ..good.queues };
    let answer = device.command(OP_CREATE_QP, &CreateQp { queues, ..good }).map_err(|e| e.to_string())?;
    expect_errno("slots of 64 KiB", answer.err().unwrap_or(0), &[EFAULT, EINVAL])
}

/// Datagrams of the connection manager, and completion queues that move: addresses of queue memory, too.
pub(super) fn other_addresses(attacker: &mut Attacker) -> Tested {
    let device = attacker.open()?;
    let begin = device.queue_memory(PAGE as u64).map_err(|e| e.to_string())?;
    let end = begin + PAGE as u64;
    device.make(OP_OPEN_MADS, &Object::default())?;
    let status = |op, body: &dyn AsBody| {
        let head = CommandHead { op, context: 0, status: 0 };
        let answer = device.command_of(head, body.bytes()).map_err(|e| e.to_string())?;
        Ok::<_, String>(answer.err().unwrap_or(0))
    };
    let mad = |addr| Mad { addr, ..Mad::default() };
    for at in [0, 64, begin - 8, end - 255, end, 1 << 40, u64::MAX - 255, u64::MAX << 47] {
        for op in [OP_SEND_MAD, OP_RECEIVE_MAD] {
            let wanted: &[i32] = if at == begin - 8 { &[EFAULT, EINVAL] } else { &[EFAULT] };
            expect_errno(&format!("{op:#x} at {at:#x}"), status(op, &mad(at))?, wanted)?;
        }
    }
    expect("with none that waits", status(OP_RECEIVE_MAD, &mad(end - 256))?, ENODATA)?;
    let create = CreateCq { entries: begin + 64, taken: begin, log: 4, flags: 0 };
    let cq = device.make(OP_CREATE_CQ, &create)?.number;
    let resize = |entries, taken, log| ResizeCq { entries, taken, cq, log };
    for at in [0, 64, end - 64, end, addr_of(&create), u64::MAX - 63] {
        expect("entries elsewhere", status(OP_RESIZE_CQ, &resize(at, begin, 4))?, EFAULT)?;
    }
    for at in [0, 64, end, addr_of(&create), u64::MAX - 3] {
        expect("a word elsewhere", status(OP_RESIZE_CQ, &resize(begin + 64, at, 4))?, EFAULT)?;
    }
    for log in [8, 31, 32, 255, u32::MAX] {
        let errno = status(OP_RESIZE_CQ, &resize(begin + 64, begin, log))?;
        expect_errno(&format!("2^{log} entries"), errno, &[EFAULT, EINVAL])?;
    }
    /* another one's, or none: nothing stays in use */
    let other = device.queue_memory(PAGE as u64).map_err(|e| e.to_string())?;
    let foreign = ResizeCq { cq: 4711, ..resize(other + 64, other, 4) };
    expect("a queue that there is not", status(OP_RESIZE_CQ, &foreign)?, EINVAL)?;
    expect("its place is free", errno(device.free_queue_memory(other)), 0)?;
    let other = device.queue_memory(PAGE as u64).map_err(|e| e.to_string())?;
    expect("moved", status(OP_RESIZE_CQ, &resize(other + 64, other, 5))?, 0)?;
    expect("where it is", errno(device.free_queue_memory(other)), EBUSY)?;
    expect("where it was", errno(device.free_queue_memory(begin)), 0)?;
    expect("it ends", device.object(OP_DESTROY_CQ, cq)?, 0)?;
    expect("where it was last", errno(device.free_queue_memory(other)), 0)
}

fn addr_of<T>(value: &T) -> u64 {
    std::ptr::from_ref(value) as u64
}

/// Of a process without CAP_IPC_LOCK.
pub(super) fn beyond_the_limit(attacker: &mut Attacker) -> Tested {
    const LIMIT: u64 = 1 << 20;
    const PIECE: u64 = 1 << 16;
    in_child(|| {
        let limit = libc::rlimit { rlim_cur: LIMIT, rlim_max: LIMIT };
        // SAFETY: reads a struct of this function.
        let set = unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) };
        expect("a limit", set, 0)?;
        let device = attacker.open()?;
        let pd = device.make(OP_ALLOC_PD, &Object::default())?.number;
        let memory = Map::anonymous(2 * LIMIT as usize, false).map_err(|e| e.to_string())?;
        let whole = region(pd, memory.address(), 2 * LIMIT, ALL);
        expect("more at once", register(&device, &whole)?, ENOMEM)?;
        expect("more queue memory at once", errno(device.queue_memory(2 * LIMIT)), ENOMEM)?;
        /* the same memory counts each time that it is pinned */
        let piece = region(pd, memory.address(), PIECE, ALL);
        let mut keys = Vec::new();
        loop {
            match register(&device, &piece)? {
                0 => keys.push(()),
                errno => break expect("more in pieces", errno, ENOMEM)?,
            }
            if keys.len() as u64 > LIMIT / PIECE {
                return Err(format!("{} pieces of 64 KiB", keys.len()));
            }
        }
        expect("queue memory beside it", errno(device.queue_memory(PIECE)), ENOMEM)?;
        /* another file counts as the same process's, and what ends is free again */
        let other = attacker.open().err();
        drop(device);
        let device = attacker.open()?;
        let pd = device.make(OP_ALLOC_PD, &Object::default())?.number;
        let piece = Region { pd, ..piece };
        expect("after the end", register(&device, &piece)?, 0)?;
        expect("a second file has no event queue", other.is_some(), true)
    })
}

/// A region that is made of memory which was never touched is the program's memory all the same.
pub(super) fn is_the_program_s(attacker: &mut Attacker) -> Tested {
    for access in [0, 1] {
        let mut pair = Pair::new(&attacker.path)?;
        let memory = Map::anonymous(4 * PAGE, false).map_err(|e| e.to_string())?;
        let (addr, len) = (memory.address(), 4 * PAGE as u64);
        let key = pair.device.make(OP_REG_MR, &region(pair.pd, addr, len, access))?.number;
        for at in (0..4 * PAGE).step_by(PAGE) {
            memory.store(at, 0x1000 + at as u64);
            let to = pair.data.address();
            let write = SendWqe { op: SendOp::Write, rkey: pair.key, remote_addr: to, ..SendWqe::default() };
            let status = pair.outcome(write, (addr + at as u64, 8, key))?;
            expect("a write of it", status, WcStatus::Success)?;
            let what = format!("what the board has read, access {access}");
            expect(&what, pair.data.load(0), 0x1000 + at as u64)?;
        }
    }
    Ok(())
}
