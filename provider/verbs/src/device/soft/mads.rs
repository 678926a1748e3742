//! Queue pair 1 of the card, as its connection manager has it.

use starverbs_cm::CmPath;
use starverbs_core::{Av, MAD_LEN, Nanos, Nic, ReceivedMad};

use super::Soft;
use super::deferred_log::DeferredLog;
use super::env::HostEnv;
use super::shard::Shard;
use crate::cm::{CmHost, MadPort};

/// The card at a time.
pub(super) struct CardMads<'a> {
    pub(super) nic: &'a mut Nic<HostEnv>,
    pub(super) env: &'a mut HostEnv,
    pub(super) now: Nanos,
}

impl MadPort for CardMads<'_> {
    fn receive(&mut self) -> Option<(CmPath, [u8; MAD_LEN])> {
        let ReceivedMad { meta, bytes } = self.nic.poll_mad()?;
        /* the two low bits are ECN */
        let traffic_class = meta.traffic_class & !3;
        Some((CmPath { local: meta.dst, remote: meta.src, traffic_class, hop_limit: 0 }, bytes))
    }

    fn send(&mut self, to: &Av, mad: &[u8; MAD_LEN]) {
        if !self.env.tx.can_send() {
            self.env.tx.flush(self.now);
        }
        self.nic.send_mad(self.env, to, mad);
    }

    fn flush(&mut self) {
        self.env.tx.flush(self.now);
    }

    fn wake_at(&mut self, at: Nanos) {
        self.nic.arm_mads(at);
    }
}

impl Soft {
    /// Runs a call on the connection manager under the card's lock.
    pub(crate) fn with_cm<R>(
        &self,
        call: impl FnOnce(&mut CmHost, &mut dyn MadPort, &DeferredLog, Nanos) -> R,
    ) -> R {
        self.with(|shard, now| {
            let Shard { nic, env, cm, .. } = shard;
            call(cm, &mut CardMads { nic, env, now }, &self.deferred_log, now)
        })
    }
}
