//! StaR of a card's host: its UDP ports, and the ends of StaR connections behind them.
//!
//! A [`StarHost`] is open from the first queue pair on that may be the end of a StaR connection; before that
//! nothing here runs. What packets are for, and what queue pairs become, is the
//! [core's](starverbs_star::host); here are its sockets and its turns. It must not know what a queue pair is
//! to a program.

use std::net::IpAddr;
use std::os::fd::RawFd;

use starverbs_core::{Gid, Nanos, Nic, Qpn};
use starverbs_settings::{Network, Settings, StarWire};
use starverbs_star::card::Turn;
use starverbs_star::form::Form;
use starverbs_star::host::roles::CardIdentity;
use starverbs_star::host::{Ends, ExpectedEnd, InboundPacket};
use starverbs_star::partition::StarPartition;
use starverbs_star::wire::CardHalf;

use super::port::Stats;
use super::{ReceivedPacket, Sealing, StarCard, StarRx};
use crate::{BackendError, Woken, seed};

/// Rounds of receiving in one turn of who was woken.
const BATCHES: u32 = 4;
/// Packets of a turn whose connections are fetched ahead at most.
const AHEAD: usize = 16;

/// A card and its host.
pub type NicEnv<'a, E> = (&'a mut Nic<E>, &'a mut E);

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

/// What a card's host has of StaR beside the card: nothing, until it is open.
pub struct StarHost<E: StarCard>(pub(super) Option<Box<OpenStar<E>>>);

impl<E: StarCard> Default for StarHost<E> {
    fn default() -> Self {
        StarHost(None)
    }
}

/// Its ports, and the ends behind them.
pub(super) struct OpenStar<E: StarCard> {
    rx: StarRx<Stats<E>>,
    pub(super) ends: Ends<E>,
    /// How many packets to look ahead
    ahead: usize,
}

impl<E: StarCard> OpenStar<E> {
    /// With ports of its own, whose sending half becomes `env`'s.
    fn open(settings: &Settings, sealing: Sealing, (nic, env): NicEnv<'_, E>) -> Result<Self, OpenError> {
        let rx = env.open_star(settings, sealing)?;
        let port = |side| env.star().map_or(0, |star| star.tx.port(side));
        let ports = [CardHalf::Stateless, CardHalf::Stateful].map(port);
        let form = match settings.star_wire {
            StarWire::Packed => Form::Packed,
            StarWire::Paper => Form::Paper,
        };
        let (threshold, seed, [boot, _]) = (settings.star_threshold, seed(), seed());
        let mut ends = Ends::new(CardIdentity { boot, ports, threshold, form, seed }, nic)?;
        ends.roles.set_partition(partition_of(settings));
        let ahead = if settings.qpc_prefetch { AHEAD } else { 0 };
        Ok(OpenStar { rx, ends, ahead })
    }

    /// Handles packets that have come, and what follows; gives how many rounds there were. `woken`: of who
    /// slept, as of [`StarRx::recv_woken`].
    fn run(&mut self, turn: &mut Turn<'_, E>, woken: Option<Woken<'_>>) -> u32 {
        let (mut rounds, most) = (0, if woken.is_some() { BATCHES } else { 1 });
        let mut got = match woken {
            Some(woken) => self.rx.recv_woken(woken),
            None => self.rx.recv(),
        };
        while got > 0 && turn.nic.takes_frames() {
            rounds += 1;
            let OpenStar { rx, ends, ahead } = self;
            let mut looked = if rx.has_several() { fetch(rx, ends, turn, *ahead) } else { 0 };
            while turn.nic.takes_frames() {
                let taken = rx.next_packets(|got, more| {
                    let ReceivedPacket { side, meta, port, packet } = got;
                    ends.handle_packets(turn, &InboundPacket { side, meta, port, packet }, || more.next());
                });
                if taken == 0 {
                    break;
                }
                looked = if looked >= taken { looked - taken } else { fetch(rx, ends, turn, *ahead) };
            }
            got = if rounds < most { self.rx.recv() } else { 0 };
        }
        self.ends.poll(turn);
        rounds
    }
}

/// Has what the next `most` packets use fetched: the ends of all, then what lies behind them, so that they
/// come from memory side by side. Gives how many packets they are.
#[inline]
fn fetch<E: StarCard>(rx: &StarRx<Stats<E>>, ends: &Ends<E>, turn: &Turn<'_, E>, most: usize) -> usize {
    let (mut named, mut count) = ([(CardHalf::Stateless, Qpn::default()); AHEAD], 0);
    let packets = rx.look_ahead(most.min(AHEAD), |side, qpn| {
        if let Some(place) = named.get_mut(count) {
            turn.nic.expect_engine(turn.env, qpn);
            (*place, count) = ((side, qpn), count + 1);
        }
    });
    let mut found = [const { None }; AHEAD];
    for (place, (side, qpn)) in found.iter_mut().zip(named).take(count) {
        *place = ends.expect(turn, side, qpn);
    }
    let found = || found.iter().take(count).flatten();
    found().for_each(|end| end.expect_behind(turn));
    found().for_each(ExpectedEnd::expect_wqes);
    packets
}

/// Why there is no StaR.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The ports cannot be opened
    #[error(transparent)]
    Port(#[from] BackendError),
    /// There is no memory
    #[error(transparent)]
    Card(#[from] starverbs_core::NicError),
}

impl<E: StarCard> StarHost<E> {
    /// Opens the ports of StaR, unless they are open; says whether it has.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(
        &mut self,
        settings: &Settings,
        sealing: Sealing,
        (nic, env): NicEnv<'_, E>,
    ) -> Result<bool, OpenError> {
        if self.is_open() {
            return Ok(false);
        }
        self.0 = Some(Box::new(OpenStar::open(settings, sealing, (nic, env))?));
        Ok(true)
    }

    /// Whether there are ends of StaR connections, or were.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.0.is_some()
    }

    /// The doorbell of `qpn` waits behind others: its end may be fetched meanwhile. False: it has none.
    #[inline]
    pub fn expect(&self, nic: &Nic<E>, env: &E, qpn: Qpn) -> bool {
        self.0.as_ref().is_some_and(|star| star.ends.expect_doorbell(nic, env, qpn))
    }

    /// The same, soon: what lies behind what was fetched. False: it has no end.
    #[inline]
    pub fn expect_behind(&self, nic: &Nic<E>, env: &E, qpn: Qpn) -> bool {
        self.0.as_ref().is_some_and(|star| star.ends.expect_requests(nic, env, qpn))
    }

    /// What to wait for.
    pub fn fds(&self) -> impl Iterator<Item = RawFd> {
        self.0.iter().flat_map(|star| star.rx.fds())
    }

    /// StaR's part of a turn; says how much came. `woken`: of who slept.
    #[inline]
    pub fn run(&mut self, (nic, env): NicEnv<'_, E>, now: Nanos, woken: Option<Woken<'_>>) -> u32 {
        if self.is_open() { self.run_open((nic, env), now, woken) } else { 0 }
    }

    #[cold]
    fn run_open(&mut self, (nic, env): NicEnv<'_, E>, now: Nanos, woken: Option<Woken<'_>>) -> u32 {
        self.with((nic, env), now, |star, turn| star.run(turn, woken)).unwrap_or(0)
    }

    /// Calls what is open, if it is.
    pub(super) fn with<R>(
        &mut self,
        (nic, env): NicEnv<'_, E>,
        now: Nanos,
        call: impl FnOnce(&mut OpenStar<E>, &mut Turn<'_, E>) -> R,
    ) -> Option<R> {
        self.0.as_mut().map(|star| call(star, &mut Turn { nic, env, now }))
    }

    /// When StaR's part of a turn has something to do.
    #[inline]
    pub fn next_deadline(&self, nic: &Nic<E>, env: &E, now: Nanos) -> Option<Nanos> {
        let star = self.0.as_ref()?;
        let port = env.star();
        /* a call of the program may have taken messages from the socket of which nobody else will wake
         * anybody */
        if port.is_some_and(super::StarPort::has_messages) {
            return Some(now);
        }
        let wire = port.and_then(|port| port.tx.next_deadline());
        [star.ends.next_deadline(nic.connection_count()), wire].into_iter().flatten().min()
    }

    /// Whether packets of StaR came lately.
    #[inline]
    pub fn is_busy(&self) -> bool {
        self.0.as_ref().is_some_and(|star| star.rx.is_busy())
    }

    /// Whether the stateless half owes answers that [`transmit`](StarHost::transmit) has left.
    #[inline]
    pub fn owes_answers(&self) -> bool {
        self.0.as_ref().is_some_and(|star| star.ends.endpoints.owes_answers())
    }

    /// Whether these are to completions alone.
    #[inline]
    pub fn owes_for_completions(&self) -> bool {
        self.0.as_ref().is_some_and(|star| star.ends.endpoints.owes_for_completions())
    }

    /// The stateless ends' part of a round of sending, and the flush; answers of the last packets only with
    /// `acks`. Gives whether more is left.
    pub fn transmit(&mut self, (nic, env): NicEnv<'_, E>, now: Nanos, acks: bool) -> bool {
        let more = self.with((nic, &mut *env), now, |star, turn| star.ends.endpoints.transmit(turn, acks));
        if let Some(port) = env.star_mut() {
            port.tx.flush(now);
        }
        more == Some(true)
    }
}

impl<E: StarCard> std::fmt::Debug for StarHost<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("StarHost").field(&self.is_open()).finish()
    }
}
