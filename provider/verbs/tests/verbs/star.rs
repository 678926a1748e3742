//! StaR between two cards: what the ends settle, and that programs see nothing of it.

use crate::common::wire as settings;
use crate::common::*;
use starverbs_core::qp::QpAttrMask;
use starverbs_core::{QpState, QpType, SendOp, WcStatus};
use starverbs_settings::{FaultSpec, LinkMode, Network, Settings, StarKey, StarPreference};
use starverbs_verbs::{Preference, Qp, QpAttr, QpInit, RecvWr, SendWr, Settled, Srq, VerbsEvent, kind};

/// Two cards on one wire whose settings ask for these roles.
fn pair(preferences: [StarPreference; 2]) -> [Node; 2] {
    let wire = settings();
    preferences.map(|star| Node::new(&Settings { star, ..wire.clone() }))
}

fn role(qp: &Qp) -> Settled {
    qp.star().unwrap().role
}

/// Two connected queue pairs, once it is settled what they are.
fn connected(nodes: &[Node; 2]) -> [Qp; 2] {
    let [a, b] = nodes;
    let qps = [a.qp(QpType::Rc), b.qp(QpType::Rc)];
    connect(a, &qps[0], b, &qps[1]);
    wait_for("an agreement", || qps.iter().all(|qp| role(qp) != Settled::Waiting));
    qps
}

/// A message each way.
fn talk(nodes: &[Node; 2], qps: &[Qp; 2]) {
    let [a, b] = nodes;
    for (round, (from, to)) in [((a, &qps[0]), (b, &qps[1])), ((b, &qps[1]), (a, &qps[0]))].iter().enumerate()
    {
        let id = round as u64;
        to.0.post_recv(to.1, id, 100, 5000).unwrap();
        post(from.1, &send(id + 10, &[from.0.sge(0, 4000)])).unwrap();
        let got = to.0.completions(1)[0];
        assert_eq!((got.wr_id, got.status, got.byte_len), (id, WcStatus::Success, 4000));
        let sent = from.0.completions(1)[0];
        assert_eq!((sent.wr_id, sent.status), (id + 10, WcStatus::Success));
    }
}

#[test]
fn without_a_need_or_a_willing_peer_it_is_plain_rocev2() {
    let of = [StarPreference::Off, StarPreference::Auto, StarPreference::Stateless, StarPreference::Stateful];
    for preferences in of.into_iter().flat_map(|a| of.map(|b| [a, b])) {
        let agree = match preferences {
            [StarPreference::Off, _]
            | [_, StarPreference::Off]
            | [StarPreference::Auto, StarPreference::Auto] => false,
            [a, b] => a != b,
        };
        if !agree {
            let nodes = pair(preferences);
            let qps = connected(&nodes);
            assert_eq!([role(&qps[0]), role(&qps[1])], [Settled::Plain; 2], "{preferences:?}");
            talk(&nodes, &qps);
        }
    }
}

/// Two cards on one wire with these keys.
fn keyed(keys: [Option<u8>; 2], preferences: [StarPreference; 2]) -> [Node; 2] {
    keyed_on(&settings(), keys, preferences)
}

fn keyed_on(wire: &Settings, keys: [Option<u8>; 2], preferences: [StarPreference; 2]) -> [Node; 2] {
    std::array::from_fn(|at| {
        let star_key = keys[at].map(|byte| StarKey::Given([byte; 32].into()));
        Node::new(&Settings { star: preferences[at], star_key, ..wire.clone() })
    })
}

#[test]
fn without_the_same_key_it_is_plain_rocev2() {
    for keys in [[Some(1), Some(2)], [Some(1), None], [None, Some(1)]] {
        let nodes = keyed(keys, [StarPreference::Stateless, StarPreference::Stateful]);
        let qps = connected(&nodes);
        assert_eq!([role(&qps[0]), role(&qps[1])], [Settled::Plain; 2], "{keys:?}");
        talk(&nodes, &qps);
        for (node, key) in nodes.iter().zip(keys) {
            let counters = node.ctx.counters().unwrap();
            assert_eq!(counters.star_foreign.get() > 0, key.is_some(), "{keys:?}");
        }
    }
}

/// Under one key a refusal is accepted: nobody waits for silence.
#[test]
fn under_one_key_a_refusal_is_believed() {
    let nodes = keyed([Some(1); 2], [StarPreference::Stateful; 2]);
    let qps = connected(&nodes);
    assert_eq!([role(&qps[0]), role(&qps[1])], [Settled::Plain; 2]);
    talk(&nodes, &qps);
    for node in &nodes {
        let counters = node.ctx.counters().unwrap();
        assert_eq!((counters.star_foreign.get(), counters.star_replayed.get()), (0, 0));
    }
}

/// Under one key it is StaR. Duplicates of the wire and retransmissions are distinguished, and no packet is
/// taken for an untrusted peer's.
#[test]
fn under_one_key_ends_settle_and_talk() {
    let fault = FaultSpec { duplicate: 0.3, loss: 0.05, reorder: 0.1, ..FaultSpec::default() };
    let wire = Settings { fault, ..settings() };
    let nodes = keyed_on(&wire, [Some(1); 2], [StarPreference::Stateless, StarPreference::Stateful]);
    let mut stars = 0;
    for _ in 0..10 {
        let qps = connected(&nodes);
        stars += u32::from(role(&qps[0]) == Settled::Stateless);
        talk(&nodes, &qps);
    }
    assert!(stars >= 5, "{stars}");
    let counters = nodes.each_ref().map(|node| node.ctx.counters().unwrap());
    assert_eq!(counters.map(|c| c.star_foreign.get()), [0, 0]);
    assert!(counters.iter().any(|c| c.star_replayed.get() > 0));
}

/// One end's partition is enough to keep a connection plain.
#[test]
fn there_is_star_within_a_partition_alone() {
    let network = |addr: &str, bits| Network { addr: addr.parse().unwrap(), bits };
    let [here, elsewhere] = [network("127.0.0.0", 8), network("10.0.0.0", 8)];
    for (partitions, settled) in [
        ([Some(vec![elsewhere, here]), None], [Settled::Stateless, Settled::Stateful]),
        ([Some(vec![elsewhere]), None], [Settled::Plain; 2]),
        ([None, Some(vec![elsewhere])], [Settled::Plain; 2]),
    ] {
        let (wire, roles) = (settings(), [StarPreference::Stateless, StarPreference::Stateful]);
        let nodes: [Node; 2] = std::array::from_fn(|at| {
            Node::new(&Settings { star: roles[at], star_partition: partitions[at].clone(), ..wire.clone() })
        });
        let qps = connected(&nodes);
        assert_eq!([role(&qps[0]), role(&qps[1])], settled, "{partitions:?}");
        talk(&nodes, &qps);
    }
}

/// A local connection has no state to keep on a card: it is plain RC, whatever the programs want, and counted
/// so.
#[test]
fn a_local_connection_needs_no_star() {
    let card = local();
    let nodes = [StarPreference::Stateless, StarPreference::Stateful]
        .map(|star| Node::new(&Settings { star, ..card.clone() }));
    let plain = || counters(card.port, "star_plain_qps");
    let qps = connected(&nodes);
    assert_eq!([role(&qps[0]), role(&qps[1])], [Settled::Plain; 2]);
    assert_eq!((counters(card.port, "local_qps"), plain()), (vec![1; 2], vec![1; 2]));
    qps[0].change_preference(Some(Preference::Stateful)).unwrap();
    talk(&nodes, &qps);
    drop(qps);
    assert_eq!(plain(), [0; 2]);
}

/// Where a peer of this host wants packets, roles are settled as between hosts.
#[test]
fn a_peer_of_this_host_that_wants_packets_settles_roles() {
    for packets in [0, 1] {
        let card = local();
        let star = [StarPreference::Stateless, StarPreference::Stateful];
        let link = |at| if at == packets { LinkMode::Udp } else { LinkMode::Auto };
        let nodes: [Node; 2] =
            std::array::from_fn(|at| Node::new(&Settings { star: star[at], link: link(at), ..card.clone() }));
        let qps = connected(&nodes);
        assert_eq!([role(&qps[0]), role(&qps[1])], [Settled::Stateless, Settled::Stateful], "{packets}");
        talk(&nodes, &qps);
    }
}

/// A key that cannot be read is a setting that is wrong.
#[test]
fn without_its_key_no_card_has_a_role() {
    let star_key = Some(StarKey::File("/nonexistent/key".into()));
    let node = Node::new(&Settings { star_key, ..settings() });
    let with = |star| Qp::create(&node.pd, &QpInit { star, ..node.init(QpType::Rc, None) });
    assert!(with(None).is_ok());
    let refused = with(Some(Preference::Stateless)).err().map(|error| error.errno());
    assert_eq!(refused, Some(libc::EINVAL));
}

/// Both ends become the same kind of connection whatever is lost, doubled or late meanwhile, and it works.
#[test]
fn ends_agree_on_a_bad_wire() {
    let fault = FaultSpec { loss: 0.1, duplicate: 0.1, reorder: 0.1, corrupt: 0.05, ..FaultSpec::default() };
    let wire = Settings { fault, ..settings() };
    for preferences in
        [[StarPreference::Stateless, StarPreference::Auto], [StarPreference::Auto, StarPreference::Stateful]]
    {
        let nodes = preferences.map(|star| Node::new(&Settings { star, ..wire.clone() }));
        let mut stars = 0;
        for _ in 0..20 {
            let qps = connected(&nodes);
            let roles = [role(&qps[0]), role(&qps[1])];
            let star = roles == [Settled::Stateless, Settled::Stateful];
            assert!(star || roles == [Settled::Plain; 2], "{roles:?}");
            stars += u32::from(star);
            talk(&nodes, &qps);
        }
        assert!(stars >= 10, "{stars}");
    }
}

/// With too many connections on a card, the end whose card has fewer keeps the state of the next.
#[test]
fn who_has_fewer_connections_keeps_more() {
    let wire = Settings { star: StarPreference::Auto, star_threshold: 4, ..settings() };
    let nodes = [Node::new(&wire), Node::new(&wire)];
    let plain = |node: &Node| {
        Qp::create(&node.pd, &QpInit { star: Some(Preference::Off), ..node.init(QpType::Rc, None) }).unwrap()
    };
    /* what has no peer is no connection */
    let idle: Vec<Qp> = (0..9).map(|_| plain(&nodes[0])).collect();
    let others: Vec<[Qp; 2]> = (0..3).map(|_| [plain(&nodes[1]), plain(&nodes[1])]).collect();
    others.iter().for_each(|[a, b]| connect(&nodes[1], a, &nodes[1], b));
    let first = connected(&nodes);
    assert_eq!([role(&first[0]), role(&first[1])], [Settled::Stateful, Settled::Stateless]);
    talk(&nodes, &first);
    for qp in others.iter().flatten().chain(&idle) {
        qp.destroy().unwrap();
    }
    let second = connected(&nodes);
    assert_eq!([role(&second[0]), role(&second[1])], [Settled::Plain; 2], "there is no need");
    talk(&nodes, &second);
}

/// Two cards of which the second keeps the state.
fn stateful() -> ([Node; 2], [Qp; 2]) {
    let nodes = pair([StarPreference::Stateless, StarPreference::Stateful]);
    let qps = connected(&nodes);
    (nodes, qps)
}

fn to(qp: &Qp, state: QpState) {
    qp.modify(&QpAttr { state, ..QpAttr::default() }, QpAttrMask::STATE).unwrap();
}

/// Who asks for a queue pair that has no peer yet gets an answer only of one that is in INIT, and only of a
/// card with StaR.
#[test]
fn untrusted_peers_learn_little_of_a_qp_without_peer() {
    for (theirs, init, there) in [
        (StarPreference::Off, true, false),
        (StarPreference::Stateful, false, false),
        (StarPreference::Stateful, true, true),
    ] {
        let [a, b] = pair([StarPreference::Stateless, theirs]);
        let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
        if init {
            to_init(&qb);
        }
        to_init(&qa);
        to_rtr(&qa, way_to(&b), qb.number());
        if there {
            let asked = &b.ctx.counters().unwrap().rx_packets;
            let before = asked.get();
            wait_for("more offers than silence has", || asked.get() > before + 12);
            assert_eq!(role(&qa), Settled::Waiting);
        } else {
            wait_for("silence", || role(&qa) == Settled::Plain);
        }
    }
}

/// In ERR before it had a peer, it has become nothing.
#[test]
fn what_fails_before_it_has_a_peer_waits() {
    let [a, _] = pair([StarPreference::Stateless; 2]);
    let qp = a.qp(QpType::Rc);
    to_init(&qp);
    to(&qp, QpState::Err);
    assert_eq!(role(&qp), Settled::Waiting);
}

/// A program that only receives may stay in RTR, whichever end it is.
#[test]
fn an_end_that_only_receives_stays_in_rtr() {
    for keeps in [false, true] {
        let preferences = if keeps {
            [StarPreference::Stateless, StarPreference::Auto]
        } else {
            [StarPreference::Auto, StarPreference::Stateless]
        };
        let nodes = pair(preferences);
        let [a, b] = &nodes;
        let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
        for (qp, way, peer) in [(&qa, way_to(b), &qb), (&qb, way_to(a), &qa)] {
            to_init(qp);
            to_rtr(qp, way, peer.number());
        }
        to_rts(&qa);
        for id in 0..4 {
            b.post_recv(&qb, id, 0, 5000).unwrap();
            post(&qa, &send(id, &[a.sge(0, 5000)])).unwrap();
            assert_eq!((b.completions(1)[0].wr_id, a.completions(1)[0].wr_id), (id, id));
        }
        let into = [a.sge(0, 5000)];
        let read = SendWr { op: SendOp::Read, remote_addr: b.addr(0), rkey: b.mr.rkey(), ..send(9, &into) };
        post(&qa, &read).unwrap();
        assert_eq!(a.completions(1)[0].status, WcStatus::Success);
        /* and goes on when it has something to say */
        to_rts(&qb);
        assert_eq!(role(&qb) == Settled::Stateful, keeps);
        talk(&nodes, &[qa, qb]);
    }
}

#[test]
fn a_stateful_end_in_error_flushes_and_begins_anew() {
    let (nodes, qps) = stateful();
    let [a, b] = &nodes;
    for id in 0..4 {
        b.post_recv(&qps[1], id, 0, 64).unwrap();
    }
    /* nobody has a receive for it */
    post(&qps[1], &send(10, &[b.sge(0, 64)])).unwrap();
    to(&qps[1], QpState::Err);
    assert_eq!(role(&qps[1]), Settled::Stateful);
    let mut ids: Vec<_> = b.completions(5).iter().map(|cqe| (cqe.status, cqe.wr_id)).collect();
    ids.sort_by_key(|(_, id)| *id);
    assert_eq!(ids, [0, 1, 2, 3, 10].map(|id| (WcStatus::WrFlushErr, id)));
    post(&qps[1], &send(11, &[b.sge(0, 64)])).unwrap();
    assert_eq!(b.completions(1)[0].status, WcStatus::WrFlushErr);
    /* the other end finds out when it sends */
    post(&qps[0], &send(12, &[a.sge(0, 64)])).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::RetryExcErr);
    for qp in &qps {
        to(qp, QpState::Reset);
    }
    connect(a, &qps[0], b, &qps[1]);
    talk(&nodes, &qps);
    assert_eq!(role(&qps[1]), Settled::Stateful);
}

/// Of a peer that is gone, sends say so, as with RC.
#[test]
fn whoever_is_left_finds_out() {
    for left in 0..2 {
        let (nodes, mut qps) = stateful();
        talk(&nodes, &qps);
        let [a, b] = nodes;
        let (node, gone) = if left == 0 { (a, b) } else { (b, a) };
        qps.swap(0, left);
        qps[1].destroy().unwrap();
        drop(gone);
        post(&qps[0], &send(1, &[node.sge(0, 64)])).unwrap();
        post(&qps[0], &send(2, &[node.sge(0, 64)])).unwrap();
        let ends: Vec<_> = node.completions(2).iter().map(|cqe| (cqe.wr_id, cqe.status)).collect();
        assert_eq!(ends, [(1, WcStatus::RetryExcErr), (2, WcStatus::WrFlushErr)]);
        assert_eq!(qps[0].state(), QpState::Err);
    }
}

/// Programs that sleep until there is something to do.
#[test]
fn sleepers_are_woken() {
    let (nodes, qps) = stateful();
    for round in 0..6usize {
        let (from, to) = (round % 2, 1 - round % 2);
        for node in &nodes {
            node.cq.req_notify(false).unwrap();
        }
        nodes[to].post_recv(&qps[to], 1, 0, 64).unwrap();
        post(&qps[from], &send(2, &[nodes[from].sge(0, 64)])).unwrap();
        for node in &nodes {
            assert_eq!(node.channel.get_event().unwrap(), 77);
            assert_eq!(node.completions(1)[0].status, WcStatus::Success);
        }
    }
}

#[test]
fn a_stateful_end_takes_from_a_shared_receive_queue() {
    let nodes = pair([StarPreference::Stateless, StarPreference::Stateful]);
    let [a, b] = &nodes;
    let srq = Srq::create(&b.pd, 64, 1, 0, 99).unwrap();
    let qps: Vec<[Qp; 2]> = (0..3).map(|_| [a.qp(QpType::Rc), b.qp_with_srq(&srq)]).collect();
    for [qp, peer] in &qps {
        connect(a, qp, b, peer);
    }
    for round in 0..10u64 {
        for (n, [qp, _]) in qps.iter().enumerate() {
            post(qp, &send(n as u64, &[a.sge(0, 64)])).unwrap();
        }
        for n in 0..3 {
            srq.post(&RecvWr { wr_id: round * 3 + n, sges: &[b.sge(0, 64)] }).unwrap();
        }
        assert!(b.completions(3).iter().all(|cqe| cqe.status == WcStatus::Success));
        assert!(a.completions(3).iter().all(|cqe| cqe.status == WcStatus::Success));
    }
    srq.modify(None, Some(2)).unwrap();
    let (qp, peer) = (&qps[0][0], &qps[0][1]);
    srq.post(&RecvWr { wr_id: 1, sges: &[b.sge(0, 64)] }).unwrap();
    post(qp, &send(1, &[a.sge(0, 64)])).unwrap();
    assert_eq!(b.completions(1)[0].qpn, peer.number());
    let event = b.ctx.get_async_event().unwrap();
    assert!(matches!(event, VerbsEvent::Srq { kind: kind::SRQ_LIMIT_REACHED, cookie: 99 }), "{event:?}");
}

/// A card that has no preference answers so: nobody takes its address for one without StaR.
#[test]
fn a_card_without_a_preference_answers() {
    let nodes = pair([StarPreference::Stateless, StarPreference::Off]);
    let [a, b] = &nodes;
    let plain = connected(&nodes);
    assert_eq!([role(&plain[0]), role(&plain[1])], [Settled::Plain; 2]);
    let init = QpInit { star: Some(Preference::Stateful), ..b.init(QpType::Rc, None) };
    let qps = [a.qp(QpType::Rc), Qp::create(&b.pd, &init).unwrap()];
    connect(a, &qps[0], b, &qps[1]);
    talk(&nodes, &qps);
    assert_eq!([role(&qps[0]), role(&qps[1])], [Settled::Stateless, Settled::Stateful]);
    talk(&nodes, &plain);
}
