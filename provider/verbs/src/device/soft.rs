//! The card in software: one [`Nic`] behind one lock, opened with the first context and
//! closed with the last.
//!
//! Owns the lock, the doorbells left for its holder, and what follows from each turn. A call that finds the
//! lock taken never waits on the data path: it leaves its doorbell, and whoever gives the lock back looks for
//! doorbells once more.

mod back_pressure;
mod contexts;
mod control;
pub(crate) mod deferred_log;
mod domains;
mod doorbells;
mod engine;
pub(crate) mod env;
pub(crate) mod intake;
mod links;
mod local;
mod lock;
mod mads;
mod memory;
mod progress;
mod rpc;
pub(crate) mod shard;
pub(crate) mod shared_qps;
pub(crate) mod star;
mod tools;

use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use starverbs_backend as backend;
use starverbs_core::coalesce::When;
use starverbs_core::{Nanos, Nic, NicConfig, SrqId};
use starverbs_rings::{PendingDoorbells, budget};
use starverbs_settings::{LinkTrust, Settings};

use super::activity::Activity;
use super::command::Events;
use super::thread::ProgressThread;
use super::{Device, Doorbell};
use crate::clock;
use crate::cm::{CmHost, WeakCmCard};
use crate::error::{Result, VerbsError};
use crate::info::{DeviceInfo, MAX_MSG, MAX_RD_ATOM};
use crate::log::{self, log};
use crate::moderation::Moderator;
use crate::process;
use crate::qp::QpInner;
use crate::share::Published;
use crate::stat::StatPage;
use deferred_log::DeferredLog;
use doorbells::Posted;
use intake::Intake;
use links::InterfaceTable;
use local::LocalHost;
use lock::{CardGuard, CardLock};
pub use progress::BYTES_OF_A_TURN;
use progress::LEFT;
pub(crate) use shard::Shard;
use tools::ToolChange;

/// A deadline that is earlier by less than this does not wake the thread: its timers are coarse.
const COARSE: Nanos = 1_000_000;

/// The card.
pub(crate) struct Soft {
    /// Itself
    own: Weak<Soft>,
    change: ToolChange,
    forks: u32,
    pub(crate) info: DeviceInfo,
    pub(crate) settings: Settings,
    /// Written by the holder of the shard's lock, read by anybody
    pub(crate) stats: StatPage,
    shard: CardLock<Shard>,
    doorbells: PendingDoorbells,
    pub(crate) activity: Activity,
    pub(crate) thread: ProgressThread,
    /// How many there are; 0: it is closed
    contexts: Mutex<u32>,
    /// Completion queues that exist
    cqs: AtomicU32,
    moderator: Arc<Moderator>,
    /// What other processes of the host may see of its memory
    pub(crate) published: Option<Published>,
    /// Flushed when the shard's lock is released
    pub(crate) deferred_log: DeferredLog,
    /// Its interfaces
    links: InterfaceTable,
}

impl Soft {
    /// A card with these settings, and a first context of it, which reports to `events`.
    pub(crate) fn open(settings: Settings, stats: StatPage, events: &Events) -> Result<Arc<Soft>> {
        process::watch_forks();
        log::set_level(settings.log);
        let info = DeviceInfo::new(&settings)?;
        budget::set_limit(usize::try_from(info.memory).unwrap_or(usize::MAX));
        /* before the port's sockets: nothing that changes from now on is missed */
        let links = InterfaceTable::new(&info.addrs);
        subscribe_to_port(&links, events)?;
        let (mut tx, rx) = backend::open(&settings, &info.addrs, stats)?;
        let keys = info.limits.mrs.saturating_add(info.limits.windows);
        let (published, mrs) = Published::create(keys, process::seed()[0])?;
        let mut nic = Nic::new(config(&settings, &info), stats, process::seed(), mrs);
        for block in rx.blocks() {
            nic.add_block(block as u16)?;
        }
        if let Some(block) = rx.blocks().next() {
            stats.set_first_block(block);
        }
        log!(Info, "card opened on UDP port {}: {}", settings.port, info.addresses());
        if rx.lacks_port() {
            const WHOSE: &str = "another user or program has it, and frames come only if it hands them on";
            log!(Warn, "UDP port {} (STARVERBS_PORT): {WHOSE}", settings.port);
        }
        let local = LocalHost::new(&settings, &info);
        if local.is_enabled() {
            tx.use_memory(rx.peers());
        }
        let trusts = local.is_enabled() && settings.link_trust != LinkTrust::None;
        let traces = trusts && settings.link_trust == LinkTrust::Trace;
        if traces {
            process::let_others_trace();
        }
        let gates = published.as_ref().filter(|_| trusts).and_then(Published::offer).map(|(offer, gates)| {
            rx.peers().offer_memory(offer);
            gates
        });
        let moderator = Arc::new(Moderator::new());
        let thread = ProgressThread::new()?;
        let soft = Arc::new_cyclic(|soft: &Weak<Soft>| {
            let owner = rx.blocks().next().unwrap_or_default() as u16;
            let cm =
                CmHost::new(info.attr.node_guid, owner, info.addrs.clone(), WeakCmCard::Soft(soft.clone()));
            let intake = Intake::new(rx, settings.qpc_prefetch);
            let mut shard = Shard::new(nic, tx, intake, stats, cm, local, Arc::clone(&moderator));
            (shard.env.channels.gates, shard.env.channels.traces) = (gates, traces);
            Soft {
                own: soft.clone(),
                change: ToolChange::default(),
                forks: process::forks(),
                info,
                settings,
                stats,
                shard: CardLock::new(shard),
                doorbells: PendingDoorbells::new(),
                activity: Activity::default(),
                thread,
                contexts: Mutex::new(1),
                cqs: AtomicU32::new(0),
                moderator,
                published,
                deferred_log: DeferredLog::new(),
                links,
            }
        });
        if soft.settings.progress_thread {
            soft.thread.start(Device::Soft(Arc::clone(&soft)))?;
        }
        Ok(soft)
    }

    /// Whether this process opened it (and is not a forked child of the one that did).
    #[inline]
    pub(crate) fn is_ours(&self) -> bool {
        process::forks() == self.forks
    }

    /// One more context, unless the last one has left.
    fn join(&self, events: &Events) -> Result<()> {
        let mut contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        if *contexts == 0 {
            return Err(VerbsError::NoData);
        }
        subscribe_to_port(&self.links, events)?;
        *contexts += 1;
        Ok(())
    }

    /// A context leaves: its QPs end, and with the last context the card. Handles that are left do no harm.
    fn leave(&self, events: &Events) {
        for qpn in self.with(|shard, _| shard.qps_reporting_to(events).collect::<Vec<_>>()) {
            let _ = self.with(|shard, now| shard.end_qp(qpn, now));
        }
        let mut contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        *contexts -= 1;
        if *contexts == 0 {
            log!(Info, "card closed");
            self.close_cm();
            self.thread.stop();
            self.with(|shard, _| {
                shard.intake.rx.leave();
                shard.shared_qps.close(&mut shard.env, &self.deferred_log);
            });
        }
    }

    /// Disconnects the connection manager's peers.
    fn close_cm(&self) {
        self.with_cm(|cm, port, log, now| cm.manage(port, log, now, starverbs_cm::Cm::release_all));
    }

    /// The process is about to end: peers of its connections are notified, and the card receives nothing
    /// more, so that what was not read goes to its owners.
    pub(crate) fn retire(&self) {
        self.close_cm();
        self.with(|shard, _| shard.intake.rx.leave());
    }

    /// Runs a control call on the card, and what follows from it.
    pub(crate) fn with<R>(&self, call: impl FnOnce(&mut Shard, Nanos) -> R) -> R {
        let mut guard = self.shard.lock();
        let now = clock::now();
        /* the call may end what a deferred doorbell waits behind */
        guard.ring_deferred(now);
        let result = call(&mut guard, now);
        guard.env.channels.wake_requesters();
        guard.transmit(now);
        let cm_sent = guard.cm.take_sent();
        self.hand_on(&mut guard, now, cm_sent);
        self.finish(&mut guard, now);
        drop(guard);
        self.serve_doorbells();
        result
    }

    /// The shard, unless somebody has it.
    #[inline]
    fn try_lock(&self) -> Option<CardGuard<'_, Shard>> {
        self.shard.try_lock()
    }

    /// Something was posted.
    #[inline(always)]
    pub(crate) fn doorbell(&self, doorbell: Doorbell<'_>) {
        match doorbell {
            Doorbell::Sends { qp, small } => {
                self.ring(qp, if small { Posted::SmallSends } else { Posted::Sends });
            }
            Doorbell::Receives(qp) => self.ring(qp, Posted::Receives),
            Doorbell::Srq(srq) => self.ring_srq(srq),
        }
    }

    #[inline(never)]
    fn ring_srq(&self, srq: SrqId) {
        self.with(|shard, now| shard.star.ring_srq((&mut shard.nic, &mut shard.env), srq, now));
    }

    /// Rings the doorbell of `qp`, or leaves it for the lock's holder.
    #[inline(never)]
    fn ring(&self, qp: &QpInner, what: Posted) {
        self.activity.note_call();
        match self.try_lock() {
            Some(mut guard) => {
                let shard = &mut *guard;
                let waits = shard.env.channels.many
                    && shard.env.channels.is_crowded()
                    && self.settings.defer
                    && self.defer(shard, qp, what);
                if waits || shard.local.ring((&mut shard.nic, &mut shard.env), qp.qpn) {
                    self.settle_local(shard);
                } else {
                    self.ring_wire(shard, qp, what);
                }
                drop(guard);
            }
            None => self.doorbells.leave(qp.qpn),
        }
        self.serve_doorbells();
    }

    /// Rings the doorbell of a QP whose connection packets carry.
    #[inline(never)]
    fn ring_wire(&self, shard: &mut Shard, qp: &QpInner, what: Posted) {
        if self.settings.defer && self.defer(shard, qp, what) {
            return;
        }
        let now = clock::now();
        shard.ring_deferred(now);
        shard.ring(qp.qpn, now);
        shard.transmit(now);
        self.hand_on(shard, now, false);
        self.finish(shard, now);
    }

    /// What may follow from a turn of the local transport alone.
    #[inline]
    fn settle_local(&self, shard: &mut Shard) {
        /* an event that is held back: the thread may sleep, and is to raise it */
        let moderated = shard.moderator.next_deadline().is_some();
        if moderated
            || shard.env.channels.unfinished
            || !shard.env.events.is_empty()
            || shard.nic.next_deadline() != shard.timer_seen
        {
            self.finish_local(shard);
        }
    }

    #[cold]
    fn finish_local(&self, shard: &mut Shard) {
        self.finish(shard, clock::now());
        shard.timer_seen = shard.nic.next_deadline();
    }

    /// Has the doorbell of `qp` wait for the card's next turn, if it may. A program that polls takes a turn
    /// soon, and so does a watching thread; an armed one gets an alarm. Without a thread only the program's
    /// calls run the card.
    #[inline]
    fn defer(&self, shard: &mut Shard, qp: &QpInner, what: Posted) -> bool {
        let armed = self.thread.is_armed();
        let when = shard.defer(qp, what, self.activity.may_sleep());
        if armed && when == When::Soon {
            self.lower_alarm(shard, clock::now() + LEFT);
        }
        when != When::Now
    }

    /// After giving the lock back, or leaving a doorbell: somebody may have left one meanwhile. Flushes the
    /// deferred log.
    #[inline]
    fn serve_doorbells(&self) {
        let turn = |guard: &mut CardGuard<'_, Shard>| {
            let now = clock::now();
            self.take_doorbells(guard, now);
            guard.transmit(now);
            self.hand_on(guard, now, false);
            self.finish(guard, now);
        };
        self.doorbells.serve(|| self.try_lock(), turn);
        self.deferred_log.flush();
    }

    /// Handles the doorbells that were left or deferred.
    #[inline]
    fn take_doorbells(&self, shard: &mut Shard, now: Nanos) {
        shard.ring_deferred(now);
        self.doorbells.take(|qpn| {
            shard.stats.doorbells_left.inc();
            shard.ring(qpn, now);
        });
    }

    /// Room for a doorbell of each of `qps` QPs: leaving one never allocates. ENOMEM.
    fn reserve_doorbells(&self, qps: usize) -> Result<()> {
        if self.doorbells.reserve(qps) { Ok(()) } else { Err(VerbsError::NoMemory("doorbells")) }
    }

    /// End of a turn: raises events, and has the thread wake up in time for the next timer.
    #[inline]
    fn finish(&self, shard: &mut Shard, now: Nanos) {
        shard.env.channels.unfinished = false;
        if shard.env.channels.flush(true) {
            self.lower_alarm(shard, now);
        }
        if !shard.env.events.is_empty() {
            shard.notify(&self.deferred_log, now);
        }
        if let Some(deadline) = shard.next_deadline(now) {
            self.lower_alarm(shard, deadline);
        }
        shard.intake.rx.settle();
    }

    /// Has the thread wake up by about `deadline`.
    #[inline]
    fn lower_alarm(&self, shard: &mut Shard, deadline: Nanos) {
        if deadline < shard.alarm {
            let before = std::mem::replace(&mut shard.alarm, deadline);
            if before - deadline > COARSE {
                self.thread.kick_if_armed();
            }
        }
    }

    /// The program is about to sleep, or asked to be woken: the thread must serve.
    #[inline]
    pub(crate) fn arm(&self) {
        if self.settings.qpc_cache.is_some() {
            self.await_contexts();
        }
        if self.settings.defer {
            self.ring_what_waits();
        }
        self.thread.arm();
    }

    /// Has doorbells that were deferred go, and ACKs that were kept, for a program that polls no more. Where
    /// another thread has the lock, its turn or the next one takes them.
    fn ring_what_waits(&self) {
        let Some(guard) = self.try_lock() else { return };
        let waits = !guard.deferred.is_empty() || guard.owes_acks();
        drop(guard);
        if waits {
            self.with(|_, _| ());
        } else {
            self.serve_doorbells();
        }
    }
}

/// A context gets the port's events from now on. ENOMEM.
fn subscribe_to_port(links: &InterfaceTable, events: &Events) -> Result<()> {
    if links.subscribe(events) { Ok(()) } else { Err(VerbsError::NoMemory("contexts")) }
}

/// The card that settings and host make.
fn config(settings: &Settings, info: &DeviceInfo) -> NicConfig {
    NicConfig {
        mtu: info.port.active_mtu,
        max_msg: MAX_MSG,
        max_rd_atomic: MAX_RD_ATOM as u8,
        window: settings.window.unwrap_or(NicConfig::default().window),
        delay_target: settings.delay_target.map(|target| target.as_nanos() as Nanos),
        repeat: settings.repeat,
        credits: settings.credits,
        max_groups: info.attr.max_mcast_grp,
        contexts: settings.qpc_cache.map(starverbs_backend::context_cache),
        limits: info.limits,
        ..NicConfig::default()
    }
}
