//! RPC WRITEs on connections of StaR: a kernel of the stateful end gets each byte once, in order, in pieces
//! as long as RC's packets.

use std::sync::{Arc, Mutex};

use crate::common::rpc::{Endless, RpcPair, speak};
use crate::common::{any_bytes, for_seeds};
use starverbs_core::qp::RecvSource;
use starverbs_core::strom::{Code, Input, Kernel, KernelRun, MAX_RUNNING, Poll, RegionRange, TARGET_LEN};
use starverbs_core::{AsyncEvent, Mtu, Nanos, QpState, QpType, SendFlags, SendOp, SendWqe, Sge, WcStatus};
use starverbs_sim::{Faults, QpAt, Rng, Send, Setup, SimCq, SimRq, SimSq};
use starverbs_star::control::Preference;

const OP: u64 = 0x5354_0002;
const MS: Nanos = 1_000_000;
/// Host 0 asks, and its card keeps nothing.
const ENDS: [Preference; 2] = [Preference::Stateless, Preference::Stateful];
/// Bytes of a packet of RC's.
const MTU: usize = 1024;
/// Steps beyond a turn's budget.
const SLOW: u64 = 600;

/// What a kernel got, with the word of its page when it was done with that.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    /// Where it stands in its message
    input: Input,
    bytes: Vec<u8>,
    word: u64,
}

type Notes = Arc<Mutex<Vec<Seen>>>;

/// A kernel that writes down what it gets, in as many steps as the first byte says.
struct Scribe {
    notes: Notes,
    word: RegionRange,
    input: Input,
    /// Refuses what begins with this byte
    refuses: Option<u8>,
    /// Steps more for each
    more: u64,
}

impl Scribe {
    fn new(pair: &RpcPair, notes: &Notes) -> Self {
        let word = RegionRange { key: pair.page[1].1, va: pair.page[1].0, len: 8 };
        Scribe { notes: notes.clone(), word, input: Input::Params, refuses: None, more: 0 }
    }
}

/// Steps of what begins with this byte.
fn steps(byte: Option<&u8>) -> u64 {
    match byte {
        Some(0..8) => 5 * SLOW,
        Some(8..32) => SLOW,
        Some(32..64) => 1,
        _ => 0,
    }
}

impl Kernel for Scribe {
    fn start(&mut self, run: &mut KernelRun, input: Input) -> Result<(), Code> {
        if self.refuses.is_some() && self.refuses.as_ref() == run.bytes().first() {
            return Err(Code::BadParam);
        }
        self.input = input;
        (run.regs[0], run.regs[1]) = (steps(run.bytes().first()) + self.more, 0);
        Ok(())
    }

    fn step(&mut self, run: &mut KernelRun) -> Poll {
        if run.regs[0] > 0 {
            run.regs[0] -= 1;
            return Poll::Pending;
        }
        if run.regs[1] == 0 {
            run.regs[1] = 1;
            return if run.read(self.word) { Poll::Pending } else { Poll::Ready(Code::Overflow) };
        }
        let word = run.read_data().try_into().map_or(0, u64::from_le_bytes);
        let seen = Seen { input: self.input, bytes: run.bytes().to_vec(), word };
        self.notes.lock().unwrap().push(seen);
        Poll::Ready(Code::Ok)
    }
}

fn scribe(pair: &mut RpcPair, refuses: Option<u8>) -> Notes {
    let notes = Notes::default();
    pair.load(OP, Scribe { refuses, ..Scribe::new(pair, &notes) });
    notes
}

/// Pieces of a stream as a kernel must see them.
fn pieces(data: &[u8], mtu: usize, word: u64) -> Vec<Seen> {
    let count = data.len().div_ceil(mtu).max(1);
    let piece = |n: usize| {
        let bytes = data[n * mtu..data.len().min((n + 1) * mtu)].to_vec();
        Seen { input: Input::Data { first: n == 0, last: n + 1 == count }, bytes, word }
    };
    (0..count).map(piece).collect()
}

fn quiet_with(setup: &Setup) -> RpcPair {
    let mut pair = RpcPair::star(Faults::default(), setup, 1, ENDS);
    pair.net.run_for(100 * MS);
    assert!(pair.net.hosts[0].nic.qp_state(pair.qpn[0]).is_none(), "the card keeps nothing of it");
    pair
}

fn quiet() -> RpcPair {
    quiet_with(&Setup::default())
}

fn write(wr_id: u64) -> SendWqe {
    SendWqe { wr_id, op: SendOp::RpcWrite, remote_addr: OP, ..SendWqe::default() }
}

/// Posts a stream of bytes that lie together.
fn stream(pair: &mut RpcPair, wr_id: u64, data: &[u8]) {
    let sge = pair.bytes(data);
    assert!(pair.try_post(write(wr_id), vec![sge]));
}

/// Bytes whose pieces take no time.
fn quick(rng: &mut Rng, len: u32) -> Vec<u8> {
    any_bytes(rng, len).into_iter().map(|byte| byte | 0x80).collect()
}

/// All that goes wrong on a wire that StaR is for (docs/star.md, "Loss recovery").
fn faults(rng: &mut Rng) -> Faults {
    let mut some = || rng.pick(&[0.0, 0.01, 0.2]);
    let (loss, duplicate, reorder, corrupt) = (some(), some(), some(), some() / 10.0);
    Faults { loss, duplicate, reorder, corrupt, late: 100_000, ..Faults::default() }
}

/// Streams, WRITEs of a word that their kernel reads, and RPCs, some of them posted before it is settled what
/// the ends are.
fn once_and_in_order(seed: u64) {
    let mut rng = Rng::new(seed);
    let faults = faults(&mut rng);
    let mtu = rng.pick(&[Mtu::M256, Mtu::M1024, Mtu::M4096]);
    let mut pair = RpcPair::star(faults, &Setup { mtu, timeout: 0, ..Setup::default() }, seed, ENDS);
    let notes = scribe(&mut pair, None);
    let (mut expected, mut word, mut calls) = (Vec::new(), 0, 0);
    let count = rng.within(1, 20);
    for wr_id in 0..count {
        match rng.below(4) {
            0 => {
                word = rng.bits();
                let sge = pair.bytes(&word.to_le_bytes());
                let (remote_addr, rkey) = pair.page[1];
                let wqe = SendWqe { wr_id, op: SendOp::Write, remote_addr, rkey, ..SendWqe::default() };
                assert!(pair.try_post(wqe, vec![sge]));
            }
            1 => {
                calls += 1;
                let params = any_bytes(&mut rng, 9);
                pair.call(wr_id, OP, &params, 64, false);
                expected.push(Seen { input: Input::Params, bytes: params, word });
            }
            _ => {
                let len = rng.pick(&[0, 1, 255, 256, 257, 512, 513, 1024, 5000, 40_000, 150_000]);
                let data = any_bytes(&mut rng, len);
                expected.extend(pieces(&data, mtu.bytes() as usize, word));
                let mut rest = data.as_slice();
                let mut sges = Vec::new();
                for _ in 0..rng.below(3) {
                    let now =
                        rest.split_off(..rng.below(rest.len() as u64 + 1) as usize).expect("they are there");
                    sges.push(pair.bytes(now));
                }
                sges.push(pair.bytes(rest));
                assert!(pair.try_post(write(wr_id), sges));
            }
        }
        for _ in 0..rng.below(30) {
            pair.net.step();
        }
    }
    pair.run();
    let all: Vec<_> = (0..count).map(|wr_id| (wr_id, WcStatus::Success)).collect();
    assert_eq!(pair.polled(0), all, "all succeeded, in order");
    assert!(*notes.lock().unwrap() == expected, "each piece once, and in order");
    let nic = &pair.net.hosts[1].nic;
    let stats = nic.counters();
    assert_eq!((stats.rx_rpc.get(), stats.rpc_failed.get()), (expected.len() as u64, 0));
    assert_eq!((stats.tx_rpc_replies.get(), nic.kernels_running()), (calls, 0));
    assert!(pair.polled(1).is_empty(), "nothing completes there");
    assert!(pair.net.hosts.iter().all(|host| host.env.memory.gaps_intact()));
}

#[test]
fn streams_are_fed_once_and_in_order() {
    for_seeds("star streams", 200, once_and_in_order);
}

/// Nothing is fetched for nothing where nothing is lost, and hardly more where the kernel is slow.
#[test]
fn what_a_kernel_has_no_room_for_is_not_asked_for() {
    for slow in [false, true] {
        let mut pair = quiet();
        let notes = scribe(&mut pair, None);
        let mut data = quick(&mut Rng::new(5), 300 * MTU as u32);
        if slow {
            data.iter_mut().step_by(MTU).for_each(|byte| *byte = 3);
        }
        stream(&mut pair, 1, &data);
        pair.run();
        assert_eq!(pair.polled(0), [(1, WcStatus::Success)]);
        assert!(*notes.lock().unwrap() == pieces(&data, MTU, 0));
        let again = pair.net.hosts[1].nic.counters().star_sent_gd.get() - 300;
        /* those that were asked for together at first */
        assert!(again <= if slow { 64 } else { 0 }, "{again}");
    }
}

/// A kernel that works on for longer than programs wait for a silent peer.
#[test]
fn a_slow_kernel_is_no_silent_peer() {
    const LONG: u64 = 2_500_000;
    let mut pair = quiet_with(&Setup { timeout: 6, retry_cnt: 1, ..Setup::default() });
    let notes = Notes::default();
    pair.load(OP, Scribe { more: LONG, ..Scribe::new(&pair, &notes) });
    let data = vec![0xf0; 3 * MTU];
    stream(&mut pair, 1, &data);
    let before = pair.net.now();
    pair.run();
    assert!(pair.net.now() > before + 10 * MS, "it was no slow kernel");
    assert_eq!(pair.polled(0), [(1, WcStatus::Success)]);
    assert!(*notes.lock().unwrap() == pieces(&data, MTU, 0));
}

/// WRITEs of the stateful end's program to a page of SL's: the next, and how many there are.
struct OwnWrites {
    next: u64,
    count: u64,
    from: Sge,
}

impl OwnWrites {
    fn new(pair: &RpcPair, count: u64) -> Self {
        let (addr, lkey) = pair.page[1];
        OwnWrites { next: 0, count, from: Sge { addr, len: MTU as u32, lkey } }
    }

    /// Posts them as there is room, until all are done or time is over. Gives how many are done.
    fn run(&mut self, pair: &mut RpcPair, most: Nanos) -> u64 {
        let (until, mut done) = (pair.net.now() + most, 0);
        while done < self.count && pair.net.now() < until {
            while self.next < self.count && self.post(pair) {}
            assert!(pair.net.step());
            pair.net.transmit();
            for (wr_id, status) in pair.polled(1) {
                assert_eq!((wr_id, status), (done, WcStatus::Success));
                done += 1;
            }
        }
        done
    }

    fn post(&mut self, pair: &mut RpcPair) -> bool {
        let (remote_addr, rkey) = pair.page[0];
        let (wr_id, op, flags) = (self.next, SendOp::Write, SendFlags::SIGNALED);
        let wqe = SendWqe { wr_id, op, remote_addr, rkey, flags, ..SendWqe::default() };
        let posted = pair.sq[1].post(Send { wqe, sges: vec![self.from], inline: None }).is_ok();
        if posted {
            self.next += 1;
            pair.net.doorbell(1, pair.qpn[1]);
        }
        posted
    }
}

/// Steps of a kernel for about 800 us.
const LONG: u64 = 400_000;

/// A kernel works long at each piece, and pieces are lost or come too early: what the stateful end's program
/// sends does not wait for it, though it is far more than may be under way.
fn the_other_way_goes_on(seed: u64) {
    const OWN: u64 = 1000;
    let mut pair = RpcPair::star(Faults::default(), &Setup { timeout: 0, ..Setup::default() }, seed, ENDS);
    pair.net.run_for(100 * MS);
    /* the paper's form waits long for late copies of what was lost, kernel or not */
    let loss = if seed.is_multiple_of(4) { 0.0 } else { [0.0, 0.02, 0.2][(seed % 3) as usize] };
    pair.net.faults = Faults { loss, ..Faults::default() };
    let notes = Notes::default();
    pair.load(OP, Scribe { more: LONG, ..Scribe::new(&pair, &notes) });
    let data = vec![0xf0; 80 * MTU];
    stream(&mut pair, 1, &data);
    /* the kernel may be at work first */
    for _ in 0..seed % 8 * 40 {
        assert!(pair.net.step());
        pair.net.transmit();
    }
    let begun = pair.net.now();
    let done = OwnWrites::new(&pair, OWN).run(&mut pair, 30 * MS);
    assert_eq!(done, OWN);
    pair.run();
    assert!(pair.net.now() > begun + 50 * MS, "it was no slow kernel");
    assert_eq!(pair.polled(0), [(1, WcStatus::Success)]);
    assert!(*notes.lock().unwrap() == pieces(&data, MTU, 0), "each piece once, and in order");
}

#[test]
fn a_slow_kernel_does_not_hold_up_the_other_way() {
    for_seeds("slow kernel", 12, the_other_way_goes_on);
}

/// All that the stateful end sends is lost for a moment, while a kernel is at work and has refused pieces:
/// one timeout is enough to find that out.
#[test]
fn pieces_that_wait_for_a_kernel_are_no_probes() {
    const OWN: u64 = 60;
    let mut pair = quiet();
    let notes = Notes::default();
    pair.load(OP, Scribe { more: 20 * LONG, ..Scribe::new(&pair, &notes) });
    let data = vec![0xf0; 70 * MTU];
    stream(&mut pair, 1, &data);
    pair.net.run_for(MS / 2);
    pair.net.set_link(1, 0, Faults { loss: 1.0, ..Faults::default() });
    let mut own = OwnWrites::new(&pair, OWN);
    assert_eq!(own.run(&mut pair, MS / 100), 0);
    pair.net.set_link(1, 0, Faults::default());
    let timeouts = pair.net.hosts[1].nic.counters().timeouts.get();
    let done = own.run(&mut pair, 5 * MS);
    let again = pair.net.hosts[1].nic.counters().timeouts.get() - timeouts;
    assert!(notes.lock().unwrap().is_empty(), "it was no slow kernel");
    assert_eq!((done, again), (OWN, 1));
}

/// As with RC: a stream that no kernel is for, or that its kernel refuses at its first piece or later.
#[test]
fn a_stream_that_is_refused_ends_the_connection() {
    const NO: u8 = 0xee;
    for (len, at) in [
        (0, None),
        (64, None),
        (5000, None),
        (64, Some(0)),
        (9000, Some(0)),
        (9000, Some(3)),
        (9000, Some(8)),
    ] {
        let mut pair = quiet();
        let notes = at.map(|_| scribe(&mut pair, Some(NO)));
        let mut data = vec![0xf0; len];
        if let Some(at) = at {
            data[at * MTU] = NO;
        }
        stream(&mut pair, 1, &data);
        stream(&mut pair, 2, b"more");
        pair.run();
        let ended = [(1, WcStatus::RemOpErr), (2, WcStatus::WrFlushErr)];
        assert_eq!(pair.polled(0), ended, "{len} {at:?}");
        let before = notes.map_or(0, |notes| notes.lock().unwrap().len());
        assert_eq!(before, at.unwrap_or(0), "{len}");
        let host = &pair.net.hosts[1];
        assert!(host.env.events.contains(&AsyncEvent::QpReqErr(pair.qpn[1])));
        assert_eq!((host.state(pair.qpn[1]), host.nic.kernels_running()), (QpState::Err, 0));
        assert_eq!(host.nic.counters().rpc_failed.get(), 1);
    }
}

/// The kernel goes, and another takes its place, whatever the old one is in the middle of: the new one sees
/// nothing of that stream.
#[test]
fn a_kernel_that_goes_ends_its_stream() {
    for (byte, replaced) in [(3, false), (3, true), (0xf0, false), (0xf0, true)] {
        let mut pair = quiet();
        let notes = Notes::default();
        let id = pair.load(OP, Scribe::new(&pair, &notes));
        let data = vec![byte; 500 * MTU];
        stream(&mut pair, 1, &data);
        while notes.lock().unwrap().len() < 50 {
            assert!(pair.net.step());
            pair.net.transmit();
        }
        let later = Notes::default();
        let new = Box::new(Scribe::new(&pair, &later));
        let host = &mut pair.net.hosts[1];
        if replaced {
            host.nic.replace_kernel(host.pd, OP, new).expect("it is loaded");
        } else {
            host.nic.unload_kernel(id).expect("it is loaded");
        }
        pair.run();
        assert_eq!(pair.polled(0), [(1, WcStatus::RemOpErr)]);
        let seen = notes.lock().unwrap().len();
        assert!(seen < 500 && later.lock().unwrap().is_empty(), "{seen}");
        assert!(notes.lock().unwrap()[..] == pieces(&data, MTU, 0)[..seen]);
        assert_eq!(pair.net.hosts[1].nic.kernels_running(), 0);
    }
}

/// Either host ends without a word, or either end's queue pair, in the middle of a stream: nothing more is
/// fed, and the next connection's stream begins anew.
#[test]
fn a_stream_ends_with_its_connection() {
    for (of, how, byte) in (0..2).flat_map(|of| (0..2).flat_map(move |how| [(of, how, 3), (of, how, 0xf0)])) {
        let setup = Setup { timeout: 8, retry_cnt: 3, ..Setup::default() };
        let mut pair = quiet_with(&setup);
        let notes = scribe(&mut pair, None);
        let data = vec![byte; 500 * MTU];
        stream(&mut pair, 1, &data);
        while notes.lock().unwrap().len() < 50 {
            assert!(pair.net.step());
            pair.net.transmit();
        }
        let now = pair.net.now();
        match how {
            0 => pair.net.restart(of),
            _ => pair.net.hosts[of].to_state(pair.qpn[of], QpState::Err, now).expect("from every state"),
        }
        pair.run();
        let what = format!("{of} {how} {byte}");
        let seen = notes.lock().unwrap().clone();
        assert!(
            seen.len() < 500 && seen[..] == pieces(&data, MTU, 0)[..seen.len()],
            "{what}: {}",
            seen.len()
        );
        assert_eq!(pair.net.hosts[1].nic.kernels_running(), 0, "{what}");
        let ended = pair.polled(0);
        let wanted = match (of, how) {
            (0, 0) => vec![],
            (0, _) => vec![(1, WcStatus::WrFlushErr)],
            _ => vec![(1, WcStatus::RetryExcErr)],
        };
        assert_eq!(ended, wanted, "{what}");
    }
}

/// As many kernels as may be are at work: a stream waits at the stateful end, and then goes on.
#[test]
fn a_stream_waits_for_a_kernel() {
    let mut pair = quiet();
    let notes = scribe(&mut pair, None);
    let endless = pair.load(OP + 1, Endless);
    let others: Vec<_> = (0..MAX_RUNNING).map(|_| occupy(&mut pair)).collect();
    for _ in 0..400 {
        if pair.net.hosts[1].nic.kernels_running() == MAX_RUNNING {
            break;
        }
        pair.net.run_for(MS / 20);
    }
    assert_eq!(pair.net.hosts[1].nic.kernels_running(), MAX_RUNNING);
    for (wr_id, len) in [(1, 5 * MTU), (2, 100), (3, 0)] {
        stream(&mut pair, wr_id, &vec![0xf0; len]);
    }
    pair.net.run_for(MS / 5);
    assert!(notes.lock().unwrap().is_empty() && pair.polled(0).is_empty());
    pair.net.hosts[1].nic.unload_kernel(endless).expect("it is loaded");
    pair.run();
    assert_eq!(pair.polled(0), [1, 2, 3].map(|wr_id| (wr_id, WcStatus::Success)));
    let all = [5 * MTU, 100, 0].map(|len| pieces(&vec![0xf0; len], MTU, 0)).concat();
    assert!(*notes.lock().unwrap() == all);
    drop(others);
}

/// Another connection, of RC, has a kernel of host 1 work without an end.
fn occupy(pair: &mut RpcPair) -> SimSq {
    let (sq, cq) = ([(); 2].map(|()| SimSq::new(8)), SimCq::new(64));
    let qpn = [0, 1].map(|at| {
        let host = &mut pair.net.hosts[at];
        let own = RecvSource::Own(SimRq::new(8, 1));
        let qpn = host.qp(QpType::Rc, &sq[at], own, [&cq, &cq], false);
        speak(host, qpn);
        host.preference(qpn, Preference::Off);
        qpn
    });
    let [a, b] = [0, 1].map(|host| QpAt { host, qpn: qpn[host] });
    pair.net.connect(QpType::Rc, a, b, &Setup::default());
    let sge: Sge = pair.bytes(&[0; TARGET_LEN]);
    let wqe = SendWqe { op: SendOp::Rpc, remote_addr: OP + 1, ..SendWqe::default() };
    let [sq, _] = sq;
    assert!(sq.post(Send { wqe, sges: vec![sge], inline: None }).is_ok());
    pair.net.doorbell(0, qpn[0]);
    pair.net.run_for(MS / 200);
    sq
}
