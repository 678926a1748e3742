//! Event channels: where a program waits for what happens to its ids.
//!
//! Owns the channel's handle and its queue. It must not know what an event means.

use super::sink::RawEvent;
use crate::edge::{self, Errno};
use crate::handle::errno;
use starverbs_abi as abi;
use starverbs_verbs::FdQueue;
use std::sync::Arc;

/// What waits on a channel.
pub(super) type Queue = FdQueue<RawEvent>;

/// An event channel.
#[repr(C)]
pub(super) struct ChannelHandle {
    ibv: abi::rdma_event_channel,
    queue: Arc<Queue>,
    process: u32,
}

impl ChannelHandle {
    /// A new channel's handle.
    pub(super) fn make() -> Result<*mut abi::rdma_event_channel, Errno> {
        let queue = Arc::new(Queue::new().map_err(errno)?);
        let ibv = abi::rdma_event_channel { fd: queue.fd() };
        Ok(Box::into_raw(Box::new(ChannelHandle { ibv, queue, process: std::process::id() })).cast())
    }

    /// The handle of a channel, `None` for NULL.
    ///
    /// # Safety
    /// `channel` is NULL, or comes from `make` and is alive.
    pub(super) unsafe fn of<'a>(channel: *mut abi::rdma_event_channel) -> Option<&'a ChannelHandle> {
        // SAFETY: the caller's terms; the struct is the first field of its handle.
        unsafe { channel.cast::<ChannelHandle>().as_ref() }
    }

    /// Where its events wait.
    ///
    /// # Errors
    /// EIO in a forked child: the descriptor is the parent's, too, and counts the parent's events.
    pub(super) fn queue(&self) -> Result<&Arc<Queue>, Errno> {
        if self.process == std::process::id() { Ok(&self.queue) } else { Err(libc::EIO) }
    }

    /// Ends a channel, and with it what still waits there: requests are rejected.
    ///
    /// # Safety
    /// `channel` comes from `make` and is given up.
    pub(super) unsafe fn free(channel: *mut abi::rdma_event_channel) {
        // SAFETY: made with Box::into_raw.
        let handle = unsafe { Box::from_raw(channel.cast::<ChannelHandle>()) };
        // Ids that are left hold the queue, and its entries their ids.
        if let Ok(queue) = handle.queue() {
            drop(queue.take(|_| true));
        }
    }
}

/// rdma_create_event_channel(3).
pub(crate) unsafe extern "C" fn create_event_channel() -> *mut abi::rdma_event_channel {
    edge::object(ChannelHandle::make)
}

/// rdma_destroy_event_channel(3).
pub(crate) unsafe extern "C" fn destroy_event_channel(channel: *mut abi::rdma_event_channel) {
    edge::value((), || {
        if !channel.is_null() {
            // SAFETY: the call's terms.
            unsafe { ChannelHandle::free(channel) };
        }
    });
}
