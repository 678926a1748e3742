//! Memory regions and windows: which key opens which bytes to whom.
//!
//! A key is a slot number, hidden behind a mask drawn once, and eight bits that change each time the
//! slot is used anew, so that a stale key opens nothing. Slots are taken in no order, so that who has one key
//! cannot tell the others from it, and rest before they are used anew. lkey and rkey are the same number (man
//! ibv_reg_mr leaves that to the card). The table gives host addresses out and touches no memory.
//! docs/security.md says what a guess is worth.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::num::NonZeroU32;

use crate::error::NicError;
use crate::rng::Rng;
use crate::room::{TwoEnds, exact};
use crate::types::{Access, PdId, Qpn};

mod import;
mod rules;
mod window;

pub use rules::{Change, Rule};
pub use window::{Bind, WindowType};

/// Most MRs and memory windows a card holds together: the sum of [`Limits`](crate::Limits)' two.
pub const MAX_MR: usize = 1 << 21;

const KEY_BITS: u32 = 8;
const SLOT_MASK: u32 = u32::MAX >> KEY_BITS;
const KEYS_OF_A_SLOT: usize = 1 << KEY_BITS;
/// So many slots are free at least, as long as the table can grow: the next one is any of them, and one that
/// was freed is not used before the others were.
const REST: usize = 512;
/// The table grows by so many slots at least, and by a quarter.
const STEP: usize = 1024;
/// An MR's own key may stand in an SGE; a window's may not (IBTA 10.6.7.1).
const IN_SGES: Access = Access::from_bits_retain(1 << 31);
/// It is no rule: [`MrTable::hide`].
const HIDDEN: Access = Access::from_bits_retain(1 << 30);

/// What a program registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MrAttr {
    /// Protection domain
    pub pd: PdId,
    /// First byte in host memory
    pub addr: u64,
    /// Bytes
    pub length: u64,
    /// Address by which the first byte is known in SGEs and RETHs
    pub iova: u64,
    /// Rights
    pub access: Access,
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

/// The MRs and memory windows of a card.
#[derive(Debug, Default)]
pub struct MrTable {
    entries: Vec<Entry>,
    /// Free slots, longest unused first
    free: VecDeque<u32>,
    /// Hides slot numbers in keys; drawn at the first registration
    mask: u32,
    /// Slots that are windows
    windows: usize,
    /// MRs of other cards, by key
    imports: Vec<Entry>,
    /// Windows that were bound, or no longer are, for who tells peers. `None`: nobody does
    changes: Option<rules::Changes>,
}

/// One slot: an MR, or a window with what it is bound to.
#[derive(Clone, Copy, Debug)]
struct Entry {
    addr: u64,
    length: u64,
    iova: u64,
    access: Access,
    pd: PdId,
    /// `None`: free
    key: Option<NonZeroU32>,
    /// The one QP that may use it; 0: all of the protection domain
    qpn: Qpn,
    /// MR: windows bound to it. Window: slot of the MR that it is bound to, or [`window::UNBOUND`].
    link: u32,
    kind: Kind,
    /// Last eight key bits given out
    spent: u8,
}

impl Entry {
    /// Nothing. The first key's byte is not `spent`.
    fn free(spent: u8) -> Entry {
        Entry { spent, ..Entry::mr(&MrAttr::default()) }
    }

    /// An MR, still without a key.
    fn mr(attr: &MrAttr) -> Entry {
        Entry {
            addr: attr.addr,
            length: attr.length,
            iova: attr.iova,
            access: attr.access | IN_SGES,
            pd: attr.pd,
            key: None,
            qpn: 0,
            link: 0,
            kind: Kind::Mr,
            spent: 0,
        }
    }
}

/// What a slot is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Mr,
    Window(WindowType),
}

const _: () = assert!(size_of::<Entry>() <= 48);

impl MrTable {
    /// No MRs.
    pub const fn new() -> Self {
        MrTable {
            entries: Vec::new(),
            free: VecDeque::new(),
            mask: 0,
            windows: 0,
            imports: Vec::new(),
            changes: None,
        }
    }

    /// Adds an MR; gives its key. `Invalid`: an address range that wraps, or remote WRITE or atomics
    /// without LOCAL_WRITE (man ibv_reg_mr). `Exhausted`: [`MAX_MR`] exist.
    pub fn register(&mut self, attr: MrAttr, random: u64) -> Result<u32, NicError> {
        check(&attr)?;
        self.insert(Entry::mr(&attr), random)
    }

    /// Puts an entry into a free slot, with a new key.
    fn insert(&mut self, entry: Entry, random: u64) -> Result<u32, NicError> {
        /* whole slots may be taken by imports, whose keys others chose: of so many slots one is not */
        for tried in 0..=self.imports.len() / KEYS_OF_A_SLOT {
            let (slot, spent) = self.slot(random, tried)?;
            match self.unused_key(slot, spent.wrapping_add(1 + (random % 255) as u8)) {
                Some(key) => {
                    self.entries[slot as usize] = Entry { key: Some(key), spent: key.get() as u8, ..entry };
                    return Ok(key.get());
                }
                None => self.free.push_back(slot),
            }
        }
        Err(NicError::Exhausted)
    }

    /// A key of a free slot that no import has: the first from `byte` on.
    fn unused_key(&self, slot: u32, byte: u8) -> Option<NonZeroU32> {
        let mut keys = (0..=u8::MAX).map(|more| self.key(slot, byte.wrapping_add(more)));
        keys.find(|key| self.imported(key.get()).is_none())
    }

    /// The free slot that rested longest, and the key bits it used last. So many were `tried` in vain.
    fn slot(&mut self, random: u64, tried: usize) -> Result<(u32, u8), NicError> {
        if self.entries.is_empty() {
            /* a bit that no slot number has keeps every key from being 0, whatever its low bits */
            self.mask = (random >> 40) as u32 & SLOT_MASK | MAX_MR as u32;
        }
        if self.free.len() <= REST + tried {
            /* without memory for more, those that are free rest less */
            _ = self.grow(random);
        }
        let slot = self.free.pop_front().ok_or(NicError::Exhausted)?;
        Ok((slot, self.entries[slot as usize].spent))
    }

    /// Adds free slots, in no order, if there can be more.
    fn grow(&mut self, random: u64) -> Result<(), NicError> {
        let from = self.entries.len();
        let to = (from + STEP.max(from / 4)).min(MAX_MR);
        let mut fresh: Vec<u32> = Vec::new();
        exact(&mut fresh, to - from)?;
        /* by a quarter, as said: no vector's doubling, which near the limit would be for nothing */
        exact(&mut self.entries, to)?;
        /* ending a registration must not need memory */
        self.free.make_exact_room(to)?;
        let mut rng = Rng::new([random, from as u64]);
        /* eight bytes from one number; the shuffle's numbers are others */
        let mut word = 0;
        self.entries.extend((from..to).map(|slot| {
            word = if (slot - from).is_multiple_of(8) { rng.word() } else { word >> 8 };
            Entry::free(word as u8)
        }));
        fresh.extend(from as u32..to as u32);
        rng.shuffle(&mut fresh);
        self.free.extend(fresh);
        Ok(())
    }

    /// Key 0 is never given out: programs take it for "none".
    fn key(&self, slot: u32, byte: u8) -> NonZeroU32 {
        let base = (slot ^ self.mask) << KEY_BITS;
        NonZeroU32::new(base | u32::from(byte)).unwrap_or(NonZeroU32::MIN)
    }

    /// Changes what a key opens; gives the protection domain that it had. Errors as in `register`, and
    /// `Busy`: windows are bound to it; with nothing changed.
    pub fn reregister(&mut self, key: u32, attr: MrAttr) -> Result<PdId, NicError> {
        check(&attr)?;
        let (_, entry) = self.mr(key)?;
        if entry.link > 0 {
            return Err(NicError::Busy);
        }
        entry.addr = attr.addr;
        entry.length = attr.length;
        entry.iova = attr.iova;
        entry.access = attr.access | IN_SGES;
        Ok(core::mem::replace(&mut entry.pd, attr.pd))
    }

    /// What was registered under a key.
    pub fn query(&self, key: u32) -> Option<MrAttr> {
        let slot = (key >> KEY_BITS) ^ self.mask;
        let e = self.entries.get(slot as usize)?;
        let found = e.key.map(NonZeroU32::get) == Some(key) && e.kind == Kind::Mr;
        let access = e.access.difference(IN_SGES | HIDDEN);
        found.then_some(MrAttr { pd: e.pd, addr: e.addr, length: e.length, iova: e.iova, access })
    }

    /// Slot and entry of an MR's key.
    fn mr(&mut self, key: u32) -> Result<(u32, &mut Entry), NicError> {
        let slot = (key >> KEY_BITS) ^ self.mask;
        let found = self.entries.get_mut(slot as usize);
        let found = found.filter(|e| e.key.map(NonZeroU32::get) == Some(key) && e.kind == Kind::Mr);
        Ok((slot, found.ok_or(NicError::NotFound)?))
    }

    /// Removes an MR; gives its protection domain. `Busy`: windows are bound to it (man ibv_dereg_mr).
    pub fn deregister(&mut self, key: u32) -> Result<PdId, NicError> {
        let (slot, entry) = self.mr(key)?;
        if entry.link > 0 {
            return Err(NicError::Busy);
        }
        entry.key = None;
        let pd = entry.pd;
        self.free.push_back(slot);
        Ok(pd)
    }

    /// Protection domain of what has this key.
    pub fn pd(&self, key: u32) -> Option<PdId> {
        let entry = self.entries.get(((key >> KEY_BITS) ^ self.mask) as usize)?;
        (entry.key.map(NonZeroU32::get) == Some(key)).then_some(entry.pd)
    }

    /// MRs that exist.
    pub fn regions(&self) -> usize {
        self.entries.len() - self.free.len() - self.windows
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
        self.resolve(lkey, (pd, 0), addr, len, need)
    }

    /// Host address of `len` bytes at `va` of a peer's request to a QP, `qp` with its protection domain,
    /// that needs the right `need`. No bytes need no key (IBTA 9.4.3, 9.4.4: the R_Key of a zero-length
    /// WRITE or READ is not checked).
    #[inline]
    pub fn resolve_remote(
        &self,
        rkey: u32,
        qp: (PdId, Qpn),
        va: u64,
        len: u32,
        need: Access,
    ) -> Result<u64, MrFault> {
        self.resolve(rkey, qp, va, len, need)
    }

    #[inline]
    fn resolve(&self, key: u32, qp: (PdId, Qpn), va: u64, len: u32, need: Access) -> Result<u64, MrFault> {
        if len == 0 {
            return Ok(va);
        }
        let entry = self.opened(key, qp, need)?;
        let offset = va.wrapping_sub(entry.iova);
        if offset >= entry.length || u64::from(len) > entry.length - offset {
            return Err(MrFault::Bounds);
        }
        Ok(entry.addr.wrapping_add(offset))
    }

    /// Whether a peer's request to a QP may use a key as a whole, whichever bytes it opens.
    pub fn permits(&self, rkey: u32, qp: (PdId, Qpn), need: Access) -> Result<(), MrFault> {
        self.opened(rkey, qp, need).map(|_| ())
    }

    /// The entry of a key that gives a QP the right `need`.
    #[inline]
    fn opened(&self, key: u32, (pd, qpn): (PdId, Qpn), need: Access) -> Result<&Entry, MrFault> {
        let slot = (key >> KEY_BITS) ^ self.mask;
        let entry = match self.entries.get(slot as usize) {
            Some(entry) if entry.key.map(NonZeroU32::get) == Some(key) => entry,
            _ => self.imported(key).ok_or(MrFault::BadKey)?,
        };
        if entry.pd != pd || (entry.qpn != 0 && entry.qpn != qpn) {
            return Err(MrFault::Pd);
        }
        if !entry.access.contains(need) {
            return Err(MrFault::Access);
        }
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
