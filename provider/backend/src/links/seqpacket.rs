//! Sockets that keep messages apart: opening one, whose the other end is, one message out, one in.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::MESSAGE;
use crate::descriptor::Socket;
use crate::sockopt::errno;

pub(super) fn seqpacket() -> Option<Socket> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no memory is involved.
    let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    // SAFETY: just opened, known to nobody else.
    (fd >= 0).then(|| Socket::new(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Whether the other end was of `user` when it connected, or listened.
pub(super) fn is_of(socket: &Socket, user: libc::uid_t) -> bool {
    let mut cred = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let (fd, to) = (socket.as_raw_fd(), (&raw mut cred).cast());
    // SAFETY: room for a ucred, as the length says.
    let rc = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, to, &mut len) };
    rc == 0 && cred.uid == user
}

/// What became of a message.
pub(super) enum Sent {
    Yes,
    NoRoom,
    Nobody,
}

pub(super) fn send(socket: &Socket, head: &[u8], data: &[u8]) -> Sent {
    let part = |s: &[u8]| libc::iovec { iov_base: s.as_ptr().cast_mut().cast(), iov_len: s.len() };
    let mut parts = [part(head), part(data)];
    // SAFETY: a msghdr of zeroes is valid: null pointers with zero lengths.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (parts.as_mut_ptr(), parts.len() as _);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `message` points to `parts`, and those to what the kernel only reads; all live on.
    if unsafe { libc::sendmsg(socket.as_raw_fd(), &message, flags) } >= 0 {
        return Sent::Yes;
    }
    match errno() {
        libc::EAGAIN | libc::EINTR | libc::ENOBUFS | libc::ENOMEM => Sent::NoRoom,
        _ => Sent::Nobody,
    }
}

/// Length of the next message, 0: the other end is gone. `None`: nothing yet. One that is too long is cut.
pub(super) fn receive(socket: &Socket, room: &mut [u8; MESSAGE]) -> Option<usize> {
    // SAFETY: the pointer and length describe `room`.
    let got =
        unsafe { libc::recv(socket.as_raw_fd(), room.as_mut_ptr().cast(), MESSAGE, libc::MSG_DONTWAIT) };
    match usize::try_from(got) {
        Ok(len) => Some(len.min(MESSAGE)),
        Err(_) if matches!(errno(), libc::EAGAIN | libc::EINTR) => None,
        Err(_) => Some(0),
    }
}
