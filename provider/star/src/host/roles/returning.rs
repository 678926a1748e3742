//! Connections of StaR that become plain RoCEv2 again while their programs run: as their stateless end's card
//! has room for them, as their stateful end's card has come to have too many, so that the other is to keep
//! them, or as a program wants another role.

use alloc::boxed::Box;

use starverbs_core::room::is_room_for;
use starverbs_core::{Nanos, Qpn};

use crate::card::stateful;
use crate::control::{Control, Role, Wish};
use crate::homing::{Half, Homing, Outcome as Ended, answer, suits};
use crate::negotiate::{Beginning, Negotiation, Outcome, Terms};
use crate::quiesce::Resting;
use crate::renew::{Renewed, is_new};

use super::super::library::{Library, Stateless};
use super::super::{Host, Note, Turn};
use super::renewing::say_again;
use super::{End, Identity, Roles};

/// Within such a time a stateful end answers the first word of its peer, where that comes through at all.
const FIRST_WORD: Nanos = 100_000_000;

impl<E: Host> Roles<E> {
    /// Asks the peer of an end of StaR to be plain RoCEv2 with it.
    pub(super) fn ask_back(&mut self, turn: &mut Turn<'_, E>, library: &mut Library<E>, qpn: Qpn) {
        let Some(end) = self.ends.get(qpn) else { return };
        let (Some((role, has_begun)), wish, av) = (settled(turn, library, end), end.wish, end.av) else {
            return;
        };
        let mine = self.terms(turn, (qpn, wish), &av);
        let Some(end) = self.ends.get_mut(qpn).filter(|end| end.renewing.is_idle()) else { return };
        if !is_room_for(size_of::<Homing>()) {
            return;
        }
        let round = end.renewing.next_round();
        end.renewing.gives_up = !has_begun;
        end.renewing.homing = Some(Box::new(Homing::ask(round, role, mine, turn.now)));
        self.balance.ask_for(&mut end.renewing);
        self.go_home(turn, library, qpn, None);
    }

    /// The peer of an end says something on the way back; false: it is not of that.
    pub(super) fn hear_of_return(
        &mut self,
        turn: &mut Turn<'_, E>,
        library: &mut Library<E>,
        qpn: Qpn,
        said: &Renewed,
    ) -> bool {
        let Some(end) = self.ends.get(qpn) else { return true };
        let round = end.renewing.homing.as_ref().map(|homing| homing.round());
        if round == Some(said.round) {
            self.go_home(turn, library, qpn, Some(&said.message));
            return true;
        }
        let new = is_new(said.round, end.renewing.last);
        match said.message {
            /* only a plain end says that */
            Control::Renew { .. } if new && round.is_some() => {
                self.with_homing(turn, library, qpn, |homing, half| homing.peer_is_home(half));
                self.end_homing(turn, qpn);
                return false;
            }
            Control::Return { wish, stateful, threshold } if new => {
                let gid = end.av.dgid;
                let theirs = Terms { wish, stateful, threshold, gid, qpn: end.peer };
                if self.peer_returns(turn, library, qpn, (said.round, &theirs)) {
                    return true;
                }
            }
            Control::Return { .. } | Control::Halted(_) => {}
            Control::Home | Control::Stay => return true,
            _ => return false,
        }
        let Some(end) = self.ends.get(qpn).filter(|end| !end.renewing.lasts()) else { return true };
        if let Some(answer) = answer(said, end.is_star()) {
            say_again(turn, (qpn, end.peer), &end.av, &answer);
        }
        true
    }

    /// The peer asks. Whether that suits this end, and a round has begun.
    fn peer_returns(
        &mut self,
        turn: &mut Turn<'_, E>,
        library: &mut Library<E>,
        qpn: Qpn,
        (round, theirs): (u16, &Terms),
    ) -> bool {
        /* it has given up one that it does not know of any more */
        self.with_homing(turn, library, qpn, |homing, half| {
            homing.stay(half);
        });
        self.end_homing(turn, qpn);
        let Some(end) = self.ends.get_mut(qpn) else { return false };
        end.renewing.last = round;
        let (wish, av, deaf) = (end.wish, end.av, end.renewing.is_deaf(turn.now));
        let Some((role, has_begun)) = settled(turn, library, end) else { return false };
        let mine = self.terms(turn, (qpn, wish), &av);
        let agrees = !has_begun || !deaf && suits(role, &mine, theirs);
        if !agrees || !is_room_for(size_of::<Homing>()) {
            return false;
        }
        let now = turn.now;
        let asked = with_half(turn, library, (qpn, role), |half| Homing::asked(round, role, mine, now, half));
        let (Some(homing), Some(end)) = (asked, self.ends.get_mut(qpn)) else { return false };
        end.renewing.homing = Some(Box::new(homing));
        (end.renewing.asked, end.renewing.gives_up) = (false, !has_begun);
        self.go_home(turn, library, qpn, None);
        true
    }

    /// Goes on with a round: hears what the peer says, or says what is due.
    pub(super) fn go_home(
        &mut self,
        turn: &mut Turn<'_, E>,
        library: &mut Library<E>,
        qpn: Qpn,
        said: Option<&Control>,
    ) {
        let now = turn.now;
        let answer = self.with_homing(turn, library, qpn, |homing, half| match said {
            Some(said) => homing.handle(now, said, half),
            None => homing.poll(now, half),
        });
        let Some(end) = self.ends.get(qpn) else { return };
        if let Some(answer) = answer.flatten() {
            say_again(turn, (qpn, end.peer), &end.av, &answer);
        }
        if let Some(due) = end.renewing.homing.as_ref().and_then(|homing| homing.deadline()) {
            self.timers.arm(end.timer, due.max(now + 1), qpn);
            return self.give_back_place(qpn);
        }
        self.end_homing(turn, qpn);
    }

    /// An end that waits for its peer's word, perhaps for long, keeps the card from asking for no other.
    fn give_back_place(&mut self, qpn: Qpn) {
        let Some(end) = self.ends.get_mut(qpn) else { return };
        let halted = end.renewing.homing.as_ref().is_some_and(|homing| homing.is_halted());
        if halted {
            self.balance.give_back(&mut end.renewing);
        }
    }

    fn with_homing<R>(
        &mut self,
        turn: &mut Turn<'_, E>,
        library: &mut Library<E>,
        qpn: Qpn,
        call: impl FnOnce(&mut Homing, &mut dyn Half) -> R,
    ) -> Option<R> {
        let end = self.ends.get_mut(qpn)?;
        let role = end.role()?;
        let homing = end.renewing.homing.as_mut()?;
        Some(with_half(turn, library, (qpn, role), |half| call(homing, half)))
    }

    /// A round is over, perhaps.
    fn end_homing(&mut self, turn: &mut Turn<'_, E>, qpn: Qpn) {
        let Some(end) = self.ends.get_mut(qpn) else { return };
        let Some(outcome) = end.renewing.homing.as_ref().and_then(|homing| homing.outcome()) else { return };
        self.timers.disarm(end.timer);
        self.balance.stop(&mut end.renewing);
        let gave_up = core::mem::take(&mut end.renewing.gives_up);
        if outcome == Ended::Stays && gave_up {
            return self.watch_beginning(turn.now, qpn);
        }
        if outcome == Ended::Stays {
            turn.env.note(qpn, &Note::Stays);
            end.renewing.failed(turn.now);
            return self.pursue_later(qpn);
        }
        turn.env.note(qpn, &Note::Returns);
        let (wish, av) = (end.wish, end.av);
        let mine = self.terms(turn, (qpn, wish), &av);
        let Identity { boot, ports, .. } = self.identity;
        let crowded = mine.stateful > mine.threshold;
        let Some(end) = self.ends.get_mut(qpn) else { return };
        end.negotiation = Negotiation::settled(mine, boot, ports, Outcome::Plain);
        end.may_begin = true;
        end.beginning = Beginning::default();
        match gave_up {
            true => end.renewing.failed(turn.now),
            false => end.renewing.returned(turn.now, crowded),
        }
        let until = end.renewing.rests_until;
        self.balance.look_at(until);
        self.stats.star_plain_qps.inc();
        self.stats.star_returns.inc();
        self.lives.end(qpn, turn.now);
        self.pursue_later(qpn);
    }

    /// An end of StaR that was a plain one looks at times whether its peer has begun, too. What travels on
    /// StaR's ports may not come through.
    pub(super) fn watch_beginning(&mut self, now: Nanos, qpn: Qpn) {
        let Some(end) = self.ends.get(qpn) else { return };
        if end.waits_for_peer() {
            self.look_later(now, qpn);
        } else if end.renewing.switched {
            self.timers.arm(end.timer, now + FIRST_WORD, qpn);
        } else {
            self.pursue_later(qpn);
        }
    }

    /// The program wants an end to be this from now on. False: its peer's card has no StaR, or the end had no
    /// wish when it got its peer.
    pub fn wish(&mut self, turn: &mut Turn<'_, E>, library: &mut Library<E>, qpn: Qpn, wish: Wish) -> bool {
        let Some(end) = self.ends.get_mut(qpn) else { return false };
        let settled = end.negotiation.outcome().is_some();
        if settled && !end.negotiation.heard() && !self.plain.speaks(&end.av.dgid) {
            return false;
        }
        (end.wish, end.pursued) = (wish, wish != Wish::Auto);
        (end.renewing.rests_until, end.renewing.deaf_until) = (turn.now, turn.now);
        if settled && end.renewing.is_idle() {
            self.pursue(turn, library, qpn);
        }
        true
    }

    /// Asks for what the program of an end wants it to be.
    pub(super) fn pursue(&mut self, turn: &mut Turn<'_, E>, library: &mut Library<E>, qpn: Qpn) {
        let Some(end) = self.ends.get_mut(qpn).filter(|end| end.pursued && end.renewing.is_idle()) else {
            return;
        };
        let role = end.role();
        match (end.wish, role) {
            (Wish::Auto, _)
            | (Wish::Off, None)
            | (Wish::Stateless, Some(Role::Stateless))
            | (Wish::Stateful, Some(Role::Stateful)) => end.pursued = false,
            (_, None) if end.is_plain() => self.ask(turn, library, qpn),
            (_, Some(_)) if begun(turn, library, end).is_some() => self.ask_back(turn, library, qpn),
            _ => {}
        }
        /* it could not ask now */
        if let Some(end) = self.ends.get_mut(qpn).filter(|end| end.pursued && end.renewing.is_idle()) {
            end.renewing.rests_until = end.renewing.rests_until.max(turn.now + Beginning::LOOK);
        }
        self.pursue_later(qpn);
    }

    /// If the program of an end, in which no round lasts, wants something else, it asks again.
    pub(super) fn pursue_later(&mut self, qpn: Qpn) {
        if let Some(end) = self.ends.get(qpn).filter(|end| end.pursued && end.renewing.is_idle()) {
            self.timers.arm(end.timer, end.renewing.rests_until, qpn);
        }
    }
}

impl End {
    /// What it has become of StaR.
    pub(super) fn role(&self) -> Option<Role> {
        match self.negotiation.outcome() {
            Some(Outcome::Star { role, .. }) => Some(role),
            _ => None,
        }
    }
}

/// What an end of StaR is that has begun, and whose peer has, so that it waits for no word of the round that
/// settled it.
pub(super) fn begun<E: Host>(turn: &Turn<'_, E>, library: &Library<E>, end: &End) -> Option<Role> {
    let role = end.role()?;
    let there = match role {
        Role::Stateless => library.has_begun(end.qpn),
        Role::Stateful => stateful(turn.nic, end.qpn).is_some(),
    };
    there.then_some(role)
}

/// As [`begun`], and true; or what an end is to be by a round that settled it, if the word with which SL
/// begins is not answered, or has not come: false.
fn settled<E: Host>(turn: &Turn<'_, E>, library: &Library<E>, end: &End) -> Option<(Role, bool)> {
    if let Some(role) = begun(turn, library, end) {
        return Some((role, true));
    }
    let role = end.role().filter(|_| end.renewing.switched)?;
    let waits = match role {
        Role::Stateless => library.is_beginning(end.qpn),
        Role::Stateful => end.waits_for_peer() && turn.nic.is_held(end.qpn),
    };
    waits.then_some((role, false))
}

fn with_half<E: Host, R>(
    turn: &mut Turn<'_, E>,
    library: &mut Library<E>,
    (qpn, role): (Qpn, Role),
    call: impl FnOnce(&mut dyn Half) -> R,
) -> R {
    match role {
        Role::Stateless => call(&mut Stateless { library, turn, qpn }),
        Role::Stateful => call(&mut Resting { turn, qpn }),
    }
}
