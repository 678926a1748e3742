//! What keys open, and what changes of that, for whoever keeps more of it than this table does: StaR sends it
//! to the cards of peers, which check their requests by it.

use alloc::collections::VecDeque;

use super::import::Import;
use super::window::UNBOUND;
use super::{IN_SGES, MrEntry, MrKind, MrTable, Storage};
use crate::error::NicError;
use crate::room::Room;
use crate::types::{Access, PdId, Qpn};

/// What a key opens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryRule {
    /// lkey and rkey
    pub key: u32,
    /// Protection domain
    pub pd: PdId,
    /// The one QP that may use it; 0: all of the protection domain
    pub qpn: Qpn,
    /// First byte in host memory
    pub addr: u64,
    /// Length, bytes
    pub len: u64,
    /// Address by which the first byte is known in SGEs and work requests
    pub iova: u64,
    /// Access rights
    pub access: Access,
}

/// What became of a key: of an MR that was registered, changed or deregistered, of a window that was bound or
/// is no longer, of an import.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeyChange {
    /// It opens this from now on
    Opened(MemoryRule),
    /// It opens this no longer
    Closed(MemoryRule),
}

/// Changes that were not taken yet, and room for the end of all that is open: to end something needs no
/// memory.
#[derive(Debug, Default)]
pub(super) struct Feed {
    list: VecDeque<KeyChange>,
    /// Keys that open something and are not hidden
    open: usize,
}

impl From<&MrEntry> for MemoryRule {
    fn from(entry: &MrEntry) -> MemoryRule {
        let MrEntry { key, pd, qpn, addr, length: len, iova, access, .. } = *entry;
        MemoryRule { key, pd, qpn, addr, len, iova, access: access.difference(IN_SGES) }
    }
}

impl Import {
    pub(super) fn rule(&self) -> Option<MemoryRule> {
        (!self.hidden).then(|| MemoryRule::from(&self.entry))
    }
}

impl<S: Storage> MrTable<S> {
    /// What keys open, each once.
    pub fn rules(&self) -> impl Iterator<Item = MemoryRule> + '_ {
        let own = (0..self.slots.len() as u32).filter_map(|slot| self.rule_of(slot));
        own.chain(self.imports.iter().filter_map(Import::rule))
    }

    /// What a key opens; `None`: nothing, or nothing that the feed has.
    pub fn rule(&self, key: u32) -> Option<MemoryRule> {
        match self.find(key) {
            Some((slot, _)) => self.rule_of(slot),
            None => self.imports[self.place(key).ok()?].rule(),
        }
    }

    /// What the key of a slot opens; `None`: nothing, or nothing that the feed has.
    pub(super) fn rule_of(&self, slot: u32) -> Option<MemoryRule> {
        let about = self.slots.get(slot as usize).filter(|about| !about.hidden)?;
        let entry = self.entry(slot);
        let open = entry.key != 0 && (about.kind == MrKind::Mr || about.link != UNBOUND);
        open.then(|| MemoryRule::from(&entry))
    }

    /// The feed leaves out what a key opens: there is no memory for it.
    pub fn hide(&mut self, key: u32) {
        let (rule, hidden) = match (self.find(key), self.place(key)) {
            (Some((slot, _)), _) => (self.rule_of(slot), &mut self.slots[slot as usize].hidden),
            (None, Ok(at)) => (self.imports[at].rule(), &mut self.imports[at].hidden),
            _ => return,
        };
        *hidden = true;
        if let (Some(feed), Some(_)) = (&mut self.feed, rule) {
            feed.open -= 1;
        }
    }

    /// From now on changes are kept until they are taken. `Exhausted`: no memory.
    pub fn follow(&mut self) -> Result<(), NicError> {
        let mut feed = Feed { open: self.rules().count(), ..Feed::default() };
        feed.list.make_room(feed.open)?;
        self.feed.get_or_insert(feed);
        Ok(())
    }

    /// The next change.
    pub fn next_change(&mut self) -> Option<KeyChange> {
        self.feed.as_mut()?.list.pop_front()
    }

    /// Room for one key more to be opened, and closed again. `Exhausted`: no memory.
    pub(super) fn make_room_in_feed(&mut self) -> Result<(), NicError> {
        let Some(feed) = &mut self.feed else { return Ok(()) };
        feed.list.make_room(feed.list.len() + feed.open + 2)
    }

    /// A key was opened, and the feed has room for it.
    pub(super) fn note_opened(&mut self, rule: Option<MemoryRule>) {
        if let (Some(feed), Some(rule)) = (&mut self.feed, rule) {
            feed.open += 1;
            feed.list.push_in_room(KeyChange::Opened(rule));
        }
    }

    /// A key opens nothing from now on. The feed has room for it, since it was opened.
    pub(super) fn note_closed(&mut self, rule: Option<MemoryRule>) {
        if let (Some(feed), Some(rule)) = (&mut self.feed, rule) {
            feed.open -= 1;
            feed.list.push_in_room(KeyChange::Closed(rule));
        }
    }
}

#[cfg(test)]
#[path = "feed_tests.rs"]
mod tests;
