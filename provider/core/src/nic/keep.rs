//! Requests that arrived before one that is missing, kept as received until it is there (selective repeat).
//!
//! A responder executes in order, always; what it keeps here is the frame, so that a gap changes when a
//! request is executed and nothing else. There is state for a QP only while it has a gap, from a pool that
//! all QPs of the card share and that is made with the first of them. When the pool is empty it takes what is
//! kept for the peer that was silent longest, if that was long; if there is none, a frame is dropped, as
//! without selective repeat.

use alloc::vec::Vec;
use core::num::NonZeroU16;

use crate::room::{Room, is_room_for};
use crate::types::{Nanos, Psn, Qpn};
use crate::wire::headers::SackEth;

/// Longest frame without its ICRC: BTH, XRCETH, RETH, immediate data and 4096 bytes.
const FRAME: usize = 4096 + 64;
/// PSNs that a gap's table holds: a power of two, more than a SACK covers.
const RING: usize = 512;
/// Which PSNs of the ring.
type Set = super::psn_set::Set<{ RING / 64 }>;
/// After so much silence the frames behind a gap may go to others, ns: more than requesters let pass between
/// two timeouts unless nobody answers for long. A SACK announced them to their peer, and none revokes it: the
/// peer sends again what is not acknowledged in the end, as TCP does (RFC 2018, section 8).
const SILENT: Nanos = 1_000_000_000;

/// A QP's gap: one more than its index, so that none takes two bytes in a QP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct GapId(NonZeroU16);

impl GapId {
    fn place(self) -> usize {
        usize::from(self.0.get() - 1)
    }
}

/// What is kept behind a missing packet.
struct Gap {
    /// Which PSNs are kept, by PSN modulo [`RING`]
    have: Set,
    /// Where, likewise
    slots: [u16; RING],
    count: u16,
    /// Whose it is; 0: nobody's
    owner: Qpn,
    /// When the last packet of its peer came
    last_heard: Nanos,
}

/// The pool.
#[derive(Default)]
pub(crate) struct Keep {
    gaps: Vec<Gap>,
    free_gaps: Vec<GapId>,
    bytes: Vec<u8>,
    lengths: Vec<u16>,
    free: Vec<u16>,
    /// Before this none was silent for long, as far as was looked
    none_silent_until: Nanos,
}

/// A frame that was taken out. Its bytes stay until it is given back.
#[derive(Clone, Copy)]
pub(crate) struct KeptFrame {
    slot: u16,
}

fn place(psn: Psn) -> usize {
    psn.get() as usize % RING
}

impl Keep {
    /// Makes the pool, once: of so many frames, for so many QPs with a gap at a time. Its pages cost nothing
    /// before they are used. False: there is no memory for it.
    pub(crate) fn make(&mut self, frames: u16, gaps: u16) -> bool {
        if !self.gaps.is_empty() {
            return true;
        }
        let tables = usize::from(gaps) * (size_of::<Gap>() + 2) + usize::from(frames) * 4;
        if !is_room_for(usize::from(frames) * FRAME) || !is_room_for(tables) {
            return false;
        }
        self.gaps.reserve_exact(gaps.into());
        self.gaps.resize_with(gaps.into(), || Gap {
            have: Set::EMPTY,
            slots: [0; RING],
            count: 0,
            owner: 0,
            last_heard: 0,
        });
        self.free_gaps = (1..=gaps).rev().filter_map(NonZeroU16::new).map(GapId).collect();
        self.bytes = alloc::vec![0; usize::from(frames) * FRAME];
        self.lengths = alloc::vec![0; frames.into()];
        self.free = (0..frames).rev().collect();
        true
    }

    /// State for QP `owner`, which has none; `None`: there is none left.
    pub(crate) fn open(&mut self, owner: Qpn, now: Nanos) -> Option<GapId> {
        if (self.free.is_empty() || self.free_gaps.is_empty()) && !self.reclaim(None, now) {
            return None;
        }
        let id = self.free_gaps.pop()?;
        let gap = &mut self.gaps[id.place()];
        (gap.owner, gap.last_heard) = (owner, now);
        Some(id)
    }

    /// Whether a gap that QP `owner` had is still its own.
    #[inline]
    pub(crate) fn is_of(&self, id: GapId, owner: Qpn) -> bool {
        self.gaps[id.place()].owner == owner
    }

    /// A packet came from the peer of a gap's owner.
    #[inline]
    pub(crate) fn peer_spoke(&mut self, id: GapId, now: Nanos) {
        self.gaps[id.place()].last_heard = now;
    }

    /// Ends the gap whose peer was silent longest, and for long. False: there is none, `but` not counted.
    fn reclaim(&mut self, but: Option<GapId>, now: Nanos) -> bool {
        if now < self.none_silent_until {
            return false;
        }
        let but = but.map(GapId::place);
        let others = self.gaps.iter().enumerate().filter(|(at, gap)| gap.owner != 0 && Some(*at) != but);
        let oldest = others.min_by_key(|(_, gap)| gap.last_heard).map(|(at, gap)| (at, gap.last_heard));
        let due = oldest.map_or(now, |(_, last)| last).saturating_add(SILENT);
        if now < due {
            self.none_silent_until = due;
            return false;
        }
        let id = oldest.and_then(|(at, _)| NonZeroU16::new(at as u16 + 1)).map(GapId);
        id.map(|id| self.close(id)).is_some()
    }

    /// Ends a gap, whatever is still kept in it.
    pub(crate) fn close(&mut self, id: GapId) {
        let gap = &mut self.gaps[id.place()];
        for at in 0..RING {
            if gap.have.has(at) {
                self.free.push_in_room(gap.slots[at]);
            }
        }
        (gap.have, gap.count, gap.owner) = (Set::EMPTY, 0, 0);
        self.free_gaps.push_in_room(id);
    }

    /// Whether nothing is kept in a gap.
    pub(crate) fn is_empty(&self, id: GapId) -> bool {
        self.gaps[id.place()].count == 0
    }

    /// Whether the frame at `psn` is kept.
    pub(crate) fn has(&self, id: GapId, psn: Psn) -> bool {
        self.gaps[id.place()].have.has(place(psn))
    }

    /// Keeps a frame, given in parts, at `psn`, which is at most [`SackEth::SPAN`] behind the expected one.
    /// False: there is no room.
    pub(crate) fn put(&mut self, id: GapId, now: Nanos, psn: Psn, parts: [&[u8]; 3], pad: u8) -> bool {
        let len = parts.iter().map(|part| part.len()).sum::<usize>() + usize::from(pad);
        if len > FRAME {
            return false;
        }
        self.peer_spoke(id, now);
        if self.free.is_empty() && !self.reclaim(Some(id), now) {
            return false;
        }
        let Some(slot) = self.free.pop() else { return false };
        let room = &mut self.bytes[usize::from(slot) * FRAME..][..len];
        let mut begin = 0;
        for part in parts {
            room[begin..begin + part.len()].copy_from_slice(part);
            begin += part.len();
        }
        room[begin..].fill(0);
        self.lengths[usize::from(slot)] = len as u16;
        let (gap, at) = (&mut self.gaps[id.place()], place(psn));
        gap.have.put(at);
        gap.slots[at] = slot;
        gap.count += 1;
        true
    }

    /// Takes the frame at `psn` out.
    pub(crate) fn take(&mut self, id: GapId, psn: Psn) -> Option<KeptFrame> {
        if !self.has(id, psn) {
            return None;
        }
        let (gap, at) = (&mut self.gaps[id.place()], place(psn));
        gap.have.drop(at);
        gap.count -= 1;
        Some(KeptFrame { slot: gap.slots[at] })
    }

    /// All kept bytes, for as long as somebody looks at one frame: [`Keep::give_back`] returns them.
    pub(crate) fn take_bytes(&mut self) -> Vec<u8> {
        core::mem::take(&mut self.bytes)
    }

    /// A frame among the bytes that were taken.
    pub(crate) fn frame<'a>(&self, bytes: &'a [u8], kept: KeptFrame) -> &'a [u8] {
        let slot = usize::from(kept.slot);
        bytes.get(slot * FRAME..).and_then(|b| b.get(..usize::from(self.lengths[slot]))).unwrap_or(&[])
    }

    /// The bytes come back, and the frame that was taken out is not needed any more.
    pub(crate) fn give_back(&mut self, bytes: Vec<u8>, kept: KeptFrame) {
        self.bytes = bytes;
        self.free.push_in_room(kept.slot);
    }

    /// Forgets `packets` PSNs from `psn` on: a request took them for its answer, so that no packet has them.
    pub(crate) fn skip(&mut self, id: GapId, psn: Psn, packets: u32) {
        for n in 0..packets.min(RING as u32) {
            if let Some(kept) = self.take(id, psn.plus(n)) {
                self.free.push_in_room(kept.slot);
            }
        }
    }

    /// The SACK of what is kept behind `expected`.
    pub(crate) fn sack(&self, id: GapId, expected: Psn) -> SackEth {
        let have = &self.gaps[id.place()].have;
        SackEth::new(core::array::from_fn(|k| have.from(place(expected.plus(1 + 64 * k as u32)))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const FRAMES: usize = 1024;
    const GAPS: usize = 64;

    /// Against a plain map, over and over in the same memory.
    #[test]
    fn frames_come_out_as_they_went_in() {
        let mut keep = Keep::default();
        keep.make(FRAMES as u16, GAPS as u16);
        let (mut rng, mut expected) = (7u64, Psn::new(0xff_ff00));
        let mut plain: BTreeMap<u32, Vec<u8>> = BTreeMap::new();
        let id = keep.open(1, 0).expect("a fresh pool");
        for _ in 0..50_000 {
            rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let ahead = 1 + (rng >> 40) as u32 % SackEth::SPAN;
            let psn = expected.plus(ahead);
            if rng >> 62 != 0 && !keep.has(id, psn) {
                let data = alloc::vec![(rng >> 20) as u8; ((rng >> 50) as usize % 300) & !3];
                assert!(keep.put(id, 0, psn, [&data[..], &[], &[]], 0));
                plain.insert(psn.get(), data);
            } else {
                expected = expected.plus(1);
                let kept = keep.take(id, expected);
                assert_eq!(kept.is_some(), plain.contains_key(&expected.get()));
                if let Some(kept) = kept {
                    let bytes = keep.take_bytes();
                    assert_eq!(plain.remove(&expected.get()).as_deref(), Some(keep.frame(&bytes, kept)));
                    keep.give_back(bytes, kept);
                }
            }
            let sack = keep.sack(id, expected);
            for i in 0..SackEth::SPAN {
                assert_eq!(sack.has(i), plain.contains_key(&expected.plus(1 + i).get()));
            }
            assert_eq!(keep.is_empty(id), plain.is_empty());
        }
        keep.close(id);
        assert_eq!((keep.free.len(), keep.free_gaps.len()), (FRAMES, GAPS));
    }

    #[test]
    fn the_pool_is_bounded() {
        let mut keep = Keep::default();
        assert!(keep.open(1, 0).is_none(), "not made");
        keep.make(FRAMES as u16, GAPS as u16);
        let ids: Vec<GapId> = core::iter::from_fn(|| keep.open(1, 0)).collect();
        assert_eq!(ids.len(), GAPS);
        let put = |keep: &mut Keep, n: usize| {
            keep.put(ids[n / 300], 0, Psn::new((n % 300) as u32), [&[1; 8], &[], &[]], 0)
        };
        assert_eq!((0..2 * FRAMES).take_while(|n| put(&mut keep, *n)).count(), FRAMES);
        keep.skip(ids[0], Psn::new(0), 1 << 20);
        assert!(keep.is_empty(ids[0]) && put(&mut keep, 0));
        assert!(!keep.put(ids[0], 0, Psn::new(1), [&[0; FRAME + 4], &[], &[]], 0), "too long for any packet");
        ids.into_iter().for_each(|id| keep.close(id));
        assert_eq!((keep.free.len(), keep.free_gaps.len()), (FRAMES, GAPS));
    }

    /// Frames of silent peers are reclaimed, of the longest silent first; peers that spoke keep theirs.
    #[test]
    fn the_silent_make_room() {
        let mut keep = Keep::default();
        keep.make(4, 3);
        let put = |keep: &mut Keep, id, now, psn| keep.put(id, now, Psn::new(psn), [&[1; 8], &[], &[]], 0);
        let [a, b, c] = [1, 2, 3].map(|owner| keep.open(owner, 0).expect("a fresh pool"));
        assert!(put(&mut keep, a, 1, 5) && put(&mut keep, a, 1, 6) && put(&mut keep, b, 2, 5));
        assert!(put(&mut keep, c, 3, 5) && !put(&mut keep, c, 4, 6), "full");
        assert!(!put(&mut keep, c, SILENT, 6) && keep.is_of(a, 1), "not silent for long");
        assert!(!put(&mut keep, a, SILENT + 1, 7), "its own are not for the taking");
        assert!(put(&mut keep, c, SILENT + 2, 6) && !keep.is_of(b, 2), "b is silent, a is not");
        assert!(keep.is_of(a, 1) && keep.has(a, Psn::new(6)) && keep.has(c, Psn::new(5)));
        let d = keep.open(4, 2 * SILENT + 1).expect("a is silent now");
        assert!(!keep.is_of(a, 1) && put(&mut keep, d, 2 * SILENT + 1, 9) && keep.is_of(c, 3));
        [c, d].into_iter().for_each(|id| keep.close(id));
        assert_eq!((keep.free.len(), keep.free_gaps.len()), (4, 3));
    }
}
