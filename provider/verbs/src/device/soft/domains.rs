//! The protection domains of a card by context: objects live in a domain, the card knows their cookies, and
//! their events go to the domain's context.

use std::collections::HashMap;
use std::sync::Arc;

use starverbs_core::qp::EventOwner;
use starverbs_core::{Nic, PdId};

use super::env::HostEnv;
use crate::device::command::Events;
use crate::error::{Result, VerbsError};
use crate::events::VerbsEvent;

/// The event queue of each protection domain's context.
#[derive(Default)]
pub(super) struct DomainEvents(HashMap<PdId, Events>);

impl DomainEvents {
    /// A protection domain whose objects report to `events`.
    pub(super) fn alloc(&mut self, nic: &mut Nic<HostEnv>, events: &Events) -> Result<PdId> {
        self.0.try_reserve(1).map_err(|_| VerbsError::NoMemory("protection domains"))?;
        let pd = nic.alloc_pd()?;
        self.0.insert(pd, Arc::clone(events));
        Ok(pd)
    }

    /// Ends a protection domain.
    pub(super) fn dealloc(&mut self, nic: &mut Nic<HostEnv>, pd: PdId) -> Result<()> {
        nic.dealloc_pd(pd)?;
        self.0.remove(&pd);
        Ok(())
    }

    /// Tells an object's owner of an event.
    pub(super) fn notify(&self, owner: Option<EventOwner>, event: impl FnOnce(u64) -> VerbsEvent) {
        if let Some(EventOwner { pd, cookie }) = owner
            && let Some(queue) = self.events(pd)
        {
            queue.push(event(cookie));
        }
    }

    /// Where events of a domain's objects go.
    fn events(&self, pd: PdId) -> Option<&Events> {
        self.0.get(&pd)
    }

    /// Whether events of a domain's objects go to `events`.
    pub(super) fn reports_to(&self, pd: PdId, events: &Events) -> bool {
        self.events(pd).is_some_and(|queue| Arc::ptr_eq(queue, events))
    }
}
