//! Calls of programs that may be about a stateless end, of which the card knows nothing, or about memory
//! of which stateful cards have rules.

use starverbs_core::coalesce::Backlog;
use starverbs_core::qp::{EventOwner, QpAttr, QpAttrMask};
use starverbs_core::{Nanos, Nic, NicError, PdId, QpState, Qpn, SrqId};
use starverbs_rings::CardRq;
use starverbs_star::card::owes;
use starverbs_star::control::Preference;

use super::{OpenStar, StarHost};
use crate::clock;
use crate::device::soft::Soft;
use crate::device::soft::back_pressure::Who;
use crate::device::soft::env::{HostEnv, NicEnv};
use crate::device::thread::pollfd;

/// Longest wait for stateful cards to learn or forget a key. One that does not answer for so long is gone;
/// this card lets nothing of a forgotten one through anyway.
const PATIENCE: Nanos = 1_000_000_000;
/// Longest sleep between two looks, milliseconds.
const LOOK: i32 = 1;

impl StarHost {
    /// The doorbell of `qpn`. False: it is no stateless end's.
    #[inline]
    pub(crate) fn ring(&mut self, (nic, env): NicEnv<'_>, qpn: Qpn, now: Nanos) -> bool {
        self.with((nic, env), now, |star, turn| star.ends.endpoints.ring(turn, qpn)).unwrap_or(false)
    }

    /// What a doorbell of a QP of which the card knows nothing may wait for.
    #[inline]
    pub(crate) fn backlog(&self, qpn: Qpn) -> Backlog {
        self.0.as_ref().map_or(Backlog::Due, |star| star.ends.endpoints.backlog(qpn))
    }

    /// `ibv_modify_qp`; `None`: it is no stateless end.
    pub(crate) fn modify_qp(
        &mut self,
        (nic, env): NicEnv<'_>,
        qpn: Qpn,
        attr: &QpAttr,
        mask: QpAttrMask,
        now: Nanos,
    ) -> Option<Result<(), NicError>> {
        self.with((nic, env), now, |star, turn| star.ends.endpoints.modify(turn, qpn, attr, mask)).flatten()
    }

    /// The program has moved a QP, which has a preference, to a state. In RTR nothing begins yet.
    pub(crate) fn move_qp(&mut self, (nic, env): NicEnv<'_>, qpn: Qpn, state: QpState, now: Nanos) {
        if state != QpState::Rtr {
            let none = Preference::Off;
            self.with((nic, env), now, |star, turn| star.ends.on_qp_state(turn, qpn, none, state));
        }
    }

    /// The roles of the ends of a QP in RTR or RTS, which may be held, are to be settled; of another, and one
    /// that is plain without asking, what waits begins.
    pub(crate) fn settle_roles(
        &mut self,
        (nic, env): NicEnv<'_>,
        qpn: Qpn,
        preference: Preference,
        now: Nanos,
    ) {
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
    pub(crate) fn change_preference(
        &mut self,
        (nic, env): NicEnv<'_>,
        qpn: Qpn,
        preference: Preference,
        now: Nanos,
    ) -> bool {
        let asked = self.with((nic, env), now, |star, turn| star.ends.set_preference(turn, qpn, preference));
        asked == Some(true)
    }

    /// `ibv_query_qp`; `None`: it is no stateless end.
    pub(crate) fn query_qp(&self, qpn: Qpn) -> Option<QpAttr> {
        self.0.as_ref()?.ends.endpoints.query(qpn)
    }

    /// A QP is gone: what was settled for it is forgotten.
    pub(crate) fn forget(&mut self, qpn: Qpn) {
        if let Some(star) = &mut self.0 {
            star.ends.roles.forget(qpn);
        }
    }

    /// `ibv_destroy_qp`; false: it is no stateless end.
    pub(crate) fn destroy_qp(&mut self, (nic, env): NicEnv<'_>, qpn: Qpn, now: Nanos) -> bool {
        self.with((nic, env), now, |star, turn| star.ends.endpoints.destroy(turn, qpn)) == Some(true)
    }

    /// Whose a stateless end is.
    pub(crate) fn owner(&self, qpn: Qpn) -> Option<EventOwner> {
        self.0.as_ref()?.ends.endpoints.owner(qpn)
    }

    /// Numbers of the stateless ends, in no order.
    pub(crate) fn qpns(&self) -> impl Iterator<Item = Qpn> + '_ {
        self.0.iter().flat_map(|star| star.ends.endpoints.qpns())
    }

    /// Opens a key; whoever follows the table hears of it. `Exhausted`: there is no memory for that; it is
    /// closed again, by `undo`.
    pub(crate) fn open_key(
        &mut self,
        (nic, env): NicEnv<'_>,
        now: Nanos,
        open: impl FnOnce(&mut Nic<HostEnv>) -> Result<u32, NicError>,
        undo: impl FnOnce(&mut Nic<HostEnv>, u32) -> Result<(), NicError>,
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

    /// Stateful cards get what keys have come to open, or open no longer. A key: they may still use what
    /// it opened, and [`Soft::await_revoked`] comes next.
    pub(crate) fn follow_memory(&mut self, (nic, env): NicEnv<'_>, now: Nanos) -> Option<u32> {
        self.with((nic, env), now, |star, turn| star.ends.endpoints.follow_memory(turn)).flatten()
    }

    /// Whether all stateful cards know the memory of a protection domain.
    pub(crate) fn is_known(&self, pd: Option<PdId>) -> bool {
        let known = |star: &OpenStar| pd.is_none_or(|pd| star.ends.endpoints.is_known(pd));
        self.0.as_deref().is_none_or(known)
    }

    /// Whether no stateful card reaches for what a key opened.
    fn is_revoked(&self, key: Option<u32>) -> bool {
        let revoked = |star: &OpenStar| key.is_none_or(|key| star.ends.endpoints.is_revoked(key));
        self.0.as_deref().is_none_or(revoked)
    }

    /// Has a shared receive queue take from another ring; gives the one before.
    pub(crate) fn replace_srq_ring(
        &mut self,
        (nic, env): NicEnv<'_>,
        srq: SrqId,
        ring: CardRq,
        now: Nanos,
    ) -> Result<CardRq, NicError> {
        let before = nic.replace_srq_ring(srq, ring)?;
        self.with((nic, env), now, |star, turn| star.ends.endpoints.replace_srq_ring(turn, srq));
        Ok(before)
    }

    /// Receives were posted to a shared queue in which somebody had looked in vain.
    #[cold]
    pub(crate) fn ring_srq(&mut self, (nic, env): NicEnv<'_>, srq: SrqId, now: Nanos) {
        self.with((nic, env), now, |star, turn| star.ends.endpoints.ring_srq(turn, srq));
    }

    /// The stateless peer of a QP is told what this card has done for it.
    fn report(&mut self, (nic, env): NicEnv<'_>, qpn: Qpn, now: Nanos) {
        self.with((nic, env), now, |_, turn| turn.report(qpn));
    }
}

impl Soft {
    /// Waits until no stateful card reaches for what a key opened that is closed, and all know the memory of
    /// a protection domain: StaR's part of [`Soft::await_revoked`].
    #[cold]
    pub(crate) fn await_memory(&self, closed: Option<u32>, opened: Option<PdId>) {
        self.await_answers(|star, _, _| star.is_revoked(closed) && star.is_known(opened));
    }

    /// A QP is to be destroyed: waits until its stateless peer has all completions that this card has for it,
    /// and knows what else is done.
    #[cold]
    pub(crate) fn await_taken(&self, qpn: Qpn) {
        self.with(|shard, now| shard.star.report((&mut shard.nic, &mut shard.env), qpn, now));
        self.await_answers(|_, nic, now| !owes(nic, qpn, now));
    }

    /// Runs this card until its peers have answered, or are silent for too long.
    #[cold]
    fn await_answers(&self, answered: impl Fn(&StarHost, &Nic<HostEnv>, Nanos) -> bool) {
        let until = clock::now().saturating_add(PATIENCE);
        loop {
            let (done, mut fds) = self.with(|shard, now| {
                shard.star.run((&mut shard.nic, &mut shard.env), now, Who::Thread);
                shard.run_timers(now);
                let done = !shard.star.is_open() || answered(&shard.star, &shard.nic, now);
                (done, shard.star.fds().map(pollfd).collect::<Vec<_>>())
            });
            if done || clock::now() >= until {
                return;
            }
            // SAFETY: as many pollfds as are said, alive across the call.
            unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, LOOK) };
        }
    }
}
