//! The data path of a card with room for few QP contexts: as `data`, but that a QP is used when its context
//! is there.
//!
//! What waits, and until when, is `contexts`' to know; here is what is done then. A card with room for all of
//! them never gets here.

use super::contexts::{Contexts, Due};
use super::{Nic, Shared};
use crate::env::{Env, SendQueue};
use crate::transport::Qp;
use crate::types::{FrameMeta, Nanos, QpState, Qpn};
use crate::wire::{Packet, Transport};

impl<E: Env> Nic<E> {
    /// Whether the card is QPC-limited, so that frames go to [`Nic::offer_frame`].
    pub fn has_few_contexts(&self) -> bool {
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

    /// As [`Nic::handle_frame`], for any card: a request to a QP whose context is not there is kept until it
    /// is. To be called while [`Nic::takes_frames`]: a frame given all the same passes those that wait.
    pub fn offer_frame(&mut self, env: &mut E, now: Nanos, meta: &FrameMeta, frame: &[u8]) {
        let Some(contexts) = &mut self.shared.contexts else {
            return self.handle_frame(env, now, meta, frame);
        };
        let asked = asked_of(frame).and_then(|qpn| self.qps.get(qpn));
        let Some(qp) = asked.filter(|qp| takes_frames_in(qp.state)) else {
            return self.handle_frame(env, now, meta, frame);
        };
        if !contexts.frame(qp.qpn, qp.timer, now, meta, frame) {
            return self.handle_frame(env, now, meta, frame);
        }
        self.serve_due(env, now);
    }

    /// A doorbell of a QPC-limited card: its WQEs are fetched first, but for a QP that flushes them.
    #[cold]
    pub(super) fn ring_qpc_limited(&mut self, env: &mut E, qpn: Qpn, now: Nanos) {
        match (&mut self.shared.contexts, self.qps.get(qpn)) {
            (Some(contexts), Some(qp)) if sends(qp) => contexts.doorbell(qpn, qp.timer, now),
            _ => {
                if let Some(mut cx) = self.context(env, qpn, now) {
                    cx.doorbell();
                }
            }
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
        let Shared { contexts: Some(contexts), sched, stats, .. } = &mut self.shared else { return full };
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
        }
        while let Some(due) = self.limited_contexts().and_then(Contexts::poll_due) {
            match due {
                Due::Doorbell(qpn) => {
                    if let Some(mut cx) = self.context(env, qpn, now) {
                        cx.doorbell();
                    }
                }
                Due::Frame(_, meta, bytes) => {
                    self.handle_frame(env, now, &meta, &bytes);
                    if let Some(contexts) = self.limited_contexts() {
                        contexts.give_back(bytes);
                    }
                }
            }
        }
    }

    /// Whoever is ready asks for its context, if there is a WQE to send: what it owes otherwise goes with the
    /// context that the request brought. True: the port is full.
    fn ask_for_turns(&mut self, env: &mut E, now: Nanos) -> bool {
        while let Some(qpn) = self.shared.sched.pop_ready() {
            let Some(qp) = self.qps.get(qpn) else { continue };
            let (asks, timer) = (wants_context(qp), qp.timer);
            if asks && let Some(contexts) = self.limited_contexts() {
                contexts.turn(qpn, timer, now);
            } else if self.take_turn(env, qpn, now) {
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

/// Whether there is a WQE to send.
fn wants_context<E: Env>(qp: &Qp<E>) -> bool {
    sends(qp) && qp.req.next != qp.sq.posted()
}

fn sends<E: Env>(qp: &Qp<E>) -> bool {
    matches!(qp.state, QpState::Rts | QpState::Sqd)
}

/// Whether a QP in this state takes frames: those for others wait for no context, as what is wrong now is not
/// to be right then.
fn takes_frames_in(state: QpState) -> bool {
    !matches!(state, QpState::Reset | QpState::Init | QpState::Err)
}

/// The QP of which a frame asks something.
fn asked_of(frame: &[u8]) -> Option<Qpn> {
    let packet = Packet::parse(frame).ok()?;
    let op = packet.op();
    let of_qp = !matches!(op.transport, Transport::Own | Transport::Cnp);
    (of_qp && op.kind.is_request()).then(|| packet.bth().dest_qpn())
}
