use std::collections::BTreeSet;
use std::vec::Vec;

use super::*;

fn filled_window(packets: u32) -> Window {
    let mut window = Window::new(packets, Psn::new(crate::types::QPN_MASK - 2)).unwrap();
    for n in 0..packets {
        assert!(window.has_room());
        window.push(Entry { wqe: n, ..Entry::default() }, u64::from(n));
    }
    assert!(!window.has_room());
    window
}

#[test]
fn answers_in_any_order_move_the_window_when_the_oldest_comes() {
    let mut window = filled_window(8);
    let first = window.una;
    for n in 1..8 {
        assert_eq!(window.done(first.plus(n)).unwrap().wqe, n);
        assert!(window.done(first.plus(n)).is_none(), "once");
        assert_eq!(window.una, first);
    }
    assert!(window.done(first).is_some() && window.is_empty());
    assert!(window.done(first).is_none() && window.done(first.plus(8)).is_none());
    assert_eq!((window.flight, window.lost), (0, 0));
}

#[test]
fn a_packet_that_three_others_overtook_is_lost_and_only_it_goes_again() {
    let mut window = filled_window(8);
    let first = window.una;
    window.done(first.plus(1));
    window.done(first.plus(2));
    assert_eq!(window.infer(), 0);
    window.done(first.plus(3));
    assert_eq!((window.infer(), window.infer()), (1, 0));
    assert!(window.next_lost(|_| true).is_none(), "as much as may be is in flight");
    window.done(first.plus(4));
    let (psn, entry) = window.next_lost(|_| true).unwrap();
    assert_eq!((psn, entry.wqe, window.limit), (first, 0, 4));
    assert!(window.next_lost(|_| false).is_none());
    window.sent_again(psn, 100);
    assert!(window.next_lost(|_| true).is_none());
    assert!(window.get(first).unwrap().repeated());
    /* what came may be the first of two: it proves nothing of those sent between them */
    window.done(first);
    assert_eq!(window.infer(), 0);
    assert_eq!(window.oldest(), Some(5));
    assert_eq!(window.expire(6), 2);
    assert_eq!((window.flight, window.lost), (1, 2));
    window.forget(|entry| entry.wqe == 5);
    assert_eq!((window.flight, window.lost, window.una), (1, 1, first.plus(6)));
}

/// Against sets, with anything that can happen in any order.
#[test]
fn it_is_what_plain_sets_are() {
    let mut rng = crate::rng::Rng::new([7, 7]);
    let mut window = Window::new(32, Psn::new(0)).unwrap();
    window.order = REBASE - 1000;
    let (mut flight, mut lost) = (BTreeSet::new(), BTreeSet::new());
    let mut pushed = 0u32;
    for now in 0..200_000 {
        let word = rng.next();
        let pick = Psn::new(pushed.wrapping_sub((word >> 32) as u32 % 40));
        match word % 8 {
            0..3 if window.has_room() => {
                let psn = window.push(Entry { wqe: pushed, ..Entry::default() }, now);
                assert_eq!(psn, Psn::new(pushed));
                flight.insert(pushed);
                pushed += 1;
            }
            3..6 => {
                let known = flight.remove(&pick.get()) | lost.remove(&pick.get());
                assert_eq!(window.done(pick).map(|e| e.wqe), known.then_some(pick.get()));
            }
            6 => {
                let then = now.saturating_sub(60);
                let late: Vec<u32> = flight.iter().copied().collect();
                for psn in late {
                    if window.get(Psn::new(psn)).unwrap().sent <= then {
                        flight.remove(&psn);
                        lost.insert(psn);
                    }
                }
                window.expire(then);
            }
            7 => {
                let found = window.next_lost(|_| true).map(|(psn, _)| psn.get());
                let room = (flight.len() as u32) < window.limit;
                assert_eq!(found, lost.first().copied().filter(|_| room));
                if let Some(psn) = found {
                    window.sent_again(Psn::new(psn), now);
                    lost.remove(&psn);
                    flight.insert(psn);
                }
            }
            _ => {}
        }
        assert_eq!((window.flight, window.lost), (flight.len() as u32, lost.len() as u32));
        assert!(window.span() <= 32 && (LEAST..=32).contains(&window.limit));
    }
    assert!(pushed > 10_000);
}
