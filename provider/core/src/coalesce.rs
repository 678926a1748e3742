//! Doorbell coalescing: when a doorbell may wait, so that small messages of a queue pair, or of several,
//! share a flush (RFC 896's idea).
//!
//! Facts in, [`When`] out. Whoever defers a doorbell rings it before any other call to the card. The module
//! must not know where the facts come from: a queue pair of the card, an engine, or an end that
//! has left the card.

use crate::env::SendQueue;

/// Unacknowledged packets of a queue pair behind which its own small messages wait.
const UNACKED: i32 = 4;
/// Bytes in flight to a host, overhead included, behind which small messages of its other queue pairs wait.
const IN_FLIGHT: u32 = 16 * 512;
/// Requests without an answer, where those are counted, behind which small messages of others wait.
const UNANSWERED: u32 = 16;
/// Longest small message, bytes.
const SMALL: u32 = 512;
/// So many small messages make a batch worth sending.
const BATCH: u32 = 48;

/// What a queue pair has to send when its doorbell rings, and what is under way before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Backlog {
    /// Much, or long messages, or little is under way that it could wait for
    Due,
    /// A few small messages. So much of its own is unacknowledged that an ACK, or the timer, has the card
    /// send more
    AckClocked,
    /// A few small messages. Others have much under way, whose answers have the card run, but need not
    /// concern this one
    BehindOthers,
}

/// When a doorbell should reach the card.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum When {
    /// At once
    Now,
    /// At its next turn, whenever that is
    NextTurn,
    /// At its next turn, which somebody must see to soon
    Soon,
}

impl Backlog {
    /// Of a queue pair of which `unacked` packets, and of whose host `in_flight` bytes, are under way.
    /// `small`: [`is_small`].
    #[inline]
    pub fn of(unacked: i32, in_flight: u32, small: impl FnOnce() -> bool) -> Self {
        let ack_clocked = unacked >= UNACKED;
        if !(ack_clocked || is_much(in_flight)) || !small() {
            Backlog::Due
        } else if ack_clocked {
            Backlog::AckClocked
        } else {
            Backlog::BehindOthers
        }
    }

    /// Of one that counts requests without an answer, with all others of its kind.
    #[inline]
    pub fn of_requests(unanswered: u32, small: impl FnOnce() -> bool) -> Self {
        if are_many(unanswered) && small() { Backlog::BehindOthers } else { Backlog::Due }
    }

    /// Of one of many whose card has what doorbells need fetched while they wait: `unanswered` of each
    /// channel that it asks in. Whether it is small counts for nothing.
    #[inline]
    pub fn of_channels(many: bool, mut unanswered: impl Iterator<Item = u32>) -> Self {
        if many && unanswered.any(are_many) { Backlog::BehindOthers } else { Backlog::Due }
    }

    /// When it should reach the card. `may_sleep`: the program asked for an event, and may not come back
    /// before it.
    #[inline]
    pub fn when(self, may_sleep: bool) -> When {
        match self {
            Backlog::AckClocked => When::NextTurn,
            Backlog::BehindOthers if !may_sleep => When::Soon,
            Backlog::BehindOthers | Backlog::Due => When::Now,
        }
    }
}

/// Whether what is posted from `next` on is a few messages, the last of them small.
#[inline]
pub fn is_small(sq: &impl SendQueue, next: u32) -> bool {
    let posted = sq.posted();
    are_small(posted.wrapping_sub(next), || Some(sq.request(posted.wrapping_sub(1)).length))
}

/// The same, as who posts them sees it: how many, and how long the last one is, bytes.
#[inline]
pub fn are_small(count: u32, last: impl FnOnce() -> Option<u32>) -> bool {
    (1..BATCH).contains(&count) && last().is_some_and(|length| length <= SMALL)
}

/// Whether so many requests without an answer have small messages of others wait.
#[inline]
pub fn are_many(unanswered: u32) -> bool {
    unanswered >= UNANSWERED
}

/// Whether so many bytes are in flight to a host that small messages of its queue pairs wait.
#[inline]
pub fn is_much(in_flight: u32) -> bool {
    in_flight >= IN_FLIGHT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_messages_wait_behind_what_is_under_way() {
        let of = |unacked, in_flight, small| Backlog::of(unacked, in_flight, || small);
        assert_eq!(of(UNACKED, 0, true), Backlog::AckClocked);
        assert_eq!(of(UNACKED - 1, IN_FLIGHT, true), Backlog::BehindOthers);
        assert_eq!(of(UNACKED - 1, IN_FLIGHT - 1, true), Backlog::Due);
        assert_eq!(of(UNACKED, IN_FLIGHT, false), Backlog::Due);
        assert_eq!(Backlog::of_requests(UNANSWERED, || true), Backlog::BehindOthers);
        assert_eq!(Backlog::of_requests(UNANSWERED - 1, || true), Backlog::Due);
        let of = |many, counts: [u32; 2]| Backlog::of_channels(many, counts.into_iter());
        assert_eq!(of(true, [0, UNANSWERED]), Backlog::BehindOthers);
        assert_eq!(of(true, [UNANSWERED - 1; 2]), Backlog::Due);
        assert_eq!(of(false, [UNANSWERED; 2]), Backlog::Due);
    }

    #[test]
    fn a_program_that_may_sleep_leaves_nothing_behind_others() {
        assert_eq!([false, true].map(|sleeps| Backlog::BehindOthers.when(sleeps)), [When::Soon, When::Now]);
        assert_eq!([false, true].map(|sleeps| Backlog::AckClocked.when(sleeps)), [When::NextTurn; 2]);
        assert_eq!(Backlog::Due.when(false), When::Now);
    }
}
