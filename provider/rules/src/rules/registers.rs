//! Registers, enabling, resets: B1 to B6.

use std::mem::size_of;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use nix::sys::eventfd::{EfdFlags, EventFd};
use starverbs_queues::board::*;
use zerocopy::IntoBytes;

use crate::bench::Bench;
use crate::fault::{RuleFault, Tested, ensure, errno, expect};
use crate::raw::{BASE, BYTES, Basics, COMMANDS, COMMANDS_LOG, EVENTS, EVENTS_LOG, RawDriver};

/// Registers of 64 bits.
const LONG: [u32; 3] = [REG_CAPS, REG_COMMANDS, REG_EVENTS];
const LAST_COUNTER: u32 = REG_COUNTERS + 8 * COUNTERS;

/// The end of the registers before the counters.
fn registers_end() -> u32 {
    let registers = CONSTANTS.iter().filter(|(name, _)| name.starts_with("STARVERBS_REG_"));
    let before = registers.map(|(_, at)| *at as u32).filter(|at| *at < REG_COUNTERS);
    before.map(|at| at + if LONG.contains(&at) { 8 } else { 4 }).max().unwrap_or(0)
}

pub(super) fn numbers(bench: &mut Bench) -> Tested {
    let mut raw = bench.connect()?;
    let magic = raw.register(REG_MAGIC)?;
    ensure(magic == MAGIC, &format!("{MAGIC:#x} in REG_MAGIC"), format_args!("{magic:#x}"))?;
    expect("the major number of REG_VERSION", raw.register(REG_VERSION)? >> 16, VERSION >> 16)?;
    let caps = raw.long(REG_CAPS)?;
    ensure(caps & CAP_VERBS != 0, "CAP_VERBS in REG_CAPS", format_args!("{caps:#x}"))?;
    let cells = raw.register(REG_CELLS)? as usize;
    let page = raw.page.len();
    let fits = cells > CELL_FIRST as usize && cells.saturating_mul(CELL_BYTES as usize) <= page;
    ensure(fits, "a page for the cells of REG_CELLS", format_args!("{cells} cells, {page} bytes"))?;
    let vectors = raw.register(REG_VECTORS)?;
    ensure(vectors > 0, "a vector in REG_VECTORS", vectors)
}

pub(super) fn wholes(bench: &mut Bench) -> Tested {
    let mut raw = bench.connect()?;
    raw.set_queues(BASE, 3, BASE + 0x1000, 5)?;
    let before = raw.registers(0, REG_COUNTERS as usize)?;
    let wrong = [
        (REG_COMMANDS, 4),
        (REG_COMMANDS + 4, 4),
        (REG_COMMANDS_LOG, 8),
        (REG_COMMANDS_LOG, 1),
        (REG_EVENTS_LOG, 2),
        (REG_EVENTS_LOG + 1, 4),
        (REG_EVENTS, 16),
        (REG_MAGIC, 4),
        (REG_VERSION, 4),
        (REG_STATUS, 4),
        (REG_CAPS, 8),
        (REG_COUNTERS, 8),
        (REG_COUNTERS - 4, 4),
        (CONTROL_BYTES, 4),
    ];
    for (at, len) in wrong {
        let written = raw.write(at, &[0x55; 16][..len]);
        expect(&format!("errno of {len} bytes written at {at:#x}"), errno(&written), libc::EINVAL)?;
    }
    expect("registers behind writes that are none", raw.registers(0, REG_COUNTERS as usize)?, before)?;
    for (at, len) in [(0, 1), (1, 1), (2, 4), (6, 4), (3, 8), (REG_COMMANDS + 1, 16), (REG_EVENTS - 3, 7)] {
        let whole = raw.registers(at & !7, 32)?;
        let from = (at & 7) as usize;
        let part = raw.registers(at, len)?;
        expect(&format!("{len} bytes read at {at:#x}"), &part[..], &whole[from..from + len])?;
    }
    for (from, to) in [(registers_end(), REG_COUNTERS), (LAST_COUNTER, CONTROL_BYTES)] {
        let none = raw.registers(from, (to - from) as usize)?;
        let first = none.iter().position(|byte| *byte != 0);
        expect(&format!("what is not 0 from {from:#x} to {to:#x}"), first, None)?;
    }
    Ok(())
}

pub(super) fn enabling(bench: &mut Bench) -> Tested {
    let mut raw = bench.connect()?;
    let (commands, events) = (BASE + COMMANDS as u64, BASE + EVENTS as u64);
    let end = BASE + BYTES as u64;
    let (nowhere, wrong) = ([libc::EFAULT; 2], [libc::EINVAL; 2]);
    let either = [libc::EFAULT, libc::EINVAL];
    let tried = [
        ((end, 4), (events, 8), nowhere),
        ((commands, 4), (end, 8), nowhere),
        ((0, 0), (0, 0), nowhere),
        ((end - 128, 1), (events, 8), nowhere),
        ((commands + 8, 4), (events, 8), wrong),
        ((commands, 4), (events + 16, 8), wrong),
        ((commands, 13), (events, 8), wrong),
        ((commands, 4), (events, 13), wrong),
        ((commands, 4), (events, 32), wrong),
        ((commands, u32::MAX), (events, 8), wrong),
        ((u64::MAX - 63, 4), (events, 8), either),
        ((commands, 4), (1 << 63, 8), either),
    ];
    for (commands, events, wanted) in tried {
        raw.set_queues(commands.0, commands.1, events.0, events.1)?;
        raw.write(REG_CONTROL, &CTRL_ENABLE.to_le_bytes())?;
        let (status, error) = (raw.register(REG_STATUS)?, raw.register(REG_ERROR)?);
        let with = format!("commands {commands:x?}, events {events:x?}");
        expect(&format!("STATUS_ENABLED with {with}"), status & STATUS_ENABLED, 0)?;
        let named = wanted.contains(&(error as i32));
        ensure(named, &format!("errno {wanted:?} in REG_ERROR with {with}"), error)?;
        raw.write(REG_ERROR, &0u32.to_le_bytes())?;
        expect("REG_ERROR after a write", raw.register(REG_ERROR)?, 0)?;
    }
    raw.enable()?;
    expect("REG_ERROR when enabled", raw.register(REG_ERROR)?, 0)?;
    for (at, len) in [(REG_COMMANDS, 8), (REG_COMMANDS_LOG, 4), (REG_EVENTS, 8), (REG_EVENTS_LOG, 4)] {
        let before = raw.registers(at, len)?;
        let written = raw.write(at, &[0; 8][..len]);
        expect(&format!("errno of a write at {at:#x} while enabled"), errno(&written), libc::EBUSY)?;
        expect(&format!("the register at {at:#x} afterwards"), raw.registers(at, len)?, before)?;
    }
    raw.number(OP_ALLOC_PD, &[]).map(drop)
}

/// What is left of a function that was reset: registers, cells, objects.
fn is_new(raw: &mut RawDriver, what: &str, made: &[(u16, u32)]) -> Tested {
    let zero = [REG_COMMANDS, REG_COMMANDS_LOG, REG_COMMANDS_HEAD, REG_EVENTS, REG_EVENTS_LOG, REG_STATUS];
    for at in zero {
        expect(&format!("the register at {at:#x} after {what}"), raw.register(at)?, 0)?;
    }
    for cell in 0..raw.page.len() as u32 / 8 {
        let value = raw.cell(cell)?.load(Ordering::Acquire);
        if value != 0 {
            return Err(RuleFault::failed(
                format_args!("0 in all cells after {what}"),
                format_args!("{value:#x} in cell {cell}"),
            ));
        }
    }
    raw.put(0, &[0; crate::raw::QPS]);
    raw.enable().map_err(|_| {
        RuleFault::failed(format_args!("maps that outlive {what}"), "it cannot be enabled again")
    })?;
    for (op, number) in made {
        let gone = raw.object(*op, *number)?;
        expect(&format!("command {op:#x} on an object from before {what}"), gone, Err(libc::EINVAL as u32))?;
    }
    Ok(())
}

/// Makes one of each, and rings cells; what names them.
fn make_all(raw: &mut RawDriver) -> Tested<Vec<(u16, u32)>> {
    let Basics { pd, key, cq } = raw.basics()?;
    let qp = raw.qp(pd, cq.number, 0)?;
    let queues = RawDriver::create_qp(pd, cq.number, crate::raw::QPS + crate::raw::QP_BYTES).queues;
    let srq = raw.number(OP_CREATE_SRQ, CreateSrq { queues, pd, limit: 0 }.as_bytes())?.number;
    raw.ring(qp.cell + 1, 7)?;
    raw.ring(cq.cell, crate::raw::arm(0, 1, false))?;
    Ok(vec![
        (OP_QUERY_QP, qp.qpn),
        (OP_QUERY_MR, key),
        (OP_QUERY_SRQ, srq),
        (OP_DESTROY_CQ, cq.number),
        (OP_DEALLOC_PD, pd),
    ])
}

pub(super) fn resets(bench: &mut Bench) -> Tested {
    let mut raw = bench.open()?;
    let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
    let eventfd = EventFd::from_flags(flags).map_err(std::io::Error::from)?;
    let given = [OwnedFd::from(eventfd)];
    raw.link.signal(&given)?;
    let made = make_all(&mut raw)?;
    raw.write(REG_CONTROL, &CTRL_RESET.to_le_bytes())?;
    is_new(&mut raw, "CTRL_RESET", &made)?;
    let made = make_all(&mut raw)?;
    raw.link.reset()?;
    is_new(&mut raw, "a reset of the function", &made)?;
    let made = make_all(&mut raw)?;
    super::pci::flr(&mut raw)?;
    is_new(&mut raw, "FLR", &made)?;
    /* the vector outlives both */
    let Basics { pd, key, cq } = raw.basics()?;
    raw.taken = 0;
    let (mut a, mut b) = (raw.qp(pd, cq.number, 0)?, raw.qp(pd, cq.number, 1)?);
    raw.connect_qp(a, b.qpn)?;
    raw.connect_qp(b, a.qpn)?;
    raw.ring(cq.cell, crate::raw::arm(0, 1, false))?;
    raw.exchange(key, &mut a, &mut b, 1)?;
    raw.wait("an interrupt by a vector from before the resets", |_| {
        let mut count = [0; size_of::<u64>()];
        Ok(nix::unistd::read(&given[0], &mut count).is_ok().then_some(()))
    })?;
    drop(raw);
    let mut next = bench.connect()?;
    let zero = [REG_STATUS, REG_COMMANDS_LOG, REG_EVENTS_LOG, REG_ERROR];
    for at in zero {
        expect(&format!("the register at {at:#x} for the next client"), next.register(at)?, 0)?;
    }
    next.link.unmap(BASE, BYTES as u64)?;
    next.set_queues(BASE + COMMANDS as u64, COMMANDS_LOG, BASE + EVENTS as u64, EVENTS_LOG)?;
    next.write(REG_CONTROL, &CTRL_ENABLE.to_le_bytes())?;
    expect("enabled by the former client's memory", next.register(REG_STATUS)? & STATUS_ENABLED, 0)?;
    drop(next);
    let mut next = bench.open()?;
    let gone = next.object(OP_QUERY_QP, a.qpn)?;
    expect("a QP of the former client", gone, Err(libc::EINVAL as u32))
}

pub(super) fn zero_cells(bench: &mut Bench) -> Tested {
    let mut raw = bench.connect()?;
    let some = 1..raw.register(REG_CELLS)?.min(1024);
    for cell in some.clone() {
        raw.ring(cell, 0x1_0000_0001 * u64::from(cell))?;
    }
    raw.enable()?;
    for cell in some.clone() {
        let value = raw.cell(cell)?.load(Ordering::Acquire);
        expect(&format!("cell {cell} when the board was enabled"), value, 0)?;
    }
    for cell in some {
        raw.ring(cell, 0x2_0000_0002)?;
    }
    let Basics { pd, cq, .. } = raw.basics()?;
    let queues = RawDriver::create_qp(pd, cq.number, crate::raw::QPS + crate::raw::QP_BYTES).queues;
    let srq = raw.number(OP_CREATE_SRQ, CreateSrq { queues, pd, limit: 0 }.as_bytes())?;
    let qp = raw.qp(pd, cq.number, 0)?;
    for (what, cell) in [("a CQ", cq.cell), ("an SRQ", srq.cell), ("a QP", qp.cell)] {
        ensure(cell >= CELL_FIRST, &format!("a cell for {what}"), cell)?;
        let value = raw.cell(cell)?.load(Ordering::Acquire);
        expect(&format!("the cell of {what} when it was made"), value, 0)?;
    }
    Ok(())
}
