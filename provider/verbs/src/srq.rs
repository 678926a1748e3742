//! Shared receive queues.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use starverbs_core::SrqId;
use starverbs_core::nic::TagOp;
use starverbs_core::tags::MAX_TAGS;
use starverbs_rings::{RecvProducer, RecvSize, SpinLock, WorkRings};

use crate::cq::Cq;
use crate::device::command::SrqKind;
use crate::device::{Command, Doorbell};
use crate::error::{Result, VerbsError};
use crate::events::VerbsEvent;
use crate::info::MAX_SGE;
use crate::pd::Pd;
use crate::post::RecvWr;
use crate::xrcd::Xrcd;

/// What `ibv_query_srq` gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqAttr {
    /// WQEs it holds
    pub max_wr: u32,
    /// SGEs of a WQE
    pub max_sge: u32,
    /// Armed limit; 0 when none is, or its event came
    pub limit: u32,
}

/// What was granted: at least what was asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SrqCaps {
    /// WQEs that are posted at most
    pub max_wr: u32,
    /// SGEs of a WQE
    pub max_sge: u32,
}

/// What a shared receive queue is for.
enum SrqType<'a> {
    Basic,
    Xrc(&'a Xrcd, &'a Cq),
    /// So many tags
    Tagged(&'a Cq, u32),
}

/// A shared receive queue, locked: see [`Srq::post_list`].
pub struct SrqPoster<'a>(RecvProducer<'a>);

impl SrqPoster<'_> {
    /// Adds a work request.
    ///
    /// # Errors
    /// ENOMEM: full; EINVAL: too many SGEs.
    #[inline]
    pub fn push(&mut self, wr: &RecvWr<'_>) -> Result<()> {
        Ok(self.0.push(wr.wr_id, wr.sges)?)
    }
}

/// A shared receive queue. Clones are the same queue.
#[derive(Clone)]
pub struct Srq(pub(crate) Arc<SrqInner>);

pub(crate) struct SrqInner {
    pd: Pd,
    /// The post lock. The rings are replaced when the queue is resized, with the card's lock held: of the
    /// two that comes first.
    rings: SpinLock<WorkRings>,
    id: SrqId,
    /// By which requests name it
    number: u32,
    cookie: u64,
    gone: AtomicBool,
    /// XRC, tag matching: where its receives complete
    cq: Option<Cq>,
    /// It matches tags
    tagged: bool,
}

impl Srq {
    /// `ibv_create_srq`: room for at least `max_wr` WQEs of at least `max_sge` SGEs.
    ///
    /// # Errors
    /// EINVAL: beyond the device's limits; ENOMEM; EIO in a forked child.
    pub fn create(pd: &Pd, max_wr: u32, max_sge: u32, limit: u32, cookie: u64) -> Result<Srq> {
        Srq::new(pd, &SrqType::Basic, max_wr, max_sge, limit, cookie)
    }

    /// `ibv_create_srq_ex` with IBV_SRQT_XRC: for the QPs of an XRC domain; receives complete in `cq`.
    ///
    /// # Errors
    /// As [`Srq::create`].
    pub fn create_xrc(pd: &Pd, xrcd: &Xrcd, cq: &Cq, max_wr: u32, max_sge: u32, cookie: u64) -> Result<Srq> {
        Srq::new(pd, &SrqType::Xrc(xrcd, cq), max_wr, max_sge, 0, cookie)
    }

    /// `ibv_create_srq_ex` with IBV_SRQT_TM: matches up to `max_tags` tags; everything completes in `cq`.
    ///
    /// # Errors
    /// As [`Srq::create`].
    pub fn create_tagged(
        pd: &Pd,
        cq: &Cq,
        max_tags: u32,
        max_wr: u32,
        max_sge: u32,
        cookie: u64,
    ) -> Result<Srq> {
        if max_tags == 0 || max_tags > MAX_TAGS {
            return Err(VerbsError::Invalid("number of tags"));
        }
        Srq::new(pd, &SrqType::Tagged(cq, max_tags), max_wr, max_sge, 0, cookie)
    }

    /// `ibv_post_srq_ops`, one of its list; gives the handle of what was added.
    ///
    /// # Errors
    /// ENOMEM: the list is full; EINVAL: the queue matches no tags; EIO in a forked child.
    pub fn change_tags(&self, op: &TagOp) -> Result<u32> {
        let device = self.0.pd.context().device()?;
        device.control(Command::ChangeTags { srq: self.0.id, op: *op })?.number()
    }

    /// Whether it matches tags.
    pub(crate) fn is_tagged(&self) -> bool {
        self.0.tagged
    }

    /// Its protection domain.
    pub(crate) fn pd(&self) -> &Pd {
        &self.0.pd
    }

    fn new(pd: &Pd, kind: &SrqType<'_>, max_wr: u32, max_sge: u32, limit: u32, cookie: u64) -> Result<Srq> {
        let device = pd.context().device()?;
        if max_wr == 0 || max_wr > device.info().attr.max_srq_wr || max_sge > MAX_SGE || limit > max_wr {
            return Err(VerbsError::Invalid("shared receive queue attributes"));
        }
        let size = RecvSize { max_wr, max_sge: max_sge.max(1) as u16 };
        let rings = new_rings(pd, size)?;
        // SAFETY: the one card half, used under the card's lock.
        let half = unsafe { rings.card_rq() };
        let (kind, cq) = match *kind {
            SrqType::Basic => (SrqKind::Basic { limit }, None),
            SrqType::Xrc(xrcd, cq) => (SrqKind::Xrc { domain: xrcd.pd().id(), cq: cq.card_half() }, Some(cq)),
            SrqType::Tagged(cq, tags) => (SrqKind::Tagged { cq: cq.card_half(), tags }, Some(cq)),
        };
        let (cq, tagged) = (cq.cloned(), matches!(kind, SrqKind::Tagged { .. }));
        let command = Command::CreateSrq { pd: pd.id(), rq: half, cookie, kind };
        let (id, number) = device.control(command)?.srq()?;
        if let Some(cq) = &cq {
            cq.0.users.fetch_add(1, Ordering::AcqRel);
        }
        let rings = SpinLock::new(rings);
        Ok(Srq(Arc::new(SrqInner {
            pd: pd.clone(),
            rings,
            id,
            number,
            cookie,
            gone: AtomicBool::new(false),
            cq,
            tagged,
        })))
    }

    /// What was granted.
    pub fn caps(&self) -> SrqCaps {
        let rings = self.0.rings.lock();
        SrqCaps { max_wr: rings.recv_slots(), max_sge: u32::from(rings.max_recv_sge()) }
    }

    /// `ibv_modify_srq`: room for at least `max_wr` WQEs, what is posted stays; an event when fewer than
    /// `limit` are left (0: none), anew after each.
    ///
    /// # Errors
    /// EINVAL: a size of 0, beyond the device's max_srq_wr, or below what is posted or the limit; a limit
    /// above the size. ENOMEM. Nothing has changed then.
    pub fn modify(&self, max_wr: Option<u32>, limit: Option<u32>) -> Result<()> {
        let device = self.0.pd.context().device()?;
        let SrqCaps { max_wr: slots, max_sge } = self.caps();
        let mut room = match max_wr {
            Some(max_wr) if max_wr == 0 || max_wr > device.info().attr.max_srq_wr => {
                return Err(VerbsError::Invalid("size of a shared receive queue"));
            }
            Some(max_wr) if max_wr.next_power_of_two() != slots => {
                Some(new_rings(&self.0.pd, RecvSize { max_wr, max_sge: max_sge as u16 })?)
            }
            _ => None,
        };
        let (srq, rings) = (self.0.id, &self.0.rings);
        /* rings that are not needed go with no lock held: their memory may be the program's to take back */
        device.control(Command::ModifySrq { srq, rings, room: room.as_mut(), limit }).map(|_| ())
    }

    /// `ibv_query_srq`: reads the attributes.
    ///
    /// # Errors
    /// EINVAL when it is gone; EIO in a forked child.
    pub fn query(&self) -> Result<SrqAttr> {
        let device = self.0.pd.context().device()?;
        let limit = device.control(Command::QuerySrq { srq: self.0.id })?.number()?;
        let SrqCaps { max_wr, max_sge } = self.caps();
        Ok(SrqAttr { max_wr, max_sge, limit })
    }

    /// `ibv_post_srq_recv`, one work request.
    ///
    /// # Errors
    /// ENOMEM: full; EINVAL: too many SGEs; EIO in a forked child.
    #[inline]
    pub fn post(&self, wr: &RecvWr<'_>) -> Result<()> {
        self.post_list(|poster| poster.push(wr))?
    }

    /// `ibv_post_srq_recv`: what `list` pushes, under one taking of the post lock. The card sees it when
    /// `list` is done, which must not call the library.
    ///
    /// # Errors
    /// EIO in a forked child.
    #[inline]
    pub fn post_list<R>(&self, list: impl FnOnce(&mut SrqPoster<'_>) -> R) -> Result<R> {
        let device = self.0.pd.context().device()?;
        let mut rings = self.0.rings.lock();
        let result = list(&mut SrqPoster(rings.recv_producer_mut()));
        /* nobody looks into a shared queue by itself but the library of stateless ends, by handles of its
         * own */
        let awaited = rings.has_other_takers() && rings.was_starved();
        drop(rings);
        if awaited {
            device.doorbell(Doorbell::Srq(self.0.id));
        }
        Ok(result)
    }

    /// `ibv_destroy_srq`: ends a shared receive queue.
    ///
    /// # Errors
    /// EBUSY while QPs use it.
    pub fn destroy(&self) -> Result<()> {
        self.0.destroy()
    }

    /// Its number, as `ibv_get_srq_num` gives.
    pub fn number(&self) -> u32 {
        self.0.number
    }

    /// Its handle on the card.
    pub(crate) fn id(&self) -> SrqId {
        self.0.id
    }
}

fn new_rings(pd: &Pd, size: RecvSize) -> Result<WorkRings> {
    WorkRings::new(None, Some(size), pd.context().device()?.queue_memory(pd))
        .ok_or(VerbsError::NoMemory("shared receive queue"))
}

impl SrqInner {
    fn destroy(&self) -> Result<()> {
        let ctx = self.pd.context();
        let device = ctx.device()?;
        if self.gone.load(Ordering::Acquire) {
            return Err(VerbsError::Invalid("shared receive queue is gone"));
        }
        device.control(Command::DestroySrq { srq: self.id })?;
        self.gone.store(true, Ordering::Release);
        if let Some(cq) = &self.cq {
            cq.0.users.fetch_sub(1, Ordering::AcqRel);
        }
        ctx.purge_events(|event| matches!(event, VerbsEvent::Srq { cookie, .. } if *cookie == self.cookie));
        Ok(())
    }
}

impl Drop for SrqInner {
    fn drop(&mut self) {
        if !*self.gone.get_mut() {
            let _ = self.destroy();
        }
    }
}
