//! The local transport: queue pairs of two processes of this host talk through shared memory, without
//! packets.
//!
//! When a queue pair of RC or UC gets its peer's number, and that is of this host, its card proposes a local
//! connection in a channel to the peer's process, and holds the program's requests. Once both have proposed,
//! both begin ([`end::LocalEnd`]); if the peer refuses, or says nothing for a while, the wire carries the
//! connection until RESET, and StaR settles then what roles the ends have. Owns who proposed what; the
//! channels lie in the card's host ([`HostEnv`]).

mod agreement;
mod asker;
pub(crate) mod channels;
mod completer;
mod direct;
pub(crate) mod end;
mod notify;
mod record;
mod rendezvous;
mod requester;
mod responder;
#[cfg(test)]
mod tests;
mod turn;
mod unreliable;
mod watch;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use starverbs_backend::SessionId;
use starverbs_backend::host::is_among;
use starverbs_core::{Access, Counters, Gid, Nanos, Nic, PdId, QpState, Qpn};
use starverbs_settings::{LinkMode, Settings};
use starverbs_star::control::Preference;

use super::doorbells::Deferred;
use super::engine::HostEngine;
use super::env::{HostEnv, NicEnv};
use crate::info::DeviceInfo;
use crate::log::write_line;
use crate::share::GatePass;
use channels::Channels;
use direct::Direct;
pub(super) use turn::expect;
use turn::with_end;

/// Times that a card which others are to wake takes what has come since it said so, and control records of
/// one turn: peers that ask without end do not keep its lock.
const ROUNDS: u32 = 16;
const CONTROLS: u32 = 64;

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
    /// Looks of the watch in which a program, or a role, waited for the peer's
    waited: u32,
    /// Through which the peer may reach the QP's memory by itself, with these rights
    gate: Option<GatePass>,
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
struct QpEntry {
    path: Path,
    /// On the wire it may be an end of StaR
    preference: Option<Preference>,
    ours: Option<Ours>,
    /// One of each channel: others may say what they like, and do not take the place of the peer's
    theirs: Vec<Theirs>,
}

/// Writes once in a process, whatever it logs, that queue pairs of this host use packets for a setting's
/// sake.
#[cold]
pub(super) fn report_wire_only(setting: &str) {
    static REPORTED: AtomicBool = AtomicBool::new(false);
    /* nobody waits for who writes, nor in a child forked meanwhile */
    if !REPORTED.swap(true, Ordering::Relaxed) {
        write_line(format_args!(
            "{setting} is about packets: queue pairs of one host use them, too, and no shared memory \
             (STARVERBS_LINK=udp says that this is meant)"
        ));
    }
}

/// Who proposed what.
pub(crate) struct LocalHost {
    enabled: bool,
    /// The setting, if any, that only the wire can keep to, so that nothing is enabled
    wire_only: Option<&'static str>,
    /// A QP that has to use the wire says so
    says: bool,
    /// Contexts are fetched ahead
    looks_ahead: bool,
    addrs: Vec<Gid>,
    qps: HashMap<Qpn, QpEntry>,
    /// QPs with a preference that use the wire, and wait for their roles
    roles_due: Vec<(Qpn, Preference)>,
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
    /// Polls took something since one looked whether they are idle
    pub(super) came: bool,
}

impl LocalHost {
    pub(super) fn new(settings: &Settings, info: &DeviceInfo) -> LocalHost {
        let wanted = settings.link != LinkMode::Udp;
        let of_packets = [
            ("STARVERBS_FAULT", settings.fault.is_active()),
            ("STARVERBS_PCAP", settings.pcap.is_some()),
            ("STARVERBS_QPC_CACHE", settings.qpc_cache.is_some()),
        ];
        let is_set = of_packets.into_iter().find(|(_, set)| wanted && *set);
        LocalHost {
            enabled: wanted && is_set.is_none(),
            wire_only: is_set.map(|(setting, _)| setting),
            says: settings.link == LinkMode::Local,
            looks_ahead: settings.qpc_prefetch,
            addrs: info.addrs.iter().map(|addr| addr.gid).collect(),
            qps: HashMap::new(),
            roles_due: Vec::new(),
            epoch: 0,
            asking: 0,
            active: 0,
            posted: false,
            checked: 0,
            busy: 0,
            wire_idle: 0,
            came: false,
        }
    }

    /// Whether any QP may get a local connection.
    pub(super) fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Whether an address is this host's.
    fn is_here(&self, gid: &Gid) -> bool {
        is_among(&self.addrs, *gid)
    }

    /// The setting for whose sake a QP uses the wire, though its peer is of this host.
    pub(super) fn wire_only(&self, nic: &Nic<HostEnv>, qpn: Qpn) -> Option<&'static str> {
        let setting = self.wire_only?;
        nic.query_qp(qpn).is_ok_and(|attr| self.is_here(&attr.av.dgid)).then_some(setting)
    }

    /// What carries a QP's connection, for people; and of a local one how many requests either end has made.
    pub(super) fn link_of(&self, nic: &Nic<HostEnv>, qpn: Qpn) -> (&'static str, u32, u32) {
        if let Some(end) = nic.engine(qpn).and_then(HostEngine::local) {
            return (end.link(), end.requests(), end.executed());
        }
        match self.qps.get(&qpn).map(|entry| entry.path) {
            Some(Path::Asking) => ("asking", 0, 0),
            _ => ("wire", 0, 0),
        }
    }

    /// The doorbell of a QP that has a local connection. False: it has none.
    #[inline]
    pub(super) fn ring(&mut self, (nic, env): NicEnv<'_>, qpn: Qpn) -> bool {
        if self.asking > 0 {
            self.posted = true;
        }
        if self.active == 0 {
            return false;
        }
        let rung = with_end((nic, env), qpn, 0, |end, ctx| end.ring(ctx)).is_some();
        if rung && env.channels.flush(false) {
            self.catch_up((nic, env));
        }
        rung
    }

    /// Something has come that others see no reason to wake this card for.
    #[inline(never)]
    fn catch_up(&mut self, (nic, env): NicEnv<'_>) {
        for _ in 0..ROUNDS {
            if self.take_turn((nic, env), 0) == 0 || !env.channels.flush(true) {
                return;
            }
        }
        env.channels.unfinished = true;
    }

    /// The doorbells that were deferred, of QPs that have a local connection.
    #[inline(never)]
    pub(super) fn ring_deferred(&mut self, (nic, env): NicEnv<'_>, deferred: &mut Deferred) {
        let mut rung = false;
        deferred.drop_rung(|qpn| {
            let is_rung = with_end((nic, env), qpn, 0, |end, ctx| end.ring(ctx)).is_some();
            rung |= is_rung;
            is_rung
        });
        if rung && env.channels.flush(false) {
            self.catch_up((nic, env));
        }
    }

    /// The program has moved a QP to a state. A preference: it may be an end of StaR.
    pub(super) fn move_qp(
        &mut self,
        (nic, env): NicEnv<'_>,
        qpn: Qpn,
        state: QpState,
        preference: Option<Preference>,
        now: Nanos,
    ) {
        match state {
            QpState::Rtr if self.enabled => self.propose((nic, env), qpn, preference, now),
            QpState::Rtr => self.roles_due.extend(preference.map(|preference| (qpn, preference))),
            QpState::Reset => {
                let Some(entry) = self.qps.get_mut(&qpn) else { return };
                let gate = entry.ours.take().and_then(|ours| ours.gate);
                env.channels.close_gate(gate);
                self.leave(nic.counters(), qpn, Path::None);
            }
            QpState::Err => self.stop_direct(&mut env.channels, qpn),
            _ => {}
        }
    }

    /// The program has another preference. False: the wire carries the connection, or it has none.
    pub(super) fn change_preference(
        &mut self,
        counters: &Counters,
        qpn: Qpn,
        preference: Preference,
    ) -> bool {
        let path = self.qps.get(&qpn).map_or(Path::None, |entry| entry.path);
        if !matches!(path, Path::Asking | Path::Local) {
            return false;
        }
        self.leave(counters, qpn, Path::None);
        if let Some(entry) = self.qps.get_mut(&qpn) {
            entry.preference = Some(preference);
        }
        self.leave(counters, qpn, path);
        true
    }

    /// QPs whose roles StaR is to settle, as no local connection carries what they do.
    #[inline]
    pub(super) fn take_roles_due(&mut self) -> Vec<(Qpn, Preference)> {
        std::mem::take(&mut self.roles_due)
    }

    /// The program has set a QP's access rights: a peer that knows others asks from now on.
    pub(super) fn change_access(&mut self, (nic, env): NicEnv<'_>, qpn: Qpn) {
        let access = nic.query_qp(qpn).map(|attr| attr.access);
        let known = self.qps.get(&qpn).and_then(|entry| entry.ours).map(|ours| ours.access);
        if known.is_some() && known != access.ok() {
            self.stop_direct(&mut env.channels, qpn);
        }
    }

    fn stop_direct(&self, channels: &mut Channels, qpn: Qpn) {
        let ours = self.qps.get(&qpn).and_then(|entry| entry.ours);
        channels.close_gate(ours.and_then(|ours| ours.gate));
    }

    /// A QP is gone.
    pub(super) fn forget(&mut self, (nic, env): NicEnv<'_>, qpn: Qpn) {
        self.stop_direct(&mut env.channels, qpn);
        self.leave(nic.counters(), qpn, Path::None);
        self.qps.remove(&qpn);
        self.roles_due.retain(|(due, _)| *due != qpn);
    }

    /// A QP that waits for its peer's proposal is to do what one that waits cannot: the wire carries its
    /// connection, and what was posted begins. False: it does not wait.
    pub(super) fn wait_no_more(&mut self, (nic, env): NicEnv<'_>, qpn: Qpn, now: Nanos) -> bool {
        let waits = self.qps.get(&qpn).is_some_and(|entry| entry.path == Path::Asking);
        if waits {
            self.use_wire((nic, env), qpn, now);
        }
        waits
    }

    /// The local part of a turn; says how much came.
    #[inline(never)]
    pub(super) fn run(&mut self, card: NicEnv<'_>, now: Nanos) -> u32 {
        self.poll(card, now)
    }

    /// The same, in the place of its call: of a poll that does nothing else.
    #[inline(always)]
    pub(super) fn poll(&mut self, (nic, env): NicEnv<'_>, now: Nanos) -> u32 {
        let mut came = 0;
        while let Some(news) = env.channels.peers.next_news() {
            self.on_news((nic, env), news, now);
            env.channels.watch.poll_all(1);
            came += 1;
        }
        if env.channels.are_quiet() {
            return came;
        }
        for _ in 0..ROUNDS {
            let taken = self.take_turn((nic, env), now);
            came += taken;
            if taken > 0 {
                env.channels.watch.poll_all(1);
            }
            if !env.channels.flush(true) || taken == 0 {
                return came;
            }
        }
        env.channels.unfinished = true;
        came
    }

    /// As [`LocalHost::run`], of a thread that does not come back soon: what others wait for is not left for
    /// the next poll.
    pub(super) fn run_at_last(&mut self, (nic, env): NicEnv<'_>, now: Nanos) -> u32 {
        let came = self.run((nic, env), now);
        env.channels.wake_requesters();
        came
    }

    /// Takes what is there; says how much.
    #[inline(always)]
    fn take_turn(&mut self, (nic, env): NicEnv<'_>, now: Nanos) -> u32 {
        let mut came = 0;
        for _ in 0..CONTROLS {
            came += turn::take_requests((nic, env), now);
            let Some(control) = env.channels.inbound_control.take() else { break };
            self.on_control((nic, env), &control, now);
        }
        came += turn::take_answers((nic, env), now);
        if env.channels.broken {
            self.drop_broken((nic, env), now);
        }
        came
    }

    /// A QP goes from one path to another; gives the one before. With a preference it is plain RC on a local
    /// one.
    fn leave(&mut self, counters: &Counters, qpn: Qpn, to: Path) -> Path {
        let Some(entry) = self.qps.get_mut(&qpn) else { return Path::None };
        let from = std::mem::replace(&mut entry.path, to);
        let wants = entry.preference.is_some_and(|preference| preference != Preference::Off);
        let plain = |path| wants && path == Path::Local;
        if plain(from) != plain(to) {
            let plain_qps = &counters.star_plain_qps;
            if plain(to) { plain_qps.add(1) } else { plain_qps.sub(1) }
        }
        self.asking -= u32::from(from == Path::Asking);
        self.active -= u32::from(from == Path::Local);
        self.asking += u32::from(to == Path::Asking);
        self.active += u32::from(to == Path::Local);
        from
    }
}
