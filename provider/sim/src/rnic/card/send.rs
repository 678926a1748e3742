//! From the doorbell to the request packet, and from its response to the completion.

use starverbs_core::qpc::RequestChannel;

use super::translate::Page;
use super::{Read, Rnic, Stage, World, Wqe, Write, channel};
use crate::rnic::fabric::{Body, FabricPacket};
use crate::rnic::host::DoorbellBatch;
use crate::rnic::params::RnicOp;

impl Rnic {
    /// A doorbell reached the card.
    pub(in crate::rnic) fn doorbell(&mut self, batch: DoorbellBatch, world: &mut World<'_>) {
        self.tally.doorbells += 1;
        self.tally.announced += u64::from(batch.wqes);
        self.doorbells.push_back(batch);
        self.wake(Stage::Doorbell, world);
    }

    pub(super) fn take_doorbell(&mut self, world: &mut World<'_>) {
        let Some(batch) = self.doorbells.front().copied() else { return };
        let descriptors = self.descriptors + u32::from(batch.wqes);
        if descriptors > world.params.descriptor_fifo {
            return;
        }
        let Ok(index) = self.sq.begin(batch) else { return };
        self.doorbells.pop_front();
        self.descriptors = descriptors;
        self.ask_qpc(RequestChannel::Sq, index, batch.qpn, batch.wqes, world);
        if !self.doorbells.is_empty() && self.sq.has_room() {
            self.wake(Stage::Doorbell, world);
        }
    }

    /// The SQ's address came: one read brings all WQEs of the doorbell.
    pub(super) fn fetch_descriptors(&mut self, world: &mut World<'_>) {
        let Some(batch) = self.sq_answers.pop_front().and_then(|answer| self.sq.finish(answer.index)) else {
            return;
        };
        self.read_wqes(batch, world);
        if !self.doorbells.is_empty() {
            self.wake(Stage::Doorbell, world);
        }
        if !self.sq_answers.is_empty() {
            self.wake(Stage::Fetch, world);
        }
    }

    fn read_wqes(&mut self, batch: DoorbellBatch, world: &mut World<'_>) {
        let bytes = u32::from(batch.wqes) * world.params.wqe_bytes;
        let ready = self.translated(batch.qpn, Page::Ring, world);
        self.reads.ask(channel::DESCRIPTOR, ready, bytes, Read::Wqes(batch));
        self.wake_at(Stage::Read, ready, world);
    }

    pub(super) fn on_descriptors(&mut self, batch: DoorbellBatch, world: &mut World<'_>) {
        let last = batch.wqes.saturating_sub(1);
        self.wqes.extend((0..batch.wqes).map(|number| Wqe { qpn: batch.qpn, signaled: number == last }));
        self.tally.wqes += u64::from(batch.wqes);
        self.wake(Stage::Descriptor, world);
    }

    pub(super) fn take_descriptor(&mut self, world: &mut World<'_>) {
        let Some(wqe) = self.wqes.front().copied() else { return };
        let Ok(index) = self.tx.begin(wqe) else { return };
        self.wqes.pop_front();
        self.descriptors -= 1;
        if !self.doorbells.is_empty() {
            self.wake(Stage::Doorbell, world);
        }
        self.ask_qpc(RequestChannel::Tx, index, wqe.qpn, 0, world);
        if !self.wqes.is_empty() && self.tx.has_room() {
            self.wake(Stage::Descriptor, world);
        }
    }

    /// Descriptor and context are there.
    pub(super) fn prepare(&mut self, world: &mut World<'_>) {
        let Some(answer) = self.tx_answers.pop_front() else { return };
        let (Some(wqe), Some(context)) = (self.tx.finish(answer.index), answer.context) else { return };
        let (peer, peer_qpn) = self.peers[wqe.qpn as usize];
        let bytes = world.params.bytes;
        let body = match world.params.op {
            RnicOp::Write => Body::Write,
            RnicOp::Read => Body::Read,
            RnicOp::Send => Body::Send,
        };
        self.prepared.push_back(FabricPacket {
            from: self.id,
            to: peer,
            qpn: peer_qpn,
            sender_qpn: wqe.qpn,
            psn: context.send_psn,
            bytes,
            signaled: wqe.signaled,
            body,
        });
        if body.brings_data() {
            let ready = self.translated(wqe.qpn, Page::Data, world);
            self.reads.ask(channel::DATA, ready, bytes, Read::Payload);
            self.wake_at(Stage::Read, ready, world);
        } else {
            self.wake(Stage::Requester, world);
        }
        if !self.wqes.is_empty() {
            self.wake(Stage::Descriptor, world);
        }
        if !self.tx_answers.is_empty() {
            self.wake(Stage::Prepare, world);
        }
    }

    /// Responses go before requests, so that the window opens.
    pub(super) fn requester(&mut self, world: &mut World<'_>) {
        if let Some(response) = self.responses.pop_front() {
            self.take_response(&response, world);
        } else if self.may_request(world)
            && let Some(packet) = self.prepared.pop_front()
        {
            self.payloads -= u32::from(packet.body.brings_data());
            self.window += 1;
            self.tally.sent += 1;
            self.next_request = world.now() + world.params.request;
            self.hand_out(packet, world);
        }
        if !self.responses.is_empty() || self.may_request(world) {
            self.wake(Stage::Requester, world);
        } else if self.has_request(world) {
            self.wake_at(Stage::Requester, self.next_request, world);
        }
    }

    /// Whether a request may go with the next cycle.
    fn may_request(&self, world: &World<'_>) -> bool {
        self.has_request(world) && self.next_request <= world.now()
    }

    fn has_request(&self, world: &World<'_>) -> bool {
        let ready =
            self.prepared.front().is_some_and(|packet| !packet.body.brings_data() || self.payloads > 0);
        ready && self.window < world.params.window
    }

    fn take_response(&mut self, response: &FabricPacket, world: &mut World<'_>) {
        self.window -= 1;
        self.tally.acked += 1;
        let expected = &mut self.acked[response.qpn as usize];
        self.tally.out_of_order += u64::from(*expected != response.psn);
        *expected += 1;
        let ready = world.now() + world.params.translate;
        if response.body == Body::Data {
            let ready = self.translated(response.qpn, Page::Data, world);
            self.writes.ask(channel::DATA, ready, response.bytes, Write::Payload);
            self.wake_at(Stage::Write, ready, world);
        }
        if response.signaled {
            let ready = ready + world.params.cq_context;
            let what = Write::Completion(response.qpn);
            self.writes.ask(channel::COMPLETION, ready, world.params.cqe_bytes, what);
            self.wake_at(Stage::Write, ready, world);
        }
    }
}
