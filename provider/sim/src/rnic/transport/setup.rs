//! Hosts with the core's cards and connections between them, made on a quiet wire; then what goes in and out
//! of a card.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use starverbs_core::qp::RecvSource;
use starverbs_core::{
    Access, AvId, Gid, Mtu, Nanos, NicConfig, QpType, Qpn, SendFlags, SendOp, SendWqe, Sge, WcStatus,
};
use starverbs_star::control::{Preference, Role};
use starverbs_star::negotiate::Outcome;

use super::frame::{CardFrame, CardPacket};
use crate::host::SimHost;
use crate::rnic::card::CardId;
use crate::rnic::host::{DoorbellBatch, Verb};
use crate::rnic::params::Params;
use crate::{Faults, Net, QpAt, Recv, Send, Setup, SimCq, SimRq, SimSq, StarCard};

/// Slots of each queue: more than calls have SENDs in the time that a lost completion takes to come again.
const SLOTS: u32 = 512;
/// What the quiet wire has to settle roles, and to bring receives to their peers, ns.
const QUIET: Nanos = 1_000_000_000;
/// `wr_id` of receives.
const RECEIVE: u64 = 1;
/// Packets that a card hands out in one turn, more than it ever has.
const PORT: usize = 1 << 20;
/// Of all connections.
pub(super) const MTU: Mtu = Mtu::M1024;
/// Bytes before a datagram's, in the receive.
const GRH: u32 = 40;

/// QPNs are the program's own numbers: nobody makes them collide.
#[derive(Clone, Copy, Default)]
struct QpnHasher(u64);

impl Hasher for QpnHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32(u32::from(*byte)));
    }
    fn write_u32(&mut self, number: u32) {
        /* 2^64 over the golden ratio */
        self.0 = (self.0 ^ u64::from(number)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

#[derive(Clone)]
struct QpHandle {
    qpn: Qpn,
    sq: SimSq,
    rq: SimRq,
    /// Where datagrams go
    to: (AvId, Qpn),
}

/// The server, card 0, and the clients.
pub(super) struct Testbed {
    pub(super) hosts: Vec<SimHost>,
    /// The core's time when that of the run begins
    pub(super) begun: Nanos,
    star: bool,
    /// Messages carry their numbers
    numbers_messages: bool,
    /// Ends of connections, of each card: the server's by connection, a client's by its number there
    ends: Vec<Vec<QpHandle>>,
    /// Numbers of ends, by QPN
    numbers: Vec<HashMap<Qpn, u32, BuildHasherDefault<QpnHasher>>>,
    /// Of each host, where it sends from and receives to
    buffers: Vec<[Sge; 2]>,
    cqs: Vec<SimCq>,
    cards: Vec<Gid>,
    /// Completions that were no success
    failed: u64,
}

/// All connections: `ends` has of each the client.
pub(super) fn make(params: &Params, ends: &[(CardId, u32)]) -> Result<Testbed, String> {
    let cards = u8::try_from(params.clients + 1).map_err(|_| "more than 254 clients".to_owned())?;
    let mut net = Net::new(cards, NicConfig::default(), Faults::default(), params.seed);
    if params.star {
        (0..cards).for_each(|card| {
            let boot = 70 + u64::from(card);
            let form = params.form;
            net.open_star(card.into(), StarCard { threshold: u32::MAX, key: None, boot, form });
        });
    }
    let mut bed = Testbed::new(&mut net, params);
    for (client, _) in ends {
        bed.connect(&mut net, params, usize::from(*client));
    }
    net.run_for(QUIET);
    bed.settle(&mut net, params)?;
    net.run_for(QUIET);
    bed.begun = net.now();
    bed.hosts = std::mem::take(&mut net.hosts);
    bed.hosts.iter_mut().for_each(|host| host.env.port = PORT);
    Ok(bed)
}

impl Testbed {
    fn new(net: &mut Net, params: &Params) -> Testbed {
        let hosts = net.hosts.len();
        let cards = net.hosts.iter().map(|host| host.gid).collect();
        let buffer = |host: &mut SimHost, len: u32| {
            let (addr, lkey) = host.region(u64::from(len.max(1)), Access::LOCAL_WRITE);
            Sge { addr, len, lkey }
        };
        /* datagrams come with their addresses */
        let received = params.bytes + if params.qp_type == QpType::Ud { GRH } else { 0 };
        let buffers = |host: &mut SimHost| [buffer(host, params.bytes), buffer(host, received)];
        Testbed {
            hosts: Vec::new(),
            begun: 0,
            star: params.star,
            numbers_messages: params.retry > 0,
            ends: (0..hosts).map(|_| Vec::new()).collect(),
            numbers: vec![HashMap::default(); hosts],
            buffers: net.hosts.iter_mut().map(buffers).collect(),
            cqs: (0..hosts).map(|_| SimCq::new(1 << 20)).collect(),
            cards,
            failed: 0,
        }
    }

    /// A connection of the server and a client.
    fn connect(&mut self, net: &mut Net, params: &Params, client: usize) {
        if params.qp_type == QpType::Ud {
            return self.address(net, params, client);
        }
        let at = [0, client].map(|card| {
            let end = self.make(net, params, card);
            if params.qp_type == QpType::Rc {
                let preference = if card == 0 { Preference::Stateless } else { Preference::Stateful };
                net.hosts[card].preference(end.qpn, preference);
            }
            let qpn = end.qpn;
            self.ends[card].push(end);
            QpAt { host: card, qpn }
        });
        net.connect(params.qp_type, at[0], at[1], &Setup { mtu: MTU, ..Setup::default() });
    }

    /// The same without one: a QP of each of the server's processes and of each of the clients'.
    fn address(&mut self, net: &mut Net, params: &Params, client: usize) {
        let of_process = self.ends[0].len().checked_sub(params.processes.into());
        let mut ends = [0, client].map(|card| match of_process.filter(|_| card == 0) {
            Some(number) => self.ends[0][number].clone(),
            None => {
                let end = self.make(net, params, card);
                net.hosts[card].to_rts_ud(end.qpn, &Setup::default(), 0);
                end
            }
        });
        let qpns = [ends[0].qpn, ends[1].qpn];
        for (at, [card, peer]) in [[0, client], [client, 0]].into_iter().enumerate() {
            let dgid = net.hosts[peer].gid;
            let host = &mut net.hosts[card];
            let av = host.av(dgid);
            ends[at].to = (host.nic.create_av(host.pd, av).expect("room for an AV"), qpns[1 - at]);
        }
        for (card, end) in [0, client].into_iter().zip(ends) {
            self.ends[card].push(end);
        }
    }

    /// A QP of a card, the next of its ends.
    fn make(&mut self, net: &mut Net, params: &Params, card: usize) -> QpHandle {
        let sharers = if params.qp_type == QpType::Ud && card == 0 {
            params.qps.div_ceil(params.processes.into())
        } else {
            1
        };
        let slots = SLOTS.max((sharers * u32::from(params.sends)).next_power_of_two());
        let (sq, rq) = (SimSq::new(slots), SimRq::new(slots as usize, 1));
        let (host, cq) = (&mut net.hosts[card], &self.cqs[card]);
        let qpn = host.qp(params.qp_type, &sq, RecvSource::Own(rq.clone()), [cq, cq], false);
        self.numbers[card].insert(qpn, self.ends[card].len() as u32);
        QpHandle { qpn, sq, rq, to: (AvId::default(), 0) }
    }

    /// All have settled what they are; their first receives are posted.
    fn settle(&mut self, net: &mut Net, params: &Params) -> Result<(), String> {
        for card in 0..net.hosts.len() {
            let role = if card == 0 { Role::Stateless } else { Role::Stateful };
            for end in &self.ends[card] {
                let star = net.hosts[card].star.as_ref();
                let outcome = star.and_then(|star| star.roles.outcome(end.qpn));
                let is_star = matches!(outcome, Some(Outcome::Star { role: own, .. }) if own == role);
                if is_star != params.star {
                    return Err(format!("card {card}: an end is {outcome:?}"));
                }
                let receives = if card == 0 { params.sends } else { 1 };
                (0..receives).for_each(|_| self.receive(card, end));
                net.doorbell(card, end.qpn);
            }
        }
        Ok(())
    }

    fn receive(&self, card: usize, end: &QpHandle) {
        let recv = Recv { wr_id: RECEIVE, sges: vec![self.buffers[card][1]] };
        end.rq.post(recv).expect("room for as many receives as calls have SENDs");
    }

    /// A program posts WQEs; the doorbell is another matter.
    pub(super) fn post(&mut self, card: CardId, batch: DoorbellBatch) {
        let card = usize::from(card);
        let end = &self.ends[card][batch.qpn as usize];
        for number in 1..=batch.wqes {
            if batch.verb == Verb::Recv {
                self.receive(card, end);
                continue;
            }
            let flags = if number == batch.wqes { SendFlags::SIGNALED } else { SendFlags::empty() };
            let (av, remote_qpn) = end.to;
            let (op, imm) = if self.numbers_messages {
                (SendOp::SendImm, batch.tag + u32::from(number - 1))
            } else {
                (SendOp::Send, 0)
            };
            let qkey = Setup::default().qkey;
            let wqe = SendWqe { op, imm, flags, av, remote_qpn, qkey, ..SendWqe::default() };
            let sges = vec![self.buffers[card][0]];
            end.sq
                .post(Send { wqe, sges, inline: None })
                .expect("room for SENDs whose completions were lost");
        }
    }

    /// A receive was used: another takes its place, but StaR's server posts its own.
    pub(super) fn repost(&mut self, card: CardId, end: u32) {
        if card != 0 || !self.star {
            self.receive(card.into(), &self.ends[usize::from(card)][end as usize]);
        }
    }

    /// A doorbell, for the core.
    pub(super) fn ring(&mut self, card: CardId, end: u32, now: Nanos) {
        let card = usize::from(card);
        let (host, qpn) = (&mut self.hosts[card], self.ends[card][end as usize].qpn);
        if host.with_star(now, |star, turn| star.endpoints.ring(turn, qpn)) != Some(true) {
            host.nic.handle_doorbell(&mut host.env, qpn, now);
        }
    }

    pub(super) fn run_timers(&mut self, card: CardId, now: Nanos) {
        let host = &mut self.hosts[usize::from(card)];
        host.nic.handle_timeout(&mut host.env, now);
    }

    pub(super) fn next_deadline(&self, card: CardId) -> Option<Nanos> {
        let host = &self.hosts[usize::from(card)];
        let star = host.star.as_ref().and_then(|star| star.next_deadline(host.nic.connection_count()));
        [host.nic.next_deadline(), star].into_iter().flatten().min()
    }

    /// A packet, for the core.
    pub(super) fn take(&mut self, card: CardId, packet: CardPacket, now: Nanos) {
        let host = &mut self.hosts[usize::from(card)];
        host.now = now;
        match packet {
            CardPacket::Star(frame) => host.take_plain_star(now, &frame),
            CardPacket::Roce(meta, bytes) => {
                host.came.push_back((meta, bytes));
                host.take_frames(now);
            }
        }
    }

    /// All that a card has to send.
    pub(super) fn drain(&mut self, card: CardId, now: Nanos, frames: &mut Vec<CardFrame>) {
        let host = &mut self.hosts[usize::from(card)];
        loop {
            let before = frames.len();
            host.take_frames(now);
            for acks in [false, true] {
                while host.nic.poll_transmit(&mut host.env, now, acks) {
                    flush(host, frames);
                }
                flush(host, frames);
            }
            host.with_star(now, |star, turn| {
                star.poll(turn);
                star.endpoints.transmit(turn, true)
            });
            flush(host, frames);
            if frames.len() == before {
                return;
            }
        }
    }

    /// The next completion: of which end, of what, and what the message carries.
    pub(super) fn poll(&mut self, card: CardId) -> Option<(u32, Verb, u32)> {
        let (cqe, _) = self.cqs[usize::from(card)].poll()?;
        self.failed += u64::from(cqe.status != WcStatus::Success);
        let end = *self.numbers[usize::from(card)].get(&cqe.qpn)?;
        Some((end, if cqe.wr_id == RECEIVE { Verb::Recv } else { Verb::Send }, cqe.imm))
    }

    /// The card that a packet is for.
    pub(super) fn card_of(&self, frame: &CardFrame) -> Option<CardId> {
        let to = frame.to();
        self.cards.iter().position(|gid| *gid == to).map(|card| card as CardId)
    }

    /// The end of a connection that a packet for a card is for.
    pub(super) fn end_of(&self, card: CardId, frame: &CardFrame) -> Option<u32> {
        self.numbers[usize::from(card)].get(&frame.qpn?).copied()
    }

    /// Packets that were sent again.
    pub(super) fn repeated(&self) -> u64 {
        let of = |host: &SimHost| {
            let counters = host.nic.counters();
            counters.star_retransmitted.get() + counters.star_wqep_again.get() + counters.retransmitted.get()
        };
        self.hosts.iter().map(of).sum()
    }

    pub(super) fn check(&self) -> Result<(), String> {
        let server = self.hosts[0].nic.connection_count();
        let rejected: u64 = self.hosts.iter().map(|host| host.nic.counters().star_rejects.get()).sum();
        match () {
            _ if self.failed > 0 => Err(format!("{} completions failed", self.failed)),
            _ if self.star && server > 0 => Err(format!("the stateless card keeps {server} connections")),
            _ if rejected > 0 => Err(format!("the registry let {rejected} packets not leave")),
            _ => Ok(()),
        }
    }
}

fn flush(host: &mut SimHost, frames: &mut Vec<CardFrame>) {
    host.env.take_frames(|to, bytes| frames.push(CardFrame::roce(&to, bytes)));
    host.env.take_star_frames(|frame| frames.push(CardFrame::star(frame)));
}
