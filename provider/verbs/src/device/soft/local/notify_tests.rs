//! A card that awaits its doorbell finds out whatever its peers do, and polls nothing else.

use std::os::fd::RawFd;

use starverbs_backend::DATA_OF_MANY;
use starverbs_core::Cqe;
use starverbs_core::types::{QPN_BLOCK_SHIFT, SendOp};
use starverbs_free_port::free_port;
use starverbs_rings::SlotWriter;

use super::super::channels::LARGE;
use super::super::record::{LocalRecord, control};
use super::super::tests::{Card, connect, send};
use super::*;
use crate::Qp;
use crate::device::soft::Shard;

/// More than a card looks at one by one: each is two channels.
const PEERS: usize = POLLED / 2 + 2;

/// Has a card write records into its channel to a queue pair's card, as long as there is room and `next` has
/// one.
fn write(from: &Card, to: &Qp, mut next: impl FnMut() -> Option<LocalRecord>) {
    from.soft.with(|shard, _| {
        let channels = &mut shard.env.channels;
        let channel = channels.channel_to(to.number() >> QPN_BLOCK_SHIFT).expect("a channel");
        while channels.room(channel, 0).is_some()
            && let Some(record) = next()
        {
            channels.send_control(channel, record);
        }
        channels.flush(true);
    });
}

/// Has a card fill its channel to a queue pair's card, with what is of no consequence.
fn fill(from: &Card, to: &Qp) {
    write(from, to, || Some(LocalRecord { op: control::WITHDRAW, ..LocalRecord::default() }));
}

/// A card, its peers, and a queue pair of each side.
struct Star {
    port: u16,
    hub: Card,
    peers: Vec<(Card, Qp, Qp)>,
}

/// A thread that sleeps on these descriptors. (A call into its card would have the others wake it anew.)
struct Sleeper(Vec<RawFd>);

impl Sleeper {
    fn is_woken(&self) -> bool {
        let pollfd = |fd: &RawFd| libc::pollfd { fd: *fd, events: libc::POLLIN, revents: 0 };
        let mut fds: Vec<_> = self.0.iter().map(pollfd).collect();
        // SAFETY: so many descriptors to look at.
        unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, 0) > 0 }
    }
}

impl Star {
    fn new() -> Star {
        Star::of(PEERS)
    }

    fn of(peers: usize) -> Star {
        let port = free_port();
        let mut star = Star { port, hub: Card::new(port), peers: Vec::new() };
        (0..peers).for_each(|_| star.join());
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

    /// The hub's thread sleeps from now on. `None`: there is something to do.
    fn sleep(&self) -> Option<Sleeper> {
        self.hub.soft.with(|shard, _| {
            shard.intake.rx.prepare_to_sleep();
            let busy = shard.env.channels.prepare_to_sleep();
            (!busy).then(|| Sleeper(shard.intake.rx.fds().to_vec()))
        })
    }

    fn wake(&self) {
        self.hub.soft.with(|shard, _| shard.env.channels.stay_awake());
    }

    /// Completions at the hub.
    fn completions(&self) -> usize {
        let mut cqes = [Cqe::default(); 8];
        self.hub.cq.poll(&mut cqes).unwrap()
    }
}

/// The first channels of a card use all of their memory, which would add up with many.
#[test]
fn the_channels_of_many_peers_keep_to_less_memory() {
    let star = Star::of(LARGE + 2);
    let lengths = star.hub.soft.with(|shard, _| {
        let channels = &mut shard.env.channels;
        let asked = channels.askers.iter_mut().flatten().map(|asker| &mut asker.channel.requests);
        let answered = channels.answerers.iter_mut().map(|answerer| &mut answerer.channel.answers);
        let mut takes = |ring: &mut SlotWriter| ring.room(DATA_OF_MANY + 1).unwrap().is_some();
        [asked.map(&mut takes).collect::<Vec<_>>(), answered.map(takes).collect()]
    });
    let few = [[true; LARGE].as_slice(), &[false; 2]].concat();
    assert_eq!(lengths, [few.clone(), few]);
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

/// A program posts, and finds the ring full.
#[test]
fn who_waits_for_room_is_woken_where_its_thread_sleeps() {
    for peers in [1, PEERS] {
        let star = Star::of(peers);
        let (card, ours, theirs) = &star.peers[0];
        /* room comes before the thread sleeps */
        fill(&star.hub, theirs);
        send(ours);
        card.take();
        assert!(star.sleep().is_none(), "there is room");
        star.wake();
        star.settle();
        assert_eq!(star.completions(), 2);
        /* the thread sleeps before the program posts */
        let sleeper = star.sleep().expect("all is done");
        fill(&star.hub, theirs);
        send(ours);
        assert!(!sleeper.is_woken());
        card.take();
        assert!(sleeper.is_woken(), "it sleeps on");
        star.wake();
        star.settle();
        assert_eq!(star.completions(), 2);
    }
}

/// A card is asked for more answers than there is room for.
#[test]
fn who_waits_for_room_to_answer_is_woken_where_its_thread_sleeps() {
    const ASKED: u32 = 200;
    for peers in [1, PEERS] {
        let star = Star::of(peers);
        let (card, ours, _) = &star.peers[0];
        let answers = || {
            let of =
                |shard: &Shard| shard.env.channels.askers.iter().flatten().map(|asker| asker.answers).sum();
            card.soft.with(|shard, _| -> u32 { of(shard) })
        };
        let before = answers();
        /* of no queue pair, for none: each is answered so */
        let (mut left, nobody) = (ASKED, ours.number() + 100);
        write(card, ours, || {
            left = left.checked_sub(1)?;
            Some(LocalRecord { op: SendOp::Send as u8, to: nobody, from: 0, ..LocalRecord::default() })
        });
        (0..10).for_each(|_| star.hub.take());
        let blocked = |shard: &mut Shard| shard.env.channels.answerers.iter().filter(|a| a.blocked).count();
        assert_eq!(star.hub.soft.with(|shard, _| blocked(shard)), 1);
        let sleeper = star.sleep().expect("nothing can be done");
        assert!(!sleeper.is_woken());
        card.take();
        assert!(sleeper.is_woken(), "it sleeps on");
        star.wake();
        star.settle();
        assert_eq!(answers() - before, ASKED);
    }
}
