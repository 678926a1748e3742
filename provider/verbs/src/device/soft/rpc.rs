//! StRoM on the card in software: its kernels, and the memory in which answers of its queue pairs stand.
//!
//! An answer is a WRITE of the card's own, whose bytes lie in a memory region of the queue pair's domain
//! that no program knows. Owns that memory; it must not know what kernels do.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::HashMap;
use std::ptr::NonNull;
use std::time::Duration;

use starverbs_backend::Woken;
use starverbs_core::mr::MrAttr;
use starverbs_core::nic::OwnRequest;
use starverbs_core::strom::{Code, ReplyMemory, RpcHandler, RpcOutcome, SLOT_BYTES};
use starverbs_core::{Access, Nanos, Nic, NicError, PdId, Qpn};

use super::super::command::KernelCommand;
use super::Soft;
use super::back_pressure::Who;
use super::env::{HostEnv, NicEnv};
use super::shard::Shard;
use crate::error::{Result, VerbsError};
use crate::qp::REPLIES;

/// Pause of who waits for a kernel while nothing comes.
const PAUSE: Duration = Duration::from_micros(20);

/// Memory for the answers of a queue pair.
struct ReplyRoom {
    first: NonNull<u8>,
    key: u32,
}

// SAFETY: memory of its own, which the holder of the card's lock alone touches.
unsafe impl Send for ReplyRoom {}

impl ReplyRoom {
    const LAYOUT: Layout = match Layout::from_size_align(REPLIES as usize * SLOT_BYTES, 64) {
        Ok(layout) => layout,
        Err(_) => panic!("a few pages"),
    };

    fn new() -> Option<Self> {
        // SAFETY: the layout has bytes.
        let first = NonNull::new(unsafe { alloc_zeroed(ReplyRoom::LAYOUT) })?;
        Some(ReplyRoom { first, key: 0 })
    }
}

impl Drop for ReplyRoom {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout, and its region is deregistered.
        unsafe { dealloc(self.first.as_ptr(), ReplyRoom::LAYOUT) }
    }
}

/// The memory of all queue pairs that speak the dialect.
#[derive(Default)]
pub(super) struct Replies(HashMap<Qpn, ReplyRoom>);

impl Replies {
    /// Has a queue pair that was just made speak StRoM's dialect, or ends it.
    pub(super) fn speak_strom(&mut self, (nic, env): NicEnv<'_>, qpn: Qpn, now: Nanos) -> Result<()> {
        let spoken = self.give_room(nic, qpn);
        if spoken.is_err() {
            self.forget((nic, env), qpn, now);
            nic.destroy_qp(env, qpn)?;
        }
        spoken
    }

    fn give_room(&mut self, nic: &mut Nic<HostEnv>, qpn: Qpn) -> Result<()> {
        const FULL: VerbsError = VerbsError::NoMemory("answers of kernels");
        let pd = nic.qp_owner(qpn).ok_or(NicError::NotFound)?.pd;
        self.0.try_reserve(1).map_err(|_| FULL)?;
        let mut room = ReplyRoom::new().ok_or(FULL)?;
        let addr = room.first.as_ptr().expose_provenance() as u64;
        let (length, access) = (ReplyRoom::LAYOUT.size() as u64, Access::LOCAL_WRITE);
        room.key = nic.reg_mr(MrAttr { pd, addr, length, iova: addr, access, ..MrAttr::default() })?;
        let memory = ReplyMemory { addr, lkey: room.key, slots: REPLIES as u8 };
        self.0.insert(qpn, room);
        Ok(nic.speak_strom(qpn, memory)?)
    }

    /// A queue pair has ended, with its answers. Frames that name them have left, or are dropped.
    pub(super) fn forget(&mut self, (nic, env): NicEnv<'_>, qpn: Qpn, now: Nanos) {
        if let Some(room) = self.0.remove(&qpn) {
            env.tx.flush(now);
            _ = nic.dereg_mr(room.key);
        }
    }
}

impl Soft {
    /// Has a kernel answer a request of the program's own, by turns between which others have theirs, and
    /// what it sends leaves and is acknowledged.
    fn call_kernel(&self, pd: PdId, op: u64, params: &[u8], answer: &mut [u8]) -> Result<RpcOutcome> {
        let mut own = OwnRequest::new(params)?;
        loop {
            let ended = self.with(|Shard { nic, env, .. }, now| {
                match nic.call_kernel(env, now, pd, op, &mut own)? {
                    Code::Ok => Some(match nic.take_answer(env, pd, &own, answer) {
                        Ok(len) => RpcOutcome { code: Code::Ok, len },
                        Err(ended) => ended,
                    }),
                    code => Some(RpcOutcome { code, len: 0 }),
                }
            });
            if let Some(ended) = ended {
                return Ok(ended);
            }
            if own.waits() {
                let work =
                    self.try_lock().and_then(|shard| self.run_all(shard, Who::Program, Woken(&[])).work);
                if work.is_none_or(|work| work == 0) {
                    std::thread::sleep(PAUSE);
                }
            }
        }
    }

    pub(super) fn change_kernels(&self, command: KernelCommand<'_>) -> Result<()> {
        if let KernelCommand::Call { pd, op, params, answer, ended } = command {
            *ended = self.call_kernel(pd, op, params, answer)?;
            return Ok(());
        }
        let old = self.with(|shard, _| shard.change_kernels(command));
        /* what ends with it may take a while, and does so without the lock */
        Ok(old.map(drop)?)
    }
}

impl Shard {
    /// Loads or unloads a handler; gives the one that went, if any did.
    pub(super) fn change_kernels(
        &mut self,
        command: KernelCommand<'_>,
    ) -> std::result::Result<Option<RpcHandler>, NicError> {
        match command {
            KernelCommand::Load { pd, op, by, replace: true } => {
                self.nic.replace_kernel(pd, op, by).map(|(_, old)| old)
            }
            KernelCommand::Load { pd, op, by, replace: false } => {
                self.nic.load_kernel(pd, op, by).map(|_| None)
            }
            KernelCommand::Unload { pd, op } => {
                let found = self.nic.kernels().iter().find(|has| (has.pd, has.op) == (pd, op));
                let id = found.ok_or(NicError::NotFound)?.id;
                self.nic.unload_kernel(id).map(Some)
            }
            KernelCommand::Call { .. } => Ok(None),
        }
    }
}
