//! What others want from this host: requests for data wait here, and leave a packet at a time.

use alloc::collections::VecDeque;

use starverbs_core::{Nanos, Seg};

use super::outbox::{Letter, NotSent};
use super::{CardPath, OneRmaCard, OneRmaEnv, TURNS, of};
use crate::region::{RegionId, Rights};
use crate::seal::Seal;
use crate::types::{Class, Handle, MAX_OP, OneRmaOp, Status};
use crate::wire::{Hop, Iv};

/// Where data comes from.
pub(super) enum DataSource<K> {
    /// A region, at the target of a READ
    Region {
        /// The region
        id: RegionId,
        /// Its key's version when the request came
        version: u32,
        /// Where in it
        offset: u64,
        /// The derived key
        key: K,
        /// The request
        answers: Iv,
    },
    /// A command's local memory, at the initiator of a WRITE or REKEY
    Slot(Handle),
}

/// A request for data.
pub(super) struct DataRequest<K> {
    pub(super) path: CardPath,
    /// Whom the data is for
    pub(super) to: Handle,
    pub(super) op: OneRmaOp,
    pub(super) class: Class,
    pub(super) size: u32,
    /// Bytes that have left
    pub(super) done: u32,
    pub(super) source: DataSource<K>,
}

impl<K> DataRequest<K> {
    /// The key of a READ.
    pub(super) fn into_key(self) -> Option<K> {
        match self.source {
            DataSource::Region { key, .. } => Some(key),
            DataSource::Slot(_) => None,
        }
    }
}

/// The queues of requests, one for each class.
pub(super) struct RequestQueues<K> {
    jobs: [VecDeque<DataRequest<K>>; 2],
    capacity: usize,
    /// Bytes that have not left, and those of transfers that wait for the window
    pub(super) bytes: u32,
    row: u8,
}

impl<K> RequestQueues<K> {
    pub(super) fn new(capacity: u16) -> Option<Self> {
        let capacity = usize::from(capacity.max(1));
        let queue = || {
            let mut queue = VecDeque::new();
            queue.try_reserve_exact(capacity).ok().map(|()| queue)
        };
        Some(RequestQueues { jobs: [queue()?, queue()?], capacity, bytes: 0, row: 0 })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.jobs.iter().all(VecDeque::is_empty)
    }

    /// Whether `size` bytes more are below the threshold.
    pub(super) fn admits(&self, size: u32, threshold: u32) -> bool {
        self.bytes.saturating_add(size) <= threshold.max(MAX_OP)
    }

    /// Adds a request; gives it back if there is too much to do.
    pub(super) fn push(&mut self, job: DataRequest<K>, threshold: u32) -> Option<DataRequest<K>> {
        if !self.admits(job.size, threshold) || self.jobs[of(job.class)].len() >= self.capacity {
            return Some(job);
        }
        self.bytes += job.size;
        self.jobs[of(job.class)].push_back(job);
        None
    }

    /// The class whose first request is next.
    fn next_class(&mut self) -> Option<Class> {
        let [high, low] = [self.jobs[0].is_empty(), self.jobs[1].is_empty()];
        let class = match (high, low) {
            (true, true) => return None,
            (true, false) => Class::Low,
            (false, false) if self.row >= TURNS => Class::Low,
            _ => Class::High,
        };
        self.row = if class == Class::Low || low { 0 } else { self.row + 1 };
        Some(class)
    }

    /// So many bytes of the first request have left; all of them, and it is done with.
    fn advance(&mut self, class: Class, bytes: u32) {
        let Some(job) = self.jobs[of(class)].front_mut() else { return };
        job.done += bytes;
        self.bytes = self.bytes.saturating_sub(bytes);
        if job.done >= job.size {
            self.jobs[of(class)].pop_front();
        }
    }
}

/// What became of a packet of data.
enum DataOutcome {
    /// So many bytes left
    Sent(u32),
    /// Nobody wants them any more
    Unwanted,
    /// To be said under the reserved key: the region's key is another one, or there is no region now
    Rekeyed,
    /// The memory is not there
    NoMemory,
}

impl<S: Seal> OneRmaCard<S> {
    /// Sends a packet of what is wanted next. False: nothing is.
    pub(super) fn serve<E: OneRmaEnv>(&mut self, env: &mut E, now: Nanos) -> bool {
        let Some(class) = self.inbound.next_class() else { return false };
        let Some(job) = self.inbound.jobs[of(class)].front() else { return false };
        let (left, path, to, op) = (job.size - job.done, job.path, job.to, job.op);
        let len = left.min(self.config.fragment);
        let slot = match &job.source {
            DataSource::Slot(handle) => Some(*handle),
            DataSource::Region { .. } => None,
        };
        let served = match slot {
            Some(handle) => self.serve_slot(env, handle, class, len),
            None => self.serve_region(env, class, len),
        };
        match (served, slot) {
            (DataOutcome::Sent(bytes), _) => self.inbound.advance(class, bytes),
            (DataOutcome::NoMemory, Some(handle)) => {
                let place = handle.index as u16;
                self.inbound.advance(class, left);
                self.give_up(env, place, Status::RemoteAccess);
                self.complete(env, now, place, Status::LocalAccess);
            }
            (DataOutcome::NoMemory, None) => {
                self.refuse_first(env, class);
                self.inbound.advance(class, left);
            }
            (DataOutcome::Rekeyed, _) => {
                let answers = self.first_answers(class);
                self.inbound.advance(class, left);
                self.deny(env, &path, (op, class), to, answers);
            }
            (DataOutcome::Unwanted, _) => self.inbound.advance(class, left),
        }
        true
    }

    fn first_answers(&self, class: Class) -> Iv {
        match self.inbound.jobs[of(class)].front().map(|job| &job.source) {
            Some(DataSource::Region { answers, .. }) => *answers,
            _ => Iv::default(),
        }
    }

    /// A packet of a READ that came here.
    fn serve_region<E: OneRmaEnv>(&mut self, env: &mut E, class: Class, len: u32) -> DataOutcome {
        let OneRmaCard { inbound, regions, out, .. } = self;
        let Some(job) = inbound.jobs[of(class)].front() else { return DataOutcome::Unwanted };
        let DataSource::Region { id, version, offset, ref key, answers } = job.source else {
            return DataOutcome::Unwanted;
        };
        let region = match regions.get(id) {
            Some((region, now)) if now == version => region,
            _ => return DataOutcome::Rekeyed,
        };
        let Some(addr) = region.host_address(offset.saturating_add(job.done.into()), len) else {
            return DataOutcome::NoMemory;
        };
        let hop = Hop::Data { to: job.to, offset: job.done };
        let letter = Letter {
            path: &job.path,
            op: job.op,
            class,
            hop,
            answers,
            by_target: true,
            key,
            data: Some(Seg { addr, len }),
        };
        sent(out.send(env, &letter), len)
    }

    /// A packet of a WRITE or REKEY of this host's.
    fn serve_slot<E: OneRmaEnv>(
        &mut self,
        env: &mut E,
        handle: Handle,
        class: Class,
        len: u32,
    ) -> DataOutcome {
        let OneRmaCard { inbound, regions, out, slots, portals, .. } = self;
        let Some(job) = inbound.jobs[of(class)].front() else { return DataOutcome::Unwanted };
        let slot = slots.get(handle.index as usize);
        let Some((slot, (command, key))) =
            slot.and_then(|slot| Some((slot, slot.in_service(handle.generation, job.op)?)))
        else {
            return DataOutcome::Unwanted;
        };
        let pid = slot.portal.and_then(|at| portals.get(usize::from(at))).map_or(0, |one| one.pid);
        let range = (command.local_offset.saturating_add(job.done.into()), len);
        let Some(addr) = regions.local(command.local, pid, range, Rights::LOCAL_READ) else {
            return DataOutcome::NoMemory;
        };
        let hop = Hop::Data { to: job.to, offset: job.done };
        let letter = Letter {
            path: &job.path,
            op: job.op,
            class,
            hop,
            answers: slot.ask,
            by_target: false,
            key,
            data: Some(Seg { addr, len }),
        };
        sent(out.send(env, &letter), len)
    }

    /// The first READ of a class cannot be served: its memory is not there.
    fn refuse_first<E: OneRmaEnv>(&mut self, env: &mut E, class: Class) {
        let OneRmaCard { inbound, out, counts, .. } = self;
        let Some(job) = inbound.jobs[of(class)].front() else { return };
        let DataSource::Region { ref key, answers, .. } = job.source else { return };
        counts.access_failures += 1;
        let hop = Hop::Fail { to: job.to, status: Status::RemoteAccess };
        let (path, op) = (&job.path, job.op);
        /* without a counter left the initiator times out */
        _ = out.send(env, &Letter { path, op, class, hop, answers, by_target: true, key, data: None });
    }
}

fn sent(result: Result<Iv, NotSent>, len: u32) -> DataOutcome {
    match result {
        Ok(_) => DataOutcome::Sent(len),
        Err(NotSent::NoMemory) => DataOutcome::NoMemory,
        /* without counters the initiator times out */
        Err(NotSent::Exhausted) => DataOutcome::Unwanted,
    }
}
