//! Attacks by ioctl and other calls.

use std::sync::atomic::{AtomicBool, Ordering};

use libc::{EBADF, EFAULT, EINVAL, ENOTTY, EOPNOTSUPP, ESPIPE};
use starverbs_core::rng::SplitMix64;
use starverbs_queues::board::*;
use starverbs_queues::chardev::{IOC_COMMAND, IOC_TYPE};

use super::Attacker;
use crate::inside::expect_errno;
use crate::inside::pair::region;
use crate::inside::raw::{Device, Map, PAGE, Tested, errno, expect};

/// Addresses that no process has: none, the kernel's, the last.
const NOWHERE: [u64; 5] = [0, 8, 0xffff_8880_0000_0000, 0x7fff_ffff_f000, u64::MAX - 63];
/// Calls of each thread that calls at random.
const CALLS: u32 = 1500;

pub(super) fn bad_addresses(attacker: &mut Attacker) -> Tested {
    let device = attacker.open()?;
    for directions in 0..4_u32 {
        for number in 0..=255_u32 {
            for bytes in [0, 8, 16, 32, 128, 4096] {
                let request = directions << 30 | bytes << 16 | IOC_TYPE << 8 | number;
                for address in NOWHERE {
                    let errno = errno(device.request(request, address));
                    expect_errno(&format!("{request:#x} at {address:#x}"), errno, &[EFAULT, ENOTTY])?;
                }
            }
        }
    }
    Ok(())
}

pub(super) fn no_room_for_the_answer(attacker: &mut Attacker) -> Tested {
    let device = attacker.open()?;
    let map = Map::anonymous(PAGE, false).map_err(|e| e.to_string())?;
    map.store(0, u64::from(OP_ALLOC_PD));
    // SAFETY: changes the rights of this function's own mapping.
    unsafe { libc::mprotect(map.at.cast(), PAGE, libc::PROT_READ) };
    expect_errno("in memory to read", errno(device.request(IOC_COMMAND, map.address())), &[EFAULT])?;
    let across = map.address() + PAGE as u64 - 64;
    expect_errno("beyond the end of memory", errno(device.request(IOC_COMMAND, across)), &[EFAULT])
}

pub(super) fn of_the_kernel(attacker: &mut Attacker) -> Tested {
    let device = attacker.open()?;
    for context in 0..=255 {
        for op in [OP_OPEN_CONTEXT, OP_CLOSE_CONTEXT] {
            let head = CommandHead { op, context, status: 0 };
            let words = [u32::from(context), 0, 0, 0].map(u32::to_le_bytes).concat();
            let answer = device.command_of(head, &words).map_err(|e| e.to_string())?;
            expect("a command of the kernel's", answer.err(), Some(EOPNOTSUPP))?;
        }
    }
    /* who puts another's number into the head is itself all the same */
    let head = |op, context| CommandHead { op, context, status: PENDING };
    let made = device.command_of(head(OP_ALLOC_PD, 1), &[]).map_err(|e| e.to_string())?;
    let pd = made.map_err(|errno| format!("a domain: errno {errno}"))?[0];
    let ended = device.command_of(head(OP_DEALLOC_PD, 77), &[pd, 0, 0, 0]).map_err(|e| e.to_string())?;
    expect("its domain ends", ended.err(), None)
}

pub(super) fn that_are_none(attacker: &mut Attacker) -> Tested {
    let device = attacker.open()?;
    for op in (OP_CREATE_XRC_SRQ + 1..=0x500).chain([0, 0x80, 0xff, 0x7fff, 0x8000, 0xffff]) {
        let answer = device.command(op, &[u64::MAX; 15]).map_err(|e| e.to_string())?;
        let wanted = if [OP_LOAD_KERNEL, OP_UNLOAD_KERNEL].contains(&op) { EINVAL } else { EOPNOTSUPP };
        expect(&format!("command {op:#x}"), answer.err(), Some(wanted))?;
    }
    Ok(())
}

pub(super) fn eventfds(attacker: &mut Attacker) -> Tested {
    let device = attacker.open()?;
    for fd in [-2, 1 << 20, i32::MIN, i32::MAX] {
        expect_errno("no descriptor", errno(device.set_eventfd(fd)), &[EBADF])?;
    }
    for fd in [device.fd(), 0] {
        expect_errno("no eventfd", errno(device.set_eventfd(fd)), &[EINVAL])?;
    }
    // SAFETY: makes a descriptor, which is closed below.
    let fd = unsafe { libc::eventfd(0, 0) };
    for _ in 0..1000 {
        device.set_eventfd(fd).map_err(|e| e.to_string())?;
    }
    // SAFETY: closes the descriptor that was made above.
    unsafe { libc::close(fd) };
    device.set_eventfd(-1).map_err(|e| e.to_string())?;
    device.set_eventfd(-1).map_err(|e| e.to_string())
}

pub(super) fn other_calls(attacker: &mut Attacker) -> Tested {
    let device = attacker.open()?;
    let mut bytes = [0_u8; 64];
    let failed =
        |done: isize| if done < 0 { errno(Err::<(), _>(std::io::Error::last_os_error())) } else { 0 };
    // SAFETY: buffers of this function; the calls do not keep them.
    let (read, written, sought) = unsafe {
        let read = failed(libc::read(device.fd(), bytes.as_mut_ptr().cast(), bytes.len()));
        let written = failed(libc::write(device.fd(), bytes.as_ptr().cast(), bytes.len()));
        (read, written, failed(libc::lseek(device.fd(), 0, libc::SEEK_END) as isize))
    };
    expect("read, write, seek", (read, written, sought), (EINVAL, EINVAL, ESPIPE))
}

/// A command that is known, with anything in it. Addresses are small numbers at times, as offsets are.
fn at_random(random: &mut SplitMix64) -> (u16, [u64; 15]) {
    const OPS: [u16; 31] = [
        OP_QUERY_GID,
        OP_ALLOC_PD,
        OP_DEALLOC_PD,
        OP_REG_MR,
        OP_REREG_MR,
        OP_DEREG_MR,
        OP_QUERY_MR,
        OP_ALLOC_NULL_MR,
        OP_ALLOC_MW,
        OP_DEALLOC_MW,
        OP_CREATE_AH,
        OP_DESTROY_AH,
        OP_CREATE_CQ,
        OP_DESTROY_CQ,
        OP_RESIZE_CQ,
        OP_MODIFY_CQ,
        OP_CREATE_SRQ,
        OP_MODIFY_SRQ,
        OP_QUERY_SRQ,
        OP_DESTROY_SRQ,
        OP_CREATE_QP,
        OP_MODIFY_QP,
        OP_QUERY_QP,
        OP_DESTROY_QP,
        OP_ATTACH_GROUP,
        OP_DETACH_GROUP,
        OP_CREATE_XRC_SRQ,
        OP_CLAIM_SERVICE,
        OP_OPEN_MADS,
        OP_SEND_MAD,
        OP_RECEIVE_MAD,
    ];
    let op = OPS[random.below(OPS.len() as u64) as usize];
    let body = std::array::from_fn(|_| match random.below(4) {
        0 => random.bits(),
        1 => random.below(1 << 20) & !63,
        2 => random.below(8),
        _ => 0,
    });
    (op, body)
}

pub(super) fn garbage(attacker: &mut Attacker) -> Tested {
    let device = attacker.open()?;
    device.queue_memory(1 << 20).map_err(|e| e.to_string())?;
    for _ in 0..4000 {
        let (op, body) = at_random(&mut attacker.random);
        let _ = device.command(op, &body).map_err(|e| format!("command {op:#x} {body:x?}: {e}"))?;
    }
    Ok(())
}

/// Threads that use one file at random, all at once, and a file that is closed under them. Last: afterwards
/// this process has had several threads.
pub(super) fn threads(attacker: &mut Attacker) -> Tested {
    let device = attacker.open()?;
    let seeds: [u64; 4] = std::array::from_fn(|_| attacker.random.bits());
    let failed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for seed in seeds {
            let (device, failed) = (&device, &failed);
            scope.spawn(move || {
                let mut random = SplitMix64::new(seed);
                for _ in 0..CALLS {
                    if call(device, &mut random).is_err() {
                        failed.store(true, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    expect("a thread found no board", failed.into_inner(), false)
}

/// A call at random: commands, memory that comes and goes, mappings.
fn call(device: &Device, random: &mut SplitMix64) -> std::io::Result<()> {
    let piece = device.info.events + (random.below(64) << 12);
    match random.below(8) {
        0 => {
            let _ = device.queue_memory((1 + random.below(4)) << 12);
        }
        1 => {
            let _ = device.free_queue_memory(piece);
        }
        2 => {
            if let Ok(map) = device.map(piece, PAGE << random.below(3)) {
                map.store(0, random.bits());
            }
        }
        3 => {
            /* memory that goes while it is pinned, and regions that several end */
            let memory = Map::anonymous(PAGE << random.below(6), false)?;
            let region = region(0, memory.address(), memory.len as u64, 1);
            let _ = device.command(OP_REG_MR, &region)?;
        }
        4 => {
            let _ = device.command(OP_DEREG_MR, &[random.below(1 << 16)])?;
        }
        5 => {
            let _ = device.command(OP_ALLOC_PD, &[0_u64])?;
        }
        _ => {
            let (op, body) = at_random(random);
            let _ = device.command(op, &body)?;
        }
    }
    Ok(())
}
