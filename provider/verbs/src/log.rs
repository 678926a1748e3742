//! What the library says on standard error, as the setting LOG asks: of calls that are refused, of objects that fail, of
//! what is opened and connected. Nothing is said on the data path.
//!
//! Owns the level, one for the process. It must not fail: where nobody reads, what it says is lost.

use std::fmt;
use std::io::Write as _;
use std::sync::atomic::{AtomicU8, Ordering};

use starverbs_settings::LogLevel;

use crate::error::VerbsError;

static LEVEL: AtomicU8 = AtomicU8::new(LogLevel::Off as u8);

/// What is said from now on.
pub(crate) fn set_level(level: LogLevel) {
    LEVEL.store(level as u8, Ordering::Relaxed);
}

/// Whether lines of this level are said.
pub(crate) fn says(level: LogLevel) -> bool {
    level as u8 <= LEVEL.load(Ordering::Relaxed)
}

/// Writes one line, whatever the level.
pub fn say(line: fmt::Arguments<'_>) {
    let text = format!("starverbs[{}]: {line}\n", std::process::id());
    /* one write, so that lines of several processes do not mix; whoever closed standard error wants none */
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// A control call fails: says why, which its errno cannot. To find nothing (yet) is no failure.
pub fn refused(error: &VerbsError) {
    let nothing = matches!(error, VerbsError::Again | VerbsError::NoData | VerbsError::Os(libc::EINTR));
    if says(LogLevel::Error) && !nothing {
        say(format_args!("refused, errno {}: {error}", error.errno()));
    }
}

/// Writes one line, formatted only if its level is asked for.
macro_rules! log {
    ($level:ident, $($line:tt)+) => {
        if $crate::log::says(starverbs_settings::LogLevel::$level) {
            $crate::log::say(format_args!($($line)+));
        }
    };
}
pub(crate) use log;
