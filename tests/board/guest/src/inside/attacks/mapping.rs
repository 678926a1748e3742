//! Attacks by mmap.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;

use libc::{
    EACCES, EFAULT, EINVAL, ENOMEM, EOVERFLOW, EPERM, MAP_PRIVATE, MAP_SHARED, PROT_EXEC, PROT_READ,
    PROT_WRITE,
};
use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;
use starverbs_queues::board::{OP_ALLOC_PD, Object};

use super::{Attacker, in_child, wait_for_child};
use crate::inside::expect_errno;
use crate::inside::raw::{Map, PAGE, Tested, errno, expect};
use crate::inside::victim::SECRET;

/// Pages at the beginning of a file that are looked at.
const PAGES: u64 = 4096;

pub(super) fn beyond(attacker: &mut Attacker) -> Tested {
    let device = attacker.open()?;
    let page = device.page_bytes();
    let own = device.queue_memory(2 * PAGE as u64).map_err(|e| e.to_string())?;
    let refused = |what: &str, offset: u64, len: usize| {
        let errno = errno(device.map(offset, len).map(Map::forget));
        expect_errno(&format!("{what}: {len} bytes at {offset:#x}"), errno, &[EINVAL, EOVERFLOW, ENOMEM])
    };
    refused("more than the doorbell page", 0, page + PAGE)?;
    refused("from it into the next one", page as u64 - PAGE as u64, 2 * PAGE)?;
    refused("more than a piece of queue memory", own, 3 * PAGE)?;
    refused("before a piece", own - PAGE as u64, 2 * PAGE)?;
    refused("behind a piece", own + 2 * PAGE as u64, PAGE)?;
    refused("behind all", 1 << 40, PAGE)?;
    for offset in [u64::MAX << 12, i64::MAX as u64 & !4095, 1 << 62, (1 << 63) - (1 << 20)] {
        refused("an offset that wraps", offset, PAGE)?;
        refused("an offset that wraps", offset, 1 << 20)?;
    }
    for _ in 0..2000 {
        let offset = attacker.random.bits() << 12;
        if offset >= own + 2 * PAGE as u64 {
            refused("at random", offset, PAGE << attacker.random.below(8))?;
        }
    }
    Ok(())
}

pub(super) fn shows_nothing(attacker: &mut Attacker) -> Tested {
    let device = attacker.open()?;
    let own = device.queue_memory(16 * PAGE as u64).map_err(|e| e.to_string())?;
    let mut pages = 0;
    for number in 0..PAGES {
        let Ok(map) = device.map(number << 12, PAGE) else { continue };
        pages += 1;
        for at in (0..PAGE).step_by(8) {
            let word = map.load(at);
            if word == SECRET || (number << 12 < own && word != 0) {
                return Err(format!("page {number} has {word:#x} at {at:#x}"));
            }
        }
    }
    /* its page, its events, its memory, and no more */
    let events = (16 << device.info.events_log) / PAGE;
    expect("pages that are mapped", pages, device.page_bytes() / PAGE + events + 16)
}

pub(super) fn of_other_kinds(attacker: &mut Attacker) -> Tested {
    let device = attacker.open()?;
    let private = device.map_as(0, PAGE, PROT_READ, MAP_PRIVATE).map(Map::forget);
    expect_errno("a private mapping", errno(private), &[EINVAL])?;
    for offset in [0, device.info.events] {
        let code = device.map_as(offset, PAGE, PROT_READ | PROT_EXEC, MAP_SHARED).map(Map::forget);
        expect_errno("a mapping to execute", errno(code), &[EPERM])?;
    }
    let read = OpenOptions::new().read(true).open(&attacker.path).map_err(|e| e.to_string())?;
    for (prot, wanted) in [(PROT_READ, EINVAL), (PROT_READ | PROT_WRITE, EACCES)] {
        let map = Map::new(read.as_raw_fd(), 0, PAGE, prot, MAP_SHARED).map(Map::forget);
        expect_errno("of a file that is only read", errno(map), &[wanted])?;
    }
    Ok(())
}

pub(super) fn changed(attacker: &mut Attacker) -> Tested {
    let device = attacker.open()?;
    let own = device.queue_memory(4 * PAGE as u64).map_err(|e| e.to_string())?;
    for (offset, len) in [(0, device.page_bytes()), (own, 4 * PAGE)] {
        let map = device.map(offset, len).map_err(|e| e.to_string())?;
        let last = len - 8;
        map.store(last, 7);
        // SAFETY: the mapping is this function's own; if the call moves it, `map` is not used again.
        let remap = |old: usize, new: usize, flags: i32| unsafe {
            let at = libc::mremap(map.at.cast(), old, new, flags);
            if at == libc::MAP_FAILED { Err(std::io::Error::last_os_error()) } else { Ok(at.cast::<u8>()) }
        };
        expect_errno("enlarged", errno(remap(len, 2 * len, libc::MREMAP_MAYMOVE)), &[EFAULT, EINVAL])?;
        expect_errno("doubled", errno(remap(0, len, libc::MREMAP_MAYMOVE)), &[EFAULT, EINVAL])?;
        // SAFETY: changes the rights of this function's own mapping.
        let code = unsafe { libc::mprotect(map.at.cast(), len, PROT_READ | PROT_EXEC) };
        expect("made executable", code, -1)?;
        expect("its last word", map.load(last), 7)?;
        let target = Map::anonymous(len, false).map_err(|e| e.to_string())?;
        // SAFETY: both mappings are this function's own, and neither is used again but as `moved`.
        let at = unsafe {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            libc::mremap(map.at.cast(), len, len, flags, target.at)
        };
        expect("moved", at, target.at.cast())?;
        map.forget();
        expect("its last word, moved", target.load(last), 7)?;
        if len > PAGE {
            target.unmap(PAGE, len - 2 * PAGE);
            expect("its last word, cut", target.load(last), 7)?;
        }
    }
    expect("ended", device.free_queue_memory(own).is_ok(), true)
}

pub(super) fn given_back(attacker: &mut Attacker) -> Tested {
    let device = attacker.open()?;
    let own = device.queue_memory(4 * PAGE as u64).map_err(|e| e.to_string())?;
    let map = device.map(own, 4 * PAGE).map_err(|e| e.to_string())?;
    map.store(0, 3);
    device.free_queue_memory(own).map_err(|e| e.to_string())?;
    /* pages that are touched only now are those of the piece still */
    map.store(3 * PAGE, 5);
    expect("what it has", [map.load(0), map.load(3 * PAGE), map.load(2 * PAGE)], [3, 5, 0])?;
    expect_errno("mapped anew", errno(device.map(own, PAGE).map(Map::forget)), &[EINVAL])?;
    expect_errno("given back again", errno(device.free_queue_memory(own)), &[EINVAL])?;
    map.unmap(0, PAGE);
    expect("what is left of it", map.load(3 * PAGE), 5)
}

pub(super) fn in_a_child(attacker: &mut Attacker) -> Tested {
    let device = attacker.open()?;
    let page = device.map(0, PAGE).map_err(|e| e.to_string())?;
    let events = device.map(device.info.events, PAGE).map_err(|e| e.to_string())?;
    for map in [page, events] {
        let touch = || Err(format!("it reads {}", map.load(0)));
        match wait_for_child(touch)? {
            WaitStatus::Signaled(_, Signal::SIGSEGV, _) => {}
            how => return Err(format!("a child that touches it: {how:?}")),
        }
    }
    Ok(())
}

pub(super) fn passed_on(attacker: &mut Attacker) -> Tested {
    let device = attacker.open()?;
    in_child(|| {
        expect_errno("mmap", errno(device.map(0, PAGE).map(Map::forget)), &[EACCES])?;
        expect_errno("a command", errno(device.command(OP_ALLOC_PD, &Object::default())), &[EACCES])?;
        expect_errno("queue memory", errno(device.queue_memory(PAGE as u64)), &[EACCES])?;
        expect_errno("an eventfd", errno(device.set_eventfd(-1)), &[EACCES])
    })?;
    expect("a command of its own process", device.object(OP_ALLOC_PD, 0)?, 0)
}
