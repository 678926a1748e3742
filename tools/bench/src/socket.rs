//! A UDP socket of the kind the card uses: IPv4, unconnected, IP_PMTUDISC_DO, polled without blocking.
//!
//! Owns the system calls of the floor. It must not know what is measured with them.

use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;

use crate::error::{BenchError, Result};

/// Segments the kernel takes in one UDP_SEGMENT send (UDP_MAX_SEGMENTS since Linux 4.18).
pub(crate) const MAX_SEGMENTS: usize = 64;
/// The largest payload of one UDP send over IPv4.
pub(crate) const MAX_SEND: usize = 65_507;
/// Receive buffer asked for; an unprivileged process gets at most net.core.rmem_max.
const BUFFER: i32 = 4 << 20;

/// An unconnected UDP socket bound on the loopback address.
pub(crate) struct Socket {
    inner: UdpSocket,
    peer: libc::sockaddr_in,
}

/// Control data of one message: room for UDP_SEGMENT (u16) or UDP_GRO (int), aligned as cmsghdr demands.
#[repr(C, align(8))]
struct Control([u8; 32]);

fn loopback(port: u16) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::sa_family_t::try_from(libc::AF_INET).unwrap_or_default(),
        sin_port: port.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from(Ipv4Addr::LOCALHOST).to_be() },
        sin_zero: [0; 8],
    }
}

impl Socket {
    /// Binds `port` (0: any) on the loopback address; `peer` is the port that sends go to.
    pub(crate) fn bind(port: u16, peer: u16) -> Result<Self> {
        let inner =
            UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).map_err(|e| BenchError::from_io("bind", &e))?;
        let socket = Self { inner, peer: loopback(peer) };
        socket.set("IP_MTU_DISCOVER", libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO)?;
        socket.set("SO_RCVBUF", libc::SOL_SOCKET, libc::SO_RCVBUF, BUFFER)?;
        socket.set("SO_SNDBUF", libc::SOL_SOCKET, libc::SO_SNDBUF, BUFFER)?;
        Ok(socket)
    }

    /// Lets the kernel hand over several segments as one (UDP_GRO).
    pub(crate) fn coalesce(&self) -> Result<()> {
        self.set("UDP_GRO", libc::SOL_UDP, libc::UDP_GRO, 1)
    }

    /// The receive buffer that the kernel granted, in bytes of its own accounting.
    pub(crate) fn receive_buffer(&self) -> Result<usize> {
        let mut value: i32 = 0;
        let mut len = libc::socklen_t::try_from(size_of::<i32>()).unwrap_or(4);
        // SAFETY: value and len live in this frame and len says value's size.
        let rc = unsafe {
            libc::getsockopt(
                self.inner.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVBUF,
                (&raw mut value).cast(),
                &raw mut len,
            )
        };
        if rc != 0 { Err(BenchError::os("SO_RCVBUF")) } else { Ok(usize::try_from(value).unwrap_or(0)) }
    }

    fn set(&self, what: &'static str, level: i32, name: i32, value: i32) -> Result<()> {
        let len = libc::socklen_t::try_from(size_of::<i32>()).unwrap_or(4);
        // SAFETY: value lives in this frame and len is its size.
        let rc =
            unsafe { libc::setsockopt(self.inner.as_raw_fd(), level, name, (&raw const value).cast(), len) };
        if rc != 0 { Err(BenchError::os(what)) } else { Ok(()) }
    }

    /// Sends one datagram to the peer; waits while the send buffer is full.
    pub(crate) fn send(&self, data: &[u8]) -> Result<()> {
        loop {
            // SAFETY: data outlives the call; the address is a whole sockaddr_in of this socket.
            let sent = unsafe {
                libc::sendto(
                    self.inner.as_raw_fd(),
                    data.as_ptr().cast(),
                    data.len(),
                    libc::MSG_DONTWAIT,
                    (&raw const self.peer).cast(),
                    address_len(),
                )
            };
            if sent >= 0 {
                return Ok(());
            }
            retry_or_fail("sendto")?;
        }
    }

    /// Sends `data` as datagrams of `segment` bytes with one call (UDP_SEGMENT).
    pub(crate) fn send_segmented(&self, data: &[u8], segment: u16) -> Result<()> {
        let mut control = Control([0; 32]);
        let mut iov = libc::iovec { iov_base: data.as_ptr().cast_mut().cast(), iov_len: data.len() };
        let mut msg = self.message(&mut iov, &mut control);
        // SAFETY: CMSG_SPACE and CMSG_LEN only compute; the control buffer holds more than one cmsghdr with a
        // u16, so CMSG_FIRSTHDR is not null and its data lies within the buffer.
        unsafe {
            msg.msg_controllen = libc::CMSG_SPACE(2) as usize;
            let header = libc::CMSG_FIRSTHDR(&raw const msg);
            (*header).cmsg_level = libc::SOL_UDP;
            (*header).cmsg_type = libc::UDP_SEGMENT;
            (*header).cmsg_len = libc::CMSG_LEN(2) as usize;
            std::ptr::write_unaligned(libc::CMSG_DATA(header).cast::<u16>(), segment);
        }
        loop {
            // SAFETY: msg points at the address, iovec and control data above, all alive during the call.
            let sent = unsafe { libc::sendmsg(self.inner.as_raw_fd(), &raw const msg, libc::MSG_DONTWAIT) };
            if sent >= 0 {
                return Ok(());
            }
            retry_or_fail("sendmsg")?;
        }
    }

    /// Receives into `buffer` if something is there: the bytes, and the segment size if the kernel coalesced.
    pub(crate) fn receive(&self, buffer: &mut [u8]) -> Result<Option<(usize, usize)>> {
        let mut control = Control([0; 32]);
        let mut iov = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        let mut msg = self.message(&mut iov, &mut control);
        msg.msg_name = std::ptr::null_mut();
        msg.msg_namelen = 0;
        // SAFETY: msg points at the buffer and control data above, all alive and unaliased during the call.
        let got = unsafe { libc::recvmsg(self.inner.as_raw_fd(), &raw mut msg, libc::MSG_DONTWAIT) };
        let Ok(len) = usize::try_from(got) else {
            return retry_or_fail("recvmsg").map(|()| None);
        };
        // SAFETY: the kernel filled msg_control; CMSG_FIRSTHDR gives null or a header within it, and a
        // UDP_GRO message carries an int.
        let segment = unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const msg);
            if !header.is_null()
                && (*header).cmsg_level == libc::SOL_UDP
                && (*header).cmsg_type == libc::UDP_GRO
            {
                usize::try_from(std::ptr::read_unaligned(libc::CMSG_DATA(header).cast::<i32>()))
                    .unwrap_or(len)
            } else {
                len
            }
        };
        Ok(Some((len, segment)))
    }

    /// Receives one datagram if one is there.
    pub(crate) fn receive_plain(&self, buffer: &mut [u8]) -> Result<Option<usize>> {
        // SAFETY: the buffer is alive and unaliased during the call and its length is given.
        let got = unsafe {
            libc::recv(self.inner.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), libc::MSG_DONTWAIT)
        };
        match usize::try_from(got) {
            Ok(len) => Ok(Some(len)),
            Err(_) => retry_or_fail("recv").map(|()| None),
        }
    }

    /// Sends `count` datagrams of the same bytes with as few calls as the kernel allows (sendmmsg).
    pub(crate) fn send_batch(&self, data: &[u8], count: usize) -> Result<()> {
        let mut control = Control([0; 32]);
        let mut iov = libc::iovec { iov_base: data.as_ptr().cast_mut().cast(), iov_len: data.len() };
        let mut one = self.message(&mut iov, &mut control);
        one.msg_control = std::ptr::null_mut();
        one.msg_controllen = 0;
        let mut batch = [libc::mmsghdr { msg_hdr: one, msg_len: 0 }; MAX_SEGMENTS];
        let mut left = count.min(MAX_SEGMENTS);
        while left > 0 {
            let ask = u32::try_from(left).unwrap_or(1);
            // SAFETY: the first `left` headers are filled and point at data alive during the call.
            let sent = unsafe {
                libc::sendmmsg(self.inner.as_raw_fd(), batch.as_mut_ptr(), ask, libc::MSG_DONTWAIT)
            };
            match usize::try_from(sent) {
                Ok(sent) => left -= sent.min(left),
                Err(_) => retry_or_fail("sendmmsg")?,
            }
        }
        Ok(())
    }

    /// Receives up to a batch of datagrams into slices of `buffer` of `slot` bytes; gives how many
    /// (recvmmsg).
    pub(crate) fn receive_batch(&self, buffer: &mut [u8], slot: usize) -> Result<usize> {
        // SAFETY: all-zero is a valid iovec and a valid mmsghdr (null pointers, zero lengths).
        let (mut iovs, mut batch) = unsafe {
            (
                std::mem::zeroed::<[libc::iovec; MAX_SEGMENTS]>(),
                std::mem::zeroed::<[libc::mmsghdr; MAX_SEGMENTS]>(),
            )
        };
        let mut slots = 0;
        for ((chunk, iov), msg) in buffer.chunks_exact_mut(slot).zip(&mut iovs).zip(&mut batch) {
            iov.iov_base = chunk.as_mut_ptr().cast();
            iov.iov_len = chunk.len();
            msg.msg_hdr.msg_iov = iov;
            msg.msg_hdr.msg_iovlen = 1;
            slots += 1;
        }
        // SAFETY: the first `slots` headers point at disjoint chunks of buffer, alive during the call.
        let got = unsafe {
            libc::recvmmsg(
                self.inner.as_raw_fd(),
                batch.as_mut_ptr(),
                slots,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
            )
        };
        match usize::try_from(got) {
            Ok(got) => Ok(got),
            Err(_) => retry_or_fail("recvmmsg").map(|()| 0),
        }
    }

    fn message(&self, iov: &mut libc::iovec, control: &mut Control) -> libc::msghdr {
        // SAFETY: all-zero is a valid msghdr (null pointers and zero lengths).
        let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
        msg.msg_name = (&raw const self.peer).cast_mut().cast();
        msg.msg_namelen = address_len();
        msg.msg_iov = iov;
        msg.msg_iovlen = 1;
        msg.msg_control = control.0.as_mut_ptr().cast();
        msg.msg_controllen = control.0.len();
        msg
    }
}

fn address_len() -> libc::socklen_t {
    libc::socklen_t::try_from(size_of::<libc::sockaddr_in>()).unwrap_or(16)
}

/// Fine if the call should simply be tried again (nothing there, no room, a signal).
fn retry_or_fail(what: &'static str) -> Result<()> {
    let error = std::io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EINTR | libc::ENOBUFS) => {
            std::hint::spin_loop();
            Ok(())
        }
        _ => Err(BenchError::from_io(what, &error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    fn pair() -> (Socket, Socket) {
        let b = Socket::bind(0, 9).unwrap();
        let b_port = b.inner.local_addr().unwrap().port();
        let a = Socket::bind(0, b_port).unwrap();
        (a, b)
    }

    /// Calls `step` until it has counted `want` bytes, or some seconds have passed.
    fn gather(want: usize, mut step: impl FnMut() -> usize) -> usize {
        let start = Instant::now();
        let mut have = 0;
        while have < want && start.elapsed() < Duration::from_secs(10) {
            have += step();
        }
        have
    }

    #[test]
    fn a_segmented_send_arrives_whole_and_coalesced() {
        let (a, b) = pair();
        b.coalesce().unwrap();
        a.send_segmented(&[7; 10 * 24], 24).unwrap();
        let mut buffer = vec![0; MAX_SEND];
        let have = gather(240, || match b.receive(&mut buffer).unwrap() {
            Some((len, segment)) => {
                assert_eq!(segment, 24);
                assert!(buffer[..len].iter().all(|&byte| byte == 7));
                len
            }
            None => 0,
        });
        assert_eq!(have, 240);
    }

    #[test]
    fn a_batch_arrives_as_single_datagrams() {
        let (a, b) = pair();
        a.send_batch(&[9; 24], 5).unwrap();
        let mut buffer = vec![0; MAX_SEGMENTS * 64];
        assert_eq!(gather(5, || b.receive_batch(&mut buffer, 64).unwrap()), 5);
        assert_eq!(&buffer[..24], &[9; 24]);
    }
}
