//! What the programs of both hosts do: posting, and changing what the card knows.

use starverbs_core::mr::MrAttr;
use starverbs_core::nic::{TagChange, TagOp};
use starverbs_core::qp::{QpAttr, QpAttrMask};
use starverbs_core::tags::{MAX_TAG_SGE, TaggedBuffer};
use starverbs_core::{Access, QpState, SendFlags, SendOp, SendWqe, Sge};
use starverbs_sim::{Recv, Send};

use super::*;

impl World {
    /// The program of host 1 posts a send.
    pub(crate) fn post_send(&mut self, lane: usize, bytes: &mut Bytes<'_>) {
        let (op, flags, len) = (bytes.byte(), bytes.byte(), u32::from(bytes.half()) % LONGEST);
        if matches!(lane, XRC_IN | TAG) || self.lanes[lane].sq.is_full() || self.lanes[lane].disturbed {
            return;
        }
        let honest = self.mode == Mode::Unconnected;
        let ops: &[SendOp] = match lane {
            UC => &[SendOp::Write, SendOp::Send, SendOp::SendImm],
            UD => &[SendOp::Send, SendOp::SendImm],
            XRC_OUT => &[SendOp::Write, SendOp::Read, SendOp::FetchAdd],
            _ if honest => &[SendOp::Write, SendOp::Send, SendOp::Read, SendOp::FetchAdd, SendOp::CmpSwap],
            _ => &[
                SendOp::Write,
                SendOp::Send,
                SendOp::Read,
                SendOp::FetchAdd,
                SendOp::CmpSwap,
                SendOp::WriteImm,
                SendOp::Flush,
                SendOp::AtomicWrite,
                SendOp::BindMw,
                SendOp::LocalInv,
            ],
        };
        let op = ops[usize::from(op) % ops.len()];
        let len = match op {
            _ if lane == UD => len % 1024,
            SendOp::FetchAdd | SendOp::CmpSwap | SendOp::AtomicWrite => 8,
            SendOp::Flush | SendOp::BindMw | SendOp::LocalInv => 0,
            _ => len,
        };
        let wqe = self.request(lane, op, flags);
        let sges =
            if len == 0 { vec![] } else { vec![Sge { addr: self.page[1].0, len, lkey: self.page[1].1 }] };
        self.feed_peer(lane);
        let packets = match op {
            SendOp::BindMw | SendOp::LocalInv => 0,
            _ => len.div_ceil(MTU as u32).max(1),
        };
        let lane = &mut self.lanes[lane];
        lane.end += packets;
        lane.sent.push_back(Sent { wr_id: wqe.wr_id, op, end: lane.end, packets });
        lane.sq.post(Send { wqe, sges, inline: None }).expect("there is room");
        let qpn = lane.qpn;
        self.posts += 1;
        self.net.doorbell(1, qpn);
    }

    fn request(&mut self, lane: usize, op: SendOp, flags: u8) -> SendWqe {
        let wr_id = self.id();
        let mut wqe = SendWqe {
            wr_id,
            op,
            remote_addr: self.page[0].0,
            rkey: self.page[0].1,
            flags: SendFlags::from_bits_truncate(flags & 5),
            ..SendWqe::default()
        };
        match op {
            SendOp::BindMw => {
                wqe.remote_qpn = self.window;
                wqe.rkey = self.window;
                wqe.imm = self.page[1].1;
                wqe.remote_addr = self.page[1].0 + 1024;
                wqe.compare_add = 1024;
                wqe.qkey = (Access::REMOTE_WRITE | Access::REMOTE_READ).bits();
            }
            SendOp::LocalInv => wqe.rkey = self.window,
            SendOp::Flush => (wqe.imm, wqe.compare_add) = (1, 8),
            _ => {}
        }
        if lane == XRC_OUT {
            wqe.remote_qpn = self.peer_srq.1.0;
        }
        if lane == UD {
            (wqe.av, wqe.remote_qpn, wqe.qkey) = (self.av, self.lanes[UD].peer, self.setup.qkey);
        }
        wqe
    }

    /// The honest peer has receives for what host 1 sends.
    fn feed_peer(&mut self, lane: usize) {
        let sge = Sge { addr: self.page[0].0 + 4096, len: 4096, lkey: self.page[0].1 };
        while !self.lanes[lane].peer_rq.is_full() {
            self.lanes[lane].peer_rq.post(Recv { wr_id: 0, sges: vec![sge] }).expect("there is room");
        }
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// The program of host 1 posts a receive.
    pub(crate) fn post_recv(&mut self, lane: usize, bytes: &mut Bytes<'_>) {
        let len = if self.mode == Mode::Unconnected { 2048 } else { u32::from(bytes.half()) % 2048 };
        let sge = Sge { addr: self.page[1].0 + 2048, len, lkey: self.page[1].1 };
        let wr_id = self.id();
        if lane == TAG && bytes.byte() & 1 == 0 {
            let mut sges = [Sge::default(); MAX_TAG_SGE];
            sges[0] = sge;
            let buffer = TaggedBuffer { wr_id, tag: u64::from(bytes.byte() & 3), mask: 3, sges, num_sge: 1 };
            let seen = (bytes.byte() & 1 == 0).then_some(u32::from(bytes.byte()));
            let op = TagOp { wr_id: 0, change: TagChange::Add(buffer), seen, signaled: false };
            if self.net.hosts[1].nic.change_tags(self.srqs[2], &op).is_ok() {
                self.recvs.insert(wr_id, u64::from(len));
            }
            return;
        }
        if !self.lanes[lane].disturbed && self.lanes[lane].rq.post(Recv { wr_id, sges: vec![sge] }).is_ok() {
            self.recvs.insert(wr_id, u64::from(len));
            self.posts += 1;
        }
    }

    /// The honest peer sends something, for which there is a receive if it needs one.
    pub(crate) fn honest_send(&mut self, lane: usize, bytes: &mut Bytes<'_>) {
        let (op, len) = (bytes.byte(), u32::from(bytes.half()) % LONGEST);
        if matches!(lane, XRC_OUT | TAG | UD) || self.lanes[lane].peer_sq.is_full() {
            return;
        }
        let ops: &[SendOp] = match lane {
            UC => &[SendOp::Write, SendOp::Send],
            _ => &[SendOp::Write, SendOp::Send, SendOp::Read, SendOp::FetchAdd],
        };
        let op = ops[usize::from(op) % ops.len()];
        if op == SendOp::Send {
            self.post_recv(lane, &mut Bytes(&[0xff, 0x07, 1]));
        }
        let len = if op == SendOp::FetchAdd { 8 } else { len };
        let wqe = SendWqe {
            wr_id: self.id(),
            op,
            remote_addr: self.page[1].0,
            rkey: self.page[1].1,
            remote_qpn: self.srqs[1].0,
            ..SendWqe::default()
        };
        let sge = Sge { addr: self.page[0].0, len, lkey: self.page[0].1 };
        let lane = &mut self.lanes[lane];
        lane.peer_sq.post(Send { wqe, sges: vec![sge], inline: None }).expect("there is room");
        lane.honest += 1;
        let peer = lane.peer;
        self.posts += 1;
        self.net.doorbell(0, peer);
    }

    /// The program of host 1 takes a QP to another state, or through RESET back to RTS.
    pub(crate) fn change_state(&mut self, lane: usize, bytes: &mut Bytes<'_>) {
        let to = bytes.pick(&[QpState::Err, QpState::Reset, QpState::Init, QpState::Sqd, QpState::Rts]);
        if self.mode == Mode::Unconnected {
            return;
        }
        let (now, qpn, ud) = (self.net.now(), self.lanes[lane].qpn, lane == UD);
        let host = &mut self.net.hosts[1];
        if matches!(to, QpState::Err | QpState::Sqd) {
            let _ = host.to_state(qpn, to, now);
        } else {
            host.to_state(qpn, QpState::Reset, now).expect("RESET is always possible");
            if to == QpState::Init {
                let setup = self.setup;
                host.to_init(qpn, ud, &setup, now);
            }
            let lane = &mut self.lanes[lane];
            lane.sent.clear();
            (lane.end, lane.acked) = (0, Acknowledged::default());
        }
        self.lanes[lane].disturbed = !matches!(to, QpState::Err | QpState::Rts);
        if to == QpState::Rts {
            self.bring_up(lane, false);
        }
    }

    /// The program of host 1 registers memory anew, or takes rights from a QP.
    pub(crate) fn change_memory(&mut self, bytes: &mut Bytes<'_>) {
        let which = bytes.byte();
        if self.mode == Mode::Unconnected {
            return;
        }
        let (now, qpn) = (self.net.now(), self.lanes[usize::from(which >> 4) % LANES].qpn);
        let host = &mut self.net.hosts[1];
        let access = if which & 1 == 0 { all_rights() } else { Access::empty() };
        if which & 2 == 0 {
            let _ = host.modify(qpn, &QpAttr { access, ..QpAttr::default() }, QpAttrMask::ACCESS_FLAGS, now);
        } else if which & 4 == 0 {
            let (addr, key) = self.page[1];
            if host.nic.dereg_mr(key).is_ok() {
                let attr = MrAttr {
                    pd: host.pd,
                    addr,
                    length: PAGE,
                    iova: addr,
                    access: all_rights(),
                    ..MrAttr::default()
                };
                let fresh = host.nic.reg_mr(attr).expect("a good registration");
                self.keys.push((addr, key));
                self.page[1].1 = fresh;
            }
        } else {
            host.env.gone = if which & 8 == 0 { 0..0 } else { self.page[1].0 + 4096..self.page[1].0 + PAGE };
        }
    }
}
