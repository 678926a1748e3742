//! The pending FIFOs (section 4.3.1): requests that wait for their context, or for one of the same QP before
//! them.
//!
//! Two FIFOs, so that elements in the middle can be looked at: new ones enter the offline FIFO; a check takes
//! the head of the offline FIFO and, if it cannot be served yet, puts it at the end of the online one; DMA
//! answers take the head of the online FIFO, or of the offline one when the online is empty. So "online, then
//! offline" is always the order of arrival, in which DMA answers come. When the offline FIFO has been checked
//! through, the two change roles: a new pass.

use alloc::collections::VecDeque;

use super::{Index, RequestChannel};
use crate::types::Qpn;

/// One that waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Element {
    pub(super) qpn: Qpn,
    pub(super) channel: RequestChannel,
    pub(super) index: Index,
    /// WQEs that the doorbell behind it brings (Sq)
    pub(super) wqes: u16,
    /// `dma_posted`: it waits for its own fetch (type 1), not for others of its QP (type 2)
    pub(super) fetching: bool,
    /// Nobody waits for an answer
    pub(super) prefetch: bool,
}

/// Both FIFOs.
pub(super) struct PendingFifo {
    fifos: [VecDeque<Element>; 2],
    /// Which of the two is online
    online: usize,
    /// Counts the changes of roles
    pass: u64,
}

impl PendingFifo {
    pub(super) fn new(slots: usize) -> Self {
        let fifo = || VecDeque::with_capacity(slots);
        PendingFifo { fifos: [fifo(), fifo()], online: 0, pass: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.fifos[0].len() + self.fifos[1].len()
    }

    pub(super) fn pass(&self) -> u64 {
        self.pass
    }

    /// Port 1: a new element.
    pub(super) fn push_request(&mut self, element: Element) {
        self.fifos[1 - self.online].push_back(element);
    }

    /// Port 2: the oldest element.
    pub(super) fn pop_return(&mut self) -> Option<Element> {
        self.fifos[self.online].pop_front().or_else(|| self.fifos[1 - self.online].pop_front())
    }

    /// What port 2 would give.
    pub(super) fn peek_return(&self) -> Option<&Element> {
        self.fifos[self.online].front().or_else(|| self.fifos[1 - self.online].front())
    }

    /// Port 4: the next to check.
    pub(super) fn pop_check(&mut self) -> Option<Element> {
        if self.fifos[1 - self.online].is_empty() {
            self.online = 1 - self.online;
            self.pass += 1;
        }
        self.fifos[1 - self.online].pop_front()
    }

    /// Port 3: it was checked, and waits on.
    pub(super) fn push_checked(&mut self, element: Element) {
        self.fifos[self.online].push_back(element);
    }
}
