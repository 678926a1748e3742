//! What runs of others' programs share: child processes that end, checks of what they printed, namespaces.

pub mod check;
pub mod command;
pub mod netns;
pub mod process;
