//! XRC domains: what QPs that receive and SRQs of the extended reliable connection share (annex A14).
//!
//! To the card a domain is a protection domain in which nothing but those QPs and SRQs lives. A domain that
//! was opened on a file is the same one for every opener of that file on this card, and shared with the cards
//! of the user's other processes that opened it: messages that come to a QP of one reach SRQs of the other.
//! It lives until its last opener closes it.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use starverbs_backend::links::{DomainLock, DomainName, FileId};
use starverbs_core::{QPN_BLOCK_SHIFT, Qpn};

use crate::context::Context;
use crate::cq::Cq;
use crate::device::command::Xrc;
use crate::device::{Command, CommandReply};
use crate::error::{Result, VerbsError};
use crate::pd::Pd;
use crate::qp::{Qp, QpInner, xrc_recv};

/// Domains that were opened on a file.
static SHARED: Mutex<Vec<(File, Weak<XrcdInner>)>> = Mutex::new(Vec::new());

/// Number of a device, and a file.
type File = (usize, FileId);

/// An XRC domain. Clones are the same opening of it.
#[derive(Clone)]
pub struct Xrcd(Arc<XrcdInner>);

struct XrcdInner {
    pd: Pd,
    /// Where the QPs of the domain would complete, if they ever did
    cq: Cq,
    state: Mutex<XrcdState>,
    /// What it is called between processes, if others may have it
    name: Option<DomainName>,
}

struct XrcdState {
    opened: u32,
    qps: Vec<Weak<QpInner>>,
}

impl Xrcd {
    /// `ibv_open_xrcd`. Without a file it is a new domain; else that of the file, new if there is none.
    ///
    /// # Errors
    /// EINVAL: neither a file nor `create`, or `exclusive` and there is one; EAGAIN: there is none and not
    /// `create`; EBADF; EIO in a forked child.
    pub fn open(ctx: &Context, file: Option<RawFd>, create: bool, exclusive: bool) -> Result<Xrcd> {
        let device = ctx.device()?;
        let Some(fd) = file else {
            return if create { Xrcd::new(ctx) } else { Err(VerbsError::Invalid("no file and no O_CREAT")) };
        };
        let id = file_id(fd)?;
        let file = (device.id(), id);
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        shared.retain(|(_, domain)| domain.strong_count() > 0);
        let found = shared.iter().find(|(f, _)| *f == file).and_then(|(_, domain)| domain.upgrade());
        if let Some(domain) = found {
            let mut state = domain.state();
            if state.opened > 0 {
                if create && exclusive {
                    return Err(VerbsError::Invalid("the file has an XRC domain already"));
                }
                state.opened += 1;
                drop(state);
                return Ok(Xrcd(domain));
            }
        }
        let lock = DomainLock::acquire(DomainName::new(device.settings().port, id))
            .map_err(|error| VerbsError::Os(error.raw_os_error().unwrap_or(libc::EAGAIN)))?;
        /* a process that has it or, unless a new one is asked for, nobody */
        match (create, lock.is_open()) {
            (false, false) => return Err(VerbsError::Again),
            (true, true) if exclusive => {
                return Err(VerbsError::Invalid("the file has an XRC domain already"));
            }
            _ => {}
        }
        shared.try_reserve(1).map_err(|_| VerbsError::NoMemory("XRC domains"))?;
        let domain = Xrcd::share(ctx, lock.name())?;
        shared.retain(|(f, _)| *f != file);
        shared.push((file, Arc::downgrade(&domain.0)));
        Ok(domain)
    }

    fn new(ctx: &Context) -> Result<Xrcd> {
        Xrcd::of(Pd::alloc(ctx)?, Cq::create(ctx, 1, None, 0)?, None)
    }

    fn of(pd: Pd, cq: Cq, name: Option<DomainName>) -> Result<Xrcd> {
        let state = Mutex::new(XrcdState { opened: 1, qps: Vec::new() });
        Ok(Xrcd(Arc::new(XrcdInner { pd, cq, state, name })))
    }

    /// One that other processes' cards reach.
    fn share(ctx: &Context, name: &DomainName) -> Result<Xrcd> {
        let (pd, cq, device) = (Pd::alloc(ctx)?, Cq::create(ctx, 1, None, 0)?, ctx.device()?);
        device.control(Command::Xrc(Xrc::Share { domain: pd.id(), name }))?;
        Xrcd::of(pd, cq, Some(name.clone()))
    }

    /// `ibv_close_xrcd`: the last one ends the domain.
    ///
    /// # Errors
    /// EBUSY: the last one, while QPs or SRQs are in it, QPs of its own that other processes have open
    /// included; EINVAL when it is gone.
    pub fn close(&self) -> Result<()> {
        /* nobody opens it meanwhile */
        let _shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.0.state();
        match state.opened {
            0 => return Err(VerbsError::Invalid("XRC domain is gone")),
            1 => {
                /* the card knows those that are its own */
                if state.qps.iter().filter_map(Qp::upgrade).any(|qp| qp.is_attached()) {
                    return Err(VerbsError::Busy("queue pairs of other processes"));
                }
                self.0.pd.dealloc()?;
            }
            _ => {}
        }
        state.opened -= 1;
        Ok(())
    }

    /// A QP that receives: its requests go to the SRQs of the domain that they name. It has no queues of
    /// its own. Its events go to `ctx`, under `cookie`.
    ///
    /// # Errors
    /// As [`Qp::create`].
    pub fn create_qp(&self, ctx: &Context, cookie: u64) -> Result<Qp> {
        let mut state = self.0.state();
        make_room(&mut state)?;
        let qp = Qp::create(&self.0.pd, &xrc_recv(&self.0.cq))?;
        qp.list(ctx, cookie)?;
        if self.0.name.is_some() {
            let offer = Xrc::Offer { domain: self.0.pd.id(), qpn: qp.number(), qp: qp.downgrade() };
            ctx.device()?.control(Command::Xrc(offer))?;
        }
        state.qps.push(qp.downgrade());
        Ok(qp)
    }

    /// `ibv_open_qp`: the receiving QP of this number, which any process may have made that has the domain.
    /// Its events go to `ctx`, under `cookie`. It lives until all have closed it.
    ///
    /// # Errors
    /// EINVAL: the domain has no such QP; EAGAIN: a process of the domain does not answer; ENOMEM; EIO in a
    /// forked child.
    pub fn open_qp(&self, ctx: &Context, qpn: Qpn, cookie: u64) -> Result<Qp> {
        ctx.device()?;
        let mut state = self.0.state();
        let known = state.qps.iter().filter_map(Qp::upgrade).find(|qp| qp.number() == qpn);
        if let Some(qp) = known {
            match qp.query() {
                Ok(_) => {
                    qp.list(ctx, cookie)?;
                    return Ok(qp);
                }
                Err(VerbsError::Again) => return Err(VerbsError::Again),
                Err(_) => state.qps.retain(|old| !qp.is(old)),
            }
        }
        make_room(&mut state)?;
        let qp = self.0.attach(qpn)?;
        qp.list(ctx, cookie)?;
        state.qps.push(qp.downgrade());
        Ok(qp)
    }

    /// What stands for it on the card.
    pub(crate) fn pd(&self) -> &Pd {
        &self.0.pd
    }
}

impl XrcdInner {
    fn state(&self) -> MutexGuard<'_, XrcdState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a QP of another process, whichever has it.
    fn attach(&self, qpn: Qpn) -> Result<Qp> {
        let device = self.pd.context().device()?;
        let mut blocks = self.name.as_ref().map(DomainName::members).unwrap_or_default();
        /* a process's first QPs have numbers of the block by which it listens */
        blocks.sort_by_key(|block| *block != qpn >> QPN_BLOCK_SHIFT);
        let mut silent = false;
        for block in blocks {
            let open = Xrc::Open { domain: self.pd.id(), block: block as u16, qpn };
            match device.control(Command::Xrc(open)).and_then(CommandReply::number) {
                Ok(attachment) => return Qp::attached(&self.pd, &self.cq, qpn, attachment),
                Err(VerbsError::Again) => silent = true,
                Err(VerbsError::Os(libc::EINVAL | libc::ENODEV)) => {}
                Err(error) => return Err(error),
            }
        }
        Err(if silent { VerbsError::Again } else { VerbsError::Invalid("no such QP in the XRC domain") })
    }
}

/// Room for one more QP. ENOMEM.
fn make_room(state: &mut XrcdState) -> Result<()> {
    state.qps.retain(|old| old.strong_count() > 0);
    state.qps.try_reserve(1).map_err(|_| VerbsError::NoMemory("QPs of an XRC domain"))
}

impl Drop for XrcdInner {
    fn drop(&mut self) {
        let open = self.state.get_mut().is_ok_and(|state| state.opened > 0);
        if open
            && self.name.is_some()
            && let Ok(device) = self.pd.context().device()
        {
            let _ = device.control(Command::Xrc(Xrc::Unshare { domain: self.pd.id() }));
        }
    }
}

/// Device and inode of an open file.
fn file_id(fd: RawFd) -> Result<FileId> {
    // SAFETY: numbers only: zero is valid.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: a place for the answer; any descriptor may be asked about.
    if unsafe { libc::fstat(fd, &mut stat) } != 0 {
        return Err(VerbsError::last_os());
    }
    Ok(FileId { device: stat.st_dev, inode: stat.st_ino })
}
