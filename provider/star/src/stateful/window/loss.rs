//! Which packets are lost (docs/star.md, "Loss recovery").
//!
//! An answer shows that packets of its lane are lost that left [`LATE`] transmissions before it, or well
//! before it in time, and have no answer, as in RFC 8985. Silence alone shows no loss: after a timeout two
//! packets leave as tail-loss probes, and the answers to them show what is lost.

use starverbs_core::{Nanos, Psn};

use super::{InFlight, PacketState, PacketWindow, base, copy, number};

/// Tail-loss probes after a timeout.
pub(super) const TAIL_PROBES: u16 = 2;
/// Transmissions by which a packet may be overtaken without being taken for lost.
const LATE: u32 = 3;

impl InFlight {
    /// Whether it is in flight, although what left well behind it in its lane, of this order and at that
    /// time, has its answer.
    fn is_overtaken(&self, (order, sent): (u32, Nanos), disorder: Nanos) -> bool {
        let late = self.order + LATE <= order || self.sent + disorder < sent;
        self.state == PacketState::Flight && late
    }
}

impl PacketWindow {
    /// A packet's answer came too early to be of use: it is to be asked for again.
    pub(in super::super) fn refuse(&mut self, psn: Psn) {
        let at = number(psn);
        self.ring[at].on_ack(copy(psn));
        self.lose(at);
    }

    /// SL's card could not do yet what this transmission asks for, as something before it is not done. Of
    /// what left before it, that shows as much as an answer. The packet is to be sent again, unless it was.
    pub(in super::super) fn refuse_early(&mut self, psn: Psn) {
        let at = number(psn);
        let entry = &mut self.ring[at];
        if entry.on_ack(copy(psn)) && entry.copy() == copy(psn) {
            let (lane, transmission) = (entry.lane(), (entry.order, entry.sent));
            self.note_answered(lane, transmission);
            self.lose(at);
        }
    }

    /// SL's card has this packet, and does it once those before it are there. Gives it, and whether it is the
    /// last transmission that is answered; `None`: nothing new.
    pub(in super::super) fn keep(&mut self, psn: Psn) -> Option<(InFlight, bool)> {
        let at = number(psn);
        let entry = &mut self.ring[at];
        if !entry.on_ack(copy(psn)) || entry.state == PacketState::Kept {
            return None;
        }
        let (entry, newest) = (*entry, entry.copy() == copy(psn));
        if newest {
            self.note_answered(entry.lane(), (entry.order, entry.sent));
        }
        self.settle(at);
        self.ring[at].state = PacketState::Kept;
        self.kept += 1;
        Some((entry, newest))
    }

    /// What SL's card keeps, and has nothing missing before it, was done by now: its answer comes, or is
    /// lost, or the card has forgotten it. It is in flight again, as if it left now. Gives whether there was
    /// any.
    pub(in super::super) fn await_kept(&mut self, now: Nanos) -> bool {
        let before = self.kept;
        while self.kept > 0
            && let Some(at) = self.oldest_of(0)
            && self.ring[at].state == PacketState::Kept
        {
            let order = self.lanes[0].order;
            for psn in self.each_from(self.first[0]) {
                let entry = &mut self.ring[number(psn)];
                match entry.state {
                    _ if entry.lane() != 0 => continue,
                    PacketState::Done => continue,
                    PacketState::Kept => (),
                    PacketState::Flight | PacketState::Lost => return self.kept < before,
                }
                (entry.state, entry.order, entry.sent) = (PacketState::Flight, order, now);
                /* no answer says that anything arrived which left now */
                entry.waiting = 0;
                self.kept -= 1;
                self.flight += 1;
                self.bytes += entry.cost();
            }
        }
        self.kept < before
    }

    fn lose(&mut self, at: u32) -> bool {
        let entry = &mut self.ring[at];
        let was = entry.state == PacketState::Flight;
        if was {
            entry.state = PacketState::Lost;
            self.flight -= 1;
            self.bytes -= entry.cost();
            self.lost += 1;
        }
        was
    }

    /// The first packet of a lane that is not done; looks at each once. `None`: there is none.
    pub(super) fn oldest_of(&mut self, lane: usize) -> Option<u32> {
        let of = |entry: &InFlight| entry.state != PacketState::Done && entry.lane() == lane;
        let found = self.each_from(self.first[lane]).find(|psn| of(&self.ring[number(*psn)]));
        self.first[lane] = found.unwrap_or(self.next);
        found.map(number)
    }

    /// Declares lost what was overtaken, by others or by so much time, in the lanes of which something was
    /// answered since this was asked. Gives what the lost packets cost: those that asked for no answer go
    /// again with one that was lost, and count as one; those that did not leave cost nothing.
    pub(in super::super) fn infer(&mut self, disorder: Nanos) -> u32 {
        let answered = core::mem::take(&mut self.answered);
        (0..answered.len()).filter(|lane| answered[*lane]).map(|lane| self.infer_in(lane, disorder)).sum()
    }

    fn infer_in(&mut self, lane: usize, disorder: Nanos) -> u32 {
        let newest = self.lanes[lane].newest();
        let Some(at) = self.oldest_of(lane) else { return 0 };
        let oldest = &self.ring[at];
        /* one that left once left before all behind it */
        let first = oldest.state == PacketState::Flight && oldest.tries == 1;
        if first && !oldest.is_overtaken(newest, disorder) {
            return 0;
        }
        let (mut lost, mut quiet) = (0, 0);
        for psn in self.each_from(self.first[lane]) {
            let at = number(psn);
            let entry = self.ring[at];
            if entry.lane() == lane && entry.is_overtaken(newest, disorder) && self.lose(at) {
                match entry.tries {
                    1 if entry.eager => {}
                    1 if entry.quiet => quiet = quiet.max(entry.cost()),
                    _ => lost += entry.cost(),
                }
            }
        }
        lost + quiet
    }

    /// A timeout: nothing was answered that was sent at or before `then`. Makes the oldest of those tail-loss
    /// probes; gives how many.
    pub(in super::super) fn expire(&mut self, then: Nanos, now: Nanos) -> u16 {
        if self.oldest().is_none_or(|oldest| oldest > then) {
            return 0;
        }
        /* those of before may wait for what is lost now */
        (self.probed_at, self.tail_probes) = (now, 0);
        for psn in self.each() {
            let at = number(psn);
            if self.tail_probes < TAIL_PROBES && self.ring[at].sent <= then && self.lose(at) {
                self.tail_probes += 1;
            }
        }
        self.tail_probes
    }

    /// Since when nothing was answered of what is in flight, and nothing was done about it.
    pub(in super::super) fn oldest(&self) -> Option<Nanos> {
        let sent = self.each().filter_map(|psn| {
            let entry = &self.ring[number(psn)];
            (entry.state == PacketState::Flight).then_some(entry.sent)
        });
        sent.min().map(|sent| sent.max(self.probed_at))
    }

    /// How often the packet that was sent most often was sent.
    pub(in super::super) fn most_tries(&self) -> u8 {
        let tries = self.each().map(|psn| &self.ring[number(psn)]).filter(|e| e.state != PacketState::Done);
        tries.map(|entry| entry.tries).max().unwrap_or(0)
    }

    /// The first packet to be sent again of those that `may` go now.
    pub(in super::super) fn next_lost(&self, may: impl Fn(&InFlight) -> bool) -> Option<(Psn, InFlight)> {
        if self.lost == 0 {
            return None;
        }
        self.each().find_map(|psn| {
            let entry = &self.ring[number(psn)];
            (entry.state == PacketState::Lost && may(entry)).then_some((psn, *entry))
        })
    }

    /// Whether the next lost packet leaves as a tail-loss probe, whatever else is in flight.
    pub(in super::super) fn is_probing(&self) -> bool {
        self.tail_probes > 0
    }

    /// A lost packet leaves again, under the PSN that this gives.
    pub(in super::super) fn sent_again(&mut self, psn: Psn, now: Nanos) -> Psn {
        let at = number(psn);
        if self.ring[at].state == PacketState::Lost {
            self.ring[at].state = PacketState::Flight;
            self.lost -= 1;
            self.tail_probes = self.tail_probes.saturating_sub(1);
            self.note_sent(at, now);
        }
        base(psn).plus(self.ring[at].copy())
    }
}
