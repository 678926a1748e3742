//! Memory that the kernels of every card look at: a hash table with a chain, a list, and objects with and
//! without a right CRC. It never changes, so that whoever asks knows the answer.

use starverbs_core::Access;
use starverbs_core::strom::Code;
use starverbs_kernels::crc64::crc64;
use starverbs_kernels::{consistent, get, traverse};
use starverbs_sim::{READ, Rng, SimHost};
use zerocopy::IntoBytes;

use super::Answer;

/// RPC op-codes of the kernels.
pub(crate) const GET: u64 = 0x1_0000_0011;
pub(crate) const TRAVERSE: u64 = 0x1_0000_0012;
pub(crate) const CONSISTENT: u64 = 0x1_0000_0013;

/* places in the shelf: entries of 64 bytes from 0 on, elements, objects, values */
const ENTRIES: u64 = 5;
const LIST: u64 = 512;
const ELEMENTS: u64 = 6;
const OBJECTS: u64 = 1024;
const OBJECT: u64 = 1024;
const VALUES: u64 = 4096;
const VALUE: u64 = 1024;
const KEYS: u64 = 3 * (ENTRIES - 1);
const LEN: u64 = VALUES + (KEYS + 1) * VALUE;
/// Bytes of a value that a traversal finds.
const FOUND: u32 = 40;

/// Bytes of the value of a key of the table; some take several packets.
fn length(key: u64) -> u64 {
    [0, 1, 17, 256, 300, VALUE][key as usize % 6]
}

fn value(key: u64, len: u64) -> Vec<u8> {
    (0..len).map(|at| (key * 16 + at * 7) as u8).collect()
}

/// Bytes of object `n`, its CRC included; the second has a wrong one.
fn object(n: u64) -> Vec<u8> {
    let data = value(n + 99, [0, 50, 500][n as usize]);
    let crc = crc64(0, &data) ^ u64::from(n == 1);
    [&data[..], &crc.to_le_bytes()].concat()
}

/// The memory: first byte and key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shelf {
    addr: u64,
    key: u32,
}

impl Shelf {
    /// Puts it into a host's memory.
    pub(crate) fn new(host: &mut SimHost) -> Self {
        let (addr, key) = host.region(LEN, Access::LOCAL_WRITE | Access::REMOTE_READ);
        host.env.memory.write(addr, &[0; LEN as usize]);
        host.env.memory.allow(addr, LEN, READ);
        let shelf = Shelf { addr, key };
        for entry in 1..ENTRIES {
            host.env.memory.write(addr + entry * 64, shelf.entry(entry).as_bytes());
        }
        for key in 0..=KEYS {
            host.env.memory.write(shelf.value_at(key), &value(key, VALUE));
        }
        for n in 0..ELEMENTS {
            let next = if n + 1 < ELEMENTS { shelf.element(n + 1) } else { 0 };
            let words = [n + 1, shelf.value_at(n + 1), next];
            host.env.memory.write(shelf.element(n), words.as_bytes());
        }
        for n in 0..3 {
            host.env.memory.write(shelf.object_at(n), &object(n));
        }
        shelf
    }

    fn value_at(&self, key: u64) -> u64 {
        self.addr + VALUES + key * VALUE
    }

    fn element(&self, n: u64) -> u64 {
        self.addr + LIST + n * 64
    }

    fn object_at(&self, n: u64) -> u64 {
        self.addr + OBJECTS + n * OBJECT
    }

    /// Keys 1 to 3 in the first entry, and so on; each entry leads to the next.
    fn entry(&self, n: u64) -> get::HashEntry {
        let next = if n + 1 < ENTRIES { n as u32 + 1 } else { 0 };
        let mut entry = get::HashEntry { next: next.into(), ..get::HashEntry::default() };
        for (at, bucket) in (0..).zip(&mut entry.buckets) {
            let key = 3 * (n - 1) + at + 1;
            let (value, len) = (self.value_at(key).into(), (length(key) as u32).into());
            *bucket = get::Bucket { key: key.into(), value, len };
        }
        entry
    }

    /// A question, and its answer: op-code and parameters.
    pub(crate) fn ask(&self, rng: &mut Rng) -> (u64, Vec<u8>, Answer) {
        let (op, params, want) = match rng.below(3) {
            0 => self.ask_table(rng),
            1 => self.ask_list(rng),
            _ => self.ask_object(rng),
        };
        if !rng.chance(0.02) {
            return (op, params, want);
        }
        let short = rng.below(params.len() as u64) as usize;
        (op, params[..short].to_vec(), Answer::error(Code::BadParam))
    }

    /// A key, or one that opens nothing.
    fn any_key(&self, rng: &mut Rng) -> (u32, bool) {
        let bad = rng.chance(0.1);
        (self.key ^ if bad { 0x100 } else { 0 }, bad)
    }

    fn ask_table(&self, rng: &mut Rng) -> (u64, Vec<u8>, Answer) {
        let (key, first, hops) = (rng.within(1, KEYS + 2), rng.within(1, ENTRIES - 1), rng.below(6));
        let (table_key, bad) = self.any_key(rng);
        let params = get::Params {
            table: self.addr.into(),
            key: key.into(),
            index: (first as u32).into(),
            table_key: table_key.into(),
            value_key: self.key.into(),
            hops: (hops as u32).into(),
        };
        let there = (key - 1) / 3 + 1;
        let want = match (first..ENTRIES).find(|entry| *entry == there) {
            _ if hops == 0 => Answer::error(Code::Retries),
            _ if bad => Answer::error(Code::Access),
            Some(at) if at - first < hops => Answer::ok(value(key, length(key))),
            None if ENTRIES - first <= hops => Answer::error(Code::NotFound),
            _ => Answer::error(Code::Retries),
        };
        (GET, params.as_bytes().to_vec(), want)
    }

    fn ask_list(&self, rng: &mut Rng) -> (u64, Vec<u8>, Answer) {
        let (key, first, hops) = (rng.within(1, ELEMENTS + 1), rng.below(ELEMENTS), rng.below(8));
        let (rkey, bad) = self.any_key(rng);
        let params = traverse::Params {
            element: self.element(first).into(),
            key: key.into(),
            rkey: rkey.into(),
            len: FOUND.into(),
            mask: 1.into(),
            predicate: traverse::EQUAL,
            value: 2,
            next: 4,
            child: 0,
            flags: traverse::NEXT,
            hops: hops as u8,
        };
        let want = match (first..ELEMENTS).find(|n| n + 1 == key) {
            _ if hops == 0 => Answer::error(Code::Retries),
            _ if bad => Answer::error(Code::Access),
            Some(n) if n - first < hops => Answer::ok(value(key, FOUND.into())),
            None if ELEMENTS - first <= hops => Answer::error(Code::NotFound),
            _ => Answer::error(Code::Retries),
        };
        (TRAVERSE, params.as_bytes().to_vec(), want)
    }

    fn ask_object(&self, rng: &mut Rng) -> (u64, Vec<u8>, Answer) {
        let (n, tries) = (rng.below(3), rng.pick(&[0, 1, 3, 700]));
        let (rkey, bad) = self.any_key(rng);
        let there = object(n);
        let params = consistent::Params {
            object: self.object_at(n).into(),
            rkey: rkey.into(),
            len: (there.len() as u32).into(),
            tries: tries.into(),
            ..consistent::Params::default()
        };
        let want = match n {
            _ if tries == 0 => Answer::error(Code::Retries),
            _ if bad => Answer::error(Code::Access),
            1 => Answer::error(Code::Retries),
            _ => Answer::ok(there),
        };
        (CONSISTENT, params.as_bytes().to_vec(), want)
    }
}
