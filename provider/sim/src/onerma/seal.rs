//! A cipher for simulations: SipHash as a stream and as a tag. Every bit of key, initialisation vector, bound
//! and encrypted bytes counts, as in a real one; but it is none, and keeps no secret from who tries.

use core::hash::Hasher;

use siphasher::sip::SipHasher24;
use starverbs_core::Gid;
use starverbs_onerma::{DerivedKey, Initiator, OneRmaOp, RegionKey, Seal};

/// The cipher of simulated cards.
#[derive(Clone, Copy, Debug, Default)]
pub struct SimSeal;

fn hash(key: &[u8; 16], domain: u8, parts: &[&[u8]]) -> u64 {
    let mut hash = SipHasher24::new_with_key(key);
    hash.write_u8(domain);
    for part in parts {
        hash.write_usize(part.len());
        hash.write(part);
    }
    hash.finish()
}

fn pair(key: &[u8; 16], domain: u8, parts: &[&[u8]]) -> [u8; 16] {
    let both = [hash(key, domain, parts), hash(key, domain + 1, parts)];
    let mut out = [0; 16];
    out.chunks_mut(8).zip(both).for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
    out
}

impl SimSeal {
    /// The key with which process `pid` at `addr` does `op` with a region that has `key`.
    pub fn key_for(&self, key: &RegionKey, addr: Gid, pid: u32, op: OneRmaOp) -> DerivedKey {
        self.derive(key, &Initiator { addr, pid }, op)
    }

    fn stream(key: &[u8; 16], iv: &[u8; 12], body: &mut [u8]) {
        let start = hash(key, 1, &[iv]);
        let mut word = start;
        for chunk in body.chunks_mut(8) {
            word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(start | 1);
            chunk.iter_mut().zip((word ^ word >> 29).to_le_bytes()).for_each(|(to, by)| *to ^= by);
        }
    }
}

impl Seal for SimSeal {
    type Key = [u8; 16];

    fn derive(&self, region: &RegionKey, initiator: &Initiator, op: OneRmaOp) -> DerivedKey {
        DerivedKey(pair(&region.0, 2, &[&initiator.addr.0, &initiator.pid.to_be_bytes(), &[op as u8]]))
    }

    fn prepare(&self, key: &DerivedKey) -> [u8; 16] {
        key.0
    }

    fn seal(&self, key: &[u8; 16], iv: &[u8; 12], bound: &[u8], body: &mut [u8]) -> [u8; 16] {
        Self::stream(key, iv, body);
        pair(key, 4, &[iv, bound, body])
    }

    fn open(&self, key: &[u8; 16], iv: &[u8; 12], bound: &[u8], body: &mut [u8], tag: &[u8; 16]) -> bool {
        let good = pair(key, 4, &[iv, bound, body]) == *tag;
        if good {
            Self::stream(key, iv, body);
        }
        good
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_bit_anywhere_is_seen() {
        let (key, iv, bound) = ([1; 16], [2; 12], [3; 20]);
        let mut body = *b"some bytes of data";
        let tag = SimSeal.seal(&key, &iv, &bound, &mut body);
        assert_ne!(&body, b"some bytes of data");
        let flipped = |bytes: &[u8], bit: usize| {
            let mut bytes = bytes.to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            bytes
        };
        let fixed = |bytes: Vec<u8>| bytes.try_into().expect("as long");
        for bit in 0..96 {
            assert!(!SimSeal.open(&key, &flipped(&iv, bit).try_into().unwrap(), &bound, &mut body, &tag));
            assert!(!SimSeal.open(&fixed(flipped(&key, bit)), &iv, &bound, &mut body, &tag));
            assert!(!SimSeal.open(&key, &iv, &flipped(&bound, bit), &mut body, &tag));
            assert!(!SimSeal.open(&key, &iv, &bound, &mut flipped(&body, bit), &tag));
            assert!(!SimSeal.open(&key, &iv, &bound, &mut body, &fixed(flipped(&tag, bit))));
        }
        assert!(SimSeal.open(&key, &iv, &bound, &mut body, &tag));
        assert_eq!(&body, b"some bytes of data");
    }
}
