//! An [`SlQp`]'s timers: what is sent again, keep-alives, and when SF is given up.

use starverbs_core::Nanos;
use starverbs_core::mr::MrTable;

use crate::channel::ChannelMessage;
use crate::control::Control;
use crate::env::StarEnv;
use crate::stateless::send_control;
use crate::wire::Queue;

use super::linger::MAX_LINGER;
use super::track::{DeadlineKind, LATE};
use super::{Patience, SlQp, SlState};

/// WQEs sent again at one timeout: the oldest that SF has not stored and some behind it.
const BURST: u32 = 16;

/// After so many tries of a message for which no send waits, half a minute, SF is not asked again until it
/// sends something, as it does where it lacks a receive or a rule.
const MAX_PROBES: u32 = 128;

impl<E: StarEnv> SlQp<E> {
    /// Sends what is due, after any other call; `memory` is that of the process. `alone`: no other connection
    /// of the card waits for an answer. True: more waits for room in the port.
    pub fn poll_transmit(&mut self, env: &mut E, now: Nanos, memory: &MrTable<E::Mrs>, alone: bool) -> bool {
        if !self.send_messages(env, now) {
            return true;
        }
        self.supply(env, now, memory, alone);
        self.has_more()
    }

    /// Sends the message that is due. False: it waits for room in the port.
    pub(super) fn send_messages(&mut self, env: &mut E, now: Nanos) -> bool {
        let due = self.channel.deadline().is_some_and(|due| due <= now);
        if !due || !env.can_send_star() {
            return !due;
        }
        if let Some(ChannelMessage { seq, message }) = self.channel.poll(now) {
            send_control(env, &self.peer, self.init.qpn, seq, Some(&message));
        }
        true
    }

    /// When [`handle_timeout`](SlQp::handle_timeout) is due.
    pub fn next_deadline(&self) -> Option<Nanos> {
        let message = self.channel.deadline();
        if self.state != SlState::Ready {
            return message;
        }
        let all =
            [self.send.deadline(), self.recv.deadline(), message, self.keepalive_due(), self.left_due()];
        let first = all.into_iter().fold(Nanos::MAX, |first, due| first.min(due.unwrap_or(Nanos::MAX)));
        (first < Nanos::MAX).then_some(first)
    }

    /// When SF gets a KeepAlive: sends are under way, signaled or not, or wait for rules that another
    /// connection sends.
    fn keepalive_due(&self) -> Option<Nanos> {
        let held = self.is_closed() && self.send.next != self.posted();
        let under_way = self.send.una != self.send.next;
        let waits = self.state == SlState::Ready && (under_way || held) && self.channel.waiting() == 0;
        (waits && self.left_at.is_none()).then(|| self.quiet_since + self.init.keepalive)
    }

    /// Whether all that is due is a message that had no answer for half a minute, and for which no send
    /// waits. It is repeated ever more seldom, in case SF is there again.
    pub fn is_only_probing(&self) -> bool {
        self.channel.tries() >= MAX_PROBES
            && !self.sends_wait()
            && self.next_deadline() == self.channel.deadline()
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, env: &mut E, now: Nanos) {
        let mut patience = self.init.patience;
        if self.state == SlState::Error {
            /* only the Bye is left */
            patience.time = Some(patience.time.map_or(MAX_LINGER, |time| time.min(MAX_LINGER)));
        }
        let asking = self.channel.deadline().is_some_and(|due| due <= now);
        if self.state != SlState::Error && !self.sends_wait() {
            /* as in RC, an end that sends nothing waits without limit */
            self.channel.restart_wait(now);
            if self.state == SlState::Ready && self.channel.tries() >= MAX_PROBES {
                self.channel.sleep();
            }
        }
        if self.recv.tries() >= MAX_PROBES {
            self.recv.sleep();
        }
        if asking && self.has_asked_enough(now, &patience) {
            return self.fail(env, now);
        }
        if self.left_due().is_some_and(|due| due <= now) {
            return self.fail(env, now);
        }
        if self.keepalive_due().is_some_and(|due| due <= now) {
            if self.detached {
                /* SF has stored them, and is gone */
                self.left_at = Some(now);
            } else {
                self.push_message(now, Control::KeepAlive);
            }
        }
        for queue in [Queue::Send, Queue::Recv] {
            if self.state != SlState::Ready {
                break;
            }
            /* receives wait for ever, as in RC */
            let time = patience.time.filter(|_| queue == Queue::Send);
            match self.track(queue).poll(now, &Patience { time, ..patience }) {
                Some(DeadlineKind::Resend(low)) => self.send_again(env, queue, low, BURST),
                Some(DeadlineKind::GiveUp) => self.fail(env, now),
                None => (),
            }
        }
        self.send_messages(env, now);
    }

    /// Whether SF is to be given up, as the message that is due again has had no answer for the patience.
    /// After a local stall what came meanwhile is read first.
    fn has_asked_enough(&mut self, now: Nanos, patience: &Patience) -> bool {
        let late = self.channel.local_stall(now);
        let over = patience.is_over(self.channel.tries(), self.channel.waited(now));
        self.stall_discounted = over && late > LATE && !self.stall_discounted;
        if self.stall_discounted {
            self.channel.postpone(now, now + LATE);
        }
        over && !self.stall_discounted
    }
}
