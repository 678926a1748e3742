//! Goodput against loss between two rdma_rxe devices, two of our cards and two ends of TCP, all in the guest, over one wire that
//! loses (tests/interop/loss.sh): all are emulated, so each is to be compared with itself without loss.

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
/// Words of the script, and what one run moves: messages of 64 KiB, or seconds.
const ROWS: [(&str, &str); 4] = [("repeat", "300"), ("go-back-n", "300"), ("rxe", "300"), ("tcp", "3")];
const LIMIT: Duration = Duration::from_secs(120);

/// Measures all in interleaved rounds and writes lines of row, loss in percent and GB/s to `file`.
///
/// # Errors
/// The guest's network cannot be made, or the file cannot be written. A run that fails is left out and told of.
pub(crate) fn run(world: &mut World, file: &Path, rounds: u32) -> Result<(), String> {
    in_guest(world, &["bash", SCRIPT, "setup"])?;
    let own = std::env::current_exe().map_err(|e| e.to_string())?.display().to_string();
    let lib = world.lib().display().to_string();
    let mut lines = String::new();
    for _ in 0..rounds {
        for loss in LOSSES {
            for (row, amount) in ROWS {
                let with = if row == "tcp" { &own } else { &lib };
                let result = in_guest(world, &["bash", SCRIPT, "run", row, loss, amount, with]);
                let figure = result.and_then(|text| {
                    let first = text.lines().next().unwrap_or_default();
                    first.parse::<f64>().map_err(|_| tail(&text))
                });
                match figure {
                    Ok(gbps) => _ = writeln!(lines, "{row}\t{loss}\t{gbps}"),
                    Err(reason) => eprintln!("interop: {row} at {loss}%: {reason}"),
                }
            }
        }
        std::fs::write(file, &lines).map_err(|e| format!("{}: {e}", file.display()))?;
    }
    print!("{lines}");
    Ok(())
}

/// Runs `words` in the guest; what it printed.
fn in_guest(world: &mut World, words: &[&str]) -> Result<String, String> {
    let job = world.job(words)?;
    let deadline = Instant::now() + LIMIT;
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
