//! Benchmarks against the bare socket and against other stacks
fn main() {}
