//! Where the wire loses packets answers leave twice: as soon as they are owed, and once more with the next
//! ones.
//!
//! An RDA is the only sign that its packet has come, unless that has a turn. Where it is lost, the packet
//! goes again, and the window shrinks as if the packet were lost. A packet that SF has sent again shows that
//! something is lost, be it packets or answers.

use starverbs_core::Av;

use super::{Run, send};
use crate::env::{StarDest, StarEnv};
use crate::wire::{Opt, PSN_STEP, Ptype, StarHeader};

/// Answers of a turn that leave once more, at most.
const MOST: usize = 32;
/// Turns after which an answer that found no other to go with is forgotten: some milliseconds of polls, and
/// before so many packets that its PSN comes again.
pub const TURNS: u32 = 4096;
/// Answers that leave twice behind the last packet that was sent again.
const AFTER_LOSS: u16 = 1024;

/// Answers that have left once, to one place: the last of what each answers, and how many these are.
#[derive(Debug, Default)]
pub(super) struct Repeats {
    to: Av,
    port: u16,
    once: [Option<(StarHeader, u16)>; MOST],
    count: usize,
    /// Those of them that left before this turn
    due: usize,
    /// Turns since answers last left
    idle: u32,
    /// As many more leave twice
    left: u16,
}

impl Repeats {
    /// A packet of data is done: one that SF has sent again shows a loss.
    #[inline]
    pub(super) fn note(&mut self, packet: &StarHeader) {
        if !packet.psn.get().is_multiple_of(PSN_STEP) && !has_turn(packet) {
            self.left = AFTER_LOSS;
        }
    }

    /// An answer is about to leave: those of the turn before do in front of it, as one with it if they answer
    /// what is before that.
    #[inline]
    pub(super) fn go_before<E: StarEnv>(&mut self, env: &mut E, run: &mut Run) {
        if self.left > 0 || self.count > 0 {
            self.repeat(env, run);
        }
    }

    #[inline(never)]
    fn repeat<E: StarEnv>(&mut self, env: &mut E, run: &mut Run) {
        let new = (run.last, run.count);
        self.idle = 0;
        if (self.to.dgid, self.to.sgid, self.port) != (run.to.dgid, run.to.sgid, run.port) {
            (self.to, self.port, self.count, self.due) = (run.to, run.port, 0, 0);
        }
        for (last, count) in self.once.iter().take(self.due).flatten() {
            if !run.begins_behind(last, *count) {
                send(env, StarDest { av: &self.to, port: self.port }, last, *count);
            }
        }
        self.once.copy_within(self.due..self.count, 0);
        (self.count, self.due) = (self.count - self.due, 0);
        if self.left > 0
            && !has_turn(&new.0)
            && let Some(place) = self.once.get_mut(self.count)
        {
            *place = Some(new);
            (self.count, self.left) = (self.count + 1, self.left - 1);
        }
    }

    /// What leaves from now on is not in one frame with what has left.
    #[inline]
    pub(super) fn end_turn(&mut self) {
        self.idle += 1;
        if self.idle > TURNS {
            (self.count, self.idle) = (0, 0);
        }
        self.due = self.count;
    }

    /// What has left is no more to be told: its connection's numbers may be another's.
    pub(super) fn forget(&mut self) {
        (self.count, self.due) = (0, 0);
    }
}

/// Whether it is of data that has a turn: the next answer stands for it, too.
fn has_turn(header: &StarHeader) -> bool {
    header.ptype != Ptype::Ea && header.opt == Opt::Recv
}
