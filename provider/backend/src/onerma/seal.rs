//! 1RMA's cryptography, by ring: AES-128-GCM for packets, AES-128 for derived keys.
//!
//! It must not know what packets say. docs/onerma.md ("Packets") says what is encrypted with what.

use ring::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, Tag, UnboundKey};
use starverbs_onerma::{DerivedKey, Initiator, OneRmaOp, RegionKey, Seal};

/// In the place where a nonce has the operation: the first half of an IPv6 address stands before it.
const HALF: u32 = 1 << 31;

/// The cipher of cards.
#[derive(Clone, Copy, Debug, Default)]
pub struct GcmSeal;

fn key_of(key: &[u8; 16]) -> LessSafeKey {
    LessSafeKey::new(UnboundKey::new(&AES_128_GCM, key).expect("16 bytes are a key of AES-128"))
}

/// AES-128 of `nonce` and the number 2: what GCM adds to the first block that it encrypts.
fn block(key: &[u8; 16], nonce: [u8; 12]) -> [u8; 16] {
    let mut block = [0; 16];
    let sealed =
        key_of(key).seal_in_place_separate_tag(Nonce::assume_unique_for_key(nonce), Aad::empty(), &mut block);
    /* the tag is nobody's */
    _ = sealed.expect("16 bytes are not too long");
    block
}

/// 12 bytes of three words, or of a long one and one.
fn nonce<const N: usize>(parts: [&[u8]; N]) -> [u8; 12] {
    let mut nonce = [0; 12];
    nonce.iter_mut().zip(parts.into_iter().flatten()).for_each(|(to, from)| *to = *from);
    nonce
}

impl Seal for GcmSeal {
    type Key = LessSafeKey;

    /// Of IPv4, as the paper has it: AES(K_r; address 32, PID 32, operation 32, 2). An IPv6 address does not
    /// fit a block with the rest: its first half makes a key, AES(K_r; half 64, 2^31 + operation 32, 2), and
    /// the second half K_d from that, AES(key; half 64, PID 32, 2).
    fn derive(&self, region: &RegionKey, initiator: &Initiator, op: OneRmaOp) -> DerivedKey {
        let Initiator { addr, pid } = initiator;
        let (pid, op) = (pid.to_be_bytes(), op as u32);
        DerivedKey(match addr.ipv4() {
            Some(addr) => block(&region.0, nonce([&addr, &pid, &op.to_be_bytes()])),
            None => {
                let (front, back) = addr.0.split_at(8);
                let half = block(&region.0, nonce([front, &(HALF | op).to_be_bytes()]));
                block(&half, nonce([back, &pid]))
            }
        })
    }

    fn prepare(&self, key: &DerivedKey) -> LessSafeKey {
        key_of(&key.0)
    }

    fn seal(&self, key: &LessSafeKey, iv: &[u8; 12], bound: &[u8], body: &mut [u8]) -> [u8; 16] {
        let nonce = Nonce::assume_unique_for_key(*iv);
        let tag = key.seal_in_place_separate_tag(nonce, Aad::from(bound), body);
        let tag = tag.expect("a packet is not too long");
        tag.as_ref().try_into().expect("a tag of 16 bytes")
    }

    fn open(&self, key: &LessSafeKey, iv: &[u8; 12], bound: &[u8], body: &mut [u8], tag: &[u8; 16]) -> bool {
        let nonce = Nonce::assume_unique_for_key(*iv);
        key.open_in_place_separate_tag(nonce, Aad::from(bound), Tag::from(*tag), body, 0..).is_ok()
    }
}

#[cfg(test)]
#[path = "seal_tests.rs"]
mod tests;
