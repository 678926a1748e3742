//! The end of a connection at SL: SF is told, without the QP.

use starverbs_core::{Gid, Nanos, Qpn};

use crate::channel::{Channel, Turn};
use crate::control::Control;
use crate::env::StarEnv;
use crate::stateless::{Peer, send_control};
use crate::wire::{Packet, Ptype};

use super::{SlInit, SlQp};

/// SF hears for so long at most that its peer is gone; else its own time tells it.
const LONGEST: Nanos = 2_000_000_000;

/// What is left of a connection whose QP is no more: a last word that SF may not have heard.
#[derive(Debug)]
pub struct Parting {
    qpn: Qpn,
    peer: Peer,
    channel: Channel,
    until: Nanos,
}

impl<E: StarEnv> SlQp<E> {
    /// The QP ends, or begins anew. Gives what it was made of, and what SF is still to be told.
    /// `others_tell`: not what it had to say of memory, as others do.
    pub fn close(mut self, now: Nanos, others_tell: bool) -> (SlInit<E>, Option<Parting>) {
        if others_tell {
            self.channel.recall();
        }
        self.channel.end();
        self.channel.wake(now);
        if self.speaks() {
            /* without memory the peer finds out by silence */
            _ = self.channel.send(Control::Bye { why: 0 });
        }
        let patience = self.init.patience.time.map_or(LONGEST, |time| time.min(LONGEST));
        let (qpn, until) = (self.init.qpn, now + patience);
        let parting = Parting { qpn, peer: self.peer, channel: self.channel, until };
        let silent = parting.channel.waiting() == 0;
        (self.init, (!silent).then_some(parting))
    }
}

impl Parting {
    /// Its number, and the epoch of the connection.
    pub fn of(&self) -> (Qpn, u32) {
        (self.qpn, self.peer.epoch)
    }

    /// When [`poll`](Parting::poll) has something to do.
    pub fn next_deadline(&self) -> Nanos {
        self.channel.deadline().unwrap_or(0).min(self.until)
    }

    /// Says what is to be said now. True: that is all.
    pub fn poll<E: StarEnv>(&mut self, env: &mut E, now: Nanos) -> bool {
        if self.channel.waiting() == 0 || now >= self.until {
            return true;
        }
        if env.can_send_star()
            && let Some((seq, message)) = self.channel.poll(now)
        {
            send_control(env, &self.peer, self.qpn, seq, Some(&message));
        }
        false
    }

    /// A packet with M set for what was the QP came from `source`. True: all is said.
    pub fn handle_control<E: StarEnv>(
        &mut self,
        env: &mut E,
        now: Nanos,
        source: &Gid,
        packet: &Packet<'_>,
    ) -> bool {
        let known = self.peer.has_sent(source, packet);
        if !known {
            return false;
        }
        let seq = packet.header.psn;
        if packet.header.ptype == Ptype::Ea {
            _ = self.channel.answered(seq);
        } else {
            let turn = self.channel.turn(seq);
            if turn == Turn::Now {
                self.channel.took();
            }
            if turn != Turn::Early {
                send_control(env, &self.peer, self.qpn, seq, None);
            }
        }
        self.poll(env, now)
    }
}
