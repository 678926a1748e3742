//! The vfio-user socket: B39, B40.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use nix::sys::memfd::{MFdFlags, memfd_create};
use starverbs_core::rng::Rng;
use starverbs_queues::board::*;
use starverbs_queues::{SendOp, SendWqe, Sge, WcStatus};
use starverbs_vfio::MessageOp;
use starverbs_vfio::message::{CAPABILITIES, HEAD_BYTES, Head, MAX_BYTES, Version};
use zerocopy::IntoBytes;

use crate::bench::{Bench, Pair};
use crate::fault::{Tested, ensure, errno, expect};
use crate::qp::{address as address_of_data, request};
use crate::raw::{ALL, BASE, BYTES};

/// Sends bytes to a new connection, and no more; whether the board ends it.
fn ends(bench: &Bench, bytes: &[u8], shut: Option<Shutdown>) -> Tested<bool> {
    let mut socket = UnixStream::connect(bench.socket()?)?;
    socket.set_read_timeout(Some(bench.patience()))?;
    socket.set_write_timeout(Some(bench.patience()))?;
    /* it may end it before it has read all */
    let _ = socket.write_all(bytes);
    if let Some(shut) = shut {
        socket.shutdown(shut)?;
    }
    let (begun, mut answer) = (Instant::now(), [0; MAX_BYTES]);
    while begun.elapsed() < bench.patience() {
        match socket.read(&mut answer) {
            Ok(0) => return Ok(true),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Ok(error.kind() == io::ErrorKind::ConnectionReset),
        }
    }
    Ok(false)
}

fn head(op: u16, size: usize) -> Vec<u8> {
    Head { id: 1, op, size: size as u32, ..Head::default() }.as_bytes().to_vec()
}

fn version() -> Vec<u8> {
    let body = [Version { major: 0, minor: 0 }.as_bytes(), CAPABILITIES.as_bytes(), &[0]].concat();
    [head(MessageOp::Version as u16, HEAD_BYTES + body.len()), body].concat()
}

pub(super) fn messages(bench: &mut Bench) -> Tested {
    let mut witness = match bench.second() {
        Ok(_) => Some(bench.second_pair()?),
        Err(_) => None,
    };
    let info = head(MessageOp::DeviceInfo as u16, HEAD_BYTES);
    for (bytes, what) in [
        (info.clone(), "a request before VERSION"),
        ([version(), version()].concat(), "a second VERSION"),
        (head(MessageOp::Version as u16, 15), "a message shorter than its head"),
        (head(MessageOp::Version as u16, 0), "a message of no bytes"),
        (head(MessageOp::Version as u16, MAX_BYTES + 1), "a message of 8193 bytes"),
        (head(MessageOp::Version as u16, u32::MAX as usize), "a message of 2^32 - 1 bytes"),
        (
            [version(), head(MessageOp::DeviceInfo as u16, MAX_BYTES + 1)].concat(),
            "8193 bytes behind VERSION",
        ),
        (
            Head { flags: 1, ..Head { id: 1, op: 1, size: 16, ..Head::default() } }.as_bytes().to_vec(),
            "a reply",
        ),
    ] {
        let ended = ends(bench, &bytes, None)?;
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
        let ended = ends(bench, &noise, Some(Shutdown::Write))?;
        ensure(ended, "an end of the connection that sends noise and no more", "it goes on")?;
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
    let mut client = bench.pair()?;
    let mut other = UnixStream::connect(bench.socket()?)?;
    other.set_read_timeout(Some(bench.patience()))?;
    let _ = other.write_all(&version());
    let ended = match other.read(&mut [0]) {
        Ok(read) => read == 0,
        Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
    };
    ensure(ended, "an end of a second client's connection, without an answer", "it goes on")?;
    client.exchange(3)
}

pub(super) fn files(bench: &mut Bench) -> Tested {
    let Pair { mut raw, pd, key, mut a, .. } = bench.pair()?;
    let (address, page) = (BASE + BYTES as u64, 4096);
    let no_memory = File::open("/proc/self/exe")?;
    let done = raw.link.map(no_memory.as_fd(), address, page);
    expect("errno of a map of a file on a disk", errno(&done), libc::EACCES)?;
    let sealed = crate::MemoryFile::new(page as usize)?;
    let done = raw.link.map(sealed.file(), address, 2 * page);
    expect("errno of a map beyond the file", errno(&done), libc::EINVAL)?;
    raw.link.map(sealed.file(), address, page)?;
    /* one that may shrink is taken of the board's own user alone, and harms nobody if it does */
    let flags = MFdFlags::MFD_ALLOW_SEALING;
    let unsealed = File::from(memfd_create(c"starverbs-unsealed", flags).map_err(io::Error::from)?);
    unsealed.set_len(page)?;
    let at = address + page;
    let done = errno(&raw.link.map(unsealed.as_fd(), at, page));
    let either = [0, libc::EACCES].contains(&done);
    ensure(either, "a map of a memory file that may shrink taken, or EACCES", done)?;
    if done != 0 {
        return raw.number(OP_ALLOC_PD, &[]).map(drop);
    }
    let cq = CreateCq { entries: at + 64, taken: at, log: 1, flags: 0 };
    raw.number(OP_CREATE_CQ, cq.as_bytes())?;
    let region = Region { pd, access: ALL, addr: at, length: page, iova: at, ..Region::default() };
    let lkey = raw.number(OP_REG_MR, region.as_bytes())?.number;
    let write = SendWqe { remote_addr: address_of_data(0), rkey: key, ..request(SendOp::Write, 1) };
    for wanted in [WcStatus::Success, WcStatus::LocProtErr] {
        raw.put_send(&mut a, write, Sge { addr: at, len: 64, lkey });
        raw.doorbell(&a)?;
        expect("completion of a WRITE from there, and when it has shrunk", raw.completion()?.status, wanted)?;
        unsealed.set_len(0)?;
    }
    raw.wait("STATUS_FAILED when a file has shrunk", |raw| {
        Ok((raw.register(REG_STATUS)? & STATUS_FAILED != 0).then_some(()))
    })?;
    expect("REG_ERROR then", raw.register(REG_ERROR)?, libc::EFAULT as u32)
}
