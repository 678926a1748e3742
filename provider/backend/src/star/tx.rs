//! StaR's packets: a checksum in the header, a CRC behind all. Those of both halves leave from the port of
//! the stateful one, so that all of a turn leave in one call; small ones to one place in one frame
//! ([`OpenFrame`]).

use std::ops::Deref;
use std::sync::Arc;

use starverbs_core::wire::icrc::IcrcHeader;
use starverbs_core::{Av, Counters, Gid, Mtu, Nanos};
use starverbs_settings::{Settings, StarWire};
use starverbs_star::wire::{
    ANSWERS, BEHIND_ANSWERS, CRC_LEN, CardHalf, Crc, HEADER_LEN, LANE_BITS, LENGTH_LEN, OVERHEAD,
    SEVERAL_ROOM, StarHead, Ways, lane,
};

use super::frame::OpenFrame;
use super::{Half, WHAT};
use crate::descriptor::Socket;
use crate::error::os;
use crate::pcap::Capture;
use crate::program::Payload;
use crate::tx::{Datagram, Framing, Route, Sender, Tx};
use crate::{BackendError, HostAddr};

/// Places to which small packets are collected at the same time.
const PLACES: usize = 16;
/// Longest packet that is collected, bytes, however long a frame is.
const SMALL: usize = 512;

/// The sending half of both ports.
pub struct StarTx<C: Deref<Target = Counters>> {
    pub(super) tx: Tx<StarFraming, C>,
    /// What is collected, by where it goes
    open: Vec<OpenFrame>,
    /// Which of them gives way to another place
    oldest: usize,
    /// Packets that were collected
    collected: u32,
    /// Which of the places may hold answers or completions: bits
    holding: u16,
    /// The place of the packet before
    last: usize,
    /// Bytes of a frame with several packets at most, without its CRC; 0: each packet is one
    most: usize,
    /// Longest packet that is collected, bytes: two fit at least
    small: usize,
}

/// Longest packet that is collected in frames of `most` bytes.
fn small_in(most: usize) -> usize {
    SMALL.min((most.saturating_sub(HEADER_LEN) / 2).saturating_sub(LENGTH_LEN))
}

/// The framing of StaR.
#[derive(Debug)]
pub struct StarFraming {
    ways: Ways,
    /// Of the stateless half, and of the stateful
    ports: [u16; 2],
    /// What leaves in one of these does not join a send of the one before
    generation: u8,
}

impl StarFraming {
    /// What is sent from now on joins no send that was begun before.
    fn begin_anew(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }
}

impl Framing for StarFraming {
    const COVERS_IP_ID: bool = false;
    const ANYWHERE: bool = true;

    /// Packets of other lanes and peers in between do not end a send.
    #[inline]
    fn route(&self, datagram: &Datagram<'_>, _: usize, _: &[HostAddr]) -> Option<Route> {
        let Datagram { to, port, head, .. } = *datagram;
        let Gid([.., last]) = to.dgid;
        let block = u32::from(lane(head)) | (u32::from(last) ^ u32::from(port)) << LANE_BITS;
        let block = block | u32::from(self.generation) << (u32::BITS - u8::BITS);
        Some(Route { socket: u8::from(to.dgid.ipv4().is_some()), block })
    }

    /// All that the host has are open from the beginning.
    #[cold]
    fn open(&self, _: &HostAddr) -> Result<Sender, BackendError> {
        Err(os(WHAT))
    }

    /* always: the CRC comes back in registers */
    #[inline(always)]
    fn begin(&mut self, path: &IcrcHeader, _: usize, first: &mut [u8]) -> Crc {
        self.ways.get(path).fill_checksum(first);
        let mut crc = Crc::new();
        crc.update(first);
        crc
    }
}

impl<C: Deref<Target = Counters>> StarTx<C> {
    pub(super) fn open(
        settings: &Settings,
        addrs: &[HostAddr],
        [stateless, stateful]: [&Half; 2],
        counters: C,
        capture: Option<Capture>,
    ) -> Result<Self, BackendError> {
        let sender =
            |fd: &Arc<Socket>| Sender { fd: Arc::clone(fd), sport: stateful.port, gso: settings.gso };
        let senders = vec![stateful.v6.as_ref().map(sender), Some(sender(&stateful.v4))];
        let ports = [stateless.port, stateful.port];
        let framing = StarFraming { ways: Ways::default(), ports, generation: 0 };
        let tx = Tx::new(settings, addrs, framing, senders, counters, capture)?;
        let most = if settings.star_wire == StarWire::Packed { SEVERAL_ROOM } else { 0 };
        let open = (0..PLACES).map(|_| OpenFrame::new()).collect();
        Ok(StarTx { tx, open, oldest: 0, collected: 0, holding: 0, last: 0, most, small: small_in(most) })
    }

    /// The UDP port of a half, for peers to know.
    pub fn port(&self, side: CardHalf) -> u16 {
        self.tx.framing.ports[side as usize]
    }

    /// A connection has this path MTU: no frame with several packets is longer than its longest packets.
    pub fn note_mtu(&mut self, mtu: Mtu) {
        self.most = self.most.min(mtu.bytes() as usize + OVERHEAD - CRC_LEN);
        self.small = small_in(self.most);
    }

    /// Whether a packet of any size may be added before the next [`flush`](StarTx::flush).
    #[inline]
    pub fn can_send(&self) -> bool {
        self.tx.can_send()
    }

    /// When [`flush`](StarTx::flush) has to be called although nothing new is sent.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.tx.next_deadline()
    }

    /// Sends what was added. What the kernel refuses is lost and counted.
    #[inline]
    pub fn flush(&mut self, now: Nanos) {
        self.close_all(|_| true);
        self.open.iter_mut().for_each(OpenFrame::forget_lanes);
        self.holding = 0;
        self.tx.flush(now);
    }

    /// Adds a packet to UDP port `port` of `to`; see [`starverbs_star::env::StarEnv::send_star`]. One
    /// that cannot go (too long, address foreign) is counted in `tx_errors` and lost.
    #[inline]
    pub fn send(
        &mut self,
        to: &Av,
        port: u16,
        head: &StarHead,
        data: &[u8],
        payload: Payload<'_>,
        volatile: bool,
    ) {
        let bytes = head.bytes();
        let packet = Datagram { to, port, head: bytes, data, payload, pad: 0, volatile };
        if self.most == 0 {
            return self.send_alone(&packet);
        }
        let (size, lane) = (bytes.len() + data.len() + payload.len(), 1 << lane(bytes));
        let small = size <= self.small && !head.is_control();
        let at = self.frame_to(to, port);
        let others = if small { self.holding & !(1 << at) } else { self.holding };
        if lane & BEHIND_ANSWERS != 0 && others != 0 {
            self.let_answers_leave(others, to, port);
        }
        if small {
            self.collected = self.collected.wrapping_add(1);
            self.holding |= u16::from(lane & ANSWERS != 0) << at;
        }
        let StarTx { tx, open, most, collected, .. } = self;
        if let Some(frame) = open.get_mut(at) {
            if frame.is_overtaken_by(lane, small) {
                /* packets of a lane stay in order */
                frame.close(tx);
                frame.forget_lanes();
                tx.framing.begin_anew();
            }
            if small {
                return frame.add(&packet, size, lane, (*most, *collected), tx);
            }
            frame.pass(lane);
        }
        self.send_alone(&packet);
    }

    /// Out of line, as [`send`](StarTx::send) is short without it.
    #[inline(never)]
    fn send_alone(&mut self, packet: &Datagram<'_>) {
        self.tx.send_datagram(packet);
    }

    /// If any of `places` has answers or completions to this card, what was collected for it leaves before
    /// what is sent now.
    #[inline(never)]
    fn let_answers_leave(&mut self, places: u16, to: &Av, port: u16) {
        let reaches = |frame: &OpenFrame| frame.reaches(to, port);
        let holds = |(at, frame): (usize, &OpenFrame)| {
            places >> at & 1 != 0 && frame.begun().is_some() && frame.has_any_of(ANSWERS) && reaches(frame)
        };
        if self.open.iter().enumerate().any(holds) {
            self.close_all(reaches);
            self.open.iter_mut().filter(|frame| reaches(frame)).for_each(OpenFrame::forget_lanes);
            /* nor does it join a send that was begun before them */
            self.tx.framing.begin_anew();
        }
    }

    /// These frames leave, as they were begun.
    pub(super) fn close_all(&mut self, these: impl Fn(&OpenFrame) -> bool) {
        let StarTx { tx, open, collected, .. } = self;
        loop {
            let begun = open.iter_mut().filter_map(|frame| Some((frame.begun()?, frame)));
            let begun = begun.filter(|(_, frame)| these(frame));
            let first = begun.min_by_key(|(begun, _)| begun.wrapping_sub(*collected).wrapping_sub(1));
            let Some((_, frame)) = first else { return };
            frame.close(tx);
        }
    }

    /// The frame in which packets to this place are collected.
    #[inline]
    fn frame_to(&mut self, to: &Av, port: u16) -> usize {
        if self.open.get(self.last).is_none_or(|frame| !frame.goes_to(to, port)) {
            self.look_for(to, port);
        }
        self.last
    }

    /// Its frame is not that of the packet before.
    #[inline(never)]
    fn look_for(&mut self, to: &Av, port: u16) {
        let found = self.open.iter().position(|frame| frame.goes_to(to, port));
        self.last = found.unwrap_or_else(|| self.give_way(to, port));
    }

    /// Another place's frame leaves, and this place has its room.
    fn give_way(&mut self, to: &Av, port: u16) -> usize {
        self.oldest = (self.oldest + 1) % PLACES;
        if let Some(frame) = self.open.get_mut(self.oldest) {
            frame.close(&mut self.tx);
            if !frame.is_unused() {
                self.tx.framing.begin_anew();
            }
            frame.begin(to, port);
        }
        self.oldest
    }
}
