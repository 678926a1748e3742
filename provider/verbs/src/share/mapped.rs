//! Another process's memory files, mapped by this one.
//!
//! Owns which are mapped, and what is believed of a file: one that can be made shorter is never mapped, as
//! its owner could kill this process by that.

use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

use memmap2::MmapRaw;
use starverbs_backend::ParentOnly;
use starverbs_backend::ProcessFile;
use starverbs_backend::sealed::{self, SealFlag};

use super::backing::FileBytes;
use super::file;

/// Files of one process at once.
const FILES: usize = 64;

/// What is known of a file.
struct Mapped {
    fd: u32,
    inode: u64,
    /// `None`: it is not to be had
    map: Option<ParentOnly>,
}

/// Those of a process.
#[derive(Default)]
pub(super) struct MappedFiles(Vec<Mapped>);

impl MappedFiles {
    /// Where `len` bytes lie in this process, for as long as `self` is borrowed. `None`: they are not to be
    /// had this way.
    #[inline]
    pub(super) fn find(&mut self, process: &ProcessFile, at: FileBytes, len: u32) -> Option<*mut u8> {
        let end = at.offset.checked_add(u64::from(len))?;
        let is_it = |mapped: &Mapped| (mapped.fd, mapped.inode) == (at.fd, at.inode);
        let known = match self.0.first() {
            Some(first) if is_it(first) => 0,
            _ => self.0.iter().position(is_it).unwrap_or_else(|| self.add(process, at)),
        };
        if known > 0 {
            /* those in use come first */
            self.0.swap(0, known);
        }
        let mapped = &mut self.0[0];
        if mapped.map.as_ref().is_some_and(|map| (map.len() as u64) < end) {
            /* it may have grown meanwhile */
            mapped.map = open(process, at);
        }
        let map = mapped.map.as_ref().filter(|map| map.is_ours() && map.len() as u64 >= end)?;
        Some(map.as_mut_ptr().wrapping_add(at.offset as usize))
    }

    /// Maps one more; gives its place.
    #[cold]
    fn add(&mut self, process: &ProcessFile, at: FileBytes) -> usize {
        if self.0.len() == FILES {
            self.0.clear();
        }
        self.0.push(Mapped { fd: at.fd, inode: at.inode, map: open(process, at) });
        self.0.len() - 1
    }
}

/// Maps a file of a process as a whole. `None`: it is another file, or one that is not believed; or there is
/// no room.
#[cold]
fn open(process: &ProcessFile, at: FileBytes) -> Option<ParentOnly> {
    let file = file::open_of(process.as_raw_fd(), at.fd, true, |seen| seen.ino() == at.inode).ok()??;
    sealed::check(&file, SealFlag::F_SEAL_SHRINK)?;
    ParentOnly::new(MmapRaw::map_raw(&file).ok()?).ok()
}
