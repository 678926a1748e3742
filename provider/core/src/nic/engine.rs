//! Queue pairs that have an engine, and those that may come to have one.
//!
//! A QP is *held* while it is not settled what does its work: its own requests wait. Then it goes on as it is
//! ([`Nic::resume_qp`]), an engine begins ([`Nic::start_engine`]), or it leaves the card
//! ([`Nic::release_qp`]). One that runs is quiesced before it is held.

use alloc::boxed::Box;

use super::path::PathId;
use super::{Nic, QpShared};
use crate::engine::{Call, Detached, Engine, EngineAttr, EngineCtx, TransmitStatus};
use crate::env::{Env, SendQueue};
use crate::error::NicError;
use crate::qp::{EventOwner, QpAttr, RecvSource};
use crate::transport::{ConnAttr, Ctx, Qp, Quiesce, Rpc, SendPause, patience};
use crate::types::{AsyncEvent, Nanos, QpState, QpType, Qpn, SendOp, SrqId};

impl EngineAttr {
    fn of(attr: &ConnAttr) -> Self {
        let ConnAttr { access, max_rd_atomic, min_rnr_timer, rnr_retry, timeout, retry_cnt, .. } = *attr;
        let (patience, drain_event) = (patience(timeout, retry_cnt).unwrap_or(0), attr.en_sqd_async_notify);
        EngineAttr { access, max_rd_atomic, min_rnr_timer, rnr_retry, patience, drain_event }
    }
}

impl<E: Env> Qp<E> {
    /// Whether all requests that began are done.
    fn has_nothing_under_way(&self) -> bool {
        let req = &self.req;
        req.next == req.una && req.fresh == req.una && !req.outstanding() && req.fault.is_none()
    }

    /// Whether engines carry all that is posted and did not begin.
    fn has_portable_posts(&self) -> bool {
        let (next, posted) = (self.req.next, self.sq.posted());
        let waiting = (0..posted.wrapping_sub(next)).map(|n| self.sq.op(next.wrapping_add(n)));
        !waiting.into_iter().any(|op| matches!(op, SendOp::AtomicWrite | SendOp::Flush) || op.is_rpc())
    }

    /// Whether it may be quiesced and held: it is in RTS, and does its work itself.
    fn runs_plain(&self) -> bool {
        self.state == QpState::Rts && !self.flags.held
    }
}

impl<E: Env> Ctx<'_, E> {
    /// Calls the QP's engine, if it has one; gives how a transmit ended.
    pub(crate) fn run_engine(&mut self, call: Call) -> Option<TransmitStatus> {
        let engine = self.qp.engine.as_ref()?;
        let due = engine.next_deadline();
        if call == Call::Timeout && due.is_none_or(|at| at > self.now) {
            /* timers are lazy */
            due.into_iter().for_each(|at| self.arm(at));
            return Some(TransmitStatus::Idle);
        }
        if call == Call::Doorbell && !engine.minds_doorbell() {
            /* its turn looks for what was posted */
            self.ready();
            return Some(TransmitStatus::Idle);
        }
        let status = self.with_engine(|engine, ctx| engine.run(ctx, call))?;
        if !matches!(call, Call::Transmit | Call::Acknowledge) {
            self.engine_ready();
        }
        self.sh.open_path(self.qp.path);
        Some(status)
    }

    #[inline]
    fn with_engine<R>(&mut self, call: impl FnOnce(&mut E::Engine, &mut EngineCtx<'_, E>) -> R) -> Option<R> {
        let Ctx { qp, sh, env, now } = self;
        let engine = qp.engine.as_mut()?;
        let parts = (&qp.rq, qp.path, &mut qp.rpc);
        let done = with_ctx(sh, env, *now, parts, |ctx| call(engine, ctx));
        let (state, deadline) = (engine.state(), engine.next_deadline());
        if matches!(state, QpState::Sqe | QpState::Err) {
            self.qp.state = state;
        }
        match deadline {
            Some(at) => self.arm(at),
            None => self.disarm_idle_timer(),
        }
        Some(done)
    }

    /// The engine gets a turn to send, if it wants one; acknowledges alone wait for the program's answer.
    #[inline]
    fn engine_ready(&mut self) {
        match self.qp.engine.as_ref().map(Engine::wants) {
            None | Some(TransmitStatus::Idle) => {}
            Some(TransmitStatus::Owes) => self.queue_ack(),
            Some(_) => self.ready(),
        }
    }

    /// The program has set the QP anew.
    pub(crate) fn set_engine(&mut self) {
        if let Some(engine) = &mut self.qp.engine {
            engine.set(&EngineAttr::of(&self.qp.attr));
        }
    }

    /// The engine's turn to send.
    pub(crate) fn engine_turn(&mut self) -> SendPause {
        match self.run_engine(Call::Transmit) {
            Some(TransmitStatus::More) => SendPause::TurnOver,
            Some(TransmitStatus::PortFull) => SendPause::PortFull,
            Some(TransmitStatus::Crowded) => {
                self.await_window(self.qp.path);
                SendPause::Idle
            }
            Some(TransmitStatus::Owes) => {
                self.queue_ack();
                SendPause::Idle
            }
            Some(TransmitStatus::Idle) | None => SendPause::Idle,
        }
    }

    /// The card's own transport does the QP's work from now on: what waited begins. Not if it has an engine
    /// that is not quiesced.
    pub(crate) fn resume(&mut self) {
        if self.qp.engine.as_ref().is_some_and(|engine| !engine.is_quiesced()) {
            return;
        }
        if let Some(engine) = self.qp.engine.take() {
            self.leave_window();
            let Detached { next_send, windows } = self.with_engine_ctx(|ctx| engine.detach(ctx));
            self.qp.req.start_at(next_send);
            let (req, flags) = (&mut self.qp.req, &mut self.qp.flags);
            /* the peer's credits were of before */
            (req.counted, req.alone) = (false, false);
            flags.windows |= windows;
        }
        self.qp.flags.held = false;
        if self.qp.quiesce == Quiesce::Asked {
            self.qp.quiesce = Quiesce::No;
        }
        if self.qp.resp.owes_answer() {
            /* it had no turn meanwhile */
            self.ready();
        }
        self.doorbell();
    }

    /// The QP goes to RESET, or ends.
    pub(crate) fn close_engine(&mut self) {
        if let Some(engine) = self.qp.engine.take() {
            self.with_engine_ctx(|ctx| engine.close(ctx));
        }
    }

    fn with_engine_ctx<R>(&mut self, call: impl FnOnce(&mut EngineCtx<'_, E>) -> R) -> R {
        let Ctx { qp, sh, env, now } = self;
        with_ctx(sh, env, *now, (&qp.rq, qp.path, &mut qp.rpc), call)
    }
}

impl<Q> RecvSource<Q> {
    /// The SRQ that a queue pair with an engine receives from, if it does.
    #[inline]
    pub(crate) fn srq(&self) -> Option<SrqId> {
        match self {
            RecvSource::Shared(id) => Some(*id),
            RecvSource::Own(_) | RecvSource::Xrc(_) => None,
        }
    }
}

/// Calls with what a card gives an engine.
#[inline]
fn with_ctx<E: Env, R>(
    sh: &mut QpShared<E>,
    env: &mut E,
    now: Nanos,
    (rq, path, rpc): (&RecvSource<E::Rq>, PathId, &mut Option<Box<Rpc>>),
    call: impl FnOnce(&mut EngineCtx<'_, E>) -> R,
) -> R {
    let mut ctx = EngineCtx { env: &mut *env, sh, rq, rpc, path, low: false, now };
    let done = call(&mut ctx);
    if ctx.low
        && let Some(id) = rq.srq()
    {
        env.event(AsyncEvent::SrqLimit(id));
    }
    done
}

/// The SRQ from which a QP receives.
pub struct SharedRq<'a, E: Env> {
    /// Which one it is
    pub id: SrqId,
    /// Its ring
    pub ring: &'a E::Rq,
}

/// What who takes over the work of a QP must know of it.
pub struct QpHandover<'a, E: Env> {
    /// Whose it is
    pub owner: EventOwner,
    /// Its attributes, and its state
    pub attr: QpAttr,
    /// Its send queue
    pub sq: &'a E::Sq,
    /// Its own receive queue
    pub rq: Option<&'a E::Rq>,
    /// The SRQ from which it receives
    pub srq: Option<SharedRq<'a, E>>,
    /// Completions of sends
    pub send_cq: &'a E::Cq,
    /// Completions of receives
    pub recv_cq: &'a E::Cq,
    /// Most SGEs of a receive WQE
    pub max_recv_sge: usize,
    /// Every send makes a completion
    pub sq_sig_all: bool,
    /// Index in the send queue of the first request that is not done
    pub first_send: u32,
}

impl<E: Env> Nic<E> {
    /// What who takes over the work of a QP must know of it. `NotFound`: there is none.
    pub fn handover(&self, qpn: Qpn) -> Result<QpHandover<'_, E>, NicError> {
        let attr = self.query_qp(qpn)?;
        let qp = self.qps.get(qpn).ok_or(NicError::NotFound)?;
        let (rq, srq) = match &qp.rq {
            RecvSource::Own(rq) => (Some(rq), None),
            RecvSource::Shared(id) => (None, self.srq_ring(*id).map(|ring| SharedRq { id: *id, ring })),
            RecvSource::Xrc(_) => (None, None),
        };
        Ok(QpHandover {
            owner: EventOwner { pd: qp.pd, cookie: qp.cookie },
            attr,
            sq: &qp.sq,
            rq,
            srq,
            send_cq: &qp.send_cq,
            recv_cq: &qp.recv_cq,
            max_recv_sge: qp.resp.max_sge(),
            sq_sig_all: qp.flags.sig_all,
            first_send: qp.req.una,
        })
    }

    /// The program's requests wait until it is settled what does the QP's work: [`Nic::resume_qp`], or a
    /// plain request from its peer, reports that it goes on as it is. `Invalid`: engines are not for it, or
    /// something of it is under way.
    pub fn hold_qp(&mut self, qpn: Qpn) -> Result<(), NicError> {
        let suits = self.suits_engines(qpn);
        let qp = self.qps.get_mut(qpn).ok_or(NicError::NotFound)?;
        if !qp.has_nothing_under_way() || !suits {
            return Err(NicError::Invalid);
        }
        qp.flags.held = true;
        Ok(())
    }

    /// Whether the QP is held, and no engine has begun.
    pub fn is_held(&self, qpn: Qpn) -> bool {
        self.qps.get(qpn).is_some_and(|qp| qp.flags.held && qp.engine.is_none())
    }

    /// Whether the QP is of such a kind that it may have an engine: RC or UC, without an SRQ that matches
    /// tags or is of another protection domain.
    fn suits_engines(&self, qpn: Qpn) -> bool {
        let suits = |qp: &Qp<E>| match qp.rq {
            RecvSource::Own(_) => true,
            RecvSource::Shared(id) => {
                let srq = self.shared.srqs.get(id.0 as usize);
                srq.is_some_and(|srq| srq.pd == qp.pd && srq.tags.is_none())
            }
            RecvSource::Xrc(_) => false,
        };
        self.qps.get(qpn).is_some_and(|qp| matches!(qp.qp_type, QpType::Rc | QpType::Uc) && suits(qp))
    }

    /// Whether the work of a QP that does it itself may pass to an engine while it runs: it is in RTS, and
    /// its connection has carried nothing that engines do not.
    pub fn may_quiesce(&self, qpn: Qpn) -> bool {
        self.qps.get(qpn).is_some_and(|qp| qp.runs_plain() && qp.quiesce != Quiesce::Never)
    }

    /// No request of a QP that runs begins from now on. False: it may not quiesce.
    pub fn quiesce_qp(&mut self, qpn: Qpn) -> bool {
        let may = self.may_quiesce(qpn);
        if let Some(qp) = self.qps.get_mut(qpn).filter(|_| may) {
            qp.quiesce = Quiesce::Asked;
        }
        may
    }

    /// Whether all requests of the QP that began are done.
    pub fn has_nothing_under_way(&self, qpn: Qpn) -> bool {
        self.qps.get(qpn).is_some_and(Qp::has_nothing_under_way)
    }

    /// As [`Nic::hold_qp`], of a QP that was quiesced. False: something of it is under way, or engines do not
    /// carry what is posted.
    pub fn hold_quiesced(&mut self, qpn: Qpn) -> bool {
        let ready = |qp: &Qp<E>| qp.quiesce == Quiesce::Asked && qp.runs_plain() && qp.has_portable_posts();
        self.qps.get(qpn).is_some_and(ready) && self.hold_qp(qpn).is_ok()
    }

    /// The card's own transport does the QP's work from now on: what waited begins. Not if it has an engine
    /// that is not quiesced.
    pub fn resume_qp(&mut self, env: &mut E, qpn: Qpn, now: Nanos) {
        if let Some(mut cx) = self.context(env, qpn, now) {
            cx.resume();
        }
    }

    /// Whether something is posted to the QP that did not begin.
    pub fn has_posts(&self, qpn: Qpn) -> bool {
        let next = |qp: &Qp<E>| qp.engine.as_ref().map_or(qp.req.next, Engine::next_send);
        self.qps.get(qpn).is_some_and(|qp| next(qp) != qp.sq.posted())
    }

    /// The QP's engine, if it has one.
    #[inline]
    pub fn engine(&self, qpn: Qpn) -> Option<&E::Engine> {
        self.qps.get(qpn)?.engine.as_ref()
    }

    /// What the engines of this card's QPs share.
    #[inline]
    pub fn engines(&self) -> &<E::Engine as Engine<E>>::Shared {
        &self.shared.engines
    }

    /// The same, for what changes neither its deadline nor its state.
    pub fn engine_mut(&mut self, qpn: Qpn) -> Option<&mut E::Engine> {
        self.qps.get_mut(qpn)?.engine.as_mut()
    }

    /// Calls the QP's engine, if it has one, with the card's context, and sees to what follows from that.
    pub fn with_engine<R>(
        &mut self,
        env: &mut E,
        qpn: Qpn,
        now: Nanos,
        call: impl FnOnce(&mut E::Engine, &mut EngineCtx<'_, E>) -> R,
    ) -> Option<R> {
        let mut cx = self.context(env, qpn, now)?;
        let done = cx.with_engine(call)?;
        cx.engine_ready();
        cx.sh.open_path(cx.qp.path);
        Some(done)
    }

    /// As [`Nic::with_engine`], for an engine that sends by itself and needs no turn.
    #[inline]
    pub fn call_engine<R>(
        &mut self,
        env: &mut E,
        qpn: Qpn,
        now: Nanos,
        call: impl FnOnce(&mut E::Engine, &mut EngineCtx<'_, E>) -> R,
    ) -> Option<R> {
        self.context(env, qpn, now)?.with_engine(call)
    }

    /// From now on the QP, which is held and in RTR or RTS, has the engine that `make` gives. `Invalid`: it
    /// is not so; else `make`'s error.
    pub fn start_engine(
        &mut self,
        env: &mut E,
        qpn: Qpn,
        now: Nanos,
        make: impl FnOnce(&EngineAttr, &mut EngineCtx<'_, E>) -> Result<E::Engine, NicError>,
    ) -> Result<(), NicError> {
        let mut cx = self.context(env, qpn, now).ok_or(NicError::NotFound)?;
        let qp = &*cx.qp;
        let waits = qp.flags.held && qp.engine.is_none();
        if !waits || !matches!(qp.state, QpState::Rtr | QpState::Rts) {
            return Err(NicError::Invalid);
        }
        let terms = EngineAttr::of(&qp.attr);
        let engine = cx.with_engine_ctx(|ctx| make(&terms, ctx))?;
        cx.leave_queues();
        cx.qp.engine = Some(engine);
        cx.run_engine(Call::Doorbell);
        Ok(())
    }

    /// The QP, which has an engine, is held again: `end` takes the engine, and gives where the QP goes on.
    pub fn take_engine(
        &mut self,
        env: &mut E,
        qpn: Qpn,
        now: Nanos,
        end: impl FnOnce(E::Engine, &mut EngineCtx<'_, E>) -> Detached,
    ) {
        if let Some(mut cx) = self.context(env, qpn, now)
            && let Some(engine) = cx.qp.engine.take()
        {
            let Detached { next_send, windows } = cx.with_engine_ctx(|ctx| end(engine, ctx));
            cx.qp.req.start_at(next_send);
            cx.qp.flags.windows |= windows;
        }
    }
}
