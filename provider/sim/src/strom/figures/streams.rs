//! Figures 11 and 13: streams through a kernel on their way to memory.

use starverbs_kernels::hll::{self, Estimate};
use starverbs_kernels::shuffle::{self, PARTITIONS, Partition};
use starverbs_kernels::{Hll, Shuffle};
use zerocopy::{FromBytes, IntoBytes};

use super::micro::{self, Verb};
use super::{HUNDRED, Params, TEN};
use crate::Figure;
use crate::Rng;
use crate::rnic::Picos;
use crate::strom::pair::{Pair, PairStep};
use crate::strom::program::ProgramRegion;

/// Picoseconds of a millisecond.
const MS: f64 = 1e9;
/// The kernels' op-code.
pub(super) const OP: u64 = 1;
/// Bytes of a value, and of a partition's buffer.
const VALUE: u32 = 8;
const BUFFER: u32 = 128;
/// Partitions that a histogram's message describes: a packet of 1,024 bytes.
const DESCRIBED: usize = 61;
/// WRITEs that the sender has under way at most.
const DEPTH: u64 = 256;

/// Values for 1,024 partitions, and where they go.
struct Data {
    pair: Pair,
    values: Vec<u64>,
    source: ProgramRegion,
    target: ProgramRegion,
    /// First byte and length of each partition in the target
    partitions: Vec<(u32, u32)>,
}

impl Data {
    fn new(params: &'static Params, kilobytes: u32) -> Data {
        let mut pair = Pair::new(params);
        let mut rng = Rng::new(11);
        let values: Vec<u64> = (0..kilobytes * 1024 / VALUE).map(|_| rng.bits()).collect();
        let mut counts = vec![0_u32; PARTITIONS];
        values.iter().for_each(|value| counts[*value as usize % PARTITIONS] += 1);
        let mut at = 0;
        let partitions = counts.iter().map(|count| {
            let place = (at, count * VALUE);
            at += count * VALUE;
            place
        });
        let partitions = partitions.collect();
        let [source, target] = [0, 1].map(|at| pair.region(at, kilobytes * 1024));
        pair.put(0, source, values.as_bytes());
        Data { pair, values, source, target, partitions }
    }

    /// All values are where they belong.
    fn check(&self) {
        let bytes = self.pair.bytes(1, self.target);
        for (partition, (first, len)) in self.partitions.iter().enumerate() {
            let own = &bytes[*first as usize..][..*len as usize];
            let mut words = own.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
            assert!(words.all(|value| value as usize % PARTITIONS == partition));
        }
        self.pair.check();
    }

    /// One WRITE of all of it as it is.
    fn plain(mut self) -> Picos {
        self.pair.write(0, 0, self.source, self.target);
        let time = self.pair.until(1, self.target.last());
        assert!(self.pair.bytes(1, self.target) == self.values.as_bytes());
        self.pair.check();
        time
    }

    /// The kernel gets the histogram, the stream, and flushes what is left; until its answer is there.
    fn by_kernel(mut self) -> Picos {
        self.pair.load(OP, Box::<Shuffle>::default());
        let command = |command: u32, number: u32, first: usize| shuffle::Params {
            command: command.into(),
            number: number.into(),
            first: (first as u32).into(),
            qpn: 0.into(),
        };
        let begin = command(shuffle::BEGIN, PARTITIONS.ilog2(), 0);
        self.pair.tell(0, OP, begin.as_bytes());
        let (key, base) = (self.target.key, self.target.addr);
        let places = self.partitions.iter().map(|(first, len)| Partition {
            to: (base + u64::from(*first)).into(),
            len: u64::from(*len).into(),
        });
        let places: Vec<Partition> = places.collect();
        for (number, some) in places.chunks(DESCRIBED).enumerate() {
            let head = command(shuffle::HISTOGRAM, key, number * DESCRIBED);
            self.pair.tell(0, OP, &[head.as_bytes(), some.as_bytes()].concat());
        }
        self.pair.stream(0, OP, self.source);
        let answer = self.pair.region(0, 2 * VALUE + 16);
        let flush = command(shuffle::FLUSH, 1, 0);
        let (time, code, data) = self.pair.ask(0, OP, flush.as_bytes(), answer);
        let first = u64::from(self.partitions[0].1 / VALUE);
        assert_eq!((code, data), (0, [first.to_le_bytes(), [0; 8]].concat()), "no value found no room");
        self.check();
        time
    }

    /// The sender has the values in order of partitions, which took no time, and writes each buffer of 16.
    fn by_writes(mut self) -> Picos {
        let mut sorted = self.values.clone();
        sorted.sort_by_key(|value| *value as usize % PARTITIONS);
        self.pair.put(0, self.source, sorted.as_bytes());
        let pieces: Vec<(u32, u32)> = self.buffers();
        let (mut posted, mut left, mut time) = (0, u64::from(self.target.len), 0);
        while left > 0 {
            while let Some((first, len)) = pieces.get(posted)
                && posted as u64 - self.pair.completed[0] < DEPTH
            {
                let (now, own) = (self.pair.now(), self.source.part(*first, *len));
                self.pair.write(0, now, own, self.target.part(*first, *len));
                posted += 1;
            }
            if let PairStep::Written(1, seg) = self.pair.step().expect("WRITEs come") {
                left -= u64::from(seg.len);
                time = self.pair.now() + self.pair.params.poll;
            }
        }
        self.check();
        time
    }

    /// Buffers of all partitions, in the order in which a sender's would be full: one of each in turn.
    fn buffers(&self) -> Vec<(u32, u32)> {
        let most = self.partitions.iter().map(|(_, len)| len.div_ceil(BUFFER)).max().unwrap_or(0);
        let of_round = |round: u32| {
            let buffer = move |(first, len): &(u32, u32)| {
                let from = (round * BUFFER).min(*len);
                (first + from, (len - from).min(BUFFER))
            };
            self.partitions.iter().map(buffer).filter(|(_, len)| *len > 0).collect::<Vec<_>>()
        };
        (0..most).flat_map(of_round).collect()
    }
}

pub(super) const SHUFFLE: Figure = Figure {
    name: "strom-11",
    title: "StRoM, figure 11: partitioning and transmitting values of 8 bytes, 1,024 partitions, 10 Gb/s",
    x: "data, KB",
    y: "ms",
    note: "WRITE: one of all data, as it is. StRoM: the shuffling kernel; from the first message of the \
           histogram until the answer to the flush. WRITEs of buffers: the sender partitions, which takes \
           no time here, and writes each 16 values by themselves (the paper's SW + RDMA WRITE without its \
           software).",
    values: &[256, 512, 1024, 2048],
    series: &["WRITE", "StRoM", "WRITEs of buffers"],
    run: |figure| {
        let line = |way: fn(Data) -> Picos| {
            figure.values.iter().map(|kilobytes| way(Data::new(&TEN, *kilobytes)) as f64 / MS).collect()
        };
        vec![line(Data::plain), line(Data::by_kernel), line(Data::by_writes)]
    },
};

pub(super) const SHUFFLE_RATE: Figure = Figure {
    name: "strom-11rate",
    title: "StRoM, section 7: the shuffling kernel by link rate, 2 MB",
    x: "link, Gb/s",
    y: "Gb/s of values",
    note: "As figure 11, on the cards of 10 and 100 Gb/s.",
    values: &[10, 100],
    series: &["WRITE", "StRoM"],
    run: |figure| {
        let line = |way: fn(Data) -> Picos| {
            let gbits = |link: &u32| {
                let params: &'static Params = if *link == 10 { &TEN } else { &HUNDRED };
                f64::from(2_u32 << 20) * 8.0 * 1e3 / way(Data::new(params, 2048)) as f64
            };
            figure.values.iter().map(gbits).collect()
        };
        vec![line(Data::plain), line(Data::by_kernel)]
    },
};

/// Host 1's kernel sends streams on to `memory`.
pub(super) fn sketch(pair: &mut Pair, memory: ProgramRegion) {
    pair.load(OP, Box::<Hll>::default());
    let to = hll::Params {
        command: hll::TO.into(),
        rkey: memory.key.into(),
        to: memory.addr.into(),
        len: u64::from(memory.len).into(),
    };
    estimate(pair, to);
}

/// Asks the sketch.
pub(super) fn estimate(pair: &mut Pair, params: hll::Params) -> Estimate {
    let (now, answer) = (pair.now(), pair.region(0, 24 + 16));
    let (_, code, data) = pair.ask(now, OP, params.as_bytes(), answer);
    assert_eq!(code, 0, "the sketch answers");
    Estimate::read_from_bytes(&data).expect("24 bytes")
}

pub(super) const SKETCH: Figure = Figure {
    name: "strom-13",
    title: "StRoM, figure 13(b): HyperLogLog over a stream, 100 Gb/s",
    x: "payload, bytes",
    y: "Gb/s of payload",
    note: "WRITE, and RPC WRITE to the HyperLogLog kernel, which sends the stream on to memory; messages as \
           in figure 12. The kernel counts what it got. HyperLogLog on the CPU (13(a)) is not run.",
    values: &[64, 256, 1024, 2048, 4096, 16_384, 65_536],
    series: &["WRITE", "StRoM, HyperLogLog"],
    run: |figure| {
        let line = |verb| figure.values.iter().map(|bytes| micro::gbits(&HUNDRED, verb, *bytes)).collect();
        [Verb::Write, Verb::Stream].map(line).into()
    },
};
