//! A program's threads and its card on small rings, and on the flags that go with them.

use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;
use starverbs_core::{Cqe, RecvQueue, SendQueue, SendWqe, Sge, TakenWqe};
use starverbs_rings::{Armed, CqRing, PendingDoorbells, RecvSize, SendSize, WorkRings};

fn send_ring(max_wr: u32) -> WorkRings {
    WorkRings::new(Some(SendSize { max_wr, max_sge: 1, max_inline: 0 }), None, None).unwrap()
}

fn recv_ring(max_wr: u32) -> WorkRings {
    WorkRings::new(None, Some(RecvSize { max_wr, max_sge: 1 }), None).unwrap()
}

#[test]
fn send_ring_hands_over_whole_wqes() {
    loom::model(|| {
        let ring = send_ring(2);
        // SAFETY: the card is one thread.
        let card = unsafe { ring.card_sq() };
        let program = thread::spawn(move || {
            let mut id = 0;
            while id < 3 {
                let sge = Sge { addr: id, len: 1, lkey: 0 };
                let wqe = SendWqe { wr_id: id, ..SendWqe::default() };
                if ring.send_producer().push(wqe, &[sge]).is_ok() {
                    id += 1;
                } else {
                    thread::yield_now();
                }
            }
        });
        let mut done = 0;
        while done < 3 {
            let posted = card.posted();
            if posted == done {
                thread::yield_now();
            }
            while done != posted {
                assert_eq!(card.wqe(done).wr_id, u64::from(done));
                assert_eq!(card.sges(done).next().unwrap().addr, u64::from(done));
                done += 1;
                card.release(done);
            }
        }
        program.join().unwrap();
    });
}

/// WQEs that are built in place: the card sees none before the end, and none that was given up.
#[test]
fn send_ring_hands_over_whole_batches() {
    loom::model(|| {
        let ring = send_ring(2);
        // SAFETY: the card is one thread.
        let card = unsafe { ring.card_sq() };
        let program = thread::spawn(move || {
            let build = |ids: [u64; 2], end: bool| {
                let mut batch = ring.send_producer();
                for id in ids {
                    batch.begin(SendWqe { wr_id: id, ..SendWqe::default() }).unwrap();
                    batch.set_sges(&[Sge { addr: id, len: 1, lkey: 0 }]).unwrap();
                }
                if !end {
                    batch.abort();
                }
            };
            build([7, 8], false);
            build([0, 1], true);
        });
        while card.posted() == 0 {
            thread::yield_now();
        }
        assert_eq!(card.posted(), 2);
        for index in 0..2 {
            assert_eq!(card.wqe(index).wr_id, u64::from(index));
            assert_eq!(card.sges(index).next().unwrap().addr, u64::from(index));
        }
        program.join().unwrap();
    });
}

/// Threads that share a queue pair, one posting, one building in place, while the card takes: a ring of two
/// is full now and then, and each WQE is whole.
#[test]
fn send_ring_serves_two_posters() {
    loom::model(|| {
        let ring = Arc::new(send_ring(2));
        // SAFETY: the card is one thread.
        let card = unsafe { ring.card_sq() };
        let second = ring.clone();
        let builder = thread::spawn(move || {
            let mut batch = second.send_producer();
            let begun = batch.begin(SendWqe { wr_id: 2, ..SendWqe::default() });
            begun.and_then(|()| batch.set_sges(&[Sge { addr: 2, len: 1, lkey: 0 }])).unwrap();
        });
        let poster = thread::spawn(move || {
            let wqe = SendWqe { wr_id: 1, ..SendWqe::default() };
            ring.send_producer().push(wqe, &[Sge { addr: 1, len: 1, lkey: 0 }]).unwrap();
        });
        let (mut done, mut seen) = (0, 0);
        while done < 2 {
            while done != card.posted() {
                assert_eq!(card.wqe(done).wr_id, card.sges(done).next().unwrap().addr);
                seen |= card.wqe(done).wr_id;
                done += 1;
                card.release(done);
            }
            thread::yield_now();
        }
        assert_eq!(seen, 3);
        builder.join().unwrap();
        poster.join().unwrap();
    });
}

#[test]
fn recv_ring_serves_two_posters() {
    loom::model(|| {
        let ring = Arc::new(recv_ring(2));
        // SAFETY: the card is one thread.
        let card = unsafe { ring.card_rq() };
        let second = ring.clone();
        let post = |ring: Arc<WorkRings>, id: u64| {
            assert!(ring.recv_producer().push(id, &[Sge { addr: id, len: 1, lkey: 0 }]).is_ok());
        };
        let other = thread::spawn(move || post(second, 2));
        post(ring, 1);
        other.join().unwrap();
        let mut sges = [Sge::default(); 1];
        let taken = [card.take(&mut sges), card.take(&mut sges)].map(|taken| taken.unwrap().wr_id);
        assert!(taken == [1, 2] || taken == [2, 1]);
    });
}

#[test]
fn recv_ring_never_starves_a_card_silently() {
    loom::model(|| {
        let ring = recv_ring(1);
        // SAFETY: the card is one thread.
        let card = unsafe { ring.card_rq() };
        let program = thread::spawn(move || {
            assert!(ring.recv_producer().push(5, &[Sge { addr: 5, len: 1, lkey: 0 }]).is_ok());
            ring.was_starved()
        });
        let mut sges = [Sge::default(); 1];
        let first = card.take(&mut sges);
        let notified = program.join().unwrap();
        assert!(first.is_some() || notified, "the card found nothing, so the poster must ring");
        assert_eq!(first.or_else(|| card.take(&mut sges)), Some(TakenWqe { wr_id: 5, num_sge: 1 }));
        assert_eq!(sges[0].addr, 5);
    });
}

/// A shared receive queue of one slot, posted to by two threads while the card takes: nothing is lost, and a
/// card that finds nothing has somebody ring.
#[test]
fn recv_ring_is_shared_while_the_card_takes() {
    loom::model(|| {
        let ring = Arc::new(recv_ring(1));
        // SAFETY: the card is one thread.
        let card = unsafe { ring.card_rq() };
        let second = ring.clone();
        let post = |ring: &WorkRings, id: u64| {
            while ring.recv_producer().push(id, &[Sge { addr: id, len: 1, lkey: 0 }]).is_err() {
                thread::yield_now();
            }
            ring.was_starved()
        };
        let other = thread::spawn(move || post(&second, 2));
        let (mut sges, mut seen, mut starved) = ([Sge::default(); 1], 0, false);
        let one = thread::spawn(move || post(&ring, 1));
        while seen != 3 {
            match card.take(&mut sges) {
                Some(TakenWqe { wr_id: id, num_sge }) => {
                    assert_eq!((sges[0].addr, num_sge), (id, 1));
                    assert_eq!(seen & id, 0);
                    seen |= id;
                }
                None => {
                    starved = seen == 0;
                    thread::yield_now();
                }
            }
        }
        let notified = [one.join().unwrap(), other.join().unwrap()];
        assert!(!starved || notified.contains(&true), "the card found nothing, so a poster must ring");
    });
}

/// Two threads poll one queue: each completion comes to one of them, in order for each.
#[test]
fn cq_ring_is_polled_by_two() {
    loom::model(|| {
        let ring = Arc::new(CqRing::new(2, true, None).unwrap());
        let (card, other) = (ring.clone(), ring.clone());
        let maker = thread::spawn(move || {
            for id in 1..=2 {
                // SAFETY: this is the one thread that is the card.
                unsafe { card.push(&Cqe { wr_id: id, ..Cqe::default() }, id) }.unwrap();
            }
        });
        let poll = |ring: &CqRing| {
            let mut consumer = ring.consumer();
            consumer.take().map_or(0, |(cqe, stamp)| {
                assert_eq!(cqe.wr_id, stamp);
                stamp
            })
        };
        let second = thread::spawn(move || poll(&other));
        let first = poll(&ring);
        let mut seen = first + second.join().unwrap();
        maker.join().unwrap();
        while seen < 3 {
            seen += poll(&ring);
        }
        assert_eq!((seen, poll(&ring)), (3, 0));
    });
}

/// The card's lock stands for the card standing still: what is in the ring moves with it.
#[test]
fn cq_ring_is_resized_under_way() {
    loom::model(|| {
        let ring = Arc::new(CqRing::new(1, false, None).unwrap());
        let lock = Arc::new(Mutex::new(()));
        let (card, shard) = (ring.clone(), lock.clone());
        let maker = thread::spawn(move || {
            let mut id = 0;
            while id < 2 {
                let held = shard.lock().unwrap();
                // SAFETY: whoever holds the lock is the card.
                id += u64::from(unsafe { card.push(&Cqe { wr_id: id, ..Cqe::default() }, 0) }.is_ok());
                drop(held);
                thread::yield_now();
            }
        });
        let mut room = ring.room(2).unwrap();
        let mut consumer = ring.consumer();
        let held = lock.lock().unwrap();
        // SAFETY: the lock is held, so nobody is the card; the room is this ring's.
        assert!(unsafe { consumer.resize(&mut room) });
        drop(held);
        drop(consumer);
        maker.join().unwrap();
        let mut consumer = ring.consumer();
        let ids = [(); 2].map(|()| consumer.take().map(|(cqe, _)| cqe.wr_id));
        assert_eq!(ids, [Some(0), Some(1)]);
    });
}

/// A program arms its queue, looks once more, and sleeps: it has seen the completion, or it is notified.
#[test]
fn no_sleeper_is_forgotten() {
    loom::model(|| {
        let ring = Arc::new((CqRing::new(2, false, None).unwrap(), Armed::new()));
        let card = ring.clone();
        let maker = thread::spawn(move || {
            // SAFETY: this is the one thread that is the card.
            unsafe { card.0.push(&Cqe::default(), 0) }.unwrap();
            card.1.wants(false) && card.1.disarm()
        });
        ring.1.arm(false);
        let seen = ring.0.consumer().take().is_some();
        let notified = maker.join().unwrap();
        assert!(seen || notified);
        assert_eq!(ring.1.disarm(), !notified, "an event for each time that the program asked");
    });
}

/// The card's lock as the standard library's mutex is one to `try_lock`: loom's own does not try what happens
/// inside it.
struct TryLock(AtomicBool);

struct Held<'a>(&'a TryLock);

impl TryLock {
    fn try_lock(&self) -> Option<Held<'_>> {
        (!self.0.swap(true, Ordering::Acquire)).then_some(Held(self))
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.0.store(false, Ordering::Release);
    }
}

/// A card, as far as doorbells go: what was posted to each of two queue pairs, and what the card has done.
struct MockCard {
    doorbells: PendingDoorbells,
    lock: TryLock,
    posted: [AtomicU32; 2],
    done: [AtomicU32; 2],
}

impl MockCard {
    fn handle(&self, qpn: usize) {
        self.done[qpn].store(self.posted[qpn].load(Ordering::Acquire), Ordering::Relaxed);
    }

    fn post(&self, qpn: usize) {
        self.posted[qpn].fetch_add(1, Ordering::Release);
        match self.lock.try_lock() {
            Some(_held) => self.handle(qpn),
            None => self.doorbells.leave(qpn as u32),
        }
        let turn = |_held: &mut Held<'_>| self.doorbells.take(|qpn| self.handle(qpn as usize));
        self.doorbells.serve(|| self.lock.try_lock(), turn);
    }
}

/// Two threads post and find the card busy, or not: what each posted is handled when both have gone.
#[test]
fn no_doorbell_is_forgotten() {
    loom::model(|| {
        let zeros = || [(); 2].map(|()| AtomicU32::new(0));
        let lock = TryLock(AtomicBool::new(false));
        let card =
            Arc::new(MockCard { doorbells: PendingDoorbells::new(), lock, posted: zeros(), done: zeros() });
        let second = card.clone();
        let other = thread::spawn(move || second.post(1));
        card.post(0);
        other.join().unwrap();
        for done in &card.done {
            assert_eq!(done.load(Ordering::Relaxed), 1);
        }
    });
}

#[test]
fn cq_ring_hands_over_whole_completions_while_purged() {
    loom::model(|| {
        let ring = Arc::new(CqRing::new(2, false, None).unwrap());
        let card = ring.clone();
        let maker = thread::spawn(move || {
            let mut id = 0;
            while id < 3 {
                let cqe = Cqe { wr_id: id, qpn: (id % 2) as u32, ..Cqe::default() };
                // SAFETY: this is the one thread that is the card.
                match unsafe { card.push(&cqe, 0) } {
                    Ok(()) => id += 1,
                    Err(_) => thread::yield_now(),
                }
            }
        });
        let mut next = 0;
        while next < 3 {
            let mut consumer = ring.consumer();
            consumer.purge(1);
            match consumer.take().map(|(cqe, _)| cqe) {
                Some(cqe) => {
                    assert!(cqe.wr_id >= next && (cqe.qpn == 0 || cqe.wr_id == 1));
                    next = cqe.wr_id + 1;
                }
                None => {
                    drop(consumer);
                    thread::yield_now();
                }
            }
        }
        maker.join().unwrap();
    });
}
