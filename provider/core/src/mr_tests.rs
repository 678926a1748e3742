use std::collections::BTreeMap;
use std::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::rng::Rng;

const PD: PdId = PdId(3);

fn attr(addr: u64, length: u64, iova: u64, access: Access) -> MrAttr {
    MrAttr { pd: PD, addr, length, iova, access, ..MrAttr::default() }
}

/// One MR of 0x100 bytes at host 0x1000, known as 0x9000.
fn one(access: Access) -> (MrTable, u32) {
    let mut t = MrTable::<Plain>::default();
    let key = t.register(attr(0x1000, 0x100, 0x9000, access), 0x1234_5678_9abc_def0).unwrap();
    (t, key)
}

#[test]
fn bounds_are_exact() {
    let (t, key) = one(Access::LOCAL_WRITE);
    let at = |va, len| t.resolve_local(key, PD, va, len, true);
    assert_eq!(at(0x9000, 0x100), Ok(0x1000));
    assert_eq!(at(0x90ff, 1), Ok(0x10ff));
    assert_eq!(at(0x9000, 0x101), Err(MrFault::Bounds));
    assert_eq!(at(0x90ff, 2), Err(MrFault::Bounds));
    assert_eq!(at(0x9100, 1), Err(MrFault::Bounds));
    assert_eq!(at(0x8fff, 1), Err(MrFault::Bounds));
    assert_eq!(at(u64::MAX, u32::MAX), Err(MrFault::Bounds));
    assert_eq!(at(0, 0), Ok(0), "no bytes need no key");
}

#[test]
fn each_fault_has_its_error() {
    let (t, key) = one(Access::REMOTE_READ);
    let read = |key, pd, need| t.resolve_remote(key, QpId { pd, qpn: 7 }, 0x9000, 4, need);
    assert_eq!(read(key, PD, Access::REMOTE_READ), Ok(0x1000));
    assert_eq!(read(key, PD, Access::REMOTE_WRITE), Err(MrFault::Access));
    assert_eq!(read(key, PdId(4), Access::REMOTE_READ), Err(MrFault::Pd));
    assert_eq!(read(key ^ 1, PD, Access::REMOTE_READ), Err(MrFault::BadKey));
    assert_eq!(read(key ^ 0x100, PD, Access::REMOTE_READ), Err(MrFault::BadKey));
    assert_eq!(read(0, PD, Access::REMOTE_READ), Err(MrFault::BadKey));
    assert_eq!(t.resolve_local(key, PD, 0x9000, 4, false), Ok(0x1000), "reading needs no right");
    assert_eq!(t.resolve_local(key, PD, 0x9000, 4, true), Err(MrFault::Access));
}

#[test]
fn imports_open_their_own_key_until_they_end() {
    let (mut t, own) = one(Access::LOCAL_WRITE);
    let foreign = [own ^ 0x1100, own ^ 0x80_0000, own ^ 1, 7];
    for (n, key) in (1..).zip(foreign) {
        t.import(key, attr(n << 47, 0x100, 0x9000, Access::REMOTE_READ)).unwrap();
        assert_eq!(t.import(key, attr(0, 1, 0, Access::empty())), Err(NicError::Busy));
    }
    assert_eq!(t.import(own, attr(0, 1, 0, Access::empty())), Err(NicError::Busy), "an own MR's key");
    assert_eq!(t.import(0, attr(0, 1, 0, Access::empty())), Err(NicError::Invalid));
    let read =
        |t: &MrTable, key, pd| t.resolve_remote(key, QpId { pd, qpn: 7 }, 0x9010, 4, Access::REMOTE_READ);
    for (n, key) in (1..).zip(foreign) {
        assert_eq!(read(&t, key, PD), Ok((n << 47) + 0x10));
        assert_eq!(read(&t, key, PdId(4)), Err(MrFault::Pd));
        assert_eq!(t.resolve_local(key, PD, 0x9000, 4, true), Err(MrFault::Access));
        assert_eq!(t.query(key), None, "not this card's to change");
        assert_eq!(t.deregister(key), Err(NicError::NotFound));
    }
    assert_eq!(t.resolve_local(own, PD, 0x9000, 4, true), Ok(0x1000));
    for key in foreign {
        assert_eq!(t.unimport(key), Ok(PD));
        assert_eq!(t.unimport(key), Err(NicError::NotFound));
        assert_eq!(read(&t, key, PD), Err(MrFault::BadKey));
    }
}

/// The slot that is used next but `n`.
fn waiting(t: &MrTable, n: usize) -> u32 {
    t.free[n]
}

/// One MR at a time, for ever: an old key is not given out again soon, and not as the next of its slot.
#[test]
fn keys_rest_before_they_are_reused() {
    let mut rng = Rng::new([1, 2]);
    let mut t = MrTable::<Plain>::default();
    let mut last = BTreeMap::new();
    for turn in 0..100_000usize {
        let key = t.register(attr(0, 1, 0, Access::empty()), rng.word()).unwrap();
        t.deregister(key).unwrap();
        if let Some(before) = last.insert(key, turn) {
            assert!(turn - before > 2 * REST, "key {key:x} was reused after {} registrations", turn - before);
        }
    }
    assert!(t.slots.len() <= STEP, "the table does not grow for it");
}

/// Who has a key knows neither the slot nor the byte of the next: all of a card's first keys, over many
/// cards.
#[test]
fn keys_do_not_follow_from_each_other() {
    const CARDS: u64 = 400;
    let (mut masks, mut steps, mut bytes) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    for card in 0..CARDS {
        let mut rng = Rng::new([card, 0]);
        let mut t = MrTable::<Plain>::default();
        let keys = [(); 16].map(|()| t.register(attr(0, 1, 0, Access::empty()), rng.word()).unwrap());
        *masks.entry(keys[0] >> KEY_BITS).or_insert(0) += 1;
        for pair in keys.windows(2) {
            *steps.entry((pair[0] ^ pair[1]) >> KEY_BITS).or_insert(0) += 1;
            *bytes.entry(pair[0] as u8 ^ pair[1] as u8).or_insert(0) += 1;
        }
    }
    let most = |counts: &BTreeMap<u32, u64>| counts.values().copied().max();
    assert!(masks.len() as u64 > CARDS - 5, "first slots are any of 2^23: {}", masks.len());
    /* 6000 steps of 1023 values, 5.9 each on average; 6000 bytes of 256, 23 each */
    assert!(steps.len() > 1000 && most(&steps) < Some(25), "{} {:?}", steps.len(), most(&steps));
    let bytes: BTreeMap<u32, u64> = bytes.into_iter().map(|(byte, n)| (u32::from(byte), n)).collect();
    assert!(bytes.len() == 256 && most(&bytes) < Some(60), "{} {:?}", bytes.len(), most(&bytes));
}

#[test]
fn no_key_is_given_out_that_an_import_has() {
    let (mut t, _) = one(Access::empty());
    let next = t.key(waiting(&t, 0), 0);
    let spare = next | 0x5a;
    for key in (next..=next | 0xff).filter(|key| *key != spare) {
        t.import(key, attr(0, 1, 0, Access::empty())).unwrap();
    }
    assert_eq!(t.register(attr(0, 1, 0, Access::empty()), 99).unwrap(), spare);
}

#[test]
fn slots_whose_keys_all_are_imported_are_passed_over() {
    let (mut t, _) = one(Access::empty());
    let plain = attr(0, 1, 0, Access::empty());
    for slot in [waiting(&t, 0), waiting(&t, 1)] {
        for byte in 0..=255 {
            t.import(t.key(slot, byte), plain).unwrap();
        }
    }
    let third = waiting(&t, 2);
    let key = t.register(plain, 99).unwrap();
    assert_eq!(t.slot_of(key), third);
    assert_eq!(t.regions(), 2);
    let keys: Vec<u32> = (0..20).map(|n| t.register(plain, n).unwrap()).collect();
    assert!(keys.iter().all(|key| t.query(*key).is_some()));
    assert_eq!(t.regions(), 22);
}

#[test]
fn bad_registrations() {
    let mut t = MrTable::<Plain>::default();
    let mut reg = |addr, len, iova, access| t.register(attr(addr, len, iova, access), 7).map(|_| ());
    assert_eq!(reg(u64::MAX, 2, 0, Access::empty()), Err(NicError::Invalid));
    assert_eq!(reg(0, 2, u64::MAX, Access::empty()), Err(NicError::Invalid));
    assert_eq!(reg(0, 1, 0, Access::REMOTE_WRITE), Err(NicError::Invalid));
    assert_eq!(reg(0, 1, 0, Access::REMOTE_ATOMIC), Err(NicError::Invalid));
    assert_eq!(reg(0, u64::MAX, 0, Access::LOCAL_WRITE | Access::REMOTE_WRITE), Ok(()));
}

#[test]
fn no_bytes_open_nothing() {
    let mut t = MrTable::<Plain>::default();
    let key = t.register(attr(0x1000, 0, 0x1000, Access::LOCAL_WRITE), 7).unwrap();
    assert_eq!(t.resolve_local(key, PD, 0x1000, 1, false), Err(MrFault::Bounds));
}

#[test]
fn a_key_may_come_to_open_something_else() {
    let (mut t, key) = one(Access::LOCAL_WRITE);
    let new = MrAttr { pd: PdId(4), ..attr(0x5000, 0x10, 0, Access::REMOTE_READ) };
    let bad = MrAttr { access: Access::REMOTE_WRITE, ..new };
    assert_eq!(t.reregister(key, bad), Err(NicError::Invalid));
    assert_eq!(t.query(key), Some(attr(0x1000, 0x100, 0x9000, Access::LOCAL_WRITE)), "as it was");
    assert_eq!(t.reregister(key ^ 1, new), Err(NicError::NotFound));
    assert_eq!(t.reregister(key, new), Ok(PD));
    assert_eq!(t.query(key), Some(new));
    assert_eq!(t.resolve_remote(key, QpId { pd: PdId(4), qpn: 0 }, 8, 8, Access::REMOTE_READ), Ok(0x5008));
    assert_eq!(t.resolve_local(key, PD, 0x9000, 1, false), Err(MrFault::Pd));
    assert_eq!(t.deregister(key), Ok(PdId(4)));
    assert_eq!(t.reregister(key, new), Err(NicError::NotFound));
    assert_eq!(t.query(key), None);
}

#[test]
fn the_table_has_an_end() {
    let mut t = MrTable::<Plain>::default();
    let mut keys = Vec::new();
    for i in 0..MAX_MR as u64 {
        keys.push(t.register(attr(i, 1, i, Access::empty()), i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).unwrap());
    }
    assert_eq!(t.register(attr(0, 1, 0, Access::empty()), 1), Err(NicError::Exhausted));
    assert_eq!(t.deregister(keys[77]), Ok(PD));
    assert_eq!(t.deregister(keys[77]), Err(NicError::NotFound));
    let again = t.register(attr(0, 1, 0, Access::empty()), 1).unwrap();
    assert_eq!(again >> 8, keys[77] >> 8);
    assert_ne!(again, keys[77]);
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), MAX_MR);
    assert_ne!(keys[0], 0);
}

#[derive(Clone, Debug)]
enum Step {
    Register { addr: u64, length: u64, iova: u64, random: u64 },
    Deregister(prop::sample::Index),
    Resolve { pick: prop::sample::Index, offset: i64, len: u32 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0u64..1 << 40, 1u64..5000, 0u64..1 << 40, any::<u64>())
            .prop_map(|(addr, length, iova, random)| Step::Register { addr, length, iova, random }),
        any::<prop::sample::Index>().prop_map(Step::Deregister),
        (any::<prop::sample::Index>(), -10i64..5010, 0u32..5010)
            .prop_map(|(pick, offset, len)| Step::Resolve { pick, offset, len }),
    ]
}

proptest! {
    /// Against a map of what is registered: live keys resolve as they should, dead ones never.
    #[test]
    fn behaves_like_a_map(steps in prop::collection::vec(step(), 1..200)) {
        let mut table = MrTable::<Plain>::default();
        let mut model: BTreeMap<u32, MrAttr> = BTreeMap::new();
        let mut all = Vec::new();
        for s in steps {
            match s {
                Step::Register { addr, length, iova, random } => {
                    let a = attr(addr, length, iova, Access::REMOTE_READ);
                    let key = table.register(a, random).unwrap();
                    prop_assert!(model.insert(key, a).is_none());
                    all.push((key, a));
                }
                Step::Deregister(pick) if !all.is_empty() => {
                    let key = all[pick.index(all.len())].0;
                    prop_assert_eq!(table.deregister(key).is_ok(), model.remove(&key).is_some());
                }
                Step::Resolve { pick, offset, len } if !all.is_empty() => {
                    let (key, a) = all[pick.index(all.len())];
                    let va = a.iova.wrapping_add_signed(offset);
                    let qp = QpId { pd: PD, qpn: 7 };
                    let got = table.resolve_remote(key, qp, va, len, Access::REMOTE_READ);
                    let want = match model.get(&key) {
                        _ if len == 0 => Ok(va),
                        None => Err(MrFault::BadKey),
                        Some(m) => {
                            let start = i128::from(va) - i128::from(m.iova);
                            let inside = start >= 0 && start + i128::from(len) <= i128::from(m.length);
                            if inside { Ok(m.addr + start as u64) } else { Err(MrFault::Bounds) }
                        }
                    };
                    prop_assert_eq!(got, want);
                }
                _ => {}
            }
            prop_assert_eq!(table.regions(), model.len());
        }
    }
}

/// The table has the slots that it means to have, and not twice as many as a vector that grows by itself.
#[test]
fn the_table_takes_no_more_memory_than_it_reports() {
    let mut t = MrTable::<Plain>::default();
    for n in 0..20_000u64 {
        t.register(attr(0x1000, 0x100, 0x9000, Access::REMOTE_READ), n.wrapping_mul(0x9e37_79b9_7f4a_7c15))
            .unwrap();
        assert_eq!(t.slots.capacity(), t.slots.len());
    }
    assert!(t.slots.len() < 20_000 + 20_000 / 4 + REST + STEP);
}
