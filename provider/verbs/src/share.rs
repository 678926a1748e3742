//! What a context lets other processes have: its protection domains, memory regions and device memory, by the
//! descriptor `cmd_fd` (ibv_import_device(3)).
//!
//! The descriptor is a table in memory that the exporter writes ([`Exports`]) and importers read
//! ([`Importer`]). An importer's own card opens the exporter's regions, and reaches their bytes through the
//! exporter's `/proc/PID/mem` ([`Foreign`]): the exporter takes no part in it, and need not run. Before each
//! use an importer sits down at its desk, looks whether the region still stands there, and gets up when the
//! bytes are moved; who takes a region out of the table then waits for those who sit.
//! docs/decisions/0007-imports.md says why.
//!
//! Owns the table, both sides of it, and the way to other processes' memory. It must not know the verbs
//! objects.

mod export;
mod import;
mod kept;
mod table;

pub(crate) use export::Exports;
pub(crate) use import::{Foreign, ForeignList, Importer};
pub(crate) use kept::Kept;
pub(crate) use table::{Item, Kind, Tag};

#[cfg(feature = "fuzzing")]
mod judged;

#[cfg(feature = "fuzzing")]
pub use judged::read_share_table;

#[cfg(test)]
mod tests;
