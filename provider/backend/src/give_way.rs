//! Who waits for another thread or process lets it have the CPU.
//!
//! A yield does that well where the others are soon done. One that computes takes its whole slice, and a
//! yield beside four of them lasts five milliseconds, while a thread that slept is next when it wakes.

use std::time::{Duration, Instant};

/// A yield that lasts longer was beside threads that compute.
const LONG: Duration = Duration::from_millis(1);
/// After it, so many times it is better to sleep.
const SLEEPS: u32 = 256;
/// How long.
const SLEEP: Duration = Duration::from_micros(20);

/// Whether one yields or sleeps.
#[derive(Default, Debug)]
pub struct GiveWay {
    sleeps: u32,
}

impl GiveWay {
    /// Yields; or says `false`, and it is better to sleep.
    #[inline]
    pub fn yields(&mut self) -> bool {
        if let Some(fewer) = self.sleeps.checked_sub(1) {
            self.sleeps = fewer;
            return false;
        }
        let begun = Instant::now();
        std::thread::yield_now();
        if begun.elapsed() > LONG {
            self.sleeps = SLEEPS;
        }
        true
    }

    /// Yields or sleeps.
    #[inline]
    pub fn pause(&mut self) {
        if !self.yields() {
            std::thread::sleep(SLEEP);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_yields_again_behind_its_sleeps() {
        let mut give_way = GiveWay { sleeps: 2 };
        assert_eq!([(); 3].map(|()| give_way.yields()), [false, false, true]);
    }
}
