//! Runs programs on starverbs against the same programs on Linux' rdma_rxe, which lives in a guest of QEMU.
//!
//! Owns the guest, the namespace, the list of cases and their verdicts. What it uses is dist/ and Debian's
//! packages.

mod capture;
mod cases;
mod exchanges;
mod loss;
mod pair;
mod report;
mod world;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use capture::Failure;
use clap::Parser;
use regex_lite::Regex;
use starverbs_conformance::check::Expect;
use starverbs_guest::kernel::Kernel;

use exchanges::Reference;
use pair::{Pair, Providers, RXE_SERVES, STAR_SERVES};
use report::Report;
use world::World;

/// Runs RDMA programs between starverbs and the kernel's rdma_rxe in both directions.
#[derive(Parser)]
struct Args {
    /// Only cases whose title matches this regular expression
    #[arg(long, value_name = "RE")]
    filter: Option<Regex>,
    /// Only the exchanges over IPv4, and one case of each kind of program
    #[arg(long)]
    quick: bool,
    /// Run each program so many times, to hunt what happens seldom
    #[arg(long, value_name = "TIMES", default_value_t = 1)]
    repeat: u32,
    /// Write what ran to this Markdown file
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
    /// Write one frame of each kind that the captures hold into this folder
    #[arg(long, value_name = "FOLDER")]
    vectors: Option<PathBuf>,
    /// Keep the headers of a pair that fails in this folder
    #[arg(long, value_name = "FOLDER")]
    captures: Option<PathBuf>,
    /// Measure goodput against loss in the guest instead, and write it to this file
    #[arg(long, value_name = "FILE")]
    loss: Option<PathBuf>,
    /// In the guest: one TCP connection to this address
    #[arg(long, hide = true)]
    tcp: Option<std::net::Ipv4Addr>,
    /// For so long
    #[arg(long, hide = true, default_value_t = 1)]
    seconds: u64,
    /// The folder made by `make build`
    #[arg(long, default_value = "dist")]
    dist: PathBuf,
    /// Where the kernel is kept between runs, and scratch files are
    #[arg(long, default_value = "target/interop")]
    cache: PathBuf,
}

/// How often a pair is run whose packets rxe changes.
const TRIES: u32 = 3;
/// The kernel's modules that cases need. `crc32_generic` is looked up by name when a device is added, so no
/// module depends on it.
const MODULES: [&str; 6] = ["crc32_generic", "ib_uverbs", "rdma_rxe", "rdma_ucm", "veth", "sch_netem"];
/// Exit status when the guest cannot be had, so that nothing was tried.
const UNAVAILABLE: u8 = 2;

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(address) = args.tcp {
        return loss::tcp(address, args.seconds).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
    }
    let prepared = prepare(&args);
    let (kernel, mut world) = match prepared {
        Ok(prepared) => prepared,
        Err(reason) => {
            eprintln!("interop: {reason}");
            return ExitCode::from(UNAVAILABLE);
        }
    };
    match run(&args, &kernel, &mut world) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(reason) => {
            eprintln!("interop: {reason}");
            ExitCode::FAILURE
        }
    }
}

/// Gets the kernel and boots it.
fn prepare(args: &Args) -> Result<(Kernel, World), String> {
    std::fs::create_dir_all(&args.cache).map_err(|e| format!("{}: {e}", args.cache.display()))?;
    let cache = args.cache.canonicalize().map_err(|e| format!("{}: {e}", args.cache.display()))?;
    let kernel = Kernel::prepare(&cache, &MODULES)?;
    let started = Instant::now();
    let world = World::new(&kernel, &args.dist, &cache)?;
    println!("interop: {} is up after {:.1} s", kernel.package, started.elapsed().as_secs_f64());
    Ok((kernel, world))
}

fn run(args: &Args, kernel: &Kernel, world: &mut World) -> Result<bool, String> {
    if let Some(file) = &args.loss {
        return loss::run(world, file, args.repeat).map(|()| true);
    }
    for folder in [&args.vectors, &args.captures].into_iter().flatten() {
        std::fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    }
    let mut report = Report::new(&kernel.package);
    exchanges(args, world, &mut report);
    programs(args, world, &mut report);
    if let Some(file) = &args.table {
        std::fs::write(file, report.markdown()).map_err(|e| format!("{}: {e}", file.display()))?;
    }
    Ok(report.conclude())
}

fn wanted(args: &Args, title: &str) -> bool {
    args.filter.as_ref().is_none_or(|filter| filter.is_match(title))
}

/// The row of small exchanges, over both kinds of addresses, captured and decoded.
fn exchanges(args: &Args, world: &mut World, report: &mut Report) {
    let rows =
        [Pair::new(&world.peer, " -g {gid} -m 1024"), Pair::new(&world.peer, " -g {gid} -m 4096").v6()];
    let rows = rows.into_iter().take(if args.quick { 1 } else { usize::MAX });
    for pair in rows.filter(|pair| wanted(args, &pair.title())) {
        let title = pair.title();
        let reference = match Reference::new(world, pair) {
            Ok(reference) => reference,
            Err(reason) => {
                report.add(&format!("{title}, rxe alone"), [Err(reason)].into());
                continue;
            }
        };
        for providers in [STAR_SERVES, RXE_SERVES] {
            let name = format!("{title}, {} serves {}", providers.server, providers.client);
            let captured = capture::during(world, &name, args.vectors.as_deref(), |world| {
                reference.compare(world, providers)
            });
            match captured {
                Ok((row, frames)) => report.exchanges(&name, &row, &frames),
                Err(reason) => report.add(&name, [Err(reason)].into()),
            }
        }
    }
}

/// Others' programs, in both directions.
fn programs(args: &Args, world: &mut World, report: &mut Report) {
    for (pair, expect) in cases::cases() {
        let title = pair.title();
        let mut check = |providers| watched(args, world, &pair, providers, expect);
        let runs = wanted(args, &title) && (!args.quick || cases::is_quick(&title));
        for _ in (0..args.repeat).filter(|_| runs) {
            report.add(&title, [STAR_SERVES, RXE_SERVES].map(&mut check).into());
        }
    }
}

/// Runs a pair while its frames are captured. Again, where they show that rxe sent a packet again as another
/// one, which our end must refuse (docs/interop.md).
fn watched(
    args: &Args,
    world: &mut World,
    pair: &Pair,
    providers: Providers,
    expect: Expect,
) -> Result<String, String> {
    let name = format!("{}, {} serves {}", pair.title(), providers.server, providers.client);
    let (mut why, mut last) = (None, String::new());
    for _ in 0..TRIES {
        let captures = args.captures.as_deref();
        match capture::of_failure(world, &name, captures, |world| pair.check(world, providers, expect)) {
            Ok(remark) => {
                return Ok(why.map_or(remark.clone(), |why| format!("{remark} (tried again: {why})")));
            }
            Err(Failure { reason, changed: None }) => return Err(reason),
            Err(Failure { reason, changed }) => (why, last) = (changed, reason),
        }
    }
    Err(format!("{last}\n{}", why.unwrap_or_default()))
}
