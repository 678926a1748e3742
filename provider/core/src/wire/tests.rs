use std::vec::Vec;

use proptest::prelude::*;

use super::opcode::BTH_LEN;
use super::*;
use crate::types::{FlushLevel, Placement, Psn};

const KEPT: [u64; 6] = [5, 0, 0, 0, 0, 1 << 63];

/// Every header that `info` names, with recognisable numbers.
fn build(info: &OpInfo, qpn: u32, psn: u32, ack: bool, solicited: bool, pad: u8) -> HeaderBuf {
    let mut h = HeaderBuf::bth(info.code, qpn, Psn::new(psn), ack, solicited, pad, 0xffff);
    if info.has(OpFlags::XRCETH) {
        h = h.xrceth(0xff07_1234);
    }
    if info.has(OpFlags::DETH) {
        h = h.deth(0x1111_1111, 0x12_3456);
    }
    if info.has(OpFlags::FETH) {
        h = h.feth(0x12);
    }
    if info.has(OpFlags::RETH) {
        h = h.reth(0x0102_0304_0506_0708, 0xa0b0_c0d0, 77);
    }
    if info.has(OpFlags::ATOMIC) {
        h = h.atomic_eth(0x0102_0304_0506_0708, 0xa0b0_c0d0, 1 << 40, 2 << 40);
    }
    if info.has(OpFlags::AETH) {
        h = h.aeth(Syndrome::Nak(NakCode::RemoteAccess), 0x65_4321);
    }
    if info.has(OpFlags::ATOMIC_ACK) {
        h = h.atomic_ack(0x1122_3344_5566_7788);
    }
    if info.has(OpFlags::IMM) {
        h = h.imm(0xdead_beefu32.to_be());
    }
    if info.has(OpFlags::IETH) {
        h = h.ieth(0xfeed_f00d);
    }
    if info.has(OpFlags::RESERVED) {
        h = h.reserved();
    }
    if info.has(OpFlags::SACKETH) {
        h = h.sack(&SackEth::new(KEPT));
    }
    h
}

fn same(p: &Packet<'_>, info: &OpInfo) {
    assert_eq!(
        p.deth().map(|d| (d.qkey(), d.src_qp())),
        info.has(OpFlags::DETH).then_some((0x1111_1111, 0x12_3456))
    );
    assert_eq!(p.xrc_srq(), info.has(OpFlags::XRCETH).then_some(0x07_1234));
    let reth = p.reth().map(|r| (r.va(), r.rkey(), r.dma_len()));
    assert_eq!(reth, info.has(OpFlags::RETH).then_some((0x0102_0304_0506_0708, 0xa0b0_c0d0, 77)));
    let feth = p.feth().map(|f| (f.placement(), f.level()));
    let persistent = (Some(Placement::PERSISTENT), Some(FlushLevel::Mr));
    assert_eq!(feth, info.has(OpFlags::FETH).then_some(persistent));
    let atomic = p.atomic_eth().map(|a| (a.va(), a.rkey(), a.swap_add(), a.compare()));
    assert_eq!(
        atomic,
        info.has(OpFlags::ATOMIC).then_some((0x0102_0304_0506_0708, 0xa0b0_c0d0, 1 << 40, 2 << 40))
    );
    let aeth = p.aeth().map(|a| (a.syndrome(), a.msn()));
    let nak = Some(Syndrome::Nak(NakCode::RemoteAccess));
    assert_eq!(aeth, info.has(OpFlags::AETH).then_some((nak, 0x65_4321)));
    assert_eq!(p.atomic_ack(), info.has(OpFlags::ATOMIC_ACK).then_some(0x1122_3344_5566_7788));
    assert_eq!(p.imm(), info.has(OpFlags::IMM).then_some(0xdead_beefu32.to_be()));
    assert_eq!(p.ieth(), info.has(OpFlags::IETH).then_some(0xfeed_f00d));
    assert_eq!(p.sack().copied(), info.has(OpFlags::SACKETH).then_some(SackEth::new(KEPT)));
}

/// Bytes of a RETH packet, written out by hand after IBTA vol. 1, 9.2 and 9.3.3.
#[test]
fn bytes_of_a_write_only() {
    let h = HeaderBuf::bth(code::RC_WRITE_ONLY_IMM, 0x01_0203, Psn::new(0x0a_0b0c), true, true, 1, 0x8001)
        .reth(0x1020_3040_5060_7080, 0x0000_1122, 3)
        .imm(u32::from_ne_bytes([1, 2, 3, 4]));
    let expect = [
        0x0b, 0xd0, 0x80, 0x01, 0, 1, 2, 3, 0x80, 0x0a, 0x0b, 0x0c, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70,
        0x80, 0, 0, 0x11, 0x22, 0, 0, 0, 3, 1, 2, 3, 4,
    ];
    assert_eq!(h.as_bytes(), expect);
}

/// Bytes of a SACK, after docs/wire.md: PSN 9 is the last in order, 10 is missing, 11 and 13 are kept, and
/// 394.
#[test]
fn bytes_of_a_sack() {
    let h = HeaderBuf::bth(code::SACK, 0x01_0203, Psn::new(9), false, false, 0, 0xffff)
        .repeats(1)
        .aeth(Syndrome::Ack { credits: 31 }, 7)
        .sack(&SackEth::new(KEPT));
    let mut expect = [0; 64];
    expect[..16].copy_from_slice(&[0xc2, 0x40, 0xff, 0xff, 0, 1, 2, 3, 1, 0, 0, 9, 0x1f, 0, 0, 7]);
    (expect[23], expect[56]) = (5, 0x80);
    assert_eq!(h.as_bytes(), expect);
    let packet = Packet::parse(&expect).expect("a good packet");
    let kept: Vec<u32> =
        (0..SackEth::SPAN).filter(|n| packet.sack().is_some_and(|s| s.has(*n))).map(|n| 11 + n).collect();
    assert_eq!((packet.bth().repeats(), packet.bth().psn().get(), &kept[..]), (1, 9, &[11, 13, 394][..]));
}

/// Bytes of a FLUSH, written out by hand after annex A19: its header stands before the RETH.
#[test]
fn bytes_of_a_flush() {
    let h = HeaderBuf::bth(code::RC_FLUSH, 0x01_0203, Psn::new(0x0a_0b0c), true, false, 0, 0xffff)
        .feth(1 << 4 | 2)
        .reth(0x1020_3040_5060_7080, 0x0000_1122, 3);
    let expect = [
        0x1c, 0x40, 0xff, 0xff, 0, 1, 2, 3, 0x80, 0x0a, 0x0b, 0x0c, 0, 0, 0, 0x12, 0x10, 0x20, 0x30, 0x40,
        0x50, 0x60, 0x70, 0x80, 0, 0, 0x11, 0x22, 0, 0, 0, 3,
    ];
    assert_eq!(h.as_bytes(), expect);
}

#[test]
fn bad_frames_have_reasons() {
    let parse = |b: &[u8]| Packet::parse(b).map(|_| ()).unwrap_err();
    let good = HeaderBuf::bth(code::RC_SEND_ONLY, 1, Psn::new(2), false, false, 3, 0xffff);
    let with = |i: usize, v: u8| {
        let mut f: Vec<u8> = good.as_bytes().to_vec();
        f.extend_from_slice(&[0; 4]);
        f[i] = v;
        f
    };
    assert!(Packet::parse(&with(0, code::RC_SEND_ONLY)).is_ok_and(|p| p.payload().len() == 1));
    assert_eq!(parse(&[]), WireError::Length);
    assert_eq!(parse(&good.as_bytes()[..11]), WireError::Length);
    assert_eq!(parse(&with(0, 0x15)), WireError::Opcode);
    assert_eq!(parse(&with(0, 0xff)), WireError::Opcode);
    assert_eq!(parse(&with(1, 0x71)), WireError::Version);
    assert_eq!(parse(&with(0, code::RC_READ_REQUEST)), WireError::Length);
    assert_eq!(parse(good.as_bytes()), WireError::Payload);
    let mut odd = with(0, code::RC_SEND_ONLY);
    odd.push(0);
    assert_eq!(parse(&odd), WireError::Length);
    let mut ack = HeaderBuf::bth(code::RC_ACK, 1, Psn::new(2), false, false, 0, 0xffff)
        .aeth(Syndrome::Ack { credits: 31 }, 1)
        .to_vec();
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
        let header = build(info, qpn, psn, ack, se, pad);
        prop_assert_eq!(header.len(), usize::from(info.header_len));
        let mut frame = header.to_vec();
        frame.extend_from_slice(&body);
        frame.resize(frame.len() + usize::from(pad), 0);
        let p = Packet::parse(&frame).unwrap();
        prop_assert_eq!(p.op(), info);
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
            let used = usize::from(p.op().header_len) + p.payload().len() + usize::from(p.bth().pad());
            prop_assert_eq!(used, bytes.len());
            prop_assert_eq!(p.reth().is_some(), p.op().has(OpFlags::RETH));
            prop_assert_eq!(p.imm().is_some(), p.op().has(OpFlags::IMM));
            prop_assert_eq!(p.atomic_ack().is_some(), p.op().has(OpFlags::ATOMIC_ACK));
            prop_assert!(bytes.len() >= BTH_LEN);
        }
    }
}
