//! UC and UD against a path's window: see `nic::pace`.

use super::Ctx;
use crate::env::Env;
use crate::nic::pace::PROBE_TIMEOUT;
use crate::nic::path::{PACKET_OVERHEAD, PathId};
use crate::types::{Av, FrameMeta, Psn, Qpn};
use crate::wire::{HeaderBuf, PKEY_DEFAULT, Packet, code};

/// A probe goes behind this share of the window.
const STRETCH_SHARE: u32 = 4;

impl<E: Env> Ctx<'_, E> {
    /// Whether a UC or UD packet of `len` bytes may go to `peer` now; sends a probe when one is due.
    pub(super) fn pace_admits(&mut self, id: PathId, av: &Av, peer: Qpn, len: u32) -> bool {
        let path = self.sh.paths.get(id);
        if path.pace.mute() {
            return true;
        }
        let stretch = path.window() / STRETCH_SHARE;
        let full = !path.admits(self.qp.qpn, len + PACKET_OVERHEAD);
        if path.pace.wants_probe(if full { 1 } else { stretch }) {
            self.probe(id, av, peer);
        }
        if !full {
            return true;
        }
        /* Whoever waits also watches the probe: its own sender may be gone by then. */
        let at = self.sh.paths.get(id).pace.deadline().unwrap_or(self.now + PROBE_TIMEOUT);
        self.qp.req.deadline = at;
        self.arm(at);
        self.window_admits(id, len)
    }

    /// Sends a probe towards `peer`, and looks after its answer.
    fn probe(&mut self, id: PathId, av: &Av, peer: Qpn) {
        let number = self.sh.paths.get(id).pace.probed(self.now);
        let header = HeaderBuf::bth(code::PROBE, peer, Psn::new(number), false, false, 0, PKEY_DEFAULT)
            .deth(0, self.qp.qpn);
        self.env.send_frame(av, &header, &[], 0, false);
        self.arm(self.now + PROBE_TIMEOUT);
    }

    /// A reliable QP waits for room that UC and UD packets take: their sender may have no more to send, or be
    /// gone, so the waiter asks about them itself.
    pub(super) fn watch_pace(&mut self, id: PathId) {
        let path = self.sh.paths.get(id);
        if path.pace.wants_probe(1) && self.env.can_send() {
            let (av, peer) = (self.qp.attr.av, self.qp.attr.dest_qpn);
            return self.probe(id, &av, peer);
        }
        if let Some(at) = path.pace.owes(self.now) {
            self.arm(at);
        }
    }

    /// The timer of a reliable QP that waits for room.
    pub(super) fn pace_waiter(&mut self, id: PathId) {
        let path = self.sh.paths.get(id);
        let bytes = path.pace.expired(self.now);
        if bytes > 0 {
            path.forget(bytes);
            self.sh.open_path(id);
        }
        self.watch_pace(id);
    }

    /// A UC or UD packet went.
    pub(super) fn paced(&mut self, id: PathId, len: u32) {
        let path = self.sh.paths.get(id);
        if !path.pace.mute() {
            path.pace.sent(len + PACKET_OVERHEAD);
            path.add(len + PACKET_OVERHEAD);
        }
    }

    /// A probe's answer may be overdue: the stretch counts as lost, and sending goes on.
    pub(super) fn pace_timer(&mut self) {
        let now = self.now;
        for (id, path) in self.sh.paths.each() {
            let bytes = path.pace.expired(now);
            if bytes > 0 {
                path.forget(bytes);
                if path.open() {
                    self.sh.sched.push_open(id);
                }
            }
        }
        self.qp.req.deadline = 0;
        self.ready();
    }
}

/// Answers a probe: everything before it has been read from the socket.
pub(crate) fn answer_probe<E: Env>(env: &mut E, meta: &FrameMeta, packet: &Packet<'_>) {
    let Some(asker) = packet.deth().map(|d| d.src_qp()) else { return };
    if !env.can_send() {
        return;
    }
    let av = Av { dgid: meta.src, sgid: meta.dst, hop_limit: 64, ..Av::default() };
    let header = HeaderBuf::bth(code::PROBE_ANSWER, asker, packet.bth().psn(), false, false, 0, PKEY_DEFAULT)
        .deth(0, packet.bth().dest_qpn());
    env.send_frame(&av, &header, &[], 0, false);
}
