//! Goodput against loss: the card with selective repeat and without, and TCP, over one wire that loses
//! packets.
//!
//! Each run has a network namespace of its own, whose loopback interface has an MTU of 4200, takes no packet
//! of several segments, and drops each arriving packet of the protocol that is measured, data and
//! acknowledges, with one chance. Needs root, `ip` and `iptables`.

use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use starverbs_charts::{Lines, Series, lines};

use crate::case::{Metric, Setup};
use crate::child;
use crate::error::{BenchError, Result};
use crate::machine::Machine;
use crate::perftest::{self, Link, Program};
use crate::report::write_file;

/// Losses, as shares of all packets.
const LOSSES: [f64; 7] = [0.0, 0.0001, 0.001, 0.005, 0.01, 0.02, 0.05];
/// The longest that one run may take: the slowest rows lose most of their time.
const LIMIT: Duration = Duration::from_secs(60);
const TCP_SECONDS: f64 = 1.0;
/// Messages of a row's first run, without loss: of fewer its beginning is too large a part.
const FIRST: u64 = 15_000;
/// No round begins that would end after this, and no run begins later.
const ALL: Duration = Duration::from_secs(9 * 60);

/// What is measured, but for the guest's: a row of the tables.
#[derive(Debug)]
struct Measured {
    /// For the child
    word: &'static str,
    name: &'static str,
    /// Of perftest; TCP is this program's
    program: Option<&'static str>,
    /// `STARVERBS_REPEAT`
    repeat: &'static str,
    /// StaR: the server's end is stateless
    star: bool,
}

impl Measured {
    const fn rc(word: &'static str, name: &'static str, program: &'static str, repeat: &'static str) -> Self {
        Measured { word, name, program: Some(program), repeat, star: false }
    }

    const fn star(word: &'static str, name: &'static str, program: &'static str) -> Self {
        Measured { word, name, program: Some(program), repeat: "auto", star: true }
    }
}

/// What `starverbs-interop --loss` measures in the guest: its words and ours.
const GUEST_ROWS: [(&str, &str); 4] = [
    ("repeat", "guest: WRITE, selective repeat"),
    ("go-back-n", "guest: WRITE, go-back-N"),
    ("rxe", "guest: WRITE, rdma_rxe"),
    ("tcp", "guest: TCP"),
];

const ROWS: [Measured; 9] = [
    Measured::rc("repeat", "WRITE, selective repeat", "ib_write_bw", "auto"),
    Measured::rc("go-back-n", "WRITE, go-back-N", "ib_write_bw", "off"),
    Measured::rc("repeat-read", "READ, selective repeat", "ib_read_bw", "auto"),
    Measured::rc("go-back-n-read", "READ, go-back-N", "ib_read_bw", "off"),
    Measured::rc("repeat-send", "SEND, selective repeat", "ib_send_bw", "auto"),
    Measured::star("star-write", "WRITE, StaR", "ib_write_bw"),
    Measured::star("star-read", "READ, StaR", "ib_read_bw"),
    Measured::star("star-send", "SEND, StaR", "ib_send_bw"),
    Measured { word: "tcp", name: "TCP", program: None, repeat: "off", star: false },
];

/// What is aimed at with the greatest loss: a row, by itself without loss or by another row with the same
/// loss, at least so much.
const AIMS: [(&str, Option<&str>, f64); 5] = [
    ("READ, selective repeat", None, 0.8),
    ("READ, StaR", None, 0.8),
    ("SEND, StaR", Some("SEND, selective repeat"), 0.8),
    ("WRITE, StaR", Some("WRITE, selective repeat"), 0.8),
    ("READ, StaR", Some("READ, selective repeat"), 0.8),
];

/// What the child in a namespace is told.
#[derive(Debug, clap::Args)]
pub(crate) struct Child {
    /// What to measure
    #[arg(long)]
    what: String,
    /// The folder with lib/libibverbs.so.1.
    #[arg(long)]
    dist: std::path::PathBuf,
    /// Messages
    #[arg(long)]
    iters: u64,
}

/// Measures once, in the namespace, and prints GB/s and the share of packets that were dropped.
///
/// # Errors
/// As of the program that runs.
pub(crate) fn child(child: &Child) -> Result<()> {
    let setup = Setup { dist: child.dist.clone(), cpus: (None, None), limit: LIMIT };
    let gbps = measure(child, &setup)?;
    let mut rules = Command::new(child::require("iptables", "iptables")?);
    rules.args(["-v", "-S", "INPUT"]);
    println!("{gbps} {}", dropped(&child::run_one(rules, LIMIT)?.stdout));
    Ok(())
}

/// Of the packets that arrived, the share that the rules dropped: the first rule counts them all.
fn dropped(rules: &str) -> f64 {
    let of = |drops: bool| {
        let mut lines = rules.lines().filter(|line| line.starts_with("-A") && line.contains("DROP") == drops);
        lines.next()?.split_once("-c ")?.1.split_whitespace().next()?.parse::<f64>().ok()
    };
    of(true).unwrap_or(0.0) / of(false).unwrap_or(0.0).max(1.0)
}

fn measure(child: &Child, setup: &Setup) -> Result<f64> {
    let unknown = || BenchError::Parse { what: child.what.clone(), tail: String::new() };
    let what = ROWS.iter().find(|row| row.word == child.what).ok_or_else(unknown)?;
    let Some(name) = what.program else {
        return tcp().map_err(|e| BenchError::from_io("tcp", &e));
    };
    let program = Program::new(name, &[], Link::Udp);
    let program = if what.star { program.with_star("stateless", "stateful") } else { program };
    perftest::run(setup, program, Metric::Stream64K, child.iters)
}

/// One TCP connection, sent to for [`TCP_SECONDS`]; GB/s that arrived.
fn tcp() -> std::io::Result<f64> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
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
    while began.elapsed().as_secs_f64() < TCP_SECONDS {
        match stream.read(&mut room) {
            Ok(n) => bytes += n,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(bytes as f64 / began.elapsed().as_secs_f64() / 1e9)
}

/// One run in a namespace of its own: GB/s, and the share of packets that were lost.
fn once(what: &Measured, loss: f64, dist: &Path, iters: u64) -> Result<(f64, f64)> {
    let protocol = if what.program.is_some() { "udp" } else { "tcp" };
    let mut script = format!(
        "ip link set lo mtu 4200 gso_max_segs 1 gso_max_size 4200 up && iptables -A INPUT -p {protocol}"
    );
    if loss > 0.0 {
        let _ = write!(
            script,
            " && iptables -A INPUT -p {protocol} -m statistic --mode random --probability {loss} -j DROP"
        );
    }
    script.push_str(" && exec \"$0\" \"$@\"");
    let own = std::env::current_exe().map_err(|e| BenchError::from_io("current_exe", &e))?;
    let mut command = Command::new(child::require("unshare", "util-linux")?);
    command.args(["-n", "sh", "-c", &script]).arg(own);
    command.args(["loss-child", "--iters", &iters.to_string(), "--dist"]).arg(dist);
    command.args(["--what", what.word]).env("STARVERBS_REPEAT", what.repeat);
    let output = child::run_one(command, LIMIT + Duration::from_secs(10))?;
    let parse = || BenchError::Parse { what: what.word.to_owned(), tail: child::tail_of(&output.stderr) };
    let mut figures = output.stdout.split_whitespace().map_while(|word| word.parse().ok());
    figures.next().zip(figures.next()).ok_or_else(parse)
}

/// A row of the table.
struct Row {
    name: &'static str,
    /// Samples by [`LOSSES`]: GB/s, and the share of packets lost
    gbps: Vec<Vec<f64>>,
    lost: Vec<Vec<f64>>,
}

impl Row {
    fn new(name: &'static str) -> Row {
        let none = || vec![Vec::new(); LOSSES.len()];
        Row { name, gbps: none(), lost: none() }
    }
}

/// Samples of the guest from lines of row, loss in percent, GB/s and the loss measured. Other lines are
/// passed over.
fn of_guest(text: &str) -> Vec<Row> {
    let mut rows: Vec<Row> = GUEST_ROWS.iter().map(|(_, name)| Row::new(name)).collect();
    for line in text.lines() {
        let mut words = line.split('\t');
        let row = words.next().and_then(|word| GUEST_ROWS.iter().position(|(row, _)| *row == word));
        let loss =
            words.next().and_then(|word| LOSSES.iter().position(|loss| percent(*loss) == format!("{word}%")));
        let gbps = words.next().and_then(|word| word.parse().ok());
        if let (Some(row), Some(loss), Some(gbps)) = (row, loss, gbps) {
            rows[row].gbps[loss].push(gbps);
            rows[row].lost[loss]
                .extend(words.next().and_then(|word| Some(word.parse::<f64>().ok()? / 100.0)));
        }
    }
    rows
}

/// Measures each row at each loss once. What fails is left out and reported.
fn round(rows: &mut [Row], round: usize, rounds: usize, dist: &Path, began: Instant) {
    for (at, loss) in LOSSES.into_iter().enumerate() {
        for (row, what) in rows.iter_mut().zip(&ROWS) {
            let before = row.gbps[at].last().or_else(|| row.gbps.get(at.max(1) - 1)?.last());
            let iters =
                before.map_or(FIRST, |gbps| Metric::Stream64K.messages_in(1.0, *gbps).clamp(500, 50_000));
            let said = format!("round {} of {rounds}, {} at {}", round + 1, what.name, percent(loss));
            if began.elapsed() > ALL {
                eprintln!("{said}: no time");
                continue;
            }
            match once(what, loss, dist, iters) {
                Ok((gbps, lost)) => {
                    eprintln!("{said}: {gbps:.3} GB/s, {:.3}% lost", lost * 100.0);
                    row.gbps[at].push(gbps);
                    row.lost[at].push(lost);
                }
                Err(error) => eprintln!("{said}: {error}"),
            }
        }
    }
}

/// Measures all, in interleaved rounds, one at least and no more than `rounds` or than end in time, and
/// writes `out`.md and `out`.svg. `guest`: samples of the guest.
///
/// # Errors
/// Where nothing can be measured, or the files cannot be written.
pub(crate) fn run(out: &Path, dist: &Path, rounds: usize, guest: Option<&Path>) -> Result<()> {
    child::require("iptables", "iptables")?;
    let machine = Machine::read(false, false);
    let mut rows: Vec<Row> = ROWS.iter().map(|row| Row::new(row.name)).collect();
    let (began, mut done) = (Instant::now(), 0);
    while done < rounds && (done == 0 || began.elapsed() / done as u32 * (done as u32 + 1) < ALL) {
        round(&mut rows, done, rounds, dist, began);
        done += 1;
    }
    if let Some(file) = guest {
        match fs::read_to_string(file) {
            Ok(text) => rows.extend(of_guest(&text)),
            Err(error) => eprintln!("no figures of the guest: {}: {error}", file.display()),
        }
    }
    let text = markdown(&machine, &rows, done);
    println!("{text}");
    write_file(out, "md", &text)?;
    write_file(out, "svg", &picture(&rows))
}

fn median(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted.get(sorted.len().checked_sub(1)? / 2)?, sorted.get(sorted.len() / 2)?);
    Some((low + high) / 2.0)
}

fn percent(loss: f64) -> String {
    format!("{}%", (loss * 1e6).round() / 1e4)
}

/// Goodput as a share of the row's own without loss.
fn ratio(row: &[Vec<f64>], at: usize) -> Option<f64> {
    Some(median(row.get(at)?)? / median(row.first()?)?)
}

/// Goodput of a row with the greatest loss, by its own without or by another's with it.
fn ratio_of(rows: &[Row], name: &str, beside: Option<&str>) -> Option<f64> {
    let find = |name: &str| rows.iter().find(|row| row.name == name);
    let (row, last) = (find(name)?, LOSSES.len() - 1);
    let Some(beside) = beside else { return ratio(&row.gbps, last) };
    Some(median(&row.gbps[last])? / median(&find(beside)?.gbps[last])?)
}

/// What is aimed at, and whether that holds.
fn aims(text: &mut String, rows: &[Row]) {
    let most = percent(LOSSES[LOSSES.len() - 1]);
    let _ = write!(text, "\n\n| goodput at {most} | aim | measured | holds |\n|---|---:|---:|---|");
    for (name, beside, least) in AIMS {
        let claim = format!("{name}, by {}", beside.unwrap_or("its own without loss"));
        let (figure, holds) = match ratio_of(rows, name, beside) {
            Some(ratio) => (format!("{ratio:.2}x"), if ratio >= least { "yes" } else { "no" }),
            None => ("-".to_owned(), "not measured"),
        };
        let _ = write!(text, "\n| {claim} | {least:.1}x | {figure} | {holds} |");
    }
}

fn markdown(machine: &Machine, rows: &[Row], rounds: usize) -> String {
    let mut text = format!(
        "# Goodput against loss\n\nWritten by `make bench-loss` (tools/bench, src/loss.rs); do not \
         edit.\n\n![lines](bench-loss.svg)\n\n\
         {}, {} processors, Linux {}; load {} at the start, {} at the end. Medians of {rounds} interleaved \
         rounds; of the guest's rows, of theirs.\n\n| GB/s |",
        machine.cpu,
        machine.cpus,
        machine.kernel,
        machine.load,
        Machine::read(false, false).load
    );
    table(&mut text, rows, |row, at| {
        let cell = median(&row.gbps[at]).zip(ratio(&row.gbps, at));
        cell.map(|(gbps, share)| format!("{gbps:.3} ({share:.2}x)"))
    });
    aims(&mut text, rows);
    text.push_str("\n\n| packets lost, measured |");
    table(&mut text, rows, |row, at| Some(format!("{:.3}%", median(&row.lost[at])? * 100.0)));
    text.push_str(
        "\n\nIn brackets: by the same row without loss. Messages of 64 KiB between two processes, path MTU \
         4096, `ib_write_bw`, `ib_read_bw` and `ib_send_bw`, with StaR the server's end stateless; TCP is \
         one connection for a second, with the system's congestion control. All run in a network namespace \
         whose loopback interface has an MTU of 4200, takes no segmented sends (`gso_max_segs 1`: each \
         packet is lost by itself) and drops each packet of the protocol, data and acknowledges, with the \
         chance in the heading (iptables, `statistic`).\n\n\
         Rows of the guest: two ends in one emulated machine (QEMU, TCG, Linux of Debian 12) with a veth \
         pair between them, MTU 4200, that loses each packet with the chance in the heading in each \
         direction (`tc netem`, in place without loss, too). rdma_rxe goes between two devices of its own; \
         our card and TCP run over the same wire, our card without segmented sends; each run lasts four \
         seconds, of which `ib_write_bw` counts two. A run without a figure (none came in that time) is left \
         out. It is emulated, so only the figures in brackets say something.\n",
    );
    text
}

/// The columns of a table whose first heading is written, and its rows.
fn table(text: &mut String, rows: &[Row], cell: impl Fn(&Row, usize) -> Option<String>) {
    LOSSES.iter().for_each(|loss| _ = write!(text, " {} |", percent(*loss)));
    text.push_str("\n|---|");
    text.push_str(&"---:|".repeat(LOSSES.len()));
    for row in rows {
        let _ = write!(text, "\n| {} |", row.name);
        for at in 0..LOSSES.len() {
            let _ = write!(text, " {} |", cell(row, at).unwrap_or("-".to_owned()));
        }
    }
}

/// Lines: loss to the right, share of the goodput without loss upwards.
fn picture(rows: &[Row]) -> String {
    let series = rows.iter().map(|row| {
        let points = (0..LOSSES.len()).filter_map(|at| Some((at as u32, ratio(&row.gbps, at)?)));
        Series { name: row.name.to_owned(), points: points.collect(), rings: Vec::new() }
    });
    lines(&Lines {
        title: "Goodput by packet loss, as a share of that without loss".to_owned(),
        x: "packets lost".to_owned(),
        steps: LOSSES.map(percent).to_vec(),
        y: "share of the goodput without loss".to_owned(),
        zero_based: true,
        reference: "",
        series: series.collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_the_row_itself() {
        let row = [vec![4.0, 2.0, 3.0], vec![1.0, 2.0]];
        assert_eq!((median(&row[0]), ratio(&row, 1), ratio(&row, 2)), (Some(3.0), Some(0.5), None));
        assert_eq!(
            (percent(0.0001), percent(0.05), percent(0.0)),
            ("0.01%".into(), "5%".into(), "0%".into())
        );
    }

    #[test]
    fn aims_are_judged_by_what_they_name() {
        let row = |name, first, last| {
            let mut row = Row::new(name);
            row.gbps[0].push(first);
            row.gbps[LOSSES.len() - 1].push(last);
            row
        };
        let rows = [row("READ, selective repeat", 2.0, 1.7), row("READ, StaR", 1.0, 0.5)];
        let mut text = String::new();
        aims(&mut text, &rows);
        let verdicts: Vec<&str> = text.lines().filter_map(|line| line.rsplit("| ").next()).skip(4).collect();
        assert_eq!(verdicts, ["yes |", "no |", "not measured |", "not measured |", "no |"], "{text}");
    }

    #[test]
    fn lines_of_the_guest_find_their_cells() {
        let rows =
            of_guest("rxe\t0\t0.5\t0\nrxe\t1\t0.1\t2\nrxe\t1\t0.3\nother\t0\t1\ntcp\t7\t1\n\nrepeat\t5\tx\n");
        assert_eq!((&rows[2].gbps[0], &rows[2].gbps[4]), (&vec![0.5], &vec![0.1, 0.3]));
        assert_eq!((&rows[2].lost[0], &rows[2].lost[4]), (&vec![0.0], &vec![0.02]));
        assert_eq!(rows.iter().flat_map(|row| &row.gbps).flatten().count(), 3);
    }

    #[test]
    fn the_rules_tell_what_they_drop() {
        let rules = "-P INPUT ACCEPT -c 9 900\n-A INPUT -p udp -c 200 9000\n-A INPUT -p udp -m statistic \
                     --mode random -c 3 99 -j DROP\n";
        assert_eq!((dropped(rules), dropped("-A INPUT -p udp -c 5 6")), (0.015, 0.0));
    }
}
