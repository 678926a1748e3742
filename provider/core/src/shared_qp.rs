//! Messages between processes of an XRC domain about a shared receiving QP, which several of them have open
//! (ibv_open_qp(3)). The QP is on its *owner's* card; other processes *attach* to it and send requests.
//!
//! Owns the messages and their encoding, which is distinct from that of [`relay`](crate::relay); it must not
//! know how they travel.

use crate::qp::{PathMig, QpAttr, QpAttrMask};
use crate::types::{Access, Av, Gid, Mtu, Psn, QpState, Qpn};

/// One message. The process that sends a request chooses its `serial`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SharedQpMessage {
    /// To the owner of a QP
    Request {
        /// Names the request
        serial: u32,
        /// The QP
        qpn: Qpn,
        /// What is requested
        request: SharedQpRequest,
    },
    /// To the owner: the QP is not open here any more
    Detach {
        /// The QP
        qpn: Qpn,
    },
    /// From the owner
    Reply {
        /// That of the request
        serial: u32,
        /// 0: done
        errno: u32,
        /// The QP's current attributes
        attr: QpAttr,
    },
    /// From the owner: an async event
    Event {
        /// The QP
        qpn: Qpn,
        /// `enum ibv_event_type`
        kind: u32,
    },
}

/// A request to the owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SharedQpRequest {
    /// ibv_open_qp(3): the requester is attached to the queue pair from now on
    Attach,
    /// ibv_query_qp(3): all attributes
    Query,
    /// ibv_modify_qp(3): the attributes that are named
    Modify(QpAttr, QpAttrMask),
}

/// Bytes of any message.
pub const BYTES: usize = WORDS * 4;
const WORDS: usize = HEAD + ATTR;
/// Kind, serial, QPN, number
const HEAD: usize = 4;
/// Those of a [`QpAttr`]
const ATTR: usize = 20;

/// Kinds of message, beyond those of the relay.
const ATTACH: u32 = 0x100;
const QUERY: u32 = 0x101;
const MODIFY: u32 = 0x102;
const DETACH: u32 = 0x103;
const REPLY: u32 = 0x104;
const EVENT: u32 = 0x105;

impl SharedQpMessage {
    /// Its bytes.
    pub fn encode(&self) -> [u8; BYTES] {
        let (head, attr) = match *self {
            SharedQpMessage::Request { serial, qpn, request: SharedQpRequest::Attach } => {
                ([ATTACH, serial, qpn, 0], QpAttr::default())
            }
            SharedQpMessage::Request { serial, qpn, request: SharedQpRequest::Query } => {
                ([QUERY, serial, qpn, 0], QpAttr::default())
            }
            SharedQpMessage::Request { serial, qpn, request: SharedQpRequest::Modify(attr, mask) } => {
                ([MODIFY, serial, qpn, mask.bits()], attr)
            }
            SharedQpMessage::Detach { qpn } => ([DETACH, 0, qpn, 0], QpAttr::default()),
            SharedQpMessage::Reply { serial, errno, attr } => ([REPLY, serial, 0, errno], attr),
            SharedQpMessage::Event { qpn, kind } => ([EVENT, 0, qpn, kind], QpAttr::default()),
        };
        let mut bytes = [0; BYTES];
        let words = head.into_iter().chain(attr_words(&attr));
        for (to, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *to = word.to_ne_bytes();
        }
        bytes
    }

    /// The message that these bytes are; `None`: none of these.
    pub fn decode(bytes: &[u8]) -> Option<SharedQpMessage> {
        let mut w = [0; WORDS];
        for (to, word) in w.iter_mut().zip(<&[u8; BYTES]>::try_from(bytes).ok()?.as_chunks::<4>().0) {
            *to = u32::from_ne_bytes(*word);
        }
        let ([kind, serial, qpn, number], attr) = (*w.first_chunk()?, attr_of(w.last_chunk()?)?);
        let request = |request| SharedQpMessage::Request { serial, qpn, request };
        Some(match kind {
            ATTACH => request(SharedQpRequest::Attach),
            QUERY => request(SharedQpRequest::Query),
            MODIFY => request(SharedQpRequest::Modify(attr, QpAttrMask::from_bits(number)?)),
            DETACH => SharedQpMessage::Detach { qpn },
            REPLY => SharedQpMessage::Reply { serial, errno: number, attr },
            EVENT => SharedQpMessage::Event { qpn, kind: number },
            _ => return None,
        })
    }
}

/// Four bytes as a word.
fn pack(bytes: [u8; 4]) -> u32 {
    u32::from_le_bytes(bytes)
}

fn attr_words(attr: &QpAttr) -> [u32; ATTR] {
    let av = &attr.av;
    let flags = u8::from(attr.en_sqd_async_notify) | u8::from(attr.sq_draining) << 1;
    let (pkey, dlid) = (attr.pkey_index.to_le_bytes(), av.dlid.to_le_bytes());
    let mut words = [0; ATTR];
    words[..12].copy_from_slice(&[
        pack([attr.state as u8, attr.cur_state as u8, attr.path_mtu as u8, attr.path_mig as u8]),
        attr.qkey,
        attr.rq_psn.get(),
        attr.sq_psn.get(),
        attr.dest_qpn,
        attr.access.bits(),
        pack([pkey[0], pkey[1], attr.max_rd_atomic, attr.max_dest_rd_atomic]),
        pack([attr.min_rnr_timer, attr.port_num, attr.timeout, attr.retry_cnt]),
        pack([attr.rnr_retry, flags, dlid[0], dlid[1]]),
        pack([av.sgid_index, av.hop_limit, av.traffic_class, av.sl]),
        av.flow_label,
        pack([av.static_rate, av.src_path_bits, 0, 0]),
    ]);
    let addresses = [av.dgid, av.sgid];
    let fours = addresses.iter().flat_map(|gid| gid.0.as_chunks::<4>().0);
    for (to, four) in words[12..].iter_mut().zip(fours) {
        *to = u32::from_ne_bytes(*four);
    }
    words
}

/// The attributes; `None` where a number has no meaning.
fn attr_of(w: &[u32; ATTR]) -> Option<QpAttr> {
    let byte = |at: usize, which: usize| w[at].to_le_bytes()[which];
    let code = |which| u32::from(byte(0, which));
    let gid = |at: usize| {
        let mut gid = Gid::default();
        for (to, word) in gid.0.as_chunks_mut::<4>().0.iter_mut().zip(&w[at..]) {
            *to = word.to_ne_bytes();
        }
        gid
    };
    let av = Av {
        dgid: gid(12),
        sgid: gid(16),
        sgid_index: byte(9, 0),
        hop_limit: byte(9, 1),
        traffic_class: byte(9, 2),
        sl: byte(9, 3),
        flow_label: w[10],
        dlid: u16::from_le_bytes([byte(8, 2), byte(8, 3)]),
        static_rate: byte(11, 0),
        src_path_bits: byte(11, 1),
    };
    Some(QpAttr {
        state: QpState::from_code(code(0))?,
        cur_state: QpState::from_code(code(1))?,
        path_mtu: Mtu::from_code(code(2))?,
        path_mig: PathMig::from_code(code(3))?,
        qkey: w[1],
        rq_psn: Psn::new(w[2]),
        sq_psn: Psn::new(w[3]),
        dest_qpn: w[4],
        access: Access::from_bits_truncate(w[5]),
        pkey_index: u16::from_le_bytes([byte(6, 0), byte(6, 1)]),
        max_rd_atomic: byte(6, 2),
        max_dest_rd_atomic: byte(6, 3),
        min_rnr_timer: byte(7, 0),
        port_num: byte(7, 1),
        timeout: byte(7, 2),
        retry_cnt: byte(7, 3),
        rnr_retry: byte(8, 0),
        en_sqd_async_notify: byte(8, 1) & 1 != 0,
        sq_draining: byte(8, 1) & 2 != 0,
        av,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::Relay;
    use std::vec;

    fn attr() -> QpAttr {
        let gid = |first: u8| Gid(core::array::from_fn(|at| first + at as u8));
        QpAttr {
            state: QpState::Rtr,
            cur_state: QpState::Init,
            path_mtu: Mtu::M2048,
            qkey: 0x8765_4321,
            rq_psn: Psn::new(0xab_cdef),
            sq_psn: Psn::new(0x12_3456),
            dest_qpn: 0x65_4321,
            access: Access::REMOTE_WRITE | Access::REMOTE_READ,
            av: Av {
                dgid: gid(1),
                sgid: gid(101),
                sgid_index: 1,
                hop_limit: 2,
                traffic_class: 3,
                sl: 4,
                flow_label: 0xf_fffe,
                dlid: 0x5678,
                static_rate: 6,
                src_path_bits: 7,
            },
            pkey_index: 0x1122,
            max_rd_atomic: 8,
            max_dest_rd_atomic: 9,
            min_rnr_timer: 10,
            port_num: 11,
            timeout: 12,
            retry_cnt: 13,
            rnr_retry: 14,
            path_mig: PathMig::Armed,
            en_sqd_async_notify: true,
            sq_draining: true,
        }
    }

    #[test]
    fn messages_survive_encoding() {
        let request = |request| SharedQpMessage::Request { serial: 1, qpn: 2, request };
        for message in [
            request(SharedQpRequest::Attach),
            request(SharedQpRequest::Query),
            request(SharedQpRequest::Modify(attr(), QpAttrMask::STATE | QpAttrMask::AV)),
            SharedQpMessage::Detach { qpn: 3 },
            SharedQpMessage::Reply { serial: 4, errno: 22, attr: attr() },
            SharedQpMessage::Event { qpn: 5, kind: 3 },
        ] {
            let bytes = message.encode();
            assert_eq!(SharedQpMessage::decode(&bytes), Some(message));
            assert_eq!(SharedQpMessage::decode(&bytes[1..]), None);
            assert_eq!(Relay::decode(&bytes), None, "no relay message");
        }
    }

    #[test]
    fn unknown_numbers_are_refused() {
        let message = SharedQpMessage::Reply { serial: 4, errno: 0, attr: attr() };
        for at in 0..4 {
            let mut bytes = message.encode();
            bytes[HEAD * 4 + at] = 99;
            assert_eq!(SharedQpMessage::decode(&bytes), None);
        }
        for kind in [0, 8, ATTACH - 1, EVENT + 1] {
            let mut bytes = message.encode();
            bytes[..4].copy_from_slice(&kind.to_ne_bytes());
            assert_eq!(SharedQpMessage::decode(&bytes), None);
        }
        assert_eq!(SharedQpMessage::decode(&vec![0; 4160]), None);
    }
}
