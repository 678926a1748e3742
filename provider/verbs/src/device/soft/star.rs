//! StaR in a process: its UDP ports, and the ends of StaR connections behind them.
//!
//! A [`StarHost`] is open from the first queue pair on that may be the end of a StaR connection; before that
//! nothing here runs. What packets are for, and what queue pairs become, is the
//! [core's](starverbs_star::host); here are its sockets, its memory and its turns. It must not know what a
//! queue pair is to a program.

mod hooks;
mod info;
pub(crate) mod port;
mod sealing;

use std::net::IpAddr;
use std::os::fd::RawFd;

use starverbs_backend::star::StarRx;
use starverbs_core::{Gid, Nanos, Nic, Qpn};
use starverbs_settings::{Network, Settings, StarWire};
use starverbs_star::card::{self, Turn};
use starverbs_star::form::Form;
use starverbs_star::host::roles::CardIdentity;
use starverbs_star::host::{Ends, InboundPacket};
use starverbs_star::partition::StarPartition;
use starverbs_star::wire::CardHalf;

use super::back_pressure::Who;
use super::env::{HostEnv, NicEnv};
use super::intake::AHEAD;
use super::{Shard, Soft};
use crate::error::Result;
use crate::process::seed;
use crate::stat::StatPage;
use port::StarPort;
use sealing::Sealing;

/// Rounds of receiving in one turn of the thread.
const BATCHES: u32 = 4;

/// Within which there is StaR.
fn partition_of(settings: &Settings) -> StarPartition {
    let network = |network: &Network| match network.addr {
        IpAddr::V4(addr) => (Gid::from_ipv4(addr.octets()), network.bits.saturating_add(96)),
        IpAddr::V6(addr) => (Gid(addr.octets()), network.bits),
    };
    settings
        .star_partition
        .as_ref()
        .map_or_else(StarPartition::default, |networks| StarPartition::of(networks.iter().map(network)))
}

/// What a process has of StaR beside its card: nothing, until it is open.
#[derive(Default)]
pub(crate) struct StarHost(Option<Box<OpenStar>>);

/// Its ports, and the ends behind them.
struct OpenStar {
    rx: StarRx<StatPage>,
    ends: Ends<HostEnv>,
    /// How many packets to look ahead
    ahead: usize,
}

impl OpenStar {
    /// With ports of its own, whose sending half becomes `env`'s.
    fn open(settings: &Settings, sealing: Sealing, (nic, env): NicEnv<'_>) -> Result<Self> {
        let (tx, rx) = env.tx.open_star(settings)?;
        let ports = [CardHalf::Stateless, CardHalf::Stateful].map(|side| tx.port(side));
        let [boot, _] = seed();
        let form = match settings.star_wire {
            StarWire::Packed => Form::Packed,
            StarWire::Paper => Form::Paper,
        };
        let threshold = settings.star_threshold;
        let identity = CardIdentity { boot, ports, threshold, form, seed: seed() };
        let mut ends = Ends::new(identity, nic)?;
        ends.roles.set_partition(partition_of(settings));
        env.star = Some(Box::new(StarPort::new(tx, sealing)));
        let ahead = if settings.qpc_prefetch { AHEAD as usize } else { 0 };
        Ok(OpenStar { rx, ends, ahead })
    }

    /// Handles packets that have come, and what follows; gives how many rounds there were. `woken`: by whom
    /// all sockets are looked at.
    fn run(&mut self, turn: &mut Turn<'_, HostEnv>, woken: bool) -> u32 {
        let (mut rounds, most) = (0, if woken { BATCHES } else { 1 });
        let mut got = if woken { self.rx.recv_all() } else { self.rx.recv() };
        while got > 0 && turn.nic.takes_frames() {
            rounds += 1;
            let OpenStar { rx, ends, ahead } = self;
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
                    rx.look_ahead(*ahead, |side, qpn| ends.expect(turn, side, qpn));
                    rx.look_ahead(*ahead, |side, qpn| ends.expect_behind(turn, side, qpn))
                };
            }
            got = if rounds < most { self.rx.recv() } else { 0 };
        }
        self.ends.poll(turn);
        rounds
    }
}

impl StarHost {
    /// Whether there are ends of StaR connections, or were.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.0.is_some()
    }

    /// The doorbell of `qpn` waits behind others: its end may be fetched meanwhile.
    #[inline]
    pub(super) fn expect(&self, nic: &Nic<HostEnv>, env: &HostEnv, qpn: Qpn) {
        if let Some(star) = &self.0 {
            star.ends.expect_doorbell(nic, env, qpn);
        }
    }

    /// The same, soon: what lies behind what was fetched.
    #[inline]
    pub(super) fn expect_behind(&self, nic: &Nic<HostEnv>, env: &HostEnv, qpn: Qpn) {
        if self.is_open() {
            card::expect_behind(nic, env, qpn);
        }
    }

    /// What the thread waits for.
    pub(super) fn fds(&self) -> impl Iterator<Item = RawFd> {
        self.0.iter().flat_map(|star| star.rx.fds())
    }

    /// StaR's part of a turn; says how much came.
    #[inline]
    pub(super) fn run(&mut self, (nic, env): NicEnv<'_>, now: Nanos, who: Who) -> u32 {
        if self.is_open() { self.run_open((nic, env), now, who) } else { 0 }
    }

    #[cold]
    fn run_open(&mut self, (nic, env): NicEnv<'_>, now: Nanos, who: Who) -> u32 {
        self.with((nic, env), now, |star, turn| star.run(turn, who == Who::Thread)).unwrap_or(0)
    }

    /// Calls what is open, if it is.
    fn with<R>(
        &mut self,
        (nic, env): NicEnv<'_>,
        now: Nanos,
        call: impl FnOnce(&mut OpenStar, &mut Turn<'_, HostEnv>) -> R,
    ) -> Option<R> {
        self.0.as_mut().map(|star| call(star, &mut Turn { nic, env, now }))
    }

    /// When StaR's part of a turn has something to do.
    #[inline]
    pub(super) fn next_deadline(&self, nic: &Nic<HostEnv>, env: &HostEnv, now: Nanos) -> Option<Nanos> {
        let star = self.0.as_ref()?;
        let port = env.star.as_ref();
        /* a call of the program may have taken messages from the socket of which nobody else will wake
         * anybody */
        if port.is_some_and(|port| !port.inbound.is_empty()) {
            return Some(now);
        }
        let wire = port.and_then(|port| port.tx.next_deadline());
        [star.ends.next_deadline(nic.connection_count()), wire].into_iter().flatten().min()
    }

    /// Whether packets of StaR came lately.
    #[inline]
    pub(super) fn is_busy(&self) -> bool {
        self.0.as_ref().is_some_and(|star| star.rx.is_busy())
    }

    /// Whether the stateless half owes answers that [`transmit`](StarHost::transmit) has left.
    #[inline]
    pub(super) fn owes_answers(&self) -> bool {
        self.0.as_ref().is_some_and(|star| star.ends.endpoints.owes_answers())
    }

    /// The stateless ends' part of a round of sending, and the flush; answers of the last packets only with
    /// `acks`. Gives whether more is left.
    pub(super) fn transmit(&mut self, (nic, env): NicEnv<'_>, now: Nanos, acks: bool) -> bool {
        let more = self.with((nic, env), now, |star, turn| star.ends.endpoints.transmit(turn, acks));
        if let Some(port) = &mut env.star {
            port.tx.flush(now);
        }
        more == Some(true)
    }
}

impl Soft {
    /// What [`Soft::open_star`] needs. Whoever has the card's lock does not wait for a file. `None`: the
    /// ports are open.
    pub(crate) fn prepare_star(&self) -> Result<Option<Sealing>> {
        if self.with(|shard, _| shard.star.is_open()) {
            Ok(None)
        } else {
            Sealing::new(&self.settings).map(Some)
        }
    }

    /// Opens the ports of StaR, unless they are open.
    pub(crate) fn open_star(&self, shard: &mut Shard, sealing: Sealing) -> Result<()> {
        if !shard.star.is_open() {
            let open = OpenStar::open(&self.settings, sealing, (&mut shard.nic, &mut shard.env))?;
            shard.star = StarHost(Some(Box::new(open)));
            self.thread.kick_if_armed();
        }
        Ok(())
    }
}
