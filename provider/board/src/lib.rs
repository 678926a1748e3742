//! The emulated board: the card of `starverbs-core` behind a register file, with a port on UDP, as a device
//! that speaks vfio-user on unix sockets. docs/board.md has its rules.
//!
//! One thread does it all in turns ([`Board::run`]): doorbell cells, frames, timers, what the card sends,
//! events, messages of clients. Each socket is a function of the board (`function`), which one client has at
//! a time. What a client writes, be it a register, a command, an index or a work request, is decoded and
//! checked before it is used, and costs that client alone.
//!
//! Owns the order of a turn. It must not know the verbs objects of the program at the other end.

mod broken;
mod command_queue;
mod commands;
mod context;
mod counters;
mod cq;
mod dma;
mod doorbells;
mod env;
mod function;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod kernels;
mod mads;
mod pci;
mod qpc;
mod qps;
mod queues;
mod record;
mod server;
mod slots;
mod star;
mod stats;
mod tables;
mod wire;

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::{TimeSpec, TimeValLike};
use nix::time::{ClockId, clock_gettime};
use starverbs_backend::give_way::GiveWay;
use starverbs_backend::star::StarHost;
use starverbs_backend::{BackendError, QpCarrier, QpList, context_cache, host, kernel_list};
use starverbs_core::mr::Plain;
use starverbs_core::{AsyncEvent, Mtu, Nanos, Nic, NicConfig, NicError, Qpn};
use starverbs_queues::board::{CAP_STAR, EVENT_MADS, EVENT_NO_DIALECT};
use starverbs_settings::{Settings, SettingsError};
use thiserror::Error;

use dma::Errno;
use env::{BoardEnv, ClientMemory};
use function::{CommonCard, Function};
use mads::BoardQp1;
use qpc::QpcRegisters;
use record::{BusTap, HostRequest, RecordHeader, Tap};
pub use record::{Divergence, Played, Replay, ReplayError};
use server::BoardServer;
use star::BoardStar;
pub use stats::Stats;
use wire::{WireRx, WireTx};

/// Rounds of filling and flushing the port in one turn.
const ROUNDS: u32 = 16;
/// Turns without work before the thread sleeps.
const SPINS: u32 = 2000;
/// Turns without work before it lets others have the CPU, if they want it: clients that poll are what it
/// waits for.
const SELFISH: u32 = 32;
/// Turns between two looks at the sockets of clients.
const SERVE_EVERY: u32 = 64;
/// How long it sleeps at most: doorbells wake nobody.
const NAP: Nanos = 50_000;
/// QPNs that are free at least, if the host has more.
const RESTING: usize = 64;
/// Bytes of address space that files of clients may take.
const ADDRESS_SPACE: u64 = 1 << 46;
/// `enum ibv_event_type`
mod kind {
    pub(super) const QP_FATAL: u32 = 1;
    pub(super) const QP_REQ_ERR: u32 = 2;
    pub(super) const QP_ACCESS_ERR: u32 = 3;
    pub(super) const COMM_EST: u32 = 4;
    pub(super) const SQ_DRAINED: u32 = 5;
    pub(super) const SRQ_LIMIT_REACHED: u32 = 15;
    pub(super) const QP_LAST_WQE_REACHED: u32 = 16;
}

/// Why there is no board.
#[derive(Debug, Error)]
pub enum BoardError {
    /// The port cannot be opened.
    #[error(transparent)]
    Port(#[from] BackendError),
    /// A socket cannot be had.
    #[error("{0}: {1}")]
    Socket(PathBuf, io::Error),
    /// No memory for a doorbell page.
    #[error("doorbell page: {0}")]
    Page(io::Error),
    /// The record cannot be written.
    #[error("record: {0}")]
    Record(io::Error),
    /// There is no key of StaR's where the settings say.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// No QPNs.
    #[error(transparent)]
    Card(#[from] NicError),
}

/// A board.
pub struct Board {
    card: CommonCard,
    functions: Vec<Function>,
    first_block: u32,
    /// A socket for each function; none, if it is driven without
    servers: Vec<BoardServer>,
    /// The card may have something to send that nothing has told of since
    more: bool,
    turns: u32,
    idle: u32,
    give_way: GiveWay,
}

/// Paths of so many sockets: `path`, `path.1`, `path.2` and so on.
pub fn socket_paths(path: &Path, sockets: usize) -> Vec<PathBuf> {
    (0..sockets).map(|number| starverbs_vfio::socket_path(path, number)).collect()
}

fn now() -> Nanos {
    clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map_or(0, |time| time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}

impl Board {
    /// A board whose port is as `settings` say, with a function at each of `sockets`. `seed` decides keys and
    /// QPNs: who knows it knows them.
    ///
    /// # Errors
    /// No address, no port, no socket.
    pub fn open(settings: &Settings, sockets: &[PathBuf], seed: [u64; 2]) -> Result<Board, BoardError> {
        Board::open_with(settings, sockets, seed, Stats::default(), None)
    }

    /// The same, with counters elsewhere; what it does is written to `record` (docs/board-record.md).
    ///
    /// # Errors
    /// As of [`Board::open`]; the record cannot be written.
    pub fn open_with(
        settings: &Settings,
        sockets: &[PathBuf],
        seed: [u64; 2],
        stats: Stats,
        record: Option<File>,
    ) -> Result<Board, BoardError> {
        let addrs = host::addresses(settings)?;
        let guid = host::guid(&addrs);
        let (tx, rx) = starverbs_backend::open(settings, &addrs, stats.clone())?;
        let real = addrs.iter().filter(|addr| !addr.loopback).map(|addr| addr.link_mtu).min();
        let cap = settings.mtu.map_or(Mtu::M4096, |bytes| Mtu::fitting(u32::from(bytes) + 96));
        let header = RecordHeader {
            seed,
            guid,
            functions: sockets.len(),
            mtu: cap.min(real.map_or(Mtu::M4096, Mtu::fitting)),
            window: settings.window.unwrap_or(NicConfig::default().window),
            delay_target: settings.delay_target.map(|target| target.as_nanos() as Nanos),
            repeat: settings.repeat,
            credits: settings.credits,
            contexts: settings.qpc_cache.map(context_cache),
            addrs,
            blocks: rx.blocks().collect(),
        };
        let tap = match record {
            Some(file) => Tap::record(file, &header).map_err(BoardError::Record)?,
            None => Tap::off(),
        };
        let wire = (WireTx::Udp(Box::new(tx)), WireRx::Udp(Box::new(rx)));
        let mut board = Board::assemble(&header, stats, wire, Rc::clone(&tap), now())?;
        if !tap.is_on() {
            /* a record has the frames of one port alone */
            board.card.star = Some(BoardStar::new(settings)?);
            board.functions.iter_mut().for_each(|function| function.add_caps(CAP_STAR));
        }
        let open =
            |path: &PathBuf| BoardServer::open(path).map_err(|error| BoardError::Socket(path.clone(), error));
        board.servers = sockets.iter().map(open).collect::<Result<_, _>>()?;
        Ok(board)
    }

    /// A board without sockets.
    fn assemble(
        header: &RecordHeader,
        stats: Stats,
        (tx, rx): (WireTx, WireRx),
        tap: Rc<Tap>,
        now: Nanos,
    ) -> Result<Board, BoardError> {
        let (seed, guid, addrs) = (header.seed, header.guid, header.addrs.clone());
        let mut nic = Nic::new(header.config(), stats.clone(), seed, Plain::default());
        for block in &header.blocks {
            nic.add_block(*block as u16)?;
        }
        let qpc = QpcRegisters::new(nic.config().contexts, stats);
        let open = |number| Function::new(number, qpc.clone(), &tap);
        let functions: Vec<Function> =
            (0..header.functions).map(open).collect::<Result<_, _>>().map_err(BoardError::Page)?;
        let most = ADDRESS_SPACE / functions.len().max(1) as u64;
        let memory = |function: &Function| {
            let tap = BusTap::new(&tap, function.number());
            ClientMemory::new(most, function.counters(), function.kept(), tap)
        };
        let env = BoardEnv::new(tx, functions.iter().map(memory).collect(), Rc::clone(&tap));
        let mads = BoardQp1::new(guid, seed[0]);
        let card = CommonCard { nic, env, rx, mads, addrs, guid, now, tap, star: None };
        let first_block = header.blocks.first().copied().unwrap_or(0);
        Ok(Board {
            card,
            functions,
            first_block,
            servers: Vec::new(),
            more: true,
            turns: 0,
            idle: 0,
            give_way: GiveWay::default(),
        })
    }

    /// Its first block of QPNs, by which other processes of the host find it.
    pub fn first_block(&self) -> u32 {
        self.first_block
    }

    /// Has no client map doorbell pages: each write of a cell is a message then, as a monitor traps it.
    pub fn trap_doorbells(&mut self) {
        self.functions.iter_mut().for_each(|function| function.maps_doorbells = false);
    }

    /// Works until `stop`.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn run(&mut self, stop: &AtomicBool) -> io::Result<()> {
        while !stop.load(Ordering::Relaxed) && self.card.tap.is_sound() {
            let worked = self.turn(now());
            self.idle = if worked { 0 } else { self.idle.saturating_add(1) };
            if self.idle > SPINS {
                self.nap();
            } else if self.idle > SELFISH && !self.give_way.yields() {
                self.idle = SPINS;
                self.nap();
            }
        }
        self.card.tap.finish()
    }

    /// One turn; says whether there was anything to do.
    fn turn(&mut self, now: Nanos) -> bool {
        let mut work = self.work(now);
        /* behind the flush: a message of a client may end memory that a frame was gathered from */
        self.turns = self.turns.wrapping_add(1);
        if self.turns.is_multiple_of(SERVE_EVERY) || self.idle >= SPINS {
            work += u32::from(self.serve());
        }
        self.deliver();
        work > 0
    }

    /// Doorbells, frames, timers, and what the card sends then; says how much there was to do.
    fn work(&mut self, now: Nanos) -> u32 {
        let Board { card, functions, more, .. } = self;
        card.now = now;
        card.tap.begin_turn(now);
        let mut work = 0;
        for function in functions.iter_mut() {
            work += u32::from(function.resume_commands(card));
        }
        /* behind all commands, which may end memory: nothing is gathered before them in this turn */
        for function in functions.iter_mut() {
            work += function.take_doorbells(card);
        }
        if card.rx.recv() {
            let before = work;
            /* a card that waits for QP contexts leaves frames where they are */
            while card.nic.takes_frames()
                && let Some((meta, frame)) = card.rx.next_frame()
            {
                card.tap.frame_in(&meta, frame);
                card.nic.offer_frame(&mut card.env, card.now, &meta, frame);
                work += 1;
            }
            if work > before {
                card.nic.end_back_pressure();
            }
        }
        work += card.run_star(self.idle == 0 || self.idle > SPINS);
        let due = card.nic.next_deadline().is_some_and(|deadline| deadline <= card.now);
        /* a record has the turns in which something happened, and no others */
        if card.tap.is_on() && work == 0 && !due && !*more {
            card.env.flush(card.now);
            return 0;
        }
        card.tap.mark();
        if due {
            card.nic.handle_timeout(&mut card.env, card.now);
        }
        for _ in 0..ROUNDS {
            *more = card.nic.poll_transmit(&mut card.env, card.now, true);
            *more |= card.transmit_star();
            card.env.flush(card.now);
            if !*more {
                break;
            }
            work += 1;
        }
        work
    }

    /// Answers clients, and does what the port has to do beside frames.
    fn serve(&mut self) -> bool {
        if self.card.nic.free_qpns() < RESTING
            && let Ok(block) = self.card.rx.claim_block()
        {
            self.add_block(|| Ok(block));
        }
        let Board { card, functions, servers, more, .. } = self;
        let mut had = false;
        for (function, server) in functions.iter_mut().zip(servers) {
            had |= server.run(function, card);
            function.look_after_memory(card);
        }
        let CommonCard { nic, rx, env, now, star, .. } = card;
        rx.serve_tools(|asked| describe((nic, star.as_ref()), asked));
        rx.maintain(&mut env.tx, *now);
        *more |= had;
        had
    }

    /// The card has one more block of QPNs.
    fn add_block(&mut self, claim: impl FnOnce() -> Result<u32, Errno>) {
        let CommonCard { nic, tap, .. } = &mut self.card;
        if let Ok(block) = tap.host(HostRequest::Block, claim) {
            /* a block that the card has no memory for is of no use, and does no harm */
            let _ = nic.add_block(block as u16);
        }
    }

    /// Gives events to the functions whose objects they are about.
    fn deliver(&mut self) {
        let Board { card, functions, .. } = self;
        for function in functions.iter_mut() {
            /* a queue that has overrun, before what its queue pairs say of that */
            function.raise_due(card.now);
        }
        let (mut events, mut mads) = (std::mem::take(&mut card.env.events), false);
        for event in events.drain(..) {
            let (kind, number, owner) = match event {
                AsyncEvent::SrqLimit(srq) => (kind::SRQ_LIMIT_REACHED, srq.0, card.nic.srq_owner(srq)),
                AsyncEvent::QpFatal(qpn) => (kind::QP_FATAL, qpn, card.qp_owner(qpn)),
                AsyncEvent::QpReqErr(qpn) => (kind::QP_REQ_ERR, qpn, card.qp_owner(qpn)),
                AsyncEvent::QpAccessErr(qpn) => (kind::QP_ACCESS_ERR, qpn, card.qp_owner(qpn)),
                AsyncEvent::CommEst(qpn) => (kind::COMM_EST, qpn, card.qp_owner(qpn)),
                AsyncEvent::SqDrained(qpn) => (kind::SQ_DRAINED, qpn, card.qp_owner(qpn)),
                AsyncEvent::LastWqeReached(qpn) => (kind::QP_LAST_WQE_REACHED, qpn, card.qp_owner(qpn)),
                AsyncEvent::Mads => {
                    mads = true;
                    continue;
                }
                AsyncEvent::PeerLacksDialect(qpn) => (EVENT_NO_DIALECT, qpn, card.qp_owner(qpn)),
            };
            let Some((function, context)) = owner.map(|owner| context::owner_of(owner.cookie)) else {
                continue;
            };
            if let Some(function) = functions.get_mut(function) {
                function.raise(context, kind, number);
            }
        }
        card.env.events = events;
        let mut settled = std::mem::take(&mut card.env.settled);
        for qpn in settled.drain(..) {
            let Some(owner) = card.qp_owner(qpn) else { continue };
            let (function, context) = context::owner_of(owner.cookie);
            let function = functions.get_mut(function);
            if let Some(context) = function.and_then(|function| function.contexts.get_mut(&context)) {
                context.raise_star(qpn);
            }
        }
        card.env.settled = settled;
        if mads {
            for client in card.sort_mads() {
                let (function, context) = context::owner_of(client);
                if let Some(function) = functions.get_mut(function) {
                    function.raise(context, EVENT_MADS, 0);
                }
            }
        }
        for function in functions.iter_mut() {
            function.write_events();
        }
    }

    /// Sleeps until a frame or a message comes, a timer is due, or a while: a doorbell may have been rung.
    fn nap(&mut self) {
        /* who ends a board leaves the record that there is; what went wrong is told when it ends */
        self.card.tap.flush();
        self.card.rx.prepare_to_sleep();
        let (now, card) = (now(), &self.card);
        let star = card.star.as_ref().map(BoardStar::host);
        let of_star = star.and_then(|star| star.next_deadline(&card.nic, &card.env, now));
        let due = [card.nic.next_deadline(), of_star].into_iter().flatten().min();
        let left = due.map_or(NAP, |deadline| deadline.saturating_sub(now));
        let timeout = TimeSpec::nanoseconds(left.min(NAP) as i64);
        let port = self.card.rx.fds().iter().copied().chain(star.into_iter().flat_map(StarHost::fds));
        // SAFETY: the descriptors are the ports', which they keep open as long as they exist.
        let port = port.map(|fd| unsafe { BorrowedFd::borrow_raw(fd) });
        let clients = self.servers.iter().flat_map(BoardServer::fds);
        let mut fds: Vec<_> = port.chain(clients).map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        let _ = ppoll(&mut fds, Some(timeout), None);
    }
}

/// What tools hear of the card: the queue pairs of all functions, and their kernels.
fn describe((nic, star): (&Nic<BoardEnv>, Option<&BoardStar>), asked: &[u8]) -> String {
    if asked == b"kernels" {
        return kernel_list(nic.kernels());
    }
    if asked != b"qps" {
        return "error: its card is a board\n".to_owned();
    }
    let mut list = QpList::default();
    let host = star.map(BoardStar::host);
    let mut qpns: Vec<Qpn> = nic.qpns().chain(host.into_iter().flat_map(StarHost::qpns)).collect();
    qpns.sort_unstable();
    for qpn in qpns {
        let stateless = host.and_then(|host| host.query_qp(qpn));
        if let Some(attr) = stateless.or_else(|| nic.query_qp(qpn).ok()) {
            let star = host.map_or(QpCarrier::WIRE.star, |host| host.word(nic, qpn));
            list.add(qpn, &attr, &QpCarrier { star, ..QpCarrier::WIRE });
        }
    }
    list.text().to_owned()
}

#[cfg(test)]
mod tests;
