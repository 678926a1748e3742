//! How two ends agree on a local connection: what is proposed, withdrawn and refused.
//!
//! Owns what control records mean, and the step from the wire to shared memory and back.

use starverbs_backend::SessionId;
use starverbs_core::engine::{Detached, EngineAttr, EngineCtx};
use starverbs_core::nic::QpHandover;
use starverbs_core::types::QPN_BLOCK_SHIFT;
use starverbs_core::{Nanos, NicError, PdId, QpState, QpType, Qpn};

use starverbs_star::control::Preference;

use super::channels::Channels;
use super::direct::Direct;
use super::end::{Init, LocalEnd};
use super::record::{LocalRecord, control};
use super::turn::{InboundControl, with_end};
use super::{LocalHost, Ours, Path, QpEntry, Theirs};
use crate::device::soft::engine::HostEngine;
use crate::device::soft::env::{HostEnv, NicEnv};
use crate::log::log;
use crate::share::Gates;

/// For how many looks of the watch, of 50 ms each at least, a program's first request waits for the peer's
/// proposal. Not a time: on a busy host a card that was late to look has not waited, nor was its peer heard.
pub(super) const PATIENCE: u32 = 4;
/// More local ends than a CPU's caches hold.
const MANY: u32 = 256;

impl Ours {
    /// What it says to the peer.
    fn proposal(&self, qpn: Qpn) -> LocalRecord {
        let mut record = LocalRecord { op: control::PROPOSE, ..self.withdrawal(qpn) };
        if let Some(gate) = self.gate {
            record.offer(gate, self.pd, self.access);
        }
        record
    }

    /// It holds no more.
    fn withdrawal(&self, qpn: Qpn) -> LocalRecord {
        LocalRecord {
            op: control::WITHDRAW,
            epoch: self.epoch,
            to: self.peer,
            from: qpn,
            ..LocalRecord::default()
        }
    }
}

impl LocalHost {
    /// Proposes a local connection to a QP's peer, if that may be had. Else StaR is due, for a QP with a
    /// preference.
    pub(super) fn propose(
        &mut self,
        (nic, env): NicEnv<'_>,
        qpn: Qpn,
        preference: Option<Preference>,
        now: Nanos,
    ) {
        let Ok(attr) = nic.query_qp(qpn) else { return };
        let connected = matches!(nic.qp_type(qpn), Some(QpType::Rc | QpType::Uc));
        let suits = connected && self.is_here(&attr.av.dgid);
        if !suits || nic.speaks_strom(qpn) || nic.hold_qp(qpn).is_err() {
            return self.roles_due.extend(preference.map(|preference| (qpn, preference)));
        }
        self.qps.entry(qpn).or_default().preference = preference;
        let peer = attr.dest_qpn;
        let Some(channel) = env.channels.channel_to(peer >> QPN_BLOCK_SHIFT) else {
            return self.use_wire((nic, env), qpn, now);
        };
        self.epoch = self.epoch.wrapping_add(1);
        let (gate, access) = (env.channels.gates.as_mut().and_then(Gates::open), attr.access);
        let pd = nic.handover(qpn).map_or(PdId(0), |handover| handover.owner.pd);
        let ours = Ours { epoch: self.epoch, channel, peer, waited: 0, gate, access, pd };
        let entry = self.qps.entry(qpn).or_default();
        entry.path = Path::Asking;
        entry.ours = Some(ours);
        self.asking += 1;
        self.posted |= preference.is_some();
        env.channels.send_control(channel, ours.proposal(qpn));
        self.begin_if_agreed((nic, env), qpn, now);
        self.refuse_others(&mut env.channels, qpn);
    }

    /// Refuses proposals that came early and led to nothing. The kernel does not say of their process that it
    /// is the peer's: its PID is not seen here, and it has two sessions with this one. Both ends get packets.
    fn refuse_others(&mut self, channels: &mut Channels, qpn: Qpn) {
        let entry = self.qps.get_mut(&qpn).filter(|entry| entry.path == Path::Asking);
        for Theirs { epoch, from, .. } in
            entry.map(|entry| std::mem::take(&mut entry.theirs)).unwrap_or_default()
        {
            refuse(channels, &LocalRecord { epoch, to: qpn, from, ..LocalRecord::default() });
        }
    }

    /// Begins, if the peer has proposed it, too.
    fn begin_if_agreed(&mut self, (nic, env): NicEnv<'_>, qpn: Qpn, now: Nanos) {
        let Some(QpEntry { path: Path::Asking, ours: Some(ours), theirs, .. }) = self.qps.get(&qpn) else {
            return;
        };
        let ours = *ours;
        let mut of_peer = theirs.iter().filter(|theirs| theirs.from == ours.peer);
        let is_it = |theirs: &&Theirs| leads_to(&mut env.channels, ours.channel, theirs.session);
        let Some(theirs) = of_peer.find(is_it).cloned() else { return };
        match begin((nic, env), qpn, &ours, &theirs, now) {
            Ok(()) => {
                if let Some(entry) = self.qps.get_mut(&qpn) {
                    entry.theirs.clear();
                }
                self.leave(nic.counters(), qpn, Path::Local);
                env.channels.many |= self.active > MANY && self.looks_ahead;
                nic.counters().local_qps.add(1);
            }
            Err(_) => {
                if let Some(entry) = self.qps.get_mut(&qpn) {
                    entry.theirs.clear();
                }
                self.use_wire((nic, env), qpn, now);
            }
        }
    }

    /// The wire carries the connection until RESET.
    pub(super) fn use_wire(&mut self, (nic, env): NicEnv<'_>, qpn: Qpn, now: Nanos) {
        if self.says {
            log!(Warn, "queue pair {qpn:#x}: its peer does not agree to shared memory, and gets packets");
        }
        let path = self.leave(nic.counters(), qpn, Path::Wire);
        let entry = self.qps.get(&qpn);
        let (ours, preference) = entry.map_or((None, None), |entry| (entry.ours, entry.preference));
        if entry.is_some() {
            env.channels.close_gate(ours.and_then(|ours| ours.gate));
            if let (Path::Asking, Some(ours)) = (path, ours) {
                env.channels.send_control(ours.channel, ours.withdrawal(qpn));
            }
        }
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
        match preference {
            /* it stays held */
            Some(preference) if nic.is_held(qpn) => self.roles_due.push((qpn, preference)),
            _ => nic.resume_qp(env, qpn, now),
        }
    }

    /// A control record came beside requests.
    #[cold]
    pub(super) fn on_control(&mut self, (nic, env): NicEnv<'_>, control: &InboundControl, now: Nanos) {
        let answerer = env.channels.answerers.iter().find(|answerer| answerer.serial == control.serial);
        let Some(session) = answerer.map(|answerer| answerer.session) else { return };
        match control.record.op {
            control::PROPOSE => self.on_proposal((nic, env), control, session, now),
            control::WITHDRAW => self.on_withdrawal((nic, env), control, now),
            control::REFUSE => self.on_refusal((nic, env), control, now),
            _ => {}
        }
    }

    fn on_proposal(
        &mut self,
        (nic, env): NicEnv<'_>,
        InboundControl { serial, record }: &InboundControl,
        session: Option<SessionId>,
        now: Nanos,
    ) {
        let (qpn, from, serial) = (record.to, record.from, *serial);
        let state = nic.qp_state(qpn);
        if !self.enabled || state.is_none() {
            return refuse(&mut env.channels, record);
        }
        let early = matches!(state, Some(QpState::Reset | QpState::Init));
        let direct = direct_of(&env.channels, record, serial);
        let entry = self.qps.entry(qpn).or_default();
        let asking = entry.path == Path::Asking && nic.is_held(qpn);
        if early || asking || entry.path == Path::Local {
            /* of one that is early, or of the next connection: it is answered at RTR */
            entry.theirs.retain(|theirs| theirs.serial != serial);
            let direct = direct.clone();
            entry.theirs.push(Theirs { epoch: record.epoch, from, serial, session, direct });
        }
        let channel = entry.ours.filter(|_| entry.path == Path::Local).map(|ours| ours.channel);
        let leads = channel.is_some_and(|channel| leads_to(&mut env.channels, channel, session));
        let end = nic.engine(qpn).and_then(HostEngine::local);
        if asking {
            self.begin_if_agreed((nic, env), qpn, now);
        } else if leads && end.is_some_and(|end| end.is_left_by(record)) {
            self.use_wire((nic, env), qpn, now);
            if let Some(entry) = self.qps.get_mut(&qpn) {
                entry.theirs.retain(|theirs| theirs.serial != serial);
            }
        } else if leads {
            self.meet_again((nic, env), record, serial, direct, now);
        }
        let path = self.qps.get(&qpn).map(|entry| entry.path);
        if !early && path != Some(Path::Local) {
            refuse(&mut env.channels, record);
        }
    }

    fn on_withdrawal(&mut self, (nic, env): NicEnv<'_>, control: &InboundControl, now: Nanos) {
        let InboundControl { serial, record } = control;
        let Some(entry) = self.qps.get_mut(&record.to) else { return };
        let is_it = |theirs: &Theirs| (theirs.serial, theirs.epoch) == (*serial, record.epoch);
        entry.theirs.retain(|theirs| theirs.from != record.from || !is_it(theirs));
        let end = nic.engine(record.to).and_then(HostEngine::local);
        if end.is_some_and(|end| end.is_peer(record, *serial) && end.is_fresh()) {
            self.use_wire((nic, env), record.to, now);
        }
    }

    fn on_refusal(&mut self, (nic, env): NicEnv<'_>, control: &InboundControl, now: Nanos) {
        let InboundControl { serial, record } = control;
        let Some(entry) = self.qps.get(&record.to) else { return };
        let (path, ours) = (entry.path, entry.ours);
        let of_now = ours.is_some_and(|ours| ours.epoch == record.epoch && ours.peer == record.from);
        /* who has begun hears the one that it has begun with alone */
        let is_its = |end: &LocalEnd| end.of.channels[1] == *serial && end.is_fresh();
        let fresh = nic.engine(record.to).and_then(HostEngine::local).is_none_or(is_its);
        if of_now && fresh && matches!(path, Path::Asking | Path::Local) {
            self.use_wire((nic, env), record.to, now);
        }
    }

    /// The peer of a local end has proposed. If that is of a connection after the one that this end has
    /// agreed to, this end's proposal was of use to the one before, which is over: it is said again.
    fn meet_again(
        &self,
        (nic, env): NicEnv<'_>,
        record: &LocalRecord,
        serial: u32,
        direct: Option<Direct>,
        now: Nanos,
    ) {
        let qpn = record.to;
        let is_new = with_end((nic, env), qpn, now, |end, _| {
            let is_new = end.is_fresh() && record.from == end.of.peer && !end.is_with(record);
            end.meet_again(record, serial, direct);
            is_new
        });
        let ours = self.qps.get(&qpn).and_then(|entry| entry.ours);
        if let (Some(true), Some(ours)) = (is_new, ours) {
            env.channels.send_control(ours.channel, ours.proposal(qpn));
        }
    }
}

/// A local end takes the QP's connection.
fn begin((nic, env): NicEnv<'_>, qpn: Qpn, ours: &Ours, theirs: &Theirs, now: Nanos) -> Result<(), NicError> {
    let QpHandover { owner, sq, rq, send_cq, recv_cq, max_recv_sge, sq_sig_all, first_send, .. } =
        nic.handover(qpn)?;
    let init = Init {
        qpn,
        unreliable: nic.qp_type(qpn) == Some(QpType::Uc),
        peer: ours.peer,
        pd: owner.pd,
        sq: sq.clone(),
        rq: rq.cloned(),
        send_cq: send_cq.clone(),
        recv_cq: recv_cq.clone(),
        sig_all: sq_sig_all,
        max_recv_sge: max_recv_sge as u32,
        first_send,
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

/// Whether the process that we ask in a channel is the one at the other end of a session.
fn leads_to(channels: &mut Channels, channel: u32, session: Option<SessionId>) -> bool {
    let Some(asker) = channels.asker(channel) else { return false };
    match (asker.session, session) {
        (None, None) => true,
        (Some(a), Some(b)) => channels.peers.are_of_one_process(a, b),
        _ => false,
    }
}

/// What a proposal lets this end do by itself.
fn direct_of(channels: &Channels, record: &LocalRecord, serial: u32) -> Option<Direct> {
    let (gate, pd, access) = record.offered()?;
    let memory = channels.memory_of(serial)?;
    if record.fetches() {
        memory.set_fetches(true);
    }
    channels.gates.is_some().then_some(Direct { memory, gate, pd, access, alone: u8::MAX })
}

/// The wire carries what was proposed.
fn refuse(channels: &mut Channels, proposal: &LocalRecord) {
    let LocalRecord { epoch, to, from, .. } = *proposal;
    let record = LocalRecord { op: control::REFUSE, epoch, to: from, from: to, ..LocalRecord::default() };
    if let Some(channel) = channels.channel_to(from >> QPN_BLOCK_SHIFT) {
        channels.send_control(channel, record);
    }
}
