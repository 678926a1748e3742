//! Finding the statistics pages of running processes, through /proc. It must not know what a page says.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::{NAME, Snapshot};

/// The processes that /proc shows, by number.
pub fn pids() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut pids: Vec<u32> = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    pids
}

/// The statistics page that `pid` made itself; a page inherited from its parent is the parent's. None if it
/// has none.
///
/// # Errors
/// The process is gone, or not ours to look into.
pub fn page_of(pid: u32) -> io::Result<Option<Snapshot>> {
    let own = own_number(pid);
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
        let is_page = fs::read_link(entry.path()).is_ok_and(|target| is_page(&target));
        if is_page
            && let Ok(page) = regular(&entry.path()).and_then(|file| Snapshot::read(&file))
            && page.pid == own
        {
            return Ok(Some(page));
        }
    }
    Ok(None)
}

fn is_page(target: &Path) -> bool {
    target.to_string_lossy().strip_prefix("/memfd:").is_some_and(|rest| rest.starts_with(NAME))
}

/// Opens a regular file for reading. Whoever may name files as they like can give a FIFO or a device the name
/// of a page: looks before it opens, which could wait for ever or start something.
fn regular(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let again = format!("/proc/self/fd/{}", file.as_raw_fd());
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(again)
}

/// The number by which a process knows itself: another than ours for it if it lives in a container.
fn own_number(pid: u32) -> u32 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    line.and_then(|numbers| numbers.split_whitespace().last()?.parse().ok()).unwrap_or(pid)
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn pages_are_known_by_their_name() {
        assert!(is_page(Path::new("/memfd:starverbs-stat (deleted)")));
        assert!(!is_page(Path::new("/tmp/starverbs-stat")));
        assert_eq!(own_number(std::process::id()), std::process::id());
        assert!(pids().contains(&std::process::id()));
    }

    #[test]
    fn what_is_no_regular_file_is_not_opened() {
        let path = std::env::temp_dir().join(format!("starverbs-fifo-{}", std::process::id()));
        let name = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
        // SAFETY: the name is a C string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        // Nobody writes: to open it as it is would wait for ever.
        let refused = regular(&path).map_err(|error| error.kind());
        fs::remove_file(&path).unwrap();
        assert_eq!(refused.err(), Some(io::ErrorKind::InvalidInput));
        assert!(regular(Path::new("/dev/null")).is_err());
        assert!(regular(Path::new("/proc/self/exe")).is_ok());
    }
}
