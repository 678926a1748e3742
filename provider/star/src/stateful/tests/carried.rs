//! Completions of SL that travel with the last data of their message.

use starverbs_core::congestion::WindowLimits;

use super::world::SL;
use super::*;

/// What left for SL's card since `from` packets had.
fn kinds(w: &World, from: usize) -> Vec<Ptype> {
    w.seen[from..].iter().map(|(ptype, _)| *ptype).collect()
}

/// The last data of a message brings SL's completion with it: nothing is owed when SF's own is there.
#[test]
fn a_short_message_is_one_packet_and_one_answer() {
    let mut w = World::new(4, |_, _| {});
    let (far, mine) = (w.theirs(0), w.ours(0));
    (0..6).for_each(|n| w.sl_post_recv(&[w.sge(far + 1024 * n, 1024)]));
    w.pass(1_000_000);
    let before = w.seen.len();
    w.post(op(SendOp::Send, 0, 0), &[w.sge(mine, 64)], false);
    w.post(SendWqe { imm: 7, ..op(SendOp::WriteImm, far, SL_KEY) }, &[w.sge(mine, 992)], false);
    w.run(|w| w.scq.0.borrow().len() == 2);
    assert!(!w.conn.owes(w.now) && w.lib[1].done.len() == 2);
    assert_eq!(kinds(&w, before), [Ptype::Rdc; 2]);
    let [(_, send), (_, write)] = [0, 1].map(|n| w.lib[1].done[n]);
    assert_eq!((send.byte_len, send.opcode), (64, WcOpcode::Recv));
    assert_eq!((write.byte_len, write.imm, write.opcode), (992, 7, WcOpcode::RecvRdmaWithImm));
    /* what has no room beside its completion is two packets, and holds nobody up */
    let before = w.seen.len();
    w.post(op(SendOp::Send, 0, 0), &[w.sge(mine, 993)], false);
    w.post(op(SendOp::Send, 0, 0), &[w.sge(mine, 64)], false);
    w.run(|w| w.lib[1].done.len() == 4);
    w.pass(1_000_000);
    assert_eq!(kinds(&w, before), [Ptype::Rd, Ptype::Rdc, Ptype::Rdc]);
    assert_eq!([2, 3].map(|n| w.lib[1].done[n].1.byte_len), [993, 64]);
}

/// Short messages that are posted together are one packet and have one answer. What is lost of them is sent
/// again one by one.
#[test]
fn short_messages_leave_together() {
    for lost in [false, true] {
        let mut w = World::new(4, |_, _| {});
        let (far, mine, lens) = (w.theirs(0), w.ours(0), [32, 1, 256, 257, 8]);
        w.sf.put(mine, &pattern(300, 3));
        (0..5).for_each(|n| w.sl_post_recv(&[w.sge(far + 1024 * n, 1024)]));
        w.pass(1_000_000);
        let before = w.seen.len();
        (0..5).zip(lens).for_each(|(n, len)| w.post(op(SendOp::Send, 0, 0), &[w.sge(mine + n, len)], false));
        w.cut = lost;
        w.step();
        assert_eq!(kinds(&w, before), [Ptype::Rdcs, Ptype::Rdc, Ptype::Rdc]);
        w.cut = false;
        w.run(|w| w.sends().len() == 5 && w.lib[1].done.len() == 5);
        let again = &kinds(&w, before)[3..];
        assert!(again.len() == if lost { 5 } else { 0 } && again.iter().all(|kind| *kind == Ptype::Rdc));
        for (n, len) in (0..5).zip(lens) {
            let (seq, message) = w.lib[1].done[n as usize];
            assert_eq!((seq, message.byte_len), (n as u32, len));
            let data = &pattern(300, 3)[n as usize..][..len as usize];
            assert!(w.sl.read(far + 1024 * n, len as usize) == data, "{n}");
        }
    }
}

/// The answer was lost, and SL's program has deregistered the buffer: it has the message all the same.
#[test]
fn who_has_taken_its_rule_away_is_asked_whether_it_has_the_message() {
    for (has_it, len) in [(true, 64), (false, 64), (true, 3000), (false, 3000)] {
        let mut w = World::new(4, |_, _| {});
        w.sl_post_recv(&[w.sge(w.theirs(0), 4096)]);
        w.pass(1_000_000);
        (w.deaf, w.cut) = (has_it, !has_it);
        w.post(op(SendOp::Send, 0, 0), &[w.sge(w.ours(0), len)], false);
        w.pass(100_000);
        assert_eq!(w.lib[1].done.len(), usize::from(has_it));
        let conn = w.conn.conn();
        w.registry.remove(conn, SL_KEY, w.now, 0);
        (w.deaf, w.cut) = (false, false);
        w.run(|w| w.sends().len() == 1 && w.lib[1].done.len() == 1);
        let (ours, theirs) = match has_it {
            true => (WcStatus::Success, WcStatus::Success),
            false => (WcStatus::RemOpErr, WcStatus::LocProtErr),
        };
        assert_eq!((w.sends()[0].1, w.lib[1].done[0].1.status), (ours, theirs));
        assert_eq!(w.stats.star_rejects.get(), 0, "nothing was to leave for that memory");
    }
}

/// SL has its READ, and SF's program, told by SL's, has deregistered what was read before SF has the answer.
#[test]
fn who_reads_what_is_deregistered_since_is_asked_whether_it_has_it() {
    for has_it in [true, false] {
        let mut w = World::new(4, |_, _| {});
        let (far, mine, key) = (w.theirs(0), w.ours(0), w.sf_key);
        w.sl_post(op(SendOp::Read, mine, key), &[w.sge(far, 100)], false);
        w.step();
        (w.deaf, w.cut) = (false, !has_it);
        w.run(|w| w.seen.iter().any(|(ptype, _)| *ptype == Ptype::Rdc));
        w.deaf = true;
        w.pass(20_000);
        assert_eq!(w.sl_outstanding(0), usize::from(!has_it));
        w.mrs.deregister(key).expect("it is registered");
        (w.deaf, w.cut) = (false, false);
        w.pass(50_000_000);
        let status = if has_it { WcStatus::Success } else { WcStatus::RemAccessErr };
        assert_eq!(w.lib[0].done.iter().map(|(_, cqe)| cqe.status).collect::<Vec<_>>(), [status]);
        let events: &[AsyncEvent] = if has_it { &[] } else { &[AsyncEvent::QpAccessErr(0x11)] };
        assert_eq!(w.sf.events, events);
    }
}

/// A message that has the connection for itself leaves as a whole. Of others the last packet leaves when all
/// before it are answered; what is behind such a message does not wait for it.
#[test]
fn the_last_packet_of_a_message_waits_for_the_others() {
    let mut w = World::new(4, |_, _| {});
    let (far, mine, data) = (w.theirs(0), w.ours(0), pattern(2500, 9));
    w.sf.put(mine, &data);
    (0..3).for_each(|n| w.sl_post_recv(&[w.sge(far + 4096 * n, 4096)]));
    w.pass(1_000_000);
    let before = w.seen.len();
    (0..2).for_each(|_| w.post(op(SendOp::Send, 0, 0), &[w.sge(mine, 2500)], false));
    w.step();
    assert_eq!(kinds(&w, before), [Ptype::Rd, Ptype::Rd, Ptype::Rdc, Ptype::Rd, Ptype::Rd], "of both");
    w.run(|w| w.sends().len() == 2);
    assert_eq!(kinds(&w, before)[5..], [Ptype::Rdc]);
    assert!(!w.conn.owes(w.now) && w.lib[1].done.len() == 2);
    assert!((0..2).all(|n| w.sl.read(far + 4096 * n, 2500) == data));
    /* a WRITE with immediate, too */
    let before = w.seen.len();
    w.post(SendWqe { imm: 7, ..op(SendOp::WriteImm, far, SL_KEY) }, &[w.sge(mine + 1, 2000)], false);
    w.run(|w| w.sends().len() == 3);
    assert_eq!(kinds(&w, before), [Ptype::Rd, Ptype::Rdc]);
    assert!(w.lib[1].done.len() == 3 && w.sl.read(far, 2000) == &data[1..2001]);
}

/// SL's program may use its buffer again at once: by then no copy of any packet is under way.
#[test]
fn a_late_copy_finds_no_buffer_that_is_in_use_again() {
    for seed in 0..200 {
        let mut w = World::new(seed, |_, _| {});
        w.faults = Faults { loss: 20, late: 20, ..Faults::default() };
        let (far, mine) = (w.theirs(0), w.ours(0));
        for turn in 0..4u8 {
            let data = pattern(3900, turn);
            w.sf.put(mine, &data);
            w.sl_post_recv(&[w.sge(far, 4096)]);
            w.post(op(SendOp::Send, 0, 0), &[w.sge(mine, 3900)], false);
            w.run(|w| w.lib[1].done.len() == usize::from(turn) + 1);
            assert!(w.sl.read(far, 3900) == data, "seed {seed}: it is not all there");
            w.sl.put(far, &[0xee; 4096]);
            w.run(|w| w.sends().len() == usize::from(turn) + 1);
            w.pass(1_000_000);
            assert!(w.sl.read(far, 4096) == [0xee; 4096], "seed {seed}: a copy came late");
        }
    }
}

/// The buffer is deregistered while the last packet waits: the request ends as one whose rule is no more.
#[test]
fn a_rule_goes_while_the_last_packet_waits() {
    let mut w = World::new(4, |_, _| {});
    w.sl_post_recv(&[w.sge(w.theirs(0), 1500), w.sge(w.theirs(4096), 1500)]);
    w.pass(1_000_000);
    w.deaf = true;
    w.post(op(SendOp::Send, 0, 0), &[w.sge(w.ours(0), 2000)], false);
    w.pass(100_000);
    let conn = w.conn.conn();
    w.registry.remove(conn, SL_KEY, w.now, 0);
    w.deaf = false;
    w.run(|w| w.sends().len() == 1 && w.lib[1].done.len() == 1);
    assert_eq!((w.sends()[0].1, w.lib[1].done[0].1.status), (WcStatus::RemOpErr, WcStatus::LocProtErr));
    assert!(!w.seen.iter().any(|(ptype, _)| *ptype == Ptype::Rdc));
}

/// The completion of SL's READ comes with its last data, whatever other READs are under way.
#[test]
fn a_read_of_sl_brings_its_completion() {
    let mut w = World::new(4, |_, _| {});
    let (far, mine, data, key) = (w.theirs(0), w.ours(0), pattern(3500, 9), w.sf_key);
    w.sf.put(mine, &data);
    w.pass(1_000_000);
    let before = w.seen.len();
    w.sl_post(op(SendOp::Read, mine, key), &[w.sge(far, 100), w.sge(far + 4096, 2000)], false);
    w.sl_post(op(SendOp::Read, mine, key), &[w.sge(far + 8192, 900)], false);
    w.run(|w| w.sl_outstanding(0) == 0);
    w.pass(1_000_000);
    let mut sent = kinds(&w, before);
    sent.retain(|ptype| *ptype != Ptype::Ea);
    assert_eq!(sent, [Ptype::Rd, Ptype::Rd, Ptype::Rdc, Ptype::Rdc]);
    assert!([w.sl.read(far, 100), w.sl.read(far + 4096, 2000)].concat() == data[..2100]);
    assert!(w.sl.read(far + 8192, 900) == &data[..900]);
    let done = w.lib[0].done.iter().map(|(_, cqe)| (cqe.opcode, cqe.byte_len, cqe.status));
    let read = |len| (WcOpcode::RdmaRead, len, WcStatus::Success);
    assert_eq!(done.collect::<Vec<_>>(), [read(2100), read(900)]);
    /* an unsignaled one has none */
    let before = w.seen.len();
    let quiet = SendWqe { flags: SendFlags::empty(), ..op(SendOp::Read, mine, key) };
    w.sl_post(quiet, &[w.sge(far, 100)], false);
    w.pass(1_000_000);
    assert!(kinds(&w, before).contains(&Ptype::Rd) && !kinds(&w, before).contains(&Ptype::Rdc));
}

/// SF's program takes its end to ERR while the completion of SL's READ may be with SL: SL finds out, by that
/// request or by the next.
#[test]
fn who_has_its_read_learns_of_the_end_by_the_next_request() {
    for has_it in [true, false] {
        let mut w = World::new(4, |_, _| {});
        let (far, mine, key) = (w.theirs(0), w.ours(0), w.sf_key);
        w.sl_post(op(SendOp::Read, mine, key), &[w.sge(far, 100)], false);
        /* the WQEP is on its way */
        w.step();
        (w.deaf, w.cut) = (false, !has_it);
        w.run(|w| w.seen.iter().any(|(ptype, _)| *ptype == Ptype::Rdc));
        w.deaf = true;
        w.pass(20_000);
        assert_eq!(w.sl_outstanding(0), usize::from(!has_it));
        w.fail();
        (w.cut, w.deaf) = (false, false);
        w.pass(50_000_000);
        let status = |w: &World| w.lib[0].done.iter().map(|(_, cqe)| cqe.status).collect::<Vec<_>>();
        let first = if has_it { WcStatus::Success } else { WcStatus::RetryExcErr };
        assert_eq!(status(&w), [first]);
        w.sl_post(op(SendOp::Read, mine, key), &[w.sge(far, 100)], false);
        w.pass(50_000_000);
        assert_eq!(status(&w), [first, WcStatus::RetryExcErr]);
    }
}

/// The answer was lost, and SF's program, told by SL's, has deregistered what it sent: it is there all the
/// same.
#[test]
fn who_has_deregistered_what_came_is_told_so() {
    for len in [800, 2000] {
        let mut w = World::new(4, |_, _| {});
        w.sl_post_recv(&[w.sge(w.theirs(0), 4096)]);
        w.pass(1_000_000);
        w.deaf = true;
        w.post(op(SendOp::Send, 0, 0), &[w.sge(w.ours(0), len)], false);
        w.pass(20_000);
        assert_eq!(w.lib[1].done.len(), 1);
        w.mrs.deregister(w.sf_key).expect("it is registered");
        w.deaf = false;
        w.run(|w| w.sends().len() == 1);
        assert_eq!(w.sends()[0].1, WcStatus::Success, "{len}");
    }
}

/// A message that the path does not take as a whole has no turns: its last packet would wait for answers for
/// which the others do not ask. Nothing comes to a timeout.
#[test]
fn a_message_beyond_the_window_asks_for_answers() {
    for max in [16 << 10, 64 << 10] {
        let mut w = World::new(4, |_, _| {});
        w.path = Path::new(&SL, &WindowLimits { max, delay_target: None });
        for n in 0..4 {
            w.sl_post_recv(&[w.sge(w.theirs(0), 32_768)]);
            w.pass(1_000_000);
            w.post(op(SendOp::Send, 0, 0), &[w.sge(w.ours(0), 15_000)], false);
            w.run(|w| w.sends().len() == n + 1);
        }
        assert_eq!((w.stats.timeouts.get(), w.stats.star_retransmitted.get()), (0, 0), "{max}");
    }
}

/// An RDAS answers what came together, if it names where the last of it went.
#[test]
fn one_answer_to_many_packets_names_the_address_of_the_last() {
    let mut w = World::new(4, |_, _| {});
    let far = w.theirs(0);
    (0..4).for_each(|n| w.sl_post_recv(&[w.sge(far + 64 * n, 64)]));
    w.pass(1_000_000);
    let before = w.seen.len();
    w.deaf = true;
    (0..4).for_each(|n| w.post(op(SendOp::Send, 0, 0), &[w.sge(w.ours(64 * n), 64)], false));
    w.run(|w| w.seen.len() == before + 1);
    w.deaf = false;
    let header = |psn, addr, len| StarHeader {
        ptype: Ptype::Rdas,
        opt: Opt::Send,
        migrate: false,
        ack: false,
        qpn: SF_QPN,
        epoch: EPOCH.to_be_bytes()[3],
        psn: Psn::new(psn),
        addr,
        len,
    };
    let last = far + 64 * 3;
    for (psn, addr, len) in [(12, far, 4), (16, last, 4), (8, last, 3), (12, last, 0)] {
        w.receive(header(psn, addr, len));
        assert!(w.sends().is_empty(), "{psn} {addr:#x} {len}");
    }
    assert_eq!(w.stats.star_drops.get(), 4);
    w.receive(header(12, last, 4));
    assert_eq!(w.sends().len(), 4);
    w.receive(header(12, last, 4));
    assert_eq!((w.stats.star_drops.get(), w.sends().len()), (4, 4), "it leaves twice");
}

/// SL asks how far its sends are while one is here that waits for a receive: the report takes no place that
/// this one's completion has room in.
#[test]
fn a_report_has_a_place_of_its_own() {
    let mut w = World::new(4, |_, _| {});
    let (far, mine, key) = (w.theirs(0), w.ours(0), w.sf_key);
    let quiet = SendWqe { flags: SendFlags::empty(), ..op(SendOp::Read, mine, key) };
    w.sl_post(quiet, &[w.sge(far, 100)], false);
    w.pass(1_000_000);
    w.sl_post(op(SendOp::Send, 0, 0), &[w.sge(far, 8)], true);
    w.pass(1_000_000);
    w.cut = true;
    w.conn.report();
    w.post_recv(7, &[w.sge(w.ours(4096), 8)]);
    w.pass(10_000_000);
    assert_eq!(w.conn.completions[0].range().count(), 2, "nothing came to SL");
    w.cut = false;
    w.run(|w| w.sl_outstanding(0) == 0);
}
