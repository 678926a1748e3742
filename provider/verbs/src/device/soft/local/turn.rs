//! A turn of the local transport: requests of others are executed, answers taken, what is done completed.

use starverbs_core::engine::EngineCtx;
use starverbs_core::{AsyncEvent, Host, Nanos, Nic, QpState, Qpn};

use super::channels::Channels;
use super::end::LocalEnd;
use super::record::{self, CHUNK, Record, answer, control};
use super::responder::{ReadAnswer, Reply};
use crate::device::soft::env::HostEnv;
use crate::device::soft::intake::AHEAD;

/// Requests of one channel in one turn.
const REQUESTS: u32 = 64;
/// Answers of one channel in one turn.
const ANSWERS: u32 = 512;

type Card<'a> = (&'a mut Nic<HostEnv>, &'a mut HostEnv);

/// Something that was said beside requests, and in which channel.
pub(super) struct Said {
    pub(super) serial: u32,
    pub(super) record: Record,
}

/// Calls a QP's local end.
#[inline]
pub(super) fn with_end<R>(
    (nic, env): Card<'_>,
    qpn: Qpn,
    now: Nanos,
    call: impl FnOnce(&mut LocalEnd, &mut EngineCtx<'_, HostEnv>) -> R,
) -> Option<R> {
    nic.call_engine(env, qpn, now, |engine, ctx| engine.local_mut().map(|end| call(end, ctx))).flatten()
}

/// Executes what others ask; says how much came, and what was said beside.
#[inline]
pub(super) fn take_requests((nic, env): Card<'_>, now: Nanos) -> (u32, Option<Said>) {
    let mut came = 0;
    for at in 0..env.channels.answerers.len() {
        let answerer = &env.channels.answerers[at];
        if answerer.reading.is_some() || answerer.channel.requests.has_next() {
            let there = answerer.channel.requests.available(REQUESTS);
            let (taken, said) = answer_channel((nic, env), at, there, now);
            came += taken;
            if said.is_some() {
                return (came, said);
            }
        }
    }
    (came, None)
}

/// Has the contexts of the next requests fetched, of so many that are there.
#[inline(never)]
fn look_ahead((nic, env): Card<'_>, at: usize, there: u32) {
    let requests = &env.channels.answerers[at].channel.requests;
    fetch((nic, env), (0..there.min(AHEAD)).map_while(|n| requests.word_ahead(n, record::TO)));
}

/// Has the contexts of QPs fetched into the CPU's caches, side by side: first those of the card, then what
/// they lead to.
#[inline]
pub(super) fn fetch((nic, env): (&Nic<HostEnv>, &HostEnv), qpns: impl Iterator<Item = Qpn> + Clone) {
    qpns.clone().for_each(|qpn| nic.expect(env, qpn));
    for end in qpns.filter_map(|qpn| nic.engine(qpn)?.local()) {
        env.prefetch(end);
    }
}

fn answer_channel((nic, env): Card<'_>, at: usize, there: u32, now: Nanos) -> (u32, Option<Said>) {
    let mut run = Run { at, left: there, looked: false };
    let mut said = None;
    let many = env.channels.many && there > 1;
    let mut fetched = there;
    loop {
        if many && run.left <= fetched {
            look_ahead((nic, env), at, run.left);
            fetched = run.left.saturating_sub(AHEAD);
        }
        if env.channels.answerers[at].reading.is_some() && !answer_read((nic, env), at, now) {
            break;
        }
        let answerer = &mut env.channels.answerers[at];
        let room = match answerer.channel.answers.room(0) {
            Ok(Some(room)) => room,
            Ok(None) => {
                answerer.blocked = true;
                break;
            }
            Err(_) => {
                break_off(&mut env.channels, at);
                break;
            }
        };
        answerer.blocked = false;
        let Some(record) = answerer.next().filter(|_| run.left > 0) else { break };
        if record.op >= control::PROPOSE {
            run.left -= 1;
            answerer.channel.requests.pop();
            said = Some(Said { serial: answerer.serial, record });
            break;
        }
        match run.execute((nic, env), record, if many { AHEAD } else { REQUESTS }, now) {
            Reply::None | Reply::Read => {}
            Reply::Look => {
                run.looked = true;
                take_answers((nic, env), now);
            }
            Reply::Record => {
                let words = env.channels.reply.words();
                env.channels.answerers[at].channel.answers.push(&words, room);
                env.channels.answered(at);
            }
            Reply::Broken => {
                break_off(&mut env.channels, at);
                break;
            }
        }
    }
    env.channels.answerers[at].channel.requests.publish();
    (there - run.left, said)
}

/// The requests of one channel in one turn.
struct Run {
    /// Which channel
    at: usize,
    /// Requests that are left for this turn
    left: u32,
    /// It was looked what of ours is done
    looked: bool,
}

impl Run {
    /// Executes a request, and those behind it that are for the same queue pair, `most` of them, until one
    /// has an answer.
    #[inline]
    fn execute(&mut self, (nic, env): Card<'_>, record: Record, most: u32, now: Nanos) -> Reply {
        let to = record.to;
        let before = self.left;
        let mut met = false;
        let call = |end: &mut LocalEnd, ctx: &mut EngineCtx<'_, HostEnv>| {
            let first = !end.met;
            let reply = self.execute_at(end, ctx, record, most);
            met = first && end.met;
            reply
        };
        let reply = with_end((nic, env), to, now, call);
        if met && nic.qp_state(to) == Some(QpState::Rtr) {
            env.event(AsyncEvent::CommEst(to));
        }
        let reply = reply.unwrap_or_else(|| {
            self.left -= 1;
            env.channels.answerers[self.at].channel.requests.pop();
            env.channels.reply_with(record.answer(answer::GONE))
        });
        nic.counters().local_executed.add(u64::from(before - self.left));
        reply
    }

    /// The same with the queue pair's end at hand.
    #[inline]
    fn execute_at(
        &mut self,
        end: &mut LocalEnd,
        ctx: &mut EngineCtx<'_, HostEnv>,
        mut record: Record,
        most: u32,
    ) -> Reply {
        let serial = ctx.env.channels.answerers[self.at].serial;
        let least = self.left.saturating_sub(most);
        loop {
            let is_peer = end.is_peer(&record, serial);
            if is_peer && !self.looked && end.must_look(&record) {
                return Reply::Look;
            }
            let Some(data) = ctx.env.channels.answerers[self.at].data(&record) else { return Reply::Broken };
            let reply = if is_peer {
                end.met = true;
                end.on_request(ctx, &record, data)
            } else {
                ctx.env.channels.reply_with(record.answer(answer::GONE))
            };
            self.left -= 1;
            let answerer = &mut ctx.env.channels.answerers[self.at];
            answerer.channel.requests.pop();
            if reply == Reply::Read {
                answerer.reading = Some(ReadAnswer::new(record.to, record));
            }
            if reply != Reply::None || self.left == least {
                return reply;
            }
            let is_next = |next: &Record| next.to == record.to && next.op < control::PROPOSE;
            let Some(next) = answerer.next().filter(is_next) else { return Reply::None };
            record = next;
        }
    }
}

/// Wakes those who wait for places of requests that were given back. What a program does with its completions
/// comes first: the look takes a fence, which waits until the other end has let the line go.
#[inline]
pub(super) fn wake_requesters(channels: &mut Channels) {
    for answerer in &mut channels.answerers {
        if answerer.channel.requests.must_wake()
            && let Some(session) = answerer.session
        {
            channels.peers.wake(session);
        }
    }
}

/// Goes on with the answer to a READ. False: there is no room.
fn answer_read((nic, env): Card<'_>, at: usize, now: Nanos) -> bool {
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
        let qpn = read.qpn;
        // SAFETY: the room has so many bytes.
        let call = |end: &mut LocalEnd, ctx: &mut EngineCtx<'_, HostEnv>| unsafe {
            end.answer_read(ctx, &mut read, room.to)
        };
        let Some((mut record, more)) = with_end((nic, env), qpn, now, call) else { return true };
        record.at = room.at;
        env.channels.answerers[at].channel.answers.push(&record.words(), room);
        env.channels.answered(at);
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
#[inline]
pub(super) fn take_answers((nic, env): Card<'_>, now: Nanos) -> u32 {
    let mut came = 0;
    for at in 0..env.channels.askers.len() as u32 {
        let Some(asker) = env.channels.asker(at) else { continue };
        if asker.waits() || asker.channel.answers.has_next() {
            came += take_from((nic, env), at, now);
        }
    }
    came
}

fn take_from((nic, env): Card<'_>, at: u32, now: Nanos) -> u32 {
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
        let record = Record::of(words);
        let data = if record.is_short() {
            Some(std::ptr::null())
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
    if asker.channel.answers.give_back()
        && let Some(session) = asker.session
    {
        env.channels.peers.wake(session);
    }
    if more { taken } else { taken + complete((nic, env), at, given, now) }
}

/// Places up to `given` were given back: what they stand for is done, and there is room for others.
fn complete((nic, env): Card<'_>, at: u32, given: u32, now: Nanos) -> u32 {
    let mut done = 0;
    loop {
        let Some(asker) = env.channels.asker(at) else { return done };
        let Some((qpn, count)) = asker.next_done(given) else { break };
        done += count;
        with_end((nic, env), qpn, now, |end, ctx| end.on_progress(ctx, given));
    }
    let Some(asker) = env.channels.asker(at) else { return done };
    asker.say_what_waits();
    for _ in 0..asker.waiting.len() {
        let Some(asker) = env.channels.asker(at) else { return done };
        if !matches!(asker.channel.requests.room(CHUNK), Ok(Some(_))) {
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
