//! Programs on cards of this process, over loopback. What counts or limits for a whole process has a test
//! binary of its own.

#[path = "../common/mod.rs"]
mod common;

mod batches;
mod board;
mod board_lies;
mod board_star;
mod board_stops;
mod board_strom;
mod cm;
mod coalescing;
mod completion;
mod direct;
mod domains;
mod host_frames;
mod imports;
mod memory;
mod multicast;
mod placement;
mod receives;
mod rpc;
mod rules;
mod same_host;
mod same_host_errors;
mod same_host_uc;
mod star;
mod star_stateless;
mod star_switch;
mod stress;
mod tags;
mod transfers;
mod untrusted;
mod windows;
mod xrc;
mod xrc_open;
mod xrc_shared;
