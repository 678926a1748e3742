//! Frames on their way in: from the port's sockets to the card, as far as the card takes them.

use starverbs_backend::Rx;
use starverbs_core::{Nanos, Nic};

use super::back_pressure::{BackPressure, Who};
use super::env::{HostEnv, NicEnv};
use crate::stat::StatPage;

/// Frames whose contexts are fetched at once: about as many as a CPU has misses under way at the same time.
pub(super) const AHEAD: u32 = 16;

/// What has come and was not handled yet.
pub(crate) struct Intake {
    pub(crate) rx: Rx<StatPage>,
    /// How many frames to look ahead for contexts to fetch into the CPU's caches; 0: none
    ahead: usize,
    /// Frames to come that were looked at
    looked: usize,
    /// Frames were left where they are, as the card waits for QP contexts
    held_back: bool,
    /// Since when frames wait for receives to be posted
    back_pressure: BackPressure,
}

impl Intake {
    /// `prefetch`: contexts of frames to come are fetched.
    pub(super) fn new(rx: Rx<StatPage>, prefetch: bool) -> Self {
        let ahead = if prefetch { AHEAD as usize } else { 0 };
        Intake { rx, ahead, looked: 0, held_back: false, back_pressure: BackPressure::default() }
    }

    /// Handles the frames of the last `recv` until `enough`; says whether all are handled.
    #[inline]
    pub(super) fn take(
        &mut self,
        (nic, env): NicEnv<'_>,
        now: Nanos,
        mut enough: impl FnMut() -> bool,
    ) -> bool {
        if nic.is_qpc_limited() {
            return self.offer((nic, env), now, &mut enough);
        }
        while let Some((meta, frame)) = self.rx.next_frame() {
            nic.handle_frame(env, now, &meta, frame);
            self.look_ahead(nic, env);
            if enough() || nic.is_starved() {
                return false;
            }
        }
        self.looked = 0;
        true
    }

    /// [`Intake::take`] of a QPC-limited card, as far as it takes frames.
    #[cold]
    fn offer(&mut self, (nic, env): NicEnv<'_>, now: Nanos, enough: &mut dyn FnMut() -> bool) -> bool {
        self.held_back = false;
        while nic.takes_frames() {
            let Some((meta, frame)) = self.rx.next_frame() else { return true };
            nic.offer_frame(env, now, &meta, frame);
            if enough() || nic.is_starved() {
                return false;
            }
        }
        self.held_back = true;
        false
    }

    /// After a frame: has the contexts of those behind it fetched, [`AHEAD`] at a time. Of a frame that came
    /// alone this is two comparisons.
    #[inline]
    fn look_ahead(&mut self, nic: &Nic<HostEnv>, env: &HostEnv) {
        if self.looked > 0 {
            self.looked -= 1;
        } else if self.ahead > 0 && self.rx.has_more() {
            self.looked = self.rx.look_ahead(self.ahead, |qpn| nic.expect(env, qpn));
        }
    }

    /// Whether frames should wait for the receives that [`Nic::is_starved`] misses.
    #[inline]
    pub(super) fn waits_for_receives(&mut self, nic: &mut Nic<HostEnv>, now: Nanos, who: Who) -> bool {
        nic.is_starved() && self.holds_frames(nic, now, who)
    }

    #[cold]
    fn holds_frames(&mut self, nic: &mut Nic<HostEnv>, now: Nanos, who: Who) -> bool {
        let missing = nic.still_starved();
        if missing {
            let Intake { rx, back_pressure, .. } = self;
            let handed_on = || nic.counters().handed_on.get();
            let hands_on =
                !back_pressure.is_held() && (back_pressure.hands_on(now, handed_on()) || rx.has_clients());
            if back_pressure.holds(now, who, || hands_on || nic.has_reliable()) {
                return true;
            }
            nic.end_back_pressure();
        }
        self.back_pressure.end(now, missing);
        false
    }

    /// How long frames still wait for receives while others wait for them.
    #[inline]
    pub(super) fn held_for(&self, now: Nanos) -> Option<Nanos> {
        self.back_pressure.left(now)
    }

    /// Whether frames were left where they are, as the card waits for QP contexts.
    #[inline]
    pub(super) fn is_held_back(&self) -> bool {
        self.held_back
    }
}
