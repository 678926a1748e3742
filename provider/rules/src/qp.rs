//! Queue pairs of the driver: making and connecting them, posting to them.

use std::mem::offset_of;
use std::sync::atomic::Ordering;

use starverbs_queues::board::*;
use starverbs_queues::format::{CardIndex, ProgramIndex};
use starverbs_queues::{SendFlags, SendOp, SendWqe, Sge, WcStatus};
use zerocopy::{IntoBytes, transmute};

use crate::fault::{Tested, expect};
use crate::raw::{ALL, BASE, Basics, DATA, QP_BYTES, QPS, RawDriver};

/// log2 of the slots of a queue.
pub const SLOTS_LOG: u8 = 6;
/// Slots of a queue.
pub const SLOTS: u32 = 1 << SLOTS_LOG;
/// Bytes of a send slot.
pub const SEND_STRIDE: usize = 128;
/// Bytes of a receive slot.
pub const RECV_STRIDE: usize = 32;
/// Where the receive slots lie among a QP's queues.
pub const RECVS: usize = 0x1000;
/// Where the send slots lie.
pub const SENDS: usize = 0x2000;
/// `enum ibv_qp_type`
pub const RC: u8 = 2;
/// See [`RC`].
pub const UC: u8 = 3;
/// See [`RC`].
pub const UD: u8 = 4;
/// See [`RC`].
pub const XRC_SEND: u8 = 9;
/// See [`RC`].
pub const XRC_RECV: u8 = 10;
/// The Q_Key of datagram QPs.
pub const QKEY: u32 = 0x1234;
/// `enum ibv_qp_state`
pub mod state {
    /// The state RESET, IBV_QPS_RESET
    pub const RESET: u8 = 0;
    /// The state INIT, IBV_QPS_INIT
    pub const INIT: u8 = 1;
    /// The state RTR, IBV_QPS_RTR
    pub const RTR: u8 = 2;
    /// The state RTS, IBV_QPS_RTS
    pub const RTS: u8 = 3;
    /// The state ERR, IBV_QPS_ERR
    pub const ERR: u8 = 6;
}
/// `enum ibv_qp_attr_mask`
mod mask {
    pub(super) const STATE: u32 = 1;
    pub(super) const ACCESS: u32 = 1 << 3;
    pub(super) const PKEY_INDEX: u32 = 1 << 4;
    pub(super) const PORT: u32 = 1 << 5;
    pub(super) const Q_KEY: u32 = 1 << 6;
    pub(super) const AV: u32 = 1 << 7;
    pub(super) const PATH_MTU: u32 = 1 << 8;
    pub(super) const TIMEOUT: u32 = 1 << 9;
    pub(super) const RETRY_CNT: u32 = 1 << 10;
    pub(super) const RNR_RETRY: u32 = 1 << 11;
    pub(super) const RQ_PSN: u32 = 1 << 12;
    pub(super) const MAX_RD_ATOMIC: u32 = 1 << 13;
    pub(super) const MIN_RNR_TIMER: u32 = 1 << 15;
    pub(super) const SQ_PSN: u32 = 1 << 16;
    pub(super) const MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
    pub(super) const DEST_QPN: u32 = 1 << 20;
}

/// A QP.
#[derive(Clone, Copy, Debug)]
pub struct RawQp {
    /// Its number
    pub qpn: u32,
    /// Its doorbell cell
    pub cell: u32,
    /// Where its queues lie
    pub at: usize,
    /// Send WQEs posted
    pub sends: u32,
    /// Receive WQEs posted
    pub recvs: u32,
}

/// What [`RawDriver::two_qps`] makes.
#[derive(Clone, Copy, Debug)]
pub struct TwoQps {
    /// Key of the region of all of the memory
    pub key: u32,
    /// One QP
    pub a: RawQp,
    /// The other, its peer
    pub b: RawQp,
}

/// A work request of one SGE, which is not posted yet.
pub fn request(op: SendOp, wr_id: u64) -> SendWqe {
    SendWqe { wr_id, op, flags: SendFlags::SIGNALED, ..SendWqe::default() }
}

/// The address of byte `at` of the bytes for messages.
pub fn address(at: usize) -> u64 {
    BASE + (DATA + at) as u64
}

/// A piece of the bytes for messages.
pub fn data(at: usize, len: u32, lkey: u32) -> Sge {
    Sge { addr: address(at), len, lkey }
}

fn sge_words(sge: Sge) -> [u64; 2] {
    [sge.addr, u64::from(sge.len) | u64::from(sge.lkey) << 32]
}

impl RawDriver {
    /// An RC QP whose queues lie at `at`.
    pub fn create_qp(pd: u32, cq: u32, at: usize) -> CreateQp {
        let base = BASE + at as u64;
        let queues = Queues {
            program: base,
            card: base + 64,
            recv: base + RECVS as u64,
            send: base + SENDS as u64,
            send_stride: SEND_STRIDE as u16,
            send_sge: 4,
            recv_stride: RECV_STRIDE as u16,
            recv_sge: 1,
            send_log: SLOTS_LOG,
            recv_log: SLOTS_LOG,
            ..Queues::default()
        };
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

    /// QP number `n` of this driver, of type RC.
    ///
    /// # Errors
    /// It is refused.
    pub fn qp(&mut self, pd: u32, cq: u32, n: usize) -> Tested<RawQp> {
        self.qp_of(n, &RawDriver::create_qp(pd, cq, self.at(QPS + n * QP_BYTES)))
    }

    /// The QP that `create` says, as number `n` of this driver.
    ///
    /// # Errors
    /// It is refused.
    pub fn qp_of(&mut self, n: usize, create: &CreateQp) -> Tested<RawQp> {
        let at = self.at(QPS + n * QP_BYTES);
        self.put(at, &[0; 128]);
        let NumberReply { number: qpn, cell } = self.number(OP_CREATE_QP, create.as_bytes())?;
        Ok(RawQp { qpn, cell, at, sends: 0, recvs: 0 })
    }

    /// The first GID of the board's port.
    ///
    /// # Errors
    /// It has none.
    pub fn gid(&mut self) -> Tested<[u8; 16]> {
        Ok(self.ask::<GidReply>(OP_QUERY_GID, Object::default().as_bytes())?.gid)
    }

    /// Brings a QP to a state.
    ///
    /// # Errors
    /// It is refused.
    pub fn to_state(&mut self, qp: RawQp, state: u8) -> Tested {
        let attr = QpAttr { state, ..QpAttr::default() };
        self.modify(ModifyQp { qpn: qp.qpn, mask: mask::STATE, attr })
    }

    fn modify(&mut self, modify: ModifyQp) -> Tested {
        self.ask::<Object>(OP_MODIFY_QP, modify.as_bytes()).map(drop)
    }

    /// The state of a QP.
    ///
    /// # Errors
    /// The board does not say.
    pub fn state(&mut self, qp: RawQp) -> Tested<u8> {
        let ask = Object { number: qp.qpn, reserved: 0 };
        Ok(self.ask::<ModifyQp>(OP_QUERY_QP, ask.as_bytes())?.attr.state)
    }

    /// Brings an RC QP from RESET to RTS, connected to a QP of this board.
    ///
    /// # Errors
    /// A step is refused.
    pub fn connect_qp(&mut self, qp: RawQp, peer: u32) -> Tested {
        self.connect_as(qp, peer, RC)
    }

    /// The same for each type.
    ///
    /// # Errors
    /// A step is refused.
    pub fn connect_as(&mut self, qp: RawQp, peer: u32, kind: u8) -> Tested {
        let gid = self.gid()?;
        for step in RawDriver::steps_to_rts(gid, peer, kind) {
            self.modify(ModifyQp { qpn: qp.qpn, ..step })?;
        }
        Ok(())
    }

    /// The changes, but for its QPN, that bring a QP from RESET to RTS, connected to another one of the same
    /// port.
    pub fn steps_to_rts(gid: [u8; 16], peer: u32, kind: u8) -> [ModifyQp; 3] {
        use mask::*;
        let address = Address { dgid: gid, sgid: gid, hop_limit: 64, ..Address::default() };
        let attr = QpAttr {
            path_mtu: 3,
            dest_qpn: peer,
            access: ALL & !1,
            port_num: 1,
            qkey: QKEY,
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            min_rnr_timer: 1,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            address,
            ..QpAttr::default()
        };
        let path = AV | PATH_MTU | DEST_QPN | RQ_PSN;
        let masks = match kind {
            UD => [PKEY_INDEX | PORT | Q_KEY, 0, SQ_PSN],
            UC => [PKEY_INDEX | PORT | ACCESS, path, SQ_PSN],
            XRC_SEND => {
                [PKEY_INDEX | PORT | ACCESS, path, TIMEOUT | RETRY_CNT | RNR_RETRY | SQ_PSN | MAX_RD_ATOMIC]
            }
            XRC_RECV => {
                [PKEY_INDEX | PORT | ACCESS, path | MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER, TIMEOUT | SQ_PSN]
            }
            _ => [
                PKEY_INDEX | PORT | ACCESS,
                path | MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER,
                TIMEOUT | RETRY_CNT | RNR_RETRY | SQ_PSN | MAX_RD_ATOMIC,
            ],
        };
        let step = |(state, mask)| ModifyQp { qpn: 0, mask: STATE | mask, attr: QpAttr { state, ..attr } };
        let [init, rtr, rts] = masks;
        [(state::INIT, init), (state::RTR, rtr), (state::RTS, rts)].map(step)
    }

    /// Posts a receive of one SGE, without a doorbell.
    pub fn post_recv(&self, qp: &mut RawQp, wr_id: u64, sge: Sge) {
        let at = qp.at + RECVS + (qp.recvs % SLOTS) as usize * RECV_STRIDE;
        let [addr, rest] = sge_words(sge);
        self.put(at, [wr_id, 1, addr, rest].as_bytes());
        qp.recvs = qp.recvs.wrapping_add(1);
        let posted = self.word(qp.at + offset_of!(ProgramIndex, recv_posted));
        posted.store(qp.recvs, Ordering::Release);
    }

    /// Puts a send WQE of one SGE into its slot, without a doorbell.
    pub fn put_send(&self, qp: &mut RawQp, wqe: SendWqe, sge: Sge) {
        let wqe = SendWqe { num_sge: 1, length: sge.len, blocks: 2, ..wqe };
        self.put_wqe(qp, wqe, sge_words(sge).as_bytes());
    }

    /// The same with bytes that stand in the WQE, or without any.
    pub fn put_inline(&self, qp: &mut RawQp, wqe: SendWqe, bytes: &[u8]) {
        let flags = if bytes.is_empty() { wqe.flags } else { wqe.flags | SendFlags::INLINE };
        let wqe = SendWqe { num_sge: 0, length: bytes.len() as u32, flags, ..wqe };
        self.put_wqe(qp, wqe.with_body(bytes.len()), bytes);
    }

    /// Puts a send WQE as it is into its slot.
    pub fn put_wqe(&self, qp: &mut RawQp, wqe: SendWqe, body: &[u8]) {
        let at = qp.at + SENDS + (qp.sends % SLOTS) as usize * SEND_STRIDE;
        let words: [u64; 8] = transmute!(wqe);
        self.put(at, words.as_bytes());
        self.put(at + 64, body);
        qp.sends = qp.sends.wrapping_add(1);
        self.word(qp.at + offset_of!(ProgramIndex, send_posted)).store(qp.sends, Ordering::Release);
    }

    /// Rings a QP's doorbell for all that is posted.
    ///
    /// # Errors
    /// Its cell is none.
    pub fn doorbell(&self, qp: &RawQp) -> Tested {
        self.ring(qp.cell, u64::from(qp.sends) | u64::from(qp.recvs) << 32)
    }

    /// Send WQEs of a QP whose slots are free again, as the board says.
    pub fn released(&self, qp: &RawQp) -> u32 {
        self.word(qp.at + 64 + offset_of!(CardIndex, send_released)).load(Ordering::Acquire)
    }

    /// Sends `n` from `a` to `b`, and looks at what arrives and completes.
    ///
    /// # Errors
    /// It is not so.
    pub fn exchange(&mut self, key: u32, a: &mut RawQp, b: &mut RawQp, n: u64) -> Tested {
        self.put(DATA, &n.to_le_bytes());
        self.post_recv(b, n, data(4096, 8, key));
        self.put_send(a, request(SendOp::Send, !n), data(0, 8, key));
        self.doorbell(a)?;
        let mut came = [self.completion()?, self.completion()?].map(|cqe| (cqe.wr_id, cqe.status));
        came.sort_by_key(|(wr_id, _)| *wr_id);
        let mut wanted = [(n, WcStatus::Success), (!n, WcStatus::Success)];
        wanted.sort_by_key(|(wr_id, _)| *wr_id);
        expect("completions of a message", came, wanted)?;
        expect("the bytes of a message", self.get::<u64>(DATA + 4096), n)
    }

    /// Two RC QPs of this driver, connected to each other, on what [`RawDriver::basics`] makes.
    ///
    /// # Errors
    /// A step is refused.
    pub fn two_qps(&mut self) -> Tested<TwoQps> {
        let Basics { pd, key, cq } = self.basics()?;
        let (a, b) = (self.qp(pd, cq.number, 0)?, self.qp(pd, cq.number, 1)?);
        self.connect_qp(a, b.qpn)?;
        self.connect_qp(b, a.qpn)?;
        Ok(TwoQps { key, a, b })
    }
}
