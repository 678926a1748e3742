//! `starverbs-bench`: the card over its UDP wire and between two processes of one host, beside the bare
//! sockets or the memory under it and beside other stacks.
//!
//! One run measures everything side by side on this machine and writes a table (terminal and Markdown), JSON
//! and a picture (SVG). Nothing here knows a figure beforehand.

mod board;
mod case;
mod child;
mod error;
mod fabric;
mod floor;
mod local;
mod loss;
mod machine;
mod many;
mod neighbours;
mod onerma;
mod perftest;
mod report;
mod round;
mod samehost;
mod samples;
mod scale;
mod socket;
mod star;
mod strom;
mod ucx;
mod valkey;
mod verbs;
mod ways;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};

use case::{Part, Setup};
use round::Effort;

/// Measures the card beside the bare sockets and other stacks.
#[derive(Debug, Parser)]
#[command(name = "starverbs-bench", version)]
struct Args {
    #[command(subcommand)]
    side: Option<ChildCommand>,
    /// Path of the results without its ending: .md, .json and .svg are written.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Under a minute instead of under five.
    #[arg(long)]
    quick: bool,
    /// Counted rounds (default 5, quick 1).
    #[arg(long)]
    rounds: Option<usize>,
    /// Holds servers to processor 0 and clients to processor 1.
    #[arg(long)]
    pin: bool,
    /// Only these parts.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Goodput against loss alone.
    #[arg(long)]
    loss: bool,
    /// Many queue pairs alone.
    #[arg(long)]
    qpc: bool,
    /// A queue pair beside others whose peer is gone alone.
    #[arg(long)]
    neighbours: bool,
    /// Two processes of one host alone, held to processors as by `--pin`.
    #[arg(long)]
    local: bool,
    /// StaR beside RC alone: the paper's workloads, streams and latency.
    #[arg(long)]
    star: bool,
    /// 1RMA beside RC alone.
    #[arg(long)]
    onerma: bool,
    /// StRoM's RPCs against READs alone.
    #[arg(long)]
    strom: bool,
    /// Of `--loss`, what `starverbs-interop --loss` measured in a guest.
    #[arg(long, value_name = "FILE")]
    guest: Option<PathBuf>,
    /// The folder with lib/libibverbs.so.1.
    #[arg(long, default_value = "dist")]
    dist: PathBuf,
}

/// What the children do; only this program starts them.
#[derive(Debug, Subcommand)]
enum ChildCommand {
    /// One end of the bare ping-pong.
    #[command(hide = true)]
    FloorPingpong(floor::Side),
    /// One end of the bare stream.
    #[command(hide = true)]
    FloorStream(floor::Side),
    /// One end of writes to another process's memory.
    #[command(hide = true)]
    FloorPwrite(floor::Side),
    /// One end of a round trip of two sleeping processes.
    #[command(hide = true)]
    FloorEventfd(floor::Side),
    /// Copies.
    #[command(hide = true)]
    FloorMemcpy(floor::Side),
    /// Creates and connects QPs.
    #[command(hide = true)]
    ScaleConnect(scale::Child),
    /// Measures once on a wire that loses.
    #[command(hide = true)]
    LossChild(loss::Child),
    /// Opens the device and sleeps.
    #[command(hide = true)]
    ScaleIdle(scale::Child),
}

fn main() -> ExitCode {
    let args = Args::parse();
    let result = match &args.side {
        Some(ChildCommand::FloorPingpong(side)) => floor::pingpong(side),
        Some(ChildCommand::FloorStream(side)) => floor::stream(side),
        Some(ChildCommand::FloorPwrite(side)) => samehost::pwrite(side),
        Some(ChildCommand::FloorEventfd(side)) => samehost::eventfd(side),
        Some(ChildCommand::FloorMemcpy(side)) => samehost::memcpy(side),
        Some(ChildCommand::ScaleConnect(child)) => scale::connect_child(child),
        Some(ChildCommand::ScaleIdle(child)) => scale::idle_child(child),
        Some(ChildCommand::LossChild(child)) => loss::child(child),
        None if args.loss => {
            let out = args.out.clone().unwrap_or_else(|| PathBuf::from("docs/bench-loss"));
            loss::run(&out, &args.dist, args.rounds.unwrap_or(3).max(1), args.guest.as_deref())
        }
        None if args.qpc => {
            let out = args.out.clone().unwrap_or_else(|| PathBuf::from("docs/bench-qpc"));
            many::run(&out, &args.dist, rounds_of(&args, 5), args.quick)
        }
        None if args.neighbours => {
            let out = args.out.clone().unwrap_or_else(|| PathBuf::from("docs/bench-neighbours"));
            neighbours::run(&out, &args.dist, rounds_of(&args, 5), args.quick)
        }
        None if args.star => {
            let out = args.out.clone().unwrap_or_else(|| PathBuf::from("docs/bench-star"));
            star::run(&out, &args.dist, rounds_of(&args, 5), args.quick)
        }
        None if args.strom => {
            let out = args.out.clone().unwrap_or_else(|| PathBuf::from("docs/bench-strom"));
            strom::run(&out, &args.dist, rounds_of(&args, 5), args.quick)
        }
        None if args.onerma => {
            let out = args.out.clone().unwrap_or_else(|| PathBuf::from("docs/bench-1rma"));
            onerma::run(&out, &args.dist, rounds_of(&args, 5), args.quick)
        }
        None if args.local => local(&args),
        None => bench(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("starverbs-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn rounds_of(args: &Args, default: u32) -> u32 {
    args.rounds.map_or(default, |rounds| u32::try_from(rounds).unwrap_or(u32::MAX).max(1))
}

fn setup(args: &Args, pin: bool) -> Setup {
    Setup {
        dist: args.dist.clone(),
        cpus: if pin { (Some(0), Some(1)) } else { (None, None) },
        limit: Duration::from_secs(if args.quick { 5 } else { 10 }),
    }
}

fn effort(args: &Args, rounds: usize, seconds: f64, budget: u64) -> Effort {
    let rounds = args.rounds.unwrap_or(rounds).max(1);
    Effort { rounds, seconds, budget: Duration::from_secs(budget) }
}

fn local(args: &Args) -> error::Result<()> {
    let out = args.out.clone().unwrap_or_else(|| PathBuf::from("docs/bench-local"));
    let effort = if args.quick { effort(args, 1, 0.2, 120) } else { effort(args, 5, 0.5, 900) };
    local::run(&out, &setup(args, true), effort, args.quick)
}

fn bench(args: &Args) -> error::Result<()> {
    let wanted = |part: Part| args.only.is_empty() || args.only.contains(&part);
    let setup = setup(args, args.pin);
    let effort = if args.quick { effort(args, 1, 0.3, 35) } else { effort(args, 5, 0.7, 200) };
    let machine = machine::Machine::read(args.pin, args.quick);
    let cases = case::all().into_iter().filter(|case| wanted(case.part)).collect();
    let figures = round::run(cases, &setup, effort);
    let (runs, idle_seconds) = if args.quick { (1, 2) } else { (3, 5) };
    let scale = wanted(Part::Scale).then(|| scale::run(&setup, runs, idle_seconds));
    round::clear_line();
    let report = report::Report::new(machine, figures, scale);
    println!("{}", report.terminal());
    if let Some(out) = &args.out {
        report.write(out)?;
    }
    Ok(())
}
