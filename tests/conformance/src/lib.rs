//! What runs of others' programs share: child processes that end, and judgement of what they printed.

pub mod check;
pub mod process;
