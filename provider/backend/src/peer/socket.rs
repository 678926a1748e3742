//! Unix sockets that keep messages apart (SOCK_SEQPACKET): by abstract names, with what the kernel says of
//! the other end, and with descriptors beside a message.

use std::io::{self, IoSlice};
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, accept4, bind,
    getsockopt, sendmsg, sockopt,
};
use nix::unistd::geteuid;
use starverbs_core::relay::LinkError;

use crate::BackendError;
use crate::descriptor::Socket;
use crate::error::os_error;
use crate::sockopt::{errno, open};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// Room for the descriptors beside one message, and for a header.
const CONTROL: usize = 64;

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

/// An event descriptor.
pub(crate) fn event() -> nix::Result<Socket> {
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    Ok(Socket::new(EventFd::from_value_and_flags(0, flags)?.into()))
}

/// The calling thread's effective user.
pub(crate) fn user() -> libc::uid_t {
    geteuid().as_raw()
}

/// Listens under a name.
///
/// # Errors
/// The name is taken (`EADDRINUSE`), or no descriptor is left.
pub(crate) fn listen(address: &UnixAddr) -> Result<Socket, BackendError> {
    let listens = || {
        let socket = open(AddressFamily::Unix, SockType::SeqPacket)?;
        bind(socket.as_raw_fd(), address)?;
        nix::sys::socket::listen(&socket, Backlog::new(BACKLOG)?)?;
        Ok(socket)
    };
    listens().map_err(|error: Errno| os_error("the unix socket for other processes", error))
}

/// Connects to whoever listens under a name, without waiting.
pub(crate) fn connect(address: &UnixAddr) -> Result<Socket, LinkError> {
    let socket = open(AddressFamily::Unix, SockType::SeqPacket).map_err(|_| LinkError::Busy)?;
    match nix::sys::socket::connect(socket.as_raw_fd(), address) {
        Ok(()) => Ok(socket),
        Err(Errno::EAGAIN) => Err(LinkError::Busy),
        Err(_) => Err(LinkError::Gone),
    }
}

/// A connection that waits.
pub(crate) fn accept(listener: &Socket) -> Option<Socket> {
    let fd = accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK).ok()?;
    // SAFETY: just opened, known to nobody else.
    Some(Socket::new(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Whose the other end is.
pub(crate) fn credentials(socket: &Socket) -> Option<Credentials> {
    let who = getsockopt(socket, sockopt::PeerCredentials).ok()?;
    Some(Credentials { pid: who.pid(), uid: who.uid(), gid: who.gid() })
}

/// A descriptor that has something to read once the other end's process is gone, though a child that it
/// forked has its socket. `None`: there is none; the socket must do.
pub(crate) fn exit_notice(socket: &Socket, who: &Credentials) -> Option<Socket> {
    /* Linux 6.5 */
    if let Ok(notice) = getsockopt(socket, sockopt::PeerPidfd) {
        return Some(Socket::new(notice));
    }
    // SAFETY: no memory is involved.
    let fd = (who.pid > 0).then(|| unsafe { libc::syscall(libc::SYS_pidfd_open, who.pid, 0) })?;
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0)?;
    // SAFETY: just opened, known to nobody else.
    let notice = Socket::new(unsafe { OwnedFd::from_raw_fd(fd) });
    /* behind the opening: as long as its socket is open, the number is not another's */
    is_open(socket).then_some(notice)
}

/// Whether the other end has not closed it.
pub(crate) fn is_open(socket: &Socket) -> bool {
    let mut end = [PollFd::new(socket.as_fd(), PollFlags::empty())];
    poll(&mut end, PollTimeout::ZERO) == Ok(0)
}

/// Whether a process has ended, by its [`exit_notice`].
pub(crate) fn has_exited(notice: &Socket) -> bool {
    poll(&mut [PollFd::new(notice.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO) != Ok(0)
}

/// Sends a message, with descriptors beside it.
///
/// # Errors
/// The other end is gone, or does not read ([`is_full`]).
pub(crate) fn send(socket: &Socket, bytes: &[u8], descriptors: &[RawFd]) -> nix::Result<()> {
    let beside = [ControlMessage::ScmRights(descriptors)];
    let beside = if descriptors.is_empty() { &[] } else { &beside[..] };
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(bytes)], beside, flags, None).map(drop)
}

/// Whether a message did not go because there was no room for it.
pub(crate) fn is_full(error: Errno) -> bool {
    matches!(error, Errno::EAGAIN | Errno::EINTR | Errno::ENOBUFS | Errno::ENOMEM)
}

/// What came.
pub(crate) enum SocketMessage<'a> {
    /// A message
    Message(&'a [u8]),
    /// Nothing yet
    Nothing,
    /// The other end is gone, or says what cannot be read
    Ended,
}

/// Takes the next message; the descriptors beside it, if any, are added to a list. Not by nix, which does not
/// give out descriptors that came beside a message which was cut, so that they would stay open.
pub(crate) fn receive<'a>(
    socket: &Socket,
    room: &'a mut [MaybeUninit<u8>],
    descriptors: &mut Vec<OwnedFd>,
) -> SocketMessage<'a> {
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
            SocketMessage::Nothing
        } else {
            SocketMessage::Ended
        };
    };
    take_descriptors(&message, descriptors);
    /* cut: too long, or there are no descriptors left for what came beside it */
    let cut = message.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0;
    if len == 0 || cut {
        return SocketMessage::Ended;
    }
    // SAFETY: the kernel has written the first `len` bytes of `room`, which is borrowed for as long.
    SocketMessage::Message(unsafe { std::slice::from_raw_parts(room.as_ptr().cast(), len) })
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

/// Whether somebody has a name, by the error.
pub(crate) fn is_taken(error: &BackendError) -> bool {
    matches!(error, BackendError::Socket { source, .. } if source.kind() == io::ErrorKind::AddrInUse)
}
