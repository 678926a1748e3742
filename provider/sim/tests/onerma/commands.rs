//! 1RMA: what commands do, and every way in which they end.

use starverbs_onerma::{
    CardConfig, Class, DerivedKey, HASTES, IssueError, OneRmaCommand, OneRmaOp, RegionId, RegionKey, Rights,
    SealCounters, SlotState, Status,
};
use starverbs_sim::onerma::{OneRmaNet, SimSeal, StepReport, Wire};

use super::two::*;

fn two() -> Two {
    Two::new(CardConfig::default(), 1)
}

#[test]
fn a_read_takes_two_hops_and_a_write_four() {
    let mut two = two();
    two.fill(SERVER, 0x11);
    two.net.tape = Some(Vec::new());
    let end = two.run(&two.command(OneRmaOp::Read, 64, 2048));
    assert_eq!((end.status, end.bytes, end.slot, end.op), (Status::Ok, 2048, 0, OneRmaOp::Read));
    assert_eq!(two.bytes(CLIENT, 64, 2048), [0x11; 2048]);
    assert_eq!(two.net.tape.as_ref().map(Vec::len), Some(2));
    assert_eq!(end.issue_delay, 0);
    assert!((4_300..5_000).contains(&end.total_delay), "{end:?}");

    two.fill(CLIENT, 0x22);
    let end = two.run(&two.command(OneRmaOp::Write, 128, 4096));
    assert_eq!((end.status, end.bytes), (Status::Ok, 4096));
    assert_eq!(two.bytes(SERVER, 128, 4096), [0x22; 4096]);
    assert_eq!(two.bytes(SERVER, 0, 128), [0x11; 128]);
    assert_eq!(two.bytes(SERVER, 128 + 4096, 64), [0x11; 64]);
    assert_eq!(two.net.tape.as_ref().map(Vec::len), Some(6));
    assert!((9_000..10_000).contains(&end.total_delay), "two round trips: {end:?}");
    two.check_quiet();
}

#[test]
fn four_kilobytes_take_the_paper_s_round_trip() {
    let mut two = two();
    let end = two.run(&two.command(OneRmaOp::Read, 0, 4096));
    assert!((4_980..5_020).contains(&end.total_delay), "5 us: {end:?}");
}

#[test]
fn answers_of_many_packets_count_bytes_in_any_order() {
    let mut two = Two::new(CardConfig { fragment: 1024, ..CardConfig::default() }, 3);
    two.net.faults.late = 0.5;
    for at in 0..32_u64 {
        two.set(SERVER, at * 4096, &[at as u8; 4096]);
    }
    /* late by up to 20 us: what takes longer than a timeout fails, the rest is right */
    let mut good = 0;
    for at in 0..32 {
        let end = two.run(&two.command(OneRmaOp::Read, at * 4096, 4000));
        if end.status == Status::Ok {
            assert_eq!(two.bytes(CLIENT, at * 4096, 4000), [at as u8; 4000]);
            good += 1;
        } else {
            assert_eq!(end.status, Status::Timeout);
        }
    }
    assert!((5..32).contains(&good), "{good}");
    two.check_quiet();
}

#[test]
fn a_wrong_key_no_region_and_another_process_or_operation_are_the_same_failure() {
    let mut two = two();
    two.fill(SERVER, 0x11);
    two.fill(CLIENT, 0x22);
    let good = two.command(OneRmaOp::Read, 0, 64);
    let here = two.net.hosts[CLIENT].gid;
    for wrong in [
        OneRmaCommand { key: DerivedKey([9; 16]), ..good },
        OneRmaCommand { region: RegionId(9), ..good },
        OneRmaCommand { region: RegionId(0x1_0000), ..good },
        OneRmaCommand { key: SimSeal.key_for(&KEY, here, PID + 1, OneRmaOp::Read), ..good },
        OneRmaCommand { key: two.key(OneRmaOp::Write), ..good },
        OneRmaCommand { key: two.key(OneRmaOp::Read), op: OneRmaOp::Write, ..good },
    ] {
        let end = two.run(&wrong);
        assert_eq!((end.status, end.bytes), (Status::RemoteAuthenticationFailure, 0), "{wrong:?}");
        assert!(end.total_delay < 5_000, "at once");
    }
    assert_eq!(two.bytes(SERVER, 0, 64), [0x11; 64]);
    assert_eq!(two.bytes(CLIENT, 0, 64), [0x22; 64]);
    assert_eq!(two.net.hosts[SERVER].card.counts().auth_failures, 6);
    two.check_quiet();
}

#[test]
fn bounds_and_rights_of_both_ends_hold() {
    let mut two = two();
    let len = two.remote.len;
    for (op, at, size) in
        [(OneRmaOp::Read, len - 63, 64), (OneRmaOp::Write, len, 1), (OneRmaOp::Read, u64::MAX - 3, 64)]
    {
        let command = OneRmaCommand { local_offset: 0, ..two.command(op, at, size) };
        assert_eq!(two.run(&command).status, Status::RemoteAccess);
    }
    let read_only = two.net.hosts[SERVER].region(OWNER, 64, Rights::REMOTE_READ, KEY);
    for (op, size) in [(OneRmaOp::Write, 64), (OneRmaOp::Rekey, 16)] {
        let command = OneRmaCommand { region: read_only.id, ..two.command(op, 0, size) };
        assert_eq!(two.run(&command).status, Status::RemoteAccess);
    }
    let command = OneRmaCommand { region: read_only.id, ..two.command(OneRmaOp::Read, 0, 64) };
    assert_eq!(two.run(&command).status, Status::Ok);

    let other = two.net.hosts[CLIENT].region(PID + 1, 64, LOCAL, KEY);
    let good = two.command(OneRmaOp::Read, 0, 64);
    let card = &mut two.net.hosts[CLIENT].card;
    for (wrong, error) in [
        (OneRmaCommand { local: other.id, ..good }, IssueError::Local),
        (OneRmaCommand { local_offset: two.local.len - 63, ..good }, IssueError::Local),
        (OneRmaCommand { completions: other.id, ..good }, IssueError::Local),
        (OneRmaCommand { local: RegionId(99), ..good }, IssueError::Local),
        (OneRmaCommand { size: 0, ..good }, IssueError::Size),
        (OneRmaCommand { size: 4097, ..good }, IssueError::Size),
    ] {
        assert_eq!(card.issue(0, two.portal.id, 0, &wrong), Err(error), "{wrong:?}");
    }
    assert_eq!(card.issue(0, two.portal.id, 32, &good), Err(IssueError::NoSlot));
    two.check_quiet();
}

#[test]
fn a_slot_goes_through_its_states() {
    let mut two = two();
    let state = |two: &Two| two.net.hosts[CLIENT].card.slot_state(two.portal.id, 0);
    assert_eq!(state(&two), Some(SlotState::Free));
    let command = two.command(OneRmaOp::Write, 0, 4096);
    let (now, id) = (two.net.now(), two.portal.id);
    two.net.hosts[CLIENT].card.issue(now, id, 0, &command).unwrap();
    let mut seen = vec![state(&two)];
    assert_eq!(two.net.hosts[CLIENT].card.issue(now, id, 0, &command), Err(IssueError::Busy));
    two.net.pump(CLIENT);
    loop {
        if seen.last() != Some(&state(&two)) {
            seen.push(state(&two));
        }
        if two.net.step().is_none() {
            break;
        }
    }
    use SlotState::*;
    assert_eq!(seen, [Queued, InService, RemoteReadSeen, Done].map(Some));
}

#[test]
fn what_nobody_answers_times_out_and_gives_the_window_back() {
    let mut two = two();
    two.net.faults.loss = 1.0;
    for op in [OneRmaOp::Read, OneRmaOp::Write] {
        let end = two.run(&two.command(op, 0, 4096));
        assert_eq!((end.status, end.total_delay), (Status::Timeout, 20_000));
    }
    two.check_quiet();
}

#[test]
fn a_command_in_haste_waits_half_as_long() {
    let mut two = two();
    two.net.faults.loss = 1.0;
    for (slot, haste) in [(0, 0), (1, 2), (2, 1), (3, 2)] {
        two.issue(slot, &OneRmaCommand { haste, ..two.command(OneRmaOp::Read, 0, 64) });
    }
    two.net.settle();
    let ends: Vec<_> = std::iter::from_fn(|| two.portal.poll(&two.net.hosts[CLIENT])).collect();
    let waited: Vec<_> = ends.iter().map(|end| (end.slot, end.total_delay / 1000)).collect();
    assert_eq!(waited, [(1, 5), (3, 5), (2, 10), (0, 20)]);
    let hasty = OneRmaCommand { haste: HASTES, ..two.command(OneRmaOp::Read, 0, 64) };
    let (now, id) = (two.net.now(), two.portal.id);
    assert_eq!(two.net.hosts[CLIENT].card.issue(now, id, 0, &hasty), Err(IssueError::Haste));
    two.check_quiet();
}

#[test]
fn a_target_waits_no_longer_than_its_initiator() {
    for haste in 0..2 {
        let mut two = two();
        two.net.hosts[SERVER].card.set_waits(&CardConfig { timeout: 90_000, ..CardConfig::default() });
        two.issue(0, &OneRmaCommand { haste, ..two.command(OneRmaOp::Write, 0, 4096) });
        let state = |two: &Two| two.net.hosts[CLIENT].card.slot_state(two.portal.id, 0);
        while state(&two) != Some(SlotState::RemoteReadSeen) {
            assert!(two.net.step().is_some(), "it is asked for the data");
        }
        let [client, server] = [CLIENT, SERVER].map(|host| two.net.hosts[host].card.next_deadline());
        assert!(server.is_some() && server < client, "{haste}: {server:?} {client:?}");
        two.net.settle();
        assert_eq!(two.portal.poll(&two.net.hosts[CLIENT]).map(|end| end.status), Some(Status::Ok));
        two.check_quiet();
    }
    /* none of the target's times is short enough: nothing could be promised */
    let mut two = two();
    two.net.hosts[SERVER].card.set_waits(&CardConfig { timeout: 1 << 30, ..CardConfig::default() });
    assert_eq!(two.run(&two.command(OneRmaOp::Write, 0, 64)).status, Status::Nack);
    assert_eq!(two.run(&two.command(OneRmaOp::Read, 0, 64)).status, Status::Ok);
}

#[test]
fn what_the_window_does_not_admit_is_shed_after_two_round_trips() {
    let mut two = Two::new(CardConfig { window: 8192, ..CardConfig::default() }, 1);
    two.net.faults.loss = 1.0;
    let small = two.command(OneRmaOp::Read, 0, 64);
    let large = two.command(OneRmaOp::Read, 0, 4096);
    for slot in 0..2 {
        two.issue(slot, &large);
    }
    two.issue(2, &small);
    two.net.settle();
    let ends: Vec<_> = std::iter::from_fn(|| two.portal.poll(&two.net.hosts[CLIENT])).collect();
    let shown: Vec<_> = ends.iter().map(|end| (end.slot, end.status, end.issue_delay)).collect();
    assert_eq!(
        shown,
        [(2, Status::DispatchTimeout, 10_000), (0, Status::Timeout, 0), (1, Status::Timeout, 10)],
        "64 B wait until 4 KB are free"
    );
    two.check_quiet();
}

#[test]
fn too_much_to_do_is_a_nack_that_refunds_at_once() {
    let mut two = Two::new(CardConfig { nack_threshold: 8192, ..CardConfig::default() }, 1);
    for slot in 0..12 {
        two.issue(slot, &two.command(OneRmaOp::Read, u64::from(slot) * 4096, 4096));
    }
    two.net.settle();
    let ends: Vec<_> = std::iter::from_fn(|| two.portal.poll(&two.net.hosts[CLIENT])).collect();
    let count = |status| ends.iter().filter(|end| end.status == status).count();
    assert_eq!(count(Status::Ok) + count(Status::Nack), 12);
    assert!(count(Status::Ok) >= 3 && count(Status::Nack) >= 5, "{ends:?}");
    assert!(ends.iter().filter(|end| end.status == Status::Nack).all(|end| end.total_delay < 6_000));
    assert_eq!(two.net.hosts[SERVER].card.counts().nacks as usize, count(Status::Nack));
    two.check_quiet();
}

#[test]
fn a_write_that_the_target_s_window_does_not_admit_is_refused() {
    let mut two = two();
    /* the server's window is full of what it wants itself, and nobody answers */
    let portal = two.net.hosts[SERVER].portal(OWNER, 32);
    let local = two.net.hosts[SERVER].region(OWNER, 4096, LOCAL, KEY);
    let hole = starverbs_core::Gid::from_ipv4([10, 9, 9, 9]);
    for slot in 0..32 {
        let command = OneRmaCommand {
            remote: hole,
            local: local.id,
            local_offset: 0,
            completions: portal.completions.id,
            ..two.command(OneRmaOp::Read, 0, 4096)
        };
        two.net.hosts[SERVER].card.issue(0, portal.id, slot, &command).unwrap();
    }
    two.net.pump(SERVER);
    let end = two.run(&two.command(OneRmaOp::Write, 0, 4096));
    assert_eq!(end.status, Status::Nack);
    assert!((12_000..16_000).contains(&end.total_delay), "its dispatch timeout: {end:?}");
    two.check_quiet();
}

#[test]
fn the_high_class_goes_first_and_the_low_one_is_not_starved() {
    let mut two = Two::new(CardConfig { window: 4096, ..CardConfig::default() }, 1);
    let high = two.command(OneRmaOp::Read, 0, 4096);
    let low = OneRmaCommand { class: Class::Low, ..high };
    two.net.hosts[CLIENT]
        .card
        .set_waits(&CardConfig { dispatch_timeout: 1_000_000, ..CardConfig::default() });
    (0..4).for_each(|slot| two.issue(slot, &low));
    (4..24).for_each(|slot| two.issue(slot, &high));
    two.net.settle();
    let slots: Vec<_> =
        std::iter::from_fn(|| two.portal.poll(&two.net.hosts[CLIENT])).map(|end| end.slot).collect();
    let place = |slot: u16| slots.iter().position(|one| *one == slot).unwrap();
    assert_eq!(place(0), 0, "it was in service before the others came");
    assert_eq!((place(1), place(2)), (8, 16), "one of eight");
    assert!(slots.iter().take(8).skip(1).all(|slot| *slot >= 4));
}

#[test]
fn rekey_by_operation_by_the_owner_and_by_a_third_party() {
    let mut two = two();
    let read = two.command(OneRmaOp::Read, 0, 64);
    let next = RegionKey(*b"the key after it");
    two.set(CLIENT, 0, &next.0);
    assert_eq!(two.run(&two.command(OneRmaOp::Rekey, 0, 16)).status, Status::Ok);
    assert_eq!(two.run(&read).status, Status::RemoteAuthenticationFailure);
    let here = two.net.hosts[CLIENT].gid;
    let with = |key: &RegionKey, op| SimSeal.key_for(key, here, PID, op);
    assert_eq!(two.run(&OneRmaCommand { key: with(&next, OneRmaOp::Read), ..read }).status, Status::Ok);
    let owner = RegionKey(*b"the owner's one.");
    two.net.hosts[SERVER].card.rekey_region(two.remote.id, owner).unwrap();
    assert_eq!(
        two.run(&OneRmaCommand { key: with(&next, OneRmaOp::Read), ..read }).status,
        Status::RemoteAuthenticationFailure
    );
    assert_eq!(two.run(&OneRmaCommand { key: with(&owner, OneRmaOp::Read), ..read }).status, Status::Ok);
    let rekey = two.command(OneRmaOp::Rekey, 0, 16);
    assert_eq!(two.run(&rekey).status, Status::RemoteAuthenticationFailure, "with the first key");
    assert_eq!(
        two.run(&OneRmaCommand { key: with(&owner, OneRmaOp::Read), ..rekey }).status,
        Status::RemoteAuthenticationFailure,
        "with a key for READs"
    );
    assert_eq!(two.net.hosts[SERVER].card.counts().rekeys, 1);
    two.check_quiet();
}

/// Section 7.3: a client that has the next key is without the region for one round trip.
#[test]
fn a_rekey_is_an_outage_of_one_round_trip() {
    let mut two = two();
    let next = RegionKey([9; 16]);
    let here = two.net.hosts[CLIENT].gid;
    let keys = [KEY, next].map(|key| SimSeal.key_for(&key, here, PID, OneRmaOp::Read));
    let (mut current, mut free): (usize, Vec<u16>) = (0, (0..32).collect());
    /* the last end under the old key, the first one under the next, and failures */
    let (mut last, mut first, mut failures) = (0, None, 0);
    two.net.wake_at(0, 0);
    two.net.wake_at(50_000, 1);
    while two.net.now() < 100_000 {
        match two.net.step().expect("there is a probe to come") {
            StepReport::Woke(0) => {
                if let Some(slot) = free.pop() {
                    two.issue(
                        slot,
                        &OneRmaCommand { key: keys[current], ..two.command(OneRmaOp::Read, 0, 64) },
                    );
                }
                let next = two.net.now() + 200;
                two.net.wake_at(next, 0);
            }
            StepReport::Woke(_) => two.net.hosts[SERVER].card.rekey_region(two.remote.id, next).unwrap(),
            StepReport::Completed(CLIENT) => {
                while let Some(end) = two.portal.poll(&two.net.hosts[CLIENT]) {
                    free.push(end.slot);
                    match end.status {
                        Status::Ok if current == 0 => last = two.net.now(),
                        Status::Ok => _ = first.get_or_insert(two.net.now()),
                        status => {
                            assert_eq!(status, Status::RemoteAuthenticationFailure);
                            (current, failures) = (1, failures + 1);
                        }
                    }
                }
            }
            _ => {}
        }
    }
    let outage = first.expect("the next key works") - last;
    assert!((4_000..5_000).contains(&outage), "{outage}");
    assert!((15..30).contains(&failures), "what was under way, and nothing later: {failures}");
}

#[test]
fn what_was_begun_under_the_old_key_does_not_land_after_a_rekey() {
    let mut two = two();
    two.fill(SERVER, 0x11);
    two.fill(CLIENT, 0x22);
    let command = two.command(OneRmaOp::Write, 0, 4096);
    two.issue(0, &command);
    while two.net.hosts[SERVER].card.solicited() == 0 {
        two.net.step().expect("the request arrives");
    }
    two.net.hosts[SERVER].card.rekey_region(two.remote.id, RegionKey([3; 16])).unwrap();
    two.net.settle();
    let end = two.portal.poll(&two.net.hosts[CLIENT]).unwrap();
    assert_eq!(end.status, Status::RemoteAuthenticationFailure);
    assert_eq!(two.bytes(SERVER, 0, 4096), [0x11; 4096]);
    two.check_quiet();
}

#[test]
fn a_region_that_closes_ends_what_is_under_way() {
    for (op, after) in [(OneRmaOp::Read, 1), (OneRmaOp::Write, 1), (OneRmaOp::Write, 3)] {
        let mut two = two();
        two.fill(SERVER, 0x11);
        two.fill(CLIENT, 0x22);
        let command = two.command(op, 0, 4096);
        two.issue(0, &command);
        (0..after).for_each(|_| _ = two.net.step());
        two.net.hosts[SERVER].card.close_region(two.remote.id).unwrap();
        two.net.settle();
        let end = two.portal.poll(&two.net.hosts[CLIENT]).unwrap();
        assert_eq!(end.status, Status::RemoteAuthenticationFailure, "{op:?} {after}");
        assert_eq!(two.bytes(SERVER, 0, 4096), [0x11; 4096]);
        two.check_quiet();
    }
}

#[test]
fn local_memory_that_closes_or_goes_ends_the_command() {
    for op in [OneRmaOp::Read, OneRmaOp::Write] {
        let mut two = two();
        let command = two.command(op, 0, 4096);
        two.issue(0, &command);
        two.net.hosts[CLIENT].card.close_region(two.local.id).unwrap();
        two.net.settle();
        let end = two.portal.poll(&two.net.hosts[CLIENT]).unwrap();
        assert_eq!(end.status, Status::LocalAccess);
        two.check_quiet();
    }
    for op in [OneRmaOp::Read, OneRmaOp::Write] {
        let mut two = two();
        two.net.hosts[SERVER].env.absent = true;
        assert_eq!(two.run(&two.command(op, 0, 4096)).status, Status::RemoteAccess);
        two.check_quiet();
    }
}

#[test]
fn counters_run_out_cleanly() {
    let mut two = two();
    let all = |two: &mut Two, left: u64| {
        two.net.hosts[CLIENT].card.renew_counters(SealCounters::of_range(0..left));
        two.net.hosts[SERVER].card.renew_counters(SealCounters::of_range(0..1000));
    };
    all(&mut two, 1);
    assert_eq!(two.run(&two.command(OneRmaOp::Read, 0, 64)).status, Status::Ok);
    assert_eq!(two.net.hosts[CLIENT].card.counters_left(), 0);
    assert_eq!(two.run(&two.command(OneRmaOp::Read, 0, 64)).status, Status::Exhausted);
    all(&mut two, 1);
    let write = two.command(OneRmaOp::Write, 0, 64);
    assert_eq!(two.run(&write).status, Status::Timeout, "the data cannot be sent");
    two.net.hosts[SERVER].card.renew_counters(SealCounters::of_range(0..0));
    two.net.hosts[CLIENT].card.renew_counters(SealCounters::of_epoch(7));
    assert_eq!(two.run(&write).status, Status::Timeout, "the target cannot ask");
    two.net.hosts[SERVER].card.renew_counters(SealCounters::of_epoch(8));
    assert_eq!(two.run(&write).status, Status::Ok);
    two.check_quiet();
}

#[test]
fn portals_are_quotas_and_end_with_their_process() {
    let mut two = two();
    let other = two.net.hosts[CLIENT].portal(9, 100);
    let host = &mut two.net.hosts[CLIENT];
    assert!(host.card.open_portal(10, 200).is_err(), "256 slots");
    let command = two.command(OneRmaOp::Read, 0, 64);
    two.issue(0, &command);
    let host = &mut two.net.hosts[CLIENT];
    host.card.close_portal(two.portal.id).unwrap();
    assert!(host.card.close_portal(two.portal.id).is_err());
    assert_eq!(host.card.issue(0, two.portal.id, 0, &command), Err(IssueError::NoSlot));
    assert_eq!(host.card.slot_state(other.id, 99), Some(SlotState::Free));
    two.net.settle();
    assert_eq!(two.net.hosts[CLIENT].card.counts().late, 1, "the answer to it");
    assert!(two.net.hosts[CLIENT].card.open_portal(10, 32).is_ok());
    two.check_quiet();
}

#[test]
fn cards_of_any_size_are_made_and_serve() {
    for config in [
        CardConfig { slots: 0, portals: 0, regions: 0, transfers: 0, inbound: 0, ..CardConfig::default() },
        CardConfig { slots: u16::MAX, portals: 1, transfers: u16::MAX, window: 0, ..CardConfig::default() },
    ] {
        let mut net = OneRmaNet::new(1, config, Wire::paper(), 1);
        let opened = net.hosts[0].card.open_portal(1, 1);
        assert_eq!(opened.is_ok(), config.slots > 0);
    }
    let tiny = CardConfig {
        window: 1,
        fragment: 1,
        nack_threshold: 0,
        transfers: 1,
        inbound: 1,
        ..CardConfig::default()
    };
    let mut two = Two::new(tiny, 1);
    for op in [OneRmaOp::Read, OneRmaOp::Write] {
        assert_eq!(two.run(&two.command(op, 0, 4096)).status, Status::Ok);
    }
    two.check_quiet();
}
