//! The SQ address table (section 4.5): of each QP what is needed to fetch its WQEs, always on the chip.

use alloc::vec;
use alloc::vec::Vec;

use crate::error::NicError;
use crate::room::Room;
use crate::types::Qpn;

/// Where a send queue lies and how far it was read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendRing {
    /// Where it begins
    pub address: u64,
    /// The next WQE to fetch
    pub offset: u16,
}

/// One [`SendRing`] a QP, 10 B each.
pub(super) struct SendRings {
    addresses: Vec<u64>,
    offsets: Vec<u16>,
    ring_wqes: u16,
}

impl SendRings {
    pub(super) fn new(qps: u32, ring_wqes: u16) -> Self {
        SendRings { addresses: vec![0; qps as usize], offsets: vec![0; qps as usize], ring_wqes }
    }

    /// Room for QPs with numbers below `qps`.
    pub(super) fn grow(&mut self, qps: u32) -> Result<(), NicError> {
        let qps = qps as usize;
        if qps > self.addresses.len() {
            self.addresses.make_room(qps)?;
            self.offsets.make_room(qps)?;
            self.addresses.resize(qps, 0);
            self.offsets.resize(qps, 0);
        }
        Ok(())
    }

    pub(super) fn set(&mut self, qpn: Qpn, ring: SendRing) {
        let qpn = qpn as usize;
        if let (Some(address), Some(offset)) = (self.addresses.get_mut(qpn), self.offsets.get_mut(qpn)) {
            (*address, *offset) = (ring.address, ring.offset % self.ring_wqes);
        }
    }

    /// Where to read from now; `wqes` are taken by it.
    pub(super) fn read(&mut self, qpn: Qpn, wqes: u16) -> SendRing {
        let qpn = qpn as usize;
        let (Some(&address), Some(offset)) = (self.addresses.get(qpn), self.offsets.get_mut(qpn)) else {
            return SendRing::default();
        };
        let ring = SendRing { address, offset: *offset };
        *offset = ((u32::from(*offset) + u32::from(wqes)) % u32::from(self.ring_wqes)) as u16;
        ring
    }
}
