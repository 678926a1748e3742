//! Address translation (csRNA 4.1): the caches of MPT and MTT entries, as one, by page.
//!
//! A miss is read from the host's memory. The next address waits for it, or does not.

use std::collections::{BTreeMap, HashMap};

use super::{Read, Rnic, Stage, World, channel};
use crate::rnic::events::Picos;

/// Pages whose entries the card has; the least recently used goes.
#[derive(Debug, Default)]
pub(super) struct Translations {
    used: HashMap<u64, u64>,
    by_use: BTreeMap<u64, u64>,
    uses: u64,
    /// When the last address is translated
    free_at: Picos,
}

/// What of a QP is translated.
#[derive(Clone, Copy, Debug)]
pub(super) enum Page {
    Ring,
    Data,
}

impl Translations {
    /// Whether a page's entry is there; it is from now on.
    fn take(&mut self, page: u64, entries: usize) -> bool {
        self.uses += 1;
        let before = self.used.insert(page, self.uses);
        if let Some(before) = before {
            self.by_use.remove(&before);
        } else if self.used.len() > entries
            && let Some((_, oldest)) = self.by_use.pop_first()
        {
            self.used.remove(&oldest);
        }
        self.by_use.insert(self.uses, page);
        before.is_some()
    }
}

impl Rnic {
    /// When an address of a QP is translated that is known now: each has a page of its own for its ring, and
    /// one for its data.
    pub(super) fn translated(&mut self, qpn: u32, page: Page, world: &mut World<'_>) -> Picos {
        let ready = world.now() + world.params.translate;
        let (entries, bytes) = (world.params.mtt_entries as usize, world.params.mtt_bytes);
        let number = 2 * u64::from(qpn) + page as u64;
        if entries == 0 {
            return ready;
        }
        let in_turn = world.params.mtt_in_turn;
        let ready = if in_turn { ready.max(self.translations.free_at) } else { ready };
        let known = if self.translations.take(number, entries) {
            ready
        } else {
            let asked = ready - world.params.translate;
            self.reads.ask(channel::TRANSLATION, asked, bytes, Read::Translation);
            self.wake_at(Stage::Read, asked, world);
            ready + world.params.bus_read.latency + world.params.bus_read.busy(bytes)
        };
        self.translations.free_at = known;
        known
    }
}
