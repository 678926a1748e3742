//! The programs that both cards must run with each other: ping-pongs, perftest and those of the connection
//! manager.

use starverbs_conformance::check::Expect;

use crate::pair::{Meets, Pair};

/// A pair and what its client must print.
pub(crate) type Case = (Pair, Expect);

const LOSS: &str = "loss=1%,reorder=0.5%,dup=0.5%,seed=11";

/// All cases; each is run in both directions.
pub(crate) fn cases() -> Vec<Case> {
    [ping_pong(), perftest(), connected(), hurt()].concat()
}

/// One case of each kind, for each push: transports, operations, long messages, shared receives, connections,
/// a wire that loses.
const QUICK: [&str; 11] = [
    "ibv_rc_pingpong -c -n 200",
    "ibv_uc_pingpong -c -n 200 (IPv6)",
    "ibv_ud_pingpong -c -n 200",
    "ib_send_bw -m 1024 -s 65536 -n 50",
    "ib_write_bw -b -q 4 -s 65536 -n 50",
    "ib_read_bw -m 4096 -s 65536 -n 50",
    "ib_atomic_bw -n 500",
    "ib_send_lat -c UD -n 500",
    "rping -C 10 -q -v",
    "ucmatose -c 4 -C 20 -S 5000",
    "STARVERBS_FAULT=loss=1%,reorder=0.5%,dup=0.5%,seed=11 ib_read_bw -n 200",
];

/// Whether each push runs the case of this title.
pub(crate) fn is_quick(title: &str) -> bool {
    QUICK.contains(&title)
}

fn ping_pong() -> Vec<Case> {
    let case =
        |program: &str, args: &str| (Pair::new(program, &format!(" -g {{gid}} {args}")), Expect::PingPong);
    let mut cases = Vec::new();
    for program in ["ibv_rc_pingpong", "ibv_uc_pingpong", "ibv_ud_pingpong", "ibv_srq_pingpong"] {
        cases.push(case(program, "-c -n 200"));
        let (pair, expect) = case(program, "-c -n 200");
        cases.push((pair.v6(), expect));
    }
    cases.push(case("ibv_rc_pingpong", "-c -e -n 200"));
    cases.push(case("ibv_rc_pingpong", "-N -c -n 200"));
    cases.push(case("ibv_srq_pingpong", "-c -e -n 200"));
    for mtu in [256, 512, 1024, 2048, 4096] {
        cases.push(case("ibv_rc_pingpong", &format!("-c -m {mtu} -s 20000 -n 100")));
    }
    cases
}

fn perftest() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |program: &str, args: &str, expect| {
        cases.push((Pair::new(program, &format!(" -x {{gid}} {args}")), expect));
    };
    for operation in ["send", "write", "read", "atomic"] {
        let (latency, bandwidth) = (format!("ib_{operation}_lat"), format!("ib_{operation}_bw"));
        add(&latency, "-n 500", Expect::Latency(1));
        add(&bandwidth, "-n 500", Expect::Bandwidth(1));
        if operation != "atomic" {
            add(&latency, "-s 1 -n 200", Expect::Latency(1));
            add(&bandwidth, "-s 1048576 -n 10", Expect::Bandwidth(1));
            // 2 B to 8 MiB.
            add(&bandwidth, "-a -n 5", Expect::Bandwidth(23));
            for mtu in [256, 512, 1024, 2048, 4096] {
                add(&bandwidth, &format!("-m {mtu} -s 65536 -n 50"), Expect::Bandwidth(1));
            }
        }
    }
    for (program, transport) in [("ib_send", "UC"), ("ib_write", "UC"), ("ib_send", "UD")] {
        add(&format!("{program}_lat"), &format!("-c {transport} -n 500"), Expect::Latency(1));
        add(&format!("{program}_bw"), &format!("-c {transport} -s 1024 -n 500"), Expect::Bandwidth(1));
    }
    add("ib_send_lat", "-s 64 -I 64 -n 500", Expect::Latency(1));
    add("ib_send_lat", "-e -n 200", Expect::Latency(1));
    add("ib_send_bw", "-q 8 -s 4096 -n 100", Expect::Bandwidth(1));
    add("ib_send_bw", "--use-srq -s 4096 -n 200", Expect::Bandwidth(1));
    add("ib_send_bw", "-b -s 4096 -n 200", Expect::Bandwidth(1));
    add("ib_write_bw", "-b -q 4 -s 65536 -n 50", Expect::Bandwidth(1));
    for (program, expect) in [
        ("ib_send_bw", Expect::Bandwidth(1)),
        ("ib_read_bw", Expect::Bandwidth(1)),
        ("ib_atomic_lat", Expect::Latency(1)),
    ] {
        let (pair, expect) = (Pair::new(program, " -x {gid} -n 100"), expect);
        cases.push((pair.v6(), expect));
    }
    cases
}

/// Where udaddy's server is.
const UDADDY: u16 = 7174;

/// Connections made by librdmacm, to and from the kernel's rdma_cm.
fn connected() -> Vec<Case> {
    let rping = |args: &str| {
        let pair = Pair::new("rping", &format!(" {args} -v"));
        // What it pings is in its output.
        (
            pair.managed(Meets::Service, "-s -a {server}", "-c -a {server}"),
            Expect::Line("ping data: rdma-ping-"),
        )
    };
    let ends = |program: &str, args: &str, meets| {
        (
            Pair::new(program, args).managed(meets, "-b {server}", "-s {server}"),
            Expect::Line("return status 0"),
        )
    };
    let v6 = |(pair, expect): Case| (pair.v6(), expect);
    let (client, expect) = (Pair::new("rdma_client", ""), Expect::Line("rdma_client: end 0"));
    let client = client.managed(Meets::Service, "-s {server}", "-s {server}");
    vec![
        rping("-C 10 -V"),
        v6(rping("-C 10 -V")),
        rping("-C 10 -q"),
        rping("-C 20 -S 16000 -V"),
        (rping("-C 100 -V").0.env("STARVERBS_FAULT", LOSS), rping("").1),
        ends("ucmatose", " -c 4 -C 20 -S 5000", Meets::Service),
        v6(ends("ucmatose", " -c 4 -C 20 -S 5000", Meets::Service)),
        ends("udaddy", "", Meets::Fixed(UDADDY)),
        v6(ends("udaddy", "", Meets::Fixed(UDADDY))),
        ends("udaddy", " -c 5 -C 20 -S 1000", Meets::Fixed(UDADDY)),
        (Pair { server_program: Some("rdma_server"), ..client }, expect),
    ]
}

/// Loss, reordering and duplication of what our card sends and receives.
fn hurt() -> Vec<Case> {
    let case =
        |program: &str, args: &str, expect| (Pair::new(program, args).env("STARVERBS_FAULT", LOSS), expect);
    vec![
        case("ibv_rc_pingpong", " -g {gid} -c -n 500", Expect::PingPong),
        case("ibv_srq_pingpong", " -g {gid} -c -n 200", Expect::PingPong),
        case("ib_send_bw", " -x {gid} -n 200", Expect::Bandwidth(1)),
        case("ib_write_bw", " -x {gid} -n 200", Expect::Bandwidth(1)),
        case("ib_read_bw", " -x {gid} -n 200", Expect::Bandwidth(1)),
        case("ib_atomic_bw", " -x {gid} -n 500", Expect::Bandwidth(1)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quick_cases_are_cases() {
        let titles: Vec<String> = cases().iter().map(|(pair, _)| pair.title()).collect();
        for quick in QUICK {
            assert!(titles.iter().any(|title| title == quick), "{quick}");
        }
    }
}
