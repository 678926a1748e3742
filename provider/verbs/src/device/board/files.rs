//! Regions that lie in memory files: the board maps the file, and reaches them as its own memory.
//!
//! Owns which files the board has, and for which keys. A file goes with the last of its keys. What the board
//! does not take as a file is reached as the program's other memory is.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::link::BoardLink;
use crate::share::FileBytes;

/// The files that the board has.
#[derive(Default)]
pub(super) struct BoardFiles(Mutex<Known>);

#[derive(Default)]
struct Known {
    /// By inode
    files: HashMap<u64, FileOfKey>,
    /// The file of a key
    keys: HashMap<u32, u64>,
}

struct FileOfKey {
    /// DMA address of its first byte
    address: u64,
    len: u64,
    users: u32,
}

/// A use of a file, by its inode.
pub(super) struct FileUse {
    inode: u64,
    /// DMA address of the bytes
    pub(super) address: u64,
}

impl BoardFiles {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Uses the file in which `len` bytes lie. `None`: the board does not map it.
    pub(super) fn join(&self, link: &BoardLink, bytes: FileBytes, len: u64) -> Option<FileUse> {
        let mut known = self.known();
        if !known.files.contains_key(&bytes.inode) {
            known.files.try_reserve(1).ok()?;
            let file = open(&bytes)?;
            let size = file.metadata().ok()?.len().checked_next_multiple_of(4096)?;
            let address = link.map_file(file.as_fd(), size)?;
            known.files.insert(bytes.inode, FileOfKey { address, len: size, users: 0 });
        }
        let mapped = known.files.get_mut(&bytes.inode)?;
        let end = bytes.offset.checked_add(len)?;
        if end > mapped.len {
            return None;
        }
        mapped.users += 1;
        Some(FileUse { inode: bytes.inode, address: mapped.address + bytes.offset })
    }

    /// `key` has the use from now on, or none; what it had before ends.
    pub(super) fn set(&self, link: &BoardLink, key: u32, to: Option<FileUse>) {
        let mut known = self.known();
        let before = match to {
            Some(file) => known.keys.insert(key, file.inode),
            None => known.keys.remove(&key),
        };
        if let Some(inode) = before {
            known.leave(link, inode);
        }
    }

    /// A use that no key came to have ends.
    pub(super) fn give_up(&self, link: &BoardLink, file: Option<FileUse>) {
        if let Some(FileUse { inode, .. }) = file {
            self.known().leave(link, inode);
        }
    }
}

impl Known {
    fn leave(&mut self, link: &BoardLink, inode: u64) {
        let Some(mapped) = self.files.get_mut(&inode) else { return };
        mapped.users -= 1;
        if mapped.users == 0 {
            link.unmap_file(mapped.address, mapped.len);
            self.files.remove(&inode);
        }
    }
}

/// The file, if the descriptor still is that one's.
fn open(bytes: &FileBytes) -> Option<File> {
    let fd = RawFd::try_from(bytes.fd).ok()?;
    // SAFETY: it is duplicated at once, which fails where there is no such descriptor any more.
    let file = File::from(unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned().ok()?);
    FileBytes::of(&file, 0).filter(|same| same.inode == bytes.inode).map(|_| file)
}
