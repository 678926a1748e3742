//! How one side of a ring is notified that there is something: a word that says what it does until then, and
//! a doorbell for one that has many rings.
//!
//! A side that polls looks at its rings by itself. One that has very many polls one word, its
//! [`PeerDoorbell`], which all others ring. One that sleeps is woken, once. This must not know how.

use crate::OwnLine;
use crate::sync::{AtomicU32, Ordering, fence};

/// A side polls its ring, as zeroed memory has it.
pub(crate) const POLLS: u32 = 0;
/// It sleeps until it is woken.
pub(crate) const SLEEPS: u32 = 1;
/// It polls its doorbell.
pub(crate) const AWAITS: u32 = 2;

/// How a side is notified of what was written or read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Notify {
    /// Not at all: it polls
    No,
    /// By its [`PeerDoorbell`]
    Doorbell,
    /// It sleeps, and must be woken
    Wake,
}

/// Looks what a side does. One that sleeps is woken once.
#[inline]
pub(crate) fn how_to_notify(flag: &AtomicU32) -> Notify {
    match flag.load(Ordering::Relaxed) {
        POLLS => Notify::No,
        AWAITS => Notify::Doorbell,
        /* whatever a stranger has written there */
        asleep => match flag.compare_exchange(asleep, POLLS, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Notify::Wake,
            Err(AWAITS) => Notify::Doorbell,
            Err(_) => Notify::No,
        },
    }
}

/// A word that says whether something has come since it was last polled, in memory that others have mapped.
/// All zero: nothing has. Each of them can clear it, too: who polls it looks at its rings now and then
/// nevertheless.
#[repr(C)]
pub struct PeerDoorbell(OwnLine<AtomicU32>);

impl PeerDoorbell {
    /// As zeroed memory has it.
    #[allow(clippy::new_without_default, reason = "a part of shared memory, made with it")]
    pub fn new() -> Self {
        PeerDoorbell(OwnLine(AtomicU32::new(0)))
    }

    /// Something has come: after [`Notify::Doorbell`], behind whose fence this looks.
    #[inline]
    pub fn ring(&self) {
        /* one that was rung already is read by many, and not written again */
        if !self.is_rung() {
            self.0.store(1, Ordering::Release);
        }
    }

    /// Whether it was rung, at a glance: what came before is seen once it is taken.
    #[inline]
    pub fn is_rung(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }

    /// Whether it was rung; what came before that is seen from now on.
    #[inline]
    pub fn take(&self) -> bool {
        if !self.is_rung() {
            return false;
        }
        self.0.swap(0, Ordering::AcqRel);
        /* the doorbell before the look at the rings: who finds it rung has stored before this */
        fence(Ordering::SeqCst);
        true
    }

    /// All flags that say so are set: who looks at the rings behind this misses nothing that is not rung for.
    pub fn arm(&self) {
        fence(Ordering::SeqCst);
    }
}
