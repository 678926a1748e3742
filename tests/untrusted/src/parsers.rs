//! Oracles for single parsers.

use std::fs::File;
use std::os::unix::fs::FileExt;

use nix::sys::memfd::{MFdFlags, memfd_create};
use starverbs_board::Replay;
use starverbs_core::strom::{ReplyHead, ReplyRecord, TARGET_LEN};
use starverbs_core::wire::tags::Tagged;
use starverbs_core::wire::{IcrcHeader, Packet, bytes_after_ip_id, explained_by_ip_id, icrc};
use starverbs_settings::{FaultSpec, KEYS, Settings};
use starverbs_verbs::stat::Snapshot;
use zerocopy::IntoBytes;

use crate::bytes::Bytes;

/// The record of a board, which is played as far as it goes.
pub fn record(bytes: &[u8]) {
    let file = File::from(memfd_create(c"record", MFdFlags::MFD_CLOEXEC).expect("a memfd"));
    file.write_all_at(bytes, 0).expect("memory");
    if let Ok(mut replay) = Replay::open(file) {
        let _ = replay.run();
    }
}

/// A UDP payload from anyone: what parses lies within the frame.
pub fn frame(frame: &[u8]) {
    let _ = Tagged::parse(frame);
    /* as queue pairs of StRoM's dialect read it */
    if let Ok(packet) = Packet::parse_rpc(frame) {
        read_headers(&packet, frame);
        read_parameters(packet.payload());
    }
    let Ok(packet) = Packet::parse(frame) else { return };
    read_headers(&packet, frame);
    let _ = Tagged::parse(packet.payload());
    if let Some(packet) = packet.as_rpc() {
        read_headers(&packet, frame);
    }
    let header = IcrcHeader::default();
    if let Some(crc) = icrc::of_frame(&header, frame) {
        let error = u32::from_le_bytes(crc) ^ 0x1234_5678;
        let _ = explained_by_ip_id(error, bytes_after_ip_id(frame.len()));
    }
}

/// The headers of a packet that is all of a frame, which has them all.
fn read_headers(packet: &Packet<'_>, frame: &[u8]) {
    let _ = (packet.bth().psn(), packet.bth().dest_qpn(), packet.op());
    let _ = (packet.reth(), packet.deth(), packet.aeth(), packet.atomic_eth(), packet.atomic_ack());
    let _ = (packet.imm(), packet.ieth(), packet.xrc_srq());
    let _ = packet.feth().map(|feth| (feth.placement(), feth.level()));
    assert!(packet.payload().len() + usize::from(packet.op().header_len) <= frame.len());
}

/// The parameters of an RPC, or its answer: where the answer goes is what its head says.
fn read_parameters(bytes: &[u8]) {
    let _ = ReplyRecord::decode(bytes);
    if let Some((target, rest)) = ReplyHead::decode(bytes) {
        assert_eq!((ReplyHead::new(&target).as_bytes(), rest), bytes.split_at(TARGET_LEN));
    }
}

/// A message between processes of a host, a steering probe, a control message of the kernel's.
pub fn control(bytes: &[u8]) {
    starverbs_backend::fuzzing::read_messages(bytes);
}

/// What another process does to the memory of a channel while both ends are in use.
pub fn channel(bytes: &[u8]) {
    starverbs_backend::fuzzing::use_channel(bytes);
}

/// A settings file and a variable: any text is settings or an error with a message, and settings read back
/// what they show. First byte: which variable; then its value, a NUL, and the file.
pub fn settings(bytes: &[u8]) {
    let mut bytes = Bytes(bytes);
    let which = usize::from(bytes.byte());
    let text = String::from_utf8_lossy(bytes.0);
    let (value, toml) = text.split_once('\0').unwrap_or((&text, ""));
    if let Ok(spec) = FaultSpec::parse(value) {
        let shown = spec.to_string();
        assert_eq!(FaultSpec::parse(&shown).map(|again| again.to_string()), Ok(shown));
    }
    let name = KEYS.get(which).map_or_else(|| format!("STARVERBS_{value}"), |key| key.variable());
    let env = std::iter::once((name, value.to_owned()));
    match Settings::from_sources(env, Some(toml)) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(settings) => {
            for key in KEYS.iter().filter(|key| !matches!(key.name, "PCAP" | "CONFIG")) {
                let shown = key.show(&settings);
                let again = Settings::from_sources(std::iter::once((key.variable(), shown.clone())), None);
                let again = again.expect("a shown value is a good value");
                assert_eq!(key.show(&again), shown);
            }
        }
    }
}

/// The table of another process's context, whose words that process writes as it likes.
pub fn share(bytes: &[u8]) {
    starverbs_verbs::fuzzing::read_share_table(bytes);
}

/// A file that says it is a statistics page.
pub fn stat(bytes: &[u8]) {
    let file = File::from(memfd_create(c"page", MFdFlags::MFD_CLOEXEC).expect("a memfd"));
    file.write_all_at(bytes, 0).expect("a memfd takes bytes");
    if let Ok(page) = Snapshot::read(&file) {
        let printable = |name: &str| name.chars().all(|c| !c.is_control());
        assert!(page.counters.iter().all(|(name, _)| printable(name)), "names are for terminals");
    }
}
