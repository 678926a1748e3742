//! Processes: one that uses an executor, and one that issues commands as it likes.

use std::collections::BTreeMap;

use starverbs_core::Gid;
use starverbs_onerma::congestion::CongestionSettings;
use starverbs_onerma::executor::{Executor, Finished, OwnPortal, SlotAt, SlotCommand, Transfer};
use starverbs_onerma::{Class, Completion, OneRmaCommand, OneRmaOp, RegionKey, Rights, SlotState};

use super::host::{Portal, SimRegion};
use super::net::OneRmaNet;
use super::seal::SimSeal;

/// Of all regions of the simulation
const KEY: RegionKey = RegionKey(*b"simulated region");
/// Whose they are
const OWNER: u32 = 1;

/// A region at a host that anybody with its key reads, writes and gives another key.
pub fn served_region(net: &mut OneRmaNet, host: usize, len: u64) -> SimRegion {
    let rights = Rights::REMOTE_READ | Rights::REMOTE_WRITE | Rights::REMOTE_REKEY;
    net.hosts[host].region(OWNER, len, rights, KEY)
}

/// A region that a command reaches.
#[derive(Clone, Copy)]
pub struct RemoteRegion<'a> {
    /// Index of the host that serves it
    pub host: usize,
    /// The region there
    pub region: &'a SimRegion,
}

/// A process with a portal and local memory.
pub struct Process {
    /// Its host
    pub host: usize,
    /// The key of the regions that it asks for
    pub key: RegionKey,
    portal: Portal,
    local: SimRegion,
    free: Vec<u16>,
}

impl Process {
    /// A process with so many slots.
    pub fn new(net: &mut OneRmaNet, host: usize, pid: u32, slots: u16) -> Self {
        let portal = net.hosts[host].portal(pid, slots);
        let rights = Rights::LOCAL_READ | Rights::LOCAL_WRITE;
        let local = net.hosts[host].region(pid, 4096, rights, KEY);
        Process { host, key: KEY, portal, local, free: (0..slots).rev().collect() }
    }

    fn command(&self, net: &OneRmaNet, op: OneRmaOp, target: RemoteRegion<'_>, size: u32) -> OneRmaCommand {
        OneRmaCommand {
            op,
            class: Class::High,
            haste: 0,
            size,
            remote: net.hosts[target.host].gid,
            region: target.region.id,
            offset: 0,
            local: self.local.id,
            local_offset: 0,
            completions: self.portal.completions.id,
            key: SimSeal.key_for(&self.key, net.hosts[self.host].gid, self.portal.pid, op),
        }
    }

    /// Writes what its next WRITE or REKEY takes.
    pub fn fill(&self, net: &mut OneRmaNet, bytes: &[u8]) {
        net.hosts[self.host].env.memory.write(self.local.addr, bytes);
    }

    /// Issues a command of `size` bytes. `None`: no slot is free.
    pub fn issue(
        &mut self,
        net: &mut OneRmaNet,
        op: OneRmaOp,
        target: RemoteRegion<'_>,
        size: u32,
    ) -> Option<u16> {
        let command = self.command(net, op, target, size);
        let (slot, now) = (self.free.pop()?, net.now());
        let issued = net.hosts[self.host].card.issue(now, self.portal.id, slot, &command);
        assert_eq!(issued, Ok(()), "the process uses its slots well");
        net.pump(self.host);
        Some(slot)
    }

    /// The next completion.
    pub fn poll(&mut self, net: &OneRmaNet) -> Option<Completion> {
        let completion = self.portal.poll(&net.hosts[self.host])?;
        self.free.push(completion.slot);
        Some(completion)
    }
}

/// A process with an executor.
pub struct Client {
    process: Process,
    executor: Executor,
    /// When it will be woken
    wake: Option<u64>,
    /// Bytes of READs that have been issued, by target
    pub issued: BTreeMap<Gid, u64>,
    /// The last completion
    pub last: Option<Completion>,
    /// Completions that were not OK
    pub failures: u64,
}

impl Client {
    /// A process with so many slots and memory for 4 MB; its executor tries again 7 times.
    pub fn new(net: &mut OneRmaNet, host: usize, pid: u32, slots: u16, settings: CongestionSettings) -> Self {
        Self::with_memory(net, host, pid, slots, settings, 4 << 20)
    }

    /// The same, with memory for READs of up to `len` bytes.
    pub fn with_memory(
        net: &mut OneRmaNet,
        host: usize,
        pid: u32,
        slots: u16,
        settings: CongestionSettings,
        len: u64,
    ) -> Self {
        let mut process = Process::new(net, host, pid, slots);
        let rights = Rights::LOCAL_READ | Rights::LOCAL_WRITE;
        process.local = net.hosts[host].region(pid, len, rights, KEY);
        let executor =
            Executor::new(settings, 7, &[OwnPortal { slots, completions: process.portal.completions.id }]);
        Client { process, executor, wake: None, issued: BTreeMap::new(), last: None, failures: 0 }
    }

    /// Its executor.
    pub fn executor(&self) -> &Executor {
        &self.executor
    }

    /// Begins a READ of any length for which it has memory.
    pub fn read(&mut self, net: &mut OneRmaNet, target: RemoteRegion<'_>, len: u64, token: u64) {
        self.read_in(Class::High, net, target, len, token);
    }

    /// The same, in a class.
    pub fn read_in(
        &mut self,
        class: Class,
        net: &mut OneRmaNet,
        target: RemoteRegion<'_>,
        len: u64,
        token: u64,
    ) {
        let command = self.process.command(net, OneRmaOp::Read, target, 1);
        let transfer = Transfer {
            op: OneRmaOp::Read,
            class,
            len,
            remote: command.remote,
            region: command.region,
            offset: 0,
            local: command.local,
            local_offset: 0,
            key: command.key,
            token,
        };
        self.executor.submit(transfer).expect("a good transfer");
    }

    /// Issues what windows and pacing allow, and asks to be woken with `word` for the rest.
    pub fn drive(&mut self, net: &mut OneRmaNet, word: u64) {
        let now = net.now();
        if self.wake.is_some_and(|wake| wake <= now) {
            self.wake = None;
        }
        let (host, portal) = (self.process.host, self.process.portal.id);
        while let Some(SlotCommand { at: SlotAt { slot, .. }, command }) = self.executor.poll(now) {
            let state = net.hosts[host].card.slot_state(portal, slot);
            assert!(matches!(state, Some(SlotState::Free | SlotState::Done)));
            *self.issued.entry(command.remote).or_default() += u64::from(command.size);
            net.hosts[host].card.issue(now, portal, slot, &command).expect("a good command");
            net.pump(host);
        }
        if let Some(next) = self.executor.next_time()
            && self.wake.is_none_or(|wake| next < wake)
        {
            self.wake = Some(next);
            net.wake_at(next, word);
        }
    }

    /// Takes a completion; gives the transfer that ended with it, if one did. `None`: there is none.
    pub fn poll(&mut self, net: &OneRmaNet) -> Option<Option<Finished>> {
        let completion = self.process.portal.poll(&net.hosts[self.process.host])?;
        self.failures += u64::from(completion.status != starverbs_onerma::Status::Ok);
        self.last = Some(completion);
        Some(self.executor.on_completion(net.now(), 0, &completion))
    }
}
