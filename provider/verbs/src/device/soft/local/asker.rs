//! A channel in which this card asks: what is under way there, and who waits for what.

use std::collections::VecDeque;
use std::sync::Arc;

use starverbs_backend::{Asking, Peers, SessionId, SharedDoorbell};
use starverbs_core::{Nanos, Qpn};
use starverbs_rings::{Broken, DataRoom};

use super::record::LocalRecord;

/// A channel in which this card asks.
pub(super) struct AskingChannel {
    pub(super) channel: Asking,
    /// `None`: the other end is this card's, too
    pub(super) session: Option<SessionId>,
    /// The other end's, if there is one
    pub(super) doorbell: Option<Arc<SharedDoorbell>>,
    /// Blocks of the other end's process, as far as was asked for them
    pub(super) blocks: Vec<u32>,
    /// Records up to this one were read, and their owners know it
    pub(super) completed: u32,
    /// QPs that wait for room
    pub(super) waiting: VecDeque<Qpn>,
    /// What is to be said first when there is room
    pub(super) control: VecDeque<LocalRecord>,
    /// WQEs of QPs that were begun and are not complete
    pub(super) under_way: u32,
    /// QPs that use it
    pub(super) users: u32,
    /// The other end is gone
    pub(super) ended: bool,
    /// How far the other end was when it was last looked, and when that changed
    pub(super) seen: (u32, u32),
    pub(super) answers: u32,
    pub(super) progress_at: Nanos,
    pub(super) dirty: bool,
}

impl AskingChannel {
    /// Whether the other end has something to do.
    #[inline]
    pub(super) fn waits(&self) -> bool {
        self.has_requests() || !self.control.is_empty()
    }

    /// Whether nothing is under way, and nothing has come.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        !self.waits() && !self.channel.answers.has_next()
    }

    /// Whether QPs wait for what the other end does.
    #[inline]
    pub(super) fn has_requests(&self) -> bool {
        self.under_way > 0 || !self.waiting.is_empty()
    }

    /// Room for a record with `len` bytes of data. None either where the slot still says whose request ended
    /// with the record that was there before, and that QP does not know that it was read.
    #[inline]
    pub(super) fn room(&mut self, len: u32) -> Result<Option<DataRoom>, Broken> {
        let requests = &mut self.channel.requests;
        if requests.written().wrapping_sub(self.completed) >= requests.slots() {
            return Ok(None);
        }
        requests.room(len)
    }

    /// A record was written into the room that there was for it; gives how many there are with it. `last`:
    /// the WQE of a QP, whose request ends with it, is under way.
    #[inline]
    pub(super) fn ask(&mut self, room: DataRoom, last: Option<Qpn>) -> u32 {
        self.push(room, last.unwrap_or(0));
        if last.is_some() {
            if self.under_way == 0 {
                self.progress_at = 0;
            }
            self.under_way += 1;
        }
        self.channel.requests.written()
    }

    /// Whether records were read of which their QPs do not know.
    pub(super) fn lags(&self) -> bool {
        self.completed != self.channel.requests.read()
    }

    /// The other end may be asleep, and something was written.
    #[inline]
    pub(super) fn wake_answerer(&mut self, peers: &Peers) {
        self.dirty = false;
        let by = self.channel.requests.must_notify();
        self.notify(peers, by);
    }

    /// A record was written to its room. `owner`: the QP whose request ends with it, or 0.
    #[inline]
    pub(super) fn push(&mut self, room: DataRoom, owner: Qpn) {
        self.dirty = true;
        self.channel.requests.push_written(room, owner);
    }

    /// Records up to `given` were read: the next QP with a request among them, all of whose requests in a row
    /// are passed over at once; and how many those are.
    #[inline]
    pub(super) fn next_done(&mut self, given: u32) -> Option<(Qpn, u32)> {
        let (mut found, mut count) = (0, 0);
        while self.completed != given {
            let owner = self.channel.requests.tag(self.completed);
            if owner != 0 {
                if found != 0 && found != owner {
                    break;
                }
                (found, count) = (owner, count + 1);
            }
            self.completed = self.completed.wrapping_add(1);
        }
        (found != 0).then_some((found, count))
    }

    /// False: there is no room.
    pub(super) fn send_control_now(&mut self, record: &LocalRecord) -> bool {
        let Ok(Some(room)) = self.room(0) else { return false };
        record.write_to(room);
        self.push(room, 0);
        true
    }

    pub(super) fn send_waiting_control(&mut self) {
        while let Some(record) = self.control.front().copied() {
            if !self.send_control_now(&record) {
                return;
            }
            self.control.pop_front();
        }
        // A peer that slept for long let thousands wait: their memory goes, too.
        self.control = VecDeque::new();
    }

    /// For how long the other end has done nothing for WQEs that are under way.
    pub(super) fn quiet_for(&mut self, read: u32, now: Nanos) -> Nanos {
        let seen = (read, self.answers);
        if !self.has_requests() || self.progress_at == 0 || seen != self.seen {
            (self.seen, self.progress_at) = (seen, now);
        }
        now - self.progress_at.min(now)
    }
}
