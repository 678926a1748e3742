//! What a card needs of cryptography, and the numbers that keep initialisation vectors apart (1RMA, section
//! 4.2 and appendix A).

use core::fmt;
use core::ops::Range;

use starverbs_core::Gid;

use crate::types::OneRmaOp;

/// Bytes of a key.
pub(crate) const KEY_LEN: usize = 16;
/// Bytes of a tag.
pub const TAG_LEN: usize = 16;
/// Bytes of an initialisation vector.
pub(crate) const IV_LEN: usize = 12;

macro_rules! key {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq)]
        pub struct $name(pub [u8; KEY_LEN]);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(concat!(stringify!($name), "(..)"))
            }
        }
    };
}

key! {
    /// K_r: the key of a region, from which those of its initiators are derived. Never sent but by REKEY,
    /// encrypted.
    RegionKey
}
key! {
    /// K_d: what one process of one host may do one kind of operation with. Never sent.
    DerivedKey
}

/// Signs that a request could not be authenticated. Everybody knows it: such an answer proves nothing.
pub const RESERVED_KEY: DerivedKey = DerivedKey(*b"1RMA: no such K!");

/// Who begins operations: what K_d is bound to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Initiator {
    /// Address of its host
    pub addr: Gid,
    /// Number of its process
    pub pid: u32,
}

/// Cryptography, from outside.
pub trait Seal {
    /// A key, ready for use
    type Key: Clone;

    /// K_d of an initiator and an operation, from K_r.
    fn derive(&self, region: &RegionKey, initiator: &Initiator, op: OneRmaOp) -> DerivedKey;
    /// Makes a key ready for use.
    fn prepare(&self, key: &DerivedKey) -> Self::Key;
    /// Encrypts `body` in place and gives the tag over it and `bound`. A card never gives the same `iv` twice
    /// with a key.
    fn seal(&self, key: &Self::Key, iv: &[u8; IV_LEN], bound: &[u8], body: &mut [u8]) -> [u8; TAG_LEN];
    /// Decrypts `body` in place. False: the tag is not that of these bytes under this key, and `body` is
    /// worth nothing.
    #[must_use]
    fn open(
        &self,
        key: &Self::Key,
        iv: &[u8; IV_LEN],
        bound: &[u8],
        body: &mut [u8],
        tag: &[u8; TAG_LEN],
    ) -> bool;
}

/// Numbers of messages: a card counts all that it sends, and uses no number twice in any of its
/// incarnations.
///
/// Whoever starts a card gives it other ones each time, and to the cards of an address, too. The highest bit
/// is set in what a target sends, so that the two ends of an operation never share a number whatever
/// their sender IDs are.
#[derive(Clone, Debug)]
pub struct SealCounters(Range<u64>);

/// Of a counter: sent by a target.
const BY_TARGET: u64 = 1 << 63;

impl SealCounters {
    /// The 2^32 numbers of an epoch, of which the lower 31 bits are looked at.
    pub const fn of_epoch(epoch: u32) -> Self {
        let first = ((epoch & 0x7fff_ffff) as u64) << 32;
        SealCounters(first..first + (1 << 32))
    }

    /// Some numbers of an epoch.
    pub fn of_range(range: Range<u64>) -> Self {
        SealCounters(range.start.min(BY_TARGET)..range.end.min(BY_TARGET))
    }

    /// How many are left.
    pub const fn left(&self) -> u64 {
        self.0.end.saturating_sub(self.0.start)
    }

    /// The next number of an initiator. `None`: they have run out, and nothing more can be sent.
    pub(crate) fn as_initiator(&mut self) -> Option<u64> {
        self.0.next()
    }

    /// The next number of a target.
    pub(crate) fn as_target(&mut self) -> Option<u64> {
        self.0.next().map(|number| number | BY_TARGET)
    }
}

/// Whether a target sent this.
pub(crate) const fn is_by_target(counter: u64) -> bool {
    counter & BY_TARGET != 0
}

#[cfg(test)]
mod tests {
    use std::format;

    use super::*;

    #[test]
    fn numbers_differ_between_ends_and_epochs_and_run_out() {
        let mut of = SealCounters::of_range(5..7);
        assert_eq!((of.as_initiator(), of.as_target()), (Some(5), Some(6 | BY_TARGET)));
        assert_eq!((of.left(), of.as_initiator(), of.as_target()), (0, None, None));
        let (mut one, mut next) = (SealCounters::of_epoch(1), SealCounters::of_epoch(2));
        assert_eq!(one.as_initiator().map(|n| n + one.left() + 1), next.as_initiator());
        assert!(SealCounters::of_epoch(u32::MAX).0.end <= BY_TARGET);
    }

    #[test]
    fn keys_are_not_printed() {
        assert_eq!(format!("{:?}", RegionKey([0x41; 16])), "RegionKey(..)");
    }
}
