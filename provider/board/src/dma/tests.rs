use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::*;
use crate::record::Tap;

fn file(len: u64, seals: SealFlag) -> File {
    let file = File::from(memfd_create(c"test", MFdFlags::MFD_ALLOW_SEALING).unwrap());
    file.set_len(len).unwrap();
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
    file
}

fn sealed(len: u64) -> File {
    file(len, SealFlag::F_SEAL_SHRINK)
}

/// No maps, of a function that masters the bus.
fn maps() -> Maps {
    let maps = Maps::new(1 << 30, Rc::default(), BusTap::new(&Tap::off(), 0));
    maps.set_master(true);
    maps
}

/// A word of a queue's memory.
fn word(room: &QueueRoom, at: usize) -> u64 {
    let mut words = [0];
    room.words(at, &mut words);
    words[0]
}

#[test]
fn only_memory_that_stays_is_mapped() {
    let mut maps = maps();
    let may_shrink = || file(PAGE, SealFlag::empty());
    assert_eq!(maps.add(0, PAGE, true, may_shrink(), 0, false), Err(libc::EACCES), "another user's");
    assert_eq!(maps.add(0, PAGE, true, File::open("/proc/self/exe").unwrap(), 0, true), Err(libc::EACCES));
    assert_eq!(maps.add(0, 2 * PAGE, true, sealed(PAGE), 0, true), Err(libc::EINVAL), "past its end");
    let memory = || File::open("/proc/self/mem").unwrap();
    assert_eq!(maps.add(0, PAGE, true, memory(), 0, false), Err(libc::EACCES), "another user's");
    assert_eq!(maps.add(0, PAGE, true, memory(), 0, true), Ok(()));
    assert_eq!(maps.room(0, 8, 8).err(), Some(libc::EFAULT), "no queue lies there");
    assert_eq!(maps.add(PAGE, PAGE, true, sealed(PAGE), 0, false), Ok(()));
    assert_eq!(maps.add(2 * PAGE, PAGE, true, may_shrink(), 0, true), Ok(()), "the board's own user's");
    assert!(maps.room(PAGE, 8, 8).is_ok() && maps.room(2 * PAGE, 8, 8).is_ok());
    let long = sealed(1 << 40);
    assert_eq!(maps.add(8 * PAGE, PAGE, true, long.try_clone().unwrap(), 0, false), Ok(()), "a part of it");
    assert_eq!(maps.add(1 << 40, 1 << 40, true, long, 0, false), Err(libc::ENOMEM));
}

#[test]
fn ranges_are_checked() {
    let mut maps = maps();
    let mut add = |address, size| maps.add(address, size, true, sealed(4 * PAGE), 0, false);
    let top = 1 << ADDRESS_BITS;
    for (address, size) in
        [(u64::MAX - 4095, PAGE), (top, PAGE), (top - PAGE, 2 * PAGE), (0, 0), (1, PAGE), (0, 7)]
    {
        assert_eq!(add(address, size), Err(libc::EINVAL), "{address:#x} {size:#x}");
    }
    assert_eq!(add(4 * PAGE, 2 * PAGE), Ok(()));
    for (address, size) in [(4 * PAGE, PAGE), (5 * PAGE, 2 * PAGE), (3 * PAGE, 2 * PAGE), (PAGE, 4 * PAGE)] {
        assert_eq!(add(address, size), Err(libc::EINVAL), "covers another");
    }
    assert_eq!(add(6 * PAGE, PAGE), Ok(()));
    let mut two = [0; 2];
    assert!(maps.read(6 * PAGE - 1, &mut two), "across maps");
    assert!(!maps.read(7 * PAGE - 1, &mut two), "half of it");
    assert!(!maps.read(u64::MAX, &mut two));
    for (address, size) in
        [(4 * PAGE, PAGE), (5 * PAGE, PAGE), (5 * PAGE, u64::MAX - 5 * PAGE), (8, u64::MAX)]
    {
        assert_eq!(
            maps.remove(address, size),
            Err(libc::EINVAL),
            "cuts one, or wraps: {address:#x} {size:#x}"
        );
    }
    assert_eq!((maps.remove(PAGE, PAGE), maps.remove(5 * PAGE, 0)), (Ok(()), Ok(())), "there is none");
    assert_eq!(maps.remove(4 * PAGE, 2 * PAGE), Ok(()));
    assert!(!maps.read(4 * PAGE, &mut two) && maps.read(6 * PAGE, &mut two), "out of reach");
    assert_eq!(maps.remove(0, u64::MAX), Ok(()));
    assert!(!maps.read(6 * PAGE, &mut two), "all that lies in the range");
}

#[test]
fn what_may_not_be_written_is_not() {
    let mut maps = maps();
    maps.add(0, PAGE, false, sealed(PAGE), 0, false).unwrap();
    assert!(!maps.write(0, &[1]) && maps.change(8, |old| old + 1).is_none());
    assert_eq!(maps.room(0, 8, 8).err(), Some(libc::EFAULT));
    maps.add(PAGE, PAGE, true, sealed(PAGE), 0, false).unwrap();
    assert!(maps.write(PAGE, &5u64.to_ne_bytes()));
    assert_eq!((maps.change(PAGE, |old| old + 2), maps.change(PAGE, |old| old)), (Some(5), Some(7)));
    assert_eq!(maps.change(PAGE + 1, |old| old), None, "not aligned");
    /* what cannot be mapped for writing can be for reading */
    let memory = sealed(PAGE);
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&memory));
    let reading = File::open(path).unwrap();
    assert_eq!(maps.add(2 * PAGE, PAGE, true, reading.try_clone().unwrap(), 0, true), Err(libc::EACCES));
    assert_eq!(maps.add(2 * PAGE, PAGE, false, reading, 0, true), Ok(()));
    assert!(maps.read(2 * PAGE, &mut [0]) && !maps.write(2 * PAGE, &[1]));
}

#[test]
fn nothing_is_reached_without_the_bus() {
    let mut maps = maps();
    maps.add(0, PAGE, true, sealed(PAGE), 0, false).unwrap();
    let room = maps.room(0, 64, 64).unwrap();
    room.store(8, &[7]);
    assert_eq!((word(&room, 8), room.load_half(8, Ordering::Relaxed)), (7, 7));
    maps.set_master(false);
    assert_eq!((word(&room, 8), room.load_half(8, Ordering::Relaxed)), (0, 0));
    room.store(8, &[9]);
    room.store_half(8, 9, Ordering::Relaxed);
    room.write(8, &[9]);
    let mut byte = [1];
    room.read(8, &mut byte);
    assert_eq!(byte, [0]);
    assert!(!maps.read(8, &mut [0]) && !maps.write(8, &[9]) && maps.change(8, |_| 9).is_none());
    assert!(maps.pointer(8, 1).is_none());
    assert_eq!(maps.counters.get(starverbs_queues::board::COUNTER_DMA_MISSES as usize), 6);
    maps.set_master(true);
    assert_eq!(word(&room, 8), 7, "nothing was written meanwhile");
}

/// Queues in memory whose pages lie anywhere, as behind an IOMMU.
#[test]
fn a_queue_lies_in_many_maps() {
    let mut maps = maps();
    let memory = sealed(8 * PAGE);
    let order = [3, 4, 0, 6];
    for (n, page) in order.into_iter().enumerate() {
        let at = (n as u64 + 1) * PAGE;
        maps.add(at, PAGE, true, memory.try_clone().unwrap(), page * PAGE, false).unwrap();
    }
    let room = maps.room(PAGE + 64, 4 * PAGE as usize - 64, 64).unwrap();
    let data: Vec<u8> = (0..4 * PAGE as usize - 64).map(|n| (n * 7 / 3) as u8).collect();
    room.write(0, &data);
    let mut back = vec![0; data.len()];
    room.read(0, &mut back);
    assert!(back == data);
    for (n, page) in order.into_iter().enumerate() {
        let skip = if n == 0 { 64 } else { 0 };
        let mut bytes = vec![0; PAGE as usize - skip];
        memory.read_exact_at(&mut bytes, page * PAGE + skip as u64).unwrap();
        let from = n * PAGE as usize + skip - 64;
        assert!(bytes == data[from..from + bytes.len()], "page {n}");
    }
    let last = 3 * PAGE as usize - 64;
    room.store(last, &[0x1234]);
    assert_eq!(word(&room, last), 0x1234);
    assert!(maps.read(PAGE + 64, &mut back), "across all of them");
    assert!(maps.pointer(2 * PAGE - 8, 16).is_none(), "in two maps");
    assert_eq!(maps.files.open(memory, 0, PAGE, true, false).map(|_| ()), Ok(()));
    maps.remove(3 * PAGE, PAGE).unwrap();
    assert_eq!(word(&room, 0), 0, "a part of it is gone");
    assert_eq!(maps.room(PAGE, 4 * PAGE as usize, 64).err(), Some(libc::EFAULT));
    maps.add(3 * PAGE, PAGE, true, sealed(PAGE), 0, false).unwrap();
    assert_eq!(word(&room, 0), 0, "for good");
}

/// Who takes pages away gets zeroes, and the board goes on.
#[test]
#[cfg_attr(miri, ignore = "signals")]
fn a_file_that_shrinks_is_zeroes() {
    let (mut victim, mut other) = (maps(), maps());
    let memory = file(16 * PAGE, SealFlag::empty());
    victim.add(0, 16 * PAGE, true, memory.try_clone().unwrap(), 0, true).unwrap();
    other.add(0, 16 * PAGE, true, sealed(16 * PAGE), 0, false).unwrap();
    let room = victim.room(0, PAGE as usize, 64).unwrap();
    for maps in [&victim, &other] {
        assert!(maps.write(8 * PAGE, &[5; 100]));
    }
    room.store(0, &[5]);
    memory.set_len(PAGE).unwrap();
    assert!(!victim.are_lost(), "nobody has looked");
    let mut bytes = [1; 100];
    assert!(!victim.read(8 * PAGE, &mut bytes));
    assert_eq!(bytes, [0; 100]);
    assert!(victim.are_lost());
    /* by every way there is, and again */
    memory.set_len(16 * PAGE).unwrap();
    memory.set_len(0).unwrap();
    assert!(!victim.write(0, &[1; 64]) && victim.change(4 * PAGE, |old| old + 1).is_none());
    assert_ne!(word(&room, 0), 5);
    assert_eq!(victim.room(0, 64, 64).err(), Some(libc::EFAULT));
    assert!(other.read(8 * PAGE, &mut bytes) && !other.are_lost());
    assert_eq!(bytes, [5; 100]);
    victim.clear();
    assert!(!victim.are_lost());
    assert_eq!(word(&room, 0), 0);
    let again = file(PAGE, SealFlag::empty());
    victim.add(0, PAGE, true, again, 0, true).unwrap();
    assert!(victim.write(0, &[1]) && !victim.are_lost());
    assert!(victim.pointer(0, 1).is_none() && other.pointer(0, 1).is_some(), "none to what may vanish");
}
