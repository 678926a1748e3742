//! How one side of a ring is told that there is something: a word that says what it does until then, and a
//! bell for one that has many rings.
//!
//! A side that polls looks at its rings by itself. One that has very many looks at one word, its [`Bell`],
//! which all others ring. One that sleeps is woken, once. This must not know how.

use crate::OwnLine;
use crate::sync::{AtomicU32, Ordering, fence};

/// A side looks by itself, as zeroed memory has it.
pub(crate) const LOOKS: u32 = 0;
/// It sleeps until it is woken.
pub(crate) const SLEEPS: u32 = 1;
/// It looks where its bell has rung.
pub const LISTENS: u32 = 2;

/// How a side is told of what was written or read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WakeBy {
    /// Not at all: it looks by itself
    Nothing,
    /// By its [`Bell`]
    Bell,
    /// It sleeps, and must be woken
    Call,
}

/// Looks what a side does. One that sleeps is called once.
#[inline]
pub(crate) fn look_at(flag: &AtomicU32) -> WakeBy {
    match flag.load(Ordering::Relaxed) {
        LOOKS => WakeBy::Nothing,
        LISTENS => WakeBy::Bell,
        /* whatever a stranger has written there */
        asleep => match flag.compare_exchange(asleep, LOOKS, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => WakeBy::Call,
            Err(LISTENS) => WakeBy::Bell,
            Err(_) => WakeBy::Nothing,
        },
    }
}

/// A word that says whether something has come since it was last looked at, in memory that others have
/// mapped. All zero: nothing has.
#[repr(C)]
pub struct Bell(OwnLine<AtomicU32>);

impl Bell {
    /// As zeroed memory has it.
    #[allow(clippy::new_without_default, reason = "a part of shared memory, made with it")]
    pub fn new() -> Self {
        Bell(OwnLine(AtomicU32::new(0)))
    }

    /// Something has come: after [`WakeBy::Bell`], whose fence stands between what was stored and this look.
    #[inline]
    pub fn ring(&self) {
        /* one that has rung already is read by many, and not written again */
        if self.0.load(Ordering::Relaxed) == 0 {
            self.0.store(1, Ordering::Release);
        }
    }

    /// Whether it has rung; what came before that is seen from now on.
    #[inline]
    pub fn take(&self) -> bool {
        if self.0.load(Ordering::Relaxed) == 0 {
            return false;
        }
        self.0.swap(0, Ordering::AcqRel);
        /* the bell before the look at the rings: who finds it rung already has stored before this */
        fence(Ordering::SeqCst);
        true
    }
}
