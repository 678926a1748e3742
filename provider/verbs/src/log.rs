//! The library's log on standard error, by the setting LOG: refused calls, failed objects, what is opened and
//! connected. Nothing is logged with the card's lock held: failures found there go to the deferred log
//! (`deferred_log`).
//!
//! Owns the level, one for the process, and the way to standard error: a line is written at once or lost. It
//! takes no lock, allocates nothing, raises no SIGPIPE, and does not wait for a reader. (Others who write
//! into the same pipe between the look whether there is room and the line itself may still make it wait.)

use std::fmt::{self, Write as _};
use std::sync::atomic::{AtomicU8, Ordering};

use starverbs_settings::LogLevel;

use crate::error::VerbsError;

/// Bytes of a line; what is longer is cut. Less than PIPE_BUF: a pipe takes such lines whole or not at all.
const LONGEST: usize = 1024;

static LEVEL: AtomicU8 = AtomicU8::new(LogLevel::Off as u8);

/// Sets the level for the process.
pub(crate) fn set_level(level: LogLevel) {
    LEVEL.store(level as u8, Ordering::Relaxed);
}

/// Whether lines of this level are logged.
pub(crate) fn is_enabled(level: LogLevel) -> bool {
    level as u8 <= LEVEL.load(Ordering::Relaxed)
}

/// Writes one line, whatever the level.
pub fn write_line(line: fmt::Arguments<'_>) {
    let mut text = LogLine { bytes: [0; LONGEST], len: 0 };
    /* what does not fit is cut, which is no error */
    let _ = write!(text, "starverbs[{}]: {line}", std::process::id());
    text.bytes[text.len] = b'\n';
    starverbs_backend::write_line(&text.bytes[..=text.len]);
}

/// A line being written, with room for its end.
struct LogLine {
    bytes: [u8; LONGEST],
    len: usize,
}

impl fmt::Write for LogLine {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = LONGEST - 1 - self.len;
        let fits = &text.as_bytes()[..text.len().min(room)];
        self.bytes[self.len..][..fits.len()].copy_from_slice(fits);
        self.len += fits.len();
        Ok(())
    }
}

/// Logs why a control call failed, which its errno cannot say. Finding nothing (yet) is no failure.
pub fn refused(error: &VerbsError) {
    let nothing = matches!(error, VerbsError::Again | VerbsError::NoData | VerbsError::Os(libc::EINTR));
    if is_enabled(LogLevel::Error) && !nothing {
        write_line(format_args!("refused, errno {}: {error}", error.errno()));
    }
}

/// Writes one line, formatted only if its level is asked for.
macro_rules! log {
    ($level:ident, $($line:tt)+) => {
        if $crate::log::is_enabled(starverbs_settings::LogLevel::$level) {
            $crate::log::write_line(format_args!($($line)+));
        }
    };
}
pub(crate) use log;
