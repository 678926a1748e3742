//! The switch and its links: each output takes one packet at a time, each link delays.

use std::collections::VecDeque;

use super::card::{CardEvent, CardId};
use super::events::{EventQueue, Picos};
use super::params::Params;

/// What a packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Body {
    /// RDMA WRITE, with data
    Write,
    /// RDMA READ request
    Read,
    /// SEND, with data
    Send,
    Ack,
    /// RDMA READ response, with data
    Data,
}

impl Body {
    /// Whether data leaves with it that must be read from memory first, on the side that begins.
    pub(super) fn brings_data(self) -> bool {
        matches!(self, Body::Write | Body::Send)
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct FabricPacket {
    pub(super) from: CardId,
    pub(super) to: CardId,
    /// The QP there
    pub(super) qpn: u32,
    /// The QP that sent the request
    pub(super) sender_qpn: u32,
    pub(super) psn: u32,
    /// Of the message
    pub(super) bytes: u32,
    /// What the sender's window would know: whether a completion is wanted
    pub(super) signaled: bool,
    pub(super) body: Body,
}

impl FabricPacket {
    /// Bytes of the message that it carries.
    pub(super) fn payload(&self) -> u32 {
        match self.body {
            Body::Write | Body::Send | Body::Data => self.bytes,
            _ => 0,
        }
    }

    /// Bytes that it has on the wire beside those that all have.
    pub(super) fn on_wire(&self, params: &Params) -> u32 {
        self.payload() + if self.body == Body::Ack { params.ack_bytes } else { 0 }
    }

    /// Its answer.
    pub(super) fn answer(self, body: Body) -> FabricPacket {
        let FabricPacket { from, to, qpn, sender_qpn, .. } = self;
        FabricPacket { from: to, to: from, qpn: sender_qpn, sender_qpn: qpn, body, ..self }
    }
}

/// The switch.
pub(super) struct Fabric {
    /// When each output is free
    free_at: Vec<Picos>,
    /// On the way to each card, in order
    under_way: Vec<VecDeque<FabricPacket>>,
    pub(super) sent: u64,
    pub(super) sent_bytes: u64,
    pub(super) received: u64,
    pub(super) received_bytes: u64,
}

impl Fabric {
    pub(super) fn new(cards: usize) -> Self {
        Fabric {
            free_at: vec![0; cards],
            under_way: vec![VecDeque::new(); cards],
            sent: 0,
            sent_bytes: 0,
            received: 0,
            received_bytes: 0,
        }
    }

    /// `packet` leaves its card at `now`.
    pub(super) fn send(
        &mut self,
        packet: FabricPacket,
        now: Picos,
        params: &Params,
        events: &mut EventQueue<CardEvent>,
    ) {
        self.sent += 1;
        self.sent_bytes += u64::from(packet.payload());
        let output = usize::from(packet.to);
        let start = self.free_at[output].max(now + params.switch.latency);
        self.free_at[output] = start + params.switch.busy(packet.on_wire(params));
        self.under_way[output].push_back(packet);
        events.push(self.free_at[output] + params.link, CardEvent::Arrive(packet.to));
    }

    /// The packet that reaches `card` now.
    pub(super) fn receive(&mut self, card: CardId) -> Option<FabricPacket> {
        let packet = self.under_way[usize::from(card)].pop_front()?;
        self.received += 1;
        self.received_bytes += u64::from(packet.payload());
        Some(packet)
    }
}
