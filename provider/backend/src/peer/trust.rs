//! Whether a peer's process gets what a debugger has of this one.
//!
//! Both decide: who gives, and who takes, so that nobody waits for another user's memory. Owns the rule and
//! the reading of /proc. Who calls it looks afterwards whether the process still lives: until then its number
//! is not another's.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::socket::Credentials;

/// The user who stands for all users that have no number here.
const NOBODY: u32 = 65534;

/// What the kernel says of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Facts {
    /// Real, effective, saved
    uids: [u32; 3],
    gids: [u32; 3],
    /// Permitted capabilities
    permitted: u64,
    /// Device and inode of its user namespace
    user_namespace: (u64, u64),
    /// Whose its files in /proc are: root's, if it is not dumpable
    owner: u32,
}

/// Whether a process of these facts has no less than one of those, and none has changed who it is.
fn are_equal(ours: &Facts, theirs: &Facts) -> bool {
    let is_one = |ids: [u32; 3]| ids[0] != NOBODY && ids == [ids[0]; 3];
    ours == theirs && is_one(ours.uids) && is_one(ours.gids) && ours.owner == ours.uids[0]
}

/// Reads /proc/PID/status.
fn parse(status: &str, user_namespace: (u64, u64), owner: u32) -> Option<Facts> {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    let ids = |name: &str| {
        let mut ids = field(name)?.split_whitespace().map(|id| id.parse::<u32>().ok());
        Some([ids.next()??, ids.next()??, ids.next()??])
    };
    let permitted = u64::from_str_radix(field("CapPrm:")?.trim(), 16).ok()?;
    Some(Facts { uids: ids("Uid:")?, gids: ids("Gid:")?, permitted, user_namespace, owner })
}

fn read(process: &Path) -> Option<Facts> {
    let status = std::fs::read_to_string(process.join("status")).ok()?;
    let namespace = std::fs::metadata(process.join("ns/user")).ok()?;
    let owner = std::fs::metadata(process.join("mem")).ok()?.uid();
    parse(&status, (namespace.dev(), namespace.ino()), owner)
}

/// Whether this process may be looked into by others of its user, and has no rights of its file's.
fn is_plain() -> bool {
    // SAFETY: both take and give numbers.
    unsafe { libc::prctl(libc::PR_GET_DUMPABLE) == 1 && libc::getauxval(libc::AT_SECURE) == 0 }
}

/// Whether a process at the other end of a session has credentials equal to this one's.
pub(crate) fn trusts(who: &Credentials) -> bool {
    let own = std::process::id().to_string();
    /* another PID namespace's /proc has other processes under the same numbers */
    if who.pid <= 0 || !is_plain() || std::fs::read_link("/proc/self").ok() != Some(own.into()) {
        return false;
    }
    let ours = read(Path::new("/proc/self"));
    let theirs = read(Path::new(&format!("/proc/{}", who.pid)));
    let of_socket = |facts: &Facts| (facts.uids[1], facts.gids[1]) == (who.uid, who.gid);
    matches!((ours, theirs), (Some(ours), Some(theirs)) if of_socket(&theirs) && are_equal(&ours, &theirs))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tx\nUid:\t7\t7\t7\t7\nGid:\t8\t8\t8\t8\nCapPrm:\t00000000000000ff\n";

    #[test]
    fn equal_credentials_and_nothing_else_are_trusted() {
        let ours = parse(STATUS, (4, 5), 7).expect("facts");
        assert_eq!((ours.uids, ours.gids, ours.permitted), ([7; 3], [8; 3], 0xff));
        assert!(are_equal(&ours, &ours));
        let others = [
            Facts { uids: [9; 3], ..ours },
            Facts { uids: [7, 7, 0], ..ours },
            Facts { gids: [8, 9, 8], ..ours },
            Facts { permitted: 0x1ff, ..ours },
            Facts { permitted: 0, ..ours },
            Facts { user_namespace: (4, 6), ..ours },
            Facts { owner: 0, ..ours },
        ];
        for theirs in others {
            assert!(!are_equal(&ours, &theirs), "{theirs:?}");
        }
        for both in [
            Facts { uids: [NOBODY; 3], owner: NOBODY, ..ours },
            Facts { gids: [NOBODY; 3], ..ours },
            Facts { uids: [7, 0, 7], ..ours },
            Facts { owner: 0, ..ours },
        ] {
            assert!(!are_equal(&both, &both), "{both:?}");
        }
        for bad in ["", "Uid:\t1\t1\nGid:\t1\t1\t1\nCapPrm:\t0\n", "Uid:\t1\t1\t1\nGid:\t1\t1\t1\n"] {
            assert_eq!(parse(bad, (1, 1), 1), None, "{bad:?}");
        }
    }

    #[test]
    fn a_process_trusts_itself_and_nobody_without_a_number() {
        // SAFETY: give numbers.
        let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
        let own = Credentials { pid: std::process::id() as i32, uid, gid };
        assert_eq!(trusts(&own), is_plain() && uid != NOBODY && gid != NOBODY);
        assert!(!trusts(&Credentials { pid: 0, ..own }));
        assert!(!trusts(&Credentials { uid: uid + 1, ..own }));
    }
}
