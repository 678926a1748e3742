//! A lock that may be held across fork(2), and is let go on both sides of it.
//!
//! std's mutex gives a guard that cannot be let go by another function than the one that holds it.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, Ordering};

const FREE: u32 = 0;
const HELD: u32 = 1;
const AWAITED: u32 = 2;

/// A value, and who may touch it.
pub(crate) struct Lock<T> {
    word: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is touched by the one thread that holds the lock.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    pub(crate) const fn new(value: T) -> Lock<T> {
        Lock { word: AtomicU32::new(FREE), value: UnsafeCell::new(value) }
    }

    /// Runs `work` with the lock held.
    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        self.hold();
        // SAFETY: this thread holds the lock, and nobody else gets at the value.
        let result = work(unsafe { &mut *self.value.get() });
        self.let_go();
        result
    }

    /// Takes the lock, for [`held`](Lock::held) until [`let_go`](Lock::let_go).
    pub(crate) fn hold(&self) {
        if self.word.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_err() {
            while self.word.swap(AWAITED, Ordering::Acquire) != FREE {
                futex(&self.word, libc::FUTEX_WAIT, AWAITED);
            }
        }
    }

    /// The value.
    ///
    /// # Safety
    /// The calling thread took the lock with [`hold`](Lock::hold), or it is the only thread of a child whose
    /// parent's thread did, and has no other reference.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn held(&self) -> &mut T {
        // SAFETY: by contract.
        unsafe { &mut *self.value.get() }
    }

    /// Lets the lock go.
    pub(crate) fn let_go(&self) {
        if self.word.swap(FREE, Ordering::Release) == AWAITED {
            futex(&self.word, libc::FUTEX_WAKE, 1);
        }
    }
}

fn futex(word: &AtomicU32, operation: i32, value: u32) {
    let forever: *const libc::timespec = core::ptr::null();
    crate::errno::kept(|| {
        // SAFETY: the word lives across the call.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                word.as_ptr(),
                operation | libc::FUTEX_PRIVATE_FLAG,
                value,
                forever,
            )
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_at_a_time() {
        let count = Lock::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..10_000).for_each(|_| count.with(|count| *count += 1)));
            }
        });
        assert_eq!(count.with(|count| *count), 40_000);
    }
}
