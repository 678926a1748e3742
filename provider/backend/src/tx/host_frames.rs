//! Frames to other processes of this host, through the memory of sessions: no system call sends them, and
//! none receives them.
//!
//! Which process has a block is known by name ([`crate::registry`]); the lane is the one by which frames are
//! handed on that reached the wrong process. Where there is no room, or no session, the wire has them. Owns
//! what is known of the blocks; it must not look into frames.

use starverbs_core::Nanos;

use crate::control::{StrayFrames, encode_run};
use crate::peer::{Peers, SessionId};
use crate::registry::LAST_BLOCK;
use crate::sockopt::monotonic;

/// Blocks that are known at once.
const KNOWN: usize = 64;
/// How long the wire has the frames for a block whose process takes no session.
const REFUSED: Nanos = 1_000_000_000;

/// What is known of a block.
#[derive(Clone, Copy, Default)]
struct BlockFacts {
    /// 0: none, as no process has that block
    block: u32,
    session: Option<SessionId>,
    /// There was no session; it is tried again then
    again: Nanos,
}

/// The way to other processes.
pub(super) struct HostFrames {
    peers: Peers,
    known: [BlockFacts; KNOWN],
}

impl HostFrames {
    pub(super) fn new(peers: Peers) -> HostFrames {
        HostFrames { peers, known: [BlockFacts::default(); KNOWN] }
    }

    /// Hands a run of frames over to the process that has `block`. False: the wire is to have it.
    ///
    /// # Safety
    /// The pieces can be read.
    #[inline]
    pub(super) unsafe fn pass(&mut self, block: u32, run: &StrayFrames, pieces: &[libc::iovec]) -> bool {
        let known = self.known[block as usize % KNOWN];
        let session = if known.block == block { known.session } else { None };
        let Some(session) = session.or_else(|| self.find(block)) else { return false };
        // SAFETY: the caller's terms.
        let sent = unsafe { self.peers.send_frames(session, &encode_run(run), pieces) };
        if sent.is_none() {
            self.known[block as usize % KNOWN] = BlockFacts::default();
        }
        sent == Some(true)
    }

    /// The session with the process that has a block, which is not known.
    #[cold]
    fn find(&mut self, block: u32) -> Option<SessionId> {
        let known = &mut self.known[block as usize % KNOWN];
        /* the numbers without a process: special queue pairs, multicast */
        if block == 0 || block > LAST_BLOCK {
            return None;
        }
        let now = monotonic();
        if known.block == block && now < known.again {
            return None;
        }
        let session = self.peers.session_to(block);
        *known = BlockFacts { block, session, again: now + REFUSED };
        session
    }
}
