//! `starverbs board test`: goes through the rules of docs/board.md against a board.

use std::io::{self, Write};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use starverbs_rules::{BenchOptions, BoardRule, RULES, RuleResult, Wire, run};
use starverbs_settings::Settings;

use crate::Failure;

/// Test a board: go through the numbered rules of docs/board.md, as far as they can be seen from outside.
///
/// At a socket the function is used and reset; at the kernel's device the rules are gone through that a
/// program can see. No program may use it meanwhile. Exit status 1: a rule is not kept.
#[derive(clap::Args)]
pub(super) struct Args {
    /// Socket of the function to test, or /dev/starN; a second one has rules tested that need two functions
    #[arg(value_name = "BOARD", required = true, num_args = 1..=2)]
    sockets: Vec<PathBuf>,
    /// Test this rule alone, as B17 or 17; may be given more than once
    #[arg(long = "rule", value_name = "N", value_parser = rule_number)]
    rules: Vec<u32>,
    /// How long the board may take for one thing
    #[arg(long, value_name = "SECONDS", default_value_t = 10,
          value_parser = clap::value_parser!(u64).range(1..=600))]
    patience: u64,
    /// An address of this host that the board reaches, to see its frames (B27); its port is STARVERBS_PORT's
    #[arg(long, value_name = "ADDRESS")]
    address: Option<IpAddr>,
}

fn rule_number(text: &str) -> Result<u32, String> {
    let number = text.strip_prefix(['B', 'b']).unwrap_or(text).parse();
    number
        .ok()
        .filter(|number| RULES.iter().any(|rule| rule.number == *number))
        .ok_or_else(|| format!("docs/board.md has rules B1 to B{}", RULES.len()))
}

pub(super) fn test(args: &Args) -> Result<(), Failure> {
    let settings = Settings::load().map_err(|error| Failure::new(2, error))?;
    let options = BenchOptions {
        sockets: args.sockets.clone(),
        patience: Duration::from_secs(args.patience),
        wire: args.address.map(|address| Wire { address, port: settings.port }),
    };
    let wanted = |rule: &BoardRule| args.rules.is_empty() || args.rules.contains(&rule.number);
    let (mut passed, mut failed, mut not_tested) = (0, Vec::new(), 0);
    let sound = run(&options, wanted, |rule, outcome| {
        match outcome {
            RuleResult::Passed => passed += 1,
            RuleResult::Failed { .. } => failed.push(format!("B{}", rule.number)),
            RuleResult::NotTested(_) => not_tested += 1,
        }
        let _ = writeln!(io::stdout(), "{}", line(rule, outcome));
    });
    let _ = writeln!(io::stdout(), "{passed} passed, {} FAILED, {not_tested} not tested", failed.len());
    if sound { Ok(()) } else { Err(Failure::new(1, format!("the board breaks {}", failed.join(", ")))) }
}

/// What became of a rule, on one line or three.
fn line(rule: &BoardRule, outcome: &RuleResult) -> String {
    let head = format!("{:<4} {}", format!("B{}", rule.number), rule.says);
    match outcome {
        RuleResult::Passed => format!("{head}: passed"),
        RuleResult::NotTested(why) => format!("{head}: not tested ({why})"),
        RuleResult::Failed { expected, seen } => {
            format!("{head}: FAILED\n       expected: {expected}\n       seen:     {seen}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_named_with_or_without_its_letter() {
        assert_eq!([rule_number("B17"), rule_number("b17"), rule_number("17")], [Ok(17), Ok(17), Ok(17)]);
        assert!(["B0", "B999", "x", "BB1", ""].iter().all(|text| rule_number(text).is_err()));
    }

    #[test]
    fn a_line_says_what_was_expected_and_seen() {
        let failed = RuleResult::Failed { expected: "one".to_owned(), seen: "two".to_owned() };
        let text = line(&RULES[16], &failed);
        assert!(text.starts_with("B17  ") && text.contains(": FAILED\n"), "{text}");
        assert!(text.contains("expected: one\n") && text.ends_with("seen:     two"), "{text}");
    }
}
