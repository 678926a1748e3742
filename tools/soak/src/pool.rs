//! Buffers of a host's programs, used again and again.
//!
//! The card may touch a buffer only from its posting to its completion: the pool says so to the memory, which
//! watches.

use starverbs_core::{Access, Sge};
use starverbs_sim::{Rng, SimHost};

/// Sizes: 64 B, 128 B, 256 B ... 1 MiB
const CLASSES: usize = 15;

/// Sizes whose buffers may share a region
const SMALL: usize = 7;

/// Registered memory that nobody uses, by size.
#[derive(Default)]
pub(crate) struct Pool {
    free: [Vec<(u64, u32)>; CLASSES],
    /// Small buffers that share a region; 0 is as 1
    pub(crate) together: u64,
}

/// Buffers of one work request: the pieces that it names.
pub(crate) type Pieces = Vec<Sge>;

fn class(len: u32) -> usize {
    (0..CLASSES).find(|c| 64u64 << c >= u64::from(len)).expect("no buffer is so long")
}

impl Pool {
    /// `len` bytes with which the card may do what `rights` says.
    pub(crate) fn take(&mut self, host: &mut SimHost, len: u32, rights: u8) -> Sge {
        let class = class(len);
        if self.free[class].is_empty() {
            self.grow(host, class);
        }
        let (addr, lkey) = self.free[class].pop().expect("it was made");
        host.env.memory.allow(addr, u64::from(len), rights);
        Sge { addr, len, lkey }
    }

    /// More buffers of a size.
    fn grow(&mut self, host: &mut SimHost, class: usize) {
        let count = if class < SMALL { self.together.max(1) } else { 1 };
        let (addr, lkey) = host.region(count << (class + 6), Access::LOCAL_WRITE);
        self.free[class].extend((0..count).map(|n| (addr + (n << (class + 6)), lkey)));
    }

    /// `len` bytes in up to `most` pieces, some of them empty.
    pub(crate) fn scatter(
        &mut self,
        host: &mut SimHost,
        rng: &mut Rng,
        len: u32,
        most: u64,
        rights: u8,
    ) -> Pieces {
        let n = rng.within(1, most);
        let mut left = len;
        let mut pieces = Vec::new();
        for i in 0..n {
            let part = if i + 1 == n { left } else { rng.below(u64::from(left) + 1) as u32 };
            pieces.push(self.take(host, part, rights));
            left -= part;
        }
        pieces
    }

    /// The program has its buffers back; it writes other things there, as programs do.
    pub(crate) fn give(&mut self, host: &mut SimHost, pieces: &[Sge]) {
        for piece in pieces {
            host.env.memory.allow(piece.addr, u64::from(piece.len), 0);
            let scribble = [0xdb; 64];
            host.env.memory.write(piece.addr, &scribble[..piece.len.min(64) as usize]);
            self.free[class(piece.len)].push((piece.addr, piece.lkey));
        }
    }
}
