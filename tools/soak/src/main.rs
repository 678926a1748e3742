//! `make soak`: many seeds, on several threads.

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use starverbs_soak::{Broken, Summary, run};

/// Cards on a hostile virtual network.
#[derive(Parser)]
struct Args {
    /// First seed
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Runs: seeds from the first one on
    #[arg(long, default_value_t = 10_000)]
    runs: u64,
    /// Threads
    #[arg(long, default_value_t = 1)]
    jobs: u64,
    /// Print each frame, post, completion and event
    #[arg(long)]
    trace: bool,
    /// Go on behind a run that broke, up to so many
    #[arg(long, default_value_t = 1)]
    failures: usize,
}

fn main() -> ExitCode {
    let args = Args::parse();
    std::panic::set_hook(Box::new(|info| {
        LAST.with(|last| *last.borrow_mut() = info.location().map(|l| l.to_string()).unwrap_or_default());
    }));
    let (next, done, stop) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let (sum, broken) = (Mutex::new(Summary::default()), Mutex::new(Vec::new()));
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..args.jobs.max(1) {
            scope.spawn(|| {
                let mut mine = Summary::default();
                while !stop.load(Ordering::Relaxed) {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= args.runs {
                        break;
                    }
                    match run(args.seed.wrapping_add(n), args.trace) {
                        Ok(one) => mine.merge(&one),
                        Err(one) => note(*one, &broken, args.failures, &stop),
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                }
                sum.lock().expect("no thread panics").merge(&mine);
            });
        }
        scope.spawn(|| progress(&done, args.runs, &stop, began));
    });
    println!("{}", sum.into_inner().expect("no thread panics"));
    let broken = broken.into_inner().expect("no thread panics").len();
    let took = began.elapsed().as_secs_f64();
    let runs = done.into_inner();
    println!("{broken} of {runs} runs broke; {:.0} runs a second", runs as f64 / took);
    if broken == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

thread_local! {
    /// Where this thread panicked
    static LAST: std::cell::RefCell<String> = const { std::cell::RefCell::new(String::new()) };
}

fn note(one: Broken, broken: &Mutex<Vec<u64>>, most: usize, stop: &AtomicBool) {
    let mut broken = broken.lock().expect("no thread panics");
    if broken.len() >= most {
        return;
    }
    broken.push(one.seed);
    if broken.len() >= most {
        stop.store(true, Ordering::Relaxed);
    }
    let place = LAST.with(|last| last.borrow().clone());
    if most == 1 {
        println!("{}", one.plan);
    }
    println!("seed {} broke: {} ({place})", one.seed, one.what);
    println!("again, with all that happened: make soak SEED={} RUNS=1 TRACE=1", one.seed);
}

fn progress(done: &AtomicU64, runs: u64, stop: &AtomicBool, began: Instant) {
    let mut said = Instant::now();
    loop {
        let n = done.load(Ordering::Relaxed);
        if n >= runs || stop.load(Ordering::Relaxed) {
            return;
        }
        if said.elapsed() >= Duration::from_secs(10) {
            said = Instant::now();
            eprintln!("{n} of {runs} runs, {:.0} a second", n as f64 / began.elapsed().as_secs_f64());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
