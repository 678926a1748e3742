//! What goes wrong, at either end.

use super::world::{SF, SL};
use super::*;
use crate::wire::StarHead;

const MS: Nanos = 1_000_000;

#[test]
fn without_a_rule_no_packet_leaves_and_both_ends_learn_of_it() {
    for (key, offset, len) in [(SL_KEY + 1, 0, 8), (SL_KEY, REGION as u64 - 7, 8), (SL_KEY, REGION as u64, 1)]
    {
        let mut w = World::new(1, |_, _| {});
        let (mine, far) = (w.ours(0), w.theirs(offset));
        w.post_recv(7, &[]);
        w.post(op(SendOp::Write, far, key), &[w.sge(mine, len)], false);
        w.post(op(SendOp::Write, w.theirs(0), SL_KEY), &[w.sge(mine, 8)], false);
        w.pass(MS);
        assert_eq!(w.sends(), [(0, WcStatus::RemAccessErr), (1, WcStatus::WrFlushErr)]);
        assert_eq!(w.rcq.0.borrow()[0].status, WcStatus::WrFlushErr);
        assert_eq!((w.conn.state(), w.seen.len(), w.inquiries), (QpState::Err, 0, 1));
        assert_eq!(w.stats.star_rejects.get(), 1, "what was flushed was not judged");
    }
}

/// Each kind of request that no rule lets pass counts once, whichever end's it is, though it may wait and be
/// looked at again.
#[test]
fn requests_that_no_rule_allows_are_counted_once() {
    let none = SL_KEY + 1;
    let from_sf: [fn(&World) -> SendWqe; 4] = [
        |w| op(SendOp::Write, w.theirs(0), SL_KEY + 1),
        |w| op(SendOp::Read, w.theirs(0), SL_KEY + 1),
        |w| op(SendOp::FetchAdd, w.theirs(0), SL_KEY + 1),
        |_| SendWqe { imm: SL_KEY + 1, ..op(SendOp::SendInv, 0, 0) },
    ];
    for request in from_sf {
        let mut w = World::new(1, |_, _| {});
        w.sl_post_recv(&[w.sge(w.theirs(0), 8)]);
        w.pass(MS);
        w.post(request(&w), &[w.sge(w.ours(0), 8)], false);
        w.run(|w| w.scq.0.borrow().len() == 1);
        assert_eq!(w.sends(), [(0, WcStatus::RemAccessErr)]);
        w.pass(20 * MS);
        assert_eq!(
            (w.stats.star_rejects.get(), w.stats.star_sent_rd.get() + w.stats.star_sent_gd.get()),
            (1, 0)
        );
    }
    /* buffers of SL's that it may not name */
    let mut w = World::new(1, |_, _| {});
    let bad = Sge { lkey: none, ..w.sge(w.theirs(0), 8) };
    w.sl_post_recv(&[bad]);
    w.post(op(SendOp::Send, 0, 0), &[w.sge(w.ours(0), 8)], false);
    w.run(|w| w.scq.0.borrow().len() == 1);
    assert_eq!((w.sends()[0].1, w.stats.star_rejects.get()), (WcStatus::RemOpErr, 1));

    let mut w = World::new(1, |_, _| {});
    w.sl_post(op(SendOp::Read, w.ours(0), w.sf_key), &[bad], false);
    w.run(|w| w.lib[0].done.len() == 1);
    assert_eq!((w.lib[0].done[0].1.status, w.stats.star_rejects.get()), (WcStatus::LocProtErr, 1));

    /* a message that does not fit lacks no rule */
    let mut w = World::new(1, |_, _| {});
    w.sl_post_recv(&[w.sge(w.theirs(0), 7)]);
    w.post(op(SendOp::Send, 0, 0), &[w.sge(w.ours(0), 8)], false);
    w.run(|w| w.scq.0.borrow().len() == 1);
    assert_eq!((w.sends()[0].1, w.stats.star_rejects.get()), (WcStatus::RemInvReqErr, 0));
}

/// A rule that our card lacks, and SL cannot get there, keeps nobody from failing.
#[test]
fn who_lacks_a_rule_for_ever_asks_a_few_times() {
    let mut w = World::new(1, |_, _| {});
    w.has_more_rules = true;
    w.post(op(SendOp::Write, w.theirs(0), SL_KEY + 1), &[w.sge(w.ours(0), 8)], false);
    w.pass(20 * MS);
    assert_eq!(w.sends(), [(0, WcStatus::RemAccessErr)]);
    assert_eq!((w.seen.len(), w.inquiries), (0, 5));
}

#[test]
fn a_rule_that_was_taken_away_stops_what_would_be_sent_again() {
    let mut w = World::new(1, |_, _| {});
    let (mine, far) = (w.ours(0), w.theirs(0));
    w.post(op(SendOp::Write, far, SL_KEY), &[w.sge(mine, 8)], false);
    w.cut = true;
    w.pass(MS / 2);
    let left = w.seen.len();
    assert_eq!(left, 1);
    let until = w.registry.remove(w.conn.conn(), SL_KEY, w.now, w.conn.lifetime(&w.path));
    assert!(until > w.now, "what left by it may still be under way");
    assert_eq!(
        w.registry.remove(w.conn.conn(), SL_KEY, w.now, w.conn.lifetime(&w.path)),
        until,
        "asked again"
    );
    w.pass(20 * MS);
    assert_eq!(w.seen.len(), left);
    assert_eq!(w.stats.star_rejects.get(), 1);
    assert_eq!(w.sends(), [(0, WcStatus::RemAccessErr)]);
    let later = w.now;
    assert_eq!(w.registry.remove(w.conn.conn(), SL_KEY, later, w.conn.lifetime(&w.path)), later);
}

#[test]
fn a_message_too_long_for_its_receive_fails_at_both_ends() {
    let mut w = World::new(1, |_, _| {});
    w.sl_post_recv(&[w.sge(w.theirs(0), 7)]);
    w.post(op(SendOp::Send, 0, 0), &[w.sge(w.ours(0), 8)], false);
    w.run(|w| w.lib[1].done.len() == 1);
    assert_eq!(w.sends(), [(0, WcStatus::RemInvReqErr)]);
    assert_eq!(w.lib[1].done[0].1.status, WcStatus::LocLenErr);

    let mut w = World::new(1, |_, _| {});
    w.post_recv(5, &[w.sge(w.ours(0), 7)]);
    w.post_recv(6, &[]);
    w.sl_post(op(SendOp::Send, 0, 0), &[w.sge(w.theirs(0), 8)], false);
    w.run(|w| w.lib[0].done.len() == 1);
    assert_eq!(w.lib[0].done[0].1.status, WcStatus::RemInvReqErr);
    let received: Vec<_> = w.rcq.0.borrow().iter().map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(received, [(5, WcStatus::LocLenErr), (6, WcStatus::WrFlushErr)]);
    assert_eq!(w.sf.events, [AsyncEvent::QpReqErr(0x11)]);
    assert_eq!(w.conn.state(), QpState::Err);
}

#[test]
fn sl_may_not_reach_what_sf_did_not_give() {
    for access in [Access::LOCAL_WRITE, Access::REMOTE_READ] {
        let mut w = World::new(1, |local, _| local.access = access);
        let (mine, key) = (w.ours(0), w.sf_key);
        w.sl_post(op(SendOp::Write, mine, key), &[w.sge(w.theirs(0), 8)], false);
        w.sl_post(op(SendOp::Write, mine, key), &[w.sge(w.theirs(0), 8)], false);
        w.run(|w| w.lib[0].done.len() == 1);
        w.pass(50 * MS);
        assert_eq!((w.lib[0].done.len(), w.lib[0].done[0].0), (1, 0), "the library flushes the rest");
        assert_eq!(w.lib[0].done[0].1.status, WcStatus::RemAccessErr);
        assert_eq!(w.sf.events, [AsyncEvent::QpAccessErr(0x11)]);
        assert_eq!(w.sf.read(mine, 8), [0xa5; 8]);
    }
}

#[test]
fn an_sl_that_names_memory_it_has_not_fails_alone() {
    let mut w = World::new(1, |_, _| {});
    let bad = Sge { lkey: SL_KEY + 1, ..w.sge(w.theirs(0), 8) };
    w.sl_post(op(SendOp::Read, w.ours(0), w.sf_key), &[bad], false);
    w.run(|w| w.lib[0].done.len() == 1);
    assert_eq!(w.lib[0].done[0].1.status, WcStatus::LocProtErr);
    assert_eq!(w.conn.state(), QpState::Rts);
    /* its QP is in ERR, and answers nothing */
    w.post(op(SendOp::Send, 0, 0), &[], false);
    w.run(|w| !w.scq.0.borrow().is_empty());
    assert_eq!(w.sends(), [(0, WcStatus::RetryExcErr)]);
}

#[test]
fn a_silent_peer_is_given_up_when_the_program_said_so_and_never_before() {
    let mut w = World::new(1, |_, _| {});
    w.post(op(SendOp::Write, w.theirs(0), SL_KEY), &[w.sge(w.ours(0), 8)], false);
    w.pass(MS);
    assert_eq!(w.sends(), [(0, WcStatus::Success)]);
    w.cut = true;
    let begin = w.now;
    w.post(op(SendOp::Read, w.theirs(0), SL_KEY), &[w.sge(w.ours(0), 8)], false);
    w.post(op(SendOp::Read, w.theirs(0), SL_KEY), &[w.sge(w.ours(0), 8)], false);
    w.run(|w| w.scq.0.borrow().len() == 3);
    assert!((500 * MS..2000 * MS).contains(&(w.now - begin)), "{}", w.now - begin);
    assert_eq!(w.sends()[1..], [(1, WcStatus::RetryExcErr), (2, WcStatus::WrFlushErr)]);

    let mut w = World::new(1, |local, _| local.patience = Silence::of(0));
    w.cut = true;
    w.post(op(SendOp::Read, w.theirs(0), SL_KEY), &[w.sge(w.ours(0), 8)], false);
    w.pass(50_000 * MS);
    assert!(w.sends().is_empty());
    w.cut = false;
    w.run(|w| w.scq.0.borrow().len() == 1);
    assert_eq!(w.sends(), [(0, WcStatus::Success)]);
}

/// Other connections take all room on the path for longer than the program is patient: nothing was asked, so
/// nobody was silent.
#[test]
fn who_waits_for_room_on_the_path_does_not_wait_for_its_peer() {
    for waits in [3_000 * MS, 400 * MS] {
        let mut w = World::new(1, |_, _| {});
        w.post(op(SendOp::Write, w.theirs(0), SL_KEY), &[w.sge(w.ours(0), 8)], false);
        w.pass(MS);
        w.post(op(SendOp::Read, w.theirs(0), SL_KEY), &[w.sge(w.ours(0), 30_000)], false);
        w.post(op(SendOp::Read, w.theirs(0), SL_KEY), &[w.sge(w.ours(0), 8)], false);
        w.cut = true;
        w.pass(300 * MS);
        /* two tail-loss probes are answered, and show that the others were lost */
        w.path.add(2 << 20);
        w.cut = false;
        w.pass(waits);
        assert!(w.conn.crowded && w.conn.window.in_flight() == 0, "it waits for room");
        w.path.forget(2 << 20);
        w.cut = true;
        w.pass(400 * MS);
        assert_eq!(w.sends().len(), 1, "silent for less than the program allows");
        w.cut = false;
        w.run(|w| w.scq.0.borrow().len() == 3);
        assert!(w.sends().iter().all(|(_, status)| *status == WcStatus::Success));
    }
}

#[test]
fn a_send_waits_for_its_receive_as_long_as_it_may() {
    for (retries, fails) in [(0, true), (6, true), (7, false)] {
        let mut w = World::new(1, |local, setup| (local.rnr_retry, setup.rnr_retry) = (retries, retries));
        w.post(op(SendOp::Send, 0, 0), &[w.sge(w.ours(0), 8)], false);
        w.pass(200 * MS);
        assert!(w.sends().is_empty(), "a WQEP may be as late as that");
        if !fails {
            w.sl_post_recv(&[w.sge(w.theirs(0), 8)]);
        }
        w.run(|w| w.scq.0.borrow().len() == 1);
        let status = if fails { WcStatus::RnrRetryExcErr } else { WcStatus::Success };
        assert_eq!(w.sends(), [(0, status)]);

        let mut w = World::new(1, |_, setup| setup.rnr_retry = retries);
        w.sl_post(op(SendOp::Send, 0, 0), &[w.sge(w.theirs(0), 8)], false);
        w.pass(5 * MS);
        if !fails {
            w.post_recv(0, &[w.sge(w.ours(0), 8)]);
        }
        w.run(|w| w.lib[0].done.len() == 1);
        assert_eq!((w.lib[0].done[0].1.status, w.conn.state()), (status, QpState::Rts));
    }
}

#[test]
fn the_program_takes_its_end_to_error_and_sl_learns_when_it_asks() {
    let mut w = World::new(1, |_, _| {});
    w.post_recv(1, &[]);
    w.post(op(SendOp::Send, 0, 0), &[w.sge(w.ours(0), 8)], false);
    w.pass(MS);
    w.fail();
    assert_eq!(w.sends(), [(0, WcStatus::WrFlushErr)]);
    assert_eq!(w.rcq.0.borrow().len(), 1);
    w.sl_post(op(SendOp::Send, 0, 0), &[w.sge(w.theirs(0), 8)], false);
    w.run(|w| w.lib[0].done.len() == 1);
    assert_eq!(w.lib[0].done[0].1.status, WcStatus::RetryExcErr);
    w.post(op(SendOp::Send, 0, 0), &[], false);
    assert_eq!(w.sends()[1], (1, WcStatus::WrFlushErr));
}

#[test]
fn rules_come_and_go_by_messages_and_a_bye_ends_it() {
    let mut w = World::new(1, |_, _| {});
    let rule = MemoryRule {
        key: 99,
        pd: SL_PD,
        qpn: 0,
        addr: w.theirs(4096),
        len: 4096,
        iova: 0,
        access: Access::REMOTE_WRITE | Access::LOCAL_WRITE,
    };
    let send_control = |w: &mut World, seq: u32, message: Control| {
        w.send_control(seq, message);
        w.pass(MS);
    };
    let write = op(SendOp::Write, 8, 99);
    send_control(&mut w, 1, Control::Rule(rule));
    send_control(&mut w, 0, Control::Rule(rule));
    w.sf.put(w.ours(0), b"abcdefgh");
    w.post(write, &[w.sge(w.ours(0), 8)], false);
    w.pass(MS);
    assert_eq!(w.sends(), [(0, WcStatus::Success)]);
    assert_eq!(w.sl.read(w.theirs(4104), 8), b"abcdefgh", "by the address that SL's program gave");
    send_control(&mut w, 1, Control::Unrule { key: 99 });
    /* it is answered when nothing is under way any more, whatever comes late meanwhile */
    w.send_control(2, Control::Bye { why: 0, recvs: Psn::default() });
    w.pass(MS / 10);
    w.send_control(1, Control::Unrule { key: 99 });
    w.pass(MS / 10);
    assert!(w.conn.answer == Answer::Quiet && w.conn.channel.accepted() == Psn::new(1));
    w.pass(2 * MS);
    assert!(w.conn.answer == Answer::None);
    w.post(write, &[w.sge(w.ours(0), 8)], false);
    w.pass(MS);
    assert_eq!(w.sends()[1], (1, WcStatus::RetryExcErr));
    let count = w.seen.iter().filter(|(ptype, _)| *ptype == Ptype::Rd).count();
    assert_eq!(count, 1);
}

#[test]
fn what_comes_from_another_address_is_dropped() {
    let mut w = World::new(1, |_, _| {});
    let (seen, done) = (w.conn.last_inbound, w.conn.channel.accepted());
    w.pass(MS);
    let message = World::control(0, Control::KeepAlive);
    let ea = StarHeader {
        ptype: Ptype::Ea,
        opt: Opt::Send,
        migrate: false,
        ack: false,
        qpn: SF_QPN,
        epoch: EPOCH as u8,
        psn: Psn::default(),
        addr: 0,
        len: 0,
    };
    for bytes in [&message[..], StarHead::to_stateful(ea).bytes()] {
        w.receive_from(&SF, bytes);
    }
    assert_eq!((w.conn.last_inbound, w.conn.channel.accepted()), (seen, done));
    assert_eq!(w.stats.star_drops.get(), 2);
    w.receive_from(&SL, &message);
    assert_eq!(w.conn.channel.accepted(), done.plus(1));
}
