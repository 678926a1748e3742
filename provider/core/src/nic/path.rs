//! What is in flight towards each destination, and whose turn it is to add to it.
//!
//! RoCEv2 assumes a lossless fabric; a socket's receive buffer is not one. All QPs to one host share a window
//! ([`Controller`]), so that they do not flood its socket together, and take turns where it is full. A QP
//! whose peer is silent is no part of this: after a timeout its packets go one at a time and are not charged
//! here.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use core::num::NonZeroU32;

use super::pace::Pace;
use crate::congestion::{Controller, WindowLimits};
use crate::error::NicError;
use crate::room::{Room, TwoEnds};
use crate::rtt::{LossSeen, PROBE_MIN, Rtt};
use crate::types::{Gid, Nanos, Qpn};

/// Handle of a path, one more than its place, so that none takes no room of its own; valid as long as the
/// card.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathId(NonZeroU32);

impl PathId {
    /// As a number other than 0.
    pub fn number(self) -> u32 {
        self.0.get()
    }
    /// That of this number. Any is one, but 0: those that are nobody's lead nowhere.
    pub fn of_number(number: u32) -> Option<Self> {
        NonZeroU32::new(number).map(PathId)
    }
    fn at(place: usize) -> Self {
        PathId(NonZeroU32::MIN.saturating_add(place as u32))
    }
    #[inline]
    fn place(self) -> usize {
        (self.0.get() - 1) as usize
    }
}

/// No path: of a QP that was never connected.
impl Default for PathId {
    fn default() -> Self {
        PathId(NonZeroU32::MAX)
    }
}

/// What a packet costs beside its payload: headers, and the kernel's bookkeeping for it.
pub const PACKET_OVERHEAD: u32 = 512;
/// Timeouts double so often at most.
const MOST_DOUBLINGS: u8 = 16;

/// All paths of a card.
pub(crate) struct Paths<C> {
    /// In order of addresses
    by_gid: Vec<(Gid, PathId)>,
    paths: Vec<Path<C>>,
    limits: WindowLimits,
    /// UD QPs of the card: any of them may wait on any path
    datagram_qps: usize,
}

/// One destination.
pub struct Path<C> {
    /// Where it leads
    dgid: Gid,
    /// How much may be in flight
    congestion: C,
    inflight: u32,
    /// QPs that wait for room, each once; there is room for all that may
    waiting: VecDeque<Qpn>,
    /// QPs connected over this path
    users: usize,
    /// Whose turn it is among them, and whether it has sent in it
    turn: Option<Qpn>,
    turn_used: bool,
    /// In the scheduler's queue of paths whose waiters should be looked at
    open: bool,
    /// The first waiter needs more room than there is
    stuck: bool,
    /// Smoothed round trip, ns; 0: none measured
    pub(crate) srtt: u32,
    /// How often the timeout had doubled when an answer came that it had not waited for; 0: a round trip was
    /// measured since
    doubled: u8,
    /// Its round trips, as engines see them
    pub rtt: Rtt,
    /// Whether it was seen to lose or repeat packets
    loss: LossSeen,
    /// Pacing of UC and UD
    pub(crate) pace: Pace,
}

impl<C: Controller> Paths<C> {
    pub(crate) fn new(limits: WindowLimits) -> Self {
        Paths { by_gid: Vec::new(), paths: Vec::new(), limits, datagram_qps: 0 }
    }

    /// The path towards `dgid`, made if there is none. `Exhausted`: no memory.
    pub(crate) fn find(&mut self, dgid: Gid) -> Result<PathId, NicError> {
        let place = match self.place_of(dgid) {
            Ok(at) => return Ok(self.by_gid[at].1),
            Err(place) => place,
        };
        let (limits, mut waiting) = (self.limits, VecDeque::new());
        waiting.make_room(self.datagram_qps)?;
        self.paths.make_room(self.paths.len() + 1)?;
        self.by_gid.make_room(self.paths.len() + 1)?;
        self.paths.push_in_room(Path { waiting, ..Path::new(&dgid, &limits) });
        let id = PathId::at(self.paths.len() - 1);
        self.by_gid.insert(place, (dgid, id));
        Ok(id)
    }

    /// Whether there is such a path; a QP that was never connected has none.
    pub(crate) fn exists(&self, id: PathId) -> bool {
        id.place() < self.paths.len()
    }

    /// The path towards `dgid`, if there is one.
    pub(crate) fn lookup(&self, dgid: Gid) -> Option<PathId> {
        self.place_of(dgid).ok().map(|at| self.by_gid[at].1)
    }

    /// Where `dgid` stands among the addresses, or would stand.
    fn place_of(&self, dgid: Gid) -> Result<usize, usize> {
        self.by_gid.binary_search_by_key(&dgid, |(gid, _)| *gid)
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.paths.len()
    }

    /// Room for one more QP that is connected over path `id`. `Exhausted`: no memory.
    pub(crate) fn make_room(&mut self, id: PathId) -> Result<(), NicError> {
        let path = &mut self.paths[id.place()];
        path.waiting.make_room(path.users + 1 + self.datagram_qps)
    }

    /// A QP, for which there is room, is connected over path `id` from now on, and no longer over `before`.
    pub(crate) fn connect(&mut self, before: PathId, id: PathId) {
        self.disconnect(before);
        self.paths[id.place()].users += 1;
    }

    /// A QP that was connected over path `id`, if over any, is so no longer.
    pub(crate) fn disconnect(&mut self, id: PathId) {
        if let Some(path) = self.paths.get_mut(id.place()) {
            path.users -= 1;
        }
    }

    /// A UD QP is made. `Exhausted`: no memory, and no QP.
    pub(crate) fn add_datagram_qp(&mut self) -> Result<(), NicError> {
        for path in &mut self.paths {
            path.waiting.make_room(path.users + self.datagram_qps + 1)?;
        }
        self.datagram_qps += 1;
        Ok(())
    }

    /// A UD QP is gone.
    pub(crate) fn drop_datagram_qp(&mut self) {
        self.datagram_qps -= 1;
    }

    /// The turn of `qpn`, if it has one on this path, is over.
    pub(crate) fn end_turn(&mut self, id: PathId, qpn: Qpn) {
        if let Some(path) = self.paths.get_mut(id.place()) {
            path.end_turn(qpn);
        }
    }

    /// Path `id`, if there is one, was seen to lose or repeat packets.
    pub(crate) fn saw_loss(&mut self, id: PathId) {
        if let Some(path) = self.paths.get_mut(id.place()) {
            path.loss.note();
        }
    }

    /// Whether path `id` ever did so: what one QP saw may happen to all.
    pub(crate) fn is_lossy(&self, id: PathId) -> bool {
        self.paths.get(id.place()).is_some_and(|path| path.loss.is_known())
    }

    /// Bytes under way on path `id`, overhead included; 0 of a queue pair that was never connected.
    pub(crate) fn in_flight(&self, id: PathId) -> u32 {
        self.paths.get(id.place()).map_or(0, |path| path.inflight)
    }

    /// All paths.
    pub(crate) fn each(&mut self) -> impl Iterator<Item = (PathId, &mut Path<C>)> {
        self.paths.iter_mut().enumerate().map(|(i, path)| (PathId::at(i), path))
    }

    #[inline]
    pub(crate) fn get(&mut self, id: PathId) -> &mut Path<C> {
        &mut self.paths[id.place()]
    }
}

impl<C: Controller> Path<C> {
    /// The way to `dgid`. Nobody may wait on it yet.
    pub fn new(dgid: &Gid, limits: &WindowLimits) -> Self {
        Path {
            dgid: *dgid,
            congestion: C::new(limits),
            inflight: 0,
            waiting: VecDeque::new(),
            users: 0,
            turn: None,
            turn_used: false,
            open: false,
            stuck: false,
            srtt: 0,
            doubled: 0,
            rtt: Rtt::default(),
            loss: LossSeen::default(),
            pace: Pace::towards(dgid),
        }
    }

    /// Whether it leads there.
    #[inline]
    pub fn leads_to(&self, gid: &Gid) -> bool {
        self.dgid == *gid
    }

    /// Whether `bytes` more may fly. One packet always may.
    #[inline]
    pub(crate) fn has_room(&self, bytes: u32) -> bool {
        self.inflight == 0 || self.inflight + bytes <= self.congestion.window()
    }

    /// Whether `qpn` may send `bytes` now: there is room, and nobody waits who came before.
    #[inline]
    pub fn admits(&self, qpn: Qpn, bytes: u32) -> bool {
        (self.waiting.is_empty() || self.turn == Some(qpn)) && self.has_room(bytes)
    }

    /// Whether `bytes` may fly as a whole, in several packets, and nobody waits.
    pub fn takes(&self, bytes: u32) -> bool {
        self.waiting.is_empty() && self.inflight.saturating_add(bytes) <= self.congestion.window()
    }

    /// `qpn` was not admitted and waits. Whoever had its turn and could not use it stays first;
    /// all others queue at the end, so that nobody starves. Gives whether the waiters should be
    /// looked at again.
    pub(crate) fn wait(&mut self, qpn: Qpn) -> bool {
        let had_turn = self.turn == Some(qpn);
        if had_turn {
            self.turn = None;
        }
        if had_turn && !self.turn_used {
            self.waiting.push_front_in_room(qpn);
            self.stuck = true;
            return false;
        }
        self.waiting.push_in_room(qpn);
        true
    }

    /// `qpn` waits no longer: it ends, or goes another way.
    pub(crate) fn forget_waiter(&mut self, qpn: Qpn) {
        self.waiting.retain(|q| *q != qpn);
        self.stuck = false;
    }

    /// The turn of `qpn` is over.
    pub(crate) fn end_turn(&mut self, qpn: Qpn) {
        if self.turn == Some(qpn) {
            self.turn = None;
        }
    }

    /// Notes that the waiters should be looked at; false: that is noted already, or nobody waits.
    pub(crate) fn open(&mut self) -> bool {
        let news = !self.open && !self.stuck && !self.waiting.is_empty();
        self.open |= news;
        news
    }

    /// The next QP that waits, if there is room again: it is its turn.
    pub(crate) fn wake(&mut self) -> Option<Qpn> {
        self.open = false;
        if self.inflight >= self.congestion.window() && self.inflight > 0 {
            return None;
        }
        let qpn = self.waiting.pop_front()?;
        self.turn = Some(qpn);
        self.turn_used = false;
        Some(qpn)
    }

    /// `bytes` have left.
    #[inline]
    pub fn add(&mut self, bytes: u32) {
        self.turn_used = true;
        self.inflight = self.inflight.saturating_add(bytes);
    }

    /// Whether all that is in flight, of so many bytes, is of one: behind others' packets answers are late.
    pub fn is_all(&self, inflight: u32) -> bool {
        self.inflight == inflight
    }

    /// `bytes` have left the network without being acknowledged (rewound, given up).
    pub fn forget(&mut self, bytes: u32) {
        self.stuck = false;
        self.inflight = self.inflight.saturating_sub(bytes);
    }

    /// `bytes` were acknowledged.
    #[inline]
    pub fn acked(&mut self, bytes: u32) {
        self.forget(bytes);
        self.congestion.on_ack(bytes);
    }

    /// Packets were lost. Gives whether the window shrank for it.
    pub(crate) fn cut(&mut self, now: Nanos, timeout: bool) -> bool {
        self.loss.note();
        self.congestion.on_loss(now, timeout)
    }

    /// The last timeout was wrong: what it took for lost has been acknowledged.
    pub(crate) fn undo_timeout(&mut self) {
        self.congestion.undo_timeout();
    }

    /// Bytes that may be in flight at once.
    #[inline]
    pub(crate) fn window(&self) -> u32 {
        self.congestion.window()
    }

    /// `bytes` were lost among others that came.
    pub fn lost(&mut self, bytes: u32) {
        self.loss.note();
        self.congestion.on_share_lost(bytes);
    }

    /// A round trip was measured.
    pub(crate) fn sample_rtt(&mut self, now: Nanos, rtt: Nanos) {
        self.congestion.on_delay(now, rtt);
        self.loss.pass(now);
        let rtt = u32::try_from(rtt).unwrap_or(u32::MAX);
        self.srtt = if self.srtt == 0 { rtt } else { self.srtt - self.srtt / 8 + rtt / 8 };
        self.doubled = 0;
    }

    /// What was sent again after so many timeouts was answered twice: nothing was lost, the path is slow.
    /// Which copy an answer is for is not known, so that no round trip can be measured: the next packets wait
    /// as long, or they would be sent again for ever (Karn's algorithm, RFC 6298, 5.7).
    pub(crate) fn answered_twice(&mut self, timeouts: u8) {
        self.doubled = self.doubled.max(timeouts);
    }

    /// How long to wait for an answer after so many timeouts, ns; `least` without any.
    pub(crate) fn timeout(&self, least: Nanos, timeouts: u8) -> Nanos {
        let doublings = self.doubled.saturating_add(timeouts).min(MOST_DOUBLINGS);
        (4 * Nanos::from(self.srtt)).max(least) << doublings
    }

    /// After how much silence a QP with so many bytes under way sends something again, ns, though it has
    /// heard nothing of a loss: two round trips (the tail loss probe of RFC 8985, 7.2), on a path that
    /// lost packets of late. `None`: it does not. Where others send, answers may be queued behind theirs.
    pub(crate) fn probe_time(&self, inflight: u32) -> Option<Nanos> {
        let probes = self.loss.is_recent() && self.srtt != 0 && self.is_all(inflight);
        probes.then(|| (2 * Nanos::from(self.srtt)).max(PROBE_MIN) << self.doubled.min(MOST_DOUBLINGS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::congestion::Aimd;

    const LIMITS: WindowLimits = WindowLimits { max: 1 << 20, delay_target: None };

    #[test]
    fn a_path_that_loses_is_probed_early_by_who_is_alone_on_it() {
        let mut path = Path::<Aimd>::new(&Gid::default(), &LIMITS);
        path.add(4096);
        path.sample_rtt(0, 300_000);
        assert_eq!(path.probe_time(4096), None, "it loses nothing");
        path.lost(100);
        assert_eq!(path.probe_time(4096), Some(600_000));
        assert_eq!(path.probe_time(4000), None, "others send, too");
        path.answered_twice(2);
        assert_eq!(path.probe_time(4096), Some(2_400_000), "it was needless");
        path.srtt = 10_000;
        path.answered_twice(0);
        assert_eq!(path.probe_time(4096), Some(PROBE_MIN << 2));
    }

    #[test]
    fn a_path_that_lost_packets_long_ago_is_not_probed_early() {
        const MS: Nanos = 1_000_000;
        let mut path = Path::<Aimd>::new(&Gid::default(), &LIMITS);
        path.add(4096);
        path.sample_rtt(1_000 * MS, 300_000);
        path.lost(100);
        let early: Vec<_> = (1_000..1_600)
            .filter(|ms| {
                path.sample_rtt(ms * MS, 300_000);
                path.probe_time(4096).is_some()
            })
            .collect();
        let last = early.last().copied();
        assert!(last.is_some_and(|last| (1_249..1_500).contains(&last)), "{last:?}");
        /* after a rest, at once */
        path.cut(1_600 * MS, false);
        path.sample_rtt(1_600 * MS, 300_000);
        assert!(path.probe_time(4096).is_some());
        path.sample_rtt(9_000 * MS, 300_000);
        assert_eq!(path.probe_time(4096), None);
    }

    #[test]
    fn each_destination_has_one_path() {
        let mut paths = Paths::<Aimd>::new(LIMITS);
        let gid = |n: u32| Gid((u128::from(n.wrapping_mul(0x9e37_79b9))).to_be_bytes());
        let ids: Vec<PathId> = (0..500).map(|n| paths.find(gid(n)).unwrap()).collect();
        for (n, id) in ids.iter().enumerate() {
            assert_eq!((paths.find(gid(n as u32)), paths.lookup(gid(n as u32))), (Ok(*id), Some(*id)));
        }
        assert_eq!((paths.len(), paths.lookup(gid(500))), (500, None));
    }

    #[test]
    fn one_packet_always_flies() {
        let mut paths = Paths::<Aimd>::new(LIMITS);
        let id = paths.find(Gid::default()).unwrap();
        let p = paths.get(id);
        assert!(p.admits(7, 1 << 20));
        p.add(1 << 20);
        assert!(!p.admits(7, 1));
    }

    #[test]
    fn waiters_take_turns() {
        let mut paths = Paths::<Aimd>::new(LIMITS);
        let id = paths.find(Gid::default()).unwrap();
        (0..3).for_each(|_| {
            paths.make_room(id).unwrap();
            paths.connect(PathId::default(), id);
        });
        let p = paths.get(id);
        p.add(1 << 20);
        assert!(!p.admits(1, 100));
        assert!(p.wait(1) && p.wait(2) && p.open() && !p.open());
        assert_eq!(p.wake(), None, "no room");
        p.acked(1 << 20);
        assert!(!p.admits(3, 100), "others came before");
        assert!(p.wait(3) && p.open());
        assert_eq!(p.wake(), Some(1));
        assert!(p.admits(1, 100) && !p.admits(2, 100));
        p.add(100);
        assert!(p.wait(1), "used its turn: goes last");
        assert_eq!(p.wake(), Some(2));
        assert!(!p.wait(2) && !p.open(), "did not use it: stays first, until there is more room");
        p.acked(100);
        assert!(p.open());
        assert_eq!((p.wake(), p.wake(), p.wake()), (Some(2), Some(3), Some(1)));
    }

    #[test]
    fn a_waiter_that_goes_holds_nobody_up() {
        let mut paths = Paths::<Aimd>::new(LIMITS);
        let id = paths.find(Gid::default()).unwrap();
        paths.make_room(id).unwrap();
        paths.connect(PathId::default(), id);
        paths.add_datagram_qp().unwrap();
        let p = paths.get(id);
        p.add(1 << 10);
        p.wait(1);
        p.wait(2);
        assert_eq!(p.wake(), Some(1));
        assert!(!p.wait(1) && !p.open(), "it needs more room than there is");
        p.forget_waiter(1);
        assert!(p.open());
        assert_eq!((p.wake(), p.wake()), (Some(2), None));
    }
}
