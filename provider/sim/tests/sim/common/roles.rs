//! Hosts whose cards settle by themselves what the ends of their connections are, and connections whose
//! programs want what the cards want.
//!
//! No plan of tools/soak takes this `World`'s place: tests fill a card to one connection below its
//! threshold, change a preference at a chosen moment, forge a message of a round, and look at what each card
//! has settled.
//! The other one of StaR by hand (`provider/star/src/stateful/tests/world.rs`) has one half, and says why.

use starverbs_core::qp::RecvSource;
use starverbs_core::{Access, Cqe, FrameMeta, NicConfig, QpType, Qpn, SendOp, SendWqe, Sge, SrqId, WcStatus};
use starverbs_sim::{Faults, Net, QpAt, Recv, Send, Setup, SimCq, SimRq, SimSq, StarCard};
use starverbs_star::control::{Control, MAX_CONTROL, Preference, Role};
use starverbs_star::env::{QpPair, StarEnv};
use starverbs_star::form::Form;
use starverbs_star::negotiate::Outcome;
use starverbs_star::role_message::RoleMessage;

pub(crate) const SECOND: u64 = 1_000_000_000;
/// Beyond so many connections a card has too many, by default.
pub(crate) const THRESHOLD: u32 = 4;
/// What a connection is whose first host has become rid of it.
pub(crate) const STAR: [Option<Role>; 2] = [Some(Role::Stateless), Some(Role::Stateful)];

/// A connection of two hosts.
pub(crate) struct Conn {
    pub(crate) hosts: [usize; 2],
    pub(crate) qpns: [Qpn; 2],
    pub(crate) sqs: [SimSq; 2],
    pub(crate) rqs: [SimRq; 2],
    pub(crate) cq: SimCq,
}

pub(crate) struct World {
    pub(crate) net: Net,
    /// QPs of the connections that hosts have with themselves
    crowds: Vec<Vec<Qpn>>,
}

impl World {
    /// Hosts whose cards have too many connections beyond these numbers. `None`: a card without StaR.
    pub(crate) fn new<const N: usize>(thresholds: [Option<u32>; N]) -> World {
        World::with_cards(thresholds.map(|threshold| (threshold, NicConfig::default())))
    }

    pub(crate) fn with_cards<const N: usize>(cards: [(Option<u32>, NicConfig); N]) -> World {
        let mut net = Net::new(N as u8, NicConfig::default(), Faults::default(), 7);
        for (host, (threshold, config)) in cards.into_iter().enumerate() {
            net.replace_card(host, config);
            if let Some(threshold) = threshold {
                net.open_star(
                    host,
                    StarCard { threshold, key: None, boot: 70 + host as u64, form: Form::default() },
                );
            }
        }
        World { net, crowds: vec![Vec::new(); N] }
    }

    pub(crate) fn connect(&mut self) -> Conn {
        self.connect_hosts([0, 1], [None; 2])
    }

    /// A connection of these hosts; `srqs`: the shared queues that its ends take from.
    pub(crate) fn connect_hosts(&mut self, hosts: [usize; 2], srqs: [Option<&(SrqId, SimRq)>; 2]) -> Conn {
        let cq = SimCq::new(64);
        let sqs = [SimSq::new(16), SimSq::new(16)];
        let rqs = srqs.map(|srq| srq.map_or_else(|| SimRq::new(16, 1), |(_, rq)| rq.clone()));
        let qpns = [0, 1].map(|at| {
            let (host, rq) = (&mut self.net.hosts[hosts[at]], &rqs[at]);
            let source = match srqs[at] {
                Some((id, _)) => RecvSource::Shared(*id),
                None => RecvSource::Own(rq.clone()),
            };
            let qpn = host.qp(QpType::Rc, &sqs[at], source, [&cq, &cq], true);
            host.preference(qpn, Preference::Auto);
            qpn
        });
        self.net.connect(
            QpType::Rc,
            QpAt { host: hosts[0], qpn: qpns[0] },
            QpAt { host: hosts[1], qpn: qpns[1] },
            &Setup::default(),
        );
        self.net.run_for(SECOND / 2);
        Conn { hosts, qpns, sqs, rqs, cq }
    }

    /// A shared receive queue of a host.
    pub(crate) fn srq(&mut self, host: usize) -> (SrqId, SimRq) {
        let (host, rq) = (&mut self.net.hosts[host], SimRq::new(16, 1));
        (host.nic.create_srq(host.pd, rq.clone(), 0, 0).expect("memory"), rq)
    }

    /// A connection of a host with itself, which stays plain: two more that its card keeps.
    pub(crate) fn crowd(&mut self, at: usize) {
        let (cq, sq) = (SimCq::new(8), SimSq::new(8));
        let [a, b] = [(); 2].map(|()| {
            let rq = RecvSource::Own(SimRq::new(8, 1));
            self.net.hosts[at].qp(QpType::Rc, &sq, rq, [&cq, &cq], true)
        });
        self.net.connect(QpType::Rc, QpAt { host: at, qpn: a }, QpAt { host: at, qpn: b }, &Setup::default());
        self.crowds[at].extend([a, b]);
    }

    /// One of those ends.
    pub(crate) fn thin(&mut self, at: usize) {
        for _ in 0..2 {
            let qpn = self.crowds[at].pop().expect("there is one");
            let host = &mut self.net.hosts[at];
            host.nic.destroy_qp(&mut host.env, qpn).expect("it is there");
        }
    }

    pub(crate) fn roles(&self, conn: &Conn) -> [Option<Role>; 2] {
        [0, 1].map(|at| self.role(conn, at))
    }

    /// The program of one end wants it to be this from now on. Whether it may.
    pub(crate) fn may_want(&mut self, conn: &Conn, at: usize, preference: Preference) -> bool {
        let now = self.net.now();
        self.net.hosts[conn.hosts[at]].change_preference(conn.qpns[at], preference, now)
    }

    pub(crate) fn want(&mut self, conn: &Conn, at: usize, preference: Preference) {
        assert!(self.may_want(conn, at, preference));
    }

    pub(crate) fn returns(&self) -> [u64; 2] {
        [0, 1].map(|at| self.net.hosts[at].nic.counters().star_returns.get())
    }

    pub(crate) fn outcome(&self, conn: &Conn, at: usize) -> Option<Outcome> {
        self.net.hosts[conn.hosts[at]].star.as_ref()?.roles.outcome(conn.qpns[at])
    }

    pub(crate) fn role(&self, conn: &Conn, at: usize) -> Option<Role> {
        match self.outcome(conn, at)? {
            Outcome::Star { role, .. } => Some(role),
            Outcome::Plain => None,
        }
    }

    /// Which incarnation an end is in.
    pub(crate) fn incarnation(&self, conn: &Conn, at: usize) -> u32 {
        let star = self.net.hosts[conn.hosts[at]].star.as_ref();
        star.and_then(|star| star.roles.incarnation(conn.qpns[at])).expect("it has begun")
    }

    /// Somebody sends this to the first end as if he were the second.
    pub(crate) fn forge(&mut self, conn: &Conn, said: &[Control]) {
        let [to, from] = [0, 1].map(|at| self.incarnation(conn, at));
        self.forge_between(conn, [from, to], said);
    }

    /// The same, from and to such incarnations.
    pub(crate) fn forge_between(&mut self, conn: &Conn, [by, of]: [u32; 2], said: &[Control]) {
        let ([to, from], [here, there]) = (conn.qpns, conn.hosts);
        let (src, dst) = (self.net.hosts[there].gid, self.net.hosts[here].gid);
        let meta = FrameMeta { src, dst, ..FrameMeta::default() };
        for message in said {
            let mut room = [0; MAX_CONTROL];
            let len = RoleMessage { from: by, to: of, message: *message }.encode(&mut room).unwrap();
            assert!(self.net.hosts[here].env.negotiate(&meta, QpPair { from, to }, &room[..len]));
        }
    }

    fn post(&mut self, conn: &Conn, at: usize, wqe: SendWqe, sges: Vec<Sge>) {
        conn.sqs[at].post(Send { wqe, sges, inline: None }).unwrap();
        self.net.doorbell(conn.hosts[at], conn.qpns[at]);
    }

    /// The program of an end asks to write nothing to its peer, which takes a request and an answer.
    pub(crate) fn post_write(&mut self, conn: &Conn, at: usize) {
        self.post(conn, at, SendWqe { op: SendOp::Write, ..SendWqe::default() }, vec![]);
    }

    /// It does so, and waits a second; its completion.
    pub(crate) fn write(&mut self, conn: &Conn, at: usize) -> Option<WcStatus> {
        self.post_write(conn, at);
        self.net.run_for(SECOND);
        conn.cq.poll().map(|(cqe, _)| cqe.status)
    }

    /// Words of an end and of its peer, for atomics.
    pub(crate) fn words(&mut self, conn: &Conn, at: usize) -> [Sge; 2] {
        [(at, Access::LOCAL_WRITE), (1 - at, Access::LOCAL_WRITE | Access::REMOTE_ATOMIC)].map(
            |(at, access)| {
                let host = &mut self.net.hosts[conn.hosts[at]];
                host.region_in(host.pd, 8, access)
            },
        )
    }

    /// The program of an end adds to a word of its peer.
    pub(crate) fn post_atomic(&mut self, conn: &Conn, at: usize, [mine, theirs]: [Sge; 2]) {
        let wqe = SendWqe {
            op: SendOp::FetchAdd,
            remote_addr: theirs.addr,
            rkey: theirs.lkey,
            compare_add: 1,
            length: 8,
            ..SendWqe::default()
        };
        self.post(conn, at, wqe, vec![mine]);
    }

    /// The program of an end sends a word to its peer.
    pub(crate) fn post_send(&mut self, conn: &Conn, at: usize, word: u64) {
        let host = &mut self.net.hosts[conn.hosts[at]];
        let sge = host.region_in(host.pd, 8, Access::LOCAL_WRITE);
        host.env.memory.set_word(sge.addr, word);
        self.post(conn, at, SendWqe { wr_id: word, ..SendWqe::default() }, vec![sge]);
    }

    /// The program of an end has room for a word; gives where.
    pub(crate) fn post_recv(&mut self, conn: &Conn, at: usize) -> u64 {
        let host = &mut self.net.hosts[conn.hosts[at]];
        let sge = host.region_in(host.pd, 8, Access::LOCAL_WRITE);
        conn.rqs[at].post(Recv { wr_id: sge.addr, sges: vec![sge] }).unwrap();
        sge.addr
    }

    /// Completions at both ends.
    pub(crate) fn completions(&self, conn: &Conn) -> Vec<Cqe> {
        std::iter::from_fn(|| conn.cq.poll()).map(|(cqe, _)| cqe).collect()
    }
}
