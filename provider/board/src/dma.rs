//! Memory of a client, as far as it gave the board maps of it.
//!
//! A map's bytes lie in a memory file, which is mapped here and reached by pointers (`guard` has what becomes
//! of a file that is made shorter), or in the memory of a process of the board's own user (/proc/PID/mem),
//! reached by pread(2) and pwrite(2). Everything else is refused.
//!
//! Owns the maps and all the pointers into them. No reference to a client's memory exists: it may change at
//! any time, so that bytes are copied, and words are atomics.

mod file;
mod guard;
mod room;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicU64, Ordering};

use starverbs_backend::copy::write_in_order;

use crate::broken;
use crate::counters::BoardCounters;
use crate::record::BusTap;
use file::{ClientFiles, MapBytes};
use room::{Location, RoomGate};

pub(crate) use room::QueueRoom;

/// Maps of a client at most.
const MAX_MAPS: usize = 65_535;
/// DMA addresses end here: the card's tables have the client's number above.
pub(crate) const ADDRESS_BITS: u32 = 48;
/// Alignment of maps.
const PAGE: u64 = 4096;

/// One map.
struct Map {
    size: u64,
    writable: bool,
    bytes: MapBytes,
}

/// A client's maps.
pub(crate) struct Maps {
    /// By address
    maps: BTreeMap<u64, Map>,
    files: ClientFiles,
    /// Rooms that were made of them, as long as they are there
    rooms: RefCell<Vec<Weak<RoomGate>>>,
    /// Whether the function masters the bus: it reaches nothing if not
    master: Rc<Cell<bool>>,
    counters: Rc<BoardCounters>,
    tap: BusTap,
}

/// Why memory is not taken.
pub(crate) type Errno = i32;

impl Maps {
    /// None. `most`: bytes of address space that their files may take here.
    pub(crate) fn new(most: u64, counters: Rc<BoardCounters>, tap: BusTap) -> Maps {
        let (files, rooms) = (ClientFiles::new(most), RefCell::default());
        Maps { maps: BTreeMap::new(), files, rooms, master: Rc::default(), counters, tap }
    }

    /// Whether the function masters the bus from now on.
    pub(crate) fn set_master(&self, master: bool) {
        self.master.set(master);
    }

    /// Whether it does.
    pub(crate) fn is_master(&self) -> bool {
        self.master.get()
    }

    /// The client has taken pages away under a map.
    pub(crate) fn are_lost(&self) -> bool {
        self.files.are_lost()
    }

    /// Adds a map. EINVAL: it wraps, lies too high, is no whole pages or covers another one; EACCES: its file
    /// is none that the board believes; ENOSPC: there are too many; ENOMEM: its file is too long.
    pub(crate) fn add(
        &mut self,
        address: u64,
        size: u64,
        writable: bool,
        file: File,
        offset: u64,
        same_user: bool,
    ) -> Result<(), Errno> {
        let end = address.checked_add(size).filter(|end| *end <= 1 << ADDRESS_BITS).ok_or(libc::EINVAL)?;
        if size == 0 || [address, size, offset].iter().any(|at| !at.is_multiple_of(PAGE)) {
            return Err(libc::EINVAL);
        }
        let before = self.maps.range(..end).next_back();
        if before.is_some_and(|(at, map)| at + map.size > address) {
            return Err(libc::EINVAL);
        }
        if self.maps.len() >= MAX_MAPS {
            return Err(libc::ENOSPC);
        }
        let bytes = self.files.open(file, offset, size, writable, same_user)?;
        self.maps.insert(address, Map { size, writable, bytes });
        Ok(())
    }

    /// Removes those in a range, which may end at 2^64; queues that lie there are out of reach. EINVAL: the
    /// range wraps, or cuts a map.
    pub(crate) fn remove(&mut self, address: u64, size: u64) -> Result<(), Errno> {
        let Some(more) = size.checked_sub(1) else { return Ok(()) };
        let last = address.checked_add(more).ok_or(libc::EINVAL)?;
        let ends = |(at, map): (&u64, &Map)| at + (map.size - 1);
        let cut_in_front = self.maps.range(..address).next_back().is_some_and(|map| ends(map) >= address);
        let cut_behind = self.maps.range(..=last).next_back().is_some_and(|map| ends(map) > last);
        if cut_in_front || cut_behind {
            return if broken::rule(45) { Ok(()) } else { Err(libc::EINVAL) };
        }
        let inside: Vec<u64> = self.maps.range(address..=last).map(|(at, _)| *at).collect();
        inside.iter().for_each(|at| drop(self.maps.remove(at)));
        if !inside.is_empty() && !broken::rule(36) {
            self.close_rooms(address, last);
            self.files.tidy();
        }
        Ok(())
    }

    /// Forgets all.
    pub(crate) fn clear(&mut self) {
        self.maps.clear();
        self.close_rooms(0, u64::MAX);
        self.files.tidy();
    }

    fn close_rooms(&self, first: u64, last: u64) {
        self.rooms.borrow_mut().retain(|gate| {
            let Some(gate) = gate.upgrade() else { return false };
            if gate.first <= last && first <= gate.last {
                gate.unmapped.set(true);
            }
            !gate.unmapped.get()
        });
    }

    /// The map that has this address, and where in it.
    fn find(&self, address: u64) -> Option<(&Map, u64)> {
        let (at, map) = self.maps.range(..=address).next_back()?;
        let from = address - at;
        (from < map.size).then_some((map, from))
    }

    /// Walks over the maps in which bytes lie: `f(map, where in it, which of the bytes)`. False: they are not
    /// all there, or `f` says so.
    fn walk(&self, address: u64, len: usize, mut f: impl FnMut(&Map, u64, Range<usize>) -> bool) -> bool {
        let mut done = 0;
        while done < len {
            let Some((map, from)) = address.checked_add(done as u64).and_then(|at| self.find(at)) else {
                return false;
            };
            let n = (map.size - from).min((len - done) as u64) as usize;
            if !f(map, from, done..done + n) {
                return false;
            }
            done += n;
        }
        true
    }

    /// Whether anything is mapped here.
    pub(crate) fn has(&self, address: u64) -> bool {
        self.find(address).is_some()
    }

    /// Whether what is mapped here lies in a memory file.
    pub(crate) fn is_file(&self, address: u64) -> bool {
        self.find(address).is_some_and(|(map, _)| matches!(map.bytes, MapBytes::Here(..)))
    }

    /// Where these bytes are in this process, if they are, in one piece and for as long as they are mapped.
    pub(crate) fn pointer(&self, address: u64, len: usize) -> Option<*const u8> {
        /* what is recorded, or played back, is copied */
        let (map, from) = self.find(address).filter(|_| self.is_master() && !self.tap.is_on())?;
        match &map.bytes {
            MapBytes::Here(mapped, at) if mapped.stays() && len as u64 <= map.size - from => {
                Some(mapped.at(at + from as usize).cast_const())
            }
            _ => None,
        }
    }

    /// Copies memory of the client. False: it is not all there.
    #[must_use]
    pub(crate) fn read(&self, address: u64, to: &mut [u8]) -> bool {
        self.tap.read(address, to, |to| self.read_maps(address, to))
    }

    fn read_maps(&self, address: u64, to: &mut [u8]) -> bool {
        let len = to.len();
        self.is_master()
            && self.walk(address, len, |map, from, range| match &map.bytes {
                MapBytes::Here(mapped, at) => {
                    let from = mapped.at(at + from as usize);
                    // SAFETY: `walk` checked that the bytes lie in the map, which is mapped; `to` is ours.
                    unsafe { to[range.clone()].as_mut_ptr().copy_from(from, range.len()) };
                    !mapped.is_lost()
                }
                MapBytes::Process(file, at) => file.read_exact_at(&mut to[range], at + from).is_ok(),
            })
    }

    /// The other way round, the last word last where the memory is mapped here. False: as of [`Maps::read`],
    /// or it may not be written.
    #[must_use]
    pub(crate) fn write(&self, address: u64, data: &[u8]) -> bool {
        self.tap.write(address, data, || self.write_maps(address, data))
    }

    fn write_maps(&self, address: u64, data: &[u8]) -> bool {
        self.is_master()
            && self.walk(address, data.len(), |map, from, range| match &map.bytes {
                _ if !map.writable => false,
                MapBytes::Here(mapped, at) => {
                    let (to, data) = (mapped.at(at + from as usize), &data[range]);
                    if broken::rule(37)
                        && let [front @ .., last] = data
                    {
                        // SAFETY: as below.
                        unsafe { to.wrapping_add(front.len()).write_volatile(*last) };
                        broken::linger();
                    }
                    // SAFETY: as in `read`, and the map may be written.
                    unsafe { write_in_order(to, data.as_ptr(), data.len()) };
                    !mapped.is_lost()
                }
                MapBytes::Process(file, at) => file.write_all_at(&data[range], at + from).is_ok(),
            })
    }

    /// Changes a word, whose address is aligned; gives what was there. Where the board has the memory mapped
    /// it is atomic for all; elsewhere among what this board does. `None`: as of [`Maps::write`].
    pub(crate) fn change(&self, address: u64, change: impl Fn(u64) -> u64) -> Option<u64> {
        self.tap.change(address, &change, || self.change_maps(address, &change))
    }

    fn change_maps(&self, address: u64, change: &impl Fn(u64) -> u64) -> Option<u64> {
        let (map, from) = self.find(address)?;
        if !map.writable || !self.is_master() || !address.is_multiple_of(8) {
            return None;
        }
        match &map.bytes {
            MapBytes::Here(mapped, at) => {
                // SAFETY: eight aligned bytes of the mapping: maps are whole pages.
                let word = unsafe { AtomicU64::from_ptr(mapped.at(at + from as usize).cast()) };
                if broken::rule(38) {
                    let old = word.load(Ordering::SeqCst);
                    broken::linger();
                    word.store(change(old), Ordering::SeqCst);
                    return Some(old);
                }
                let changed = |old| Some(change(old));
                let old = word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, changed).ok();
                old.filter(|_| !mapped.is_lost())
            }
            MapBytes::Process(file, at) => {
                let mut old = [0; 8];
                file.read_exact_at(&mut old, at + from).ok()?;
                let old = u64::from_ne_bytes(old);
                file.write_all_at(&change(old).to_ne_bytes(), at + from).ok()?;
                Some(old)
            }
        }
    }

    /// Memory for a queue: `len` bytes, aligned to `align`. EINVAL: not aligned; EFAULT: not all in maps that
    /// are here and may be written.
    pub(crate) fn room(&self, address: u64, len: usize, align: usize) -> Result<QueueRoom, Errno> {
        if !address.is_multiple_of(align as u64) {
            return Err(libc::EINVAL);
        }
        let mut pieces: Vec<(*mut u8, usize)> = Vec::new();
        let there = self.walk(address, len, |map, from, range| {
            let MapBytes::Here(mapped, at) = &map.bytes else { return false };
            if mapped.is_lost() {
                return false;
            }
            let here = mapped.at(at + from as usize);
            match pieces.last_mut() {
                Some((first, had)) if first.wrapping_add(*had) == here => *had += range.len(),
                _ => pieces.push((here, range.len())),
            }
            map.writable
        });
        let (true, Some((first, _))) = (there, pieces.first().copied()) else { return Err(libc::EFAULT) };
        let place = if pieces.len() == 1 { Location::One(first) } else { pages(address, &pieces)? };
        let gate = Rc::new(RoomGate {
            first: address,
            last: address + (len as u64 - 1),
            unmapped: Cell::new(false),
            master: Rc::clone(&self.master),
            counters: Rc::clone(&self.counters),
            tap: self.tap.clone(),
        });
        self.note(&gate);
        Ok(QueueRoom { gate, place, len })
    }

    /// Remembers a room; forgets those that are gone when they would take more memory.
    fn note(&self, gate: &Rc<RoomGate>) {
        let mut rooms = self.rooms.borrow_mut();
        if rooms.len() == rooms.capacity() {
            rooms.retain(|gate| gate.strong_count() > 0);
            let more = rooms.len().max(64);
            rooms.reserve(more);
        }
        rooms.push(Rc::downgrade(gate));
    }
}

impl Drop for Maps {
    /// No room outlives them.
    fn drop(&mut self) {
        self.clear();
    }
}

/// The pages of memory that lies in several pieces, of which all but the first begin with a page. ENOMEM.
fn pages(address: u64, pieces: &[(*mut u8, usize)]) -> Result<Location, Errno> {
    let skip = (address % PAGE) as usize;
    let count = pieces.iter().map(|(_, len)| len).sum::<usize>() + skip;
    let mut pages = Vec::new();
    pages.try_reserve_exact(count.div_ceil(PAGE as usize)).map_err(|_| libc::ENOMEM)?;
    for (n, (at, len)) in pieces.iter().enumerate() {
        let before = if n == 0 { skip } else { 0 };
        let first = at.wrapping_sub(before);
        pages.extend(
            (0..(len + before).div_ceil(PAGE as usize)).map(|page| first.wrapping_add(page * PAGE as usize)),
        );
    }
    Ok(Location::Pages(pages.into_boxed_slice(), skip))
}

#[cfg(test)]
mod tests;
