//! How the other ends of channels are notified, and how a card with very many channels is: by one word, its
//! doorbell.
//!
//! With few channels a poll looks at each, and the others write no word more than their records. With many
//! the card says in each that it awaits its doorbell; the other ends then ring it. Any of them can clear the
//! word, or not know it: now and then a poll looks at all channels nevertheless. See
//! `starverbs_rings::PeerDoorbell`.

use std::sync::Arc;

use starverbs_backend::{Peers, SessionId, SharedDoorbell};
use starverbs_rings::Notify;

use super::asker::AskingChannel;
use super::channels::{Answerer, Asked, Channels};

/// Channels that a poll looks at one by one: those of eight peers.
const POLLED: usize = 16;
/// Polls that look at all channels after a doorbell was handed over. Until the other end has it, it sends
/// wake-ups, and those are seen seldom by who polls.
const SETTLING: u32 = 1 << 14;
/// One poll in so many looks at all channels, whether the doorbell was rung or not.
const POLL_ALL: u32 = 256;

/// Whether a card awaits its doorbell.
#[derive(Default)]
pub(super) struct DoorbellWatch {
    /// Its doorbell, if it does
    doorbell: Option<Arc<SharedDoorbell>>,
    /// Polls that look at all channels nevertheless
    polls: u32,
    /// Polls in a row that have not
    quiet: u32,
}

impl DoorbellWatch {
    /// So many of the next polls look at all channels.
    pub(super) fn poll_all(&mut self, polls: u32) {
        self.polls = self.polls.max(polls);
    }
}

/// Notifies the other end of a channel, which may be this card's own, by the way that it waits for.
#[inline(never)]
fn notify(peers: &Peers, by: Notify, session: Option<SessionId>, doorbell: Option<&SharedDoorbell>) {
    match (by, doorbell, session) {
        (Notify::No, ..) => {}
        (Notify::Doorbell, Some(doorbell), _) => doorbell.ring(),
        /* its doorbell is under way */
        (Notify::Doorbell | Notify::Wake, _, Some(session)) => peers.wake(session),
        (Notify::Doorbell | Notify::Wake, _, None) => {}
    }
}

impl AskingChannel {
    /// Notifies the other end.
    #[inline]
    pub(super) fn notify(&self, peers: &Peers, by: Notify) {
        if by != Notify::No {
            notify(peers, by, self.session, self.doorbell.as_deref());
        }
    }

    fn await_doorbell(&mut self, own: &Arc<SharedDoorbell>) {
        if self.session.is_none() {
            self.doorbell = Some(own.clone());
        }
        self.channel.answers.await_doorbell();
        self.channel.requests.await_doorbell();
    }
}

impl Answerer {
    /// Notifies the other end.
    #[inline]
    pub(super) fn notify(&self, peers: &Peers, by: Notify) {
        if by != Notify::No {
            notify(peers, by, self.session, self.doorbell.as_deref());
        }
    }

    fn await_doorbell(&mut self, own: &Arc<SharedDoorbell>) {
        if self.session.is_none() {
            self.doorbell = Some(own.clone());
        }
        self.channel.requests.await_doorbell();
        self.channel.answers.await_doorbell();
    }
}

impl Channels {
    /// Whether a poll sees at one glance that it has nothing to do. False: a turn looks closer.
    #[inline]
    pub(in super::super) fn are_idle(&mut self) -> bool {
        let owes = self.answered | self.broken | self.asleep | (self.asked != Asked::None);
        if owes || self.peers.has_news() {
            return false;
        }
        let watch = &mut self.watch;
        if let Some(doorbell) = &watch.doorbell {
            let quiet = watch.quiet.wrapping_add(1);
            let idle = watch.polls == 0 && !quiet.is_multiple_of(POLL_ALL) && !doorbell.is_rung();
            watch.quiet = if idle { quiet } else { watch.quiet };
            return idle;
        }
        self.answerers.iter().all(Answerer::is_idle)
            && self.askers.iter().flatten().all(|asker| asker.is_idle())
    }

    /// Whether a turn would find nothing to do: nothing has come, and nobody is to be notified.
    #[inline]
    pub(super) fn are_quiet(&mut self) -> bool {
        let owes = self.asked != Asked::None || self.answered || self.broken;
        let watch = &mut self.watch;
        let Some(doorbell) = watch.doorbell.as_ref().filter(|_| !owes && !self.asleep) else {
            return !self.any();
        };
        watch.quiet = watch.quiet.wrapping_add(1);
        if watch.polls > 0 {
            watch.polls -= 1;
            return false;
        }
        !watch.quiet.is_multiple_of(POLL_ALL) && !doorbell.take()
    }

    /// There is one channel more, of this session: with many the card awaits its doorbell from now on.
    pub(super) fn await_doorbell_if_many(&mut self, session: Option<SessionId>) {
        let channels = self.answerers.len() + self.askers.iter().flatten().count();
        let awaits = self.watch.doorbell.is_some();
        if !awaits && channels <= POLLED {
            return;
        }
        self.watch.doorbell = self.peers.doorbell();
        let new = if awaits { session.into_iter().collect() } else { self.sessions() };
        for session in new {
            /* who does not get it is heard by its wake-ups, and asked to take it with the next one */
            self.peers.hand_doorbell(session);
        }
        if !self.asleep {
            self.poll_or_await();
        }
        self.watch.poll_all(SETTLING);
    }

    fn sessions(&self) -> Vec<SessionId> {
        let asked = self.askers.iter().flatten().filter(|asker| !asker.ended);
        let asking = self.answerers.iter().filter(|answerer| !answerer.ended);
        asked
            .filter_map(|asker| asker.session)
            .chain(asking.filter_map(|answerer| answerer.session))
            .collect()
    }

    /// The card is polled: it polls its channels, or awaits its doorbell. What came before is looked for
    /// once.
    pub(super) fn poll_or_await(&mut self) {
        let Some(doorbell) = &self.watch.doorbell else {
            self.askers.iter().flatten().for_each(|asker| asker.channel.answers.wake());
            self.answerers.iter().for_each(|answerer| answerer.channel.requests.wake());
            return;
        };
        self.askers.iter_mut().flatten().for_each(|asker| asker.await_doorbell(doorbell));
        self.answerers.iter_mut().for_each(|answerer| answerer.await_doorbell(doorbell));
        doorbell.arm();
        self.watch.poll_all(1);
    }

    /// The other end of a session has sent a wake-up though the card awaits its doorbell: it has none, or
    /// does not know what one is, and has to be told again what this card does.
    pub(super) fn await_again(&mut self, session: SessionId) {
        let Some(doorbell) = self.watch.doorbell.clone().filter(|_| !self.asleep) else { return };
        self.peers.hand_doorbell(session);
        self.askers_of(session).for_each(|asker| asker.await_doorbell(&doorbell));
        self.answerers_of(session).for_each(|answerer| answerer.await_doorbell(&doorbell));
        doorbell.arm();
        self.watch.poll_all(1);
    }

    /// The other end of a session has handed over its doorbell.
    pub(super) fn take_doorbell(&mut self, session: SessionId, doorbell: &Arc<SharedDoorbell>) {
        self.askers_of(session).for_each(|asker| asker.doorbell = Some(doorbell.clone()));
        self.answerers_of(session).for_each(|answerer| answerer.doorbell = Some(doorbell.clone()));
    }

    fn askers_of(&mut self, session: SessionId) -> impl Iterator<Item = &mut AskingChannel> {
        let all = self.askers.iter_mut().flatten().map(|asker| &mut **asker);
        all.filter(move |asker| asker.session == Some(session))
    }

    fn answerers_of(&mut self, session: SessionId) -> impl Iterator<Item = &mut Answerer> {
        self.answerers.iter_mut().filter(move |answerer| answerer.session == Some(session))
    }
}

#[cfg(test)]
#[path = "notify_tests.rs"]
mod tests;
