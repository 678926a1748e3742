use std::collections::BTreeSet;
use std::vec::Vec;

use super::loss::TAIL_PROBES;
use super::*;

/// Longer than anything here takes: only order counts.
const NEVER: Nanos = Nanos::MAX / 2;

/// A packet that brings data, and one that gets some.
fn put(wqe: u32) -> InFlight {
    InFlight { wqe, len: 100, ..InFlight::default() }
}
fn get(wqe: u32) -> InFlight {
    InFlight { kind: Kind::Get, ..put(wqe) }
}

/// A packet leaves, for which there is room.
fn push(window: &mut PacketWindow, entry: InFlight, now: Nanos) -> Psn {
    assert!(window.has_room());
    window.push(entry, now)
}

/// The empty window goes on with this PSN.
fn begin_at(window: &mut PacketWindow, psn: Psn) {
    (window.una, window.next) = (psn, psn);
    window.first = [psn; 2];
}

fn filled_window(packets: u32) -> PacketWindow {
    let mut window = PacketWindow::new(packets);
    /* just before the end of numbers */
    begin_at(&mut window, Psn::new(2 * NO_PSN));
    for n in 0..packets {
        push(&mut window, put(n), u64::from(n));
    }
    assert!(!window.has_room());
    window
}

/// One packet before 0.
const NO_PSN: u32 = starverbs_core::QPN_MASK + 1 - COPIES;

/// The `n`th packet behind `first`.
fn nth(first: Psn, n: u32) -> Psn {
    first.plus(n.wrapping_mul(COPIES))
}

#[test]
fn answers_in_any_order_move_the_window_when_the_oldest_comes() {
    let mut window = filled_window(8);
    let first = window.una;
    for n in 1..8 {
        let answered = window.done(nth(first, n)).unwrap();
        assert_eq!((answered.entry.wqe, answered.sent), (n, Some(u64::from(n))));
        assert!(window.done(nth(first, n)).is_none(), "once");
        assert_eq!(window.una, first);
    }
    assert!(window.done(first).is_some() && window.is_empty());
    assert!(window.done(first).is_none() && window.done(nth(first, 8)).is_none());
    assert_eq!((window.flight, window.lost, window.in_flight()), (0, 0, 0));
}

#[test]
fn a_packet_that_three_others_overtook_is_lost_and_only_it_goes_again() {
    let mut window = filled_window(8);
    let first = window.una;
    let each = window.in_flight() / 8;
    window.done(nth(first, 1));
    window.done(nth(first, 2));
    assert_eq!(window.infer(NEVER), 0);
    window.done(nth(first, 3));
    assert_eq!((window.infer(NEVER), window.infer(NEVER)), (each, 0));
    let (psn, entry) = window.next_lost(|_| true).unwrap();
    assert_eq!((psn, entry.wqe, window.is_probing()), (first, 0, false));
    assert!(window.next_lost(|_| false).is_none());
    let again = window.sent_again(psn, 100);
    assert_eq!((again, window.in_flight()), (first.plus(1), 5 * each));
    assert!(window.next_lost(|_| true).is_none());
    /* which of the two came is known: the first proves nothing of what left before the second */
    let mut early = PacketWindow { ring: window.ring.clone(), ..window };
    let late = early.done(first).unwrap();
    assert_eq!((late.sent, late.entry.copies(), early.infer(NEVER)), (None, 1, 0));
    let answered = early.done_again(again).unwrap();
    assert_eq!((answered.wqe, answered.copies()), (0, 0));
    assert!(early.done_again(again).is_none() && early.done_again(first).is_none(), "once each");
    let on_time = window.done(again).unwrap();
    assert_eq!((on_time.sent, on_time.entry.copies()), (Some(100), 1));
    assert_eq!(window.infer(NEVER), 2 * each, "all but the two that left last before it");
    window.forget(|entry| entry.wqe == 5);
    assert_eq!((window.flight, window.lost, window.una), (2, 1, nth(first, 4)));
}

/// What brings data and what gets some leave in segmented sends of their own, and so pass each other: neither
/// shows anything of the other.
#[test]
fn a_packet_that_another_kind_passed_is_not_lost() {
    let mut window = PacketWindow::new(16);
    begin_at(&mut window, Psn::new(2 * NO_PSN));
    let first = window.una;
    for n in 0..8 {
        push(&mut window, put(n), 10);
        push(&mut window, get(n), 10);
    }
    let each = window.in_flight() / 16;
    for n in 0..8 {
        window.done(nth(first, 2 * n + 1)).unwrap();
        assert_eq!(window.infer(0), 0);
    }
    assert_eq!((window.newest_put(), window.una, window.in_flight()), (0, first, 8 * each));
    /* the fourth of its kind: the first is lost, the others are not */
    assert_eq!(window.done(nth(first, 6)).map(|answered| answered.overtaken), Some(0));
    assert_eq!(window.infer(NEVER), each);
    assert_eq!((window.get(first).unwrap().state, window.newest_put()), (PacketState::Lost, 10));
}

/// One kind may have nothing under way while numbers of the other come round.
#[test]
fn a_kind_that_pauses_is_not_left_behind() {
    let mut window = PacketWindow::new(8);
    for n in 0..NO_PSN / COPIES + 2 {
        let psn = push(&mut window, put(n), 0);
        assert!(window.done(psn).is_some() && window.infer(0) == 0);
    }
    let psns: Vec<Psn> = (0..5).map(|n| push(&mut window, get(n), 0)).collect();
    window.done(psns[4]).unwrap();
    assert!(window.infer(NEVER) > 0 && window.get(psns[0]).unwrap().state == PacketState::Lost);
}

/// However many are under way, the silence may be that of a CPU that SL's card had not: a few are asked for,
/// and the answers show what is lost.
#[test]
fn after_a_timeout_two_probes_leave() {
    let mut window = filled_window(8);
    let (first, each) = (window.una, window.in_flight() / 8);
    assert_eq!((window.expire(6, 1000), window.oldest()), (2, Some(1000)));
    assert_eq!(window.expire(999, 1999), 0, "they have their time");
    for n in 0..2 {
        assert!(window.is_probing());
        let (psn, _) = window.next_lost(|_| true).unwrap();
        assert_eq!((psn, window.sent_again(psn, 1000)), (nth(first, n), nth(first, n).plus(1)));
    }
    assert!(!window.is_probing() && window.next_lost(|_| true).is_none());
    let mut slow = PacketWindow { ring: window.ring.clone(), ..window };
    for n in 0..8 {
        slow.done(nth(first, n)).unwrap();
        assert_eq!(slow.infer(500), 0);
    }
    assert!(slow.is_empty(), "nothing was lost");
    window.done(first.plus(1));
    assert_eq!(window.infer(500), 6 * each, "all that left long before what was answered");
    assert_eq!((window.flight, window.lost), (1, 6));
}

/// Packets whose answers would be refused may not go yet; those that they wait for are lost, too.
#[test]
fn who_may_not_go_holds_up_nobody() {
    let mut window = filled_window(8);
    let first = window.una;
    for n in 4..8 {
        window.refuse(nth(first, n));
    }
    assert_eq!(window.expire(0, 1000), 1);
    window.sent_again(first, 1000);
    assert_eq!(window.expire(1000, 2000), 2, "the next two of the four");
    let (psn, _) = window.next_lost(|entry| entry.wqe > 3).unwrap();
    window.sent_again(psn, 2000);
    assert_eq!(window.expire(2000, 3000), 2, "and the others");
    assert!((0..4).all(|n| window.get(nth(first, n)).unwrap().state == PacketState::Lost));
}

#[test]
fn the_number_of_a_transmission_comes_round() {
    let mut window = PacketWindow::new(8);
    let first = push(&mut window, InFlight::default(), 0);
    for n in 1..600 {
        window.expire(Nanos::MAX, 0);
        assert_eq!(window.sent_again(first, n).get(), n as u32 % COPIES);
        assert_eq!((window.most_tries() > 200, window.flight, window.lost), (n >= 200, 1, 0));
    }
    let answered = window.done(first.plus(599 % COPIES)).unwrap();
    assert_eq!((answered.sent, answered.entry.copies()), (None, COPIES), "it may be one of before");
    (0..3).for_each(|n| _ = window.done_again(first.plus(n)));
    push(&mut window, InFlight::default(), 0);
    assert!(window.done_again(first.plus(3)).is_none(), "it was acked");
}

/// Against sets, with anything that can happen in any order.
#[test]
fn it_is_what_plain_sets_are() {
    let mut rng = starverbs_core::rng::Rng::new([7, 7]);
    let mut window = PacketWindow::new(32);
    window.lanes.iter_mut().for_each(|lane| lane.order = REBASE - 1000);
    let (mut flight, mut lost) = (BTreeSet::new(), BTreeSet::new());
    let mut pushed = 0u32;
    for now in 0..200_000 {
        let word = rng.word();
        let number = pushed.wrapping_sub((word >> 32) as u32 % 40);
        let pick = nth(Psn::default(), number);
        match word % 8 {
            0..3 if window.has_room() => {
                let kind = if word & 8 == 0 { Kind::Put } else { Kind::Get };
                let psn = push(&mut window, InFlight { wqe: pushed, kind, ..InFlight::default() }, now);
                assert_eq!(psn, nth(Psn::default(), pushed));
                flight.insert(pushed);
                pushed += 1;
            }
            3..6 => {
                let known = flight.remove(&number) | lost.remove(&number);
                let copy = (word >> 48) as u32 % COPIES;
                assert_eq!(window.done(pick.plus(copy)).map(|e| e.entry.wqe), known.then_some(number));
            }
            6 => {
                let then = now.saturating_sub(60);
                let probed_at = window.probed_at;
                window.expire(then, now);
                let late: Vec<u32> =
                    flight.iter().copied().filter(|n| at(&window, *n).state == PacketState::Lost).collect();
                assert!(late.len() <= TAIL_PROBES as usize && (late.is_empty() || probed_at <= then));
                late.into_iter().for_each(|n| _ = flight.remove(&n) && lost.insert(n));
            }
            7 => {
                let found = window.next_lost(|_| true).map(|(psn, entry)| (psn, entry.wqe));
                assert_eq!(found.map(|(_, n)| n), lost.first().copied());
                if let Some((psn, n)) = found {
                    window.sent_again(psn, now);
                    lost.remove(&n);
                    flight.insert(n);
                }
            }
            _ => {}
        }
        assert_eq!((window.flight, window.lost), (flight.len() as u16, lost.len() as u16));
        assert_eq!(window.in_flight(), flight.len() as u32 * PACKET_OVERHEAD);
        for lane in 0..2 {
            let first = window.each().find(|psn| window.get(*psn).is_some_and(|entry| entry.lane() == lane));
            assert_eq!(window.oldest_of(lane), first.map(super::number));
        }
        assert!(window.span() <= 32 && window.tail_probes <= window.lost.min(TAIL_PROBES));
    }
    assert!(pushed > 10_000);
}

fn at(window: &PacketWindow, number: u32) -> InFlight {
    window.ring[super::number(nth(Psn::default(), number))]
}

/// A window that comes to have more under way has more places, and what it knew of those under way stays.
#[test]
fn there_are_more_places_as_more_is_under_way() {
    let mut window = PacketWindow::new(16);
    begin_at(&mut window, Psn::new(2 * NO_PSN));
    assert_eq!(window.bytes(), 0);
    let first = window.una;
    /* one after the other, for ever: two places will do */
    for n in 0..7 {
        push(&mut window, put(n), n.into());
        assert!(window.done(nth(first, n)).is_some());
    }
    assert_eq!((window.ring.len(), window.is_empty()), (2, true));
    for n in 7..7 + 16 {
        push(&mut window, put(n), n.into());
    }
    assert_eq!((window.ring.len(), window.has_room(), window.in_flight()), (16, false, 16 * put(0).cost()));
    for n in (7..7 + 16).rev() {
        assert_eq!(window.get(nth(first, n)).map(|entry| entry.wqe), Some(n));
        assert_eq!(window.done(nth(first, n)).map(|answered| answered.entry.wqe), Some(n));
        assert!(window.done_again(nth(first, n)).is_none(), "its only transmission has its answer");
    }
    assert!(window.is_empty() && window.in_flight() == 0 && window.flight == 0);
}

/// What SL's card has kept is in flight again as if it left now: its answer does not say when it left.
#[test]
fn what_was_kept_has_no_short_answer() {
    let mut window = PacketWindow::new(4);
    let first = push(&mut window, put(0), 10);
    let kept = push(&mut window, put(1), 11);
    assert!(window.first_once(first).is_some() && window.first_once(kept).is_none());
    assert!(window.keep(kept).is_some());
    let FirstAnswer { sent, overtaken } = window.done_first();
    assert_eq!((sent, overtaken, window.await_kept(20)), (10, 1, true));
    assert!(window.first_once(kept).is_none() && window.get(kept).is_some());
    assert_eq!(window.done(kept).and_then(|answered| answered.sent), None);
    assert!(window.is_empty() && window.in_flight() == 0);
}

/// What did not leave is answered by what comes by itself, which shows no time; what was asked for since is
/// answered by its own answer.
#[test]
fn what_comes_by_itself_shows_no_time() {
    let mut window = PacketWindow::new(512);
    begin_at(&mut window, nth(Psn::new(0), NO_PSN / COPIES - 1));
    let eager = |n: u32| InFlight { of: Of::Remote, offset: n * 100, eager: true, ..get(7) };
    let read = push(&mut window, get(3), 1);
    let first = push(&mut window, eager(0), 2);
    assert!(window.ends_eager());
    (0..100).for_each(|n| _ = push(&mut window, put(n), 3));
    assert!(!window.ends_eager());
    push(&mut window, eager(1), 4);
    assert!(window.awaits(first, 8, 0).is_none() && window.awaits(first, 7, 50).is_none());
    let (psn, entry) = window.awaits(first, 7, 100).expect("behind a hundred others");
    assert_eq!((entry.offset, entry.copies()), (100, 0));
    let answered = window.done(psn).unwrap();
    assert_eq!((answered.sent, answered.overtaken), (None, 0));
    assert!(window.awaits(first, 7, 100).is_none());
    assert_eq!(window.infer(0), 0, "it says nothing of those before it");
    /* one that never left costs nothing if it is lost */
    (0..3).for_each(|n| _ = push(&mut window, get(9 + n), 10));
    let newest = window.next.plus(NO_PSN);
    assert_eq!(window.done(newest).unwrap().sent, Some(10));
    assert_eq!(window.infer(1), get(3).cost(), "of the READ, and not of what did not leave");
    assert_eq!(window.get(read).map(|entry| entry.state), Some(PacketState::Lost));
    let (psn, entry) = window.awaits(first, 7, 0).expect("its data may still come");
    assert_eq!((psn, entry.state), (first, PacketState::Lost));
    let again = window.sent_again(first, 20);
    let answered = window.done(again).unwrap();
    assert_eq!((answered.entry.copies(), answered.sent), (0, Some(20)));
}
