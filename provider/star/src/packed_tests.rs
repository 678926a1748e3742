use std::vec::Vec;

use proptest::prelude::*;

use super::*;

fn any_send() -> impl Strategy<Value = (SendWqe, Vec<Sge>, Vec<u8>)> {
    let ops = prop::sample::select(
        [
            SendOp::Send,
            SendOp::SendImm,
            SendOp::SendInv,
            SendOp::Write,
            SendOp::WriteImm,
            SendOp::Read,
            SendOp::CmpSwap,
            SendOp::FetchAdd,
            SendOp::LocalInv,
            SendOp::BindMw,
        ]
        .to_vec(),
    );
    let numbers = (any::<u64>(), any::<u64>(), any::<u64>(), any::<u32>(), any::<u32>());
    let sges = prop::collection::vec((any::<u64>(), 0u32..1 << 20, any::<u32>()), 0..4);
    let bytes = prop::collection::vec(any::<u8>(), 0..80);
    (ops, numbers, sges, bytes, any::<bool>()).prop_map(|(op, numbers, sges, bytes, inline)| {
        let (remote_addr, compare_add, swap, rkey, imm) = numbers;
        let short = is_short(op);
        let sges: Vec<Sge> = if inline {
            Vec::new()
        } else {
            sges.into_iter().map(|(addr, len, lkey)| Sge { addr, len, lkey }).collect()
        };
        let bytes = if inline { bytes } else { Vec::new() };
        let length = bytes.len() as u32 + sges.iter().map(|sge| sge.len).sum::<u32>();
        let wqe = SendWqe {
            op,
            remote_addr: if short { 0 } else { remote_addr },
            compare_add: if short { 0 } else { compare_add },
            swap: if short { 0 } else { swap },
            rkey: if short { 0 } else { rkey },
            imm: if op == SendOp::Send { 0 } else { imm },
            flags: if inline { SendFlags::INLINE | SendFlags::SIGNALED } else { SendFlags::FENCE },
            length,
            num_sge: sges.len() as u16,
            ..SendWqe::default()
        };
        (wqe, sges, bytes)
    })
}

fn any_recv() -> impl Strategy<Value = Vec<Sge>> {
    let sge = (any::<u64>(), 0u32..9, any::<u32>()).prop_map(|(addr, len, lkey)| Sge { addr, len, lkey });
    prop::collection::vec(sge, 0..3)
}

proptest! {
    #[test]
    fn records_survive_and_stand_in_order(
        sends in prop::collection::vec(any_send(), 1..5),
        recvs in prop::collection::vec(any_recv(), 0..4),
    ) {
        let mut batch = PackedWqes::new(ROOM);
        for (n, sges) in recvs.iter().enumerate() {
            prop_assert!(recv_len(sges.len()) <= batch.left());
            batch.push_recv(Psn::new(QPN_MASK - n as u32), sges).unwrap();
        }
        for (n, (wqe, sges, bytes)) in sends.iter().enumerate() {
            let seq = Psn::new(n as u32);
            let pushed = if wqe.flags.contains(SendFlags::INLINE) {
                batch.push_inline(seq, wqe, wqe.length, |place| {
                    place.copy_from_slice(bytes);
                    true
                })
            } else {
                batch.push_send(seq, wqe, sges)
            };
            prop_assert_eq!(pushed, Some(()));
        }
        let (queue, seq) = if recvs.is_empty() { (Queue::Send, 0) } else { (Queue::Recv, QPN_MASK) };
        let first = (queue, Psn::new(seq));
        prop_assert_eq!(batch.first(), first);
        let read: Vec<PackedWqe<'_>> = Records::new(batch.bytes()).map(|record| record.unwrap()).collect();
        prop_assert_eq!(read.len(), sends.len() + recvs.len());
        for (n, (record, sges)) in read.iter().zip(&recvs).enumerate() {
            let Body::Sges(found) = record.wqe.body else { panic!("a receive has no bytes") };
            prop_assert!(record.wqe.recv && record.seq == Psn::new(QPN_MASK - n as u32));
            prop_assert_eq!(&found.iter().collect::<Vec<_>>(), sges);
        }
        for (n, (record, (wqe, sges, bytes))) in read[recvs.len()..].iter().zip(&sends).enumerate() {
            prop_assert_eq!((record.wqe.recv, record.seq), (false, Psn::new(n as u32)));
            prop_assert_eq!(record.wqe.wqe, *wqe);
            match record.wqe.body {
                Body::Sges(found) => prop_assert_eq!(&found.iter().collect::<Vec<_>>(), sges),
                Body::Inline(found) => prop_assert_eq!(found, &bytes[..]),
            }
        }
        for cut in 1..batch.bytes().len().min(40) {
            let short = &batch.bytes()[..batch.bytes().len() - cut];
            let whole = Records::new(short).filter(Option::is_some).count();
            prop_assert!(whole < read.len(), "cut by {}", cut);
        }
    }

    #[test]
    fn any_bytes_are_looked_at(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let read = Records::new(&bytes).take(100).count();
        prop_assert!(read <= bytes.len() / 8 + 1);
    }
}

#[test]
fn what_does_not_fit_changes_nothing() {
    let mut batch = PackedWqes::new(0);
    assert_eq!(batch.left(), MAX_RECORD, "any record fits");
    let wqe = SendWqe { flags: SendFlags::INLINE, ..SendWqe::default() };
    assert_eq!(batch.push_inline(Psn::new(0), &wqe, SMALL_INLINE as u32 + 1, |_| true), None);
    assert_eq!(batch.push_inline(Psn::new(0), &wqe, 8, |_| false), None);
    assert_eq!(batch.push_recv(Psn::new(0), &[Sge::default(); MAX_SGE + 1]), None);
    let huge = [Sge { len: u32::MAX, ..Sge::default() }; 2];
    assert_eq!(
        (batch.push_recv(Psn::new(0), &huge), batch.push_send(Psn::new(0), &wqe, &huge)),
        (None, None)
    );
    assert!(batch.is_empty());
    batch.push_inline(Psn::new(0), &wqe, SMALL_INLINE as u32, |_| true).unwrap();
    assert_eq!(batch.push_inline(Psn::new(1), &wqe, SMALL_INLINE as u32, |_| true), None);
    assert_eq!(Records::new(batch.bytes()).count(), 1);
    batch.clear();
    assert!(batch.push_recv(Psn::new(7), &[Sge::default(); MAX_SGE]).is_some());
    assert_eq!(batch.bytes().len(), recv_len(MAX_SGE));
}

/// What a record of a receive of one SGE is taken for at once is what it is, and nothing else is taken so.
#[test]
fn a_short_receive_is_the_record_that_it_is() {
    let mut packed = PackedWqes::new(ROOM);
    packed.push_recv(Psn::new(QPN_MASK), &[Sge { addr: 7, len: 5, lkey: 3 }]).expect("room");
    packed.push_recv(Psn::new(0), &[Sge { addr: 8, len: 1, lkey: 4 }; 2]).expect("room");
    let bytes = packed.bytes().to_vec();
    let general = |bytes: &[u8]| match Records::new(bytes).next() {
        Some(Some(PackedWqe { seq, wqe: Wqe { recv: true, body: Body::Sges(sges), .. } })) => {
            let mut all = sges.iter();
            all.next().filter(|_| all.next().is_none()).map(|sge| (seq, sge))
        }
        _ => None,
    };
    let short = |bytes: &[u8]| short_recv(bytes).map(|(seq, sge, _)| (seq, sge));
    assert_eq!(short(&bytes), Some((Psn::new(QPN_MASK), Sge { addr: 7, len: 5, lkey: 3 })));
    assert_eq!(short_recv(&bytes).map(|(.., rest)| rest), bytes.get(recv_len(1)..));
    assert_eq!(short(&bytes[recv_len(1)..]), None, "it has two");
    for len in 0..recv_len(1) {
        assert_eq!(short(&bytes[..len]), None, "{len}");
    }
    for (at, bit) in (0..recv_len(1)).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
        let mut bytes = bytes.clone();
        bytes[at] ^= 1 << bit;
        assert!(short(&bytes).is_none_or(|found| general(&bytes) == Some(found)), "{at} {bit}");
    }
}

/// Nobody waits for data that no card would send behind its WQE.
#[test]
fn the_data_of_a_short_send_alone_follows_it() {
    let plain = SendWqe { num_sge: 1, length: 600, flags: SendFlags::EAGER, ..SendWqe::default() };
    let send = SendWqe { op: SendOp::Send, ..plain };
    let sge = |len| Sge { addr: 1, len, lkey: 2 };
    let comes = |wqe: &SendWqe, sges: &[Sge]| {
        let mut batch = PackedWqes::new(ROOM);
        batch.push_send(Psn::new(1), wqe, sges).unwrap();
        let record = Records::new(batch.bytes()).next().unwrap();
        record.map(|record| record.wqe.wqe.flags)
    };
    assert_eq!(comes(&send, &[sge(600)]), Some(SendFlags::EAGER));
    assert_eq!(comes(&SendWqe { op: SendOp::SendInv, ..send }, &[sge(MOST_EAGER)]), Some(SendFlags::EAGER));
    for op in [SendOp::Write, SendOp::WriteImm, SendOp::Read, SendOp::FetchAdd, SendOp::Rpc, SendOp::RpcWrite]
    {
        assert_eq!(comes(&SendWqe { op, ..plain }, &[sge(8)]), None, "{op:?}");
    }
    for sges in [&[][..], &[sge(0)], &[sge(MOST_EAGER + 1)], &[sge(1), sge(1)]] {
        assert_eq!(comes(&send, sges), None, "{sges:?}");
    }
    let mut batch = PackedWqes::new(ROOM);
    batch.push_recv(Psn::new(1), &[sge(600)]).unwrap();
    for (kind, known) in [(RECV, false), (SendOp::Send as u8, true)] {
        for byte in 1..=2 {
            let mut bytes = batch.bytes().to_vec();
            (bytes[4], bytes[7]) = (kind, byte);
            bytes[0] = if known { 0 } else { bytes[0] };
            assert_eq!(Records::new(&bytes).next().unwrap().is_some(), known && byte == 1, "{kind} {byte}");
        }
    }
}
