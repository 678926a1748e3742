//! Which queue pairs are ends of StaR connections: what their programs wish, what is settled with their peers, and when that begins.
//! `renewing` settles it anew while a connection runs.

mod renewing;

use std::collections::HashMap;

use starverbs_core::nic::star::StarInit;
use starverbs_core::nic::{TimerId, Timers};
use starverbs_core::qp::{QpAttr, QpAttrMask};
use starverbs_core::star::channel::Channel;
use starverbs_core::star::control::{Control, MAX_CONTROL, Role, Setup, Wish};
use starverbs_core::star::library::Patience;
use starverbs_core::star::negotiate::{Beginning, Negotiation, Outcome, PlainPeers, Terms};
use starverbs_core::star::renew::Renewed;
use starverbs_core::star::seal::MAX_SEALED;
use starverbs_core::star::stateful::{Peer, WINDOW, Waits};
use starverbs_core::star::wire::{Packet, Prefix, Ptype};
use starverbs_core::{AsyncEvent, Av, FrameMeta, Gid, Nanos, Nic, NicError, Psn, QpState, Qpn};
use starverbs_rings::{CardRq, CardSq};

use super::Turn;
use super::library::Library;
use super::port::Heard;
use crate::cq::CardCq;
use crate::log::log;
use crate::stat::StatPage;
use renewing::{Balance, Renewing};

/// For how long an address of which nothing was heard is taken for one without StaR.
const REMEMBERED: Nanos = 10_000_000_000;

/// Who this card is to peers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Identity {
    /// Which life of the card this is
    pub(crate) boot: u64,
    /// UDP ports of its stateless half and of its stateful one
    pub(crate) ports: [u16; 2],
    /// From how many connections on it wants to keep the state of no more
    pub(crate) threshold: u32,
}

impl Identity {
    /// What epochs tell of the life.
    pub(crate) fn life(&self) -> u16 {
        self.boot as u16
    }
}

/// More handles of a QP's queues, for the half that it becomes.
pub(crate) struct Queues {
    pub(crate) sq: CardSq,
    /// `None`: it takes from an SRQ
    pub(crate) rq: Option<CardRq>,
    pub(crate) send_cq: CardCq,
    pub(crate) recv_cq: CardCq,
}

/// A QP that may be an end of a StaR connection, from RTR on.
struct End {
    av: Av,
    peer: Qpn,
    wish: Wish,
    negotiation: Negotiation,
    timer: TimerId,
    /// Until it begins
    queues: Option<Queues>,
    beginning: Beginning,
    renewing: Renewing,
}

/// All of them.
pub(crate) struct Roles {
    identity: Identity,
    ends: HashMap<Qpn, End>,
    timers: Timers,
    plain: PlainPeers,
    balance: Balance,
    stats: StatPage,
}

impl Roles {
    pub(crate) fn new(identity: Identity, stats: StatPage) -> Self {
        let (timers, plain) = (Timers::default(), PlainPeers::default());
        Roles { identity, ends: HashMap::new(), timers, plain, balance: Balance::default(), stats }
    }

    /// A QP of this wish is in RTR now: asks its peer. `queues` are other handles of its queues. The QP is in its state already, so what
    /// stands in the way leaves it plain RoCEv2.
    pub(crate) fn begin(
        &mut self,
        turn: &mut Turn<'_>,
        library: &mut Library,
        (qpn, wish): (Qpn, Wish),
        queues: Queues,
    ) {
        self.end(qpn);
        match self.hold(turn, (qpn, wish), queues) {
            Ok(true) => self.go_on(turn, library, qpn, None),
            Ok(false) => {}
            Err(refused) => {
                log!(Info, "queue pair {qpn:#x}: plain RoCEv2, as StaR is not for it ({refused})");
            }
        }
    }

    /// Has the QP wait for its peer, if there is something to ask it; says whether.
    fn hold(
        &mut self,
        turn: &mut Turn<'_>,
        (qpn, wish): (Qpn, Wish),
        queues: Queues,
    ) -> Result<bool, NicError> {
        let attr = turn.nic.query_qp(qpn)?;
        let mine = self.terms(turn, (qpn, wish), &attr.av);
        let Identity { boot, ports, .. } = self.identity;
        if mine.wish == Wish::Off || self.plain.is_plain(&attr.av.dgid, turn.now) {
            return Ok(false);
        }
        self.ends.try_reserve(1).map_err(|_| NicError::Exhausted)?;
        let timer = self.timers.join()?;
        turn.nic.hold_for_star(qpn).inspect_err(|_| self.timers.leave(timer))?;
        let end = End {
            av: attr.av,
            peer: attr.dest_qpn,
            wish,
            negotiation: Negotiation::new(mine, boot, ports, turn.now),
            timer,
            queues: Some(queues),
            beginning: Beginning::default(),
            renewing: Renewing::default(),
        };
        self.ends.insert(qpn, end);
        Ok(true)
    }

    /// What the choice depends on, now.
    fn terms(&self, turn: &Turn<'_>, (qpn, wish): (Qpn, Wish), av: &Av) -> Terms {
        let (stateful, threshold) = (turn.nic.connection_count(), self.identity.threshold);
        let wish = possible(wish, turn.nic.has_few_contexts(), stateful > threshold);
        Terms { wish, stateful, threshold, gid: av.sgid, qpn }
    }

    /// The QP leaves RTR or RTS, or is gone.
    pub(crate) fn end(&mut self, qpn: Qpn) {
        if let Some(mut end) = self.ends.remove(&qpn) {
            self.timers.leave(end.timer);
            self.balance.stop(&mut end.renewing);
            if end.negotiation.outcome() == Some(Outcome::Plain) {
                self.stats.star_plain_qps.sub(1);
            }
        }
    }

    /// The QP is in ERR: what was settled stands, and nothing begins any more.
    pub(crate) fn stop(&mut self, qpn: Qpn) {
        match self.ends.get_mut(&qpn) {
            Some(end) if end.negotiation.outcome().is_some() => {
                end.queues = None;
                self.balance.stop(&mut end.renewing);
                self.timers.disarm(end.timer);
            }
            _ => self.end(qpn),
        }
    }

    /// What was settled for a QP. `None`: nothing yet, or it has no wish.
    pub(crate) fn outcome(&self, qpn: Qpn) -> Option<Outcome> {
        self.ends.get(&qpn)?.negotiation.outcome()
    }

    /// A peer says something.
    pub(crate) fn handle(&mut self, turn: &mut Turn<'_>, library: &mut Library, heard: &Heard) {
        let Some(said) = understand(turn, heard) else { return };
        let ours = self.ends.get(&heard.to);
        if ours.is_some_and(|end| end.av.dgid == heard.source && end.peer == heard.from) {
            self.plain.heard(&heard.source);
            return match said {
                Said::First(said) => self.go_on(turn, library, heard.to, Some(&said)),
                Said::Again(said) => self.hear_again(turn, library, heard.to, &said),
            };
        }
        let Said::First(said) = said else { return };
        let meta = FrameMeta { src: heard.source, ..FrameMeta::default() };
        if let Some(answer) = turn.nic.answer(&meta, (heard.from, heard.to), &said) {
            self.plain.heard(&heard.source);
            let av = Av { dgid: heard.source, sgid: heard.at, hop_limit: 64, ..Av::default() };
            say(turn, (heard.to, heard.from), &av, |room| answer.encode(room));
        }
    }

    /// Asks again where it is time.
    pub(crate) fn handle_timeout(&mut self, turn: &mut Turn<'_>, library: &mut Library) {
        while let Some(qpn) = self.timers.pop_due(turn.now) {
            match self.ends.get(&qpn) {
                Some(end) if end.renewing.lasts() => self.renew(turn, library, qpn, None),
                Some(end) if end.is_star() => self.look_for_peer(turn, qpn),
                _ => self.go_on(turn, library, qpn, None),
            }
        }
    }

    /// When there is something to do.
    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        self.timers.next()
    }

    /// Goes on with what is not settled for a QP: hears what its peer says, or asks.
    fn go_on(&mut self, turn: &mut Turn<'_>, library: &mut Library, qpn: Qpn, said: Option<&Control>) {
        let Some(end) = self.ends.get_mut(&qpn) else { return };
        let before = end.negotiation.outcome();
        if before.is_none() && !turn.nic.waits_for_star(qpn) {
            /* a request of plain RoCEv2 came */
            end.negotiation.plain();
        }
        if self.plain.speaks(&end.av.dgid) {
            end.negotiation.trust();
        }
        let answer = match said {
            Some(said) => end.negotiation.handle((end.av.dgid, end.peer), said),
            None => end.negotiation.poll(turn.now),
        };
        if let Some(answer) = answer {
            say(turn, (qpn, end.peer), &end.av, |room| answer.encode(room));
        }
        if end.renewing.lasts() {
            return;
        }
        if let Some(due) = end.negotiation.deadline() {
            return self.timers.arm(end.timer, due, qpn);
        }
        if before.is_none() {
            self.timers.disarm(end.timer);
            self.settled(turn, library, qpn);
        }
    }

    /// It is settled what a QP is.
    fn settled(&mut self, turn: &mut Turn<'_>, library: &mut Library, qpn: Qpn) {
        let Some(end) = self.ends.get_mut(&qpn) else { return };
        let Some(outcome) = end.negotiation.outcome() else { return };
        match outcome {
            Outcome::Plain => {
                log!(Debug, "queue pair {qpn:#x}: plain RoCEv2");
                self.stats.star_plain_qps.inc();
                if !end.negotiation.heard() {
                    self.plain.note(end.av.dgid, end.negotiation.gave_up(), turn.now + REMEMBERED);
                }
                turn.nic.settle_plain(turn.env, qpn, turn.now);
            }
            Outcome::Star { role: Role::Stateless, boot, ports } => {
                log!(Debug, "queue pair {qpn:#x}: stateless end");
                let Some(queues) = end.queues.take() else { return };
                if let Err(error) = library.begin(turn, qpn, (boot, ports), queues) {
                    fail(turn, qpn, &error);
                }
            }
            /* it begins when the other end says what it is */
            Outcome::Star { role: Role::Stateful, .. } => self.look_for_peer(turn, qpn),
        }
    }

    /// The peer of a stateful end is to begin: if it does not, and requests wait, it is gone.
    fn look_for_peer(&mut self, turn: &mut Turn<'_>, qpn: Qpn) {
        let Some(end) = self.ends.get_mut(&qpn).filter(|end| end.queues.is_some()) else { return };
        let Ok(attr) = turn.nic.query_qp(qpn) else { return };
        let patience = Patience::of(attr.timeout, attr.retry_cnt).time;
        if !end.beginning.is_overdue(turn.now, turn.nic.has_posts(qpn), patience) {
            return self.timers.arm(end.timer, turn.now + Beginning::LOOK, qpn);
        }
        log!(Debug, "queue pair {qpn:#x}: plain RoCEv2, as its peer does not begin");
        end.negotiation.abandon();
        self.stats.star_plain_qps.inc();
        turn.nic.settle_plain(turn.env, qpn, turn.now);
    }

    /// The first control message of a stateless end: its peer begins.
    pub(crate) fn begin_stateful(&mut self, turn: &mut Turn<'_>, source: &Gid, packet: &Packet<'_>) {
        let qpn = packet.header.qpn;
        let Some(end) = self.ends.get_mut(&qpn).filter(|end| end.queues.is_some()) else { return };
        let Some((setup, prefix)) = first_word(packet) else { return };
        if *source != end.av.dgid || prefix.qpn != end.peer || !turn.nic.waits_for_star(qpn) {
            return;
        }
        if end.renewing.lasts() {
            self.peer_began(turn, qpn);
        }
        let Some(end) = self.ends.get_mut(&qpn) else { return };
        /* it says so, and more */
        end.negotiation.handle((*source, prefix.qpn), &Control::Confirm { role: Role::Stateless });
        let Some(Outcome::Star { role: Role::Stateful, boot, ports: [port, control_port] }) =
            end.negotiation.outcome()
        else {
            return;
        };
        self.timers.disarm(end.timer);
        if setup.boot != boot {
            return;
        }
        let Some(Queues { sq, rq, send_cq, recv_cq }) = end.queues.take() else { return };
        let peer = Peer { av: end.av, port, control_port, qpn: end.peer, epoch: prefix.epoch };
        let mut channel = Channel::new();
        channel.took();
        let init = StarInit {
            sq,
            rq,
            cqs: (send_cq, recv_cq),
            setup,
            peer,
            channel,
            window: WINDOW,
            lifetime: Waits::default().lifetime,
        };
        match turn.nic.begin_star(turn.env, qpn, init, turn.now) {
            Ok(()) => log!(Debug, "queue pair {qpn:#x}: stateful end"),
            Err(error) => fail(turn, qpn, &error),
        }
    }
}

/// What a peer says of the roles.
enum Said {
    /// As the connection begins
    First(Control),
    /// While it runs
    Again(Renewed),
}

/// What an end can be at all: a card with room for few contexts keeps no StaR connections, and has others keep them when it has too many.
fn possible(wish: Wish, few: bool, crowded: bool) -> Wish {
    match wish {
        Wish::Stateful if few => Wish::Off,
        Wish::Auto if few && crowded => Wish::Stateless,
        Wish::Auto if few => Wish::Off,
        wish => wish,
    }
}

/// What a stateless end says first, and who it is.
fn first_word(packet: &Packet<'_>) -> Option<(Setup, Prefix)> {
    if packet.header.ptype != Ptype::Wqep || packet.header.psn != Psn::default() {
        return None;
    }
    match Control::decode(packet.data)? {
        Control::Setup(setup) => Some((setup, packet.prefix?)),
        _ => None,
    }
}

/// Sends a message by which roles are settled.
fn say(
    turn: &mut Turn<'_>,
    ends: (Qpn, Qpn),
    av: &Av,
    encode: impl FnOnce(&mut [u8; MAX_CONTROL]) -> Option<usize>,
) {
    let (mut plain, mut sealed) = ([0; MAX_CONTROL], [0; MAX_SEALED]);
    let Some(len) = encode(&mut plain) else { return };
    let (message, gids) = (plain.get(..len).unwrap_or_default(), (&av.sgid, &av.dgid));
    let Some(port) = turn.env.star.as_mut() else { return };
    if let Some(message) = port.sealing.seal_offer(gids, ends, message, &mut sealed) {
        Nic::send_negotiation(turn.env, ends, av, message);
    }
}

/// What a peer says. `None`: nothing that can be understood, or believed.
fn understand(turn: &mut Turn<'_>, heard: &Heard) -> Option<Said> {
    let mut room = [0; MAX_CONTROL];
    let port = turn.env.star.as_mut()?;
    let (gids, qpns) = ((&heard.source, &heard.at), (heard.from, heard.to));
    let said = port.sealing.open_offer(gids, qpns, heard.message(), &mut room, turn.nic.counters())?;
    let first = || Control::decode(said).map(Said::First);
    Renewed::decode(said).map(Said::Again).or_else(first)
}

/// The half that a QP was to become could not begin, and the peer counts on it.
fn fail(turn: &mut Turn<'_>, qpn: Qpn, error: &dyn std::fmt::Display) {
    log!(Warn, "queue pair {qpn:#x}: {error}");
    let to = QpAttr { state: QpState::Err, ..QpAttr::default() };
    if turn.nic.modify_qp(turn.env, qpn, &to, QpAttrMask::STATE, turn.now).is_ok() {
        turn.env.events.push(AsyncEvent::QpFatal(qpn));
    }
}
