//! A program on both ends of an RC connection, with its expectations: a plan of operations for each
//! direction, made before the first is posted, so that what must be true at each completion is known.

use starverbs_core::coalesce::Backlog;
use starverbs_core::qp::RecvSource;
use starverbs_core::wire::headers::Feth;
use starverbs_core::{Access, Cqe, QpState, QpType, Qpn, Seg, SendFlags, SendOp, SendWqe, Sge, SrqId};
use starverbs_core::{FlushLevel, Placement, WcFlags, WcOpcode, WcStatus};
use starverbs_sim::{Net, QpAt, Recv, Rng, Send, Setup, SimCq, SimRq, SimSq};

use crate::common::{all_rights, any_bytes, any_size, get, put, scattered};

/// One operation of a plan.
pub(crate) struct Op {
    pub(crate) wqe: SendWqe,
    sges: Vec<Sge>,
    inline: Option<Seg>,
    /// SEND, WRITE: what is sent. READ, atomics: what must come back.
    data: Vec<u8>,
}

impl Op {
    fn signaled(&self) -> bool {
        self.wqe.flags.contains(SendFlags::SIGNALED)
    }
}

/// One end: its QP, and the direction that begins here.
pub(crate) struct Endpoint {
    pub(crate) host: usize,
    pub(crate) qpn: Qpn,
    pub(crate) sq: SimSq,
    pub(crate) rq: SimRq,
    pub(crate) plan: Vec<Op>,
    /// Receives for the peer's plan, in order
    recvs: Vec<Vec<Sge>>,
    pub(crate) shared: bool,
    posted: usize,
    rung: usize,
    completed: usize,
    recvs_posted: usize,
    received: usize,
}

/// Two ends.
pub(crate) struct Conn {
    pub(crate) ends: [Endpoint; 2],
    mtu: u32,
    /// Word that this direction's atomics and ATOMIC WRITEs work on, and what it must be in the end
    words: [(u64, u64); 2],
}

/// What a connection is made with.
pub(crate) struct Shape {
    pub(crate) setup: Setup,
    pub(crate) sq_slots: u32,
    pub(crate) rq_slots: usize,
    pub(crate) ops: u64,
    /// Operations to choose from
    pub(crate) kinds: Vec<SendOp>,
}

/// Receives of an SRQ, posted as there is room.
pub(crate) struct Pool {
    rq: SimRq,
    pub(crate) buffers: Vec<Vec<Sge>>,
    posted: usize,
}

impl Pool {
    /// What connections take from the SRQs of both hosts, where there are such.
    pub(crate) fn of(
        net: &mut Net,
        rng: &mut Rng,
        conns: &[Conn],
        srqs: &[Option<(SrqId, SimRq)>; 2],
    ) -> [Option<Pool>; 2] {
        let mut pools = [None, None];
        for (at, srq) in srqs.iter().enumerate() {
            let needs = || conns.iter().map(|c| c.recv_needs(at));
            let room = needs().map(|(room, _)| room).max().unwrap_or(0);
            let count = needs().map(|(_, n)| n).sum();
            let mut buffer = || scattered(&mut net.hosts[at], rng, room, 4, Access::LOCAL_WRITE);
            pools[at] = srq.as_ref().map(|(_, rq)| Pool {
                rq: rq.clone(),
                buffers: (0..count).map(|_| buffer()).collect(),
                posted: 0,
            });
        }
        pools
    }

    /// Posts as many as there is room for. Whether there was.
    pub(crate) fn fill(&mut self) -> bool {
        let before = self.posted;
        while self.posted < self.buffers.len() && !self.rq.is_full() {
            let sges = self.buffers[self.posted].clone();
            self.rq.post(Recv { wr_id: self.posted as u64, sges }).expect("there is room");
            self.posted += 1;
        }
        self.posted != before
    }
}

impl Conn {
    /// QPs on hosts 0 and 1 with completions in `cqs`, connected; plans made.
    pub(crate) fn new(
        net: &mut Net,
        rng: &mut Rng,
        cqs: &[SimCq; 2],
        srqs: [Option<(SrqId, SimRq)>; 2],
        shape: &Shape,
    ) -> Self {
        let mut end = |host: usize| {
            let sq = SimSq::new(shape.sq_slots);
            let rq = match &srqs[host] {
                Some((_, rq)) => rq.clone(),
                None => SimRq::new(shape.rq_slots, 4),
            };
            let source = match &srqs[host] {
                Some((id, _)) => RecvSource::Shared(*id),
                None => RecvSource::Own(rq.clone()),
            };
            let qpn = net.hosts[host].qp(QpType::Rc, &sq, source, [&cqs[host], &cqs[host]], false);
            let shared = srqs[host].is_some();
            Endpoint {
                host,
                qpn,
                sq,
                rq,
                shared,
                plan: vec![],
                recvs: vec![],
                posted: 0,
                rung: 0,
                completed: 0,
                recvs_posted: 0,
                received: 0,
            }
        };
        let ends = [end(0), end(1)];
        net.connect(
            QpType::Rc,
            QpAt { host: 0, qpn: ends[0].qpn },
            QpAt { host: 1, qpn: ends[1].qpn },
            &shape.setup,
        );
        let mut conn = Conn { ends, mtu: shape.setup.mtu.bytes(), words: [(0, 0); 2] };
        for from in 0..2 {
            conn.make_plan(net, rng, from, shape);
        }
        conn
    }

    fn make_plan(&mut self, net: &mut Net, rng: &mut Rng, from: usize, shape: &Shape) {
        let (word, word_key) = net.hosts[1 - from].region(8, all_rights());
        let mut value = rng.bits();
        net.hosts[1 - from].env.memory.set_word(word, value);
        let n = rng.below(shape.ops + 1);
        let mut writes: Vec<(u64, u32, Vec<u8>)> = Vec::new();
        for i in 0..n {
            let op = rng.pick(&shape.kinds);
            let mut wqe =
                SendWqe { wr_id: i << 8 | from as u64, op, imm: rng.bits() as u32, ..SendWqe::default() };
            wqe.flags.set(SendFlags::SIGNALED, rng.chance(0.6));
            wqe.flags.set(SendFlags::FENCE, rng.chance(0.1));
            wqe.flags.set(SendFlags::SOLICITED, rng.chance(0.2));
            let data = match op {
                SendOp::Read => self.plan_read(net, rng, from, &mut wqe, &writes),
                SendOp::CmpSwap | SendOp::FetchAdd => {
                    (wqe.remote_addr, wqe.rkey) = (word, word_key);
                    wqe.compare_add = if rng.chance(0.7) { value } else { rng.bits() };
                    wqe.swap = rng.bits();
                    let before = value;
                    value = match op {
                        SendOp::FetchAdd => value.wrapping_add(wqe.compare_add),
                        _ if value == wqe.compare_add => wqe.swap,
                        _ => value,
                    };
                    before.to_ne_bytes().to_vec()
                }
                SendOp::AtomicWrite => {
                    (wqe.remote_addr, wqe.rkey) = (word, word_key);
                    value = rng.bits();
                    value.to_ne_bytes().to_vec()
                }
                SendOp::Flush => {
                    (wqe.remote_addr, wqe.rkey, wqe.compare_add) = (word, word_key, rng.below(9));
                    let level = rng.pick(&[FlushLevel::Range, FlushLevel::Mr]);
                    wqe.imm = Feth::word(Placement::GLOBAL, level);
                    vec![]
                }
                _ => {
                    let len = any_size(rng, self.mtu);
                    any_bytes(rng, len)
                }
            };
            let len = data.len() as u32;
            if matches!(op, SendOp::Write | SendOp::WriteImm) {
                let (addr, rkey) = net.hosts[1 - from].region(u64::from(len.max(1)), all_rights());
                (wqe.remote_addr, wqe.rkey) = (addr, rkey);
                writes.push((addr, rkey, data.clone()));
            }
            let host = &mut net.hosts[from];
            let sges = scattered(host, rng, len, 4, Access::LOCAL_WRITE);
            let mut inline = None;
            if !op.brings_data() {
                put(host, &sges, &data);
                if len <= 256 && rng.chance(0.3) {
                    let addr = host.env.memory.alloc(u64::from(len));
                    host.env.memory.write(addr, &data);
                    inline = Some(Seg { addr, len });
                }
            }
            if op.takes_recv() && !self.ends[1 - from].shared {
                self.plan_recv(net, rng, 1 - from, op, len);
            }
            self.ends[from].plan.push(Op { wqe, sges, inline, data });
        }
        self.words[from] = (word, value);
    }

    /// A READ of memory that nobody writes, or of what an earlier WRITE of this direction wrote.
    fn plan_read(
        &mut self,
        net: &mut Net,
        rng: &mut Rng,
        from: usize,
        wqe: &mut SendWqe,
        writes: &[(u64, u32, Vec<u8>)],
    ) -> Vec<u8> {
        if !writes.is_empty() && rng.chance(0.5) {
            let (addr, rkey, data) = &writes[rng.below(writes.len() as u64) as usize];
            let start = rng.below(data.len() as u64 + 1) as usize;
            let end = rng.within(start as u64, data.len() as u64) as usize;
            (wqe.remote_addr, wqe.rkey) = (addr + start as u64, *rkey);
            return data[start..end].to_vec();
        }
        let len = any_size(rng, self.mtu);
        let data = any_bytes(rng, len);
        let (addr, rkey) = net.hosts[1 - from].region(u64::from(len.max(1)), Access::REMOTE_READ);
        net.hosts[1 - from].env.memory.write(addr, &data);
        (wqe.remote_addr, wqe.rkey) = (addr, rkey);
        data
    }

    /// Room that each receive of an SRQ at `at` must have, and how many this connection takes.
    #[allow(dead_code)]
    pub(crate) fn recv_needs(&self, at: usize) -> (u32, usize) {
        let takers = || self.ends[1 - at].plan.iter().filter(|op| op.wqe.op.takes_recv());
        (takers().map(|op| op.data.len() as u32).max().unwrap_or(0), takers().count())
    }

    fn plan_recv(&mut self, net: &mut Net, rng: &mut Rng, at: usize, op: SendOp, len: u32) {
        let room = match op {
            SendOp::WriteImm => rng.below(3) as u32,
            _ if rng.chance(0.5) => len,
            _ => len + rng.below(100) as u32,
        };
        let sges = scattered(&mut net.hosts[at], rng, room, 4, Access::LOCAL_WRITE);
        self.ends[at].recvs.push(sges);
    }

    /// Posts and rings as chance has it; all that can be done with `eager`. Whether anything was done.
    #[allow(dead_code)]
    pub(crate) fn act(&mut self, net: &mut Net, rng: &mut Rng, eager: bool) -> bool {
        self.post(rng, eager, &mut |host, qpn, rng| {
            /* Where the card will take it by itself, the program may leave it at that. */
            let backlog = net.hosts[host].nic.backlog(qpn);
            if backlog == Backlog::AckClocked && rng.chance(0.5) {
                return;
            }
            match backlog != Backlog::Due && rng.chance(0.5) {
                true => net.doorbell_later(host, qpn),
                false => net.doorbell(host, qpn),
            }
        })
    }

    /// As `act`, with another doorbell: it gets host and QPN.
    pub(crate) fn post(
        &mut self,
        rng: &mut Rng,
        eager: bool,
        ring: &mut dyn FnMut(usize, Qpn, &mut Rng),
    ) -> bool {
        let mut acted = false;
        for end in &mut self.ends {
            while !end.shared
                && end.recvs_posted < end.recvs.len()
                && !end.rq.is_full()
                && (eager || rng.chance(0.3))
            {
                let sges = end.recvs[end.recvs_posted].clone();
                end.rq.post(Recv { wr_id: end.recvs_posted as u64, sges }).expect("there is room");
                end.recvs_posted += 1;
                acted = true;
            }
            while end.posted < end.plan.len() && !end.sq.is_full() && (eager || rng.chance(0.5)) {
                let op = &end.plan[end.posted];
                end.sq
                    .post(Send { wqe: op.wqe, sges: op.sges.clone(), inline: op.inline })
                    .expect("there is room");
                end.posted += 1;
                acted = true;
            }
            if end.rung < end.posted && (eager || rng.chance(0.6)) {
                end.rung = end.posted;
                ring(end.host, end.qpn, rng);
                acted = true;
            }
        }
        acted
    }

    /// A completion of one of the ends, if it is one. `wr` gives an SRQ's buffers by wr_id.
    pub(crate) fn complete(
        &mut self,
        net: &Net,
        host: usize,
        cqe: &Cqe,
        solicited: bool,
        wr: &[Vec<Sge>],
    ) -> bool {
        if self.ends[host].qpn != cqe.qpn {
            return false;
        }
        assert_eq!(cqe.status, WcStatus::Success, "{cqe:?}");
        match cqe.opcode {
            WcOpcode::Recv | WcOpcode::RecvRdmaWithImm => self.received(net, host, cqe, solicited, wr),
            _ => self.sent(net, host, cqe),
        }
        true
    }

    fn sent(&mut self, net: &Net, at: usize, cqe: &Cqe) {
        let end = &mut self.ends[at];
        while !end.plan[end.completed].signaled() {
            end.completed += 1;
        }
        let op = &end.plan[end.completed];
        assert!(end.completed < end.posted, "a completion before its post");
        assert_eq!(
            (cqe.wr_id, cqe.opcode),
            (op.wqe.wr_id, op.wqe.op.wc_opcode()),
            "completions come in order"
        );
        if op.wqe.op.brings_data() {
            assert_eq!(cqe.byte_len as usize, op.data.len());
        }
        end.completed += 1;
        let upto = end.completed;
        self.check_effects(net, at, upto);
    }

    /// Everything before operation `upto` of the direction from `at` has happened.
    fn check_effects(&self, net: &Net, at: usize, upto: usize) {
        for op in &self.ends[at].plan[upto.saturating_sub(8)..upto] {
            let len = op.data.len();
            match op.wqe.op {
                SendOp::Write | SendOp::WriteImm => {
                    let there = net.hosts[1 - at].env.memory.read(op.wqe.remote_addr, len);
                    assert!(there == op.data, "WRITE {:#x} is not there", op.wqe.wr_id);
                }
                SendOp::Send | SendOp::SendImm => {}
                _ => assert!(
                    get(&net.hosts[at], &op.sges, len) == op.data,
                    "{:?} {:#x} brought wrong bytes",
                    op.wqe.op,
                    op.wqe.wr_id
                ),
            }
        }
    }

    /// READs and atomics among the last operations before `upto` brought their results.
    fn check_answers(&self, net: &Net, at: usize, upto: usize) {
        for op in self.ends[at].plan[upto.saturating_sub(8)..upto].iter().filter(|op| op.wqe.op.brings_data())
        {
            let there = get(&net.hosts[at], &op.sges, op.data.len());
            assert!(there == op.data, "{:?} {:#x} was not done at a fence", op.wqe.op, op.wqe.wr_id);
        }
    }

    fn received(&mut self, net: &Net, at: usize, cqe: &Cqe, solicited: bool, wr: &[Vec<Sge>]) {
        let peer = &self.ends[1 - at].plan;
        let takers = || peer.iter().enumerate().filter(|(_, op)| op.wqe.op.takes_recv());
        let (index, op) = takers().nth(self.ends[at].received).expect("no more messages than were sent");
        let wr_id = cqe.wr_id as usize;
        if !self.ends[at].shared {
            assert_eq!(wr_id, self.ends[at].received, "receives complete in order");
        }
        let sges = if self.ends[at].shared { &wr[wr_id] } else { &self.ends[at].recvs[wr_id] };
        let what = if op.wqe.op == SendOp::WriteImm { WcOpcode::RecvRdmaWithImm } else { WcOpcode::Recv };
        assert_eq!((cqe.opcode, cqe.byte_len as usize), (what, op.data.len()));
        assert_eq!(cqe.flags.contains(WcFlags::WITH_IMM), op.wqe.op.has_imm());
        assert!(!op.wqe.op.has_imm() || cqe.imm == op.wqe.imm);
        assert_eq!(solicited, op.wqe.flags.contains(SendFlags::SOLICITED));
        if what == WcOpcode::Recv {
            assert!(
                get(&net.hosts[at], sges, op.data.len()) == op.data,
                "SEND {:#x}: wrong bytes",
                op.wqe.wr_id
            );
        }
        self.ends[at].received += 1;
        if op.wqe.flags.contains(SendFlags::FENCE) {
            /* A fenced operation begins after the answers to all READs and atomics before it. */
            self.check_answers(net, 1 - at, index);
        }
        /* What was written before it is there; READs of the sender may still be under way. */
        for op in peer[..=index].iter().rev().take(8) {
            if matches!(op.wqe.op, SendOp::Write | SendOp::WriteImm) {
                let there = net.hosts[at].env.memory.read(op.wqe.remote_addr, op.data.len());
                assert!(there == op.data, "WRITE {:#x} came after a later SEND", op.wqe.wr_id);
            }
        }
    }

    /// Nothing happens any more: everything must have.
    pub(crate) fn finish(&self, net: &Net) {
        for (at, end) in self.ends.iter().enumerate() {
            let host = &net.hosts[end.host];
            assert_eq!(host.state(end.qpn), QpState::Rts);
            assert_eq!(end.posted, end.plan.len(), "all is posted");
            let left = end.plan[end.completed..].iter().filter(|op| op.signaled()).count();
            assert_eq!(left, 0, "all signaled operations completed");
            let wanted = self.ends[1 - at].plan.iter().filter(|op| op.wqe.op.takes_recv()).count();
            assert_eq!(end.received, wanted, "all messages arrived");
            assert_eq!(end.sq.outstanding(), 0, "all slots are free again");
            for upto in (0..=end.plan.len()).step_by(8).chain([end.plan.len()]) {
                self.check_effects(net, at, upto);
            }
            let (word, value) = self.words[at];
            assert_eq!(net.hosts[1 - at].env.memory.word(word), value, "atomics happened once each");
        }
    }
}
