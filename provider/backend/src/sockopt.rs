//! Socket options, and the few system calls that the standard library has no word for.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, getsockname, socket};
use starverbs_core::Nanos;

use crate::BackendError;
use crate::descriptor::Socket;
use crate::error::os_error;

/// Opens a non-blocking datagram socket of a family.
pub(crate) fn datagram(family: AddressFamily, what: &'static str) -> Result<Socket, BackendError> {
    open(family, SockType::Datagram).map_err(|error| os_error(what, error))
}

/// Opens a unix socket to which any process of the host may send: each message comes with its sender's
/// credentials.
pub(crate) fn host_socket(what: &'static str) -> Result<Socket, BackendError> {
    let socket = datagram(AddressFamily::Unix, what)?;
    if !set_int(&socket, libc::SOL_SOCKET, libc::SO_PASSCRED, 1) {
        return Err(crate::error::os(what));
    }
    Ok(socket)
}

/// Opens a non-blocking socket that no program image keeps.
pub(crate) fn open(family: AddressFamily, kind: SockType) -> nix::Result<Socket> {
    socket(family, kind, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None).map(Socket::new)
}

/// Binds a UDP socket; gives its port.
pub(crate) fn bind(socket: &Socket, to: SocketAddr) -> io::Result<u16> {
    nix::sys::socket::bind(socket.as_raw_fd(), &SockaddrStorage::from(to))?;
    let local: SockaddrStorage = getsockname(socket.as_raw_fd())?;
    Ok(internet(&local).map_or(0, |local| local.port()))
}

/// An address of the Internet, with its port; `None`: it is of another family.
pub(crate) fn internet(of: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = of.as_sockaddr_in().map(|addr| SocketAddr::new(addr.ip().into(), addr.port()));
    v4.or_else(|| of.as_sockaddr_in6().map(|addr| SocketAddr::new(addr.ip().into(), addr.port())))
}

/// Sets an option to anything plain; says whether the kernel took it.
pub(crate) fn set<T: Copy>(fd: &Socket, level: i32, name: i32, value: &T) -> bool {
    let len = std::mem::size_of::<T>() as libc::socklen_t;
    // SAFETY: the pointer and length describe `value`, which the kernel only reads.
    unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, std::ptr::from_ref(value).cast(), len) == 0 }
}

/// Sets an integer option; says whether the kernel took it.
pub(crate) fn set_int(fd: &Socket, level: i32, name: i32, value: i32) -> bool {
    set(fd, level, name, &value)
}

/// Asks for a receive buffer: past the system's limit where permitted, else as much as the limit allows.
pub(crate) fn receive_buffer(fd: &Socket, bytes: usize) {
    let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
    if !set_int(fd, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, bytes) {
        set_int(fd, libc::SOL_SOCKET, libc::SO_RCVBUF, bytes);
    }
}

/// Asks for a send buffer, as [`receive_buffer`].
pub(crate) fn send_buffer(fd: &Socket, bytes: usize) {
    let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
    if !set_int(fd, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, bytes) {
        set_int(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, bytes);
    }
}

/// Waits until one of `fds` is ready for `events` or `limit` is over; says whether one is.
pub(crate) fn wait(fds: &[RawFd], events: i16, limit: Duration) -> bool {
    let mut list: Vec<_> = fds.iter().map(|&fd| libc::pollfd { fd, events, revents: 0 }).collect();
    let millis = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX).max(1);
    // SAFETY: the pointer and length describe `list`, alive across the call.
    unsafe { libc::poll(list.as_mut_ptr(), list.len() as libc::nfds_t, millis) > 0 }
}

/// The calling thread's last errno.
pub(crate) fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// A number that differs from process to process and call to call.
pub(crate) fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}

/// Time on the monotonic clock, for waits inside the port that no caller's clock drives.
pub(crate) fn monotonic() -> Nanos {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: clock_gettime writes one timespec, which lives across the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}
