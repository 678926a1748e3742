//! How a card with very many channels finds out in which of them something has come: by one word, its bell.
//!
//! With few channels a poll looks at each, and the others write no word more than their records. With many it
//! says in each channel that it listens; the other ends then ring. Owns when that is so, and how others are
//! told. See `starverbs_rings::Bell`.

use std::sync::Arc;

use starverbs_backend::{Peers, SessionId, SharedBell};
use starverbs_rings::WakeBy;

use super::channels::Channels;

/// Channels that a poll looks at one by one: those of eight peers.
const LOOKED_AT: usize = 16;
/// Polls that look at all channels after a bell was handed over. Until the other end has it, it calls, and
/// calls are seen seldom by who polls.
const SETTLING: u32 = 1 << 14;

/// Whether a card listens.
#[derive(Default)]
pub(super) struct Listening {
    /// Its bell, if it does
    bell: Option<Arc<SharedBell>>,
    /// Polls that look at all channels nevertheless
    looks: u32,
    /// There could be none
    refused: bool,
}

impl Listening {
    /// The next polls look at all channels.
    pub(super) fn look(&mut self, polls: u32) {
        self.looks = self.looks.max(polls);
    }
}

/// Tells the other end of a channel, which may be this card's own, by the way that it waits for.
#[inline]
pub(super) fn tell(peers: &Peers, by: WakeBy, session: Option<SessionId>, bell: Option<&SharedBell>) {
    match (by, bell, session) {
        (WakeBy::Nothing, ..) => {}
        (WakeBy::Bell, Some(bell), _) => bell.ring(),
        /* its bell is under way */
        (WakeBy::Bell | WakeBy::Call, _, Some(session)) => peers.wake(session),
        (WakeBy::Bell | WakeBy::Call, _, None) => {}
    }
}

impl Channels {
    /// Whether a turn would find nothing to do: nothing has come, and nobody is to be told of anything.
    #[inline]
    pub(super) fn are_quiet(&mut self) -> bool {
        let owes = self.asked || self.answered || self.broken;
        let listens = self.listening.bell.as_ref().filter(|_| !owes && !self.asleep);
        let Some(bell) = listens else { return !self.any() };
        if self.listening.looks > 0 {
            self.listening.looks -= 1;
            return false;
        }
        !bell.take()
    }

    /// There is one channel more, of this session: with many the card listens from now on.
    pub(super) fn listen_if_many(&mut self, session: Option<SessionId>) {
        let channels = self.answerers.len() + self.askers.iter().flatten().count();
        if channels <= LOOKED_AT || self.listening.refused {
            return;
        }
        let new = if self.listening.bell.is_some() { session.into_iter().collect() } else { self.sessions() };
        self.listening.bell = self.peers.bell();
        let handed = new.into_iter().all(|session| self.peers.hand_bell(session));
        if !handed || self.listening.bell.is_none() {
            self.listening = Listening { refused: true, ..Listening::default() };
        }
        if !self.asleep {
            self.look_or_listen();
        }
        self.listening.look(SETTLING);
    }

    fn sessions(&self) -> Vec<SessionId> {
        let asked = self.askers.iter().flatten().filter_map(|asker| asker.session);
        asked.chain(self.answerers.iter().filter_map(|answerer| answerer.session)).collect()
    }

    /// The card is polled: it looks at its channels by itself, or listens. What came before is looked for
    /// once.
    pub(super) fn look_or_listen(&mut self) {
        let bell = &self.listening.bell;
        for asker in self.askers.iter_mut().flatten() {
            asker.bell = if asker.session.is_none() { bell.clone() } else { asker.bell.take() };
            match bell {
                None => asker.channel.answers.wake(),
                Some(_) => {
                    asker.channel.answers.listen();
                    asker.channel.requests.listen();
                }
            }
        }
        for answerer in &mut self.answerers {
            answerer.bell = if answerer.session.is_none() { bell.clone() } else { answerer.bell.take() };
            match bell {
                None => answerer.channel.requests.wake(),
                Some(_) => {
                    answerer.channel.requests.listen();
                    answerer.channel.answers.listen();
                }
            }
        }
        self.listening.look(1);
    }

    /// The other end of a session has handed over its bell.
    pub(super) fn take_bell(&mut self, session: SessionId, bell: &Arc<SharedBell>) {
        for asker in self.askers.iter_mut().flatten().filter(|asker| asker.session == Some(session)) {
            asker.bell = Some(bell.clone());
        }
        for answerer in self.answerers.iter_mut().filter(|answerer| answerer.session == Some(session)) {
            answerer.bell = Some(bell.clone());
        }
    }
}

#[cfg(test)]
#[path = "listening_tests.rs"]
mod tests;
