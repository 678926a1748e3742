//! `starverbs board`: an emulated board, to which programs and monitors connect by vfio-user.

mod replay;
mod test;

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use starverbs_board::{Board, Stats, socket_paths};
use starverbs_settings::Settings;
use starverbs_verbs::stat::StatPage;

use crate::Failure;

/// Functions at most: the board's tables have a byte for their number.
const MOST: u16 = 255;

/// Emulate a board: a PCI device that speaks vfio-user on unix sockets, with its port on UDP.
///
/// A program has it as its card with STARVERBS_DEVICE=board:PATH.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    emulate: Option<Emulate>,
}

#[derive(clap::Subcommand)]
enum Command {
    Test(test::Args),
    Replay(replay::Args),
}

/// How to emulate a board.
#[derive(clap::Args)]
struct Emulate {
    /// Where the first function listens; the others at PATH.1, PATH.2 and so on
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// Functions: each has one client at a time
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=MOST as i64))]
    sockets: u16,
    /// No client maps doorbell pages: a guest's writes are trapped then, one by one
    #[arg(long)]
    no_mapped_doorbells: bool,
    /// Write what crosses the board's edges to a new file (docs/board-record.md)
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
}

/// Set by a signal that ends the board.
static STOP: AtomicBool = AtomicBool::new(false);

extern "C" fn on_signal(_: libc::c_int) {
    STOP.store(true, Ordering::Relaxed);
}

pub(crate) fn board(args: &Args) -> Result<(), Failure> {
    match args {
        Args { command: Some(Command::Test(args)), .. } => test::test(args),
        Args { command: Some(Command::Replay(args)), .. } => replay::replay(args),
        Args { emulate: Some(args), .. } => emulate(args),
        Args { .. } => Err(Failure::new(2, "`starverbs board` needs --socket PATH, or a command")),
    }
}

fn emulate(args: &Emulate) -> Result<(), Failure> {
    let settings = Settings::load().map_err(|error| Failure::new(2, error))?;
    let sockets = socket_paths(&args.socket, usize::from(args.sockets));
    /* by which `starverbs stat` and `top` find it */
    let page = StatPage::create(std::process::id(), settings.port, 0)
        .map_err(|error| Failure::new(1, format!("statistics page: {error}")))?;
    /* what is in it is the clients' */
    let new = |path| OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let record = args.record.as_ref().map(new).transpose();
    let record = record.map_err(|error| Failure::new(1, format!("record: {error}")))?;
    let mut board = Board::open_with(&settings, &sockets, seed(), Stats::Page(page.counters()), record)
        .map_err(|error| Failure::new(1, format!("no board: {error}")))?;
    page.set_first_block(board.first_block());
    if args.no_mapped_doorbells {
        board.trap_doorbells();
    }
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler stores a flag, which is all that may be done there.
        unsafe { libc::signal(signal, on_signal as *const () as libc::sighandler_t) };
    }
    /* who starts it waits for these lines */
    for path in &sockets {
        let _ = writeln!(io::stdout(), "board at {}", path.display());
    }
    let _ = io::stdout().flush();
    board.run(&STOP).map_err(|error| Failure::new(1, format!("record: {error}")))
}

/// Numbers that a client cannot guess, for keys and QPNs.
fn seed() -> [u64; 2] {
    use std::hash::{BuildHasher, Hasher, RandomState};
    [(); 2].map(|()| RandomState::new().build_hasher().finish())
}
