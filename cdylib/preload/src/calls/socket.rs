//! NETLINK_RDMA sockets, which rdma(8) asks for devices and links.
//!
//! The program gets a socket of NETLINK_USERSOCK instead, on which processes send to each other and where no
//! kernel listens. Being a netlink socket, it binds, polls, receives, and is closed or inherited as the other
//! would, without help. What the program sends to the kernel is refused there (ECONNREFUSED): then, and only
//! then, these calls look what socket it was, and send the answer. So there is no table of descriptors, and a
//! call that succeeds costs nothing. Where such a socket cannot be had, the program sees a host without
//! NETLINK_RDMA.

use core::ffi::{c_int, c_void};
use std::panic::catch_unwind;

use super::{go_on, interpose};
use crate::{errno, facts, nldev};

/// Where the program sent to: an address, or NULL for where the socket is connected.
type To = *const libc::sockaddr;
type Length = libc::socklen_t;

/// What to say of a send that failed, after the answer if it was for the kernel's NETLINK_RDMA.
///
/// # Safety
/// libc's terms: what was to be sent can be read, `to` holds `length` bytes.
#[cold]
#[inline(never)]
unsafe fn refused(fd: c_int, parts: &[libc::iovec], to: To, length: Length) -> isize {
    let port = errno::kept(|| {
        // SAFETY: libc's terms.
        let asks = is_netlink(fd) && unsafe { destination(fd, to, length) } == Some((0, 0));
        asks.then(|| name(fd, libc::getsockname)).flatten().map(|own| own.nl_pid)
    });
    let Some(port) = port else { return -1 };
    // SAFETY: libc's terms: each part can be read; a part may be NULL if it is empty.
    let parts = parts
        .iter()
        .filter(|part| part.iov_len > 0)
        .map(|part| unsafe { core::slice::from_raw_parts(part.iov_base.cast::<u8>(), part.iov_len) });
    let request: Vec<u8> = parts.flatten().copied().collect();
    let answered = errno::kept(|| catch_unwind(|| answer(&request, port)).unwrap_or(Err(libc::ENOBUFS)));
    match answered {
        Ok(()) => request.len() as isize,
        Err(error) => {
            errno::set(error);
            -1
        }
    }
}

/// Answers from a socket of our own. Nothing waits: a program that never receives is told so.
fn answer(request: &[u8], to: u32) -> Result<(), c_int> {
    let facts = facts::now().ok();
    // SAFETY: no pointers are passed.
    let socket = unsafe {
        libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::NETLINK_USERSOCK)
    };
    if socket < 0 {
        return Err(errno::get());
    }
    // SAFETY: an address of zeroes is valid: integers.
    let mut address: libc::sockaddr_nl = unsafe { core::mem::zeroed() };
    address.nl_family = libc::AF_NETLINK as libc::sa_family_t;
    address.nl_pid = to;
    let length = size_of_val(&address) as Length;
    let done = nldev::answer(request, to, facts.as_ref(), |message| {
        // SAFETY: message and address live across the call, and the lengths are theirs.
        let sent = unsafe {
            let to = (&raw const address).cast();
            libc::sendto(socket, message.as_ptr().cast(), message.len(), libc::MSG_DONTWAIT, to, length)
        };
        if sent < 0 { Err(libc::ENOBUFS) } else { Ok(()) }
    });
    // SAFETY: opened above, and handed to nobody.
    unsafe { libc::close(socket) };
    done
}

/// Whether a descriptor is a socket such as programs get for NETLINK_RDMA.
fn is_netlink(fd: c_int) -> bool {
    let option = |which| {
        let (mut value, mut length): (c_int, _) = (-1, size_of::<c_int>() as Length);
        // SAFETY: the value lives across the call, and the length is its.
        unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, which, (&raw mut value).cast(), &raw mut length) };
        value
    };
    option(libc::SO_DOMAIN) == libc::AF_NETLINK && option(libc::SO_PROTOCOL) == libc::NETLINK_USERSOCK
}

type Namer = unsafe extern "C" fn(c_int, *mut libc::sockaddr, *mut Length) -> c_int;

/// The socket's own address, or its peer's.
fn name(fd: c_int, namer: Namer) -> Option<libc::sockaddr_nl> {
    // SAFETY: an address of zeroes is valid: integers.
    let mut address: libc::sockaddr_nl = unsafe { core::mem::zeroed() };
    let mut length = size_of_val(&address) as Length;
    // SAFETY: the address lives across the call, and the length is its.
    (unsafe { namer(fd, (&raw mut address).cast(), &raw mut length) } == 0).then_some(address)
}

/// Port and groups that a netlink socket sent to; the kernel has 0 and none.
///
/// # Safety
/// `to` is NULL or holds `length` bytes.
unsafe fn destination(fd: c_int, to: To, length: Length) -> Option<(u32, u32)> {
    let address = if to.is_null() {
        name(fd, libc::getpeername)?
    } else if length as usize >= size_of::<libc::sockaddr_nl>() {
        // SAFETY: so many bytes are there; they need not be aligned.
        unsafe { to.cast::<libc::sockaddr_nl>().read_unaligned() }
    } else {
        return None;
    };
    Some((address.nl_pid, address.nl_groups))
}

/// Whether a send failed as one on such a socket does.
#[inline]
fn is_refused(sent: isize) -> bool {
    sent < 0 && errno::get() == libc::ECONNREFUSED
}

/// # Safety
/// libc's terms.
unsafe fn refused_one(fd: c_int, data: *const c_void, size: usize, to: To, length: Length) -> isize {
    let part = libc::iovec { iov_base: data.cast_mut(), iov_len: size };
    // SAFETY: libc's terms.
    unsafe { refused(fd, &[part], to, length) }
}

interpose! {
    /// socket(2)
    [socket] (domain: c_int, kind: c_int, protocol: c_int) -> c_int {
        let rdma = (domain, protocol) == (libc::AF_NETLINK, libc::NETLINK_RDMA);
        go_on!(socket(domain, kind, if rdma { libc::NETLINK_USERSOCK } else { protocol }) or -1)
    }
    /// send(2)
    [send] (fd: c_int, data: *const c_void, size: usize, flags: c_int) -> isize {
        let sent = go_on!(send(fd, data, size, flags) or -1);
        if is_refused(sent) { refused_one(fd, data, size, core::ptr::null(), 0) } else { sent }
    }
    /// sendto(2)
    [sendto] (fd: c_int, data: *const c_void, size: usize, flags: c_int, to: To, length: Length) -> isize {
        let sent = go_on!(sendto(fd, data, size, flags, to, length) or -1);
        if is_refused(sent) { refused_one(fd, data, size, to, length) } else { sent }
    }
    /// sendmsg(2)
    [sendmsg] (fd: c_int, message: *const libc::msghdr, flags: c_int) -> isize {
        let sent = go_on!(sendmsg(fd, message, flags) or -1);
        if !is_refused(sent) {
            return sent;
        }
        let message = &*message;
        let parts = match message.msg_iovlen {
            0 => &[],
            count => core::slice::from_raw_parts(message.msg_iov, count),
        };
        refused(fd, parts, message.msg_name.cast_const().cast(), message.msg_namelen)
    }
}
