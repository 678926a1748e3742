//! What may do the work of a queue pair in the place of the card's own transport: StaR's stateful end, or the
//! local transport between processes of this host.

use starverbs_core::engine::{Call, Detached, Engine, EngineAttr, EngineCtx, TransmitStatus};
use starverbs_core::{FrameMeta, Nanos, Nic, QpState, Qpn};
use starverbs_star::card::{self, StarEngine};
use starverbs_star::env::QpPair;
use starverbs_star::registry::RuleRegistry;
use starverbs_star::stateful::Stateful;

use super::env::HostEnv;
use super::local::end::LocalEnd;

/// An engine of this host's cards.
pub(crate) enum HostEngine {
    /// A stateful end of StaR
    Star(Box<Stateful<HostEnv>>),
    /// An end of a connection between processes of this host
    Local(Box<LocalEnd>),
}

impl HostEngine {
    /// The local end, if it is one.
    #[inline]
    pub(super) fn local(&self) -> Option<&LocalEnd> {
        match self {
            HostEngine::Local(end) => Some(end),
            HostEngine::Star(_) => None,
        }
    }

    /// The same, to be changed.
    #[inline]
    pub(super) fn local_mut(&mut self) -> Option<&mut LocalEnd> {
        match self {
            HostEngine::Local(end) => Some(end),
            HostEngine::Star(_) => None,
        }
    }
}

impl From<Box<Stateful<HostEnv>>> for HostEngine {
    fn from(end: Box<Stateful<HostEnv>>) -> Self {
        HostEngine::Star(end)
    }
}

impl StarEngine<HostEnv> for HostEngine {
    fn stateful(&self) -> Option<&Stateful<HostEnv>> {
        match self {
            HostEngine::Star(end) => Some(end),
            HostEngine::Local(_) => None,
        }
    }
    fn stateful_mut(&mut self) -> Option<&mut Stateful<HostEnv>> {
        match self {
            HostEngine::Star(end) => Some(end),
            HostEngine::Local(_) => None,
        }
    }
    fn into_stateful(self) -> Option<Box<Stateful<HostEnv>>> {
        match self {
            HostEngine::Star(end) => Some(end),
            HostEngine::Local(_) => None,
        }
    }
}

impl Engine<HostEnv> for HostEngine {
    type Shared = RuleRegistry;

    fn run(&mut self, ctx: &mut EngineCtx<'_, HostEnv>, call: Call) -> TransmitStatus {
        match self {
            HostEngine::Star(end) => card::run(end, ctx, call),
            HostEngine::Local(end) => end.run(ctx, call),
        }
    }
    fn receive(&mut self, ctx: &mut EngineCtx<'_, HostEnv>, meta: &FrameMeta, frame: &[u8]) {
        if let HostEngine::Star(end) = self {
            card::receive(end, ctx, meta, frame);
        }
    }
    #[inline]
    fn state(&self) -> QpState {
        match self {
            HostEngine::Star(end) => end.state(),
            HostEngine::Local(end) => end.state(),
        }
    }
    fn drains(&self) -> bool {
        matches!(self, HostEngine::Local(_))
    }
    fn set(&mut self, to: &EngineAttr) {
        match self {
            HostEngine::Star(end) => end.set(to),
            HostEngine::Local(end) => end.set(to),
        }
    }
    #[inline]
    fn next_deadline(&self) -> Option<Nanos> {
        match self {
            HostEngine::Star(end) => end.next_deadline(),
            HostEngine::Local(end) => end.next_deadline(),
        }
    }
    #[inline]
    fn wants(&self) -> TransmitStatus {
        match self {
            HostEngine::Star(end) => end.wants(),
            HostEngine::Local(_) => TransmitStatus::More,
        }
    }
    #[inline]
    fn minds_doorbell(&self) -> bool {
        match self {
            HostEngine::Star(end) => end.minds_doorbell(),
            HostEngine::Local(_) => true,
        }
    }
    fn next_send(&self) -> u32 {
        match self {
            HostEngine::Star(end) => end.next_send(),
            HostEngine::Local(end) => end.next_send(),
        }
    }
    fn is_quiesced(&self) -> bool {
        match self {
            HostEngine::Star(end) => end.is_quiesced(),
            HostEngine::Local(_) => false,
        }
    }
    fn close(self, ctx: &mut EngineCtx<'_, HostEnv>) {
        match self {
            HostEngine::Star(end) => card::close(end, ctx),
            HostEngine::Local(end) => end.close(ctx),
        }
    }
    fn detach(self, ctx: &mut EngineCtx<'_, HostEnv>) -> Detached {
        match self {
            HostEngine::Star(end) => card::detach(end, ctx),
            HostEngine::Local(end) => {
                let detached = Detached { next_send: end.oldest(), windows: end.has_windows() };
                end.close(ctx);
                detached
            }
        }
    }
    fn negotiate(
        nic: &Nic<HostEnv>,
        env: &mut HostEnv,
        meta: &FrameMeta,
        from: Qpn,
        to: Qpn,
        message: &[u8],
    ) {
        card::negotiate(nic, env, meta, QpPair { from, to }, message);
    }
}
