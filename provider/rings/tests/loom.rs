//! Every interleaving of a program and its card on small rings.
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p starverbs-rings --test loom --release`.
#![cfg(loom)]

use loom::sync::Arc;
use loom::thread;
use starverbs_core::{Cqe, RecvQueue, SendQueue, SendWqe, Sge};
use starverbs_rings::{CqRing, RecvSize, SendSize, WorkRings};

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
                assert_eq!(card.sges(done)[0].addr, u64::from(done));
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
            assert_eq!(card.sges(index)[0].addr, u64::from(index));
        }
        program.join().unwrap();
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
        let taken = [card.take(&mut sges), card.take(&mut sges)].map(|t| t.unwrap().0);
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
            ring.was_hungry()
        });
        let mut sges = [Sge::default(); 1];
        let first = card.take(&mut sges);
        let told = program.join().unwrap();
        assert!(first.is_some() || told, "the card found nothing, so the poster must ring");
        assert_eq!(first.or_else(|| card.take(&mut sges)), Some((5, 1)));
        assert_eq!(sges[0].addr, 5);
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
            match consumer.take().map(|(cqe, _)| *cqe) {
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
