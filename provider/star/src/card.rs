//! What a card does with queue pairs that are stateful ends: a [`Stateful`] is their engine.

use alloc::boxed::Box;

use starverbs_core::engine::{
    Call, Detached, Engine, EngineAttr, EngineCtx, EngineParts, EngineSrq, TakenRecv,
    TransmitStatus as TurnEnd,
};
use starverbs_core::env::Env;
use starverbs_core::nic::{MAX_SGE, Nic, QpHandover};
use starverbs_core::room::hold;
use starverbs_core::{FrameMeta, Gid, Nanos, NicError, QpState, Qpn, Sge};

use super::channel::ControlChannel;
use super::control::Setup;
use super::datagram;
use super::env::{QpPair, StarEnv};
use super::form::Form;
use super::registry::RuleRegistry;
use super::stateful::{CardCtx, Local, SharedReceives, Silence, SlPeer, Start, Stateful};
use super::wire::{CardHalf, Ptype, StarHead, StarPacket};

/// An engine that may be a stateful end.
pub trait StarEngine<E: StarEnv>: Engine<E, Shared = RuleRegistry> + From<Box<Stateful<E>>> {
    /// The stateful end, if it is one
    fn stateful(&self) -> Option<&Stateful<E>>;
    /// The same, to be changed
    fn stateful_mut(&mut self) -> Option<&mut Stateful<E>>;
    /// The stateful end itself
    fn into_stateful(self) -> Option<Box<Stateful<E>>>;
}

impl<E: StarEnv<Engine = Box<Stateful<E>>>> StarEngine<E> for Box<Stateful<E>> {
    fn stateful(&self) -> Option<&Stateful<E>> {
        Some(self)
    }
    fn stateful_mut(&mut self) -> Option<&mut Stateful<E>> {
        Some(self)
    }
    fn into_stateful(self) -> Option<Box<Stateful<E>>> {
        Some(self)
    }
}

/// Host of a card whose queue pairs may be stateful ends.
pub trait CardEnv: StarEnv<Engine: StarEngine<Self>> {}

impl<E: StarEnv<Engine: StarEngine<E>>> CardEnv for E {}

/// The card and its host, for a turn.
pub struct Turn<'a, E: Env> {
    /// The card
    pub nic: &'a mut Nic<E>,
    /// Its host
    pub env: &'a mut E,
    /// The time
    pub now: Nanos,
}

impl<E: Env> SharedReceives for EngineSrq<'_, E> {
    fn take(&mut self, _: Qpn, sges: &mut [Sge]) -> Option<TakenRecv> {
        EngineSrq::take(self, sges)
    }
}

/// Calls with the card's context.
fn with_card<E: CardEnv, R>(ctx: &mut EngineCtx<'_, E>, call: impl FnOnce(&mut CardCtx<'_, E>) -> R) -> R {
    let now = ctx.now;
    let EngineParts { env, mrs, shared, mut srq, mut path, rpc, stats } = ctx.parts();
    call(&mut CardCtx { env, mrs, registry: shared, srqs: &mut srq, path: path.get(), rpc, stats, now })
}

impl<E: StarEnv<Engine = Box<Stateful<E>>>> Engine<E> for Box<Stateful<E>> {
    /// What stateless peers let this card's stateful ends do
    type Shared = RuleRegistry;

    fn run(&mut self, ctx: &mut EngineCtx<'_, E>, call: Call) -> TurnEnd {
        run(self, ctx, call)
    }
    fn receive(&mut self, ctx: &mut EngineCtx<'_, E>, meta: &FrameMeta, frame: &[u8]) {
        receive(self, ctx, meta, frame);
    }
    fn state(&self) -> QpState {
        Stateful::state(self)
    }
    fn set(&mut self, to: &EngineAttr) {
        Stateful::set(self, to);
    }
    fn next_deadline(&self) -> Option<Nanos> {
        Stateful::next_deadline(self)
    }
    fn wants(&self) -> TurnEnd {
        Stateful::wants(self)
    }
    fn minds_doorbell(&self) -> bool {
        Stateful::minds_doorbell(self)
    }
    fn next_send(&self) -> u32 {
        Stateful::next_send(self)
    }
    fn is_quiesced(&self) -> bool {
        Stateful::is_quiesced(self)
    }
    fn close(self, ctx: &mut EngineCtx<'_, E>) {
        close(self, ctx);
    }
    fn detach(self, ctx: &mut EngineCtx<'_, E>) -> Detached {
        detach(self, ctx)
    }
    fn negotiate(nic: &Nic<E>, env: &mut E, meta: &FrameMeta, from: Qpn, to: Qpn, message: &[u8]) {
        negotiate(nic, env, meta, QpPair { from, to }, message);
    }
}

/// [`Engine::run`] of a stateful end.
pub fn run<E: CardEnv>(end: &mut Stateful<E>, ctx: &mut EngineCtx<'_, E>, call: Call) -> TurnEnd {
    with_card(ctx, |card| {
        match call {
            Call::Doorbell => end.handle_doorbell(card),
            Call::Timeout => end.handle_timeout(card),
            Call::Transmit => return end.transmit(card),
            Call::Acknowledge => return end.acknowledge(card),
            Call::Fail => end.enter_error(card),
            Call::Drain => {}
        }
        TurnEnd::More
    })
}

/// [`Engine::receive`] of a stateful end.
pub fn receive<E: CardEnv>(
    end: &mut Stateful<E>,
    ctx: &mut EngineCtx<'_, E>,
    meta: &FrameMeta,
    frame: &[u8],
) {
    /* it was checked before it waited */
    if let Ok(packet) = StarPacket::parse(CardHalf::Stateful, frame) {
        with_card(ctx, |card| end.handle_packet(card, &meta.src, &packet));
    }
}

/// [`Engine::close`] of a stateful end.
pub fn close<E: CardEnv>(end: Box<Stateful<E>>, ctx: &mut EngineCtx<'_, E>) {
    with_card(ctx, |card| Stateful::close(*end, card));
}

/// [`Engine::detach`] of a stateful end.
pub fn detach<E: CardEnv>(end: Box<Stateful<E>>, ctx: &mut EngineCtx<'_, E>) -> Detached {
    with_card(ctx, |card| Stateful::detach(*end, card))
}

/// [`Engine::negotiate`] of cards whose queue pairs may be stateful ends.
pub fn negotiate<E: CardEnv>(nic: &Nic<E>, env: &mut E, meta: &FrameMeta, qps: QpPair, message: &[u8]) {
    datagram::handle(nic, env, meta, qps, message);
}

/// Other handles of a QP's queues, for the half that it becomes.
pub struct Queues<E: Env> {
    /// Send queue
    pub sq: E::Sq,
    /// Receive queue; `None`: it takes from an SRQ
    pub rq: Option<E::Rq>,
    /// Completions of sends
    pub send_cq: E::Cq,
    /// Completions of receives
    pub recv_cq: E::Cq,
}

/// What begins a stateful end, beside what the program set.
pub struct StarInit<E: Env> {
    /// Other handles of its queues
    pub queues: Queues<E>,
    /// SL's end
    pub setup: Setup,
    /// Where SL is
    pub peer: SlPeer,
    /// Control messages, on which SL's set-up has come
    pub channel: ControlChannel,
    /// Packets under way at most: a power of two
    pub window: u32,
    /// Which packets it sends
    pub form: Form,
}

impl<E: CardEnv> Turn<'_, E> {
    /// From now on the QP, which is in RTR or RTS and held ([`Nic::hold_qp`]), is a stateful end. `Invalid`:
    /// it is not so, or its peer is another; `Exhausted`: no memory.
    pub fn begin_stateful(&mut self, qpn: Qpn, init: StarInit<E>) -> Result<(), NicError> {
        /* and what an allocator needs to align it */
        let bytes = size_of::<Stateful<E>>() + 2 * align_of::<Stateful<E>>();
        let held = hold(bytes).ok_or(NicError::Exhausted)?;
        let StarInit { queues, setup, peer, channel, window, form } = init;
        let Queues { sq, rq, send_cq, recv_cq } = queues;
        let max_msg_log = self.nic.config().max_msg.checked_ilog2().ok_or(NicError::Invalid)? as u8;
        let QpHandover { owner, attr, max_recv_sge, sq_sig_all, first_send, .. } = self.nic.handover(qpn)?;
        if attr.dest_qpn != peer.qpn || attr.av.dgid != peer.av.dgid {
            return Err(NicError::Invalid);
        }
        let make = |terms: &EngineAttr, ctx: &mut EngineCtx<'_, E>| {
            let local = Local {
                qpn,
                pd: owner.pd,
                sq,
                rq,
                send_cq,
                recv_cq,
                patience: Silence::of(terms.patience),
                access: terms.access,
                max_msg_log,
                mtu: attr.path_mtu,
                max_recv_sge: max_recv_sge.min(MAX_SGE) as u8,
                sig_all: sq_sig_all,
                max_rd_atomic: terms.max_rd_atomic,
                min_rnr_timer: terms.min_rnr_timer,
                rnr_retry: terms.rnr_retry,
                form,
            };
            let start = Start { first_send, setup, peer, channel, window };
            let made = with_card(ctx, |card| Stateful::new(card, local, start))?;
            drop(held);
            Ok(Box::new(made).into())
        };
        self.nic.start_engine(self.env, qpn, self.now, make)
    }

    /// A stateful end that began with an epoch of its peer that was over is held again, as the peer has begun
    /// a later one. False: there is none, or it has exchanged WQEs or packets with the peer.
    pub fn rewind(&mut self, qpn: Qpn, epoch: u32) -> bool {
        let ours = stateful(self.nic, qpn).is_some_and(|end| end.is_before(epoch));
        if ours {
            let end = |engine: E::Engine, ctx: &mut EngineCtx<'_, E>| {
                let next_send = engine.next_send();
                let end = engine.into_stateful();
                let next_send = end.map_or(next_send, |end| with_card(ctx, |card| end.rewind(card)));
                Detached { next_send, windows: false }
            };
            self.nic.take_engine(self.env, qpn, self.now, end);
        }
        ours
    }

    /// A packet came to the stateful half from `source`, and the packets that `more` gives, which are none of
    /// control, behind it for the same QP: they go through its engine once. Those for QPs that are no
    /// stateful ends are dropped. On a QPC-limited card WQEs wait for the QP's context, as requests do;
    /// answers and control messages do not.
    pub fn handle_stateful<'p>(
        &mut self,
        source: &Gid,
        packet: &StarPacket<'_>,
        mut more: impl FnMut() -> Option<StarPacket<'p>>,
    ) {
        let limited = self.nic.is_qpc_limited();
        if limited && self.awaits_context(source, packet) {
            return;
        }
        let done = self.nic.with_engine(self.env, packet.header.qpn, self.now, |engine, ctx| {
            let end = engine.stateful_mut()?;
            /* each may have to wait for itself */
            let more = || if limited { None } else { more() };
            with_card(ctx, |card| end.handle_packets(card, source, packet, more));
            Some(())
        });
        if done.flatten().is_none() {
            self.nic.counters().star_drops.inc();
        }
    }

    #[cold]
    fn awaits_context(&mut self, source: &Gid, packet: &StarPacket<'_>) -> bool {
        let header = packet.header;
        let asks = matches!(header.ptype, Ptype::Wqep | Ptype::Wqeps | Ptype::Ed) && !header.migrate;
        let (head, meta) =
            (StarHead::to_stateful(header), FrameMeta { src: *source, ..FrameMeta::default() });
        asks && self.nic.await_context(self.env, self.now, header.qpn, &meta, [head.bytes(), packet.data])
    }

    /// The QP is about to go. If it is a stateful end, its peer gets a CQEP for the last of its requests that
    /// is done, as not all of them are signaled.
    pub fn report(&mut self, qpn: Qpn) {
        self.nic
            .with_engine(self.env, qpn, self.now, |engine, _| engine.stateful_mut().map(Stateful::report));
    }
}

/// A packet or doorbell of a stateful end waits behind others that are handled first: what it uses may be
/// fetched meanwhile. `None`: there is none.
#[inline]
pub(crate) fn expect<'a, E: CardEnv>(nic: &'a Nic<E>, env: &E, qpn: Qpn) -> Option<&'a Stateful<E>> {
    let end = stateful(nic, qpn)?;
    env.prefetch(end);
    Some(end)
}

/// A doorbell of a stateful end, which was fetched itself, is handled soon: what its requests use. False:
/// there is none.
#[inline]
pub(crate) fn expect_requests<E: CardEnv>(nic: &Nic<E>, env: &E, qpn: Qpn) -> bool {
    stateful(nic, qpn).inspect(|end| end.expect_requests(env, nic.engines())).is_some()
}

/// The stateful end that a QP is.
pub fn stateful<E: CardEnv>(nic: &Nic<E>, qpn: Qpn) -> Option<&Stateful<E>> {
    nic.engine(qpn)?.stateful()
}

/// The same, for what changes neither its deadline nor its state.
pub fn stateful_mut<E: CardEnv>(nic: &mut Nic<E>, qpn: Qpn) -> Option<&mut Stateful<E>> {
    nic.engine_mut(qpn)?.stateful_mut()
}

/// Whether the QP is a stateful end whose CQEPs have no answer yet. Whoever destroys it waits for that, as
/// nobody else would repeat them.
pub fn owes<E: CardEnv>(nic: &Nic<E>, qpn: Qpn, now: Nanos) -> bool {
    stateful(nic, qpn).is_some_and(|end| end.owes(now))
}

/// Bytes that the card keeps of a QP, beside what grows with its queues; more of a stateful end, and of one
/// that it does not have 0.
pub fn bytes_of<E: CardEnv>(nic: &Nic<E>, qpn: Qpn) -> usize {
    let engine = stateful(nic, qpn).map_or(0, Stateful::bytes);
    nic.qp_state(qpn).map_or(0, |_| Nic::<E>::QP_BYTES + engine)
}
