//! Receive WQEs: taking one, and placing bytes in it.

use alloc::boxed::Box;

use super::remote_srq::SrqLocation;
use super::requester::slices;
use super::{Ctx, MessageInProgress, Qp};
use crate::env::{Env, RecvQueue, TakenWqe};
use crate::nic::QpShared;
use crate::qp::RecvSource;
use crate::types::{AsyncEvent, PdId, QpId, QpType, Sge, SrqId};
use crate::wire::packet::Packet;

/// A receive WQE that was taken from the queue but is not completed.
pub(crate) struct HeldRecv {
    pub(super) held: bool,
    pub(super) wr_id: u64,
    pub(super) num_sge: u8,
    sges: SgeRoom,
}

/// Room for the SGEs of a receive WQE: in place where one is the most, as is common.
enum SgeRoom {
    One([Sge; 1]),
    Many(Box<[Sge]>),
}

impl HeldRecv {
    pub(super) fn new(max_sge: usize) -> Self {
        let sges = match max_sge {
            0 | 1 => SgeRoom::One(Default::default()),
            _ => SgeRoom::Many(alloc::vec![Sge::default(); max_sge].into_boxed_slice()),
        };
        HeldRecv { held: false, wr_id: 0, num_sge: 0, sges }
    }

    /// Most SGEs that it holds.
    pub(super) fn max_sge(&self) -> usize {
        match &self.sges {
            SgeRoom::One(one) => one.len(),
            SgeRoom::Many(many) => many.len(),
        }
    }

    #[inline]
    fn room(&mut self) -> &mut [Sge] {
        match &mut self.sges {
            SgeRoom::One(one) => one,
            SgeRoom::Many(many) => many,
        }
    }

    /// Its cookie.
    pub(super) fn wr_id(&self) -> u64 {
        self.wr_id
    }

    /// Holds the buffer of a tag.
    pub(super) fn hold(&mut self, wr_id: u64, sges: &[Sge]) {
        (self.held, self.wr_id, self.num_sge) = (true, wr_id, sges.len() as u8);
        for (place, sge) in self.room().iter_mut().zip(sges) {
            *place = *sge;
        }
    }

    /// Holds nothing any more, without a completion.
    pub(super) fn drop_held(&mut self) {
        self.held = false;
    }

    /// SGEs of the held WQE.
    #[inline]
    fn sges(&self) -> &[Sge] {
        let room = match &self.sges {
            SgeRoom::One(one) => &one[..],
            SgeRoom::Many(many) => many,
        };
        room.get(..usize::from(self.num_sge)).unwrap_or(&[])
    }
}

/// Why bytes could not be placed in a receive WQE.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PlaceError {
    /// They do not fit
    TooLong,
    /// A key, range or right is wrong
    Protection,
}

impl<E: Env> Qp<E> {
    /// Whether receives come from an SRQ.
    pub(crate) fn uses_srq(&self) -> bool {
        matches!(self.rq, RecvSource::Shared(_) | RecvSource::Xrc(_))
    }
}

/// Whether no receive is posted for `qp`.
pub(crate) fn lacks_receives<E: Env>(qp: &Qp<E>, sh: &QpShared<E>) -> bool {
    match &qp.rq {
        RecvSource::Own(rq) => rq.is_empty(),
        RecvSource::Shared(id) => sh.srqs.get(id.0 as usize).is_some_and(|srq| srq.rq.is_empty()),
        RecvSource::Xrc(_) => false,
    }
}

impl<E: Env> Ctx<'_, E> {
    /// Makes sure that a receive WQE is held. False: none is posted.
    pub(super) fn take_recv(&mut self) -> bool {
        let recv = &mut self.qp.resp.recv;
        if recv.held {
            return true;
        }
        let taken = match &self.qp.rq {
            RecvSource::Own(rq) => rq.take(recv.room()),
            RecvSource::Xrc(id) if !self.sh.leases.returned.is_empty() => {
                let taken = self.sh.take_returned(self.env, *id, recv.room());
                taken.map(|taken| TakenWqe { wr_id: taken.wr_id, num_sge: taken.sges })
            }
            RecvSource::Shared(id) | RecvSource::Xrc(id) => match self.sh.srqs.get_mut(id.0 as usize) {
                None => None,
                Some(srq) => {
                    let taken = srq.rq.take(recv.room());
                    if srq.limit > 0 && srq.rq.len() < srq.limit {
                        srq.limit = 0;
                        self.env.event(AsyncEvent::SrqLimit(*id));
                    }
                    taken
                }
            },
        };
        match taken {
            Some(TakenWqe { wr_id, num_sge }) => {
                recv.held = true;
                recv.wr_id = wr_id;
                recv.num_sge = num_sge as u8;
                true
            }
            None => {
                if let RecvSource::Xrc(id) = self.qp.rq {
                    self.sh.revoke_leases(self.env, id, None);
                }
                false
            }
        }
    }

    /// UC and UD, whose next message is lost if none is posted: notes whether this one had the last.
    pub(super) fn look_for_receives(&mut self) {
        if lacks_receives(self.qp, self.sh) {
            self.sh.starved = Some(self.qp.qpn);
        }
    }

    /// Writes `data` at `offset` of the held receive WQE.
    pub(super) fn place(&mut self, offset: u32, data: &[u8]) -> Result<(), PlaceError> {
        self.sh.stats.rx_bytes.add(data.len() as u64);
        if data.is_empty() {
            return Ok(());
        }
        let pd = self.recv_pd();
        let sges = self.qp.resp.recv.sges();
        let room: u64 = sges.iter().map(|s| u64::from(s.len)).sum();
        if u64::from(offset) + data.len() as u64 > room {
            return Err(PlaceError::TooLong);
        }
        let (mrs, env) = (&self.sh.mrs, &mut *self.env);
        let mut rest = data;
        slices(sges.iter().copied(), offset, data.len() as u32, |sge, skip, n| {
            let addr =
                mrs.resolve_local(sge.lkey, pd, sge.addr.wrapping_add(u64::from(skip)), n, true).ok()?;
            let (now, later) = rest.split_at_checked(n as usize)?;
            rest = later;
            env.dma_write(addr, now).then_some(())
        })
        .ok_or(PlaceError::Protection)
    }

    /// Keys of an SRQ's WQEs belong to the SRQ's PD (IBTA 10.2.9.1).
    fn recv_pd(&self) -> PdId {
        match &self.qp.rq {
            RecvSource::Own(_) => self.qp.pd,
            RecvSource::Shared(id) | RecvSource::Xrc(id) => {
                self.sh.srqs.get(id.0 as usize).map_or(self.qp.pd, |s| s.pd)
            }
        }
    }

    /// Keys in requests belong to the QP's PD, of XRC to that of the SRQ that the request names (A14.5).
    pub(super) fn remote_qp(&self) -> QpId {
        let pd = if self.qp.qp_type == QpType::XrcRecv { self.recv_pd() } else { self.qp.pd };
        QpId { pd, qpn: self.qp.qpn }
    }

    /// Where receives complete whose SRQ has a CQ of its own.
    pub(super) fn srq_cq(&self) -> Option<&E::Cq> {
        let srq = |id: &SrqId| self.sh.srqs.get(id.0 as usize);
        match &self.qp.rq {
            RecvSource::Xrc(id) => srq(id)?.xrc.as_ref().map(|(_, cq)| cq),
            RecvSource::Shared(id) if self.qp.req.own => srq(id)?.tags.as_ref().map(|tags| &tags.cq),
            _ => None,
        }
    }

    /// XRC: takes from the SRQ that the request names, from now on. Nobody's: there is none such in the QP's
    /// domain, or the message began with another.
    pub(super) fn name_srq(&mut self, packet: &Packet<'_>) -> SrqLocation {
        let Some(mut number) = packet.xrc_srq() else { return SrqLocation::Local };
        if self.qp.resp.fwd.is_some() {
            let (named, local) = self.locate_srq(number);
            if named != SrqLocation::Local {
                return named;
            }
            number = local;
        }
        let RecvSource::Xrc(now) = &mut self.qp.rq else { return SrqLocation::Unknown };
        let Some(srq) = self.sh.srqs.get(number as usize) else { return SrqLocation::Unknown };
        if srq.xrc.as_ref().map(|(domain, _)| *domain) != Some(self.qp.pd) {
            return SrqLocation::Unknown;
        }
        if now.0 == number {
            return SrqLocation::Local;
        }
        /* what the message has taken so far completes where it began */
        let begins = matches!(self.qp.resp.cur, MessageInProgress::Idle);
        if begins {
            *now = SrqId(number);
        }
        if begins { SrqLocation::Local } else { SrqLocation::Unknown }
    }
}
