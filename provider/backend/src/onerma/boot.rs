//! Who a card is in its initialisation vectors, and with which number it begins.

use std::ops::Range;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use starverbs_core::Gid;
use starverbs_onerma::CARDS;

/// Seconds from 1970 to 2024, when epochs begin.
const FIRST: Duration = Duration::from_secs(1_704_067_200);
/// Numbers that a card gets at a time: a minute's.
const COUNT: u64 = 1 << 32;
/// Bits of a number that count parts of a second.
const PARTS: u32 = 26;
/// Where the card of an address stands in its numbers.
const CARD_SHIFT: u32 = PARTS + 31;
const _: () = assert!(CARDS as u64 == 1 << (63 - CARD_SHIFT));

/// Who a card is in its initialisation vectors: its IPv4 address, or all words of its IPv6 address, added
/// without carry. Two cards may have one: the ends of an operation differ by a bit of their counters, and
/// targets that share K_r must not share an address.
pub fn sender_of(addr: &Gid) -> u32 {
    if let Some(addr) = addr.ipv4() {
        return u32::from_be_bytes(addr);
    }
    let words = addr.0.as_chunks::<4>().0.iter().map(|word| u32::from_be_bytes(*word));
    words.fold(0, |sum, word| sum ^ word)
}

/// The message numbers of a card of an address that begins now: its own, and of these from the time since
/// 2024 on, in units of 2^-26 seconds, of which 31 bits count seconds. They repeat after 68 years.
///
/// A message takes longer than such a unit (15 ns), so a card's numbers stay behind the clock, and the same
/// card of the address that begins when this one has ended begins beyond them. `None`: the clock was never
/// set.
pub fn numbers_at(now: SystemTime, card: u8) -> Option<Range<u64>> {
    let since = now.duration_since(UNIX_EPOCH + FIRST).ok()?;
    let parts = (u64::from(since.subsec_nanos()) << PARTS) / 1_000_000_000;
    let time = (since.as_secs() & 0x7fff_ffff) << PARTS | parts;
    let of_card = u64::from(card % CARDS) << CARD_SHIFT;
    Some(of_card + time..of_card + (time + COUNT).min(1 << CARD_SHIFT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sender_is_an_address() {
        assert_eq!(sender_of(&Gid::from_ipv4([10, 1, 2, 3])), 0x0a01_0203);
        let mut six = [0; 16];
        six[..4].copy_from_slice(&[0x20, 1, 0xd, 0xb8]);
        six[15] = 1;
        assert_eq!(sender_of(&Gid(six)), 0x2001_0db9);
    }

    #[test]
    fn numbers_begin_with_the_time() {
        let at = |since| numbers_at(UNIX_EPOCH + FIRST + since, 0).expect("after 2024").start;
        assert_eq!(at(Duration::ZERO), 0);
        assert_eq!(at(Duration::from_millis(5500)), 5 << 26 | 1 << 25);
        assert_eq!(at(Duration::from_secs(1 << 31)), 0, "68 years");
        /* two cards in one microsecond: more numbers lie between them than packets in it */
        assert!(at(Duration::new(7, 1_000)) - at(Duration::new(7, 0)) > 60);
        assert_eq!(numbers_at(UNIX_EPOCH, 0), None, "a clock that was never set");
    }

    #[test]
    fn cards_of_an_address_share_no_number() {
        let last = Duration::from_secs(1 << 31) - Duration::from_nanos(1);
        for since in [Duration::ZERO, Duration::from_secs(70_000_000), last] {
            let mut end = 0;
            for card in 0..CARDS {
                let numbers = numbers_at(UNIX_EPOCH + FIRST + since, card).expect("after 2024");
                assert!(numbers.start >= end && numbers.end > numbers.start);
                assert_eq!(numbers.start >> CARD_SHIFT, u64::from(card));
                end = numbers.end;
            }
            assert!(end <= 1 << 63, "the highest bit is the target's");
        }
    }
}
