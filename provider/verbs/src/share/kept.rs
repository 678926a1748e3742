//! What several handles of this process share: made for the first, ended with the last.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::Tag;
use crate::error::{Result, VerbsError};

/// Imports by what they import. The lock is held while one is made or ended, so that nobody meets a half of
/// one.
pub(crate) struct ImportTable<T>(Mutex<HashMap<Tag, (usize, T)>>);

impl<T> Default for ImportTable<T> {
    fn default() -> Self {
        ImportTable(Mutex::default())
    }
}

impl<T: Copy> ImportTable<T> {
    /// One more handle of `tag`; the first makes it.
    pub(crate) fn join(&self, tag: Tag, make: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((handles, made)) = all.get_mut(&tag) {
            *handles += 1;
            return Ok(*made);
        }
        all.try_reserve(1).map_err(|_| VerbsError::NoMemory("imports"))?;
        let made = make()?;
        all.insert(tag, (1, made));
        Ok(made)
    }

    /// One handle less; the last ends it.
    pub(crate) fn leave(&self, tag: Tag, end: impl FnOnce(T)) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((handles, made)) = all.get_mut(&tag) else { return };
        *handles -= 1;
        if *handles == 0 {
            end(*made);
            all.remove(&tag);
        }
    }
}
