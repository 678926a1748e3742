//! How an [`SlQp`] begins, and what it sends of its set-up and of SL's memory.

use starverbs_core::Nanos;
use starverbs_core::mr::MemoryRule;

use crate::control::{Control, Setup, Sum};
use crate::env::StarEnv;
use crate::ring::{CQE_SLOT, REPLAY_SLOT, Stamp, slot, write_slot};
use crate::stateless::SfPeer;

use super::{Changes, Patience, SlQp, SlState, is_gate};

impl<E: StarEnv> SlQp<E> {
    /// Connects it: stamps the slots, opens the gate, sends the set-up. `known`: sum of the rules that other
    /// connections have sent; else `rules` are sent. Receives that were posted are sent once SF has answered.
    pub fn start(
        &mut self,
        env: &mut E,
        now: Nanos,
        peer: SfPeer,
        known: Option<Sum>,
        rules: impl Iterator<Item = MemoryRule>,
    ) {
        (self.peer, self.state) = (peer, SlState::Starting);
        self.base = self.init.first_send;
        let (setup, replay) = (self.init.setup, self.init.setup.replay());
        let Setup { sq_depth, rq_depth, replay_slots, .. } = setup;
        for (ring, depth) in [(setup.send_ring(), sq_depth), (setup.recv_ring(), rq_depth)] {
            for index in 0..depth {
                let stamp = Stamp::before_psn(peer.epoch, index, depth);
                stamp_slot(env, slot(ring, depth, index, CQE_SLOT), stamp);
            }
        }
        for index in 0..replay_slots {
            let stamp = Stamp::before(peer.epoch, index, replay_slots);
            stamp_slot(env, slot(replay, replay_slots, index, REPLAY_SLOT), stamp);
        }
        stamp_slot(env, write_slot(replay, replay_slots), Stamp::before(peer.epoch, 0, 1));
        self.set_gate(env, self.init.setup.token.mac);
        env.note_star_mtu(setup.mtu);
        self.quiet_since = now;
        self.push_message(now, Control::Setup(self.init.setup));
        match known {
            Some(_) => self.push_message(now, Control::Begin { known }),
            None => self.send_rules(env, now, rules),
        }
        self.send_messages(env, now);
    }

    /// Sends all rules, at first or because it [must](SlQp::must_send_rules).
    pub fn send_rules(&mut self, env: &mut E, now: Nanos, rules: impl Iterator<Item = MemoryRule>) {
        self.sf_lacks_rules = false;
        rules.for_each(|rule| self.push_message(now, Control::Rule(rule)));
        self.push_message(now, Control::Begin { known: None });
        self.send_messages(env, now);
    }

    /// Whether all rules are to be sent: SF has asked for them, or they were retracted while it was silent.
    pub fn must_send_rules(&self) -> bool {
        self.sf_lacks_rules && self.state == SlState::Ready && self.is_reachable()
    }

    /// Whether the sum of all rules is to be sent: SF has asked for it, and needs no rules before. One answer
    /// waits at a time, however often it asks.
    pub fn must_send_sum(&self) -> bool {
        let waits = || self.channel.count(|message| matches!(message, Control::RuleSum(_))) > 0;
        self.sum_wanted && !self.sf_lacks_rules && self.state == SlState::Ready && !waits()
    }

    /// Sends it.
    pub fn send_sum(&mut self, env: &mut E, now: Nanos, rules: Sum) {
        self.sum_wanted = false;
        self.push_message(now, Control::RuleSum(rules));
        self.send_messages(env, now);
    }

    /// Another connection sends the rules, as SF is not [reachable](SlQp::is_reachable) by this one. What
    /// this one had to send is retracted, so that no rule arrives after its end. If SF answers again, all
    /// rules are sent anew.
    pub fn retract_rules(&mut self) {
        self.channel.retract_memory();
        (self.gate, self.changes) = (self.channel.count(is_gate), Changes::default());
        self.sf_lacks_rules = true;
    }

    /// Its memory messages without an answer.
    pub fn changes(&self) -> Changes {
        self.changes
    }

    /// Sends a Setup with what the program has changed. WQEs posted from now on are sent once SF has
    /// answered. Queues and slots stay.
    pub fn set(&mut self, env: &mut E, now: Nanos, setup: Setup, patience: Patience) {
        self.init.patience = patience;
        if setup != self.init.setup && self.is_connected() {
            self.push_message(now, Control::Setup(setup));
            self.send_messages(env, now);
        }
        self.init.setup = setup;
    }

    /// The card does nothing for this connection any more, whatever comes: the program gets its buffers back,
    /// or the slots are to be another's.
    pub fn close_gate(&self, env: &mut E) {
        self.set_gate(env, 0);
    }

    fn set_gate(&self, env: &mut E, word: u64) {
        /* without its memory nothing passes */
        _ = env.dma_store(self.init.setup.token.slots.gate(), word.to_ne_bytes());
        env.dma_fence();
    }

    /// Its set-up.
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
    /* without its memory it gets no completions, and fails as if SF were silent */
    _ = env.dma_store(at, stamp.word().to_ne_bytes());
}
