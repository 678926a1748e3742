//! One card: its tables, and the calls in which the world reaches it.
//!
//! Owns QPs, MRs, PDs, AVs and SRQs. Protocol lives in `transport`; this module finds the QP that a
//! doorbell, frame or timeout is for, and decides whose turn it is to send.
//!
//! Its modules know each other in a circle, on purpose: they are one module, the methods of [`Nic`] by
//! subject, over the same fields. `control`, `tags`, `multicast`, `kernels` and `mads` are commands and
//! queue pair 1; `data`, `cached`, `contexts` and `srq_lease` the way of doorbells and frames; `engine` and
//! `released` queue pairs that others run. What has no circle are the tables that they share: `table`,
//! `path`, `sched`, `timers`, `pace`, `repair`, `keep`, `psn_set`.

mod cached;
pub(crate) mod contexts;
mod control;
mod data;
mod engine;
pub(crate) mod keep;
mod kernels;
pub mod mads;
pub(crate) mod multicast;
pub(crate) mod pace;
pub(crate) mod path;
mod pool;
mod psn_set;
pub mod released;
pub(crate) mod repair;
pub(crate) mod sched;
mod srq_lease;
mod table;
mod tags;
pub(crate) mod timers;

use alloc::boxed::Box;
use alloc::vec::Vec;

use slab::Slab;

use crate::congestion::WindowLimits;
use crate::engine::Engine;
use crate::env::{Env, RecvQueue};
use crate::error::NicError;
use crate::limits::{CardLimits, room};
use crate::mr::{MrAttr, MrTable, WindowType};
use crate::qp::EventOwner;
use crate::rng::Rng;
use crate::room::make_room_in;
use crate::strom::KernelRegistry;
use crate::tags::MAX_TAG_SGE;
use crate::transport::Qp;
use crate::transport::remote_srq::RemoteSrqs;
use crate::types::{Av, AvId, Gid, Mtu, Nanos, PdId, QPN_BLOCK, Qpn, Seg, SrqId};
pub use contexts::ContextCache;
use contexts::Contexts;
pub use engine::{QpHandover, SharedRq};
use keep::Keep;
pub use kernels::OwnRequest;
use mads::WaitingMads;
use multicast::Groups;
use path::Paths;
pub use path::{PACKET_OVERHEAD, Path, PathId};
use repair::Repairs;
use sched::Sched;
use srq_lease::{LeaseTable, Revocable};
use table::QpTable;
use tags::TagMatching;
pub use tags::{TagChange, TagOp};
pub use timers::{TimerId, Timers};

/// Most SGEs that a WQE may have.
pub const MAX_SGE: usize = 64;

/// What a card is built with.
#[derive(Clone, Copy, Debug)]
pub struct NicConfig {
    /// Path MTU of the port: the most that a UD message may carry
    pub mtu: Mtu,
    /// Longest message, bytes: a power of two
    pub max_msg: u32,
    /// Most bytes in flight towards one destination; the window starts below and adapts
    pub window: u32,
    /// The round trip below which that window grows and beyond which it shrinks, ns (1RMA's algorithm 1).
    /// `None`: losses move it, not delays
    pub delay_target: Option<Nanos>,
    /// Most READs and atomics a QP may have outstanding, either way
    pub max_rd_atomic: u8,
    /// Repeat selectively with peers that do so, too
    pub repeat: bool,
    /// Of that: most requests kept at a time behind missing ones, 4160 bytes each
    pub kept: u16,
    /// Of that: most QPs at a time that keep requests, and that repair what their peers miss
    pub gaps: u16,
    /// ACKs give credits: how many receives are posted, so that peers send no more than find one (IBTA
    /// 9.7.7.2). Peers' credits are heeded in any case
    pub credits: bool,
    /// Most multicast groups that QPs may be attached to
    pub max_groups: u32,
    /// QP contexts are few, as on hardware; none: there is room for all
    pub contexts: Option<ContextCache>,
    /// Most objects
    pub limits: CardLimits,
}

impl Default for NicConfig {
    fn default() -> Self {
        let limits = CardLimits::default();
        NicConfig {
            mtu: Mtu::M4096,
            max_msg: 1 << 30,
            window: 1 << 20,
            delay_target: None,
            max_rd_atomic: 128,
            repeat: true,
            credits: false,
            kept: 1024,
            gaps: 64,
            max_groups: 16,
            contexts: None,
            limits,
        }
    }
}

/// A card. See the crate's documentation for the order of calls.
pub struct Nic<E: Env> {
    pub(crate) qps: QpTable<E>,
    pub(crate) shared: QpShared<E>,
    groups: Groups,
    mads: WaitingMads,
}

/// What the QPs of a card share.
pub(crate) struct QpShared<E: Env> {
    pub(crate) cfg: NicConfig,
    pub(crate) stats: E::Stats,
    pub(crate) mrs: MrTable<E::Mrs>,
    pub(crate) avs: Slab<AvEntry>,
    pub(crate) srqs: Slab<Srq<E>>,
    pub(crate) pds: Slab<Pd>,
    pub(crate) paths: Paths<E::Congestion>,
    pub(crate) sched: Sched,
    pub(crate) rng: Rng,
    /// Requests kept behind missing ones, and what requesters know while packets are missing: selective
    /// repeat
    pub(crate) keep: Keep,
    pub(crate) repairs: Repairs,
    /// QP contexts, where they are few; boxed, as it stands beside what the data path uses
    pub(crate) contexts: Option<Box<Contexts>>,
    /// The UC or UD QP whose last receive was taken: [`Nic::is_starved`]
    pub(crate) starved: Option<Qpn>,
    /// Scratch of the packet being sent: its gather list.
    pub(crate) segs: Vec<Seg>,
    /// Connections of RC whose state this card keeps
    pub(crate) connections: u32,
    /// SRQs of other cards in XRC domains of this one
    pub(crate) remote_srqs: RemoteSrqs,
    /// WQEs of this card's SRQs that other cards have
    pub(crate) leases: LeaseTable,
    /// StRoM's kernels
    pub(crate) kernels: KernelRegistry,
    /// What the engines of this card's QPs share
    pub(crate) engines: <E::Engine as Engine<E>>::Shared,
}

/// A protection domain: how many objects live in it.
#[derive(Default)]
pub(crate) struct Pd {
    pub(crate) users: u32,
    /// An XRC domain that other cards are in, too
    pub(crate) shared: bool,
}

/// An address vector with the path that it takes.
pub(crate) struct AvEntry {
    pub(crate) av: Av,
    pub(crate) pd: PdId,
    pub(crate) path: PathId,
}

/// A shared receive queue.
pub(crate) struct Srq<E: Env> {
    pub(crate) rq: E::Rq,
    pub(crate) pd: PdId,
    /// An event is due when fewer WQEs are left; 0 is off
    pub(crate) limit: u32,
    pub(crate) users: u32,
    pub(crate) cookie: u64,
    /// XRC: its domain, and where its receives complete
    pub(crate) xrc: Option<(PdId, E::Cq)>,
    /// Cards that may hold leases of it
    pub(crate) revocable: Revocable,
    /// It matches tags
    pub(crate) tags: Option<Box<TagMatching<E::Cq>>>,
}

impl<E: Env> Nic<E> {
    /// Bytes that the card keeps of each QP, beside what grows with its queues: for tests that bound it.
    pub const QP_BYTES: usize = size_of::<Qp<E>>();

    /// A card without QPN blocks, and so without QPs, whose table of memory regions lies in `mrs`. `seed`
    /// decides keys and QPNs: who knows it knows them.
    pub fn new(cfg: NicConfig, stats: E::Stats, seed: [u64; 2], mrs: E::Mrs) -> Self {
        Nic {
            qps: QpTable::new(),
            shared: QpShared {
                cfg,
                stats,
                mrs: MrTable::new(mrs),
                avs: Slab::new(),
                srqs: Slab::new(),
                pds: Slab::new(),
                paths: Paths::new(WindowLimits { max: cfg.window, delay_target: cfg.delay_target }),
                sched: Sched::default(),
                rng: Rng::new(seed),
                keep: Keep::default(),
                repairs: Repairs::default(),
                contexts: cfg.contexts.and_then(Contexts::new).map(Box::new),
                starved: None,
                segs: Vec::with_capacity(MAX_SGE),
                connections: 0,
                remote_srqs: RemoteSrqs::default(),
                leases: LeaseTable::default(),
                kernels: KernelRegistry::default(),
                engines: Default::default(),
            },
            groups: Groups::default(),
            mads: WaitingMads::default(),
        }
    }

    /// Gives the card the QPNs `block * 4096 .. (block + 1) * 4096`. Block 0 is refused: QPNs 0 and
    /// 1 are special (IBTA 10.2.4).
    pub fn add_block(&mut self, block: u16) -> Result<(), NicError> {
        self.qps.add_block(block, self.shared.rng.word())
    }

    /// QPNs left in the card's blocks.
    pub fn free_qpns(&self) -> usize {
        self.qps.free()
    }

    /// What the card was built with.
    pub fn config(&self) -> &NicConfig {
        &self.shared.cfg
    }

    /// Where the counters live.
    pub fn stats(&self) -> &E::Stats {
        &self.shared.stats
    }

    /// The counters.
    pub fn counters(&self) -> &crate::Counters {
        &self.shared.stats
    }

    /// A new protection domain. `Exhausted`: there are as many as may be, as for all objects.
    pub fn alloc_pd(&mut self) -> Result<PdId, NicError> {
        room(self.shared.pds.len(), self.shared.cfg.limits.pds)?;
        make_room_in(&mut self.shared.pds)?;
        Ok(PdId(self.shared.pds.insert(Pd::default()) as u32))
    }

    /// Ends a protection domain; `Busy` while something lives in it.
    pub fn dealloc_pd(&mut self, pd: PdId) -> Result<(), NicError> {
        match self.shared.pds.get(pd.0 as usize) {
            None => Err(NicError::NotFound),
            Some(p) if p.users > 0 => Err(NicError::Busy),
            Some(_) => {
                if self.shared.pds.remove(pd.0 as usize).shared {
                    self.shared.remote_srqs.forget(pd);
                }
                Ok(())
            }
        }
    }

    /// Registers memory; gives the key, which is lkey and rkey.
    pub fn reg_mr(&mut self, attr: MrAttr) -> Result<u32, NicError> {
        room(self.shared.mrs.regions(), self.shared.cfg.limits.mrs)?;
        self.shared.hold_pd(attr.pd)?;
        let random = self.shared.rng.word();
        let key = self.shared.mrs.register(attr, random).inspect_err(|_| self.shared.drop_pd(attr.pd))?;
        self.shared.stats.mrs.inc();
        Ok(key)
    }

    /// Changes what a key opens. `Invalid` or `NotFound` changes nothing.
    pub fn rereg_mr(&mut self, key: u32, attr: MrAttr) -> Result<(), NicError> {
        self.shared.hold_pd(attr.pd)?;
        match self.shared.mrs.reregister(key, attr) {
            Ok(before) => self.shared.drop_pd(before),
            Err(error) => {
                self.shared.drop_pd(attr.pd);
                return Err(error);
            }
        }
        Ok(())
    }

    /// What is registered under a key.
    pub fn query_mr(&self, key: u32) -> Option<MrAttr> {
        self.shared.mrs.query(key)
    }

    /// Ends a registration. No packet touches the memory afterwards. `Busy`: memory windows are bound to it.
    pub fn dereg_mr(&mut self, key: u32) -> Result<(), NicError> {
        let pd = self.shared.mrs.deregister(key)?;
        self.shared.drop_pd(pd);
        self.shared.stats.mrs.sub(1);
        Ok(())
    }

    /// Opens an MR of another card under the key that it has there. `Busy`: this card has that key, too.
    pub fn import_mr(&mut self, key: u32, attr: MrAttr) -> Result<(), NicError> {
        self.shared.hold_pd(attr.pd)?;
        self.shared.mrs.import(key, attr).inspect_err(|_| self.shared.drop_pd(attr.pd))
    }

    /// Ends an import. No packet touches the memory afterwards.
    pub fn unimport_mr(&mut self, key: u32) -> Result<(), NicError> {
        let pd = self.shared.mrs.unimport(key)?;
        self.shared.drop_pd(pd);
        Ok(())
    }

    /// A new memory window, not bound; gives its key.
    pub fn alloc_mw(&mut self, pd: PdId, kind: WindowType) -> Result<u32, NicError> {
        room(self.shared.mrs.windows(), self.shared.cfg.limits.windows)?;
        self.shared.hold_pd(pd)?;
        let random = self.shared.rng.word();
        self.shared.mrs.alloc_window(pd, kind, random).inspect_err(|_| self.shared.drop_pd(pd))
    }

    /// Ends a memory window, bound or not; `key` is any key that it ever had.
    pub fn dealloc_mw(&mut self, key: u32) -> Result<(), NicError> {
        let pd = self.shared.mrs.free_window(key)?;
        self.shared.drop_pd(pd);
        Ok(())
    }

    /// A new address vector.
    pub fn create_av(&mut self, pd: PdId, av: Av) -> Result<AvId, NicError> {
        room(self.shared.avs.len(), self.shared.cfg.limits.avs)?;
        make_room_in(&mut self.shared.avs)?;
        let path = self.shared.path_to(av.dgid)?;
        self.shared.hold_pd(pd)?;
        Ok(AvId(self.shared.avs.insert(AvEntry { av, pd, path }) as u32))
    }

    /// Ends an address vector.
    pub fn destroy_av(&mut self, av: AvId) -> Result<(), NicError> {
        let entry = self.shared.avs.try_remove(av.0 as usize).ok_or(NicError::NotFound)?;
        self.shared.drop_pd(entry.pd);
        Ok(())
    }

    /// A new shared receive queue; an event is due when fewer than `limit` WQEs are left. `cookie` is
    /// the host's name for it.
    pub fn create_srq(&mut self, pd: PdId, rq: E::Rq, limit: u32, cookie: u64) -> Result<SrqId, NicError> {
        self.insert_srq(Srq {
            rq,
            pd,
            limit,
            users: 0,
            cookie,
            xrc: None,
            revocable: Revocable::No,
            tags: None,
        })
    }

    /// A new shared receive queue of the XRC domain that `xrcd` stands for; its receives complete in `cq`,
    /// whichever QP they came through.
    pub fn create_xrc_srq(
        &mut self,
        pd: PdId,
        xrcd: PdId,
        rq: E::Rq,
        cq: E::Cq,
        cookie: u64,
    ) -> Result<SrqId, NicError> {
        self.shared.hold_pd(xrcd)?;
        let srq = Srq {
            rq,
            pd,
            limit: 0,
            users: 0,
            cookie,
            xrc: Some((xrcd, cq)),
            revocable: Revocable::No,
            tags: None,
        };
        if self.shared.is_shared(xrcd) && self.shared.srqs.vacant_key() >= QPN_BLOCK as usize {
            /* its number would not name it */
            self.shared.drop_pd(xrcd);
            return Err(NicError::Exhausted);
        }
        self.insert_srq(srq).inspect_err(|_| self.shared.drop_pd(xrcd))
    }

    fn insert_srq(&mut self, srq: Srq<E>) -> Result<SrqId, NicError> {
        room(self.shared.srqs.len(), self.shared.cfg.limits.srqs)?;
        make_room_in(&mut self.shared.srqs)?;
        self.shared.hold_pd(srq.pd)?;
        Ok(SrqId(self.shared.srqs.insert(srq) as u32))
    }

    /// Has a shared receive queue take from another ring from now on; gives the one before. Moving what is
    /// posted is the caller's.
    pub fn replace_srq_ring(&mut self, srq: SrqId, rq: E::Rq) -> Result<E::Rq, NicError> {
        let srq = self.shared.srqs.get_mut(srq.0 as usize).ok_or(NicError::NotFound)?;
        Ok(core::mem::replace(&mut srq.rq, rq))
    }

    /// Whose a shared receive queue is.
    pub fn srq_owner(&self, srq: SrqId) -> Option<EventOwner> {
        self.shared.srqs.get(srq.0 as usize).map(|s| EventOwner { pd: s.pd, cookie: s.cookie })
    }

    /// Sets the limit (0: no event). Whether the queue can hold so many is the caller's to know.
    pub fn modify_srq_limit(&mut self, srq: SrqId, limit: u32) -> Result<(), NicError> {
        self.shared.srqs.get_mut(srq.0 as usize).ok_or(NicError::NotFound)?.limit = limit;
        Ok(())
    }

    /// The limit that is armed; 0 after its event.
    pub fn query_srq_limit(&self, srq: SrqId) -> Result<u32, NicError> {
        self.shared.srqs.get(srq.0 as usize).map(|s| s.limit).ok_or(NicError::NotFound)
    }

    /// Ends a shared receive queue; `Busy` while QPs use it.
    pub fn destroy_srq(&mut self, srq: SrqId) -> Result<(), NicError> {
        match self.shared.srqs.get(srq.0 as usize) {
            None => Err(NicError::NotFound),
            Some(s) if s.users > 0 => Err(NicError::Busy),
            Some(_) => {
                let s = self.shared.srqs.remove(srq.0 as usize);
                self.shared.leases.forget(srq);
                self.shared.drop_pd(s.pd);
                if let Some((xrcd, _)) = s.xrc {
                    self.shared.drop_pd(xrcd);
                }
                Ok(())
            }
        }
    }
}

impl<E: Env> QpShared<E> {
    fn hold_pd(&mut self, pd: PdId) -> Result<(), NicError> {
        self.pds.get_mut(pd.0 as usize).ok_or(NicError::NotFound)?.users += 1;
        Ok(())
    }

    fn drop_pd(&mut self, pd: PdId) {
        if let Some(p) = self.pds.get_mut(pd.0 as usize) {
            p.users = p.users.saturating_sub(1);
        }
    }

    /// The path towards `dgid`, made if there is none. `Exhausted`: no memory.
    fn path_to(&mut self, dgid: Gid) -> Result<PathId, NicError> {
        self.sched.make_room_for_paths(self.paths.len() + 1)?;
        self.paths.find(dgid)
    }

    /// The waiters of a path should be looked at.
    pub(crate) fn open_path(&mut self, id: PathId) {
        if self.paths.get(id).open() {
            self.sched.push_open(id);
        }
    }

    /// Most SGEs that a receive WQE of `srq` may have.
    fn srq_max_sge(&self, srq: SrqId) -> Option<usize> {
        let most = |s: &Srq<E>| s.rq.max_sge().max(if s.tags.is_some() { MAX_TAG_SGE } else { 0 });
        self.srqs.get(srq.0 as usize).map(most)
    }
}
