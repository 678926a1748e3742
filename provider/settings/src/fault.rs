//! The fault specification: what happens to frames on their way out.

use std::fmt;
use std::time::Duration;

use crate::value;

/// How a frame is hurt before it is sent. Probabilities are per frame, 0 to 1; each is drawn from one
/// generator started with `seed`, so that a run can be repeated.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FaultSpec {
    /// Probability that a frame is not sent.
    pub loss: f64,
    /// Probability that a frame is held back and sent after its successor.
    pub reorder: f64,
    /// Probability that a frame is sent twice.
    pub duplicate: f64,
    /// Probability that one bit of a frame is turned over (the receiver's ICRC check must catch it).
    pub corrupt: f64,
    /// Time that every frame waits before it is sent.
    pub delay: Duration,
    /// Further time, evenly distributed from zero to this, that a frame waits.
    pub jitter: Duration,
    /// Start of the random sequence.
    pub seed: u64,
}

/// Values of `STARVERBS_FAULT`.
pub(crate) const SYNTAX: &str = "comma-separated loss=, reorder=, dup=, corrupt= (as 1% or 0.01), delay=, \
                                 jitter= (as 50us, 2ms, 1s), seed= (a number); or off";

impl FaultSpec {
    /// Whether any frame can be touched at all.
    pub fn is_active(&self) -> bool {
        let chances = [self.loss, self.reorder, self.duplicate, self.corrupt];
        chances.iter().any(|p| *p > 0.0) || !self.delay.is_zero() || !self.jitter.is_zero()
    }

    /// Parses `loss=1%,delay=50us,seed=7`, in any order; `off` and the empty text are no fault at all.
    ///
    /// # Errors
    /// A sentence with the part that cannot be understood.
    pub fn parse(text: &str) -> Result<FaultSpec, String> {
        let mut spec = FaultSpec::default();
        if text == "off" {
            return Ok(spec);
        }
        let mut seen = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (name, given) = part.split_once('=').ok_or_else(|| format!("{part:?} is not NAME=VALUE"))?;
            let (name, given) = (name.trim(), given.trim());
            if seen.contains(&name) {
                return Err(format!("{name:?} is given twice"));
            }
            seen.push(name);
            spec.set(name, given).map_err(|reason| format!("{name}={given}: {reason}"))?;
        }
        Ok(spec)
    }

    fn set(&mut self, name: &str, given: &str) -> Result<(), String> {
        match name {
            "loss" => self.loss = value::probability(given)?,
            "reorder" => self.reorder = value::probability(given)?,
            "dup" | "duplicate" => self.duplicate = value::probability(given)?,
            "corrupt" => self.corrupt = value::probability(given)?,
            "delay" => self.delay = value::duration(given)?,
            "jitter" => self.jitter = value::duration(given)?,
            "seed" => self.seed = given.parse().map_err(|_| "not a number from 0 to 2^64-1".to_owned())?,
            _ => return Err("no such fault".to_owned()),
        }
        Ok(())
    }
}

impl fmt::Display for FaultSpec {
    /// Writes what [`FaultSpec::parse`] reads, leaving out what is zero.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        let chances = [
            ("loss", self.loss),
            ("reorder", self.reorder),
            ("dup", self.duplicate),
            ("corrupt", self.corrupt),
        ];
        parts.extend(chances.iter().filter(|(_, p)| *p > 0.0).map(|(name, p)| format!("{name}={p}")));
        let waits = [("delay", self.delay), ("jitter", self.jitter)];
        parts.extend(
            waits.iter().filter(|(_, d)| !d.is_zero()).map(|(n, d)| format!("{n}={}ns", d.as_nanos())),
        );
        if self.seed != 0 {
            parts.push(format!("seed={}", self.seed));
        }
        if parts.is_empty() { f.write_str("off") } else { f.write_str(&parts.join(",")) }
    }
}
