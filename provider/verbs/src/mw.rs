//! Memory windows: keys for peers that open a part of a memory region, bound by work requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use starverbs_core::mr::WindowType;
use starverbs_core::{Access, AvId, SendFlags, SendOp};

use crate::device::{Command, Device};
use crate::error::{Result, VerbsError};
use crate::pd::Pd;
use crate::post::SendWr;

/// A memory window. Clones are the same window.
#[derive(Clone)]
pub struct Mw(Arc<MwInner>);

struct MwInner {
    pd: Pd,
    kind: WindowType,
    /// The key it was made with: later ones differ in the low eight bits
    key: u32,
    gone: AtomicBool,
}

/// What a window is bound to: `struct ibv_mw_bind_info`.
#[derive(Clone, Copy, Debug)]
pub struct MwBind {
    /// Key of the memory region; not looked at when `length` is 0
    pub mr: u32,
    /// First byte, as the memory region counts
    pub addr: u64,
    /// Bytes; 0 unbinds a window of type 1
    pub length: u64,
    /// What peers may do: REMOTE_WRITE, REMOTE_READ, REMOTE_ATOMIC; ZERO_BASED
    pub access: Access,
}

impl Mw {
    /// `ibv_alloc_mw`: makes a memory window, unbound.
    ///
    /// # Errors
    /// ENOMEM: too many; EIO in a forked child.
    pub fn alloc(pd: &Pd, kind: WindowType) -> Result<Mw> {
        let key = pd.context().device()?.control(Command::AllocMw { pd: pd.id(), kind })?.number()?;
        Ok(Mw(Arc::new(MwInner { pd: pd.clone(), kind, key, gone: AtomicBool::new(false) })))
    }

    /// Its type.
    pub fn kind(&self) -> WindowType {
        self.0.kind
    }

    /// The key that it was made with; a bind gives it another one.
    pub fn rkey(&self) -> u32 {
        self.0.key
    }

    /// A work request that binds the window and gives it the key `rkey`: the last one with other low
    /// eight bits (`ibv_inc_rkey`).
    pub fn bind_wr(&self, wr_id: u64, flags: SendFlags, rkey: u32, bind: &MwBind) -> SendWr<'static> {
        SendWr {
            wr_id,
            op: SendOp::BindMw,
            flags: flags.difference(SendFlags::INLINE),
            imm: bind.mr,
            sges: &[],
            remote_addr: bind.addr,
            rkey,
            compare_add: bind.length,
            swap: 0,
            ah: AvId(0),
            remote_qpn: self.0.key,
            qkey: bind.access.bits(),
        }
    }

    /// `ibv_dealloc_mw`: no peer reaches memory through it afterwards.
    ///
    /// # Errors
    /// EINVAL when it is gone already; EIO in a forked child.
    pub fn dealloc(&self) -> Result<()> {
        let device = self.0.pd.context().device()?;
        if self.0.gone.swap(true, Ordering::AcqRel) {
            return Err(VerbsError::Invalid("memory window is gone"));
        }
        self.0.end(device)
    }
}

impl MwInner {
    /// Ends it, whatever key it has now.
    fn end(&self, device: &Device) -> Result<()> {
        device.control(Command::DeallocMw { key: self.key }).map(|_| ())
    }
}

impl Drop for MwInner {
    fn drop(&mut self) {
        if !*self.gone.get_mut()
            && let Some(device) = self.pd.context().device_if_ours()
        {
            let _ = self.end(device);
        }
    }
}
