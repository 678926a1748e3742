//! 1RMA cards on simulated wires.

mod commands;
mod figures;
mod two;
mod wire;
