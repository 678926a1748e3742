//! Calls of programs that may be about a stateless end, of which the card knows nothing, or about memory
//! of which stateful cards have rules.

use starverbs_core::coalesce::Backlog;
use starverbs_core::qp::{EventOwner, QpAttr, QpAttrMask};
use starverbs_core::{Nanos, Nic, NicError, PdId, QpState, Qpn, SrqId};
use starverbs_star::card::owes;
use starverbs_star::control::Preference;

use super::host::{NicEnv, OpenStar};
use super::{StarCard, StarHost};

/// Longest wait for stateful cards to learn or forget a key, and for stateless peers to take their
/// completions, ns. A peer that does not answer for so long is gone; this card lets nothing of a forgotten
/// key through anyway.
pub const PATIENCE: Nanos = 1_000_000_000;

impl<E: StarCard> StarHost<E> {
    /// The doorbell of `qpn`. False: it is no stateless end's.
    #[inline]
    pub fn ring(&mut self, (nic, env): NicEnv<'_, E>, qpn: Qpn, now: Nanos) -> bool {
        self.with((nic, env), now, |star, turn| star.ends.endpoints.ring(turn, qpn)).unwrap_or(false)
    }

    /// What a doorbell of a QP of which the card knows nothing may wait for.
    #[inline]
    pub fn backlog(&self, qpn: Qpn) -> Backlog {
        self.0.as_ref().map_or(Backlog::Due, |star| star.ends.endpoints.backlog(qpn))
    }

    /// Whether `qpn` is a stateless end, and all of them have so much without an answer that small messages
    /// wait.
    #[inline]
    pub fn has_many_unanswered(&self, qpn: Qpn) -> bool {
        self.0.as_ref().is_some_and(|star| star.ends.endpoints.has_many_unanswered(qpn))
    }

    /// `ibv_modify_qp`; `None`: it is no stateless end.
    pub fn modify_qp(
        &mut self,
        (nic, env): NicEnv<'_, E>,
        qpn: Qpn,
        attr: &QpAttr,
        mask: QpAttrMask,
        now: Nanos,
    ) -> Option<Result<(), NicError>> {
        self.with((nic, env), now, |star, turn| star.ends.endpoints.modify(turn, qpn, attr, mask)).flatten()
    }

    /// The program has moved a QP, which has a preference, to a state. In RTR nothing begins yet.
    pub fn move_qp(&mut self, (nic, env): NicEnv<'_, E>, qpn: Qpn, state: QpState, now: Nanos) {
        if state != QpState::Rtr {
            let none = Preference::Off;
            self.with((nic, env), now, |star, turn| star.ends.on_qp_state(turn, qpn, none, state));
        }
    }

    /// The roles of the ends of a QP in RTR or RTS, which may be held, are to be settled; of another, and one
    /// that is plain without asking, what waits begins.
    pub fn settle_roles(&mut self, (nic, env): NicEnv<'_, E>, qpn: Qpn, preference: Preference, now: Nanos) {
        let runs = matches!(nic.qp_state(qpn), Some(QpState::Rtr | QpState::Rts));
        let asked = self.with((nic, env), now, |star, turn| {
            if runs {
                star.ends.on_qp_state(turn, qpn, preference, QpState::Rtr);
            }
            star.ends.roles.incarnation(qpn).is_some()
        });
        if asked != Some(true) {
            nic.resume_qp(env, qpn, now);
        }
    }

    /// The program of a connected QP has this preference from now on. False: its peer has no StaR, or it
    /// takes from an SRQ.
    pub fn change_preference(
        &mut self,
        (nic, env): NicEnv<'_, E>,
        qpn: Qpn,
        preference: Preference,
        now: Nanos,
    ) -> bool {
        let asked = self.with((nic, env), now, |star, turn| star.ends.set_preference(turn, qpn, preference));
        asked == Some(true)
    }

    /// `ibv_query_qp`; `None`: it is no stateless end.
    pub fn query_qp(&self, qpn: Qpn) -> Option<QpAttr> {
        self.0.as_ref()?.ends.endpoints.query(qpn)
    }

    /// A QP is gone: what was settled for it is forgotten.
    pub fn forget(&mut self, qpn: Qpn) {
        if let Some(star) = &mut self.0 {
            star.ends.roles.forget(qpn);
        }
    }

    /// `ibv_destroy_qp`; false: it is no stateless end.
    pub fn destroy_qp(&mut self, (nic, env): NicEnv<'_, E>, qpn: Qpn, now: Nanos) -> bool {
        self.with((nic, env), now, |star, turn| star.ends.endpoints.destroy(turn, qpn)) == Some(true)
    }

    /// Whose a stateless end is.
    pub fn owner(&self, qpn: Qpn) -> Option<EventOwner> {
        self.0.as_ref()?.ends.endpoints.owner(qpn)
    }

    /// Numbers of the stateless ends, in no order.
    pub fn qpns(&self) -> impl Iterator<Item = Qpn> + '_ {
        self.0.iter().flat_map(|star| star.ends.endpoints.qpns())
    }

    /// Opens a key; whoever follows the table hears of it. `Exhausted`: there is no memory for that; it is
    /// closed again, by `undo`.
    pub fn open_key(
        &mut self,
        (nic, env): NicEnv<'_, E>,
        now: Nanos,
        open: impl FnOnce(&mut Nic<E>) -> Result<u32, NicError>,
        undo: impl FnOnce(&mut Nic<E>, u32) -> Result<(), NicError>,
    ) -> Result<u32, NicError> {
        let key = open(nic)?;
        self.follow_memory((nic, env), now);
        if self.is_open() && nic.memory().rule(key).is_none() {
            /* nobody heard of the key, so nobody need hear that it is closed */
            undo(nic, key)?;
            return Err(NicError::Exhausted);
        }
        Ok(key)
    }

    /// All these QPs are about to be destroyed: none of them sends rules for the others.
    pub fn prepare_to_end(&mut self, qpns: impl Iterator<Item = Qpn>) {
        if let Some(star) = self.0.as_deref_mut() {
            qpns.for_each(|qpn| star.ends.endpoints.prepare_to_end(qpn));
        }
    }

    /// Stateful cards get what keys have come to open, or open no longer. A key: they may still use what
    /// it opened, and [`is_revoked`](StarHost::is_revoked) says when they no longer do.
    pub fn follow_memory(&mut self, (nic, env): NicEnv<'_, E>, now: Nanos) -> Option<u32> {
        self.with((nic, env), now, |star, turn| star.ends.endpoints.follow_memory(turn)).flatten()
    }

    /// Whether all stateful cards know the memory of a protection domain.
    pub fn is_known(&self, pd: Option<PdId>) -> bool {
        let known = |star: &OpenStar<E>| pd.is_none_or(|pd| star.ends.endpoints.is_known(pd));
        self.0.as_deref().is_none_or(known)
    }

    /// Whether no stateful card reaches for what a key opened.
    pub fn is_revoked(&self, key: Option<u32>) -> bool {
        let revoked = |star: &OpenStar<E>| key.is_none_or(|key| star.ends.endpoints.is_revoked(key));
        self.0.as_deref().is_none_or(revoked)
    }

    /// Has a shared receive queue take from another ring; gives the one before.
    pub fn replace_srq_ring(
        &mut self,
        (nic, env): NicEnv<'_, E>,
        srq: SrqId,
        ring: E::Rq,
        now: Nanos,
    ) -> Result<E::Rq, NicError> {
        let before = nic.replace_srq_ring(srq, ring)?;
        self.with((nic, env), now, |star, turn| star.ends.endpoints.replace_srq_ring(turn, srq));
        Ok(before)
    }

    /// Receives were posted to a shared queue in which somebody had looked in vain.
    #[cold]
    pub fn ring_srq(&mut self, (nic, env): NicEnv<'_, E>, srq: SrqId, now: Nanos) {
        self.with((nic, env), now, |star, turn| star.ends.endpoints.ring_srq(turn, srq));
    }

    /// The stateless peer of a QP is told what this card has done for it.
    pub fn report(&mut self, (nic, env): NicEnv<'_, E>, qpn: Qpn, now: Nanos) {
        self.with((nic, env), now, |_, turn| turn.report(qpn));
    }

    /// Whether a QP that is to be destroyed has completions for a stateless peer that have no answer.
    pub fn owes(nic: &Nic<E>, qpn: Qpn, now: Nanos) -> bool {
        owes(nic, qpn, now)
    }
}
