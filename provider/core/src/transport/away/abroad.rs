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

/// One of [`Abroad::srqs`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FarId(NonZeroU16);

impl FarId {
    pub(super) fn of(at: usize) -> Option<FarId> {
        NonZeroU16::new(u16::try_from(at + 1).ok()?).map(FarId)
    }
}

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
}

impl Abroad {
    /// Memory that is needed once other cards answer. `Exhausted`: there is none.
    pub(crate) fn make_ready(&mut self) -> Result<(), NicError> {
        exact(&mut self.frame, size_of::<HeaderBuf>() + Mtu::M4096.bytes() as usize)
    }

    /// The SRQ that a QP of `domain` knows by `id`, and the way there. `None`: its card is gone.
    pub(super) fn reach(&self, domain: PdId, id: FarId) -> Option<(u32, LinkId)> {
        let far = self.srqs.get(usize::from(id.0.get()) - 1).filter(|far| far.domain == domain)?;
        Some((far.number, far.link?))
    }

    pub(super) fn find(&self, domain: PdId, number: u32) -> Option<usize> {
        self.srqs.iter().position(|far| far.number == number && far.domain == domain)
    }

    /// A place for an SRQ, another's that is of no use any more if there are too many. `None`: there is none, or no memory.
    pub(super) fn place(&mut self, domain: PdId, number: u32, link: LinkId) -> Option<usize> {
        let (mut loans, mut waiting) = (VecDeque::new(), Vec::new());
        loans.make_exact_room(BATCH as usize).ok()?;
        exact(&mut waiting, WAITING).ok()?;
        let far = Far { domain, number, link: Some(link), loans, asked: false, gone: false, waiting };
        if self.srqs.len() < SRQS {
            self.srqs.make_room(self.srqs.len() + 1).ok()?;
            self.srqs.push_in_room(far);
            return Some(self.srqs.len() - 1);
        }
        let at = self.srqs.iter().position(|far| far.link.is_none() || (far.gone && far.loans.is_empty()))?;
        self.srqs[at] = far;
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
