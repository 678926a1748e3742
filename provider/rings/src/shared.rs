//! Objects of one process that others look up and use through shared memory (a `cmd_fd`'s table).
//!
//! The owner describes an object in words of its table, and an [`Incarnation`] shows which of them are valid.
//! A reader copies the words and looks whether the incarnation is still the same. Whoever then uses the
//! object does so from a [`ReaderSlot`], for the end of which the owner waits. Both are words in memory that
//! several processes have mapped. This must not know what the words mean, or whether a reader lives.

use crate::sync::{AtomicU32, Ordering, fence, fence_behind_change};

/// Which object a table's entry is about. Odd: one that exists. It changes when an object begins and when it
/// ends, so that no two have the same number.
#[repr(transparent)]
pub struct Incarnation(AtomicU32);

impl Incarnation {
    /// None yet, as zeroed memory has it.
    #[allow(clippy::new_without_default, reason = "a table's part, made with it")]
    pub fn new() -> Self {
        Incarnation(AtomicU32::new(0))
    }

    /// The owner describes an object in an entry that has none: `describe` stores its words.
    pub fn begin(&self, describe: impl FnOnce()) {
        let number = self.0.load(Ordering::Relaxed);
        /* release: the end of the entry's last object before the words of this one. A reader that has one
         * of these words finds the number changed */
        fence(Ordering::Release);
        describe();
        /* release: the words before the number */
        self.0.store(number.wrapping_add(1) | 1, Ordering::Release);
    }

    /// The owner ends the object. Who looks from now on finds none; [`ReaderSlot::wait_for_all`] waits for
    /// those who have looked before.
    pub fn end(&self) {
        let number = self.0.load(Ordering::Relaxed);
        self.0.store((number | 1).wrapping_add(1), Ordering::SeqCst);
    }

    /// The words that `copy` loads, and the number of the object that they are of; `None` if there is none,
    /// or it changed meanwhile.
    ///
    /// Loads are relaxed here and ordered by fences: the pages may be read-only.
    pub fn read<T>(&self, copy: impl FnOnce() -> Option<T>) -> Option<(u32, T)> {
        let number = self.0.load(Ordering::Relaxed);
        if number & 1 == 0 {
            return None;
        }
        fence(Ordering::Acquire);
        let words = copy()?;
        /* acquire: the words before the second look at the number */
        fence(Ordering::Acquire);
        self.is(number).then_some((number, words))
    }

    /// Whether the object with this number exists. Who asks from a reader's slot may use it until the slot's
    /// end.
    pub fn is(&self, number: u32) -> bool {
        self.0.load(Ordering::Relaxed) == number
    }
}

/// A place from which one reader at a time uses the owner's objects. Odd while it does.
#[repr(transparent)]
pub struct ReaderSlot(AtomicU32);

impl ReaderSlot {
    /// A free one, as zeroed memory has it.
    #[allow(clippy::new_without_default, reason = "a table's part, made with it")]
    pub fn new() -> Self {
        ReaderSlot(AtomicU32::new(0))
    }

    /// A reader takes the slot over, maybe of one that died in it.
    pub fn reset(&self) {
        self.0.fetch_add(self.0.load(Ordering::Relaxed) & 1, Ordering::SeqCst);
    }

    /// From here on the owner waits for this reader. What the owner has ended before is seen to have ended.
    #[inline]
    pub fn enter(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        /* the slot before the look at the incarnation; see `wait_for_all` */
        fence_behind_change();
    }

    /// What the reader did comes before this.
    #[inline]
    pub fn leave(&self) {
        /* relaxed: written by this side alone while it is inside */
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
    }

    /// Changes with every [`ReaderSlot::enter`] and [`ReaderSlot::leave`].
    pub fn uses(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }

    /// The owner, after the end of an object: waits until everybody who used one has left. `pause` waits a
    /// little for the reader of a slot, by its position, and gives whether it lives.
    pub fn wait_for_all<'a>(
        slots: impl Iterator<Item = &'a ReaderSlot>,
        mut pause: impl FnMut(usize) -> bool,
    ) {
        /* the object's end before the looks at the slots: of a reader and the owner, one sees the other */
        fence(Ordering::SeqCst);
        for (position, slot) in slots.enumerate() {
            let seen = slot.0.load(Ordering::Acquire);
            while seen & 1 == 1 && slot.0.load(Ordering::Acquire) == seen && pause(position) {}
        }
    }
}
