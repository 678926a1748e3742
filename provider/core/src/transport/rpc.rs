//! RPCs of StRoM's dialect at a responder: a kernel runs, and its answer goes back as a WRITE of this queue
//! pair's own (the paper's 5.1).
//!
//! An RPC is executed as a WRITE is: in order, once, and what comes behind it waits. A kernel that is not
//! done within its budget holds its packet: the packet is expected until then, others find the responder
//! not ready, and the QP's timer gives the kernel its next turn behind those of others. When it is done and
//! its answer is posted, the packet is accepted and acknowledged; a repetition is then a duplicate, and is
//! answered without a kernel. Answers stand in the send queue like a program's WQEs, with the flag
//! [`SendFlags::CARD`], and complete to nobody.

use super::peer_site::{PeerSite, Site, Turned};
use super::{Ctx, MessageInProgress};
use crate::env::{Env, SendQueue};
use crate::nic::QpShared;
use crate::strom::{
    COMMAND, Code, Kernel, KernelId, KernelMemory, KernelRun, KernelSend, MAX_RUNNING, Poll, RegionRange,
    ReplyHead, ReplyMemory, ReplyTarget,
};
use crate::types::{Cqe, Nanos, Psn, QpState, SendFlags, SendOp, SendWqe, WcFlags, WcOpcode};
use crate::wire::headers::NakCode;
use crate::wire::opcode::PacketKind;
use crate::wire::packet::Packet;

/// What a kernel may cost before others have their turn: bytes that it moves, and [`COMMAND`] for each
/// command and step.
const BUDGET: u32 = 32 << 10;
/// A kernel that is not done has its next turn after this, ns; others have theirs meanwhile.
pub(super) const NEXT_TURN: Nanos = 1_000;

/// What a queue pair of the dialect has beside others.
pub(crate) struct Rpc {
    pub(super) run: KernelRun,
    pub(super) memory: ReplyMemory,
    /// Slots of the memory that are free, a bit each
    pub(super) free: u64,
    /// Whether the peer's queue pair speaks the dialect
    pub(super) agreed: Agreed,
    /// When the peer is asked again
    pub(super) ask_at: Nanos,
    /// The request that a kernel is at, while it is not accepted
    pub(super) current: Option<Current>,
    /// Kernel of the message that is coming in
    pub(super) stream: KernelId,
}

/// What is known of the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Agreed {
    /// It was asked so often
    Asked(u8),
    /// It speaks the dialect
    Yes,
    /// It does not, or does not answer
    No,
}

/// A request at a kernel.
#[derive(Clone, Copy, Default)]
pub(super) struct Current {
    pub(super) op: u64,
    pub(super) kernel: KernelId,
    pub(super) reply: ReplyTarget,
    /// The kernel is done; its answer may have to wait
    pub(super) done: Option<Code>,
    /// What the responder is in the middle of when it is accepted
    pub(super) then: MessageInProgress,
    /// An ACK is asked for
    pub(super) ack: bool,
    /// An error has nowhere to be written: it is a NAK
    pub(super) stream: bool,
    /// It is counted among those that run
    pub(super) counted: bool,
}

impl Rpc {
    pub(crate) fn new(run: KernelRun, memory: ReplyMemory) -> Self {
        let free = u64::MAX.checked_shr(64 - u32::from(memory.slots.min(64))).unwrap_or(0);
        let (agreed, stream) = (Agreed::Asked(0), KernelId::default());
        Rpc { run, memory, free, agreed, ask_at: 0, current: None, stream }
    }

    /// RESET: nothing of the connection is left.
    pub(crate) fn reset(&mut self) {
        *self = Rpc::new(core::mem::take(&mut self.run), self.memory);
    }

    pub(super) fn take_slot(&self) -> Option<u32> {
        (self.free != 0).then(|| self.free.trailing_zeros())
    }
}

impl<E: Env> Ctx<'_, E> {
    /// A packet of an RPC, the expected one, on a queue pair of the dialect.
    pub(super) fn execute_rpc(&mut self, packet: &Packet<'_>) {
        let Some(mut rpc) = self.qp.rpc.take() else { return self.sh.stats.drop_opcode.inc() };
        if rpc.agreed != Agreed::Yes {
            rpc.agreed = Agreed::Yes;
            /* one of this end's may wait for it */
            self.ready();
        }
        if let (PacketKind::Rpc, Some(reth)) = (packet.op().kind, packet.reth())
            && self.sh.kernels.is_programs(self.qp.pd, reth.va())
        {
            self.qp.rpc = Some(rpc);
            return self.give_to_program(packet, reth.va());
        }
        /* what is not answered waits for no slot: the peer's answers may stand behind it */
        let answered =
            matches!(packet.op().kind, PacketKind::Rpc) && ReplyHead::wants_answer(packet.payload());
        let full = answered && rpc.take_slot().is_none();
        if full || self.sh.kernels.running >= MAX_RUNNING {
            self.qp.rpc = Some(rpc);
            return self.not_ready();
        }
        let begun = match packet.op().kind {
            PacketKind::Rpc => self.begin_call(&mut rpc, packet),
            _ => self.begin_piece(&mut rpc, packet),
        };
        match begun {
            Ok(current) => {
                self.sh.stats.rx_rpc.inc();
                self.sh.stats.rx_bytes.add(packet.payload().len() as u64);
                rpc.current = Some(current);
                self.run_kernel(&mut rpc);
                self.qp.rpc = Some(rpc);
            }
            Err(code) => {
                self.qp.rpc = Some(rpc);
                self.refuse(code);
            }
        }
    }

    /// RPC that the program answers: its target and parameters go into the next receive, as a SEND with the
    /// low half of the op-code as immediate data.
    #[cold]
    fn give_to_program(&mut self, packet: &Packet<'_>, op: u64) {
        let data = packet.payload();
        let right_size = packet.reth().is_some_and(|reth| reth.dma_len() as usize == data.len());
        if !right_size || data.len() > self.qp.mtu as usize || ReplyHead::decode(data).is_none() {
            return self.refuse(NakCode::InvalidRequest);
        }
        if !self.take_recv() {
            return self.not_ready();
        }
        if !self.place_or_refuse(0, data) {
            return;
        }
        self.sh.stats.rx_rpc.inc();
        self.accept(packet, 1, true);
        let (imm, flags) = ((op as u32).to_be(), WcFlags::WITH_IMM);
        let byte_len = data.len() as u32;
        let opcode = WcOpcode::Recv;
        let src_qp = self.qp.attr.dest_qpn;
        self.complete_recv(
            Cqe { byte_len, imm, opcode, flags, src_qp, ..Cqe::default() },
            packet.bth().solicited(),
        );
    }

    /// RPC: the kernel starts with the parameters behind the target.
    fn begin_call(&mut self, rpc: &mut Rpc, packet: &Packet<'_>) -> Result<Current, NakCode> {
        let reth = packet.reth().ok_or(NakCode::InvalidRequest)?;
        let (data, op) = (packet.payload(), reth.va());
        if reth.dma_len() as usize != data.len() || data.len() > self.qp.mtu as usize {
            return Err(NakCode::InvalidRequest);
        }
        let call = ReplyHead::decode(data).ok_or(NakCode::InvalidRequest)?;
        let current = self.with_site(|site| rpc.begin_call(site, op, call));
        Ok(Current { ack: packet.bth().ack_req(), ..current })
    }

    /// RPC WRITE: the kernel gets a packet's payload (lengths as of a WRITE, IBTA 9.7.4.1.5).
    fn begin_piece(&mut self, rpc: &mut Rpc, packet: &Packet<'_>) -> Result<Current, NakCode> {
        let data = packet.payload();
        let (len, first, last) = (data.len() as u32, packet.op().is_first(), packet.op().is_last());
        let (op, left) = match (self.qp.resp.cur, packet.reth()) {
            (MessageInProgress::Rpc { op, left }, _) => (op, left),
            (_, Some(reth)) => (reth.va(), reth.dma_len()),
            _ => return Err(NakCode::InvalidRequest),
        };
        let right_size = if last { len == left } else { len < left };
        if !right_size || !self.middle_is_full(data.len(), last) {
            return Err(NakCode::InvalidRequest);
        }
        let current = self.with_site(|site| rpc.begin_piece(site, op, (first, last), data));
        let then =
            if last { MessageInProgress::Idle } else { MessageInProgress::Rpc { op, left: left - len } };
        Ok(Current { then, ack: packet.bth().ack_req(), ..current })
    }

    /// Gives the kernel a turn. If it is done, answers and accepts its packet; else it is left as it is, and
    /// has another turn later.
    fn run_kernel(&mut self, rpc: &mut Rpc) {
        let turned = self.with_site(|site| rpc.advance(site));
        let Some(current) = rpc.current else { return };
        match turned {
            Some(Turned::Later(after)) => {
                self.qp.resp.cur = MessageInProgress::Running;
                self.qp.flags.due = super::TimerAction::Rpc;
                self.arm(self.now + after);
            }
            Some(Turned::Ended(code)) => {
                rpc.uncount(&mut self.sh.kernels);
                if current.stream && code != Code::Ok {
                    return self.refuse(NakCode::RemoteOperation);
                }
                /* an answer may stand in the send queue */
                if current.reply.len > 0 {
                    self.ready();
                }
                self.accept_rpc(&current);
            }
            None => {}
        }
    }

    /// Calls with what kernels that work for the peer work with.
    fn with_site<R>(&mut self, call: impl FnOnce(&mut Site<'_, '_, E>) -> R) -> R {
        let qp = self.remote_qp();
        let Ctx { qp: of, sh, env, .. } = self;
        let QpShared { mrs, kernels, stats, cfg, .. } = &mut **sh;
        let (sq, access, max_msg) = (&of.sq, of.attr.access, cfg.max_msg);
        let mut peer = PeerSite { env: &mut **env, mrs, stats, sq, qp, access, max_msg };
        call(&mut Site { peer: &mut peer, kernels })
    }

    /// The packet at the expected PSN was executed: as [`Ctx::accept`].
    fn accept_rpc(&mut self, current: &Current) {
        let resp = &mut self.qp.resp;
        resp.epsn = resp.epsn.plus(1);
        (resp.cur, resp.nak, resp.nak_sent) = (current.then, None, false);
        if matches!(current.then, MessageInProgress::Idle) {
            resp.msn = resp.msn.wrapping_add(1) & 0x00ff_ffff;
        }
        if current.ack {
            self.owe_ack();
        }
    }

    /// The QP's timer: a kernel has its turn, or an answer is tried again.
    pub(super) fn rpc_turn(&mut self) {
        let Some(mut rpc) = self.qp.rpc.take() else { return };
        let psn: Psn = self.qp.resp.epsn;
        self.run_kernel(&mut rpc);
        self.qp.rpc = Some(rpc);
        self.agreement_turn();
        if self.qp.resp.epsn != psn && self.qp.resp.gap.is_some() {
            self.fill_gap(psn);
        }
    }

    /// The QP fails: no kernel works for it any more.
    pub(crate) fn stop_kernel(&mut self) {
        if let Some(rpc) = &mut self.qp.rpc {
            rpc.uncount(&mut self.sh.kernels);
        }
    }

    /// An answer of this card's has been acknowledged, or flushed: its slot is free.
    pub(super) fn reply_done(&mut self, wqe: &SendWqe) {
        if let Some(rpc) = &mut self.qp.rpc {
            rpc.reply_done(wqe);
        }
    }

    /// A kernel that this card's own program called has the QP send bytes, as a WRITE of the card's.
    pub(crate) fn send_for_kernel(&mut self, to: RegionRange, data: &[u8]) -> KernelSend {
        let Some(rpc) = self.qp.rpc.as_ref().filter(|_| self.qp.state == QpState::Rts) else {
            return KernelSend::Denied;
        };
        if rpc.memory.slots < 2 {
            return KernelSend::Denied;
        }
        if self.qp.flags.held && self.qp.engine.is_none() {
            /* it may leave the card, and what stands in its queue with it */
            return KernelSend::Full;
        }
        /* one is left for the answer to a peer's RPC */
        let slot = match rpc.take_slot() {
            Some(slot) if rpc.free.count_ones() > 1 => slot,
            _ => return KernelSend::Full,
        };
        let memory = rpc.memory;
        let filled = self.with_site(|site| site.peer.fill_slot(&memory, slot, data, &[]));
        let Some(own) = filled else { return KernelSend::Denied };
        let wqe = SendWqe {
            wr_id: slot.into(),
            op: SendOp::Write,
            remote_addr: to.va,
            rkey: to.key,
            flags: SendFlags::SIGNALED | SendFlags::CARD,
            ..SendWqe::default()
        };
        let own = [own];
        let posted = self.qp.sq.post_own(wqe, if data.is_empty() { &[] } else { &own });
        if posted && let Some(rpc) = &mut self.qp.rpc {
            rpc.free &= !(1 << slot);
            self.sh.stats.tx_kernel_writes.inc();
            self.ready();
        }
        if posted { KernelSend::Posted } else { KernelSend::Full }
    }
}

/// Where a kernel runs: the memory that it reaches, and itself.
pub(crate) trait KernelSite: KernelMemory {
    /// The kernel, if it is still loaded.
    fn kernel(&mut self, op: u64, id: KernelId) -> Option<&mut dyn Kernel>;
}

/// Steps a kernel that has started, until it is done, its budget is used up, or a queue pair has no room.
pub(crate) fn turn(site: &mut impl KernelSite, run: &mut KernelRun, op: u64, id: KernelId) -> Option<Code> {
    let mut spent = 0;
    loop {
        match run.execute(site) {
            Ok(cost) => spent += cost + COMMAND,
            Err(code) => return Some(code),
        }
        match run.ended {
            Some(code) if run.is_drained() => return Some(code),
            _ if spent >= BUDGET || !run.is_drained() => return None,
            _ => {}
        }
        let Some(kernel) = site.kernel(op, id) else { return Some(Code::NoKernel) };
        if let Poll::Ready(code) = kernel.step(run) {
            run.ended = Some(code);
        }
    }
}
