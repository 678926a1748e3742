//! Passing messages to other processes of this host, where there is no session ([`crate::Peers`]): by the
//! unix sockets of their services and blocks.
//!
//! A socket takes few messages unread (net.unix.max_dgram_qlen, 10 by default), so that a burst waits a
//! moment for its reader. It must not look into what it passes.

use std::os::fd::AsRawFd;
use std::time::Duration;

use starverbs_core::Nanos;

use crate::descriptor::Socket;
use crate::registry::{abstract_address, socket_name};
use crate::sockopt::{self, errno};

/// How long a message waits for a reader that is behind: on a busy host one that lives has its turn
/// meanwhile.
pub(crate) const PATIENCE: Duration = Duration::from_millis(10);
/// How long a reader is not waited for after it did not read in time; each time in a row twice as long, up to
/// the second.
pub(crate) const STALLED: [Nanos; 2] = [100_000_000, 1_600_000_000];

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Passed {
    /// Its destination has it
    Yes,
    /// Nobody owns the block
    NoOwner,
    /// The owner does not read, or the system refused
    Full,
}

/// Sends `head` and `body` as one message to the block's socket, where there is no session with its owner:
/// it has no memory or descriptors for one, or is of another version.
pub(crate) fn pass_to_block(port: u16, block: u32, head: &[u8], body: &[u8]) -> Passed {
    pass(&socket_name(port, block), head, body, PATIENCE)
}

/// Sends `head` and `body` as one message to whoever has the abstract name, without waiting.
pub(crate) fn pass_to(name: &str, head: &[u8], body: &[u8]) -> Passed {
    pass(name, head, body, Duration::ZERO)
}

fn pass(name: &str, head: &[u8], body: &[u8], patience: Duration) -> Passed {
    let Some(socket) = connect(name) else { return Passed::NoOwner };
    let mut sent = send(&socket, head, body);
    if sent == libc::EAGAIN
        && !patience.is_zero()
        && sockopt::wait(&[socket.as_raw_fd()], libc::POLLOUT, patience)
    {
        sent = send(&socket, head, body);
    }
    match sent {
        0 => Passed::Yes,
        libc::ECONNREFUSED | libc::EPIPE | libc::ENOTCONN | libc::ECONNRESET => Passed::NoOwner,
        _ => Passed::Full,
    }
}

fn connect(name: &str) -> Option<Socket> {
    let socket = sockopt::datagram(libc::AF_UNIX, "a unix socket").ok()?;
    let (address, len) = abstract_address(name);
    // SAFETY: the pointer and length describe `address`, alive across the call.
    let rc = unsafe { libc::connect(socket.as_raw_fd(), std::ptr::from_ref(&address).cast(), len) };
    if rc < 0 {
        return None;
    }
    sockopt::send_buffer(&socket, 4 << 20);
    Some(socket)
}

/// Gives the errno, 0 for success.
fn send(socket: &Socket, head: &[u8], body: &[u8]) -> i32 {
    let part = |s: &[u8]| libc::iovec { iov_base: s.as_ptr().cast_mut().cast(), iov_len: s.len() };
    let mut parts = [part(head), part(body)];
    // SAFETY: a msghdr of zeroes is valid: null pointers with zero lengths.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len() as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `message` points to `parts`, and those to `head` and `body`, which the kernel only reads; all
    // live on.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, flags) };
    if sent < 0 { errno() } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::QpnBlock;

    #[test]
    fn messages_reach_owners_alone() {
        const PORT: u16 = 65002;
        let block = QpnBlock::claim(PORT).expect("a free block");
        let number = block.number();
        assert_eq!(pass_to_block(PORT, number, b"ab", b"cd"), Passed::Yes);
        let mut got = [0u8; 8];
        // SAFETY: the pointer and length describe `got`.
        let len = unsafe { libc::recv(block.fd(), got.as_mut_ptr().cast(), got.len(), 0) };
        assert_eq!((len, &got[..4]), (4, &b"abcd"[..]));
        while pass_to_block(PORT, number, b"ab", b"cd") == Passed::Yes {}
        drop(block);
        assert_eq!(pass_to_block(PORT, number, b"ab", b"cd"), Passed::NoOwner);
    }
}
