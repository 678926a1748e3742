//! The pending record table (section 4.3.2): which QPs have requests pending, how many, and whether their
//! context came.
//!
//! It is a CAM: read and updated by QPN, written at the address of a request, `channel * ooo_cap + index`
//! (formula 1). The paper writes an entry at the address of the request that missed. That request may be
//! served, and its index be in use for another QP, while requests behind it still wait and need the entry. So
//! an entry moves to the address of each request that joins it: the newest of a QP is served last, and its
//! index stays taken until then.

use alloc::vec::Vec;

use super::cache::Tags;
use crate::error::NicError;
use crate::types::Qpn;

/// What is pending of one QP. A slot that holds one is valid (`is_vld`).
pub(super) struct PendingRecord {
    qpn: Qpn,
    /// `pnd_cnt`: requests of the QP in the pending FIFOs
    pub(super) count: u32,
    /// `dma_rtn`: its context is in the cache, so those that wait can be served from there
    pub(super) returned: bool,
    /// The pass over the pending FIFOs in which a request of it was put back last
    pub(super) put_back_in: Option<u64>,
}

/// All records.
pub(super) struct RecordTable {
    slots: Vec<Option<PendingRecord>>,
    tags: Tags,
    /// Records with `returned`: while there are some, the pending FIFOs are worth checking
    returned: usize,
}

impl RecordTable {
    pub(super) fn new(slots: usize, qps: u32) -> Self {
        let mut table = RecordTable { slots: Vec::new(), tags: Tags::new(qps), returned: 0 };
        table.slots.resize_with(slots, || None);
        table
    }

    /// Room for QPs with numbers below `qps`.
    pub(super) fn grow(&mut self, qps: u32) -> Result<(), NicError> {
        self.tags.grow(qps)
    }

    pub(super) fn contains(&self, qpn: Qpn) -> bool {
        self.tags.get(qpn).is_some()
    }

    pub(super) fn get(&self, qpn: Qpn) -> Option<&PendingRecord> {
        self.slots[self.tags.get(qpn)?].as_ref()
    }

    pub(super) fn get_mut(&mut self, qpn: Qpn) -> Option<&mut PendingRecord> {
        self.slots[self.tags.get(qpn)?].as_mut()
    }

    /// Whether some QP has its context and requests that wait.
    pub(super) fn any_returned(&self) -> bool {
        self.returned > 0
    }

    /// A request missed: a record at its address.
    pub(super) fn open(&mut self, address: usize, qpn: Qpn) {
        debug_assert!(self.slots[address].is_none(), "two QPs at address {address}");
        self.slots[address] = Some(PendingRecord { qpn, count: 1, returned: false, put_back_in: None });
        self.tags.set(qpn, Some(address));
    }

    /// One more waits. The record moves to its address.
    pub(super) fn join(&mut self, address: usize, qpn: Qpn) {
        let Some(from) = self.tags.get(qpn) else { return };
        if let Some(mut record) = self.slots[from].take() {
            debug_assert!(self.slots[address].is_none(), "two QPs at address {address}");
            record.count += 1;
            self.slots[address] = Some(record);
            self.tags.set(qpn, Some(address));
        }
    }

    /// One of them is served, and the context is in the cache if any others wait.
    pub(super) fn serve(&mut self, qpn: Qpn) {
        let Some(slot) = self.tags.get(qpn) else { return };
        let Some(record) = self.slots[slot].as_mut() else { return };
        debug_assert_eq!(record.qpn, qpn);
        record.count -= 1;
        let (was, left) = (record.returned, record.count);
        record.returned = true;
        if left == 0 {
            self.slots[slot] = None;
            self.tags.set(qpn, None);
        }
        self.returned = self.returned + usize::from(left > 0) - usize::from(was);
    }
}
