//! Memory of a peer of this host that handed over the way to it: this card executes WRITE and READ there by
//! itself, with the peer's keys.

use std::os::fd::AsRawFd;

use starverbs_backend::{MemoryFiles, ProcessMemory};
use starverbs_core::{Access, QpId};

use super::gates::{Gate, PeerGates};
use super::mrs::PeerMrs;
use super::readers::Reader;
use crate::error::Result;
use crate::memory;

/// What another process handed over.
pub(crate) struct PeerMemory {
    memory: ProcessMemory,
    mrs: PeerMrs,
    gates: PeerGates,
    reader: Reader,
}

/// Bytes of a peer's memory as a request names them, and the right that it needs.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    /// The gate of the peer's queue pair, and whose keys it may use
    pub(crate) gate: Gate,
    pub(crate) qp: QpId,
    pub(crate) rkey: u32,
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) need: Access,
}

impl PeerMemory {
    /// EINVAL: a file is something else; ENOMEM: too many processes read that memory.
    pub(crate) fn open(files: MemoryFiles) -> Result<PeerMemory> {
        let MemoryFiles { mrs, readers, gates, memory } = files;
        let (mrs, gates) = (PeerMrs::open(&mrs)?, PeerGates::open(&gates)?);
        Ok(PeerMemory { memory, mrs, gates, reader: Reader::join(&readers)? })
    }

    /// Whether that queue pair's memory can still be reached.
    pub(crate) fn is_open(&self, gate: Gate) -> bool {
        self.gates.is_open(gate)
    }

    /// Copies to the target what the pieces have, in their order. False: the key does not open it, the gate
    /// is closed, or the bytes are not there; any number of them may have been copied.
    ///
    /// # Safety
    /// The pieces are the target's bytes in all; nothing refers to them as memory that does not change.
    pub(crate) unsafe fn write(&self, target: &Target, pieces: &[libc::iovec]) -> bool {
        self.with(target, |fd, at| {
            // SAFETY: the kernel reads the pieces, and looks whether they are mapped; what changes is another
            // process's memory, or this one's that is registered with another card.
            unsafe { libc::pwritev(fd, pieces.as_ptr(), pieces.len() as libc::c_int, at) }
        })
    }

    /// The other way round.
    ///
    /// # Safety
    /// The pieces are the target's bytes in all, and may be written as memory of a region.
    pub(crate) unsafe fn read(&self, target: &Target, pieces: &[libc::iovec]) -> bool {
        self.with(target, |fd, at| {
            // SAFETY: the kernel writes the pieces, by the caller's terms, and looks whether they are mapped.
            unsafe { libc::preadv(fd, pieces.as_ptr(), pieces.len() as libc::c_int, at) }
        })
    }

    fn with(&self, target: &Target, copy: impl FnOnce(i32, libc::off_t) -> isize) -> bool {
        self.reader.read(|| {
            let Some(at) = self.place(target) else { return false };
            copy(self.memory.as_raw_fd(), at) == target.len as isize
        })
    }

    /// Where the target lies, as the peer's own card would find it.
    fn place(&self, target: &Target) -> Option<libc::off_t> {
        let Target { gate, qp, rkey, addr, len, need } = *target;
        if !self.gates.is_open(gate) {
            return None;
        }
        /* nobody waits for readers when a window is bound anew */
        let (_, entry) = self.mrs.find(rkey).filter(|(_, entry)| entry.is_mr())?;
        entry.permits(qp, need).ok()?;
        let host = entry.host_address(addr, len).ok()?;
        let end = host.checked_add(u64::from(len))?;
        /* on demand, null, of a third process: the peer's card knows what to do */
        (!memory::marked(host) && !memory::marked(end)).then_some(host as libc::off_t)
    }
}
