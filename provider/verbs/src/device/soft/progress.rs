//! Turns of the card: in the program's polls, and in those of the thread.

use starverbs_backend::Woken;
use starverbs_core::Nanos;

use super::back_pressure::Who;
use super::{CardGuard, Shard, Soft};
use crate::clock::{self, CpuTime};
use crate::cq::CqShared;
use crate::device::idle::{IDLE, Then};
use crate::device::thread::{LooksAt, TurnResult, lock_patiently, pollfd};

/// Rounds of filling and flushing the port in one turn.
const ROUNDS: u32 = 16;
/// Bytes of frames with short payloads that one turn sends at most. For tests that need more than that.
pub const BYTES_OF_A_TURN: usize = ROUNDS as usize * starverbs_backend::ARENA;
/// Polls between two looks at what the port has to do beside frames.
const MAINTENANCE: u32 = 256;
/// How long the thread leaves frames alone that a poll has received but not taken, and doorbells that wait.
pub(super) const LEFT: Nanos = 1_000_000;
/// How long an ACK waits for the program that left it.
const ACK_LEFT: Nanos = 50_000;
/// Polls that find something for which an ACK waits for the program's answer.
const ACK_POLLS: u32 = 1;
/// The same with StaR, where data, and the completion of what was before, are packets of their own.
const STAR_POLLS: u32 = 2;
/// Polls that find nothing for which the answer to such a completion waits, as the data is often next.
const COMPLETION_POLLS: u32 = 8;
/// Of the polls of a card with local connections, one in so many looks at all else.
const LOCAL_POLLS: u32 = 64;
/// And one in so many says when it was: often enough for the thread to know that the program polls.
const LOCAL_CLOCK: u32 = 16;

const _: () = assert!(LOCAL_POLLS.is_multiple_of(LOCAL_CLOCK));
/// Polls in a row for which the wire has nothing, after which most leave it alone.
const WIRE_IDLE: u32 = 64;
/// Datagram batches in one turn of the thread.
const BATCHES: u32 = 4;

/// The sooner of two times.
#[inline]
fn sooner(a: Option<Nanos>, b: Option<Nanos>) -> Option<Nanos> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

impl Soft {
    /// A poll of `cq` found nothing: runs the card until `cq` holds `wanted` completions or nothing is
    /// left to do. Says whether the card ran.
    ///
    /// Of a card that has local connections, and to which nothing comes by the wire, most polls look at the
    /// channels alone, without a clock or a system call.
    #[inline]
    pub(crate) fn progress(&self, cq: &CqShared, wanted: usize) -> bool {
        if self.activity.backs_off() {
            return false;
        }
        let Some(mut guard) = self.try_lock() else {
            self.activity.missed();
            return true;
        };
        guard.turns = guard.turns.wrapping_add(1);
        if guard.looks_at_more() {
            return self.poll_all(guard, cq, wanted);
        }
        if guard.local.wire_idle >= WIRE_IDLE && guard.env.channels.are_idle() {
            drop(guard);
            self.serve_doorbells();
            return false;
        }
        self.poll_channels(guard, cq, wanted)
    }

    /// A poll that looks at the channels, and behind them at all else if they have nothing.
    #[inline(never)]
    fn poll_channels(&self, mut guard: CardGuard<'_, Shard>, cq: &CqShared, wanted: usize) -> bool {
        if self.take_local(&mut guard) {
            drop(guard);
            self.serve_doorbells();
            return true;
        }
        /* what a READ's answer that went on has raised is told */
        let idle = guard.local.wire_idle >= WIRE_IDLE && guard.env.events.is_empty();
        if idle {
            drop(guard);
            self.serve_doorbells();
        } else {
            self.run_card(guard, cq, wanted);
        }
        !idle
    }

    /// A poll that has more to look at than channels.
    #[inline(never)]
    fn poll_all(&self, mut guard: CardGuard<'_, Shard>, cq: &CqShared, wanted: usize) -> bool {
        let shard = &mut *guard;
        if shard.local.active > 0 {
            self.activity.note_poll(clock::now());
            if !shard.deferred.is_empty() {
                shard.local.ring_deferred((&mut shard.nic, &mut shard.env), &mut shard.deferred);
            }
            if !shard.turns.is_multiple_of(LOCAL_POLLS) && !shard.has_more() {
                return self.poll_channels(guard, cq, wanted);
            }
            self.take_local_first(shard);
        }
        self.run_card(guard, cq, wanted);
        true
    }

    /// The turn of a poll that looks at all that the card has to do.
    #[inline(never)]
    fn run_card(&self, mut guard: CardGuard<'_, Shard>, cq: &CqShared, wanted: usize) {
        let shard = &mut *guard;
        let now = clock::now();
        let pause = now.saturating_sub(self.activity.note_poll(now));
        self.take_doorbells(shard, now);
        /* where the thread sleeps, it is to be woken whoever looked last */
        let polled = !self.thread.is_armed();
        shard.intake.rx.set_polled(polled);
        if polled {
            shard.env.channels.stay_awake();
        }
        let out = shard.intake.waits_for_receives(&mut shard.nic, now, Who::Program);
        shard.intake.rx.set_others(shard.star.is_busy());
        let got = if out { 0 } else { shard.intake.rx.recv() };
        if !polled && shard.intake.rx.has_local() {
            self.note_taken(shard);
        }
        let all = !out && (got == 0 || shard.take_frames(now, || cq.waiting() as usize >= wanted));
        if !all {
            self.lower_alarm(shard, now + LEFT);
        }
        let got = got + shard.star.run((&mut shard.nic, &mut shard.env), now, None) as usize;
        shard.local.wire_idle = if got > 0 { 0 } else { shard.local.wire_idle.saturating_add(1) };
        let got = got + shard.local.run((&mut shard.nic, &mut shard.env), now) as usize;
        shard.local.check((&mut shard.nic, &mut shard.env), now);
        shard.run_links(now, &self.deferred_log);
        shard.run_timers(now);
        if shard.turns.is_multiple_of(MAINTENANCE) {
            self.maintain(shard, now);
        }
        /* The program's answer to what just came goes first; ACKs go with it, or with a poll soon: a program
        that only receives would otherwise keep them until its peer's window is used up. Of a program that
        does not come back, the thread sends them; one that sleeps already gets an alarm. */
        let most = if shard.star.is_open() { STAR_POLLS } else { ACK_POLLS };
        let at_once = shard.acks_kept >= most;
        let answered = |shard: &Shard| if got > 0 { cq.waiting() == 0 } else { !shard.awaits_data() };
        shard.send(now, |shard| at_once || answered(shard));
        if shard.owes_acks() {
            shard.acks_kept += u32::from(got > 0);
            if !polled {
                self.lower_alarm(shard, now + LEFT);
            }
        }
        self.finish(shard, now);
        /* most that comes through memory is taken by polls before this one, which look at no clock */
        if std::mem::take(&mut shard.local.came) || got > 0 {
            shard.idle.restart(now);
        } else if pause > IDLE {
            shard.idle.resume(now);
        }
        let nobody_called = self.activity.nobody_called();
        let then = shard.idle.after(now, nobody_called, || CpuTime::now(self.thread.cpu_clock()));
        self.activity.back_off_for(if let Then::BackOff(time) = then { time } else { 0 });
        drop(guard);
        self.serve_doorbells();
        if then == Then::Yield {
            self.activity.yield_now();
        }
    }

    /// [`Soft::take_local`] of a poll that does more.
    #[inline(never)]
    fn take_local_first(&self, shard: &mut Shard) {
        self.take_local(shard);
    }

    /// The part of a poll that is the local transport's; says whether anything came.
    #[inline(always)]
    fn take_local(&self, shard: &mut Shard) -> bool {
        let came = shard.local.poll((&mut shard.nic, &mut shard.env), 0) > 0;
        if came {
            shard.local.came = true;
            if shard.env.channels.is_asleep() {
                self.note_taken(shard);
                if !self.thread.is_armed() {
                    shard.env.channels.stay_awake();
                }
            }
            self.settle_local(shard);
        }
        came
    }

    /// A poll has taken what others had to wake the thread for.
    #[inline]
    fn note_taken(&self, shard: &mut Shard) {
        shard.local.busy += 1;
        self.thread.watch(shard.local.busy);
    }

    /// What a call of the program sent to another process of this host may have come to this process's own
    /// socket, while steering does not know everybody. It is handed on before the program goes on, which
    /// may be to its end (_exit(2)): of a datagram, and of a connection manager's last message (`cm_sent`),
    /// nobody would send another.
    #[inline]
    pub(super) fn hand_on(&self, shard: &mut Shard, now: Nanos, cm_sent: bool) {
        if cm_sent || !shard.intake.rx.is_settled() {
            self.take_what_came(shard, now);
        }
    }

    #[cold]
    fn take_what_came(&self, shard: &mut Shard, now: Nanos) {
        /* A program may find by polls all that comes in here, and so never run the card by them. */
        self.maintain(shard, now);
        for _ in 0..ROUNDS {
            /* what was received before, and left, comes first */
            if shard.nic.is_starved() || shard.intake.rx.recv_all() == 0 {
                return;
            }
            if !shard.take_frames(now, || false) {
                return self.lower_alarm(shard, now + LEFT);
            }
            shard.transmit(now);
        }
    }

    /// Work beside frames: steering, questions from tools. Gives when there is more.
    fn maintain(&self, shard: &mut Shard, now: Nanos) -> Option<Nanos> {
        while let Some(request) = shard.intake.rx.take_request() {
            self.serve_tool(shard, request);
        }
        let next = shard.intake.rx.maintenance(now);
        if let Some(owners) = shard.intake.rx.take_owners() {
            shard.env.tx.set_owners(owners);
        }
        next
    }

    /// What the thread waits for. Armed: the port's descriptors, settled before, and the next timer. `None`:
    /// another thread runs the card.
    pub(crate) fn wait_fds(&self, fds: &mut Vec<libc::pollfd>, armed: bool) -> Option<Nanos> {
        fds.extend(self.links.fd().map(pollfd));
        if !armed {
            return Some(Nanos::MAX);
        }
        if self.settings.qpc_cache.is_some() {
            self.await_contexts();
        }
        let mut guard = lock_patiently(|| self.try_lock())?;
        let shard = &mut *guard;
        let now = clock::now();
        let port = self.maintain(shard, now);
        let next = shard.next_deadline(now);
        shard.intake.rx.prepare_to_sleep();
        let local = shard.env.channels.prepare_to_sleep();
        fds.extend(shard.intake.rx.fds().iter().map(|fd| pollfd(*fd)));
        fds.extend(shard.star.fds().map(pollfd));
        let deadline = sooner(port, next).unwrap_or(Nanos::MAX);
        /* An alarm that is still to come stays, though nothing may be due then: one spurious
        wake-up costs less than a call to this thread each time that the only timer is set anew. */
        if shard.alarm <= now || deadline < shard.alarm {
            shard.alarm = deadline;
        }
        let owed = if shard.owes_acks() { now + ACK_LEFT } else { Nanos::MAX };
        let until = if local { now } else { shard.alarm.min(owed) };
        drop(guard);
        self.serve_doorbells();
        Some(until)
    }

    /// A turn of the thread, which `woken` has woken.
    pub(crate) fn turn(&self, woken: &[libc::pollfd]) -> TurnResult {
        let woken = Woken(woken);
        if self.links.fd().is_some_and(|fd| woken.has(fd)) {
            self.links.refresh(&self.info.addrs);
        }
        let Some(guard) = self.try_lock() else { return TurnResult::default() };
        guard.stats.thread_runs.inc();
        self.run_all(guard, Who::Thread, woken)
    }

    /// A turn of who does not look at a completion queue: all that the card has to do. Of the port's sockets
    /// it looks at those that have `woken` it, or, if none of them has, at all.
    pub(super) fn run_all(&self, mut guard: CardGuard<'_, Shard>, who: Who, woken: Woken<'_>) -> TurnResult {
        let shard = &mut *guard;
        let now = clock::now();
        self.take_doorbells(shard, now);
        let (mut work, held_until) = self.take_batches(shard, now, who, woken);
        let slept = (who == Who::Thread).then_some(woken);
        work += shard.star.run((&mut shard.nic, &mut shard.env), now, slept);
        let served = shard.local.run_at_last((&mut shard.nic, &mut shard.env), now);
        if served > 0 {
            shard.local.busy = 0;
        }
        work += served;
        shard.local.check((&mut shard.nic, &mut shard.env), now);
        work += shard.run_links(now, &self.deferred_log);
        /* behind the frames: the answer that a timer waits for may be among them */
        work += u32::from(shard.run_timers(now));
        shard.transmit(now);
        self.hand_on(shard, now, false);
        self.finish(shard, now);
        drop(guard);
        self.serve_doorbells();
        let looks_at = if served > 0 { LooksAt::Memory } else { LooksAt::All };
        TurnResult { work: Some(work), held_until, looks_at }
    }

    /// Takes what has come, or what has come through memory alone, for a thread that does not sleep yet; says
    /// whether anything had.
    pub(crate) fn look(&self, at: LooksAt) -> bool {
        let Some(mut guard) = self.try_lock() else { return false };
        if at == LooksAt::All {
            return self.run_all(guard, Who::Thread, Woken(&[])).work > Some(0);
        }
        let shard = &mut *guard;
        shard.env.channels.stay_awake();
        let came = shard.local.run_at_last((&mut shard.nic, &mut shard.env), 0) > 0;
        if came {
            self.settle_local(shard);
        }
        drop(guard);
        if came {
            self.serve_doorbells();
        }
        came
    }

    /// Handles what has come; gives how many batches, and until when the rest waits for receives while others
    /// wait for it.
    fn take_batches(
        &self,
        shard: &mut Shard,
        now: Nanos,
        who: Who,
        woken: Woken<'_>,
    ) -> (u32, Option<Nanos>) {
        let mut work = 0;
        let mut got = shard.intake.rx.recv_woken(woken);
        while got > 0 && work <= BATCHES {
            let out = shard.intake.waits_for_receives(&mut shard.nic, now, who);
            if out || !shard.take_frames(now, || false) {
                self.lower_alarm(shard, now + LEFT);
                return (work + u32::from(!out), shard.intake.held_for(now).map(|left| now + left));
            }
            work += 1;
            if work <= BATCHES {
                shard.transmit(now);
                got = shard.intake.rx.recv();
            }
        }
        (work, None)
    }
}

impl Shard {
    /// Whether a poll has more to look at than channels.
    #[inline]
    fn looks_at_more(&self) -> bool {
        self.turns.is_multiple_of(LOCAL_CLOCK) || self.local.active == 0 || self.has_more()
    }

    /// Whether something is left to do that needs no frame.
    #[inline]
    fn has_more(&self) -> bool {
        self.unsent || self.acks_kept > 0 || !self.deferred.is_empty() || self.env.channels.unfinished
    }

    /// Handles the frames of the last `recv` until `enough`; says whether all are handled.
    #[inline]
    pub(super) fn take_frames(&mut self, now: Nanos, enough: impl FnMut() -> bool) -> bool {
        let Shard { nic, env, intake, .. } = self;
        intake.take((nic, env), now, enough)
    }

    /// Takes messages from other processes of this one's XRC domains; says how many.
    #[inline]
    pub(super) fn run_links(&mut self, now: Nanos, log: &super::DeferredLog) -> u32 {
        let Shard { nic, env, shared_qps, .. } = self;
        shared_qps.run((nic, env), now, log)
    }

    /// Runs the timers that are due; says whether any was.
    #[inline]
    pub(super) fn run_timers(&mut self, now: Nanos) -> bool {
        /* what a reliable QP's timer waits for may lie in the socket, where frames wait for receives */
        let due = self.nic.next_deadline().is_some_and(|deadline| deadline <= now)
            && self.intake.held_for(now).is_none();
        if due {
            self.nic.handle_timeout(&mut self.env, now);
        }
        self.moderator.run(now) || due
    }

    /// Whether acknowledges wait for the program's answer.
    #[inline]
    pub(super) fn owes_acks(&self) -> bool {
        self.nic.owes_acks() || self.star.owes_answers()
    }

    /// Whether all that is owed is to completions that came a moment ago.
    #[inline]
    fn awaits_data(&self) -> bool {
        self.star.owes_for_completions() && !self.nic.owes_acks() && self.local.wire_idle < COMPLETION_POLLS
    }

    /// Sends all that the card wants to send.
    #[inline]
    pub(super) fn transmit(&mut self, now: Nanos) {
        self.send(now, |_| true);
    }

    /// Sends what the card wants to send; ACKs only if, after that, `acks` says so.
    #[inline]
    fn send(&mut self, now: Nanos, acks: impl Fn(&Shard) -> bool) {
        self.settle_roles(now);
        for _ in 0..ROUNDS {
            let mut more = self.nic.poll_transmit(&mut self.env, now, false);
            let acks = acks(self);
            if acks && !more {
                more = self.nic.poll_transmit(&mut self.env, now, true);
                self.acks_kept = 0;
            }
            if self.star.is_open() {
                more |= self.star.transmit((&mut self.nic, &mut self.env), now, acks);
            }
            self.env.tx.flush(now);
            self.unsent = more;
            if !more {
                return;
            }
        }
        /* more than one turn's worth: whoever comes next goes on, at once if need be */
    }

    /// StaR settles the roles of QPs that no local connection carries.
    #[inline]
    fn settle_roles(&mut self, now: Nanos) {
        let Shard { nic, env, local, star, .. } = self;
        for (qpn, preference) in local.take_roles_due() {
            star.settle_roles((nic, env), qpn, preference, now);
        }
    }

    /// When the card has to run again, frames and doorbells aside.
    #[inline]
    pub(super) fn next_deadline(&mut self, now: Nanos) -> Option<Nanos> {
        /* frames that wait for receives come no sooner for being held back by the card, too */
        let held_back =
            self.intake.is_held_back().then(|| if self.nic.is_starved() { now + LEFT } else { now });
        if self.unsent || held_back == Some(now) {
            return Some(now);
        }
        let of_timers =
            self.nic.next_deadline().map(|at| at.max(now + self.intake.held_for(now).unwrap_or(0)));
        let of_frames = sooner(sooner(of_timers, held_back), self.env.tx.next_deadline());
        /* of a program that may have gone */
        let of_doorbells = (!self.deferred.is_empty()).then_some(now + LEFT);
        let of_host = sooner(
            sooner(of_doorbells, self.local.next_check(&self.env.channels)),
            self.moderator.next_deadline(),
        );
        sooner(sooner(of_frames, of_host), self.star.next_deadline(&self.nic, &self.env, now))
    }
}
