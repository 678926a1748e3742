//! StaR in a process: its UDP ports, who settles the roles of queue pairs, and the halves that a card has.
//!
//! A [`StarHost`] exists from the first queue pair on that may be the end of a StaR connection; without one nothing here runs. Packets for
//! the stateless half are done and forgotten, those for the stateful half go to the card, control messages to the library of the stateless
//! half if the queue pair is one of its. It must not know what a queue pair is to a program.

mod hooks;
pub(crate) mod library;
pub(crate) mod port;
pub(crate) mod roles;
mod sealing;

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};

use starverbs_backend::star::StarRx;
use starverbs_core::star::control::MAX_CONTROL;
use starverbs_core::star::negotiate::Outcome;
use starverbs_core::star::wire::Side;
use starverbs_core::{Nanos, Nic, QpState, Qpn};
use starverbs_settings::Settings;

use crate::card::{Card, Shard, seed};
use crate::env::HostEnv;
use crate::error::Result;
use crate::qp::QpInner;
use crate::receives::Who;
use crate::stat::StatPage;
use library::Library;
use port::StarPort;
use roles::{Identity, Roles};
use sealing::Sealing;

/// Rounds of receiving in one turn of the thread.
const BATCHES: u32 = 4;

/// A stateless end of this process takes from an SRQ.
static TAKES_FROM_SRQS: AtomicBool = AtomicBool::new(false);

/// Whether somebody waits for receives of an SRQ who must be told of them.
#[inline]
pub(crate) fn takes_from_srqs() -> bool {
    TAKES_FROM_SRQS.load(Ordering::Relaxed)
}

fn note_srq() {
    TAKES_FROM_SRQS.store(true, Ordering::Relaxed);
}

/// The card and its host, for a turn.
pub(crate) struct Turn<'a> {
    pub(crate) nic: &'a mut Nic<HostEnv>,
    pub(crate) env: &'a mut HostEnv,
    pub(crate) now: Nanos,
}

/// What a process has of StaR beside its card.
pub(crate) struct StarHost {
    rx: StarRx<StatPage>,
    roles: Roles,
    pub(crate) library: Library,
    stats: StatPage,
}

impl StarHost {
    /// With ports of its own, whose sending half becomes `env`'s.
    fn open(
        settings: &Settings,
        sealing: Sealing,
        (nic, env): (&mut Nic<HostEnv>, &mut HostEnv),
        stats: StatPage,
    ) -> Result<Self> {
        let (tx, rx) = env.tx.open_star(settings)?;
        let ports = [Side::Stateless, Side::Stateful].map(|side| tx.port(side));
        let [boot, _] = seed();
        let identity = Identity { boot, ports, threshold: settings.star_threshold };
        let mut library = Library::new(identity.life(), boot, stats);
        library.learn(nic);
        env.star = Some(Box::new(StarPort::new(tx, sealing)));
        Ok(StarHost { rx, roles: Roles::new(identity, stats), library, stats })
    }

    /// What the thread waits for.
    pub(crate) fn fds(&self) -> impl Iterator<Item = RawFd> {
        self.rx.fds()
    }

    /// What was settled for a QP. `None`: nothing yet, or nobody was asked.
    pub(crate) fn outcome(&self, qpn: Qpn) -> Option<Outcome> {
        self.roles.outcome(qpn)
    }

    /// Handles packets that have come, and what follows; gives how many rounds there were. `woken`: by whom all sockets are looked at.
    fn run(&mut self, turn: &mut Turn<'_>, woken: bool) -> u32 {
        let (mut rounds, most) = (0, if woken { BATCHES } else { 1 });
        let mut got = if woken { self.rx.recv_all() } else { self.rx.recv() };
        while got > 0 {
            rounds += 1;
            self.take_packets(turn);
            got = if rounds < most { self.rx.recv() } else { 0 };
        }
        self.settle(turn);
        self.library.run_timers(turn);
        self.roles.balance(turn, &mut self.library);
        rounds
    }

    fn take_packets(&mut self, turn: &mut Turn<'_>) {
        let StarHost { rx, roles, library, stats } = self;
        while let Some(got) = rx.next_packet() {
            let (meta, packet) = (&got.meta, &got.packet);
            let mut room = [0; MAX_CONTROL];
            match got.side {
                Side::Stateless => library.serve(turn, (meta, got.port), packet),
                Side::Stateful if packet.header.migrate => {
                    let port = turn.env.star.as_mut();
                    let opened =
                        port.and_then(|port| port.sealing.open_packet(meta, packet, &mut room, stats));
                    let Some(packet) = &opened else { continue };
                    if !library.handle_control(turn, &meta.src, packet) {
                        roles.begin_stateful(turn, &meta.src, packet);
                        turn.nic.handle_star(turn.env, turn.now, &meta.src, packet);
                    }
                }
                Side::Stateful => turn.nic.handle_star(turn.env, turn.now, &meta.src, packet),
            }
        }
    }

    /// Goes on with the roles that are not settled.
    fn settle(&mut self, turn: &mut Turn<'_>) {
        let StarHost { roles, library, .. } = self;
        while let Some(heard) = turn.env.star.as_mut().and_then(|star| star.heard.pop_front()) {
            roles.handle(turn, library, &heard);
        }
        roles.handle_timeout(turn, library);
    }

    fn next_deadline(&self) -> Option<Nanos> {
        [self.roles.next_deadline(), self.library.next_deadline()].into_iter().flatten().min()
    }
}

impl Card {
    /// What [`Card::open_star`] needs. Whoever has the card's lock does not wait for a file. `None`: the ports are open.
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
            let host = StarHost::open(&self.settings, sealing, (&mut shard.nic, &mut shard.env), self.stats)?;
            shard.star = Some(Box::new(host));
            self.progress.kick_if_armed();
        }
        Ok(())
    }
}

impl Shard {
    /// StaR's part of a turn; says how much came.
    #[inline]
    pub(crate) fn run_star(&mut self, now: Nanos, who: Who) -> u32 {
        if self.star.is_none() { 0 } else { self.run_star_host(now, who) }
    }

    #[cold]
    fn run_star_host(&mut self, now: Nanos, who: Who) -> u32 {
        self.with_star(now, |star, turn| star.run(turn, who == Who::Thread)).unwrap_or(0)
    }

    /// The program has moved a QP, which has a wish, to a state.
    pub(crate) fn move_star(&mut self, qp: &QpInner, state: QpState, now: Nanos) {
        self.with_star(now, |star, turn| match state {
            QpState::Rtr => star.roles.begin(turn, &mut star.library, (qp.qpn, qp.wish), qp.queues()),
            QpState::Init | QpState::Reset => star.roles.end(qp.qpn),
            QpState::Err => star.roles.stop(qp.qpn),
            QpState::Rts | QpState::Sqd | QpState::Sqe => {}
        });
    }

    /// A QP is gone.
    pub(crate) fn forget_star(&mut self, qpn: Qpn) {
        if let Some(star) = &mut self.star {
            star.roles.end(qpn);
        }
    }

    /// Calls who has to do with StaR, if this process has.
    pub(crate) fn with_star<R>(
        &mut self,
        now: Nanos,
        call: impl FnOnce(&mut StarHost, &mut Turn<'_>) -> R,
    ) -> Option<R> {
        let Shard { nic, env, star, .. } = self;
        star.as_mut().map(|star| call(star, &mut Turn { nic, env, now }))
    }

    /// When StaR's part of a turn has something to do.
    #[inline]
    pub(crate) fn next_star(&self) -> Option<Nanos> {
        let star = self.star.as_ref()?;
        let wire = self.env.star.as_ref().and_then(|port| port.tx.next_deadline());
        let balance = star.roles.balance_due(self.nic.connection_count());
        [star.next_deadline(), wire, balance].into_iter().flatten().min()
    }

    /// The library's part of a round of sending, and the flush; gives whether more is left.
    pub(crate) fn transmit_star(&mut self, now: Nanos) -> bool {
        let more = self.with_star(now, |star, turn| star.library.transmit(turn));
        if let Some(port) = &mut self.env.star {
            port.tx.flush(now);
        }
        more == Some(true)
    }
}
