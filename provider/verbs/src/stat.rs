//! The statistics page: the card's counters where other processes can read them.
//!
//! A memfd named [`NAME`], found through `/proc/PID/fd`. It describes itself (names lie beside the values),
//! so that a reader of another version shows the right names. Owns the layout; it must not know what the
//! counters mean.

mod processes;

pub use processes::{page_of, pids};

use std::fs::File;
use std::io;
use std::mem::{ManuallyDrop, size_of};
use std::ops::Deref;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use memmap2::MmapMut;
use starverbs_backend::sealed::{self, SIZE_STAYS};
use starverbs_core::Counters;

/// The memfd's name; `/proc/PID/fd/N` shows it as `/memfd:starverbs-stat (deleted)`.
pub const NAME: &str = "starverbs-stat";

const MAGIC: [u8; 8] = *b"SVSTAT01";
/// Header, in native byte order: magic, pid, UDP port, first QPN block, number of cells, length of the names.
const HEADER: usize = 64;
/// Behind the magic, the pid and the port.
const FIRST_BLOCK_AT: usize = 16;
const CELLS: usize = Counters::NAMES.len();
const NAMES_AT: usize = HEADER + size_of::<Counters>();

/// The page of this process. Stays mapped for the life of the process, so a copy can be kept anywhere.
#[derive(Clone, Copy, Debug)]
pub struct StatPage {
    counters: &'static Counters,
    first_block: &'static AtomicU32,
}

impl StatPage {
    /// Makes the page. `pid` says whose it is (a fork inherits the descriptor), `port` and
    /// `first_block` where to ask for more (see `starverbs_backend::socket_name`).
    ///
    /// A process that may not have a file so long (RLIMIT_FSIZE) has a page that nobody else finds.
    ///
    /// # Errors
    /// No descriptor, or no memory.
    pub fn create(pid: u32, port: u16, first_block: u32) -> io::Result<StatPage> {
        let names = Counters::NAMES.join("\n");
        let len = NAMES_AT + names.len();
        let map = match sealed::create(c"starverbs-stat", len, SIZE_STAYS) {
            Ok((map, file)) => {
                /* the descriptor stays open: /proc/PID/fd is where readers look */
                std::mem::forget(file);
                map
            }
            Err(error) if error.raw_os_error() == Some(libc::EFBIG) => MmapMut::map_anon(len)?.into(),
            Err(error) => return Err(error),
        };
        let mut header = MAGIC.to_vec();
        for number in [pid, u32::from(port), first_block, CELLS as u32, names.len() as u32] {
            header.extend(number.to_ne_bytes());
        }
        let map = ManuallyDrop::new(map);
        let map = NonNull::new(map.as_mut_ptr()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        // SAFETY: both lie in the mapping, which nobody else has yet.
        unsafe {
            map.copy_from_nonoverlapping(NonNull::from(&header[..]).cast(), header.len());
            map.add(NAMES_AT).copy_from_nonoverlapping(NonNull::from(names.as_bytes()).cast(), names.len());
        }
        // SAFETY: the mapping is page-aligned, at least HEADER + size_of::<Counters>() long, never unmapped,
        // and zero bytes are valid cells; cells are atomics, so shared writing is sound. HEADER keeps
        // them aligned.
        let counters = unsafe { map.add(HEADER).cast::<Counters>().as_ref() };
        // SAFETY: as above; the word lies in the header.
        let first_block = unsafe { map.add(FIRST_BLOCK_AT).cast::<AtomicU32>().as_ref() };
        Ok(StatPage { counters, first_block })
    }

    /// The counters, for who keeps them.
    pub fn counters(&self) -> &'static Counters {
        self.counters
    }

    /// Publishes the first QPN block, once it is claimed.
    pub fn set_first_block(&self, block: u32) {
        self.first_block.store(block, Ordering::Relaxed);
    }
}

impl Deref for StatPage {
    type Target = Counters;

    fn deref(&self) -> &Counters {
        self.counters
    }
}

/// What a page said when it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The process whose card it is
    pub pid: u32,
    /// UDP port of its wire
    pub port: u16,
    /// Its first QPN block
    pub first_block: u32,
    /// Names and values, in the page's order
    pub counters: Vec<(String, u64)>,
}

impl Snapshot {
    /// Reads a page of any process.
    ///
    /// # Errors
    /// `InvalidData` if the file is no such page.
    pub fn read(file: &File) -> io::Result<Snapshot> {
        /// Far more than any version has.
        const MOST: u32 = 1 << 16;
        let mut header = [0; HEADER];
        file.read_exact_at(&mut header, 0)?;
        let number = |at: usize| {
            let word = header.get(8 + 4 * at..).and_then(|rest| rest.first_chunk()).copied();
            word.map_or(0, u32::from_ne_bytes)
        };
        let (cells, names_len) = (number(3), number(4));
        if !header.starts_with(&MAGIC) || cells > MOST || names_len > MOST {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a statistics page"));
        }
        let mut values = vec![0; 8 * cells as usize];
        file.read_exact_at(&mut values, HEADER as u64)?;
        let mut names = vec![0; names_len as usize];
        file.read_exact_at(&mut names, (HEADER + values.len()) as u64)?;
        let (values, _) = values.as_chunks::<8>();
        let names = String::from_utf8_lossy(&names).into_owned();
        let counters =
            names.lines().map(printable).zip(values.iter().map(|v| u64::from_ne_bytes(*v))).collect();
        let port = u16::try_from(number(1)).unwrap_or(0);
        Ok(Snapshot { pid: number(0), port, first_block: number(2), counters })
    }
}

/// Text of another process, for a terminal: what would move the cursor or more is replaced.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::os::fd::AsRawFd;

    use super::*;

    fn own_page(pid: u32) -> File {
        let files = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let is_page = |path: &std::path::Path| {
            std::fs::read_link(path).is_ok_and(|t| t.to_string_lossy().contains(NAME))
        };
        let mut open =
            files.map(|f| f.path()).filter(|path| is_page(path)).filter_map(|path| File::open(path).ok());
        open.find(|file| Snapshot::read(file).is_ok_and(|s| s.pid == pid)).unwrap()
    }

    #[test]
    fn readers_see_names_and_values() {
        let page = StatPage::create(4242, 4791, 17).unwrap();
        page.tx_packets.add(5);
        page.mrs.inc();
        let seen = Snapshot::read(&own_page(4242)).unwrap();
        assert_eq!((seen.port, seen.first_block, seen.counters.len()), (4791, 17, CELLS));
        let value = |name: &str| seen.counters.iter().find(|(n, _)| n == name).map(|(_, v)| *v);
        assert_eq!((value("tx_packets"), value("mrs"), value("rx_packets")), (Some(5), Some(1), Some(0)));
    }

    /// Any process may hold a file of that name, and an administrator may look at it.
    #[test]
    fn names_do_nothing_to_a_terminal() {
        let page = StatPage::create(4243, 4791, 17).unwrap();
        page.tx_packets.inc();
        let file = own_page(4243);
        let file =
            OpenOptions::new().write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
        file.write_all_at(b"tx\x1b[2J\x07", NAMES_AT as u64).unwrap();
        let seen = Snapshot::read(&own_page(4243)).unwrap();
        assert_eq!(seen.counters[0].0, "tx\u{fffd}[2J\u{fffd}ets");
    }

    #[test]
    fn other_files_are_refused() {
        assert!(Snapshot::read(&File::open("/proc/self/exe").unwrap()).is_err());
        assert!(Snapshot::read(&File::open("/dev/null").unwrap()).is_err());
    }
}
