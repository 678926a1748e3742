//! Before a request of ours fails for want of a rule, SL is asked whether our card has all of them. SL does
//! not wait for cards that do not answer: its program may have bound a window, or changed its QP, and our
//! program may know that by other ways before the rule arrives.

use starverbs_core::WcStatus;

use super::begin::Begin;
use super::rare::Rare;
use super::stream::OrderClass;
use super::{CardCtx, Stateful};
use crate::control::{Control, Sum};
use crate::env::StarEnv;

/// So often SL is asked again for one request, as its rules have changed meanwhile.
const ROUNDS: u8 = 4;

/// State of an inquiry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Inquiry {
    /// There is none
    None,
    /// SL was asked for a WQE of ours
    Open,
    /// SL has answered for it: the rules that are here decide
    Answered,
}

impl Inquiry {
    /// Whether SL has not answered.
    pub(super) fn is_open(self) -> bool {
        self == Inquiry::Open
    }
}

impl<E: StarEnv> Stateful<E> {
    /// No rule allows WQE `next` of ours: it fails, or waits for SL's answer.
    pub(super) fn refuse(&mut self, card: &CardCtx<'_, E>, class: OrderClass) -> Begin {
        if self.inquires(card) {
            return Begin::Wait;
        }
        card.stats.star_rejects.inc();
        Begin::failed(class, WcStatus::RemAccessErr)
    }

    /// Asks SL for WQE `next`. False: it has answered, or there is no memory to ask it.
    pub(super) fn inquires(&mut self, card: &CardCtx<'_, E>) -> bool {
        let next = self.streams[0].next;
        let Ok(Rare { inquired, rounds, .. }) = self.rare.make() else { return false };
        if self.inquiry == Inquiry::Answered && *inquired == next
            || self.channel.send(Control::RuleQuery).is_err()
        {
            return false;
        }
        (*inquired, *rounds, self.inquiry) = (next, ROUNDS, Inquiry::Open);
        self.asks(card.now);
        self.arm(card.now + 1);
        true
    }

    /// SL's sum of its rules. If ours differs, SL is to send them: those of another connection may still be
    /// under way. `None`: there is no memory to ask for them, and SL repeats the sum.
    pub(super) fn on_rule_sum(&mut self, card: &CardCtx<'_, E>, theirs: Sum) -> Option<()> {
        let rare = self.rare.get_mut().filter(|_| self.inquiry == Inquiry::Open);
        let Some(Rare { rounds, .. }) = rare else { return Some(()) };
        self.inquiry = if self.quiesced {
            /* SL may have reverted; if not, it is asked again when this resumes */
            Inquiry::None
        } else if *rounds == 0 || card.registry.sum(self.conn) == Some(theirs) {
            Inquiry::Answered
        } else {
            self.channel.send(Control::ResendRules).ok()?;
            self.channel.send(Control::RuleQuery).ok()?;
            *rounds -= 1;
            Inquiry::Open
        };
        Some(())
    }
}
