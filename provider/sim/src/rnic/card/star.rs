//! StaR (Wang et al., ICNP 2021) on a card: the stateless side executes what packets carry, the stateful side
//! names it.
//!
//! The stateless side has no context, no window, no order of its own: a WQE goes out as it is (WQEP), a
//! packet names memory, and the answer goes when memory has it. All that is kept of a connection, and the
//! security check, is the other side's.

use super::{Read, Rnic, Role, Stage, World, Write, channel};
use crate::rnic::events::Picos;
use crate::rnic::fabric::{Body, Packet};
use crate::rnic::host::{Batch, Verb};
use crate::rnic::params::Params;

impl Rnic {
    /// Stateless: WQEs came from the host, and leave as they are (III-C2).
    pub(super) fn pack_wqes(&mut self, batch: Batch, world: &mut World<'_>) {
        let (to, qpn) = self.peers[batch.qpn as usize];
        self.tally.wqes += u64::from(batch.wqes);
        for _ in 0..batch.wqes {
            self.tally.packed += 1;
            // its number is the library's, and only a repeat would need it
            let (body, bytes) = (Body::Wqep(batch.verb), world.params.bytes);
            let packet =
                Packet { from: self.id, to, qpn, sender_qpn: batch.qpn, psn: 0, bytes, signaled: true, body };
            self.hand_out(packet, world);
        }
    }

    /// Stateless: a packet arrived; it has the place of its data or CQE (III-C3, III-C4).
    pub(super) fn follow(&mut self, packet: Packet, world: &mut World<'_>) {
        let ready = world.now() + world.params.translate;
        let (channel, bytes) = match packet.body {
            Body::Gd => {
                self.tally.carried_out += 1;
                self.reads.ask(channel::DATA, ready, packet.bytes, Read::Answer(packet.answer(Body::Gda)));
                self.wake_at(Stage::Read, ready, world);
                return;
            }
            Body::Rd => {
                self.tally.carried_out += 1;
                (channel::DATA, packet.bytes)
            }
            // an EA goes to the host's library as a CQE does
            _ => (channel::COMPLETION, world.params.cqe_bytes),
        };
        self.writes.ask(channel, ready, bytes, Write::Guided(packet));
        self.wake_at(Stage::Write, ready, world);
    }

    /// Stateless: what a packet brought is in memory.
    pub(super) fn followed(&mut self, packet: Packet, world: &mut World<'_>) {
        match packet.body {
            Body::Rd => self.hand_out(packet.answer(Body::Rda), world),
            Body::Cqep(verb) => {
                self.tally.completions += 1;
                self.hand_out(packet.answer(Body::Ea), world);
                match verb {
                    Verb::Send => world.hosts.completed(self.id, packet.qpn, world.events, world.params),
                    Verb::Recv => world.hosts.received(self.id, packet.qpn, world.events, world.params),
                }
            }
            _ => self.tally.packed_known += 1,
        }
    }

    /// Stateful: a packet of the stateless side, and the connection's context, are there.
    pub(super) fn guide(&mut self, packet: Packet, world: &mut World<'_>) {
        match packet.body {
            Body::Wqep(Verb::Recv) => {
                self.remote_receives[packet.qpn as usize] += 1;
                self.hand_out(packet.answer(Body::Ea), world);
            }
            Body::Wqep(Verb::Send) => {
                self.hand_out(packet.answer(Body::Ea), world);
                self.hand_out(packet.answer(Body::Gd), world);
            }
            Body::Gda => {
                let ready = world.now() + world.params.translate;
                self.writes.ask(channel::DATA, ready, packet.bytes, Write::Payload);
                self.wake_at(Stage::Write, ready, world);
                self.complete_receive(packet.qpn, world);
                self.complete_there(&packet, Verb::Send, world);
            }
            Body::Rda => self.respond(packet, world),
            _ => self.tally.sent_cqes_known += 1,
        }
    }

    /// Stateful: the answer to the last data packet of a WQE of the stateless side is here, so that its CQE
    /// can go.
    pub(super) fn complete_there(&mut self, last: &Packet, verb: Verb, world: &mut World<'_>) {
        self.tally.sent_cqes += 1;
        self.hand_out(last.answer(Body::Cqep(verb)), world);
    }

    /// Stateful: a SEND takes a RECV of the other side.
    pub(super) fn take_remote_receive(&mut self, qpn: u32) {
        if let Some(receives) = self.remote_receives.get_mut(qpn as usize) {
            self.tally.unmatched += u64::from(*receives == 0);
            *receives = receives.saturating_sub(1);
        }
    }

    /// How long the security check keeps a packet (III-D2). It takes one a cycle, and only those for a
    /// stateless side.
    pub(super) fn check_security(&mut self, packet: &Packet, params: &Params) -> Picos {
        if self.role != Role::Stateful {
            return 0;
        }
        debug_assert!(matches!(packet.body, Body::Rd | Body::Gd | Body::Cqep(_) | Body::Ea));
        self.tally.guiding += 1;
        self.tally.checked += u64::from(params.security_check);
        if params.security_check { params.check_delay } else { 0 }
    }
}
