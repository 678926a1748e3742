//! Traversal of lists, hash tables, binary search trees and skip lists (the paper's 6.2, table 2).
//!
//! Elements have 64 bytes, keys 8, fields are aligned to 4: positions and the mask count slots of 4 bytes, as
//! the paper's do. Following a pointer beside a key ([`FOLLOW`]) and the hop limit are ours.

use starverbs_core::strom::{Code, Input, Kernel, KernelRun, Poll, RegionRange};
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of an element.
const ELEMENT: u32 = 64;
/// The value's pointer is at its position behind the key that matched, not behind the element's start.
pub const RELATIVE: u8 = 1;
/// Where nothing matched, there may be a next element.
pub const NEXT: u8 = 2;
/// A match does not find the value but the way: the pointer at [`Params::child`] behind the key leads to the
/// next element. An element whose first key is the one looked for has the value; equal keys match always.
pub const FOLLOW: u8 = 4;

/// The key that is looked for equals the element's.
pub const EQUAL: u8 = 0;
/// It is less.
pub const LESS: u8 = 1;
/// It is greater.
pub const GREATER: u8 = 2;
/// It is another.
pub const NOT_EQUAL: u8 = 3;

/// Parameters, 32 bytes.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Params {
    /// The first element
    pub element: U64,
    /// The key to look for
    pub key: U64,
    /// Key of the region with elements and values
    pub rkey: U32,
    /// Bytes of a value
    pub len: U32,
    /// Slots at which elements have keys
    pub mask: U16,
    /// How the key that is looked for compares with one that matches
    pub predicate: u8,
    /// Slot of the pointer to the value
    pub value: u8,
    /// Slot of the pointer to the next element
    pub next: u8,
    /// Slots from a key that matches to the pointer that is followed
    pub child: u8,
    /// [`RELATIVE`], [`NEXT`], [`FOLLOW`]
    pub flags: u8,
    /// Most elements to look at
    pub hops: u8,
}

impl Params {
    fn of(run: &KernelRun) -> Result<Params, Code> {
        let params = Params::read_from_bytes(run.bytes()).map_err(|_| Code::BadParam)?;
        let known = params.predicate <= NOT_EQUAL && params.flags & !(RELATIVE | NEXT | FOLLOW) == 0;
        if known { Ok(params) } else { Err(Code::BadParam) }
    }

    fn matches(&self, found: u64) -> bool {
        let key = self.key.get();
        match self.predicate {
            EQUAL => key == found,
            LESS => key < found,
            GREATER => key > found,
            _ => key != found,
        }
    }
}

/// The kernel. NOT_FOUND: nothing matched, and there is no way on; RETRIES: more elements than `hops`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Traverse;

impl Traverse {
    fn fetch(run: &mut KernelRun, params: &Params, va: u64) -> Result<(), Code> {
        if run.regs[0] >= u64::from(params.hops) {
            return Err(Code::Retries);
        }
        run.regs[0] += 1;
        let queued = run.read(RegionRange { key: params.rkey.get(), len: ELEMENT, va });
        if queued { Ok(()) } else { Err(Code::Overflow) }
    }

    /// Looks at an element: the value's address, or where to go on.
    fn look(params: &Params, element: &[u8]) -> Result<(bool, u64), Code> {
        let word = |slot: usize| Some(u64::from_le_bytes(*element.get(slot * 4..)?.first_chunk()?));
        let pointer = |slot: usize| word(slot).filter(|to| *to != 0).ok_or(Code::NotFound);
        let is = |flag| params.flags & flag != 0;
        let (follow, key) = (is(FOLLOW), params.key.get());
        if follow && word(0) == Some(key) {
            return pointer(params.value.into()).map(|value| (true, value));
        }
        let slots = (0..16usize).filter(|slot| params.mask.get() >> slot & 1 == 1);
        let mut keys = slots.filter_map(|slot| Some((slot, word(slot)?)));
        let hit = keys.find(|(_, found)| params.matches(*found) || follow && *found == key);
        match hit {
            Some((slot, _)) if follow => pointer(slot + usize::from(params.child)).map(|to| (false, to)),
            Some((slot, _)) => {
                let from = if is(RELATIVE) { slot } else { 0 };
                pointer(from + usize::from(params.value)).map(|value| (true, value))
            }
            None if is(NEXT) => pointer(params.next.into()).map(|next| (false, next)),
            None => Err(Code::NotFound),
        }
    }
}

impl Kernel for Traverse {
    fn start(&mut self, run: &mut KernelRun, input: Input) -> Result<(), Code> {
        let params = Params::of(run)?;
        if input != Input::Params {
            return Err(Code::BadParam);
        }
        Traverse::fetch(run, &params, params.element.get())
    }

    fn step(&mut self, run: &mut KernelRun) -> Poll {
        let next = Params::of(run).and_then(|params| {
            let (found, to) = Traverse::look(&params, run.read_data())?;
            if found {
                run.reply_from(RegionRange { key: params.rkey.get(), len: params.len.get(), va: to });
                return Ok(Poll::Ready(Code::Ok));
            }
            Traverse::fetch(run, &params, to).map(|()| Poll::Pending)
        });
        next.unwrap_or_else(Poll::Ready)
    }

    fn name(&self) -> &'static str {
        "traverse"
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::host::TestHost;

    /// Elements of so many words at 64-byte places, values at 64 * 100 + 8 * key.
    struct World {
        host: TestHost,
        next: u64,
    }

    const BASE: u64 = 0x1000;

    impl World {
        fn new() -> Self {
            World { host: TestHost::new(BASE, 1 << 16), next: BASE }
        }
        fn element(&mut self, words: &[(usize, u64)]) -> u64 {
            let at = self.next;
            self.next += 64;
            for (slot, word) in words {
                self.host.put(at + 4 * *slot as u64, &word.to_le_bytes());
            }
            at
        }
        fn value(&mut self, key: u64) -> u64 {
            let at = BASE + 0x8000 + 8 * key;
            self.host.put(at, &(key * 1000).to_le_bytes());
            at
        }
        fn look(&mut self, params: Params) -> Result<u64, Code> {
            let params = Params { rkey: TestHost::KEY.into(), len: 8.into(), hops: 100, ..params };
            let (code, data) = self.host.call(&mut Traverse, params.as_bytes());
            match code {
                Code::Ok => Ok(u64::from_le_bytes(data.try_into().expect("eight bytes"))),
                code => Err(code),
            }
        }
    }

    #[test]
    fn a_list_is_walked() {
        let mut world = World::new();
        let mut head = 0;
        for key in (1..=50).rev() {
            let value = world.value(key);
            /* the paper's figure 6: key, next at 2, value at 4 */
            head = world.element(&[(0, key), (2, head), (4, value)]);
        }
        let list = Params {
            element: head.into(),
            mask: 1.into(),
            value: 4,
            next: 2,
            flags: NEXT,
            ..Params::default()
        };
        for key in 1..=50 {
            assert_eq!(world.look(Params { key: key.into(), ..list }), Ok(key * 1000));
        }
        assert_eq!(world.look(Params { key: 51.into(), ..list }), Err(Code::NotFound));
        assert_eq!(world.look(Params { flags: 0, key: 2.into(), ..list }), Err(Code::NotFound));
        let (_, none) = (0, Params { hops: 0, ..list });
        assert_eq!(world.host.call(&mut Traverse, none.as_bytes()).0, Code::Retries);
        /* the first key that is greater than 30; less; another */
        let by = |predicate, key: u64| Params { predicate, key: key.into(), ..list };
        assert_eq!(world.look(by(LESS, 30)), Ok(31_000));
        assert_eq!(world.look(by(GREATER, 30)), Ok(1000));
        assert_eq!(world.look(by(NOT_EQUAL, 1)), Ok(2000));
        assert_eq!(world.look(by(4, 1)), Err(Code::BadParam));
        assert_eq!(world.look(Params { flags: 8, ..list }), Err(Code::BadParam));
        assert_eq!(world.look(Params { element: 8.into(), ..list }), Err(Code::Access));
    }

    #[test]
    fn a_circle_ends() {
        let mut world = World::new();
        let at = world.next;
        world.element(&[(0, 1), (2, at)]);
        let circle = Params { element: at.into(), mask: 1.into(), next: 2, flags: NEXT, ..Params::default() };
        assert_eq!(world.look(circle), Err(Code::Retries));
    }

    #[test]
    fn buckets_have_their_values_behind_their_keys() {
        let mut world = World::new();
        let values: Vec<u64> = (1..=3).map(|key| world.value(key)).collect();
        let entry =
            world.element(&[(0, 1), (2, values[0]), (5, 2), (7, values[1]), (10, 3), (12, values[2])]);
        let mask = (1 | 1 << 5 | 1 << 10).into();
        let table = Params { element: entry.into(), mask, value: 2, flags: RELATIVE, ..Params::default() };
        for key in 1..=3u64 {
            assert_eq!(world.look(Params { key: key.into(), ..table }), Ok(key * 1000));
        }
        assert_eq!(world.look(Params { key: 4.into(), ..table }), Err(Code::NotFound));
        /* keys and pointers that would stand behind the element */
        assert_eq!(world.look(Params { mask: (1 << 15).into(), ..table }), Err(Code::NotFound));
        assert_eq!(world.look(Params { value: 255, key: 1.into(), ..table }), Err(Code::NotFound));
    }

    #[test]
    fn a_tree_is_descended() {
        let mut world = World::new();
        fn build(world: &mut World, from: u64, to: u64) -> u64 {
            if from > to {
                return 0;
            }
            let key = u64::midpoint(from, to);
            let (left, right) = (build(world, from, key - 1), build(world, key + 1, to));
            let value = world.value(2 * key);
            world.element(&[(0, 2 * key), (2, value), (4, left), (6, right)])
        }
        let root = build(&mut world, 1, 100);
        let tree = Params {
            element: root.into(),
            mask: 1.into(),
            predicate: LESS,
            value: 2,
            child: 4,
            next: 6,
            flags: FOLLOW | NEXT,
            ..Params::default()
        };
        for key in 0..=202u64 {
            let there = key % 2 == 0 && (2..=200).contains(&key);
            let wanted = if there { Ok(key * 1000) } else { Err(Code::NotFound) };
            assert_eq!(world.look(Params { key: key.into(), ..tree }), wanted, "{key}");
        }
    }

    /// Each element has its own key, and for each level, from the highest on, the key and the address of the
    /// next one there.
    #[test]
    fn a_skip_list_is_searched() {
        let mut world = World::new();
        let keys: Vec<u64> = (1..=60).map(|n| n * 3).collect();
        let level = |n: usize| (n + 1).trailing_zeros().min(2) as usize;
        let (mut nexts, mut head) = (BTreeMap::<usize, (u64, u64)>::new(), 0);
        for n in (0..=keys.len()).rev() {
            let (key, top) = if n == 0 { (0, 2) } else { (keys[n - 1], level(n - 1)) };
            let value = world.value(key);
            let mut words = vec![(0, key), (2, value)];
            for at in 0..=top {
                let (next_key, next) = nexts.get(&at).copied().unwrap_or((u64::MAX, 0));
                let slot = 4 + 4 * (2 - at);
                words.extend([(slot, next_key), (slot + 2, next)]);
            }
            for missing in top + 1..=2 {
                words.push((4 + 4 * (2 - missing), u64::MAX));
            }
            head = world.element(&words);
            for at in 0..=top {
                nexts.insert(at, (key, head));
            }
        }
        let list = Params {
            element: head.into(),
            mask: (1 << 4 | 1 << 8 | 1 << 12).into(),
            predicate: GREATER,
            value: 2,
            child: 2,
            flags: FOLLOW,
            ..Params::default()
        };
        for key in 1..200u64 {
            let wanted = if keys.contains(&key) { Ok(key * 1000) } else { Err(Code::NotFound) };
            assert_eq!(world.look(Params { key: key.into(), ..list }), wanted, "{key}");
        }
    }
}
