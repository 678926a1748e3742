//! Regions of pages: B56, B57.

use starverbs_queues::board::*;
use starverbs_queues::{SendOp, SendWqe, WcStatus};
use zerocopy::IntoBytes;

use crate::bench::{Bench, Pair};
use crate::fault::{RuleFault, Tested, ensure, expect};
use crate::qp::{data, request};
use crate::raw::{ALL, BASE, Basics, DATA, RawDriver};

const PAGE: usize = 4096;
/// Where the table is, and the pages, the later one first.
const TABLE: usize = 0xc_0000;
const PAGES: [usize; 2] = [DATA + 0x4_0000 + 4 * PAGE, DATA + 0x4_0000];
const OFFSET: usize = 0x40;
const IOVA: u64 = 0x5000_0000_0000;

fn paged(raw: &mut RawDriver, pd: u32) -> Tested<Region> {
    if raw.long(REG_CAPS)? & CAP_MTT == 0 {
        return Err(RuleFault::Skipped("the board takes no regions of pages (CAP_MTT)".to_owned()));
    }
    raw.put(TABLE, PAGES.map(|at| BASE + at as u64).as_bytes());
    let (addr, length) = (BASE + TABLE as u64, (2 * PAGE - OFFSET) as u64);
    let offset = OFFSET as u32;
    Ok(Region { key: 0, pd, access: ALL, pieces: 2, addr, length, iova: IOVA, page_log: 12, offset })
}

pub(super) fn regions(bench: &mut Bench) -> Tested {
    let mut raw = bench.open()?;
    let Basics { pd, .. } = raw.basics()?;
    let good = paged(&mut raw, pd)?;
    for wrong in [
        Region { page_log: 11, ..good },
        Region { page_log: 31, ..good },
        Region { offset: PAGE as u32, length: 1, ..good },
        Region { length: good.length + 1, ..good },
        Region { length: u64::MAX, ..good },
        Region { addr: good.addr + 4, ..good },
        Region { addr: (1 << 48) - 8, ..good },
    ] {
        let done = raw.command::<NumberReply>(OP_REG_MR, wrong.as_bytes())?.map(drop);
        expect(&format!("status of {wrong:x?}"), done, Err(libc::EINVAL as u32))?;
    }
    let key = raw.number(OP_REG_MR, good.as_bytes())?.number;
    let told: Region = raw.ask(OP_QUERY_MR, Object { number: key, reserved: 0 }.as_bytes())?;
    expect("what QUERY_MR says", told, Region { key, ..good })?;
    raw.done(OP_DEREG_MR, key)
}

pub(super) fn access(bench: &mut Bench) -> Tested {
    let Pair { mut raw, pd, key, mut a, .. } = bench.pair()?;
    let region = paged(&mut raw, pd)?;
    let rkey = raw.number(OP_REG_MR, region.as_bytes())?.number;
    let message: Vec<u8> = (1..=200).collect();
    raw.put(DATA, &message);
    let mut write = |raw: &mut RawDriver, at: usize| {
        let wqe = SendWqe { remote_addr: IOVA + at as u64, rkey, ..request(SendOp::Write, 1) };
        raw.put_send(&mut a, wqe, data(0, message.len() as u32, key));
        raw.doorbell(&a)?;
        Ok::<_, RuleFault>(raw.completion()?.status)
    };
    expect("status of a WRITE in a page", write(&mut raw, 16)?, WcStatus::Success)?;
    expect("its bytes", raw.bytes(PAGES[0] + OFFSET + 16, message.len()), message.clone())?;
    let end = PAGE - OFFSET;
    expect("status of a WRITE across pages", write(&mut raw, end - 80)?, WcStatus::Success)?;
    let seen = [raw.bytes(PAGES[0] + PAGE - 80, 80), raw.bytes(PAGES[1], 120)].concat();
    expect("its bytes", seen, message.clone())?;
    raw.put(TABLE + 8, &(1u64 << 47).to_le_bytes());
    let fresh = raw.number(OP_REG_MR, region.as_bytes())?.number;
    let misses = raw.counter(COUNTER_DMA_MISSES)?;
    let wqe = SendWqe { remote_addr: IOVA + end as u64, rkey: fresh, ..request(SendOp::Write, 1) };
    raw.put_send(&mut a, wqe, data(0, 8, key));
    raw.doorbell(&a)?;
    expect("status of a WRITE to a page of no map", raw.completion()?.status, WcStatus::RemAccessErr)?;
    let counted = raw.counter(COUNTER_DMA_MISSES)? - misses;
    ensure(counted > 0, "COUNTER_DMA_MISSES of it", "not counted")
}
