//! UC: nobody hears of what is lost, and nobody waits for long.
//!
//! Requests are asked for as RC's are, and complete when they were executed. What the responder cannot
//! execute it drops. A message that finds no receive is asked for again for a while, as a card leaves packets
//! of UC in the socket (`back_pressure.rs`): the program may be off the CPU. Then such messages are dropped
//! as they come, for several times as long. What a peer that is silent, or gone, does not take completes like
//! all that was sent.

use starverbs_core::env::SendQueue;
use starverbs_core::{Nanos, QpState};

use super::end::{Ctx, LocalEnd, TriesLeft};
use super::record::{LocalRecord, answer};
use super::responder::{LocalInbound, LocalReply};

/// How long a message is asked for again.
const HOLD: Nanos = 50_000_000;
/// How often it is meanwhile.
const AGAIN: Nanos = 100_000;
/// After a hold that brought no receive there is none for so many times as long.
const COOL_DOWN: Nanos = 8;

impl LocalEnd {
    /// Whether messages that find no receive are dropped for now.
    #[inline]
    pub(super) fn has_given_up(&self) -> bool {
        self.of.unreliable && self.tries == TriesLeft::None
    }

    /// The peer's queue pair has no receive for a message of UC, or is not there.
    #[cold]
    pub(super) fn on_no_taker(&mut self, ctx: &mut Ctx<'_>, record: &LocalRecord) {
        let Some(index) = self.stop_at(ctx, record.seq) else { return };
        self.go_back(ctx, index, record.seq, AGAIN);
        if !self.has_given_up() {
            if self.gone_at == 0 {
                self.gone_at = self.rnr_until + HOLD;
            }
            return;
        }
        if record.op == answer::GONE {
            self.drop_oldest(ctx);
        }
        self.rnr_until = 0;
        self.ask(ctx);
    }

    /// A hold is over, or the time after one that brought nothing; or the peer's process is gone.
    #[cold]
    pub(super) fn end_hold(&mut self, ctx: &mut Ctx<'_>) {
        match self.tries {
            TriesLeft::Gone => self.drop_posted(ctx),
            TriesLeft::None | TriesLeft::Silent => self.tries = TriesLeft::Many,
            TriesLeft::Many | TriesLeft::One => {
                (self.tries, self.gone_at) = (TriesLeft::None, ctx.now + COOL_DOWN * HOLD);
            }
        }
    }

    /// The peer takes nothing, and has not for long.
    #[cold]
    pub(super) fn stop_waiting(&mut self, ctx: &mut Ctx<'_>) {
        (self.tries, self.gone_at) = (TriesLeft::Silent, 0);
        self.drop_posted(ctx);
        self.given = ctx.env.channels.given(self.of.channels[0]).unwrap_or(0);
    }

    /// Whether nobody is to be asked for what is posted, now: the peer's process is gone, or still silent.
    #[cold]
    pub(super) fn asks_in_vain(&mut self, ctx: &mut Ctx<'_>) -> bool {
        match self.tries {
            TriesLeft::Gone => self.await_the_end(),
            _ if ctx.env.channels.given(self.of.channels[0]) == Some(self.given) => self.drop_posted(ctx),
            _ => self.tries = TriesLeft::Many,
        }
        self.tries != TriesLeft::Many
    }

    /// Nobody takes what is posted.
    #[cold]
    fn drop_posted(&mut self, ctx: &mut Ctx<'_>) {
        ctx.env.channels.forget(self.of.channels[0], self.next.wrapping_sub(self.una));
        /* in SQD the others wait for RTS */
        let end = if self.state == QpState::Sqd { self.next_send() } else { self.of.sq.posted() };
        (self.next, self.offset, self.rnr_until, self.fault) = (self.una, 0, 0, None);
        while self.una != end {
            self.drop_oldest(ctx);
        }
        self.look_if_drained(ctx);
    }

    /// The oldest WQE, which nobody was asked for, completes without that.
    fn drop_oldest(&mut self, ctx: &mut Ctx<'_>) {
        self.next = self.una.wrapping_add(1);
        let flags = self.of.sq.request(self.una).flags;
        self.complete_one(ctx, self.completes(flags));
    }

    /// Whatever is wrong with a message of UC, it is dropped, and the next one may begin (IBTA 9.8.2.2).
    #[cold]
    pub(super) fn drop_message(&mut self, ctx: &mut Ctx<'_>) -> LocalReply {
        ctx.stats.drop_no_recv.inc();
        self.inbound = LocalInbound::Dropped;
        LocalReply::None
    }
}
