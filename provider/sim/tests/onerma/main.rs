//! 1RMA cards on simulated wires.

mod commands;
mod two;
mod wire;
