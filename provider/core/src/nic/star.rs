//! Queue pairs whose transport is StaR's stateful half.
//!
//! Such a QP has an engine in the place of requester and responder. The card finds it, gives it its turns and its time, and takes it to
//! ERR, RESET and its end with the QP. The engine has handles of its own of the QP's queues.

use alloc::boxed::Box;
use core::convert::Infallible;

use slab::Slab;

use super::path::PathId;
use super::{Nic, Shared, Srq};
use crate::env::{Env, RecvQueue, SendQueue};
use crate::error::NicError;
use crate::qp::RecvSource;
use crate::room::hold;
use crate::star::channel::Channel;
use crate::star::control::Setup;
use crate::star::env::StarEnv;
use crate::star::homing::Done;
use crate::star::stateful::{Card, Local, Peer, SharedReceives, Stateful, Turn, Waits};
use crate::star::wire::Packet;
use crate::transport::{Attr, Ctx, Qp, Roles, Step, patience};
use crate::types::{Access, AsyncEvent, Gid, Nanos, PdId, QpState, QpType, Qpn, Sge, SrqId};

/// What a card lends an engine.
pub struct Lent<'a, E: Env> {
    env: &'a mut E,
    sh: &'a mut Shared<E>,
    srq: Option<SrqId>,
    path: PathId,
    now: Nanos,
}

/// What an engine is to do.
#[derive(Clone, Copy)]
pub enum Call<'a> {
    /// Something was posted
    Doorbell,
    /// It is time: its deadline has come
    Timeout,
    /// Its turn to send
    Transmit,
    /// A packet came from that address
    Packet(&'a Gid, &'a Packet<'a>),
    /// The QP goes to ERR
    Fail,
    /// The QP is about to go: its peer is told how far its requests are
    Report,
}

/// What a program sets of a QP that has an engine.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// What SL may do
    pub access: Access,
    /// READs and atomics of ours outstanding at most
    pub max_rd_atomic: u8,
    /// RNR NAK timer code of our receive queue
    pub min_rnr_timer: u8,
    /// Times that our SENDs are tried without a receive of SL; 7: for ever
    pub rnr_retry: u8,
    /// How long SL may be silent, nanoseconds; 0: for ever
    pub patience: Nanos,
}

impl Terms {
    fn of(attr: &Attr) -> Self {
        let Attr { access, max_rd_atomic, min_rnr_timer, rnr_retry, timeout, retry_cnt, .. } = *attr;
        Terms {
            access,
            max_rd_atomic,
            min_rnr_timer,
            rnr_retry,
            patience: patience(timeout, retry_cnt).unwrap_or(0),
        }
    }
}

/// Where an engine leaves a QP's queues.
#[derive(Clone, Copy, Debug)]
pub struct Parted {
    /// Index in the send queue of the first request that has not begun
    pub next_send: u32,
    /// Memory windows of type 2 were bound
    pub windows: bool,
}

/// A transport in the place of a QP's own.
pub trait Engine<E: Env>: Sized {
    /// Does it; gives how a turn to send ended.
    fn run(&mut self, lent: Lent<'_, E>, what: Call<'_>) -> Turn;
    /// RTS or ERR.
    fn state(&self) -> QpState;
    /// The program has set the QP anew.
    fn set(&mut self, to: &Terms);
    /// When it wants [`Call::Timeout`].
    fn next_deadline(&self) -> Option<Nanos>;
    /// Whether it has more to send than its path takes now.
    fn is_crowded(&self) -> bool;
    /// Whether its peer is to be told of what is complete here.
    fn owes(&self, now: Nanos) -> bool;
    /// The first WQE of the send queue that has not begun.
    fn next_send(&self) -> u32;
    /// It will be called soon: what it uses is fetched.
    fn expect(&self, env: &E);
    /// The QP is at its end.
    fn close(self, lent: Lent<'_, E>);
    /// No request of either end begins from now on. False: it is ending, or has not begun.
    fn rest(&mut self) -> bool;
    /// If it rests, and all that began is over: it stays so, and this says how much of its peer's is done.
    fn halt(&mut self) -> Option<Done>;
    /// Whether it has come to rest, as its peer may have heard.
    fn is_halted(&self) -> bool;
    /// Requests begin again.
    fn resume(&mut self);
    /// The QP, which has come to rest, goes on with the card's own transport.
    fn part(self, lent: Lent<'_, E>) -> Parted;
}

/// Of hosts without StaR: there is none.
impl<E: Env> Engine<E> for Infallible {
    fn run(&mut self, _: Lent<'_, E>, _: Call<'_>) -> Turn {
        match *self {}
    }
    fn state(&self) -> QpState {
        match *self {}
    }
    fn set(&mut self, _: &Terms) {
        match *self {}
    }
    fn next_deadline(&self) -> Option<Nanos> {
        match *self {}
    }
    fn is_crowded(&self) -> bool {
        match *self {}
    }
    fn owes(&self, _: Nanos) -> bool {
        match *self {}
    }
    fn next_send(&self) -> u32 {
        match *self {}
    }
    fn expect(&self, _: &E) {
        match *self {}
    }
    fn close(self, _: Lent<'_, E>) {
        match self {}
    }
    fn rest(&mut self) -> bool {
        match *self {}
    }
    fn halt(&mut self) -> Option<Done> {
        match *self {}
    }
    fn is_halted(&self) -> bool {
        match *self {}
    }
    fn resume(&mut self) {
        match *self {}
    }
    fn part(self, _: Lent<'_, E>) -> Parted {
        match self {}
    }
}

/// Each QP has room for an engine: a host that has large ones keeps them elsewhere.
impl<E: Env, T: Engine<E>> Engine<E> for Box<T> {
    fn run(&mut self, lent: Lent<'_, E>, what: Call<'_>) -> Turn {
        (**self).run(lent, what)
    }
    fn state(&self) -> QpState {
        (**self).state()
    }
    fn set(&mut self, to: &Terms) {
        (**self).set(to);
    }
    fn next_deadline(&self) -> Option<Nanos> {
        (**self).next_deadline()
    }
    fn is_crowded(&self) -> bool {
        (**self).is_crowded()
    }
    fn owes(&self, now: Nanos) -> bool {
        (**self).owes(now)
    }
    fn next_send(&self) -> u32 {
        (**self).next_send()
    }
    fn expect(&self, env: &E) {
        (**self).expect(env);
    }
    fn close(self, lent: Lent<'_, E>) {
        (*self).close(lent);
    }
    fn rest(&mut self) -> bool {
        (**self).rest()
    }
    fn halt(&mut self) -> Option<Done> {
        (**self).halt()
    }
    fn is_halted(&self) -> bool {
        (**self).is_halted()
    }
    fn resume(&mut self) {
        (**self).resume();
    }
    fn part(self, lent: Lent<'_, E>) -> Parted {
        (*self).part(lent)
    }
}

/// The SRQ of a QP.
struct Pool<'a, E: Env> {
    all: &'a mut Slab<Srq<E>>,
    id: Option<SrqId>,
    /// Fewer receives are left than the program wants
    low: bool,
}

impl<E: Env> SharedReceives for Pool<'_, E> {
    fn take(&mut self, _: Qpn, sges: &mut [Sge]) -> Option<(u64, usize, PdId)> {
        let srq = self.all.get_mut(self.id?.0 as usize)?;
        let (wr_id, n) = srq.rq.take(sges)?;
        if srq.limit > 0 && srq.rq.len() < srq.limit {
            srq.limit = 0;
            self.low = true;
        }
        Some((wr_id, n, srq.pd))
    }
}

/// Calls with what the card lends.
fn with_card<E: StarEnv, R>(lent: Lent<'_, E>, call: impl FnOnce(&mut Card<'_, E>) -> R) -> R {
    let Lent { env, sh, srq: id, path, now } = lent;
    let mut pool = Pool { all: &mut sh.srqs, id, low: false };
    let (mrs, registry, stats) = (&mut sh.mrs, &mut sh.registry, &*sh.stats);
    let path = sh.paths.get(path);
    let done = call(&mut Card { env: &mut *env, mrs, registry, srqs: &mut pool, path, stats, now });
    if let (true, Some(id)) = (pool.low, id) {
        env.event(AsyncEvent::SrqLimit(id));
    }
    done
}

impl<E: StarEnv> Engine<E> for Stateful<E> {
    fn run(&mut self, lent: Lent<'_, E>, what: Call<'_>) -> Turn {
        with_card(lent, |card| {
            match what {
                Call::Doorbell => self.handle_doorbell(card),
                Call::Timeout => self.handle_timeout(card),
                Call::Transmit => return self.transmit(card),
                Call::Packet(source, packet) => self.handle_packet(card, source, packet),
                Call::Fail => self.enter_error(card),
                Call::Report => self.report(),
            }
            Turn::More
        })
    }
    fn state(&self) -> QpState {
        Stateful::state(self)
    }
    fn set(&mut self, to: &Terms) {
        Stateful::set(self, to);
    }
    fn next_deadline(&self) -> Option<Nanos> {
        Stateful::next_deadline(self)
    }
    fn is_crowded(&self) -> bool {
        Stateful::is_crowded(self)
    }
    fn owes(&self, now: Nanos) -> bool {
        Stateful::owes(self, now)
    }
    fn next_send(&self) -> u32 {
        Stateful::next_send(self)
    }
    #[inline]
    fn expect(&self, env: &E) {
        env.prefetch(self);
    }
    fn close(self, lent: Lent<'_, E>) {
        with_card(lent, |card| {
            Stateful::close(self, card);
        });
    }
    fn rest(&mut self) -> bool {
        Stateful::come_to_rest(self)
    }
    fn halt(&mut self) -> Option<Done> {
        Stateful::halt(self)
    }
    fn is_halted(&self) -> bool {
        Stateful::is_halted(self)
    }
    fn resume(&mut self) {
        Stateful::resume(self);
    }
    fn part(self, lent: Lent<'_, E>) -> Parted {
        with_card(lent, |card| Stateful::part(self, card))
    }
}

impl<E: Env> Ctx<'_, E> {
    /// Has the QP's engine do something, if it has one; gives how that ended.
    pub(crate) fn star(&mut self, what: Call<'_>) -> Option<Turn> {
        let due = self.qp.star.as_ref()?.next_deadline();
        if matches!(what, Call::Timeout) && due.is_none_or(|at| at > self.now) {
            /* timers are lazy */
            due.into_iter().for_each(|at| self.arm(at));
            return Some(Turn::Idle);
        }
        let mut engine = self.qp.star.take()?;
        let turn = engine.run(self.lend(), what);
        if engine.state() == QpState::Err {
            self.qp.state = QpState::Err;
        }
        if let Some(at) = engine.next_deadline() {
            self.arm(at);
        }
        self.qp.star = Some(engine);
        if !matches!(what, Call::Transmit) {
            self.ready();
        }
        self.sh.open_path(self.qp.path);
        Some(turn)
    }

    /// The program has set the QP anew.
    pub(crate) fn set_star(&mut self) {
        if let Some(engine) = &mut self.qp.star {
            engine.set(&Terms::of(&self.qp.attr));
        }
    }

    /// The engine's turn to send.
    pub(crate) fn star_turn(&mut self) -> Step {
        match self.star(Call::Transmit) {
            Some(Turn::More) => Step::TurnOver,
            Some(Turn::PortFull) => Step::PortFull,
            Some(Turn::Idle) => {
                if self.qp.star.as_ref().is_some_and(|engine| engine.is_crowded()) {
                    self.await_window(self.qp.path);
                }
                Step::Idle
            }
            None => Step::Idle,
        }
    }

    /// It is no end of a StaR connection, or no more: what waited begins.
    pub(crate) fn settle_plain(&mut self) {
        if self.qp.star.as_ref().is_some_and(|engine| !engine.is_halted()) {
            return;
        }
        if let Some(engine) = self.qp.star.take() {
            self.leave_window();
            let Parted { next_send, windows } = engine.part(self.lend());
            let (req, flags) = (&mut self.qp.req, &mut self.qp.flags);
            (req.next, req.una, req.fresh) = (next_send, next_send, next_send);
            /* what the peer said of its receives was of before */
            (req.counted, req.alone) = (false, false);
            flags.windows |= windows;
        }
        self.qp.flags.star = false;
        if self.qp.roles == Roles::Rest {
            self.qp.roles = Roles::Free;
        }
        self.doorbell();
    }

    /// The QP goes to RESET, or ends.
    pub(crate) fn end_star(&mut self) {
        if let Some(engine) = self.qp.star.take() {
            engine.close(self.lend());
        }
    }

    fn lend(&mut self) -> Lent<'_, E> {
        let srq = match self.qp.rq {
            RecvSource::Shared(id) => Some(id),
            RecvSource::Own(_) | RecvSource::Xrc(_) => None,
        };
        Lent { env: &mut *self.env, sh: &mut *self.sh, srq, path: self.qp.path, now: self.now }
    }
}

/// What begins the stateful half of a QP, beside what the program made it with.
pub struct StarInit<E: Env> {
    /// Another handle of its send queue
    pub sq: E::Sq,
    /// Another handle of its receive queue; `None`: it takes from an SRQ
    pub rq: Option<E::Rq>,
    /// Other handles of its completion queues, of sends and of receives
    pub cqs: (E::Cq, E::Cq),
    /// SL's end
    pub setup: Setup,
    /// Where SL is
    pub peer: Peer,
    /// Control messages, on which SL's set-up has come
    pub channel: Channel,
    /// Packets under way at most: a power of two
    pub window: u32,
    /// A copy of a packet that is late may be under way for so long at least, nanoseconds
    pub lifetime: Nanos,
}

impl<E: Env> Nic<E> {
    /// The program's requests wait until it is settled whether the QP is an end of a StaR connection: [`Nic::settle_plain`], or a
    /// request of plain RoCEv2 from its peer, says that it is none. `Invalid`: it is no RC QP, or has sent something, or its SRQ matches tags
    /// or is of another protection domain.
    pub fn hold_for_star(&mut self, qpn: Qpn) -> Result<(), NicError> {
        let suits = self.suits_star(qpn);
        let qp = self.qps.get_mut(qpn).ok_or(NicError::NotFound)?;
        if !qp.has_nothing_under_way() || !suits {
            return Err(NicError::Invalid);
        }
        qp.flags.star = true;
        Ok(())
    }

    /// Whether a QP may be an end of a StaR connection at all.
    pub(super) fn suits_star(&self, qpn: Qpn) -> bool {
        let suits = |qp: &Qp<E>| match qp.rq {
            RecvSource::Own(_) => true,
            RecvSource::Shared(id) => {
                let srq = self.shared.srqs.get(id.0 as usize);
                srq.is_some_and(|srq| srq.pd == qp.pd && srq.tags.is_none())
            }
            RecvSource::Xrc(_) => false,
        };
        self.qps.get(qpn).is_some_and(|qp| qp.qp_type == QpType::Rc && suits(qp))
    }

    /// Whether the QP is a stateful end whose peer lacks completions that it is being told of. Who destroys it waits until that is over, as
    /// nobody else would tell.
    pub fn owes_for_star(&self, qpn: Qpn, now: Nanos) -> bool {
        self.qps.get(qpn).and_then(|qp| qp.star.as_ref()).is_some_and(|engine| engine.owes(now))
    }

    /// Whether the QP is the stateful end of a StaR connection.
    pub fn is_stateful(&self, qpn: Qpn) -> bool {
        self.qps.get(qpn).is_some_and(|qp| qp.star.is_some())
    }

    /// The QP is about to go. If it is a stateful end, its peer hears how far its requests are: not all of them make completions.
    pub fn report_for_star(&mut self, env: &mut E, qpn: Qpn, now: Nanos) {
        if let Some(mut cx) = self.context(env, qpn, now) {
            cx.star(Call::Report);
        }
    }

    /// Whether it is not settled what the QP is.
    pub fn waits_for_star(&self, qpn: Qpn) -> bool {
        self.qps.get(qpn).is_some_and(|qp| qp.flags.star && qp.star.is_none())
    }

    /// Whether something is posted to the QP that did not begin.
    pub fn has_posts(&self, qpn: Qpn) -> bool {
        self.qps.get(qpn).is_some_and(|qp| qp.req.next != qp.sq.posted())
    }

    /// The QP, which waited, is one of plain RoCEv2.
    pub fn settle_plain(&mut self, env: &mut E, qpn: Qpn, now: Nanos) {
        if self.waits_for_star(qpn)
            && let Some(mut cx) = self.context(env, qpn, now)
        {
            cx.settle_plain();
        }
    }
}

impl<E> Nic<E>
where
    E: StarEnv<Star = Box<Stateful<E>>>,
{
    /// From now on the QP, which is in RTR or RTS and waits ([`Nic::hold_for_star`]), is the stateful end of a StaR connection. `Invalid`: it is
    /// not so, or its peer is another, or the card has room for few contexts; `Exhausted`: no memory.
    pub fn begin_star(
        &mut self,
        env: &mut E,
        qpn: Qpn,
        init: StarInit<E>,
        now: Nanos,
    ) -> Result<(), NicError> {
        if self.has_few_contexts() {
            return Err(NicError::Invalid);
        }
        let held = hold(size_of::<Stateful<E>>()).ok_or(NicError::Exhausted)?;
        let max_msg = self.shared.cfg.max_msg;
        let max_recv_sge = self.qps.get(qpn).map_or(1, |qp| qp.resp.max_sge());
        let mut cx = self.context(env, qpn, now).ok_or(NicError::NotFound)?;
        let (qp, attr) = (&*cx.qp, cx.qp.attr);
        let mine = attr.dest_qpn == init.peer.qpn && attr.av.dgid == init.peer.av.dgid;
        if !qp.flags.star || qp.star.is_some() || !matches!(qp.state, QpState::Rtr | QpState::Rts) || !mine {
            return Err(NicError::Invalid);
        }
        let terms = Terms::of(&attr);
        let local = Local {
            qpn,
            pd: qp.pd,
            sq: init.sq,
            first_send: qp.req.una,
            rq: init.rq,
            max_recv_sge,
            send_cq: init.cqs.0,
            recv_cq: init.cqs.1,
            sig_all: qp.flags.sig_all,
            access: terms.access,
            mtu: attr.path_mtu,
            max_msg,
            max_rd_atomic: terms.max_rd_atomic,
            min_rnr_timer: terms.min_rnr_timer,
            rnr_retry: terms.rnr_retry,
            waits: Waits { patience: terms.patience, lifetime: init.lifetime, ..Waits::default() },
            window: init.window,
        };
        let made =
            with_card(cx.lend(), |card| Stateful::new(card, local, (init.setup, init.peer), init.channel))?;
        cx.leave_queues();
        drop(held);
        cx.qp.star = Some(Box::new(made));
        cx.star(Call::Doorbell);
        Ok(())
    }

    /// A stateful end that began with a life of its peer that was over, and so has had nothing to do with it, waits again: the peer has begun
    /// a later one, of this epoch. Gives what the end was made of. `None`: there is none, or it is another.
    pub fn rewind_star(&mut self, env: &mut E, qpn: Qpn, epoch: u32, now: Nanos) -> Option<Local<E>> {
        let mut cx = self.context(env, qpn, now)?;
        if !cx.qp.star.as_ref().is_some_and(|engine| engine.is_before(epoch)) {
            return None;
        }
        let engine = cx.qp.star.take()?;
        let local = with_card(cx.lend(), |card| engine.rewind(card));
        let (req, first) = (&mut cx.qp.req, local.first_send);
        (req.una, req.next, req.fresh) = (first, first, first);
        Some(local)
    }

    /// Bytes that the card keeps of a QP, beside what grows with its queues; more of a stateful end, and of one that it does not have 0.
    pub fn bytes_of(&self, qpn: Qpn) -> usize {
        let engine = |qp: &Qp<E>| qp.star.as_ref().map_or(0, |engine| engine.bytes());
        self.qps.get(qpn).map_or(0, |qp| Self::QP_BYTES + engine(qp))
    }

    /// A StaR packet came to the stateful half from `source`. Packets for QPs that are no stateful ends are dropped.
    pub fn handle_star(&mut self, env: &mut E, now: Nanos, source: &Gid, packet: &Packet<'_>) {
        let done = self
            .context(env, packet.header.qpn, now)
            .and_then(|mut cx| cx.star(Call::Packet(source, packet)));
        if done.is_none() {
            self.shared.stats.star_drops.inc();
        }
    }
}
