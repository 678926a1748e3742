//! What runs did, added up: so that one sees that each kind of trouble was there.

use std::collections::BTreeMap;
use std::fmt;

use starverbs_sim::Tally;

/// Counts by group and name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Runs
    pub runs: u64,
    pub(crate) counts: BTreeMap<(&'static str, String), u64>,
}

impl Summary {
    /// One more of `name`.
    pub fn count(&mut self, group: &'static str, name: impl fmt::Debug) {
        self.add(group, &format!("{name:?}"), 1);
    }

    /// `n` more of `name`.
    pub fn add(&mut self, group: &'static str, name: &str, n: u64) {
        if n > 0 {
            *self.counts.entry((group, name.to_owned())).or_default() += n;
        }
    }

    /// How many of `name` there were.
    pub fn of(&self, group: &'static str, name: &str) -> u64 {
        self.counts.get(&(group, name.to_owned())).copied().unwrap_or(0)
    }

    pub(crate) fn wire(&mut self, t: &Tally) {
        let all = [
            ("sent", t.sent),
            ("lost", t.lost),
            ("duplicated", t.duplicated),
            ("reordered", t.reordered),
            ("corrupted", t.corrupted),
            ("overran a queue", t.overrun),
            ("into a cut link", t.cut),
            ("purged", t.purged),
            ("delivered", t.delivered),
        ];
        for (name, n) in all {
            self.add("frames", name, n);
        }
    }

    /// Adds what others did.
    pub fn merge(&mut self, other: &Summary) {
        self.runs += other.runs;
        for ((group, name), n) in &other.counts {
            self.add(group, name, *n);
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "runs: {}", self.runs)?;
        let mut last = "";
        for ((group, name), n) in &self.counts {
            if *group != last {
                write!(f, "\n{group}:")?;
                last = group;
            }
            write!(f, "  {} {n}", name.trim_matches('"'))?;
        }
        Ok(())
    }
}
