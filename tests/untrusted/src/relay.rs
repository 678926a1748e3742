//! Messages from other processes of an XRC domain: `Relay::decode` and `handle_relay` of two cards that share
//! the domain and have work in it.
//!
//! Host 0 sends to an SRQ of host 2 through a QP of host 1. The first byte decides who lies: a *third*
//! process of the domain, which knows neither leases nor messages but may guess, or, to each other, the two
//! at work. Their memory is watched; what the liar makes the cards do and keep is counted. After a third
//! process has gone, honest messages arrive.

use starverbs_core::relay::{HEAD, Relay};
use starverbs_core::wire::headers::Feth;
use starverbs_core::{
    Access, FlushLevel, Mtu, NicConfig, PdId, Placement, QPN_BLOCK_SHIFT, QpState, QpType, Qpn, SendOp,
    SendWqe, Sge, WcStatus,
};
use starverbs_sim::{Faults, Net, QpAt, READ, Recv, Send, Setup, SharedDomain, SimCq, SimRq, SimSq, WRITE};

use crate::bytes::Bytes;

const SENDER: usize = 0;
const QP_CARD: usize = 1;
const SRQ_CARD: usize = 2;
const LIAR: usize = 3;
/// Steps of one input; more is not looked at.
const MOST: usize = 200;
/// How far things go on of themselves after the input.
const STEPS: usize = 200_000;
/// Answers to one message: a lease for each WQE that one card may have, and one message more for each.
const ANSWERS: usize = 600;
const ROOM: u32 = 2000;
/// What the honest do
const OPS: [SendOp; 9] = [
    SendOp::Send,
    SendOp::Write,
    SendOp::WriteImm,
    SendOp::SendImm,
    SendOp::Read,
    SendOp::FetchAdd,
    SendOp::CmpSwap,
    SendOp::AtomicWrite,
    SendOp::Flush,
];
const FLUSH: u32 = Feth::word(Placement::GLOBAL, FlushLevel::Range);

struct World {
    net: Net,
    sq: SimSq,
    sent: SimCq,
    send: Qpn,
    recv: Qpn,
    pd: PdId,
    rq: SimRq,
    got: SimCq,
    number: u32,
    /// What a WRITE may reach
    page: Sge,
    posted: u64,
}

impl World {
    fn new() -> World {
        let mut net =
            Net::new(4, NicConfig { max_msg: 1 << 20, ..NicConfig::default() }, Faults::default(), 7);
        let domains = [QP_CARD, SRQ_CARD, LIAR]
            .map(|host| SharedDomain { host, pd: net.hosts[host].nic.alloc_pd().expect("a PD") });
        net.share(&domains);
        /* what comes to the liar is lost: only the input speaks for it */
        net.hosts[LIAR].env.peers.clear();
        let (sent, got) = (SimCq::new(4096), SimCq::new(4096));
        let sq = SimSq::new(64);
        let send = net.hosts[SENDER].xrc_initiator(&sq, &sent);
        let recv = net.hosts[QP_CARD].xrc_target(domains[0].pd);
        let setup = Setup { mtu: Mtu::M256, timeout: 12, retry_cnt: 3, rnr_retry: 3, ..Setup::default() };
        net.connect(
            QpType::XrcSend,
            QpAt { host: SENDER, qpn: send },
            QpAt { host: QP_CARD, qpn: recv },
            &setup,
        );
        let nic = &mut net.hosts[SRQ_CARD].nic;
        let (rq, pd) = (SimRq::new(512, 2), nic.alloc_pd().expect("a PD"));
        let id = nic.create_xrc_srq(pd, domains[1].pd, rq.clone(), got.clone(), 0).expect("an SRQ");
        let number = nic.srq_number(id);
        for at in [QP_CARD, SRQ_CARD] {
            net.hosts[at].env.memory.watch();
        }
        let rights =
            Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC | Access::FLUSH_GLOBAL;
        let page = net.hosts[SRQ_CARD].region_in(pd, 4096, Access::LOCAL_WRITE | rights);
        net.hosts[SRQ_CARD].env.memory.allow(page.addr, 4096, READ | WRITE);
        let secret = net.hosts[SRQ_CARD].pd;
        net.hosts[SRQ_CARD].region_in(secret, 4096, Access::LOCAL_WRITE | rights);
        let mut world = World { net, sq, sent, send, recv, pd, rq, got, number, page, posted: 0 };
        (0..40).for_each(|_| world.post_recv());
        world
    }

    fn post_recv(&mut self) {
        let sge = self.net.hosts[SRQ_CARD].region_in(self.pd, ROOM, Access::LOCAL_WRITE);
        let recv = Recv { wr_id: self.posted, sges: vec![sge] };
        if self.rq.post(recv).is_ok() {
            self.net.hosts[SRQ_CARD].env.memory.allow(sge.addr, u64::from(ROOM), WRITE);
            self.posted += 1;
        }
    }

    /// An honest message, if the connection is alive.
    fn post_send(&mut self, bytes: &mut Bytes<'_>) -> bool {
        let op = bytes.pick(&OPS);
        let len = match op {
            SendOp::FetchAdd | SendOp::CmpSwap | SendOp::AtomicWrite => 8,
            SendOp::Flush => 0,
            _ => u32::from(bytes.half()) % ROOM,
        };
        if self.net.hosts[SENDER].state(self.send) != QpState::Rts {
            return false;
        }
        let pd = self.net.hosts[SENDER].pd;
        let sge = self.net.hosts[SENDER].region_in(pd, len.max(1), Access::LOCAL_WRITE);
        let wqe = SendWqe {
            op,
            remote_qpn: self.number,
            remote_addr: self.page.addr,
            rkey: self.page.lkey,
            imm: if op == SendOp::Flush { FLUSH } else { 0 },
            ..SendWqe::default()
        };
        let posted = self.sq.post(Send { wqe, sges: vec![Sge { len, ..sge }], inline: None }).is_ok();
        self.net.doorbell(SENDER, self.send);
        posted
    }

    /// A message of the liar's.
    fn lie(&mut self, from: usize, to: usize, bytes: &mut Bytes<'_>) {
        let (head, data) = self.forge(bytes);
        let before = self.net.relays_under_way();
        self.net.relay(from, to, &[&head[..], &data[..]].concat());
        assert!(self.net.relays_under_way() <= before + ANSWERS, "an answer is bounded");
    }

    /// Words that are near to what is right.
    fn forge(&self, bytes: &mut Bytes<'_>) -> ([u8; HEAD], Vec<u8>) {
        let mut head = [0; HEAD];
        let kind = u32::from(bytes.byte());
        let words =
            [self.number, self.recv, self.page.lkey, self.page.addr as u32, (self.page.addr >> 32) as u32];
        for (at, to) in head.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let word = match (at, bytes.byte()) {
                (0, _) => kind % 13,
                (10, 0..200) => self.number,
                (11..14, 0..200) => [words[3], words[4], words[2]][at - 11],
                (_, 255) => bytes.word(),
                (_, 254) => 2 << QPN_BLOCK_SHIFT,
                (_, 240..254) => words[usize::from(bytes.byte()) % words.len()],
                (_, 200..240) => u32::from(bytes.byte()) << 16 | u32::from(bytes.byte()),
                (1, 100..200) => self.number,
                (2 | 3, 100..200) => self.recv,
                (_, small) => u32::from(small),
            };
            *to = word.to_ne_bytes();
        }
        (head, vec![0x5a; usize::from(bytes.half()) % 4097])
    }

    /// Completions are of what was posted.
    fn look(&mut self) {
        while let Some((cqe, _)) = self.got.poll() {
            assert!(cqe.wr_id < self.posted, "{cqe:?}");
        }
        while self.sent.poll().is_some() {}
        assert!([QP_CARD, SRQ_CARD].iter().all(|at| self.net.hosts[*at].env.memory.gaps_intact()));
    }

    /// The third process is gone, and has left nothing behind.
    fn works(&mut self) {
        self.net.kill(LIAR);
        for _ in 0..4 {
            self.post_recv();
        }
        assert_eq!(self.net.hosts[QP_CARD].state(self.recv), QpState::Rts, "it was nobody's to end");
        self.look();
        let honest = self.post_send(&mut Bytes(&[0, 200, 0]));
        assert!(self.net.run_until_idle(STEPS), "the cards come to rest");
        if honest {
            let last = std::iter::from_fn(|| self.sent.poll()).last().map(|(cqe, _)| cqe.status);
            assert_eq!(last, Some(WcStatus::Success));
        }
    }
}

/// Checks one input.
pub fn check(input: &[u8]) {
    if let Some(message) = Relay::decode(input) {
        let (head, data) = message.encode();
        let again = [&head[..], data].concat();
        assert_eq!(Relay::decode(&again), Some(message), "what is said is understood");
    }
    let mut bytes = Bytes(input);
    let third = bytes.byte() & 1 == 0;
    let mut world = World::new();
    for _ in 0..MOST {
        let Some(op) = bytes.next() else { break };
        match (op & 7, third) {
            (0..=3, true) => world.lie(LIAR, if op & 8 == 0 { SRQ_CARD } else { QP_CARD }, &mut bytes),
            (0 | 1, false) => world.lie(QP_CARD, SRQ_CARD, &mut bytes),
            (2 | 3, false) => world.lie(SRQ_CARD, QP_CARD, &mut bytes),
            (4, _) => world.post_recv(),
            (5, _) => {
                world.post_send(&mut bytes);
            }
            _ => {
                for _ in 0..bytes.byte() {
                    world.net.step();
                }
            }
        }
        world.look();
    }
    assert!(world.net.run_until_idle(STEPS), "the cards come to rest");
    world.look();
    if third {
        world.works();
    }
}
