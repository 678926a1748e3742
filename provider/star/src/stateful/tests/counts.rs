//! What both ends count of the packets between them, and what the card of SL has when none is there.

use super::*;
use crate::form::Form;
use crate::stateless;

/// Both ends count the kinds of packets that pass between them, and what comes twice is no packet that
/// answers nothing.
#[test]
fn each_end_counts_the_packets_that_it_sends_and_gets() {
    let mut w = World::new(4, |_, _| {});
    let (mine, far, key) = (w.ours(0), w.theirs(0), w.sf_key);
    w.sl_post_recv(&[w.sge(far + 8192, 64)]);
    w.post(op(SendOp::Write, far, SL_KEY), &[w.sge(mine, 3000)], false);
    w.post(op(SendOp::Read, far, SL_KEY), &[w.sge(mine, 2000)], false);
    w.post(op(SendOp::FetchAdd, far, SL_KEY), &[w.sge(mine, 8)], false);
    w.post(op(SendOp::Send, 0, 0), &[w.sge(mine, 64)], false);
    w.sl_post(op(SendOp::Write, mine, key), &[w.sge(far + 4096, 1000)], false);
    w.run(|w| w.scq.0.borrow().len() == 4 && w.sl_outstanding(0) + w.sl_outstanding(1) == 0);
    w.pass(20_000_000);
    let s = &w.stats;
    let sent = [&s.star_sent_rd, &s.star_sent_gd, &s.star_sent_cqep, &s.star_rcvd_wqep].map(|c| c.get());
    assert_eq!(sent, [3 + 1, 2 + 1 + 1, 2, 2]);
    assert_eq!([&s.star_rd, &s.star_gd, &s.star_atomics, &s.star_cqep].map(|c| c.get()), [4, 3, 1, 2]);
    assert_eq!((s.star_drops.get(), s.star_retransmitted.get()), (0, 0));

    /* SL's card has no CPU for a while: a completion is sent again, and its answer comes again */
    let mut w = World::new(5, |_, _| {});
    w.sl_post_recv(&[]);
    w.post(op(SendOp::Write, far, SL_KEY), &[w.sge(mine, 1)], false);
    w.run(|w| w.scq.0.borrow().len() == 1);
    w.held = w.now + 20_000_000;
    w.post(op(SendOp::Send, 0, 0), &[], false);
    w.run(|w| w.sl_outstanding(1) == 0);
    w.pass(20_000_000);
    assert!(w.stats.star_stale.get() > 0 && w.stats.star_drops.get() == 0);
}

/// The card of SL is what borrows its host's memory table, slots and counters while it handles a packet: it
/// owns nothing, and what it knows of connections was in the packet.
#[test]
fn the_stateless_half_is_thrown_away_and_built_anew_between_any_two_packets() {
    const { assert!(!core::mem::needs_drop::<stateless::StatelessCard<'_>>()) };
    let mut all = [0; 4];
    for seed in 60..90 {
        let w = hostile(seed);
        let s = &w.stats;
        let done = [&s.star_rd, &s.star_gd, &s.star_atomics, &s.star_cqep].map(|count| count.get());
        all.iter_mut().zip(done).for_each(|(all, done)| *all += done);
        let again = s.star_atomics_again.get() + s.star_stale.get();
        /* and EAs, which nobody counts; a completion may have come with an RD */
        let [rd, gd, atomics, _] = done;
        assert!(w.cards >= rd + gd + atomics + again, "seed {seed}: a card had two packets");
    }
    assert!(all.iter().all(|count| *count > 0), "{all:?}");
}

/// SL announces deep queues, and has SF make room in them; SF keeps no more than its host lets it have.
#[test]
fn what_is_kept_of_a_peers_queues_is_what_the_host_allows() {
    let mut w = World::new(6, |_, setup| setup.rq_depth = 1 << 16);
    w.sf.most = 1 << 20;
    w.receive_wqe(0, 1);
    let kept = w.sf.kept.get();
    assert!(kept > 0 && w.stats.star_rcvd_wqep.get() == 1);
    for (seq, sges) in [((1 << 16) - 1, 32), (1 << 16, 1), (1 << 20, 0)] {
        w.receive_wqe(seq, sges);
        assert!(w.conn.bytes() < 1 << 20, "{seq}: {} bytes", w.conn.bytes());
    }
    assert_eq!((w.stats.star_rcvd_wqep.get(), w.sf.kept.get()), (1, kept), "none was taken");
    /* one for which there is room is */
    w.receive_wqe(100, 4);
    assert!(w.stats.star_rcvd_wqep.get() == 2 && w.sf.kept.get() > kept);
    assert_eq!(w.close().kept.get(), 0);
}

/// WQEPs that came in one frame have one answer; as in the paper each has its own.
#[test]
fn wqeps_of_one_frame_have_one_answer() {
    for (form, answers) in [(Form::Packed, 1), (Form::Paper, 8)] {
        let mut w = World::new(8, |local, _| local.form = form);
        (0..8).for_each(|_| w.sl_post_recv(&[]));
        w.run(|w| w.stats.star_rcvd_wqep.get() == 8);
        w.pass(20_000_000);
        let sent = w.seen.iter().filter(|(ptype, _)| *ptype == Ptype::Ea);
        assert_eq!(sent.count(), answers, "{form:?}");
    }
}

/// The EA of receives waits for nothing where no packet of SF is there that could take it along.
#[test]
fn receives_that_come_to_an_idle_end_have_their_ea_at_once() {
    let mut w = World::new(6, |_, _| {});
    w.receive_wqe(0, 1);
    assert_eq!((w.conn.owed_acks.is_owed(), w.sf.out.len()), (false, 1));
    w.receive_wqe(0, 1);
    assert_eq!((w.conn.owed_acks.is_owed(), w.sf.out.len()), (false, 2), "the first was lost, or late");
    /* what is posted says it */
    let at = w.ours(0);
    w.post(op(SendOp::Send, 0, 0), &[w.sge(at, 1)], true);
    w.receive_wqe(1, 1);
    assert_eq!((w.conn.owed_acks.is_owed(), w.sf.out.len()), (true, 2));
    w.run(|w| w.sends().len() == 1);
    let own = w.seen.iter().filter(|(ptype, _)| *ptype == Ptype::Ea);
    assert_eq!(own.count(), 2);
}

/// It waits where an answer is to come, and the program then told of that, and where it was just told.
#[test]
fn the_ea_of_receives_waits_for_what_the_program_may_send() {
    let mut w = World::new(6, |_, _| {});
    (0..2).for_each(|seq| w.receive_wqe(seq, 1));
    w.cut = true;
    let at = w.ours(0);
    w.post(op(SendOp::Send, 0, 0), &[w.sge(at, 1)], true);
    w.run(|w| !w.conn.window.is_empty());
    w.receive_wqe(2, 1);
    assert!(w.conn.owed_acks.is_owed(), "a SEND is under way");
}
