//! What a program does to its process that would take the arena away: descriptors closed by number, and a
//! fork on a stack that cannot be handed on.

use core::ffi::{c_int, c_uint};
use std::io;

use super::{interpose, status};
use crate::{arena, errno, fork, next, say};

/// Closes a range of descriptors, but not the arena's, as far as the kernel can (Linux 5.9).
unsafe fn close_all(first: c_uint, last: c_uint, flags: c_int) -> io::Result<()> {
    let close = |first: c_uint, last: c_uint| {
        // SAFETY: no pointers.
        let done = unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    match arena::kept_descriptor().filter(|own| (first..=last).contains(own)) {
        Some(own) => {
            if first < own {
                close(first, own - 1)?;
            }
            if own < last { close(own + 1, last) } else { Ok(()) }
        }
        None => close(first, last),
    }
}

interpose! {
    /// close(2)
    [close] (fd: c_int) -> c_int {
        if arena::kept_descriptor().is_some_and(|own| own as c_int == fd) {
            return 0;
        }
        match next::close() {
            Some(close) => close(fd),
            None => libc::syscall(libc::SYS_close, fd) as c_int,
        }
    }
    /// close_range(2)
    [close_range] (first: c_uint, last: c_uint, flags: c_int) -> c_int {
        status(close_all(first, last, flags))
    }
    /// fork(2)
    [fork] () -> libc::pid_t {
        if fork::stack_is_shared() {
            say::say(format_args!("no fork on a stack in a large allocation"));
            errno::set(libc::ENOTSUP);
            return -1;
        }
        match next::fork() {
            Some(fork) => fork(),
            None => {
                errno::set(libc::ENOSYS);
                -1
            }
        }
    }
}
