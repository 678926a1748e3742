//! A connection quiesces while both ends' programs post on, and resumes, or reverts to the card's own
//! transport.
//!
//! When it is quiesced, all that began is over: SL has all completions, no packet waits for an answer, and no
//! copy of one that writes to SL's memory can arrive any more. WQEs that have not begun are dropped here: SL
//! has copies of those that it sent.

use starverbs_core::engine::Detached;
use starverbs_core::{Psn, QpState};

use super::events::Completions;
use super::window::Of;
use super::{CardCtx, Ended, Stateful, WqeStream};
use crate::env::StarEnv;
use crate::round::QuiescePoint;

impl<E: StarEnv> Stateful<E> {
    /// No WQE begins from now on, of either end. False: the connection is ending.
    pub fn quiesce(&mut self) -> bool {
        self.quiescing = self.may_quiesce();
        self.quiescing
    }

    /// WQEs begin again.
    pub fn resume(&mut self) {
        (self.quiescing, self.quiesced) = (false, false);
    }

    /// How many of SL's WQEs are done, if it is quiesced. It stays so until [`resume`](Stateful::resume), and
    /// sends SL no messages.
    pub fn quiesce_point(&mut self) -> Option<QuiescePoint> {
        if !self.quiescing || !self.may_quiesce() || !self.quiesced && !self.is_over() {
            return None;
        }
        /* WQEs that SL sends from now on do not change that */
        self.quiesced = true;
        /* WQEs that wait for receives have no KeepAlive sent any more */
        self.streams.iter_mut().for_each(WqeStream::got_recv);
        Some(QuiescePoint { sends: Psn::new(self.streams[Of::Remote as usize].una), recvs: self.next_recv })
    }

    /// Whether it is quiesced, and SL may know.
    pub fn is_quiesced(&self) -> bool {
        self.quiesced
    }

    /// Whether the connection is not ending.
    pub fn may_quiesce(&self) -> bool {
        self.state == QpState::Rts && self.ended == Ended::Not && !self.overrun
    }

    fn is_over(&self) -> bool {
        let began = self.streams.iter().any(|stream: &WqeStream| stream.under_way() > 0 || stream.stopped);
        let acked = self.completions.iter().all(Completions::is_acked);
        /* before SL has sent all rules, messages to it change nothing */
        let sent = self.channel.waiting() == 0 || !self.open;
        let sent = sent && self.answer_waits().is_none() && self.refused.is_none();
        !began && acked && sent && self.window.is_empty()
    }

    /// The connection goes on without it. Gives where its queues stand.
    pub fn detach(self, card: &mut CardCtx<'_, E>) -> Detached {
        let (next_send, windows) = (self.streams[Of::Local as usize].una, self.windows);
        self.leave(card);
        Detached { next_send, windows }
    }
}
