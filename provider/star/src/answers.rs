//! Answers of SL's card to packets that bring data or completions. Those to successive packets that came
//! together leave as one: RDAS, or an EA for several. So a card keeps what it owes for the last packets,
//! until the program has answered them or polls again, and whose token was right last; and, where packets
//! are lost, what it has answered last.

use starverbs_core::{Av, Gid};

use super::ahead::{Ahead, KEPT};
use super::env::{StarDest, StarEnv, StarSource};
use super::form::Form;
use super::token::{CardSecret, Token};
use super::wire::{PSN_STEP, Prefix, Ptype, StarHead, StarHeader};

mod repeat;

use repeat::Repeats;
pub use repeat::TURNS as TURNS_KEPT;

/// Packets that one answer is to, at most.
pub const MOST_ANSWERED: u16 = 128;

/// What a card owes for the packets that it has just handled.
#[derive(Debug, Default)]
pub struct Answers {
    form: Form,
    /// For data, and for completions
    owed: [Option<Run>; 2],
    /// What has left, where the wire loses packets
    repeats: Repeats,
    /// Where the last packet came from whose token was right, and what it named: the next is often the same
    /// connection's
    admitted: Option<(Gid, Prefix, Token)>,
    /// Packets that came before their turn
    pub(super) ahead: Ahead,
    /// The turn that was done last, its slot and number, where some are ahead
    pub(super) passed: Option<(u64, u32)>,
}

/// Packets of one connection, each the one behind that before it, without their answers.
#[derive(Debug)]
struct Run {
    to: Av,
    port: u16,
    /// RDA or EA of the last of them
    last: StarHeader,
    count: u16,
}

impl Run {
    /// Whether this answer is that to the next.
    fn goes_on(&self, from: &StarSource<'_>, next: &StarHeader) -> bool {
        let (last, meta) = (&self.last, from.meta);
        let of_one = match next.ptype {
            Ptype::Ea => next.opt.queue() == last.opt.queue() && next.psn == last.psn.plus(1),
            _ => next.psn == last.psn.plus(PSN_STEP),
        };
        of_one
            && (next.ptype, next.qpn, next.epoch) == (last.ptype, last.qpn, last.epoch)
            && (meta.src, meta.dst, from.port) == (self.to.dgid, self.to.sgid, self.port)
            && self.count < MOST_ANSWERED
    }

    /// Whether it goes on behind so many others, of which this is the last: then it answers them, too.
    fn begins_behind(&mut self, last: &StarHeader, count: u16) -> bool {
        let step = if last.ptype == Ptype::Ea { 1 } else { PSN_STEP };
        let goes_on = self.last.psn == last.psn.plus(step * u32::from(self.count))
            && (last.ptype, last.qpn, last.epoch) == (self.last.ptype, self.last.qpn, self.last.epoch)
            && (last.ptype != Ptype::Ea || last.opt.queue() == self.last.opt.queue())
            && self.count + count <= MOST_ANSWERED;
        self.count += if goes_on { count } else { 0 };
        goes_on
    }

    /// One fence is for all that it answers.
    fn send<E: StarEnv>(mut self, env: &mut E, repeats: &mut Repeats) {
        env.dma_fence();
        repeats.go_before(env, &mut self);
        send(env, StarDest { av: &self.to, port: self.port }, &self.last, self.count);
    }
}

/// To where a packet came from.
pub(super) fn back(from: &StarSource<'_>) -> Av {
    Av { dgid: from.meta.src, sgid: from.meta.dst, hop_limit: 64, ..Av::default() }
}

/// Packets that were early and are done with one that was missing, at most.
pub const MOST_AHEAD: usize = crate::ahead::PLACES as usize;

impl Answers {
    /// Of a card that sends packets of this form.
    pub fn new(form: Form) -> Self {
        Answers { form, ..Answers::default() }
    }

    /// Whether a packet from `source` has the token of what it names.
    #[inline]
    pub(super) fn admits(&mut self, secret: &CardSecret, source: &Gid, of: Prefix, token: &Token) -> bool {
        let named = (*source, of, *token);
        if self.admitted == Some(named) {
            return true;
        }
        let admitted = secret.admits(source, of, token);
        if admitted {
            self.admitted = Some(named);
        }
        admitted
    }

    /// The secret is another: no token of before is right.
    pub fn forget_token(&mut self) {
        self.admitted = None;
    }

    /// A connection begins: packets that come before their turn may be kept from now on, where there is
    /// memory for that, and none is of an earlier connection.
    pub fn begin(&mut self) {
        self.forget_ahead();
        self.repeats.forget();
        if self.form != Form::Paper {
            _ = self.ahead.make_room();
        }
    }

    /// Memory is taken away, or becomes another connection's: nothing is done any more that came before its
    /// turn.
    pub fn forget_ahead(&mut self) {
        self.ahead.clear();
    }

    /// An RD, RDC or CQEP is done. With those just before it, it gets one answer, at the latest by
    /// [`flush`](Answers::flush).
    pub(super) fn done<E: StarEnv>(&mut self, env: &mut E, from: &StarSource<'_>, packet: &StarHeader) {
        let (ptype, len) = match packet.ptype {
            Ptype::Cqep => (Ptype::Ea, 0),
            _ => (Ptype::Rda, packet.len),
        };
        let last = StarHeader { ptype, ack: false, len, ..*packet };
        if ptype == Ptype::Rda && self.form != Form::Paper {
            self.repeats.note(packet);
        }
        let Answers { owed, repeats, .. } = self;
        let owed = &mut owed[usize::from(ptype == Ptype::Ea)];
        match owed {
            Some(run) if run.goes_on(from, &last) => (run.last, run.count) = (last, run.count + 1),
            _ => {
                let run = Run { to: back(from), port: from.port, last, count: 1 };
                owed.replace(run).into_iter().for_each(|before| before.send(env, repeats));
                if self.form == Form::Paper {
                    self.flush(env);
                }
            }
        }
    }

    /// What has a turn is early: nothing of it is done, but it may be `kept` until it has its turn. The
    /// answer does not overtake those before it.
    pub(super) fn early<E: StarEnv>(
        &mut self,
        env: &mut E,
        from: &StarSource<'_>,
        packet: &StarHeader,
        kept: bool,
    ) {
        self.send_owed(env);
        let len = if kept { KEPT } else { 0 };
        let header = StarHeader { ptype: Ptype::Rda, ack: false, len, ..*packet };
        send_one(env, StarDest { av: &back(from), port: from.port }, header);
    }

    /// Packets of data whose answer is owed.
    #[inline]
    pub fn data_owed(&self) -> u32 {
        self.owed[0].as_ref().map_or(0, |run| run.count.into())
    }

    /// Whether an answer is owed.
    #[inline]
    pub fn is_owed(&self) -> bool {
        self.owed.iter().any(Option::is_some)
    }

    /// Sends what is owed; the turn is over.
    pub fn flush<E: StarEnv>(&mut self, env: &mut E) {
        self.send_owed(env);
        self.repeats.end_turn();
    }

    /// Sends what is owed, with others that will be in this turn.
    pub(super) fn send_owed<E: StarEnv>(&mut self, env: &mut E) {
        let Answers { owed, repeats, .. } = self;
        owed.iter_mut().filter_map(Option::take).for_each(|run| run.send(env, repeats));
    }
}

/// An answer to so many packets, of which this is the last one's.
fn send<E: StarEnv>(env: &mut E, to: StarDest<'_>, last: &StarHeader, count: u16) {
    let header = match (count, last.ptype) {
        (1, _) => *last,
        (len, Ptype::Ea) => StarHeader { len, ..*last },
        (len, _) => StarHeader { ptype: Ptype::Rdas, len, ..*last },
    };
    send_one(env, to, header);
}

fn send_one<E: StarEnv>(env: &mut E, to: StarDest<'_>, header: StarHeader) {
    env.send_star(to, &StarHead::to_stateful(header), &[], &[], false);
}
