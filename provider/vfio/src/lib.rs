//! The part of vfio-user that a board and its program need: messages on a stream socket, some of them with
//! descriptors, by which a client finds a device's regions, gives it memory, and gets its interrupts.
//!
//! Owns the messages' formats ([`message`]), the socket ([`MessageStream`]) and the client's calls
//! ([`VfioClient`]). What comes of the other side is bounded and checked before it is used. It must not know
//! what a device is.
//!
//! The protocol is that of QEMU's `docs/interop/vfio-user.rst`, version 0.0.

mod client;
pub mod message;
mod stream;

use std::path::{Path, PathBuf};

pub use client::{RegionInfo, VfioClient};
pub use message::{Head, MessageOp};
pub use stream::{MessageStream, ReadResult, VfioMessage};

/// Where function `number` of the board at `path` listens: `path`, `path.1`, `path.2` and so on.
pub fn socket_path(path: &Path, number: usize) -> PathBuf {
    if number == 0 {
        return path.to_owned();
    }
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{number}"));
    name.into()
}
