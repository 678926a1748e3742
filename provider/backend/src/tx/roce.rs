//! RoCEv2: frames whose ICRC covers addresses, ports and BTH, from a socket for each source address.
//!
//! The sockets are unconnected and with don't-fragment, as only then the kernel sends identification 0. A
//! receiving host steers frames by the QPN block that they go to.

use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::ops::Deref;
use std::sync::Arc;

use nix::sys::socket::sockopt::UdpGsoSegment;
use nix::sys::socket::{AddressFamily, getsockopt};
use starverbs_core::wire::opcode::BTH_LEN;
use starverbs_core::wire::{Crc, IcrcHeader, icrc};
use starverbs_core::{Av, Counters, Gid, QPN_BLOCK_SHIFT};
use starverbs_settings::Settings;

use super::host_frames::HostFrames;
use super::{Datagram, Framing, Route, Sender, Tx};
use crate::batch::HOPS;
use crate::error::os_error;
use crate::owners::Owners;
use crate::pcap::Capture;
use crate::peer::Peers;
use crate::program::Payload;
use crate::star::{self, StarRx, StarTx};
use crate::udp_rx::mads::{self, SPECIAL_BLOCK};
use crate::{BackendError, HostAddr, membership, sockopt};

/// The sending half of the RoCEv2 port.
pub type RoceTx<C> = Tx<Roce, C>;

/// The framing of RoCEv2.
#[derive(Debug)]
pub struct Roce {
    port: u16,
    sndbuf: usize,
    gso: bool,
    owners: Owners,
}

impl Framing for Roce {
    const COVERS_IP_ID: bool = true;
    const ANYWHERE: bool = false;

    #[inline]
    fn route(&self, datagram: &Datagram<'_>, source: usize, addrs: &[HostAddr]) -> Option<Route> {
        let [.., a, b, c, _, _, _, _] = *datagram.head.first_chunk::<BTH_LEN>()?;
        let block = u32::from_be_bytes([0, a, b, c]) >> QPN_BLOCK_SHIFT;
        let dgid = &datagram.to.dgid;
        let is_here = || addrs.iter().any(|addr| addr.gid == *dgid);
        /* a connection manager's message goes to who gave out its ID: queue pair 1 is every process's, and
         * what one that is about to end gets for another is lost with it */
        let block = match block {
            SPECIAL_BLOCK => mads::owner(datagram.head).filter(|_| is_here()).unwrap_or(block),
            _ if self.owners.is_empty() || !is_here() => block,
            _ => self.owners.of(block),
        };
        Some(Route { socket: source as u8, block })
    }

    #[cold]
    fn open(&self, addr: &HostAddr) -> Result<Sender, BackendError> {
        open_source(addr, self.sndbuf, self.gso)
    }

    /* always: the CRC comes back in registers */
    #[inline(always)]
    fn begin(&mut self, path: &IcrcHeader, size: usize, first: &mut [u8]) -> Crc {
        /* `route` took none that is shorter */
        let (bth, rest) = first.split_first_chunk().unwrap_or((&[0; BTH_LEN], &[]));
        let mut crc = icrc::begin(path, size as u16, bth);
        crc.update(rest);
        crc
    }
}

impl<C: Deref<Target = Counters>> RoceTx<C> {
    pub(crate) fn open(
        settings: &Settings,
        addrs: &[HostAddr],
        counters: C,
        capture: Option<Capture>,
    ) -> Result<Self, BackendError> {
        let Settings { port, sndbuf, gso, .. } = *settings;
        let framing = Roce { port, sndbuf, gso, owners: Owners::default() };
        let mut senders: Vec<Option<Sender>> = addrs.iter().map(|_| None).collect();
        // The first address's socket now, so that a host that allows none fails at opening and not while
        // sending.
        if let ([first, ..], [sender, ..]) = (addrs, &mut senders[..]) {
            *sender = Some(framing.open(first)?);
        }
        Tx::new(settings, addrs, framing, senders, counters, capture)
    }

    /// Adds a frame; see [`starverbs_core::Port::send_frame`]. Payload memory is read now and, unless
    /// `volatile`, again at the flush. A frame that cannot go (too long, address index or family wrong)
    /// is counted in `tx_errors` and lost.
    #[inline]
    pub fn send_frame(&mut self, to: &Av, head: &[u8], payload: Payload<'_>, pad: u8, volatile: bool) {
        let port = self.framing.port;
        self.send_datagram(&Datagram { to, port, head, data: &[], payload, pad, volatile });
    }

    /// Frames to this host's processes share segmented sends from now on as these say. Sends what was added
    /// before.
    pub fn set_owners(&mut self, owners: Owners) {
        // A QP's frames are in order in the messages of one block.
        self.send_all();
        self.framing.owners = owners;
    }

    /// Frames to other processes of this host go through their sessions from now on, where they can.
    pub fn use_memory(&mut self, peers: &Peers) {
        self.host_frames = Some(HostFrames::new(peers.clone()));
    }

    /// UDP source port of frames from the address with index `sgid_index`; 0 if it cannot send.
    pub fn source_port(&mut self, sgid_index: u8) -> u16 {
        self.sender(sgid_index, usize::from(sgid_index)).map_or(0, |sender| sender.sport)
    }

    /// Whether frames are sent from the address `gid`.
    pub fn has_address(&self, gid: &Gid) -> bool {
        self.addrs.iter().any(|addr| addr.gid == *gid)
    }

    /// Whether `gid` is the port's address with that index.
    pub fn has_entry(&self, index: u8, gid: &Gid) -> bool {
        self.addrs.get(usize::from(index)).is_some_and(|addr| addr.gid == *gid)
    }

    /// Opens the two UDP ports of StaR, and gives the halves that send and receive.
    ///
    /// # Errors
    /// See [`BackendError`]; sockets that were opened are closed again.
    pub fn open_star(&self, settings: &Settings) -> Result<(StarTx<C>, StarRx<C>), BackendError>
    where
        C: Clone,
    {
        star::open(settings, &self.addrs, self.counters.clone(), self.capture.clone())
    }
}

fn open_source(addr: &HostAddr, sndbuf: usize, gso: bool) -> Result<Sender, BackendError> {
    const WHAT: &str = "the UDP socket to send from";
    let v4 = addr.gid.ipv4().is_some();
    let fd = sockopt::datagram(if v4 { AddressFamily::Inet } else { AddressFamily::Inet6 }, WHAT)?;
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
    let local = match addr.ip() {
        IpAddr::V4(ip) => SocketAddr::from((ip, 0)),
        IpAddr::V6(ip) => {
            let scope = if addr.is_link_local() { addr.ifindex } else { 0 };
            SocketAddrV6::new(ip, 0, 0, scope).into()
        }
    };
    let sport = sockopt::bind(&fd, local).map_err(|error| os_error(WHAT, error))?;
    // Asking costs nothing; a kernel before 4.18 does not know the option.
    let gso = gso && getsockopt(&fd, UdpGsoSegment).is_ok();
    Ok(Sender { fd: Arc::new(fd), sport, gso })
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd;

    use starverbs_core::Seg;

    use super::*;
    use crate::tx::CRC;

    /// Another host's blocks may have the same numbers.
    #[test]
    fn blocks_of_a_process_of_this_host_share_a_send() {
        let settings = Settings { addrs: Some(vec![IpAddr::from([127, 0, 0, 1])]), ..Settings::default() };
        let addrs = crate::host::addresses(&settings).expect("loopback");
        let counters = Counters::default();
        let mut tx = RoceTx::open(&settings, &addrs, &counters, None).expect("a socket");
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
    fn a_connection_managers_message_goes_to_who_gave_out_its_id() {
        use starverbs_cm::wire::message::{Ids, rtu};
        use starverbs_cm::wire::{Attribute, Mad};
        let settings = Settings { addrs: Some(vec![IpAddr::from([127, 0, 0, 1])]), ..Settings::default() };
        let addrs = crate::host::addresses(&settings).expect("loopback");
        let counters = Counters::default();
        let tx = RoceTx::open(&settings, &addrs, &counters, None).expect("a socket");
        let block = |dgid, mad: &Mad| {
            let to = &Av { sgid: addrs[0].gid, dgid, ..Av::default() };
            let head = [&[0, 0, 0, 0, 0, 0, 0, 1][..], &[0; mads::HEADERS - 8], mad.bytes()].concat();
            let datagram = Datagram {
                to,
                port: 0,
                head: &head,
                data: &[],
                payload: Payload::EMPTY,
                pad: 0,
                volatile: false,
            };
            tx.framing.route(&datagram, 0, &addrs).map(|route| route.block)
        };
        let (here, there) = (addrs[0].gid, crate::host::gid_of(IpAddr::from([192, 0, 2, 77])));
        let named = |remote| rtu(Ids { local: 9, remote, transaction: 1 });
        let to_seven = named(7 << mads::ID_SHIFT | 3);
        assert_eq!(block(here, &to_seven), Some(7));
        assert_eq!(block(there, &to_seven), Some(SPECIAL_BLOCK), "another host's IDs");
        assert_eq!(block(here, &named(3)), Some(SPECIAL_BLOCK), "no process gave that out");
        assert_eq!(block(here, &Mad::new(Attribute::Req, 1)), Some(SPECIAL_BLOCK), "whoever listens");
    }

    #[test]
    fn frames_sent_singly_have_the_icrc_of_identification_0() {
        let peer = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let port = peer.local_addr().expect("bound").port();
        let settings =
            Settings { port, addrs: Some(vec![IpAddr::from([127, 0, 0, 1])]), ..Settings::default() };
        let addrs = crate::host::addresses(&settings).expect("loopback");
        let counters = Counters::default();
        let mut tx = RoceTx::open(&settings, &addrs, &counters, None).expect("a socket");
        let gid = addrs[0].gid;
        let to = Av { sgid: gid, dgid: gid, hop_limit: 9, ..Av::default() };
        let data = [5u8; 1000];
        for len in [1000, 1000, 1000, 8] {
            let segs = [Seg { addr: data.as_ptr() as u64, len }];
            // SAFETY: the array lives until the batch is sent.
            tx.send_frame(&to, &[7; BTH_LEN], unsafe { Payload::new(&segs) }, 0, false);
        }
        assert_eq!((tx.batch.groups(), tx.batch.frames(0)), (1, 4));
        tx.batch.seal(&tx.addrs);
        let fd = tx.senders[0].as_ref().expect("open").fd.as_raw_fd();
        tx.send_singly(fd, 0);
        assert_eq!(counters.tx_errors.get(), 0);
        assert!(tx.senders[0].as_ref().is_some_and(|s| !s.gso), "the way is remembered");
        let outer = IcrcHeader { src: gid, dst: gid, sport: tx.source_port(0), dport: port, ip_id: 0 };
        for len in [1000, 1000, 1000, 8] {
            let mut frame = [0; 2048];
            let got = peer.recv(&mut frame).expect("a frame");
            assert_eq!(got, BTH_LEN + len + CRC);
            let (body, icrc) = frame[..got].split_at(got - CRC);
            assert_eq!(icrc::of_frame(&outer, body).as_ref().map(|i| &i[..]), Some(icrc));
            assert_eq!(body[BTH_LEN..], data[..len]);
        }
    }
}
