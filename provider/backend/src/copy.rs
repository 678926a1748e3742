//! Copies to memory that others look at meanwhile.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

/// Bytes of the word that is written last of `len` bytes at `to`: the largest up to eight that ends where
/// they end, is aligned, and lies in them. Its store is one on every CPU; that of a word that is not aligned
/// is so on x86-64 alone.
#[inline]
fn last_word(to: usize, len: usize) -> usize {
    match len {
        0 => 0,
        _ => 1 << to.wrapping_add(len).trailing_zeros().min(len.ilog2()).min(3),
    }
}

/// Copies `len` bytes; those of a short message without a call.
///
/// # Safety
/// [from, from + len) can be read, [to, to + len) can be written. Others may change the former meanwhile: its
/// bytes are copied, and not looked at.
#[inline]
pub unsafe fn copy_short(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: the caller's terms; the two words lie inside both ranges, and are read before one is written.
    unsafe {
        if matches!(len, 8..=16) {
            let (first, last) =
                (from.cast::<u64>().read_unaligned(), from.add(len - 8).cast::<u64>().read_unaligned());
            to.cast::<u64>().write_unaligned(first);
            to.add(len - 8).cast::<u64>().write_unaligned(last);
        } else {
            to.copy_from(from, len);
        }
    }
}

/// Copies `len` bytes to `to`, the last word last: programs spin on it, as cards write in order.
///
/// # Safety
/// [from, from + len) can be read, [to, to + len) can be written. Others may change the former meanwhile: its
/// bytes are copied, and not looked at.
#[inline]
pub unsafe fn write_in_order(to: *mut u8, from: *const u8, len: usize) {
    if len == 8 && to.addr().is_multiple_of(8) {
        // SAFETY: the caller's terms, and the alignment.
        unsafe {
            AtomicU64::from_ptr(to.cast()).store(from.cast::<u64>().read_unaligned(), Ordering::Release)
        };
        return;
    }
    let word = last_word(to.addr(), len);
    let body = len - word;
    let mut tail = [0; 8];
    // SAFETY: the caller's terms; `last_word` is at most eight and at most `len`, and aligns the tail to its
    // length.
    unsafe {
        to.copy_from(from, body);
        tail.as_mut_ptr().copy_from_nonoverlapping(from.add(body), word);
        let at = to.add(body);
        /* release: the body, and what was written before, ahead of the word */
        fence(Ordering::Release);
        let [a, b, c, d, ..] = tail;
        match word {
            1 => AtomicU8::from_ptr(at).store(a, Ordering::Relaxed),
            2 => AtomicU16::from_ptr(at.cast()).store(u16::from_ne_bytes([a, b]), Ordering::Relaxed),
            4 => AtomicU32::from_ptr(at.cast()).store(u32::from_ne_bytes([a, b, c, d]), Ordering::Relaxed),
            8 => AtomicU64::from_ptr(at.cast()).store(u64::from_ne_bytes(tail), Ordering::Relaxed),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_word_is_aligned_and_last() {
        for (to, len) in (64..80usize).flat_map(|to| (1..40).map(move |len| (to, len))) {
            let word = last_word(to, len);
            assert!(word <= len && (to + len).is_multiple_of(word), "{len} bytes at {to}: {word}");
            let larger = 2 * word;
            assert!(
                word == 8 || larger > len || !(to + len).is_multiple_of(larger),
                "{len} bytes at {to}: {word}"
            );
        }
        assert_eq!(last_word(64, 0), 0);
    }

    #[test]
    fn writing_in_order_writes_all_and_no_more() {
        let data: [u8; 40] = std::array::from_fn(|n| n as u8 + 1);
        for (at, len) in (8..24usize).flat_map(|at| (0..=data.len()).map(move |len| (at, len))) {
            let mut room = [0u64; 10];
            let bytes = room.as_mut_ptr().cast::<u8>();
            // SAFETY: at + len <= 64 bytes of the room's 80.
            unsafe { write_in_order(bytes.add(at), data.as_ptr(), len) };
            let written = room.map(u64::to_ne_bytes).concat();
            let (before, rest) = written.split_at(at);
            assert!(rest[..len] == data[..len], "{len} bytes at {at}");
            assert!(before.iter().chain(&rest[len..]).all(|byte| *byte == 0), "{len} bytes at {at}");
        }
    }

    /// A program spins on the last word of each message, as `ib_write_lat` does: whole, and behind all the
    /// rest.
    #[test]
    fn who_sees_the_last_word_sees_the_rest() {
        const ROUNDS: u64 = if cfg!(miri) { 8 } else { 2000 };
        let room: [AtomicU64; 3] = Default::default();
        let at = room.as_ptr() as usize;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=ROUNDS {
                    let words = [round, round, round].map(u64::to_ne_bytes).concat();
                    // SAFETY: the room, which is read below behind its last word alone.
                    unsafe { write_in_order(at as *mut u8, words.as_ptr(), words.len()) };
                    while room[0].load(Ordering::Acquire) != 0 {
                        std::thread::yield_now();
                    }
                }
            });
            for round in 1..=ROUNDS {
                let last = || match room[2].load(Ordering::Acquire) {
                    seen if seen == round => true,
                    seen => {
                        assert_eq!(seen, round - 1, "half a word");
                        std::thread::yield_now();
                        false
                    }
                };
                while !last() {}
                // SAFETY: the writer waits for a zero in the first word, and the second is plain memory.
                let second = unsafe { (&raw const room[1]).cast::<u64>().read() };
                assert_eq!((room[0].load(Ordering::Relaxed), second), (round, round));
                room[0].store(0, Ordering::Release);
            }
        });
    }
}
