//! The short way of short messages, beside the general one.

use super::*;

const MS: Nanos = 1_000_000;

/// After SENDs into receives of so many places, the first of which takes each message.
fn run(seed: u64, places: usize) -> World {
    let mut w = World::new(seed, |_, _| {});
    w.faults = Faults { loss: 8, repeat: 4, late: 4, ..Faults::default() };
    let (far, mine, count) = (w.theirs(0), w.ours(0), 60);
    let len = |n: u64| [64, 1, 256, 300, 0, 976, 8][n as usize % 7];
    w.sf.put(mine, &pattern(2000, 5));
    for n in 0..count {
        let to = far + 2048 * n;
        w.sl_post_recv(&[w.sge(to, 1024), w.sge(to + 1024, 8)][..places]);
        let (kind, imm) = if n % 5 == 0 { (SendOp::SendImm, n as u32) } else { (SendOp::Send, 0) };
        w.post(SendWqe { imm, ..op(kind, 0, 0) }, &[w.sge(mine + n, len(n))], n % 3 == 0);
        if n % 4 == 3 {
            w.run(|w| w.sends().len() as u64 + seed % 4 > n);
        }
    }
    w.run(|w| w.sends().len() as u64 == count && w.lib[1].done.len() as u64 == count);
    for n in 0..count {
        let (seq, message) = w.lib[1].done[n as usize];
        let imm = if n % 5 == 0 { n as u32 } else { 0 };
        assert_eq!((seq, message.byte_len, message.imm), (n as u32, len(n), imm), "seed {seed}");
        let data = &pattern(2000, 5)[n as usize..][..len(n) as usize];
        assert!(w.sl.read(far + 2048 * n, len(n) as usize) == data, "seed {seed}: {n}");
    }
    w
}

/// A receive of two places has the general way: the packets are the same, at the same times, whatever the
/// wire does, and wherever one way takes over from the other.
#[test]
fn the_short_way_does_what_the_general_one_does() {
    for seed in 0..60 {
        let [short, general] = [1, 2].map(|places| run(seed, places));
        assert_eq!((short.seen, short.now), (general.seen, general.now), "seed {seed}");
    }
}

/// After READs into so many places, some behind a fence, with WRITEs and SENDs between them.
fn run_reads(seed: u64, places: usize) -> World {
    let mut w = World::new(seed, |_, _| {});
    w.faults = Faults { loss: 8, repeat: 4, late: 4, ..Faults::default() };
    let (far, mine, count) = (w.theirs(0), w.ours(0), 60);
    let len = |n: u64| [64, 2, 256, 1024, 1025, 976, 8][n as usize % 7];
    w.sl.put(far, &pattern(2000, 5));
    for n in 0..count {
        let (to, rest) = (mine + 2048 * n, len(n) / 2);
        let halves = [w.sge(to, len(n) - rest), w.sge(to + u64::from(len(n) - rest), rest)];
        let whole = [w.sge(to, len(n))];
        let mut wqe = op(SendOp::Read, far + n, SL_KEY);
        wqe.flags.set(SendFlags::FENCE, n % 5 == 0);
        w.post(wqe, if places == 1 { &whole } else { &halves }, false);
        match n % 8 {
            3 => w.post(op(SendOp::Write, far + 8192, SL_KEY), &[w.sge(mine, 8)], false),
            6 => {
                w.sl_post_recv(&[w.sge(far + 4096, 64)]);
                w.post(op(SendOp::Send, 0, 0), &[w.sge(mine, 8)], false);
            }
            _ => (),
        }
        if n % 4 == 3 {
            w.run(|w| w.sends().len() as u64 + seed % 4 > n);
        }
    }
    let all = count + (count + 4) / 8 + (count + 1) / 8;
    w.run(|w| w.sends().len() as u64 == all);
    assert!(w.sends().iter().all(|(_, status)| *status == WcStatus::Success), "seed {seed}");
    for n in 0..count {
        let data = &pattern(2000, 5)[n as usize..][..len(n) as usize];
        assert!(w.sf.read(mine + 2048 * n, len(n) as usize) == data, "seed {seed}: {n}");
    }
    w
}

/// A READ into two places has the general way.
#[test]
fn short_reads_do_what_others_do() {
    for seed in 0..60 {
        let [short, general] = [1, 2].map(|places| run_reads(seed, places));
        assert_eq!((short.seen, short.now), (general.seen, general.now), "seed {seed}");
    }
}

/// What the WQE says of its length is more than its one SGE has, or names no memory.
#[test]
fn a_read_goes_no_further_than_its_place() {
    for (len, key) in [(0, 0), (0, 1), (1, 0), (63, 0), (64, 1), (u32::MAX, 0)] {
        let mut w = World::new(1, |_, _| {});
        let place = w.sge(w.ours(0), len);
        let wqe = SendWqe { length: 64, ..op(SendOp::Read, w.theirs(0), SL_KEY) };
        w.sl.put(w.theirs(0), &pattern(64, 5));
        w.sf.put(w.ours(0), &[0; 64]);
        w.post_any(wqe, &[Sge { lkey: place.lkey + key, ..place }]);
        w.run(|w| !w.sends().is_empty());
        let fits = len >= 64 && key == 0;
        let status = if fits { WcStatus::Success } else { WcStatus::LocProtErr };
        assert_eq!(w.sends(), [(0, status)], "{len} {key}");
        let data = if fits { pattern(64, 5) } else { [0; 64].to_vec() };
        assert!(w.sf.read(w.ours(0), 64) == data, "{len} {key}");
    }
}

/// The answer to a short READ completes it by the short way; any other does nothing there, nor does one for
/// which the memory is no more.
#[test]
fn a_short_read_takes_its_own_answer() {
    for gone in [false, true] {
        let mut w = World::new(1, |_, _| {});
        w.sf.put(w.ours(0), &[0; 200]);
        w.post(op(SendOp::Read, w.theirs(0), SL_KEY), &[w.sge(w.ours(0), 64)], false);
        w.pass(1);
        let data = pattern(65, 9);
        for (psn, addr, len) in [(1, 0, 64), (4, 0, 64), (0, 8, 64), (0, 0, 63), (0, 0, 65), (0, 0, 0)] {
            assert!(!w.read_short(psn, addr, &data[..len]), "{psn} {addr} {len}");
        }
        assert!(w.sf.read(w.ours(0), 65) == [0; 65] && w.sends().is_empty());
        if gone {
            w.mrs.deregister(w.sf_key).unwrap();
        }
        assert_eq!([w.read_short(0, 0, &data[..64]), w.read_short(0, 0, &data[..64])], [!gone, false]);
        let (done, there) = if gone { (0, 0) } else { (1, 64) };
        assert!(w.sf.read(w.ours(0), there) == &data[..there] && w.sends().len() == done);
        assert!(w.sf.read(w.ours(there as u64), 65) == [0; 65]);
    }
}

/// SL has answered no completion for a while: of what our program posts then one packet leaves, until it
/// answers.
#[test]
fn a_silent_peer_gets_one_packet() {
    let mut w = World::new(1, |_, _| {});
    w.post_recv(1, &[w.sge(w.ours(0), 64)]);
    (0..10).for_each(|_| w.sl_post_recv(&[w.sge(w.theirs(0), 64)]));
    w.sl_post(op(SendOp::Send, 0, 0), &[w.sge(w.theirs(0), 64)], false);
    w.run(|w| w.rcq.0.borrow().len() == 1);
    w.deaf = true;
    w.pass(20 * MS);
    assert!(w.conn.backoff > 0);
    (0..10).for_each(|_| w.post(op(SendOp::Send, 0, 0), &[w.sge(w.ours(0), 64)], false));
    w.pass(MS / 100);
    assert_eq!(w.seen.iter().filter(|(ptype, _)| *ptype == Ptype::Rdc).count(), 1);
}
