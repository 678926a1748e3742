//! The local transport: queue pairs of two processes of this host talk through shared memory, without
//! packets.
//!
//! When a queue pair of RC gets its peer's number, and that is of this host, its card proposes a local
//! connection in a channel to the peer's process, and holds the program's requests. Once both have proposed,
//! both begin ([`end::LocalEnd`]); if the peer refuses, or says nothing for a while, the wire carries the
//! connection until RESET. Owns who proposed what; the channels lie in the card's host ([`HostEnv`]).

pub(crate) mod channels;
mod direct;
pub(crate) mod end;
mod record;
mod requester;
mod responder;
#[cfg(test)]
mod tests;
mod turn;

use std::collections::HashMap;

use starverbs_backend::{ChannelNews, SessionId};
use starverbs_core::engine::{Detached, EngineAttr, EngineCtx};
use starverbs_core::nic::Handover;
use starverbs_core::types::QPN_BLOCK_SHIFT;
use starverbs_core::{Access, Gid, Nanos, NicError, PdId, QpState, QpType, Qpn};
use starverbs_settings::{Link, Settings};

use super::Shard;
use super::engine::HostEngine;
use super::env::HostEnv;
use crate::info::{DeviceInfo, MAX_MSG};
use crate::log::log;
use crate::share::{Gate, Gates};
use direct::Direct;
use end::{Init, LocalEnd};
use record::{Record, control};
use turn::{InboundControl, fetch, with_end};

/// How long a program's first request waits for the peer's proposal.
const PATIENCE: Nanos = 200_000_000;
/// More local ends than a CPU's caches hold.
const MANY: u32 = 256;
/// How often it is looked whether a peer is silent.
const CHECK: Nanos = 50_000_000;

/// What carries a QP's connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Path {
    /// It has no peer yet
    #[default]
    None,
    /// It was proposed, and waits
    Asking,
    /// Shared memory
    Local,
    /// The wire
    Wire,
}

/// A proposal of ours.
#[derive(Clone, Copy)]
struct Ours {
    epoch: u16,
    channel: u32,
    peer: Qpn,
    until: Nanos,
    /// Through which the peer may reach the QP's memory by itself, with these rights
    gate: Option<Gate>,
    pd: PdId,
    access: Access,
}

/// A proposal of a peer.
#[derive(Clone)]
struct Theirs {
    epoch: u16,
    from: Qpn,
    serial: u32,
    session: Option<SessionId>,
    /// What it lets this end do by itself
    direct: Option<Direct>,
}

/// What is known of a QP.
#[derive(Default)]
struct Entry {
    path: Path,
    ours: Option<Ours>,
    /// One of each channel: others may say what they like, and do not take the place of the peer's
    theirs: Vec<Theirs>,
}

/// Who proposed what.
pub(crate) struct LocalHost {
    enabled: bool,
    /// A QP that has to use the wire says so
    says: bool,
    addrs: Vec<Gid>,
    qps: HashMap<Qpn, Entry>,
    epoch: u16,
    /// QPs whose proposal waits
    asking: u32,
    /// QPs that have a local connection
    pub(super) active: u32,
    /// A program has posted to one of them, maybe
    posted: bool,
    checked: Nanos,
    /// Polls that took what the thread was woken for, since the thread took something
    pub(super) busy: u32,
    /// Polls in a row for which the wire had nothing
    pub(super) wire_idle: u32,
}

impl LocalHost {
    pub(super) fn new(settings: &Settings, info: &DeviceInfo) -> LocalHost {
        let wanted = settings.link != Link::Udp && settings.qpc_cache.is_none();
        let hurt = settings.fault.is_active() || settings.pcap.is_some();
        if wanted && hurt {
            log!(Info, "faults and captures are the wire's: all queue pairs use it (STARVERBS_LINK)");
        }
        LocalHost {
            enabled: wanted && !hurt,
            says: settings.link == Link::Local,
            addrs: info.addrs.iter().map(|addr| addr.gid).collect(),
            qps: HashMap::new(),
            epoch: 0,
            asking: 0,
            active: 0,
            posted: false,
            checked: 0,
            busy: 0,
            wire_idle: 0,
        }
    }

    /// Whether any QP may get a local connection.
    pub(super) fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Whether an address is this host's.
    fn is_here(&self, gid: &Gid) -> bool {
        self.addrs.contains(gid) || matches!(gid.ipv4(), Some([127, ..]))
    }
}

impl Shard {
    /// What carries a QP's connection, for people; and of a local one how many requests either end has made.
    pub(super) fn link_of(&self, qpn: Qpn) -> (&'static str, u32, u32) {
        if let Some(end) = self.nic.engine(qpn).and_then(HostEngine::local) {
            return (end.link(), end.requests(), end.executed());
        }
        match self.local.qps.get(&qpn).map(|entry| entry.path) {
            Some(Path::Asking) => ("asking", 0, 0),
            _ => ("wire", 0, 0),
        }
    }

    /// The doorbell of a QP that has a local connection. False: it has none.
    #[inline]
    pub(super) fn ring_local(&mut self, qpn: Qpn) -> bool {
        self.local.posted |= self.local.asking > 0;
        if self.local.active == 0 {
            return false;
        }
        let Shard { nic, env, .. } = self;
        let rung = with_end((nic, env), qpn, 0, |end, ctx| end.ring(ctx)).is_some();
        if rung && self.env.channels.flush() {
            self.catch_up();
        }
        rung
    }

    /// Something has come that others see no reason to wake this card for.
    #[inline(never)]
    fn catch_up(&mut self) {
        while self.take_turn(0) > 0 && self.env.channels.flush() {}
    }

    /// The doorbells that were deferred, of QPs that have a local connection.
    #[inline(never)]
    pub(super) fn ring_deferred_local(&mut self) {
        let Shard { nic, env, deferred, .. } = self;
        if env.channels.many {
            fetch((nic, env), deferred.qpns());
        }
        let mut rung = false;
        deferred.drop_rung(|qpn| {
            let is_rung = with_end((nic, env), qpn, 0, |end, ctx| end.ring(ctx)).is_some();
            rung |= is_rung;
            is_rung
        });
        if rung && self.env.channels.flush() {
            self.catch_up();
        }
    }

    /// The program has moved a QP to a state. `star`: it may be an end of StaR.
    pub(super) fn move_local(&mut self, qpn: Qpn, state: QpState, star: bool, now: Nanos) {
        match state {
            QpState::Rtr if self.local.enabled && !star => self.propose(qpn, now),
            QpState::Reset => {
                let Some(entry) = self.local.qps.get_mut(&qpn) else { return };
                let path = std::mem::take(&mut entry.path);
                let gate = entry.ours.take().and_then(|ours| ours.gate);
                self.env.channels.close_gate(gate);
                self.local.count(path, Path::None);
            }
            QpState::Err => self.stop_direct(qpn),
            _ => {}
        }
    }

    /// The program has set a QP's access rights: a peer that knows others asks from now on.
    pub(super) fn change_access(&mut self, qpn: Qpn) {
        let access = self.nic.query_qp(qpn).map(|attr| attr.access);
        let known = self.local.qps.get(&qpn).and_then(|entry| entry.ours).map(|ours| ours.access);
        if known.is_some() && known != access.ok() {
            self.stop_direct(qpn);
        }
    }

    fn stop_direct(&mut self, qpn: Qpn) {
        let ours = self.local.qps.get(&qpn).and_then(|entry| entry.ours);
        self.env.channels.close_gate(ours.and_then(|ours| ours.gate));
    }

    /// A QP is gone.
    pub(super) fn forget_local(&mut self, qpn: Qpn) {
        self.stop_direct(qpn);
        if let Some(entry) = self.local.qps.remove(&qpn) {
            self.local.count(entry.path, Path::None);
        }
    }

    fn propose(&mut self, qpn: Qpn, now: Nanos) {
        let Ok(attr) = self.nic.query_qp(qpn) else { return };
        let suits = self.nic.qp_type(qpn) == Some(QpType::Rc) && self.local.is_here(&attr.av.dgid);
        if !suits || self.nic.speaks_strom(qpn) || self.nic.hold_qp(qpn).is_err() {
            return;
        }
        let (peer, block) = (attr.dest_qpn, attr.dest_qpn >> QPN_BLOCK_SHIFT);
        let ours = self.intake.rx.blocks().any(|own| own == block);
        let Some(channel) = self.env.channels.channel_to(block, ours) else {
            return self.use_wire(qpn, now);
        };
        self.local.epoch = self.local.epoch.wrapping_add(1);
        let (gate, access) = (self.env.channels.gates.as_mut().and_then(Gates::open), attr.access);
        let pd = self.nic.handover(qpn).map_or(PdId(0), |handover| handover.owner.pd);
        let ours = Ours { epoch: self.local.epoch, channel, peer, until: now + PATIENCE, gate, access, pd };
        let entry = self.local.qps.entry(qpn).or_default();
        entry.path = Path::Asking;
        entry.ours = Some(ours);
        self.local.asking += 1;
        self.send_proposal(qpn, &ours);
        self.begin_if_agreed(qpn, now);
        self.refuse_others(qpn);
    }

    /// Refuses proposals that came early and led to nothing. The kernel does not say of their process that it
    /// is the peer's: its PID is not seen here, and it has two sessions with this one. Both ends get packets.
    fn refuse_others(&mut self, qpn: Qpn) {
        let entry = self.local.qps.get_mut(&qpn).filter(|entry| entry.path == Path::Asking);
        for Theirs { epoch, from, .. } in
            entry.map(|entry| std::mem::take(&mut entry.theirs)).unwrap_or_default()
        {
            self.refuse_local(&Record { epoch, to: qpn, from, ..Record::default() });
        }
    }

    fn send_proposal(&mut self, qpn: Qpn, ours: &Ours) {
        let Ours { epoch, peer, gate, pd, access, channel, .. } = *ours;
        let mut record = Record { op: control::PROPOSE, epoch, to: peer, from: qpn, ..Record::default() };
        if let Some(gate) = gate {
            record.offer(gate, pd, access);
        }
        self.env.channels.send_control(channel, record);
    }

    /// Begins, if the peer has proposed it, too.
    fn begin_if_agreed(&mut self, qpn: Qpn, now: Nanos) {
        let Some(Entry { path: Path::Asking, ours: Some(ours), theirs }) = self.local.qps.get(&qpn) else {
            return;
        };
        let ours = *ours;
        let of_peer: Vec<_> = theirs.iter().filter(|theirs| theirs.from == ours.peer).cloned().collect();
        let is_it = |theirs: &Theirs| self.leads_to(ours.channel, theirs.session);
        let Some(theirs) = of_peer.into_iter().find(is_it) else { return };
        match self.begin_local(qpn, &ours, &theirs, now) {
            Ok(()) => {
                if let Some(entry) = self.local.qps.get_mut(&qpn) {
                    entry.path = Path::Local;
                    entry.theirs.clear();
                    self.local.count(Path::Asking, Path::Local);
                }
                self.env.channels.many |= self.local.active > MANY && self.intake.looks_ahead();
                self.stats.local_qps.add(1);
            }
            Err(_) => {
                if let Some(entry) = self.local.qps.get_mut(&qpn) {
                    entry.theirs.clear();
                }
                self.use_wire(qpn, now);
            }
        }
    }

    /// Whether the process that we ask in a channel is the one at the other end of a session.
    fn leads_to(&mut self, channel: u32, session: Option<SessionId>) -> bool {
        let channels = &mut self.env.channels;
        let Some(asker) = channels.asker(channel) else { return false };
        match (asker.session, session) {
            (None, None) => true,
            (Some(a), Some(b)) => channels.peers.are_of_one_process(a, b),
            _ => false,
        }
    }

    fn begin_local(&mut self, qpn: Qpn, ours: &Ours, theirs: &Theirs, now: Nanos) -> Result<(), NicError> {
        let Shard { nic, env, .. } = self;
        let Handover { owner, sq, rq, send_cq, recv_cq, max_recv_sge, sq_sig_all, first_send, .. } =
            nic.handover(qpn)?;
        let init = Init {
            qpn,
            peer: ours.peer,
            pd: owner.pd,
            sq: sq.clone(),
            rq: rq.cloned(),
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            sig_all: sq_sig_all,
            max_recv_sge,
            first_send,
            max_msg: MAX_MSG,
            epochs: [ours.epoch, theirs.epoch],
            gate: ours.gate,
            channels: [ours.channel, theirs.serial],
        };
        env.channels.join(ours.channel);
        let make = |terms: &EngineAttr, _: &mut EngineCtx<'_, HostEnv>| {
            let mut end = LocalEnd::new(init, terms)?;
            end.direct = theirs.direct.clone();
            Ok(HostEngine::Local(Box::new(end)))
        };
        let begun = nic.start_engine(env, qpn, now, make);
        if begun.is_err() {
            env.channels.leave(ours.channel, qpn, 0);
        }
        begun
    }

    /// A QP that waits for its peer's proposal is to do what one that waits cannot: the wire carries its
    /// connection, and what was posted begins.
    pub(super) fn wait_no_more(&mut self, qpn: Qpn, now: Nanos) {
        if self.local.qps.get(&qpn).is_some_and(|entry| entry.path == Path::Asking) {
            self.use_wire(qpn, now);
            self.transmit(now, true);
        }
    }

    /// The wire carries the connection until RESET.
    fn use_wire(&mut self, qpn: Qpn, now: Nanos) {
        if self.local.says {
            log!(Warn, "queue pair {qpn:#x}: its peer does not agree to shared memory, and gets packets");
        }
        if let Some(entry) = self.local.qps.get_mut(&qpn) {
            let (path, ours) = (std::mem::replace(&mut entry.path, Path::Wire), entry.ours);
            self.local.count(path, Path::Wire);
            self.env.channels.close_gate(ours.and_then(|ours| ours.gate));
            if let (Path::Asking, Some(Ours { epoch, channel, peer, .. })) = (path, ours) {
                let record =
                    Record { op: control::WITHDRAW, epoch, to: peer, from: qpn, ..Record::default() };
                self.env.channels.send_control(channel, record);
            }
        }
        let Shard { nic, env, .. } = self;
        if nic.engine(qpn).is_some() {
            let end = |engine: HostEngine, ctx: &mut EngineCtx<'_, HostEnv>| match engine {
                HostEngine::Local(mut end) => {
                    let detached = Detached { next_send: end.oldest(), windows: end.has_windows() };
                    /* they stay bound: the QP goes on */
                    end.windows = false;
                    end.close(ctx);
                    detached
                }
                HostEngine::Star(_) => Detached { next_send: 0, windows: false },
            };
            nic.take_engine(env, qpn, now, end);
        }
        nic.resume_qp(env, qpn, now);
    }

    /// A control record came beside requests.
    #[cold]
    fn on_control(&mut self, InboundControl { serial, record }: InboundControl, now: Nanos) {
        let (qpn, from) = (record.to, record.from);
        let answerer = self.env.channels.answerers.iter().find(|answerer| answerer.serial == serial);
        let Some(session) = answerer.map(|answerer| answerer.session) else { return };
        match record.op {
            control::PROPOSE => {
                let state = self.nic.qp_state(qpn);
                if !self.local.enabled || state.is_none() {
                    return self.refuse_local(&record);
                }
                let early = matches!(state, Some(QpState::Reset | QpState::Init));
                let held = self.nic.is_held(qpn);
                let direct = self.direct_of(&record, serial);
                let entry = self.local.qps.entry(qpn).or_default();
                let asking = entry.path == Path::Asking && held;
                if early || asking || entry.path == Path::Local {
                    /* of one that is early, or of the next connection: it is answered at RTR */
                    entry.theirs.retain(|theirs| theirs.serial != serial);
                    let direct = direct.clone();
                    entry.theirs.push(Theirs { epoch: record.epoch, from, serial, session, direct });
                }
                let channel = entry.ours.filter(|_| entry.path == Path::Local).map(|ours| ours.channel);
                if asking {
                    self.begin_if_agreed(qpn, now);
                } else if channel.is_some_and(|channel| self.leads_to(channel, session)) {
                    self.meet_again(&record, serial, direct, now);
                }
                let path = self.local.qps.get(&qpn).map(|entry| entry.path);
                if !early && path != Some(Path::Local) {
                    self.refuse_local(&record);
                }
            }
            control::WITHDRAW => {
                let Some(entry) = self.local.qps.get_mut(&qpn) else { return };
                let is_it = |theirs: &Theirs| (theirs.serial, theirs.epoch) == (serial, record.epoch);
                entry.theirs.retain(|theirs| theirs.from != from || !is_it(theirs));
                let end = self.nic.engine(qpn).and_then(HostEngine::local);
                if end.is_some_and(|end| end.is_peer(&record, serial) && end.is_fresh()) {
                    self.use_wire(qpn, now);
                }
            }
            control::REFUSE => {
                let Some(entry) = self.local.qps.get(&qpn) else { return };
                let (path, ours) = (entry.path, entry.ours);
                let of_now = ours.is_some_and(|ours| ours.epoch == record.epoch && ours.peer == from);
                /* who has begun hears the one that it has begun with alone */
                let is_its = |end: &LocalEnd| end.of.channels[1] == serial && end.is_fresh();
                let fresh = self.nic.engine(qpn).and_then(HostEngine::local).is_none_or(is_its);
                if of_now && fresh && matches!(path, Path::Asking | Path::Local) {
                    self.use_wire(qpn, now);
                }
            }
            _ => {}
        }
    }

    /// The peer of a local end has proposed. If that is of a connection after the one that this end has
    /// agreed to, this end's proposal was of use to the one before, which is over: it is said again.
    fn meet_again(&mut self, record: &Record, serial: u32, direct: Option<Direct>, now: Nanos) {
        let qpn = record.to;
        let Shard { nic, env, .. } = self;
        let is_new = with_end((nic, env), qpn, now, |end, _| {
            let is_new = end.is_fresh() && record.from == end.of.peer && !end.is_with(record);
            end.meet_again(record, serial, direct);
            is_new
        });
        let ours = self.local.qps.get(&qpn).and_then(|entry| entry.ours);
        if let (Some(true), Some(ours)) = (is_new, ours) {
            self.send_proposal(qpn, &ours);
        }
    }

    /// What a proposal lets this end do by itself.
    fn direct_of(&self, record: &Record, serial: u32) -> Option<Direct> {
        let (gate, pd, access) = record.offered()?;
        let memory = self.env.channels.memory_of(serial)?;
        self.env.channels.gates.is_some().then_some(Direct { memory, gate, pd, access })
    }

    /// The wire carries what was proposed.
    fn refuse_local(&mut self, proposal: &Record) {
        let Record { epoch, to, from, .. } = *proposal;
        let block = from >> QPN_BLOCK_SHIFT;
        let ours = self.intake.rx.blocks().any(|own| own == block);
        let record = Record { op: control::REFUSE, epoch, to: from, from: to, ..Record::default() };
        if let Some(channel) = self.env.channels.channel_to(block, ours) {
            self.env.channels.send_control(channel, record);
        }
    }

    /// The local part of a turn; says how much came.
    #[inline]
    pub(super) fn run_local(&mut self, now: Nanos) -> u32 {
        let mut came = 0;
        while let Some(news) = self.env.channels.peers.next_news() {
            self.on_news(news, now);
            came += 1;
        }
        if !self.env.channels.any() {
            return came;
        }
        loop {
            let taken = self.take_turn(now);
            came += taken;
            if !self.env.channels.flush() || taken == 0 {
                return came;
            }
        }
    }

    /// As [`Shard::run_local`], of a thread that does not come back soon.
    pub(super) fn run_local_at_last(&mut self, now: Nanos) -> u32 {
        let came = self.run_local(now);
        self.wake_requesters();
        came
    }

    /// What others wait for is not left for the next poll.
    #[inline]
    pub(super) fn wake_requesters(&mut self) {
        turn::wake_requesters(&mut self.env.channels);
    }

    /// Takes what is there; says how much.
    #[inline(always)]
    fn take_turn(&mut self, now: Nanos) -> u32 {
        let mut came = 0;
        turn::wake_requesters(&mut self.env.channels);
        loop {
            let Shard { nic, env, .. } = self;
            came += turn::take_requests((nic, env), now);
            let Some(control) = self.env.channels.inbound_control.take() else { break };
            self.on_control(control, now);
        }
        let Shard { nic, env, .. } = self;
        came += turn::take_answers((nic, env), now);
        if self.env.channels.broken {
            self.drop_broken(now);
        }
        came
    }

    #[cold]
    fn on_news(&mut self, news: ChannelNews, now: Nanos) {
        match news {
            ChannelNews::Opened(session, channel, memory) => {
                self.env.channels.add_answerer(Some(session), *channel, memory);
            }
            ChannelNews::Broken => self.stats.local_broken.inc(),
            ChannelNews::Ended(session) => {
                /* what it asked before is executed */
                loop {
                    let Shard { nic, env, .. } = self;
                    let taken = turn::take_requests((nic, env), now);
                    match self.env.channels.inbound_control.take() {
                        Some(control) => self.on_control(control, now),
                        None if taken == 0 => break,
                        None => {}
                    }
                }
                for asker in self.env.channels.askers.iter_mut().flatten() {
                    asker.ended |= asker.session == Some(session);
                }
                for answerer in &mut self.env.channels.answerers {
                    answerer.ended |= answerer.session == Some(session);
                }
                for entry in self.local.qps.values_mut() {
                    entry.theirs.retain(|theirs| theirs.session != Some(session));
                }
                self.drop_broken(now);
            }
        }
    }

    /// QPs whose channel is over lose their peer.
    #[cold]
    fn drop_broken(&mut self, now: Nanos) {
        if std::mem::take(&mut self.env.channels.broken) {
            self.stats.local_broken.inc();
        }
        let Shard { nic, env, .. } = self;
        turn::take_answers((nic, env), now);
        let mut lost = Vec::new();
        for (qpn, entry) in &self.local.qps {
            let Some(ours) = entry.ours.filter(|_| entry.path != Path::Wire) else { continue };
            if self.env.channels.asker(ours.channel).is_none_or(|asker| asker.ended) {
                lost.push((*qpn, entry.path));
            }
        }
        for (qpn, path) in lost {
            if path == Path::Asking {
                self.use_wire(qpn, now);
            } else {
                let Shard { nic, env, .. } = self;
                with_end((nic, env), qpn, now, |end, _| end.lose_peer());
            }
        }
        self.env.channels.drop_ended();
    }

    /// Looks at what waits for too long.
    pub(super) fn check_local(&mut self, now: Nanos) {
        if now.saturating_sub(self.local.checked) < CHECK || self.local.asking + self.local.active == 0 {
            return;
        }
        self.local.checked = now;
        if self.local.asking > 0 {
            self.end_waiting(now);
        }
        for at in 0..self.env.channels.askers.len() as u32 {
            let Some(asker) = self.env.channels.asker(at) else { continue };
            let Ok(read) = asker.channel.requests.look() else { continue };
            let quiet = asker.quiet_for(read, now);
            if quiet > 2 * CHECK {
                self.on_silence(at, quiet, now);
            }
        }
    }

    #[cold]
    fn on_silence(&mut self, channel: u32, quiet: Nanos, now: Nanos) {
        let uses = |entry: &Entry| {
            entry.path == Path::Local && entry.ours.is_some_and(|ours| ours.channel == channel)
        };
        let qpns: Vec<Qpn> =
            self.local.qps.iter().filter(|(_, entry)| uses(entry)).map(|(qpn, _)| *qpn).collect();
        for qpn in qpns {
            let Shard { nic, env, .. } = self;
            with_end((nic, env), qpn, now, |end, ctx| end.on_silence(ctx, quiet));
        }
    }

    /// QPs whose program waits for a proposal that does not come use the wire, as do those to which the peer
    /// has sent a packet.
    #[cold]
    fn end_waiting(&mut self, now: Nanos) {
        let late = |ours: &Option<Ours>| ours.is_some_and(|ours| ours.until <= now);
        let asking = self.local.qps.iter().filter(|(_, entry)| entry.path == Path::Asking);
        let over = asking.filter(|(qpn, entry)| {
            !self.nic.is_held(**qpn) || (late(&entry.ours) && self.nic.has_posts(**qpn))
        });
        let over: Vec<Qpn> = over.map(|(qpn, _)| *qpn).collect();
        for qpn in over {
            self.use_wire(qpn, now);
        }
        let mut asking = self.local.qps.iter().filter(|(_, entry)| entry.path == Path::Asking);
        self.local.posted = asking.any(|(qpn, _)| self.nic.has_posts(*qpn));
    }

    /// When [`Shard::check_local`] has something to do.
    #[inline]
    pub(super) fn next_local(&self) -> Option<Nanos> {
        let waits = |asker: &channels::Asker| asker.under_way > 0;
        let asks = self.local.asking > 0 && self.local.posted;
        let any = asks || self.env.channels.askers.iter().flatten().any(|a| waits(a));
        any.then(|| self.local.checked + CHECK)
    }
}

impl LocalHost {
    /// A QP went from one path to another.
    fn count(&mut self, from: Path, to: Path) {
        self.asking -= u32::from(from == Path::Asking);
        self.active -= u32::from(from == Path::Local);
        self.asking += u32::from(to == Path::Asking);
        self.active += u32::from(to == Path::Local);
    }
}
