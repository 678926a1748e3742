//! MRs of other cards that this card opens too, each under the key that its own card gave it.
//!
//! They stand beside the table, in the order of their keys: a slot of this card does not concern another
//! card's key. Only a key that is not in the table is looked for here, so that what uses no imports pays
//! nothing for them.

use super::{MrAttr, MrEntry, MrTable, Storage, check};
use crate::error::NicError;
use crate::room::Room;
use crate::types::PdId;

/// An MR of another card.
#[derive(Clone, Copy, Debug)]
pub(super) struct Import {
    pub(super) entry: MrEntry,
    /// As of a [`MrSlot`](super::MrSlot)
    pub(super) hidden: bool,
}

impl<S: Storage> MrTable<S> {
    /// Opens `attr` under a key of another card. `Busy`: this card has something under that key already;
    /// else as `register`.
    pub fn import(&mut self, key: u32, attr: MrAttr) -> Result<(), NicError> {
        check(&attr)?;
        if key == 0 {
            return Err(NicError::Invalid);
        }
        let at = match self.place(key) {
            Err(at) if self.find(key).is_none() => at,
            _ => return Err(NicError::Busy),
        };
        self.imports.make_room(self.imports.len() + 1)?;
        self.make_room_in_feed()?;
        let import = Import { entry: MrEntry { key, ..MrEntry::mr(&attr) }, hidden: false };
        self.imports.insert(at, import);
        self.note_opened(import.rule());
        Ok(())
    }

    /// Ends an import; gives its protection domain.
    pub fn unimport(&mut self, key: u32) -> Result<PdId, NicError> {
        let at = self.place(key).map_err(|_| NicError::NotFound)?;
        let import = self.imports.remove(at);
        self.note_closed(import.rule());
        Ok(import.entry.pd)
    }

    /// The import of this key.
    #[cold]
    pub(super) fn imported(&self, key: u32) -> Option<&MrEntry> {
        self.imports.get(self.place(key).ok()?).map(|import| &import.entry)
    }

    /// Where it stands among the imports, or would.
    pub(super) fn place(&self, key: u32) -> Result<usize, usize> {
        self.imports.binary_search_by_key(&key, |import| import.entry.key)
    }
}
