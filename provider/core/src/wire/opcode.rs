//! Op-codes of the BTH and what each brings with it (IBTA vol. 1, 9.2.1, table 38 "OpCode field"; FLUSH and
//! ATOMIC WRITE: annex A19).
//!
//! The top three bits are the transport (000 RC, 001 UC, 011 UD, 101 XRC), the low five the operation, the
//! same for every transport that offers it. Extension headers always follow in the same order, so
//! that a header's place follows from the op-code alone.

use bitflags::bitflags;

use crate::types::{QpType, SendOp};

/// Op-codes by name: table 38's, short.
pub mod code {
    /// RC: SEND, first packet
    pub const RC_SEND_FIRST: u8 = 0x00;
    /// RC: SEND, middle packet
    pub const RC_SEND_MIDDLE: u8 = 0x01;
    /// RC: SEND, last packet
    pub const RC_SEND_LAST: u8 = 0x02;
    /// RC: SEND, last packet, with immediate
    pub const RC_SEND_LAST_IMM: u8 = 0x03;
    /// RC: SEND, only packet
    pub const RC_SEND_ONLY: u8 = 0x04;
    /// RC: SEND, only packet, with immediate
    pub const RC_SEND_ONLY_IMM: u8 = 0x05;
    /// RC: WRITE, first packet
    pub const RC_WRITE_FIRST: u8 = 0x06;
    /// RC: WRITE, middle packet
    pub const RC_WRITE_MIDDLE: u8 = 0x07;
    /// RC: WRITE, last packet
    pub const RC_WRITE_LAST: u8 = 0x08;
    /// RC: WRITE, last packet, with immediate
    pub const RC_WRITE_LAST_IMM: u8 = 0x09;
    /// RC: WRITE, only packet
    pub const RC_WRITE_ONLY: u8 = 0x0a;
    /// RC: WRITE, only packet, with immediate
    pub const RC_WRITE_ONLY_IMM: u8 = 0x0b;
    /// RC: READ request
    pub const RC_READ_REQUEST: u8 = 0x0c;
    /// RC: READ response, first packet
    pub const RC_READ_RESPONSE_FIRST: u8 = 0x0d;
    /// RC: READ response, middle packet
    pub const RC_READ_RESPONSE_MIDDLE: u8 = 0x0e;
    /// RC: READ response, last packet
    pub const RC_READ_RESPONSE_LAST: u8 = 0x0f;
    /// RC: READ response, only packet
    pub const RC_READ_RESPONSE_ONLY: u8 = 0x10;
    /// RC: ACK or NAK (AETH)
    pub const RC_ACK: u8 = 0x11;
    /// RC: response to an atomic: AETH, the value before
    pub const RC_ATOMIC_ACK: u8 = 0x12;
    /// RC: compare and swap
    pub const RC_CMP_SWAP: u8 = 0x13;
    /// RC: fetch and add
    pub const RC_FETCH_ADD: u8 = 0x14;
    /// RC: SEND, last packet, with an rkey to invalidate
    pub const RC_SEND_LAST_INV: u8 = 0x16;
    /// RC: SEND, only packet, with an rkey to invalidate
    pub const RC_SEND_ONLY_INV: u8 = 0x17;
    /// RC: FLUSH (annex A19)
    pub const RC_FLUSH: u8 = 0x1c;
    /// RC: ATOMIC WRITE of eight bytes (annex A19)
    pub const RC_ATOMIC_WRITE: u8 = 0x1d;
    /// StRoM's dialect of RC: RPC, with its parameters (table 1 of the paper)
    pub const RPC: u8 = 0x18;
    /// StRoM: RPC WRITE, first packet
    pub const RPC_WRITE_FIRST: u8 = 0x19;
    /// StRoM: RPC WRITE, middle packet
    pub const RPC_WRITE_MIDDLE: u8 = 0x1a;
    /// StRoM: RPC WRITE, last packet
    pub const RPC_WRITE_LAST: u8 = 0x1b;
    /// StRoM: RPC WRITE, only packet; FLUSH to all others
    pub const RPC_WRITE_ONLY: u8 = 0x1c;
    /// UC: SEND, first packet
    pub const UC_SEND_FIRST: u8 = 0x20;
    /// UC: SEND, middle packet
    pub const UC_SEND_MIDDLE: u8 = 0x21;
    /// UC: SEND, last packet
    pub const UC_SEND_LAST: u8 = 0x22;
    /// UC: SEND, last packet, with immediate
    pub const UC_SEND_LAST_IMM: u8 = 0x23;
    /// UC: SEND, only packet
    pub const UC_SEND_ONLY: u8 = 0x24;
    /// UC: SEND, only packet, with immediate
    pub const UC_SEND_ONLY_IMM: u8 = 0x25;
    /// UC: WRITE, first packet
    pub const UC_WRITE_FIRST: u8 = 0x26;
    /// UC: WRITE, middle packet
    pub const UC_WRITE_MIDDLE: u8 = 0x27;
    /// UC: WRITE, last packet
    pub const UC_WRITE_LAST: u8 = 0x28;
    /// UC: WRITE, last packet, with immediate
    pub const UC_WRITE_LAST_IMM: u8 = 0x29;
    /// UC: WRITE, only packet
    pub const UC_WRITE_ONLY: u8 = 0x2a;
    /// UC: WRITE, only packet, with immediate
    pub const UC_WRITE_ONLY_IMM: u8 = 0x2b;
    /// UD: SEND, only packet
    pub const UD_SEND_ONLY: u8 = 0x64;
    /// UD: SEND, only packet, with immediate
    pub const UD_SEND_ONLY_IMM: u8 = 0x65;
    /// What an XRC op-code has more than RC's (annex A14)
    pub const XRC: u8 = 0xa0;
    /// Congestion notification packet (RoCEv2 annex A17.9.3)
    pub const CNP: u8 = 0x81;
    /// Ours: asks for an answer once all before it is read (manufacturer's op-codes are 0xc0 to 0xff)
    pub const PROBE: u8 = 0xc0;
    /// Ours: the answer to a probe
    pub const PROBE_ANSWER: u8 = 0xc1;
    /// Ours: an ACK of RC or XRC with what is kept behind the missing packet
    pub const SACK: u8 = 0xc2;
    /// Ours: by which the ends of a connection settle what carries it
    pub const NEGOTIATE: u8 = 0xc3;
    /// Ours: which dialect a queue pair speaks, asked or said
    pub const DIALECT: u8 = 0xc4;
}

/// Transport that an op-code belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transport {
    /// Reliable connection
    Rc,
    /// Unreliable connection
    Uc,
    /// Unreliable datagram
    Ud,
    /// Extended reliable connection
    Xrc,
    /// Congestion notification; belongs to no QP's transport
    Cnp,
    /// Between starverbs cards; belongs to no QP's transport
    Own,
}

impl Transport {
    /// Whether a QP of type `qp` takes packets of this transport.
    #[inline]
    pub const fn serves(self, qp: QpType) -> bool {
        matches!(
            (self, qp),
            (Transport::Rc, QpType::Rc)
                | (Transport::Uc, QpType::Uc)
                | (Transport::Ud, QpType::Ud)
                | (Transport::Xrc, QpType::XrcSend | QpType::XrcRecv)
        )
    }
}

/// What a packet does, whatever its place in the message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PacketKind {
    /// Part of a SEND
    Send,
    /// Part of an RDMA WRITE
    Write,
    /// RDMA READ request
    ReadRequest,
    /// Part of a READ response
    ReadResponse,
    /// ACK or NAK
    Ack,
    /// Result of an atomic
    AtomicAck,
    /// Compare and swap
    CmpSwap,
    /// Fetch and add
    FetchAdd,
    /// FLUSH request
    Flush,
    /// ATOMIC WRITE request
    AtomicWrite,
    /// StRoM: RPC, with its parameters
    Rpc,
    /// StRoM: part of an RPC WRITE
    RpcWrite,
    /// Congestion notification
    Cnp,
    /// Ours: asks whether all before it was read
    Probe,
    /// Ours: answer to a probe
    ProbeAnswer,
    /// Ours: ACK with the packets kept behind a missing one
    Sack,
    /// Ours: negotiation of engines
    Negotiate,
    /// Ours: dialects
    Dialect,
}

impl PacketKind {
    /// Whether it travels from requester to responder.
    #[inline]
    pub const fn is_request(self) -> bool {
        matches!(self, PacketKind::Send | PacketKind::Write | PacketKind::Rpc | PacketKind::RpcWrite)
            || self.is_answered()
    }
    /// Whether it is a request that an answer of its own belongs to: an ACK for later ones does not do.
    #[inline]
    pub const fn is_answered(self) -> bool {
        matches!(
            self,
            PacketKind::ReadRequest
                | PacketKind::CmpSwap
                | PacketKind::FetchAdd
                | PacketKind::Flush
                | PacketKind::AtomicWrite
        )
    }
    /// Whether it travels from responder to requester.
    #[inline]
    pub const fn is_response(self) -> bool {
        matches!(self, PacketKind::ReadResponse | PacketKind::Ack | PacketKind::AtomicAck)
    }
}

bitflags! {
    /// Place in the message, and the headers behind the BTH.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct OpFlags: u16 {
        /// First packet of a message ("only" is first and last)
        const FIRST = 1;
        /// Last packet of a message
        const LAST = 1 << 1;
        /// RDMA extended transport header
        const RETH = 1 << 2;
        /// Immediate data
        const IMM = 1 << 3;
        /// Invalidate extended transport header
        const IETH = 1 << 4;
        /// Atomic extended transport header
        const ATOMIC = 1 << 5;
        /// ACK extended transport header
        const AETH = 1 << 6;
        /// Atomic ACK extended transport header
        const ATOMIC_ACK = 1 << 7;
        /// Datagram extended transport header
        const DETH = 1 << 8;
        /// Payload and padding may follow
        const PAYLOAD = 1 << 9;
        /// 16 reserved bytes of a CNP
        const RESERVED = 1 << 10;
        /// XRC extended transport header
        const XRCETH = 1 << 11;
        /// FLUSH extended transport header
        const FETH = 1 << 12;
        /// Ours: what a responder keeps
        const SACKETH = 1 << 13;
    }
}

const FIRST: OpFlags = OpFlags::FIRST;
const LAST: OpFlags = OpFlags::LAST;
const MIDDLE: OpFlags = OpFlags::empty();
const ONLY: OpFlags = OpFlags::FIRST.union(OpFlags::LAST);

/// What an op-code means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpInfo {
    /// The code itself
    pub code: u8,
    /// BTH and extension headers, bytes
    pub header_len: u8,
    /// Transport of the op-code
    pub transport: Transport,
    /// What it does
    pub kind: PacketKind,
    /// Place and headers
    pub flags: OpFlags,
}

impl OpInfo {
    /// First packet of a message.
    #[inline]
    pub const fn is_first(&self) -> bool {
        self.flags.contains(OpFlags::FIRST)
    }
    /// Last packet of a message.
    #[inline]
    pub const fn is_last(&self) -> bool {
        self.flags.contains(OpFlags::LAST)
    }
    /// First and last.
    #[inline]
    pub const fn is_only(&self) -> bool {
        self.flags.contains(ONLY)
    }
    /// Whether all of `flags` hold.
    #[inline]
    pub const fn has(&self, flags: OpFlags) -> bool {
        self.flags.contains(flags)
    }
}

/// Extension headers and their sizes; the order is theirs on the wire.
const EXTENSIONS: [(OpFlags, u8); 11] = [
    (OpFlags::XRCETH, 4),
    (OpFlags::DETH, 8),
    (OpFlags::FETH, 4),
    (OpFlags::RETH, 16),
    (OpFlags::ATOMIC, 28),
    (OpFlags::AETH, 4),
    (OpFlags::ATOMIC_ACK, 8),
    (OpFlags::IMM, 4),
    (OpFlags::IETH, 4),
    (OpFlags::RESERVED, 16),
    (OpFlags::SACKETH, 48),
];

/// Bytes of a BTH.
pub const BTH_LEN: usize = 12;

const fn op(code: u8, transport: Transport, kind: PacketKind, flags: OpFlags) -> Option<OpInfo> {
    let mut header_len = BTH_LEN as u8;
    let mut i = 0;
    while i < EXTENSIONS.len() {
        if flags.contains(EXTENSIONS[i].0) {
            header_len += EXTENSIONS[i].1;
        }
        i += 1;
    }
    Some(OpInfo { code, header_len, transport, kind, flags })
}

/// SEND and WRITE: six op-codes each, the same for RC and UC (IBTA table 38).
const fn messages(table: &mut [Option<OpInfo>; 256], base: u8, t: Transport) {
    let p = OpFlags::PAYLOAD;
    let imm = p.union(OpFlags::IMM);
    let reth = p.union(OpFlags::RETH);
    let rows = [
        (PacketKind::Send, FIRST.union(p)),
        (PacketKind::Send, MIDDLE.union(p)),
        (PacketKind::Send, LAST.union(p)),
        (PacketKind::Send, LAST.union(imm)),
        (PacketKind::Send, ONLY.union(p)),
        (PacketKind::Send, ONLY.union(imm)),
        (PacketKind::Write, FIRST.union(reth)),
        (PacketKind::Write, MIDDLE.union(p)),
        (PacketKind::Write, LAST.union(p)),
        (PacketKind::Write, LAST.union(imm)),
        (PacketKind::Write, ONLY.union(reth)),
        (PacketKind::Write, ONLY.union(reth).union(imm)),
    ];
    let mut i = 0;
    while i < rows.len() {
        let code = base + i as u8;
        table[code as usize] = op(code, t, rows[i].0, rows[i].1);
        i += 1;
    }
}

const fn table() -> [Option<OpInfo>; 256] {
    use PacketKind::{
        AtomicAck, AtomicWrite, CmpSwap, Cnp, FetchAdd, Flush, ReadRequest, ReadResponse, Send,
    };
    let mut t = [None; 256];
    messages(&mut t, 0x00, Transport::Rc);
    messages(&mut t, 0x20, Transport::Uc);
    let p = OpFlags::PAYLOAD;
    let aeth = OpFlags::AETH;
    let rows = [
        (0x0c, Transport::Rc, ReadRequest, ONLY.union(OpFlags::RETH)),
        (0x0d, Transport::Rc, ReadResponse, FIRST.union(aeth).union(p)),
        (0x0e, Transport::Rc, ReadResponse, MIDDLE.union(p)),
        (0x0f, Transport::Rc, ReadResponse, LAST.union(aeth).union(p)),
        (0x10, Transport::Rc, ReadResponse, ONLY.union(aeth).union(p)),
        (0x11, Transport::Rc, PacketKind::Ack, ONLY.union(aeth)),
        (0x12, Transport::Rc, AtomicAck, ONLY.union(aeth).union(OpFlags::ATOMIC_ACK)),
        (0x13, Transport::Rc, CmpSwap, ONLY.union(OpFlags::ATOMIC)),
        (0x14, Transport::Rc, FetchAdd, ONLY.union(OpFlags::ATOMIC)),
        (0x16, Transport::Rc, Send, LAST.union(OpFlags::IETH).union(p)),
        (0x17, Transport::Rc, Send, ONLY.union(OpFlags::IETH).union(p)),
        (0x1c, Transport::Rc, Flush, ONLY.union(OpFlags::FETH).union(OpFlags::RETH)),
        (0x1d, Transport::Rc, AtomicWrite, ONLY.union(OpFlags::RETH).union(p)),
        (0x64, Transport::Ud, Send, ONLY.union(OpFlags::DETH).union(p)),
        (0x65, Transport::Ud, Send, ONLY.union(OpFlags::DETH).union(OpFlags::IMM).union(p)),
        (0x81, Transport::Cnp, Cnp, ONLY.union(OpFlags::RESERVED)),
        (0xc0, Transport::Own, PacketKind::Probe, ONLY.union(OpFlags::DETH)),
        (0xc1, Transport::Own, PacketKind::ProbeAnswer, ONLY.union(OpFlags::DETH)),
        (0xc2, Transport::Own, PacketKind::Sack, ONLY.union(aeth).union(OpFlags::SACKETH)),
        (0xc3, Transport::Own, PacketKind::Negotiate, ONLY.union(OpFlags::DETH).union(p)),
        (0xc4, Transport::Own, PacketKind::Dialect, ONLY.union(OpFlags::DETH).union(OpFlags::IMM)),
    ];
    let mut i = 0;
    while i < rows.len() {
        let (code, transport, kind, flags) = rows[i];
        t[code as usize] = op(code, transport, kind, flags);
        i += 1;
    }
    /* XRC is RC with one more header in what goes from requester to responder (annex A14.4). */
    let mut low = 0;
    while low < 0x20 {
        if let Some(rc) = t[low] {
            let code = code::XRC + low as u8;
            let eth = if rc.kind.is_request() { OpFlags::XRCETH } else { OpFlags::empty() };
            t[code as usize] = op(code, Transport::Xrc, rc.kind, rc.flags.union(eth));
        }
        low += 1;
    }
    t
}

static OPS: [Option<OpInfo>; 256] = table();

/// StRoM's dialect of RC: what 0x18 to 0x1c mean there.
static RPC_OPS: [Option<OpInfo>; 5] = {
    let (p, reth) = (OpFlags::PAYLOAD, OpFlags::RETH.union(OpFlags::PAYLOAD));
    [
        op(code::RPC, Transport::Rc, PacketKind::Rpc, ONLY.union(reth)),
        op(code::RPC_WRITE_FIRST, Transport::Rc, PacketKind::RpcWrite, FIRST.union(reth)),
        op(code::RPC_WRITE_MIDDLE, Transport::Rc, PacketKind::RpcWrite, MIDDLE.union(p)),
        op(code::RPC_WRITE_LAST, Transport::Rc, PacketKind::RpcWrite, LAST.union(p)),
        op(code::RPC_WRITE_ONLY, Transport::Rc, PacketKind::RpcWrite, ONLY.union(reth)),
    ]
};

/// What `code` means in StRoM's dialect, where that is something else.
pub fn rpc_info(code: u8) -> Option<&'static OpInfo> {
    RPC_OPS.get(usize::from(code.checked_sub(code::RPC)?))?.as_ref()
}

/// What `code` means; `None` for codes this card does not know.
#[inline]
pub fn op_info(code: u8) -> Option<&'static OpInfo> {
    OPS[usize::from(code)].as_ref()
}

/// The op-code of a request packet of `op` on a QP of type `qp` at its place in the message;
/// `None` where the transport does not offer it (IBTA table 36).
#[inline]
pub const fn request_code(qp: QpType, op: SendOp, first: bool, last: bool) -> Option<u8> {
    let place = match (first, last) {
        (true, false) => 0,
        (false, false) => 1,
        (false, true) => 2,
        (true, true) => 4,
    };
    let imm = (op.has_imm() && last) as u8;
    let low = match op {
        SendOp::Send | SendOp::SendImm => place + imm,
        SendOp::SendInv if last => code::RC_SEND_LAST_INV + first as u8,
        SendOp::SendInv => place,
        SendOp::Write | SendOp::WriteImm => 6 + place + imm,
        SendOp::Read => code::RC_READ_REQUEST,
        SendOp::CmpSwap => code::RC_CMP_SWAP,
        SendOp::FetchAdd => code::RC_FETCH_ADD,
        SendOp::Flush => code::RC_FLUSH,
        SendOp::AtomicWrite => code::RC_ATOMIC_WRITE,
        SendOp::Rpc => code::RPC,
        SendOp::RpcWrite if first && last => code::RPC_WRITE_ONLY,
        SendOp::RpcWrite => code::RPC_WRITE_FIRST + place,
        SendOp::LocalInv | SendOp::BindMw | SendOp::Malformed => return None,
    };
    match qp {
        QpType::Rc => Some(low),
        QpType::XrcSend => Some(code::XRC + low),
        QpType::Uc if low < 0x0c => Some(0x20 + low),
        QpType::Ud if low == 4 || low == 5 => Some(0x60 + low),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_its_own_codes() {
        let known = (0..=255u8).filter_map(op_info).count();
        assert_eq!(known, 12 + 12 + 20 + 26);
        for c in 0..=255u8 {
            if let Some(info) = op_info(c) {
                assert_eq!(info.code, c);
                assert!(usize::from(info.header_len) >= BTH_LEN && info.header_len % 4 == 0);
            }
        }
    }

    /// Sizes from IBTA vol. 1, 9.2 to 9.3.
    #[test]
    fn header_lengths() {
        let len = |c| op_info(c).unwrap().header_len;
        assert_eq!(len(code::RC_SEND_FIRST), 12);
        assert_eq!(len(code::RC_SEND_LAST_IMM), 16);
        assert_eq!(len(code::RC_WRITE_ONLY_IMM), 32);
        assert_eq!(len(code::RC_READ_REQUEST), 28);
        assert_eq!(len(code::RC_READ_RESPONSE_MIDDLE), 12);
        assert_eq!(len(code::RC_READ_RESPONSE_LAST), 16);
        assert_eq!(len(code::RC_ACK), 16);
        assert_eq!(len(code::RC_ATOMIC_ACK), 24);
        assert_eq!(len(code::RC_CMP_SWAP), 40);
        assert_eq!(len(code::RC_SEND_ONLY_INV), 16);
        assert_eq!(len(code::RC_FLUSH), 32);
        assert_eq!(len(code::RC_ATOMIC_WRITE), 28);
        assert_eq!(len(code::UD_SEND_ONLY_IMM), 24);
        assert_eq!(len(code::CNP), 28);
        assert_eq!(len(code::SACK), 64);
        assert_eq!(len(code::XRC + code::RC_SEND_MIDDLE), 16);
        assert_eq!(len(code::XRC + code::RC_WRITE_ONLY_IMM), 36);
        assert_eq!(len(code::XRC + code::RC_CMP_SWAP), 44);
        assert_eq!(len(code::XRC + code::RC_FLUSH), 36);
        assert_eq!(len(code::XRC + code::RC_READ_RESPONSE_LAST), 16);
        assert_eq!(len(code::XRC + code::RC_ACK), 16);
    }

    #[test]
    fn requests_by_transport() {
        use QpType::{Rc, Uc, Ud};
        assert_eq!(request_code(Rc, SendOp::Send, true, true), Some(code::RC_SEND_ONLY));
        assert_eq!(request_code(Rc, SendOp::SendImm, true, false), Some(code::RC_SEND_FIRST));
        assert_eq!(request_code(Rc, SendOp::SendImm, false, true), Some(code::RC_SEND_LAST_IMM));
        assert_eq!(request_code(Rc, SendOp::WriteImm, true, true), Some(code::RC_WRITE_ONLY_IMM));
        assert_eq!(request_code(Rc, SendOp::Write, false, false), Some(code::RC_WRITE_MIDDLE));
        assert_eq!(request_code(Rc, SendOp::SendInv, true, true), Some(code::RC_SEND_ONLY_INV));
        assert_eq!(request_code(Rc, SendOp::SendInv, false, true), Some(code::RC_SEND_LAST_INV));
        assert_eq!(request_code(Rc, SendOp::SendInv, false, false), Some(code::RC_SEND_MIDDLE));
        assert_eq!(request_code(Uc, SendOp::SendInv, true, true), None);
        assert_eq!(request_code(Rc, SendOp::BindMw, true, true), None);
        assert_eq!(request_code(Uc, SendOp::WriteImm, false, true), Some(code::UC_WRITE_LAST_IMM));
        assert_eq!(request_code(Uc, SendOp::Read, true, true), None);
        assert_eq!(request_code(QpType::XrcSend, SendOp::AtomicWrite, true, true), Some(0xbd));
        assert_eq!(request_code(Uc, SendOp::Flush, true, true), None);
        assert_eq!(request_code(Ud, SendOp::SendImm, true, true), Some(code::UD_SEND_ONLY_IMM));
        assert_eq!(request_code(Ud, SendOp::Send, true, false), None);
        assert_eq!(request_code(Ud, SendOp::Write, true, true), None);
    }
}
