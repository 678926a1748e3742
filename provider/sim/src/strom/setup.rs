//! Two hosts with the core's cards and a connection that speaks StRoM's dialect, made on a quiet wire.

use starverbs_core::qp::RecvSource;
use starverbs_core::strom::{RECORD_LEN, ReplyHead, ReplyMemory, ReplyTarget, SLOT_BYTES};
use starverbs_core::{Access, Nanos, NicConfig, QpType, Qpn, Seg, SendOp, SendWqe, Sge};
use zerocopy::IntoBytes;

use crate::host::SimHost;
use crate::watch::EventLog;
use crate::{Faults, Net, QpAt, Send, Setup, SimCq, SimRq, SimSq};

/// Slots of a send queue, more than programs have under way.
pub(super) const SLOTS: u32 = 1024;
/// Answers that a card keeps until they are acknowledged.
const ANSWERS: u8 = 16;
/// READs that a queue pair has under way (P 4.1: as many as the multi-queue has elements).
const READS: u8 = 128;
/// Commands whose own bytes are kept.
const COMMANDS: u64 = 64;
/// Bytes that a command may bring itself.
pub(super) const INLINE: u64 = 64;

/// An end of the connection.
pub(super) struct KernelPeer {
    pub(super) host: SimHost,
    pub(super) qpn: Qpn,
    pub(super) sq: SimSq,
    pub(super) cq: SimCq,
    /// What lies in the card itself: no bus is between
    pub(super) on_card: [Seg; 2],
    /// Commands with bytes of their own so far
    commands: u64,
}

impl KernelPeer {
    /// Whether bytes lie in the card.
    pub(super) fn is_on_card(&self, seg: &Seg) -> bool {
        let within = |own: &Seg| seg.addr >= own.addr && seg.addr < own.addr + u64::from(own.len);
        self.on_card.iter().any(within)
    }

    /// A command brings bytes: where the card keeps them.
    pub(super) fn keep(&mut self, bytes: &[u8]) -> Seg {
        assert!(bytes.len() as u64 <= INLINE, "a command has room for {INLINE} bytes");
        let addr = self.on_card[1].addr + self.commands % COMMANDS * INLINE;
        self.commands += 1;
        self.host.env.memory.write(addr, bytes);
        Seg { addr, len: bytes.len() as u32 }
    }
}

/// The ends, and the core's time when that of a run begins.
pub(super) fn connect() -> ([KernelPeer; 2], Nanos) {
    let cfg = NicConfig { max_rd_atomic: READS, ..NicConfig::default() };
    let mut net = Net::new(2, cfg, Faults::default(), 1);
    let ends = [0, 1].map(|at| {
        let host = &mut net.hosts[at];
        let (sq, cq) = (SimSq::new(SLOTS), SimCq::new(4 * SLOTS as usize));
        let qpn = host.qp(QpType::Rc, &sq, RecvSource::Own(SimRq::new(1, 1)), [&cq, &cq], true);
        let length = u32::from(ANSWERS) * SLOT_BYTES as u32;
        let (addr, lkey) = host.region(length.into(), Access::LOCAL_WRITE);
        let answers = ReplyMemory { addr, lkey, slots: ANSWERS };
        host.nic.speak_strom(qpn, answers).expect("an RC queue pair in RESET");
        let kept = Seg { addr: host.env.memory.alloc(COMMANDS * INLINE), len: (COMMANDS * INLINE) as u32 };
        (qpn, sq, cq, [Seg { addr, len: length }, kept])
    });
    let [a, b] = [0, 1].map(|host| QpAt { host, qpn: ends[host].0 });
    net.connect(QpType::Rc, a, b, &Setup { rd_atomic: READS, ..Setup::default() });
    agree(&mut net, a.qpn, &ends[0].1, &ends[0].2);
    let mut hosts = std::mem::take(&mut net.hosts).into_iter();
    let ends = ends.map(|(qpn, sq, cq, on_card)| {
        let mut host = hosts.next().expect("two hosts");
        host.env.watch = Some(Box::<EventLog>::default());
        KernelPeer { host, qpn, sq, cq, on_card, commands: 0 }
    });
    (ends, net.now())
}

/// The first RPC asks which dialect the peer speaks: one that no kernel answers.
fn agree(net: &mut Net, qpn: Qpn, sq: &SimSq, cq: &SimCq) {
    let (addr, rkey) = net.hosts[0].region(RECORD_LEN as u64, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    let reply = ReplyTarget { addr, rkey, len: RECORD_LEN as u32, ..ReplyTarget::default() };
    let target = ReplyHead::new(&reply);
    let (addr, lkey) = net.hosts[0].region(target.as_bytes().len() as u64, Access::LOCAL_WRITE);
    net.hosts[0].env.memory.write(addr, target.as_bytes());
    let sge = Sge { addr, len: target.as_bytes().len() as u32, lkey };
    let wqe = SendWqe { op: SendOp::Rpc, ..SendWqe::default() };
    sq.post(Send { wqe, sges: vec![sge], inline: None }).expect("an empty queue");
    net.doorbell(0, qpn);
    assert!(net.run_until_idle(10_000) && cq.poll().is_some(), "the peer speaks the dialect");
}
