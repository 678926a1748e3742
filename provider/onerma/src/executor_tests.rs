use std::collections::VecDeque;
use std::vec::Vec;

use proptest::prelude::*;

use super::*;

fn transfer(len: u64, token: u64) -> Transfer {
    Transfer {
        op: OneRmaOp::Read,
        class: Class::High,
        len,
        remote: Gid::from_ipv4([10, 0, 0, 2]),
        region: RegionId(3),
        offset: 100,
        local: RegionId(4),
        local_offset: 200,
        key: DerivedKey([1; 16]),
        token,
    }
}

fn completion(slot: u16, status: Status) -> Completion {
    Completion { slot, status, op: OneRmaOp::Read, bytes: 0, issue_delay: 0, total_delay: 5_000, sequence: 1 }
}

fn finished(token: u64, status: Status) -> Finished {
    Finished { token, status, issue_delay: 0, total_delay: 5_000 }
}

fn executor(slots: u16) -> Executor {
    Executor::new(CongestionSettings::default(), 2, &[OwnPortal { slots, completions: RegionId(5) }])
}

#[test]
fn a_transfer_is_cut_into_commands_of_four_kilobytes() {
    let mut executor = executor(64);
    executor.submit(transfer(10_000, 7)).unwrap();
    let mut now = 0;
    let mut seen = Vec::new();
    for _ in 0..3 {
        now = now.max(executor.next_time().unwrap());
        let SlotCommand { at: SlotAt { slot, .. }, command } = executor.poll(now).unwrap();
        assert_eq!(command.local_offset, command.offset + 100);
        assert_eq!((command.region, command.completions), (RegionId(3), RegionId(5)));
        seen.push((slot, command.offset - 100, command.size));
    }
    assert_eq!(
        seen.iter().map(|one| (one.1, one.2)).collect::<Vec<_>>(),
        [(0, 4096), (4096, 4096), (8192, 1808)]
    );
    assert_eq!((executor.poll(now + 1_000_000), executor.next_time()), (None, None));
    let ends: Vec<_> =
        seen.iter().map(|one| executor.on_completion(now, 0, &completion(one.0, Status::Ok))).collect();
    assert_eq!(ends, [None, None, Some(finished(7, Status::Ok))]);
    assert_eq!(executor.in_flight(), 0);
}

#[test]
fn several_portals_share_the_transfers() {
    let rooms = [2, 3].map(|slots| OwnPortal { slots, completions: RegionId(10 + u32::from(slots)) });
    let mut executor = Executor::new(CongestionSettings::default(), 2, &rooms);
    executor.submit(transfer(5 * 4096 + 1, 1)).unwrap();
    let (mut now, mut seen) = (0, Vec::new());
    while let Some(next) = executor.next_time() {
        now = now.max(next);
        let SlotCommand { at, command } = executor.poll(now).unwrap();
        let room = rooms[usize::from(at.portal)];
        assert!(at.slot < room.slots && command.completions == room.completions && !seen.contains(&at));
        seen.push(at);
    }
    assert_eq!((seen.len(), executor.in_flight()), (5, 5), "all slots of both");
    assert_eq!(executor.on_completion(now, 2, &completion(0, Status::Ok)), None, "there is no such portal");
    assert_eq!(executor.on_completion(now, 0, &completion(2, Status::Ok)), None, "nor such a slot");
    assert_eq!(executor.on_completion(now, 1, &completion(2, Status::Ok)), None);
    let SlotCommand { at, .. } = executor.poll(now + 10_000).unwrap();
    assert_eq!(at, SlotAt { portal: 1, slot: 2 }, "the one that is free");
    let ends: Vec<_> = seen
        .iter()
        .map(|at| executor.on_completion(now, at.portal, &completion(at.slot, Status::Ok)))
        .collect();
    assert_eq!(ends.last(), Some(&Some(finished(1, Status::Ok))));
    assert_eq!(executor.in_flight(), 0);
}

/// 13 commands are paced over a round trip of 5 us, so each 384 ns; up to 625 ns of lateness are made up for.
#[test]
fn who_polls_late_makes_up_for_it_but_not_for_hours() {
    let mut executor = executor(64);
    executor.submit(transfer(1 << 22, 1)).unwrap();
    let mut issued = |now| std::iter::from_fn(|| executor.poll(now)).count();
    assert_eq!([0, 383, 384, 384 * 2 + 500, 3_600_000_000_000].map(&mut issued), [1, 0, 1, 2, 2]);
}

#[test]
fn what_is_small_takes_its_turn_beside_what_is_large() {
    let mut executor = executor(64);
    executor.submit(transfer(1 << 22, 1)).unwrap();
    executor.poll(0).unwrap();
    executor.submit(transfer(64, 2)).unwrap();
    let mut now = 0;
    let sizes: Vec<u32> = (0..2)
        .map(|_| {
            now = now.max(executor.next_time().unwrap());
            executor.poll(now).unwrap().command.size
        })
        .collect();
    assert!(sizes.contains(&64), "{sizes:?}");
}

#[test]
fn the_smaller_window_limits_what_is_under_way_and_its_pace() {
    let mut executor = executor(64);
    executor.submit(transfer(1 << 22, 1)).unwrap();
    let (mut now, mut issued) = (0, 0);
    while let Some(next) = executor.next_time() {
        now = now.max(next);
        executor.poll(now).unwrap();
        issued += 1;
    }
    assert_eq!(issued, 13);
    assert_eq!(now, 12 * (5_000 / 13));
    executor.on_completion(now, 0, &completion(63, Status::Nack));
    assert_eq!(executor.in_flight(), 13, "a slot without a command says nothing");
}

#[test]
fn congestion_is_tried_again_and_a_wrong_key_is_not() {
    let mut executor = executor(8);
    executor.submit(transfer(64, 1)).unwrap();
    let mut now = 0;
    for _ in 0..2 {
        now = now.max(executor.next_time().unwrap());
        let slot = executor.poll(now).unwrap().at.slot;
        assert_eq!(executor.on_completion(now, 0, &completion(slot, Status::Timeout)), None);
    }
    now = now.max(executor.next_time().unwrap());
    let slot = executor.poll(now).unwrap().at.slot;
    let end = executor.on_completion(now, 0, &completion(slot, Status::Nack));
    assert_eq!(end, Some(finished(1, Status::Nack)));
    executor.submit(transfer(64, 2)).unwrap();
    now = now.max(executor.next_time().unwrap());
    let slot = executor.poll(now).unwrap().at.slot;
    let denied = completion(slot, Status::RemoteAuthenticationFailure);
    let end = executor.on_completion(now, 0, &denied);
    assert_eq!(end, Some(finished(2, Status::RemoteAuthenticationFailure)));
}

#[test]
fn lengths_that_no_transfer_has_are_refused() {
    let mut executor = executor(8);
    let rekey = Transfer { op: OneRmaOp::Rekey, ..transfer(17, 1) };
    for wrong in [transfer(0, 1), transfer(u64::MAX, 1), rekey] {
        assert_eq!(executor.submit(wrong), Err(SubmitError::Length));
    }
}

proptest! {
    /// Whatever completes in whatever order, each transfer ends once, and a good one after all its bytes.
    #[test]
    fn each_transfer_ends_once(
        lens in prop::collection::vec(1..40_000u64, 1..6),
        fates in prop::collection::vec((0..8u8, any::<prop::sample::Index>()), 1..600),
    ) {
        let mut executor = executor(16);
        for (token, len) in lens.iter().enumerate() {
            executor.submit(transfer(*len, token as u64)).unwrap();
        }
        let (mut now, mut under_way, mut ends) = (0, VecDeque::new(), Vec::new());
        let mut bytes = 0;
        let last = fates[0].1;
        let fates = fates.into_iter().chain(std::iter::repeat((0, last)));
        for (fate, pick) in fates.take(5_000) {
            while let Some(next) = executor.next_time() {
                now = now.max(next);
                let Some(SlotCommand { at, command }) = executor.poll(now) else { break };
                let slot = at.slot;
                prop_assert!(under_way.iter().all(|(other, _)| *other != slot));
                under_way.push_back((slot, command.size));
            }
            prop_assert_eq!(under_way.len(), executor.in_flight());
            if under_way.is_empty() { break }
            let (slot, size) = under_way.remove(pick.index(under_way.len())).unwrap();
            let status = Status::from_code(fate).unwrap();
            bytes += if status == Status::Ok { u64::from(size) } else { 0 };
            now += 100;
            ends.extend(executor.on_completion(now, 0, &completion(slot, status)));
        }
        let mut tokens: Vec<u64> = ends.iter().map(|end| end.token).collect();
        tokens.sort_unstable();
        prop_assert_eq!(tokens, (0..lens.len() as u64).collect::<Vec<_>>());
        let succeeded = ends.iter().filter(|end| end.status == Status::Ok);
        let good: u64 = succeeded.map(|end| lens[end.token as usize]).sum();
        prop_assert!(bytes >= good);
        if ends.iter().all(|end| end.status == Status::Ok) {
            prop_assert_eq!(bytes, good);
        }
    }
}
