//! How long answers take, and so how long to wait for one (RFC 6298), and for how long a late copy may still
//! arrive.

use crate::types::Nanos;

/// Shortest and longest time for which an answer is waited for, ns.
const LEAST_TIMEOUT: Nanos = 1_000_000;
const MOST_TIMEOUT: Nanos = 100_000_000;
/// Packets may change places on their way at least so far, ns.
const LEAST_ORDER: Nanos = 100_000;

/// For how long a long round trip is remembered at least; twice that at most.
const MEMORY: Nanos = 250_000_000;

/// Whether packets were lost on a way: ever, and in the last [`MEMORY`] or two.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LossSeen {
    ever: bool,
    /// Since the last answer
    fresh: bool,
    /// In this time and in the one before, and since when this one is
    seen: [bool; 2],
    since: Nanos,
}

impl LossSeen {
    /// Some were.
    pub(crate) fn note(&mut self) {
        (self.fresh, self.ever) = (true, true);
    }

    /// An answer came. After a rest, what was before is long ago.
    pub(crate) fn pass(&mut self, now: Nanos) {
        let passed = now.saturating_sub(self.since);
        if passed >= MEMORY {
            let [this, _] = self.seen;
            (self.seen, self.since) = ([false, this && passed < 2 * MEMORY], now);
        }
        let [this, _] = &mut self.seen;
        *this |= core::mem::take(&mut self.fresh);
    }

    /// Whether any was, ever.
    pub(crate) fn is_known(&self) -> bool {
        self.ever
    }

    /// Whether any was of late.
    pub(crate) fn is_recent(&self) -> bool {
        let [this, before] = self.seen;
        self.fresh || this || before
    }
}

/// What was seen of the way to a card and back. All connections that go there share it: one with little to
/// say knows what others have seen.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rtt {
    /// Smoothed; 0: none was seen
    smooth: Nanos,
    deviation: Nanos,
    /// The longest of this time and of the one before, and since when this one is
    longest: [Nanos; 2],
    since: Nanos,
    /// By how much packets were overtaken, likewise
    overtaken: [Nanos; 2],
    loss: LossSeen,
    /// Answers, up to as many as are needed to know how packets change places
    answers: u8,
}

impl Rtt {
    /// An answer to one transmission came after so long.
    pub fn seen(&mut self, now: Nanos, rtt: Nanos) {
        let rtt = rtt.max(1);
        if self.smooth == 0 {
            (self.smooth, self.deviation) = (rtt, rtt / 2);
        } else {
            self.deviation = (3 * self.deviation + self.smooth.abs_diff(rtt)) / 4;
            self.smooth = (7 * self.smooth + rtt) / 8;
        }
        if now.saturating_sub(self.since) >= MEMORY {
            let ([this, _], [by, _]) = (self.longest, self.overtaken);
            (self.longest, self.overtaken, self.since) = ([0, this], [0, by], now);
        }
        self.loss.pass(now);
        let [this, _] = &mut self.longest;
        *this = (*this).max(rtt);
    }

    /// An answer came behind the answer to what had left so much later; 0: behind none.
    pub fn was_overtaken(&mut self, by: Nanos) {
        self.answers = self.answers.saturating_add(1).min(ENOUGH);
        let [this, _] = &mut self.overtaken;
        *this = (*this).max(by);
    }

    /// Answers show that packets were lost.
    pub fn was_lost(&mut self) {
        self.loss.note();
    }

    /// Whether any was lost of late.
    pub fn is_lossy(&self) -> bool {
        self.loss.is_recent()
    }

    /// How much later something must have left whose answer shows that what left before is under way no more:
    /// packets of one connection take one way, and its peer handles them as they come. `None`: too little was
    /// seen to say so.
    pub fn order(&self) -> Option<Nanos> {
        let [this, before] = self.overtaken;
        (self.answers == ENOUGH).then(|| (2 * this.max(before)).max(LEAST_ORDER))
    }

    fn base(&self) -> Nanos {
        (self.smooth + 4 * self.deviation).max(LEAST_TIMEOUT)
    }

    /// How long to wait for the answer to a packet that leaves now, after so many timeouts in a row. Where
    /// nothing was lost of late, as long as the longest way at least: with many connections answers come in
    /// turns of their cards, which the smoothed time knows nothing of.
    pub fn timeout(&self, backoff: u8) -> Nanos {
        let ([this, before], base) = (self.longest, self.base());
        let base = if self.is_lossy() { base } else { base.max(this.max(before)) };
        (base << backoff.min(MOST_DOUBLINGS)).min(MOST_TIMEOUT)
    }

    /// After how much silence what is alone on its way to a card is asked for again, though nothing was heard
    /// of a loss: two round trips (the tail loss probe of RFC 8985, 7.2), where packets were lost of late.
    /// `None`: not before the timeout.
    pub fn probe_time(&self) -> Option<Nanos> {
        let probes = self.smooth != 0 && self.is_lossy();
        probes.then(|| (2 * self.smooth).max(PROBE_MIN))
    }

    /// How much later than others that left with it a packet may be answered: more, and it is lost.
    pub fn disorder(&self) -> Nanos {
        (self.smooth / 2).max(LEAST_DISORDER)
    }

    /// The packet lifetime, for which a copy of a packet may be under way: twice the longest recent round
    /// trip or the timeout without doubling, whichever is longer (docs/star.md, "Loss recovery").
    pub fn lifetime(&self) -> Nanos {
        let [this, before] = self.longest;
        (2 * this.max(before)).max(self.base())
    }
}

/// A probe goes after so much silence at least, ns: the peer may wait for its CPU.
pub(crate) const PROBE_MIN: Nanos = 200_000;
/// Answers after which it is known how packets change places.
const ENOUGH: u8 = 32;
/// Waits double so often at most.
const MOST_DOUBLINGS: u8 = 20;
/// Packets are taken to change places within this time, ns.
const LEAST_DISORDER: Nanos = 50_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_follows_what_is_seen_and_doubles_in_silence() {
        let mut rtt = Rtt::default();
        assert_eq!(rtt.timeout(0), LEAST_TIMEOUT);
        for _ in 0..100 {
            rtt.seen(1, 3_000_000);
        }
        let base = rtt.timeout(0);
        assert!((3_000_000..3_100_000).contains(&base), "{base}");
        assert_eq!(rtt.timeout(2), 4 * base);
        assert_eq!(rtt.timeout(u8::MAX), MOST_TIMEOUT);
        for _ in 0..100 {
            rtt.seen(1, 10);
        }
        assert_eq!(rtt.timeout(0), 3_000_000, "one took so long a moment ago");
        let mut lossy = rtt;
        lossy.was_lost();
        assert_eq!(lossy.timeout(0), LEAST_TIMEOUT, "it may be lost, and that is sooner known");
        assert_eq!((rtt.probe_time(), lossy.probe_time()), (None, Some(PROBE_MIN)));
        (0..100).for_each(|_| lossy.seen(1, 300_000));
        assert_eq!(lossy.probe_time().map(|time| time / 10_000), Some(59));
        rtt.seen(MEMORY, 10);
        rtt.seen(2 * MEMORY, 10);
        assert_eq!(rtt.timeout(0), LEAST_TIMEOUT);
    }

    #[test]
    fn a_copy_may_be_as_late_as_the_longest_way_of_late() {
        let mut rtt = Rtt::default();
        rtt.seen(1, 5_000_000);
        for n in 0..1000 {
            rtt.seen(n * MEMORY / 1000, 10_000);
        }
        assert_eq!(rtt.lifetime(), 10_000_000);
        rtt.seen(MEMORY + 1, 10_000);
        assert_eq!(rtt.lifetime(), 10_000_000, "a moment ago");
        rtt.seen(2 * MEMORY + 1, 10_000);
        assert_eq!(rtt.lifetime(), rtt.base(), "long ago");
    }

    #[test]
    fn order_is_what_was_seen() {
        let mut rtt = Rtt::default();
        rtt.seen(1, 10);
        (1..ENOUGH).for_each(|_| rtt.was_overtaken(0));
        assert_eq!(rtt.order(), None);
        rtt.was_overtaken(0);
        assert_eq!(rtt.order(), Some(LEAST_ORDER));
        rtt.was_overtaken(3_000_000);
        rtt.was_overtaken(2_000_000);
        rtt.seen(MEMORY, 10);
        assert_eq!(rtt.order(), Some(6_000_000));
        rtt.seen(3 * MEMORY, 10);
        rtt.seen(4 * MEMORY, 10);
        assert_eq!(rtt.order(), Some(LEAST_ORDER));
    }
}
