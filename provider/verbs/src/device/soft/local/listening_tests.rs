//! A card that listens hears whatever its peers do, and looks at nothing else.

use starverbs_core::Cqe;
use starverbs_core::types::QPN_BLOCK_SHIFT;
use starverbs_free_port::free_port;

use super::super::record::{LocalRecord, control};
use super::super::tests::{Card, connect, send};
use super::*;
use crate::Qp;

/// More than a card looks at one by one: each is two channels.
const PEERS: usize = LOOKED_AT / 2 + 2;

/// A card, its peers, and a queue pair of each side.
struct Star {
    hub: Card,
    peers: Vec<(Card, Qp, Qp)>,
}

impl Star {
    fn new() -> Star {
        let port = free_port();
        let hub = Card::new(port);
        let peers: Vec<_> = (0..PEERS)
            .map(|_| {
                let card = Card::new(port);
                let (ours, theirs) = (hub.qp(), card.qp());
                (card, ours, theirs)
            })
            .collect();
        for (card, ours, theirs) in &peers {
            connect(ours, card, theirs);
            connect(theirs, &hub, ours);
        }
        let star = Star { hub, peers };
        star.settle();
        star
    }

    /// All that is under way comes.
    fn settle(&self) {
        for _ in 0..100 {
            self.hub.take();
            self.peers.iter().for_each(|(card, ..)| card.take());
        }
    }

    /// What looks at the hub's channels find from now on; the bell is not rung yet.
    fn listen(&self) {
        self.hub.soft.with(|shard, _| {
            shard.env.channels.listening.looks = 0;
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
fn a_card_with_many_peers_hears_each_of_them() {
    let star = Star::new();
    assert!(star.hub.soft.with(|shard, _| shard.env.channels.listening.bell.is_some()));
    for (card, ours, theirs) in &star.peers {
        assert!(card.soft.with(|shard, _| shard.env.channels.listening.bell.is_none()), "it has one peer");
        star.listen();
        assert!((0..3).all(|_| star.is_quiet()));
        /* a request of the peer's */
        send(theirs);
        star.hub.take();
        assert_eq!(star.completions(), 2);
        star.hub.take();
        card.take();
        /* that one of its own is done */
        star.listen();
        send(ours);
        assert!(star.is_quiet());
        card.take();
        card.take();
        star.hub.take();
        assert_eq!(star.completions(), 2);
    }
}

#[test]
fn a_card_that_owes_somebody_a_call_is_not_quiet() {
    let star = Star::new();
    let (_, ours, theirs) = &star.peers[0];
    star.listen();
    star.hub.soft.with(|shard, _| {
        let channels = &mut shard.env.channels;
        assert!(channels.are_quiet());
        let channel = channels.channel_to(theirs.number() >> QPN_BLOCK_SHIFT).expect("a channel");
        let record = LocalRecord { op: control::WITHDRAW, from: ours.number(), ..LocalRecord::default() };
        channels.send_control(channel, record);
        assert!(!channels.are_quiet());
        channels.flush();
        assert!(channels.are_quiet());
    });
}

#[test]
fn who_has_no_bell_yet_calls() {
    let star = Star::new();
    let (card, _, theirs) = &star.peers[0];
    card.soft.with(|shard, _| {
        shard.env.channels.askers.iter_mut().flatten().for_each(|asker| asker.bell = None);
    });
    star.listen();
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
fn a_card_that_slept_listens_again() {
    let star = Star::new();
    let (card, _, theirs) = &star.peers[0];
    star.hub.soft.with(|shard, _| shard.env.channels.prepare_to_sleep());
    send(theirs);
    star.hub.soft.with(|shard, _| shard.env.channels.stay_awake());
    star.hub.take();
    assert_eq!(star.completions(), 2);
    star.settle();
    star.listen();
    assert!(star.is_quiet());
    send(theirs);
    assert!(!star.is_quiet());
    drop(card.soft.clone());
}
