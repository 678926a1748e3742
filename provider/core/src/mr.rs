//! Memory regions and windows: which key opens which bytes to whom.
//!
//! A key is a slot number, hidden behind a mask drawn once, and eight bits that change each time the
//! slot is used anew, so that a stale key opens nothing. Slots are taken in no order, so that who has one key
//! cannot tell the others from it, and rest before they are used anew. lkey and rkey are the same number (man
//! ibv_reg_mr leaves that to the card). The table gives host addresses out and touches no memory.
//! docs/security.md has what a guess is worth.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::error::NicError;
use crate::rng::Rng;
use crate::room::{TwoEnds, exact};
use crate::types::{Access, PdId, QpId};

mod entry;
mod feed;
mod import;
mod window;

pub use entry::{MrEntry, Plain, Storage};
pub use feed::{KeyChange, MemoryRule};
pub use window::{WindowBind, WindowType};

/// Most MRs and memory windows a card holds together: the sum of [`CardLimits`](crate::CardLimits)' two.
pub const MAX_MR: usize = 1 << 21;

/// Low bits of a key that change each time its slot is used anew; the slot is hidden in the others.
pub const KEY_BITS: u32 = 8;
const SLOT_MASK: u32 = u32::MAX >> KEY_BITS;
const KEYS_OF_A_SLOT: usize = 1 << KEY_BITS;
/// So many slots are free at least, as long as the table can grow: the next one is any of them, and one that
/// was freed is not used before the others were.
const REST: usize = 512;
/// The table grows by so many slots at least, and by a quarter.
const STEP: usize = 1024;
/// An MR's own key may stand in an SGE; a window's may not (IBTA 10.6.7.1).
const IN_SGES: Access = Access::from_bits_retain(1 << 31);

/// Where a region's bytes lie beside their address, in words of the host's that the table keeps and does not
/// look at. All zero: nowhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Backing(pub [u32; 5]);

impl Backing {
    /// Whether it says anything.
    pub fn is_known(&self) -> bool {
        *self != Backing::default()
    }
}

/// What a program registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MrAttr {
    /// Protection domain
    pub pd: PdId,
    /// First byte in host memory
    pub addr: u64,
    /// Length, bytes
    pub length: u64,
    /// Address by which the first byte is known in SGEs and RETHs
    pub iova: u64,
    /// Access rights
    pub access: Access,
    /// Where its first byte lies, too
    pub backing: Backing,
}

/// Why the card may not touch memory. The first that holds, in this order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MrFault {
    /// no MR has this key
    BadKey,
    /// the MR belongs to another protection domain, or the window to another QP
    Pd,
    /// the MR does not give this right
    Access,
    /// not all bytes lie in the MR
    Bounds,
    /// the window is bound already, or cannot be bound in this way or to this key
    State,
}

/// The MRs and memory windows of a card: which key opens which bytes, and the only place that
/// decides it. Whoever keeps more of it (StaR's peers) follows its changes.
#[derive(Debug, Default)]
pub struct MrTable<S = Plain> {
    /// What keys open
    entries: S,
    /// What nobody but the table needs of each entry
    slots: Vec<MrSlot>,
    /// Free slots, longest unused first
    free: VecDeque<u32>,
    /// Hides slot numbers in keys; drawn at the first registration
    mask: u32,
    /// Slots that are windows
    windows: usize,
    /// MRs of other cards, by key
    imports: Vec<import::Import>,
    /// What has changed, for who follows. `None`: nobody does
    feed: Option<feed::Feed>,
}

/// The rest of an entry.
#[derive(Clone, Copy, Debug)]
struct MrSlot {
    /// MR: windows bound to it. Window: slot of the MR that it is bound to, or [`window::UNBOUND`].
    link: u32,
    kind: MrKind,
    /// Last eight key bits given out
    spent: u8,
    /// The feed leaves it out: [`MrTable::hide`]
    hidden: bool,
}

/// What a slot is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum MrKind {
    Mr,
    Window(WindowType),
}

impl MrSlot {
    const MR: MrSlot = MrSlot { link: 0, kind: MrKind::Mr, spent: 0, hidden: false };
}

impl<S: Storage> MrTable<S> {
    /// No MRs; entries will lie in `entries`.
    pub fn new(entries: S) -> Self {
        MrTable {
            entries,
            slots: Vec::new(),
            free: VecDeque::new(),
            mask: 0,
            windows: 0,
            imports: Vec::new(),
            feed: None,
        }
    }

    /// Adds an MR; gives its key. `Invalid`: an address range that wraps, or remote WRITE or atomics
    /// without LOCAL_WRITE (man ibv_reg_mr). `Exhausted`: [`MAX_MR`] exist, or no memory.
    pub fn register(&mut self, attr: MrAttr, random: u64) -> Result<u32, NicError> {
        check(&attr)?;
        self.make_room_in_feed()?;
        let slot = self.insert(MrEntry::mr(&attr), MrSlot::MR, random)?;
        self.note_opened(self.rule_of(slot));
        Ok(self.entry(slot).key)
    }

    /// Puts an entry into a free slot, with a new key; gives the slot.
    fn insert(&mut self, entry: MrEntry, about: MrSlot, random: u64) -> Result<u32, NicError> {
        /* whole slots may be taken by imports, whose keys others chose: of so many slots one is not */
        for tried in 0..=self.imports.len() / KEYS_OF_A_SLOT {
            let (slot, spent) = self.slot(random, tried)?;
            match self.unused_key(slot, spent.wrapping_add(1 + (random % 255) as u8)) {
                Some(key) => {
                    self.slots[slot as usize] = MrSlot { spent: key as u8, ..about };
                    self.entries.put(slot as usize, MrEntry { key, ..entry });
                    return Ok(slot);
                }
                None => self.free.push_back(slot),
            }
        }
        Err(NicError::Exhausted)
    }

    /// A key of a free slot that no import has: the first from `byte` on.
    fn unused_key(&self, slot: u32, byte: u8) -> Option<u32> {
        let mut keys = (0..=u8::MAX).map(|more| self.key(slot, byte.wrapping_add(more)));
        keys.find(|key| self.imported(*key).is_none())
    }

    /// The free slot that rested longest, and the key bits it used last. So many were `tried` without
    /// success.
    fn slot(&mut self, random: u64, tried: usize) -> Result<(u32, u8), NicError> {
        if self.slots.is_empty() {
            /* a bit that no slot number has keeps every key from being 0, whatever its low bits */
            self.mask = (random >> 40) as u32 & SLOT_MASK | MAX_MR as u32;
            self.entries.set_mask(self.mask);
        }
        if self.free.len() <= REST + tried {
            /* without memory for more, those that are free rest less */
            _ = self.grow(random);
        }
        let slot = self.free.pop_front().ok_or(NicError::Exhausted)?;
        Ok((slot, self.slots[slot as usize].spent))
    }

    /// Adds free slots, in no order, if there can be more.
    fn grow(&mut self, random: u64) -> Result<(), NicError> {
        let from = self.slots.len();
        let to = (from + STEP.max(from / 4)).min(MAX_MR);
        let mut fresh: Vec<u32> = Vec::new();
        exact(&mut fresh, to - from)?;
        /* by a quarter: no vector's doubling, which near the limit would be for nothing */
        exact(&mut self.slots, to)?;
        /* ending a registration must not need memory */
        self.free.make_exact_room(to)?;
        self.entries.grow(to)?;
        let mut rng = Rng::new([random, from as u64]);
        /* eight bytes from one number; the shuffle's numbers are others */
        let mut word = 0;
        self.slots.extend((from..to).map(|slot| {
            word = if (slot - from).is_multiple_of(8) { rng.word() } else { word >> 8 };
            MrSlot { spent: word as u8, ..MrSlot::MR }
        }));
        fresh.extend(from as u32..to as u32);
        rng.shuffle(&mut fresh);
        self.free.extend(fresh);
        Ok(())
    }

    /// Key 0 is never given out: programs take it for "none".
    fn key(&self, slot: u32, byte: u8) -> u32 {
        ((slot ^ self.mask) << KEY_BITS | u32::from(byte)).max(1)
    }

    /// The entry of a slot; nothing where there is no such slot.
    #[inline]
    fn entry(&self, slot: u32) -> MrEntry {
        self.entries.entries().get(slot as usize).copied().unwrap_or_default()
    }

    /// The slot that a key, of now or of the past, is of.
    #[inline]
    fn slot_of(&self, key: u32) -> u32 {
        (key >> KEY_BITS) ^ self.mask
    }

    /// The slot of what this card has under a key now.
    #[inline]
    fn find(&self, key: u32) -> Option<(u32, &MrEntry)> {
        let slot = self.slot_of(key);
        let entry = self.entries.entries().get(slot as usize)?;
        (entry.key == key && key != 0).then_some((slot, entry))
    }

    /// Slot and entry of an MR's key.
    fn mr(&self, key: u32) -> Result<(u32, MrEntry), NicError> {
        let found = self.find(key).filter(|(slot, _)| self.slots[*slot as usize].kind == MrKind::Mr);
        found.map(|(slot, entry)| (slot, *entry)).ok_or(NicError::NotFound)
    }

    /// Slot and entry of an MR's key that no window is bound to, or `Busy` (man ibv_dereg_mr).
    fn unbound_mr(&self, key: u32) -> Result<(u32, MrEntry), NicError> {
        let (slot, entry) = self.mr(key)?;
        if self.slots[slot as usize].link > 0 { Err(NicError::Busy) } else { Ok((slot, entry)) }
    }

    /// Changes what a key opens; gives the protection domain that it had. Errors as in `register`, and
    /// `Busy`: windows are bound to it; with nothing changed.
    pub fn reregister(&mut self, key: u32, attr: MrAttr) -> Result<PdId, NicError> {
        check(&attr)?;
        let (slot, before) = self.unbound_mr(key)?;
        self.make_room_in_feed()?;
        self.note_closed(self.rule_of(slot));
        self.slots[slot as usize].hidden = false;
        self.entries.put(slot as usize, MrEntry { key, ..MrEntry::mr(&attr) });
        self.note_opened(self.rule_of(slot));
        Ok(before.pd)
    }

    /// What was registered under a key.
    pub fn query(&self, key: u32) -> Option<MrAttr> {
        self.mr(key).ok().map(|(_, entry)| entry.attr())
    }

    /// Removes an MR; gives its protection domain. `Busy`: windows are bound to it.
    pub fn deregister(&mut self, key: u32) -> Result<PdId, NicError> {
        let (slot, entry) = self.unbound_mr(key)?;
        self.note_closed(self.rule_of(slot));
        self.free_slot(slot);
        Ok(entry.pd)
    }

    fn free_slot(&mut self, slot: u32) {
        self.entries.put(slot as usize, MrEntry::default());
        self.free.push_back(slot);
    }

    /// Protection domain of what has this key.
    pub fn pd(&self, key: u32) -> Option<PdId> {
        self.find(key).map(|(_, entry)| entry.pd)
    }

    /// MRs that exist.
    pub fn regions(&self) -> usize {
        self.slots.len() - self.free.len() - self.windows
    }

    /// Windows that exist.
    pub fn windows(&self) -> usize {
        self.windows
    }

    /// Host address of `len` bytes at `addr` of an SGE. `write`: the card will write them. No bytes
    /// need no key.
    #[inline]
    pub fn resolve_local(
        &self,
        lkey: u32,
        pd: PdId,
        addr: u64,
        len: u32,
        write: bool,
    ) -> Result<u64, MrFault> {
        let need = if write { Access::LOCAL_WRITE | IN_SGES } else { IN_SGES };
        self.resolve(lkey, QpId { pd, qpn: 0 }, addr, len, need)
    }

    /// Host address of `len` bytes at `va` of a peer's request to the QP `qp` that needs the right `need`. No
    /// bytes need no key (IBTA 9.4.3, 9.4.4: the R_Key of a zero-length WRITE or READ is not checked).
    #[inline]
    pub fn resolve_remote(
        &self,
        rkey: u32,
        qp: QpId,
        va: u64,
        len: u32,
        need: Access,
    ) -> Result<u64, MrFault> {
        self.resolve(rkey, qp, va, len, need)
    }

    #[inline]
    fn resolve(&self, key: u32, qp: QpId, va: u64, len: u32, need: Access) -> Result<u64, MrFault> {
        if len == 0 {
            return Ok(va);
        }
        self.opened(key, qp, need)?.host_address(va, len)
    }

    /// Whether a peer's request to a QP may use a key as a whole, whichever bytes it opens.
    pub fn permits(&self, rkey: u32, qp: QpId, need: Access) -> Result<(), MrFault> {
        self.opened(rkey, qp, need).map(|_| ())
    }

    /// The entry of a key that gives a QP the right `need`.
    #[inline]
    fn opened(&self, key: u32, qp: QpId, need: Access) -> Result<&MrEntry, MrFault> {
        let entry = match self.find(key) {
            Some((_, entry)) => entry,
            None => self.imported(key).ok_or(MrFault::BadKey)?,
        };
        entry.permits(qp, need)?;
        Ok(entry)
    }
}

/// Whether something may be registered so.
fn check(attr: &MrAttr) -> Result<(), NicError> {
    let last = attr.length.saturating_sub(1);
    let wraps = attr.addr.checked_add(last).is_none() || attr.iova.checked_add(last).is_none();
    let remote_write = attr.access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
    if wraps || (remote_write && !attr.access.contains(Access::LOCAL_WRITE)) {
        return Err(NicError::Invalid);
    }
    Ok(())
}

#[cfg(test)]
#[path = "mr_tests.rs"]
mod tests;
