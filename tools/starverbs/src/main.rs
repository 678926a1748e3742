//! The starverbs command: run, info, stat
fn main() {}
