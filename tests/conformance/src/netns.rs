//! Network namespaces of a run's own: their names, and what a killed run has left.

use std::process::Command;
use std::time::Duration;

use crate::command::output;

const PREFIX: &str = "sv-";
/// Looks for a carrier, one in 10 ms.
const LOOKS: u32 = 500;

/// The name of this process's namespace for `what`.
pub fn name(what: &str) -> String {
    format!("{PREFIX}{}-{what}", std::process::id())
}

/// Removes the namespaces of runs that were killed before they could tidy up.
pub fn remove_left_over() {
    let Ok(folder) = std::fs::read_dir("/run/netns") else { return };
    for name in folder.flatten().filter_map(|entry| entry.file_name().into_string().ok()) {
        let owner = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        if owner.is_some_and(|pid| !std::path::Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = ip(&format!("netns del {name}"));
        }
    }
}

/// Runs `ip` with `arguments`, separated by single spaces.
pub fn ip(arguments: &str) -> Result<(), String> {
    output(Command::new("ip").args(arguments.split(' ')))
        .map(drop)
        .map_err(|e| format!("ip {arguments}: {e}"))
}

/// Waits until `device` of the namespace `name` has a carrier, which the kernel notices a moment after both
/// ends are up: a port of it is down until then.
pub fn wait_for_carrier(name: &str, device: &str) -> Result<(), String> {
    let arguments = format!("-n {name} -o link show dev {device}");
    for _ in 0..LOOKS {
        let said = output(Command::new("ip").args(arguments.split(' ')))
            .map_err(|e| format!("ip {arguments}: {e}"))?;
        if said.contains("LOWER_UP") && said.contains("state UP") {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Err(format!("{device} of {name} has no carrier after {} s", LOOKS / 100))
}
