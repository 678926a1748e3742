//! An [`SlQp`]'s timers, its talk with SF, and its way into error.

use starverbs_core::env::{RecvQueue, SendQueue};
use starverbs_core::{AsyncEvent, Cqe, Gid, Nanos, Psn, WcStatus};

use crate::channel::Turn;
use crate::control::Control;
use crate::env::StarEnv;
use crate::stateless::send_control;
use crate::wire::{Packet, Ptype, Queue};

use super::track::{Due, LATE};
use super::{Changes, Patience, SlQp, SlState, is_gate};

/// WQEs sent again at one timeout: the oldest that SF has not stored and some behind it.
const BURST: u32 = 16;

/// After so many tries, which take half a minute, nothing is said for which no send waits, until SF says
/// something: as it does where it lacks a receive or a rule.
const IN_VAIN: u32 = 128;

/// An end in ERR says so for so long at most to a peer that does not answer, however long its program lets
/// peers be silent: the peer's own time tells it.
const LAST_WORDS: Nanos = 2_000_000_000;

impl<E: StarEnv> SlQp<E> {
    /// Sends what is due. True: more waits for room in the port.
    pub fn poll_transmit(&mut self, env: &mut E, now: Nanos) -> bool {
        if self.channel.deadline().is_some_and(|due| due <= now) {
            if !env.can_send_star() {
                return true;
            }
            if let Some((seq, message)) = self.channel.poll(now) {
                send_control(env, &self.peer, self.init.qpn, seq, Some(&message));
            }
        }
        self.supply(env, now);
        self.has_more()
    }

    /// When [`handle_timeout`](SlQp::handle_timeout) is due.
    pub fn next_deadline(&self) -> Option<Nanos> {
        let queues = [self.send.deadline(), self.recv.deadline()];
        let queues = queues.into_iter().filter(|_| self.state == SlState::Ready);
        queues.chain([self.channel.deadline(), self.keepalive_due(), self.left_due()]).flatten().min()
    }

    /// Sends are not known to be done, whether the program asked for completions or not, or wait for what
    /// another connection tells SF: when SF is asked whether it lives, and how far it is.
    fn keepalive_due(&self) -> Option<Nanos> {
        let held = self.is_closed() && self.send.next != self.posted();
        let under_way = self.send.una != self.send.next;
        let waits = self.state == SlState::Ready && (under_way || held) && self.channel.waiting() == 0;
        (waits && self.left_at.is_none()).then(|| self.quiet_since + self.init.keepalive)
    }

    /// Whether all that is due is a question that had no answer half a minute long, and for which no send
    /// waits: it goes on to be asked, ever more seldom, in case SF is there again.
    pub fn asks_in_vain(&self) -> bool {
        self.channel.tries() >= IN_VAIN
            && !self.sends_wait()
            && self.next_deadline() == self.channel.deadline()
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, env: &mut E, now: Nanos) {
        let mut patience = self.init.patience;
        if self.state == SlState::Error {
            /* there are only last words left */
            patience.time = Some(patience.time.map_or(LAST_WORDS, |time| time.min(LAST_WORDS)));
        }
        let asking = self.channel.deadline().is_some_and(|due| due <= now);
        if self.state != SlState::Error && !self.sends_wait() {
            /* SF's program may not be ready for long, or the way to it may be cut: who sends nothing waits as
            in RC */
            self.channel.excuse(now);
            if self.state == SlState::Ready && self.channel.tries() >= IN_VAIN {
                self.channel.sleep();
            }
        }
        if self.recv.tries() >= IN_VAIN {
            self.recv.sleep();
        }
        if asking && self.has_asked_enough(now, &patience) {
            return self.fail(env, now);
        }
        if self.left_due().is_some_and(|due| due <= now) {
            return self.fail(env, now);
        }
        if self.keepalive_due().is_some_and(|due| due <= now) {
            if self.parted {
                /* it has stored them, and left */
                self.left_at = Some(now);
            } else {
                self.ask(now, Control::KeepAlive);
            }
        }
        for queue in [Queue::Send, Queue::Recv] {
            if self.state != SlState::Ready {
                break;
            }
            /* receives wait for ever, as in RC */
            let time = patience.time.filter(|_| queue == Queue::Send);
            match self.track(queue).look(now, &Patience { time, ..patience }) {
                Some(Due::Again(low)) => self.send_again(env, queue, low, BURST),
                Some(Due::GiveUp) => self.fail(env, now),
                None => (),
            }
        }
        self.poll_transmit(env, now);
    }

    /// Whether SF is to be given up, as what it was told, which is to be said again now, has had no answer
    /// for so long. When this end was late itself, what came meanwhile is read first.
    fn has_asked_enough(&mut self, now: Nanos, patience: &Patience) -> bool {
        let late = self.channel.lateness(now);
        let over = patience.is_over(self.channel.tries(), self.channel.waited(now));
        self.excused = over && late > LATE && !self.excused;
        if self.excused {
            self.channel.put_off(now, now + LATE);
        }
        over && !self.excused
    }

    /// A packet with M set for this QP came from `source`. See [`Packet::open`].
    pub fn handle_control(&mut self, env: &mut E, now: Nanos, source: &Gid, packet: &Packet<'_>) {
        let known = self.peer.has_sent(source, packet);
        if !known || self.state == SlState::Idle {
            return;
        }
        self.quiet_since = now;
        self.channel.wake(now);
        self.recv.wake(now);
        let seq = packet.header.psn;
        if packet.header.ptype == Ptype::Ea {
            if packet.data.is_empty() {
                self.answered(seq);
            }
        } else if let Some(message) = Control::decode(packet.data) {
            let turn = self.channel.turn(seq);
            if turn == Turn::Now {
                self.channel.took();
                self.hear(env, now, &message);
            }
            if turn != Turn::Early {
                send_control(env, &self.peer, self.init.qpn, seq, None);
            }
        }
        self.poll_transmit(env, now);
    }

    fn answered(&mut self, seq: Psn) {
        let Some(message) = self.channel.answered(seq) else { return };
        self.gate -= u32::from(is_gate(&message));
        self.changes.count(&message, u32::wrapping_sub);
        if self.state == SlState::Starting {
            self.state = SlState::Ready;
        }
    }

    /// What SF says.
    fn hear(&mut self, env: &mut E, now: Nanos, message: &Control) {
        match *message {
            Control::Want { upto } if Psn::new(upto).since(self.wanted) > 0 => self.wanted = Psn::new(upto),
            /* all of it is being told: who asks again and again would have it kept as often */
            Control::Tell if self.channel.holds(&Control::Begin { known: None }) => (),
            Control::Tell => self.ignorant = true,
            Control::Inquire => self.inquired = true,
            Control::Bye { why } => self.part(env, now, why),
            _ => (),
        }
    }

    /// SF ends the connection. Completions that it sent before are in memory.
    fn part(&mut self, env: &mut E, now: Nanos, why: u8) {
        for queue in [Queue::Send, Queue::Recv] {
            self.complete(env, now, queue);
        }
        let event = match WcStatus::from_code(why) {
            /* as if nobody answered any more, which RC sees when it sends */
            Some(WcStatus::Success) => return self.depart(now),
            Some(WcStatus::RemAccessErr) => AsyncEvent::QpAccessErr(self.init.qpn),
            Some(WcStatus::RemInvReqErr) => AsyncEvent::QpReqErr(self.init.qpn),
            _ => AsyncEvent::QpFatal(self.init.qpn),
        };
        if self.state != SlState::Error {
            env.event(event);
            self.enter_error(env, now, WcStatus::WrFlushErr);
        }
    }

    /// Whether SF is to do something: as in RC, what is lost ends with an error also where no completion was
    /// asked for.
    pub(super) fn sends_wait(&self) -> bool {
        self.send.una != self.posted()
    }

    /// SF is told nothing more.
    fn silence(&mut self) {
        self.channel = self.channel.silenced();
        (self.gate, self.changes, self.ignorant) = (0, Changes::default(), false);
    }

    /// SF is gone. Sends that wait for it fail, but not before RC's would, as its program may have all that
    /// it needs by then; receives stay posted until something is sent.
    pub(super) fn depart(&mut self, now: Nanos) {
        self.parted = true;
        self.silence();
        if self.state == SlState::Starting {
            /* what is sent from now on fails by silence, as RC's would */
            self.state = SlState::Ready;
        }
        if self.state == SlState::Ready && self.send.una != self.posted() {
            self.left_at.get_or_insert(now);
        }
    }

    /// When sends fail that SF left behind.
    fn left_due(&self) -> Option<Nanos> {
        let waits = self.state == SlState::Ready && self.send.una != self.posted();
        let left = self.left_at.filter(|_| waits)?;
        self.init.patience.time.map(|time| left + time)
    }

    /// SF is silent for too long: the oldest send says so, the rest is flushed.
    fn fail(&mut self, env: &mut E, now: Nanos) {
        self.silence();
        if self.state != SlState::Error {
            self.init.stats.retry_exceeded.inc();
            self.enter_error(env, now, WcStatus::RetryExcErr);
        }
    }

    /// The QP goes to ERR, by itself or because the program says so. The oldest send gets `status`.
    pub fn enter_error(&mut self, env: &mut E, now: Nanos, status: WcStatus) {
        let told = matches!(self.state, SlState::Starting | SlState::Ready);
        if self.state != SlState::Error {
            self.state = SlState::Error;
            self.flush(status);
            if self.init.setup.srq {
                env.event(AsyncEvent::LastWqeReached(self.init.qpn));
            }
        }
        if told && status != WcStatus::RetryExcErr {
            /* whoever has its peer's number by the time that this comes must not begin with it */
            self.channel.end();
            (self.gate, self.changes.given, self.ignorant) = (0, 0, false);
            self.ask(now, Control::Bye { why: 0 });
            self.poll_transmit(env, now);
        }
    }

    /// Completes everything that was posted, with an error: the oldest send with `first`.
    pub(super) fn flush(&mut self, first: WcStatus) {
        let mut status = first;
        while self.send.una != self.posted() {
            let index = self.index(self.send.una);
            let wqe = self.init.sq.wqe(index);
            self.send.una = self.send.una.wrapping_add(1);
            self.init.sq.release(index.wrapping_add(1));
            self.give(
                Queue::Send,
                Cqe { wr_id: wqe.wr_id, opcode: wqe.op.wc_opcode(), status, ..Cqe::default() },
            );
            status = WcStatus::WrFlushErr;
        }
        self.send.next = self.send.una;
        self.send.stop();
        let status = WcStatus::WrFlushErr;
        while self.recv.una != self.recv.next {
            let wr_id = self.recv_id(self.recv.una);
            self.recv.una = self.recv.una.wrapping_add(1);
            self.give(Queue::Recv, Cqe { wr_id, status, ..Cqe::default() });
        }
        self.recv.stop();
        if self.init.setup.srq {
            return;
        }
        let mut sges = [Default::default(); starverbs_core::nic::MAX_SGE];
        while let Some((wr_id, _)) = self.init.rq.take(&mut sges) {
            self.give(Queue::Recv, Cqe { wr_id, status, ..Cqe::default() });
        }
    }

    fn give(&self, queue: Queue, cqe: Cqe) {
        if !self.push(queue, &Cqe { qpn: self.init.qpn, ..cqe }, false) {
            self.init.stats.cq_overrun.inc();
        }
    }
}
