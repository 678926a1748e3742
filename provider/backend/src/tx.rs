//! The sending half of a port: datagrams in, as few system calls as possible out.
//!
//! Datagrams collect in a batch until [`Tx::flush`]. Those in a row to one place, equal in size (the last may
//! be shorter), become one segmented send (UDP_SEGMENT), whose segments the kernel numbers 0, 1, 2 ... in the
//! IPv4 identification. A [`WireFault`] stands in front when the settings ask for one.
//! Owns the batch and the sockets. It must not know what a datagram means: how one is checked, and which
//! socket it leaves from, is the [`Framing`]'s.

mod host_frames;
pub(crate) mod roce;

use std::ops::Deref;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use starverbs_core::wire::{Crc, IcrcHeader};
use starverbs_core::{Av, Counters, FrameMeta, Nanos};
use starverbs_settings::Settings;

use crate::batch::{FrameBatch, FrameGroup, HOPS, MAX_FRAME};
use crate::control::{SENT, StrayFrames};
use crate::descriptor::Socket;
use crate::fault::{WireFault, flip};
use crate::pcap::Capture;
use crate::program::Payload;
use crate::{BackendError, HostAddr, sockopt};
use host_frames::HostFrames;

/// Payload below this is copied: an iovec of its own costs more.
const COPY_BELOW: usize = 512;
/// Payload in more pieces than this is copied.
const MOST_PIECES: usize = 8;
/// Length of the CRC at a datagram's end.
pub(crate) const CRC: usize = 4;
/// What a full send buffer may cost before its frames are dropped.
const PATIENCE: Duration = Duration::from_millis(2);

/// A bit for each of so many messages.
fn all(messages: usize) -> u64 {
    const { assert!(crate::batch::MESSAGES <= u64::BITS as usize) };
    u64::MAX.checked_shr((u64::BITS as usize - messages) as u32).unwrap_or(0)
}

/// A datagram without its CRC.
#[derive(Clone, Copy)]
pub struct Datagram<'a> {
    pub(crate) to: &'a Av,
    /// UDP port that it goes to
    pub(crate) port: u16,
    pub(crate) head: &'a [u8],
    /// The card's own bytes between header and payload
    pub(crate) data: &'a [u8],
    pub(crate) payload: Payload<'a>,
    /// Zero bytes behind the payload: 0 to 3
    pub(crate) pad: u8,
    /// The payload may be written meanwhile: it is copied before its CRC is computed
    pub(crate) volatile: bool,
}

/// A socket to send from.
#[derive(Debug)]
pub struct Sender {
    pub(crate) fd: Arc<Socket>,
    pub(crate) sport: u16,
    pub(crate) gso: bool,
}

/// How a datagram leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Route {
    /// Index of the socket
    pub socket: u8,
    /// Of those to one address and port, datagrams of one block are segments of one send and stay in order
    pub block: u32,
}

/// What a port's datagrams are: how they are checked, and which sockets they leave from.
pub trait Framing {
    /// Whether the CRC covers the IPv4 identification
    const COVERS_IP_ID: bool;
    /// Whether the sockets are bound to no address: each message carries the source's
    const ANYWHERE: bool;

    /// How a datagram leaves, whose source address has the index `source`. `None`: it is none of this
    /// framing's.
    fn route(&self, datagram: &Datagram<'_>, source: usize, addrs: &[HostAddr]) -> Option<Route>;

    /// Opens the socket that sends from an address, which is not open yet.
    ///
    /// # Errors
    /// See [`BackendError`].
    fn open(&self, addr: &HostAddr) -> Result<Sender, BackendError>;

    /// Begins the CRC of a datagram of `size` bytes, itself included. `first` are the datagram's first bytes,
    /// the whole header at least: a checksum in the header is filled in.
    fn begin(&mut self, path: &IcrcHeader, size: usize, first: &mut [u8]) -> Crc;
}

/// The sending half of a port. Dropping it sends what the fault held back.
pub struct Tx<F: Framing, C: Deref<Target = Counters>> {
    /// The process that opened it; a forked child must not send for it
    process: u32,
    pub(crate) framing: F,
    counters: C,
    fault: Option<Box<WireFault>>,
    capture: Option<Capture>,
    addrs: Vec<HostAddr>,
    /// Which of them the last datagram left from
    source: usize,
    pub(crate) senders: Vec<Option<Sender>>,
    pub(crate) batch: FrameBatch,
    /// The way through memory to processes of this host
    host_frames: Option<HostFrames>,
}

impl<F: Framing, C: Deref<Target = Counters>> Tx<F, C> {
    pub(crate) fn new(
        settings: &Settings,
        addrs: &[HostAddr],
        framing: F,
        senders: Vec<Option<Sender>>,
        counters: C,
        capture: Option<Capture>,
    ) -> Result<Self, BackendError> {
        Ok(Tx {
            process: std::process::id(),
            framing,
            counters,
            fault: WireFault::from_spec(&settings.fault),
            capture,
            addrs: addrs.to_vec(),
            source: 0,
            senders,
            batch: FrameBatch::new()?,
            host_frames: None,
        })
    }

    /// Whether a datagram of any size may be added before the next [`Tx::flush`].
    #[inline]
    pub fn can_send(&self) -> bool {
        self.batch.has_room()
    }

    /// Sends what was added. What the kernel refuses is lost and counted.
    /// With `STARVERBS_FAULT`, what waited until `now` goes too.
    #[inline]
    pub fn flush(&mut self, now: Nanos) {
        if self.fault.is_some() {
            self.release(now);
        }
        if !self.batch.is_empty() {
            self.send_all();
        }
    }

    /// When [`Tx::flush`] has to be called although nothing new is sent: datagrams wait for their time.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.fault.as_ref()?.next_deadline()
    }

    /// Adds a datagram. Payload memory is read now and, unless volatile, again at the flush. One that cannot
    /// go (too long, address foreign, IP versions mixed) is counted in `tx_errors` and lost.
    #[inline]
    pub(crate) fn send_datagram(&mut self, datagram: &Datagram<'_>) {
        match &mut self.fault {
            None => self.push(datagram, None),
            Some(fault) => fault.take(datagram, &self.counters),
        }
    }

    /// Adds what the fault lets go.
    #[cold]
    fn release(&mut self, now: Nanos) {
        let Some(mut fault) = self.fault.take() else { return };
        fault.release(now, |frame| self.push(&frame.datagram(), frame.corrupt));
        self.fault = Some(fault);
    }

    /// Adds a datagram to the batch, perhaps with a bit to turn over behind the CRC's back.
    fn push(&mut self, datagram: &Datagram<'_>, corrupt: Option<u64>) {
        if self.add(datagram, corrupt).is_none() {
            self.counters.tx_errors.inc();
        }
    }

    /// `None`: it cannot go.
    #[inline]
    fn add(&mut self, datagram: &Datagram<'_>, corrupt: Option<u64>) -> Option<()> {
        let Datagram { to, port, payload, .. } = *datagram;
        let (gathered, pad) = (payload.len(), usize::from(datagram.pad));
        let length = datagram.data.len() + gathered;
        let size = datagram.head.len() + length + pad + CRC;
        if size > MAX_FRAME || pad > 3 || to.sgid.ipv4().is_some() != to.dgid.ipv4().is_some() {
            return None;
        }
        if !self.batch.has_room() {
            self.send_all();
        }
        let source = self.source_of(to)?;
        let Route { socket, block } = self.framing.route(datagram, source, &self.addrs)?;
        let &Sender { sport, gso, .. } = self.sender(socket, source)?;
        let group = FrameGroup {
            source: source as u8,
            socket,
            anywhere: F::ANYWHERE,
            port,
            traffic_class: to.traffic_class,
            hop_limit: if to.hop_limit == 0 { HOPS } else { to.hop_limit },
            block,
            dgid: to.dgid,
        };
        let segment = self.batch.place(&group, size, gso);
        let ip_id = if F::COVERS_IP_ID { segment } else { 0 };
        let path = IcrcHeader { src: to.sgid, dst: to.dgid, sport, dport: port, ip_id };
        if datagram.volatile || gathered < COPY_BELOW || payload.pieces() > MOST_PIECES {
            self.write(&path, datagram, size, corrupt);
        } else {
            self.gather(&path, datagram, size);
        }
        self.counters.tx_packets.inc();
        self.counters.tx_bytes.add(length as u64);
        if self.capture.is_some() {
            self.captured(to, &path, size);
        }
        Some(())
    }

    /// Index of the source address. An answer to a frame knows the address alone.
    #[inline]
    fn source_of(&mut self, to: &Av) -> Option<usize> {
        let is = |at: usize| self.addrs.get(at).is_some_and(|addr| addr.gid == to.sgid);
        let index = usize::from(to.sgid_index);
        if is(index) {
            self.source = index;
        } else if !is(self.source) {
            self.source = self.addrs.iter().position(|addr| addr.gid == to.sgid)?;
        }
        Some(self.source)
    }

    /// A socket, which is opened now if it is not open yet.
    #[inline]
    fn sender(&mut self, socket: u8, source: usize) -> Option<&Sender> {
        let slot = self.senders.get_mut(usize::from(socket))?;
        if slot.is_none() {
            *slot = self.framing.open(self.addrs.get(source)?).ok();
        }
        slot.as_ref()
    }

    /// Copies a datagram of `size` bytes into the batch.
    #[inline]
    fn write(&mut self, path: &IcrcHeader, datagram: &Datagram<'_>, size: usize, corrupt: Option<u64>) {
        let room = self.batch.room(size);
        let (body, crc) = room.split_at_mut(size - CRC);
        let mut rest = &mut *body;
        let mut next = |len: usize| rest.split_off_mut(..len).unwrap_or_default();
        next(datagram.head.len()).copy_from_slice(datagram.head);
        next(datagram.data.len()).copy_from_slice(datagram.data);
        for bytes in datagram.payload.iter() {
            bytes.copy_to(0, next(bytes.len()));
        }
        if !rest.is_empty() {
            rest.fill(0);
        }
        crc.copy_from_slice(&self.framing.begin(path, size, body).finish());
        if let Some(draw) = corrupt {
            flip(room, draw);
        }
    }

    /// Adds a datagram of `size` bytes whose payload stays where it is, but for small pieces.
    #[inline]
    fn gather(&mut self, path: &IcrcHeader, datagram: &Datagram<'_>, size: usize) {
        let mut crc = self.framing.begin(path, size, self.batch.copy(datagram.head));
        if !datagram.data.is_empty() {
            crc.update(self.batch.copy(datagram.data));
        }
        for bytes in datagram.payload.iter() {
            if bytes.len() < COPY_BELOW {
                crc.update(self.batch.copy_program(bytes));
            } else {
                self.batch.gather(bytes, &mut crc);
            }
        }
        if datagram.pad > 0 {
            crc.update(self.batch.copy(&[0; 3][..usize::from(datagram.pad)]));
        }
        self.batch.copy(&crc.finish());
    }

    #[cold]
    fn captured(&self, to: &Av, path: &IcrcHeader, size: usize) {
        let Some(capture) = &self.capture else { return };
        let Av { sgid: src, dgid: dst, traffic_class, hop_limit, .. } = *to;
        let meta = FrameMeta { src, dst, traffic_class, hop_limit };
        capture.frame(path, &meta, &[&self.batch.last_frame(size)]);
    }

    /// Sends what the batch holds.
    fn send_all(&mut self) {
        self.batch.put_in_order();
        let passed = self.pass_all();
        if passed != all(self.batch.groups()) {
            self.send_rest(passed);
        }
        self.batch.clear();
        if let Some(capture) = &self.capture {
            capture.flush();
        }
    }

    /// Hands over what goes to processes of this host through memory; gives a bit for each message that went.
    #[inline]
    fn pass_all(&mut self) -> u64 {
        let Some(host_frames) = &mut self.host_frames else { return 0 };
        let mut passed = 0;
        for at in 0..self.batch.groups() {
            let group = self.batch.group(at);
            if !self.addrs.iter().any(|addr| addr.gid == group.dgid) {
                continue;
            }
            let Some(Some(sender)) = self.senders.get(usize::from(group.socket)) else { continue };
            let FrameGroup { traffic_class, hop_limit, dgid: dst, block, .. } = *group;
            let src = self.addrs[usize::from(group.source)].gid;
            let meta = FrameMeta { src, dst, traffic_class, hop_limit };
            let (segment, pieces) = self.batch.pieces(at);
            let run = StrayFrames { meta, sport: sender.sport, segment, first: 0, tag: SENT };
            // SAFETY: the batch's pieces can be read until it is cleared.
            if unsafe { host_frames.pass(block, &run, pieces) } {
                self.counters.tx_local_frames.add(u64::from(self.batch.frames(at)));
                passed |= 1 << at;
            }
        }
        passed
    }

    /// Sends the messages that have no bit in `passed`.
    fn send_rest(&mut self, passed: u64) {
        self.batch.seal(&self.addrs);
        let mut from = 0;
        while let Some(left) = self.batch.next_left(from, passed) {
            let (at, end) = (left.start, self.batch.run_end(left.start).min(left.end));
            let socket = self.batch.group(at).socket;
            if let Some(Some(sender)) = self.senders.get(usize::from(socket)) {
                self.send_run(sender.fd.as_raw_fd(), at, end);
            }
            from = end;
        }
    }

    /// Sends the messages `at..end` of the sealed batch, which are all of the socket `fd`.
    fn send_run(&mut self, fd: RawFd, mut at: usize, end: usize) {
        let mut waited = false;
        while at < end {
            self.counters.tx_syscalls.inc();
            match self.batch.send(fd, at, end) {
                Ok(sent) => {
                    at += sent;
                    waited = false;
                }
                Err(libc::EINTR) => {}
                Err(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) if !waited => {
                    waited = true;
                    sockopt::wait(&[fd], libc::POLLOUT, PATIENCE);
                }
                Err(libc::EIO | libc::EINVAL | libc::EOPNOTSUPP) if self.batch.frames(at) > 1 => {
                    self.send_singly(fd, at);
                    at += 1;
                }
                Err(_) => {
                    self.counters.tx_errors.add(self.batch.frames(at) as u64);
                    at += 1;
                    waited = false;
                }
            }
        }
    }

    /// Sends a segmented message's frames one by one: the way to this peer does not segment. Their
    /// identifications are all 0 then, so that a CRC that covers them changes.
    #[cold]
    fn send_singly(&mut self, fd: RawFd, at: usize) {
        let group = *self.batch.group(at);
        let from = &self.addrs[usize::from(group.source)];
        let Some(Some(sender)) = self.senders.get_mut(usize::from(group.socket)) else { return };
        let (src, dst, sport, dport) = (from.gid, group.dgid, sender.sport, group.port);
        let path = IcrcHeader { src, dst, sport, dport, ip_id: 0 };
        let mut all_sent = true;
        let mut room = [0; MAX_FRAME];
        for index in 0..self.batch.frames(at) {
            let len = self.batch.read_frame(at, index, &mut room);
            let frame = &mut room[..len];
            if F::COVERS_IP_ID
                && let Some((body, crc)) = frame.split_last_chunk_mut::<CRC>()
            {
                *crc = self.framing.begin(&path, len, body).finish();
            }
            self.counters.tx_syscalls.inc();
            if self.batch.send_one(fd, at, from, frame).is_err() {
                self.counters.tx_errors.inc();
                all_sent = false;
            }
        }
        // Only if segmentation was at fault, and not the destination.
        sender.gso &= !all_sent;
    }
}

impl<F: Framing, C: Deref<Target = Counters>> Drop for Tx<F, C> {
    /// What is on a wire arrives, though its sender is gone: without a QP's last ACK the peer's last message
    /// would fail.
    fn drop(&mut self) {
        if self.fault.is_some() && self.process == std::process::id() {
            self.flush(Nanos::MAX);
        }
    }
}

impl<F: Framing, C: Deref<Target = Counters>> std::fmt::Debug for Tx<F, C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tx").field("addrs", &self.addrs).finish_non_exhaustive()
    }
}
