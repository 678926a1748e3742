//! What 1RMA's commands cost beside RC's, on the UDP wire and through memory: latency, rate, small READs
//! beside a large one, a new key beside a new connection; and the cipher's own rate beside OpenSSL's.
//!
//! Owns these measurements and their page. programs/onerma.c does the work.

use std::hint::black_box;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use starverbs_backend::onerma::GcmSeal;
use starverbs_charts::bars;
use starverbs_onerma::{DerivedKey, Initiator, OneRmaOp, RegionKey, Seal};

use crate::child;
use crate::error::{BenchError, Result};
use crate::machine::Machine;
use crate::report::{Table, write_file};
use crate::round::median;
use crate::samples::{Samples, cell, reported};
use crate::ways::{CARD, Claim, MEDIAN, Part, Program, SOFTWARE, claim, claims_table};

const SIZES: [u32; 4] = [64, 4096, 65536, 1 << 20];
/// Bytes of the READ beside which small ones are measured.
const LARGE: [u32; 5] = [0, 4096, 65536, 1 << 20, 4 << 20];
/// No further round begins that would end after this.
const ALL: Duration = Duration::from_secs(6 * 60);
/// Bytes of a command, and how many are sealed in a row.
const CHUNK: usize = 4096;
const CHUNKS: usize = 20_000;

const PROGRAM: Program = Program {
    name: "onerma",
    parts: &[
        Part {
            title: "READ, one after the other",
            counts: "bytes",
            numbers: &SIZES,
            ways: &[("read.rc", "RC", SOFTWARE), ("read.1rma", "1RMA", CARD)],
        },
        Part {
            title: "WRITE, one after the other",
            counts: "bytes",
            numbers: &SIZES,
            ways: &[("write.rc", "RC", SOFTWARE), ("write.1rma", "1RMA", CARD)],
        },
        Part {
            title: "READs of 64 B beside a large one",
            counts: "bytes of the large READ",
            numbers: &LARGE,
            ways: &[("beside.rc", "RC, one queue pair", SOFTWARE), ("beside.1rma", "1RMA", CARD)],
        },
        Part {
            title: "From the last READ that succeeds to the next one",
            counts: "",
            numbers: &[0],
            ways: &[
                ("outage.rc", "RC, a new connection", SOFTWARE),
                ("outage.1rma", "1RMA, a new key", CARD),
            ],
        },
    ],
    others: &["rate.rc.1048576", "rate.1rma.1048576"],
    addrs: "127.0.0.1,127.0.0.2",
    link: "udp",
};

/// The same, where memory carries what it can.
const HERE: Program = Program { link: "auto", ..PROGRAM };

/// Measures in rounds, one at least and no more than `rounds` or than end in time, and writes `out`.md and
/// `out`.svg.
///
/// # Errors
/// Where nothing can be measured, or the files cannot be written.
pub(crate) fn run(out: &Path, dist: &Path, rounds: u32, quick: bool) -> Result<()> {
    let machine = Machine::read(false, quick);
    let cipher = Cipher::measure(rounds);
    let seconds = if quick { "0.05" } else { "0.5" };
    let (samples, done) = PROGRAM.gather(dist, rounds, ALL, seconds)?;
    let (here, _) = HERE.gather(dist, done, ALL, seconds)?;
    let text = page(&machine, [&samples, &here], &cipher, done);
    println!("{text}");
    write_file(out, "md", &text)?;
    write_file(out, "svg", &bars(&PROGRAM.panels(&samples)))
}

/// What the cipher does.
#[derive(Clone, Copy, Debug, Default)]
struct Cipher {
    /// Of the card's on buffers of 4 KB, GB/s
    ours: Option<f64>,
    /// Of `openssl speed` on such, GB/s
    openssl: Option<f64>,
    /// K_d derived and made ready, ns
    derived: Option<f64>,
    /// A key that is ready, copied, ns
    ready: Option<f64>,
}

impl Cipher {
    fn measure(rounds: u32) -> Cipher {
        let of = |rate: fn() -> Result<f64>| {
            median(&(0..rounds).filter_map(|_| reported("AES-128-GCM", rate())).collect::<Vec<_>>())
        };
        Cipher { ours: of(sealing), openssl: of(openssl), derived: of(deriving), ready: of(copying) }
    }
}

/// What it takes to derive K_d of a request and to make it ready, ns.
fn deriving() -> Result<f64> {
    let region = RegionKey(*b"a key of nobody!");
    let began = Instant::now();
    for pid in 0..CHUNKS as u32 {
        let initiator = Initiator { pid, ..Initiator::default() };
        let key = GcmSeal.derive(black_box(&region), &initiator, OneRmaOp::Read);
        black_box(GcmSeal.prepare(&key));
    }
    Ok(began.elapsed().as_secs_f64() * 1e9 / CHUNKS as f64)
}

/// What it takes to copy a key that is ready, ns.
fn copying() -> Result<f64> {
    let key = GcmSeal.prepare(&DerivedKey(*b"a key of nobody!"));
    let began = Instant::now();
    for _ in 0..CHUNKS {
        black_box(black_box(&key).clone());
    }
    Ok(began.elapsed().as_secs_f64() * 1e9 / CHUNKS as f64)
}

/// What the card's cipher does with commands of 4 KB, GB/s.
fn sealing() -> Result<f64> {
    let key = GcmSeal.prepare(&DerivedKey(*b"a key of nobody!"));
    let mut body = vec![0x5a; CHUNK];
    let began = Instant::now();
    for number in 0..CHUNKS as u64 {
        let mut iv = [0; 12];
        iv[4..].copy_from_slice(&number.to_be_bytes());
        black_box(GcmSeal.seal(&key, &iv, &[0; 24], black_box(&mut body)));
    }
    Ok((CHUNK * CHUNKS) as f64 / began.elapsed().as_secs_f64() / 1e9)
}

/// What `openssl speed` says of the same, GB/s.
fn openssl() -> Result<f64> {
    let mut speed = Command::new(child::require("openssl", "openssl")?);
    speed.args(["speed", "-mr", "-elapsed", "-seconds", "1", "-bytes", "4096", "-evp", "aes-128-gcm"]);
    let output = child::run_one(speed, Duration::from_secs(20))?;
    let line = output.stdout.lines().find(|line| line.starts_with("+F:"));
    let rate = line.and_then(|line| line.rsplit(':').next()?.trim().parse::<f64>().ok());
    rate.map(|rate| rate / 1e9).ok_or_else(|| BenchError::Parse {
        what: "openssl speed".into(),
        tail: child::tail_of(&output.stdout),
    })
}

fn claims(samples: &Samples, cipher: &Cipher) -> Vec<Claim> {
    let median = |way: &str, number| PROGRAM.of(samples, way, number, MEDIAN);
    let both = |a: Option<f64>, b: Option<f64>| Some((a?, b?));
    let rate = |way: &str| median(way, 1 << 20);
    let (none, largest) = (LARGE[0], LARGE[LARGE.len() - 1]);
    let times = |a: f64, b: f64| format!("{:.2}x", a / b);
    let us = |a: f64, b: f64| format!("{a:.1} us, {b:.1} alone: {:.1}x", a / b);
    let gbs = |a: f64, b: f64| format!("{a:.2} GB/s, {b:.2}: {:.2}x", a / b);
    /* encryption and transport one after the other, each at its own rate */
    let bound = both(rate("rate.rc"), cipher.ours).map(|(rc, gcm)| 1.0 / (1.0 / rc + 1.0 / gcm));
    vec![
        claim(
            "A small READ beside one of 4 MB is delayed by about one 4 KB chunk (figure 12)",
            both(median("beside.1rma", largest), median("beside.1rma", none)),
            us,
            |ratio| ratio <= 1.5,
        ),
        claim(
            "In order behind it, as RDMA's connections are, it is delayed by more than ten times (figure 12)",
            both(median("beside.rc", largest), median("beside.rc", none)),
            us,
            |ratio| ratio >= 10.0,
        ),
        claim(
            "A new key costs a client that has it about a round trip (figure 14)",
            both(median("outage.1rma", 0), median("read.1rma", SIZES[0])),
            |a, b| format!("{a:.1} us, a READ {b:.1}: {:.1}x", a / b),
            |ratio| ratio <= 3.0,
        ),
        claim(
            "and less than a new connection (figure 14)",
            both(median("outage.1rma", 0), median("outage.rc", 0)),
            times,
            |ratio| ratio < 1.0,
        ),
        claim(
            "The cipher runs at 0.8 of `openssl speed` at 4 KB, or more",
            both(cipher.ours, cipher.openssl),
            gbs,
            |ratio| ratio >= 0.8,
        ),
        claim(
            "READs of 1 MiB run at 0.9 or more of what RC's and the cipher's rates allow in a row",
            both(rate("rate.1rma"), bound),
            gbs,
            |ratio| ratio >= 0.9,
        ),
    ]
}

fn page(machine: &Machine, [samples, here]: [&Samples; 2], cipher: &Cipher, rounds: u32) -> String {
    let rate_of = |samples, way: &str| cell(PROGRAM.of(samples, way, 1 << 20, MEDIAN));
    let rate = |way: &str| rate_of(samples, way);
    let rates = Table(vec![
        ["", "GB/s"].map(str::to_owned).to_vec(),
        vec!["RC, READs of 1 MiB, 8 at once".to_owned(), rate("rate.rc")],
        vec!["1RMA, the same".to_owned(), rate("rate.1rma")],
        vec!["the card's AES-128-GCM, 4 KB".to_owned(), cell(cipher.ours)],
        vec!["`openssl speed` of it".to_owned(), cell(cipher.openssl)],
    ]);
    let sealed = cipher.ours.map(|rate| CHUNK as f64 / rate);
    let keys = Table(vec![
        ["of each command of 4 KB", "ns"].map(str::to_owned).to_vec(),
        vec!["encryption".to_owned(), cell(sealed)],
        vec!["its key, derived and made ready".to_owned(), cell(cipher.derived)],
        vec!["its key, if the target has it ready".to_owned(), cell(cipher.ready)],
    ]);
    format!(
        "# 1RMA beside RC\n\nWritten by `make bench-1rma` (tools/bench, src/onerma.rs); do not edit.\n\n\
         ![bars](bench-1rma.svg)\n\n{}. Medians of {rounds} rounds.\n{}\n{}\n\
         Two processes of this host, UDP on 127.0.0.1, both poll without a break \
         (`tools/bench/programs/onerma.c`). All that 1RMA moves is encrypted and authenticated, RC's bytes \
         are neither. In brackets by RC. \"A new connection\" is both sides' queue pair destroyed, made and \
         connected, numbers exchanged over a pipe, and a READ; \"a new key\" is a READ that fails and one \
         with the next key.\n\n## Rates\n\n{}\n{}{}\n\
         # Through memory\n\nThe same without `STARVERBS_LINK=udp`: RC executes its requests on the \
         peer's memory, 1RMA's packets go through a ring, encrypted as on the wire. READs of 1 MiB, \
         8 at once: RC {} GB/s, 1RMA {}.\n\n{}",
        machine.described(),
        machine.warning(),
        claims_table(claims(samples, cipher)),
        rates.markdown(),
        keys.markdown(),
        PROGRAM.tables(samples),
        rate_of(here, "rate.rc"),
        rate_of(here, "rate.1rma"),
        HERE.tables(here),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_claim_is_judged_or_said_not_to_be_measured() {
        let none = claims(&Samples::default(), &Cipher::default());
        assert!(none.iter().all(|claim| claim.holds.is_none()));
        let mut samples = Samples::default();
        let all = [
            ("beside.1rma.0", 20.0),
            ("beside.1rma.4194304", 25.0),
            ("beside.rc.0", 15.0),
            ("beside.rc.4194304", 140.0),
            ("read.1rma.64", 20.0),
            ("outage.1rma.0", 45.0),
            ("outage.rc.0", 44.0),
            ("rate.rc.1048576", 4.0),
            ("rate.1rma.1048576", 1.9),
        ];
        all.iter().for_each(|(name, value)| samples.add("onerma", name, &[(MEDIAN, *value)]));
        let cipher = Cipher { ours: Some(4.0), openssl: Some(5.1), ..Cipher::default() };
        let holds: Vec<_> = claims(&samples, &cipher).iter().map(|claim| claim.holds).collect();
        let [yes, no] = [true, false].map(Some);
        assert_eq!(holds, [yes, no, yes, no, no, yes]);
    }

    #[test]
    fn the_cipher_has_a_rate() {
        assert!(sealing().unwrap() > 0.0);
    }
}
