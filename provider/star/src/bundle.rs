//! RDCS: what several RDCs of a connection would bring, in one packet. A program that posts some short
//! messages at once has them leave so, under one token, checksum and CRC.
//!
//! ```text
//! address 64
//! 0 16 | length of the data 16
//! completion, as in an RDC (`carried`)
//! data
//! ```
//!
//! All have the header's OPT. Each is a packet of its own to what comes behind: its PSN is one step behind
//! that of the one before it, the first one's the header's, and it is answered and sent again by itself.
//! Bytes in, numbers out.

use alloc::vec::Vec;

use starverbs_core::NicError;
use starverbs_core::room::exact;

use super::carried::CARRIED_LEN;
use super::message::WqeReader;
use super::wire::{PSN_STEP, StarHeader};

/// Bytes before the completion of each.
const FRONT: usize = 12;
/// Most bytes of data of one.
pub const SHORT: usize = 256;
/// Most bytes of all: with all headers they fit an Ethernet frame.
const ROOM: usize = 1408;

/// An RDC that may leave with others.
#[derive(Clone, Copy, Debug)]
pub struct ShortRdc<'a> {
    /// Its header, but for LEN
    pub header: StarHeader,
    /// What stands before its data
    pub completion: &'a [u8; CARRIED_LEN],
    /// Its data
    pub data: &'a [u8],
}

/// Whether an RDC of so many bytes may leave with others, in a packet of `most` bytes of data.
pub const fn is_short(len: usize, most: u32) -> bool {
    len <= SHORT && FRONT + CARRIED_LEN + len <= most as usize
}

/// RDCs that leave as one packet, once the next does not go with them.
#[derive(Debug, Default)]
pub struct Bundle {
    bytes: Vec<u8>,
    /// The first of them, and how many they are
    first: Option<(StarHeader, u32)>,
}

impl Bundle {
    /// Takes the memory that it needs. `Exhausted`: there is none.
    pub fn make_room(&mut self) -> Result<(), NicError> {
        exact(&mut self.bytes, ROOM)
    }

    /// Adds an RDC. False: there is no room in a packet of `most` bytes of data, or it does not follow those
    /// that are there.
    pub fn add(&mut self, rdc: &ShortRdc<'_>, most: u32) -> bool {
        let ShortRdc { header, completion, data } = rdc;
        let (size, room) = (FRONT + CARRIED_LEN + data.len(), ROOM.min(self.bytes.capacity()));
        if !is_short(data.len(), most) || self.bytes.len() + size > room.min(most as usize) {
            return false;
        }
        let follows = |(first, count): &(StarHeader, u32)| {
            (first.qpn, first.opt, first.psn.plus(count * PSN_STEP)) == (header.qpn, header.opt, header.psn)
        };
        match &mut self.first {
            None => self.first = Some((*header, 1)),
            Some(all) if follows(all) => all.1 += 1,
            Some(_) => return false,
        }
        self.bytes.extend_from_slice(&header.addr.to_be_bytes());
        self.bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
        self.bytes.extend_from_slice(&completion[..]);
        self.bytes.extend_from_slice(data);
        true
    }

    /// The packet that they are, header and data; one alone is an RDC. They stay until
    /// [`clear`](Bundle::clear).
    pub fn packet(&self) -> Option<(StarHeader, &[u8])> {
        use super::wire::Ptype::{Rdc, Rdcs};
        let (first, count) = self.first?;
        let (ptype, data) = if count == 1 { (Rdc, self.bytes.get(FRONT..)?) } else { (Rdcs, &*self.bytes) };
        Some((StarHeader { ptype, len: data.len() as u16, ..first }, data))
    }

    /// They have left.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.first = None;
    }
}

/// The RDCs in the data of an RDCS, from front to back: each one's header, and its data.
pub struct Bundled<'a> {
    next: StarHeader,
    rest: WqeReader<'a>,
}

impl<'a> Bundled<'a> {
    /// Of a packet with this header.
    pub fn new(header: &StarHeader, data: &'a [u8]) -> Self {
        use super::wire::Ptype::Rdc;
        Bundled { next: StarHeader { ptype: Rdc, ..*header }, rest: WqeReader(data) }
    }
}

/// `None`: what comes next is no RDC, and nothing behind it is.
impl<'a> Iterator for Bundled<'a> {
    type Item = Option<(StarHeader, &'a [u8])>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.end().is_some() {
            return None;
        }
        let mut one = || {
            let (addr, len) = (self.rest.long()?, self.rest.word()?);
            let len = usize::try_from(len).ok().filter(|len| *len <= SHORT)? + CARRIED_LEN;
            let data = self.rest.take(len)?;
            Some((StarHeader { addr, len: len as u16, ..self.next }, data))
        };
        let found = one();
        self.next.psn = self.next.psn.plus(PSN_STEP);
        if found.is_none() {
            self.rest = WqeReader(&[]);
        }
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use starverbs_core::{Psn, QPN_MASK};

    use super::*;
    use crate::wire::{Opt, Ptype};

    fn header(psn: u32, addr: u64) -> StarHeader {
        let (ptype, opt, psn) = (Ptype::Rdc, Opt::Send, Psn::new(psn));
        StarHeader { ptype, opt, migrate: false, ack: true, qpn: 7, epoch: 3, psn, addr, len: 0 }
    }

    fn add(
        bundle: &mut Bundle,
        header: StarHeader,
        completion: [u8; CARRIED_LEN],
        data: &[u8],
        most: u32,
    ) -> bool {
        bundle.add(&ShortRdc { header, completion: &completion, data }, most)
    }

    #[test]
    fn what_follows_goes_with_those_before_it() {
        let mut bundle = Bundle::default();
        assert!(!add(&mut bundle, header(0, 1), [1; CARRIED_LEN], b"", 1024), "there is no memory");
        bundle.make_room().unwrap();
        assert_eq!(bundle.packet(), None);
        let first = QPN_MASK - 3;
        assert!(add(&mut bundle, header(first, 0x10), [1; CARRIED_LEN], b"abc", 1024));
        let alone = [&[1; CARRIED_LEN][..], b"abc"].concat();
        let len = alone.len() as u16;
        assert_eq!(bundle.packet(), Some((StarHeader { len, ..header(first, 0x10) }, &alone[..])));
        assert!(!add(&mut bundle, header(4, 0x20), [2; CARRIED_LEN], b"", 1024), "one is missing");
        assert!(!add(&mut bundle, StarHeader { qpn: 8, ..header(0, 0x20) }, [2; CARRIED_LEN], b"", 1024));
        let write = StarHeader { opt: Opt::Write, ..header(0, 0x20) };
        assert!(!add(&mut bundle, write, [2; CARRIED_LEN], b"", 1024), "another right is needed for it");
        assert!(!add(&mut bundle, header(0, 0x20), [2; CARRIED_LEN], b"", 90), "no room");
        assert!(add(&mut bundle, header(0, 0x20), [2; CARRIED_LEN], b"", 91));
        let (whole, data) = bundle.packet().unwrap();
        assert_eq!((whole.ptype, whole.psn.get(), data.len()), (Ptype::Rdcs, first, 91));
        let all: Vec<_> = Bundled::new(&whole, data).map(Option::unwrap).collect();
        let got = |at: usize| (all[at].0.ptype, all[at].0.psn.get(), all[at].0.addr, all[at].0.len);
        assert_eq!(
            (all.len(), got(0), got(1)),
            (2, (Ptype::Rdc, first, 0x10, 35), (Ptype::Rdc, 0, 0x20, 32))
        );
        assert_eq!((all[0].1, all[1].1), (&alone[..], &[2; CARRIED_LEN][..]));
        bundle.clear();
        assert!(bundle.packet().is_none() && add(&mut bundle, header(12, 0), [0; CARRIED_LEN], b"", 1024));
    }

    #[test]
    fn what_is_cut_or_too_long_ends_it() {
        let mut bundle = Bundle::default();
        bundle.make_room().unwrap();
        for n in 0..2 {
            assert!(add(&mut bundle, header(4 * n, 0x10), [1; CARRIED_LEN], &[9; SHORT], 1408));
        }
        assert!(!add(&mut bundle, header(8, 0x10), [1; CARRIED_LEN], &[9; SHORT + 1], 1408));
        let (whole, data) = bundle.packet().unwrap();
        let kinds = |data| Bundled::new(&whole, data).map(|one| one.is_some()).collect::<Vec<_>>();
        assert_eq!(kinds(data), [true, true]);
        for cut in [1, SHORT, SHORT + CARRIED_LEN + FRONT - 1] {
            assert_eq!(kinds(&data[..data.len() - cut]), [true, false], "{cut}");
        }
        let mut long = data.to_vec();
        long[10] = 2;
        assert_eq!(kinds(&long), [false]);
        assert_eq!(kinds(&[]), []);
    }
}
