//! StRoM on a card: kernels loaded and unloaded, queue pairs that speak the dialect, its packets.

use alloc::boxed::Box;

use super::Nic;
use crate::env::Env;
use crate::error::NicError;
use crate::room::is_room_for;
use crate::strom::{
    Code, Input, Kernel, KernelId, KernelMemory, KernelRun, KernelSend, LoadedHandler, RegionRange,
    ReplyMemory, RpcHandler, RpcOutcome,
};
use crate::transport::{KernelSite, Quiesce, Rpc, turn};
use crate::types::{FrameMeta, Nanos, PdId, QpState, QpType, Qpn};
use crate::wire::{Bth, Packet};

/// A request of this card's own program at a kernel.
#[derive(Debug)]
pub struct OwnRequest {
    run: KernelRun,
    kernel: Option<KernelId>,
}

impl OwnRequest {
    /// With these parameters, 4096 bytes at most. `Exhausted`: no memory.
    pub fn new(params: &[u8]) -> Result<Self, NicError> {
        let mut run = KernelRun::new(0)?;
        run.load(params, true);
        Ok(OwnRequest { run, kernel: None })
    }

    /// Whether what it sends waits for room in a send queue, and so for the peer's acknowledgements.
    pub fn waits(&self) -> bool {
        !self.run.is_drained()
    }
}

/// Where a kernel runs that this card's own program called.
struct OwnSite<'a, E: Env> {
    nic: &'a mut Nic<E>,
    env: &'a mut E,
    pd: PdId,
    now: Nanos,
}

impl<E: Env> KernelSite for OwnSite<'_, E> {
    fn kernel(&mut self, op: u64, id: KernelId) -> Option<&mut dyn Kernel> {
        self.nic.shared.kernels.get(self.pd, op, id)
    }
}

impl<E: Env> OwnSite<'_, E> {
    /// Host address of what a kernel names: it reaches what the program's SGEs do.
    fn place(&self, of: RegionRange, write: bool) -> Option<u64> {
        self.nic.shared.mrs.resolve_local(of.key, self.pd, of.va, of.len, write).ok()
    }
}

impl<E: Env> KernelMemory for OwnSite<'_, E> {
    fn read(&mut self, from: RegionRange, to: &mut [u8]) -> bool {
        self.place(from, false).is_some_and(|host| to.is_empty() || self.env.dma_copy(host, to))
    }

    fn write(&mut self, to: RegionRange, data: &[u8]) -> bool {
        self.place(to, true).is_some_and(|host| data.is_empty() || self.env.dma_write(host, data))
    }

    fn send(&mut self, qpn: Qpn, to: RegionRange, data: &[u8]) -> KernelSend {
        match self.nic.context(self.env, qpn, self.now) {
            Some(mut cx) if cx.qp.pd == self.pd => cx.send_for_kernel(to, data),
            _ => KernelSend::Denied,
        }
    }
}

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
    /// [`Code::NoKernel`].
    pub fn unload_kernel(&mut self, id: KernelId) -> Result<RpcHandler, NicError> {
        let (pd, handler) = self.shared.kernels.unload(id).ok_or(NicError::NotFound)?;
        self.shared.drop_pd(pd);
        Ok(handler)
    }

    /// Gives a kernel a turn at a request of this card's own program; `None`: it wants another one, maybe
    /// after what it sends has left. It
    /// reaches the regions of the protection domain as an SGE does, and what it writes needs
    /// [`Access::LOCAL_WRITE`](crate::types::Access::LOCAL_WRITE).
    pub fn call_kernel(
        &mut self,
        env: &mut E,
        now: Nanos,
        pd: PdId,
        op: u64,
        own: &mut OwnRequest,
    ) -> Option<Code> {
        let kernels = &mut self.shared.kernels;
        let id = match own.kernel {
            Some(id) => id,
            None => {
                let Some(id) = kernels.find(pd, op) else { return Some(Code::NoKernel) };
                own.kernel = Some(id);
                if let Some(Err(code)) = kernels.get(pd, op, id).map(|k| k.start(&mut own.run, Input::Params))
                {
                    return Some(code);
                }
                id
            }
        };
        turn(&mut OwnSite { nic: self, env, pd, now }, &mut own.run, op, id)
    }

    /// Copies the answer to a request that ended well to the front of `to`; gives its length. OVERFLOW: it is
    /// longer. ACCESS: it is in a region that the program's keys do not open.
    pub fn take_answer(
        &mut self,
        env: &mut E,
        pd: PdId,
        own: &OwnRequest,
        to: &mut [u8],
    ) -> Result<u32, RpcOutcome> {
        let Some(from) = own.run.answered_from() else {
            let bytes = own.run.reply_bytes();
            let len = bytes.len() as u32;
            let room = to.get_mut(..bytes.len()).ok_or(RpcOutcome { code: Code::Overflow, len })?;
            room.copy_from_slice(bytes);
            return Ok(len);
        };
        let longer = RpcOutcome { code: Code::Overflow, len: from.len };
        let room = to.get_mut(..from.len as usize).ok_or(longer)?;
        let host = self.shared.mrs.resolve_local(from.key, pd, from.va, from.len, false);
        let read = host.is_ok_and(|host| room.is_empty() || env.dma_copy(host, room));
        if read { Ok(from.len) } else { Err(RpcOutcome { code: Code::Access, len: 0 }) }
    }

    /// What answers RPCs, by protection domain and op-code.
    pub fn kernels(&self) -> &[LoadedHandler] {
        self.shared.kernels.list()
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
