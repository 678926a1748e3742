//! Regions of many pages.

use std::os::fd::AsFd;

use starverbs_core::rng::Rng;
use starverbs_core::{SendOp, SendWqe, Sge, WcStatus};
use starverbs_queues::board::*;
use zerocopy::IntoBytes;

use super::raw::*;

/// Where in memory the table lies, and the pages of 4096 bytes, in the order in which the region has them.
const TABLE: usize = 0xc_0000;
const PAGES: [usize; 4] = [9, 4, 5, 20];
const OFFSET: usize = 0x123;
const LENGTH: usize = 4 * 4096 - OFFSET - 7;
const IOVA: u64 = 0x7000_0000_0123;

fn page(n: usize) -> usize {
    DATA + 0x4_0000 + 4096 * n
}

fn entries(raw: &Raw, pages: &[u64]) {
    raw.put(TABLE, pages.as_bytes());
}

fn paged(pd: u32) -> Region {
    Region {
        pd,
        access: ALL,
        pieces: PAGES.len() as u32,
        addr: BASE + TABLE as u64,
        length: LENGTH as u64,
        iova: IOVA,
        page_log: 12,
        offset: OFFSET as u32,
        key: 0,
    }
}

/// A domain, a region of pages, and two QPs.
fn with_pages(raw: &mut Raw) -> (u32, u32, u32, RawQp, RawQp) {
    let Basics { pd, key, cq } = raw.basics();
    let (a, b) = (raw.qp(pd, cq.number, 0), raw.qp(pd, cq.number, 1));
    raw.connect_qp(a, b.qpn);
    raw.connect_qp(b, a.qpn);
    entries(raw, &PAGES.map(|n| BASE + page(n) as u64));
    let of_pages = raw.number(OP_REG_MR, paged(pd).as_bytes()).number;
    (pd, key, of_pages, a, b)
}

/// The byte of memory that is byte `at` of the region.
fn place(at: usize) -> usize {
    let at = at + OFFSET;
    page(PAGES[at / 4096]) + at % 4096
}

fn send(raw: &mut Raw, qp: &mut RawQp, wqe: SendWqe, sge: Sge) -> WcStatus {
    raw.put_send(qp, wqe, sge);
    raw.doorbell(qp);
    raw.completion().status
}

#[test]
fn bytes_of_pages_are_those_of_the_region() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let (_, key, of_pages, mut a, _) = with_pages(&mut raw);
        let mut rng = Rng::new([8, 9]);
        let plain = DATA;
        for n in 0..300u64 {
            let len = 1 + rng.word() as usize % if n % 3 == 0 { LENGTH } else { 300 };
            let at = rng.word() as usize % (LENGTH - len + 1);
            let noise: Vec<u8> = (0..len).map(|_| rng.word() as u8).collect();
            let there = IOVA + at as u64;
            let region: Vec<usize> = (at..at + len).map(place).collect();
            let (remote, local) = (
                SendWqe { remote_addr: there, rkey: of_pages, ..request(SendOp::Write, n) },
                Sge { addr: there, len: len as u32, lkey: of_pages },
            );
            let whole = data(0, len as u32, key);
            let own = SendWqe { remote_addr: BASE + plain as u64, rkey: key, ..remote };
            if n % 4 < 2 {
                /* to the pages: a WRITE there, or a READ whose answer goes there */
                raw.put(plain, &noise);
                let read = SendWqe { op: SendOp::Read, ..own };
                let (wqe, sge) = if n % 4 == 0 { (remote, whole) } else { (read, local) };
                assert_eq!(send(&mut raw, &mut a, wqe, sge), WcStatus::Success);
                let seen: Vec<u8> = region.iter().map(|at| raw.bytes(*at, 1)[0]).collect();
                assert!(seen == noise, "{n}: {len} bytes at {at}");
            } else {
                region.iter().zip(&noise).for_each(|(at, byte)| raw.put(*at, &[*byte]));
                let read = SendWqe { op: SendOp::Read, ..remote };
                let (wqe, sge) = if n % 4 == 2 { (own, local) } else { (read, whole) };
                assert_eq!(send(&mut raw, &mut a, wqe, sge), WcStatus::Success);
                assert!(raw.bytes(plain, len) == noise, "{n}: {len} bytes at {at}");
            }
        }
        /* an atomic, on the page that it names */
        let at = 8192 - OFFSET;
        raw.put(place(at), &5u64.to_le_bytes());
        let add = SendWqe {
            remote_addr: IOVA + at as u64,
            rkey: of_pages,
            compare_add: 3,
            ..request(SendOp::FetchAdd, 1)
        };
        assert_eq!(send(&mut raw, &mut a, add, data(0, 8, key)), WcStatus::Success);
        assert_eq!((raw.get::<u64>(plain), raw.get::<u64>(place(at))), (5, 8));
    });
}

/// What crosses a page's end is counted as two pieces; what is no map's is a miss when it is used.
#[test]
fn entries_are_read_when_they_are_used() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let (pd, key, of_pages, mut a, b) = with_pages(&mut raw);
        let write = |at: usize| SendWqe {
            remote_addr: IOVA + at as u64,
            rkey: of_pages,
            ..request(SendOp::Write, 1)
        };
        let before = raw.counter(COUNTER_DMA_WRITES);
        assert_eq!(send(&mut raw, &mut a, write(4096 - OFFSET - 4), data(0, 8, key)), WcStatus::Success);
        assert_eq!(raw.counter(COUNTER_DMA_WRITES) - before, 2);
        let good = PAGES.map(|n| BASE + page(n) as u64);
        for wrong in [0, good[1] + 8, u64::MAX, 1 << 48, (1 << 48) - 4096, BASE + BYTES as u64] {
            entries(&raw, &[good[0], wrong, good[2], good[3]]);
            let misses = raw.counter(COUNTER_DMA_MISSES);
            assert_eq!(send(&mut raw, &mut a, write(0), data(0, 8, key)), WcStatus::Success, "another page");
            let done = send(&mut raw, &mut a, write(4096 - OFFSET), data(0, 8, key));
            assert_eq!(done, WcStatus::RemAccessErr, "{wrong:#x}");
            assert!(raw.counter(COUNTER_DMA_MISSES) > misses);
            for qp in [a, b] {
                raw.to_state(qp, 0).unwrap();
            }
            raw.connect_qp(a, b.qpn);
            raw.connect_qp(b, a.qpn);
        }
        /* a table that is nowhere */
        let nowhere = Region { addr: BASE + BYTES as u64, ..paged(pd) };
        let nowhere = raw.number(OP_REG_MR, nowhere.as_bytes()).number;
        let write = SendWqe { rkey: nowhere, ..write(0) };
        assert_eq!(send(&mut raw, &mut a, write, data(0, 8, key)), WcStatus::RemAccessErr);
    });
}

#[test]
fn a_table_is_its_regions_alone() {
    let board = with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let (pd, key, of_pages, mut a, _) = with_pages(&mut raw);
        let query = |raw: &mut Raw, number: u32| {
            raw.command::<Region>(OP_QUERY_MR, Object { number, reserved: 0 }.as_bytes())
        };
        assert_eq!(query(&mut raw, of_pages), Ok(Region { key: of_pages, ..paged(pd) }));
        for wrong in [
            Region { page_log: 11, ..paged(pd) },
            Region { offset: 4096, ..paged(pd) },
            Region { length: LENGTH as u64 + 8, ..paged(pd) },
            Region { addr: BASE + 4, ..paged(pd) },
        ] {
            for op in [OP_REG_MR, OP_REREG_MR] {
                let wrong = Region { key: of_pages, ..wrong };
                let done = raw.command::<NumberReply>(op, wrong.as_bytes()).err();
                assert_eq!(done, Some(libc::EINVAL as u32), "{wrong:?}");
            }
        }
        /* from pages to one piece, and to other pages */
        let one = Region { key: of_pages, ..starverbs_rules::RawDriver::region(pd, DATA, 64) };
        raw.command::<Object>(OP_REREG_MR, one.as_bytes()).unwrap();
        assert_eq!(query(&mut raw, of_pages), Ok(one));
        let fewer = Region { key: of_pages, pieces: 1, length: 64, ..paged(pd) };
        raw.command::<Object>(OP_REREG_MR, fewer.as_bytes()).unwrap();
        assert_eq!(query(&mut raw, of_pages), Ok(fewer));
        let write = SendWqe { remote_addr: IOVA, rkey: of_pages, ..request(SendOp::Write, 1) };
        raw.put(DATA, b"in pages");
        assert_eq!(send(&mut raw, &mut a, write, data(0, 8, key)), WcStatus::Success);
        assert_eq!(raw.bytes(place(0), 8), b"in pages");
        raw.object(OP_DEREG_MR, of_pages).unwrap();
        /* one with nobody's leave, and some that end with the client */
        let done = raw.command::<NumberReply>(OP_REG_MR, paged(pd + 1).as_bytes()).err();
        assert_eq!(done, Some(libc::EINVAL as u32));
        for _ in 0..10 {
            raw.number(OP_REG_MR, paged(pd).as_bytes());
        }
        raw.open_context(0);
        let pd = raw.number(OP_ALLOC_PD, &[]).number;
        raw.number(OP_REG_MR, paged(pd).as_bytes());
        raw.enter(0);
        assert_eq!(send(&mut raw, &mut a, write, data(0, 8, key)), WcStatus::RemAccessErr, "a key of before");
    });
    assert!(board.card.env.memories[0].tables.find(0).is_none());
    assert_eq!(board.card.nic.counters().mrs.get(), 0);
}

#[test]
fn pages_may_be_large() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        const LARGE: u64 = 2 << 20;
        let at = 0x4000_0000;
        let file = unsealed(3 * LARGE as usize);
        raw.client().dma_map(file.as_fd(), 0, at, 3 * LARGE).unwrap();
        let (pd, key, _, mut a, _) = with_pages(&mut raw);
        entries(&raw, &[at + 2 * LARGE, at]);
        let region = Region { pieces: 2, page_log: 21, offset: 8, length: 2 * LARGE - 8, ..paged(pd) };
        let large = raw.number(OP_REG_MR, region.as_bytes()).number;
        raw.put(DATA, &[7; 100]);
        let write = SendWqe { remote_addr: IOVA + LARGE - 58, rkey: large, ..request(SendOp::Write, 1) };
        assert_eq!(send(&mut raw, &mut a, write, data(0, 100, key)), WcStatus::Success);
        let mut seen = [[0; 50]; 2];
        use std::os::unix::fs::FileExt;
        file.read_exact_at(&mut seen[0], 3 * LARGE - 50).unwrap();
        file.read_exact_at(&mut seen[1], 0).unwrap();
        assert_eq!(seen, [[7; 50]; 2]);
    });
}
