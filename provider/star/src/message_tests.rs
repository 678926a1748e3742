use std::vec::Vec;

use proptest::prelude::*;

use super::*;

const OPS: [SendOp; 12] = [
    SendOp::Write,
    SendOp::WriteImm,
    SendOp::Send,
    SendOp::SendImm,
    SendOp::Read,
    SendOp::CmpSwap,
    SendOp::FetchAdd,
    SendOp::LocalInv,
    SendOp::BindMw,
    SendOp::SendInv,
    SendOp::Flush,
    SendOp::AtomicWrite,
];

fn any_wqe() -> impl Strategy<Value = SendWqe> {
    let numbers = (any::<u64>(), any::<u64>(), any::<u64>(), any::<[u32; 4]>());
    (prop::sample::select(&OPS[..]), 0u8..16, numbers).prop_map(
        |(op, flags, (remote_addr, compare_add, swap, w))| {
            let flags = SendFlags::from_bits_truncate(flags);
            let [rkey, imm, remote_qpn, qkey] = w;
            SendWqe {
                op,
                flags,
                remote_addr,
                compare_add,
                swap,
                rkey,
                imm,
                remote_qpn,
                qkey,
                ..SendWqe::default()
            }
        },
    )
}

fn any_sges() -> impl Strategy<Value = Vec<Sge>> {
    let sge =
        (any::<u64>(), 0u32..1 << 26, any::<u32>()).prop_map(|(addr, len, lkey)| Sge { addr, len, lkey });
    prop::collection::vec(sge, 0..=MAX_SGE)
}

/// What a WQE says, but for the numbers that encoding sets.
fn content(wqe: &SendWqe) -> impl PartialEq + std::fmt::Debug {
    let numbers = [wqe.rkey, wqe.imm, wqe.remote_qpn, wqe.qkey];
    (wqe.op, wqe.flags, wqe.remote_addr, wqe.compare_add, wqe.swap, numbers)
}

proptest! {
    #[test]
    fn sends_survive(
        wqe in any_wqe(), sges in any_sges(), bytes in prop::collection::vec(any::<u8>(), 0..=MAX_INLINE),
    ) {
        let mut room = [0; MAX_WQE];
        let len = encode_send(&wqe, &sges, &bytes, &mut room).expect("it fits");
        let got = Wqe::decode(&room[..len]).expect("a WQE");
        prop_assert!(!got.recv);
        prop_assert_eq!(content(&got.wqe), content(&wqe));
        match got.body {
            Body::Inline(inline) => {
                prop_assert!(wqe.flags.contains(SendFlags::INLINE));
                prop_assert_eq!(inline, &bytes[..]);
                prop_assert_eq!(got.wqe.length as usize, bytes.len());
            }
            Body::Sges(list) => {
                prop_assert!(!wqe.flags.contains(SendFlags::INLINE));
                prop_assert_eq!(list.iter().collect::<Vec<_>>(), sges.clone());
                prop_assert_eq!(got.wqe.length, sges.iter().map(|s| s.len).sum::<u32>());
                prop_assert_eq!(usize::from(got.wqe.num_sge), sges.len());
                prop_assert!(Wqe::decode(&room[..len - 1]).is_none());
            }
        }
        prop_assert!(encode_send(&wqe, &sges, &bytes, &mut room[..len - 1]).is_none());
    }

    #[test]
    fn receives_survive(sges in any_sges()) {
        let mut room = [0; MAX_WQE];
        let len = encode_recv(&sges, &mut room).expect("it fits");
        let got = Wqe::decode(&room[..len]).expect("a WQE");
        prop_assert!(got.recv);
        let Body::Sges(list) = got.body else { panic!("receives have SGEs") };
        prop_assert_eq!(list.iter().collect::<Vec<_>>(), sges);
    }

    #[test]
    fn completions_survive(
        slot in any::<u64>(),
        codes in (0u8..24, 0u8..7, 0u8..128, any::<bool>()),
        numbers in any::<[u32; 3]>(),
    ) {
        let [byte_len, imm, vendor_err] = numbers;
        let cqe = CqeMsg {
            slot,
            status: WcStatus::from_code(codes.0).expect("a status"),
            opcode: WcOpcode::from_code(codes.1).expect("an op-code"),
            flags: WcFlags::from_bits_truncate(codes.2),
            solicited: codes.3,
            byte_len,
            imm,
            vendor_err,
        };
        prop_assert_eq!(CqeMsg::decode(&cqe.encode()), Some(cqe));
    }

    #[test]
    fn atomics_survive(op in 0usize..3, seq in any::<u32>(), slots in 0u8..32, numbers in any::<[u64; 3]>()) {
        let op = [SendOp::CmpSwap, SendOp::FetchAdd, SendOp::AtomicWrite][op];
        let [slot, compare_add, swap] = numbers;
        let atomic = Atomic { op, seq, slots, slot, compare_add, swap };
        prop_assert_eq!(Atomic::decode(&atomic.encode()), Some(atomic));
    }

    #[test]
    fn any_bytes_are_looked_at(bytes in prop::collection::vec(any::<u8>(), 0..120), first in 0u8..16) {
        let mut bytes = bytes;
        for code in [first, RECV] {
            if let [byte, _, num_sge, zero, ..] = &mut bytes[..] {
                (*byte, *zero) = (code, 0);
                *num_sge &= 3;
            }
            if let Some(Wqe { body: Body::Sges(sges), .. }) = Wqe::decode(&bytes) {
                prop_assert!(sges.len() <= MAX_SGE);
            }
            _ = (CqeMsg::decode(&bytes), Atomic::decode(&bytes));
        }
    }
}

#[test]
fn inline_bytes_fit_the_path_and_what_the_other_end_keeps() {
    for (mtu, depth, most) in
        [(256, 16, 512), (1024, 16, 976), (4096, 64, 4048), (4096, 128, 2048), (4096, 1 << 20, 512)]
    {
        assert_eq!(inline_room(mtu, depth), most, "{mtu} {depth}");
    }
    assert_eq!(inline_room(u32::MAX, 0), MAX_INLINE);
}

#[test]
fn what_is_too_long_is_refused() {
    let mut room = [0; MAX_WQE];
    let sge = Sge { addr: 0, len: u32::MAX, lkey: 0 };
    assert_eq!(encode_recv(&[sge, sge], &mut room), None);
    assert_eq!(encode_recv(&[Sge::default(); MAX_SGE + 1], &mut room), None);
    let inline = SendWqe { flags: SendFlags::INLINE, ..SendWqe::default() };
    assert_eq!(encode_send(&inline, &[], &[0; MAX_INLINE + 1], &mut room), None);
    let len = encode_recv(&[Sge::default(); 2], &mut room).expect("it fits");
    room[4] = 1;
    assert!(Wqe::decode(&room[..len]).is_none(), "the length is not that of the SGEs");
}
