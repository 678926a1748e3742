//! `starverbs completions`: prints what a shell needs to complete this command's line.
//!
//! `make install` puts the three where the shells look. It knows nothing of what the commands do.

use std::io::Write;

use clap_complete::Shell;

use crate::Failure;

/// Print the completions of this command for a shell.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The shell that they are for
    #[arg(value_parser = ["bash", "zsh", "fish"])]
    shell: String,
}

/// Prints them.
pub(crate) fn completions(args: &Args, command: clap::Command) -> Result<(), Failure> {
    std::io::stdout().write_all(&script(&args.shell, command)?).map_err(|e| Failure::new(1, e))
}

/// The completions of `command` for the shell of that name.
fn script(shell: &str, mut command: clap::Command) -> Result<Vec<u8>, Failure> {
    let shell: Shell = shell.parse().map_err(|e| Failure::new(1, e))?;
    let name = command.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, name, &mut script);
    Ok(script)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn each_shell_is_told_of_commands_and_options() {
        for shell in ["bash", "zsh", "fish"] {
            let script = String::from_utf8(script(shell, crate::Cli::command()).unwrap()).unwrap();
            for word in ["run", "stat", "pcap", "settings"] {
                assert!(script.contains(word), "{shell} does not know {word}");
            }
        }
        assert_eq!(script("csh", crate::Cli::command()).unwrap_err().code, 1);
    }
}
