//! Requests of other cards' QPs that this card's memory answers: atomics and the like, and READs.
//!
//! Keys, bounds and rights are checked as for requests to this card's own QPs, in the protection domain of
//! the SRQ that they name (A14.5). Owns nothing: the QP's card keeps what it may have to repeat.

use super::QpShared;
use super::table::RemoteConn;
use crate::env::Env;
use crate::relay::{AHEAD, LinkId, Operation, Relay, RelayOrigin, RelayOutcome, TargetMemory, WantedPart};
use crate::types::{Access, FlushLevel, PdId, QpId, Qpn};

impl<E: Env> QpShared<E> {
    /// Executes a request in the order of its connection. `None`: one before it failed, or it is not at its
    /// end.
    pub(super) fn in_turn(
        &mut self,
        env: &mut E,
        conn: RemoteConn,
        what: impl FnOnce(&mut Self, &mut E) -> Option<RelayOutcome>,
    ) -> Option<RelayOutcome> {
        if self.leases.has_failed(conn) {
            return None;
        }
        let outcome = what(self, env)?;
        if outcome != RelayOutcome::Success {
            self.leases.fail(conn);
        }
        Some(outcome)
    }

    /// An atomic, ATOMIC WRITE or FLUSH.
    pub(super) fn execute_forwarded(
        &mut self,
        env: &mut E,
        link: LinkId,
        domain: PdId,
        from: &RelayOrigin,
        place: &TargetMemory,
        what: Operation,
    ) {
        let RelayOrigin { serial, qpn, epoch } = *from;
        let mut found = 0;
        let outcome = self.in_turn(env, RemoteConn { link, qpn, epoch }, |sh, env| {
            let done = sh.operate(env, domain, qpn, place, what);
            found = done.unwrap_or_default();
            Some(done.err().unwrap_or(RelayOutcome::Success))
        });
        if let Some(outcome) = outcome {
            env.relay(link, &Relay::Done { qpn, serial, outcome, found });
        }
    }

    /// The value before an atomic; 0 for the others.
    fn operate(
        &mut self,
        env: &mut E,
        domain: PdId,
        qpn: Qpn,
        place: &TargetMemory,
        what: Operation,
    ) -> Result<u64, RelayOutcome> {
        let (_, srq) = self.srq_of(domain, place.srq).ok_or(RelayOutcome::Invalid)?;
        let of = QpId { pd: srq.pd, qpn };
        let (need, len) = match what {
            Operation::Add(_) | Operation::Swap { .. } => (Access::REMOTE_ATOMIC, 8),
            Operation::Store(_) => (Access::REMOTE_WRITE, 8),
            Operation::Flush(placement, FlushLevel::Range) => (placement.needs(), place.total),
            Operation::Flush(placement, FlushLevel::Mr) => (placement.needs(), 0),
        };
        let host =
            self.mrs.resolve_remote(place.key, of, place.va, len, need).map_err(|_| RelayOutcome::Access)?;
        let found = match what {
            Operation::Flush(..) => {
                /* the key must be good even where no byte is named */
                self.mrs.permits(place.key, of, need).map_err(|_| RelayOutcome::Access)?;
                env.dma_fence();
                Some(0)
            }
            _ if host & 7 != 0 => return Err(RelayOutcome::Invalid),
            Operation::Add(value) => env.dma_fetch_add(host, value),
            Operation::Swap { compare, swap } => env.dma_compare_swap(host, compare, swap),
            Operation::Store(bytes) => {
                self.stats.rx_bytes.add(8);
                env.dma_store(host, bytes).then_some(0)
            }
        };
        found.ok_or(RelayOutcome::Access)
    }

    /// Bytes of a READ response. All that is left of it must be allowed, not only what is fetched now.
    pub(super) fn fetch_forwarded(
        &mut self,
        env: &mut E,
        link: LinkId,
        domain: PdId,
        from: &RelayOrigin,
        place: &TargetMemory,
        wanted: &WantedPart,
    ) {
        let RelayOrigin { serial, qpn, epoch } = *from;
        let pd = self.srq_of(domain, place.srq).map(|(_, srq)| srq.pd);
        let look = |sh: &Self| pd.map_or(RelayOutcome::Invalid, |pd| sh.may_fetch(QpId { pd, qpn }, place));
        let outcome = match wanted.first {
            true => self.in_turn(env, RemoteConn { link, qpn, epoch }, |sh, _| Some(look(sh))),
            false => Some(look(self)),
        };
        match (outcome, pd) {
            (None, _) => {}
            (Some(RelayOutcome::Success), Some(pd)) if wanted.packets > 0 => {
                self.send_bytes(env, link, pd, from, place, wanted);
            }
            (Some(outcome), _) if wanted.first => {
                env.relay(link, &Relay::Done { qpn, serial, outcome, found: 0 });
            }
            (Some(outcome), _) => {
                env.relay(link, &Relay::Bytes { qpn, epoch, psn: wanted.psn, outcome, data: &[] });
            }
        }
    }

    fn may_fetch(&self, of: QpId, place: &TargetMemory) -> RelayOutcome {
        match self.mrs.resolve_remote(place.key, of, place.va, place.total, Access::REMOTE_READ) {
            Ok(_) => RelayOutcome::Success,
            Err(_) => RelayOutcome::Access,
        }
    }

    fn send_bytes(
        &mut self,
        env: &mut E,
        link: LinkId,
        pd: PdId,
        from: &RelayOrigin,
        place: &TargetMemory,
        wanted: &WantedPart,
    ) {
        let mtu = wanted.mtu.bytes();
        for packet in 0..wanted.packets.min(AHEAD) {
            let offset = packet * mtu;
            if packet > 0 && offset >= place.total {
                return;
            }
            let (va, len) = (place.va.wrapping_add(u64::from(offset)), mtu.min(place.total - offset));
            let host =
                self.mrs.resolve_remote(place.key, QpId { pd, qpn: from.qpn }, va, len, Access::REMOTE_READ);
            let room = self.leases.chunk.get_mut(..len as usize);
            let bytes = match (host, room) {
                (Ok(_), Some([])) => Some(&[][..]),
                (Ok(host), Some(room)) => env.dma_copy(host, room).then_some(&*room),
                _ => None,
            };
            let outcome = if bytes.is_some() { RelayOutcome::Success } else { RelayOutcome::Access };
            let RelayOrigin { qpn, epoch, .. } = *from;
            let (psn, data) = (wanted.psn.plus(packet), bytes.unwrap_or_default());
            if !env.relay(link, &Relay::Bytes { qpn, epoch, psn, outcome, data }) || bytes.is_none() {
                return;
            }
        }
    }
}
