//! Between connected QPs no message costs an allocation: not in the program's calls, not in the cards'
//! threads.
//!
//! One test, so that no other one's memory is counted.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use common::*;
use starverbs_core::mr::WindowType;
use starverbs_core::{Access, Cqe, QpType, SendFlags, SendOp, Sge, WcStatus};
use starverbs_verbs::{Ah, Cq, Mw, MwBind, Qp, QpInit, RecvWr, SendWr, Srq, Xrcd};

/// The system's allocator, which tells of what is taken while somebody watches.
struct Watched;

#[global_allocator]
static ALLOCATOR: Watched = Watched;
static WATCHING: AtomicBool = AtomicBool::new(false);
static TAKEN: AtomicU64 = AtomicU64::new(0);
/// Where the first allocation came from.
static FIRST: Mutex<String> = Mutex::new(String::new());

thread_local! {
    /// This thread writes down an allocation, for which it allocates.
    static WRITING: Cell<bool> = const { Cell::new(false) };
}

/// The process's first thread is the test harness's, which after a minute says that a test takes long.
fn is_harness() -> bool {
    // SAFETY: neither call takes a pointer or can fail.
    unsafe { libc::gettid() == libc::getpid() }
}

fn note(what: &str, size: usize) {
    if !WATCHING.load(Ordering::Relaxed) || is_harness() || WRITING.replace(true) {
        return;
    }
    if TAKEN.fetch_add(1, Ordering::Relaxed) == 0 {
        let (thread, trace) = (std::thread::current(), Backtrace::force_capture());
        let text = format!("{what} of {size} bytes in thread {:?}:\n{trace}", thread.name());
        *FIRST.lock().unwrap_or_else(PoisonError::into_inner) = text;
    }
    WRITING.set(false);
}

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note("allocation", layout.size());
        // SAFETY: the caller's terms are those of the system's allocator.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note("allocation", layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note("reallocation", size);
        // SAFETY: as above.
        unsafe { System.realloc(old, layout, size) }
    }
    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(old, layout) }
    }
}

/// Runs `work`; gives how often memory was taken meanwhile.
fn taken_by(work: impl FnOnce()) -> u64 {
    TAKEN.store(0, Ordering::SeqCst);
    WATCHING.store(true, Ordering::SeqCst);
    work();
    WATCHING.store(false, Ordering::SeqCst);
    TAKEN.load(Ordering::SeqCst)
}

/// Runs `work`, which must take no memory, a few times: cards that share a port see now and then how it is
/// steered, which takes some, and on a busy machine they may do so in the midst of it.
fn takes_no_memory(what: &str, mut work: impl FnMut()) {
    let taken = (0..4).map(|_| taken_by(&mut work)).take_while(|taken| *taken > 0);
    let taken: Vec<u64> = taken.collect();
    let first = FIRST.lock().unwrap_or_else(PoisonError::into_inner);
    assert!(taken.len() < 4, "{what} took memory {taken:?} times, first by an {first}");
}

/// `rounds` of `work`, of which the first few may take memory.
fn rounds(what: &str, rounds: usize, mut work: impl FnMut()) {
    (0..rounds.div_ceil(10)).for_each(|_| work());
    takes_no_memory(what, || (0..rounds).for_each(|_| work()));
}

/// Messages in a row.
const BURST: usize = 8;

/// Polls until `count` completions came, all of them good.
fn drain(cq: &Cq, count: usize) {
    let (mut left, start) = (count, Instant::now());
    while left > 0 {
        let mut out = [Cqe::default(); BURST];
        let got = cq.poll(&mut out[..left.min(BURST)]).unwrap();
        assert!(out[..got].iter().all(|cqe| cqe.status == WcStatus::Success), "{out:?}");
        left -= got;
        assert!(start.elapsed() < Duration::from_secs(30), "{left} of {count} completions did not come");
    }
}

/// A burst of `wr` from `a` to `b`, each with a receive of its own where it takes one.
fn burst(a: &Node, qa: &Qp, b: &Node, qb: &Qp, wr: &SendWr<'_>, count: usize) {
    let receives = if wr.op.takes_recv() { count } else { 0 };
    for id in 0..receives {
        b.post_recv(qb, id as u64, 0, BUF).unwrap();
    }
    for id in 0..count {
        // SAFETY: what is inline lies in the node's buffer.
        unsafe { qa.post_send().push_inline(&SendWr { wr_id: id as u64, ..*wr }) }.unwrap();
    }
    drain(&b.cq, receives);
    drain(&a.cq, count);
}

fn reliable(a: &Node, b: &Node, cell: usize) {
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(a, &qa, b, &qb);
    let small = [a.sge(0, 8)];
    let pieces = [a.sge(0, 1000), a.sge(5000, 19_000)];
    let base = SendWr { remote_addr: b.addr(cell), rkey: b.mr.rkey(), ..send(0, &small) };
    let inline = SendFlags::SIGNALED | SendFlags::INLINE;
    let cases: [(&str, usize, SendWr<'_>); 14] = [
        ("SEND, 8 B", 500, base),
        ("SEND, 8 B inline", 500, SendWr { flags: inline, ..base }),
        ("SEND with immediate, no bytes", 100, SendWr { op: SendOp::SendImm, sges: &[], ..base }),
        ("SEND, 20 packets", 100, SendWr { sges: &pieces, ..base }),
        ("WRITE, 8 B", 500, SendWr { op: SendOp::Write, ..base }),
        ("WRITE, 20 packets", 100, SendWr { op: SendOp::Write, sges: &pieces, ..base }),
        ("WRITE with immediate", 200, SendWr { op: SendOp::WriteImm, ..base }),
        ("READ, 8 B", 300, SendWr { op: SendOp::Read, ..base }),
        ("READ, 20 packets", 100, SendWr { op: SendOp::Read, sges: &pieces, ..base }),
        ("FETCH & ADD", 300, SendWr { op: SendOp::FetchAdd, compare_add: 1, ..base }),
        ("COMPARE & SWAP", 300, SendWr { op: SendOp::CmpSwap, compare_add: 1, swap: 2, ..base }),
        ("ATOMIC WRITE", 300, SendWr { op: SendOp::AtomicWrite, ..base }),
        ("FLUSH", 300, SendWr { op: SendOp::Flush, imm: 1, compare_add: 8, ..base }),
        (
            "READ behind a fence",
            100,
            SendWr { op: SendOp::Read, flags: SendFlags::SIGNALED | SendFlags::FENCE, ..base },
        ),
    ];
    for (what, count, wr) in cases {
        rounds(what, count, || burst(a, &qa, b, &qb, &wr, BURST));
    }
    rounds("SEND before its receive is there", 50, || {
        post(&qa, &base).unwrap();
        assert_eq!(a.cq.poll(&mut [Cqe::default()]).unwrap(), 0);
        assert_eq!(b.cq.poll(&mut [Cqe::default()]).unwrap(), 0);
        b.post_recv(&qb, 0, 0, BUF).unwrap();
        drain(&b.cq, 1);
        drain(&a.cq, 1);
    });
    rounds("SEND to a sleeper on a completion channel", 200, || {
        b.cq.req_notify(false).unwrap();
        b.post_recv(&qb, 0, 0, BUF).unwrap();
        post(&qa, &base).unwrap();
        b.channel.get_event().unwrap();
        drain(&b.cq, 1);
        drain(&a.cq, 1);
    });
}

fn shared_receives(a: &Node, b: &Node) {
    let srq = Srq::create(&b.pd, 32, 1, 0, 0).unwrap();
    let qps: [(Qp, Qp); 4] = std::array::from_fn(|_| (a.qp(QpType::Rc), b.qp_with_srq(&srq)));
    for (qa, qb) in &qps {
        connect(a, qa, b, qb);
    }
    let sges = [a.sge(0, 3000)];
    rounds("SEND to a shared receive queue", 300, || {
        for (id, (qa, _)) in qps.iter().enumerate() {
            srq.post(&RecvWr { wr_id: id as u64, sges: &[b.sge(id * 4000, 4000)] }).unwrap();
            post(qa, &send(0, &sges)).unwrap();
        }
        drain(&b.cq, qps.len());
        drain(&a.cq, qps.len());
    });
}

fn unreliable(a: &Node, b: &Node) {
    let (qa, qb) = (a.qp(QpType::Uc), b.qp(QpType::Uc));
    connect_uc(a, &qa, b, &qb);
    let sges = [a.sge(0, 9000)];
    let base = SendWr { remote_addr: b.addr(0), rkey: b.mr.rkey(), ..send(0, &sges) };
    rounds("UC SEND", 300, || burst(a, &qa, b, &qb, &base, 4));
    let write = SendWr { op: SendOp::WriteImm, ..base };
    rounds("UC WRITE with immediate", 300, || burst(a, &qa, b, &qb, &write, 4));

    let (qa, qb) = (a.qp(QpType::Ud), b.qp(QpType::Ud));
    ud_ready(&qa);
    ud_ready(&qb);
    let ah = Ah::create(&a.pd, &way_to(b)).unwrap();
    let sges = [a.sge(0, 1000)];
    let base = SendWr { ah: ah.id(), remote_qpn: qb.number(), qkey: QKEY, ..send(0, &sges) };
    rounds("UD SEND", 1000, || burst(a, &qa, b, &qb, &base, 4));
}

/// One receiving QP, and SRQs of one and of many SGEs a receive: who names the second one first finds room
/// for it.
fn xrc(a: &Node, b: &Node) {
    let domain = Xrcd::open(&b.ctx, None, true, false).unwrap();
    let srqs = [1, 16].map(|sges| Srq::create_xrc(&b.pd, &domain, &b.cq, 32, sges, 0).unwrap());
    let (qa, qb) =
        (Qp::create(&a.pd, &a.init(QpType::XrcSend, None)).unwrap(), domain.create_qp(&b.ctx, 0).unwrap());
    connect_xrc(a, &qa, b, &qb);
    let sges = [a.sge(0, 3000)];
    let pieces: [Sge; 16] = std::array::from_fn(|at| b.sge(at * 200, 200));
    let to = |srq: usize| {
        let room = if srq == 0 { &[b.sge(0, 3000)] } else { &pieces[..] };
        srqs[srq].post(&RecvWr { wr_id: 0, sges: room }).unwrap();
        post(&qa, &SendWr { remote_qpn: srqs[srq].number(), ..send(0, &sges) }).unwrap();
        drain(&b.cq, 1);
        drain(&a.cq, 1);
    };
    rounds("XRC SEND", 100, || to(0));
    assert_eq!(taken_by(|| to(1)), 0, "the first XRC SEND to a queue of longer receives");
    rounds("XRC SEND to two queues in turn", 100, || (0..2).for_each(to));
    let write = SendWr {
        op: SendOp::Write,
        remote_addr: b.addr(0),
        rkey: b.mr.rkey(),
        remote_qpn: srqs[0].number(),
        ..send(0, &sges)
    };
    rounds("XRC WRITE", 100, || burst(a, &qa, b, &qb, &write, BURST));
}

/// Memory that the kernel copies, on both sides.
fn on_demand(a: &Node, b: &Node) {
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(a, &qa, b, &qb);
    let [near, far] = [a, b].map(|node| {
        let access = all_access() | Access::ON_DEMAND;
        node.reg(0, BUF, access)
    });
    let sges = [Sge { lkey: near.lkey(), ..a.sge(0, 9000) }];
    for (what, op) in [("SEND", SendOp::Send), ("WRITE", SendOp::Write), ("READ", SendOp::Read)] {
        let wr = SendWr { op, remote_addr: b.addr(0), rkey: far.rkey(), ..send(0, &sges) };
        rounds(&format!("{what} of memory on demand"), 100, || burst(a, &qa, b, &qb, &wr, BURST));
    }
}

/// Windows that are bound, used, invalidated from far and from near.
fn windows(a: &Node, b: &Node) {
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(a, &qa, b, &qb);
    let mr = b.reg(0, 4096, Access::LOCAL_WRITE | Access::MW_BIND);
    let bind = MwBind { mr: mr.lkey(), addr: b.addr(0), length: 4096, access: Access::REMOTE_WRITE };
    let sges = [a.sge(0, 3000)];
    for kind in [WindowType::One, WindowType::Two] {
        let mw = Mw::alloc(&b.pd, kind).unwrap();
        let mut rkey = mw.rkey();
        rounds(&format!("a memory window of type {kind:?}"), 100, || {
            rkey = (rkey & !0xff) | (rkey.wrapping_add(1) & 0xff);
            post(&qb, &mw.bind_wr(0, SendFlags::SIGNALED, rkey, &bind)).unwrap();
            drain(&b.cq, 1);
            let write = SendWr { op: SendOp::Write, remote_addr: b.addr(0), rkey, ..send(0, &sges) };
            burst(a, &qa, b, &qb, &write, 1);
            if kind == WindowType::Two {
                burst(a, &qa, b, &qb, &SendWr { op: SendOp::SendInv, imm: rkey, ..send(0, &sges) }, 1);
                post(&qb, &SendWr { op: SendOp::LocalInv, rkey, ..send(0, &[]) }).unwrap();
                drain(&b.cq, 1);
            }
        });
    }
}

/// Threads that find the card's lock taken leave their doorbells, and poll empty queues.
fn threads(a: &Node, b: &Node) {
    const THREADS: usize = 4;
    let lanes: [(Qp, Qp, Cq); THREADS] = std::array::from_fn(|_| {
        let cq = Cq::create(&a.ctx, 64, None, 0).unwrap();
        let qa =
            Qp::create(&a.pd, &QpInit { send_cq: &cq, recv_cq: &cq, ..a.init(QpType::Rc, None) }).unwrap();
        let qb = b.qp(QpType::Rc);
        connect(a, &qa, b, &qb);
        (qa, qb, cq)
    });
    let (start, stop) = (Barrier::new(THREADS + 1), Barrier::new(THREADS + 1));
    std::thread::scope(|scope| {
        for (at, (qa, _, cq)) in lanes.iter().enumerate() {
            let (start, stop) = (&start, &stop);
            scope.spawn(move || {
                let sges: [Sge; 1] = [a.sge(at * 8000, 8000)];
                let addr = b.addr(at * 8000);
                let write =
                    SendWr { op: SendOp::Write, remote_addr: addr, rkey: b.mr.rkey(), ..send(0, &sges) };
                for measured in [false, true] {
                    start.wait();
                    for _ in 0..if measured { 500 } else { 50 } {
                        (0..BURST).for_each(|_| post(qa, &write).unwrap());
                        drain(cq, BURST);
                    }
                    stop.wait();
                }
            });
        }
        start.wait();
        stop.wait();
        takes_no_memory("WRITE by several threads", || {
            start.wait();
            stop.wait();
        });
    });
}

#[test]
fn messages_take_no_memory() {
    /* in a thread that is never the harness's own */
    std::thread::spawn(messages).join().expect("no message takes memory");
}

fn messages() {
    let (a, b) = Node::pair();
    let cell = (8 - b.addr(0) as usize % 8) % 8;
    b.fill(cell, &1u64.to_ne_bytes());
    reliable(&a, &b, cell);
    shared_receives(&a, &b);
    unreliable(&a, &b);
    xrc(&a, &b);
    on_demand(&a, &b);
    windows(&a, &b);
    threads(&a, &b);
}
