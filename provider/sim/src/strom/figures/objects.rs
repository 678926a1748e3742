//! Figures 9 and 10: reading an object whose last bytes are its CRC, as it is, or by the consistency kernel.

use starverbs_kernels::Consistent;
use starverbs_kernels::consistent::{Params as Object, is_consistent};
use starverbs_kernels::crc64::crc64;
use zerocopy::IntoBytes;

use super::{Params, TEN, TEN_STORES, US};
use crate::Figure;
use crate::rnic::Picos;
use crate::strom::pair::Pair;
use crate::strom::program::ProgramRegion;

/// The kernel's op-code.
const OP: u64 = 1;
/// Operations of which a mean is taken: a thousandth of them is one.
const OPERATIONS: u64 = 1000;

/// An object of host 1.
struct Store {
    pair: Pair,
    object: ProgramRegion,
    own: ProgramRegion,
    answer: ProgramRegion,
}

impl Store {
    fn new(params: &'static Params, bytes: u32) -> Store {
        let mut pair = Pair::new(params);
        pair.load(OP, Box::new(Consistent));
        let object = pair.region(1, bytes);
        let data: Vec<u8> = (0..bytes - 8).map(|at| at as u8).collect();
        let whole = [&data[..], &crc64(0, &data).to_le_bytes()].concat();
        pair.put(1, object, &whole);
        let (own, answer) = (pair.region(0, bytes), pair.region(0, bytes + 16));
        Store { pair, object, own, answer }
    }

    /// The host's program is in the middle of a change, or is done.
    fn tear(&mut self, torn: bool) {
        self.pair.put(1, self.object, &[u8::from(torn) * 0xff]);
    }

    /// READs until the object is consistent; the first finds it torn if that is so.
    fn by_reads(&mut self, time: Picos, torn: bool) -> Picos {
        let (mut time, mut tries) = (time, 0);
        self.tear(torn);
        loop {
            self.pair.read(0, time, self.own, self.object);
            time = self.pair.until(0, self.own.last());
            tries += 1;
            if is_consistent(self.pair.bytes(0, self.own)) {
                assert_eq!(tries, 1 + u32::from(torn));
                return time;
            }
            self.tear(false);
        }
    }

    /// Has the kernel read until it is.
    fn by_kernel(&mut self, time: Picos, torn: bool) -> Picos {
        let params = Object {
            object: self.object.addr.into(),
            rkey: self.object.key.into(),
            len: self.object.len.into(),
            tries: 2.into(),
            reserved: 0.into(),
        };
        self.tear(torn);
        let first = self.object.addr;
        let mut reads = 0;
        self.pair.before_read(Box::new(move |memory| {
            reads += 1;
            if reads == 2 {
                memory.write(first, &[0]);
            }
        }));
        let (time, code, data) = self.pair.ask(time, OP, params.as_bytes(), self.answer);
        assert!(code == 0 && is_consistent(&data), "a consistent object");
        time
    }
}

type Read = fn(&mut Store, Picos, bool) -> Picos;

/// Mean time to have an object of `bytes`, ps, of which so many of a thousand are torn when they are first
/// read.
fn mean(bytes: u32, read: Read, torn: u32) -> f64 {
    mean_on(&TEN, bytes, read, torn)
}

fn mean_on(params: &'static Params, bytes: u32, read: Read, torn: u32) -> f64 {
    let mut store = Store::new(params, bytes);
    let mut time = 0;
    let operations = if torn == 0 { 1 } else { OPERATIONS };
    for operation in 0..operations {
        let so_far = |operations: u64| operations * u64::from(torn) / OPERATIONS;
        time = read(&mut store, time, so_far(operation + 1) > so_far(operation));
    }
    store.pair.check();
    time as f64 / operations as f64
}

pub(super) const SIZE: Figure = Figure {
    name: "strom-9",
    title: "StRoM, figure 9: reading an object with a CRC64, 10 Gb/s",
    x: "object, bytes",
    y: "us",
    note: "READ: nobody checks the CRC. StRoM: the consistency kernel does, which holds the object until it \
           has seen all of it. Further stores: as in figure 8. The check in software (READ+SW) is not run: \
           it is the host's CPU.",
    values: &[64, 128, 256, 512, 1024, 2048, 4096],
    series: &["READ", "StRoM", "StRoM, further stores"],
    run: |figure| {
        let line = |params, read: Read| {
            figure.values.iter().map(|bytes| mean_on(params, *bytes, read, 0) / US).collect()
        };
        vec![line(&TEN, Store::by_reads), line(&TEN, Store::by_kernel), line(&TEN_STORES, Store::by_kernel)]
    },
};

pub(super) const FAILURES: Figure = Figure {
    name: "strom-10",
    title: "StRoM, figure 10: reading an object that is torn, 10 Gb/s",
    x: "objects that are torn when they are first read, of a thousand",
    y: "us, mean of 1,000",
    note: "The second read finds the object whole. READ: the program checks, which takes no time here, and \
           reads again.",
    values: &[0, 10, 100, 500],
    series: &["READ, 64 B", "READ, 4 KB", "StRoM, 64 B", "StRoM, 4 KB"],
    run: |figure| {
        let line = |(read, bytes): (Read, u32)| {
            figure.values.iter().map(|torn| mean(bytes, read, *torn) / US).collect()
        };
        let (reads, kernel): (Read, Read) = (Store::by_reads, Store::by_kernel);
        [(reads, 64), (reads, 4096), (kernel, 64), (kernel, 4096)].map(line).into()
    },
};

pub(super) const REREAD: Figure = Figure {
    name: "strom-10re",
    title: "StRoM, figure 10: what torn objects add, StRoM by READ",
    x: "object, bytes",
    y: "share",
    note: "Half of the objects are torn when they are first read: what that adds to the mean with StRoM, by \
           what it adds with READ.",
    values: &[64, 512, 4096],
    series: &["StRoM / READ"],
    run: |figure| {
        let added = |bytes, read: Read| mean(bytes, read, 500) - mean(bytes, read, 0);
        let share = |bytes: &u32| added(*bytes, Store::by_kernel) / added(*bytes, Store::by_reads);
        vec![figure.values.iter().map(share).collect()]
    },
};
