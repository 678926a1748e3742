//! The registered region table (1RMA, section 4.3): which memory others may reach by which key.

use alloc::boxed::Box;

use bitflags::bitflags;

use crate::list::boxed;
use crate::seal::RegionKey;

/// Cards that an address can have: each process of a host has its own.
pub const CARDS: u8 = 64;
/// Of a region's name: where its card's number begins.
const CARD_SHIFT: u32 = 26;

/// Names a region of an address: its place in a table, 16 bits; how often the place was used, 10 bits; and
/// which card of the address has the table, above.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RegionId(pub u32);

impl RegionId {
    fn new(card: u8, place: u16, uses: u16) -> Self {
        RegionId(u32::from(card) << CARD_SHIFT | u32::from(uses) << 16 | u32::from(place))
    }
    const fn place(self) -> usize {
        (self.0 & 0xffff) as usize
    }
    /// Which card of its address has it, below [`CARDS`].
    pub const fn card(self) -> u8 {
        (self.0 >> CARD_SHIFT) as u8
    }
}

/// How often a place was used is counted so far, and then from 0 on.
const USES: u16 = (1 << (CARD_SHIFT - 16)) - 1;
const _: () = assert!(CARDS as u32 == 1 << (32 - CARD_SHIFT));

bitflags! {
    /// What may be done with a region.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct Rights: u8 {
        /// Its owner's commands write to it: data of READs, completions
        const LOCAL_WRITE = 1;
        /// Its owner's commands read it: data of WRITEs, new keys
        const LOCAL_READ = 2;
        /// Who has the key reads it
        const REMOTE_READ = 4;
        /// Who has the key writes it
        const REMOTE_WRITE = 8;
        /// Who has the key changes the key
        const REMOTE_REKEY = 16;
    }
}

/// A region.
#[derive(Clone, Debug)]
pub struct Region {
    /// Host memory, as the environment's DMA has it
    pub addr: u64,
    /// Its bytes
    pub len: u64,
    /// The process whose commands may name it as local
    pub owner: u32,
    /// What may be done with it
    pub rights: Rights,
    /// The key from which those of initiators are derived
    pub key: RegionKey,
}

impl Region {
    /// The host address of `len` bytes at `offset`, if all of them belong to the region.
    pub(crate) fn host_address(&self, offset: u64, len: u32) -> Option<u64> {
        let end = offset.checked_add(u64::from(len))?;
        if end > self.len {
            return None;
        }
        self.addr.checked_add(offset)
    }
}

struct Place {
    uses: u16,
    /// Changes with each key that the place has had
    version: u32,
    region: Option<Region>,
}

/// The table. Its size is fixed.
pub(crate) struct Regions {
    card: u8,
    places: Box<[Place]>,
}

impl Regions {
    /// The table of a card, of `capacity` regions. `None`: there is no memory.
    pub(crate) fn new(card: u8, capacity: u16) -> Option<Self> {
        let places = boxed(usize::from(capacity), || Place { uses: 0, version: 0, region: None })?;
        Some(Regions { card, places })
    }

    /// Adds a region. `None`: the table is full.
    pub(crate) fn open(&mut self, region: Region) -> Option<RegionId> {
        let at = self.places.iter().position(|place| place.region.is_none())?;
        let place = self.places.get_mut(at)?;
        place.version = place.version.wrapping_add(1);
        place.region = Some(region);
        Some(RegionId::new(self.card, at as u16, place.uses))
    }

    /// Takes a region away: nobody reaches it from here on. False: there is none.
    pub(crate) fn close(&mut self, id: RegionId) -> bool {
        let Some(place) = self.place(id) else { return false };
        place.uses = (place.uses + 1) & USES;
        place.region.take().is_some()
    }

    /// A region and the version of its key.
    pub(crate) fn get(&self, id: RegionId) -> Option<(&Region, u32)> {
        let place = self.places.get(id.place())?;
        let region = place.region.as_ref()?;
        (RegionId::new(self.card, id.place() as u16, place.uses) == id).then_some((region, place.version))
    }

    fn place(&mut self, id: RegionId) -> Option<&mut Place> {
        self.get(id)?;
        self.places.get_mut(id.place())
    }

    /// The region has another key from here on: what was begun under the old one ends. False: there is none.
    pub(crate) fn rekey(&mut self, id: RegionId, key: RegionKey) -> bool {
        let Some(place) = self.place(id) else { return false };
        let Some(region) = &mut place.region else { return false };
        region.key = key;
        place.version = place.version.wrapping_add(1);
        true
    }

    /// Host memory of a command's own side, if its process may use it so.
    pub(crate) fn local(&self, id: RegionId, owner: u32, range: (u64, u32), need: Rights) -> Option<u64> {
        let (region, _) = self.get(id)?;
        let allowed = region.owner == owner && region.rights.contains(need);
        if allowed { region.host_address(range.0, range.1) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(len: u64) -> Region {
        let key = RegionKey([7; 16]);
        Region { addr: 0x1000, len, owner: 5, rights: Rights::LOCAL_READ, key }
    }

    #[test]
    fn a_closed_region_is_not_reached_by_its_old_name() {
        let mut regions = Regions::new(5, 2).expect("memory");
        let first = regions.open(region(64)).expect("a place");
        regions.open(region(64)).expect("a place");
        assert!(regions.open(region(64)).is_none(), "full");
        assert!(regions.close(first) && !regions.close(first));
        let next = regions.open(region(64)).expect("a place");
        assert_ne!(first, next);
        assert!(regions.get(first).is_none() && regions.get(next).is_some());
        assert!(regions.get(RegionId(99)).is_none());
    }

    #[test]
    fn a_region_names_its_card() {
        let mut tables = [0, CARDS - 1].map(|card| Regions::new(card, 1).expect("memory"));
        for uses in 0..=USES {
            let [first, last] = tables.each_mut().map(|table| table.open(region(64)).expect("a place"));
            assert_eq!((first.card(), last.card()), (0, CARDS - 1));
            assert_eq!(first.0 >> 16, u32::from(uses));
            assert!(tables[0].get(last).is_none() && tables[1].get(first).is_none());
            assert!(tables[0].close(first) && tables[1].close(last));
        }
        assert_eq!(tables[0].open(region(64)), Some(RegionId(0)), "uses are counted anew");
    }

    #[test]
    fn local_memory_has_bounds_owner_and_rights() {
        let mut regions = Regions::new(0, 1).expect("memory");
        let id = regions.open(region(64)).expect("a place");
        let of = |owner, range, need| regions.local(id, owner, range, need);
        assert_eq!(of(5, (1, 63), Rights::LOCAL_READ), Some(0x1001));
        assert_eq!(of(5, (1, 64), Rights::LOCAL_READ), None);
        assert_eq!(of(5, (u64::MAX, 2), Rights::LOCAL_READ), None);
        assert_eq!(of(6, (0, 1), Rights::LOCAL_READ), None);
        assert_eq!(of(5, (0, 1), Rights::LOCAL_WRITE), None);
    }
}
