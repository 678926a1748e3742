//! Both ends of a connection that asks again and again to change, on a wire that loses, repeats and delays.

use starverbs_core::rng::Rng;

use super::*;

use std::vec::Vec;

/// One end of the model below, and what its host does.
struct Site {
    end: End,
    terms: Terms,
    is_lower: bool,
    round: Option<Round>,
    last: u16,
    asks: Vec<Nanos>,
    /// Since when requests wait for an answer of SL
    waits_since: Option<Nanos>,
    changes: u32,
    stays: u32,
}

impl Site {
    fn is(&self) -> Outcome {
        self.end.role.map_or(Outcome::Plain, star)
    }

    /// Both have begun as what they are.
    fn may_change(&self) -> bool {
        self.round.is_none() && (self.end.role != Some(SF) || self.end.runs)
    }

    fn look(&mut self) {
        if let Some(round) = self.round.take_if(|round| round.outcome().is_some()) {
            assert_eq!(round.outcome(), Some(self.is()));
            let changed = round.outcome() != Some(round.from);
            self.changes += u32::from(changed);
            self.stays += u32::from(!changed);
        }
    }

    fn handle(&mut self, now: Nanos, message: &Control) -> Option<Control> {
        /* a plain request says more */
        let plain = settled(Outcome::Plain);
        let message = if self.is_in_doubt() && self.end.runs_plain() { &plain } else { message };
        let answer = self.round.as_mut().and_then(|round| round.handle(now, message, &mut self.end));
        self.look();
        answer
    }

    fn is_in_doubt(&self) -> bool {
        self.round.as_ref().is_some_and(Round::is_in_doubt)
    }

    /// Whether a plain request of SL came, or it was silent for as long as the program bears.
    fn is_alone(&mut self, now: Nanos) -> bool {
        let waits = self.end.held && self.end.posted != self.end.begun;
        self.waits_since = self.waits_since.filter(|_| waits).or(waits.then_some(now));
        let overdue = self.waits_since.is_some_and(|since| now - since >= PATIENCE);
        self.is_in_doubt() && (overdue || self.end.runs_plain())
    }

    fn poll(&mut self, now: Nanos) -> Option<Control> {
        if self.asks.pop_if(|at| *at <= now).is_some() && self.may_change() {
            self.last += 1;
            self.round = Some(Round::ask(self.last, self.terms, self.is_lower, self.is(), now));
        }
        if self.is_alone(now) {
            self.handle(now, &settled(Outcome::Plain));
        }
        let message = self.round.as_mut().and_then(|round| round.poll(now, &mut self.end));
        self.look();
        message
    }

    fn receive(&mut self, now: Nanos, message: &Control) -> Option<Control> {
        let number = message.round().expect("one of a round");
        if let Control::Change { star, .. } = *message
            && is_new(number, self.last)
        {
            self.handle(now, &Control::Settled { round: self.last, star });
            self.last = number;
            if self.may_change() && star == self.end.role.is_some() {
                self.round = Some(Round::ask(number, self.terms, self.is_lower, self.is(), now));
            }
        }
        if self.round.as_ref().is_some_and(|round| round.number == number) {
            return self.handle(now, message);
        }
        let asks = !matches!(message, Control::Settled { .. });
        asks.then_some(Control::Settled { round: number, star: self.end.role.is_some() })
    }
}

#[derive(Clone, Copy)]
enum Frame {
    Message(Control),
    /// That request of the sender, the first time or again
    Request(u32),
    /// All requests before it are done
    Ack(u32),
    /// SL has begun
    Setup,
}

/// A connection, and what is on its wire.
struct World {
    rng: Rng,
    sites: [Site; 2],
    wire: Vec<(Nanos, usize, Frame)>,
    /// Messages that were sent, to come again long after
    old: Vec<(usize, Frame)>,
    loss: u64,
    late: u64,
    seed: u64,
}

impl World {
    fn new(seed: u64) -> World {
        let mut rng = Rng::new([seed, 9]);
        let counts = [THRESHOLD + 1 + rng.word() as u32 % 100, rng.word() as u32 % 240];
        let sites = [0, 1].map(|at| {
            let mut asks: Vec<_> = (0..6).map(|_| rng.word() % 1_500_000_000).collect();
            asks.sort_by_key(|at| core::cmp::Reverse(*at));
            Site {
                end: End::default(),
                terms: auto(counts[at]),
                is_lower: at == 0,
                round: None,
                last: 0,
                asks,
                waits_since: None,
                changes: 0,
                stays: 0,
            }
        });
        let (loss, late) = (rng.word() % 40, 1 + rng.word() % 20_000_000);
        World { rng, sites, wire: Vec::new(), old: Vec::new(), loss, late, seed }
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.rng.word().is_multiple_of(n)
    }

    /// What programs and transports do at an end; gives what it sends.
    fn work(&mut self, me: usize, tick: u64, posts: bool) -> Vec<Frame> {
        let (begins, ends, again) = (self.one_in(10), self.one_in(20), tick.is_multiple_of(40));
        (self.sites[me].end.busy, self.sites[me].end.no_memory) = (self.one_in(3), self.one_in(8));
        let [a, b] = &mut self.sites;
        let (end, peer) = if me == 0 { (&mut a.end, &mut b.end) } else { (&mut b.end, &mut a.end) };
        let mut out = Vec::new();
        if posts && begins && end.posted - end.done < 4 {
            end.posted += 1;
        }
        let begins = begins || !posts;
        if end.runs_plain() {
            if !end.quiescing && begins && end.begun < end.posted {
                end.begun += 1;
                out.push(Frame::Request(end.begun - 1));
            }
            if end.begun != end.done && again {
                out.push(Frame::Request(end.done));
            }
        }
        if end.role == Some(SL) && again && !peer.runs {
            out.push(Frame::Setup);
        }
        if end.runs_star() {
            assert_eq!(peer.role, Some(SL), "seed {}: SF goes on, and SL is plain", self.seed);
            if !end.quiescing && begins {
                end.begun += u32::from(end.begun < end.posted);
                end.begun_of_peer += u32::from(!peer.quiescing && end.begun_of_peer < peer.posted);
            }
            if ends {
                let (mine, theirs) = (end.begun != end.done, end.begun_of_peer != end.received);
                (end.done, peer.received) = (end.done + u32::from(mine), peer.received + u32::from(mine));
                end.received += u32::from(theirs);
                (peer.begun, peer.done) = (end.begun_of_peer, end.received);
            }
        }
        out
    }

    fn arrives(&mut self, now: Nanos, to: usize, frame: Frame) -> Option<Frame> {
        let Site { end, .. } = &mut self.sites[to];
        match frame {
            Frame::Message(message) => {
                return self.sites[to].receive(now, &message).map(Frame::Message);
            }
            Frame::Request(n) if n <= end.received => {
                let new = n == end.received;
                if !new && (end.held || end.role.is_some()) {
                    return None;
                }
                assert!(
                    end.held || end.role.is_none(),
                    "seed {}: a plain request to an end of StaR",
                    self.seed
                );
                if end.held {
                    end.becomes_plain();
                }
                end.received += u32::from(new);
                return Some(Frame::Ack(end.received));
            }
            Frame::Ack(n) if end.role.is_none() => end.done = end.done.max(n.min(end.begun)),
            Frame::Setup if end.held && !end.runs => {
                if self.sites[to].round.as_ref().is_some_and(|round| round.awaits_setup(BOOT)) {
                    self.sites[to].handle(now, &settled(star(SF)));
                }
                let end = &mut self.sites[to].end;
                if end.role == Some(SF) {
                    (end.runs, end.held, end.begun_of_peer) = (true, false, end.received);
                }
            }
            _ => {}
        }
        None
    }

    fn send(&mut self, now: Nanos, from: usize, frame: Frame) {
        if let Frame::Message(_) = frame {
            self.old.push((1 - from, frame));
        }
        for _ in 0..1 + u64::from(self.one_in(8)) {
            if self.rng.word() % 100 >= self.loss {
                self.wire.push((now + 10_000 + self.rng.word() % self.late, 1 - from, frame));
            }
        }
    }

    fn tick(&mut self, now: Nanos, tick: u64, posts: bool, gone: Option<usize>) {
        let mut out = Vec::new();
        for me in (0..2).filter(|me| gone != Some(*me)) {
            out.extend(self.sites[me].poll(now).map(|message| (me, Frame::Message(message))));
            out.extend(self.work(me, tick, posts).into_iter().map(|frame| (me, frame)));
        }
        if !self.old.is_empty() && self.one_in(400) {
            let n = self.rng.word() as usize % self.old.len();
            let (to, frame) = self.old[n];
            self.wire.push((now, to, frame));
        }
        self.wire.sort_by_key(|(at, ..)| core::cmp::Reverse(*at));
        while let Some((_, to, frame)) = self.wire.pop_if(|(at, ..)| *at <= now) {
            if gone != Some(to) {
                out.extend(self.arrives(now, to, frame).map(|answer| (to, answer)));
            }
            self.assert_safe(gone);
        }
        for (from, frame) in out {
            self.send(now, from, frame);
        }
    }

    /// No end goes on as what the other is not.
    fn assert_safe(&self, gone: Option<usize>) {
        for at in (0..2).filter(|_| gone.is_none()) {
            let [end, peer] = [at, 1 - at].map(|at| &self.sites[at].end);
            let waits = peer.role == Some(SF) && !peer.runs_star();
            assert!(!end.runs_plain() || peer.role.is_none() || peer.held || waits, "seed {}", self.seed);
            assert!(end.role != Some(SL) || peer.held || peer.runs || waits, "seed {}", self.seed);
            /* SL has just left plain RC */
            let same = (peer.received, peer.done) == (end.done, end.received);
            assert!(end.role != Some(SL) || peer.runs || same, "seed {}", self.seed);
        }
    }
}

/// Whatever the wire loses, repeats, delays and brings again long after, and whoever asks, perhaps both at
/// once: requests are executed once and in order, neither end goes on in a form that the other has left, and
/// both become the same, of which one keeps the state.
#[test]
fn no_wire_makes_the_ends_differ() {
    let (mut changes, mut stays) = (0, 0);
    for seed in 0..200u64 {
        let mut w = World::new(seed);
        for tick in 0..60_000u64 {
            /* in the end the wire is a good one, and all arrives */
            let over = tick.saturating_sub(40_000);
            let now = tick.min(40_000) * 50_000 + over * 200_000;
            w.loss = if over > 0 { 0 } else { w.loss };
            w.tick(now, tick, over == 0, None);
        }
        let [a, b] = &w.sites;
        assert_eq!(a.end.role.map(Role::other), b.end.role, "seed {seed}");
        for (site, peer) in [(a, b), (b, a)] {
            let End { posted, done, quiescing, held, .. } = site.end;
            assert!(site.round.is_none() && !quiescing && !held, "seed {seed}");
            assert_eq!((peer.end.received, done), (posted, posted), "seed {seed}");
        }
        assert!(a.changes.abs_diff(b.changes) <= 1, "seed {seed}: {} {}", a.changes, b.changes);
        changes += a.changes;
        stays += a.stays;
    }
    assert!(changes > 400 && stays > 40, "{changes} {stays}");
}

/// One end vanishes, at any moment or when the other is in doubt: nothing of the other's program waits for
/// longer than it bears.
#[test]
fn who_is_left_alone_goes_on() {
    let mut doubts = 0;
    for seed in 0..150u64 {
        let mut w = World::new(seed);
        (w.loss, w.late) = (w.loss / 4, w.late / 10 + 1);
        let (mut left, at, any) = (w.one_in(2) as usize, w.rng.word() % 20_000, seed.is_multiple_of(2));
        let mut ticks = 0;
        while ticks < if any { at } else { 40_000 } {
            w.tick(ticks * 50_000, ticks, true, None);
            ticks += 1;
            if let Some(doubts) = w.sites.iter().position(Site::is_in_doubt).filter(|_| !any) {
                left = doubts;
                break;
            }
        }
        w.sites[left].asks.clear();
        doubts += u32::from(w.sites[left].is_in_doubt());
        for tick in 0..20_000 {
            w.tick(ticks * 50_000 + tick * 1_000_000, tick, true, Some(1 - left));
        }
        let Site { end, round, .. } = &w.sites[left];
        assert!(round.is_none() && !end.quiescing, "seed {seed}");
        assert!(!end.held || end.role == Some(SF) && !end.runs, "seed {seed}: held in a round");
    }
    assert!(doubts > 50, "{doubts}");
}
