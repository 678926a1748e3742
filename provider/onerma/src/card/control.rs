//! Regions and portals: off the data path.

use thiserror::Error;

use super::OneRmaCard;
use super::slot::{CommandSlot, SlotState};
use crate::region::{Region, RegionId};
use crate::seal::{RegionKey, Seal};

/// Names a portal: the slots of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct PortalId(pub u16);

/// Why a region or a portal cannot be had.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum ControlError {
    /// The table is full, or has not so many slots in a row
    #[error("the card's table is full")]
    Full,
    /// There is no such region or portal
    #[error("no such region or portal")]
    Unknown,
}

/// A portal.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Portal {
    pub(super) pid: u32,
    pub(super) first: u16,
    /// How many slots; 0: there is no such portal
    pub(super) slots: u16,
    /// Completions so far
    pub(super) sequence: u32,
}

impl<S: Seal> OneRmaCard<S> {
    /// Opens memory to whoever has a key of it.
    pub fn open_region(&mut self, region: Region) -> Result<RegionId, ControlError> {
        self.regions.open(region).ok_or(ControlError::Full)
    }

    /// Closes a region: when this returns nobody reaches it.
    pub fn close_region(&mut self, id: RegionId) -> Result<(), ControlError> {
        if self.regions.close(id) { Ok(()) } else { Err(ControlError::Unknown) }
    }

    /// Changes a region's key, by its owner (1RMA, section 5.2): when this returns, the old one opens
    /// nothing.
    pub fn rekey_region(&mut self, id: RegionId, key: RegionKey) -> Result<(), ControlError> {
        if self.regions.rekey(id, key) { Ok(()) } else { Err(ControlError::Unknown) }
    }

    /// Gives a process slots: its quota. Their process never changes.
    pub fn open_portal(&mut self, pid: u32, slots: u16) -> Result<PortalId, ControlError> {
        let at = self.portals.iter().position(|portal| portal.slots == 0).ok_or(ControlError::Full)?;
        let count = usize::from(slots.max(1));
        let free = |window: &[CommandSlot<S::Key>]| window.iter().all(|slot| slot.portal.is_none());
        let first = self.slots.windows(count).position(free).ok_or(ControlError::Full)?;
        for slot in self.slots.iter_mut().skip(first).take(count) {
            slot.portal = Some(at as u16);
            slot.state = SlotState::Free;
        }
        let portal = self.portals.get_mut(at).ok_or(ControlError::Full)?;
        *portal = Portal { pid, first: first as u16, slots: count as u16, sequence: 0 };
        Ok(PortalId(at as u16))
    }

    /// Takes a process's slots away. Its commands end without completions.
    pub fn close_portal(&mut self, id: PortalId) -> Result<(), ControlError> {
        let portal = self.portal(id).ok_or(ControlError::Unknown)?;
        for place in portal.first..portal.first + portal.slots {
            self.leave_service(place);
            if let Some(slot) = self.slots.get_mut(usize::from(place)) {
                (slot.portal, slot.key, slot.state) = (None, None, SlotState::Free);
            }
        }
        if let Some(portal) = self.portals.get_mut(usize::from(id.0)) {
            portal.slots = 0;
        }
        Ok(())
    }

    pub(super) fn portal(&self, id: PortalId) -> Option<Portal> {
        self.portals.get(usize::from(id.0)).copied().filter(|portal| portal.slots > 0)
    }

    /// What a slot of a portal is at.
    pub fn slot_state(&self, id: PortalId, slot: u16) -> Option<SlotState> {
        let portal = self.portal(id).filter(|portal| slot < portal.slots)?;
        self.slots.get(usize::from(portal.first + slot)).map(|slot| slot.state)
    }
}
