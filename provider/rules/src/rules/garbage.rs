//! B9: what a client writes harms that client alone.

use starverbs_core::rng::Rng;
use starverbs_queues::board::*;
use starverbs_queues::{SendFlags, SendOp, SendWqe};
use zerocopy::{IntoBytes, transmute};

use crate::bench::Bench;
use crate::fault::{Tested, expect};
use crate::qp::{RawQp, SENDS, TwoQps};
use crate::raw::{CQ, EVENTS, RawDriver};

/// Clients that write garbage.
const CLIENTS: u64 = 50;
/// What one of them writes.
const WRITES: u32 = 24;
const OPS: [u16; 15] =
    [0x01, 0x02, 0x10, 0x20, 0x22, 0x28, 0x30, 0x40, 0x41, 0x50, 0x51, 0x60, 0x61, 0x62, 0x63];

pub(super) fn garbage(bench: &mut Bench) -> Tested {
    let mut witness = match bench.second() {
        Ok(_) => Some(bench.second_pair()?),
        Err(_) => None,
    };
    for seed in 0..CLIENTS {
        let mut raw = bench.open()?;
        let TwoQps { a, b, .. } = raw.two_qps()?;
        let mut rng = Rng::new([seed, 1]);
        for _ in 0..WRITES {
            write(&mut raw, &mut rng, a, b)?;
        }
        drop(raw);
        if let Some(witness) = &mut witness {
            witness.exchange(seed)?;
        }
    }
    bench.pair()?.exchange(1)?;
    match &mut witness {
        Some(witness) => expect("REG_ERROR of another function", witness.raw.register(REG_ERROR)?, 0),
        None => Ok(()),
    }
}

/// Writes something to somewhere.
fn write(raw: &mut RawDriver, rng: &mut Rng, a: RawQp, b: RawQp) -> Tested {
    let word = rng.word();
    let mut noise = [0u8; COMMAND_BYTES];
    noise.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&rng.word().to_le_bytes()));
    match word % 6 {
        /* a queue's memory, and its indices */
        0 => {
            let at = [a.at, b.at][(word >> 8) as usize & 1] + (word >> 16) as usize % 0x4000;
            raw.put(at & !7, &noise);
        }
        1 => {
            let at = [CQ, EVENTS, 0][(word >> 8) as usize % 3] + (word >> 16) as usize % 0x400;
            raw.put(at, &noise);
        }
        /* a doorbell: any cell, any value, near ones most of all */
        2 => {
            let value = if word & 64 == 0 { rng.word() } else { rng.word() & 0x1f_0000_001f };
            raw.ring((word >> 8) as u32 % 8, value)?;
        }
        /* a register, which may refuse it */
        3 => {
            let at = ((word >> 8) as u32 % 0x60) & !3;
            let len = if word & 64 == 0 { 4 } else { 8 };
            if at != REG_CONTROL {
                let _ = raw.write(at, &noise[..len]);
            }
        }
        /* a command with a body of noise; the number of an object of its own most of all. The tail may have
         * been written over, so that nobody waits for it */
        4 => {
            let op = OPS[(word >> 8) as usize % OPS.len()];
            if word & 64 == 0 {
                let own = [a.qpn, b.qpn][(word >> 16) as usize & 1];
                noise[..4].copy_from_slice(&own.to_le_bytes());
            }
            raw.put_command(op, &noise[..BODY_BYTES]);
            raw.post_commands()?;
        }
        /* a send WQE that is nearly one */
        _ => {
            let wqe = SendWqe {
                op: SendOp::from_code((word >> 8) as u32 % 16).unwrap_or_default(),
                flags: SendFlags::from_bits_retain((word >> 16) as u8 & 15),
                length: (word >> 24) as u32 & 0xffff,
                num_sge: (word >> 40) as u16 & 7,
                blocks: (word >> 44) as u16 & 3,
                ..SendWqe::default()
            };
            let words: [u64; 8] = transmute!(wqe);
            raw.put(a.at + SENDS, words.as_bytes());
            raw.ring(a.cell, u64::from((word >> 48) as u32 & 63))?;
        }
    }
    Ok(())
}
