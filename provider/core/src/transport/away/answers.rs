//! Requests to an SRQ of another card that are answered with more than an ACK.
//!
//! An atomic, ATOMIC WRITE or FLUSH is executed by the other card, once: it is passed on when its turn comes,
//! and never again. Its result is kept here for repetitions, as that of an atomic on this card. A READ is
//! passed on so that its keys are looked at in turn; its bytes come a few packets at a time, and go out as
//! they come. None are kept: those that cannot go out, as the port is full or something before them is not
//! confirmed, are asked for again.

use super::{FarId, What};
use crate::env::Env;
use crate::relay::{AHEAD, LinkId, Operation, Origin, Outcome, Place, Relay, Wanted};
use crate::room::Room;
use crate::transport::{Answer, Ctx};
use crate::types::{Access, Psn, QPN_BLOCK_SHIFT};
use crate::wire::headers::NakCode;
use crate::wire::opcode::Kind;
use crate::wire::packet::Packet;

impl<E: Env> Ctx<'_, E> {
    /// An RDMA READ. The other card looks at its keys, as they belong to the protection domain of the SRQ
    /// (A14.5).
    pub(super) fn pass_read(&mut self, packet: &Packet<'_>) {
        let Some(reth) = packet.reth() else { return };
        let (va, key, total) = (reth.va(), reth.rkey(), reth.dma_len());
        if total > self.sh.cfg.max_msg || !self.may_answer_more(false) {
            return self.refuse(NakCode::InvalidRequest);
        }
        if !self.qp.attr.access.contains(Access::REMOTE_READ) {
            return self.violate();
        }
        let (psn, count) = (self.qp.resp.epsn, total.div_ceil(self.qp.mtu).max(1));
        let next = self.all_asked();
        let packets = if next { count.min(AHEAD) } else { 0 };
        let wanted = self.wanted(psn, packets, true);
        let Some((to, far)) =
            self.pass_whole(|from, srq| Relay::Fetch { from, place: Place { srq, va, key, total }, wanted })
        else {
            return self.wait_abroad();
        };
        if let Some(away) = self.qp.resp.away.as_mut().filter(|_| next) {
            away.asked = psn.plus(packets);
        }
        let far = Some(far);
        self.qp.resp.out.push_in_room(Answer::Read {
            psn,
            va,
            key,
            left: total,
            begun: false,
            again: false,
            far,
        });
        self.passed_on(packet, to, What::Read, count);
    }

    /// An atomic, ATOMIC WRITE or FLUSH.
    pub(super) fn pass_operation(&mut self, packet: &Packet<'_>) {
        let (what, need, va, key, total) = match (packet.op().kind, packet.atomic_eth(), packet.reth()) {
            (Kind::CmpSwap, Some(eth), _) => {
                let what = Operation::Swap { compare: eth.compare(), swap: eth.swap_add() };
                (what, Access::REMOTE_ATOMIC, eth.va(), eth.rkey(), 8)
            }
            (Kind::FetchAdd, Some(eth), _) => {
                (Operation::Add(eth.swap_add()), Access::REMOTE_ATOMIC, eth.va(), eth.rkey(), 8)
            }
            (Kind::AtomicWrite, _, Some(reth)) => {
                let bytes = <[u8; 8]>::try_from(packet.payload());
                let Some(bytes) = bytes.ok().filter(|_| reth.dma_len() == 8) else {
                    return self.refuse(NakCode::InvalidRequest);
                };
                (Operation::Store(bytes), Access::REMOTE_WRITE, reth.va(), reth.rkey(), 8)
            }
            (Kind::Flush, _, Some(reth)) => {
                let feth = packet.feth().and_then(|feth| Some((feth.placement()?, feth.level()?)));
                let Some((placement, level)) = feth else { return self.refuse(NakCode::InvalidRequest) };
                let what = Operation::Flush(placement, level);
                (what, placement.needs(), reth.va(), reth.rkey(), reth.dma_len())
            }
            _ => return self.sh.stats.drop_opcode.inc(),
        };
        let aligned = matches!(what, Operation::Flush(..)) || va & 7 == 0;
        if !aligned || !self.may_answer_more(false) {
            return self.refuse(NakCode::InvalidRequest);
        }
        if !self.qp.attr.access.contains(need) {
            return self.violate();
        }
        let psn = self.qp.resp.epsn;
        let place = |srq| Place { srq, va, key, total };
        let Some((to, _)) = self.pass_whole(|from, srq| Relay::Execute { from, place: place(srq), what })
        else {
            return self.wait_abroad();
        };
        let atomic = matches!(what, Operation::Add(_) | Operation::Swap { .. });
        if let Some(results) = self.qp.resp.results.as_mut().filter(|_| atomic) {
            /* cards confirm in any order: its place among the results is that of its turn */
            results.push(psn, 0);
        }
        /* it is held until it is confirmed, as those to repetitions are, and has its result then */
        let answer = if atomic { Answer::Atomic { psn, value: 0 } } else { Answer::done(psn) };
        self.qp.resp.out.push_in_room(answer);
        self.passed_on(packet, to, if atomic { What::Atomic } else { What::Message }, 1);
    }

    /// Passes a request of one packet on to the card whose SRQ it names; gives its serial, and where it went.
    /// `None`: not now.
    fn pass_whole(
        &mut self,
        message: impl FnOnce(Origin, u32) -> Relay<'static>,
    ) -> Option<((u32, LinkId), FarId)> {
        let away = self.qp.resp.away.as_ref()?;
        let (far, epoch) = (self.sh.abroad.id(away.srq?)?, away.epoch);
        let (serial, link, srq) = self.written_to(true, true)?;
        let from = Origin { serial, qpn: self.qp.qpn, epoch };
        self.env.relay(link, &message(from, srq)).then_some(((serial, link), far))
    }

    fn wanted(&self, psn: Psn, packets: u32, first: bool) -> Wanted {
        Wanted { psn, packets, mtu: self.qp.attr.path_mtu, first }
    }

    /// Whether all bytes were asked for that answers are to bring.
    fn all_asked(&self) -> bool {
        let Some(away) = &self.qp.resp.away else { return true };
        let last = self.qp.resp.out.iter().rev().find(|answer| answer.far().is_some());
        last.is_none_or(|answer| !away.asked.before(answer.end(self.qp.mtu)))
    }

    /// Bytes from `psn` on are to be asked for again, unless some before it are to be, too.
    pub(in crate::transport) fn ask_from(&mut self, psn: Psn) {
        let resp = &mut self.qp.resp;
        let Some(away) = &mut resp.away else { return };
        let before = resp.out.iter().any(|answer| answer.far().is_some() && answer.psn().before(psn));
        if !before || psn.before(away.asked) {
            away.asked = psn;
        }
    }

    /// Of a repeated READ: whose memory it names. Another's that nobody knows any more: error.
    pub(in crate::transport) fn far_of(&self, packet: &Packet<'_>) -> Result<Option<FarId>, ()> {
        let abroad = &self.sh.abroad;
        let number = packet.xrc_srq().filter(|_| self.qp.resp.away.is_some());
        match number.filter(|number| number >> QPN_BLOCK_SHIFT != abroad.home) {
            None => Ok(None),
            Some(number) => {
                let at = abroad.find(self.qp.pd, number);
                at.and_then(|at| abroad.id(at)).map(Some).ok_or(())
            }
        }
    }

    /// Asks for the next bytes of the oldest answer, a READ's.
    pub(in crate::transport) fn ask_bytes(&mut self) {
        let Some(answer) = self.qp.resp.out.front().copied() else { return };
        let Answer::Read { psn, va, key, left: total, far: Some(far), .. } = answer else { return };
        let packets = (answer.end(self.qp.mtu).since(psn) as u32).min(AHEAD);
        let wanted = self.wanted(psn, packets, false);
        let Some((srq, link)) = self.sh.abroad.reach(self.qp.pd, far) else {
            return self.fail_read(Outcome::Invalid);
        };
        let Some(away) = &mut self.qp.resp.away else { return };
        let from = Origin { serial: 0, qpn: self.qp.qpn, epoch: away.epoch };
        away.asked = psn.plus(packets);
        /* refused is only what goes to a card that is gone, of which is told soon */
        let sent = self.env.relay(link, &Relay::Fetch { from, place: Place { srq, va, key, total }, wanted });
        away.asking = sent.then_some((psn, link));
    }

    /// What another card says of the packet `psn` of an answer.
    pub(crate) fn fetched(&mut self, (link, epoch): (LinkId, u32), psn: Psn, outcome: Outcome, data: &[u8]) {
        let away = self.qp.resp.away.as_mut().filter(|away| away.epoch == epoch && epoch != 0);
        let Some(away) = away else { return };
        let first = away.asking.take_if(|asking| *asking == (psn, link)).is_some();
        self.take_bytes(link, psn, outcome, data);
        if first && self.qp.resp.owes_answer() {
            self.ready();
        }
    }

    fn take_bytes(&mut self, link: LinkId, psn: Psn, outcome: Outcome, data: &[u8]) {
        let Some(away) = &self.qp.resp.away else { return };
        let its = |p: &super::Pending| p.psn == psn && p.link == link && p.what == What::Read && !p.done;
        match away.pending.iter().position(its) {
            Some(_) if outcome != Outcome::Success => return self.fail_from(psn, outcome),
            Some(at) => self.done(at),
            None => {}
        }
        let mtu = self.qp.mtu;
        let covers = |answer: &&Answer| !psn.before(answer.psn()) && psn.before(answer.end(mtu));
        let Some(answer) = self.qp.resp.out.iter().find(covers).copied() else { return };
        let Answer::Read { left, far: Some(far), .. } = answer else { return };
        if self.sh.abroad.reach(self.qp.pd, far).is_none_or(|(_, to)| to != link) {
            return;
        }
        let oldest = self.qp.resp.out.front().is_some_and(|front| front.psn() == psn);
        let confirmed = self.qp.resp.away.as_ref().is_some_and(|away| away.is_confirmed(psn));
        if !oldest || !confirmed || !self.env.can_send() {
            self.ask_from(psn);
            if oldest && confirmed {
                self.ready();
            }
            return;
        }
        match outcome {
            Outcome::Success if data.len() == left.min(mtu) as usize => self.emit_bytes(data),
            Outcome::Success => self.fail_read(Outcome::Operation),
            _ => self.fail_read(outcome),
        }
    }

    /// The next packet of the oldest answer, a READ's, with bytes from another card.
    fn emit_bytes(&mut self, data: &[u8]) {
        let Some((header, pad)) = self.read_header(data.len() as u32) else { return };
        let frame = &mut self.sh.abroad.frame;
        frame.clear();
        for part in [&*header, data] {
            frame.extend_from_slice(part);
        }
        self.sh.stats.tx_bytes.add(data.len() as u64);
        self.env.send_frame(&self.qp.attr.av, frame, &[], pad, true);
        self.read_went(data.len() as u32);
        self.answered();
        if self.qp.resp.owes_answer() {
            self.ready();
        }
    }

    /// The other card does not give what the oldest answer, a READ's, is to bring. A repeated one stops then,
    /// as whoever closed the memory may know that the first one arrived.
    fn fail_read(&mut self, outcome: Outcome) {
        let Some(Answer::Read { psn, again, .. }) = self.qp.resp.out.front().copied() else { return };
        if !again {
            return self.fail_from(psn, outcome);
        }
        self.qp.resp.out.pop_front();
        self.released();
    }

    /// What the atomic that has `psn` found: for its answer, and for those to its repetitions.
    pub(super) fn keep_result(&mut self, psn: Psn, found: u64) {
        let resp = &mut self.qp.resp;
        if let Some(results) = &mut resp.results {
            results.set(psn, found);
        }
        for answer in &mut resp.out {
            if let Answer::Atomic { psn: at, value } = answer
                && *at == psn
            {
                *value = found;
            }
        }
    }
}
