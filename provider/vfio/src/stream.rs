//! A socket with messages. Never waits for the other side unless its user does.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, UnixAddr, recvmsg, sendmsg};
use zerocopy::{FromBytes, IntoBytes};

use crate::message::{HEAD_BYTES, Head, MAX_BYTES, MAX_FDS};

/// Descriptors that the kernel lets one message carry (unix(7)): with room for all of them none is left open
/// unseen.
const SCM_MAX_FD: usize = 253;

/// One end of the socket.
#[derive(Debug)]
pub struct MessageStream {
    socket: UnixStream,
    /// What has come of a message
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
}

/// A message.
#[derive(Debug)]
pub struct VfioMessage {
    /// Its head
    pub head: Head,
    /// What stands behind it
    pub body: Vec<u8>,
    /// Descriptors that came with it
    pub fds: Vec<OwnedFd>,
}

/// What a look at the socket gave.
#[derive(Debug)]
pub enum ReadResult {
    /// A whole message
    Message(VfioMessage),
    /// Not all of one yet
    Nothing,
    /// The other side is gone, or sent what is no message: no more can be had
    Gone,
}

impl MessageStream {
    /// Takes over a socket, which does not block from now on.
    ///
    /// # Errors
    /// What the system says.
    pub fn new(socket: UnixStream) -> io::Result<MessageStream> {
        socket.set_nonblocking(true)?;
        Ok(MessageStream { socket, bytes: Vec::with_capacity(MAX_BYTES), fds: Vec::new() })
    }

    /// Takes the next message, as far as it has come.
    pub fn receive(&mut self) -> ReadResult {
        loop {
            let want = match self.wanted() {
                Some(0) => return self.take(),
                Some(want) => want,
                None => return ReadResult::Gone,
            };
            match self.read(want) {
                Ok(0) => return ReadResult::Gone,
                Ok(_) => {}
                Err(Errno::EAGAIN) => return ReadResult::Nothing,
                Err(Errno::EINTR) => {}
                Err(_) => return ReadResult::Gone,
            }
        }
    }

    /// Bytes that the message under way still lacks; `None`: it is none.
    fn wanted(&self) -> Option<usize> {
        let Ok((head, _)) = Head::read_from_prefix(&self.bytes) else {
            return Some(HEAD_BYTES - self.bytes.len());
        };
        let size = usize::try_from(head.size).ok().filter(|size| (HEAD_BYTES..=MAX_BYTES).contains(size))?;
        size.checked_sub(self.bytes.len())
    }

    fn take(&mut self) -> ReadResult {
        let Ok((head, body)) = Head::read_from_prefix(&self.bytes) else { return ReadResult::Gone };
        let message = VfioMessage { head, body: body.to_vec(), fds: std::mem::take(&mut self.fds) };
        self.bytes.clear();
        ReadResult::Message(message)
    }

    /// Reads up to `want` bytes, and the descriptors that come with them.
    fn read(&mut self, want: usize) -> nix::Result<usize> {
        let had = self.bytes.len();
        self.bytes.resize(had + want, 0);
        let mut control = cmsg_space!([RawFd; SCM_MAX_FD]);
        let got = {
            let mut pieces = [IoSliceMut::new(&mut self.bytes[had..])];
            let flags = MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT;
            let fd = self.socket.as_raw_fd();
            recvmsg::<UnixAddr>(fd, &mut pieces, Some(&mut control), flags).map(|got| {
                for message in got.cmsgs().into_iter().flatten() {
                    if let ControlMessageOwned::ScmRights(fds) = message {
                        // SAFETY: the kernel has just made these descriptors for this process.
                        self.fds.extend(fds.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
                    }
                }
                got.bytes
            })
        };
        self.bytes.truncate(had + got.unwrap_or(0));
        /* who gives more than a message may have gets rid of them */
        self.fds.truncate(MAX_FDS);
        got
    }

    /// Sends a message, whose size is filled in. False: it did not go, or not as a whole, and no other may
    /// follow.
    #[must_use]
    pub fn send(&self, head: Head, body: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let size = HEAD_BYTES + body.len();
        let head = Head { size: size as u32, ..head };
        let pieces = [IoSlice::new(head.as_bytes()), IoSlice::new(body)];
        let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let control = [ControlMessage::ScmRights(&raw)];
        let control = if raw.is_empty() { &control[..0] } else { &control[..] };
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        loop {
            match sendmsg::<UnixAddr>(self.socket.as_raw_fd(), &pieces, control, flags, None) {
                Ok(sent) => return sent == size,
                Err(Errno::EINTR) => {}
                Err(_) => return false,
            }
        }
    }

    /// Sends nothing more: the other side reads what was sent, and then the end.
    pub fn finish(&self) {
        let _ = self.socket.shutdown(Shutdown::Write);
    }

    /// Ends it for both sides.
    pub fn shut(&self) {
        /* one that has ended is as it is to be */
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// The user id of the other side; `None`: the system does not say.
    pub fn peer_uid(&self) -> Option<u32> {
        use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
        getsockopt(&self.socket, PeerCredentials).ok().map(|who| who.uid())
    }
}

impl AsFd for MessageStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;
    use crate::message::MessageOp;

    fn pair() -> (MessageStream, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (MessageStream::new(ours).unwrap(), theirs)
    }

    fn head(size: u32) -> Head {
        Head { id: 7, op: MessageOp::Version as u16, size, ..Head::default() }
    }

    #[test]
    fn a_message_in_pieces_is_one_message() {
        let (mut stream, mut other) = pair();
        let bytes = [head(19).as_bytes(), b"abc"].concat();
        for byte in &bytes {
            assert!(matches!(stream.receive(), ReadResult::Nothing));
            other.write_all(&[*byte]).unwrap();
        }
        let ReadResult::Message(message) = stream.receive() else { panic!("no message") };
        assert_eq!((message.head, &message.body[..]), (head(19), &b"abc"[..]));
        assert!(matches!(stream.receive(), ReadResult::Nothing));
    }

    #[test]
    fn sizes_that_no_message_has_end_it() {
        for size in [0, 15, MAX_BYTES as u32 + 1, u32::MAX] {
            let (mut stream, mut other) = pair();
            other.write_all(head(size).as_bytes()).unwrap();
            assert!(matches!(stream.receive(), ReadResult::Gone), "{size}");
        }
        let (mut stream, other) = pair();
        drop(other);
        assert!(matches!(stream.receive(), ReadResult::Gone));
    }

    /// Who is closed with something unread is reset to the other side; who has finished is not.
    #[test]
    fn what_is_finished_ends_without_an_error() {
        let (stream, mut other) = pair();
        assert!(stream.send(head(0), b"x", &[]));
        other.write_all(&[0]).unwrap();
        stream.finish();
        let mut got = Vec::new();
        assert_eq!(other.read_to_end(&mut got).unwrap(), HEAD_BYTES + 1);
        let (stream, mut other) = pair();
        other.write_all(&[0]).unwrap();
        drop(stream);
        assert_eq!(other.read_to_end(&mut got).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }

    #[test]
    fn descriptors_come_with_their_message() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (from, mut to) = (MessageStream::new(ours).unwrap(), MessageStream::new(theirs).unwrap());
        let (mut a, b) = UnixStream::pair().unwrap();
        assert!(from.send(head(0), b"x", &[b.as_fd()]) && from.send(head(0), b"y", &[]));
        drop(b);
        let ReadResult::Message(mut first) = to.receive() else { panic!("no message") };
        let ReadResult::Message(second) = to.receive() else { panic!("no message") };
        assert_eq!((first.fds.len(), second.fds.len()), (1, 0));
        let mut handed = UnixStream::from(first.fds.remove(0));
        a.write_all(b"hello").unwrap();
        let mut got = [0; 5];
        handed.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"hello");
    }
}
