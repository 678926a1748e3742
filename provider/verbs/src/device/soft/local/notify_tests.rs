//! A card that awaits its doorbell finds out whatever its peers do, and polls nothing else.

use starverbs_core::Cqe;
use starverbs_core::types::QPN_BLOCK_SHIFT;
use starverbs_free_port::free_port;

use super::super::record::{LocalRecord, control};
use super::super::tests::{Card, connect, send};
use super::*;
use crate::Qp;
use crate::device::soft::Shard;

/// More than a card looks at one by one: each is two channels.
const PEERS: usize = POLLED / 2 + 2;

/// A card, its peers, and a queue pair of each side.
struct Star {
    port: u16,
    hub: Card,
    peers: Vec<(Card, Qp, Qp)>,
}

impl Star {
    fn new() -> Star {
        let port = free_port();
        let mut star = Star { port, hub: Card::new(port), peers: Vec::new() };
        (0..PEERS).for_each(|_| star.join());
        star.settle();
        star
    }

    /// One more peer.
    fn join(&mut self) {
        let card = Card::new(self.port);
        let (ours, theirs) = (self.hub.qp(), card.qp());
        connect(&ours, &card, &theirs);
        connect(&theirs, &self.hub, &ours);
        self.peers.push((card, ours, theirs));
    }

    /// All that is under way comes.
    fn settle(&self) {
        for _ in 0..100 {
            self.hub.take();
            self.peers.iter().for_each(|(card, ..)| card.take());
        }
    }

    /// What looks at the hub's channels find from now on; the doorbell is not rung yet.
    fn await_doorbell(&self) {
        self.hub.soft.with(|shard, _| {
            shard.env.channels.watch.polls = 0;
            shard.env.channels.are_quiet();
        });
    }

    fn is_quiet(&self) -> bool {
        self.hub.soft.with(|shard, _| shard.env.channels.are_quiet())
    }

    /// Completions at the hub.
    fn completions(&self) -> usize {
        let mut cqes = [Cqe::default(); 8];
        self.hub.cq.poll(&mut cqes).unwrap()
    }
}

#[test]
fn a_card_with_many_peers_is_notified_by_each() {
    let star = Star::new();
    assert!(star.hub.soft.with(|shard, _| shard.env.channels.watch.doorbell.is_some()));
    for (card, ours, theirs) in &star.peers {
        assert!(card.soft.with(|shard, _| shard.env.channels.watch.doorbell.is_none()), "it has one peer");
        star.await_doorbell();
        assert!((0..3).all(|_| star.is_quiet()));
        /* a request of the peer's */
        send(theirs);
        star.hub.take();
        assert_eq!(star.completions(), 2);
        star.hub.take();
        card.take();
        /* that one of its own is done */
        star.await_doorbell();
        send(ours);
        assert!(star.is_quiet());
        card.take();
        card.take();
        star.hub.take();
        assert_eq!(star.completions(), 2);
    }
}

#[test]
fn a_card_that_is_to_notify_somebody_is_not_quiet() {
    let star = Star::new();
    let (_, ours, theirs) = &star.peers[0];
    star.await_doorbell();
    star.hub.soft.with(|shard, _| {
        let channels = &mut shard.env.channels;
        assert!(channels.are_quiet());
        let channel = channels.channel_to(theirs.number() >> QPN_BLOCK_SHIFT).expect("a channel");
        let record = LocalRecord { op: control::WITHDRAW, from: ours.number(), ..LocalRecord::default() };
        channels.send_control(channel, record);
        assert!(!channels.are_quiet());
        channels.flush(true);
        assert!(channels.are_quiet());
    });
}

#[test]
fn who_has_no_doorbell_yet_sends_a_wake_up() {
    let star = Star::new();
    let (card, _, theirs) = &star.peers[0];
    card.soft.with(|shard, _| {
        shard.env.channels.askers.iter_mut().flatten().for_each(|asker| asker.doorbell = None);
    });
    star.await_doorbell();
    send(theirs);
    /* a look at the sessions' sockets, as by each so many polls */
    star.hub.soft.with(|shard, _| {
        shard.intake.rx.prepare_to_sleep();
        shard.intake.rx.set_polled(true);
    });
    star.hub.take();
    assert_eq!(star.completions(), 2);
}

#[test]
fn a_card_that_slept_awaits_its_doorbell_again() {
    let star = Star::new();
    let (_, _, theirs) = &star.peers[0];
    star.hub.soft.with(|shard, _| shard.env.channels.prepare_to_sleep());
    send(theirs);
    star.hub.soft.with(|shard, _| shard.env.channels.stay_awake());
    star.hub.take();
    assert_eq!(star.completions(), 2);
    star.settle();
    star.await_doorbell();
    assert!(star.is_quiet());
    send(theirs);
    assert!(!star.is_quiet());
}

#[test]
fn a_card_that_has_few_peers_again_is_notified_by_a_new_one() {
    let mut star = Star::new();
    star.peers.truncate(2);
    star.settle();
    let channels = |shard: &mut Shard| shard.env.channels.answerers.len();
    assert_eq!(star.hub.soft.with(|shard, _| channels(shard)), 2);
    star.join();
    star.settle();
    star.await_doorbell();
    assert!(star.is_quiet());
    send(&star.peers[2].2);
    assert!(!star.is_quiet());
}

#[test]
fn what_another_peer_clears_the_doorbell_of_is_found() {
    let star = Star::new();
    let (card, _, theirs) = &star.peers[0];
    star.await_doorbell();
    send(theirs);
    card.soft.with(|shard, _| {
        let asker = shard.env.channels.askers.iter().flatten().next().expect("a channel");
        assert!(asker.doorbell.as_ref().expect("it has it").take());
    });
    let polls = (0..2 * POLL_ALL).take_while(|_| star.is_quiet()).count() as u32;
    assert!((1..=POLL_ALL).contains(&polls), "{polls}");
}
