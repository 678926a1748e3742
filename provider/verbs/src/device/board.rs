//! A board: a device in another place, which this process reaches as docs/board.md says.
//!
//! What is posted lies in memory that the board has mapped; a doorbell is one store into a page of the
//! board's; completions are read where the board has written them. Commands and interrupts go by a socket,
//! or by the kernel.
//! Owns what the program has to know of its objects. It must not know how the board works.

mod chardev;
mod control;
mod cq;
mod facts;
mod files;
mod gone;
mod kernels;
mod link;
mod mads;
mod memory;
mod qps;

use std::collections::{BTreeSet, HashMap};
use std::mem::offset_of;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use nix::sys::eventfd::EfdFlags;
use starverbs_backend::HostAddr;
use starverbs_core::{Gid, Mtu, Nanos, PdId, Qpn};
use starverbs_queues::board::{
    CELL_EVENTS, DOORBELL_RECV, DOORBELL_SEND, DeviceReply, DoorbellMessage, EVENT_COMPLETION, EVENT_MADS,
    EVENT_NO_DIALECT, EVENT_STAR, Event as BoardEvent, GidReply, OP_QUERY_DEVICE, OP_QUERY_GID, Object,
};
use starverbs_settings::{BoardDoorbell, LogLevel, Settings};

use super::activity::Activity;
use super::command::Events;
use super::soft::deferred_log::{DeferredLog, NO_DIALECT};
use super::thread::{ProgressThread, TurnResult, pollfd};
use super::{Device, Doorbell};
use crate::cq::CqShared;
use crate::error::{Result, VerbsError};
use crate::events::{VerbsEvent, eventfd, kind};
use crate::info::{DeviceInfo, OdpCaps};
use crate::log::{self, log};
use crate::process;
use crate::qp::QpInner;
use crate::stat::StatPage;
use cq::BoardCq;
pub use facts::{BoardFacts, BoardRegisters};
use files::BoardFiles;
use gone::Outstanding;
use link::BoardLink;
pub(crate) use mads::BoardCm;
use memory::{Heap, Piece};

/// What a completion queue keeps for its device.
pub(crate) type DeviceCq = Option<Arc<BoardCq>>;

/// Polls in a row that find nothing, after which one in [`YIELD_EVERY`] lets others have the CPU: a board in
/// software may be waiting for it.
const SELFISH: u32 = 256;
const YIELD_EVERY: u32 = 16;
/// Polls in a row that find nothing between two looks whether the board is still there.
const LOOK_EVERY: u32 = 4096;

/// Who waits for a board that says nothing asks it something each time that so much has gone by: in the
/// thread; in a poll, where there is none, after twice that.
const QUIET: Nanos = 2_000_000_000;

/// Entries of a completion queue at most where it lies in the kernel's memory: in one piece, of which a
/// kernel without an IOMMU has 4 MiB at most.
const MAX_CQE_OF_KERNEL: u32 = 1 << 16;

/// GIDs of a board at most: an address handle's index is a byte.
const MAX_GIDS: u32 = 256;

/// A board, as this process has it.
pub(crate) struct Board {
    forks: u32,
    pub(crate) info: DeviceInfo,
    pub(crate) settings: Settings,
    pub(crate) stats: StatPage,
    pub(crate) activity: Activity,
    pub(crate) thread: ProgressThread,
    pub(crate) deferred_log: DeferredLog,
    link: Arc<BoardLink>,
    /// Doorbells are messages, not stores into cells
    sends_messages: bool,
    irq: OwnedFd,
    /// How many there are; 0: it is closed
    contexts: Mutex<u32>,
    objects: Mutex<ProgramObjects>,
    files: BoardFiles,
    /// The connection manager, if it was ever asked for
    cm: Mutex<Option<Arc<BoardCm>>>,
    /// Events taken so far
    taken: Mutex<u32>,
    /// Polls in a row that found nothing
    idle: AtomicU32,
    /// When the board was last known to be there
    heard: AtomicU64,
    /// The board is, and the program was notified
    is_gone: AtomicBool,
    /// By queue pair: what is to be flushed then
    outstanding: Mutex<HashMap<Qpn, Outstanding>>,
}

/// What the program made, as far as events need it.
#[derive(Default)]
struct ProgramObjects {
    pds: HashMap<PdId, Events>,
    /// Domain and cookie
    qps: HashMap<Qpn, (PdId, u64)>,
    srqs: HashMap<u32, (PdId, u64)>,
    cqs: HashMap<u32, Weak<CqShared>>,
    /// Memory in which the board has the answers of a queue pair that speaks StRoM's dialect
    answers: HashMap<Qpn, Piece>,
    /// Queue pairs in multicast groups
    groups: BTreeSet<(Qpn, Gid)>,
    /// Handles of queue pairs that receive for XRC: their cookies, and where their events go
    handles: HashMap<Qpn, Vec<(u64, Events)>>,
}

impl Board {
    /// The board at `path`, its first function that is free, and a first context of it. Events go by the
    /// domains of objects.
    pub(crate) fn open(path: &Path, settings: Settings, stats: StatPage) -> Result<Arc<Board>> {
        process::watch_forks();
        log::set_level(settings.log);
        let (link, irq) = BoardLink::open(path, eventfd(EfdFlags::EFD_NONBLOCK)?)?;
        let info = describe(&link, &settings)?;
        log!(Info, "board opened at {}: {}", link.path.display(), info.addresses());
        let wants_messages = settings.board_doorbell == BoardDoorbell::Message;
        if wants_messages && !link.takes_messages() {
            log!(Warn, "the board takes no doorbells of csRNA's form: it gets cells");
        }
        let board = Arc::new(Board {
            sends_messages: wants_messages && link.takes_messages(),
            forks: process::forks(),
            info,
            stats,
            activity: Activity::default(),
            thread: ProgressThread::new()?,
            deferred_log: DeferredLog::new(),
            link: Arc::new(link),
            irq,
            contexts: Mutex::new(1),
            objects: Mutex::default(),
            files: BoardFiles::default(),
            cm: Mutex::default(),
            taken: Mutex::new(0),
            idle: AtomicU32::new(0),
            heard: AtomicU64::new(crate::clock::now()),
            is_gone: AtomicBool::new(false),
            outstanding: Mutex::default(),
            settings,
        });
        if board.settings.progress_thread {
            board.thread.start(Device::Board(Arc::clone(&board)))?;
        }
        Ok(board)
    }

    /// Whether this process opened it (and is not a forked child of the one that did).
    #[inline]
    pub(crate) fn is_ours(&self) -> bool {
        process::forks() == self.forks
    }

    fn outstanding(&self) -> MutexGuard<'_, HashMap<Qpn, Outstanding>> {
        self.outstanding.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn objects(&self) -> MutexGuard<'_, ProgramObjects> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether its last context has left.
    fn is_closed(&self) -> bool {
        *self.contexts.lock().unwrap_or_else(PoisonError::into_inner) == 0
    }

    /// One more context, unless the last one has left.
    fn join(&self) -> Result<()> {
        let mut contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        if *contexts == 0 {
            return Err(VerbsError::NoData);
        }
        *contexts += 1;
        Ok(())
    }

    /// A context leaves: its QPs end, and with the last context all.
    fn leave(&self, events: &Events) {
        for qpn in self.qps_reporting_to(events) {
            let _ = self.end_qp(qpn);
        }
        let last = {
            let mut contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
            *contexts = contexts.saturating_sub(1);
            *contexts == 0
        };
        /* not under the lock: the thread may be ending a queue that the program dropped, by a command */
        if last {
            if let Some(cm) = self.cm() {
                cm.with(self, |host, port, log, now| {
                    host.manage(port, log, now, starverbs_cm::Cm::release_all)
                });
            }
            log!(Info, "board closed");
            self.thread.stop();
            self.link.close();
        }
    }

    /// Where queues lie.
    pub(crate) fn queue_memory(&self) -> Arc<Heap> {
        Arc::clone(&self.link.heap)
    }

    /// Sets the doorbell cell of a QP; 0: it has none any more.
    fn set_cell(&self, qpn: Qpn, cell: u32) {
        if let Some(entry) = self.link.qps.make(qpn) {
            entry.cell.store(cell, Ordering::Relaxed);
        }
    }

    #[inline]
    fn cell_of(&self, qpn: Qpn) -> Option<&AtomicU64> {
        let cell = self.link.qps.get(qpn)?.cell.load(Ordering::Relaxed);
        if cell == 0 { None } else { self.link.cell(cell) }
    }

    /// Something was posted: the cell gets the queue's indices, or the board a message.
    #[inline]
    pub(crate) fn doorbell(&self, doorbell: Doorbell<'_>) {
        self.activity.note_call();
        let (Doorbell::Sends { qp, .. } | Doorbell::Receives(qp)) = doorbell else { return };
        let Some(cell) = self.cell_of(qp.qpn) else { return self.flush(qp.qpn) };
        if self.sends_messages {
            return self.send_messages(qp, matches!(doorbell, Doorbell::Sends { .. }));
        }
        let mut posted = qp.rings.posted();
        loop {
            cell.store(posted, Ordering::Release);
            /* Another thread may have posted more and stored before: whoever stores last has to see the
             * newest index. Our store before this look, as its post before its store. */
            fence(Ordering::SeqCst);
            let newer = qp.rings.posted();
            if newer == posted {
                return;
            }
            posted = newer;
        }
    }

    /// Sends the board messages of what was posted since the last one. A board that gets none is found to be
    /// gone as others are, and all is flushed.
    #[cold]
    fn send_messages(&self, qp: &QpInner, sends: bool) {
        let Some(entry) = self.link.qps.get(qp.qpn) else { return };
        let of = DoorbellMessage { op: DOORBELL_SEND, offset: 0, count: 0, qpn: qp.qpn };
        if !sends {
            let _ = self.link.send_message(DoorbellMessage { op: DOORBELL_RECV, ..of });
            return;
        }
        let mut rung = entry.rung();
        let posted = qp.rings.posted() as u32;
        while *rung != posted {
            let count = posted.wrapping_sub(*rung).min(u16::MAX.into()) as u16;
            if self.link.send_message(DoorbellMessage { offset: *rung as u16, count, ..of }).is_err() {
                return;
            }
            *rung = rung.wrapping_add(count.into());
        }
    }

    /// A poll of `cq` found nothing: moves what the board has written.
    #[inline]
    pub(crate) fn progress(&self, cq: &CqShared, _wanted: usize) -> bool {
        let Some(half) = &cq.device_half else { return false };
        let found = half.harvest(cq);
        /* a plain load and store: exact enough for a guess */
        let idle = if found { 0 } else { self.idle.load(Ordering::Relaxed).wrapping_add(1) };
        self.idle.store(idle, Ordering::Relaxed);
        if idle > SELFISH && idle.is_multiple_of(YIELD_EVERY) {
            let now = crate::clock::now();
            self.activity.note_poll(now);
            self.run_cm(now, false);
            if idle < SELFISH + 2 * YIELD_EVERY {
                /* it wrote something just now */
                self.heard.store(now, Ordering::Relaxed);
            }
            self.ask_if_quiet(now, 2 * QUIET);
            if idle.is_multiple_of(LOOK_EVERY) {
                self.look_for_its_end();
                self.flush_all();
            }
            std::thread::yield_now();
        }
        found
    }

    /// The program is about to sleep: the thread serves.
    #[inline]
    pub(crate) fn arm(&self) {
        self.thread.arm();
    }

    /// The program waits for an event of `cq`.
    pub(crate) fn await_event(&self, cq: &Arc<CqShared>, solicited: bool) {
        if let Some(half) = &cq.device_half {
            self.know_cq(half, cq);
            half.arm(cq, solicited);
        }
        self.arm();
    }

    /// Events of the board name this queue from now on.
    fn know_cq(&self, half: &BoardCq, cq: &Arc<CqShared>) {
        if !half.is_known.swap(true, Ordering::AcqRel) {
            self.objects().cqs.insert(half.number, Arc::downgrade(cq));
        }
    }

    /// What the thread waits for: interrupts.
    pub(crate) fn wait_fds(&self, fds: &mut Vec<libc::pollfd>, armed: bool) -> Option<Nanos> {
        let cm = self.cm();
        /* what queue pairs become is told at once, where it is */
        if armed || cm.is_some() || log::is_enabled(LogLevel::Debug) {
            fds.push(pollfd(self.irq.as_raw_fd()));
        }
        if !self.is_gone.load(Ordering::Relaxed) {
            fds.extend(self.link.end_fd().map(|fd| libc::pollfd { fd, events: 0, revents: 0 }));
        }
        let asks = !self.is_gone.load(Ordering::Relaxed) && !self.outstanding().is_empty();
        let ask = if asks { self.heard.load(Ordering::Relaxed) + QUIET } else { Nanos::MAX };
        Some(cm.map_or(ask, |cm| cm.due().min(ask)))
    }

    /// Runs the connection manager, if its time has come, or if datagrams have.
    fn run_cm(&self, now: Nanos, came: bool) {
        if let Some(cm) = self.cm()
            && (came || cm.due() <= now)
        {
            cm.run(self);
        }
    }

    /// A turn of the thread: takes the events that the board has written.
    pub(crate) fn turn(&self, _woken: &[libc::pollfd]) -> TurnResult {
        let mut count = 0u64;
        // SAFETY: eight writable bytes; the descriptor does not block.
        unsafe { libc::read(self.irq.as_raw_fd(), (&raw mut count).cast(), 8) };
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut work, mut mads, mut settled) = (0, false, Vec::new());
        while let Some((kind, number)) = self.event(*taken) {
            *taken = taken.wrapping_add(1);
            work += 1;
            if kind == EVENT_MADS {
                mads = true;
            } else if kind == EVENT_NO_DIALECT {
                self.deferred_log.add(NO_DIALECT, number);
            } else if kind == EVENT_STAR {
                settled.push(number);
            } else {
                self.on_event(kind, number);
            }
        }
        if work > 0
            && let Some(cell) = self.link.cell(CELL_EVENTS)
        {
            cell.store(u64::from(*taken), Ordering::Release);
        }
        drop(taken);
        let now = crate::clock::now();
        if work == 0 {
            self.look_for_its_end();
            self.ask_if_quiet(now, QUIET);
        } else {
            self.heard.store(now, Ordering::Relaxed);
        }
        self.run_cm(now, mads);
        settled.into_iter().for_each(|qpn| self.tell_role(qpn));
        self.deferred_log.flush();
        TurnResult { work: Some(work), ..TurnResult::default() }
    }

    /// Kind and number of event `index`, if the board has written it.
    fn event(&self, index: u32) -> Option<(u32, u32)> {
        let at = (index & ((1 << self.link.events_log) - 1)) as usize * size_of::<BoardEvent>();
        let word = |field: usize| {
            // SAFETY: inside the event queue, by the mask; entries and their words are aligned.
            unsafe { AtomicU32::from_ptr(self.link.events().add(at + field).cast()) }
        };
        /* acquire: the number of the event before the rest */
        let valid = word(offset_of!(BoardEvent, valid)).load(Ordering::Acquire);
        (valid == index.wrapping_add(1)).then(|| {
            let kind = word(offset_of!(BoardEvent, kind)).load(Ordering::Relaxed);
            (kind, word(offset_of!(BoardEvent, number)).load(Ordering::Relaxed))
        })
    }

    /// For people: what a queue pair has become that is to end before the thread has told it.
    fn tell_role_at_end(&self, qpn: Qpn) {
        let next = *self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let mut waiting = (0..).map_while(|ahead| self.event(next.wrapping_add(ahead)));
        if waiting.any(|event| event == (EVENT_STAR, qpn)) {
            self.tell_role(qpn);
        }
    }

    /// Those of objects that are gone, or that never were, are dropped.
    fn on_event(&self, kind: u32, number: u32) {
        let objects = self.objects();
        if kind == EVENT_COMPLETION || kind == kind::CQ_ERR {
            let cq = objects.cqs.get(&number).and_then(Weak::upgrade);
            drop(objects);
            let Some(cq) = cq else { return };
            match &cq.device_half {
                Some(half) if kind == EVENT_COMPLETION => half.on_event(&cq),
                /* what came before it overran is there for the program */
                Some(half) => {
                    half.harvest_all(&cq);
                    cq.fail();
                }
                None => {}
            }
            return;
        }
        if let Some(handles) = objects.handles.get(&number).filter(|_| kind != kind::SRQ_LIMIT_REACHED) {
            handles.iter().for_each(|(cookie, events)| events.push(VerbsEvent::Qp { kind, cookie: *cookie }));
            return;
        }
        let is_srq = kind == kind::SRQ_LIMIT_REACHED;
        let owner = if is_srq { objects.srqs.get(&number) } else { objects.qps.get(&number) };
        let Some((pd, cookie)) = owner.copied() else { return };
        let Some(events) = objects.pds.get(&pd) else { return };
        match kind {
            kind::SRQ_LIMIT_REACHED => events.push(VerbsEvent::Srq { kind, cookie }),
            kind::QP_FATAL | kind::QP_REQ_ERR | kind::QP_ACCESS_ERR => {
                self.deferred_log.add(kind, number);
                events.push(VerbsEvent::Qp { kind, cookie });
            }
            kind::COMM_EST | kind::SQ_DRAINED | kind::QP_LAST_WQE_REACHED => {
                events.push(VerbsEvent::Qp { kind, cookie });
            }
            _ => {}
        }
    }
}

/// What the board says of itself, in the place of what this host would.
fn describe(link: &BoardLink, settings: &Settings) -> Result<DeviceInfo> {
    let none = Object::default();
    let reply: DeviceReply = link.ask(OP_QUERY_DEVICE, &none)?;
    let mut addrs = Vec::new();
    for index in 0..reply.gids.min(MAX_GIDS) {
        let gid: GidReply = link.ask(OP_QUERY_GID, &Object { number: index, reserved: 0 })?;
        let name = gid.name.split(|byte| *byte == 0).next().unwrap_or_default();
        addrs.push(HostAddr {
            gid: Gid(gid.gid),
            ifindex: gid.ifindex,
            link_mtu: gid.link_mtu,
            name: String::from_utf8_lossy(name).into_owned(),
            loopback: false,
        });
    }
    let mut info = DeviceInfo::new(settings)?;
    info.addrs = addrs;
    if !link.is_on_demand() {
        info.attr.odp = OdpCaps::default();
    }
    info.limit_to_board(&reply, link.caps, Mtu::from_code(reply.active_mtu.into()).unwrap_or_default());
    if !link.is_on_demand() {
        info.attr.max_cqe = info.attr.max_cqe.min(MAX_CQE_OF_KERNEL);
    }
    Ok(info)
}
