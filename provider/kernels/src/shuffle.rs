//! Shuffling a stream into partitions (the paper's 6.4): a value of 8 bytes goes to the partition that its
//! low bits name, through a buffer of 16 values; of fewer partitions than 1,024 the buffers are deeper.
//!
//! The histogram comes first, by RPC: where each partition lies, and its room. The end of the stream is an
//! RPC, too: it flushes the buffers, and says how many values each partition of a range got. A value without
//! room is dropped and counted; the flush then ends with OVERFLOW.
//!
//! On the sender's card (4: send kernels) the stream is a region of its own, and partitions lie at the peers
//! of queue pairs. What the card's own program has begun is its alone: it writes and sends with other rights
//! than peers have.

use starverbs_core::strom::{Code, Input, Kernel, KernelRun, Poll, RegionRange};
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Most partitions.
pub const PARTITIONS: usize = 1024;
/// Values of all buffers.
const BUFFERED: usize = PARTITIONS * 16;
/// Most values of a buffer: one WRITE of a queue pair has no more.
const DEEPEST: u16 = 512;
/// Bytes of a region that are looked at at a time.
const PIECE: u64 = 4096;
/// Values that are copied at a time, as the run is written to while they are taken.
const GROUP: usize = 32;

/// Begin anew, with 2^`bits` partitions that have no room yet.
pub const BEGIN: u32 = 0;
/// The [`Partition`]s from `first` on stand behind the parameters.
pub const HISTOGRAM: u32 = 1;
/// Flush all buffers; answer with the number of values of each of `count` partitions from `first` on, 8 bytes
/// each, and then that of the values that found no room.
pub const FLUSH: u32 = 2;

/// The stream is a region of this host's: a [`Partition`] behind the parameters says where it lies.
pub const STREAM: u32 = 3;

/// Parameters, 16 bytes.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Params {
    /// [`BEGIN`], [`HISTOGRAM`], [`FLUSH`] or [`STREAM`]
    pub command: U32,
    /// BEGIN: log2 of the partitions. HISTOGRAM, STREAM: key of the region. FLUSH: count
    pub number: U32,
    /// The first partition that is meant
    pub first: U32,
    /// HISTOGRAM: the queue pair whose peer has the region; 0: this host has it
    pub qpn: U32,
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

/// A partition's state but for how many values wait: where its next value goes.
#[derive(Clone, Copy, Debug, Default)]
struct Lane {
    to: u64,
    room: u64,
    rkey: u32,
    qpn: u32,
    values: u64,
}

/// The kernel: one set of partitions, for all streams.
#[derive(Debug)]
pub struct Shuffle {
    lanes: Box<[Lane]>,
    /// Values that wait for each partition: beside the lanes, as each value looks at one
    waiting: Box<[u16; PARTITIONS]>,
    /// These values, `depth` for each partition
    buffers: Box<[[u8; 8]]>,
    depth: u16,
    /// The card's own program has begun it, and not a peer
    own: bool,
    /// Low bits of a value that name its partition
    mask: usize,
    lost: u64,
}

impl Default for Shuffle {
    fn default() -> Self {
        let lanes = vec![Lane::default(); PARTITIONS].into_boxed_slice();
        let buffers = vec![[0; 8]; BUFFERED].into_boxed_slice();
        let waiting = Box::new([0; PARTITIONS]);
        Shuffle { lanes, waiting, buffers, depth: DEEPEST, own: false, mask: 0, lost: 0 }
    }
}

impl Shuffle {
    /// Writes what waits for a partition. False: later.
    fn flush(&mut self, run: &mut KernelRun, at: usize) -> bool {
        let (lane, waiting) = (&mut self.lanes[at], usize::from(self.waiting[at]));
        let fits = waiting.min((lane.room / 8) as usize);
        let bytes = self.buffers[at * usize::from(self.depth)..][..fits].as_flattened();
        let written = match lane.qpn {
            _ if fits == 0 => true,
            0 => run.write(lane.rkey, lane.to, bytes),
            qpn => run.send(qpn, lane.rkey, lane.to, bytes),
        };
        if !written {
            return false;
        }
        self.lost += (waiting - fits) as u64;
        let len = fits as u64 * 8;
        (lane.to, lane.room) = (lane.to.wrapping_add(len), lane.room - len);
        lane.values += fits as u64;
        self.waiting[at] = 0;
        true
    }

    /// Takes a value. False: later.
    #[inline(always)]
    fn take(&mut self, run: &mut KernelRun, value: [u8; 8]) -> bool {
        /* no more than there are, whatever the mask: nothing is checked then */
        let at = u64::from_le_bytes(value) as usize & self.mask & (PARTITIONS - 1);
        let mut waiting = self.waiting[at];
        if waiting == self.depth {
            if !self.flush(run, at) {
                return false;
            }
            waiting = 0;
        }
        self.buffers[at * usize::from(self.depth) + usize::from(waiting)] = value;
        self.waiting[at] = waiting + 1;
        true
    }

    /// Takes the values of `bytes` from where it was left; the register counts them. False: later.
    fn take_all(&mut self, run: &mut KernelRun, bytes: impl Fn(&KernelRun) -> &[u8]) -> bool {
        loop {
            let mut group = [[0; 8]; GROUP];
            let left = bytes(run).as_chunks().0.get(run.regs[0] as usize..).unwrap_or_default();
            let count = left.len().min(GROUP);
            group[..count].copy_from_slice(&left[..count]);
            let taken = group[..count].iter().take_while(|value| self.take(run, **value)).count();
            run.regs[0] += taken as u64;
            if taken < GROUP {
                return taken == count;
            }
        }
    }

    /// Reads the region piece by piece, and takes its values from where it was left: the registers have the
    /// values taken of this piece, the next piece's address and the bytes left.
    fn stream(&mut self, run: &mut KernelRun, key: u32) -> Poll {
        if !self.take_all(run, KernelRun::read_data) {
            return Poll::Pending;
        }
        let len = run.regs[5].min(PIECE);
        let next = RegionRange { key, len: len as u32, va: run.regs[4] };
        if len == 0 {
            return Poll::Ready(Code::Ok);
        }
        if run.read(next) {
            (run.regs[0], run.regs[4], run.regs[5]) = (0, run.regs[4].wrapping_add(len), run.regs[5] - len);
        }
        Poll::Pending
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
        self.depth = ((BUFFERED >> params.number.get()) as u16).min(DEEPEST);
        self.lanes.fill(Lane::default());
        self.waiting.fill(0);
        Ok(())
    }

    fn set(&mut self, params: &Params, partitions: &[u8]) -> Result<(), Code> {
        let partitions = <[Partition]>::ref_from_bytes(partitions).map_err(|_| Code::BadParam)?;
        let first = params.first.get() as usize;
        let end = first.checked_add(partitions.len()).ok_or(Code::BadParam)?;
        let lanes = self.lanes.get_mut(first..end).ok_or(Code::BadParam)?;
        for (lane, partition) in lanes.iter_mut().zip(partitions) {
            let (to, room) = (partition.to.get(), partition.len.get());
            let (rkey, qpn) = (params.number.get(), params.qpn.get());
            *lane = Lane { to, room, rkey, qpn, values: 0 };
        }
        self.waiting[first..end].fill(0);
        Ok(())
    }
}

impl Kernel for Shuffle {
    fn start(&mut self, run: &mut KernelRun, input: Input) -> Result<(), Code> {
        let by_program = run.qpn() == 0;
        if input != Input::Params {
            run.regs = [0; 8];
            return if self.own { Err(Code::Access) } else { Ok(()) };
        }
        let (params, rest) = Params::read_from_prefix(run.bytes()).map_err(|_| Code::BadParam)?;
        match params.command.get() {
            BEGIN if by_program || !self.own => {
                self.begin(&params)?;
                self.own = by_program;
                Ok(())
            }
            /* nor has a peer anything sent */
            _ if by_program != self.own || (!by_program && params.qpn.get() != 0) => Err(Code::Access),
            HISTOGRAM => self.set(&params, rest),
            FLUSH => Ok(()),
            STREAM => {
                let of = Partition::read_from_bytes(rest).map_err(|_| Code::BadParam)?;
                (run.regs[4], run.regs[5]) = (of.to.get(), of.len.get());
                Ok(())
            }
            _ => Err(Code::BadParam),
        }?;
        run.regs[3] = 1;
        Ok(())
    }

    fn step(&mut self, run: &mut KernelRun) -> Poll {
        if run.regs[3] == 0 {
            return if self.take_all(run, KernelRun::bytes) { Poll::Ready(Code::Ok) } else { Poll::Pending };
        }
        let Ok((params, _)) = Params::read_from_prefix(run.bytes()) else {
            return Poll::Ready(Code::BadParam);
        };
        match params.command.get() {
            FLUSH => self.finish(run, &params),
            STREAM => self.stream(run, params.number.get()),
            _ => Poll::Ready(Code::Ok),
        }
    }

    fn name(&self) -> &'static str {
        "shuffle"
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

    /// The sender's: a region's values leave by the queue pairs of their partitions, in order.
    #[test]
    fn a_region_is_sent_to_its_partitions() {
        for (bits, count, most) in [(1, 5000u64, 512), (4, 5000, 512), (10, 40_000, 16), (3, 0, 0)] {
            let (mut host, mut kernel) = (TestHost::new(BASE, 1 << 20), Shuffle::default());
            host.own = true;
            let values: Vec<u64> = (0..count).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 7).collect();
            values.iter().enumerate().for_each(|(at, value)| {
                host.put(BASE + at as u64 * 8, &value.to_le_bytes());
            });
            ask(&mut host, &mut kernel, command(BEGIN, bits, 0), &[]);
            for at in 0..1u32 << bits {
                let place = Partition { to: 0.into(), len: (1 << 20).into() };
                let set = Params { qpn: (100 + at).into(), ..command(HISTOGRAM, 9, at) };
                assert_eq!(ask(&mut host, &mut kernel, set, place.as_bytes()).0, Code::Ok);
            }
            let region = Partition { to: BASE.into(), len: (count * 8).into() };
            let streamed = ask(&mut host, &mut kernel, command(STREAM, TestHost::KEY, 0), region.as_bytes());
            assert_eq!(streamed, (Code::Ok, vec![]));
            assert_eq!(ask(&mut host, &mut kernel, command(FLUSH, 0, 0), &[]), (Code::Ok, vec![0]));
            let mut got = vec![Vec::new(); 1 << bits];
            for (qpn, to, data) in std::mem::take(&mut host.sent) {
                let lane: &mut Vec<u8> = &mut got[qpn as usize - 100];
                assert_eq!((to.key, to.va), (9, lane.len() as u64));
                assert!(data.len() <= most * 8);
                lane.extend(data);
            }
            for (at, got) in got.iter().enumerate() {
                let wanted = values.iter().filter(|value| **value as usize % (1 << bits) == at);
                assert_eq!(*got, wanted.flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>());
            }
        }
    }

    /// What the card's own program has begun no peer changes, ends or sees; and a peer sends nothing.
    #[test]
    fn the_programs_own_is_nobody_elses() {
        let (mut host, mut kernel) = (TestHost::new(BASE, 4096), Shuffle::default());
        let place = Partition { to: BASE.into(), len: 64.into() };
        let by_queue_pair = Params { qpn: 7.into(), ..command(HISTOGRAM, TestHost::KEY, 0) };
        let own = |host: &mut TestHost, kernel: &mut Shuffle, params: Params, rest: &[u8]| {
            host.own = true;
            let (code, _) = ask(host, kernel, params, rest);
            host.own = false;
            code
        };
        assert_eq!(ask(&mut host, &mut kernel, command(BEGIN, 1, 0), &[]).0, Code::Ok);
        assert_eq!(ask(&mut host, &mut kernel, by_queue_pair, place.as_bytes()).0, Code::Access);
        assert_eq!(own(&mut host, &mut kernel, command(FLUSH, 0, 0), &[]), Code::Access);
        assert_eq!(own(&mut host, &mut kernel, command(BEGIN, 1, 0), &[]), Code::Ok);
        assert_eq!(own(&mut host, &mut kernel, by_queue_pair, place.as_bytes()), Code::Ok);
        for params in
            [command(BEGIN, 1, 0), command(HISTOGRAM, 0, 0), command(FLUSH, 0, 0), command(STREAM, 0, 0)]
        {
            assert_eq!(ask(&mut host, &mut kernel, params, place.as_bytes()).0, Code::Access);
        }
        assert_eq!(host.feed(&mut kernel, &[0; 64], true, true), Code::Access);
        assert_eq!(
            own(&mut host, &mut kernel, command(STREAM, TestHost::KEY, 0), place.as_bytes()),
            Code::Ok
        );
        assert_eq!(own(&mut host, &mut kernel, command(FLUSH, 0, 0), &[]), Code::Ok);
        assert_eq!(host.sent.iter().map(|(qpn, _, data)| (*qpn, data.len())).collect::<Vec<_>>(), [(7, 64)]);
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
        assert_eq!(code(command(4, 0, 0), &[]), Code::BadParam);
        assert_eq!(code(command(STREAM, 0, 0), &[0; 15]), Code::BadParam);
        assert_eq!(code(command(HISTOGRAM, 0, 0), &[0; 15]), Code::BadParam);
        assert_eq!(code(command(HISTOGRAM, 0, 1024), &[0; 16]), Code::BadParam);
        assert_eq!(code(command(HISTOGRAM, 0, u32::MAX), &[0; 16]), Code::BadParam);
        assert_eq!(code(command(FLUSH, u32::MAX, u32::MAX), &[]), Code::Ok);
        /* memory that is not its own */
        let stranger = Partition { to: BASE.into(), len: 4097.into() };
        assert_eq!(code(command(STREAM, TestHost::KEY, 0), stranger.as_bytes()), Code::Access);
        assert_eq!(code(command(BEGIN, 0, 0), &[]), Code::Ok);
        let place = Partition { to: 8.into(), len: 4096.into() };
        assert_eq!(code(command(HISTOGRAM, TestHost::KEY, 0), place.as_bytes()), Code::Ok);
        assert_eq!(host.feed(&mut kernel, &[0; 8 * DEEPEST as usize], true, false), Code::Ok);
        assert_eq!(host.feed(&mut kernel, &[0; 8], false, true), Code::Access);
    }
}
