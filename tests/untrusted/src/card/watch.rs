//! What the oracle looks at: memory, completions, and at the end whether everything still works.

use starverbs_core::wire::PacketKind;
use starverbs_core::{Cqe, QpState, SendOp, SendWqe, Sge, WcOpcode, WcStatus};
use starverbs_sim::{Recv, Send};

use super::Mode;
use super::world::{LANES, Lane, World};

/// What untouched memory holds in the simulator.
const UNTOUCHED: u8 = 0xa5;
/// Frames that may come of each post and of each injected frame, all repetitions included.
const FRAMES_EACH: u64 = 400;

/// A send that was posted.
pub(crate) struct Sent {
    pub(crate) wr_id: u64,
    pub(crate) op: SendOp,
    /// Packets up to its end, since the first PSN
    pub(crate) end: u32,
    pub(crate) packets: u32,
}

/// What was answered to a QP's requests, as far as it came from the input.
#[derive(Default)]
pub(crate) struct Acknowledged {
    /// So many packets
    pub(crate) upto: u32,
    /// Those with answers of their own
    answers: std::collections::BTreeSet<u32>,
}

impl Acknowledged {
    /// An answer at packet `at`.
    pub(crate) fn note(&mut self, at: u32, kind: PacketKind) {
        self.upto = self.upto.max(at + 1);
        if matches!(kind, PacketKind::ReadResponse | PacketKind::AtomicAck) {
            self.answers.insert(at);
        }
    }
}

impl World {
    /// Looks at memory and takes completions.
    pub(crate) fn look(&mut self) {
        let memory = &self.net.hosts[1].env.memory;
        assert!(memory.gaps_intact(), "nothing was written beside registered memory");
        for (addr, len) in &self.guarded {
            let bytes = memory.read(*addr, *len as usize);
            assert!(bytes.iter().all(|byte| *byte == UNTOUCHED), "memory was written that no peer may write");
        }
        for lane in 0..LANES {
            while let Some((cqe, _)) = self.lanes[lane].cq.poll() {
                self.completed(lane, &cqe);
            }
            while let Some((cqe, _)) = self.lanes[lane].peer_cq.poll() {
                self.lanes[lane].honest_done += u64::from(is_send(&cqe) && cqe.status == WcStatus::Success);
            }
        }
        for cq in self.shared_cqs.clone() {
            while let Some((cqe, _)) = cq.poll() {
                self.received(&cqe);
            }
        }
        let posts = self.posts + self.injected + 50;
        assert!(self.net.tally.sent <= posts * FRAMES_EACH, "{} frames for {posts}", self.net.tally.sent);
    }

    fn completed(&mut self, lane: usize, cqe: &Cqe) {
        let at = &mut self.lanes[lane];
        let Some(sent) = at.sent.front().filter(|sent| sent.wr_id == cqe.wr_id) else {
            return self.received(cqe);
        };
        assert_eq!(cqe.qpn, at.qpn);
        if cqe.status == WcStatus::Success && at.qp_type.is_reliable() && self.mode == Mode::Silent {
            let local = matches!(sent.op, SendOp::BindMw | SendOp::LocalInv);
            assert!(sent.end <= at.acked.upto, "{:?} succeeded, and nobody acknowledged it", sent.op);
            let answered = at.acked.answers.contains(&sent.end.wrapping_sub(1));
            assert!(
                local || !sent.op.is_answered() || answered,
                "{:?} succeeded without its answer",
                sent.op
            );
        }
        if self.mode == Mode::Unconnected {
            assert_eq!(cqe.status, WcStatus::Success, "an unconnected peer made {:?} fail", sent.op);
        }
        at.sent.pop_front();
    }

    /// Each receive completes once, and with no more than its room.
    fn received(&mut self, cqe: &Cqe) {
        let begun = cqe.opcode == WcOpcode::TmRecv && cqe.status == WcStatus::Success;
        let unfinished = begun && !cqe.flags.contains(starverbs_core::WcFlags::TM_DATA_VALID);
        let room = match unfinished {
            true => self.recvs.get(&cqe.wr_id).copied(),
            false => self.recvs.remove(&cqe.wr_id),
        };
        let room = room.unwrap_or_else(|| panic!("a completion of nothing that is posted: {cqe:?}"));
        let write = cqe.opcode == WcOpcode::RecvRdmaWithImm;
        if cqe.status == WcStatus::Success && !write {
            assert!(u64::from(cqe.byte_len) <= room, "more bytes than room: {cqe:?}");
        }
        if self.mode == Mode::Unconnected {
            assert_eq!(cqe.status, WcStatus::Success, "an unconnected peer made a receive fail");
        }
    }

    /// Nothing happens any more: what must be true now.
    pub(crate) fn end(&mut self) {
        if self.mode == Mode::Unconnected {
            for Lane { qpn, sent, honest, honest_done, .. } in &self.lanes {
                assert_eq!(
                    self.net.hosts[1].state(*qpn),
                    QpState::Rts,
                    "an unconnected peer broke a connection"
                );
                assert!(sent.is_empty(), "an unconnected peer held up {} sends", sent.len());
                assert_eq!(honest, honest_done, "an unconnected peer made the peer's sends fail");
            }
        } else {
            self.bounded();
        }
        self.works();
    }

    /// The state is one that a peer can bring about, and what failed is flushed.
    fn bounded(&self) {
        for (number, Lane { qpn, sent, sq, disturbed, .. }) in self.lanes.iter().enumerate() {
            let state = self.net.hosts[1].state(*qpn);
            if state == QpState::Err {
                assert!(sent.is_empty() && sq.outstanding() == 0, "lane {number}: all is flushed in ERR");
            }
            assert!(*disturbed || matches!(state, QpState::Rts | QpState::Err | QpState::Sqd | QpState::Sqe));
        }
    }

    /// A pair of fresh queue pairs: a SEND, a WRITE and a READ each way.
    fn works(&mut self) {
        self.net.faults.loss = 0.0;
        self.net.hosts[1].env.gone = 0..0;
        let pair = self.fresh_pair();
        for at in [0, 1] {
            let (from, to) = (self.page[at], self.page[1 - at]);
            let sge = |(addr, lkey): (u64, u32)| vec![Sge { addr, len: 600, lkey }];
            let (qpn, sq, ..) = &pair[at];
            pair[1 - at].2.post(Recv { wr_id: 9, sges: sge(to) }).expect("there is room");
            for (wr_id, op) in [(1, SendOp::Send), (2, SendOp::Write), (3, SendOp::Read)] {
                let wqe = SendWqe { wr_id, op, remote_addr: to.0, rkey: to.1, ..SendWqe::default() };
                sq.post(Send { wqe, sges: sge(from), inline: None }).expect("there is room");
            }
            self.net.doorbell(at, *qpn);
        }
        assert!(self.net.run_until_idle(100_000), "fresh queue pairs come to rest");
        for (_, _, _, cq) in &pair {
            let done: Vec<Cqe> = std::iter::from_fn(|| cq.poll()).map(|(cqe, _)| cqe).collect();
            assert_eq!(done.len(), 4, "fresh queue pairs finish");
            assert!(done.iter().all(|cqe| cqe.status == WcStatus::Success), "fresh queue pairs work");
        }
    }
}

fn is_send(cqe: &Cqe) -> bool {
    (cqe.opcode as u8) < 128
}
