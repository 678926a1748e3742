//! What a card lets other processes of its host see: which key opens which bytes of its memory, and by
//! `cmd_fd` (ibv_import_device(3)) the names of a context's protection domains and device memory.
//!
//! The table of regions is the card's own ([`MrMemory`], in which core keeps its entries): a memory file that
//! it alone writes. A process that may look into this one maps it, and reaches the bytes through
//! `/proc/PID/mem` ([`Foreign`]): the exporter takes no part in it, and need not run. Before each use a
//! reader enters its slot, looks whether the key still opens what it did, and leaves when the bytes are
//! moved; whoever closes a key then waits for those who are inside ([`Published::await_readers`]).
//! docs/decisions/0007-imports.md says why.
//!
//! A peer of equal credentials gets the files and the way by its session instead ([`PeerMemory`]), and beside
//! the table the gates of queue pairs, so that its card executes WRITE and READ by itself
//! (docs/decisions/0020-direct-access.md): in memory that both have mapped, where the table says of a region
//! in which file it lies ([`FileBytes`]), atomics too.
//!
//! Owns the files, both sides of them, and the way to other processes' memory. It must not know the verbs
//! objects.

mod backing;
mod export;
mod file;
mod gates;
mod import;
mod kept;
mod mapped;
mod mrs;
mod names;
mod peer;
mod readers;

pub(crate) use backing::FileBytes;
pub(crate) use export::{Exports, Published};
pub(crate) use gates::{GatePass, Gates};
pub(crate) use import::{Foreign, ForeignList, Importer};
pub(crate) use kept::ImportTable;
pub(crate) use mrs::MrMemory;
pub(crate) use names::{ExportedBytes, ObjectKind, Tag};
pub(crate) use peer::{Copied, CopyWay, NotCopied, PeerBytes, PeerMemory, WordChange};

#[cfg(feature = "fuzzing")]
mod fuzzing;

#[cfg(feature = "fuzzing")]
pub use fuzzing::read_share_table;

#[cfg(test)]
mod tests;
