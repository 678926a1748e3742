//! Connections of StaR that revert to RC as their cards decide: what is lost on the way, who is gone by then,
//! how often, and on QPC-limited cards.

use std::cell::Cell;
use std::rc::Rc;

use crate::common::roles::{Conn, SECOND, STAR, World};
use starverbs_core::{Access, QpState, WcStatus};
use starverbs_star::control::Preference;

const US: u64 = 1_000;
const MS: u64 = 1_000 * US;

/// A connection whose first end was made stateless by its program.
fn stateless(w: &mut World, conn: &Conn) {
    w.want(conn, 0, Preference::Stateless);
    w.net.run_for(SECOND);
    assert_eq!(w.roles(conn), STAR);
}

/// SL has reverted to RC, and its message is lost, when SF's program sends to SL's receive. Whenever the wire
/// is cut, the connection reverts to RC, and what was sent comes.
#[test]
fn what_a_quiesced_end_sends_waits_for_its_peer() {
    let mut alone = 0;
    for cut in 0..30 {
        let mut w = World::new([Some(100); 2]);
        let conn = w.connect();
        stateless(&mut w, &conn);
        let room = w.post_recv(&conn, 0);
        w.want(&conn, 0, Preference::Off);
        w.net.run_for(cut * US / 4);
        w.net.cut(0, 1, 20 * MS);
        w.net.run_for(US * 100);
        alone += u64::from(w.returns() == [1, 0]);
        w.post_send(&conn, 1, 0x5eed);
        w.net.run_for(2 * SECOND);
        assert_eq!((w.roles(&conn), w.returns()), ([None; 2], [1, 1]), "{cut}");
        let ends: Vec<_> = w.completions(&conn).iter().map(|cqe| (cqe.qpn, cqe.wr_id, cqe.status)).collect();
        let good = |at: usize, id| (conn.qpns[at], id, WcStatus::Success);
        assert!(
            ends.len() == 2 && ends.contains(&good(0, room)) && ends.contains(&good(1, 0x5eed)),
            "{ends:?}"
        );
        assert_eq!(w.net.hosts[0].env.memory.word(room), 0x5eed);
        assert_eq!(w.net.hosts[0].nic.counters().star_drops.get(), 0, "nobody is spoken to who has left");
    }
    assert!(alone > 4, "{alone} times SL alone had reverted");
}

/// Both programs want it, SL has reverted to RC, its message is lost, and then its host is gone.
fn left_alone(w: &mut World, conns: &[Conn]) {
    conns.iter().for_each(|conn| w.want(conn, 1, Preference::Off));
    w.net.run_for(5 * US);
    w.net.cut(0, 1, SECOND);
    w.net.run_for(10 * MS);
    assert_eq!(w.returns(), [conns.len() as u64, 0]);
    w.net.restart(0);
}

/// A card whose peer is gone while its connections with it are reverting asks others, and that peer ever more
/// seldom.
#[test]
fn ends_that_wait_for_a_peer_that_is_gone_are_in_nobody_s_way() {
    let mut w = World::new([Some(100); 3]);
    let conns: Vec<_> = (0..16).map(|_| w.connect()).collect();
    let other = w.connect_hosts([1, 2], [None; 2]);
    (0..2).for_each(|_| w.crowd(0));
    w.net.crowd(0, 0);
    w.net.run_for(SECOND);
    conns.iter().for_each(|conn| assert_eq!(w.roles(conn), STAR));
    left_alone(&mut w, &conns);
    w.net.crowd(1, 2);
    w.net.run_for(SECOND);
    assert_eq!(w.roles(&other), STAR);
    let sent = Rc::new(Cell::new(0));
    let count = Rc::clone(&sent);
    w.net.tap = Some(Box::new(move |from, _| count.set(count.get() + u64::from(from == 1))));
    w.net.run_for(100 * SECOND);
    sent.set(0);
    w.net.run_for(100 * SECOND);
    assert!((1..=16 * 101).contains(&sent.get()), "{}: each once a second", sent.get());
}

/// SF is quiesced, and has a request of SL that did not begin, when its program takes it to ERR. SL does not
/// answer.
#[test]
fn a_quiesced_end_in_err_repeats_its_error_for_some_time() {
    let mut w = World::new([Some(100); 2]);
    let conn = w.connect();
    stateless(&mut w, &conn);
    w.want(&conn, 0, Preference::Off);
    w.net.run_for(US);
    w.post_write(&conn, 0);
    w.net.run_for(5 * US / 2);
    w.net.cut(0, 1, SECOND);
    w.net.run_for(10 * MS);
    assert_eq!(w.returns(), [1, 0]);
    w.net.restart(0);
    let (now, before) = (w.net.now(), w.net.tally.sent);
    w.net.hosts[1].to_state(conn.qpns[1], QpState::Err, now).expect("from RTS");
    w.net.run_for(10 * SECOND);
    let said = w.net.tally.sent;
    assert!(said > before, "it has something to say");
    w.net.run_for(100 * SECOND);
    assert_eq!(w.net.tally.sent, said);
}

/// The peer's host is gone while programs wait for messages alone: they wait on, as RC's do, and more and
/// more seldom ask for it. Sends then fail.
#[test]
fn receives_alone_wait_for_ever() {
    let mut w = World::new([Some(100); 2]);
    let conns: Vec<_> = (0..3).map(|_| w.connect()).collect();
    conns.iter().for_each(|conn| stateless(&mut w, conn));
    w.net.kill(1);
    conns.iter().for_each(|conn| _ = w.post_recv(conn, 0));
    w.net.hosts[0].region(64, Access::REMOTE_READ);
    let before = w.net.tally.sent;
    w.net.run_for(100 * SECOND);
    let tries = w.net.tally.sent - before;
    assert!((100..1_000).contains(&tries), "{tries} of three in vain");
    for conn in &conns {
        assert_eq!(w.completions(conn), []);
        w.post_send(conn, 0, 1);
    }
    w.net.run_for(100 * SECOND);
    for conn in &conns {
        let ends: Vec<_> = w.completions(conn).iter().map(|cqe| (cqe.wr_id == 1, cqe.status)).collect();
        assert_eq!(ends, [(true, WcStatus::RetryExcErr), (false, WcStatus::WrFlushErr)]);
    }
}

/// Programs of both ends change their minds as fast as messages travel: what they said last is so.
#[test]
fn programs_may_change_their_minds_all_the_time() {
    let mut w = World::new([Some(100); 2]);
    let conn = w.connect();
    for n in 0..400 {
        if n % 20 == 0 {
            (0..2).for_each(|at| w.post_write(&conn, at));
        }
        w.want(&conn, n % 2, [Preference::Stateful, Preference::Off, Preference::Auto][n % 3]);
        w.net.run_for(20 * MS);
        if n % 20 == 19 {
            let ends: Vec<_> = w.completions(&conn).iter().map(|cqe| cqe.status).collect();
            assert_eq!(ends, [WcStatus::Success; 2], "{n}: work goes on");
        }
    }
    w.want(&conn, 1, Preference::Auto);
    w.net.run_for(SECOND);
    for (preference, roles) in
        [(Preference::Off, [None; 2]), (Preference::Stateless, STAR), (Preference::Off, [None; 2])]
    {
        w.want(&conn, 0, preference);
        w.net.run_for(100 * MS);
        assert_eq!(w.roles(&conn), roles);
    }
    assert_eq!([w.write(&conn, 0), w.write(&conn, 1)], [Some(WcStatus::Success); 2]);
}

/// Somebody between the hosts lets RoCEv2's port alone pass: connections that ran do not end with the switch,
/// nor does any request.
#[test]
fn where_star_s_ports_are_closed_connections_stay_plain() {
    for shut in [vec![0, 1], vec![0], vec![1]] {
        stay_plain(&shut);
    }
}

fn stay_plain(shut: &[usize]) {
    let mut w = World::new([Some(100); 2]);
    let conn = w.connect();
    w.net.star_cut = shut.to_vec();
    let rooms: Vec<_> = (0..8).map(|n| w.post_recv(&conn, n % 2)).collect();
    w.want(&conn, 0, Preference::Stateless);
    while w.roles(&conn) != STAR {
        assert!(w.net.step());
    }
    for n in 0..8 {
        w.post_send(&conn, 1 - n % 2, n as u64);
        w.net.run_for(MS);
    }
    assert_eq!(w.completions(&conn).len(), 0, "nothing comes through");
    w.net.run_for(SECOND / 2);
    assert_eq!((w.roles(&conn), w.returns()), ([None; 2], [1, 1]));
    let ends = w.completions(&conn);
    assert!(ends.len() == 16 && ends.iter().all(|cqe| cqe.status == WcStatus::Success), "{ends:?}");
    for (n, room) in rooms.iter().enumerate() {
        assert_eq!(w.net.hosts[n % 2].env.memory.word(*room), n as u64);
    }
    /* it is tried ever more seldom, and fails each time, and programs go on */
    w.net.run_for(300 * SECOND);
    assert!(w.returns()[0] < 12 && w.returns()[0] > 4, "{:?}", w.returns());
    assert_eq!([w.write(&conn, 0), w.write(&conn, 1)], [Some(WcStatus::Success); 2]);
    w.net.star_cut.clear();
    w.net.run_for(100 * SECOND);
    assert_eq!(w.roles(&conn), STAR);
    assert_eq!([w.write(&conn, 0), w.write(&conn, 1)], [Some(WcStatus::Success); 2]);
}
