//! Cards on simulated wires: no operating system, no time but the simulation's.

mod common;

mod busy;
mod calls;
mod congestion;
mod contexts;
mod credits;
mod errors;
mod jumps;
mod limits;
mod mixed;
mod multicast;
mod neighbours;
mod placement;
mod rc;
mod receives;
mod repeat;
mod rnic;
mod send_kernels;
mod star_card;
mod star_contexts;
mod star_incarnations;
mod star_messages;
mod star_packets;
mod star_revert;
mod star_roles;
mod states;
mod strom;
mod tags;
mod turns;
mod unreliable;
mod untrusted;
mod windows;
mod xrc;
mod xrc_answers;
mod xrc_shared;
