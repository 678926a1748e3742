//! Names and a table of regions with any words in them, read as an importer reads them: for the oracles
//! of tests/untrusted.

use std::os::fd::AsRawFd;

use starverbs_core::mr::{KEY_BITS, MrAttr, MrEntry, MrTable, Plain, Storage};
use starverbs_core::{Access, PdId, QpId};

use super::import::Importer;
use super::mrs::{MrMemory, PeerMrs};
use super::names::{Names, ObjectKind, Whereabouts};

/// Keys that are looked for.
const KEYS: u32 = 64;

/// Reads `bytes` as the first words of a context's names, and of a table of regions, magic and seals being
/// right, and opens what they describe as a card does. Panics if a key of it opens bytes outside what it
/// describes.
pub fn read_share_table(bytes: &[u8]) {
    read_names(bytes);
    let Ok(mut memory) = MrMemory::create(16) else { return };
    _ = memory.grow(32);
    memory.scribble(bytes);
    let Some(Ok(mrs)) = memory.open().map(|file| PeerMrs::open(&file)) else { return };
    for key in 0..KEYS << KEY_BITS {
        if let Some((tag, entry)) = mrs.find(key) {
            let _ = mrs.is_valid(tag);
            open(key, &entry);
        }
    }
}

fn read_names(bytes: &[u8]) {
    let Ok((names, file)) = Names::create(&Whereabouts::default()) else { return };
    names.scribble(bytes);
    // SAFETY: takes numbers.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETOWN, libc::getpid()) };
    let Ok(importer) = Importer::open(file.as_raw_fd()) else { return };
    for kind in [ObjectKind::Pd, ObjectKind::Dm] {
        for handle in 0..4 {
            if let Ok((tag, _)) = importer.find(kind, handle) {
                let _ = importer.is_valid(tag);
            }
        }
    }
    let _ = importer.find_mr(1);
}

fn open(key: u32, entry: &MrEntry) {
    let MrEntry { addr, length, iova, access, .. } = *entry;
    let mut mrs = MrTable::<Plain>::default();
    let access = Access::from_bits_truncate(access.bits());
    let attr = MrAttr { pd: PdId(1), addr, length, iova, access, ..MrAttr::default() };
    if mrs.import(key, attr).is_err() {
        return;
    }
    for va in [0, iova.wrapping_sub(1), iova, iova.wrapping_add(length - length.min(1)), u64::MAX] {
        for len in [1, 8, u32::MAX] {
            let qp = QpId { pd: PdId(1), qpn: 5 };
            let Ok(at) = mrs.resolve_remote(key, qp, va, len, Access::empty()) else { continue };
            let inside = at.checked_sub(addr).and_then(|offset| offset.checked_add(u64::from(len)));
            assert!(inside.is_some_and(|end| end <= length), "outside the region");
        }
    }
}
