//! What `STARVERBS_FAULT` and `STARVERBS_PCAP` do to the packets of a 1RMA card.
//!
//! Owns the packets that are held back. It must not know sockets.

use starverbs_core::wire::icrc::IcrcHeader;
use starverbs_core::{Av, Counters, FrameMeta, Gid, Nanos};
use starverbs_settings::Settings;

use super::port::DSCP;
use crate::fault::{WireFault, flip};
use crate::pcap::Capture;
use crate::program::Payload;
use crate::tx::Datagram;

/// An end of a packet: its address and UDP port.
pub(super) type PacketEnd = (Gid, u16);

/// Hurts packets, and writes down what leaves and comes.
pub(super) struct OneRmaTap {
    fault: Option<Box<WireFault>>,
    /// Of the faults: the page's are those of RoCEv2
    counters: Counters,
    capture: Option<Capture>,
}

impl OneRmaTap {
    /// What the settings ask for; `None` if that is nothing.
    pub(super) fn open(settings: &Settings) -> Option<Box<OneRmaTap>> {
        let (fault, capture) = (WireFault::from_spec(&settings.fault), Capture::open(settings));
        let tap = || Box::new(OneRmaTap { fault, counters: Counters::default(), capture });
        (settings.fault.is_active() || settings.pcap.is_some()).then(tap)
    }

    /// Whether packets go through [`OneRmaTap::take`].
    pub(super) fn hurts(&self) -> bool {
        self.fault.is_some()
    }

    /// Takes a packet that is to leave; what becomes of it shows in [`OneRmaTap::release`].
    pub(super) fn take(&mut self, (dgid, port): PacketEnd, packet: &[u8]) {
        let Some(fault) = &mut self.fault else { return };
        let to = &Av { dgid, ..Av::default() };
        let payload = Payload::EMPTY;
        let datagram = Datagram { to, port, head: packet, data: &[], payload, pad: 0, volatile: true };
        fault.take(&datagram, &self.counters);
    }

    /// Gives `send` the packets whose time has come.
    pub(super) fn release(&mut self, now: Nanos, mut send: impl FnMut(PacketEnd, &[u8])) {
        let Some(fault) = &mut self.fault else { return };
        let mut hurt = Vec::new();
        fault.release(now, |frame| {
            let Datagram { to, port, head, .. } = frame.datagram();
            match frame.corrupt {
                None => send((to.dgid, port), head),
                Some(draw) => {
                    hurt.clear();
                    hurt.extend_from_slice(head);
                    flip(&mut hurt, draw);
                    send((to.dgid, port), &hurt);
                }
            }
        });
    }

    /// When [`OneRmaTap::release`] has something to give.
    pub(super) fn next_deadline(&self) -> Option<Nanos> {
        self.fault.as_ref()?.next_deadline()
    }

    /// Writes down a packet.
    pub(super) fn capture(&self, (src, sport): PacketEnd, (dst, dport): PacketEnd, packet: &[u8]) {
        let Some(capture) = &self.capture else { return };
        let outer = IcrcHeader { src, dst, sport, dport, ip_id: 0 };
        let meta = FrameMeta { src, traffic_class: DSCP << 2, ..FrameMeta::default() };
        capture.frame(&outer, &meta, &[packet]);
    }

    /// Brings what was written down to the file.
    pub(super) fn flush(&self) {
        if let Some(capture) = &self.capture {
            capture.flush();
        }
    }
}
