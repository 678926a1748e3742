//! What a domain is called between processes, and who may open it now.

use std::fmt::Display;
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use nix::sys::socket::{self, AddressFamily, SockType, UnixAddr};

use crate::descriptor::Socket;
use crate::peer::socket::user;
use crate::registry::abstract_address;
use crate::sockopt;

/// Milliseconds that another process may take to open the same domain.
const LOCK_TRIES: usize = 2000;

/// A file by which processes know a domain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileId {
    /// Device that it is on
    pub device: u64,
    /// Its inode there
    pub inode: u64,
}

/// What a domain is called between processes: by the wire, by who opened it, and by its file. Formed once,
/// when it is opened: a process that changes its user later stays in the domain.
#[derive(Clone, Debug)]
pub struct DomainName {
    prefix: String,
    /// Effective user at that time
    pub(super) user: libc::uid_t,
}

impl DomainName {
    /// The name that the calling process has for the domain of `file`, on the wire of UDP `port`.
    pub fn new(port: u16, FileId { device, inode }: FileId) -> DomainName {
        let user = user();
        DomainName { prefix: format!("starverbs/{port}/xrc/{user}/{device:x}/{inode:x}/"), user }
    }

    /// The blocks by which the processes that are in the domain listen.
    pub fn members(&self) -> Vec<u32> {
        let text = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
        let block = |line: &str| {
            line.rsplit(' ').next()?.strip_prefix('@')?.strip_prefix(&*self.prefix)?.parse().ok()
        };
        text.lines().filter_map(block).collect()
    }

    /// What its members' names begin with: the same for all of them, and for no other domain.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The unix address in it of a QPN block's process, or of who opens it.
    pub(super) fn address(&self, who: impl Display) -> UnixAddr {
        abstract_address(&format!("{}{who}", self.prefix))
    }
}

/// Keeps other processes from opening the domain of a file while it lives.
#[derive(Debug)]
pub struct DomainLock {
    _socket: Socket,
    name: DomainName,
}

impl DomainLock {
    /// Waits for others that hold it.
    ///
    /// # Errors
    /// `EAGAIN`: one takes too long.
    pub fn acquire(name: DomainName) -> io::Result<DomainLock> {
        let socket = sockopt::open(AddressFamily::Unix, SockType::Datagram)?;
        let address = name.address("opening");
        for _ in 0..LOCK_TRIES {
            if socket::bind(socket.as_raw_fd(), &address).is_ok() {
                return Ok(DomainLock { _socket: socket, name });
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(io::Error::from_raw_os_error(libc::EAGAIN))
    }

    /// The domain.
    pub fn name(&self) -> &DomainName {
        &self.name
    }

    /// Whether any process is in the domain.
    pub fn is_open(&self) -> bool {
        !self.name.members().is_empty()
    }
}
