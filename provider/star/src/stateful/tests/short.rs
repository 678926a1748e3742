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
