//! SRQs of other cards: what is borrowed of each, and who waits for it.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::num::NonZeroU16;

use crate::error::NicError;
use crate::relay::LinkId;
use crate::room::{Room, TwoEnds, exact};
use crate::types::{Mtu, PdId, Qpn};
use crate::wire::HeaderBuf;

/// WQEs borrowed at a time, and how few are left when more are asked for.
pub(super) const BATCH: u32 = 32;
pub(super) const FEW: usize = 16;
/// QPs that are told when a WQE comes; more find out by repeating.
pub(super) const WAITING: usize = 64;
/// SRQs of other cards that are remembered.
const SRQS: usize = 1024;

/// A borrowed WQE. Serial: of the message that it is used for.
#[derive(Clone, Copy)]
pub(super) struct Loan {
    pub(super) id: u32,
    pub(super) room: u32,
    pub(super) link: LinkId,
    pub(super) serial: u32,
}

/// One of [`Abroad::srqs`]: its place, and in the upper bits which of those that stood there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FarId(NonZeroU16);

/// Bits of a place.
const PLACE: u32 = SRQS.ilog2();
/// How many that stood in one place are told apart: an answer does not outlive as many.
const TURNS: u16 = u16::MAX >> PLACE;

/// SRQs of other cards.
#[derive(Default)]
pub(crate) struct Abroad {
    pub(super) srqs: Vec<Far>,
    pub(super) serial: u32,
    /// The block that stands in the numbers of this card's SRQs; 0: none
    pub(crate) home: u32,
    /// Scratch of the frame that brings another card's bytes
    pub(super) frame: Vec<u8>,
}

/// An SRQ of another card.
pub(super) struct Far {
    pub(super) domain: PdId,
    pub(super) number: u32,
    pub(super) link: Option<LinkId>,
    pub(super) loans: VecDeque<Loan>,
    /// An answer is due
    pub(super) asked: bool,
    /// Its card says that it does not exist
    pub(super) gone: bool,
    pub(super) waiting: Vec<Qpn>,
    /// Which it is of those that stood in its place, from 1 to [`TURNS`] and round
    turn: u16,
}

impl Abroad {
    /// Memory that is needed once other cards answer. `Exhausted`: there is none.
    pub(crate) fn make_ready(&mut self) -> Result<(), NicError> {
        exact(&mut self.frame, size_of::<HeaderBuf>() + Mtu::M4096.bytes() as usize)
    }

    /// The SRQ that a QP of `domain` knows by `id`, and the way there. `None`: its card is gone.
    pub(super) fn reach(&self, domain: PdId, id: FarId) -> Option<(u32, LinkId)> {
        let (at, turn) = (usize::from(id.0.get()) % SRQS, id.0.get() >> PLACE);
        let far = self.srqs.get(at).filter(|far| far.domain == domain && far.turn == turn)?;
        Some((far.number, far.link?))
    }

    /// What an answer knows the SRQ at that place by.
    pub(super) fn id(&self, at: usize) -> Option<FarId> {
        let turn = self.srqs.get(at)?.turn;
        NonZeroU16::new(u16::try_from(at).ok()? | turn << PLACE).map(FarId)
    }

    pub(super) fn find(&self, domain: PdId, number: u32) -> Option<usize> {
        self.srqs.iter().position(|far| far.number == number && far.domain == domain)
    }

    /// A place for an SRQ, another's that is of no use any more if there are too many. `None`: there is none,
    /// or no memory.
    pub(super) fn place(&mut self, domain: PdId, number: u32, link: LinkId) -> Option<usize> {
        let (mut loans, mut waiting) = (VecDeque::new(), Vec::new());
        loans.make_exact_room(BATCH as usize).ok()?;
        exact(&mut waiting, WAITING).ok()?;
        let link = Some(link);
        let far = Far { domain, number, link, loans, asked: false, gone: false, waiting, turn: 1 };
        if self.srqs.len() < SRQS {
            self.srqs.make_room(self.srqs.len() + 1).ok()?;
            self.srqs.push_in_room(far);
            return Some(self.srqs.len() - 1);
        }
        /* an answer may still name who stood there */
        let unused = |far: &Far| far.link.is_none() || (far.gone && far.loans.is_empty());
        let of_no_use = self.srqs.iter().enumerate().filter(|(_, far)| unused(far));
        let (at, turn) = of_no_use.map(|(at, far)| (at, far.turn)).min_by_key(|(_, turn)| *turn)?;
        self.srqs[at] = Far { turn: turn % TURNS + 1, ..far };
        Some(at)
    }

    fn by_number(&mut self, link: LinkId, number: u32) -> Option<&mut Far> {
        self.srqs.iter_mut().find(|far| far.link == Some(link) && far.number == number)
    }

    /// A WQE came. False: nobody can use it.
    pub(crate) fn lent(&mut self, link: LinkId, number: u32, id: u32, room: u32) -> bool {
        let Some(far) = self.by_number(link, number) else { return false };
        (far.asked, far.gone) = (false, false);
        let wanted = far.loans.len() < BATCH as usize;
        if wanted {
            far.loans.push_in_room(Loan { id, room, link, serial: 0 });
        }
        wanted
    }

    /// There is none.
    pub(crate) fn refused(&mut self, link: LinkId, number: u32, gone: bool) {
        if let Some(far) = self.by_number(link, number) {
            (far.asked, far.gone) = (false, gone);
        }
    }

    /// The next QP that waits for a WQE.
    pub(crate) fn next_waiting(&mut self, link: LinkId, number: u32) -> Option<Qpn> {
        self.by_number(link, number)?.waiting.pop()
    }

    /// Gives back an unused WQE that is wanted.
    pub(crate) fn recalled(&mut self, link: LinkId, number: u32) -> Option<u32> {
        Some(self.by_number(link, number)?.loans.pop_back()?.id)
    }

    /// The other card is gone, and its WQEs.
    pub(crate) fn cut(&mut self, link: LinkId) {
        for far in self.srqs.iter_mut().filter(|far| far.link == Some(link)) {
            far.link = None;
            far.loans.clear();
            (far.asked, far.gone) = (false, false);
        }
    }

    /// SRQs of a domain that ends.
    pub(crate) fn forget(&mut self, domain: PdId) {
        /* where they stand is what QPs of other domains know theirs by: the places stay */
        for far in self.srqs.iter_mut().filter(|far| far.domain == domain) {
            far.link = None;
            far.loans.clear();
            far.waiting.clear();
            (far.asked, far.gone) = (false, false);
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
    fn an_answer_does_not_name_who_comes_to_the_place() {
        let (mut abroad, domain, link) = (Abroad::default(), PdId(1), LinkId(3));
        for number in 0..SRQS as u32 {
            assert_eq!(abroad.place(domain, number, link), Some(number as usize));
        }
        assert_eq!(abroad.place(domain, 7000, link), None, "all are of use");
        let mut named = abroad.id(5).unwrap();
        assert_eq!(abroad.reach(domain, named), Some((5, link)));
        assert_eq!(abroad.reach(PdId(2), named), None, "not of the domain");
        for number in 7000..7200 {
            abroad.srqs[5].gone = true;
            assert_eq!(abroad.place(domain, number, link), Some(5));
            assert_eq!(abroad.reach(domain, named), None);
            named = abroad.id(5).unwrap();
            assert_eq!(abroad.reach(domain, named), Some((number, link)));
        }
        let last = abroad.id(SRQS - 1).unwrap();
        assert_eq!(abroad.reach(domain, last), Some((SRQS as u32 - 1, link)));
    }
}
