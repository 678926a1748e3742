//! Control messages of SF: answers, and what SF asks of an [`SlQp`].

use starverbs_core::{AsyncEvent, Gid, Nanos, Psn, WcStatus};

use crate::channel::Arrival;
use crate::control::Control;
use crate::env::StarEnv;
use crate::stateless::send_control;
use crate::wire::{Ptype, Queue, StarPacket};

use super::{SlQp, SlState, is_gate};

impl<E: StarEnv> SlQp<E> {
    /// A packet with M set for this QP came from `source`. See [`StarPacket::open`].
    pub fn handle_control(&mut self, env: &mut E, now: Nanos, source: &Gid, packet: &StarPacket<'_>) {
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
            let arrival = self.channel.arrival(seq);
            if arrival == Arrival::Next {
                self.channel.accept();
                self.on_message(env, now, &message);
            }
            if arrival != Arrival::Early {
                send_control(env, &self.peer, self.init.qpn, seq, None);
            }
        }
        self.send_messages(env, now);
    }

    fn answered(&mut self, seq: Psn) {
        let Some(message) = self.channel.answered(seq) else { return };
        self.gate -= u32::from(is_gate(&message));
        self.changes.count(&message, u32::wrapping_sub);
        self.sf_ended |= matches!(message, Control::Bye { .. });
        if self.state == SlState::Starting {
            self.state = SlState::Ready;
        }
        self.spare = self.channel.rest().or(self.spare.take());
    }

    /// Executes a message of SF.
    fn on_message(&mut self, env: &mut E, now: Nanos, message: &Control) {
        match *message {
            Control::Want { upto } if Psn::new(upto).since(self.wanted) > 0 => self.wanted = Psn::new(upto),
            /* all rules are being sent: SF cannot have them queued once more */
            Control::ResendRules if self.channel.holds(&Control::Begin { known: None }) => (),
            Control::ResendRules => self.sf_lacks_rules = true,
            Control::RuleQuery => self.sum_wanted = true,
            Control::Bye { why, .. } => self.on_bye(env, now, why),
            _ => (),
        }
    }

    /// SF ends the connection. Completions that it sent before are in memory.
    fn on_bye(&mut self, env: &mut E, now: Nanos, why: u8) {
        self.sf_ended = true;
        for queue in [Queue::Send, Queue::Recv] {
            self.complete(env, now, queue);
        }
        let event = match WcStatus::from_code(why) {
            /* as if SF did not answer any more, which RC sees when it sends */
            Some(WcStatus::Success) => return self.detach(now),
            Some(WcStatus::RemAccessErr) => AsyncEvent::QpAccessErr(self.init.qpn),
            Some(WcStatus::RemInvReqErr) => AsyncEvent::QpReqErr(self.init.qpn),
            _ => AsyncEvent::QpFatal(self.init.qpn),
        };
        if self.state != SlState::Error {
            env.event(event);
            self.enter_error(env, now, WcStatus::WrFlushErr);
        }
    }
}
