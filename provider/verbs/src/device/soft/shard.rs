//! What the card's lock guards: the card, its host, and the parts of the process that take turns with it.

use std::sync::Arc;

use starverbs_backend::{QpCarrier, QpList, RoceTx};
use starverbs_core::coalesce::{Backlog, When};
use starverbs_core::qp::{EventOwner, QpAttr, QpAttrMask};
use starverbs_core::shared_qp::SharedQpMessage;
use starverbs_core::{AsyncEvent, Nanos, Nic, NicError, PdId, QpState, Qpn};

use super::deferred_log::{DeferredLog, NO_DIALECT};
use super::domains::DomainEvents;
use super::doorbells::{Deferred, Posted};
use super::env::HostEnv;
use super::intake::Intake;
use super::local::{self, LocalHost};
use super::mads::CardMads;
use super::rpc::Replies;
use super::shared_qps::SharedQps;
use super::star::StarHost;
use crate::cm::CmHost;
use crate::device::command::Events;
use crate::device::idle::Idle;
use crate::error::Result;
use crate::events::{VerbsEvent, kind};
use crate::moderation::Moderator;
use crate::qp::QpInner;
use crate::stat::StatPage;

/// What the card's lock guards.
pub(crate) struct Shard {
    pub(crate) nic: Nic<HostEnv>,
    pub(crate) env: HostEnv,
    pub(crate) intake: Intake,
    pub(super) stats: StatPage,
    /// When the progress thread means to wake up at the latest
    pub(super) alarm: Nanos,
    /// Turns taken by polls
    pub(super) turns: u32,
    /// Those in a row that kept ACKs
    pub(super) acks_kept: u32,
    /// Polls that find nothing
    pub(super) idle: Idle,
    /// A turn ended with more to send
    pub(super) unsent: bool,
    /// Doorbells that wait for the card's next turn
    pub(super) deferred: Deferred,
    pub(super) domains: DomainEvents,
    /// Queue pairs of XRC domains that other processes share
    pub(super) shared_qps: Box<SharedQps>,
    pub(super) moderator: Arc<Moderator>,
    /// Boxed: it lies beside what the data path uses
    pub(crate) cm: Box<CmHost>,
    /// Ends of StaR connections
    pub(super) star: StarHost,
    /// Queue pairs that talk to others of this host without packets
    pub(super) local: LocalHost,
    /// Memory of queue pairs that speak StRoM's dialect
    pub(super) replies: Replies,
    /// The card's next timer when the thread was last told of it
    pub(super) timer_seen: Option<Nanos>,
}

impl Shard {
    pub(super) fn new(
        nic: Nic<HostEnv>,
        tx: RoceTx<StatPage>,
        intake: Intake,
        stats: StatPage,
        cm: CmHost,
        local: LocalHost,
        moderator: Arc<Moderator>,
    ) -> Self {
        let peers = intake.rx.peers().clone();
        Shard {
            nic,
            env: HostEnv::new(tx, peers),
            intake,
            stats,
            alarm: Nanos::MAX,
            turns: 0,
            acks_kept: 0,
            idle: Idle::default(),
            unsent: false,
            deferred: Deferred::new(),
            domains: DomainEvents::default(),
            shared_qps: Box::default(),
            moderator,
            cm: Box::new(cm),
            star: StarHost::default(),
            local,
            replies: Replies::default(),
            timer_seen: None,
        }
    }

    /// Ends a protection domain. The next one that gets the number is another one, and other processes'
    /// messages are not for it.
    pub(super) fn dealloc_pd(&mut self, pd: PdId) -> Result<()> {
        let Shard { nic, env, domains, shared_qps, .. } = self;
        domains.dealloc(nic, pd)?;
        shared_qps.end(env, pd);
        Ok(())
    }

    /// QPs whose events go to `events`: those of its context.
    pub(super) fn qps_reporting_to(&self, events: &Events) -> impl Iterator<Item = Qpn> {
        let reports = |owner: EventOwner| self.domains.reports_to(owner.pd, events);
        self.qpns().filter(move |qpn| self.qp_owner(*qpn).is_some_and(reports))
    }

    /// Notifies the contexts of what was raised. Events of objects that are gone are dropped.
    #[cold]
    pub(super) fn notify(&mut self, log: &DeferredLog, now: Nanos) {
        let mut raised = std::mem::take(&mut self.env.events);
        let mut mads = false;
        for event in raised.drain(..) {
            match event {
                AsyncEvent::QpFatal(qpn) => self.notify_of_qp(log, kind::QP_FATAL, qpn),
                AsyncEvent::QpReqErr(qpn) => self.notify_of_qp(log, kind::QP_REQ_ERR, qpn),
                AsyncEvent::QpAccessErr(qpn) => self.notify_of_qp(log, kind::QP_ACCESS_ERR, qpn),
                AsyncEvent::CommEst(qpn) => self.notify_of_qp(log, kind::COMM_EST, qpn),
                AsyncEvent::SqDrained(qpn) => self.notify_of_qp(log, kind::SQ_DRAINED, qpn),
                AsyncEvent::LastWqeReached(qpn) => self.notify_of_qp(log, kind::QP_LAST_WQE_REACHED, qpn),
                AsyncEvent::Mads => mads = true,
                AsyncEvent::PeerLacksDialect(qpn) => log.add(NO_DIALECT, qpn),
                AsyncEvent::SrqLimit(srq) => {
                    let event = |cookie| VerbsEvent::Srq { kind: kind::SRQ_LIMIT_REACHED, cookie };
                    self.domains.notify(self.nic.srq_owner(srq), event);
                }
            }
        }
        /* the list keeps its room */
        raised.append(&mut self.env.events);
        self.env.events = raised;
        if mads {
            self.run_cm(log, now);
        }
    }

    fn notify_of_qp(&mut self, log: &DeferredLog, kind: u32, qpn: Qpn) {
        if !matches!(kind, kind::COMM_EST | kind::SQ_DRAINED | kind::QP_LAST_WQE_REACHED) {
            log.add(kind, qpn);
        }
        let env = &mut self.env;
        let send = |link, message: SharedQpMessage| env.send_shared_qp(link, &message);
        if !self.shared_qps.notify(qpn, kind, send) {
            self.domains.notify(self.qp_owner(qpn), |cookie| VerbsEvent::Qp { kind, cookie });
        }
    }

    /// Datagrams came to queue pair 1, or the connection manager's time has come.
    #[cold]
    fn run_cm(&mut self, log: &DeferredLog, now: Nanos) {
        let Shard { nic, env, cm, .. } = self;
        cm.run(&mut CardMads { nic, env, now }, log, now);
    }

    /// Its queue pairs, for `starverbs stat`.
    pub(super) fn describe_qps(&self) -> QpList {
        let mut list = QpList::default();
        let mut qpns: Vec<Qpn> = self.qpns().collect();
        qpns.sort_unstable();
        for qpn in qpns {
            if let Ok(attr) = self.query_qp(qpn) {
                let star = self.star.word(&self.nic, qpn);
                let (link, sent, executed) = self.local.link_of(&self.nic, qpn);
                list.add(qpn, &attr, &QpCarrier { star, link, counted: [sent, executed] });
            }
        }
        list
    }
}

/// Queue pairs: one may be a stateless end, of which the card knows nothing, or the card's, whose connection
/// packets carry, or memory.
impl Shard {
    /// The doorbell of `qpn`.
    #[inline]
    pub(crate) fn ring(&mut self, qpn: Qpn, now: Nanos) {
        let Shard { nic, env, star, .. } = self;
        if !star.ring((nic, env), qpn, now) {
            nic.handle_doorbell(env, qpn, now);
        }
    }

    /// Has the doorbell of `qp` wait for the card's next turn, if it may and there is room; says which turn
    /// that is.
    #[inline]
    pub(super) fn defer(&mut self, qp: &QpInner, what: Posted, may_sleep: bool) -> When {
        let Shard { nic, env, star, local, deferred, .. } = self;
        let qpn = qp.qpn;
        let of_channels = env.channels.backlog();
        let is_local = of_channels == Backlog::BehindOthers;
        let backlog = if is_local {
            if deferred.is_full() {
                local.ring_deferred((nic, env), deferred);
            }
            of_channels
        } else if what == Posted::Receives {
            Backlog::BehindOthers
        } else if what == Posted::SmallSends && !may_sleep && !deferred.holds(qpn) && waits(nic, star, qp) {
            /* its context would hardly say anything else, and is not fetched to ask */
            Backlog::BehindOthers
        } else {
            match nic.backlog(qpn) {
                Backlog::Due => star.backlog(qpn),
                backlog => {
                    qp.note_path(nic.path_of(qpn));
                    backlog
                }
            }
        };
        let when = backlog.when(may_sleep);
        if when == When::Now || !deferred.add(qpn) {
            return When::Now;
        }
        if is_local {
            local::expect((nic, env), deferred);
        } else {
            nic.expect_engine(env, qpn);
            if let Some(before) = deferred.last(1) {
                expect(nic, env, star, before);
            }
        }
        when
    }

    /// Handles the doorbells that were deferred, in their order.
    #[inline]
    pub(super) fn ring_deferred(&mut self, now: Nanos) {
        if let Some(last) = self.deferred.last(0) {
            expect(&self.nic, &self.env, &self.star, last);
        }
        for qpn in self.deferred.qpns() {
            if !self.star.expect_behind(&self.nic, &self.env, qpn) {
                self.nic.expect_requests(&self.env, qpn);
            }
        }
        let mut at = 0;
        while let Some(qpn) = self.deferred.get(at) {
            self.ring(qpn, now);
            at += 1;
        }
        self.deferred.clear();
    }

    /// `ibv_modify_qp`
    pub(crate) fn modify_qp(
        &mut self,
        qpn: Qpn,
        attr: &QpAttr,
        mask: QpAttrMask,
        now: Nanos,
    ) -> std::result::Result<(), NicError> {
        let Shard { nic, env, star, .. } = self;
        let done = star.modify_qp((nic, env), qpn, attr, mask, now);
        done.unwrap_or_else(|| nic.modify_qp(env, qpn, attr, mask, now))
    }

    /// `ibv_query_qp`
    pub(crate) fn query_qp(&self, qpn: Qpn) -> std::result::Result<QpAttr, NicError> {
        self.star.query_qp(qpn).map_or_else(|| self.nic.query_qp(qpn), Ok)
    }

    /// State of a QP.
    pub(crate) fn qp_state(&self, qpn: Qpn) -> Option<QpState> {
        self.query_qp(qpn).ok().map(|attr| attr.state)
    }

    /// `ibv_destroy_qp`
    pub(crate) fn destroy_qp(&mut self, qpn: Qpn, now: Nanos) -> std::result::Result<(), NicError> {
        let Shard { nic, env, shared_qps, star, local, replies, .. } = self;
        shared_qps.ends(env, qpn);
        star.forget(qpn);
        local.forget((nic, env), qpn);
        if !star.destroy_qp((nic, env), qpn, now) {
            nic.destroy_qp(env, qpn)?;
        }
        replies.forget((nic, env), qpn, now);
        Ok(())
    }

    /// Ends a QP, whatever it is attached to.
    pub(super) fn end_qp(&mut self, qpn: Qpn, now: Nanos) -> std::result::Result<(), NicError> {
        let Shard { nic, intake, .. } = self;
        nic.detach_from_all(qpn, |group| intake.rx.leave_group(group));
        self.destroy_qp(qpn, now)
    }

    /// Whose a QP is.
    pub(crate) fn qp_owner(&self, qpn: Qpn) -> Option<EventOwner> {
        self.nic.qp_owner(qpn).or_else(|| self.star.owner(qpn))
    }

    /// Numbers of all QPs, in no order.
    pub(crate) fn qpns(&self) -> impl Iterator<Item = Qpn> + '_ {
        self.nic.qpns().chain(self.star.qpns())
    }
}

/// Whether small messages of this queue pair wait behind those of others.
#[inline]
fn waits(nic: &Nic<HostEnv>, star: &StarHost, qp: &QpInner) -> bool {
    qp.path().is_some_and(|path| nic.has_much_in_flight(path)) || star.has_many_unanswered(qp.qpn)
}

/// The doorbell of `qpn`, whose context's first line was fetched, waits: what its call uses.
#[inline]
fn expect(nic: &Nic<HostEnv>, env: &HostEnv, star: &StarHost, qpn: Qpn) {
    if !star.expect(nic, env, qpn) {
        nic.expect(env, qpn);
    }
}
