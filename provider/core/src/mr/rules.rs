//! What keys open, in the words in which stateless ends of StaR connections tell their peers.

use alloc::vec::Vec;
use core::num::NonZeroU32;

use super::window::UNBOUND;
use super::{Entry, IN_SGES, KEY_BITS, Kind, MrTable};
use crate::star::control::Rule;

/// A window was bound, or is bound no longer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// Peers may do this from now on
    Bound(Rule),
    /// Peers may do this no longer
    Unbound(Rule),
}

impl Entry {
    /// What its key opens; `None`: nothing.
    pub(super) fn rule(&self) -> Option<Rule> {
        let Entry { addr, length: len, iova, access, pd, qpn, link, kind, .. } = *self;
        let key = self.key.map(NonZeroU32::get)?;
        let open = kind == Kind::Mr || link != UNBOUND;
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

    /// From now on it is kept which windows are bound, and which no longer are.
    pub fn watch_windows(&mut self) {
        self.changes.get_or_insert_default();
    }

    /// What became of windows since this was asked last.
    pub fn take_changes(&mut self) -> Vec<Change> {
        self.changes.as_mut().map(core::mem::take).unwrap_or_default()
    }

    /// A change, if somebody wants to know. One that there is no memory for is lost, and its window is none to stateful peers.
    pub(super) fn note(&mut self, change: impl FnOnce(Rule) -> Change, slot: u32) {
        let rule = self.entries.get(slot as usize).and_then(Entry::rule);
        if let (Some(changes), Some(rule)) = (&mut self.changes, rule)
            && changes.try_reserve(1).is_ok()
        {
            changes.push(change(rule));
        }
    }
}
