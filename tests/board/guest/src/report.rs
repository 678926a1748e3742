//! What ran, as it runs and as a Markdown table.

use std::fmt::Write as _;
use std::time::Instant;

use crate::cases::{COLUMNS, Pair};
use crate::world::{Boot, Parts, World};

/// What stands below the tests.
const NOTES: &str = "
The board's process is killed behind a relay, without which QEMU 11.1.2 ends itself in half of all tries
([kernel-shim](../kernel-shim/README.md)).

perftest 4.5's client dies by SIGSEGV when it is refused, as its server listens anew, on the card in software,
too: it frees its connection and goes on with it (valgrind says so). The test begins anew then.

Of rdma-core's own tests `test_rdmacm` is left out. It takes its address from the interface that /sys names
for the device, where the board's would have to lie: here that is 127.0.0.1, at which a listener is bound to
no device, as with Linux, and pyverbs then ends with SIGSEGV, on the card in software, too. Programs of
rdma_cm that are told an address are a test of their own. `test_qp` makes queue pairs of any size, for which a
kernel without an IOMMU may not have memory in one piece (3 of 312 of its tests ended with ENOMEM): it runs
with one.
";

/// How often guests may try to come up.
const BOOTS: u32 = 3;

type Verdict = Result<String, String>;

/// The verdicts so far.
pub(crate) struct Report {
    pairs: Vec<(Pair, Verdict)>,
    tests: Vec<(String, Verdict)>,
    passed: usize,
    failed: Vec<String>,
    started: Instant,
}

impl Report {
    pub(crate) fn new() -> Report {
        Report {
            pairs: Vec::new(),
            tests: Vec::new(),
            passed: 0,
            failed: Vec::new(),
            started: Instant::now(),
        }
    }

    /// Boots guests, and says so. Anew, if they do not come up: QEMU gives a board up that says nothing for
    /// 5 s, as on a machine that stood still.
    pub(crate) fn boot(&self, parts: &Parts, boot: &Boot) -> Result<World, String> {
        for _ in 1..BOOTS {
            match self.boot_once(parts, boot) {
                Err(reason) => println!("board-guest: once more, as {reason}"),
                world => return world,
            }
        }
        self.boot_once(parts, boot)
    }

    fn boot_once(&self, parts: &Parts, boot: &Boot) -> Result<World, String> {
        let begun = Instant::now();
        let world = World::new(parts, boot)?;
        let (package, line, seconds) = (&parts.kernel.package, boot.line, begun.elapsed().as_secs_f64());
        println!("board-guest: {package} is up after {seconds:.1} s {line}");
        Ok(world)
    }

    /// Notes and prints what came of a pair.
    pub(crate) fn add_pair(&mut self, pair: Pair, verdict: Verdict) {
        self.note(&pair.title(), &verdict);
        self.pairs.push((pair, verdict));
    }

    /// Notes and prints what came of a test of the module.
    pub(crate) fn add_test(&mut self, title: &str, verdict: Verdict) {
        self.note(title, &verdict);
        self.tests.push((title.to_owned(), verdict));
    }

    fn note(&mut self, title: &str, verdict: &Verdict) {
        let seconds = self.started.elapsed().as_secs();
        match verdict {
            Ok(remark) => {
                println!("[{seconds:>3} s] ok    {title}   {remark}");
                self.passed += 1;
            }
            Err(reason) => {
                println!("[{seconds:>3} s] FAIL  {title}\n{reason}");
                self.failed.push(title.to_owned());
            }
        }
    }

    /// Prints the sum; whether nothing failed.
    pub(crate) fn conclude(&self) -> bool {
        let (passed, failed) = (self.passed, self.failed.len());
        println!("board-guest: {passed} passed, {failed} failed in {} s", self.started.elapsed().as_secs());
        self.failed.iter().for_each(|title| println!("FAILED  {title}"));
        failed == 0 && passed > 0
    }

    /// The table for docs/board-guest.md, or, on the newest kernel, docs/board-guest-newest.md.
    pub(crate) fn markdown(&self, kernel: &str, is_newest: bool) -> String {
        let (passed, failed) = (self.passed, self.failed.len());
        let (title, root) = if is_newest { (", newest kernel", " ROOT=FOLDER") } else { ("", "") };
        let mut text = format!(
            "# The board in guests{title}\n\n\
             Written by `make board-guest{root}`: {passed} passed, {failed} failed, on {kernel}.\n\n\
             Guests of QEMU have functions of `starverbs board` as PCI devices, which the kernel module \
             drives ([kernel-shim](../kernel-shim/README.md)).\n\
             The host's end is on the card in software. QEMU may emulate the CPU: the figures only show that \
             data flowed.\n\n## Others' programs\n\n| command |"
        );
        COLUMNS.iter().for_each(|ends| _ = write!(text, " {ends} |"));
        text += "\n|---|";
        text += &"---|".repeat(COLUMNS.len());
        let mut rows: Vec<&str> = Vec::new();
        for (pair, _) in &self.pairs {
            if !rows.contains(&pair.words) {
                rows.push(pair.words);
            }
        }
        for words in rows {
            let _ = write!(text, "\n| `{words}` |");
            for ends in COLUMNS {
                let found = self.pairs.iter().find(|(pair, _)| pair.words == words && pair.ends == ends);
                let _ = write!(text, " {} |", found.map_or(String::new(), |(_, verdict)| mark(verdict)));
            }
        }
        text += "\n\n## Tests of the module\n\n| test | outcome |\n|---|---|\n";
        self.tests.iter().for_each(|(title, verdict)| _ = writeln!(text, "| {title} | {} |", mark(verdict)));
        text + NOTES
    }
}

fn mark(verdict: &Verdict) -> String {
    match verdict {
        Ok(remark) if remark.is_empty() => "ok".to_owned(),
        Ok(remark) => format!("ok, {remark}"),
        Err(reason) => format!("**failed**: {}", reason.lines().next().unwrap_or_default()),
    }
}
