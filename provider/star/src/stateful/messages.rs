//! Control messages while the connection lasts: SL adds and removes rules, SF asks for receives of a shared
//! queue, either end sends its Bye.

use starverbs_core::env::SendQueue;
use starverbs_core::{Gid, Nanos, Psn, QpState};

use super::clock::KEEPALIVE;
use super::window::Of;
use super::{Answer, CardCtx, Ended, SlTerms, Stateful, WqeStream};
use crate::channel::{Arrival, ChannelMessage};
use crate::control::{Control, MAX_CONTROL, Setup};
use crate::env::StarEnv;
use crate::wire::{Prefix, Ptype, Queue, StarHead, StarPacket};

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
        if !card.path.leads_to(source) || header.qpn != self.local.qpn || packet.prefix != Some(sender) {
            return false;
        }
        if header.ptype == Ptype::Ea {
            if !packet.data.is_empty() {
                return false;
            }
            let answered = self.channel.answered(header.psn);
            /* behind a Want there is another soon */
            if !matches!(answered, Some(Control::Want { .. })) {
                drop(self.channel.rest());
            }
            return answered.is_some();
        }
        match self.channel.arrival(header.psn) {
            Arrival::Early => {}
            /* the answer to the one behind it shows that this one has come */
            Arrival::Duplicate if self.answer_waits().is_some() => {}
            Arrival::Duplicate => self.answer = Answer::Owed,
            Arrival::Next => {
                let Some(message) = Control::decode(packet.data) else { return false };
                if let Some(at) = self.on_message(card, message) {
                    self.arm(at.max(card.now + 1));
                    self.answer_at(card.now, at);
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
                let access = access.bits() as u16;
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

    /// A message was done, and is answered at that time, when nothing that left before can be under way.
    /// Without memory it is not, and SL repeats it.
    fn answer_at(&mut self, now: Nanos, at: Nanos) {
        if at <= now {
            self.channel.accept();
            self.answer = Answer::Owed;
        } else if at == self.quiet_at {
            self.answer = Answer::Quiet;
        } else if let Ok(rare) = self.rare.make() {
            rare.answer_at = at;
            self.answer = Answer::Later;
        }
    }

    /// The answer leaves that was to wait, if it is time.
    pub(super) fn answer_due(&mut self, now: Nanos) {
        if let Some(at) = self.answer_waits() {
            self.answer_at(now, at);
        }
    }

    /// Until when the answer waits. `None`: there is none that does.
    pub(super) fn answer_waits(&self) -> Option<Nanos> {
        match self.answer {
            Answer::Quiet => Some(self.quiet_at),
            Answer::Later => self.rare.get().map(|rare| rare.answer_at),
            Answer::None | Answer::Owed => None,
        }
    }

    /// Sends a control message, or the answer to one, if there is one to send.
    pub(super) fn send_control(&mut self, card: &mut CardCtx<'_, E>) -> bool {
        if self.answer == Answer::Owed {
            self.answer = Answer::None;
            let head = StarHead::control_ack(self.peer_qpn, self.prefix(), self.channel.accepted());
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
            || self.answer_waits().is_some()
            || self.channel.deadline().is_some()
            || self.keepalive_due().is_some()
    }

    /// When a message or an answer is due.
    pub(super) fn message_due(&self) -> Option<Nanos> {
        let refused = self.refused.map(|_| self.quiet_at);
        [refused, self.answer_waits(), self.channel.deadline(), self.keepalive_due()]
            .into_iter()
            .flatten()
            .min()
    }

    /// When SL gets a KeepAlive: a WQE waits for a receive, or for SL's rules, which a dead SL never sends.
    /// Packets under way ask as well, and are given up as this is.
    #[inline]
    fn keepalive_due(&self) -> Option<Nanos> {
        let [ours, theirs] = &self.streams;
        let lacks = ours.lacks_recv() || theirs.lacks_recv();
        let asks = !self.open || self.inquiry.is_open();
        if lacks || asks { self.keepalive_after(asks) } else { None }
    }

    /// The same, where a WQE waits for a receive, or one may for SL's rules.
    #[cold]
    fn keepalive_after(&self, asks: bool) -> Option<Nanos> {
        let since = self.streams.iter().filter_map(WqeStream::lacks_recv_since).max().unwrap_or(0);
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
        let wanted = self.unmatched().min(self.completions[Queue::Recv as usize].depth());
        let last = self.next_recv.plus(wanted).plus(ONE_BEFORE);
        (wanted > 0 && self.recvs.get(last).is_none()).then(|| last.plus(1))
    }
}

/// One before, in 24 bits.
pub(super) const ONE_BEFORE: u32 = starverbs_core::QPN_MASK;
