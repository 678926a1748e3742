//! Shuffling a stream into partitions (the paper's 6.4): a value of 8 bytes goes to the partition that its
//! low bits name, through a buffer of 16 values.
//!
//! The histogram comes first, by RPC: where each partition lies, and its room. The end of the stream is an
//! RPC, too: it flushes the buffers, and says how many values each partition of a range got. A value without
//! room is dropped and counted; the flush then ends with OVERFLOW.

use starverbs_core::strom::{Code, Input, Kernel, KernelRun, Poll};
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Most partitions.
pub const PARTITIONS: usize = 1024;
/// Values of a buffer.
const BUFFER: usize = 16;

/// Begin anew, with 2^`bits` partitions that have no room yet.
pub const BEGIN: u32 = 0;
/// The [`Partition`]s from `first` on stand behind the parameters.
pub const HISTOGRAM: u32 = 1;
/// Flush all buffers; answer with the number of values of each of `count` partitions from `first` on, 8 bytes
/// each, and then that of the values that found no room.
pub const FLUSH: u32 = 2;

/// Parameters, 16 bytes.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Params {
    /// [`BEGIN`], [`HISTOGRAM`] or [`FLUSH`]
    pub command: U32,
    /// BEGIN: log2 of the partitions. HISTOGRAM: key of the region. FLUSH: count
    pub number: U32,
    /// The first partition that is meant
    pub first: U32,
    /// Reserved: 0
    pub reserved: U32,
}

/// Where a partition lies.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Partition {
    /// Its first byte
    pub to: U64,
    /// Its room, bytes
    pub len: U64,
}

/// A partition's state: where its next value goes, and those that wait.
#[derive(Clone, Copy, Debug, Default)]
struct Lane {
    to: u64,
    room: u64,
    rkey: u32,
    waiting: u8,
    values: u64,
    buffer: [[u8; 8]; BUFFER],
}

/// The kernel: one set of partitions, for all streams.
#[derive(Debug)]
pub struct Shuffle {
    lanes: Box<[Lane]>,
    /// Low bits of a value that name its partition
    mask: usize,
    lost: u64,
}

impl Default for Shuffle {
    fn default() -> Self {
        Shuffle { lanes: vec![Lane::default(); PARTITIONS].into_boxed_slice(), mask: 0, lost: 0 }
    }
}

impl Shuffle {
    /// Writes what waits for a partition. False: later.
    fn flush(&mut self, run: &mut KernelRun, at: usize) -> bool {
        let lane = &mut self.lanes[at];
        let len = u64::from(lane.waiting) * 8;
        let fits = len.min(lane.room / 8 * 8);
        let bytes = &lane.buffer.as_flattened()[..fits as usize];
        if fits > 0 && !run.write(lane.rkey, lane.to, bytes) {
            return false;
        }
        self.lost += (len - fits) / 8;
        (lane.to, lane.room) = (lane.to.wrapping_add(fits), lane.room - fits);
        (lane.waiting, lane.values) = (0, lane.values + fits / 8);
        true
    }

    /// Takes the packet's values from where it was left; the register counts them.
    fn spread(&mut self, run: &mut KernelRun) -> Poll {
        while let Some(value) = run.param::<8>(run.regs[0] as usize * 8) {
            let at = u64::from_le_bytes(value) as usize & self.mask;
            let waiting = usize::from(self.lanes[at].waiting);
            if waiting == BUFFER && !self.flush(run, at) {
                return Poll::Pending;
            }
            let lane = &mut self.lanes[at];
            lane.buffer[usize::from(lane.waiting)] = value;
            lane.waiting += 1;
            run.regs[0] += 1;
        }
        Poll::Ready(Code::Ok)
    }

    /// Flushes from where it was left, then answers.
    fn finish(&mut self, run: &mut KernelRun, params: &Params) -> Poll {
        while run.regs[1] as usize <= self.mask {
            if !self.flush(run, run.regs[1] as usize) {
                return Poll::Pending;
            }
            run.regs[1] += 1;
        }
        let (first, count) = (params.first.get() as usize, params.number.get() as usize);
        let mut lanes = self.lanes.iter().take(self.mask + 1).skip(first).take(count);
        let fit = lanes.all(|lane| run.reply(&lane.values.to_le_bytes()));
        let fit = fit && run.reply(&self.lost.to_le_bytes());
        Poll::Ready(if fit && self.lost == 0 { Code::Ok } else { Code::Overflow })
    }

    fn begin(&mut self, params: &Params) -> Result<(), Code> {
        if params.number.get() > PARTITIONS.ilog2() {
            return Err(Code::BadParam);
        }
        (self.mask, self.lost) = ((1 << params.number.get()) - 1, 0);
        self.lanes.fill(Lane::default());
        Ok(())
    }

    fn set(&mut self, params: &Params, partitions: &[u8]) -> Result<(), Code> {
        let partitions = <[Partition]>::ref_from_bytes(partitions).map_err(|_| Code::BadParam)?;
        let first = params.first.get() as usize;
        let end = first.checked_add(partitions.len()).ok_or(Code::BadParam)?;
        let lanes = self.lanes.get_mut(first..end).ok_or(Code::BadParam)?;
        for (lane, partition) in lanes.iter_mut().zip(partitions) {
            let (to, room) = (partition.to.get(), partition.len.get());
            *lane = Lane { to, room, rkey: params.number.get(), ..Lane::default() };
        }
        Ok(())
    }
}

impl Kernel for Shuffle {
    fn start(&mut self, run: &mut KernelRun, input: Input) -> Result<(), Code> {
        if input != Input::Params {
            run.regs = [0; 8];
            return Ok(());
        }
        let (params, rest) = Params::read_from_prefix(run.bytes()).map_err(|_| Code::BadParam)?;
        match params.command.get() {
            BEGIN => self.begin(&params),
            HISTOGRAM => self.set(&params, rest),
            FLUSH => {
                run.regs[2] = 1;
                Ok(())
            }
            _ => Err(Code::BadParam),
        }?;
        run.regs[3] = 1;
        Ok(())
    }

    fn step(&mut self, run: &mut KernelRun) -> Poll {
        match (run.regs[3], run.regs[2]) {
            (0, _) => self.spread(run),
            (_, 0) => Poll::Ready(Code::Ok),
            _ => match Params::read_from_prefix(run.bytes()) {
                Ok((params, _)) => self.finish(run, &params),
                Err(_) => Poll::Ready(Code::BadParam),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::TestHost;

    const BASE: u64 = 0x1_0000;

    fn ask(host: &mut TestHost, kernel: &mut Shuffle, params: Params, rest: &[u8]) -> (Code, Vec<u64>) {
        let (code, data) = host.call(kernel, &[params.as_bytes(), rest].concat());
        (code, data.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }

    fn command(command: u32, number: u32, first: u32) -> Params {
        Params { command: command.into(), number: number.into(), first: first.into(), ..Params::default() }
    }

    /// Values land in their partitions in the order of the stream, whatever packets it comes in.
    #[test]
    fn partitions_are_those_of_a_model() {
        for (bits, count) in [(0, 100u64), (3, 1000), (10, 30_000), (10, 7)] {
            let (mut host, mut kernel) = (TestHost::new(BASE, 1 << 20), Shuffle::default());
            let values: Vec<u64> = (0..count).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 7).collect();
            let parts = 1usize << bits;
            let mut model = vec![Vec::new(); parts];
            values.iter().for_each(|value| model[*value as usize % parts].push(*value));
            assert_eq!(ask(&mut host, &mut kernel, command(BEGIN, bits, 0), &[]).0, Code::Ok);
            let mut at = BASE;
            let places: Vec<Partition> = model
                .iter()
                .map(|values| {
                    let len = values.len() as u64 * 8;
                    at += len;
                    Partition { to: (at - len).into(), len: len.into() }
                })
                .collect();
            for (n, some) in places.chunks(200).enumerate() {
                let set = command(HISTOGRAM, TestHost::KEY, n as u32 * 200);
                assert_eq!(ask(&mut host, &mut kernel, set, some.as_bytes()).0, Code::Ok);
            }
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            for piece in bytes.chunks(4096) {
                assert_eq!(host.feed(&mut kernel, piece, true, true), Code::Ok);
            }
            let (code, said) = ask(&mut host, &mut kernel, command(FLUSH, 400, 0), &[]);
            let counts = model.iter().take(400).map(|values| values.len() as u64).chain([0]);
            assert_eq!((code, said), (Code::Ok, counts.collect::<Vec<_>>()));
            for (values, place) in model.iter().zip(&places) {
                let there = host.get(place.to.get(), place.len.get() as usize);
                let wanted: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                assert!(*there == *wanted);
            }
        }
    }

    #[test]
    fn what_has_no_room_is_counted() {
        let (mut host, mut kernel) = (TestHost::new(BASE, 4096), Shuffle::default());
        ask(&mut host, &mut kernel, command(BEGIN, 1, 0), &[]);
        let place = Partition { to: BASE.into(), len: 100.into() };
        ask(&mut host, &mut kernel, command(HISTOGRAM, TestHost::KEY, 0), place.as_bytes());
        let even: Vec<u8> = (0..40u64).flat_map(|n| (2 * n).to_le_bytes()).collect();
        assert_eq!(host.feed(&mut kernel, &even, true, true), Code::Ok);
        assert_eq!(host.feed(&mut kernel, &1u64.to_le_bytes(), true, true), Code::Ok);
        let (code, _) = ask(&mut host, &mut kernel, command(FLUSH, 2, 0), &[]);
        assert_eq!(code, Code::Overflow);
        assert_eq!((kernel.lost, kernel.lanes[0].values), (29, 12));
        assert_eq!(host.get(BASE + 96, 8), [0; 8], "no byte behind its room");
    }

    #[test]
    fn nonsense_is_refused() {
        let (mut host, mut kernel) = (TestHost::new(BASE, 4096), Shuffle::default());
        let mut code = |params, rest: &[u8]| ask(&mut host, &mut kernel, params, rest).0;
        assert_eq!(code(command(BEGIN, 11, 0), &[]), Code::BadParam);
        assert_eq!(code(command(3, 0, 0), &[]), Code::BadParam);
        assert_eq!(code(command(HISTOGRAM, 0, 0), &[0; 15]), Code::BadParam);
        assert_eq!(code(command(HISTOGRAM, 0, 1024), &[0; 16]), Code::BadParam);
        assert_eq!(code(command(HISTOGRAM, 0, u32::MAX), &[0; 16]), Code::BadParam);
        assert_eq!(code(command(FLUSH, u32::MAX, u32::MAX), &[]), Code::Ok);
        /* memory that is not its own */
        assert_eq!(code(command(BEGIN, 0, 0), &[]), Code::Ok);
        let place = Partition { to: 8.into(), len: 4096.into() };
        assert_eq!(code(command(HISTOGRAM, TestHost::KEY, 0), place.as_bytes()), Code::Ok);
        assert_eq!(host.feed(&mut kernel, &[0; 136], true, true), Code::Access);
    }
}
