use core::mem::offset_of;
use core::ptr::NonNull;
use std::alloc::Layout;
use std::collections::VecDeque;
use std::sync::Arc;

use proptest::prelude::*;
use starverbs_core::{
    Cqe, HeldWqe, RecvQueue, SendFlags, SendOp, SendQueue, SendWqe, Sge, TakenWqe, WcStatus,
};

use crate::{AllocResult, CqRing, Memory, ProgramMemory, PushError, RecvSize, Resource, SendSize, WorkRings};

fn cqe(wr_id: u64, qpn: u32) -> Cqe {
    Cqe { wr_id, qpn, ..Cqe::default() }
}

fn push(ring: &CqRing, wr_id: u64, qpn: u32) -> bool {
    // SAFETY: these tests have one thread.
    unsafe { ring.push(&cqe(wr_id, qpn), 0) }.is_ok()
}

fn send_ring(max_wr: u32, max_sge: u16, max_inline: u32) -> WorkRings {
    WorkRings::new(Some(SendSize { max_wr, max_sge, max_inline }), None, None).unwrap()
}

fn recv_ring(max_wr: u32, max_sge: u16) -> WorkRings {
    WorkRings::new(None, Some(RecvSize { max_wr, max_sge }), None).unwrap()
}

fn drain(ring: &CqRing) -> Vec<u64> {
    let mut consumer = ring.consumer();
    std::iter::from_fn(|| consumer.take().map(|(c, _)| c.wr_id)).collect()
}

#[test]
fn send_ring_keeps_what_was_posted() {
    let ring = send_ring(3, 2, 100);
    assert_eq!((ring.send_slots(), ring.max_send_sge()), (4, 2));
    assert!(ring.max_inline() >= 100);
    // SAFETY: these tests have one thread.
    let card = unsafe { ring.card_sq() };
    let sges = [Sge { addr: 1, len: 10, lkey: 7 }, Sge { addr: 2, len: 20, lkey: 8 }];
    let text = *b"inline bytes";
    let pieces = [
        Sge { addr: text.as_ptr() as u64, len: 6, lkey: 0 },
        Sge { addr: 0, len: 0, lkey: 0 },
        Sge { addr: text[6..].as_ptr() as u64, len: 6, lkey: 0 },
    ];
    for round in 0..9u32 {
        let index = round * 2;
        let mut producer = ring.send_producer();
        producer.push(SendWqe { wr_id: round.into(), ..SendWqe::default() }, &sges).unwrap();
        // SAFETY: the pieces lie in `text`.
        unsafe { producer.push_inline(SendWqe::default(), &pieces) }.unwrap();
        assert_eq!(card.posted(), index, "not visible before the lock is given back");
        drop(producer);
        assert_eq!(card.posted(), index + 2);
        assert_eq!(card.wqe(index).wr_id, u64::from(round));
        assert_eq!(card.wqe(index).length, 30);
        assert_eq!(card.sges(index).collect::<Vec<_>>(), sges);
        assert!(card.sges(index + 1).next().is_none());
        assert!(card.wqe(index + 1).flags.contains(SendFlags::INLINE));
        let seg = card.inline(index + 1);
        // SAFETY: the WQE is not released, so its bytes stand.
        let bytes = unsafe { std::slice::from_raw_parts(seg.addr as *const u8, seg.len as usize) };
        assert_eq!(bytes, text);
        card.release(index + 2);
    }
}

#[test]
fn send_ring_refuses_what_does_not_fit() {
    let ring = send_ring(2, 1, 64);
    // SAFETY: these tests have one thread.
    let card = unsafe { ring.card_sq() };
    let mut producer = ring.send_producer();
    assert_eq!(producer.push(SendWqe::default(), &[Sge::default(); 2]), Err(PushError::TooManySges));
    let long = Sge { addr: 0, len: ring.max_inline() + 1, lkey: 0 };
    // SAFETY: refused before it is read.
    assert_eq!(unsafe { producer.push_inline(SendWqe::default(), &[long]) }, Err(PushError::InlineTooLong));
    producer.push(SendWqe::default(), &[]).unwrap();
    producer.push(SendWqe::default(), &[]).unwrap();
    assert_eq!(producer.push(SendWqe::default(), &[]), Err(PushError::Full));
    drop(producer);
    card.reset();
    let mut producer = ring.send_producer();
    assert_eq!(producer.push(SendWqe::default(), &[]), Ok(()));
    assert_eq!(producer.pushed(), 1);
}

#[test]
fn recv_ring_is_full_and_empty_where_it_should_be() {
    let ring = recv_ring(2, 1);
    // SAFETY: these tests have one thread.
    let card = unsafe { ring.card_rq() };
    let mut sges = [Sge::default(); 4];
    assert!(card.take(&mut sges).is_none());
    let mut producer = ring.recv_producer();
    assert_eq!(producer.push(0, &[Sge::default(); 2]), Err(PushError::TooManySges));
    producer.push(1, &[Sge { addr: 9, len: 8, lkey: 7 }]).unwrap();
    producer.push(2, &[]).unwrap();
    assert_eq!(producer.push(3, &[]), Err(PushError::Full));
    drop(producer);
    assert_eq!(card.len(), 2);
    assert_eq!(card.take(&mut sges), Some(TakenWqe { wr_id: 1, num_sge: 1 }));
    assert_eq!(sges[0], Sge { addr: 9, len: 8, lkey: 7 });
    assert_eq!(ring.recv_producer().push(3, &[]), Ok(()));
    card.reset();
    assert!(card.take(&mut sges).is_none());
    assert_eq!(ring.recv_producer().push(4, &[]), Ok(()));
    assert_eq!(card.take(&mut sges), Some(TakenWqe { wr_id: 4, num_sge: 0 }));
}

#[test]
fn receives_that_come_back_are_the_next_to_be_taken() {
    let rings = recv_ring(4, 2);
    // SAFETY: these tests have one thread.
    let (rq, other) = unsafe { (rings.card_rq(), rings.card_rq()) };
    let sge = |addr| Sge { addr, len: 1, lkey: 2 };
    let post = |id| rings.recv_producer().push(id, &[sge(id), sge(id + 1)]);
    let mut sges = [Sge::default(); 2];
    (0..4).for_each(|id| post(id).unwrap());
    let taken: Vec<_> = (0..3).map(|_| (rq.take(&mut sges).unwrap().wr_id, sges)).collect();
    (4..7).for_each(|id| post(id).unwrap());
    /* the first is used, the others come back; then the first of these is taken once more, and comes back */
    rq.put_back(&mut taken[1..].iter().map(|(id, sges)| HeldWqe { wr_id: *id, sges })).unwrap();
    assert_eq!((rq.len(), rings.recv_waiting(), post(9)), (6, 6, Err(PushError::Full)));
    assert_eq!(other.take(&mut sges), Some(TakenWqe { wr_id: 1, num_sge: 2 }));
    rq.put_back(&mut [HeldWqe { wr_id: 1, sges: &sges }].into_iter()).unwrap();
    for id in 1..7 {
        assert_eq!(
            (rq.len(), other.take(&mut sges)),
            (7 - id as u32, Some(TakenWqe { wr_id: id, num_sge: 2 }))
        );
        assert_eq!(sges, [sge(id), sge(id + 1)]);
    }
    assert_eq!((rq.len(), rq.take(&mut sges)), (0, None));
    rq.put_back(&mut [HeldWqe { wr_id: 8, sges: &sges }].into_iter()).unwrap();
    rq.reset();
    assert_eq!((rq.len(), rq.take(&mut sges)), (0, None));
}

#[test]
fn rings_of_a_qp_lie_beside_each_other() {
    let rings = WorkRings::new(
        Some(SendSize { max_wr: 4, max_sge: 1, max_inline: 0 }),
        Some(RecvSize { max_wr: 5, max_sge: 3 }),
        None,
    )
    .unwrap();
    // SAFETY: these tests have one thread.
    let (sq, rq) = unsafe { (rings.card_sq(), rings.card_rq()) };
    let sge = |addr| Sge { addr, len: 1, lkey: 2 };
    for id in 0..20 {
        let wqe = SendWqe { wr_id: id, ..SendWqe::default() };
        for at in 0..4 {
            rings.send_producer().push(SendWqe { wr_id: id + at, ..wqe }, &[sge(id + at)]).unwrap();
        }
        for at in 0..8 {
            rings.recv_producer().push(id + at, &[sge(id), sge(at), sge(7)]).unwrap();
        }
        assert_eq!(rings.send_producer().push(wqe, &[]), Err(PushError::Full));
        assert_eq!(rings.recv_producer().push(id, &[]), Err(PushError::Full));
        let mut sges = [Sge::default(); 3];
        for at in 0..8 {
            assert_eq!(rq.take(&mut sges), Some(TakenWqe { wr_id: id + at, num_sge: 3 }));
            assert_eq!(sges, [sge(id), sge(at), sge(7)]);
        }
        for at in 0..4 {
            let index = id as u32 * 4 + at;
            assert_eq!(sq.wqe(index).wr_id, id + u64::from(at));
            assert_eq!(sq.sges(index).collect::<Vec<_>>(), [sge(id + u64::from(at))]);
            sq.release(index + 1);
        }
    }
    /* the halves keep the memory */
    drop(rings);
    assert_eq!((sq.posted(), rq.len()), (80, 0));
}

#[test]
fn a_queue_that_is_not_there_is_full_and_empty() {
    let rings = recv_ring(2, 1);
    // SAFETY: these tests have one thread.
    let card = unsafe { rings.card_sq() };
    assert_eq!(rings.send_producer().push(SendWqe::default(), &[]), Err(PushError::Full));
    assert_eq!((card.posted(), card.slots(), rings.max_inline()), (0, 0, 0));
    let rings = send_ring(2, 1, 0);
    // SAFETY: as above.
    let card = unsafe { rings.card_rq() };
    assert_eq!(rings.recv_producer().push(1, &[]), Err(PushError::Full));
    assert_eq!(card.take(&mut []), None);
}

#[test]
fn sizes_out_of_reach_are_refused() {
    let send = SendSize { max_wr: 1, max_sge: 1, max_inline: 0 };
    assert!(WorkRings::new(Some(SendSize { max_inline: 1 << 16, ..send }), None, None).is_none());
    assert!(WorkRings::new(Some(SendSize { max_wr: u32::MAX, ..send }), None, None).is_none());
    assert!(WorkRings::new(None, Some(RecvSize { max_wr: 1 << 31, max_sge: 1 }), None).is_none());
}

#[test]
fn cq_ring_overruns_without_losing_what_it_has() {
    let ring = CqRing::new(2, false, None).unwrap();
    assert!(push(&ring, 1, 0) && push(&ring, 2, 0));
    assert!(!push(&ring, 3, 0));
    assert_eq!(drain(&ring), [1, 2]);
    assert!(push(&ring, 4, 0));
    assert_eq!(drain(&ring), [4]);
}

#[test]
fn a_cq_ring_that_has_overrun_and_was_closed_takes_no_more() {
    let ring = CqRing::new(2, false, None).unwrap();
    assert!(push(&ring, 1, 0) && push(&ring, 2, 0) && !push(&ring, 3, 0));
    ring.close();
    assert_eq!(drain(&ring), [1, 2]);
    assert!(!push(&ring, 4, 0) && !push(&ring, 5, 0));
    let mut room = ring.room(4).unwrap();
    // SAFETY: nobody pushes meanwhile.
    assert!(!unsafe { ring.consumer().resize(&mut room) });
    assert!(!push(&ring, 6, 0));
    assert_eq!(drain(&ring), []);
}

#[test]
fn cq_ring_grows_with_its_contents() {
    let ring = CqRing::new(4, false, None).unwrap();
    for id in 0..7 {
        assert!(push(&ring, id, 0));
        if id < 3 {
            assert_eq!(drain(&ring), [id]);
        }
    }
    // SAFETY: one thread, so nobody pushes meanwhile.
    unsafe {
        let (mut small, mut large) = (ring.room(2).unwrap(), ring.room(16).unwrap());
        assert!(!ring.consumer().resize(&mut small), "four completions do not fit two slots");
        assert!(ring.consumer().resize(&mut large));
    }
    assert_eq!(ring.consumer().capacity(), 16);
    for id in 7..19 {
        assert!(push(&ring, id, 0));
    }
    assert!(!push(&ring, 19, 0));
    assert_eq!(drain(&ring), (3..19).collect::<Vec<_>>());
}

/// Whoever writes over a queue's memory gets an error, never a value that no enum has.
#[test]
fn bad_wqes_and_completions_are_refused() {
    let ring = send_ring(2, 1, 0);
    // SAFETY: these tests have one thread.
    let card = unsafe { ring.card_sq() };
    ring.send_producer().push(SendWqe { wr_id: 7, ..SendWqe::default() }, &[]).unwrap();
    // SAFETY: the slot lies in the ring, and nobody else is here.
    unsafe { ring.send_slot_mut(0).add(offset_of!(SendWqe, op)).write(13) };
    assert_eq!((card.wqe(0).wr_id, card.wqe(0).op), (7, SendOp::Malformed));

    let ring = CqRing::new(2, false, None).unwrap();
    assert!(push(&ring, 8, 3));
    // SAFETY: as above.
    unsafe { ring.slots().write(0).add(offset_of!(Cqe, status)).write(99) };
    let bad = ring.consumer().take().map(|(cqe, _)| (cqe.wr_id, cqe.qpn, cqe.status));
    assert_eq!(bad, Some((8, 3, WcStatus::GeneralErr)));
}

#[test]
fn stamps_stay_with_their_completions() {
    let ring = CqRing::new(4, true, None).unwrap();
    // SAFETY: one thread, so there is one card, and nobody pushes during the resize.
    unsafe {
        for id in 0..4u32 {
            ring.push(&cqe(u64::from(id), id % 2), 100 + u64::from(id)).unwrap();
        }
        ring.consumer().purge(1);
        let mut room = ring.room(9).unwrap();
        assert!(ring.consumer().resize(&mut room));
        ring.push(&cqe(9, 0), 109).unwrap();
    }
    let mut consumer = ring.consumer();
    let all: Vec<_> = std::iter::from_fn(|| consumer.take().map(|(cqe, at)| (cqe.wr_id, at))).collect();
    assert_eq!(all, [(0, 100), (2, 102), (9, 109)]);
}

/// An allocator that counts what is out, or always gives the same answer.
struct Counting {
    out: std::sync::Mutex<Vec<(usize, Layout, Resource)>>,
    answer: Option<fn() -> AllocResult>,
}

// SAFETY: memory of the process's allocator, given back by `free` alone.
unsafe impl Memory for Counting {
    fn alloc(&self, layout: Layout, resource: Resource) -> AllocResult {
        if let Some(answer) = self.answer {
            return answer();
        }
        // SAFETY: no ring's layout has size 0.
        let at = NonNull::new(unsafe { std::alloc::alloc(layout) }).unwrap();
        // SAFETY: just allocated. Rubbish, so that a ring that counts on zeros shows it.
        unsafe { at.write_bytes(0xa5, layout.size()) };
        self.out.lock().unwrap().push((at.addr().get(), layout, resource));
        AllocResult::At(at)
    }

    unsafe fn free(&self, at: NonNull<u8>, resource: Resource) {
        let mut out = self.out.lock().unwrap();
        let index = out.iter().position(|(a, _, r)| (*a, *r) == (at.addr().get(), resource)).unwrap();
        let (_, layout, _) = out.swap_remove(index);
        // SAFETY: given by `alloc` with this layout.
        unsafe { std::alloc::dealloc(at.as_ptr(), layout) };
    }
}

#[test]
fn a_programs_memory_comes_and_goes_back() {
    let memory = Arc::new(Counting { out: Default::default(), answer: None });
    let own: ProgramMemory = Some(memory.clone());
    let size = SendSize { max_wr: 4, max_sge: 1, max_inline: 0 };
    let qp = WorkRings::new(Some(size), None, own.clone()).unwrap();
    let srq = WorkRings::new(None, Some(RecvSize { max_wr: 4, max_sge: 1 }), own.clone()).unwrap();
    let cq = CqRing::new(4, false, own).unwrap();
    let uses = || memory.out.lock().unwrap().iter().map(|(_, _, what)| *what).collect::<Vec<_>>();
    assert_eq!(uses(), [Resource::Qp, Resource::Srq, Resource::Cq]);
    qp.send_producer().push(SendWqe { wr_id: 5, ..SendWqe::default() }, &[Sge::default()]).unwrap();
    // SAFETY: one card half, used by one thread.
    let half = unsafe { qp.card_sq() };
    drop(qp);
    assert_eq!((half.posted(), half.wqe(0).wr_id), (1, 5), "the card's half keeps the memory");
    assert!(push(&cq, 1, 0));
    let mut room = cq.room(8).unwrap();
    // SAFETY: one thread, so nobody pushes meanwhile.
    assert!(unsafe { cq.consumer().resize(&mut room) });
    drop(room);
    assert_eq!((drain(&cq), uses().len()), (vec![1], 3));
    drop((half, srq, cq));
    assert!(uses().is_empty());
}

#[test]
fn a_program_may_leave_it_to_the_default_or_fail() {
    let size = Some(RecvSize { max_wr: 4, max_sge: 1 });
    let answers = |answer: fn() -> AllocResult| -> ProgramMemory {
        Some(Arc::new(Counting { out: Default::default(), answer: Some(answer) }))
    };
    assert!(WorkRings::new(None, size, answers(|| AllocResult::UseDefault)).is_some());
    assert!(CqRing::new(4, false, answers(|| AllocResult::UseDefault)).is_some());
    assert!(WorkRings::new(None, size, answers(|| AllocResult::Failed)).is_none());
    assert!(CqRing::new(4, false, answers(|| AllocResult::Failed)).is_none());
}

#[derive(Debug, Clone)]
enum Step {
    Push(u32),
    Poll(usize),
    Purge(u32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..3u32).prop_map(Step::Push),
        2 => (1..6usize).prop_map(Step::Poll),
        1 => (0..3u32).prop_map(Step::Purge),
    ]
}

/// Steps of a case.
const STEPS: usize = if cfg!(miri) { 30 } else { 200 };

proptest! {
    #[test]
    fn cq_ring_behaves_as_a_deque(steps in prop::collection::vec(step(), 1..STEPS)) {
        let ring = CqRing::new(8, false, None).unwrap();
        let mut model = VecDeque::new();
        for (id, step) in steps.into_iter().enumerate() {
            match step {
                Step::Push(qpn) => {
                    prop_assert_eq!(push(&ring, id as u64, qpn), model.len() < 8);
                    if model.len() < 8 {
                        model.push_back((id as u64, qpn));
                    }
                }
                Step::Poll(most) => {
                    let mut consumer = ring.consumer();
                    for _ in 0..most {
                        prop_assert_eq!(consumer.take().map(|(c, _)| (c.wr_id, c.qpn)), model.pop_front());
                    }
                }
                Step::Purge(qpn) => {
                    ring.consumer().purge(qpn);
                    model.retain(|entry| entry.1 != qpn);
                }
            }
        }
    }

    #[test]
    fn recv_ring_behaves_as_a_deque(steps in prop::collection::vec(any::<bool>(), 1..STEPS)) {
        let ring = recv_ring(8, 2);
        // SAFETY: these tests have one thread.
        let card = unsafe { ring.card_rq() };
        let mut model = VecDeque::new();
        let mut sges = [Sge::default(); 2];
        for (id, post) in steps.into_iter().enumerate() {
            let id = id as u64;
            if post {
                let posted = ring.recv_producer().push(id, &[Sge { addr: id, len: 1, lkey: 2 }]).is_ok();
                prop_assert_eq!(posted, model.len() < 8);
                if posted {
                    model.push_back(id);
                }
            } else {
                let taken = card.take(&mut sges).map(|taken| taken.wr_id);
                prop_assert_eq!(taken, model.pop_front());
                prop_assert!(taken.is_none() || sges[0].addr == taken.unwrap());
            }
            prop_assert_eq!(card.len() as usize, model.len());
        }
    }
}

/// The card's thread and the program's, each on its side of all rings.
#[test]
fn both_sides_of_the_rings_run_at_once() {
    const COUNT: u32 = if cfg!(miri) { 20 } else { 20_000 };
    let size = RecvSize { max_wr: 2, max_sge: 1 };
    let qp =
        WorkRings::new(Some(SendSize { max_wr: 2, max_sge: 1, max_inline: 16 }), Some(size), None).unwrap();
    let cq = CqRing::new(2, true, None).unwrap();
    let card = || {
        // SAFETY: this thread alone is the card.
        let (sq, rq) = unsafe { (qp.card_sq(), qp.card_rq()) };
        let mut sges = [Sge::default(); 1];
        for index in 0..COUNT {
            while sq.posted() == index {
                std::thread::yield_now();
            }
            let (wqe, sge) = (sq.wqe(index), sq.sges(index).next().unwrap());
            sq.release(index + 1);
            let recv = std::iter::repeat_with(|| rq.take(&mut sges)).flatten().next().unwrap();
            assert_eq!(
                (wqe.wr_id, sge.addr, recv),
                (u64::from(index), u64::from(index), TakenWqe { wr_id: u64::from(index), num_sge: 1 })
            );
            // SAFETY: as above.
            while unsafe { cq.push(&cqe(wqe.wr_id, index), wqe.wr_id) }.is_err() {
                std::thread::yield_now();
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(card);
        let (mut sent, mut received, mut polled) = (0, 0, 0);
        while polled < COUNT {
            let of = |number: u32| (u64::from(number), [Sge { addr: number.into(), len: 1, lkey: 1 }]);
            let (wr_id, sges) = of(sent);
            let wqe = SendWqe { wr_id, ..SendWqe::default() };
            sent += u32::from(sent < COUNT && qp.send_producer().push(wqe, &sges).is_ok());
            let (wr_id, sges) = of(received);
            received += u32::from(received < COUNT && qp.recv_producer().push(wr_id, &sges).is_ok());
            match cq.consumer().take() {
                Some((cqe, stamp)) => {
                    assert_eq!((cqe.wr_id, cqe.qpn, stamp), (polled.into(), polled, polled.into()));
                    polled += 1;
                }
                None => std::thread::yield_now(),
            }
        }
    });
}
