//! Management datagrams at the receiving half: they are to queue pair 1, which every process has, so that the
//! port looks for whom they are; and the services that this process holds.

use std::ops::Deref;

use starverbs_cm::wire::Destination;
use starverbs_cm::{ListenAt, Scope};
use starverbs_core::{Counters, MAD_LEN, QPN_GSI};

use super::frames::qpn;
use super::{Cursor, FrameOrigin, Rx};
use crate::control::{self, StrayFrames};
use crate::handover::{PassedOn, pass_to};
use crate::listeners::socket_name;
use crate::{BackendError, registry};

/// The block of queue pair 1, which is nobody's.
pub(crate) const SPECIAL_BLOCK: u32 = 0;
/// BTH and DETH, behind which the datagram begins.
pub(crate) const HEADERS: usize = 20;
/// Of a connection manager's ID, the bits below its owner's block.
pub(crate) const ID_SHIFT: u32 = 20;

impl<C: Deref<Target = Counters>> Rx<C> {
    /// Holds a service ID: requests for it that come to any process of the host come here. `shared`: others
    /// of this process may hold it, if they share it too. What to poll changes.
    ///
    /// # Errors
    /// [`BackendError::ServiceTaken`], [`BackendError::ServiceOverlaps`], [`BackendError::ServicesFull`]
    pub fn claim_service(&mut self, at: ListenAt, shared: bool) -> Result<(), BackendError> {
        let claimed = self.listeners.claim(at, shared);
        self.list_fds();
        claimed
    }

    /// Gives a service ID back.
    pub fn release_service(&mut self, at: ListenAt) {
        self.listeners.release(at);
    }

    /// Whether the frame at the cursor is a management datagram for this process, or for nobody: one that
    /// names a connection of a process that is gone, or a service that nobody offers, is answered by
    /// whoever gets it.
    pub(super) fn takes_mad(&self, cursor: &Cursor) -> bool {
        let frame = self.mad(cursor);
        if qpn(frame) != QPN_GSI {
            return false;
        }
        if cursor.nobodys || cursor.origin == FrameOrigin::Block {
            return true;
        }
        match destination(frame) {
            None => true,
            Some(Destination::Service(service)) => self.listeners.holds(service, cursor.meta.dst),
            Some(Destination::Id(id)) => self.is_local(id >> ID_SHIFT),
        }
    }

    /// Passes the management datagram at the cursor on, and moves the cursor behind it; or finds that it is
    /// nobody's.
    #[cold]
    pub(super) fn pass_mad(&mut self, cursor: &mut Cursor) {
        let frame = self.mad(cursor);
        let (meta, sport, segment) = (cursor.meta, cursor.sport, frame.len() as u16);
        let head = control::encode_run(&StrayFrames { meta, sport, segment, first: cursor.index, tag: 0 });
        let passed = match destination(frame) {
            None => PassedOn::NoOwner,
            Some(Destination::Id(_)) => {
                owner(frame).map_or(PassedOn::NoOwner, |block| self.peers.pass(block, &head, frame))
            }
            Some(Destination::Service(service)) => {
                let scopes = Scope::around(meta.dst).into_iter();
                let names = scopes.map(|scope| socket_name(self.settings.port, ListenAt { service, scope }));
                let pass = |name: String| pass_to(&name, &head, frame);
                names.map(pass).find(|passed| *passed != PassedOn::NoOwner).unwrap_or(PassedOn::NoOwner)
            }
        };
        match passed {
            PassedOn::NoOwner => return cursor.nobodys = true,
            PassedOn::Yes => self.counters.handed_on.inc(),
            PassedOn::Full => self.counters.drop_handover.inc(),
        }
        cursor.at += usize::from(segment);
        cursor.index = cursor.index.wrapping_add(1);
    }

    /// The frame at the cursor.
    fn mad(&self, cursor: &Cursor) -> &[u8] {
        let inbox = if cursor.origin == FrameOrigin::Wire { &self.wire_inbox } else { &self.block_inbox };
        let bytes = inbox.bytes(cursor.slot);
        &bytes[cursor.at..(cursor.at + cursor.segment).min(bytes.len())]
    }
}

/// The block of the process that a frame to queue pair 1 names. `None`: it names none.
pub(crate) fn owner(frame: &[u8]) -> Option<u32> {
    match destination(frame)? {
        Destination::Id(id) => {
            Some(id >> ID_SHIFT).filter(|block| (1..=registry::LAST_BLOCK).contains(block))
        }
        Destination::Service(_) => None,
    }
}

/// For whom a frame to queue pair 1 is.
fn destination(frame: &[u8]) -> Option<Destination> {
    frame.get(HEADERS..HEADERS + MAD_LEN).and_then(Destination::of)
}
