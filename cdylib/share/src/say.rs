//! What has to be said on standard error, in a process whose memory may be short.

use std::io::Write as _;

use crate::system;

/// Writes a line.
pub(crate) fn say(what: core::fmt::Arguments<'_>) {
    let mut line = [0u8; 256];
    let mut rest = &mut line[..];
    let _ = writeln!(rest, "starverbs: STARVERBS_SHARE: {what}");
    let left = rest.len();
    let length = line.len() - left;
    crate::errno::kept(|| system::write(libc::STDERR_FILENO, &line[..length]));
}
