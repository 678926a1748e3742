//! Who has which WQE: the loans of a card, and those that came back.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::error::NicError;
use crate::relay::LinkId;
use crate::room::{Room, TwoEnds, exact};
use crate::types::{Mtu, Qpn, Sge, SrqId};

/// Failed connections that are remembered.
const FAILED: usize = 64;

/// WQEs that other cards have, or had.
#[derive(Default)]
pub(crate) struct Lending {
    pub(super) loans: Vec<Loan>,
    pub(super) free: Vec<usize>,
    /// Loans that came back unused, oldest first
    pub(crate) returned: VecDeque<usize>,
    lent: u64,
    /// Connections of which a message failed: nothing that was under way behind it is taken
    pub(super) failed: VecDeque<(LinkId, Qpn, u32)>,
    /// Scratch of the bytes being sent to another card: room for a packet's
    pub(super) chunk: Vec<u8>,
}

/// One of them. A place is used again, under another generation.
pub(super) struct Loan {
    pub(super) generation: u16,
    /// `None`: nobody's
    pub(super) srq: Option<SrqId>,
    /// `None`: it came back
    pub(super) link: Option<LinkId>,
    /// Bytes of a message are in it
    pub(super) begun: bool,
    /// It was asked for again
    pub(super) recalled: bool,
    /// When it was first lent, counting loans
    order: u64,
    pub(super) qpn: Qpn,
    pub(super) wr_id: u64,
    pub(super) sges: Vec<Sge>,
}

/// A WQE out of its queue.
pub(crate) struct Taken {
    pub(crate) wr_id: u64,
    /// Its SGEs
    pub(crate) sges: usize,
    /// Of one that was lent and came back: its place among them
    pub(super) order: Option<u64>,
}

/// Of which cards there are loans of an SRQ that they were not asked for yet, at most.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Callable {
    /// Of none
    #[default]
    No,
    Of(LinkId),
    Any,
}

impl Lending {
    /// Memory that is needed once other cards ask. `Exhausted`: there is none.
    pub(super) fn make_ready(&mut self) -> Result<(), NicError> {
        self.failed.make_exact_room(FAILED)?;
        let room = Mtu::M4096.bytes() as usize;
        exact(&mut self.chunk, room)?;
        self.chunk.resize(room, 0);
        Ok(())
    }

    /// Room for one more loan, of `sges` SGEs: the first time that so many are lent. `Exhausted`: no memory.
    pub(super) fn make_place(&mut self, sges: usize) -> Result<(), NicError> {
        if let Some(at) = self.free.last() {
            return exact(&mut self.loans[*at].sges, sges);
        }
        let places = self.loans.len() + 1;
        self.loans.make_room(places)?;
        self.free.make_room(places)?;
        self.returned.make_room(places)?;
        let mut room = Vec::new();
        exact(&mut room, sges)?;
        self.loans.push_in_room(Loan {
            generation: 0,
            srq: None,
            link: None,
            begun: false,
            recalled: false,
            order: 0,
            qpn: 0,
            wr_id: 0,
            sges: room,
        });
        self.free.push_in_room(places - 1);
        Ok(())
    }

    /// Notes a WQE of `srq` that `link` gets, in the place that was made for it. One that came back keeps its
    /// `order`.
    pub(super) fn add(&mut self, srq: SrqId, link: LinkId, taken: &Taken, sges: &[Sge]) -> Option<usize> {
        let at = self.free.pop()?;
        let order = taken.order.unwrap_or_else(|| {
            self.lent += 1;
            self.lent
        });
        let loan = &mut self.loans[at];
        (loan.srq, loan.link) = (Some(srq), Some(link));
        (loan.begun, loan.recalled) = (false, false);
        (loan.order, loan.wr_id) = (order, taken.wr_id);
        loan.sges.clear();
        loan.sges.extend_from_slice(sges);
        Some(at)
    }

    pub(super) fn id(&self, at: usize) -> u32 {
        u32::from(self.loans[at].generation) << 16 | at as u32
    }

    /// The place of loan `id`, if `link` has it.
    pub(super) fn find(&self, link: LinkId, id: u32) -> Option<usize> {
        let at = (id & 0xffff) as usize;
        let loan = self.loans.get(at)?;
        let its = loan.link == Some(link) && u32::from(loan.generation) == id >> 16;
        (its && loan.srq.is_some()).then_some(at)
    }

    pub(super) fn end(&mut self, at: usize) {
        let loan = &mut self.loans[at];
        loan.generation = loan.generation.wrapping_add(1);
        (loan.srq, loan.link) = (None, None);
        self.free.push_in_room(at);
    }

    /// An unused WQE comes back.
    pub(super) fn give_back(&mut self, at: usize) {
        let loan = &mut self.loans[at];
        loan.generation = loan.generation.wrapping_add(1);
        loan.link = None;
        let order = loan.order;
        let place = self.returned.partition_point(|other| self.loans[*other].order < order);
        self.returned.insert(place, at);
    }

    pub(super) fn waiting(&self, srq: SrqId) -> u32 {
        self.returned.iter().filter(|at| self.loans[**at].srq == Some(srq)).count() as u32
    }

    /// Takes the oldest WQE of `srq` that came back.
    pub(super) fn take(&mut self, srq: SrqId, sges: &mut [Sge]) -> Option<Taken> {
        let place = self.returned.iter().position(|at| self.loans[*at].srq == Some(srq))?;
        let at = self.returned.remove(place)?;
        let loan = &self.loans[at];
        let count = loan.sges.len().min(sges.len());
        let taken = Taken { wr_id: loan.wr_id, sges: count, order: Some(loan.order) };
        for (to, from) in sges.iter_mut().zip(&loan.sges) {
            *to = *from;
        }
        self.end(at);
        Some(taken)
    }

    /// The SRQ ends.
    pub(crate) fn forget(&mut self, srq: SrqId) {
        let Lending { loans, returned, .. } = self;
        returned.retain(|at| loans[*at].srq != Some(srq));
        for at in 0..self.loans.len() {
            if self.loans[at].srq == Some(srq) {
                self.end(at);
            }
        }
    }

    /// Takes nothing more from this connection.
    pub(super) fn fail(&mut self, link: LinkId, qpn: Qpn, epoch: u32) {
        if self.failed.len() == FAILED {
            self.failed.pop_front();
        }
        self.failed.push_in_room((link, qpn, epoch));
    }

    pub(super) fn has_failed(&self, link: LinkId, qpn: Qpn, epoch: u32) -> bool {
        self.failed.contains(&(link, qpn, epoch))
    }

    pub(super) fn of_link(&self, link: LinkId) -> usize {
        self.loans.iter().filter(|loan| loan.link == Some(link)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SRQ: SrqId = SrqId(1);

    fn lend(lending: &mut Lending, taken: &Taken) -> usize {
        lending.make_place(1).unwrap();
        lending.add(SRQ, LinkId(1), taken, &[Sge::default()]).expect("a place was made")
    }

    /// A WQE that came back, was lent again and came back again is the oldest still.
    #[test]
    fn a_wqe_keeps_its_place_however_often_it_is_lent() {
        let mut lending = Lending::default();
        let all: Vec<usize> =
            (0..3).map(|wr_id| lend(&mut lending, &Taken { wr_id, sges: 1, order: None })).collect();
        lending.give_back(all[0]);
        let mut sges = [Sge::default(); 2];
        let first = lending.take(SRQ, &mut sges).expect("it came back");
        assert_eq!((first.wr_id, first.sges), (0, 1));
        let again = lend(&mut lending, &first);
        for at in [all[2], again, all[1]] {
            lending.give_back(at);
        }
        assert_eq!(lending.waiting(SRQ), 3);
        let order: Vec<u64> =
            core::iter::from_fn(|| lending.take(SRQ, &mut sges)).map(|taken| taken.wr_id).collect();
        assert_eq!(order, [0, 1, 2]);
    }
}
