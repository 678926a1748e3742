//! Which queue pairs are ends of StaR connections: what their programs wish, what is settled with their
//! peers, and when that begins. `renewing` settles it anew while a connection of plain RoCEv2 runs,
//! `returning` makes one of StaR plain.

mod lives;
mod renewing;
mod returning;

use starverbs_core::nic::{Nic, TimerId, Timers};
use starverbs_core::qp::{QpAttr, QpAttrMask};
use starverbs_core::rtt::RttBounds;
use starverbs_core::{AsyncEvent, Av, FrameMeta, Gid, Nanos, NicError, Psn, QpState, Qpn};

use crate::card::StarInit;
use crate::channel::Channel;
use crate::control::{Control, MAX_CONTROL, Role, Setup, Wish};
use crate::datagram;
use crate::form::Form;
use crate::library::Patience;
use crate::negotiate::{Beginning, Negotiation, Outcome, PlainPeers, Terms};
use crate::renew::Renewed;
use crate::seal::{Ends, MAX_SEALED};
use crate::stateful::{Peer, WINDOW};
use crate::stateless::{self, send_control};
use crate::wire::{Packet, Prefix, Ptype};

use super::library::Library;
use super::places::ByQpn;
use super::{Heard, Host, Note, Turn, queues_of};
use lives::Lives;
use renewing::{Balance, Renewing};

/// For how long an address of which nothing was heard is taken for one without StaR.
const REMEMBERED: Nanos = 10_000_000_000;

/// Who this card is to peers.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    /// Which life of the card this is
    pub boot: u64,
    /// UDP ports of its stateless half and of its stateful one
    pub ports: [u16; 2],
    /// From how many connections on it wants to keep the state of no more
    pub threshold: u32,
    /// Which packets it sends
    pub form: Form,
}

impl Identity {
    /// What epochs tell of the life.
    pub fn life(&self) -> u16 {
        self.boot as u16
    }
}

/// A QP that may be an end of a StaR connection, from RTR on.
struct End {
    qpn: Qpn,
    av: Av,
    peer: Qpn,
    wish: Wish,
    /// It is not what the program has said since it began
    pursued: bool,
    negotiation: Negotiation,
    timer: TimerId,
    /// A half of StaR may begin on it
    may_begin: bool,
    beginning: Beginning,
    renewing: Renewing,
}

impl End {
    /// Whether it is to be a stateful end once its peer begins.
    fn waits_for_peer(&self) -> bool {
        self.is_star() && self.may_begin
    }
}

/// All of them.
pub struct Roles<E: Host> {
    identity: Identity,
    ends: ByQpn<End>,
    /// Of those that are stateful ends, or were: what comes late of a life that is over begins nothing
    lives: Lives,
    timers: Timers,
    plain: PlainPeers,
    balance: Balance,
    stats: E::Stats,
}

impl<E: Host> Roles<E> {
    /// Nobody has asked yet.
    pub fn new(identity: Identity, stats: E::Stats) -> Self {
        let (timers, plain) = (Timers::default(), PlainPeers::default());
        let (ends, lives, balance) = (ByQpn::default(), Lives::default(), Balance::default());
        Roles { identity, ends, lives, timers, plain, balance, stats }
    }

    /// From now on the card has too many connections beyond another number, as where it is to keep fewer of
    /// them.
    pub fn set_threshold(&mut self, threshold: u32, now: Nanos) {
        self.identity.threshold = threshold;
        self.balance.look_now(now);
    }

    /// A QP of this wish is in RTR now: asks its peer. The QP is in its state already, so what stands in the
    /// way leaves it plain RoCEv2.
    pub fn begin(&mut self, turn: &mut Turn<'_, E>, library: &mut Library<E>, (qpn, wish): (Qpn, Wish)) {
        self.end(qpn);
        match self.hold(turn, (qpn, wish)) {
            /* its card has room for few contexts, and for this one: it says so if it is asked, and may ask
            later */
            Ok(true) if self.outcome(qpn).is_some() => self.settled(turn, library, qpn),
            Ok(true) => self.go_on(turn, library, qpn, None),
            Ok(false) => {}
            Err(refused) => {
                turn.env.note(qpn, &Note::Unsuited(refused));
            }
        }
    }

    /// Has the QP wait for its peer, if there is something to ask it; says whether.
    fn hold(&mut self, turn: &mut Turn<'_, E>, (qpn, wish): (Qpn, Wish)) -> Result<bool, NicError> {
        let attr = turn.nic.query_qp(qpn)?;
        let mine = self.terms(turn, (qpn, wish), &attr.av);
        let Identity { boot, ports, .. } = self.identity;
        let never = mine.wish == Wish::Off && wish != Wish::Auto;
        if never || self.plain.is_plain(&attr.av.dgid, turn.now) {
            return Ok(false);
        }
        self.ends.make_room(qpn)?;
        let timer = self.timers.join()?;
        turn.nic.hold_qp(qpn).inspect_err(|_| self.timers.leave(timer))?;
        let end = End {
            qpn,
            av: attr.av,
            peer: attr.dest_qpn,
            wish,
            pursued: false,
            negotiation: Negotiation::new(mine, boot, ports, turn.now),
            timer,
            may_begin: true,
            beginning: Beginning::default(),
            renewing: Renewing::default(),
        };
        self.ends.insert(qpn, end);
        self.lives.end(qpn, turn.now);
        Ok(true)
    }

    /// What the choice depends on, now.
    fn terms(&self, turn: &Turn<'_, E>, (qpn, wish): (Qpn, Wish), av: &Av) -> Terms {
        let (stateful, threshold) = (turn.nic.connection_count(), self.identity.threshold);
        let wish = possible(wish, turn.nic.has_few_contexts(), stateful > threshold);
        Terms { wish, stateful, threshold, gid: av.sgid, qpn }
    }

    /// The QP is gone.
    pub fn forget(&mut self, qpn: Qpn) {
        self.end(qpn);
        self.lives.forget(qpn);
    }

    /// The QP leaves RTR or RTS.
    pub fn end(&mut self, qpn: Qpn) {
        if let Some(mut end) = self.ends.remove(qpn) {
            self.timers.leave(end.timer);
            self.balance.stop(&mut end.renewing);
            if end.negotiation.outcome() == Some(Outcome::Plain) {
                self.stats.star_plain_qps.sub(1);
            }
        }
    }

    /// The QP is in ERR: what was settled stands, and nothing begins any more.
    pub fn stop(&mut self, qpn: Qpn) {
        match self.ends.get_mut(qpn) {
            Some(end) if end.negotiation.outcome().is_some() => {
                end.may_begin = false;
                self.balance.stop(&mut end.renewing);
                self.timers.disarm(end.timer);
            }
            _ => self.end(qpn),
        }
    }

    /// What was settled for a QP. `None`: nothing yet, or it has no wish.
    pub fn outcome(&self, qpn: Qpn) -> Option<Outcome> {
        self.ends.get(qpn)?.negotiation.outcome()
    }

    /// A peer says something.
    pub fn handle(&mut self, turn: &mut Turn<'_, E>, library: &mut Library<E>, heard: &Heard) {
        let Some(said) = understand(turn, heard) else { return };
        let ours = self.ends.get(heard.to);
        if ours.is_some_and(|end| end.av.dgid == heard.source && end.peer == heard.from) {
            self.plain.heard(&heard.source);
            return match said {
                Said::First(said) => self.go_on(turn, library, heard.to, Some(&said)),
                Said::Again(said) => self.hear_again(turn, library, heard.to, &said),
            };
        }
        let Said::First(said) = said else { return };
        let meta = FrameMeta { src: heard.source, ..FrameMeta::default() };
        if let Some(answer) = datagram::answer(turn.nic, &meta, (heard.from, heard.to), &said) {
            self.plain.heard(&heard.source);
            let av = Av { dgid: heard.source, sgid: heard.at, hop_limit: 64, ..Av::default() };
            say(turn, (heard.to, heard.from), &av, |room| answer.encode(room));
        }
    }

    /// Asks again where it is time.
    pub fn handle_timeout(&mut self, turn: &mut Turn<'_, E>, library: &mut Library<E>) {
        while let Some(qpn) = self.timers.pop_due(turn.now) {
            match self.ends.get(qpn) {
                Some(end) if end.renewing.lasts() => self.renew(turn, library, qpn, None),
                Some(end) if end.renewing.homing.is_some() => self.go_home(turn, library, qpn, None),
                Some(end) if end.waits_for_peer() => self.look_for_peer(turn, qpn),
                /* whom StaR's ports do not reach RoCEv2's does */
                Some(end) if end.renewing.switched && library.is_beginning(qpn) => {
                    self.watch_beginning(turn.now, qpn);
                    self.ask_back(turn, library, qpn);
                }
                Some(end) if end.pursued && end.negotiation.outcome().is_some() => {
                    self.pursue(turn, library, qpn);
                }
                _ => self.go_on(turn, library, qpn, None),
            }
        }
    }

    /// Whether there is something to do but to look, again and again, for peers for which no request waits.
    pub fn is_busy(&self, nic: &Nic<E>) -> bool {
        self.ends.all().any(|end| {
            let waits = end.waits_for_peer() && nic.has_posts(end.qpn);
            waits || end.negotiation.outcome().is_none() || end.renewing.is_busy()
        })
    }

    /// When there is something to do.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.timers.next()
    }

    /// Goes on with what is not settled for a QP: hears what its peer says, or asks.
    fn go_on(&mut self, turn: &mut Turn<'_, E>, library: &mut Library<E>, qpn: Qpn, said: Option<&Control>) {
        let Some(end) = self.ends.get_mut(qpn) else { return };
        if said == Some(&Control::Plain) && end.waits_for_peer() && end.beginning.has_asked() {
            return self.withdraw(turn, qpn);
        }
        let before = end.negotiation.outcome();
        if before.is_none() && !turn.nic.is_held(qpn) {
            /* a request of plain RoCEv2 came */
            end.negotiation.plain();
        }
        if self.plain.speaks(&end.av.dgid) {
            end.negotiation.trust();
        }
        if let Ok(attr) = turn.nic.query_qp(qpn)
            && attr.state == QpState::Rts
        {
            end.negotiation.bear(Patience::of(attr.timeout, attr.retry_cnt).time);
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
    fn settled(&mut self, turn: &mut Turn<'_, E>, library: &mut Library<E>, qpn: Qpn) {
        let Some(end) = self.ends.get_mut(qpn) else { return };
        let Some(outcome) = end.negotiation.outcome() else { return };
        match outcome {
            Outcome::Plain => {
                turn.env.note(qpn, &Note::Plain);
                self.stats.star_plain_qps.inc();
                self.balance.look_at(turn.now);
                if !end.negotiation.heard() && end.negotiation.has_offered() {
                    self.plain.note(end.av.dgid, end.negotiation.gave_up(), turn.now + REMEMBERED);
                }
                resume_plain(turn, qpn);
                self.pursue_later(qpn);
            }
            Outcome::Star { role: Role::Stateless, boot, ports } => {
                turn.env.note(qpn, &Note::Begun(Role::Stateless));
                if !core::mem::take(&mut end.may_begin) {
                    return;
                }
                match library.begin(turn, qpn, (boot, ports)) {
                    Ok(()) => self.watch_beginning(turn.now, qpn),
                    Err(error) => {
                        if !self.take_back(turn, qpn) {
                            fail(turn, qpn, error);
                        }
                    }
                }
            }
            /* it begins when the other end says what it is */
            Outcome::Star { role: Role::Stateful, .. } => self.look_for_peer(turn, qpn),
        }
    }

    /// The peer of a stateful end is to begin: if it does not, and requests wait, it is gone.
    fn look_for_peer(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn) {
        let Some(end) = self.ends.get_mut(qpn).filter(|end| end.may_begin) else { return };
        let Ok(attr) = turn.nic.query_qp(qpn) else { return };
        let patience = Patience::of(attr.timeout, attr.retry_cnt).time;
        let overdue = end.beginning.is_overdue(turn.now, turn.nic.has_posts(qpn), patience);
        if overdue || !turn.nic.is_held(qpn) {
            return self.withdraw(turn, qpn);
        }
        self.ask_again(turn, qpn);
        self.look_later(turn.now, qpn);
    }

    /// Asks a peer that does not begin what it is, while requests wait for it: it may have given up, and be
    /// plain.
    fn ask_again(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn) {
        let Some(end) = self.ends.get(qpn) else { return };
        if end.renewing.switched {
            self.tell_again(turn, qpn);
        } else if end.beginning.has_asked() {
            say(turn, (qpn, end.peer), &end.av, |room| end.negotiation.offer().encode(room));
        }
    }

    fn look_later(&mut self, now: Nanos, qpn: Qpn) {
        if let Some(end) = self.ends.get(qpn) {
            self.timers.arm(end.timer, now + Beginning::LOOK, qpn);
        }
    }

    /// The other end of what was settled is not there, or does not begin: this one is of plain RoCEv2.
    fn withdraw(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn) {
        let Some(end) = self.ends.get_mut(qpn) else { return };
        turn.env.note(qpn, &Note::Alone);
        self.timers.disarm(end.timer);
        end.negotiation.abandon();
        end.beginning = Beginning::default();
        end.renewing.failed(turn.now);
        self.balance.look_at(end.renewing.rests_until);
        self.stats.star_plain_qps.inc();
        resume_plain(turn, qpn);
        self.pursue_later(qpn);
    }

    /// The first control message of a stateless end: its peer begins, or says that it cannot.
    pub fn begin_stateful(&mut self, turn: &mut Turn<'_, E>, source: &Gid, packet: &Packet<'_>) {
        let qpn = packet.header.qpn;
        let Some((setup, prefix)) = first_word(packet) else { return };
        let ours = self.ends.get(qpn).is_some_and(|end| *source == end.av.dgid && prefix.qpn == end.peer);
        let over = self.lives.is_over(turn.now, qpn, (*source, prefix.qpn), prefix.epoch);
        /* SL has asked whether it may give up, and may have done so */
        let gives_up = self.ends.get(qpn).is_some_and(|end| end.renewing.gives_up);
        if !ours || over || gives_up || !self.may_begin(turn, qpn, &setup, &prefix) {
            return;
        }
        self.peer_began(turn, qpn);
        let Some(end) = self.ends.get_mut(qpn) else { return };
        /* it says so, and more */
        end.negotiation.handle((*source, prefix.qpn), &Control::Confirm { role: Role::Stateless });
        let Some(Outcome::Star { role: Role::Stateful, boot, ports: [port, control_port] }) =
            end.negotiation.outcome()
        else {
            return;
        };
        if setup.boot != boot {
            return;
        }
        self.timers.disarm(end.timer);
        let (av, epoch) = (end.av, prefix.epoch);
        let stateless = stateless::Peer { av, port: control_port, qpn: end.peer, epoch };
        if !core::mem::take(&mut end.may_begin) {
            return refuse(turn, qpn, &stateless);
        }
        let peer = Peer { av, port, control_port, qpn: end.peer, epoch };
        let mut channel = Channel::new();
        channel.took();
        let lifetime = RttBounds::default().lifetime;
        let begun = queues_of(turn, qpn).and_then(|queues| {
            let form = self.identity.form;
            let init = StarInit { queues, setup, peer, channel, window: WINDOW, form, lifetime };
            turn.begin_stateful(qpn, init)
        });
        match begun {
            Ok(()) => {
                turn.env.note(qpn, &Note::Begun(Role::Stateful));
                self.lives.note(qpn, (*source, prefix.qpn), epoch);
                self.balance.look_at(turn.now);
                self.pursue_later(qpn);
            }
            Err(error) => {
                fail(turn, qpn, error);
                refuse(turn, qpn, &stateless);
            }
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

/// Says to a stateless end, each time that it says its first word, that nobody is there: the QP is in ERR.
fn refuse<E: Host>(turn: &mut Turn<'_, E>, qpn: Qpn, to: &stateless::Peer) {
    send_control(turn.env, to, qpn, Psn::default(), Some(&Control::Bye { why: 0 }));
}

/// What an end can be now: a card with room for few contexts keeps no StaR connections, and has others keep
/// them when it has too many.
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
fn say<E: Host>(
    turn: &mut Turn<'_, E>,
    ends: (Qpn, Qpn),
    av: &Av,
    encode: impl FnOnce(&mut [u8; MAX_CONTROL]) -> Option<usize>,
) {
    let (mut plain, mut sealed) = ([0; MAX_CONTROL], [0; MAX_SEALED]);
    let Some(len) = encode(&mut plain) else { return };
    let (message, gids) = (plain.get(..len).unwrap_or_default(), (&av.sgid, &av.dgid));
    let (src, dst) = gids;
    let message = match turn.env.seal() {
        Some(seal) => {
            seal.seal_offer(Ends { src, dst }, ends, message, &mut sealed).and_then(|len| sealed.get(..len))
        }
        None => Some(message),
    };
    if let Some(message) = message {
        datagram::send(turn.env, ends, av, message);
    }
}

/// What a peer says. `None`: nothing that can be understood, or believed.
fn understand<E: Host>(turn: &mut Turn<'_, E>, heard: &Heard) -> Option<Said> {
    let mut room = [0; MAX_CONTROL];
    let (ends, qpns) = (Ends { src: &heard.source, dst: &heard.at }, (heard.from, heard.to));
    let said = match turn.env.seal() {
        Some(seal) => seal.open_offer(ends, qpns, heard.message(), &mut room),
        None => Ok(heard.message()),
    };
    let said = said.map_err(|error| error.count(turn.nic.counters())).ok()?;
    Renewed::decode(said).map(Said::Again).or_else(|| Control::decode(said).map(Said::First))
}

/// The QP, if it still waits, is one of plain RoCEv2.
fn resume_plain<E: Host>(turn: &mut Turn<'_, E>, qpn: Qpn) {
    if turn.nic.is_held(qpn) {
        turn.nic.resume_qp(turn.env, qpn, turn.now);
    }
}

/// The half that a QP was to become could not begin, and the peer counts on it.
pub(super) fn fail<E: Host>(turn: &mut Turn<'_, E>, qpn: Qpn, error: NicError) {
    turn.env.note(qpn, &Note::Failed(error));
    let to = QpAttr { state: QpState::Err, ..QpAttr::default() };
    if turn.nic.modify_qp(turn.env, qpn, &to, QpAttrMask::STATE, turn.now).is_ok() {
        turn.env.event(AsyncEvent::QpFatal(qpn));
    }
}
