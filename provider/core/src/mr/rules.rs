//! What keys open, for who tells the cards of peers: they check there what they ask for.

use alloc::collections::VecDeque;
use core::num::NonZeroU32;

use super::window::UNBOUND;
use super::{Entry, HIDDEN, IN_SGES, KEY_BITS, Kind, MrTable};
use crate::error::NicError;
use crate::room::Room;
use crate::types::{Access, PdId, Qpn};

/// What a key opens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rule {
    /// lkey and rkey
    pub key: u32,
    /// Protection domain
    pub pd: PdId,
    /// The one QP that may use it; 0: all of the protection domain
    pub qpn: Qpn,
    /// First byte in host memory
    pub addr: u64,
    /// Bytes
    pub len: u64,
    /// Address by which the first byte is known in SGEs and work requests
    pub iova: u64,
    /// Rights
    pub access: Access,
}

/// A window was bound, or is bound no longer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// Peers may do this from now on
    Bound(Rule),
    /// Peers may do this no longer
    Unbound(Rule),
}

/// What became of windows, and room for what will become of those that are bound.
#[derive(Debug, Default)]
pub(super) struct Changes {
    list: VecDeque<Change>,
    /// Windows that are bound and not hidden: the end of each has room in `list`
    bound: usize,
}

impl Entry {
    /// What its key opens; `None`: nothing.
    pub(super) fn rule(&self) -> Option<Rule> {
        let Entry { addr, length: len, iova, access, pd, qpn, link, kind, .. } = *self;
        let key = self.key.map(NonZeroU32::get)?;
        let open = (kind == Kind::Mr || link != UNBOUND) && !access.contains(HIDDEN);
        open.then_some(Rule { key, pd, qpn, addr, len, iova, access: access.difference(IN_SGES) })
    }
}

impl MrTable {
    /// What keys open, each once.
    pub fn rules(&self) -> impl Iterator<Item = Rule> + '_ {
        self.entries.iter().chain(&self.imports).filter_map(Entry::rule)
    }

    /// What a key opens.
    pub fn rule(&self, key: u32) -> Option<Rule> {
        let entry = self.entries.get(((key >> KEY_BITS) ^ self.mask) as usize);
        let entry = entry.filter(|entry| entry.key.map(NonZeroU32::get) == Some(key));
        entry.or_else(|| self.imported(key))?.rule()
    }

    /// What a key opens is no rule: who tells peers has no memory for it.
    pub fn hide(&mut self, key: u32) {
        let slot = (key >> KEY_BITS) ^ self.mask;
        let entry = self.entries.get_mut(slot as usize);
        if let Some(entry) = entry.filter(|entry| entry.key.map(NonZeroU32::get) == Some(key)) {
            if entry.kind != Kind::Mr
                && entry.rule().is_some()
                && let Some(changes) = &mut self.changes
            {
                changes.bound -= 1;
            }
            entry.access |= HIDDEN;
        }
    }

    /// From now on it is kept which windows are bound, and which no longer are. `Exhausted`: no memory.
    pub fn watch_windows(&mut self) -> Result<(), NicError> {
        let windows = self.entries.iter().filter(|entry| entry.kind != Kind::Mr && entry.rule().is_some());
        let mut changes = Changes { bound: windows.count(), ..Changes::default() };
        changes.list.make_room(changes.bound)?;
        self.changes.get_or_insert(changes);
        Ok(())
    }

    /// The next thing that became of a window.
    pub fn next_change(&mut self) -> Option<Change> {
        self.changes.as_mut()?.list.pop_front()
    }

    /// A window was bound: whoever wants to know is told, and will be told of its end. Without memory for
    /// that it is hidden.
    pub(super) fn note_bound(&mut self, slot: u32) {
        let Some(entry) = self.entries.get_mut(slot as usize) else { return };
        if let (Some(changes), Some(rule)) = (&mut self.changes, entry.rule()) {
            if changes.list.make_room(changes.list.len() + changes.bound + 2).is_ok() {
                changes.bound += 1;
                changes.list.push_in_room(Change::Bound(rule));
            } else {
                entry.access |= HIDDEN;
            }
        }
    }

    /// A window is bound no longer. There is room to say so, since it was bound.
    pub(super) fn note_unbound(&mut self, slot: u32) {
        let rule = self.entries.get(slot as usize).and_then(Entry::rule);
        if let (Some(changes), Some(rule)) = (&mut self.changes, rule) {
            changes.bound -= 1;
            changes.list.push_in_room(Change::Unbound(rule));
        }
    }
}

#[cfg(test)]
#[path = "rules_tests.rs"]
mod tests;
