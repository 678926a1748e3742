//! Mappings of files that may lose pages under them: who has the file makes it shorter, or there are no huge
//! pages left.
//!
//! A look at such a page is SIGBUS, which would end the board and with it all its clients. The handler here
//! puts zeroes in the place of the whole mapping, and the look goes on; what is written from then on is lost.
//! The board finds out by [`Guarded::is_lost`]. A SIGBUS of anything else goes to whoever had it before.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Once, OnceLock};

use libc::{c_int, c_void, sigaction, siginfo_t};
use memmap2::MmapRaw;

/// Mappings of all boards of the process at most.
const SLOTS: usize = 4096;

/// Where one lies.
struct GuardedMap {
    /// Its first byte; 0: the slot is free, [`TAKEN`]: it is being filled
    start: AtomicUsize,
    len: AtomicUsize,
    lost: AtomicBool,
}

const TAKEN: usize = 1;

static MAPPINGS: [GuardedMap; SLOTS] = [const {
    GuardedMap { start: AtomicUsize::new(0), len: AtomicUsize::new(0), lost: AtomicBool::new(false) }
}; SLOTS];

/// What was done about SIGBUS before.
static BEFORE: OnceLock<sigaction> = OnceLock::new();

/// A mapping whose pages may vanish, and harm nobody if they do.
pub(super) struct Guarded {
    map: MmapRaw,
    slot: &'static GuardedMap,
}

impl Guarded {
    /// # Errors
    /// ENOSPC: the process has too many.
    pub(super) fn new(map: MmapRaw) -> io::Result<Guarded> {
        install()?;
        let claim = |slot: &&GuardedMap| {
            slot.start.compare_exchange(0, TAKEN, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        let slot = MAPPINGS.iter().find(claim).ok_or(io::Error::from_raw_os_error(libc::ENOSPC))?;
        slot.len.store(map.len(), Ordering::Relaxed);
        slot.lost.store(false, Ordering::Relaxed);
        slot.start.store(map.as_ptr() as usize, Ordering::Release);
        Ok(Guarded { map, slot })
    }

    /// Its first byte.
    pub(super) fn as_mut_ptr(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// Pages were missing: it is zeroes now, which nobody else sees.
    pub(super) fn is_lost(&self) -> bool {
        self.slot.lost.load(Ordering::Relaxed)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        /* before the mapping ends, whose addresses another one may get */
        self.slot.start.store(0, Ordering::Release);
    }
}

impl GuardedMap {
    /// Puts zeroes in the mapping's place, if the address is in it.
    fn replace(&self, at: usize) -> bool {
        let start = self.start.load(Ordering::Acquire);
        let len = self.len.load(Ordering::Relaxed);
        if start <= TAKEN || at.wrapping_sub(start) >= len {
            return false;
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the range is a mapping that `Guarded` owns, and to which pointers alone lead; it stays one.
        let done = unsafe { libc::mmap(start as *mut c_void, len, rights, flags, -1, 0) };
        if done == libc::MAP_FAILED {
            return false;
        }
        self.lost.store(true, Ordering::Relaxed);
        true
    }
}

fn install() -> io::Result<()> {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let mut action = MaybeUninit::<sigaction>::zeroed();
        // SAFETY: all zero is a sigaction: the default, with no flags and an empty mask.
        unsafe {
            if libc::sigaction(libc::SIGBUS, ptr::null(), action.as_mut_ptr()) == 0 {
                let _ = BEFORE.set(action.assume_init());
            }
            let mut action: sigaction = MaybeUninit::zeroed().assume_init();
            action.sa_sigaction = on_bus_error as *const () as libc::sighandler_t;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(libc::SIGBUS, &action, ptr::null_mut());
        }
    });
    if BEFORE.get().is_some() { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ENOTSUP)) }
}

/// Touches atomics and makes two system calls at most, which may be done in a handler; errno stays.
extern "C" fn on_bus_error(signal: c_int, info: *mut siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel gives the handler the signal's siginfo, whose address is that of the fault where
    // the kernel itself says why (si_code > 0); errno is this thread's.
    let (errno, at, is_fault) =
        unsafe { (*libc::__errno_location(), (*info).si_addr() as usize, (*info).si_code > 0) };
    if !is_fault || !MAPPINGS.iter().any(|slot| slot.replace(at)) {
        let before = BEFORE.get().map_or(ptr::null(), ptr::from_ref);
        // SAFETY: the action that was there before; who faulted does so again when this returns.
        unsafe {
            libc::sigaction(signal, before, ptr::null_mut());
            if !is_fault {
                libc::raise(signal);
            }
        }
    }
    // SAFETY: this thread's.
    unsafe { *libc::__errno_location() = errno };
}
