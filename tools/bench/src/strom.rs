//! What StRoM's kernels save over READs, on the UDP wire: GET of a key-value store, traversal of a list, and
//! a consistent read; and what of that the paper says.
//!
//! Owns these measurements and their page. programs/strom.c does the work.

use std::path::Path;
use std::time::Duration;

use starverbs_charts::bars;

use crate::error::Result;
use crate::machine::Machine;
use crate::report::write_file;
use crate::samples::Samples;
use crate::ways::{CARD, Claim, MEDIAN, PLAIN, Part, Program, SOFTWARE, claim, claims_table};

/// Bytes of values and objects.
const SIZES: [u32; 4] = [64, 256, 1024, 4096];
/// Elements of the list up to the one that is looked for.
const HOPS: [u32; 5] = [1, 2, 4, 8, 16];
/// MiB of a stream.
const STREAM: u32 = 8;
/// No further round begins that would end after this.
const ALL: Duration = Duration::from_secs(6 * 60);

const MODULE: &str = "#e08e79";

const PROGRAM: Program =
    Program { name: "strom", parts: &PARTS, others: &[], addrs: "127.0.0.1", link: "udp" };

const PARTS: [Part; 4] = [
    Part {
        title: "GET of a key-value store",
        counts: "bytes of the value",
        numbers: &SIZES,
        ways: &[
            ("get.reads", "two READs", SOFTWARE),
            ("get.rpc", "RPC", CARD),
            ("get.wasm", "RPC, module", MODULE),
            ("get.tcp", "TCP, answered by the program", SOFTWARE),
            ("get.read", "one READ, where the value's place is known", PLAIN),
        ],
    },
    Part {
        title: "Traversal of a list",
        counts: "elements to the value, of 64 B",
        numbers: &HOPS,
        ways: &[
            ("list.reads", "READs", SOFTWARE),
            ("list.rpc", "RPC", CARD),
            ("list.wasm", "RPC, module", MODULE),
            ("list.tcp", "TCP, answered by the program", SOFTWARE),
        ],
    },
    Part {
        title: "Consistent read",
        counts: "bytes of the object",
        numbers: &SIZES,
        ways: &[
            ("check.read", "READ, not checked", PLAIN),
            ("check.software", "READ, checked by the requester", SOFTWARE),
            ("check.rpc", "RPC", CARD),
            ("check.wasm", "RPC, module", MODULE),
        ],
    },
    Part {
        title: "Stream",
        counts: "MiB, in messages of 64 KiB",
        numbers: &[STREAM],
        ways: &[
            ("stream.write", "WRITE", PLAIN),
            ("shuffle.rpc", "RPC WRITE, shuffled into 1,024 partitions", CARD),
            ("shuffle.wasm", "RPC WRITE, shuffled by a module", MODULE),
            ("stream.sender", "shuffled by the sender, 128 B a WRITE", SOFTWARE),
            ("hll.rpc", "RPC WRITE, HyperLogLog", CARD),
            ("hll.wasm", "RPC WRITE, HyperLogLog by a module", MODULE),
            ("stream.cpu", "WRITE, then HyperLogLog by the receiver", SOFTWARE),
        ],
    },
];

/// Measures in rounds, one at least and no more than `rounds` or than end in time, and writes `out`.md and
/// `out`.svg.
///
/// # Errors
/// Where nothing can be measured, or the files cannot be written.
pub(crate) fn run(out: &Path, dist: &Path, rounds: u32, quick: bool) -> Result<()> {
    let machine = Machine::read(false, quick);
    let (samples, done) = PROGRAM.gather(dist, rounds, ALL, if quick { "0.05" } else { "0.5" })?;
    let text = page(&machine, &samples, done);
    println!("{text}");
    write_file(out, "md", &text)?;
    write_file(out, "svg", &bars(&PROGRAM.panels(&samples)))
}

fn claims(samples: &Samples) -> Vec<Claim> {
    let median = |way: &str, number| PROGRAM.of(samples, way, number, MEDIAN);
    let both = |a: Option<f64>, b: Option<f64>| Some((a?, b?));
    let (few, many) = (HOPS[0], HOPS[HOPS.len() - 1]);
    let (short, long) = (SIZES[0], SIZES[SIZES.len() - 1]);
    let grows = |way| both(median(way, many), median(way, few));
    let over = |way, size| both(median(way, size), median("check.read", size));
    let times = |a: f64, b: f64| format!("{:.2}x", a / b);
    let more = |a: f64, b: f64| format!("{:+.0} %", (a / b - 1.0) * 100.0);
    let reads = grows("list.reads").map_or(f64::INFINITY, |(a, b)| a / b);
    vec![
        claim(
            "A GET by RPC saves one of the two round trips that READs take: 0.65 (figure 8; ours)",
            both(median("get.rpc", short), median("get.reads", short)),
            |a, b| format!("{a:.1} us instead of {b:.1}: {:.2}x", a / b),
            |ratio| ratio <= 0.65,
        ),
        claim(
            "and of a value of 4 KiB (0.65; ours)",
            both(median("get.rpc", long), median("get.reads", long)),
            times,
            |ratio| ratio <= 0.65,
        ),
        claim(
            "It is one round trip, as a READ is",
            both(median("get.rpc", short), median("get.read", short)),
            times,
            |ratio| ratio <= 1.5,
        ),
        claim(
            "By READs a traversal takes a round trip an element (figure 7)",
            grows("list.reads"),
            |a, b| format!("{many} elements take {:.1}x what {few} takes", a / b),
            |ratio| ratio >= f64::from(many + 1) / f64::from(few + 1) / 1.5,
        ),
        claim(
            "By RPC it grows less than its list does (figure 7)",
            grows("list.rpc"),
            |a, b| format!("{many} elements take {:.1}x what {few} takes", a / b),
            move |ratio| ratio < reads / 2.0,
        ),
        claim(
            "Over 8 elements an RPC takes a third of what READs take, at most (figure 7; ours)",
            both(median("list.rpc", 8), median("list.reads", 8)),
            times,
            |ratio| ratio <= 1.0 / 3.0,
        ),
        claim(
            "and less than the same by TCP, whose server's program looks (figure 7)",
            both(median("list.rpc", 8), median("list.tcp", 8)),
            times,
            |ratio| ratio < 1.0,
        ),
        claim(
            "On small objects a check costs next to nothing, in software (figure 9)",
            over("check.software", short),
            more,
            |ratio| ratio <= 1.1,
        ),
        claim("nor on the card: 8 % (figure 9)", over("check.rpc", short), more, |ratio| ratio < 1.08),
        claim(
            "On objects of 4 KiB the requester's check costs up to 40 % (figure 9)",
            over("check.software", long),
            more,
            |ratio| (1.1..=1.6).contains(&ratio),
        ),
        claim("and the card's less than 8 % (figure 9)", over("check.rpc", long), more, |ratio| ratio < 1.08),
        claim(
            "Shuffling a stream on its way costs no pass over the data more: 0.4 of a plain WRITE's rate \
             (figure 11; ours)",
            both(median("stream.write", STREAM), median("shuffle.rpc", STREAM)),
            times,
            |ratio| ratio >= 0.4,
        ),
        claim(
            "and less than that the sender shuffles, and writes each buffer (figure 11)",
            both(median("shuffle.rpc", STREAM), median("stream.sender", STREAM)),
            times,
            |ratio| ratio < 1.0,
        ),
        claim(
            "HyperLogLog on the way is as fast as a thread of the receiver's after it: 0.9 (figure 13; ours)",
            both(median("stream.cpu", STREAM), median("hll.rpc", STREAM)),
            times,
            |ratio| ratio >= 0.9,
        ),
        claim(
            "A kernel as a WebAssembly module takes at most twice as long as the card's own: GET (ours)",
            both(median("get.wasm", short), median("get.rpc", short)),
            times,
            |ratio| ratio <= 2.0,
        ),
        claim(
            "a consistent read of 4 KiB",
            both(median("check.wasm", long), median("check.rpc", long)),
            times,
            |ratio| ratio <= 2.0,
        ),
        claim(
            "a traversal of 8 elements",
            both(median("list.wasm", 8), median("list.rpc", 8)),
            times,
            |ratio| ratio <= 2.0,
        ),
        claim(
            "the shuffle of a stream",
            both(median("shuffle.wasm", STREAM), median("shuffle.rpc", STREAM)),
            times,
            |ratio| ratio <= 2.0,
        ),
        claim(
            "and HyperLogLog of a stream",
            both(median("hll.wasm", STREAM), median("hll.rpc", STREAM)),
            times,
            |ratio| ratio <= 2.0,
        ),
    ]
}

fn page(machine: &Machine, samples: &Samples, rounds: u32) -> String {
    format!(
        "# StRoM: RPCs against READs\n\nWritten by `make bench-strom` (tools/bench, src/strom.rs); do not \
         edit.\n\n![bars](bench-strom.svg)\n\n{}. Medians of {rounds} rounds.\n{}\n{}\n\
         Two processes of this host, UDP on 127.0.0.1, both poll without a break; one request after the \
         other, from its post to the last byte of its answer (`tools/bench/programs/strom.c`); answers of \
         RPCs have no record, and complete a receive (`STARDV_RPC_BARE`). In \
         brackets by the first column. A kernel here is a program on the peer's CPU, in its card's turn: \
         where the paper's waits 1.5 us for PCIe, it waits for memory, and where the paper's CRC is a \
         circuit, it is code. By TCP, of the same host, the server's program looks for what the kernels \
         find, and does nothing else. Between processes of one host, too, RPCs are packets; plain READs \
         there go through shared memory (bench-local.md), and two of them take less than one RPC. A \
         module is the same kernel compiled to WebAssembly (`make modules`).\n{}",
        machine.described(),
        machine.warning(),
        claims_table(claims(samples)),
        PROGRAM.tables(samples),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ways::P99;

    fn samples(rpc: f64) -> Samples {
        let mut samples = Samples::default();
        for part in &PARTS {
            for number in part.numbers {
                for (way, ..) in part.ways {
                    let reads = if *way == "list.reads" { f64::from(number + 1) } else { 2.0 };
                    let card = ["rpc", "wasm"].iter().any(|kind| way.ends_with(kind));
                    let value = if card { rpc } else { 10.0 * reads };
                    samples.add("strom", &format!("{way}.{number}"), &[(MEDIAN, value), (P99, 99.0)]);
                }
            }
        }
        samples
    }

    #[test]
    fn each_way_is_a_column_and_each_number_a_row() {
        for part in &PARTS {
            let table = PROGRAM.table(&samples(12.0), part);
            assert_eq!(table.lines().count(), 2 + part.numbers.len(), "{table}");
            assert!(table.contains("12.0 (0.60x)") && table.contains("99.0"), "{table}");
        }
        let bars: usize = PROGRAM.panels(&samples(12.0)).iter().map(|panel| panel.bars.len()).sum();
        assert_eq!(bars, PARTS.iter().map(|part| part.ways.len() * part.numbers.len()).sum::<usize>());
    }

    #[test]
    fn claims_hold_or_do_not_or_were_not_measured() {
        let verdicts =
            |samples: Samples| claims(&samples).iter().map(|claim| claim.holds).collect::<Vec<_>>();
        let good = verdicts(samples(12.0));
        assert_eq!(good.iter().filter(|holds| **holds == Some(true)).count(), good.len() - 1, "{good:?}");
        let bad = verdicts(samples(30.0));
        assert_eq!((bad[0], bad[3], bad[10]), (Some(false), Some(true), Some(false)));
        assert!(verdicts(Samples::default()).iter().all(Option::is_none));
        assert!(claims_table(claims(&Samples::default())).contains("not measured"));
    }
}
