//! The sysfs view of a device with two addresses.

use starverbs_core::{Gid, Mtu};

use super::*;

pub(crate) fn facts() -> Facts {
    let mut device = starverbs_verbs::describe().expect("a host with addresses");
    let gid = |index, address, netdev: &str| GidEntry {
        gid: Gid::from_ipv4(address),
        index,
        ifindex: index + 1,
        gid_type: 1,
        netdev: netdev.to_owned(),
    };
    device.gids =
        vec![gid(0, [192, 0, 2, 1], "eth0"), gid(1, [192, 0, 2, 2], "eth0:1"), gid(2, [127, 0, 0, 1], "lo")];
    device.attr.node_guid = 0x0123_4567_89ab_cdef;
    device.port.active_mtu = Mtu::M1024;
    Facts { name: "star0".to_owned(), device, numa_node: 1, cpus: "0-3".to_owned() }
}

/// The node at a path without links.
fn at<'a>(view: &'a SysfsView, path: &str) -> Option<&'a Node> {
    view.0.iter().find(|(p, _)| p == path).map(|(_, node)| node)
}

fn text(view: &SysfsView, path: &str) -> String {
    match at(view, path) {
        Some(Node::Text(text)) => text.trim_end().to_owned(),
        other => panic!("{path}: {other:?}"),
    }
}

#[test]
fn the_device_and_its_port_say_what_a_kernel_would() {
    let view = SysfsView::of(&facts());
    let device = "sys/devices/virtual/starverbs/card0/infiniband/star0";
    assert_eq!(text(&view, &format!("{device}/node_type")), "1: CA");
    assert_eq!(text(&view, &format!("{device}/node_guid")), "0123:4567:89ab:cdef");
    let port = |file: &str| text(&view, &format!("{device}/ports/1/{file}"));
    assert_eq!(port("state"), "4: ACTIVE");
    assert_eq!(port("phys_state"), "5: LinkUp");
    assert_eq!(port("rate"), "100 Gb/sec (4X EDR)");
    assert_eq!(port("lid"), "0x0");
    assert_eq!(port("link_layer"), "Ethernet");
    assert_eq!(port("pkeys/0"), "0xffff");
    assert_eq!(port("gids/0"), "0000:0000:0000:0000:0000:ffff:c000:0201");
    assert_eq!(port("gid_attrs/types/2"), "RoCE v2");
    assert_eq!(port("gid_attrs/ndevs/1"), "eth0", "an alias belongs to its interface");
    assert!(matches!(at(&view, &format!("{device}/ports/1/counters/port_xmit_data")), Some(Node::Live(_))));
    assert!(matches!(at(&view, &format!("{device}/ports/1/hw_counters/rx_packets")), Some(Node::Live(_))));
}

/// The target of the link at `path`, as a path from the root.
fn resolved(path: &str, target: &str) -> String {
    let mut parts: Vec<&str> = path.split('/').collect();
    parts.pop();
    for step in target.split('/') {
        match step {
            ".." => _ = parts.pop(),
            name => parts.push(name),
        }
    }
    parts.join("/")
}

#[test]
fn links_lead_to_what_is_there() {
    let view = SysfsView::of(&facts());
    let links = view.0.iter().filter_map(|(path, node)| match node {
        Node::Link(target) if !target.starts_with('/') => Some(resolved(path, target)),
        _ => None,
    });
    let links: Vec<String> = links.collect();
    assert_eq!(links.len(), 6);
    for to in links {
        assert!(view.0.iter().any(|(path, _)| path.starts_with(&format!("{to}/"))), "{to}");
    }
    let net = "sys/devices/virtual/starverbs/card0/net";
    assert_eq!(at(&view, &format!("{net}/eth0")), Some(&Node::Link("/sys/class/net/eth0".into())));
    assert_eq!(at(&view, &format!("{net}/eth0:1")), None);
}

#[test]
fn the_device_node_is_all_that_dev_has() {
    let view = SysfsView::of(&facts());
    let dev: Vec<_> = view.0.iter().filter(|(path, _)| path.starts_with("dev/")).collect();
    assert_eq!(dev, [&(DEVICE_NODE.to_owned(), Node::Device)]);
}

#[test]
fn no_path_is_there_twice_or_below_a_file() {
    let view = SysfsView::of(&facts());
    for (i, (path, _)) in view.0.iter().enumerate() {
        for (other, _) in &view.0[i + 1..] {
            assert!(path != other && !other.starts_with(&format!("{path}/")), "{path} {other}");
        }
    }
}

#[test]
fn the_fingerprint_follows_the_facts() {
    let (one, mut other) = (facts(), facts());
    assert_eq!(SysfsView::of(&one).fingerprint(), SysfsView::of(&other).fingerprint());
    other.device.gids.pop();
    assert_ne!(SysfsView::of(&one).fingerprint(), SysfsView::of(&other).fingerprint());
}

#[test]
fn rates_are_in_the_kernels_words() {
    let mut port = facts().device.port;
    let mut of = |width, speed| {
        (port.active_width, port.active_speed) = (width, speed);
        rate(&port)
    };
    assert_eq!(of(1, 1), "2.5 Gb/sec (1X)");
    assert_eq!(of(2, 16), "56 Gb/sec (4X FDR)");
    assert_eq!(of(16, 128), "200 Gb/sec (2X NDR)");
}
