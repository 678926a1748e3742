//! Multicast at the receiving half: the groups of this process, and what is forwarded to clients or by a
//! proxy.

use std::ops::Deref;

use starverbs_core::{Counters, Gid, QPN_MULTICAST};

use super::frames::{SHORTEST, qpn};
use super::{Cursor, FrameOrigin, Rx};
use crate::control::{self, LeaseRequest, StrayFrames};
use crate::handover::PassedOn;
use crate::inbox::Outer;
use crate::membership::receive_all;
use crate::{BackendError, sockopt};

impl<C: Deref<Target = Counters>> Rx<C> {
    /// Joins the multicast group of address `group`: its frames are received from now on. Without the
    /// port this waits for the proxy's reply; if there is no proxy, frames come as soon as there is.
    ///
    /// # Errors
    /// [`BackendError::NoInterface`], [`BackendError::Group`].
    pub fn join_group(&mut self, group: Gid) -> Result<(), BackendError> {
        self.membership.join(self.wire.as_ref(), group)?;
        self.request_lease();
        Ok(())
    }

    /// Leaves a multicast group.
    pub fn leave_group(&mut self, group: Gid) {
        self.membership.leave(self.wire.as_ref(), group);
        self.request_lease();
    }

    /// The groups changed: leases them if this process does not have the port.
    fn request_lease(&mut self) {
        if let (None, Some(block)) = (&self.wire, self.blocks.first()) {
            self.proxy.lease(block.number(), self.membership.groups());
        }
    }

    /// Whether the frame at the cursor, to the multicast QPN, is for this process.
    #[cold]
    pub(super) fn takes_multicast(&self, cursor: &Cursor) -> bool {
        let group = cursor.meta.dst;
        group.is_multicast() && (cursor.origin == FrameOrigin::Block || self.membership.has(group))
    }

    /// Forwards a multicast datagram to the clients that lease its group.
    #[cold]
    pub(super) fn serve_clients(&mut self, slot: usize, outer: &Outer) {
        let bytes = self.wire_inbox.bytes(slot);
        if bytes.len() < SHORTEST || qpn(bytes) != QPN_MULTICAST {
            return;
        }
        let segment = if outer.segment == 0 { bytes.len() as u16 } else { outer.segment };
        for (block, tag) in self.clients.of(outer.meta.dst, sockopt::monotonic()) {
            let run = StrayFrames { meta: outer.meta, sport: outer.sport, segment, first: 0, tag };
            match self.peers.pass(u32::from(block), &control::encode_run(&run), bytes) {
                PassedOn::Yes => self.counters.handed_on.add(bytes.len().div_ceil(segment.into()) as u64),
                PassedOn::NoOwner | PassedOn::Full => self.counters.drop_handover.inc(),
            }
        }
        if let Some(wire) = self.wire.as_ref().filter(|_| !self.clients.any()) {
            receive_all(wire, false);
        }
    }

    /// Whether multicast that was handed in comes from this process's proxy.
    pub(super) fn is_from_proxy(&self, run: &StrayFrames) -> bool {
        self.wire.is_none() && self.proxy.is_its(run.tag)
    }

    /// Answers a request for a lease. A process without the port refuses.
    #[cold]
    pub(super) fn grant_lease(
        &mut self,
        request: LeaseRequest,
        from: &libc::sockaddr_un,
        from_len: libc::socklen_t,
    ) {
        let tag = request.tag;
        let granted = match &self.wire {
            None => false,
            Some(wire) => {
                let granted = self.clients.grant(request, sockopt::monotonic());
                receive_all(wire, self.clients.any());
                granted
            }
        };
        self.reply(from, from_len, &control::encode_lease_reply(tag, granted));
    }

    /// Binding the port was tried: rejoins the groups on it, or renews the lease.
    #[cold]
    pub(super) fn settle_groups(&mut self) {
        if let Some(wire) = &self.wire {
            self.membership.rejoin(wire);
        } else if let Some(block) = self.blocks.first() {
            self.proxy.renew(block.number(), self.membership.groups());
        }
    }
}
