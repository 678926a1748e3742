//! The receiving half: datagrams in, checked frames out; and this process's place among the host's.
//!
//! Owns the socket on the wire's UDP port, this process's QPN blocks, and the handing on of frames that are
//! for another process. It must not know what a frame means beyond its destination QPN.

mod frames;
pub(crate) mod mads;
mod multicast;

use std::collections::VecDeque;
use std::ops::Deref;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use starverbs_core::{Counters, FrameMeta, Nanos, QPN_BLOCK_SHIFT, QPN_MULTICAST};
use starverbs_settings::Settings;

use crate::control::ToolRequest;
use crate::descriptor::Socket;
use crate::inbox::Inbox;
use crate::listeners::ServiceListeners;
use crate::membership::Membership;
use crate::multicast_proxy::{Clients, MulticastProxy};
use crate::owners::Owners;
use crate::pcap::Capture;
use crate::peer::{Peers, SessionListenerId};
use crate::probe::PendingProbes;
use crate::registry::{LAST_BLOCK, QpnBlock};
use crate::socket::open_wire;
use crate::sockopt;
use crate::steer::Steering;
use crate::{BackendError, HostAddr, Woken};

/// Datagrams taken at once from the wire, and from a block's socket.
const WIRE_SLOTS: usize = 16;
const BLOCK_SLOTS: usize = 16;
/// Looks in a row that find nothing, after which the wire is looked at less often.
const QUIET: u32 = 64;
/// One round in so many, then.
const WIRE_EVERY: u32 = 32;
/// Rounds of [`Rx::recv`] without a look at the blocks' sockets, while nothing comes from there.
const BLOCKS_EVERY: u32 = 64;
/// Rounds with a look every time, after something came.
const BLOCKS_EAGER: u32 = 4096;
/// How long joining waits for the other processes.
const JOIN: Nanos = 20_000_000;
/// How long leaving goes on with what keeps coming.
const LEAVE: Nanos = 20_000_000;
/// Without the port, binding it is tried again after this.
const PORT_RETRY: Nanos = 1_000_000_000;
/// Where the multicast QPN lies; no process has that block.
const MULTICAST_BLOCK: u32 = QPN_MULTICAST >> QPN_BLOCK_SHIFT;
/// Questions kept until they are taken.
const REQUESTS: usize = 16;

/// Where the frames that are being looked at came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FrameOrigin {
    Wire,
    Block,
}

/// What a round looks at.
#[derive(Clone, Copy)]
struct LookedAt {
    wire: bool,
    /// The sockets of other processes, and whether the blocks' have something
    peers: bool,
    /// With them the blocks' and the services', whether they have something or not
    services: bool,
}

/// A datagram with the frames in it that are still to come.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    origin: FrameOrigin,
    slot: usize,
    at: usize,
    segment: usize,
    index: u16,
    sport: u16,
    meta: FrameMeta,
    /// Of the frame that is next: a management datagram for nobody else
    nobodys: bool,
}

/// The receiving half of a port. Dropping it hands on what others' frames it still holds.
pub struct Rx<C: Deref<Target = Counters>> {
    /// The process that opened it; a forked child must not read for it
    process: u32,
    counters: C,
    capture: Option<Capture>,
    settings: Settings,
    token: u64,
    /// `None`: the port is another user's
    wire: Option<Socket>,
    /// It left the port for good
    left: bool,
    blocks: Vec<QpnBlock>,
    /// A bit for each block of this process
    local: [u64; 64],
    membership: Membership,
    /// The services of this process
    listeners: ServiceListeners,
    /// Processes of other users to which multicast is forwarded
    clients: Clients,
    /// Forwards multicast to this process, if it does not have the port
    proxy: MulticastProxy,
    fds: Vec<RawFd>,
    wire_inbox: Inbox,
    block_inbox: Inbox,
    /// Datagrams of the last `recv` not yet begun: slots of the wire's, then of the block's inbox
    wire_left: std::ops::Range<usize>,
    block_left: std::ops::Range<usize>,
    cursor: Option<Cursor>,
    /// The way to the host's other processes
    peers: Peers,
    steering: Steering,
    asked: Option<PendingProbes>,
    requests: VecDeque<ToolRequest>,
    rounds: u32,
    eager: u32,
    /// Looks at the wire in a row that found nothing
    quiet: u32,
    /// Frames come to other ports of this host
    others: bool,
    turn: usize,
    retry_at: Nanos,
}

impl<C: Deref<Target = Counters>> Rx<C> {
    pub(crate) fn open(
        settings: &Settings,
        addrs: &[HostAddr],
        counters: C,
        capture: Option<Capture>,
    ) -> Result<Self, BackendError> {
        let token = sockopt::random();
        let mut rx = Rx {
            process: std::process::id(),
            counters,
            capture,
            settings: settings.clone(),
            token,
            wire: open_wire(settings)?,
            left: false,
            blocks: Vec::new(),
            local: [0; 64],
            membership: Membership::new(addrs),
            listeners: ServiceListeners::new(settings.port, addrs),
            clients: Clients::default(),
            proxy: MulticastProxy::new(settings.port),
            fds: Vec::new(),
            wire_inbox: Inbox::new(WIRE_SLOTS)?,
            block_inbox: Inbox::of_host(BLOCK_SLOTS)?,
            wire_left: 0..0,
            block_left: 0..0,
            cursor: None,
            peers: Peers::new(settings.port)?,
            steering: Steering::new(settings.port, token),
            asked: None,
            requests: VecDeque::with_capacity(REQUESTS),
            rounds: 0,
            eager: BLOCKS_EAGER,
            quiet: 0,
            others: false,
            turn: 0,
            retry_at: 0,
        };
        rx.claim_block()?;
        rx.join();
        Ok(rx)
    }

    /// First round of probing: until the others have answered, or [`JOIN`] is over. No QP exists yet that
    /// frames could be for.
    fn join(&mut self) {
        let start = sockopt::monotonic();
        loop {
            let now = sockopt::monotonic();
            self.step(now);
            if !self.steering.busy() || now.saturating_sub(start) > JOIN || self.wire.is_none() {
                break;
            }
            self.eager = BLOCKS_EAGER;
            if self.recv() == 0 {
                sockopt::wait(&self.fds, libc::POLLIN, Duration::from_millis(1));
            }
            while self.next_frame().is_some() {}
        }
        // The caller's clock may have another origin than ours.
        self.steering.restart_clock();
        self.retry_at = 0;
    }

    /// Claims one more block of QPNs.
    ///
    /// # Errors
    /// [`BackendError::NoBlock`] when all are taken.
    pub fn claim_block(&mut self) -> Result<u32, BackendError> {
        let (block, listener) = self.claim_both_names()?;
        if let Err(error) = self.peers.watch(block.socket(), true) {
            self.peers.end_listening(listener);
            return Err(error);
        }
        let number = block.number();
        self.local[(number / 64) as usize] |= 1 << (number % 64);
        self.blocks.push(block);
        self.list_fds();
        self.steering.changed();
        Ok(number)
    }

    /// A block with both of its names: whoever had one of them alone would get what is for the other.
    fn claim_both_names(&self) -> Result<(QpnBlock, SessionListenerId), BackendError> {
        for _ in 0..LAST_BLOCK {
            let block = QpnBlock::claim(self.settings.port)?;
            if let Some(listener) = self.peers.offer_block(block.number())? {
                return Ok((block, listener));
            }
        }
        Err(BackendError::NoBlock(LAST_BLOCK))
    }

    /// The blocks of this process, by number; the first was claimed at opening.
    pub fn blocks(&self) -> impl Iterator<Item = u32> {
        self.blocks.iter().map(QpnBlock::number)
    }

    /// Whether the UDP port is another user's, whose processes hand our frames on.
    pub fn lacks_port(&self) -> bool {
        self.wire.is_none()
    }

    /// Whether processes of other users lease multicast groups from this one.
    pub fn has_clients(&self) -> bool {
        self.clients.any()
    }

    /// What to `poll(2)` for POLLIN. Changes with [`Rx::claim_block`] and, without the port, with
    /// [`Rx::maintenance`].
    pub fn fds(&self) -> &[RawFd] {
        &self.fds
    }

    fn list_fds(&mut self) {
        self.fds.clear();
        self.fds.extend(self.wire.iter().map(AsRawFd::as_raw_fd));
        self.fds.extend(self.blocks.iter().map(QpnBlock::fd));
        self.fds.extend(self.listeners.ready_fd());
        self.fds.push(self.peers.fd());
    }

    /// The sessions with the host's other processes.
    pub fn peers(&self) -> &Peers {
        &self.peers
    }

    /// The port is polled from now on, so that other processes need not wake this one; or it may sleep at any
    /// time, as it may at first.
    #[inline]
    pub fn set_polled(&self, polled: bool) {
        self.peers.set_polled(polled);
    }

    /// Whether frames come to other ports of this host.
    #[inline]
    pub fn set_others(&mut self, others: bool) {
        self.others = others;
    }

    /// At the end of a turn: where the port is not polled, who sleeps on [`Rx::fds`] is woken for what was
    /// left.
    #[inline]
    pub fn settle(&self) {
        self.peers.settle();
    }

    /// Before a sleep on [`Rx::fds`]: other processes wake this one from now on.
    pub fn prepare_to_sleep(&self) {
        self.peers.prepare_to_sleep();
    }

    #[inline]
    fn is_local(&self, block: u32) -> bool {
        self.local[(block / 64 % 64) as usize] >> (block % 64) & 1 != 0
    }

    /// Takes datagrams from the sockets, without waiting; gives how many. Frames of the round before that
    /// were not taken with [`Rx::next_frame`] stay, and nothing is received.
    #[inline]
    pub fn recv(&mut self) -> usize {
        /* a round that takes nothing is none: what is due in one of so many might come to those alone */
        if !self.has_left() {
            self.rounds = self.rounds.wrapping_add(1);
        }
        /* a wire that has been quiet while frames come by memory or to other ports is looked at less often */
        let rests = self.quiet >= QUIET && (self.others || self.peers.may_have_frames());
        let all_by_blocks = self.wire.is_none() && !self.peers.may_have_frames();
        self.recv_from(LookedAt {
            wire: !rests || self.rounds.is_multiple_of(WIRE_EVERY),
            peers: self.eager > 0 || all_by_blocks || self.rounds.is_multiple_of(BLOCKS_EVERY),
            services: self.listeners.ready_fd().is_some(),
        })
    }

    /// Whether frames of the round before were not taken.
    #[inline]
    fn has_left(&self) -> bool {
        self.cursor.is_some() || !self.wire_left.is_empty() || !self.block_left.is_empty()
    }

    /// Takes datagrams from these sockets.
    #[inline]
    fn recv_from(&mut self, at: LookedAt) -> usize {
        if self.has_left() {
            return 1;
        }
        let mut got = 0;
        if let Some(wire) = self.wire.as_ref().filter(|_| at.wire) {
            self.counters.rx_syscalls.inc();
            got = self.wire_inbox.fill(wire.as_raw_fd());
            self.wire_left = 0..got;
            self.quiet = if got > 0 { 0 } else { self.quiet.saturating_add(1) };
        }
        if at.peers {
            /* one call for all that seldom has something */
            self.counters.rx_syscalls.inc();
            if self.peers.look() || at.services {
                got += self.recv_blocks();
            }
            self.eager = self.eager.saturating_sub(1);
        }
        if self.block_left.is_empty() && self.peers.may_have_frames() {
            got += self.recv_peers();
        }
        got
    }

    /// Whether messages from other processes of this host are among what the last round brought.
    #[inline]
    pub fn has_local(&self) -> bool {
        !self.block_left.is_empty()
    }

    /// [`Rx::recv`] for who slept on [`Rx::fds`]: looks at those that have woken it, or, if nothing has, at
    /// all.
    pub fn recv_woken(&mut self, woken: Woken<'_>) -> usize {
        if !woken.any() {
            return self.recv_all();
        }
        let mut services = self.blocks.iter().map(QpnBlock::fd).chain(self.listeners.ready_fd());
        let services = services.any(|fd| woken.has(fd));
        if services {
            self.eager = self.eager.max(self.blocks.len() as u32 + 1);
        }
        self.recv_from(LookedAt {
            wire: self.wire.as_ref().is_some_and(|wire| woken.has(wire.as_raw_fd())),
            peers: services || woken.has(self.peers.fd()),
            services,
        })
    }

    /// [`Rx::recv`] for who does not know where something has come: looks at every socket.
    pub fn recv_all(&mut self) -> usize {
        self.eager = self.eager.max(self.blocks.len() as u32 + 1);
        self.quiet = 0;
        self.recv()
    }

    /// Takes datagrams from the next socket in turn, of the blocks' and the services'.
    fn recv_blocks(&mut self) -> usize {
        let sockets = self.blocks.len() + usize::from(self.listeners.ready_fd().is_some());
        for _ in 0..sockets {
            self.turn = (self.turn + 1) % sockets;
            self.counters.rx_syscalls.inc();
            let fd = self.blocks.get(self.turn).map(QpnBlock::fd).or_else(|| self.listeners.next_ready());
            let got = fd.map_or(0, |fd| self.block_inbox.fill(fd));
            if got > 0 {
                self.eager = BLOCKS_EAGER;
                self.block_left = 0..got;
                return got;
            }
        }
        0
    }

    /// Takes frames that other processes handed on.
    fn recv_peers(&mut self) -> usize {
        let mut got = 0;
        while got < BLOCK_SLOTS && self.block_inbox.put(got, |room| self.peers.next_frames(room)) {
            got += 1;
        }
        self.block_left = 0..got;
        got
    }

    /// Whether frames come to their owners, as far as this process knows. Else what it sends to another one
    /// of the host may come to its own socket; without the port there is none.
    #[inline]
    pub fn is_settled(&self) -> bool {
        self.wire.is_none() || self.steering.is_settled()
    }

    /// Work that is due at `now`: steering, and trying to get the port. Gives when to call again at
    /// the latest (`None`: when something was received). Cheap when there is nothing to do; call it
    /// before sleeping, and now and then while polling.
    pub fn maintenance(&mut self, now: Nanos) -> Option<Nanos> {
        if let Some(capture) = &self.capture {
            capture.flush();
        }
        self.step(now);
        if self.left {
            return Some(Nanos::MAX);
        }
        if self.wire.is_none() {
            return Some(self.retry_at);
        }
        self.steering.deadline()
    }

    /// Whose each block of QPNs is, if [`Rx::maintenance`] has learnt of that since this was last asked: for
    /// [`RoceTx::set_owners`](crate::RoceTx).
    pub fn take_owners(&mut self) -> Option<Owners> {
        self.steering.take_owners()
    }

    fn step(&mut self, now: Nanos) {
        if self.wire.is_none() && now >= self.retry_at && !self.left {
            self.retry_at = now + PORT_RETRY;
            self.wire = open_wire(&self.settings).ok().flatten();
            self.list_fds();
            self.steering.changed();
            self.settle_groups();
        }
        if let (Some(wire), Some(block)) = (&self.wire, self.blocks.first())
            && self.steering.is_due(now)
        {
            self.steering.step(now, wire, block.number());
            if self.steering.busy() {
                self.eager = self.eager.max(BLOCKS_EVERY);
            }
        }
    }

    /// Gives the port and the blocks back: nothing is received any more. Who holds a place at the port and
    /// does not read stands in the way of the others there.
    pub fn leave(&mut self) {
        self.hand_on();
        self.left = true;
        self.wire = None;
        for block in self.blocks.drain(..) {
            let _ = self.peers.watch(block.socket(), false);
        }
        self.peers.close();
        self.listeners.clear();
        self.list_fds();
    }

    /// What the socket still holds would be lost with it; some of that may be others', whose place steering
    /// does not know yet, and UC and UD do not send it again.
    fn hand_on(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        let end = sockopt::monotonic() + LEAVE;
        while self.recv_all() > 0 && sockopt::monotonic() < end {
            while self.next_frame().is_some() {}
        }
    }

    /// The oldest question that another program asked, if any.
    pub fn take_request(&mut self) -> Option<ToolRequest> {
        self.requests.pop_front()
    }

    /// Answers it. Who asked may be gone; nothing comes of it then.
    pub fn answer(&mut self, request: &ToolRequest, text: &[u8]) {
        self.reply(&request.from, request.from_len, text);
    }

    fn reply(&self, to: &libc::sockaddr_un, to_len: libc::socklen_t, bytes: &[u8]) {
        let Some(block) = self.blocks.first() else { return };
        // SAFETY: pointers and lengths describe `bytes` and `to`, alive across the call.
        unsafe {
            let to = std::ptr::from_ref(to).cast();
            libc::sendto(block.fd(), bytes.as_ptr().cast(), bytes.len(), libc::MSG_DONTWAIT, to, to_len);
        }
    }
}

impl<C: Deref<Target = Counters>> Drop for Rx<C> {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            self.hand_on();
            self.peers.close();
        }
    }
}

impl<C: Deref<Target = Counters>> std::fmt::Debug for Rx<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rx").field("fds", &self.fds).field("blocks", &self.blocks).finish_non_exhaustive()
    }
}
