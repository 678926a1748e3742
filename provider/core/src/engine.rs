//! A transport in the place of a queue pair's own.
//!
//! A QP is plain, or it has an [`Engine`]: the card calls it when it may send and when its deadline has come,
//! and takes it to ERR, RESET and its end with the QP. The engine has handles of its own of the QP's queues.
//! Which engines there are is the host's affair ([`Env::Engine`]).

use alloc::boxed::Box;
use core::convert::Infallible;

use slab::Slab;

use crate::counters::Counters;
use crate::env::{Env, RecvQueue, TakenWqe};
use crate::mr::MrTable;
use crate::nic::path::{Path, PathId, Paths};
use crate::nic::{Nic, QpShared, Srq};
use crate::qp::RecvSource;
use crate::strom::KernelRegistry;
use crate::transport::Rpc;
use crate::types::{Access, FrameMeta, Nanos, PdId, QpState, Qpn, Sge};

/// What a card gives an engine for the time of a call: few words, as they are put together for each.
pub struct EngineCtx<'a, E: Env> {
    /// The host
    pub env: &'a mut E,
    pub(crate) sh: &'a mut QpShared<E>,
    /// Where the QP receives from: looked at when it does, as it lies in a line of its own
    pub(crate) rq: &'a RecvSource<E::Rq>,
    pub(crate) rpc: &'a mut Option<Box<Rpc>>,
    pub(crate) path: PathId,
    /// Fewer receives are left in the SRQ than the program wants
    pub(crate) low: bool,
    /// The time
    pub now: Nanos,
}

/// The parts of an [`EngineCtx`], side by side.
pub struct EngineParts<'a, E: Env> {
    /// The host
    pub env: &'a mut E,
    /// Memory of this card
    pub mrs: &'a mut MrTable<E::Mrs>,
    /// What the engines of the card share
    pub shared: &'a mut <E::Engine as Engine<E>>::Shared,
    /// The SRQ of the QP, if it has one
    pub srq: EngineSrq<'a, E>,
    /// The way to the peer
    pub path: EnginePath<'a, E>,
    /// StRoM's RPCs of the peer
    pub rpc: EngineRpc<'a>,
    /// What is counted
    pub stats: &'a Counters,
}

impl<E: Env> EngineCtx<'_, E> {
    /// All that there is.
    pub fn parts(&mut self) -> EngineParts<'_, E> {
        let EngineCtx { env, sh, rq, rpc, path, low, .. } = self;
        EngineParts {
            env,
            mrs: &mut sh.mrs,
            shared: &mut sh.engines,
            srq: EngineSrq { all: &mut sh.srqs, rq, low },
            path: EnginePath { all: &mut sh.paths, id: *path },
            rpc: EngineRpc(Some((rpc, &mut sh.kernels))),
            stats: &sh.stats,
        }
    }

    /// Memory of this card.
    #[inline]
    pub fn mrs(&self) -> &MrTable<E::Mrs> {
        &self.sh.mrs
    }

    /// The same, to be changed.
    pub fn mrs_mut(&mut self) -> &mut MrTable<E::Mrs> {
        &mut self.sh.mrs
    }

    /// The host, and memory of this card.
    #[inline]
    pub fn memory(&mut self) -> (&mut E, &MrTable<E::Mrs>) {
        (self.env, &self.sh.mrs)
    }

    /// What is counted.
    #[inline]
    pub fn stats(&self) -> &Counters {
        &self.sh.stats
    }
}

/// A receive WQE that was taken from an SRQ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TakenRecv {
    /// The program's `wr_id`
    pub wr_id: u64,
    /// SGEs that were copied
    pub num_sge: usize,
    /// Protection domain of the SRQ
    pub pd: PdId,
}

/// The SRQ of a QP.
pub struct EngineSrq<'a, E: Env> {
    pub(crate) all: &'a mut Slab<Srq<E>>,
    pub(crate) rq: &'a RecvSource<E::Rq>,
    /// Fewer receives are left than the program wants
    pub(crate) low: &'a mut bool,
}

impl<E: Env> EngineSrq<'_, E> {
    /// Takes the oldest receive WQE, and copies its SGEs. `None`: there is none.
    pub fn take(&mut self, sges: &mut [Sge]) -> Option<TakenRecv> {
        let srq = self.all.get_mut(self.rq.srq()?.0 as usize)?;
        let TakenWqe { wr_id, num_sge } = srq.rq.take(sges)?;
        if srq.limit > 0 && srq.rq.len() < srq.limit {
            srq.limit = 0;
            *self.low = true;
        }
        Some(TakenRecv { wr_id, num_sge, pd: srq.pd })
    }
}

/// RPCs of the peer of a QP that has an engine: kernels run for it as for peers of other queue pairs. The
/// default has neither the dialect nor kernels.
#[derive(Default)]
pub struct EngineRpc<'a>(pub(crate) Option<(&'a mut Option<Box<Rpc>>, &'a mut KernelRegistry)>);

/// The path of a QP.
pub struct EnginePath<'a, E: Env> {
    pub(crate) all: &'a mut Paths<E::Congestion>,
    pub(crate) id: PathId,
}

impl<E: Env> EnginePath<'_, E> {
    /// Looks it up: engines that send no packets do without.
    pub fn get(&mut self) -> &mut Path<E::Congestion> {
        self.all.get(self.id)
    }
}

/// What an engine is to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Call {
    /// Something was posted
    Doorbell,
    /// Its deadline has come
    Timeout,
    /// Its turn to send
    Transmit,
    /// It has only acknowledges to send, which waited for what the program may answer: now they leave
    Acknowledge,
    /// The QP goes to ERR
    Fail,
    /// The QP goes to SQD: no request begins, and the event comes when those that began are done. Only for
    /// those that [drain](Engine::drains)
    Drain,
}

/// How [`Call::Transmit`] or [`Call::Acknowledge`] ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TransmitStatus {
    /// Nothing is left to send now
    Idle,
    /// Nothing but acknowledges, which may wait for what the program answers ([`Call::Acknowledge`])
    Owes,
    /// The path takes no more now
    Crowded,
    /// The port is full
    PortFull,
    /// More is left
    More,
}

/// What a program sets of a QP that has an engine.
#[derive(Clone, Copy, Debug)]
pub struct EngineAttr {
    /// What the peer may do
    pub access: Access,
    /// READs and atomics of ours outstanding at most
    pub max_rd_atomic: u8,
    /// RNR NAK timer code of our receive queue
    pub min_rnr_timer: u8,
    /// Times that our SENDs are tried without a receive of the peer; 7: for ever
    pub rnr_retry: u8,
    /// How long the peer may be silent, nanoseconds; 0: for ever
    pub patience: Nanos,
    /// SQD: an event when drained
    pub drain_event: bool,
}

/// Where an engine leaves a QP's queues.
#[derive(Clone, Copy, Debug)]
pub struct Detached {
    /// Index in the send queue of the first request that has not begun
    pub next_send: u32,
    /// Memory windows of type 2 were bound
    pub windows: bool,
}

/// A transport in the place of a QP's own.
pub trait Engine<E: Env>: Sized {
    /// What the engines of a card share
    type Shared: Default;

    /// Does it; gives how a transmit ended.
    fn run(&mut self, ctx: &mut EngineCtx<'_, E>, call: Call) -> TransmitStatus;
    /// A frame that has waited for the QP's context ([`Nic::await_context`]).
    fn receive(&mut self, ctx: &mut EngineCtx<'_, E>, meta: &FrameMeta, frame: &[u8]) {
        let _ = (ctx, meta, frame);
    }
    /// RTS, SQD, SQE or ERR.
    fn state(&self) -> QpState;
    /// Whether the QP may go to SQD.
    fn drains(&self) -> bool {
        false
    }
    /// The program has set the QP anew.
    fn set(&mut self, to: &EngineAttr);
    /// When it wants [`Call::Timeout`].
    fn next_deadline(&self) -> Option<Nanos>;
    /// What it may have to send, now that a packet came or its time: nothing (`Idle`), acknowledges alone
    /// (`Owes`), or more.
    fn wants(&self) -> TransmitStatus {
        TransmitStatus::More
    }
    /// Whether [`Call::Doorbell`] is to tell it more than that something was posted to be sent.
    fn minds_doorbell(&self) -> bool {
        true
    }
    /// The first WQE of the send queue that has not begun.
    fn next_send(&self) -> u32;
    /// Nothing is under way and nothing begins, as the peer may know: the card's own transport may go on
    /// ([`Nic::resume_qp`]).
    fn is_quiesced(&self) -> bool;
    /// The QP goes to RESET, or ends.
    fn close(self, ctx: &mut EngineCtx<'_, E>);
    /// The QP, which is quiesced, goes on with the card's own transport.
    fn detach(self, ctx: &mut EngineCtx<'_, E>) -> Detached;
    /// QP `from`, at `meta.src`, proposes to QP `to` of this card what carries their connection, or answers
    /// such a proposal. Where there are no engines, it is dropped.
    fn negotiate(nic: &Nic<E>, env: &mut E, meta: &FrameMeta, from: Qpn, to: Qpn, message: &[u8]) {
        let _ = (env, meta, from, to, message);
        nic.counters().drop_opcode.inc();
    }
}

/// Of hosts without engines: there is none.
impl<E: Env> Engine<E> for Infallible {
    type Shared = ();

    fn run(&mut self, _: &mut EngineCtx<'_, E>, _: Call) -> TransmitStatus {
        match *self {}
    }
    fn state(&self) -> QpState {
        match *self {}
    }
    fn set(&mut self, _: &EngineAttr) {
        match *self {}
    }
    fn next_deadline(&self) -> Option<Nanos> {
        match *self {}
    }
    fn next_send(&self) -> u32 {
        match *self {}
    }
    fn is_quiesced(&self) -> bool {
        match *self {}
    }
    fn close(self, _: &mut EngineCtx<'_, E>) {
        match self {}
    }
    fn detach(self, _: &mut EngineCtx<'_, E>) -> Detached {
        match self {}
    }
}
