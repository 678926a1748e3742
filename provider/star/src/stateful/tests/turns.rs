//! WRITEs of SF in their turn: many are under way, and each is seen when all before it are there.

use super::*;

const PAIRS: u64 = 20;
/// Bytes between two blocks, and of the longest.
const BLOCK: u64 = 6000;

/// Where block `n` lies in either region.
fn place(n: u64) -> u64 {
    4096 + n * BLOCK
}

/// Whether SL's card has written each block once, from its first byte to its last, then the flag, then the
/// next.
fn in_order(w: &World) -> bool {
    let (far, mut last, mut flags) = (w.theirs(64), (0, 0), 0);
    let offsets = w.sl.writes.iter().map(|addr| addr.wrapping_sub(far));
    offsets.filter(|at| *at == 0 || (place(0)..place(PAIRS)).contains(at)).all(|at| {
        let now = match at.checked_sub(place(0)) {
            Some(offset) => (2 * (offset / BLOCK) + 1, 1 + offset % BLOCK),
            None => (2 * flags + 2, 0),
        };
        flags += u64::from(at == 0);
        core::mem::replace(&mut last, now) < now
    })
}

/// A block of any length, then a flag, again and again, some with immediate data: whoever sees a flag sees
/// the blocks before it, and no copy of anything changes memory later.
#[test]
fn writes_land_in_their_order_whatever_the_wire_does() {
    let (mut early, mut again) = (0, 0);
    for seed in 0..120 {
        let mut w = World::with_window(seed, 64, |_, _| {});
        w.faults =
            Faults { loss: seed % 11, repeat: 3 * (seed % 7), late: 10 * (seed % 8), late_by: 150_000 };
        let (mine, far) = (w.ours(0), w.theirs(64));
        w.sl.put(far, &0u64.to_ne_bytes());
        let longest = [64, 1500, BLOCK][seed as usize % 3];
        let blocks: Vec<Vec<u8>> =
            (0..PAIRS).map(|n| pattern(1 + (w.rng.word() % longest) as usize, n as u8)).collect();
        for (n, block) in (0..PAIRS).zip(&blocks) {
            w.sf.put(mine + place(n), block);
            w.sf.put(mine + 8 * n, &(n + 1).to_ne_bytes());
            w.post(
                op(SendOp::Write, far + place(n), SL_KEY),
                &[w.sge(mine + place(n), block.len() as u32)],
                false,
            );
            let imm = seed % 4 == 3 && n % 3 == 0;
            if imm {
                w.sl_post_recv(&[]);
            }
            let kind = if imm { SendOp::WriteImm } else { SendOp::Write };
            w.post(op(kind, far, SL_KEY), &[w.sge(mine + 8 * n, 8)], false);
        }
        let mut most = 0;
        w.run(|w| {
            most = most.max(w.conn.streams[0].under_way());
            w.scq.0.borrow().len() == 2 * PAIRS as usize
        });
        assert!(w.sends().iter().all(|(_, status)| *status == WcStatus::Success), "seed {seed}");
        for (n, block) in (0..PAIRS).zip(&blocks) {
            assert_eq!(w.sl.read(far + place(n), block.len()), block, "seed {seed}: block {n}");
        }
        assert!(in_order(&w) && w.sl.word(far) == PAIRS, "seed {seed}");
        assert!(most > 8 || longest > 64 || seed % 4 == 3, "seed {seed}: {most} under way");
        early += w.stats.star_writes_early.get();
        again += w.stats.star_stale.get();
        /* the programs use their memory for something else */
        w.sl.put(far, &[0; 4096]);
        w.pass(1_000_000_000);
        assert!(w.sl.read(far, 4096) == [0; 4096], "seed {seed}: a late copy was written");
    }
    assert!(early > 100 && again > 100, "{early} were early, {again} came again");
}

/// Relaxed WRITEs to one place, as benchmarks make them, and long ones: none waits for another's answer. On a
/// path that loses packets relaxed ones to other places go by themselves.
#[test]
fn writes_to_one_place_are_under_way_together() {
    for (relaxed, lossy, len, apart) in [
        (true, false, 64, 0),
        (true, false, 60_000, 0),
        (false, false, 60_000, 0),
        (true, true, 1000, 1000),
        (true, true, 30_000, 30_000),
        (true, true, 30_000, 0),
    ] {
        let mut w = World::with_window(5, 64, |_, _| {});
        let (key, whole) = (SL_KEY + u32::from(relaxed), w.theirs(0));
        if relaxed {
            let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::RELAXED_ORDERING;
            let len = REGION as u64;
            let rule = MemoryRule { key, pd: SL_PD, qpn: 0, addr: whole, len, iova: whole, access };
            w.registry.add(w.conn.conn(), rule).unwrap();
        }
        if lossy {
            w.path.rtt.was_lost();
        }
        let (mine, far) = (w.ours(0), w.theirs(64));
        w.sf.put(mine, &pattern(len as usize, 7));
        for n in 0..4 {
            w.post(op(SendOp::Write, far + n * apart, key), &[w.sge(mine, len)], false);
        }
        let mut most = 0;
        w.run(|w| {
            most = most.max(w.conn.streams[0].under_way());
            w.scq.0.borrow().len() == 4
        });
        let what = std::format!("{relaxed} {lossy} {len} {apart}");
        assert!(w.sends().iter().all(|(_, status)| *status == WcStatus::Success), "{what}");
        assert!(w.sl.read(far + 3 * apart, len as usize) == pattern(len as usize, 7), "{what}");
        assert!(most > 1, "{what}: {most} under way");
    }
}

/// What lies behind a lost one is answered as early, and goes again at once: nothing waits for a timeout.
#[test]
fn one_that_is_lost_goes_again_before_its_time() {
    for behind in [3, 20] {
        let mut w = World::new(1, |_, _| {});
        let (mine, far) = (w.ours(0), w.theirs(64));
        w.cut = true;
        w.post(op(SendOp::Write, far, SL_KEY), &[w.sge(mine, 8)], false);
        w.pass(10_000);
        w.cut = false;
        for n in 0..behind {
            w.sf.put(mine + 8, &[9; 8]);
            w.post(op(SendOp::Write, far + 8 * n, SL_KEY), &[w.sge(mine + 8, 8)], false);
        }
        w.run(|w| w.scq.0.borrow().len() == 1 + behind as usize);
        assert_eq!((w.sl.read(far, 8), w.stats.timeouts.get()), (&[9; 8][..], 0), "{behind} behind it");
    }
}

/// What SL's card keeps does not go again: of many WRITEs, what was lost alone does.
#[test]
fn what_lies_behind_a_lost_one_is_kept() {
    let again = [0, 1].map(|seed| {
        let mut w = World::new(seed, |_, _| {});
        let (mine, far, len) = (w.ours(0), w.theirs(64), 3000);
        w.sf.put(mine, &pattern(len as usize, 3));
        w.cut = true;
        w.post(op(SendOp::Write, far, SL_KEY), &[w.sge(mine, len)], false);
        w.pass(1_000);
        w.cut = false;
        (0..5).for_each(|_| w.post(op(SendOp::Write, far, SL_KEY), &[w.sge(mine, len)], false));
        w.run(|w| w.sends().len() == 6);
        assert!(w.sl.read(far, len as usize) == pattern(len as usize, 3));
        assert_eq!(w.stats.timeouts.get(), 0);
        w.stats.star_retransmitted.get()
    });
    assert!((1..=4).contains(&again[0]) && again[1] > 10, "{again:?}");
}

/// WRITEs behind a SEND of several packets leave with it. Whoever sees them has the whole of it, and no copy
/// of anything changes memory later.
#[test]
fn writes_follow_a_send_whatever_the_wire_does() {
    let (mut early, mut together) = (0, 0);
    for seed in 0..120 {
        let mut w = World::with_window(seed, 64, |_, _| {});
        w.faults =
            Faults { loss: seed % 11, repeat: 3 * (seed % 7), late: 10 * (seed % 8), late_by: 150_000 };
        let (mine, far) = (w.ours(0), w.theirs(64));
        let data = pattern(3500, seed as u8);
        w.sf.put(mine, &data);
        for round in 0..6u64 {
            let (len, at) = ([3000, 1500, 2500][round as usize % 3], w.lib[1].done.len());
            w.sl_post_recv(&[w.sge(far + 8192, 4096)]);
            w.post(op(SendOp::Send, 0, 0), &[w.sge(mine + round, len)], false);
            w.post(op(SendOp::Write, far, SL_KEY), &[w.sge(mine + round, 64)], false);
            let sent = &data[round as usize..];
            w.sl.put(far, &[0xee; 64]);
            w.run(|w| w.sl.read(far, 64) == &sent[..64]);
            assert!(w.sl.read(far + 8192, len as usize) == &sent[..len as usize], "seed {seed}: {round}");
            together += usize::from(w.sends().len() == 2 * round as usize);
            w.run(|w| w.sends().len() == 2 * (round as usize + 1) && w.lib[1].done.len() == at + 1);
            w.sl.put(far + 8192, &[0xee; 4096]);
            w.pass(1_000_000);
            assert!(w.sl.read(far + 8192, 4096) == [0xee; 4096], "seed {seed}: a copy came late");
        }
        assert!(w.sends().iter().all(|(_, status)| *status == WcStatus::Success), "seed {seed}");
        early += w.stats.star_writes_early.get();
    }
    assert!(early > 100 && together > 100, "{early} were early, {together} times neither had its answer");
}

/// A WRITE with immediate behind a SEND that has turns, to the same buffer: what was posted last stays there.
#[test]
fn a_write_with_immediate_does_not_overtake_a_send() {
    let mut w = World::new(4, |_, _| {});
    let (far, mine) = (w.theirs(0), w.ours(0));
    w.sf.put(mine, &[1; 2000]);
    w.sf.put(mine + 4096, &[2; 100]);
    (0..2).for_each(|n| w.sl_post_recv(&[w.sge(far + 8192 * n, 4096)]));
    w.pass(1_000_000);
    w.cut = true;
    w.post(op(SendOp::Send, 0, 0), &[w.sge(mine, 2000)], false);
    w.pass(1_000);
    w.cut = false;
    w.post(SendWqe { imm: 7, ..op(SendOp::WriteImm, far, SL_KEY) }, &[w.sge(mine + 4096, 100)], false);
    w.run(|w| w.sends().len() == 2 && w.lib[1].done.len() == 2);
    assert_eq!((w.sl.read(far, 100), w.sl.read(far + 100, 1900)), (&[2; 100][..], &[1; 1900][..]));
}

/// As in the paper each waits for the one before.
#[test]
fn as_in_the_paper_one_is_under_way() {
    let mut w = World::new(1, |local, _| local.form = Form::Paper);
    let (mine, far) = (w.ours(0), w.theirs(64));
    for _ in 0..10 {
        w.post(op(SendOp::Write, far, SL_KEY), &[w.sge(mine, 8)], false);
    }
    let mut most = 0;
    w.run(|w| {
        most = most.max(w.conn.streams[0].under_way());
        w.scq.0.borrow().len() == 10
    });
    assert_eq!((most, w.stats.star_writes_early.get()), (1, 0));
}

/// All of a SEND is done, but SF has no answer, and knows only that SL's card kept all but the first packet.
/// The memory is gone: the last packet is asked for, and says that the SEND was in time.
#[test]
fn what_is_kept_is_asked_for_when_those_before_it_are_forgotten() {
    let mut w = World::new(0, |_, _| {});
    w.path.rtt.was_lost();
    let (mine, far) = (w.ours(0), w.theirs(64));
    w.sf.put(mine, &pattern(3500, 7));
    w.sl_post_recv(&[w.sge(far, 4096)]);
    w.pass(1_000_000);
    w.post(op(SendOp::Send, 0, 0), &[w.sge(mine, 3500)], false);
    w.lose_first();
    w.run(|w| w.stats.star_retransmitted.get() > 0);
    assert_eq!(w.stats.star_writes_early.get(), 3);
    w.deaf = true;
    w.run(|w| w.lib[1].done.len() == 1);
    w.registry.remove(w.conn.conn(), SL_KEY, w.now, 0);
    w.pass(1_000_000);
    w.deaf = false;
    w.run(|w| w.sends().len() == 1);
    assert_eq!(w.sends()[0].1, WcStatus::Success);
    assert_eq!(w.sl.read(far, 3500), pattern(3500, 7));
}

/// Packets of a SEND leave as one segmented send: none is longer than the first, the last with its completion
/// neither.
#[test]
fn packets_of_a_send_are_of_one_size() {
    for len in [977, 1000, 1921, 1951, 1952, 1953, 3500, 15_616] {
        let mut w = World::new(0, |_, _| {});
        w.sl_post_recv(&[w.sge(w.theirs(0), len)]);
        w.pass(1_000_000);
        w.post(op(SendOp::Send, 0, 0), &[w.sge(w.ours(0), len)], false);
        let lens = w.leave();
        let [first, middle @ .., last] = &lens[..] else { panic!("{lens:?}") };
        assert!(middle.iter().all(|len| len == first) && last <= first, "{lens:?}");
        w.run(|w| w.sends().len() == 1);
    }
}
