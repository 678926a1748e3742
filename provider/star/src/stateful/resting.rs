//! A connection comes to rest while both ends' programs post on, and goes on, or is given back to the card's
//! own transport.
//!
//! At rest nothing has begun that is not over: SL has all completions, no packet waits for an answer, and no
//! copy of one that writes to SL's memory can come any more. What is posted and has not begun is nobody's
//! yet: SL has copies of what it sent here.

use starverbs_core::engine::Parted;
use starverbs_core::{Psn, QpState};

use super::events::Completions;
use super::window::Of;
use super::{Card, Ended, Stateful, Stream};
use crate::env::StarEnv;
use crate::homing::Done;

impl<E: StarEnv> Stateful<E> {
    /// No WQE begins from now on, of either end. False: the connection is ending.
    pub fn come_to_rest(&mut self) -> bool {
        self.resting = self.may_rest();
        self.resting
    }

    /// WQEs begin again.
    pub fn resume(&mut self) {
        (self.resting, self.halted) = (false, false);
    }

    /// How many of SL's WQEs are done, if it rests, and all that began is over: so it stays until
    /// [`resume`](Stateful::resume), and nothing is asked of SL any more.
    pub fn halt(&mut self) -> Option<Done> {
        if !self.resting || !self.may_rest() || !self.halted && !self.is_over() {
            return None;
        }
        /* what SL asks for from now on does not change that */
        self.halted = true;
        /* of receives for which WQEs wait, SL is not asked again */
        self.streams.iter_mut().for_each(|stream| stream.rnr_since = 0);
        Some(Done { sends: Psn::new(self.streams[Of::Remote as usize].una), recvs: self.next_recv })
    }

    /// Whether it has come to rest, as SL may have heard.
    pub fn is_halted(&self) -> bool {
        self.halted
    }

    fn may_rest(&self) -> bool {
        self.state == QpState::Rts && self.ended == Ended::Not && !self.overrun
    }

    fn is_over(&self) -> bool {
        let began = self.streams.iter().any(|stream: &Stream| stream.under_way() > 0 || stream.stopped);
        let told = self.completions.iter().all(Completions::is_told);
        /* before SL has said all that this end needs, what it is asked changes nothing */
        let said = self.channel.waiting() == 0 || !self.open;
        let said = said && self.answer_after.is_none() && self.refused.is_none();
        !began && told && said && self.window.is_empty()
    }

    /// The connection goes on without it. Gives where its queues stand.
    pub fn part(self, card: &mut Card<'_, E>) -> Parted {
        let (next_send, windows) = (self.streams[Of::Local as usize].una, self.windows);
        self.leave(card);
        Parted { next_send, windows }
    }
}
