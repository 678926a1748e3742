//! The token of a connection: by it SL's card knows that a packet may reach its host's memory, without a
//! record of the connection.
//!
//! SL's host makes it once, with the card's secret, and SF gets it with the set-up and puts it into each
//! packet. It is a MAC (SipHash-2-4) of SF's address and of what stands before it in the packet: SL's QPN,
//! the epoch, and where the slots of the connection lie. The card computes it again and compares. Then it can
//! believe the address, and looks at the *gate* there, the first word of the slot memory: it has the token
//! while the connection is open.
//!
//! Bytes in, numbers out.

use core::hash::Hasher;

use siphasher::sip::SipHasher24;
use starverbs_core::Gid;
use starverbs_core::rng::Rng;

use super::bounds::MemRange;
use super::ring::CQE_SLOT;
use super::wire::Prefix;

/// Bytes of a token and of where the slots lie, in a packet, behind the prefix.
pub const TOKEN_LEN: usize = 16;
/// Bytes of what a token is made of.
const BOUND_LEN: usize = 16 + TOKEN_LEN;

/// Slot memory of a connection: the gate, then slots. Its address is a multiple of a slot's size, and its
/// length is `count << shift` slots with a count of 8 bits. So the shift stands in the low bits of the
/// address, and the count in the byte before the QPN: a packet needs 8 bytes for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotArea {
    addr: u64,
    len: u64,
}

impl SlotArea {
    /// The shortest length of an area for the gate and so many bytes of slots.
    pub const fn len_for(slots: u64) -> u64 {
        let slots = slots.div_ceil(CQE_SLOT) + 1;
        (slots.div_ceil(1 << shift_of(slots)) << shift_of(slots)) * CQE_SLOT
    }

    /// Memory of this length ([`len_for`](SlotArea::len_for)). `None`: it cannot be an area.
    pub const fn new(addr: u64, len: u64) -> Option<Self> {
        let whole = len != 0 && addr.is_multiple_of(CQE_SLOT) && len.is_multiple_of(CQE_SLOT);
        if !whole || len > MAX_LEN || SlotArea::len_for(len - CQE_SLOT) != len {
            return None;
        }
        Some(SlotArea { addr, len })
    }

    /// Address of the gate.
    pub const fn gate(&self) -> u64 {
        self.addr
    }
    /// Address of the first slot.
    pub const fn first(&self) -> u64 {
        self.addr.wrapping_add(CQE_SLOT)
    }
    /// All of it.
    pub const fn range(&self) -> MemRange {
        MemRange { addr: self.addr, len: self.len }
    }
    /// Whether these bytes are slots of it.
    #[inline]
    pub const fn has_slot(&self, addr: u64, len: u64) -> bool {
        let (offset, slots) = (addr.wrapping_sub(self.first()), self.len.saturating_sub(CQE_SLOT));
        offset < slots && len <= slots - offset
    }

    /// Its count, and its address with the shift.
    const fn encode(&self) -> (u8, u64) {
        let slots = self.len / CQE_SLOT;
        let shift = shift_of(slots);
        ((slots >> shift) as u8, self.addr | shift as u64)
    }

    /// `None`: it has no slots.
    const fn decode(count: u8, place: u64) -> Option<Self> {
        if count == 0 {
            return None;
        }
        let (addr, shift) = (place & !SHIFT_MASK, place & SHIFT_MASK);
        Some(SlotArea { addr, len: ((count as u64) << shift) * CQE_SLOT })
    }
}

/// Bits of an address that are 0.
const SHIFT_MASK: u64 = CQE_SLOT - 1;
/// Bytes of the longest area.
const MAX_LEN: u64 = (0xff << SHIFT_MASK) * CQE_SLOT;

/// By how much a number of slots is shifted to the right so that eight bits are left.
const fn shift_of(slots: u64) -> u32 {
    (u64::BITS - slots.leading_zeros()).saturating_sub(8)
}

/// What SF's packets to SL's card show.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Token {
    /// Slot memory of the connection
    pub slots: SlotArea,
    /// The MAC; not 0, which is a gate that is closed
    pub mac: u64,
}

impl Token {
    /// Of no connection.
    pub const NONE: Token = Token { slots: SlotArea { addr: 0, len: 0 }, mac: 0 };

    /// Its bytes, and the byte before the QPN.
    pub fn encode(&self) -> (u8, [u8; TOKEN_LEN]) {
        let (count, place) = self.slots.encode();
        (count, (u128::from(place) << 64 | u128::from(self.mac)).to_be_bytes())
    }

    /// `None`: no slots are named.
    pub fn decode(count: u8, bytes: [u8; TOKEN_LEN]) -> Option<Self> {
        let both = u128::from_be_bytes(bytes);
        let slots = SlotArea::decode(count, (both >> 64) as u64)?;
        Some(Token { slots, mac: both as u64 })
    }
}

/// What a card makes tokens with, and knows them by. It is the same for all connections.
pub struct CardSecret {
    rng: Rng,
    key: [u64; 2],
}

impl CardSecret {
    /// `seed` is random, and nobody else's.
    pub fn new(seed: [u64; 2]) -> Self {
        let mut secret = CardSecret { rng: Rng::new(seed), key: [0; 2] };
        secret.replace();
        secret
    }

    /// Another secret takes its place: no token of before is right any more.
    pub fn replace(&mut self) {
        self.key = [self.rng.word(), self.rng.word()];
    }

    /// The token for packets from `peer` to a connection of SL with these slots.
    pub fn token(&self, peer: &Gid, of: Prefix, slots: SlotArea) -> Token {
        Token { slots, mac: self.mac(peer, of, slots) }
    }

    /// Whether a packet from `source` has the token of what it names. Two words are compared at once, so that
    /// the time tells nothing of where they differ.
    #[inline]
    pub fn admits(&self, source: &Gid, of: Prefix, token: &Token) -> bool {
        self.mac(source, of, token.slots) == token.mac
    }

    fn mac(&self, peer: &Gid, of: Prefix, slots: SlotArea) -> u64 {
        let (count, place) = slots.encode();
        let names = u64::from(count) << 56 | u64::from(of.qpn) << 32 | u64::from(of.epoch);
        let mut bound = [0; BOUND_LEN];
        let (addr, rest) = bound.split_at_mut(16);
        addr.copy_from_slice(&peer.0);
        rest.copy_from_slice(&(u128::from(names) << 64 | u128::from(place)).to_be_bytes());
        let [first, second] = self.key;
        let mut hash = SipHasher24::new_with_keys(first, second);
        hash.write(&bound);
        hash.finish().max(1)
    }
}

/// Nobody reads a secret in a log.
impl core::fmt::Debug for CardSecret {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("CardSecret").finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "token_tests.rs"]
mod tests;
