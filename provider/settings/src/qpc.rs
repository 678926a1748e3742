//! The QP context cache: a card that has room for few contexts, and what a miss costs it.

use std::fmt;
use std::time::Duration;

use crate::value;

/// How requests for contexts are served (csRNA's policies).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum QpcPolicy {
    /// First come, first served: a miss blocks all that come after it.
    Fcfs,
    /// Others pass a miss.
    NonBlocking,
    /// Others pass, and a context is fetched while its work requests are.
    #[default]
    LatencyHiding,
}

const POLICIES: [(&str, QpcPolicy); 3] = [
    ("fcfs", QpcPolicy::Fcfs),
    ("non-blocking", QpcPolicy::NonBlocking),
    ("latency-hiding", QpcPolicy::LatencyHiding),
];

/// A card with a cache for `entries` contexts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpcSpec {
    /// Contexts in the cache, at least one.
    pub entries: u32,
    /// Time until a context comes that is not in the cache.
    pub miss: Duration,
    /// Time until the work requests of a doorbell come.
    pub fetch: Duration,
    /// How requests are served.
    pub policy: QpcPolicy,
}

/// Values of `STARVERBS_QPC_CACHE`.
pub(crate) const SYNTAX: &str = "entries, then comma-separated miss= (at most 1ms), fetch= (as miss, when \
                                 not given), policy= (fcfs, non-blocking or latency-hiding), as \
                                 300,miss=500ns; or off";

/// PCIe's round trip (csRNA, section 3).
const MISS: Duration = Duration::from_nanos(500);
/// As the shortest timeout of the card.
const LONGEST: Duration = Duration::from_millis(1);

impl QpcSpec {
    /// Parses `300,miss=500ns,fetch=500ns,policy=fcfs`; `off` is none. In a file, the first may be `entries =
    /// 300`.
    ///
    /// # Errors
    /// A sentence with the part that cannot be understood.
    pub fn parse(text: &str) -> Result<Option<QpcSpec>, String> {
        if text == "off" {
            return Ok(None);
        }
        let (mut entries, mut miss, mut fetch, mut policy) = (None, None, None, None);
        for (at, part) in text.split(',').map(str::trim).enumerate() {
            let (name, given) = match part.split_once('=') {
                Some((name, given)) => (name.trim(), given.trim()),
                None if at == 0 => ("entries", part),
                None => return Err(format!("{part:?} is not NAME=VALUE")),
            };
            let read = match name {
                "entries" => set(&mut entries, count(given)),
                "miss" => set(&mut miss, time(given)),
                "fetch" => set(&mut fetch, time(given)),
                "policy" => set(&mut policy, value::word(&POLICIES, given)),
                _ => Err("there is no such part".to_owned()),
            };
            read.map_err(|reason| format!("{name}={given}: {reason}"))?;
        }
        let entries = entries.ok_or_else(|| "the number of entries is missing".to_owned())?;
        let miss = miss.unwrap_or(MISS);
        let policy = policy.unwrap_or_default();
        Ok(Some(QpcSpec { entries, miss, fetch: fetch.unwrap_or(miss), policy }))
    }
}

fn set<T>(field: &mut Option<T>, given: Result<T, String>) -> Result<(), String> {
    if field.replace(given?).is_some() { Err("given twice".to_owned()) } else { Ok(()) }
}

fn count(given: &str) -> Result<u32, String> {
    match given.parse() {
        Ok(count @ 1..=0x100_0000) => Ok(count),
        _ => Err("not a number from 1 to 16777216".to_owned()),
    }
}

fn time(given: &str) -> Result<Duration, String> {
    let time = value::duration(given)?;
    if time <= LONGEST { Ok(time) } else { Err("at most 1ms".to_owned()) }
}

impl fmt::Display for QpcSpec {
    /// Writes what [`QpcSpec::parse`] reads.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (miss, fetch) = (self.miss.as_nanos(), self.fetch.as_nanos());
        let policy = value::spell(&POLICIES, &self.policy);
        write!(f, "{},miss={miss}ns,fetch={fetch}ns,policy={policy}", self.entries)
    }
}
