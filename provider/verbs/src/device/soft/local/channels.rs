//! The channels of a card: those in which its queue pairs ask, and those in which they are asked.
//!
//! Owns which there are, what is under way in each, and who sleeps. A channel is named by a number that stays
//! its own as long as a queue pair uses it.

use std::collections::VecDeque;
use std::sync::Arc;

use starverbs_backend::{Answering, Asking, DATA_OF_MANY, MemoryFiles, Peers, SessionId, SharedDoorbell};
use starverbs_core::Qpn;
use starverbs_core::coalesce::Backlog;
use starverbs_rings::{Broken, DataRoom};

use super::asker::AskingChannel;
use super::notify::DoorbellWatch;
use super::record::{CHUNK, LocalRecord};
use super::responder::{LocalReply, ReadAnswer};
use super::turn::InboundControl;
use crate::share::{GatePass, Gates, PeerMemory};

/// Channels of a kind that use all of their memory: it adds up in a host where each process streams to all.
pub(super) const LARGE: usize = 8;

/// A channel in which this card is asked.
pub(super) struct Answerer {
    pub(super) channel: Answering,
    pub(super) session: Option<SessionId>,
    /// As an asker's
    pub(super) doorbell: Option<Arc<SharedDoorbell>>,
    /// No other has the same
    pub(super) serial: u32,
    /// The way to the other end's memory
    pub(super) memory: Option<Arc<PeerMemory>>,
    /// A READ whose answer is not complete
    pub(super) reading: Option<ReadAnswer>,
    /// There was no room for an answer
    pub(super) blocked: bool,
    pub(super) ended: bool,
    dirty: bool,
}

/// Channels in which something was written that the reader may be asleep for.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Asked {
    #[default]
    None,
    /// This one alone
    One(u32),
    /// Those that are marked
    Several,
}

/// All of a card.
pub(crate) struct Channels {
    pub(super) peers: Peers,
    pub(super) askers: Vec<Option<Box<AskingChannel>>>,
    pub(super) answerers: Vec<Answerer>,
    /// Of this card's QPs, where peers may have its memory
    pub(in super::super) gates: Option<Gates>,
    /// Long copies name a peer by its process's number
    pub(in super::super) traces: bool,
    /// The answer to the request that was executed last, where it has one: see [`LocalReply::Record`]
    pub(super) reply: LocalRecord,
    /// What stands before the next request
    pub(super) inbound_control: Option<InboundControl>,
    /// There are so many that a poll looks at one word for all
    pub(super) watch: DoorbellWatch,
    serial: u32,
    /// Others wake this card
    pub(super) asleep: bool,
    /// Something was written that the reader may be asleep for: in the channel of an asker, or of answerers
    pub(super) asked: Asked,
    pub(super) answered: bool,
    /// One does not keep to the rules
    pub(super) broken: bool,
    /// A turn has left what others see no reason to wake this card for
    pub(in super::super) unfinished: bool,
    /// There are more ends than a CPU's caches hold
    pub(in super::super) many: bool,
}

impl Channels {
    pub(in super::super) fn new(peers: Peers) -> Channels {
        Channels {
            peers,
            askers: Vec::new(),
            answerers: Vec::new(),
            gates: None,
            traces: false,
            reply: LocalRecord::default(),
            inbound_control: None,
            watch: DoorbellWatch::default(),
            serial: 0,
            asleep: false,
            asked: Asked::default(),
            answered: false,
            broken: false,
            unfinished: false,
            many: false,
        }
    }

    /// Whether a doorbell may wait for others.
    #[inline]
    pub(in super::super) fn is_crowded(&self) -> bool {
        self.backlog() != Backlog::Due
    }

    /// What a doorbell may wait for: of many QPs, whose contexts come from memory, behind requests that will
    /// be answered.
    #[inline]
    pub(in super::super) fn backlog(&self) -> Backlog {
        Backlog::of_channels(self.many, self.askers.iter().flatten().map(|asker| asker.under_way))
    }

    /// Whether there are any.
    #[inline]
    pub(in super::super) fn any(&self) -> bool {
        !self.askers.is_empty() || !self.answerers.is_empty()
    }

    #[inline]
    pub(super) fn asker(&mut self, channel: u32) -> Option<&mut AskingChannel> {
        self.askers.get_mut(channel as usize)?.as_deref_mut()
    }

    /// The channel to the process that has a block, which may be this one; opened if there is none. `None`:
    /// there can be none.
    pub(super) fn channel_to(&mut self, block: u32) -> Option<u32> {
        let position = |askers: &[Option<Box<AskingChannel>>], is_it: &dyn Fn(&AskingChannel) -> bool| {
            askers.iter().position(|asker| asker.as_ref().is_some_and(|asker| !asker.ended && is_it(asker)))
        };
        if let Some(at) = position(&self.askers, &|asker| asker.blocks.contains(&block)) {
            return Some(at as u32);
        }
        /* a process may have many blocks, and has one channel */
        let session = if self.peers.is_own(block) { None } else { Some(self.peers.session_to(block)?) };
        if let Some(at) = position(&self.askers, &|asker| asker.session == session) {
            self.asker(at as u32)?.blocks.push(block);
            return Some(at as u32);
        }
        let mut channel = match session {
            Some(session) => self.peers.open_channel(session)?,
            None => {
                let (channel, answering) = Asking::to_ourselves()?;
                self.add_answerer(None, answering, None);
                channel
            }
        };
        if self.askers.iter().flatten().count() >= LARGE {
            channel.requests.keep_to(DATA_OF_MANY);
        }
        let asker = AskingChannel {
            completed: channel.requests.written(),
            channel,
            session,
            doorbell: session.and_then(|session| self.peers.doorbell_of(session)),
            blocks: vec![block],
            waiting: VecDeque::new(),
            control: VecDeque::new(),
            under_way: 0,
            users: 0,
            ended: false,
            seen: (0, 0),
            answers: 0,
            progress_at: 0,
            dirty: false,
        };
        let at = self.askers.iter().position(Option::is_none).unwrap_or(self.askers.len());
        if at == self.askers.len() {
            self.askers.push(None);
        }
        if self.asleep {
            asker.channel.answers.sleep();
        }
        self.askers[at] = Some(Box::new(asker));
        self.await_doorbell_if_many(session);
        u32::try_from(at).ok()
    }

    /// Another process has made a channel, or this one to itself.
    pub(super) fn add_answerer(
        &mut self,
        session: Option<SessionId>,
        mut channel: Answering,
        memory: Option<Box<MemoryFiles>>,
    ) {
        if self.answerers.len() >= LARGE {
            channel.answers.keep_to(DATA_OF_MANY);
        }
        self.serial = self.serial.wrapping_add(1);
        let serial = self.serial;
        if self.asleep {
            channel.requests.sleep();
        }
        let pid = session.filter(|_| self.traces).and_then(|session| self.peers.pid_of(session));
        self.answerers.push(Answerer {
            channel,
            session,
            doorbell: session.and_then(|session| self.peers.doorbell_of(session)),
            serial,
            memory: memory.and_then(|files| PeerMemory::open(*files, pid).ok()).map(Arc::new),
            reading: None,
            blocked: false,
            ended: false,
            dirty: false,
        });
        self.await_doorbell_if_many(session);
    }

    /// The peer of one of this card's QPs asks for everything from now on.
    pub(super) fn close_gate(&mut self, gate: Option<GatePass>) {
        if let (Some(gates), Some(gate)) = (&mut self.gates, gate) {
            gates.close(gate);
        }
    }

    /// The way to the memory of who asks in a channel.
    pub(super) fn memory_of(&self, serial: u32) -> Option<Arc<PeerMemory>> {
        self.answerers.iter().find(|answerer| answerer.serial == serial)?.memory.clone()
    }

    /// A QP uses a channel from now on.
    pub(super) fn join(&mut self, channel: u32) {
        if let Some(asker) = self.asker(channel) {
            asker.users += 1;
            let users = asker.users as usize;
            asker.waiting.reserve(users.saturating_sub(asker.waiting.len()));
        }
    }

    /// A QP leaves it, with so many WQEs under way.
    pub(super) fn leave(&mut self, channel: u32, qpn: Qpn, under_way: u32) {
        self.forget(channel, under_way);
        if let Some(asker) = self.asker(channel) {
            asker.users = asker.users.saturating_sub(1);
        }
        self.await_room_no_more(channel, qpn);
    }

    /// A QP is not called when there is room.
    pub(super) fn await_room_no_more(&mut self, channel: u32, qpn: Qpn) {
        if let Some(asker) = self.asker(channel) {
            asker.waiting.retain(|waiting| *waiting != qpn);
        }
    }

    /// A channel, if its other end is there and no control record comes first.
    #[inline]
    pub(super) fn open_asker(&mut self, channel: u32) -> Option<&mut AskingChannel> {
        self.asker(channel).filter(|asker| !asker.ended && asker.control.is_empty())
    }

    /// Room for a record with `len` bytes of data.
    #[inline]
    pub(super) fn room(&mut self, channel: u32, len: u32) -> Option<DataRoom> {
        let asker = self.open_asker(channel)?;
        match asker.room(len) {
            Ok(room) => room,
            Err(Broken) => {
                (asker.ended, self.broken) = (true, true);
                None
            }
        }
    }

    /// [`AskingChannel::ask`] of a channel.
    #[inline]
    pub(super) fn ask(&mut self, channel: u32, room: DataRoom, last: Option<Qpn>) -> u32 {
        self.note_asked(channel);
        self.asker(channel).map_or(0, |asker| asker.ask(room, last))
    }

    /// A record was written in a channel.
    #[inline]
    pub(super) fn note_asked(&mut self, channel: u32) {
        let alone = self.asked == Asked::None || self.asked == Asked::One(channel);
        self.asked = if alone { Asked::One(channel) } else { Asked::Several };
    }

    /// Records that were written into a channel.
    pub(super) fn written(&mut self, channel: u32) -> u32 {
        self.asker(channel).map_or(0, |asker| asker.channel.requests.written())
    }

    /// Records of a channel that its other end has given back.
    pub(super) fn given(&mut self, channel: u32) -> Option<u32> {
        self.asker(channel)?.channel.requests.look().ok()
    }

    /// Whether its other end has records left, and is no further than it was then.
    pub(super) fn is_stuck_at(&mut self, channel: u32, given: u32) -> bool {
        self.given(channel) == Some(given) && self.written(channel) != given
    }

    /// Whether any request is under way in a channel.
    #[inline]
    pub(super) fn is_asking(&self, channel: u32) -> bool {
        self.askers.get(channel as usize).and_then(Option::as_ref).is_some_and(|asker| asker.under_way > 0)
    }

    /// A WQE is under way of which the other end knows nothing.
    pub(super) fn count(&mut self, channel: u32) {
        if let Some(asker) = self.asker(channel) {
            asker.under_way += 1;
        }
    }

    /// So many WQEs are under way no more.
    #[inline]
    pub(super) fn forget(&mut self, channel: u32, count: u32) {
        if let Some(asker) = self.asker(channel) {
            asker.under_way = asker.under_way.saturating_sub(count);
        }
    }

    /// A QP is called when there is room. False: there never will be.
    pub(super) fn await_room(&mut self, channel: u32, qpn: Qpn) -> bool {
        let asleep = self.asleep;
        match self.asker(channel) {
            Some(asker) if !asker.ended => {
                asker.waiting.push_back(qpn);
                if asleep {
                    /* it is to be woken then */
                    self.note_asked(channel);
                }
                true
            }
            _ => false,
        }
    }

    /// Sends a control record, now or when there is room.
    pub(super) fn send_control(&mut self, channel: u32, record: LocalRecord) {
        let Some(asker) = self.asker(channel).filter(|asker| !asker.ended) else { return };
        if !asker.control.is_empty() || !asker.send_control_now(&record) {
            asker.control.push_back(record);
        }
        self.note_asked(channel);
    }

    /// Control records that waited for room.
    #[inline]
    pub(super) fn send_waiting_control(&mut self, channel: u32) {
        let Some(asker) = self.askers.get_mut(channel as usize).and_then(Option::as_mut) else { return };
        if !asker.control.is_empty() {
            asker.send_waiting_control();
            self.note_asked(channel);
        }
    }

    /// A request is answered with a record.
    pub(super) fn reply_with(&mut self, record: LocalRecord) -> LocalReply {
        self.reply = record;
        LocalReply::Record
    }

    /// Writes an answer into its room.
    #[inline]
    pub(super) fn answer(&mut self, at: usize, record: &LocalRecord, room: DataRoom) {
        self.answered = true;
        let answerer = &mut self.answerers[at];
        answerer.dirty = true;
        answerer.channel.answers.push(&record.words(), room);
    }

    /// At the end of a turn: wakes those who sleep and have something to read. `took`: the turn may have
    /// taken what came. True: this card sleeps, and something has come meanwhile.
    #[inline]
    pub(in super::super) fn flush(&mut self, took: bool) -> bool {
        let changed = took | self.answered | (self.asked != Asked::None);
        match std::mem::take(&mut self.asked) {
            Asked::None => {}
            Asked::One(channel) => {
                if let Some(Some(asker)) = self.askers.get_mut(channel as usize) {
                    asker.wake_answerer(&self.peers);
                }
            }
            Asked::Several => self.wake_answerers(),
        }
        if std::mem::take(&mut self.answered) {
            self.wake_askers();
        }
        /* what the sleeper was to be woken for may be gone, and its wake-up, or be something else now; not
        where a request was executed on the peer's memory, and nothing was written */
        self.asleep && changed && self.prepare_to_sleep()
    }

    #[inline(never)]
    fn wake_answerers(&mut self) {
        for asker in self.askers.iter_mut().flatten().filter(|asker| asker.dirty) {
            asker.wake_answerer(&self.peers);
        }
    }

    /// Wakes those who wait for places of requests that were given back. What a program does with its
    /// completions comes first: the look takes a fence, which waits until the other end has let the line go.
    #[inline]
    pub(in super::super) fn wake_requesters(&mut self) {
        self.answerers.iter_mut().for_each(|answerer| answerer.wake_requester(&self.peers));
    }

    #[inline(never)]
    fn wake_askers(&mut self) {
        for answerer in &mut self.answerers {
            if std::mem::take(&mut answerer.dirty) {
                let by = answerer.channel.answers.must_notify();
                answerer.notify(&self.peers, by);
            }
        }
    }

    /// The card sleeps: others wake it from now on. True: there is something already.
    #[cold]
    pub(in super::super) fn prepare_to_sleep(&mut self) -> bool {
        self.asleep = true;
        self.wake_requesters();
        let mut busy = false;
        for asker in self.askers.iter_mut().flatten().filter(|asker| !asker.ended) {
            busy |= asker.waits() && (asker.channel.requests.sleep() != Ok(true) || asker.lags());
            busy |= !asker.channel.answers.sleep();
        }
        for answerer in self.answerers.iter_mut().filter(|answerer| !answerer.ended) {
            if answerer.blocked {
                busy |= answerer.channel.answers.sleep() != Ok(true);
            } else {
                busy |= !answerer.channel.requests.sleep();
            }
        }
        busy
    }

    /// Whether others wake this card.
    #[inline]
    pub(in super::super) fn is_asleep(&self) -> bool {
        self.asleep
    }

    /// The card is polled: others need not wake it.
    #[inline]
    pub(in super::super) fn stay_awake(&mut self) {
        if self.asleep {
            self.wake();
        }
    }

    #[cold]
    fn wake(&mut self) {
        self.asleep = false;
        self.poll_or_await();
    }

    /// Channels whose other end is gone, and that nobody uses any more, go.
    pub(super) fn drop_ended(&mut self) {
        for place in &mut self.askers {
            if place.as_ref().is_some_and(|asker| asker.ended && asker.users == 0) {
                *place = None;
            }
        }
        self.answerers.retain(|answerer| !answerer.ended);
    }
}

impl Answerer {
    /// The oldest request, if there is one.
    #[inline(always)]
    pub(super) fn next(&self) -> Option<LocalRecord> {
        self.channel.requests.peek().map(LocalRecord::of)
    }

    /// Whether there is a request, or one that is being answered.
    #[inline]
    pub(super) fn has_work(&self) -> bool {
        self.channel.requests.has_next() || self.reading.is_some()
    }

    /// As [`Channels::wake_requesters`], of this one.
    #[inline]
    pub(super) fn wake_requester(&mut self, peers: &Peers) {
        let by = self.channel.requests.must_notify();
        self.notify(peers, by);
    }

    /// Whether an answer is owed, or there was no room for one, or is none, as far as is known.
    #[inline]
    pub(super) fn may_be_blocked(&self) -> bool {
        self.blocked || self.reading.is_some() || self.channel.answers.is_full()
    }

    /// The places of requests that were executed go back. A requester that awaits its doorbell is notified
    /// now; one that sleeps, by [`Channels::wake_requesters`].
    #[inline]
    pub(super) fn give_back(&mut self, peers: &Peers) {
        self.channel.requests.publish();
        if self.channel.requests.is_awaited() {
            self.wake_requester(peers);
        }
    }

    /// Whether nothing has come, and nobody may wait for what was given back.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        !self.has_work() && !self.channel.requests.may_notify()
    }

    /// Where the data lies of a request that has no room for it; `None`: there can be none.
    #[inline]
    pub(super) fn data(&self, record: &LocalRecord) -> Option<*const u8> {
        if record.is_rendezvous() {
            /* it lies elsewhere, and is not looked for here */
            return Some(std::ptr::null());
        }
        self.channel.requests.data(record.at, record.len).filter(|_| record.len <= CHUNK)
    }
}
