//! A frame of several packets, which leave for one half of a card together: under one checksum and one CRC.
//!
//! ```text
//! word 0   12 4 | 0 28
//! words 1-3                         0 96
//! word 4   LEN 16                      | CHECKSUM 16
//!          {length 16, a packet of so many bytes: its header with CHECKSUM 0, what follows, no CRC}
//!          zeros, which fill it up
//!          CRC-32
//! ```
//!
//! LEN counts the bytes behind the header. The packets are what they would be by themselves, and are handled
//! in their order. Bytes in, numbers out.

use super::{CRC_LEN, HEADER_LEN, LEN_AT, PortPair, StarError, checked};

/// In the place of a PTYPE.
const SEVERAL: u8 = 12;
/// Bytes before each packet.
pub const LENGTH_LEN: usize = 2;
/// Bytes of such a frame at most, without its CRC: with all headers it fits an Ethernet frame.
pub const SEVERAL_ROOM: usize = 1424;

/// The header of such a frame, with checksum 0; `len` bytes follow.
pub fn several_head(len: u16) -> [u8; HEADER_LEN] {
    let mut bytes = [0; HEADER_LEN];
    bytes[0] = SEVERAL << 4;
    bytes[LEN_AT..LEN_AT + 2].copy_from_slice(&len.to_be_bytes());
    bytes
}

/// The bytes of the packets of a frame that has several. `None`: it is one packet. It is not checked.
#[inline]
pub fn several_in(frame: &[u8]) -> Option<&[u8]> {
    if frame.first()? >> 4 != SEVERAL {
        return None;
    }
    frame.get(HEADER_LEN..frame.len().checked_sub(CRC_LEN)?)
}

/// As [`several_in`], of a frame that came this way, and is checked.
///
/// # Errors
/// See [`StarError`].
pub fn open_several<'a>(way: &PortPair, frame: &'a [u8]) -> Result<&'a [u8], StarError> {
    let body = checked(way, frame)?;
    if body.len() > SEVERAL_ROOM {
        return Err(StarError::Length);
    }
    let rest = body.get(HEADER_LEN..).unwrap_or_default();
    let len = [body[LEN_AT], body[LEN_AT + 1]].map(usize::from);
    if len[0] << 8 | len[1] == rest.len() { Ok(rest) } else { Err(StarError::Length) }
}

/// The first packet of these bytes, as [`StarPacket::parse`](super::StarPacket::parse) takes it, and what is
/// behind it. `None`: there is no more.
#[inline]
pub fn next_of_several(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = bytes.split_first_chunk()?;
    let len = usize::from(u16::from_be_bytes(*len));
    if len == 0 { None } else { rest.split_at_checked(len) }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use starverbs_core::wire::IcrcHeader;

    use super::super::Crc;
    use super::*;

    fn frame(way: &PortPair, packets: &[&[u8]], pad: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        for packet in packets {
            bytes.extend((packet.len() as u16).to_be_bytes());
            bytes.extend(*packet);
        }
        bytes.resize(bytes.len() + pad, 0);
        let mut frame = [&several_head(bytes.len() as u16)[..], &bytes].concat();
        way.fill_checksum(&mut frame);
        let crc = Crc::of(&frame);
        frame.extend(crc);
        frame
    }

    #[test]
    fn packets_come_out_as_they_went_in() {
        let way = PortPair::new(&IcrcHeader { sport: 7, ..IcrcHeader::default() });
        for pad in [0, 1, 2, 50] {
            let frame = frame(&way, &[b"one", b"three", b"x"], pad);
            let mut rest = open_several(&way, &frame).unwrap();
            assert_eq!(several_in(&frame), Some(rest));
            for packet in [&b"one"[..], b"three", b"x"] {
                let (first, behind) = next_of_several(rest).unwrap();
                assert_eq!(first, packet);
                rest = behind;
            }
            assert!(next_of_several(rest).is_none() && rest.len() == pad);
        }
    }

    #[test]
    fn what_is_cut_changed_or_of_another_way_is_none() {
        let way = PortPair::new(&IcrcHeader { sport: 7, ..IcrcHeader::default() });
        let elsewhere = PortPair::new(&IcrcHeader { sport: 8, ..IcrcHeader::default() });
        let good = frame(&way, &[b"one", b"three"], 0);
        assert_eq!(open_several(&elsewhere, &good), Err(StarError::Checksum));
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            assert_eq!(open_several(&way, &bad), Err(StarError::Checksum), "{at}");
            assert!(open_several(&way, &good[..at]).is_err());
            _ = several_in(&good[..at]);
        }
        let mut short = good[..HEADER_LEN].to_vec();
        short[LEN_AT + 1] += 1;
        way.fill_checksum(&mut short);
        let crc = Crc::of(&short);
        short.extend(crc);
        assert_eq!(open_several(&way, &short), Err(StarError::Length));
        assert!(next_of_several(b"\0\x04one").is_none(), "longer than what is there");
        assert!(several_in(b"\x10").is_none() && several_in(b"").is_none());
    }
}
