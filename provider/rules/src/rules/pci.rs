//! The function as a PCI device, and what a monitor asks of it: B43 to B46.

use std::mem::size_of;
use std::os::fd::OwnedFd;

use nix::sys::eventfd::{EfdFlags, EventFd};
use starverbs_queues::board::*;
use starverbs_queues::{SendOp, SendWqe, WcStatus};
use starverbs_vfio::message::{DMA_READ, DMA_WRITE, IRQ_MSIX, PCI_CONFIG};
use zerocopy::IntoBytes;

use crate::bench::{Bench, Pair};
use crate::fault::{RuleFault, Tested, ensure, errno, expect};
use crate::memory::MemoryFile;
use crate::qp::{data, request};
use crate::raw::{ALL, BASE, BYTES, COMMANDS_LOG, EVENTS, EVENTS_LOG, RawDriver, arm};

const PAGE: u64 = 4096;
/// The first address behind the driver's memory.
const END: u64 = BASE + BYTES as u64;
/* registers of configuration space */
const CLASS: u64 = 0x08;
const BARS: u64 = 0x10;
const CAPABILITIES: u64 = 0x34;
/* capabilities */
const POWER: u8 = 0x01;
const EXPRESS: u8 = 0x10;
const MSIX: u8 = 0x11;
/// FLR: in the device capabilities, and in device control.
const HAS_FLR: u32 = 1 << 28;
const FLR: u32 = 1 << 15;
/// Capabilities at most.
const MOST: usize = 48;

fn config(raw: &mut RawDriver, at: u64) -> Tested<u32> {
    let mut word = [0; 4];
    raw.link.client()?.read(PCI_CONFIG, at, &mut word)?;
    Ok(u32::from_le_bytes(word))
}

fn write_config(raw: &mut RawDriver, at: u64, value: u32) -> Tested {
    Ok(raw.link.client()?.write(PCI_CONFIG, at, &value.to_le_bytes())?)
}

/// Where a capability is; the list is finite.
fn capability(raw: &mut RawDriver, wanted: u8) -> Tested<u64> {
    let mut at = config(raw, CAPABILITIES)? as u8;
    for _ in 0..MOST {
        if at < 0x40 {
            break;
        }
        let [id, next, ..] = config(raw, u64::from(at & !3))?.to_le_bytes();
        if id == wanted {
            return Ok(u64::from(at & !3));
        }
        at = next;
    }
    Err(RuleFault::failed(format_args!("capability {wanted:#x}"), "none in the list"))
}

/// Resets the function by device control.
pub(super) fn flr(raw: &mut RawDriver) -> Tested {
    let express = capability(raw, EXPRESS)?;
    let control = config(raw, express + 8)?;
    write_config(raw, express + 8, control & 0xffff | FLR)
}

pub(super) fn config_space(bench: &mut Bench) -> Tested {
    let mut raw = bench.connect()?;
    let class = config(&mut raw, CLASS)?;
    expect("the revision", class & 0xff, VERSION >> 16)?;
    let [id, status] = [config(&mut raw, 0)?, config(&mut raw, 4)? >> 16];
    ensure(id & 0xffff != 0xffff && id >> 16 != 0xffff, "a vendor and a device", format_args!("{id:#x}"))?;
    ensure(status & 1 << 4 != 0, "a list of capabilities in the status", format_args!("{status:#x}"))?;
    capability(&mut raw, POWER)?;
    let express = capability(&mut raw, EXPRESS)?;
    let caps = config(&mut raw, express + 4)?;
    ensure(caps & HAS_FLR != 0, "FLR in the device capabilities", format_args!("{caps:#x}"))?;
    let msix = capability(&mut raw, MSIX)?;
    let vectors = (config(&mut raw, msix)? >> 16 & 0x7ff) + 1;
    expect("vectors of MSI-X", vectors, raw.register(REG_VECTORS)?)?;
    expect("the BAR of the MSI-X table", config(&mut raw, msix + 4)? & 7, BAR_MSIX)?;
    for bar in [BAR_CONTROL, BAR_DOORBELLS, BAR_MSIX] {
        let at = BARS + 4 * u64::from(bar);
        let before = config(&mut raw, at)?;
        write_config(&mut raw, at, u32::MAX)?;
        let mask = config(&mut raw, at)?;
        write_config(&mut raw, at, before)?;
        let bytes = raw.link.client()?.region(bar)?.size;
        expect(&format!("bytes of BAR {bar}, as its mask says"), u64::from(!(mask & !0xf)) + 1, bytes)?;
        expect(&format!("kind of BAR {bar}"), mask & 0xf, before & 0xf)?;
        let kind = if bar == BAR_DOORBELLS { 0xc } else { 0 };
        expect(&format!("64 bits and prefetchable, BAR {bar}"), before & 0xf, kind)?;
    }
    /* what can only be read */
    for at in [0, CLASS, 0x2c, CAPABILITIES, msix + 4, msix + 8, express, express + 4, 0x100] {
        let before = config(&mut raw, at)?;
        write_config(&mut raw, at, !before)?;
        expect(&format!("what is only read at {at:#x}"), config(&mut raw, at)?, before)?;
    }
    Ok(())
}

pub(super) fn vectors(bench: &mut Bench) -> Tested {
    let Pair { mut raw, key, cq_cell, mut a, mut b, .. } = bench.pair()?;
    let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
    let eventfd = || EventFd::from_flags(flags).map(OwnedFd::from).map_err(std::io::Error::from);
    let given = [eventfd()?, eventfd()?];
    let read = |n: usize| {
        let mut count = [0; size_of::<u64>()];
        nix::unistd::read(&given[n], &mut count).ok().map(|_| u64::from_le_bytes(count))
    };
    let vectors = raw.register(REG_VECTORS)?;
    let beyond = raw.link.client()?.set_irqs_at(IRQ_MSIX, vectors - 1, &given);
    ensure(beyond.is_err(), "no vector behind the last one", "one")?;
    raw.link.client()?.set_irqs_at(IRQ_MSIX, 0, &given)?;
    let mut times = 0;
    let mut event = |raw: &mut RawDriver| -> Tested {
        times += 1;
        raw.ring(cq_cell, arm(raw.taken, times, false))?;
        raw.exchange(key, &mut a, &mut b, u64::from(times))?;
        raw.wait_for_event(times - 1)?;
        raw.settle()
    };
    event(&mut raw)?;
    raw.wait("a signal of vector 0", |_| Ok(read(0)))?;
    expect("a signal of another vector", read(1), None)?;
    raw.link.client()?.clear_irqs(IRQ_MSIX, 0, 1)?;
    event(&mut raw)?;
    expect("a signal of a vector that was taken back", read(0), None)?;
    raw.link.client()?.set_irqs_at(IRQ_MSIX, 0, &given[..1])?;
    event(&mut raw)?;
    raw.wait("a signal of vector 0, when it has an eventfd again", |_| Ok(read(0)))?;
    raw.link.client()?.clear_irqs(IRQ_MSIX, 0, 0)?;
    event(&mut raw)?;
    expect("a signal when all were taken back", read(0), None)
}

pub(super) fn unmaps(bench: &mut Bench) -> Tested {
    let Pair { mut raw, pd, key, mut a, .. } = bench.pair()?;
    let more = MemoryFile::new(2 * PAGE as usize)?;
    for page in 0..2 {
        raw.link.map(more.file(), END + (2 * page + 1) * PAGE, PAGE)?;
    }
    raw.link.client()?.dma_map_without_file(END, PAGE, DMA_READ | DMA_WRITE)?;
    for (address, size) in [(BASE + PAGE, PAGE), (BASE - PAGE, 2 * PAGE)] {
        let done = raw.link.unmap(address, size);
        let what = format!("errno of unmapping {size:#x} at {address:#x}, which cuts a map");
        expect(&what, errno(&done), libc::EINVAL)?;
    }
    raw.link.unmap(END + 0x10_0000, PAGE)?;
    /* two maps, and what is between and behind them */
    raw.link.unmap(END + PAGE, 0x10_0000)?;
    for page in 0..2 {
        raw.link.map(more.file(), END + (2 * page + 1) * PAGE, PAGE)?;
    }
    let region = Region { pd, access: ALL, addr: END, length: PAGE, iova: END, ..Region::default() };
    let rkey = raw.number(OP_REG_MR, region.as_bytes())?.number;
    let misses = raw.counter(COUNTER_DMA_MISSES)?;
    let write = SendWqe { remote_addr: END, rkey, ..request(SendOp::Write, 1) };
    raw.put_send(&mut a, write, data(0, 64, key));
    raw.doorbell(&a)?;
    let status = raw.completion()?.status;
    expect("completion of a WRITE to a map without a descriptor", status, WcStatus::RemAccessErr)?;
    let counted = raw.counter(COUNTER_DMA_MISSES)? - misses;
    ensure(counted > 0, "COUNTER_DMA_MISSES of it", "not counted")
}

pub(super) fn bus_master(bench: &mut Bench) -> Tested {
    let Pair { mut raw, key, mut a, mut b, .. } = bench.pair()?;
    raw.exchange(key, &mut a, &mut b, 1)?;
    raw.link.set_master(false)?;
    let doorbells = raw.counter(COUNTER_DOORBELLS)?;
    raw.post_recv(&mut b, 2, data(4096, 8, key));
    raw.put_send(&mut a, request(SendOp::Send, 2), data(0, 8, key));
    raw.doorbell(&a)?;
    raw.put_command(OP_ALLOC_PD, &[]);
    let before = raw.bytes(0, BYTES);
    raw.post_commands()?;
    expect("REG_ERROR of a command without the bus", raw.register(REG_ERROR)?, libc::EACCES as u32)?;
    for _ in 0..100 {
        raw.register(REG_MAGIC)?;
    }
    expect("doorbells taken without the bus", raw.counter(COUNTER_DOORBELLS)?, doorbells)?;
    let touched = raw.bytes(0, BYTES).iter().zip(&before).position(|(after, before)| before != after);
    expect("a byte that was written without the bus", touched, None)?;
    /* with it, what was rung meanwhile is seen */
    raw.link.set_master(true)?;
    let done = [raw.completion()?.status, raw.completion()?.status];
    expect("statuses of what was posted meanwhile", done, [WcStatus::Success; 2])?;
    raw.post_commands()?;
    expect("status of the command", raw.status(RawDriver::command_at(raw.tail.wrapping_sub(1))), 0)?;
    /* and a board is not enabled without */
    raw.write(REG_CONTROL, &CTRL_RESET.to_le_bytes())?;
    raw.link.set_master(false)?;
    raw.set_queues(BASE, COMMANDS_LOG, BASE + EVENTS as u64, EVENTS_LOG)?;
    raw.write(REG_CONTROL, &CTRL_ENABLE.to_le_bytes())?;
    let seen = (raw.register(REG_STATUS)? & STATUS_ENABLED, raw.register(REG_ERROR)?);
    expect("status and error when it is enabled without the bus", seen, (0, libc::EACCES as u32))
}
