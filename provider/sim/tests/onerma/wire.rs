//! 1RMA on a wire that does what it likes, and with somebody on the path.

use std::collections::HashMap;

use starverbs_onerma::{CardConfig, Completion, OneRmaOp, RegionKey, Status};
use starverbs_sim::Rng;
use starverbs_sim::onerma::{OneRmaFaults, SentPacket, StepReport};

use super::two::*;

/// What each of 32 places of 4 KB of both hosts is used for.
struct Place {
    op: OneRmaOp,
    size: u32,
    byte: u8,
}

/// Runs commands on a hostile wire; each slot has its place. What is OK is right; what failed leaves at most
/// its own bytes, and none after its completion.
fn hostile(seed: u64, faults: OneRmaFaults, config: CardConfig) -> [usize; 2] {
    let mut rng = Rng::new(seed);
    let mut two = Two::new(config, seed);
    two.net.faults = faults;
    let mut places: HashMap<u16, Place> = HashMap::new();
    /* what the server had when a WRITE failed */
    let mut left: HashMap<u16, Vec<u8>> = HashMap::new();
    let (mut issued, mut counts) = (0, [0; 2]);
    loop {
        let free: Vec<u16> = (0..32).filter(|slot| !places.contains_key(slot)).collect();
        if issued < 200 && !free.is_empty() && rng.chance(0.3) {
            let slot = rng.pick(&free);
            let (op, byte) = (rng.pick(&[OneRmaOp::Read, OneRmaOp::Write]), rng.bits() as u8);
            let size = rng.pick(&[1, 63, 64, 65, 1000, 4095, 4096]);
            let at = u64::from(slot) * 4096;
            if let Some(before) = left.remove(&slot) {
                assert_eq!(two.bytes(SERVER, at, 4096), before, "nothing lands after a completion");
            }
            two.set(if op == OneRmaOp::Read { SERVER } else { CLIENT }, at, &[byte; 4096]);
            two.set(if op == OneRmaOp::Read { CLIENT } else { SERVER }, at, &[!byte; 4096]);
            places.insert(slot, Place { op, size, byte });
            two.issue(slot, &two.command(op, at, size));
            issued += 1;
        }
        let step = two.net.step();
        if step == Some(StepReport::Completed(CLIENT)) {
            while let Some(end) = two.portal.poll(&two.net.hosts[CLIENT]) {
                let place = places.remove(&end.slot).expect("each command completes once");
                check_end(&two, &end, &place);
                counts[usize::from(end.status != Status::Ok)] += 1;
                left.insert(end.slot, two.bytes(SERVER, u64::from(end.slot) * 4096, 4096).to_vec());
            }
        }
        if step.is_none() && issued == 200 {
            break;
        }
    }
    assert!(places.is_empty());
    for (slot, before) in left {
        assert_eq!(two.bytes(SERVER, u64::from(slot) * 4096, 4096), before);
    }
    two.check_quiet();
    counts
}

fn check_end(two: &Two, end: &Completion, place: &Place) {
    let at = u64::from(end.slot) * 4096;
    let sink = if place.op == OneRmaOp::Read { CLIENT } else { SERVER };
    let (front, back) = two.bytes(sink, at, 4096).split_at(place.size as usize);
    assert!(back.iter().all(|byte| *byte == !place.byte), "no byte beside it");
    if end.status == Status::Ok {
        assert!(front.iter().all(|byte| *byte == place.byte), "all of it");
    } else {
        assert!(front.iter().all(|byte| [place.byte, !place.byte].contains(byte)));
    }
    assert!(end.total_delay < 50_000, "section 3: completions within 50 us, {end:?}");
}

#[test]
fn what_completes_is_right_on_any_wire() {
    let mut all = [0; 2];
    for seed in 0..60 {
        let mut rng = Rng::new(seed);
        let chance = |rng: &mut Rng| rng.pick(&[0.0, 0.02, 0.2]);
        let faults = OneRmaFaults {
            loss: chance(&mut rng),
            repeat: chance(&mut rng),
            late: chance(&mut rng),
            change: chance(&mut rng),
        };
        let config = CardConfig {
            fragment: rng.pick(&[256, 1024, 4096]),
            window: rng.pick(&[4096, 16384, 98304]),
            nack_threshold: rng.pick(&[4096, 16384, 65536]),
            transfers: rng.pick(&[1, 4, 64]),
            ..CardConfig::default()
        };
        println!("seed {seed}: {faults:?} {config:?}");
        let counts = hostile(seed, faults, config);
        all.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    assert!(all.iter().all(|count| *count > 1000), "both outcomes are common: {all:?}");
}

/// Everything that was ever sent is sent again, at both cards.
fn replay(two: &mut Two) {
    let tape: Vec<SentPacket> = two.net.tape.take().expect("a tape");
    for packet in &tape {
        two.net.inject(packet.clone());
        two.net.settle();
    }
    for packet in tape.into_iter().rev() {
        two.net.inject(packet);
    }
    two.net.settle();
}

#[test]
fn who_replays_all_packets_changes_no_memory() {
    let mut two = Two::new(CardConfig { fragment: 1024, ..CardConfig::default() }, 1);
    two.net.tape = Some(Vec::new());
    two.fill(CLIENT, 0x22);
    for op in [OneRmaOp::Write, OneRmaOp::Read] {
        assert_eq!(two.run(&two.command(op, 0, 4096)).status, Status::Ok);
    }
    two.set(CLIENT, 0, &[7; 16]);
    assert_eq!(two.run(&two.command(OneRmaOp::Rekey, 0, 16)).status, Status::Ok);
    two.net.hosts[SERVER].card.rekey_region(two.remote.id, KEY).unwrap();
    two.fill(CLIENT, 0x33);
    two.fill(SERVER, 0x44);
    replay(&mut two);
    assert_eq!(two.bytes(SERVER, 0, 4096), [0x44; 4096]);
    assert_eq!(two.bytes(CLIENT, 0, 4096), [0x33; 4096]);
    assert_eq!(two.net.hosts[SERVER].card.counts().rekeys, 1);
    assert_eq!(
        two.run(&two.command(OneRmaOp::Read, 0, 64)).status,
        Status::Ok,
        "the key is still the owner's"
    );
    two.check_quiet();
}

#[test]
fn a_card_that_starts_again_takes_nothing_from_before() {
    for restarted in [CLIENT, SERVER] {
        let mut two = Two::new(CardConfig::default(), 1);
        two.net.tape = Some(Vec::new());
        two.fill(CLIENT, 0x22);
        for op in [OneRmaOp::Write, OneRmaOp::Read] {
            assert_eq!(two.run(&two.command(op, 0, 4096)).status, Status::Ok);
        }
        let ivs = |tape: &[SentPacket]| tape.iter().map(|one| one.bytes[4..16].to_vec()).collect::<Vec<_>>();
        let before = ivs(two.net.tape.as_ref().unwrap());
        two.net.hosts[restarted].restart();
        if restarted == CLIENT {
            two.portal = two.net.hosts[CLIENT].portal(PID, 32);
            two.local = two.net.hosts[CLIENT].region(PID, 1 << 17, LOCAL, RegionKey([1; 16]));
        } else {
            two.remote = two.net.hosts[SERVER].region(OWNER, 1 << 17, REMOTE, KEY);
        }
        two.fill(CLIENT, 0x33);
        two.fill(SERVER, 0x44);
        let tape = two.net.tape.take();
        two.net.tape = tape.clone();
        replay(&mut two);
        assert_eq!(two.bytes(SERVER, 0, 4096), [0x44; 4096]);
        assert_eq!(two.bytes(CLIENT, 0, 4096), [0x33; 4096]);
        two.net.tape = Some(Vec::new());
        for op in [OneRmaOp::Write, OneRmaOp::Read] {
            assert_eq!(two.run(&two.command(op, 0, 4096)).status, Status::Ok);
        }
        let after = ivs(two.net.tape.as_ref().unwrap());
        assert!(after.iter().all(|iv| !before.contains(iv)), "no number twice");
        two.check_quiet();
    }
}

#[test]
fn a_request_serves_at_no_other_target() {
    let mut two = Two::new(CardConfig::default(), 1);
    two.net.tape = Some(Vec::new());
    two.run(&two.command(OneRmaOp::Read, 0, 64));
    let mut request = two.net.tape.take().unwrap().swap_remove(0);
    /* the client's own card has a region of the same name and key */
    let own = two.net.hosts[CLIENT].gid;
    two.net.hosts[CLIENT].card.rekey_region(two.remote.id, KEY).unwrap();
    request.path.remote = own;
    request.path.local = own;
    two.net.inject(request);
    two.net.settle();
    assert_eq!(two.net.hosts[CLIENT].card.counts().auth_failures, 1);
}

#[test]
fn every_changed_bit_of_every_packet_is_seen() {
    let mut two = Two::new(CardConfig::default(), 1);
    two.net.tape = Some(Vec::new());
    two.run(&two.command(OneRmaOp::Write, 0, 16));
    let packets = two.net.tape.take().unwrap();
    assert_eq!(packets.len(), 4);
    let bits = packets.iter().map(|packet| packet.bytes.len() * 8).max().unwrap();
    for (hop, whole) in packets.iter().enumerate() {
        for bit in (0..bits).filter(|bit| *bit < whole.bytes.len() * 8) {
            let mut two = Two::new(CardConfig::default(), 1);
            two.fill(SERVER, 0x11);
            let command = two.command(OneRmaOp::Write, 0, 16);
            two.net.hold(hop as u64);
            two.issue(0, &command);
            /* the packet of this hop comes changed, and never as it was */
            let mut packet = whole.clone();
            packet.bytes[bit / 8] ^= 1 << (bit % 8);
            two.net.settle_until_held();
            two.net.inject(packet);
            two.net.settle();
            let end = two.portal.poll(&two.net.hosts[CLIENT]).unwrap();
            assert_ne!(end.status, Status::Ok, "hop {hop}, bit {bit}");
            if hop < 3 {
                assert_eq!(two.bytes(SERVER, 0, 64), [0x11; 64], "hop {hop}, bit {bit}");
            }
        }
    }
}
