//! A board in a thread of the test's process.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;

use starverbs_board::{Board, Stats, socket_paths};
use starverbs_settings::{DeviceChoice, Settings};

/// A board that works until this is dropped.
pub struct BoardThread {
    settings: Settings,
    pub sockets: Vec<PathBuf>,
    /// Its first block of QPNs
    pub block: u32,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl BoardThread {
    /// A board on the wire of `settings`, with so many sockets.
    pub fn start(settings: &Settings, sockets: usize) -> BoardThread {
        BoardThread::start_recorded(settings, sockets, None)
    }

    /// The same, which writes down what it does.
    pub fn start_recorded(settings: &Settings, sockets: usize, record: Option<File>) -> BoardThread {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("starverbs-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let sockets = socket_paths(&std::env::temp_dir().join(name), sockets);
        let stop = Arc::new(AtomicBool::new(false));
        let (ready, opened) = channel();
        let (own, paths, until) = (settings.clone(), sockets.clone(), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let seed = [7, u64::from(own.port)];
            let mut board = Board::open_with(&own, &paths, seed, Stats::default(), record).unwrap();
            ready.send(board.first_block()).unwrap();
            board.run(&until).unwrap();
        });
        let block = opened.recv().unwrap();
        BoardThread { settings: settings.clone(), sockets, block, stop, thread: Some(thread) }
    }

    /// Settings of a client at socket `n`.
    pub fn client(&self, n: usize) -> Settings {
        Settings { device: DeviceChoice::Board(self.sockets[n].clone()), ..self.settings.clone() }
    }
}

impl Drop for BoardThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let done = self.thread.take().unwrap().join();
        assert!(done.is_ok() || std::thread::panicking(), "the board panicked");
    }
}

/// Whether nodes are programs on boards, whose counters are not their own.
pub fn are_in_place() -> bool {
    std::env::var_os("STARVERBS_TEST_BOARD").is_some()
}

/// With STARVERBS_TEST_BOARD set, a node of these settings is a program on a board of its own, which stays
/// until the process ends.
pub fn in_place_of(settings: &Settings) -> Settings {
    if !are_in_place() || settings.device != DeviceChoice::Soft {
        return settings.clone();
    }
    let board = std::mem::ManuallyDrop::new(BoardThread::start(settings, 1));
    board.client(0)
}
