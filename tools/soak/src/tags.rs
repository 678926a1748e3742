//! Tag matching, with a program that does its half as MPI would: each message goes to the oldest buffer that
//! wants it, and the sender of data that is fetched gets one FIN.

use std::collections::BTreeMap;

use starverbs_core::nic::{TagChange, TagOp};
use starverbs_core::qp::RecvSource;
use starverbs_core::tags::{MAX_TAG_SGE, TaggedBuffer};
use starverbs_core::{
    Access, Cqe, Mtu, QpType, Qpn, SendFlags, SendOp, SendWqe, Sge, SrqId, TagMatch, WcFlags, WcOpcode,
    WcStatus,
};
use starverbs_sim::tmh::{self, FIN, NO_TAG, RENDEZVOUS};
use starverbs_sim::{QpAt, READ, Recv, Send, Setup, SimCq, SimRq, SimSq, WRITE, any_bytes, get, put};

use crate::world::{Who, World};

/// Longest eager message, and least room of a buffer.
const EAGER: u64 = 1500;
const HEADER: u32 = 16;
const LIST: usize = 32;

/// A message that was sent, by its number, which is its `app_ctx`.
struct Message {
    op: u8,
    tag: u64,
    data: Vec<u8>,
    /// Where its data waits to be fetched, and its key
    region: Option<(u64, u32)>,
}

/// A buffer in the program's own list.
struct Posted {
    handle: u32,
    wr_id: u64,
    tag: u64,
    mask: u64,
    sges: Vec<Sge>,
}

impl Posted {
    fn wants(&self, tag: u64) -> bool {
        tag & self.mask == self.tag
    }
}

/// Two connections from one host to another, whose SRQ matches.
pub(crate) struct Matching {
    hosts: [usize; 2],
    sends: [Qpn; 2],
    sq: [SimSq; 2],
    peers: [Qpn; 2],
    back: [SimRq; 2],
    /// Completions at the sender
    fin_cq: SimCq,
    /// Buffers for FINs, by wr_id
    fin_buffers: BTreeMap<u64, Vec<Sge>>,
    srq: SrqId,
    rq: SimRq,
    cq: SimCq,
    plain: BTreeMap<u64, Vec<Sge>>,
    posted: Vec<Posted>,
    /// What is under way, by its buffer's wr_id
    fetching: BTreeMap<u64, (usize, Vec<Sge>)>,
    sent: Vec<Message>,
    unexpected: Vec<usize>,
    seen: u32,
    last: [Option<usize>; 2],
    done: Vec<usize>,
    fins: Vec<usize>,
    next: u64,
    left: u32,
}

impl World {
    pub(crate) fn make_matching(&mut self) {
        for (hosts, left) in self.plan.tags.clone() {
            let (cq, fin_cq, rq) = (SimCq::new(4096), SimCq::new(4096), SimRq::new(self.plan.srq_slots, 4));
            let [from, to] = hosts;
            let pd = self.net.hosts[to].pd;
            let srq = self.net.hosts[to].nic.create_tag_srq(pd, rq.clone(), cq.clone(), LIST as u32, 0);
            let srq = srq.expect("an SRQ");
            let sq = [(); 2].map(|()| SimSq::new(64));
            let back = [(); 2].map(|()| SimRq::new(16, 1));
            let (mut sends, mut peers) = ([0; 2], [0; 2]);
            let mtu = self.rng.pick(&[Mtu::M256, Mtu::M1024]);
            let setup = Setup { mtu, timeout: 0, rd_atomic: self.rng.pick(&[1, 4]), ..Setup::default() };
            let own = self.rng.pick(&[1, 2, 32]);
            for i in 0..2 {
                let recv = RecvSource::Own(back[i].clone());
                sends[i] = self.net.hosts[from].qp(QpType::Rc, &sq[i], recv, [&fin_cq, &fin_cq], false);
                let shared = RecvSource::Shared(srq);
                peers[i] = self.net.hosts[to].qp(QpType::Rc, &SimSq::new(own), shared, [&cq, &cq], true);
                self.net.connect(
                    QpType::Rc,
                    QpAt { host: from, qpn: sends[i] },
                    QpAt { host: to, qpn: peers[i] },
                    &setup,
                );
                self.who.insert((from, sends[i]), Who::Matching);
                self.who.insert((to, peers[i]), Who::Matching);
            }
            self.matching.push(Matching {
                hosts,
                sends,
                sq,
                peers,
                back,
                fin_cq,
                fin_buffers: BTreeMap::new(),
                srq,
                rq,
                cq,
                plain: BTreeMap::new(),
                posted: vec![],
                fetching: BTreeMap::new(),
                sent: vec![],
                unexpected: vec![],
                seen: 0,
                last: [None; 2],
                done: vec![],
                fins: vec![],
                next: 0,
                left,
            });
        }
    }

    pub(crate) fn act_matching(&mut self, eager: bool) -> bool {
        let mut any = false;
        for m in 0..self.matching.len() {
            let mut matching = self.matching.remove(m);
            if eager || self.rng.chance(self.plan.feed) {
                any |= matching.feed(self);
            }
            if self.rng.chance(0.3)
                && matching.posted.len() + matching.fetching.len() < LIST - 2
                && matching.left > 0
            {
                matching.receive(self);
            }
            if matching.left > 0 && (eager || self.rng.chance(self.plan.act / 2.0)) {
                any |= matching.send(self);
            }
            self.matching.insert(m, matching);
        }
        any
    }

    pub(crate) fn poll_matching(&mut self, at: usize) -> bool {
        let mut any = false;
        for m in 0..self.matching.len() {
            let mut matching = self.matching.remove(m);
            while matching.hosts[1] == at
                && let Some((cqe, _)) = matching.cq.poll()
            {
                any = true;
                matching.came(self, &cqe);
            }
            while matching.hosts[0] == at
                && let Some((cqe, _)) = matching.fin_cq.poll()
            {
                any = true;
                matching.on_fin(self, &cqe);
            }
            self.matching.insert(m, matching);
        }
        any
    }

    pub(crate) fn finish_matching(&mut self) {
        for at in 0..self.plan.hosts {
            assert!(!self.poll_matching(at), "tags: something came late");
        }
        for matching in &mut self.matching {
            assert!(matching.fetching.is_empty(), "tags: data that never came");
            matching.done.append(&mut matching.unexpected);
            matching.done.sort_unstable();
            let all: Vec<usize> = (0..matching.sent.len()).collect();
            assert_eq!(matching.done, all, "tags: each message once");
            assert!(matching.fins.is_empty(), "tags: senders without a FIN");
        }
    }
}

impl Matching {
    /// Receives for what matches nothing, and for FINs.
    fn feed(&mut self, w: &mut World) -> bool {
        let mut any = false;
        let [from, to] = self.hosts;
        while !self.rq.is_full() {
            let (host, pool) = (&mut w.net.hosts[to], &mut w.sites[to].pool);
            let sges = pool.scatter(host, &mut w.rng, EAGER as u32 + HEADER, 4, WRITE);
            self.rq.post(Recv { wr_id: self.next, sges: sges.clone() }).expect("there is room");
            self.plain.insert(self.next, sges);
            self.next += 1;
            any = true;
        }
        for back in &self.back {
            while !back.is_full() {
                let piece = w.sites[from].pool.take(&mut w.net.hosts[from], 32, WRITE);
                back.post(Recv { wr_id: self.next, sges: vec![piece] }).expect("there is room");
                self.fin_buffers.insert(self.next, vec![piece]);
                self.next += 1;
                any = true;
            }
        }
        any
    }

    fn send(&mut self, w: &mut World) -> bool {
        let (number, qp) = (self.sent.len(), w.rng.below(2) as usize);
        if self.sq[qp].is_full() {
            return false;
        }
        let op = w.rng.pick(&[NO_TAG, RENDEZVOUS, RENDEZVOUS, tmh::EAGER, tmh::EAGER, tmh::EAGER]);
        let tag = w.rng.below(4);
        let most = if op == RENDEZVOUS { 2 * EAGER } else { EAGER };
        let len = w.rng.below(most + 1);
        let data = any_bytes(&mut w.rng, len as u32);
        let host = &mut w.net.hosts[self.hosts[0]];
        let mut region = None;
        if op == RENDEZVOUS {
            let (addr, rkey) = host.region(len.max(1), Access::REMOTE_READ);
            host.env.memory.write(addr, &data);
            host.env.memory.allow(addr, len, READ);
            region = Some((addr, rkey));
        }
        let bytes = tmh::message(op, number as u32, tag, &data, region);
        /* the buffer stays the card's for ever: nobody asks when the message is done */
        let sges = w.sites[self.hosts[0]].pool.scatter(host, &mut w.rng, bytes.len() as u32, 3, READ);
        put(host, &sges, &bytes);
        let wqe = SendWqe { op: SendOp::Send, flags: SendFlags::empty(), ..SendWqe::default() };
        self.sq[qp].post(Send { wqe, sges, inline: None }).expect("there is room");
        w.net.doorbell(self.hosts[0], self.sends[qp]);
        self.sent.push(Message { op, tag, data, region });
        self.left -= 1;
        w.summary.add("tags", ["untagged", "rendezvous", "", "eager"][usize::from(op)], 1);
        true
    }

    fn change(&mut self, w: &mut World, wr_id: u64, change: TagChange) -> u32 {
        let seen = w.rng.chance(0.7).then_some(self.seen);
        let op = TagOp { wr_id, change, seen, signaled: false };
        w.net.hosts[self.hosts[1]].nic.change_tags(self.srq, &op).expect("there is room")
    }

    /// A receive for some tag: what came unexpected may serve it, else it is added.
    fn receive(&mut self, w: &mut World) {
        let mask = if w.rng.chance(0.2) { 0 } else { u64::MAX };
        let tag = w.rng.below(4) & mask;
        let sent = &self.sent;
        if let Some(at) = self.unexpected.iter().position(|n| sent[*n].tag & mask == tag) {
            return self.done.push(self.unexpected.remove(at));
        }
        let to = self.hosts[1];
        let room = EAGER + w.rng.below(EAGER);
        let pieces = w.sites[to].pool.scatter(
            &mut w.net.hosts[to],
            &mut w.rng,
            room as u32,
            MAX_TAG_SGE as u64,
            WRITE,
        );
        let mut sges = [Sge::default(); MAX_TAG_SGE];
        sges[..pieces.len()].copy_from_slice(&pieces);
        let (wr_id, num_sge) = (self.next, pieces.len() as u8);
        self.next += 1;
        let buffer = TaggedBuffer { wr_id, tag, mask, sges, num_sge };
        let handle = self.change(w, wr_id, TagChange::Add(buffer));
        self.posted.push(Posted { handle, wr_id, tag, mask, sges: pieces });
    }

    /// Something completed at the host that matches.
    fn came(&mut self, w: &mut World, cqe: &Cqe) {
        w.summary.add("tags", &format!("{:?} {:?}", cqe.opcode, cqe.status), 1);
        match cqe.opcode {
            WcOpcode::TmRecv if cqe.flags.contains(WcFlags::TM_MATCH) => self.matched(w, cqe),
            WcOpcode::TmRecv if cqe.flags.contains(WcFlags::TM_DATA_VALID) => self.data(w, cqe),
            WcOpcode::TmRecv | WcOpcode::TmNoTag => self.plain(w, cqe),
            _ => panic!("tags: nobody asked for {cqe:?}"),
        }
    }

    fn in_order(&mut self, cqe: &Cqe, number: usize) {
        let qp = usize::from(cqe.qpn == self.peers[1]);
        assert!(self.last[qp].is_none_or(|last| last < number), "tags: a connection's messages out of order");
        self.last[qp] = Some(number);
    }

    fn matched(&mut self, w: &mut World, cqe: &Cqe) {
        let TagMatch { tag, app_ctx } = cqe.tag().expect("it matched");
        let number = app_ctx as usize;
        self.in_order(cqe, number);
        let message = &self.sent[number];
        assert_eq!(message.tag, tag, "tags: {cqe:?}");
        let at = self.posted.iter().position(|p| p.wants(tag)).expect("tags: a match that nobody waits for");
        let posted = self.posted.remove(at);
        assert_eq!(posted.wr_id, cqe.wr_id, "tags: not the oldest buffer that matches");
        self.done.push(number);
        let room: u32 = posted.sges.iter().map(|s| s.len).sum();
        if cqe.status == WcStatus::TmRndvIncomplete {
            assert!(message.op == RENDEZVOUS && message.data.len() > room as usize, "tags: {cqe:?}");
            let there = get(&w.net.hosts[self.hosts[1]], &posted.sges, 16);
            assert_eq!((there[0], &there[8..]), (RENDEZVOUS, &tag.to_be_bytes()[..]));
            return self.give(w, 1, &posted.sges);
        }
        assert_eq!(cqe.status, WcStatus::Success, "tags: {cqe:?}");
        let fetched = message.op == RENDEZVOUS;
        self.fetching.insert(cqe.wr_id, (number, posted.sges));
        if cqe.flags.contains(WcFlags::TM_DATA_VALID) {
            assert!(!fetched, "tags: data before it was fetched");
            self.data(w, cqe);
        } else if fetched {
            self.fins.push(number);
        }
    }

    fn give(&self, w: &mut World, side: usize, sges: &[Sge]) {
        let at = self.hosts[side];
        w.sites[at].pool.give(&mut w.net.hosts[at], sges);
    }

    fn data(&mut self, w: &mut World, cqe: &Cqe) {
        assert_eq!(cqe.status, WcStatus::Success, "tags: {cqe:?}");
        let (number, sges) = self.fetching.remove(&cqe.wr_id).expect("tags: data before its match");
        let data = &self.sent[number].data;
        assert_eq!(cqe.byte_len as usize, data.len(), "tags: length of message {number}");
        assert!(
            get(&w.net.hosts[self.hosts[1]], &sges, data.len()) == *data,
            "tags: bytes of message {number}"
        );
        self.give(w, 1, &sges);
    }

    /// A message that matched nothing.
    fn plain(&mut self, w: &mut World, cqe: &Cqe) {
        assert_eq!((cqe.status, cqe.tag()), (WcStatus::Success, None), "tags: {cqe:?}");
        let sges = self.plain.remove(&cqe.wr_id).expect("tags: a receive that is not posted");
        let all = get(&w.net.hosts[self.hosts[1]], &sges, cqe.byte_len as usize);
        let number = u32::from_be_bytes([all[4], all[5], all[6], all[7]]) as usize;
        self.in_order(cqe, number);
        let Message { op, tag, data, region } = &self.sent[number];
        let (op, tag) = (*op, *tag);
        let payload = if region.is_some() { &[][..] } else { &data[..] };
        assert!(region.is_some() || all[16..] == *payload, "tags: bytes of message {number}");
        assert_eq!(cqe.opcode == WcOpcode::TmNoTag, op == NO_TAG, "tags: {cqe:?}");
        self.give(w, 1, &sges);
        if op == NO_TAG {
            return self.done.push(number);
        }
        self.seen += 1;
        match self.posted.iter().position(|p| p.wants(tag)) {
            None => self.unexpected.push(number),
            /* added while the message was on its way: it slept, so that the card cannot have used it */
            Some(at) => {
                let posted = self.posted.remove(at);
                self.change(w, 0, TagChange::Remove(posted.handle));
                self.give(w, 1, &posted.sges);
                self.done.push(number);
            }
        }
    }

    /// The FIN: the sender's data was fetched. It closes the region: a READ that the wire repeats late
    /// must not reach it any more.
    fn on_fin(&mut self, w: &mut World, cqe: &Cqe) {
        assert_eq!((cqe.status, cqe.opcode), (WcStatus::Success, WcOpcode::Recv), "tags: {cqe:?}");
        let sges = self.fin_buffers.remove(&cqe.wr_id).expect("tags: a receive that is not posted");
        let fin = get(&w.net.hosts[self.hosts[0]], &sges, 32);
        let number = u32::from_be_bytes([fin[4], fin[5], fin[6], fin[7]]) as usize;
        let at = self.fins.iter().position(|n| *n == number);
        assert!(fin[0] == FIN && cqe.byte_len == 32, "tags: {fin:?}");
        let message = &self.sent[number];
        if let Some((addr, rkey)) = message.region {
            let host = &mut w.net.hosts[self.hosts[0]];
            host.dereg_mr(rkey).expect("it exists");
            host.env.memory.allow(addr, message.data.len() as u64, 0);
        }
        /* its match may not have been polled yet */
        match at {
            Some(at) => drop(self.fins.remove(at)),
            None => {
                let to = self.hosts[1];
                let mut later = std::mem::take(&mut self.fins);
                while let Some((cqe, _)) = self.cq.poll() {
                    self.came(w, &cqe);
                }
                later.append(&mut self.fins);
                let at = later.iter().position(|n| *n == number);
                later.remove(at.unwrap_or_else(|| panic!("tags: host {to} fetched what it did not match")));
                self.fins = later;
            }
        }
    }
}
