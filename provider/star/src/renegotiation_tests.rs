use starverbs_core::Gid;
use starverbs_core::rng::Rng;

use super::*;
use crate::control::{MAX_CONTROL, Preference};
use crate::negotiate::THRESHOLD;

use std::vec::Vec;

const INIT: RoundInit = RoundInit { boot: 7, ports: [4793, 4794], patience: Some(1) };

fn terms(n: u8, stateful: u32) -> Terms {
    let gid = Gid::from_ipv4([10, 0, 0, n]);
    Terms { preference: Preference::Auto, stateful, threshold: THRESHOLD, gid, qpn: n.into() }
}

/// Requests of an end: how many were begun, and how many of them are done.
#[derive(Default)]
struct Sends {
    begun: u32,
    done: u32,
    quiescing: bool,
    held: bool,
}

impl Requests for Sends {
    fn quiesce(&mut self) -> bool {
        self.quiescing = true;
        true
    }
    fn are_drained(&self) -> bool {
        self.begun == self.done
    }
    fn hold(&mut self) -> bool {
        self.held |= self.are_drained();
        self.held
    }
    fn are_held(&self) -> bool {
        self.held
    }
    fn resume(&mut self) {
        (self.quiescing, self.held) = (false, false);
    }
}

#[test]
fn a_message_of_a_round_is_recognised() {
    let message = RoundMessage { round: 0x1234, message: Control::Quiescing { drained: false } };
    let mut room = [0; MAX_CONTROL];
    let len = message.encode(&mut room).expect("it fits");
    assert_eq!(RoundMessage::decode(&room[..len]), Some(message));
    assert_eq!((RoundMessage::decode(&room[..len - 1]), Control::decode(&room[..len])), (None, None));
    assert_eq!(message.encode(&mut room[..len - 1]), None);
    let len = message.message.encode(&mut room).expect("it fits");
    assert_eq!(RoundMessage::decode(&room[..len]), None);
    assert!(is_new(0, u16::MAX) && is_new(5, 4) && !is_new(4, 4) && !is_new(3, 4));
}

#[test]
fn without_an_answer_nothing_is_quiesced() {
    let mut sends = Sends::default();
    let mut end = Renegotiation::ask(1, terms(1, 200), INIT, 5);
    let mut asked = 0;
    while let Some(due) = end.deadline() {
        asked += u32::from(end.poll(due, &mut sends).is_some());
        assert!(!sends.quiescing);
    }
    assert_eq!((asked, end.outcome()), (ASKS, Some(Outcome::Plain)));
}

#[test]
fn requests_do_not_wait_for_long() {
    let mut sends = Sends { begun: 1, ..Sends::default() };
    let mut end = Renegotiation::asked(1, terms(1, 3), INIT, 100, &mut sends).expect("they quiesce");
    assert!(sends.quiescing);
    let mut last = None;
    while let Some(due) = end.deadline() {
        last = end.poll(due.max(100), &mut sends);
        assert!(due <= 100 + MAX_QUIESCE);
    }
    assert_eq!(last.map(|message| message.message), Some(Control::Plain));
    assert_eq!((sends.quiescing, end.outcome()), (false, Some(Outcome::Plain)));
}

/// One end of the model below.
struct End {
    terms: Terms,
    sends: Sends,
    round: Option<Renegotiation>,
    last: u16,
    settled: Option<Negotiation>,
    asks: Vec<Nanos>,
    /// Requests of the peer that were executed
    received: u32,
}

impl End {
    fn is_star(&self) -> bool {
        let outcome = self.settled.as_ref().and_then(Negotiation::outcome);
        matches!(outcome, Some(Outcome::Star { .. }))
    }

    fn look(&mut self) {
        if let Some(round) = self.round.take_if(|round| round.outcome().is_some())
            && matches!(round.outcome(), Some(Outcome::Star { .. }))
        {
            self.settled = Some(round.into_negotiation());
        }
    }

    fn poll(&mut self, now: Nanos) -> Option<RoundMessage> {
        if self.asks.pop_if(|at| *at <= now).is_some() && self.round.is_none() && !self.is_star() {
            self.last += 1;
            self.round = Some(Renegotiation::ask(self.last, self.terms, INIT, now));
        }
        let message = self.round.as_mut().and_then(|round| round.poll(now, &mut self.sends));
        self.look();
        message
    }

    fn receive(&mut self, now: Nanos, peer: &Terms, message: &RoundMessage) -> Option<RoundMessage> {
        let from = PeerQp { gid: peer.gid, qpn: peer.qpn };
        let free = self.round.is_none() && !self.is_star();
        if let Control::Renegotiate { .. } = message.message
            && free
            && is_new(message.round, self.last)
            && suits(&self.terms, peer)
        {
            self.last = message.round;
            self.round = Renegotiation::asked(message.round, self.terms, INIT, now, &mut self.sends);
        }
        let answer = match &mut self.round {
            Some(round) if round.round() == message.round => {
                round.handle(now, from, &message.message, &mut self.sends)
            }
            _ => answer(message, from, self.settled.as_mut().filter(|_| message.round == self.last)),
        };
        self.look();
        answer
    }
}

#[derive(Clone, Copy)]
enum Frame {
    Message(RoundMessage),
    /// That request of the sender, the first time or again
    Request(u32),
    /// All requests before it are done
    Ack(u32),
}

/// Whatever the wire loses, repeats and delays: requests are executed once and in order, none when an end has
/// left plain RoCEv2, and both ends become the same, of which one keeps the state.
#[test]
fn no_wire_makes_the_ends_differ() {
    let (mut stars, mut plains) = (0, 0);
    for seed in 0..1500u64 {
        let mut rng = Rng::new([seed, 9]);
        let counts = [THRESHOLD + 1 + rng.word() as u32 % 100, rng.word() as u32 % 240];
        let mut ends = [0, 1].map(|at| {
            let asks = (0..4).map(|_| rng.word() % 400_000_000).collect::<Vec<_>>();
            End {
                terms: terms(at as u8 + 1, counts[at]),
                sends: Sends::default(),
                round: None,
                last: 0,
                settled: None,
                asks: if at == 0 || counts[1] > THRESHOLD { asks } else { Vec::new() },
                received: 0,
            }
        });
        let (loss, late) = (rng.word() % 40, 1 + rng.word() % 20_000_000);
        let mut wire: Vec<(Nanos, usize, Frame)> = Vec::new();
        for tick in 0..100_000u64 {
            let now = tick * 50_000;
            let mut out = Vec::new();
            for (me, end) in ends.iter_mut().enumerate() {
                out.extend(end.poll(now).map(|message| (me, Frame::Message(message))));
                let sends = &mut end.sends;
                let runs = !sends.quiescing && !sends.held;
                if runs && sends.begun - sends.done < 4 && tick < 50_000 && rng.word().is_multiple_of(10) {
                    sends.begun += 1;
                    out.push((me, Frame::Request(sends.begun - 1)));
                }
                if !sends.are_drained() && tick.is_multiple_of(40) {
                    out.push((me, Frame::Request(sends.done)));
                }
            }
            wire.sort_by_key(|(at, ..)| core::cmp::Reverse(*at));
            while let Some((_, to, frame)) = wire.pop_if(|(at, ..)| *at <= now) {
                let peer = ends[1 - to].terms;
                let end = &mut ends[to];
                match frame {
                    Frame::Message(message) => {
                        out.extend(
                            end.receive(now, &peer, &message).map(|message| (to, Frame::Message(message))),
                        );
                    }
                    Frame::Request(n) if n <= end.received => {
                        let new = n == end.received;
                        if end.sends.held && !new {
                            continue;
                        }
                        assert!(!new || !end.is_star(), "seed {seed}: a plain request to an end of StaR");
                        if end.sends.held {
                            end.sends.resume();
                        }
                        end.received += u32::from(new);
                        out.push((to, Frame::Ack(end.received)));
                    }
                    Frame::Request(_) => {}
                    Frame::Ack(n) => end.sends.done = end.sends.done.max(n),
                }
            }
            for (from, frame) in out {
                for _ in 0..1 + u64::from(rng.word().is_multiple_of(8)) {
                    if rng.word() % 100 >= loss {
                        wire.push((now + 10_000 + rng.word() % late, 1 - from, frame));
                    }
                }
            }
        }
        let roles = ends.each_ref().map(|end| end.settled.as_ref().and_then(Negotiation::outcome));
        match roles {
            [Some(Outcome::Star { role, .. }), Some(Outcome::Star { role: other, .. })] => {
                assert_eq!(role.other(), other, "seed {seed}");
                stars += 1;
            }
            [None, None] => {
                assert!(ends.iter().all(|end| !end.sends.quiescing && !end.sends.held), "seed {seed}");
                plains += 1;
            }
            other => panic!("seed {seed}: {other:?}"),
        }
        for at in 0..2 {
            let End { sends, received, .. } = &ends[at];
            assert_eq!((*received, sends.done), (ends[1 - at].sends.begun, sends.begun), "seed {seed}");
        }
    }
    assert!(stars > 500 && plains > 20, "{stars} {plains}");
}
