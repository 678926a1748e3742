//! One end of a connection between processes of this host: the engine of its queue pair.
//!
//! The requester executes nothing: it writes requests into the channel to the peer's process, in order, and
//! completes them when the channel gives their places back, or with their answers. The responder executes
//! what the peer's requester wrote, with the card's own memory, keys and queues.

use starverbs_core::engine::{Call, EngineAttr, EngineCtx, TakenRecv, TransmitStatus};
use starverbs_core::env::{RecvQueue, SendQueue, SendRequest, TakenWqe};
use starverbs_core::nic::MAX_SGE;
use starverbs_core::room::filled;
use starverbs_core::{
    AsyncEvent, Cqe, Host, Nanos, NicError, PdId, QpId, QpState, Qpn, SendFlags, Sge, WcFlags, WcOpcode,
    WcStatus,
};
use starverbs_rings::{CardRq, CardSq};

use super::direct::Direct;
use super::requester::RequestedWqe;
use super::responder::LocalInbound;
use crate::cq::CardCq;
use crate::device::soft::env::HostEnv;
use crate::share::{CopyWay, GatePass};

pub(super) type Ctx<'a> = EngineCtx<'a, HostEnv>;

/// What an end is made of; first what every request needs.
#[repr(C)]
pub(super) struct Init {
    pub(super) sq: CardSq,
    pub(super) send_cq: CardCq,
    /// Channels: the one in which we ask, and the one in which we are asked
    pub(super) channels: [u32; 2],
    pub(super) qpn: Qpn,
    pub(super) peer: Qpn,
    pub(super) pd: PdId,
    /// Incarnations of our requester's connection and of the peer's
    pub(super) epochs: [u16; 2],
    pub(super) sig_all: bool,
    /// UC
    pub(super) unreliable: bool,
    pub(super) first_send: u32,
    pub(super) rq: Option<CardRq>,
    pub(super) recv_cq: CardCq,
    /// Through which the peer may reach this end's memory by itself
    pub(super) gate: Option<GatePass>,
    pub(super) max_recv_sge: u32,
}

/// A receive WQE that was taken from its queue but is not completed.
pub(super) struct HeldRecv {
    pub(super) held: bool,
    pub(super) wr_id: u64,
    /// SGEs of it, [`MAX_SGE`] at most
    pub(super) count: u8,
    pub(super) pd: PdId,
    pub(super) sges: Box<[Sge]>,
}

/// How often a peer whose queue pair does not answer is still asked. Time alone does not end a connection: it
/// may have passed while this process did not run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TriesLeft {
    /// RC's retries are not used up yet
    Many,
    /// They are, and it is to be asked once more
    One,
    /// It is asked for the last time; of UC: for now, messages are asked for once
    None,
    /// Its process is gone
    Gone,
    /// UC: it has taken nothing for long, and what is posted is dropped until it does
    Silent,
}

/// An end: four cache lines, in the order of use. SENDs that come need all, requests of ours without direct
/// access three.
#[repr(C, align(64))]
pub(crate) struct LocalEnd {
    /// RTS, SQD, SQE or ERR
    pub(super) state: QpState,
    /// SQD: the event was raised
    drained: bool,
    /// READs and the like under way
    pub(super) reads: u8,
    /// RNR retries left
    pub(super) rnr_left: u8,
    /// Waits for room in the channel
    pub(super) waits: bool,
    pub(super) tries: TriesLeft,
    /// A request has come
    pub(super) met: bool,
    /// The peer has answered or executed one
    pub(super) answered: bool,
    /// Memory windows of type 2 were bound
    pub(super) windows: bool,
    /// A CQ overran
    overrun: bool,
    /// What WQE `next` names has been unmapped at the peer, whose card is not to touch it
    pub(super) absent: bool,
    /// By which way it has used the peer's memory last
    pub(super) way: Option<CopyWay>,
    /// Number of the request that comes next
    pub(super) expected: u32,
    pub(super) of: Init,
    /// Key of the peer's that was asked for last and is of no mapped memory; 0: none
    pub(super) unmapped: u32,
    /// Oldest WQE that is not complete, the next one to be asked for, and bytes of it that were
    pub(super) una: u32,
    pub(super) next: u32,
    pub(super) offset: u32,
    /// Number of the next request
    pub(super) seq: u32,
    /// Records of the channel that were given back, as of requests under way
    pub(super) given: u32,
    /// Requests of ours that the peer has executed, as its own requests say
    pub(super) acked: u32,
    /// Records of the channel up to here were of requests that have begun anew since, a while ago; 0:
    /// none
    pub(super) passed: u32,
    /// Where each WQE that was asked for stands, by slot
    pub(super) asked: Box<[RequestedWqe]>,
    /// This WQE cannot be asked for: it completes so, once it is the oldest
    pub(super) fault: Option<(u32, WcStatus)>,
    /// The peer has no receive: nothing is asked before; 0: it has
    pub(super) rnr_until: Nanos,
    /// The peer does not answer: at that time requests fail if its process is gone, else one try is left; 0:
    /// it does, or there are none
    pub(super) gone_at: Nanos,
    /// The message that is being received
    pub(super) inbound: LocalInbound,
    pub(super) terms: EngineAttr,
    /// What this end may do by itself
    pub(super) direct: Option<Direct>,
    pub(super) recv: HeldRecv,
}

const _: () = assert!(size_of::<LocalEnd>() == 256);

impl LocalEnd {
    /// `Exhausted`: no memory.
    pub(super) fn new(of: Init, terms: &EngineAttr) -> Result<LocalEnd, NicError> {
        let asked = filled(of.sq.slots() as usize)?;
        let sges = filled((of.max_recv_sge as usize).clamp(1, MAX_SGE))?;
        let first = of.first_send;
        Ok(LocalEnd {
            recv: HeldRecv { held: false, wr_id: 0, count: 0, pd: of.pd, sges },
            of,
            terms: *terms,
            state: QpState::Rts,
            drained: false,
            una: first,
            next: first,
            offset: 0,
            seq: 0,
            given: 0,
            acked: 0,
            passed: 0,
            reads: 0,
            rnr_left: terms.rnr_retry,
            asked,
            fault: None,
            waits: false,
            rnr_until: 0,
            tries: TriesLeft::Many,
            gone_at: 0,
            expected: 0,
            inbound: LocalInbound::Idle,
            met: false,
            answered: false,
            windows: false,
            direct: None,
            way: None,
            unmapped: 0,
            overrun: false,
            absent: false,
        })
    }

    /// RTS, SQD, SQE or ERR: this also when what a full CQ leaves to do is still to be done.
    #[inline]
    pub(in super::super) fn state(&self) -> QpState {
        if self.overrun { QpState::Err } else { self.state }
    }

    /// The program has set the QP anew.
    pub(in super::super) fn set(&mut self, to: &EngineAttr) {
        self.terms = *to;
        self.rnr_left = to.rnr_retry;
        if self.tries == TriesLeft::Gone {
            self.end_patience();
        }
        if matches!(self.state, QpState::Sqd | QpState::Sqe) {
            self.state = QpState::Rts;
        }
    }

    /// When [`Call::Timeout`] is wanted.
    #[inline]
    pub(in super::super) fn next_deadline(&self) -> Option<Nanos> {
        let at = if self.rnr_until == 0 { self.gone_at } else { self.rnr_until };
        let at = if self.overrun { 1 } else { at };
        (at != 0).then_some(at)
    }

    /// First WQE that has not begun.
    pub(in super::super) fn next_send(&self) -> u32 {
        self.next.wrapping_add(u32::from(self.offset > 0))
    }

    /// How its requests reach the peer, for people.
    pub(in super::super) fn link(&self) -> &'static str {
        match self.way {
            None => "local",
            Some(CopyWay::Descriptor) => "local:memory",
            Some(CopyWay::Pid) => "local:traced",
            Some(CopyWay::Mapped) => "local:mapped",
        }
    }

    /// Requests that were made, modulo 2^32.
    pub(in super::super) fn requests(&self) -> u32 {
        self.seq
    }

    /// Requests of the peer that were executed, modulo 2^32.
    pub(in super::super) fn executed(&self) -> u32 {
        self.expected
    }

    /// Oldest WQE that is not done.
    pub(in super::super) fn oldest(&self) -> u32 {
        self.una
    }

    /// Whether windows of type 2 were bound.
    pub(in super::super) fn has_windows(&self) -> bool {
        self.windows
    }

    /// Whether nothing of it has reached its peer. What it does by itself has not.
    pub(super) fn is_fresh(&self) -> bool {
        !self.met && !self.answered && self.state != QpState::Err
    }

    /// What the card asks of its engines.
    pub(in super::super) fn run(&mut self, ctx: &mut Ctx<'_>, call: Call) -> TransmitStatus {
        match call {
            Call::Doorbell => self.ring(ctx),
            Call::Timeout => self.handle_timeout(ctx),
            Call::Transmit => self.ask(ctx),
            Call::Acknowledge => {}
            Call::Fail => self.enter_error(ctx),
            Call::Drain => {
                (self.state, self.drained) = (QpState::Sqd, false);
                self.look_if_drained(ctx);
            }
        }
        TransmitStatus::Idle
    }

    /// Something was posted.
    #[inline]
    pub(in super::super) fn ring(&mut self, ctx: &mut Ctx<'_>) {
        if matches!(self.state, QpState::Sqe | QpState::Err) {
            return self.flush(ctx);
        }
        self.ask(ctx);
    }

    fn handle_timeout(&mut self, ctx: &mut Ctx<'_>) {
        if std::mem::take(&mut self.overrun) {
            return self.enter_error(ctx);
        }
        if self.gone_at != 0 && self.gone_at <= ctx.now {
            self.gone_at = 0;
            if self.of.unreliable {
                self.end_hold(ctx);
            } else if self.tries != TriesLeft::Gone {
                self.tries = TriesLeft::One;
            } else if self.una != self.of.sq.posted() {
                ctx.stats().retry_exceeded.inc();
                return self.fail_oldest(ctx, WcStatus::RetryExcErr);
            }
        }
        if self.rnr_until != 0 && self.rnr_until <= ctx.now {
            self.rnr_until = 0;
            if self.tries == TriesLeft::One {
                self.tries = TriesLeft::None;
            }
            self.ask(ctx);
        }
    }

    /// The QP ends, or goes to RESET.
    pub(in super::super) fn close(self, ctx: &mut Ctx<'_>) {
        if self.windows {
            ctx.mrs_mut().unbind_all(self.of.qpn);
        }
        ctx.env.channels.close_gate(self.of.gate);
        ctx.env.channels.leave(self.of.channels[0], self.of.qpn, self.next.wrapping_sub(self.una));
        ctx.stats().local_qps.sub(1);
    }

    /// As checks of keys know it.
    pub(super) fn id(&self) -> QpId {
        QpId { pd: self.of.pd, qpn: self.of.qpn }
    }

    /// Goes to ERR and flushes what is posted, in order (IBTA 10.3.1).
    pub(super) fn enter_error(&mut self, ctx: &mut Ctx<'_>) {
        if self.state == QpState::Err {
            return;
        }
        ctx.env.channels.close_gate(self.of.gate);
        self.inbound = LocalInbound::Idle;
        self.stop(ctx, QpState::Err);
        if self.of.rq.is_none() {
            ctx.env.event(AsyncEvent::LastWqeReached(self.of.qpn));
        }
    }

    /// Goes to SQE or ERR: no request is under way any more, and what is posted is flushed.
    fn stop(&mut self, ctx: &mut Ctx<'_>, state: QpState) {
        self.state = state;
        ctx.env.channels.forget(self.of.channels[0], self.next.wrapping_sub(self.una));
        (self.fault, self.rnr_until, self.gone_at, self.reads) = (None, 0, 0, 0);
        if self.tries != TriesLeft::Gone {
            self.tries = TriesLeft::Many;
        }
        self.wait_no_more(ctx);
        self.flush(ctx);
    }

    fn flush(&mut self, ctx: &mut Ctx<'_>) {
        while self.una != self.of.sq.posted() {
            self.fail_one(ctx, WcStatus::WrFlushErr);
        }
        (self.next, self.offset) = (self.una, 0);
        if self.state == QpState::Sqe {
            return;
        }
        if self.recv.held {
            self.fail_recv(ctx, WcStatus::WrFlushErr);
        }
        while self.of.rq.is_some() && self.take_recv(ctx) {
            self.fail_recv(ctx, WcStatus::WrFlushErr);
        }
    }

    /// The oldest WQE failed: RC goes to ERR, UC to SQE.
    #[cold]
    pub(super) fn fail_oldest(&mut self, ctx: &mut Ctx<'_>, status: WcStatus) {
        if self.una != self.of.sq.posted() {
            let under_way = self.next.wrapping_sub(self.una);
            self.fail_one(ctx, status);
            if under_way > 0 {
                ctx.env.channels.forget(self.of.channels[0], 1);
            } else {
                self.next = self.una;
            }
        }
        if self.of.unreliable && self.state != QpState::Err {
            return self.stop(ctx, QpState::Sqe);
        }
        self.enter_error(ctx);
    }

    fn fail_one(&mut self, ctx: &mut Ctx<'_>, status: WcStatus) {
        let wqe = self.of.sq.wqe(self.una);
        self.release_oldest();
        let cqe = Cqe { wr_id: wqe.wr_id, status, opcode: wqe.op.wc_opcode(), ..Cqe::default() };
        ctx.stats().error_completions.inc();
        self.push_send(ctx, cqe);
    }

    /// Whether a WQE with these flags makes a completion when it succeeds.
    #[inline]
    pub(super) fn completes(&self, flags: SendFlags) -> bool {
        self.of.sig_all || flags.contains(SendFlags::SIGNALED)
    }

    /// The oldest WQE succeeded. `completes`: it makes a completion.
    #[inline(always)]
    pub(super) fn complete_one(&mut self, ctx: &mut Ctx<'_>, completes: bool) {
        if completes { self.complete_signaled(ctx) } else { self.release_oldest() }
    }

    /// The same of one that makes a completion.
    #[inline(never)]
    fn complete_signaled(&mut self, ctx: &mut Ctx<'_>) {
        let (sq, una) = (&self.of.sq, self.una);
        let (wr_id, SendRequest { op, length, .. }) = (sq.wr_id(una), sq.request(una));
        /* before the completion: who polls it may post at once */
        self.release_oldest();
        let byte_len = if op.brings_data() { length } else { 0 };
        self.push_send(ctx, Cqe { wr_id, byte_len, opcode: op.wc_opcode(), ..Cqe::default() });
    }

    #[inline]
    fn release_oldest(&mut self) {
        self.una = self.una.wrapping_add(1);
        self.of.sq.release(self.una);
    }

    #[inline(always)]
    fn push_send(&mut self, ctx: &mut Ctx<'_>, cqe: Cqe) {
        let cqe = Cqe { qpn: self.of.qpn, ..cqe };
        ctx.stats().completions.inc();
        if self.of.send_cq.add(&cqe, cqe.status != WcStatus::Success).is_err() {
            self.on_overrun(ctx);
        }
    }

    /// The held receive WQE is done. `solicited`: its sender asked for an event.
    #[inline(always)]
    pub(super) fn complete_recv(&mut self, ctx: &mut Ctx<'_>, cqe: Cqe, solicited: bool) {
        let cqe = Cqe { wr_id: self.recv.wr_id, qpn: self.of.qpn, ..cqe };
        self.recv.held = false;
        ctx.stats().completions.inc();
        let failed = cqe.status != WcStatus::Success;
        if failed {
            ctx.stats().error_completions.inc();
        }
        if self.of.recv_cq.add(&cqe, solicited || failed).is_err() {
            self.on_overrun(ctx);
        }
    }

    /// A receive fails for a reason on our side.
    #[cold]
    pub(super) fn fail_recv(&mut self, ctx: &mut Ctx<'_>, status: WcStatus) {
        let cqe = Cqe { status, opcode: WcOpcode::Recv, flags: WcFlags::empty(), ..Cqe::default() };
        self.complete_recv(ctx, cqe, true);
    }

    /// A CQ was full (IBTA 10.2.6.2). The step that is under way ends as it would have; the timer flushes the
    /// rest, at once.
    #[cold]
    fn on_overrun(&mut self, ctx: &mut Ctx<'_>) {
        ctx.stats().cq_overrun.inc();
        if self.state != QpState::Err && !self.overrun {
            self.overrun = true;
            ctx.env.event(AsyncEvent::QpFatal(self.of.qpn));
        }
    }

    /// Makes sure that a receive WQE is held. False: none is posted.
    #[inline(always)]
    pub(super) fn take_recv(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let recv = &mut self.recv;
        if recv.held {
            return true;
        }
        let taken = match &self.of.rq {
            Some(rq) => rq.take(&mut recv.sges).map(|TakenWqe { wr_id, num_sge }| TakenRecv {
                wr_id,
                num_sge,
                pd: self.of.pd,
            }),
            None => ctx.parts().srq.take(&mut recv.sges),
        };
        let Some(TakenRecv { wr_id, num_sge, pd }) = taken else { return false };
        (recv.held, recv.wr_id, recv.count, recv.pd) = (true, wr_id, num_sge as u8, pd);
        true
    }

    /// SQD: everything begun is done.
    #[inline]
    pub(super) fn look_if_drained(&mut self, ctx: &mut Ctx<'_>) {
        if self.state == QpState::Sqd && !self.drained && self.una == self.next_send() {
            self.drained = true;
            if self.terms.drain_event {
                ctx.env.event(AsyncEvent::SqDrained(self.of.qpn));
            }
        }
    }
}
