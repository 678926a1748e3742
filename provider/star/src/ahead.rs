//! Packets that came to SL's card before their turn, as one before them was lost: they need not come again.
//!
//! The pool is the card's, and as large whatever connections there are. It is a cache: a packet that is not
//! kept, or not kept long enough, is sent again by SF. So nothing is lost with the pool, and whoever takes
//! memory away from packets forgets all that is in it.

use alloc::vec::Vec;

use starverbs_core::NicError;

use super::turn::DataTurn;
use super::wire::StarHeader;

/// Packets that it holds, at most.
pub(crate) const PLACES: u32 = 512;
/// Bytes behind the header of the longest.
const LONGEST: usize = 4096;
/// LEN of an RDA that says so of its packet: it has not had its turn, and need not come again.
pub(crate) const KEPT: u16 = 1;

/// One place.
#[derive(Clone, Copy, Debug)]
struct Place {
    header: StarHeader,
    turn: DataTurn,
    epoch: u32,
    /// Which bytes are its, and how many
    frame: u16,
    len: u16,
    /// So many were kept before it
    order: u32,
    used: bool,
}

/// What waits for its turn.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// By slot and number
    places: Vec<Option<Place>>,
    bytes: Vec<u8>,
    used: u32,
    order: u32,
}

fn place_of(slot: u64, number: u32) -> usize {
    /* numbers of one connection are one behind the other; those of two begin anywhere */
    let first = (slot.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32;
    (first.wrapping_add(number) % PLACES) as usize
}

impl Ahead {
    /// There is room from now on. `Exhausted`: no memory.
    pub(super) fn make_room(&mut self) -> Result<(), NicError> {
        if self.places.is_empty() {
            let exhausted = |_| NicError::Exhausted;
            self.bytes.try_reserve_exact(PLACES as usize * LONGEST).map_err(exhausted)?;
            self.places.try_reserve_exact(PLACES as usize).map_err(exhausted)?;
            self.places.resize(PLACES as usize, None);
        }
        Ok(())
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Keeps a packet with its turn, and what stands behind its header. False: it is not kept.
    pub(super) fn keep(&mut self, turn: &DataTurn, epoch: u32, header: &StarHeader, data: &[u8]) -> bool {
        let Some(place) = self.places.get_mut(place_of(turn.slot, turn.number)) else { return false };
        if data.len() > LONGEST {
            return false;
        }
        let before = place.filter(|place| place.used);
        /* of one connection the newer one is kept: that before has had its turn. Others wait until it is
         * old
         */
        let others = before.filter(|place| (place.turn.slot, place.epoch) != (turn.slot, epoch));
        if others.is_some_and(|place| self.order.wrapping_sub(place.order) < PLACES) {
            return false;
        }
        let frame = place.map_or((self.bytes.len() / LONGEST) as u16, |place| place.frame);
        let at = usize::from(frame) * LONGEST;
        if place.is_none() {
            /* there is room for as many as there are places */
            self.bytes.resize(at + LONGEST, 0);
        }
        let Some(to) = self.bytes.get_mut(at..at + data.len()) else { return false };
        to.copy_from_slice(data);
        let (len, order) = (data.len() as u16, self.order);
        *place = Some(Place { header: *header, turn: *turn, epoch, frame, len, order, used: true });
        self.order = order.wrapping_add(1);
        self.used += u32::from(before.is_none());
        true
    }

    /// The packet of a connection that has this number, if it is kept: it is kept no longer.
    pub(super) fn take(&mut self, slot: u64, epoch: u32, number: u32) -> Option<(StarHeader, &[u8])> {
        let place = self.places.get_mut(place_of(slot, number))?.as_mut()?;
        if !place.used || (place.turn.slot, place.epoch, place.turn.number) != (slot, epoch, number) {
            return None;
        }
        place.used = false;
        self.used -= 1;
        let at = usize::from(place.frame) * LONGEST;
        let data = self.bytes.get(at..at + usize::from(place.len))?;
        Some((place.header, data))
    }

    /// Forgets all of them.
    pub(super) fn clear(&mut self) {
        if self.used > 0 {
            self.places.iter_mut().flatten().for_each(|place| place.used = false);
            self.used = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::vec;

    use starverbs_core::Psn;

    use super::*;
    use crate::wire::{Opt, Ptype};

    fn header(psn: u32) -> StarHeader {
        StarHeader {
            ptype: Ptype::Rd,
            opt: Opt::Recv,
            migrate: false,
            ack: true,
            qpn: 5,
            epoch: 7,
            psn: Psn::new(psn),
            addr: 0x1000,
            len: 3,
        }
    }

    fn turn(slot: u64, number: u32) -> DataTurn {
        DataTurn { slot, number, send: false }
    }

    #[test]
    fn each_is_given_once_and_to_its_connection() {
        let mut ahead = Ahead::default();
        assert!(!ahead.keep(&turn(64, 3), 7, &header(0), b"abc"), "there is no room yet");
        ahead.make_room().unwrap();
        for number in [u32::MAX, 0, 1] {
            assert!(ahead.keep(&turn(64, number), 7, &header(number & 0xff), b"abc"));
        }
        for (slot, epoch, number) in [(64, 8, 0), (80, 7, 0), (64, 7, 2)] {
            assert_eq!(ahead.take(slot, epoch, number), None);
        }
        assert_eq!(ahead.take(64, 7, u32::MAX), Some((header(0xff), &b"abc"[..])));
        assert_eq!(ahead.take(64, 7, u32::MAX), None);
        assert_eq!(ahead.used, 2);
        ahead.clear();
        assert!(ahead.is_empty() && ahead.take(64, 7, 0).is_none());
        assert!(!ahead.keep(&turn(64, 3), 7, &header(0), &vec![0; LONGEST + 1]));
    }

    /// A connection that has gone keeps no place for good, and takes none from one that is there.
    #[test]
    fn a_place_is_another_connections_when_it_is_old() {
        let mut ahead = Ahead::default();
        ahead.make_room().unwrap();
        assert!(ahead.keep(&turn(64, 3), 7, &header(1), b"abc"));
        assert!(!ahead.keep(&turn(64, 3), 8, &header(2), b"abc"));
        assert!(ahead.keep(&turn(64, 3 + PLACES), 7, &header(3), b"abcd"), "the one before has had its turn");
        let mut number = 4;
        (1..PLACES).for_each(|_| {
            number += 1 + u32::from(number % PLACES == 2);
            assert!(ahead.keep(&turn(64, number), 7, &header(4), b"abc"));
        });
        assert!(ahead.keep(&turn(64, 3), 8, &header(5), b"abc"));
        assert_eq!(ahead.take(64, 8, 3), Some((header(5), &b"abc"[..])));
        assert!(ahead.bytes.len() <= PLACES as usize * LONGEST);
    }
}
