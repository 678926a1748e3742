//! An emulated board under perftest's programs: a process, of which each end has a function.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::child::Background;
use crate::error::{BenchError, Result};

/// A board that runs.
pub(crate) struct Board {
    _process: Background,
    socket: PathBuf,
}

impl Board {
    /// A board with a function for each end, whose port has the address of the bare streams.
    ///
    /// # Errors
    /// [`BenchError::NotBuilt`]; it does not begin.
    pub(crate) fn start(dist: &Path) -> Result<Board> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let program = dist.join("bin/starverbs");
        if !program.exists() {
            return Err(BenchError::NotBuilt { path: program.display().to_string() });
        }
        let name =
            format!("starverbs-bench-board-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let socket = std::env::temp_dir().join(name);
        let mut command = Command::new(program);
        command.args(["board", "--sockets", "2", "--socket"]).arg(&socket);
        command.env("STARVERBS_ADDRS", "127.0.0.1");
        let last = function(&socket, 1);
        let process = Background::start(command, || last.exists())?;
        Ok(Board { _process: process, socket })
    }

    /// The function of an end, as STARVERBS_DEVICE names it.
    pub(crate) fn device(&self, end: usize) -> String {
        format!("board:{}", function(&self.socket, end).display())
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        /* it is killed, and leaves them */
        for end in 0..2 {
            let _ = std::fs::remove_file(function(&self.socket, end));
        }
    }
}

/// Where a function listens.
fn function(socket: &Path, end: usize) -> PathBuf {
    match end {
        0 => socket.to_owned(),
        end => PathBuf::from(format!("{}.{end}", socket.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_board_that_was_not_built_is_left_out() {
        let error = Board::start(Path::new("/none")).err().expect("nothing is there");
        assert!(error.is_skip(), "{error}");
    }
}
