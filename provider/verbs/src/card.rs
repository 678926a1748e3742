//! The card of a process: one [`Nic`] behind one lock, opened with the first context and closed with
//! the last.
//!
//! Owns the shard lock, the doorbells left for its holder, and where events are told. A call that
//! finds the lock taken never waits on the data path: it leaves its doorbell, and whoever gives the
//! lock back looks for doorbells once more.

mod shard;
pub(crate) mod star;

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError, TryLockError, Weak};

use starverbs_backend::links::MESSAGE;
use starverbs_backend::{self as backend, Rx};
use starverbs_core::{Nanos, Nic, NicConfig, PdId, Qpn};
use starverbs_rings::{Bells, budget};
use starverbs_settings::Settings;

use crate::clock;
use crate::cm::CmHost;
use crate::device::{DeviceInfo, GidEntry, MAX_MSG, MAX_RD_ATOM, PortAttr};
use crate::env::HostEnv;
use crate::error::{Result, VerbsError};
use crate::events::{Event, FdQueue};
use crate::few::context_cache;
use crate::idle::{Idle, Then};
use crate::links::Links;
use crate::log::{self, log};
use crate::moderation::Moderator;
use crate::notes::Notes;
use crate::opened::Openings;
use crate::progress::{AHEAD, LEFT};
use crate::receives::RunOut;
use crate::star::StarHost;
use crate::stat::StatPage;
use crate::thread::Progress;

/// Forks of this process so far, counted in the children: a card of an earlier count is the parent's.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Forks so far, as far as anybody needs to know.
#[inline]
pub(crate) fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// IBV_PORT_DOWN, and the physical state "Disabled" (IBTA 14.2.5.6).
const PORT_DOWN: u32 = 1;
const PHYS_DISABLED: u8 = 3;

/// A count as a port has it: 16 bits, which stay at the last number (IBTA 14.2.5.6, P_KeyViolations).
fn violations(count: u64) -> u32 {
    count.min(u16::MAX.into()) as u32
}

/// The card of this process, while a context is open.
static CARD: Mutex<Weak<Card>> = Mutex::new(Weak::new());

/// The card.
pub(crate) struct Card {
    forks: u32,
    pub(crate) info: DeviceInfo,
    pub(crate) settings: Settings,
    /// Written by the holder of the shard's lock, read by anybody
    pub(crate) stats: StatPage,
    shard: Mutex<Shard>,
    bells: Bells,
    pub(crate) polled: Polled,
    contexts: Mutex<u32>,
    pub(crate) progress: Progress,
    /// Completion queues that exist.
    pub(crate) cqs: AtomicU32,
    /// Of those, how many the program waits for an event of.
    pub(crate) awaited: AtomicU32,
    pub(crate) moderator: Arc<Moderator>,
    /// Said when the shard lock is given back.
    pub(crate) notes: Notes,
    /// Its interfaces.
    links: Links,
}

/// What the shard lock guards.
pub(crate) struct Shard {
    pub(crate) nic: Nic<HostEnv>,
    pub(crate) env: HostEnv,
    pub(crate) rx: Rx<StatPage>,
    pub(crate) stats: StatPage,
    /// When the progress thread means to wake up at the latest.
    pub(crate) alarm: Nanos,
    /// Turns taken by polls.
    pub(crate) turns: u32,
    /// Polls that find nothing
    pub(crate) idle: Idle,
    /// A turn ended with more to send.
    pub(crate) unsent: bool,
    /// How many frames to look ahead for contexts to fetch into the CPU's caches; 0: none
    pub(crate) ahead: usize,
    /// Frames to come that were looked at
    pub(crate) looked: usize,
    /// Frames were left where they are, as the card waits for QP contexts.
    pub(crate) held_back: bool,
    /// Since when frames wait for receives to be posted
    pub(crate) out: RunOut,
    /// QPs whose doorbell waits for the program's next call, so that small messages share a flush.
    pub(crate) deferred: Vec<Qpn>,
    /// The event queue of each protection domain's context: QPs and SRQs live in a domain, and the
    /// card knows their cookies.
    domains: HashMap<PdId, Arc<FdQueue<Event>>>,
    /// A message from another process of an XRC domain; none before there is such a domain
    pub(crate) link_room: Option<Box<[u8; MESSAGE]>>,
    /// XRC queue pairs that are open more than once
    pub(crate) openings: Box<Openings>,
    pub(crate) moderator: Arc<Moderator>,
    /// Boxed: it stands beside what the data path uses
    pub(crate) cm: Box<CmHost>,
    /// From the first QP on that may be an end of a StaR connection
    pub(crate) star: Option<Box<StarHost>>,
}

/// What a doorbell waits behind.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Behind {
    /// Packets of its own queue pair, whose ACK or timer has the card run for it
    Own,
    /// Those of others
    Others,
}

/// What the program does in the library, for the progress thread to see.
#[repr(align(64))]
#[derive(Default)]
pub(crate) struct Polled {
    /// Changes with every poll or post.
    pub(crate) calls: AtomicU32,
    /// When the program last ran the card by a poll.
    pub(crate) at: AtomicU64,
    /// For how many nanoseconds from then on polls leave the card alone.
    rest: AtomicU32,
    /// Polls that did so.
    rested: AtomicU32,
    /// Nobody called during the last yield of an idle poll.
    pub(crate) nobody_called: AtomicBool,
    /// Polls in a row that found the lock taken.
    misses: AtomicU32,
}

impl Polled {
    /// The program runs the card at `now`; gives when it did so before.
    #[inline]
    pub(crate) fn note(&self, now: Nanos) -> Nanos {
        let before = self.at.load(Ordering::Relaxed);
        self.at.store(now, Ordering::Relaxed);
        before
    }

    /// Notes what follows a poll that ran the card.
    #[inline]
    pub(crate) fn rest(&self, then: Then) {
        let rest = if let Then::Rest(rest) = then { rest } else { 0 };
        self.rest.store(rest, Ordering::Relaxed);
    }

    /// Yields the CPU, and notes whether another thread has called meanwhile.
    pub(crate) fn yield_now(&self) {
        let calls = self.calls.load(Ordering::Relaxed);
        std::thread::yield_now();
        self.nobody_called.store(self.calls.load(Ordering::Relaxed) == calls, Ordering::Relaxed);
    }

    /// Whether this poll leaves the card alone. Not every one looks at the clock, which takes more than all
    /// else of such a poll.
    #[inline]
    pub(crate) fn rests(&self) -> bool {
        let rest = self.rest.load(Ordering::Relaxed);
        if rest == 0 {
            return false;
        }
        let rested = self.rested.load(Ordering::Relaxed).wrapping_add(1);
        self.rested.store(rested, Ordering::Relaxed);
        let ran = self.at.load(Ordering::Relaxed);
        !rested.is_multiple_of(UNTIMED) || clock::now().saturating_sub(ran) < rest.into()
    }
}

impl Card {
    /// A context joins the card of this process, which is opened with the process's settings if there is none.
    pub(crate) fn of_process() -> Result<Arc<Card>> {
        let mut slot = CARD.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(card) = slot.upgrade()
            && card.is_ours()
            && card.join()
        {
            return Ok(card);
        }
        let settings = Settings::load()?;
        let stats = page_of_process(settings.port)?;
        let card = Card::open(settings, stats)?;
        *slot = Arc::downgrade(&card);
        Ok(card)
    }

    /// A card with these settings, and a first context of it.
    pub(crate) fn open(settings: Settings, stats: StatPage) -> Result<Arc<Card>> {
        watch_forks();
        log::set_level(settings.log);
        let info = DeviceInfo::new(&settings)?;
        budget::set_limit(usize::try_from(info.memory).unwrap_or(usize::MAX));
        /* before the port's sockets: nothing that changes from now on is missed */
        let links = Links::new(&info.addrs);
        let (tx, rx) = backend::open(&settings, &info.addrs, stats)?;
        let config = NicConfig {
            mtu: info.port.active_mtu,
            max_msg: MAX_MSG,
            max_rd_atomic: MAX_RD_ATOM as u8,
            window: settings.window.unwrap_or(NicConfig::default().window),
            repeat: settings.repeat,
            credits: settings.credits,
            max_groups: info.attr.max_mcast_grp,
            contexts: settings.qpc_cache.map(context_cache),
            limits: info.limits,
            ..NicConfig::default()
        };
        let mut nic = Nic::new(config, stats, seed());
        for block in rx.blocks() {
            nic.add_block(block as u16)?;
        }
        if let Some(block) = rx.blocks().next() {
            stats.set_first_block(block);
        }
        log!(Info, "card opened on UDP port {}: {}", settings.port, info.addresses());
        let moderator = Arc::new(Moderator::new());
        let card_moderator = Arc::clone(&moderator);
        let owner = rx.blocks().next().unwrap_or_default() as u16;
        let (guid, addrs) = (info.attr.node_guid, info.addrs.clone());
        let ahead = if settings.qpc_prefetch { AHEAD } else { 0 };
        let shard = |card: &Weak<Card>| Shard {
            cm: Box::new(CmHost::new(guid, owner, addrs, card.clone())),
            nic,
            env: HostEnv::new(tx),
            rx,
            stats,
            alarm: Nanos::MAX,
            turns: 0,
            idle: Idle::default(),
            unsent: false,
            ahead,
            looked: 0,
            held_back: false,
            out: RunOut::default(),
            deferred: Vec::with_capacity(DEFERRED),
            domains: HashMap::new(),
            link_room: None,
            openings: Box::default(),
            moderator: Arc::clone(&card_moderator),
            star: None,
        };
        let progress = Progress::new()?;
        let card = Arc::new_cyclic(|card| Card {
            forks: forks(),
            info,
            settings,
            stats,
            shard: Mutex::new(shard(card)),
            bells: Bells::new(),
            polled: Polled::default(),
            contexts: Mutex::new(1),
            progress,
            cqs: AtomicU32::new(0),
            awaited: AtomicU32::new(0),
            moderator,
            notes: Notes::new(),
            links,
        });
        if card.settings.progress_thread {
            card.progress.start(&card)?;
        }
        Ok(card)
    }

    /// Whether this process opened it (and is not a forked child of the one that did).
    #[inline]
    pub(crate) fn is_ours(&self) -> bool {
        forks() == self.forks
    }

    /// A context is told of what becomes of the port from now on. ENOMEM.
    pub(crate) fn tell_of_port(&self, events: &Arc<FdQueue<Event>>) -> Result<()> {
        if self.links.tell(events) { Ok(()) } else { Err(VerbsError::NoMemory("contexts")) }
    }

    /// `ibv_query_port`
    pub(crate) fn query_port(&self, port: u8) -> Result<PortAttr> {
        let mut attr = *self.info.port(port)?;
        attr.bad_pkey_cntr = violations(self.stats.drop_pkey.get());
        attr.qkey_viol_cntr = violations(self.stats.drop_qkey.get());
        if self.is_ours() && !self.links.active(&self.info.addrs) {
            (attr.state, attr.phys_state) = (PORT_DOWN, PHYS_DISABLED);
        }
        Ok(attr)
    }

    /// `ibv_query_gid_ex`: entries whose address the host has lost are empty.
    pub(crate) fn query_gid(&self, index: u32) -> Result<GidEntry> {
        let entry = self.info.gid(index)?;
        if self.has_gid(index) { Ok(entry) } else { Err(VerbsError::NoData) }
    }

    /// `ibv_query_gid_table`
    pub(crate) fn gid_table(&self) -> Vec<GidEntry> {
        let mut table = self.info.gid_table();
        table.retain(|entry| self.has_gid(entry.index));
        table
    }

    /// A forked child, whose parent may have had the lock, sees the table as it was at the opening.
    fn has_gid(&self, index: u32) -> bool {
        !self.is_ours() || self.links.has(&self.info.addrs, index as usize)
    }

    /// Readable when interfaces have changed: then comes [`Card::look_at_links`].
    pub(crate) fn links_fd(&self) -> Option<RawFd> {
        self.links.fd()
    }

    /// Tells the contexts what has become of the interfaces.
    pub(crate) fn look_at_links(&self) {
        self.links.refresh(&self.info.addrs);
    }

    /// One more context, unless the last one has left.
    fn join(&self) -> bool {
        let mut contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        *contexts += u32::from(*contexts > 0);
        *contexts > 0
    }

    /// A context leaves: its QPs end, and with the last context the card. Handles that are left do no harm.
    pub(crate) fn leave(&self, events: &Arc<FdQueue<Event>>) {
        for qpn in self.with(|shard, _| shard.qps_told(events).collect::<Vec<_>>()) {
            let _ = self.with(|shard, now| {
                shard.detach_from_all(qpn);
                shard.openings.ends(&mut shard.env, qpn);
                shard.forget_star(qpn);
                shard.destroy_qp(qpn, now)
            });
        }
        let mut contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        *contexts -= 1;
        if *contexts == 0 {
            log!(Info, "card closed");
            self.with(|shard, now| shard.close_cm(&self.notes, now));
            self.progress.stop();
            self.with(|shard, _| {
                shard.rx.leave();
                shard.close_links(&self.notes);
            });
        }
    }

    /// Runs a control call on the card, and what follows from it.
    pub(crate) fn with<R>(&self, call: impl FnOnce(&mut Shard, Nanos) -> R) -> R {
        let mut guard = self.shard.lock().unwrap_or_else(PoisonError::into_inner);
        let now = clock::now();
        /* the call may end what a deferred doorbell waits behind */
        guard.ring_deferred(now);
        let result = call(&mut guard, now);
        guard.transmit(now, true);
        let spoke = guard.cm.has_spoken();
        self.hand_on(&mut guard, now, spoke);
        self.finish(&mut guard, now);
        drop(guard);
        self.serve_bells();
        result
    }

    /// The shard, unless somebody has it.
    #[inline]
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, Shard>> {
        match self.shard.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Rings the doorbell of `qpn`, or leaves it for the lock's holder.
    #[inline]
    pub(crate) fn ring(&self, qpn: Qpn) {
        self.note_poll();
        match self.try_lock() {
            Some(mut guard) => {
                let shard = &mut *guard;
                if !self.settings.defer || !self.defer(shard, qpn) {
                    let now = clock::now();
                    shard.ring_deferred(now);
                    shard.ring(qpn, now);
                    shard.transmit(now, true);
                    self.hand_on(shard, now, false);
                    self.finish(shard, now);
                }
                drop(guard);
            }
            None => self.bells.leave(qpn),
        }
        self.serve_bells();
    }

    /// Has the doorbell of `qpn` wait for the card's next turn, if it may; in company it may where that turn is soon, as what it waits
    /// behind may be of a peer that is gone. A program that polls takes a turn soon, and so does a thread that looks within a tick; an armed
    /// one is told to. Who asked for an event may sleep from now on, and what is posted then goes at once. Without a thread nothing goes on but
    /// by the program's calls, this no less than the rest.
    #[inline]
    fn defer(&self, shard: &mut Shard, qpn: Qpn) -> bool {
        let armed = self.progress.is_armed();
        let company = self.awaited.load(Ordering::Relaxed) == 0;
        let behind = shard.defer(qpn, company);
        if armed && behind == Some(Behind::Others) {
            self.lower_alarm(shard, clock::now() + LEFT);
        }
        behind.is_some()
    }

    /// After giving the lock back, or leaving a doorbell: somebody may have left one meanwhile. Says what failed.
    #[inline]
    pub(crate) fn serve_bells(&self) {
        let turn = |guard: &mut MutexGuard<'_, Shard>| {
            let now = clock::now();
            self.take_bells(guard, now);
            guard.transmit(now, true);
            self.hand_on(guard, now, false);
            self.finish(guard, now);
        };
        self.bells.serve(|| self.try_lock(), turn);
        self.notes.say();
    }

    /// Handles the doorbells that were left or deferred.
    #[inline]
    pub(crate) fn take_bells(&self, shard: &mut Shard, now: Nanos) {
        shard.ring_deferred(now);
        self.bells.take(|qpn| {
            shard.stats.doorbells_left.inc();
            shard.ring(qpn, now);
        });
    }

    /// End of a turn: tells of events, and has the thread wake up in time for the next timer.
    #[inline]
    pub(crate) fn finish(&self, shard: &mut Shard, now: Nanos) {
        if !shard.env.events.is_empty() {
            shard.tell(&self.notes, now);
        }
        if let Some(deadline) = shard.next_deadline(now) {
            self.lower_alarm(shard, deadline);
        }
    }

    /// Has the thread wake up by about `deadline`.
    #[inline]
    pub(crate) fn lower_alarm(&self, shard: &mut Shard, deadline: Nanos) {
        if deadline < shard.alarm {
            let before = std::mem::replace(&mut shard.alarm, deadline);
            if before - deadline > COARSE {
                self.progress.kick_if_armed();
            }
        }
    }

    /// The program is about to sleep, or asked to be woken: the thread must serve.
    #[inline]
    pub(crate) fn about_to_sleep(&self) {
        if self.settings.qpc_cache.is_some() {
            self.bring_through();
        }
        if self.settings.defer {
            self.ring_what_waits();
        }
        self.progress.arm();
    }

    /// Has doorbells that were deferred go, for a program that polls no more. Where another thread has the lock, its turn or the next one
    /// takes them.
    fn ring_what_waits(&self) {
        let Some(guard) = self.try_lock() else { return };
        let waits = !guard.deferred.is_empty();
        drop(guard);
        if waits {
            self.with(|_, _| ());
        } else {
            self.serve_bells();
        }
    }

    /// Notes a call of the program.
    #[inline]
    pub(crate) fn note_poll(&self) {
        let calls = &self.polled.calls;
        calls.store(calls.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// A poll found the lock taken: lets the holder run if that goes on.
    #[cold]
    pub(crate) fn missed(&self) {
        let misses = self.polled.misses.load(Ordering::Relaxed).wrapping_add(1);
        self.polled.misses.store(misses, Ordering::Relaxed);
        if misses.is_multiple_of(256) { std::thread::yield_now() } else { std::hint::spin_loop() }
    }

    /// Room for a doorbell of each of `qps` QPs: leaving one never allocates. ENOMEM.
    pub(crate) fn reserve_bells(&self, qps: usize) -> Result<()> {
        if self.bells.reserve(qps) { Ok(()) } else { Err(VerbsError::NoMemory("doorbells")) }
    }
}

/// Of the polls that leave the card alone, one in so many looks at the clock.
const UNTIMED: u32 = 4;
/// Most doorbells that wait at once.
pub(crate) const DEFERRED: usize = 32;
/// A deadline that is earlier by less than this does not wake the thread: its timers are coarse.
const COARSE: Nanos = 1_000_000;

/// The page of this process: one for all cards that it opens in turn.
fn page_of_process(port: u16) -> Result<StatPage> {
    static PAGE: Mutex<Option<(u32, StatPage)>> = Mutex::new(None);
    let forks = forks();
    let mut page = PAGE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((of, page)) = *page
        && of == forks
    {
        return Ok(page);
    }
    let new = StatPage::create(std::process::id(), port, 0)?;
    *page = Some((forks, new));
    Ok(new)
}

/// Counts forks in the children, from the first card on, and has them hold nothing of the card's that others see.
fn watch_forks() {
    extern "C" fn in_child() {
        FORKS.fetch_add(1, Ordering::Relaxed);
        backend::let_go();
    }
    static ONCE: Once = Once::new();
    // SAFETY: the handler is async-signal-safe, and stays as long as the library: it must not be
    // unloaded, as every library with threads.
    ONCE.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
    });
}

/// Numbers that a stranger cannot guess, for keys and QPNs.
pub(crate) fn seed() -> [u64; 2] {
    // What the standard library has for its hash maps, should the system refuse (a filter of system calls).
    let mut seed = [(); 2].map(|()| RandomState::new().build_hasher().finish());
    // SAFETY: the bytes are `seed`'s, and any are valid numbers.
    unsafe { libc::getrandom((&raw mut seed).cast(), size_of_val(&seed), 0) };
    seed
}
