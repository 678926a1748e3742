//! The process that the library is loaded into: its forks, its random numbers, its page of counters.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, Once, PoisonError};

use starverbs_backend as backend;
pub(crate) use starverbs_backend::seed;

use crate::error::Result;
use crate::stat::StatPage;

/// Forks of this process so far, counted in the children: a device of an earlier count is the parent's.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Forks so far, as far as anybody needs to know.
#[inline]
pub(crate) fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// Counts forks in the children, from the first device on, and has them hold nothing of the device's that
/// others see.
pub(crate) fn watch_forks() {
    extern "C" fn in_child() {
        FORKS.fetch_add(1, Ordering::Relaxed);
        backend::let_go();
    }
    static ONCE: Once = Once::new();
    // SAFETY: the handler is async-signal-safe, and stays as long as the library: it must not be
    // unloaded, as every library with threads.
    ONCE.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
    });
}

/// The page of this process: one for all devices that it opens in turn.
pub(crate) fn page(port: u16) -> Result<StatPage> {
    static PAGE: Mutex<Option<(u32, StatPage)>> = Mutex::new(None);
    let forks = forks();
    let mut page = PAGE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((of, page)) = *page
        && of == forks
    {
        return Ok(page);
    }
    let new = StatPage::create(std::process::id(), port, 0)?;
    *page = Some((forks, new));
    Ok(new)
}

/// Processes of this one's user may copy from and to its memory by its number, where only its parents might
/// (Yama's ptrace_scope 1).
pub(crate) fn let_others_trace() {
    /* where there is no Yama, they may */
    // SAFETY: takes numbers.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0) };
}
