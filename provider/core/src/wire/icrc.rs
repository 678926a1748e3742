//! The invariant CRC of RoCEv2 (IBTA annex A17.3.3, vol. 1 7.8.1).
//!
//! It is the Ethernet CRC-32 over eight bytes of 0xff (the masked LRH), the IP and UDP headers with
//! what routers may change masked to ones (TOS or traffic class and flow label, TTL or hop limit,
//! both checksums), the BTH with its fifth byte masked, and everything behind it. On the wire it is
//! little-endian.
//!
//! It covers the IPv4 identification, which a UDP socket neither sets nor shows; see
//! [`explained_by_ip_id`].

use super::crc::Crc;
use super::opcode::BTH_LEN;
use crate::types::Gid;

/// CRC-32 of eight bytes of 0xff: the state after the masked LRH.
const SEED: u32 = 0x2144_df1c;
/// CRC-32 polynomial, reflected.
const POLY: u32 = 0xedb8_8320;
const UDP_LEN: usize = 8;
const PROTO_UDP: u8 = 17;
const DONT_FRAGMENT: [u8; 2] = [0x40, 0];

/// What the ICRC covers of the outer headers. IPv4 when both addresses are mapped ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct IcrcHeader {
    /// Source address
    pub src: Gid,
    /// Destination address
    pub dst: Gid,
    /// UDP source port
    pub sport: u16,
    /// UDP destination port
    pub dport: u16,
    /// IPv4 identification; not used for IPv6
    pub ip_id: u16,
}

/// Over the outer headers (don't-fragment set, no options) and the BTH. `udp_payload_len` is from
/// the BTH to behind the ICRC. What stands behind the BTH follows.
#[inline]
pub fn begin(hdr: &IcrcHeader, udp_payload_len: u16, bth: &[u8; BTH_LEN]) -> Crc {
    let mut crc = Crc::after(SEED);
    match (hdr.src.ipv4(), hdr.dst.ipv4()) {
        (Some(src), Some(dst)) => crc.update(&prefix_v4(hdr, src, dst, udp_payload_len, bth)),
        _ => crc.update(&prefix_v6(hdr, udp_payload_len, bth)),
    }
    crc
}

/// The ICRC of a whole frame that lies in one piece, BTH to padding. `None` if it is shorter than a BTH
/// or longer than UDP carries.
#[inline]
pub fn of_frame(hdr: &IcrcHeader, frame: &[u8]) -> Option<[u8; 4]> {
    let (bth, rest) = frame.split_first_chunk::<BTH_LEN>()?;
    let len = u16::try_from(frame.len() + 4).ok()?;
    let mut crc = begin(hdr, len, bth);
    crc.update(rest);
    Some(crc.finish())
}

#[inline]
fn udp_bth(out: &mut [u8; UDP_LEN + BTH_LEN], hdr: &IcrcHeader, len: u16, bth: &[u8; BTH_LEN]) {
    out[0..2].copy_from_slice(&hdr.sport.to_be_bytes());
    out[2..4].copy_from_slice(&hdr.dport.to_be_bytes());
    out[4..6].copy_from_slice(&len.wrapping_add(UDP_LEN as u16).to_be_bytes());
    out[6..8].copy_from_slice(&[0xff, 0xff]);
    out[8..20].copy_from_slice(bth);
    out[12] = 0xff;
}

#[inline]
fn prefix_v4(hdr: &IcrcHeader, src: [u8; 4], dst: [u8; 4], len: u16, bth: &[u8; BTH_LEN]) -> [u8; 40] {
    let mut p = [0u8; 40];
    let (ip, rest) = p.split_at_mut(20);
    ip[0] = 0x45;
    ip[1] = 0xff;
    ip[2..4].copy_from_slice(&len.wrapping_add(20 + UDP_LEN as u16).to_be_bytes());
    ip[4..6].copy_from_slice(&hdr.ip_id.to_be_bytes());
    ip[6..8].copy_from_slice(&DONT_FRAGMENT);
    ip[8] = 0xff;
    ip[9] = PROTO_UDP;
    ip[10..12].copy_from_slice(&[0xff, 0xff]);
    ip[12..16].copy_from_slice(&src);
    ip[16..20].copy_from_slice(&dst);
    if let Some(rest) = rest.first_chunk_mut() {
        udp_bth(rest, hdr, len, bth);
    }
    p
}

#[inline]
fn prefix_v6(hdr: &IcrcHeader, len: u16, bth: &[u8; BTH_LEN]) -> [u8; 60] {
    let mut p = [0u8; 60];
    let (ip, rest) = p.split_at_mut(40);
    ip[0..4].copy_from_slice(&[0x6f, 0xff, 0xff, 0xff]);
    ip[4..6].copy_from_slice(&len.wrapping_add(UDP_LEN as u16).to_be_bytes());
    ip[6] = PROTO_UDP;
    ip[7] = 0xff;
    ip[8..24].copy_from_slice(&hdr.src.0);
    ip[24..40].copy_from_slice(&hdr.dst.0);
    if let Some(rest) = rest.first_chunk_mut() {
        udp_bth(rest, hdr, len, bth);
    }
    p
}

/// Bytes that the ICRC covers behind the IPv4 identification, for a frame of `frame_len` bytes from
/// the BTH to before the ICRC.
pub const fn bytes_after_ip_id(frame_len: usize) -> usize {
    14 + UDP_LEN + frame_len
}

/// Whether an ICRC error can come from an unknown IPv4 identification alone.
///
/// `error` is the computed ICRC xor the received one (both read little-endian), `bytes_after_id` what
/// [`bytes_after_ip_id`] gives. CRC is linear: the error is what the difference of the two headers
/// would give on its own. Taken back over the bytes behind the identification and over the
/// identification itself, what is left of a difference in these 16 bits is these 16 bits.
#[inline]
pub fn explained_by_ip_id(error: u32, bytes_after_id: usize) -> bool {
    error == 0 || ip_id_difference(error, bytes_after_id).is_some()
}

/// The difference (xor) of identifications that makes `error`, if one does.
#[inline]
pub fn ip_id_difference(error: u32, bytes_after_id: usize) -> Option<u16> {
    let back = take_back(error, bytes_after_id.checked_add(2)?)?;
    let low = u16::try_from(back).ok()?;
    Some(u16::from_be_bytes(low.to_le_bytes()))
}

/// Undoes `n` zero bytes: multiplies by x^-8n modulo the polynomial. `None` past 64 KiB.
fn take_back(crc: u32, n: usize) -> Option<u32> {
    let high = BACK_256.get(n / 256)?;
    let low = BACK_1.get(n % 256)?;
    Some(multiply(multiply(crc, *low), *high))
}

/// x^-8i for i in 0..256.
static BACK_1: [u32; 256] = powers(1 << 31, 1);
/// x^-2048i for i in 0..=256.
static BACK_256: [u32; 257] = powers(1 << 31, 256);

const fn powers<const N: usize>(one: u32, bytes: usize) -> [u32; N] {
    let mut table = [0; N];
    let mut v = one;
    let mut i = 0;
    while i < N {
        table[i] = v;
        let mut bit = 0;
        while bit < 8 * bytes {
            v = divide_by_x(v);
            bit += 1;
        }
        i += 1;
    }
    table
}

/// In reflected form the top bit is x^0: multiplying by x shifts right, dividing shifts left.
const fn divide_by_x(v: u32) -> u32 {
    if v & 1 << 31 != 0 { (v ^ POLY) << 1 | 1 } else { v << 1 }
}

/// Product modulo the polynomial, in reflected form.
const fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    let mut bit = 32;
    while bit > 0 {
        bit -= 1;
        product ^= b & 0u32.wrapping_sub(a >> bit & 1);
        b = b >> 1 ^ POLY & 0u32.wrapping_sub(b & 1);
    }
    product
}

#[cfg(test)]
#[path = "icrc_tests.rs"]
mod tests;
