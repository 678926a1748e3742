//! Requests to an SRQ of another card in the QP's XRC domain (annex A14): they are forwarded to that card,
//! into receive WQEs that it leased.
//!
//! The last packet of such a message is acknowledged when the other card has confirmed that the message is in
//! memory; all later ACKs wait for that. A packet for which there is no lease yet is dropped in silence. When
//! a lease comes, a NAK makes the requester repeat; if it repeats before, or there is no WQE, it gets an RNR
//! NAK. `answers` has the requests that are answered with more than an ACK, `settle` the other card's
//! confirmations.

mod answers;
mod settle;
mod table;

use alloc::boxed::Box;
use alloc::collections::VecDeque;

use table::{LEASE_BATCH, LEASE_LOW, Lease, RemoteSrq, WAITING};
pub(crate) use table::{RemoteSrqId, RemoteSrqs};

use super::{Ctx, MessageInProgress, OwedResponse};
use crate::env::Env;
use crate::error::NicError;
use crate::relay::{LinkError, LinkId, MessageEnd, MessagePart, Relay, RelayOutcome, Returned, TargetMemory};
use crate::room::{Room, TwoEnds};
use crate::types::{Access, Psn, QPN_BLOCK_SHIFT, QpState, WcFlags, WcOpcode};
use crate::wire::headers::{NakCode, Syndrome};
use crate::wire::opcode::PacketKind;
use crate::wire::packet::Packet;

/// Messages of a QP that other cards have not confirmed.
const PENDING: usize = 64;

/// What a QP keeps of forwarded requests. Only QPs of a shared domain have it.
pub(crate) struct Forwarding {
    /// The SRQ that the last request named is another card's: its index in [`RemoteSrqs`]
    srq: Option<usize>,
    /// The leased WQE of the SEND that is under way
    lease: Option<Lease>,
    /// The WRITE that is under way: its serial, and whose memory it is for
    write: Option<(u32, LinkId)>,
    /// How the message that is under way failed: its next packet is answered with that
    failed: Option<RelayOutcome>,
    /// Names this connection of the QP; 0: not named yet
    epoch: u32,
    wait: Wait,
    /// READ responses have been requested up to here
    fetched_to: Psn,
    /// The outstanding fetch, beyond those that came with requests: its first PSN. There is one at a time, as
    /// links keep what is sent to a card that does not read
    fetching: Option<(Psn, LinkId)>,
    /// Forwarded messages that are not confirmed, in PSN order
    pending: VecDeque<UnconfirmedMessage>,
}

/// Whether the expected packet waits for a lease.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wait {
    None,
    /// It was dropped in silence
    Silent(Psn),
    /// It was answered with a NAK
    NakSent(Psn),
}

/// Where a request is forwarded to.
#[derive(Clone, Copy)]
struct ForwardTarget {
    /// Of its message
    serial: u32,
    /// To the SRQ's card
    link: LinkId,
    /// The SRQ that it names
    srq: u32,
}

/// A message that its SRQ's card has not confirmed.
struct UnconfirmedMessage {
    serial: u32,
    link: LinkId,
    /// Of its last packet, and the messages before it
    psn: Psn,
    msn: u32,
    kind: ForwardedKind,
    done: bool,
    /// It has come again
    repeated: bool,
}

/// What a forwarded message is answered with.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ForwardedKind {
    /// An ACK, or an answer without data
    Message,
    /// Bytes; the first ones confirm its access rights
    Read,
    /// The value before
    Atomic,
}

/// Whose SRQ a request names.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SrqLocation {
    /// This card's, or the QP needs no name
    Local,
    /// Another card's
    Remote,
    /// Another card's that does not answer now
    Busy,
    /// None of the domain
    Unknown,
}

impl Forwarding {
    /// With room for all that it may ever keep. `Exhausted`: no memory.
    pub(crate) fn new() -> Result<Box<Forwarding>, NicError> {
        let mut pending = VecDeque::new();
        pending.make_exact_room(PENDING)?;
        Ok(Box::new(Forwarding::with(pending)))
    }

    /// As a new one, in the same memory.
    pub(crate) fn reset(&mut self) {
        let mut pending = core::mem::take(&mut self.pending);
        pending.clear();
        *self = Forwarding::with(pending);
    }

    fn with(pending: VecDeque<UnconfirmedMessage>) -> Forwarding {
        let (wait, fetched_to) = (Wait::None, Psn::default());
        Forwarding {
            srq: None,
            lease: None,
            write: None,
            failed: None,
            epoch: 0,
            wait,
            fetched_to,
            fetching: None,
            pending,
        }
    }

    /// Whether `answer` may be worked on, or, where there is none, the NAK behind all answers. An RNR NAK
    /// may: it names the oldest message that is not confirmed.
    pub(super) fn may_answer(&self, answer: Option<&OwedResponse>, nak: Option<u8>) -> bool {
        let Some(answer) = answer else {
            let syndrome = nak.and_then(Syndrome::from_byte);
            return self.pending.is_empty() || matches!(syndrome, Some(Syndrome::Rnr { .. }));
        };
        let requested = answer.remote_srq().is_some()
            && (answer.psn().before(self.fetched_to) || self.fetching.is_some());
        !requested && self.is_confirmed(answer.psn())
    }

    /// Whether its own request and all before it are confirmed.
    fn is_confirmed(&self, psn: Psn) -> bool {
        self.limit().is_none_or(|(limit, _)| psn.before(limit))
    }

    /// The oldest packet that may not be acknowledged, and the messages before it.
    pub(super) fn limit(&self) -> Option<(Psn, u32)> {
        self.pending.front().map(|p| (p.psn, p.msn))
    }

    /// Whether the packet `psn` waits for a lease.
    fn waits_at(&self, psn: Psn) -> bool {
        matches!(self.wait, Wait::Silent(at) | Wait::NakSent(at) if at == psn)
    }
}

impl<E: Env> Ctx<'_, E> {
    /// Which card has SRQ `number`, and its index if it is this one. The domain is shared.
    pub(super) fn locate_srq(&mut self, number: u32) -> (SrqLocation, u32) {
        let idle = matches!(self.qp.resp.cur, MessageInProgress::Idle);
        let domain = self.qp.pd;
        let Some(fwd) = &mut self.qp.resp.fwd else { return (SrqLocation::Local, number) };
        let remote_srqs = &mut self.sh.remote_srqs;
        if number >> QPN_BLOCK_SHIFT == remote_srqs.block {
            let named =
                if fwd.srq.take().is_none() || idle { SrqLocation::Local } else { SrqLocation::Unknown };
            return (named, number & ((1 << QPN_BLOCK_SHIFT) - 1));
        }
        let same = |remote: &RemoteSrq| remote.number == number && remote.domain == domain;
        let last = fwd.srq.filter(|at| remote_srqs.entries.get(*at).is_some_and(same));
        if last.is_none() && !idle {
            return (SrqLocation::Unknown, number);
        }
        if idle {
            /* the QP no longer waits for an SRQ that it named before */
            fwd.srq = None;
        }
        let at = last.or_else(|| remote_srqs.find(domain, number));
        let linked = at.is_some_and(|at| remote_srqs.entries[at].link.is_some());
        let at = match at {
            Some(at) if linked => at,
            at => match self.env.link(domain, (number >> QPN_BLOCK_SHIFT) as u16) {
                Ok(link) => {
                    if let Some(at) = at {
                        remote_srqs.entries[at].link = Some(link);
                    }
                    match at.or_else(|| remote_srqs.insert(domain, number, link)) {
                        Some(at) => at,
                        None => return (SrqLocation::Busy, number),
                    }
                }
                Err(LinkError::Busy) => return (SrqLocation::Busy, number),
                Err(LinkError::Gone) => return (SrqLocation::Unknown, number),
            },
        };
        if fwd.epoch == 0 {
            fwd.epoch = remote_srqs.next_serial();
        }
        fwd.srq = Some(at);
        (SrqLocation::Remote, number)
    }

    /// The expected packet, for an SRQ of another card.
    pub(super) fn forward(&mut self, packet: &Packet<'_>) {
        if let Some(outcome) = self.qp.resp.fwd.as_mut().and_then(|fwd| fwd.failed.take()) {
            return self.fail_forwarded(outcome);
        }
        let info = packet.op();
        let fits = match (self.qp.resp.cur, info.kind) {
            (MessageInProgress::Idle, _) => info.is_first(),
            (MessageInProgress::Send { .. }, PacketKind::Send)
            | (MessageInProgress::Write { .. }, PacketKind::Write) => !info.is_first(),
            _ => false,
        };
        if !fits || !self.middle_is_full(packet.payload().len(), info.is_last()) {
            return self.refuse(NakCode::InvalidRequest);
        }
        match info.kind {
            PacketKind::Send => self.forward_send(packet),
            PacketKind::Write => self.forward_write(packet),
            PacketKind::ReadRequest => self.forward_read(packet),
            _ => self.forward_operation(packet),
        }
    }

    fn forward_send(&mut self, packet: &Packet<'_>) {
        let (info, data) = (packet.op(), packet.payload());
        let begins = info.is_first();
        let Some(lease) = self.take_lease(begins) else { return };
        let received = self.qp.resp.cur.received();
        let total = received + data.len() as u32;
        if total > lease.room {
            self.return_lease(lease, Returned::TooLong);
            return self.refuse(NakCode::InvalidRequest);
        }
        let end = info.is_last().then(|| self.end_of(packet));
        let part = self.part(lease.id, lease.serial, received, end);
        if !self.env.relay(lease.link, &Relay::Data { part, data }) {
            self.put_back_lease(lease, begins);
            return self.defer_request();
        }
        self.sh.stats.rx_bytes.add(data.len() as u64);
        let last = info.is_last();
        let Some(fwd) = &mut self.qp.resp.fwd else { return };
        fwd.lease = (!last).then_some(lease);
        self.qp.resp.cur = match last {
            true => MessageInProgress::Idle,
            false => MessageInProgress::Send { received: total, opcode: WcOpcode::Recv },
        };
        self.forwarded(packet, lease.serial, lease.link, ForwardedKind::Message, 1);
    }

    /// An RDMA WRITE. The other card checks its keys, as they belong to the SRQ's protection domain
    /// (A14.5).
    fn forward_write(&mut self, packet: &Packet<'_>) {
        let (info, data) = (packet.op(), packet.payload());
        let (va, key, left, total) = match (self.qp.resp.cur, packet.reth()) {
            (MessageInProgress::Write { va, key, left, total }, _) => (va, key, left, total),
            (_, Some(reth)) => (reth.va(), reth.rkey(), reth.dma_len(), reth.dma_len()),
            _ => return self.refuse(NakCode::InvalidRequest),
        };
        let (len, last) = (data.len() as u32, info.is_last());
        let right_size = if last { len == left } else { len < left };
        if !right_size || total > self.sh.cfg.max_msg {
            return self.refuse(NakCode::InvalidRequest);
        }
        if !self.qp.attr.access.contains(Access::REMOTE_WRITE) {
            return self.violate();
        }
        let lease = match packet.imm() {
            Some(_) => match self.take_lease(true) {
                Some(lease) => Some(lease),
                None => return,
            },
            None => None,
        };
        let to = self.forward_target(info.is_first(), last);
        let sent = to.is_some_and(|ForwardTarget { serial, link, srq }| {
            let end = last.then(|| self.end_of(packet));
            let part = self.part(lease.map_or(u32::MAX, |lease| lease.id), serial, total - left, end);
            self.env.relay(link, &Relay::Write { part, place: TargetMemory { srq, va, key, total }, data })
        });
        let Some(ForwardTarget { serial, link, .. }) = to.filter(|_| sent) else {
            lease.into_iter().for_each(|lease| self.put_back_lease(lease, true));
            return self.defer_request();
        };
        self.sh.stats.rx_bytes.add(u64::from(len));
        let Some(fwd) = &mut self.qp.resp.fwd else { return };
        fwd.write = (!last).then_some((serial, link));
        self.qp.resp.cur = match last {
            true => MessageInProgress::Idle,
            false => {
                MessageInProgress::Write { va: va.wrapping_add(u64::from(len)), key, left: left - len, total }
            }
        };
        self.forwarded(packet, serial, link, ForwardedKind::Message, 1);
    }

    /// Where a WRITE or other request goes. `None`: not now.
    fn forward_target(&mut self, first: bool, last: bool) -> Option<ForwardTarget> {
        let fwd = self.qp.resp.fwd.as_ref()?;
        let remote = self.sh.remote_srqs.entries.get(fwd.srq?)?;
        let (link, srq) = (remote.link?, remote.number);
        if last && fwd.pending.len() >= PENDING {
            return None;
        }
        let serial = if first { self.sh.remote_srqs.next_serial() } else { fwd.write?.0 };
        Some(ForwardTarget { serial, link, srq })
    }

    fn part(&self, lease: u32, serial: u32, offset: u32, end: Option<MessageEnd>) -> MessagePart {
        let epoch = self.qp.resp.fwd.as_ref().map_or(0, |fwd| fwd.epoch);
        MessagePart { lease, serial, qpn: self.qp.qpn, epoch, offset, end }
    }

    /// The packet has been forwarded; the next request's PSN is `packets` later.
    fn forwarded(
        &mut self,
        packet: &Packet<'_>,
        serial: u32,
        link: LinkId,
        kind: ForwardedKind,
        packets: u32,
    ) {
        let last = packet.op().is_last();
        let resp = &mut self.qp.resp;
        let Some(fwd) = &mut resp.fwd else { return };
        fwd.wait = Wait::None;
        if last {
            fwd.pending.push_in_room(UnconfirmedMessage {
                serial,
                link,
                psn: resp.epsn,
                msn: resp.msn,
                kind,
                done: false,
                repeated: false,
            });
        }
        self.accept(packet, packets, last);
        if packet.op().is_first() && packet.op().kind == PacketKind::Send {
            self.request_leases();
        }
    }

    fn end_of(&self, packet: &Packet<'_>) -> MessageEnd {
        let mut flags = WcFlags::empty();
        flags.set(WcFlags::WITH_IMM, packet.imm().is_some());
        flags.set(WcFlags::WITH_INV, packet.ieth().is_some());
        let imm = packet.imm().or(packet.ieth()).unwrap_or_default();
        MessageEnd { src_qp: self.qp.attr.dest_qpn, imm, flags, solicited: packet.bth().solicited() }
    }

    /// The lease of the message under way, or one for a message that begins. `None`: the packet is refused or
    /// deferred.
    fn take_lease(&mut self, begins: bool) -> Option<Lease> {
        let fwd = self.qp.resp.fwd.as_mut()?;
        if !begins {
            if fwd.lease.is_none() {
                self.refuse(NakCode::InvalidRequest);
            }
            return self.qp.resp.fwd.as_ref()?.lease;
        }
        let remote = self.sh.remote_srqs.entries.get_mut(fwd.srq?)?;
        let lease = if fwd.pending.len() < PENDING { remote.leases.pop_front() } else { None };
        match lease {
            Some(lease) => Some(Lease { serial: self.sh.remote_srqs.next_serial(), ..lease }),
            None => {
                self.request_leases();
                self.defer_request();
                None
            }
        }
    }

    /// Requests more leases of the SRQ if there are few. After the message that uses one, as it must not take
    /// the last room on the link.
    fn request_leases(&mut self) {
        let at = self.qp.resp.fwd.as_ref().and_then(|fwd| fwd.srq);
        let Some(remote) = at.and_then(|at| self.sh.remote_srqs.entries.get_mut(at)) else { return };
        if let Some(link) = remote.link
            && remote.leases.len() < LEASE_LOW
            && !remote.requested
        {
            let count = LEASE_BATCH - remote.leases.len() as u32;
            remote.requested = self.env.relay(link, &Relay::RequestLease { srq: remote.number, count });
        }
    }

    /// Keeps the lease of a packet that could not be forwarded.
    fn put_back_lease(&mut self, lease: Lease, begins: bool) {
        let Some(fwd) = &mut self.qp.resp.fwd else { return };
        if !begins {
            fwd.lease = Some(lease);
            return;
        }
        match fwd.srq.and_then(|at| self.sh.remote_srqs.entries.get_mut(at)) {
            Some(remote) if remote.link == Some(lease.link) => remote.leases.push_front_in_room(lease),
            _ => self.return_lease(lease, Returned::Unused),
        }
    }

    /// A request came again that has no answer of its own. The oldest message that may not be acknowledged
    /// yet is about to be the first time; then its card does not run, and the requester, told that the
    /// receiver is not ready, asks for as long as its program says. What it repeats behind that says nothing.
    pub(super) fn acknowledge_again(&mut self, psn: Psn) {
        let oldest = self.qp.resp.fwd.as_mut().and_then(|fwd| fwd.pending.front_mut());
        let stuck = oldest.is_some_and(|oldest| {
            oldest.psn == psn
                && oldest.kind == ForwardedKind::Message
                && core::mem::replace(&mut oldest.repeated, true)
        });
        if stuck {
            self.owe_nak(Syndrome::Rnr { timer: self.qp.attr.min_rnr_timer & 31 });
        } else {
            self.owe_ack();
        }
    }

    /// The packet cannot be taken now. The first time it is dropped in silence: the lease may come at once.
    pub(super) fn defer_request(&mut self) {
        let resp = &mut self.qp.resp;
        let psn = resp.epsn;
        let Some(fwd) = &mut resp.fwd else { return };
        let again = fwd.waits_at(psn);
        fwd.wait = if again { Wait::NakSent(psn) } else { Wait::Silent(psn) };
        resp.nak_sent = true;
        if let Some(remote) = fwd.srq.and_then(|at| self.sh.remote_srqs.entries.get_mut(at))
            && remote.waiting.len() < WAITING
            && !remote.waiting.contains(&self.qp.qpn)
        {
            remote.waiting.push_in_room(self.qp.qpn);
        }
        if again {
            self.owe_nak(Syndrome::Rnr { timer: self.qp.attr.min_rnr_timer & 31 });
        }
    }

    /// Whether the last request named that SRQ: a QP may be in the waiting list of one for which it no longer
    /// waits.
    pub(crate) fn waits_for_srq(&self, link: LinkId, number: u32) -> bool {
        let named = self.qp.resp.fwd.as_ref().and_then(|fwd| self.sh.remote_srqs.entries.get(fwd.srq?));
        named.is_some_and(|remote| remote.link == Some(link) && remote.number == number)
    }

    /// The wait of a deferred packet is over: the requester is to repeat it. `available` false: there is no
    /// WQE.
    pub(crate) fn resume_deferred(&mut self, available: bool) {
        let connected = self.connected();
        let resp = &mut self.qp.resp;
        let psn = resp.epsn;
        let Some(fwd) = &mut resp.fwd else { return };
        if fwd.wait != Wait::Silent(psn) || !connected {
            return;
        }
        fwd.wait = Wait::NakSent(psn);
        let timer = self.qp.attr.min_rnr_timer & 31;
        self.owe_nak(if available { Syndrome::Nak(NakCode::SequenceError) } else { Syndrome::Rnr { timer } });
    }

    /// The SRQ that the waiting packet named does not exist.
    pub(crate) fn srq_is_gone(&mut self) {
        let psn = self.qp.resp.epsn;
        let waits = self.qp.resp.fwd.as_ref().is_some_and(|fwd| fwd.waits_at(psn));
        if waits && self.connected() {
            self.refuse(NakCode::InvalidRequest);
        }
    }

    fn connected(&self) -> bool {
        matches!(self.qp.state, QpState::Rtr | QpState::Rts | QpState::Sqd)
    }

    /// The QP gives up the forwarded message under way.
    pub(crate) fn abandon_forwarded(&mut self) {
        let Some(fwd) = &mut self.qp.resp.fwd else { return };
        (fwd.write, fwd.failed) = (None, None);
        if let Some(lease) = fwd.lease.take() {
            self.return_lease(lease, Returned::Flushed);
        }
    }

    fn return_lease(&mut self, lease: Lease, why: Returned) {
        if let Some(fwd) = &mut self.qp.resp.fwd {
            fwd.lease = None;
        }
        self.env.relay(lease.link, &Relay::Return { lease: lease.id, qpn: self.qp.qpn, why });
    }
}
