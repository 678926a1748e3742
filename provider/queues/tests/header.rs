//! `include/starverbs/queues.h` matches the types of `format`, and what is decoded is what was encoded.

use std::mem::{offset_of, size_of};

use proptest::prelude::*;
use starverbs_queues::format::{
    CardIndex, Cqe, CqeWords, ProgramIndex, RecvWqe, SendBlock, SendWqe, Sge, blocks,
};
use starverbs_queues::{AvId, BLOCK, SendFlags, SendOp, WcFlags, WcOpcode, WcStatus};
use zerocopy::{IntoBytes, transmute};

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
fn a_wqe_has_its_number_of_blocks() {
    let known = [(0, 1), (1, 2), (16, 2), (64, 2), (65, 3), (65_471, 1024)];
    known.into_iter().for_each(|(body, count)| assert_eq!(blocks(body), count, "{body}"));
}

proptest! {
    /// Whatever stands there: it is decoded as it was written, or refused.
    #[test]
    fn any_bytes_are_decoded_or_refused(
        (wr_id, numbers) in any::<(u64, [u32; 6])>(), (op, flags, num_sge) in any::<(u8, u8, u16)>(),
        other in any::<u8>()
    ) {
        let [rkey, imm, length, remote_qpn, qkey, av] = numbers;
        let wqe = SendWqe {
            wr_id, remote_addr: !wr_id, rkey, imm, length, remote_qpn, qkey, av: AvId(av), num_sge,
            flags: SendFlags::from_bits_retain(flags), ..SendWqe::default()
        };
        let mut found: SendBlock = transmute!(wqe);
        found.as_mut_bytes()[offset_of!(SendWqe, op)] = op;
        /* no program asks for these by an op-code of ibv_post_send(3) */
        let rpc = [SendOp::Rpc, SendOp::RpcWrite].into_iter().find(|rpc| *rpc as u8 == op);
        let expected = SendOp::from_code(op.into()).or(rpc).unwrap_or(SendOp::Malformed);
        prop_assert_eq!(SendWqe::decode(found), SendWqe { op: expected, ..wqe });
        let cqe = Cqe {
            wr_id, byte_len: rkey, imm, qpn: length, src_qp: qkey, vendor_err: av, sl: op,
            flags: WcFlags::from_bits_retain(flags), ..Cqe::default()
        };
        let mut found: CqeWords = transmute!(cqe);
        found.as_mut_bytes()[offset_of!(Cqe, status)] = op;
        found.as_mut_bytes()[offset_of!(Cqe, opcode)] = other;
        let expected = match (WcStatus::from_code(op), WcOpcode::from_code(other)) {
            (Some(status), Some(opcode)) => Cqe { status, opcode, ..cqe },
            _ => Cqe { wr_id, qpn: length, status: WcStatus::GeneralErr, ..Cqe::default() },
        };
        prop_assert_eq!(Cqe::decode(found), expected);
    }
}
