//! Tries the kernel module of boards, and programs on it, in a guest whose PCI devices are functions of an
//! emulated board.
//!
//! Owns the guest, the namespace, the list of cases and their verdicts. What it uses is dist/ and Debian's
//! packages.

mod cases;
mod demo;
mod inside;
mod liar;
mod report;
mod survival;
mod world;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use regex_lite::Regex;

use report::Report;
use world::{Boot, Parts};

/// Tries the board's kernel module in a guest.
#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    part: Option<Part>,
    /// Only cases whose title matches this regular expression
    #[arg(long, value_name = "RE")]
    filter: Option<Regex>,
    /// One boot, and a case of each kind
    #[arg(long)]
    quick: bool,
    /// Write what came of all as a Markdown file
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
    /// Run this script of bash in the guest instead, and write what it writes
    #[arg(long, value_name = "FILE")]
    script: Option<PathBuf>,
    /// Of what tests do at random
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The folder made by `make build`
    #[arg(long, default_value = "dist")]
    dist: PathBuf,
    /// A root folder of a newer Debian with qemu-system-x86, and for `--newest` linux-image-amd64,
    /// linux-headers-amd64 and make; it is made if it is not there. Without it QEMU is this host's, or one in
    /// the cache
    #[arg(long, value_name = "FOLDER")]
    root: Option<PathBuf>,
    /// The kernel is that of the root folder, not Debian 12's
    #[arg(long)]
    newest: bool,
    /// Where kernel, module and QEMU are kept between runs, and scratch files are
    #[arg(long, default_value = "target/board-guest")]
    cache: PathBuf,
}

/// Exit status when the guest cannot be had, so that nothing was tried.
const UNAVAILABLE: u8 = 2;
/// How long a script may take.
const SCRIPT: Duration = Duration::from_secs(600);

/// What is no run.
#[derive(Subcommand)]
enum Part {
    /// What runs in the guest
    #[command(subcommand)]
    Inside(inside::Inside),
    /// Shows perftest in a guest, against the host's card in software
    Demo,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(Part::Inside(program)) = &args.part {
        return inside::run(program);
    }
    let parts = match Parts::prepare(&args.cache, &args.dist, args.root.as_deref(), args.newest) {
        Ok(parts) => parts,
        Err(reason) => {
            eprintln!("board-guest: {reason}");
            return ExitCode::from(UNAVAILABLE);
        }
    };
    let result = match (&args.part, &args.script) {
        (Some(_), _) => demo::run(&parts),
        (None, Some(file)) => script(&parts, file),
        (None, None) => run(&args, &parts),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(reason) => {
            eprintln!("board-guest: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args, parts: &Parts) -> Result<bool, String> {
    let mut report = Report::new();
    let wanted = |title: &str| args.filter.as_ref().is_none_or(|filter| filter.is_match(title));
    for guests in [1, 2] {
        let pairs: Vec<_> = cases::pairs()
            .into_iter()
            .filter(|pair| pair.ends.guests() == guests && wanted(&pair.title()))
            .filter(|pair| pair.is_quick || !args.quick)
            .collect();
        if pairs.is_empty() {
            continue;
        }
        let mut world = report.boot(parts, &Boot { guests, ..Boot::default() })?;
        for pair in pairs {
            let verdict = pair.check(&mut world);
            report.add_pair(pair, verdict);
        }
    }
    if !args.quick {
        survival::run(parts, &mut report, args.seed, wanted)?;
    }
    if let Some(file) = &args.table {
        let text = report.markdown(&parts.kernel.package, args.newest);
        std::fs::write(file, text).map_err(|e| format!("{}: {e}", file.display()))?;
    }
    Ok(report.conclude())
}

/// Boots a guest for one script.
fn script(parts: &Parts, file: &std::path::Path) -> Result<bool, String> {
    let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    let mut world = Report::new().boot(parts, &Boot::default())?;
    let on: [String; 4] = world.on_board(0);
    let result = world.run(&format!("ON=\"{}\"\n{text}", on.join(" ")), SCRIPT);
    let (said, passed) = result.map_or_else(|said| (said, false), |said| (said, true));
    println!("{said}");
    Ok(passed)
}
