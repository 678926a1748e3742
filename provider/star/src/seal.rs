//! Sealing: what two cards settle beside the data, encrypted and authenticated under a key that both have.
//!
//! Each message has its sender's *salt*, 16 bytes that are random in each boot of a card, and a number that
//! its card gives out once; together they are the nonce of XChaCha20-Poly1305. So a nonce is never used
//! twice, and a message that is repeated is sealed anew. What stands around the message in clear (addresses,
//! QPNs, epoch, sequence, kind) is bound to it. Who opens messages remembers which numbers came from whom,
//! and takes each once.
//!
//! It must not know what the messages mean. docs/star.md ("Security") says what
//! a key gives.

use alloc::vec::Vec;

use chacha20poly1305::aead::AeadInOut;
use chacha20poly1305::{KeyInit, Tag, XChaCha20Poly1305, XNonce};
use starverbs_core::{Counters, Gid};
use thiserror::Error;

use super::control::MAX_CONTROL;
use super::env::QpPair;
use super::wire::{HEADER_LEN, PREFIX_LEN, StarHead, StarPacket};

/// Bytes of a key.
pub const KEY_LEN: usize = 32;
/// Bytes of a salt.
pub const SALT_LEN: usize = 16;
/// Bytes that a sealed message is longer: that it is one, its nonce, its tag.
pub const OVERHEAD: usize = 1 + NONCE_LEN + TAG_LEN;
/// Bytes of the largest sealed message.
pub const MAX_SEALED: usize = MAX_CONTROL + OVERHEAD;

/// The first byte of a sealed message; no [`Control`](super::control::Control) begins with it.
const SEALED: u8 = 0xe1;
const NONCE_LEN: usize = SALT_LEN + 8;
const TAG_LEN: usize = 16;
/// Separates these messages from whatever else somebody may use the key for.
const LABEL: &[u8; 16] = b"starverbs StaR 1";
/// What is bound to a message, at most.
const BOUND: usize = LABEL.len() + 1 + 2 * 16 + HEADER_LEN + PREFIX_LEN;

/// A message that cannot be opened is dropped without an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum SealError {
    /// It is not sealed, or under another key, or was changed, or is for somebody else
    #[error("not sealed under this key, for this receiver")]
    Foreign,
    /// It was opened before, or is too old for anybody to know
    #[error("opened before")]
    Replayed,
}

impl SealError {
    /// Counts the message as what it is.
    pub fn count(self, stats: &Counters) {
        match self {
            SealError::Foreign => stats.star_foreign.inc(),
            SealError::Replayed => stats.star_replayed.inc(),
        }
    }
}

/// Addresses that a message travels between.
#[derive(Clone, Copy, Debug)]
pub struct AddrPair<'a> {
    /// Its sender
    pub src: &'a Gid,
    /// Its receiver
    pub dst: &'a Gid,
}

/// What a card seals and opens with. The key is wiped when it goes.
pub struct ControlSeal {
    cipher: XChaCha20Poly1305,
    salt: [u8; SALT_LEN],
    /// Messages sealed
    sent: u64,
    seen: Seen,
}

impl ControlSeal {
    /// `salt` is random, and another one in each boot of each card that has the key.
    pub fn new(key: &[u8; KEY_LEN], salt: [u8; SALT_LEN]) -> Self {
        ControlSeal { cipher: XChaCha20Poly1305::new(key.into()), salt, sent: 0, seen: Seen::default() }
    }

    /// A control message or the answer to one, with the head that it is to have then; its length. `None`: it
    /// is neither, and leaves as it is.
    pub fn seal_packet(
        &mut self,
        ends: AddrPair<'_>,
        head: &StarHead,
        data: &[u8],
        room: &mut [u8; MAX_SEALED],
    ) -> Option<(StarHead, usize)> {
        let head = head.sealed((data.len() + OVERHEAD) as u16)?;
        let len = self.seal(&MessageAad::new(1, ends, head.bytes()), data, room)?;
        Some((head, len))
    }

    /// A control message, or the answer to one, as it was before it was sealed.
    pub fn open_packet<'r>(
        &mut self,
        ends: AddrPair<'_>,
        packet: &StarPacket<'_>,
        room: &'r mut [u8; MAX_CONTROL],
    ) -> Result<StarPacket<'r>, SealError> {
        let prefix = packet.prefix.ok_or(SealError::Foreign)?;
        let head = StarHead::of(packet.header, prefix);
        let data = self.open(&MessageAad::new(1, ends, head.bytes()), packet.data, room)?;
        let mut header = packet.header;
        header.len = data.len() as u16;
        Ok(StarPacket { header, prefix: Some(prefix), token: None, data })
    }

    /// A role message; its length. `None`: `room` is too
    /// small, which [`MAX_SEALED`] never is.
    pub fn seal_offer(
        &mut self,
        ends: AddrPair<'_>,
        qps: QpPair,
        message: &[u8],
        room: &mut [u8],
    ) -> Option<usize> {
        self.seal(&MessageAad::new(2, ends, &pair(qps)), message, room)
    }

    /// A role message, as it was before it was sealed.
    pub fn open_offer<'r>(
        &mut self,
        ends: AddrPair<'_>,
        qps: QpPair,
        sealed: &[u8],
        room: &'r mut [u8; MAX_CONTROL],
    ) -> Result<&'r [u8], SealError> {
        self.open(&MessageAad::new(2, ends, &pair(qps)), sealed, room)
    }

    fn seal(&mut self, bound: &MessageAad, message: &[u8], room: &mut [u8]) -> Option<usize> {
        self.sent = self.sent.checked_add(1)?;
        let nonce = nonce(&self.salt, self.sent);
        let out = room.get_mut(..message.len() + OVERHEAD)?;
        let (first, out) = out.split_first_mut()?;
        let (to, out) = out.split_first_chunk_mut::<NONCE_LEN>()?;
        let (body, tag) = out.split_last_chunk_mut::<TAG_LEN>()?;
        (*first, *to) = (SEALED, nonce);
        body.copy_from_slice(message);
        let made = self.cipher.encrypt_inout_detached(&XNonce::from(nonce), bound.bytes(), body.into());
        *tag = made.ok()?.into();
        Some(message.len() + OVERHEAD)
    }

    fn open<'r>(
        &mut self,
        bound: &MessageAad,
        sealed: &[u8],
        room: &'r mut [u8; MAX_CONTROL],
    ) -> Result<&'r [u8], SealError> {
        let (nonce, body, tag) = parts(sealed).ok_or(SealError::Foreign)?;
        let room = room.get_mut(..body.len()).ok_or(SealError::Foreign)?;
        room.copy_from_slice(body);
        let (nonce_of, tag) = (XNonce::from(*nonce), Tag::from(*tag));
        self.cipher
            .decrypt_inout_detached(&nonce_of, bound.bytes(), (&mut *room).into(), &tag)
            .map_err(|_| SealError::Foreign)?;
        if self.seen.take(nonce) { Ok(room) } else { Err(SealError::Replayed) }
    }
}

/// Nonce, body and tag of a sealed message.
fn parts(sealed: &[u8]) -> Option<(&[u8; NONCE_LEN], &[u8], &[u8; TAG_LEN])> {
    let rest = sealed.strip_prefix(&[SEALED])?;
    let (nonce, rest) = rest.split_first_chunk()?;
    let (body, tag) = rest.split_last_chunk()?;
    Some((nonce, body, tag))
}

fn nonce(salt: &[u8; SALT_LEN], number: u64) -> [u8; NONCE_LEN] {
    let mut nonce = [0; NONCE_LEN];
    let (front, back) = nonce.split_at_mut(SALT_LEN);
    front.copy_from_slice(salt);
    back.copy_from_slice(&number.to_be_bytes());
    nonce
}

fn pair(qps: QpPair) -> [u8; 8] {
    (u64::from(qps.from) << 32 | u64::from(qps.to)).to_be_bytes()
}

/// What is bound to a message: its kind, where it travels, and what stands before it.
struct MessageAad {
    bytes: [u8; BOUND],
    len: usize,
}

impl MessageAad {
    /// Of `head`, at most as much as a packet's head has.
    fn new(kind: u8, ends: AddrPair<'_>, head: &[u8]) -> Self {
        let mut bound = MessageAad { bytes: [0; BOUND], len: 0 };
        for part in [&LABEL[..], &[kind], &ends.src.0, &ends.dst.0, head] {
            for (to, from) in bound.bytes.iter_mut().skip(bound.len).zip(part) {
                *to = *from;
            }
            bound.len = BOUND.min(bound.len + part.len());
        }
        bound
    }

    fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&self.bytes)
    }
}

/// Boots of cards that are remembered; of more, the least recently used is forgotten. Its messages could then
/// be replayed, as far as QPNs, epoch and sequence of a connection allow it.
const BOOTS: usize = 1024;
const WORDS: usize = 16;
/// Numbers before the highest that are remembered one by one. What is older is taken for a repeat.
const WINDOW: u64 = 64 * (WORDS as u64 - 1);

/// Which messages came.
#[derive(Default)]
struct Seen {
    boots: Vec<Boot>,
    /// Messages taken
    clock: u64,
}

/// What came of one boot of a card.
struct Boot {
    salt: [u8; SALT_LEN],
    /// Highest number
    top: u64,
    /// Bit n modulo the bits: n came, as far as n is not older than the window
    bits: [u64; WORDS],
    /// Its last message, by the clock of `Seen`
    used: u64,
}

impl Seen {
    /// Takes a message by its nonce. False: it came before, or there is no memory to know, and its sender
    /// repeats it.
    fn take(&mut self, nonce: &[u8; NONCE_LEN]) -> bool {
        let Some((salt, number)) = nonce.split_first_chunk::<SALT_LEN>() else { return false };
        let number = number.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
        self.clock += 1;
        let Some(boot) = self.boot(salt) else { return false };
        boot.take(number)
    }

    fn boot(&mut self, salt: &[u8; SALT_LEN]) -> Option<&mut Boot> {
        let Seen { boots, clock } = self;
        let at = match boots.iter().position(|boot| boot.salt == *salt) {
            Some(at) => at,
            None => {
                let fresh = Boot { salt: *salt, top: 0, bits: [0; WORDS], used: 0 };
                if boots.len() < BOOTS {
                    boots.try_reserve(1).ok()?;
                    boots.push(fresh);
                    boots.len() - 1
                } else {
                    let oldest = (0..boots.len()).min_by_key(|at| boots.get(*at).map(|boot| boot.used))?;
                    *boots.get_mut(oldest)? = fresh;
                    oldest
                }
            }
        };
        let boot = boots.get_mut(at)?;
        boot.used = *clock;
        Some(boot)
    }
}

impl Boot {
    fn take(&mut self, number: u64) -> bool {
        if number > self.top {
            let (old, new) = (self.top / 64, number / 64);
            for word in (old + 1..=new).take(WORDS) {
                *self.word(word) = 0;
            }
            self.top = number;
        } else if self.top - number >= WINDOW {
            return false;
        }
        let mask = 1 << (number % 64);
        let word = self.word(number / 64);
        let fresh = *word & mask == 0;
        *word |= mask;
        fresh
    }

    fn word(&mut self, word: u64) -> &mut u64 {
        &mut self.bits[word as usize % WORDS]
    }
}

#[cfg(test)]
#[path = "seal_tests.rs"]
mod tests;
