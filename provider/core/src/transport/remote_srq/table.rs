//! SRQs of other cards: the leases held on each, and the QPs that wait for one.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::num::NonZeroU16;

use crate::error::NicError;
use crate::relay::LinkId;
use crate::room::{Room, TwoEnds, exact};
use crate::types::{Mtu, PdId, Qpn};
use crate::wire::HeaderBuf;

/// Leases requested at a time, and how many are left when more are requested.
pub(super) const LEASE_BATCH: u32 = 32;
pub(super) const LEASE_LOW: usize = 16;
/// QPs that are resumed when a lease comes; others find out when the requester repeats.
pub(super) const WAITING: usize = 64;
/// Most SRQs of other cards in the table.
const SRQS: usize = 1024;

/// A leased WQE. Serial: of the message that it is used for.
#[derive(Clone, Copy)]
pub(super) struct Lease {
    pub(super) id: u32,
    pub(super) room: u32,
    pub(super) link: LinkId,
    pub(super) serial: u32,
}

/// Names one of [`RemoteSrqs::entries`]: its index, and its generation in the upper bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RemoteSrqId(NonZeroU16);

/// Bits of an index.
const INDEX: u32 = SRQS.ilog2();
/// Generations of one index. No answer outlives as many.
const GENERATIONS: u16 = u16::MAX >> INDEX;

/// SRQs of other cards.
#[derive(Default)]
pub(crate) struct RemoteSrqs {
    pub(super) entries: Vec<RemoteSrq>,
    pub(super) serial: u32,
    /// The QPN block in the numbers of this card's SRQs; 0: none
    pub(crate) block: u32,
    /// Scratch of the frame that brings another card's bytes
    pub(super) frame: Vec<u8>,
}

/// An SRQ of another card.
pub(super) struct RemoteSrq {
    pub(super) domain: PdId,
    pub(super) number: u32,
    pub(super) link: Option<LinkId>,
    pub(super) leases: VecDeque<Lease>,
    /// Leases were requested and the answer is due
    pub(super) requested: bool,
    /// Its card has answered that it does not exist
    pub(super) gone: bool,
    pub(super) waiting: Vec<Qpn>,
    /// From 1 to [`GENERATIONS`] and round, with each SRQ at this index
    generation: u16,
}

impl RemoteSrqs {
    /// Reserves memory for answers of other cards. `Exhausted`: there is none.
    pub(crate) fn make_ready(&mut self) -> Result<(), NicError> {
        exact(&mut self.frame, size_of::<HeaderBuf>() + Mtu::M4096.bytes() as usize)
    }

    /// Number and link of the SRQ that a QP of `domain` knows by `id`. `None`: its card is gone.
    pub(super) fn reach(&self, domain: PdId, id: RemoteSrqId) -> Option<(u32, LinkId)> {
        let (at, generation) = (usize::from(id.0.get()) % SRQS, id.0.get() >> INDEX);
        let remote = self
            .entries
            .get(at)
            .filter(|remote| remote.domain == domain && remote.generation == generation)?;
        Some((remote.number, remote.link?))
    }

    /// Names the entry `at` in an answer.
    pub(super) fn id(&self, at: usize) -> Option<RemoteSrqId> {
        let generation = self.entries.get(at)?.generation;
        NonZeroU16::new(u16::try_from(at).ok()? | generation << INDEX).map(RemoteSrqId)
    }

    pub(super) fn find(&self, domain: PdId, number: u32) -> Option<usize> {
        self.entries.iter().position(|remote| remote.number == number && remote.domain == domain)
    }

    /// Adds an SRQ, in the place of an unused one if the table is full. `None`: it is full, or there is no
    /// memory.
    pub(super) fn insert(&mut self, domain: PdId, number: u32, link: LinkId) -> Option<usize> {
        let (mut leases, mut waiting) = (VecDeque::new(), Vec::new());
        leases.make_exact_room(LEASE_BATCH as usize).ok()?;
        exact(&mut waiting, WAITING).ok()?;
        let link = Some(link);
        let remote =
            RemoteSrq { domain, number, link, leases, requested: false, gone: false, waiting, generation: 1 };
        if self.entries.len() < SRQS {
            self.entries.make_room(self.entries.len() + 1).ok()?;
            self.entries.push_in_room(remote);
            return Some(self.entries.len() - 1);
        }
        /* an answer may still name the entry that is replaced */
        let unused = |remote: &RemoteSrq| remote.link.is_none() || (remote.gone && remote.leases.is_empty());
        let unused_entries = self.entries.iter().enumerate().filter(|(_, remote)| unused(remote));
        let (at, generation) = unused_entries
            .map(|(at, remote)| (at, remote.generation))
            .min_by_key(|(_, generation)| *generation)?;
        self.entries[at] = RemoteSrq { generation: generation % GENERATIONS + 1, ..remote };
        Some(at)
    }

    fn by_number(&mut self, link: LinkId, number: u32) -> Option<&mut RemoteSrq> {
        self.entries.iter_mut().find(|remote| remote.link == Some(link) && remote.number == number)
    }

    /// A lease came. False: it is not needed.
    pub(crate) fn leased(&mut self, link: LinkId, number: u32, id: u32, room: u32) -> bool {
        let Some(remote) = self.by_number(link, number) else { return false };
        (remote.requested, remote.gone) = (false, false);
        let wanted = remote.leases.len() < LEASE_BATCH as usize;
        if wanted {
            remote.leases.push_in_room(Lease { id, room, link, serial: 0 });
        }
        wanted
    }

    /// A request for leases was refused.
    pub(crate) fn refused(&mut self, link: LinkId, number: u32, gone: bool) {
        if let Some(remote) = self.by_number(link, number) {
            (remote.requested, remote.gone) = (false, gone);
        }
    }

    /// The next QP that waits for a WQE.
    pub(crate) fn next_waiting(&mut self, link: LinkId, number: u32) -> Option<Qpn> {
        self.by_number(link, number)?.waiting.pop()
    }

    /// Gives up an unused lease that is revoked.
    pub(crate) fn revoked(&mut self, link: LinkId, number: u32) -> Option<u32> {
        Some(self.by_number(link, number)?.leases.pop_back()?.id)
    }

    /// The other card is gone, and its leases with it.
    pub(crate) fn unlink(&mut self, link: LinkId) {
        for remote in self.entries.iter_mut().filter(|remote| remote.link == Some(link)) {
            remote.link = None;
            remote.leases.clear();
            (remote.requested, remote.gone) = (false, false);
        }
    }

    /// SRQs of a domain that ends.
    pub(crate) fn forget(&mut self, domain: PdId) {
        /* the entries stay: QPs of other domains know theirs by index */
        for remote in self.entries.iter_mut().filter(|remote| remote.domain == domain) {
            remote.link = None;
            remote.leases.clear();
            remote.waiting.clear();
            (remote.requested, remote.gone) = (false, false);
        }
    }

    /// A number for the next message.
    pub(super) fn next_serial(&mut self) -> u32 {
        self.serial = self.serial.wrapping_add(1);
        self.serial
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_does_not_name_a_later_entry_at_its_index() {
        let (mut remote_srqs, domain, link) = (RemoteSrqs::default(), PdId(1), LinkId(3));
        for number in 0..SRQS as u32 {
            assert_eq!(remote_srqs.insert(domain, number, link), Some(number as usize));
        }
        assert_eq!(remote_srqs.insert(domain, 7000, link), None, "all are of use");
        let mut named = remote_srqs.id(5).unwrap();
        assert_eq!(remote_srqs.reach(domain, named), Some((5, link)));
        assert_eq!(remote_srqs.reach(PdId(2), named), None, "not of the domain");
        for number in 7000..7200 {
            remote_srqs.entries[5].gone = true;
            assert_eq!(remote_srqs.insert(domain, number, link), Some(5));
            assert_eq!(remote_srqs.reach(domain, named), None);
            named = remote_srqs.id(5).unwrap();
            assert_eq!(remote_srqs.reach(domain, named), Some((number, link)));
        }
        let last = remote_srqs.id(SRQS - 1).unwrap();
        assert_eq!(remote_srqs.reach(domain, last), Some((SRQS as u32 - 1, link)));
    }
}
