//! What simulated programs send, and where they keep it.

use starverbs_core::{SendOp, Sge};

use crate::{Rng, SimHost};

/// Operations of an RC queue pair that ask something of the peer or bring it something.
pub const RC_OPS: [SendOp; 9] = [
    SendOp::Write,
    SendOp::WriteImm,
    SendOp::Send,
    SendOp::SendImm,
    SendOp::Read,
    SendOp::CmpSwap,
    SendOp::FetchAdd,
    SendOp::AtomicWrite,
    SendOp::Flush,
];

/// Those of them that StaR connections carry: all but ATOMIC WRITE and FLUSH.
pub const STAR_OPS: &[SendOp] = RC_OPS.split_at(7).0;

/// A message's size in bytes: the edges of packets of `mtu` bytes more often than not.
pub fn any_size(rng: &mut Rng, mtu: u32) -> u32 {
    match rng.below(12) {
        0 => 0,
        1 => 1,
        2 => rng.within(2, 64) as u32,
        3 => mtu - 1,
        4 => mtu,
        5 => mtu + 1,
        6 => mtu * rng.within(2, 5) as u32,
        7 => mtu * rng.within(2, 5) as u32 + rng.below(u64::from(mtu)) as u32,
        _ => rng.below(u64::from(mtu) * 3) as u32,
    }
}

/// Random bytes.
pub fn any_bytes(rng: &mut Rng, len: u32) -> Vec<u8> {
    let mut data = vec![0; len as usize];
    rng.fill(&mut data);
    data
}

/// Writes `data` into pieces, which have room for it.
pub fn put(host: &mut SimHost, pieces: &[Sge], data: &[u8]) {
    let mut rest = data;
    for s in pieces {
        let (now, later) = rest.split_at((s.len as usize).min(rest.len()));
        host.env.memory.write(s.addr, now);
        rest = later;
    }
    assert!(rest.is_empty(), "pieces too short for what is put there");
}

/// The first `len` bytes of pieces, which have as many.
pub fn get(host: &SimHost, pieces: &[Sge], len: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(len);
    for s in pieces {
        let n = (s.len as usize).min(len - out.len());
        if n > 0 {
            out.extend_from_slice(host.env.memory.read(s.addr, n));
        }
    }
    assert_eq!(out.len(), len, "more bytes than the pieces have");
    out
}
