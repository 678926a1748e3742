//! Datagrams as they come in: a batch of large buffers for one recvmmsg, and the control data beside
//! each.
//!
//! Owns the memory that the kernel writes to. It must not look into the datagrams.

use std::mem;
use std::ops::Range;
use std::os::fd::RawFd;

use starverbs_core::{FrameMeta, Gid};

use crate::BackendError;
use crate::peer::socket::Credentials;
use crate::zeroed::Zeroed;

/// Largest datagram, joined or not.
const BUFFER: usize = 64 << 10;
const CONTROL: usize = 192;
/// Control data of a unix datagram: its sender's credentials, which the kernel writes first. No room is left
/// for descriptors that a stranger sends along.
const CREDENTIALS: usize =
    mem::size_of::<libc::cmsghdr>() + mem::size_of::<libc::ucred>().next_multiple_of(8);

#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Control([u8; CONTROL]);

/// Room for a sender's address of any family used here.
#[repr(C)]
#[derive(Clone, Copy)]
union Name {
    v4: libc::sockaddr_in,
    v6: libc::sockaddr_in6,
    unix: libc::sockaddr_un,
}

/// A batch of received datagrams.
pub(crate) struct Inbox {
    /* pages that no datagram touched take no memory */
    buffers: Zeroed,
    headers: Vec<libc::mmsghdr>,
    iovs: Vec<libc::iovec>,
    names: Vec<Name>,
    controls: Vec<Control>,
    used: usize,
    /// Bytes of each control that the kernel may write
    room: usize,
    /// How many to ask for: a call that finds nothing more costs as much as one that finds nothing
    want: usize,
    /// The call before brought as much as it asked for
    full: bool,
}

// SAFETY: the raw pointers in `headers` and `iovs` lead into the inbox's own vectors, which are never
// resized, and are followed by the kernel alone, under `&mut self`.
unsafe impl Send for Inbox {}

/// The kernel's control data of a UDP datagram.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outer {
    pub(crate) meta: FrameMeta,
    pub(crate) sport: u16,
    /// Size of each joined datagram; 0 if it is one
    pub(crate) segment: u16,
}

impl Inbox {
    /// Room for `slots` datagrams of a unix socket, made by [`host_socket`](crate::sockopt::host_socket).
    /// `NoMemory`
    pub(crate) fn of_host(slots: usize) -> Result<Self, BackendError> {
        Ok(Inbox { room: CREDENTIALS, ..Inbox::new(slots)? })
    }

    /// Room for `slots` UDP datagrams at a time. `NoMemory`
    pub(crate) fn new(slots: usize) -> Result<Self, BackendError> {
        // SAFETY: headers and names of zeroes are valid: integers and null pointers.
        let (header, name): (libc::mmsghdr, Name) = unsafe { (mem::zeroed(), mem::zeroed()) };
        let mut inbox = Inbox {
            buffers: Zeroed::new(slots * BUFFER)?,
            headers: vec![header; slots],
            iovs: Vec::with_capacity(slots),
            names: vec![name; slots],
            controls: vec![Control([0; CONTROL]); slots],
            used: slots,
            room: CONTROL,
            want: 1,
            full: false,
        };
        inbox.iovs.extend((0..slots).map(|at| {
            let buffer = inbox.buffers.at(at * BUFFER..(at + 1) * BUFFER);
            libc::iovec { iov_base: buffer.cast(), iov_len: BUFFER }
        }));
        /* by iterators: an index would borrow a whole vector anew, and end the addresses in it that are
         * kept */
        let room = inbox.iovs.iter_mut().zip(&mut inbox.names).zip(&mut inbox.controls);
        for (header, ((iov, name), control)) in inbox.headers.iter_mut().zip(room) {
            let header = &mut header.msg_hdr;
            header.msg_iov = iov;
            header.msg_iovlen = 1;
            header.msg_name = std::ptr::from_mut(name).cast();
            header.msg_control = control.0.as_mut_ptr().cast();
        }
        Ok(inbox)
    }

    /// Receives what is there, without waiting; gives the number of datagrams.
    #[inline]
    pub(crate) fn fill(&mut self, fd: RawFd) -> usize {
        for header in &mut self.headers[..self.used] {
            header.msg_hdr.msg_namelen = mem::size_of::<Name>() as libc::socklen_t;
            header.msg_hdr.msg_controllen = self.room as _;
        }
        let got = self.receive(fd);
        self.used = got.max(1);
        // Grows while datagrams come in numbers, and is back at one when they stop.
        let full = got == self.want;
        self.want = match (full, self.full) {
            (true, true) => (got * 2).min(self.headers.len()),
            (true, false) => self.want,
            _ => got.max(1),
        };
        self.full = full;
        got
    }

    #[inline]
    fn receive(&mut self, fd: RawFd) -> usize {
        let headers = &mut self.headers[..self.want];
        if let [one] = headers {
            // SAFETY: the header describes the inbox's own name, control and buffer, and nobody else uses
            // them.
            let len = unsafe { libc::recvmsg(fd, &mut one.msg_hdr, libc::MSG_DONTWAIT) };
            one.msg_len = u32::try_from(len).unwrap_or(0);
            return usize::from(len >= 0);
        }
        let (list, count) = (headers.as_mut_ptr(), headers.len() as u32);
        // SAFETY: as above, for each header.
        let got = unsafe { libc::recvmmsg(fd, list, count, libc::MSG_DONTWAIT as _, std::ptr::null_mut()) };
        usize::try_from(got).unwrap_or(0)
    }

    /// Has `write` fill slot `at` with what no socket gave; it says how long that is, if there is any.
    pub(crate) fn put(&mut self, at: usize, write: impl FnOnce(&mut [u8]) -> Option<usize>) -> bool {
        let written = write(self.buffers.bytes_mut(at * BUFFER..(at + 1) * BUFFER));
        let header = &mut self.headers[at];
        (header.msg_hdr.msg_namelen, header.msg_len) = (0, written.unwrap_or(0) as u32);
        self.used = self.used.max(at + 1);
        written.is_some()
    }

    /// Bytes of datagram `at`.
    #[inline]
    pub(crate) fn bytes(&self, at: usize) -> &[u8] {
        let len = (self.headers[at].msg_len as usize).min(BUFFER);
        self.buffers.bytes(at * BUFFER..at * BUFFER + len)
    }

    /// Some bytes of datagram `at`, which has them, to be worked on in place.
    pub(crate) fn bytes_mut(&mut self, at: usize, range: Range<usize>) -> &mut [u8] {
        let end = (self.headers[at].msg_len as usize).min(BUFFER).min(range.end);
        self.buffers.bytes_mut(at * BUFFER + range.start.min(end)..at * BUFFER + end)
    }

    /// A unix sender's address and its length.
    pub(crate) fn unix_sender(&self, at: usize) -> (libc::sockaddr_un, libc::socklen_t) {
        let header = &self.headers[at].msg_hdr;
        let len = header.msg_namelen.min(mem::size_of::<libc::sockaddr_un>() as libc::socklen_t);
        // SAFETY: any bytes are a valid sockaddr_un: a C struct of integers; all of them were initialised.
        (unsafe { self.names[at].unix }, len)
    }

    /// Whose process sent unix datagram `at`, as the kernel says.
    pub(crate) fn unix_credentials(&self, at: usize) -> Option<Credentials> {
        let mut who = None;
        for_each_control(self.control(at), |level, kind, data| {
            // struct ucred: process, user, group
            if (level, kind) == (libc::SOL_SOCKET, libc::SCM_CREDENTIALS)
                && let [Some(pid), Some(uid), Some(gid)] = [0, 4, 8].map(|at| data.get(at..).and_then(int))
            {
                who = Some(Credentials { pid, uid: uid.cast_unsigned(), gid: gid.cast_unsigned() });
            }
        });
        who
    }

    fn control(&self, at: usize) -> &[u8] {
        // Its type differs between C libraries.
        let len: usize = self.headers[at].msg_hdr.msg_controllen as _;
        &self.controls[at].0[..len.min(self.room)]
    }

    /// What is known of UDP datagram `at`.
    #[inline]
    pub(crate) fn outer(&self, at: usize) -> Outer {
        let mut outer = Outer::default();
        // SAFETY: every member begins with the family, and any bytes are valid for the structs of integers
        // that they are.
        unsafe {
            let name = &self.names[at];
            if name.v6.sin6_family == libc::AF_INET6 as libc::sa_family_t {
                outer.meta.src = Gid(name.v6.sin6_addr.s6_addr);
                outer.sport = u16::from_be(name.v6.sin6_port);
            } else {
                outer.meta.src = Gid::from_ipv4(name.v4.sin_addr.s_addr.to_ne_bytes());
                outer.sport = u16::from_be(name.v4.sin_port);
            }
        }
        read_controls(self.control(at), &mut outer);
        outer
    }
}

/// Reads any bytes as control messages.
#[cfg(feature = "fuzzing")]
pub(crate) fn read_anything(bytes: &[u8]) {
    read_controls(bytes, &mut Outer::default());
}

#[inline]
fn read_controls(bytes: &[u8], outer: &mut Outer) {
    for_each_control(bytes, |level, kind, data| read_control(level, kind, data, outer));
}

/// Reads control messages (cmsg(3): a header of length, level and type; data; padding to 8).
#[inline]
fn for_each_control(mut bytes: &[u8], mut read: impl FnMut(i32, i32, &[u8])) {
    const HEAD: usize = mem::size_of::<libc::cmsghdr>();
    while let Some((head, rest)) = bytes.split_first_chunk::<HEAD>() {
        let word = |at: usize| i32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let Some(len) = (word(0) as usize).checked_sub(HEAD).filter(|len| *len <= rest.len()) else { return };
        read(word(HEAD - 8), word(HEAD - 4), &rest[..len]);
        bytes = rest.get(len.next_multiple_of(8)..).unwrap_or(&[]);
    }
}

#[inline]
fn read_control(level: i32, kind: i32, data: &[u8], outer: &mut Outer) {
    match (level, kind) {
        (libc::SOL_UDP, libc::UDP_GRO) => {
            outer.segment = int(data).and_then(|n| u16::try_from(n).ok()).unwrap_or(0);
        }
        (libc::SOL_IPV6, libc::IPV6_PKTINFO) => {
            // struct in6_pktinfo: address, interface
            outer.meta.dst = data.first_chunk().map_or(Gid::default(), |a| Gid(*a));
        }
        (libc::SOL_IP, libc::IP_PKTINFO) => {
            // struct in_pktinfo: interface, local address, the header's destination address
            outer.meta.dst =
                data.get(8..).and_then(|d| d.first_chunk()).map_or(Gid::default(), |a| Gid::from_ipv4(*a));
        }
        (libc::SOL_IPV6, libc::IPV6_TCLASS) => outer.meta.traffic_class = int(data).unwrap_or(0) as u8,
        (libc::SOL_IP, libc::IP_TOS) => outer.meta.traffic_class = data.first().copied().unwrap_or(0),
        _ => {}
    }
}

fn int(data: &[u8]) -> Option<i32> {
    data.first_chunk().map(|b| i32::from_ne_bytes(*b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn controls_cut_anywhere_are_read_as_far_as_they_go() {
        let mut bytes = Vec::new();
        for (level, kind, data) in [
            (libc::SOL_IP, libc::IP_TOS, &[7u8][..]),
            (libc::SOL_UDP, libc::UDP_GRO, &4112i32.to_ne_bytes()[..]),
        ] {
            bytes.extend((16 + data.len()).to_ne_bytes());
            bytes.extend(level.to_ne_bytes());
            bytes.extend(kind.to_ne_bytes());
            bytes.extend(data);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        }
        let read = |bytes: &[u8]| {
            let mut outer = Outer::default();
            read_controls(bytes, &mut outer);
            (outer.meta.traffic_class, outer.segment)
        };
        assert_eq!(read(&bytes), (7, 4112));
        assert_eq!(read(&bytes[..24]), (7, 0));
        for len in 0..bytes.len() {
            let _ = read(&bytes[..len]);
        }
        bytes[0..8].fill(0xff);
        assert_eq!(read(&bytes), (0, 0), "a length past the end");
    }

    /// Datagrams come in as the kernel writes them, by the addresses that it has, again and again.
    #[test]
    fn the_kernel_may_write_to_the_inbox() {
        let mut inbox = Inbox::new(3).unwrap();
        for round in 0..3u8 {
            for (at, header) in inbox.headers.iter_mut().enumerate() {
                let (bytes, hdr) = ([round, at as u8], &mut header.msg_hdr);
                let port = 4791 + at as u16;
                // SAFETY: what the header describes is the inbox's own, and larger than what is written.
                unsafe {
                    (*hdr.msg_iov).iov_base.cast::<[u8; 2]>().write(bytes);
                    let name = hdr.msg_name.cast::<libc::sockaddr_in>();
                    (*name).sin_family = libc::AF_INET as libc::sa_family_t;
                    (*name).sin_port = port.to_be();
                    hdr.msg_control.cast::<[usize; 2]>().write([16, 0]);
                }
                (hdr.msg_controllen, header.msg_len) = (16, 2);
            }
            for at in 0..3 {
                assert_eq!(inbox.bytes(at), [round, at as u8]);
                assert_eq!((inbox.outer(at).sport, inbox.outer(at).segment), (4791 + at as u16, 0));
            }
        }
    }
}
