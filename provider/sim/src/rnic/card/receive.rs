//! From the wire to memory and back to the wire.

use starverbs_core::qpc::RequestChannel;

use super::translate::Page;
use super::{OTHER, REQUEST, Read, Rnic, Stage, World, Write, channel};
use crate::rnic::fabric::{Body, FabricPacket};

impl Rnic {
    /// A packet reached the card.
    pub(in crate::rnic) fn arrive(&mut self, packet: FabricPacket, world: &mut World<'_>) {
        self.arrived.push_back(packet);
        self.wake(Stage::In, world);
    }

    /// Responses go on at once; a request first needs an index, and those behind it wait.
    pub(super) fn sort_in(&mut self, world: &mut World<'_>) {
        let Some(packet) = self.arrived.front().copied() else { return };
        match packet.body {
            Body::Ack | Body::Data if !world.params.acks_ask => self.respond(packet, world),
            body => {
                let Ok(index) = self.rx.begin(packet) else { return };
                let request = matches!(body, Body::Write | Body::Read | Body::Send);
                self.ask_qpc(
                    RequestChannel::Rx,
                    index,
                    packet.qpn,
                    if request { REQUEST } else { OTHER },
                    world,
                );
            }
        }
        self.arrived.pop_front();
        if !self.arrived.is_empty() {
            self.wake(Stage::In, world);
        }
    }

    /// A response goes to the requester.
    pub(super) fn respond(&mut self, packet: FabricPacket, world: &mut World<'_>) {
        self.responses.push_back(packet);
        self.wake(Stage::Requester, world);
    }

    /// A packet and its context are there.
    pub(super) fn responder(&mut self, world: &mut World<'_>) {
        let Some(answer) = self.rx_answers.pop_front() else { return };
        let (Some(packet), Some(context)) = (self.rx.finish(answer.index), answer.context) else { return };
        match packet.body {
            Body::Write | Body::Read | Body::Send => {
                self.tally.out_of_order += u64::from(context.expected_psn != packet.psn);
                self.carry_out(packet, world);
            }
            Body::Ack | Body::Data => self.respond(packet, world),
        }
        if !self.arrived.is_empty() {
            self.wake(Stage::In, world);
        }
        if !self.rx_answers.is_empty() {
            self.wake(Stage::Responder, world);
        }
    }

    fn carry_out(&mut self, packet: FabricPacket, world: &mut World<'_>) {
        self.tally.carried_out += 1;
        let ready = world.now() + world.params.translate;
        if packet.body == Body::Read {
            let ready = self.translated(packet.qpn, Page::Data, world);
            self.reads.ask(channel::DATA, ready, packet.bytes, Read::Answer(packet.answer(Body::Data)));
            self.wake_at(Stage::Read, ready, world);
            return;
        }
        if packet.body == Body::Send {
            let bytes = world.params.recv_wqe_bytes;
            self.reads.ask(channel::DESCRIPTOR, ready, bytes, Read::Receive(packet));
            self.wake_at(Stage::Read, ready, world);
            return;
        }
        self.place(packet, world);
    }

    /// What a request brought goes to memory, and its ACK to the wire.
    pub(super) fn place(&mut self, packet: FabricPacket, world: &mut World<'_>) {
        let ready = self.translated(packet.qpn, Page::Data, world);
        self.writes.ask(channel::DATA, ready, packet.bytes, Write::Payload);
        self.wake_at(Stage::Write, ready, world);
        if packet.body == Body::Send {
            self.complete_receive(packet.qpn, world);
        }
        self.hand_out(packet.answer(Body::Ack), world);
    }

    /// The CQE of a RECV, behind its data.
    pub(super) fn complete_receive(&mut self, qpn: u32, world: &mut World<'_>) {
        let ready = world.now() + world.params.translate + world.params.cq_context;
        self.writes.ask(channel::COMPLETION, ready, world.params.cqe_bytes, Write::Received(qpn));
        self.wake_at(Stage::Write, ready, world);
    }
}
