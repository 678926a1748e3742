//! Connections of which one card keeps nothing: what programs see of them is what they see of others.

mod common;

use common::*;
use starverbs_core::{QpType, SendFlags, WcStatus};
use starverbs_settings::{Settings, StarWish};
use starverbs_verbs::{Qp, Settled};

/// Two cards, the first stateless.
fn pair() -> [Node; 2] {
    let wire = settings();
    let with = |star| Node::new(&Settings { star, ..wire.clone() });
    [with(StarWish::Stateless), with(StarWish::Stateful)]
}

fn connected(nodes: &[Node; 2]) -> [Qp; 2] {
    let [a, b] = nodes;
    let qps = [a.qp(QpType::Rc), b.qp(QpType::Rc)];
    connect((a, &qps[0]), (b, &qps[1]));
    let role = |qp: &Qp| qp.star().unwrap().role;
    wait_for("an agreement", || qps.iter().all(|qp| role(qp) != Settled::Waiting));
    assert_eq!(qps.each_ref().map(role), [Settled::Stateless, Settled::Stateful]);
    qps
}

#[test]
fn messages_go_both_ways() {
    let mut nodes = pair();
    let qps = connected(&nodes);
    for round in 0..20u8 {
        for from in 0..2 {
            let to = 1 - from;
            let data: Vec<u8> = (0..6000).map(|n| (n as u8).wrapping_add(round)).collect();
            nodes[from].fill(0, &data);
            nodes[to].post_recv(&qps[to], 1, 8192, 8000).unwrap();
            post(&qps[from], &send(2, &[nodes[from].sge(0, 6000)])).unwrap();
            let got = nodes[to].completions(1)[0];
            assert_eq!((got.wr_id, got.status, got.byte_len), (1, WcStatus::Success, 6000));
            assert_eq!(nodes[to].bytes(8192, 6000), data);
            let sent = nodes[from].completions(1)[0];
            assert_eq!((sent.wr_id, sent.status), (2, WcStatus::Success));
        }
    }
    let info = qps[0].star().unwrap();
    assert!(info.card_bytes == 0 && info.library_bytes > 0, "{info:?}");
}
