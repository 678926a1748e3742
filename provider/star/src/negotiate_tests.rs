use starverbs_core::rng::Rng;

use super::*;

const PREFERENCES: [Preference; 4] =
    [Preference::Off, Preference::Auto, Preference::Stateless, Preference::Stateful];

fn terms(preference: Preference, stateful: u32) -> Terms {
    Terms { preference, stateful, threshold: THRESHOLD, ports: [4793, 4794], boot: 7 }
}

#[test]
fn both_ends_choose_the_same() {
    for (a, b) in PREFERENCES.iter().flat_map(|a| PREFERENCES.map(|b| (*a, b))) {
        for (m, n) in [(0, 0), (120, 120), (121, 0), (0, 121), (200, 300), (500, 500)] {
            let (mine, theirs) = (terms(a, m), terms(b, n));
            let others = choose(&theirs, &mine, false).map(Role::other);
            assert_eq!(choose(&mine, &theirs, true), others, "{a:?} {b:?} {m} {n}");
        }
    }
    let auto = |m, n| choose(&terms(Preference::Auto, m), &terms(Preference::Auto, n), true);
    assert_eq!(auto(120, 120), None, "the threshold may be reached");
    assert_eq!((auto(121, 3), auto(3, 121)), (Some(Role::Stateless), Some(Role::Stateful)));
    assert_eq!(auto(400, 400), Some(Role::Stateful), "the lower address");
    let stateless = terms(Preference::Stateless, 0);
    assert_eq!(choose(&stateless, &stateless, true), None);
    assert_eq!(choose(&stateless, &terms(Preference::Auto, 0), true), Some(Role::Stateless));
}

fn begin(terms: Terms, now: Nanos) -> Negotiation {
    Negotiation::new(terms, true, now)
}

/// An Offer and an Accept of the boot before come first: what the peer says now counts.
#[test]
fn a_restarted_peer_has_the_boot_it_says_last() {
    let [mine, theirs] = [terms(Preference::Stateful, 0), terms(Preference::Stateless, 0)];
    let at_boot = |boot| begin(Terms { boot, ports: [boot as u16, 9], ..theirs }, 0);
    let accept = |boot| Control::Accept { role: Role::Stateless, boot, ports: [boot as u16, 9] };
    let of_boot = |boot| Some(Outcome::Star { role: Role::Stateful, boot, ports: [boot as u16, 9] });
    let mut end = begin(mine, 0);
    end.handle(&at_boot(5).offer());
    end.handle(&accept(5));
    assert_eq!(end.outcome(), of_boot(5));
    end.handle(&accept(6));
    assert_eq!(end.outcome(), of_boot(6), "an Accept");
    end.handle(&at_boot(7).offer());
    assert_eq!(end.outcome(), of_boot(7), "an Offer");
    end.handle(&Control::Accept { role: Role::Stateful, boot: 8, ports: [8, 9] });
    assert_eq!(end.outcome(), of_boot(7), "the roles are settled");
}

/// Whatever the wire loses, repeats and reorders, and whenever either begins: no end is plain where the other
/// is not, nor are both the same.
#[test]
fn no_wire_makes_the_ends_differ() {
    let (mut stars, mut plains) = (0, 0);
    for seed in 0..4000u64 {
        let mut rng = Rng::new([seed, 1]);
        let preference = |word: u64| PREFERENCES[1 + word as usize % 3];
        let all =
            [terms(preference(rng.word()), 200), terms(preference(rng.word()), rng.word() as u32 % 400)];
        let (loss, late) = (rng.word() % 60, 1 + rng.word() % 8_000_000);
        let starts = [1, 1 + rng.word() % 20_000_000];
        let mut ends: [Option<Negotiation>; 2] = [None, None];
        let mut wire: Vec<(Nanos, usize, Option<Control>)> = Vec::new();
        for tick in 0..200_000u64 {
            let now = tick * 50_000;
            for me in 0..2 {
                if ends[me].is_none() && now >= starts[me] {
                    ends[me] = Some(Negotiation::new(all[me], me == 0, now));
                }
                let Some(end) = &mut ends[me] else { continue };
                let mut out: Vec<Option<Control>> = end.poll(now).map(Some).into_iter().collect();
                if end.outcome() == Some(Outcome::Plain) && rng.word().is_multiple_of(50) {
                    /* a plain request */
                    out.push(None);
                }
                for message in out {
                    wire.push((now + rng.word() % late, 1 - me, message));
                }
            }
            let (due, rest) = wire.into_iter().partition(|(at, ..)| *at <= now);
            wire = rest;
            let due: Vec<_> = due;
            for (_, to, message) in due {
                if rng.word() % 100 < loss {
                    continue;
                }
                let answer = match (&mut ends[to], &message) {
                    (Some(end), Some(message)) => end.handle(message),
                    (Some(end), None) => {
                        end.plain();
                        None
                    }
                    (None, Some(Control::Offer { .. })) => Some(Control::NotYet),
                    (None, _) => None,
                };
                if let Some(answer) = answer {
                    wire.push((now + rng.word() % late, 1 - to, Some(answer)));
                    if rng.word().is_multiple_of(10) {
                        wire.push((now + rng.word() % late, 1 - to, Some(answer)));
                    }
                }
            }
            if ends.iter().all(|end| end.as_ref().is_some_and(|end| end.outcome().is_some())) {
                break;
            }
        }
        let outcome = |end: &Option<Negotiation>| end.as_ref().and_then(Negotiation::outcome);
        match (outcome(&ends[0]), outcome(&ends[1])) {
            (Some(Outcome::Plain), Some(Outcome::Plain)) => plains += 1,
            (Some(Outcome::Star { role: a, boot, ports }), Some(Outcome::Star { role: b, .. })) => {
                assert!(a == b.other() && boot == 7 && ports == [4793, 4794], "seed {seed}");
                assert_eq!(choose(&all[0], &all[1], true), Some(a), "seed {seed}");
                stars += 1;
            }
            other => panic!("seed {seed}: {other:?}"),
        }
    }
    assert!(stars > 500 && plains > 500, "{stars} {plains}");
}

#[test]
fn a_card_without_star_is_plain_after_some_silence_and_one_that_is_not_ready_never() {
    let mut end = begin(terms(Preference::Stateless, 0), 0);
    let mut offers = 0;
    while let Some(at) = end.deadline() {
        offers += u32::from(end.poll(at).is_some());
    }
    assert_eq!((offers, end.outcome(), end.has_answer()), (TRIES, Some(Outcome::Plain), false));
    let mut end = begin(terms(Preference::Stateless, 0), 0);
    end.handle(&Control::NotYet);
    for _ in 0..100 {
        let at = end.deadline().unwrap();
        assert!(end.poll(at).is_some() && end.has_answer());
        end.handle(&Control::NotYet);
    }
    let mut offers = 0;
    while let Some(at) = end.deadline() {
        offers += u32::from(end.poll(at).is_some());
    }
    assert_eq!((offers, end.outcome()), (LAST_TRIES, Some(Outcome::Plain)), "it was there, and is gone");
    assert_eq!(begin(terms(Preference::Off, 0), 0).outcome(), Some(Outcome::Plain));
}

/// The peer may have the Accept, and count on the outcome, while nothing comes from it. An end that gave up
/// after two seconds was plain then, and neither end could send.
#[test]
fn who_has_accepted_asks_for_as_long_as_its_program_bears_silence() {
    const SECONDS: Nanos = 1_000_000_000;
    for (silence, least) in
        [(Some(30 * SECONDS), 30 * SECONDS), (Some(1), 1_700_000_000), (None, 100 * SECONDS)]
    {
        let mut end = begin(terms(Preference::Stateless, 0), 0);
        let offer = Control::Offer { terms: terms(Preference::Stateful, 0), version: VERSION };
        let answer = end.handle(&offer);
        assert!(matches!(answer, Some(Control::Accept { role: Role::Stateless, .. })), "{answer:?}");
        end.set_patience(silence);
        let mut last = 0;
        while let Some(at) = end.deadline().filter(|at| *at < 101 * SECONDS) {
            end.poll(at);
            last = at;
        }
        assert!(last >= least && (silence.is_none() || last < least + 2 * SECONDS), "{silence:?}: {last}");
        assert_eq!(end.outcome(), silence.map(|_| Outcome::Plain));
    }
}

/// A card of another version of the protocol gets Plain, and takes no other word for it: whichever of the two
/// offers first. Its version is remembered, until it says another; of one with which roles are settled, only
/// if it says so in a round.
#[test]
fn cards_of_different_versions_are_plain() {
    let [mine, theirs] = [terms(Preference::Stateful, 0), terms(Preference::Stateless, 0)];
    for version in [0, 1, VERSION - 1, VERSION + 1, u8::MAX] {
        let offer = |version| Control::Offer { terms: theirs, version };
        let mut end = begin(mine, 0);
        assert_eq!(end.handle(&offer(version)), Some(Control::Plain), "{version}");
        assert_eq!(end.outcome(), Some(Outcome::Plain), "{version}");
        assert!(end.is_foreign(), "{version}");
        assert_eq!(end.handle(&offer(VERSION)), Some(Control::Plain), "{version}");
        assert!(!end.is_foreign(), "{version}");
        /* its card of before had this version, and they settled on StaR */
        let mut end = begin(mine, 0);
        end.handle(&Control::Accept { role: Role::Stateless, boot: 6, ports: [4793, 4794] });
        let star = end.outcome();
        assert!(matches!(star, Some(Outcome::Star { .. })) && !end.is_foreign());
        assert_eq!(end.handle(&offer(version)), Some(Control::Plain), "{version}");
        assert!(end.outcome() == star && !end.is_foreign(), "{version}");
        /* the other one hears Plain before it says anything else */
        let mut other = begin(theirs, 0);
        other.handle(&Control::Plain);
        assert_eq!((other.outcome(), other.deadline()), (Some(Outcome::Plain), None));
    }
}

#[test]
fn plain_peers_are_remembered_for_a_while() {
    let mut peers = PlainPeers::default();
    let gid = |n: u32| Gid::from_ipv4(n.to_be_bytes());
    (0..300).for_each(|n| peers.note_plain(0, gid(n), true, 100));
    assert!(
        peers.is_plain(0, &gid(299), 99)
            && !peers.is_plain(0, &gid(299), 100)
            && !peers.is_plain(0, &gid(0), 1)
    );
    assert!(peers.is_plain(0, &gid(298), 1));
    assert!(!peers.is_plain(1, &gid(298), 1), "another program asks it");
    peers.note_star(&gid(298));
    assert!(!peers.is_plain(0, &gid(298), 1) && peers.plain.len() < PLAIN_PEERS);
}

/// Of many connections at once, the messages of one may be lost for long.
#[test]
fn silence_of_a_card_that_speaks_is_loss() {
    let (mut peers, gid) = (PlainPeers::default(), Gid::from_ipv4([10, 0, 0, 1]));
    peers.note_star(&gid);
    peers.note_plain(0, gid, false, 100);
    assert!(peers.has_star(&gid) && !peers.is_plain(0, &gid, 1), "a plain request says nothing of others");
    let offers = [false, true].map(|known| {
        let mut end = begin(terms(Preference::Auto, 0), 0);
        if known {
            end.trust();
        }
        let mut offers = 0;
        while let Some(due) = end.deadline() {
            offers += u32::from(end.poll(due).is_some());
        }
        assert!(end.gave_up() && end.outcome() == Some(Outcome::Plain) && !end.has_answer());
        offers
    });
    assert_eq!(offers, [TRIES, LAST_TRIES]);
    peers.note_plain(0, gid, true, 100);
    assert!(!peers.has_star(&gid) && !peers.is_plain(0, &gid, 1), "it is asked anew");
    peers.note_plain(0, gid, true, 100);
    assert!(peers.is_plain(0, &gid, 1));
}

#[test]
fn a_peer_that_does_not_begin_is_gone_once_requests_have_waited() {
    const SECOND: Nanos = 1_000_000_000;
    let mut end = Beginning::default();
    assert!(
        !end.is_overdue(0, false, Some(1)) && !end.is_overdue(100 * SECOND, false, Some(1)),
        "nobody waits"
    );
    assert!(!end.is_overdue(100 * SECOND, true, Some(3 * SECOND)));
    assert!(!end.is_overdue(103 * SECOND - 1, true, Some(3 * SECOND)));
    assert!(end.is_overdue(103 * SECOND, true, Some(3 * SECOND)));
    assert!(!end.is_overdue(103 * SECOND, true, None), "for ever");
    assert!(end.is_overdue(103 * SECOND, true, Some(1)), "two seconds at least");
    assert!(!end.is_overdue(104 * SECOND, false, Some(1)) && !end.is_overdue(105 * SECOND, true, Some(1)));
}
