//! From the wire to memory and back to the wire.

use starverbs_core::qpc::Channel;

use super::{Card, Read, Stage, World, Write, channel};
use crate::rnic::fabric::{Body, Packet};

impl Card {
    /// A packet reached the card.
    pub(in crate::rnic) fn arrive(&mut self, packet: Packet, world: &mut World<'_>) {
        self.arrived.push_back(packet);
        self.wake(Stage::In, world);
    }

    /// Responses go on at once; a request first needs an index, and those behind it wait.
    pub(super) fn sort_in(&mut self, world: &mut World<'_>) {
        let Some(packet) = self.arrived.front().copied() else { return };
        match packet.body {
            Body::Ack | Body::Data => {
                self.responses.push_back(packet);
                self.wake(Stage::Requester, world);
            }
            Body::Write | Body::Read => {
                let Ok(index) = self.rx.begin(packet) else { return };
                self.ask_qpc(Channel::Rx, index, packet.qpn, 0, world);
            }
        }
        self.arrived.pop_front();
        if !self.arrived.is_empty() {
            self.wake(Stage::In, world);
        }
    }

    /// A request and its context are there.
    pub(super) fn responder(&mut self, world: &mut World<'_>) {
        let Some(answer) = self.rx_answers.pop_front() else { return };
        let (Some(packet), Some(context)) = (self.rx.finish(answer.index), answer.context) else { return };
        self.tally.carried_out += 1;
        self.tally.out_of_order += u64::from(context.expected_psn != packet.psn);
        let ready = world.now() + world.params.translate;
        if packet.body == Body::Write {
            self.writes.ask(channel::DATA, ready, packet.bytes, Write::Payload);
            self.wake_at(Stage::Write, ready, world);
            self.hand_out(packet.answer(Body::Ack), world);
        } else {
            self.reads.ask(channel::DATA, ready, packet.bytes, Read::Answer(packet.answer(Body::Data)));
            self.wake_at(Stage::Read, ready, world);
        }
        if !self.arrived.is_empty() {
            self.wake(Stage::In, world);
        }
        if !self.rx_answers.is_empty() {
            self.wake(Stage::Responder, world);
        }
    }
}
