//! The data path of a card with room for few QP contexts: as `data`, but that a QP is used when its context
//! is there.
//!
//! Whether it is, and what waits until when, is `contexts`' to decide; here is what is done then. A card with
//! room for all of them never gets here.

use super::contexts::{ContextAccess, ContextAsker, Contexts, NextStep, Receiver};
use super::{Nic, QpShared};
use crate::engine::Engine;
use crate::env::{Env, SendQueue};
use crate::transport::Qp;
use crate::types::{FrameMeta, Nanos, Qpn};
use crate::wire::{Packet, Transport};

impl<E: Env> Nic<E> {
    /// Whether the card is QPC-limited, so that frames go to [`Nic::offer_frame`].
    pub fn is_qpc_limited(&self) -> bool {
        self.shared.contexts.is_some()
    }

    /// Whether [`Nic::offer_frame`] takes a frame now; if not, it will once time has gone on.
    pub fn takes_frames(&self) -> bool {
        self.shared.contexts.as_ref().is_none_or(|contexts| contexts.takes_frames())
    }

    /// When the next context comes that something waits for, or the WQEs of a doorbell.
    pub fn next_context(&self) -> Option<Nanos> {
        self.shared.contexts.as_ref()?.next_event()
    }

    /// Whether one comes before `at`, so that the card has work then.
    pub fn context_comes_before(&self, at: Nanos) -> bool {
        self.shared.contexts.as_ref().is_some_and(|contexts| contexts.comes_before(at))
    }

    /// As [`Nic::handle_frame`], for any card: a request to a QP whose context is not there is kept until it
    /// is. To be called while [`Nic::takes_frames`]: a frame given all the same passes those that wait.
    pub fn offer_frame(&mut self, env: &mut E, now: Nanos, meta: &FrameMeta, frame: &[u8]) {
        let Some(contexts) = &mut self.shared.contexts else {
            return self.handle_frame(env, now, meta, frame);
        };
        let asked = asked_of(frame).and_then(|qpn| self.qps.get(qpn));
        let access = asked.map(|qp| contexts.frame(&asker(qp), now, Receiver::Card, meta, [frame, &[]]));
        if access == Some(ContextAccess::Waits) {
            self.serve_due(env, now);
        } else {
            self.handle_frame(env, now, meta, frame);
        }
    }

    /// A request to the engine of `qpn`, in two pieces. True: the card is QPC-limited, and the request waits
    /// for the QP's context; then [`Engine::receive`] gets it. False: the caller handles it now. To be called
    /// while [`Nic::takes_frames`], as [`Nic::offer_frame`].
    pub fn await_context(
        &mut self,
        env: &mut E,
        now: Nanos,
        qpn: Qpn,
        meta: &FrameMeta,
        frame: [&[u8]; 2],
    ) -> bool {
        let Some(contexts) = &mut self.shared.contexts else { return false };
        let Some(qp) = self.qps.get(qpn).filter(|qp| qp.engine.is_some()) else { return false };
        let access = contexts.frame(&asker(qp), now, Receiver::Engine, meta, frame);
        if access == ContextAccess::Waits {
            self.serve_due(env, now);
        }
        access == ContextAccess::Waits
    }

    /// A doorbell of a QPC-limited card.
    #[cold]
    pub(super) fn ring_qpc_limited(&mut self, env: &mut E, qpn: Qpn, now: Nanos) {
        let access = match (&mut self.shared.contexts, self.qps.get(qpn)) {
            (Some(contexts), Some(qp)) => contexts.doorbell(&asker(qp), now),
            _ => ContextAccess::Available,
        };
        if access == ContextAccess::Available
            && let Some(mut cx) = self.context(env, qpn, now)
        {
            cx.doorbell();
        }
        self.serve_due(env, now);
    }

    /// [`Nic::poll_transmit`], but for the ACKs. True: the port is full.
    #[cold]
    pub(super) fn transmit_qpc_limited(&mut self, env: &mut E, now: Nanos) -> bool {
        let full = loop {
            self.serve_due(env, now);
            if self.ask_for_turns(env, now) {
                break true;
            }
            /* who waits for a window may be next, too */
            if !env.can_send() {
                break true;
            }
            let next = self.limited_contexts().and_then(Contexts::poll_turn);
            let Some(qpn) = next.or_else(|| self.wake_waiter()) else { break false };
            if self.take_turn(env, qpn, now) {
                break true;
            }
        };
        let QpShared { contexts: Some(contexts), sched, stats, .. } = &mut self.shared else { return full };
        contexts.arm(sched);
        contexts.count(stats);
        full
    }

    fn limited_contexts(&mut self) -> Option<&mut Contexts> {
        self.shared.contexts.as_deref_mut()
    }

    /// Doorbells and frames whose time has come.
    fn serve_due(&mut self, env: &mut E, now: Nanos) {
        if let Some(contexts) = self.limited_contexts() {
            contexts.advance(now);
            while let Some((qpn, to)) = contexts.poll_move() {
                env.move_context(qpn, to);
            }
        }
        while let Some(due) = self.limited_contexts().and_then(Contexts::poll_due) {
            match due {
                NextStep::Doorbell(qpn) => {
                    if let Some(mut cx) = self.context(env, qpn, now) {
                        cx.doorbell();
                    }
                }
                NextStep::Frame(qpn, to, meta, bytes) => {
                    match to {
                        Receiver::Card => self.handle_frame(env, now, &meta, &bytes),
                        Receiver::Engine => self.receive_by_engine(env, now, qpn, &meta, &bytes),
                    }
                    if let Some(contexts) = self.limited_contexts() {
                        contexts.give_back(bytes);
                    }
                }
            }
        }
    }

    /// Without an engine by now the frame is lost, as any to a QP that has no use for it.
    fn receive_by_engine(&mut self, env: &mut E, now: Nanos, qpn: Qpn, meta: &FrameMeta, frame: &[u8]) {
        self.with_engine(env, qpn, now, |engine, ctx| engine.receive(ctx, meta, frame));
    }

    /// Whoever is ready asks for its context, or takes its turn where that is available. True: the port is
    /// full.
    fn ask_for_turns(&mut self, env: &mut E, now: Nanos) -> bool {
        while let Some(qpn) = self.shared.sched.pop_ready() {
            let Some(of) = self.qps.get(qpn).map(asker) else { continue };
            let access = self.limited_contexts().map(|contexts| contexts.turn(&of, now));
            if access != Some(ContextAccess::Waits) && self.take_turn(env, qpn, now) {
                return true;
            }
        }
        false
    }

    /// A QP's turn to send. True: the port is full.
    fn take_turn(&mut self, env: &mut E, qpn: Qpn, now: Nanos) -> bool {
        let Some(mut cx) = self.context(env, qpn, now) else { return false };
        let step = cx.transmit();
        cx.end_turn(step)
    }
}

/// What `contexts` goes by.
fn asker<E: Env>(qp: &Qp<E>) -> ContextAsker {
    let next = qp.engine.as_ref().map_or(qp.req.next, Engine::next_send);
    ContextAsker { qpn: qp.qpn, timer: qp.timer, state: qp.state, unsent: next != qp.sq.posted() }
}

/// The QP of which a frame asks something.
fn asked_of(frame: &[u8]) -> Option<Qpn> {
    let packet = Packet::parse(frame).ok()?;
    let op = packet.op();
    let of_qp = !matches!(op.transport, Transport::Own | Transport::Cnp);
    (of_qp && op.kind.is_request()).then(|| packet.bth().dest_qpn())
}
