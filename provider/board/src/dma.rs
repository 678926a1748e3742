//! Memory of a client, as far as it gave the board maps of it.
//!
//! A map's bytes lie in a file. One that is sealed against shrinking is mapped here, and reached by pointers:
//! nobody can take its pages away. The memory of a process (/proc/PID/mem), of a client of the board's own
//! user, is reached by pread(2) and pwrite(2). Everything else is refused.
//!
//! Owns the maps and all the pointers into them. No reference to a client's memory exists: it may change at
//! any time, so that bytes are copied, and words are atomics.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::ptr;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::statfs::{HUGETLBFS_MAGIC, PROC_SUPER_MAGIC, TMPFS_MAGIC, fstatfs};
use starverbs_backend::copy::write_in_order;
use starverbs_queues::BLOCK;

use crate::broken;

/// Maps of a client at most.
const MAX_MAPS: usize = 512;
/// DMA addresses end here: the card's tables have the client's number above.
pub(crate) const ADDRESS_BITS: u32 = 48;
/// Alignment of maps.
const PAGE: u64 = 4096;

/// One map.
struct Map {
    address: u64,
    size: u64,
    writable: bool,
    bytes: Bytes,
}

/// Where its bytes are.
enum Bytes {
    Here(Rc<MmapRaw>),
    /// Of a process: its address of the first byte
    Process(File, u64),
}

/// A client's maps, by address.
#[derive(Default)]
pub(crate) struct Maps(Vec<Map>);

/// Why memory is not taken.
pub(crate) type Errno = i32;

impl Maps {
    /// Adds a map. EINVAL: it wraps, lies too high, is no whole pages or covers another one; EACCES: its file
    /// is none that the board believes; ENOSPC: there are too many.
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
        let at = self.0.partition_point(|map| map.address < address);
        let covers = |map: &Map| map.address < end && address < map.address + map.size;
        let neighbours = self.0[at.saturating_sub(1)..].iter().take(2);
        if neighbours.into_iter().any(covers) {
            return Err(libc::EINVAL);
        }
        if self.0.len() >= MAX_MAPS {
            return Err(libc::ENOSPC);
        }
        let bytes = open(file, offset, size, same_user)?;
        self.0.insert(at, Map { address, size, writable, bytes });
        Ok(())
    }

    /// Removes those in a range, which may end at 2^64. EINVAL: it wraps, or cuts one; EBUSY: queues lie in
    /// one.
    pub(crate) fn remove(&mut self, address: u64, size: u64) -> Result<(), Errno> {
        let last = address.checked_add(size.saturating_sub(1)).ok_or(libc::EINVAL)?;
        let touches = |map: &Map| map.address <= last && address < map.address + map.size;
        let lies_in = |map: &Map| address <= map.address && map.address + map.size - 1 <= last;
        if self.0.iter().any(|map| touches(map) && !lies_in(map)) {
            return if broken::rule(45) { Ok(()) } else { Err(libc::EINVAL) };
        }
        let used = |map: &Map| matches!(&map.bytes, Bytes::Here(map) if Rc::strong_count(map) > 1);
        if self.0.iter().any(|map| touches(map) && used(map)) && !broken::rule(36) {
            return Err(libc::EBUSY);
        }
        self.0.retain(|map| size == 0 || !touches(map));
        Ok(())
    }

    /// Forgets all. Memory that queues lie in stays until they end.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// The map that has these bytes, and where in it.
    fn find(&self, address: u64, len: usize) -> Option<(&Map, u64)> {
        let at = self.0.partition_point(|map| map.address <= address).checked_sub(1)?;
        let map = &self.0[at];
        let from = address - map.address;
        let end = from.checked_add(len as u64)?;
        (end <= map.size).then_some((map, from))
    }

    /// Where these bytes are in this process, if they are.
    pub(crate) fn pointer(&self, address: u64, len: usize) -> Option<*const u8> {
        match self.find(address, len)? {
            (Map { bytes: Bytes::Here(map), .. }, from) => Some(map.as_ptr().wrapping_add(from as usize)),
            _ => None,
        }
    }

    /// Copies memory of the client. False: it is not all there.
    #[must_use]
    pub(crate) fn read(&self, address: u64, to: &mut [u8]) -> bool {
        match self.find(address, to.len()) {
            Some((Map { bytes: Bytes::Here(map), .. }, from)) => {
                // SAFETY: `find` checked that the bytes lie in the mapping, which is there; `to` is ours.
                unsafe { to.as_mut_ptr().copy_from(map.as_ptr().add(from as usize), to.len()) };
                true
            }
            Some((Map { bytes: Bytes::Process(file, at), .. }, from)) => {
                file.read_exact_at(to, at + from).is_ok()
            }
            None => false,
        }
    }

    /// The other way round, the last word last where the memory is mapped here. False: as of [`Maps::read`],
    /// or it may not be written.
    #[must_use]
    pub(crate) fn write(&self, address: u64, data: &[u8]) -> bool {
        match self.find(address, data.len()) {
            Some((Map { bytes: Bytes::Here(map), writable: true, .. }, from)) => {
                let to = map.as_mut_ptr().wrapping_add(from as usize);
                if broken::rule(37)
                    && let [front @ .., last] = data
                {
                    // SAFETY: as below.
                    unsafe { to.wrapping_add(front.len()).write_volatile(*last) };
                    broken::linger();
                }
                // SAFETY: as in `read`, and the map may be written.
                unsafe { write_in_order(to, data.as_ptr(), data.len()) };
                true
            }
            Some((Map { bytes: Bytes::Process(file, at), writable: true, .. }, from)) => {
                file.write_all_at(data, at + from).is_ok()
            }
            _ => false,
        }
    }

    /// Changes a word, whose address is aligned; gives what was there. Where the board has the memory mapped
    /// it is atomic for all; elsewhere among what this board does. `None`: as of [`Maps::write`].
    pub(crate) fn change(&self, address: u64, change: impl Fn(u64) -> u64) -> Option<u64> {
        let (map, from) = self.find(address, 8)?;
        if !map.writable || !address.is_multiple_of(8) {
            return None;
        }
        match &map.bytes {
            Bytes::Here(map) => {
                // SAFETY: eight aligned bytes of the mapping, as `find` checked; maps are whole pages.
                let word = unsafe { AtomicU64::from_ptr(map.as_mut_ptr().add(from as usize).cast()) };
                if broken::rule(38) {
                    let old = word.load(Ordering::SeqCst);
                    broken::linger();
                    word.store(change(old), Ordering::SeqCst);
                    return Some(old);
                }
                let changed = |old| Some(change(old));
                word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, changed).ok()
            }
            Bytes::Process(file, at) => {
                let mut old = [0; 8];
                file.read_exact_at(&mut old, at + from).ok()?;
                let old = u64::from_ne_bytes(old);
                file.write_all_at(&change(old).to_ne_bytes(), at + from).ok()?;
                Some(old)
            }
        }
    }

    /// Memory for a queue: `len` bytes, aligned to `align`. EINVAL: not aligned; EFAULT: not in one map that
    /// is here and may be written.
    pub(crate) fn room(&self, address: u64, len: usize, align: usize) -> Result<Room, Errno> {
        if !address.is_multiple_of(align as u64) {
            return Err(libc::EINVAL);
        }
        match self.find(address, len) {
            Some((Map { bytes: Bytes::Here(map), writable: true, .. }, from)) => {
                let at = map.as_mut_ptr().wrapping_add(from as usize);
                Ok(Room { _map: Rc::clone(map), at, len })
            }
            _ => Err(libc::EFAULT),
        }
    }
}

/// Opens the bytes of a map. EACCES: the file is none that the board believes.
fn open(file: File, offset: u64, size: u64, same_user: bool) -> Result<Bytes, Errno> {
    let errno = |error: io::Error| error.raw_os_error().unwrap_or(libc::EIO);
    let kind = fstatfs(&file).map_err(|error| error as i32)?.filesystem_type();
    if kind == PROC_SUPER_MAGIC && same_user {
        return Ok(Bytes::Process(file, offset));
    }
    /* only a memory file has seals; one of huge pages may lack pages when they are touched */
    let seals = fcntl(&file, FcntlArg::F_GET_SEALS).map(SealFlag::from_bits_retain);
    if kind != TMPFS_MAGIC || !seals.is_ok_and(|seals| seals.contains(SealFlag::F_SEAL_SHRINK)) {
        let guest = same_user && matches!(kind, TMPFS_MAGIC | HUGETLBFS_MAGIC) || broken::rule(40);
        return if guest { Ok(Bytes::Process(file, offset)) } else { Err(libc::EACCES) };
    }
    let end = offset.checked_add(size).ok_or(libc::EINVAL)?;
    /* behind a file's end its last page is zeroes */
    if end > file.metadata().map_err(errno)?.len().next_multiple_of(PAGE) {
        return Err(libc::EINVAL);
    }
    let len = usize::try_from(size).map_err(|_| libc::EINVAL)?;
    let map = MmapOptions::new().offset(offset).len(len).map_raw(&file).map_err(errno)?;
    Ok(Bytes::Here(Rc::new(map)))
}

/// Memory of a queue, in a client's map.
pub(crate) struct Room {
    _map: Rc<MmapRaw>,
    at: *mut u8,
    len: usize,
}

impl Room {
    /// The words of a block at `at`, which the client may change meanwhile.
    ///
    /// # Panics
    /// It does not lie in the room.
    pub(crate) fn block(&self, at: usize) -> [u64; BLOCK / 8] {
        std::array::from_fn(|word| self.word(at + 8 * word).load(Ordering::Relaxed))
    }

    /// A word of 64 bits.
    ///
    /// # Panics
    /// It does not lie in the room, or is not aligned.
    pub(crate) fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.len, "a word outside of a queue");
        // SAFETY: inside the mapping, which lives as long as this; rooms are aligned to 8 bytes at least.
        unsafe { AtomicU64::from_ptr(self.at.add(at).cast()) }
    }

    /// A word of 32 bits.
    ///
    /// # Panics
    /// It does not lie in the room, or is not aligned.
    pub(crate) fn half(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at + 4 <= self.len, "a word outside of a queue");
        // SAFETY: as in `word`; rooms of such words are aligned to 4 bytes at least.
        unsafe { AtomicU32::from_ptr(self.at.add(at).cast()) }
    }

    /// Copies bytes at `at`.
    ///
    /// # Panics
    /// They do not lie in the room.
    pub(crate) fn read(&self, at: usize, to: &mut [u8]) {
        assert!(at <= self.len && to.len() <= self.len - at, "bytes outside of a queue");
        // SAFETY: inside the mapping; `to` is ours.
        unsafe { ptr::copy(self.at.add(at), to.as_mut_ptr(), to.len()) };
    }

    /// The other way round.
    ///
    /// # Panics
    /// They do not lie in the room.
    pub(crate) fn write(&self, at: usize, from: &[u8]) {
        assert!(at <= self.len && from.len() <= self.len - at, "bytes outside of a queue");
        // SAFETY: inside the mapping, which may be written.
        unsafe { ptr::copy(from.as_ptr(), self.at.add(at), from.len()) };
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;

    fn file(len: u64, seals: SealFlag) -> File {
        let file = File::from(memfd_create(c"test", MFdFlags::MFD_ALLOW_SEALING).unwrap());
        file.set_len(len).unwrap();
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
        file
    }

    fn sealed(len: u64) -> File {
        file(len, SealFlag::F_SEAL_SHRINK)
    }

    #[test]
    fn only_memory_that_stays_is_mapped() {
        let mut maps = Maps::default();
        let may_shrink = || file(PAGE, SealFlag::empty());
        assert_eq!(maps.add(0, PAGE, true, may_shrink(), 0, false), Err(libc::EACCES), "another user's");
        assert_eq!(maps.add(8 * PAGE, PAGE, true, may_shrink(), 0, true), Ok(()));
        assert_eq!(
            maps.add(0, PAGE, true, File::open("/proc/self/exe").unwrap(), 0, true),
            Err(libc::EACCES)
        );
        assert_eq!(maps.add(0, 2 * PAGE, true, sealed(PAGE), 0, true), Err(libc::EINVAL), "past its end");
        let memory = || File::open("/proc/self/mem").unwrap();
        assert_eq!(maps.add(0, PAGE, true, memory(), 0, false), Err(libc::EACCES), "another user's");
        assert_eq!(maps.add(0, PAGE, true, memory(), 0, true), Ok(()));
        assert_eq!(maps.room(0, 8, 8).err(), Some(libc::EFAULT), "no queue lies there");
        assert_eq!(maps.add(PAGE, PAGE, true, sealed(PAGE), 0, false), Ok(()));
        assert!(maps.room(PAGE, 8, 8).is_ok());
    }

    #[test]
    fn ranges_are_checked() {
        let mut maps = Maps::default();
        let mut add = |address, size| maps.add(address, size, true, sealed(4 * PAGE), 0, false);
        let top = 1 << ADDRESS_BITS;
        for (address, size) in
            [(u64::MAX - 4095, PAGE), (top, PAGE), (top - PAGE, 2 * PAGE), (0, 0), (1, PAGE), (0, 7)]
        {
            assert_eq!(add(address, size), Err(libc::EINVAL), "{address:#x} {size:#x}");
        }
        assert_eq!(add(4 * PAGE, 2 * PAGE), Ok(()));
        for (address, size) in
            [(4 * PAGE, PAGE), (5 * PAGE, 2 * PAGE), (3 * PAGE, 2 * PAGE), (PAGE, 4 * PAGE)]
        {
            assert_eq!(add(address, size), Err(libc::EINVAL), "covers another");
        }
        assert_eq!(add(6 * PAGE, PAGE), Ok(()));
        let mut two = [0; 2];
        assert!(maps.read(6 * PAGE - 2, &mut two) && !maps.read(6 * PAGE - 1, &mut two), "not across maps");
        assert!(!maps.read(u64::MAX, &mut two));
        let held = maps.room(4 * PAGE, 64, 64).unwrap();
        assert_eq!(maps.remove(4 * PAGE, 2 * PAGE), Err(libc::EBUSY));
        drop(held);
        assert_eq!(maps.remove(4 * PAGE, PAGE), Err(libc::EINVAL), "not one as a whole");
        assert_eq!(maps.remove(8, u64::MAX), Err(libc::EINVAL), "it wraps");
        assert_eq!(maps.remove(PAGE, PAGE), Ok(()), "there is none");
        assert_eq!(maps.remove(4 * PAGE, 2 * PAGE), Ok(()));
        assert!(maps.read(6 * PAGE, &mut two));
        assert_eq!(maps.remove(0, u64::MAX), Ok(()));
        assert!(!maps.read(6 * PAGE, &mut two), "all that lies in the range");
        assert!(!maps.read(4 * PAGE, &mut two), "out of reach");
    }

    #[test]
    fn what_may_not_be_written_is_not() {
        let mut maps = Maps::default();
        maps.add(0, PAGE, false, sealed(PAGE), 0, false).unwrap();
        assert!(!maps.write(0, &[1]) && maps.change(8, |old| old + 1).is_none());
        assert_eq!(maps.room(0, 8, 8).err(), Some(libc::EFAULT));
        maps.add(PAGE, PAGE, true, sealed(PAGE), 0, false).unwrap();
        assert!(maps.write(PAGE, &5u64.to_ne_bytes()));
        assert_eq!((maps.change(PAGE, |old| old + 2), maps.change(PAGE, |old| old)), (Some(5), Some(7)));
        assert_eq!(maps.change(PAGE + 1, |old| old), None, "not aligned");
    }
}
