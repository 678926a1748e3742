//! Lives of connections: of a pair of QPs that is connected again and again the newest counts, whatever comes
//! late of those before.

use starverbs_core::{Gid, Nanos, Qpn};

use crate::control::{Role, Setup};
use crate::negotiate::Outcome;
use crate::stateless::is_later;
use crate::wire::Prefix;

use super::super::places::ByQpn;
use super::super::{Host, Turn};
use super::Roles;

/// For how long something may come late of a life that is over.
const LATE: Nanos = 10_000_000_000;

/// The last life of a stateless end with which a QP of ours was connected.
struct Life {
    peer: (Gid, Qpn),
    epoch: u32,
    /// Nothing of it comes after this: epochs come round
    until: Nanos,
}

/// Of those QPs that are stateful ends, or were.
#[derive(Default)]
pub(super) struct Lives(ByQpn<Life>);

impl Lives {
    /// Whether a stateless end that says this epoch speaks of a life that a later one has followed, or of the
    /// one that has begun here.
    pub(super) fn is_over(&self, now: Nanos, qpn: Qpn, peer: (Gid, Qpn), epoch: u32) -> bool {
        let known = self.0.get(qpn).filter(|life| life.peer == peer && now < life.until);
        known.is_some_and(|life| !is_later(epoch, life.epoch))
    }

    /// One has begun. Without memory for it nothing is known of it.
    pub(super) fn note(&mut self, qpn: Qpn, peer: (Gid, Qpn), epoch: u32) {
        self.0.remove(qpn);
        if self.0.make_room(qpn).is_ok() {
            self.0.insert(qpn, Life { peer, epoch, until: Nanos::MAX });
        }
    }

    /// The QP is connected anew.
    pub(super) fn end(&mut self, qpn: Qpn, now: Nanos) {
        if let Some(life) = self.0.get_mut(qpn) {
            life.until = life.until.min(now + LATE);
        }
    }

    /// The QP is gone.
    pub(super) fn forget(&mut self, qpn: Qpn) {
        self.0.remove(qpn);
    }
}

impl<E: Host> Roles<E> {
    /// Whether the QP waits for its peer. One that began with a life of the peer that was over waits again:
    /// else neither could go on.
    pub(super) fn may_begin(
        &mut self,
        turn: &mut Turn<'_, E>,
        qpn: Qpn,
        setup: &Setup,
        prefix: &Prefix,
    ) -> bool {
        if turn.nic.is_held(qpn) {
            return true;
        }
        let Some(end) = self.ends.get_mut(qpn) else { return false };
        match end.negotiation.outcome() {
            Some(Outcome::Star { role: Role::Stateful, boot, .. }) if boot == setup.boot => (),
            _ => return false,
        }
        if !turn.rewind(qpn, prefix.epoch) {
            return false;
        }
        end.may_begin = true;
        self.balance.stop(&mut end.renewing);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_life_counts_until_nothing_comes_late() {
        let (peer, other) = ((Gid::from_ipv4([10, 0, 0, 1]), 7), (Gid::from_ipv4([10, 0, 0, 1]), 8));
        let mut lives = Lives::default();
        assert!(!lives.is_over(0, 5, peer, 0x1_0003), "nobody was there");
        lives.note(5, peer, 0x1_0003);
        assert!(lives.is_over(0, 5, peer, 0x1_0003) && lives.is_over(Nanos::MAX - 1, 5, peer, 0x1_0002));
        assert!(!lives.is_over(0, 5, peer, 0x1_0004) && !lives.is_over(0, 5, other, 0x1_0002));
        lives.end(5, 100);
        lives.end(5, 200);
        assert!(lives.is_over(99 + LATE, 5, peer, 0x1_0002));
        assert!(!lives.is_over(100 + LATE, 5, peer, 0x1_0002), "numbers come round");
        lives.note(5, peer, 0x1_0005);
        lives.forget(5);
        assert!(!lives.is_over(0, 5, peer, 0x1_0005));
    }
}
