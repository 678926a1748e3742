//! Multicast groups of ports that share a host: who is in gets a copy of its own, who is not gets nothing.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::{Node, drive, free_port, gid, pattern};
use starverbs_backend::max_groups;
use starverbs_core::{Av, Gid, Nanos, QPN_MULTICAST};
use starverbs_settings::Settings;

const GROUP: &str = "239.73.1.1";
const OTHER: &str = "239.73.1.2";
/// Later than any lease.
const LATER: Nanos = 3600 * 1_000_000_000;

fn settings() -> Settings {
    Settings {
        port: free_port(),
        addrs: Some(vec!["127.0.0.1".parse().expect("an address")]),
        ..Settings::default()
    }
}

fn to_group(node: &Node, group: &str) -> Av {
    Av { dgid: gid(group), ..node.av("127.0.0.1") }
}

/// Frames that came, as their payload's first byte and their destination.
fn got(node: &mut Node) -> Vec<(u8, Gid)> {
    node.got.drain(..).map(|(meta, frame)| (frame[12], meta.dst)).collect()
}

/// Does `work` while the nodes are served.
fn while_served(nodes: &mut [Node], work: impl FnOnce()) {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            /* once more when it is done: what it said last is heard before anything that is sent next */
            loop {
                let last = done.load(Ordering::Acquire);
                nodes.iter_mut().for_each(Node::poll);
                if last {
                    break;
                }
            }
        });
        work();
        done.store(true, Ordering::Release);
    });
}

#[test]
fn each_member_gets_a_copy_and_nobody_hands_any_on() {
    let settings = settings();
    let mut nodes: Vec<Node> = (0..3).map(|_| Node::with(&settings)).collect();
    for node in &mut nodes[..2] {
        node.rx.join_group(gid(GROUP)).expect("loopback takes groups");
    }
    nodes[1].rx.join_group(gid(OTHER)).expect("loopback takes groups");
    let (group, other, own) = (to_group(&nodes[0], GROUP), to_group(&nodes[0], OTHER), nodes[1].qpn(3));
    nodes[0].send(&group, QPN_MULTICAST, &pattern(1000, 1));
    nodes[0].send(&other, QPN_MULTICAST, &pattern(1000, 2));
    /* Not for a member, though members get it: one process's QPN. */
    nodes[0].send(&group, own, &pattern(1000, 3));
    nodes[0].flush();
    let [a, b, c] = &mut nodes[..] else { panic!("three") };
    let ends = |n: &[&mut Node]| !n[0].got.is_empty() && n[1].got.len() >= 3;
    assert!(drive(&mut [&mut *a, &mut *b, &mut *c], ends));
    /* What is there twice would come now. */
    (0..100).for_each(|_| [&mut *a, &mut *b, &mut *c].into_iter().for_each(Node::poll));
    let (group, other) = (gid(GROUP), gid(OTHER));
    assert_eq!(got(a), [(1, group)]);
    /* Its own QPN in a frame to the group is for the card to refuse. */
    assert_eq!(got(b), [(1, group), (2, other), (3, group)]);
    assert_eq!(got(c), []);
    assert_eq!(a.counters.drop_multicast.get(), 1);
}

#[test]
fn a_group_is_left() {
    let settings = settings();
    let (mut a, mut b) = (Node::with(&settings), Node::with(&settings));
    b.rx.join_group(gid(GROUP)).expect("loopback takes groups");
    b.rx.join_group(gid(OTHER)).expect("loopback takes groups");
    b.rx.leave_group(gid(GROUP));
    for (group, salt) in [(GROUP, 1), (OTHER, 2)] {
        let to = to_group(&a, group);
        a.send(&to, QPN_MULTICAST, &pattern(100, salt));
    }
    a.flush();
    assert!(drive(&mut [&mut a, &mut b], |n| !n[1].got.is_empty()));
    assert_eq!(got(&mut b), [(2, gid(OTHER))]);
}

#[test]
fn as_many_groups_as_are_promised_can_be_joined() {
    let mut node = Node::with(&settings());
    let most = max_groups(&node.addrs);
    for n in 0..most {
        node.rx.join_group(gid(&format!("239.74.{}.{}", n / 256, n % 256))).expect("it was promised");
    }
    let v6 = node.rx.join_group(gid("ff02::1:2")).expect_err("the port has no IPv6 address");
    assert_eq!(v6.errno(), libc::EINVAL);
}

/// A process of another user has no socket on the port: one of those that have hands on, and another when it
/// is gone.
#[test]
fn another_users_process_gets_its_groups_once() {
    let settings = settings();
    let members = (0..2).map(|_| Node::of_nobody(&settings)).collect::<Option<Vec<Node>>>();
    let Some(mut members) = members else { return };
    let mut outsider = Node::with(&settings);
    assert!(outsider.rx.lacks_port());
    let join = || outsider.rx.join_group(gid(GROUP)).expect("a group");
    while_served(&mut members, join);
    let to = to_group(&outsider, GROUP);
    let other = to_group(&outsider, OTHER);
    let send_all = |outsider: &mut Node, members: &mut Vec<Node>, turn: usize| {
        outsider.send(&other, QPN_MULTICAST, &pattern(100, 99));
        (0..3).for_each(|n| outsider.send(&to, QPN_MULTICAST, &pattern(4096, turn + n)));
        outsider.flush();
        let mut all: Vec<&mut Node> = members.iter_mut().collect();
        all.push(outsider);
        assert!(drive(&mut all, |n| n[n.len() - 1].got.len() >= 3));
        /* What is there twice would come now. */
        (0..100).for_each(|_| all.iter_mut().for_each(|node| node.poll()));
        let group = gid(GROUP);
        assert_eq!(got(all.pop().expect("the outsider")), [0, 1, 2].map(|n| ((turn + n) as u8, group)));
        assert!(all.iter_mut().all(|member| got(member).is_empty()), "members that joined nothing");
    };
    send_all(&mut outsider, &mut members, 10);
    /* A check of the port's steering may have been handed on, too. */
    let proxy =
        members.iter().position(|member| member.counters.handed_on.get() >= 3).expect("one handed on");
    drop(members.remove(proxy));
    while_served(&mut members, || {
        outsider.rx.maintenance(LATER);
    });
    send_all(&mut outsider, &mut members, 20);
    assert!(outsider.rx.lacks_port());
    while_served(&mut members, || outsider.rx.leave_group(gid(GROUP)));
    outsider.send(&to, QPN_MULTICAST, &pattern(100, 1));
    let (last, unicast) = (outsider.qpn(1), outsider.av("127.0.0.1"));
    outsider.send(&unicast, last, &pattern(100, 2));
    outsider.flush();
    assert!(drive(&mut [&mut members[0], &mut outsider], |n| !n[1].got.is_empty()));
    assert_eq!(got(&mut outsider), [(2, gid("127.0.0.1"))], "the unicast frame alone");
}
