//! Queue pairs that leave the card, as it keeps nothing of them: the stateless ends of StaR connections.
//!
//! What the program made such a QP of goes to the host, to be served by a [library](crate::star::library). Its number stays its own, and
//! its protection domain and SRQ stay in use, until it comes back or ends.

use alloc::boxed::Box;

use super::{Nic, TimerId};
use crate::env::{Env, RecvQueue, SendQueue};
use crate::error::NicError;
use crate::mr::{Bind, MrFault, MrTable};
use crate::qp::{Owner, QpAttr, QpInit, RecvSource};
use crate::room::{filled, is_room_for};
use crate::transport::{Qp, Requester, Responder, Track};
use crate::types::{AsyncEvent, PdId, QpState, Qpn, SendOp, SendWqe, SrqId};

/// A QP that has left the card.
pub struct Released<E: Env> {
    /// Its number
    pub qpn: Qpn,
    /// What it was made of
    pub init: QpInit<E::Sq, E::Rq, E::Cq>,
    /// Its attributes, and its state
    pub attr: QpAttr,
    /// Windows may be bound on it
    pub windows: bool,
}

impl<E: Env> Released<E> {
    /// Whose it is.
    pub fn owner(&self) -> Owner {
        Owner { pd: self.init.pd, cookie: self.init.cookie }
    }

    /// The SRQ from which it receives.
    pub fn srq(&self) -> Option<SrqId> {
        match self.init.rq {
            RecvSource::Shared(srq) => Some(srq),
            RecvSource::Own(_) | RecvSource::Xrc(_) => None,
        }
    }
}

/// A QP that may leave, as far as its host must know it before.
pub struct Leaving<'a, E: Env> {
    /// Whose it is
    pub owner: Owner,
    /// Its attributes, and its state
    pub attr: QpAttr,
    /// The SRQ from which it receives, and its ring
    pub srq: Option<(SrqId, &'a E::Rq)>,
    /// Every send makes a completion
    pub sq_sig_all: bool,
    /// Index in the send queue of the first request that was not sent
    pub first_send: u32,
}

/// What a QP needs on the card beside its number.
pub struct Places {
    /// SGEs of its receives
    max_sge: usize,
    /// Room for what it sends
    track: Box<[Track]>,
    timer: TimerId,
}

impl<E: Env> Nic<E> {
    /// What [`Nic::release_for_star`] will give of a QP. `NotFound`: there is none.
    pub fn leaving(&self, qpn: Qpn) -> Result<Leaving<'_, E>, NicError> {
        let attr = self.query_qp(qpn)?;
        let qp = self.qps.get(qpn).ok_or(NicError::NotFound)?;
        let srq = match qp.rq {
            RecvSource::Shared(id) => self.srq_ring(id).map(|ring| (id, ring)),
            RecvSource::Own(_) | RecvSource::Xrc(_) => None,
        };
        let owner = Owner { pd: qp.pd, cookie: qp.cookie };
        Ok(Leaving { owner, attr, srq, sq_sig_all: qp.flags.sig_all, first_send: qp.req.una })
    }

    /// Takes a QP out of the card that waits ([`Nic::hold_for_star`]) and is in RTR or RTS. `Invalid`: it is not so.
    pub fn release_for_star(&mut self, env: &mut E, qpn: Qpn) -> Result<Released<E>, NicError> {
        let state = self.qp_state(qpn).ok_or(NicError::NotFound)?;
        if !self.waits_for_star(qpn) || !matches!(state, QpState::Rtr | QpState::Rts) {
            return Err(NicError::Invalid);
        }
        let attr = self.query_qp(qpn)?;
        let qp = *self.take_out(env, qpn).ok_or(NicError::NotFound)?;
        let init = QpInit {
            qp_type: qp.qp_type,
            pd: qp.pd,
            sq: qp.sq,
            rq: qp.rq,
            send_cq: qp.send_cq,
            recv_cq: qp.recv_cq,
            sq_sig_all: qp.flags.sig_all,
            block_own_multicast: qp.block_own,
            cookie: qp.cookie,
        };
        Ok(Released { qpn, init, attr, windows: qp.flags.windows })
    }

    /// What a QP needs to come back, for [`Nic::readmit`]. `Exhausted`: no memory, and nothing is taken.
    pub fn prepare_return(&mut self, released: &Released<E>) -> Result<Places, NicError> {
        if !is_room_for(size_of::<Qp<E>>()) {
            return Err(NicError::Exhausted);
        }
        let init = &released.init;
        let max_sge = match &init.rq {
            RecvSource::Own(rq) => rq.max_sge(),
            RecvSource::Shared(srq) => self.shared.srq_max_sge(*srq).ok_or(NicError::NotFound)?,
            RecvSource::Xrc(_) => return Err(NicError::Invalid),
        };
        let track = filled(init.sq.slots() as usize)?;
        Ok(Places { max_sge, track, timer: self.take_timer(init.qp_type)? })
    }

    /// A QP comes back, in RESET, to what was prepared for it: what is posted to it is forgotten.
    pub fn readmit(&mut self, released: Released<E>, places: Places) {
        let Places { max_sge, track, timer } = places;
        let Released { qpn, init, windows, .. } = released;
        init.sq.reset();
        if let RecvSource::Own(rq) = &init.rq {
            rq.reset();
        }
        if windows {
            self.shared.mrs.unbind_all(qpn);
        }
        let next = init.sq.posted();
        let req = Requester { next, una: next, fresh: next, ..Requester::new(track) };
        self.insert_qp(init, (qpn, timer), req, Responder::new(max_sge));
    }

    /// A QP that has left ends: its number is free, and nothing is in use by it.
    pub fn end_released(&mut self, released: &Released<E>) {
        let Released { qpn, init, windows, .. } = released;
        self.give_up(*qpn, init.pd, &init.rq, *windows);
    }

    /// The ring of an SRQ, of which the host may have another handle.
    pub fn srq_ring(&self, srq: SrqId) -> Option<&E::Rq> {
        self.shared.srqs.get(srq.0 as usize).map(|srq| &srq.rq)
    }

    /// Memory that keys open: for who tells stateful peers.
    pub fn memory(&mut self) -> &mut MrTable {
        &mut self.shared.mrs
    }

    /// A bind or an invalidation was posted to a QP that has left, and all before it is done.
    pub fn do_for_released(&mut self, wqe: &SendWqe, owner: (PdId, Qpn)) -> Result<(), MrFault> {
        match wqe.op {
            SendOp::BindMw => self.shared.mrs.bind(&Bind::of(wqe, owner)).map(|_| ()),
            _ => self.shared.mrs.invalidate(wqe.rkey, owner),
        }
    }

    /// A peer's SEND with invalidate came to a QP that has left.
    pub fn invalidate_for_released(&mut self, key: u32, owner: (PdId, Qpn)) -> Result<(), MrFault> {
        self.shared.mrs.invalidate_remote(key, owner)
    }

    /// Receives of an SRQ were taken by a QP that has left: the event that the program asked for is due if few are left.
    pub fn took_from_srq(&mut self, env: &mut E, srq: SrqId) {
        if let Some(entry) = self.shared.srqs.get_mut(srq.0 as usize)
            && entry.limit > 0
            && entry.rq.len() < entry.limit
        {
            entry.limit = 0;
            env.event(AsyncEvent::SrqLimit(srq));
        }
    }
}
