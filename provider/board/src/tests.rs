//! A board and clients that speak to it as a driver would, by registers, commands and memory.

mod contexts;
mod counted;
mod pci;
mod qpc;
mod raw;
mod record;
mod rules;
mod star;
mod strom;
mod tables;

use std::os::fd::AsFd;
use std::time::Duration;

use starverbs_backend::sealed;
use starverbs_core::rng::Rng;
use starverbs_core::{SendFlags, SendOp, SendWqe, WcStatus};
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
        let TwoQps { key, mut a, mut b } = two_qps(&mut raw);
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
            let TwoQps { key, mut a, mut b } = two_qps(&mut raw);
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
        let TwoQps { a, .. } = two_qps(&mut raw);
        raw.doorbell(&a);
    });
    assert_eq!(board.card.nic.qp_count(), 0);
    let counters = board.card.nic.counters();
    assert_eq!((counters.qps.get(), counters.mrs.get()), (0, 0));
    let function = &board.functions[0];
    assert!(function.contexts.is_empty());
    assert!(board.card.env.memories[0].maps.pointer(BASE, 1).is_none());
}

/// B8: reserved commands, and bits that are not set.
#[test]
fn what_is_reserved_is_refused() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let optional = CAP_WINDOWS | CAP_MTT | CAP_XRC | CAP_MULTICAST | CAP_CQ_CHANGES | CAP_NULL | CAP_MADS;
        let optional = optional | CAP_DOORBELL_OPS | CAP_QPC_HOST | CAP_STAR | CAP_STROM;
        assert_eq!(u64::from(raw.register(REG_CAPS)), CAP_VERBS | optional);
        for op in [0, OP_STAR_QUERY + 1, OP_UNLOAD_KERNEL + 1, OP_RMA, u16::MAX] {
            let body = COMMANDS + (raw.tail & ((1 << COMMANDS_LOG) - 1)) as usize * COMMAND_BYTES + 8;
            assert_eq!(raw.object(op, 77), Err(libc::EOPNOTSUPP as u32), "{op:#x}");
            assert_eq!(raw.get::<Object>(body).number, 77, "the body stays");
        }
        let Basics { pd, cq, .. } = raw.basics();
        let packets = CreateQp { kind: 8, ..Raw::create_qp(pd, cq.number, QPS) };
        assert_eq!(
            raw.command::<NumberReply>(OP_CREATE_QP, packets.as_bytes()).err(),
            Some(libc::EINVAL as u32)
        );
    });
}

/// Posts a command, whose answer is not waited for: it may never come.
fn post(raw: &mut Raw, op: u16, body: &[u8]) {
    raw.put_command(op, body);
    raw.post_commands().unwrap();
}

/// A client that writes what it likes wherever it can.
fn write_garbage(raw: &mut Raw, rng: &mut Rng) {
    let TwoQps { a, b, .. } = two_qps(raw);
    let (pd, other) = (raw.number(OP_ALLOC_PD, &[]).number, raw.open_context(1));
    two_qps(raw);
    for _ in 0..32 {
        let word = rng.word();
        /* of its contexts, or of one that there is not */
        raw.context = [0, 0, other, word as u16 % 256][(word >> 58) as usize % 4];
        let mut noise = [0u8; COMMAND_BYTES];
        noise.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&rng.word().to_le_bytes()));
        match word % 10 {
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
            /* a message: of a queue pair of its own most of all */
            9 => {
                let qpn = [a.qpn, b.qpn, word as u32][(word >> 8) as usize % 3];
                let [offset, count] = [(word >> 16) as u16 & 0x1f, (word >> 32) as u16 & 0x4f];
                let message = DoorbellMessage { op: (word >> 48) as u8 & 3, offset, count, qpn };
                let message = message.to_word().to_le_bytes();
                let page = (word >> 56) % 4 * 0x1_0000;
                raw.client().write(BAR_DOORBELLS, page + 0xfff8, &message).unwrap();
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
                let op = [
                    1, 3, 4, 0x10, 0x20, 0x22, 0x28, 0x30, 0x40, 0x41, 0x50, 0x51, 0x60, 0x61, 0x62, 0x63,
                    0x200, 0x201,
                ][(word >> 8) as usize % 18];
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
        let TwoQps { key, mut a, mut b } = two_qps(&mut witness);
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

/// A client that makes as much as it can of all gets its share, and no more.
#[test]
fn a_client_gets_no_more_than_its_share() {
    with_board(2, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let Basics { pd, cq, .. } = raw.basics();
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
        assert_eq!(device.max_mr, starverbs_core::CardLimits::default().mrs / 2);
        let mut other = Raw::open(&paths[1]);
        let TwoQps { key, mut a, mut b } = two_qps(&mut other);
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
        "provider/board/src/tests/counted.rs",
        "provider/board/src/tests/tables.rs",
        "provider/board/src/tests/pci.rs",
        "provider/board/src/tests/qpc.rs",
        "provider/board/src/tests/star.rs",
        "provider/board/src/tests/strom.rs",
        "provider/star/src/stateful/tests/counts.rs",
        "provider/queues/tests/board.rs",
        "provider/queues/tests/header.rs",
        "provider/verbs/tests/verbs/board.rs",
        "provider/verbs/tests/verbs/board_lies.rs",
        "provider/verbs/tests/verbs/board_star.rs",
        "provider/verbs/tests/verbs/board_stops.rs",
        "provider/verbs/tests/verbs/board_strom.rs",
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
