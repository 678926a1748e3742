//! Which queue pairs are ends of StaR connections: the preferences of their programs, what is settled with
//! their peers, and when it begins. `rounds` changes connections that run, which are an `end` in that,
//! `balance` says which, `epochs` keeps late packets of former connections out, `messages` sends and takes
//! role messages.

mod balance;
mod end;
mod epochs;
mod messages;
mod rounds;

use starverbs_core::nic::{Nic, TimerId, Timers};
use starverbs_core::qp::{QpAttr, QpAttrMask};
use starverbs_core::{AsyncEvent, Av, FrameMeta, Gid, Nanos, NicError, QpState, Qpn};

use crate::card::StarInit;
use crate::channel::ControlChannel;
use crate::control::{Control, Preference, Role, Terms};
use crate::datagram;
use crate::endpoint::Patience;
use crate::env::QpPair;
use crate::form::Form;
use crate::negotiate::{Beginning, Negotiation, Outcome, PeerQp, PlainPeers};
use crate::partition::StarPartition;
use crate::role_message::RoleMessage;
use crate::stateful::{SlPeer, WINDOW};
use crate::stateless;
use crate::wire::StarPacket;

use super::endpoints::{Endpoints, StatefulCard};
use super::places::ByQpn;
use super::{EndpointHost, InboundMessage, Note, Turn, queues_of};
use balance::Balance;
use end::HostEnd;
use epochs::Epochs;
use messages::{decode_message, first_setup, offer_again, refuse, send_message};
use rounds::Rounds;

/// For how long an address that never sent a StaR message is taken for one without StaR, ns.
const REMEMBERED: Nanos = 10_000_000_000;
/// Within such a time the stateful end of a new connection answers the Setup of its peer, ns: its process may
/// be waiting for a CPU.
const FIRST_ANSWER: Nanos = 2_000_000_000;

/// What peers get to know of this card, and what they do not.
#[derive(Clone, Copy)]
pub struct CardIdentity {
    /// Boot ID: random, another one in each process
    pub boot: u64,
    /// UDP ports of its stateless half and of its stateful one
    pub ports: [u16; 2],
    /// Beyond how many connections it wants peers to keep them
    pub threshold: u32,
    /// Which packets it sends
    pub form: Form,
    /// Of the secret that tokens are made with: random, and nobody else's
    pub seed: [u64; 2],
}

impl CardIdentity {
    /// Boot epoch: the upper half of its connections' epochs.
    pub fn boot_epoch(&self) -> u16 {
        self.boot as u16
    }
}

/// A QP that may be an end of a StaR connection, from RTR on.
struct End {
    qpn: Qpn,
    av: Av,
    peer: Qpn,
    /// It takes from an SRQ or speaks StRoM's dialect: it does not change while it runs
    has_fixed_role: bool,
    preference: Preference,
    /// The program has stated a preference since it began, or could not have what it stated before
    has_stated: bool,
    negotiation: Negotiation,
    /// Which incarnation of the QP it is
    incarnation: u32,
    /// That of the peer with whom the roles were settled; 0: it has not said
    peer_incarnation: u32,
    timer: TimerId,
    /// A half of StaR may begin on it
    may_begin: bool,
    beginning: Beginning,
    /// A stateless end whose peer has not begun by then asks it to be plain, ns
    grace: Nanos,
    rounds: Rounds,
}

impl End {
    /// Of messages to its peer.
    fn qps(&self) -> QpPair {
        QpPair { from: self.qpn, to: self.peer }
    }

    /// A message to the peer.
    fn message(&self, message: Control) -> RoleMessage {
        RoleMessage { from: self.incarnation, to: self.peer_incarnation, message }
    }

    /// Whether it is to be a stateful end once its peer begins.
    fn waits_for_peer(&self) -> bool {
        self.is_star() && self.may_begin
    }
}

/// All of them.
pub struct Roles<E: EndpointHost> {
    identity: CardIdentity,
    ends: ByQpn<End>,
    /// Epochs of stateful ends: what arrives late of one that is over begins nothing
    epochs: Epochs,
    /// That of the end that began last
    incarnation: u32,
    timers: Timers,
    plain: PlainPeers,
    /// Peers elsewhere are plain
    partition: StarPartition,
    balance: Balance,
    stats: E::Stats,
}

impl<E: EndpointHost> Roles<E> {
    /// Nobody has asked yet.
    pub fn new(identity: CardIdentity, stats: E::Stats) -> Self {
        let (timers, plain) = (Timers::default(), PlainPeers::default());
        let (ends, epochs, balance) = (ByQpn::default(), Epochs::default(), Balance::default());
        /* another card of this address begins elsewhere */
        let incarnation = identity.boot as u32;
        let partition = StarPartition::default();
        Roles { identity, ends, epochs, incarnation, timers, plain, partition, balance, stats }
    }

    /// There is StaR within this partition alone.
    pub fn set_partition(&mut self, partition: StarPartition) {
        self.partition = partition;
    }

    /// Another threshold from now on.
    pub fn set_threshold(&mut self, threshold: u32) {
        self.identity.threshold = threshold;
    }

    /// A QP of this preference is in RTR now: asks its peer. On an error it stays plain RC.
    pub fn begin(
        &mut self,
        turn: &mut Turn<'_, E>,
        endpoints: &mut Endpoints<E>,
        qpn: Qpn,
        preference: Preference,
    ) {
        self.end(qpn);
        match self.hold(turn, qpn, preference) {
            Ok(true) => self.drive_negotiation(turn, endpoints, qpn, None),
            Ok(false) => {}
            Err(refused) => {
                turn.env.note(qpn, &Note::Unsuited(refused));
            }
        }
    }

    /// Holds the QP until its role is settled. False: it is plain, without asking.
    fn hold(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn, preference: Preference) -> Result<bool, NicError> {
        let attr = turn.nic.query_qp(qpn)?;
        let mine = self.terms(turn, preference);
        let Av { sgid, dgid, .. } = &attr.av;
        let apart = !self.partition.holds(sgid, dgid);
        if preference == Preference::Off
            || apart
            || self.plain.is_plain(program_of(turn, qpn), dgid, turn.now)
        {
            return Ok(false);
        }
        let has_fixed_role = turn.nic.handover(qpn)?.rq.is_none() || turn.nic.speaks_strom(qpn);
        self.ends.make_room(qpn)?;
        let timer = self.timers.join()?;
        turn.nic.hold_qp(qpn).inspect_err(|_| self.timers.leave(timer))?;
        self.incarnation = self.incarnation.wrapping_add(1).max(1);
        let is_lower = (attr.av.sgid, qpn) < (attr.av.dgid, attr.dest_qpn);
        let end = End {
            qpn,
            av: attr.av,
            peer: attr.dest_qpn,
            has_fixed_role,
            preference,
            has_stated: false,
            negotiation: Negotiation::new(mine, is_lower, turn.now),
            incarnation: self.incarnation,
            peer_incarnation: 0,
            timer,
            may_begin: true,
            beginning: Beginning::default(),
            grace: FIRST_ANSWER,
            rounds: Rounds::default(),
        };
        self.ends.insert(qpn, end);
        self.epochs.end(qpn, turn.now);
        Ok(true)
    }

    /// What the choice depends on, now.
    fn terms(&self, turn: &Turn<'_, E>, preference: Preference) -> Terms {
        let CardIdentity { boot, ports, threshold, .. } = self.identity;
        Terms { preference, stateful: turn.nic.connection_count(), threshold, ports, boot }
    }

    /// The QP is gone.
    pub fn forget(&mut self, qpn: Qpn) {
        self.end(qpn);
        self.epochs.forget(qpn);
    }

    /// The QP leaves RTR or RTS.
    pub fn end(&mut self, qpn: Qpn) {
        if let Some(end) = self.ends.remove(qpn) {
            self.timers.leave(end.timer);
            if end.negotiation.outcome() == Some(Outcome::Plain) {
                self.stats.star_plain_qps.sub(1);
            }
        }
    }

    /// The QP is in ERR: what was settled stands, and nothing begins any more.
    pub fn stop(&mut self, qpn: Qpn) {
        match self.ends.get_mut(qpn) {
            Some(end) if end.negotiation.outcome().is_some() => {
                (end.may_begin, end.has_stated) = (false, false);
                end.rounds.round = None;
                self.timers.disarm(end.timer);
            }
            _ => self.end(qpn),
        }
    }

    /// What was settled for a QP. `None`: nothing yet, or it has no preference.
    pub fn outcome(&self, qpn: Qpn) -> Option<Outcome> {
        self.ends.get(qpn)?.negotiation.outcome()
    }

    /// Which incarnation a QP is in. `None`: it has no preference.
    pub fn incarnation(&self, qpn: Qpn) -> Option<u32> {
        Some(self.ends.get(qpn)?.incarnation)
    }

    /// A role message came.
    pub fn handle(&mut self, turn: &mut Turn<'_, E>, endpoints: &mut Endpoints<E>, inbound: &InboundMessage) {
        let Some(message) = decode_message(turn, inbound) else { return };
        let QpPair { from, to } = inbound.qps;
        let ours = self.ends.get_mut(to);
        if let Some(end) = ours.filter(|end| end.av.dgid == inbound.source && end.peer == from) {
            self.plain.note_star(&inbound.source);
            if let Some(round) = message.message.round() {
                self.on_round_message(&mut HostEnd { turn, endpoints, qpn: to }, round, &message);
            } else if message.is_for(end.incarnation) {
                self.drive_negotiation(turn, endpoints, to, Some(&message));
            }
            return;
        }
        let meta = FrameMeta { src: inbound.source, ..FrameMeta::default() };
        if let Some(answer) = datagram::answer(turn.nic, &meta, inbound.qps, &message) {
            self.plain.note_star(&inbound.source);
            let av = Av { dgid: inbound.source, sgid: inbound.dest, hop_limit: 64, ..Av::default() };
            send_message(turn, QpPair { from: to, to: from }, &av, |room| answer.encode(room));
        }
    }

    /// Does what is due, as far as the port has room for messages: who finds it full each time would take its
    /// peer for silent.
    pub fn handle_timeout(&mut self, turn: &mut Turn<'_, E>, endpoints: &mut Endpoints<E>) {
        while turn.env.can_send()
            && let Some(qpn) = self.timers.pop_due(turn.now)
        {
            match self.ends.get(qpn) {
                Some(end) if !end.rounds.is_idle() => {
                    self.drive_round(&mut HostEnd { turn, endpoints, qpn }, None)
                }
                Some(end) if end.waits_for_peer() => self.look_for_peer(turn, qpn),
                /* StaR's port may be closed: RoCEv2's is open */
                Some(end) if end.is_star() && endpoints.is_beginning(qpn) => {
                    self.await_answer(turn.now, qpn);
                    self.ask(&mut HostEnd { turn, endpoints, qpn });
                }
                _ => self.drive_negotiation(turn, endpoints, qpn, None),
            }
        }
    }

    /// Whether there is something to do but to look at peers for which no request waits.
    pub fn is_busy(&self, nic: &Nic<E>) -> bool {
        self.ends.all().any(|end| {
            let looks = end.waits_for_peer() || end.rounds.is_in_doubt();
            let is_busy = end.rounds.round.as_ref().is_some_and(|round| round.is_busy());
            looks && nic.has_posts(end.qpn) || end.negotiation.outcome().is_none() || is_busy
        })
    }

    /// When there is something to do.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.timers.next()
    }

    /// Goes on with the negotiation of a QP: takes a message of its peer, or sends what is due.
    fn drive_negotiation(
        &mut self,
        turn: &mut Turn<'_, E>,
        endpoints: &mut Endpoints<E>,
        qpn: Qpn,
        message: Option<&RoleMessage>,
    ) {
        let Some(end) = self.ends.get_mut(qpn) else { return };
        let is_idle = end.rounds.is_idle();
        let is_plain = message.is_some_and(|message| message.message == Control::Plain);
        if is_plain && is_idle && end.waits_for_peer() && end.beginning.has_asked() {
            return self.withdraw(turn, qpn);
        }
        let before = end.negotiation.outcome();
        if before.is_none() && !turn.nic.is_held(qpn) {
            /* a request of plain RoCEv2 came */
            end.negotiation.plain();
        }
        if self.plain.has_star(&end.av.dgid) {
            end.negotiation.trust();
        }
        if let Ok(attr) = turn.nic.query_qp(qpn)
            && attr.state == QpState::Rts
        {
            end.negotiation.set_patience(Patience::of(attr.timeout, attr.retry_cnt).time);
        }
        let answer = match message {
            Some(asked) => {
                if before.is_none() && asked.from != 0 {
                    end.peer_incarnation = asked.from;
                }
                let answer = end.negotiation.handle(&asked.message);
                answer.map(|answer| asked.answered(end.incarnation, answer))
            }
            /* else soon, as it is due */
            None if !turn.env.can_send() => None,
            None => end.negotiation.poll(turn.now).map(|offer| end.message(offer)),
        };
        if let Some(answer) = answer {
            send_message(turn, end.qps(), &end.av, |room| answer.encode(room));
        }
        if !is_idle {
            return;
        }
        if let Some(due) = end.negotiation.deadline() {
            return self.timers.arm(end.timer, due, qpn);
        }
        if before.is_none() {
            self.timers.disarm(end.timer);
            self.settled(turn, endpoints, qpn);
        }
    }

    /// It is settled what a QP is.
    fn settled(&mut self, turn: &mut Turn<'_, E>, endpoints: &mut Endpoints<E>, qpn: Qpn) {
        let Some(end) = self.ends.get_mut(qpn) else { return };
        let Some(outcome) = end.negotiation.outcome() else { return };
        end.note_reached();
        self.balance.look_at(turn.now);
        match outcome {
            Outcome::Plain => {
                turn.env.note(qpn, &Note::Plain);
                self.stats.star_plain_qps.inc();
                if !end.negotiation.has_answer() && end.negotiation.has_offered() {
                    self.plain.note_plain(
                        program_of(turn, qpn),
                        end.av.dgid,
                        end.negotiation.gave_up(),
                        turn.now + REMEMBERED,
                    );
                }
                resume_plain(turn, qpn);
            }
            Outcome::Star { role: Role::Stateless, boot, ports } => {
                turn.env.note(qpn, &Note::Begun(Role::Stateless));
                if !core::mem::take(&mut end.may_begin) {
                    return;
                }
                match endpoints.begin(turn, qpn, StatefulCard { boot, port: ports[1] }) {
                    Ok(()) => self.await_answer(turn.now, qpn),
                    Err(error) => fail(turn, qpn, error),
                }
            }
            /* it begins with the Setup of its peer */
            Outcome::Star { role: Role::Stateful, .. } => self.look_for_peer(turn, qpn),
        }
    }

    /// Looks whether the peer of a stateful end has begun: if not, and requests wait for too long, it is
    /// gone.
    fn look_for_peer(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn) {
        if self.ends.get(qpn).is_none_or(|end| !end.may_begin) {
            return;
        }
        if self.is_overdue(turn, qpn) || is_plain(turn.nic, qpn) {
            return self.withdraw(turn, qpn);
        }
        self.ask_again(turn, qpn);
        self.await_answer(turn.now, qpn);
    }

    /// Whether the peer of a stateful end has been silent for the patience of what waits here.
    fn is_overdue(&mut self, turn: &Turn<'_, E>, qpn: Qpn) -> bool {
        let Some(end) = self.ends.get_mut(qpn) else { return false };
        let Ok(attr) = turn.nic.query_qp(qpn) else { return false };
        let patience = Patience::of(attr.timeout, attr.retry_cnt).time;
        end.beginning.is_overdue(turn.now, turn.nic.has_posts(qpn), patience)
    }

    /// Asks a peer that does not begin what it is, while requests wait for it: it may have given up, and be
    /// plain.
    fn ask_again(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn) {
        let Some(end) = self.ends.get(qpn) else { return };
        if end.beginning.has_asked() {
            offer_again(turn, end);
        }
    }

    /// The peer does not begin: this end is plain RC.
    fn withdraw(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn) {
        let Some(end) = self.ends.get_mut(qpn) else { return };
        self.timers.disarm(end.timer);
        end.negotiation.settle(Outcome::Plain);
        end.rounds.failed(turn.now);
        self.has_become_plain(turn, qpn, &Note::Alone);
        resume_plain(turn, qpn);
    }

    /// An end of StaR is plain RC now.
    fn has_become_plain(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn, note: &Note) {
        turn.env.note(qpn, note);
        self.stats.star_plain_qps.inc();
        if let Some(end) = self.ends.get_mut(qpn) {
            end.beginning = Beginning::default();
            self.balance.look_at(end.rounds.not_before);
        }
    }

    /// The first control message of a stateless end, its Setup: the stateful end begins, or answers Bye.
    pub fn begin_stateful(
        &mut self,
        turn: &mut Turn<'_, E>,
        endpoints: &mut Endpoints<E>,
        source: &Gid,
        packet: &StarPacket<'_>,
    ) {
        let qpn = packet.header.qpn;
        let Some((setup, prefix)) = first_setup(packet) else { return };
        let ours = self.ends.get(qpn).is_some_and(|end| *source == end.av.dgid && prefix.qpn == end.peer);
        let over = self.epochs.is_past(turn.now, qpn, PeerQp { gid: *source, qpn: prefix.qpn }, prefix.epoch);
        /* SL is about to be plain, and may be */
        let reverts = self.ends.get(qpn).is_some_and(|end| end.is_star() && !end.rounds.is_idle());
        if !ours || over || reverts || !self.may_begin(turn, qpn, &setup, &prefix) {
            return;
        }
        /* whatever messages of a round were lost */
        let settles =
            |end: &End| end.rounds.round.as_ref().is_some_and(|round| round.awaits_setup(setup.boot));
        if self.ends.get(qpn).is_some_and(settles) {
            let is = Control::Settled { round: 0, star: true };
            self.drive_round(&mut HostEnd { turn, endpoints, qpn }, Some(&is));
        }
        let Some(end) = self.ends.get_mut(qpn) else { return };
        /* a Setup implies Confirm */
        end.negotiation.handle(&Control::Confirm { role: Role::Stateless });
        let Some(Outcome::Star { role: Role::Stateful, boot, ports: [port, control_port] }) =
            end.negotiation.outcome()
        else {
            return;
        };
        if setup.boot != boot {
            return self.ask_for_boot(turn, qpn);
        }
        self.timers.disarm(end.timer);
        let (av, epoch) = (end.av, prefix.epoch);
        let stateless = stateless::SfPeer { av, port: control_port, qpn: end.peer, epoch };
        if !core::mem::take(&mut end.may_begin) {
            return refuse(turn, qpn, &stateless);
        }
        let peer = SlPeer { av, port, control_port, qpn: end.peer, epoch };
        let mut channel = ControlChannel::new();
        channel.accept();
        let begun = queues_of(turn, qpn).and_then(|queues| {
            let form = self.identity.form;
            let init = StarInit { queues, setup, peer, channel, window: WINDOW, form };
            turn.begin_stateful(qpn, init)
        });
        match begun {
            Ok(()) => {
                turn.env.note(qpn, &Note::Begun(Role::Stateful));
                end.note_reached();
                self.epochs.note(qpn, PeerQp { gid: *source, qpn: prefix.qpn }, epoch);
                self.balance.look_at(turn.now);
            }
            Err(error) => {
                fail(turn, qpn, error);
                refuse(turn, qpn, &stateless);
            }
        }
    }
}

/// Which program has made a QP.
fn program_of<E: EndpointHost>(turn: &Turn<'_, E>, qpn: Qpn) -> u64 {
    turn.nic.qp_owner(qpn).map_or(0, |owner| E::program_of(owner.cookie))
}

/// Whether a request of its peer has made a QP plain that was held.
fn is_plain<E: EndpointHost>(nic: &Nic<E>, qpn: Qpn) -> bool {
    nic.qp_state(qpn).is_some() && !nic.is_held(qpn) && nic.engine(qpn).is_none()
}

/// The QP, if it still waits, is one of plain RoCEv2.
fn resume_plain<E: EndpointHost>(turn: &mut Turn<'_, E>, qpn: Qpn) {
    if turn.nic.is_held(qpn) {
        turn.nic.resume_qp(turn.env, qpn, turn.now);
    }
}

/// The end that a QP was to become could not begin, and the peer counts on it.
pub(super) fn fail<E: EndpointHost>(turn: &mut Turn<'_, E>, qpn: Qpn, error: NicError) {
    turn.env.note(qpn, &Note::Failed(error));
    let to = QpAttr { state: QpState::Err, ..QpAttr::default() };
    if turn.nic.modify_qp(turn.env, qpn, &to, QpAttrMask::STATE, turn.now).is_ok() {
        turn.env.event(AsyncEvent::QpFatal(qpn));
    }
}
