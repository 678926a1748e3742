//! Role messages on their way out and in: encoded, and sealed where there is a key.

use starverbs_core::{Av, Psn, Qpn};

use crate::control::{Control, MAX_CONTROL, Setup};
use crate::datagram;
use crate::env::QpPair;
use crate::role_message::RoleMessage;
use crate::seal::{AddrPair, MAX_SEALED};
use crate::stateless::{SfPeer, send_control};
use crate::wire::{Prefix, Ptype, StarPacket};

use super::super::{EndpointHost, InboundMessage, Turn};
use super::End;

/// Answers each Setup of a stateless end with Bye: the QP is in ERR.
pub(super) fn refuse<E: EndpointHost>(turn: &mut Turn<'_, E>, qpn: Qpn, to: &SfPeer) {
    send_control(turn.env, to, qpn, Psn::default(), Some(&Control::Bye { why: 0, recvs: Psn::default() }));
}

/// The Setup of a stateless end, if the packet is its first message, and its QPN and epoch.
pub(super) fn first_setup(packet: &StarPacket<'_>) -> Option<(Setup, Prefix)> {
    if packet.header.ptype != Ptype::Wqep || packet.header.psn != Psn::default() {
        return None;
    }
    match Control::decode(packet.data)? {
        Control::Setup(setup) => Some((setup, packet.prefix?)),
        _ => None,
    }
}

/// Asks the peer of an end whose roles are settled what it is.
pub(super) fn offer_again<E: EndpointHost>(turn: &mut Turn<'_, E>, end: &End) {
    let offer = end.message(end.negotiation.offer());
    send_message(turn, end.qps(), &end.av, |room| offer.encode(room));
}

/// Sends a role message.
pub(super) fn send_message<E: EndpointHost>(
    turn: &mut Turn<'_, E>,
    qps: QpPair,
    av: &Av,
    encode: impl FnOnce(&mut [u8; MAX_CONTROL]) -> Option<usize>,
) {
    let (mut plain, mut sealed) = ([0; MAX_CONTROL], [0; MAX_SEALED]);
    let Some(len) = encode(&mut plain) else { return };
    let (message, gids) = (plain.get(..len).unwrap_or_default(), (&av.sgid, &av.dgid));
    let (src, dst) = gids;
    let message = match turn.env.seal() {
        Some(seal) => seal
            .seal_offer(AddrPair { src, dst }, qps, message, &mut sealed)
            .and_then(|len| sealed.get(..len)),
        None => Some(message),
    };
    if let Some(message) = message {
        datagram::send(turn.env, qps, av, message);
    }
}

/// The role message of a peer. `None`: it is malformed, or not sealed as it must be.
pub(super) fn decode_message<E: EndpointHost>(
    turn: &mut Turn<'_, E>,
    inbound: &InboundMessage,
) -> Option<RoleMessage> {
    let mut room = [0; MAX_CONTROL];
    let ends = AddrPair { src: &inbound.source, dst: &inbound.dest };
    let opened = match turn.env.seal() {
        Some(seal) => seal.open_offer(ends, inbound.qps, inbound.message(), &mut room),
        None => Ok(inbound.message()),
    };
    let opened = opened.map_err(|error| error.count(turn.nic.counters())).ok()?;
    RoleMessage::decode(opened)
}
