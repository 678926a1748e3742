//! Boards of these tests, and the driver without a library ([`starverbs_rules::RawDriver`]), whose faults
//! panic here.

use std::fs::File;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use starverbs_backend::give_way::GiveWay;
use starverbs_core::{Cqe, SendOp, SendWqe};
use starverbs_free_port::free_port;
use starverbs_queues::board::{CreateQp, NumberReply};
use starverbs_rules::BoardPatience;
pub(super) use starverbs_rules::qp::{RECVS, RawQp, SENDS, TwoQps, data, request};
pub(super) use starverbs_rules::raw::*;
use starverbs_settings::Settings;
use starverbs_vfio::VfioClient;
use zerocopy::{FromBytes, Immutable, KnownLayout};

use crate::{Board, SERVE_EVERY, Stats, now, socket_paths};

/// How long a board may take for one thing.
const PATIENCE: Duration = Duration::from_secs(60);

/// A driver of a board.
pub(super) struct Raw(starverbs_rules::RawDriver);

impl Deref for Raw {
    type Target = starverbs_rules::RawDriver;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Raw {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

pub(super) fn settings() -> Settings {
    Settings { port: free_port(), addrs: Some(vec!["127.0.0.1".parse().unwrap()]), ..Settings::default() }
}

/// Runs a board of so many sockets while `clients` runs in another thread; gives the board afterwards.
pub(super) fn with_board(sockets: usize, clients: impl FnOnce(&[PathBuf]) + Send) -> Board {
    with_board_of(&settings(), sockets, clients)
}

/// The same of a board with these settings.
pub(super) fn with_board_of(
    settings: &Settings,
    sockets: usize,
    clients: impl FnOnce(&[PathBuf]) + Send,
) -> Board {
    with_board_that(settings, sockets, |_| (), clients)
}

/// The same of a board that is recorded.
pub(super) fn with_board_recorded(
    settings: &Settings,
    sockets: usize,
    record: File,
    clients: impl FnOnce(&[PathBuf]) + Send,
) -> Board {
    run_board(settings, sockets, Some(record), |_| (), clients)
}

/// The same of a board that `prepare` has seen.
pub(super) fn with_board_that(
    settings: &Settings,
    sockets: usize,
    prepare: impl FnOnce(&mut Board),
    clients: impl FnOnce(&[PathBuf]) + Send,
) -> Board {
    run_board(settings, sockets, None, prepare, clients)
}

fn run_board(
    settings: &Settings,
    sockets: usize,
    record: Option<File>,
    prepare: impl FnOnce(&mut Board),
    clients: impl FnOnce(&[PathBuf]) + Send,
) -> Board {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("starverbs-raw-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let paths = socket_paths(&std::env::temp_dir().join(name), sockets);
    let mut board = Board::open_with(settings, &paths, [1, 2], Stats::default(), record).unwrap();
    prepare(&mut board);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| clients(&paths)));
            stop.store(true, Ordering::Relaxed);
            done
        });
        board.run(&stop).unwrap();
        client.join().unwrap().unwrap();
    });
    /* what the clients left is seen in these turns */
    for _ in 0..2 * SERVE_EVERY {
        board.turn(now());
    }
    board.card.tap.finish().unwrap();
    board
}

impl Raw {
    pub(super) fn connect(path: &Path) -> Raw {
        Raw(starverbs_rules::RawDriver::connect(path, BoardPatience::new(PATIENCE)).unwrap())
    }

    /// Connected and enabled.
    pub(super) fn open(path: &Path) -> Raw {
        Raw(starverbs_rules::RawDriver::open(path, BoardPatience::new(PATIENCE)).unwrap())
    }

    /// Connected and enabled, with a file as its memory.
    pub(super) fn of(path: &Path, file: File) -> Raw {
        let memory = starverbs_rules::MemoryFile::of(file).unwrap();
        let mut raw =
            Raw(starverbs_rules::RawDriver::with_memory(path, BoardPatience::new(PATIENCE), memory).unwrap());
        raw.enable();
        raw
    }

    /// Enabled, with memory that is as new.
    pub(super) fn enable(&mut self) {
        self.put(0, &vec![0; DATA]);
        self.0.taken = 0;
        self.0.enable().unwrap();
    }

    /// Opens a context, and works in it.
    pub(super) fn open_context(&mut self, vector: u32) -> u16 {
        self.0.open_context(vector).unwrap()
    }

    pub(super) fn close_context(&mut self, context: u16) {
        self.0.close_context(context).unwrap();
    }

    /// Posts a command without a body; gives its status as it is then.
    pub(super) fn post_command(&mut self, op: u16) -> u32 {
        let at = self.put_command(op, &[]);
        self.0.post_commands().unwrap();
        self.word(at + 4).load(Ordering::Acquire)
    }

    /// Looks until something is so.
    pub(super) fn until(&mut self, what: &str, mut is: impl FnMut(&mut Raw) -> bool) {
        let (begun, mut give_way) = (Instant::now(), GiveWay::default());
        while !is(self) {
            assert!(begun.elapsed() < PATIENCE, "never: {what}");
            give_way.pause();
        }
    }

    pub(super) fn client(&mut self) -> &mut VfioClient {
        self.link.client().unwrap()
    }

    pub(super) fn register(&mut self, at: u32) -> u32 {
        self.0.register(at).unwrap()
    }

    pub(super) fn counter(&mut self, which: u32) -> u64 {
        self.0.counter(which).unwrap()
    }

    pub(super) fn ring(&self, cell: u32, value: u64) {
        self.0.ring(cell, value).unwrap();
    }

    pub(super) fn command<R: FromBytes + KnownLayout + Immutable>(
        &mut self,
        op: u16,
        body: &[u8],
    ) -> Result<R, u32> {
        self.0.command(op, body).unwrap()
    }

    pub(super) fn object(&mut self, op: u16, number: u32) -> Result<(), u32> {
        self.0.object(op, number).unwrap()
    }

    pub(super) fn number(&mut self, op: u16, body: &[u8]) -> NumberReply {
        self.0.number(op, body).unwrap()
    }

    pub(super) fn basics(&mut self) -> Basics {
        self.0.basics().unwrap()
    }

    pub(super) fn create_qp(pd: u32, cq: u32, at: usize) -> CreateQp {
        starverbs_rules::RawDriver::create_qp(pd, cq, at)
    }

    pub(super) fn qp(&mut self, pd: u32, cq: u32, n: usize) -> RawQp {
        self.0.qp(pd, cq, n).unwrap()
    }

    pub(super) fn connect_qp(&mut self, qp: RawQp, peer: u32) {
        self.0.connect_qp(qp, peer).unwrap();
    }

    pub(super) fn doorbell(&self, qp: &RawQp) {
        self.0.doorbell(qp).unwrap();
    }

    pub(super) fn completion(&mut self) -> Cqe {
        self.0.completion().unwrap()
    }

    pub(super) fn wait_for_event(&mut self, index: u32) -> RaisedEvent {
        self.0.wait_for_event(index).unwrap()
    }
}

/// A memory file that may be made shorter.
pub(super) fn unsealed(len: usize) -> File {
    use nix::sys::memfd::{MFdFlags, memfd_create};
    let file = File::from(memfd_create(c"raw", MFdFlags::empty()).unwrap());
    file.set_len(len as u64).unwrap();
    file
}

/// Two QPs of one client, connected to each other.
pub(super) fn two_qps(raw: &mut Raw) -> TwoQps {
    raw.0.two_qps().unwrap()
}

pub(super) fn signaled_send(wr_id: u64) -> SendWqe {
    request(SendOp::Send, wr_id)
}

/// Sends one message from `a` to `b`, and looks at it.
pub(super) fn exchange(raw: &mut Raw, key: u32, a: &mut RawQp, b: &mut RawQp, n: u64) {
    raw.0.exchange(key, a, b, n).unwrap();
}
