//! Control messages of one connection, one way and the other: each once, in order, one under way at a time.

use alloc::collections::VecDeque;

use starverbs_core::{Nanos, NicError, Psn};

use super::control::Control;
use super::registry::MAX_RULES;

/// First time after which something is sent again.
pub const FIRST_TIMEOUT: Nanos = 1_000_000;
/// Due when it is woken.
const ASLEEP: Nanos = Nanos::MAX;
/// Messages that wait at most: all rules of a domain, told and taken away, and what is said beside.
const MOST: usize = 2 * MAX_RULES + 64;
/// Longest time between two of the first tries.
const LONGEST_TIMEOUT: Nanos = 64 * FIRST_TIMEOUT;

/// After so many tries, the time until the next: doubled up to 64 ms.
pub(super) fn timeout(tries: u32) -> Nanos {
    LONGEST_TIMEOUT.min(FIRST_TIMEOUT << tries.min(6))
}

/// The same between ends of a connection, but after every 32 tries twice that, up to a second: who only
/// receives asks one that is silent for long.
pub(super) fn seldom(tries: u32) -> Nanos {
    timeout(tries) << (tries / 32).min(4)
}

/// What to do with a message that came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Turn {
    /// Do what it says and answer
    Now,
    /// It has been done: answer
    Again,
    /// One before it is missing: nothing
    Early,
}

/// One end's messages.
#[derive(Clone, Debug, Default)]
pub struct Channel {
    out: VecDeque<Control>,
    /// Sequence of the oldest of `out`
    seq: Psn,
    /// When it is sent again. `None`: it was not sent yet
    due: Option<Nanos>,
    /// Times that it was sent
    tries: u32,
    /// Since when it waits for its answer, later by what this end was late
    since: Nanos,
    /// Sequence of the peer's next message
    expected: Psn,
}

impl Channel {
    /// Nothing said yet.
    pub fn new() -> Self {
        Channel::default()
    }
    /// Adds a message. `Exhausted`: there is no memory, or too many wait.
    pub fn send(&mut self, message: Control) -> Result<(), NicError> {
        if self.out.len() >= MOST || self.out.try_reserve(1).is_err() {
            return Err(NicError::Exhausted);
        }
        self.out.push_back(message);
        Ok(())
    }
    /// As it is, but with nothing to say: the peer is gone. What it still says can be answered.
    #[must_use]
    pub fn silenced(&self) -> Self {
        let seq = self.seq.plus(self.out.len() as u32);
        Channel { seq, expected: self.expected, ..Channel::default() }
    }
    /// Whether this message has no answer yet.
    pub fn holds(&self, message: &Control) -> bool {
        self.out.contains(message)
    }
    /// Forgets what there is to say of memory, as somebody else says it. The peer may have had the oldest
    /// message: its number stays in use, for a question.
    pub fn recall(&mut self) {
        if let Some(first) = self.out.front_mut().filter(|first| first.is_of_memory()) {
            *first = Control::KeepAlive;
        }
        self.out.retain(|message| !message.is_of_memory());
    }
    /// A rule is no more: it is not said any more. One that the peer may have had keeps its number, as in
    /// [`recall`](Channel::recall). Gives how many messages had no answer.
    pub fn unsay(&mut self, key: u32) -> u32 {
        let is = |message: &Control| matches!(message, Control::Rule(rule) if rule.key == key);
        let said = self.count(is);
        if let Some(first) = self.out.front_mut().filter(|first| self.tries > 0 && is(first)) {
            *first = Control::KeepAlive;
        }
        if said > 0 {
            self.out.retain(|message| !is(message));
        }
        said
    }
    /// Forgets what would have the peer begin: this end is over. Of a message that it may have had the number
    /// stays in use, as in [`recall`](Channel::recall).
    pub fn end(&mut self) {
        let begins = |message: &Control| {
            matches!(message, Control::Setup(_) | Control::Rule(_) | Control::Begin { .. })
        };
        if let Some(first) = self.out.front_mut().filter(|first| begins(first)) {
            *first = Control::KeepAlive;
        }
        self.out.retain(|message| !begins(message));
    }
    /// Messages of some kind that have no answer.
    pub fn count(&self, is: impl Fn(&Control) -> bool) -> u32 {
        self.out.iter().filter(|message| is(message)).count() as u32
    }
    /// Messages without an answer.
    pub fn waiting(&self) -> usize {
        self.out.len()
    }
    /// Times that the oldest of them was sent.
    pub fn tries(&self) -> u32 {
        self.tries
    }

    /// The message to send now.
    pub fn poll(&mut self, now: Nanos) -> Option<(Psn, Control)> {
        let message = *self.out.front()?;
        if self.due.is_some_and(|due| now < due) {
            return None;
        }
        self.since = if self.due.is_none() { now } else { self.since + self.lateness(now) };
        self.due = Some(now + seldom(self.tries));
        self.tries = self.tries.saturating_add(1);
        Some((self.seq, message))
    }

    /// When there is something to send.
    pub fn deadline(&self) -> Option<Nanos> {
        self.out.front().map(|_| self.due.unwrap_or(0)).filter(|due| *due != ASLEEP)
    }

    /// For how long the oldest message, if it was sent, has been due to be sent again, ns.
    pub fn lateness(&self, now: Nanos) -> Nanos {
        let due = self.due.filter(|_| !self.out.is_empty());
        due.map_or(0, |due| now.saturating_sub(due))
    }
    /// For how long the oldest message has had no answer, ns. For how long this end left it lie beyond its
    /// times does not count: the peer was not asked then, and what it had said may not have been read.
    pub fn waited(&self, now: Nanos) -> Nanos {
        self.due.map_or(0, |due| due.min(now).saturating_sub(self.since))
    }
    /// Nobody waited for an answer so far.
    pub fn excuse(&mut self, now: Nanos) {
        self.since = now;
    }
    /// The oldest message, which is due, is sent again at `due`, not yet.
    pub fn put_off(&mut self, now: Nanos, due: Nanos) {
        self.since += self.lateness(now);
        self.due = Some(due);
    }

    /// Sends nothing, until it is woken: nobody waits for an answer.
    pub fn sleep(&mut self) {
        self.due = Some(ASLEEP);
    }
    /// The peer has said something, or somebody waits for it.
    pub fn wake(&mut self, now: Nanos) {
        let slept = self.due == Some(ASLEEP);
        if slept {
            (self.due, self.since) = (Some(now), now);
        }
    }

    /// An answer came; gives the message, if it is the first answer to it.
    pub fn answered(&mut self, seq: Psn) -> Option<Control> {
        if seq != self.seq || self.tries == 0 {
            return None;
        }
        (self.due, self.tries) = (None, 0);
        self.seq = self.seq.plus(1);
        self.out.pop_front()
    }

    /// Whether a message of the peer is the next. It is not taken yet: see [`took`](Channel::took).
    pub fn turn(&self, seq: Psn) -> Turn {
        match seq.since(self.expected) {
            0 => Turn::Now,
            1.. => Turn::Early,
            _ => Turn::Again,
        }
    }
    /// The next message of the peer has been done.
    pub fn took(&mut self) {
        self.expected = self.expected.plus(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_message_once_and_in_order() {
        let (mut a, mut b) = (Channel::new(), Channel::new());
        assert_eq!((a.poll(0), a.deadline()), (None, None));
        a.send(Control::KeepAlive).unwrap();
        a.send(Control::Want { upto: 1 }).unwrap();
        assert_eq!(a.answered(Psn::new(0)), None, "nothing was sent yet");
        let first = a.poll(5).expect("the first");
        assert_eq!((a.poll(5), a.deadline()), (None, Some(5 + FIRST_TIMEOUT)));
        assert_eq!(a.poll(5 + FIRST_TIMEOUT), Some(first), "again");
        assert_eq!(a.tries(), 2);
        assert_eq!((b.turn(first.0), b.turn(first.0.plus(1))), (Turn::Now, Turn::Early));
        b.took();
        assert_eq!(b.turn(first.0), Turn::Again);
        assert_eq!(a.answered(first.0), Some(Control::KeepAlive));
        assert_eq!(a.answered(first.0), None);
        assert_eq!(a.poll(9), Some((first.0.plus(1), Control::Want { upto: 1 })));
        a.send(Control::Tell).unwrap();
        assert!(a.holds(&Control::Tell) && !a.holds(&Control::KeepAlive));
        assert_eq!(a.answered(first.0.plus(1)), Some(Control::Want { upto: 1 }));
        assert_eq!((a.waiting(), a.poll(9)), (1, Some((first.0.plus(2), Control::Tell))));
    }

    /// One that gets no CPU asks seldom, and has not waited for longer than it left its peer time to answer.
    #[test]
    fn its_own_lateness_is_not_the_peer_s() {
        let (mut channel, late) = (Channel::new(), 700 * FIRST_TIMEOUT);
        channel.send(Control::KeepAlive).unwrap();
        let mut now = 1_000 * FIRST_TIMEOUT;
        let mut waits = 0;
        for tries in 0..9 {
            assert!(channel.poll(now).is_some());
            waits += timeout(tries);
            now = channel.deadline().unwrap() + late;
            assert_eq!((channel.lateness(now), channel.waited(now)), (late, waits));
        }
        channel.put_off(now, now + 1);
        assert_eq!((channel.lateness(now + 1), channel.waited(now + 1)), (0, waits + 1));
        channel.excuse(now + 1);
        assert_eq!(channel.waited(now + 1), 0);
        assert!(channel.poll(now + 1).is_some());
        channel.answered(Psn::new(0)).expect("it was sent");
        assert_eq!((channel.waited(now + 2), channel.lateness(now + 2)), (0, 0));
    }

    /// Of a rule that was sent the number stays in use, and nothing else of memory is said.
    #[test]
    fn what_others_say_of_memory_is_not_said_late() {
        let mut channel = Channel::new();
        for message in [Control::Unrule { key: 1 }, Control::Begin { known: None }, Control::Bye { why: 0 }] {
            channel.send(message).unwrap();
        }
        assert_eq!(channel.poll(0), Some((Psn::new(0), Control::Unrule { key: 1 })));
        channel.recall();
        assert_eq!(channel.poll(FIRST_TIMEOUT), Some((Psn::new(0), Control::KeepAlive)), "under its number");
        assert_eq!(channel.answered(Psn::new(0)), Some(Control::KeepAlive));
        channel.recall();
        assert_eq!(channel.poll(FIRST_TIMEOUT), Some((Psn::new(1), Control::Bye { why: 0 })));
        assert_eq!(channel.count(|_| true), 1);
    }

    /// A rule that ends before it was answered is not said again.
    #[test]
    fn a_rule_that_is_no_more_is_not_said() {
        let rule = |key| {
            let access = starverbs_core::Access::REMOTE_READ;
            let pd = starverbs_core::PdId(0);
            Control::Rule(starverbs_core::mr::Rule { key, pd, qpn: 0, addr: 0, len: 1, iova: 0, access })
        };
        let mut channel = Channel::new();
        [1, 2, 3, 2].iter().for_each(|key| channel.send(rule(*key)).unwrap());
        assert_eq!(channel.poll(0), Some((Psn::new(0), rule(1))));
        assert_eq!([2, 1, 4].map(|key| channel.unsay(key)), [2, 1, 0]);
        assert_eq!(channel.poll(FIRST_TIMEOUT), Some((Psn::new(0), Control::KeepAlive)), "under its number");
        channel.answered(Psn::new(0));
        assert_eq!((channel.unsay(3), channel.poll(0), channel.waiting()), (1, None, 0), "never sent");
        channel.send(rule(4)).unwrap();
        assert_eq!(channel.poll(0), Some((Psn::new(1), rule(4))));
    }

    /// A connection that ends before its peer has heard of it does not begin there.
    #[test]
    fn who_ends_says_nothing_that_begins() {
        let mut channel = Channel::new();
        for message in [Control::Begin { known: None }, Control::Tell, Control::Unrule { key: 1 }] {
            channel.send(message).unwrap();
        }
        channel.end();
        assert_eq!(channel.poll(0), Some((Psn::new(0), Control::KeepAlive)), "under its number");
        channel.answered(Psn::new(0));
        assert_eq!(channel.poll(0), Some((Psn::new(1), Control::Tell)));
        assert_eq!(channel.waiting(), 2, "what it knows of memory is taken away");
    }

    #[test]
    fn no_more_wait_than_a_peer_may_have_to_be_told() {
        let mut channel = Channel::new();
        let sent = (0..).find(|key| channel.send(Control::Unrule { key: *key }).is_err());
        assert_eq!((sent, channel.waiting()), (Some(MOST as u32), MOST));
    }

    #[test]
    fn waits_double() {
        assert_eq!([0, 1, 6, 7, u32::MAX].map(|n| timeout(n) / FIRST_TIMEOUT), [1, 2, 64, 64, 64]);
        let tries = [0, 1, 6, 7, 31, 32, 64, 128, u32::MAX];
        assert_eq!(tries.map(|n| seldom(n) / FIRST_TIMEOUT), [1, 2, 64, 64, 64, 128, 256, 1024, 1024]);
    }
}
