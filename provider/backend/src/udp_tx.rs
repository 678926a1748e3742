//! The sending half: frames in, as few system calls as possible out.
//!
//! Frames collect in a batch until [`Tx::flush`]. Frames in a row to the same peer and QPN block, equal in
//! size (the last may be shorter), become one segmented send (UDP_SEGMENT), whose segments the kernel numbers
//! 0, 1, 2 ... in the IPv4 identification; the ICRC is computed for that number. Owns the sending sockets,
//! one for each source address: unconnected and with don't-fragment, as only then the kernel sends
//! identification 0. It must not know what a frame means.

use std::io;
use std::net::IpAddr;
use std::ops::Deref;
use std::os::fd::AsRawFd;

use starverbs_core::wire::icrc::{Icrc, IcrcHeader};
use starverbs_core::{Av, Counters, FrameMeta, Gid, QPN_BLOCK_SHIFT, Qpn};
use starverbs_settings::Settings;

use crate::batch::{Batch, Group, HOPS, MAX_FRAME, send_run};
use crate::descriptor::Socket;
use crate::error::os;
use crate::owners::Owners;
use crate::pcap::Capture;
use crate::program::Payload;
use crate::sockopt;
use crate::{BackendError, HostAddr, membership};

/// Payload below this is copied: an iovec of its own costs more.
pub(crate) const COPY_BELOW: usize = 512;
/// Payload in more pieces than this is copied.
const MOST_PIECES: usize = 8;
/// Length of a BTH (IBTA 9.2).
const BTH: usize = 12;
const ICRC: usize = 4;

/// A source address's socket.
struct Source {
    fd: Socket,
    sport: u16,
    gso: bool,
}

/// The sending half of a port.
pub struct Tx<C> {
    counters: C,
    capture: Option<Capture>,
    port: u16,
    sndbuf: usize,
    gso: bool,
    addrs: Vec<HostAddr>,
    sources: Vec<Option<Source>>,
    batch: Batch,
    owners: Owners,
}

impl<C: Deref<Target = Counters>> Tx<C> {
    pub(crate) fn open(
        settings: &Settings,
        addrs: &[HostAddr],
        counters: C,
        capture: Option<Capture>,
    ) -> Result<Self, BackendError> {
        let mut tx = Tx {
            counters,
            capture,
            port: settings.port,
            sndbuf: settings.sndbuf,
            gso: settings.gso,
            addrs: addrs.to_vec(),
            sources: addrs.iter().map(|_| None).collect(),
            batch: Batch::new()?,
            owners: Owners::default(),
        };
        // The first address's socket now, so that a host that allows none fails at opening and not while
        // sending.
        if !tx.addrs.is_empty() {
            tx.source(0)?;
        }
        Ok(tx)
    }

    /// UDP port that frames from address `index` carry; 0 if it cannot be had.
    pub fn source_port(&mut self, index: u8) -> u16 {
        self.source(index as usize).map_or(0, |s| s.sport)
    }

    pub(crate) fn addresses(&self) -> &[HostAddr] {
        &self.addrs
    }

    pub(crate) fn capture(&self) -> Option<&Capture> {
        self.capture.as_ref()
    }

    /// Whether frames are sent from the address `gid`.
    pub fn has_address(&self, gid: &Gid) -> bool {
        self.addrs.iter().any(|addr| addr.gid == *gid)
    }

    /// Whether `gid` is the address with that index.
    pub fn has_entry(&self, index: u8, gid: &Gid) -> bool {
        self.addrs.get(usize::from(index)).is_some_and(|addr| addr.gid == *gid)
    }

    fn source(&mut self, index: usize) -> Result<&mut Source, BackendError> {
        let slot = &mut self.sources[index];
        if slot.is_none() {
            *slot = Some(open_source(&self.addrs[index], self.sndbuf, self.gso)?);
        }
        slot.as_mut().ok_or_else(|| os("a socket to send from"))
    }

    /// Frames to blocks of this host's processes share segmented sends from now on as these say.
    pub(crate) fn set_owners(&mut self, owners: Owners) {
        // A QP's frames are in order in the messages of one block.
        self.flush();
        self.owners = owners;
    }

    /// The block that tells who gets a frame for `qpn` at `dgid`.
    #[inline]
    fn block_for(&self, dgid: &Gid, qpn: Qpn) -> u32 {
        let block = qpn >> QPN_BLOCK_SHIFT;
        if self.owners.is_empty() || !self.has_address(dgid) { block } else { self.owners.of(block) }
    }

    /// Whether a frame of any size has room in the batch.
    #[inline]
    pub fn can_send(&self) -> bool {
        self.batch.has_room()
    }

    /// Adds a frame to the batch; see [`starverbs_core::Port::send_frame`].
    #[inline]
    pub fn send_frame(&mut self, to: &Av, header: &[u8], payload: Payload<'_>, pad: u8, volatile: bool) {
        self.push(to, header, payload, pad, volatile, None);
    }

    /// [`Tx::send_frame`], with a bit to turn over behind the ICRC's back (a fault).
    pub(crate) fn push(
        &mut self,
        to: &Av,
        header: &[u8],
        payload: Payload<'_>,
        pad: u8,
        volatile: bool,
        corrupt: Option<u64>,
    ) {
        let length = payload.len();
        let size = header.len() + length + pad as usize + ICRC;
        let Some(bth) = header.first_chunk::<BTH>().filter(|_| size <= MAX_FRAME && pad < 4) else {
            return self.counters.tx_errors.inc();
        };
        if !self.batch.has_room() {
            self.flush();
        }
        let Some((source, sport, gso)) = self.ready(to) else { return self.counters.tx_errors.inc() };
        let group = Group {
            source: source as u8,
            socket: source as u8,
            anywhere: false,
            port: self.port,
            dgid: to.dgid,
            traffic_class: to.traffic_class,
            hop_limit: if to.hop_limit == 0 { HOPS } else { to.hop_limit },
            block: self.block_for(&to.dgid, u32::from_be_bytes([0, bth[5], bth[6], bth[7]])),
        };
        let ip_id = self.batch.place(&group, size, gso);
        let outer = IcrcHeader { src: to.sgid, dst: to.dgid, sport, dport: self.port, ip_id };
        let mut crc = Icrc::begin(&outer, size as u16, bth);
        let start = self.batch.begin(header);
        crc.update(&header[BTH..]);
        let copied = volatile || length < COPY_BELOW || payload.pieces() > MOST_PIECES;
        for bytes in payload.iter() {
            if copied {
                crc.update(self.batch.copy_program(bytes));
            } else {
                self.batch.gather(bytes, |seen| crc.update(seen));
            }
        }
        let zeroes = &[0; 3][..pad as usize];
        crc.update(zeroes);
        self.batch.copy(zeroes);
        self.batch.copy(&crc.finish());
        if let Some(draw) = corrupt {
            self.batch.flip(start, size, draw);
        }
        self.counters.tx_packets.inc();
        self.counters.tx_bytes.add(length as u64);
        if self.capture.is_some() {
            self.captured(to, &outer, size);
        }
    }

    /// Index, source port and GSO of the source address, if it can send to `to`.
    #[inline]
    fn ready(&mut self, to: &Av) -> Option<(usize, u16, bool)> {
        if to.sgid.ipv4().is_some() != to.dgid.ipv4().is_some() {
            return None;
        }
        let mut index = to.sgid_index as usize;
        if self.addrs.get(index).is_none_or(|a| a.gid != to.sgid) {
            // An answer to a frame knows the address alone.
            index = self.addrs.iter().position(|a| a.gid == to.sgid)?;
        }
        match &self.sources[index] {
            Some(source) => Some((index, source.sport, source.gso)),
            None => self.source(index).ok().map(|s| (index, s.sport, s.gso)),
        }
    }

    #[cold]
    fn captured(&self, to: &Av, outer: &IcrcHeader, size: usize) {
        let Some(capture) = &self.capture else { return };
        let meta = FrameMeta {
            src: to.sgid,
            dst: to.dgid,
            traffic_class: to.traffic_class,
            hop_limit: to.hop_limit,
        };
        capture.frame(outer, &meta, &[&self.batch.last_frame(size)]);
    }

    /// Sends what the batch holds. What the kernel refuses is lost and counted.
    #[inline]
    pub fn flush(&mut self) {
        if !self.batch.is_empty() {
            self.send_all();
        }
    }

    fn send_all(&mut self) {
        self.batch.seal(&self.addrs);
        let count = self.batch.groups();
        let mut at = 0;
        while at < count {
            let end = self.batch.run_end(at);
            let source = self.batch.group(at).source as usize;
            if let Some(socket) = self.sources[source].as_mut() {
                let (fd, addr) = (socket.fd.as_raw_fd(), &self.addrs[source]);
                send_run(&mut self.batch, fd, at, end, &self.counters, |batch, at| {
                    send_singly(batch, at, socket, addr, &self.counters);
                });
            }
            at = end;
        }
        self.batch.clear();
        if let Some(capture) = &self.capture {
            capture.flush();
        }
    }
}

/// Sends a segmented message's frames one by one: the way to this peer does not segment. Their
/// identifications are all 0 then, so that their ICRCs change.
#[cold]
fn send_singly(batch: &mut Batch, at: usize, socket: &mut Source, from: &HostAddr, counters: &Counters) {
    let group = *batch.group(at);
    let outer =
        IcrcHeader { src: from.gid, dst: group.dgid, sport: socket.sport, dport: group.port, ip_id: 0 };
    let mut all_sent = true;
    let mut frame = [0; MAX_FRAME];
    for index in 0..batch.frames(at) {
        let len = batch.read_frame(at, index, &mut frame);
        let Some(body) = len.checked_sub(ICRC) else { continue };
        if let Some(icrc) = Icrc::of_frame(&outer, &frame[..body]) {
            frame[body..len].copy_from_slice(&icrc);
        }
        counters.tx_syscalls.inc();
        if batch.send_one(socket.fd.as_raw_fd(), at, from, &frame[..len]).is_err() {
            counters.tx_errors.inc();
            all_sent = false;
        }
    }
    // Only if segmentation was at fault, and not the destination.
    if all_sent {
        socket.gso = false;
    }
}

impl<C> std::fmt::Debug for Tx<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tx").field("port", &self.port).field("addrs", &self.addrs).finish_non_exhaustive()
    }
}

fn open_source(addr: &HostAddr, sndbuf: usize, gso: bool) -> Result<Source, BackendError> {
    const WHAT: &str = "the UDP socket to send from";
    let v4 = addr.gid.ipv4().is_some();
    let fd = sockopt::datagram(if v4 { libc::AF_INET } else { libc::AF_INET6 }, WHAT)?;
    if v4 {
        sockopt::set_int(&fd, libc::SOL_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO);
    } else {
        sockopt::set_int(&fd, libc::SOL_IPV6, libc::IPV6_V6ONLY, 1);
        sockopt::set_int(&fd, libc::SOL_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO);
    }
    membership::send_from(&fd, addr, i32::from(HOPS));
    sockopt::send_buffer(&fd, sndbuf);
    // Nobody should send here; what comes all the same must not cost memory.
    sockopt::set_int(&fd, libc::SOL_SOCKET, libc::SO_RCVBUF, 0);
    let socket = socket2::SockRef::from(&fd);
    let local = match addr.ip() {
        IpAddr::V4(ip) => std::net::SocketAddr::from((ip, 0)),
        IpAddr::V6(ip) => {
            let scope = if addr.is_link_local() { addr.ifindex } else { 0 };
            std::net::SocketAddrV6::new(ip, 0, 0, scope).into()
        }
    };
    let bound = socket.bind(&local.into()).and_then(|()| socket.local_addr());
    let sport = bound
        .and_then(|a| a.as_socket().map(|a| a.port()).ok_or_else(|| io::Error::from(io::ErrorKind::Other)))
        .map_err(|source| BackendError::Socket { what: WHAT, source })?;
    // Asking costs nothing; a kernel before 4.18 does not know the option.
    let gso = gso && supports_gso(&fd);
    Ok(Source { fd, sport, gso })
}

fn supports_gso(fd: &Socket) -> bool {
    let (mut value, mut len) = (0i32, std::mem::size_of::<i32>() as libc::socklen_t);
    let out = std::ptr::from_mut(&mut value).cast();
    // SAFETY: the pointers describe `value` and `len`, alive across the call.
    unsafe { libc::getsockopt(fd.as_raw_fd(), libc::SOL_UDP, libc::UDP_SEGMENT, out, &mut len) == 0 }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use starverbs_core::Seg;

    use super::*;

    /// Another host's blocks may have the same numbers.
    #[test]
    fn blocks_of_a_process_of_this_host_share_a_send() {
        let settings = Settings { addrs: Some(vec![IpAddr::from([127, 0, 0, 1])]), ..Settings::default() };
        let addrs = crate::host::addresses(&settings).expect("loopback");
        let counters = Counters::default();
        let mut tx = Tx::open(&settings, &addrs, &counters, None).expect("a socket");
        let here = Av { sgid: addrs[0].gid, dgid: addrs[0].gid, ..Av::default() };
        let there = Av { dgid: crate::host::gid_of(IpAddr::from([192, 0, 2, 77])), ..here };
        let mut sends = |to: &Av, owners: Owners| {
            tx.set_owners(owners);
            tx.batch.clear();
            for block in [5u8, 6, 7, 5, 6, 7] {
                tx.send_frame(to, &[4, 0, 0, 0, 0, 0, block << 4, 1, 0, 0, 0, 0], Payload::EMPTY, 0, false);
            }
            tx.batch.groups()
        };
        let owners = || Owners::new([&[6u16, 5][..], &[7]].into_iter());
        assert_eq!(
            [sends(&here, Owners::default()), sends(&here, owners()), sends(&there, owners())],
            [3, 2, 3]
        );
        tx.batch.clear();
    }

    #[test]
    fn frames_sent_singly_have_the_icrc_of_identification_0() {
        let peer = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let port = peer.local_addr().expect("bound").port();
        let settings =
            Settings { port, addrs: Some(vec![IpAddr::from([127, 0, 0, 1])]), ..Settings::default() };
        let addrs = crate::host::addresses(&settings).expect("loopback");
        let counters = Counters::default();
        let mut tx = Tx::open(&settings, &addrs, &counters, None).expect("a socket");
        let gid = addrs[0].gid;
        let to = Av { sgid: gid, dgid: gid, hop_limit: 9, ..Av::default() };
        let data = [5u8; 1000];
        for len in [1000, 1000, 1000, 8] {
            let segs = [Seg { addr: data.as_ptr() as u64, len }];
            // SAFETY: the array lives until the batch is sent.
            tx.send_frame(&to, &[7; BTH], unsafe { Payload::new(&segs) }, 0, false);
        }
        assert_eq!((tx.batch.groups(), tx.batch.frames(0)), (1, 4));
        tx.batch.seal(&tx.addrs);
        let socket = tx.sources[0].as_mut().expect("open");
        send_singly(&mut tx.batch, 0, socket, &tx.addrs[0], &counters);
        assert_eq!(counters.tx_errors.get(), 0);
        assert!(tx.sources[0].as_ref().is_some_and(|s| !s.gso), "the way is remembered");
        let outer = IcrcHeader { src: gid, dst: gid, sport: tx.source_port(0), dport: port, ip_id: 0 };
        for len in [1000, 1000, 1000, 8] {
            let mut frame = [0; 2048];
            let got = peer.recv(&mut frame).expect("a frame");
            assert_eq!(got, BTH + len + ICRC);
            let (body, icrc) = frame[..got].split_at(got - ICRC);
            assert_eq!(Icrc::of_frame(&outer, body).as_ref().map(|i| &i[..]), Some(icrc));
            assert_eq!(body[BTH..], data[..len]);
        }
    }
}
