//! Packets on the wire: how long they are, and what memory of a card's host they have to do with.

use starverbs_core::wire::{Packet as RocePacket, PacketKind};
use starverbs_core::{Av, FrameMeta, Gid, Qpn};
use starverbs_star::message::CQE_LEN;
use starverbs_star::wire::{CRC_LEN, CardHalf, Opt, Ptype, StarPacket};

use crate::rnic::card::CardId;
use crate::star::StarFrame;

/// Bytes of a RoCEv2 packet that the parameter `net.header_bytes` counts: BTH and ICRC. The rest is
/// Ethernet's, IP's and UDP's, which StaR's packets have, too.
const BTH_AND_ICRC: usize = 16;

/// What a card sends.
pub(super) enum CardFrame {
    /// StaR's, on a port of its own
    Star(StarFrame),
    /// RoCEv2, without ICRC
    Roce(FrameMeta, Vec<u8>),
}

/// A packet under way.
pub(super) struct Flight {
    pub(super) from: CardId,
    pub(super) to: CardId,
    pub(super) frame: CardFrame,
}

/// Memory that a packet has to do with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum MemoryAccess {
    None,
    Read(u32),
    Write(u32),
}

/// An event for the library: a word.
const EVENT: u32 = 8;

impl CardFrame {
    pub(super) fn roce(to: &Av, bytes: Vec<u8>) -> CardFrame {
        let Av { sgid, dgid, traffic_class, hop_limit, .. } = *to;
        CardFrame::Roce(FrameMeta { src: sgid, dst: dgid, traffic_class, hop_limit }, bytes)
    }

    /// Where it goes.
    pub(super) fn to(&self) -> Gid {
        match self {
            CardFrame::Star(frame) => frame.path.dst,
            CardFrame::Roce(meta, _) => meta.dst,
        }
    }

    /// Bytes on the wire beside those that the parameter `net.header_bytes` counts.
    pub(super) fn beside_header(&self) -> u32 {
        let bytes = match self {
            CardFrame::Star(frame) => frame.bytes.len().saturating_sub(BTH_AND_ICRC),
            CardFrame::Roce(_, bytes) => (bytes.len() + CRC_LEN).saturating_sub(BTH_AND_ICRC),
        };
        bytes as u32
    }

    fn star(&self) -> Option<StarPacket<'_>> {
        let CardFrame::Star(StarFrame { path, bytes }) = self else { return None };
        let stateless = path.dport == CardHalf::Stateless.default_port();
        let side = if stateless { CardHalf::Stateless } else { CardHalf::Stateful };
        let body = bytes.get(..bytes.len().checked_sub(CRC_LEN)?)?;
        StarPacket::parse(side, body).ok()
    }

    fn is_for_stateless(&self) -> bool {
        matches!(self, CardFrame::Star(frame) if frame.path.dport == CardHalf::Stateless.default_port())
    }

    /// The QPN of the receiver that it names.
    pub(super) fn qpn(&self) -> Option<Qpn> {
        match self {
            CardFrame::Star(_) => self.star().map(|packet| packet.header.qpn),
            CardFrame::Roce(_, bytes) => RocePacket::parse(bytes).ok().map(|packet| packet.bth().dest_qpn()),
        }
    }

    /// Whether it is one for the stateless side that the security check lets through.
    pub(super) fn is_guiding(&self) -> bool {
        self.is_for_stateless()
    }

    /// What its sender must have done before it leaves.
    pub(super) fn waits_for(&self) -> MemoryAccess {
        let Some(packet) = self.star() else { return self.roce_reads() };
        let len = u32::from(packet.header.len);
        match packet.header.ptype {
            _ if packet.header.migrate => MemoryAccess::None,
            /* the WQE, or the data, is in its host's memory */
            Ptype::Wqep | Ptype::Wqeps | Ptype::Rd | Ptype::Rdc | Ptype::Rdcs | Ptype::Gda => {
                MemoryAccess::Read(len)
            }
            Ptype::Rda => MemoryAccess::Write(len),
            /* it has written for longer than this takes */
            Ptype::Rdas => MemoryAccess::None,
            /* the answer to a CQEP, when the CQE is in memory; SF's answer to a WQEP waits for nothing */
            Ptype::Ea if !self.is_for_stateless() => MemoryAccess::Write(CQE_LEN as u32),
            Ptype::Ea | Ptype::Gd | Ptype::Cqep => MemoryAccess::None,
        }
    }

    /// Whether it takes a RECV of its receiver's host, which the card reads first.
    pub(super) fn uses_receive(&self) -> bool {
        match self {
            CardFrame::Roce(_, bytes) => {
                RocePacket::parse(bytes).is_ok_and(|packet| packet.op().kind == PacketKind::Send)
            }
            CardFrame::Star(_) => self
                .star()
                .is_some_and(|packet| packet.header.ptype == Ptype::Gda && packet.header.opt == Opt::Send),
        }
    }

    fn roce_reads(&self) -> MemoryAccess {
        let CardFrame::Roce(_, bytes) = self else { return MemoryAccess::None };
        match RocePacket::parse(bytes) {
            Ok(packet) if !packet.payload().is_empty() => MemoryAccess::Read(packet.payload().len() as u32),
            _ => MemoryAccess::None,
        }
    }

    /// What it brings that goes to its receiver's memory with no answer of its own.
    pub(super) fn brings(&self) -> MemoryAccess {
        if let CardFrame::Roce(_, bytes) = self {
            let packet = RocePacket::parse(bytes).ok();
            let data = packet.filter(|packet| packet.op().kind != PacketKind::Ack);
            return data
                .map_or(MemoryAccess::None, |packet| MemoryAccess::Write(packet.payload().len() as u32));
        }
        match self.star().map(|packet| (packet.header.ptype, packet.header.len)) {
            Some((Ptype::Gda, len)) => MemoryAccess::Write(len.into()),
            Some((Ptype::Ea, _)) if self.is_for_stateless() => MemoryAccess::Write(EVENT),
            _ => MemoryAccess::None,
        }
    }
}
