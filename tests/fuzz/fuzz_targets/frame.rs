//! A UDP payload from anyone: parsing and checking it must not panic, and what parses lies within the frame.
#![no_main]

use libfuzzer_sys::fuzz_target;
use starverbs_core::wire::tags::Tagged;
use starverbs_core::wire::{Icrc, IcrcHeader, Packet, bytes_after_ip_id, explained_by_ip_id};

fuzz_target!(|frame: &[u8]| {
    let Ok(packet) = Packet::parse(frame) else { return };
    let _ = (packet.bth().psn(), packet.bth().dest_qpn(), packet.op());
    let _ = (packet.reth(), packet.deth(), packet.aeth(), packet.atomic_eth(), packet.atomic_ack());
    let _ = (packet.imm(), packet.ieth(), packet.xrc_srq());
    let _ = packet.feth().map(|feth| (feth.placement(), feth.level()));
    let _ = Tagged::parse(packet.payload());
    assert!(packet.payload().len() <= frame.len());
    let header = IcrcHeader::default();
    if let Some(crc) = Icrc::of_frame(&header, frame) {
        let error = u32::from_le_bytes(crc) ^ 0x1234_5678;
        let _ = explained_by_ip_id(error, bytes_after_ip_id(frame.len()));
    }
});
