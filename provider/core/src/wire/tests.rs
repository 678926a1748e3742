use std::vec::Vec;

use proptest::prelude::*;

use super::opcode::{BTH_LEN, RC_ACK, RC_READ_REQUEST, RC_SEND_ONLY, RC_WRITE_ONLY_IMM};
use super::*;
use crate::types::Psn;

/// Every header that `info` names, with recognisable numbers.
fn build(info: &OpInfo, qpn: u32, psn: u32, flags: (bool, bool), pad: u8) -> HeaderBuf {
    let mut h = HeaderBuf::new();
    h.bth(info.code, qpn, Psn::new(psn), flags.0, flags.1, pad);
    if info.has(OpFlags::DETH) {
        h.deth(0x1111_1111, 0x12_3456);
    }
    if info.has(OpFlags::RETH) {
        h.reth(0x0102_0304_0506_0708, 0xa0b0_c0d0, 77);
    }
    if info.has(OpFlags::ATOMIC) {
        h.atomic_eth(0x0102_0304_0506_0708, 0xa0b0_c0d0, 1 << 40, 2 << 40);
    }
    if info.has(OpFlags::AETH) {
        h.aeth(Syndrome::Nak(headers::NAK_ACCESS), 0x65_4321);
    }
    if info.has(OpFlags::ATOMIC_ACK) {
        h.atomic_ack(0x1122_3344_5566_7788);
    }
    if info.has(OpFlags::IMM) {
        h.imm(0xdead_beefu32.to_be());
    }
    if info.has(OpFlags::IETH) {
        h.ieth(0xfeed_f00d);
    }
    if info.has(OpFlags::RESERVED) {
        h.reserved();
    }
    h
}

/// A header reads as it was built, or as zeros.
fn same(p: &Packet<'_>, info: &OpInfo) {
    let or0 = |flag, v: u64| if info.has(flag) { v } else { 0 };
    let (d, r, a) = (p.deth(), p.reth(), p.atomic_eth());
    assert_eq!(u64::from(d.qkey()), or0(OpFlags::DETH, 0x1111_1111));
    assert_eq!(u64::from(d.src_qp()), or0(OpFlags::DETH, 0x12_3456));
    assert_eq!(r.va(), or0(OpFlags::RETH, 0x0102_0304_0506_0708));
    assert_eq!(u64::from(r.rkey()), or0(OpFlags::RETH, 0xa0b0_c0d0));
    assert_eq!(u64::from(r.dma_len()), or0(OpFlags::RETH, 77));
    assert_eq!(a.va(), or0(OpFlags::ATOMIC, 0x0102_0304_0506_0708));
    assert_eq!(u64::from(a.rkey()), or0(OpFlags::ATOMIC, 0xa0b0_c0d0));
    assert_eq!((a.swap_add(), a.compare()), (or0(OpFlags::ATOMIC, 1 << 40), or0(OpFlags::ATOMIC, 2 << 40)));
    assert_eq!(u64::from(p.aeth().msn()), or0(OpFlags::AETH, 0x65_4321));
    assert_eq!(matches!(p.syndrome(), Syndrome::Nak(headers::NAK_ACCESS)), info.has(OpFlags::AETH));
    assert_eq!(p.atomic_original(), or0(OpFlags::ATOMIC_ACK, 0x1122_3344_5566_7788));
    assert_eq!(u64::from(p.imm()), or0(OpFlags::IMM, u64::from(0xdead_beefu32.to_be())));
    assert_eq!(u64::from(p.ieth()), or0(OpFlags::IETH, 0xfeed_f00d));
}

/// Bytes of a RETH packet, written out by hand after IBTA vol. 1, 9.2 and 9.3.3.
#[test]
fn bytes_of_a_write_only() {
    let mut h = HeaderBuf::new();
    h.bth(RC_WRITE_ONLY_IMM, 0x01_0203, Psn::new(0x0a_0b0c), true, true, 1);
    h.reth(0x1020_3040_5060_7080, 0x0000_1122, 3);
    h.imm(u32::from_ne_bytes([1, 2, 3, 4]));
    let expect = [
        0x0b, 0xd0, 0xff, 0xff, 0, 1, 2, 3, 0x80, 0x0a, 0x0b, 0x0c, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70,
        0x80, 0, 0, 0x11, 0x22, 0, 0, 0, 3, 1, 2, 3, 4,
    ];
    assert_eq!(h.as_slice(), expect);
}

#[test]
fn bad_frames_have_reasons() {
    let parse = |b: &[u8]| Packet::parse(b).map(|_| ()).unwrap_err();
    let mut good = HeaderBuf::new();
    good.bth(RC_SEND_ONLY, 1, Psn::new(2), false, false, 3);
    let with = |i: usize, v: u8| {
        let mut f: Vec<u8> = good.as_slice().to_vec();
        f.extend_from_slice(&[0; 4]);
        f[i] = v;
        f
    };
    assert!(Packet::parse(&with(0, RC_SEND_ONLY)).is_ok_and(|p| p.payload().len() == 1));
    assert_eq!(parse(&[]), WireError::Length);
    assert_eq!(parse(&good.as_slice()[..11]), WireError::Length);
    assert_eq!(parse(&with(0, 0x15)), WireError::Opcode);
    assert_eq!(parse(&with(0, 0xff)), WireError::Opcode);
    assert_eq!(parse(&with(1, 0x71)), WireError::Version);
    assert_eq!(parse(&with(0, RC_READ_REQUEST)), WireError::Length);
    assert_eq!(parse(good.as_slice()), WireError::Payload);
    let mut odd = with(0, RC_SEND_ONLY);
    odd.push(0);
    assert_eq!(parse(&odd), WireError::Length);
    let mut ack = HeaderBuf::new();
    ack.bth(RC_ACK, 1, Psn::new(2), false, false, 0);
    ack.aeth(Syndrome::Ack, 1);
    let mut ack = ack.to_vec();
    assert!(Packet::parse(&ack).is_ok());
    ack[12] = 0x5f;
    assert_eq!(parse(&ack), WireError::Syndrome);
    ack.extend_from_slice(&[0; 4]);
    assert_eq!(parse(&ack), WireError::Payload);
}

proptest! {
    #[test]
    fn built_packets_parse_to_the_same(
        pick: prop::sample::Index, qpn in 0u32..1 << 24, psn in 0u32..1 << 24, ack: bool, se: bool,
        body in prop::collection::vec(any::<u8>(), 0..600),
    ) {
        let known: Vec<&OpInfo> = (0..=255u8).filter_map(op_info).collect();
        let info = known[pick.index(known.len())];
        let body = if info.has(OpFlags::PAYLOAD) { body } else { Vec::new() };
        let pad = (body.len().wrapping_neg() & 3) as u8;
        let header = build(info, qpn, psn, (ack, se), pad);
        prop_assert_eq!(header.len(), usize::from(info.header_len));
        let mut frame = header.to_vec();
        frame.extend_from_slice(&body);
        frame.resize(frame.len() + usize::from(pad), 0);
        let p = Packet::parse(&frame).unwrap();
        prop_assert_eq!(p.info(), info);
        prop_assert_eq!((p.bth().dest_qpn(), p.bth().psn().get()), (qpn, psn));
        prop_assert_eq!((p.bth().ack_req(), p.bth().solicited()), (ack, se));
        prop_assert_eq!((p.bth().pkey(), p.bth().mig_req(), p.bth().fecn()), (0xffff, true, false));
        prop_assert_eq!(p.payload(), &body[..]);
        same(&p, info);
    }

    #[test]
    fn any_bytes_parse_or_fail(mut bytes in prop::collection::vec(any::<u8>(), 0..100), tame: bool) {
        if let (true, Some(b)) = (tame, bytes.get_mut(1)) {
            *b &= 0xf0;
        }
        if let Ok(p) = Packet::parse(&bytes) {
            let used = usize::from(p.info().header_len) + p.payload().len() + usize::from(p.bth().pad());
            prop_assert_eq!(used, bytes.len());
            prop_assert!(p.info().has(OpFlags::RETH) || p.reth().va() == 0);
            prop_assert!(p.info().has(OpFlags::IMM) || p.imm() == 0);
            prop_assert!(p.info().has(OpFlags::ATOMIC_ACK) || p.atomic_original() == 0);
            prop_assert!(bytes.len() >= BTH_LEN);
        }
    }
}
