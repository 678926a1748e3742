//! Congestion control (1RMA, section 6, algorithm 1): windows in operations, moved by delays and by failures.
//!
//! There is one window for congestion at this host's card, which the issue delay shows, and one for each
//! destination and direction, which the rest of the delay shows. The smaller one says how many operations
//! may be under way to the destination, and how fast they follow each other.

use starverbs_core::Nanos;

use crate::command::{Completion, HASTES};
use crate::types::Status;

/// The constants of algorithm 1. Those that the paper does not give say so.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CongestionSettings {
    /// Additive increase, operations a round trip: AI
    pub increase: f64,
    /// Least factor of a decrease by delay: MD
    pub most_decrease: f64,
    /// How much of a delay's excess a decrease takes away: beta
    pub beta: f64,
    /// Factor of a decrease by a failure: TIMEOUT_DECR
    pub failure_decrease: f64,
    /// Smallest window: CWND_MIN (not given)
    pub least: f64,
    /// Largest window: CWND_MAX (not given)
    pub most: f64,
    /// Window of a destination that nothing is known of (not given; the paper's ramp in 8 round trips to
    /// 15 operations by 0.25 each implies about 13)
    pub initial: f64,
    /// Target of the issue delay, ns (not given)
    pub local_target: Nanos,
    /// Target of the rest of the delay, of a READ, ns (not given; a tenth of a round trip is about one 4 KB
    /// operation that waits)
    pub remote_target: Nanos,
    /// The round trip that is assumed before one was seen, ns; a WRITE's answer takes two
    pub rtt: Nanos,
    /// How long commands wait for their answers; `None`: as long as the card waits
    pub timeouts: Option<Timeouts>,
    /// Whether local congestion is told from remote. Without it all delay counts as remote, as in the paper's
    /// figure 15(c)
    pub separate: bool,
}

/// Timeouts that follow measured round trips. The paper's are those of one fabric.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Timeouts {
    /// The card's, ns; others are halves of it
    pub longest: Nanos,
    /// The shortest, ns: what a peer may take that waits for a CPU
    pub least: Nanos,
    /// Of a destination that has not answered yet, ns
    pub unknown: Nanos,
}

/// Round trips, with four times their deviation, that a command waits (1RMA, section 6.1).
const ROUND_TRIPS: Nanos = 4;
/// How often a timeout doubles from one try to the next.
const DOUBLINGS: u8 = 4;

impl Timeouts {
    /// How often the card's timeout is halved, to be no shorter than what is wanted.
    fn haste(&self, wanted: Nanos) -> u8 {
        (0..HASTES).rev().find(|haste| self.longest >> haste >= wanted).unwrap_or(0)
    }
}

impl CongestionSettings {
    /// For a fabric with such a round trip.
    pub fn of_rtt(rtt: Nanos) -> Self {
        CongestionSettings {
            increase: 0.25,
            most_decrease: 0.5,
            beta: 0.8,
            failure_decrease: 0.1,
            least: 0.01,
            most: 32.0,
            initial: 13.0,
            local_target: rtt / 5,
            remote_target: rtt * 11 / 10,
            rtt,
            timeouts: None,
            separate: true,
        }
    }
}

impl Default for CongestionSettings {
    /// The paper's fabric: 5 us.
    fn default() -> Self {
        CongestionSettings::of_rtt(5_000)
    }
}

/// A congestion window: how many operations may be under way. Less than one: one, and then a pause.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CongestionWindow {
    size: f64,
    /// When it was last decreased
    decreased: Option<Nanos>,
}

impl CongestionWindow {
    /// One of `size` operations.
    pub const fn new(size: f64) -> Self {
        CongestionWindow { size, decreased: None }
    }

    /// Its size in operations.
    pub const fn size(&self) -> f64 {
        self.size
    }

    /// An operation succeeded after `delay`.
    pub fn on_success(
        &mut self,
        settings: &CongestionSettings,
        now: Nanos,
        delay: Nanos,
        target: Nanos,
        rtt: Nanos,
    ) {
        if delay < target {
            let share = if self.size >= 1.0 { self.size } else { 1.0 };
            self.size = (self.size + settings.increase / share).min(settings.most);
        } else if delay > 0 && self.may_decrease(now, rtt) {
            let excess = (delay - target) as f64 / delay as f64;
            self.decrease(settings, now, (1.0 - settings.beta * excess).max(settings.most_decrease));
        }
    }

    /// An operation failed for congestion.
    pub fn on_failure(&mut self, settings: &CongestionSettings, now: Nanos, rtt: Nanos) {
        if self.may_decrease(now, rtt) {
            self.decrease(settings, now, settings.failure_decrease);
        }
    }

    /// Whether it has not been decreased within a round trip.
    fn may_decrease(&self, now: Nanos, rtt: Nanos) -> bool {
        self.decreased.is_none_or(|at| now.saturating_sub(at) >= rtt)
    }

    fn decrease(&mut self, settings: &CongestionSettings, now: Nanos, factor: f64) {
        self.size = (self.size * factor).max(settings.least);
        self.decreased = Some(now);
    }
}

/// What is known of a destination, in one direction.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Remote {
    window: CongestionWindow,
    /// Smoothed delay beyond the issue delay, ns
    rtt: f64,
    /// Smoothed deviation from that; `None`: nothing was measured
    deviation: Option<f64>,
    /// What that delay should be below, ns
    target: Nanos,
}

impl Remote {
    /// Nothing yet. An answer takes so many round trips.
    pub fn new(settings: &CongestionSettings, round_trips: u32) -> Self {
        let more = Nanos::from(round_trips.saturating_sub(1)) * settings.rtt;
        let rtt = (settings.rtt + more) as f64;
        let target = settings.remote_target + more;
        Remote { window: CongestionWindow::new(settings.initial), rtt, deviation: None, target }
    }

    /// Its window.
    pub const fn window(&self) -> &CongestionWindow {
        &self.window
    }

    /// Smoothed round trip, ns.
    pub fn rtt(&self) -> Nanos {
        (self.rtt as Nanos).max(1)
    }

    /// The haste of a command that was tried so often before.
    pub fn haste(&self, settings: &CongestionSettings, tries: u8) -> u8 {
        let Some(timeouts) = &settings.timeouts else { return 0 };
        let first = match self.deviation {
            Some(deviation) => {
                let trip = (self.rtt + 4.0 * deviation) as Nanos;
                trip.saturating_mul(ROUND_TRIPS).max(timeouts.least)
            }
            None => timeouts.unknown,
        };
        timeouts.haste(first.saturating_mul(1 << tries.min(DOUBLINGS)))
    }

    /// Operations that may be under way to it, with the host's window `local`.
    pub fn limit(&self, local: &CongestionWindow) -> f64 {
        self.window.size.min(local.size)
    }

    /// Nanoseconds from an operation of `size` bytes, of 4096, to the next one.
    pub fn pause(&self, local: &CongestionWindow, size: u32) -> Nanos {
        let whole = self.rtt / self.limit(local).max(f64::MIN_POSITIVE);
        (whole * f64::from(size) / f64::from(crate::types::MAX_OP)) as Nanos
    }

    /// What a completion says of the host's congestion and of the destination's.
    pub fn on_completion(
        &mut self,
        settings: &CongestionSettings,
        local: &mut CongestionWindow,
        now: Nanos,
        completion: &Completion,
    ) {
        let (issue, total) = (Nanos::from(completion.issue_delay), Nanos::from(completion.total_delay));
        let rest = total.saturating_sub(issue);
        let (at_host, beyond) = if settings.separate { (issue, rest) } else { (0, total) };
        let rtt = self.rtt();
        match completion.status {
            Status::Ok => {
                let off = rest as f64 - self.rtt;
                let deviation = self.deviation.unwrap_or(0.0);
                self.deviation = Some(deviation + (off.abs() - deviation) / 4.0);
                self.rtt += off / 8.0;
                local.on_success(settings, now, at_host, settings.local_target, rtt);
                self.window.on_success(settings, now, beyond, self.target, rtt);
            }
            Status::DispatchTimeout if settings.separate => local.on_failure(settings, now, rtt),
            Status::Timeout | Status::Nack | Status::DispatchTimeout => {
                self.window.on_failure(settings, now, rtt)
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::types::OneRmaOp;

    const RTT: Nanos = 5_000;

    fn completion(status: Status, issue_delay: u32, total_delay: u32) -> Completion {
        Completion { slot: 0, status, op: OneRmaOp::Read, bytes: 4096, issue_delay, total_delay, sequence: 1 }
    }

    #[test]
    fn a_quarter_of_an_operation_a_round_trip() {
        let (settings, mut window) = (CongestionSettings::default(), CongestionWindow::new(4.0));
        (0..4).for_each(|_| window.on_success(&settings, 0, 0, 1000, RTT));
        assert!((4.24..4.25).contains(&window.size()), "{}", window.size());
        let mut small = CongestionWindow::new(0.5);
        small.on_success(&settings, 0, 0, 1000, RTT);
        assert_eq!(small.size(), 0.75, "below one each operation adds all of it");
    }

    #[test]
    fn a_decrease_follows_the_excess_and_comes_once_a_round_trip() {
        let (settings, mut window) = (CongestionSettings::default(), CongestionWindow::new(10.0));
        window.on_success(&settings, 0, 1250, 1000, RTT);
        assert!((window.size() - 8.4).abs() < 1e-9, "1 - 0.8 * 250 / 1250");
        window.on_success(&settings, RTT - 1, 100_000, 1000, RTT);
        window.on_failure(&settings, RTT - 1, RTT);
        assert!((window.size() - 8.4).abs() < 1e-9, "not twice");
        window.on_success(&settings, RTT, 100_000, 1000, RTT);
        assert!((window.size() - 4.2).abs() < 1e-9, "half at most");
        window.on_failure(&settings, 2 * RTT, RTT);
        assert!((window.size() - 0.42).abs() < 1e-9, "a tenth");
    }

    #[test]
    fn each_failure_is_its_own_side_s() {
        for (status, local, remote) in [
            (Status::DispatchTimeout, 1.3, 13.0),
            (Status::Timeout, 13.0, 1.3),
            (Status::Nack, 13.0, 1.3),
            (Status::RemoteAuthenticationFailure, 13.0, 13.0),
        ] {
            let settings = CongestionSettings::default();
            let (mut here, mut there) = (CongestionWindow::new(13.0), Remote::new(&settings, 1));
            there.on_completion(&settings, &mut here, 0, &completion(status, 0, 20_000));
            assert!((here.size() - local).abs() < 1e-9, "{status:?}");
            assert!((there.window().size() - remote).abs() < 1e-9, "{status:?}");
        }
    }

    #[test]
    fn issue_delay_is_local_and_the_rest_remote() {
        let settings = CongestionSettings::default();
        let (mut here, mut there) = (CongestionWindow::new(13.0), Remote::new(&settings, 1));
        there.on_completion(&settings, &mut here, 0, &completion(Status::Ok, 4000, 9000));
        assert!(here.size() < 13.0 && there.window().size() > 13.0);
        let together = CongestionSettings { separate: false, ..settings };
        let (mut here, mut there) = (CongestionWindow::new(13.0), Remote::new(&settings, 1));
        there.on_completion(&together, &mut here, 0, &completion(Status::Ok, 4000, 9000));
        assert!(here.size() > 13.0 && there.window().size() < 13.0);
    }

    #[test]
    fn timeouts_follow_round_trips() {
        let timeouts = Timeouts { longest: 640_000_000, least: 2_500_000, unknown: 20_000_000 };
        let settings = CongestionSettings { timeouts: Some(timeouts), ..CongestionSettings::of_rtt(100_000) };
        let (mut here, mut there) = (CongestionWindow::new(13.0), Remote::new(&settings, 1));
        let wait = |there: &Remote, tries| timeouts.longest >> there.haste(&settings, tries);
        assert_eq!(
            [0, 1, 4, 5, 7].map(|tries| wait(&there, tries)),
            [20, 40, 320, 320, 320].map(|ms| ms * 1_000_000)
        );
        (0..100).for_each(|_| {
            there.on_completion(&settings, &mut here, 0, &completion(Status::Ok, 0, 50_000));
        });
        assert_eq!(
            [0, 3].map(|tries| wait(&there, tries)),
            [2_500_000, 20_000_000],
            "no less than the least"
        );
        there.on_completion(&settings, &mut here, 0, &completion(Status::Ok, 0, 30_000_000));
        assert!(wait(&there, 0) >= 120_000_000, "four of the slow one");
        (0..100).for_each(|_| {
            there.on_completion(&settings, &mut here, 0, &completion(Status::Ok, 0, 30_000_000));
        });
        assert_eq!(wait(&there, 0), 160_000_000, "four round trips of 30 ms");
        assert_eq!(there.haste(&CongestionSettings::default(), 0), 0, "the card's own");
    }

    #[test]
    fn the_pause_is_the_share_of_a_round_trip() {
        let settings = CongestionSettings::default();
        let (local, remote) = (CongestionWindow::new(10.0), Remote::new(&settings, 1));
        assert_eq!(remote.pause(&local, 4096), 500);
        assert_eq!(remote.pause(&local, 64), 7);
        assert_eq!(Remote::new(&settings, 2).pause(&local, 4096), 1000, "a WRITE");
    }

    proptest! {
        #[test]
        fn windows_stay_within_their_bounds(
            events in prop::collection::vec((0..8u8, any::<u16>(), any::<u16>(), 0..20_000u64), 1..300),
        ) {
            let settings = CongestionSettings::default();
            let (mut here, mut there) = (CongestionWindow::new(13.0), Remote::new(&settings, 2));
            let mut now = 0;
            for (status, issue, rest, later) in events {
                now += later;
                let status = Status::from_code(status).unwrap();
                let total = u32::from(issue) + u32::from(rest);
                there.on_completion(&settings, &mut here, now, &completion(status, issue.into(), total));
                for size in [here.size(), there.window().size()] {
                    prop_assert!((settings.least..=settings.most).contains(&size));
                }
                prop_assert!(there.rtt() >= 1 && there.pause(&here, 4096) < 1 << 40);
            }
        }
    }
}
