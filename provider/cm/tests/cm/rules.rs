//! Rules of the connection manager, one by one, on virtual time.

use crate::common::{MS, PORT, SECOND, Wire, World, accept, connect, gid, resolve};
use starverbs_cm::wire::{Attribute, Mad, fields};
use starverbs_cm::{
    Cm, CmConfig, CmError, CmPath, ConnEvent, ListenAt, OutboundMad, PortSpace, Scope, reason,
};
use starverbs_core::{Gid, Mtu};

/// An established connection between hosts 0 and 1: its two IDs.
fn established(world: &mut World, qpn: u32) -> (u32, u32) {
    let a = world.connect(0, 1, qpn);
    world.run_for(10 * MS);
    let (b, event) = world.event(1);
    assert!(matches!(event, ConnEvent::Request { .. }));
    world.on(1, |cm, now| cm.accept(now, b, &accept(qpn + 1000))).expect("a request");
    world.run_for(10 * MS);
    assert!(matches!(world.event(0), (id, ConnEvent::Response(_)) if id == a));
    world.on(0, |cm, _| cm.establish(a)).expect("a response");
    world.run_for(10 * MS);
    assert_eq!(world.event(1), (b, ConnEvent::Established));
    (a, b)
}

fn world() -> World {
    let mut world = World::new(2, Wire::default(), 9);
    world.listen(1, PortSpace::Tcp, 2);
    world
}

#[test]
fn a_slow_program_has_its_peer_wait() {
    let mut world = world();
    let a = world.connect(0, 1, 100);
    /* the first repetition is answered by an MRA, which asks for more than a minute */
    world.run_for(60 * SECOND);
    assert_eq!(world.sent, 3, "REQ, REQ, MRA");
    assert!(world.events(0).is_empty());
    let (b, _) = world.event(1);
    world.on(1, |cm, now| cm.accept(now, b, &accept(200))).expect("a request");
    /* and the other way round */
    world.run_for(60 * SECOND);
    assert_eq!(world.sent, 6, "REP, REP, MRA");
    world.on(0, |cm, _| cm.establish(a)).expect("a response");
    world.run_for(10 * MS);
    assert_eq!(world.event(1), (b, ConnEvent::Established));
}

#[test]
fn the_backlog_bounds_what_waits() {
    let mut world = world();
    let ids: Vec<u32> = (0..3).map(|n| world.connect(0, 1, 100 + n)).collect();
    world.run_for(10 * MS);
    let waiting = world.events(1);
    assert_eq!(waiting.len(), 2);
    let (id, event) = world.event(0);
    assert!(matches!(event, ConnEvent::Rejected { reason: reason::NO_RESOURCES, .. }));
    assert!(ids.contains(&id), "whichever came last");
    world.on(1, |cm, now| cm.reject(now, waiting[0].0, reason::CONSUMER, &[])).expect("a request");
    world.connect(0, 1, 104);
    world.run_for(10 * MS);
    assert_eq!(world.events(1).len(), 1, "there is room again");
}

/// In Linux a request leaves the backlog when rdma_get_cm_event(3) gives it to the program.
#[test]
fn what_the_program_has_taken_leaves_the_backlog() {
    let mut world = world();
    for n in 0..5 {
        world.connect(0, 1, 100 + n);
        world.run_for(10 * MS);
        let (id, event) = world.event(1);
        assert!(matches!(event, ConnEvent::Request { .. }));
        world.on(1, |cm, _| cm.taken(id));
    }
    assert!(world.events(0).is_empty(), "nobody is rejected");
}

#[test]
fn without_memory_requests_are_refused() {
    let mut world = world();
    world.listen(1, PortSpace::Udp, 2);
    world.hosts[1].cm.ask_for_room(|| false);
    world.connect(0, 1, 100);
    world.run_for(10 * MS);
    assert!(matches!(world.event(0).1, ConnEvent::Rejected { reason: reason::NO_RESOURCES, .. }));
    world.on(0, |cm, now| cm.resolve(now, &resolve(0, 1))).expect("a question");
    world.run_for(10 * MS);
    assert!(matches!(world.event(0).1, ConnEvent::Unreachable(_)));
    assert!(world.events(1).is_empty() && world.hosts[1].cm.is_empty());
}

/// IBTA 12.6.7.2, reason 26: what the passive side cannot carry is refused at once, and the program
/// sees nothing of it.
#[test]
fn a_larger_path_mtu_than_there_is_is_refused() {
    let mut world = world();
    let limit = |mtu: Mtu| Box::new(move |_: &Gid| mtu);
    world.hosts[1].cm.limit_mtu(limit(Mtu::M512));
    world.connect(0, 1, 100);
    world.run_for(10 * MS);
    assert!(matches!(world.event(0).1, ConnEvent::Rejected { reason: reason::INVALID_PATH_MTU, .. }));
    assert!(world.events(1).is_empty() && world.hosts[1].cm.is_empty());
    world.hosts[1].cm.limit_mtu(limit(Mtu::M1024));
    world.connect(0, 1, 100);
    world.run_for(10 * MS);
    assert!(matches!(world.event(1).1, ConnEvent::Request { .. }), "it has what was asked for");
}

#[test]
fn a_queue_pair_that_connects_anew_ends_its_old_connection() {
    let mut world = world();
    let (_, b) = established(&mut world, 100);
    /* host 0 begins anew, with the same queue pair and another ID */
    world.hosts[0].cm = Cm::new(CmConfig { guid: 100, owner: 1, seed: 555 });
    let again = world.connect(0, 1, 100);
    world.run_for(10 * MS);
    let rejected = world.event(0);
    assert!(
        matches!(rejected, (id, ConnEvent::Rejected { reason: reason::STALE_CONNECTION, .. }) if id == again)
    );
    assert_eq!(
        world.event(1),
        (b, ConnEvent::Disconnected { timed_out: false }),
        "who does not know it has released it"
    );
    world.connect(0, 1, 100);
    world.run_for(10 * MS);
    assert!(matches!(world.event(1), (_, ConnEvent::Request { .. })));
}

#[test]
fn a_peer_that_is_gone_times_out() {
    let mut world = world();
    let (a, b) = established(&mut world, 100);
    world.wire.loss = 100;
    world.on(0, |cm, now| cm.disconnect(now, a)).expect("established");
    world.run_for(100 * SECOND);
    assert_eq!(
        world.events(0),
        [(a, ConnEvent::Disconnected { timed_out: true }), (a, ConnEvent::TimewaitExit)]
    );
    assert!(world.events(1).is_empty());
    world.wire.loss = 0;
    world.on(1, |cm, now| cm.disconnect(now, b)).expect("established");
    world.run_for(10 * MS);
    assert_eq!(world.event(1), (b, ConnEvent::Disconnected { timed_out: false }));
}

#[test]
fn both_sides_may_release_at_once() {
    let mut world = world();
    let (a, b) = established(&mut world, 100);
    world.on(0, |cm, now| cm.disconnect(now, a)).expect("established");
    world.on(1, |cm, now| cm.disconnect(now, b)).expect("established");
    world.run(|_| {});
    for (host, id) in [(0, a), (1, b)] {
        assert_eq!(
            world.events(host),
            [(id, ConnEvent::Disconnected { timed_out: false }), (id, ConnEvent::TimewaitExit)]
        );
    }
}

#[test]
fn calls_in_the_wrong_state_change_nothing() {
    let mut world = world();
    let a = world.connect(0, 1, 100);
    for wrong in [
        world.on(0, |cm, _| cm.establish(a)),
        world.on(0, |cm, now| cm.accept(now, a, &accept(1))),
        world.on(0, |cm, now| cm.reject(now, a, 28, &[])),
        world.on(0, |cm, now| cm.disconnect(now, a)),
        world.on(0, |cm, _| cm.communication_established(a)),
        world.on(0, |cm, now| cm.disconnect(now, 1)),
    ] {
        assert_eq!(wrong, Err(CmError::State));
    }
    world.run_for(10 * MS);
    let (b, _) = world.event(1);
    world.on(1, |cm, now| cm.accept(now, b, &accept(200))).expect("a request");
    assert_eq!(world.on(1, |cm, _| cm.communication_established(b)), Ok(()));
    assert_eq!(world.event(1), (b, ConnEvent::Established), "without an RTU");
    assert_eq!(world.on(1, |cm, _| cm.communication_established(b)), Err(CmError::Established));
}

#[test]
fn a_message_from_elsewhere_is_of_no_connection() {
    let mut world = world();
    let (a, b) = established(&mut world, 100);
    let mut dreq = Mad::new(Attribute::Dreq, 1);
    dreq.set(fields::LOCAL_ID, b.into());
    dreq.set(fields::REMOTE_ID, a.into());
    dreq.set(fields::dreq::REMOTE_QPN, 100);
    let other = CmPath { local: gid(0), remote: gid(7), ..CmPath::default() };
    world.on(0, |cm, now| cm.handle_mad(now, other, dreq.bytes()));
    let peer = CmPath { remote: gid(1), ..other };
    let mut wrong = dreq.clone();
    wrong.set(fields::dreq::REMOTE_QPN, 101);
    world.on(0, |cm, now| cm.handle_mad(now, peer, wrong.bytes()));
    wrong = dreq.clone();
    wrong.set(fields::LOCAL_ID, u64::from(b) + 1);
    world.on(0, |cm, now| cm.handle_mad(now, peer, wrong.bytes()));
    assert!(world.events(0).is_empty());
    world.on(0, |cm, now| cm.handle_mad(now, peer, dreq.bytes()));
    assert_eq!(world.event(0), (a, ConnEvent::Disconnected { timed_out: false }));
}

#[test]
fn the_narrowest_listener_gets_the_request() {
    let mut cm = Cm::new(CmConfig { guid: 1, owner: 1, seed: 1 });
    let service = PortSpace::Tcp.service_id(PORT);
    let mut listen = |scope| cm.listen(ListenAt { service, scope }, 1).expect("free");
    let (any, v4, one) = (listen(Scope::Any), listen(Scope::AnyV4), listen(Scope::One(gid(1))));
    assert_eq!(cm.listen(ListenAt { service, scope: Scope::Any }, 1), Err(CmError::InUse));
    for expected in [one, v4, any] {
        assert!(cm.listens(service, gid(1)));
        let mut other = Cm::new(CmConfig { guid: 2, owner: 2, seed: 2 });
        other.connect(0, &connect(0, 1, 100)).expect("good parameters");
        let OutboundMad { path, mad: req } = other.poll_send().expect("a REQ");
        cm.handle_mad(0, CmPath { local: path.remote, remote: Gid([0; 16]), ..path }, req.bytes());
        assert!(cm.poll_event().is_none(), "its header names another source");
        cm.handle_mad(0, CmPath { local: path.remote, remote: path.local, ..path }, req.bytes());
        let got = cm.poll_event().expect("a request");
        assert!(
            matches!(&got.event, ConnEvent::Request { listener, .. } if *listener == expected),
            "{got:?}"
        );
        cm.release(0, got.id);
        cm.handle_timeout(100 * SECOND);
        cm.unlisten(expected);
    }
    assert!(!cm.listens(service, gid(1)) && cm.is_empty());
}
