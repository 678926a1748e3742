//! StaR frames on the wire, and hosts' turns for StaR.

use std::cmp::Reverse;

use starverbs_core::wire::IcrcHeader;
use starverbs_core::{Av, FrameMeta, Nanos};
use starverbs_star::bundle::Bundled;
use starverbs_star::carried::Carried;
use starverbs_star::control::Control;
use starverbs_star::host::Ends;
use starverbs_star::turn::DataTurn;
use starverbs_star::wire::{CardHalf, Opt, Ptype, StarHeader, StarPacket};

use super::{Flight, Net};
use crate::host::SimEnv;
use crate::star::{StarCard, StarFrame};

/// Which half a frame is for: the ports of hosts on a [`Net`] are all the same.
fn side_of(path: &IcrcHeader) -> CardHalf {
    if path.dport == CardHalf::Stateless.default_port() { CardHalf::Stateless } else { CardHalf::Stateful }
}

/// In place of a queue: numbers of turns.
const OF_TURNS: u8 = 2;

impl Net {
    /// The card of `host` has StaR from now on. After each restart it has it again, under another boot epoch.
    pub fn open_star(&mut self, host: usize, card: StarCard) {
        self.hosts[host].open_star(&card);
        self.stars[host] = Some(card);
    }

    /// The card of `host`, if it has StaR, has too many connections beyond this number from now on, until it
    /// is restarted.
    pub fn crowd(&mut self, host: usize, threshold: u32) {
        if let Some(star) = &mut self.hosts[host].star {
            star.roles.set_threshold(threshold);
        }
    }

    /// Whether anything is to come but looks of cards with too many connections at these, and of ends at
    /// peers that have been silent for long, or for which nothing waits. After [`transmit`](Net::transmit).
    pub fn is_busy(&self) -> bool {
        let waits = |host: usize| {
            let h = &self.hosts[host];
            let star = |star: &Ends<SimEnv>| star.endpoints.is_busy() || star.roles.is_busy(&h.nic);
            !self.dead[host] && (h.nic.next_deadline().is_some() || h.star.as_deref().is_some_and(star))
        };
        !self.wire.is_empty() || !self.relays.is_empty() || (0..self.hosts.len()).any(waits)
    }

    pub(super) fn reopen_star(&mut self, host: usize) {
        if let Some(card) = &mut self.stars[host] {
            card.boot += 1;
            self.hosts[host].open_star(card);
        }
    }

    /// StaR's part of sending: what follows from what came, and what stateless ends have to send.
    pub(super) fn transmit_star(&mut self, from: usize, now: Nanos) {
        while let Some(more) = self.hosts[from].with_star(now, |star, turn| {
            star.poll(turn);
            star.endpoints.transmit(turn, true)
        }) {
            let h = &mut self.hosts[from];
            let more = h.nic.poll_transmit(&mut h.env, now, true) || more;
            let frames = h.env.flush();
            let mut came = !frames.is_empty();
            for (to, bytes) in frames {
                self.launch(from, &to, bytes);
            }
            came |= self.launch_star(from);
            assert!(!more || came, "host {from} has more left, but an empty port got nothing");
            if !came {
                return;
            }
        }
    }

    /// StaR frames leave; whether there were any.
    pub(super) fn launch_star(&mut self, from: usize) -> bool {
        let frames = self.hosts[from].env.flush_star();
        let any = !frames.is_empty();
        for frame in frames {
            self.tally.sent += 1;
            self.note_sent(from, &frame);
            self.forge(&frame);
            let (sgid, dgid) = (frame.path.src, frame.path.dst);
            let to = Av { dgid, sgid, hop_limit: 64, ..Av::default() };
            match self.hosts.iter().position(|h| h.gid == dgid) {
                Some(dest) => self.carry(from, dest, &to, frame.bytes, Some(frame.path)),
                None => self.tally.stray += 1,
            }
        }
        any
    }

    /// Somebody on the wire has a frame of his own arrive; cards drop it like any other if it is none.
    fn forge(&mut self, seen: &StarFrame) {
        let Some((delay, frame)) = self.forger.as_mut().and_then(|forger| forger(seen)) else { return };
        let StarFrame { path, bytes } = frame;
        let at = |gid| self.hosts.iter().position(|h| h.gid == gid);
        if StarPacket::open(side_of(&path), &path, &bytes).is_ok()
            && let (Some(from), Some(to)) = (at(path.src), at(path.dst))
        {
            self.tally.forged += 1;
            let meta = FrameMeta { src: path.src, dst: path.dst, ..FrameMeta::default() };
            self.put(self.now + delay, Flight { from, to, meta, bytes, star: Some(path), queue: None });
        }
    }

    fn note_sent(&mut self, from: usize, frame: &StarFrame) {
        let Some(sent) = &mut self.star_sent else { return };
        let packet = StarPacket::open(side_of(&frame.path), &frame.path, &frame.bytes).expect("as it left");
        let header = packet.header;
        match header.ptype {
            Ptype::Rd if header.opt == Opt::Recv => {
                let (turn, data) = DataTurn::decode(packet.data).expect("as it left");
                let epoch = packet.prefix.expect("as it left").epoch;
                /* as below: SL's program may have the message */
                if !turn.send || self.carried.insert((from, header.qpn, epoch, OF_TURNS, turn.number)) {
                    let opt = if turn.send { Opt::Send } else { Opt::Write };
                    sent.push((from, StarHeader { opt, len: data.len() as u16, ..header }));
                }
            }
            Ptype::Rd | Ptype::Gd => sent.push((from, header)),
            Ptype::Rdc => self.note_last(from, &packet, &header, packet.data),
            Ptype::Rdcs => {
                for one in Bundled::new(&header, packet.data) {
                    let (header, data) = one.expect("as it left");
                    self.note_last(from, &packet, &header, data);
                }
            }
            _ => {}
        }
    }

    /// The last data of a message, in `packet` alone or among others.
    fn note_last(&mut self, from: usize, packet: &StarPacket<'_>, header: &StarHeader, data: &[u8]) {
        let Some(sent) = &mut self.star_sent else { return };
        let carried = Carried::decode(data).zip(packet.prefix);
        let ((carried, data), prefix) = carried.expect("as it left");
        let has_turn = header.opt == Opt::Recv;
        let data = if has_turn { DataTurn::decode(data).expect("as it left").1 } else { data };
        /* one that is sent again writes nothing if it was done before */
        let of = (from, header.qpn, prefix.epoch, carried.queue as u8, carried.seq.get());
        if self.carried.insert(of) {
            let opt = if has_turn { Opt::Send } else { header.opt };
            sent.push((from, StarHeader { ptype: Ptype::Rd, opt, len: data.len() as u16, ..*header }));
        }
    }

    /// A host that was to sleep until `before` wakes earlier: StaR's frames and other cards' messages that
    /// wait for it come now. The frames must not be as late as that, as who sent them takes them for gone by
    /// and by; the messages must not come behind those that are sent later.
    pub(super) fn wake_frames(&mut self, host: usize, before: Nanos) {
        let early = self.asleep[host].max(self.now);
        if early >= before {
            return;
        }
        let waits = |at, order| {
            at == before && self.flights.get(&order).is_some_and(|f| f.to == host && f.star.is_some())
        };
        let wire = std::mem::take(&mut self.wire).into_iter();
        self.wire = wire
            .map(|Reverse((at, order))| Reverse((if waits(at, order) { early } else { at }, order)))
            .collect();
        let waits = |at, to| at == before && to == host;
        let relays = std::mem::take(&mut self.relays).into_iter();
        self.relays = relays
            .map(|((at, order), way)| ((if waits(at, way.1) { early } else { at }, order), way))
            .collect();
    }

    /// Flips a bit; whether the checksums notice.
    pub(super) fn corrupt_star(&mut self, path: &IcrcHeader, bytes: &mut [u8]) -> bool {
        let bit = self.rng.below(bytes.len() as u64 * 8) as usize;
        bytes[bit / 8] ^= 1 << (bit % 8);
        StarPacket::open(side_of(path), path, bytes).is_err()
    }

    /// One line of the trace.
    pub(super) fn trace_any(&self, host: usize, what: &str, bytes: &[u8], star: Option<&IcrcHeader>) {
        let Some(path) = star else { return self.trace_frame(host, what, bytes) };
        if !self.trace {
            return;
        }
        let side = side_of(path);
        match StarPacket::open(side, path, bytes) {
            Ok(packet) => {
                let control = Control::decode(packet.data).filter(|_| packet.header.migrate);
                eprintln!(
                    "{:>12} host {host} {what} StaR {:?} {:?} {control:?}",
                    self.now, packet.header, packet.prefix
                );
            }
            Err(e) => eprintln!("{:>12} host {host} {what} StaR {e}", self.now),
        }
    }
}
