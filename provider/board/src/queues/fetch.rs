//! How a send queue gets its WQEs: what a doorbell posted comes by one read of memory, as on csRNA's card.

use starverbs_core::{SendFlags, SendOp, SendWqe};
use starverbs_queues::BLOCK;
use starverbs_queues::board::{COUNTER_MALFORMED, COUNTER_SEND_FETCHES};
use zerocopy::transmute;

use super::{BoardSq, SGE_BYTES};
use crate::broken;

/// Slots of up to so many bytes are read whole: of longer ones the most part is never used.
const WHOLE: usize = 512;
/// Bytes that one read asks for at most, as on PCI Express.
const MOST: usize = 4096;
/// Words of a block.
const WORDS: usize = BLOCK / 8;

impl BoardSq {
    /// Fetches what was posted up to WQE `index`, and behind it what comes by the same read.
    pub(super) fn fetch_to(&self, index: u32) {
        let sq = &self.0;
        loop {
            let at = sq.fetched.get();
            let ahead = sq.posted.get().wrapping_sub(at);
            if index.wrapping_sub(at) >= ahead {
                return;
            }
            sq.fetched.set(at.wrapping_add(self.fetch(at, ahead)));
        }
    }

    /// Fetches WQE `index`, and of the `ahead` from there on as many as one read has: up to the ring's end,
    /// [`MOST`] bytes. Says how many.
    pub(super) fn fetch(&self, index: u32, ahead: u32) -> u32 {
        let sq = &self.0;
        let slot = index & sq.mask;
        let first = slot as usize * sq.stride;
        let most = MOST / (sq.stride * BLOCK);
        let count = if sq.stride * BLOCK <= WHOLE {
            let count = ahead.min(most as u32).min(sq.mask + 1 - slot);
            self.read(first, count as usize * sq.stride);
            count
        } else {
            self.read(first, 1);
            let blocks = usize::from(self.head(slot).blocks).clamp(1, sq.stride);
            if blocks > 1 {
                self.read(first + 1, blocks - 1);
            }
            1
        };
        (0..count).for_each(|n| self.check(index.wrapping_add(n)));
        count
    }

    /// Copies blocks by one read.
    fn read(&self, first: usize, count: usize) {
        if count * BLOCK <= WHOLE {
            self.read_into(&mut [0; WHOLE / 8], first, count);
        } else {
            self.read_into(&mut [0; MOST / 8], first, count);
        }
    }

    fn read_into(&self, words: &mut [u64], first: usize, count: usize) {
        let words = &mut words[..count * WORDS];
        self.0.slots.words(first * BLOCK, words);
        let copies = &self.0.copies[first..first + count];
        copies.iter().zip(words.as_chunks::<WORDS>().0).for_each(|(copy, block)| copy.set(*block));
    }

    /// What the copy of a slot begins with.
    pub(super) fn head(&self, slot: u32) -> SendWqe {
        SendWqe::decode(self.0.copies[slot as usize * self.0.stride].get())
    }

    /// Looks at a WQE that was copied.
    fn check(&self, index: u32) {
        let sq = &self.0;
        let slot = index & sq.mask;
        let mut wqe = self.head(slot);
        let flags = SendFlags::from_bits_truncate(wqe.flags.bits());
        let (is_sound, is_clean) = (self.is_sound(index, &wqe), wqe.flags == flags);
        if !is_sound {
            sq.counters.inc(COUNTER_MALFORMED);
            wqe = SendWqe { op: SendOp::Malformed, num_sge: 0, length: 0, ..wqe };
        }
        if !is_sound || !is_clean {
            /* other bits are no client's: who sets them has set none */
            sq.copies[slot as usize * sq.stride].set(transmute!(SendWqe { flags, ..wqe }));
        }
        sq.counters.inc(COUNTER_SEND_FETCHES);
    }

    /// Whether a WQE that was copied says one thing everywhere: its body is in its blocks, its length is that
    /// of its SGEs.
    fn is_sound(&self, index: u32, wqe: &SendWqe) -> bool {
        let body = (usize::from(wqe.blocks).clamp(1, self.0.stride) - 1) * BLOCK;
        if wqe.flags.contains(SendFlags::INLINE) {
            return wqe.num_sge == 0
                && wqe.length as usize <= body
                && wqe.op.has_data()
                && !wqe.op.brings_data();
        }
        let sges = usize::from(wqe.num_sge);
        if sges > self.0.max_sge || sges * SGE_BYTES > body || usize::from(wqe.blocks) > self.0.stride {
            return false;
        }
        let all = (0..sges).map(|at| self.sge(index, at));
        all.fold(0u32, |sum, sge| sum.saturating_add(sge.len)) == wqe.length || broken::rule(21)
    }
}
