//! One connection: what is known of it, and its timer.

use alloc::boxed::Box;

use starverbs_core::{Nanos, Qpn};

use super::{Cause, Cm, CmPath, ConnEvent, ListenerId, RemoteKey};
use crate::reason;
use crate::wire::Mad;
use crate::wire::message::{self, AnsweredMessage, Ids};

/// The first repetition comes after this, ns; the following ones each after twice as long, up to the response
/// timeout. What is lost on a host's own sockets need not cost the seconds that the specification's exponents
/// stand for.
const FIRST: Nanos = 200_000_000;
/// Longest exponents that a peer may set: of its response timeout (17 s), of an MRA (2.3 min), of an ACK
/// timeout (4.3 s).
const MAX_RESPONSE: u8 = 22;
const MAX_SERVICE: u8 = 25;
const MAX_ACK: u8 = 20;
/// How long an answer is kept for a request that comes again, an exponent: longer than a requester waits.
const LINGER: u8 = 21;
/// How long a release goes on that nobody waits for, ns.
const RELEASE_LINGER: Nanos = 10_000_000_000;

/// States of IBTA 12.9.3 and of this side of SIDR (12.11). Those in which an MRA came are as without.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// Active: waits for REP
    ReqSent,
    /// Active: the program has to answer the REP
    RepRcvd,
    /// Passive: the program has to answer the REQ
    ReqRcvd,
    /// Passive: waits for RTU
    RepSent,
    Established,
    /// Waits for DREP
    DreqSent,
    Timewait,
    SidrReqSent,
    /// The program has to answer
    SidrReqRcvd,
    /// An answer that ends it was sent (REJ), kept for a repeated request
    Answered,
    /// As `Answered`, of SIDR
    SidrAnswered,
    Dead,
}

impl State {
    pub(super) fn is_sidr(self) -> bool {
        matches!(self, State::SidrReqSent | State::SidrReqRcvd | State::SidrAnswered)
    }
    /// What of a connection the program has to answer.
    pub(super) fn asked(self) -> Option<AnsweredMessage> {
        match self {
            State::ReqRcvd => Some(AnsweredMessage::Req),
            State::RepRcvd => Some(AnsweredMessage::Rep),
            _ => None,
        }
    }
    /// The program has to answer, and the listener's backlog counts it.
    fn is_waiting(self) -> bool {
        matches!(self, State::ReqRcvd | State::SidrReqRcvd)
    }
}

/// A connection.
pub(super) struct Conn {
    pub(super) state: State,
    pub(super) ids: Ids,
    pub(super) path: CmPath,
    pub(super) qpn: Qpn,
    pub(super) remote_qpn: Qpn,
    /// How long packets may be under way, an exponent
    pub(super) ack_timeout: u8,
    /// What this side's messages of the connection may take, and how often they go: the peer's REQ says it
    pub(super) response_timeout: u8,
    pub(super) max_retries: u8,
    pub(super) service: u64,
    /// The last message, as long as it may have to go again
    pub(super) sent: Option<Box<Mad>>,
    /// Pause before the next repetition, and when there is none any more
    pause: Nanos,
    until: Nanos,
    pub(super) due: Option<Nanos>,
    /// Whose backlog it is in
    pub(super) listener: Option<ListenerId>,
    /// How a repetition of its request is known
    pub(super) request: Option<RemoteKey>,
    /// The program does not hold it any more
    pub(super) released: bool,
}

impl Conn {
    pub(super) fn new(state: State, ids: Ids, path: CmPath) -> Conn {
        Conn {
            state,
            ids,
            path,
            qpn: 0,
            remote_qpn: 0,
            ack_timeout: 0,
            response_timeout: message::RESPONSE_TIMEOUT,
            max_retries: message::MAX_RETRIES,
            service: 0,
            sent: None,
            pause: 0,
            until: 0,
            due: None,
            listener: None,
            request: None,
            released: false,
        }
    }
}

/// 4.096 us * 2^n
fn exponent(n: u8) -> Nanos {
    4096 << n.min(31)
}

impl Cm {
    pub(super) fn disarm(&mut self, id: u32) {
        if let Some(conn) = self.conns.get_mut(&id)
            && let Some(at) = conn.due.take()
        {
            self.timers.remove(&(at, id));
        }
    }

    fn arm(&mut self, id: u32, at: Nanos) {
        self.disarm(id);
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.due = Some(at);
            self.timers.insert((at, id));
        }
    }

    /// What belongs to the state that a connection leaves.
    pub(super) fn leave_state(&mut self, id: u32) {
        self.leave_backlog(id);
        let Some(conn) = self.conns.get(&id) else { return };
        let key = (conn.path.remote, conn.remote_qpn);
        if self.by_qpn.get(&key) == Some(&id) {
            self.by_qpn.remove(&key);
        }
    }

    /// A request is taken in, and waits for its listener.
    pub(super) fn take_in(&mut self, id: u32, conn: Conn) {
        if let Some(listener) = conn.listener
            && let Some(listener) = self.listeners.values_mut().find(|l| l.id == listener)
        {
            listener.waiting += 1;
        }
        if let Some(key) = conn.request {
            self.by_request.insert(key, id);
        }
        self.conns.insert(id, conn);
    }

    /// A request waits for its listener no more.
    pub(super) fn leave_backlog(&mut self, id: u32) {
        let listener = self.conns.get_mut(&id).and_then(|conn| conn.listener.take());
        if let Some(listener) = listener
            && let Some(listener) = self.listeners.values_mut().find(|l| l.id == listener)
        {
            listener.waiting = listener.waiting.saturating_sub(1);
        }
    }

    /// A connection reaches a state, with no timer and nothing to repeat.
    pub(super) fn enter(&mut self, id: u32, state: State) {
        self.disarm(id);
        if !state.is_waiting() {
            self.leave_state(id);
        }
        let Some(conn) = self.conns.get_mut(&id) else { return };
        (conn.state, conn.sent) = (state, None);
        /* QPN 0 is that of programs that keep theirs to themselves */
        if state == State::Established && conn.remote_qpn > 1 {
            self.by_qpn.insert((conn.path.remote, conn.remote_qpn), id);
        }
    }

    /// Sends a message of the connection, once.
    pub(super) fn send(&mut self, id: u32, mad: Mad) {
        if let Some(conn) = self.conns.get(&id) {
            self.send_over(conn.path, mad);
        }
    }

    /// Sends the last message again.
    pub(super) fn send_again(&mut self, id: u32) {
        if let Some(conn) = self.conns.get(&id)
            && let Some(mad) = &conn.sent
        {
            self.send_over(conn.path, Mad::clone(mad));
        }
    }

    /// Sends a message in `state`, again and again until the state is left or the peer's time is over.
    pub(super) fn send_until_answered(&mut self, now: Nanos, id: u32, state: State, mad: Mad) {
        self.enter(id, state);
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let timeout = exponent(conn.response_timeout.min(MAX_RESPONSE));
        conn.pause = FIRST.min(timeout);
        conn.until = now + timeout * (u64::from(conn.max_retries) + 1);
        if conn.released {
            conn.until = conn.until.min(now + RELEASE_LINGER);
        }
        conn.sent = Some(Box::new(mad));
        let at = now + conn.pause;
        self.send_again(id);
        self.arm(id, at);
    }

    /// Sends the message that ends the connection, and keeps it for requests that come again.
    pub(super) fn answer_last(&mut self, id: u32, now: Nanos, state: State, mad: Mad) {
        self.enter(id, state);
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.sent = Some(Box::new(mad));
        self.send_again(id);
        self.arm(id, now + exponent(LINGER));
    }

    /// The peer needs time: 2^n * 4.096 us until the next repetition.
    pub(super) fn wait_longer(&mut self, now: Nanos, id: u32, n: u8) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let at = now + exponent(n.min(MAX_SERVICE));
        conn.until = conn.until.max(at + exponent(conn.response_timeout.min(MAX_RESPONSE)));
        self.arm(id, at);
    }

    /// Until packets of the connection cannot come any more.
    pub(super) fn enter_timewait(&mut self, now: Nanos, id: u32) {
        self.enter(id, State::Timewait);
        let Some(conn) = self.conns.get(&id) else { return };
        let at = now + exponent(conn.ack_timeout.min(MAX_ACK));
        self.arm(id, at);
    }

    pub(super) fn timer_fired(&mut self, now: Nanos, id: u32) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        match conn.state {
            State::ReqSent | State::RepSent | State::DreqSent | State::SidrReqSent => {
                if now >= conn.until {
                    return self.give_up(now, id);
                }
                conn.pause = (conn.pause * 2).min(exponent(conn.response_timeout.min(MAX_RESPONSE)));
                let at = (now + conn.pause).min(conn.until);
                self.send_again(id);
                self.arm(id, at);
            }
            State::Timewait => {
                self.enter(id, State::Dead);
                self.notify(id, ConnEvent::TimewaitExit);
                self.forget_if_released(id);
            }
            State::Answered | State::SidrAnswered => {
                self.enter(id, State::Dead);
                self.forget_if_released(id);
            }
            _ => {}
        }
    }

    /// The peer does not answer.
    fn give_up(&mut self, now: Nanos, id: u32) {
        let Some(conn) = self.conns.get(&id) else { return };
        let (state, ids, guid) = (conn.state, conn.ids, self.config.guid);
        if state == State::DreqSent {
            self.enter_timewait(now, id);
            return self.notify(id, ConnEvent::Disconnected { timed_out: true });
        }
        let answered = match state {
            State::ReqSent => Some(AnsweredMessage::Other),
            State::RepSent => Some(AnsweredMessage::Req),
            _ => None,
        };
        if let Some(answered) = answered {
            self.send(id, message::rej(ids, answered, reason::TIMEOUT, Some(guid), &[]));
        }
        self.enter(id, State::Dead);
        self.notify(id, ConnEvent::Unreachable(Cause::TimedOut));
        self.forget_if_released(id);
    }
}
