//! A ring of messages against a plain queue, and against a peer that writes anything.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};
use std::collections::VecDeque;

use proptest::prelude::*;

use crate::{Broken, MessageHead, MessageReader, MessageWriter, Written};

/// Memory as both sides have it mapped: the head, and the bytes behind it.
struct Memory {
    words: Vec<u64>,
    size: u32,
}

const HEAD: usize = size_of::<MessageHead>();

impl Memory {
    fn new(size: u32) -> Memory {
        let words = (HEAD + size as usize + 64).div_ceil(8);
        Memory { words: vec![0; words], size }
    }

    fn parts(&mut self) -> (NonNull<MessageHead>, NonNull<u8>) {
        let base = self.words.as_mut_ptr().cast::<u8>();
        let base = base.wrapping_add(base.align_offset(align_of::<MessageHead>()));
        let head = NonNull::new(base.cast()).expect("an address");
        (head, NonNull::new(base.wrapping_add(HEAD)).expect("an address"))
    }

    fn ends(&mut self) -> (MessageWriter, MessageReader) {
        let size = self.size;
        let (head, data) = self.parts();
        // SAFETY: the tests keep the memory as long as both ends, and use one thread.
        unsafe { (MessageWriter::new(head, data, size), MessageReader::new(head, data, size)) }
    }

    /// What a peer that may write everywhere does: byte `at`, of the head or behind it.
    fn set(&mut self, at: usize, byte: u8) {
        let at = at % (HEAD + self.size as usize);
        let (head, _) = self.parts();
        let base = head.as_ptr().cast::<u8>();
        // SAFETY: inside of the memory, of which nobody holds a reference now. Words of the head are written
        // as the other side writes them, whole, which miri's weak memory asks for.
        unsafe {
            if at >= HEAD {
                return base.add(at).write(byte);
            }
            let word = AtomicU32::from_ptr(base.add(at & !3).cast());
            let mut bytes = word.load(Ordering::Relaxed).to_ne_bytes();
            bytes[at & 3] = byte;
            word.store(u32::from_ne_bytes(bytes), Ordering::Relaxed);
        }
    }
}

fn take(reader: &mut MessageReader) -> Option<Vec<u8>> {
    let len = reader.peek().expect("an honest peer")?;
    let mut bytes = vec![0; len + 3];
    let copied = reader.copy(0, &mut bytes);
    bytes.truncate(copied);
    reader.pop();
    Some(bytes)
}

proptest! {
    /// The same messages come out that went in, in their order; full and empty are correct.
    #[test]
    fn messages_come_out_as_they_went_in(
        size in 4u32..10,
        steps in prop::collection::vec((any::<bool>(), 0usize..80, any::<u8>()), 1..300),
    ) {
        let mut memory = Memory::new(1 << size);
        let (mut writer, mut reader) = memory.ends();
        let mut plain = VecDeque::new();
        for (write, len, byte) in steps {
            if write {
                let message: Vec<u8> = (0..len).map(|at| byte.wrapping_add(at as u8)).collect();
                let (head, body) = message.split_at(len / 3);
                let fits = writer.has_room(len).unwrap();
                prop_assert_eq!(writer.push(&[head, body]).unwrap() != Written::NoRoom, fits);
                if fits {
                    plain.push_back(message);
                } else if plain.is_empty() {
                    prop_assert!(len + 4 > 1 << size, "an empty ring takes all that is shorter than it");
                }
            } else {
                prop_assert_eq!(take(&mut reader), plain.pop_front());
            }
        }
    }

    /// A peer writes any bytes anywhere, at any time: no side reads or writes outside (miri looks), goes on
    /// for ever or panics, and no message is longer than the ring.
    #[test]
    fn a_peer_that_writes_anything_does_no_harm(
        steps in prop::collection::vec((0usize..6, any::<usize>(), any::<u8>()), 1..200),
    ) {
        let mut memory = Memory::new(64);
        let (mut writer, mut reader) = memory.ends();
        let mut room = [0; 80];
        for (step, at, byte) in steps {
            match step {
                0 => { let _ = writer.push(&[&room[..at % 80]]); }
                1 => { let _ = writer.await_room(at % 28); }
                2 => { let _ = reader.sleep(); }
                3 => {
                    if let Ok(Some(len)) = reader.peek() {
                        prop_assert!(len < 64 && reader.copy(at % 80, &mut room) <= len);
                        reader.pop();
                    }
                }
                /* the counts are where it does most */
                4 => memory.set([0, 64, 128][at % 3] + at % 5, byte),
                _ => memory.set(at, byte),
            }
        }
    }
}

#[test]
fn sleepers_are_woken_once() {
    let mut memory = Memory::new(64);
    let (mut writer, mut reader) = memory.ends();
    assert_eq!(reader.sleep(), Ok(true));
    assert_eq!(writer.push(&[b"one"]), Ok(Written::Yes { wake: true }));
    assert_eq!(writer.push(&[b"two"]), Ok(Written::Yes { wake: false }));
    assert_eq!(reader.sleep(), Ok(false), "there is something");
    assert_eq!(writer.push(&[&[7; 38]]), Ok(Written::Yes { wake: false }), "it looks by itself");
    assert_eq!(writer.push(&[b"more"]), Ok(Written::NoRoom));
    assert_eq!(writer.await_room(4), Ok(false));
    let woken: Vec<bool> = (0..3).map(|_| reader.peek().is_ok() && reader.pop()).collect();
    assert_eq!(woken, [false, false, true], "once half of it is free");
    assert!(!reader.pop(), "there is nothing");
    assert_eq!(writer.await_room(writer.longest()), Ok(true));
}

#[test]
fn counts_that_cannot_be_are_found_out() {
    let broken = |at: usize, value: u8| {
        let mut memory = Memory::new(64);
        let (mut writer, mut reader) = memory.ends();
        writer.push(&[b"message"]).expect("room");
        memory.set(at, value);
        (writer.has_room(60).err(), reader.peek().err())
    };
    assert_eq!(broken(0, 80), (None, Some(Broken)), "more is written than the ring holds");
    assert_eq!(broken(0, 13), (None, Some(Broken)), "half a unit");
    assert_eq!(broken(64, 24), (Some(Broken), None), "more is read than was written");
    assert_eq!(broken(HEAD, 13), (None, Some(Broken)), "a message longer than what is written");
    assert_eq!(broken(HEAD, 9), (None, None));
}
