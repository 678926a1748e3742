//! Messages to an SRQ of another card in the QP's XRC domain (annex A14): what arrives is passed on to that
//! card, into receive WQEs that it lent.
//!
//! The last packet of such a message is acknowledged when the other card says that the message is in memory,
//! so all that comes behind it waits for that with its ACK. A packet for which there is no WQE yet is dropped
//! in silence: when one comes, the requester is told to repeat; if it repeats before, or there is none, it
//! gets an RNR NAK. `answers` has the requests that are answered with more than an ACK, `settle` what the
//! other card says of all.

mod abroad;
mod answers;
mod settle;

use alloc::boxed::Box;
use alloc::collections::VecDeque;

pub(crate) use abroad::{Abroad, FarId};
use abroad::{BATCH, FEW, Far, Loan, WAITING};

use super::{Answer, Ctx, Inbound};
use crate::env::Env;
use crate::error::NicError;
use crate::relay::{End, LinkError, LinkId, Part, Place, Relay, Returned};
use crate::room::{Room, TwoEnds};
use crate::types::{Access, Psn, QPN_BLOCK_SHIFT, QpState, WcFlags, WcOpcode};
use crate::wire::headers::{NakCode, Syndrome};
use crate::wire::opcode::Kind;
use crate::wire::packet::Packet;

/// Messages of a QP that other cards have not confirmed.
const PENDING: usize = 64;

/// What a QP keeps whose domain is shared with other cards.
pub(crate) struct Away {
    /// The SRQ that the last request named is another card's: its place among [`Far`]
    srq: Option<usize>,
    /// The WQE of the SEND that is under way
    loan: Option<Loan>,
    /// The WRITE that is under way: its serial, and whose memory it is for
    write: Option<(u32, LinkId)>,
    /// Names this connection of the QP; 0: not named yet
    epoch: u32,
    waits: Waits,
    /// Bytes of READs' answers were asked for as far as here
    asked: Psn,
    /// Beside those that came with requests: from here on, and nothing came yet. Nothing more is asked for
    /// until then, as links keep what is asked of a card that does not read
    asking: Option<(Psn, LinkId)>,
    /// Messages that are passed on and not confirmed, in PSN order
    pending: VecDeque<Pending>,
}

/// Whether a packet found no WQE.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Waits {
    No,
    /// Nothing was said yet
    Silent(Psn),
    /// The requester had an RNR NAK
    Told(Psn),
}

/// A message that waits for its card.
struct Pending {
    serial: u32,
    link: LinkId,
    /// Of its last packet, and the messages before it
    psn: Psn,
    msn: u32,
    what: What,
    done: bool,
}

/// What a message asks for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    /// No more than an acknowledge, or an answer that says as much
    Message,
    /// Bytes, the first of which say that it may have them
    Read,
    /// What was there before
    Atomic,
}

/// Whose SRQ a request names.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Named {
    /// This card's, or the QP needs no name
    Here,
    /// Another card's
    Far,
    /// Another card's that does not answer now
    Busy,
    /// None of the domain
    Nobodys,
}

impl Away {
    /// With room for all that it may ever keep. `Exhausted`: no memory.
    pub(crate) fn new() -> Result<Box<Away>, NicError> {
        let mut pending = VecDeque::new();
        pending.make_exact_room(PENDING)?;
        Ok(Box::new(Away::with(pending)))
    }

    /// As a new one, in the same memory.
    pub(crate) fn reset(&mut self) {
        let mut pending = core::mem::take(&mut self.pending);
        pending.clear();
        *self = Away::with(pending);
    }

    fn with(pending: VecDeque<Pending>) -> Away {
        let (waits, asked) = (Waits::No, Psn::default());
        Away { srq: None, loan: None, write: None, epoch: 0, waits, asked, asking: None, pending }
    }

    /// Whether `answer` may be worked on, or, where there is none, the NAK behind all answers.
    pub(super) fn lets_out(&self, answer: Option<&Answer>) -> bool {
        let Some(answer) = answer else { return self.pending.is_empty() };
        let comes = answer.far().is_some() && (answer.psn().before(self.asked) || self.asking.is_some());
        !comes && self.is_confirmed(answer.psn())
    }

    /// Whether all before `psn`, and its own request, is confirmed.
    fn is_confirmed(&self, psn: Psn) -> bool {
        self.limit().is_none_or(|(limit, _)| psn.before(limit))
    }

    /// The oldest packet that may not be acknowledged, and the messages before it.
    pub(super) fn limit(&self) -> Option<(Psn, u32)> {
        self.pending.front().map(|p| (p.psn, p.msn))
    }

    /// Whether the packet `psn` found no WQE.
    fn waits_at(&self, psn: Psn) -> bool {
        matches!(self.waits, Waits::Silent(at) | Waits::Told(at) if at == psn)
    }
}

impl<E: Env> Ctx<'_, E> {
    /// Whose SRQ `number` is, and where on this card. The domain is shared.
    pub(super) fn name_abroad(&mut self, number: u32) -> (Named, u32) {
        let idle = matches!(self.qp.resp.cur, Inbound::Idle);
        let domain = self.qp.pd;
        let Some(away) = &mut self.qp.resp.away else { return (Named::Here, number) };
        let abroad = &mut self.sh.abroad;
        if number >> QPN_BLOCK_SHIFT == abroad.home {
            let named = if away.srq.take().is_none() || idle { Named::Here } else { Named::Nobodys };
            return (named, number & ((1 << QPN_BLOCK_SHIFT) - 1));
        }
        let same = |far: &Far| far.number == number && far.domain == domain;
        let last = away.srq.filter(|at| abroad.srqs.get(*at).is_some_and(same));
        if last.is_none() && !idle {
            return (Named::Nobodys, number);
        }
        if idle {
            /* until it is found, the QP waits for none that it named before */
            away.srq = None;
        }
        let at = last.or_else(|| abroad.find(domain, number));
        let linked = at.is_some_and(|at| abroad.srqs[at].link.is_some());
        let at = match at {
            Some(at) if linked => at,
            at => match self.env.link(domain, (number >> QPN_BLOCK_SHIFT) as u16) {
                Ok(link) => {
                    if let Some(at) = at {
                        abroad.srqs[at].link = Some(link);
                    }
                    match at.or_else(|| abroad.place(domain, number, link)) {
                        Some(at) => at,
                        None => return (Named::Busy, number),
                    }
                }
                Err(LinkError::Busy) => return (Named::Busy, number),
                Err(LinkError::Gone) => return (Named::Nobodys, number),
            },
        };
        if away.epoch == 0 {
            away.epoch = abroad.next_serial();
        }
        away.srq = Some(at);
        (Named::Far, number)
    }

    /// The expected packet, for an SRQ of another card.
    pub(super) fn execute_abroad(&mut self, packet: &Packet<'_>) {
        let info = packet.op();
        let fits = match (self.qp.resp.cur, info.kind) {
            (Inbound::Idle, _) => info.is_first(),
            (Inbound::Send { .. }, Kind::Send) | (Inbound::Write { .. }, Kind::Write) => !info.is_first(),
            _ => false,
        };
        if !fits || !self.middle_is_full(packet.payload().len(), info.is_last()) {
            return self.refuse(NakCode::InvalidRequest);
        }
        match info.kind {
            Kind::Send => self.pass_send(packet),
            Kind::Write => self.pass_write(packet),
            Kind::ReadRequest => self.pass_read(packet),
            _ => self.pass_operation(packet),
        }
    }

    fn pass_send(&mut self, packet: &Packet<'_>) {
        let (info, data) = (packet.op(), packet.payload());
        let begins = info.is_first();
        let Some(loan) = self.held_loan(begins) else { return };
        let received = self.qp.resp.cur.received();
        let total = received + data.len() as u32;
        if total > loan.room {
            self.give_back(loan, Returned::TooLong);
            return self.refuse(NakCode::InvalidRequest);
        }
        let end = info.is_last().then(|| self.end_of(packet));
        let part = self.part(loan.id, loan.serial, received, end);
        if !self.env.relay(loan.link, &Relay::Data { part, data }) {
            self.put_back(loan, begins);
            return self.wait_abroad();
        }
        self.sh.stats.rx_bytes.add(data.len() as u64);
        let last = info.is_last();
        let Some(away) = &mut self.qp.resp.away else { return };
        away.loan = (!last).then_some(loan);
        self.qp.resp.cur = match last {
            true => Inbound::Idle,
            false => Inbound::Send { received: total, opcode: WcOpcode::Recv },
        };
        self.passed_on(packet, (loan.serial, loan.link), What::Message, 1);
    }

    /// An RDMA WRITE. The other card looks at its keys: they belong to the protection domain of the SRQ
    /// (A14.5).
    fn pass_write(&mut self, packet: &Packet<'_>) {
        let (info, data) = (packet.op(), packet.payload());
        let (va, key, left, total) = match (self.qp.resp.cur, packet.reth()) {
            (Inbound::Write { va, key, left, total }, _) => (va, key, left, total),
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
        let loan = match packet.imm() {
            Some(_) => match self.held_loan(true) {
                Some(loan) => Some(loan),
                None => return,
            },
            None => None,
        };
        let to = self.written_to(info.is_first(), last);
        let sent = to.is_some_and(|(serial, link, srq)| {
            let end = last.then(|| self.end_of(packet));
            let part = self.part(loan.map_or(u32::MAX, |loan| loan.id), serial, total - left, end);
            self.env.relay(link, &Relay::Write { part, place: Place { srq, va, key, total }, data })
        });
        let Some((serial, link, _)) = to.filter(|_| sent) else {
            loan.into_iter().for_each(|loan| self.put_back(loan, true));
            return self.wait_abroad();
        };
        self.sh.stats.rx_bytes.add(u64::from(len));
        let Some(away) = &mut self.qp.resp.away else { return };
        away.write = (!last).then_some((serial, link));
        self.qp.resp.cur = match last {
            true => Inbound::Idle,
            false => Inbound::Write { va: va.wrapping_add(u64::from(len)), key, left: left - len, total },
        };
        self.passed_on(packet, (serial, link), What::Message, 1);
    }

    /// Serial of the WRITE or other request, where it goes, and the SRQ that it names. `None`: not now.
    fn written_to(&mut self, first: bool, last: bool) -> Option<(u32, LinkId, u32)> {
        let away = self.qp.resp.away.as_ref()?;
        let far = self.sh.abroad.srqs.get(away.srq?)?;
        let (link, number) = (far.link?, far.number);
        if last && away.pending.len() >= PENDING {
            return None;
        }
        let serial = if first { self.sh.abroad.next_serial() } else { away.write?.0 };
        Some((serial, link, number))
    }

    fn part(&self, loan: u32, serial: u32, offset: u32, end: Option<End>) -> Part {
        let epoch = self.qp.resp.away.as_ref().map_or(0, |away| away.epoch);
        Part { loan, serial, qpn: self.qp.qpn, epoch, offset, end }
    }

    /// The packet is on its way to the other card; the next request stands `packets` behind it.
    fn passed_on(&mut self, packet: &Packet<'_>, (serial, link): (u32, LinkId), what: What, packets: u32) {
        let last = packet.op().is_last();
        let resp = &mut self.qp.resp;
        let Some(away) = &mut resp.away else { return };
        away.waits = Waits::No;
        if last {
            away.pending.push_in_room(Pending {
                serial,
                link,
                psn: resp.epsn,
                msn: resp.msn,
                what,
                done: false,
            });
        }
        self.accept(packet, packets, last);
        if packet.op().is_first() && packet.op().kind == Kind::Send {
            self.ask();
        }
    }

    fn end_of(&self, packet: &Packet<'_>) -> End {
        let mut flags = WcFlags::empty();
        flags.set(WcFlags::WITH_IMM, packet.imm().is_some());
        flags.set(WcFlags::WITH_INV, packet.ieth().is_some());
        let imm = packet.imm().or(packet.ieth()).unwrap_or_default();
        End { src_qp: self.qp.attr.dest_qpn, imm, flags, solicited: packet.bth().solicited() }
    }

    /// The WQE of the message under way, or one for a message that begins. `None`: said, or to be said, what
    /// there is to say.
    fn held_loan(&mut self, begins: bool) -> Option<Loan> {
        let away = self.qp.resp.away.as_mut()?;
        if !begins {
            if away.loan.is_none() {
                self.refuse(NakCode::InvalidRequest);
            }
            return self.qp.resp.away.as_ref()?.loan;
        }
        let far = self.sh.abroad.srqs.get_mut(away.srq?)?;
        let loan = if away.pending.len() < PENDING { far.loans.pop_front() } else { None };
        match loan {
            Some(loan) => Some(Loan { serial: self.sh.abroad.next_serial(), ..loan }),
            None => {
                self.ask();
                self.wait_abroad();
                None
            }
        }
    }

    /// Asks for more WQEs of the SRQ if there are few. Behind what uses those that there are: it must not
    /// take the last room.
    fn ask(&mut self) {
        let at = self.qp.resp.away.as_ref().and_then(|away| away.srq);
        let Some(far) = at.and_then(|at| self.sh.abroad.srqs.get_mut(at)) else { return };
        if let Some(link) = far.link
            && far.loans.len() < FEW
            && !far.asked
        {
            let count = BATCH - far.loans.len() as u32;
            far.asked = self.env.relay(link, &Relay::Ask { srq: far.number, count });
        }
    }

    /// The loan of a packet that could not be passed on.
    fn put_back(&mut self, loan: Loan, begins: bool) {
        let Some(away) = &mut self.qp.resp.away else { return };
        if !begins {
            away.loan = Some(loan);
            return;
        }
        match away.srq.and_then(|at| self.sh.abroad.srqs.get_mut(at)) {
            Some(far) if far.link == Some(loan.link) => far.loans.push_front_in_room(loan),
            _ => self.give_back(loan, Returned::Unused),
        }
    }

    /// The packet cannot be taken now. The first time nothing is said: what it waits for may be there at
    /// once.
    pub(super) fn wait_abroad(&mut self) {
        let resp = &mut self.qp.resp;
        let psn = resp.epsn;
        let Some(away) = &mut resp.away else { return };
        let again = away.waits_at(psn);
        away.waits = if again { Waits::Told(psn) } else { Waits::Silent(psn) };
        resp.nak_sent = true;
        if let Some(far) = away.srq.and_then(|at| self.sh.abroad.srqs.get_mut(at))
            && far.waiting.len() < WAITING
            && !far.waiting.contains(&self.qp.qpn)
        {
            far.waiting.push_in_room(self.qp.qpn);
        }
        if again {
            self.owe_nak(Syndrome::Rnr { timer: self.qp.attr.min_rnr_timer & 31 });
        }
    }

    /// Whether the last request named that SRQ: a QP may stand in the list of one for which it waits no
    /// longer.
    pub(crate) fn waits_for(&self, link: LinkId, number: u32) -> bool {
        let named = self.qp.resp.away.as_ref().and_then(|away| self.sh.abroad.srqs.get(away.srq?));
        named.is_some_and(|far| far.link == Some(link) && far.number == number)
    }

    /// What a packet waited for is there: the requester may repeat it. `lent` false: it is not there.
    pub(crate) fn awaited(&mut self, lent: bool) {
        let connected = self.connected();
        let resp = &mut self.qp.resp;
        let psn = resp.epsn;
        let Some(away) = &mut resp.away else { return };
        if away.waits != Waits::Silent(psn) || !connected {
            return;
        }
        away.waits = Waits::Told(psn);
        let timer = self.qp.attr.min_rnr_timer & 31;
        self.owe_nak(if lent { Syndrome::Nak(NakCode::SequenceError) } else { Syndrome::Rnr { timer } });
    }

    /// The SRQ that the waiting packet named does not exist.
    pub(crate) fn nobodys(&mut self) {
        let psn = self.qp.resp.epsn;
        let waits = self.qp.resp.away.as_ref().is_some_and(|away| away.waits_at(psn));
        if waits && self.connected() {
            self.refuse(NakCode::InvalidRequest);
        }
    }

    fn connected(&self) -> bool {
        matches!(self.qp.state, QpState::Rtr | QpState::Rts | QpState::Sqd)
    }

    /// The QP gives up the message under way.
    pub(crate) fn leave_abroad(&mut self) {
        let Some(away) = &mut self.qp.resp.away else { return };
        away.write = None;
        if let Some(loan) = away.loan.take() {
            self.give_back(loan, Returned::Flushed);
        }
    }

    fn give_back(&mut self, loan: Loan, why: Returned) {
        if let Some(away) = &mut self.qp.resp.away {
            away.loan = None;
        }
        self.env.relay(loan.link, &Relay::Return { loan: loan.id, qpn: self.qp.qpn, why });
    }
}
