//! The card's lock: a mutex of which a try and its end are one instruction each.
//!
//! std's looks at each of both whether the thread panics, for a poison that nobody here heeds: 14 of the
//! instructions of every call. Who waits sleeps in the kernel, as there.

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::panic::RefUnwindSafe;
use std::sync::atomic::{AtomicU32, Ordering};

const OPEN: u32 = 0;
const HELD: u32 = 1;
/// Held, and somebody may sleep until it is open.
const AWAITED: u32 = 2;

/// Looks at a lock that is held before one sleeps, as std's.
const SPINS: u32 = 100;

/// A mutex around a `T`.
pub(super) struct CardLock<T> {
    state: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached through the guard alone, and there is one guard at a time.
unsafe impl<T: Send> Sync for CardLock<T> {}
/// A holder that panicked leaves what it guards as it is, as who comes next knows.
impl<T> RefUnwindSafe for CardLock<T> {}

/// The lock is held while this lives.
pub(super) struct CardGuard<'a, T> {
    lock: &'a CardLock<T>,
    /// It may go where a `&mut T` may
    value: PhantomData<&'a mut T>,
}

impl<'a, T> CardGuard<'a, T> {
    /// Of a lock that was just taken.
    #[inline]
    fn of(lock: &'a CardLock<T>) -> Self {
        CardGuard { lock, value: PhantomData }
    }
}

impl<T> CardLock<T> {
    pub(super) fn new(value: T) -> CardLock<T> {
        CardLock { state: AtomicU32::new(OPEN), value: UnsafeCell::new(value) }
    }

    /// Takes the lock if it is open.
    #[inline]
    pub(super) fn try_lock(&self) -> Option<CardGuard<'_, T>> {
        let taken = self.state.compare_exchange(OPEN, HELD, Ordering::Acquire, Ordering::Relaxed);
        taken.is_ok().then(|| CardGuard::of(self))
    }

    /// Takes the lock as soon as it is open.
    pub(super) fn lock(&self) -> CardGuard<'_, T> {
        if let Some(guard) = self.try_lock() {
            return guard;
        }
        if self.spin() == OPEN
            && let Some(guard) = self.try_lock()
        {
            return guard;
        }
        /* who has waited knows not who else does, and takes it as one that is awaited */
        while self.state.swap(AWAITED, Ordering::Acquire) != OPEN {
            // SAFETY: the kernel compares a word of ours, which lives as long as this call, and sleeps.
            unsafe {
                libc::syscall(
                    libc::SYS_futex,
                    self.state.as_ptr(),
                    libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                    AWAITED,
                    std::ptr::null::<libc::timespec>(),
                );
            }
            self.spin();
        }
        CardGuard::of(self)
    }

    /// Looks for a moment whether the lock opens: a program's polls take it again before one that slept is
    /// awake, and hold it for less than that. Gives what it is then.
    fn spin(&self) -> u32 {
        for _ in 0..SPINS {
            let state = self.state.load(Ordering::Relaxed);
            if state != HELD {
                return state;
            }
            std::hint::spin_loop();
        }
        HELD
    }

    #[cold]
    #[inline(never)]
    fn wake_one(&self) {
        // SAFETY: the kernel looks for sleepers by the address alone.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.state.as_ptr(),
                libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
                1,
            );
        }
    }
}

impl<T> Deref for CardGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the guard exists, so the lock is held for it.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for CardGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard exists, so the lock is held for it, and it is borrowed exclusively.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for CardGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        /* a swap: `PendingDoorbells` has it for a fence, too */
        if self.lock.state.swap(OPEN, Ordering::Release) == AWAITED {
            self.lock.wake_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Many threads that wait and try; each turn is alone, and none is lost.
    #[test]
    fn one_at_a_time_has_it() {
        const TURNS: u32 = 5_000;
        let lock = CardLock::new((0, 0));
        std::thread::scope(|scope| {
            for waits in [true, true, true, false] {
                let lock = &lock;
                scope.spawn(move || {
                    let mut left = TURNS;
                    while left > 0 {
                        let guard = if waits { Some(lock.lock()) } else { lock.try_lock() };
                        let Some(mut guard) = guard else { continue };
                        assert_eq!(guard.0, guard.1, "somebody else is inside");
                        guard.0 += 1;
                        if left.is_multiple_of(64) {
                            std::thread::yield_now();
                        }
                        guard.1 += 1;
                        left -= 1;
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), (4 * TURNS, 4 * TURNS));
        assert_eq!(lock.state.load(Ordering::Relaxed), OPEN);
    }
}
