//! Which WQEs of a queue SF has stored, and when one is to be sent again.

use alloc::boxed::Box;

use starverbs_core::room::filled;
use starverbs_core::transport::patience;
use starverbs_core::{Nanos, NicError, Psn};

use crate::channel::seldom;

/// Later WQEs that SF has stored before the oldest one is taken for lost, without waiting for its time.
const AHEAD: u8 = 3;

/// A deadline that is noticed later than this, ns, was missed by this end itself: what came meanwhile has not
/// been read.
pub(super) const LATE: Nanos = 500_000;

/// The longest time until the first repetition.
const LONGEST_FIRST: Nanos = 16_000_000;

/// How long a peer may be silent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Patience {
    /// Tries at least
    pub tries: u32,
    /// Time at least. `None`: for ever
    pub time: Option<Nanos>,
}

impl Patience {
    /// As a QP's `timeout` and `retry_cnt` say for RC (IBTA 9.7.6.1.3), and seven tries
    /// (docs/star.md, "Errors").
    pub fn of(timeout: u8, retry_cnt: u8) -> Self {
        Patience { tries: 7, time: patience(timeout, retry_cnt) }
    }
    /// Whether it has come to an end.
    pub(super) fn is_over(&self, tries: u32, waited: Nanos) -> bool {
        tries >= self.tries && self.time.is_some_and(|time| waited >= time)
    }
}

/// Sequences of one queue. They count on past 24 bits here; `una <= low <= next`, and `next - una <= depth`.
#[derive(Debug)]
pub(super) struct QueueTrack {
    /// Oldest that is not complete
    pub(super) una: u32,
    /// Next to be sent for the first time
    pub(super) next: u32,
    /// Oldest that SF has not acknowledged
    low: u32,
    stored: StoredBits,
    depth: u32,
    /// When `low` is sent again
    due: Option<Nanos>,
    /// It was put off as this end itself was late
    stall_discounted: bool,
    /// Times that `low` was sent again, and since when it waits
    tries: u32,
    since: Nanos,
    /// Later ones stored since `low` was last sent
    ahead: u8,
    /// Time until SF acknowledges a WQE, ns: the longest, which decays
    ack_time: u32,
}

/// One bit a slot: SF has stored its WQE. Those of the first slots, all of most queues, lie here, and cost no
/// cache line of their own.
#[derive(Debug)]
struct StoredBits {
    first: u64,
    more: Box<[u64]>,
}

impl StoredBits {
    /// For so many slots, a power of two. `Exhausted`: no memory.
    fn new(slots: u32) -> Result<Self, NicError> {
        let more = filled((slots.div_ceil(u64::BITS) as usize).saturating_sub(1))?;
        Ok(StoredBits { first: 0, more })
    }

    fn word(&mut self, slot: u32) -> Option<&mut u64> {
        match (slot / u64::BITS) as usize {
            0 => Some(&mut self.first),
            at => self.more.get_mut(at - 1),
        }
    }

    fn has(&self, slot: u32) -> bool {
        let word = match (slot / u64::BITS) as usize {
            0 => Some(&self.first),
            at => self.more.get(at - 1),
        };
        word.is_some_and(|bits| bits & 1 << (slot % u64::BITS) != 0)
    }

    fn set(&mut self, slot: u32, stored: bool) {
        let bit = 1 << (slot % u64::BITS);
        if let Some(bits) = self.word(slot) {
            *bits = if stored { *bits | bit } else { *bits & !bit };
        }
    }
}

/// What a deadline that is due means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum DeadlineKind {
    /// Send what waits from this sequence on again
    Resend(u32),
    /// The peer is gone
    GiveUp,
}

impl QueueTrack {
    /// A queue of `depth`, a power of two. `Exhausted`: no memory.
    pub(super) fn new(depth: u32) -> Result<Self, NicError> {
        Ok(QueueTrack {
            una: 0,
            next: 0,
            low: 0,
            stored: StoredBits::new(depth)?,
            depth,
            due: None,
            stall_discounted: false,
            tries: 0,
            since: 0,
            ahead: 0,
            ack_time: 0,
        })
    }

    /// Bytes beside the struct.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.stored.more)
    }

    /// Whether one more may be sent.
    pub(super) fn has_room(&self) -> bool {
        self.next.wrapping_sub(self.una) < self.depth
    }

    fn slot(&self, seq: u32) -> u32 {
        seq & (self.depth - 1)
    }
    pub(super) fn is_stored(&self, seq: u32) -> bool {
        self.stored.has(self.slot(seq))
    }

    /// `next` was sent.
    pub(super) fn sent(&mut self, now: Nanos) {
        self.stored.set(self.slot(self.next), false);
        if self.low == self.next {
            self.begin(now);
        }
        self.next = self.next.wrapping_add(1);
    }

    fn begin(&mut self, now: Nanos) {
        (self.tries, self.since, self.ahead) = (0, now, 0);
        self.due = Some(now + self.wait());
    }

    /// Until the next try: twice what it takes SF, as what is repeated too early keeps a busy SF busy.
    fn wait(&self) -> Nanos {
        seldom(self.tries).max((2 * u64::from(self.ack_time)).min(LONGEST_FIRST) << self.tries.min(2))
    }

    /// The oldest was acknowledged. One that was sent again may have been lost: what it took before says
    /// nothing of how long SF takes.
    fn measure(&mut self, now: Nanos) {
        let again = self.due.filter(|_| self.tries > 0).map(|due| due.saturating_sub(self.wait()));
        let took = now.saturating_sub(again.unwrap_or(self.since));
        let took = u32::try_from(took).unwrap_or(u32::MAX);
        self.ack_time = took.max(self.ack_time - self.ack_time / 8);
    }

    /// SF has stored `seq`. True: the oldest seems to be lost, send it again.
    pub(super) fn store(&mut self, seq: Psn, now: Nanos) -> bool {
        let from_low = seq.since(Psn::new(self.low));
        if from_low < 0 || from_low as u32 >= self.next.wrapping_sub(self.low) {
            return false;
        }
        let seq = self.low.wrapping_add(from_low as u32);
        self.stored.set(self.slot(seq), true);
        if from_low > 0 {
            self.ahead = self.ahead.saturating_add(1);
            return self.ahead == AHEAD;
        }
        self.advance(now);
        false
    }

    /// SF has stored all before `upto`.
    pub(super) fn store_to(&mut self, upto: Psn, now: Nanos) {
        let ahead = upto.since(Psn::new(self.low));
        if ahead > 0 && ahead as u32 <= self.next.wrapping_sub(self.low) {
            self.low = self.low.wrapping_add(ahead as u32);
            self.measure(now);
            self.advance(now);
        }
    }

    /// All before `seq` are complete, and so have been stored.
    pub(super) fn complete(&mut self, seq: u32, now: Nanos) {
        self.una = seq;
        if (seq.wrapping_sub(self.low) as i32) > 0 {
            self.low = seq;
            self.measure(now);
            self.advance(now);
        }
    }

    /// `low` goes to the oldest that is not stored.
    fn advance(&mut self, now: Nanos) {
        if self.low != self.next && self.is_stored(self.low) {
            self.measure(now);
        }
        while self.low != self.next && self.is_stored(self.low) {
            self.low = self.low.wrapping_add(1);
        }
        if self.low == self.next { self.due = None } else { self.begin(now) }
    }

    /// Forgets what was sent.
    pub(super) fn stop(&mut self) {
        (self.una, self.low, self.due) = (self.next, self.next, None);
    }

    pub(super) fn deadline(&self) -> Option<Nanos> {
        self.due
    }

    /// Times that the oldest was sent again.
    pub(super) fn tries(&self) -> u32 {
        self.tries
    }
    /// Nothing is sent again until it is woken.
    pub(super) fn sleep(&mut self) {
        self.due = None;
    }
    /// SF has sent something: what waits is sent again.
    pub(super) fn wake(&mut self, now: Nanos) {
        if self.due.is_none() && self.low != self.next {
            self.begin(now);
        }
    }

    /// What to do now, if the deadline has passed.
    pub(super) fn poll(&mut self, now: Nanos, patience: &Patience) -> Option<DeadlineKind> {
        let due = self.due.filter(|due| *due <= now)?;
        let late = now - due;
        if late > LATE {
            /* what this end slept is no silence, however often it does */
            self.since = self.since.saturating_add(late).min(now);
        }
        self.stall_discounted = late > LATE && !self.stall_discounted;
        if self.stall_discounted {
            self.due = Some(now + LATE);
            return None;
        }
        if patience.is_over(self.tries, now.saturating_sub(self.since)) {
            self.due = None;
            return Some(DeadlineKind::GiveUp);
        }
        self.tries = self.tries.saturating_add(1);
        self.ahead = 0;
        self.due = Some(now + self.wait());
        Some(DeadlineKind::Resend(self.low))
    }

    /// From the oldest that SF has not stored on.
    pub(super) fn unanswered(&self) -> u32 {
        self.next.wrapping_sub(self.low)
    }

    /// How many from the oldest on SF has not stored, before the first that it has: they left together, and
    /// are lost together.
    pub(super) fn gap(&self) -> u32 {
        let stored = |n: &u32| self.is_stored(self.low.wrapping_add(*n));
        (0..self.unanswered()).find(stored).unwrap_or(self.unanswered())
    }

    /// The oldest that SF has not stored.
    pub(super) fn low(&self) -> u32 {
        self.low
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_sent_again() {
        let mut track = QueueTrack::new(8).unwrap();
        let patience = Patience::of(1, 0);
        (0..6).for_each(|_| track.sent(100));
        assert!(!track.store(Psn::new(2), 200) && !track.store(Psn::new(4), 200));
        assert!(track.store(Psn::new(5), 200), "three behind it are there");
        assert!(!track.store(Psn::new(9), 200), "never sent");
        assert_eq!((track.low(), track.gap(), track.poll(200, &patience)), (0, 2, None));
        assert_eq!(track.poll(1_000_100, &patience), Some(DeadlineKind::Resend(0)));
        track.store(Psn::new(0), 1_000_200);
        assert_eq!(
            (track.low(), track.deadline()),
            (1, Some(1_000_200 + seldom(0))),
            "the one before was lost, and SF took no time"
        );
        track.store(Psn::new(1), 1_000_200);
        assert_eq!(track.low(), 3);
        track.complete(6, 2_000_000);
        assert_eq!((track.low(), track.una, track.deadline()), (6, 6, None));
        (0..8).for_each(|_| track.sent(3_000_000));
        assert!(!track.has_room() && !track.is_stored(6) && !track.is_stored(13));
        assert_eq!(track.deadline(), Some(3_000_000 + 2 * 999_800), "SF took that long");
        let mut now = 3_000_000;
        for _ in 0..7 {
            now = track.deadline().unwrap();
            assert_eq!(track.poll(now, &patience), Some(DeadlineKind::Resend(6)));
        }
        assert_eq!(track.poll(now + seldom(7), &patience), Some(DeadlineKind::GiveUp));
        assert_eq!(track.poll(u64::MAX, &patience), None);
    }

    #[test]
    fn all_before_are_stored_at_once() {
        let mut track = QueueTrack::new(8).unwrap();
        (0..6).for_each(|_| track.sent(100));
        track.store(Psn::new(3), 200);
        track.store_to(Psn::new(7), 200);
        assert_eq!((track.low(), track.deadline()), (0, Some(1_000_100)), "more than were sent");
        track.store_to(Psn::new(3), 200);
        assert_eq!((track.low(), track.unanswered()), (4, 2), "and the one behind it");
        track.store_to(Psn::new(2), 300);
        assert_eq!(track.low(), 4, "late");
        track.store_to(Psn::new(6), 300);
        assert_eq!((track.low(), track.deadline()), (6, None));
    }

    #[test]
    fn a_local_stall_is_no_silence_of_the_peer() {
        let mut track = QueueTrack::new(8).unwrap();
        let patience = Patience { tries: 0, time: Some(2_000_000_000) };
        track.sent(100);
        let due = track.deadline().unwrap();
        let late = due + 5_000_000_000;
        assert_eq!(
            (track.poll(late, &patience), track.deadline()),
            (None, Some(late + LATE)),
            "it looks first"
        );
        assert_eq!(track.poll(late + LATE, &patience), Some(DeadlineKind::Resend(0)), "nothing had come");
        let due = track.deadline().unwrap();
        assert_eq!(track.poll(due + 2_000_000_000, &patience), None);
        assert_eq!(
            track.poll(due + 2_000_000_000 + LATE, &patience),
            Some(DeadlineKind::Resend(0)),
            "that was no silence"
        );
    }

    /// One that is late each time still gives a silent peer up, when it has left that so much time to answer.
    #[test]
    fn who_is_always_late_waits_for_as_many_tries() {
        let mut track = QueueTrack::new(8).unwrap();
        let patience = Patience { tries: 7, time: Some(2_000_000_000) };
        track.sent(100);
        let mut again = 0;
        let end = loop {
            let now = track.deadline().unwrap() + 90_000_000;
            match track.poll(now, &patience) {
                Some(DeadlineKind::GiveUp) => break now,
                Some(DeadlineKind::Resend(_)) => again += 1,
                None => assert!(now < 20_000_000_000, "it never decides"),
            }
        };
        assert!(again >= 32, "{again} tries in two seconds of 64 ms each");
        assert!(end > 2_000_000_000 + 32 * 90_000_000);
    }

    #[test]
    fn patience_is_rc_s() {
        assert!(!Patience::of(0, 7).is_over(1_000, u64::MAX), "no timeout: for ever");
        let patience = Patience::of(14, 1);
        let time = 2 * (4096 << 14) * 11 / 8;
        assert!(!patience.is_over(7, time - 1) && !patience.is_over(6, time));
        assert!(patience.is_over(7, time));
    }
}
