use std::vec::Vec;

use proptest::prelude::*;

use super::*;

fn handle() -> impl Strategy<Value = Handle> {
    any::<(u32, u32)>().prop_map(|(index, generation)| Handle { index, generation })
}

/// A header that a card may send, and its number of encrypted bytes.
fn head() -> impl Strategy<Value = (OneRmaHeader, usize)> {
    let op = prop_oneof![Just(OneRmaOp::Read), Just(OneRmaOp::Write), Just(OneRmaOp::Rekey)];
    let prefix = (op, any::<bool>(), any::<(u32, u64)>()).prop_map(|(op, low, (sender, counter))| {
        PacketPrefix { op, class: if low { Class::Low } else { Class::High }, iv: Iv { sender, counter } }
    });
    let fields = (handle(), handle(), any::<(u32, u32, u64)>(), 1..=MAX_OP, 0..5u8, 1..8u8);
    (prefix, fields).prop_map(|(mut prefix, (one, other, (pid, region, offset), size, hop, status))| {
        if matches!(hop, 1 | 3) && prefix.op == OneRmaOp::Read {
            prefix.op = OneRmaOp::Write;
        }
        let timeout = other.index;
        let whole = if prefix.op == OneRmaOp::Rekey { 16 } else { size };
        let hop = match hop {
            0 => Hop::Request { from: one, pid, region: RegionId(region), offset, size: whole, timeout },
            1 => Hop::Ask { to: one, from: other, size: whole },
            2 => Hop::Data { to: one, offset: MAX_OP - size },
            3 => Hop::Done { to: one },
            _ => Hop::Fail { to: one, status: Status::from_code(status).expect("a status") },
        };
        let body = if matches!(hop, Hop::Data { .. }) { size as usize } else { 0 };
        (OneRmaHeader { prefix, hop }, body)
    })
}

fn packet(head: &OneRmaHeader, body: usize) -> Vec<u8> {
    let mut bytes = head.encode().bytes().to_vec();
    bytes.resize(bytes.len() + body + TAG_LEN, 0xee);
    bytes
}

proptest! {
    #[test]
    fn what_is_written_is_read((head, body) in head()) {
        let bytes = packet(&head, body);
        prop_assert!(bytes.len() <= MAX_PACKET);
        prop_assert_eq!(OneRmaHeader::parse(&bytes), Ok((head, bytes.len() - body - TAG_LEN)));
    }

    #[test]
    fn one_byte_more_or_less_is_seen((head, body) in head()) {
        let mut bytes = packet(&head, body);
        let data = matches!(head.hop, Hop::Data { .. });
        bytes.push(0);
        let longer = OneRmaHeader::parse(&bytes);
        let full = data && body == (MAX_OP - offset(&head)) as usize;
        prop_assert_eq!(longer.is_err(), !data || full);
        bytes.truncate(bytes.len() - 2);
        prop_assert_eq!(OneRmaHeader::parse(&bytes).is_err(), !data || body == 1);
    }

    #[test]
    fn any_bytes_are_a_packet_that_reads_back_or_an_error(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        if let Ok((head, at)) = OneRmaHeader::parse(&bytes) {
            let again = head.encode();
            prop_assert_eq!(again.bytes(), &bytes[..at]);
        }
    }
}

fn offset(head: &OneRmaHeader) -> u32 {
    match head.hop {
        Hop::Data { offset, .. } => offset,
        _ => 0,
    }
}

#[test]
fn what_no_card_sends_is_refused() {
    let prefix = PacketPrefix { op: OneRmaOp::Read, class: Class::High, iv: Iv::default() };
    let to = Handle::default();
    let of = |op, hop| {
        OneRmaHeader::parse(&packet(&OneRmaHeader { prefix: PacketPrefix { op, ..prefix }, hop }, 0))
    };
    let request = |size| Hop::Request { from: to, pid: 1, region: RegionId(0), offset: 0, size, timeout: 9 };
    assert!(of(OneRmaOp::Read, request(4096)).is_ok());
    assert_eq!(of(OneRmaOp::Read, request(4097)), Err(WireError::Size));
    assert_eq!(of(OneRmaOp::Write, request(0)), Err(WireError::Size));
    assert_eq!(of(OneRmaOp::Rekey, request(17)), Err(WireError::Size));
    assert_eq!(of(OneRmaOp::Read, Hop::Done { to }), Err(WireError::Unknown));
    assert_eq!(of(OneRmaOp::Read, Hop::Ask { to, from: to, size: 1 }), Err(WireError::Unknown));
    assert_eq!(of(OneRmaOp::Read, Hop::Fail { to, status: Status::Ok }), Err(WireError::Unknown));
    assert_eq!(of(OneRmaOp::Read, Hop::Data { to, offset: 4097 }), Err(WireError::Size));
    for (at, bad) in [(0, 0x21), (0, 0x16), (0, 0x10), (1, 0), (1, 4), (2, 8), (2, 1), (3, 2)] {
        let mut bytes = packet(&OneRmaHeader { prefix, hop: request(1) }, 0);
        bytes[at] = bad;
        assert!(OneRmaHeader::parse(&bytes).is_err(), "byte {at} is {bad}");
    }
}
