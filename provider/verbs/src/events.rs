//! Queues that a program reads through a file descriptor: completion channels and async events.
//!
//! A descriptor is an eventfd in semaphore mode: it can be polled, read in blocking mode or not, as
//! the program sets it. Its count is the number of entries; the entries themselves lie beside it.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::error::{Result, VerbsError};

/// What a program reads from `ibv_get_async_event`. `kind` is an `ibv_event_type`; `cookie` the number
/// that was given when the object was created.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VerbsEvent {
    /// Of a QP
    Qp {
        /// Which event, an `ibv_event_type`
        kind: u32,
        /// Of the QP
        cookie: u64,
    },
    /// Of a completion queue
    Cq {
        /// Which event, an `ibv_event_type`
        kind: u32,
        /// Of the completion queue
        cookie: u64,
    },
    /// Of an SRQ
    Srq {
        /// Which event, an `ibv_event_type`
        kind: u32,
        /// Of the SRQ
        cookie: u64,
    },
    /// Of a port
    Port {
        /// Which event, an `ibv_event_type`
        kind: u32,
        /// Number of the port, from 1
        port: u8,
    },
    /// Of the device
    Device {
        /// Which event, an `ibv_event_type`
        kind: u32,
    },
}

/// `enum ibv_event_type`, as far as this card raises them.
pub mod kind {
    /// The completion queue overran
    pub const CQ_ERR: u32 = 0;
    /// The QP failed and is in ERR
    pub const QP_FATAL: u32 = 1;
    /// The QP got an invalid request
    pub const QP_REQ_ERR: u32 = 2;
    /// The QP got a request that violates access rights
    pub const QP_ACCESS_ERR: u32 = 3;
    /// The QP got its first packet in RTR
    pub const COMM_EST: u32 = 4;
    /// The send queue is drained, in SQD
    pub const SQ_DRAINED: u32 = 5;
    /// The device is gone
    pub const DEVICE_FATAL: u32 = 8;
    /// The port is up
    pub const PORT_ACTIVE: u32 = 9;
    /// The port is down
    pub const PORT_ERR: u32 = 10;
    /// The SRQ has fewer WQEs than its limit
    pub const SRQ_LIMIT_REACHED: u32 = 15;
    /// The QP, in ERR, takes no more WQEs from its SRQ
    pub const QP_LAST_WQE_REACHED: u32 = 16;
    /// The GID table changed
    pub const GID_CHANGE: u32 = 18;
}

/// A queue with a descriptor that is readable while something is in it.
pub struct FdQueue<T> {
    fd: OwnedFd,
    entries: Mutex<VecDeque<T>>,
}

impl<T> FdQueue<T> {
    /// An empty queue.
    ///
    /// # Errors
    /// No descriptor left.
    pub fn new() -> Result<Self> {
        Ok(FdQueue {
            fd: eventfd(EfdFlags::EFD_SEMAPHORE)?,
            entries: Mutex::new(VecDeque::with_capacity(16)),
        })
    }

    /// The descriptor, which lives as long as the queue.
    pub fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    fn entries(&self) -> MutexGuard<'_, VecDeque<T>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Room for `entries` at once: adding so many never allocates. False: no memory.
    pub(crate) fn make_room(&self, entries: usize) -> bool {
        let mut queue = self.entries();
        let more = entries.saturating_sub(queue.len());
        queue.try_reserve(more).is_ok()
    }

    /// Whether nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.entries().is_empty()
    }

    /// Adds an entry and makes the descriptor readable. An entry that there is no memory for is lost.
    pub fn push(&self, entry: T) {
        drop(self.try_push(entry));
    }

    /// As `push`.
    ///
    /// # Errors
    /// The entry, where there is no memory for it.
    pub fn try_push(&self, entry: T) -> std::result::Result<(), T> {
        let mut entries = self.entries();
        if entries.try_reserve(1).is_err() {
            return Err(entry);
        }
        entries.push_back(entry);
        signal(&self.fd);
        Ok(())
    }

    /// Takes the oldest entry, as a read of the descriptor would: blocks, or does not, as it is set.
    ///
    /// # Errors
    /// `Again`, EINTR, or what else the read gives.
    pub fn pop(&self) -> Result<T> {
        loop {
            let mut count = 0u64;
            // SAFETY: eight writable bytes, as an eventfd asks for.
            let got = unsafe { libc::read(self.fd(), (&raw mut count).cast(), 8) };
            if got != 8 {
                match VerbsError::last_os() {
                    VerbsError::Os(libc::EAGAIN) if self.blocks() => continue,
                    VerbsError::Os(libc::EAGAIN) => return Err(VerbsError::Again),
                    error => return Err(error),
                }
            }
            /* none: it was purged between the read and now */
            if let Some(entry) = self.entries().pop_front() {
                return Ok(entry);
            }
        }
    }

    /// Whether a read of the descriptor blocks as the program set it, whatever `take_one` does meanwhile:
    /// that is done under the lock.
    fn blocks(&self) -> bool {
        let _entries = self.entries();
        !flags(&self.fd).contains(OFlag::O_NONBLOCK)
    }

    /// Drops the entries that `gone` picks, and their share of the descriptor's count; says how many.
    pub fn purge(&self, mut gone: impl FnMut(&T) -> bool) -> u32 {
        let mut entries = self.entries();
        let before = entries.len();
        entries.retain(|entry| !gone(entry));
        let purged = before - entries.len();
        (0..purged).for_each(|_| take_one(&self.fd));
        purged as u32
    }

    /// Takes the entries that `wanted` picks, in their order, and their share of the descriptor's count. What
    /// they do when they are dropped is then done without the queue's lock.
    pub fn take(&self, mut wanted: impl FnMut(&T) -> bool) -> Vec<T> {
        let mut entries = self.entries();
        let mut taken = Vec::new();
        let mut at = 0;
        while let Some(entry) = entries.get(at) {
            if wanted(entry) {
                taken.extend(entries.remove(at));
                take_one(&self.fd);
            } else {
                at += 1;
            }
        }
        taken
    }
}

/// A close-on-exec eventfd with count 0.
pub(crate) fn eventfd(flags: EfdFlags) -> Result<OwnedFd> {
    Ok(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | flags)?.into())
}

/// Adds 1 to an eventfd.
pub(crate) fn signal(fd: &OwnedFd) {
    /* blocks at a count of 2^64 - 2 only, out of reach */
    let _ = nix::unistd::write(fd, &1u64.to_ne_bytes());
}

/// Takes 1 (semaphore mode) or all from an eventfd, if there is something, in blocking mode too.
fn take_one(fd: &OwnedFd) {
    let mut count = 0u64;
    let iov = libc::iovec { iov_base: (&raw mut count).cast(), iov_len: 8 };
    // SAFETY: one vector of eight writable bytes.
    let got = unsafe { libc::preadv2(fd.as_raw_fd(), &iov, 1, -1, libc::RWF_NOWAIT) };
    if got < 0 && !matches!(VerbsError::last_os(), VerbsError::Os(libc::EAGAIN)) {
        take_one_by_mode(fd);
    }
}

/// The same on kernels before 5.8, which do not do so with an eventfd, and under emulators that have no such
/// call.
fn take_one_by_mode(fd: &OwnedFd) {
    let before = flags(fd);
    let _ = fcntl(fd, FcntlArg::F_SETFL(before | OFlag::O_NONBLOCK));
    let _ = nix::unistd::read(fd, &mut [0; 8]);
    let _ = fcntl(fd, FcntlArg::F_SETFL(before));
}

/// The status flags of a descriptor.
fn flags(fd: &OwnedFd) -> OFlag {
    OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readable(queue: &FdQueue<u32>) -> bool {
        let mut poll = libc::pollfd { fd: queue.fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd.
        unsafe { libc::poll(&mut poll, 1, 0) == 1 }
    }

    #[test]
    fn descriptor_tells_what_is_inside() {
        let queue = FdQueue::new().unwrap();
        assert!(!readable(&queue));
        for entry in 1..=3 {
            queue.push(entry);
        }
        queue.purge(|entry| *entry == 2);
        queue.push(4);
        assert_eq!(queue.take(|entry| *entry == 4), [4]);
        assert_eq!(queue.pop().unwrap(), 1);
        assert!(readable(&queue));
        assert_eq!(queue.pop().unwrap(), 3);
        assert!(!readable(&queue) && queue.is_empty());
    }

    #[test]
    fn each_way_takes_one_and_never_waits() {
        for take in [take_one, take_one_by_mode] {
            let queue = FdQueue::<u32>::new().unwrap();
            queue.push(1);
            queue.push(2);
            take(&queue.fd);
            assert!(readable(&queue));
            take(&queue.fd);
            take(&queue.fd);
            assert!(!readable(&queue) && queue.blocks());
        }
    }

    #[test]
    fn a_reader_waits_while_another_thread_purges() {
        let queue = FdQueue::new().unwrap();
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| queue.pop().unwrap());
            for _ in 0..1000 {
                let _entries = queue.entries();
                take_one_by_mode(&queue.fd);
            }
            queue.push(7);
            assert_eq!(reader.join().unwrap(), 7);
        });
    }

    #[test]
    fn honours_what_the_program_sets_on_the_descriptor() {
        let queue = FdQueue::<u32>::new().unwrap();
        // SAFETY: flags of a descriptor of ours.
        unsafe { libc::fcntl(queue.fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        assert_eq!(queue.pop().unwrap_err().errno(), libc::EAGAIN);
        queue.push(7);
        assert_eq!(queue.pop().unwrap(), 7);
    }
}
