//! Contexts of one function: each a program's, as apart as functions are.

use std::io::Read;
use std::os::unix::net::UnixStream;

use starverbs_core::{Sge, WcStatus};
use starverbs_queues::board::*;
use starverbs_vfio::message::IRQ_MSIX;
use zerocopy::IntoBytes;

use super::raw::*;

const EINVAL: Option<u32> = Some(libc::EINVAL as u32);

#[test]
fn contexts_have_queues_and_cells_of_their_own() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let TwoQps { key, mut a, mut b } = two_qps(&mut raw);
        let one = raw.open_context(1);
        let TwoQps { key: key_one, a: mut a_one, b: mut b_one } = two_qps(&mut raw);
        assert_eq!((a.cell, b.cell), (a_one.cell, b_one.cell), "each in a page of its own");
        for n in 0..20 {
            raw.enter(0);
            exchange(&mut raw, key, &mut a, &mut b, n);
            raw.enter(one);
            exchange(&mut raw, key_one, &mut a_one, &mut b_one, 100 + n);
        }
        raw.enter(0);
        raw.close_context(one);
        exchange(&mut raw, key, &mut a, &mut b, 50);
        raw.context = one;
        assert_eq!(raw.object(OP_QUERY_QP, a_one.qpn), Err(libc::ENXIO as u32));
    });
}

/// B59: whoever writes into a context's page rings for that context's queue pairs, and while the function
/// masters the bus.
#[test]
fn a_message_is_for_a_queue_pair_of_its_page() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let TwoQps { key, mut a, mut b } = two_qps(&mut raw);
        let one = raw.open_context(1);
        raw.enter(0);
        raw.post_recv(&mut b, 1, data(4096, 8, key));
        raw.put_send(&mut a, signaled_send(2), data(0, 8, key));
        let word = DoorbellMessage { op: DOORBELL_SEND, offset: 0, count: 1, qpn: a.qpn }.to_word();
        let cells = u64::from(raw.register(REG_CELLS));
        let write = |raw: &mut Raw, context: u16| {
            let cell = u64::from(context) * cells + cells - 1;
            let word = word.to_le_bytes();
            raw.client().write(BAR_DOORBELLS, cell * u64::from(CELL_BYTES), &word).unwrap();
        };
        let before = [COUNTER_DOORBELLS, COUNTER_MALFORMED].map(|which| raw.counter(which));
        let counted = |raw: &mut Raw| {
            let after = [COUNTER_DOORBELLS, COUNTER_MALFORMED].map(|which| raw.counter(which));
            [after[0] - before[0], after[1] - before[1]]
        };
        write(&mut raw, one + 1);
        assert_eq!(counted(&mut raw), [0, 0], "a page of no context");
        raw.link.set_master(false).unwrap();
        write(&mut raw, 0);
        raw.link.set_master(true).unwrap();
        assert_eq!(counted(&mut raw), [0, 0], "without the bus");
        write(&mut raw, one);
        assert_eq!(counted(&mut raw), [1, 1], "another context's page");
        assert_eq!(raw.poll(), None);
        write(&mut raw, 0);
        for _ in 0..2 {
            assert_eq!(raw.completion().status, WcStatus::Success);
        }
        assert_eq!(counted(&mut raw), [2, 1]);
        /* what a mapped page keeps there rings nothing */
        raw.ring(cells as u32 - 1, word);
        exchange(&mut raw, key, &mut a, &mut b, 3);
        assert_eq!(counted(&mut raw)[1], 1);
    });
}

#[test]
fn a_context_names_its_own_objects_alone() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let Basics { pd, key, cq } = raw.basics();
        let qp = raw.qp(pd, cq.number, 0);
        let srq = CreateSrq { queues: Raw::create_qp(pd, 0, QPS + 0x1_0000).queues, pd, limit: 0 };
        let srq = raw.number(OP_CREATE_SRQ, srq.as_bytes()).number;
        let window = raw.number(OP_ALLOC_MW, Window { pd, kind: 1 }.as_bytes()).number;
        raw.open_context(0);
        for (op, number) in [
            (OP_DEALLOC_PD, pd),
            (OP_DEREG_MR, key),
            (OP_QUERY_MR, key),
            (OP_DESTROY_CQ, cq.number),
            (OP_DESTROY_SRQ, srq),
            (OP_QUERY_SRQ, srq),
            (OP_DEALLOC_MW, window),
            (OP_DESTROY_QP, qp.qpn),
            (OP_QUERY_QP, qp.qpn),
        ] {
            assert_eq!(raw.object(op, number).err(), EINVAL, "{op:#x}");
        }
        let region = Region { key, pd, access: ALL, addr: BASE, length: 8, ..Region::default() };
        for op in [OP_REG_MR, OP_REREG_MR] {
            assert_eq!(raw.command::<NumberReply>(op, region.as_bytes()).err(), EINVAL);
        }
        let Basics { pd: own, cq: own_cq, .. } = raw.basics();
        let at = raw.at(QPS);
        let create = Raw::create_qp(own, own_cq.number, at);
        for create in [CreateQp { pd, ..create }, CreateQp { srq, ..create }] {
            assert_eq!(raw.command::<NumberReply>(OP_CREATE_QP, create.as_bytes()).err(), EINVAL);
        }
        raw.enter(0);
        assert_eq!(raw.object(OP_QUERY_QP, qp.qpn), Ok(()));
    });
}

#[test]
fn a_key_of_another_context_opens_nothing() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let TwoQps { key, .. } = two_qps(&mut raw);
        raw.open_context(0);
        let TwoQps { key: own, mut a, mut b } = two_qps(&mut raw);
        exchange(&mut raw, own, &mut a, &mut b, 1);
        raw.put_send(&mut a, signaled_send(2), Sge { lkey: key, ..data(0, 8, own) });
        raw.doorbell(&a);
        assert_eq!(raw.completion().status, WcStatus::LocProtErr);
    });
}

#[test]
fn the_first_context_alone_opens_and_closes() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let good = OpenContext { events: BASE + 0x4_1000, events_log: 4, vector: 31 };
        let refused = |raw: &mut Raw, open: OpenContext| {
            raw.command::<NumberReply>(OP_OPEN_CONTEXT, open.as_bytes()).err()
        };
        for (open, errno) in [
            (OpenContext { vector: 32, ..good }, libc::EINVAL),
            (OpenContext { events_log: 13, ..good }, libc::EINVAL),
            (OpenContext { events: good.events + 8, ..good }, libc::EINVAL),
            (OpenContext { events: 0, ..good }, libc::EFAULT),
        ] {
            assert_eq!(refused(&mut raw, open), Some(errno as u32), "{open:?}");
        }
        let all = raw.register(REG_CONTEXTS);
        for n in 1..all {
            assert_eq!(raw.number(OP_OPEN_CONTEXT, good.as_bytes()).number, n);
        }
        assert_eq!(refused(&mut raw, good), Some(libc::ENOSPC as u32));
        for number in [0, all, u32::MAX] {
            assert_eq!(raw.object(OP_CLOSE_CONTEXT, number).err(), EINVAL);
        }
        raw.context = 7;
        assert_eq!(refused(&mut raw, good), Some(libc::EPERM as u32));
        assert_eq!(raw.object(OP_CLOSE_CONTEXT, 8), Err(libc::EPERM as u32));
        raw.context = all as u16;
        assert_eq!(raw.object(OP_QUERY_GID, 0), Err(libc::ENXIO as u32));
        raw.context = 0;
        assert_eq!(raw.object(OP_CLOSE_CONTEXT, 7), Ok(()));
        assert_eq!(raw.object(OP_CLOSE_CONTEXT, 7).err(), EINVAL);
        assert_eq!(raw.number(OP_OPEN_CONTEXT, good.as_bytes()).number, 7, "it can be had again");
    });
}

#[test]
fn events_of_a_context_signal_its_vector() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let pairs: Vec<_> = (0..3).map(|_| UnixStream::pair().unwrap()).collect();
        let fds: Vec<_> = pairs.iter().map(|(_, theirs)| theirs.try_clone().unwrap().into()).collect();
        raw.client().set_irqs(IRQ_MSIX, &fds).unwrap();
        let one = raw.open_context(2);
        let (key, mut a, mut b) = {
            let Basics { pd, key, cq } = raw.basics();
            let (a, b) = (raw.qp(pd, cq.number, 0), raw.qp(pd, cq.number, 1));
            raw.connect_qp(a, b.qpn);
            raw.connect_qp(b, a.qpn);
            raw.ring(cq.cell, arm(raw.taken, 1, false));
            (key, a, b)
        };
        exchange(&mut raw, key, &mut a, &mut b, 1);
        assert_eq!(raw.wait_for_event(0).kind, EVENT_COMPLETION);
        raw.enter(0);
        assert_eq!(raw.event(0), None, "it is another's");
        let signals = pairs.iter().map(|(ours, _)| {
            ours.set_nonblocking(true).unwrap();
            (&*ours).read(&mut [0; 64]).unwrap_or(0) / 8
        });
        assert_eq!(signals.collect::<Vec<_>>(), [0, 0, 1]);
        raw.close_context(one);
    });
}

/// Of what one function may have all its contexts together have no more.
#[test]
fn contexts_share_what_a_function_may_have() {
    with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let device: DeviceReply = raw.command(OP_QUERY_DEVICE, &[]).unwrap();
        let cq = |raw: &mut Raw, n: u32| {
            let at = BASE + raw.at(0x2_0000) as u64;
            let create = CreateCq { entries: at + 64, taken: at, log: 0, flags: 0 };
            let made = raw.command::<NumberReply>(OP_CREATE_CQ, create.as_bytes());
            assert_eq!(made.is_ok(), n < device.max_cq, "{n}");
        };
        (0..device.max_cq / 2).for_each(|n| cq(&mut raw, n));
        let one = raw.open_context(0);
        (device.max_cq / 2..device.max_cq + 1).for_each(|n| cq(&mut raw, n));
        raw.enter(0);
        cq(&mut raw, device.max_cq);
        raw.close_context(one);
        cq(&mut raw, 0);
    });
}

/// The end of a context is the end of all in it, wherever its queue pairs are, and of nothing else.
#[test]
fn what_was_made_in_a_context_ends_with_it() {
    let board = with_board(1, |paths| {
        let mut raw = Raw::open(&paths[0]);
        let TwoQps { key, mut a, mut b } = two_qps(&mut raw);
        for n in 0..50 {
            let one = raw.open_context(0);
            let TwoQps { key: own, a: mut x, .. } = two_qps(&mut raw);
            let pd = raw.number(OP_ALLOC_PD, &[]).number;
            raw.number(OP_ALLOC_MW, Window { pd, kind: 1 }.as_bytes());
            let at = raw.at(QPS + 0x2_0000);
            let queues = Raw::create_qp(pd, 0, at).queues;
            raw.number(OP_CREATE_SRQ, CreateSrq { queues, pd, limit: 0 }.as_bytes());
            /* a message under way, which waits for a receive that does not come */
            raw.put_send(&mut x, signaled_send(1), data(0, 8, own));
            raw.doorbell(&x);
            raw.enter(0);
            raw.close_context(one);
            exchange(&mut raw, key, &mut a, &mut b, n);
        }
        /* nothing of its memory is touched any more */
        let queues = CONTEXT_BYTES..2 * CONTEXT_BYTES;
        raw.put(queues.start, &vec![0xa5; queues.len()]);
        exchange(&mut raw, key, &mut a, &mut b, 77);
        let after = raw.bytes(queues.start, queues.len());
        assert!(after.iter().all(|byte| *byte == 0xa5));
        assert_eq!(raw.object(OP_DESTROY_QP, a.qpn), Ok(()));
        assert_eq!(raw.object(OP_DESTROY_QP, b.qpn), Ok(()));
        raw.open_context(0);
        two_qps(&mut raw);
    });
    assert_eq!(board.card.nic.qp_count(), 0, "and all with the client");
    let counters = board.card.nic.counters();
    assert_eq!((counters.qps.get(), counters.mrs.get()), (0, 0));
}
