//! Which kernel answers which RPC op-code, in each protection domain.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::kernel::Kernel;
use crate::error::NicError;
use crate::room::exact;
use crate::types::PdId;

/// Most kernels of a card.
pub const MAX_KERNELS: usize = 256;
/// Most requests of a card that kernels have begun and not finished: one more finds its queue pair's
/// responder not ready.
pub const MAX_RUNNING: u32 = 256;

/// An RPC op-code for all that no other handler of the protection domain has.
pub const ANY_OP: u64 = u64::MAX;

/// What answers RPCs of an op-code.
pub enum RpcHandler {
    /// A kernel
    Kernel(Box<dyn Kernel>),
    /// The program: they take receives. RPC WRITEs are refused
    Program,
}

impl<K: Kernel + 'static> From<Box<K>> for RpcHandler {
    fn from(kernel: Box<K>) -> Self {
        RpcHandler::Kernel(kernel)
    }
}

impl From<Box<dyn Kernel>> for RpcHandler {
    fn from(kernel: Box<dyn Kernel>) -> Self {
        RpcHandler::Kernel(kernel)
    }
}

/// A handler that was loaded: no other one of the card has, or had, the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KernelId(pub u32);

/// What answers RPCs of an op-code in a protection domain.
pub struct LoadedHandler {
    /// Whose queue pairs
    pub pd: PdId,
    /// The RPC op-code
    pub op: u64,
    /// This one, and no other
    pub id: KernelId,
    /// What it is
    pub handler: RpcHandler,
}

/// The kernels, by protection domain and op-code.
#[derive(Default)]
pub(crate) struct KernelRegistry {
    kernels: Vec<LoadedHandler>,
    last: u32,
    /// Requests that are begun and not finished
    pub(crate) running: u32,
}

impl KernelRegistry {
    fn place(&self, pd: PdId, op: u64) -> Result<usize, usize> {
        self.kernels.binary_search_by_key(&(pd, op), |loaded| (loaded.pd, loaded.op))
    }

    /// Adds a handler. `Busy`: the op-code has one. `Exhausted`: as many as may be, or no memory.
    pub(crate) fn load(&mut self, pd: PdId, op: u64, handler: RpcHandler) -> Result<KernelId, NicError> {
        let at = self.place(pd, op).err().ok_or(NicError::Busy)?;
        if self.kernels.len() >= MAX_KERNELS {
            return Err(NicError::Exhausted);
        }
        let more = self.kernels.len() + 1;
        exact(&mut self.kernels, more)?;
        let id = self.next_id();
        self.kernels.insert(at, LoadedHandler { pd, op, id, handler });
        Ok(id)
    }

    /// Has a handler take the place of another, if the op-code has one; gives that back. As [`Self::load`]
    /// otherwise.
    pub(crate) fn replace(
        &mut self,
        pd: PdId,
        op: u64,
        handler: RpcHandler,
    ) -> Result<(KernelId, Option<RpcHandler>), NicError> {
        let Ok(at) = self.place(pd, op) else { return self.load(pd, op, handler).map(|id| (id, None)) };
        let id = self.next_id();
        let loaded = &mut self.kernels[at];
        loaded.id = id;
        Ok((id, Some(core::mem::replace(&mut loaded.handler, handler))))
    }

    fn next_id(&mut self) -> KernelId {
        self.last = self.last.wrapping_add(1).max(1);
        KernelId(self.last)
    }

    /// Takes a handler out, whatever it is in the middle of; gives its protection domain.
    pub(crate) fn unload(&mut self, id: KernelId) -> Option<(PdId, RpcHandler)> {
        let at = self.kernels.iter().position(|loaded| loaded.id == id)?;
        let loaded = self.kernels.remove(at);
        Some((loaded.pd, loaded.handler))
    }

    /// Where the handler of an op-code is, or that of all others.
    fn handler(&self, pd: PdId, op: u64) -> Option<usize> {
        self.place(pd, op).or_else(|_| self.place(pd, ANY_OP)).ok()
    }

    /// The kernel of an op-code.
    pub(crate) fn find(&self, pd: PdId, op: u64) -> Option<KernelId> {
        let loaded = &self.kernels[self.handler(pd, op)?];
        matches!(loaded.handler, RpcHandler::Kernel(_)).then_some(loaded.id)
    }

    /// Whether the program answers an op-code.
    pub(crate) fn is_programs(&self, pd: PdId, op: u64) -> bool {
        let handler = self.handler(pd, op).map(|at| &self.kernels[at].handler);
        matches!(handler, Some(RpcHandler::Program))
    }

    /// The kernel that an op-code had, if it still has.
    pub(crate) fn get(&mut self, pd: PdId, op: u64, id: KernelId) -> Option<&mut dyn Kernel> {
        let at = self.handler(pd, op)?;
        match &mut self.kernels[at] {
            LoadedHandler { id: loaded, handler: RpcHandler::Kernel(kernel), .. } if *loaded == id => {
                Some(&mut **kernel)
            }
            _ => None,
        }
    }

    /// All of them, by protection domain and op-code.
    pub(crate) fn list(&self) -> &[LoadedHandler] {
        &self.kernels
    }
}
