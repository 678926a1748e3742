//! The headers of IBTA vol. 1, 9.2 (BTH) and 9.3 (extension headers), as they lie in memory.
//!
//! All are unaligned, big-endian and free of padding; a reference into a frame is a header.

use zerocopy::byteorder::network_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::types::{FlushLevel, Placement, Psn, QPN_MASK, Qpn};

/// The P_Key of the default partition, full member: the only one in the port's table.
pub const PKEY_DEFAULT: u16 = 0xffff;

const ACK_REQ: u32 = 1 << 31;
/// Of the seven reserved bits beside AckReq, which receivers must ignore and the ICRC covers: "I repeat
/// selectively"
const REPEATS: u32 = 1 << 24;
const SOLICITED: u8 = 1 << 7;
const MIG_REQ: u8 = 1 << 6;
const PAD_SHIFT: u8 = 4;
const FECN: u32 = 1 << 31;
const BECN: u32 = 1 << 30;

/// Base transport header, 12 bytes (IBTA 9.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Bth {
    opcode: u8,
    flags: u8,
    pkey: U16,
    ecn_qpn: U32,
    ack_psn: U32,
}

impl Bth {
    /// A header with MigReq set (the path is the migrated one, as cards without migration set),
    /// transport version 0 and no congestion bits. `pad` is 0 to 3.
    #[inline]
    pub fn new(opcode: u8, qpn: Qpn, psn: Psn, ack_req: bool, solicited: bool, pad: u8, pkey: u16) -> Self {
        let se = if solicited { SOLICITED } else { 0 };
        let ack = if ack_req { ACK_REQ } else { 0 };
        Bth {
            opcode,
            flags: se | MIG_REQ | (pad & 3) << PAD_SHIFT,
            pkey: U16::new(pkey),
            ecn_qpn: U32::new(qpn & QPN_MASK),
            ack_psn: U32::new(ack | psn.get()),
        }
    }
    /// The header that a frame begins with. `None`: it is shorter.
    #[inline]
    pub fn of(frame: &[u8]) -> Option<&Bth> {
        Bth::ref_from_prefix(frame).ok().map(|(bth, _)| bth)
    }
    /// Op-code ([`code`](super::opcode::code))
    #[inline]
    pub fn opcode(&self) -> u8 {
        self.opcode
    }
    /// Solicited event
    #[inline]
    pub fn solicited(&self) -> bool {
        self.flags & SOLICITED != 0
    }
    /// MigReq: the migration state (IBTA 9.2.3)
    #[inline]
    pub fn mig_req(&self) -> bool {
        self.flags & MIG_REQ != 0
    }
    /// Bytes of padding behind the payload, 0..=3
    #[inline]
    pub fn pad(&self) -> u8 {
        self.flags >> PAD_SHIFT & 3
    }
    /// Transport header version
    #[inline]
    pub fn version(&self) -> u8 {
        self.flags & 15
    }
    /// P_Key, whose top bit is full membership
    #[inline]
    pub fn pkey(&self) -> u16 {
        self.pkey.get()
    }
    /// Forward congestion mark
    #[inline]
    pub fn fecn(&self) -> bool {
        self.ecn_qpn.get() & FECN != 0
    }
    /// Backward congestion mark
    #[inline]
    pub fn becn(&self) -> bool {
        self.ecn_qpn.get() & BECN != 0
    }
    /// Destination QPN
    #[inline]
    pub fn dest_qpn(&self) -> Qpn {
        self.ecn_qpn.get() & QPN_MASK
    }
    /// The requester wants an acknowledge
    #[inline]
    pub fn ack_req(&self) -> bool {
        self.ack_psn.get() & ACK_REQ != 0
    }
    /// Ours: whether its sender advertises selective repeat, 0 or 1
    #[inline]
    pub fn repeats(&self) -> u8 {
        (self.ack_psn.get() & REPEATS != 0) as u8
    }
    /// Packet sequence number
    #[inline]
    pub fn psn(&self) -> Psn {
        Psn::new(self.ack_psn.get())
    }
}

/// RDMA extended transport header, 16 bytes (IBTA 9.3.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Reth {
    va: U64,
    rkey: U32,
    dma_len: U32,
}

impl Reth {
    /// From its fields.
    #[inline]
    pub fn new(va: u64, rkey: u32, dma_len: u32) -> Self {
        Reth { va: U64::new(va), rkey: U32::new(rkey), dma_len: U32::new(dma_len) }
    }
    /// Virtual address at the responder
    #[inline]
    pub fn va(&self) -> u64 {
        self.va.get()
    }
    /// Key of the responder's MR
    #[inline]
    pub fn rkey(&self) -> u32 {
        self.rkey.get()
    }
    /// Bytes of the whole message
    #[inline]
    pub fn dma_len(&self) -> u32 {
        self.dma_len.get()
    }
}

/// FLUSH extended transport header, 4 bytes (annex A19): placement type in bits 0 to 3, selectivity level in
/// bits 4 and 5.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Feth(U32);

impl Feth {
    /// Its word, as a work request carries it.
    #[inline]
    pub const fn word(placement: Placement, level: FlushLevel) -> u32 {
        placement.bits() as u32 | (level as u32) << 4
    }
    /// From its word.
    #[inline]
    pub fn new(word: u32) -> Self {
        Feth(U32::new(word))
    }
    /// What is asked for; `None` for nothing, and for reserved types.
    #[inline]
    pub fn placement(&self) -> Option<Placement> {
        Placement::from_bits((self.0.get() & 15) as u8).filter(|placement| !placement.is_empty())
    }
    /// Of which memory; `None` for reserved levels.
    #[inline]
    pub fn level(&self) -> Option<FlushLevel> {
        FlushLevel::from_code(self.0.get() >> 4 & 3)
    }
}

/// ACK extended transport header, 4 bytes (IBTA 9.3.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Aeth(U32);

impl Aeth {
    /// From its fields; `msn` counts modulo 2^24.
    #[inline]
    pub fn new(syndrome: Syndrome, msn: u32) -> Self {
        Aeth(U32::new(u32::from(syndrome.to_byte()) << 24 | msn & QPN_MASK))
    }
    /// The syndrome; `None` for reserved codes.
    #[inline]
    pub fn syndrome(&self) -> Option<Syndrome> {
        Syndrome::from_byte((self.0.get() >> 24) as u8)
    }
    /// Message sequence number, 24 bits
    #[inline]
    pub fn msn(&self) -> u32 {
        self.0.get() & QPN_MASK
    }
}

/// Credit count that means "no end-to-end credits" (IBTA 9.7.7.2.1).
pub const CREDITS_NONE: u8 = 31;

/// Credits by their code, 0 to 30 (IBTA table 46): 0 to 3, then each power of two and one and a half of it.
pub const fn credits_of(code: u8) -> u32 {
    let code = code as u32;
    match code {
        0..4 => code,
        _ => (2 + (code & 1)) << (code / 2 - 1),
    }
}

/// The code of the most credits that are not more than `count`.
pub const fn credit_code(count: u32) -> u8 {
    let mut code = 0;
    while code + 1 < CREDITS_NONE && credits_of(code + 1) <= count {
        code += 1;
    }
    code
}

/// First byte of an AETH (IBTA table 43).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Syndrome {
    /// ACK of all up to the packet's PSN
    Ack {
        /// Encoded credit count, [`CREDITS_NONE`] when credits are not used
        credits: u8,
    },
    /// Receiver not ready
    Rnr {
        /// Timer code, 0..=31 (IBTA table 45)
        timer: u8,
    },
    /// Negative acknowledge
    Nak(NakCode),
}

/// NAK codes (IBTA table 44).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum NakCode {
    /// PSN sequence error
    SequenceError = 0,
    /// Invalid request
    InvalidRequest = 1,
    /// Remote access error
    RemoteAccess = 2,
    /// Remote operational error
    RemoteOperation = 3,
}

impl Syndrome {
    /// The byte on the wire.
    #[inline]
    pub const fn to_byte(self) -> u8 {
        match self {
            Syndrome::Ack { credits } => credits & 31,
            Syndrome::Rnr { timer } => 0x20 | timer & 31,
            Syndrome::Nak(code) => 0x60 | code as u8,
        }
    }
    /// From the byte on the wire; `None` for reserved codes.
    #[inline]
    pub const fn from_byte(b: u8) -> Option<Self> {
        Some(match (b >> 5, b & 31) {
            (0, credits) => Syndrome::Ack { credits },
            (1, timer) => Syndrome::Rnr { timer },
            (3, 0) => Syndrome::Nak(NakCode::SequenceError),
            (3, 1) => Syndrome::Nak(NakCode::InvalidRequest),
            (3, 2) => Syndrome::Nak(NakCode::RemoteAccess),
            (3, 3) => Syndrome::Nak(NakCode::RemoteOperation),
            _ => return None,
        })
    }
}

/// Atomic extended transport header, 28 bytes (IBTA 9.3.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct AtomicEth {
    va: U64,
    rkey: U32,
    swap_add: U64,
    compare: U64,
}

impl AtomicEth {
    /// From its fields.
    #[inline]
    pub fn new(va: u64, rkey: u32, swap_add: u64, compare: u64) -> Self {
        AtomicEth {
            va: U64::new(va),
            rkey: U32::new(rkey),
            swap_add: U64::new(swap_add),
            compare: U64::new(compare),
        }
    }
    /// Virtual address at the responder
    #[inline]
    pub fn va(&self) -> u64 {
        self.va.get()
    }
    /// Key of the responder's MR
    #[inline]
    pub fn rkey(&self) -> u32 {
        self.rkey.get()
    }
    /// Swap value, or the number to add
    #[inline]
    pub fn swap_add(&self) -> u64 {
        self.swap_add.get()
    }
    /// Compare value
    #[inline]
    pub fn compare(&self) -> u64 {
        self.compare.get()
    }
}

/// Atomic ACK extended transport header, 8 bytes (IBTA 9.5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct AtomicAckEth(U64);

impl AtomicAckEth {
    /// From its field.
    #[inline]
    pub fn new(original: u64) -> Self {
        AtomicAckEth(U64::new(original))
    }
    /// The value before the atomic.
    #[inline]
    pub fn original(&self) -> u64 {
        self.0.get()
    }
}

/// Ours, 48 bytes: what a responder keeps behind the packet that it misses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct SackEth([U64; 6]);

impl SackEth {
    /// PSNs that it covers.
    pub const SPAN: u32 = 384;

    /// From words of 64 PSNs; the lowest bit of the first stands for the PSN behind the missing one.
    #[inline]
    pub fn new(words: [u64; 6]) -> Self {
        SackEth(words.map(U64::new))
    }
    /// Whether the PSN `n` behind the first one that it covers is kept; `n` is below [`SackEth::SPAN`].
    #[inline]
    pub fn has(&self, n: u32) -> bool {
        self.0.get(n as usize / 64).is_some_and(|word| word.get() >> (n % 64) & 1 == 1)
    }
}

/// Datagram extended transport header, 8 bytes (IBTA 9.3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Deth {
    qkey: U32,
    src_qp: U32,
}

impl Deth {
    /// From its fields.
    #[inline]
    pub fn new(qkey: u32, src_qp: Qpn) -> Self {
        Deth { qkey: U32::new(qkey), src_qp: U32::new(src_qp & QPN_MASK) }
    }
    /// Q_Key that the receiving QP must have
    #[inline]
    pub fn qkey(&self) -> u32 {
        self.qkey.get()
    }
    /// The sender's QPN
    #[inline]
    pub fn src_qp(&self) -> Qpn {
        self.src_qp.get() & QPN_MASK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flush_headers_round_trip() {
        for level in [FlushLevel::Range, FlushLevel::Mr] {
            for placement in [Placement::GLOBAL, Placement::PERSISTENT, Placement::all()] {
                let feth = Feth::new(Feth::word(placement, level));
                assert_eq!((feth.placement(), feth.level()), (Some(placement), Some(level)));
            }
        }
        assert_eq!(Feth::word(Placement::PERSISTENT, FlushLevel::Mr), 0x12);
        for reserved in [0, 4, 8, 15] {
            assert_eq!(Feth::new(reserved).placement(), None);
        }
        assert_eq!((Feth::new(0x21).level(), Feth::new(0x31).level()), (None, None));
    }

    #[test]
    fn credits_are_rounded_down_to_a_code() {
        assert_eq!(
            (0..12).map(credits_of).collect::<alloc::vec::Vec<_>>(),
            [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]
        );
        assert_eq!((credits_of(29), credits_of(30)), (24_576, 32_768));
        for count in (0..70_000).step_by(if cfg!(miri) { 997 } else { 1 }) {
            let code = credit_code(count);
            assert!(credits_of(code) <= count && (code == 30 || count < credits_of(code + 1)));
        }
    }

    #[test]
    fn syndromes_round_trip() {
        for b in 0..=255u8 {
            if let Some(s) = Syndrome::from_byte(b) {
                assert_eq!(s.to_byte(), b);
            }
        }
        assert_eq!(Syndrome::from_byte(0x1f), Some(Syndrome::Ack { credits: CREDITS_NONE }));
        assert_eq!(Syndrome::from_byte(0x61), Some(Syndrome::Nak(NakCode::InvalidRequest)));
        assert_eq!(Syndrome::from_byte(0x40), None);
        assert_eq!(Syndrome::from_byte(0x80), None);
    }
}
