//! Passing messages to other processes of this host through their blocks' unix sockets.
//!
//! Each destination has a socket of its own: what a stopped process leaves unread is charged to the sender's
//! buffer, and must not fill the one that serves the others. A socket takes few messages unread
//! (net.unix.max_dgram_qlen, 10 by default), so that a burst waits a moment for its reader; who does not read
//! even then is not waited for again for a while. Owns those sockets; it must not look into what it passes.

use std::os::fd::AsRawFd;
use std::time::Duration;

use starverbs_core::Nanos;

use crate::descriptor::Socket;
use crate::registry::{abstract_address, socket_name};
use crate::sockopt::{self, errno};

/// Destinations remembered; more take turns.
const PEERS: usize = 32;
/// How long a message waits for a reader that is behind: on a busy host one that lives has its turn
/// meanwhile.
const PATIENCE: Duration = Duration::from_millis(10);
/// How long a reader is not waited for after it did not read in time; each time in a row twice as long, up to
/// the second.
const STALLED: [Nanos; 2] = [100_000_000, 1_600_000_000];

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

struct Peer {
    block: u32,
    used: u64,
    socket: Socket,
    /// It did not read in time: not waited for before
    stalled: Nanos,
    /// For how long it is not waited for the next time
    pause: Nanos,
}

/// The way to the other processes.
pub(crate) struct Handover {
    port: u16,
    turn: u64,
    peers: Vec<Peer>,
}

impl Handover {
    pub(crate) fn new(port: u16) -> Self {
        Handover { port, turn: 0, peers: Vec::with_capacity(PEERS) }
    }

    /// Sends `head` and `body` as one message to the owner of `block`; waits for a reader that is behind, but
    /// not long.
    pub(crate) fn pass(&mut self, block: u32, head: &[u8], body: &[u8]) -> Passed {
        // A second try: the owner we knew is gone, but the block may have a new one.
        for _ in 0..2 {
            let Some(at) = self.find(block) else { return Passed::NoOwner };
            match send(&self.peers[at].socket, head, body) {
                0 => return Passed::Yes,
                libc::ECONNREFUSED | libc::EPIPE | libc::ENOTCONN | libc::ECONNRESET => {
                    self.peers.swap_remove(at);
                }
                libc::EAGAIN if self.peers[at].makes_room() => {}
                _ => return Passed::Full,
            }
        }
        Passed::Full
    }

    fn find(&mut self, block: u32) -> Option<usize> {
        self.turn += 1;
        let known = self.peers.iter().position(|p| p.block == block);
        let at = match known {
            Some(at) => at,
            None => {
                let socket = connect(&socket_name(self.port, block))?;
                if self.peers.len() == PEERS {
                    let oldest = (0..PEERS).min_by_key(|&i| self.peers[i].used)?;
                    self.peers.swap_remove(oldest);
                }
                self.peers.push(Peer { block, used: 0, socket, stalled: 0, pause: STALLED[0] });
                self.peers.len() - 1
            }
        };
        self.peers[at].used = self.turn;
        Some(at)
    }
}

impl Peer {
    /// Waits for room in its queue. False: it does not read, and will not be waited for again soon.
    fn makes_room(&mut self) -> bool {
        if sockopt::monotonic() < self.stalled {
            return false;
        }
        let room = sockopt::wait(&[self.socket.as_raw_fd()], libc::POLLOUT, PATIENCE);
        if room {
            self.pause = STALLED[0];
        } else {
            self.stalled = sockopt::monotonic() + self.pause;
            self.pause = (2 * self.pause).min(STALLED[1]);
        }
        room
    }
}

/// Sends `head` and `body` as one message to whoever has the abstract name, without waiting.
pub(crate) fn pass_to(name: &str, head: &[u8], body: &[u8]) -> Passed {
    let Some(socket) = connect(name) else { return Passed::NoOwner };
    match send(&socket, head, body) {
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
    fn messages_reach_owners_and_nobody_else_is_waited_for() {
        const PORT: u16 = 65002;
        let mut handover = Handover::new(PORT);
        let block = QpnBlock::claim(PORT).expect("a free block");
        let number = block.number();
        assert_eq!(handover.pass(number, b"ab", b"cd"), Passed::Yes);
        let mut got = [0u8; 8];
        // SAFETY: the pointer and length describe `got`.
        let len = unsafe { libc::recv(block.fd(), got.as_mut_ptr().cast(), got.len(), 0) };
        assert_eq!((len, &got[..4]), (4, &b"abcd"[..]));
        while handover.pass(number, b"ab", b"cd") == Passed::Yes {}
        assert_eq!(handover.pass(number, b"ab", b"cd"), Passed::Full, "an owner that does not read");
        for pause in [4, 8, 16, 16] {
            handover.peers[0].stalled = 0;
            assert_eq!(handover.pass(number, b"ab", b"cd"), Passed::Full);
            assert_eq!(handover.peers[0].pause, pause * STALLED[0], "it is waited for ever less");
        }
        drop(block);
        assert_eq!(handover.pass(number, b"ab", b"cd"), Passed::NoOwner);
        let _heir = QpnBlock::claim_one(PORT, number).expect("a socket").expect("the block is free");
        assert_eq!(handover.pass(number, b"ab", b"cd"), Passed::Yes, "the next owner is found");
    }
}
