//! A lock for sections of a few instructions, hardly ever contended: a QP's posts, a CQ's polls.

#[cfg(loom)]
pub use loom::sync::MutexGuard as SpinGuard;
#[cfg(not(loom))]
pub use spinning::{SpinGuard, SpinLock};

/// Under loom, loom's mutex: a waiter that spins has no end in a model of all interleavings.
#[cfg(loom)]
pub struct SpinLock<T>(loom::sync::Mutex<T>);

#[cfg(loom)]
impl<T> SpinLock<T> {
    /// An open lock.
    pub fn new(value: T) -> Self {
        SpinLock(loom::sync::Mutex::new(value))
    }

    /// Takes the lock.
    pub fn lock(&self) -> SpinGuard<'_, T> {
        match self.0.lock() {
            Ok(guard) => guard,
            Err(poisoned) => poisoned.into_inner(),
        }
    }

    /// Takes the lock if it is free.
    pub fn try_lock(&self) -> Option<SpinGuard<'_, T>> {
        self.0.try_lock().ok()
    }
}

#[cfg(not(loom))]
mod spinning {
    use core::cell::UnsafeCell;
    use core::ops::{Deref, DerefMut};

    use crate::sync::{AtomicBool, Ordering, spin_loop, yield_now};

    /// Tries before the waiter lets others run; the holder may have been preempted.
    const SPINS: u32 = 64;

    /// A spin lock around a `T`.
    pub struct SpinLock<T> {
        held: AtomicBool,
        value: UnsafeCell<T>,
    }

    // SAFETY: the value is reached through the guard alone, and there is one guard at a time.
    unsafe impl<T: Send> Sync for SpinLock<T> {}

    impl<T> SpinLock<T> {
        /// An open lock.
        pub fn new(value: T) -> Self {
            SpinLock { held: AtomicBool::new(false), value: UnsafeCell::new(value) }
        }

        /// Takes the lock, spinning and then yielding the CPU until it is free.
        #[inline]
        pub fn lock(&self) -> SpinGuard<'_, T> {
            let mut tries = 0u32;
            while self.held.swap(true, Ordering::Acquire) {
                tries = tries.wrapping_add(1);
                if tries.is_multiple_of(SPINS) {
                    yield_now();
                } else {
                    spin_loop();
                }
            }
            SpinGuard { lock: self }
        }

        /// Takes the lock if it is free.
        #[inline]
        pub fn try_lock(&self) -> Option<SpinGuard<'_, T>> {
            (!self.held.swap(true, Ordering::Acquire)).then(|| SpinGuard { lock: self })
        }
    }

    /// The lock is held while this lives.
    pub struct SpinGuard<'a, T> {
        lock: &'a SpinLock<T>,
    }

    impl<T> Deref for SpinGuard<'_, T> {
        type Target = T;
        #[inline]
        fn deref(&self) -> &T {
            // SAFETY: the guard exists, so this thread holds the lock.
            unsafe { &*self.lock.value.get() }
        }
    }

    impl<T> DerefMut for SpinGuard<'_, T> {
        #[inline]
        fn deref_mut(&mut self) -> &mut T {
            // SAFETY: the guard exists, so this thread holds the lock, and it is borrowed exclusively.
            unsafe { &mut *self.lock.value.get() }
        }
    }

    impl<T> Drop for SpinGuard<'_, T> {
        #[inline]
        fn drop(&mut self) {
            self.lock.held.store(false, Ordering::Release);
        }
    }
}
