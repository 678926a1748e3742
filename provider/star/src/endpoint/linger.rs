//! The end of a connection at SL: its Bye, without the QP.

use starverbs_core::{Gid, Nanos, Qpn};

use crate::channel::{Arrival, ChannelMessage, ControlChannel};
use crate::control::Control;
use crate::env::StarEnv;
use crate::stateless::{SfPeer, send_control};
use crate::wire::{Prefix, Ptype, StarPacket};

use super::SlQp;

/// Longest time for which the Bye is repeated to a peer that does not answer, ns; its own patience does the
/// rest.
pub(super) const MAX_LINGER: Nanos = 2_000_000_000;

/// What is left of a connection whose QP is no more: messages without an answer.
#[derive(Debug)]
pub struct Linger {
    qpn: Qpn,
    peer: SfPeer,
    channel: ControlChannel,
    until: Nanos,
    /// SF has answered the Bye
    confirmed: bool,
}

impl<E: StarEnv> SlQp<E> {
    /// Whether SF knows that the connection is over, and sends nothing for it any more.
    pub fn is_confirmed(&self) -> bool {
        self.sf_ended
    }

    /// The QP ends, or begins anew; gives what lingers. `others_send`: other connections send its memory
    /// messages.
    pub fn close(mut self, env: &mut E, now: Nanos, others_send: bool) -> Option<Linger> {
        if others_send {
            self.channel.retract_memory();
        }
        self.channel.end();
        self.channel.wake(now);
        if self.is_connected() {
            self.channel.reuse(&mut self.spare);
            /* without memory the peer finds out by silence */
            _ = self.channel.send(Control::Bye { why: 0, recvs: self.received(env) });
        }
        let patience = self.init.patience.time.map_or(MAX_LINGER, |time| time.min(MAX_LINGER));
        let (qpn, until) = (self.init.qpn, now + patience);
        let linger = Linger { qpn, peer: self.peer, channel: self.channel, until, confirmed: self.sf_ended };
        let silent = linger.channel.waiting() == 0;
        (!silent).then_some(linger)
    }
}

impl Linger {
    /// Its QPN, and the epoch of the connection.
    pub fn prefix(&self) -> Prefix {
        Prefix { qpn: self.qpn, epoch: self.peer.epoch }
    }

    /// Whether SF knows that the connection is over, and sends nothing for it any more.
    pub fn is_confirmed(&self) -> bool {
        self.confirmed
    }

    /// When [`poll`](Linger::poll) has something to do.
    pub fn next_deadline(&self) -> Nanos {
        self.channel.deadline().unwrap_or(0).min(self.until)
    }

    /// Sends what is due. True: nothing is left.
    pub fn poll<E: StarEnv>(&mut self, env: &mut E, now: Nanos) -> bool {
        if self.channel.waiting() == 0 || now >= self.until {
            return true;
        }
        if env.can_send_star()
            && let Some(ChannelMessage { seq, message }) = self.channel.poll(now)
        {
            send_control(env, &self.peer, self.qpn, seq, Some(&message));
        }
        false
    }

    /// A packet with M set for what was the QP came from `source`. True: nothing is left.
    pub fn handle_control<E: StarEnv>(
        &mut self,
        env: &mut E,
        now: Nanos,
        source: &Gid,
        packet: &StarPacket<'_>,
    ) -> bool {
        let known = self.peer.has_sent(source, packet);
        if !known {
            return false;
        }
        let seq = packet.header.psn;
        if packet.header.ptype == Ptype::Ea {
            let answered = self.channel.answered(seq);
            self.confirmed |= matches!(answered, Some(Control::Bye { .. }));
        } else {
            let arrival = self.channel.arrival(seq);
            if arrival == Arrival::Next {
                self.channel.accept();
            }
            if arrival != Arrival::Early {
                send_control(env, &self.peer, self.qpn, seq, None);
            }
        }
        self.poll(env, now)
    }
}
