//! Completion channels: where a program sleeps until a CQ has something for it.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::context::Context;
use crate::device::thread::ThreadWork;
use crate::error::{Result, VerbsError};
use crate::events::FdQueue;

/// A completion channel. Clones are the same channel.
#[derive(Clone)]
pub struct CompChannel(pub(crate) Arc<ChannelShared>);

pub(crate) struct ChannelShared {
    ctx: Context,
    /// Cookies of the CQs that fired.
    pub(crate) queue: FdQueue<u64>,
    /// CQs that report here.
    pub(crate) cqs: AtomicU32,
}

impl CompChannel {
    /// `ibv_create_comp_channel`: makes a completion channel.
    ///
    /// # Errors
    /// `Forked`; no descriptor left.
    pub fn create(ctx: &Context) -> Result<CompChannel> {
        ctx.device()?;
        let shared = ChannelShared { ctx: ctx.clone(), queue: FdQueue::new()?, cqs: AtomicU32::new(0) };
        Ok(CompChannel(Arc::new(shared)))
    }

    /// The descriptor: readable while an event waits; blocks unless the program sets O_NONBLOCK.
    pub fn fd(&self) -> RawFd {
        self.0.queue.fd()
    }

    /// `ibv_get_cq_event`: the cookie of the CQ that fired.
    ///
    /// # Errors
    /// `Again` on a descriptor that does not block, EINTR, `Forked`.
    pub fn get_event(&self) -> Result<u64> {
        let device = self.0.ctx.device()?;
        if self.0.queue.is_empty() {
            device.arm();
        }
        let cookie = self.0.queue.pop()?;
        let unread = &device.activity().unread;
        unread.read();
        if unread.is_due() {
            device.arm();
        }
        Ok(cookie)
    }

    /// `ibv_destroy_comp_channel`: ends a completion channel.
    ///
    /// # Errors
    /// `Busy` while CQs report to it.
    pub fn destroy(&self) -> Result<()> {
        if self.0.cqs.load(Ordering::Relaxed) > 0 {
            return Err(VerbsError::Busy("completion queues"));
        }
        Ok(())
    }
}
