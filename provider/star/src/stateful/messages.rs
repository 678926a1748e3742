//! Control messages while the connection lasts: SL adds and removes rules, SF asks for receives of a shared
//! queue, either end sends its Bye.

use starverbs_core::env::SendQueue;
use starverbs_core::{Gid, Nanos, Psn, QpState};

use super::clock::KEEPALIVE;
use super::window::Of;
use super::{Answer, CardCtx, Ended, SlTerms, Stateful};
use crate::channel::{Arrival, ChannelMessage};
use crate::control::{Control, MAX_CONTROL, Setup};
use crate::env::StarEnv;
use crate::wire::{Prefix, Ptype, StarHead, StarPacket};

impl<E: StarEnv> Stateful<E> {
    /// A control message, or the answer to one, came from `source`.
    pub(super) fn take_control(
        &mut self,
        card: &mut CardCtx<'_, E>,
        source: &Gid,
        packet: &StarPacket<'_>,
    ) -> bool {
        let header = &packet.header;
        let sender = Prefix { qpn: self.peer_qpn, epoch: self.epoch };
        if *source != self.source || header.qpn != self.local.qpn || packet.prefix != Some(sender) {
            return false;
        }
        if header.ptype == Ptype::Ea {
            if !packet.data.is_empty() {
                return false;
            }
            let answered = self.channel.answered(header.psn);
            /* behind a Want there is another soon */
            if !matches!(answered, Some(Control::Want { .. })) {
                self.channel.rest();
            }
            return answered.is_some();
        }
        match self.channel.arrival(header.psn) {
            Arrival::Early => {}
            /* the answer to the one behind it shows that this one has come */
            Arrival::Duplicate if matches!(self.answer, Answer::After(..)) => {}
            Arrival::Duplicate => self.answer = Answer::Owed(header.psn),
            Arrival::Next => {
                let Some(message) = Control::decode(packet.data) else { return false };
                if let Some(at) = self.on_message(card, message) {
                    self.answer = Answer::After(header.psn, at);
                    self.arm(at.max(card.now + 1));
                    self.answer_due(card.now);
                }
            }
        }
        true
    }

    /// Executes a message of SL; gives when it may be answered. `None`: not now, and SL repeats it.
    fn on_message(&mut self, card: &mut CardCtx<'_, E>, message: Control) -> Option<Nanos> {
        match message {
            Control::Rule(rule) => {
                card.registry.add(self.conn, rule).ok()?;
                card.registry.count(card.stats);
                Some(card.now)
            }
            Control::Unrule { key } => {
                let at = card.registry.remove(self.conn, key, card.now, self.lifetime(card.path));
                card.registry.count(card.stats);
                Some(at)
            }
            Control::Begin { known } => {
                if known.is_none() || known == card.registry.sum(self.conn) {
                    self.open();
                } else if !self.channel.holds(&Control::ResendRules) {
                    self.channel.send(Control::ResendRules).ok()?;
                }
                Some(card.now)
            }
            Control::RuleSum(theirs) => {
                self.on_rule_sum(card, theirs)?;
                Some(card.now)
            }
            Control::Setup(again) => {
                /* SL began in RTR, and is in RTS now; or its program has changed what may change there */
                let Setup { access, max_rd_atomic, rnr_retry, min_rnr_timer, .. } = again;
                self.terms = SlTerms { access, max_rd_atomic, rnr_retry, min_rnr_timer, ..self.terms };
                Some(card.now)
            }
            Control::KeepAlive => {
                self.report();
                Some(card.now)
            }
            Control::Bye { recvs, .. } => Some(self.handle_bye(card, recvs)),
            /* role messages are over; others need an answer alone */
            _ => Some(card.now),
        }
    }

    /// A message that was done is answered once nothing that left before can be under way.
    pub(super) fn answer_due(&mut self, now: Nanos) {
        if let Answer::After(seq, at) = self.answer
            && at <= now
        {
            self.channel.accept();
            self.answer = Answer::Owed(seq);
        }
    }

    /// Sends a control message, or the answer to one, if there is one to send.
    pub(super) fn send_control(&mut self, card: &mut CardCtx<'_, E>) -> bool {
        if let Answer::Owed(seq) = self.answer {
            self.answer = Answer::None;
            let head = StarHead::control_ack(self.peer_qpn, self.prefix(), seq);
            self.post(card, &head, &[]);
            return true;
        }
        self.queue_messages(card.now);
        let Some(ChannelMessage { seq, message }) = self.channel.poll(card.now) else { return false };
        let mut room = [0; MAX_CONTROL];
        let Some(len) = message.encode(&mut room) else { return false };
        let head = StarHead::control(self.peer_qpn, self.prefix(), seq, len as u16);
        self.post(card, &head, room.get(..len).unwrap_or(&[]));
        if let Some(at) = self.channel.deadline() {
            self.arm(at);
        }
        true
    }

    /// Queues the messages that are due.
    fn queue_messages(&mut self, now: Nanos) {
        if self.quiesced {
            /* SL may have left */
            return;
        }
        /* without memory they are queued later; one Want waits at a time, as the next is the larger one */
        if let Some(upto) = self.wants_recvs()
            && self.wanted != upto
            && self.channel.count(|message| matches!(message, Control::Want { .. })) == 0
            && self.channel.send(Control::Want { upto: upto.get() }).is_ok()
        {
            self.wanted = upto;
        }
        if self.keepalive_due().is_some_and(|due| due <= now) {
            self.asks(now);
            _ = self.channel.send(Control::KeepAlive);
        }
        if let Some(status) = self.refused.filter(|_| self.quiet_at <= now)
            && self.channel.send(Control::Bye { why: status as u8, recvs: Psn::default() }).is_ok()
        {
            self.refused = None;
        }
    }

    /// Whether messages are to leave, now or later, or to be queued.
    #[inline]
    pub(super) fn has_messages(&self) -> bool {
        self.terms.srq || self.answer != Answer::None || self.is_message_due()
    }

    /// Whether [`message_due`](Stateful::message_due) is some time.
    #[inline]
    pub(super) fn is_message_due(&self) -> bool {
        self.refused.is_some()
            || matches!(self.answer, Answer::After(..))
            || self.channel.deadline().is_some()
            || self.keepalive_due().is_some()
    }

    /// When a message or an answer is due.
    pub(super) fn message_due(&self) -> Option<Nanos> {
        let refused = self.refused.map(|_| self.quiet_at);
        let answer = if let Answer::After(_, at) = self.answer { Some(at) } else { None };
        [refused, answer, self.channel.deadline(), self.keepalive_due()].into_iter().flatten().min()
    }

    /// When SL gets a KeepAlive: a WQE waits for a receive, or for SL's rules, which a dead SL never sends.
    /// Packets under way ask as well, and are given up as this is.
    #[inline]
    fn keepalive_due(&self) -> Option<Nanos> {
        let [ours, theirs] = &self.streams;
        let since = ours.rnr_since.max(theirs.rnr_since);
        let asks = !self.open || self.inquiry.is_open();
        if since == 0 && !asks { None } else { self.keepalive_after(since, asks) }
    }

    /// The same, where a WQE waits for a receive since then, or one may for SL's rules.
    #[cold]
    fn keepalive_after(&self, since: Nanos, asks: bool) -> Option<Nanos> {
        let begins = asks && self.streams[Of::Local as usize].una != self.local.sq.posted();
        let connected = self.state == QpState::Rts && self.ended == Ended::Not && !self.quiesced;
        let waits = connected && (since != 0 || begins) && self.channel.waiting() == 0;
        waits.then(|| self.last_inbound.max(since) + KEEPALIVE)
    }

    fn prefix(&self) -> Prefix {
        Prefix { qpn: self.local.qpn, epoch: self.epoch }
    }

    fn post(&self, card: &mut CardCtx<'_, E>, head: &StarHead, data: &[u8]) {
        if let Some(to) = card.registry.control_dest(self.conn) {
            card.env.send_star(to, head, data, &[], false);
        }
    }

    /// How many of SL's receive WQEs SF wants to have, if they are shared: all before this sequence. `None`:
    /// they are not, or enough are here.
    fn wants_recvs(&self) -> Option<Psn> {
        if !self.terms.srq || self.state != QpState::Rts {
            return None;
        }
        let wanted = self.unmatched().min(self.recvs.depth());
        let last = self.next_recv.plus(wanted).plus(ONE_BEFORE);
        (wanted > 0 && self.recvs.get(last).is_none()).then(|| last.plus(1))
    }
}

/// One before, in 24 bits.
pub(super) const ONE_BEFORE: u32 = starverbs_core::QPN_MASK;
