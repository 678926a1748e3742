//! Runs others' programs (ibverbs-utils, perftest), unmodified, on the card and tabulates what ran.
//!
//! Owns the list of cases, the processes and namespaces it starts, and the verdicts. It must not know the
//! library's inside: what it uses is dist/, the way a person would.

mod address;
mod board;
mod case;
mod container;
mod crash;
mod hostile;
mod multicast;
mod net;
mod pair;
mod perftest;
mod pingpong;
mod rdmacm;
mod report;
mod settings;
mod special;
mod star;
mod world;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use regex_lite::Regex;

use board::Device;
use case::{Case, Net, Verdict};
use report::Report;
use starverbs_conformance::{check, process};
use world::World;

/// Runs others' RDMA programs on the card, between two processes, and tells what worked.
#[derive(Parser)]
struct Args {
    /// The set that fits into a few minutes (the default)
    #[arg(long, conflicts_with = "full")]
    quick: bool,
    /// Every case
    #[arg(long)]
    full: bool,
    /// Only cases whose "group: command" matches this regular expression
    #[arg(long, value_name = "RE")]
    filter: Option<Regex>,
    /// Only over loopback (lo) or between network namespaces (netns)
    #[arg(long, value_parser = ["lo", "netns"])]
    net: Option<String>,
    /// How queue pairs of one host talk
    #[arg(long, value_parser = ["auto", "local", "udp"])]
    link: Option<String>,
    /// What the programs have as their card: of both ends, or the server's and the client's
    #[arg(long, default_value = "soft", value_parser = ["soft", "board", "board,soft", "soft,board"])]
    device: String,
    /// Write what ran to this Markdown file
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
    /// List the cases, run none
    #[arg(long)]
    list: bool,
    /// The folder made by `make build`
    #[arg(long, default_value = "dist")]
    dist: PathBuf,
}

fn cases(args: &Args) -> Vec<(Case, Net)> {
    let all = [
        pingpong::cases(),
        perftest::cases(),
        address::cases(),
        multicast::cases(),
        rdmacm::cases(),
        special::cases(),
        container::cases(),
        settings::cases(),
        crash::cases(),
        if args.device == "board" { hostile::cases() } else { Vec::new() },
        star::cases(),
    ]
    .concat();
    let wanted = |case: &Case, net: Net| {
        (args.full || case.quick.contains(&net))
            && args.filter.as_ref().is_none_or(|re| re.is_match(&case.title()))
            && args.net.as_deref().is_none_or(|word| (word == "lo") == (net == Net::Lo))
    };
    all.into_iter()
        .flat_map(|case| case.nets.iter().map(|net| (case.clone(), *net)).collect::<Vec<_>>())
        .filter(|(case, net)| wanted(case, *net))
        .collect()
}

fn main() -> ExitCode {
    let args = Args::parse();
    let cases = cases(&args);
    if args.list {
        cases.iter().for_each(|(case, net)| println!("{:<10} {}", net.to_string(), case.title()));
        return ExitCode::SUCCESS;
    }
    let needs_namespaces = cases.iter().any(|(_, net)| *net != Net::Lo);
    let devices = Device::of_ends(&args.device);
    let mut world = match World::new(&args.dist, needs_namespaces, args.link.as_deref(), devices) {
        Ok(world) => world,
        Err(reason) => {
            eprintln!("conformance: {reason}");
            return ExitCode::FAILURE;
        }
    };
    let mut report = Report::new(cases.len(), &args.device);
    for (case, net) in cases {
        let started = std::time::Instant::now();
        let verdict = run(&case, &mut world, net);
        report.add(&case, net, verdict, started.elapsed());
        // Written as it grows: a run that is stopped leaves what it knew.
        if let Some(file) = &args.table
            && let Err(error) = std::fs::write(file, report.markdown(args.full))
        {
            eprintln!("conformance: {}: {error}", file.display());
            return ExitCode::FAILURE;
        }
    }
    let ended = world.end_boards();
    if let Err(reason) = &ended {
        println!("FAILED {reason}");
    }
    let concluded = report.conclude();
    if ended.is_ok() { concluded } else { ExitCode::FAILURE }
}

fn run(case: &Case, world: &mut World, net: Net) -> Verdict {
    if let (true, Some(reason)) = (world.has_boards(), case.software) {
        return Verdict::Skip(reason.to_owned());
    }
    if let Err(reason) = world.retire_boards(net) {
        return Verdict::Fail(reason);
    }
    if let Err(reason) = world.enter(net) {
        return Verdict::Skip(reason);
    }
    let verdict = case.run(world, net);
    match world.check_boards() {
        Ok(()) => verdict,
        Err(reason) => Verdict::Fail(reason),
    }
}
