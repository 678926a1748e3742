//! Before a request of ours fails for want of a rule, SL is asked whether our card has all of them. SL does
//! not wait for cards that do not answer: its program may have bound a window, or changed its QP, and our
//! program may know that by other ways before the rule arrives.

use starverbs_core::WcStatus;

use super::begin::Begin;
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
    /// SL was asked, and may be so often again
    Open(u8),
    /// SL has answered for this WQE of ours: the rules that are here decide
    Answered(u32),
}

impl Inquiry {
    /// Whether SL has not answered.
    pub(super) fn is_open(self) -> bool {
        matches!(self, Inquiry::Open(_))
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
        if self.inquiry == Inquiry::Answered(self.streams[0].next)
            || self.channel.send(Control::RuleQuery).is_err()
        {
            return false;
        }
        self.inquiry = Inquiry::Open(ROUNDS);
        self.asks(card.now);
        self.arm(card.now + 1);
        true
    }

    /// SL's sum of its rules. If ours differs, SL is to send them: those of another connection may still be
    /// under way. `None`: there is no memory to ask for them, and SL repeats the sum.
    pub(super) fn on_rule_sum(&mut self, card: &CardCtx<'_, E>, theirs: Sum) -> Option<()> {
        let Inquiry::Open(rounds) = self.inquiry else { return Some(()) };
        self.inquiry = if self.quiesced {
            /* SL may have reverted; if not, it is asked again when this resumes */
            Inquiry::None
        } else if rounds == 0 || card.registry.sum(self.conn) == Some(theirs) {
            Inquiry::Answered(self.streams[0].next)
        } else {
            self.channel.send(Control::ResendRules).ok()?;
            self.channel.send(Control::RuleQuery).ok()?;
            Inquiry::Open(rounds - 1)
        };
        Some(())
    }
}
