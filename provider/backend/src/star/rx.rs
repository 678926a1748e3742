//! Datagrams in, checked packets out.

use std::ops::{Deref, Range};
use std::os::fd::RawFd;
use std::sync::Arc;

use starverbs_core::star::wire::{CRC_LEN, Packet, Side};
use starverbs_core::wire::icrc::IcrcHeader;
use starverbs_core::{Counters, FrameMeta};

use super::Sockets;
use crate::BackendError;
use crate::inbox::{Inbox, Outer};
use crate::pcap::Capture;

/// Datagrams taken at once.
const SLOTS: usize = 16;

/// A packet, and where it came from.
#[derive(Debug)]
pub struct Received<'a> {
    /// The half that it is for
    pub side: Side,
    /// Addresses
    pub meta: FrameMeta,
    /// UDP port that it came from
    pub port: u16,
    /// The packet
    pub packet: Packet<'a>,
}

/// A datagram with the packets in it that are still to come.
#[derive(Clone, Copy)]
struct Cursor {
    slot: usize,
    at: usize,
    segment: usize,
    outer: Outer,
}

/// The receiving half of both ports.
pub struct StarRx<C> {
    counters: C,
    capture: Option<Capture>,
    sockets: Arc<Sockets>,
    inbox: Inbox,
    fds: Vec<(Side, RawFd)>,
    /// Which of the sockets was read last
    turn: usize,
    left: Range<usize>,
    cursor: Option<Cursor>,
}

impl<C: Deref<Target = Counters>> StarRx<C> {
    pub(super) fn new(
        sockets: Arc<Sockets>,
        counters: C,
        capture: Option<Capture>,
    ) -> Result<Self, BackendError> {
        let (inbox, fds) = (Inbox::new(SLOTS)?, sockets.each().collect());
        Ok(StarRx { counters, capture, sockets, inbox, fds, turn: 0, left: 0..0, cursor: None })
    }

    /// What to `poll(2)` for POLLIN.
    pub fn fds(&self) -> impl Iterator<Item = RawFd> {
        self.fds.iter().map(|(_, fd)| *fd)
    }

    /// Takes datagrams from the next socket that has some, without waiting; gives how many. Packets of the round before that were not taken
    /// with [`StarRx::next_packet`] stay, and nothing is received.
    pub fn recv(&mut self) -> usize {
        if self.cursor.is_some() || !self.left.is_empty() {
            return 1;
        }
        for _ in 0..self.fds.len() {
            self.turn = (self.turn + 1) % self.fds.len();
            self.counters.rx_syscalls.inc();
            let got = self.inbox.fill(self.fds[self.turn].1);
            if got > 0 {
                self.left = 0..got;
                return got;
            }
        }
        0
    }

    /// The next packet, which was right. What is not is dropped and counted.
    pub fn next_packet(&mut self) -> Option<Received<'_>> {
        let side = self.fds[self.turn].0;
        let (cursor, to) = loop {
            let cursor = self.cursor.take().or_else(|| self.next_datagram())?;
            let bytes = self.inbox.bytes(cursor.slot);
            let to = (cursor.at + cursor.segment).min(bytes.len());
            if cursor.at >= to {
                continue;
            }
            self.cursor = Some(Cursor { at: to, ..cursor });
            if self.is_good(side, &cursor.outer, &bytes[cursor.at..to]) {
                break (cursor, to);
            }
            self.counters.star_bad.inc();
        };
        let body = &self.inbox.bytes(cursor.slot)[cursor.at..to - CRC_LEN];
        let packet = Packet::parse(side, body).ok()?;
        Some(Received { side, meta: cursor.outer.meta, port: cursor.outer.sport, packet })
    }

    fn is_good(&self, side: Side, outer: &Outer, frame: &[u8]) -> bool {
        let Outer { meta, sport, .. } = *outer;
        let path =
            IcrcHeader { src: meta.src, dst: meta.dst, sport, dport: self.sockets.half(side).port, ip_id: 0 };
        let good = Packet::open(side, &path, frame).is_ok();
        if good && let Some(capture) = &self.capture {
            capture.frame(&path, &meta, &[frame]);
        }
        good
    }

    fn next_datagram(&mut self) -> Option<Cursor> {
        let slot = self.left.next()?;
        let outer = self.inbox.outer(slot);
        let segment = if outer.segment == 0 { usize::MAX >> 1 } else { usize::from(outer.segment) };
        Some(Cursor { slot, at: 0, segment, outer })
    }
}

impl<C> std::fmt::Debug for StarRx<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StarRx").field("sockets", &self.sockets).finish_non_exhaustive()
    }
}
