//! The UDP port of a 1RMA card: one socket, bound to one address, which no other process can have meanwhile.
//!
//! A packet is a datagram; those of a turn go out together, and come in joined. Owns the socket and its
//! settings; it must not know what packets say.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, RawFd};
use std::slice;

use nix::sys::socket::AddressFamily;
use starverbs_core::Gid;
use starverbs_onerma::AddressPair;

use crate::batch::{FrameBatch, FrameGroup, HOPS, MAX_FRAME};
use crate::descriptor::Socket;
use crate::inbox::{Inbox, Outer};
use crate::{BackendError, HostAddr, sockopt};

/// Differentiated services codepoint of all packets, 18 (AF21): a class of their own beside RoCEv2's.
const DSCP: i32 = 18;
/// Room that the socket asks for, each way: what the window and a burst of requests may hold.
const BUFFER: usize = 4 << 20;
/// Datagrams, joined or not, that one system call may bring.
const DATAGRAMS: usize = 16;

/// The port, and packets that wait to be sent.
pub(super) struct OneRmaPort {
    socket: Socket,
    batch: FrameBatch,
    addr: HostAddr,
    number: u16,
    /// Packets that the socket did not take: lost, as on any wire
    pub(super) unsent: u64,
    /// Datagrams that came from another UDP port
    pub(super) foreign: u64,
}

impl OneRmaPort {
    /// Claims UDP port `number` of an address.
    ///
    /// # Errors
    /// There is no memory or no socket, or the port of this address is another card's.
    pub(super) fn open(addr: &HostAddr, number: u16) -> Result<Self, BackendError> {
        let ip = addr.ip();
        let family = if ip.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        let socket = sockopt::datagram(family, "the UDP socket of 1RMA")?;
        /* no SO_REUSEADDR, no SO_REUSEPORT: who has the address, has it alone */
        sockopt::bind(&socket, SocketAddr::new(ip, number))
            .map_err(|source| BackendError::OnermaAddress { addr: ip, port: number, source })?;
        let (level, name) = match ip {
            IpAddr::V4(_) => (libc::SOL_IP, libc::IP_TOS),
            IpAddr::V6(_) => (libc::SOL_IPV6, libc::IPV6_TCLASS),
        };
        sockopt::set_int(&socket, level, name, DSCP << 2);
        sockopt::set_int(&socket, libc::SOL_UDP, libc::UDP_GRO, 1);
        sockopt::receive_buffer(&socket, BUFFER);
        sockopt::send_buffer(&socket, BUFFER);
        Ok(OneRmaPort {
            socket,
            batch: FrameBatch::new()?,
            addr: addr.clone(),
            number,
            unsent: 0,
            foreign: 0,
        })
    }

    /// Room for a packet of `len` bytes, which waits with the others.
    pub(super) fn packet(&mut self, to: &Gid, len: usize) -> &mut [u8] {
        if !self.batch.has_room() {
            self.flush();
        }
        /* packets to several peers in turn join those of their peer */
        let [.., a, b] = to.0;
        let block = u32::from(u16::from_be_bytes([a, b]));
        let group = FrameGroup { port: self.number, hop_limit: HOPS, block, dgid: *to, ..Default::default() };
        self.batch.place(&group, len, true);
        self.batch.room(len)
    }

    /// Sends what waits.
    pub(super) fn flush(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        self.batch.seal(slice::from_ref(&self.addr));
        let (mut at, end) = (0, self.batch.groups());
        while at < end {
            match self.batch.send(self.socket.as_raw_fd(), at, end) {
                Ok(sent) => at += sent,
                Err(error) => {
                    let packets = self.batch.frames(at);
                    if packets > 1 && matches!(error, libc::EIO | libc::EINVAL | libc::EOPNOTSUPP) {
                        self.send_singly(at);
                    } else {
                        self.unsent += u64::from(packets);
                    }
                    at += 1;
                }
            }
        }
        self.batch.clear();
    }

    /// Sends the packets of a message one by one: the way to this peer does not segment.
    #[cold]
    fn send_singly(&mut self, at: usize) {
        let mut room = [0; MAX_FRAME];
        for index in 0..self.batch.frames(at) {
            let len = self.batch.read_frame(at, index, &mut room);
            let sent = self.batch.send_one(self.socket.as_raw_fd(), at, &self.addr, &room[..len]);
            self.unsent += u64::from(sent.is_err());
        }
    }
}

impl AsRawFd for OneRmaPort {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

/// Datagrams that have come, and how far they were read.
pub(super) struct ReceiveBuffer {
    inbox: Inbox,
    /// How many it has, which is next, and where in it
    count: usize,
    at: usize,
    offset: usize,
}

impl ReceiveBuffer {
    /// None yet. `NoMemory`
    pub(super) fn new() -> Result<Self, BackendError> {
        Ok(ReceiveBuffer { inbox: Inbox::new(DATAGRAMS)?, count: 0, at: 0, offset: 0 })
    }

    /// There are some that were not read.
    pub(super) const fn any(&self) -> bool {
        self.at < self.count
    }

    /// The next packet, and its ends. `None`: none is there.
    pub(super) fn next(&mut self, port: &mut OneRmaPort) -> Option<(AddressPair, &mut [u8])> {
        loop {
            if self.at == self.count {
                /* an error is one of an earlier send, of a closed port at the other end, and says nothing */
                (self.count, self.at) = (self.inbox.fill(port.as_raw_fd()), 0);
                if self.count == 0 {
                    return None;
                }
            }
            let Outer { meta, sport, segment } = self.inbox.outer(self.at);
            let (at, from, len) = (self.at, self.offset, self.inbox.bytes(self.at).len());
            let size = if segment == 0 { len } else { usize::from(segment) };
            let to = len.min(from + size);
            (self.at, self.offset) = if to < len { (at, to) } else { (at + 1, 0) };
            if sport == port.number {
                let path = AddressPair { local: port.addr.gid, remote: meta.src };
                return Some((path, self.inbox.bytes_mut(at, from..to)));
            }
            port.foreign += 1;
        }
    }
}
