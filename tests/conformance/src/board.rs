//! The boards of a run: emulated ones, each a process, of which every program under test has a function.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::process::{Process, tail};

/// What the programs of both ends have as their card.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Device {
    /// The card in software
    #[default]
    Soft,
    /// A function of a board
    Board,
}

impl Device {
    /// Those of both ends, by a word: `soft`, `board`, or the server's and the client's.
    pub(crate) fn of_ends(word: &str) -> [Device; 2] {
        let device = |word| if word == "board" { Device::Board } else { Device::Soft };
        let (server, client) = word.split_once(',').unwrap_or((word, word));
        [device(server), device(client)]
    }
}

/// Programs of one kind have functions of one board.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BoardKind {
    /// The end of the net, where the ends are two hosts
    pub host: usize,
    /// Who runs the programs: a board is for its own user alone
    pub user: Option<&'static str>,
    /// Settings, which are the board's: it has the wire
    pub env: Vec<(&'static str, String)>,
}

/// Functions of a board: more than programs run at once.
pub(crate) const FUNCTIONS: usize = 20;
/// How long a board may take to begin, and to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// A board that runs.
pub(crate) struct Board {
    pub kind: BoardKind,
    process: Process,
    socket: PathBuf,
}

impl Board {
    /// Waits until the board that `process` is serves at all sockets from `socket` on.
    pub(crate) fn new(kind: BoardKind, mut process: Process, socket: PathBuf) -> Result<Board, String> {
        let deadline = Instant::now() + PATIENCE;
        while process.output().lines().filter(|line| line.starts_with("board at ")).count() < FUNCTIONS {
            if process.ended().is_some() || Instant::now() > deadline {
                return Err(format!("no board:\n{}", tail(&process.output())));
            }
            std::thread::sleep(Duration::from_millis(3));
        }
        Ok(Board { kind, process, socket })
    }

    /// Names it to a program, which has the first function that is free.
    pub(crate) fn name(&self) -> String {
        format!("board:{}", self.socket.display())
    }

    /// Whether it still runs.
    pub(crate) fn check(&mut self) -> Result<(), String> {
        let ended = self.process.ended();
        ended.map_or(Ok(()), |status| Err(format!("the board: {status}:\n{}", tail(&self.process.output()))))
    }

    /// Its process.
    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Kills it.
    pub(crate) fn kill(mut self) {
        self.process.kill();
    }

    /// Has it end, as Ctrl-C does, which must leave nothing.
    pub(crate) fn end(mut self) -> Result<(), String> {
        self.check()?;
        self.process.terminate();
        let status = self.process.wait_until(Instant::now() + PATIENCE);
        if !status.is_some_and(|status| status.success()) {
            return Err(format!(
                "the board does not end well: {status:?}:\n{}",
                tail(&self.process.output())
            ));
        }
        if self.socket.exists() { Err("the board has left its socket".to_owned()) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_end_has_the_device_that_is_named_for_it() {
        use Device::{Board, Soft};
        let ends = ["soft", "board", "board,soft", "soft,board"].map(Device::of_ends);
        assert_eq!(ends, [[Soft, Soft], [Board, Board], [Board, Soft], [Soft, Board]]);
    }
}
