//! READs and all that is answered with more than an ACK, at SRQs of other cards, on virtual time.

use crate::common::shared::{QPS, SENDER, Shared, region};
use crate::common::{any_bytes, any_faults, any_size, for_seeds};
use starverbs_core::relay::{Relay, RelayOutcome};
use starverbs_core::wire::headers::Feth;
use starverbs_core::wire::{HeaderBuf, PKEY_DEFAULT, code};
use starverbs_core::{
    Access, AsyncEvent, FlushLevel, FrameMeta, Mtu, Placement, Psn, QPN_BLOCK_SHIFT, QpState, SendOp,
    SendWqe, Sge, WcStatus,
};
use starverbs_sim::{Faults, Rng, Setup};

const ANSWERED: [SendOp; 5] =
    [SendOp::Read, SendOp::FetchAdd, SendOp::CmpSwap, SendOp::AtomicWrite, SendOp::Flush];

const FLUSH: u32 = Feth::word(Placement::GLOBAL, FlushLevel::Range);

impl Shared {
    /// Memory of queue `to`'s protection domain, and of the sender.
    fn memory(&mut self, to: usize, len: u32) -> Sge {
        region(&mut self.net.hosts[self.queues[to].host], self.queues[to].pd, len)
    }

    fn here(&mut self, len: u32) -> Sge {
        let pd = self.net.hosts[SENDER].pd;
        region(&mut self.net.hosts[SENDER], pd, len)
    }

    fn bytes(&self, to: usize, at: Sge) -> &[u8] {
        self.net.hosts[self.queues[to].host].env.memory.read(at.addr, at.len as usize)
    }

    fn word(&self, to: usize, at: Sge) -> u64 {
        self.net.hosts[self.queues[to].host].env.memory.word(at.addr)
    }

    fn brought(&self, at: Sge) -> &[u8] {
        self.net.hosts[SENDER].env.memory.read(at.addr, at.len as usize)
    }

    fn statuses(&self) -> Vec<WcStatus> {
        self.sent().iter().map(|cqe| cqe.status).collect()
    }
}

fn wqe(op: SendOp, there: Sge) -> SendWqe {
    let (imm, compare_add) = if op == SendOp::Flush { (FLUSH, u64::from(there.len)) } else { (0, 0) };
    SendWqe { op, remote_addr: there.addr, rkey: there.lkey, imm, compare_add, ..SendWqe::default() }
}

/// What a READ or atomic must bring.
enum Want {
    Nothing,
    Bytes(Sge, Vec<u8>),
    Word(Sge, u64),
}

/// Every verb over two QPs to three cards' SRQs, on wires that lose, repeat and turn round, with cards that
/// sleep. Atomics change words that nobody else does, so that what each finds shows that all before it were
/// executed once.
fn traffic(seed: u64) {
    let mut rng = Rng::new(seed);
    let faults = any_faults(&mut rng);
    let mtu = rng.pick(&[Mtu::M256, Mtu::M1024]);
    let mut x = Shared::new(faults, seed, &Setup { timeout: 20, mtu, ..Setup::default() });
    for host in &mut x.net.hosts {
        host.env.link_room = rng.pick(&[1, 5, 64]);
        host.env.port = rng.pick(&[1, 3, 64]);
    }
    /* of each QP at each queue, so that the order is known */
    let words = [(); 2].map(|()| [0, 1, 2].map(|to| x.memory(to, 8)));
    let mut found = words.map(|of| [0, 1, 2].map(|to| x.word(to, of[to])));
    let mut wants = Vec::new();
    for n in 0..40u64 {
        let (qp, to) = (rng.below(2) as usize, rng.below(3) as usize);
        let (word, now) = (words[qp][to], &mut found[qp][to]);
        let op = rng.pick(&[
            SendOp::Read,
            SendOp::Read,
            SendOp::FetchAdd,
            SendOp::CmpSwap,
            SendOp::AtomicWrite,
            SendOp::Flush,
            SendOp::Write,
            SendOp::Send,
        ]);
        let request = SendWqe { wr_id: n, ..wqe(op, word) };
        let here = x.here(8);
        let want = match op {
            SendOp::Read => {
                let data = {
                    let len = any_size(&mut rng, mtu.bytes());
                    any_bytes(&mut rng, len)
                };
                let there = x.memory(to, data.len() as u32);
                let host = x.queues[to].host;
                x.net.hosts[host].env.memory.write(there.addr, &data);
                let here = x.here(data.len() as u32);
                x.post(qp, to, SendWqe { wr_id: n, ..wqe(op, there) }, here);
                Want::Bytes(here, data)
            }
            SendOp::FetchAdd => {
                x.post(qp, to, SendWqe { compare_add: n + 1, ..request }, here);
                Want::Word(here, std::mem::replace(now, now.wrapping_add(n + 1)))
            }
            SendOp::CmpSwap => {
                let right = rng.chance(0.8);
                let compare_add = if right { *now } else { !*now };
                x.post(qp, to, SendWqe { compare_add, swap: n << 32, ..request }, here);
                Want::Word(here, if right { std::mem::replace(now, n << 32) } else { *now })
            }
            SendOp::AtomicWrite => {
                *now = n << 40;
                x.send(qp, to, request, &now.to_ne_bytes());
                Want::Nothing
            }
            SendOp::Flush => {
                x.post(qp, to, request, Sge { len: 0, ..here });
                Want::Nothing
            }
            _ => {
                x.post_recv(to);
                let there = x.memory(to, 3000);
                x.send(qp, to, SendWqe { wr_id: n, ..wqe(op, there) }, &[n as u8; 3000]);
                Want::Nothing
            }
        };
        wants.push(want);
        for _ in 0..rng.below(30) {
            x.net.step();
        }
        if rng.chance(0.05) {
            let host = rng.within(1, 3) as usize;
            x.net.sleep(host, rng.below(3_000_000));
        }
    }
    x.run();
    let done = x.sent();
    assert!(done.iter().all(|cqe| cqe.status == WcStatus::Success), "{done:?}");
    assert_eq!(done.len(), 40);
    for (n, want) in wants.iter().enumerate() {
        match want {
            Want::Nothing => {}
            Want::Bytes(here, data) => assert_eq!(x.brought(*here), data, "READ {n}"),
            Want::Word(here, word) => assert_eq!(x.brought(*here), word.to_ne_bytes(), "atomic {n}"),
        }
    }
    for (words, found) in words.iter().zip(found) {
        assert_eq!([0, 1, 2].map(|to| x.word(to, words[to])), found);
    }
    x.assert_unharmed();
}

#[test]
fn every_verb_reaches_other_cards_once_and_in_order() {
    for_seeds("every_verb_reaches_other_cards_once_and_in_order", 300, traffic);
}

/// In this run a card that sleeps is woken early: what other cards had sent before comes before what they
/// send now.
#[test]
fn a_card_that_is_woken_early_is_told_all_in_order() {
    traffic(1_511_116);
}

/// Any card may be killed at any time: an atomic that was answered was executed, none was executed twice, and
/// a READ that succeeded brought what was there.
fn deaths(seed: u64) {
    let (mut rng, mut x, victim) = Shared::of_mortals(seed);
    let words = [0, 1, 2].map(|to| x.memory(to, 8));
    let begun = [0, 1, 2].map(|to| x.word(to, words[to]));
    let mut asked = Vec::new();
    for n in 0..30u64 {
        let (qp, to) = (rng.below(2) as usize, rng.below(3) as usize);
        if x.net.hosts[SENDER].state(x.sends[qp]) == QpState::Rts {
            let read = rng.chance(0.5);
            let len = if read { any_size(&mut rng, 1024) } else { 8 };
            let (there, here) = (x.memory(to, len), x.here(len));
            let data = any_bytes(&mut rng, len);
            let host = x.queues[to].host;
            if read {
                x.net.hosts[host].env.memory.write(there.addr, &data);
                x.post(qp, to, SendWqe { wr_id: n, ..wqe(SendOp::Read, there) }, here);
            } else {
                let add = SendWqe { wr_id: n, compare_add: 1, ..wqe(SendOp::FetchAdd, words[to]) };
                x.post(qp, to, add, here);
            }
            asked.push((n, to, read.then_some((here, data))));
        }
        for _ in 0..rng.below(20) {
            x.net.step();
        }
        if n == 15 {
            x.net.kill(victim);
        }
    }
    x.run();
    let done = x.sent();
    assert_eq!(done.len(), asked.len(), "all complete");
    let (mut least, mut most) = ([0; 3], [0; 3]);
    for (n, to, read) in &asked {
        let good = done.iter().any(|cqe| cqe.wr_id == *n && cqe.status == WcStatus::Success);
        match read {
            Some((here, data)) => assert!(!good || x.brought(*here) == data, "READ {n}"),
            None => {
                least[*to] += u64::from(good);
                most[*to] += 1;
            }
        }
    }
    for to in 0..3 {
        let executed = x.word(to, words[to]).wrapping_sub(begun[to]);
        assert!((least[to]..=most[to]).contains(&executed), "{executed} of {}..{}", least[to], most[to]);
    }
}

#[test]
fn a_card_that_dies_harms_nobody_else() {
    for_seeds("a_card_that_dies_harms_nobody_else", 300, deaths);
}

/// Keys are looked at in the SRQ's protection domain, the bounds of the whole READ before its first byte, and
/// nothing behind a request that fails is executed.
#[test]
fn what_may_not_be_had_ends_the_connection() {
    for op in ANSWERED {
        for case in 0..5 {
            let mut x = Shared::new(Faults::default(), 1, &Setup { mtu: Mtu::M256, ..Setup::default() });
            let len = if op == SendOp::Read { 9000 } else { 8 };
            let right = x.memory(1, len);
            let (usual, pd) = (x.net.hosts[2].pd, x.queues[1].pd);
            let bad = match case {
                0 => Sge { lkey: right.lkey ^ 1, ..right },
                1 => Sge { addr: right.addr + 8, ..right },
                2 => region(&mut x.net.hosts[2], usual, len),
                3 => x.memory(2, len),
                _ => x.net.hosts[2].region_in(pd, len, Access::LOCAL_WRITE),
            };
            let before = x.word(1, right);
            let here = x.here(len);
            let here = if op == SendOp::Flush { Sge { len: 0, ..here } } else { here };
            x.post(0, 1, wqe(op, bad), here);
            let add = x.here(8);
            x.post(0, 1, SendWqe { compare_add: 1, ..wqe(SendOp::FetchAdd, right) }, add);
            x.run();
            assert_eq!(x.statuses(), [WcStatus::RemAccessErr, WcStatus::WrFlushErr], "{op:?}, case {case}");
            assert_eq!(x.word(1, right), before);
            assert_eq!(x.net.hosts[QPS].env.events, [AsyncEvent::QpAccessErr(x.recvs[0])]);
            /* the other QP has the queue to itself */
            let here = x.here(8);
            x.post(1, 1, SendWqe { compare_add: 1, ..wqe(SendOp::FetchAdd, right) }, here);
            x.run();
            assert_eq!((x.statuses(), x.word(1, right)), (vec![WcStatus::Success], before.wrapping_add(1)));
        }
    }
}

/// The QP's own rights come first.
#[test]
fn a_qp_without_rights_forwards_nothing() {
    for op in ANSWERED {
        let mut x = Shared::new(
            Faults::default(),
            1,
            &Setup { access: Access::LOCAL_WRITE, rd_atomic: 4, ..Setup::default() },
        );
        let (there, here) = (x.memory(1, 8), x.here(8));
        let here = if op == SendOp::Flush { Sge { len: 0, ..here } } else { here };
        x.post(0, 1, wqe(op, there), here);
        x.run();
        assert_eq!(x.statuses(), [WcStatus::RemAccessErr], "{op:?}");
    }
}

/// No SRQ, or no process: an invalid request.
#[test]
fn memory_of_no_srq_cannot_be_read() {
    for number in [1, 7 << QPN_BLOCK_SHIFT] {
        let mut x = Shared::new(Faults::default(), 1, &Setup::default());
        let (there, here) = (x.memory(1, 8), x.here(8));
        x.queues[1].number = if number == 1 { x.queues[1].number + 1 } else { number };
        x.post(0, 1, wqe(SendOp::Read, there), here);
        x.run();
        assert_eq!(x.statuses(), [WcStatus::RemInvReqErr]);
    }
}

/// A region that goes away in the middle of a READ fails it; what was before it stands.
#[test]
fn a_region_that_goes_away_under_a_read_fails_it() {
    let mut x = Shared::new(Faults::default(), 1, &Setup { mtu: Mtu::M256, ..Setup::default() });
    let (there, here, word) = (x.memory(1, 150_000), x.here(150_000), x.memory(1, 8));
    let first = x.here(8);
    x.post(0, 1, SendWqe { compare_add: 1, ..wqe(SendOp::FetchAdd, word) }, first);
    x.post(0, 1, wqe(SendOp::Read, there), here);
    for _ in 0..60 {
        x.net.step();
    }
    x.net.hosts[2].nic.dereg_mr(there.lkey).expect("nothing is bound to it");
    x.run();
    assert_eq!(x.statuses(), [WcStatus::Success, WcStatus::RemAccessErr]);
}

/// The process that has the memory is killed in the middle of a READ; a card that sleeps meanwhile only takes
/// its time.
#[test]
fn who_dies_under_a_read_fails_it_and_who_sleeps_does_not() {
    for dies in [true, false] {
        let setup = Setup { mtu: Mtu::M256, timeout: 16, ..Setup::default() };
        let mut x = Shared::new(Faults::default(), 1, &setup);
        let (there, here) = (x.memory(1, 150_000), x.here(150_000));
        x.post(0, 1, wqe(SendOp::Read, there), here);
        for _ in 0..60 {
            x.net.step();
        }
        assert!(x.sent().is_empty());
        if dies {
            x.net.kill(2);
        } else {
            x.net.sleep(2, 500_000_000);
        }
        /* another process's memory is read meanwhile, over the other QP */
        let (other, second) = (x.memory(2, 5000), x.here(5000));
        x.post(1, 2, SendWqe { wr_id: 1, ..wqe(SendOp::Read, other) }, second);
        while x.net.now() < 400_000_000 && x.net.step() {}
        let mut done: Vec<_> = x.sent().iter().map(|cqe| (cqe.wr_id, cqe.status)).collect();
        assert!(done.contains(&(1, WcStatus::Success)), "{done:?}");
        x.run();
        done.extend(x.sent().iter().map(|cqe| (cqe.wr_id, cqe.status)));
        let want = if dies { WcStatus::RemInvReqErr } else { WcStatus::Success };
        assert!(done.contains(&(0, want)), "{done:?}");
        if !dies {
            assert_eq!(x.bytes(1, there), x.brought(here));
        }
    }
}

/// Bytes for an answer come from the card whose memory it is, in packets of the right size.
#[test]
fn bytes_of_other_peers_are_not_taken() {
    let mut x = Shared::new(Faults::default(), 1, &Setup { mtu: Mtu::M256, ..Setup::default() });
    let (there, here) = (x.memory(1, 1000), x.here(1000));
    x.post(0, 1, wqe(SendOp::Read, there), here);
    x.net.sleep(2, 1_000_000);
    while x.net.now() < 500_000 && x.net.step() {}
    let qpn = x.recvs[0];
    let lie = |epoch, psn| Relay::Bytes {
        qpn,
        epoch,
        psn: Psn::new(psn),
        outcome: RelayOutcome::Success,
        data: &[7; 256],
    };
    for (epoch, psn) in (0..8).flat_map(|epoch| (0..5).map(move |psn| (epoch, psn))) {
        let lie = lie(epoch, psn);
        let (head, data) = lie.encode();
        assert!(x.net.relay(3, QPS, &[&head[..], data].concat()));
    }
    x.run();
    assert_eq!(x.statuses(), [WcStatus::Success]);
    assert_eq!(x.bytes(1, there), x.brought(here));
}

/// Memory of a region may go away, as under on-demand paging: a READ of it fails at another card's SRQ as at
/// this one's, wherever it begins to be absent.
#[test]
fn a_read_of_absent_memory_fails_at_any_card() {
    for (to, present) in [0, 1].into_iter().flat_map(|to| [0, 512, 256 * 40].map(|present| (to, present))) {
        let mut x = Shared::new(Faults::default(), 1, &Setup { mtu: Mtu::M256, ..Setup::default() });
        let (there, here) = (x.memory(to, 20_000), x.here(20_000));
        let host = x.queues[to].host;
        x.net.hosts[host].env.gone = there.addr + present..there.addr + 20_000;
        x.post(0, to, wqe(SendOp::Read, there), here);
        x.run();
        assert_eq!(x.statuses(), [WcStatus::RemAccessErr], "queue {to}, {present} bytes are there");
    }
}

/// Cards confirm in any order, and a wire loses answers: results are remembered in the order of the requests,
/// as many as may be repeated and no more.
fn late_results(seed: u64) {
    let mut rng = Rng::new(seed);
    let setup = Setup { timeout: 14, rd_atomic: 2, retry_cnt: 7, ..Setup::default() };
    let mut x = Shared::new(Faults { loss: 0.1, ..Faults::default() }, seed, &setup);
    let words = [0, 1, 2].map(|to| x.memory(to, 8));
    let mut found = [0, 1, 2].map(|to| x.word(to, words[to]));
    let mut wants = Vec::new();
    for _ in 0..30 {
        let (to, here) = (rng.below(3) as usize, x.here(8));
        x.post(0, to, SendWqe { compare_add: 1, ..wqe(SendOp::FetchAdd, words[to]) }, here);
        wants.push((here, found[to]));
        found[to] = found[to].wrapping_add(1);
        for _ in 0..rng.below(4) {
            x.net.step();
        }
        if rng.chance(0.3) {
            let host = rng.within(1, 3) as usize;
            x.net.sleep(host, rng.below(300_000));
        }
    }
    x.run();
    assert_eq!(x.statuses(), [WcStatus::Success; 30]);
    for (n, (here, word)) in wants.iter().enumerate() {
        assert_eq!(x.brought(*here), word.to_ne_bytes(), "atomic {n}");
    }
    assert_eq!([0, 1, 2].map(|to| x.word(to, words[to])), found);
}

#[test]
fn results_of_several_cards_can_be_repeated() {
    for_seeds("results_of_several_cards_can_be_repeated", 60, late_results);
}

/// Bytes for repeated READs are asked for one after the other: nothing gathers before a card that is stopped,
/// however far back and however often a requester goes. All that it wants is there at the end.
#[test]
fn a_stopped_card_is_asked_once() {
    let mut x = Shared::new(Faults::default(), 1, &Setup { mtu: Mtu::M256, ..Setup::default() });
    let (there, here) = (x.memory(1, 1000), x.here(1000));
    for _ in 0..20 {
        x.post(0, 1, wqe(SendOp::Read, there), here);
    }
    x.run();
    assert_eq!(x.statuses(), [WcStatus::Success; 20]);
    x.net.sleep(2, 10_000_000);
    let now = x.net.now();
    let meta = FrameMeta { src: x.net.hosts[SENDER].gid, dst: x.net.hosts[QPS].gid, ..FrameMeta::default() };
    for psn in (0..20).rev().map(|n| Psn::new(n * 4)) {
        let bth =
            HeaderBuf::bth(code::XRC | code::RC_READ_REQUEST, x.recvs[0], psn, true, false, 0, PKEY_DEFAULT);
        let frame = bth.xrceth(x.queues[1].number).reth(there.addr, there.lkey, 1000);
        let host = &mut x.net.hosts[QPS];
        host.nic.handle_frame(&mut host.env, now, &meta, &frame);
        x.net.transmit();
        assert!(x.net.relays_under_way() <= 1, "{} messages", x.net.relays_under_way());
    }
    assert_eq!(x.net.hosts[QPS].nic.counters().duplicate_request.get(), 20);
    x.post(0, 1, wqe(SendOp::Read, there), here);
    x.run();
    assert_eq!(x.statuses(), [WcStatus::Success]);
}
