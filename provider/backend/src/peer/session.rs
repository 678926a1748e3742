//! One session: its sockets, what is known of the other end, and its lanes.

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use starverbs_rings::{Broken, MessageReader, MessageWriter, Written};

use super::channel::Asking;
use super::direct::{MemoryFiles, OfferedMemory};
use super::doorbell::SharedDoorbell;
use super::due::PendingMessages;
use super::hello::{CHANNEL, DOORBELL, GATES, Hello, MEM, MRS, PROCESS, READERS, RINGS};
use super::memory::{LANES, RingMemory};
use super::socket::{self, Credentials};
use super::{Consumer, SessionId, trust};
use crate::descriptor::Socket;
use crate::handover::Stall;

/// The lane of frames that are handed on.
pub(super) const FRAMES: usize = 0;
/// The lanes of links: those that the end which connected began, and the other's. Each has requests one way
/// and answers the other, so that who does not take answers is not asked for more, and answers to both come
/// through.
const LINKS: [usize; 2] = [1, 2];

/// What became of a message.
pub(super) enum Sent {
    /// It is in the ring, or kept; `wake`: the other end sleeps
    Yes { wake: bool },
    /// There is no room
    NoRoom,
    /// The other end makes work and does not take results, or breaks the rules
    Hopeless,
}

/// A ring each way, and what waits for room.
pub(super) struct Lane {
    pub(super) out: MessageWriter,
    pub(super) inward: MessageReader,
    due: PendingMessages,
}

impl Lane {
    /// Sends a message of these parts; what is `due` is kept if there is no room.
    pub(super) fn send(&mut self, parts: &[&[u8]], due: bool) -> Sent {
        if self.due.is_empty() {
            match self.out.push(parts) {
                Ok(Written::Yes { wake }) => return Sent::Yes { wake },
                Ok(Written::NoRoom) => {}
                Err(Broken) => return Sent::Hopeless,
            }
        }
        if !due {
            return Sent::NoRoom;
        }
        match self.due.keep(parts) {
            None => Sent::Hopeless,
            Some(()) => self.flush().map_or(Sent::Hopeless, |wake| Sent::Yes { wake }),
        }
    }

    /// Sends what waited, as far as there is room; gives whether the other end must be woken. It sends a
    /// wake-up when there is room for the rest.
    fn flush(&mut self) -> Result<bool, Broken> {
        let mut woken = false;
        while let Some(message) = self.due.front() {
            match self.out.push(&[message])? {
                Written::Yes { wake } => {
                    woken |= wake;
                    self.due.pop_front();
                }
                Written::NoRoom if self.out.await_room(message.len())? => {}
                Written::NoRoom => break,
            }
        }
        Ok(woken)
    }
}

/// The rings of a session, and the memory that they lie in.
struct Rings {
    lanes: [Lane; LANES],
    _memory: RingMemory,
}

impl Rings {
    fn new(memory: RingMemory, connected: bool) -> Rings {
        let lane = |lane| {
            // SAFETY: each lane once; the ends go with the memory.
            let (out, inward) = unsafe { memory.lane(lane, connected) };
            Lane { out, inward, due: PendingMessages::default() }
        };
        Rings { lanes: std::array::from_fn(lane), _memory: memory }
    }
}

/// How a consumer stands to a session.
#[derive(Clone, Copy, Default)]
pub(super) struct ConsumerState {
    /// It is in the consumer's list: looked at by each poll
    pub(super) listed: bool,
    /// The other end sends a wake-up byte when there is something, whether polls look or not
    pub(super) asleep: bool,
    /// Looks in a row that found nothing
    pub(super) idle: u32,
    /// It has all that came before the end
    pub(super) done: bool,
}

/// A session with another process.
pub(super) struct Session {
    pub(super) id: SessionId,
    /// Whose the other end is
    pub(super) who: Credentials,
    /// The user that the other end sees here
    pub(super) own: libc::uid_t,
    /// This end connected, to the process that has this block
    pub(super) to: Option<u32>,
    /// The other end's hello has come
    pub(super) greeted: bool,
    /// Blocks of the other end: the one that was connected to, else those it claims
    pub(super) blocks: Vec<u16>,
    /// `None`: the other end is gone
    pub(super) socket: Option<Socket>,
    pub(super) notice: Option<Socket>,
    pub(super) places: [ConsumerState; Consumer::ALL.len()],
    /// Its reading of frames
    pub(super) stall: Stall,
    /// Channels that the other end has made
    pub(super) channels: u32,
    /// Who has channels is told of the end
    pub(super) has_channels: bool,
    /// The other end's, if it has handed it over
    pub(super) doorbell: Option<Arc<SharedDoorbell>>,
    /// The other end has this process's
    pub(super) has_ours: bool,
    rings: Option<Rings>,
}

impl Session {
    /// Of a socket that was just connected, or accepted.
    pub(super) fn new(id: SessionId, socket: Socket, who: Credentials, own: libc::uid_t) -> Session {
        Session {
            id,
            who,
            own,
            to: None,
            greeted: false,
            blocks: Vec::new(),
            notice: socket::exit_notice(&socket, &who),
            socket: Some(socket),
            places: Default::default(),
            stall: Stall::default(),
            channels: 0,
            has_channels: false,
            doorbell: None,
            has_ours: false,
            rings: None,
        }
    }

    /// Makes the rings and hands them over: the other end need not be there to take them. `None`: the system
    /// does not let us.
    pub(super) fn offer_rings(&mut self, block: u32, own_blocks: Vec<u16>) -> Option<()> {
        let (memory, file): (RingMemory, File) = RingMemory::create()?;
        let hello = Hello { kinds: &[RINGS], blocks: own_blocks }.encode();
        socket::send(self.socket.as_ref()?, &hello, &[file.as_raw_fd()]).ok()?;
        self.rings = Some(Rings::new(memory, true));
        self.to = Some(block);
        self.blocks.push(block as u16);
        Some(())
    }

    /// Makes a channel and hands it over, beside the blocks that this process has and, to a peer that is
    /// trusted, the way to its memory. `None`: the system does not let us, or the other end does not read.
    pub(super) fn offer_channel(
        &mut self,
        own_blocks: Vec<u16>,
        memory: Option<&OfferedMemory>,
    ) -> Option<Asking> {
        let (channel, file) = Asking::create()?;
        let memory = memory.filter(|_| self.is_trusted()).and_then(OfferedMemory::open);
        let (kinds, fds): (&[u8], Vec<RawFd>) = match &memory {
            None => (&[CHANNEL], vec![file.as_raw_fd()]),
            Some(MemoryFiles { mrs, readers, gates, memory, process }) => {
                let files = [&file, mrs, readers, gates].map(|file| file.as_raw_fd());
                let ways = [memory, process].map(|way| way.as_raw_fd());
                (&[CHANNEL, MRS, READERS, GATES, MEM, PROCESS], [&files[..], &ways].concat())
            }
        };
        let hello = Hello { kinds, blocks: own_blocks }.encode();
        socket::send(self.socket.as_ref()?, &hello, &fds).ok()?;
        self.has_channels = true;
        Some(channel)
    }

    /// Hands this process's doorbell over. False: the other end does not read, or is gone.
    pub(super) fn hand_doorbell(&mut self, own_blocks: Vec<u16>, doorbell: &File) -> bool {
        let hello = Hello { kinds: &[DOORBELL], blocks: own_blocks }.encode();
        let send = |to| socket::send(to, &hello, &[doorbell.as_raw_fd()]).is_ok();
        self.has_ours = self.socket.as_ref().is_some_and(send);
        self.has_ours
    }

    /// Whether the other end's process has credentials equal to this one's, and lives.
    pub(super) fn is_trusted(&self) -> bool {
        let trusted = trust::trusts(&self.who);
        /* behind the reading of /proc: as long as it lives, its number is not another's */
        let lives = self.socket.as_ref().is_some_and(socket::is_open)
            && self.notice.as_ref().is_some_and(|notice| !socket::has_exited(notice));
        trusted && lives
    }

    /// The other end's hello has come, with this memory. False: it is not what it should be.
    pub(super) fn greet(&mut self, blocks: Vec<u16>, memory: Option<RingMemory>) -> bool {
        if self.rings.is_none() {
            let Some(memory) = memory else { return false };
            self.rings = Some(Rings::new(memory, false));
        }
        self.greeted = true;
        self.blocks = blocks;
        self.blocks.extend(self.to.map(|block| block as u16));
        true
    }

    /// It has rings, and its other end lives.
    pub(super) fn is_up(&self) -> bool {
        self.rings.is_some() && self.socket.is_some()
    }

    /// Has the other end look at its rings. False: it is gone.
    pub(super) fn send_wake_byte(&self) -> bool {
        let Some(socket) = &self.socket else { return false };
        /* where there is no room for a byte, one waits there already */
        socket::send(socket, &[0], &[]).err().is_none_or(socket::is_full)
    }

    pub(super) fn lane(&mut self, lane: usize) -> Option<&mut Lane> {
        self.rings.as_mut().map(|rings| &mut rings.lanes[lane])
    }

    /// The lane of links that this end began, or the other.
    pub(super) fn links_lane(&self, ours: bool) -> usize {
        LINKS[usize::from(self.to.is_some() != ours)]
    }

    /// Where the next message for a consumer is, and its length. Sends what waited for room on the way, and
    /// notifies the other end.
    pub(super) fn peek(&mut self, consumer: Consumer) -> Result<Option<(usize, usize)>, Broken> {
        let (ours, theirs) = match consumer {
            Consumer::Frames => (FRAMES, None),
            Consumer::Links => (self.links_lane(true), Some(self.links_lane(false))),
        };
        let gone = self.socket.is_none();
        let mut woken = false;
        let mut found = None;
        let Some(rings) = &mut self.rings else { return Ok(None) };
        for lane in [Some(ours), theirs].into_iter().flatten() {
            let here = &mut rings.lanes[lane];
            if !gone {
                woken |= here.flush()?;
            }
            /* an end that takes no answers is sent no more requests, but what it sent before its end is
             * read */
            let is_read = lane == ours || here.due.is_empty() || gone;
            if found.is_none() && is_read {
                found = here.inward.peek()?.map(|len| (lane, len));
            }
        }
        if woken {
            self.send_wake_byte();
        }
        Ok(found)
    }

    /// The other end is to wake this one when there is something for a consumer. False: there is, now.
    pub(super) fn sleep(&mut self, consumer: Consumer) -> Result<bool, Broken> {
        if !self.places[consumer as usize].asleep {
            self.places[consumer as usize].asleep = self.set_asleep(consumer)?;
        }
        Ok(self.places[consumer as usize].asleep)
    }

    fn set_asleep(&mut self, consumer: Consumer) -> Result<bool, Broken> {
        let theirs = self.links_lane(false);
        let Some(rings) = &mut self.rings else { return Ok(false) };
        for &lane in consumer.lanes() {
            let here = &mut rings.lanes[lane];
            let is_read = lane != theirs || here.due.is_empty();
            if is_read && !here.inward.sleep()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// This end looks by itself from now on.
    pub(super) fn wake(&mut self, consumer: Consumer) {
        let asleep = std::mem::take(&mut self.places[consumer as usize].asleep);
        if let Some(rings) = self.rings.as_ref().filter(|_| asleep) {
            consumer.lanes().iter().for_each(|lane| rings.lanes[*lane].inward.wake());
        }
    }

    /// The other end is gone, and with it the sockets; its messages are still there.
    pub(super) fn hang_up(&mut self) {
        (self.socket, self.notice) = (None, None);
    }

    /// The other end breaks the rules: nothing more of its rings is read.
    pub(super) fn forget_rings(&mut self) {
        self.rings = None;
    }
}

impl Consumer {
    /// The lanes that it reads.
    fn lanes(self) -> &'static [usize] {
        match self {
            Consumer::Frames => &[FRAMES],
            Consumer::Links => &LINKS,
        }
    }
}
