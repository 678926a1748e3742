//! Network namespaces of a run's own: their names, and what a killed run has left.

use std::process::Command;

use crate::command::output;

const PREFIX: &str = "sv-";

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
