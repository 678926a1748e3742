//! The receiving half: datagrams in, checked frames out; and this process's place among the host's.
//!
//! Owns the socket on the wire's UDP port, this process's QPN blocks, and the handing on of frames that are for another
//! process. It must not know what a frame means beyond its destination QPN.

mod multicast;

use std::collections::VecDeque;
use std::ops::Deref;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use starverbs_core::wire::icrc::{Icrc, IcrcHeader, bytes_after_ip_id, ip_id_difference};
use starverbs_core::{Counters, FrameMeta, Nanos, QPN_BLOCK_SHIFT, QPN_MULTICAST, Qpn};
use starverbs_settings::Settings;

use crate::control::{self, Answer, Message, RUN_HEADER, Request, Run};
use crate::descriptor::Socket;
use crate::guest::{Guests, Patron};
use crate::handover::{Handover, Passed};
use crate::inbox::Inbox;
use crate::membership::Membership;
use crate::pcap::Capture;
use crate::probe::{Asked, PROBE_OPCODE, Probe, decode_check, is_own_host};
use crate::registry::QpnBlock;
use crate::socket::open_wire;
use crate::sockopt;
use crate::steer::Steering;
use crate::{BackendError, HostAddr, registry};

/// BTH and ICRC: no frame is shorter.
const SHORTEST: usize = 16;
const ICRC: usize = 4;
/// Datagrams taken at once from the wire, and from a block's socket.
const WIRE_SLOTS: usize = 16;
const BLOCK_SLOTS: usize = 4;
/// Rounds of [`Rx::recv`] without a look at the blocks' sockets, while nothing comes from there.
const BLOCKS_EVERY: u32 = 64;
/// Rounds with a look every time, after something came.
const BLOCKS_EAGER: u32 = 4096;
/// How long joining waits for the other processes.
const JOIN: Nanos = 20_000_000;
/// How long leaving goes on with what keeps coming.
const LEAVE: Nanos = 20_000_000;
/// A guest tries again to bind after this.
const GUEST_RETRY: Nanos = 1_000_000_000;
/// Where the multicast QPN lies; no process has that block.
const MULTICAST_BLOCK: u32 = QPN_MULTICAST >> QPN_BLOCK_SHIFT;
/// Questions kept until they are taken.
const REQUESTS: usize = 16;

/// Where the frames that are being looked at came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Origin {
    Wire,
    Block,
}

/// A datagram with the frames in it that are still to come.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    origin: Origin,
    slot: usize,
    at: usize,
    segment: usize,
    index: u16,
    sport: u16,
    meta: FrameMeta,
}

/// Where the next frame lies.
struct Found {
    meta: FrameMeta,
    origin: Origin,
    slot: usize,
    from: usize,
    to: usize,
}

/// The receiving half of a port. Dropping it hands on what others' frames it still holds.
pub struct Rx<C: Deref<Target = Counters>> {
    /// The process that opened it; a forked child must not read for it
    process: u32,
    counters: C,
    capture: Option<Capture>,
    settings: Settings,
    token: u64,
    /// `None` for a guest
    wire: Option<Socket>,
    /// It left the port for good
    left: bool,
    blocks: Vec<QpnBlock>,
    /// A bit for each block of this process
    local: [u64; 64],
    membership: Membership,
    /// Those of other users whose multicast is handed on
    guests: Guests,
    /// Who hands on the multicast of this process, if it is a guest
    patron: Patron,
    fds: Vec<RawFd>,
    wire_inbox: Inbox,
    block_inbox: Inbox,
    /// Datagrams of the last `recv` not yet begun: slots of the wire's, then of the block's inbox
    wire_left: std::ops::Range<usize>,
    block_left: std::ops::Range<usize>,
    cursor: Option<Cursor>,
    handover: Handover,
    steering: Steering,
    asked: Option<Asked>,
    requests: VecDeque<Request>,
    rounds: u32,
    eager: u32,
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
            guests: Guests::default(),
            patron: Patron::new(settings.port),
            fds: Vec::new(),
            wire_inbox: Inbox::new(WIRE_SLOTS)?,
            block_inbox: Inbox::new(BLOCK_SLOTS)?,
            wire_left: 0..0,
            block_left: 0..0,
            cursor: None,
            handover: Handover::new(settings.port),
            steering: Steering::new(settings.port, token),
            asked: None,
            requests: VecDeque::with_capacity(REQUESTS),
            rounds: 0,
            eager: BLOCKS_EAGER,
            turn: 0,
            retry_at: 0,
        };
        rx.claim_block()?;
        rx.join();
        Ok(rx)
    }

    /// First round of probing: until the others have answered, or [`JOIN`] is over. No QP exists yet that frames could be for.
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
        let block = QpnBlock::claim(self.settings.port)?;
        let number = block.number();
        self.local[(number / 64) as usize] |= 1 << (number % 64);
        self.blocks.push(block);
        self.list_fds();
        self.steering.changed();
        Ok(number)
    }

    /// The blocks of this process, by number; the first was claimed at opening.
    pub fn blocks(&self) -> impl Iterator<Item = u32> {
        self.blocks.iter().map(QpnBlock::number)
    }

    /// Whether the UDP port is another user's, whose processes hand our frames on.
    pub fn is_guest(&self) -> bool {
        self.wire.is_none()
    }

    /// What to `poll(2)` for POLLIN. Changes with [`Rx::claim_block`] and, for a guest, with [`Rx::maintenance`].
    pub fn fds(&self) -> &[RawFd] {
        &self.fds
    }

    fn list_fds(&mut self) {
        self.fds.clear();
        self.fds.extend(self.wire.iter().map(AsRawFd::as_raw_fd));
        self.fds.extend(self.blocks.iter().map(QpnBlock::fd));
    }

    #[inline]
    fn is_local(&self, block: u32) -> bool {
        self.local[(block / 64 % 64) as usize] >> (block % 64) & 1 != 0
    }

    /// Takes datagrams from the sockets, without waiting; gives how many. Frames of the round before that were not taken
    /// with [`Rx::next_frame`] stay, and nothing is received.
    #[inline]
    pub fn recv(&mut self) -> usize {
        if self.cursor.is_some() || !self.wire_left.is_empty() || !self.block_left.is_empty() {
            return 1;
        }
        let mut got = 0;
        if let Some(wire) = &self.wire {
            self.counters.rx_syscalls.inc();
            got = self.wire_inbox.fill(wire.as_raw_fd());
            self.wire_left = 0..got;
        }
        self.rounds = self.rounds.wrapping_add(1);
        if self.eager > 0 || self.wire.is_none() || self.rounds.is_multiple_of(BLOCKS_EVERY) {
            got += self.recv_blocks();
        }
        got
    }

    /// [`Rx::recv`] for who was woken: looks at every socket.
    pub fn recv_all(&mut self) -> usize {
        self.eager = self.eager.max(self.blocks.len() as u32);
        self.recv()
    }

    /// Takes datagrams from the next block's socket in turn.
    fn recv_blocks(&mut self) -> usize {
        self.eager = self.eager.saturating_sub(1);
        for _ in 0..self.blocks.len() {
            self.turn = (self.turn + 1) % self.blocks.len();
            self.counters.rx_syscalls.inc();
            let got = self.block_inbox.fill(self.blocks[self.turn].fd());
            if got > 0 {
                self.eager = BLOCKS_EAGER;
                self.block_left = 0..got;
                return got;
            }
        }
        0
    }

    /// The next frame received for this process, from its BTH to before its ICRC, which was right. What is not for this
    /// process, or not right, is handed on or dropped, and counted.
    #[inline]
    pub fn next_frame(&mut self) -> Option<(FrameMeta, &[u8])> {
        let found = self.find()?;
        let inbox = match found.origin {
            Origin::Wire => &self.wire_inbox,
            Origin::Block => &self.block_inbox,
        };
        Some((found.meta, &inbox.bytes(found.slot)[found.from..found.to]))
    }

    fn find(&mut self) -> Option<Found> {
        loop {
            let Some(mut cursor) = self.cursor.take().or_else(|| self.next_datagram()) else {
                if self.wire_left.is_empty() && self.block_left.is_empty() {
                    if let Some(asked) = self.asked.take() {
                        self.answer_probes(asked);
                    }
                    return None;
                }
                continue;
            };
            let inbox = if cursor.origin == Origin::Wire { &self.wire_inbox } else { &self.block_inbox };
            let bytes = inbox.bytes(cursor.slot);
            let (from, to) = (cursor.at, (cursor.at + cursor.segment).min(bytes.len()));
            if from >= to {
                continue;
            }
            let frame = &bytes[from..to];
            if frame.len() < SHORTEST {
                self.counters.drop_malformed.inc();
                continue;
            }
            let block = qpn(frame) >> QPN_BLOCK_SHIFT;
            let ours = self.is_local(block) || (block == MULTICAST_BLOCK && self.takes_multicast(&cursor));
            if !ours {
                self.foreign(&mut cursor, block);
                self.cursor = Some(cursor);
                continue;
            }
            let good = self.check(&cursor, frame);
            let found =
                Found { meta: cursor.meta, origin: cursor.origin, slot: cursor.slot, from, to: to - ICRC };
            cursor.at = to;
            cursor.index = cursor.index.wrapping_add(1);
            self.cursor = Some(cursor);
            if good {
                return Some(found);
            }
            self.bad(&cursor, from);
        }
    }

    /// Deals with what lies at `from` of the cursor's datagram, for this process and without a good ICRC.
    #[cold]
    fn bad(&mut self, cursor: &Cursor, from: usize) {
        let by_wire = cursor.origin == Origin::Wire;
        let inbox = if by_wire { &self.wire_inbox } else { &self.block_inbox };
        let bytes = &inbox.bytes(cursor.slot)[from..cursor.at];
        match decode_check(bytes).filter(|_| is_own_host(&cursor.meta)) {
            Some(nonce) => self.steering.checked(nonce, by_wire),
            None => self.counters.drop_icrc.inc(),
        }
    }

    /// Whether the frame's ICRC is right, for the identification that segmented sends give or, IPv4, for any.
    #[inline]
    fn check(&self, cursor: &Cursor, frame: &[u8]) -> bool {
        let Some((body, icrc)) = frame.split_last_chunk::<ICRC>() else { return false };
        let mut outer = IcrcHeader {
            src: cursor.meta.src,
            dst: cursor.meta.dst,
            sport: cursor.sport,
            dport: self.settings.port,
            ip_id: cursor.index,
        };
        let Some(computed) = Icrc::of_frame(&outer, body) else { return false };
        let error = u32::from_le_bytes(computed) ^ u32::from_le_bytes(*icrc);
        if error != 0 {
            let v4 = cursor.meta.dst.ipv4().is_some();
            match ip_id_difference(error, bytes_after_ip_id(body.len())).filter(|_| v4) {
                Some(difference) => outer.ip_id ^= difference,
                None => return false,
            }
        }
        if let Some(capture) = &self.capture {
            capture.frame(&outer, &cursor.meta, &[frame]);
        }
        true
    }

    /// Begins the next datagram. `None`: it held no frames, or there is none.
    fn next_datagram(&mut self) -> Option<Cursor> {
        if let Some(slot) = self.wire_left.next() {
            let outer = self.wire_inbox.outer(slot);
            if self.guests.any() && outer.meta.dst.is_multicast() {
                self.serve_guests(slot, &outer);
            }
            let segment = if outer.segment == 0 { usize::MAX >> 1 } else { outer.segment as usize };
            let origin = Origin::Wire;
            return Some(Cursor {
                origin,
                slot,
                at: 0,
                segment,
                index: 0,
                sport: outer.sport,
                meta: outer.meta,
            });
        }
        let slot = self.block_left.next()?;
        match control::decode(self.block_inbox.bytes(slot))? {
            Message::Frames(run) if run.meta.dst.is_multicast() && !self.is_patrons(&run) => {
                self.counters.drop_multicast.inc();
                None
            }
            Message::Frames(run) => {
                let frames = self.block_inbox.bytes(slot).len() - RUN_HEADER;
                self.counters.handed_in.add(frames.div_ceil(run.segment as usize) as u64);
                Some(Cursor {
                    origin: Origin::Block,
                    slot,
                    at: RUN_HEADER,
                    segment: run.segment as usize,
                    index: run.first,
                    sport: run.sport,
                    meta: run.meta,
                })
            }
            Message::Answer(answer) => {
                self.steering.answer(answer);
                None
            }
            Message::Wish(wish) => {
                let (from, from_len) = self.block_inbox.unix_sender(slot);
                self.grant(wish, &from, from_len);
                None
            }
            Message::Request(text) => {
                if self.requests.len() < REQUESTS {
                    let (from, from_len) = self.block_inbox.unix_sender(slot);
                    self.requests.push_back(Request { from, from_len, text: text.to_vec() });
                }
                None
            }
        }
    }

    /// Deals with the frames at the cursor that are for `block`, not of this process, and moves the cursor behind them.
    #[cold]
    fn foreign(&mut self, cursor: &mut Cursor, block: u32) {
        let inbox = if cursor.origin == Origin::Wire { &self.wire_inbox } else { &self.block_inbox };
        let bytes = inbox.bytes(cursor.slot);
        let (from, first) = (cursor.at, cursor.index);
        let mut frames = 0;
        while let Some(rest) = bytes.get(cursor.at..).filter(|rest| rest.len() >= SHORTEST)
            && qpn(rest) >> QPN_BLOCK_SHIFT == block
        {
            cursor.at += cursor.segment.min(rest.len());
            cursor.index = cursor.index.wrapping_add(1);
            frames += 1;
        }
        if cursor.meta.dst.is_multicast() {
            // Every member of the group got it: a frame handed on would reach its QP once for each.
            return self.counters.drop_multicast.add(frames);
        }
        let run = &bytes[from..cursor.at];
        if run.first() == Some(&PROBE_OPCODE)
            && let Some(probe) = Probe::decode(run)
        {
            let valid = is_own_host(&cursor.meta) && probe.reply_block <= registry::LAST_BLOCK;
            if valid && let Some(before) = Asked::add(&mut self.asked, probe) {
                self.answer_probes(before);
            }
            return;
        }
        if cursor.origin == Origin::Block {
            // Handed to the wrong one; it must not go round.
            return self.counters.drop_no_owner.add(frames);
        }
        let segment = cursor.segment.min(run.len()) as u16;
        let head =
            control::encode_run(&Run { meta: cursor.meta, sport: cursor.sport, segment, first, tag: 0 });
        match self.handover.pass(block, &head, run) {
            Passed::Yes => {
                self.counters.handed_on.add(frames);
                // Steering looks at a datagram's first frame; the others' place says nothing about it.
                if from == 0 {
                    self.steering.saw_wrong();
                }
            }
            Passed::NoOwner => self.counters.drop_no_owner.add(frames),
            Passed::Full => self.counters.drop_handover.add(frames),
        }
    }

    fn answer_probes(&mut self, asked: Asked) {
        let Probe { nonce, index, reply_block } = asked.probe;
        let blocks = self.blocks().map(|b| b as u16).collect();
        let answer = Answer { nonce, index, count: asked.count, token: self.token, blocks };
        if self.is_local(reply_block) {
            self.steering.answer(answer);
        } else {
            self.steering.was_asked();
            self.handover.pass(reply_block, &control::encode_answer(&answer), &[]);
        }
    }

    /// Work that is due at `now`: steering, and a guest's trying to be a member. Gives when to call again at the latest
    /// (`None`: when something was received). Cheap when there is nothing to do; call it before sleeping, and now and then
    /// while polling.
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

    fn step(&mut self, now: Nanos) {
        if self.wire.is_none() && now >= self.retry_at && !self.left {
            self.retry_at = now + GUEST_RETRY;
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

    /// Gives the port and the blocks back: nothing is received any more. Who holds a place at the port and does not read
    /// stands in the way of the others there.
    pub fn leave(&mut self) {
        self.hand_on();
        self.left = true;
        self.wire = None;
        self.blocks.clear();
        self.list_fds();
    }

    /// What the socket still holds would be lost with it; some of that may be others', whose place steering does not know
    /// yet, and UC and UD do not send it again.
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
    pub fn take_request(&mut self) -> Option<Request> {
        self.requests.pop_front()
    }

    /// Answers it. Who asked may be gone; nothing comes of it then.
    pub fn answer(&mut self, request: &Request, text: &[u8]) {
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
        self.hand_on();
    }
}

impl<C: Deref<Target = Counters>> std::fmt::Debug for Rx<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rx").field("fds", &self.fds).field("blocks", &self.blocks).finish_non_exhaustive()
    }
}

/// Destination QPN of a frame (IBTA 9.2: BTH bytes 5 to 7).
#[inline]
fn qpn(frame: &[u8]) -> Qpn {
    u32::from_be_bytes([0, frame[5], frame[6], frame[7]])
}
