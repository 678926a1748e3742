//! Which card has which WQE, and which unused ones came back.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::error::NicError;
use crate::relay::LinkId;
use crate::room::{Room, TwoEnds, exact};
use crate::types::{Mtu, Qpn, Sge, SrqId};

/// Failed connections that are kept.
const FAILED: usize = 64;

/// WQEs that are leased to other cards, or were.
#[derive(Default)]
pub(crate) struct LeaseTable {
    pub(super) wqes: Vec<LeasedWqe>,
    pub(super) free: Vec<usize>,
    /// WQEs that came back unused, oldest first
    pub(crate) returned: VecDeque<usize>,
    granted: u64,
    /// Connections of which a message failed: requests behind it are dropped
    pub(super) failed: VecDeque<RemoteConn>,
    /// Scratch for one packet's bytes to another card
    pub(super) chunk: Vec<u8>,
}

/// A connection of another card's QP.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct RemoteConn {
    /// To that card
    pub(super) link: LinkId,
    pub(super) qpn: Qpn,
    /// As of a [`MessagePart`](crate::relay::MessagePart)
    pub(super) epoch: u32,
}

/// One of them. An index is used again, under another generation.
pub(super) struct LeasedWqe {
    pub(super) generation: u16,
    /// `None`: nobody's
    pub(super) srq: Option<SrqId>,
    /// `None`: it came back
    pub(super) link: Option<LinkId>,
    /// Bytes of a message are in it
    pub(super) begun: bool,
    /// It was revoked
    pub(super) revoked: bool,
    /// When it was first leased, counting leases
    order: u64,
    pub(super) qpn: Qpn,
    pub(super) wr_id: u64,
    pub(super) sges: Vec<Sge>,
}

/// A WQE out of its queue.
pub(crate) struct TakenRecvWqe {
    pub(crate) wr_id: u64,
    /// Its SGEs
    pub(crate) sges: usize,
    /// Of a lease that came back: its order among them
    pub(super) order: Option<u64>,
}

/// Which cards may hold leases of an SRQ that were not revoked yet.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Revocable {
    /// Of none
    #[default]
    No,
    Of(LinkId),
    Any,
}

impl LeaseTable {
    /// Reserves memory for leases. `Exhausted`: there is none.
    pub(super) fn make_ready(&mut self) -> Result<(), NicError> {
        self.failed.make_exact_room(FAILED)?;
        let room = Mtu::M4096.bytes() as usize;
        exact(&mut self.chunk, room)?;
        self.chunk.resize(room, 0);
        Ok(())
    }

    /// Reserves memory for one more lease, of `sges` SGEs. `Exhausted`: there is none.
    pub(super) fn make_place(&mut self, sges: usize) -> Result<(), NicError> {
        if let Some(at) = self.free.last() {
            return exact(&mut self.wqes[*at].sges, sges);
        }
        let places = self.wqes.len() + 1;
        self.wqes.make_room(places)?;
        self.free.make_room(places)?;
        self.returned.make_room(places)?;
        let mut room = Vec::new();
        exact(&mut room, sges)?;
        self.wqes.push_in_room(LeasedWqe {
            generation: 0,
            srq: None,
            link: None,
            begun: false,
            revoked: false,
            order: 0,
            qpn: 0,
            wr_id: 0,
            sges: room,
        });
        self.free.push_in_room(places - 1);
        Ok(())
    }

    /// Leases a WQE of `srq` to `link`, after [`LeaseTable::make_place`]. One that came back keeps its
    /// `order`.
    pub(super) fn add(
        &mut self,
        srq: SrqId,
        link: LinkId,
        taken: &TakenRecvWqe,
        sges: &[Sge],
    ) -> Option<usize> {
        let at = self.free.pop()?;
        let order = taken.order.unwrap_or_else(|| {
            self.granted += 1;
            self.granted
        });
        let lease = &mut self.wqes[at];
        (lease.srq, lease.link) = (Some(srq), Some(link));
        (lease.begun, lease.revoked) = (false, false);
        (lease.order, lease.wr_id) = (order, taken.wr_id);
        lease.sges.clear();
        lease.sges.extend_from_slice(sges);
        Some(at)
    }

    pub(super) fn id(&self, at: usize) -> u32 {
        u32::from(self.wqes[at].generation) << 16 | at as u32
    }

    /// The index of lease `id`, if `link` holds it.
    pub(super) fn find(&self, link: LinkId, id: u32) -> Option<usize> {
        let at = (id & 0xffff) as usize;
        let lease = self.wqes.get(at)?;
        let its = lease.link == Some(link) && u32::from(lease.generation) == id >> 16;
        (its && lease.srq.is_some()).then_some(at)
    }

    pub(super) fn end(&mut self, at: usize) {
        let lease = &mut self.wqes[at];
        lease.generation = lease.generation.wrapping_add(1);
        (lease.srq, lease.link) = (None, None);
        self.free.push_in_room(at);
    }

    /// An unused WQE comes back.
    pub(super) fn put_back(&mut self, at: usize) {
        let lease = &mut self.wqes[at];
        lease.generation = lease.generation.wrapping_add(1);
        lease.link = None;
        let order = lease.order;
        let place = self.returned.partition_point(|other| self.wqes[*other].order < order);
        self.returned.insert(place, at);
    }

    pub(super) fn waiting(&self, srq: SrqId) -> u32 {
        self.returned.iter().filter(|at| self.wqes[**at].srq == Some(srq)).count() as u32
    }

    /// Takes the oldest WQE of `srq` that came back.
    pub(super) fn take(&mut self, srq: SrqId, sges: &mut [Sge]) -> Option<TakenRecvWqe> {
        let place = self.returned.iter().position(|at| self.wqes[*at].srq == Some(srq))?;
        let at = self.returned.remove(place)?;
        let lease = &self.wqes[at];
        let count = lease.sges.len().min(sges.len());
        let taken = TakenRecvWqe { wr_id: lease.wr_id, sges: count, order: Some(lease.order) };
        for (to, from) in sges.iter_mut().zip(&lease.sges) {
            *to = *from;
        }
        self.end(at);
        Some(taken)
    }

    /// The SRQ ends.
    pub(crate) fn forget(&mut self, srq: SrqId) {
        let LeaseTable { wqes, returned, .. } = self;
        returned.retain(|at| wqes[*at].srq != Some(srq));
        for at in 0..self.wqes.len() {
            if self.wqes[at].srq == Some(srq) {
                self.end(at);
            }
        }
    }

    /// Drops all further requests of this connection.
    pub(super) fn fail(&mut self, conn: RemoteConn) {
        if self.failed.len() == FAILED {
            self.failed.pop_front();
        }
        self.failed.push_in_room(conn);
    }

    pub(super) fn has_failed(&self, conn: RemoteConn) -> bool {
        self.failed.contains(&conn)
    }

    pub(super) fn of_link(&self, link: LinkId) -> usize {
        self.wqes.iter().filter(|lease| lease.link == Some(link)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SRQ: SrqId = SrqId(1);

    fn grant(leases: &mut LeaseTable, taken: &TakenRecvWqe) -> usize {
        leases.make_place(1).unwrap();
        leases.add(SRQ, LinkId(1), taken, &[Sge::default()]).expect("a place was made")
    }

    /// A WQE that came back, was leased again and came back again is still the oldest.
    #[test]
    fn a_wqe_keeps_its_order_however_often_it_is_leased() {
        let mut leases = LeaseTable::default();
        let all: Vec<usize> =
            (0..3).map(|wr_id| grant(&mut leases, &TakenRecvWqe { wr_id, sges: 1, order: None })).collect();
        leases.put_back(all[0]);
        let mut sges = [Sge::default(); 2];
        let first = leases.take(SRQ, &mut sges).expect("it came back");
        assert_eq!((first.wr_id, first.sges), (0, 1));
        let again = grant(&mut leases, &first);
        for at in [all[2], again, all[1]] {
            leases.put_back(at);
        }
        assert_eq!(leases.waiting(SRQ), 3);
        let order: Vec<u64> =
            core::iter::from_fn(|| leases.take(SRQ, &mut sges)).map(|taken| taken.wr_id).collect();
        assert_eq!(order, [0, 1, 2]);
    }
}
