//! libc's calls, as programs reach them.
//!
//! Owns how a call is exported and what its man page says of arguments and errno. What does not concern the
//! arena goes on after a comparison or two.

mod allocate;
mod lookup;
mod map;
mod process;
mod remap;

use core::ffi::c_int;
use std::io;

use crate::errno;
use crate::interpose::interpose;

/// 0, or -1 with errno set.
fn status(done: io::Result<()>) -> c_int {
    match done {
        Ok(()) => 0,
        Err(error) => {
            errno::set(error.raw_os_error().unwrap_or(libc::EIO));
            -1
        }
    }
}
