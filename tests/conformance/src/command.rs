//! Commands that are not under test, and the surroundings of those that are.

use std::process::Command;

/// Runs a command to its end and gives what it printed.
pub fn output(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|e| format!("{name}: {e}"))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(format!("{name}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim()))
    }
}

/// Takes out of a command's environment what a person set for their own programs: it must not bend the cases.
pub fn forget_settings(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("STARVERBS_") || name.starts_with("LD_")) {
            command.env_remove(name);
        }
    }
}
