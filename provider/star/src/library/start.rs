//! How an [`SlQp`] begins, and what SF is told of it and of SL's memory.

use starverbs_core::Nanos;
use starverbs_core::mr::Rule;

use crate::control::{Control, Setup, Sum};
use crate::env::StarEnv;
use crate::ring::{CQE_SLOT, REPLAY_SLOT, Stamp, slot};
use crate::stateless::Peer;

use super::{Changes, Patience, SlQp, SlState, is_gate};

impl<E: StarEnv> SlQp<E> {
    /// Connects it: stamps the slots, and tells SF. `known` is what SF's card has been told through other
    /// connections of the memory that it may reach; else it is told `rules`. Receives that were posted are
    /// sent once SF has answered.
    pub fn start(
        &mut self,
        env: &mut E,
        now: Nanos,
        peer: Peer,
        known: Option<Sum>,
        rules: impl Iterator<Item = Rule>,
    ) {
        (self.peer, self.state) = (peer, SlState::Starting);
        self.base = self.init.first_send;
        let Setup { sq_depth, rq_depth, send_ring, recv_ring, replay, replay_slots, .. } = self.init.setup;
        for (ring, depth) in [(send_ring, sq_depth), (recv_ring, rq_depth)] {
            for index in 0..depth {
                let stamp = Stamp::before_psn(peer.epoch, index, depth);
                stamp_slot(env, slot(ring, depth, index, CQE_SLOT), stamp);
            }
        }
        for index in 0..replay_slots {
            let stamp = Stamp::before(peer.epoch, index, replay_slots);
            stamp_slot(env, slot(replay, replay_slots, index, REPLAY_SLOT), stamp);
        }
        self.quiet_since = now;
        self.ask(now, Control::Setup(self.init.setup));
        match known {
            Some(_) => self.ask(now, Control::Begin { known }),
            None => self.tell_all(env, now, rules),
        }
        self.poll_transmit(env, now);
    }

    /// All memory that SF may reach, at first or because it [must be told](SlQp::must_tell).
    pub fn tell_all(&mut self, env: &mut E, now: Nanos, rules: impl Iterator<Item = Rule>) {
        self.ignorant = false;
        rules.for_each(|rule| self.ask(now, Control::Rule(rule)));
        self.ask(now, Control::Begin { known: None });
        self.poll_transmit(env, now);
    }

    /// Whether SF is to be told all rules: it has asked for them, or they were not told when it did not
    /// answer.
    pub fn must_tell(&self) -> bool {
        self.ignorant && self.state == SlState::Ready && self.is_heard()
    }

    /// Whether SF is to be told which rules there are: it has asked, and has been told all that there was to
    /// say before. One answer waits at a time, however often it asks.
    pub fn must_sum_up(&self) -> bool {
        let waits = || self.channel.count(|message| matches!(message, Control::All(_))) > 0;
        self.inquired && !self.ignorant && self.state == SlState::Ready && !waits()
    }

    /// Tells it.
    pub fn sum_up(&mut self, env: &mut E, now: Nanos, rules: Sum) {
        self.inquired = false;
        self.ask(now, Control::All(rules));
        self.poll_transmit(env, now);
    }

    /// Somebody else says what SF is to know of memory, as nobody [hears](SlQp::is_heard) this one: what it
    /// had to say of it is forgotten, lest a rule comes late that others have taken away. Should an answer
    /// come, SF is told all rules anew, as they are then.
    pub fn untell(&mut self) {
        self.channel.recall();
        (self.gate, self.changes) = (self.channel.count(is_gate), Changes::default());
        self.ignorant = true;
    }

    /// What was said through this connection of SL's memory, and SF has not answered.
    pub fn changes(&self) -> Changes {
        self.changes
    }

    /// What the program has changed: SF is told, and WQEs posted from now on are sent once it has answered.
    /// Queues and slots stay.
    pub fn set(&mut self, env: &mut E, now: Nanos, setup: Setup, patience: Patience) {
        self.init.patience = patience;
        if setup != self.init.setup && self.speaks() {
            self.ask(now, Control::Setup(setup));
            self.poll_transmit(env, now);
        }
        self.init.setup = setup;
    }

    /// What SF was told of the QP.
    pub fn setup(&self) -> &Setup {
        &self.init.setup
    }

    /// Its shared receive queue has another ring.
    pub fn replace_rq(&mut self, rq: E::Rq) {
        self.init.rq = rq;
    }
}

/// Stamps a slot as one that nothing came for.
fn stamp_slot<E: StarEnv>(env: &mut E, at: u64, stamp: Stamp) {
    /* memory that is gone gives no completions either: the peer's silence tells */
    _ = env.dma_store(at, stamp.word().to_ne_bytes());
}
