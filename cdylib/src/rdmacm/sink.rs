//! From the connection manager to an event channel: an id's events wait there until the program takes them.
//!
//! Owns the part of an id that outlives its handle: where its events go, and how many the program has not
//! acknowledged. It must not know what an event brings about.

use super::channel::Queue;
use super::id::IdHandle;
use super::multicast::Joined;
use crate::edge::Errno;
use core::ptr::NonNull;
use starverbs_abi as abi;
use starverbs_verbs::cm::{CmEvent, CmEventKind, Sink};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Something that happened to an id, on its way to the program.
pub(super) struct RawEvent {
    pub(super) id: Arc<IdShared>,
    pub(super) what: What,
}

/// What happened.
pub(super) enum What {
    /// Nothing but an event of this type and status
    Plain(abi::rdma_cm_event_type, i32),
    /// An event of the connection manager. Of a request, what shall be its id
    Cm(CmEventKind, Option<Arc<IdShared>>),
    /// A multicast group was joined, or not
    Joined(Joined),
    /// The program itself says so, with a status and a number of its own
    User(i32, u64),
}

/// What of an id its events hold on to.
pub(super) struct IdShared {
    to: Mutex<To>,
    /// Whose descriptors they are: a forked child's copy leaves the parent's events alone
    process: u32,
    counts: Mutex<QueuedEvents>,
    acked: Condvar,
}

/// Where events go.
struct To {
    queue: Arc<Queue>,
    /// Whether events are queued: not before a request is answered, nor when the id has ended
    open: bool,
}

struct QueuedEvents {
    /// `None`: not yet made, or about to go
    handle: Option<NonNull<IdHandle>>,
    /// Events that the program has and has not acknowledged
    unacked: u32,
}

// SAFETY: the pointer is followed only where an event that is not acknowledged keeps the handle alive.
unsafe impl Send for QueuedEvents {}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl IdShared {
    /// For an id whose events go to `queue`.
    pub(super) fn new(queue: Arc<Queue>) -> Arc<IdShared> {
        let counts = QueuedEvents { handle: None, unacked: 0 };
        let to = Mutex::new(To { queue, open: true });
        let (process, counts, acked) = (std::process::id(), Mutex::new(counts), Condvar::new());
        Arc::new(IdShared { to, process, counts, acked })
    }

    /// Says which handle the events are for.
    pub(super) fn belongs_to(&self, handle: *mut IdHandle) {
        lock(&self.counts).handle = NonNull::new(handle);
    }

    /// Where its events go.
    pub(super) fn queue(&self) -> Arc<Queue> {
        Arc::clone(&lock(&self.to).queue)
    }

    /// Whether this process made it, rather than one that it was forked from.
    pub(super) fn is_ours(&self) -> bool {
        self.process == std::process::id()
    }

    /// EIO in a forked child.
    pub(super) fn ours(&self) -> Result<(), Errno> {
        if self.is_ours() { Ok(()) } else { Err(libc::EIO) }
    }

    /// Has events queued, or not. As in Linux a request that the program has not answered has no events;
    /// answering it fails then.
    pub(super) fn set_open(&self, open: bool) {
        lock(&self.to).open = open;
    }

    /// Queues an event. It is dropped where events are not queued, or there is no memory for it.
    pub(super) fn notify(self: &Arc<Self>, what: What) {
        let raw = RawEvent { id: Arc::clone(self), what };
        // Dropping a connection raises events of others, perhaps of this id: not under the lock.
        let _dropped = {
            let to = lock(&self.to);
            if !to.open || !self.is_ours() { Some(raw) } else { to.queue.try_push(raw).err() }
        };
    }

    /// Queues an event, of an unanswered request, too.
    ///
    /// # Errors
    /// EIO in a forked child; ENOMEM.
    pub(super) fn write(self: &Arc<Self>, what: What) -> Result<(), Errno> {
        self.ours()?;
        let raw = RawEvent { id: Arc::clone(self), what };
        lock(&self.to).queue.try_push(raw).map_err(|_| libc::ENOMEM)
    }

    /// Counts an event as the program's; the handle, which stays until the event is acknowledged. `None`: it
    /// is gone.
    pub(super) fn deliver(&self) -> Option<NonNull<IdHandle>> {
        let mut counts = lock(&self.counts);
        let handle = counts.handle?;
        counts.unacked += 1;
        Some(handle)
    }

    /// Takes an acknowledgement.
    pub(super) fn ack(&self) {
        let mut counts = lock(&self.counts);
        counts.unacked = counts.unacked.saturating_sub(1);
        self.acked.notify_all();
    }

    fn wait_for_acks(&self) {
        let mut counts = lock(&self.counts);
        while counts.unacked > 0 {
            counts = self.acked.wait(counts).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Drops what waits for the program, takes nothing more, and waits until the program acknowledged what it
    /// has. In a forked child, whose parent has all that, it does nothing.
    pub(super) fn end(self: &Arc<Self>) {
        if !self.is_ours() {
            return;
        }
        lock(&self.counts).handle = None;
        let waiting = {
            let mut to = lock(&self.to);
            to.open = false;
            to.queue.take(|raw| Arc::ptr_eq(&raw.id, self))
        };
        drop(waiting);
        self.wait_for_acks();
    }

    /// Moves the events to another queue, after those that the program has are acknowledged
    /// (rdma_migrate_id(3)).
    pub(super) fn migrate(self: &Arc<Self>, to: &Arc<Queue>) {
        self.wait_for_acks();
        let mut from = lock(&self.to);
        let waiting = from.queue.take(|raw| Arc::ptr_eq(&raw.id, self));
        from.queue = Arc::clone(to);
        let moved = |raw: RawEvent| {
            let child = match &raw.what {
                What::Cm(_, child) => child.clone(),
                _ => None,
            };
            let left = to.try_push(raw).err();
            if let Some(child) = child {
                child.migrate(to);
            }
            left
        };
        let without_room: Vec<RawEvent> = waiting.into_iter().filter_map(moved).collect();
        // As in `notify`.
        drop(from);
        drop(without_room);
    }
}

/// The sink of an id's connections: queues its events. A request gets what shall be its id at once, so
/// that what happens to it next finds its way.
pub(super) fn sink(id: &Arc<IdShared>) -> Sink {
    let id = Arc::clone(id);
    Arc::new(move |event: CmEvent| {
        let child = match &event.kind {
            CmEventKind::Request(conn, _) | CmEventKind::Resolving(conn, _) => {
                let child = IdShared::new(id.queue());
                child.set_open(false);
                conn.set_sink(sink(&child));
                Some(child)
            }
            _ => None,
        };
        id.notify(What::Cm(event.kind, child));
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain() -> What {
        What::Plain(abi::RDMA_CM_EVENT_ADDR_RESOLVED, 0)
    }

    #[test]
    fn nothing_waits_of_an_id_that_has_ended() {
        let queue = Arc::new(Queue::new().expect("a descriptor"));
        let id = IdShared::new(Arc::clone(&queue));
        id.notify(plain());
        assert!(!queue.is_empty());
        id.end();
        assert!(queue.is_empty());
        // A thread that was about to notify does so now.
        id.notify(plain());
        assert!(queue.is_empty() && Arc::strong_count(&id) == 1);
    }

    #[test]
    fn a_request_has_no_events_before_it_is_answered() {
        let queue = Arc::new(Queue::new().expect("a descriptor"));
        let id = IdShared::new(Arc::clone(&queue));
        id.set_open(false);
        id.notify(plain());
        assert!(queue.is_empty());
        id.set_open(true);
        id.notify(plain());
        assert!(!queue.is_empty());
        id.end();
    }
}
