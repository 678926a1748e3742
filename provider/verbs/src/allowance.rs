//! How much memory the card's queues and tables may take: a share of what the process may have.
//!
//! Reads what the kernel says of the machine, of control groups and of the process's own limit. Nothing here
//! is kept: limits count from when a card is opened.

use std::fs;
use std::path::{Path, PathBuf};

use starverbs_settings::Settings;

/// One of so many parts of what the process may have; the rest is for the program, and for others.
const SHARE: u64 = 2;

/// Bytes that rings and the library's allocator may take.
pub(crate) fn bytes(settings: &Settings) -> u64 {
    settings.memory.unwrap_or_else(|| available() / SHARE)
}

/// What the process may have: the machine's memory, less where a control group or RLIMIT_AS says so.
fn available() -> u64 {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limits = group_files(&groups).into_iter().filter_map(|file| limit(&fs::read_to_string(file).ok()?));
    limits.chain(address_space()).fold(machine(), u64::min)
}

/// The machine's memory.
fn machine() -> u64 {
    // SAFETY: sysconf looks at no memory of ours.
    let (pages, size) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    match (u64::try_from(pages), u64::try_from(size)) {
        (Ok(pages), Ok(size)) => pages.saturating_mul(size),
        _ => u64::MAX,
    }
}

/// RLIMIT_AS, where there is one.
fn address_space() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a struct of ours.
    let got = unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) };
    (got == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Where the limits of a process's control group and of those around it are, of both versions, by
/// `/proc/self/cgroup`.
fn group_files(groups: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (root, name) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            c if c.split(',').any(|c| c == "memory") => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            _ => continue,
        };
        /* from inside a container the path may be the host's: then the root is its own group */
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            files.push(Path::new(root).join(group).join(name));
        }
    }
    files
}

/// A limit as such a file says it; "max" is none.
fn limit(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_both_versions_are_looked_at_up_to_the_root() {
        let shown = |groups: &str| -> Vec<String> {
            group_files(groups).iter().map(|file| file.display().to_string()).collect()
        };
        assert_eq!(
            shown("0::/a.slice/b"),
            [
                "/sys/fs/cgroup/a.slice/b/memory.max",
                "/sys/fs/cgroup/a.slice/memory.max",
                "/sys/fs/cgroup/memory.max"
            ]
        );
        assert_eq!(
            shown("9:name=systemd:/x\n4:cpu,memory:/b\n1:cpu:/y"),
            ["/sys/fs/cgroup/memory/b/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]
        );
        assert_eq!((limit("max\n"), limit("4096\n"), limit("")), (None, Some(4096), None));
    }

    #[test]
    fn the_setting_says_it_else_the_machine_does() {
        let settings = Settings { memory: Some(5 << 20), ..Settings::default() };
        assert_eq!(bytes(&settings), 5 << 20);
        let auto = bytes(&Settings::default());
        assert!(auto > 0 && auto <= machine() / SHARE);
    }
}
