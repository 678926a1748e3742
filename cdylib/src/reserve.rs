//! Memory for when there is none: this library's allocator, with a reserve behind the process's.
//!
//! Rust ends the process when an allocation fails that its caller did not expect to fail. What grows with
//! what a program asks for (rings, the card's tables) is allocated where failing is expected, and becomes
//! ENOMEM. The small rest, a handle or a node, comes from the reserve then, so that the call under way ends
//! well, whichever way; a call that makes something new is refused ([`has_room`]) while half of the reserve
//! is gone. What was taken goes back with the object.
//!
//! What is allocated here is counted beside the rings ([`budget`]), so that what is too much for the machine
//! is refused before the kernel ends the process.
//!
//! The reserve is part of the library's zeroed data: its pages cost nothing until one is used. Owns those
//! bytes and who has which; nothing here takes a lock or waits, so a forked child may use it.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use starverbs_verbs::budget;
use std::alloc::{GlobalAlloc, Layout, System};

/// Slots of one size.
struct Class {
    size: usize,
    count: usize,
    /// Where the first one lies
    at: usize,
    /// Its words of [`TAKEN`]
    words: core::ops::Range<usize>,
}

const KIB: usize = 1 << 10;
/// Small slots first. Each kind of object takes a few of the first two classes; a table of small programs
/// fits the others.
const CLASSES: [Class; 4] = [
    Class { size: 512, count: 512, at: 0, words: 0..8 },
    Class { size: 4 * KIB, count: 128, at: 256 * KIB, words: 8..10 },
    Class { size: 64 * KIB, count: 16, at: 768 * KIB, words: 10..11 },
    Class { size: 1024 * KIB, count: 2, at: 1792 * KIB, words: 11..12 },
];
const TOTAL: usize = 3840 * KIB;
const PAGE: usize = 4 * KIB;
/// What must be there before something new is made although the reserve is low.
const ENOUGH: usize = 64 * KIB;

#[repr(C, align(4096))]
struct Pool(UnsafeCell<[u8; TOTAL]>);

// SAFETY: a slot is touched by whoever took it alone.
unsafe impl Sync for Pool {}

static POOL: Pool = Pool(UnsafeCell::new([0; TOTAL]));
/// A bit for each slot in use.
static TAKEN: [AtomicU64; 12] = [const { AtomicU64::new(0) }; 12];
/// How many bits are set: 0 is all that anybody looks at in good times.
static IN_USE: AtomicUsize = AtomicUsize::new(0);

fn base() -> *mut u8 {
    POOL.0.get().cast()
}

/// A slot for `layout`; NULL if none is left.
#[cold]
fn take(layout: Layout) -> *mut u8 {
    let fits = |class: &&Class| layout.size() <= class.size && layout.align() <= class.size.min(PAGE);
    for class in CLASSES.iter().filter(fits) {
        for (at, word) in class.words.clone().enumerate() {
            let slots = class.count.saturating_sub(at * 64).min(64);
            while let Some(bit) = lowest_clear(TAKEN[word].load(Ordering::Relaxed), slots) {
                if TAKEN[word].fetch_or(1 << bit, Ordering::Acquire) >> bit & 1 == 0 {
                    IN_USE.fetch_add(1, Ordering::Relaxed);
                    let slot = at * 64 + bit;
                    // SAFETY: the class's slots lie inside the pool.
                    return unsafe { base().add(class.at + slot * class.size) };
                }
            }
        }
    }
    core::ptr::null_mut()
}

/// Number of the lowest of so many bits that is not set.
fn lowest_clear(word: u64, bits: usize) -> Option<usize> {
    let bit = word.trailing_ones() as usize;
    (bit < bits).then_some(bit)
}

/// Gives back what `take` gave; false: it is not of the reserve.
#[inline]
fn give(at: *mut u8) -> bool {
    let offset = at.addr().wrapping_sub(base().addr());
    if offset >= TOTAL {
        return false;
    }
    for class in &CLASSES {
        if offset < class.at + class.count * class.size {
            let slot = (offset - class.at) / class.size;
            TAKEN[class.words.start + slot / 64].fetch_and(!(1 << (slot % 64)), Ordering::Release);
            IN_USE.fetch_sub(1, Ordering::Relaxed);
            break;
        }
    }
    true
}

/// Whether something new may be made: a call takes a handful of slots at most, so half of each size serve the
/// calls of many threads. False: there is no memory.
pub(crate) fn has_room() -> bool {
    let reserved = IN_USE.load(Ordering::Relaxed) == 0
        || is_left(2, &CLASSES)
        || (is_left(4, &CLASSES[..2]) && memory_is_back());
    reserved && budget::has_room()
}

/// What an allocation takes, with malloc's own part of it.
const fn cost(size: usize) -> usize {
    size + 16
}

/// Whether one of so many parts of each class is left. A quarter of the small ones is for what nobody
/// refuses: what peers and timers ask of the card.
#[cold]
fn is_left(parts: usize, classes: &[Class]) -> bool {
    let taken = |class: &Class| -> u32 {
        TAKEN[class.words.clone()].iter().map(|word| word.load(Ordering::Relaxed).count_ones()).sum()
    };
    classes.iter().all(|class| (class.count - taken(class) as usize) * parts >= class.count)
}

/// Objects that live long may keep the reserve low when others have given memory back.
#[cold]
fn memory_is_back() -> bool {
    let Ok(layout) = Layout::from_size_align(ENOUGH, PAGE) else { return false };
    // SAFETY: the layout has a size, and what is given goes back at once.
    unsafe {
        let at = System.alloc(layout);
        if !at.is_null() {
            System.dealloc(at, layout);
        }
        !at.is_null()
    }
}

/// The process's allocator, and the reserve.
struct Reserve;

#[global_allocator]
static ALLOCATOR: Reserve = Reserve;

// SAFETY: memory comes from the system's allocator or is a slot that nobody else has, large and aligned
// enough, and goes back to where it came from. Nothing here unwinds.
unsafe impl GlobalAlloc for Reserve {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's terms.
        let at = unsafe { System.alloc(layout) };
        let at = if at.is_null() { take(layout) } else { at };
        if !at.is_null() {
            budget::add(cost(layout.size()));
        }
        at
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's terms.
        let mut at = unsafe { System.alloc_zeroed(layout) };
        if at.is_null() {
            at = take(layout);
            if !at.is_null() {
                // SAFETY: a slot of at least this size.
                unsafe { at.write_bytes(0, layout.size()) };
            }
        }
        if !at.is_null() {
            budget::add(cost(layout.size()));
        }
        at
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        budget::give(cost(layout.size()));
        if !give(at) {
            // SAFETY: the caller's terms; not of the reserve, so of the system's.
            unsafe { System.dealloc(at, layout) }
        }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let ours = at.addr().wrapping_sub(base().addr()) < TOTAL;
        if !ours {
            // SAFETY: the caller's terms.
            let new = unsafe { System.realloc(at, layout, size) };
            if !new.is_null() {
                budget::add(size);
                budget::give(layout.size());
                return new;
            }
        }
        // SAFETY: the caller vouches that the new size does not overflow with this alignment.
        let new = unsafe { self.alloc(Layout::from_size_align_unchecked(size, layout.align())) };
        if !new.is_null() {
            // SAFETY: two allocations, of at least as many bytes as are copied; the old one is given up.
            unsafe {
                new.copy_from_nonoverlapping(at, layout.size().min(size));
                self.dealloc(at, layout);
            }
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_fit_are_nobody_elses_and_go_back() {
        let total: usize = CLASSES.iter().map(|class| class.size * class.count).sum();
        assert_eq!(total, TOTAL);
        let sizes = [1, 512, 513, 4096, 60_000, 1 << 20];
        let mut taken = Vec::with_capacity(256);
        for size in sizes.into_iter().cycle().take(240) {
            let layout = Layout::from_size_align(size, 64).unwrap();
            let at = take(layout);
            if !at.is_null() {
                assert!(at.addr().is_multiple_of(64));
                // SAFETY: the slot is this test's.
                unsafe { at.write_bytes(size as u8, size) };
                taken.push((at, size));
            }
        }
        for (at, size) in &taken {
            // SAFETY: the slot is this test's.
            let bytes = unsafe { core::slice::from_raw_parts(*at, *size) };
            assert!(bytes.iter().all(|byte| *byte == *size as u8));
        }
        assert!(!is_left(2, &CLASSES), "the two largest are gone");
        assert!(take(Layout::from_size_align(1 << 20, 64).unwrap()).is_null());
        assert!(taken.iter().all(|(at, _)| give(*at)));
        assert!(is_left(2, &CLASSES) && !give(Box::into_raw(Box::new([0u8; 8])).cast()));
        assert!(take(Layout::from_size_align(8, 8192).unwrap()).is_null(), "no such alignment");
    }
}
