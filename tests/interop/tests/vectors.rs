//! The frames that `make interop VECTORS=1` kept, of both cards and every kind that crossed: the parser takes
//! each, and its ICRC is what ours comes to.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use starverbs_core::Gid;
use starverbs_core::wire::{IcrcHeader, Packet, icrc};

const ETHERNET: usize = 14;
const UDP: usize = 8;
const ICRC: usize = 4;

/// The packets of a capture in the classic format, little-endian.
fn packets(capture: &[u8]) -> Vec<&[u8]> {
    assert_eq!(capture[..4], 0xa1b2_c3d4_u32.to_le_bytes(), "a little-endian pcap file");
    let mut rest = &capture[24..];
    let mut packets = Vec::new();
    while let Some((record, data)) = rest.split_at_checked(16) {
        let size = u32::from_le_bytes([record[8], record[9], record[10], record[11]]) as usize;
        let (packet, after) = data.split_at(size);
        packets.push(packet);
        rest = after;
    }
    packets
}

/// The outer headers that the ICRC covers, and the UDP payload.
fn open(packet: &[u8]) -> (IcrcHeader, &[u8]) {
    let ip = &packet[ETHERNET..];
    let (src, dst, ip_id, udp) = match ip[0] >> 4 {
        4 => (mapped(&ip[12..16]), mapped(&ip[16..20]), u16::from_be_bytes([ip[4], ip[5]]), &ip[20..]),
        6 => (gid(&ip[8..24]), gid(&ip[24..40]), 0, &ip[40..]),
        version => panic!("IP version {version}"),
    };
    let [sport, dport, len] = [0, 2, 4].map(|at| u16::from_be_bytes([udp[at], udp[at + 1]]));
    (IcrcHeader { src, dst, sport, dport, ip_id }, &udp[UDP..usize::from(len)])
}

fn gid(bytes: &[u8]) -> Gid {
    Gid(bytes.try_into().expect("16 bytes"))
}

fn mapped(ipv4: &[u8]) -> Gid {
    gid(&[&[0; 10][..], &[0xff, 0xff], ipv4].concat())
}

fn captures() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("vectors");
    let mut files: Vec<_> =
        std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("entry").path()).collect();
    files.sort();
    files
}

#[test]
fn every_frame_of_both_cards_is_read_and_its_icrc_is_ours() {
    let mut seen = BTreeSet::new();
    for file in captures() {
        let capture = std::fs::read(&file).expect("readable");
        for (number, packet) in packets(&capture).into_iter().enumerate() {
            let (header, payload) = open(packet);
            let (frame, icrc) = payload.split_at(payload.len() - ICRC);
            let parsed = Packet::parse(frame).unwrap_or_else(|e| panic!("{}, {number}: {e}", file.display()));
            let ours = icrc::of_frame(&header, frame).expect("long enough");
            assert_eq!(ours, icrc, "{}, frame {number}", file.display());
            seen.insert((header.src, parsed.bth().opcode()));
        }
    }
    // RC with all that peer.c asks for has 22 op-codes, UC 12, UD 2; four addresses speak. None must get
    // lost.
    assert!(seen.len() >= 100, "only {} kinds of frames", seen.len());
}
