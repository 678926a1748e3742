//! What ran, as it runs and as a Markdown table.

use std::fmt::Write as _;
use std::time::Instant;

use crate::capture::Frames;
use crate::exchanges::{Difference, Row};

type Verdict = Result<String, String>;

/// The verdicts so far.
pub(crate) struct Report {
    kernel: String,
    programs: Vec<(String, Vec<Verdict>)>,
    /// Title and outcome of the rows of small exchanges.
    exchanges: Vec<(String, String)>,
    differences: Vec<Difference>,
    passed: usize,
    failed: Vec<String>,
    started: Instant,
}

impl Report {
    pub(crate) fn new(kernel: &str) -> Report {
        Report {
            kernel: kernel.to_owned(),
            programs: Vec::new(),
            exchanges: Vec::new(),
            differences: Vec::new(),
            passed: 0,
            failed: Vec::new(),
            started: Instant::now(),
        }
    }

    /// Notes and prints what came of a program in each direction: starverbs serves, rxe serves.
    pub(crate) fn add(&mut self, title: &str, verdicts: Vec<Verdict>) {
        let seconds = self.started.elapsed().as_secs();
        for verdict in &verdicts {
            match verdict {
                Ok(remark) => println!("[{seconds:>3} s] ok    {title}   {remark}"),
                Err(reason) => println!("[{seconds:>3} s] FAIL  {title}\n{reason}"),
            }
        }
        self.count(title, verdicts.iter().all(Result::is_ok));
        self.programs.push((title.to_owned(), verdicts));
    }

    fn count(&mut self, title: &str, well: bool) {
        if well {
            self.passed += 1;
        } else {
            self.failed.push(title.to_owned());
        }
    }

    /// Notes and prints what came of a row of small exchanges.
    pub(crate) fn exchanges(&mut self, title: &str, row: &Row, frames: &Frames) {
        let unruled = row.differences.iter().filter(|difference| difference.rule.is_none()).count();
        let outcome = format!(
            "{} lines: {} as rxe alone, {} as the IBTA rules ask, {unruled} otherwise; {} frames of {} \
             kinds, {} malformed",
            row.lines,
            row.lines - row.differences.len(),
            row.differences.len() - unruled,
            frames.count,
            frames.kinds,
            frames.malformed.len()
        );
        println!("[{:>3} s] {title}: {outcome}", self.started.elapsed().as_secs());
        for Difference { step, rxe, here, .. } in
            row.differences.iter().filter(|difference| difference.rule.is_none())
        {
            println!("        {step}\n            rxe alone: {rxe}\n            here:      {here}");
        }
        self.count(title, unruled == 0 && frames.malformed.is_empty() && frames.count > 0);
        self.exchanges.push((title.to_owned(), outcome));
        let new = row.differences.iter().filter(|difference| !self.differences.contains(difference));
        self.differences.extend(new.cloned().collect::<Vec<_>>());
    }

    /// Prints the sums; true if something ran and nothing failed.
    pub(crate) fn conclude(&self) -> bool {
        for title in &self.failed {
            println!("FAILED {title}");
            let reasons = self.programs.iter().filter(|(program, _)| program == title).flat_map(|(_, v)| v);
            reasons.filter_map(|verdict| verdict.as_ref().err()).for_each(|reason| println!("{reason}"));
        }
        let seconds = self.started.elapsed().as_secs();
        println!("interop: {} passed, {} failed in {seconds} s", self.passed, self.failed.len());
        self.failed.is_empty() && self.passed > 0
    }

    /// The table for docs/interop.md.
    pub(crate) fn markdown(&self) -> String {
        let mut text = format!(
            "# Against Linux' rdma_rxe\n\nWritten by `make interop`: {} passed, {} failed.\n\n\
             Programs on the card, in a network namespace, against the same programs on the rdma_rxe of {} \
             in a guest\n\
             of QEMU, which emulates the CPU: the figures only show that data flowed.\n\n\
             ## Small exchanges\n\n\
             tests/interop/peer.c walks through operations and mistakes; each end prints its completions, \
             data and state.\n\
             The lines must be those that rxe prints when it talks to itself, or what the IBTA rules ask for \
             where rxe\n\
             departs from them. tshark must decode every frame.\n\n| row | outcome |\n|---|---|\n",
            self.passed,
            self.failed.len(),
            self.kernel,
        );
        for (title, outcome) in &self.exchanges {
            let _ = writeln!(text, "| `{title}` | {outcome} |");
        }
        if !self.differences.is_empty() {
            text += "\n| step | rxe alone | here | why |\n|---|---|---|---|\n";
            for Difference { step, rxe, here, rule } in &self.differences {
                let _ = writeln!(text, "| {step} | {rxe} | {here} | {} |", rule.unwrap_or("**unexplained**"));
            }
        }
        text += "\n## Others' programs\n\n\
                 Each in both directions. A pair that stops is tried once more, and the table says so: \
                 rdma_rxe of Linux 6.1 has been\n\
                 seen to stop for ever after an acknowledge of its last packet arrived while it sent that \
                 message again. That is\n\
                 what a capture showed, with the guest short of CPU, whose retransmission timer then runs \
                 out before the answer is\n\
                 read; rxe's own state was not looked at. `starverbs-interop --repeat 40 --filter \
                 'rc_pingpong.*-m (256|512)'`\n\
                 on a busy machine shows it. A pair is also tried again where the frames show that rxe sent \
                 a packet again as another one: a WRITE whose\n\
                 first packets were acknowledged begins again with its first op-code one PSN too late (seen \
                 with `--repeat 40 --filter 'write_bw -b -q 4'\n\
                 --captures FOLDER` on a busy machine, in both directions), so that the message no longer \
                 fits, and our end\n\
                 refuses it with NAK Invalid Request as the IBTA asks.\n\n| command | starverbs serves | rxe \
                 serves |\n|---|---|---|\n";
        for (title, verdicts) in &self.programs {
            let cells: Vec<String> = verdicts.iter().map(mark).collect();
            let _ = writeln!(text, "| `{title}` | {} |", cells.join(" | "));
        }
        text
    }
}

fn mark(verdict: &Verdict) -> String {
    match verdict {
        Ok(remark) => format!("ok, {remark}"),
        Err(reason) => format!("**failed**: {}", reason.lines().next().unwrap_or_default()),
    }
}
