//! StaR packets: what stands behind the UDP header (Fig. 7, Fig. 8).
//!
//! ```text
//! word 0   PTYPE 4 | OPT 2 | M 1 | A 1 | QPN 24
//! word 1   epoch, low byte 8           | PSN 24
//! words 2-3                        ADDR 64
//! word 4   LEN 16                      | CHECKSUM 16
//!          {0 8 | QPN 24 | epoch 32}: with M its sender's QPN
//!          {slots 8 | QPN 24 | epoch 32, slots 64, MAC 64}: to the stateless half SL's QPN and the token
//!          data
//!          CRC-32
//! ```
//!
//! All numbers are big-endian, the CRC-32 as RoCE's is. The QPN is that of SF both ways, but with M: then it
//! is the receiver's. LEN counts the data, without what stands before it; in a GD it is what is wanted, in an
//! answer to several packets their number. Pure: bytes in, numbers out.

use starverbs_core::wire::IcrcHeader;
use starverbs_core::{Mtu, Psn, QPN_MASK, Qpn, SendOp};
use thiserror::Error;

use super::token::{TOKEN_LEN, Token};

mod checksum;
mod several;

pub use checksum::{PortPair, Ways, fill_checksum};
pub use several::{LENGTH_LEN, SEVERAL_ROOM, next_of_several, open_several, several_head, several_in};
pub use starverbs_core::wire::Crc;

/// UDP port of a card's stateless half, if it is free; else the host chooses one.
pub const PORT_STATELESS: u16 = 4793;
/// UDP port of a card's stateful half, which gets control messages too, if it is free.
pub const PORT_STATEFUL: u16 = 4794;
/// Bytes of the header.
pub const HEADER_LEN: usize = 20;
/// Bytes of the prefix that some packets have behind the header.
pub const PREFIX_LEN: usize = 8;
/// Bytes of the CRC at the end.
pub const CRC_LEN: usize = 4;
/// Bytes of a packet around its data, at most.
pub const OVERHEAD: usize = HEAD_LEN + CRC_LEN;
/// Bytes of data that any packet carries, at most.
pub const MAX_DATA: usize = Mtu::M4096.bytes() as usize;

/// From the PSN of a packet of SF to that of the next: the bits below number its transmissions.
pub const PSN_STEP: u32 = 4;

/// Bytes before the data, at most.
pub const HEAD_LEN: usize = HEADER_LEN + PREFIX_LEN + TOKEN_LEN;

const MIGRATE: u8 = 2;
const ACK: u8 = 1;
const LEN_AT: usize = 16;
const CHECKSUM_AT: usize = 18;
const EPOCH_MASK: u32 = 0xff;

/// Half of a card that packets are for. Each has a UDP port of its own, which the ends tell each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CardHalf {
    /// The stateless half
    Stateless,
    /// The stateful half, and control messages
    Stateful,
}

impl CardHalf {
    /// The UDP port that it has if it can.
    pub const fn default_port(self) -> u16 {
        match self {
            CardHalf::Stateless => PORT_STATELESS,
            CardHalf::Stateful => PORT_STATEFUL,
        }
    }
}

/// What a packet is (table I). The paper gives no numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Ptype {
    /// SL to SF: a WQE
    Wqep = 1,
    /// Both ways: a WQEP has been stored, a CQEP is in memory
    Ea = 2,
    /// SF to SL: data to write
    Rd = 3,
    /// SL to SF: it is in memory
    Rda = 4,
    /// SF to SL: data is wanted
    Gd = 5,
    /// SL to SF: the data
    Gda = 6,
    /// SF to SL: a completion
    Cqep = 7,
    /// SL to SF, not the paper's: WQEs of both queues, see [`packed`](super::packed)
    Wqeps = 8,
    /// SF to SL, not the paper's: the last data of a message, and its completion, see
    /// [`carried`](super::carried)
    Rdc = 9,
    /// SL to SF, not the paper's: RDAs of successive packets, see [`answers`](super::answers)
    Rdas = 10,
    /// SF to SL, not the paper's: several RDCs, see [`bundle`](super::bundle)
    Rdcs = 11,
    /// SL to SF, not the paper's: data of a WQE that left just before, for which SF has not asked
    Ed = 13,
}

impl Ptype {
    const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Ptype::Wqep,
            2 => Ptype::Ea,
            3 => Ptype::Rd,
            4 => Ptype::Rda,
            5 => Ptype::Gd,
            6 => Ptype::Gda,
            7 => Ptype::Cqep,
            8 => Ptype::Wqeps,
            9 => Ptype::Rdc,
            10 => Ptype::Rdas,
            11 => Ptype::Rdcs,
            13 => Ptype::Ed,
            _ => return None,
        })
    }
}

/// For which operation. In WQEP, CQEP and EA, [`Opt::Recv`] is the receive queue and all others are the send
/// queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum Opt {
    /// SEND; and what a card does by itself
    #[default]
    Send = 0,
    /// A receive WQE. In RD, GD and their answers: a WRITE in its turn ([`turn`](super::turn)), an atomic;
    /// each is done once
    Recv = 1,
    /// WRITE, FLUSH
    Write = 2,
    /// READ, and in a WQEP an atomic
    Read = 3,
}

impl Opt {
    const fn from_code(code: u8) -> Self {
        match code & 3 {
            0 => Opt::Send,
            1 => Opt::Recv,
            2 => Opt::Write,
            _ => Opt::Read,
        }
    }
    /// Of an operation of a send queue.
    pub const fn of(op: SendOp) -> Self {
        match op {
            SendOp::Send | SendOp::SendImm | SendOp::SendInv => Opt::Send,
            SendOp::LocalInv | SendOp::BindMw | SendOp::Malformed => Opt::Send,
            SendOp::Write | SendOp::WriteImm | SendOp::AtomicWrite | SendOp::Flush => Opt::Write,
            SendOp::Rpc | SendOp::RpcWrite => Opt::Write,
            SendOp::Read | SendOp::CmpSwap | SendOp::FetchAdd => Opt::Read,
        }
    }
    /// Of which queue a WQEP, CQEP or EA speaks.
    pub const fn queue(self) -> Queue {
        match self {
            Opt::Recv => Queue::Recv,
            Opt::Send | Opt::Write | Opt::Read => Queue::Send,
        }
    }
}

/// One of SL's two queues. Each has sequence numbers of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Queue {
    /// Send queue
    Send = 0,
    /// Receive queue
    Recv = 1,
}

/// The header (Fig. 8) without its checksum.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StarHeader {
    /// What it is
    pub ptype: Ptype,
    /// For which operation
    pub opt: Opt,
    /// A control message, or the answer to one
    pub migrate: bool,
    /// An answer is wanted
    pub ack: bool,
    /// SF's QPN; with `migrate` the receiver's
    pub qpn: Qpn,
    /// Low byte of the connection's epoch
    pub epoch: u8,
    /// WQEP, CQEP, EA and ED: sequence in the queue. Control messages: their sequence. Others: SF's own.
    pub psn: Psn,
    /// RD and GD, and echoed: where in SL's memory; in an ED as its WQE's SGE says it. EA and CQEP for SL:
    /// what SF has stored, or 0
    pub addr: u64,
    /// Bytes of data; GD that is no atomic: bytes wanted; RDAS, and EA of several CQEPs: packets that it
    /// answers, the last of which is `psn`
    pub len: u16,
}

impl StarHeader {
    /// Its bytes, with checksum 0.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let flags = if self.migrate { MIGRATE } else { 0 } | if self.ack { ACK } else { 0 };
        let first = (self.ptype as u8) << 4 | (self.opt as u8) << 2 | flags;
        let mut bytes = [0; HEADER_LEN];
        bytes[0..4].copy_from_slice(&(u32::from(first) << 24 | self.qpn & QPN_MASK).to_be_bytes());
        bytes[4..8].copy_from_slice(&(u32::from(self.epoch) << 24 | self.psn.get()).to_be_bytes());
        bytes[8..16].copy_from_slice(&self.addr.to_be_bytes());
        bytes[16..18].copy_from_slice(&self.len.to_be_bytes());
        bytes
    }

    /// From its bytes, whose checksum is not looked at.
    fn decode(bytes: &[u8; HEADER_LEN]) -> Option<Self> {
        let [first, q0, q1, q2, epoch, p0, p1, p2, addr @ .., l0, l1, _, _] = *bytes;
        Some(StarHeader {
            ptype: Ptype::from_code(first >> 4)?,
            opt: Opt::from_code(first >> 2),
            migrate: first & MIGRATE != 0,
            ack: first & ACK != 0,
            qpn: u32::from_be_bytes([0, q0, q1, q2]),
            epoch,
            psn: Psn::new(u32::from_be_bytes([0, p0, p1, p2])),
            addr: u64::from_be_bytes(addr),
            len: u16::from_be_bytes([l0, l1]),
        })
    }
}

/// What stands behind the header of packets to the stateless half and of control messages, at a fixed place:
/// to whom they belong can be seen without state.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Prefix {
    /// SL's QPN; in a control message its sender's
    pub qpn: Qpn,
    /// The connection's epoch
    pub epoch: u32,
}

impl Prefix {
    /// Its bytes.
    pub fn encode(&self) -> [u8; PREFIX_LEN] {
        (u64::from(self.qpn & QPN_MASK) << 32 | u64::from(self.epoch)).to_be_bytes()
    }

    fn decode(bytes: [u8; PREFIX_LEN]) -> Option<Self> {
        let word = u64::from_be_bytes(bytes);
        let qpn = (word >> 32) as u32;
        (qpn <= QPN_MASK).then_some(Prefix { qpn, epoch: word as u32 })
    }
}

/// What stands behind the headers of a connection's packets to the stateless half: prefix and token.
#[derive(Clone, Copy, Debug)]
pub struct HeadTail {
    bytes: [u8; PREFIX_LEN + TOKEN_LEN],
    /// For the header
    epoch: u8,
}

impl HeadTail {
    /// Of these.
    pub fn new(prefix: Prefix, token: &Token) -> Self {
        let ((count, token), mut bytes) = (token.encode(), [0; PREFIX_LEN + TOKEN_LEN]);
        bytes[..PREFIX_LEN].copy_from_slice(&prefix.encode());
        bytes[0] = count;
        bytes[PREFIX_LEN..].copy_from_slice(&token);
        HeadTail { bytes, epoch: (prefix.epoch & EPOCH_MASK) as u8 }
    }
}

/// A packet without its data: header, and prefix and token where its kind has them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StarHead {
    bytes: [u8; HEAD_LEN],
    len: u8,
}

impl StarHead {
    /// A packet for SL. The header's epoch is taken from the prefix.
    pub fn to_stateless(header: StarHeader, prefix: Prefix, token: &Token) -> Self {
        StarHead::with_tail(header, &HeadTail::new(prefix, token))
    }
    /// The same, of a connection whose packets have this behind their headers.
    #[inline]
    pub fn with_tail(header: StarHeader, tail: &HeadTail) -> Self {
        let header = StarHeader { migrate: false, epoch: tail.epoch, ..header };
        let mut bytes = [0; HEAD_LEN];
        bytes[..HEADER_LEN].copy_from_slice(&header.encode());
        bytes[HEADER_LEN..].copy_from_slice(&tail.bytes);
        StarHead { bytes, len: HEAD_LEN as u8 }
    }
    /// A packet for SF.
    pub fn to_stateful(header: StarHeader) -> Self {
        let mut bytes = [0; HEAD_LEN];
        bytes[..HEADER_LEN].copy_from_slice(&StarHeader { migrate: false, ..header }.encode());
        StarHead { bytes, len: HEADER_LEN as u8 }
    }
    /// A control message to `to`, of `len` bytes.
    pub fn control(to: Qpn, from: Prefix, seq: Psn, len: u16) -> Self {
        StarHead::signal(Ptype::Wqep, to, from, seq, len)
    }
    /// That a control message came.
    pub fn control_ack(to: Qpn, from: Prefix, seq: Psn) -> Self {
        StarHead::signal(Ptype::Ea, to, from, seq, 0)
    }

    fn signal(ptype: Ptype, qpn: Qpn, from: Prefix, psn: Psn, len: u16) -> Self {
        let ack = ptype == Ptype::Wqep;
        let header =
            StarHeader { ptype, opt: Opt::Send, migrate: true, ack, qpn, epoch: 0, psn, addr: 0, len };
        StarHead::with_prefix(header, from)
    }

    /// The head of a packet that came, which has a prefix.
    pub(super) fn of(header: StarHeader, prefix: Prefix) -> Self {
        StarHead::with_prefix(header, prefix)
    }
    /// Whether it is a control message's, or that of the answer to one.
    #[inline]
    pub fn is_control(&self) -> bool {
        let [first, ..] = self.bytes;
        first & MIGRATE != 0
    }
    /// As it is before sealed data of so many bytes; `None`: it is of no control message, nor of the answer
    /// to one.
    pub(super) fn sealed(&self, len: u16) -> Option<Self> {
        let mut head = *self;
        head.bytes[LEN_AT..CHECKSUM_AT].copy_from_slice(&len.to_be_bytes());
        self.is_control().then_some(head)
    }

    fn with_prefix(header: StarHeader, prefix: Prefix) -> Self {
        let header = StarHeader { epoch: (prefix.epoch & EPOCH_MASK) as u8, ..header };
        let mut bytes = [0; HEAD_LEN];
        bytes[..HEADER_LEN].copy_from_slice(&header.encode());
        bytes[HEADER_LEN..HEADER_LEN + PREFIX_LEN].copy_from_slice(&prefix.encode());
        StarHead { bytes, len: (HEADER_LEN + PREFIX_LEN) as u8 }
    }

    /// Its bytes as they stand before the data.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.len)).unwrap_or(&self.bytes)
    }
}

/// Bits of a [`lane`].
pub const LANE_BITS: u32 = 4;
/// Lanes, as bits: those of answers and completions (EA, CQEP, RDA), and those of WQEs and data that must not
/// pass answers and completions which were made before: receives wait for room that an answer makes, and who
/// gets data expects that what it had sent before is complete.
pub const ANSWERS: u16 = 1 << 3 | 1 << 4 | 1 << 7;
/// See [`ANSWERS`].
pub const BEHIND_ANSWERS: u16 = 1 << 1 | 1 << 2 | 1 << 5;

/// Which packets a packet must not leave before, by its header. Both ends take it for a sign of loss that one
/// overtakes others, but only among those that one counts: the packets of SF's window that bring data or that
/// get some, the answers to either, the WQEs of a queue of SL. Packets of other lanes may pass each other, so
/// that those of one size leave together.
#[inline]
pub fn lane(head: &[u8]) -> u8 {
    head.first().map_or(0, |first| LANES[usize::from(*first)])
}

/// Lanes by the first byte of a header.
static LANES: [u8; 256] = {
    let mut lanes = [0; 256];
    let mut first = 0;
    while first < lanes.len() {
        lanes[first] = lane_of(first as u8);
        first += 1;
    }
    lanes
};

const fn lane_of(first: u8) -> u8 {
    if first & MIGRATE != 0 {
        return 0;
    }
    match (Ptype::from_code(first >> 4), Opt::from_code(first >> 2)) {
        (Some(Ptype::Wqep), Opt::Recv) | (Some(Ptype::Wqeps | Ptype::Ed), _) => 1,
        (Some(Ptype::Wqep), _) => 2,
        (Some(Ptype::Ea), _) => 3,
        (Some(Ptype::Cqep), _) => 4,
        (Some(Ptype::Rd | Ptype::Rdc | Ptype::Rdcs), _) => 5,
        (Some(Ptype::Gd), _) => 6,
        (Some(Ptype::Rda | Ptype::Rdas), _) => 7,
        (Some(Ptype::Gda), _) => 8,
        (None, _) => 9,
    }
}

/// Whose a packet for a half will be, without looking whether it is one: SF's or SL's QPN. `None`: it is too
/// short.
#[inline]
pub fn qpn_in(side: CardHalf, frame: &[u8]) -> Option<Qpn> {
    let at = match side {
        CardHalf::Stateless => HEADER_LEN,
        CardHalf::Stateful => 0,
    };
    let word = frame.get(at..)?.first_chunk()?;
    Some(u32::from_be_bytes(*word) & QPN_MASK)
}

/// A frame is no StaR packet. Each is dropped without an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum StarError {
    /// shorter than its headers, longer than any path MTU, or not as long as it says
    #[error("shorter than its headers, longer than any path MTU, or not as long as it says")]
    Length,
    /// the header's checksum or the CRC is wrong
    #[error("the header's checksum or the CRC is wrong")]
    Checksum,
    /// no such packet to this half
    #[error("no such packet to this half")]
    Kind,
}

/// One received packet, checked once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StarPacket<'a> {
    /// Its header
    pub header: StarHeader,
    /// Behind it, where its kind has one
    pub prefix: Option<Prefix>,
    /// Behind that, to the stateless half
    pub token: Option<Token>,
    /// Its data
    pub data: &'a [u8],
}

impl<'a> StarPacket<'a> {
    /// Checks a frame, which ends with its CRC: checksums, a kind that the half knows to which it came, and
    /// lengths.
    pub fn open(side: CardHalf, path: &IcrcHeader, frame: &'a [u8]) -> Result<Self, StarError> {
        StarPacket::parse(side, checked(&PortPair::new(path), frame)?)
    }

    /// As [`open`](StarPacket::open), without checksums and without a CRC at the end.
    pub fn parse(side: CardHalf, body: &'a [u8]) -> Result<Self, StarError> {
        let (bytes, rest) = body.split_first_chunk::<HEADER_LEN>().ok_or(StarError::Length)?;
        let header = StarHeader::decode(bytes).ok_or(StarError::Kind)?;
        let shape = PacketShape::of(side, &header).ok_or(StarError::Kind)?;
        let (prefix, token, data) = match (shape.prefix, side) {
            (false, _) => (None, None, rest),
            (true, CardHalf::Stateless) => {
                let (prefix, token, data) = split_token(rest)?;
                (Some(prefix), Some(token), data)
            }
            (true, CardHalf::Stateful) => {
                let (prefix, data) = rest.split_first_chunk().ok_or(StarError::Length)?;
                (Some(Prefix::decode(*prefix).ok_or(StarError::Kind)?), None, data)
            }
        };
        if prefix.is_some_and(|prefix| u32::from(header.epoch) != prefix.epoch & EPOCH_MASK) {
            return Err(StarError::Kind);
        }
        let fits = if shape.data { data.len() == usize::from(header.len) } else { data.is_empty() };
        if !fits || usize::from(header.len).max(data.len()) > MAX_DATA {
            return Err(StarError::Length);
        }
        Ok(StarPacket { header, prefix, token, data })
    }
}

/// A frame that came this way, without its CRC.
///
/// # Errors
/// That or the header's checksum is wrong, or it is too short for them.
#[inline]
pub fn checked<'a>(way: &PortPair, frame: &'a [u8]) -> Result<&'a [u8], StarError> {
    let (body, crc) = frame.split_last_chunk::<CRC_LEN>().ok_or(StarError::Length)?;
    let (bytes, _) = body.split_first_chunk::<HEADER_LEN>().ok_or(StarError::Length)?;
    let given = [bytes[CHECKSUM_AT], bytes[CHECKSUM_AT + 1]];
    let right = given == way.checksum(bytes) && *crc == Crc::of(body);
    if right { Ok(body) } else { Err(StarError::Checksum) }
}

/// Prefix and token of a packet to the stateless half, and its data.
fn split_token(rest: &[u8]) -> Result<(Prefix, Token, &[u8]), StarError> {
    let (&[count, ref prefix @ ..], rest) =
        rest.split_first_chunk::<PREFIX_LEN>().ok_or(StarError::Length)?;
    let (token, data) = rest.split_first_chunk::<TOKEN_LEN>().ok_or(StarError::Length)?;
    let [q0, q1, q2, e0, e1, e2, e3] = *prefix;
    let prefix = Prefix::decode([0, q0, q1, q2, e0, e1, e2, e3]).ok_or(StarError::Kind)?;
    let token = Token::decode(count, *token).ok_or(StarError::Kind)?;
    Ok((prefix, token, data))
}

/// How a packet of a kind is built.
struct PacketShape {
    /// To the stateless half a token, too
    prefix: bool,
    /// Whether LEN bytes of data follow
    data: bool,
}

impl PacketShape {
    /// `None`: there is no such packet to that half.
    fn of(side: CardHalf, header: &StarHeader) -> Option<PacketShape> {
        use Ptype::{Cqep, Ea, Ed, Gd, Gda, Rd, Rda, Rdas, Rdc, Rdcs, Wqep, Wqeps};
        let (prefix, data) = match (side, header.migrate, header.ptype) {
            (CardHalf::Stateless, false, Rd | Cqep | Rdc | Rdcs) => (true, true),
            /* an atomic brings its operands, which LEN counts; eight bytes are wanted */
            (CardHalf::Stateless, false, Gd) => (true, header.opt == Opt::Recv),
            (CardHalf::Stateless, false, Ea) => (true, false),
            (CardHalf::Stateful, false, Wqep | Wqeps | Gda | Ed) => (false, true),
            (CardHalf::Stateful, false, Ea | Rda | Rdas) => (false, false),
            (CardHalf::Stateful, true, Wqep) => (true, true),
            /* a sealed one has data */
            (CardHalf::Stateful, true, Ea) => (true, true),
            _ => return None,
        };
        let filled = side == CardHalf::Stateless && header.ptype == Ea && header.len != 0;
        (!filled).then_some(PacketShape { prefix, data })
    }
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
