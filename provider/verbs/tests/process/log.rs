//! What is said of failures never stops the card nor ends the program, whoever reads standard error or does
//! not.

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::alone;
use crate::common::*;
use starverbs_core::{QpState, QpType, SendOp};
use starverbs_settings::{FaultSpec, LogLevel, Settings};
use starverbs_verbs::{Cq, Qp, QpInit, SendWr};

/// A queue pair that fails because its completion queue overran.
fn overrun(a: &Node, b: &Node) {
    let cq = Cq::create(&a.ctx, 4, None, 5).unwrap();
    let (qa, qb) =
        (Qp::create(&a.pd, &QpInit { send_cq: &cq, ..a.init(QpType::Rc, None) }).unwrap(), b.qp(QpType::Rc));
    connect(a, &qa, b, &qb);
    for wr_id in 0..6 {
        let sges = [a.sge(0, 8)];
        let wr =
            SendWr { op: SendOp::Write, remote_addr: b.addr(0), rkey: b.mr.rkey(), ..send(wr_id, &sges) };
        post(&qa, &wr).unwrap();
    }
    wait_for("the failure", || qa.state() == QpState::Err);
}

fn flags(of: &File, flags: i32) {
    // SAFETY: a plain call on a descriptor that is open.
    assert_eq!(unsafe { libc::fcntl(of.as_raw_fd(), libc::F_SETFL, flags) }, 0);
}

/// A pipe as standard error; gives its other end.
fn pipe_as_stderr(full: bool) -> File {
    let mut ends = [0; 2];
    // SAFETY: two descriptors to write, which are this test's afterwards.
    let (read, mut write) = unsafe {
        assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
        (File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1]))
    };
    if full {
        flags(&write, libc::O_NONBLOCK);
        while !write.write(&[b'.'; 4096]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock) {}
        flags(&write, 0);
    }
    // SAFETY: both are open; nothing else in this test's process writes there.
    assert_eq!(unsafe { libc::dup2(write.as_raw_fd(), libc::STDERR_FILENO) }, libc::STDERR_FILENO);
    read
}

/// What is said on standard error while `work` runs.
fn written_during(work: impl FnOnce()) -> String {
    // SAFETY: a plain call; the descriptor is this test's afterwards.
    let before = unsafe { OwnedFd::from_raw_fd(libc::dup(libc::STDERR_FILENO)) };
    let mut read = pipe_as_stderr(false);
    work();
    // SAFETY: both are open.
    unsafe { libc::dup2(before.as_raw_fd(), libc::STDERR_FILENO) };
    let mut said = String::new();
    read.read_to_string(&mut said).unwrap();
    said
}

/// Whoever asks for a bad wire or a capture, and talks within one host, hears once that no shared memory is
/// used: they may measure.
#[test]
fn queue_pairs_that_use_the_wire_for_a_settings_sake_say_so_once() {
    let _alone = alone();
    let fault = FaultSpec::parse("delay=1us").unwrap();
    let connect_twice = |settings: Settings| {
        written_during(|| {
            let (a, b) = (Node::new(&settings), Node::new(&settings));
            for _ in 0..2 {
                connect(&a, &a.qp(QpType::Rc), &b, &b.qp(QpType::Rc));
            }
        })
    };
    assert_eq!(connect_twice(local()), "", "nothing is asked for");
    assert_eq!(connect_twice(Settings { fault: fault.clone(), ..wire() }), "", "it is what is asked for");
    let unconnected = written_during(|| drop(Node::new(&Settings { fault: fault.clone(), ..local() })));
    assert_eq!(unconnected, "", "no queue pair is concerned");
    let said = connect_twice(Settings { fault, ..local() });
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.contains("STARVERBS_FAULT") && said.contains("STARVERBS_LINK=udp"), "{said}");
}

#[test]
fn failures_are_said_where_somebody_reads_and_harm_nobody_else() {
    let _alone = alone();
    let settings = Settings { log: LogLevel::Warn, ..settings() };
    let (a, b) = (Node::new(&settings), Node::new(&settings));
    // SAFETY: plain calls; the descriptor is this test's afterwards. C programs have this disposition.
    let before = unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        OwnedFd::from_raw_fd(libc::dup(libc::STDERR_FILENO))
    };
    /* a reader who does not read */
    let _full = pipe_as_stderr(true);
    overrun(&a, &b);
    /* one who does */
    let mut read = pipe_as_stderr(false);
    overrun(&a, &b);
    flags(&read, libc::O_NONBLOCK);
    let mut said = String::new();
    wait_for("what is said", || {
        let _ = read.read_to_string(&mut said);
        said.contains(" failed: IBV_EVENT_QP_FATAL\n")
    });
    assert!(said.contains(": a completion queue of 4 overran\n"), "{said}");
    assert!(said.starts_with(&format!("starverbs[{}]: ", std::process::id())), "{said}");
    /* one who went away */
    drop(pipe_as_stderr(false));
    overrun(&a, &b);
    // SAFETY: both are open.
    unsafe { libc::dup2(before.as_raw_fd(), libc::STDERR_FILENO) };
}
