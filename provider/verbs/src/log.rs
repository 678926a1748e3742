//! What the library says on standard error, as the setting LOG asks: of calls that are refused, of objects
//! that fail, of what is opened and connected. Nothing is said with the card's lock held: what fails there is
//! noted (`notes`).
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
    let mut text = Line { bytes: [0; LONGEST], len: 0 };
    /* what does not fit is cut, which is no error */
    let _ = write!(text, "starverbs[{}]: {line}", std::process::id());
    text.bytes[text.len] = b'\n';
    starverbs_backend::write_line(&text.bytes[..=text.len]);
}

/// A line being written, with room for its end.
struct Line {
    bytes: [u8; LONGEST],
    len: usize,
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = LONGEST - 1 - self.len;
        let fits = &text.as_bytes()[..text.len().min(room)];
        self.bytes[self.len..][..fits.len()].copy_from_slice(fits);
        self.len += fits.len();
        Ok(())
    }
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
