//! Memory that the board reaches: B35 to B38.

use std::mem::size_of;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use starverbs_queues::board::*;
use starverbs_queues::{Cqe, SendFlags, SendOp, SendWqe, Sge, WcStatus};
use zerocopy::IntoBytes;

use crate::bench::{Bench, Pair};
use crate::fault::{RuleFault, Tested, ensure, errno, expect};
use crate::memory::MemoryFile;
use crate::qp::{RawQp, address, data, request};
use crate::raw::{BASE, BYTES, CQ, DATA, RawDriver};

const PAGE: u64 = 4096;
/// The first address behind the driver's memory.
const END: u64 = BASE + BYTES as u64;

pub(super) fn maps(bench: &mut Bench) -> Tested {
    let Pair { mut raw, pd, key, mut a, b, .. } = bench.pair()?;
    let more = MemoryFile::new(4 * PAGE as usize)?;
    for (address, size) in [
        (END + 1, PAGE),
        (END, 7),
        (END, 0),
        (END - PAGE, 2 * PAGE),
        (BASE, PAGE),
        (BASE - PAGE, 2 * PAGE),
        (1 << 48, PAGE),
        ((1 << 48) - PAGE, 2 * PAGE),
        (u64::MAX - (PAGE - 1), PAGE),
        (u64::MAX - (PAGE - 1), 2 * PAGE),
    ] {
        let done = raw.link.map(more.file(), address, size);
        expect(&format!("errno of a map of {size:#x} bytes at {address:#x}"), errno(&done), libc::EINVAL)?;
    }
    raw.link.map(more.file(), END, PAGE)?;
    raw.link.map_read_only(more.file(), END + 2 * PAGE, PAGE)?;
    let region = |addr, length| Region { pd, access: ALL, addr, length, iova: addr, ..Region::default() };
    let unmapped = raw.number(OP_REG_MR, region(END + PAGE, PAGE).as_bytes())?.number;
    let beyond = raw.number(OP_REG_MR, region(END, 2 * PAGE).as_bytes())?.number;
    let read_only = raw.number(OP_REG_MR, region(END + 2 * PAGE, PAGE).as_bytes())?.number;
    let from = |addr, lkey| (request(SendOp::Write, 1), Sge { addr, len: 64, lkey });
    let to =
        |remote_addr, rkey| (SendWqe { remote_addr, rkey, ..request(SendOp::Write, 1) }, data(0, 64, key));
    let own = |(wqe, sge)| (SendWqe { remote_addr: address(4096), rkey: key, ..wqe }, sge);
    for ((wqe, sge), wanted, what) in [
        (own(from(END + PAGE, unmapped)), WcStatus::LocProtErr, "data that is in no map"),
        (own(from(END + PAGE - 32, beyond)), WcStatus::LocProtErr, "data that runs over a map's end"),
        (to(END + PAGE, unmapped), WcStatus::RemAccessErr, "a WRITE to what is in no map"),
        (to(END + PAGE - 32, beyond), WcStatus::RemAccessErr, "a WRITE that runs over a map's end"),
        (to(END + 2 * PAGE, read_only), WcStatus::RemAccessErr, "a WRITE to what may not be written"),
    ] {
        let misses = raw.counter(COUNTER_DMA_MISSES)?;
        raw.put_send(&mut a, wqe, sge);
        raw.doorbell(&a)?;
        let status = raw.completion()?.status;
        expect(&format!("completion of {what}"), status, wanted)?;
        let counted = raw.counter(COUNTER_DMA_MISSES)? - misses;
        ensure(counted > 0, &format!("COUNTER_DMA_MISSES of {what}"), "not counted")?;
        reconnect(&mut raw, a, b)?;
    }
    /* what is in a map is reached */
    let (wqe, sge) = to(END, beyond);
    raw.put(DATA, &[0x5a; 64]);
    raw.put_send(&mut a, wqe, sge);
    raw.doorbell(&a)?;
    expect("completion of a WRITE to another map", raw.completion()?.status, WcStatus::Success)?;
    expect("its bytes", more.bytes(0, 64), vec![0x5a; 64])
}

const ALL: u32 = crate::raw::ALL;

fn reconnect(raw: &mut RawDriver, a: RawQp, b: RawQp) -> Tested {
    for qp in [a, b] {
        raw.to_state(qp, crate::qp::state::RESET)?;
    }
    raw.connect_qp(a, b.qpn)?;
    raw.connect_qp(b, a.qpn)
}

pub(super) fn unmapped(bench: &mut Bench) -> Tested {
    let Pair { mut raw, pd, key, mut a, b, .. } = bench.pair()?;
    let more = MemoryFile::new(PAGE as usize)?;
    raw.link.map(more.file(), END, PAGE)?;
    let region = Region { pd, access: ALL, addr: END, length: PAGE, iova: END, ..Region::default() };
    let rkey = raw.number(OP_REG_MR, region.as_bytes())?.number;
    let write = SendWqe { remote_addr: END, rkey, ..request(SendOp::Write, 1) };
    raw.put(DATA, &[1; 64]);
    raw.put_send(&mut a, write, data(0, 64, key));
    raw.doorbell(&a)?;
    expect("completion of a WRITE while it is mapped", raw.completion()?.status, WcStatus::Success)?;
    let part = raw.link.unmap(BASE, PAGE);
    ensure(part.is_err(), "no part of a map unmapped", "done")?;
    for n in 0..16 {
        raw.put_send(&mut a, SendWqe { wr_id: n, ..write }, data(0, 64, key));
    }
    raw.doorbell(&a)?;
    raw.link.unmap(END, PAGE)?;
    more.put(0, &[0x55; 64]);
    for _ in 0..16 {
        raw.completion()?;
    }
    raw.settle()?;
    expect("memory that was unmapped", more.bytes(0, 64), vec![0x55; 64])?;
    reconnect(&mut raw, a, b)?;
    raw.put_send(&mut a, write, data(0, 64, key));
    raw.doorbell(&a)?;
    expect("completion of a WRITE behind it", raw.completion()?.status, WcStatus::RemAccessErr)?;
    expect("memory that was unmapped", more.bytes(0, 64), vec![0x55; 64])?;
    /* and now the memory of the queues themselves */
    reconnect(&mut raw, a, b)?;
    raw.link.unmap(BASE, BYTES as u64)?;
    let noise: Vec<u8> = (0..BYTES).map(|n| (n % 251) as u8).collect();
    raw.put(0, &noise);
    raw.put_send(&mut a, write, data(0, 64, key));
    raw.doorbell(&a)?;
    raw.put_command(OP_ALLOC_PD, &[]);
    let command = raw.bytes(0, BYTES);
    raw.post_commands()?;
    expect("REG_MAGIC when its queues are gone", raw.register(REG_MAGIC)?, MAGIC)?;
    ensure(raw.counter(COUNTER_DMA_MISSES)? > 0, "COUNTER_DMA_MISSES of queues that are gone", "none")?;
    let after = raw.bytes(0, BYTES);
    let touched = command.iter().zip(&after).position(|(before, after)| before != after);
    expect("a byte of the unmapped queues that was written", touched, None)?;
    /* it works again when it is given memory anew */
    raw.write(REG_CONTROL, &CTRL_RESET.to_le_bytes())?;
    raw.put(0, &vec![0; BYTES]);
    raw.link.map(raw.memory.again()?.file(), BASE, BYTES as u64)?;
    raw.enable()?;
    raw.number(OP_ALLOC_PD, &[]).map(drop)
}

/// Bytes of a message whose order is looked at: more than a packet has.
const LONG: usize = 3000;
/// Where it arrives: its last word ends it.
const FAR: usize = 0x4_0000;

pub(super) fn order(bench: &mut Bench) -> Tested {
    let Pair { mut raw, key, mut a, mut b, .. } = bench.pair()?;
    for n in 1..=100u32 {
        let sent = vec![n as u8; LONG];
        raw.put(DATA, &sent);
        let wqe = SendWqe { remote_addr: address(FAR), rkey: key, ..request(SendOp::Write, 1) };
        raw.put_send(&mut a, wqe, data(0, LONG as u32, key));
        let last = DATA + FAR + LONG - size_of::<u64>();
        let seen = seen_when(&raw, raw.quad(last), a)?;
        let early = seen.iter().position(|byte| *byte != n as u8);
        expect("a byte that is not there when a WRITE's last one is", early, None)?;
        expect("status", raw.completion()?.status, WcStatus::Success)?;
        /* the receive completes first or second: its CQE is the one that is looked at */
        raw.put(DATA + FAR, &vec![0; LONG]);
        raw.post_recv(&mut b, 2, data(FAR, LONG as u32, key));
        let unsignaled = SendWqe { flags: SendFlags::empty(), ..request(SendOp::Send, 3) };
        raw.put_send(&mut a, unsignaled, data(0, LONG as u32, key));
        let next = CQ + 64 + (raw.taken & ((1 << crate::raw::CQ_LOG) - 1)) as usize * size_of::<Cqe>();
        let seen = seen_when(&raw, raw.quad(next + 24), a)?;
        let first = raw.completion()?;
        let second = raw.completion()?;
        expect("statuses", [first.status, second.status], [WcStatus::Success; 2])?;
        let early = seen.iter().position(|byte| *byte != n as u8);
        expect("a byte that is not there when the CQE is", early, None)?;
    }
    Ok(())
}

/// Rings `a`'s doorbell; gives the bytes that arrive, as they are when `watched` changes.
fn seen_when(raw: &RawDriver, watched: &AtomicU64, a: RawQp) -> Tested<Vec<u8>> {
    let (before, cell) = (watched.load(Ordering::Acquire), raw.cell(a.cell)?);
    let (memory, patience, begun) = (&raw.memory, raw.patience, Instant::now());
    std::thread::scope(|scope| {
        let looker = scope.spawn(move || {
            while begun.elapsed() < patience {
                if watched.load(Ordering::Acquire) != before {
                    return Some(memory.bytes(DATA + FAR, LONG));
                }
            }
            None
        });
        cell.store(u64::from(a.sends) | u64::from(a.recvs) << 32, Ordering::Release);
        let seen = looker.join().ok().flatten();
        seen.ok_or_else(|| RuleFault::failed("bytes that arrive", format_args!("none in {patience:?}")))
    })
}

pub(super) fn atomics(bench: &mut Bench) -> Tested {
    let Pair { mut raw, key, mut a, mut b, .. } = bench.pair()?;
    const ROUNDS: u64 = 60;
    const BATCH: u64 = 16;
    let word = DATA + FAR;
    raw.put(word, &0u64.to_le_bytes());
    let stop = std::sync::atomic::AtomicBool::new(false);
    let memory = raw.memory.again()?;
    let by_cpu = std::thread::scope(|scope| {
        let adder = scope.spawn(|| {
            let mut added = 0u64;
            while !stop.load(Ordering::Relaxed) {
                memory.quad(word).fetch_add(1 << 32, Ordering::SeqCst);
                added += 1;
                std::thread::yield_now();
            }
            added
        });
        let done: Tested = (0..ROUNDS).try_for_each(|_| {
            for qp in [&mut a, &mut b] {
                for n in 0..BATCH {
                    let to = SendWqe { remote_addr: address(FAR), rkey: key, ..request(SendOp::FetchAdd, n) };
                    raw.put_send(qp, SendWqe { compare_add: 1, ..to }, data(8 * n as usize, 8, key));
                }
                raw.doorbell(qp)?;
            }
            for _ in 0..2 * BATCH {
                expect("status of an atomic", raw.completion()?.status, WcStatus::Success)?;
            }
            Ok(())
        });
        stop.store(true, Ordering::Relaxed);
        done.map(|()| adder.join().unwrap_or(0))
    })?;
    let total = memory.quad(word).load(Ordering::Acquire);
    let counted = (total & u64::from(u32::MAX), total >> 32);
    let by_board = 2 * ROUNDS * BATCH;
    expect("added by the board and by the CPU", counted, (by_board, by_cpu & u64::from(u32::MAX)))
}
