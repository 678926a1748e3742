//! The process that the library is loaded into: its forks, its random numbers, its page of counters.

use std::sync::{Mutex, PoisonError};

pub(crate) use starverbs_backend::{forks, seed, watch_forks};

use crate::error::Result;
use crate::stat::StatPage;

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
