//! Queue pairs: made, modified, asked, ended.

use super::path::PathId;
use super::timers::TimerId;
use super::{MAX_SGE, Nic, QpShared};
use crate::engine::{Call, Engine};
use crate::env::{CompletionQueue, Env, RecvQueue, SendQueue};
use crate::error::NicError;
use crate::limits::room;
use crate::qp::modify::{check, check_values};
use crate::qp::{EventOwner, PathMig, QpAttr, QpAttrMask, QpInit, RecvSource};
use crate::room::{TwoEnds, filled};
use crate::transport::remote_srq::Forwarding;
use crate::transport::{ConnAttr, Ctx, Flags, Qp, Quiesce, Requester, Responder, Track, enter_error};
use crate::types::{Access, Nanos, PdId, QpState, QpType, Qpn};

impl<E: Env> Nic<E> {
    /// A new QP in RESET. `Exhausted`: there are as many as may be; or no QPN is left: give the card another
    /// block.
    pub fn create_qp(&mut self, init: QpInit<E::Sq, E::Rq, E::Cq>) -> Result<Qpn, NicError> {
        let max_sge = match &init.rq {
            RecvSource::Own(rq) => rq.max_sge(),
            RecvSource::Shared(srq) => self.shared.srq_max_sge(*srq).ok_or(NicError::NotFound)?,
            /* each request names its SRQ: room for the WQEs of any */
            RecvSource::Xrc(_) => MAX_SGE,
        };
        room(self.qps.len(), self.shared.cfg.limits.qps)?;
        let track = filled::<Track>(init.sq.slots() as usize)?;
        let shared = init.qp_type == QpType::XrcRecv && self.shared.is_shared(init.pd);
        let fwd = if shared { Some(Forwarding::new()?) } else { None };
        self.qps.make_room()?;
        self.shared.hold_pd(init.pd)?;
        let (qpn, timer) = self.take_places(init.qp_type).inspect_err(|_| self.shared.drop_pd(init.pd))?;
        if let RecvSource::Shared(srq) = init.rq {
            self.shared.srqs[srq.0 as usize].users += 1;
        }
        let req = Requester::new(track);
        self.insert_qp(init, qpn, timer, req, Responder { fwd, ..Responder::new(max_sge) });
        self.shared.stats.qps.inc();
        Ok(qpn)
    }

    /// Puts a QP in RESET into its places, of which there are enough.
    pub(super) fn insert_qp(
        &mut self,
        init: QpInit<E::Sq, E::Rq, E::Cq>,
        qpn: Qpn,
        timer: TimerId,
        req: Requester,
        resp: Responder,
    ) {
        let own =
            matches!(init.rq, RecvSource::Shared(srq) if self.shared.srqs[srq.0 as usize].tags.is_some());
        let qp = Qp {
            qpn,
            qp_type: init.qp_type,
            state: QpState::Reset,
            block_own: init.block_own_multicast,
            quiesce: Quiesce::No,
            flags: Flags { sig_all: init.sq_sig_all, ..Flags::default() },
            pd: init.pd,
            path: Default::default(),
            timer,
            mtu: self.shared.cfg.mtu.bytes(),
            req: Requester { own, ..req },
            resp,
            sq: init.sq,
            rq: init.rq,
            send_cq: init.send_cq,
            recv_cq: init.recv_cq,
            cookie: init.cookie,
            engine: None,
            rpc: None,
            attr: ConnAttr { path_mtu: self.shared.cfg.mtu, ..ConnAttr::default() },
        };
        self.qps.insert(qpn, qp);
    }

    /// A QP's places in the card's tables: its number and its timer. `Exhausted`: there is none, and nothing
    /// is taken.
    fn take_places(&mut self, qp_type: QpType) -> Result<(Qpn, TimerId), NicError> {
        if self.qps.free() == 0 {
            return Err(NicError::Exhausted);
        }
        let timer = self.take_timer(qp_type)?;
        Ok((self.qps.reserve()?, timer))
    }

    /// The place among the timers alone, and where contexts are few among them.
    pub(super) fn take_timer(&mut self, qp_type: QpType) -> Result<TimerId, NicError> {
        let QpShared { sched, paths, contexts, .. } = &mut self.shared;
        let timer = sched.join()?;
        let room = contexts.as_mut().map_or(Ok(()), |contexts| contexts.join(sched, timer));
        let room = room.and_then(|()| if qp_type == QpType::Ud { paths.add_datagram_qp() } else { Ok(()) });
        if let Err(error) = room {
            sched.leave(timer);
            return Err(error);
        }
        Ok(timer)
    }

    /// Transport of a QP.
    pub fn qp_type(&self, qpn: Qpn) -> Option<QpType> {
        self.qps.get(qpn).map(|qp| qp.qp_type)
    }

    /// State of a QP.
    pub fn qp_state(&self, qpn: Qpn) -> Option<QpState> {
        self.qps.get(qpn).map(|qp| qp.state)
    }

    /// Attributes of a QP.
    pub fn query_qp(&self, qpn: Qpn) -> Result<QpAttr, NicError> {
        let qp = self.qps.get(qpn).ok_or(NicError::NotFound)?;
        let attr = &qp.attr;
        Ok(QpAttr {
            state: qp.state,
            cur_state: qp.state,
            path_mtu: attr.path_mtu,
            qkey: attr.qkey,
            rq_psn: qp.resp.epsn,
            sq_psn: qp.req.psn,
            dest_qpn: attr.dest_qpn,
            access: attr.access,
            av: attr.av,
            /* the only ones there are */
            pkey_index: 0,
            port_num: 1,
            max_rd_atomic: attr.max_rd_atomic,
            max_dest_rd_atomic: attr.max_dest_rd_atomic,
            min_rnr_timer: attr.min_rnr_timer,
            timeout: attr.timeout,
            retry_cnt: attr.retry_cnt,
            rnr_retry: attr.rnr_retry,
            path_mig: PathMig::Migrated,
            en_sqd_async_notify: attr.en_sqd_async_notify,
            sq_draining: qp.state == QpState::Sqd && qp.req.una != qp.req.fresh,
        })
    }

    /// Whose a QP is.
    pub fn qp_owner(&self, qpn: Qpn) -> Option<EventOwner> {
        self.qps.get(qpn).map(|qp| EventOwner { pd: qp.pd, cookie: qp.cookie })
    }

    /// How many QPNs are taken: by QPs of any transport and in any state, and by those that have left
    /// ([`Nic::release_qp`]).
    pub fn qp_count(&self) -> usize {
        self.qps.len()
    }

    /// Connections whose state this card keeps: RC QPs that have a peer, in RTR or beyond, ERR too. Ends that
    /// have left are kept by their peers.
    pub fn connection_count(&self) -> u32 {
        self.shared.connections
    }

    /// Numbers of the QPs there are, in no order.
    pub fn qpns(&self) -> impl Iterator<Item = Qpn> + '_ {
        self.qps.each().map(|qp| qp.qpn)
    }

    /// ibv_modify_qp: the table of `qp::modify` has what is allowed. Whether the links on the way carry
    /// the path MTU is the caller's to know.
    pub fn modify_qp(
        &mut self,
        env: &mut E,
        qpn: Qpn,
        attr: &QpAttr,
        mask: QpAttrMask,
        now: Nanos,
    ) -> Result<(), NicError> {
        let limit = self.shared.cfg.max_rd_atomic;
        let mut cx = self.context(env, qpn, now).ok_or(NicError::NotFound)?;
        let from = cx.qp.state;
        if mask.contains(QpAttrMask::CUR_STATE) && attr.cur_state != from {
            return Err(NicError::Invalid);
        }
        let to = if mask.contains(QpAttrMask::STATE) { attr.state } else { from };
        if to == QpState::Sqd && cx.qp.flags.held && !cx.qp.engine.as_ref().is_some_and(Engine::drains) {
            return Err(NicError::Invalid);
        }
        check(cx.qp.qp_type, from, to, mask)?;
        check_values(attr, mask, limit)?;
        let (before, was) = (cx.qp.attr, cx.qp.is_connection());
        merge(&mut cx.qp.attr, attr, mask);
        let path = make_room(&mut cx, mask).inspect_err(|_| cx.qp.attr = before)?;
        enter(&mut cx, from, to, attr, mask, path);
        cx.count_connection(was);
        Ok(())
    }

    /// Ends a QP. Its completions that were not polled are gone, windows of type 2 that were bound on it
    /// are not bound any more. `Busy` while it is attached to a multicast group.
    pub fn destroy_qp(&mut self, env: &mut E, qpn: Qpn) -> Result<(), NicError> {
        if self.groups.holds(qpn) {
            return Err(NicError::Busy);
        }
        let qp = self.take_out(env, qpn).ok_or(NicError::NotFound)?;
        qp.send_cq.purge(qpn);
        qp.recv_cq.purge(qpn);
        self.give_up(qpn, qp.pd, &qp.rq, qp.flags.windows);
        Ok(())
    }

    /// Takes a QP out of all that the card does. Its number, and its use of its domain and its SRQ, are still
    /// taken.
    pub(super) fn take_out(&mut self, env: &mut E, qpn: Qpn) -> Option<Qp<E>> {
        let mut cx = self.context(env, qpn, 0)?;
        cx.close_engine();
        if !cx.qp.flags.held {
            /* The peer's last message may wait for its ACK: nobody could send it later. One that has an
             * engine, or may come to have one, owes none, and by a plain packet its peer would take it for
             * plain. */
            cx.send_final_acks();
        }
        cx.forget_gaps();
        /* Leaves the window to others; what is posted is dropped without completions. */
        cx.forget_inflight();
        cx.leave_queues();
        cx.abandon_forwarded();
        cx.stop_kernel();
        let qp = self.qps.take(qpn)?;
        self.shared.connections -= u32::from(qp.is_connection());
        self.shared.sched.leave(qp.timer);
        if qp.qp_type == QpType::Ud {
            self.shared.paths.drop_datagram_qp();
        } else {
            self.shared.paths.disconnect(qp.path);
        }
        Some(qp)
    }

    /// Gives back what a QP that is gone still has. `windows`: some may be bound on it.
    pub(super) fn give_up(&mut self, qpn: Qpn, pd: PdId, rq: &RecvSource<E::Rq>, windows: bool) {
        if let RecvSource::Shared(srq) = rq
            && let Some(srq) = self.shared.srqs.get_mut(srq.0 as usize)
        {
            srq.users = srq.users.saturating_sub(1);
            if let Some(tags) = &mut srq.tags {
                tags.list.forget(qpn);
            }
        }
        if windows {
            self.shared.mrs.unbind_all(qpn);
        }
        self.qps.give_back(qpn);
        self.shared.drop_pd(pd);
        self.shared.stats.qps.sub(1);
    }
}

impl<E: Env> Qp<E> {
    /// Whether it is an end of an RC connection that has begun. Only what programs ask for changes that: what
    /// happens to a connection leaves it one, in ERR.
    fn is_connection(&self) -> bool {
        let begun = !matches!(self.state, QpState::Reset | QpState::Init);
        self.qp_type == QpType::Rc && begun && self.attr.dest_qpn != 0
    }
}

impl<E: Env> Ctx<'_, E> {
    /// Counts the QP, which was a connection or was none, as what it is now.
    fn count_connection(&mut self, was: bool) {
        let (connections, is) = (&mut self.sh.connections, self.qp.is_connection());
        *connections = *connections - u32::from(was) + u32::from(is);
    }
}

/// Takes over the attributes that `mask` names.
fn merge(to: &mut ConnAttr, from: &QpAttr, mask: QpAttrMask) {
    macro_rules! take {
        ($($bit:ident => $($field:ident),+;)+) => {
            $(if mask.contains(QpAttrMask::$bit) { $(to.$field = from.$field;)+ })+
        };
    }
    take! {
        EN_SQD_ASYNC_NOTIFY => en_sqd_async_notify;
        ACCESS_FLAGS => access;
        QKEY => qkey;
        AV => av;
        PATH_MTU => path_mtu;
        TIMEOUT => timeout;
        RETRY_CNT => retry_cnt;
        RNR_RETRY => rnr_retry;
        MAX_QP_RD_ATOMIC => max_rd_atomic;
        MIN_RNR_TIMER => min_rnr_timer;
        MAX_DEST_RD_ATOMIC => max_dest_rd_atomic;
        DEST_QPN => dest_qpn;
    }
}

/// Room for the answers to READs and the like that the program accepts, so that they need none later, and a
/// place on the path that the QP is to take, if that is new. `Exhausted`: no memory.
fn make_room<E: Env>(cx: &mut Ctx<'_, E>, mask: QpAttrMask) -> Result<Option<PathId>, NicError> {
    let ConnAttr { access, max_dest_rd_atomic: most, .. } = cx.qp.attr;
    /* ATOMIC WRITE takes the right to write */
    let answered = Access::REMOTE_READ | Access::REMOTE_ATOMIC | Access::REMOTE_WRITE;
    let flushes = Access::FLUSH_GLOBAL | Access::FLUSH_PERSISTENT;
    if access.intersects(answered | flushes) {
        cx.qp.resp.out.make_exact_room(2 * usize::from(most))?;
    }
    if access.contains(Access::REMOTE_ATOMIC) && most > 0 {
        cx.qp.resp.results.get_or_insert_default().resize(most)?;
    }
    if !mask.contains(QpAttrMask::AV) {
        return Ok(None);
    }
    let path = cx.sh.path_to(cx.qp.attr.av.dgid)?;
    cx.sh.paths.make_room(path)?;
    Ok(Some(path))
}

/// What reaching a state means.
fn enter<E: Env>(
    cx: &mut Ctx<'_, E>,
    from: QpState,
    to: QpState,
    attr: &QpAttr,
    mask: QpAttrMask,
    path: Option<PathId>,
) {
    if let Some(path) = path {
        cx.forget_inflight();
        cx.leave_window();
        cx.sh.paths.connect(cx.qp.path, path);
        cx.qp.path = path;
    }
    if mask.contains(QpAttrMask::RQ_PSN) {
        cx.qp.resp.epsn = attr.rq_psn;
    }
    if mask.contains(QpAttrMask::SQ_PSN) {
        let psn = attr.sq_psn;
        let req = &mut cx.qp.req;
        (req.psn, req.una_psn, req.max_psn) = (psn, psn, psn);
    }
    if mask.contains(QpAttrMask::PATH_MTU) {
        cx.qp.mtu = cx.qp.attr.path_mtu.bytes();
    }
    cx.qp.req.rnr_left = cx.qp.attr.rnr_retry;
    if matches!(to, QpState::Reset | QpState::Err) {
        cx.flush_acks();
    }
    cx.qp.state = to;
    match to {
        QpState::Reset => reset(cx),
        QpState::Err => {
            cx.qp.resp.out.clear();
            cx.qp.resp.nak = None;
            if from != QpState::Err {
                enter_error(cx, QpState::Err);
            }
        }
        QpState::Sqd if from != QpState::Sqd => {
            cx.qp.attr.en_sqd_async_notify &= mask.contains(QpAttrMask::EN_SQD_ASYNC_NOTIFY);
            cx.qp.flags.drained = false;
            cx.set_engine();
            if cx.run_engine(Call::Drain).is_none() {
                cx.drained();
            }
        }
        QpState::Rtr => cx.offer_repeat(),
        QpState::Rts => {
            cx.set_engine();
            cx.doorbell();
        }
        _ => {}
    }
}

/// RESET forgets everything, without completions (IBTA 10.3.1.1).
fn reset<E: Env>(cx: &mut Ctx<'_, E>) {
    cx.close_engine();
    cx.forget_inflight();
    cx.forget_gaps();
    cx.leave_queues();
    cx.forget_tags();
    cx.abandon_forwarded();
    cx.stop_kernel();
    let qp = &mut *cx.qp;
    qp.sq.reset();
    if let RecvSource::Own(rq) = &qp.rq {
        rq.reset();
    }
    qp.send_cq.purge(qp.qpn);
    qp.recv_cq.purge(qp.qpn);
    let track = core::mem::take(&mut qp.req.track);
    let next = qp.sq.posted();
    qp.req = Requester { own: qp.req.own, next, una: next, fresh: next, ..Requester::new(track) };
    let mut fwd = qp.resp.fwd.take();
    if let Some(fwd) = &mut fwd {
        fwd.reset();
    }
    qp.resp = Responder { fwd, ..Responder::new(qp.resp.max_sge()) };
    let Flags { sig_all, windows, .. } = qp.flags;
    qp.flags = Flags { sig_all, ..Flags::default() };
    qp.quiesce = if qp.rpc.is_some() { Quiesce::Never } else { Quiesce::No };
    if let Some(rpc) = &mut qp.rpc {
        rpc.reset();
    }
    qp.attr = ConnAttr { path_mtu: cx.sh.cfg.mtu, ..ConnAttr::default() };
    /* they were for the peer of this connection: the next one shall not reach memory through them */
    if windows {
        cx.sh.mrs.unbind_all(qp.qpn);
    }
}
