//! Unix sockets that keep messages apart (SOCK_SEQPACKET): by abstract names, with what the kernel says of the
//! other end, and with descriptors beside a message.

use std::io;
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::null_mut;

use starverbs_core::relay::LinkError;

use crate::BackendError;
use crate::descriptor::Socket;
use crate::error::os;
use crate::sockopt::errno;

/// An abstract name, as the kernel takes it.
pub(crate) type Address = (libc::sockaddr_un, libc::socklen_t);

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// Descriptors that go beside one message, at most.
const DESCRIPTORS: usize = 8;
/// Room for them, and for a header.
const CONTROL: usize = 64;
/// Linux 6.5; not in every libc.
const SO_PEERPIDFD: i32 = 77;

#[repr(C, align(8))]
struct Control([u8; CONTROL]);

/// Whose an end is, as the kernel says: of a socket that connected, whoever connected it; of one that was
/// connected to, whoever listened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Credentials {
    /// 0: a process that ours cannot see
    pub(crate) pid: libc::pid_t,
    /// Effective user
    pub(crate) uid: libc::uid_t,
    /// Effective group
    pub(crate) gid: libc::gid_t,
}

fn owned(fd: i32) -> Option<Socket> {
    // SAFETY: just opened, known to nobody else.
    (fd >= 0).then(|| Socket::new(unsafe { OwnedFd::from_raw_fd(fd) }))
}

fn seqpacket() -> Option<Socket> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no memory is involved.
    owned(unsafe { libc::socket(libc::AF_UNIX, kind, 0) })
}

/// An event descriptor.
pub(crate) fn event() -> Option<Socket> {
    // SAFETY: no memory is involved.
    owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })
}

/// The calling thread's effective user.
pub(crate) fn user() -> libc::uid_t {
    // SAFETY: no memory is involved.
    unsafe { libc::geteuid() }
}

/// Listens under a name.
///
/// # Errors
/// The name is taken (`EADDRINUSE`), or no descriptor is left.
pub(crate) fn listen((address, len): &Address) -> Result<Socket, BackendError> {
    const WHAT: &str = "the unix socket for other processes";
    let socket = seqpacket().ok_or_else(|| os(WHAT))?;
    // SAFETY: the pointer and length describe `address`, alive across the call.
    let bound = unsafe { libc::bind(socket.as_raw_fd(), std::ptr::from_ref(address).cast(), *len) };
    // SAFETY: no memory is involved.
    if bound < 0 || unsafe { libc::listen(socket.as_raw_fd(), BACKLOG) } < 0 {
        return Err(os(WHAT));
    }
    Ok(socket)
}

/// Connects to whoever listens under a name, without waiting.
pub(crate) fn connect((address, len): &Address) -> Result<Socket, LinkError> {
    let socket = seqpacket().ok_or(LinkError::Busy)?;
    // SAFETY: the pointer and length describe `address`, alive across the call.
    let rc = unsafe { libc::connect(socket.as_raw_fd(), std::ptr::from_ref(address).cast(), *len) };
    match rc {
        0 => Ok(socket),
        _ if errno() == libc::EAGAIN => Err(LinkError::Busy),
        _ => Err(LinkError::Gone),
    }
}

/// A connection that waits.
pub(crate) fn accept(listener: &Socket) -> Option<Socket> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: nobody asks for the address.
    owned(unsafe { libc::accept4(listener.as_raw_fd(), null_mut(), null_mut(), flags) })
}

fn option<T>(socket: &Socket, name: i32, mut value: T) -> Option<T> {
    let mut len = mem::size_of::<T>() as libc::socklen_t;
    let (fd, to) = (socket.as_raw_fd(), (&raw mut value).cast());
    // SAFETY: room for a `T`, as the length says; both types here are integers.
    let rc = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, name, to, &mut len) };
    (rc == 0).then_some(value)
}

/// Whose the other end is.
pub(crate) fn credentials(socket: &Socket) -> Option<Credentials> {
    let none = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let libc::ucred { pid, uid, gid } = option(socket, libc::SO_PEERCRED, none)?;
    Some(Credentials { pid, uid, gid })
}

/// A descriptor that has something to read once the other end's process is gone, though a child that it
/// forked has its socket. `None`: there is none; the socket must do.
pub(crate) fn exit_notice(socket: &Socket, who: &Credentials) -> Option<Socket> {
    if let Some(fd) = option(socket, SO_PEERPIDFD, -1) {
        return owned(fd);
    }
    // SAFETY: no memory is involved.
    let fd = (who.pid > 0).then(|| unsafe { libc::syscall(libc::SYS_pidfd_open, who.pid, 0) })?;
    let notice = owned(i32::try_from(fd).ok()?)?;
    /* behind the opening: as long as its socket is open, the number is not another's */
    is_open(socket).then_some(notice)
}

/// Whether the other end has not closed it.
pub(crate) fn is_open(socket: &Socket) -> bool {
    let mut end = libc::pollfd { fd: socket.as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: a list of one, alive across the call.
    unsafe { libc::poll(&raw mut end, 1, 0) == 0 }
}

/// Sends a message, with descriptors beside it. False: it did not go, as the other end is gone or does not
/// read.
pub(crate) fn send(socket: &Socket, bytes: &[u8], descriptors: &[RawFd]) -> bool {
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = Control([0; CONTROL]);
    // SAFETY: a msghdr of zeroes is valid: null pointers with zero lengths.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    if !descriptors.is_empty() && descriptors.len() <= DESCRIPTORS {
        let len = mem::size_of_val(descriptors) as u32;
        message.msg_control = control.0.as_mut_ptr().cast();
        // SAFETY: the room is aligned, and large enough for a header and that many descriptors.
        unsafe {
            message.msg_controllen = libc::CMSG_SPACE(len) as _;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(len) as _;
            libc::CMSG_DATA(header).copy_from_nonoverlapping(descriptors.as_ptr().cast(), len as usize);
        }
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `message` points to `part` and `control`, and the former to `bytes`, which the kernel only
    // reads; all live on.
    unsafe { libc::sendmsg(socket.as_raw_fd(), &message, flags) >= 0 }
}

/// Whether the last message did not go because there was no room for it.
pub(crate) fn is_full() -> bool {
    matches!(errno(), libc::EAGAIN | libc::EINTR | libc::ENOBUFS | libc::ENOMEM)
}

/// What came.
pub(crate) enum Received<'a> {
    /// A message
    Message(&'a [u8]),
    /// Nothing yet
    Nothing,
    /// The other end is gone, or says what cannot be read
    Ended,
}

/// Takes the next message; the descriptors beside it, if any, are added to a list.
pub(crate) fn receive<'a>(
    socket: &Socket,
    room: &'a mut [MaybeUninit<u8>],
    descriptors: &mut Vec<OwnedFd>,
) -> Received<'a> {
    let mut part = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
    let mut control = Control([0; CONTROL]);
    // SAFETY: a msghdr of zeroes is valid: null pointers with zero lengths.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    (message.msg_control, message.msg_controllen) = (control.0.as_mut_ptr().cast(), CONTROL as _);
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: `message` points to `part` and `control`, and the former to `room`; all live on.
    let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, flags) };
    let Ok(len) = usize::try_from(got) else {
        return if matches!(errno(), libc::EAGAIN | libc::EINTR) {
            Received::Nothing
        } else {
            Received::Ended
        };
    };
    take_descriptors(&message, descriptors);
    /* cut: too long, or there are no descriptors left for what came beside it */
    let cut = message.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0;
    if len == 0 || cut {
        return Received::Ended;
    }
    // SAFETY: the kernel has written the first `len` bytes of `room`, which is borrowed for as long.
    Received::Message(unsafe { std::slice::from_raw_parts(room.as_ptr().cast(), len) })
}

/// Whatever came beside a message, so that what nobody wants is closed.
fn take_descriptors(message: &libc::msghdr, descriptors: &mut Vec<OwnedFd>) {
    // SAFETY: the kernel has filled the control room of `message`, which is alive and aligned.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !header.is_null() {
        // SAFETY: a header that lies in the room, with as much data as it says; the descriptors are new and
        // nobody else's.
        unsafe {
            if ((*header).cmsg_level, (*header).cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let (data, base) = (libc::CMSG_DATA(header), header.cast::<u8>());
                let len = ((*header).cmsg_len as usize).saturating_sub(data.offset_from(base) as usize);
                for at in 0..len / mem::size_of::<RawFd>() {
                    let fd = data.cast::<RawFd>().add(at).read_unaligned();
                    descriptors.push(OwnedFd::from_raw_fd(fd));
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
}

/// The calling thread's last error as one of a name: whether somebody has it.
pub(crate) fn is_taken(error: &BackendError) -> bool {
    matches!(error, BackendError::Socket { source, .. } if source.kind() == io::ErrorKind::AddrInUse)
}
