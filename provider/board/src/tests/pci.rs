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
        let TwoQps { key, mut a, mut b } = two_qps(&mut raw);
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
        let TwoQps { key, mut a, .. } = two_qps(&mut raw);
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

/// What is left of a client's work after a reset that is none of its registers'.
fn is_reset(raw: &mut Raw, qpn: u32) {
    assert_eq!([REG_STATUS, REG_COMMANDS_LOG, REG_COMMANDS, REG_EVENTS].map(|at| raw.register(at)), [0; 4]);
    let mut command = [0; 2];
    raw.client().read(PCI_CONFIG, 4, &mut command).unwrap();
    assert_eq!(command, [0; 2], "it masters no bus");
    let mut cells = [1; 4096];
    for at in [0, 64 << 10] {
        raw.client().read(BAR_DOORBELLS, at, &mut cells).unwrap();
        assert!(cells.iter().all(|byte| *byte == 0));
    }
    raw.enter(0);
    raw.enable();
    assert_eq!(raw.object(OP_QUERY_QP, qpn), Err(libc::EINVAL as u32));
}

#[test]
fn flr_and_device_reset_are_resets() {
    let board = with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let (irq, eventfd) = UnixStream::pair().unwrap();
        raw.client().set_irqs(IRQ_MSIX, &[eventfd.into()]).unwrap();
        let resets: [fn(&mut Raw); 3] = [
            |raw| raw.client().reset().unwrap(),
            |raw| raw.client().write(PCI_CONFIG, 0x58, &0x8000u16.to_le_bytes()).unwrap(),
            /* as a part of a word, and with messages under way */
            |raw| raw.client().write(PCI_CONFIG, 0x59, &[0x80]).unwrap(),
        ];
        for reset in resets {
            let TwoQps { key, mut a, mut b } = two_qps(&mut raw);
            exchange(&mut raw, key, &mut a, &mut b, 5);
            raw.open_context(1);
            let TwoQps { key: own, a: mut x, .. } = two_qps(&mut raw);
            raw.put_send(&mut x, signaled_send(1), data(0, 8, own));
            raw.doorbell(&x);
            raw.enter(0);
            raw.put_send(&mut a, signaled_send(1), data(0, 8, key));
            raw.doorbell(&a);
            reset(&mut raw);
            raw.put(0, &vec![0x5a; DATA]);
            assert_eq!(raw.register(REG_MAGIC), MAGIC);
            let memory = raw.bytes(0, DATA);
            assert!(memory.iter().all(|byte| *byte == 0x5a), "nothing is touched");
            is_reset(&mut raw, a.qpn);
        }
        /* maps and vectors are still there */
        raw.client().trigger(IRQ_MSIX, 0).unwrap();
        let mut count = [0; 8];
        (&irq).read_exact(&mut count).unwrap();
        let TwoQps { key, mut a, mut b } = two_qps(&mut raw);
        exchange(&mut raw, key, &mut a, &mut b, 6);
    });
    assert_eq!(board.card.nic.qp_count(), 0);
}

#[test]
fn without_the_bus_a_function_stands_still() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let (irq, eventfd) = UnixStream::pair().unwrap();
        raw.client().set_irqs(IRQ_MSIX, &[eventfd.into()]).unwrap();
        irq.set_nonblocking(true).unwrap();
        let Basics { pd, key, cq } = raw.basics();
        let (mut a, mut b) = (raw.qp(pd, cq.number, 0), raw.qp(pd, cq.number, 1));
        raw.connect_qp(a, b.qpn);
        raw.connect_qp(b, a.qpn);
        exchange(&mut raw, key, &mut a, &mut b, 1);
        /* by the command register, and by the power state */
        for (n, (at, off, on)) in [(4, 2, 6), (0x44, 3, 0)].into_iter().enumerate() {
            raw.client().write(PCI_CONFIG, at, &[off]).unwrap();
            let doorbells = raw.counter(COUNTER_DOORBELLS);
            /* an event that is due */
            raw.ring(cq.cell, arm(raw.taken - 1, n as u32 + 1, false));
            assert_eq!(raw.post_command(OP_ALLOC_PD), PENDING);
            assert_eq!(raw.register(REG_ERROR), libc::EACCES as u32);
            for _ in 0..200 {
                raw.register(REG_MAGIC);
            }
            assert_eq!(raw.counter(COUNTER_DOORBELLS), doorbells);
            assert_eq!(raw.event(n as u32), None);
            assert!((&irq).read(&mut [0; 8]).is_err(), "no interrupt");
            raw.client().write(PCI_CONFIG, at, &[on]).unwrap();
            let event = RaisedEvent { kind: EVENT_COMPLETION, number: cq.number };
            assert_eq!(raw.wait_for_event(n as u32), event);
            raw.post_commands().unwrap();
            irq.set_nonblocking(false).unwrap();
            (&irq).read_exact(&mut [0; 8]).unwrap();
            irq.set_nonblocking(true).unwrap();
        }
        exchange(&mut raw, key, &mut a, &mut b, 2);
    });
}

/// A client whose own memory goes away under the board's hands.
#[test]
fn a_client_whose_memory_shrinks_harms_itself_alone() {
    with_board(2, |paths| {
        let mut witness = Raw::open(&paths[1]);
        let TwoQps { key, mut a, mut b } = two_qps(&mut witness);
        for n in 0..20 {
            let mut raw = Raw::of(&paths[0], unsealed(BYTES));
            let TwoQps { key: own, a: mut x, b: mut y } = two_qps(&mut raw);
            exchange(&mut raw, own, &mut x, &mut y, n);
            raw.put_send(&mut x, signaled_send(1), data(0, 4096, own));
            raw.doorbell(&x);
            /* queues, and then all */
            let file = std::fs::File::from(raw.memory.file().try_clone_to_owned().unwrap());
            file.set_len([QPS as u64 + 0x1000, 0][n as usize % 2]).unwrap();
            raw.ring(x.cell, u64::from(x.sends + 1));
            let tail = raw.tail.wrapping_add(1).to_le_bytes();
            let _ = raw.write(REG_COMMANDS_TAIL, &tail);
            raw.until("it has failed", |raw| raw.register(REG_STATUS) & STATUS_FAILED != 0);
            assert_eq!(raw.register(REG_ERROR), libc::EFAULT as u32);
            exchange(&mut witness, key, &mut a, &mut b, n);
            drop(raw);
        }
        let mut raw = Raw::open(&paths[0]);
        assert_eq!(raw.register(REG_STATUS), STATUS_ENABLED, "nothing is left of it");
        let TwoQps { key: own, a: mut x, b: mut y } = two_qps(&mut raw);
        exchange(&mut raw, own, &mut x, &mut y, 1);
    });
}

#[test]
fn queues_whose_memory_is_gone_harm_nobody() {
    with_board(2, |paths| {
        let mut witness = Raw::open(&paths[1]);
        let TwoQps { key, mut a, mut b } = two_qps(&mut witness);
        let mut raw = Raw::open(&paths[0]);
        let TwoQps { key: own, a: mut x, .. } = two_qps(&mut raw);
        raw.put_send(&mut x, signaled_send(1), data(0, 4096, own));
        raw.doorbell(&x);
        raw.client().dma_unmap(BASE, BYTES as u64).unwrap();
        raw.put(0, &vec![0x77; BYTES]);
        raw.ring(x.cell, u64::from(x.sends + 1));
        assert_eq!(raw.post_command(OP_ALLOC_PD), PENDING);
        exchange(&mut witness, key, &mut a, &mut b, 1);
        let mut memory = raw.bytes(0, BYTES);
        let at = COMMANDS + (raw.tail as usize - 1) % (1 << COMMANDS_LOG) * COMMAND_BYTES;
        memory[at..at + COMMAND_BYTES].fill(0x77);
        assert!(memory.iter().all(|byte| *byte == 0x77), "nothing is touched");
        /* the same function goes on with other memory */
        raw.write(REG_CONTROL, &CTRL_RESET.to_le_bytes()).unwrap();
        raw.put(0, &vec![0; BYTES]);
        let memory = raw.memory.again().unwrap();
        raw.client().dma_map(memory.file(), 0, BASE, BYTES as u64).unwrap();
        raw.enable();
        let TwoQps { key: own, a: mut x, b: mut y } = two_qps(&mut raw);
        exchange(&mut raw, own, &mut x, &mut y, 2);
    });
}

/// A board whose doorbells are trapped.
#[test]
fn doorbells_may_not_be_mapped() {
    let prepare = |board: &mut crate::Board| board.trap_doorbells();
    with_board_that(&settings(), 1, prepare, |paths| {
        let mut client = starverbs_vfio::VfioClient::connect(&paths[0]).unwrap();
        let pages = client.region(BAR_DOORBELLS).unwrap();
        assert!(pages.size > 0 && pages.flags & REGION_MMAP == 0 && pages.file.is_none());
        for n in 1..100u64 {
            client.write(BAR_DOORBELLS, 8 * n, &n.to_le_bytes()).unwrap();
        }
        let mut cells = [0; 16];
        client.read(BAR_DOORBELLS, 8 * 98, &mut cells).unwrap();
        assert_eq!(cells, *[98u64, 99].map(u64::to_le_bytes).as_flattened());
    });
}
