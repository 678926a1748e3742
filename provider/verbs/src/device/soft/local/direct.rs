//! WRITE and READ that the requester executes by itself, on the memory of a peer that handed over the way to
//! it.
//!
//! It goes so where nothing of the queue pair is under way, so that all before it is done, and where the key
//! opens the range. All else, and whatever fails, is asked of the peer's card, which finds errors as the
//! wire's responder does. docs/decisions/0020-direct-access.md says who may.

use std::sync::Arc;

use libc::iovec;
use starverbs_core::env::SendQueue;
use starverbs_core::transport::slices;
use starverbs_core::types::{SendOp, SendWqe};
use starverbs_core::{Access, PdId, QpId, SendFlags};

use super::end::{Ctx, LocalEnd};
use crate::memory;
use crate::share::{Gate, PeerMemory, Target};

/// Most bytes of one use of the peer's memory: whoever waits for a reader waits for no more.
const PIECE: u32 = 1 << 16;
/// Longest message: the card's lock is held while it is copied.
const LONGEST: u32 = 1 << 30;
/// A message that is shorter costs more as a system call than as a request, if many are under way.
const SHORT: u32 = 32 << 10;
/// Most pieces of local memory, and one more for the end that is written last.
const PIECES: usize = 64 + 1;
/// Written last: who polls them finds all before.
const TAIL: u32 = 8;

/// What a peer's queue pair lets this one do by itself.
#[derive(Clone)]
pub(super) struct Direct {
    pub(super) memory: Arc<PeerMemory>,
    pub(super) gate: Gate,
    pub(super) pd: PdId,
    pub(super) access: Access,
}

/// Pieces of local memory.
struct Pieces {
    list: [iovec; PIECES],
    count: usize,
}

impl Pieces {
    fn new() -> Pieces {
        Pieces { list: [iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; PIECES], count: 0 }
    }

    /// `None`: it is no plain memory, or there are too many.
    fn push(&mut self, addr: u64, len: u32) -> Option<()> {
        let place = self.list.get_mut(self.count).filter(|_| !memory::marked(addr))?;
        *place = iovec { iov_base: addr as *mut libc::c_void, iov_len: len as usize };
        self.count += 1;
        Some(())
    }

    fn all(&self) -> &[iovec] {
        &self.list[..self.count]
    }
}

impl LocalEnd {
    /// Executes WQE `next`, a WRITE or READ, and completes it. False: the peer's card is to be asked.
    pub(super) fn execute_direct(&mut self, ctx: &mut Ctx<'_>, wqe: &SendWqe) -> bool {
        let read = match wqe.op {
            SendOp::Write => false,
            SendOp::Read => true,
            _ => return false,
        };
        /* the peer answers a first request only once it has begun, too */
        let idle = self.una == self.next && self.offset == 0 && self.reads == 0 && !self.is_fresh();
        if !idle || !(1..=LONGEST).contains(&wqe.length) {
            return false;
        }
        /* one after the other without a look at what is done: the ring takes four times as many */
        let alone = self.completes(wqe) && self.of.send_cq.is_polled();
        if wqe.length < SHORT && !alone {
            return false;
        }
        let Some(direct) = self.direct.take() else { return false };
        let need = if read { Access::REMOTE_READ } else { Access::REMOTE_WRITE };
        let done = direct.access.contains(need)
            && (0..wqe.length).step_by(PIECE as usize).all(|offset| {
                let len = (wqe.length - offset).min(PIECE);
                self.copy_direct(ctx, wqe, &direct, (offset, len), read)
            });
        if done || direct.memory.is_open(direct.gate) {
            self.direct = Some(direct);
        }
        if !done {
            return false;
        }
        if read {
            ctx.stats.rx_bytes.add(u64::from(wqe.length));
        } else {
            ctx.stats.tx_bytes.add(u64::from(wqe.length));
        }
        ctx.stats.local_direct.inc();
        self.did_own(ctx);
        true
    }

    fn copy_direct(
        &self,
        ctx: &Ctx<'_>,
        wqe: &SendWqe,
        direct: &Direct,
        (offset, len): (u32, u32),
        read: bool,
    ) -> bool {
        let need = if read { Access::REMOTE_READ } else { Access::REMOTE_WRITE };
        let addr = wqe.remote_addr.wrapping_add(u64::from(offset));
        let qp = QpId { pd: direct.pd, qpn: self.of.peer };
        let target = Target { gate: direct.gate, qp, rkey: wqe.rkey, addr, len, need };
        let mut pieces = Pieces::new();
        let tail = if read { 0 } else { TAIL.min(len) };
        let there = self
            .find_local(ctx, wqe, offset, len - tail, read, &mut pieces)
            .and_then(|()| self.find_local(ctx, wqe, offset + len - tail, tail, read, &mut pieces));
        // SAFETY: the pieces are `len` bytes of regions that give this queue pair the right, whose memory the
        // program leaves to the card until the request is done, or of the send queue's own room.
        there.is_some()
            && unsafe {
                if read {
                    direct.memory.read(&target, pieces.all())
                } else {
                    direct.memory.write(&target, pieces.all())
                }
            }
    }

    /// Where bytes of WQE `next` lie. `None`: no key opens them, or they are no plain memory.
    fn find_local(
        &self,
        ctx: &Ctx<'_>,
        wqe: &SendWqe,
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
            pieces.push(ctx.mrs.resolve_local(sge.lkey, self.of.pd, addr, n, write).ok()?, n)
        })
    }
}
