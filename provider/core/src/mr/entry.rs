//! What a key opens, as it lies in memory: in the card's own, or where other processes of the host may look.

use alloc::vec::Vec;

use super::{Backing, IN_SGES, MrAttr, MrFault};
use crate::error::NicError;
use crate::room::exact;
use crate::types::{Access, PdId, QpId, Qpn};

/// One entry of the table: an MR, a memory window, or nothing. A cache line.
#[repr(C, align(64))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MrEntry {
    /// Counted by the [`Storage`]: odd while a key opens something, and another number at each change
    pub incarnation: u32,
    /// lkey and rkey; 0: it is free
    pub key: u32,
    /// Protection domain
    pub pd: PdId,
    /// The one QP that may use it; 0: all of the protection domain
    pub qpn: Qpn,
    /// First byte in host memory
    pub addr: u64,
    /// Length, bytes
    pub length: u64,
    /// Address by which the first byte is known in SGEs and RETHs
    pub iova: u64,
    /// Rights, and whether SGEs may name it
    pub access: Access,
    /// Where the first byte of an MR lies beside its address
    pub backing: Backing,
}

const _: () = assert!(size_of::<MrEntry>() == 64 && align_of::<MrEntry>() == 64);

impl MrEntry {
    /// An MR, still without a key.
    pub(super) fn mr(attr: &MrAttr) -> MrEntry {
        let MrAttr { pd, addr, length, iova, access, backing } = *attr;
        MrEntry { pd, addr, length, iova, access: access | IN_SGES, backing, ..MrEntry::default() }
    }

    /// Whether it is an MR.
    pub fn is_mr(&self) -> bool {
        self.access.contains(IN_SGES)
    }

    /// What was registered.
    pub fn attr(&self) -> MrAttr {
        let MrEntry { pd, addr, length, iova, backing, .. } = *self;
        MrAttr { pd, addr, length, iova, access: self.access.difference(IN_SGES), backing }
    }

    /// Whether it gives a QP of a protection domain the right `need`.
    #[inline]
    pub fn permits(&self, QpId { pd, qpn }: QpId, need: Access) -> Result<(), MrFault> {
        if self.pd != pd || (self.qpn != 0 && self.qpn != qpn) {
            return Err(MrFault::Pd);
        }
        if self.access.contains(need) { Ok(()) } else { Err(MrFault::Access) }
    }

    /// Host address of `len` bytes, one at least, at `va`.
    #[inline]
    pub fn host_address(&self, va: u64, len: u32) -> Result<u64, MrFault> {
        let offset = va.wrapping_sub(self.iova);
        if offset >= self.length || u64::from(len) > self.length - offset {
            return Err(MrFault::Bounds);
        }
        Ok(self.addr.wrapping_add(offset))
    }
}

/// Where the entries lie.
pub trait Storage {
    /// The table finds the slot of a key by this mask: set once, before the first entry.
    fn set_mask(&mut self, mask: u32);
    /// All entries.
    fn entries(&self) -> &[MrEntry];
    /// So many in all; the new ones are free. `Exhausted`: no memory, and nothing changes.
    fn grow(&mut self, to: usize) -> Result<(), NicError>;
    /// Replaces an entry; `slot` is one of them.
    fn put(&mut self, slot: usize, entry: MrEntry);
}

/// Entries that nobody else sees.
#[derive(Debug, Default)]
pub struct Plain(Vec<MrEntry>);

impl Storage for Plain {
    fn set_mask(&mut self, _mask: u32) {}

    #[inline]
    fn entries(&self) -> &[MrEntry] {
        &self.0
    }

    fn grow(&mut self, to: usize) -> Result<(), NicError> {
        exact(&mut self.0, to)?;
        self.0.resize(to, MrEntry::default());
        Ok(())
    }

    fn put(&mut self, slot: usize, entry: MrEntry) {
        if let Some(place) = self.0.get_mut(slot) {
            *place = entry;
        }
    }
}
