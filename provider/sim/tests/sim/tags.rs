//! Tag matching on a hostile wire, with a program that does its half as MPI would: whatever the order in
//! which buffers and messages come, each message goes to the oldest buffer that matches, and each buffer gets
//! one message.

use std::collections::BTreeMap;

use crate::common::{all_rights, any_bytes, any_faults, for_seeds};
use starverbs_core::nic::{TagChange, TagOp};
use starverbs_core::qp::RecvSource;
use starverbs_core::tags::{MAX_TAG_SGE, TaggedBuffer};
use starverbs_core::{
    Cqe, Mtu, NicConfig, QpState, QpType, Qpn, SendFlags, SendOp, SendWqe, Sge, SrqId, TagMatch, WcFlags,
    WcOpcode, WcStatus,
};
use starverbs_sim::tmh::{self, FIN, NO_TAG, RENDEZVOUS};
use starverbs_sim::{Faults, Net, QpAt, Recv, Rng, Send, Setup, SimCq, SimRq, SimSq};

const STEPS: usize = 200_000;
/// Longest eager message, and least room of a buffer.
const EAGER: u64 = 3000;

/// A message that was sent, by its number, which is its `app_ctx`.
struct Message {
    op: u8,
    tag: u64,
    data: Vec<u8>,
}

/// A buffer in the program's own list.
#[derive(Clone, Copy)]
struct Posted {
    handle: u32,
    wr_id: u64,
    tag: u64,
    mask: u64,
    sge: Sge,
}

impl Posted {
    fn wants(&self, tag: u64) -> bool {
        tag & self.mask == self.tag
    }
}

/// Host 0 sends over two connections to host 1, whose SRQ matches.
struct World {
    net: Net,
    rng: Rng,
    sends: [Qpn; 2],
    sq: [SimSq; 2],
    peers: [Qpn; 2],
    sent: Vec<Message>,
    fins: [SimCq; 2],
    fin_room: Sge,
    srq: SrqId,
    rq: SimRq,
    cq: SimCq,
    /// Buffers of the SRQ, by wr_id
    plain: Vec<Sge>,
    posted: Vec<Posted>,
    /// Rendezvous whose data is under way: message and buffer by the buffer's wr_id
    fetching: BTreeMap<u64, (usize, Sge)>,
    /// Numbers of messages that nobody waited for
    unexpected: Vec<usize>,
    seen: u32,
    /// Last message of each connection that was matched or not
    last: [Option<usize>; 2],
    done: Vec<usize>,
    fetched: usize,
}

impl World {
    fn new(seed: u64, faults: Faults, own_sends: u32) -> Self {
        let mut rng = Rng::new(seed);
        let mut net = Net::new(2, NicConfig::default(), faults, seed);
        let (cq, rq) = (SimCq::new(4096), SimRq::new(64, 1));
        let nobody = SimCq::new(1);
        let fins = [(); 2].map(|()| SimCq::new(4096));
        let pd = net.hosts[1].pd;
        let srq = net.hosts[1].nic.create_tag_srq(pd, rq.clone(), cq.clone(), 64, 0).expect("an SRQ");
        let sq = [(); 2].map(|()| SimSq::new(256));
        let mtu = rng.pick(&[Mtu::M256, Mtu::M1024]);
        let setup = Setup { mtu, timeout: 20, rd_atomic: rng.pick(&[1, 4]), ..Setup::default() };
        let (addr, lkey) = net.hosts[0].region(64, all_rights());
        let fin_room = Sge { addr, len: 64, lkey };
        let (mut sends, mut peers) = ([0; 2], [0; 2]);
        for i in 0..2 {
            let back = SimRq::new(256, 1);
            for _ in 0..256 {
                back.post(Recv { wr_id: 0, sges: vec![fin_room] }).expect("there is room");
            }
            sends[i] =
                net.hosts[0].qp(QpType::Rc, &sq[i], RecvSource::Own(back), [&fins[i], &fins[i]], false);
            let own = SimSq::new(own_sends);
            peers[i] = net.hosts[1].qp(QpType::Rc, &own, RecvSource::Shared(srq), [&nobody, &nobody], true);
            net.connect(QpType::Rc, QpAt { host: 0, qpn: sends[i] }, QpAt { host: 1, qpn: peers[i] }, &setup);
        }
        World {
            net,
            rng,
            sends,
            sq,
            peers,
            sent: vec![],
            fins,
            fin_room,
            srq,
            rq,
            cq,
            plain: vec![],
            posted: vec![],
            fetching: BTreeMap::new(),
            unexpected: vec![],
            seen: 0,
            last: [None; 2],
            done: vec![],
            fetched: 0,
        }
    }

    fn send(&mut self, op: u8, tag: u64, len: u64) {
        let (number, qp) = (self.sent.len(), self.rng.below(2) as usize);
        let data = any_bytes(&mut self.rng, len as u32);
        let host = &mut self.net.hosts[0];
        let place = (op == RENDEZVOUS).then(|| host.region(len.max(1), all_rights()));
        if let Some((addr, _)) = place {
            host.env.memory.write(addr, &data);
        }
        let bytes = tmh::message(op, number as u32, tag, &data, place);
        let (addr, lkey) = host.region(bytes.len() as u64, all_rights());
        host.env.memory.write(addr, &bytes);
        let wqe = SendWqe { op: SendOp::Send, flags: SendFlags::empty(), ..SendWqe::default() };
        let sges = vec![Sge { addr, len: bytes.len() as u32, lkey }];
        self.sq[qp].post(Send { wqe, sges, inline: None }).expect("there is room");
        self.net.doorbell(0, self.sends[qp]);
        self.sent.push(Message { op, tag, data });
    }

    fn feed(&mut self) {
        while !self.rq.is_full() {
            let (addr, lkey) = self.net.hosts[1].region(EAGER + 16, all_rights());
            let sge = Sge { addr, len: EAGER as u32 + 16, lkey };
            self.rq.post(Recv { wr_id: self.plain.len() as u64, sges: vec![sge] }).expect("there is room");
            self.plain.push(sge);
        }
    }

    fn change(&mut self, wr_id: u64, change: TagChange) -> u32 {
        let seen = self.rng.chance(0.7).then_some(self.seen);
        let op = TagOp { wr_id, change, seen, signaled: false };
        self.net.hosts[1].nic.change_tags(self.srq, &op).expect("there is room")
    }

    /// A receive for `tag`: what came unexpected may serve it, else it is added.
    fn receive(&mut self, wr_id: u64, tag: u64, mask: u64) {
        let sent = &self.sent;
        if let Some(at) = self.unexpected.iter().position(|n| sent[*n].tag & mask == tag) {
            self.done.push(self.unexpected.remove(at));
            return;
        }
        let room = EAGER + self.rng.below(EAGER);
        let (addr, lkey) = self.net.hosts[1].region(room, all_rights());
        let sge = Sge { addr, len: room as u32, lkey };
        let cut = self.rng.below(room) as u32;
        let (head, tail) =
            (Sge { len: cut, ..sge }, Sge { addr: addr + u64::from(cut), len: sge.len - cut, lkey });
        let mut sges = [Sge::default(); MAX_TAG_SGE];
        (sges[0], sges[1]) = (head, tail);
        let handle = self.change(wr_id, TagChange::Add(TaggedBuffer { wr_id, tag, mask, sges, num_sge: 2 }));
        self.posted.push(Posted { handle, wr_id, tag, mask, sge });
    }

    fn poll(&mut self) -> bool {
        let mut any = false;
        while let Some((cqe, _)) = self.cq.poll() {
            any = true;
            match cqe.opcode {
                WcOpcode::TmRecv if cqe.flags.contains(WcFlags::TM_MATCH) => self.on_match(&cqe),
                WcOpcode::TmRecv if cqe.flags.contains(WcFlags::TM_DATA_VALID) => self.on_data(&cqe),
                WcOpcode::TmRecv | WcOpcode::TmNoTag => self.on_plain(&cqe),
                _ => panic!("nobody asked for {cqe:?}"),
            }
        }
        any
    }

    fn in_order(&mut self, cqe: &Cqe, number: usize) {
        let qp = usize::from(cqe.qpn == self.peers[1]);
        assert!(self.last[qp].is_none_or(|last| last < number), "messages of a connection stay in order");
        self.last[qp] = Some(number);
    }

    fn on_match(&mut self, cqe: &Cqe) {
        let TagMatch { tag, app_ctx } = cqe.tag().expect("it matched");
        let number = app_ctx as usize;
        self.in_order(cqe, number);
        let message = &self.sent[number];
        assert_eq!(message.tag, tag);
        let at = self.posted.iter().position(|p| p.wants(tag)).expect("somebody waits for it");
        let posted = self.posted.remove(at);
        assert_eq!(posted.wr_id, cqe.wr_id, "the oldest buffer that matches");
        self.done.push(number);
        if cqe.status == WcStatus::TmRndvIncomplete {
            assert!(message.op == RENDEZVOUS && message.data.len() > posted.sge.len as usize);
            let there = self.net.hosts[1].env.memory.read(posted.sge.addr, 16);
            assert_eq!((there[0], &there[8..]), (RENDEZVOUS, &tag.to_be_bytes()[..]));
            return;
        }
        assert_eq!(cqe.status, WcStatus::Success);
        self.fetching.insert(cqe.wr_id, (number, posted.sge));
        if cqe.flags.contains(WcFlags::TM_DATA_VALID) {
            assert_eq!(message.op, tmh::EAGER);
            self.on_data(cqe);
        } else if message.op == RENDEZVOUS {
            self.fetched += 1;
        }
    }

    fn on_data(&mut self, cqe: &Cqe) {
        assert_eq!(cqe.status, WcStatus::Success);
        let (number, sge) = self.fetching.remove(&cqe.wr_id).expect("a match before its data");
        let data = &self.sent[number].data;
        assert_eq!(cqe.byte_len as usize, data.len());
        assert!(
            self.net.hosts[1].env.memory.read(sge.addr, data.len()) == data,
            "message {number}: wrong bytes"
        );
    }

    fn on_plain(&mut self, cqe: &Cqe) {
        assert_eq!((cqe.status, cqe.tag()), (WcStatus::Success, None));
        let place = self.plain[cqe.wr_id as usize];
        let header = self.net.hosts[1].env.memory.read(place.addr, 16).to_vec();
        let number = u32::from_be_bytes([header[4], header[5], header[6], header[7]]) as usize;
        self.in_order(cqe, number);
        let Message { op, tag, .. } = self.sent[number];
        assert_eq!(cqe.opcode == WcOpcode::TmNoTag, op == NO_TAG);
        if op == NO_TAG {
            return self.done.push(number);
        }
        self.seen += 1;
        match self.posted.iter().position(|p| p.wants(tag)) {
            None => self.unexpected.push(number),
            /* added while the message was on its way: it slept, so that the card cannot have used it */
            Some(at) => {
                let posted = self.posted.remove(at);
                self.change(0, TagChange::Remove(posted.handle));
                self.done.push(number);
            }
        }
    }

    fn act(&mut self, wr_id: u64, left: &mut u32) {
        let tag = self.rng.below(4);
        if self.rng.chance(0.5) && self.posted.len() < 60 {
            let mask = if self.rng.chance(0.2) { 0 } else { u64::MAX };
            self.receive(wr_id, tag & mask, mask);
        }
        if self.rng.chance(0.1) {
            self.change(0, TagChange::Sync);
        }
        if *left > 0 && self.rng.chance(0.5) {
            *left -= 1;
            let op = self.rng.pick(&[NO_TAG, RENDEZVOUS, RENDEZVOUS, tmh::EAGER, tmh::EAGER, tmh::EAGER]);
            let most = if op == RENDEZVOUS { 2 * EAGER } else { EAGER };
            let len = self.rng.below(most + 1);
            self.send(op, tag, len);
        }
    }

    /// All that was sent is somewhere, and every sender of a fetched rendezvous was notified once.
    fn finish(&mut self) {
        assert!(self.fetching.is_empty(), "all data came");
        self.done.append(&mut self.unexpected);
        self.done.sort_unstable();
        assert_eq!(self.done, (0..self.sent.len()).collect::<Vec<_>>(), "each message once");
        let mut notified = 0;
        for cq in &self.fins {
            while let Some((cqe, _)) = cq.poll() {
                assert_eq!((cqe.status, cqe.opcode, cqe.byte_len), (WcStatus::Success, WcOpcode::Recv, 32));
                notified += 1;
            }
        }
        assert_eq!(notified, self.fetched);
        if notified > 0 {
            assert_eq!(self.net.hosts[0].env.memory.read(self.fin_room.addr, 1), [FIN]);
        }
        for host in &self.net.hosts {
            assert_eq!(host.env.events, []);
            assert!(host.env.memory.gaps_intact());
        }
    }
}

fn traffic(seed: u64) {
    let mut rng = Rng::new(seed);
    let faults = any_faults(&mut rng);
    let mut w = World::new(seed, faults, rng.pick(&[1, 2, 32]));
    let mut left = 60;
    for step in 0..STEPS {
        w.feed();
        if left > 0 && w.rng.chance(0.3) {
            w.act(step as u64, &mut left);
        }
        let happened = w.net.step();
        let polled = (!happened || w.rng.chance(0.5)) && w.poll();
        if !happened && !polled && left == 0 {
            return w.finish();
        }
    }
    panic!("no end: {:?}", w.net.tally);
}

#[test]
fn each_message_meets_the_oldest_buffer_that_wants_it() {
    for_seeds("each_message_meets_the_oldest_buffer_that_wants_it", 600, traffic);
}

/// Headers that no sender means: the card goes on, and only this connection may break.
fn garbage(seed: u64) {
    let mut w = World::new(seed, Faults::default(), 2);
    w.feed();
    for wr_id in 0..20 {
        w.receive(wr_id, wr_id % 3, if wr_id % 5 == 0 { 0 } else { 3 });
    }
    for _ in 0..40 {
        let len = w.rng.below(64);
        let mut bytes = any_bytes(&mut w.rng, len as u32);
        if let Some(op) = bytes.first_mut() {
            *op = w.rng.below(5) as u8;
        }
        let (addr, lkey) = w.net.hosts[0].region(len.max(1), all_rights());
        w.net.hosts[0].env.memory.write(addr, &bytes);
        let wqe = SendWqe { op: SendOp::Send, ..SendWqe::default() };
        let sges = vec![Sge { addr, len: len as u32, lkey }];
        w.sq[0].post(Send { wqe, sges, inline: None }).expect("there is room");
        w.net.doorbell(0, w.sends[0]);
    }
    assert!(w.net.run_until_idle(STEPS), "it ends");
    let host = &w.net.hosts[1];
    assert!(matches!(host.state(w.peers[0]), QpState::Rts | QpState::Err));
    assert_eq!(host.state(w.peers[1]), QpState::Rts);
    assert!(host.env.memory.gaps_intact());
}

#[test]
fn headers_without_sense_do_no_harm() {
    for_seeds("headers_without_sense_do_no_harm", 300, garbage);
}

/// What matched and cannot be fetched any more completes in error, and the list keeps nothing of it.
#[test]
fn a_connection_that_breaks_gives_its_buffers_back() {
    for ends in [QpState::Err, QpState::Reset] {
        let mut w = World::new(1, Faults::default(), 1);
        w.feed();
        for wr_id in 0..3 {
            w.receive(wr_id, 7, u64::MAX);
        }
        for _ in 0..3 {
            w.send(RENDEZVOUS, 7, 100);
        }
        while !w.posted.is_empty() {
            assert!(w.net.step(), "they match");
            w.poll();
            if !w.fetching.is_empty() {
                break;
            }
        }
        for qpn in w.peers {
            let now = w.net.now();
            w.net.hosts[1].to_state(qpn, ends, now).expect("from every state");
        }
        let flushed: Vec<_> = std::iter::from_fn(|| w.cq.poll()).map(|(c, _)| (c.wr_id, c.status)).collect();
        assert!(flushed.iter().all(|(_, status)| *status == WcStatus::WrFlushErr), "{flushed:?}");
        let expected = if ends == QpState::Err { w.fetching.len() } else { 0 };
        assert_eq!(flushed.len(), expected);
        let before = w.posted.len();
        for wr_id in 0..64 - before as u64 {
            w.receive(100 + wr_id, 9, u64::MAX);
        }
        assert_eq!(w.posted.len(), 64, "the whole list is free");
    }
}
