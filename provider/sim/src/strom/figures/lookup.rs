//! Figures 7 and 8: looking a key up in the peer's memory, hop by hop over the wire or by a kernel.

use starverbs_kernels::traverse::{EQUAL, NEXT, Params as Traversal};
use starverbs_kernels::{Get, Traverse, get};
use zerocopy::IntoBytes;

use super::{Params, TEN, TEN_STORES, US};
use crate::Figure;
use crate::rnic::Picos;
use crate::strom::pair::Pair;
use crate::strom::program::ProgramRegion;

/// Op-codes of the kernels.
const TRAVERSE: u64 = 1;
const GET: u64 = 2;
/// Of which no kernel answers.
const NOBODY: u64 = 3;
/// Bytes of an element, and of a list's value (figure 7).
const ELEMENT: u32 = 64;
/// Where an element has its next and its value, in bytes (6.2, figure 6: slots of four bytes).
const NEXT_AT: usize = 8;
const VALUE_AT: usize = 16;

/// A list of host 1: keys 1, 2, and so on.
struct List {
    pair: Pair,
    memory: ProgramRegion,
    length: u32,
    element: ProgramRegion,
    answer: ProgramRegion,
}

impl List {
    fn new(length: u32) -> List {
        let mut pair = Pair::new(&TEN);
        pair.load(TRAVERSE, Box::new(Traverse));
        let memory = pair.region(1, 2 * length * ELEMENT);
        for at in 0..length {
            let mut element = [0; ELEMENT as usize];
            let address = |index: u32| (memory.addr + u64::from(index * ELEMENT)).to_le_bytes();
            element[..8].copy_from_slice(&u64::from(at + 1).to_le_bytes());
            if at + 1 < length {
                element[NEXT_AT..NEXT_AT + 8].copy_from_slice(&address(at + 1));
            }
            element[VALUE_AT..VALUE_AT + 8].copy_from_slice(&address(length + at));
            pair.put(1, memory.part(at * ELEMENT, ELEMENT), &element);
            pair.put(1, memory.part((length + at) * ELEMENT, ELEMENT), &[at as u8; ELEMENT as usize]);
        }
        let (element, answer) = (pair.region(0, ELEMENT), pair.region(0, ELEMENT + 16));
        List { pair, memory, length, element, answer }
    }

    fn place(&self, address: u64) -> ProgramRegion {
        self.memory.part((address - self.memory.addr) as u32, ELEMENT)
    }

    /// Follows the list by READs; gives when the value is there.
    fn by_reads(&mut self, time: Picos, key: u64) -> Picos {
        let (mut time, mut at) = (time, self.memory.addr);
        loop {
            time = self.fetch(time, at);
            let element = self.pair.bytes(0, self.element);
            let word = |at: usize| u64::from_le_bytes(*element[at..].first_chunk().expect("eight bytes"));
            if word(0) == key {
                at = word(VALUE_AT);
                break;
            }
            at = word(NEXT_AT);
        }
        time = self.fetch(time, at);
        assert_eq!(self.pair.bytes(0, self.element)[0], key as u8 - 1, "the key's value");
        time
    }

    fn fetch(&mut self, time: Picos, address: u64) -> Picos {
        let from = self.place(address);
        self.pair.read(0, time, self.element, from);
        self.pair.until(0, self.element.last())
    }

    /// Has the kernel follow it.
    fn by_kernel(&mut self, time: Picos, key: u64) -> Picos {
        let params = Traversal {
            element: self.memory.addr.into(),
            key: key.into(),
            rkey: self.memory.key.into(),
            len: ELEMENT.into(),
            mask: 1.into(),
            predicate: EQUAL,
            value: (VALUE_AT / 4) as u8,
            next: (NEXT_AT / 4) as u8,
            child: 0,
            flags: NEXT,
            hops: self.length as u8,
        };
        let (time, code, value) = self.pair.ask(time, TRAVERSE, params.as_bytes(), self.answer);
        assert_eq!((code, value), (0, vec![key as u8 - 1; ELEMENT as usize]), "the key's value");
        time
    }

    /// Mean time to look a key up, ps: each is looked up once.
    fn mean(length: u32, look: fn(&mut List, Picos, u64) -> Picos) -> f64 {
        let mut list = List::new(length);
        let mut time = 0;
        for key in 1..=length {
            time = look(&mut list, time, key.into());
        }
        list.pair.check();
        time as f64 / f64::from(length)
    }
}

/// Of READs and of the kernel, at each length.
fn lists(lengths: &[u32]) -> Vec<Vec<f64>> {
    let line = |look: fn(&mut List, Picos, u64) -> Picos| {
        lengths.iter().map(|length| List::mean(*length, look) / US).collect()
    };
    vec![line(List::by_reads), line(List::by_kernel)]
}

pub(super) const LIST: Figure = Figure {
    name: "strom-7",
    title: "StRoM, figure 7: looking up a key in a linked list, 10 Gb/s",
    x: "length of the list",
    y: "us, mean of all keys",
    note: "Values of 64 B. READ: one for each element, then one of the value; a program knows 80 ns after \
           memory has changed and goes on at once. StRoM: the traversal kernel. RPC over TCP is not run: it \
           is the host's CPU.",
    values: &[2, 4, 8, 16, 32],
    series: &["READ", "StRoM"],
    run: |figure| lists(figure.values),
};

pub(super) const HOP: Figure = Figure {
    name: "strom-7hop",
    title: "StRoM, figure 7: what a further element of the list takes",
    x: "length of the list",
    y: "us an element",
    note: "Of the runs of figure 7: the difference to a list of half the length, by the elements that are \
           looked at, half of those of the list.",
    values: &[4, 8, 16, 32],
    series: &["READ", "StRoM"],
    run: |figure| {
        let lines = lists(LIST.values);
        let hop = |line: &Vec<f64>| {
            let further = line.windows(2).zip(figure.values);
            further.map(|(pair, length)| (pair[1] - pair[0]) / (f64::from(*length) / 4.0)).collect()
        };
        lines.iter().map(hop).collect()
    },
};

/// A hash table with one entry, whose key leads to a value.
struct Table {
    pair: Pair,
    memory: ProgramRegion,
    value: u32,
    own: ProgramRegion,
    answer: ProgramRegion,
}

/// Bytes in front of the value.
const ENTRY: u32 = 64;
/// The key that is looked up.
const KEY: u64 = 7;

impl Table {
    fn new(params: &'static Params, value: u32) -> Table {
        let mut pair = Pair::new(params);
        pair.load(TRAVERSE, Box::new(Traverse));
        pair.load(GET, Box::new(Get));
        let memory = pair.region(1, ENTRY + value);
        let found = get::Bucket {
            key: KEY.into(),
            value: (memory.addr + u64::from(ENTRY)).into(),
            len: value.into(),
        };
        let mut entry = get::HashEntry::default();
        entry.buckets[0] = found;
        pair.put(1, memory, entry.as_bytes());
        pair.put(1, memory.part(ENTRY, value), &vec![9; value as usize]);
        let (own, answer) = (pair.region(0, value.max(ENTRY)), pair.region(0, value + 16));
        Table { pair, memory, value, own, answer }
    }

    /// Two READs: the entry, and the value that it names.
    fn by_reads(mut self) -> Picos {
        let entry = self.own.part(0, ENTRY);
        self.pair.read(0, 0, entry, self.memory);
        let time = self.pair.until(0, entry.last());
        let word = |at: usize| {
            let own = self.pair.bytes(0, entry);
            u64::from_le_bytes(*own[at..].first_chunk().expect("eight bytes"))
        };
        assert_eq!((word(0), word(8)), (KEY, self.memory.addr + u64::from(ENTRY)));
        let own = self.own.part(0, self.value);
        self.pair.read(0, time, own, self.memory.part(ENTRY, self.value));
        let time = self.pair.until(0, own.last());
        self.pair.check();
        time
    }

    fn ask(mut self, op: u64, params: &[u8]) -> Picos {
        let (time, code, value) = self.pair.ask(0, op, params, self.answer);
        let found = (code, value) == (0, vec![9; self.value as usize]);
        assert!(found || op == NOBODY, "the key's value");
        self.pair.check();
        time
    }

    fn by_traversal(self) -> Picos {
        let params = Traversal {
            element: self.memory.addr.into(),
            key: KEY.into(),
            rkey: self.memory.key.into(),
            len: self.value.into(),
            mask: 1.into(),
            predicate: EQUAL,
            value: 2,
            hops: 1,
            ..Traversal::default()
        };
        self.ask(TRAVERSE, params.as_bytes())
    }

    fn by_get(self) -> Picos {
        let params = get::Params {
            table: self.memory.addr.into(),
            key: KEY.into(),
            table_key: self.memory.key.into(),
            value_key: self.memory.key.into(),
            hops: 1.into(),
            ..get::Params::default()
        };
        self.ask(GET, params.as_bytes())
    }

    /// A round trip, and nothing else.
    fn by_nobody(self) -> Picos {
        self.ask(NOBODY, &[0; 32])
    }
}

pub(super) const HASH: Figure = Figure {
    name: "strom-8",
    title: "StRoM, figure 8: looking up a key in a hash table, 10 Gb/s",
    x: "value, bytes",
    y: "us",
    note: "The entry that is looked at has the key. READ: the entry, then the value. StRoM: the traversal \
           kernel, as the paper has it, and the GET kernel of 5.2. Saved: READ less the traversal kernel. A \
           round trip: an RPC that no kernel answers, from command to record. Further stores: our 56 bytes \
           of parameters take two stores of 178 ns beside the one that the paper has.",
    values: &[64, 128, 256, 512, 1024, 2048],
    series: &["READ", "StRoM", "StRoM, GET", "StRoM, further stores", "saved", "a round trip"],
    run: |figure| {
        let line = |params, look: fn(Table) -> Picos| -> Vec<f64> {
            figure.values.iter().map(|value| look(Table::new(params, *value)) as f64 / US).collect()
        };
        let (reads, kernel) = (line(&TEN, Table::by_reads), line(&TEN, Table::by_traversal));
        let saved = reads.iter().zip(&kernel).map(|(reads, kernel)| reads - kernel).collect();
        let stores = line(&TEN_STORES, Table::by_traversal);
        vec![reads, kernel, line(&TEN, Table::by_get), stores, saved, line(&TEN, Table::by_nobody)]
    },
};
