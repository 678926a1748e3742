//! What the shuffle kernel must do with values, plainly: each partition's values wait until a buffer of
//! them is full, or all are flushed, and then go to where it lies, as far as there is room.

use starverbs_core::strom::Code;
use starverbs_kernels::shuffle::{BEGIN, FLUSH, HISTOGRAM, Params, Partition};
use zerocopy::FromBytes;

use super::Answer;

/// Most partitions, and values that all buffers hold.
const MOST: usize = 1024;
const BUFFERED: usize = MOST * 16;
/// Most values of a buffer.
const DEEPEST: usize = 512;

/// Bytes that must be written.
#[derive(Clone, Debug)]
pub(super) struct Write {
    /// Of which partition
    pub(super) at: usize,
    pub(super) to: u64,
    pub(super) bytes: Vec<u8>,
}

#[derive(Clone, Debug, Default)]
struct Place {
    to: u64,
    /// Values that it still takes
    room: usize,
    waiting: Vec<u64>,
    came: u64,
}

/// All partitions.
#[derive(Clone, Debug)]
pub(super) struct Partitions {
    places: Vec<Place>,
    /// How many there are
    count: usize,
    depth: usize,
    lost: u64,
}

impl Default for Partitions {
    fn default() -> Self {
        Partitions { places: vec![Place::default(); MOST], count: 1, depth: DEEPEST, lost: 0 }
    }
}

impl Partitions {
    /// There are 2^`bits`, without room.
    pub(super) fn begin(&mut self, bits: u32) {
        *self = Partitions { count: 1 << bits, depth: (BUFFERED >> bits).min(DEEPEST), ..Self::default() };
    }

    pub(super) fn set(&mut self, at: usize, to: u64, len: u64) {
        self.places[at] = Place { to, room: len as usize / 8, ..Place::default() };
    }

    /// A value comes; what is written for it.
    pub(super) fn take(&mut self, value: u64) -> Option<Write> {
        let at = value as usize % self.count;
        let full = self.places[at].waiting.len() == self.depth;
        let written = if full { self.empty(at) } else { None };
        self.places[at].waiting.push(value);
        written
    }

    fn empty(&mut self, at: usize) -> Option<Write> {
        let place = &mut self.places[at];
        let waiting = std::mem::take(&mut place.waiting);
        let (fit, rest) = waiting.split_at(waiting.len().min(place.room));
        self.lost += rest.len() as u64;
        let bytes = fit.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let to = place.to;
        place.to += bytes.len() as u64;
        place.room -= fit.len();
        place.came += fit.len() as u64;
        (!bytes.is_empty()).then_some(Write { at, to, bytes })
    }

    /// All that waits is written.
    pub(super) fn flush(&mut self) -> Vec<Write> {
        (0..self.count).filter_map(|at| self.empty(at)).collect()
    }

    /// The answer to a flush.
    pub(super) fn counts(&self, first: usize, count: usize) -> Answer {
        let places = self.places.iter().take(self.count).skip(first).take(count);
        let words = places.map(|place| place.came).chain([self.lost]);
        if self.lost == 0 {
            Answer::ok(words.flat_map(u64::to_le_bytes).collect())
        } else {
            Answer::error(Code::Overflow)
        }
    }

    /// A peer's RPC: how it must end, and what is written for it.
    pub(super) fn command(&mut self, params: &[u8]) -> (Answer, Vec<Write>) {
        let bad = || (Answer::error(Code::BadParam), vec![]);
        let Ok((params, rest)) = Params::read_from_prefix(params) else { return bad() };
        let (number, first) = (params.number.get(), params.first.get() as usize);
        match params.command.get() {
            BEGIN if number > MOST.ilog2() => return bad(),
            BEGIN => self.begin(number),
            /* the peers of other queue pairs are not a peer's to name */
            _ if params.qpn.get() != 0 => return (Answer::error(Code::Access), vec![]),
            HISTOGRAM => {
                let Ok(of) = <[Partition]>::ref_from_bytes(rest) else { return bad() };
                if first + of.len() > MOST {
                    return bad();
                }
                let mut all = (first..).zip(of);
                all.by_ref().for_each(|(at, of)| self.set(at, of.to.get(), of.len.get()));
            }
            FLUSH => {
                let writes = self.flush();
                return (self.counts(first, number as usize), writes);
            }
            _ => return bad(),
        }
        (Answer::ok(vec![]), vec![])
    }
}
