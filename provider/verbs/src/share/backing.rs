//! Where registered bytes lie beside their address: in a memory file that another process can map.
//!
//! Owns the words that the table of regions has for it, and who is asked: the library knows its own files; a
//! preloaded library may know of the program's memory in which file it lies (docs/decisions/0021).

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::OnceLock;

use starverbs_core::mr::Backing;

/// Bytes of a memory file, which this process has open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FileBytes {
    /// Its number among this process's descriptors
    pub(crate) fd: u32,
    /// Its inode: the number may be another file's some day
    pub(crate) inode: u64,
    pub(crate) offset: u64,
}

impl FileBytes {
    /// From `offset` on in a file. `None`: it is none.
    pub(crate) fn of(file: &File, offset: u64) -> Option<FileBytes> {
        FileBytes::of_fd(file.as_raw_fd(), offset)
    }

    fn of_fd(fd: RawFd, offset: u64) -> Option<FileBytes> {
        // SAFETY: all zero is a valid stat.
        let mut about: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes `about` alone.
        if unsafe { libc::fstat(fd, &raw mut about) } != 0 {
            return None;
        }
        Some(FileBytes { fd: u32::try_from(fd).ok()?, inode: about.st_ino, offset })
    }

    /// Where the program's memory [addr, addr + len) lies. `None`: nobody knows, or not all of it in one
    /// file.
    pub(crate) fn of_program(addr: u64, len: u64) -> Option<FileBytes> {
        let ask = asked()?;
        let (mut fd, mut offset) = (-1, 0);
        // SAFETY: the function's terms: it looks at no memory there, and writes the two.
        let found = unsafe { ask(addr as *const c_void, usize::try_from(len).ok()?, &mut fd, &mut offset) };
        if found == 0 { FileBytes::of_fd(fd, offset) } else { None }
    }

    /// As the table of regions has it.
    pub(crate) fn backing(self) -> Backing {
        let [inode, offset] = [self.inode, self.offset].map(|word| [word as u32, (word >> 32) as u32]);
        Backing([self.fd, inode[0], inode[1], offset[0], offset[1]])
    }

    /// What a table says; `None`: nothing.
    pub(crate) fn read(Backing([fd, inode, inode_high, offset, offset_high]): Backing) -> Option<FileBytes> {
        let word = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let inode = word(inode, inode_high);
        (inode != 0).then(|| FileBytes { fd, inode, offset: word(offset, offset_high) })
    }
}

/// `starverbs_shared_at`: 0, and a descriptor and the offset in its file at which [addr, addr + len) begins;
/// or
/// -1.
type SharedAt = unsafe extern "C" fn(*const c_void, usize, *mut c_int, *mut u64) -> c_int;

/// The preloaded library's function, if there is one.
fn asked() -> Option<SharedAt> {
    static FOUND: OnceLock<Option<SharedAt>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        // SAFETY: a name that ends with a zero.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"starverbs_shared_at".as_ptr()) };
        // SAFETY: whoever exports the name has a function of this type.
        (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, SharedAt>(found) })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_all_of_it() {
        let bytes = FileBytes { fd: 7, inode: 0x1_2345_6789, offset: 0x9_8765_4321 };
        assert_eq!(FileBytes::read(bytes.backing()), Some(bytes));
        assert_eq!(FileBytes::read(Backing::default()), None);
    }
}
