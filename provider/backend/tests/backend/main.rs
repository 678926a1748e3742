//! Ports of this process, over loopback. What changes a whole process has a test binary of its own.

mod common;

mod capture;
mod multicast;
mod peer;
mod sharing;
mod wire;
