//! A host's StaR: two UDP ports, the events of SL's card for its host, and the ends of connections, where a
//! run has such.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use starverbs_core::wire::IcrcHeader;
use starverbs_core::{Av, FrameMeta, Gid, Nanos, NicError, Port, QpState, Qpn, Seg};
use starverbs_star::bounds::MemRange;
use starverbs_star::card::Turn;
use starverbs_star::control::{Control, MAX_CONTROL, Preference};
use starverbs_star::env::{QpPair, SlEvent, StarDest, StarEnv};
use starverbs_star::form::Form;
use starverbs_star::host::roles::CardIdentity;
use starverbs_star::host::{EndpointHost, Ends as StarEnds, InboundMessage, InboundPacket, MadeSlots};
use starverbs_star::role_message::RoleMessage;
use starverbs_star::seal::{AddrPair, ControlSeal, KEY_LEN, MAX_SEALED, SALT_LEN};
use starverbs_star::wire::{
    CRC_LEN, CardHalf, Crc, PORT_STATEFUL, PORT_STATELESS, StarHead, StarPacket, fill_checksum,
};

use crate::host::{SimEnv, SimHost};
use crate::memory::{READ, WRITE};
use crate::queues::{SimRq, SimSq};

/// A frame that waits for the port's flush.
struct Queued {
    to: Av,
    port: u16,
    /// Header and data, and what was copied at once
    bytes: Vec<u8>,
    payload: Vec<Seg>,
}

/// A frame as it is on the wire, behind its UDP header.
#[derive(Clone, Debug)]
pub struct StarFrame {
    /// Addresses and ports that it travels between
    pub path: IcrcHeader,
    /// From the StaR header to its CRC
    pub bytes: Vec<u8>,
}

/// What a host has of StaR.
pub struct StarPort {
    /// UDP ports of the stateless and the stateful half
    pub ports: [u16; 2],
    /// Events of the card for the host, the oldest first
    pub events: VecDeque<SlEvent>,
    /// There is no memory for slots
    pub no_slots: bool,
    /// The version of the protocol that peers' cards have, if another one
    pub peers_version: Option<u8>,
    /// Under which control messages leave and come, if under one
    pub seal: Option<ControlSeal>,
    /// Role messages of peers, the oldest first. `None`: the card answers that it has no StaR
    inbound: Option<VecDeque<InboundMessage>>,
    /// Slots that are given back
    freed: Rc<RefCell<Vec<(u64, u64)>>>,
    out: Vec<Queued>,
}

/// What a card's StaR is to be.
#[derive(Clone, Copy, Debug)]
pub struct StarCard {
    /// From how many stateful connections on it wants no more
    pub threshold: u32,
    /// What it seals with
    pub key: Option<[u8; KEY_LEN]>,
    /// Boot epoch of the card
    pub boot: u64,
    /// Which packets it sends
    pub form: Form,
}

/// Memory that a card fills for its host.
pub struct CardMemory {
    at: (u64, u64),
    freed: Rc<RefCell<Vec<(u64, u64)>>>,
}

impl Drop for CardMemory {
    fn drop(&mut self) {
        self.freed.borrow_mut().push(self.at);
    }
}

impl EndpointHost for SimEnv {
    type Slots = CardMemory;

    fn make_slots(&mut self, bytes: u64, _: u64) -> Option<MadeSlots<CardMemory>> {
        self.take_slots_back();
        if self.star.no_slots {
            return None;
        }
        let addr = self.memory.alloc(bytes);
        self.memory.allow(addr, bytes, READ | WRITE);
        let memory = CardMemory { at: (addr, bytes), freed: Rc::clone(&self.star.freed) };
        Some(MadeSlots { memory, addr })
    }
    fn slots_of(queue: &SimRq) -> u32 {
        (queue.slots() as u32).next_power_of_two()
    }
    fn inline_memory(_: &SimSq) -> Option<MemRange> {
        None
    }
    fn seal(&mut self) -> Option<&mut ControlSeal> {
        self.star.seal.as_mut()
    }
    fn next_event(&mut self) -> Option<SlEvent> {
        self.star.events.pop_front()
    }
    fn next_message(&mut self) -> Option<InboundMessage> {
        self.star.inbound.as_mut()?.pop_front()
    }
}

impl SimHost {
    /// The card has StaR from now on.
    pub fn open_star(&mut self, card: &StarCard) {
        let StarCard { threshold, key, boot, form } = *card;
        let port = &mut self.env.star;
        port.inbound = Some(VecDeque::new());
        port.seal = key.map(|key| {
            let mut salt = [0; SALT_LEN];
            salt[..8].copy_from_slice(&boot.to_be_bytes());
            salt[8..].copy_from_slice(&self.gid.0[8..]);
            ControlSeal::new(&key, salt)
        });
        let seed = [boot, u64::from(port.ports[0])];
        let identity = CardIdentity { boot, ports: port.ports, threshold, form, seed };
        self.star = Some(Box::new(StarEnds::new(identity, &mut self.nic).expect("memory")));
    }

    /// The program of a QP in RESET wants it to be that.
    pub fn preference(&mut self, qpn: Qpn, preference: Preference) {
        if preference != Preference::Off && self.star.is_some() {
            self.preferences.insert(qpn, preference);
        }
    }

    /// The program of a QP wants it to be that from now on. False: it is none that may be so while it runs.
    pub fn change_preference(&mut self, qpn: Qpn, preference: Preference, now: Nanos) -> bool {
        if let Some(known) = self.preferences.get_mut(&qpn) {
            *known = preference;
        }
        let SimHost { nic, env, star, .. } = self;
        star.as_mut().is_some_and(|ends| ends.set_preference(&mut Turn { nic, env, now }, qpn, preference))
    }

    /// Calls who serves the ends of connections, if the card has StaR.
    pub(crate) fn with_star<R>(
        &mut self,
        now: Nanos,
        call: impl FnOnce(&mut StarEnds<SimEnv>, &mut Turn<'_, SimEnv>) -> R,
    ) -> Option<R> {
        let SimHost { nic, env, star, .. } = self;
        star.as_mut().map(|ends| call(ends, &mut Turn { nic, env, now }))
    }

    /// A QP of a preference has been moved to a state.
    pub(crate) fn moved(&mut self, qpn: Qpn, state: QpState, now: Nanos) {
        if let Some(preference) = self.preferences.get(&qpn).copied() {
            self.with_star(now, |star, turn| star.on_qp_state(turn, qpn, preference, state));
        }
    }

    /// ibv_destroy_qp(3), for ends of StaR as well.
    pub fn destroy_qp(&mut self, qpn: Qpn, now: Nanos) -> Result<(), NicError> {
        if self.with_star(now, |star, turn| star.endpoints.destroy(turn, qpn)) != Some(true) {
            self.nic.destroy_qp(&mut self.env, qpn)?;
        }
        if let Some(star) = &mut self.star {
            star.roles.forget(qpn);
        }
        self.preferences.remove(&qpn);
        Ok(())
    }

    /// Stateful cards get what keys have come to open, or open no longer.
    pub(crate) fn follow_memory(&mut self) {
        self.with_star(self.now, |star, turn| _ = star.endpoints.follow_memory(turn));
    }

    /// ibv_dereg_mr. The program waits with what it does to the memory until
    /// [`is_revoked`](SimHost::is_revoked).
    pub fn dereg_mr(&mut self, key: u32) -> Result<(), NicError> {
        self.nic.dereg_mr(key)?;
        self.follow_memory();
        Ok(())
    }

    /// Whether no stateful card that answers reaches any more for what a key opened.
    pub fn is_revoked(&self, key: u32) -> bool {
        self.star.as_ref().is_none_or(|star| star.endpoints.is_revoked(key))
    }

    /// The same of those, too, that are silent now.
    pub fn is_forgotten(&self, key: u32) -> bool {
        self.star.as_ref().is_none_or(|star| star.endpoints.is_forgotten(key))
    }

    /// Numbers of all QPs.
    pub fn qpns(&self) -> Vec<Qpn> {
        let stateless = self.star.iter().flat_map(|star| star.endpoints.qpns());
        self.nic.qpns().chain(stateless).collect()
    }

    /// A StaR frame came for one of the two ports.
    pub(crate) fn take_star(&mut self, now: Nanos, frame: &StarFrame) {
        let StarFrame { path, bytes } = frame;
        let side = self.half_at(path.dport);
        let packet = StarPacket::open(side, path, bytes).expect("the wire drops what is changed");
        self.take_star_packet(now, side, path, &packet);
    }

    /// As [`take_star`](SimHost::take_star), of a frame without sums
    /// ([`take_star_frames`](SimEnv::take_star_frames)).
    pub(crate) fn take_plain_star(&mut self, now: Nanos, frame: &StarFrame) {
        let StarFrame { path, bytes } = frame;
        let side = self.half_at(path.dport);
        let body = bytes.len().checked_sub(CRC_LEN).and_then(|len| bytes.get(..len));
        let packet = StarPacket::parse(side, body.expect("with room for a CRC")).expect("as it left");
        self.take_star_packet(now, side, path, &packet);
    }

    fn half_at(&self, port: u16) -> CardHalf {
        match self.env.star.ports.iter().position(|own| *own == port) {
            Some(0) => CardHalf::Stateless,
            Some(_) => CardHalf::Stateful,
            None => panic!("a StaR frame for a port that nobody has"),
        }
    }

    fn take_star_packet(&mut self, now: Nanos, side: CardHalf, path: &IcrcHeader, packet: &StarPacket<'_>) {
        let meta = FrameMeta { src: path.src, dst: path.dst, ..FrameMeta::default() };
        let inbound = InboundPacket { side, meta: &meta, port: path.sport, packet };
        self.with_star(now, |star, turn| star.handle_packet(turn, &inbound));
        self.env.take_slots_back();
    }
}

impl Default for StarPort {
    fn default() -> Self {
        StarPort {
            ports: [PORT_STATELESS, PORT_STATEFUL],
            events: VecDeque::new(),
            no_slots: false,
            peers_version: None,
            seal: None,
            inbound: None,
            freed: Rc::default(),
            out: Vec::new(),
        }
    }
}

impl StarPort {
    /// A role message of a peer. False: there is no StaR here.
    pub(crate) fn on_message(&mut self, meta: &FrameMeta, qps: QpPair, message: &[u8]) -> bool {
        let mut room = [0; MAX_CONTROL];
        let other = self.peers_version.and_then(|version| of_version(version, message, &mut room));
        let message = other.map_or(message, |len| &room[..len]);
        if let (Some(inbound), Some(new)) = (&mut self.inbound, InboundMessage::new(meta, qps, message)) {
            inbound.push_back(new);
        }
        self.inbound.is_some()
    }

    /// Frames that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.out.len()
    }
}

impl SimEnv {
    /// No card may touch slots any more that were given back.
    fn take_slots_back(&mut self) {
        for (addr, bytes) in self.star.freed.borrow_mut().drain(..) {
            self.memory.allow(addr, bytes, 0);
        }
    }

    /// Takes the StaR frames out of the port; payloads are read now, as a socket would.
    pub fn flush_star(&mut self) -> Vec<StarFrame> {
        let mut frames = Vec::with_capacity(self.star.out.len());
        self.take_star_frames(|mut frame| {
            let body = frame.bytes.len() - CRC_LEN;
            fill_checksum(&frame.path, &mut frame.bytes[..body]);
            let mut crc = Crc::new();
            crc.update(&frame.bytes[..body]);
            frame.bytes[body..].copy_from_slice(&crc.finish());
            frames.push(frame);
        });
        frames
    }

    /// The same one by one, with checksum and CRC 0: for a wire that changes nothing.
    pub(crate) fn take_star_frames(&mut self, mut each: impl FnMut(StarFrame)) {
        let SimEnv { memory, star, gid, .. } = self;
        let StarPort { ports, out, .. } = star;
        for Queued { to, port, mut bytes, payload } in out.drain(..) {
            for s in payload {
                memory.check(s.addr, s.len as usize, READ);
                bytes.extend_from_slice(memory.read(s.addr, s.len as usize));
            }
            bytes.extend([0; CRC_LEN]);
            each(StarFrame { path: path(*gid, ports[CardHalf::Stateful as usize], to.dgid, port), bytes });
        }
    }
}

/// The role message that a card of another version would have sent, if it says its version; gives its length.
fn of_version(other: u8, message: &[u8], room: &mut [u8]) -> Option<usize> {
    let mut role = RoleMessage::decode(message)?;
    match &mut role.message {
        Control::Offer { version, .. } | Control::Change { version, .. } => *version = other,
        _ => return None,
    }
    role.encode(room)
}

fn path(src: Gid, sport: u16, dst: Gid, dport: u16) -> IcrcHeader {
    IcrcHeader { src, dst, sport, dport, ip_id: 0 }
}

impl StarEnv for SimEnv {
    fn negotiate(&mut self, meta: &FrameMeta, qps: QpPair, message: &[u8]) -> bool {
        self.star.on_message(meta, qps, message)
    }

    fn send_star(&mut self, to: StarDest<'_>, head: &StarHead, data: &[u8], payload: &[Seg], volatile: bool) {
        let (src, dst) = (&self.gid, &to.av.dgid);
        let len: usize = payload.iter().map(|s| s.len as usize).sum();
        let mut bytes = Vec::with_capacity(head.bytes().len() + data.len() + len + CRC_LEN);
        let mut sealed = |seal: &mut ControlSeal| {
            let mut room = [0; MAX_SEALED];
            let (head, len) = seal.seal_packet(AddrPair { src, dst }, head, data, &mut room)?;
            bytes.extend_from_slice(head.bytes());
            bytes.extend_from_slice(&room[..len]);
            Some(())
        };
        if self.star.seal.as_mut().and_then(&mut sealed).is_none() {
            bytes.extend_from_slice(head.bytes());
            bytes.extend_from_slice(data);
        }
        let mut payload = payload.to_vec();
        if volatile {
            for s in payload.drain(..) {
                bytes.extend_from_slice(self.memory.read(s.addr, s.len as usize));
            }
        }
        self.star.out.push(Queued { to: *to.av, port: to.port, bytes, payload });
    }

    fn can_send_star(&self) -> bool {
        self.can_send()
    }

    fn star_load(&mut self, addr: u64) -> Option<[u8; 8]> {
        if self.absent(addr) {
            return None;
        }
        self.memory.check(addr, 8, READ);
        Some(self.memory.word(addr).to_ne_bytes())
    }

    fn star_event(&mut self, event: SlEvent) {
        self.star.events.push_back(event);
    }
}
