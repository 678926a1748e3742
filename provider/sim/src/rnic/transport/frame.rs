//! Packets on the wire: how long they are, and what memory of a card's host they have to do with.

use starverbs_core::wire::{Packet as RocePacket, PacketKind};
use starverbs_core::{Av, FrameMeta, Gid, Qpn};
use starverbs_star::bundle::Bundled;
use starverbs_star::carried::CARRIED_LEN;
use starverbs_star::message::Body;
use starverbs_star::packed::{Records, recv_len};
use starverbs_star::wire::{
    CRC_LEN, CardHalf, HEADER_LEN, LENGTH_LEN, OVERHEAD, Opt, Ptype, SEVERAL_ROOM, StarPacket,
};

use super::setup::MTU;
use crate::rnic::card::CardId;
use crate::star::StarFrame;

/// Bytes of a RoCEv2 packet that the parameter `net.header_bytes` counts: BTH and ICRC. The rest is
/// Ethernet's, IP's and UDP's, which StaR's packets have, too.
const BTH_AND_ICRC: usize = 16;
/// An event for the library: a word.
const EVENT: u32 = 8;
/// Longer packets leave in a frame of their own (docs/star.md, "Headers and ports").
const SMALL: usize = 512;
/// Bytes of a frame that packets share, at most, without its CRC: as the longest packet of the path MTU, and
/// no more than StaR allows.
const SHARED: usize = {
    let longest = MTU.bytes() as usize + OVERHEAD - CRC_LEN;
    if longest < SEVERAL_ROOM { longest } else { SEVERAL_ROOM }
};

/// What a card sends.
pub(super) enum CardPacket {
    /// StaR's, on a port of its own, without sums
    Star(StarFrame),
    /// RoCEv2, without ICRC
    Roce(FrameMeta, Vec<u8>),
}

/// Transfers between a card and its host's memory: bytes of each.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) enum Transfers {
    #[default]
    None,
    One([u32; 1]),
    Several(Vec<u32>),
}

impl Transfers {
    fn one(bytes: u32) -> Transfers {
        Transfers::One([bytes])
    }

    fn several(all: impl Iterator<Item = u32>) -> Transfers {
        Transfers::Several(all.collect())
    }

    pub(super) fn all(&self) -> &[u32] {
        match self {
            Transfers::None => &[],
            Transfers::One(one) => one,
            Transfers::Several(all) => all,
        }
    }
}

/// What a packet has to do with memory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct MemoryAccess {
    /// What its sender reads before it leaves
    pub(super) reads: Transfers,
    /// What it reads then, as that says where it is
    pub(super) gathers: Transfers,
    /// It says that what its sender was brought is in memory, and leaves when it is
    pub(super) follows_writes: bool,
    /// RECVs of its receiver's host that it takes, which the card reads first
    pub(super) receives: usize,
    /// What its receiver writes
    pub(super) writes: Transfers,
}

/// A packet, and what the units have to know of it.
pub(super) struct CardFrame {
    pub(super) packet: CardPacket,
    /// The QPN of the receiver that it names
    pub(super) qpn: Option<Qpn>,
    pub(super) memory: MemoryAccess,
}

/// A frame under way: a packet, and those that share it.
pub(super) struct Flight {
    pub(super) from: CardId,
    pub(super) to: CardId,
    pub(super) frame: CardFrame,
    pub(super) more: Vec<CardFrame>,
}

impl Flight {
    /// Its packets.
    pub(super) fn frames(&self) -> impl Iterator<Item = &CardFrame> {
        std::iter::once(&self.frame).chain(&self.more)
    }

    /// How many they are.
    pub(super) fn packets(&self) -> u64 {
        1 + self.more.len() as u64
    }

    /// Bytes on the wire beside those that the parameter `net.header_bytes` counts.
    pub(super) fn beside_header(&self) -> u32 {
        let bytes = match &self.frame.packet {
            CardPacket::Roce(_, bytes) => bytes.len() + CRC_LEN,
            CardPacket::Star(frame) if self.more.is_empty() => frame.bytes.len(),
            CardPacket::Star(_) => {
                HEADER_LEN + self.frames().map(CardFrame::shared_len).sum::<usize>() + CRC_LEN
            }
        };
        bytes.saturating_sub(BTH_AND_ICRC) as u32
    }
}

impl CardFrame {
    pub(super) fn roce(to: &Av, bytes: Vec<u8>) -> CardFrame {
        let Av { sgid, dgid, traffic_class, hop_limit, .. } = *to;
        let packet = RocePacket::parse(&bytes).ok();
        let qpn = packet.as_ref().map(|packet| packet.bth().dest_qpn());
        let memory = packet.map_or(MemoryAccess::default(), |packet| roce_memory(&packet));
        let meta = FrameMeta { src: sgid, dst: dgid, traffic_class, hop_limit };
        CardFrame { packet: CardPacket::Roce(meta, bytes), qpn, memory }
    }

    pub(super) fn star(frame: StarFrame) -> CardFrame {
        let side = side_of(&frame);
        let body = frame.bytes.get(..frame.bytes.len().saturating_sub(CRC_LEN)).unwrap_or_default();
        let packet = StarPacket::parse(side, body).ok();
        let qpn = packet.as_ref().map(|packet| packet.header.qpn);
        let memory = packet.map_or(MemoryAccess::default(), |packet| star_memory(side, &packet));
        CardFrame { packet: CardPacket::Star(frame), qpn, memory }
    }

    /// Where it goes.
    pub(super) fn to(&self) -> Gid {
        match &self.packet {
            CardPacket::Star(frame) => frame.path.dst,
            CardPacket::Roce(meta, _) => meta.dst,
        }
    }

    /// Whether it is one for the stateless side that the security check lets through.
    pub(super) fn is_guiding(&self) -> bool {
        matches!(&self.packet, CardPacket::Star(frame) if side_of(frame) == CardHalf::Stateless)
    }

    /// Bytes of it in a frame that it shares with others.
    pub(super) fn shared_len(&self) -> usize {
        match &self.packet {
            CardPacket::Star(frame) => LENGTH_LEN + frame.bytes.len() - CRC_LEN,
            CardPacket::Roce(_, bytes) => bytes.len(),
        }
    }

    /// The UDP port that it goes to, if it may share a frame with others.
    pub(super) fn may_share(&self) -> Option<u16> {
        match &self.packet {
            CardPacket::Star(StarFrame { path, bytes }) if bytes.len() - CRC_LEN <= SMALL => Some(path.dport),
            _ => None,
        }
    }
}

fn side_of(frame: &StarFrame) -> CardHalf {
    let stateless = frame.path.dport == CardHalf::Stateless.default_port();
    if stateless { CardHalf::Stateless } else { CardHalf::Stateful }
}

fn roce_memory(packet: &RocePacket<'_>) -> MemoryAccess {
    let (len, kind) = (packet.payload().len() as u32, packet.op().kind);
    MemoryAccess {
        reads: if len > 0 { Transfers::one(len) } else { Transfers::None },
        gathers: Transfers::None,
        follows_writes: false,
        receives: usize::from(kind == PacketKind::Send),
        writes: if kind == PacketKind::Ack { Transfers::None } else { Transfers::one(len) },
    }
}

/// `side`: whose packet it is.
fn star_memory(side: CardHalf, packet: &StarPacket<'_>) -> MemoryAccess {
    let (header, none) = (&packet.header, MemoryAccess::default());
    let len = u32::from(header.len);
    let (reads, writes) = (Transfers::one, Transfers::one);
    match header.ptype {
        _ if header.migrate => none,
        /* the WQE is in its host's memory */
        Ptype::Wqep => MemoryAccess { reads: reads(len), ..none },
        Ptype::Wqeps => wqes_memory(packet.data),
        /* the data is there, and the answer says that it is here */
        Ptype::Rd => MemoryAccess { reads: reads(len), writes: writes(len), ..none },
        Ptype::Rdc => MemoryAccess { reads: reads(without_completion(len)), writes: writes(len), ..none },
        Ptype::Rdcs => {
            let lens = || Bundled::new(header, packet.data).flatten().map(|(one, _)| u32::from(one.len));
            let reads = Transfers::several(lens().map(without_completion));
            MemoryAccess { reads, writes: Transfers::several(lens()), ..none }
        }
        Ptype::Rda | Ptype::Rdas => MemoryAccess { follows_writes: true, ..none },
        Ptype::Gd => none,
        Ptype::Gda | Ptype::Ed => {
            let receives = usize::from(header.opt == Opt::Send);
            MemoryAccess { reads: reads(len), receives, writes: writes(len), ..none }
        }
        Ptype::Cqep => MemoryAccess { writes: writes(len), ..none },
        /* that a WQE is stored, which waits for nothing; that a CQE is in memory */
        Ptype::Ea if side == CardHalf::Stateless => MemoryAccess { writes: writes(EVENT), ..none },
        Ptype::Ea => MemoryAccess { follows_writes: true, ..none },
    }
}

/// Of an RDC's data: its completion is in no memory of its sender's.
fn without_completion(len: u32) -> u32 {
    len.saturating_sub(CARRIED_LEN as u32)
}

/// WQEs of each queue are read together, and then each message that goes with one: it takes a RECV of the
/// receiver's.
fn wqes_memory(records: &[u8]) -> MemoryAccess {
    let (mut recvs, mut carried) = (0, Vec::new());
    for record in Records::new(records).flatten() {
        match record.wqe.body {
            Body::Inline(bytes) => carried.push(bytes.len() as u32),
            Body::Sges(_) if record.wqe.recv => recvs += recv_len(record.wqe.wqe.num_sge.into()) as u32,
            Body::Sges(_) => {}
        }
    }
    let sends = (records.len() as u32).saturating_sub(recvs + carried.iter().sum::<u32>());
    MemoryAccess {
        reads: Transfers::several([recvs, sends].into_iter().filter(|bytes| *bytes > 0)),
        gathers: Transfers::several(carried.iter().copied()),
        follows_writes: false,
        receives: carried.len(),
        writes: Transfers::Several(carried),
    }
}

/// What a card sends in one turn: packets to one half of one card share a frame, as far as it has room.
/// `card_of`: where a packet goes.
pub(super) fn share(
    from: CardId,
    frames: impl Iterator<Item = CardFrame>,
    card_of: impl Fn(&CardFrame) -> Option<CardId>,
) -> Vec<Flight> {
    let mut flights: Vec<Flight> = Vec::new();
    /* where packets go, the last flight there, and its bytes */
    let mut open: Vec<(CardId, u16, usize, usize)> = Vec::new();
    for frame in frames {
        let Some(to) = card_of(&frame) else { continue };
        let (port, size) = (frame.may_share(), frame.shared_len());
        let place = open.iter().position(|(card, other, ..)| *card == to && Some(*other) == port);
        if let Some((_, _, flight, used)) = place.map(|at| &mut open[at])
            && *used + size <= SHARED
        {
            *used += size;
            flights[*flight].more.push(frame);
            continue;
        }
        /* what follows stays behind what has left */
        open.retain(|(card, other, ..)| *card != to || port.is_some_and(|port| port != *other));
        open.extend(port.map(|port| (to, port, flights.len(), HEADER_LEN + size)));
        flights.push(Flight { to, from, frame, more: Vec::new() });
    }
    flights
}

#[cfg(test)]
#[path = "frame_tests.rs"]
mod tests;
