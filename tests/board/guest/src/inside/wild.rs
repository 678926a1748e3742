//! A board that reaches for memory which nobody has given it: its registers are told of an address of the
//! guest's memory, as a broken or hostile driver, or a board on its own, would use it.

use std::fs::OpenOptions;
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::path::Path;

use starverbs_queues::board::*;

use super::raw::{Map, PAGE, Tested, expect};

/// PCI's command register, and what a driver sets there: the BARs answer, the board reaches memory.
const PCI_COMMAND: u64 = 4;
const PCI_MEMORY_AND_MASTER: u16 = 6;

/// Enables the board with its command queue at `address`, and says whether it could reach that. Of root, with
/// no driver bound.
pub(crate) fn run(folder: &Path, address: u64) -> Tested<String> {
    let failed = |what: &str, error: std::io::Error| format!("{what}: {error}");
    std::fs::write(folder.join("enable"), "1").map_err(|e| failed("enable", e))?;
    let mut config =
        OpenOptions::new().write(true).open(folder.join("config")).map_err(|e| failed("config", e))?;
    let set = config.seek(SeekFrom::Start(PCI_COMMAND));
    set.and_then(|_| config.write_all(&PCI_MEMORY_AND_MASTER.to_le_bytes()))
        .map_err(|e| failed("bus master", e))?;
    let bar = OpenOptions::new().read(true).write(true).open(folder.join("resource0"));
    let bar = bar.map_err(|e| failed("resource0", e))?;
    let registers = Map::new(bar.as_raw_fd(), 0, PAGE, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED)
        .map_err(|e| failed("registers", e))?;
    let word = |at: u32| {
        // SAFETY: a register of the mapped page, which is read as a whole.
        unsafe { registers.at.add(at as usize).cast::<u32>().read_volatile() }
    };
    let put = |at: u32, value: u32| {
        // SAFETY: a register of the mapped page, which is written as a whole.
        unsafe { registers.at.add(at as usize).cast::<u32>().write_volatile(value) };
    };
    expect("the board's magic", word(REG_MAGIC), MAGIC)?;
    put(REG_CONTROL, CTRL_RESET);
    registers.store(REG_COMMANDS as usize, address);
    registers.store(REG_EVENTS as usize, address);
    put(REG_COMMANDS_LOG, 0);
    put(REG_EVENTS_LOG, 0);
    put(REG_CONTROL, CTRL_ENABLE);
    let reached = word(REG_STATUS) & STATUS_ENABLED != 0;
    let errno = word(REG_ERROR);
    put(REG_CONTROL, CTRL_RESET);
    Ok(if reached { "reached".to_owned() } else { format!("refused {errno}") })
}
