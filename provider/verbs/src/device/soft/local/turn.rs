//! A turn of the local transport: requests of others are executed, answers taken, what is done completed.

use starverbs_core::engine::EngineCtx;
use starverbs_core::{AsyncEvent, Host, Nanos, Nic, QpState, Qpn};

use super::channels::{Answerer, Channels};
use super::end::LocalEnd;
use super::record::{self, CHUNK, LocalRecord, answer, control};
use super::responder::{LocalReply, ReadAnswer};
use crate::device::soft::doorbells::Deferred;
use crate::device::soft::env::{HostEnv, NicEnv};
use crate::device::soft::intake::AHEAD;

/// Requests of one channel in one turn.
const REQUESTS: u32 = 64;
/// Which record behind one that is about to be executed is fetched.
const FETCH: u32 = 3;
/// Answers of one channel in one turn.
const ANSWERS: u32 = 512;

/// A control record that came beside requests, and in which channel.
pub(super) struct InboundControl {
    pub(super) serial: u32,
    pub(super) record: LocalRecord,
}

/// Calls a QP's local end.
#[inline]
pub(super) fn with_end<R>(
    (nic, env): NicEnv<'_>,
    qpn: Qpn,
    now: Nanos,
    call: impl FnOnce(&mut LocalEnd, &mut EngineCtx<'_, HostEnv>) -> R,
) -> Option<R> {
    nic.call_engine(env, qpn, now, |engine, ctx| engine.local_mut().map(|end| call(end, ctx))).flatten()
}

/// Executes what others ask, and wakes those who wait for what was given back before; says how much came. A
/// control record is left in [`Channels::inbound_control`], and nothing behind it is executed.
#[inline(always)]
pub(super) fn take_requests((nic, env): NicEnv<'_>, now: Nanos) -> u32 {
    let mut came = 0;
    for at in 0..env.channels.answerers.len() {
        let Channels { answerers, peers, .. } = &mut env.channels;
        let Some(answerer) = answerers.get_mut(at) else { break };
        answerer.wake_requester(peers);
        if answerer.has_work() {
            came += answer_channel((nic, env), at, now);
            if env.channels.inbound_control.is_some() {
                break;
            }
        }
    }
    came
}

/// Has what the next requests need fetched into the CPU's caches, side by side: the ends of their QPs, and
/// the card's contexts of those behind, by which the next call finds their ends.
#[inline(never)]
fn look_ahead((nic, env): NicEnv<'_>, at: usize, first: bool) {
    let requests = &env.channels.answerers[at].channel.requests;
    if requests.word_ahead(1, record::TO).is_none() {
        return;
    }
    let qpns = |from: u32| (from..from + AHEAD).map_while(|n| requests.word_ahead(n, record::TO));
    if first {
        qpns(0).for_each(|qpn| nic.expect_engine(env, qpn));
    }
    qpns(AHEAD).for_each(|qpn| nic.expect_engine(env, qpn));
    for end in qpns(0).filter_map(|qpn| nic.engine(qpn)?.local()) {
        env.prefetch(end);
    }
}

/// A doorbell waits behind others. What they need is fetched while the program posts on, in steps, as one
/// line leads to the next: the card's context of the last one, the end of the one before, and where the next
/// WQE will stand of the one before that.
#[inline]
pub(in super::super) fn expect((nic, env): (&Nic<HostEnv>, &HostEnv), waiting: &Deferred) {
    let end = |behind| nic.engine(waiting.last(behind)?)?.local();
    if let Some(qpn) = waiting.last(0) {
        nic.expect_engine(env, qpn);
    }
    if let Some(end) = end(1) {
        env.prefetch(end);
    }
    if let Some(end) = end(2) {
        env.prefetch(end.next_asked());
    }
}

/// Executes what is asked in one channel; says how much that was.
#[inline(never)]
pub(super) fn answer_channel((nic, env): NicEnv<'_>, at: usize, now: Nanos) -> u32 {
    let serial = env.channels.answerers[at].serial;
    let mut run = ChannelTurn { at, serial, left: REQUESTS, looked: false, met: false };
    let (mut fetched, most) = if env.channels.many { (REQUESTS, AHEAD) } else { (0, REQUESTS) };
    loop {
        if run.left <= fetched {
            look_ahead((nic, env), at, run.left == REQUESTS);
            fetched = run.left.saturating_sub(AHEAD);
        }
        let answerer = &mut env.channels.answerers[at];
        if answerer.may_be_blocked() && !may_answer((nic, env), at, now) {
            break;
        }
        if run.left == 0 {
            break;
        }
        let Some(mut record) = env.channels.answerers[at].next() else { break };
        if record.op >= control::PROPOSE {
            run.left -= 1;
            leave_control(&mut env.channels, at, record);
            break;
        }
        let reply = run.execute((nic, env), &mut record, most, now);
        if reply == LocalReply::Last || (reply != LocalReply::None && !run.follow_up((nic, env), reply, now))
        {
            break;
        }
    }
    let Channels { answerers, peers, .. } = &mut env.channels;
    answerers[at].give_back(peers);
    REQUESTS - run.left
}

/// Whether there is room for an answer, should the next request have one, and none is owed.
#[inline(never)]
fn may_answer((nic, env): NicEnv<'_>, at: usize, now: Nanos) -> bool {
    if !answer_read((nic, env), at, now) {
        return false;
    }
    let answerer = &mut env.channels.answerers[at];
    let there = answerer.channel.answers.has_room();
    answerer.blocked = there == Ok(false);
    if there.is_err() {
        break_off(&mut env.channels, at);
    }
    there == Ok(true)
}

/// Writes the answer to the request that was executed last, for which there is room.
#[inline(never)]
fn write_reply(channels: &mut Channels, at: usize) {
    let answerer = &mut channels.answerers[at];
    let record = LocalRecord { at: answerer.channel.requests.popped(), ..channels.reply };
    match answerer.channel.answers.room(0) {
        Ok(Some(room)) => channels.answer(at, &record, room),
        Ok(None) | Err(_) => break_off(channels, at),
    }
}

/// The oldest record of a channel is no request.
#[cold]
fn leave_control(channels: &mut Channels, at: usize, record: LocalRecord) {
    let answerer = &mut channels.answerers[at];
    answerer.channel.requests.pop();
    channels.inbound_control = Some(InboundControl { serial: answerer.serial, record });
}

/// The requests of one channel in one turn.
struct ChannelTurn {
    /// Which channel
    at: usize,
    serial: u32,
    /// Requests that are left for this turn
    left: u32,
    /// It was looked what of ours is done
    looked: bool,
    /// The last queue pair has got its first request
    met: bool,
}

impl ChannelTurn {
    /// Executes a request, and those behind it that are for the same queue pair, `most` of them, until one
    /// has an answer.
    #[inline]
    fn execute(
        &mut self,
        (nic, env): NicEnv<'_>,
        record: &mut LocalRecord,
        most: u32,
        now: Nanos,
    ) -> LocalReply {
        let (to, before) = (record.to, self.left);
        let reply = with_end((nic, env), to, now, |end, ctx| self.execute_at(end, ctx, record, most));
        if std::mem::take(&mut self.met) && nic.qp_state(to) == Some(QpState::Rtr) {
            env.event(AsyncEvent::CommEst(to));
        }
        let reply = reply.unwrap_or_else(|| self.miss(&mut env.channels, record));
        nic.counters().local_executed.add(u64::from(before - self.left));
        reply
    }

    /// A request is for no queue pair that has an end.
    #[cold]
    fn miss(&mut self, channels: &mut Channels, record: &LocalRecord) -> LocalReply {
        self.left -= 1;
        channels.answerers[self.at].channel.requests.pop();
        channels.reply_with(record.answer(answer::GONE))
    }

    /// What a reply asks for beside executing. False: the channel is of no use any more.
    #[inline(never)]
    fn follow_up(&mut self, (nic, env): NicEnv<'_>, reply: LocalReply, now: Nanos) -> bool {
        match reply {
            LocalReply::None | LocalReply::Last | LocalReply::Read => {}
            LocalReply::Look => {
                self.looked = true;
                look((nic, env), now);
            }
            LocalReply::Record => write_reply(&mut env.channels, self.at),
            LocalReply::Broken => break_off(&mut env.channels, self.at),
        }
        reply != LocalReply::Broken
    }

    /// The same with the queue pair's end at hand.
    #[inline(always)]
    fn execute_at(
        &mut self,
        end: &mut LocalEnd,
        ctx: &mut EngineCtx<'_, HostEnv>,
        record: &mut LocalRecord,
        most: u32,
    ) -> LocalReply {
        let (to, least) = (record.to, self.left.saturating_sub(most));
        loop {
            let reply = if end.is_peer(record, self.serial) {
                if !self.looked && end.must_look(record) {
                    return LocalReply::Look;
                }
                let data = if record.is_short() {
                    Some(record.body.as_ptr())
                } else {
                    ctx.env.channels.answerers[self.at].data(record)
                };
                let Some(data) = data else { return LocalReply::Broken };
                if !end.met {
                    (self.met, end.met) = (true, true);
                }
                end.on_request(ctx, record, data)
            } else {
                ctx.env.channels.reply_with(record.answer(answer::GONE))
            };
            self.left -= 1;
            let answerer = &mut ctx.env.channels.answerers[self.at];
            answerer.channel.requests.pop();
            if record.len >= CHUNK && reply == LocalReply::None {
                /* its writer may wait for room, while the next piece is copied; an answer comes before */
                answerer.channel.requests.publish();
            }
            if reply == LocalReply::Read {
                answerer.reading = Some(ReadAnswer::new(to, *record));
            }
            if reply != LocalReply::None || self.left == least {
                return reply;
            }
            let Some(next) = answerer.next() else { return LocalReply::Last };
            *record = next;
            if record.to != to || record.op >= control::PROPOSE {
                return LocalReply::None;
            }
            /* several wait: while this one is executed, one behind comes from the other end's CPU */
            answerer.channel.requests.fetch_ahead(FETCH);
        }
    }
}

/// Goes on with the answer to a READ. False: there is no room.
fn answer_read((nic, env): NicEnv<'_>, at: usize, now: Nanos) -> bool {
    let Some(mut read) = env.channels.answerers[at].reading.take() else { return true };
    loop {
        let room = env.channels.answerers[at].channel.answers.room(read.next_len());
        let Ok(Some(room)) = room else {
            let answerer = &mut env.channels.answerers[at];
            (answerer.reading, answerer.blocked) = (Some(read), true);
            if room.is_err() {
                break_off(&mut env.channels, at);
            }
            return false;
        };
        let Answerer { channel, serial, .. } = &env.channels.answerers[at];
        let (qpn, serial, asked) = (read.qpn, *serial, channel.requests.popped());
        // SAFETY: the room has so many bytes.
        let call = |end: &mut LocalEnd, ctx: &mut EngineCtx<'_, HostEnv>| unsafe {
            end.answer_read(ctx, &mut read, serial, room.to)
        };
        let Some((mut record, more)) = with_end((nic, env), qpn, now, call) else { return true };
        record.at = if record.op == answer::DATA { room.at } else { asked };
        env.channels.answer(at, &record, room);
        if !more {
            env.channels.answerers[at].blocked = false;
            return true;
        }
    }
}

/// Another end does not keep to the rules: nothing more of it is looked at.
#[cold]
fn break_off(channels: &mut Channels, at: usize) {
    channels.answerers[at].ended = true;
    channels.answerers[at].reading = None;
    channels.broken = true;
}

/// Takes answers, and completes what is done; says how much came.
#[inline(always)]
pub(super) fn take_answers((nic, env): NicEnv<'_>, now: Nanos) -> u32 {
    let mut came = 0;
    for at in 0..env.channels.askers.len() {
        let Some(Some(asker)) = env.channels.askers.get(at) else { continue };
        if asker.waits() || asker.channel.answers.has_next() {
            came += take_from((nic, env), at as u32, now);
        }
    }
    came
}

/// [`take_answers`] before a request is executed.
#[inline(never)]
fn look((nic, env): NicEnv<'_>, now: Nanos) {
    take_answers((nic, env), now);
}

#[inline(never)]
fn take_from((nic, env): NicEnv<'_>, at: u32, now: Nanos) -> u32 {
    let mut taken = 0;
    let Some(asker) = env.channels.asker(at) else { return 0 };
    /* before the answers: what was refused is there before its place is given back */
    let Ok(given) = asker.channel.requests.look() else {
        /* once: who is out of its QPs is looked at until they have left */
        env.channels.broken |= !std::mem::replace(&mut asker.ended, true);
        return 0;
    };
    while taken < ANSWERS {
        let Some(asker) = env.channels.asker(at) else { return taken };
        let Some(words) = asker.channel.answers.peek() else { break };
        let record = LocalRecord::of(words);
        let data = if record.is_short() {
            Some(record.body.as_ptr())
        } else {
            asker.channel.answers.data(record.at, record.len)
        };
        let Some(data) = data else {
            env.channels.broken |= !std::mem::replace(&mut asker.ended, true);
            return taken;
        };
        asker.answers = asker.answers.wrapping_add(1);
        taken += 1;
        with_end((nic, env), record.to, now, |end, ctx| {
            /* what another process says of a connection that is not its own is nobody's answer */
            if end.of.channels[0] == at {
                end.on_answer(ctx, &record, data);
            }
        });
        if let Some(asker) = env.channels.asker(at) {
            asker.channel.answers.pop();
        }
    }
    let Some(asker) = env.channels.asker(at) else { return taken };
    let more = asker.channel.answers.has_next();
    let by = asker.channel.answers.give_back();
    if let Some(asker) = &env.channels.askers[at as usize] {
        asker.notify(&env.channels.peers, by);
    }
    if more { taken } else { taken + complete((nic, env), at, given, now) }
}

/// Places up to `given` were given back: what they stand for is done, and there is room for others.
fn complete((nic, env): NicEnv<'_>, at: u32, given: u32, now: Nanos) -> u32 {
    let mut done = 0;
    loop {
        let Some(asker) = env.channels.asker(at) else { return done };
        let Some((qpn, count)) = asker.next_done(given) else { break };
        done += count;
        with_end((nic, env), qpn, now, |end, ctx| {
            /* it may have asked here for a connection that is over */
            if end.of.channels[0] == at {
                end.on_progress(ctx, given);
            }
        });
    }
    env.channels.send_waiting_control(at);
    let Some(asker) = env.channels.asker(at) else { return done };
    for _ in 0..asker.waiting.len() {
        let Some(asker) = env.channels.asker(at) else { return done };
        if !matches!(asker.room(CHUNK), Ok(Some(_))) {
            break;
        }
        let Some(qpn) = asker.waiting.pop_front() else { break };
        with_end((nic, env), qpn, now, |end, ctx| {
            end.waits = false;
            end.ask(ctx);
        });
        done += 1;
    }
    done
}
