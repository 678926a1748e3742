//! Every interleaving of a program's threads and its card on small rings, and on the flags that go with them.
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p starverbs-rings --test loom`.
#![cfg(loom)]

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;
use starverbs_core::{Cqe, RecvQueue, SendQueue, SendWqe, Sge, TakenWqe};
use starverbs_rings::{
    Armed, CqRing, Incarnation, MessageHead, MessageReader, MessageWriter, Notify, PeerDoorbell,
    PendingDoorbells, RECORD_WORDS, ReaderSlot, RecvSize, SendSize, SlotHead, SlotMemory, SlotReader,
    SlotWriter, StampedRecord, WorkRings, Written,
};

fn send_ring(max_wr: u32) -> WorkRings {
    WorkRings::new(Some(SendSize { max_wr, max_sge: 1, max_inline: 0 }), None, None).unwrap()
}

fn recv_ring(max_wr: u32) -> WorkRings {
    WorkRings::new(None, Some(RecvSize { max_wr, max_sge: 1 }), None).unwrap()
}

#[test]
fn send_ring_hands_over_whole_wqes() {
    loom::model(|| {
        let ring = send_ring(2);
        // SAFETY: the card is one thread.
        let card = unsafe { ring.card_sq() };
        let program = thread::spawn(move || {
            let mut id = 0;
            while id < 3 {
                let sge = Sge { addr: id, len: 1, lkey: 0 };
                let wqe = SendWqe { wr_id: id, ..SendWqe::default() };
                if ring.send_producer().push(wqe, &[sge]).is_ok() {
                    id += 1;
                } else {
                    thread::yield_now();
                }
            }
        });
        let mut done = 0;
        while done < 3 {
            let posted = card.posted();
            if posted == done {
                thread::yield_now();
            }
            while done != posted {
                assert_eq!(card.wqe(done).wr_id, u64::from(done));
                assert_eq!(card.sges(done).next().unwrap().addr, u64::from(done));
                done += 1;
                card.release(done);
            }
        }
        program.join().unwrap();
    });
}

/// WQEs that are built in place: the card sees none before the end, and none that was given up.
#[test]
fn send_ring_hands_over_whole_batches() {
    loom::model(|| {
        let ring = send_ring(2);
        // SAFETY: the card is one thread.
        let card = unsafe { ring.card_sq() };
        let program = thread::spawn(move || {
            let build = |ids: [u64; 2], end: bool| {
                let mut batch = ring.send_producer();
                for id in ids {
                    batch.begin(SendWqe { wr_id: id, ..SendWqe::default() }).unwrap();
                    batch.set_sges(&[Sge { addr: id, len: 1, lkey: 0 }]).unwrap();
                }
                if !end {
                    batch.abort();
                }
            };
            build([7, 8], false);
            build([0, 1], true);
        });
        while card.posted() == 0 {
            thread::yield_now();
        }
        assert_eq!(card.posted(), 2);
        for index in 0..2 {
            assert_eq!(card.wqe(index).wr_id, u64::from(index));
            assert_eq!(card.sges(index).next().unwrap().addr, u64::from(index));
        }
        program.join().unwrap();
    });
}

/// Threads that share a queue pair, one posting, one building in place, while the card takes: a ring of two
/// is full now and then, and each WQE is whole.
#[test]
fn send_ring_serves_two_posters() {
    loom::model(|| {
        let ring = Arc::new(send_ring(2));
        // SAFETY: the card is one thread.
        let card = unsafe { ring.card_sq() };
        let second = ring.clone();
        let builder = thread::spawn(move || {
            let mut batch = second.send_producer();
            let begun = batch.begin(SendWqe { wr_id: 2, ..SendWqe::default() });
            begun.and_then(|()| batch.set_sges(&[Sge { addr: 2, len: 1, lkey: 0 }])).unwrap();
        });
        let poster = thread::spawn(move || {
            let wqe = SendWqe { wr_id: 1, ..SendWqe::default() };
            ring.send_producer().push(wqe, &[Sge { addr: 1, len: 1, lkey: 0 }]).unwrap();
        });
        let (mut done, mut seen) = (0, 0);
        while done < 2 {
            while done != card.posted() {
                assert_eq!(card.wqe(done).wr_id, card.sges(done).next().unwrap().addr);
                seen |= card.wqe(done).wr_id;
                done += 1;
                card.release(done);
            }
            thread::yield_now();
        }
        assert_eq!(seen, 3);
        builder.join().unwrap();
        poster.join().unwrap();
    });
}

#[test]
fn recv_ring_serves_two_posters() {
    loom::model(|| {
        let ring = Arc::new(recv_ring(2));
        // SAFETY: the card is one thread.
        let card = unsafe { ring.card_rq() };
        let second = ring.clone();
        let post = |ring: Arc<WorkRings>, id: u64| {
            assert!(ring.recv_producer().push(id, &[Sge { addr: id, len: 1, lkey: 0 }]).is_ok());
        };
        let other = thread::spawn(move || post(second, 2));
        post(ring, 1);
        other.join().unwrap();
        let mut sges = [Sge::default(); 1];
        let taken = [card.take(&mut sges), card.take(&mut sges)].map(|taken| taken.unwrap().wr_id);
        assert!(taken == [1, 2] || taken == [2, 1]);
    });
}

#[test]
fn recv_ring_never_starves_a_card_silently() {
    loom::model(|| {
        let ring = recv_ring(1);
        // SAFETY: the card is one thread.
        let card = unsafe { ring.card_rq() };
        let program = thread::spawn(move || {
            assert!(ring.recv_producer().push(5, &[Sge { addr: 5, len: 1, lkey: 0 }]).is_ok());
            ring.was_starved()
        });
        let mut sges = [Sge::default(); 1];
        let first = card.take(&mut sges);
        let notified = program.join().unwrap();
        assert!(first.is_some() || notified, "the card found nothing, so the poster must ring");
        assert_eq!(first.or_else(|| card.take(&mut sges)), Some(TakenWqe { wr_id: 5, num_sge: 1 }));
        assert_eq!(sges[0].addr, 5);
    });
}

/// A shared receive queue of one slot, posted to by two threads while the card takes: nothing is lost, and a
/// card that finds nothing has somebody ring.
#[test]
fn recv_ring_is_shared_while_the_card_takes() {
    loom::model(|| {
        let ring = Arc::new(recv_ring(1));
        // SAFETY: the card is one thread.
        let card = unsafe { ring.card_rq() };
        let second = ring.clone();
        let post = |ring: &WorkRings, id: u64| {
            while ring.recv_producer().push(id, &[Sge { addr: id, len: 1, lkey: 0 }]).is_err() {
                thread::yield_now();
            }
            ring.was_starved()
        };
        let other = thread::spawn(move || post(&second, 2));
        let (mut sges, mut seen, mut starved) = ([Sge::default(); 1], 0, false);
        let one = thread::spawn(move || post(&ring, 1));
        while seen != 3 {
            match card.take(&mut sges) {
                Some(TakenWqe { wr_id: id, num_sge }) => {
                    assert_eq!((sges[0].addr, num_sge), (id, 1));
                    assert_eq!(seen & id, 0);
                    seen |= id;
                }
                None => {
                    starved = seen == 0;
                    thread::yield_now();
                }
            }
        }
        let notified = [one.join().unwrap(), other.join().unwrap()];
        assert!(!starved || notified.contains(&true), "the card found nothing, so a poster must ring");
    });
}

/// Two threads poll one queue: each completion comes to one of them, in order for each.
#[test]
fn cq_ring_is_polled_by_two() {
    loom::model(|| {
        let ring = Arc::new(CqRing::new(2, true, None).unwrap());
        let (card, other) = (ring.clone(), ring.clone());
        let maker = thread::spawn(move || {
            for id in 1..=2 {
                // SAFETY: this is the one thread that is the card.
                unsafe { card.push(&Cqe { wr_id: id, ..Cqe::default() }, id) }.unwrap();
            }
        });
        let poll = |ring: &CqRing| {
            let mut consumer = ring.consumer();
            consumer.take().map_or(0, |(cqe, stamp)| {
                assert_eq!(cqe.wr_id, stamp);
                stamp
            })
        };
        let second = thread::spawn(move || poll(&other));
        let first = poll(&ring);
        let mut seen = first + second.join().unwrap();
        maker.join().unwrap();
        while seen < 3 {
            seen += poll(&ring);
        }
        assert_eq!((seen, poll(&ring)), (3, 0));
    });
}

/// The card's lock stands for the card standing still: what is in the ring moves with it.
#[test]
fn cq_ring_is_resized_under_way() {
    loom::model(|| {
        let ring = Arc::new(CqRing::new(1, false, None).unwrap());
        let lock = Arc::new(Mutex::new(()));
        let (card, shard) = (ring.clone(), lock.clone());
        let maker = thread::spawn(move || {
            let mut id = 0;
            while id < 2 {
                let held = shard.lock().unwrap();
                // SAFETY: whoever holds the lock is the card.
                id += u64::from(unsafe { card.push(&Cqe { wr_id: id, ..Cqe::default() }, 0) }.is_ok());
                drop(held);
                thread::yield_now();
            }
        });
        let mut room = ring.room(2).unwrap();
        let mut consumer = ring.consumer();
        let held = lock.lock().unwrap();
        // SAFETY: the lock is held, so nobody is the card; the room is this ring's.
        assert!(unsafe { consumer.resize(&mut room) });
        drop(held);
        drop(consumer);
        maker.join().unwrap();
        let mut consumer = ring.consumer();
        let ids = [(); 2].map(|()| consumer.take().map(|(cqe, _)| cqe.wr_id));
        assert_eq!(ids, [Some(0), Some(1)]);
    });
}

/// A program arms its queue, looks once more, and sleeps: it has seen the completion, or it is notified.
#[test]
fn no_sleeper_is_forgotten() {
    loom::model(|| {
        let ring = Arc::new((CqRing::new(2, false, None).unwrap(), Armed::new()));
        let card = ring.clone();
        let maker = thread::spawn(move || {
            // SAFETY: this is the one thread that is the card.
            unsafe { card.0.push(&Cqe::default(), 0) }.unwrap();
            card.1.wants(false) && card.1.disarm()
        });
        ring.1.arm(false);
        let seen = ring.0.consumer().take().is_some();
        let notified = maker.join().unwrap();
        assert!(seen || notified);
        assert_eq!(ring.1.disarm(), !notified, "an event for each time that the program asked");
    });
}

/// The card's lock as the standard library's mutex is one to `try_lock`: loom's own does not try what happens
/// inside it.
struct TryLock(AtomicBool);

struct Held<'a>(&'a TryLock);

impl TryLock {
    fn try_lock(&self) -> Option<Held<'_>> {
        (!self.0.swap(true, Ordering::Acquire)).then_some(Held(self))
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.0.store(false, Ordering::Release);
    }
}

/// A card, as far as doorbells go: what was posted to each of two queue pairs, and what the card has done.
struct MockCard {
    doorbells: PendingDoorbells,
    lock: TryLock,
    posted: [AtomicU32; 2],
    done: [AtomicU32; 2],
}

impl MockCard {
    fn handle(&self, qpn: usize) {
        self.done[qpn].store(self.posted[qpn].load(Ordering::Acquire), Ordering::Relaxed);
    }

    fn post(&self, qpn: usize) {
        self.posted[qpn].fetch_add(1, Ordering::Release);
        match self.lock.try_lock() {
            Some(_held) => self.handle(qpn),
            None => self.doorbells.leave(qpn as u32),
        }
        let turn = |_held: &mut Held<'_>| self.doorbells.take(|qpn| self.handle(qpn as usize));
        self.doorbells.serve(|| self.lock.try_lock(), turn);
    }
}

/// Two threads post and find the card busy, or not: what each posted is handled when both have gone.
#[test]
fn no_doorbell_is_forgotten() {
    loom::model(|| {
        let zeros = || [(); 2].map(|()| AtomicU32::new(0));
        let lock = TryLock(AtomicBool::new(false));
        let card =
            Arc::new(MockCard { doorbells: PendingDoorbells::new(), lock, posted: zeros(), done: zeros() });
        let second = card.clone();
        let other = thread::spawn(move || second.post(1));
        card.post(0);
        other.join().unwrap();
        for done in &card.done {
            assert_eq!(done.load(Ordering::Relaxed), 1);
        }
    });
}

#[test]
fn cq_ring_hands_over_whole_completions_while_purged() {
    loom::model(|| {
        let ring = Arc::new(CqRing::new(2, false, None).unwrap());
        let card = ring.clone();
        let maker = thread::spawn(move || {
            let mut id = 0;
            while id < 3 {
                let cqe = Cqe { wr_id: id, qpn: (id % 2) as u32, ..Cqe::default() };
                // SAFETY: this is the one thread that is the card.
                match unsafe { card.push(&cqe, 0) } {
                    Ok(()) => id += 1,
                    Err(_) => thread::yield_now(),
                }
            }
        });
        let mut next = 0;
        while next < 3 {
            let mut consumer = ring.consumer();
            consumer.purge(1);
            match consumer.take().map(|(cqe, _)| cqe) {
                Some(cqe) => {
                    assert!(cqe.wr_id >= next && (cqe.qpn == 0 || cqe.wr_id == 1));
                    next = cqe.wr_id + 1;
                }
                None => {
                    drop(consumer);
                    thread::yield_now();
                }
            }
        }
        maker.join().unwrap();
    });
}

/// An entry of a table in shared memory: two words that are of one object.
struct Entry {
    incarnation: Incarnation,
    words: [AtomicU32; 2],
}

impl Entry {
    fn new() -> Self {
        Entry { incarnation: Incarnation::new(), words: [(); 2].map(|()| AtomicU32::new(0)) }
    }

    fn describe(&self, id: u32) {
        self.incarnation.begin(|| self.words.iter().for_each(|word| word.store(id, Ordering::Relaxed)));
    }

    fn read(&self) -> Option<(u32, [u32; 2])> {
        self.incarnation.read(|| Some(self.words.each_ref().map(|word| word.load(Ordering::Relaxed))))
    }
}

/// An entry is used again while another process reads it: what that one has are the words of one object,
/// under its number.
#[test]
fn an_entry_is_read_whole_or_not_at_all() {
    loom::model(|| {
        let entry = Arc::new(Entry::new());
        entry.describe(1);
        let table = entry.clone();
        let owner = thread::spawn(move || {
            table.incarnation.end();
            table.describe(3);
        });
        if let Some((number, words)) = entry.read() {
            assert_eq!(words, [number; 2]);
        }
        owner.join().unwrap();
        assert_eq!(entry.read(), Some((3, [3; 2])));
    });
}

/// The next object may be another thread's of the owner, who has the entry by a lock.
#[test]
fn an_entry_is_handed_on_between_threads_of_its_owner() {
    loom::model(|| {
        let entry = Arc::new(Entry::new());
        let free = Arc::new(Mutex::new(false));
        entry.describe(1);
        let (table, list) = (entry.clone(), free.clone());
        let first = thread::spawn(move || {
            table.incarnation.end();
            *list.lock().unwrap() = true;
        });
        let table = entry.clone();
        let second = thread::spawn(move || {
            if *free.lock().unwrap() {
                table.describe(3);
            }
        });
        if let Some((number, words)) = entry.read() {
            assert_eq!(words, [number; 2]);
        }
        first.join().unwrap();
        second.join().unwrap();
    });
}

/// The owner ends an object and takes what it was about away: nobody uses it then.
#[test]
fn an_object_that_has_ended_is_not_used() {
    loom::model(|| {
        let all = Arc::new((Entry::new(), ReaderSlot::new(), UnsafeCell::new(7)));
        all.0.describe(1);
        let theirs = all.clone();
        let reader = thread::spawn(move || {
            let (entry, slot, memory) = &*theirs;
            let Some((number, _)) = entry.read() else { return };
            slot.enter();
            if entry.incarnation.is(number) {
                // SAFETY: the owner waits for the slot; loom reports if it does not.
                assert_eq!(memory.with(|memory| unsafe { *memory }), 7);
            }
            slot.leave();
        });
        let (entry, slot, memory) = &*all;
        entry.incarnation.end();
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
    /// The peer holds its slot, as the kernel knows
    taken: AtomicBool,
    memory: UnsafeCell<u32>,
}

impl Target {
    const KEY: u32 = 1;

    /// With an open gate, and a key.
    fn new() -> Self {
        let (gate, entry, slot) = (Incarnation::new(), Entry::new(), ReaderSlot::new());
        gate.begin(|| {});
        entry.describe(Target::KEY);
        Target { gate, entry, slot, taken: AtomicBool::new(true), memory: UnsafeCell::new(0) }
    }

    /// The peer's request with that gate and that key, from its slot, which it has not left yet.
    fn enter_and_write(&self) {
        self.slot.enter();
        if self.gate.is(1) && self.entry.read().is_some_and(|(_, words)| words == [Target::KEY; 2]) {
            // SAFETY: the owner waits for the slot; loom reports if it does not.
            self.memory.with_mut(|memory| unsafe { *memory += 1 });
        }
    }

    fn write(&self) {
        self.enter_and_write();
        self.slot.leave();
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
                target.entry.incarnation.end();
                target.take_back();
                target.entry.describe(3);
            }
            writer.join().unwrap();
        });
    }
}

/// A peer dies in its slot, and the next one takes that: the owner waits for neither too long nor too short.
#[test]
fn a_slot_of_the_dead_is_taken_anew() {
    loom::model(|| {
        let target = Arc::new(Target::new());
        let peers = target.clone();
        let both = thread::spawn(move || {
            peers.enter_and_write();
            peers.taken.store(false, Ordering::Release);
            /* whoever gets the lock does so behind the death of who had it */
            peers.taken.store(true, Ordering::Release);
            peers.slot.reset();
            peers.write();
        });
        target.gate.end();
        target.take_back();
        both.join().unwrap();
    });
}

/// A ring of messages of 16 bytes, with room for two of four bytes, or one of twelve.
fn message_ring() -> (MessageWriter, MessageReader) {
    const SIZE: u32 = 16;
    /* both ends and the model end in any order */
    let head = std::ptr::NonNull::from(Box::leak(Box::new(MessageHead::new(SIZE))));
    let data = std::ptr::NonNull::from(Box::leak(Box::new([0u64; 2]))).cast();
    // SAFETY: the memory is never freed, and nobody else has it.
    unsafe { (MessageWriter::new(head, data, SIZE), MessageReader::new(head, data, SIZE)) }
}

fn read(reader: &mut MessageReader) -> Option<[u8; 4]> {
    let len = reader.peek().unwrap()?;
    let mut bytes = [0; 4];
    assert_eq!((len, reader.copy(0, &mut bytes)), (4, 4));
    Some(bytes)
}

/// Messages are whole and in order, and a reader that went to sleep is woken for one that it has not seen.
#[test]
fn no_reader_of_messages_sleeps_on() {
    loom::model(|| {
        let (mut writer, mut reader) = message_ring();
        let peer = thread::spawn(move || {
            let mut push = |byte| match writer.push(&[&[byte; 4]]).unwrap() {
                Written::Yes { wake } => wake,
                Written::NoRoom => panic!("there is room"),
            };
            push(1) | push(2)
        });
        let mut next = 1;
        let mut slept = false;
        while next <= 2 && !slept {
            match read(&mut reader) {
                Some(bytes) => {
                    assert_eq!(bytes, [next; 4]);
                    reader.pop();
                    next += 1;
                }
                None => slept = reader.sleep().unwrap(),
            }
        }
        let notified = peer.join().unwrap();
        assert!(!slept || notified, "it sleeps, and nobody wakes it");
        for next in next..=2 {
            assert_eq!(read(&mut reader), Some([next; 4]));
            reader.pop();
        }
    });
}

/// A writer that found a full ring is woken for room that it has not seen, and writes over nothing that is
/// unread.
#[test]
fn no_writer_of_messages_waits_for_room_that_is_there() {
    loom::model(|| {
        let (mut writer, mut reader) = message_ring();
        for byte in 1..=2 {
            assert_eq!(writer.push(&[&[byte; 4]]), Ok(Written::Yes { wake: false }));
        }
        let peer = thread::spawn(move || {
            let notified = [1, 2].map(|next| {
                assert_eq!(read(&mut reader), Some([next; 4]));
                reader.pop()
            });
            (reader, notified[0] || notified[1])
        });
        let mut written = writer.push(&[&[3; 4]]).unwrap() != Written::NoRoom;
        let waits = !written && !writer.await_room(4).unwrap();
        let mut write = || writer.push(&[&[3; 4]]).unwrap() != Written::NoRoom;
        if !written && !waits {
            written = write();
            assert!(written, "there is room");
        }
        let (mut reader, notified) = peer.join().unwrap();
        assert!(!waits || notified, "it waits, and nobody wakes it");
        assert!(written || write());
        assert_eq!(read(&mut reader), Some([3; 4]));
    });
}

/// A ring of two slots, with room for two pieces of data.
fn slot_ring() -> (SlotWriter, SlotReader) {
    const COUNT: u32 = 2;
    /* both ends and the model end in any order */
    let head = std::ptr::NonNull::from(Box::leak(Box::new(SlotHead::new(COUNT))));
    let slots =
        std::ptr::NonNull::from(Box::leak(Box::new([StampedRecord::new(), StampedRecord::new()]))).cast();
    let data =
        std::ptr::NonNull::from(Box::leak(Box::new([StampedRecord::new(), StampedRecord::new()]))).cast();
    let memory = SlotMemory { head, slots, count: COUNT, data, bytes: 2 * size_of::<StampedRecord>() as u32 };
    // SAFETY: the memory is never freed, and nobody else has it.
    unsafe { (SlotWriter::new(memory), SlotReader::new(memory)) }
}

/// Writes a record, with a piece of data. False: there is no room.
fn write_record(writer: &mut SlotWriter, byte: u8) -> bool {
    let Some(room) = writer.room(64).unwrap() else { return false };
    // SAFETY: the room is for that many bytes.
    unsafe { room.to.write_bytes(byte, 64) };
    let mut record = [u32::from(byte); RECORD_WORDS];
    record[0] = room.at;
    writer.push(&record, room);
    true
}

/// Reads the oldest record, whole with its data, which is then done with.
fn read_record(reader: &mut SlotReader) -> Option<u8> {
    let record = reader.peek()?;
    let byte = record[1] as u8;
    assert!(record[1..].iter().all(|word| *word == u32::from(byte)));
    let data = reader.data(record[0], 64).unwrap();
    // SAFETY: that many bytes are there.
    assert_eq!(unsafe { data.cast::<[u8; 64]>().read() }, [byte; 64]);
    reader.pop();
    Some(byte)
}

/// Records are whole and in order, and a reader that went to sleep is woken for one that it has not seen.
#[test]
fn no_reader_of_records_sleeps_on() {
    loom::model(|| {
        let (mut writer, mut reader) = slot_ring();
        let peer = thread::spawn(move || {
            let mut push = |byte| {
                assert!(write_record(&mut writer, byte), "there is room");
                writer.must_notify() == Notify::Wake
            };
            push(1) | push(2)
        });
        let mut next = 1;
        let mut slept = false;
        while next <= 2 && !slept {
            match read_record(&mut reader) {
                Some(byte) => {
                    assert_eq!(byte, next);
                    next += 1;
                }
                None => slept = reader.sleep(),
            }
        }
        let notified = peer.join().unwrap();
        assert!(!slept || notified, "it sleeps, and nobody wakes it");
        for next in next..=2 {
            assert_eq!(read_record(&mut reader), Some(next));
        }
    });
}

/// Two write to rings of one reader, which looks at them where its doorbell was rung: whatever is in one of
/// them, the doorbell is rung, or was.
#[test]
fn no_record_comes_without_the_doorbell() {
    loom::model(|| {
        let doorbell = Arc::new(PeerDoorbell::new());
        let (writers, mut readers): (Vec<_>, Vec<_>) = (0..2).map(|_| slot_ring()).unzip();
        readers.iter().for_each(SlotReader::await_doorbell);
        doorbell.arm();
        let peers: Vec<_> = writers
            .into_iter()
            .map(|mut writer| {
                let doorbell = doorbell.clone();
                thread::spawn(move || {
                    assert!(write_record(&mut writer, 1), "there is room");
                    assert_eq!(writer.must_notify(), Notify::Doorbell);
                    doorbell.ring();
                })
            })
            .collect();
        let mut seen = 0;
        let mut look = || {
            if doorbell.take() {
                seen += readers.iter_mut().filter_map(read_record).count();
            }
        };
        look();
        peers.into_iter().for_each(|peer| peer.join().unwrap());
        look();
        assert_eq!(seen, 2, "a record lies there, and nobody looks");
    });
}

/// A writer that found a full ring is woken for what it has not seen given back, and writes over no slot that
/// is unread.
#[test]
fn no_writer_of_records_waits_for_what_was_read() {
    loom::model(|| {
        let (mut writer, mut reader) = slot_ring();
        assert!(write_record(&mut writer, 1) && write_record(&mut writer, 2));
        assert_eq!(writer.must_notify(), Notify::No);
        let peer = thread::spawn(move || {
            let notified = [1, 2].map(|next| {
                assert_eq!(read_record(&mut reader), Some(next));
                reader.give_back() == Notify::Wake
            });
            (reader, notified[0] || notified[1])
        });
        let mut written = write_record(&mut writer, 3);
        let waits = !written && writer.sleep().unwrap();
        if !written && !waits {
            written = write_record(&mut writer, 3);
            assert!(written, "there is room");
        }
        let (mut reader, notified) = peer.join().unwrap();
        assert!(!waits || notified, "it waits, and nobody wakes it");
        assert!(written || write_record(&mut writer, 3));
        assert_eq!(read_record(&mut reader), Some(3));
        assert_eq!(read_record(&mut reader), None);
    });
}
