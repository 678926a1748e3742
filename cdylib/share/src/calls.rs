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

/// Exports libc calls: several names in brackets have one body.
macro_rules! interpose {
    ($(#[doc = $doc:literal] [$($name:ident),+] $args:tt -> $result:ty $body:block)+) => {
        $($(interpose! { @one $doc $name $args -> $result $body })+)+
    };
    (@one $doc:literal $name:ident ($($arg:ident: $type:ty),*) -> $result:ty $body:block) => {
        #[doc = $doc]
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[cfg_attr(test, allow(dead_code))]
        pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> $result {
            // SAFETY: libc's terms, which the caller keeps.
            unsafe { $body }
        }
    };
}

use interpose;

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
