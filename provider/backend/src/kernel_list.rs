//! Kernels as a table for people: what `starverbs kernel list` shows.

use std::fmt::Write as _;

use starverbs_core::strom::{ANY_OP, LoadedHandler, RpcHandler};

/// A line with the columns' names, then one for what answers each RPC op-code.
pub fn kernel_list(kernels: &[LoadedHandler]) -> String {
    let mut text = String::from("pd op kernel\n");
    for loaded in kernels {
        let name = match &loaded.handler {
            RpcHandler::Kernel(kernel) => kernel.name(),
            RpcHandler::Program => "program",
        };
        /* writing to a String cannot fail */
        let _ = match loaded.op {
            ANY_OP => writeln!(text, "{} any {name}", loaded.pd.0),
            op => writeln!(text, "{} {op:#x} {name}", loaded.pd.0),
        };
    }
    text
}
