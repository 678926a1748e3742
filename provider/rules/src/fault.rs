//! What a rule's test finds.

use std::fmt::{Debug, Display};
use std::io;

/// Why a rule is not passed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RuleFault {
    /// The board does not do what the rule says.
    Failed {
        /// What the rule asks for
        expected: String,
        /// What the board did
        seen: String,
    },
    /// It cannot be tested here: why.
    Skipped(String),
}

/// What a test, or a step of it, gives.
pub type Tested<T = ()> = Result<T, RuleFault>;

impl RuleFault {
    /// The board did something else than it should.
    pub fn failed(expected: impl Display, seen: impl Display) -> RuleFault {
        RuleFault::Failed { expected: expected.to_string(), seen: seen.to_string() }
    }
}

impl From<io::Error> for RuleFault {
    fn from(error: io::Error) -> RuleFault {
        /* ours has no errno: one that a board gives is its own */
        if error.kind() == io::ErrorKind::Unsupported && error.raw_os_error().is_none() {
            return RuleFault::Skipped(error.to_string());
        }
        RuleFault::failed("an answer", format!("{error}"))
    }
}

/// Compares what the board did (`seen`) with what it should.
pub(crate) fn expect<T: PartialEq + Debug>(what: &str, seen: T, expected: T) -> Tested {
    if seen == expected {
        return Ok(());
    }
    Err(RuleFault::failed(format_args!("{what}: {expected:?}"), format_args!("{seen:?}")))
}

/// Wants a condition, and says otherwise what was seen instead.
pub(crate) fn ensure(holds: bool, expected: &str, seen: impl Display) -> Tested {
    if holds { Ok(()) } else { Err(RuleFault::failed(expected, seen)) }
}

/// The errno of a call that should fail; 0, if it did not.
pub(crate) fn errno<T>(done: &io::Result<T>) -> i32 {
    match done {
        Ok(_) => 0,
        Err(error) => error.raw_os_error().unwrap_or(libc::EIO),
    }
}
