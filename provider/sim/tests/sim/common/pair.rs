//! Two connected QPs on a quiet wire, for tests that look at one thing.

use starverbs_core::qp::RecvSource;
use starverbs_core::{Access, AsyncEvent, NicConfig, QpState, QpType, Qpn, SendOp, SendWqe, Sge, WcStatus};
use starverbs_sim::{Faults, Net, QpAt, Recv, Send, Setup, SimCq, SimRq, SimSq};

const STEPS: usize = 100_000;

/// Two connected QPs with queues of their own and a registered page each.
pub(crate) struct Pair {
    pub(crate) net: Net,
    pub(crate) qpn: [Qpn; 2],
    pub(crate) sq: [SimSq; 2],
    pub(crate) rq: [SimRq; 2],
    pub(crate) cq: [SimCq; 2],
    pub(crate) page: [(u64, u32); 2],
}

pub(crate) const PAGE: u64 = 8192;

impl Pair {
    pub(crate) fn of(qp_type: QpType, setup: &Setup) -> Self {
        Pair::against(qp_type, setup, NicConfig::default())
    }

    /// Host 1's card is another.
    pub(crate) fn against(qp_type: QpType, setup: &Setup, cfg: NicConfig) -> Self {
        let mut net = Net::new(2, NicConfig::default(), Faults::default(), 1);
        net.replace_card(1, cfg);
        let (sq, rq) = ([(); 2].map(|()| SimSq::new(16)), [(); 2].map(|()| SimRq::new(16, 2)));
        let cq = [(); 2].map(|()| SimCq::new(64));
        let remote = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let all = Access::LOCAL_WRITE | remote | Access::FLUSH_GLOBAL;
        let mut qpn = [0; 2];
        let mut page = [(0, 0); 2];
        for at in 0..2 {
            let host = &mut net.hosts[at];
            qpn[at] = host.qp(qp_type, &sq[at], RecvSource::Own(rq[at].clone()), [&cq[at], &cq[at]], true);
            page[at] = host.region(PAGE, all);
        }
        net.connect(qp_type, QpAt { host: 0, qpn: qpn[0] }, QpAt { host: 1, qpn: qpn[1] }, setup);
        Pair { net, qpn, sq, rq, cq, page }
    }

    pub(crate) fn rc() -> Self {
        Pair::of(QpType::Rc, &Setup::default())
    }

    /// A work request from host 0's page to host 1's.
    pub(crate) fn wqe(&self, wr_id: u64, op: SendOp) -> SendWqe {
        SendWqe { wr_id, op, remote_addr: self.page[1].0, rkey: self.page[1].1, ..SendWqe::default() }
    }

    pub(crate) fn sge(&self, at: usize, len: u32) -> Sge {
        Sge { addr: self.page[at].0, len, lkey: self.page[at].1 }
    }

    pub(crate) fn post(&mut self, wqe: SendWqe, sges: &[Sge]) {
        self.sq[0].post(Send { wqe, sges: sges.to_vec(), inline: None }).expect("there is room");
        self.net.doorbell(0, self.qpn[0]);
    }

    pub(crate) fn post_recv(&mut self, wr_id: u64, len: u32) {
        let sges = vec![self.sge(1, len)];
        self.rq[1].post(Recv { wr_id, sges }).expect("there is room");
    }

    pub(crate) fn run(&mut self) {
        assert!(self.net.run_until_idle(STEPS), "it ends");
    }

    pub(crate) fn polled(&self, at: usize) -> Vec<(u64, WcStatus)> {
        std::iter::from_fn(|| self.cq[at].poll()).map(|(c, _)| (c.wr_id, c.status)).collect()
    }

    pub(crate) fn states(&self) -> [QpState; 2] {
        [0, 1].map(|at| self.net.hosts[at].state(self.qpn[at]))
    }

    pub(crate) fn events(&self, at: usize) -> &[AsyncEvent] {
        &self.net.hosts[at].env.events
    }

    /// Posts one bad request between two good ones and more behind; the bad one must fail with
    /// `status`, those behind be flushed.
    pub(crate) fn fails_with(&mut self, bad: SendWqe, sges: &[Sge], status: WcStatus) {
        let good = [self.sge(0, 8)];
        self.post_recv(100, 64);
        self.post_recv(101, 64);
        self.post(self.wqe(1, SendOp::Write), &good);
        self.post(SendWqe { wr_id: 2, ..bad }, sges);
        self.post(self.wqe(3, SendOp::Write), &good);
        self.post(self.wqe(4, SendOp::Send), &good);
        self.run();
        let flushed = WcStatus::WrFlushErr;
        assert_eq!(self.polled(0), [(1, WcStatus::Success), (2, status), (3, flushed), (4, flushed)]);
        assert_eq!(self.states()[0], QpState::Err);
        assert_eq!(self.sq[0].outstanding(), 0);
    }

    /// As [`Pair::fails_with`], and the peer ends in ERR with its receives flushed and `event`.
    pub(crate) fn refused_with(&mut self, bad: SendWqe, sges: &[Sge], status: WcStatus, event: AsyncEvent) {
        self.fails_with(bad, sges, status);
        let flushed = WcStatus::WrFlushErr;
        assert_eq!(self.polled(1), [(100, flushed), (101, flushed)]);
        assert_eq!(self.states()[1], QpState::Err);
        assert_eq!(self.events(1), [event]);
    }
}
