//! perftest's multicast (`-g`): each end is attached to a group of its own, and sends to the other's.

use crate::address::{self, Ipv6Scope};
use crate::case::{BOTH, Case, Net};
use crate::check::Expect;
use crate::pair::Pair;

const GROUP: &str = "multicast";
const NOBODY: Option<&str> = Some("nobody");

/// The groups of server and client as `-M` takes them, byte by byte: 239.77.0.1, 239.77.0.2.
const V4: [&str; 2] =
    ["0:0:0:0:0:0:0:0:0:0:0xff:0xff:239:77:0:1", "0:0:0:0:0:0:0:0:0:0:0xff:0xff:239:77:0:2"];
/// ff15::1, ff15::2.
const V6: [&str; 2] = ["0xff:0x15:0:0:0:0:0:0:0:0:0:0:0:0:0:1", "0xff:0x15:0:0:0:0:0:0:0:0:0:0:0:0:0:2"];

pub(crate) fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> = all(V4).into_iter().map(|pair| Case::pair(GROUP, BOTH, pair)).collect();
    for case in cases
        .iter_mut()
        .filter(|case| ["ib_send_lat -c UD -g", "ib_send_bw -c UD -g -n 500"].contains(&case.name.as_str()))
    {
        case.quick = BOTH;
    }
    for (who, server, client) in
        [("server root, client nobody", None, NOBODY), ("server nobody, client root", NOBODY, None)]
    {
        let mut case = Case::pair(GROUP, BOTH, latency("", V4).users(server, client));
        case.name = format!("{} ({who})", case.name);
        cases.push(case);
    }
    cases.extend(all(V6).into_iter().map(|pair| {
        let mut case = address::case(pair, Ipv6Scope::Global, &[Net::Veth]);
        case.group = GROUP;
        case
    }));
    cases
}

/// perftest takes one QP in multicast. Nothing paces a sender to many, so that the receiver posts room for
/// all.
fn all(groups: [&str; 2]) -> Vec<Pair> {
    let bandwidth = |args: &str| {
        with(Pair::new("ib_send_bw", &format!("-c UD -g -n 500{args}"), Expect::Bandwidth(1)), groups)
    };
    vec![
        latency("", groups),
        latency(" -e", groups),
        latency(" -s 1024", groups),
        bandwidth(""),
        bandwidth(" -e"),
        bandwidth(" -s 64"),
    ]
}

fn latency(args: &str, groups: [&str; 2]) -> Pair {
    with(Pair::new("ib_send_lat", &format!("-c UD -g{args}"), Expect::Latency(1)), groups)
}

fn with(mut pair: Pair, groups: [&str; 2]) -> Pair {
    pair.own_args = groups.map(|group| vec!["-M".to_owned(), group.to_owned()]);
    pair
}
