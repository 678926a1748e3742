//! `starverbs bench`: replaces itself with `starverbs-bench`, which measures the card.
//!
//! It is a program of its own, as it carries what only measuring needs. It is looked for beside this command,
//! then on the search path.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use crate::Failure;

const PROGRAM: &str = "starverbs-bench";
/// Status when there is nothing to start, as the shell's.
const NOT_FOUND: u8 = 127;

/// Measure the card (runs starverbs-bench, which `make build` puts beside this command).
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to measure alone; latency, rates and bandwidth beside other stacks, when not given
    name: Option<Name>,
    /// Options of starverbs-bench, as --quick or --out PATH
    #[arg(last = true, value_name = "OPTION")]
    options: Vec<OsString>,
}

/// What can be measured alone.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Name {
    /// StaR against RC, 1 to 10,000 connections
    Star,
    /// Many queue pairs
    Qpc,
    /// Goodput against loss
    Loss,
    /// 1RMA beside RC
    #[value(name = "1rma")]
    Onerma,
    /// StRoM's RPCs against READs
    Strom,
    /// A queue pair beside others whose peer is gone
    Neighbours,
    /// Two processes of one host, each on a processor of its own
    Local,
}

impl Name {
    /// The option of starverbs-bench.
    const fn option(self) -> &'static str {
        match self {
            Name::Star => "--star",
            Name::Qpc => "--qpc",
            Name::Loss => "--loss",
            Name::Onerma => "--onerma",
            Name::Strom => "--strom",
            Name::Neighbours => "--neighbours",
            Name::Local => "--local",
        }
    }
}

impl Args {
    /// The arguments of starverbs-bench.
    fn arguments(&self) -> Vec<OsString> {
        let alone = self.name.map(Name::option);
        alone.into_iter().map(OsString::from).chain(self.options.iter().cloned()).collect()
    }
}

/// Replaces this process; returns only if that fails.
pub(crate) fn bench(args: &Args) -> Result<(), Failure> {
    let beside = std::env::current_exe().ok().map(|own| own.with_file_name(PROGRAM));
    let program = beside.filter(|path| path.exists()).unwrap_or_else(|| PathBuf::from(PROGRAM));
    let error = Command::new(&program).args(args.arguments()).exec();
    Err(Failure::new(NOT_FOUND, format!("{}: {error}", program.display())))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::{Cli, Command};

    #[test]
    fn a_name_is_an_option_of_the_program() {
        let arguments = |line: &[&str]| {
            let Command::Bench(args) = Cli::try_parse_from(line).unwrap().command else {
                panic!("not bench")
            };
            args.arguments()
        };
        assert_eq!(arguments(&["starverbs", "bench", "star", "--", "--quick"]), ["--star", "--quick"]);
        assert_eq!(arguments(&["starverbs", "bench", "1rma"]), ["--onerma"]);
        for name in ["star", "qpc", "loss", "strom", "neighbours", "local"] {
            assert_eq!(arguments(&["starverbs", "bench", name]), [format!("--{name}").as_str()]);
        }
        assert!(arguments(&["starverbs", "bench"]).is_empty());
        assert!(Cli::try_parse_from(["starverbs", "bench", "onerma"]).is_err());
        assert!(Cli::try_parse_from(["starverbs", "bench", "nothing"]).is_err());
    }
}
