//! What two processes tell each other: messages, records, doorbells.

use loom::sync::Arc;
use loom::thread;
use starverbs_rings::crash::{crash_after, has_crashed};
use starverbs_rings::{
    MessageHead, MessageReader, MessageWriter, Notify, PeerDoorbell, RECORD_WORDS, SlotHead, SlotMemory,
    SlotReader, SlotWriter, StampedRecord, Written,
};

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

/// A writer is killed at any step, maybe with a record that it has not finished. The reader finds those that
/// were finished, whole, then none, and waits for nothing.
#[test]
fn a_killed_writer_leaves_whole_records() {
    for stores in 0..=4 {
        loom::model(move || {
            let (mut writer, mut reader) = slot_ring();
            let peer = thread::spawn(move || {
                crash_after(stores);
                let mut written = 0;
                while written < 2 {
                    let lives = !has_crashed();
                    assert!(write_record(&mut writer, written + 1), "there is room");
                    if !lives {
                        break;
                    }
                    written += 1;
                    writer.must_notify();
                }
                written
            });
            let mut found = 0;
            let mut read_all = |reader: &mut SlotReader| {
                while let Some(byte) = read_record(reader) {
                    found += 1;
                    assert_eq!(byte, found);
                    reader.give_back();
                }
                found
            };
            read_all(&mut reader);
            reader.sleep();
            let written = peer.join().unwrap();
            /* the kernel tells of the end */
            assert_eq!(read_all(&mut reader), written);
        });
    }
}

/// A reader is killed at any step: its writer goes on until the ring is full, and writes over nothing that
/// was not given back.
#[test]
fn a_killed_reader_leaves_a_full_ring() {
    for stores in 0..=4 {
        loom::model(move || {
            let (mut writer, mut reader) = slot_ring();
            assert!(write_record(&mut writer, 1) && write_record(&mut writer, 2));
            let peer = thread::spawn(move || {
                crash_after(stores);
                let mut lives = true;
                while lives && read_record(&mut reader).is_some() {
                    lives = !has_crashed();
                    reader.give_back();
                }
            });
            let mut written = 2;
            let mut write_all = |writer: &mut SlotWriter| {
                while written < 4 && write_record(writer, written + 1) {
                    written += 1;
                }
                u32::from(written)
            };
            write_all(&mut writer);
            writer.sleep().unwrap();
            peer.join().unwrap();
            let given_back = writer.look().unwrap();
            assert_eq!(write_all(&mut writer), 4.min(2 + given_back));
        });
    }
}

/// The same of messages.
#[test]
fn a_killed_writer_leaves_whole_messages() {
    for stores in 0..=4 {
        loom::model(move || {
            let (mut writer, mut reader) = message_ring();
            let peer = thread::spawn(move || {
                crash_after(stores);
                let mut written = 0;
                while written < 2 {
                    let lives = !has_crashed();
                    assert!(matches!(writer.push(&[&[written + 1; 4]]), Ok(Written::Yes { .. })));
                    if !lives {
                        break;
                    }
                    written += 1;
                }
                written
            });
            let mut found = 0;
            let mut read_all = |reader: &mut MessageReader| {
                while let Some(bytes) = read(reader) {
                    found += 1;
                    assert_eq!(bytes, [found; 4]);
                    reader.pop();
                }
                found
            };
            read_all(&mut reader);
            reader.sleep().unwrap();
            let written = peer.join().unwrap();
            assert_eq!(read_all(&mut reader), written);
        });
    }
}

/// And of who reads them.
#[test]
fn a_killed_reader_leaves_a_full_ring_of_messages() {
    for stores in 0..=4 {
        loom::model(move || {
            let (mut writer, mut reader) = message_ring();
            let mut push = |byte| writer.push(&[&[byte; 4]]).unwrap() != Written::NoRoom;
            assert!(push(1) && push(2));
            let peer = thread::spawn(move || {
                crash_after(stores);
                let (mut lives, mut given_back) = (true, 0);
                while lives && read(&mut reader).is_some() {
                    lives = !has_crashed();
                    reader.pop();
                    given_back += usize::from(lives);
                }
                given_back
            });
            let early = (3..=4).take_while(|byte| push(*byte)).count();
            writer.await_room(4).unwrap();
            let given_back = peer.join().unwrap();
            let mut push = |byte| writer.push(&[&[byte; 4]]).unwrap() != Written::NoRoom;
            let late = (3..=4).skip(early).take_while(|byte| push(*byte)).count();
            assert_eq!(early + late, given_back.min(2), "{early} {late}");
        });
    }
}
