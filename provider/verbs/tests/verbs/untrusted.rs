//! An untrusted peer with a plain UDP socket beside two connected programs: each of its frames is dropped and
//! counted by its cause, and the connection goes on.

use std::net::UdpSocket;

use crate::common::*;
use starverbs_core::wire::headers::{CREDITS_NONE, Syndrome};
use starverbs_core::wire::{HeaderBuf, IcrcHeader, PKEY_DEFAULT, code, icrc};
use starverbs_core::{Gid, Psn, QPN_BLOCK_SHIFT, QpType, Qpn, SendOp, WcStatus};
use starverbs_verbs::SendWr;

/// First PSN of the common connections.
const FIRST: u32 = 0xfffffe;

/// Sockets of an untrusted peer: at the connected peer's address and at another one.
struct UntrustedPeer {
    port: u16,
    sockets: [UdpSocket; 2],
}

impl UntrustedPeer {
    fn new(port: u16) -> UntrustedPeer {
        UntrustedPeer { port, sockets: ["127.0.0.1:0", "127.0.0.2:0"].map(|at| UdpSocket::bind(at).unwrap()) }
    }

    /// Sends a frame from address 0 or 1, its ICRC being right but for `wrong`.
    fn send(&self, from: usize, frame: &[u8], wrong: u32) {
        let sport = self.sockets[from].local_addr().unwrap().port();
        let gid = |last| Gid::from_ipv4([127, 0, 0, last]);
        let header = IcrcHeader { src: gid(from as u8 + 1), dst: gid(1), sport, dport: self.port, ip_id: 0 };
        let icrc = icrc::of_frame(&header, frame).map_or(0, u32::from_le_bytes) ^ wrong;
        let bytes = [frame, &icrc.to_le_bytes()].concat();
        self.sockets[from].send_to(&bytes, ("127.0.0.1", self.port)).unwrap();
    }

    /// Sends one, and waits until it was counted.
    fn counted(&self, name: &str, from: usize, frame: &[u8], wrong: u32) {
        let sum = || counters(self.port, name).iter().sum::<u64>();
        let before = sum();
        self.send(from, frame, wrong);
        wait_for(name, || sum() > before);
        assert_eq!(sum(), before + 1, "{name}");
    }
}

fn bth(opcode: u8, qpn: Qpn, psn: u32) -> HeaderBuf {
    HeaderBuf::bth(opcode, qpn, Psn::new(psn), true, false, 0, PKEY_DEFAULT)
}

#[test]
fn a_connection_survives_frames_of_untrusted_peers() {
    let settings = wire();
    let (a, b) = (Node::new(&settings), Node::new(&settings));
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    let untrusted = UntrustedPeer::new(settings.port);
    let (own, data) = (qb.number(), [7; 8]);
    let send_only = |qpn, psn| [&*bth(code::RC_SEND_ONLY, qpn, psn), &data].concat();
    b.post_recv(&qb, 1, 0, 64).unwrap();

    untrusted.counted("drop_source", 1, &send_only(own, FIRST), 0);
    /* 2^-16 of all errors look like an IP identification that the socket hides; these do not */
    untrusted.counted("drop_icrc", 0, &send_only(own, FIRST), 0x0101_0101);
    untrusted.counted("drop_no_qp", 0, &send_only(own ^ 1, FIRST), 0);
    let free =
        (1..4094).find(|block| [&qa, &qb].iter().all(|q| q.number() >> QPN_BLOCK_SHIFT != *block)).unwrap();
    untrusted.counted("drop_no_owner", 0, &send_only(free << QPN_BLOCK_SHIFT, FIRST), 0);
    let pkey = HeaderBuf::bth(code::RC_SEND_ONLY, own, Psn::new(FIRST), true, false, 0, 0x1234);
    untrusted.counted("drop_pkey", 0, &pkey, 0);
    untrusted.counted("drop_opcode", 0, &[&[0x3f][..], &send_only(own, FIRST)[1..]].concat(), 0);
    untrusted.counted("drop_opcode", 0, &bth(code::UC_SEND_ONLY, own, FIRST), 0);
    let padded = HeaderBuf::bth(code::RC_SEND_ONLY, own, Psn::new(FIRST), true, false, 3, PKEY_DEFAULT);
    untrusted.counted("drop_malformed", 0, &padded, 0);
    untrusted.counted("drop_malformed", 0, &bth(code::RC_WRITE_ONLY, own, FIRST), 0);
    untrusted.counted(
        "drop_malformed",
        0,
        &[&*bth(code::RC_SEND_ONLY, own, FIRST), &[0; 8192][..]].concat(),
        0,
    );
    let ack = bth(code::RC_ACK, own, FIRST + 1).aeth(Syndrome::Ack { credits: CREDITS_NONE }, 0);
    untrusted.counted("drop_stale_response", 0, &ack, 0);
    untrusted.counted("duplicate_request", 0, &send_only(own, FIRST - 5), 0);
    untrusted.counted("rx_cnp", 0, &bth(code::CNP, own, 0).reserved(), 0);
    untrusted.sockets[0].send_to(&[4, 0, 0xff], ("127.0.0.1", settings.port)).unwrap();
    let idle = b.qp(QpType::Rc);
    untrusted.counted("drop_state", 0, &send_only(idle.number(), FIRST), 0);

    a.fill(0, b"from the peer");
    post(&qa, &send(2, &[a.sge(0, 13)])).unwrap();
    let sges = [a.sge(0, 13)];
    let write = SendWr { op: SendOp::Write, remote_addr: b.addr(500), rkey: b.mr.rkey(), ..send(3, &sges) };
    post(&qa, &write).unwrap();
    let done: Vec<_> = a.completions(2).iter().map(|cqe| (cqe.wr_id, cqe.status)).collect();
    assert_eq!(done, [(2, WcStatus::Success), (3, WcStatus::Success)]);
    let got = b.completions(1)[0];
    assert_eq!((got.wr_id, got.status, got.byte_len), (1, WcStatus::Success, 13));
    assert_eq!((b.bytes(0, 13), b.bytes(500, 13)), (b"from the peer".to_vec(), b"from the peer".to_vec()));
}

#[test]
fn datagrams_need_the_key() {
    let settings = wire();
    let b = Node::new(&settings);
    let qp = b.qp(QpType::Ud);
    ud_ready(&qp);
    let untrusted = UntrustedPeer::new(settings.port);
    let datagram = |qkey| [&*bth(code::UD_SEND_ONLY, qp.number(), 0).deth(qkey, 5), &[1; 8]].concat();
    untrusted.counted("drop_qkey", 1, &datagram(QKEY ^ 1), 0);
    untrusted.counted("drop_no_recv", 1, &datagram(QKEY), 0);
    b.post_recv(&qp, 1, 0, 64).unwrap();
    untrusted.send(1, &datagram(QKEY), 0);
    assert_eq!(b.completions(1)[0].byte_len, 48, "a datagram with the key is received");
}
