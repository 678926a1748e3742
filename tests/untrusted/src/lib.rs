//! Oracles for bytes from untrusted peers: each takes any bytes and panics if the library mishandles them.
//!
//! The fuzz targets of tests/fuzz call them, and so does `tests/replay.rs` for each file of the corpora, with
//! a stable toolchain. An oracle gives the same verdict each time: no clock, no chance.

pub mod board;
mod bytes;
pub mod card;
pub mod dialect;
pub mod mads;
pub mod onerma;
mod parsers;
pub mod port;
mod preload;
pub mod relay;
pub mod rpc;
pub mod shared_qp;
pub mod star;

pub use parsers::{channel, control, frame, record, settings, share, stat};
pub use preload::path;

/// Checks what the library does with some bytes; panics where it is wrong.
pub type Oracle = fn(&[u8]);

/// All oracles by the names of their fuzz targets.
pub const ORACLES: &[(&str, Oracle)] = &[
    ("board", board::check),
    ("card", card::check),
    ("channel", channel),
    ("control", control),
    ("dialect", dialect::check),
    ("frame", frame),
    ("mads", mads::check),
    ("onerma", onerma::check),
    ("path", path),
    ("port", port::check),
    ("record", record),
    ("relay", relay::check),
    ("rpc", rpc::check),
    ("settings", settings),
    ("share", share),
    ("shared_qp", shared_qp::check),
    ("star", star::check),
    ("stat", stat),
];
