//! StRoM with programs on functions of a board: with each other, and with a card in software. Others of
//! StRoM's tests run on boards, too (`tests/board.filter`).

use starverbs_core::strom::{ReplyFlags, TARGET_LEN};
use starverbs_core::{WcFlags, WcOpcode, WcStatus};
use starverbs_verbs::{Builtin, Pd};

use crate::common::board::BoardThread;
use crate::common::*;
use crate::rpc::{OP, call, gets, rpc_qp};

/// A board, and two programs: the first and the second may be on a card in software.
fn programs(on_board: [bool; 2]) -> (BoardThread, [Node; 2]) {
    let wire = wire();
    let board = BoardThread::start(&wire, 2);
    let nodes = [0, 1].map(|n| Node::new(&if on_board[n] { board.client(n) } else { wire.clone() }));
    (board, nodes)
}

#[test]
fn kernels_of_a_board_answer_and_are_asked() {
    for on_board in [[true, true], [true, false], [false, true]] {
        println!("{on_board:?}");
        let (_board, [a, b]) = programs(on_board);
        gets(&a, &b);
        gets(&b, &a);
    }
}

#[test]
fn a_program_on_a_board_answers_by_itself() {
    let (_board, [a, b]) = programs([true, true]);
    let (qa, qb) = (rpc_qp(&a), rpc_qp(&b));
    connect(&a, &qa, &b, &qb);
    b.pd.leave_to_program(OP).unwrap();
    b.post_recv(&qb, 7, 0, 256).unwrap();
    call(&a, &qa, b"parameters", ReplyFlags::empty());
    let done = a.completions(1)[0];
    assert_eq!((done.status, done.opcode), (WcStatus::Success, WcOpcode::RdmaWrite));
    let got = b.completions(1)[0];
    assert_eq!((got.wr_id, got.status, got.opcode), (7, WcStatus::Success, WcOpcode::Recv));
    assert!(got.flags.contains(WcFlags::WITH_IMM));
    assert_eq!((u32::from_be(got.imm), got.byte_len as usize), (OP as u32, TARGET_LEN + 10));
    assert_eq!(b.bytes(TARGET_LEN, 10), b"parameters");
}

/// Memory for answers comes back with its queue pair, and holds the domain no longer.
#[test]
fn queue_pairs_of_the_dialect_come_and_go() {
    let (_board, [a, b]) = programs([true, true]);
    for _ in 0..200 {
        let pd = Pd::alloc(&a.ctx).unwrap();
        pd.load_kernel(OP, Builtin::Get).unwrap();
        let qp = rpc_qp(&a);
        assert_eq!(pd.dealloc().unwrap_err().errno(), libc::EBUSY);
        pd.unload_kernel(OP).unwrap();
        qp.destroy().unwrap();
        pd.dealloc().unwrap();
    }
    gets(&a, &b);
}

#[test]
fn what_a_board_has_not_of_strom_is_said() {
    let (_board, [a, _b]) = programs([true, true]);
    a.pd.load_kernel(OP, Builtin::Get).unwrap();
    assert_eq!(a.pd.call_kernel(OP, &[], &mut []).unwrap_err().errno(), libc::EOPNOTSUPP);
}
