//! Queue pair 1: management datagrams come out and go in here (IBTA 10.2.4.2, 13.5.1).
//!
//! The card does not look into them; what they mean is for whoever manages connections. It keeps a few until
//! they are taken, and one timer for that manager, and raises [`AsyncEvent::Mads`] when it should have a
//! look.

use alloc::collections::VecDeque;

use super::{Nic, TimerId};
use crate::env::Env;
use crate::room::Room;
use crate::types::{AsyncEvent, Av, FrameMeta, Nanos, Psn, Qpn};
use crate::wire::{HeaderBuf, PKEY_DEFAULT, Packet, Transport, code};

/// The general services interface (IBTA 10.2.4.2).
pub const QPN_GSI: Qpn = 1;
/// Bytes of a management datagram.
pub const MAD_LEN: usize = 256;
/// Q_Key of queue pair 1 (IBTA 10.2.5).
pub const QKEY_GSI: u32 = 0x8001_0000;
/// Datagrams that wait; more are dropped, as are those for which the host has no memory. Whoever sent them
/// sends them again.
const WAITING: usize = 256;
/// BTH and DETH
const HEADERS: usize = 20;

/// A management datagram that came to queue pair 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReceivedMad {
    /// What the port knows of its frame
    pub meta: FrameMeta,
    /// The datagram, from its header on
    pub bytes: [u8; MAD_LEN],
}

/// What waits.
#[derive(Default)]
pub(super) struct WaitingMads {
    queue: VecDeque<ReceivedMad>,
    timer: Option<TimerId>,
    psn: Psn,
}

impl<E: Env> Nic<E> {
    /// A frame to queue pair 1.
    #[cold]
    pub(super) fn receive_mad(&mut self, env: &mut E, meta: &FrameMeta, packet: &Packet<'_>) {
        let stats = &self.shared.stats;
        let deth = packet.deth().filter(|_| packet.op().transport == Transport::Ud && packet.imm().is_none());
        let Some(deth) = deth else { return stats.drop_opcode.inc() };
        if meta.dst.is_multicast() {
            return stats.drop_multicast.inc();
        }
        if deth.qkey() != QKEY_GSI {
            return stats.drop_qkey.inc();
        }
        let Ok(mad) = <&[u8; MAD_LEN]>::try_from(packet.payload()) else { return stats.drop_malformed.inc() };
        let waiting = self.mads.queue.len();
        if waiting >= WAITING || self.mads.queue.make_room(waiting + 1).is_err() {
            return stats.drop_mads.inc();
        }
        stats.rx_mads.inc();
        if self.mads.queue.is_empty() {
            env.event(AsyncEvent::Mads);
        }
        self.mads.queue.push_in_room(ReceivedMad { meta: *meta, bytes: *mad });
    }

    /// The oldest datagram that came to queue pair 1.
    pub fn poll_mad(&mut self) -> Option<ReceivedMad> {
        self.mads.queue.pop_front()
    }

    /// Sends a datagram to queue pair 1 at an address. The port should have room: flush it if not.
    pub fn send_mad(&mut self, env: &mut E, to: &Av, mad: &[u8; MAD_LEN]) {
        let psn = self.mads.psn;
        self.mads.psn = psn.plus(1);
        let headers = HeaderBuf::bth(code::UD_SEND_ONLY, QPN_GSI, psn, false, false, 0, PKEY_DEFAULT);
        let headers = headers.deth(QKEY_GSI, QPN_GSI);
        /* its bytes are nobody's memory, as DMA has it: they go with the headers */
        let mut frame = [0; HEADERS + MAD_LEN];
        let (head, body) = frame.split_at_mut(HEADERS);
        head.copy_from_slice(&headers);
        body.copy_from_slice(mad);
        self.shared.stats.tx_mads.inc();
        env.send_frame(to, &frame, &[], 0, false);
    }

    /// [`AsyncEvent::Mads`] is raised at `at`, unless it is due earlier already. Without memory for the first
    /// timer, the next message is what raises it.
    pub fn arm_mads(&mut self, at: Nanos) {
        if self.mads.timer.is_none() {
            self.mads.timer = self.shared.sched.join_timer().ok();
        }
        if let Some(timer) = self.mads.timer {
            self.shared.sched.arm(timer, at, QPN_GSI);
        }
    }
}
