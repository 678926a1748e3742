//! What one process lets others look up and use: entries of a table, gates, and readers' slots.

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;
use starverbs_rings::crash::{crash_after, has_crashed};
use starverbs_rings::{Incarnation, ReaderSlot, TableEntry, TableLength};

/// An entry whose words all are its key, as the number of its incarnation is: 1, and 3 behind that.
type Entry = TableEntry<2>;

fn put(entry: &Entry, key: u32) {
    entry.put(key, [u64::from(key); 2]);
}

/// The number of the incarnation under which a key is found; its words are looked at.
fn find(entry: &Entry, key: u32) -> Option<u32> {
    let (number, words) = entry.find(key)?;
    assert_eq!((number, words), (key, [u64::from(key); 2]));
    Some(number)
}

/// An entry is used again while another process reads it: what that one has are the words of one object,
/// under its number.
#[test]
fn an_entry_is_read_whole_or_not_at_all() {
    loom::model(|| {
        let entry = Arc::new(Entry::new());
        put(&entry, 1);
        let table = entry.clone();
        let owner = thread::spawn(move || put(&table, 3));
        for key in [1, 3] {
            find(&entry, key);
        }
        owner.join().unwrap();
        assert_eq!([1, 3].map(|key| find(&entry, key)), [None, Some(3)]);
    });
}

/// The next object may be another thread's of the owner, who has the entry by a lock.
#[test]
fn an_entry_is_handed_on_between_threads_of_its_owner() {
    loom::model(|| {
        let entry = Arc::new(Entry::new());
        let free = Arc::new(Mutex::new(false));
        put(&entry, 1);
        let (table, list) = (entry.clone(), free.clone());
        let first = thread::spawn(move || {
            put(&table, 0);
            *list.lock().unwrap() = true;
        });
        let table = entry.clone();
        let second = thread::spawn(move || {
            if *free.lock().unwrap() {
                put(&table, 3);
            }
        });
        for key in [1, 3] {
            find(&entry, key);
        }
        first.join().unwrap();
        second.join().unwrap();
    });
}

/// A table grows while another process looks for a key in it: whoever finds that there is an entry has its
/// memory.
#[test]
fn an_entry_of_a_table_that_grows_is_found_whole_or_not_at_all() {
    loom::model(|| {
        let entry = || (Entry::new(), UnsafeCell::new(()));
        let table = Arc::new((TableLength::new(), [entry(), entry()]));
        let theirs = table.clone();
        let owner = thread::spawn(move || {
            let (length, entries) = &*theirs;
            for (place, (entry, memory)) in (0..).zip(entries) {
                memory.with_mut(|_| ());
                length.grow(place + 1);
                put(entry, 1);
            }
        });
        let (length, entries) = &*table;
        for place in [1, 0] {
            if length.has(place) {
                let (entry, memory) = &entries[place as usize];
                memory.with(|_| ());
                find(entry, 1);
            }
        }
        owner.join().unwrap();
        assert!((0..2).all(|place| length.has(place)) && !length.has(2));
    });
}

/// The owner is killed at any step of changing an entry: others find the one before, or the next one, or
/// none.
#[test]
fn a_killed_owner_leaves_a_whole_entry_or_none() {
    for stores in 0..=6 {
        loom::model(move || {
            let entry = Arc::new(Entry::new());
            put(&entry, 1);
            let table = entry.clone();
            let owner = thread::spawn(move || {
                crash_after(stores);
                put(&table, 3);
            });
            for key in [1, 3] {
                find(&entry, key);
            }
            owner.join().unwrap();
            let left = [1, 3].map(|key| find(&entry, key));
            let whole = if stores == 6 { [None, Some(3)] } else { [None; 2] };
            assert_eq!(left, if stores == 0 { [Some(1), None] } else { whole });
        });
    }
}

/// The owner ends an object and takes what it was about away: nobody uses it then.
#[test]
fn an_object_that_has_ended_is_not_used() {
    loom::model(|| {
        let all = Arc::new((Entry::new(), ReaderSlot::new(), UnsafeCell::new(7)));
        put(&all.0, 1);
        let theirs = all.clone();
        let reader = thread::spawn(move || {
            let (entry, slot, memory) = &*theirs;
            let Some(number) = find(entry, 1) else { return };
            slot.enter();
            if entry.is(number) {
                // SAFETY: the owner waits for the slot; loom reports if it does not.
                assert_eq!(memory.with(|memory| unsafe { *memory }), 7);
            }
            slot.leave();
        });
        let (entry, slot, memory) = &*all;
        put(entry, 0);
        let pause = |_| {
            thread::yield_now();
            true
        };
        ReaderSlot::wait_for_all([slot].into_iter(), pause);
        // SAFETY: nobody reads any more; loom reports if somebody does.
        memory.with_mut(|memory| unsafe { *memory = 0 });
        reader.join().unwrap();
    });
}

/// Memory of an owner, and what a peer looks at before it writes there.
struct Target {
    /// Of the queue pair
    gate: Incarnation,
    /// Of the region
    entry: Entry,
    slot: ReaderSlot,
    /// A process has the slot, as the kernel knows
    taken: AtomicBool,
    memory: UnsafeCell<u32>,
}

impl Target {
    const KEY: u32 = 1;

    /// With an open gate, a key, and a peer.
    fn new() -> Self {
        let (gate, entry, slot) = (Incarnation::new(), Entry::new(), ReaderSlot::new());
        gate.begin(|| {});
        put(&entry, Target::KEY);
        Target { gate, entry, slot, taken: AtomicBool::new(true), memory: UnsafeCell::new(0) }
    }

    /// The peer's request with that gate and that key.
    fn write(&self) {
        self.slot.enter();
        if self.gate.is(1) && find(&self.entry, Target::KEY).is_some() {
            // SAFETY: the owner waits for the slot; loom reports if it does not.
            self.memory.with_mut(|memory| unsafe { *memory += 1 });
        }
        self.slot.leave();
    }

    /// A process takes the slot, writes, and goes, or is killed once it has stored so often.
    fn come_and_go(&self, stores: u32) {
        crash_after(stores);
        self.taken.store(true, Ordering::Release);
        self.slot.reset();
        if !has_crashed() {
            self.write();
        }
        self.taken.store(false, Ordering::Release);
    }

    /// The owner takes its memory back when nobody uses it any more.
    fn take_back(&self) {
        let pause = |_| {
            thread::yield_now();
            self.taken.load(Ordering::Acquire)
        };
        ReaderSlot::wait_for_all([&self.slot].into_iter(), pause);
        // SAFETY: nobody writes any more; loom reports if somebody does.
        self.memory.with_mut(|memory| unsafe { *memory = 0 });
    }
}

/// A peer writes while the owner closes the gate of its queue pair, or the region's entry; both are used anew
/// then. Nobody writes behind the wait for readers.
#[test]
fn nobody_writes_behind_a_closed_gate_or_entry() {
    for is_gate in [false, true] {
        loom::model(move || {
            let target = Arc::new(Target::new());
            let peer = target.clone();
            let writer = thread::spawn(move || (0..2).for_each(|_| peer.write()));
            if is_gate {
                target.gate.end();
                target.take_back();
                target.gate.begin(|| {});
            } else {
                put(&target.entry, 0);
                target.take_back();
                put(&target.entry, 3);
            }
            writer.join().unwrap();
        });
    }
}

/// Processes come and go, one after the other at one slot. The first one is killed at any step: the owner
/// waits for neither too long nor too short, and the next one, if one comes, has the slot as if it was new.
#[test]
fn a_slot_of_the_dead_is_taken_anew() {
    for (stores, comes) in (0..=3).flat_map(|stores| [(stores, false), (stores, true)]) {
        loom::model(move || {
            let target = Arc::new(Target::new());
            let peers = target.clone();
            let both = thread::spawn(move || {
                peers.come_and_go(stores);
                if comes {
                    /* whoever gets the lock does so behind the end of who had it */
                    peers.come_and_go(u32::MAX);
                }
            });
            target.gate.end();
            target.take_back();
            both.join().unwrap();
            assert!(!comes || target.slot.uses().is_multiple_of(2), "nobody is in it");
        });
    }
}
