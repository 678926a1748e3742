//! The board as a PCI device: what a monitor does with it, without a monitor.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use starverbs_core::WcStatus;
use starverbs_queues::board::*;
use starverbs_vfio::message::{DMA_READ, DMA_WRITE, IRQ_MSIX, PCI_CONFIG, REGION_MMAP};
use zerocopy::IntoBytes;

use super::raw::*;

#[test]
fn a_monitor_finds_all_regions() {
    with_board(1, |paths| {
        let mut raw = Raw::connect(&paths[0]);
        let mut config = [0; 4];
        raw.client().read(PCI_CONFIG, 0, &mut config).unwrap();
        assert_eq!(u32::from_le_bytes(config), PCI_VENDOR | PCI_DEVICE << 16);
        let pages = raw.client().region(BAR_DOORBELLS).unwrap();
        let bytes = u64::from(raw.register(REG_CONTEXTS) * raw.register(REG_CELLS) * CELL_BYTES);
        assert_eq!((pages.size, pages.offset, pages.flags & REGION_MMAP), (bytes, 0, REGION_MMAP));
        assert_eq!(pages.file.unwrap().metadata().unwrap().len(), bytes);
        assert_eq!(raw.client().region(BAR_MSIX).unwrap().size, 4096);
        raw.client().write(BAR_MSIX, 16, &[1, 2, 3, 4]).unwrap();
        let mut entry = [0; 16];
        raw.client().read(BAR_MSIX, 16, &mut entry).unwrap();
        assert_eq!(entry, [1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
    });
}

/// Doorbells of a monitor that does not map them.
#[test]
fn a_doorbell_may_be_written_as_a_region_is() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let (key, mut a, mut b) = two_qps(&mut raw);
        raw.post_recv(&mut b, 1, data(4096, 8, key));
        raw.put_send(&mut a, signaled_send(2), data(0, 8, key));
        let cell = u64::from(a.cell * CELL_BYTES);
        for (at, len) in [(cell, 4), (cell + 4, 8), (u64::MAX - 7, 8), (1 << 24, 8)] {
            assert!(raw.client().write(BAR_DOORBELLS, at, &[1; 8][..len]).is_err(), "{at:#x} {len}");
        }
        let value = u64::from(a.sends).to_le_bytes();
        raw.client().write(BAR_DOORBELLS, cell, &value).unwrap();
        assert_eq!([raw.completion().status, raw.completion().status], [WcStatus::Success; 2]);
        let mut back = [0; 8];
        raw.client().read(BAR_DOORBELLS, cell, &mut back).unwrap();
        assert_eq!(back, value);
    });
}

#[test]
fn vectors_are_given_and_taken_in_parts() {
    with_board(1, |paths| {
        let mut raw = Raw::connect(&paths[0]);
        assert_eq!(raw.register(REG_VECTORS), 32);
        let pairs: Vec<_> = (0..3).map(|_| UnixStream::pair().unwrap()).collect();
        let fds = |from: std::ops::Range<usize>| -> Vec<OwnedFd> {
            pairs[from].iter().map(|(_, theirs)| theirs.try_clone().unwrap().into()).collect()
        };
        raw.client().set_irqs_at(IRQ_MSIX, 30, &fds(0..2)).unwrap();
        raw.client().set_irqs_at(IRQ_MSIX, 0, &fds(2..3)).unwrap();
        assert!(raw.client().set_irqs_at(IRQ_MSIX, 31, &fds(0..2)).is_err(), "there are no so many");
        let signalled = |raw: &mut Raw, vectors: &[u32]| {
            vectors.iter().for_each(|vector| raw.client().trigger(IRQ_MSIX, *vector).unwrap());
            pairs
                .iter()
                .map(|(ours, _)| {
                    ours.set_nonblocking(true).unwrap();
                    let mut count = [0; 64];
                    (&*ours).read(&mut count).unwrap_or(0) / 8
                })
                .collect::<Vec<_>>()
        };
        assert_eq!(signalled(&mut raw, &[0, 30, 31, 31, 5]), [1, 2, 1]);
        raw.client().clear_irqs(IRQ_MSIX, 30, 1).unwrap();
        assert_eq!(signalled(&mut raw, &[0, 30, 31]), [0, 1, 1]);
        raw.client().clear_irqs(IRQ_MSIX, 0, 0).unwrap();
        assert_eq!(signalled(&mut raw, &[0, 30, 31]), [0, 0, 0], "of none any more");
    });
}

#[test]
fn a_map_without_a_descriptor_is_a_miss() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let rom = BASE + BYTES as u64;
        raw.client().dma_map_without_file(rom, 1 << 20, DMA_READ | DMA_WRITE).unwrap();
        let (key, mut a, _) = two_qps(&mut raw);
        let pd =
            raw.command::<Region>(OP_QUERY_MR, Object { number: key, reserved: 0 }.as_bytes()).unwrap().pd;
        let region = Region { pd, access: ALL, addr: rom, length: 64, iova: rom, ..Region::default() };
        let lkey = raw.number(OP_REG_MR, region.as_bytes()).number;
        let misses = raw.counter(COUNTER_DMA_MISSES);
        raw.put_send(&mut a, signaled_send(1), starverbs_core::Sge { addr: rom, len: 8, lkey });
        raw.doorbell(&a);
        assert_eq!(raw.completion().status, WcStatus::LocProtErr);
        assert_eq!(raw.counter(COUNTER_DMA_MISSES), misses + 1);
        raw.client().dma_unmap(rom, 1 << 20).unwrap();
    });
}
