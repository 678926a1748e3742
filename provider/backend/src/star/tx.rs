//! StaR's packets: a checksum in the header, a CRC behind all. Those of both halves leave from the port of
//! the stateful one, so that all of a turn leave in one call.

use std::ops::Deref;
use std::sync::Arc;

use starverbs_core::wire::icrc::IcrcHeader;
use starverbs_core::{Av, Counters, Gid};
use starverbs_settings::Settings;
use starverbs_star::wire::{CardHalf, Crc, LANE_BITS, StarHead, Ways, lane};

use super::{Half, WHAT};
use crate::descriptor::Socket;
use crate::error::os;
use crate::pcap::Capture;
use crate::program::Payload;
use crate::tx::{Datagram, Framing, Route, Sender, Tx};
use crate::{BackendError, HostAddr};

/// The sending half of both ports.
pub type StarTx<C> = Tx<StarFraming, C>;

/// The framing of StaR.
#[derive(Debug)]
pub struct StarFraming {
    ways: Ways,
    /// Of the stateless half, and of the stateful
    ports: [u16; 2],
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
        let framing = StarFraming { ways: Ways::default(), ports: [stateless.port, stateful.port] };
        Tx::new(settings, addrs, framing, senders, counters, capture)
    }

    /// The UDP port of a half, for peers to know.
    pub fn port(&self, side: CardHalf) -> u16 {
        self.framing.ports[side as usize]
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
        let head = head.bytes();
        self.send_datagram(&Datagram { to, port, head, data, payload, pad: 0, volatile });
    }
}
