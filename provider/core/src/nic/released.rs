//! Queue pairs that leave the card, which keeps nothing of them.
//!
//! What the program made such a QP of goes to the host, which serves it. Its number stays its own, and its
//! protection domain and SRQ stay in use, until it comes back or ends.

use alloc::boxed::Box;

use super::{Nic, TimerId};
use crate::env::{Env, RecvQueue, SendQueue};
use crate::error::NicError;
use crate::mr::MrTable;
use crate::qp::{EventOwner, QpAttr, QpAttrMask, QpInit, RecvSource};
use crate::room::filled;
use crate::transport::{Flags, Quiesce, Requester, Responder, Rpc, Track};
use crate::types::{AsyncEvent, Nanos, QpState, Qpn, SrqId};

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
    /// Its program was notified that the connection is there
    pub established: bool,
    /// Its kernels' run, where it speaks StRoM's dialect: for the card that it may come back to
    rpc: Option<Box<Rpc>>,
}

impl<E: Env> Released<E> {
    /// Whose it is.
    pub fn owner(&self) -> EventOwner {
        EventOwner { pd: self.init.pd, cookie: self.init.cookie }
    }

    /// The SRQ from which it receives.
    pub fn srq(&self) -> Option<SrqId> {
        match self.init.rq {
            RecvSource::Shared(srq) => Some(srq),
            RecvSource::Own(_) | RecvSource::Xrc(_) => None,
        }
    }
}

/// What a QP needs on the card beside its number.
pub struct QpPlaces {
    /// SGEs of its receives
    max_sge: usize,
    /// Room for what it sends
    track: Box<[Track]>,
    timer: TimerId,
}

impl<E: Env> Nic<E> {
    /// Takes a QP out of the card that is held ([`Nic::hold_qp`]) and in RTR or RTS. `Invalid`: it is not so.
    pub fn release_qp(&mut self, env: &mut E, qpn: Qpn) -> Result<Released<E>, NicError> {
        let state = self.qp_state(qpn).ok_or(NicError::NotFound)?;
        if !self.is_held(qpn) || !matches!(state, QpState::Rtr | QpState::Rts) {
            return Err(NicError::Invalid);
        }
        let attr = self.query_qp(qpn)?;
        let qp = self.take_out(env, qpn).ok_or(NicError::NotFound)?;
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
        let Flags { windows, established, .. } = qp.flags;
        Ok(Released { qpn, init, attr, windows, established, rpc: qp.rpc })
    }

    /// What a QP needs to come back, for [`Nic::readmit`]. `Exhausted`: no memory, and nothing is taken.
    pub fn prepare_return(&mut self, released: &Released<E>) -> Result<QpPlaces, NicError> {
        let init = &released.init;
        let max_sge = match &init.rq {
            RecvSource::Own(rq) => rq.max_sge(),
            RecvSource::Shared(srq) => self.shared.srq_max_sge(*srq).ok_or(NicError::NotFound)?,
            RecvSource::Xrc(_) => return Err(NicError::Invalid),
        };
        let track = filled(init.sq.slots() as usize)?;
        self.qps.promise()?;
        let timer = self.take_timer(init.qp_type).inspect_err(|_| self.qps.end_promise())?;
        Ok(QpPlaces { max_sge, track, timer })
    }

    /// What was prepared is not needed.
    pub fn forget_places(&mut self, places: QpPlaces) {
        self.qps.end_promise();
        self.shared.sched.leave(places.timer);
    }

    /// A QP comes back, in RESET, to what was prepared for it: what is posted to it is forgotten.
    pub fn readmit(&mut self, released: Released<E>, places: QpPlaces) {
        let Released { qpn, init, windows, .. } = &released;
        init.sq.reset();
        if let RecvSource::Own(rq) = &init.rq {
            rq.reset();
        }
        if *windows {
            self.shared.mrs.unbind_all(*qpn);
        }
        let next = init.sq.posted();
        self.insert_back(released, places, next);
    }

    fn insert_back(&mut self, released: Released<E>, places: QpPlaces, next: u32) {
        let QpPlaces { max_sge, track, timer } = places;
        let Released { qpn, init, rpc, .. } = released;
        let mut req = Requester::new(track);
        req.start_at(next);
        self.qps.end_promise();
        self.insert_qp(init, qpn, timer, req, Responder::new(max_sge));
        if let (Some(qp), Some(mut rpc)) = (self.qps.get_mut(qpn), rpc) {
            rpc.reset();
            (qp.rpc, qp.quiesce) = (Some(rpc), Quiesce::Never);
        }
    }

    /// A QP comes back to what was prepared for it while its connection runs: in the state and with the
    /// attributes that it has, its PSNs where they were. `first_send`: index of its oldest request that is
    /// not done. An error: there is no memory, and it is in ERR.
    pub fn readmit_running(
        &mut self,
        env: &mut E,
        released: Released<E>,
        places: QpPlaces,
        first_send: u32,
        now: Nanos,
    ) -> Result<(), NicError> {
        let Released { qpn, attr, windows, established, .. } = released;
        self.insert_back(released, places, first_send);
        if let Some(qp) = self.qps.get_mut(qpn) {
            (qp.flags.windows, qp.flags.established) = (windows, established);
        }
        let came = self.lead_back(env, qpn, &attr, now);
        if came.is_err() {
            let to = QpAttr { state: QpState::Err, ..QpAttr::default() };
            self.modify_qp(env, qpn, &to, QpAttrMask::STATE, now)?;
        }
        came
    }

    /// As its program has led it there.
    fn lead_back(&mut self, env: &mut E, qpn: Qpn, attr: &QpAttr, now: Nanos) -> Result<(), NicError> {
        use QpAttrMask as M;
        let ready = M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_QP_RD_ATOMIC;
        let peer = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
        let way = [
            (QpState::Init, M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS),
            (QpState::Rtr, peer),
            (QpState::Rts, ready),
        ];
        for (state, mask) in way {
            let to = QpAttr { state, ..*attr };
            self.modify_qp(env, qpn, &to, mask | M::STATE, now)?;
            if state == attr.state {
                break;
            }
        }
        Ok(())
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

    /// Memory that keys open.
    pub fn memory(&mut self) -> &mut MrTable<E::Mrs> {
        &mut self.shared.mrs
    }

    /// Receives of an SRQ were taken by a QP that has left: the event that the program asked for is due if
    /// few are left.
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
