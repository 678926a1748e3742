//! What ran, as it runs.

use std::time::Instant;

use crate::world::{Boot, Parts, World};

/// The verdicts so far.
pub(crate) struct Report {
    passed: usize,
    failed: Vec<String>,
    started: Instant,
}

impl Report {
    pub(crate) fn new() -> Report {
        Report { passed: 0, failed: Vec::new(), started: Instant::now() }
    }

    /// Boots guests, and says so.
    pub(crate) fn boot(&self, parts: &Parts, boot: &Boot) -> Result<World, String> {
        let begun = Instant::now();
        let world = World::new(parts, boot)?;
        let (package, line, seconds) = (&parts.kernel.package, boot.line, begun.elapsed().as_secs_f64());
        println!("board-guest: {package} is up after {seconds:.1} s {line}");
        Ok(world)
    }

    /// Notes and prints what came of a case.
    pub(crate) fn add(&mut self, title: &str, verdict: Result<String, String>) {
        let seconds = self.started.elapsed().as_secs();
        match verdict {
            Ok(remark) => {
                println!("[{seconds:>3} s] ok    {title}   {remark}");
                self.passed += 1;
            }
            Err(reason) => {
                println!("[{seconds:>3} s] FAIL  {title}\n{reason}");
                self.failed.push(title.to_owned());
            }
        }
    }

    /// Prints the sum; whether nothing failed.
    pub(crate) fn conclude(&self) -> bool {
        let (passed, failed) = (self.passed, self.failed.len());
        println!("board-guest: {passed} passed, {failed} failed in {} s", self.started.elapsed().as_secs());
        self.failed.iter().for_each(|title| println!("FAILED  {title}"));
        failed == 0 && passed > 0
    }
}
