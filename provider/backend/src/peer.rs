//! Sessions: one for each pair of processes of a host that have something to do with each other.
//!
//! A process listens under a name that says its block of QPNs, and under one for each XRC domain that it is
//! in. Who has something for it connects (SOCK_SEQPACKET), hands over the memory of a pair of rings for each
//! lane, and writes into them at once: the other need not be there to take it. What goes over the session:
//! - frames that reached the wrong process ([`crate::Rx`]), between processes of any users,
//! - links between those that share an XRC domain ([`crate::links`]), of one user.
//!
//! The kernel identifies the other end: SO_PEERCRED, and the name that it holds. What that end writes in
//! its rings, or claims of its blocks, is checked against it; nothing that it writes leads outside, stops
//! this process or keeps it busy. A byte on the socket wakes a reader that sleeps; its end is that
//! of the session, as is the end of the process (a pidfd), whichever comes first. Close-on-exec and
//! [`crate::let_go`] keep it from children.
//!
//! Owns names, sockets, rings, and who looks at which. It must not know what messages mean.

pub(crate) mod channel;
pub(crate) mod direct;
pub(crate) mod doorbell;
mod due;
pub(crate) mod hello;
mod memory;
#[cfg(test)]
mod rate;
mod session;
mod sessions;
pub(crate) mod socket;
#[cfg(test)]
mod tests;
pub(crate) mod trust;

use std::os::fd::{AsRawFd, RawFd};
use std::ptr::slice_from_raw_parts;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::socket::UnixAddr;
use starverbs_core::Nanos;
use starverbs_core::relay::LinkError;
use starverbs_rings::Written;

use crate::BackendError;
use crate::descriptor::Socket;
use crate::handover::{PATIENCE, PassedOn};
use crate::registry::{abstract_address, peer_name};
use crate::sockopt::{self, monotonic};
use channel::{Answering, Asking};
use direct::{MemoryFiles, OfferedMemory};
use doorbell::SharedDoorbell;
use session::{FRAMES, Sent};
use sessions::{AwakeConsumer, BlockRoute, Sessions};

/// Names a session. Its place may be another's later, with another serial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionId {
    slot: u16,
    serial: u32,
}

impl SessionId {
    fn bits(self) -> u64 {
        u64::from(self.serial) << 16 | u64::from(self.slot)
    }

    fn of_bits(bits: u64) -> SessionId {
        SessionId { slot: bits as u16, serial: (bits >> 16) as u32 }
    }
}

/// Of a listener that has no block of QPNs: each who connects to it has a session of its own.
pub(crate) const NO_BLOCK: u32 = 0;

/// Names what was listened under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SessionListenerId(u32);

/// Who takes messages out of sessions, each for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Consumer {
    Frames = 0,
    Links = 1,
}

impl Consumer {
    const ALL: [Consumer; 2] = [Consumer::Frames, Consumer::Links];
}

/// What a session has for links.
pub(crate) enum LinkNews {
    /// A message, its first bytes in the head and so many in all; `ours`: of a link that this end began
    Message { session: SessionId, ours: bool, len: usize },
    /// The session is over, and all messages have been taken
    Ended(SessionId),
}

/// What who has channels is told.
pub enum ChannelNews {
    /// The other end of a session has made a channel, and may have handed over the way to its memory
    Opened(SessionId, Box<Answering>, Option<Box<MemoryFiles>>),
    /// A session with channels is over. What was asked before lies in them
    Ended(SessionId),
    /// The other end of a session has handed over its doorbell
    Doorbell(SessionId, Arc<SharedDoorbell>),
    /// It has sent a wake-up though this process awaits its doorbell
    Woken(SessionId),
    /// The other end of a session broke the rules, and it is over
    Broken,
}

/// The sessions of a card. Clones are the same ones.
#[derive(Clone)]
pub struct Peers(Arc<SharedSessions>);

struct SharedSessions {
    port: u16,
    /// A forked child does not have the rings
    process: u32,
    fd: RawFd,
    sessions: Mutex<Sessions>,
    /// Sessions that each consumer looks at: hints, so that a look costs nothing where there are none
    awake: [AtomicUsize; Consumer::ALL.len()],
    /// The card is polled: it looks again soon, without a wake-up
    polled: AtomicBool,
    /// News of channels that wait
    news: AtomicUsize,
}

impl Peers {
    /// None yet, on the wire of UDP `port`.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new(port: u16) -> Result<Peers, BackendError> {
        let sessions = Sessions::new(port)?;
        let (fd, awake, polled) = (sessions.fd(), Default::default(), AtomicBool::new(false));
        let (process, sessions) = (std::process::id(), Mutex::new(sessions));
        let news = AtomicUsize::new(0);
        Ok(Peers(Arc::new(SharedSessions { port, process, fd, sessions, awake, polled, news })))
    }

    fn with<R>(&self, call: impl FnOnce(&mut Sessions) -> R) -> R {
        let mut sessions = self.0.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        let result = call(&mut sessions);
        for consumer in Consumer::ALL {
            self.0.awake[consumer as usize].store(sessions.awake(consumer), Ordering::Relaxed);
        }
        self.0.news.store(sessions.news.len(), Ordering::Relaxed);
        result
    }

    /// Whether they are this process's, and not those of the one that it was forked from.
    pub(crate) fn are_ours(&self) -> bool {
        self.0.process == std::process::id()
    }

    fn is_polled(&self) -> bool {
        self.0.polled.load(Ordering::Relaxed)
    }

    /// What to poll(2) for POLLIN, after [`Peers::prepare_to_sleep`].
    pub(crate) fn fd(&self) -> RawFd {
        self.0.fd
    }

    /// The card is polled from now on, so that the others need not wake it; or it may sleep at any time.
    pub(crate) fn set_polled(&self, polled: bool) {
        self.0.polled.store(polled, Ordering::Relaxed);
    }

    /// Whoever polled is about to sleep: the others send wake-up bytes from now on, and the descriptor is
    /// readable where there is something already.
    pub(crate) fn prepare_to_sleep(&self) {
        self.set_polled(false);
        self.with(Sessions::prepare_to_sleep);
    }

    /// Whoever looked goes away. Where the card is not polled, a sleeper on [`Peers::fd`] takes what was seen
    /// and left.
    #[inline]
    pub(crate) fn settle(&self) {
        if !self.is_polled() && self.0.awake.iter().any(|awake| awake.load(Ordering::Relaxed) != 0) {
            self.prepare_to_sleep();
        }
    }

    /// The others reach this process by `block` from now on. `None`: somebody else has the name.
    ///
    /// # Errors
    /// No descriptor is left, or no memory.
    pub(crate) fn offer_block(&self, block: u32) -> Result<Option<SessionListenerId>, BackendError> {
        let address = abstract_address(&peer_name(self.0.port, block));
        match self.listen(&address, block, None) {
            Err(error) if socket::is_taken(&error) => Ok(None),
            offered => offered.map(Some),
        }
    }

    /// Sessions begin under this name from now on, by processes of user `only`.
    ///
    /// # Errors
    /// The name is taken, or the system lacks something.
    pub(crate) fn listen(
        &self,
        address: &UnixAddr,
        block: u32,
        only: Option<libc::uid_t>,
    ) -> Result<SessionListenerId, BackendError> {
        self.with(|sessions| sessions.listen(address, block, only))
    }

    /// No session begins there any more.
    pub(crate) fn end_listening(&self, listener: SessionListenerId) {
        self.with(|sessions| sessions.end_listening(listener));
    }

    /// All sessions end, and none begins.
    pub(crate) fn close(&self) {
        self.with(Sessions::close);
    }

    /// Whether any is looked at for frames.
    #[inline]
    pub(crate) fn may_have_frames(&self) -> bool {
        self.0.awake[Consumer::Frames as usize].load(Ordering::Relaxed) != 0
    }

    /// Asks the kernel what there is. True: a socket that is [watched](Peers::watch) has something.
    pub(crate) fn look(&self) -> bool {
        self.with(Sessions::look)
    }

    /// Looks at a socket of somebody else's as well, whose messages are rare: one call sees all. It is taken
    /// out (`watch` is false) before it is closed.
    ///
    /// # Errors
    /// The kernel has no memory, or the user too many watches.
    pub(crate) fn watch(&self, socket: &Socket, watch: bool) -> Result<(), BackendError> {
        self.with(|sessions| sessions.watch(socket, watch))
    }

    /// Takes the next message of handed-on frames into `room`; gives its length.
    pub(crate) fn next_frames(&self, room: &mut [u8]) -> Option<usize> {
        let polled = self.is_polled();
        self.with(|sessions| {
            loop {
                match sessions.find(Consumer::Frames, polled)? {
                    AwakeConsumer::Message(id, _, len) if len > room.len() => sessions.break_off(id),
                    AwakeConsumer::Message(id, lane, _) => return Some(sessions.take(id, lane, &mut [room])),
                    AwakeConsumer::Drained(_) => {}
                }
            }
        })
    }

    /// Passes `head` and `body` as one message to the process that has `block`; waits for a reader that is
    /// behind, but not long. Where there can be no session with it, it goes to the block's socket.
    pub(crate) fn pass(&self, block: u32, head: &[u8], body: &[u8]) -> PassedOn {
        self.with(|sessions| {
            /* a second try: the process that was known is gone, but the block may have a new one */
            let by_session = (0..2).find_map(|_| {
                let id = self.way(sessions, block)?;
                sessions.pass(id, head, body)
            });
            by_session.unwrap_or_else(|| sessions.datagrams.pass(block, head, body))
        })
    }

    /// Passes a message to the block's socket, where a session would be one of each process with each other.
    pub(crate) fn pass_datagram(&self, block: u32, message: &[u8]) {
        self.with(|sessions| sessions.datagrams.pass(block, message, &[]));
    }

    fn way(&self, sessions: &mut Sessions, block: u32) -> Option<SessionId> {
        match sessions.ways.get(&block) {
            Some(BlockRoute::Session(id)) => return Some(*id),
            Some(BlockRoute::Datagrams(until)) if monotonic() < *until => return None,
            _ => {}
        }
        let address = abstract_address(&peer_name(self.0.port, block));
        let id = sessions.connect(&address, block, None).ok()?;
        sessions.ways.insert(block, BlockRoute::Session(id));
        Some(id)
    }

    /// The session with the process that has a block; begins one if there is none. `None`: it is this
    /// process's, or there can be none.
    pub fn session_to(&self, block: u32) -> Option<SessionId> {
        self.with(|sessions| if sessions.is_own(block) { None } else { self.way(sessions, block) })
    }

    /// Whether the other end of a session that was begun here has taken it. `None`: the session is over.
    pub(crate) fn is_taken(&self, session: SessionId) -> Option<bool> {
        self.with(|sessions| sessions.get(session).filter(|one| one.is_up()).map(|one| one.greeted))
    }

    /// Whether a block is this process's.
    pub fn is_own(&self, block: u32) -> bool {
        self.with(|sessions| sessions.is_own(block))
    }

    /// Sends `head` and the pieces as one message of frames; does not wait. Some(false): there is no room;
    /// `None`: the session is over.
    ///
    /// # Safety
    /// The pieces can be read.
    pub(crate) unsafe fn send_frames(
        &self,
        id: SessionId,
        head: &[u8],
        pieces: &[libc::iovec],
    ) -> Option<bool> {
        self.with(|sessions| {
            let session = sessions.get(id).filter(|session| session.is_up())?;
            let pieces = pieces
                .iter()
                .map(|piece| slice_from_raw_parts(piece.iov_base.cast_const().cast(), piece.iov_len));
            let parts = std::iter::once(&raw const *head).chain(pieces);
            // SAFETY: the caller's terms, and a reference.
            match unsafe { session.lane(FRAMES)?.out.push_pieces(parts) } {
                Ok(Written::Yes { wake: false }) => Some(true),
                Ok(Written::Yes { wake: true }) if session.send_wake_byte() => Some(true),
                Ok(Written::NoRoom) => Some(false),
                Ok(Written::Yes { .. }) => {
                    sessions.end(id);
                    None
                }
                Err(_) => {
                    sessions.break_off(id);
                    None
                }
            }
        })
    }

    /// Peers of equal credentials get the way to this process's memory from now on, and it takes theirs.
    pub fn offer_memory(&self, memory: OfferedMemory) {
        self.with(|sessions| sessions.offered = Some(memory));
    }

    /// A channel to the other end of a session. `None`: it is over, or the system does not let us.
    pub fn open_channel(&self, session: SessionId) -> Option<Asking> {
        self.with(|sessions| sessions.open_channel(session))
    }

    /// This process's doorbell, which is made when it is first asked for. `None`: the system gives none.
    pub fn doorbell(&self) -> Option<Arc<SharedDoorbell>> {
        self.with(Sessions::own_doorbell)
    }

    /// Hands this process's doorbell to the other end of a session. False: it does not get there.
    pub fn hand_doorbell(&self, session: SessionId) -> bool {
        self.with(|sessions| sessions.hand_doorbell(session))
    }

    /// The doorbell that the other end of a session has handed over.
    pub fn doorbell_of(&self, session: SessionId) -> Option<Arc<SharedDoorbell>> {
        self.with(|sessions| sessions.get(session)?.doorbell.clone())
    }

    /// Whether [`Peers::next_news`] may have something.
    #[inline]
    pub fn has_news(&self) -> bool {
        self.0.news.load(Ordering::Relaxed) != 0
    }

    /// What has become of channels.
    #[inline]
    pub fn next_news(&self) -> Option<ChannelNews> {
        if !self.has_news() {
            return None;
        }
        self.with(|sessions| sessions.news.pop_front())
    }

    /// Has the thread of a session's other end look at its channels.
    #[cold]
    pub fn wake(&self, session: SessionId) {
        self.with(|sessions| {
            if sessions.get(session).is_some_and(|session| !session.send_wake_byte()) {
                sessions.end(session);
            }
        });
    }

    /// Whether the other ends of two sessions are one process, as the kernel says.
    pub fn are_of_one_process(&self, a: SessionId, b: SessionId) -> bool {
        self.with(|sessions| {
            let who = |sessions: &mut Sessions, id| sessions.get(id).map(|session| session.who);
            let (a, b) = (who(sessions, a), who(sessions, b));
            a == b && a.is_some_and(|who| who.pid != 0)
        })
    }

    /// The process at the other end of a session, as this one's PID namespace has it. `None`: it is not seen,
    /// or gone.
    pub fn pid_of(&self, session: SessionId) -> Option<libc::pid_t> {
        self.with(|sessions| {
            let who = sessions.get(session).filter(|session| session.is_up())?.who;
            (who.pid > 0).then_some(who.pid)
        })
    }

    /// Links are in use from now on, or no more.
    pub(crate) fn use_links(&self, uses: bool) {
        self.with(|sessions| sessions.use_links(uses));
    }

    /// The session for links to whoever listens under `address` for `block`, of user `only`.
    ///
    /// # Errors
    /// Gone: there is nobody. Busy: it does not accept now.
    pub(crate) fn connect(
        &self,
        address: &UnixAddr,
        block: u32,
        only: libc::uid_t,
    ) -> Result<SessionId, LinkError> {
        self.with(|sessions| sessions.connect(address, block, Some(only)))
    }

    /// The user at the other end of a session.
    pub(crate) fn user_of(&self, session: SessionId) -> Option<libc::uid_t> {
        self.with(|sessions| sessions.get(session).map(|session| session.who.uid))
    }

    /// Sends these parts as one message about a link that this end began (`ours`), or the other; what is
    /// `due` is kept if there is no room. False: it is not sent.
    pub(crate) fn send(&self, id: SessionId, ours: bool, parts: &[&[u8]], due: bool) -> bool {
        self.with(|sessions| {
            let Some(session) = sessions.get(id).filter(|session| session.is_up()) else { return false };
            let lane = session.links_lane(ours);
            let Some(sent) = session.lane(lane).map(|lane| lane.send(parts, due)) else { return false };
            match sent {
                Sent::Yes { wake } => {
                    if wake && !session.send_wake_byte() {
                        sessions.end(id);
                        return false;
                    }
                    true
                }
                Sent::NoRoom => false,
                Sent::Hopeless => {
                    sessions.end(id);
                    false
                }
            }
        })
    }

    /// What sessions have for links next: a message's first bytes go to `head`, the rest to `room`.
    pub(crate) fn next_for_links(&self, head: &mut [u8], room: &mut [u8]) -> Option<LinkNews> {
        let polled = self.is_polled();
        self.with(|sessions| {
            sessions.look_now_and_then(polled);
            loop {
                match sessions.find(Consumer::Links, polled)? {
                    AwakeConsumer::Drained(id) => return Some(LinkNews::Ended(id)),
                    AwakeConsumer::Message(id, _, len)
                        if len < head.len() || len > head.len() + room.len() =>
                    {
                        sessions.break_off(id);
                    }
                    AwakeConsumer::Message(session, lane, _) => {
                        let ours = sessions.get(session).is_some_and(|s| s.links_lane(true) == lane);
                        let len = sessions.take(session, lane, &mut [head, room]);
                        return Some(LinkNews::Message { session, ours, len });
                    }
                }
            }
        })
    }
}

impl Sessions {
    /// `None`: the other end is gone.
    fn pass(&mut self, id: SessionId, head: &[u8], body: &[u8]) -> Option<PassedOn> {
        for _ in 0..2 {
            let session = self.get(id).filter(|session| session.is_up())?;
            match session.lane(FRAMES)?.out.push(&[head, body]) {
                Ok(Written::Yes { wake: false }) => return Some(PassedOn::Yes),
                Ok(Written::Yes { wake: true }) if session.send_wake_byte() => return Some(PassedOn::Yes),
                Ok(Written::NoRoom) if !self.makes_room(id, head.len() + body.len()) => break,
                Ok(Written::NoRoom) => {}
                Ok(Written::Yes { .. }) | Err(_) => {
                    self.end(id);
                    return None;
                }
            }
        }
        self.get(id).filter(|session| session.is_up()).map(|_| PassedOn::Full)
    }

    /// Waits for room for frames. False: the other end does not read, and will not be waited for again soon.
    fn makes_room(&mut self, id: SessionId, len: usize) -> bool {
        let now = monotonic();
        if self.get(id).is_none_or(|session| !session.stall.is_over(now)) {
            return false;
        }
        let end = now + PATIENCE.as_nanos() as Nanos;
        loop {
            /* wake-up bytes that wait, of whatever kind: the next one is to be seen */
            self.receive(id);
            let Some(session) = self.get(id).filter(|session| session.is_up()) else { return false };
            let Some(lane) = session.lane(FRAMES) else { return false };
            if len > lane.out.longest() {
                return false;
            }
            let Ok(room) = lane.out.await_room(len) else { return false };
            let now = monotonic();
            if room || now >= end {
                session.stall.waited(now, room);
                return room;
            }
            let Some(fd) = session.socket.as_ref().map(AsRawFd::as_raw_fd) else { return false };
            sockopt::wait(&[fd], libc::POLLIN, Duration::from_nanos(end - now));
        }
    }
}

impl std::fmt::Debug for Peers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peers").field("port", &self.0.port).finish_non_exhaustive()
    }
}

/// Reads bytes as what a hostile peer has in a session's memory.
#[cfg(feature = "fuzzing")]
pub(crate) fn read_ring(bytes: &[u8]) {
    let Some((memory, _file)) = memory::RingMemory::create() else { return };
    memory.scribble(0, bytes);
    // SAFETY: one lane, once; its ends go before the memory does.
    let (mut writer, mut reader) = unsafe { memory.lane(FRAMES, false) };
    let mut room = [0; 64];
    for _ in 0..64 {
        let _ = writer.push(&[&room]);
        let Ok(Some(_)) = reader.peek() else { return };
        reader.copy(0, &mut room);
        reader.pop();
    }
}

/// Reads bytes as what a hostile peer does to a channel's memory.
#[cfg(feature = "fuzzing")]
pub(crate) fn read_channel(bytes: &[u8]) {
    channel::read_anything(bytes);
}
