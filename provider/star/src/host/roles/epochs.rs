//! Epochs of connections: of a pair of QPs that is connected again and again the newest epoch counts,
//! whatever arrives late of those before.

use starverbs_core::{Nanos, Qpn};

use crate::control::{Role, Setup};
use crate::negotiate::{Outcome, PeerQp};
use crate::stateless::is_later;
use crate::wire::Prefix;

use super::super::places::ByQpn;
use super::super::{EndpointHost, Turn};
use super::Roles;
use super::messages::offer_again;

/// For how long packets of an epoch that is over may arrive, ns.
const LATE: Nanos = 10_000_000_000;

/// The last epoch of a stateless end with which a QP of ours was connected.
struct LastEpoch {
    peer: PeerQp,
    epoch: u32,
    /// Not kept beyond: epochs come round
    until: Nanos,
}

/// Epochs of QPs that are stateful ends, or were.
#[derive(Default)]
pub(super) struct Epochs(ByQpn<LastEpoch>);

impl Epochs {
    /// Whether the epoch of a Setup is over, or is the one that has begun here.
    pub(super) fn is_past(&self, now: Nanos, qpn: Qpn, peer: PeerQp, epoch: u32) -> bool {
        let known = self.0.get(qpn).filter(|last| last.peer == peer && now < last.until);
        known.is_some_and(|last| !is_later(epoch, last.epoch))
    }

    /// One has begun. Without memory it is not kept.
    pub(super) fn note(&mut self, qpn: Qpn, peer: PeerQp, epoch: u32) {
        self.0.remove(qpn);
        if self.0.make_room(qpn).is_ok() {
            self.0.insert(qpn, LastEpoch { peer, epoch, until: Nanos::MAX });
        }
    }

    /// The QP is connected anew.
    pub(super) fn end(&mut self, qpn: Qpn, now: Nanos) {
        if let Some(last) = self.0.get_mut(qpn) {
            last.until = last.until.min(now + LATE);
        }
    }

    /// The QP is gone.
    pub(super) fn forget(&mut self, qpn: Qpn) {
        self.0.remove(qpn);
    }
}

impl<E: EndpointHost> Roles<E> {
    /// Whether the QP waits for its peer. One that began with an epoch that was over waits again: else
    /// neither end could go on.
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
            Some(Outcome::Star { role: Role::Stateful, .. }) => {
                self.ask_for_boot(turn, qpn);
                return false;
            }
            _ => return false,
        }
        if !turn.rewind(qpn, prefix.epoch) {
            return false;
        }
        end.may_begin = true;
        true
    }

    /// A Setup is of another boot of the peer's card than what was settled. One of the two is late: the peer
    /// answers an Offer with the boot that it has, and repeats its Setup.
    pub(super) fn ask_for_boot(&self, turn: &mut Turn<'_, E>, qpn: Qpn) {
        if let Some(end) = self.ends.get(qpn) {
            offer_again(turn, end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use starverbs_core::Gid;

    #[test]
    fn the_newest_epoch_counts_until_nothing_arrives_late() {
        let of = |qpn| PeerQp { gid: Gid::from_ipv4([10, 0, 0, 1]), qpn };
        let (peer, other) = (of(7), of(8));
        let mut epochs = Epochs::default();
        assert!(!epochs.is_past(0, 5, peer, 0x1_0003), "nobody was there");
        epochs.note(5, peer, 0x1_0003);
        assert!(epochs.is_past(0, 5, peer, 0x1_0003) && epochs.is_past(Nanos::MAX - 1, 5, peer, 0x1_0002));
        assert!(!epochs.is_past(0, 5, peer, 0x1_0004) && !epochs.is_past(0, 5, other, 0x1_0002));
        epochs.end(5, 100);
        epochs.end(5, 200);
        assert!(epochs.is_past(99 + LATE, 5, peer, 0x1_0002));
        assert!(!epochs.is_past(100 + LATE, 5, peer, 0x1_0002), "numbers come round");
        epochs.note(5, peer, 0x1_0005);
        epochs.forget(5);
        assert!(!epochs.is_past(0, 5, peer, 0x1_0005));
    }
}
