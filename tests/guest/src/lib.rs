//! Guests of QEMU for tests that need a kernel of their own: Debian's kernel, the host's programs, a network
//! namespace, and jobs that the host asks for.
//!
//! Owns how a guest is booted and talked to. It must not know what is tested in it.

pub mod guest;
pub mod kernel;
pub mod net;
pub mod program;
pub mod qemu;
pub mod root;
