//! Control messages of one connection, one way and the other: each once, in order, one under way at a time.

use alloc::boxed::Box;
use alloc::collections::VecDeque;

use starverbs_core::room::boxed;
use starverbs_core::{Nanos, NicError, Psn, QPN_MASK};

use super::control::Control;
use super::registry::MAX_RULES;

/// First time after which something is sent again.
pub const FIRST_TIMEOUT: Nanos = 1_000_000;
/// Not due before [`ControlChannel::wake`].
const ASLEEP: Nanos = Nanos::MAX;
/// Messages that wait at most: all rules of a domain, added and removed, and some others.
const MOST: usize = 2 * MAX_RULES + 64;
/// Longest time between two of the first tries.
const LONGEST_TIMEOUT: Nanos = 64 * FIRST_TIMEOUT;

/// After so many tries, the time until the next: doubled up to 64 ms.
pub(super) fn timeout(tries: u32) -> Nanos {
    LONGEST_TIMEOUT.min(FIRST_TIMEOUT << tries.min(6))
}

/// The same, but doubled after every 32 tries, up to 1.024 s: an end that only receives may wait long for its
/// peer.
pub(super) fn seldom(tries: u32) -> Nanos {
    timeout(tries) << (tries / 32).min(4)
}

/// What a received message is in the order of messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arrival {
    /// The next: to be executed and answered
    Next,
    /// It was executed: to be answered
    Duplicate,
    /// One before it is missing: to be ignored
    Early,
}

/// A message to send, under its number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChannelMessage {
    /// Its sequence in the order of messages
    pub seq: Psn,
    /// What it says
    pub message: Control,
}

/// One end's messages.
#[derive(Clone, Debug, Default)]
pub struct ControlChannel {
    /// Those without an answer
    out: Option<Box<Outbox>>,
    /// Sequence of the oldest of `out`
    seq: Psn,
    /// Sequence of the peer's next message
    expected: Psn,
}

/// Memory for messages, of a channel that has none: whoever keeps it can send more, whatever comes.
#[derive(Debug)]
pub struct SpareOutbox(Box<Outbox>);

/// Messages of this end without an answer.
#[derive(Clone, Debug, Default)]
struct Outbox {
    all: VecDeque<Control>,
    /// When the oldest is sent again. `None`: it was not sent yet
    due: Option<Nanos>,
    /// Times that it was sent
    tries: u32,
    /// Since when it waits for its answer; local stalls are not counted
    since: Nanos,
}

impl ControlChannel {
    /// Without messages.
    pub fn new() -> Self {
        ControlChannel::default()
    }
    /// Bytes of memory that it takes.
    pub fn bytes(&self) -> usize {
        let of = |out: &Outbox| size_of_val(out) + out.all.capacity() * size_of::<Control>();
        self.out.as_deref().map_or(0, of)
    }
    fn all(&self) -> impl Iterator<Item = &Control> {
        self.out.iter().flat_map(|out| &out.all)
    }
    /// Adds a message. `Exhausted`: there is no memory, or too many wait.
    pub fn send(&mut self, message: Control) -> Result<(), NicError> {
        let out = match &mut self.out {
            Some(out) => out,
            none => none.insert(boxed(Outbox::default())?),
        };
        if out.all.len() >= MOST || out.all.try_reserve(1).is_err() {
            return Err(NicError::Exhausted);
        }
        out.all.push_back(message);
        Ok(())
    }
    /// As it is, but without messages, as the peer is gone. Messages of the peer can still be answered.
    #[must_use]
    pub fn silenced(&self) -> Self {
        let seq = self.seq.plus(self.waiting() as u32);
        ControlChannel { seq, expected: self.expected, out: None }
    }
    /// Whether this message has no answer yet.
    pub fn holds(&self, message: &Control) -> bool {
        self.all().any(|waiting| waiting == message)
    }
    /// Retracts all messages about memory, as another connection sends them. The peer may have the oldest: a
    /// KeepAlive takes its number.
    pub fn retract_memory(&mut self) {
        let Some(out) = &mut self.out else { return };
        if let Some(first) = out.all.front_mut().filter(|first| first.is_of_memory()) {
            *first = Control::KeepAlive;
        }
        out.all.retain(|message| !message.is_of_memory());
    }
    /// Retracts the rule of a key that is no more. The number of one that the peer may have stays in use, as
    /// in [`retract_memory`](ControlChannel::retract_memory). Gives how many messages were retracted.
    pub fn retract_rule(&mut self, key: u32) -> u32 {
        let is = |message: &Control| matches!(message, Control::Rule(rule) if rule.key == key);
        let pending = self.count(is);
        let Some(out) = self.out.as_mut().filter(|_| pending > 0) else { return 0 };
        if let Some(first) = out.all.front_mut().filter(|first| out.tries > 0 && is(first)) {
            *first = Control::KeepAlive;
        }
        out.all.retain(|message| !is(message));
        pending
    }
    /// Retracts what would have the peer begin, as this end is over. The number of one that the peer may have
    /// stays in use, as in [`retract_memory`](ControlChannel::retract_memory).
    pub fn end(&mut self) {
        let begins = |message: &Control| {
            matches!(message, Control::Setup(_) | Control::Rule(_) | Control::Begin { .. })
        };
        let Some(out) = &mut self.out else { return };
        if let Some(first) = out.all.front_mut().filter(|first| begins(first)) {
            *first = Control::KeepAlive;
        }
        out.all.retain(|message| !begins(message));
    }
    /// Messages of some kind that have no answer.
    pub fn count(&self, is: impl Fn(&Control) -> bool) -> u32 {
        self.all().filter(|message| is(message)).count() as u32
    }
    /// Messages without an answer.
    pub fn waiting(&self) -> usize {
        self.out.as_ref().map_or(0, |out| out.all.len())
    }
    /// Times that the oldest of them was sent.
    pub fn tries(&self) -> u32 {
        self.out.as_ref().map_or(0, |out| out.tries)
    }

    /// The message to send now.
    pub fn poll(&mut self, now: Nanos) -> Option<ChannelMessage> {
        let out = self.out.as_mut()?;
        let message = *out.all.front()?;
        if out.due.is_some_and(|due| now < due) {
            return None;
        }
        out.since = if out.due.is_none() { now } else { out.since + out.local_stall(now) };
        out.due = Some(now + seldom(out.tries));
        out.tries = out.tries.saturating_add(1);
        Some(ChannelMessage { seq: self.seq, message })
    }

    /// When there is something to send.
    #[inline]
    pub fn deadline(&self) -> Option<Nanos> {
        let out = self.out.as_ref()?;
        out.all.front().map(|_| out.due.unwrap_or(0)).filter(|due| *due != ASLEEP)
    }

    /// For how long the oldest message, if it was sent, has been due to be sent again, ns.
    pub fn local_stall(&self, now: Nanos) -> Nanos {
        self.out.as_ref().map_or(0, |out| out.local_stall(now))
    }
    /// For how long the oldest message has had no answer, ns, without local stalls: then the peer was not
    /// asked, and its answers were not read.
    pub fn waited(&self, now: Nanos) -> Nanos {
        let due = |out: &Outbox| out.due.map(|due| due.min(now).saturating_sub(out.since));
        self.out.as_deref().and_then(due).unwrap_or(0)
    }
    /// The wait for the answer begins now: nobody waited for it so far.
    pub fn restart_wait(&mut self, now: Nanos) {
        if let Some(out) = &mut self.out {
            out.since = now;
        }
    }
    /// The oldest message, which is due, is sent again at `due`, not yet.
    pub fn postpone(&mut self, now: Nanos, due: Nanos) {
        if let Some(out) = &mut self.out {
            out.since += out.local_stall(now);
            out.due = Some(due);
        }
    }

    /// Sends nothing, until it is woken: nobody waits for an answer.
    pub fn sleep(&mut self) {
        if let Some(out) = &mut self.out {
            out.due = Some(ASLEEP);
        }
    }
    /// Ends [`sleep`](ControlChannel::sleep): the peer has sent something, or a send waits for it.
    pub fn wake(&mut self, now: Nanos) {
        if let Some(out) = self.out.as_mut().filter(|out| out.due == Some(ASLEEP)) {
            (out.due, out.since) = (Some(now), now);
        }
    }

    /// An answer came; gives the message, if it is the first answer to it.
    pub fn answered(&mut self, seq: Psn) -> Option<Control> {
        let out = self.out.as_mut().filter(|out| seq == self.seq && out.tries > 0)?;
        (out.due, out.tries) = (None, 0);
        self.seq = self.seq.plus(1);
        out.all.pop_front()
    }
    /// Gives its memory away if no message waits: the next one may find none. At rest nothing is read but the
    /// channel itself.
    pub fn rest(&mut self) -> Option<SpareOutbox> {
        self.out.take_if(|out| out.all.is_empty()).map(SpareOutbox)
    }
    /// Takes this memory for the next message, unless it has some.
    pub fn reuse(&mut self, spare: &mut Option<SpareOutbox>) {
        if self.out.is_none() {
            self.out = spare.take().map(|SpareOutbox(out)| out);
        }
    }

    /// Whether a message of the peer is the next. It is not taken yet: see
    /// [`accept`](ControlChannel::accept).
    pub fn arrival(&self, seq: Psn) -> Arrival {
        match seq.since(self.expected) {
            0 => Arrival::Next,
            1.. => Arrival::Early,
            _ => Arrival::Duplicate,
        }
    }
    /// Sequence of the last message of the peer that has been done.
    pub fn accepted(&self) -> Psn {
        self.expected.plus(QPN_MASK)
    }
    /// The next message of the peer has been done.
    pub fn accept(&mut self) {
        self.expected = self.expected.plus(1);
    }
}

impl Outbox {
    /// As of [`ControlChannel::local_stall`].
    fn local_stall(&self, now: Nanos) -> Nanos {
        let due = self.due.filter(|_| !self.all.is_empty());
        due.map_or(0, |due| now.saturating_sub(due))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered(seq: u32, message: Control) -> Option<ChannelMessage> {
        Some(ChannelMessage { seq: Psn::new(seq), message })
    }

    #[test]
    fn each_message_once_and_in_order() {
        let (mut a, mut b) = (ControlChannel::new(), ControlChannel::new());
        assert_eq!((a.poll(0), a.deadline()), (None, None));
        a.send(Control::KeepAlive).unwrap();
        a.send(Control::Want { upto: 1 }).unwrap();
        assert_eq!(a.answered(Psn::new(0)), None, "nothing was sent yet");
        let first = a.poll(5);
        assert_eq!(first, numbered(0, Control::KeepAlive));
        assert_eq!((a.poll(5), a.deadline()), (None, Some(5 + FIRST_TIMEOUT)));
        assert_eq!(a.poll(5 + FIRST_TIMEOUT), first, "again");
        assert_eq!(a.tries(), 2);
        assert_eq!((b.arrival(Psn::new(0)), b.arrival(Psn::new(1))), (Arrival::Next, Arrival::Early));
        b.accept();
        assert_eq!(b.arrival(Psn::new(0)), Arrival::Duplicate);
        assert_eq!(a.answered(Psn::new(0)), Some(Control::KeepAlive));
        assert_eq!(a.answered(Psn::new(0)), None);
        assert_eq!(a.poll(9), numbered(1, Control::Want { upto: 1 }));
        a.send(Control::ResendRules).unwrap();
        assert!(a.holds(&Control::ResendRules) && !a.holds(&Control::KeepAlive));
        assert_eq!(a.answered(Psn::new(1)), Some(Control::Want { upto: 1 }));
        assert_eq!((a.waiting(), a.poll(9)), (1, numbered(2, Control::ResendRules)));
    }

    /// One that gets no CPU asks seldom, and has not waited for longer than it left its peer time to answer.
    #[test]
    fn a_local_stall_is_no_silence_of_the_peer() {
        let (mut channel, late) = (ControlChannel::new(), 700 * FIRST_TIMEOUT);
        channel.send(Control::KeepAlive).unwrap();
        let mut now = 1_000 * FIRST_TIMEOUT;
        let mut waits = 0;
        for tries in 0..9 {
            assert!(channel.poll(now).is_some());
            waits += timeout(tries);
            now = channel.deadline().unwrap() + late;
            assert_eq!((channel.local_stall(now), channel.waited(now)), (late, waits));
        }
        channel.postpone(now, now + 1);
        assert_eq!((channel.local_stall(now + 1), channel.waited(now + 1)), (0, waits + 1));
        channel.restart_wait(now + 1);
        assert_eq!(channel.waited(now + 1), 0);
        assert!(channel.poll(now + 1).is_some());
        channel.answered(Psn::new(0)).expect("it was sent");
        assert_eq!((channel.waited(now + 2), channel.local_stall(now + 2)), (0, 0));
    }

    /// The number of a rule that was sent stays in use, and no other message about memory is sent.
    #[test]
    fn retracted_memory_is_not_sent_late() {
        let mut channel = ControlChannel::new();
        for message in [
            Control::Unrule { key: 1 },
            Control::Begin { known: None },
            Control::Bye { why: 0, recvs: Psn::default() },
        ] {
            channel.send(message).unwrap();
        }
        assert_eq!(channel.poll(0), numbered(0, Control::Unrule { key: 1 }));
        channel.retract_memory();
        assert_eq!(channel.poll(FIRST_TIMEOUT), numbered(0, Control::KeepAlive), "under its number");
        assert_eq!(channel.answered(Psn::new(0)), Some(Control::KeepAlive));
        channel.retract_memory();
        assert_eq!(channel.poll(FIRST_TIMEOUT), numbered(1, Control::Bye { why: 0, recvs: Psn::default() }));
        assert_eq!(channel.count(|_| true), 1);
    }

    /// A rule that ends before it was answered is not sent again.
    #[test]
    fn a_retracted_rule_is_not_sent() {
        let rule = |key| {
            let access = starverbs_core::Access::REMOTE_READ;
            let pd = starverbs_core::PdId(0);
            Control::Rule(starverbs_core::mr::MemoryRule {
                key,
                pd,
                qpn: 0,
                addr: 0,
                len: 1,
                iova: 0,
                access,
            })
        };
        let mut channel = ControlChannel::new();
        [1, 2, 3, 2].iter().for_each(|key| channel.send(rule(*key)).unwrap());
        assert_eq!(channel.poll(0), numbered(0, rule(1)));
        assert_eq!([2, 1, 4].map(|key| channel.retract_rule(key)), [2, 1, 0]);
        assert_eq!(channel.poll(FIRST_TIMEOUT), numbered(0, Control::KeepAlive), "under its number");
        channel.answered(Psn::new(0));
        assert_eq!((channel.retract_rule(3), channel.poll(0), channel.waiting()), (1, None, 0), "never sent");
        channel.send(rule(4)).unwrap();
        assert_eq!(channel.poll(0), numbered(1, rule(4)));
    }

    /// A connection that ends before its peer has its Setup does not begin there.
    #[test]
    fn an_end_that_is_over_does_not_begin_its_peer() {
        let mut channel = ControlChannel::new();
        for message in [Control::Begin { known: None }, Control::ResendRules, Control::Unrule { key: 1 }] {
            channel.send(message).unwrap();
        }
        channel.end();
        assert_eq!(channel.poll(0), numbered(0, Control::KeepAlive), "under its number");
        channel.answered(Psn::new(0));
        assert_eq!(channel.poll(0), numbered(1, Control::ResendRules));
        assert_eq!(channel.waiting(), 2, "what it knows of memory is taken away");
    }

    #[test]
    fn no_more_messages_wait_than_all_rules() {
        let mut channel = ControlChannel::new();
        let sent = (0..).find(|key| channel.send(Control::Unrule { key: *key }).is_err());
        assert_eq!((sent, channel.waiting()), (Some(MOST as u32), MOST));
    }

    /// One message after the other needs no more memory than the first.
    #[test]
    fn a_channel_takes_no_memory_at_rest_alone() {
        let mut channel = ControlChannel::new();
        channel.send(Control::Want { upto: 1 }).unwrap();
        let bytes = channel.bytes();
        assert!(bytes > 0 && channel.poll(1).is_some());
        assert!(channel.rest().is_none());
        assert_eq!(channel.answered(Psn::new(0)), Some(Control::Want { upto: 1 }), "it waited");
        channel.send(Control::KeepAlive).unwrap();
        assert!(channel.poll(2).is_some() && channel.answered(Psn::new(1)).is_some());
        assert_eq!(channel.bytes(), bytes);
        let mut spare = channel.rest();
        assert_eq!((channel.bytes(), channel.deadline()), (0, None));
        channel.reuse(&mut spare);
        channel.send(Control::KeepAlive).unwrap();
        assert!(spare.is_none() && channel.bytes() == bytes && channel.poll(3).is_some());
    }

    #[test]
    fn waits_double() {
        assert_eq!([0, 1, 6, 7, u32::MAX].map(|n| timeout(n) / FIRST_TIMEOUT), [1, 2, 64, 64, 64]);
        let tries = [0, 1, 6, 7, 31, 32, 64, 128, u32::MAX];
        assert_eq!(tries.map(|n| seldom(n) / FIRST_TIMEOUT), [1, 2, 64, 64, 64, 128, 256, 1024, 1024]);
    }
}
