//! The UDP port of a 1RMA card: one socket, bound to one address, which no other process can have meanwhile.
//! Cards of one address have ports one after another.
//!
//! A packet is a datagram; those of a turn go out together, and come in joined. Owns the socket and its
//! settings; it must not know what packets say.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, RawFd};
use std::slice;

use nix::sys::socket::AddressFamily;
use starverbs_core::{Gid, Nanos};
use starverbs_onerma::{CARDS, CardPath};
use starverbs_settings::Settings;

use super::host_cards::HostCards;
use super::tap::{OneRmaTap, PacketEnd};

use crate::batch::{FrameBatch, FrameGroup, HOPS, MAX_FRAME};
use crate::control::{self, CardMessage, RUN_HEADER};
use crate::descriptor::Socket;
use crate::inbox::{Inbox, Outer};
use crate::{BackendError, HostAddr, sockopt};

/// Differentiated services codepoint of all packets, 18 (AF21): a class of their own beside RoCEv2's.
pub(super) const DSCP: u8 = 18;
/// Room that the socket asks for, each way: what the window and a burst of requests may hold.
const BUFFER: usize = 4 << 20;
/// Datagrams, joined or not, that one system call may bring.
const DATAGRAMS: usize = 16;
/// Messages of this host's cards that are taken at once.
const MESSAGES: usize = 4;
/// Packets of no card that are passed over in a row.
const FOREIGN: u32 = 64;

/// The port, and packets that wait to be sent.
pub(super) struct OneRmaPort {
    /// The way to cards of this host; `None`: the wire has all. It ends before the socket: who has the port
    /// next is to have the name, too
    pub(super) host: Option<Box<HostCards>>,
    socket: Socket,
    batch: FrameBatch,
    tap: Option<Box<OneRmaTap>>,
    /// The time of the turn
    now: Nanos,
    addr: HostAddr,
    /// UDP port of the first card of an address
    base: u16,
    /// Which one this is
    card: u8,
    /// Packets that the socket did not take: lost, as on any wire
    pub(super) unsent: u64,
    /// Datagrams that came from another UDP port
    pub(super) foreign: u64,
}

impl OneRmaPort {
    /// Claims the first UDP port of an address that nobody has, from `base` on.
    ///
    /// # Errors
    /// There is no memory or no socket, or somebody has each port of this address.
    pub(super) fn open(addr: &HostAddr, base: u16, settings: &Settings) -> Result<Self, BackendError> {
        let ip = addr.ip();
        let family = if ip.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        let socket = sockopt::datagram(family, "the UDP socket of 1RMA")?;
        let card = claim(&socket, ip, base)?;
        let (level, name) = match ip {
            IpAddr::V4(_) => (libc::SOL_IP, libc::IP_TOS),
            IpAddr::V6(_) => (libc::SOL_IPV6, libc::IPV6_TCLASS),
        };
        sockopt::set_int(&socket, level, name, i32::from(DSCP) << 2);
        sockopt::set_int(&socket, libc::SOL_UDP, libc::UDP_GRO, 1);
        sockopt::receive_buffer(&socket, BUFFER);
        sockopt::send_buffer(&socket, BUFFER);
        let tap = OneRmaTap::open(settings);
        let own = (addr.gid, base.wrapping_add(card.into()));
        /* faults and captures are the wire's */
        let host = if tap.is_none() { HostCards::open(own, &socket, settings) } else { None };
        Ok(OneRmaPort {
            socket,
            batch: FrameBatch::new()?,
            tap,
            host: host.map(Box::new),
            now: 0,
            addr: addr.clone(),
            base,
            card,
            unsent: 0,
            foreign: 0,
        })
    }

    /// Which card of the address has it.
    pub(super) const fn card(&self) -> u8 {
        self.card
    }

    /// Its own address and UDP port.
    fn own(&self) -> PacketEnd {
        (self.addr.gid, self.base.wrapping_add(u16::from(self.card)))
    }

    /// Which card sends from a UDP port. `None`: no card does.
    fn card_of(&self, port: u16) -> Option<u8> {
        u8::try_from(port.checked_sub(self.base)?).ok().filter(|card| *card < CARDS)
    }

    /// Room for a packet of `len` bytes, which waits with the others.
    pub(super) fn packet(&mut self, to: &CardPath, len: usize) -> &mut [u8] {
        if !self.batch.has_room() {
            self.flush();
        }
        let port = self.base.wrapping_add(u16::from(to.card));
        self.room_for((to.remote, port), len)
    }

    fn room_for(&mut self, (dgid, port): PacketEnd, len: usize) -> &mut [u8] {
        /* packets to several peers in turn join those of their peer */
        let [.., a, b] = dgid.0;
        let block = u32::from_be_bytes([0, port as u8, a, b]);
        let group = FrameGroup { port, hop_limit: HOPS, block, dgid, ..Default::default() };
        self.batch.place(&group, len, true);
        self.batch.room(len)
    }

    /// A turn begins.
    pub(super) fn begin_turn(&mut self, now: Nanos) {
        self.now = now;
    }

    /// Sends what waits.
    pub(super) fn flush(&mut self) {
        let now = self.now;
        if let Some(mut tap) = self.tap.take() {
            self.pass_through(&mut tap, now);
            self.send_waiting(Some(&tap));
            tap.flush();
            self.tap = Some(tap);
        } else {
            self.send_waiting(None);
        }
    }

    /// When [`OneRmaPort::flush`] has something to send that was held back.
    pub(super) fn next_deadline(&self) -> Option<Nanos> {
        self.tap.as_ref()?.next_deadline()
    }

    /// Of the packets that wait those stay that the tap lets go.
    #[cold]
    fn pass_through(&mut self, tap: &mut OneRmaTap, now: Nanos) {
        if !tap.hurts() {
            return;
        }
        self.each_waiting(|to, packet| tap.take(to, packet));
        self.batch.clear();
        let mut full = Vec::new();
        tap.release(now, |to, packet| {
            if self.batch.has_room() {
                self.room_for(to, packet.len()).copy_from_slice(packet);
            } else {
                full.push((to, packet.to_vec()));
            }
        });
        for (to, packet) in full {
            if !self.batch.has_room() {
                self.send_waiting(Some(tap));
            }
            self.room_for(to, packet.len()).copy_from_slice(&packet);
        }
    }

    #[cold]
    fn each_waiting(&mut self, mut look: impl FnMut(PacketEnd, &[u8])) {
        self.batch.put_in_order();
        let mut room = [0; MAX_FRAME];
        for at in 0..self.batch.groups() {
            let FrameGroup { dgid, port, .. } = *self.batch.group(at);
            for index in 0..self.batch.frames(at) {
                let len = self.batch.read_frame(at, index, &mut room);
                look((dgid, port), room.get(..len).unwrap_or(&[]));
            }
        }
    }

    fn send_waiting(&mut self, tap: Option<&OneRmaTap>) {
        if self.batch.is_empty() {
            return;
        }
        if let Some(tap) = tap {
            let own = self.own();
            self.each_waiting(|to, packet| tap.capture(own, to, packet));
        }
        let passed = self.pass_all();
        let mut from = 0;
        while let Some(left) = self.batch.next_left(from, passed) {
            if from == 0 {
                self.batch.seal(slice::from_ref(&self.addr));
            }
            from = left.end;
            self.send_run(left.start, left.end);
        }
        self.batch.clear();
    }

    /// Hands over what goes to cards of this host through memory; gives a bit for each message that went.
    fn pass_all(&mut self) -> u64 {
        let Some(host) = &mut self.host else { return 0 };
        self.batch.put_in_order();
        let mut passed = 0;
        for at in 0..self.batch.groups() {
            let FrameGroup { dgid, port, .. } = *self.batch.group(at);
            let (segment, pieces) = self.batch.pieces(at);
            // SAFETY: the batch's pieces can be read until it is cleared.
            if unsafe { host.pass((dgid, port), segment, pieces) } {
                host.sent += u64::from(self.batch.frames(at));
                passed |= 1 << at;
            }
        }
        passed
    }

    /// Sends the messages `at..end` of the sealed batch by the wire.
    fn send_run(&mut self, mut at: usize, end: usize) {
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

/// Binds to the first port that nobody has; gives which it is.
fn claim(socket: &Socket, ip: IpAddr, base: u16) -> Result<u8, BackendError> {
    let mut card = 0;
    loop {
        /* no SO_REUSEADDR, no SO_REUSEPORT: who has a port, has it alone */
        let port = base.saturating_add(card.into());
        match sockopt::bind(socket, SocketAddr::new(ip, port)) {
            Ok(_) => return Ok(card),
            Err(error) if error.raw_os_error() == Some(libc::EADDRINUSE) && card + 1 < CARDS => card += 1,
            Err(source) => return Err(BackendError::OnermaAddress { addr: ip, port, source }),
        }
    }
}

impl AsRawFd for OneRmaPort {
    /// Readable when a packet comes to who sleeps.
    fn as_raw_fd(&self) -> RawFd {
        self.host.as_ref().map_or(self.socket.as_raw_fd(), |host| host.fd())
    }
}

/// Datagrams and messages of this host's cards that have come, and how far they were read.
pub(super) struct ReceiveBuffer {
    inbox: Inbox,
    messages: Inbox,
    /// What is read are the messages
    here: bool,
    /// How many there are, which is next, and where in it
    count: usize,
    at: usize,
    offset: usize,
}

impl ReceiveBuffer {
    /// None yet. `NoMemory`
    pub(super) fn new() -> Result<Self, BackendError> {
        let (inbox, messages) = (Inbox::new(DATAGRAMS)?, Inbox::new(MESSAGES)?);
        Ok(ReceiveBuffer { inbox, messages, here: false, count: 0, at: 0, offset: 0 })
    }

    /// There are some that were not read.
    pub(super) const fn any(&self) -> bool {
        self.at < self.count
    }

    /// The next packet, and its ends. `None`: none is there.
    pub(super) fn next(&mut self, port: &mut OneRmaPort) -> Option<(CardPath, &mut [u8])> {
        /* of what is none a turn takes so much: who sends it has no more of this card than others */
        for _ in 0..FOREIGN {
            if self.at == self.count && !self.fill(port) {
                return None;
            }
            let at = self.at;
            let (from, len) = (self.offset, self.read().bytes(at).len());
            let Some((src, sport, segment)) = self.sender(port, at) else {
                port.foreign += 1;
                self.go_to(at + 1);
                continue;
            };
            let size = if segment == 0 { len } else { usize::from(segment) };
            let to = len.min(from + size);
            if to < len {
                self.offset = to;
            } else {
                self.go_to(at + 1);
            }
            let Some(card) = port.card_of(sport) else {
                port.foreign += 1;
                continue;
            };
            let path = CardPath { local: port.addr.gid, remote: src, card };
            if let Some(tap) = &port.tap {
                tap.capture((src, sport), port.own(), self.read().bytes(at).get(from..to).unwrap_or(&[]));
            }
            if let Some(host) = port.host.as_mut().filter(|_| self.here) {
                host.received += 1;
            }
            let inbox = if self.here { &mut self.messages } else { &mut self.inbox };
            return Some((path, inbox.bytes_mut(at, from..to)));
        }
        None
    }

    /// What is read.
    fn read(&self) -> &Inbox {
        if self.here { &self.messages } else { &self.inbox }
    }

    fn go_to(&mut self, at: usize) {
        (self.at, self.offset) = (at, if self.here { RUN_HEADER } else { 0 });
    }

    /// Who sent datagram or message `at`, from which UDP port, and the size of what is joined in it; 0: it is
    /// one packet. `None`: it is for another card, of no card of this host, or nothing.
    fn sender(&self, port: &OneRmaPort, at: usize) -> Option<(Gid, u16, u16)> {
        if !self.here {
            let Outer { meta, sport, segment } = self.inbox.outer(at);
            return Some((meta.src, sport, segment));
        }
        let Some(CardMessage::Frames(run)) = control::decode(self.messages.bytes(at)) else { return None };
        let here = port.host.as_ref().is_some_and(|host| host.is_here(run.meta.src));
        let ours = here && (run.meta.dst, run.first) == port.own();
        ours.then_some((run.meta.src, run.sport, run.segment))
    }

    /// Takes what has come: messages and datagrams in turn, where there are both. False: nothing is there.
    fn fill(&mut self, port: &mut OneRmaPort) -> bool {
        /* who has just begun a session may have a message in it */
        let socket = port.host.as_mut().is_none_or(|host| host.look());
        let first_here = port.host.is_some() && !self.here;
        for here in [first_here, !first_here] {
            let got = match here {
                true => self.take_messages(port),
                false if socket => self.take_datagrams(port),
                false => 0,
            };
            if got > 0 {
                (self.count, self.here) = (got, here);
                self.go_to(0);
                return true;
            }
        }
        (self.count, self.at) = (0, 0);
        false
    }

    fn take_messages(&mut self, port: &mut OneRmaPort) -> usize {
        let Some(host) = &mut port.host else { return 0 };
        let mut got = 0;
        while got < MESSAGES && self.messages.put(got, |room| host.next(room)) {
            got += 1;
        }
        got
    }

    fn take_datagrams(&mut self, port: &mut OneRmaPort) -> usize {
        /* an error is one of an earlier send, of a closed port at the other end, and says nothing */
        let got = self.inbox.fill(port.socket.as_raw_fd());
        if let Some(host) = &mut port.host {
            host.note_socket(got);
        }
        got
    }
}
