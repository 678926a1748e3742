//! Both sides of a table in one process, without cards: what importers find, and what ends a use.

use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;

use super::*;
use crate::memory;

fn errno<T>(result: crate::error::Result<T>) -> i32 {
    result.err().map_or(0, |error| error.errno())
}

fn both() -> (Exports, Arc<Importer>) {
    let exports = Exports::new(0x1234_5678).unwrap();
    let importer = Arc::new(Importer::open(exports.fd()).unwrap());
    (exports, importer)
}

fn at_desk(importer: &Importer, tag: Tag, copy: impl FnOnce() -> bool) -> bool {
    importer.reach().unwrap().at_desk(importer.table(), tag, |_| copy())
}

/// A region over `bytes`.
fn region(bytes: &[u8]) -> Item {
    Item { pd: 3, addr: bytes.as_ptr() as u64, length: bytes.len() as u64, iova: 9, access: 1 }
}

#[test]
fn what_stands_in_the_table_is_found_by_kind_and_handle() {
    let (exports, importer) = both();
    let item = region(&[0; 4]);
    exports.publish(Kind::Pd, 7, &Item::default());
    exports.publish(Kind::Mr, 7, &item);
    assert_eq!(importer.find(Kind::Mr, 7).unwrap().item, item);
    assert_eq!(importer.find(Kind::Pd, 7).unwrap().item, Item::default());
    assert_eq!(errno(importer.find(Kind::Dm, 7)), libc::EINVAL);
    assert_eq!(errno(importer.find(Kind::Mr, 8)), libc::EINVAL);
    let before = importer.find(Kind::Mr, 7).unwrap().tag;
    exports.revoke(Kind::Mr, 7);
    assert!(!importer.stands(before));
    assert_eq!(errno(importer.find(Kind::Mr, 7)), libc::EINVAL);
    exports.publish(Kind::Mr, 7, &item);
    assert!(!importer.stands(before), "another life of the same handle");
    let now = importer.find(Kind::Mr, 7).unwrap().tag;
    assert!(importer.stands(now));
    exports.close();
    assert!(!importer.stands(now));
    assert_eq!(errno(importer.find(Kind::Mr, 7)), libc::ENODEV);
    assert_eq!(errno(Importer::open(exports.fd()).map(drop)), libc::ENODEV);
}

#[test]
fn bytes_are_reached_inside_the_region_while_it_stands() {
    let (exports, importer) = both();
    let mut bytes = *b"some bytes of the exporter";
    let item = region(&bytes);
    exports.publish(Kind::Mr, 1, &item);
    let memory = Foreign::new(&importer, &importer.find(Kind::Mr, 1).unwrap()).unwrap();
    let mut back = [0; 5];
    assert!(memory.read(5, &mut back) && back == *b"bytes");
    assert!(memory.write(0, b"more") && memory.write(11, b"at the exporter"));
    // SAFETY: a local array that the kernel wrote behind the compiler's back.
    bytes = unsafe { (&raw const bytes).read_volatile() };
    assert_eq!(&bytes, b"more bytes at the exporter");
    assert!(!memory.read(22, &mut back) && !memory.write(u64::MAX, b"x"), "beyond the end");
    exports.revoke(Kind::Mr, 1);
    assert!(!memory.read(5, &mut back) && !memory.write(0, b"less"));
    for addr in [memory::DEMAND, memory::NULL, memory::FOREIGN_SPAN] {
        exports.publish(Kind::Mr, 2, &Item { addr, ..item });
        let found = importer.find(Kind::Mr, 2).unwrap();
        assert_eq!(errno(Foreign::new(&importer, &found).map(drop)), libc::EOPNOTSUPP);
        exports.revoke(Kind::Mr, 2);
    }
}

#[test]
fn revoking_waits_for_a_copy_under_way() {
    let (exports, importer) = both();
    let bytes = [0; 8];
    exports.publish(Kind::Mr, 1, &region(&bytes));
    let tag = importer.find(Kind::Mr, 1).unwrap().tag;
    let copied = AtomicBool::new(false);
    let ((started, start), (go, wait)) = (channel(), channel());
    std::thread::scope(|threads| {
        let (copied, importer) = (&copied, &importer);
        threads.spawn(move || {
            at_desk(importer, tag, || {
                started.send(()).unwrap();
                wait.recv().unwrap();
                copied.store(true, Ordering::SeqCst);
                true
            })
        });
        start.recv().unwrap();
        let revoking = threads.spawn(|| {
            exports.revoke(Kind::Mr, 1);
            assert!(copied.load(Ordering::SeqCst), "the copy was still under way");
        });
        while importer.stands(tag) {
            std::thread::yield_now();
        }
        go.send(()).unwrap();
        revoking.join().unwrap();
    });
    assert!(!at_desk(&importer, tag, || true));
}

#[test]
fn nobody_waits_for_the_dead_and_their_desk_is_free() {
    let exports = Exports::new(0x1234_5678).unwrap();
    exports.publish(Kind::Mr, 1, &region(&[0; 8]));
    Importer::open(exports.fd()).unwrap().die_at_desk();
    exports.revoke(Kind::Mr, 1);
    let next = Importer::open(exports.fd()).unwrap();
    exports.publish(Kind::Mr, 1, &region(&[0; 8]));
    assert!(at_desk(&next, next.find(Kind::Mr, 1).unwrap().tag, || true));
    exports.revoke(Kind::Mr, 1);
}

#[test]
fn long_copies_leave_the_desk_in_between() {
    let (exports, importer) = both();
    let bytes = vec![7u8; 300_000];
    exports.publish(Kind::Mr, 1, &region(&bytes));
    let memory = Foreign::new(&importer, &importer.find(Kind::Mr, 1).unwrap()).unwrap();
    let data: Vec<u8> = (0..bytes.len()).map(|n| (n / 3) as u8).collect();
    let mut back = vec![0; bytes.len()];
    let before = importer.uses();
    assert!(memory.write(0, &data) && memory.read(0, &mut back) && back == data);
    assert_eq!(importer.uses() - before, 2 * 2 * 5, "pieces of 64 KiB");
}

#[test]
fn nobody_but_the_exporter_writes_the_table() {
    let (exports, _importer) = both();
    let file = std::fs::File::options().write(true).open(format!("/proc/self/fd/{}", exports.fd())).unwrap();
    assert_eq!(file.write_at(b"x", 0).unwrap_err().raw_os_error(), Some(libc::EPERM));
    let mapped = memmap2::MmapOptions::new().len(64).map_raw(exports.fd());
    assert_eq!(mapped.unwrap_err().raw_os_error(), Some(libc::EPERM));
}

#[test]
fn another_process_is_not_taken_for_the_exporter() {
    let (exports, importer) = both();
    // SAFETY: takes numbers. PID 1 is there, and does not have the desks.
    unsafe { libc::fcntl(exports.fd(), libc::F_SETOWN, 1) };
    let misled = Importer::open(exports.fd()).unwrap();
    assert!([libc::ENODEV, libc::EPERM].contains(&errno(misled.reach().map(drop))));
    assert_eq!(errno(importer.reach().map(drop)), 0);
}

#[test]
fn other_descriptors_are_refused() {
    assert_eq!(errno(Importer::open(-1).map(drop)), libc::EBADF);
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    assert_eq!(errno(Importer::open(file.as_raw_fd()).map(drop)), libc::EINVAL);
    let (exports, _importer) = both();
    /* opened anew, it does not say whose it is */
    let path = format!("/proc/self/fd/{}", exports.fd());
    let anew = std::fs::File::options().read(true).write(true).open(path).unwrap();
    assert_eq!(errno(Importer::open(anew.as_raw_fd()).map(drop)), libc::ENODEV);
}

#[test]
fn a_full_table_leaves_the_rest_out() {
    let (exports, importer) = both();
    for handle in 0..=table::ENTRIES as u32 {
        exports.publish(Kind::Dm, handle, &Item::default());
    }
    let last = table::ENTRIES as u32;
    assert!(importer.find(Kind::Dm, last - 1).is_ok());
    assert_eq!(errno(importer.find(Kind::Dm, last)), libc::EINVAL);
    exports.revoke(Kind::Dm, last);
    exports.revoke(Kind::Dm, 5);
    exports.publish(Kind::Mr, last, &Item::default());
    assert!(importer.find(Kind::Mr, last).is_ok());
}

#[test]
fn what_handles_share_ends_with_the_last() {
    let (exports, importer) = both();
    exports.publish(Kind::Pd, 1, &Item::default());
    let tag = importer.find(Kind::Pd, 1).unwrap().tag;
    let kept = Kept::default();
    assert_eq!(errno(kept.join(tag, || Err(crate::VerbsError::Fault))), libc::EFAULT);
    assert_eq!(kept.join(tag, || Ok(5)).unwrap(), 5);
    assert_eq!(kept.join(tag, || Ok(6)).unwrap(), 5);
    let mut ended = Vec::new();
    for _ in 0..3 {
        kept.leave(tag, |made| ended.push(made));
    }
    assert_eq!(ended, [5]);
    assert_eq!(kept.join(tag, || Ok(7)).unwrap(), 7);
}
