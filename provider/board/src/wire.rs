//! The port of a board: UDP, or a line in memory that brings back what is sent.
//!
//! Owns which of the two a board has. The line has neither system calls nor chance, and so is the port of
//! boards that are driven by a program of bytes.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::rc::Rc;

use starverbs_backend::{BackendError, HostAddr, Payload, RoceTx, Rx};
use starverbs_cm::ListenAt;
use starverbs_core::{Av, FrameMeta, Gid, Nanos, Seg};

use crate::dma::Errno;
use crate::record::{FrameRecord, Tap};
use crate::stats::Stats;

/// The sending half.
pub(crate) enum WireTx {
    Udp(Box<RoceTx<Stats>>),
    #[cfg_attr(not(feature = "fuzzing"), expect(dead_code))]
    Line(Rc<LoopLine>),
    /// What is sent is compared with a record, and goes nowhere
    Nowhere(Vec<HostAddr>),
}

/// The receiving half.
pub(crate) enum WireRx {
    Udp(Box<Rx<Stats>>),
    /// And the frame that was taken last
    #[cfg_attr(not(feature = "fuzzing"), expect(dead_code))]
    Line(Rc<LoopLine>, Vec<u8>),
    /// Frames of a record that is played back, and the one that was taken last
    Record(Rc<Tap>, Vec<u8>),
}

/// Frames that wait on a line at most; the next is lost.
const WAITING: usize = 4096;

/// A line in memory: what is sent comes back.
pub(crate) struct LoopLine {
    frames: RefCell<VecDeque<(FrameMeta, Vec<u8>)>>,
    addrs: Vec<HostAddr>,
    /// Blocks of QPNs, and of communication IDs, that were given out
    blocks: Cell<u32>,
}

impl LoopLine {
    /// One of a host with these addresses.
    #[cfg_attr(not(feature = "fuzzing"), expect(dead_code))]
    pub(crate) fn new(addrs: &[HostAddr]) -> Rc<LoopLine> {
        Rc::new(LoopLine { frames: RefCell::default(), addrs: addrs.to_vec(), blocks: Cell::new(0) })
    }

    /// Puts a frame on the line.
    pub(crate) fn put(&self, meta: FrameMeta, frame: Vec<u8>) {
        let mut frames = self.frames.borrow_mut();
        if frames.len() < WAITING {
            frames.push_back((meta, frame));
        }
    }
}

/// The bytes of a frame in one piece.
///
/// # Safety
/// The segments are readable.
pub(crate) unsafe fn gather(header: &[u8], payload: &[Seg], pad: u8) -> Vec<u8> {
    let mut frame = header.to_vec();
    for seg in payload.iter().filter(|seg| seg.len > 0) {
        let (begin, len) = (frame.len(), seg.len as usize);
        frame.resize(begin + len, 0);
        // SAFETY: readable, as the caller says; `frame` is ours, and was made as long.
        unsafe { frame.as_mut_ptr().add(begin).copy_from(seg.addr as *const u8, len) };
    }
    frame.resize(frame.len() + usize::from(pad), 0);
    frame
}

impl WireTx {
    /// As of [`starverbs_core::Port::send_frame`].
    ///
    /// # Safety
    /// The payload's memory stays readable until the next [`WireTx::flush`].
    pub(crate) unsafe fn send_frame(
        &mut self,
        to: &Av,
        header: &[u8],
        payload: &[Seg],
        pad: u8,
        volatile: bool,
    ) {
        match self {
            WireTx::Udp(tx) => {
                // SAFETY: as the caller says.
                let payload = unsafe { Payload::new(payload) };
                tx.send_frame(to, header, payload, pad, volatile);
            }
            WireTx::Line(line) => {
                // SAFETY: as the caller says.
                let frame = unsafe { gather(header, payload, pad) };
                let hop_limit = if to.hop_limit == 0 { 64 } else { to.hop_limit };
                let traffic_class = to.traffic_class;
                line.put(FrameMeta { src: to.sgid, dst: to.dgid, traffic_class, hop_limit }, frame);
            }
            WireTx::Nowhere(_) => {}
        }
    }

    pub(crate) fn can_send(&self) -> bool {
        match self {
            WireTx::Udp(tx) => tx.can_send(),
            WireTx::Line(_) | WireTx::Nowhere(_) => true,
        }
    }

    pub(crate) fn has_address(&self, gid: &Gid) -> bool {
        let addrs = match self {
            WireTx::Udp(tx) => return tx.has_address(gid),
            WireTx::Line(line) => &line.addrs,
            WireTx::Nowhere(addrs) => addrs,
        };
        addrs.iter().any(|addr| addr.gid == *gid)
    }

    /// Sends what was added.
    pub(crate) fn flush(&mut self, now: Nanos) {
        if let WireTx::Udp(tx) = self {
            tx.flush(now);
        }
    }
}

impl WireRx {
    /// Looks for frames; says whether there are any.
    pub(crate) fn recv(&mut self) -> bool {
        match self {
            WireRx::Udp(rx) => rx.recv() > 0,
            WireRx::Line(line, _) => !line.frames.borrow().is_empty(),
            WireRx::Record(..) => true,
        }
    }

    /// The next one.
    pub(crate) fn next_frame(&mut self) -> Option<(FrameMeta, &[u8])> {
        match self {
            WireRx::Udp(rx) => rx.next_frame(),
            WireRx::Line(line, last) => {
                let (meta, frame) = line.frames.borrow_mut().pop_front()?;
                *last = frame;
                Some((meta, last))
            }
            WireRx::Record(tap, last) => {
                let FrameRecord { src, dst, traffic_class, hop_limit, bytes } = tap.next_frame()?;
                *last = bytes;
                Some((FrameMeta { src, dst, traffic_class, hop_limit }, last))
            }
        }
    }

    /// A block that nobody else of the host has.
    pub(crate) fn claim_block(&mut self) -> Result<u32, Errno> {
        match self {
            WireRx::Udp(rx) => rx.claim_block().map_err(errno),
            WireRx::Line(line, _) => {
                let block = line.blocks.get() + 1;
                /* QPNs have 24 bits, blocks the upper 12 of them */
                if block >= 1 << 12 {
                    return Err(libc::EAGAIN);
                }
                line.blocks.set(block);
                Ok(block)
            }
            WireRx::Record(..) => Err(libc::EIO),
        }
    }

    pub(crate) fn join_group(&mut self, group: Gid) -> Result<(), Errno> {
        match self {
            WireRx::Udp(rx) => rx.join_group(group).map_err(errno),
            WireRx::Line(..) | WireRx::Record(..) => Ok(()),
        }
    }

    pub(crate) fn leave_group(&mut self, group: Gid) {
        if let WireRx::Udp(rx) = self {
            rx.leave_group(group);
        }
    }

    pub(crate) fn claim_service(&mut self, at: ListenAt, shared: bool) -> Result<(), Errno> {
        match self {
            WireRx::Udp(rx) => rx.claim_service(at, shared).map_err(errno),
            WireRx::Line(..) | WireRx::Record(..) => Ok(()),
        }
    }

    pub(crate) fn release_service(&mut self, at: ListenAt) {
        if let WireRx::Udp(rx) = self {
            rx.release_service(at);
        }
    }

    /// Answers tools: by the text that `describe` makes of what they ask.
    pub(crate) fn serve_tools(&mut self, describe: impl Fn(&[u8]) -> String) {
        let WireRx::Udp(rx) = self else { return };
        while let Some(request) = rx.take_request() {
            rx.answer(&request, describe(&request.text).as_bytes());
        }
    }

    /// What the port does beside frames: hands `tx` what it learnt of other processes.
    pub(crate) fn maintain(&mut self, tx: &mut WireTx, now: Nanos) {
        let (WireRx::Udp(rx), WireTx::Udp(tx)) = (self, tx) else { return };
        rx.maintenance(now);
        if let Some(owners) = rx.take_owners() {
            tx.set_owners(owners);
        }
        rx.settle();
    }

    /// Gets ready to wait for [`WireRx::fds`].
    pub(crate) fn prepare_to_sleep(&self) {
        if let WireRx::Udp(rx) = self {
            rx.prepare_to_sleep();
        }
    }

    pub(crate) fn fds(&self) -> &[RawFd] {
        match self {
            WireRx::Udp(rx) => rx.fds(),
            WireRx::Line(..) | WireRx::Record(..) => &[],
        }
    }
}

fn errno(error: BackendError) -> Errno {
    error.errno()
}
