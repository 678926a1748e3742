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

/// Memory that a peer has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// Of its own: reached by a descriptor
    Private,
    /// In a memory file: mapped by both
    Mapped,
}

const KINDS: [Kind; 2] = [Kind::Private, Kind::Mapped];

/// A connection to a peer with memory of a kind.
struct Case {
    pair: Pair,
    kind: Kind,
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
    fn of(settings: &Settings, kind: Kind) -> Case {
        let pair = Pair::new(settings);
        let dm = Dm::alloc(&pair.b.ctx, BUF as u64, 12).unwrap();
        let dm_mr = Mr::device(&pair.b.pd, &dm, 0, BUF as u64, all_access() | Access::ZERO_BASED).unwrap();
        let case = Case { pair, kind, dm, dm_mr };
        assert_eq!(case.run(SendOp::Write, &[case.a.sge(0, 1)], 0), WcStatus::Success);
        case
    }

    fn new(kind: Kind) -> Case {
        Case::of(&local(), kind)
    }

    fn wr<'a>(&self, op: SendOp, sges: &'a [Sge], at: usize) -> SendWr<'a> {
        let wr = self.pair.wr(op, sges, at);
        match self.kind {
            Kind::Private => wr,
            Kind::Mapped => SendWr { remote_addr: at as u64, rkey: self.dm_mr.rkey(), ..wr },
        }
    }

    /// The peer's bytes, those of whole words around them.
    fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        if self.kind == Kind::Private {
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
        match self.kind {
            Kind::Private => self.b.fill(at, data),
            // SAFETY: a slice of so many bytes.
            Kind::Mapped => unsafe { self.dm.copy_in(at as u64, data.as_ptr(), data.len() as u64) }.unwrap(),
        }
    }

    /// A region over a part of the peer's memory.
    fn reg(&self, len: usize, access: Access) -> Mr {
        match self.kind {
            Kind::Private => self.b.reg(0, len, access),
            Kind::Mapped => {
                Mr::device(&self.b.pd, &self.dm, 0, len as u64, access | Access::ZERO_BASED).unwrap()
            }
        }
    }

    fn status(&self, wr: &SendWr<'_>) -> WcStatus {
        post(&self.qa, wr).unwrap();
        self.a.completions(1)[0].status
    }

    fn run(&self, op: SendOp, sges: &[Sge], at: usize) -> WcStatus {
        self.status(&self.wr(op, sges, at))
    }

    /// What is executed meanwhile by its way, counted; nothing goes by the other.
    fn direct(&self, run: impl FnOnce(&Case)) -> u64 {
        let names = match self.kind {
            Kind::Private => ["local_direct", "local_mapped"],
            Kind::Mapped => ["local_mapped", "local_direct"],
        };
        let before = names.map(|name| self.count(name));
        run(self);
        assert_eq!(self.count(names[1]), before[1], "another way");
        self.count(names[0]) - before[0]
    }
}

fn each_kind(run: impl Fn(Case)) {
    KINDS.into_iter().for_each(|kind| run(Case::new(kind)));
}

#[test]
fn writes_and_reads_are_executed_without_the_peer() {
    each_kind(write_and_read);
}

fn write_and_read(pair: Case) {
    const LEN: usize = 30_000;
    let a = &pair.a;
    let data: Vec<u8> = (0..LEN).map(|n| ((n * 31) >> 3) as u8).collect();
    a.fill(0, &data);
    let executed = pair.count("local_executed");
    for len in [1, 7, 8, 9, 16, 4096, LEN] {
        let pieces = [a.sge(0, len / 3), a.sge(len / 3, len - len / 3)];
        let back = [a.sge(LEN, len / 2), a.sge(LEN + len / 2, len - len / 2)];
        pair.fill(0, &vec![0; LEN]);
        let made = pair.direct(|pair| {
            assert_eq!(pair.run(SendOp::Write, &pieces, 5), WcStatus::Success);
            assert!(pair.bytes(5, len) == data[..len], "WRITE of {len}");
            assert_eq!(pair.bytes(5 + len, 1), [0]);
            assert_eq!(pair.run(SendOp::Read, &back, 5), WcStatus::Success);
        });
        assert!(a.bytes(LEN, len) == data[..len], "READ of {len}");
        assert_eq!(made, 2, "{len} bytes");
    }
    let link = if pair.kind == Kind::Mapped { "local:mapped" } else { "local:memory" };
    let row = row_of(pair.port, pair.qa.number());
    assert!(row.contains(link), "{row}");
    let made = pair.direct(|pair| {
        post_inline(&pair.qa, &pair.wr(SendOp::Write, &[], 100), b"in the queue").unwrap();
        assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    });
    assert_eq!((made, pair.bytes(100, 12)), (1, b"in the queue".to_vec()));
    assert_eq!(pair.count("local_executed"), executed, "the peer's card did nothing");
}

#[test]
fn nobody_is_trusted_where_the_setting_says_so() {
    for kind in KINDS {
        let pair = Case::of(&Settings { link_trust: LinkTrust::None, ..local() }, kind);
        let made = pair.direct(|pair| {
            for op in [SendOp::Write, SendOp::Read, SendOp::FetchAdd] {
                assert_eq!(pair.run(op, &[pair.a.sge(0, 8)], 0), WcStatus::Success, "{op:?}");
            }
        });
        assert_eq!(made, 0, "{kind:?}");
    }
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
            let mr = match p.kind {
                Kind::Private => p.b.reg(4, 64, all),
                Kind::Mapped => Mr::device(&p.b.pd, &p.dm, 4, 64, all).unwrap(),
            };
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
    for ((what, make), kind) in cases.into_iter().flat_map(|case| KINDS.map(|kind| (case, kind))) {
        let local = Case::new(kind);
        assert_eq!(make(&local), make(&Case::of(&wire(), kind)), "{what}, {kind:?}");
        assert_eq!(local.qa.state(), QpState::Err, "{what}, {kind:?}");
    }
}

/// A long request goes in pieces, and not one of them if the last one may not go.
#[test]
fn what_is_open_in_part_is_not_begun() {
    const OPEN: usize = 2 << 20;
    let pair = Case::new(Kind::Private);
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
    let ways = [LinkTrust::User, LinkTrust::Trace];
    for ((op, kept, len), link_trust) in tries.into_iter().flat_map(|case| ways.map(|way| (case, way))) {
        let pair = Case::of(&Settings { link_trust, ..local() }, Kind::Private);
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
        let what = format!("{op:?} of {len}, {kept} pages kept, {link_trust:?}");
        assert_eq!(pair.status(&wr), WcStatus::RemAccessErr, "{what}");
        assert_eq!(pair.qb.state(), QpState::Err, "{what}");
    }
}

#[test]
fn windows_are_the_affair_of_their_card() {
    let pair = Case::new(Kind::Private);
    let (a, b) = (&pair.a, &pair.b);
    a.fill(0, b"a window");
    let mr = b.reg(0, 4096, Access::LOCAL_WRITE | Access::MW_BIND);
    let mw = Mw::alloc(&b.pd, WindowType::Two).unwrap();
    let bind = MwBind { mr: mr.lkey(), addr: b.addr(64), length: 64, access: Access::REMOTE_WRITE };
    let rkey = mw.rkey() ^ 1;
    post(&pair.qb, &mw.bind_wr(1, SendFlags::SIGNALED, rkey, &bind)).unwrap();
    assert_eq!(b.completions(1)[0].status, WcStatus::Success);
    let sges = [a.sge(0, 8)];
    let made = pair.direct(|pair| {
        let write = SendWr { rkey, ..pair.wr(SendOp::Write, &sges, 64) };
        assert_eq!(pair.status(&write), WcStatus::Success);
        b.post_recv(&pair.qb, 3, 1024, 64).unwrap();
        assert_eq!(pair.status(&SendWr { op: SendOp::SendInv, imm: rkey, ..write }), WcStatus::Success);
        assert_eq!(pair.status(&write), WcStatus::RemAccessErr);
    });
    assert_eq!((made, b.bytes(64, 8)), (0, b"a window".to_vec()));
}

#[test]
fn a_queue_pair_in_error_is_not_written_any_more() {
    each_kind(write_to_error);
}

fn write_to_error(pair: Case) {
    let a = &pair.a;
    a.fill(0, b"too late");
    assert_eq!(pair.direct(|p| assert_eq!(p.run(SendOp::Write, &[a.sge(0, 8)], 0), WcStatus::Success)), 1);
    to_err(&pair.qb);
    let made = pair.direct(|p| assert_eq!(p.run(SendOp::Write, &[a.sge(0, 8)], 64), WcStatus::RetryExcErr));
    assert_eq!((made, pair.bytes(64, 8)), (0, vec![0; 8]));
}

#[test]
fn a_queue_pair_of_changed_rights_is_asked() {
    each_kind(change_rights);
}

fn change_rights(pair: Case) {
    let change = |access| {
        pair.qb.modify(&QpAttr { access, ..QpAttr::default() }, QpAttrMask::ACCESS_FLAGS).unwrap();
    };
    let write = |pair: &Case| pair.run(SendOp::Write, &[pair.a.sge(0, 8)], 0);
    change(all_access().difference(Access::LOCAL_WRITE));
    assert_eq!(pair.direct(|pair| assert_eq!(write(pair), WcStatus::Success)), 1, "the same rights");
    change(Access::REMOTE_WRITE);
    assert_eq!(pair.direct(|pair| assert_eq!(write(pair), WcStatus::Success)), 0);
    change(Access::REMOTE_READ);
    assert_eq!(pair.direct(|pair| assert_eq!(write(pair), WcStatus::RemAccessErr)), 0);
}

#[test]
fn what_stands_behind_a_send_waits_for_it() {
    each_kind(wait_behind_a_send);
}

fn wait_behind_a_send(pair: Case) {
    let (a, b) = (&pair.a, &pair.b);
    a.fill(0, b"in order");
    let sges = [a.sge(0, 8)];
    let made = pair.direct(|pair| {
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
    /* executed by itself behind the SEND, where that is worth a wait */
    let own = u64::from(pair.kind == Kind::Mapped);
    assert_eq!((made, pair.bytes(500, 8)), (own, b"in order".to_vec()));
}

#[test]
fn completions_come_in_order_and_only_where_they_are_wanted() {
    each_kind(complete_in_order);
}

fn complete_in_order(pair: Case) {
    let a = &pair.a;
    a.fill(0, b"once and");
    let half = BUF / 2;
    let (put, got) = ([a.sge(0, half)], [a.sge(half, half)]);
    let made = pair.direct(|pair| {
        let mut poster = pair.qa.post_send();
        poster.push(&SendWr { flags: SendFlags::empty(), ..pair.wr(SendOp::Write, &put, 7) }).unwrap();
        poster.push(&SendWr { wr_id: 3, ..pair.wr(SendOp::Read, &got, 7) }).unwrap();
        poster.push(&SendWr { wr_id: 4, ..pair.wr(SendOp::Write, &put, 70) }).unwrap();
        poster.ring();
        assert_eq!(a.completions(2).iter().map(|cqe| cqe.wr_id).collect::<Vec<_>>(), [3, 4]);
    });
    /* the first makes no completion, and the others stand behind it */
    let own = if pair.kind == Kind::Mapped { 3 } else { 0 };
    assert_eq!((made, a.bytes(half, 8)), (own, b"once and".to_vec()));
}

#[test]
fn requests_in_a_row_go_by_the_ring_if_they_need_system_calls() {
    each_kind(|pair| write_in_a_row(&pair, 8));
    each_kind(|pair| write_in_a_row(&pair, BUF / 2));
}

fn write_in_a_row(pair: &Case, len: usize) {
    let a = &pair.a;
    let put = [a.sge(0, len)];
    let made = pair.direct(|pair| {
        let mut poster = pair.qa.post_send();
        for at in 0..8 {
            poster.push(&pair.wr(SendOp::Write, &put, 8 * at)).unwrap();
        }
        poster.ring();
        a.completions(8);
    });
    let mapped = pair.kind == Kind::Mapped;
    /* of those that need a system call, the first one stands alone */
    assert_eq!(made, if mapped { 8 } else { 1 });
    let made = pair.direct(|pair| {
        for _ in 0..6 {
            assert_eq!(pair.run(SendOp::Write, &put, 0), WcStatus::Success);
        }
    });
    /* the program has kept its queue full, and may do so again: it is believed that it does not with the
     * fourth */
    assert_eq!(made, if mapped { 6 } else { 3 });
}

#[test]
fn atomics_are_executed_on_mapped_memory() {
    let pair = Case::new(Kind::Mapped);
    let a = &pair.a;
    let (back, word) = ([a.sge(0, 4), a.sge(100, 4)], [a.sge(200, 8)]);
    let executed = pair.count("local_executed");
    let fetched = || [a.bytes(0, 4), a.bytes(100, 4)].concat();
    let made = pair.direct(|pair| {
        pair.fill(64, &40u64.to_ne_bytes());
        let add = SendWr { compare_add: 2, ..pair.wr(SendOp::FetchAdd, &back, 64) };
        assert_eq!((pair.status(&add), fetched()), (WcStatus::Success, 40u64.to_ne_bytes().to_vec()));
        let swap = SendWr { compare_add: 42, swap: 9, ..pair.wr(SendOp::CmpSwap, &back, 64) };
        assert_eq!((pair.status(&swap), fetched()), (WcStatus::Success, 42u64.to_ne_bytes().to_vec()));
        assert_eq!((pair.status(&swap), fetched()), (WcStatus::Success, 9u64.to_ne_bytes().to_vec()));
        a.fill(200, b"a store.");
        assert_eq!(pair.run(SendOp::AtomicWrite, &word, 64), WcStatus::Success);
    });
    assert_eq!((made, pair.bytes(64, 8)), (4, b"a store.".to_vec()));
    assert_eq!(pair.count("local_executed"), executed, "the peer's card did nothing");
}

/// Two cards add to one word, one through a mapping, the other through its own memory.
#[test]
fn atomics_of_two_ways_are_atomic() {
    const EACH: usize = 2000;
    let pair = Case::new(Kind::Mapped);
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
    let pair = Case::of(&Settings { link_trust: LinkTrust::Trace, ..local() }, Kind::Private);
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
    let pair = Case::new(Kind::Mapped);
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
