//! Multicast at the receiving half: the groups of this process, and what is handed on to guests or by a
//! patron.

use std::ops::Deref;

use starverbs_core::{Counters, Gid, QPN_MULTICAST};

use super::frames::{SHORTEST, qpn};
use super::{Cursor, Origin, Rx};
use crate::control::{self, Run, Wish};
use crate::handover::Passed;
use crate::inbox::Outer;
use crate::membership::receive_all;
use crate::{BackendError, sockopt};

impl<C: Deref<Target = Counters>> Rx<C> {
    /// Joins the multicast group of address `group`: its frames are received from now on. A guest waits for
    /// the answer of who hands them on; if there is nobody, they come as soon as there is.
    ///
    /// # Errors
    /// [`BackendError::NoInterface`], [`BackendError::Group`].
    pub fn join_group(&mut self, group: Gid) -> Result<(), BackendError> {
        self.membership.join(self.wire.as_ref(), group)?;
        self.ask_patron();
        Ok(())
    }

    /// Leaves a multicast group.
    pub fn leave_group(&mut self, group: Gid) {
        self.membership.leave(self.wire.as_ref(), group);
        self.ask_patron();
    }

    /// A guest's groups are others now.
    fn ask_patron(&mut self) {
        if let (None, Some(block)) = (&self.wire, self.blocks.first()) {
            self.patron.ask(block.number(), self.membership.groups());
        }
    }

    /// Whether the frame at the cursor, to the multicast QPN, is for this process.
    #[cold]
    pub(super) fn takes_multicast(&self, cursor: &Cursor) -> bool {
        let group = cursor.meta.dst;
        group.is_multicast() && (cursor.origin == Origin::Block || self.membership.has(group))
    }

    /// Hands a multicast datagram on to the guests that want it.
    #[cold]
    pub(super) fn serve_guests(&mut self, slot: usize, outer: &Outer) {
        let bytes = self.wire_inbox.bytes(slot);
        if bytes.len() < SHORTEST || qpn(bytes) != QPN_MULTICAST {
            return;
        }
        let segment = if outer.segment == 0 { bytes.len() as u16 } else { outer.segment };
        for (block, tag) in self.guests.of(outer.meta.dst, sockopt::monotonic()) {
            let run = Run { meta: outer.meta, sport: outer.sport, segment, first: 0, tag };
            match self.peers.pass(u32::from(block), &control::encode_run(&run), bytes) {
                Passed::Yes => self.counters.handed_on.add(bytes.len().div_ceil(segment.into()) as u64),
                Passed::NoOwner | Passed::Full => self.counters.drop_handover.inc(),
            }
        }
        if let Some(wire) = self.wire.as_ref().filter(|_| !self.guests.any()) {
            receive_all(wire, false);
        }
    }

    /// Whether multicast that was handed in comes from who is to do so.
    pub(super) fn is_patrons(&self, run: &Run) -> bool {
        self.wire.is_none() && self.patron.is_its(run.tag)
    }

    /// Grants a guest's wish, and says so; a guest itself has nothing to hand on.
    #[cold]
    pub(super) fn grant(&mut self, wish: Wish, from: &libc::sockaddr_un, from_len: libc::socklen_t) {
        let tag = wish.tag;
        let granted = match &self.wire {
            None => false,
            Some(wire) => {
                let granted = self.guests.grant(wish, sockopt::monotonic());
                receive_all(wire, self.guests.any());
                granted
            }
        };
        self.reply(from, from_len, &control::encode_grant(tag, granted));
    }

    /// A guest has tried to have the port itself: it is a member of its groups there, or renews its patron's
    /// promise.
    #[cold]
    pub(super) fn settle_groups(&mut self) {
        if let Some(wire) = &self.wire {
            self.membership.rejoin(wire);
        } else if let Some(block) = self.blocks.first() {
            self.patron.renew(block.number(), self.membership.groups());
        }
    }
}
