//! `include/starverbs/queues.h` says what the types of `format` are, and what is decoded is what was encoded.

use std::mem::{offset_of, size_of};

use proptest::prelude::*;
use starverbs_queues::format::{CardIndex, Cqe, ProgramIndex, RecvWqe, SendWqe, Sge};
use starverbs_queues::{BLOCK, Malformed, SendOp, WcOpcode, WcStatus, format};

const HEADER: &str = include_str!("../../../include/starverbs/queues.h");

/// A struct's fields with their offsets, and its size, as C lays them out.
fn layout_in_c(name: &str) -> Vec<(String, usize)> {
    let start = HEADER.find(&format!("struct {name} {{")).unwrap_or_else(|| panic!("no {name}"));
    let body = HEADER[start..].lines().skip(1).take_while(|line| *line != "};");
    let (mut at, mut align, mut fields) = (0, 1, Vec::new());
    for line in body {
        let mut words = line.split([' ', '\t', ';']).filter(|word| !word.is_empty());
        let size = match words.next().unwrap() {
            "__u64" => 8,
            "__u32" => 4,
            "__u16" => 2,
            "__u8" => 1,
            other => panic!("{other} in {name}"),
        };
        at = usize::next_multiple_of(at, size);
        let word = words.next().unwrap();
        let (field, count) = word.split_once('[').unwrap_or((word, "1]"));
        let count: usize = count.trim_end_matches(']').parse().unwrap();
        fields.push((field.to_owned(), at));
        (at, align) = (at + size * count, align.max(size));
    }
    fields.push(("size".to_owned(), at.next_multiple_of(align)));
    fields
}

macro_rules! layout {
    ($type:ty: $($field:ident)*) => {
        vec![
            $((stringify!($field).to_owned(), offset_of!($type, $field)),)*
            ("size".to_owned(), size_of::<$type>()),
        ]
    };
}

#[test]
fn c_has_the_same_layout() {
    let send = layout!(SendWqe: wr_id remote_addr compare_add swap rkey imm length remote_qpn qkey av op flags
        num_sge blocks reserved);
    assert_eq!(layout_in_c("starverbs_send_wqe"), send);
    assert_eq!(layout_in_c("starverbs_recv_wqe"), layout!(RecvWqe: wr_id num_sge reserved));
    assert_eq!(layout_in_c("starverbs_sge"), layout!(Sge: addr len lkey));
    let program = layout!(ProgramIndex: send_posted recv_posted reserved);
    assert_eq!(layout_in_c("starverbs_program_index"), program);
    let card = layout!(CardIndex: send_released recv_taken recv_starved own);
    assert_eq!(layout_in_c("starverbs_card_index"), card);
    let cqe = layout!(Cqe: wr_id byte_len imm qpn src_qp vendor_err status opcode flags sl);
    assert_eq!(layout_in_c("starverbs_cqe"), cqe);
    assert!(HEADER.contains(&format!("#define STARVERBS_BLOCK {BLOCK}\n")));
}

#[test]
fn a_wqe_says_how_many_blocks_it_takes() {
    let blocks = [(0, 1), (1, 2), (16, 2), (64, 2), (65, 3), (65_471, 1024)];
    blocks.into_iter().for_each(|(body, blocks)| assert_eq!(format::blocks(body), blocks, "{body}"));
}

proptest! {
    /// Whatever stands there: it is decoded as it was written, or refused.
    #[test]
    fn any_bytes_are_decoded_or_refused(
        (wr_id, numbers) in any::<(u64, [u32; 6])>(), (op, flags, num_sge) in any::<(u8, u8, u16)>(),
        other in any::<u8>()
    ) {
        let [rkey, imm, length, remote_qpn, qkey, av] = numbers;
        let (remote_addr, blocks) = (!wr_id, format::blocks(0) as u16);
        let raw = SendWqe {
            wr_id, remote_addr, rkey, imm, length, remote_qpn, qkey, av, op, flags, num_sge, blocks,
            ..SendWqe::default()
        };
        match raw.decode() {
            Ok(wqe) => prop_assert_eq!(wqe.encode(0), SendWqe { flags: flags & 0xf, ..raw }),
            Err(error) => {
                prop_assert!(SendOp::from_code(op.into()).is_none());
                prop_assert_eq!(error, Malformed::Op(op));
            }
        }
        let raw = Cqe {
            wr_id, byte_len: rkey, imm, qpn: length, src_qp: qkey, vendor_err: av,
            status: op, opcode: other, flags, sl: op,
        };
        match raw.decode() {
            Ok(cqe) => prop_assert_eq!(cqe.encode(), Cqe { flags: flags & 0x7b, ..raw }),
            Err(Malformed::Status(code)) => prop_assert!(WcStatus::from_code(code).is_none()),
            Err(error) => {
                prop_assert!(WcOpcode::from_code(other).is_none());
                prop_assert_eq!(error, Malformed::Opcode(other));
            }
        }
    }
}
