//! Receive WQEs: taking one, and placing bytes in it.

use super::requester::slices;
use super::{Ctx, Qp};
use crate::env::{Env, RecvQueue};
use crate::qp::RecvSource;
use crate::types::{AsyncEvent, PdId, Sge};

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
        matches!(self.rq, RecvSource::Shared(_))
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
            RecvSource::Own(rq) => rq.take(&mut recv.sges),
            RecvSource::Shared(id) => match self.sh.srqs.get_mut(id.0 as usize) {
                None => None,
                Some(srq) => {
                    let taken = srq.rq.take(&mut recv.sges);
                    if srq.limit > 0 && srq.rq.len() < srq.limit {
                        srq.limit = 0;
                        self.env.event(AsyncEvent::SrqLimit(*id));
                    }
                    taken
                }
            },
        };
        match taken {
            Some((wr_id, n)) => {
                recv.held = true;
                recv.wr_id = wr_id;
                recv.num_sge = n as u8;
                true
            }
            None => false,
        }
    }

    /// Writes `data` at `offset` of the held receive WQE.
    pub(super) fn place(&mut self, offset: u32, data: &[u8]) -> Result<(), PlaceError> {
        self.sh.stats.rx_bytes.add(data.len() as u64);
        if data.is_empty() {
            return Ok(());
        }
        let pd = self.recv_pd();
        let recv = &self.qp.resp.recv;
        let sges: &[Sge] = recv.sges.get(..usize::from(recv.num_sge)).unwrap_or(&[]);
        let room: u64 = sges.iter().map(|s| u64::from(s.len)).sum();
        if u64::from(offset) + data.len() as u64 > room {
            return Err(PlaceError::TooLong);
        }
        let (mrs, env) = (&self.sh.mrs, &mut *self.env);
        let mut rest = data;
        slices(sges, offset, data.len() as u32, |sge, skip, n| {
            let addr =
                mrs.resolve_local(sge.lkey, pd, sge.addr.wrapping_add(u64::from(skip)), n, true).ok()?;
            let (now, later) = rest.split_at_checked(n as usize)?;
            env.dma_write(addr, now);
            rest = later;
            Some(())
        })
        .ok_or(PlaceError::Protection)
    }

    /// Keys of an SRQ's WQEs belong to the SRQ's PD (IBTA 10.2.9.1).
    fn recv_pd(&self) -> PdId {
        match &self.qp.rq {
            RecvSource::Own(_) => self.qp.pd,
            RecvSource::Shared(id) => self.sh.srqs.get(id.0 as usize).map_or(self.qp.pd, |s| s.pd),
        }
    }
}
