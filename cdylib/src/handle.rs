//! What all handles share: making them, telling live ones from dead ones, waiting for acks.
//!
//! Owns the pthread fields of the public structs and the rule by which a destroy verb waits
//! (ibv_get_async_event(3), ibv_get_cq_event(3)): every event that was delivered for the object has been
//! acknowledged. It must not know any object in particular.

use crate::edge::Errno;
use core::ptr::NonNull;
use starverbs_verbs::{VerbsError, log};
use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// `pointer`, unless the program passed NULL.
#[inline]
pub(crate) fn given<T>(pointer: *mut T) -> Result<NonNull<T>, Errno> {
    NonNull::new(pointer).ok_or(libc::EINVAL)
}

/// The errno value of a control call that the card refused, which says why if the setting LOG asks for it.
pub(crate) fn errno(error: VerbsError) -> Errno {
    log::refused(&error);
    error.errno()
}

/// The errno value of a call on the data path.
#[inline]
pub(crate) fn quiet(error: VerbsError) -> Errno {
    error.errno()
}

/// Says on standard error, once a process, why the card cannot be had: C's errno cannot name a setting.
pub(crate) fn complain(error: VerbsError) -> Errno {
    static SAID: std::sync::Once = std::sync::Once::new();
    SAID.call_once(|| log::write_line(format_args!("{error}")));
    error.errno()
}

/// A public struct with every byte zero: numbers 0, pointers NULL, no functions.
///
/// # Safety
/// All-zero bytes must be a valid `T`.
pub(crate) unsafe fn zeroed<T>() -> T {
    // SAFETY: the caller vouches for `T`.
    unsafe { core::mem::MaybeUninit::zeroed().assume_init() }
}

/// A copy of a struct that a program built with an older header ends early: its first `room` bytes, and
/// zeroes. (A reference would promise the compiler the whole struct.)
///
/// # Safety
/// `from` names that many bytes of a `T`, of which all-zero bytes are valid fields.
pub(crate) unsafe fn beginning<T>(from: *const T, room: usize) -> T {
    let mut to = core::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: the caller vouches for `from` and for `T`; `to` is a local of its own.
    unsafe {
        core::ptr::copy_nonoverlapping(from.cast::<u8>(), to.as_mut_ptr().cast(), room.min(size_of::<T>()));
        to.assume_init()
    }
}

/// The address under which the card reports events for a handle.
pub(crate) fn cookie<T>(handle: *mut T) -> u64 {
    handle.expose_provenance() as u64
}

/// The handles that may receive events from one source (a context's async events, a channel's completions).
///
/// An event names a handle by its address. Between the moment it is read and the moment it is counted for
/// that handle, the handle must not go away, so both sides meet under this lock: a reader counts only if the
/// handle is still listed, and a destroy verb takes the handle off the list before it looks at the count. An
/// event for a handle that has gone is dropped.
#[derive(Default)]
pub(crate) struct LiveHandles(Mutex<HashSet<u64>>);

impl LiveHandles {
    fn lock(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Room to list a handle, and those of some calls under way in other threads. ENOMEM.
    pub(crate) fn make_room(&self) -> Result<(), Errno> {
        self.lock().try_reserve(16).map_err(|_| libc::ENOMEM)
    }

    /// Lists a handle, which needs no memory as there is room.
    pub(crate) fn add(&self, cookie: u64) {
        self.lock().insert(cookie);
    }

    /// Takes a handle off the list.
    pub(crate) fn remove(&self, cookie: u64) {
        self.lock().remove(&cookie);
    }

    /// Runs `count` while the handle is sure to be alive; says whether it was.
    pub(crate) fn with(&self, cookie: u64, count: impl FnOnce()) -> bool {
        let live = self.lock();
        let found = live.contains(&cookie);
        if found {
            count();
        }
        found
    }
}

/// Adds `n` to a counter of acknowledged events and wakes a destroy verb that waits for them.
///
/// # Safety
/// The three pointers are fields of one live handle.
pub(crate) unsafe fn ack(
    mutex: *mut libc::pthread_mutex_t,
    cond: *mut libc::pthread_cond_t,
    acked: *mut u32,
    n: u32,
) {
    // SAFETY: the caller vouches for the fields, which were initialised when the handle was made; `acked`
    // changes under the mutex only.
    unsafe {
        libc::pthread_mutex_lock(mutex);
        *acked = (*acked).wrapping_add(n);
        libc::pthread_cond_broadcast(cond);
        libc::pthread_mutex_unlock(mutex);
    }
}

/// Waits until as many events were acknowledged as `delivered`.
///
/// # Safety
/// The three pointers are fields of one live handle.
pub(crate) unsafe fn wait_for_acks(
    mutex: *mut libc::pthread_mutex_t,
    cond: *mut libc::pthread_cond_t,
    acked: *mut u32,
    delivered: u32,
) {
    // SAFETY: as in `ack`; pthread_cond_wait gives the mutex up while it sleeps.
    unsafe {
        libc::pthread_mutex_lock(mutex);
        while acked.read() != delivered {
            libc::pthread_cond_wait(cond, mutex);
        }
        libc::pthread_mutex_unlock(mutex);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn events_count_for_live_handles_only() {
        let live = LiveHandles::default();
        let mut counted = 0;
        live.add(8);
        assert!(live.with(8, || counted += 1));
        live.remove(8);
        assert!(!live.with(8, || counted += 1));
        assert_eq!(counted, 1);
    }

    #[test]
    fn waiting_ends_with_the_last_ack() {
        struct Fields(libc::pthread_mutex_t, libc::pthread_cond_t, u32);
        // SAFETY: the pthread fields are only reached through the functions under test.
        unsafe impl Sync for Fields {}
        let fields = Fields(libc::PTHREAD_MUTEX_INITIALIZER, libc::PTHREAD_COND_INITIALIZER, 0);
        let cell = std::cell::UnsafeCell::new(fields);
        let at = cell.get() as usize;
        let done = AtomicBool::new(false);
        std::thread::scope(|threads| {
            let at = at as *mut Fields;
            // SAFETY: `cell` outlives the scope and is reached through raw pointers alone.
            let (mutex, cond, acked) = unsafe { (&raw mut (*at).0, &raw mut (*at).1, &raw mut (*at).2) };
            let waiter = {
                let (mutex, cond, acked) = (mutex as usize, cond as usize, acked as usize);
                let done = &done;
                threads.spawn(move || {
                    // SAFETY: see above.
                    unsafe { wait_for_acks(mutex as *mut _, cond as *mut _, acked as *mut _, 3) };
                    done.store(true, Ordering::SeqCst);
                })
            };
            // SAFETY: see above.
            unsafe { ack(mutex, cond, acked, 2) };
            assert!(!done.load(Ordering::SeqCst));
            // SAFETY: see above.
            unsafe { ack(mutex, cond, acked, 1) };
            waiter.join().expect("the waiter ends");
        });
        assert!(done.load(Ordering::SeqCst));
    }
}
