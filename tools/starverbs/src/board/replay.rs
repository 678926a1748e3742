//! `starverbs board replay`: plays a record back to the emulated board.

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;

use starverbs_board::{Played, Replay};

use crate::Failure;

/// Play a record back to the emulated board, and compare what it does.
///
/// Exit status 1: it does something else, and the first line that differs is told.
#[derive(clap::Args)]
pub(super) struct Args {
    /// What `starverbs board --record` wrote
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

pub(super) fn replay(args: &Args) -> Result<(), Failure> {
    let name = args.file.display();
    let file = File::open(&args.file).map_err(|error| Failure::new(1, format!("{name}: {error}")))?;
    let played = Replay::open(file).and_then(|mut replay| replay.run());
    let Played { turns, lines } = played.map_err(|error| Failure::new(1, format!("{name}: {error}")))?;
    let _ = writeln!(io::stdout(), "{lines} lines, {turns} turns: the board does the same");
    Ok(())
}
