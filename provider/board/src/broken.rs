//! A board that breaks one rule of docs/board.md on purpose, so that the conformance runner is seen to
//! find it.
//!
//! In this crate's tests alone: elsewhere [`rule`] is `false` when it is compiled, and costs nothing.

#[cfg(test)]
use std::cell::Cell;

#[cfg(test)]
thread_local! {
    static BROKEN: Cell<u32> = const { Cell::new(0) };
}

/// Whether this board breaks rule `number`.
#[cfg(test)]
pub(crate) fn rule(number: u32) -> bool {
    BROKEN.get() == number
}

/// Whether this board breaks rule `number`: no.
#[cfg(not(test))]
#[inline(always)]
pub(crate) const fn rule(_: u32) -> bool {
    false
}

/// From now on boards of this thread break rule `number`; 0: none.
#[cfg(test)]
pub(crate) fn set(number: u32) {
    BROKEN.set(number);
}

/// A while in which others see what is done in the wrong order: they have the CPU, if there is but one.
pub(crate) fn linger() {
    let begun = std::time::Instant::now();
    while begun.elapsed() < std::time::Duration::from_micros(200) {
        std::thread::yield_now();
    }
}
