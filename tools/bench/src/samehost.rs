//! The floor of two processes of one host: what the kernel and the memory do with nothing on top of them.
//!
//! Owns the write into another process's memory through its /proc/self/mem, the round trip of two processes
//! that sleep on eventfds, and the copy. The first two run as two processes, which are this program once more
//! under hidden subcommands; each prints one number. A side that sleeps does not bound its own time: who
//! starts it kills it. It must not know the card.

use std::fs::{File, OpenOptions};
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, UnixAddr, recvmsg, sendmsg};

use crate::error::{BenchError, Result};
use crate::floor::{Side, spin};

/// Descriptors handed over at once, at most.
const MAX_FDS: usize = 2;
/// Operations whose time is taken together: the clock costs a part of a write of 8 B.
const BATCH: u64 = 64;

/// What the client writes to.
static WORD: AtomicU64 = AtomicU64::new(0);

/// The abstract name that a server listens on, below which its number is.
pub(crate) fn socket_name(port: u16) -> String {
    format!("starverbs-bench-{port}")
}

fn address(port: u16) -> Result<SocketAddr> {
    SocketAddr::from_abstract_name(socket_name(port)).map_err(|e| BenchError::from_io("socket name", &e))
}

/// Waits for the client, and gives it a number and descriptors.
fn hand_over(side: &Side, number: u64, fds: &[RawFd]) -> Result<UnixStream> {
    let listener =
        UnixListener::bind_addr(&address(side.port)?).map_err(|e| BenchError::from_io("bind", &e))?;
    let (stream, _) = listener.accept().map_err(|e| BenchError::from_io("accept", &e))?;
    let bytes = number.to_le_bytes();
    let control = [ControlMessage::ScmRights(fds)];
    let (fd, none) = (stream.as_raw_fd(), None::<&UnixAddr>);
    sendmsg(fd, &[IoSlice::new(&bytes)], &control, MsgFlags::empty(), none)
        .map_err(|e| BenchError::from_io("sendmsg", &e.into()))?;
    Ok(stream)
}

/// Takes a server's number and descriptors.
fn take_over(side: &Side) -> Result<(UnixStream, u64, Vec<OwnedFd>)> {
    let stream =
        UnixStream::connect_addr(&address(side.peer)?).map_err(|e| BenchError::from_io("connect", &e))?;
    let mut bytes = [0; 8];
    let mut control = cmsg_space!([RawFd; MAX_FDS]);
    let failed = |e: Errno| BenchError::from_io("recvmsg", &e.into());
    let mut io = [IoSliceMut::new(&mut bytes)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let got = recvmsg::<()>(stream.as_raw_fd(), &mut io, Some(&mut control), flags).map_err(failed)?;
    let mut fds = Vec::new();
    for message in got.cmsgs().map_err(failed)? {
        if let ControlMessageOwned::ScmRights(new) = message {
            // SAFETY: the descriptors are new and owned by nobody else.
            fds.extend(new.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    Ok((stream, u64::from_le_bytes(bytes), fds))
}

fn no_descriptor() -> BenchError {
    BenchError::Os { what: "recvmsg", message: "the server handed over no descriptor".to_owned() }
}

/// One side of the writes; the client prints the median microseconds of one pwrite to the server's memory,
/// which the server reads meanwhile.
pub(crate) fn pwrite(side: &Side) -> Result<()> {
    if !side.client {
        let memory = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/proc/self/mem")
            .map_err(|e| BenchError::from_io("/proc/self/mem", &e))?;
        let _stream = hand_over(side, WORD.as_ptr().expose_provenance() as u64, &[memory.as_raw_fd()])?;
        return spin(|| Ok((WORD.load(Ordering::Acquire) >= side.iters).then_some(())));
    }
    let (_stream, at, fds) = take_over(side)?;
    let memory = File::from(fds.into_iter().next().ok_or_else(no_descriptor)?);
    let write = |number: u64| {
        memory.write_all_at(&number.to_ne_bytes(), at).map_err(|e| BenchError::from_io("pwrite", &e))
    };
    println!("{}", median_of_batches(side.iters, write)?);
    Ok(())
}

/// One side of the round trip of two processes that sleep; the client prints the median one-way time in
/// microseconds.
pub(crate) fn eventfd(side: &Side) -> Result<()> {
    if !side.client {
        let (ping, pong) = (new_eventfd()?, new_eventfd()?);
        let stream = hand_over(side, 0, &[ping.as_raw_fd(), pong.as_raw_fd()])?;
        for _ in 0..side.iters {
            wait(&ping)?;
            signal(&pong)?;
        }
        drop(stream);
        return Ok(());
    }
    let (_stream, _, fds) = take_over(side)?;
    let [ping, pong] = <[OwnedFd; 2]>::try_from(fds).map_err(|_| no_descriptor())?.map(File::from);
    let mut trips = Vec::with_capacity(usize::try_from(side.iters).unwrap_or(0));
    for _ in 0..side.iters {
        let start = Instant::now();
        signal(&ping)?;
        wait(&pong)?;
        trips.push(start.elapsed());
    }
    trips.sort_unstable();
    let median = trips.get(trips.len() / 2).copied().unwrap_or_default();
    println!("{}", median.as_secs_f64() * 1e6 / 2.0);
    Ok(())
}

fn new_eventfd() -> Result<File> {
    let made = EventFd::from_flags(EfdFlags::EFD_CLOEXEC);
    Ok(File::from(OwnedFd::from(made.map_err(|e| BenchError::from_io("eventfd", &e.into()))?)))
}

fn signal(mut eventfd: &File) -> Result<()> {
    eventfd.write_all(&1u64.to_ne_bytes()).map_err(|e| BenchError::from_io("eventfd", &e))
}

fn wait(mut eventfd: &File) -> Result<()> {
    eventfd.read_exact(&mut [0; 8]).map_err(|e| BenchError::from_io("eventfd", &e))
}

/// Copies from one buffer to another of one process, which stay in its caches where they fit; prints GB/s.
pub(crate) fn memcpy(side: &Side) -> Result<()> {
    let source = vec![0x5a_u8; side.bytes];
    let mut target = vec![0_u8; side.bytes];
    let micros = median_of_batches(side.iters, |_| {
        std::hint::black_box(&mut target).copy_from_slice(std::hint::black_box(&source));
        Ok(())
    })?;
    println!("{}", side.bytes as f64 / micros / 1e3);
    Ok(())
}

/// Does `once` with 1 to `count`; gives the median over batches of the microseconds of one.
fn median_of_batches(count: u64, mut once: impl FnMut(u64) -> Result<()>) -> Result<f64> {
    let mut times = Vec::new();
    let mut done = 0;
    while done < count {
        let batch = BATCH.min(count - done);
        let start = Instant::now();
        for number in done + 1..=done + batch {
            once(number)?;
        }
        done += batch;
        times.push(start.elapsed().as_secs_f64() * 1e6 / batch as f64);
    }
    Ok(crate::round::median(&times).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::child::free_udp_port;

    fn sides(iters: u64) -> (Side, Side) {
        let port = free_udp_port().unwrap();
        let server = Side { port, client: false, iters, ..Side::default() };
        (server, Side { port: 0, peer: port, client: true, iters, ..Side::default() })
    }

    fn client_of(server: Side, client: &Side, run: fn(&Side) -> Result<()>) {
        let thread = std::thread::spawn(move || run(&server));
        // The server has no descriptor to hand over until it listens.
        let tried = (0..500).find_map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            run(client).ok()
        });
        tried.unwrap();
        thread.join().unwrap().unwrap();
    }

    #[test]
    fn a_write_through_the_descriptor_reaches_the_server() {
        let (server, client) = sides(200);
        client_of(server, &client, pwrite);
        assert_eq!(WORD.load(Ordering::Acquire), 200);
    }

    #[test]
    fn eventfds_go_to_and_fro() {
        let (server, client) = sides(50);
        client_of(server, &client, eventfd);
    }

    #[test]
    fn each_number_is_done_once() {
        let mut sum = 0;
        median_of_batches(130, |number| {
            sum += number;
            Ok(())
        })
        .unwrap();
        assert_eq!(sum, 130 * 131 / 2);
    }
}
