//! An XRC domain of several cards, here of one process: tests/abi/xrc.c has real processes.

use std::fs::File;
use std::os::fd::AsRawFd;

use crate::common::*;
use starverbs_core::{Access, QpState, QpType, SendFlags, SendOp, WcOpcode, WcStatus};
use starverbs_settings::Settings;
use starverbs_verbs::{Cq, Qp, RecvWr, SendWr, Srq, Xrcd};

fn open(node: &Node, file: &File) -> Xrcd {
    Xrcd::open(&node.ctx, Some(file.as_raw_fd()), true, false).unwrap()
}

/// A node with an SRQ of the domain.
struct Owner {
    srq: Srq,
    cq: Cq,
    domain: Xrcd,
    node: Node,
}

impl Owner {
    fn new(settings: &Settings, file: &File) -> Owner {
        let node = Node::new(settings);
        let domain = open(&node, file);
        let cq = Cq::create(&node.ctx, 256, None, 0).unwrap();
        let srq = Srq::create_xrc(&node.pd, &domain, &cq, 64, 2, 0).unwrap();
        Owner { srq, cq, domain, node }
    }

    fn post(&self, wr_id: u64, at: usize, len: usize) {
        self.srq.post(&RecvWr { wr_id, sges: &[self.node.sge(at, len)] }).unwrap();
    }

    fn end(self) {
        self.srq.destroy().unwrap();
        self.domain.close().unwrap();
    }
}

/// A sender, and a node whose QPs bring its messages into the domain.
struct Wire {
    sender: Node,
    send: Qp,
    recv: Qp,
    domain: Xrcd,
    bridge: Node,
}

impl Wire {
    fn new(settings: &Settings, file: &File) -> Wire {
        let (sender, bridge) = (Node::new(settings), Node::new(settings));
        let domain = open(&bridge, file);
        let recv = domain.create_qp(&bridge.ctx, 5).unwrap();
        let send = Qp::create(&sender.pd, &sender.init(QpType::XrcSend, None)).unwrap();
        connect_xrc(&sender, &send, &bridge, &recv);
        Wire { sender, send, recv, domain, bridge }
    }

    fn send(&self, to: &Owner, wr_id: u64, at: usize, len: usize) {
        let sges = [self.sender.sge(at, len)];
        post(&self.send, &SendWr { remote_qpn: to.srq.number(), ..send(wr_id, &sges) }).unwrap();
    }

    /// Asks for memory of `to`: at 100, or, for atomics, at 104.
    fn ask(&mut self, to: &Owner, op: SendOp, at: usize, len: usize, compare_add: u64) -> WcStatus {
        let there = if op == SendOp::Read { 100 } else { 104 };
        let (remote_addr, rkey) = (to.node.addr(there), to.node.mr.rkey());
        let sges = [self.sender.sge(at, len)];
        let wr = SendWr { op, remote_addr, rkey, compare_add, remote_qpn: to.srq.number(), ..send(1, &sges) };
        post(&self.send, &wr).unwrap();
        self.sent()
    }

    fn sent(&self) -> WcStatus {
        self.sender.completions(1)[0].status
    }
}

#[test]
fn messages_of_all_sizes_reach_another_card() {
    let (settings, file) = (settings(), domain_file());
    let (wire, one, two) =
        (Wire::new(&settings, &file), Owner::new(&settings, &file), Owner::new(&settings, &file));
    assert_ne!(one.srq.number(), two.srq.number());
    for (n, len) in [0, 1, 100, 4096, 5000, 30_000].into_iter().enumerate() {
        let byte = n as u8 + 1;
        wire.sender.fill(0, &vec![byte; len]);
        for to in [&one, &two] {
            to.post(7, 100, 32_000);
            wire.send(to, 1, 0, len);
            assert_eq!(wire.sent(), WcStatus::Success);
            let got = poll(&to.cq, 1)[0];
            assert_eq!((got.wr_id, got.status, got.byte_len as usize), (7, WcStatus::Success, len));
            assert_eq!((got.qpn, got.src_qp), (wire.recv.number(), wire.send.number()));
            assert_eq!(to.node.bytes(100, len), vec![byte; len]);
        }
    }
    one.end();
    /* its number names nothing any more */
    post(&wire.send, &SendWr { remote_qpn: 0xff_f000, flags: SendFlags::SIGNALED, ..send(8, &[]) }).unwrap();
    assert_eq!(wire.sent(), WcStatus::RemInvReqErr);
    wire.recv.destroy().unwrap();
    wire.domain.close().unwrap();
    two.end();
}

/// Keys of the owner open its memory to requests that name its SRQ.
#[test]
fn writes_reach_another_card() {
    let (settings, file) = (settings(), domain_file());
    let (mut wire, owner) = (Wire::new(&settings, &file), Owner::new(&settings, &file));
    for (op, len) in [(SendOp::Write, 20_000), (SendOp::WriteImm, 9000), (SendOp::WriteImm, 0)] {
        wire.sender.fill(0, &vec![len as u8 | 1; len]);
        owner.post(4, 0, 0);
        let (remote_addr, rkey) = (owner.node.addr(100), owner.node.mr.rkey());
        let sges = [wire.sender.sge(0, len)];
        let wr = SendWr { op, remote_addr, rkey, imm: 9, remote_qpn: owner.srq.number(), ..send(1, &sges) };
        post(&wire.send, &wr).unwrap();
        assert_eq!(wire.sent(), WcStatus::Success);
        assert_eq!(owner.node.bytes(100, len), vec![len as u8 | 1; len]);
        if op == SendOp::WriteImm {
            let got = poll(&owner.cq, 1)[0];
            assert_eq!((got.opcode, got.byte_len as usize, got.imm), (WcOpcode::RecvRdmaWithImm, len, 9));
        }
    }
    for len in [0, 1, 8, 20_000] {
        owner.node.fill(100, &vec![len as u8 | 2; len]);
        assert_eq!(wire.ask(&owner, SendOp::Read, 0, len, 0), WcStatus::Success);
        assert_eq!(wire.sender.bytes(0, len), vec![len as u8 | 2; len]);
    }
    for before in [7u64, 12] {
        owner.node.fill(104, &before.to_ne_bytes());
        assert_eq!(wire.ask(&owner, SendOp::FetchAdd, 0, 8, 5), WcStatus::Success);
        assert_eq!(wire.sender.bytes(0, 8), before.to_ne_bytes());
        assert_eq!(owner.node.bytes(104, 8), (before + 5).to_ne_bytes());
    }
}

/// More than are leased at once, without buffers now and then.
#[test]
fn a_stream_of_messages_arrives_in_order() {
    let (settings, file) = (settings(), domain_file());
    let (wire, owner) = (Wire::new(&settings, &file), Owner::new(&settings, &file));
    const COUNT: u64 = 2000;
    let (mut posted, mut sent, mut done, mut got) = (0, 0, 0, 0);
    wire.sender.fill(0, &[4; 500]);
    while got < COUNT || done < COUNT {
        if sent < COUNT && sent - done < 16 {
            wire.send(&owner, sent, 0, 500);
            sent += 1;
        }
        if posted < got + 32 && !got.is_multiple_of(7) || posted == got {
            owner.post(posted, 1000 * (posted as usize % 32), 1000);
            posted += 1;
        }
        let mut out = [starverbs_core::Cqe::default(); 16];
        let count = owner.cq.poll(&mut out).unwrap();
        for cqe in &out[..count] {
            assert_eq!((cqe.wr_id, cqe.status), (got, WcStatus::Success));
            got += 1;
        }
        let count = wire.sender.cq.poll(&mut out).unwrap();
        for cqe in &out[..count] {
            assert_eq!((cqe.wr_id, cqe.status), (done, WcStatus::Success));
            done += 1;
        }
        let _ = wire.bridge.cq.poll(&mut out).unwrap();
    }
}

#[test]
fn who_opens_a_domain_first_and_last() {
    let (settings, file) = (settings(), domain_file());
    let [a, b] = [(); 2].map(|()| Node::new(&settings));
    let open = |node: &Node, create, exclusive| {
        Xrcd::open(&node.ctx, Some(file.as_raw_fd()), create, exclusive).map_err(|error| error.errno())
    };
    assert_eq!(open(&a, false, false).err(), Some(libc::EAGAIN));
    let first = open(&a, true, true).unwrap();
    assert_eq!(open(&b, true, true).err(), Some(libc::EINVAL));
    let second = open(&b, false, false).unwrap();
    first.close().unwrap();
    assert_eq!(open(&a, true, true).err(), Some(libc::EINVAL), "another process has it");
    second.close().unwrap();
    assert_eq!(open(&a, false, false).err(), Some(libc::EAGAIN), "nobody has it");
    open(&b, true, true).unwrap().close().unwrap();
}

/// What is wrong with a buffer is said on both sides, and one QP's fault is not another's.
#[test]
fn faults_are_of_the_right_kind() {
    let (settings, file) = (settings(), domain_file());
    let owner = Owner::new(&settings, &file);
    for case in 0..3 {
        let wire = Wire::new(&settings, &file);
        let mr = owner.node.reg(0, 256, Access::LOCAL_WRITE);
        let addr = owner.node.addr(0);
        let sge = starverbs_core::Sge { addr, len: if case == 0 { 10 } else { 256 }, lkey: mr.lkey() };
        owner.srq.post(&RecvWr { wr_id: 3, sges: &[sge] }).unwrap();
        let (want, at_owner) = match case {
            0 => (WcStatus::RemInvReqErr, WcStatus::LocLenErr),
            1 => {
                mr.dereg().unwrap();
                (WcStatus::RemOpErr, WcStatus::LocProtErr)
            }
            _ => (WcStatus::Success, WcStatus::Success),
        };
        wire.send(&owner, 1, 0, 200);
        assert_eq!(wire.sent(), want, "case {case}");
        let got = poll(&owner.cq, 1)[0];
        assert_eq!((got.wr_id, got.status), (3, at_owner), "case {case}");
        let state = if case == 2 { QpState::Rts } else { QpState::Err };
        assert_eq!(wire.recv.state(), state);
    }
}

/// The card whose QP it is goes away in the middle: the WQE that a message was in is flushed, the others come
/// back.
#[test]
fn a_bridge_that_goes_gives_back_what_it_borrowed() {
    let (settings, file) = (settings(), domain_file());
    let owner = Owner::new(&settings, &file);
    for n in 0..8 {
        owner.post(n, 1000 * n as usize, 1000);
    }
    let wire = Wire::new(&settings, &file);
    wire.send(&owner, 1, 0, 500);
    assert_eq!((wire.sent(), poll(&owner.cq, 1)[0].wr_id), (WcStatus::Success, 0));
    drop(wire);
    let wire = Wire::new(&settings, &file);
    for n in 1..8 {
        wire.send(&owner, 1, 0, 500);
        assert_eq!((wire.sent(), poll(&owner.cq, 1)[0].wr_id), (WcStatus::Success, n));
    }
}

#[test]
fn nothing_arrives_after_the_owner_is_gone() {
    let (settings, file) = (settings(), domain_file());
    let wire = Wire::new(&settings, &file);
    let owner = Owner::new(&settings, &file);
    owner.post(1, 0, 1000);
    owner.post(2, 0, 1000);
    wire.send(&owner, 1, 0, 500);
    assert_eq!(wire.sent(), WcStatus::Success);
    let number = owner.srq.number();
    drop(owner);
    let sges = [wire.sender.sge(0, 10)];
    post(&wire.send, &SendWr { remote_qpn: number, ..send(1, &sges) }).unwrap();
    assert_eq!(wire.sent(), WcStatus::RemInvReqErr);
    let _ = &wire.bridge;
}
