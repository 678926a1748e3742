//! Calls of programs that may be about a stateless end, of which the card knows nothing, or about memory of
//! which stateful cards were told.

use starverbs_core::mr::MrAttr;
use starverbs_core::qp::{Owner, QpAttr, QpAttrMask};
use starverbs_core::{Nanos, Nic, NicError, PdId, QpState, Qpn, SrqId};
use starverbs_rings::CardRq;
use starverbs_star::card::owes;

use super::StarHost;
use crate::clock;
use crate::device::soft::env::HostEnv;
use crate::device::soft::receives::Who;
use crate::device::soft::{Shard, Soft};
use crate::device::thread::pollfd;
use crate::error::Result;
use crate::log::log;

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
        self.with_star(now, |star, turn| star.ends.library.ring(turn, qpn)).unwrap_or(false)
    }

    /// `ibv_modify_qp`
    pub(crate) fn modify_qp(
        &mut self,
        qpn: Qpn,
        attr: &QpAttr,
        mask: QpAttrMask,
        now: Nanos,
    ) -> std::result::Result<(), NicError> {
        let done = self.with_star(now, |star, turn| star.ends.library.modify(turn, qpn, attr, mask));
        done.flatten().unwrap_or_else(|| self.nic.modify_qp(&mut self.env, qpn, attr, mask, now))
    }

    /// `ibv_query_qp`
    pub(crate) fn query_qp(&self, qpn: Qpn) -> std::result::Result<QpAttr, NicError> {
        let stateless = self.star.as_ref().and_then(|star| star.ends.library.query(qpn));
        stateless.map_or_else(|| self.nic.query_qp(qpn), Ok)
    }

    /// State of a QP.
    pub(crate) fn qp_state(&self, qpn: Qpn) -> Option<QpState> {
        self.query_qp(qpn).ok().map(|attr| attr.state)
    }

    /// `ibv_destroy_qp`
    pub(crate) fn destroy_qp(&mut self, qpn: Qpn, now: Nanos) -> std::result::Result<(), NicError> {
        let Shard { env, attached, .. } = self;
        attached.ends(env, qpn);
        self.forget_star(qpn);
        if self.with_star(now, |star, turn| star.ends.library.destroy(turn, qpn)) == Some(true) {
            return Ok(());
        }
        self.nic.destroy_qp(&mut self.env, qpn)
    }

    /// Whose a QP is.
    pub(crate) fn qp_owner(&self, qpn: Qpn) -> Option<Owner> {
        let stateless = || self.star.as_ref().and_then(|star| star.ends.library.owner(qpn));
        self.nic.qp_owner(qpn).or_else(stateless)
    }

    /// Numbers of all QPs, in no order.
    pub(crate) fn qpns(&self) -> impl Iterator<Item = Qpn> + '_ {
        self.nic.qpns().chain(self.star.iter().flat_map(|star| star.ends.library.qpns()))
    }

    /// Registers memory; gives its key.
    pub(crate) fn reg_mr(&mut self, attr: MrAttr, now: Nanos) -> std::result::Result<u32, NicError> {
        let key = self.nic.reg_mr(attr)?;
        if let Err(error) = self.tell_of(key, now) {
            self.nic.dereg_mr(key)?;
            return Err(error);
        }
        Ok(key)
    }

    /// Opens another card's memory under the key that it has there.
    pub(crate) fn import_mr(
        &mut self,
        key: u32,
        attr: MrAttr,
        now: Nanos,
    ) -> std::result::Result<(), NicError> {
        self.nic.import_mr(key, attr)?;
        if let Err(error) = self.tell_of(key, now) {
            self.nic.unimport_mr(key)?;
            return Err(error);
        }
        Ok(())
    }

    /// Stateful cards hear of a key. `Exhausted`: there is no memory for that, and it is none to them.
    pub(crate) fn tell_of(&mut self, key: u32, now: Nanos) -> std::result::Result<(), NicError> {
        let told = self.with_star(now, |star, turn| {
            let rule = turn.nic.memory().rule(key);
            rule.map_or(Ok(()), |rule| star.ends.library.add_rule(turn, &rule))
        });
        told.unwrap_or(Ok(()))
    }

    /// Stateful cards hear of a region as it is now. It is changed already: without memory to say so it is
    /// none to them.
    fn tell_again(&mut self, key: u32, now: Nanos) {
        if self.tell_of(key, now).is_err() {
            log!(Warn, "no memory for the region of key {key:#x}: it is none to stateful ends");
        }
    }

    /// Whether all stateful cards know the memory of a protection domain.
    fn is_told(&self, pd: PdId) -> bool {
        self.star.as_ref().is_none_or(|star| star.ends.library.is_told(pd))
    }

    /// Ends what a key opens by `end`; true: stateful cards may know it, and [`Soft::await_revocation`] comes
    /// next.
    pub(crate) fn end_key<T>(
        &mut self,
        key: u32,
        now: Nanos,
        end: impl FnOnce(&mut Shard) -> std::result::Result<T, NicError>,
    ) -> std::result::Result<(T, bool), NicError> {
        let rule = match self.star {
            Some(_) => self.nic.memory().rule(key),
            None => None,
        };
        let ended = end(self)?;
        let told = rule.and_then(|rule| {
            self.with_star(now, |star, turn| {
                star.ends.library.remove_rule(turn, &rule);
                !star.ends.library.is_revoked(key)
            })
        });
        Ok((ended, told == Some(true)))
    }

    /// `ibv_dealloc_mw`. A key: stateful cards may know it, and [`Soft::await_revocation`] comes next.
    pub(crate) fn dealloc_mw(&mut self, key: u32, now: Nanos) -> std::result::Result<Option<u32>, NicError> {
        self.nic.dealloc_mw(key)?;
        Ok(self.with_star(now, |star, turn| star.ends.library.end_window(turn)).flatten())
    }

    /// Has a shared receive queue take from another ring; gives the one before.
    pub(crate) fn replace_srq_ring(
        &mut self,
        srq: SrqId,
        ring: CardRq,
        now: Nanos,
    ) -> std::result::Result<CardRq, NicError> {
        let before = self.nic.replace_srq_ring(srq, ring)?;
        self.with_star(now, |star, turn| star.ends.library.replace_srq_ring(turn, srq));
        Ok(before)
    }

    /// Receives were posted to a shared queue in which somebody had looked in vain.
    #[cold]
    pub(crate) fn ring_srq(&mut self, srq: SrqId, now: Nanos) {
        self.with_star(now, |star, turn| star.ends.library.ring_srq(turn, srq));
    }
}

impl Soft {
    /// Waits until no stateful card reaches for what a key opened.
    #[cold]
    pub(crate) fn await_revocation(&self, key: u32) {
        self.await_answers(|star, _, _| star.ends.library.is_revoked(key));
    }

    /// Registers memory. When this returns, stateful cards know of it: the program may tell theirs its key by
    /// another way than ours.
    pub(crate) fn reg_mr(&self, attr: MrAttr) -> Result<u32> {
        let (key, told) = self.with(|shard, now| {
            let key = shard.reg_mr(attr, now)?;
            Ok::<_, NicError>((key, shard.is_told(attr.pd)))
        })?;
        if !told {
            self.await_told(attr.pd);
        }
        Ok(key)
    }

    /// Changes what a key opens. Stateful cards hear of the region as it is then, and once they have
    /// forgotten how it was.
    pub(crate) fn rereg_mr(&self, key: u32, attr: MrAttr) -> Result<()> {
        let told = self.with(|shard, now| {
            let ((), told) = shard.end_key(key, now, |shard| shard.nic.rereg_mr(key, attr))?;
            /* in one turn: StaR that opens after it knows the region as it is now, and would count it
             * twice */
            if !told {
                shard.tell_again(key, now);
            }
            Ok::<_, NicError>(told)
        })?;
        if told {
            self.await_revocation(key);
            self.with(|shard, now| shard.tell_again(key, now));
        }
        self.await_told(attr.pd);
        Ok(())
    }

    /// Ends a memory window.
    pub(crate) fn dealloc_mw(&self, key: u32) -> Result<()> {
        if let Some(told) = self.with(|shard, now| shard.dealloc_mw(key, now))? {
            self.await_revocation(told);
        }
        Ok(())
    }

    /// Waits until all stateful cards know the memory of a protection domain.
    #[cold]
    pub(crate) fn await_told(&self, pd: PdId) {
        self.await_answers(|star, _, _| star.ends.library.is_told(pd));
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

    /// [`Shard::end_key`], and the wait.
    pub(crate) fn end_key<T>(
        &self,
        key: u32,
        end: impl FnOnce(&mut Shard) -> std::result::Result<T, NicError>,
    ) -> Result<T> {
        let (ended, told) = self.with(|shard, now| shard.end_key(key, now, end))?;
        if told {
            self.await_revocation(key);
        }
        Ok(ended)
    }
}
