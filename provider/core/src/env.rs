//! What a card needs from its host: queues, memory, frames, events.
//!
//! All calls happen under the card's one owner (`&mut Nic`), so an implementation sees one caller at
//! a time on the card's side; the program's side of each queue may run concurrently.

use core::ops::Deref;

use crate::Counters;
use crate::congestion::Controller;
use crate::engine::Engine;
use crate::error::NicError;
use crate::mr::Storage;
use crate::relay::{LinkError, LinkId, Relay};
use crate::types::{AsyncEvent, Av, Cqe, Gid, PdId, Qpn, Seg, SendFlags, SendOp, SendWqe, Sge};

/// What a WQE asks for, as far as all operations have it.
#[derive(Clone, Copy, Debug)]
pub struct SendRequest {
    /// What to do
    pub op: SendOp,
    /// Its flags
    pub flags: SendFlags,
    /// Bytes of the message
    pub length: u32,
}

/// The card's side of a send queue. Indices count WQEs since creation and wrap at 2^32.
pub trait SendQueue {
    /// Slots in the ring: a power of two.
    fn slots(&self) -> u32;
    /// How many WQEs the program has posted so far (acquire).
    fn posted(&self) -> u32;
    /// What WQE `index` asks for, which must lie in released..posted. One that cannot be decoded has the
    /// operation `Malformed`.
    fn wqe(&self, index: u32) -> SendWqe;
    /// What that asks to be done, without the rest.
    fn op(&self, index: u32) -> SendOp {
        self.wqe(index).op
    }
    /// The same, with what else all operations have.
    fn request(&self, index: u32) -> SendRequest {
        let SendWqe { op, flags, length, .. } = self.wqe(index);
        SendRequest { op, flags, length }
    }
    /// Its immediate data, or the key to invalidate, as the WQE has it.
    fn imm(&self, index: u32) -> u32 {
        self.wqe(index).imm
    }
    /// The program's cookie of it.
    fn wr_id(&self, index: u32) -> u64 {
        self.wqe(index).wr_id
    }
    /// Its SGEs (empty when inline). Each is read as it is asked for: they lie in memory of the program's.
    fn sges(&self, index: u32) -> impl Iterator<Item = Sge> + '_;
    /// Host memory of its inline bytes; stays valid until the WQE is released.
    fn inline(&self, index: u32) -> Seg;
    /// All WQEs before `index` are done; their slots may be posted anew.
    fn release(&self, index: u32);
    /// The queue will be used soon: a host with caches may fetch its indices.
    #[inline]
    fn expect(&self) {}
    /// WQE `index` will be used soon, of a queue whose indices were fetched.
    #[inline]
    fn expect_wqe(&self, index: u32) {
        let _ = index;
    }
    /// Forget everything posted (QP to RESET); indices go on.
    fn reset(&self);
    /// Posts a request of the card's own, beside a program's where there is one. False: it is full, or the
    /// program is posting.
    fn post_own(&self, wqe: SendWqe, sges: &[Sge]) -> bool;
}

/// A receive WQE that was taken from its queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TakenWqe {
    /// The program's `wr_id`
    pub wr_id: u64,
    /// SGEs that were copied
    pub num_sge: usize,
}

/// A receive WQE out of its queue, with its SGEs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeldWqe<'a> {
    /// The program's `wr_id`
    pub wr_id: u64,
    /// Where its bytes go
    pub sges: &'a [Sge],
}

/// The card's side of a receive queue, private or shared.
pub trait RecvQueue {
    /// Takes the oldest receive WQE, and copies its SGEs to `sges`. `None`: none waits.
    fn take(&self, sges: &mut [Sge]) -> Option<TakenWqe>;
    /// Receive WQEs waiting.
    fn len(&self) -> u32;
    /// Whether none waits.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// The oldest receive WQE will be taken soon, of a queue whose indices were fetched.
    #[inline]
    fn expect_wqe(&self) {}
    /// Most SGEs a WQE may have.
    fn max_sge(&self) -> usize;
    /// Receive WQEs that were taken come back, oldest first, in front of all that wait. `Exhausted`: no
    /// memory, and nothing changes.
    fn put_back(&self, recvs: &mut dyn Iterator<Item = HeldWqe<'_>>) -> Result<(), NicError>;
    /// Forget everything posted (QP to RESET), and what was returned.
    fn reset(&self);
}

/// The card's side of a completion queue.
pub trait CompletionQueue {
    /// Adds a completion; wakes a program that armed the queue. A full queue is an overrun: the completion is
    /// lost, the queue's owner raises IBV_EVENT_CQ_ERR, and the caller puts the QP into ERR.
    fn push(&self, cqe: &Cqe, solicited: bool) -> Result<(), CqOverrun>;
    /// Forget completions of `qpn` that the program has not polled (QP destroyed or RESET).
    fn purge(&self, qpn: u32);
}

/// The completion queue was full.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CqOverrun;

/// Host memory, as far as keys open it.
pub trait Dma {
    /// Where the table of memory regions lies: the card's own memory, or some that other processes may read
    type Mrs: Storage;
    /// Writes `data` to host memory. The card has checked keys, bounds and rights. False: there is no
    /// memory now (on-demand paging), and the request fails as if its key did not reach there.
    #[must_use]
    fn dma_write(&mut self, addr: u64, data: &[u8]) -> bool;
    /// Atomically adds; gives the value before. `addr` is 8-aligned. `None`: as false of `dma_write`.
    fn dma_fetch_add(&mut self, addr: u64, add: u64) -> Option<u64>;
    /// Atomically swaps if equal; gives the value before. `addr` is 8-aligned. `None`: as above.
    fn dma_compare_swap(&mut self, addr: u64, compare: u64, swap: u64) -> Option<u64>;
    /// Writes eight bytes at once: nobody sees some of them without the others, nor before what was written
    /// earlier. `addr` is 8-aligned. False: as of `dma_write`.
    #[must_use]
    fn dma_store(&mut self, addr: u64, bytes: [u8; 8]) -> bool;
    /// Copies host memory. False: as of `dma_write`.
    #[must_use]
    fn dma_copy(&mut self, from: u64, to: &mut [u8]) -> bool;
    /// What was written before is visible to all who look at memory when this returns.
    fn dma_fence(&mut self);
    /// A frame's payload is collected from here on. One that was begun before and not queued is given up.
    fn begin_payload(&mut self);
    /// Makes memory ready to be part of the payload that was begun, of one path MTU in all; gives where it
    /// can be read until that frame is queued. `None`: there is no memory now.
    fn dma_read(&mut self, from: Seg) -> Option<Seg>;
}

/// The wire.
pub trait Port {
    /// Queues one frame. `header` is everything from the BTH to before the payload, `payload` the
    /// host memory to gather, `pad` 0 to 3 zero bytes behind it; the port adds the ICRC and the
    /// outer headers. `volatile`: somebody may write the payload meanwhile (READ responses), so it
    /// must be copied before its ICRC is computed. A frame that cannot be sent is lost, as on any
    /// wire. The payload is not looked at after the port's next flush.
    fn send_frame(&mut self, to: &Av, header: &[u8], payload: &[Seg], pad: u8, volatile: bool);
    /// Whether the port takes more frames before it is flushed.
    fn can_send(&self) -> bool;
    /// Whether frames from `source` are this port's own (asked of multicast alone).
    fn is_own(&self, source: &Gid) -> bool;
}

/// Which way a QP's context goes between a QPC-limited card and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContextMove {
    /// To the chip: it was asked for, or is fetched ahead
    Fetched,
    /// To memory: another one takes its place
    Evicted,
}

/// The rest of a host: the program, and the cards of other processes.
pub trait Host {
    /// This is needed soon: a host with caches may fetch it.
    #[inline]
    fn prefetch<T>(&self, what: &T) {
        let _ = what;
    }
    /// The memory at this host address is needed soon.
    #[inline]
    fn prefetch_at(&self, addr: u64) {
        let _ = addr;
    }
    /// Delivers an event to the program.
    fn event(&mut self, event: AsyncEvent);

    /// The context of `qpn` begins to move, in the order of these calls. It may be one that has ended.
    #[inline]
    fn move_context(&mut self, qpn: Qpn, to: ContextMove) {
        let _ = (qpn, to);
    }

    /// The connection to the card that has QPN block `block`, in XRC domain `domain`; made if there is none.
    fn link(&mut self, domain: PdId, block: u16) -> Result<LinkId, LinkError> {
        let _ = (domain, block);
        Err(LinkError::Gone)
    }
    /// Sends to the card at the other end, in order. False: there is no room now. What is due
    /// ([`Relay::is_due`]) is kept then, and sent later, unless the link is gone.
    fn relay(&mut self, link: LinkId, message: &Relay<'_>) -> bool {
        let _ = (link, message);
        false
    }
}

/// What a card works in: its queues, and memory, wire and host.
pub trait Env: Dma + Port + Host + Sized {
    /// Send queues
    type Sq: SendQueue;
    /// Receive queues
    type Rq: RecvQueue;
    /// Completion queues (cheap to clone: a QP holds two)
    type Cq: CompletionQueue;
    /// Where the counters live
    type Stats: Deref<Target = Counters>;
    /// How many bytes may be in flight towards a destination
    type Congestion: Controller;
    /// What may do the work of a QP in the place of its own transport; each QP has room for it, so it is a
    /// box at best. `Infallible`, which takes no room: there is none
    type Engine: Engine<Self>;
}
