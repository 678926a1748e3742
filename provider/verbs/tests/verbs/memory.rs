//! Memory regions of every kind, with packets on them: changed under way, on demand, null, device memory,
//! mapped descriptors, and handles of others.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use crate::common::*;
use nix::sys::memfd::{MFdFlags, memfd_create};
use starverbs_core::{Access, Cqe, Mtu, QpType, SendOp, Sge, WcStatus};
use starverbs_verbs::{Advice, Context, Dm, MAX_DM, MemoryRange, Mr, Pd, Qp, Rereg, Result, SendWr};

const PAGE: u64 = 4096;

fn errno<T>(result: Result<T>) -> i32 {
    result.err().map_or(0, |error| error.errno())
}

/// Pages that a test may take away again.
struct Pages {
    addr: u64,
    len: usize,
}

impl Pages {
    fn new(count: u64) -> Pages {
        let len = (count * PAGE) as usize;
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping where the kernel likes.
        let addr = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
        assert_ne!(addr, libc::MAP_FAILED);
        Pages { addr: addr as u64, len }
    }

    fn allow(&self, page: u64, prot: i32) {
        // SAFETY: pages of this mapping, to which nobody has a reference.
        let done = unsafe { libc::mprotect((self.addr + page * PAGE) as *mut _, PAGE as usize, prot) };
        assert_eq!(done, 0);
    }

    fn word(&self, at: u64) -> u64 {
        // SAFETY: an aligned word of this mapping.
        unsafe { ((self.addr + at) as *const u64).read_volatile() }
    }

    fn set(&self, at: u64, value: u64) {
        // SAFETY: as in `word`.
        unsafe { ((self.addr + at) as *mut u64).write_volatile(value) };
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`.
        unsafe { libc::munmap(self.addr as *mut _, self.len) };
    }
}

/// A region of pages that nobody has a reference to, or an address that is refused.
fn reg_at(pd: &Pd, addr: u64, length: u64, iova: u64, access: Access) -> Result<Mr> {
    // SAFETY: see above. Where it is everything on demand, peers write to pages alone.
    unsafe { Mr::reg(pd, addr, length, iova, access) }
}

/// As `reg_at`.
fn rereg(mr: &Mr, change: &Rereg<'_>) -> Result<()> {
    // SAFETY: as in `reg_at`.
    unsafe { mr.rereg(change) }
}

fn connected() -> (Node, Node, Qp, Qp) {
    let (a, b) = Node::pair();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    (a, b, qa, qb)
}

/// One operation of `a` on remote memory, local bytes at 0; its completion.
fn remote(a: &Node, qa: &Qp, op: SendOp, len: usize, remote_addr: u64, rkey: u32) -> Cqe {
    let sges = [a.sge(0, len)];
    post(qa, &SendWr { op, remote_addr, rkey, compare_add: 5, swap: 9, ..send(1, &sges) }).unwrap();
    a.completions(1)[0]
}

#[test]
fn a_region_changes_and_keeps_its_keys() {
    let (a, b, qa, qb) = connected();
    let (first, second) = (Pages::new(1), Pages::new(1));
    let mr = reg_at(&b.pd, first.addr, PAGE, first.addr, Access::LOCAL_WRITE).unwrap();
    let key = mr.rkey();
    a.fill(0, &7u64.to_ne_bytes());
    let write = |addr| remote(&a, &qa, SendOp::Write, 8, addr, key).status;
    assert_eq!(write(first.addr), WcStatus::RemAccessErr);
    reconnect(&a, &qa, &b, &qb);
    rereg(&mr, &Rereg { access: Some(all_access()), ..Rereg::default() }).unwrap();
    assert_eq!((write(first.addr), first.word(0)), (WcStatus::Success, 7));
    rereg(&mr, &Rereg { range: Some(MemoryRange { addr: second.addr, length: 64 }), ..Rereg::default() })
        .unwrap();
    assert_eq!((write(second.addr), second.word(0)), (WcStatus::Success, 7));
    assert_eq!((mr.lkey(), mr.rkey(), mr.length()), (key, key, 64));
    assert_eq!(write(first.addr), WcStatus::RemAccessErr);
    reconnect(&a, &qa, &b, &qb);
    let other = Pd::alloc(&b.ctx).unwrap();
    rereg(&mr, &Rereg { pd: Some(&other), ..Rereg::default() }).unwrap();
    assert_eq!(errno(other.dealloc()), libc::EBUSY);
    assert_eq!(write(second.addr), WcStatus::RemAccessErr);
    reconnect(&a, &qa, &b, &qb);
    let all = Rereg {
        range: Some(MemoryRange { addr: first.addr, length: PAGE }),
        pd: Some(&b.pd),
        access: Some(all_access()),
    };
    rereg(&mr, &all).unwrap();
    other.dealloc().unwrap();
    assert_eq!(write(first.addr), WcStatus::Success);
    /* what is refused changes nothing */
    for (bad, code) in [
        (Rereg { range: Some(MemoryRange { addr: 64, length: 64 }), ..Rereg::default() }, libc::EFAULT),
        (Rereg { range: Some(MemoryRange { addr: u64::MAX, length: 64 }), ..Rereg::default() }, libc::EINVAL),
        (Rereg { access: Some(Access::REMOTE_WRITE), ..Rereg::default() }, libc::EINVAL),
        (Rereg { pd: Some(&a.pd), ..Rereg::default() }, libc::EINVAL),
    ] {
        assert_eq!(errno(rereg(&mr, &bad)), code);
        assert_eq!(write(first.addr), WcStatus::Success);
    }
    mr.dereg().unwrap();
    assert_eq!(errno(rereg(&mr, &all)), libc::EINVAL);
}

/// The region's memory alternates between two places while a peer writes: each write lands in one of them.
#[test]
fn a_region_changes_while_packets_flow() {
    let (a, b, qa, _qb) = connected();
    let places = [Pages::new(1), Pages::new(1)];
    let mr = reg_at(&b.pd, places[0].addr, PAGE, 0, all_access() | Access::ZERO_BASED).unwrap();
    for round in 1..200u64 {
        a.fill(0, &round.to_ne_bytes());
        let sges = [a.sge(0, 4096)];
        let wr = SendWr { op: SendOp::Write, remote_addr: 0, rkey: mr.rkey(), ..send(round, &sges) };
        post(&qa, &wr).unwrap();
        let to = &places[round as usize % 2];
        rereg(&mr, &Rereg { range: Some(MemoryRange { addr: to.addr, length: PAGE }), ..Rereg::default() })
            .unwrap();
        let done = a.completions(1)[0];
        assert_eq!((done.wr_id, done.status), (round, WcStatus::Success));
        assert!(places.iter().any(|place| place.word(0) == round));
    }
}

#[test]
fn regions_have_addresses_of_their_own() {
    let (a, b, qa, qb) = connected();
    let pages = Pages::new(1);
    a.fill(0, b"at iova!");
    for (iova, access) in [(0xdead_beef_0000_0000, all_access()), (77, all_access() | Access::ZERO_BASED)] {
        let mr = reg_at(&b.pd, pages.addr, PAGE, iova, access).unwrap();
        let base = if access.contains(Access::ZERO_BASED) { 0 } else { iova };
        assert_eq!(remote(&a, &qa, SendOp::Write, 8, base + 16, mr.rkey()).status, WcStatus::Success);
        assert_eq!(pages.word(16), u64::from_ne_bytes(*b"at iova!"));
        pages.set(16, 0);
        assert_eq!(remote(&a, &qa, SendOp::Write, 8, pages.addr, mr.rkey()).status, WcStatus::RemAccessErr);
        reconnect(&a, &qa, &b, &qb);
    }
    assert_eq!(errno(reg_at(&b.pd, pages.addr, PAGE, u64::MAX, all_access())), libc::EINVAL);
    assert_eq!(errno(reg_at(&b.pd, pages.addr, 0, 0, all_access())), libc::EINVAL);
}

#[test]
fn everything_can_be_one_region_and_holes_are_errors() {
    let (a, b, qa, qb) = connected();
    let pages = Pages::new(3);
    let everything = reg_at(&b.pd, 0, u64::MAX, 0, all_access() | Access::ON_DEMAND).unwrap();
    assert_eq!(everything.length(), u64::MAX);
    let key = everything.rkey();
    a.fill(0, &[3; 9000]);
    /* across pages, more than a packet */
    assert_eq!(remote(&a, &qa, SendOp::Write, 9000, pages.addr, key).status, WcStatus::Success);
    assert_eq!((pages.word(0), pages.word(8992)), (0x0303_0303_0303_0303, 0x0303_0303_0303_0303));
    pages.set(8, 5);
    assert_eq!(remote(&a, &qa, SendOp::CmpSwap, 8, pages.addr + 8, key).status, WcStatus::Success);
    assert_eq!((a.word(0), pages.word(8)), (5, 9));
    assert_eq!(remote(&a, &qa, SendOp::FetchAdd, 8, pages.addr + 8, key).status, WcStatus::Success);
    assert_eq!((a.word(0), pages.word(8)), (9, 14));
    assert_eq!(remote(&a, &qa, SendOp::AtomicWrite, 8, pages.addr + 24, key).status, WcStatus::Success);
    assert_eq!(pages.word(24), 9);
    assert_eq!(remote(&a, &qa, SendOp::Read, 9000, pages.addr, key).status, WcStatus::Success);
    assert_eq!((a.word(0), a.word(8), a.word(16)), (0x0303_0303_0303_0303, 14, 0x0303_0303_0303_0303));
    pages.allow(1, libc::PROT_NONE);
    pages.allow(2, libc::PROT_READ);
    let hole = pages.addr + PAGE;
    for (op, at) in [
        (SendOp::Write, hole),
        (SendOp::Write, hole - 4),
        (SendOp::Write, hole + PAGE),
        (SendOp::Read, hole),
        (SendOp::Read, hole - 4),
        (SendOp::CmpSwap, hole),
        (SendOp::FetchAdd, hole + PAGE),
        (SendOp::AtomicWrite, hole),
        (SendOp::AtomicWrite, hole + PAGE),
        (SendOp::Write, 0),
        (SendOp::Write, 64),
        (SendOp::Read, 1 << 47),
        (SendOp::Read, 1 << 61),
        (SendOp::Read, 1 << 62),
        (SendOp::Write, 1 << 63),
        (SendOp::Write, u64::MAX - 7),
    ] {
        assert_eq!(remote(&a, &qa, op, 8, at, key).status, WcStatus::RemAccessErr, "{op:?} at {at:#x}");
        reconnect(&a, &qa, &b, &qb);
    }
    assert_eq!(
        remote(&a, &qa, SendOp::Read, 8, hole + PAGE, key).status,
        WcStatus::Success,
        "rights are kept"
    );
    let not = |access| errno(reg_at(&b.pd, 0, u64::MAX, 0, access));
    assert_eq!(not(all_access()), libc::EFAULT);
    assert_eq!(not(Access::ON_DEMAND | Access::HUGETLB), libc::EINVAL);
    assert_eq!(errno(reg_at(&b.pd, PAGE, u64::MAX, PAGE, Access::ON_DEMAND)), libc::EINVAL);
}

/// Says so when it goes.
struct Over<'a>(&'a std::sync::atomic::AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}

/// A thread takes pages away and gives them back while a peer reaches for them: errors, but no signal.
#[test]
fn pages_that_vanish_under_the_cards_hands_are_errors() {
    let (a, b, qa, qb) = connected();
    let pages = Pages::new(2);
    let everything = reg_at(&b.pd, 0, u64::MAX, 0, all_access() | Access::ON_DEMAND).unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    let ordering = std::sync::atomic::Ordering::Relaxed;
    std::thread::scope(|threads| {
        threads.spawn(|| {
            while !done.load(ordering) {
                pages.allow(1, libc::PROT_NONE);
                std::thread::yield_now();
                pages.allow(1, libc::PROT_READ | libc::PROT_WRITE);
                std::thread::yield_now();
            }
        });
        /* though something fails: else the other thread would go on for ever */
        let _over = Over(&done);
        for round in 0..300 {
            let ops = [SendOp::Write, SendOp::Read, SendOp::FetchAdd, SendOp::CmpSwap, SendOp::AtomicWrite];
            let op = ops[round % 5];
            let word = op.is_atomic() || op == SendOp::AtomicWrite;
            let (at, len) = if word { (PAGE, 8) } else { (0, 2 * PAGE as usize) };
            let status = remote(&a, &qa, op, len, pages.addr + at, everything.rkey()).status;
            if status != WcStatus::Success {
                assert_eq!(status, WcStatus::RemAccessErr);
                reconnect(&a, &qa, &b, &qb);
            }
        }
    });
}

#[test]
fn pages_come_and_go_under_an_on_demand_region() {
    let (a, b, qa, qb) = connected();
    let pages = Pages::new(2);
    pages.allow(1, libc::PROT_NONE);
    let access = Access::LOCAL_WRITE | Access::ON_DEMAND;
    let mr = reg_at(&a.pd, pages.addr, 2 * PAGE, pages.addr, access).unwrap();
    let sge = |at, len| Sge { addr: pages.addr + at, len, lkey: mr.lkey() };
    pages.set(0, 1234);
    /* gathered with ordinary memory, in a packet that is not copied otherwise */
    b.post_recv(&qb, 5, 0, 8192).unwrap();
    post(&qa, &send(1, &[sge(0, 4096), a.sge(0, 4096)])).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    assert_eq!((b.completions(1)[0].byte_len, b.word(0)), (8192, 1234));
    post(&qa, &send(2, &[sge(PAGE, 8)])).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::LocProtErr);
    reconnect(&a, &qa, &b, &qb);
    pages.allow(1, libc::PROT_READ | libc::PROT_WRITE);
    let read = |len| {
        let sges = [sge(PAGE, len)];
        let wr = SendWr { op: SendOp::Read, remote_addr: b.addr(0), rkey: b.mr.rkey(), ..send(3, &sges) };
        post(&qa, &wr).unwrap();
        a.completions(1)[0].status
    };
    assert_eq!((read(4096), pages.word(PAGE)), (WcStatus::Success, 1234));
    pages.allow(1, libc::PROT_READ);
    assert_eq!(read(8), WcStatus::LocProtErr);
    reconnect(&a, &qa, &b, &qb);
    /* a receive into a page that has gone */
    let mut poster = qa.post_recv();
    poster.push(&starverbs_verbs::RecvWr { wr_id: 8, sges: &[sge(PAGE, 64)] }).unwrap();
    poster.ring();
    post(&qb, &send(9, &[b.sge(0, 8)])).unwrap();
    assert_eq!(b.completions(1)[0].status, WcStatus::RemOpErr);
    assert_eq!(a.completions(1)[0].status, WcStatus::LocProtErr);
}

/// A list of which one part is copied and another refused makes no frame, and must not leave its copy to
/// others.
#[test]
fn a_list_that_fails_half_way_harms_no_other_queue_pair() {
    let (a, b, qa, qb) = connected();
    let large = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect_with(&a, &large.0, &b, &large.1, Mtu::M4096);
    let pages = Pages::new(2);
    let fill =
        |node: &Node| reg_at(&node.pd, pages.addr, 2 * PAGE, pages.addr, all_access() | Access::ON_DEMAND);
    let (mr_a, mr_b) = (fill(&a).unwrap(), fill(&b).unwrap());
    pages.set(0, 1234);
    let half = |node: &Node, qp: &Qp, mr: &Mr| {
        let bad = Sge { addr: node.addr(0), len: 8, lkey: !node.mr.lkey() };
        post(qp, &send(1, &[Sge { addr: pages.addr, len: 8, lkey: mr.lkey() }, bad])).unwrap();
        assert_eq!(node.completions(1)[0].status, WcStatus::LocProtErr);
    };
    half(&a, &qa, &mr_a);
    b.post_recv(&large.1, 2, 0, 4096).unwrap();
    post(&large.0, &send(2, &[Sge { addr: pages.addr, len: 4096, lkey: mr_a.lkey() }])).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    assert_eq!((b.completions(1)[0].status, b.word(0)), (WcStatus::Success, 1234));
    half(&b, &qb, &mr_b);
    let cqe = remote(&a, &large.0, SendOp::Read, 4096, pages.addr, mr_b.rkey());
    assert_eq!((cqe.status, a.word(0)), (WcStatus::Success, 1234));
}

#[test]
fn advice_is_checked_and_taken() {
    let node = Node::new(&settings());
    let pages = Pages::new(4);
    let mr = reg_at(&node.pd, pages.addr, 3 * PAGE, 0, Access::ON_DEMAND | Access::ZERO_BASED).unwrap();
    let writable =
        reg_at(&node.pd, pages.addr, PAGE * 3, pages.addr, Access::ON_DEMAND | Access::LOCAL_WRITE).unwrap();
    let advise =
        |advice, flush, addr, len, lkey| errno(node.pd.advise_mr(advice, flush, &[Sge { addr, len, lkey }]));
    let (len, key) = (3 * PAGE as u32, mr.lkey());
    for flush in [true, false] {
        for advice in [Advice::Prefetch, Advice::PrefetchNoFault] {
            assert_eq!(advise(advice, flush, 0, len, key), 0);
            assert_eq!(advise(advice, flush, 0, len + 1, key), libc::EFAULT, "beyond the region");
            assert_eq!(advise(advice, flush, PAGE * 4, 1, key), libc::EFAULT);
            assert_eq!(advise(advice, flush, u64::MAX, 1, key), libc::EFAULT);
            assert_eq!(advise(advice, flush, 0, 0, key), 0);
        }
        assert_eq!(advise(Advice::PrefetchWrite, flush, 0, len, key), libc::EPERM, "read-only");
        assert_eq!(advise(Advice::PrefetchWrite, flush, pages.addr, len, writable.lkey()), 0);
    }
    assert_eq!(advise(Advice::Prefetch, true, 0, len, key ^ 1), libc::EFAULT, "no such key");
    assert_eq!(
        advise(Advice::Prefetch, true, node.addr(0), 8, node.mr.lkey()),
        libc::EINVAL,
        "not on demand"
    );
    assert_eq!(errno(node.pd.advise_mr(Advice::Prefetch, true, &[])), libc::EINVAL);
    let other = Pd::alloc(&node.ctx).unwrap();
    let foreign = other.advise_mr(Advice::Prefetch, true, &[Sge { addr: 0, len: 8, lkey: key }]);
    assert_eq!(errno(foreign), libc::EPERM);
    pages.allow(1, libc::PROT_NONE);
    assert_eq!(advise(Advice::Prefetch, true, 0, len, key), libc::EFAULT, "a page that has gone");
    let everything = reg_at(&node.pd, 0, u64::MAX, 0, Access::ON_DEMAND).unwrap();
    assert_eq!(advise(Advice::Prefetch, false, 64, 8, everything.lkey()), libc::EFAULT);
    assert_eq!(advise(Advice::Prefetch, true, pages.addr, 8, everything.lkey()), 0);
}

#[test]
fn null_regions_drop_and_give_zeroes() {
    let (a, b, qa, qb) = connected();
    let null = Mr::null(&a.pd).unwrap();
    assert_eq!((null.rkey(), null.length()), (0, u64::MAX));
    let nothing = |len| Sge { addr: 0x1234_5678, len, lkey: null.lkey() };
    a.fill(0, &[7; 16]);
    b.post_recv(&qb, 1, 0, 6000).unwrap();
    post(&qa, &send(1, &[a.sge(0, 16), nothing(5000)])).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    assert_eq!(b.completions(1)[0].byte_len, 5016);
    assert_eq!((b.word(8), b.bytes(16, 5000)), (0x0707_0707_0707_0707, vec![0; 5000]));
    let sges = [nothing(16), a.sge(100, 16)];
    let wr = SendWr { op: SendOp::Read, remote_addr: b.addr(0), rkey: b.mr.rkey(), ..send(2, &sges) };
    post(&qa, &wr).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    assert_eq!(a.bytes(100, 16), vec![0; 16]);
    assert_eq!(
        errno(rereg(&null, &Rereg { access: Some(Access::empty()), ..Rereg::default() })),
        libc::EINVAL
    );
    let peer = [b.sge(0, 8)];
    let wr = SendWr { op: SendOp::Write, remote_addr: 0, rkey: null.lkey(), ..send(3, &peer) };
    post(&qb, &wr).unwrap();
    assert_eq!(b.completions(1)[0].status, WcStatus::RemAccessErr, "not for peers");
}

#[test]
fn device_memory_takes_every_operation() {
    let (a, b, qa, qb) = connected();
    let dm = Dm::alloc(&b.ctx, 1000, 13).unwrap();
    let copy_in = |offset, bytes: &[u8]| {
        // SAFETY: a slice.
        errno(unsafe { dm.copy_in(offset, bytes.as_ptr(), bytes.len() as u64) })
    };
    let copy_out = |offset, bytes: &mut [u8]| {
        // SAFETY: a slice.
        errno(unsafe { dm.copy_out(bytes.as_mut_ptr(), offset, bytes.len() as u64) })
    };
    assert_eq!(copy_in(8, &5u64.to_ne_bytes()), 0);
    assert_eq!((copy_in(2, &[0; 4]), copy_in(4, &[0; 3])), (libc::EINVAL, libc::EINVAL));
    assert_eq!((copy_in(1000, &[0; 4]), copy_out(u64::MAX - 3, &mut [0; 8])), (libc::EFAULT, libc::EFAULT));
    let access = all_access() | Access::ZERO_BASED;
    let mr = Mr::device(&b.pd, &dm, 8, 992, access).unwrap();
    assert_eq!(errno(dm.free()), libc::EBUSY);
    let key = mr.rkey();
    assert_eq!(remote(&a, &qa, SendOp::CmpSwap, 8, 0, key).status, WcStatus::Success);
    assert_eq!(a.word(0), 5);
    assert_eq!(remote(&a, &qa, SendOp::FetchAdd, 8, 0, key).status, WcStatus::Success);
    let mut now = [0; 8];
    assert_eq!((a.word(0), copy_out(8, &mut now), u64::from_ne_bytes(now)), (9, 0, 14));
    a.fill(0, &[6; 976]);
    assert_eq!(remote(&a, &qa, SendOp::Write, 976, 16, key).status, WcStatus::Success);
    a.fill(0, &[0; 976]);
    assert_eq!(remote(&a, &qa, SendOp::Read, 976, 16, key).status, WcStatus::Success);
    assert_eq!(a.bytes(0, 976), vec![6; 976]);
    assert_eq!(remote(&a, &qa, SendOp::Write, 976, 17, key).status, WcStatus::RemAccessErr);
    reconnect(&a, &qa, &b, &qb);
    b.post_recv(&qb, 2, 0, 976).unwrap();
    let own = Dm::alloc(&a.ctx, 976, 0).unwrap();
    let own_mr = Mr::device(&a.pd, &own, 0, 976, access).unwrap();
    post(&qa, &send(4, &[Sge { addr: 0, len: 976, lkey: own_mr.lkey() }])).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    assert_eq!(b.bytes(0, 976), vec![0; 976], "new device memory is zero");
    let bad = |offset, len, access| errno(Mr::device(&b.pd, &dm, offset, len, access));
    assert_eq!(bad(0, 1001, access), libc::EINVAL);
    assert_eq!(bad(1000, 1, access), libc::EINVAL);
    assert_eq!(bad(0, 1000, all_access()), libc::EINVAL, "zero-based it must be");
    assert_eq!(bad(0, 1000, access | Access::ON_DEMAND), libc::EINVAL);
    assert_eq!(errno(rereg(&mr, &Rereg { access: Some(access), ..Rereg::default() })), libc::EINVAL);
    mr.dereg().unwrap();
    dm.free().unwrap();
    assert_eq!((errno(dm.free()), copy_in(0, &[0; 4])), (libc::EINVAL, libc::EFAULT));
    for (length, align) in [(0, 0), (MAX_DM + 1, 0), (u64::MAX, 0), (4, 64)] {
        assert_ne!(errno(Dm::alloc(&b.ctx, length, align)), 0);
    }
}

#[test]
fn descriptors_can_be_regions() {
    let (a, b, qa, _qb) = connected();
    let file = File::from(memfd_create(c"dma-buf", MFdFlags::MFD_CLOEXEC).unwrap());
    file.set_len(3 * PAGE).unwrap();
    let fd = file.as_raw_fd();
    let reg = |offset, len, iova, access| Mr::of_fd(&b.pd, fd, offset, len, iova, access);
    let mr = reg(PAGE + 100, 2 * PAGE - 100, 100, all_access()).unwrap();
    a.fill(0, b"in a dma-buf");
    assert_eq!(remote(&a, &qa, SendOp::Write, 12, 100 + 4090, mr.rkey()).status, WcStatus::Success);
    let mut back = [0u8; 12];
    file.read_exact_at(&mut back, PAGE + 100 + 4090).unwrap();
    assert_eq!(&back, b"in a dma-buf");
    assert_eq!(errno(reg(0, PAGE, 1, all_access())), libc::EINVAL, "another offset in the page");
    assert_eq!(errno(reg(PAGE, 2 * PAGE + 1, 0, all_access())), libc::EINVAL, "beyond the end");
    assert_eq!(errno(reg(0, 0, 0, all_access())), libc::EINVAL);
    assert_eq!(errno(reg(0, PAGE, 0, Access::ON_DEMAND)), libc::EINVAL);
    assert_eq!(errno(Mr::of_fd(&b.pd, -1, 0, PAGE, 0, Access::empty())), libc::EBADF);
    let (pipe, _writer) = std::io::pipe().unwrap();
    assert_eq!(errno(Mr::of_fd(&b.pd, pipe.as_raw_fd(), 0, PAGE, 0, Access::empty())), libc::EOPNOTSUPP);
    drop(file);
    assert_eq!(remote(&a, &qa, SendOp::Read, 12, 100, mr.rkey()).status, WcStatus::Success, "still mapped");
}

#[test]
fn handles_are_imported_and_given_back() {
    let (a, b, qa, _qb) = connected();
    let again: Context = b.ctx.import().unwrap();
    let pd = Pd::import(&again, b.pd.handle()).unwrap();
    assert_eq!(errno(Pd::import(&again, 4711)), libc::EINVAL);
    let mr = Mr::import(&pd, b.mr.lkey()).unwrap();
    assert_eq!((mr.rkey(), mr.length()), (b.mr.rkey(), b.mr.length()));
    assert_eq!(errno(Mr::import(&pd, b.mr.lkey() ^ 1)), libc::EINVAL);
    assert_eq!(errno(rereg(&mr, &Rereg { access: Some(Access::empty()), ..Rereg::default() })), libc::EINVAL);
    let dm = Dm::alloc(&b.ctx, 64, 0).unwrap();
    let same = Dm::import(&again, dm.handle()).unwrap();
    assert_eq!(errno(Dm::import(&a.ctx, dm.handle())), libc::EINVAL);
    // SAFETY: eight readable bytes, eight writable ones.
    let copied = unsafe {
        dm.copy_in(0, b"imported".as_ptr(), 8).unwrap();
        let mut back = [0; 8];
        same.copy_out(back.as_mut_ptr(), 0, 8).unwrap();
        back
    };
    assert_eq!(&copied, b"imported");
    drop((mr, pd, same));
    again.close();
    assert_eq!(
        remote(&a, &qa, SendOp::Write, 8, b.addr(0), b.mr.rkey()).status,
        WcStatus::Success,
        "all is left"
    );
    b.ctx.close();
    assert_eq!(errno(b.ctx.import()), libc::EINVAL);
}
