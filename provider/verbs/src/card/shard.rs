//! What the card has of its contexts: domains and whose they are, and what becomes of events.

use std::sync::Arc;

use starverbs_core::opening::Opening;
use starverbs_core::qp::Owner;
use starverbs_core::{AsyncEvent, Gid, Nanos, PdId, Qpn};

use super::Shard;
use crate::env::HostEnv;
use crate::error::{Result, VerbsError};
use crate::events::{Event, FdQueue, kind};
use crate::notes::Notes;

impl Shard {
    /// A protection domain whose objects report to `events`.
    pub(crate) fn alloc_pd(&mut self, events: &Arc<FdQueue<Event>>) -> Result<PdId> {
        self.domains.try_reserve(1).map_err(|_| VerbsError::NoMemory("protection domains"))?;
        let pd = self.nic.alloc_pd()?;
        self.domains.insert(pd, Arc::clone(events));
        Ok(pd)
    }

    /// `ibv_attach_mcast`.
    pub(crate) fn attach(&mut self, qpn: Qpn, group: Gid) -> Result<()> {
        let Shard { nic, rx, .. } = self;
        nic.attach_multicast(qpn, group, || Ok(rx.join_group(group)?))
    }

    /// `ibv_detach_mcast`.
    pub(crate) fn detach(&mut self, qpn: Qpn, group: Gid) -> Result<()> {
        let Shard { nic, rx, .. } = self;
        Ok(nic.detach_multicast(qpn, &group, || rx.leave_group(group))?)
    }

    /// Takes a QP that is to end, whatever it is attached to, out of its multicast groups.
    pub(crate) fn detach_from_all(&mut self, qpn: Qpn) {
        let Shard { nic, rx, .. } = self;
        nic.detach_from_all(qpn, |group| rx.leave_group(group));
    }

    /// Ends a protection domain.
    pub(crate) fn dealloc_pd(&mut self, pd: PdId) -> Result<()> {
        self.nic.dealloc_pd(pd)?;
        self.domains.remove(&pd);
        Ok(())
    }

    /// QPs whose events go to `events`: those of its context.
    pub(crate) fn qps_told(&self, events: &Arc<FdQueue<Event>>) -> impl Iterator<Item = Qpn> {
        let told = |owner: Owner| self.domains.get(&owner.pd).is_some_and(|queue| Arc::ptr_eq(queue, events));
        self.qpns().filter(move |qpn| self.qp_owner(*qpn).is_some_and(told))
    }

    /// Tells the contexts what was raised. An object that is gone by now needs to know nothing.
    #[cold]
    pub(super) fn tell(&mut self, notes: &Notes, now: Nanos) {
        let Shard { nic, env, domains, openings, star, .. } = self;
        let HostEnv { events, links, .. } = env;
        let mut mads = false;
        let stateless = |qpn| star.as_ref().and_then(|star| star.library().owner(qpn));
        let owner = |qpn| nic.qp_owner(qpn).or_else(|| stateless(qpn));
        for event in events.drain(..) {
            let (kind, qpn) = match event {
                AsyncEvent::QpFatal(qpn) => (kind::QP_FATAL, qpn),
                AsyncEvent::QpReqErr(qpn) => (kind::QP_REQ_ERR, qpn),
                AsyncEvent::QpAccessErr(qpn) => (kind::QP_ACCESS_ERR, qpn),
                AsyncEvent::CommEst(qpn) => (kind::COMM_EST, qpn),
                AsyncEvent::SqDrained(qpn) => (kind::SQ_DRAINED, qpn),
                AsyncEvent::LastWqeReached(qpn) => (kind::QP_LAST_WQE_REACHED, qpn),
                AsyncEvent::Mads => {
                    mads = true;
                    continue;
                }
                AsyncEvent::SrqLimit(srq) => {
                    if let Some(Owner { pd, cookie }) = nic.srq_owner(srq)
                        && let Some(queue) = domains.get(&pd)
                    {
                        queue.push(Event::Srq { kind: kind::SRQ_LIMIT_REACHED, cookie });
                    }
                    continue;
                }
            };
            if !matches!(kind, kind::COMM_EST | kind::SQ_DRAINED | kind::QP_LAST_WQE_REACHED) {
                notes.add(kind, qpn);
            }
            let say = |link, message: Opening| {
                links.as_mut().is_some_and(|links| links.send(link, &message.encode(), &[], true))
            };
            if !openings.tell(qpn, kind, say)
                && let Some(Owner { pd, cookie }) = owner(qpn)
                && let Some(queue) = domains.get(&pd)
            {
                queue.push(Event::Qp { kind, cookie });
            }
        }
        if mads {
            self.run_cm(notes, now);
        }
    }
}
