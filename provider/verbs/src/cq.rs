//! Completion queues: polled by the program, filled by the card, announced on a channel when asked.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use starverbs_core::env::CqOverrun;
use starverbs_core::nic::TimerId;
use starverbs_core::{CompletionQueue, Cqe, Nanos, Qpn, WcStatus};
use starverbs_rings::{Armed, CqRing, CqRoom};

use crate::channel::{ChannelShared, CompChannel};
use crate::clock;
use crate::context::Context;
use crate::device::thread::ThreadWork;
use crate::device::{Command, CommandReply, Device, DeviceCq};
use crate::error::{Result, VerbsError};
use crate::events::{VerbsEvent, kind};
use crate::moderation::{Moderation, Moderator};
use crate::pd::Pd;

/// Why a completion queue is not made smaller.
pub(crate) const TOO_SMALL: VerbsError = VerbsError::Invalid("completion queue too small for what it holds");

/// What a completion queue is to be: `struct ibv_cq_init_attr_ex`.
#[derive(Clone, Copy, Default)]
pub struct CqInit<'a> {
    /// Completions, at least
    pub cqe: u32,
    /// Events go here
    pub channel: Option<&'a CompChannel>,
    /// Names the queue in events
    pub cookie: u64,
    /// Completions carry the time at which they were made
    pub stamped: bool,
    /// A completion that finds the queue full is lost, and the queue goes on
    pub ignore_overrun: bool,
    /// A parent domain, whose memory it uses
    pub parent: Option<&'a Pd>,
}

/// A completion queue. Clones are the same queue.
#[derive(Clone)]
pub struct Cq(pub(crate) Arc<CqShared>);

pub(crate) struct CqShared {
    pub(crate) ctx: Context,
    /// The device's own part
    pub(crate) device_half: DeviceCq,
    ring: CqRing,
    armed: Armed,
    overrun: AtomicBool,
    ignore_overrun: bool,
    channel: Option<Arc<ChannelShared>>,
    /// [`Moderation`], packed.
    moderation: AtomicU32,
    /// Its place among those that moderate, from the first time that it does.
    timer: OnceLock<Timer>,
    /// Completions whose event is held back. Changes under the card's lock.
    unnotified: AtomicU32,
    cookie: u64,
    /// Queue pairs that complete here.
    pub(crate) users: AtomicU32,
    destroyed: AtomicBool,
    /// Keeps it in use.
    _parent: Option<Pd>,
}

/// A place among the queues of a device that moderate.
struct Timer {
    moderator: Arc<Moderator>,
    id: TimerId,
}

impl Cq {
    /// `ibv_create_cq`: room for at least `cqe` completions; events go to `channel`, with `cookie`.
    ///
    /// # Errors
    /// EINVAL: 0 or more than the device's max_cqe; ENOMEM; EIO in a forked child.
    pub fn create(ctx: &Context, cqe: u32, channel: Option<&CompChannel>, cookie: u64) -> Result<Cq> {
        Cq::create_ex(ctx, &CqInit { cqe, channel, cookie, ..CqInit::default() })
    }

    /// `ibv_create_cq_ex`: makes a completion queue.
    ///
    /// # Errors
    /// EINVAL: 0 or more than the device's max_cqe, or a domain that is no parent domain; ENOMEM: no memory,
    /// or max_cq exist; EIO in a forked child.
    pub fn create_ex(ctx: &Context, init: &CqInit<'_>) -> Result<Cq> {
        let device = ctx.device()?;
        if init.cqe == 0 || init.cqe > device.info().attr.max_cqe {
            return Err(VerbsError::Invalid("number of CQEs"));
        }
        if init.parent.is_some_and(|pd| !pd.is_parent()) {
            return Err(VerbsError::Invalid("not a parent domain"));
        }
        let memory = init.parent.and_then(Pd::memory);
        let ring = CqRing::new(init.cqe, init.stamped, memory);
        let ring = ring.ok_or(VerbsError::NoMemory("completion queue"))?;
        if let Some(channel) = init.channel {
            let cqs = channel.0.cqs.fetch_add(1, Ordering::Relaxed) + 1;
            /* a program asks each CQ for one event at a time */
            if !channel.0.queue.make_room(cqs as usize) {
                channel.0.cqs.fetch_sub(1, Ordering::Relaxed);
                return Err(VerbsError::NoMemory("completion channel"));
            }
        }
        let (cqe, ignore_overrun) = (init.cqe, init.ignore_overrun);
        let made = device.control(Command::CreateCq { cqe, ignore_overrun }).and_then(CommandReply::cq);
        if let (Err(_), Some(channel)) = (&made, init.channel) {
            channel.0.cqs.fetch_sub(1, Ordering::Relaxed);
        }
        Ok(Cq(Arc::new(CqShared {
            ctx: ctx.clone(),
            device_half: made?,
            ring,
            armed: Armed::new(),
            overrun: AtomicBool::new(false),
            ignore_overrun: init.ignore_overrun,
            channel: init.channel.map(|channel| Arc::clone(&channel.0)),
            moderation: AtomicU32::new(0),
            timer: OnceLock::new(),
            unnotified: AtomicU32::new(0),
            cookie: init.cookie,
            users: AtomicU32::new(0),
            destroyed: AtomicBool::new(false),
            _parent: init.parent.cloned(),
        })))
    }

    /// Completions it holds: at least as many as asked for.
    pub fn depth(&self) -> u32 {
        self.0.ring.consumer().capacity()
    }

    /// `ibv_poll_cq`: moves up to `out.len()` completions to `out` and says how many.
    ///
    /// # Errors
    /// As [`Cq::poll_with`].
    pub fn poll(&self, out: &mut [Cqe]) -> Result<usize> {
        let mut at = 0;
        self.poll_with(out.len(), |cqe| {
            out[at] = *cqe;
            at += 1;
        })
    }

    /// `ibv_poll_cq` without the copy: hands up to `max` completions to `f` and says how many. Runs
    /// the card when there is none. `f` must not call the library.
    ///
    /// # Errors
    /// `Overrun` once the queue overran and is empty; `Forked`.
    #[inline]
    pub fn poll_with(&self, max: usize, mut f: impl FnMut(&Cqe)) -> Result<usize> {
        self.poll_stamped(max, |cqe, _| f(cqe))
    }

    /// As [`Cq::poll_with`], with the time at which each completion was made, as
    /// [`raw_clock`](crate::raw_clock) reads it; 0 in a queue that was not asked to keep it.
    ///
    /// # Errors
    /// As [`Cq::poll_with`].
    #[inline]
    pub fn poll_stamped(&self, max: usize, mut f: impl FnMut(&Cqe, Nanos)) -> Result<usize> {
        let device = self.0.ctx.device()?;
        device.activity().note_look();
        /* the lock is for a queue that has something */
        if self.0.waiting() == 0 && max > 0 {
            if self.0.overrun.load(Ordering::Acquire) {
                return Err(VerbsError::Overrun);
            }
            if !device.progress(&self.0, max) {
                return Ok(0);
            }
        }
        Ok(self.0.take(max, &mut f))
    }

    /// `ibv_req_notify_cq`: an event on the channel for the next completion that is added.
    ///
    /// # Errors
    /// EIO in a forked child.
    pub fn req_notify(&self, solicited_only: bool) -> Result<()> {
        let device = self.0.ctx.device()?;
        if self.0.armed.arm(solicited_only) && self.0.channel.is_some() {
            device.activity().awaits_event();
        }
        device.await_event(&self.0, solicited_only);
        Ok(())
    }

    /// `ibv_resize_cq`; what is in the queue stays.
    ///
    /// # Errors
    /// EINVAL: 0, more than max_cqe, or fewer than are in the queue; ENOMEM.
    pub fn resize(&self, cqe: u32) -> Result<()> {
        let device = self.0.ctx.device()?;
        if cqe == 0 || cqe > device.info().attr.max_cqe {
            return Err(VerbsError::Invalid("number of CQEs"));
        }
        /* before the locks are taken: the memory may be the program's to give, and to take back */
        let room = self.0.ring.room(cqe);
        let mut room = room.ok_or(VerbsError::NoMemory("completion queue"))?;
        device.control(Command::ResizeCq { cq: &self.0, room: &mut room }).map(|_| ())
    }

    /// `ibv_modify_cq`: from now on events are moderated so. An event that is held back is raised at once.
    /// Polling is not affected.
    ///
    /// # Errors
    /// ENOMEM; EIO in a forked child.
    pub fn moderate(&self, moderation: Moderation) -> Result<()> {
        self.0.ctx.device()?.control(Command::ModifyCq { cq: &self.0, moderation }).map(|_| ())
    }

    /// `ibv_destroy_cq`: ends a completion queue.
    ///
    /// # Errors
    /// EBUSY while queue pairs or shared receive queues use it; EIO in a forked child.
    pub fn destroy(&self) -> Result<()> {
        if self.0.users.load(Ordering::Acquire) > 0 {
            return Err(VerbsError::Busy("queue pairs or shared receive queues"));
        }
        let device = self.0.ctx.device()?;
        self.0.retire(Some(device));
        Ok(())
    }

    /// Forgets the completions of a QP that is gone or in RESET. Of the two locks the card's comes first.
    pub(crate) fn purge(&self, qpn: Qpn) {
        self.0.ring.consumer().purge(qpn);
    }

    /// The card's half.
    pub(crate) fn card_half(&self) -> CardCq {
        CardCq(Arc::clone(&self.0))
    }
}

impl CqShared {
    #[inline]
    fn take(&self, max: usize, f: &mut impl FnMut(&Cqe, Nanos)) -> usize {
        let mut consumer = self.ring.consumer();
        let mut taken = 0;
        while taken < max
            && let Some((cqe, stamp)) = consumer.take()
        {
            f(&cqe, stamp);
            taken += 1;
        }
        taken
    }

    /// Has the ring be another one. Nobody pushes meanwhile: the device's lock is held. EINVAL: it is too
    /// small.
    pub(crate) fn move_to(&self, room: &mut CqRoom) -> Result<()> {
        // SAFETY: the device's lock is held, so nobody pushes; the room is this ring's.
        if unsafe { self.ring.consumer().resize(room) } { Ok(()) } else { Err(TOO_SMALL) }
    }

    /// From now on events are moderated so. The device's lock is held. ENOMEM.
    pub(crate) fn moderate(self: &Arc<Self>, moderation: Moderation, by: &Arc<Moderator>) -> Result<()> {
        if moderation.waits() && self.timer.get().is_none() {
            let id = by.join(self)?;
            /* set under the device's lock alone, so not by anybody else since the look */
            let _ = self.timer.set(Timer { moderator: Arc::clone(by), id });
        }
        self.moderation.store(moderation.pack(), Ordering::Relaxed);
        if self.unnotified.load(Ordering::Relaxed) > 0 {
            self.forget_timer();
            self.notify_moderated();
        }
        Ok(())
    }

    /// Adds a completion, as the device does; `solicited`: or an error.
    ///
    /// # Safety
    /// One thread at a time is the device, and none while [`CqShared::move_to`] runs.
    ///
    /// # Errors
    /// The queue is full, and of no use any more.
    #[inline(always)]
    pub(crate) unsafe fn push(&self, cqe: &Cqe, solicited: bool) -> std::result::Result<(), CqOverrun> {
        let stamp = if self.ring.stamped() { clock::now() } else { 0 };
        // SAFETY: the caller's terms.
        if let Err(overrun) = unsafe { self.ring.push(cqe, stamp) } {
            return self.overrun(overrun);
        }
        if let Some(channel) = &self.channel
            && self.armed.wants(solicited || cqe.status != WcStatus::Success)
        {
            self.announce(channel);
        }
        Ok(())
    }

    /// Whether events wait.
    pub(crate) fn is_moderated(&self) -> bool {
        self.moderation.load(Ordering::Relaxed) != 0
    }

    /// Whether events wait for a time at most.
    pub(crate) fn has_period(&self) -> bool {
        Moderation::unpack(self.moderation.load(Ordering::Relaxed)).period > 0
    }

    /// A device that moderates by itself does so from now on. An event that is held back is raised at once.
    /// One thread at a time is the device.
    pub(crate) fn moderated_by_device(&self, moderation: Moderation) {
        self.moderation.store(moderation.pack(), Ordering::Relaxed);
        if self.unnotified.load(Ordering::Relaxed) > 0 {
            self.notify_moderated();
        }
    }

    /// Completions waiting, as the card sees it.
    #[inline]
    pub(crate) fn waiting(&self) -> u32 {
        self.ring.waiting()
    }

    fn retire(&self, device: Option<&Device>) {
        if self.destroyed.swap(true, Ordering::AcqRel) {
            return;
        }
        let cookie = self.cookie;
        if let Some(device) = device {
            let _ = device.control(Command::DestroyCq { cq: self });
        }
        self.disarm();
        if let Some(channel) = &self.channel {
            let purged = channel.queue.purge(|entry| *entry == cookie);
            if let Some(device) = device {
                device.activity().unread.take_back(purged);
            }
            channel.cqs.fetch_sub(1, Ordering::Relaxed);
        }
        self.ctx.purge_events(|event| matches!(event, VerbsEvent::Cq { cookie: c, .. } if *c == cookie));
    }

    /// There was no room for a completion.
    #[cold]
    fn overrun(&self, overrun: CqOverrun) -> std::result::Result<(), CqOverrun> {
        if self.ignore_overrun {
            return Ok(());
        }
        /* what is flushed now does not stand where what was lost should */
        self.ring.close();
        self.fail();
        Err(overrun)
    }

    pub(crate) fn fail(&self) {
        if !self.overrun.swap(true, Ordering::AcqRel) {
            if let Some(device) = self.ctx.device_if_ours() {
                device.log_later(kind::CQ_ERR, self.ring.waiting());
            }
            self.ctx.raise(VerbsEvent::Cq { kind: kind::CQ_ERR, cookie: self.cookie });
            if let Some(channel) = &self.channel {
                self.notify(channel);
            }
        }
    }

    /// After a push: raises the event that the program asked for.
    #[inline(never)]
    fn announce(&self, channel: &ChannelShared) {
        match self.moderation.load(Ordering::Relaxed) {
            0 => self.notify(channel),
            /* it says when, if that is not seen here before */
            packed if self.device_half.is_some() => {
                let unnotified = self.unnotified.fetch_add(1, Ordering::Relaxed) + 1;
                let Moderation { count, .. } = Moderation::unpack(packed);
                if count > 0 && unnotified >= u32::from(count) {
                    self.notify_moderated();
                }
            }
            packed => self.hold_back(Moderation::unpack(packed)),
        }
    }

    /// A device, which is one thread at a time, found a solicited completion of this queue: raises the event
    /// that was asked for.
    #[cold]
    pub(crate) fn announce_solicited(&self) {
        if let Some(channel) = self.channel.as_ref().filter(|_| self.armed.wants(true)) {
            self.announce(channel);
        }
    }

    /// Raises the event that was asked for, once.
    #[inline]
    fn notify(&self, channel: &ChannelShared) {
        if self.disarm() {
            if let Some(device) = self.ctx.device_if_ours() {
                device.activity().unread.raise();
            }
            channel.queue.push(self.cookie);
        }
    }

    /// Whether an event was asked for, which it is no more.
    fn disarm(&self) -> bool {
        let was_armed = self.armed.disarm();
        if was_armed
            && self.channel.is_some()
            && let Some(device) = self.ctx.device_if_ours()
        {
            device.activity().awaits_no_more();
        }
        was_armed
    }

    /// Holds the event of a completion back until enough completions wait, or its time is up.
    #[cold]
    fn hold_back(&self, how: Moderation) {
        let unnotified = self.unnotified.load(Ordering::Relaxed) + 1;
        self.unnotified.store(unnotified, Ordering::Relaxed);
        if how.count > 0 && unnotified >= u32::from(how.count) {
            if how.patience().is_some() {
                self.forget_timer();
            }
            self.notify_moderated();
        } else if unnotified == 1
            && let (Some(patience), Some(timer)) = (how.patience(), self.timer.get())
        {
            timer.moderator.wait(timer.id, clock::now() + patience);
        }
    }

    /// Stops the timer: the event is raised now, or never.
    pub(crate) fn forget_timer(&self) {
        if let Some(timer) = self.timer.get() {
            timer.moderator.forget(timer.id);
        }
    }

    /// Raises the event that was held back. The card's lock is held.
    pub(crate) fn notify_moderated(&self) {
        self.unnotified.store(0, Ordering::Relaxed);
        if let Some(channel) = &self.channel {
            self.notify(channel);
        }
    }
}

impl Drop for CqShared {
    fn drop(&mut self) {
        /* nobody is left to raise its event; and the device, if this was its last holder, has its own lock */
        *self.moderation.get_mut() = 0;
        let device = self.ctx.device_if_ours();
        self.retire(device);
        if let (Some(timer), Some(_)) = (self.timer.get(), device) {
            timer.moderator.leave(timer.id);
        }
    }
}

/// The card's half of a [`Cq`].
#[derive(Clone)]
pub(crate) struct CardCq(Arc<CqShared>);

impl CardCq {
    /// The queue, for devices that keep nothing of it.
    pub(crate) fn shared(&self) -> &Arc<CqShared> {
        &self.0
    }

    /// Adds a completion, in the place of the call.
    #[inline(always)]
    pub(crate) fn add(&self, cqe: &Cqe, solicited: bool) -> std::result::Result<(), CqOverrun> {
        // SAFETY: the card runs under its lock, so one thread at a time is here, and none while
        // `resize` holds that lock.
        unsafe { self.0.push(cqe, solicited) }
    }

    /// Whether the program has polled all that was added, as far as the card sees.
    #[inline]
    pub(crate) fn is_polled(&self) -> bool {
        self.0.waiting() == 0
    }
}

impl CompletionQueue for CardCq {
    #[inline]
    fn push(&self, cqe: &Cqe, solicited: bool) -> std::result::Result<(), CqOverrun> {
        self.add(cqe, solicited)
    }

    fn purge(&self, _qpn: u32) {
        /* The program's index moves under the poll lock only: `Qp` purges when the card is done. */
    }
}
