//! 1RMA's cards on a hostile wire, checked by an oracle of their own (`oracle`).
//!
//! Each host serves a region and has a process that READs, WRITEs and changes keys: by single commands, and
//! by transfers of an executor. The wire loses, repeats, delays and changes packets, and somebody on the path
//! keeps them and sends what they like. Hosts end, owners change keys and close regions. An operation has a
//! place of its own at both ends while it runs, so it is known of each byte what it may be.

mod oracle;
mod plan;
mod site;

use std::collections::{BTreeMap, VecDeque};

use starverbs_core::Nanos;
use starverbs_onerma::executor::{SlotAt, SlotCommand, Transfer};
use starverbs_onerma::{
    Class, Completion, IssueError, MAX_OP, OneRmaCommand, OneRmaOp, RegionId, RegionKey, Status,
};
use starverbs_sim::Rng;
use starverbs_sim::onerma::{OneRmaFaults, OneRmaNet, Portal, SentPacket, SimSeal, StepReport, Wire};

use crate::plan::At;
use crate::summary::Summary;
use oracle::{Job, Oracle, Wrong};
use plan::{Chaos, Plan};
use site::{MARGIN, Site, most};

/// A run that takes so many steps goes round in a circle.
const STEPS: usize = 400_000;
/// Packets that somebody on the path remembers.
const KEPT: usize = 200;
/// Groups of the summary
const GROUPS: [&str; 3] = ["1RMA operations", "1RMA befell", "1RMA packets"];

/// A run.
pub(crate) struct World {
    net: OneRmaNet,
    rng: Rng,
    plan: Plan,
    sites: Vec<Site>,
    /// Single commands by host and slot
    single: BTreeMap<(At, u16), Job>,
    /// Transfers by token
    moves: BTreeMap<u64, Job>,
    oracle: Oracle,
    /// Packets that somebody on the path has seen
    seen: VecDeque<SentPacket>,
    /// Until when the wire carries nothing
    dark: Nanos,
    /// Keys, versions and tokens so far
    count: u64,
    step: usize,
    trace: bool,
    pub(crate) summary: Summary,
}

/// What a run of `seed` is, for people.
pub(crate) fn describe(seed: u64) -> String {
    format!("{:#?}", Plan::new(&mut Rng::new(seed)))
}

impl World {
    pub(crate) fn new(seed: u64, trace: bool) -> World {
        let mut rng = Rng::new(seed);
        let plan = Plan::new(&mut rng);
        let mut net = OneRmaNet::new(plan.hosts as u16, plan.config, Wire::paper(), rng.bits());
        net.hosts.iter_mut().for_each(|host| host.env.memory.watch());
        net.tape = Some(Vec::new());
        let mut world = World {
            net,
            rng,
            sites: Vec::new(),
            single: BTreeMap::new(),
            moves: BTreeMap::new(),
            oracle: Oracle::default(),
            seen: VecDeque::new(),
            dark: 0,
            count: 0,
            step: 0,
            trace,
            summary: Summary::default(),
            plan,
        };
        for at in 0..world.plan.hosts {
            let site = world.begin(at, world.plan.ops);
            world.sites.push(site);
        }
        world
    }

    fn begin(&mut self, at: At, left: u32) -> Site {
        let (key, born) = (self.new_key(), self.next());
        Site::new(&mut self.net, at, key, born, left)
    }

    /// A number that was not had before.
    fn next(&mut self) -> u64 {
        self.count += 1;
        self.count
    }

    fn new_key(&mut self) -> RegionKey {
        let mut key = [0; 16];
        self.rng.fill(&mut key);
        RegionKey(key)
    }

    fn say(&self, what: impl FnOnce() -> String) {
        if self.trace {
            eprintln!("{:12} {}", self.net.now(), what());
        }
    }

    /// Plays it to its end, and checks that nothing is left.
    pub(crate) fn run(&mut self) {
        loop {
            self.step += 1;
            assert!(self.step < STEPS, "no end after {STEPS} steps");
            let now = self.step;
            let due = |(step, _): &&(usize, Chaos)| *step == now;
            let befalls: Vec<Chaos> = self.plan.chaos.iter().filter(due).map(|(_, one)| *one).collect();
            befalls.into_iter().for_each(|one| self.befall(one));
            let dark = self.net.now() < self.dark;
            self.net.faults =
                if dark { OneRmaFaults { loss: 1.0, ..OneRmaFaults::default() } } else { self.plan.faults };
            self.look_on();
            let mut acted = false;
            for at in 0..self.plan.hosts {
                acted |= self.rng.chance(0.1) && self.act(at);
            }
            match self.net.step() {
                Some(StepReport::Completed(at)) => self.poll(at),
                Some(StepReport::Woke(at)) => self.drive(at as usize),
                Some(StepReport::Nothing) => {}
                None if acted => {}
                None => {
                    let any = (0..self.plan.hosts).fold(false, |any, at| self.act(at) | any);
                    if !any && self.sites.iter().all(|site| site.left == 0) {
                        break;
                    }
                }
            }
        }
        let waits = self.single.values().chain(self.moves.values()).next();
        assert!(waits.is_none(), "nothing happens any more, and this has no end: {waits:?}");
        self.net.faults = OneRmaFaults::default();
        self.check_quiet();
        self.check_calm();
        self.oracle.check_all(&self.net);
        self.add_up();
    }

    /// Somebody on the path sees packets, and sends some.
    fn look_on(&mut self) {
        self.seen.extend(self.net.tape.iter_mut().flat_map(|tape| tape.drain(..)));
        let old = self.seen.len().saturating_sub(KEPT);
        self.seen.drain(..old);
        if self.seen.is_empty() || !self.rng.chance(self.plan.attacks) {
            return;
        }
        let mut packet = self.seen[self.rng.below(self.seen.len() as u64) as usize].clone();
        let other = self.net.hosts[self.rng.below(self.plan.hosts as u64) as usize].gid;
        let len = packet.bytes.len() as u64;
        match self.rng.below(8) {
            0 => packet.bytes[self.rng.below(len) as usize] ^= 1 << self.rng.below(8),
            1 => packet.bytes.truncate(self.rng.below(len) as usize),
            2 => packet.bytes.extend([0; 64]),
            3 => packet.path.remote = other,
            4 => packet.path.local = other,
            5 => self.rng.fill(&mut packet.bytes),
            /* as it was */
            _ => {}
        }
        self.summary.add(GROUPS[1], "attacks", 1);
        self.net.inject(packet);
    }

    /// A process begins an operation. False: it cannot, or has none left.
    fn act(&mut self, at: At) -> bool {
        let to = self.rng.below(self.plan.hosts as u64) as usize;
        let single = !self.rng.chance(self.plan.moves);
        let has_slot = if single { !self.sites[at].slots.is_empty() } else { self.sites[at].may_move() };
        if self.sites[at].left == 0 || !has_slot || self.sites[to].served.free.is_empty() {
            return false;
        }
        self.sites[at].left -= 1;
        let settled = self.sites[to].served.keys.len() == 1;
        let op = if settled && single && self.rng.chance(self.plan.rekeys) {
            OneRmaOp::Rekey
        } else {
            self.rng.pick(&[OneRmaOp::Read, OneRmaOp::Write])
        };
        let wrong = (op != OneRmaOp::Rekey && self.rng.chance(self.plan.wrong))
            .then(|| self.rng.pick(&[Wrong::Key, Wrong::Bounds, Wrong::Rights, Wrong::Local]));
        self.issue(at, to, op, single, wrong);
        true
    }

    /// Begins an operation.
    fn issue(&mut self, at: At, to: At, op: OneRmaOp, single: bool, wrong: Option<Wrong>) {
        /* of several commands, those that stay within the region would be right */
        let single_command = single || wrong == Some(Wrong::Bounds);
        let most = most(op, single_command, &self.plan.config);
        let len =
            if op == OneRmaOp::Rekey { most } else { self.rng.pick(&[1, 63, 64, 65, 1000, most - 1, most]) };
        let new_key = (op == OneRmaOp::Rekey).then(|| self.new_key());
        let remote = self.sites[to].served.free.pop().expect("it was looked for");
        let local = self.sites[at].places.pop().expect("as many as slots");
        let served = &self.sites[to].served;
        let key = self.rng.pick(&served.keys);
        let (from_addr, to_addr) = (self.sites[at].local.addr + local, served.region.addr + remote);
        let job = Job {
            op,
            from: at,
            to,
            local: from_addr,
            remote: to_addr,
            len,
            byte: self.rng.bits() as u8,
            wrong,
            places: [local, remote],
            born: served.born,
            version: served.version,
            mixed: served.keys.len() > 1,
            new_key,
        };
        self.oracle.begin(&mut self.net, &job);
        let mut transfer = self.transfer(&job, key);
        self.spoil(&job, &mut transfer);
        self.say(|| format!("{job:?} {}", if single { "single" } else { "transfer" }));
        if let Some(new) = new_key {
            let served = &mut self.sites[to].served;
            served.keys.push(new);
            self.count += 1;
            served.version = self.count;
        }
        if single {
            self.issue_one(job, &transfer);
        } else if wrong == Some(Wrong::Local) {
            self.end(&job, None);
        } else {
            self.sites[at].transfers += 1;
            self.sites[at].executor.submit(transfer).expect("it has a length");
            self.moves.insert(transfer.token, job);
            self.drive(at);
        }
    }

    fn transfer(&mut self, job: &Job, key: RegionKey) -> Transfer {
        let token = self.next();
        let (site, served) = (&self.sites[job.from], &self.sites[job.to].served);
        Transfer {
            op: job.op,
            class: if self.rng.chance(0.3) { Class::Low } else { Class::High },
            len: job.len,
            remote: self.net.hosts[job.to].gid,
            region: served.region.id,
            offset: job.places[1],
            local: site.local.id,
            local_offset: job.places[0],
            key: SimSeal.key_for(&key, self.net.hosts[job.from].gid, site.pid, job.op),
            token,
        }
    }

    /// Makes the mistake that the operation has.
    fn spoil(&mut self, job: &Job, transfer: &mut Transfer) {
        let gid = self.net.hosts[job.from].gid;
        let (pid, other) = (self.sites[job.from].pid, &self.sites[job.to]);
        match job.wrong {
            None => {}
            Some(Wrong::Key) => {
                transfer.key.0[self.rng.below(16) as usize] ^= 1 << self.rng.below(8);
            }
            Some(Wrong::Bounds) => transfer.offset = other.served.region.len - job.len + 1,
            /* what its own card alone may write */
            Some(Wrong::Rights) => {
                (transfer.region, transfer.offset) = (other.portal.completions.id, 0);
                transfer.key = SimSeal.key_for(&RegionKey([0; 16]), gid, pid, job.op);
            }
            Some(Wrong::Local) => transfer.local_offset = self.sites[job.from].local.len - job.len + 1,
        }
    }

    fn issue_one(&mut self, job: Job, transfer: &Transfer) {
        let site = &mut self.sites[job.from];
        let slot = site.slots.pop().expect("it was looked for");
        let command = command_of(transfer, site.portal.completions.id);
        let (now, id) = (self.net.now(), site.portal.id);
        let taken = self.net.hosts[job.from].card.issue(now, id, slot, &command);
        if job.wrong == Some(Wrong::Local) {
            assert_eq!(taken, Err(IssueError::Local), "{job:?}");
            self.sites[job.from].slots.push(slot);
            return self.end(&job, None);
        }
        assert_eq!(taken, Ok(()), "{job:?}");
        let from = job.from;
        self.single.insert((from, slot), job);
        self.net.pump(from);
    }

    /// The executor issues what it may.
    fn drive(&mut self, at: At) {
        let now = self.net.now();
        let site = &mut self.sites[at];
        site.wake = site.wake.filter(|wake| *wake > now);
        while let Some(SlotCommand { at: SlotAt { slot, .. }, command }) = site.executor.poll(now) {
            let issued = self.net.hosts[at].card.issue(now, site.moving.id, slot, &command);
            assert_eq!(issued, Ok(()), "host {at}: {command:?}");
            self.net.pump(at);
        }
        if let Some(next) = site.executor.next_time()
            && site.wake.is_none_or(|wake| next < wake)
        {
            site.wake = Some(next);
            self.net.wake_at(next.max(now + 1), at as u64);
        }
    }

    /// A process takes its completions.
    fn poll(&mut self, at: At) {
        while let Some(end) = self.next_completion(at, |site| &mut site.portal) {
            let job = self.single.remove(&(at, end.slot));
            let job = job.unwrap_or_else(|| panic!("host {at}: of no command: {end:?}"));
            assert_eq!(
                (end.op, u64::from(end.bytes)),
                (job.op, if end.status == Status::Ok { job.len } else { 0 })
            );
            self.sites[at].slots.push(end.slot);
            self.end(&job, Some(end.status));
        }
        while let Some(end) = self.next_completion(at, |site| &mut site.moving) {
            let Some(finished) = self.sites[at].executor.on_completion(self.net.now(), 0, &end) else {
                continue;
            };
            let job = self.moves.remove(&finished.token);
            let job = job.unwrap_or_else(|| panic!("host {at}: of no transfer: {finished:?}"));
            self.sites[at].transfers -= 1;
            self.end(&job, Some(finished.status));
        }
        self.drive(at);
    }

    fn next_completion(&mut self, at: At, of: impl Fn(&mut Site) -> &mut Portal) -> Option<Completion> {
        let end = of(&mut self.sites[at]).poll(&self.net.hosts[at])?;
        self.say(|| format!("host {at} {end:?}"));
        Some(end)
    }

    /// An operation has ended. `None`: its own card did not take it.
    fn end(&mut self, job: &Job, status: Option<Status>) {
        let served = &self.sites[job.to].served;
        /* a request that was changed on its way cannot be authenticated */
        let tampered = self.plan.faults.change > 0.0 || self.plan.attacks > 0.0;
        let changed = tampered || job.mixed || served.version != job.version;
        if let Some(status) = status {
            assert!(job.may_end_with(status, changed), "{job:?} ended with {status:?} without a reason");
            self.summary.count(GROUPS[0], status);
        }
        self.oracle.end(&self.net, job, status);
        self.sites[job.from].places.push(job.places[0]);
        if self.sites[job.to].served.born == job.born {
            self.sites[job.to].served.free.push(job.places[1]);
            self.settle_key(job, status);
        }
    }

    /// After a REKEY the region has the new key; if nobody knows, its owner gives it another.
    fn settle_key(&mut self, job: &Job, status: Option<Status>) {
        let Some(new) = job.new_key else { return };
        let (key, version) = (self.new_key(), self.next());
        let served = &mut self.sites[job.to].served;
        if !served.keys.contains(&new) {
            /* its owner has changed it meanwhile */
        } else if status == Some(Status::Ok) {
            (served.keys, served.version) = (vec![new], version);
        } else {
            served.rekey(&mut self.net, job.to, key, version);
        }
    }

    fn befall(&mut self, chaos: Chaos) {
        self.say(|| format!("{chaos:?}"));
        let name = format!("{chaos:?}");
        self.summary.add(GROUPS[1], name.split('(').next().unwrap_or(""), 1);
        match chaos {
            Chaos::Dark(time) => self.dark = self.net.now() + time,
            Chaos::Restart(at) => self.restart(at),
            Chaos::Rekey(at) | Chaos::Reopen(at) => {
                let (key, version) = (self.new_key(), self.next());
                let served = &mut self.sites[at].served;
                match chaos {
                    Chaos::Rekey(_) => served.rekey(&mut self.net, at, key, version),
                    _ => served.reopen(&mut self.net, at, key, version),
                }
                self.freeze(at);
            }
        }
    }

    /// What is under way to a host's region writes and reads nothing any more there.
    fn freeze(&mut self, at: At) {
        let jobs = self.single.values().chain(self.moves.values()).filter(|job| job.to == at);
        jobs.for_each(|job| self.oracle.freeze(&mut self.net, job));
    }

    /// A host ends without a word; its card, its process and its region are new ones.
    fn restart(&mut self, at: At) {
        self.freeze(at);
        let ours = |job: &Job| job.from == at;
        let (gone, rest) = std::mem::take(&mut self.single).into_iter().partition(|(_, job)| ours(job));
        self.single = rest;
        let gone: BTreeMap<(At, u16), Job> = gone;
        let (moved, rest) = std::mem::take(&mut self.moves).into_iter().partition(|(_, job)| ours(job));
        self.moves = rest;
        let moved: BTreeMap<u64, Job> = moved;
        let site = &self.sites[at];
        for region in [site.served.region, site.local, site.portal.completions, site.moving.completions] {
            self.net.hosts[at].env.memory.allow(region.addr, region.len, 0);
        }
        let left = site.left;
        self.net.hosts[at].restart();
        self.sites[at] = self.begin(at, left);
        for job in gone.into_values().chain(moved.into_values()) {
            self.oracle.orphan(&self.net, &job);
            if self.sites[job.to].served.born == job.born {
                self.settle_key(&job, None);
            }
        }
    }

    /// Nothing is under way, and nothing was written beside what the cards may.
    fn check_quiet(&mut self) {
        self.net.settle();
        for (at, host) in self.net.hosts.iter().enumerate() {
            let card = &host.card;
            assert_eq!((card.solicited(), card.inbound_bytes()), (0, 0), "host {at}");
            assert_eq!((card.next_deadline(), card.has_work()), (None, false), "host {at}");
            assert_eq!(card.counts().lost_completions, 0, "host {at}");
            assert!(host.env.memory.gaps_intact(), "host {at}");
            assert_eq!(self.sites[at].executor.in_flight(), 0, "host {at}");
        }
    }

    /// Whatever befell them, all can READ and WRITE all.
    fn check_calm(&mut self) {
        let hosts = self.plan.hosts;
        for (at, to) in (0..hosts * hosts).map(|pair| (pair / hosts, pair % hosts)) {
            for op in [OneRmaOp::Read, OneRmaOp::Write] {
                /* a WRITE takes the window of both cards: twice that of one that writes to itself */
                if at == to && op == OneRmaOp::Write && self.plan.config.window < 2 * MAX_OP {
                    continue;
                }
                let before = self.summary.of(GROUPS[0], "Ok");
                self.issue(at, to, op, true, None);
                self.net.settle();
                self.poll(at);
                assert_eq!(self.summary.of(GROUPS[0], "Ok"), before + 1, "{at} to {to}: {op:?} at the end");
            }
        }
        self.check_quiet();
    }

    fn add_up(&mut self) {
        for host in &self.net.hosts {
            let counts = host.card.counts();
            let all = [
                ("received", counts.received),
                ("malformed", counts.malformed),
                ("late", counts.late),
                ("copies", counts.copies),
                ("forged", counts.forged),
                ("not authenticated", counts.auth_failures),
                ("NACK", counts.nacks),
                ("rekeys", counts.rekeys),
            ];
            all.iter().for_each(|(name, n)| self.summary.add(GROUPS[2], name, *n));
        }
    }
}

/// The one command that a transfer is.
fn command_of(transfer: &Transfer, completions: RegionId) -> OneRmaCommand {
    let Transfer { op, class, len, remote, region, offset, local, local_offset, key, .. } = *transfer;
    let size = len as u32;
    OneRmaCommand { op, class, haste: 0, size, remote, region, offset, local, local_offset, completions, key }
}
