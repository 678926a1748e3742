//! Two 1RMA cards, and somebody between them who reads, drops, repeats, changes and forges packets; and who
//! has keys of some of the client's own, as a tenant of the same host would.
//!
//! What must hold: no byte is touched that no key opens to its sender; the victim's region, of which the
//! honest client alone has keys, holds what that client and the owner wrote, or pieces of it; no answer to
//! what cannot be authenticated is longer than it; tables empty again.

use starverbs_onerma::{
    COMMAND_LEN, COMPLETION_LEN, CardConfig, CardPath, Class, Completion, DerivedKey, OneRmaCommand,
    OneRmaOp, REKEY_LEN, Region, RegionId, RegionKey, Rights, Seal, Transmit,
    wire::{Hop, Iv, OneRmaHeader, PacketPrefix},
};
use starverbs_sim::onerma::{OneRmaHost, Portal, SentPacket, SimRegion, SimSeal};

use crate::bytes::Bytes;

const CLIENT: usize = 0;
const SERVER: usize = 1;
const PID: u32 = 7;
const EVIL: u32 = 8;
/// Of the victim's region
const SECRET: RegionKey = RegionKey([0x5e; 16]);
/// Of a region that the attacker has keys of
const SHARED: RegionKey = RegionKey([0x77; 16]);
const LEN: u64 = 8192;
/// What the honest client writes into the victim's region
const HONEST: u8 = 0xc1;
/// What it holds before
const BEFORE: u8 = 0xb2;
/// What others may do with the server's regions, with a key
const REMOTE: Rights = Rights::REMOTE_READ.union(Rights::REMOTE_WRITE).union(Rights::REMOTE_REKEY);
/// The server's process
const OWNER: u32 = 1;
/// The step in which it closes the victim's region
const REOPEN: u8 = 0xff;
/// Steps of one input; more is not looked at.
const MOST: usize = 300;

struct World {
    hosts: [OneRmaHost; 2],
    portals: [Portal; 2],
    local: SimRegion,
    evil_local: SimRegion,
    victim: SimRegion,
    shared: SimRegion,
    /// On the wire, and all that was
    wire: Vec<SentPacket>,
    tape: Vec<SentPacket>,
    now: u64,
}

impl World {
    fn new() -> World {
        let config = CardConfig {
            slots: 16,
            portals: 2,
            regions: 16,
            transfers: 4,
            inbound: 4,
            window: 16384,
            fragment: 1024,
            nack_threshold: 16384,
            ..CardConfig::default()
        };
        let mut hosts = [0, 1].map(|number| OneRmaHost::new(number, config));
        hosts.iter_mut().for_each(|host| host.env.memory.watch());
        let client = &mut hosts[CLIENT];
        let portals = [client.portal(PID, 8), client.portal(EVIL, 8)];
        let local = Rights::LOCAL_READ | Rights::LOCAL_WRITE;
        let mine = client.region(PID, LEN, local, RegionKey([1; 16]));
        let evil_local = client.region(EVIL, LEN, local, RegionKey([2; 16]));
        let victim = hosts[SERVER].region(OWNER, LEN, REMOTE, SECRET);
        let shared = hosts[SERVER].region(OWNER, LEN, REMOTE, SHARED);
        let mut world = World {
            hosts,
            portals,
            local: mine,
            evil_local,
            victim,
            shared,
            wire: Vec::new(),
            tape: Vec::new(),
            now: 1,
        };
        world.fill(CLIENT, mine, HONEST);
        world.fill(SERVER, victim, BEFORE);
        world
    }

    fn fill(&mut self, host: usize, region: SimRegion, byte: u8) {
        self.hosts[host].env.memory.write(region.addr, &[byte; LEN as usize]);
    }

    fn gid(&self, host: usize) -> starverbs_core::Gid {
        self.hosts[host].gid
    }

    /// Takes what the cards sent onto the wire.
    fn collect(&mut self) {
        for host in &mut self.hosts {
            while host.card.poll_transmit(&mut host.env, self.now) == Transmit::More {}
            self.tape.extend(host.env.out.iter().cloned());
            self.wire.append(&mut host.env.out);
        }
    }

    fn deliver(&mut self, mut packet: SentPacket) {
        let Some(to) = [CLIENT, SERVER].into_iter().find(|to| self.gid(*to) == packet.path.remote) else {
            return;
        };
        let path = CardPath { local: packet.path.remote, remote: packet.path.local, card: 0 };
        let OneRmaHost { card, env, .. } = &mut self.hosts[to];
        let (len, denied, sent) = (packet.bytes.len(), card.counts().auth_failures, env.out.len());
        card.handle_packet(env, self.now, &path, &mut packet.bytes);
        assert!(env.out.len() <= sent + 1, "a packet has one answer at once");
        if card.counts().auth_failures > denied {
            assert!(
                env.out[sent].bytes.len() <= len,
                "who cannot be authenticated gets no more than it sent"
            );
        }
        self.collect();
    }

    /// The honest client asks for something; or the attacker does, with the keys that it has.
    fn issue(&mut self, input: &mut Bytes<'_>) {
        let how = input.byte();
        let evil = how & 1 == 1;
        let op = match how & 0x12 {
            0 | 0x10 => OneRmaOp::Read,
            0x12 if !evil => OneRmaOp::Rekey,
            _ => OneRmaOp::Write,
        };
        let (pid, portal, local) = match evil {
            false => (PID, self.portals[0], self.local),
            true => (EVIL, self.portals[1], self.evil_local),
        };
        let place = input.half();
        let (region, key) = match (evil, place >> 13) {
            (true, _) => (self.shared, SHARED),
            /* what a REKEY of the honest client's may have put */
            (false, 6) => (self.victim, RegionKey([HONEST; 16])),
            (false, 7) => (self.victim, RegionKey([BEFORE; 16])),
            (false, _) => (self.victim, SECRET),
        };
        let key = SimSeal.key_for(&key, self.gid(CLIENT), pid, op);
        let offset = u64::from(place) % LEN;
        let size = u32::from(input.half()) % 4097;
        let size = if op == OneRmaOp::Rekey { REKEY_LEN } else { size };
        let mut command = OneRmaCommand {
            op,
            class: if how & 4 == 0 { Class::High } else { Class::Low },
            haste: how >> 3 & 1,
            size,
            remote: self.gid(SERVER),
            region: region.id,
            offset,
            local: local.id,
            local_offset: offset,
            completions: portal.completions.id,
            key,
        };
        let slot = u16::from(how >> 5);
        if evil && how & 8 != 0 {
            /* any slot at all, with a word of truth here and there */
            let mut bytes = command.encode();
            let start = usize::from(input.byte()) % COMMAND_LEN;
            let junk = input.take(24);
            bytes[start..].iter_mut().zip(junk).for_each(|(to, from)| *to = *from);
            let Ok(any) = OneRmaCommand::decode(&bytes) else { return };
            assert_eq!(any.encode(), bytes);
            command = any;
        }
        /* busy slots and what is not allowed are refused */
        _ = self.hosts[CLIENT].card.issue(self.now, portal.id, slot, &command);
        self.collect();
    }

    /// The owner closes the victim's region, and opens its memory again under the first key.
    fn reopen(&mut self) {
        let card = &mut self.hosts[SERVER].card;
        card.close_region(self.victim.id).expect("it is open");
        let region = Region { addr: self.victim.addr, len: LEN, owner: OWNER, rights: REMOTE, key: SECRET };
        self.victim.id = card.open_region(region).expect("a place");
    }

    /// A packet whose every field is the attacker's choice, sealed with the key that it has, or none.
    fn forge(&self, input: &mut Bytes<'_>) -> SentPacket {
        let how = input.byte();
        let to = usize::from(how & 1);
        let op = input.pick(&[OneRmaOp::Read, OneRmaOp::Write, OneRmaOp::Rekey]);
        let handle = |input: &mut Bytes<'_>| starverbs_onerma::Handle {
            index: u32::from(input.byte() % 20),
            generation: u32::from(input.byte() % 8),
        };
        let counter = u64::from(input.half()) | if how & 2 == 0 { 0 } else { 1 << 63 };
        let iv = Iv { sender: u32::from(input.byte()), counter };
        let any = |input: &mut Bytes<'_>, most: u32| match input.byte() % 4 {
            0 => most,
            1 => input.word(),
            _ => u32::from(input.half()) % (most + 1),
        };
        let hop = match input.byte() % 5 {
            0 => Hop::Request {
                from: handle(input),
                pid: u32::from(input.byte()),
                region: RegionId(input.pick(&[self.victim.id.0, self.shared.id.0, 9, 0x1_0000])),
                offset: any(input, 8192).into(),
                size: if op == OneRmaOp::Rekey { 16 } else { any(input, 4096) },
                timeout: any(input, 20_000),
            },
            1 => Hop::Ask { to: handle(input), from: handle(input), size: any(input, 4096) },
            2 => Hop::Data { to: handle(input), offset: any(input, 4096) / 64 * 64 },
            3 => Hop::Done { to: handle(input) },
            _ => Hop::Fail { to: handle(input), status: starverbs_onerma::Status::Nack },
        };
        let prefix = PacketPrefix { op, class: Class::Low, iv };
        let data = if matches!(hop, Hop::Data { .. }) { usize::from(input.half()) % 1100 } else { 0 };
        let mut body = vec![0x0e; data];
        let head = OneRmaHeader { prefix, hop }.to_bytes();
        let key = match how & 0x30 {
            0 => starverbs_onerma::RESERVED_KEY,
            0x10 => DerivedKey([3; 16]),
            _ => SimSeal.key_for(&SHARED, self.gid(CLIENT), EVIL, op),
        };
        let mut bound = head.clone();
        bound.extend_from_slice(&Iv::default().bytes());
        bound.extend_from_slice(&self.gid(to).0);
        let tag = SimSeal.seal(&key.0, &iv.bytes(), &bound, &mut body);
        let bytes = [&head[..], &body, &tag].concat();
        let path = CardPath { local: self.gid(1 - to), remote: self.gid(to), card: 0 };
        SentPacket { path, class: Class::Low, bytes }
    }

    /// One of the packets of a list, as the attacker likes it.
    fn pick(list: &[SentPacket], input: &mut Bytes<'_>) -> Option<(usize, SentPacket)> {
        let at = usize::from(input.half());
        let at = at.checked_rem(list.len())?;
        Some((at, list[at].clone()))
    }

    fn step(&mut self, what: u8, input: &mut Bytes<'_>) {
        if what == REOPEN {
            return self.reopen();
        }
        match what % 8 {
            0 => self.issue(input),
            1 => {
                if let Some((at, packet)) = Self::pick(&self.wire, input) {
                    self.wire.swap_remove(at);
                    self.deliver(packet);
                }
            }
            2 => {
                if let Some((at, _)) = Self::pick(&self.wire, input) {
                    self.wire.swap_remove(at);
                }
            }
            3 => {
                if let Some((_, packet)) = Self::pick(&self.tape, input) {
                    self.deliver(packet);
                }
            }
            4 => {
                if let Some((_, mut packet)) = Self::pick(&self.tape, input) {
                    let at = usize::from(input.half()) % packet.bytes.len();
                    packet.bytes[at] ^= input.byte();
                    let cut = usize::from(input.byte());
                    packet.bytes.truncate(if cut < 200 { usize::MAX } else { cut - 200 });
                    self.deliver(packet);
                }
            }
            5 => {
                self.now += u64::from(input.half()) / 4;
                self.hosts.iter_mut().for_each(|host| host.card.handle_timeout(&mut host.env, self.now));
                self.collect();
            }
            6 => {
                let packet = self.forge(input);
                self.deliver(packet);
            }
            _ => {
                let len = usize::from(input.byte());
                let path = CardPath { local: self.gid(CLIENT), remote: self.gid(SERVER), card: 0 };
                let bytes = input.take(len).to_vec();
                self.deliver(SentPacket { path, class: Class::High, bytes });
            }
        }
    }

    /// Nothing but what the honest client may have written is in the victim's region, nothing of the
    /// attacker's in the honest client's memory.
    fn check(&self) {
        let of = |host: usize, region: &SimRegion| self.hosts[host].bytes(region);
        let honest = |byte: &u8| [HONEST, BEFORE].contains(byte);
        assert!(of(SERVER, &self.victim).iter().all(honest), "the victim's region");
        assert!(of(CLIENT, &self.local).iter().all(honest), "the client's memory");
        assert!(of(CLIENT, &self.evil_local).iter().all(|byte| !honest(byte)), "the secret's bytes");
        for host in &self.hosts {
            assert!(host.env.memory.gaps_intact(), "nobody wrote beside what is registered");
            assert!(host.card.solicited() <= 16384);
        }
    }
}

/// Checks one input: what an attacker does, and what the honest do meanwhile.
pub fn check(input: &[u8]) {
    if let Ok(record) = <&[u8; COMPLETION_LEN]>::try_from(input) {
        _ = Completion::decode(record);
    }
    if let Ok((head, at)) = OneRmaHeader::parse(input) {
        assert_eq!(head.to_bytes(), input[..at]);
    }
    let mut world = World::new();
    world.fill(CLIENT, world.evil_local, 0x0e);
    world.fill(SERVER, world.shared, 0x0e);
    let mut input = Bytes(input);
    for _ in 0..MOST {
        let Some(what) = input.next() else { break };
        world.step(what, &mut input);
    }
    world.check();
    /* what is left comes, and then there is silence */
    while let Some(packet) = world.wire.pop() {
        world.deliver(packet);
    }
    world.now += 1_000_000;
    for _ in 0..2 {
        world.hosts.iter_mut().for_each(|host| host.card.handle_timeout(&mut host.env, world.now));
        world.collect();
        world.now += 1_000_000;
    }
    world.check();
    for OneRmaHost { card, .. } in &world.hosts {
        assert_eq!((card.solicited(), card.inbound_bytes()), (0, 0), "all is given back");
        assert_eq!((card.next_deadline(), card.has_work()), (None, false));
    }
}
