//! StaR in a process: its UDP ports, and the ends of StaR connections behind them.
//!
//! A [`StarHost`] exists from the first queue pair on that may be the end of a StaR connection; without one
//! nothing here runs. What packets are for, and what queue pairs become, is the
//! [core's](starverbs_star::host); here are its sockets, its memory and its turns. It must not know what a
//! queue pair is to a program.

mod hooks;
mod info;
pub(crate) mod port;
mod sealing;

use std::os::fd::RawFd;

use starverbs_backend::star::StarRx;
use starverbs_core::{Nanos, QpState, Qpn};
use starverbs_settings::{Settings, StarWire};
use starverbs_star::card::Turn;
use starverbs_star::control::Preference;
use starverbs_star::form::Form;
use starverbs_star::host::endpoints::Endpoints;
use starverbs_star::host::roles::Identity;
use starverbs_star::host::{Ends, InboundPacket};
use starverbs_star::negotiate::Outcome;
use starverbs_star::wire::Side;

use super::back_pressure::Who;
use super::env::{HostEnv, NicEnv};
use super::intake::AHEAD;
use super::{Shard, Soft};
use crate::error::Result;
use crate::process::seed;
use crate::qp::QpInner;
use crate::stat::StatPage;
use port::StarPort;
use sealing::Sealing;

/// Rounds of receiving in one turn of the thread.
const BATCHES: u32 = 4;

/// What a process has of StaR beside its card.
pub(crate) struct StarHost {
    rx: StarRx<StatPage>,
    ends: Ends<HostEnv>,
    /// How many packets to look ahead
    ahead: usize,
}

impl StarHost {
    /// With ports of its own, whose sending half becomes `env`'s.
    fn open(settings: &Settings, sealing: Sealing, (nic, env): NicEnv<'_>) -> Result<Self> {
        let (tx, rx) = env.tx.open_star(settings)?;
        let ports = [Side::Stateless, Side::Stateful].map(|side| tx.port(side));
        let [boot, _] = seed();
        let form = match settings.star_wire {
            StarWire::Packed => Form::Packed,
            StarWire::Paper => Form::Paper,
        };
        let identity = Identity { boot, ports, threshold: settings.star_threshold, form };
        let ends = Ends::new(identity, nic)?;
        env.star = Some(Box::new(StarPort::new(tx, sealing)));
        let ahead = if settings.qpc_prefetch { AHEAD as usize } else { 0 };
        Ok(StarHost { rx, ends, ahead })
    }

    /// What the thread waits for.
    pub(crate) fn fds(&self) -> impl Iterator<Item = RawFd> {
        self.rx.fds()
    }

    /// The stateless ends.
    pub(crate) fn endpoints(&self) -> &Endpoints<HostEnv> {
        &self.ends.endpoints
    }

    /// What was settled for a QP. `None`: nothing yet, or nobody was asked.
    pub(crate) fn outcome(&self, qpn: Qpn) -> Option<Outcome> {
        self.ends.roles.outcome(qpn)
    }

    /// Handles packets that have come, and what follows; gives how many rounds there were. `woken`: by whom
    /// all sockets are looked at.
    fn run(&mut self, turn: &mut Turn<'_, HostEnv>, woken: bool) -> u32 {
        let (mut rounds, most) = (0, if woken { BATCHES } else { 1 });
        let mut got = if woken { self.rx.recv_all() } else { self.rx.recv() };
        while got > 0 && turn.nic.takes_frames() {
            rounds += 1;
            let StarHost { rx, ends, ahead } = self;
            let mut looked = 0;
            while turn.nic.takes_frames()
                && let Some(got) = rx.next_packet()
            {
                let inbound =
                    InboundPacket { side: got.side, meta: &got.meta, port: got.port, packet: &got.packet };
                ends.handle_packet(turn, &inbound);
                looked = if looked > 0 {
                    looked - 1
                } else {
                    rx.look_ahead(*ahead, |side, qpn| ends.expect(turn, side, qpn))
                };
            }
            got = if rounds < most { self.rx.recv() } else { 0 };
        }
        self.ends.poll(turn);
        rounds
    }
}

impl Soft {
    /// What [`Soft::open_star`] needs. Whoever has the card's lock does not wait for a file. `None`: the
    /// ports are open.
    pub(crate) fn prepare_star(&self) -> Result<Option<Sealing>> {
        if self.with(|shard, _| shard.star.is_some()) {
            Ok(None)
        } else {
            Sealing::new(&self.settings).map(Some)
        }
    }

    /// Opens the ports of StaR, unless they are open.
    pub(crate) fn open_star(&self, shard: &mut Shard, sealing: Sealing) -> Result<()> {
        if shard.star.is_none() {
            let host = StarHost::open(&self.settings, sealing, (&mut shard.nic, &mut shard.env))?;
            shard.star = Some(Box::new(host));
            self.thread.kick_if_armed();
        }
        Ok(())
    }
}

impl Shard {
    /// StaR's part of a turn; says how much came.
    #[inline]
    pub(super) fn run_star(&mut self, now: Nanos, who: Who) -> u32 {
        if self.star.is_none() { 0 } else { self.run_star_host(now, who) }
    }

    #[cold]
    fn run_star_host(&mut self, now: Nanos, who: Who) -> u32 {
        self.with_star(now, |star, turn| star.run(turn, who == Who::Thread)).unwrap_or(0)
    }

    /// The program has moved a QP, which has a preference, to a state.
    pub(crate) fn move_star(&mut self, qp: &QpInner, state: QpState, now: Nanos) {
        self.with_star(now, |star, turn| {
            star.ends.on_qp_state(turn, qp.qpn, qp.preference(), state);
        });
    }

    /// The program of a connected QP has this preference from now on. False: its peer has no StaR.
    pub(crate) fn change_preference(&mut self, qpn: Qpn, preference: Preference, now: Nanos) -> bool {
        self.with_star(now, |star, turn| star.ends.set_preference(turn, qpn, preference)) == Some(true)
    }

    /// A QP is gone.
    pub(crate) fn forget_star(&mut self, qpn: Qpn) {
        if let Some(star) = &mut self.star {
            star.ends.roles.forget(qpn);
        }
    }

    /// Calls who has to do with StaR, if this process has.
    pub(crate) fn with_star<R>(
        &mut self,
        now: Nanos,
        call: impl FnOnce(&mut StarHost, &mut Turn<'_, HostEnv>) -> R,
    ) -> Option<R> {
        let Shard { nic, env, star, .. } = self;
        star.as_mut().map(|star| call(star, &mut Turn { nic, env, now }))
    }

    /// When StaR's part of a turn has something to do.
    #[inline]
    pub(crate) fn next_star(&self, now: Nanos) -> Option<Nanos> {
        let star = self.star.as_ref()?;
        let port = self.env.star.as_ref();
        /* a call of the program may have taken messages from the socket of which nobody else will wake
         * anybody */
        if port.is_some_and(|port| !port.inbound.is_empty()) {
            return Some(now);
        }
        let wire = port.and_then(|port| port.tx.next_deadline());
        [star.ends.next_deadline(self.nic.connection_count()), wire].into_iter().flatten().min()
    }

    /// The stateless ends' part of a round of sending, and the flush; gives whether more is left.
    pub(crate) fn transmit_star(&mut self, now: Nanos) -> bool {
        let more = self.with_star(now, |star, turn| star.ends.endpoints.transmit(turn));
        if let Some(port) = &mut self.env.star {
            port.tx.flush(now);
        }
        more == Some(true)
    }
}
