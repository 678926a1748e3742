//! Where a kernel works for a peer: the memory that it reaches, and its answer in the send queue.
//!
//! Knows no packets: `rpc` has those of the card's own transport, an engine ([`EngineRpc`]) has its own.

use crate::counters::Counters;
use crate::engine::EngineRpc;
use crate::env::{Env, SendQueue};
use crate::mr::MrTable;
use crate::strom::{
    Code, Input, Kernel, KernelId, KernelMemory, KernelRegistry, MAX_REPLY, MAX_RUNNING, RECORD_LEN,
    RegionRange, ReplyBody, ReplyFlags, ReplyHead, ReplyMemory, ReplyRecord, ReplyTarget, SLOT_BYTES,
};
use crate::types::{Access, Nanos, QpId, SendFlags, SendOp, SendWqe, Sge};
use zerocopy::IntoBytes;

use super::rpc::{Current, KernelSite, NEXT_TURN, Rpc, turn};

/// An answer that found no room is tried again after this, ns.
const ANSWER_AGAIN: Nanos = 20_000;

/// What a kernel that works for the peer of a queue pair works with.
pub struct PeerSite<'a, E: Env> {
    /// The host
    pub env: &'a mut E,
    /// Memory of this card
    pub mrs: &'a MrTable<E::Mrs>,
    /// What is counted
    pub stats: &'a Counters,
    /// The queue pair's send queue
    pub sq: &'a E::Sq,
    /// The queue pair
    pub qp: QpId,
    /// What its peer may do
    pub access: Access,
    /// Longest message, bytes
    pub max_msg: u32,
}

/// A kernel's site with the kernels.
pub(super) struct Site<'a, 'b, E: Env> {
    pub(super) peer: &'a mut PeerSite<'b, E>,
    pub(super) kernels: &'a mut KernelRegistry,
}

/// What becomes of a request that has had its turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Turned {
    /// It goes on after so long, ns
    Later(Nanos),
    /// It has ended, and its answer stands in the send queue, if there is to be one
    Ended(Code),
}

impl<E: Env> PeerSite<'_, E> {
    /// Host address of what a kernel names. It has the rights that the peer has, and no others: what a READ
    /// or WRITE of the peer would be denied is denied to a kernel that works for it.
    fn place(&self, of: RegionRange, need: Access) -> Option<u64> {
        let host = self.mrs.resolve_remote(of.key, self.qp, of.va, of.len, need).ok();
        host.filter(|_| self.access.contains(need))
    }

    /// Whether an answer may be made of these bytes: the peer may read them, and SGEs may name them.
    fn may_send(&self, from: RegionRange) -> bool {
        from.len < self.max_msg - RECORD_LEN as u32
            && self.place(from, Access::REMOTE_READ).is_some()
            && self.mrs.resolve_local(from.key, self.qp.pd, from.va, from.len, false).is_ok()
    }

    /// Writes an answer, [`MAX_REPLY`] bytes at most, and what stands behind it into a slot, so that this is
    /// aligned.
    pub(super) fn fill_slot(
        &mut self,
        memory: &ReplyMemory,
        slot: u32,
        bytes: &[u8],
        behind: &[u8],
    ) -> Option<Sge> {
        let end = memory.addr + u64::from(slot) * SLOT_BYTES as u64 + MAX_REPLY as u64;
        let len = bytes.len() as u32;
        let sge = Sge { addr: end - u64::from(len), len: len + behind.len() as u32, lkey: memory.lkey };
        let host = self.mrs.resolve_local(sge.lkey, self.qp.pd, sge.addr, sge.len, true).ok()?;
        let written = (bytes.is_empty() || self.env.dma_write(host, bytes))
            && (behind.is_empty() || self.env.dma_write(host + u64::from(len), behind));
        written.then_some(sge)
    }
}

impl<E: Env> KernelSite for Site<'_, '_, E> {
    fn kernel(&mut self, op: u64, id: KernelId) -> Option<&mut dyn Kernel> {
        self.kernels.get(self.peer.qp.pd, op, id)
    }
}

impl<E: Env> KernelMemory for Site<'_, '_, E> {
    fn read(&mut self, from: RegionRange, to: &mut [u8]) -> bool {
        let host = self.peer.place(from, Access::REMOTE_READ);
        host.is_some_and(|host| to.is_empty() || self.peer.env.dma_copy(host, to))
    }

    fn write(&mut self, to: RegionRange, data: &[u8]) -> bool {
        let host = self.peer.place(to, Access::REMOTE_WRITE);
        host.is_some_and(|host| data.is_empty() || self.peer.env.dma_write(host, data))
    }
}

impl Rpc {
    /// Has the kernel look at what came; gives how it ended, if it did at once.
    pub(super) fn start<E: Env>(
        &mut self,
        site: &mut Site<'_, '_, E>,
        op: u64,
        kernel: Option<KernelId>,
        input: Input,
    ) -> Option<Code> {
        let loaded = kernel.and_then(|id| site.kernel(op, id));
        let Some(loaded) = loaded else { return Some(Code::NoKernel) };
        loaded.start(&mut self.run, input).err()
    }

    /// An RPC begins: its kernel looks at what is behind the head.
    pub(super) fn begin_call<E: Env>(
        &mut self,
        site: &mut Site<'_, '_, E>,
        op: u64,
        (reply, params): (ReplyTarget, &[u8]),
    ) -> Current {
        let kernel = site.kernels.find(site.peer.qp.pd, op);
        self.run.load(params, true);
        let done = self.start(site, op, kernel, Input::Params);
        Current { op, kernel: kernel.unwrap_or_default(), reply, done, ..Current::default() }
    }

    /// A piece of a stream, one packet's payload over RC, begins: the kernel that had the first gets it.
    pub(super) fn begin_piece<E: Env>(
        &mut self,
        site: &mut Site<'_, '_, E>,
        op: u64,
        (first, last): (bool, bool),
        data: &[u8],
    ) -> Current {
        let kernel = if first { site.kernels.find(site.peer.qp.pd, op) } else { Some(self.stream) };
        self.stream = kernel.unwrap_or_default();
        self.run.load(data, first);
        let done = self.start(site, op, kernel, Input::Data { first, last });
        Current { op, kernel: self.stream, done, stream: true, ..Current::default() }
    }

    /// Gives the kernel at the request that is begun a turn. It stays counted among those that run until
    /// [`Rpc::uncount`].
    pub(super) fn advance<E: Env>(&mut self, site: &mut Site<'_, '_, E>) -> Option<Turned> {
        let mut current = self.current?;
        if current.done.is_none() {
            current.done = turn(site, &mut self.run, current.op, current.kernel);
        }
        let later = match current.done {
            None => Some(NEXT_TURN),
            Some(_) if current.stream || current.reply.len == 0 => None,
            Some(code) => (!self.post_reply(site.peer, &current, code)).then_some(ANSWER_AGAIN),
        };
        if later.is_some() && !current.counted {
            current.counted = true;
            site.kernels.running += 1;
        }
        self.current = Some(current);
        match (later, current.done) {
            (Some(after), _) => Some(Turned::Later(after)),
            (None, code) => {
                let code = code.unwrap_or_default();
                if code != Code::Ok && (current.stream || current.reply.len == 0) {
                    site.peer.stats.rpc_failed.inc();
                }
                Some(Turned::Ended(code))
            }
        }
    }

    /// No kernel is at a request of this QP any more.
    pub(super) fn uncount(&mut self, kernels: &mut KernelRegistry) {
        if self.current.take().is_some_and(|current| current.counted) {
            kernels.running -= 1;
        }
    }

    /// An answer of this card's has been acknowledged, or flushed: its slot is free.
    pub(super) fn reply_done(&mut self, wqe: &SendWqe) {
        self.free |= 1u64.checked_shl(wqe.wr_id as u32).unwrap_or(0);
    }

    /// Puts the answer into the send queue. False: there is no room now.
    fn post_reply<E: Env>(&mut self, peer: &mut PeerSite<'_, E>, current: &Current, mut code: Code) -> bool {
        let Some(slot) = self.take_slot() else { return false };
        let mut answer = if code == Code::Ok { self.run.answer } else { ReplyBody::Empty };
        if let ReplyBody::Region(from) = answer
            && !peer.may_send(from)
        {
            (answer, code) = (ReplyBody::Empty, Code::Access);
        }
        let length = match answer {
            ReplyBody::Empty => 0,
            ReplyBody::Bytes(length) => length,
            ReplyBody::Region(from) => from.len,
        };
        let reply = current.reply;
        if length as usize + RECORD_LEN > reply.len as usize {
            (answer, code) = (ReplyBody::Empty, Code::Overflow);
        }
        let record = ReplyRecord::new(current.op, length, code);
        let bytes = if let ReplyBody::Bytes(_) = answer { self.run.reply_bytes() } else { &[] };
        let bare = code == Code::Ok && reply.flags.contains(ReplyFlags::BARE);
        let behind = if bare { &[] } else { record.as_bytes() };
        let Some(own) = peer.fill_slot(&self.memory, slot, bytes, behind) else {
            /* the memory is gone: so is the program's interest */
            return true;
        };
        let imm = reply.flags.contains(ReplyFlags::IMM);
        let in_front = RECORD_LEN as u32 + if code == Code::Ok { length } else { 0 };
        let wqe = SendWqe {
            wr_id: slot.into(),
            op: if imm { SendOp::WriteImm } else { SendOp::Write },
            remote_addr: reply.addr.wrapping_add(u64::from(reply.len - in_front)),
            rkey: reply.rkey,
            imm: reply.imm,
            flags: SendFlags::SIGNALED | SendFlags::CARD,
            ..SendWqe::default()
        };
        let data = match answer {
            ReplyBody::Region(RegionRange { key, len, va }) => Sge { addr: va, len, lkey: key },
            _ => Sge::default(),
        };
        let posted = match (data.len, own.len) {
            (0, 0) => peer.sq.post_own(wqe, &[]),
            (0, _) => peer.sq.post_own(wqe, &[own]),
            (_, 0) => peer.sq.post_own(wqe, &[data]),
            _ => peer.sq.post_own(wqe, &[data, own]),
        };
        if posted {
            self.free &= !(1 << slot);
            if code != Code::Ok {
                peer.stats.rpc_failed.inc();
            }
            peer.stats.tx_rpc_replies.inc();
        }
        posted
    }
}

impl EngineRpc<'_> {
    fn rpc(&mut self) -> Option<&mut Rpc> {
        self.0.as_mut()?.0.as_deref_mut()
    }

    /// Whether the queue pair speaks StRoM's dialect.
    pub fn speaks(&mut self) -> bool {
        self.rpc().is_some()
    }

    /// Whether the program answers RPCs of this op-code.
    pub fn is_programs(&self, qp: QpId, op: u64) -> bool {
        self.0.as_ref().is_some_and(|(_, kernels)| kernels.is_programs(qp.pd, op))
    }

    /// An RPC, or a piece of an RPC WRITE, of so many bytes, 4,096 at most, is to come.
    pub fn expect(&mut self, length: usize) {
        if let Some(rpc) = self.rpc() {
            rpc.run.make_place(length);
        }
    }

    /// Bytes of it have come. `None`: they are beyond it.
    pub fn put(&mut self, offset: usize, bytes: &[u8]) -> Option<()> {
        let place = self.rpc()?.run.place();
        place.get_mut(offset..)?.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(())
    }

    /// All of it has come: its kernel begins. False: as many as may be are at work, another is, or there is
    /// no slot for its answer. `None`: it is no RPC.
    pub fn begin<E: Env>(&mut self, peer: &mut PeerSite<'_, E>, op: u64) -> Option<bool> {
        let (rpc, kernels) = self.0.as_mut()?;
        let rpc = rpc.as_deref_mut()?;
        /* what is not answered waits for no slot: the peer's answers may stand behind it */
        let full = ReplyHead::wants_answer(rpc.run.place()) && rpc.take_slot().is_none();
        if full || kernels.running >= MAX_RUNNING || rpc.current.is_some() {
            return Some(false);
        }
        let data = rpc.run.take_place();
        let call = ReplyHead::decode(&data);
        count(peer, &data);
        let current = call.map(|call| rpc.begin_call(&mut Site { peer, kernels }, op, call));
        rpc.run.give_back(data);
        rpc.current = Some(current?);
        Some(true)
    }

    /// All of a piece of an RPC WRITE has come, which `of` says to be its first, its last, or both: its
    /// kernel begins. False: as many as may be are at work, or another is.
    pub fn feed<E: Env>(&mut self, peer: &mut PeerSite<'_, E>, op: u64, of: (bool, bool)) -> bool {
        let Some((Some(rpc), kernels)) = self.0.as_mut() else { return false };
        if kernels.running >= MAX_RUNNING || rpc.current.is_some() {
            return false;
        }
        let data = rpc.run.take_place();
        count(peer, &data);
        rpc.current = Some(rpc.begin_piece(&mut Site { peer, kernels }, op, of, &data));
        rpc.run.give_back(data);
        true
    }

    /// Gives the kernel a turn.
    pub fn turn<E: Env>(&mut self, peer: &mut PeerSite<'_, E>) -> Turned {
        let Some((Some(rpc), kernels)) = self.0.as_mut() else { return Turned::Ended(Code::NoKernel) };
        let turned = rpc.advance(&mut Site { peer, kernels }).unwrap_or(Turned::Ended(Code::NoKernel));
        if let Turned::Ended(_) = turned {
            rpc.uncount(kernels);
        }
        turned
    }

    /// No kernel works for the peer any more.
    pub fn stop(&mut self) {
        if let Some((Some(rpc), kernels)) = self.0.as_mut() {
            rpc.uncount(kernels);
        }
    }

    /// A WQE of the card's own is done, or flushed: its slot is free.
    pub fn reply_done(&mut self, wqe: &SendWqe) {
        if let Some(rpc) = self.rpc() {
            rpc.reply_done(wqe);
        }
    }
}

/// Counts what a kernel gets.
fn count<E: Env>(peer: &PeerSite<'_, E>, data: &[u8]) {
    peer.stats.rx_rpc.inc();
    peer.stats.rx_bytes.add(data.len() as u64);
}
