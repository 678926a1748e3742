//! Calls of programs that may be about a stateless end, of which the card knows nothing, or about memory
//! of which stateful cards have rules.

use starverbs_core::qp::{Owner, QpAttr, QpAttrMask};
use starverbs_core::{Nanos, Nic, NicError, PdId, QpState, Qpn, SrqId};
use starverbs_rings::CardRq;
use starverbs_star::card::owes;

use super::StarHost;
use crate::clock;
use crate::device::soft::back_pressure::Who;
use crate::device::soft::env::HostEnv;
use crate::device::soft::{Shard, Soft};
use crate::device::thread::pollfd;

/// Longest wait for stateful cards to learn or forget a key. One that does not answer for so long is gone;
/// this card lets nothing of a forgotten one through anyway.
const PATIENCE: Nanos = 1_000_000_000;
/// Longest sleep between two looks, milliseconds.
const LOOK: i32 = 1;

impl Shard {
    /// The doorbell of `qpn`.
    #[inline]
    pub(crate) fn ring(&mut self, qpn: Qpn, now: Nanos) {
        if self.star.is_none() || !self.ring_stateless(qpn, now) {
            self.nic.handle_doorbell(&mut self.env, qpn, now);
        }
    }

    #[inline]
    fn ring_stateless(&mut self, qpn: Qpn, now: Nanos) -> bool {
        self.with_star(now, |star, turn| star.ends.endpoints.ring(turn, qpn)).unwrap_or(false)
    }

    /// `ibv_modify_qp`
    pub(crate) fn modify_qp(
        &mut self,
        qpn: Qpn,
        attr: &QpAttr,
        mask: QpAttrMask,
        now: Nanos,
    ) -> std::result::Result<(), NicError> {
        let done = self.with_star(now, |star, turn| star.ends.endpoints.modify(turn, qpn, attr, mask));
        done.flatten().unwrap_or_else(|| self.nic.modify_qp(&mut self.env, qpn, attr, mask, now))
    }

    /// `ibv_query_qp`
    pub(crate) fn query_qp(&self, qpn: Qpn) -> std::result::Result<QpAttr, NicError> {
        let stateless = self.star.as_ref().and_then(|star| star.ends.endpoints.query(qpn));
        stateless.map_or_else(|| self.nic.query_qp(qpn), Ok)
    }

    /// State of a QP.
    pub(crate) fn qp_state(&self, qpn: Qpn) -> Option<QpState> {
        self.query_qp(qpn).ok().map(|attr| attr.state)
    }

    /// `ibv_destroy_qp`
    pub(crate) fn destroy_qp(&mut self, qpn: Qpn, now: Nanos) -> std::result::Result<(), NicError> {
        let Shard { env, shared_qps, .. } = self;
        shared_qps.ends(env, qpn);
        self.forget_star(qpn);
        self.local.forget(&mut self.env.channels, qpn);
        if self.with_star(now, |star, turn| star.ends.endpoints.destroy(turn, qpn)) == Some(true) {
            return Ok(());
        }
        self.nic.destroy_qp(&mut self.env, qpn)?;
        self.forget_replies(qpn, now);
        Ok(())
    }

    /// Whose a QP is.
    pub(crate) fn qp_owner(&self, qpn: Qpn) -> Option<Owner> {
        let stateless = || self.star.as_ref().and_then(|star| star.ends.endpoints.owner(qpn));
        self.nic.qp_owner(qpn).or_else(stateless)
    }

    /// Numbers of all QPs, in no order.
    pub(crate) fn qpns(&self) -> impl Iterator<Item = Qpn> + '_ {
        self.nic.qpns().chain(self.star.iter().flat_map(|star| star.ends.endpoints.qpns()))
    }

    /// Stateful cards get what keys have come to open, or open no longer. A key: they may still use what
    /// it opened, and [`Soft::await_revoked`] comes next.
    pub(crate) fn follow_memory(&mut self, now: Nanos) -> Option<u32> {
        self.with_star(now, |star, turn| star.ends.endpoints.follow_memory(turn)).flatten()
    }

    /// Whether the card has ends of StaR connections, or had.
    pub(crate) fn has_star(&self) -> bool {
        self.star.is_some()
    }

    /// Whether all stateful cards know the memory of a protection domain.
    pub(crate) fn is_known(&self, pd: Option<PdId>) -> bool {
        let known = |star: &StarHost| pd.is_none_or(|pd| star.ends.endpoints.is_known(pd));
        self.star.as_deref().is_none_or(known)
    }

    /// Has a shared receive queue take from another ring; gives the one before.
    pub(crate) fn replace_srq_ring(
        &mut self,
        srq: SrqId,
        ring: CardRq,
        now: Nanos,
    ) -> std::result::Result<CardRq, NicError> {
        let before = self.nic.replace_srq_ring(srq, ring)?;
        self.with_star(now, |star, turn| star.ends.endpoints.replace_srq_ring(turn, srq));
        Ok(before)
    }

    /// Receives were posted to a shared queue in which somebody had looked in vain.
    #[cold]
    pub(crate) fn ring_srq(&mut self, srq: SrqId, now: Nanos) {
        self.with_star(now, |star, turn| star.ends.endpoints.ring_srq(turn, srq));
    }
}

impl Soft {
    /// Waits until no stateful card reaches for what a key opened that is closed, and all know the memory of
    /// a protection domain: StaR's part of [`Soft::await_revoked`].
    #[cold]
    pub(crate) fn await_memory(&self, closed: Option<u32>, opened: Option<PdId>) {
        self.await_answers(|star, _, _| {
            let endpoints = &star.ends.endpoints;
            closed.is_none_or(|key| endpoints.is_revoked(key))
                && opened.is_none_or(|pd| endpoints.is_known(pd))
        });
    }

    /// A QP is to be destroyed: waits until its stateless peer has all completions that this card has for it,
    /// and knows what else is done.
    #[cold]
    pub(crate) fn await_taken(&self, qpn: Qpn) {
        self.with(|shard, now| shard.with_star(now, |_, turn| turn.report(qpn)));
        self.await_answers(|_, nic, now| !owes(nic, qpn, now));
    }

    /// Runs this card until its peers have answered, or are silent for too long.
    #[cold]
    fn await_answers(&self, answered: impl Fn(&StarHost, &Nic<HostEnv>, Nanos) -> bool) {
        let until = clock::now().saturating_add(PATIENCE);
        loop {
            let (done, mut fds) = self.with(|shard, now| {
                shard.run_star(now, Who::Thread);
                shard.run_timers(now);
                let Some(star) = &shard.star else { return (true, Vec::new()) };
                (answered(star, &shard.nic, now), star.fds().map(pollfd).collect())
            });
            if done || clock::now() >= until {
                return;
            }
            // SAFETY: as many pollfds as are said, alive across the call.
            unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, LOOK) };
        }
    }
}
