//! A device that does nothing: each request, and each receive, completes with an error. It proves that the
//! objects need no more of a device than its face.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use starverbs_core::qp::{QpAttr, QpAttrMask, RecvSource};
use starverbs_core::{
    CompletionQueue, Cqe, NicError, QpState, Qpn, RecvQueue, SendQueue, Sge, SrqId, TakenWqe, WcStatus,
};
use starverbs_rings::CardRq;
use starverbs_settings::Settings;

use super::activity::Activity;
use super::command::{Command, CommandReply, QpInit};
use super::soft::deferred_log::DeferredLog;
use super::thread::{ProgressThread, TurnResult};
use super::{Device, Doorbell};
use crate::cq::CqShared;
use crate::error::{Result, VerbsError};
use crate::info::{DeviceInfo, MAX_SGE};
use crate::moderation::Moderator;
use crate::stat::StatPage;

pub(crate) struct Failing {
    pub(crate) info: DeviceInfo,
    pub(crate) settings: Settings,
    pub(crate) stats: StatPage,
    pub(crate) activity: Activity,
    pub(crate) thread: ProgressThread,
    pub(crate) deferred_log: DeferredLog,
    moderator: Arc<Moderator>,
    /// How often it was told that the program may sleep
    pub(crate) armed: AtomicU32,
    objects: Mutex<FakeObjects>,
}

/// What exists, by number: no two objects have the same.
#[derive(Default)]
struct FakeObjects {
    last: u32,
    all: HashMap<u32, Object>,
}

struct Object {
    /// The objects that it needs
    of: Vec<u32>,
    is: Is,
}

enum Is {
    Plain,
    Mr(starverbs_core::mr::MrAttr),
    Srq { rq: CardRq, limit: u32 },
    Qp(Box<Qp>),
}

struct Qp {
    init: QpInit,
    attr: QpAttr,
    /// Requests that have failed
    failed: u32,
}

const GONE: VerbsError = VerbsError::Card(NicError::NotFound);

impl FakeObjects {
    fn add(&mut self, of: &[u32], is: Is) -> Result<CommandReply> {
        if of.iter().any(|number| !self.all.contains_key(number)) {
            return Err(GONE);
        }
        self.last += 1;
        self.all.insert(self.last, Object { of: of.to_vec(), is });
        Ok(CommandReply::Number(self.last))
    }

    fn end(&mut self, number: u32) -> Result<CommandReply> {
        if !self.all.contains_key(&number) {
            return Err(GONE);
        }
        if self.all.values().any(|object| object.of.contains(&number)) {
            return Err(VerbsError::Card(NicError::Busy));
        }
        self.all.remove(&number);
        Ok(CommandReply::Done)
    }

    fn qp(&mut self, qpn: Qpn) -> Result<&mut Qp> {
        match self.all.get_mut(&qpn) {
            Some(Object { is: Is::Qp(qp), .. }) => Ok(qp),
            _ => Err(GONE),
        }
    }

    fn srq(&mut self, srq: SrqId) -> Result<(&mut CardRq, &mut u32)> {
        match self.all.get_mut(&srq.0) {
            Some(Object { is: Is::Srq { rq, limit }, .. }) => Ok((rq, limit)),
            _ => Err(GONE),
        }
    }
}

impl Qp {
    /// Completes all that was posted, if the queue pair is so far.
    fn fail(&mut self, qpn: Qpn) {
        let QpInit { sq, rq, send_cq, recv_cq, .. } = &self.init;
        if self.attr.state == QpState::Reset {
            sq.reset();
            self.failed = sq.posted();
        }
        let failed = |wr_id, status| Cqe { wr_id, status, qpn, ..Cqe::default() };
        while self.attr.state >= QpState::Rts && sq.posted() != self.failed {
            let wr_id = sq.wqe(self.failed).wr_id;
            let _ = send_cq.push(&failed(wr_id, WcStatus::GeneralErr), false);
            self.failed = self.failed.wrapping_add(1);
            sq.release(self.failed);
        }
        if let (QpState::Err, RecvSource::Own(rq)) = (self.attr.state, rq) {
            let mut sges = [Sge::default(); MAX_SGE as usize];
            while let Some(TakenWqe { wr_id, .. }) = rq.take(&mut sges) {
                let _ = recv_cq.push(&failed(wr_id, WcStatus::WrFlushErr), false);
            }
        }
    }
}

impl Failing {
    pub(crate) fn open(settings: Settings) -> Result<Device> {
        let info = DeviceInfo::new(&settings)?;
        Ok(Device::Failing(Arc::new(Failing {
            info,
            stats: StatPage::create(std::process::id(), settings.port, 0)?,
            settings,
            activity: Activity::default(),
            thread: ProgressThread::new()?,
            deferred_log: DeferredLog::new(),
            moderator: Arc::new(Moderator::new()),
            armed: AtomicU32::new(0),
            objects: Mutex::default(),
        })))
    }

    fn objects(&self) -> MutexGuard<'_, FakeObjects> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn control(&self, command: Command<'_>) -> Result<CommandReply> {
        let mut objects = self.objects();
        match command {
            Command::QueryPort => Ok(CommandReply::Port(self.info.port)),
            Command::QueryGid { index } => self.info.gid(index).map(CommandReply::Gid),
            Command::AllocPd { .. } => objects.add(&[], Is::Plain),
            Command::DeallocPd { pd, ended } => objects.end(pd.0).inspect(|_| ended()),
            Command::RegMr { attr } => objects.add(&[attr.pd.0], Is::Mr(attr)),
            Command::DeregMr { key } | Command::DeallocMw { key } => objects.end(key),
            Command::QueryMr { key } => match objects.all.get(&key) {
                Some(Object { is: Is::Mr(attr), .. }) => Ok(CommandReply::Mr(*attr)),
                _ => Err(GONE),
            },
            Command::AllocMw { pd, .. } | Command::CreateAh { pd, .. } => objects.add(&[pd.0], Is::Plain),
            Command::DestroyAh { ah } => objects.end(ah.0),
            Command::ResizeCq { cq, room } => cq.move_to(room).map(|()| CommandReply::Done),
            Command::ModifyCq { cq, moderation } => {
                cq.moderate(moderation, &self.moderator).map(|()| CommandReply::Done)
            }
            Command::CreateSrq { pd, rq, .. } => {
                let number = objects.add(&[pd.0], Is::Srq { rq, limit: 0 })?.number()?;
                Ok(CommandReply::Srq { srq: SrqId(number), number })
            }
            Command::ModifySrq { srq, rings, room, limit } => {
                let (half, armed) = objects.srq(srq)?;
                let mut posted = rings.lock();
                let slots = room.as_ref().map_or(posted.recv_slots(), |room| room.recv_slots());
                if limit.unwrap_or(*armed) > slots || posted.recv_waiting() > slots {
                    return Err(VerbsError::Invalid("size of a shared receive queue"));
                }
                if let Some(room) = room {
                    // SAFETY: the one card half, used under the device's lock.
                    *half = unsafe { room.card_rq() };
                    std::mem::swap(room, &mut *posted);
                }
                *armed = limit.unwrap_or(*armed);
                Ok(CommandReply::Done)
            }
            Command::QuerySrq { srq } => Ok(CommandReply::Number(*objects.srq(srq)?.1)),
            Command::DestroySrq { srq } => objects.end(srq.0),
            Command::CreateQp { init, .. } => {
                let mut of = vec![init.pd.0];
                of.extend(if let RecvSource::Shared(srq) = init.rq { Some(srq.0) } else { None });
                objects.add(&of, Is::Qp(Box::new(Qp { init, attr: QpAttr::default(), failed: 0 })))
            }
            Command::ModifyQp { qp, to, mask } => {
                let (qpn, qp) = (qp.qpn, objects.qp(qp.qpn)?);
                let state = if mask.contains(QpAttrMask::STATE) { to.state } else { qp.attr.state };
                qp.attr = QpAttr { state, ..*to };
                qp.fail(qpn);
                Ok(CommandReply::Done)
            }
            Command::CreateCq { .. } => Ok(CommandReply::Cq(None)),
            Command::QueryQp { qpn } => Ok(CommandReply::Qp(objects.qp(qpn)?.attr)),
            Command::DestroyQp { qp, .. } => {
                qp.purge();
                objects.end(qp.qpn)
            }
            Command::AllocContext { .. } | Command::FreeContext { .. } | Command::DestroyCq { .. } => {
                Ok(CommandReply::Done)
            }
            _ => Err(VerbsError::Unsupported("by a device for tests")),
        }
    }

    pub(crate) fn doorbell(&self, doorbell: Doorbell<'_>) {
        if let Doorbell::Sends { qp: rung, .. } | Doorbell::Receives(rung) = doorbell
            && let Ok(qp) = self.objects().qp(rung.qpn)
        {
            qp.fail(rung.qpn);
        }
    }

    pub(crate) fn progress(&self, _: &CqShared, _: usize) -> bool {
        let mut objects = self.objects();
        for (qpn, object) in &mut objects.all {
            if let Is::Qp(qp) = &mut object.is {
                qp.fail(*qpn);
            }
        }
        true
    }

    pub(crate) fn arm(&self) {
        self.armed.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn wait_fds(&self, _: &mut Vec<libc::pollfd>, _: bool) -> Option<starverbs_core::Nanos> {
        Some(starverbs_core::Nanos::MAX)
    }

    pub(crate) fn turn(&self, _: &[libc::pollfd]) -> TurnResult {
        TurnResult::default()
    }
}
