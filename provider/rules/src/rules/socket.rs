//! The vfio-user socket: B39, B40.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use nix::sys::memfd::{MFdFlags, memfd_create};
use starverbs_core::rng::Rng;
use starverbs_queues::board::*;
use starverbs_vfio::Op;
use starverbs_vfio::message::{CAPABILITIES, HEAD_BYTES, Head, MAX_BYTES, Version};
use zerocopy::IntoBytes;

use crate::bench::Bench;
use crate::fault::{Tested, ensure, errno, expect};
use crate::raw::{BASE, BYTES};

/// Sends bytes to a new connection; whether it is ended by the board.
fn ends(bench: &Bench, bytes: &[u8]) -> Tested<bool> {
    let mut socket = UnixStream::connect(bench.socket()?)?;
    socket.set_read_timeout(Some(bench.patience()))?;
    socket.set_write_timeout(Some(bench.patience()))?;
    socket.write_all(bytes)?;
    let ended = socket.take(2 * MAX_BYTES as u64).read_to_end(&mut Vec::new());
    Ok(ended.map_or_else(|error| error.kind() == io::ErrorKind::ConnectionReset, |_| true))
}

fn head(op: u16, size: usize) -> Vec<u8> {
    Head { id: 1, op, size: size as u32, ..Head::default() }.as_bytes().to_vec()
}

fn version() -> Vec<u8> {
    let body = [Version { major: 0, minor: 0 }.as_bytes(), CAPABILITIES.as_bytes(), &[0]].concat();
    [head(Op::Version as u16, HEAD_BYTES + body.len()), body].concat()
}

pub(super) fn messages(bench: &mut Bench) -> Tested {
    let mut witness = match bench.second() {
        Ok(_) => Some(bench.second_pair()?),
        Err(_) => None,
    };
    let info = head(Op::DeviceInfo as u16, HEAD_BYTES);
    for (bytes, what) in [
        (info.clone(), "a request before VERSION"),
        ([version(), version()].concat(), "a second VERSION"),
        (head(Op::Version as u16, 15), "a message shorter than its head"),
        (head(Op::Version as u16, 0), "a message of no bytes"),
        (head(Op::Version as u16, MAX_BYTES + 1), "a message of 8193 bytes"),
        (head(Op::Version as u16, u32::MAX as usize), "a message of 2^32 - 1 bytes"),
        ([version(), head(Op::DeviceInfo as u16, MAX_BYTES + 1)].concat(), "8193 bytes behind VERSION"),
        (
            Head { flags: 1, ..Head { id: 1, op: 1, size: 16, ..Head::default() } }.as_bytes().to_vec(),
            "a reply",
        ),
    ] {
        let ended = ends(bench, &bytes)?;
        ensure(ended, &format!("an end of the connection that sends {what}"), "it goes on")?;
    }
    let mut rng = Rng::new([3, 4]);
    for seed in 0..50u32 {
        let mut noise = vec![0; HEAD_BYTES + (rng.word() % 64) as usize];
        noise.iter_mut().for_each(|byte| *byte = rng.word() as u8);
        if seed % 2 == 0 {
            let op = rng.word() as u16 % 16;
            let len = noise.len();
            noise[..HEAD_BYTES].copy_from_slice(&head(op, len));
        }
        let mut socket = UnixStream::connect(bench.socket()?)?;
        socket.set_read_timeout(Some(bench.patience()))?;
        let _ = socket.write_all(&noise);
        socket.shutdown(std::net::Shutdown::Write)?;
        let ended = socket.take(2 * MAX_BYTES as u64).read_to_end(&mut Vec::new());
        let waited = ended.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
        ensure(!waited, "an end of the connection that sends noise and no more", "it goes on")?;
    }
    if let Some(witness) = &mut witness {
        witness.exchange(1)?;
    }
    /* half a message of one client keeps nobody waiting */
    let mut slow = UnixStream::connect(bench.socket()?)?;
    slow.write_all(&version()[..HEAD_BYTES + 2])?;
    if let Some(witness) = &mut witness {
        witness.exchange(2)?;
    }
    drop(slow);
    bench.pair()?.exchange(3)
}

pub(super) fn files(bench: &mut Bench) -> Tested {
    let mut raw = bench.open()?;
    let (address, page) = (BASE + BYTES as u64, 4096);
    let unsealed =
        memfd_create(c"starverbs-unsealed", MFdFlags::MFD_ALLOW_SEALING).map_err(io::Error::from)?;
    let unsealed = File::from(unsealed);
    unsealed.set_len(page)?;
    let no_memory = File::open("/proc/self/exe")?;
    for (file, what) in [(&unsealed, "a memory file that may shrink"), (&no_memory, "a file on a disk")] {
        let done = raw.link.map(file.as_fd(), address, page);
        expect(&format!("errno of a map of {what}"), errno(&done), libc::EACCES)?;
    }
    let sealed = crate::Memory::new(page as usize)?;
    let done = raw.link.map(sealed.file(), address, 2 * page);
    expect("errno of a map beyond the file", errno(&done), libc::EINVAL)?;
    raw.link.map(sealed.file(), address, page)?;
    raw.number(OP_ALLOC_PD, &[]).map(drop)
}
