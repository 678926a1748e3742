//! Two queue pairs of one context that are connected to each other, without a library.

use std::mem::offset_of;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use starverbs_queues::board::*;
use starverbs_queues::chardev::{IOC_INFO, Info};
use starverbs_queues::format::{CqeWords, ProgramIndex};
use starverbs_queues::{Cqe, SendFlags, SendOp, SendWqe, WcStatus};
use zerocopy::transmute;

use super::raw::{Device, Map, Tested, expect};

/// log2 of the entries of the completion queue.
const CQ_LOG: u32 = 6;
/// Its entries in queue memory; the word of those taken is at 0.
const ENTRIES: usize = 64;
/// The queues of the first queue pair, and bytes for each.
const QPS: usize = 0x1000;
const QP_BYTES: usize = 0x2000;
/// Slots, and where they are among a queue pair's bytes.
const SLOTS_LOG: u8 = 3;
const RECVS: usize = 0x800;
const SENDS: usize = 0x1000;
const SEND_STRIDE: usize = 128;
const RECV_STRIDE: usize = 32;
/// Bytes for messages.
pub(crate) const DATA_BYTES: usize = 0x4000;
/// `enum ibv_access_flags`: local writes, and WRITE, READ and atomics of peers.
pub(crate) const ALL: u32 = 0xf;
/// `enum ibv_qp_type`
const RC: u8 = 2;
/// Emulation is slow.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long a completion takes at most if nothing is wrong, mostly.
const LATE: Duration = Duration::from_secs(1);

/// A queue pair.
#[derive(Clone, Copy)]
pub(crate) struct Qp {
    pub qpn: u32,
    pub cell: u32,
    at: usize,
    sends: u32,
    recvs: u32,
}

/// A context with a domain, a region, a completion queue and two queue pairs.
pub(crate) struct Pair {
    pub device: Device,
    pub pd: u32,
    pub cq: u32,
    pub key: u32,
    pub qps: [Qp; 2],
    pub queues: Map,
    pub page: Map,
    pub data: Map,
    taken: u32,
}

/// Queues of a queue pair or an SRQ that lie at an offset of the file.
pub(crate) fn queues_at(base: u64) -> Queues {
    Queues {
        program: base,
        card: base + 64,
        send: base + SENDS as u64,
        recv: base + RECVS as u64,
        send_stride: SEND_STRIDE as u16,
        send_sge: 4,
        recv_stride: RECV_STRIDE as u16,
        recv_sge: 1,
        send_log: SLOTS_LOG,
        recv_log: SLOTS_LOG,
        ..Queues::default()
    }
}

/// An RC queue pair.
pub(crate) fn create_qp(queues: Queues, pd: u32, cq: u32) -> CreateQp {
    CreateQp {
        queues,
        pd,
        send_cq: cq,
        recv_cq: cq,
        srq: NONE,
        kind: RC,
        flags: QP_SIGNAL_ALL,
        ..CreateQp::default()
    }
}

/// A region of this process's memory, known by its addresses.
pub(crate) fn region(pd: u32, addr: u64, length: u64, access: u32) -> Region {
    Region { pd, access, addr, length, iova: addr, ..Region::default() }
}

impl Pair {
    pub(crate) fn new(path: &Path) -> Tested<Pair> {
        let failed = |what: &str, error: std::io::Error| format!("{what}: {error}");
        let device = Device::open(path).map_err(|e| failed("open", e))?;
        let len = QPS + 2 * QP_BYTES;
        let begin = device.queue_memory(len as u64).map_err(|e| failed("queue memory", e))?;
        let queues = device.map(begin, len).map_err(|e| failed("queue memory is mapped", e))?;
        let page = device.map(0, device.page_bytes()).map_err(|e| failed("the page is mapped", e))?;
        let data = Map::anonymous(DATA_BYTES, false).map_err(|e| failed("memory", e))?;
        let pd = device.make(OP_ALLOC_PD, &Object::default())?.number;
        let key = device.make(OP_REG_MR, &region(pd, data.address(), DATA_BYTES as u64, ALL))?.number;
        let create = CreateCq { entries: begin + ENTRIES as u64, taken: begin, log: CQ_LOG, flags: 0 };
        let cq = device.make(OP_CREATE_CQ, &create)?.number;
        let mut qps = [Qp { qpn: 0, cell: 0, at: 0, sends: 0, recvs: 0 }; 2];
        for (number, qp) in qps.iter_mut().enumerate() {
            qp.at = QPS + number * QP_BYTES;
            let create = create_qp(queues_at(begin + qp.at as u64), pd, cq);
            let made = device.make(OP_CREATE_QP, &create)?;
            (qp.qpn, qp.cell) = (made.number, made.cell);
        }
        let pair = Pair { device, pd, cq, key, qps, queues, page, data, taken: 0 };
        pair.connect(0)?;
        pair.connect(1)?;
        Ok(pair)
    }

    /// Brings a queue pair to RTS, connected to the other one.
    fn connect(&self, which: usize) -> Tested {
        /* enum ibv_qp_attr_mask */
        const INIT: u32 = 1 | 1 << 3 | 1 << 4 | 1 << 5;
        const RTR: u32 = 1 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 15 | 1 << 17 | 1 << 20;
        const RTS: u32 = 1 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 13 | 1 << 16;
        let gid = self.device.answer::<GidReply>(OP_QUERY_GID, &Object::default())?.gid;
        let address = Address { dgid: gid, sgid: gid, hop_limit: 64, ..Address::default() };
        let attr = QpAttr {
            path_mtu: 3,
            dest_qpn: self.qps[1 - which].qpn,
            access: ALL & !1,
            port_num: 1,
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            min_rnr_timer: 1,
            timeout: 18,
            retry_cnt: 7,
            rnr_retry: 7,
            address,
            ..QpAttr::default()
        };
        for (state, mask) in [(1, INIT), (2, RTR), (3, RTS)] {
            let modify = ModifyQp { qpn: self.qps[which].qpn, mask, attr: QpAttr { state, ..attr } };
            self.device.answer::<Object>(OP_MODIFY_QP, &modify)?;
        }
        Ok(())
    }

    /// The state of a queue pair (`enum ibv_qp_state`).
    pub(crate) fn state(&self, which: usize) -> Tested<u8> {
        let ask = Object { number: self.qps[which].qpn, reserved: 0 };
        Ok(self.device.answer::<ModifyQp>(OP_QUERY_QP, &ask)?.attr.state)
    }

    /// Posts a receive of `len` bytes at `addr`.
    pub(crate) fn post_recv(&mut self, which: usize, wr_id: u64, (addr, len, lkey): (u64, u32, u32)) {
        let qp = &mut self.qps[which];
        let at = qp.at + RECVS + (qp.recvs & ((1 << SLOTS_LOG) - 1)) as usize * RECV_STRIDE;
        let words = [wr_id, 1, addr, u64::from(len) | u64::from(lkey) << 32];
        for (number, word) in words.into_iter().enumerate() {
            self.queues.store(at + 8 * number, word);
        }
        qp.recvs = qp.recvs.wrapping_add(1);
        let (at, posted) = (qp.at + offset_of!(ProgramIndex, recv_posted), qp.recvs);
        self.half(at).store(posted, Ordering::Release);
    }

    /// Posts a request of one SGE, and rings.
    pub(crate) fn post_send(&mut self, which: usize, wqe: SendWqe, (addr, len, lkey): (u64, u32, u32)) {
        let qp = &mut self.qps[which];
        let at = qp.at + SENDS + (qp.sends & ((1 << SLOTS_LOG) - 1)) as usize * SEND_STRIDE;
        let wqe = SendWqe { num_sge: 1, length: len, blocks: 2, ..wqe };
        let words: [u64; 8] = transmute!(wqe);
        let sge = [addr, u64::from(len) | u64::from(lkey) << 32];
        for (number, word) in words.into_iter().chain(sge).enumerate() {
            self.queues.store(at + 8 * number, word);
        }
        qp.sends = qp.sends.wrapping_add(1);
        let (at, posted) = (qp.at + offset_of!(ProgramIndex, send_posted), qp.sends);
        let (cell, value) = (qp.cell, u64::from(qp.sends) | u64::from(qp.recvs) << 32);
        self.half(at).store(posted, Ordering::Release);
        self.page.store(cell as usize * 8, value);
    }

    fn half(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at + 4 <= self.queues.len, "a word of queue memory");
        // SAFETY: inside the mapping, aligned.
        unsafe { AtomicU32::from_ptr(self.queues.at.add(at).cast()) }
    }

    /// The next completion.
    pub(crate) fn completion(&mut self) -> Tested<Cqe> {
        let at = ENTRIES + (self.taken & ((1 << CQ_LOG) - 1)) as usize * size_of::<Cqe>();
        let is_odd = self.taken >> CQ_LOG & 1 == 1;
        let begun = Instant::now();
        while (self.queues.load(at + 24) >> 63 == 1) == is_odd {
            if begun.elapsed() > PATIENCE {
                return Err("no completion".to_owned());
            }
            if begun.elapsed() > LATE {
                /* it says so when the board is gone */
                let asked = self.device.ask(IOC_INFO, &mut Info::default());
                asked.map_err(|error| format!("the board: {error}"))?;
            }
            std::thread::yield_now();
        }
        let words: CqeWords = std::array::from_fn(|number| self.queues.load(at + 8 * number));
        self.taken = self.taken.wrapping_add(1);
        self.half(0).store(self.taken, Ordering::Release);
        Ok(Cqe::decode(words))
    }

    /// A piece of the bytes for messages.
    pub(crate) fn piece(&self, at: usize, len: u32) -> (u64, u32, u32) {
        (self.data.address() + at as u64, len, self.key)
    }

    /// What becomes of a request of 8 bytes by the first queue pair.
    pub(crate) fn outcome(&mut self, wqe: SendWqe, piece: (u64, u32, u32)) -> Tested<WcStatus> {
        self.post_send(0, SendWqe { flags: SendFlags::SIGNALED, ..wqe }, piece);
        Ok(self.completion()?.status)
    }

    /// Sends a number from one queue pair to the other, and looks at what arrives.
    pub(crate) fn exchange(&mut self, number: u64) -> Tested {
        self.data.store(0, number);
        let (to, from) = (self.piece(4096, 8), self.piece(0, 8));
        self.post_recv(1, 1, to);
        self.post_send(0, SendWqe { wr_id: 2, op: SendOp::Send, ..SendWqe::default() }, from);
        let mut came = [self.completion()?, self.completion()?].map(|cqe| (cqe.wr_id, cqe.status));
        came.sort_by_key(|(wr_id, _)| *wr_id);
        expect("completions", came, [(1, WcStatus::Success), (2, WcStatus::Success)])?;
        expect("what arrives", self.data.load(4096), number)
    }
}
