//! All sessions of a card: how they begin, what the kernel reports of them, how they end.

mod awake;

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use nix::sys::socket::UnixAddr;
use starverbs_core::Nanos;
use starverbs_core::relay::LinkError;

use super::channel::{Answering, Asking};
use super::direct::{MemoryFiles, OfferedMemory, ProcessFile};
use super::doorbell::SharedDoorbell;
use super::hello::{self, CHANNEL, DOORBELL, GATES, Hello, MEM, MRS, PROCESS, READERS, RINGS};
use super::memory::RingMemory;
use super::session::Session;
use super::socket::{self, SocketMessage};
use super::{ChannelNews, Consumer, NO_BLOCK, SessionId, SessionListenerId};
use crate::BackendError;
use crate::descriptor::Socket;
use crate::epoll::Epoll;
use crate::error::os_error;
use crate::handover::SocketHandover;
use crate::sockopt::monotonic;
use awake::Awake;
pub(super) use awake::AwakeConsumer;

/// Sessions of a card, and of those the ones that processes of other users began.
const SESSIONS: usize = 1024;
const MAX_OTHER_USERS: usize = 64;
/// Channels that another end may make in one session: a process makes one, and anew when it broke.
const CHANNELS: u32 = 4;
/// Messages that one socket gives in one turn.
const IN_A_TURN: usize = 16;
/// Looks of a card that is polled without a look at the kernel's reports.
const REPORTS_EVERY: u32 = 64;
/// How long a process that did not take a session gets datagrams.
const REFUSED: Nanos = 10_000_000_000;

/// What an event is about, in the upper bits; the rest is whose.
const LISTENER: u64 = 1 << 62;
const SESSION: u64 = 2 << 62;
const EXIT: u64 = 3 << 62;
/// Of neither kind: [`Sessions::alarm`], and what is watched for others.
const ALARM: u64 = 0;
const WATCHED: u64 = 1;

/// A name under which sessions begin.
struct Listener {
    id: SessionListenerId,
    block: u32,
    /// The user that others see here
    own: libc::uid_t,
    /// Nobody else may connect
    only: Option<libc::uid_t>,
    socket: Socket,
}

/// How to reach the process that has a block.
pub(super) enum BlockRoute {
    Session(SessionId),
    /// It took no session; datagrams until then
    Datagrams(Nanos),
}

pub(super) struct Sessions {
    epoll: Epoll,
    /// Readable where who is about to sleep must not
    alarm: Socket,
    listeners: Vec<Listener>,
    serial: u32,
    sessions: Vec<Option<Session>>,
    pub(super) ways: HashMap<u32, BlockRoute>,
    /// To processes with which there can be none
    pub(super) datagrams: SocketHandover,
    awake: [Awake; Consumer::ALL.len()],
    uses_links: bool,
    rounds: u32,
    /// What peers of equal credentials get
    pub(super) offered: Option<OfferedMemory>,
    /// This process's, once it awaits one
    doorbell: Option<(Arc<SharedDoorbell>, File)>,
    /// For who has channels
    pub(super) news: VecDeque<ChannelNews>,
}

impl Sessions {
    pub(super) fn new(port: u16) -> Result<Sessions, BackendError> {
        let epoll = Epoll::new()?;
        let alarm = socket::event().map_err(|error| os_error("an event descriptor", error))?;
        epoll.add(&alarm, ALARM)?;
        Ok(Sessions {
            epoll,
            alarm,
            listeners: Vec::new(),
            serial: 0,
            sessions: Vec::new(),
            ways: HashMap::new(),
            datagrams: SocketHandover::new(port),
            awake: Default::default(),
            uses_links: false,
            rounds: 0,
            offered: None,
            doorbell: None,
            news: VecDeque::new(),
        })
    }

    pub(super) fn fd(&self) -> i32 {
        self.epoll.fd()
    }

    /// Says of a socket, too, when it has something; or no more.
    pub(super) fn watch(&self, socket: &Socket, watch: bool) -> Result<(), BackendError> {
        if watch {
            return self.epoll.add(socket, WATCHED);
        }
        self.epoll.remove(socket);
        Ok(())
    }

    /// A session that has not been taken out yet.
    pub(super) fn get(&mut self, id: SessionId) -> Option<&mut Session> {
        self.sessions.get_mut(usize::from(id.slot))?.as_mut().filter(|session| session.id == id)
    }

    /// Sessions begin under this name from now on; who has it is in `block`. `only`: of this user alone.
    pub(super) fn listen(
        &mut self,
        address: &UnixAddr,
        block: u32,
        only: Option<libc::uid_t>,
    ) -> Result<SessionListenerId, BackendError> {
        let socket = socket::listen(address)?;
        self.listeners.try_reserve(1).map_err(|_| BackendError::NoMemory)?;
        self.serial = self.serial.wrapping_add(1);
        let id = SessionListenerId(self.serial);
        self.epoll.add(&socket, LISTENER | u64::from(id.0))?;
        let known = self.listeners.iter().any(|listener| listener.block == block);
        self.listeners.push(Listener { id, block, own: socket::user(), only, socket });
        if !known {
            /* the others find this one by the new block, too */
            let hello = Hello { kinds: &[], blocks: self.blocks() }.encode();
            for socket in self.sessions.iter().flatten().filter_map(|session| session.socket.as_ref()) {
                let _full = socket::send(socket, &hello, &[]);
            }
        }
        Ok(id)
    }

    pub(super) fn end_listening(&mut self, id: SessionListenerId) {
        self.listeners.retain(|listener| {
            if listener.id == id {
                self.epoll.remove(&listener.socket);
            }
            listener.id != id
        });
    }

    /// Whether a block is this process's.
    pub(super) fn is_own(&self, block: u32) -> bool {
        self.listeners.iter().any(|listener| listener.block == block)
    }

    fn blocks(&self) -> Vec<u16> {
        let mut blocks: Vec<u16> = self.listeners.iter().map(|listener| listener.block as u16).collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks
    }

    /// Nothing begins and nothing goes on any more.
    pub(super) fn close(&mut self) {
        self.listeners.clear();
        for at in 0..self.sessions.len() {
            if let Some(id) = self.sessions[at].as_ref().map(|session| session.id) {
                self.end(id);
            }
        }
    }

    /// Links are in use from now on, or no more.
    pub(super) fn use_links(&mut self, uses: bool) {
        self.uses_links = uses;
        if !uses {
            while let Some(id) = self.awake[Consumer::Links as usize].list.front().copied() {
                self.unlist(id, Consumer::Links);
            }
            for at in 0..self.sessions.len() {
                if let Some(id) = self.sessions[at].as_ref().filter(|s| s.socket.is_none()).map(|s| s.id) {
                    self.done(id, Consumer::Links);
                }
            }
        } else {
            let ids: Vec<_> = self.sessions.iter().flatten().map(|session| session.id).collect();
            ids.into_iter().for_each(|id| self.wake(id));
        }
    }

    /// The session with whoever listens under `address` and claims `block`; begins one if there is
    /// none. `only`: with this user alone.
    ///
    /// # Errors
    /// Gone: nobody listens there, or not that user. Busy: it does not accept now, or the system lacks
    /// something.
    pub(super) fn connect(
        &mut self,
        address: &UnixAddr,
        block: u32,
        only: Option<libc::uid_t>,
    ) -> Result<SessionId, LinkError> {
        let socket = socket::connect(address)?;
        let who = socket::credentials(&socket).ok_or(LinkError::Gone)?;
        if only.is_some_and(|user| user != who.uid) {
            return Err(LinkError::Gone);
        }
        let own = socket::user();
        /* The blocks that another end claims count where the kernel confirms that both are one process.
         * One that this process cannot see may be any. */
        let same = |session: &&Session| {
            block != NO_BLOCK
                && session.is_up()
                && session.socket.as_ref().is_some_and(socket::is_open)
                && who.pid != 0
                && session.who == who
                && session.own == own
                && session.blocks.contains(&(block as u16))
        };
        if let Some(session) = self.sessions.iter().flatten().find(same) {
            return Ok(session.id);
        }
        let blocks = self.blocks();
        let id = self.add(socket, who, own).ok_or(LinkError::Busy)?;
        if self.get(id).and_then(|session| session.offer_rings(block, blocks)).is_none() {
            self.forget(id);
            return Err(LinkError::Busy);
        }
        self.wake(id);
        Ok(id)
    }

    fn add(&mut self, socket: Socket, who: socket::Credentials, own: libc::uid_t) -> Option<SessionId> {
        let at = match self.sessions.iter().position(Option::is_none) {
            Some(at) => at,
            None if self.sessions.len() < SESSIONS => {
                self.sessions.try_reserve(1).ok()?;
                self.sessions.push(None);
                self.sessions.len() - 1
            }
            None => return None,
        };
        self.serial = self.serial.wrapping_add(1);
        let id = SessionId { slot: at as u16, serial: self.serial };
        self.epoll.add(&socket, SESSION | id.bits()).ok()?;
        let session = Session::new(id, socket, who, own);
        if let Some(notice) = &session.notice {
            let _unwatched = self.epoll.add(notice, EXIT | id.bits());
        }
        self.sessions[at] = Some(session);
        Some(id)
    }

    /// Asks the kernel what there is, now and then where the card is polled, and each time where it is not.
    pub(super) fn look_now_and_then(&mut self, polled: bool) {
        self.rounds = self.rounds.wrapping_add(1);
        if !polled || self.rounds.is_multiple_of(REPORTS_EVERY) {
            self.look();
        }
    }

    /// Asks the kernel what there is. True: something that is watched for others has some.
    pub(super) fn look(&mut self) -> bool {
        let mut watched = false;
        for what in self.epoll.look() {
            match what & EXIT {
                LISTENER => self.accept(SessionListenerId(what as u32)),
                SESSION => self.receive(SessionId::of_bits(what)),
                EXIT => self.end(SessionId::of_bits(what)),
                _ if what == WATCHED => watched = true,
                _ => drop(nix::unistd::read(&self.alarm, &mut [0; size_of::<u64>()])),
            }
        }
        watched
    }

    fn accept(&mut self, id: SessionListenerId) {
        let Some(listener) = self.listeners.iter().find(|listener| listener.id == id) else { return };
        let Some(socket) = socket::accept(&listener.socket) else { return };
        let Some(who) = socket::credentials(&socket) else { return };
        let (own, only) = (listener.own, listener.only);
        let is_other = |who: &socket::Credentials, own| who.uid != own;
        let others = self.sessions.iter().flatten().filter(|s| s.to.is_none() && is_other(&s.who, s.own));
        if only.is_some_and(|user| user != who.uid)
            || (is_other(&who, own) && others.count() >= MAX_OTHER_USERS)
        {
            return;
        }
        if let Some(id) = self.add(socket, who, own) {
            self.receive(id);
        }
    }

    /// Takes what the other end has sent beside its rings: wake-up bytes, and hellos.
    pub(super) fn receive(&mut self, id: SessionId) {
        /* not cleared: what comes is a byte, nearly always */
        let mut room = [MaybeUninit::uninit(); hello::LONGEST];
        for _ in 0..IN_A_TURN {
            let Some(socket) = self.get(id).and_then(|session| session.socket.as_ref()) else { return };
            let mut descriptors = Vec::new();
            match socket::receive(socket, &mut room, &mut descriptors) {
                SocketMessage::Nothing => return,
                SocketMessage::Ended => return self.end(id),
                SocketMessage::Message([_]) => {
                    self.wake(id);
                    if self.doorbell.is_some() {
                        self.push_news(ChannelNews::Woken(id));
                    }
                }
                SocketMessage::Message(bytes) => {
                    let Some(hello) = hello::decode(bytes) else { return self.break_off(id) };
                    let (mut rings, mut channel, mut doorbell) = (None, None, None);
                    let mut memory = [const { None }; 5];
                    for (kind, file) in hello.kinds.iter().zip(descriptors) {
                        match *kind {
                            RINGS => rings = Some(file),
                            CHANNEL => channel = Some(file),
                            MRS => memory[0] = Some(file),
                            READERS => memory[1] = Some(file),
                            GATES => memory[2] = Some(file),
                            MEM => memory[3] = Some(file),
                            PROCESS => memory[4] = Some(file),
                            DOORBELL => doorbell = Some(file),
                            _ => {}
                        }
                    }
                    self.greet(id, hello.blocks, rings.and_then(RingMemory::open));
                    if let Some(channel) = channel.and_then(Answering::open) {
                        let memory = self.take_memory(id, memory);
                        self.take_channel(id, channel, memory);
                    }
                    if let Some(doorbell) = doorbell.and_then(SharedDoorbell::open) {
                        self.take_doorbell(id, doorbell);
                    }
                }
            }
        }
    }

    fn greet(&mut self, id: SessionId, blocks: Vec<u16>, memory: Option<RingMemory>) {
        let answer = Hello { kinds: &[], blocks: self.blocks() }.encode();
        let Some(session) = self.get(id) else { return };
        let first = !session.greeted && session.to.is_none();
        if !session.greet(blocks, memory) {
            return self.break_off(id);
        }
        if first && let Some(socket) = &session.socket {
            let _full = socket::send(socket, &answer, &[]);
        }
        self.wake(id);
    }

    /// A channel in a session, for its other end to be asked; with the session.
    pub(super) fn open_channel(&mut self, id: SessionId) -> Option<Asking> {
        let blocks = self.blocks();
        let offered = self.offered.take();
        let session = self.get(id).filter(|session| session.is_up());
        let channel = session.and_then(|session| session.offer_channel(blocks, offered.as_ref()));
        self.offered = offered;
        channel
    }

    /// This process's doorbell.
    pub(super) fn own_doorbell(&mut self) -> Option<Arc<SharedDoorbell>> {
        if self.doorbell.is_none() {
            self.doorbell = SharedDoorbell::create();
        }
        self.doorbell.as_ref().map(|(doorbell, _)| doorbell.clone())
    }

    /// Hands it to the other end of a session, once.
    pub(super) fn hand_doorbell(&mut self, id: SessionId) -> bool {
        if self.get(id).is_some_and(|session| session.has_ours) {
            return true;
        }
        let blocks = self.blocks();
        let Some((doorbell, file)) = self.doorbell.take() else { return false };
        let has = self.get(id).is_some_and(|session| session.hand_doorbell(blocks, &file));
        self.doorbell = Some((doorbell, file));
        has
    }

    fn take_doorbell(&mut self, id: SessionId, doorbell: Arc<SharedDoorbell>) {
        if let Some(session) = self.get(id) {
            session.doorbell = Some(doorbell.clone());
            self.push_news(ChannelNews::Doorbell(id, doorbell));
        }
    }

    fn push_news(&mut self, news: ChannelNews) {
        if self.news.try_reserve(1).is_ok() {
            self.news.push_back(news);
        }
    }

    /// What came beside a channel, if it is all there is to be, and its sender gets the same from us.
    fn take_memory(&mut self, id: SessionId, files: [Option<OwnedFd>; 5]) -> Option<Box<MemoryFiles>> {
        let [Some(mrs), Some(readers), Some(gates), Some(memory), Some(process)] = files else { return None };
        let wanted = self.offered.is_some() && self.get(id).is_some_and(|session| session.is_trusted());
        let (mrs, readers, gates) = (mrs.into(), readers.into(), gates.into());
        let [memory, process] = [memory, process].map(ProcessFile::new);
        wanted.then(|| Box::new(MemoryFiles { mrs, readers, gates, memory, process }))
    }

    /// The other end has made a channel.
    fn take_channel(&mut self, id: SessionId, channel: Answering, memory: Option<Box<MemoryFiles>>) {
        let Some(session) = self.get(id) else { return };
        session.channels += 1;
        session.has_channels = true;
        if session.channels > CHANNELS || self.news.try_reserve(1).is_err() {
            /* who asks in a channel that nobody looks at would wait for ever */
            return self.break_off(id);
        }
        self.news.push_back(ChannelNews::Opened(id, Box::new(channel), memory));
    }

    /// The other end is gone: its messages are still read.
    pub(super) fn end(&mut self, id: SessionId) {
        let uses_links = self.uses_links;
        let Sessions { sessions, epoll, news, .. } = self;
        let found = sessions.get_mut(usize::from(id.slot)).and_then(Option::as_mut);
        let Some(session) = found.filter(|session| session.id == id && session.socket.is_some()) else {
            return;
        };
        session.places[Consumer::Links as usize].done = !uses_links;
        if session.has_channels && news.try_reserve(1).is_ok() {
            news.push_back(ChannelNews::Ended(id));
        }
        let (refused, began) =
            (session.to.filter(|_| !session.greeted), session.to.is_some() || session.greeted);
        [&session.socket, &session.notice].into_iter().flatten().for_each(|socket| epoll.remove(socket));
        if !began {
            self.sessions[usize::from(id.slot)] = None;
            return;
        }
        if let Some(session) = self.get(id) {
            session.hang_up();
        }
        self.ways.retain(|_, way| !matches!(way, BlockRoute::Session(to) if *to == id));
        if let Some(block) = refused {
            self.ways.insert(block, BlockRoute::Datagrams(monotonic() + REFUSED));
        }
        self.wake(id);
    }

    /// The other end does not keep to the rules: nothing more of it is read.
    pub(super) fn break_off(&mut self, id: SessionId) {
        let Some(session) = self.get(id) else { return };
        let goes_on = session.socket.is_some();
        session.forget_rings();
        if goes_on {
            self.push_news(ChannelNews::Broken);
        }
        self.end(id);
    }

    /// A session that did not begin.
    fn forget(&mut self, id: SessionId) {
        if let Some(session) = self.get(id) {
            session.greeted = true;
            session.forget_rings();
            self.end(id);
            Consumer::ALL.into_iter().for_each(|consumer| {
                self.unlist(id, consumer);
                self.done(id, consumer);
            });
        }
    }
}

#[cfg(test)]
impl Sessions {
    /// The sessions, for tests that look inside.
    pub(super) fn all(&mut self) -> impl Iterator<Item = &mut Session> {
        self.sessions.iter_mut().flatten()
    }
}
