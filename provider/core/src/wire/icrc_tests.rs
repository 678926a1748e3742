use std::vec::Vec;

use crc32fast::Hasher;
use proptest::prelude::*;

use super::*;

/// CRC-32 a bit at a time, with its own initial value and complement: shares nothing with the code
/// under test.
fn crc32_bitwise(bytes: &[u8]) -> u32 {
    let mut r = !0u32;
    for byte in bytes {
        for bit in 0..8 {
            let feed = (r ^ u32::from(byte >> bit)) & 1;
            r >>= 1;
            if feed == 1 {
                r ^= 0xedb8_8320;
            }
        }
    }
    !r
}

/// The ICRC from whole frames, IP header onwards, as annex A17.3.3 words it: mask, then CRC.
fn icrc_of_ip_packet(packet: &[u8]) -> [u8; 4] {
    let mut p = packet.to_vec();
    let ip = if p[0] >> 4 == 4 {
        p[1] = 0xff;
        p[8] = 0xff;
        p[10..12].fill(0xff);
        20
    } else {
        p[0] = 0x6f;
        p[1..4].fill(0xff);
        p[7] = 0xff;
        40
    };
    p[ip + 6..ip + 8].fill(0xff);
    p[ip + 8 + 4] = 0xff;
    let mut all = [0xffu8; 8].to_vec();
    all.extend_from_slice(&p);
    crc32_bitwise(&all).to_le_bytes()
}

fn hex(s: &str) -> Vec<u8> {
    let digits: Vec<u8> = s.bytes().filter_map(|c| (c as char).to_digit(16)).map(|d| d as u8).collect();
    digits.chunks(2).map(|d| d[0] << 4 | d[1]).collect()
}

#[test]
fn check_value_of_the_reference() {
    // "123456789" gives 0xcbf43926: the check value of CRC-32/ISO-HDLC in every catalogue.
    assert_eq!(crc32_bitwise(b"123456789"), 0xcbf4_3926);
    assert_eq!(crc32_bitwise(&[0xff; 8]), SEED);
}

/// A CNP captured from a ConnectX-4 Lx: the capture stands in scapy's test/contrib/roce.uts.
#[test]
fn vector_connectx4_cnp() {
    let ip = hex("45c2 003c 718c 4000 4011 9161 0a00 1101 0a00 1201 0000 12b7 0028 0000
         8100 ffff 4000 0118 0000 0000 0000 0000 0000 0000 0000 0000 0000 0000");
    assert_eq!(icrc_of_ip_packet(&ip), [0x82, 0xfd, 0x00, 0x2a]);
    let hdr = IcrcHeader {
        src: Gid::from_ipv4([10, 0, 17, 1]),
        dst: Gid::from_ipv4([10, 0, 18, 1]),
        sport: 0,
        dport: 4791,
        ip_id: 0x718c,
    };
    assert_eq!(of_frame(&hdr, &ip[28..]), Some([0x82, 0xfd, 0x00, 0x2a]));
}

/// A UC SEND from a ConnectX card: fields and ICRC stand in scapy's test/contrib/roce.uts.
#[test]
fn vector_uc_send() {
    let mut frame = hex("24 60 ffff 00 0000d3 00 cf1710");
    assert_eq!(13_571_856, 0xcf1710);
    frame.extend_from_slice(b"F0\x81\x8b\xe2\x895\xd9\x0e\x9a\x95PT\x01\xbe\x88^P\x00\x00");
    let a = Gid::from_ipv4([192, 168, 0, 7]);
    let hdr = IcrcHeader { src: a, dst: a, sport: 49152, dport: 4791, ip_id: 1144 };
    assert_eq!(of_frame(&hdr, &frame), Some([0x78, 0xf3, 0x53, 0xf3]));
}

/// Random bits do not pass as an unknown identification, but for one in 2^16.
#[test]
#[cfg_attr(miri, ignore = "needs many numbers, and is arithmetic alone")]
fn other_errors_are_not_explained() {
    let mut state = 0x9e37_79b9u32;
    let mut explained = 0;
    for i in 0..200_000u32 {
        state = state.wrapping_mul(0x915f_77f5).wrapping_add(0x7fb5_d329);
        explained += u32::from(explained_by_ip_id((state ^ i) | 1, 40 + (i as usize % 4096)));
    }
    assert!(explained < 20, "{explained} of 200000");
    assert!(!explained_by_ip_id(1, usize::MAX));
}

fn v6_packet(hdr: &IcrcHeader, frame: &[u8]) -> Vec<u8> {
    let udp_len = (frame.len() + 4 + 8) as u16;
    let mut p = hex("6000 0000");
    p.extend_from_slice(&udp_len.to_be_bytes());
    p.extend_from_slice(&[17, 64]);
    p.extend_from_slice(&hdr.src.0);
    p.extend_from_slice(&hdr.dst.0);
    p.extend_from_slice(&hdr.sport.to_be_bytes());
    p.extend_from_slice(&hdr.dport.to_be_bytes());
    p.extend_from_slice(&udp_len.to_be_bytes());
    p.extend_from_slice(&[0, 0]);
    p.extend_from_slice(frame);
    p
}

/// Bytes of a frame, at most `bytes`; under miri fewer.
const fn up_to(bytes: usize) -> usize {
    if cfg!(miri) { 300 } else { bytes }
}

proptest! {
    #[test]
    fn ipv6_matches_the_reference(
        src: [u8; 16], dst: [u8; 16], sport: u16, frame in prop::collection::vec(any::<u8>(), 12..300),
    ) {
        let hdr = IcrcHeader { src: Gid(src), dst: Gid(dst), sport, dport: 4791, ip_id: 7 };
        prop_assert_eq!(of_frame(&hdr, &frame), Some(icrc_of_ip_packet(&v6_packet(&hdr, &frame))));
    }

    /// Pieces give the same as the whole, wherever it is cut.
    #[test]
    fn pieces_make_the_whole(
        frame in prop::collection::vec(any::<u8>(), 12..up_to(5000)), cut: prop::sample::Index,
    ) {
        let hdr = IcrcHeader { sport: 1, dport: 4791, ..Default::default() };
        let cut = 12 + cut.index(frame.len() - 11);
        let mut crc = begin(&hdr, (frame.len() + 4) as u16, frame[..12].try_into().unwrap());
        crc.update(&frame[12..cut]);
        crc.update(&frame[cut..]);
        prop_assert_eq!(Some(crc.finish()), of_frame(&hdr, &frame));
    }

    #[test]
    fn an_unknown_id_is_found(
        id: u16, guess: u16, frame in prop::collection::vec(any::<u8>(), 12..up_to(9000)),
    ) {
        let src = Gid::from_ipv4([127, 0, 0, 1]);
        let hdr = |ip_id| IcrcHeader { src, dst: src, sport: 9, dport: 4791, ip_id };
        let sent = u32::from_le_bytes(of_frame(&hdr(id), &frame).unwrap());
        let computed = u32::from_le_bytes(of_frame(&hdr(guess), &frame).unwrap());
        let error = sent ^ computed;
        let after = bytes_after_ip_id(frame.len());
        prop_assert!(explained_by_ip_id(error, after));
        prop_assert_eq!(ip_id_difference(error, after), Some(id ^ guess));
    }

    /// One flipped bit anywhere behind the outer headers is never taken for an unknown identification.
    #[test]
    fn a_flipped_bit_is_not_explained(
        id: u16, mut frame in prop::collection::vec(any::<u8>(), 12..up_to(4200)), bit: prop::sample::Index,
    ) {
        let [src, dst] = [1, 2].map(|host| Gid::from_ipv4([10, 0, 0, host]));
        let hdr = IcrcHeader { src, dst, sport: 9, dport: 4791, ip_id: id };
        let sent = u32::from_le_bytes(of_frame(&hdr, &frame).unwrap());
        let bit = bit.index(frame.len() * 8);
        prop_assume!(bit / 8 != 4);
        frame[bit / 8] ^= 1 << (bit % 8);
        let computed = u32::from_le_bytes(of_frame(&hdr, &frame).unwrap());
        prop_assert!(!explained_by_ip_id(sent ^ computed, bytes_after_ip_id(frame.len())));
    }
}

/// Whether this CPU has the instructions that make a CRC-32 of long frames cheap.
fn cpu_has_crc() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::is_x86_feature_detected!("pclmulqdq") && std::is_x86_feature_detected!("sse4.1");
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("crc");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    return false;
}

/// Found at run time: a library built for the oldest CPU of its architecture uses what a newer one has.
#[test]
fn the_cpus_instructions_are_used_where_it_has_them() {
    assert_eq!(Hasher::internal_new_specialized(SEED, 0).is_some(), cpu_has_crc());
}

/// Lengths around what the loops of each way take at a time (64 bytes, 128, 1536), at each alignment, in one
/// piece and two.
#[test]
fn the_cpus_instructions_and_the_table_agree() {
    let Some(by_cpu) = Hasher::internal_new_specialized(SEED, 0) else { return };
    let bytes: Vec<u8> = (0..4200u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let lens = (0..300).chain(1500..1580).chain([2048, 3071, 3072, 3073, 4095, 4096, 4180]);
    for (len, at) in lens.flat_map(|len| (0..16).map(move |at| (len, at))) {
        let (piece, cut) = (&bytes[at..at + len], len * at / 16);
        let crc = |mut hasher: Hasher, pieces: [&[u8]; 2]| {
            pieces.iter().for_each(|piece| hasher.update(piece));
            hasher.finalize()
        };
        let by_table = crc(Hasher::internal_new_baseline(SEED, 0), [piece, &[]]);
        assert_eq!(crc(by_cpu.clone(), [piece, &[]]), by_table, "{len} bytes at {at}");
        assert_eq!(crc(by_cpu.clone(), [&piece[..cut], &piece[cut..]]), by_table, "{len} bytes at {at}, cut");
    }
}
