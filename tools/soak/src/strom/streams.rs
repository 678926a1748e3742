//! The shuffle and HyperLogLog kernels of a host, which all its peers share: what peers ask of them, and what
//! must then be in the host's memory.
//!
//! The kernels are watched: what they were started with, and in which order, is checked against what was
//! posted as the journal's notes are; the models are fed with that. Where one request began before another
//! was done, or a queue pair ended under one, the order of values within is nobody's promise: then, until
//! partitions begin anew, memory must show values that were sent, and nothing else.

use std::collections::HashSet;

use starverbs_core::Access;
use starverbs_core::strom::Code;
use starverbs_kernels::{hll, shuffle};
use starverbs_sim::{READ, Rng, SimHost, WRITE};
use zerocopy::IntoBytes;

use super::partitions::Partitions;
use super::sketched::Sketched;
use super::{Answer, BLANK};
use crate::plan::Whose;
use crate::summary::Summary;
use crate::world::Site;

/// RPC op-codes of the kernels.
pub(super) const SHUFFLE: u64 = 0x1_0000_0014;
pub(super) const HLL: u64 = 0x1_0000_0015;
/// Bytes of the memory that each writes to.
const PAGE: usize = 16 << 10;
/// Partitions that most values go to, and of how many there are some.
pub(super) const BUSY: [u64; 4] = [0, 1, 2, 517];
pub(super) const BITS: [u32; 4] = [0, 2, 10, 10];

/// What a kernel was started with.
pub(super) enum Job {
    Call(Vec<u8>),
    Packet(Vec<u8>),
}

/// Memory that a kernel writes to, and what must be there.
struct Page {
    addr: u64,
    key: u32,
    bytes: Vec<u8>,
}

impl Page {
    fn new(host: &mut SimHost) -> Self {
        let (addr, key) = host.region(PAGE as u64, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        let bytes = vec![BLANK; PAGE];
        host.env.memory.write(addr, &bytes);
        host.env.memory.allow(addr, PAGE as u64, READ | WRITE);
        Page { addr, key, bytes }
    }

    fn write(&mut self, to: u64, data: &[u8]) {
        let at = (to - self.addr) as usize;
        self.bytes[at..at + data.len()].copy_from_slice(data);
    }

    fn there<'h>(&self, host: &'h SimHost) -> &'h [u8] {
        host.env.memory.read(self.addr, PAGE)
    }
}

impl Site {
    pub(super) fn streams(&mut self) -> Option<&mut Streams> {
        self.kernels.as_mut()?.streams.as_mut()
    }
}

/// The kernels of a host.
pub(crate) struct Streams {
    /// What a kernel has begun for an end, and is not known to have done
    running: Vec<(Whose, u64, Job)>,
    shuffle: Page,
    partitions: Partitions,
    sketch: Page,
    sketched: Sketched,
    /// All values that partitions may have
    sent: HashSet<u64>,
    /// The order of values is not known
    unclear: bool,
    /// Something happened since the last look at memory
    news: bool,
}

/// `len` bytes of values for partitions, each of which no other stream has.
pub(super) fn values(rng: &mut Rng, (c, e): Whose, seq: u64, len: u32) -> Vec<u8> {
    let stray = rng.chance(0.2);
    let words = (0..u64::from(len.div_ceil(8))).flat_map(|at| {
        let lane = if stray && rng.chance(0.1) { rng.below(1024) } else { rng.pick(&BUSY) };
        (((1 + 2 * c + e) as u64) << 48 | (seq & 0xffff) << 32 | at << 10 | lane).to_le_bytes()
    });
    words.take(len as usize).collect()
}

/// `len` bytes of items, many of which come again.
pub(super) fn items(rng: &mut Rng, len: u32) -> Vec<u8> {
    let words = (0..len.div_ceil(4)).flat_map(|_| (rng.below(1 << 14) as u32).to_le_bytes());
    words.take(len as usize).collect()
}

impl Streams {
    pub(super) fn new(host: &mut SimHost) -> Self {
        Streams {
            running: vec![],
            shuffle: Page::new(host),
            partitions: Partitions::default(),
            sketch: Page::new(host),
            sketched: Sketched::default(),
            sent: HashSet::new(),
            unclear: false,
            news: false,
        }
    }

    /// A kernel begins with something for an end.
    pub(super) fn began(&mut self, who: Whose, op: u64, job: Job) {
        if let (SHUFFLE, Job::Packet(data)) = (op, &job) {
            self.sent.extend(data.as_chunks().0.iter().map(|value| u64::from_le_bytes(*value)));
        }
        self.news = true;
        self.unclear |= self.running.iter().any(|(_, of, _)| *of == op);
        self.running.retain(|(whose, ..)| *whose != who);
        self.running.push((who, op, job));
    }

    /// It is done. `None`: with a packet; else how an RPC must have ended, if that can be said.
    ///
    /// # Panics
    /// It ended otherwise, or had not begun.
    pub(super) fn done(&mut self, who: Whose, op: u64, code: Code) -> Option<Option<Answer>> {
        let at = self.running.iter().position(|(whose, of, _)| (*whose, *of) == (who, op));
        let (.., job) = self.running.remove(at.expect("a kernel ended what it had not begun"));
        let is_call = matches!(job, Job::Call(_));
        let answer = match (op, job) {
            (SHUFFLE, job) => self.shuffled(job),
            (_, Job::Call(params)) => Some(self.sketched.command(&params)),
            (_, Job::Packet(data)) => {
                if let Some((to, data)) = self.sketched.take(&data) {
                    self.sketch.write(to, &data);
                }
                Some(Answer::ok(vec![]))
            }
        };
        if let Some(answer) = &answer {
            assert_eq!(answer.code, code, "{who:?}: a kernel ended otherwise");
        }
        is_call.then_some(answer)
    }

    fn shuffled(&mut self, job: Job) -> Option<Answer> {
        let (answer, writes) = match job {
            Job::Call(params) => {
                let begins = params.get(..4) == Some(&shuffle::BEGIN.to_le_bytes());
                let answered = self.partitions.command(&params);
                if begins && answered.0.code == Code::Ok && self.running.iter().all(|r| r.1 != SHUFFLE) {
                    self.unclear = false;
                }
                answered
            }
            Job::Packet(data) => {
                let values = data.as_chunks().0.iter().map(|value| u64::from_le_bytes(*value));
                let writes = values.filter_map(|value| self.partitions.take(value)).collect();
                (Answer::ok(vec![]), writes)
            }
        };
        writes.iter().for_each(|write| self.shuffle.write(write.to, &write.bytes));
        (!self.unclear).then_some(answer)
    }

    /// The queue pair of an end has ended: nobody works for it.
    pub(super) fn ended(&mut self, who: Whose) {
        let before = self.running.len();
        self.running.retain(|(whose, ..)| *whose != who);
        self.unclear |= self.running.len() != before;
    }

    /// The kernels are gone, with what they had begun; others have taken their place, or will.
    pub(super) fn forget(&mut self, host: &SimHost) {
        self.shuffle.bytes = self.shuffle.there(host).to_vec();
        self.running.clear();
        (self.partitions, self.sketched) = (Partitions::default(), Sketched::default());
        self.unclear = false;
    }

    /// Panics unless memory is as it must be.
    pub(super) fn check(&mut self, host: &SimHost, summary: &mut Summary) {
        if !std::mem::take(&mut self.news) {
            return;
        }
        assert!(self.sketch.there(host) == self.sketch.bytes, "memory is not what streams brought");
        let there = self.shuffle.there(host);
        if !self.unclear && self.running.iter().all(|(_, op, _)| *op != SHUFFLE) {
            assert!(there == self.shuffle.bytes, "partitions are not what streams brought");
            return summary.add("partitions", "looked at", 1);
        }
        summary.add("partitions", "in no known order", 1);
        let words = there.as_chunks().0.iter().zip(self.shuffle.bytes.as_chunks::<8>().0);
        let strange = words.filter(|(there, before)| there != before);
        let strange = strange.map(|(there, _)| u64::from_le_bytes(*there));
        let strange: Vec<u64> = strange.filter(|value| !self.sent.contains(value)).collect();
        assert!(strange.is_empty(), "partitions have what nobody sent: {strange:x?}");
        self.shuffle.bytes.copy_from_slice(there);
    }

    /// What a peer asks by RPC: op-code, parameters of `most` bytes, and about how long the answer is.
    pub(super) fn ask(&self, rng: &mut Rng, most: usize, longest: u32) -> (u64, Vec<u8>, Answer) {
        if rng.chance(0.4) {
            return self.ask_sketch(rng);
        }
        let bits = rng.pick(&BITS);
        let mut params = shuffle::Params::default();
        let mut places = vec![];
        let mut answer = 0;
        match rng.below(8) {
            0 => {
                params.command = shuffle::BEGIN.into();
                params.number = if rng.chance(0.05) { 11 } else { bits }.into();
            }
            1..=4 => {
                let stride = PAGE as u64 >> 10;
                let first = rng.pick(&BUSY);
                let count = rng.within(1, ((most - 16) as u64 / 16).min(8));
                (params.command, params.number) = (shuffle::HISTOGRAM.into(), self.shuffle.key.into());
                params.first = (first as u32).into();
                /* the last one has room for more, as nobody has the places behind it */
                for at in first..first + count {
                    let to = self.shuffle.addr + at * stride;
                    let longest = if at + 1 == first + count { PAGE as u64 / 4 } else { stride };
                    let len = rng.below(longest + 1);
                    places.push(shuffle::Partition { to: to.into(), len: len.into() });
                }
                params.qpn = u32::from(rng.chance(0.02)).into();
            }
            _ => {
                let count = rng.below(u64::from(longest.saturating_sub(8) / 8).min(6) + 1) as u32;
                (params.command, params.number) = (shuffle::FLUSH.into(), count.into());
                params.first = (rng.pick(&BUSY) as u32).into();
                answer = 8 * count as usize + 8;
            }
        }
        let mut all = [params.as_bytes(), places.as_bytes()].concat();
        if rng.chance(0.02) {
            all.pop();
        }
        (SHUFFLE, all, Answer::ok(vec![0; answer]))
    }

    fn ask_sketch(&self, rng: &mut Rng) -> (u64, Vec<u8>, Answer) {
        let command = rng.pick(&[hll::ESTIMATE, hll::ESTIMATE, hll::RESET, hll::TO, hll::TO, 3]);
        let mut params = hll::Params { command: command.into(), ..hll::Params::default() };
        if command == hll::TO {
            let from = rng.below(PAGE as u64);
            params.rkey = self.sketch.key.into();
            params.to = (self.sketch.addr + from).into();
            params.len = rng.below(PAGE as u64 - from + 1).into();
        }
        let mut all = params.as_bytes().to_vec();
        if rng.chance(0.02) {
            all.pop();
        }
        (HLL, all, Answer::ok(vec![0; size_of::<hll::Estimate>()]))
    }
}
