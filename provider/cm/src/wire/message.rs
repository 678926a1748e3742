//! Whole messages: from a program's parameters, and to those of its events.

use alloc::vec::Vec;
use core::net::SocketAddr;

use starverbs_core::{Gid, Mtu, Psn};

use super::fields::{self, Attribute, apr, dreq, mra, rej, rep, req, sidr_rep, sidr_req};
use super::ip::{self, HEADER_LEN, ip_of};
use super::mad::Mad;
use crate::params::{
    Accept, Connect, ConnectResponse, Ece, PortSpace, QpSide, Request, Resolve, Resolved, Resolving, Service,
    SidrAnswer,
};

/// How long each side is given for an answer, an exponent (4.096 us * 2^n): 4.3 s, as Linux' rdma_cm has it.
pub const RESPONSE_TIMEOUT: u8 = 20;
/// Retries, as Linux' rdma_cm has them.
pub const MAX_RETRIES: u8 = 15;
/// Exponent of the time that an MRA asks for: 69 s, as Linux' rdma_cm does.
pub const SERVICE_TIMEOUT: u8 = 24;
/// What this card takes for an ACK: `local_ca_ack_delay`.
const ACK_DELAY: u8 = 15;
/// The one P_Key.
const PKEY: u64 = 0xffff;
/// The LID of those who have none.
const PERMISSIVE_LID: u64 = 0xffff;
/// 10 Gb/s in the codes of IBTA 9.11.1: RoCE has no static rate, but 0 is reserved.
const RATE: u64 = 3;
/// AP status of an APR: alternate paths are not supported (IBTA 12.8.2).
const AP_UNSUPPORTED: u64 = 2;

/// Which message a REJ or MRA answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum AnsweredMessage {
    /// A REQ is rejected
    Req = 0,
    /// A REP is rejected
    Rep = 1,
    /// REJ: none
    Other = 2,
}

/// The two sides' communication IDs, and the transaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ids {
    /// The sender's
    pub local: u32,
    /// The receiver's; 0 if not known
    pub remote: u32,
    /// Transaction ID
    pub transaction: u64,
}

impl Ids {
    /// Those of an answer to `mad`.
    pub fn answering(mad: &Mad) -> Ids {
        let (local, remote) = (mad.get32(fields::REMOTE_ID), mad.get32(fields::LOCAL_ID));
        Ids { local, remote, transaction: mad.transaction() }
    }
}

fn begin(attribute: Attribute, ids: Ids) -> Mad {
    let mut mad = Mad::new(attribute, ids.transaction);
    mad.set(fields::LOCAL_ID, ids.local.into());
    mad.set(fields::REMOTE_ID, ids.remote.into());
    mad
}

/// A REQ from `connect.local` to `connect.remote`.
pub fn req(ids: Ids, guid: u64, connect: &Connect) -> Mad {
    let mut mad = Mad::new(Attribute::Req, ids.transaction);
    let (service, extended) = match connect.service {
        Service::Rc => (0, 0),
        Service::Uc => (1, 0),
        Service::Xrc => (3, 1),
    };
    let hops = if connect.hop_limit == 0 { 64 } else { connect.hop_limit };
    for (field, value) in [
        (fields::LOCAL_ID, u64::from(ids.local)),
        (req::SERVICE_ID, connect.space.service_id(connect.remote.port())),
        (req::LOCAL_CA_GUID, guid),
        (req::VENDOR_ID, connect.ece.vendor_id.into()),
        (req::LOCAL_QPN, connect.qp.qpn.into()),
        (req::RESPONDER_RESOURCES, connect.responder_resources.into()),
        (req::INITIATOR_DEPTH, connect.initiator_depth.into()),
        (req::REMOTE_RESPONSE_TIMEOUT, RESPONSE_TIMEOUT.into()),
        (req::SERVICE_TYPE, service),
        (req::EXTENDED_TYPE, extended),
        (req::FLOW_CONTROL, connect.flow_control.into()),
        (req::STARTING_PSN, connect.qp.psn.get().into()),
        (req::LOCAL_RESPONSE_TIMEOUT, RESPONSE_TIMEOUT.into()),
        (req::RETRY_COUNT, connect.retry_count.into()),
        (req::PKEY, PKEY),
        (req::PATH_MTU, connect.path_mtu as u64),
        (req::RNR_RETRY_COUNT, connect.rnr_retry_count.into()),
        (req::MAX_CM_RETRIES, MAX_RETRIES.into()),
        (req::SRQ, connect.qp.srq.into()),
        (req::LOCAL_LID, PERMISSIVE_LID),
        (req::REMOTE_LID, PERMISSIVE_LID),
        (req::PACKET_RATE, RATE),
        (req::TRAFFIC_CLASS, connect.traffic_class.into()),
        (req::HOP_LIMIT, hops.into()),
        (req::SL, u64::from(connect.traffic_class >> 5)),
        (req::ACK_TIMEOUT, connect.ack_timeout.into()),
    ] {
        mad.set(field, value);
    }
    mad.set_modifier(connect.ece.options);
    mad.put(req::LOCAL_GID, &ip::gid_of(connect.local.ip()).0);
    mad.put(req::REMOTE_GID, &ip::gid_of(connect.remote.ip()).0);
    mad.put(req::PRIVATE_DATA, &ip::header(connect.local, connect.remote));
    mad.put(req::PRIVATE_DATA + HEADER_LEN, &connect.private_data);
    mad
}

/// Both ends of a request, seen from its receiver.
struct Ends {
    local: SocketAddr,
    remote: SocketAddr,
    space: PortSpace,
}

/// Both ends of a request, as its addressing header and service ID name them, if they are those of the
/// datagram.
fn ends(mad: &Mad, service: u64, header: usize, from: Gid, to: Gid) -> Option<Ends> {
    let (space, port) = PortSpace::of_service(service)?;
    let source = ip::source_port(&mad.array(header), from, to)?;
    let (local, remote) = (SocketAddr::new(ip_of(to), port), SocketAddr::new(ip_of(from), source));
    Some(Ends { local, remote, space })
}

fn service(mad: &Mad) -> Option<Service> {
    match (mad.get8(req::SERVICE_TYPE), mad.get8(req::EXTENDED_TYPE)) {
        (0, _) => Some(Service::Rc),
        (1, _) => Some(Service::Uc),
        (3, 1) => Some(Service::Xrc),
        _ => None,
    }
}

/// Why a REQ is not understood.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BadReq {
    /// Its transport is none that is offered
    Transport,
    /// It has no addressing header, or one of others
    Header,
}

/// What a REQ that came from `from` to `to` asks for.
pub fn request(mad: &Mad, from: Gid, to: Gid) -> Result<Request, BadReq> {
    let service = service(mad).ok_or(BadReq::Transport)?;
    let ends = ends(mad, mad.get(req::SERVICE_ID), req::PRIVATE_DATA, from, to);
    let Ends { local, remote, space } = ends.ok_or(BadReq::Header)?;
    Ok(Request {
        local,
        remote,
        space,
        service,
        qp: QpSide {
            qpn: mad.get32(req::LOCAL_QPN),
            psn: Psn::new(mad.get32(req::STARTING_PSN)),
            srq: mad.get(req::SRQ) == 1,
        },
        responder_resources: mad.get8(req::INITIATOR_DEPTH),
        initiator_depth: mad.get8(req::RESPONDER_RESOURCES),
        flow_control: mad.get(req::FLOW_CONTROL) == 1,
        retry_count: mad.get8(req::RETRY_COUNT),
        rnr_retry_count: mad.get8(req::RNR_RETRY_COUNT),
        path_mtu: Mtu::from_code(mad.get32(req::PATH_MTU)).unwrap_or(Mtu::M256),
        ack_timeout: mad.get8(req::ACK_TIMEOUT),
        traffic_class: mad.get8(req::TRAFFIC_CLASS),
        hop_limit: mad.get8(req::HOP_LIMIT),
        ece: Ece { vendor_id: mad.get32(req::VENDOR_ID), options: mad.modifier() },
        private_data: mad.tail(req::PRIVATE_DATA + HEADER_LEN).to_vec(),
    })
}

/// A REP.
pub fn rep(ids: Ids, guid: u64, accept: &Accept) -> Mad {
    let mut mad = begin(Attribute::Rep, ids);
    let [high, middle, low] = rep::VENDOR_ID;
    let vendor = u64::from(accept.ece.vendor_id);
    for (field, value) in [
        (rep::LOCAL_QPN, u64::from(accept.qp.qpn)),
        (rep::STARTING_PSN, accept.qp.psn.get().into()),
        (rep::RESPONDER_RESOURCES, accept.responder_resources.into()),
        (rep::INITIATOR_DEPTH, accept.initiator_depth.into()),
        (rep::TARGET_ACK_DELAY, ACK_DELAY.into()),
        (rep::FAILOVER, 0),
        (rep::FLOW_CONTROL, accept.flow_control.into()),
        (rep::RNR_RETRY_COUNT, accept.rnr_retry_count.into()),
        (rep::SRQ, accept.qp.srq.into()),
        (rep::LOCAL_CA_GUID, guid),
        (high, vendor >> 16),
        (middle, vendor >> 8),
        (low, vendor),
    ] {
        mad.set(field, value);
    }
    mad.set_modifier(accept.ece.options);
    mad.put(rep::PRIVATE_DATA, &accept.private_data);
    mad
}

/// The parameters of a REP.
pub fn response(mad: &Mad) -> ConnectResponse {
    let vendor_id = rep::VENDOR_ID.iter().fold(0, |id, part| id << 8 | mad.get32(*part));
    ConnectResponse {
        qp: QpSide {
            qpn: mad.get32(rep::LOCAL_QPN),
            psn: Psn::new(mad.get32(rep::STARTING_PSN)),
            srq: mad.get(rep::SRQ) == 1,
        },
        responder_resources: mad.get8(rep::INITIATOR_DEPTH),
        initiator_depth: mad.get8(rep::RESPONDER_RESOURCES),
        flow_control: mad.get(rep::FLOW_CONTROL) == 1,
        rnr_retry_count: mad.get8(rep::RNR_RETRY_COUNT),
        target_ack_delay: mad.get8(rep::TARGET_ACK_DELAY),
        ece: Ece { vendor_id, options: mad.modifier() },
        private_data: mad.tail(rep::PRIVATE_DATA).to_vec(),
    }
}

/// An RTU.
pub fn rtu(ids: Ids) -> Mad {
    begin(Attribute::Rtu, ids)
}

/// An MRA that asks for [`SERVICE_TIMEOUT`].
pub fn mra(ids: Ids, answered: AnsweredMessage) -> Mad {
    let mut mad = begin(Attribute::Mra, ids);
    mad.set(mra::MESSAGE, answered as u64);
    mad.set(mra::SERVICE_TIMEOUT, SERVICE_TIMEOUT.into());
    mad
}

/// A REJ with the sender's CA GUID, by which a receiver that is not named (reason 4) is found.
pub fn rej(ids: Ids, answered: AnsweredMessage, reason: u16, guid: Option<u64>, private_data: &[u8]) -> Mad {
    let mut mad = begin(Attribute::Rej, ids);
    mad.set(rej::MESSAGE, answered as u64);
    mad.set(rej::REASON, reason.into());
    if let Some(guid) = guid {
        mad.set(rej::INFO_LENGTH, 8);
        mad.set(rej::INFO, guid);
    }
    mad.put(rej::PRIVATE_DATA, private_data);
    mad
}

/// In a REJ for the path MTU, the one that would do: its code, as in a REQ, in one byte of additional
/// information.
pub fn propose_mtu(mad: &mut Mad, mtu: Mtu) {
    mad.set(rej::INFO_LENGTH, 1);
    mad.set(rej::INFO, u64::from(mtu as u8) << 56);
}

/// What a REJ says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rejection {
    /// Why, by IBTA 12.6.7.2
    pub reason: u16,
    /// The peer's private data
    pub private_data: Vec<u8>,
}

/// What a REJ says.
pub fn rejected(mad: &Mad) -> Rejection {
    let private_data = mad.tail(rej::PRIVATE_DATA).to_vec();
    Rejection { reason: mad.get(rej::REASON) as u16, private_data }
}

/// A DREQ to the owner of `remote_qpn`.
pub fn dreq(ids: Ids, remote_qpn: u32) -> Mad {
    let mut mad = begin(Attribute::Dreq, ids);
    mad.set(dreq::REMOTE_QPN, remote_qpn.into());
    mad
}

/// A DREP.
pub fn drep(ids: Ids) -> Mad {
    begin(Attribute::Drep, ids)
}

/// An APR that refuses.
pub fn apr(ids: Ids) -> Mad {
    let mut mad = begin(Attribute::Apr, ids);
    mad.set(apr::STATUS, AP_UNSUPPORTED);
    mad
}

/// A SIDR_REQ with this request ID.
pub fn sidr_req(id: u32, transaction: u64, resolve: &Resolve) -> Mad {
    let mut mad = Mad::new(Attribute::SidrReq, transaction);
    mad.set(sidr_req::REQUEST_ID, id.into());
    mad.set(sidr_req::PKEY, PKEY);
    mad.set(sidr_req::SERVICE_ID, resolve.space.service_id(resolve.remote.port()));
    mad.put(sidr_req::PRIVATE_DATA, &ip::header(resolve.local, resolve.remote));
    mad.put(sidr_req::PRIVATE_DATA + HEADER_LEN, &resolve.private_data);
    mad
}

/// What a SIDR_REQ that came from `from` to `to` asks for; `None`: it has no addressing header, or one of
/// others.
pub fn resolving(mad: &Mad, from: Gid, to: Gid) -> Option<Resolving> {
    let service = mad.get(sidr_req::SERVICE_ID);
    let Ends { local, remote, space } = ends(mad, service, sidr_req::PRIVATE_DATA, from, to)?;
    let private_data = mad.tail(sidr_req::PRIVATE_DATA + HEADER_LEN).to_vec();
    Some(Resolving { local, remote, space, private_data })
}

/// A SIDR_REP to the SIDR_REQ with this request ID.
pub fn sidr_rep(id: u32, transaction: u64, service: u64, answer: &SidrAnswer) -> Mad {
    let mut mad = Mad::new(Attribute::SidrRep, transaction);
    let vendor = u64::from(answer.ece.vendor_id);
    for (field, value) in [
        (sidr_rep::REQUEST_ID, u64::from(id)),
        (sidr_rep::STATUS, answer.status.into()),
        (sidr_rep::VENDOR_HIGH, vendor >> 8),
        (sidr_rep::VENDOR_LOW, vendor),
        (sidr_rep::QPN, answer.qpn.into()),
        (sidr_rep::SERVICE_ID, service),
        (sidr_rep::QKEY, answer.qkey.into()),
    ] {
        mad.set(field, value);
    }
    mad.set_modifier(answer.ece.options);
    mad.put(sidr_rep::PRIVATE_DATA, &answer.private_data);
    mad
}

/// The result of a SIDR_REP.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Resolution {
    /// Its status, by IBTA 12.11
    pub status: u8,
    /// Where to send to, if the status is 0
    pub resolved: Resolved,
}

/// The result of a SIDR_REP.
pub fn resolved(mad: &Mad) -> Resolution {
    let vendor_id = mad.get32(sidr_rep::VENDOR_HIGH) << 8 | mad.get32(sidr_rep::VENDOR_LOW);
    let resolved = Resolved {
        qpn: mad.get32(sidr_rep::QPN),
        qkey: mad.get32(sidr_rep::QKEY),
        ece: Ece { vendor_id, options: mad.modifier() },
        private_data: mad.tail(sidr_rep::PRIVATE_DATA).to_vec(),
    };
    Resolution { status: mad.get8(sidr_rep::STATUS), resolved }
}
