//! Before a request of ours fails because SL's rules do not let it, SL is asked whether our card has them
//! all: SL does not wait for cards that it cannot reach, so that its program may have bound a window, or set
//! its QP anew, and may have told ours so on another way, before we hear it.

use starverbs_core::WcStatus;

use super::begin::Begin;
use super::stream::Class;
use super::{Card, Stateful};
use crate::control::{Control, Sum};
use crate::env::StarEnv;

/// So often SL is asked anew for one request, as its rules were others in between.
const ROUNDS: u8 = 4;

/// Where a question stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Inquiry {
    /// There is none
    None,
    /// SL was asked, and may be so often again
    Open(u8),
    /// SL has answered for this WQE of ours: it is judged by the rules that are here
    Answered(u32),
}

impl Inquiry {
    /// Whether SL has not answered.
    pub(super) fn is_open(self) -> bool {
        matches!(self, Inquiry::Open(_))
    }
}

impl<E: StarEnv> Stateful<E> {
    /// WQE `next` of ours is not allowed by what is known: it fails, or waits for what SL says.
    pub(super) fn refuse(&mut self, card: &Card<'_, E>, class: Class) -> Begin {
        if self.inquires(card) {
            return Begin::Wait;
        }
        card.stats.star_rejects.inc();
        Begin::failed(class, WcStatus::RemAccessErr)
    }

    /// Asks SL for WQE `next`. False: it has answered, or there is no memory to ask it.
    pub(super) fn inquires(&mut self, card: &Card<'_, E>) -> bool {
        if self.inquiry == Inquiry::Answered(self.streams[0].next)
            || self.channel.send(Control::Inquire).is_err()
        {
            return false;
        }
        self.inquiry = Inquiry::Open(ROUNDS);
        self.asks(card.now);
        self.arm(card.now + 1);
        true
    }

    /// SL says how many rules there are, and which: what comes from another connection of ours may still be
    /// under way. `None`: there is no memory to ask for them, and SL comes again.
    pub(super) fn hear_sum(&mut self, card: &Card<'_, E>, theirs: Sum) -> Option<()> {
        let Inquiry::Open(rounds) = self.inquiry else { return Some(()) };
        self.inquiry = if self.halted {
            /* SL may have left; if not, it is asked again when this goes on */
            Inquiry::None
        } else if rounds == 0 || card.registry.sum(self.seat) == Some(theirs) {
            Inquiry::Answered(self.streams[0].next)
        } else {
            self.channel.send(Control::Tell).ok()?;
            self.channel.send(Control::Inquire).ok()?;
            Inquiry::Open(rounds - 1)
        };
        Some(())
    }
}
