//! A sender, a card that has QPs of an XRC domain, and cards that have SRQs of it.

use starverbs_core::{Cqe, NicConfig, PdId, QpType, Qpn, SendWqe, Sge, SrqId};
use starverbs_sim::{Faults, Net, QpAt, Recv, Rng, Send, Setup, SharedDomain, SimCq, SimHost, SimRq, SimSq};

use crate::common::{all_rights, any_faults};

/// Bytes of a receive buffer.
pub(crate) const ROOM: u32 = 200_000;
/// The sender, the host with the QPs, and two that only have SRQs.
pub(crate) const SENDER: usize = 0;
pub(crate) const QPS: usize = 1;
pub(crate) const HOSTS: u8 = 4;

pub(crate) struct Queue {
    pub(crate) host: usize,
    pub(crate) id: SrqId,
    pub(crate) number: u32,
    pub(crate) rq: SimRq,
    pub(crate) cq: SimCq,
    pub(crate) pd: PdId,
    pub(crate) buffers: Vec<Sge>,
}

pub(crate) struct Shared {
    pub(crate) net: Net,
    pub(crate) sq: [SimSq; 2],
    pub(crate) cq: SimCq,
    pub(crate) sends: [Qpn; 2],
    pub(crate) recvs: [Qpn; 2],
    /// Of the hosts from [`QPS`] on
    pub(crate) queues: Vec<Queue>,
}

pub(crate) fn region(host: &mut SimHost, pd: PdId, len: u32) -> Sge {
    host.region_in(pd, len, all_rights())
}

impl Shared {
    pub(crate) fn new(faults: Faults, seed: u64, setup: &Setup) -> Self {
        let mut net = Net::new(HOSTS, NicConfig::default(), faults, seed);
        let of = |host: usize| SharedDomain { host, pd: net.hosts[host].nic.alloc_pd().expect("a PD") };
        let domains: Vec<SharedDomain> = (QPS..usize::from(HOSTS)).map(of).collect();
        net.share(&domains);
        let cq = SimCq::new(256);
        let sq = [(); 2].map(|()| SimSq::new(64));
        let (mut sends, mut recvs) = ([0; 2], [0; 2]);
        for i in 0..2 {
            sends[i] = net.hosts[SENDER].xrc_initiator(&sq[i], &cq);
            recvs[i] = net.hosts[QPS].xrc_target(domains[0].pd);
            net.connect(
                QpType::XrcSend,
                QpAt { host: SENDER, qpn: sends[i] },
                QpAt { host: QPS, qpn: recvs[i] },
                setup,
            );
        }
        let queue = |SharedDomain { host, pd: domain }: &SharedDomain| {
            let nic = &mut net.hosts[*host].nic;
            let (rq, cq) = (SimRq::new(256, 2), SimCq::new(256));
            let pd = nic.alloc_pd().expect("a PD");
            let id = nic.create_xrc_srq(pd, *domain, rq.clone(), cq.clone(), 0).expect("an SRQ");
            Queue { host: *host, id, number: nic.srq_number(id), rq, cq, pd, buffers: vec![] }
        };
        let queues = domains.iter().map(queue).collect();
        Shared { net, sq, cq, sends, recvs, queues }
    }

    /// On any wire, with timers that give up soon; which host is to die.
    pub(crate) fn of_mortals(seed: u64) -> (Rng, Self, usize) {
        let mut rng = Rng::new(seed);
        let faults = any_faults(&mut rng);
        let shared = Shared::new(faults, seed, &Setup { timeout: 12, retry_cnt: 3, ..Setup::default() });
        let victim = rng.within(1, 3) as usize;
        (rng, shared, victim)
    }

    /// No program had an event of a fault, and nothing was written beside a region.
    pub(crate) fn assert_unharmed(&self) {
        for host in &self.net.hosts {
            assert_eq!(host.env.events, []);
            assert!(host.env.memory.gaps_intact());
        }
    }

    pub(crate) fn send(&mut self, qp: usize, to: usize, wqe: SendWqe, data: &[u8]) {
        let pd = self.net.hosts[SENDER].pd;
        let from = region(&mut self.net.hosts[SENDER], pd, data.len() as u32);
        self.net.hosts[SENDER].env.memory.write(from.addr, data);
        self.post(qp, to, wqe, from);
    }

    /// Posts a request that names queue `to`, with one piece of the sender's memory.
    pub(crate) fn post(&mut self, qp: usize, to: usize, wqe: SendWqe, from: Sge) {
        let wqe = SendWqe { remote_qpn: self.queues[to].number, ..wqe };
        self.sq[qp].post(Send { wqe, sges: vec![from], inline: None }).expect("there is room");
        self.net.doorbell(SENDER, self.sends[qp]);
    }

    /// Posts a buffer of two pieces.
    pub(crate) fn post_recv(&mut self, to: usize) {
        let queue = &mut self.queues[to];
        let sge = region(&mut self.net.hosts[queue.host], queue.pd, ROOM);
        let first = Sge { len: 100, ..sge };
        let second = Sge { addr: sge.addr + 100, len: ROOM - 100, ..sge };
        let wr_id = queue.buffers.len() as u64;
        queue.rq.post(Recv { wr_id, sges: vec![first, second] }).expect("there is room");
        queue.buffers.push(sge);
    }

    /// Sends so many messages to queue 1 through a QP of its own card, and lets them arrive.
    pub(crate) fn send_directly(&mut self, count: usize) {
        let domain = self.net.hosts[2].env.domain.expect("it shares one");
        let (cq, sq) = (SimCq::new(64), SimSq::new(64));
        let recv = self.net.hosts[2].xrc_target(domain);
        let send = self.net.hosts[SENDER].xrc_initiator(&sq, &cq);
        self.net.connect(
            QpType::XrcSend,
            QpAt { host: SENDER, qpn: send },
            QpAt { host: 2, qpn: recv },
            &Setup::default(),
        );
        for _ in 0..count {
            let wqe = SendWqe { remote_qpn: self.queues[1].number, ..SendWqe::default() };
            sq.post(Send { wqe, sges: vec![], inline: None }).expect("there is room");
        }
        self.net.doorbell(SENDER, send);
        self.run();
    }

    pub(crate) fn run(&mut self) {
        assert!(self.net.run_until_idle(400_000), "it ends");
    }

    pub(crate) fn sent(&self) -> Vec<Cqe> {
        std::iter::from_fn(|| self.cq.poll()).map(|(cqe, _)| cqe).collect()
    }

    pub(crate) fn got(&self, to: usize) -> Vec<Cqe> {
        std::iter::from_fn(|| self.queues[to].cq.poll()).map(|(cqe, _)| cqe).collect()
    }
}
