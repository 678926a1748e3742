//! A card that is in use, and frames from untrusted peers: the whole of `handle_frame` with live queue pairs
//! of every transport.
//!
//! The first byte decides who the untrusted peer is. An *unconnected* one does not know the connections: each
//! of its frames differs from a good one in one point at least, must be dropped and counted once, and all
//! honest work must end well. A *peer* is connected to the card and breaks the rules: its frames pass every
//! check that the receiver has before it looks at the request. Nothing but its own connections may suffer. A
//! *silent* peer sends nothing but what the input says, so that the oracle knows what was acknowledged.
//! Frames here are as behind the ICRC check; `port` tests that check.

mod forge;
mod memory;
mod watch;
mod world;

use crate::bytes::Bytes;
use forge::Frame;
use world::{LANES, World};

/// Steps of one input; more is not looked at.
const MOST: usize = 256;
/// How far things go on of themselves after the input.
const STEPS: usize = 200_000;

/// Who the untrusted peer is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mode {
    /// Knows no connection
    Unconnected,
    /// A connected peer that breaks the rules
    Peer,
    /// As `Peer`, and the honest peer says nothing
    Silent,
}

/// Checks one input.
pub fn check(input: &[u8]) {
    let mut bytes = Bytes(input);
    let first = bytes.byte();
    let mode = match first & 3 {
        0 => Mode::Unconnected,
        1 => Mode::Silent,
        _ => Mode::Peer,
    };
    let mut world = World::new(mode, first >> 2);
    for _ in 0..MOST {
        let Some(op) = bytes.next() else { break };
        step(&mut world, op, &mut bytes);
        world.look();
    }
    assert!(world.net.run_until_idle(STEPS), "the card becomes idle");
    world.look();
    world.end();
}

fn step(world: &mut World, op: u8, bytes: &mut Bytes<'_>) {
    let lane = usize::from(op >> 4) % LANES;
    match op & 15 {
        0..=6 => {
            let frame = Frame::read(world, lane, bytes);
            world.inject(frame);
        }
        7 => {
            let steps = bytes.byte();
            for _ in 0..steps {
                if !world.net.step() {
                    break;
                }
            }
        }
        8 | 9 => world.post_send(lane, bytes),
        10 => world.post_recv(lane, bytes),
        11 => world.honest_send(lane, bytes),
        12 => {
            let micros = 1u64 << (bytes.byte() % 20);
            if world.mode != Mode::Unconnected {
                world.net.suspend(micros * 1000);
            }
        }
        13 => world.change_state(lane, bytes),
        14 => world.change_memory(bytes),
        _ => {
            let len = usize::from(bytes.byte());
            let frame = Frame::raw(bytes.take(len));
            world.inject(frame);
        }
    }
}
