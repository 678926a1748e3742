//! The way back: a connection of StaR becomes one of plain RoCEv2 again, while it runs and unseen by its
//! programs.
//!
//! Either end asks (Return). An end that it suits begins nothing new and says so (Resting), and so does who
//! asked. SF knows when all that began is over, at both ends, and says how much that was (Halted): from then
//! on nothing begins there before SL has answered. SL, once all of it is complete in its host's memory, too,
//! goes back to its card and says so (Home), or goes on (Stay). So SL is plain before SF is, and each of its
//! plain requests says the same as Home.
//!
//! Either end may say Stay for itself before that: SL until it is home, SF until it has said Halted. SF asks
//! again what SL is until it knows. Messages in, messages out, each with the round's number ([`Renewed`]).

use starverbs_core::{Nanos, Psn};

use super::channel::timeout;
use super::control::{Control, Role, Wish};
use super::negotiate::{Beginning, Terms};
use super::renew::{ASKS, LOOK, REST, Renewed};

/// How far SF has come when nothing is under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Done {
    /// Sequence of the first WQE of SL's send queue that is not done
    pub sends: Psn,
    /// Of its receive queue
    pub recvs: Psn,
}

/// What becomes of SL's end when SF has come to rest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Came {
    /// It is plain RoCEv2
    Home,
    /// Something is not complete yet
    Later,
    /// It cannot be
    Never,
}

/// One end of the connection, as its card or its library has it.
pub trait Half {
    /// Nothing new begins. False: it is ending, or no end of StaR that has begun.
    fn rest(&mut self) -> bool;
    /// What waited begins, as StaR's.
    fn resume(&mut self);
    /// SF: if nothing is under way it stays so, and this is how far it has come.
    fn halt(&mut self) -> Option<Done>;
    /// SL: goes home, if all that SF has done is complete.
    fn go_home(&mut self, done: Done) -> Came;
    /// SL: SF has not answered its first word, and may never have heard it.
    fn is_beginning(&self) -> bool;
    /// SF: SL is plain RoCEv2, so it is, too.
    fn settle(&mut self);
    /// SF: a plain request of SL has settled that.
    fn is_settled(&self) -> bool;
    /// SF: for how long its program bears silence, if requests wait.
    fn waits(&self) -> Option<Option<Nanos>>;
}

/// How it ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Plain RoCEv2
    Home,
    /// StaR still
    Stays,
}

/// How far it is.
#[derive(Clone, Copy, Debug)]
enum Stage {
    /// Nothing rests
    Asking,
    /// Until then at most
    Resting { until: Nanos },
    /// SF: SL may be home
    Halted(Done),
    /// Over
    Over(Outcome),
}

/// A round at one end.
#[derive(Clone, Debug)]
pub struct Homing {
    round: u16,
    role: Role,
    mine: Terms,
    stage: Stage,
    /// When something is to be said or looked at
    due: Nanos,
    tries: u32,
    waiting: Beginning,
    /// What waits does not wait for ever
    ends: bool,
}

/// Beyond how many connections a card that has become one of few takes no more back: a quarter below the
/// number from which on it is rid of them, so that none goes to and fro.
pub fn few(threshold: u32) -> u32 {
    threshold - threshold / 4
}

/// Whether an end goes home. One whose card keeps the state may do so for itself, unless its program wants no
/// other role; one that left its card comes back if that has room for it, or at its program's wish.
pub fn suits(role: Role, mine: &Terms, theirs: &Terms) -> bool {
    let home = match role {
        Role::Stateful => mine.wish != Wish::Stateful,
        Role::Stateless => mine.wish != Wish::Stateless && mine.stateful < few(mine.threshold),
    };
    /* a program that wants another role is not kept */
    home || role == Role::Stateless && mine.wish == Wish::Auto && theirs.wish != Wish::Auto
}

impl Homing {
    /// Asks the peer.
    pub fn ask(round: u16, role: Role, mine: Terms, now: Nanos) -> Self {
        let waiting = Beginning::default();
        Homing { round, role, mine, stage: Stage::Asking, due: now, tries: 0, waiting, ends: false }
    }

    /// The peer has asked, and it [`suits`] this end. `None`: it cannot rest.
    pub fn asked(
        round: u16,
        role: Role,
        mine: Terms,
        now: Nanos,
        half: &mut (impl Half + ?Sized),
    ) -> Option<Self> {
        let stage = Stage::Resting { until: now + REST };
        half.rest().then(|| Homing { stage, ..Homing::ask(round, role, mine, now) })
    }

    /// Which round it is.
    pub fn round(&self) -> u16 {
        self.round
    }

    /// Whether SF has come to rest: it waits for its peer's word alone.
    pub fn is_halted(&self) -> bool {
        matches!(self.stage, Stage::Halted(_))
    }

    /// Whether there is more to come than questions, again and again, to a peer that says nothing: requests
    /// that wait for it fail in the end.
    pub fn is_pressing(&self) -> bool {
        !self.is_halted() || self.tries < 2 * SELDOM || self.ends
    }

    /// How it ended; `None`: it has not.
    pub fn outcome(&self) -> Option<Outcome> {
        match self.stage {
            Stage::Over(outcome) => Some(outcome),
            _ => None,
        }
    }

    /// When [`poll`](Homing::poll) has something to do.
    pub fn deadline(&self) -> Option<Nanos> {
        self.outcome().is_none().then_some(self.due)
    }

    /// Time has passed; gives what is to be said now.
    pub fn poll(&mut self, now: Nanos, half: &mut (impl Half + ?Sized)) -> Option<Renewed> {
        if matches!(self.stage, Stage::Halted(_)) && self.is_settled(now, half) {
            self.peer_is_home(half);
        }
        let said = match self.stage {
            Stage::Over(_) => None,
            Stage::Asking if now < self.due => None,
            Stage::Asking if self.tries >= ASKS => {
                self.stage = Stage::Over(Outcome::Stays);
                None
            }
            Stage::Asking => {
                self.due = now + timeout(self.tries);
                self.tries += 1;
                let Terms { wish, stateful, threshold, .. } = self.mine;
                Some(Control::Return { wish, stateful, threshold })
            }
            Stage::Resting { until } => match half_rests(self.role, half) {
                Some(done) => Some(self.halted(now, done)),
                None if now >= until => Some(self.stay(half)),
                None if now < self.due => None,
                None => {
                    self.due = (now + LOOK).min(until);
                    Some(Control::Resting { drained: false })
                }
            },
            Stage::Halted(_) if now < self.due => None,
            Stage::Halted(_) => match half.halt() {
                Some(done) => Some(self.halted(now, done)),
                None => Some(self.stay(half)),
            },
        };
        said.map(|message| self.of_round(message))
    }

    /// The peer says something in this round; gives the answer.
    pub fn handle(
        &mut self,
        now: Nanos,
        message: &Control,
        half: &mut (impl Half + ?Sized),
    ) -> Option<Renewed> {
        if let Stage::Asking = self.stage
            && matches!(message, Control::Resting { .. } | Control::Return { .. } | Control::Halted(_))
        {
            if !half.rest() {
                let message = self.stay(half);
                return Some(self.of_round(message));
            }
            (self.stage, self.due) = (Stage::Resting { until: now + REST }, now);
        }
        let said = match (*message, self.stage) {
            (Control::Halted(done), Stage::Resting { .. }) if self.role == Role::Stateless => {
                match half.go_home(done) {
                    Came::Home => {
                        self.stage = Stage::Over(Outcome::Home);
                        Some(Control::Home)
                    }
                    Came::Later => None,
                    Came::Never => Some(self.stay(half)),
                }
            }
            (Control::Home, Stage::Halted(_)) => {
                self.peer_is_home(half);
                None
            }
            /* SF has given it up before it began, and begins no more */
            (Control::Home, Stage::Asking | Stage::Resting { .. }) if half.is_beginning() && half.rest() => {
                (self.stage, self.due) = (Stage::Resting { until: now + REST }, now);
                if half.go_home(Done::default()) == Came::Home {
                    self.stage = Stage::Over(Outcome::Home);
                }
                None
            }
            (Control::Stay, Stage::Asking | Stage::Resting { .. } | Stage::Halted(_)) => {
                self.stay(half);
                None
            }
            /* it has not heard how far this end is */
            (Control::Return { .. } | Control::Resting { .. }, Stage::Halted(done)) => {
                Some(Control::Halted(done))
            }
            (Control::Return { .. } | Control::Resting { .. }, Stage::Resting { .. }) => {
                return self.poll(now, half);
            }
            _ => None,
        };
        said.map(|message| self.of_round(message))
    }

    /// SF: SL is plain, as it says what only such an end does.
    pub fn peer_is_home(&mut self, half: &mut (impl Half + ?Sized)) {
        if let Stage::Halted(_) = self.stage {
            half.settle();
            self.stage = Stage::Over(Outcome::Home);
        }
    }

    /// The connection goes on as StaR's; gives what tells the peer. SL alone may end so when SF has come to
    /// rest.
    pub fn stay(&mut self, half: &mut (impl Half + ?Sized)) -> Control {
        self.stage = Stage::Over(Outcome::Stays);
        half.resume();
        Control::Stay
    }

    /// Whether SL is plain, as a request of it says; or silent for longer than what waits here may wait: then
    /// requests find out.
    fn is_settled(&mut self, now: Nanos, half: &(impl Half + ?Sized)) -> bool {
        let waits = half.waits();
        self.ends = waits.flatten().is_some();
        half.is_settled() || self.waiting.is_overdue(now, waits.is_some(), waits.flatten())
    }

    fn halted(&mut self, now: Nanos, done: Done) -> Control {
        if !matches!(self.stage, Stage::Halted(_)) {
            (self.stage, self.tries) = (Stage::Halted(done), 0);
        }
        /* SL may be gone, and nothing wait for it: ever more seldom, to four seconds */
        let seldom = || Beginning::LOOK << (self.tries / SELDOM - 1).min(4);
        let wait = if self.tries < SELDOM { timeout(self.tries) } else { seldom() };
        self.due = now + wait;
        self.tries = self.tries.saturating_add(1);
        Control::Halted(done)
    }

    fn of_round(&self, message: Control) -> Renewed {
        Renewed { round: self.round, message }
    }
}

/// After so many times SL is asked more seldom what it is.
const SELDOM: u32 = 16;

fn half_rests(role: Role, half: &mut (impl Half + ?Sized)) -> Option<Done> {
    if role == Role::Stateful { half.halt() } else { None }
}

/// What an end without that round says to a message of one. `star`: whether it is StaR's.
pub fn answer(renewed: &Renewed, star: bool) -> Option<Renewed> {
    let message = match renewed.message {
        Control::Halted(_) if star => Control::Stay,
        Control::Halted(_) => Control::Home,
        Control::Return { .. } if star => Control::Stay,
        Control::Return { .. } => Control::Home,
        _ => return None,
    };
    Some(Renewed { message, ..*renewed })
}

#[cfg(test)]
#[path = "homing_tests.rs"]
mod tests;
