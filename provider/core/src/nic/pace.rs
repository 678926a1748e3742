//! How fast UC and UD may go: probes whose answers show when a receiver has taken what was sent.
//!
//! Unreliable transports have no acknowledges, and a socket's receive buffer overflows without a
//! word. Behind every stretch of UC and UD packets towards a destination goes a probe, a frame of
//! the manufacturer's own op-code space; a starverbs card answers it once it has read it, and so all
//! that stood before it in the socket. What is not probed yet counts as in flight against the
//! path's window. A card that never answers (another make) is not paced at all, nor is a multicast group,
//! where many would answer.

use crate::types::{Gid, Nanos};

/// How long an answer may take before the probe counts as lost, ns.
pub(crate) const PROBE_TIMEOUT: Nanos = 2_000_000;
/// Probes without any answer after which a destination is taken for another make.
const MUTE_AFTER: u8 = 8;
/// Times that a probe goes to one who has answered before, until its stretch counts as lost: its process may
/// have no CPU, and what is sent meanwhile only fills its socket. RC waits for the same window, so not for
/// long.
const TRIES: u8 = 16;

/// A probe that has no answer yet.
#[derive(Clone, Copy)]
struct Probe {
    number: u32,
    /// Those that it covers
    bytes: u32,
    sent: Nanos,
}

/// Pacing towards one destination.
#[derive(Default)]
pub(crate) struct Pace {
    /// Bytes sent since the last probe
    since: u32,
    /// The probe under way
    probe: Option<Probe>,
    /// It is to be sent once more
    again: bool,
    number: u32,
    unanswered: u8,
    answers: bool,
    mute: bool,
}

impl Pace {
    /// Pacing towards `dgid`.
    pub(crate) fn towards(dgid: &Gid) -> Self {
        Pace { mute: dgid.is_multicast(), ..Pace::default() }
    }

    /// Whether the destination is not paced.
    pub(crate) fn mute(&self) -> bool {
        self.mute
    }

    /// A packet of `bytes` was sent.
    pub(crate) fn sent(&mut self, bytes: u32) {
        self.since += bytes;
    }

    /// Whether a probe should go now: enough was sent since the last, and none is under way, or that one once
    /// more.
    pub(crate) fn wants_probe(&self, stretch: u32) -> bool {
        !self.mute && (self.again || self.probe.is_none() && self.since >= stretch)
    }

    /// A probe goes; gives its number.
    pub(crate) fn probed(&mut self, now: Nanos) -> u32 {
        if core::mem::take(&mut self.again) {
            return self.number;
        }
        self.number = (self.number + 1) & 0x00ff_ffff;
        self.probe = Some(Probe { number: self.number, bytes: core::mem::take(&mut self.since), sent: now });
        self.number
    }

    /// An answer came: gives the bytes that are no longer in flight.
    pub(crate) fn answered(&mut self, number: u32) -> u32 {
        match self.probe {
            Some(probe) if probe.number == number => {
                (self.probe, self.again) = (None, false);
                self.unanswered = 0;
                self.answers = true;
                probe.bytes
            }
            _ => 0,
        }
    }

    /// Whether the probe under way, or the stretch never probed, is given up at `now`: gives the
    /// bytes that are no longer in flight.
    pub(crate) fn expired(&mut self, now: Nanos) -> u32 {
        let Some(Probe { bytes, sent, .. }) = &mut self.probe else { return 0 };
        if now.saturating_sub(*sent) < PROBE_TIMEOUT {
            return 0;
        }
        let bytes = *bytes;
        self.unanswered = self.unanswered.saturating_add(1);
        if self.answers && self.unanswered < TRIES {
            (*sent, self.again) = (now, true);
            return 0;
        }
        (self.probe, self.again) = (None, false);
        if !self.answers && self.unanswered >= MUTE_AFTER {
            self.mute = true;
            return bytes + core::mem::take(&mut self.since);
        }
        bytes
    }

    /// When to look again, if something is counted as in flight: at the end of the probe under way, or of one
    /// to come.
    pub(crate) fn owes(&self, now: Nanos) -> Option<Nanos> {
        self.deadline().or_else(|| (!self.mute && self.since > 0).then_some(now + PROBE_TIMEOUT))
    }

    /// When the probe under way expires.
    pub(crate) fn deadline(&self) -> Option<Nanos> {
        self.probe.map(|probe| probe.sent + PROBE_TIMEOUT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_free_what_they_cover() {
        let mut p = Pace::default();
        p.sent(1000);
        assert!(!p.wants_probe(2000));
        p.sent(1000);
        assert!(p.wants_probe(2000));
        let n = p.probed(10);
        p.sent(500);
        assert!(!p.wants_probe(100), "one at a time");
        assert_eq!(p.answered(n + 1), 0);
        assert_eq!(p.answered(n), 2000);
        assert_eq!(p.answered(n), 0, "a second answer covers nothing");
    }

    #[test]
    fn who_answers_late_is_asked_again() {
        let mut p = Pace::default();
        p.sent(10);
        let n = p.probed(0);
        assert_eq!(p.answered(n), 10, "it answers");
        p.sent(100);
        let n = p.probed(0);
        p.sent(200);
        let mut now = 0;
        for _ in 1..TRIES {
            assert!(!p.wants_probe(1), "one at a time");
            now += PROBE_TIMEOUT;
            assert_eq!(p.expired(now), 0);
            assert!(p.wants_probe(1000), "whatever was sent since");
            assert_eq!(p.probed(now), n, "an answer to any of them will do");
        }
        let mut silent = Pace { ..p };
        assert_eq!(p.answered(n), 100);
        assert_eq!(p.expired(now + PROBE_TIMEOUT), 0);
        assert!(p.wants_probe(200) && !p.wants_probe(201), "what came later has its own");
        /* gone, it holds nobody up: what is sent to it counts for one timeout, as long as it is silent */
        now += PROBE_TIMEOUT;
        assert_eq!(silent.expired(now), 100);
        assert_eq!(silent.probed(now), n + 1);
        assert_eq!(silent.expired(now + PROBE_TIMEOUT), 200);
        assert!(!silent.mute());
    }

    #[test]
    fn who_never_answers_is_not_paced() {
        let mut p = Pace::default();
        let mut now = 0;
        for _ in 0..MUTE_AFTER {
            assert!(!p.mute());
            p.sent(100);
            p.probed(now);
            assert_eq!(p.expired(now + PROBE_TIMEOUT - 1), 0);
            now += PROBE_TIMEOUT;
            assert_eq!(p.expired(now), 100);
        }
        assert!(p.mute());
    }
}
