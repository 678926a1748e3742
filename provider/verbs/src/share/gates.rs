//! The gates of a card's queue pairs: while one's is open, its peer in another process may execute requests
//! by itself.
//!
//! Only the card writes the file; peers map it. A queue pair whose gate is closed is not written any more
//! once [`Published::await_readers`](super::Published::await_readers) has returned.

use std::fs::File;

use memmap2::{MmapOptions, MmapRaw};
use starverbs_backend::ParentOnly;
use starverbs_backend::sealed::{self, ONLY_OURS};
use starverbs_rings::Incarnation;

use super::file::{self, OTHER};
use crate::error::Result;

/// Queue pairs with a gate at once.
const GATES: usize = 1 << 17;
const LEN: usize = GATES * size_of::<Incarnation>();

/// One opening of one gate: no other has the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct GatePass {
    pub(crate) number: u32,
    pub(crate) incarnation: u32,
}

fn all(map: &MmapRaw) -> &[Incarnation; GATES] {
    // SAFETY: the mapping is page-aligned, as long as the gates, and lives as long as the reference; the
    // file's seals keep its pages. Every byte pattern is valid for atomics. Peers do nothing but relaxed
    // loads, which pages that may not be written allow.
    unsafe { &*map.as_ptr().cast() }
}

/// A card's gates.
pub(crate) struct Gates {
    map: ParentOnly,
    free: Vec<u32>,
    used: u32,
}

impl Gates {
    /// All closed, and the file for peers.
    pub(crate) fn create() -> Result<(Gates, File)> {
        let (map, file) = sealed::create_ours(c"starverbs", LEN, ONLY_OURS)?;
        Ok((Gates { map, free: Vec::new(), used: 0 }, file))
    }

    /// `None`: all are open.
    pub(crate) fn open(&mut self) -> Option<GatePass> {
        let number = match self.free.pop() {
            Some(number) => number,
            None if (self.used as usize) < GATES => {
                self.free.try_reserve(1).ok()?;
                self.used += 1;
                self.used - 1
            }
            None => return None,
        };
        let gate = all(&self.map).get(number as usize)?;
        gate.begin(|| {});
        gate.read(|| Some(number)).map(|(incarnation, number)| GatePass { number, incarnation })
    }

    /// Closes it, if it was not closed before.
    pub(crate) fn close(&mut self, gate: GatePass) {
        let Some(incarnation) = all(&self.map).get(gate.number as usize) else { return };
        if incarnation.is(gate.incarnation) {
            incarnation.end();
            if self.free.try_reserve(1).is_ok() {
                self.free.push(gate.number);
            }
        }
    }
}

/// Another card's gates.
pub(super) struct PeerGates(ParentOnly);

impl PeerGates {
    /// EINVAL: the file is something else.
    pub(super) fn open(file: &File) -> Result<PeerGates> {
        if file::check(file, ONLY_OURS)? != LEN {
            return Err(OTHER);
        }
        Ok(PeerGates(ParentOnly::new(MmapOptions::new().len(LEN).map_raw_read_only(file)?)?))
    }

    /// Whether a gate is open; none is in a forked child. Who asks from a reader's slot may go through until
    /// the slot's end.
    pub(super) fn is_open(&self, gate: GatePass) -> bool {
        if !self.0.is_ours() {
            return false;
        }
        let incarnation = all(&self.0).get(gate.number as usize);
        gate.incarnation & 1 == 1 && incarnation.is_some_and(|is| is.is(gate.incarnation))
    }
}
