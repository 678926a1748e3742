//! Writing where the program does not look: to a capture, to a memory file, to standard error.
//!
//! A pipe that nobody reads any more (SIGPIPE) and a file that reaches the process's limit (SIGXFSZ,
//! setrlimit(2)) end a process that did not expect it. The program did not write there, so no such signal
//! reaches it: the write fails, and that is all.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::ptr;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Writes a line to standard error at once, or not at all: one write, so that lines of several processes do
/// not mix, and none that would wait for a reader. Allocates nothing.
pub fn write_line(line: &[u8]) {
    let to = io::stderr();
    let mut ready = [PollFd::new(to.as_fd(), PollFlags::POLLOUT)];
    if poll(&mut ready, PollTimeout::ZERO) != Ok(1) || ready[0].revents() != Some(PollFlags::POLLOUT) {
        return;
    }
    // Past the program's lock on `to`. A line that is not written is lost, as its reader is.
    let _ = without_signals(|| nix::unistd::write(&to, line));
}

/// Runs `write`, in which this thread takes neither signal.
pub fn without_signals<R>(write: impl FnOnce() -> R) -> R {
    let mut ours = MaybeUninit::uninit();
    let (mut before, mut pending) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: the sets are writable, and filled before they are read; the mask is this thread's, and is put
    // back.
    unsafe {
        libc::sigemptyset(ours.as_mut_ptr());
        libc::sigpending(pending.as_mut_ptr());
        for signal in [libc::SIGPIPE, libc::SIGXFSZ] {
            /* what was pending before is the program's */
            if libc::sigismember(pending.as_ptr(), signal) == 0 {
                libc::sigaddset(ours.as_mut_ptr(), signal);
            }
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, ours.as_ptr(), before.as_mut_ptr());
        let result = write();
        /* takes back what was raised */
        let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        while libc::sigtimedwait(ours.as_ptr(), ptr::null_mut(), &raw const at_once) > 0 {}
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
        result
    }
}
