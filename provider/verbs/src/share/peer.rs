//! Memory of a peer of this host that handed over the way to it: this card executes requests there by itself,
//! with the peer's keys.
//!
//! Owns which way the bytes go: where the peer's table says of a region in which memory file it lies, this
//! process maps that, and the CPU moves them; else the kernel does, by a descriptor of the peer's memory or,
//! what is long and where the settings ask for it, by the number of its process.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

use libc::iovec;
use starverbs_backend::{MemoryFiles, ProcessFile};
use starverbs_core::mr::MrEntry;
use starverbs_core::{Access, QpId};
use starverbs_rings::SpinLock;

use super::backing::FileBytes;
use super::gates::{GatePass, PeerGates};
use super::mapped::MappedFiles;
use super::mrs::PeerMrs;
use super::readers::ExporterSlot;
use crate::error::Result;
use crate::memory;

/// What another process handed over.
pub(crate) struct PeerMemory {
    memory: ProcessFile,
    process: ProcessFile,
    /// Its process's number; 0: long copies go by the descriptor, too
    pid: AtomicI32,
    /// Its queue pairs fetch the data of SENDs
    fetches: AtomicBool,
    mrs: PeerMrs,
    gates: PeerGates,
    /// Under the card's lock: nobody waits
    inside: SpinLock<Inside>,
}

/// What is used from within a reader's slot.
struct Inside {
    reader: ExporterSlot,
    files: MappedFiles,
}

/// Bytes of a peer's memory as a request names them, and the right that it needs.
#[derive(Clone, Copy)]
pub(crate) struct PeerBytes {
    /// The gate of the peer's queue pair, and whose keys it may use
    pub(crate) gate: GatePass,
    pub(crate) qp: QpId,
    pub(crate) rkey: u32,
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) need: Access,
    /// The request is better asked for than executed by a system call
    pub(crate) only_mapped: bool,
}

/// By which way bytes went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CopyWay {
    /// Memory that both processes have mapped
    Mapped,
    /// A descriptor of the peer's memory
    Descriptor,
    /// The number of the peer's process
    Pid,
}

/// Why bytes did not go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NotCopied {
    /// The key does not open them, the gate is closed, or there is no way: the peer's card knows more
    Unknown,
    /// The key opens them, and no memory is there: its program has unmapped it without deregistering it
    Absent,
}

/// What became of bytes that were to go.
pub(crate) type Copied = std::result::Result<CopyWay, NotCopied>;

/// Shorter copies are faster by the descriptor.
const LONG: u32 = 32 << 10;

/// What becomes of a word.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WordChange {
    /// This is added
    Add(u64),
    /// The second takes the first's place
    Swap(u64, u64),
    /// This is written
    Store(u64),
}

/// process_vm_writev(2) or process_vm_readv(2).
type ProcessVm = unsafe extern "C" fn(
    libc::pid_t,
    *const iovec,
    libc::c_ulong,
    *const iovec,
    libc::c_ulong,
    libc::c_ulong,
) -> isize;

/// pwritev(2) or preadv(2).
type FileCall = unsafe extern "C" fn(libc::c_int, *const iovec, libc::c_int, libc::off_t) -> isize;

/// The system calls that move bytes one way.
#[derive(Clone, Copy)]
struct CopyCalls {
    file: FileCall,
    process: ProcessVm,
}

/// Where bytes of a peer lie.
enum TargetBytes {
    /// Here
    Mapped(*mut u8),
    /// There
    Peer(libc::off_t),
}

impl PeerMemory {
    /// EINVAL: a file is something else; ENOMEM: too many processes read that memory.
    /// `pid`: the number of its process, if it may go by that.
    pub(crate) fn open(files: MemoryFiles, pid: Option<libc::pid_t>) -> Result<PeerMemory> {
        let MemoryFiles { mrs, readers, gates, memory, process } = files;
        let (mrs, gates) = (PeerMrs::open(&mrs)?, PeerGates::open(&gates)?);
        let inside = Inside { reader: ExporterSlot::join(&readers)?, files: MappedFiles::default() };
        let pid = AtomicI32::new(pid.unwrap_or(0));
        let fetches = AtomicBool::new(false);
        Ok(PeerMemory { memory, process, pid, fetches, mrs, gates, inside: SpinLock::new(inside) })
    }

    /// Whether that queue pair's memory can still be reached.
    pub(crate) fn is_open(&self, gate: GatePass) -> bool {
        self.gates.is_open(gate)
    }

    /// Copies to the target what the pieces have, in their order, the last piece's last word last. Where that
    /// fails, any number of them may have been copied.
    ///
    /// # Safety
    /// The pieces are the target's bytes in all; nothing refers to them as memory that does not change.
    #[inline]
    pub(crate) unsafe fn write(&self, target: &PeerBytes, pieces: &[iovec]) -> Copied {
        let calls = CopyCalls { file: libc::pwritev, process: libc::process_vm_writev };
        // SAFETY: the caller's terms; with the calls another process's memory changes, or this one's that is
        // registered with another card.
        unsafe {
            self.copy(target, pieces, calls, |here, piece| {
                memory::write_in_order(here, piece.iov_base.cast(), piece.iov_len);
            })
        }
    }

    /// The other way round.
    ///
    /// # Safety
    /// The pieces are the target's bytes in all, and may be written as memory of a region.
    #[inline]
    pub(crate) unsafe fn read(&self, target: &PeerBytes, pieces: &[iovec]) -> Copied {
        let calls = CopyCalls { file: libc::preadv, process: libc::process_vm_readv };
        // SAFETY: the caller's terms.
        unsafe {
            self.copy(target, pieces, calls, |here, piece| {
                memory::write_in_order(piece.iov_base.cast(), here, piece.iov_len);
            })
        }
    }

    /// Copies between the pieces and the target, by the way that there is.
    ///
    /// # Safety
    /// `move_one` copies between a piece and as many bytes at an address, which are mapped; it and the calls
    /// do to the pieces what their owner allows.
    #[inline]
    unsafe fn copy(
        &self,
        target: &PeerBytes,
        pieces: &[iovec],
        calls: CopyCalls,
        move_one: impl Fn(*mut u8, &iovec),
    ) -> Copied {
        let done = self.reach(target, |place| match place {
            TargetBytes::Mapped(mut here) => {
                for piece in pieces {
                    move_one(here, piece);
                    here = here.wrapping_add(piece.iov_len);
                }
                Some(Ok(CopyWay::Mapped))
            }
            // SAFETY: the caller's terms; the kernel looks whether what it reads and writes is mapped.
            TargetBytes::Peer(at) => unsafe {
                let by_pid = self.by_pid(target, at, pieces, calls.process);
                Some(by_pid.map_or_else(|| self.by_descriptor(target, at, pieces, calls.file), Ok))
            },
        });
        done.unwrap_or(Err(NotCopied::Unknown))
    }

    /// Copies by the peer's descriptor.
    ///
    /// # Safety
    /// As `call`'s, for the pieces.
    unsafe fn by_descriptor(
        &self,
        target: &PeerBytes,
        at: libc::off_t,
        pieces: &[iovec],
        call: FileCall,
    ) -> Copied {
        let fd = self.memory.as_raw_fd();
        // SAFETY: the caller's terms.
        let moved = unsafe { call(fd, pieces.as_ptr(), pieces.len() as libc::c_int, at) };
        if moved == target.len as isize {
            return Ok(CopyWay::Descriptor);
        }
        let mut byte = 0_u8;
        let next = at.saturating_add(moved.max(0) as libc::off_t);
        // SAFETY: one byte, for one byte.
        let there = unsafe { libc::pread(fd, (&raw mut byte).cast(), 1, next) };
        /* what is not there is EIO; of a process that has ended there is nothing, and no error */
        let absent = there < 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::EIO);
        Err(if absent { NotCopied::Absent } else { NotCopied::Unknown })
    }

    /// Copies what is long by the peer's number, which could have become another process's: nobody goes so
    /// but by the settings. `None`: it is short, or does not go; once it did not, nothing does any more.
    ///
    /// # Safety
    /// As `call`'s, for the pieces.
    unsafe fn by_pid(
        &self,
        target: &PeerBytes,
        at: libc::off_t,
        pieces: &[iovec],
        call: ProcessVm,
    ) -> Option<CopyWay> {
        let pid = self.pid.load(Ordering::Relaxed);
        if pid == 0 || target.len < LONG {
            return None;
        }
        let there = iovec { iov_base: at as *mut libc::c_void, iov_len: target.len as usize };
        // SAFETY: the caller's terms.
        let moved = unsafe { call(pid, pieces.as_ptr(), pieces.len() as libc::c_ulong, &there, 1, 0) };
        if moved == target.len as isize {
            return Some(CopyWay::Pid);
        }
        self.pid.store(0, Ordering::Relaxed);
        None
    }

    /// Whether long copies go by the number of its process.
    pub(crate) fn is_traced(&self) -> bool {
        self.pid.load(Ordering::Relaxed) != 0
    }

    /// Whether its queue pairs fetch the data of SENDs from this process's memory.
    #[inline]
    pub(crate) fn fetches(&self) -> bool {
        self.fetches.load(Ordering::Relaxed)
    }

    /// It has said so, or could not.
    pub(crate) fn set_fetches(&self, fetches: bool) {
        self.fetches.store(fetches, Ordering::Relaxed);
    }

    /// Whether the target can be reached by a mapping.
    #[cold]
    pub(crate) fn maps(&self, target: &PeerBytes) -> bool {
        let target = PeerBytes { only_mapped: true, ..*target };
        self.reach(&target, |place| matches!(place, TargetBytes::Mapped(_)).then_some(())).is_some()
    }

    /// Whether the key opens all of the target, and there is a way.
    pub(crate) fn opens(&self, target: &PeerBytes) -> bool {
        self.reach(target, |_| Some(())).is_some()
    }

    /// Changes the target, a word, as the CPUs of all processes do that have it mapped; gives what was there.
    /// `None`: as of [`PeerMemory::write`], or it is not mapped, or not aligned.
    pub(crate) fn change(&self, target: &PeerBytes, change: WordChange) -> Option<u64> {
        self.reach(&PeerBytes { only_mapped: true, len: 8, ..*target }, |place| {
            let TargetBytes::Mapped(word) = place else { return None };
            if !word.addr().is_multiple_of(8) || !target.addr.is_multiple_of(8) {
                return None;
            }
            // SAFETY: eight bytes of a mapping that stays until the end of the call, aligned. Whoever else
            // has them changes them with the CPU's own means.
            let word = unsafe { AtomicU64::from_ptr(word.cast()) };
            Some(match change {
                WordChange::Add(value) => word.fetch_add(value, Ordering::SeqCst),
                WordChange::Swap(old, new) => word
                    .compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst)
                    .unwrap_or_else(|there| there),
                WordChange::Store(value) => word.swap(value, Ordering::SeqCst),
            })
        })
    }

    /// Runs `call` with bytes that the peer names by its own key, where they can be mapped, while it waits
    /// for the end. `None`: they cannot.
    pub(crate) fn with_mapped<T>(
        &self,
        key: u32,
        addr: u64,
        len: u32,
        call: impl FnOnce(*const u8) -> T,
    ) -> Option<T> {
        let mut inside = self.inside.lock();
        let Inside { reader, files } = &mut *inside;
        reader.read(|| {
            let (_, entry) = self.mrs.find(key).filter(|(_, entry)| entry.is_mr())?;
            let host = entry.host_address(addr, len).ok()?;
            let place = self.map(&entry, host, len, files)?;
            Some(call(place.cast_const()))
        })
    }

    /// Runs `call` with the target's place while the peer waits for its end.
    #[inline]
    fn reach<T>(&self, target: &PeerBytes, call: impl FnOnce(TargetBytes) -> Option<T>) -> Option<T> {
        let mut inside = self.inside.lock();
        let Inside { reader, files } = &mut *inside;
        reader.read(|| call(self.place(target, files)?))
    }

    /// Where the target lies, as the peer's own card would find it.
    #[inline]
    fn place(&self, target: &PeerBytes, files: &mut MappedFiles) -> Option<TargetBytes> {
        let PeerBytes { gate, qp, rkey, addr, len, need, only_mapped } = *target;
        if !self.gates.is_open(gate) {
            return None;
        }
        /* nobody waits for readers when a window is bound anew */
        let (_, entry) = self.mrs.find(rkey).filter(|(_, entry)| entry.is_mr())?;
        entry.permits(qp, need).ok()?;
        let host = entry.host_address(addr, len).ok()?;
        if let Some(place) = self.map(&entry, host, len, files) {
            return Some(TargetBytes::Mapped(place));
        }
        let end = host.checked_add(u64::from(len))?;
        /* on demand, null, of a third process: the peer's card knows what to do */
        let plain = !memory::marked(host) && !memory::marked(end);
        (plain && !only_mapped).then_some(TargetBytes::Peer(host as libc::off_t))
    }

    /// Where bytes of a region lie in this process.
    #[inline(always)]
    fn map(&self, entry: &MrEntry, host: u64, len: u32, files: &mut MappedFiles) -> Option<*mut u8> {
        let first = FileBytes::read(entry.backing)?;
        let offset = first.offset.checked_add(host.checked_sub(entry.addr)?)?;
        files.find(&self.process, FileBytes { offset, ..first }, len)
    }
}
