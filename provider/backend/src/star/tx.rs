//! Packets in, as few system calls as possible out.

use std::ops::Deref;
use std::sync::Arc;

use starverbs_core::star::wire::{CRC_LEN, Crc, HEADER_LEN, Head, PREFIX_LEN, Side, fill_checksum};
use starverbs_core::wire::icrc::IcrcHeader;
use starverbs_core::{Av, Counters, FrameMeta, Seg};
use starverbs_settings::Settings;

use super::Sockets;
use crate::batch::{Batch, Group, HOPS, MAX_FRAME, send_run};
use crate::pcap::Capture;
use crate::{BackendError, HostAddr};

/// The sending half of both ports.
pub struct StarTx<C> {
    counters: C,
    capture: Option<Capture>,
    sockets: Arc<Sockets>,
    addrs: Vec<HostAddr>,
    gso: bool,
    batch: Batch,
}

impl<C: Deref<Target = Counters>> StarTx<C> {
    pub(super) fn new(
        settings: &Settings,
        addrs: &[HostAddr],
        sockets: Arc<Sockets>,
        counters: C,
        capture: Option<Capture>,
    ) -> Result<Self, BackendError> {
        let (addrs, batch) = (addrs.to_vec(), Batch::new()?);
        Ok(StarTx { counters, capture, sockets, addrs, gso: settings.gso, batch })
    }

    /// The UDP port of a half, for peers to be told.
    pub fn port(&self, side: Side) -> u16 {
        self.sockets.half(side).port
    }

    /// Whether a packet of any size has room before the next [`StarTx::flush`].
    #[inline]
    pub fn can_send(&self) -> bool {
        self.batch.has_room()
    }

    /// Adds a packet to UDP port `port` of `to`; see [`starverbs_core::star::env::StarEnv::send_star`]. One that cannot go (too
    /// long, address foreign) is counted in `tx_errors` and lost.
    pub fn send(&mut self, to: &Av, port: u16, head: &Head, data: &[u8], payload: &[Seg], volatile: bool) {
        let length: usize = payload.iter().map(|s| s.len as usize).sum();
        let size = head.bytes().len() + data.len() + length + CRC_LEN;
        let v4 = to.dgid.ipv4().is_some();
        let side = leaves_from(head);
        let known = self.addrs.iter().position(|addr| addr.gid == to.sgid);
        let reachable = to.sgid.ipv4().is_some() == v4 && self.sockets.half(side).socket(v4).is_some();
        let Some(source) = known.filter(|_| reachable && size <= MAX_FRAME) else {
            return self.counters.tx_errors.inc();
        };
        if !self.batch.has_room() {
            self.flush();
        }
        let group = Group {
            source: source as u8,
            socket: u8::from(side == Side::Stateful) << 1 | u8::from(v4),
            anywhere: true,
            port,
            dgid: to.dgid,
            traffic_class: to.traffic_class,
            hop_limit: if to.hop_limit == 0 { HOPS } else { to.hop_limit },
            block: 0,
        };
        self.batch.place(&group, size, self.gso);
        let path = IcrcHeader { src: to.sgid, dst: to.dgid, sport: self.port(side), dport: port, ip_id: 0 };
        self.write(&path, head, data, payload, volatile);
        self.counters.tx_packets.inc();
        self.counters.tx_bytes.add((data.len() + length) as u64);
        if let Some(capture) = &self.capture {
            let meta = FrameMeta {
                src: to.sgid,
                dst: to.dgid,
                traffic_class: to.traffic_class,
                hop_limit: to.hop_limit,
            };
            capture.frame(&path, &meta, &[&self.batch.last_frame(size)]);
        }
    }

    fn write(&mut self, path: &IcrcHeader, head: &Head, data: &[u8], payload: &[Seg], volatile: bool) {
        let mut room = [0; HEADER_LEN + PREFIX_LEN];
        let bytes = head.bytes();
        let head = &mut room[..bytes.len()];
        head.copy_from_slice(bytes);
        fill_checksum(path, head);
        let mut crc = Crc::new();
        self.batch.begin(head);
        crc.update(head);
        crc.update(self.batch.copy(data));
        for seg in payload.iter().filter(|s| s.len > 0) {
            // SAFETY: as in `Tx::push`: the card, or with StaR its peer's registry and this card's bounds, checked the segment against a
            // region, whose memory the program must keep until it is deregistered. It may write meanwhile (a program's own race): only
            // bytes are read, and what is copied twice differently fails the CRC at the peer.
            let bytes = unsafe { std::slice::from_raw_parts(seg.addr as *const u8, seg.len as usize) };
            let copied = volatile || bytes.len() < crate::udp_tx::COPY_BELOW;
            crc.update(if copied { self.batch.copy(bytes) } else { self.batch.gather(bytes) });
        }
        self.batch.copy(&crc.finish());
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
        let mut at = 0;
        while at < self.batch.groups() {
            let end = self.batch.run_end(at);
            let socket = self.batch.group(at).socket;
            let side = if socket & 2 == 0 { Side::Stateless } else { Side::Stateful };
            if let Some(fd) = self.sockets.half(side).socket(socket & 1 != 0) {
                let (addrs, counters, gso) = (&self.addrs, &*self.counters, &mut self.gso);
                send_run(&mut self.batch, fd, at, end, counters, |batch, at| {
                    let from = &addrs[usize::from(batch.group(at).source)];
                    let lost = send_singly(batch, at, fd, from);
                    counters.tx_errors.add(lost);
                    *gso &= lost > 0;
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

/// Sends a segmented message's packets one by one; gives how many could not go.
#[cold]
fn send_singly(batch: &mut Batch, at: usize, fd: i32, from: &HostAddr) -> u64 {
    let mut frame = [0; MAX_FRAME];
    let sent = (0..batch.frames(at)).filter(|&index| {
        let len = batch.read_frame(at, index, &mut frame);
        batch.send_one(fd, at, from, &frame[..len]).is_ok()
    });
    let sent = sent.count() as u64;
    u64::from(batch.frames(at)) - sent
}

/// Which half's port a packet leaves from: its answer comes back there. What SL's card sends has no prefix.
fn leaves_from(head: &Head) -> Side {
    if head.bytes().len() > HEADER_LEN { Side::Stateful } else { Side::Stateless }
}

impl<C> std::fmt::Debug for StarTx<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StarTx").field("sockets", &self.sockets).finish_non_exhaustive()
    }
}
