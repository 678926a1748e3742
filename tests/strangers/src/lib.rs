//! Judges of bytes from strangers: each takes any bytes at all and panics if the library does something wrong
//! with them.
//!
//! The fuzz targets of tests/fuzz call them, and so does `tests/replay.rs` for each file of the corpora, with
//! a stable toolchain. A judge must give the same verdict each time: no clock, no chance.

mod bytes;
pub mod card;
pub mod mads;
pub mod opening;
mod parsers;
pub mod port;
mod preload;
pub mod relay;
pub mod star;

pub use parsers::{control, frame, settings, share, stat};
pub use preload::path;

/// A judge.
pub type Judge = fn(&[u8]);

/// All judges by the names of their fuzz targets.
pub const JUDGES: &[(&str, Judge)] = &[
    ("card", card::judge),
    ("control", control),
    ("frame", frame),
    ("mads", mads::judge),
    ("opening", opening::judge),
    ("path", path),
    ("port", port::judge),
    ("relay", relay::judge),
    ("settings", settings),
    ("share", share),
    ("star", star::judge),
    ("stat", stat),
];
