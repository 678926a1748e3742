//! Cards that settle anew what the ends of their connections are: whom they ask and how often, whom they
//! believe, and what they do when nothing comes of it.

use std::cell::Cell;
use std::rc::Rc;

use crate::common::roles::{SECOND, STAR, THRESHOLD, World};
use starverbs_core::qp::RecvSource;
use starverbs_core::wire::code::NEGOTIATE;
use starverbs_core::{QpType, WcStatus};
use starverbs_sim::{Setup, SimCq, SimRq, SimSq};
use starverbs_star::control::{Control, Preference, Role, Terms};
use starverbs_star::form::VERSION;
use starverbs_star::negotiate::Outcome;
use starverbs_star::round::QuiescePoint;

/// All messages of a round that settles that host 0 keeps the state.
fn burst(round: u16) -> [Control; 3] {
    let (boot, ports, preference) = (9, [4793, 4794], Preference::Auto);
    let terms = Terms { preference, stateful: 200, threshold: THRESHOLD, boot, ports };
    let (role, point) = (Role::Stateless, Some(QuiescePoint::default()));
    [
        Control::Change { round, version: VERSION, star: false, terms },
        Control::Quiescing { round, role, boot, ports, point },
        Control::Settled { round, star: true },
    ]
}

/// Two ends ask at the same times, as their peers are not ready, behind a port of one frame: neither finds it
/// full each time, and takes its peer for silent.
#[test]
fn who_finds_the_port_full_asks_when_it_has_room() {
    let mut w = World::new([Some(THRESHOLD); 2]);
    w.net.hosts[0].env.port = 1;
    let (cq, setup) = (SimCq::new(8), Setup::default());
    let mut pair = || {
        [(0, Preference::Stateless), (1, Preference::Stateful)].map(|(at, preference)| {
            let (now, host) = (w.net.now(), &mut w.net.hosts[at]);
            let rq = RecvSource::Own(SimRq::new(8, 1));
            let qpn = host.qp(QpType::Rc, &SimSq::new(8), rq, [&cq, &cq], true);
            host.preference(qpn, preference);
            host.to_init(qpn, false, &setup, now);
            qpn
        })
    };
    let pairs = [pair(), pair()];
    for at in 0..2 {
        for qpns in pairs {
            let (now, dgid) = (w.net.now(), w.net.hosts[1 - at].gid);
            w.net.hosts[at].to_rts(qpns[at], QpType::Rc, dgid, qpns[1 - at], &setup, now);
        }
        w.net.run_for(3 * SECOND);
    }
    for qpns in pairs {
        let outcome = |at: usize| w.net.hosts[at].star.as_ref()?.roles.outcome(qpns[at]);
        let role = |at| match outcome(at)? {
            Outcome::Star { role, .. } => Some(role),
            Outcome::Plain => None,
        };
        assert_eq!([0, 1].map(role), STAR);
    }
}

#[test]
fn who_was_refused_does_not_keep_his_peer_from_asking() {
    let mut w = World::new([Some(12), Some(THRESHOLD)]);
    let conn = w.connect();
    (0..4).for_each(|_| w.crowd(0));
    (0..2).for_each(|_| w.crowd(1));
    /* host 1 asks without success: it has fewer connections, and host 0 not too many */
    w.net.run_for(20 * SECOND);
    assert_eq!([0, 1].map(|at| w.outcome(&conn, at)), [Some(Outcome::Plain); 2]);
    (0..3).for_each(|_| w.crowd(0));
    w.net.run_for(SECOND / 2);
    assert_eq!([0, 1].map(|at| w.role(&conn, at)), [Some(Role::Stateless), Some(Role::Stateful)]);
    assert_eq!(w.write(&conn, 0), Some(WcStatus::Success));
}

#[test]
fn two_cards_that_are_both_crowded_agree() {
    let mut w = World::new([Some(THRESHOLD); 2]);
    let conn = w.connect();
    /* at once, and the one with more may be asked first, or ask first */
    (0..4).for_each(|_| w.crowd(0));
    (0..2).for_each(|_| w.crowd(1));
    w.net.run_for(SECOND / 2);
    assert_eq!([0, 1].map(|at| w.role(&conn, at)), [Some(Role::Stateless), Some(Role::Stateful)]);
    assert_eq!([w.write(&conn, 0), w.write(&conn, 1)], [Some(WcStatus::Success); 2]);
}

#[test]
fn what_somebody_else_has_settled_the_peer_takes_back() {
    let mut w = World::new([Some(THRESHOLD); 2]);
    let conn = w.connect();
    w.forge(&conn, &burst(1));
    w.net.run_for(SECOND / 20);
    assert_eq!([0, 1].map(|at| w.outcome(&conn, at)), [Some(Outcome::Plain); 2]);
    assert!(!w.net.hosts[0].nic.is_held(conn.qpns[0]));
    /* nor again at once */
    w.forge(&conn, &burst(2)[..1]);
    w.net.transmit();
    w.forge(&conn, &burst(2)[1..]);
    w.net.transmit();
    assert!(!w.net.hosts[0].nic.is_held(conn.qpns[0]));
    assert_eq!([w.write(&conn, 0), w.write(&conn, 1)], [Some(WcStatus::Success); 2]);
}

/// Messages of a round of before the queue pairs were reset come late: the first round of the new
/// incarnation, which has the same number, is not settled by them.
#[test]
fn messages_to_an_incarnation_before_settle_no_round() {
    for before in [0, 1] {
        let mut w = World::new([Some(100); 2]);
        let conn = w.connect();
        w.net.cut(0, 1, SECOND / 20);
        w.want(&conn, 0, Preference::Stateful);
        w.net.transmit();
        let [to, from] = [0, 1].map(|at| w.incarnation(&conn, at));
        w.forge_between(&conn, [from, to.wrapping_sub(before)], &burst(1)[1..]);
        w.net.run_for(SECOND / 100);
        assert_eq!(w.role(&conn, 0), (before == 0).then_some(Role::Stateful), "{before}");
        if before == 0 {
            /* it is settled, though its peer knows nothing: what it waits for nobody needs */
            continue;
        }
        w.net.run_for(10 * SECOND);
        assert_eq!(w.roles(&conn), [Some(Role::Stateful), Some(Role::Stateless)]);
        assert_eq!([w.write(&conn, 0), w.write(&conn, 1)], [Some(WcStatus::Success); 2]);
    }
}

/// An end knows another incarnation of its peer than there is: it learns from the answer, and asks again.
#[test]
fn who_asks_an_incarnation_before_learns_of_the_new_one() {
    let mut w = World::new([Some(100); 2]);
    let conn = w.connect();
    w.want(&conn, 0, Preference::Stateful);
    w.net.transmit();
    let [to, from] = [0, 1].map(|at| w.incarnation(&conn, at));
    /* what its peer was has agreed */
    w.forge_between(&conn, [from.wrapping_sub(1), to], &burst(1)[1..2]);
    w.net.run_for(10 * SECOND);
    assert_eq!(w.roles(&conn), [Some(Role::Stateful), Some(Role::Stateless)]);
    assert_eq!([w.write(&conn, 0), w.write(&conn, 1)], [Some(WcStatus::Success); 2]);
}

/// The cards have different versions of the protocol. Whether an end has heard its peer's version when they
/// settled, or hears it when it is asked: a connection that runs stays plain, and is never quiesced.
#[test]
fn cards_of_different_versions_never_become_star_s() {
    for heard in [true, false] {
        let mut w = World::new([Some(THRESHOLD); 2]);
        let other = |w: &mut World| {
            (0..2).for_each(|at| w.net.hosts[at].env.star.peers_version = Some(VERSION + 1 + at as u8));
        };
        if heard {
            other(&mut w);
        }
        let conn = w.connect();
        other(&mut w);
        let asked = Rc::new(Cell::new(0));
        let count = Rc::clone(&asked);
        w.net.tap = Some(Box::new(move |_, frame| {
            count.set(count.get() + u64::from(frame.first() == Some(&NEGOTIATE)));
        }));
        (0..4).for_each(|_| w.crowd(0));
        w.net.run_for(20 * SECOND);
        assert_eq!(asked.get() > 0, !heard, "a card that has too many");
        for (at, preference) in [(0, Preference::Stateless), (1, Preference::Stateful)] {
            /* the second has been asked, and knows */
            assert_eq!(w.may_want(&conn, at, preference), !heard && at == 0, "{heard} {at}");
            for _ in 0..200 {
                w.net.run_for(SECOND / 100);
                assert!((0..2).all(|at| !w.net.hosts[at].nic.is_held(conn.qpns[at])));
            }
        }
        assert_eq!([0, 1].map(|at| w.outcome(&conn, at)), [Some(Outcome::Plain); 2]);
        assert_eq!([w.write(&conn, 0), w.write(&conn, 1)], [Some(WcStatus::Success); 2]);
        let counters = [0, 1].map(|at| w.net.hosts[at].nic.counters());
        assert_eq!(counters.map(|counters| counters.star_switches.get()), [0; 2]);
    }
}

#[test]
fn an_end_whose_peer_is_plain_finds_out() {
    let mut w = World::new([Some(THRESHOLD); 2]);
    let conn = w.connect();
    /* its messages to its peer are lost, and its program's requests wait */
    w.net.cut(0, 1, SECOND / 10);
    w.forge(&conn, &burst(1));
    w.net.run_for(SECOND / 10);
    assert_eq!(w.role(&conn, 0), Some(Role::Stateful));
    assert_eq!(w.write(&conn, 0), Some(WcStatus::Success));
    assert_eq!(w.outcome(&conn, 0), Some(Outcome::Plain));
    let counters = w.net.hosts[0].nic.counters();
    assert_eq!((counters.star_plain_qps.get(), counters.star_switches.get()), (1, 1));
}

#[test]
fn a_plain_request_settles_it_for_all() {
    let mut w = World::new([Some(THRESHOLD); 2]);
    let conn = w.connect();
    w.net.cut(0, 1, SECOND / 10);
    w.forge(&conn, &burst(1));
    w.net.run_for(SECOND / 100);
    assert_eq!(w.role(&conn, 0), Some(Role::Stateful));
    assert_eq!(w.write(&conn, 1), Some(WcStatus::Success));
    assert_eq!(w.outcome(&conn, 0), Some(Outcome::Plain));
}

#[test]
fn a_stateless_end_without_memory_stays_what_it_was() {
    let mut w = World::new([Some(THRESHOLD); 2]);
    let conn = w.connect();
    w.net.hosts[0].env.star.no_slots = true;
    (0..2).for_each(|_| w.crowd(0));
    w.net.run_for(SECOND / 2);
    assert_eq!([0, 1].map(|at| w.outcome(&conn, at)), [Some(Outcome::Plain); 2]);
    assert_eq!([w.write(&conn, 0), w.write(&conn, 1)], [Some(WcStatus::Success); 2]);
    assert_eq!(w.net.hosts[0].env.events, vec![]);
}

#[test]
fn where_nobody_can_be_asked_nobody_looks_again_and_again() {
    let mut w = World::new([Some(THRESHOLD), None]);
    /* the peer never sent a StaR message */
    w.net.cut(1, 0, SECOND);
    let conn = w.connect();
    w.net.run_for(SECOND / 4);
    assert_eq!(w.outcome(&conn, 0), Some(Outcome::Plain));
    (0..2).for_each(|_| w.crowd(0));
    w.net.run_for(100 * SECOND);
    let host = &w.net.hosts[0];
    let due = host.star.as_ref().unwrap().next_deadline(host.nic.connection_count()).unwrap();
    assert!(due > w.net.now() && w.net.now() + 60 * SECOND >= due);
    w.net.run_for(due - w.net.now());
    let host = &w.net.hosts[0];
    let next = host.star.as_ref().unwrap().next_deadline(host.nic.connection_count()).unwrap();
    assert_eq!(next - due, 60 * SECOND);
}

#[test]
fn a_card_that_has_room_again_takes_its_connections_back() {
    let mut w = World::new([Some(8), Some(8)]);
    let conn = w.connect();
    (0..4).for_each(|_| w.crowd(0));
    w.net.run_for(SECOND);
    assert_eq!(w.roles(&conn), STAR);
    /* a few less are not enough: it would be gone again with the next */
    w.thin(0);
    w.net.run_for(100 * SECOND);
    assert_eq!(w.roles(&conn), STAR);
    w.thin(0);
    w.net.run_for(SECOND / 2);
    assert_eq!(w.roles(&conn), STAR, "it may be crowded in a moment");
    w.net.run_for(SECOND);
    assert_eq!((w.roles(&conn), w.returns()), ([None; 2], [1, 1]));
    assert_eq!([w.write(&conn, 0), w.write(&conn, 1)], [Some(WcStatus::Success); 2]);
    let counters = [0, 1].map(|at| w.net.hosts[at].nic.counters());
    assert!(counters.iter().all(|c| c.star_plain_qps.get() == 1 && c.star_stateless_qps.get() == 0));
    assert_eq!(counters.map(|c| c.star_host_bytes.get()), [0; 2]);
    /* and nothing goes to and fro */
    w.crowd(0);
    w.net.run_for(20 * SECOND);
    assert_eq!((w.roles(&conn), w.returns()), ([None; 2], [1, 1]));
    (0..2).for_each(|_| w.crowd(0));
    w.net.run_for(2 * SECOND);
    assert_eq!(w.roles(&conn), STAR);
    assert_eq!([w.write(&conn, 0), w.write(&conn, 1)], [Some(WcStatus::Success); 2]);
}

#[test]
fn roles_change_places_when_the_other_card_is_crowded() {
    let mut w = World::new([Some(8), Some(8)]);
    let conn = w.connect();
    (0..4).for_each(|_| w.crowd(0));
    w.net.run_for(SECOND);
    assert_eq!(w.roles(&conn), STAR);
    /* the card that keeps it is crowded, and the other still has no room */
    (0..4).for_each(|_| w.crowd(1));
    w.net.run_for(3 * SECOND);
    assert_eq!(w.roles(&conn), STAR);
    (0..3).for_each(|_| w.thin(0));
    w.net.run_for(70 * SECOND);
    assert_eq!(w.roles(&conn), [Some(Role::Stateful), Some(Role::Stateless)]);
    assert_eq!(w.returns(), [1, 1]);
    assert_eq!([w.write(&conn, 0), w.write(&conn, 1)], [Some(WcStatus::Success); 2]);
    w.net.run_for(70 * SECOND);
    assert_eq!(w.returns(), [1, 1], "there it stays");
}

#[test]
fn a_program_s_preference_counts_for_more_than_the_balance() {
    let mut w = World::new([Some(8), Some(8)]);
    let conn = w.connect();
    let ways = [
        (0, Preference::Stateless, STAR),
        (0, Preference::Stateful, [Some(Role::Stateful), Some(Role::Stateless)]),
        (0, Preference::Off, [None; 2]),
        (0, Preference::Auto, [None; 2]),
        (1, Preference::Stateless, [Some(Role::Stateful), Some(Role::Stateless)]),
        (1, Preference::Stateful, STAR),
        (1, Preference::Auto, [None; 2]),
    ];
    for (at, preference, roles) in ways {
        w.want(&conn, at, preference);
        w.net.run_for(4 * SECOND);
        assert_eq!(w.roles(&conn), roles, "{at} {preference:?}");
        assert_eq!([w.write(&conn, 0), w.write(&conn, 1)], [Some(WcStatus::Success); 2]);
    }
    /* both programs want the same: it stays what it is */
    for at in 0..2 {
        w.want(&conn, at, Preference::Stateless);
    }
    w.net.run_for(100 * SECOND);
    assert_eq!([w.write(&conn, 0), w.write(&conn, 1)], [Some(WcStatus::Success); 2]);
}

/// Who is to be stateful has it settled, but its peer has no memory to leave its card; or it is the other way
/// round.
#[test]
fn what_a_program_wants_is_asked_for_again_when_the_peer_could_not_begin() {
    for (at, preference) in [(1, Preference::Stateful), (0, Preference::Stateless)] {
        let mut w = World::new([Some(100); 2]);
        let conn = w.connect();
        w.net.hosts[0].env.star.no_slots = true;
        w.want(&conn, at, preference);
        w.net.run_for(SECOND / 2);
        assert_eq!([0, 1].map(|at| w.outcome(&conn, at)), [Some(Outcome::Plain); 2]);
        w.net.hosts[0].env.star.no_slots = false;
        w.net.run_for(3 * SECOND);
        assert_eq!(w.roles(&conn), STAR);
        assert_eq!([w.write(&conn, 0), w.write(&conn, 1)], [Some(WcStatus::Success); 2]);
    }
}

/// Its peer has sent nothing yet, so that an end of StaR has not begun, when its program wants another.
#[test]
fn what_a_program_wants_is_asked_for_when_its_end_has_begun() {
    let mut w = World::new([Some(100); 2]);
    let conn = w.connect();
    w.want(&conn, 0, Preference::Stateless);
    while w.role(&conn, 0).is_none() {
        assert!(w.net.step());
    }
    w.net.cut(1, 0, SECOND / 2);
    w.net.run_for(SECOND / 20);
    w.want(&conn, 0, Preference::Off);
    w.net.run_for(SECOND / 4);
    assert_eq!(w.roles(&conn), STAR, "it waits for its peer");
    w.net.run_for(5 * SECOND);
    assert_eq!((w.roles(&conn), w.returns()), ([None; 2], [1, 1]));
}

/// The peer never sent a StaR message: the program cannot ask it.
#[test]
fn a_program_wants_nothing_of_a_peer_without_star() {
    let mut w = World::new([Some(100), None]);
    w.net.cut(1, 0, SECOND);
    let conn = w.connect();
    w.net.run_for(SECOND);
    let sent = w.net.tally.sent;
    for preference in [Preference::Stateless, Preference::Stateful, Preference::Off] {
        assert!(!w.may_want(&conn, 0, preference));
    }
    w.net.run_for(10 * SECOND);
    assert_eq!((w.outcome(&conn, 0), w.net.tally.sent), (Some(Outcome::Plain), sent), "nobody is asked");
    assert_eq!([w.write(&conn, 0), w.write(&conn, 1)], [Some(WcStatus::Success); 2]);
}

/// An atomic is under way at either end, and its answer may be lost, when a program wants the connection to
/// change: it does, and the atomic is executed once.
#[test]
fn an_atomic_under_way_is_executed_once_when_a_connection_changes() {
    for moment in 0..40 {
        let mut w = World::new([Some(100); 2]);
        let (conn, from) = (w.connect(), moment as usize % 2);
        let words = w.words(&conn, from);
        w.net.hosts[1 - from].env.memory.set_word(words[1].addr, 0);
        for (count, preference, roles) in [(1, Preference::Stateless, STAR), (2, Preference::Off, [None; 2])]
        {
            w.post_atomic(&conn, from, words);
            w.net.run_for(moment * 250);
            w.want(&conn, 0, preference);
            w.net.cut(1 - from, from, SECOND / 500);
            w.net.run_for(SECOND);
            let ends: Vec<_> = w.completions(&conn).iter().map(|cqe| cqe.status).collect();
            assert_eq!((w.roles(&conn), ends), (roles, vec![WcStatus::Success]), "{moment}");
            assert_eq!(w.net.hosts[1 - from].env.memory.word(words[1].addr), count, "{moment}");
        }
    }
}

/// The end of a connection that takes from an SRQ does not change, whoever wants it.
#[test]
fn an_end_with_shared_receives_stays_what_it_is() {
    for at in 0..2 {
        let mut w = World::new([Some(THRESHOLD); 2]);
        let srq = w.srq(at);
        let conn = w.connect_hosts([0, 1], std::array::from_fn(|end| (end == at).then_some(&srq)));
        (0..4).for_each(|_| w.crowd(0));
        w.net.run_for(20 * SECOND);
        assert!(!w.may_want(&conn, at, Preference::Stateless), "it is said at once");
        w.want(&conn, 1 - at, Preference::Stateful);
        w.net.run_for(20 * SECOND);
        assert_eq!(w.roles(&conn), [None; 2]);
        assert_eq!([w.write(&conn, 0), w.write(&conn, 1)], [Some(WcStatus::Success); 2]);
    }
}

/// A program has made its end stateless, and then leaves it to the cards, which have room: nothing else
/// has them look.
#[test]
fn what_a_program_leaves_to_the_cards_they_look_at() {
    let mut w = World::new([Some(100); 2]);
    let conn = w.connect();
    w.want(&conn, 0, Preference::Stateless);
    w.net.run_for(10 * SECOND);
    assert_eq!(w.roles(&conn), STAR);
    w.want(&conn, 0, Preference::Auto);
    w.net.run_for(2 * SECOND);
    assert_eq!(w.roles(&conn), [None; 2], "there is room");
}

/// Of equals the end with the lower address keeps the state, whoever asks.
#[test]
fn of_equals_the_lower_address_keeps_the_state() {
    let mut w = World::new([Some(THRESHOLD); 2]);
    let conn = w.connect();
    (0..2).for_each(|_| (0..2).for_each(|at| w.crowd(at)));
    w.net.run_for(3 * SECOND);
    assert_eq!(w.roles(&conn), [Some(Role::Stateful), Some(Role::Stateless)]);
}

/// Many stateless ends wait for a peer that is gone, and one for a peer whose port of StaR alone is closed:
/// that is plain soon, and what its card has too many of is asked for.
#[test]
fn ends_whose_peers_do_not_begin_are_in_nobody_s_way() {
    let mut w = World::new([Some(200); 4]);
    let conns: Vec<_> = (0..40).map(|_| w.connect()).collect();
    let shut = w.connect_hosts([0, 2], [None; 2]);
    let plain = w.connect_hosts([0, 3], [None; 2]);
    w.crowd(0);
    conns.iter().chain([&shut]).for_each(|conn| w.want(conn, 0, Preference::Stateless));
    while [conns.last().unwrap(), &shut].iter().any(|conn| w.role(conn, 0).is_none()) {
        w.net.star_cut = vec![0, 1, 2];
        assert!(w.net.step());
    }
    w.net.cut(0, 1, 100 * SECOND);
    w.net.cut(1, 0, 100 * SECOND);
    w.net.star_cut = vec![1, 2];
    w.net.crowd(0, 0);
    w.net.run_for(SECOND);
    assert_eq!(w.roles(&plain), STAR);
    assert_eq!(w.roles(&shut), [None; 2]);
    assert!(conns.iter().filter(|conn| w.role(conn, 0).is_some()).count() > 32);
}

/// What a program states while its end is being set up is asked for as soon as that is done.
#[test]
fn what_a_program_states_during_set_up_does_not_wait_for_its_peer_s_grace() {
    let mut w = World::new([Some(100); 2]);
    let conn = w.connect();
    w.want(&conn, 0, Preference::Stateless);
    while w.role(&conn, 0).is_none() {
        assert!(w.net.step());
    }
    w.want(&conn, 0, Preference::Off);
    w.net.run_for(SECOND / 10);
    assert_eq!((w.roles(&conn), w.returns()), ([None; 2], [1, 1]));
}
