//! What goes over the wire: B27. This host is the peer of a datagram QP: it gets a frame of the board, and
//! sends one back.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, SockaddrStorage};
use starverbs_core::wire::builder::HeaderBuf;
use starverbs_core::wire::headers::PKEY_DEFAULT;
use starverbs_core::wire::icrc::{self, IcrcHeader, bytes_after_ip_id, explained_by_ip_id};
use starverbs_core::wire::opcode::code;
use starverbs_core::wire::packet::Packet;
use starverbs_core::{AvId, Gid, Psn};
use starverbs_queues::board::*;
use starverbs_queues::{SendOp, SendWqe, WcStatus};
use zerocopy::IntoBytes;

use crate::bench::{Bench, Wire};
use crate::fault::{RuleFault, Tested, ensure, expect};
use crate::qp::{QKEY, UD, data, request};
use crate::raw::{Basics, DATA, QPS, RawDriver};

/// QPN that this host says it has.
const OWN_QPN: u32 = 0x77;
/// Bytes of an ICRC.
const ICRC: usize = 4;
/// Bytes of the GRH before a datagram.
const GRH: usize = 40;

/// This host's end of the wire.
struct WirePeer {
    socket: UdpSocket,
    own: Gid,
    port: u16,
}

fn gid_of(address: IpAddr) -> Gid {
    match address {
        IpAddr::V4(v4) => Gid::from_ipv4(v4.octets()),
        IpAddr::V6(v6) => Gid(v6.octets()),
    }
}

fn address_of(gid: Gid) -> IpAddr {
    gid.ipv4().map_or(IpAddr::from(gid.0), IpAddr::from)
}

impl WirePeer {
    fn open(wire: Wire) -> Tested<WirePeer> {
        let at = SocketAddr::new(wire.address, wire.port);
        let socket =
            bind(at).map_err(|error| RuleFault::Skipped(format!("no frames can be had at {at}: {error}")))?;
        socket.set_read_timeout(Some(Duration::from_millis(50)))?;
        Ok(WirePeer { socket, own: gid_of(wire.address), port: wire.port })
    }

    /// The next frame without its ICRC, and who sent it; the ICRC is right.
    fn receive(&self, patience: Duration) -> Tested<(Vec<u8>, SocketAddr)> {
        let mut frame = vec![0; 9000];
        let begun = Instant::now();
        let (len, from) = loop {
            match self.socket.recv_from(&mut frame) {
                Ok(got) => break got,
                Err(error) if !is_early(&error) => return Err(error.into()),
                Err(_) if begun.elapsed() > patience => {
                    return Err(RuleFault::failed(
                        "a frame on the wire",
                        format_args!("none in {patience:?}"),
                    ));
                }
                Err(_) => {}
            }
        };
        let covered = len.checked_sub(ICRC);
        let covered = covered.ok_or_else(|| RuleFault::failed("a frame", format_args!("{len} bytes")))?;
        frame.truncate(len);
        let sum = frame.split_off(covered);
        let outer = IcrcHeader {
            src: gid_of(from.ip()),
            dst: self.own,
            sport: from.port(),
            dport: self.port,
            ip_id: 0,
        };
        let wanted = icrc::of_frame(&outer, &frame).unwrap_or_default();
        let word = |bytes: &[u8]| bytes.iter().rev().fold(0u32, |all, byte| all << 8 | u32::from(*byte));
        /* a socket does not show the identification of IPv4, which the ICRC covers */
        let error = word(&sum) ^ word(&wanted);
        let sound =
            error == 0 || outer.src.ipv4().is_some() && explained_by_ip_id(error, bytes_after_ip_id(covered));
        ensure(sound, "the ICRC of the frame", format_args!("{sum:02x?}"))?;
        Ok((frame, from))
    }

    /// Sends a datagram of `payload`, whose length is a multiple of four, to a QP of the board.
    fn send(&self, to: IpAddr, qpn: u32, payload: &[u8]) -> Tested {
        let headers = HeaderBuf::bth(code::UD_SEND_ONLY, qpn, Psn::new(1), false, false, 0, PKEY_DEFAULT);
        let headers = headers.deth(QKEY, OWN_QPN);
        let frame = [headers.as_bytes(), payload].concat();
        let own = self.own;
        /* from a port of its own, as cards send */
        let socket = UdpSocket::bind(SocketAddr::new(address_of(own), 0))?;
        let (sport, dport) = (socket.local_addr()?.port(), self.port);
        let outer = IcrcHeader { src: own, dst: gid_of(to), sport, dport, ip_id: 0 };
        let sum = icrc::of_frame(&outer, &frame).unwrap_or_default();
        socket.send_to(&[&frame[..], &sum].concat(), SocketAddr::new(to, dport))?;
        Ok(())
    }
}

/// A socket at one address, beside a board of this host that has the port at all of them.
fn bind(at: SocketAddr) -> io::Result<UdpSocket> {
    let family = if at.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let fd = socket::socket(family, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    socket::setsockopt(&fd, socket::sockopt::ReusePort, &true)?;
    socket::bind(fd.as_raw_fd(), &SockaddrStorage::from(at))?;
    Ok(UdpSocket::from(fd))
}

fn is_early(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}

pub(super) fn frames(bench: &mut Bench) -> Tested {
    let peer = WirePeer::open(bench.wire()?)?;
    let mut raw = bench.open()?;
    let Basics { pd, key, cq } = raw.basics()?;
    let create = RawDriver::create_qp(pd, cq.number, QPS);
    let mut qp = raw.qp_of(0, &CreateQp { kind: UD, ..create })?;
    raw.connect_as(qp, 0, UD)?;
    let gid = raw.gid()?;
    let there = Address { dgid: peer.own.0, sgid: gid, hop_limit: 64, ..Address::default() };
    let ah = raw.number(OP_CREATE_AH, AddressHandle { pd, address: there }.as_bytes())?.number;
    raw.put(DATA, b"over the wire");
    let to = SendWqe { av: AvId(ah), remote_qpn: OWN_QPN, qkey: QKEY, ..request(SendOp::Send, 1) };
    raw.put_send(&mut qp, to, data(0, 13, key));
    raw.doorbell(&qp)?;
    let (frame, from) = peer.receive(bench.patience())?;
    let packet = Packet::parse(&frame).map_err(|error| RuleFault::failed("a packet of RoCEv2", error))?;
    let bth = packet.bth();
    let said = (bth.opcode(), bth.dest_qpn(), bth.pkey(), bth.pad(), packet.payload());
    let wanted = (code::UD_SEND_ONLY, OWN_QPN, PKEY_DEFAULT, 3, &b"over the wire"[..]);
    expect("op-code, QPN, P_Key, padding and payload", said, wanted)?;
    let deth = packet.deth().map(|deth| (deth.qkey(), deth.src_qp()));
    expect("Q_Key and source in the DETH", deth, Some((QKEY, qp.qpn)))?;
    expect("the address that the frame comes from", from.ip(), address_of(Gid(gid)))?;
    expect("status of the datagram", raw.completion()?.status, WcStatus::Success)?;
    raw.post_recv(&mut qp, 2, data(4096, 256, key));
    peer.send(from.ip(), qp.qpn, b"and back")?;
    let got = raw.completion()?;
    let said = (got.wr_id, got.status, got.byte_len, got.src_qp);
    expect("a datagram from the wire", said, (2, WcStatus::Success, GRH as u32 + 8, OWN_QPN))?;
    expect("its bytes", raw.bytes(DATA + 4096 + GRH, 8), b"and back".to_vec())
}
