//! WRITE, READ and atomics that the requester executes by itself, on the memory of a peer that handed over
//! the way to it.
//!
//! It goes so where nothing of the queue pair is under way, so that all before it is done, and where the key
//! opens the range. All else, and whatever fails, is asked of the peer's card, which finds errors as the
//! wire's responder does. docs/decisions/0020-direct-access.md says who may.

use std::mem::MaybeUninit;
use std::sync::Arc;

use libc::iovec;
use starverbs_core::env::{SendQueue, SendRequest};
use starverbs_core::transport::slices;
use starverbs_core::types::{SendOp, SendWqe};
use starverbs_core::{Access, PdId, QpId, SendFlags};
use starverbs_rings::SendRemote;

use super::end::{Ctx, LocalEnd};
use crate::memory;
use crate::share::{Copied, CopyWay, GatePass, NotCopied, PeerBytes, PeerMemory, WordChange};

/// Most bytes of one use of the peer's memory: whoever waits for a reader waits for no more.
const PIECE: u32 = 1 << 20;
/// Longest message: the card's lock is held while it is copied.
const LONGEST: u32 = 1 << 30;
/// What is shorter never goes by the number of the peer's process.
const SHORT: u32 = 32 << 10;
/// From this one on, requests in a row that find none under way are of a program that makes one at a time.
/// What is executed at once is never under way, and would hide that a program keeps its queue full.
const ALONE: u8 = 4;
/// Most pieces of local memory, and one more for the end that is written last.
const PIECES: usize = 64 + 1;
/// Written last: who polls them finds all before.
const TAIL: u32 = 8;

/// What a peer's queue pair lets this one do by itself.
#[derive(Clone)]
pub(super) struct Direct {
    pub(super) memory: Arc<PeerMemory>,
    pub(super) gate: GatePass,
    pub(super) pd: PdId,
    pub(super) access: Access,
    /// Requests in a row that found none under way
    pub(super) alone: u8,
}

/// What became of a request that this end may execute by itself.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum DirectResult {
    /// It is done
    Done,
    /// It can be once what is under way is done
    Wait,
    /// The peer's card is to be asked
    Ask,
}

/// Pieces of local memory.
struct Pieces {
    list: [MaybeUninit<iovec>; PIECES],
    /// Those that are written
    count: usize,
}

impl Pieces {
    fn new() -> Pieces {
        Pieces { list: [const { MaybeUninit::uninit() }; PIECES], count: 0 }
    }

    /// `None`: it is no plain memory, or there are too many.
    fn push(&mut self, addr: u64, len: u32) -> Option<()> {
        let place = self.list.get_mut(self.count).filter(|_| !memory::marked(addr))?;
        place.write(iovec { iov_base: addr as *mut libc::c_void, iov_len: len as usize });
        self.count += 1;
        Some(())
    }

    fn all(&self) -> &[iovec] {
        // SAFETY: so many are written, one after the other, by `push` alone.
        unsafe { std::slice::from_raw_parts(self.list.as_ptr().cast(), self.count) }
    }

    /// The word that the pieces are.
    fn word(&self) -> u64 {
        let mut word = [0; 8];
        let mut at = 0;
        for piece in self.all() {
            let to = word.get_mut(at..).unwrap_or(&mut []);
            let len = piece.iov_len.min(to.len());
            // SAFETY: `to` has so many bytes. The piece is memory of a region, or of the send queue's own,
            // which is copied and not looked at.
            unsafe { to.as_mut_ptr().copy_from(piece.iov_base.cast(), len) };
            at += len;
        }
        u64::from_ne_bytes(word)
    }

    /// Writes a word to where the pieces lie, which are eight bytes that may be written.
    fn set_word(&self, word: u64) {
        let word = word.to_ne_bytes();
        let mut at = 0;
        for piece in self.all() {
            let from = word.get(at..).unwrap_or(&[]);
            let len = piece.iov_len.min(from.len());
            // SAFETY: `from` has so many bytes; the piece was found with the right to write.
            unsafe { memory::write_in_order(piece.iov_base.cast(), from.as_ptr(), len) };
            at += len;
        }
    }
}

impl LocalEnd {
    /// Executes WQE `next`, a WRITE, a READ or an atomic, and completes it.
    #[inline(never)]
    pub(super) fn execute_direct(&mut self, ctx: &mut Ctx<'_>, wqe: &SendRequest) -> DirectResult {
        self.absent = false;
        let need = match wqe.op {
            SendOp::Write | SendOp::AtomicWrite => Access::REMOTE_WRITE,
            SendOp::Read => Access::REMOTE_READ,
            SendOp::CmpSwap | SendOp::FetchAdd => Access::REMOTE_ATOMIC,
            _ => return DirectResult::Ask,
        };
        /* the peer answers a first request only once it has begun, too */
        if self.is_fresh() || !(1..=LONGEST).contains(&wqe.length) {
            return DirectResult::Ask;
        }
        if self.una != self.next || self.reads > 0 {
            self.direct.iter_mut().for_each(|direct| direct.alone = 0);
            let waits = self.is_worth_a_wait(wqe, need);
            return if waits { DirectResult::Wait } else { DirectResult::Ask };
        }
        let only_mapped = self.goes_mapped_alone(ctx, wqe);
        let remote = self.of.sq.remote(self.next);
        if only_mapped && remote.rkey == self.unmapped {
            return DirectResult::Ask;
        }
        let Some(direct) = &self.direct else { return DirectResult::Ask };
        let way = match wqe.op {
            _ if !direct.access.contains(need) => Err(NotCopied::Unknown),
            SendOp::Write | SendOp::Read => {
                let target = PeerBytes { only_mapped, ..self.target(wqe, remote, direct, need) };
                let read = wqe.op == SendOp::Read;
                let bytes = if read { &ctx.stats().rx_bytes } else { &ctx.stats().tx_bytes };
                let copied = self.copy_all(ctx, wqe, direct, &target);
                copied.inspect(|_| bytes.add(u64::from(wqe.length)))
            }
            _ => self.change_word(ctx, &self.whole(wqe), direct, need).ok_or(NotCopied::Unknown),
        };
        match way {
            Ok(CopyWay::Mapped) => ctx.stats().local_mapped.inc(),
            Ok(CopyWay::Descriptor) => ctx.stats().local_direct.inc(),
            Ok(CopyWay::Pid) => ctx.stats().local_traced.inc(),
            Err(why) => {
                self.unmapped = remote.rkey;
                self.absent = why == NotCopied::Absent;
                if !direct.memory.is_open(direct.gate) {
                    self.direct = None;
                }
                return DirectResult::Ask;
            }
        }
        self.way = way.ok();
        self.did_own(ctx, wqe.flags);
        DirectResult::Done
    }

    /// Whether a request, before which others are under way, is better executed behind them than asked for: a
    /// program that keeps the queue full would have the peer's card do all of its work for ever. Through the
    /// descriptor both cards together are faster.
    fn is_worth_a_wait(&mut self, wqe: &SendRequest, need: Access) -> bool {
        let remote = self.of.sq.remote(self.next);
        match (self.way, &self.direct) {
            (Some(CopyWay::Mapped), _) => true,
            (_, Some(direct)) if wqe.length >= SHORT && direct.memory.is_traced() => true,
            (None, Some(direct)) if remote.rkey != self.unmapped => {
                let maps = direct.memory.maps(&self.target(wqe, remote, direct, need));
                self.unmapped = if maps { 0 } else { remote.rkey };
                maps
            }
            _ => false,
        }
    }

    /// Whether a request is executed on mapped memory alone, as both cards together are faster than a system
    /// call: it is one of many, after each of which the program does not look at what is done, or behind
    /// many, or beside what this process asks of the peer.
    fn goes_mapped_alone(&mut self, ctx: &Ctx<'_>, wqe: &SendRequest) -> bool {
        if !matches!(wqe.op, SendOp::Write | SendOp::Read) {
            return true;
        }
        let Some(direct) = &mut self.direct else { return true };
        if wqe.length >= SHORT && direct.memory.is_traced() {
            return false;
        }
        direct.alone = direct.alone.saturating_add(1);
        direct.alone < ALONE
            || ctx.env.channels.is_asking(self.of.channels[0])
            || !self.completes(wqe.flags)
            || !self.of.send_cq.is_polled()
    }

    /// What a request names.
    #[inline]
    fn target(&self, wqe: &SendRequest, remote: SendRemote, direct: &Direct, need: Access) -> PeerBytes {
        PeerBytes {
            gate: direct.gate,
            qp: QpId { pd: direct.pd, qpn: self.of.peer },
            rkey: remote.rkey,
            addr: remote.addr,
            len: wqe.length,
            need,
            only_mapped: true,
        }
    }

    /// Copies the bytes of a WRITE or READ.
    fn copy_all(&self, ctx: &Ctx<'_>, wqe: &SendRequest, direct: &Direct, target: &PeerBytes) -> Copied {
        let read = wqe.op == SendOp::Read;
        /* what a part of is not open is not begun */
        if wqe.length > PIECE && !direct.memory.opens(target) {
            return Err(NotCopied::Unknown);
        }
        if wqe.length <= TAIL
            && let Some(here) = self.one_piece(ctx, wqe, read)
        {
            let piece = iovec { iov_base: here.cast(), iov_len: wqe.length as usize };
            // SAFETY: as in `copy_piece`.
            return unsafe { copy_pieces(direct, target, &[piece], read) };
        }
        let (mut way, mut offset) = (Err(NotCopied::Unknown), 0);
        while offset < wqe.length {
            let len = (wqe.length - offset).min(PIECE);
            let addr = target.addr.wrapping_add(u64::from(offset));
            way = Ok(self.copy_piece(ctx, wqe, direct, offset, &PeerBytes { addr, len, ..*target })?);
            offset += len;
        }
        way
    }

    #[inline(never)]
    fn copy_piece(
        &self,
        ctx: &Ctx<'_>,
        wqe: &SendRequest,
        direct: &Direct,
        offset: u32,
        target: &PeerBytes,
    ) -> Copied {
        let (len, read) = (target.len, wqe.op == SendOp::Read);
        let mut pieces = Pieces::new();
        let tail = if read { 0 } else { TAIL.min(len) };
        let found = self
            .find_local(ctx, wqe, offset, len - tail, read, &mut pieces)
            .and_then(|()| self.find_local(ctx, wqe, offset + len - tail, tail, read, &mut pieces));
        found.ok_or(NotCopied::Unknown)?;
        // SAFETY: the pieces are `len` bytes of regions that give this queue pair the right, whose memory the
        // program leaves to the card until the request is done, or of the send queue's own room.
        unsafe { copy_pieces(direct, target, pieces.all(), read) }
    }

    /// An atomic or ATOMIC WRITE, of eight bytes.
    fn change_word(
        &self,
        ctx: &mut Ctx<'_>,
        wqe: &SendWqe,
        direct: &Direct,
        need: Access,
    ) -> Option<CopyWay> {
        let fetches = wqe.op.is_atomic();
        let mut pieces = Pieces::new();
        let SendWqe { op, flags, length, rkey, remote_addr, .. } = *wqe;
        let request = &SendRequest { op, flags, length };
        self.find_local(ctx, request, 0, length, fetches, &mut pieces)?;
        let change = match wqe.op {
            SendOp::FetchAdd => WordChange::Add(wqe.compare_add),
            SendOp::CmpSwap => WordChange::Swap(wqe.compare_add, wqe.swap),
            _ => WordChange::Store(pieces.word()),
        };
        let remote = SendRemote { addr: remote_addr, rkey, imm: 0 };
        let there = direct.memory.change(&self.target(request, remote, direct, need), change)?;
        if fetches {
            pieces.set_word(there);
        }
        Some(CopyWay::Mapped)
    }

    /// Where bytes of WQE `next` lie. `None`: no key opens them, or they are no plain memory.
    #[inline]
    fn find_local(
        &self,
        ctx: &Ctx<'_>,
        wqe: &SendRequest,
        offset: u32,
        len: u32,
        write: bool,
        pieces: &mut Pieces,
    ) -> Option<()> {
        if len == 0 {
            return Some(());
        }
        if wqe.flags.contains(SendFlags::INLINE) {
            let from = self.of.sq.inline(self.next);
            let there = !write && offset.checked_add(len)? <= from.len;
            return there.then(|| pieces.push(from.addr + u64::from(offset), len))?;
        }
        slices(self.of.sq.sges(self.next), offset, len, |sge, skip, n| {
            let addr = sge.addr.wrapping_add(u64::from(skip));
            pieces.push(ctx.mrs().resolve_local(sge.lkey, self.of.pd, addr, n, write).ok()?, n)
        })
    }
}

/// Copies from the target to the pieces, if it is a READ, or the other way round.
///
/// # Safety
/// As of [`PeerMemory::read`] or [`PeerMemory::write`].
#[inline]
unsafe fn copy_pieces(direct: &Direct, target: &PeerBytes, pieces: &[iovec], read: bool) -> Copied {
    // SAFETY: the caller's terms.
    unsafe { if read { direct.memory.read(target, pieces) } else { direct.memory.write(target, pieces) } }
}
