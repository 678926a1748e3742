//! What a process lets others have of it: only what it said, and nothing at all its children.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Command;

use crate::common::*;
use starverbs_core::{SendOp, WcStatus};
use starverbs_settings::{LinkTrust, Settings};

/// Set in the child of a test.
const TRUST: &str = "STARVERBS_TEST_TRUST";

/// The process ends with SIGSYS if it asks to be traced, from now on and over an exec.
fn refuse_tracers() -> std::io::Result<()> {
    let statement = |code: u32, k| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let differs =
        |k, past| libc::sock_filter { jf: past, ..statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, k) };
    let load = |at| statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, at);
    let mut filter = [
        load(std::mem::offset_of!(libc::seccomp_data, nr) as u32),
        differs(libc::SYS_prctl as u32, 3),
        load(std::mem::offset_of!(libc::seccomp_data, args) as u32),
        differs(libc::PR_SET_PTRACER as u32, 1),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_KILL_PROCESS),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the filter lives across the calls.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    };
    if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// A pair that writes long and short.
fn write(link_trust: LinkTrust) -> Pair {
    let pair = Pair::new(&Settings { link_trust, ..local() });
    for len in [8, 8, BUF / 2] {
        post(&pair.qa, &pair.wr(SendOp::Write, &[pair.a.sge(0, len)], 0)).unwrap();
        assert_eq!(pair.a.completions(1)[0].status, WcStatus::Success);
    }
    pair
}

#[test]
fn only_who_asks_for_it_may_be_traced() {
    let _alone = crate::alone();
    match std::env::var(TRUST).as_deref() {
        Ok("user") => assert!(write(LinkTrust::User).count("local_direct") > 0),
        Ok(_) => drop(write(LinkTrust::Trace)),
        Err(_) => {
            for (trust, signal) in [("user", None), ("trace", Some(libc::SIGSYS))] {
                let mut child = Command::new(std::env::current_exe().unwrap());
                child.args(["--exact", "others::only_who_asks_for_it_may_be_traced"]).env(TRUST, trust);
                // SAFETY: system calls on the child's own stack.
                let status = unsafe { child.pre_exec(refuse_tracers) }.output().unwrap().status;
                assert_eq!((status.signal(), status.success()), (signal, signal.is_none()), "{trust}");
            }
        }
    }
}

/// Descriptors that are open, and whether an exec closes them.
fn descriptors() -> Vec<(i32, bool)> {
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let numbers = open.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    let flags = |fd| {
        // SAFETY: takes numbers.
        unsafe { libc::fcntl(fd, libc::F_GETFD) }
    };
    numbers.filter(|fd| flags(*fd) >= 0).map(|fd| (fd, flags(fd) & libc::FD_CLOEXEC != 0)).collect()
}

/// Memory that this process shares with others: of each range the line of /proc/PID/maps.
fn shared_maps(maps: &str) -> Vec<&str> {
    maps.lines()
        .filter(|line| line.split_whitespace().nth(1).is_some_and(|rights| rights.ends_with('s')))
        .collect()
}

#[test]
fn children_inherit_nothing_of_a_session() {
    let _alone = crate::alone();
    let before = descriptors();
    let pair = write(LinkTrust::User);
    let all = descriptors();
    let new = all.iter().filter(|(fd, _)| before.iter().all(|(old, _)| old != fd));
    let inherited: Vec<_> = new.clone().filter(|(_, closed)| !closed).collect();
    assert!(new.count() > 5 && inherited.is_empty(), "{inherited:?}");
    let ours = std::fs::read_to_string("/proc/self/maps").unwrap();
    // SAFETY: the child waits, and ends, without anything of this process.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above.
        unsafe {
            libc::pause();
            libc::_exit(0);
        }
    }
    let theirs = std::fs::read_to_string(format!("/proc/{child}/maps"));
    // SAFETY: a child of this process, which nobody else waits for.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
    assert!(!shared_maps(&ours).is_empty());
    let theirs = theirs.unwrap();
    let mut kept = shared_maps(&theirs);
    /* the counters, which nobody believes to be more */
    kept.retain(|line| !line.contains("starverbs-stat"));
    assert_eq!(kept, Vec::<&str>::new());
    assert_eq!(pair.qa.state(), starverbs_core::QpState::Rts);
}
