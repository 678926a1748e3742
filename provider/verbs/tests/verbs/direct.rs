//! Requests that a queue pair executes by itself on the memory of a peer of this host: by each way to that
//! memory the same.

use std::ops::Deref;
use std::sync::atomic::Ordering;

use crate::common::*;
use starverbs_core::mr::WindowType;
use starverbs_core::qp::QpAttrMask;
use starverbs_core::{Access, QpState, QpType, SendFlags, SendOp, Sge, WcStatus};
use starverbs_settings::{LinkTrust, Settings};
use starverbs_verbs::{Dm, Mr, Mw, MwBind, Qp, QpAttr, RecvWr, SendWr};

/// A way to a peer's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// Private memory, by the descriptor that the peer handed over
    Descriptor,
    /// As `Descriptor`, and what is long by the number of the peer's process
    Process,
    /// Private memory of a peer that trusts nobody: it executes requests itself
    Ring,
    /// Memory in a file, which both have mapped
    Mapped,
}

const WAYS: [Way; 4] = [Way::Descriptor, Way::Process, Way::Ring, Way::Mapped];

/// A connection to a peer with memory that is reached by one way.
struct Case {
    pair: Pair,
    way: Way,
    dm: Dm,
    /// Over all of the device memory
    dm_mr: Mr,
}

impl Deref for Case {
    type Target = Pair;

    fn deref(&self) -> &Pair {
        &self.pair
    }
}

impl Case {
    /// One request went over it, so that all others can be executed by their initiator.
    fn of(settings: &Settings, way: Way) -> Case {
        let pair = Pair::new(settings);
        let dm = Dm::alloc(&pair.b.ctx, BUF as u64, 12).unwrap();
        let dm_mr = Mr::device(&pair.b.pd, &dm, 0, BUF as u64, all_access() | Access::ZERO_BASED).unwrap();
        let case = Case { pair, way, dm, dm_mr };
        assert_eq!(case.run(SendOp::Write, &[case.a.sge(0, 1)], 0), WcStatus::Success);
        case
    }

    fn new(way: Way) -> Case {
        let link_trust = match way {
            Way::Descriptor | Way::Mapped => LinkTrust::User,
            Way::Process => LinkTrust::Trace,
            Way::Ring => LinkTrust::None,
        };
        Case::of(&Settings { link_trust, ..local() }, way)
    }

    fn is_mapped(&self) -> bool {
        self.way == Way::Mapped
    }

    /// Whether a request of so many bytes waits for those before it, and is executed without the peer's card.
    fn waits(&self, len: usize) -> bool {
        self.is_mapped() || self.way == Way::Process && len >= BUF / 2
    }

    fn wr<'a>(&self, op: SendOp, sges: &'a [Sge], at: usize) -> SendWr<'a> {
        let wr = self.pair.wr(op, sges, at);
        if !self.is_mapped() {
            return wr;
        }
        SendWr { remote_addr: at as u64, rkey: self.dm_mr.rkey(), ..wr }
    }

    /// The peer's bytes, those of whole words around them.
    fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        if !self.is_mapped() {
            return self.b.bytes(at, len);
        }
        let from = at & !3;
        let mut all = vec![0; (at + len).next_multiple_of(4) - from];
        // SAFETY: a vector of so many bytes.
        unsafe { self.dm.copy_out(all.as_mut_ptr(), from as u64, all.len() as u64) }.unwrap();
        all[at - from..][..len].to_vec()
    }

    /// Fills whole words of the peer's memory.
    fn fill(&self, at: usize, data: &[u8]) {
        if !self.is_mapped() {
            return self.b.fill(at, data);
        }
        // SAFETY: a slice of so many bytes.
        unsafe { self.dm.copy_in(at as u64, data.as_ptr(), data.len() as u64) }.unwrap();
    }

    /// A region over a part of the peer's memory.
    fn reg(&self, len: usize, access: Access) -> Mr {
        if !self.is_mapped() {
            return self.b.reg(0, len, access);
        }
        Mr::device(&self.b.pd, &self.dm, 0, len as u64, access | Access::ZERO_BASED).unwrap()
    }

    fn status(&self, wr: &SendWr<'_>) -> WcStatus {
        post(&self.qa, wr).unwrap();
        self.a.completions(1)[0].status
    }

    fn run(&self, op: SendOp, sges: &[Sge], at: usize) -> WcStatus {
        self.status(&self.wr(op, sges, at))
    }

    /// Asserts that `expected` requests are executed meanwhile without the peer's card, by this way alone; or
    /// none, where the ring is the way.
    fn direct(&self, expected: u64, run: impl FnOnce(&Case)) {
        let names = ["local_direct", "local_traced", "local_mapped"];
        let before = names.map(|name| self.count(name));
        run(self);
        let [by_descriptor, by_number, mapped] = std::array::from_fn(|at| self.count(names[at]) - before[at]);
        let made = match self.way {
            Way::Descriptor => (by_descriptor, by_number + mapped),
            /* what is short goes by the descriptor */
            Way::Process => (by_descriptor + by_number, mapped),
            Way::Ring => (0, by_descriptor + by_number + mapped),
            Way::Mapped => (mapped, by_descriptor + by_number),
        };
        let expected = if self.way == Way::Ring { 0 } else { expected };
        assert_eq!(made, (expected, 0), "{:?}, and other ways", self.way);
    }
}

fn each_way(run: impl Fn(Case)) {
    WAYS.into_iter().for_each(|way| run(Case::new(way)));
}

#[test]
fn writes_and_reads_are_executed_without_the_peer() {
    each_way(write_and_read);
}

fn write_and_read(pair: Case) {
    const LEN: usize = BUF / 2;
    let a = &pair.a;
    let data: Vec<u8> = (0..LEN).map(|n| ((n * 31) >> 3) as u8).collect();
    a.fill(0, &data);
    let executed = pair.count("local_executed");
    for len in [1, 7, 8, 9, 16, 4096, LEN] {
        let pieces = [a.sge(0, len / 3), a.sge(len / 3, len - len / 3)];
        let back = [a.sge(LEN, len / 2), a.sge(LEN + len / 2, len - len / 2)];
        pair.fill(0, &vec![0; LEN]);
        pair.direct(2, |pair| {
            assert_eq!(pair.run(SendOp::Write, &pieces, 5), WcStatus::Success);
            assert!(pair.bytes(5, len) == data[..len], "WRITE of {len}");
            assert_eq!(pair.bytes(5 + len, 1), [0]);
            assert_eq!(pair.run(SendOp::Read, &back, 5), WcStatus::Success);
        });
        assert!(a.bytes(LEN, len) == data[..len], "READ of {len}");
    }
    let link = match pair.way {
        Way::Descriptor => "local:memory",
        Way::Process => "local:traced",
        Way::Ring => "local",
        Way::Mapped => "local:mapped",
    };
    let row = row_of(pair.port, pair.qa.number());
    assert_eq!(row.split(" ").last(), Some(link), "{row}");
    pair.direct(1, |pair| {
        post_inline(&pair.qa, &pair.wr(SendOp::Write, &[], 100), b"in the queue").unwrap();
        assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    });
    assert_eq!(pair.bytes(100, 12), b"in the queue");
    assert_eq!(pair.count("local_executed") > executed, pair.way == Way::Ring, "by the peer's card");
}

#[test]
fn nobody_is_trusted_where_the_setting_says_so() {
    let pair = Case::of(&Settings { link_trust: LinkTrust::None, ..local() }, Way::Mapped);
    pair.direct(0, |pair| {
        for op in [SendOp::Write, SendOp::Read, SendOp::FetchAdd] {
            assert_eq!(pair.run(op, &[pair.a.sge(0, 8)], 0), WcStatus::Success, "{op:?}");
        }
    });
}

#[test]
fn mistakes_end_as_on_the_wire() {
    type Mistake = fn(&Case) -> WcStatus;
    let cases: [(&str, Mistake); 7] = [
        ("a wrong key", |p| {
            let sges = [p.a.sge(0, 8)];
            p.status(&SendWr { rkey: 0x5555, ..p.wr(SendOp::Write, &sges, 0) })
        }),
        ("beyond the region", |p| p.run(SendOp::Read, &[p.a.sge(0, 8)], BUF - 4)),
        ("a key of too few rights", |p| {
            let mr = p.reg(4096, Access::LOCAL_WRITE | Access::REMOTE_READ);
            let sges = [p.a.sge(0, 8)];
            p.status(&SendWr { rkey: mr.rkey(), ..p.wr(SendOp::Write, &sges, 0) })
        }),
        ("a word that is not aligned", |p| p.run(SendOp::FetchAdd, &[p.a.sge(0, 8)], 4)),
        ("an address that is not aligned, of a word that is", |p| {
            let (sges, all) = ([p.a.sge(0, 8)], all_access() | Access::ZERO_BASED);
            let device = || Mr::device(&p.b.pd, &p.dm, 4, 64, all).unwrap();
            let mr = if p.is_mapped() { device() } else { p.b.reg(4, 64, all) };
            p.status(&SendWr { rkey: mr.rkey(), remote_addr: 4, ..p.wr(SendOp::FetchAdd, &sges, 4) })
        }),
        ("an own key that is wrong", |p| p.run(SendOp::Write, &[Sge { lkey: 0x7777, ..p.a.sge(0, 8) }], 0)),
        ("a region that has ended", |p| {
            let mr = p.reg(4096, all_access());
            let (sges, rkey) = ([p.a.sge(0, 8)], mr.rkey());
            let first = p.status(&SendWr { rkey, ..p.wr(SendOp::Write, &sges, 0) });
            assert_eq!(first, WcStatus::Success);
            mr.dereg().unwrap();
            p.status(&SendWr { rkey, ..p.wr(SendOp::Write, &sges, 0) })
        }),
    ];
    for ((what, make), way) in cases.into_iter().flat_map(|case| WAYS.map(|way| (case, way))) {
        let local = Case::new(way);
        assert_eq!(make(&local), make(&Case::of(&wire(), way)), "{what}, {way:?}");
        assert_eq!(local.qa.state(), QpState::Err, "{what}, {way:?}");
    }
}

/// A long request goes in pieces, and not one of them if the last one may not go.
#[test]
fn what_is_open_in_part_is_not_begun() {
    const OPEN: usize = 2 << 20;
    let pair = Case::new(Way::Descriptor);
    let (from, to) = (memory(OPEN + 8), memory(OPEN));
    let ours = reg(&pair.a.pd, from, all_access()).unwrap();
    let theirs = reg(&pair.b.pd, to, all_access()).unwrap();
    from.iter().for_each(|byte| byte.store(7, Ordering::Relaxed));
    let sges = [Sge { addr: from.as_ptr() as u64, len: from.len() as u32, lkey: ours.lkey() }];
    let target = SendWr { remote_addr: to.as_ptr() as u64, rkey: theirs.rkey(), ..send(1, &sges) };
    let status = pair.status(&SendWr { op: SendOp::Write, ..target });
    assert_eq!(status, WcStatus::RemAccessErr);
    assert!(to.iter().all(|byte| byte.load(Ordering::Relaxed) == 0), "a part was written");
}

/// Memory that its program has unmapped, and still has a region of: by the descriptor, and by the process's
/// number, which long requests take if that is asked for.
#[test]
fn what_was_unmapped_is_a_remote_error() {
    const PAGE: usize = 4096;
    const ALL: usize = BUF / PAGE;
    let tries: [(SendOp, usize, usize); 7] = [
        (SendOp::Write, 0, PAGE),
        (SendOp::Read, 0, PAGE),
        (SendOp::Write, 1, 64),
        (SendOp::Read, 1, 2 * PAGE),
        (SendOp::Write, 0, BUF),
        (SendOp::Write, ALL / 2, BUF),
        (SendOp::Read, ALL / 2, BUF),
    ];
    let ways = [Way::Descriptor, Way::Process];
    for ((op, kept, len), way) in tries.into_iter().flat_map(|case| ways.map(|way| (case, way))) {
        let pair = Case::new(way);
        // SAFETY: new memory.
        let memory = unsafe {
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), BUF, rights, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        assert_ne!(memory, libc::MAP_FAILED);
        let addr = memory as u64;
        // SAFETY: nobody uses it but the card, which is to find that it is gone.
        let mr = unsafe { Mr::reg(&pair.b.pd, addr, BUF as u64, addr, all_access()) }.unwrap();
        let gone = memory.wrapping_byte_add(kept * PAGE);
        // SAFETY: pages of that memory.
        assert_eq!(unsafe { libc::munmap(gone, BUF - kept * PAGE) }, 0);
        /* one begins in what is left */
        let from = addr + if kept == 0 || len > PAGE { 0 } else { (kept * PAGE) as u64 - 8 };
        let sges = [pair.a.sge(0, len)];
        let wr = SendWr { remote_addr: from, rkey: mr.rkey(), ..pair.wr(op, &sges, 0) };
        let what = format!("{op:?} of {len}, {kept} pages kept, {way:?}");
        assert_eq!(pair.status(&wr), WcStatus::RemAccessErr, "{what}");
        assert_eq!(pair.qb.state(), QpState::Err, "{what}");
    }
}

#[test]
fn windows_are_the_affair_of_their_card() {
    let pair = Case::new(Way::Descriptor);
    let (a, b) = (&pair.a, &pair.b);
    a.fill(0, b"a window");
    let mr = b.reg(0, 4096, Access::LOCAL_WRITE | Access::MW_BIND);
    let mw = Mw::alloc(&b.pd, WindowType::Two).unwrap();
    let bind = MwBind { mr: mr.lkey(), addr: b.addr(64), length: 64, access: Access::REMOTE_WRITE };
    let rkey = mw.rkey() ^ 1;
    post(&pair.qb, &mw.bind_wr(1, SendFlags::SIGNALED, rkey, &bind)).unwrap();
    assert_eq!(b.completions(1)[0].status, WcStatus::Success);
    let sges = [a.sge(0, 8)];
    pair.direct(0, |pair| {
        let write = SendWr { rkey, ..pair.wr(SendOp::Write, &sges, 64) };
        assert_eq!(pair.status(&write), WcStatus::Success);
        b.post_recv(&pair.qb, 3, 1024, 64).unwrap();
        assert_eq!(pair.status(&SendWr { op: SendOp::SendInv, imm: rkey, ..write }), WcStatus::Success);
        assert_eq!(pair.status(&write), WcStatus::RemAccessErr);
    });
    assert_eq!(b.bytes(64, 8), b"a window");
}

#[test]
fn a_queue_pair_in_error_is_not_written_any_more() {
    each_way(write_to_error);
}

fn write_to_error(pair: Case) {
    let a = &pair.a;
    a.fill(0, b"too late");
    pair.direct(1, |p| assert_eq!(p.run(SendOp::Write, &[a.sge(0, 8)], 0), WcStatus::Success));
    to_err(&pair.qb);
    pair.direct(0, |p| assert_eq!(p.run(SendOp::Write, &[a.sge(0, 8)], 64), WcStatus::RetryExcErr));
    assert_eq!(pair.bytes(64, 8), [0; 8]);
}

#[test]
fn a_queue_pair_of_changed_rights_is_asked() {
    each_way(change_rights);
}

fn change_rights(pair: Case) {
    let change = |access| {
        pair.qb.modify(&QpAttr { access, ..QpAttr::default() }, QpAttrMask::ACCESS_FLAGS).unwrap();
    };
    let write = |pair: &Case| pair.run(SendOp::Write, &[pair.a.sge(0, 8)], 0);
    change(all_access().difference(Access::LOCAL_WRITE));
    /* the same rights */
    pair.direct(1, |pair| assert_eq!(write(pair), WcStatus::Success));
    change(Access::REMOTE_WRITE);
    pair.direct(0, |pair| assert_eq!(write(pair), WcStatus::Success));
    change(Access::REMOTE_READ);
    pair.direct(0, |pair| assert_eq!(write(pair), WcStatus::RemAccessErr));
}

#[test]
fn what_stands_behind_a_send_waits_for_it() {
    each_way(wait_behind_a_send);
}

fn wait_behind_a_send(pair: Case) {
    let (a, b) = (&pair.a, &pair.b);
    a.fill(0, b"in order");
    let sges = [a.sge(0, 8)];
    /* executed by itself behind the SEND, where that is worth a wait */
    pair.direct(u64::from(pair.is_mapped()), |pair| {
        post(&pair.qa, &send(1, &sges)).unwrap();
        post(&pair.qa, &SendWr { wr_id: 2, ..pair.wr(SendOp::Write, &sges, 500) }).unwrap();
        wait_for("an RNR NAK", || {
            assert_eq!(a.cq.poll(&mut [Default::default()]).unwrap(), 0);
            pair.count("rcvd_rnr") > 0
        });
        assert_eq!(pair.bytes(500, 8), [0; 8], "the WRITE stands behind the SEND");
        b.post_recv(&pair.qb, 9, 100, 64).unwrap();
        assert_eq!(a.completions(2).iter().map(|cqe| cqe.wr_id).collect::<Vec<_>>(), [1, 2]);
    });
    assert_eq!(pair.bytes(500, 8), b"in order");
}

#[test]
fn completions_come_in_order_and_only_where_they_are_wanted() {
    each_way(complete_in_order);
}

fn complete_in_order(pair: Case) {
    let a = &pair.a;
    a.fill(0, b"once and");
    let half = BUF / 2;
    let (put, got) = ([a.sge(0, half)], [a.sge(half, half)]);
    /* the first makes no completion, and the others stand behind it */
    pair.direct(if pair.waits(half) { 3 } else { 0 }, |pair| {
        let mut poster = pair.qa.post_send();
        poster.push(&SendWr { flags: SendFlags::empty(), ..pair.wr(SendOp::Write, &put, 7) }).unwrap();
        poster.push(&SendWr { wr_id: 3, ..pair.wr(SendOp::Read, &got, 7) }).unwrap();
        poster.push(&SendWr { wr_id: 4, ..pair.wr(SendOp::Write, &put, 70) }).unwrap();
        poster.ring();
        assert_eq!(a.completions(2).iter().map(|cqe| cqe.wr_id).collect::<Vec<_>>(), [3, 4]);
    });
    assert_eq!(a.bytes(half, 8), b"once and");
}

#[test]
fn requests_in_a_row_go_by_the_ring_if_they_need_system_calls() {
    each_way(|pair| write_in_a_row(&pair, 8));
    each_way(|pair| write_in_a_row(&pair, BUF / 2));
}

fn write_in_a_row(pair: &Case, len: usize) {
    let a = &pair.a;
    let put = [a.sge(0, len)];
    /* of those that need a system call, the first one stands alone */
    pair.direct(if pair.waits(len) { 8 } else { 1 }, |pair| {
        let mut poster = pair.qa.post_send();
        for at in 0..8 {
            poster.push(&pair.wr(SendOp::Write, &put, 8 * at)).unwrap();
        }
        poster.ring();
        a.completions(8);
    });
    /* the program has kept its queue full, and may do so again: it is believed that it does not with the
     * fourth */
    pair.direct(if pair.waits(len) { 6 } else { 3 }, |pair| {
        for _ in 0..6 {
            assert_eq!(pair.run(SendOp::Write, &put, 0), WcStatus::Success);
        }
    });
}

#[test]
fn atomics_are_executed_on_mapped_memory() {
    let pair = Case::new(Way::Mapped);
    let a = &pair.a;
    let (back, word) = ([a.sge(0, 4), a.sge(100, 4)], [a.sge(200, 8)]);
    let executed = pair.count("local_executed");
    let fetched = || [a.bytes(0, 4), a.bytes(100, 4)].concat();
    pair.direct(4, |pair| {
        pair.fill(64, &40u64.to_ne_bytes());
        let add = SendWr { compare_add: 2, ..pair.wr(SendOp::FetchAdd, &back, 64) };
        assert_eq!((pair.status(&add), fetched()), (WcStatus::Success, 40u64.to_ne_bytes().to_vec()));
        let swap = SendWr { compare_add: 42, swap: 9, ..pair.wr(SendOp::CmpSwap, &back, 64) };
        assert_eq!((pair.status(&swap), fetched()), (WcStatus::Success, 42u64.to_ne_bytes().to_vec()));
        assert_eq!((pair.status(&swap), fetched()), (WcStatus::Success, 9u64.to_ne_bytes().to_vec()));
        a.fill(200, b"a store.");
        assert_eq!(pair.run(SendOp::AtomicWrite, &word, 64), WcStatus::Success);
    });
    assert_eq!(pair.bytes(64, 8), b"a store.");
    assert_eq!(pair.count("local_executed"), executed, "the peer's card did nothing");
}

/// Two cards add to one word, one through a mapping, the other through its own memory.
#[test]
fn atomics_of_two_ways_are_atomic() {
    const EACH: usize = 2000;
    let pair = Case::new(Way::Mapped);
    let (b, qc, qd) = (&pair.b, pair.b.qp(QpType::Rc), pair.b.qp(QpType::Rc));
    connect(b, &qc, b, &qd);
    let add = |node: &Node, qp: &Qp| {
        let sges = [node.sge(0, 8)];
        for _ in 0..EACH {
            post(qp, &SendWr { compare_add: 1, ..pair.wr(SendOp::FetchAdd, &sges, 8) }).unwrap();
            assert_eq!(node.completions(1)[0].status, WcStatus::Success);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| add(&pair.a, &pair.qa));
        scope.spawn(|| add(b, &qc));
    });
    assert_eq!(pair.bytes(8, 8), (2 * EACH as u64).to_ne_bytes());
    assert!(pair.count("local_mapped") >= EACH as u64);
}

#[test]
fn what_is_long_goes_by_the_process_number_where_it_was_asked_for() {
    let pair = Case::new(Way::Process);
    let a = &pair.a;
    let half = BUF / 2;
    let data: Vec<u8> = (0..half).map(|n| ((n * 5) >> 3) as u8).collect();
    a.fill(0, &data);
    for (len, traced) in [(half, 2), (half - 1, 0)] {
        pair.fill(0, &vec![0; half]);
        let before = ["local_traced", "local_direct"].map(|name| pair.count(name));
        assert_eq!(pair.run(SendOp::Write, &[a.sge(0, len)], 3), WcStatus::Success);
        assert_eq!(pair.run(SendOp::Read, &[a.sge(half, len)], 3), WcStatus::Success);
        assert!(pair.bytes(3, len) == data[..len] && a.bytes(half, len) == data[..len], "{len} bytes");
        let now = ["local_traced", "local_direct"].map(|name| pair.count(name));
        assert_eq!([now[0] - before[0], now[1] - before[1]], [traced, 2 - traced], "{len} bytes");
    }
}

/// A SEND of device memory, which both have mapped, into two buffers of one receive; then one of private
/// memory, and one that is short.
#[test]
fn long_sends_of_mapped_memory_are_fetched_by_the_receiver() {
    const LONG: usize = 40_000;
    const REST: usize = 1_000;
    let pair = Case::new(Way::Mapped);
    let data: Vec<u8> = (0..BUF).map(|n| ((n * 7) >> 3) as u8).collect();
    pair.fill(0, &data);
    pair.b.fill(0, &data);
    let mapped = |at, len| Sge { addr: at as u64, len: len as u32, lkey: pair.dm_mr.lkey() };
    for (len, is_mapped, fetched) in [(LONG, true, 1), (LONG, false, 0), (4096, true, 0)] {
        let of = |at, len| if is_mapped { mapped(at, len) } else { pair.b.sge(at, len) };
        let what = format!("{len} bytes, mapped: {is_mapped}");
        pair.a.fill(0, &vec![0; BUF]);
        let mut poster = pair.qa.post_recv();
        poster.push(&RecvWr { wr_id: 3, sges: &[pair.a.sge(0, 100), pair.a.sge(REST, BUF - REST)] }).unwrap();
        poster.ring();
        let before = pair.count("local_fetched");
        post(&pair.qb, &send(4, &[of(4, len), of(LONG + 8, 100)])).unwrap();
        let received = pair.a.completions(1)[0];
        assert_eq!((received.status, received.byte_len as usize), (WcStatus::Success, len + 100), "{what}");
        assert_eq!(pair.b.completions(1)[0].status, WcStatus::Success, "{what}");
        let wanted = [&data[4..4 + len], &data[LONG + 8..LONG + 108]].concat();
        assert!(pair.a.bytes(0, 100) == wanted[..100] && pair.a.bytes(REST, len) == wanted[100..], "{what}");
        assert_eq!(pair.count("local_fetched") - before, fetched, "{what}");
    }
}
