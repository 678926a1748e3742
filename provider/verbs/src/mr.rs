//! Memory regions.
//!
//! Registering looks at the memory as pinning would, so that an address that is not there is refused
//! now and not met on the data path. Nothing is locked in memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use starverbs_core::Access;
use starverbs_core::mr::MrAttr;

use crate::error::{Result, VerbsError};
use crate::pd::Pd;

/// IBV_ACCESS_OPTIONAL_RANGE: hints that a device may pass over (ibv_reg_mr(3)).
const OPTIONAL: u32 = 0x3ff0_0000;

/// A memory region. Clones are the same region.
#[derive(Clone)]
pub struct Mr(Arc<MrInner>);

struct MrInner {
    pd: Pd,
    key: u32,
    gone: AtomicBool,
}

impl Mr {
    /// `ibv_reg_mr_iova2`: peers and SGEs know the first byte as `iova`.
    ///
    /// # Errors
    /// EINVAL: unknown or inconsistent rights, a range that wraps; EFAULT: memory not mapped, or not
    /// with these rights; ENOMEM; EIO in a forked child.
    pub fn reg(pd: &Pd, addr: u64, length: u64, iova: u64, access: Access) -> Result<Mr> {
        let card = pd.context().card()?;
        check_access(access)?;
        let end = addr.checked_add(length).ok_or(VerbsError::Invalid("range wraps"))?;
        iova.checked_add(length).ok_or(VerbsError::Invalid("range wraps"))?;
        memory::probe(addr, end, access.contains(Access::LOCAL_WRITE))?;
        let attr = MrAttr { pd: pd.id(), addr, length, iova, access };
        let key = card.with(|shard, _| shard.nic.reg_mr(attr))?;
        Ok(Mr(Arc::new(MrInner { pd: pd.clone(), key, gone: AtomicBool::new(false) })))
    }

    /// Key for SGEs.
    pub fn lkey(&self) -> u32 {
        self.0.key
    }

    /// Key for peers.
    pub fn rkey(&self) -> u32 {
        self.0.key
    }

    /// `ibv_dereg_mr`. No packet touches the memory afterwards.
    ///
    /// # Errors
    /// EBUSY while memory windows are bound to it; EINVAL when it is gone already; EIO in a forked child.
    pub fn dereg(&self) -> Result<()> {
        let card = self.0.pd.context().card()?;
        if self.0.gone.swap(true, Ordering::AcqRel) {
            return Err(VerbsError::Invalid("memory region is gone"));
        }
        let ended = card.with(|shard, _| shard.nic.dereg_mr(self.0.key));
        if ended.is_err() {
            self.0.gone.store(false, Ordering::Release);
        }
        Ok(ended?)
    }
}

impl Drop for MrInner {
    fn drop(&mut self) {
        if !*self.gone.get_mut()
            && let Some(card) = self.pd.context().card_if_ours()
        {
            let _ = card.with(|shard, _| shard.nic.dereg_mr(self.key));
        }
    }
}

/// Remote writes and atomics need the local right (IBTA 10.6.3.1); on-demand paging is not offered.
fn check_access(access: Access) -> Result<()> {
    let known = Access::LOCAL_WRITE
        | Access::REMOTE_WRITE
        | Access::REMOTE_READ
        | Access::REMOTE_ATOMIC
        | Access::MW_BIND
        | Access::ZERO_BASED
        | Access::HUGETLB
        | Access::from_bits_retain(OPTIONAL);
    if access.contains(Access::ON_DEMAND) {
        return Err(VerbsError::Unsupported("on-demand paging"));
    }
    if !known.contains(access) {
        return Err(VerbsError::Invalid("unknown access flags"));
    }
    let writes = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    if access.intersects(writes) && !access.contains(Access::LOCAL_WRITE) {
        return Err(VerbsError::Invalid("remote write access without local write access"));
    }
    Ok(())
}

/// Is the memory there?
mod memory {
    use std::fs;

    use crate::error::{Result, VerbsError};

    const PAGE: u64 = 4096;
    /// Longer ranges are not touched page by page, but looked up.
    const TOUCH: u64 = 16 << 20;

    /// EFAULT unless [start, end) is mapped, readable, and writable if `write`.
    pub(super) fn probe(start: u64, end: u64, write: bool) -> Result<()> {
        if start == end {
            return Ok(());
        }
        if end - start <= TOUCH {
            let from = start & !(PAGE - 1);
            let len = (end - from).next_multiple_of(PAGE);
            let advice = if write { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
            // SAFETY: faults pages in as an access would, and changes no contents.
            if unsafe { libc::madvise(from as *mut libc::c_void, len as usize, advice) } == 0 {
                return Ok(());
            }
        }
        /* refused, unknown to this kernel, a special mapping, or long: the map decides */
        let Ok(maps) = fs::read_to_string("/proc/self/maps") else { return Ok(()) };
        if covers(&maps, start, end, write) { Ok(()) } else { Err(VerbsError::Fault) }
    }

    /// Whether the lines of `/proc/PID/maps`, sorted as they are, cover the range with the rights.
    fn covers(maps: &str, start: u64, end: u64, write: bool) -> bool {
        let mut at = start;
        for line in maps.lines() {
            let Some((range, rest)) = line.split_once(' ') else { continue };
            let Some((from, to)) = range.split_once('-') else { continue };
            let (Ok(from), Ok(to)) = (u64::from_str_radix(from, 16), u64::from_str_radix(to, 16)) else {
                continue;
            };
            if to <= at {
                continue;
            }
            let rights = rest.as_bytes();
            if from > at || rights.first() != Some(&b'r') || (write && rights.get(1) != Some(&b'w')) {
                return false;
            }
            at = to;
            if at >= end {
                return true;
            }
        }
        false
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        const MAPS: &str =
            "1000-3000 rw-p 00000000 00:00 0 [heap]\n3000-4000 r--p 0 00:00 0\n6000-7000 ---p 0 0:0 0\n";

        #[test]
        fn ranges_must_be_mapped_with_their_rights() {
            assert!(covers(MAPS, 0x1000, 0x3000, true));
            assert!(covers(MAPS, 0x1800, 0x4000, false));
            assert!(!covers(MAPS, 0x1800, 0x4000, true));
            assert!(!covers(MAPS, 0x3000, 0x5000, false));
            assert!(!covers(MAPS, 0x6000, 0x6001, false));
            assert!(!covers(MAPS, 0x8000, 0x8001, false));
        }

        #[test]
        fn probing_tells_memory_from_holes() {
            let heap = vec![0u8; 100_000];
            let start = heap.as_ptr() as u64;
            assert!(probe(start, start + 100_000, true).is_ok());
            let code = "text".as_ptr() as u64;
            assert!(probe(code, code + 4, false).is_ok());
            assert_eq!(probe(code, code + 4, true).unwrap_err().errno(), libc::EFAULT);
            assert_eq!(probe(64, 128, false).unwrap_err().errno(), libc::EFAULT);
            assert_eq!(probe(64, 1 << 40, false).unwrap_err().errno(), libc::EFAULT);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remote_write_needs_local_write() {
        assert!(check_access(Access::REMOTE_READ).is_ok());
        assert!(check_access(Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::RELAXED_ORDERING).is_ok());
        assert_eq!(check_access(Access::REMOTE_WRITE).unwrap_err().errno(), libc::EINVAL);
        assert_eq!(check_access(Access::REMOTE_ATOMIC).unwrap_err().errno(), libc::EINVAL);
        assert_eq!(check_access(Access::from_bits_retain(1 << 15)).unwrap_err().errno(), libc::EINVAL);
        assert_eq!(check_access(Access::ON_DEMAND).unwrap_err().errno(), libc::EOPNOTSUPP);
    }
}
