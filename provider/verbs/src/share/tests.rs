//! Both sides in one process, without cards: what importers find, and what ends a use.

use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;

use starverbs_core::mr::{MrAttr, MrTable, WindowType};
use starverbs_core::{Access, PdId};

use super::*;
use crate::memory;

const PD: PdId = PdId(3);

fn errno<T>(result: crate::error::Result<T>) -> i32 {
    result.err().map_or(0, |error| error.errno())
}

/// A card's table, what others see of it, and a context.
struct Exporter {
    mrs: MrTable<MrMemory>,
    published: Published,
    names: Exports,
}

impl Exporter {
    fn new() -> Exporter {
        let (published, memory) = Published::create(1000, 0x1234_5678).unwrap();
        let published = published.unwrap();
        let names = Exports::new(Some(&published)).unwrap();
        Exporter { mrs: MrTable::new(memory), published, names }
    }

    fn importer(&self) -> Arc<Importer> {
        Arc::new(Importer::open(self.names.fd()).unwrap())
    }

    /// Registers `attr`; gives its key.
    fn register(&mut self, attr: MrAttr) -> u32 {
        self.mrs.register(attr, 0x1234_5678_9abc_def0).unwrap()
    }

    /// Takes it out, and waits for those who use it.
    fn deregister(&mut self, key: u32) {
        self.mrs.deregister(key).unwrap();
        self.published.await_readers();
    }
}

fn both() -> (Exporter, Arc<Importer>) {
    let exporter = Exporter::new();
    let importer = exporter.importer();
    (exporter, importer)
}

/// A region over `bytes`.
fn region(bytes: &[u8]) -> MrAttr {
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    MrAttr {
        pd: PD,
        addr: bytes.as_ptr() as u64,
        length: bytes.len() as u64,
        iova: 9,
        access,
        ..MrAttr::default()
    }
}

fn memory_of(importer: &Arc<Importer>, key: u32) -> crate::error::Result<Foreign> {
    let (tag, MrAttr { addr, length, .. }) = importer.find_mr(key)?;
    Foreign::new(importer, tag, ExportedBytes { addr, length })
}

#[test]
fn regions_are_found_by_their_keys() {
    let (mut exporter, importer) = both();
    let attr = region(&[0; 4]);
    let keys: Vec<u32> = (0..3000).map(|n| exporter.mrs.register(attr, n << 20 | 77).unwrap()).collect();
    for key in &keys {
        assert_eq!(importer.find_mr(*key).unwrap().1, attr);
        assert_eq!(errno(importer.find_mr(key ^ 1)), libc::EINVAL);
    }
    assert_eq!([0, u32::MAX].map(|key| errno(importer.find_mr(key))), [libc::EINVAL; 2]);
    let (before, _) = importer.find_mr(keys[7]).unwrap();
    let changed = MrAttr { length: 3, ..attr };
    exporter.mrs.reregister(keys[7], changed).unwrap();
    let (after, found) = importer.find_mr(keys[7]).unwrap();
    assert!(after != before && found == changed, "another incarnation of the same key");
    exporter.deregister(keys[7]);
    assert_eq!(errno(importer.find_mr(keys[7])), libc::EINVAL);
    let window = exporter.mrs.alloc_window(PD, WindowType::One, 99).unwrap();
    assert_eq!(errno(importer.find_mr(window)), libc::EINVAL, "no region");
    exporter.names.close();
    assert_eq!(errno(importer.find_mr(keys[8])), libc::ENODEV);
}

#[test]
fn names_are_found_by_kind_and_handle() {
    let (exporter, importer) = both();
    let (names, bytes) = (&exporter.names, ExportedBytes { addr: 64, length: 4 });
    names.publish_pd(7);
    names.publish_dm(7, bytes);
    assert_eq!(importer.find(ObjectKind::Dm, 7).unwrap().1, bytes);
    assert_eq!(errno(importer.find(ObjectKind::Dm, 8)), libc::EINVAL);
    let (before, _) = importer.find(ObjectKind::Pd, 7).unwrap();
    names.withdraw(ObjectKind::Pd, 7);
    assert!(!importer.is_valid(before));
    assert_eq!(errno(importer.find(ObjectKind::Pd, 7)), libc::EINVAL);
    names.publish_pd(7);
    assert!(!importer.is_valid(before), "another incarnation of the same handle");
    let (now, _) = importer.find(ObjectKind::Pd, 7).unwrap();
    assert!(importer.is_valid(now));
    for (kind, most) in [ObjectKind::Pd, ObjectKind::Dm].into_iter().zip(names::NAMES) {
        assert_eq!(errno(importer.find(kind, most as u32)), libc::EINVAL);
        names.withdraw(kind, most as u32);
    }
    names.publish_pd(names::NAMES[0] as u32);
    names.close();
    assert!(!importer.is_valid(now));
    assert_eq!(errno(importer.find(ObjectKind::Pd, 7)), libc::ENODEV);
    assert_eq!(errno(Importer::open(names.fd()).map(drop)), libc::ENODEV);
}

#[test]
fn bytes_are_reached_inside_the_region_while_it_is_there() {
    let (mut exporter, importer) = both();
    let mut bytes = *b"some bytes of the exporter";
    let attr = region(&bytes);
    let key = exporter.register(attr);
    let memory = memory_of(&importer, key).unwrap();
    let mut back = [0; 5];
    assert!(memory.read(5, &mut back) && back == *b"bytes");
    assert!(memory.write(0, b"more") && memory.write(11, b"at the exporter"));
    // SAFETY: a local array that the kernel wrote behind the compiler's back.
    bytes = unsafe { (&raw const bytes).read_volatile() };
    assert_eq!(&bytes, b"more bytes at the exporter");
    assert!(!memory.read(22, &mut back) && !memory.write(u64::MAX, b"x"), "beyond the end");
    exporter.deregister(key);
    assert!(!memory.read(5, &mut back) && !memory.write(0, b"less"));
    for addr in [memory::DEMAND, memory::NULL, memory::FOREIGN_SPAN] {
        let key = exporter.register(MrAttr { addr, ..attr });
        assert_eq!(errno(memory_of(&importer, key).map(drop)), libc::EOPNOTSUPP);
    }
}

#[test]
fn whoever_ends_a_region_waits_for_a_copy_under_way() {
    let (mut exporter, importer) = both();
    let bytes = [0; 8];
    let key = exporter.register(region(&bytes));
    let memory = memory_of(&importer, key).unwrap();
    let copied = AtomicBool::new(false);
    let ((started, start), (go, wait)) = (channel(), channel());
    std::thread::scope(|threads| {
        let (copied, memory, importer) = (&copied, &memory, &importer);
        threads.spawn(move || {
            memory.with_memory(|_| {
                started.send(()).unwrap();
                wait.recv().unwrap();
                copied.store(true, Ordering::SeqCst);
                true
            })
        });
        start.recv().unwrap();
        let ending = threads.spawn(|| {
            exporter.deregister(key);
            assert!(copied.load(Ordering::SeqCst), "the copy was still under way");
        });
        while importer.find_mr(key).is_ok() {
            std::thread::yield_now();
        }
        go.send(()).unwrap();
        ending.join().unwrap();
    });
    assert!(!memory.with_memory(|_| true));
}

#[test]
fn nobody_waits_for_the_dead_and_their_slot_is_free() {
    let mut exporter = Exporter::new();
    let key = exporter.register(region(&[0; 8]));
    let dead = exporter.importer();
    let reach = dead.reach().unwrap();
    drop(dead);
    Arc::into_inner(reach).unwrap().reader.into_inner().unwrap().die();
    exporter.deregister(key);
    let key = exporter.register(region(&[0; 8]));
    let memory = memory_of(&exporter.importer(), key).unwrap();
    assert!(memory.with_memory(|_| true));
    exporter.deregister(key);
}

#[test]
fn long_copies_leave_the_slot_in_between() {
    let (mut exporter, importer) = both();
    let bytes = vec![7u8; 300_000];
    let key = exporter.register(region(&bytes));
    let memory = memory_of(&importer, key).unwrap();
    let data: Vec<u8> = (0..bytes.len()).map(|n| (n / 3) as u8).collect();
    let mut back = vec![0; bytes.len()];
    let uses = || importer.reach().unwrap().reader.lock().unwrap().uses();
    let before = uses();
    assert!(memory.write(0, &data) && memory.read(0, &mut back) && back == data);
    assert_eq!(uses() - before, 2 * 2 * 5, "pieces of 64 KiB");
}

#[test]
fn nobody_but_the_exporter_writes_the_files() {
    let (_, memory) = Published::create(1000, 1).unwrap();
    let (exporter, _importer) = both();
    for fd in [exporter.names.fd(), memory.open().unwrap().as_raw_fd()] {
        let Ok(file) = std::fs::File::options().write(true).open(format!("/proc/self/fd/{fd}")) else {
            continue;
        };
        assert_eq!(file.write_at(b"x", 0).unwrap_err().raw_os_error(), Some(libc::EPERM));
        let mapped = memmap2::MmapOptions::new().len(64).map_raw(fd);
        assert!(mapped.is_err(), "a mapping to be written");
    }
}

#[test]
fn another_process_is_not_taken_for_the_exporter() {
    let (exporter, importer) = both();
    // SAFETY: takes numbers. PID 1 is there, and does not have the files.
    unsafe { libc::fcntl(exporter.names.fd(), libc::F_SETOWN, 1) };
    let misled = exporter.importer();
    assert!([libc::ENODEV, libc::EPERM].contains(&errno(misled.reach().map(drop))));
    assert_eq!(errno(importer.reach().map(drop)), 0);
}

#[test]
fn other_descriptors_are_refused() {
    assert_eq!(errno(Importer::open(-1).map(drop)), libc::EBADF);
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    assert_eq!(errno(Importer::open(file.as_raw_fd()).map(drop)), libc::EINVAL);
    let (exporter, _importer) = both();
    /* opened anew, it does not say whose it is */
    let path = format!("/proc/self/fd/{}", exporter.names.fd());
    let anew = std::fs::File::options().read(true).write(true).open(path).unwrap();
    assert_eq!(errno(Importer::open(anew.as_raw_fd()).map(drop)), libc::ENODEV);
}

/// A card without memory files has its table all the same.
#[test]
fn the_table_grows_and_ends_as_any_does() {
    let (_, memory) = Published::create(100, 1).unwrap();
    let mut mrs = MrTable::new(memory);
    let mut keys = Vec::new();
    while let Ok(key) = mrs.register(region(&[0; 4]), (keys.len() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    {
        keys.push(key);
    }
    assert!(keys.len() > 4000 && keys.len() < 5000, "{} keys", keys.len());
    assert!(keys.iter().all(|key| mrs.query(*key).is_some()));
    for key in &keys {
        mrs.deregister(*key).unwrap();
    }
    assert_eq!(mrs.regions(), 0);
}

#[test]
fn what_handles_share_ends_with_the_last() {
    let (exporter, importer) = both();
    exporter.names.publish_pd(1);
    let (tag, _) = importer.find(ObjectKind::Pd, 1).unwrap();
    let kept = ImportTable::default();
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
