//! StRoM on a card: kernels loaded and unloaded, queue pairs that speak the dialect, its packets.

use alloc::boxed::Box;

use super::Nic;
use crate::env::Env;
use crate::error::NicError;
use crate::room::is_room_for;
use crate::strom::{KernelId, KernelRun, ReplyMemory, RpcHandler};
use crate::transport::{Quiesce, Rpc};
use crate::types::{FrameMeta, Nanos, PdId, QpState, QpType, Qpn};
use crate::wire::{Bth, Packet};

impl<E: Env> Nic<E> {
    /// Has RPCs of op-code `op` on queue pairs of a protection domain answered by a kernel, or left to the
    /// program; [`ANY_OP`](crate::strom::ANY_OP): all that no other handler has. `Busy`: the op-code has one.
    /// `Exhausted`: there are [`MAX_KERNELS`](crate::strom::MAX_KERNELS), or no memory.
    pub fn load_kernel(
        &mut self,
        pd: PdId,
        op: u64,
        handler: impl Into<RpcHandler>,
    ) -> Result<KernelId, NicError> {
        self.shared.hold_pd(pd)?;
        self.shared.kernels.load(pd, op, handler.into()).inspect_err(|_| self.shared.drop_pd(pd))
    }

    /// As [`Nic::load_kernel`], but a handler that the op-code has makes room, and is given back: its
    /// requests end as if it was unloaded.
    pub fn replace_kernel(
        &mut self,
        pd: PdId,
        op: u64,
        handler: impl Into<RpcHandler>,
    ) -> Result<(KernelId, Option<RpcHandler>), NicError> {
        self.shared.hold_pd(pd)?;
        let replaced = self.shared.kernels.replace(pd, op, handler.into());
        if !matches!(replaced, Ok((_, None))) {
            self.shared.drop_pd(pd);
        }
        replaced
    }

    /// Unloads a handler, and gives it back. Requests that a kernel is in the middle of end with
    /// [`Code::NoKernel`](crate::strom::Code::NoKernel).
    pub fn unload_kernel(&mut self, id: KernelId) -> Result<RpcHandler, NicError> {
        let (pd, handler) = self.shared.kernels.unload(id).ok_or(NicError::NotFound)?;
        self.shared.drop_pd(pd);
        Ok(handler)
    }

    /// The kernels of a protection domain, by RPC op-code.
    pub fn kernels(&self, pd: PdId) -> impl Iterator<Item = (u64, KernelId)> + '_ {
        self.shared.kernels.list(pd)
    }

    /// Has a queue pair speak StRoM's dialect until it ends; its answers stand in `memory`, and take slots of
    /// its send queue beside the program's. `Invalid`: it is no RC queue pair in RESET, or there is
    /// no slot. `Exhausted`: no memory.
    pub fn speak_strom(&mut self, qpn: Qpn, memory: ReplyMemory) -> Result<(), NicError> {
        let qp = self.qps.get_mut(qpn).ok_or(NicError::NotFound)?;
        let fits = qp.qp_type == QpType::Rc && qp.state == QpState::Reset && !qp.flags.held;
        if !fits || !(1..=64).contains(&memory.slots) {
            return Err(NicError::Invalid);
        }
        let run = KernelRun::new(qpn)?;
        if !is_room_for(size_of::<Rpc>()) {
            return Err(NicError::Exhausted);
        }
        qp.rpc = Some(Box::new(Rpc::new(run, memory)));
        qp.quiesce = Quiesce::Never;
        Ok(())
    }

    /// Requests that kernels have begun and not finished, whose queue pairs' packets wait for them.
    pub fn kernels_running(&self) -> u32 {
        self.shared.kernels.running
    }

    /// Whether a queue pair speaks StRoM's dialect.
    pub fn speaks_strom(&self, qpn: Qpn) -> bool {
        self.qps.get(qpn).is_some_and(|qp| qp.rpc.is_some())
    }

    /// A frame that is no packet to other queue pairs, as one that speaks the dialect reads it. `None`: it is
    /// for none such, or is no packet there, either.
    #[cold]
    pub(super) fn parse_dialect<'f>(&self, frame: &'f [u8]) -> Option<Packet<'f>> {
        let dest = Bth::of(frame)?.dest_qpn();
        if self.speaks_strom(dest) { Packet::parse_rpc(frame).ok() } else { None }
    }

    /// A card asks or says which dialect a queue pair speaks.
    pub(super) fn handle_dialect(&mut self, env: &mut E, now: Nanos, meta: &FrameMeta, packet: &Packet<'_>) {
        match self.context(env, packet.bth().dest_qpn(), now) {
            Some(mut cx) => cx.receive_dialect(meta, packet),
            None => self.shared.stats.drop_no_qp.inc(),
        }
    }
}
