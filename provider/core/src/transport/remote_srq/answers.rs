//! Requests to an SRQ of another card that are answered with more than an ACK.
//!
//! An atomic, ATOMIC WRITE or FLUSH is forwarded once, in order, and executed by the other card. Its result
//! is kept here for repetitions, as that of an atomic on this card. A READ is forwarded so that its keys are
//! checked in order; its bytes come a few packets at a time, and are sent as they come. None are kept: those
//! that cannot be sent, as the port is full or an earlier request is not confirmed, are fetched again.

use super::{ForwardTarget, ForwardedKind, RemoteSrqId};
use crate::env::Env;
use crate::relay::{AHEAD, LinkId, Operation, Relay, RelayOrigin, RelayOutcome, TargetMemory, WantedPart};
use crate::room::Room;
use crate::transport::{Ctx, OwedResponse};
use crate::types::{Access, Psn, QPN_BLOCK_SHIFT};
use crate::wire::headers::NakCode;
use crate::wire::opcode::PacketKind;
use crate::wire::packet::Packet;

impl<E: Env> Ctx<'_, E> {
    /// An RDMA READ. The other card checks its keys, as they belong to the SRQ's protection domain
    /// (A14.5).
    pub(super) fn forward_read(&mut self, packet: &Packet<'_>) {
        let Some(reth) = packet.reth() else { return };
        let (va, key, total) = (reth.va(), reth.rkey(), reth.dma_len());
        if total > self.sh.cfg.max_msg || !self.may_answer_more(false) {
            return self.refuse(NakCode::InvalidRequest);
        }
        if !self.qp.attr.access.contains(Access::REMOTE_READ) {
            return self.violate();
        }
        let (psn, count) = (self.qp.resp.epsn, total.div_ceil(self.qp.mtu).max(1));
        let next = self.all_fetched();
        let packets = if next { count.min(AHEAD) } else { 0 };
        let wanted = self.wanted(psn, packets, true);
        let Some((to, remote)) = self.forward_request(|from, srq| Relay::Fetch {
            from,
            place: TargetMemory { srq, va, key, total },
            wanted,
        }) else {
            return self.defer_request();
        };
        if let Some(fwd) = self.qp.resp.fwd.as_mut().filter(|_| next) {
            fwd.fetched_to = psn.plus(packets);
        }
        let remote = Some(remote);
        self.qp.resp.out.push_in_room(OwedResponse::Read {
            psn,
            va,
            key,
            left: total,
            begun: false,
            again: false,
            remote,
        });
        self.forwarded(packet, to.serial, to.link, ForwardedKind::Read, count);
    }

    /// An atomic, ATOMIC WRITE or FLUSH.
    pub(super) fn forward_operation(&mut self, packet: &Packet<'_>) {
        let (what, need, va, key, total) = match (packet.op().kind, packet.atomic_eth(), packet.reth()) {
            (PacketKind::CmpSwap, Some(eth), _) => {
                let what = Operation::Swap { compare: eth.compare(), swap: eth.swap_add() };
                (what, Access::REMOTE_ATOMIC, eth.va(), eth.rkey(), 8)
            }
            (PacketKind::FetchAdd, Some(eth), _) => {
                (Operation::Add(eth.swap_add()), Access::REMOTE_ATOMIC, eth.va(), eth.rkey(), 8)
            }
            (PacketKind::AtomicWrite, _, Some(reth)) => {
                let bytes = <[u8; 8]>::try_from(packet.payload());
                let Some(bytes) = bytes.ok().filter(|_| reth.dma_len() == 8) else {
                    return self.refuse(NakCode::InvalidRequest);
                };
                (Operation::Store(bytes), Access::REMOTE_WRITE, reth.va(), reth.rkey(), 8)
            }
            (PacketKind::Flush, _, Some(reth)) => {
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
        let place = |srq| TargetMemory { srq, va, key, total };
        let Some((to, _)) =
            self.forward_request(|from, srq| Relay::Execute { from, place: place(srq), what })
        else {
            return self.defer_request();
        };
        let atomic = matches!(what, Operation::Add(_) | Operation::Swap { .. });
        if let Some(results) = self.qp.resp.results.as_mut().filter(|_| atomic) {
            /* cards confirm in any order: results are kept in the order of requests */
            results.push(psn, 0);
        }
        /* it is held until it is confirmed, as those to repetitions are, and has its result then */
        let answer = if atomic { OwedResponse::Atomic { psn, value: 0 } } else { OwedResponse::done(psn) };
        self.qp.resp.out.push_in_room(answer);
        let kind = if atomic { ForwardedKind::Atomic } else { ForwardedKind::Message };
        self.forwarded(packet, to.serial, to.link, kind, 1);
    }

    /// Forwards a request of one packet to the card whose SRQ it names. `None`: not now.
    fn forward_request(
        &mut self,
        message: impl FnOnce(RelayOrigin, u32) -> Relay<'static>,
    ) -> Option<(ForwardTarget, RemoteSrqId)> {
        let fwd = self.qp.resp.fwd.as_ref()?;
        let (remote, epoch) = (self.sh.remote_srqs.id(fwd.srq?)?, fwd.epoch);
        let to = self.forward_target(true, true)?;
        let from = RelayOrigin { serial: to.serial, qpn: self.qp.qpn, epoch };
        self.env.relay(to.link, &message(from, to.srq)).then_some((to, remote))
    }

    fn wanted(&self, psn: Psn, packets: u32, first: bool) -> WantedPart {
        WantedPart { psn, packets, mtu: self.qp.attr.path_mtu, first }
    }

    /// Whether all bytes of the READ responses that are due were requested.
    fn all_fetched(&self) -> bool {
        let Some(fwd) = &self.qp.resp.fwd else { return true };
        let last = self.qp.resp.out.iter().rev().find(|answer| answer.remote_srq().is_some());
        last.is_none_or(|answer| !fwd.fetched_to.before(answer.end(self.qp.mtu)))
    }

    /// Bytes from `psn` on are to be fetched again, unless earlier ones are to be, too.
    pub(in crate::transport) fn refetch_from(&mut self, psn: Psn) {
        let resp = &mut self.qp.resp;
        let Some(fwd) = &mut resp.fwd else { return };
        let before = resp.out.iter().any(|answer| answer.remote_srq().is_some() && answer.psn().before(psn));
        if !before || psn.before(fwd.fetched_to) {
            fwd.fetched_to = psn;
        }
    }

    /// The remote SRQ that a repeated READ names, if any. Error: it is not in the table any more.
    pub(in crate::transport) fn remote_srq_of(&self, packet: &Packet<'_>) -> Result<Option<RemoteSrqId>, ()> {
        let remote_srqs = &self.sh.remote_srqs;
        let number = packet.xrc_srq().filter(|_| self.qp.resp.fwd.is_some());
        match number.filter(|number| number >> QPN_BLOCK_SHIFT != remote_srqs.block) {
            None => Ok(None),
            Some(number) => {
                let at = remote_srqs.find(self.qp.pd, number);
                at.and_then(|at| remote_srqs.id(at)).map(Some).ok_or(())
            }
        }
    }

    /// Fetches the next bytes of the oldest answer, a READ response.
    pub(in crate::transport) fn fetch_bytes(&mut self) {
        let Some(answer) = self.qp.resp.out.front().copied() else { return };
        let OwedResponse::Read { psn, va, key, left: total, remote: Some(remote), .. } = answer else {
            return;
        };
        let packets = (answer.end(self.qp.mtu).since(psn) as u32).min(AHEAD);
        let wanted = self.wanted(psn, packets, false);
        let Some((srq, link)) = self.sh.remote_srqs.reach(self.qp.pd, remote) else {
            return self.fail_read(RelayOutcome::Invalid);
        };
        let Some(fwd) = &mut self.qp.resp.fwd else { return };
        let from = RelayOrigin { serial: 0, qpn: self.qp.qpn, epoch: fwd.epoch };
        fwd.fetched_to = psn.plus(packets);
        /* only a link that has ended refuses it; `handle_unlink` follows */
        let sent =
            self.env.relay(link, &Relay::Fetch { from, place: TargetMemory { srq, va, key, total }, wanted });
        fwd.fetching = sent.then_some((psn, link));
    }

    /// Another card's bytes for the packet `psn` of an answer.
    pub(crate) fn on_bytes(
        &mut self,
        link: LinkId,
        epoch: u32,
        psn: Psn,
        outcome: RelayOutcome,
        data: &[u8],
    ) {
        let fwd = self.qp.resp.fwd.as_mut().filter(|fwd| fwd.epoch == epoch && epoch != 0);
        let Some(fwd) = fwd else { return };
        let first = fwd.fetching.take_if(|fetching| *fetching == (psn, link)).is_some();
        self.take_bytes(link, psn, outcome, data);
        if first && self.qp.resp.owes_answer() {
            self.ready();
        }
    }

    fn take_bytes(&mut self, link: LinkId, psn: Psn, outcome: RelayOutcome, data: &[u8]) {
        let Some(fwd) = &self.qp.resp.fwd else { return };
        let its = |p: &super::UnconfirmedMessage| {
            p.psn == psn && p.link == link && p.kind == ForwardedKind::Read && !p.done
        };
        match fwd.pending.iter().position(its) {
            Some(_) if outcome != RelayOutcome::Success => return self.fail_from(psn, outcome),
            Some(at) => self.done(at),
            None => {}
        }
        let mtu = self.qp.mtu;
        let covers = |answer: &&OwedResponse| !psn.before(answer.psn()) && psn.before(answer.end(mtu));
        let Some(answer) = self.qp.resp.out.iter().find(covers).copied() else { return };
        let OwedResponse::Read { left, remote: Some(remote), .. } = answer else { return };
        if self.sh.remote_srqs.reach(self.qp.pd, remote).is_none_or(|(_, to)| to != link) {
            return;
        }
        let oldest = self.qp.resp.out.front().is_some_and(|front| front.psn() == psn);
        let confirmed = self.qp.resp.fwd.as_ref().is_some_and(|fwd| fwd.is_confirmed(psn));
        if !oldest || !confirmed || !self.env.can_send() {
            self.refetch_from(psn);
            if oldest && confirmed {
                self.ready();
            }
            return;
        }
        match outcome {
            RelayOutcome::Success if data.len() == left.min(mtu) as usize => self.emit_bytes(data),
            RelayOutcome::Success => self.fail_read(RelayOutcome::Operation),
            _ => self.fail_read(outcome),
        }
    }

    /// Sends the next packet of the oldest answer, a READ response, with bytes of another card.
    fn emit_bytes(&mut self, data: &[u8]) {
        let Some((header, pad)) = self.read_header(data.len() as u32) else { return };
        let frame = &mut self.sh.remote_srqs.frame;
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

    /// The other card refuses the bytes of the oldest answer, a READ response. A repeated one is dropped, as
    /// the memory may have been closed because the first one arrived.
    fn fail_read(&mut self, outcome: RelayOutcome) {
        let Some(OwedResponse::Read { psn, again, .. }) = self.qp.resp.out.front().copied() else { return };
        if !again {
            return self.fail_from(psn, outcome);
        }
        self.qp.resp.out.pop_front();
        self.released();
    }

    /// Keeps the result of the atomic `psn`: for its answer, and for those to its repetitions.
    pub(super) fn keep_result(&mut self, psn: Psn, found: u64) {
        let resp = &mut self.qp.resp;
        if let Some(results) = &mut resp.results {
            results.set(psn, found);
        }
        for answer in &mut resp.out {
            if let OwedResponse::Atomic { psn: at, value } = answer
                && *at == psn
            {
                *value = found;
            }
        }
    }
}
