//! MRs of other cards that this card opens too, each under the key that its own card gave it.
//!
//! They stand beside the table, in the order of their keys: a slot of this card says nothing about another
//! card's key. Only a key that is not in the table is looked for here, so that what uses no imports pays
//! nothing for them.

use core::num::NonZeroU32;

use super::{Entry, MrAttr, MrTable, check};
use crate::error::NicError;
use crate::room::Room;
use crate::types::PdId;

impl MrTable {
    /// Opens `attr` under a key of another card. `Busy`: this card has something under that key already;
    /// else as `register`.
    pub fn import(&mut self, key: u32, attr: MrAttr) -> Result<(), NicError> {
        check(&attr)?;
        let key = NonZeroU32::new(key).ok_or(NicError::Invalid)?;
        let at = match self.place(key.get()) {
            Err(at) if self.pd(key.get()).is_none() => at,
            _ => return Err(NicError::Busy),
        };
        self.imports.make_room(self.imports.len() + 1)?;
        self.imports.insert(at, Entry { key: Some(key), ..Entry::mr(&attr) });
        Ok(())
    }

    /// Ends an import; gives its protection domain.
    pub fn unimport(&mut self, key: u32) -> Result<PdId, NicError> {
        let at = self.place(key).map_err(|_| NicError::NotFound)?;
        Ok(self.imports.remove(at).pd)
    }

    /// The import of this key.
    #[cold]
    pub(super) fn imported(&self, key: u32) -> Option<&Entry> {
        self.imports.get(self.place(key).ok()?)
    }

    fn place(&self, key: u32) -> Result<usize, usize> {
        self.imports.binary_search_by_key(&Some(key), |entry| entry.key.map(NonZeroU32::get))
    }
}
