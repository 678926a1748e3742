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
/// The process asked for by number is gone, does not use the card, or is not ours to look into.
pub(crate) fn of(pid: Option<u32>, with_qps: impl Fn(u32) -> bool) -> Result<Vec<User>, Failure> {
    let pids = pid.map_or_else(stat::pids, |pid| vec![pid]);
    let mut found = Vec::new();
    for one in pids {
        match stat::page_of(one) {
            Ok(Some(page)) => {
                let qps = with_qps(one).then(|| queue_pairs(&page));
                found.push(User { pid: one, command: command(one), page, qps });
            }
            // Processes that are gone or not ours to look into are nobody's error, unless asked for by
            // number.
            Err(error) if pid.is_some() => {
                return Err(Failure::new(1, format!("process {one}: {error}")));
            }
            Ok(None) if pid.is_some() => {
                return Err(Failure::new(1, format!("process {one} does not use the card")));
            }
            Ok(None) | Err(_) => {}
        }
    }
    Ok(found)
}

/// The process `pid`, without its queue pairs.
///
/// # Errors
/// As of [`of`].
pub(crate) fn one(pid: u32) -> Result<User, Failure> {
    let found = of(Some(pid), |_| false)?.pop();
    found.ok_or_else(|| Failure::new(1, format!("process {pid} does not use the card")))
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
