//! Hurting the wire on purpose: `STARVERBS_FAULT`.
//!
//! Stands in front of a port's batch and decides for each frame, from one seeded random sequence, whether it
//! is lost, corrupted, sent twice, late or out of order. Owns the frames that it holds back. It must not know
//! what a frame means.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::time::Duration;

use starverbs_core::rng::SplitMix64;
use starverbs_core::{Av, Counters, Nanos};
use starverbs_settings::FaultSpec;

use crate::program::Payload;
use crate::tx::Datagram;

/// A frame held back for reordering whose successor does not come is sent after this.
const HOLD: Nanos = 1_000_000;

/// A frame with its payload, on its way out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct OutboundFrame {
    to: Av,
    port: u16,
    head: Vec<u8>,
    data: Vec<u8>,
    pad: u8,
    /// Random number that chooses a bit to turn over
    pub(crate) corrupt: Option<u64>,
}

impl OutboundFrame {
    /// Takes a frame's bytes into its own room.
    fn fill(&mut self, datagram: &Datagram<'_>, corrupt: Option<u64>) {
        (self.to, self.port, self.pad, self.corrupt) = (*datagram.to, datagram.port, datagram.pad, corrupt);
        self.head.clear();
        self.head.extend_from_slice(datagram.head);
        self.data.clear();
        self.data.extend_from_slice(datagram.data);
        for bytes in datagram.payload.iter() {
            let from = self.data.len();
            self.data.resize(from + bytes.len(), 0);
            bytes.copy_to(0, &mut self.data[from..]);
        }
    }

    /// As it came, its payload among the card's own bytes now.
    pub(crate) fn datagram(&self) -> Datagram<'_> {
        let OutboundFrame { to, port, head, data, pad, .. } = self;
        let payload = Payload::EMPTY;
        Datagram { to, port: *port, head, data, payload, pad: *pad, volatile: true }
    }
}

/// A frame that waits for its time.
struct Late {
    due: Nanos,
    order: u64,
    frame: OutboundFrame,
}

impl PartialEq for Late {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Late {}
impl PartialOrd for Late {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Late {
    /// The earliest is the greatest, as a heap gives its greatest first.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.due, other.order).cmp(&(self.due, self.order))
    }
}

/// What hurts frames.
pub(crate) struct WireFault {
    spec: FaultSpec,
    random: SplitMix64,
    order: u64,
    /// Came since the last release: their time is not known yet
    fresh: Vec<OutboundFrame>,
    late: BinaryHeap<Late>,
    held: Option<OutboundFrame>,
    held_until: Option<Nanos>,
    /// Frames that have left: their room is used again. A signal's handler that allocates, as perftest's
    /// does, would wait for ever if it came while this allocated.
    spare: Vec<OutboundFrame>,
}

impl std::fmt::Debug for WireFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fault").field("spec", &self.spec).finish_non_exhaustive()
    }
}

impl WireFault {
    /// What `spec` asks for; `None` if that is nothing.
    pub(crate) fn from_spec(spec: &FaultSpec) -> Option<Box<WireFault>> {
        spec.is_active().then(|| {
            Box::new(WireFault {
                spec: spec.clone(),
                random: SplitMix64::new(spec.seed),
                order: 0,
                fresh: Vec::new(),
                late: BinaryHeap::new(),
                held: None,
                held_until: None,
                spare: Vec::new(),
            })
        })
    }

    /// Takes a frame; what becomes of it shows in [`WireFault::release`].
    pub(crate) fn take(&mut self, datagram: &Datagram<'_>, counters: &Counters) {
        // All draws for every frame, so that one frame's fate does not move another's.
        let [lost, reordered, doubled, corrupted] =
            [self.spec.loss, self.spec.reorder, self.spec.duplicate, self.spec.corrupt]
                .map(|chance| self.random.chance(chance));
        let bit = self.random.bits();
        if lost {
            return counters.fault_lost.inc();
        }
        let corrupt = corrupted.then_some(bit);
        if corrupted {
            counters.fault_corrupted.inc();
        }
        if doubled {
            counters.fault_duplicated.inc();
            let frame = self.frame(datagram, corrupt);
            self.fresh.push(frame);
        }
        let frame = self.frame(datagram, corrupt);
        if reordered && self.held.is_none() {
            counters.fault_reordered.inc();
            self.held = Some(frame);
            return;
        }
        self.fresh.push(frame);
        self.fresh.extend(self.held.take());
        self.held_until = None;
    }

    fn frame(&mut self, datagram: &Datagram<'_>, corrupt: Option<u64>) -> OutboundFrame {
        let mut frame = self.spare.pop().unwrap_or_default();
        frame.fill(datagram, corrupt);
        frame
    }

    /// Gives `send` the frames whose time has come: all that are held back at the end of time.
    pub(crate) fn release(&mut self, now: Nanos, mut send: impl FnMut(&OutboundFrame)) {
        if self.held.is_some() && now >= *self.held_until.get_or_insert(now.saturating_add(HOLD)) {
            self.fresh.extend(self.held.take());
            self.held_until = None;
        }
        if self.spec.delay.is_zero() && self.spec.jitter.is_zero() {
            self.fresh.iter().for_each(send);
            return self.spare.append(&mut self.fresh);
        }
        for frame in self.fresh.drain(..) {
            let jitter = self.random.below(nanos(self.spec.jitter) + 1);
            self.order += 1;
            let due = now.saturating_add(nanos(self.spec.delay)).saturating_add(jitter);
            self.late.push(Late { due, order: self.order, frame });
        }
        while self.late.peek().is_some_and(|first| first.due <= now) {
            if let Some(first) = self.late.pop() {
                send(&first.frame);
                self.spare.push(first.frame);
            }
        }
    }

    /// When [`WireFault::release`] has something to give.
    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        let late = self.late.peek().map(|first| first.due);
        [late, self.held_until].into_iter().flatten().min()
    }
}

fn nanos(time: Duration) -> Nanos {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX - 1)
}

/// Turns over a bit of a frame, chosen by `draw`: not in BTH byte 4, which the ICRC does not cover.
#[cold]
pub(crate) fn flip(frame: &mut [u8], draw: u64) {
    let bit = (draw % (frame.len() as u64 * 8 - 8)) as usize;
    let bit = if bit < 32 { bit } else { bit + 8 };
    frame[bit / 8] ^= 1 << (bit % 8);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(text: &str) -> Box<WireFault> {
        WireFault::from_spec(&FaultSpec::parse(text).expect("a good spec")).expect("active")
    }

    fn take(fault: &mut WireFault, head: &[u8], counters: &Counters) {
        let to = &Av::default();
        let (payload, volatile) = (Payload::EMPTY, false);
        fault.take(&Datagram { to, port: 0, head, data: &[], payload, pad: 0, volatile }, counters);
    }

    /// Sends `count` numbered frames at time 0 and gives the numbers in the order in which they leave until
    /// `end`.
    fn run(text: &str, count: u16, end: Nanos, counters: &Counters) -> Vec<u16> {
        let mut fault = fault(text);
        let mut out = Vec::new();
        let mut note = |f: &OutboundFrame| out.push(u16::from_be_bytes([f.head[0], f.head[1]]));
        for n in 0..count {
            take(&mut fault, &n.to_be_bytes(), counters);
            fault.release(0, &mut note);
        }
        while let Some(due) = fault.next_deadline().filter(|due| *due <= end) {
            fault.release(due, &mut note);
        }
        out
    }

    #[test]
    fn chances_are_kept_and_counted() {
        let counters = Counters::default();
        let out = run("loss=10%,dup=5%,seed=1", 20_000, 0, &counters);
        let (lost, doubled) = (counters.fault_lost.get(), counters.fault_duplicated.get());
        assert!((1800..2200).contains(&lost), "{lost}");
        assert!((800..1000).contains(&doubled), "{doubled}");
        assert_eq!(out.len() as u64, 20_000 - lost + doubled);
    }

    #[test]
    fn a_seed_repeats_and_another_differs() {
        let of = |text| run(text, 1000, u64::MAX, &Counters::default());
        assert_eq!(
            of("loss=10%,reorder=10%,jitter=1ms,seed=5"),
            of("loss=10%,reorder=10%,jitter=1ms,seed=5")
        );
        assert_ne!(of("loss=10%,seed=5"), of("loss=10%,seed=6"));
    }

    #[test]
    fn reordered_frames_leave_right_after_their_successor_or_after_a_while() {
        let counters = Counters::default();
        let out = run("reorder=10%,seed=2", 1000, u64::MAX, &counters);
        let mut sorted = out.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..1000).collect::<Vec<_>>());
        assert!(counters.fault_reordered.get() > 50);
        assert_ne!(out, sorted);
        assert!(out.iter().zip(&sorted).all(|(a, b)| a.abs_diff(*b) <= 2));

        let mut all_held = fault("reorder=100%");
        take(&mut all_held, &[0, 1], &counters);
        all_held.release(7, |_| panic!("left at once"));
        assert_eq!(all_held.next_deadline(), Some(7 + HOLD));
    }

    #[test]
    fn delay_is_measured_from_the_flush() {
        let mut fault = fault("delay=50us,jitter=10us");
        let counters = Counters::default();
        take(&mut fault, &[0, 1], &counters);
        fault.release(1000, |_| panic!("left at once"));
        let due = fault.next_deadline().expect("a frame waits");
        assert!((51_000..=61_000).contains(&due), "{due}");
        let mut left = 0;
        fault.release(due, |_| left += 1);
        assert_eq!((left, fault.next_deadline()), (1, None));
    }

    #[test]
    fn what_is_held_back_leaves_at_the_end_of_time() {
        let counters = Counters::default();
        let all = run("reorder=30%,delay=1s,jitter=1s,seed=4", 100, 0, &counters);
        assert_eq!(all, []);
        let mut fault = fault("reorder=100%,delay=1s,jitter=1s");
        take(&mut fault, &[0, 1], &counters);
        fault.release(7, |_| panic!("left at once"));
        let mut left = 0;
        fault.release(Nanos::MAX, |_| left += 1);
        assert_eq!((left, fault.next_deadline()), (1, None));
    }

    /// Once a few frames have left, others take their room.
    #[test]
    fn no_frame_takes_memory_for_ever() {
        const TURN: usize = 8;
        for spec in ["reorder=30%,dup=50%,seed=3", "reorder=30%,dup=50%,delay=50us,jitter=20us,seed=3"] {
            let mut fault = fault(spec);
            for turn in 0..2000 {
                (0..TURN).for_each(|_| take(&mut fault, &[1; 64], &Counters::default()));
                fault.release(turn * 100_000, |_| ());
            }
            fault.release(Nanos::MAX, |_| ());
            let frames = fault.spare.len();
            /* those of two turns, each twice, and one that is held back */
            assert!((TURN..=4 * TURN + 1).contains(&frames), "{spec}: {frames} frames");
        }
    }

    #[test]
    fn a_bit_that_the_icrc_covers_is_turned_over() {
        for draw in 0..88 {
            let mut frame = [0; 12];
            flip(&mut frame, draw);
            assert_eq!((frame.iter().map(|byte| byte.count_ones()).sum::<u32>(), frame[4]), (1, 0));
        }
    }
}
