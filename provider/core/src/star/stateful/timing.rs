//! How long answers take, and so how long to wait for one (RFC 6298), and for how long a late copy may still arrive.

use crate::types::Nanos;

/// How a connection waits. Nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Waits {
    /// Before any answer has come
    pub first: Nanos,
    /// Shortest
    pub least: Nanos,
    /// Longest
    pub most: Nanos,
    /// Times that a packet is repeated before SL is given up, if it has also been silent for `patience`
    pub tries: u8,
    /// What the program allowed with timeout and retry_cnt; 0: for ever
    pub patience: Nanos,
    /// Silence after which SL is asked whether it lives, when nothing is under way and something waits for it
    pub keepalive: Nanos,
    /// A copy of a packet that is late may be under way for so long at least
    pub lifetime: Nanos,
}

impl Default for Waits {
    fn default() -> Self {
        Waits {
            first: 1_000_000,
            least: 200_000,
            most: 100_000_000,
            tries: 7,
            patience: 500_000_000,
            keepalive: 1_000_000_000,
            lifetime: 100_000,
        }
    }
}

/// What was seen of the way to SL and back.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rtt {
    /// Smoothed; 0: none was seen
    smooth: Nanos,
    deviation: Nanos,
    longest: Nanos,
    /// Timeouts in a row
    backoff: u8,
}

impl Rtt {
    /// An answer to a packet that was sent once came after so long.
    pub(super) fn seen(&mut self, rtt: Nanos) {
        let rtt = rtt.max(1);
        if self.smooth == 0 {
            (self.smooth, self.deviation) = (rtt, rtt / 2);
        } else {
            self.deviation = (3 * self.deviation + self.smooth.abs_diff(rtt)) / 4;
            self.smooth = (7 * self.smooth + rtt) / 8;
        }
        self.longest = self.longest.max(rtt);
        self.backoff = 0;
    }

    /// Nothing came in time.
    pub(super) fn timed_out(&mut self) {
        self.backoff = self.backoff.saturating_add(1).min(20);
    }

    /// Something came, of which nobody knows to which transmission it was the answer.
    pub(super) fn alive(&mut self) {
        self.backoff = 0;
    }

    fn base(&self, waits: &Waits) -> Nanos {
        if self.smooth == 0 {
            return waits.first;
        }
        (self.smooth + 4 * self.deviation).max(waits.least)
    }

    /// How long to wait for the answer to a packet that leaves now.
    pub(super) fn timeout(&self, waits: &Waits) -> Nanos {
        (self.base(waits) << self.backoff).min(waits.most)
    }

    /// How long a copy of a packet may be under way: twice the longest way there and back (hole 6), and what is waited for an
    /// answer where that is more.
    pub(super) fn lifetime(&self, waits: &Waits) -> Nanos {
        (2 * self.longest).max(self.base(waits)).max(waits.lifetime)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_follows_what_is_seen_and_doubles_in_silence() {
        let (waits, mut rtt) = (Waits::default(), Rtt::default());
        assert_eq!(rtt.timeout(&waits), waits.first);
        for _ in 0..100 {
            rtt.seen(1_000_000);
        }
        let base = rtt.timeout(&waits);
        assert!((1_000_000..1_100_000).contains(&base), "{base}");
        rtt.timed_out();
        rtt.timed_out();
        assert_eq!(rtt.timeout(&waits), 4 * base);
        for _ in 0..300 {
            rtt.timed_out();
        }
        assert_eq!(rtt.timeout(&waits), waits.most);
        rtt.seen(10);
        assert!(rtt.timeout(&waits) <= 2 * base);
    }

    #[test]
    fn a_copy_may_be_as_late_as_the_longest_way() {
        let (waits, mut rtt) = (Waits::default(), Rtt::default());
        rtt.seen(5_000_000);
        for _ in 0..1000 {
            rtt.seen(10_000);
        }
        assert_eq!(rtt.lifetime(&waits), 10_000_000);
    }
}
