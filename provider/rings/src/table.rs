//! A table of one process that others look into: entries in places, more of them as the table grows.
//!
//! The owner alone writes it; the others have its pages to read. What a key opens is the words of its entry,
//! under the number of an [`Incarnation`]; who uses it does so from a
//! [`ReaderSlot`](crate::ReaderSlot). This must not know what keys and words mean, where a key's place is, or
//! where the memory comes from.

use core::array;

use crate::shared::Incarnation;
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// How many entries there are: the others look at no more.
#[repr(transparent)]
pub struct TableLength(AtomicU32);

impl TableLength {
    /// None yet, as zeroed memory has it.
    #[allow(clippy::new_without_default, reason = "a table's part, made with it")]
    pub fn new() -> Self {
        TableLength(AtomicU32::new(0))
    }

    /// The owner has so many, the new ones all zero.
    pub fn grow(&self, to: u32) {
        /* release: the new entries' memory before their number */
        self.0.store(to, Ordering::Release);
    }

    /// Whether there is an entry in a place. The load is relaxed, and ordered by the fence: the page may be
    /// read-only.
    #[inline]
    pub fn has(&self, place: u32) -> bool {
        let there = place < self.0.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        there
    }
}

/// An entry: the number of its incarnation, its key, and `N` words that the key opens. All zero: none.
#[repr(C)]
pub struct TableEntry<const N: usize> {
    incarnation: Incarnation,
    key: AtomicU32,
    words: [AtomicU64; N],
}

impl<const N: usize> TableEntry<N> {
    /// As zeroed memory has it.
    #[allow(clippy::new_without_default, reason = "a table's part, made with it")]
    pub fn new() -> Self {
        let words = array::from_fn(|_| AtomicU64::new(0));
        TableEntry { incarnation: Incarnation::new(), key: AtomicU32::new(0), words }
    }

    /// The owner's: the key that was there opens nothing any more, and `key` opens these words; 0: there is
    /// none. Who looks at it meanwhile finds what was there before, or nothing.
    pub fn put(&self, key: u32, words: [u64; N]) {
        if self.key.swap(0, Ordering::Relaxed) != 0 {
            self.incarnation.end();
        }
        if key == 0 {
            return;
        }
        self.incarnation.begin(|| {
            for (word, value) in self.words.iter().zip(words) {
                word.store(value, Ordering::Relaxed);
            }
            self.key.store(key, Ordering::Relaxed);
        });
    }

    /// What a key opens, and the number of its incarnation; `None`: nothing, or it is changing.
    #[inline]
    pub fn find(&self, key: u32) -> Option<(u32, [u64; N])> {
        self.incarnation.read(|| {
            let same = self.key.load(Ordering::Relaxed) == key && key != 0;
            same.then(|| self.words.each_ref().map(|word| word.load(Ordering::Relaxed)))
        })
    }

    /// Whether the key with this number opens what it did: [`Incarnation::is`].
    #[inline]
    pub fn is(&self, number: u32) -> bool {
        self.incarnation.is(number)
    }
}
