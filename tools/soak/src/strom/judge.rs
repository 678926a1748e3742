//! The oracle of the dialect: what kernels saw, in which order, and what came of it.

use starverbs_core::strom::{Code, RECORD_LEN, ReplyRecord, RpcAnswer};
use starverbs_core::{AsyncEvent, Cqe, QpState, Qpn, SendOp, WcFlags, WcOpcode, WcStatus};

use super::journal::Note;
use super::streams::{HLL, Job, SHUFFLE, Streams};
use super::{Answer, Asked, BLANK, Due, JOURNAL, Progress, RpcEnd, Sight, is_watched};
use crate::conn::{Conn, Wr};
use crate::world::{Who, World};

impl World {
    /// Looks at all that kernels wrote down and answered since the last look.
    ///
    /// # Panics
    /// It is not what must have happened.
    pub(crate) fn look_at_rpcs(&mut self) {
        if self.sites.iter().all(|site| site.kernels.is_none()) {
            return;
        }
        for at in 0..self.plan.hosts {
            self.read_kernels(at);
        }
        for c in 0..self.conns.len() {
            for e in 0..2 {
                self.look_for_answers(c, e);
            }
        }
    }

    /// What the journal of a host wrote down.
    pub(crate) fn read_kernels(&mut self, at: usize) {
        let Some(kernels) = &self.sites[at].kernels else { return };
        let notes = std::mem::take(&mut *kernels.notes.lock().expect("no thread panics"));
        for note in notes {
            match note {
                Note::Began { qpn, op, params } => self.began(at, qpn, op, params),
                Note::Ended(qpn, crc) => self.ended(at, qpn, crc),
                Note::Piece { qpn, op, first, last, data } => self.piece(at, qpn, op, (first, last), data),
                Note::Done { qpn, op, code } => self.done_with(at, qpn, op, code),
            }
        }
        let (host, site) = (&self.net.hosts[at], &mut self.sites[at]);
        if let Some(streams) = site.streams() {
            streams.check(host, &mut self.summary);
        }
    }

    /// The connection and the end that asks, where a queue pair of `at` answers.
    fn asker(&self, at: usize, qpn: Qpn) -> (usize, usize) {
        match self.who.get(&(at, qpn)) {
            Some(Who::Conn(c, e)) => (*c, 1 - e),
            who => panic!("host {at}: a kernel works for {who:?}, {qpn:#x}"),
        }
    }

    fn asks(&mut self, c: usize, e: usize) -> &mut RpcEnd {
        self.conns[c].ends[e].rpc.as_mut().unwrap_or_else(|| panic!("conn {c}.{e} has no dialect"))
    }

    /// What the journal never saw, as it was away, is passed over.
    fn pass_over(&mut self, c: usize, e: usize) -> bool {
        let peer = self.conns[c].ends[1 - e].host;
        let first = self.asks(c, e).due.front().map(|due| due.outages);
        let lost = first.is_some_and(|outages| self.sites[peer].was_out(outages));
        if lost {
            self.asks(c, e).due.pop_front();
            self.summary.add("rpcs", "that no kernel saw", 1);
        }
        lost
    }

    fn began(&mut self, at: usize, qpn: Qpn, op: u64, params: Vec<u8>) {
        let (c, e) = self.asker(at, qpn);
        self.say(|| format!("host {at}: kernel {op:#x} begins for conn {c}.{e}"));
        let is_it =
            |due: &Due| due.op == op && matches!(&due.sight, Sight::Call(there, _) if *there == params);
        while self.asks(c, e).due.front().is_some_and(|due| !is_it(due)) && self.pass_over(c, e) {}
        let rpc = self.asks(c, e);
        let due = rpc.due.pop_front().filter(is_it);
        let Some(due) = due else { panic!("conn {c}.{e}: a kernel began what is not the next RPC") };
        let Sight::Call(_, crc) = due.sight else { return };
        rpc.running = Some((due.seq, crc));
        rpc.progress(due.seq, Progress::Began);
        self.summary.add("rpcs", "begun", 1);
        if op != JOURNAL {
            self.streams_at(at).began((c, e), op, Job::Call(params));
        }
    }

    fn streams_at(&mut self, at: usize) -> &mut Streams {
        self.sites[at].streams().expect("its kernels write down what they get")
    }

    /// A kernel of every card is done: its part of the model goes on.
    fn done_with(&mut self, at: usize, qpn: Qpn, op: u64, code: Code) {
        let (c, e) = self.asker(at, qpn);
        let Some(answer) = self.streams_at(at).done((c, e), op, code) else { return };
        let rpc = self.asks(c, e);
        let Some((seq, _)) = rpc.running.take() else { return };
        rpc.progress(seq, Progress::Ended);
        if let (Some(answer), Some(asked)) = (answer, rpc.asked.iter_mut().find(|asked| asked.seq == seq)) {
            asked.want = answer.within(asked.room);
            asked.open = false;
        }
        self.summary.add("rpcs", "ended", 1);
    }

    fn ended(&mut self, at: usize, qpn: Qpn, crc: u64) {
        let (c, e) = self.asker(at, qpn);
        let rpc = self.asks(c, e);
        let Some((seq, want)) = rpc.running.take() else {
            panic!("conn {c}.{e}: a kernel ended what it had not begun")
        };
        assert_eq!(want, Some(crc), "conn {c}.{e}: RPC {seq} read what was not there then");
        rpc.progress(seq, Progress::Ended);
        self.summary.add("rpcs", "ended", 1);
    }

    fn piece(&mut self, at: usize, qpn: Qpn, op: u64, (first, last): (bool, bool), data: Vec<u8>) {
        let (c, e) = self.asker(at, qpn);
        self.say(|| format!("host {at}: kernel {op:#x} gets {} bytes of conn {c}.{e}", data.len()));
        let fits = |due: &Due| match &due.sight {
            Sight::Stream(all, seen) => {
                let from = seen.unwrap_or(0);
                let right = first == seen.is_none() && last == (from + data.len() == all.len());
                right && due.op == op && all.get(from..from + data.len()) == Some(&data[..])
            }
            Sight::Call(..) => false,
        };
        while self.asks(c, e).due.front().is_some_and(|due| !fits(due)) && self.pass_over(c, e) {}
        let rpc = self.asks(c, e);
        let Some(due) = rpc.due.front_mut().filter(|due| fits(due)) else {
            panic!("conn {c}.{e}: a kernel got {} bytes that are not the next: {first}, {last}", data.len())
        };
        if let Sight::Stream(_, seen) = &mut due.sight {
            *seen = Some(seen.unwrap_or(0) + data.len());
        }
        if last {
            rpc.due.pop_front();
        }
        self.summary.add("rpcs", stream_of(op), 1);
        if self.is_star(c) {
            self.summary.add("rpcs", "packets of streams with StaR", 1);
        }
        if op != JOURNAL {
            self.streams_at(at).began((c, e), op, Job::Packet(data));
        }
    }

    /// A request of the dialect is known to be done: kernels have seen it.
    pub(crate) fn assert_seen(&mut self, c: usize, e: usize, wr: &Wr) {
        if !wr.op.is_rpc() {
            return;
        }
        self.read_kernels(self.conns[c].ends[1 - e].host);
        while self.asks(c, e).due.front().is_some_and(|due| due.seq <= wr.seq) {
            let passed = self.pass_over(c, e);
            assert!(passed, "conn {c}.{e}: {wr:?} was acknowledged, and no kernel saw {:?}", self.due(c, e));
        }
    }

    fn due(&self, c: usize, e: usize) -> Option<u64> {
        self.conns[c].ends[e].rpc.as_ref()?.due.front().map(|due| due.seq)
    }

    /// Answers that are in the memory of an end: in order, each whole and right.
    fn look_for_answers(&mut self, c: usize, e: usize) {
        loop {
            let end = &self.conns[c].ends[e];
            let Some(rpc) = &end.rpc else { return };
            let memory = &self.net.hosts[end.host].env.memory;
            let region = |asked: &Asked| memory.read(rpc.addr(asked.place), asked.room as usize);
            let came = |asked: &Asked| ReplyRecord::decode(region(asked)).is_some();
            let Some(first) = rpc.asked.front() else { return };
            if !came(first) {
                let early = rpc.asked.iter().find(|asked| came(asked)).map(|asked| asked.seq);
                assert!(early.is_none(), "conn {c}.{e}: {early:?} answered before {}", first.seq);
                return;
            }
            let region = region(first).to_vec();
            let rpc = self.asks(c, e);
            let asked = rpc.asked.pop_front().expect("it is the first");
            self.judge_answer(c, e, &asked, &region);
        }
    }

    fn judge_answer(&mut self, c: usize, e: usize, asked: &Asked, region: &[u8]) {
        let what = format!("conn {c}.{e}: the answer of RPC {}", asked.seq);
        let RpcAnswer { op, length: len, code } = ReplyRecord::decode(region).expect("it is there");
        let end = region.len() - RECORD_LEN;
        let sent = if code == Code::Ok as u32 { len as usize } else { 0 };
        assert!(sent <= end, "{what} has {len} bytes");
        let (before, data) = region[..end].split_at(end - sent);
        assert_eq!(op, asked.op as u32, "{what}: op-code");
        let peer = self.conns[c].ends[1 - e].host;
        let watched = is_watched(asked.op);
        let lost = watched && self.sites[peer].was_out(asked.outages);
        let want = if lost && code == Code::NoKernel as u32 {
            assert_ne!(asked.progress, Progress::Ended, "{what}: its kernel ended");
            self.summary.add("rpcs", "whose kernel went away", 1);
            Answer::error(Code::NoKernel)
        } else {
            let seen = !watched || asked.progress != Progress::Posted;
            let done = asked.progress == Progress::Ended;
            let well = matches!(asked.want.code, Code::Ok | Code::Overflow);
            let ended = if asked.op == JOURNAL { well } else { watched };
            assert!(seen && done == ended, "{what}: its kernel is at {:?}", asked.progress);
            if asked.open {
                /* others were at the kernel at the same time */
                self.summary.add("answers", "of an unknown order", 1);
                let code = Code::from_number(code as i32).unwrap_or_default();
                Answer { code, len, data: data.to_vec() }
            } else {
                asked.want.clone()
            }
        };
        assert_eq!((code, len), (want.code as u32, want.len), "{what}: code and length");
        assert!(data == want.data, "{what}: wrong data");
        assert!(before.iter().all(|byte| *byte == BLANK), "{what} has more than it says");
        let end = &mut self.conns[c].ends[e];
        let Some(rpc) = &mut end.rpc else { return };
        rpc.give(&mut self.net.hosts[end.host], asked);
        if let Some(waiting) = rpc.immediates.iter_mut().find(|waiting| waiting.seq == asked.seq) {
            waiting.len = Some((sent + RECORD_LEN) as u32);
        }
        self.summary.count("answers", want.code);
        if asked.op == SHUFFLE || asked.op == HLL {
            let kernel = if asked.op == SHUFFLE { "shuffle answers" } else { "HyperLogLog answers" };
            self.summary.count(kernel, want.code);
        }
    }

    /// Whether a receive completed by an answer: by the next one with immediate, which is in memory.
    pub(crate) fn is_answer(&mut self, c: usize, e: usize, cqe: &Cqe, solicited: bool) -> bool {
        let Some(rpc) = &self.conns[c].ends[e].rpc else { return false };
        let next = rpc.immediates.front().map(|waiting| waiting.imm);
        if cqe.opcode != WcOpcode::RecvRdmaWithImm || next != Some(cqe.imm) {
            return false;
        }
        self.read_kernels(self.conns[c].ends[1 - e].host);
        self.look_for_answers(c, e);
        let waiting = self.asks(c, e).immediates.pop_front().expect("it is the first");
        let right = waiting.len == Some(cqe.byte_len) && cqe.flags == WcFlags::WITH_IMM && !solicited;
        assert!(right, "conn {c}.{e}: {cqe:?} of {waiting:?}");
        self.summary.add("answers", "with immediate", 1);
        true
    }

    /// An end whose connection goes on has all its answers.
    pub(crate) fn finish_rpcs(&mut self, c: usize, e: usize) {
        if self.conns[c].ends[e].rpc.is_none() {
            return;
        }
        while self.pass_over(c, e) {}
        let rpc = self.asks(c, e);
        assert!(rpc.due.is_empty(), "conn {c}.{e}: no kernel saw {:?}", rpc.due.front());
        assert!(rpc.asked.is_empty(), "conn {c}.{e}: no answer to {:?}", rpc.asked.front());
        let waiting = rpc.immediates.front();
        assert!(waiting.is_none(), "conn {c}.{e}: no receive completed with {waiting:?}");
    }

    /// Whether a request without a fault of its own may end so because its connection is of the dialect.
    pub(crate) fn rpc_may_fail(&self, c: usize, e: usize, wr: &Wr, status: WcStatus) -> bool {
        let conn = &self.conns[c];
        match status {
            _ if conn.plan.strom.is_none() => false,
            /* the peer was asked for its dialect, and the wire brought no answer */
            WcStatus::LocQpOpErr => wr.op.is_rpc() && self.may_be_silent(c, e),
            /* a kernel is at work, or all answers have their places */
            WcStatus::RnrRetryExcErr => conn.plan.setup.rnr_retry < 7,
            WcStatus::RemOpErr => wr.op == SendOp::RpcWrite && self.lost_kernel(c, e),
            _ => false,
        }
    }

    /// Whether 255 ms may pass without a word between the ends.
    fn may_be_silent(&self, c: usize, e: usize) -> bool {
        let conn = &self.conns[c];
        let peer_is_up = !conn.ends[1 - e].down() && self.state(c, 1 - e) != QpState::Err;
        self.is_lossy(c) || self.stalls.had_trouble(conn.plan.hosts) || !peer_is_up
    }

    /// Whether a queue pair of the dialect was gone at a host: what comes for it is read as others' op-codes.
    pub(crate) fn lost_dialect(&self, at: usize) -> bool {
        let here = |conn: &Conn| conn.plan.strom.is_some() && conn.plan.hosts.contains(&at);
        self.conns.iter().any(|conn| here(conn) && (conn.incarnation > 0 || conn.over))
    }

    /// Whether the peer's journal was away at some time.
    fn lost_kernel(&self, c: usize, e: usize) -> bool {
        self.sites[self.conns[c].ends[1 - e].host].was_out(0)
    }

    /// Whether an answer of an end's card may have failed, and the end with it.
    fn may_answer_fail(&self, c: usize, e: usize) -> bool {
        let conn = &self.conns[c];
        let (me, peer) = (&conn.ends[e], &conn.ends[1 - e]);
        let answers = me.rpc.as_ref().is_some_and(|rpc| rpc.own.is_some());
        let denied = peer.rpc.as_ref().is_some_and(|rpc| rpc.bad_target);
        let peer_is_up = !peer.down() && matches!(self.state(c, 1 - e), QpState::Rts | QpState::Sqd);
        /* a stateful end sees what its peer did wrong before that hears of it */
        let foreseen = peer.doomed.is_some() && self.is_stateless(c, 1 - e);
        let impatient = !conn.patient() || conn.plan.setup.rnr_retry < 7;
        answers && (denied || foreseen || !peer_is_up || impatient)
    }

    /// Whether an event of an end is one that the dialect explains.
    pub(crate) fn rpc_may_raise(&self, c: usize, e: usize, event: AsyncEvent) -> bool {
        let conn = &self.conns[c];
        let Some(strom) = &conn.plan.strom else { return false };
        let me = conn.ends[e].rpc.as_ref();
        match event {
            AsyncEvent::QpReqErr(_) => self.lost_kernel(c, 1 - e),
            AsyncEvent::QpAccessErr(_) => me.is_some_and(|rpc| rpc.bad_target),
            AsyncEvent::QpFatal(_) => self.may_answer_fail(c, e),
            AsyncEvent::PeerLacksDialect(_) => {
                strom.speaks[e] && (!strom.speaks[1 - e] || self.may_be_silent(c, e))
            }
            _ => false,
        }
    }
}

/// What packets of a stream to a kernel are counted as.
fn stream_of(op: u64) -> &'static str {
    match op {
        SHUFFLE => "packets for shuffle",
        HLL => "packets for HyperLogLog",
        _ => "packets of streams",
    }
}

impl RpcEnd {
    fn progress(&mut self, seq: u64, progress: Progress) {
        if let Some(asked) = self.asked.iter_mut().find(|asked| asked.seq == seq) {
            asked.progress = progress;
        }
    }
}
