//! From the connection manager to an event channel: what is told of an id waits there until the program takes it.
//!
//! Owns the part of an id that outlives its handle: where its events go, and how many the program has not acknowledged. It
//! must not know what an event brings about.

use super::channel::Queue;
use super::id::IdHandle;
use super::multicast::Joined;
use core::ptr::NonNull;
use starverbs_abi as abi;
use starverbs_verbs::cm::{CmEvent, CmEventKind, Sink};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Something that happened to an id, on its way to the program.
pub(super) struct Raw {
    pub(super) id: Arc<IdShared>,
    pub(super) what: What,
}

/// What happened.
pub(super) enum What {
    /// Nothing but an event of this type and status
    Plain(abi::rdma_cm_event_type, i32),
    /// The connection manager tells. Of a request, what shall be its id
    Cm(CmEventKind, Option<Arc<IdShared>>),
    /// A multicast group was joined, or not
    Joined(Joined),
}

/// What of an id its events hold on to.
pub(super) struct IdShared {
    queue: Mutex<Arc<Queue>>,
    counts: Mutex<Counts>,
    acked: Condvar,
}

struct Counts {
    /// `None`: not yet made, or about to go
    handle: Option<NonNull<IdHandle>>,
    /// Events that the program has and has not acknowledged
    unacked: u32,
}

// SAFETY: the pointer is followed only where an event that is not acknowledged keeps the handle alive.
unsafe impl Send for Counts {}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl IdShared {
    /// For an id whose events go to `queue`.
    pub(super) fn new(queue: Arc<Queue>) -> Arc<IdShared> {
        let counts = Counts { handle: None, unacked: 0 };
        Arc::new(IdShared { queue: Mutex::new(queue), counts: Mutex::new(counts), acked: Condvar::new() })
    }

    /// Says which handle the events are for.
    pub(super) fn belongs_to(&self, handle: *mut IdHandle) {
        lock(&self.counts).handle = NonNull::new(handle);
    }

    /// Where its events go.
    pub(super) fn queue(&self) -> Arc<Queue> {
        Arc::clone(&lock(&self.queue))
    }

    /// Queues an event.
    pub(super) fn tell(self: &Arc<Self>, what: What) {
        let queue = lock(&self.queue);
        queue.push(Raw { id: Arc::clone(self), what });
    }

    /// Counts an event as the program's; the handle, which stays until the event is acknowledged. `None`: it is gone.
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

    /// Drops what waits for the program, hands it nothing more, and waits until it acknowledged what it has.
    pub(super) fn end(self: &Arc<Self>) {
        lock(&self.counts).handle = None;
        let waiting = self.queue().take(|raw| Arc::ptr_eq(&raw.id, self));
        drop(waiting);
        self.wait_for_acks();
    }

    /// Moves the events to another queue, after those that the program has are acknowledged (rdma_migrate_id(3)).
    pub(super) fn migrate(self: &Arc<Self>, to: &Arc<Queue>) {
        self.wait_for_acks();
        let mut queue = lock(&self.queue);
        let waiting = queue.take(|raw| Arc::ptr_eq(&raw.id, self));
        *queue = Arc::clone(to);
        for raw in waiting {
            let child = match &raw.what {
                What::Cm(_, child) => child.clone(),
                _ => None,
            };
            to.push(raw);
            if let Some(child) = child {
                child.migrate(to);
            }
        }
    }
}

/// The sink of an id's connections: queues what it is told. A request gets what shall be its id at once, so that what
/// happens to it next finds its way.
pub(super) fn sink(id: &Arc<IdShared>) -> Sink {
    let id = Arc::clone(id);
    Arc::new(move |event: CmEvent| {
        let child = match &event.kind {
            CmEventKind::Request(conn, _) | CmEventKind::Resolving(conn, _) => {
                let child = IdShared::new(id.queue());
                conn.set_sink(sink(&child));
                Some(child)
            }
            _ => None,
        };
        id.tell(What::Cm(event.kind, child));
    })
}
