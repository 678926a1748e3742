//! StaR between two cards: what the ends settle, and that programs see nothing of it.

mod common;

use common::*;
use starverbs_core::{QpType, WcStatus};
use starverbs_settings::{Settings, StarKey, StarWish};
use starverbs_verbs::{Qp, QpInit, Settled, Wish};

/// Two cards on one wire whose settings ask for these roles.
fn pair(wishes: [StarWish; 2]) -> [Node; 2] {
    let wire = settings();
    wishes.map(|star| Node::new(&Settings { star, ..wire.clone() }))
}

fn role(qp: &Qp) -> Settled {
    qp.star().unwrap().role
}

/// Two connected queue pairs, once it is settled what they are.
fn connected(nodes: &[Node; 2]) -> [Qp; 2] {
    let [a, b] = nodes;
    let qps = [a.qp(QpType::Rc), b.qp(QpType::Rc)];
    connect((a, &qps[0]), (b, &qps[1]));
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
    let of = [StarWish::Off, StarWish::Auto, StarWish::Stateless, StarWish::Stateful];
    for wishes in of.into_iter().flat_map(|a| of.map(|b| [a, b])) {
        let agree = match wishes {
            [StarWish::Off, _] | [_, StarWish::Off] | [StarWish::Auto, StarWish::Auto] => false,
            [a, b] => a != b,
        };
        if !agree {
            let nodes = pair(wishes);
            let qps = connected(&nodes);
            assert_eq!([role(&qps[0]), role(&qps[1])], [Settled::Plain; 2], "{wishes:?}");
            talk(&nodes, &qps);
        }
    }
}

/// Two cards on one wire that want different roles, and have these keys.
fn keyed(keys: [Option<u8>; 2], wishes: [StarWish; 2]) -> [Node; 2] {
    let wire = settings();
    std::array::from_fn(|at| {
        let star_key = keys[at].map(|byte| StarKey::Given([byte; 32].into()));
        Node::new(&Settings { star: wishes[at], star_key, ..wire.clone() })
    })
}

#[test]
fn without_the_same_key_it_is_plain_rocev2() {
    for keys in [[Some(1), Some(2)], [Some(1), None], [None, Some(1)]] {
        let nodes = keyed(keys, [StarWish::Stateless, StarWish::Stateful]);
        let qps = connected(&nodes);
        assert_eq!([role(&qps[0]), role(&qps[1])], [Settled::Plain; 2], "{keys:?}");
        talk(&nodes, &qps);
        for (node, key) in nodes.iter().zip(keys) {
            let counters = node.ctx.counters().unwrap();
            assert_eq!(counters.star_foreign.get() > 0, key.is_some(), "{keys:?}");
        }
    }
}

/// Under one key a refusal is heard, and believed: nobody waits for silence.
#[test]
fn under_one_key_a_refusal_is_believed() {
    let nodes = keyed([Some(1); 2], [StarWish::Stateful; 2]);
    let qps = connected(&nodes);
    assert_eq!([role(&qps[0]), role(&qps[1])], [Settled::Plain; 2]);
    talk(&nodes, &qps);
    for node in &nodes {
        let counters = node.ctx.counters().unwrap();
        assert_eq!((counters.star_foreign.get(), counters.star_replayed.get()), (0, 0));
    }
}

/// A key that cannot be read is a setting that is wrong.
#[test]
fn without_its_key_no_card_has_a_role() {
    let star_key = Some(StarKey::File("/nonexistent/key".into()));
    let node = Node::new(&Settings { star_key, ..settings() });
    let with = |star| Qp::create(&node.pd, &QpInit { star, ..node.init(QpType::Rc, None) });
    assert!(with(None).is_ok());
    let refused = with(Some(Wish::Stateless)).err().map(|error| error.errno());
    assert_eq!(refused, Some(libc::EINVAL));
}
