//! What a responder owes: READ data and atomic results, in the order in which they were asked for, then a NAK
//! or an ACK (IBTA 9.7.5.1). That is the order of PSNs but for what a peer that repeats selectively asks for
//! again, which stands behind what was owed then. From others a repeated request takes the place of all
//! answers from its PSN on.

use alloc::boxed::Box;

use super::{Ctx, OwedResponse, SendPause, enter_error};
use crate::engine::{Call, TransmitStatus};
use crate::env::Env;
use crate::error::NicError;
use crate::room::filled;
use crate::types::{Access, AsyncEvent, Psn, QpId, QpState, QpType, Seg};
use crate::wire::PKEY_DEFAULT;
use crate::wire::builder::HeaderBuf;
use crate::wire::headers::{NakCode, Syndrome};
use crate::wire::opcode::code;

/// The last results of atomics, the oldest overwritten first. Sized when the program sets how many it
/// may be asked to repeat, so that remembering one never allocates.
#[derive(Default)]
pub(crate) struct Results {
    slots: Box<[Option<(Psn, u64)>]>,
    /// Where the next one goes
    next: u8,
}

impl Results {
    /// Room for `n`; what was remembered stays, the newest first. `Exhausted`: no memory.
    pub(crate) fn resize(&mut self, n: u8) -> Result<(), NicError> {
        if self.slots.len() == usize::from(n) {
            return Ok(());
        }
        let mut new = Results { slots: filled(usize::from(n))?, next: 0 };
        let (newer, older) = self.slots.split_at(usize::from(self.next));
        for (psn, value) in older.iter().chain(newer).flatten() {
            new.push(*psn, *value);
        }
        *self = new;
        Ok(())
    }

    pub(super) fn push(&mut self, psn: Psn, value: u64) {
        if let Some(slot) = self.slots.get_mut(usize::from(self.next)) {
            *slot = Some((psn, value));
            let next = self.next + 1;
            self.next = if usize::from(next) < self.slots.len() { next } else { 0 };
        }
    }

    /// The result of the atomic at `psn` is known now: where its place was kept, if it still is.
    pub(super) fn set(&mut self, psn: Psn, found: u64) {
        let (newer, older) = self.slots.split_at_mut(usize::from(self.next));
        let mut newest_first = newer.iter_mut().rev().chain(older.iter_mut().rev()).flatten();
        if let Some((_, value)) = newest_first.find(|(at, _)| *at == psn) {
            *value = found;
        }
    }

    /// Result of the atomic at `psn`, the last one if PSNs have come round.
    pub(super) fn find(&self, psn: Psn) -> Option<u64> {
        let (newer, older) = self.slots.split_at(usize::from(self.next));
        let mut newest_first = newer.iter().rev().chain(older.iter().rev()).flatten();
        newest_first.find(|(at, _)| *at == psn).map(|(_, value)| *value)
    }
}

impl<E: Env> Ctx<'_, E> {
    /// Sends the next answer, or the NAK behind the last one.
    pub(super) fn emit_answer(&mut self) -> SendPause {
        match self.qp.resp.out.front().copied() {
            Some(OwedResponse::Atomic { psn, value }) => {
                let msn = self.answer_msn();
                let header = self
                    .answer_bth(code::RC_ATOMIC_ACK, psn, 0)
                    .aeth(self.ack_syndrome(), msn)
                    .atomic_ack(value);
                self.env.send_frame(&self.qp.attr.av, &header, &[], 0, false);
                self.qp.resp.out.pop_front();
            }
            Some(OwedResponse::Read { remote: Some(_), .. }) => self.fetch_bytes(),
            Some(OwedResponse::Read { .. }) => self.emit_read_data(),
            None => match self.qp.resp.nak.take() {
                Some(nak) => self.emit_ack(Some(nak)),
                None => return SendPause::Idle,
            },
        }
        self.answered();
        SendPause::Sent
    }

    /// An answer went out: behind the last of them goes the ACK.
    pub(super) fn answered(&mut self) {
        if self.qp.resp.ack && !self.qp.resp.owes_answer() {
            self.owe_ack();
        }
    }

    /// Messages that an answer acknowledges: none that another card has not confirmed.
    fn answer_msn(&self) -> u32 {
        let limit = self.qp.resp.fwd.as_ref().and_then(|fwd| fwd.limit());
        limit.map_or(self.qp.resp.msn, |(_, msn)| msn)
    }

    fn answer_bth(&self, opcode: u8, psn: Psn, pad: u8) -> HeaderBuf {
        let opcode = if self.qp.qp_type == QpType::XrcRecv { code::XRC + opcode } else { opcode };
        HeaderBuf::bth(opcode, self.qp.attr.dest_qpn, psn, false, false, pad, PKEY_DEFAULT)
            .repeats(self.qp.flags.answers)
    }

    /// One packet of a READ's answer. Rights are looked at anew for each: the MR or window may be gone. A
    /// repeated answer stops then, as whoever closed it may know that the first one arrived.
    fn emit_read_data(&mut self) {
        let Some(OwedResponse::Read { psn, va, key, left, again, .. }) = self.qp.resp.out.front().copied()
        else {
            return;
        };
        let len = left.min(self.qp.mtu);
        let host = self.check_answer(key, va, len);
        self.env.begin_payload();
        let Some(seg) = host.and_then(|addr| self.env.dma_read(Seg { addr, len })) else {
            if again {
                self.qp.resp.out.pop_front();
                return;
            }
            enter_error(self, QpState::Err);
            /* The NAK belongs to this READ, not behind it: the requester waits for its data. */
            self.qp.resp.out.clear();
            self.qp.resp.epsn = psn;
            self.owe_nak(Syndrome::Nak(NakCode::RemoteAccess));
            return self.env.event(AsyncEvent::QpAccessErr(self.qp.qpn));
        };
        let Some((header, pad)) = self.read_header(len) else { return };
        let payload = if len == 0 { &[][..] } else { core::slice::from_ref(&seg) };
        self.env.send_frame(&self.qp.attr.av, &header, payload, pad, true);
        self.read_went(len);
    }

    /// Headers of the next packet of the oldest answer, a READ's, and the bytes behind its `len`.
    pub(super) fn read_header(&self, len: u32) -> Option<(HeaderBuf, u8)> {
        let Some(OwedResponse::Read { psn, left, begun, .. }) = self.qp.resp.out.front().copied() else {
            return None;
        };
        let last = len == left;
        let opcode = match (begun, last) {
            (false, false) => code::RC_READ_RESPONSE_FIRST,
            (true, false) => code::RC_READ_RESPONSE_MIDDLE,
            (true, true) => code::RC_READ_RESPONSE_LAST,
            (false, true) => code::RC_READ_RESPONSE_ONLY,
        };
        let pad = (len.wrapping_neg() & 3) as u8;
        let header = self.answer_bth(opcode, psn, pad);
        Some((if !begun || last { header.aeth(self.ack_syndrome(), self.answer_msn()) } else { header }, pad))
    }

    /// That packet went out.
    pub(super) fn read_went(&mut self, len: u32) {
        let Some(OwedResponse::Read { psn, va, left, begun, .. }) = self.qp.resp.out.front_mut() else {
            return;
        };
        (*psn, *va) = (psn.plus(1), va.wrapping_add(u64::from(len)));
        (*left, *begun) = (*left - len, true);
        if *left == 0 {
            self.qp.resp.out.pop_front();
        }
    }

    /// Host address of what a READ's answer brings. Whose the memory is was looked at when the request came;
    /// an XRC QP may serve another SRQ, and so another protection domain, by now.
    pub(super) fn check_answer(&self, key: u32, va: u64, len: u32) -> Option<u64> {
        if self.qp.qp_type != QpType::XrcRecv || len == 0 {
            return self.check_remote(key, va, len, Access::REMOTE_READ);
        }
        let pd = self.sh.mrs.pd(key)?;
        self.sh.mrs.resolve_remote(key, QpId { pd, qpn: self.qp.qpn }, va, len, Access::REMOTE_READ).ok()
    }

    /// What the engine owes, and the ACK that is owed, once no answer before it is. False: the port is full.
    pub(crate) fn flush_acks(&mut self) -> bool {
        self.run_engine(Call::Acknowledge) != Some(TransmitStatus::PortFull) && self.flush_ack()
    }

    /// The ACK that is owed, once no answer before it is. False: the port is full.
    fn flush_ack(&mut self) -> bool {
        if !self.qp.resp.ack || !self.qp.resp.out.is_empty() || self.qp.resp.owes_answer() {
            /* Answers go first, as it would stand for them; the last of them, or another card, brings the
             * ACK back. */
            return true;
        }
        if !self.env.can_send() {
            return false;
        }
        self.emit_ack(None);
        true
    }

    /// The QP ends: nobody can repeat its last ACK later, so a wire that loses gets it three times.
    pub(crate) fn send_final_acks(&mut self) {
        self.flush_ack();
        let connected = matches!(self.qp.state, QpState::Rtr | QpState::Rts | QpState::Sqd);
        let lossy = self.sh.paths.is_lossy(self.qp.path);
        let owes = self.qp.resp.owes_answer() || !self.qp.resp.out.is_empty();
        if !self.qp.qp_type.is_reliable() || !connected || !lossy || owes {
            return;
        }
        for _ in 0..2 {
            if self.env.can_send() {
                self.emit_ack(None);
            }
        }
    }

    /// An ACK is for all before the expected PSN, a NAK, by its syndrome, is at it.
    fn emit_ack(&mut self, nak: Option<u8>) {
        let syndrome = nak.and_then(Syndrome::from_byte).unwrap_or_else(|| self.ack_syndrome());
        let resp = &mut self.qp.resp;
        let limit = resp.fwd.as_ref().and_then(|fwd| fwd.limit());
        let (next, msn) = limit.unwrap_or((resp.epsn, resp.msn));
        let psn = match syndrome {
            Syndrome::Ack { .. } => {
                self.sh.stats.sent_ack.inc();
                next.plus(0x00ff_ffff)
            }
            _ => next,
        };
        resp.ack = false;
        if resp.gap.is_some()
            && matches!(syndrome, Syndrome::Ack { .. })
            && let Some(gap) = self.gap()
        {
            return self.emit_sack(gap, psn);
        }
        let header = self.answer_bth(code::RC_ACK, psn, 0).aeth(syndrome, msn);
        self.env.send_frame(&self.qp.attr.av, &header, &[], 0, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_results_are_remembered() {
        let mut results = Results::default();
        results.push(Psn::new(1), 10);
        assert_eq!(results.find(Psn::new(1)), None, "no room yet");
        results.resize(3).unwrap();
        for n in 1..=4 {
            results.push(Psn::new(n), u64::from(n) * 10);
        }
        results.push(Psn::new(3), 31);
        let all = |results: &Results| [1, 2, 3, 4].map(|n| results.find(Psn::new(n)));
        assert_eq!(all(&results), [None, None, Some(31), Some(40)]);
        results.resize(2).unwrap();
        assert_eq!(all(&results), [None, None, Some(31), Some(40)]);
        results.resize(128).unwrap();
        results.push(Psn::new(1), 11);
        assert_eq!(all(&results), [Some(11), None, Some(31), Some(40)]);
    }

    #[test]
    fn a_result_that_comes_late_takes_its_own_place() {
        let mut results = Results::default();
        results.resize(2).unwrap();
        let psns = [1, 2, 3].map(Psn::new);
        for psn in psns {
            results.push(psn, 0);
        }
        results.set(psns[2], 30);
        results.set(psns[0], 10);
        results.set(psns[1], 20);
        assert_eq!(psns.map(|psn| results.find(psn)), [None, Some(20), Some(30)]);
        results.push(psns[1], 21);
        results.set(psns[1], 22);
        assert_eq!(psns.map(|psn| results.find(psn)), [None, Some(22), Some(30)]);
    }
}
