//! The exporter's side: what stands in the table, and how it is taken out again.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use starverbs_rings::ReaderSlot;

use super::table::{Desks, ENTRIES, Identity, Item, Kind, Table, Whereabouts};
use crate::error::{Result, VerbsError};
use crate::process;

/// How long to sleep between two looks at a desk in use: some copies of a page.
const NAP: Duration = Duration::from_micros(20);

/// A context's table, and the desks of those who use what stands in it.
pub(crate) struct Exports {
    table: Table,
    file: File,
    desks: Desks,
    desks_file: File,
    desks_are: Identity,
    /// Forked children must not touch their parent's
    forks: u32,
    /// Shows importers that they reach the memory of this process. At an address that stays.
    _token: Box<u64>,
    places: Mutex<Places>,
}

/// Which object stands where.
#[derive(Default)]
struct Places {
    of: HashMap<(Kind, u32), u32>,
    free: Vec<u32>,
    used: u32,
}

impl Places {
    /// Room for one more, and for its place when it is free again. False: no memory.
    fn make_room(&mut self) -> bool {
        let places = (self.used as usize + 1).saturating_sub(self.free.len());
        self.of.try_reserve(1).is_ok() && self.free.try_reserve(places).is_ok()
    }
}

impl Exports {
    /// An empty table. `token`: a number that no other process can have by chance.
    ///
    /// # Errors
    /// No memory files, or none with the seals (Linux 5.1).
    pub(crate) fn new(token: u64) -> Result<Exports> {
        let token = Box::new(token);
        let (desks, desks_file) = Desks::create()?;
        let desks_are = Identity::of(&desks_file)?;
        let (table, file) = Table::create(&Whereabouts {
            token: *token,
            token_at: std::ptr::from_ref(&*token) as u64,
            desks: desks_are,
            desks_fd: desks_file.as_raw_fd() as u32,
        })?;
        // SAFETY: takes numbers.
        let named = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETOWN, libc::getpid()) };
        if named < 0 {
            return Err(VerbsError::last_os());
        }
        let (forks, places) = (process::forks(), Mutex::default());
        Ok(Exports { table, file, desks, desks_file, desks_are, forks, _token: token, places })
    }

    /// The descriptor that stands for it. Its owner (F_GETOWN) names this process, in whatever PID namespace
    /// one asks.
    pub(crate) fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Lets others have an object. A full table leaves it out, as does one that there is no memory for.
    pub(crate) fn publish(&self, kind: Kind, handle: u32, item: &Item) {
        let Some(mut places) = self.places() else { return };
        if !places.make_room() {
            return;
        }
        let index = match places.free.pop() {
            Some(index) => index,
            None if (places.used as usize) < ENTRIES => {
                places.used += 1;
                places.used - 1
            }
            None => return,
        };
        places.of.insert((kind, handle), index);
        self.table.put(index, kind, handle, item);
    }

    /// Nobody uses the object when this returns, or will: waits for copies that are under way. One of a
    /// stopped process goes on when the process does.
    pub(crate) fn revoke(&self, kind: Kind, handle: u32) {
        let index = self.places().and_then(|mut places| places.of.remove(&(kind, handle)));
        let Some(index) = index else { return };
        self.table.take(index);
        /* a protection domain has no bytes that could be under way */
        if kind != Kind::Pd {
            self.wait_for_users();
        }
        if let Some(mut places) = self.places() {
            places.free.push(index);
        }
    }

    /// Nobody uses anything when this returns, or will.
    pub(crate) fn close(&self) {
        if self.places().is_some() {
            self.table.close();
            self.wait_for_users();
        }
    }

    /// `None` in a forked child.
    fn places(&self) -> Option<MutexGuard<'_, Places>> {
        let ours = self.forks == process::forks();
        ours.then(|| self.places.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits until everybody who was at a desk got up, or died.
    fn wait_for_users(&self) {
        let slots = self.desks.all().iter().map(|desk| &desk.slot);
        ReaderSlot::wait_for_all(slots, |number| {
            let taken = self.is_taken(number);
            if taken {
                std::thread::sleep(NAP);
            }
            taken
        });
    }

    /// Whether a desk's importer lives: the kernel takes its lock away after its last copy. Yes, if nobody
    /// can tell as the program closed what it did not open.
    fn is_taken(&self, number: usize) -> bool {
        if Identity::of(&self.desks_file).ok() != Some(self.desks_are) {
            return true;
        }
        let mut lock = byte(number);
        // SAFETY: `lock` is a flock for the answer.
        let asked = unsafe { libc::fcntl(self.desks_file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
        asked < 0 || i32::from(lock.l_type) != libc::F_UNLCK
    }
}

/// The lock of desk `number`.
pub(super) fn byte(number: usize) -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: number as libc::off_t,
        l_len: 1,
        l_pid: 0,
    }
}
