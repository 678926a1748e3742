//! The card's host: memory of this process, the UDP port, the objects' queues.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use starverbs_backend::links::Links;
use starverbs_backend::star::{self, StarPort};
use starverbs_backend::{Payload, Peers, RoceTx};
use starverbs_core::relay::{LinkError, LinkId, Relay};
use starverbs_core::shared_qp::SharedQpMessage;
use starverbs_core::{AsyncEvent, Av, Dma, Env, Gid, Host, PdId, Port, Seg};
use starverbs_rings::{CardRq, CardSq, prefetch};

use super::engine::HostEngine;
use super::local::channels::Channels;
use crate::cq::CardCq;
use crate::memory::{self, Marked};
use crate::share::{ForeignList, MrMemory};
use crate::stat::StatPage;

/// Most payload bytes of a frame: the largest path MTU.
const MAX_PAYLOAD: usize = 4096;

/// What null regions read as.
static ZEROES: [u8; MAX_PAYLOAD] = [0; MAX_PAYLOAD];

/// A card and its host, of which every part of a process may need both.
pub(crate) type NicEnv<'a> = star::NicEnv<'a, HostEnv>;

/// What a card works on in a real process.
pub(crate) struct HostEnv {
    pub(crate) tx: RoceTx<StatPage>,
    /// Raised in this turn; told to the contexts at its end.
    pub(crate) events: Vec<AsyncEvent>,
    /// Copies of memory that may be missing, for the frame whose payload was begun
    bounce: Box<[u8; MAX_PAYLOAD]>,
    /// How much of it is used
    bounced: usize,
    /// Memory of other processes
    pub(crate) foreign: ForeignList,
    /// The way to other processes of this one's XRC domains
    pub(crate) links: Option<Box<Links>>,
    /// StaR, where it is in use
    pub(crate) star: Option<Box<StarPort<StatPage>>>,
    /// The way to queue pairs of this host's processes
    pub(crate) channels: Channels,
}

impl HostEnv {
    pub(crate) fn new(tx: RoceTx<StatPage>, peers: Peers) -> Self {
        let (events, bounce) = (Vec::with_capacity(16), Box::new([0; MAX_PAYLOAD]));
        let foreign = ForeignList::default();
        let channels = Channels::new(peers);
        HostEnv { tx, events, bounce, bounced: 0, foreign, links: None, star: None, channels }
    }

    /// Whether a frame's payload must be copied at once. It is in the port then: the next one's copies may
    /// use the same room.
    #[inline]
    pub(crate) fn is_volatile(&mut self, volatile: bool) -> bool {
        let bounced = std::mem::take(&mut self.bounced);
        volatile || bounced != 0
    }

    /// Sends to another process of an XRC domain what is no card's affair; it is kept while there is no room.
    /// False: it is gone.
    pub(crate) fn send_shared_qp(&mut self, link: LinkId, message: &SharedQpMessage) -> bool {
        self.links.as_mut().is_some_and(|links| links.send(link, &message.encode(), &[], true))
    }

    /// Copies host memory that the card has checked to memory that another process has, too. False: as of
    /// [`Dma::dma_copy`].
    ///
    /// # Safety
    /// [to, to + len) can be written.
    #[inline]
    pub(super) unsafe fn copy_out(&mut self, from: u64, to: *mut u8, len: usize) -> bool {
        if !memory::marked(from) {
            // SAFETY: the caller's terms; the program keeps its memory until the region ends.
            unsafe { memory::copy_short(to, from as *const u8, len) };
            return true;
        }
        // SAFETY: the caller's terms.
        unsafe { self.copy_out_marked(from, to, len) }
    }

    /// [`HostEnv::copy_out`] of marked memory.
    ///
    /// # Safety
    /// As there.
    #[cold]
    #[inline(never)]
    unsafe fn copy_out_marked(&mut self, from: u64, to: *mut u8, len: usize) -> bool {
        let mut piece = [0; MAX_PAYLOAD];
        (0..len).step_by(MAX_PAYLOAD).all(|at| {
            let piece = &mut piece[..(len - at).min(MAX_PAYLOAD)];
            let there = self.dma_copy(from + at as u64, piece);
            // SAFETY: at + piece <= len.
            unsafe { to.add(at).copy_from_nonoverlapping(piece.as_ptr(), piece.len()) };
            there
        })
    }

    /// Copies memory that another process has, too, to host memory that the card has checked, the last word
    /// last. False: as of [`Dma::dma_write`].
    ///
    /// # Safety
    /// [from, from + len) can be read.
    #[inline]
    pub(super) unsafe fn copy_in(&mut self, from: *const u8, to: u64, len: usize) -> bool {
        if !memory::marked(to) {
            // SAFETY: the caller's terms, and those of `dma_write`.
            unsafe { memory::write_in_order(to as *mut u8, from, len) };
            return true;
        }
        // SAFETY: the caller's terms.
        unsafe { self.copy_in_marked(from, to, len) }
    }

    /// [`HostEnv::copy_in`] to marked memory.
    ///
    /// # Safety
    /// As there.
    #[cold]
    #[inline(never)]
    unsafe fn copy_in_marked(&mut self, from: *const u8, to: u64, len: usize) -> bool {
        let mut piece = [0; MAX_PAYLOAD];
        (0..len).step_by(MAX_PAYLOAD).all(|at| {
            let piece = &mut piece[..(len - at).min(MAX_PAYLOAD)];
            // SAFETY: at + piece <= len.
            unsafe { piece.as_mut_ptr().copy_from_nonoverlapping(from.add(at), piece.len()) };
            self.dma_write(to + at as u64, piece)
        })
    }

    /// [`Dma::dma_read`] of marked memory.
    #[cold]
    fn read_marked(&mut self, from: Seg) -> Option<Seg> {
        let len = from.len as usize;
        let to = self.bounce.get_mut(self.bounced..)?.get_mut(..len)?;
        let there = match memory::mark(from.addr) {
            Marked::Null => {
                let zeroes = ZEROES.get(..len)?;
                return Some(Seg { addr: zeroes.as_ptr() as u64, len: from.len });
            }
            Marked::Demand => memory::read(from.addr, to),
            Marked::Foreign => {
                self.foreign.at(from.addr).is_some_and(|(memory, offset)| memory.read(offset, to))
            }
        };
        let seg = Seg { addr: to.as_ptr() as u64, len: from.len };
        self.bounced += if there { len } else { 0 };
        there.then_some(seg)
    }

    /// [`Dma::dma_copy`] of marked memory.
    #[cold]
    fn copy_marked(&self, from: u64, to: &mut [u8]) -> bool {
        match memory::mark(from) {
            Marked::Null => {
                to.fill(0);
                true
            }
            Marked::Demand => memory::read(from, to),
            Marked::Foreign => self.foreign.at(from).is_some_and(|(memory, offset)| memory.read(offset, to)),
        }
    }

    /// [`Dma::dma_write`] to marked memory.
    #[cold]
    fn write_marked(&self, addr: u64, data: &[u8]) -> bool {
        match memory::mark(addr) {
            Marked::Null => true,
            Marked::Demand => memory::write(addr, data),
            Marked::Foreign => {
                self.foreign.at(addr).is_some_and(|(memory, offset)| memory.write(offset, data))
            }
        }
    }
}

/// An atomic operation or ATOMIC WRITE on marked memory: atomic among those of this card, which is what
/// IBV_ATOMIC_HCA says. Null regions are not exposed to peers; in memory of another process it could not be
/// atomic among those of that process's card.
#[cold]
fn change_marked(addr: u64, change: impl FnOnce(u64) -> u64) -> Option<u64> {
    let mut old = [0; 8];
    if memory::mark(addr) != Marked::Demand || !memory::read(addr, &mut old) {
        return None;
    }
    let old = u64::from_ne_bytes(old);
    memory::write(addr, &change(old).to_ne_bytes()).then_some(old)
}

impl Env for HostEnv {
    type Congestion = starverbs_core::congestion::AnyWindow;
    type Engine = HostEngine;
    type Sq = CardSq;
    type Rq = CardRq;
    type Cq = CardCq;
    type Stats = StatPage;
}

impl Dma for HostEnv {
    type Mrs = MrMemory;

    #[inline]
    fn dma_write(&mut self, addr: u64, data: &[u8]) -> bool {
        if memory::marked(addr) {
            return self.write_marked(addr, data);
        }
        // SAFETY: the card has checked that [addr, addr + len) lies in a memory region, which the
        // program registered: it promised that the memory is mapped, and lets peers write to it.
        unsafe { memory::write_in_order(addr as *mut u8, data.as_ptr(), data.len()) };
        true
    }

    #[inline]
    fn dma_fetch_add(&mut self, addr: u64, add: u64) -> Option<u64> {
        if memory::marked(addr) {
            return change_marked(addr, |old| old.wrapping_add(add));
        }
        // SAFETY: as for writing; the card has checked the alignment.
        let cell = unsafe { AtomicU64::from_ptr(addr as *mut u64) };
        Some(cell.fetch_add(add, Ordering::SeqCst))
    }

    #[inline]
    fn dma_compare_swap(&mut self, addr: u64, compare: u64, swap: u64) -> Option<u64> {
        if memory::marked(addr) {
            return change_marked(addr, |old| if old == compare { swap } else { old });
        }
        // SAFETY: as for writing; the card has checked the alignment.
        let cell = unsafe { AtomicU64::from_ptr(addr as *mut u64) };
        match cell.compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(old) | Err(old) => Some(old),
        }
    }

    #[inline]
    fn dma_store(&mut self, addr: u64, bytes: [u8; 8]) -> bool {
        if memory::marked(addr) {
            return change_marked(addr, |_| u64::from_ne_bytes(bytes)).is_some();
        }
        // SAFETY: as for writing; the card has checked the alignment.
        let cell = unsafe { AtomicU64::from_ptr(addr as *mut u64) };
        /* release: behind all that was written before */
        cell.store(u64::from_ne_bytes(bytes), Ordering::Release);
        true
    }

    fn dma_copy(&mut self, from: u64, to: &mut [u8]) -> bool {
        if memory::marked(from) {
            return self.copy_marked(from, to);
        }
        // SAFETY: the card has checked that the range lies in a memory region, whose memory the program must
        // keep until it is deregistered; `to` is the card's own. The program may write meanwhile: its
        // own race, and only bytes are read.
        unsafe { to.as_mut_ptr().copy_from(from as *const u8, to.len()) };
        true
    }

    #[inline]
    fn dma_fence(&mut self) {
        fence(Ordering::SeqCst);
    }

    #[inline]
    fn begin_payload(&mut self) {
        self.bounced = 0;
    }

    #[inline]
    fn dma_read(&mut self, from: Seg) -> Option<Seg> {
        if memory::marked(from.addr) { self.read_marked(from) } else { Some(from) }
    }
}

impl Port for HostEnv {
    #[inline]
    fn send_frame(&mut self, to: &Av, header: &[u8], payload: &[Seg], pad: u8, volatile: bool) {
        let volatile = self.is_volatile(volatile);
        // SAFETY: the core checked the segments against regions, whose memory the program keeps until they
        // end, or they are of rings and of `bounce`; the port is flushed before any of them can end.
        let payload = unsafe { Payload::new(payload) };
        self.tx.send_frame(to, header, payload, pad, volatile);
    }

    #[inline]
    fn can_send(&self) -> bool {
        self.tx.can_send()
    }

    fn is_own(&self, source: &Gid) -> bool {
        self.tx.has_address(source)
    }
}

impl Host for HostEnv {
    #[inline]
    fn prefetch<T>(&self, what: &T) {
        const LINE: usize = 64;
        let at = std::ptr::from_ref(what).cast::<u8>();
        /* as many as it has, whatever its address: an instruction each, and no loop */
        (0..size_of::<T>()).step_by(LINE).for_each(|byte| prefetch(at.wrapping_add(byte)));
        if align_of::<T>() < LINE.min(size_of::<T>()) {
            /* it may begin in the middle of a line, and then ends in one more */
            prefetch(at.wrapping_add(size_of::<T>() - 1));
        }
    }

    #[inline]
    fn prefetch_at(&self, addr: u64) {
        if !memory::marked(addr) {
            prefetch(addr as *const u8);
        }
    }

    fn event(&mut self, event: AsyncEvent) {
        /* one that there is no memory for is lost */
        if self.events.try_reserve(1).is_ok() {
            self.events.push(event);
        }
    }

    fn link(&mut self, domain: PdId, block: u16) -> Result<LinkId, LinkError> {
        self.links.as_mut().ok_or(LinkError::Gone)?.link(domain.0, u32::from(block))
    }

    fn relay(&mut self, link: LinkId, message: &Relay<'_>) -> bool {
        let (head, data) = message.encode();
        self.links.as_mut().is_some_and(|links| links.send(link, &head, data, message.is_due()))
    }
}
