//! What operations of 1RMA may end with, and what the bytes of each may be.

use std::collections::BTreeMap;

use starverbs_onerma::{OneRmaOp, RegionKey, Status};
use starverbs_sim::onerma::OneRmaNet;

use super::MARGIN;
use crate::plan::At;

/// What is wrong with an operation on purpose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wrong {
    /// Its key
    Key,
    /// It reaches beyond the remote region
    Bounds,
    /// The remote region is for its own card alone
    Rights,
    /// It reaches beyond the local region
    Local,
}

/// An operation that is under way.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) op: OneRmaOp,
    pub(super) from: At,
    pub(super) to: At,
    /// Host memory of its process
    pub(super) local: u64,
    /// Host memory at its target
    pub(super) remote: u64,
    pub(super) len: u64,
    /// Of which its data consists; where it goes to, all bytes were the opposite
    pub(super) byte: u8,
    pub(super) wrong: Option<Wrong>,
    /// Its places here and there
    pub(super) places: [u64; 2],
    /// Which region it reaches
    pub(super) born: u64,
    /// And what of its changes was known
    pub(super) version: u64,
    /// The region had one of two keys then
    pub(super) mixed: bool,
    /// REKEY: the key that it brings
    pub(super) new_key: Option<RegionKey>,
}

impl Job {
    /// Where its data goes to.
    fn sink(&self) -> Option<(At, u64)> {
        match self.op {
            OneRmaOp::Read => Some((self.from, self.local)),
            OneRmaOp::Write => Some((self.to, self.remote)),
            OneRmaOp::Rekey => None,
        }
    }

    /// Whether it may end so; `changed`: its request may have been changed, or the name or the key of its
    /// region. A card may have too much to do, and an answer may be lost or late, at any time.
    pub(super) fn may_end_with(&self, status: Status, changed: bool) -> bool {
        match status {
            Status::Ok => self.wrong.is_none(),
            Status::Nack | Status::Timeout | Status::DispatchTimeout => true,
            Status::RemoteAuthenticationFailure => self.wrong == Some(Wrong::Key) || changed,
            Status::RemoteAccess => matches!(self.wrong, Some(Wrong::Bounds | Wrong::Rights)),
            Status::LocalAccess | Status::Exhausted => false,
        }
    }
}

/// What is known of memory.
#[derive(Default)]
pub(super) struct Oracle {
    /// Bytes that nobody may change any more, where they lie
    still: BTreeMap<(At, u64), Vec<u8>>,
    /// WRITEs whose process is gone, which may still land
    orphans: Vec<Job>,
}

impl Oracle {
    /// The programs make both places of an operation ready.
    pub(super) fn begin(&mut self, net: &mut OneRmaNet, job: &Job) {
        for at in [(job.from, job.local), (job.to, job.remote)] {
            self.check_still(net, at);
            self.still.remove(&at);
        }
        let mut set = |(host, addr): (At, u64), bytes: &[u8]| net.hosts[host].env.memory.write(addr, bytes);
        let (here, there) = ((job.from, job.local), (job.to, job.remote));
        if let Some(key) = job.new_key {
            return set(here, &key.0);
        }
        let source = if job.op == OneRmaOp::Read { there } else { here };
        set(source, &vec![job.byte; job.len as usize]);
        if let Some(sink) = job.sink() {
            set(sink, &vec![!job.byte; (job.len + MARGIN) as usize]);
        }
    }

    /// It has ended: what is there is right, and stays. `None`: its own card did not take it.
    pub(super) fn end(&mut self, net: &OneRmaNet, job: &Job, status: Option<Status>) {
        let Some(sink) = job.sink() else { return };
        self.check_still(net, sink);
        self.check(net, job, status);
        self.keep(net, sink, job);
    }

    fn check(&self, net: &OneRmaNet, job: &Job, status: Option<Status>) {
        let Some((host, addr)) = job.sink() else { return };
        let bytes = net.hosts[host].env.memory.read(addr, (job.len + MARGIN) as usize);
        let (front, back) = bytes.split_at(job.len as usize);
        assert!(back.iter().all(|byte| *byte == !job.byte), "{job:?}: bytes beside it were written");
        let (all, none) =
            (front.iter().all(|byte| *byte == job.byte), front.iter().all(|byte| *byte == !job.byte));
        let either = front.iter().all(|byte| [job.byte, !job.byte].contains(byte));
        match status {
            Some(Status::Ok) => assert!(all, "{job:?} is done, and not all of it is there"),
            _ if job.wrong.is_some() => assert!(none, "{job:?} must not write anything"),
            _ => assert!(either, "{job:?}: bytes that nobody has sent"),
        }
    }

    /// An operation that is under way writes and reads nothing any more at its target: what it would read is
    /// something else now.
    pub(super) fn freeze(&mut self, net: &mut OneRmaNet, job: &Job) {
        match job.op {
            OneRmaOp::Write => {
                self.check_still(net, (job.to, job.remote));
                self.keep(net, (job.to, job.remote), job);
            }
            OneRmaOp::Read => {
                let memory = &mut net.hosts[job.to].env.memory;
                memory.write(job.remote, &vec![!job.byte; job.len as usize]);
            }
            OneRmaOp::Rekey => {}
        }
    }

    /// The process of an operation is gone, and its memory with it.
    pub(super) fn orphan(&mut self, net: &OneRmaNet, job: &Job) {
        match job.sink() {
            Some(sink) if job.op == OneRmaOp::Read => self.keep(net, sink, job),
            Some(_) => self.orphans.push(job.clone()),
            None => {}
        }
    }

    fn keep(&mut self, net: &OneRmaNet, at: (At, u64), job: &Job) {
        let bytes = net.hosts[at.0].env.memory.read(at.1, (job.len + MARGIN) as usize);
        self.still.insert(at, bytes.to_vec());
    }

    fn check_still(&self, net: &OneRmaNet, at: (At, u64)) {
        let Some(bytes) = self.still.get(&at) else { return };
        let now = net.hosts[at.0].env.memory.read(at.1, bytes.len());
        assert!(now == bytes, "host {}: memory at {:#x} was written after its operation's end", at.0, at.1);
    }

    /// The run is over.
    pub(super) fn check_all(&self, net: &OneRmaNet) {
        self.still.keys().for_each(|at| self.check_still(net, *at));
        self.orphans.iter().for_each(|job| self.check(net, job, None));
    }
}
