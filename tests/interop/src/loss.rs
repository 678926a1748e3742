//! Goodput against loss between two rdma_rxe devices, two of our cards and two ends of TCP, all in the guest,
//! over one wire that loses (tests/interop/loss.sh): all are emulated, so each is to be compared with itself
//! without loss.

use std::fmt::Write as _;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use starverbs_conformance::process::tail;

use crate::world::World;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/loss.sh");
/// Shares of packets, in percent.
const LOSSES: [&str; 4] = ["0", "0.1", "1", "5"];
/// Words of the script.
const ROWS: [&str; 4] = ["repeat", "go-back-n", "rxe", "tcp"];
/// Seconds that one run sends, of which perftest counts two.
const SECONDS: &str = "4";
/// How long one run may take, with all that it starts: emulation is slow.
const LIMIT: Duration = Duration::from_secs(60);
/// How long the guest's network may take.
const SETUP: Duration = Duration::from_secs(120);
/// No round begins that would end after this, and no run begins later.
const ALL: Duration = Duration::from_secs(5 * 60);

/// Measures all in interleaved rounds, one at least and so many as end in time, and writes lines of row, loss
/// in percent, GB/s and the loss that was measured to `file`.
///
/// # Errors
/// The guest's network cannot be made, or the file cannot be written. A run that fails is left out and told
/// of.
pub(crate) fn run(world: &mut World, file: &Path, rounds: u32) -> Result<(), String> {
    in_guest(world, &["bash", SCRIPT, "setup"], SETUP)?;
    let own = std::env::current_exe().map_err(|e| e.to_string())?.display().to_string();
    let lib = world.lib().display().to_string();
    let (mut lines, began) = (String::new(), Instant::now());
    for round in 0..rounds {
        if began.elapsed() * (round + 1) > ALL * round.max(1) {
            println!("interop: no time for more than {round} of {rounds} rounds");
            break;
        }
        for (loss, row) in LOSSES.iter().flat_map(|loss| ROWS.map(|row| (*loss, row))) {
            let with = if row == "tcp" { &own } else { &lib };
            let said = format!("guest, round {} of {rounds}, {row} at {loss}%", round + 1);
            if began.elapsed() > ALL {
                eprintln!("{said}: no time");
                continue;
            }
            let result = in_guest(world, &["bash", SCRIPT, "run", row, loss, SECONDS, with], LIMIT);
            match result.and_then(|text| figures(&text).ok_or_else(|| tail(&text))) {
                Ok((gbps, lost)) => {
                    println!("{said}: {gbps:.4} GB/s, {lost}% lost, {} s", began.elapsed().as_secs());
                    _ = writeln!(lines, "{row}\t{loss}\t{gbps}\t{lost}");
                }
                Err(reason) => eprintln!("{said}: {reason}"),
            }
        }
        std::fs::write(file, &lines).map_err(|e| format!("{}: {e}", file.display()))?;
    }
    Ok(())
}

/// What the script prints first.
fn figures(text: &str) -> Option<(f64, f64)> {
    let mut words = text.lines().next()?.split_whitespace().map(str::parse);
    Some((words.next()?.ok()?, words.next()?.ok()?))
}

/// Runs `words` in the guest; what it printed.
fn in_guest(world: &mut World, words: &[&str], limit: Duration) -> Result<String, String> {
    let job = world.job(words)?;
    let deadline = Instant::now() + limit;
    loop {
        match job.ended() {
            Some(0) => return Ok(job.output()),
            Some(_) => return Err(tail(&job.output())),
            None if Instant::now() > deadline => {
                return Err(format!("had to be killed:\n{}", tail(&job.output())));
            }
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// In the guest: one TCP connection to `address`, sent to for `seconds`; prints the GB/s that arrived.
///
/// # Errors
/// The system's.
pub(crate) fn tcp(address: Ipv4Addr, seconds: u64) -> std::io::Result<()> {
    let listener = TcpListener::bind((address, 0))?;
    let to = listener.local_addr()?;
    std::thread::spawn(move || -> std::io::Result<()> {
        let mut stream = TcpStream::connect(to)?;
        loop {
            stream.write_all(&[7; 64 << 10])?;
        }
    });
    let (mut stream, _) = listener.accept()?;
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    let (mut bytes, mut room, began) = (0, vec![0; 256 << 10], Instant::now());
    while began.elapsed() < Duration::from_secs(seconds) {
        match stream.read(&mut room) {
            Ok(n) => bytes += n,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    println!("{}", bytes as f64 / began.elapsed().as_secs_f64() / 1e9);
    Ok(())
}
