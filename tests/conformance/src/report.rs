//! What ran, as it runs and as a Markdown table.

use std::fmt::Write as _;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use crate::case::{Case, Net, Verdict};

/// One line of the result.
struct Row {
    group: &'static str,
    name: String,
    net: Net,
    verdict: Verdict,
}

/// The verdicts so far.
pub(crate) struct Report {
    rows: Vec<Row>,
    expected: usize,
    device: String,
    started: Instant,
}

impl Report {
    pub(crate) fn new(expected: usize, device: &str) -> Report {
        Report { rows: Vec::new(), expected, device: device.to_owned(), started: Instant::now() }
    }

    /// Notes and prints a verdict.
    pub(crate) fn add(&mut self, case: &Case, net: Net, verdict: Verdict, took: Duration) {
        let (word, detail) = match &verdict {
            Verdict::Pass(remark) => ("ok  ", remark.clone()),
            Verdict::Skip(reason) => ("skip", reason.clone()),
            Verdict::Fail(reason) => ("FAIL", format!("\n{}", indent(reason))),
        };
        let number = self.rows.len() + 1;
        let seconds = took.as_secs_f64();
        println!(
            "[{number:>3}/{}] {word} {seconds:5.1}s {net:<9} {}   {detail}",
            self.expected,
            case.title()
        );
        self.rows.push(Row { group: case.group, name: case.name.clone(), net, verdict });
    }

    fn count(&self, is: fn(&Verdict) -> bool) -> usize {
        self.rows.iter().filter(|row| is(&row.verdict)).count()
    }

    fn totals(&self) -> (usize, usize, usize) {
        let passed = self.count(|v| matches!(v, Verdict::Pass(_)));
        let skipped = self.count(|v| matches!(v, Verdict::Skip(_)));
        (passed, skipped, self.rows.len() - passed - skipped)
    }

    /// Prints the sums; success if something ran and nothing failed.
    pub(crate) fn conclude(&self) -> ExitCode {
        let (passed, skipped, failed) = self.totals();
        for row in self.rows.iter().filter(|row| matches!(row.verdict, Verdict::Fail(_))) {
            println!("FAILED {:<9} {}: {}", row.net, row.group, row.name);
        }
        let seconds = self.started.elapsed().as_secs();
        println!("conformance: {passed} passed, {skipped} skipped, {failed} failed in {seconds} s");
        if failed == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    /// The table for docs/conformance.md, or docs/conformance-board.md.
    pub(crate) fn markdown(&self, full: bool) -> String {
        let (passed, skipped, failed) = self.totals();
        let set = match self.device.as_str() {
            "soft" if full => "make conformance",
            "board" if full => "make conformance-board",
            _ => "tests/conformance",
        };
        let card = match self.device.as_str() {
            "soft" => "card",
            "board" => "board",
            _ => "board and the card in software",
        };
        let mut text = format!(
            "# Others' programs on the {card}\n\nWritten by `{set}`. {passed} passed, {skipped} skipped, \
             {failed} failed.\n\n\
             Each case is a server and a client of an unmodified program from Debian's packages, as two \
             processes over\n\
             127.0.0.1 or in two network namespaces joined by veth. A case passes when both end with status \
             0 and the\n\
             client's results are complete and possible. The figures are what the programs printed on a \
             machine that was\n\
             doing other things as well; `make bench` measures.\n\n{}\n",
            surroundings()
        );
        let mut groups: Vec<&str> = self.rows.iter().map(|row| row.group).collect();
        groups.dedup();
        for (i, group) in groups.iter().enumerate() {
            if !groups[..i].contains(group) {
                self.group(&mut text, group);
            }
        }
        text
    }

    fn group(&self, text: &mut String, group: &str) {
        let rows: Vec<&Row> = self.rows.iter().filter(|row| row.group == group).collect();
        let _ =
            write!(text, "\n## {group}\n\n| case | loopback | veth 1500 | veth 9000 |\n|---|---|---|---|\n");
        let mut names: Vec<&str> = Vec::new();
        for row in &rows {
            if !names.contains(&row.name.as_str()) {
                names.push(&row.name);
            }
        }
        for name in names {
            let cell = |net: Net| {
                let row = rows.iter().find(|row| row.name == name && row.net == net);
                row.map_or(String::new(), |row| mark(&row.verdict))
            };
            let _ = writeln!(
                text,
                "| `{name}` | {} | {} | {} |",
                cell(Net::Lo),
                cell(Net::Veth),
                cell(Net::Jumbo)
            );
        }
    }
}

fn mark(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Pass(remark) if remark.is_empty() => "ok".to_owned(),
        Verdict::Pass(remark) => format!("ok, {remark}"),
        Verdict::Skip(reason) => format!("skipped: {reason}"),
        Verdict::Fail(reason) => format!("**failed**: {}", reason.lines().next().unwrap_or_default()),
    }
}

fn indent(text: &str) -> String {
    text.lines().map(|line| format!("        {line}")).collect::<Vec<_>>().join("\n")
}

/// Kernel and versions of the programs.
fn surroundings() -> String {
    let line = |program: &str, args: &[&str]| {
        let output = Command::new(program).args(args).output().ok()?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned()).filter(|text| !text.is_empty())
    };
    let kernel = line("uname", &["-sr"]).unwrap_or_default();
    let version = |package: &str| {
        let version = line("dpkg-query", &["-W", "-f", "${Version}", package])?;
        Some(format!("{package} {version}"))
    };
    let packages: Vec<String> =
        ["ibverbs-utils", "rdmacm-utils", "perftest"].iter().filter_map(|p| version(p)).collect();
    let cpus = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    format!("{kernel}, {cpus} CPUs; {}.", packages.join(", "))
}
