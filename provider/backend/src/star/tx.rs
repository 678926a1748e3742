//! StaR's packets: a checksum in the header, a CRC behind all, from the ports of both halves.

use std::ops::Deref;
use std::sync::Arc;

use starverbs_core::wire::icrc::IcrcHeader;
use starverbs_core::{Av, Counters, Gid};
use starverbs_settings::Settings;
use starverbs_star::wire::{CardHalf, Crc, HEADER_LEN, LANE_BITS, StarHead, Ways, lane};

use super::{Half, WHAT};
use crate::error::os;
use crate::pcap::Capture;
use crate::program::Payload;
use crate::tx::{Datagram, Framing, Route, Sender, Tx};
use crate::{BackendError, HostAddr};

/// The sending half of both ports.
pub type StarTx<C> = Tx<StarFraming, C>;

/// The framing of StaR.
#[derive(Debug, Default)]
pub struct StarFraming(Ways);

impl Framing for StarFraming {
    const COVERS_IP_ID: bool = false;
    const ANYWHERE: bool = true;

    /// Packets of other lanes and peers in between do not end a send.
    #[inline]
    fn route(&self, datagram: &Datagram<'_>, _: usize, _: &[HostAddr]) -> Option<Route> {
        let Datagram { to, port, head, .. } = *datagram;
        let Gid([.., last]) = to.dgid;
        let block = u32::from(lane(head)) | (u32::from(last) ^ u32::from(port)) << LANE_BITS;
        Some(Route { socket: socket(leaves_from(head), to.dgid.ipv4().is_some()), block })
    }

    /// All that the host has are open from the beginning.
    #[cold]
    fn open(&self, _: &HostAddr) -> Result<Sender, BackendError> {
        Err(os(WHAT))
    }

    /* always: the CRC comes back in registers */
    #[inline(always)]
    fn begin(&mut self, path: &IcrcHeader, _: usize, first: &mut [u8]) -> Crc {
        self.0.get(path).fill_checksum(first);
        let mut crc = Crc::new();
        crc.update(first);
        crc
    }
}

impl<C: Deref<Target = Counters>> StarTx<C> {
    pub(super) fn open(
        settings: &Settings,
        addrs: &[HostAddr],
        halves: &[(CardHalf, Half)],
        counters: C,
        capture: Option<Capture>,
    ) -> Result<Self, BackendError> {
        let mut senders = [const { None }; 4];
        for (side, half) in halves {
            for (v4, fd) in [(true, Some(&half.v4)), (false, half.v6.as_ref())] {
                senders[usize::from(socket(*side, v4))] =
                    fd.map(|fd| Sender { fd: Arc::clone(fd), sport: half.port, gso: settings.gso });
            }
        }
        Tx::new(settings, addrs, StarFraming::default(), senders.into(), counters, capture)
    }

    /// The UDP port of a half, for peers to know.
    pub fn port(&self, side: CardHalf) -> u16 {
        let sender = &self.senders[usize::from(socket(side, true))];
        sender.as_ref().map_or(0, |sender| sender.sport)
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

/// Index of the socket that packets leave from.
#[inline]
fn socket(side: CardHalf, v4: bool) -> u8 {
    u8::from(side == CardHalf::Stateful) << 1 | u8::from(v4)
}

/// Which half's port a packet leaves from: its answer comes back there. What SL's card sends has no prefix.
#[inline]
fn leaves_from(head: &[u8]) -> CardHalf {
    if head.len() > HEADER_LEN { CardHalf::Stateful } else { CardHalf::Stateless }
}
