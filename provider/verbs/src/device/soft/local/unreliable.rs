//! UC: what is lost is lost, and nobody waits for long.
//!
//! Requests are asked for as RC's are, and complete when they were executed. What the responder cannot
//! execute it drops. A message that finds no receive is asked for again for a while, as a card leaves packets
//! of UC in the socket (`back_pressure.rs`): the program may be off the CPU. Then such messages are dropped
//! as they come, for several times as long. What a peer that is silent, or gone, does not take completes like
//! all that was sent; of what lies in the channel a peer that comes back may still execute some.

use starverbs_core::env::SendQueue;
use starverbs_core::types::SendOp;
use starverbs_core::{Nanos, QpState};

use super::end::{Ctx, LocalEnd, TriesLeft};
use super::record::{LocalRecord, answer};
use super::requester::StepEnd;
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
        let gone = record.op == answer::GONE;
        let Some(index) = self.stop_at(ctx, record.seq) else {
            if !gone && self.find(record.seq).is_none() {
                self.follow(ctx, record.seq);
            }
            return;
        };
        self.go_back(ctx, index, record.seq, AGAIN);
        if !self.has_given_up() {
            if self.gone_at == 0 {
                self.gone_at = self.rnr_until + HOLD;
            }
            return;
        }
        self.rnr_until = 0;
        if gone {
            self.drop_next(ctx);
        }
        self.ask(ctx);
    }

    /// The peer waits for this request, which is dropped by now: the next one has its number.
    fn follow(&mut self, ctx: &mut Ctx<'_>, seq: u32) {
        if matches!(self.state, QpState::Sqe | QpState::Err) {
            return;
        }
        self.go_back(ctx, self.una, seq, 0);
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
    pub(super) fn finds_nobody(&mut self, ctx: &mut Ctx<'_>) -> bool {
        match self.tries {
            TriesLeft::Gone => self.await_the_end(),
            _ if ctx.env.channels.is_stuck_at(self.of.channels[0], self.given) => self.drop_posted(ctx),
            _ => self.tries = TriesLeft::Many,
        }
        self.tries != TriesLeft::Many
    }

    /// Nobody takes what is posted: it completes, and what this end does by itself is done.
    #[cold]
    fn drop_posted(&mut self, ctx: &mut Ctx<'_>) {
        /* the peer may still execute what it was asked for: no request passes that */
        self.direct = None;
        self.stop_asking(ctx);
        while self.next != self.of.sq.posted() && (self.state == QpState::Rts || self.offset > 0) {
            let wqe = self.of.sq.request(self.next);
            if let Err(status) = self.admit(&wqe) {
                return self.fail_next(ctx, status);
            }
            if !matches!(wqe.op, SendOp::LocalInv | SendOp::BindMw) {
                self.drop_next(ctx);
            } else if let StepEnd::Failed(status) = self.do_own(ctx, &self.whole(&wqe)) {
                return self.fail_next(ctx, status);
            }
        }
        self.look_if_drained(ctx);
    }

    /// WQE `next`, which nobody executes, completes without that.
    fn drop_next(&mut self, ctx: &mut Ctx<'_>) {
        self.offset = 0;
        let flags = self.of.sq.request(self.next).flags;
        self.did_own(ctx, flags);
    }

    /// Whatever is wrong with a message of UC, it is dropped, and the next one may begin (IBTA 9.8.2.2).
    #[cold]
    pub(super) fn drop_message(&mut self, ctx: &mut Ctx<'_>) -> LocalReply {
        ctx.stats().drop_no_recv.inc();
        self.inbound = LocalInbound::Dropped;
        LocalReply::None
    }
}
