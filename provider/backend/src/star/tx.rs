//! StaR's packets: a checksum in the header, a CRC behind all. Those of both halves leave from the port of
//! the stateful one, so that all of a turn leave in one call; small ones to one place in one frame
//! ([`OpenFrame`]).

use std::ops::Deref;
use std::sync::Arc;

use starverbs_core::wire::icrc::IcrcHeader;
use starverbs_core::{Av, Counters, Gid, Mtu, Nanos};
use starverbs_settings::{Settings, StarWire};
use starverbs_star::wire::{
    CRC_LEN, CardHalf, Crc, HEADER_LEN, LANE_BITS, LENGTH_LEN, OVERHEAD, StarHead, Ways, lane,
};

use super::frame::{OpenFrame, ROOM};
use super::{Half, WHAT};
use crate::descriptor::Socket;
use crate::error::os;
use crate::pcap::Capture;
use crate::program::Payload;
use crate::tx::{Datagram, Framing, Route, Sender, Tx};
use crate::{BackendError, HostAddr};

/// Places to which small packets are collected at the same time.
const PLACES: usize = 8;
/// Longest packet that is collected, bytes.
const SMALL: usize = 512;

/// The sending half of both ports.
pub struct StarTx<C: Deref<Target = Counters>> {
    pub(super) tx: Tx<StarFraming, C>,
    /// What is collected, by where it goes
    open: Vec<OpenFrame>,
    /// Which of them gives way to another place
    oldest: usize,
    /// Bytes of a frame with several packets at most, without its CRC; 0: each packet is one
    most: usize,
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
        let most = if settings.star_wire == StarWire::Packed { ROOM } else { 0 };
        Ok(StarTx { tx, open: (0..PLACES).map(|_| OpenFrame::new()).collect(), oldest: 0, most })
    }

    /// The UDP port of a half, for peers to know.
    pub fn port(&self, side: CardHalf) -> u16 {
        self.tx.framing.ports[side as usize]
    }

    /// A connection has this path MTU: no frame with several packets is longer than its longest packets.
    pub fn note_mtu(&mut self, mtu: Mtu) {
        self.most = self.most.min(mtu.bytes() as usize + OVERHEAD - CRC_LEN);
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
        for frame in &mut self.open {
            frame.close(&mut self.tx);
            frame.forget_lanes();
        }
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
            return self.tx.send_datagram(&packet);
        }
        let (size, lane) = (bytes.len() + data.len() + payload.len(), 1 << lane(bytes));
        /* two fit at least */
        let half = (self.most.saturating_sub(HEADER_LEN) / 2).saturating_sub(LENGTH_LEN);
        let small = size <= SMALL.min(half) && !head.is_control();
        let at = self.frame_to(to, port);
        let StarTx { tx, open, most, .. } = self;
        let Some(frame) = open.get_mut(at) else { return tx.send_datagram(&packet) };
        if frame.is_overtaken_by(lane, small) {
            /* packets of a lane stay in order */
            frame.close(tx);
            frame.forget_lanes();
            tx.framing.generation = tx.framing.generation.wrapping_add(1);
        }
        if small {
            frame.add(&packet, lane, *most, tx);
        } else {
            frame.pass(lane);
            tx.send_datagram(&packet);
        }
    }

    /// The frame in which packets to this place are collected.
    #[inline]
    fn frame_to(&mut self, to: &Av, port: u16) -> usize {
        let found = self.open.iter().position(|frame| frame.goes_to(to, port));
        found.unwrap_or_else(|| self.give_way(to, port))
    }

    /// Another place's frame leaves, and this place has its room.
    fn give_way(&mut self, to: &Av, port: u16) -> usize {
        self.oldest = (self.oldest + 1) % PLACES;
        if let Some(frame) = self.open.get_mut(self.oldest) {
            frame.close(&mut self.tx);
            frame.begin(to, port);
            self.tx.framing.generation = self.tx.framing.generation.wrapping_add(1);
        }
        self.oldest
    }
}

impl<C: Deref<Target = Counters>> Drop for StarTx<C> {
    /// As that of [`Tx`]: what was sent leaves.
    fn drop(&mut self) {
        self.open.iter_mut().for_each(|frame| frame.close(&mut self.tx));
    }
}
