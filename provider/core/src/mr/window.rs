//! Memory windows: keys that open a part of an MR to peers, bound and invalidated on the data path
//! (IBTA 10.6.7).
//!
//! A window is a slot of the MR table. Bound, it has the host addresses of its bytes, so that an access
//! through it costs what one through an MR does; unbound, it has no rights.

use super::{MrEntry, MrFault, MrKind, MrSlot, MrTable, Storage};
use crate::error::NicError;
use crate::types::{Access, PdId, QpId, Qpn, SendWqe};

/// A window's `link` while it is not bound.
pub(super) const UNBOUND: u32 = u32::MAX;

/// What a window may give to peers, and how its bytes are counted.
const RIGHTS: Access = Access::REMOTE_WRITE
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::FLUSH_GLOBAL)
    .union(Access::ZERO_BASED);

/// Types of windows. Values as `enum ibv_mw_type`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum WindowType {
    /// Bound anew as often as wanted; good for all QPs of its protection domain
    One = 1,
    /// Bound once, then invalidated; good for the QP that it was bound on (type 2B)
    Two = 2,
}

impl WindowType {
    /// From `enum ibv_mw_type`.
    pub const fn from_code(code: u32) -> Option<Self> {
        match code {
            1 => Some(WindowType::One),
            2 => Some(WindowType::Two),
            _ => None,
        }
    }
}

/// A bind: `struct ibv_mw_bind_info`, and what goes with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowBind {
    /// Any key that the window ever had
    pub window: u32,
    /// The low eight bits are those of the key that it is to have; the others count for nothing, as with
    /// mlx5 and rxe
    pub rkey: u32,
    /// Key of the MR; looked at only if `length` is not 0
    pub mr: u32,
    /// First byte, as the MR counts
    pub addr: u64,
    /// Bytes; 0 unbinds a window of type 1
    pub length: u64,
    /// What peers may do; with ZERO_BASED they count from the window's first byte
    pub access: Access,
    /// QP that the bind was posted to, and its protection domain
    pub qpn: Qpn,
    /// Its protection domain
    pub pd: PdId,
}

impl WindowBind {
    /// The bind of a work request that was posted to a QP.
    pub fn of(wqe: &SendWqe, QpId { pd, qpn }: QpId) -> Self {
        WindowBind {
            window: wqe.remote_qpn,
            rkey: wqe.rkey,
            mr: wqe.imm,
            addr: wqe.remote_addr,
            length: wqe.compare_add,
            access: Access::from_bits_retain(wqe.qkey),
            qpn,
            pd,
        }
    }
}

impl<S: Storage> MrTable<S> {
    /// A window that is not bound; gives its key. `Exhausted`: the table is full.
    pub fn alloc_window(&mut self, pd: PdId, kind: WindowType, random: u64) -> Result<u32, NicError> {
        let about = MrSlot { link: UNBOUND, kind: MrKind::Window(kind), spent: 0, hidden: false };
        let slot = self.insert(MrEntry { pd, ..MrEntry::default() }, about, random)?;
        self.windows += 1;
        Ok(self.entry(slot).key)
    }

    /// Ends a window, bound or not; gives its protection domain. `key` is any key that it ever had.
    pub fn free_window(&mut self, key: u32) -> Result<PdId, NicError> {
        let (slot, window, _) = self.window(key).ok_or(NicError::NotFound)?;
        self.unbind(slot);
        self.free_slot(slot);
        self.windows -= 1;
        Ok(window.pd)
    }

    /// Binds a window; gives its type. A window whose bind fails stays as it was.
    pub fn bind(&mut self, bind: &WindowBind) -> Result<WindowType, MrFault> {
        let (slot, window, kind) = self.window(bind.window).ok_or(MrFault::BadKey)?;
        if window.pd != bind.pd {
            return Err(MrFault::Pd);
        }
        if !RIGHTS.contains(bind.access) {
            return Err(MrFault::Access);
        }
        let two = kind == WindowType::Two;
        if two && (self.slots[slot as usize].link != UNBOUND || bind.length == 0) {
            return Err(MrFault::State);
        }
        let byte = bind.rkey as u8;
        let key = self.key(slot, byte);
        if self.imported(key).is_some() {
            return Err(MrFault::State);
        }
        let mr = if bind.length == 0 { None } else { Some(self.parent(bind)?) };
        self.unbind(slot);
        self.slots[slot as usize].spent = byte;
        let unbound = MrEntry { key, pd: window.pd, ..MrEntry::default() };
        let Some((link, addr)) = mr else {
            self.entries.put(slot as usize, unbound);
            return Ok(kind);
        };
        self.slots[link as usize].link += 1;
        let iova = if bind.access.contains(Access::ZERO_BASED) { 0 } else { bind.addr };
        let qpn = if two { bind.qpn } else { 0 };
        /* the feed has the opening and the close; without memory for both, neither */
        let hidden = self.make_room_in_feed().is_err();
        let about = &mut self.slots[slot as usize];
        (about.link, about.hidden) = (link, hidden);
        let (length, access) = (bind.length, bind.access);
        self.entries.put(slot as usize, MrEntry { qpn, addr, length, iova, access, ..unbound });
        self.note_opened(self.rule_of(slot));
        Ok(kind)
    }

    /// IBV_WR_LOCAL_INV: unbinds a window of type 2, which keeps its key. It must be unbound already, or
    /// bound on this QP.
    pub fn invalidate(&mut self, key: u32, qp: QpId) -> Result<(), MrFault> {
        let slot = self.bound_to(key, qp)?;
        self.unbind(slot);
        Ok(())
    }

    /// A peer's SEND with invalidate. The window must be bound on this QP.
    pub fn invalidate_remote(&mut self, key: u32, qp: QpId) -> Result<(), MrFault> {
        let slot = self.bound_to(key, qp)?;
        if self.slots[slot as usize].link == UNBOUND {
            return Err(MrFault::State);
        }
        self.unbind(slot);
        Ok(())
    }

    /// Unbinds what was bound on a QP that ends. Looks at the whole table.
    pub fn unbind_all(&mut self, qpn: Qpn) {
        for slot in 0..self.slots.len() as u32 {
            let entry = self.entry(slot);
            if entry.qpn == qpn && entry.key != 0 {
                self.unbind(slot);
            }
        }
    }

    /// Slot, entry and type of a key's window; a key of the past will do.
    fn window(&self, key: u32) -> Option<(u32, MrEntry, WindowType)> {
        let slot = self.slot_of(key);
        let entry = self.entry(slot);
        let MrKind::Window(kind) = self.slots.get(slot as usize)?.kind else { return None };
        (entry.key != 0).then_some((slot, entry, kind))
    }

    /// The slot of a window of type 2 with this key, if it is unbound or bound on this QP.
    fn bound_to(&self, key: u32, qp: QpId) -> Result<u32, MrFault> {
        let (slot, entry, kind) = self.window(key).ok_or(MrFault::BadKey)?;
        if entry.key != key {
            return Err(MrFault::BadKey);
        }
        if kind != WindowType::Two {
            return Err(MrFault::State);
        }
        entry.permits(qp, Access::empty())?;
        Ok(slot)
    }

    /// Slot of the MR that a bind names, and the host address of the window's first byte.
    fn parent(&self, bind: &WindowBind) -> Result<(u32, u64), MrFault> {
        let (slot, mr) = self.mr(bind.mr).map_err(|_| MrFault::BadKey)?;
        /* Peers get no right to write that the program itself has not (IBTA 10.6.7.2.2). */
        let writes = bind.access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        let need = if writes { Access::LOCAL_WRITE } else { Access::empty() };
        mr.permits(QpId { pd: bind.pd, qpn: bind.qpn }, Access::MW_BIND | need)?;
        let offset = bind.addr.wrapping_sub(mr.iova);
        if offset >= mr.length || bind.length > mr.length - offset {
            return Err(MrFault::Bounds);
        }
        Ok((slot, mr.addr.wrapping_add(offset)))
    }

    fn unbind(&mut self, slot: u32) {
        self.note_closed(self.rule_of(slot));
        let link = core::mem::replace(&mut self.slots[slot as usize].link, UNBOUND);
        if let Some(mr) = self.slots.get_mut(link as usize) {
            mr.link -= 1;
            let MrEntry { key, pd, .. } = self.entry(slot);
            self.entries.put(slot as usize, MrEntry { key, pd, ..MrEntry::default() });
        }
    }
}

#[cfg(test)]
#[path = "window_tests.rs"]
mod tests;
