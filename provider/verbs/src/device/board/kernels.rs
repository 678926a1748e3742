//! StRoM's commands to the board: its own kernels, for what peers ask.

use starverbs_queues::board::{
    ANSWER_BYTES, KERNEL_PROGRAM, KERNEL_REPLACE, OP_LOAD_KERNEL, OP_UNLOAD_KERNEL, RpcKernel,
};

use super::Board;
use super::control::NOT_HERE;
use super::memory::Piece;
use crate::device::command::{AnsweredBy, KernelCommand};
use crate::error::Result;
use crate::qp::REPLIES;

impl Board {
    /// EOPNOTSUPP: a kernel of the program's own, and a call of one.
    pub(super) fn change_kernels(&self, command: &KernelCommand<'_>) -> Result<()> {
        let (op, of) = match command {
            KernelCommand::Load { pd, op, by, replace } => {
                let kernel = match by {
                    AnsweredBy::Builtin(kernel) => *kernel as u32,
                    AnsweredBy::Program => KERNEL_PROGRAM,
                    AnsweredBy::Module(_) => return Err(NOT_HERE),
                };
                let flags = if *replace { KERNEL_REPLACE } else { 0 };
                (OP_LOAD_KERNEL, RpcKernel { op: *op, pd: pd.0, kernel, flags, reserved: 0 })
            }
            KernelCommand::Unload { pd, op } => {
                (OP_UNLOAD_KERNEL, RpcKernel { op: *op, pd: pd.0, ..RpcKernel::default() })
            }
            KernelCommand::Call { .. } => return Err(NOT_HERE),
        };
        self.link.tell(op, &of)
    }

    /// Memory for the answers of a queue pair, whose address it is asked for.
    pub(super) fn answers(&self) -> Result<Piece> {
        self.link.heap.piece((REPLIES * ANSWER_BYTES) as usize)
    }
}
