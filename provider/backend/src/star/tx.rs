//! Packets in, as few system calls as possible out.

use std::ops::Deref;
use std::sync::Arc;

use starverbs_core::wire::icrc::IcrcHeader;
use starverbs_core::{Av, Counters, FrameMeta, Gid, Nanos};
use starverbs_settings::Settings;
use starverbs_star::wire::{CRC_LEN, Crc, HEADER_LEN, Head, LANE_BITS, Side, Ways, lane};

use super::Sockets;
use crate::batch::{Batch, Group, HOPS, MAX_FRAME, send_run};
use crate::fault::{Fault, Frame};
use crate::pcap::Capture;
use crate::program::Payload;
use crate::udp_tx::COPY_BELOW;
use crate::{BackendError, HostAddr};

/// From which half of this card to which UDP port.
#[derive(Clone, Copy)]
struct Way<'a> {
    side: Side,
    to: &'a Av,
    port: u16,
}

/// The sending half of both ports.
pub struct StarTx<C: Deref<Target = Counters>> {
    /// The process that opened it; a forked child must not send for it
    process: u32,
    counters: C,
    fault: Option<Box<Fault>>,
    capture: Option<Capture>,
    sockets: Arc<Sockets>,
    addrs: Vec<HostAddr>,
    /// Which of them the last packet left from
    source: usize,
    ways: Ways,
    gso: bool,
    pub(super) batch: Batch,
}

impl<C: Deref<Target = Counters>> StarTx<C> {
    pub(super) fn new(
        settings: &Settings,
        addrs: &[HostAddr],
        sockets: Arc<Sockets>,
        counters: C,
        capture: Option<Capture>,
    ) -> Result<Self, BackendError> {
        Ok(StarTx {
            process: std::process::id(),
            counters,
            fault: Fault::from_spec(&settings.fault),
            capture,
            sockets,
            addrs: addrs.to_vec(),
            source: 0,
            ways: Ways::default(),
            gso: settings.gso,
            batch: Batch::new()?,
        })
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

    /// Adds a packet to UDP port `port` of `to`; see [`starverbs_star::env::StarEnv::send_star`]. One
    /// that cannot go (too long, address foreign) is counted in `tx_errors` and lost.
    #[inline]
    pub fn send(
        &mut self,
        to: &Av,
        port: u16,
        head: &Head,
        data: &[u8],
        payload: Payload<'_>,
        volatile: bool,
    ) {
        let side = leaves_from(head);
        let Some(fault) = &mut self.fault else {
            return self.push(Way { side, to, port }, [head.bytes(), data], payload, volatile, None);
        };
        let all = [head.bytes(), data].concat();
        fault.take_star((side, port), to, &all, payload, &self.counters);
    }

    /// Adds a packet of these pieces, the header first, perhaps with a bit to turn over behind the CRC's
    /// back.
    fn push(
        &mut self,
        way: Way<'_>,
        pieces: [&[u8]; 2],
        payload: Payload<'_>,
        volatile: bool,
        corrupt: Option<u64>,
    ) {
        let Way { side, to, port } = way;
        let length = payload.len();
        let size = pieces[0].len() + pieces[1].len() + length + CRC_LEN;
        let v4 = to.dgid.ipv4().is_some();
        let reachable = to.sgid.ipv4().is_some() == v4 && self.sockets.half(side).socket(v4).is_some();
        let Some(source) = self.source_of(&to.sgid).filter(|_| reachable && size <= MAX_FRAME) else {
            return self.counters.tx_errors.inc();
        };
        if !self.batch.has_room() {
            self.send_all();
        }
        let group = Group {
            source: source as u8,
            socket: u8::from(side == Side::Stateful) << 1 | u8::from(v4),
            anywhere: true,
            port,
            dgid: to.dgid,
            traffic_class: to.traffic_class,
            hop_limit: if to.hop_limit == 0 { HOPS } else { to.hop_limit },
            block: block(pieces[0], to, port),
        };
        self.batch.place(&group, size, self.gso);
        let path = IcrcHeader { src: to.sgid, dst: to.dgid, sport: self.port(side), dport: port, ip_id: 0 };
        let start = if volatile || length < COPY_BELOW {
            self.write(&path, pieces, payload, size)
        } else {
            self.gather(&path, pieces, payload)
        };
        if let Some(draw) = corrupt {
            self.batch.flip(start, size, draw);
        }
        self.counters.tx_packets.inc();
        self.counters.tx_bytes.add((pieces[1].len() + length) as u64);
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

    /// Which address of this host's it is.
    #[inline]
    fn source_of(&mut self, gid: &Gid) -> Option<usize> {
        let is = |addr: &HostAddr| addr.gid == *gid;
        if !self.addrs.get(self.source).is_some_and(is) {
            self.source = self.addrs.iter().position(is)?;
        }
        Some(self.source)
    }

    /// Writes a packet of `size` bytes; gives where it begins.
    #[inline]
    fn write(&mut self, path: &IcrcHeader, pieces: [&[u8]; 2], payload: Payload<'_>, size: usize) -> usize {
        let (start, room) = self.batch.room(size);
        let (body, crc) = room.split_at_mut(size - CRC_LEN);
        let mut rest = &mut *body;
        let mut next = |len: usize| rest.split_off_mut(..len).unwrap_or_default();
        for bytes in pieces {
            next(bytes.len()).copy_from_slice(bytes);
        }
        for bytes in payload.iter() {
            bytes.copy_to(0, next(bytes.len()));
        }
        self.ways.get(path).fill_checksum(body);
        crc.copy_from_slice(&Crc::of(body));
        start
    }

    /// Writes a packet whose payload stays where it is; gives where it begins.
    fn gather(&mut self, path: &IcrcHeader, pieces: [&[u8]; 2], payload: Payload<'_>) -> usize {
        let [head, data] = pieces;
        let (header, rest) = head.split_at(HEADER_LEN.min(head.len()));
        let mut room = [0; HEADER_LEN];
        let header_room = &mut room[..header.len()];
        header_room.copy_from_slice(header);
        self.ways.get(path).fill_checksum(header_room);
        let mut crc = Crc::new();
        crc.update(header_room);
        let start = self.batch.begin(header_room);
        for bytes in [rest, data] {
            crc.update(self.batch.copy(bytes));
        }
        for bytes in payload.iter() {
            if bytes.len() < COPY_BELOW {
                crc.update(self.batch.copy_program(bytes));
            } else {
                self.batch.gather(bytes, |seen| crc.update(seen));
            }
        }
        self.batch.copy(&crc.finish());
        start
    }

    /// Sends what the batch holds. What the kernel refuses is lost and counted.
    /// With `STARVERBS_FAULT`, what waited until `now` goes too.
    #[inline]
    pub fn flush(&mut self, now: Nanos) {
        if self.fault.is_some() {
            self.release(|fault, send| fault.release(now, send));
        }
        if !self.batch.is_empty() {
            self.send_all();
        }
    }

    /// When [`StarTx::flush`] has to be called although nothing new is sent: packets wait for their time.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.fault.as_ref()?.next_deadline()
    }

    /// Adds what the fault lets go.
    fn release(&mut self, from: impl FnOnce(&mut Fault, &mut dyn FnMut(&Frame))) {
        let Some(mut fault) = self.fault.take() else { return };
        from(&mut fault, &mut |frame| {
            let Some((side, port)) = frame.star else { return };
            let segs = [frame.segment()];
            // SAFETY: volatile, so that it is copied now: the frame is gone before the batch is flushed.
            let payload = unsafe { Payload::new(&segs) };
            let way = Way { side, to: &frame.to, port };
            self.push(way, [&frame.header, &[]], payload, true, frame.corrupt);
        });
        self.fault = Some(fault);
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

/// Packets that have the same leave in order, and are segments of one send; those of other lanes and peers in
/// between do not end it.
fn block(head: &[u8], to: &Av, port: u16) -> u32 {
    let Gid([.., last]) = to.dgid;
    u32::from(lane(head)) | (u32::from(last) ^ u32::from(port)) << LANE_BITS
}

impl<C: Deref<Target = Counters>> Drop for StarTx<C> {
    /// What is on a wire arrives, though its sender is gone.
    fn drop(&mut self) {
        if self.fault.is_some() && self.process == std::process::id() {
            self.release(|fault, send| fault.release_all(send));
            self.send_all();
        }
    }
}

impl<C: Deref<Target = Counters>> std::fmt::Debug for StarTx<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StarTx").field("sockets", &self.sockets).finish_non_exhaustive()
    }
}
