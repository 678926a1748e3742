//! Translation tables: where the bytes of regions are that lie in many pages.
//!
//! The card knows such a region by a range of addresses that nothing else has, `ranges`, in which its bytes
//! stand one after the other. The table of its pages lies in the client's memory, and is read when it is
//! needed. It may change at any time: what it says is checked each time.

use std::collections::BTreeMap;
use std::ops::Range;

use starverbs_queues::board::Region;

use crate::broken;
use crate::dma::{ADDRESS_BITS, Errno, Maps};

/// log2 of the end of the ranges.
pub(crate) const RANGE_BITS: u32 = 54;
/// Ranges begin at multiples of that, so that an aligned address of a region is one of its range.
const ALIGN: u64 = 4096;
/// Bytes of an entry.
const ENTRY: u64 = 8;
/// log2 of the bytes of a page.
const PAGE_LOGS: std::ops::RangeInclusive<u32> = 12..=30;

/// One table.
#[derive(Clone, Copy)]
pub(crate) struct Table {
    /// DMA address of its entries
    pub(crate) addr: u64,
    pub(crate) pieces: u32,
    pub(crate) page_log: u32,
    /// Where in the first page the region begins
    pub(crate) offset: u32,
    /// Bytes of the range
    size: u64,
}

impl Table {
    /// The table of a region. EINVAL: sizes or addresses that no region can have.
    pub(crate) fn of(region: &Region) -> Result<Table, Errno> {
        let Region { pieces, addr, length, page_log, offset, .. } = *region;
        let has = u64::from(pieces) << page_log.min(*PAGE_LOGS.end());
        let needs = length.checked_add(offset.into()).ok_or(libc::EINVAL)?;
        let table_end = addr.checked_add(u64::from(pieces) * ENTRY).ok_or(libc::EINVAL)?;
        let sound = PAGE_LOGS.contains(&page_log)
            && u64::from(offset) < 1 << page_log
            && addr.is_multiple_of(ENTRY)
            && table_end <= 1 << ADDRESS_BITS
            && needs <= has
            && needs <= 1 << ADDRESS_BITS;
        if !sound && !broken::rule(56) {
            return Err(libc::EINVAL);
        }
        let size = needs.next_multiple_of(ALIGN).max(ALIGN);
        Ok(Table { addr, pieces, page_log, offset, size })
    }

    /// The DMA address of a page. `None`: there is none, its entry is not mapped, or no page's address.
    fn page(&self, maps: &Maps, index: u64) -> Option<u64> {
        if index >= u64::from(self.pieces) {
            return None;
        }
        let mut entry = [0; ENTRY as usize];
        if !maps.read(self.addr + index * ENTRY, &mut entry) {
            return None;
        }
        let page = u64::from_le_bytes(entry);
        (page.is_multiple_of(1 << self.page_log) && page < 1 << ADDRESS_BITS).then_some(page)
    }
}

/// The tables of a function.
#[derive(Default)]
pub(crate) struct Tables {
    /// By where its range begins
    ranges: BTreeMap<u64, Table>,
    /// Where the last range ended: addresses are not used anew soon
    next: u64,
}

impl Tables {
    /// Gives a table a range; where it begins. ENOMEM: there is no room for it.
    pub(crate) fn add(&mut self, table: Table) -> Result<u64, Errno> {
        let begin =
            self.gap(self.next, table.size).or_else(|| self.gap(0, table.size)).ok_or(libc::ENOMEM)?;
        self.next = begin + table.size;
        self.ranges.insert(begin, table);
        Ok(begin)
    }

    /// The first place from `from` on with so much room.
    fn gap(&self, from: u64, size: u64) -> Option<u64> {
        let before = self.ranges.range(..from).next_back();
        let mut at = before.map_or(from, |(begin, table)| from.max(begin + table.size));
        for (begin, table) in self.ranges.range(at..) {
            if *begin - at >= size {
                break;
            }
            at = begin + table.size;
        }
        at.checked_add(size).filter(|end| *end <= 1 << RANGE_BITS).map(|_| at)
    }

    /// The table in whose range an address is, and where in the range.
    pub(crate) fn find(&self, address: u64) -> Option<(&Table, u64)> {
        let (begin, table) = self.ranges.range(..=address).next_back()?;
        let from = address - begin;
        (from < table.size).then_some((table, from))
    }

    /// Forgets the table in whose range an address is.
    pub(crate) fn remove(&mut self, address: u64) {
        let begin = self.ranges.range(..=address).next_back().map(|(begin, _)| *begin);
        if let Some(begin) = begin.filter(|_| self.find(address).is_some()) {
            self.ranges.remove(&begin);
        }
    }

    /// Walks over the pages in which `len` bytes at an address of a range lie: `f(DMA address, which of the
    /// bytes)`. Gives how many pieces there were; `None`: they are not all there, or `f` says so.
    pub(crate) fn walk(
        &self,
        maps: &Maps,
        address: u64,
        len: usize,
        mut f: impl FnMut(u64, Range<usize>) -> bool,
    ) -> Option<u64> {
        let (table, from) = self.find(address)?;
        let (mut done, mut pieces, page_size) = (0, 0, 1u64 << table.page_log);
        while done < len {
            let at = from + done as u64;
            let skip = at % page_size;
            let n = (page_size - skip).min((len - done) as u64) as usize;
            let page = table.page(maps, at >> table.page_log)?;
            let skip = if broken::rule(57) { 0 } else { skip };
            if !f(page + skip, done..done + n) {
                return None;
            }
            done += n;
            pieces += 1;
        }
        Some(pieces)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region() -> Region {
        Region { pieces: 3, addr: 0x1000, length: 8192, page_log: 12, offset: 100, ..Region::default() }
    }

    #[test]
    fn sizes_of_tables_are_checked() {
        let good = region();
        assert!(Table::of(&good).is_ok());
        for wrong in [
            Region { page_log: 11, offset: 0, ..good },
            Region { page_log: 31, ..good },
            Region { page_log: u32::MAX, ..good },
            Region { offset: 4096, ..good },
            Region { addr: 0x1004, ..good },
            Region { addr: (1 << 48) - 16, ..good },
            Region { addr: u64::MAX - 7, ..good },
            Region { length: 3 * 4096 - 99, ..good },
            Region { length: u64::MAX, ..good },
            Region { pieces: u32::MAX, page_log: 30, length: (1 << 48) - 99, ..good },
        ] {
            assert_eq!(Table::of(&wrong).map(|_| ()), Err(libc::EINVAL), "{wrong:?}");
        }
        assert!(Table::of(&Region { length: 3 * 4096 - 100, ..good }).is_ok());
        assert!(Table::of(&Region { length: 0, ..good }).is_ok(), "no bytes");
    }

    #[test]
    fn ranges_are_apart_and_come_back() {
        let (mut tables, table) = (Tables::default(), Table::of(&region()).unwrap());
        let all: Vec<u64> = (0..100).map(|_| tables.add(table).unwrap()).collect();
        let mut sorted = all.clone();
        sorted.dedup_by(|next, begin| *next - *begin < table.size);
        assert_eq!((sorted.len(), table.size), (100, 3 * 4096), "none lies in another");
        all.iter().for_each(|begin| tables.remove(begin + table.size - 1));
        assert!(tables.ranges.is_empty() && tables.find(all[0]).is_none());
        /* as many large ones as there is room for, and one more when one has gone */
        let large = Region { pieces: 1 << 18, page_log: 30, length: 1 << 48, offset: 0, ..region() };
        let large = Table::of(&large).unwrap();
        let mut last = Vec::new();
        while let Ok(begin) = tables.add(large) {
            last.push(begin);
        }
        assert!(last.len() >= 63, "{}", last.len());
        tables.remove(last[30] + 5);
        assert_eq!(tables.add(large), Ok(last[30]));
        assert_eq!(tables.add(large), Err(libc::ENOMEM));
    }
}
