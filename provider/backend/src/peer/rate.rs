//! What a session carries, beside the datagrams that it replaced; two ends in two threads. Figures for
//! docs/decisions/0017, on a quiet machine:
//!
//! `cargo test --release --package starverbs-backend --lib peer::rate -- --ignored --nocapture`

use std::sync::Barrier;
use std::time::{Duration, Instant};

use super::*;
use crate::handover::SocketHandover;
use crate::inbox::Inbox;
use crate::registry::QpnBlock;

const ROUNDS: usize = 5;
const FOR: Duration = Duration::from_millis(200);
/// Sizes of runs: one short frame, one of a path MTU, as many as fit into a datagram.
const SIZES: [usize; 3] = [64, 4140, 60_000];

/// Messages a second that `read` gets while `write` sends; `read` says how many came.
fn rate(mut write: impl FnMut() -> bool + Send, mut read: impl FnMut() -> usize) -> f64 {
    let (begin, over) = (Barrier::new(2), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            begin.wait();
            while !over.load(Ordering::Relaxed) {
                if !write() {
                    std::thread::yield_now();
                }
            }
        });
        begin.wait();
        let start = Instant::now();
        let mut got = 0;
        while start.elapsed() < FOR {
            got += read();
        }
        let rate = got as f64 / start.elapsed().as_secs_f64();
        over.store(true, Ordering::Relaxed);
        rate
    })
}

fn median(mut measure: impl FnMut() -> f64) -> f64 {
    let mut rounds: Vec<f64> = (0..ROUNDS).map(|_| measure()).collect();
    rounds.sort_by(f64::total_cmp);
    rounds[ROUNDS / 2]
}

fn await_input(fd: RawFd) {
    sockopt::wait(&[fd], libc::POLLIN, Duration::from_millis(1));
}

fn by_datagrams(port: u16, size: usize) -> f64 {
    let block = QpnBlock::claim(port).expect("a free block");
    let (body, mut inbox) = (vec![1; size], Inbox::of_host(4).expect("memory"));
    let mut handover = SocketHandover::new(port);
    let write = || handover.pass(block.number(), &[0; 32], &body) == PassedOn::Yes;
    rate(write, || {
        let got = inbox.fill(block.fd());
        if got == 0 {
            await_input(block.fd());
        }
        got
    })
}

fn by_session(port: u16, size: usize, polled: bool) -> f64 {
    let [a, b] = [7, 8].map(|block| super::tests::peers(port, block));
    let (body, mut room) = (vec![1; size], vec![0; 1 << 16]);
    b.set_polled(polled);
    rate(
        || a.pass(8, &[0; 32], &body) == PassedOn::Yes,
        || {
            if b.next_frames(&mut room).is_some() {
                return 1;
            }
            if !polled {
                b.prepare_to_sleep();
                await_input(b.fd());
            }
            b.look();
            0
        },
    )
}

#[test]
#[ignore = "a benchmark"]
fn of_frames_that_are_handed_on() {
    println!("| runs of | datagrams, a second | session, the reader sleeps | session, it polls |");
    for (size, port) in SIZES.into_iter().zip(65040..) {
        let datagrams = median(|| by_datagrams(port, size));
        let [sleeps, polls] = [false, true].map(|polled| median(|| by_session(port, size, polled)));
        println!("| {size} B | {datagrams:.0} | {sleeps:.0} | {polls:.0} |");
        assert!(datagrams > 0.0 && sleeps > 0.0 && polls > 0.0);
    }
}
