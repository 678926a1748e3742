//! UD, receiving side (IBTA 9.8.3): Q_Key, GRH, one packet a message.

use super::Ctx;
use super::recv::PlaceError;
use crate::env::Env;
use crate::types::{Cqe, FrameMeta, QpState, WcFlags, WcOpcode, WcStatus};
use crate::wire::packet::Packet;

/// Room at the front of a UD receive buffer for the network header.
const GRH: u32 = 40;

impl<E: Env> Ctx<'_, E> {
    pub(super) fn receive_datagram(&mut self, meta: &FrameMeta, packet: &Packet<'_>) {
        if !matches!(self.qp.state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe) {
            return self.sh.stats.drop_state.inc();
        }
        let Some(deth) = packet.deth() else { return self.sh.stats.drop_opcode.inc() };
        if deth.qkey() != self.qp.attr.qkey {
            return self.sh.stats.drop_qkey.inc();
        }
        if !self.take_recv() {
            return self.sh.stats.drop_no_recv.inc();
        }
        let data = packet.payload();
        let header = network_header(meta, data.len());
        /* The payload first: if it does not fit, the WQE stays for the next datagram. */
        let placed = self.place(GRH, data).and_then(|()| self.place(0, &header));
        match placed {
            Ok(()) => {}
            Err(PlaceError::TooLong) => return self.sh.stats.drop_no_recv.inc(),
            Err(PlaceError::Protection) => {
                self.fail_recv(WcStatus::LocProtErr);
                return super::enter_error(self, QpState::Err);
            }
        }
        let mut flags = WcFlags::GRH;
        flags.set(WcFlags::WITH_IMM, packet.imm().is_some());
        let cqe = Cqe {
            byte_len: data.len() as u32 + GRH,
            imm: packet.imm().unwrap_or_default(),
            src_qp: deth.src_qp(),
            opcode: WcOpcode::Recv,
            flags,
            sl: header_type(meta),
            ..Cqe::default()
        };
        self.complete_recv(cqe, packet.bth().solicited());
        self.look_for_receives();
    }
}

/// What the completion's service level holds of a datagram, because Ethernet has no service level: which
/// header lies before it, so that programs need not guess (annex A17.4.5.1). The numbers are those of mlx5
/// cards, which UCX relies on: 1 for IPv6, 2 for IPv4, and 8 for UDP behind it.
fn header_type(meta: &FrameMeta) -> u8 {
    let ip = if meta.src.ipv4().is_some() && meta.dst.ipv4().is_some() { 2 } else { 1 };
    8 | ip
}

/// The 40 bytes before a datagram: the IPv6 header, or 20 zero bytes and the IPv4 header (annex A17.4.5.1).
fn network_header(meta: &FrameMeta, payload: usize) -> [u8; GRH as usize] {
    let mut h = [0u8; GRH as usize];
    let udp = payload as u16 + 8 + 24 + 4;
    match (meta.src.ipv4(), meta.dst.ipv4()) {
        (Some(src), Some(dst)) => {
            h[20] = 0x45;
            h[21] = meta.traffic_class;
            h[22..24].copy_from_slice(&(udp + 20).to_be_bytes());
            h[26] = 0x40;
            h[28] = meta.hop_limit;
            h[29] = 17;
            h[32..36].copy_from_slice(&src);
            h[36..40].copy_from_slice(&dst);
            let sum = checksum(&h[20..]);
            h[30..32].copy_from_slice(&sum.to_be_bytes());
        }
        _ => {
            let first = 6u32 << 28 | u32::from(meta.traffic_class) << 20;
            h[0..4].copy_from_slice(&first.to_be_bytes());
            h[4..6].copy_from_slice(&udp.to_be_bytes());
            h[6] = 17;
            h[7] = meta.hop_limit;
            h[8..24].copy_from_slice(&meta.src.0);
            h[24..40].copy_from_slice(&meta.dst.0);
        }
    }
    h
}

/// The checksum of an IPv4 header whose own field is zero (RFC 1071): it distinguishes the header from a
/// part of an IPv6 one.
fn checksum(header: &[u8]) -> u16 {
    let (words, _) = header.as_chunks::<2>();
    let sum: u32 = words.iter().map(|word| u32::from(u16::from_be_bytes(*word))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded + (folded >> 16)) as u16)
}
