//! Passing messages to other processes of this host, where there is no session ([`crate::Peers`]): by the
//! unix sockets of their services and blocks.
//!
//! Each block has a socket of its own here: what a stopped process leaves unread is charged to the sender's
//! buffer, and must not fill the one that serves the others. A socket takes few messages unread
//! (net.unix.max_dgram_qlen, 10 by default), so that a burst waits a moment for its reader; who does not read
//! even then is not waited for again for a while. It must not look into what it passes.

use std::io::IoSlice;
use std::os::fd::AsRawFd;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{self, AddressFamily, MsgFlags};
use starverbs_core::Nanos;

use crate::descriptor::Socket;
use crate::registry::{abstract_address, socket_name};
use crate::sockopt;

/// Blocks remembered; more take turns.
const KNOWN: usize = 32;
/// How long a message waits for a reader that is behind: on a busy host one that lives has its turn
/// meanwhile.
pub(crate) const PATIENCE: Duration = Duration::from_millis(10);
/// How long a reader is not waited for after it did not read in time; each time in a row twice as long, up to
/// the second.
const STALLED: [Nanos; 2] = [100_000_000, 1_600_000_000];

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PassedOn {
    /// Its destination has it
    Yes,
    /// Nobody owns the block
    NoOwner,
    /// The owner does not read, or the system refused
    Full,
}

/// When a reader that did not read in time is waited for again.
#[derive(Default)]
pub(crate) struct Stall {
    until: Nanos,
    /// For how long it is not waited for the next time
    pause: Nanos,
}

impl Stall {
    /// Whether it is waited for at `now`.
    pub(crate) fn is_over(&self, now: Nanos) -> bool {
        now >= self.until
    }

    /// It was waited for until `now`, and there was room in the end, or none.
    pub(crate) fn waited(&mut self, now: Nanos, room: bool) {
        let pause = if room { STALLED[0] } else { self.pause.max(STALLED[0]) };
        self.until = if room { 0 } else { now + pause };
        self.pause = if room { pause } else { (2 * pause).min(STALLED[1]) };
    }
}

struct KnownBlock {
    block: u32,
    used: u64,
    socket: Socket,
    stall: Stall,
}

/// The blocks' sockets that were written to.
pub(crate) struct SocketHandover {
    port: u16,
    turn: u64,
    known: Vec<KnownBlock>,
}

impl SocketHandover {
    pub(crate) fn new(port: u16) -> SocketHandover {
        SocketHandover { port, turn: 0, known: Vec::new() }
    }

    /// Sends `head` and `body` as one message to the owner of `block`; waits for a reader that is behind, but
    /// not long.
    pub(crate) fn pass(&mut self, block: u32, head: &[u8], body: &[u8]) -> PassedOn {
        /* a second try: the owner that was known is gone, but the block may have a new one */
        for _ in 0..2 {
            let Some(at) = self.find(block) else { return PassedOn::NoOwner };
            match send(&self.known[at].socket, head, body) {
                Ok(()) => return PassedOn::Yes,
                Err(errno) if is_gone(errno) => drop(self.known.swap_remove(at)),
                Err(Errno::EAGAIN) if self.known[at].makes_room() => {}
                _ => return PassedOn::Full,
            }
        }
        PassedOn::Full
    }

    fn find(&mut self, block: u32) -> Option<usize> {
        self.turn += 1;
        let known = self.known.iter().position(|known| known.block == block);
        let at = match known {
            Some(at) => at,
            None => {
                let socket = connect(&socket_name(self.port, block))?;
                if self.known.len() == KNOWN {
                    let oldest = (0..KNOWN).min_by_key(|&at| self.known[at].used)?;
                    self.known.swap_remove(oldest);
                }
                self.known.push(KnownBlock { block, used: 0, socket, stall: Stall::default() });
                self.known.len() - 1
            }
        };
        self.known[at].used = self.turn;
        Some(at)
    }
}

impl KnownBlock {
    /// Waits for room in its queue. False: it does not read, and will not be waited for again soon.
    fn makes_room(&mut self) -> bool {
        if !self.stall.is_over(sockopt::monotonic()) {
            return false;
        }
        let room = sockopt::wait(&[self.socket.as_raw_fd()], libc::POLLOUT, PATIENCE);
        self.stall.waited(sockopt::monotonic(), room);
        room
    }
}

/// Sends `head` and `body` as one message to whoever has the abstract name, without waiting.
pub(crate) fn pass_to(name: &str, head: &[u8], body: &[u8]) -> PassedOn {
    let Some(socket) = connect(name) else { return PassedOn::NoOwner };
    match send(&socket, head, body) {
        Ok(()) => PassedOn::Yes,
        Err(errno) if is_gone(errno) => PassedOn::NoOwner,
        Err(_) => PassedOn::Full,
    }
}

fn is_gone(errno: Errno) -> bool {
    matches!(errno, Errno::ECONNREFUSED | Errno::EPIPE | Errno::ENOTCONN | Errno::ECONNRESET)
}

fn connect(name: &str) -> Option<Socket> {
    let socket = sockopt::datagram(AddressFamily::Unix, "a unix socket").ok()?;
    socket::connect(socket.as_raw_fd(), &abstract_address(name)).ok()?;
    sockopt::send_buffer(&socket, 4 << 20);
    Some(socket)
}

fn send(socket: &Socket, head: &[u8], body: &[u8]) -> Result<(), Errno> {
    let parts = [IoSlice::new(head), IoSlice::new(body)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    socket::sendmsg::<()>(socket.as_raw_fd(), &parts, &[], flags, None).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::QpnBlock;

    #[test]
    fn who_does_not_read_is_waited_for_ever_less() {
        let mut stall = Stall::default();
        for pause in [1, 2, 4, 8, 16, 16].map(|times| times * STALLED[0]) {
            stall.waited(7, false);
            assert_eq!([6 + pause, 7 + pause].map(|now| stall.is_over(now)), [false, true]);
        }
        stall.waited(9, true);
        assert!(stall.is_over(9));
        stall.waited(10, false);
        assert!(stall.is_over(10 + STALLED[0]), "from the beginning");
    }

    #[test]
    fn messages_reach_owners_and_nobody_else_is_waited_for() {
        const PORT: u16 = 65002;
        let mut handover = SocketHandover::new(PORT);
        let block = QpnBlock::claim(PORT).expect("a free block");
        let number = block.number();
        assert_eq!(handover.pass(number, b"ab", b"cd"), PassedOn::Yes);
        let mut got = [0u8; 8];
        // SAFETY: the pointer and length describe `got`.
        let len = unsafe { libc::recv(block.fd(), got.as_mut_ptr().cast(), got.len(), 0) };
        assert_eq!((len, &got[..4]), (4, &b"abcd"[..]));
        while handover.pass(number, b"ab", b"cd") == PassedOn::Yes {}
        assert_eq!(handover.pass(number, b"ab", b"cd"), PassedOn::Full, "an owner that does not read");
        let stall = &handover.known[0].stall;
        assert!(!stall.is_over(sockopt::monotonic()), "it is not waited for again soon");
        drop(block);
        assert_eq!(handover.pass(number, b"ab", b"cd"), PassedOn::NoOwner);
        let _heir = QpnBlock::claim_one(PORT, number).expect("a socket").expect("the block is free");
        assert_eq!(handover.pass(number, b"ab", b"cd"), PassedOn::Yes, "the next owner is found");
    }
}
