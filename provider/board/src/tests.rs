//! A board and clients that speak to it as a driver would, by registers, commands and memory.

mod contexts;
mod pci;
mod raw;
mod record;
mod rules;
mod tables;

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use starverbs_backend::sealed;
use starverbs_core::rng::Rng;
use starverbs_core::{SendFlags, SendOp, SendWqe, Sge, WcStatus};
use starverbs_queues::board::*;
use starverbs_queues::format::CardIndex;
use starverbs_vfio::message::PCI_CONFIG;
use zerocopy::{IntoBytes, transmute};

use super::*;
use raw::*;

/// B15, B20, B22, B29: what the paper counts.
#[test]
fn a_batch_is_one_doorbell_and_each_message_one_fetch_and_one_completion() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let (key, mut a, mut b) = two_qps(&mut raw);
        const BATCH: u64 = 16;
        let which = [COUNTER_DOORBELLS, COUNTER_SEND_FETCHES, COUNTER_RECV_FETCHES, COUNTER_CQE_WRITES];
        let before = which.map(|which| raw.counter(which));
        for n in 0..BATCH {
            raw.post_recv(&mut b, n, data(4096 + 64 * n as usize, 64, key));
        }
        for n in 0..BATCH {
            let wqe = SendWqe {
                wr_id: 100 + n,
                op: SendOp::Send,
                flags: SendFlags::SIGNALED,
                ..SendWqe::default()
            };
            raw.put_send(&mut a, wqe, data(0, 64, key));
        }
        raw.doorbell(&a);
        for _ in 0..2 * BATCH {
            assert_eq!(raw.completion().status, WcStatus::Success);
        }
        let after = which.map(|which| raw.counter(which));
        let counted: Vec<u64> = after.iter().zip(before).map(|(after, before)| after - before).collect();
        assert_eq!(counted, [1, BATCH, BATCH, 2 * BATCH]);
        let card: u32 = raw.get(a.at + 64 + std::mem::offset_of!(CardIndex, send_released));
        assert_eq!(card, BATCH as u32, "the slots may be written again");
    });
}

/// B5: the end of a client is a reset, and gives the memory back.
#[test]
fn what_a_client_made_ends_with_it() {
    let board = with_board(1, |paths| {
        for _ in 0..3 {
            let mut raw = Raw::open(&paths[0]);
            let (key, mut a, mut b) = two_qps(&mut raw);
            exchange(&mut raw, key, &mut a, &mut b, 5);
            let pd = raw.number(OP_ALLOC_PD, &[]).number;
            raw.number(OP_ALLOC_MW, Window { pd, kind: 1 }.as_bytes());
            let queues = Raw::create_qp(pd, 0, QPS + 0x2_0000).queues;
            let srq = raw.number(OP_CREATE_SRQ, CreateSrq { queues, pd, limit: 0 }.as_bytes());
            assert_eq!(raw.object(OP_DEALLOC_PD, pd), Err(libc::EBUSY as u32));
            assert_ne!(srq.cell, 0);
            /* and by the register, once */
            raw.write(REG_CONTROL, &CTRL_RESET.to_le_bytes()).unwrap();
            assert_eq!((raw.register(REG_STATUS), raw.register(REG_COMMANDS_LOG)), (0, 0));
            let at = raw.put_command(OP_DESTROY_QP, Object { number: a.qpn, reserved: 0 }.as_bytes());
            raw.post_commands().unwrap();
            assert_eq!(raw.get::<CommandHead>(at).status, PENDING, "no command queue");
            assert_eq!(raw.register(REG_ERROR), libc::ENXIO as u32);
        }
        let mut raw = Raw::open(&paths[0]);
        let (_, a, _) = two_qps(&mut raw);
        raw.doorbell(&a);
    });
    assert_eq!(board.card.nic.qp_count(), 0);
    let counters = board.card.nic.counters();
    assert_eq!((counters.qps.get(), counters.mrs.get()), (0, 0));
    let function = &board.functions[0];
    assert!(function.contexts.is_empty());
    assert!(board.card.env.memories[0].maps.pointer(BASE, 1).is_none());
}

/// B14: numbers of another function's objects are no numbers here.
#[test]
fn functions_name_their_own_objects_alone() {
    with_board(2, |paths| {
        let (mut one, mut two) = (Raw::open(&paths[0]), Raw::open(&paths[1]));
        let (pd, key, cq) = one.basics();
        let qp = one.qp(pd, cq.number, 0);
        let gone = Err(libc::EINVAL as u32);
        for (op, number) in [
            (OP_DEALLOC_PD, pd),
            (OP_DEREG_MR, key),
            (OP_QUERY_MR, key),
            (OP_DESTROY_CQ, cq.number),
            (OP_DESTROY_QP, qp.qpn),
            (OP_QUERY_QP, qp.qpn),
        ] {
            assert_eq!(two.object(op, number), gone, "{op:#x}");
        }
        let region = Region { pd, access: ALL, addr: BASE, length: 8, iova: 0, ..Region::default() };
        assert_eq!(two.command::<NumberReply>(OP_REG_MR, region.as_bytes()).err(), Some(libc::EINVAL as u32));
        let (own, _, own_cq) = two.basics();
        for (pd, cq) in [(pd, own_cq.number), (own, own_cq.number + 1)] {
            let create = Raw::create_qp(pd, cq, QPS);
            assert!(two.command::<NumberReply>(OP_CREATE_QP, create.as_bytes()).is_err());
        }
        assert_eq!(one.object(OP_QUERY_QP, qp.qpn), Ok(()));
    });
}

/// B8: reserved commands, and bits that are not set.
#[test]
fn what_is_reserved_is_refused() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let optional = CAP_WINDOWS | CAP_MTT | CAP_XRC | CAP_MULTICAST | CAP_CQ_CHANGES | CAP_NULL | CAP_MADS;
        assert_eq!(u64::from(raw.register(REG_CAPS)), CAP_VERBS | optional);
        for op in [0, OP_STAR, OP_STROM, OP_RMA, u16::MAX] {
            let body = COMMANDS + (raw.tail & ((1 << COMMANDS_LOG) - 1)) as usize * COMMAND_BYTES + 8;
            assert_eq!(raw.object(op, 77), Err(libc::EOPNOTSUPP as u32), "{op:#x}");
            assert_eq!(raw.get::<Object>(body).number, 77, "the body stays");
        }
        let (pd, _, cq) = raw.basics();
        let packets = CreateQp { kind: 8, ..Raw::create_qp(pd, cq.number, QPS) };
        assert_eq!(
            raw.command::<NumberReply>(OP_CREATE_QP, packets.as_bytes()).err(),
            Some(libc::EINVAL as u32)
        );
    });
}

/// B17: what the index of a cell cannot be is no doorbell, and the client goes on.
#[test]
fn a_doorbell_beyond_the_queue_is_none() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let (key, mut a, mut b) = two_qps(&mut raw);
        exchange(&mut raw, key, &mut a, &mut b, 1);
        for wild in [u64::MAX, 66, 0, 1 << 31] {
            let before = raw.counter(COUNTER_MALFORMED);
            raw.ring(a.cell, wild);
            let begun = Instant::now();
            while raw.counter(COUNTER_MALFORMED) == before {
                assert!(begun.elapsed() < Duration::from_secs(60), "{wild:#x} was taken");
            }
        }
        exchange(&mut raw, key, &mut a, &mut b, 2);
    });
}

/// Posts a command, whose answer is not waited for: it may never come.
fn post(raw: &mut Raw, op: u16, body: &[u8]) {
    raw.put_command(op, body);
    raw.post_commands().unwrap();
}

/// A client that writes what it likes wherever it can.
fn write_garbage(raw: &mut Raw, rng: &mut Rng) {
    let (_, a, b) = two_qps(raw);
    let (pd, other) = (raw.number(OP_ALLOC_PD, &[]).number, raw.open_context(1));
    two_qps(raw);
    for _ in 0..32 {
        let word = rng.word();
        /* of its contexts, or of one that there is not */
        raw.context = [0, 0, other, word as u16 % 256][(word >> 58) as usize % 4];
        let mut noise = [0u8; COMMAND_BYTES];
        noise.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&rng.word().to_le_bytes()));
        match word % 9 {
            /* a queue's memory, and its indices */
            0 => {
                let at = [a.at, b.at][(word >> 8) as usize & 1] + (word >> 16) as usize % 0x4000;
                raw.put(at & !7, &noise);
            }
            1 => {
                let at = [CQ, EVENTS, COMMANDS][(word >> 8) as usize % 3] + (word >> 16) as usize % 0x400;
                raw.put(at, &noise);
            }
            /* a doorbell: any cell, any value, near ones most of all */
            2 => {
                let value = if word & 64 == 0 { rng.word() } else { rng.word() & 0x1f_0000_001f };
                raw.ring((word >> 8) as u32 % 8, value);
            }
            /* a register */
            3 => {
                let at = ((word >> 8) as u32 % 0x60) & !3;
                let len = if word & 64 == 0 { 4 } else { 8 };
                if at != REG_CONTROL {
                    let _ = raw.write(at, &noise[..len]);
                }
            }
            /* a command with a body of noise; the number of an object of its own most of all */
            4 => {
                let op =
                    [1, 3, 4, 0x10, 0x20, 0x22, 0x28, 0x30, 0x40, 0x41, 0x50, 0x51, 0x60, 0x61, 0x62, 0x63]
                        [(word >> 8) as usize % 16];
                if word & 64 == 0 {
                    noise[..4].copy_from_slice(&[a.qpn, b.qpn][(word >> 16) as usize & 1].to_le_bytes());
                }
                post(raw, op, &noise[..BODY_BYTES]);
            }
            /* configuration space: its registers most of all */
            5 => {
                let at = (word >> 8) % if word & 64 == 0 { 0x100 } else { 0x2000 };
                let _ = raw.client().write(PCI_CONFIG, at, &noise[..1 + (word >> 40) as usize % 8]);
                /* in half of the cases it may go on */
                if word >> 57 & 1 == 0 {
                    raw.link.set_master(true).unwrap();
                }
            }
            /* a region of pages that is nearly one, and entries of its table */
            6 => {
                let table = BASE + (word >> 24 & 0xff) * 8;
                let [key, pieces] = [(word >> 8) as u32, (word >> 32) as u32 & 7];
                let (page_log, offset) =
                    ([12, 13, 21, 30, 40][(word >> 40) as usize % 5], (word >> 44) as u32 & 0x1fff);
                let length = noise[0].into();
                let region = Region { pieces, addr: table, length, page_log, offset, ..Region::default() };
                let region = Region { key, pd, access: ALL, iova: BASE, ..region };
                post(raw, if word & 64 == 0 { OP_REG_MR } else { OP_REREG_MR }, region.as_bytes());
            }
            /* maps: those that there are, and others */
            7 => {
                let at = BASE.wrapping_add((word >> 8) % 4 * 4096);
                let len = [4096, BYTES as u64, u64::MAX, word][(word >> 16) as usize % 4];
                let _ = raw.client().dma_unmap(at, len);
                let _ = raw.client().dma_map_without_file(at, len, 3);
            }
            /* a send WQE that is nearly one */
            _ => {
                let wqe = SendWqe {
                    op: SendOp::from_code((word >> 8) as u32 % 16).unwrap_or_default(),
                    flags: SendFlags::from_bits_retain((word >> 16) as u8 & 15),
                    length: (word >> 24) as u32 & 0xffff,
                    num_sge: (word >> 40) as u16 & 7,
                    blocks: (word >> 44) as u16 & 3,
                    ..SendWqe::default()
                };
                let words: [u64; 8] = transmute!(wqe);
                raw.put(a.at + 0x2000, words.as_bytes());
                raw.ring(a.cell, u64::from((word >> 48) as u32 & 63));
            }
        }
    }
}

/// B9: what a client writes harms that client alone.
#[test]
fn garbage_of_a_client_harms_nobody_else() {
    const SEEDS: u64 = 1000;
    with_board(2, |paths| {
        let mut witness = Raw::open(&paths[1]);
        let (key, mut a, mut b) = two_qps(&mut witness);
        for seed in 0..SEEDS {
            let mut raw = Raw::open(&paths[0]);
            write_garbage(&mut raw, &mut Rng::new([seed, 1]));
            exchange(&mut witness, key, &mut a, &mut b, seed);
        }
        assert_eq!(witness.register(REG_ERROR), 0);
    });
}

/// B39: messages that are none end the client's connection, and nobody else's.
#[test]
fn messages_that_are_none_end_the_connection() {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    let board = with_board(1, |paths| {
        let mut rng = Rng::new([3, 4]);
        for seed in 0..200 {
            let mut socket = UnixStream::connect(&paths[0]).unwrap();
            let mut noise = vec![0; 16 + (rng.word() % 64) as usize];
            noise.iter_mut().for_each(|byte| *byte = rng.word() as u8);
            if seed % 2 == 0 {
                /* a head that is one, with any command behind it */
                let len = noise.len() as u32;
                noise[2..4].copy_from_slice(&(rng.word() as u16 % 16).to_le_bytes());
                noise[4..8].copy_from_slice(&len.to_le_bytes());
                noise[8..12].copy_from_slice(&0u32.to_le_bytes());
            }
            socket.write_all(&noise).unwrap();
            socket.shutdown(std::net::Shutdown::Write).unwrap();
            /* it answers or hangs up, and does so at once */
            let _ = socket.read_to_end(&mut Vec::new());
        }
        Raw::open(&paths[0]).basics();
    });
    assert_eq!(board.card.nic.qp_count(), 0);
}

#[test]
fn an_armed_queue_raises_one_event() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let (irq, eventfd) = std::os::unix::net::UnixStream::pair().unwrap();
        raw.client().set_irqs(starverbs_vfio::message::IRQ_MSIX, &[eventfd.into()]).unwrap();
        let (pd, key, cq) = raw.basics();
        let (mut a, mut b) = (raw.qp(pd, cq.number, 0), raw.qp(pd, cq.number, 1));
        raw.connect_qp(a, b.qpn);
        raw.connect_qp(b, a.qpn);
        exchange(&mut raw, key, &mut a, &mut b, 1);
        assert_eq!(raw.event(0), None, "nobody asked for one");
        raw.ring(cq.cell, arm(raw.taken, 1, false));
        exchange(&mut raw, key, &mut a, &mut b, 2);
        assert_eq!(raw.wait_for_event(0), (EVENT_COMPLETION, cq.number));
        let mut count = [0; 8];
        std::io::Read::read_exact(&mut &irq, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1, "the interrupt");
        exchange(&mut raw, key, &mut a, &mut b, 3);
        assert_eq!(raw.event(1), None, "one for each time that it is armed");
        /* what came between the look and the arming raises it at once */
        raw.ring(cq.cell, arm(raw.taken - 1, 2, false));
        assert_eq!(raw.wait_for_event(1), (EVENT_COMPLETION, cq.number));
        /* of solicited ones alone */
        raw.ring(cq.cell, arm(raw.taken, 3, true));
        exchange(&mut raw, key, &mut a, &mut b, 4);
        raw.settle();
        assert_eq!(raw.event(2), None, "nothing solicited");
        raw.post_recv(&mut b, 5, data(4096, 8, key));
        let flags = SendFlags::SIGNALED | SendFlags::SOLICITED;
        raw.put_send(&mut a, SendWqe { op: SendOp::Send, flags, ..SendWqe::default() }, data(0, 8, key));
        raw.doorbell(&a);
        assert_eq!(raw.wait_for_event(2), (EVENT_COMPLETION, cq.number));
        /* an index of the future raises nothing until the queue is there */
        raw.ring(cq.cell, arm(raw.taken + 1000, 4, false));
        raw.settle();
        assert_eq!(raw.event(3), None);
    });
}

#[test]
fn registers_are_written_as_wholes_and_stay_while_enabled() {
    with_board(1, |paths| {
        let errno = |done: io::Result<()>| done.err().and_then(|error| error.raw_os_error()).unwrap_or(0);
        let mut raw = Raw::connect(&paths[0]);
        assert_eq!((raw.register(REG_MAGIC), raw.register(REG_VERSION)), (MAGIC, VERSION));
        for (at, len) in [
            (REG_COMMANDS, 4),
            (REG_COMMANDS + 4, 4),
            (REG_EVENTS_LOG, 8),
            (REG_EVENTS_LOG, 2),
            (REG_EVENTS_LOG + 1, 4),
            (REG_MAGIC, 4),
            (REG_CAPS, 8),
            (CONTROL_BYTES, 4),
        ] {
            assert_eq!(errno(raw.write(at, &[0; 8][..len])), libc::EINVAL, "{at:#x} {len}");
        }
        /* queues that are nowhere: not enabled, and the register says why */
        raw.write(REG_CONTROL, &CTRL_ENABLE.to_le_bytes()).unwrap();
        assert_eq!((raw.register(REG_STATUS), raw.register(REG_ERROR)), (0, libc::EFAULT as u32));
        raw.write(REG_ERROR, &[0; 4]).unwrap();
        assert_eq!(raw.register(REG_ERROR), 0);
        raw.write(REG_COMMANDS_TAIL, &1u32.to_le_bytes()).unwrap();
        assert_eq!(raw.register(REG_ERROR), libc::ENXIO as u32, "no commands before it is enabled");
        drop(raw);
        let mut raw = Raw::open(&paths[0]);
        for (at, len) in [(REG_COMMANDS, 8), (REG_COMMANDS_LOG, 4), (REG_EVENTS, 8), (REG_EVENTS_LOG, 4)] {
            assert_eq!(errno(raw.write(at, &[0; 8][..len])), libc::EBUSY, "{at:#x}");
        }
        /* more commands than the queue holds are none */
        raw.write(REG_COMMANDS_TAIL, &17u32.to_le_bytes()).unwrap();
        assert_eq!((raw.register(REG_ERROR), raw.register(REG_COMMANDS_HEAD)), (libc::EINVAL as u32, 0));
        raw.basics();
        assert_eq!(raw.register(REG_COMMANDS_HEAD), 3);
        let mut all = [0xff; 4096];
        raw.client().read(BAR_CONTROL, 4000, &mut all).unwrap();
        assert!(all.iter().all(|byte| *byte == 0), "what is no register reads as 0");
    });
}

#[test]
fn memory_that_was_taken_back_is_out_of_reach() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let (key, mut a, mut b) = two_qps(&mut raw);
        let pd =
            raw.command::<Region>(OP_QUERY_MR, Object { number: key, reserved: 0 }.as_bytes()).unwrap().pd;
        let (_map, file) = sealed::create(c"more", 4096, sealed::SIZE_STAYS).unwrap();
        let more = BASE + BYTES as u64;
        raw.client().dma_map(file.as_fd(), 0, more, 4096).unwrap();
        let region = Region { pd, access: ALL, addr: more, length: 4096, iova: more, ..Region::default() };
        let lkey = raw.number(OP_REG_MR, region.as_bytes()).number;
        let send = SendWqe { wr_id: 1, op: SendOp::Send, flags: SendFlags::SIGNALED, ..SendWqe::default() };
        let there = Sge { addr: more, len: 8, lkey };
        raw.post_recv(&mut b, 2, data(4096, 8, key));
        raw.put_send(&mut a, send, there);
        raw.doorbell(&a);
        assert_eq!([raw.completion().status, raw.completion().status], [WcStatus::Success; 2]);
        raw.client().dma_unmap(more, 4096).unwrap();
        let misses = raw.counter(COUNTER_DMA_MISSES);
        raw.put_send(&mut a, send, there);
        raw.doorbell(&a);
        assert_eq!(raw.completion().status, WcStatus::LocProtErr);
        assert_eq!(raw.counter(COUNTER_DMA_MISSES), misses + 1);
    });
}

/// A client that makes as much as it can of all gets its share, and no more.
#[test]
fn a_client_gets_no_more_than_its_share() {
    with_board(2, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let (pd, _, cq) = raw.basics();
        const LONG: u64 = 512 << 20;
        let (_map, file) = sealed::create(c"long", LONG as usize, sealed::SIZE_STAYS).unwrap();
        let at = BASE + BYTES as u64;
        raw.client().dma_map(file.as_fd(), 0, at, LONG).unwrap();
        let create = Raw::create_qp(pd, cq.number, QPS);
        let long = Queues { send: at, send_stride: 4160, send_log: 16, ..create.queues };
        let long = CreateQp { queues: long, ..create };
        let longer = CreateQp { queues: Queues { send_stride: 4224, ..long.queues }, ..long };
        let mut refused = |qp: &CreateQp| raw.command::<NumberReply>(OP_CREATE_QP, qp.as_bytes()).err();
        assert_eq!(refused(&longer), Some(libc::EINVAL as u32), "no slot is as long");
        assert_eq!(refused(&long), Some(libc::ENOMEM as u32));
        let half = CreateQp { queues: Queues { send_log: 15, ..long.queues }, ..long };
        let qp = raw.number(OP_CREATE_QP, half.as_bytes());
        assert_eq!(
            raw.command::<NumberReply>(OP_CREATE_QP, half.as_bytes()).err(),
            Some(libc::ENOMEM as u32)
        );
        raw.object(OP_DESTROY_QP, qp.number).unwrap();
        let again = raw.number(OP_CREATE_QP, half.as_bytes());
        raw.object(OP_DESTROY_QP, again.number).unwrap();
        let device: DeviceReply = raw.command(OP_QUERY_DEVICE, &[]).unwrap();
        assert_eq!(device.max_mr, starverbs_core::Limits::default().mrs / 2);
        let mut other = Raw::open(&paths[1]);
        let (key, mut a, mut b) = two_qps(&mut other);
        exchange(&mut other, key, &mut a, &mut b, 1);
    });
}

/// docs/board.md names tests that there are, and numbers its rules one after the other.
#[test]
fn the_document_names_tests_that_there_are() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = std::fs::read_to_string(root.join("docs/board.md")).unwrap();
    let files = [
        "provider/board/src/tests.rs",
        "provider/board/src/tests/rules.rs",
        "provider/board/src/dma/tests.rs",
        "provider/board/src/pci.rs",
        "provider/board/src/tables.rs",
        "provider/board/src/tests/contexts.rs",
        "provider/board/src/tests/tables.rs",
        "provider/board/src/tests/pci.rs",
        "provider/board/src/tests/rules.rs",
        "provider/queues/tests/board.rs",
        "provider/queues/tests/header.rs",
        "provider/verbs/tests/verbs/board.rs",
        "provider/verbs/tests/verbs/board_lies.rs",
        "provider/vfio/src/stream.rs",
    ];
    let tests: String = files.iter().map(|file| std::fs::read_to_string(root.join(file)).unwrap()).collect();
    let (mut number, mut held) = (0, 0);
    for rule in text.split("\n- **B").skip(1) {
        number += 1;
        assert_eq!(rule.split("**").next().unwrap(), number.to_string(), "{rule}");
        let rule = rule.split("\n#").next().unwrap();
        let (_, named) = rule.rsplit_once("*Held by*").unwrap_or_else(|| {
            assert!(rule.contains("*Not yet held by a test*"), "{rule}");
            ("", "")
        });
        for name in named.split('`').skip(1).step_by(2) {
            assert!(tests.contains(&format!("fn {name}(")), "no test {name}: {rule}");
            held += 1;
        }
    }
    assert!(number > 30 && held > 30, "{number} rules, {held} tests");
}

#[test]
fn a_new_cell_is_zero_and_an_old_value_no_doorbell() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let (pd, key, cq) = raw.basics();
        let mut a = raw.qp(pd, cq.number, 0);
        let b = raw.qp(pd, cq.number, 1);
        raw.connect_qp(a, b.qpn);
        raw.connect_qp(b, a.qpn);
        raw.ring(a.cell, 0x7_0000_0000);
        raw.settle();
        let before = raw.counter(COUNTER_DOORBELLS);
        raw.ring(a.cell, 0x7_0000_0000);
        raw.ring(b.cell + 50, 9);
        raw.settle();
        assert_eq!(raw.counter(COUNTER_DOORBELLS), before + SETTLED);
        raw.object(OP_DESTROY_QP, a.qpn).unwrap();
        raw.object(OP_DESTROY_QP, b.qpn).unwrap();
        raw.put(a.at, &[0; 128]);
        let again = raw.qp(pd, cq.number, 0);
        assert_eq!(again.cell, a.cell);
        // SAFETY: inside the page; aligned.
        let cell = unsafe { raw.page.as_ptr().cast::<u64>().add(again.cell as usize).read_volatile() };
        assert_eq!(cell, 0);
        a = again;
        let mut b = raw.qp(pd, cq.number, 1);
        raw.put(b.at, &[0; 128]);
        raw.connect_qp(a, b.qpn);
        raw.connect_qp(b, a.qpn);
        exchange(&mut raw, key, &mut a, &mut b, 1);
    });
}

#[test]
fn a_request_is_fetched_once() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let (key, mut a, mut b) = two_qps(&mut raw);
        raw.put(DATA, b"as it was");
        let fetched = raw.counter(COUNTER_SEND_FETCHES);
        let send = SendWqe { wr_id: 1, op: SendOp::Send, flags: SendFlags::SIGNALED, ..SendWqe::default() };
        raw.put_send(&mut a, send, data(0, 9, key));
        raw.doorbell(&a);
        let begun = Instant::now();
        while raw.counter(COUNTER_SEND_FETCHES) == fetched {
            assert!(begun.elapsed() < Duration::from_secs(60), "it is not fetched");
        }
        /* it waits for a receive; meanwhile its slot gets other bytes */
        raw.put(a.at + 0x2000, &[0xaa; SEND_STRIDE]);
        raw.post_recv(&mut b, 2, data(4096, 16, key));
        let mut came = [raw.completion(), raw.completion()].map(|cqe| (cqe.wr_id, cqe.status));
        came.sort_by_key(|(wr_id, _)| *wr_id);
        assert_eq!(came, [(1, WcStatus::Success), (2, WcStatus::Success)]);
        assert_eq!(&raw.get::<[u8; 9]>(DATA + 4096), b"as it was");
        assert_eq!(raw.counter(COUNTER_SEND_FETCHES), fetched + 1);
    });
}

#[test]
fn requests_that_contradict_themselves_fail() {
    let send = SendWqe {
        op: SendOp::Send,
        flags: SendFlags::SIGNALED,
        num_sge: 1,
        length: 8,
        blocks: 2,
        ..SendWqe::default()
    };
    let inline = SendWqe { flags: SendFlags::SIGNALED | SendFlags::INLINE, num_sge: 0, length: 64, ..send };
    let wrong = [
        SendWqe { length: 9, ..send },
        SendWqe { num_sge: 5, ..send },
        SendWqe { blocks: 1, ..send },
        SendWqe { blocks: 3, ..send },
        SendWqe { length: 65, ..inline },
        SendWqe { blocks: 1, length: 1, ..inline },
        SendWqe { num_sge: 1, ..inline },
        SendWqe { op: SendOp::Read, length: 8, ..inline },
        SendWqe { op: SendOp::Malformed, ..send },
    ];
    with_board(1, |paths| {
        for (n, wqe) in wrong.into_iter().enumerate() {
            let mut raw = Raw::open(&paths[0]);
            let (key, mut a, _) = two_qps(&mut raw);
            raw.put_send(&mut a, send, data(0, 8, key));
            let words: [u64; 8] = transmute!(wqe);
            raw.put(a.at + 0x2000, words.as_bytes());
            raw.doorbell(&a);
            assert_eq!(raw.completion().status, WcStatus::LocQpOpErr, "{n}");
            assert!(raw.counter(COUNTER_MALFORMED) > 0 || wqe.op == SendOp::Malformed, "{n}");
        }
    });
}

#[test]
fn a_full_completion_queue_fails_once_or_loses_what_comes() {
    for flags in [0, CQ_IGNORE_OVERRUN] {
        with_board(1, |paths| {
            let mut raw = Raw::open(&paths[0]);
            let (pd, key, _) = raw.basics();
            let at = BASE + 0x8000;
            let small = CreateCq { entries: at + 64, taken: at, log: 1, flags };
            let small = raw.number(OP_CREATE_CQ, small.as_bytes());
            let (mut a, mut b) = (raw.qp(pd, small.number, 0), raw.qp(pd, small.number, 1));
            raw.connect_qp(a, b.qpn);
            raw.connect_qp(b, a.qpn);
            for n in 0..4 {
                raw.post_recv(&mut b, n, data(4096, 8, key));
                let send = SendWqe { op: SendOp::Send, flags: SendFlags::SIGNALED, ..SendWqe::default() };
                raw.put_send(&mut a, send, data(0, 8, key));
            }
            raw.doorbell(&a);
            if flags == 0 {
                /* IBV_EVENT_CQ_ERR, once */
                assert_eq!(raw.wait_for_event(0), (0, small.number));
            } else {
                let begun = Instant::now();
                let released = a.at + 64 + std::mem::offset_of!(CardIndex, send_released);
                while raw.word(released).load(Ordering::Acquire) != 4 {
                    assert!(begun.elapsed() < Duration::from_secs(60), "the queue pair stopped");
                    std::thread::yield_now();
                }
                assert_eq!(raw.event(0), None);
            }
            assert_eq!(raw.counter(COUNTER_CQE_WRITES), 2);
            assert_ne!(raw.event(1).map(|(kind, _)| kind), Some(0));
        });
    }
}
