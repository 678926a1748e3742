//! What the card's lock guards: the card, its host, and the parts of the process that take turns with it.

use std::fmt::Write as _;
use std::sync::Arc;

use starverbs_backend::{RoceTx, host};
use starverbs_core::qp::Owner;
use starverbs_core::shared_qp::SharedQpMessage;
use starverbs_core::types::QPN_MASK;
use starverbs_core::{AsyncEvent, Nanos, Nic, Qpn};

use super::deferred_log::{DeferredLog, NO_DIALECT};
use super::domains::Domains;
use super::doorbells::Deferred;
use super::env::HostEnv;
use super::idle::Idle;
use super::intake::Intake;
use super::local::LocalHost;
use super::mads::CardMads;
use super::rpc::Replies;
use super::shared_qps::SharedQps;
use super::star::StarHost;
use crate::cm::CmHost;
use crate::device::command::Events;
use crate::events::{Event, kind};
use crate::moderation::Moderator;
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
    /// Polls that find nothing
    pub(super) idle: Idle,
    /// A turn ended with more to send
    pub(super) unsent: bool,
    /// Doorbells that wait for the card's next turn
    pub(super) deferred: Deferred,
    pub(super) domains: Domains,
    /// Queue pairs of XRC domains that other processes share
    pub(super) shared_qps: Box<SharedQps>,
    pub(super) moderator: Arc<Moderator>,
    /// Boxed: it lies beside what the data path uses
    pub(crate) cm: Box<CmHost>,
    /// From the first QP on that may be an end of a StaR connection
    pub(super) star: Option<Box<StarHost>>,
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
            idle: Idle::default(),
            unsent: false,
            deferred: Deferred::new(),
            domains: Domains::default(),
            shared_qps: Box::default(),
            moderator,
            cm: Box::new(cm),
            star: None,
            local,
            replies: Replies::default(),
            timer_seen: None,
        }
    }

    /// When the card's next timer is due.
    #[inline]
    pub(super) fn next_timer(&self) -> Option<Nanos> {
        self.nic.next_deadline()
    }

    /// QPs whose events go to `events`: those of its context.
    pub(super) fn qps_reporting_to(&self, events: &Events) -> impl Iterator<Item = Qpn> {
        let reports = |owner: Owner| self.domains.reports_to(owner.pd, events);
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
                    let event = |cookie| Event::Srq { kind: kind::SRQ_LIMIT_REACHED, cookie };
                    self.notify_owner(self.nic.srq_owner(srq), event);
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
            self.notify_owner(self.qp_owner(qpn), |cookie| Event::Qp { kind, cookie });
        }
    }

    fn notify_owner(&self, owner: Option<Owner>, event: impl FnOnce(u64) -> Event) {
        if let Some(Owner { pd, cookie }) = owner
            && let Some(queue) = self.domains.events(pd)
        {
            queue.push(event(cookie));
        }
    }

    /// Datagrams came to queue pair 1, or the connection manager's time has come.
    #[cold]
    fn run_cm(&mut self, log: &DeferredLog, now: Nanos) {
        let Shard { nic, env, cm, .. } = self;
        cm.run(&mut CardMads { nic, env, now }, log, now);
    }

    /// One line a QP, for `starverbs stat`.
    pub(super) fn describe_qps(&self) -> String {
        let mut text = String::from("qpn state remote_qpn remote_gid path_mtu sq_psn rq_psn star link\n");
        let mut qpns: Vec<Qpn> = self.qpns().collect();
        qpns.sort_unstable();
        for qpn in qpns {
            if let Ok(attr) = self.query_qp(qpn) {
                let (remote, gid) = (attr.dest_qpn, host::ip_of(attr.av.dgid));
                let (mtu, sq, rq) = (attr.path_mtu.bytes(), attr.sq_psn.get(), attr.rq_psn.get());
                let (star, (link, sent, taken)) = (self.star_word(qpn), self.local.link_of(&self.nic, qpn));
                let (sq, rq) = (sq.wrapping_add(sent) & QPN_MASK, rq.wrapping_add(taken) & QPN_MASK);
                /* writing to a String cannot fail */
                let _ = writeln!(
                    text,
                    "{qpn:#x} {:?} {remote:#x} {gid} {mtu} {sq} {rq} {star} {link}",
                    attr.state
                );
            }
        }
        text
    }
}
