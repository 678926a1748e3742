//! What a result must say about where it was measured.

use std::fs;
use std::process::Command;
use std::time::Duration;

use serde::Serialize;

use crate::child;

/// The machine and the other stacks, as the report's heading has them.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Machine {
    /// The processor's own name.
    pub(crate) cpu: String,
    /// Processors this process may use.
    pub(crate) cpus: usize,
    /// Release of the kernel.
    pub(crate) kernel: String,
    /// Load average over one minute when the run began: other work spoils the figures.
    pub(crate) load: f64,
    /// Whether servers and clients were held to processors.
    pub(crate) pinned: bool,
    /// Whether this was the short run.
    pub(crate) quick: bool,
    /// Installed packages that took part: (name, version).
    pub(crate) packages: Vec<(String, String)>,
}

impl Machine {
    /// Reads /proc and asks dpkg; what is not known stays empty.
    pub(crate) fn read(pinned: bool, quick: bool) -> Self {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let cpu = text("/proc/cpuinfo")
            .lines()
            .find_map(|line| {
                line.strip_prefix("model name")?.split_once(':').map(|(_, name)| name.trim().to_owned())
            })
            .unwrap_or_default();
        let load = text("/proc/loadavg").split_whitespace().next().and_then(|word| word.parse().ok());
        Self {
            cpu,
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: text("/proc/sys/kernel/osrelease").trim().to_owned(),
            load: load.unwrap_or(0.0),
            pinned,
            quick,
            packages: packages(),
        }
    }
}

impl Machine {
    /// The head of a page: processor, kernel, and the load then and now.
    pub(crate) fn described(&self) -> String {
        let now = Machine::read(false, false).load;
        let Machine { cpu, cpus, kernel, load, .. } = self;
        format!("{cpu}, {cpus} processors, Linux {kernel}; load {load} at the start, {now} at the end")
    }

    /// What is said of figures from a machine that did other work, too.
    pub(crate) fn warning(&self) -> &'static str {
        if self.load > crate::report::BUSY { crate::report::BUSY_WARNING } else { "" }
    }
}

/// One query a package: dpkg-query fails as a whole where one of several is not installed.
fn packages() -> Vec<(String, String)> {
    let version = |package: &str| {
        let mut query = Command::new("dpkg-query");
        query.args(["-W", "-f", "${Version}", package]);
        let output = child::run_one(query, Duration::from_secs(5)).ok()?;
        Some((package.to_owned(), output.stdout)).filter(|(_, version)| !version.is_empty())
    };
    ["perftest", "ucx-utils", "libfabric-bin"].into_iter().filter_map(version).collect()
}
