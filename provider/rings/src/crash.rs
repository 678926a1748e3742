//! For loom: a process that is killed between two stores to atomics of shared memory. What its thread stores
//! to those after that never comes to be.
//!
//! The thread itself runs on, and what it writes beside atomics is there: nobody may look at that before an
//! atomic says so, which loom reports. The model ends the thread at the next look at [`has_crashed`].

use core::cell::Cell;

use super::Ordering;
use loom::sync::atomic;

loom::thread_local! {
    /// Stores to shared memory that the thread lives for; `None`: for ever.
    static LEFT: Cell<Option<u32>> = Cell::new(None);
}

/// This thread's process is killed after so many stores.
pub fn crash_after(stores: u32) {
    LEFT.with(|left| left.set(Some(stores)));
}

/// Whether it was.
pub fn has_crashed() -> bool {
    LEFT.with(|left| left.get() == Some(0))
}

/// Whether one more store comes to be.
fn stores() -> bool {
    /* a thread that ends drops what it has, maybe behind this */
    let count = |left: &Cell<Option<u32>>| match left.get() {
        None => true,
        Some(0) => false,
        Some(more) => {
            left.set(Some(more - 1));
            true
        }
    };
    LEFT.try_with(count).unwrap_or(true)
}

macro_rules! mortal {
    ($($atomic:ident of $value:ty),+) => {$(
        /// Loom's, of which a killed process changes nothing.
        pub(crate) struct $atomic(atomic::$atomic);

        #[allow(dead_code, reason = "each of them has all")]
        impl $atomic {
            pub(crate) fn new(value: $value) -> Self {
                Self(atomic::$atomic::new(value))
            }

            pub(crate) fn load(&self, order: Ordering) -> $value {
                self.0.load(order)
            }

            pub(crate) fn store(&self, value: $value, order: Ordering) {
                if stores() {
                    self.0.store(value, order);
                }
            }

            pub(crate) fn swap(&self, value: $value, order: Ordering) -> $value {
                if stores() { self.0.swap(value, order) } else { self.0.load(Ordering::Relaxed) }
            }

            pub(crate) fn fetch_add(&self, add: $value, order: Ordering) -> $value {
                if stores() { self.0.fetch_add(add, order) } else { self.0.load(Ordering::Relaxed) }
            }

            pub(crate) fn fetch_sub(&self, sub: $value, order: Ordering) -> $value {
                if stores() { self.0.fetch_sub(sub, order) } else { self.0.load(Ordering::Relaxed) }
            }

            pub(crate) fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                order: Ordering,
                failed: Ordering,
            ) -> Result<$value, $value> {
                if stores() {
                    self.0.compare_exchange(current, new, order, failed)
                } else {
                    Err(self.0.load(Ordering::Relaxed))
                }
            }
        }
    )+};
}

mortal!(AtomicU32 of u32, AtomicU64 of u64);
