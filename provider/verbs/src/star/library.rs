//! The library of the stateless half.

use starverbs_core::star::bounds::Bounds;
use starverbs_core::star::stateless;
use starverbs_core::star::wire::Packet;
use starverbs_core::{Counters, FrameMeta, Nanos, Nic, Qpn};

use crate::env::HostEnv;
use crate::error::{Result, VerbsError};

/// What a process keeps of its queue pairs that are stateless ends.
pub(crate) struct Library {
    life: u16,
    bounds: Bounds,
}

impl Library {
    pub(crate) fn new(life: u16, _boot: u64) -> Self {
        Library { life, bounds: Bounds::new() }
    }

    /// All regions that there are.
    pub(crate) fn learn(&mut self, _nic: &Nic<HostEnv>) {}

    /// A QP becomes a stateless end.
    pub(crate) fn begin(
        &mut self,
        _card: (&mut Nic<HostEnv>, &mut HostEnv),
        _qpn: Qpn,
        _peer: (u64, [u16; 2]),
        _now: Nanos,
    ) -> Result<()> {
        Err(VerbsError::Unsupported("stateless ends"))
    }

    /// A packet for the stateless half.
    pub(crate) fn serve(
        &mut self,
        env: &mut HostEnv,
        _now: Nanos,
        from: (&FrameMeta, u16),
        packet: &Packet<'_>,
        stats: &Counters,
    ) {
        let card = stateless::Card { bounds: Some(&self.bounds), life: self.life, stats };
        stateless::handle(&card, env, from, packet);
    }

    /// A control message; false: for none of its QPs.
    pub(crate) fn handle_control(&mut self, _env: &mut HostEnv, _now: Nanos, _packet: &Packet<'_>) -> bool {
        false
    }

    pub(crate) fn run_timers(&mut self, _env: &mut HostEnv, _now: Nanos) {}

    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        None
    }

    /// Whether more waits for room in the port.
    pub(crate) fn transmit(&mut self, _env: &mut HostEnv, _now: Nanos) -> bool {
        false
    }
}
