//! XRC domains: what QPs that receive and SRQs of the extended reliable connection share (annex A14).
//!
//! To the card a domain is a protection domain in which nothing but those QPs and SRQs lives. A domain that
//! was opened on a file is the same one for every opener of that file on this card, and shared with the cards of the
//! user's other processes that opened it: messages that come to a QP of one reach SRQs of the other. It
//! lives until its last opener closes it.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use starverbs_backend::links::{DomainName, Links, MESSAGE, Opening};
use starverbs_core::relay::LinkError;
use starverbs_core::{Env, PdId, QPN_BLOCK_SHIFT, Qpn};

use crate::card::Shard;
use crate::context::Context;
use crate::cq::Cq;
use crate::error::{Result, VerbsError};
use crate::pd::Pd;
use crate::qp::{Qp, QpInner, xrc_recv};

/// Domains that were opened on a file.
static SHARED: Mutex<Vec<(File, Weak<XrcdInner>)>> = Mutex::new(Vec::new());

/// A card, by its address, and an inode with its device.
type File = (usize, u64, u64);

/// An XRC domain. Clones are the same opening of it.
#[derive(Clone)]
pub struct Xrcd(Arc<XrcdInner>);

struct XrcdInner {
    pd: Pd,
    /// Where the QPs of the domain would complete, if they ever did
    cq: Cq,
    state: Mutex<State>,
    /// What it is called between processes, if others may have it
    name: Option<DomainName>,
}

struct State {
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
        let card = ctx.card()?;
        let Some(fd) = file else {
            return if create { Xrcd::new(ctx) } else { Err(VerbsError::Invalid("no file and no O_CREAT")) };
        };
        let (dev, ino) = inode(fd)?;
        let file = (Arc::as_ptr(card) as usize, dev, ino);
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
        let opening = Opening::begin(DomainName::new(card.settings.port, (dev, ino)))
            .map_err(|error| VerbsError::Os(error.raw_os_error().unwrap_or(libc::EAGAIN)))?;
        /* a process that has it or, unless a new one is asked for, nobody */
        match (create, opening.is_open()) {
            (false, false) => return Err(VerbsError::Again),
            (true, true) if exclusive => {
                return Err(VerbsError::Invalid("the file has an XRC domain already"));
            }
            _ => {}
        }
        shared.try_reserve(1).map_err(|_| VerbsError::NoMemory("XRC domains"))?;
        let domain = Xrcd::share(ctx, opening.name())?;
        shared.retain(|(f, _)| *f != file);
        shared.push((file, Arc::downgrade(&domain.0)));
        Ok(domain)
    }

    fn new(ctx: &Context) -> Result<Xrcd> {
        Xrcd::of(Pd::alloc(ctx)?, Cq::create(ctx, 1, None, 0)?, None)
    }

    fn of(pd: Pd, cq: Cq, name: Option<DomainName>) -> Result<Xrcd> {
        let state = Mutex::new(State { opened: 1, qps: Vec::new() });
        Ok(Xrcd(Arc::new(XrcdInner { pd, cq, state, name })))
    }

    /// One that other processes' cards reach.
    fn share(ctx: &Context, name: &DomainName) -> Result<Xrcd> {
        let (pd, cq, card) = (Pd::alloc(ctx)?, Cq::create(ctx, 1, None, 0)?, ctx.card()?);
        card.with(|shard, _| {
            let block = shard.rx.blocks().next().ok_or(VerbsError::NoMemory("QPN block"))?;
            let links = match &mut shard.env.links {
                Some(links) => links,
                none => none.insert(Box::new(Links::new()?)),
            };
            shard.link_room.get_or_insert_with(|| Box::new([0; MESSAGE]));
            shard.nic.share_domain(pd.id(), block as u16)?;
            links.listen(pd.id().0, name, block)?;
            Ok::<_, VerbsError>(())
        })?;
        card.progress.kick_if_armed();
        Xrcd::of(pd, cq, Some(name.clone()))
    }

    /// `ibv_close_xrcd`: the last one ends the domain.
    ///
    /// # Errors
    /// EBUSY: the last one, while QPs or SRQs are in it, QPs of its own that other processes have open included; EINVAL when it is gone.
    pub fn close(&self) -> Result<()> {
        /* nobody opens it meanwhile */
        let _shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.0.state();
        match state.opened {
            0 => return Err(VerbsError::Invalid("XRC domain is gone")),
            1 => {
                /* the card knows those that are its own */
                if state.qps.iter().filter_map(Qp::upgrade).any(|qp| qp.is_visited()) {
                    return Err(VerbsError::Busy("queue pairs of other processes"));
                }
                let pd = self.0.pd.id();
                /* in one: the next domain that gets the number is another one, and other processes' messages are not for it */
                self.0.pd.dealloc_with(|shard| end_links(shard, pd))?;
            }
            _ => {}
        }
        state.opened -= 1;
        Ok(())
    }

    /// A QP that receives: its requests go to the SRQs of the domain that they name. It has no queues of
    /// its own. `ctx` is told of its events, under `cookie`.
    ///
    /// # Errors
    /// As [`Qp::create`].
    pub fn create_qp(&self, ctx: &Context, cookie: u64) -> Result<Qp> {
        let mut state = self.0.state();
        make_room(&mut state)?;
        let qp = Qp::create(&self.0.pd, &xrc_recv(&self.0.cq))?;
        qp.list(ctx, cookie)?;
        if self.0.name.is_some() {
            let (pd, qpn) = (self.0.pd.id(), qp.number());
            ctx.card()?.with(|shard, _| shard.openings.offer(pd, qpn, qp.downgrade()))?;
        }
        state.qps.push(qp.downgrade());
        Ok(qp)
    }

    /// `ibv_open_qp`: the receiving QP of this number, which any process may have made that has the domain. `ctx` is told of
    /// its events, under `cookie`. It lives until all have closed it.
    ///
    /// # Errors
    /// EINVAL: the domain has no such QP; EAGAIN: a process of the domain does not answer; ENOMEM; EIO in a forked child.
    pub fn open_qp(&self, ctx: &Context, qpn: Qpn, cookie: u64) -> Result<Qp> {
        ctx.card()?;
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
        let qp = self.0.visit(qpn)?;
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
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a QP of another process, whichever has it.
    fn visit(&self, qpn: Qpn) -> Result<Qp> {
        let card = self.pd.context().card()?;
        let mut blocks = self.name.as_ref().map(DomainName::members).unwrap_or_default();
        /* a process's first QPs have numbers of the block by which it listens */
        blocks.sort_by_key(|block| *block != qpn >> QPN_BLOCK_SHIFT);
        let mut silent = false;
        for block in blocks {
            match card.with(|shard, _| shard.env.link(self.pd.id(), block as u16)) {
                Ok(link) => match card.visit(link, self.pd.id(), qpn) {
                    Ok(visit) => return Qp::visiting(&self.pd, &self.cq, qpn, visit),
                    Err(VerbsError::Again) => silent = true,
                    Err(VerbsError::Os(libc::EINVAL | libc::ENODEV)) => {}
                    Err(error) => return Err(error),
                },
                Err(LinkError::Busy) => silent = true,
                Err(LinkError::Gone) => {}
            }
        }
        Err(if silent { VerbsError::Again } else { VerbsError::Invalid("no such QP in the XRC domain") })
    }
}

/// Room for one more QP. ENOMEM.
fn make_room(state: &mut State) -> Result<()> {
    state.qps.retain(|old| old.strong_count() > 0);
    state.qps.try_reserve(1).map_err(|_| VerbsError::NoMemory("QPs of an XRC domain"))
}

impl Drop for XrcdInner {
    fn drop(&mut self) {
        let open = self.state.get_mut().is_ok_and(|state| state.opened > 0);
        if open
            && self.name.is_some()
            && let Ok(card) = self.pd.context().card()
        {
            let pd = self.pd.id();
            card.with(|shard, _| {
                end_links(shard, pd);
                shard.openings.hand_over(&card.notes);
            });
        }
    }
}

/// Other processes do not reach the domain any more.
fn end_links(shard: &mut Shard, pd: PdId) {
    if let Some(links) = &mut shard.env.links {
        links.end(pd.0);
    }
    shard.openings.end(pd);
}

/// Device and inode of an open file.
fn inode(fd: RawFd) -> Result<(u64, u64)> {
    // SAFETY: numbers only: zero is valid.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: a place for the answer; any descriptor may be asked about.
    if unsafe { libc::fstat(fd, &mut stat) } != 0 {
        return Err(VerbsError::last_os());
    }
    Ok((stat.st_dev, stat.st_ino))
}
