//! A driver of a board without a library ([`RawDriver`]), and the runner of docs/board.md's numbered rules
//! ([`run`]): what it can see from outside of each, on any board that it reaches.
//!
//! Owns what a rule's test does and what it reports. It must not know how the board that it tests is made:
//! the emulated one goes through the same tests as gateware. Of a board that is silent or lies it waits for
//! nothing longer than it was told to, and touches no memory that such a board could take away.

mod bench;
mod fault;
mod kernel;
mod link;
mod memory;
pub mod qp;
pub mod raw;
mod rules;

use std::time::Instant;

pub use bench::{BenchOptions, Wire};
pub use fault::{RuleFault, Tested};
pub use link::{BoardLink, BoardPatience};
pub use memory::MemoryFile;
pub use qp::RawQp;
pub use raw::RawDriver;
pub use rules::{BoardRule, RULES};

use bench::Bench;

/// Rules in a row that end without an answer of the board before it is given up.
const GIVEN_UP: u32 = 3;

/// What became of a rule.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RuleResult {
    /// The board does what it says, as far as one can see from outside.
    Passed,
    /// It does not.
    Failed {
        /// What the rule asks for
        expected: String,
        /// What the board did
        seen: String,
    },
    /// It was not tested: why.
    NotTested(String),
}

/// Goes through the rules for which `wanted` says yes, in order; `tell` gets what became of each when it is
/// done. Whether none failed.
pub fn run(
    options: &BenchOptions,
    mut wanted: impl FnMut(&BoardRule) -> bool,
    mut tell: impl FnMut(&BoardRule, &RuleResult),
) -> bool {
    let (mut sound, mut silent) = (true, 0);
    for rule in RULES.iter().filter(|rule| wanted(rule)) {
        let outcome = match rule.test {
            Err(why) => RuleResult::NotTested(why.to_owned()),
            Ok(_) if rule.of_function && options.is_device() => RuleResult::NotTested(
                "needs the board's function, of which the kernel is the driver".to_owned(),
            ),
            Ok(_) if silent >= GIVEN_UP => RuleResult::Failed {
                expected: "a board that answers".to_owned(),
                seen: "given up: it did not answer in the rules before".to_owned(),
            },
            Ok(test) => {
                let begun = Instant::now();
                let tested = test(&mut Bench::new(options));
                let slow = tested.is_err() && begun.elapsed() >= options.patience / 2;
                silent = if slow { silent + 1 } else { 0 };
                outcome(tested)
            }
        };
        sound &= !matches!(outcome, RuleResult::Failed { .. });
        tell(rule, &outcome);
    }
    sound
}

fn outcome(tested: Tested) -> RuleResult {
    match tested {
        Ok(()) => RuleResult::Passed,
        Err(RuleFault::Failed { expected, seen }) => RuleResult::Failed { expected, seen },
        Err(RuleFault::Skipped(why)) => RuleResult::NotTested(why),
    }
}
