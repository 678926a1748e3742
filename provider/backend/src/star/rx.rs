//! Datagrams in, checked packets out.

use std::ops::{Deref, Range};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use starverbs_core::wire::icrc::IcrcHeader;
use starverbs_core::{Counters, FrameMeta, Qpn};
use starverbs_star::wire::{
    CRC_LEN, CardHalf, StarPacket, Ways, checked, next_of_several, open_several, qpn_in, several_in,
};

use super::Half;
use crate::descriptor::Socket;
use crate::inbox::{Inbox, Outer};
use crate::pcap::Capture;
use crate::{BackendError, Woken};

/// Datagrams taken at once.
const SLOTS: usize = 16;
/// Empty looks after which a socket is looked at less often,
const QUIET: u32 = 64;
/// namely once in so many rounds.
const QUIET_EVERY: u32 = 32;
/// Rounds in a row in which one socket has something, before the others are looked at.
const IN_A_ROW: u32 = 8;

/// A packet, and where it came from.
#[derive(Debug)]
pub struct ReceivedPacket<'a> {
    /// The half that it is for
    pub side: CardHalf,
    /// Addresses, traffic class and hop limit of its datagram
    pub meta: &'a FrameMeta,
    /// UDP port that it came from
    pub port: u16,
    /// The packet
    pub packet: &'a StarPacket<'a>,
}

/// Packets behind one in its frame, as long as they are for the same QPN, and none of control.
#[derive(Debug)]
pub struct FollowingPackets<'a> {
    side: CardHalf,
    qpn: Option<Qpn>,
    rest: &'a [u8],
    taken: usize,
}

impl<'a> Iterator for FollowingPackets<'a> {
    type Item = StarPacket<'a>;

    #[inline]
    fn next(&mut self) -> Option<StarPacket<'a>> {
        let (packet, behind) = next_of_several(self.rest)?;
        if qpn_in(self.side, packet) != self.qpn {
            return None;
        }
        /* one that is wrong is dropped when its turn comes */
        let packet = StarPacket::parse(self.side, packet).ok().filter(|packet| !packet.header.migrate)?;
        (self.rest, self.taken) = (behind, self.taken + 1);
        Some(packet)
    }
}

/// A datagram with the packets in it that are still to come.
#[derive(Clone, Copy)]
struct Cursor {
    slot: usize,
    at: usize,
    segment: usize,
    outer: Outer,
}

/// What a frame holds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Holds {
    /// One packet
    One,
    /// Several
    Several,
}

/// Between which ports a datagram came, to this one.
#[inline]
fn path_of(outer: &Outer, port: u16) -> IcrcHeader {
    let Outer { meta, sport, .. } = *outer;
    IcrcHeader { src: meta.src, dst: meta.dst, sport, dport: port, ip_id: 0 }
}

/// The packets of a frame of several.
#[inline]
fn packets_in(mut rest: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (packet, behind) = next_of_several(rest)?;
        rest = behind;
        Some(packet)
    })
}

/// A half's socket.
struct HalfSocket {
    side: CardHalf,
    port: u16,
    socket: Arc<Socket>,
    /// Empty looks since something came
    empty_looks: u32,
    /// It is looked at when its turn comes, however many there were
    due: bool,
}

/// The receiving half of both ports.
pub struct StarRx<C> {
    counters: C,
    capture: Option<Capture>,
    inbox: Inbox,
    sources: Vec<HalfSocket>,
    /// Which of them was read last, and in how many rounds in a row it had something
    turn: usize,
    in_a_row: u32,
    /// Times that somebody looked
    rounds: u32,
    left: Range<usize>,
    cursor: Option<Cursor>,
    /// Packets of the frame that was opened last: bytes of its datagram
    several: Range<usize>,
    ways: Ways,
}

impl<C: Deref<Target = Counters>> StarRx<C> {
    pub(super) fn new(
        halves: &[(CardHalf, Half)],
        counters: C,
        capture: Option<Capture>,
    ) -> Result<Self, BackendError> {
        let inbox = Inbox::new(SLOTS)?;
        let sources = halves.iter().flat_map(|(side, half)| {
            let (side, port) = (*side, half.port);
            let sockets = [Some(&half.v4), half.v6.as_ref()].into_iter().flatten();
            sockets.map(move |socket| {
                let socket = Arc::clone(socket);
                HalfSocket { side, port, socket, empty_looks: 0, due: true }
            })
        });
        let sources = sources.collect();
        Ok(StarRx {
            counters,
            capture,
            inbox,
            sources,
            turn: 0,
            in_a_row: 0,
            rounds: 0,
            left: 0..0,
            cursor: None,
            several: 0..0,
            ways: Ways::default(),
        })
    }

    /// What to `poll(2)` for POLLIN.
    pub fn fds(&self) -> impl Iterator<Item = RawFd> {
        self.sources.iter().map(|source| source.socket.as_raw_fd())
    }

    /// Takes datagrams from a socket that has some, without waiting; gives how many. It goes on with the one
    /// that had some before, for a while: each look at another one is a system call. A socket for which
    /// nothing comes is looked at now and then. Packets of the round before that were not taken with
    /// [`StarRx::next_packets`] stay, and nothing is received.
    pub fn recv(&mut self) -> usize {
        if self.cursor.is_some() || !self.left.is_empty() {
            return 1;
        }
        self.rounds = self.rounds.wrapping_add(1);
        if self.rounds.is_multiple_of(QUIET_EVERY) {
            self.sources.iter_mut().for_each(|source| source.due = true);
        }
        let stays = (1..IN_A_ROW).contains(&self.in_a_row);
        for n in 0..self.sources.len() {
            if n > 0 || !stays {
                (self.turn, self.in_a_row) = ((self.turn + 1) % self.sources.len(), 0);
            }
            let source = &mut self.sources[self.turn];
            if source.empty_looks >= QUIET && !source.due {
                continue;
            }
            source.due = false;
            self.counters.rx_syscalls.inc();
            let got = self.inbox.fill(source.socket.as_raw_fd());
            if got > 0 {
                source.empty_looks = 0;
                self.in_a_row += 1;
                self.left = 0..got;
                return got;
            }
            source.empty_looks = source.empty_looks.saturating_add(1);
        }
        0
    }

    /// Whether more than one packet may be left of the last [`StarRx::recv`].
    #[inline]
    pub fn has_several(&self) -> bool {
        let holds_several =
            |slot| self.inbox.outer(slot).segment != 0 || several_in(self.inbox.bytes(slot)).is_some();
        self.cursor.is_some() || self.left.len() > 1 || self.left.clone().any(holds_several)
    }

    /// Whether something came lately.
    pub fn is_busy(&self) -> bool {
        self.sources.iter().any(|source| source.empty_looks < QUIET)
    }

    /// [`StarRx::recv`] for who slept on [`StarRx::fds`]: looks at those that have woken it, or, if nothing
    /// has, at all.
    pub fn recv_woken(&mut self, woken: Woken<'_>) -> usize {
        let any = woken.any();
        for source in &mut self.sources {
            let quiet = any && !woken.has(source.socket.as_raw_fd());
            source.empty_looks = if quiet { QUIET } else { 0 };
        }
        self.recv()
    }

    /// Has `take` see the next packet, which was right, and those behind it of the same QPN, which it may
    /// take as well. What is not right is dropped and counted. Gives how many packets it has taken: 0, if
    /// there is none.
    pub fn next_packets(
        &mut self,
        take: impl FnOnce(ReceivedPacket<'_>, &mut FollowingPackets<'_>),
    ) -> usize {
        let HalfSocket { side, port, .. } = self.sources[self.turn];
        loop {
            let opened = if self.several.is_empty() { self.open_frame(port) } else { Some(Holds::Several) };
            let (Some(holds), Some(cursor)) = (opened, &self.cursor) else { return 0 };
            let bytes = self.inbox.bytes(cursor.slot).get(self.several.clone()).unwrap_or(&[]);
            let next = if holds == Holds::One { Some((bytes, &[][..])) } else { next_of_several(bytes) };
            let Some((packet, rest)) = next else {
                self.several = 0..0;
                continue;
            };
            let Ok(packet) = StarPacket::parse(side, packet) else {
                /* what is behind it in its frame is no better: nobody has this card look at much of that */
                self.several = 0..0;
                self.counters.star_bad.inc();
                continue;
            };
            if holds == Holds::One {
                self.counters.rx_packets.inc();
                self.counters.rx_bytes.add(packet.data.len() as u64);
            }
            let qpn = match side {
                CardHalf::Stateless => packet.prefix.map(|prefix| prefix.qpn),
                CardHalf::Stateful => Some(packet.header.qpn),
            };
            let mut behind = FollowingPackets { side, qpn, rest, taken: 1 };
            let Outer { meta, sport, .. } = &cursor.outer;
            take(ReceivedPacket { side, meta, port: *sport, packet: &packet }, &mut behind);
            self.several.start = self.several.end - behind.rest.len();
            return behind.taken;
        }
    }

    /// Opens the next frame whose checksums are right: what it holds comes next. `None`: there is none.
    fn open_frame(&mut self, port: u16) -> Option<Holds> {
        loop {
            if self.cursor.is_none() {
                self.cursor = self.next_datagram();
            }
            let cursor = self.cursor.as_mut()?;
            let bytes = self.inbox.bytes(cursor.slot);
            let at = cursor.at..(cursor.at + cursor.segment).min(bytes.len());
            let Some(frame) = bytes.get(at.clone()).filter(|frame| !frame.is_empty()) else {
                self.cursor = None;
                continue;
            };
            cursor.at = at.end;
            let path = path_of(&cursor.outer, port);
            let way = self.ways.get(&path);
            let (opened, holds) = match several_in(frame) {
                Some(_) => (open_several(way, frame), Holds::Several),
                None => (checked(way, frame), Holds::One),
            };
            let Ok(packets) = opened else {
                self.counters.star_bad.inc();
                continue;
            };
            if let Some(capture) = &self.capture {
                capture.frame(&path, &cursor.outer.meta, &[frame]);
            }
            if holds == Holds::Several {
                self.counters.rx_packets.inc();
                self.counters.rx_bytes.add(packets.len() as u64);
            }
            let end = at.end - CRC_LEN;
            self.several = end - packets.len()..end;
            return Some(holds);
        }
    }

    /// Whose the packets are that come next, as far as their first bytes tell: of `most` of them, each once
    /// in a row. Gives how many packets they are.
    #[inline]
    pub fn look_ahead(&self, most: usize, mut see: impl FnMut(CardHalf, Qpn)) -> usize {
        let side = self.sources[self.turn].side;
        let (mut packets, mut last) = (0, None);
        let mut note = |packet: &[u8]| {
            packets += 1;
            let qpn = qpn_in(side, packet);
            if let Some(of) = qpn.filter(|_| qpn != last) {
                see(side, of);
            }
            last = qpn;
            packets < most
        };
        let (bytes, rest) = match &self.cursor {
            Some(cursor) => {
                let bytes = self.inbox.bytes(cursor.slot);
                (bytes, bytes.get(cursor.at..).unwrap_or(&[]).chunks(cursor.segment))
            }
            None => (&[][..], [].chunks(1)),
        };
        let several = bytes.get(self.several.clone()).unwrap_or(&[]);
        if most == 0 || !packets_in(several).all(&mut note) {
            return packets;
        }
        let mut frames = rest.chain(self.left.clone().map(|slot| self.inbox.bytes(slot)));
        _ = frames.all(|frame| match several_in(frame) {
            Some(several) => packets_in(several).all(&mut note),
            None => note(frame),
        });
        packets
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
        f.debug_struct("StarRx").field("turn", &self.turn).finish_non_exhaustive()
    }
}
