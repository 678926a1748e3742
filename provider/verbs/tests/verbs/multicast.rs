//! Multicast over the loopback interface, as the kernel carries it: members of all cards, sharing one UDP
//! port.

use crate::common::{Node, QKEY, counters, post, send, settings, ud_ready};
use starverbs_backend::host;
use starverbs_core::{Cqe, Gid, QPN_MULTICAST, QpType, WcStatus};
use starverbs_settings::Settings;
use starverbs_verbs::{Ah, AhAttr, Qp, QpInit};

const GRH: usize = 40;
const GROUP: Gid = Gid::from_ipv4([239, 71, 1, 2]);

fn errno<T: std::fmt::Debug>(result: starverbs_verbs::Result<T>) -> i32 {
    result.expect_err("refused").errno()
}

/// ff02::71:`last`
fn group_v6(last: u8) -> Gid {
    let mut gid = Gid([0; 16]);
    (gid.0[0], gid.0[1], gid.0[13], gid.0[15]) = (0xff, 0x02, 0x71, last);
    gid
}

/// A UD QP in RTS.
fn ud(node: &Node, block_own_multicast: bool) -> Qp {
    let qp = Qp::create(&node.pd, &QpInit { block_own_multicast, ..node.init(QpType::Ud, None) }).unwrap();
    ud_ready(&qp);
    qp
}

fn to_group(node: &Node, dgid: Gid) -> Ah {
    Ah::create(&node.pd, &AhAttr { dgid, is_global: true, port: 1, ..AhAttr::default() }).unwrap()
}

/// Sends the node's first `len` bytes to the group of `ah`; its completion is number 1000.
fn multicast(node: &Node, qp: &Qp, ah: &Ah, len: usize) {
    let sges = [node.sge(0, len)];
    let mut wr = send(1000, &sges);
    (wr.ah, wr.remote_qpn, wr.qkey) = (ah.id(), QPN_MULTICAST, QKEY);
    post(qp, &wr).unwrap();
}

/// A counter of all cards on the wire.
fn sum(settings: &Settings, name: &str) -> u64 {
    counters(settings.port, name).iter().sum()
}

/// The next `count` completions of `node`, all successful.
fn receives(node: &Node, count: usize) -> Vec<Cqe> {
    let mut cqes = node.completions(count);
    cqes.sort_by_key(|cqe| cqe.wr_id);
    assert!(cqes.iter().all(|cqe| cqe.status == WcStatus::Success), "{cqes:?}");
    cqes
}

#[test]
fn every_attached_queue_pair_of_every_card_gets_a_copy() {
    let settings = settings();
    let (a, b, c) = (Node::new(&settings), Node::new(&settings), Node::new(&settings));
    let sender = ud(&a, false);
    let members = [ud(&b, false), ud(&b, false), ud(&c, false)];
    let other = ud(&c, false);
    a.fill(0, b"to all of you");
    for (at, (member, node)) in members.iter().zip([&b, &b, &c]).enumerate() {
        member.attach_mcast(GROUP).unwrap();
        node.post_recv(member, at as u64, at * 1000, GRH + 13).unwrap();
    }
    c.post_recv(&other, 9, 4000, GRH + 13).unwrap();
    let ah = to_group(&a, GROUP);
    multicast(&a, &sender, &ah, 13);
    a.completions(1);
    for (node, ids) in [(&b, &[0, 1][..]), (&c, &[2][..])] {
        let got = receives(node, ids.len());
        assert_eq!(got.iter().map(|cqe| cqe.wr_id).collect::<Vec<_>>(), ids);
        for cqe in got {
            assert_eq!((cqe.src_qp, cqe.byte_len as usize), (sender.number(), GRH + 13));
            let bytes = node.bytes(cqe.wr_id as usize * 1000, GRH + 13);
            assert_eq!((bytes[20], &bytes[36..40]), (0x45, &[239, 71, 1, 2][..]), "the GRH names the group");
            assert_eq!(&bytes[GRH..], b"to all of you");
        }
    }
    assert_eq!(sum(&settings, "rx_multicast"), 3);
}

#[test]
fn what_comes_back_to_the_sender_is_as_it_asked() {
    let node = Node::new(&settings());
    let (willing, unwilling) = (ud(&node, false), ud(&node, true));
    for qp in [&willing, &unwilling] {
        qp.attach_mcast(GROUP).unwrap();
        qp.attach_mcast(GROUP).unwrap();
        for turn in 0..2 {
            node.post_recv(qp, u64::from(qp.number()), 100 + turn, GRH + 1).unwrap();
        }
    }
    let ah = to_group(&node, GROUP);
    for (from, copies) in
        [(&unwilling, &[willing.number()][..]), (&willing, &[willing.number(), unwilling.number()])]
    {
        multicast(&node, from, &ah, 1);
        let got = receives(&node, copies.len() + 1);
        let mut qpns: Vec<u32> = got.iter().filter(|c| c.wr_id != 1000).map(|c| c.qpn).collect();
        let mut copies = copies.to_vec();
        qpns.sort_unstable();
        copies.sort_unstable();
        assert_eq!(qpns, copies, "sent by {:#x}", from.number());
    }
}

#[test]
fn a_group_is_left_with_its_last_member() {
    let settings = settings();
    let (a, b) = (Node::new(&settings), Node::new(&settings));
    let sender = ud(&a, false);
    let (first, second) = (ud(&b, false), ud(&b, false));
    [&first, &second].iter().for_each(|qp| qp.attach_mcast(GROUP).unwrap());
    assert_eq!(errno(first.destroy()), libc::EBUSY);
    first.detach_mcast(GROUP).unwrap();
    assert_eq!(errno(first.detach_mcast(GROUP)), libc::EINVAL);
    b.post_recv(&first, 1, 0, GRH + 1).unwrap();
    b.post_recv(&second, 2, 100, GRH + 1).unwrap();
    let ah = to_group(&a, GROUP);
    multicast(&a, &sender, &ah, 1);
    assert_eq!(receives(&b, 1)[0].wr_id, 2);
    second.detach_mcast(GROUP).unwrap();
    multicast(&a, &sender, &ah, 1);
    /* Behind it comes what does arrive. */
    let others = Gid::from_ipv4([239, 71, 1, 3]);
    first.attach_mcast(others).unwrap();
    let ah = to_group(&a, others);
    multicast(&a, &sender, &ah, 1);
    assert_eq!(receives(&b, 1)[0].wr_id, 1);
    assert_eq!(sum(&settings, "drop_multicast"), 0, "the kernel keeps it from cards that left");
    drop(first);
    second.destroy().unwrap();
}

#[test]
fn a_queue_pair_in_several_groups_gets_what_is_sent_to_each() {
    let settings = settings();
    let (a, b) = (Node::new(&settings), Node::new(&settings));
    let (sender, member) = (ud(&a, false), ud(&b, false));
    for n in 0..4 {
        let group = Gid::from_ipv4([239, 71, 2, n]);
        member.attach_mcast(group).unwrap();
        b.post_recv(&member, u64::from(n), 100 * usize::from(n), GRH + 1).unwrap();
        let ah = to_group(&a, group);
        multicast(&a, &sender, &ah, 1);
        let got = receives(&b, 1);
        assert_eq!(b.bytes(100 * usize::from(n) + 36, 4), [239, 71, 2, n]);
        assert_eq!(got[0].wr_id, u64::from(n));
    }
}

/// Over a real interface: Linux carries no IPv6 multicast on loopback (tests/abi/multicast.sh makes
/// interfaces).
#[test]
fn ipv6_groups_work_as_well() {
    let all = host::addresses(&Settings::default()).unwrap();
    let Some(real) = all.iter().find(|addr| addr.gid.ipv4().is_none() && !addr.loopback) else {
        return eprintln!("skipped: no interface with an IPv6 address");
    };
    let settings = Settings { addrs: Some(vec![real.ip()]), ..settings() };
    let (a, b) = (Node::new(&settings), Node::new(&settings));
    let (sender, member) = (ud(&a, false), ud(&b, false));
    assert_eq!(errno(member.attach_mcast(GROUP)), libc::EINVAL, "the card has no IPv4 address");
    member.attach_mcast(group_v6(1)).unwrap();
    b.post_recv(&member, 5, 0, GRH + 4).unwrap();
    let ah = to_group(&a, group_v6(1));
    multicast(&a, &sender, &ah, 4);
    assert_eq!(receives(&b, 1)[0].wr_id, 5);
    let bytes = b.bytes(0, GRH);
    assert_eq!((bytes[0] >> 4, &bytes[24..40]), (6, &group_v6(1).0[..]));
}

#[test]
fn limits_are_those_that_the_device_tells() {
    let node = Node::new(&settings());
    let most = node.ctx.device_attr();
    assert!(most.max_mcast_grp > 1 && most.max_mcast_qp_attach > 1, "{most:?}");
    let qp = ud(&node, false);
    let group = |n: u32| Gid::from_ipv4([239, 72, (n >> 8) as u8, n as u8]);
    (0..most.max_mcast_grp).for_each(|n| qp.attach_mcast(group(n)).unwrap());
    assert_eq!(errno(qp.attach_mcast(group(most.max_mcast_grp))), libc::ENOMEM);
    qp.detach_mcast(group(0)).unwrap();
    qp.attach_mcast(group(most.max_mcast_grp)).unwrap();
    let rc = node.qp(QpType::Rc);
    assert_eq!(errno(rc.attach_mcast(group(1))), libc::EINVAL);
    assert_eq!(errno(qp.attach_mcast(Gid::from_ipv4([127, 0, 0, 1]))), libc::EINVAL);
}

/// Many frames in a row: segmented sends, joined receives.
#[test]
fn a_burst_reaches_all_members_whole() {
    const COUNT: usize = 12;
    let settings = settings();
    let (a, b) = (Node::new(&settings), Node::new(&settings));
    let (sender, members) = (ud(&a, false), [ud(&b, false), ud(&b, false)]);
    for (which, member) in members.iter().enumerate() {
        member.attach_mcast(GROUP).unwrap();
        for at in 0..COUNT {
            let place = (which * COUNT + at) * 1200;
            b.post_recv(member, place as u64, place, GRH + 1000).unwrap();
        }
    }
    let ah = to_group(&a, GROUP);
    a.fill(0, &[7; 1000]);
    let mut poster = sender.post_send();
    for _ in 0..COUNT {
        let sges = [a.sge(0, 1000)];
        let mut wr = send(1000, &sges);
        (wr.ah, wr.remote_qpn, wr.qkey) = (ah.id(), QPN_MULTICAST, QKEY);
        poster.push(&wr).unwrap();
    }
    poster.ring();
    for cqe in receives(&b, 2 * COUNT) {
        assert_eq!(cqe.byte_len as usize, GRH + 1000);
        assert_eq!(b.bytes(cqe.wr_id as usize + GRH, 1000), [7; 1000]);
    }
    assert_eq!(sum(&settings, "rx_multicast"), 2 * COUNT as u64);
}
