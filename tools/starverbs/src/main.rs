//! The `starverbs` command: starts programs on the card, shows what they will see and what they did.
//!
//! Owns the command line and its wording. It must not know how the card works: it reads settings, the
//! device's attributes and the statistics page through the crates that own them.

mod bench;
mod board;
mod completions;
mod guard;
mod info;
mod kernel;
mod keys;
mod run;
mod sim;
mod stat;
mod top;
mod users;

use std::fmt;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// RDMA verbs anywhere: run unmodified RDMA programs on a software card.
#[derive(Parser)]
#[command(name = "starverbs", version, after_help = "Settings: `starverbs info --settings` lists all.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Args),
    Info(info::Args),
    Stat(stat::Args),
    Top(top::Args),
    Sim(sim::Args),
    Bench(bench::Args),
    Board(board::Args),
    Guard(guard::Args),
    Kernel(kernel::Args),
    Keys(keys::Args),
    Completions(completions::Args),
}

/// Why the command ends without having done its work.
#[derive(Debug, PartialEq, Eq)]
struct Failure {
    /// The exit status.
    code: u8,
    message: String,
}

impl Failure {
    fn new(code: u8, message: impl fmt::Display) -> Failure {
        Failure { code, message: message.to_string() }
    }
}

fn main() -> ExitCode {
    // Output that is cut off by a closed pipe (`starverbs stat | head`) ends the command quietly, as with
    // other tools. SAFETY: SIG_DFL is a valid disposition and no other thread runs yet.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    let done = match Cli::parse().command {
        Command::Run(args) => run::run(&args),
        Command::Info(args) => info::info(&args),
        Command::Stat(args) => stat::stat(&args),
        Command::Top(args) => top::top(&args),
        Command::Sim(args) => sim::sim(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Board(args) => board::board(&args),
        Command::Guard(args) => guard::guard(&args),
        Command::Kernel(args) => kernel::kernel(&args),
        Command::Keys(args) => keys::keys(&args),
        Command::Completions(args) => completions::completions(&args, Cli::command()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("starverbs: {}", failure.message);
            ExitCode::from(failure.code)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn everything_after_the_dashes_belongs_to_the_program() {
        let cli =
            Cli::try_parse_from(["starverbs", "run", "--mtu", "1024", "--", "prog", "--mtu", "-x"]).unwrap();
        let Command::Run(args) = cli.command else { panic!("not run") };
        assert_eq!(args.program(), ["prog", "--mtu", "-x"]);
    }

    /// docs/counters.md carries the core's list of counters, no other.
    #[test]
    fn documentation_has_the_counters() {
        use starverbs_core::Counters;
        let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/counters.md");
        let text = std::fs::read_to_string(&file).unwrap();
        let (before, rest) = text.split_once("<!-- table").unwrap();
        let (comment, rest) = rest.split_once("-->\n").unwrap();
        let (_, after) = rest.split_once("<!-- end").unwrap();
        let rows = Counters::NAMES.iter().zip(Counters::HELP);
        let rows: String = rows.map(|(name, help)| format!("| `{name}` | {} |\n", help.trim())).collect();
        let table = format!("| counter | counts |\n|---|---|\n{rows}");
        let wanted = format!("{before}<!-- table{comment}-->\n\n{table}\n<!-- end{after}");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(&file, &wanted).unwrap();
        } else {
            assert_eq!(text, wanted, "run with UPDATE_DOCS=1 to rewrite docs/counters.md");
        }
    }
}
