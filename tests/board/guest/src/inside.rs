//! What runs in the guest: programs that use, or misuse, `/dev/starN` without a library. The host's run
//! starts this same program there.

mod attacks;
mod opens;
mod pair;
mod raw;
mod victim;
mod wild;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;

use raw::Tested;

/// A program for the guest.
#[derive(Subcommand)]
pub(crate) enum Inside {
    /// Opens a device so many times, and kills who has it in the middle of what it does
    Opens {
        /// The device
        device: PathBuf,
        /// How many times
        count: u32,
        /// Of the moments
        seed: u64,
    },
    /// Has as many contexts open as the board has, and says how many
    Fill {
        /// The device
        device: PathBuf,
    },
    /// Tries every attack on what is another process's
    Attacks {
        /// The device
        device: PathBuf,
        /// Of the random ones
        seed: u64,
    },
    /// Uses a device until it is killed, or the board has gone: a message, and memory that comes and goes
    Load {
        /// The device
        device: PathBuf,
    },
    /// Has a board that no driver has work with memory that nobody has given it
    Wild {
        /// Its folder in /sys/bus/pci/devices
        folder: PathBuf,
        /// An address of the guest's memory
        address: u64,
    },
}

/// Runs one.
pub(crate) fn run(inside: &Inside) -> ExitCode {
    let done = match inside {
        Inside::Opens { device, count, seed } => opens::run(device, *count, *seed),
        Inside::Fill { device } => opens::fill(device),
        Inside::Attacks { device, seed } => attacks::run(device, *seed),
        Inside::Load { device } => opens::load(device),
        Inside::Wild { folder, address } => wild::run(folder, *address),
    };
    match done {
        Ok(said) => {
            println!("{said}");
            ExitCode::SUCCESS
        }
        Err(reason) => {
            println!("FAILED: {reason}");
            ExitCode::FAILURE
        }
    }
}

/// Fails with what `errno` is if it is none of `wanted`.
fn expect_errno(what: &str, errno: i32, wanted: &[i32]) -> Tested {
    if wanted.contains(&errno) { Ok(()) } else { Err(format!("{what}: errno {errno}, not {wanted:?}")) }
}
