//! What runs did, added up: so that one sees that each kind of trouble was there.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use starverbs_sim::Tally;

/// Counts by group and name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Runs that were counted
    pub runs: u64,
    pub(crate) counts: BTreeMap<&'static str, BTreeMap<String, u64>>,
    /// Where names are written
    pub(crate) scratch: String,
}

impl Summary {
    /// One more of `name`.
    pub fn count(&mut self, group: &'static str, name: impl fmt::Debug) {
        let mut said = std::mem::take(&mut self.scratch);
        said.clear();
        /* a String takes all that is written to it */
        let _ = write!(said, "{name:?}");
        self.add(group, &said, 1);
        self.scratch = said;
    }

    /// `n` more of `name`.
    pub fn add(&mut self, group: &'static str, name: &str, n: u64) {
        if n > 0 {
            let names = self.counts.entry(group).or_default();
            match names.get_mut(name) {
                Some(count) => *count += n,
                None => _ = names.insert(name.to_owned(), n),
            }
        }
    }

    /// How many of `name` there were.
    pub fn of(&self, group: &'static str, name: &str) -> u64 {
        self.counts.get(group).and_then(|names| names.get(name)).copied().unwrap_or(0)
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
            ("forged", t.forged),
            ("delivered", t.delivered),
        ];
        for (name, n) in all {
            self.add("frames", name, n);
        }
    }

    /// Adds what others did.
    pub fn merge(&mut self, other: &Summary) {
        self.runs += other.runs;
        for (group, names) in &other.counts {
            names.iter().for_each(|(name, n)| self.add(group, name, *n));
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "runs: {}", self.runs)?;
        for (group, names) in &self.counts {
            write!(f, "\n{group}:")?;
            for (name, n) in names {
                write!(f, "  {} {n}", name.trim_matches('"'))?;
            }
        }
        Ok(())
    }
}
