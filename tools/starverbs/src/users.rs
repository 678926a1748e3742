//! The processes that use the card: found through /proc, read from their statistics pages.
//!
//! A process itself is asked only for its queue pairs. This must not know how anything is shown.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use starverbs_verbs::stat::{self, Snapshot};

use crate::Failure;

/// How long a process may take to list its queue pairs.
const ANSWER_LIMIT: Duration = Duration::from_millis(500);

/// A process that uses the card.
#[derive(Clone, Debug)]
pub(crate) struct User {
    pub(crate) pid: u32,
    /// Its command line, safe for a terminal.
    pub(crate) command: String,
    pub(crate) page: Snapshot,
    /// Its queue pairs, if asked for: a line of column names, then a line each. Else why it did not tell
    /// them.
    pub(crate) qps: Option<Result<String, String>>,
}

impl User {
    /// The value of a counter; None if the page has none of that name.
    pub(crate) fn counter(&self, name: &str) -> Option<u64> {
        self.page.counters.iter().find(|(n, _)| n == name).map(|(_, value)| *value)
    }
}

/// The process `pid`, or all that may be looked into. `with_qps` says whose queue pairs are asked for.
///
/// # Errors
/// As of [`one`], of a process asked for by number. Others that are gone or not ours to look into are
/// nobody's error.
pub(crate) fn of(pid: Option<u32>, with_qps: impl Fn(u32) -> bool) -> Result<Vec<User>, Failure> {
    match pid {
        Some(pid) => Ok(vec![one(pid, with_qps(pid))?]),
        None => Ok(stat::pids().into_iter().filter_map(|pid| one(pid, with_qps(pid)).ok()).collect()),
    }
}

/// The process `pid`.
///
/// # Errors
/// It is gone, does not use the card, or is not ours to look into.
pub(crate) fn one(pid: u32, with_qps: bool) -> Result<User, Failure> {
    let failed = |why: String| Failure::new(1, format!("process {pid} {why}"));
    let page = stat::page_of(pid).map_err(|error| failed(format!("cannot be looked into: {error}")))?;
    let page = page.ok_or_else(|| failed("does not use the card".to_owned()))?;
    let qps = with_qps.then(|| queue_pairs(&page));
    Ok(User { pid, command: command(pid), page, qps })
}

fn command(pid: u32) -> String {
    let words = fs::read(PathBuf::from(format!("/proc/{pid}/cmdline"))).unwrap_or_default();
    let words = words.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    words.map(|word| stat::printable(&String::from_utf8_lossy(word))).collect::<Vec<_>>().join(" ")
}

fn queue_pairs(page: &Snapshot) -> Result<String, String> {
    ask(page, b"qps", ANSWER_LIMIT)
}

/// What a process says to `text`, safe for a terminal; or why it says nothing.
pub(crate) fn ask(page: &Snapshot, text: &[u8], limit: Duration) -> Result<String, String> {
    let answer = starverbs_backend::ask(page.port, page.first_block, text, limit);
    let explain = |error: io::Error| match error.kind() {
        io::ErrorKind::ConnectionRefused => "not in this network namespace".to_owned(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "does not answer".to_owned(),
        _ => error.to_string(),
    };
    let lines = |bytes: Vec<u8>| {
        let text = String::from_utf8_lossy(&bytes);
        text.lines().map(|line| stat::printable(line) + "\n").collect::<String>()
    };
    answer.map(lines).map_err(explain)
}
