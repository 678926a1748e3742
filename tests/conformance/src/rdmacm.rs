//! Programs of the connection manager: librdmacm's own (rdmacm-utils), and perftest's `-R`.

use std::time::{Duration, Instant};

use starverbs_conformance::process::tail;

use crate::case::{BOTH, Case, Net, Verdict};
use crate::check::Expect;
use crate::pair::{Found, Pair};
use crate::world::{Setting, World};

const GROUP: &str = "connection manager";
/// Where udaddy's server is.
const UDADDY: u16 = 7174;
/// The group that mckey joins.
const MCKEY: [u8; 4] = [239, 77, 0, 3];

pub(crate) fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> =
        rping().into_iter().chain(others()).map(|pair| Case::pair(GROUP, BOTH, pair)).collect();
    cases.push(Case::special(GROUP, "mckey", BOTH, mckey));
    for connections in ["20", "500"] {
        let name = format!("cmtime -c {connections}");
        cases.push(Case::special(GROUP, &name, BOTH, move |world, net| cmtime(world, net, connections)));
    }
    cases.extend(perftest());
    let quick =
        ["rping -C 10 -V", "ucmatose", "udaddy", "rdma_client", "cmtime -c 20", "mckey", "ib_send_lat -R"];
    for case in &mut cases {
        if quick.contains(&case.name.as_str()) {
            case.quick = &[Net::Lo];
        }
    }
    cases
}

fn rping() -> Vec<Pair> {
    let pair = |args: &str| {
        // What it pings is in its output.
        Pair::new("rping", &format!("{args} -v"), Expect::Line("ping data: rdma-ping-"))
            .own("-s", "-c -a")
            .found(Found::Service)
    };
    ["-C 10 -V", "-C 10 -q", "-C 100 -S 4000 -V"].map(pair).into()
}

fn others() -> Vec<Pair> {
    let ends = |program, args: &str| {
        Pair::new(program, args, Expect::Line("return status 0")).own("", "-s").found(Found::Service)
    };
    let client = |program, server, args: &str, words| {
        let pair = Pair::new(program, args, Expect::Line(words)).own("", "-s").found(Found::Service);
        Pair { server_program: Some(server), ..pair }
    };
    vec![
        ends("ucmatose", ""),
        ends("ucmatose", "-c 20 -C 50 -S 5000"),
        ends("ucmatose", "-m -a 16"),
        ends("ucmatose", "-P ib"),
        ends("udaddy", "").found(Found::Fixed(UDADDY)),
        ends("udaddy", "-c 10 -C 20 -S 1000").found(Found::Fixed(UDADDY)),
        client("rdma_client", "rdma_server", "", "rdma_client: end 0"),
        client("rdma_xclient", "rdma_xserver", "", "end 0"),
        client("rdma_xclient", "rdma_xserver", "-c x", "end 0"),
    ]
}

/// perftest with its queue pairs made and connected by the connection manager.
fn perftest() -> Vec<Case> {
    let latency = |program, args: &str| Pair::new(program, args, Expect::Latency(1));
    let bandwidth = |program, args: &str| Pair::new(program, args, Expect::Bandwidth(1));
    [
        latency("ib_send_lat", "-R"),
        latency("ib_send_lat", "-R -e"),
        latency("ib_write_lat", "-R"),
        latency("ib_read_lat", "-R"),
        latency("ib_atomic_lat", "-R"),
        bandwidth("ib_send_bw", "-R -n 500"),
        bandwidth("ib_write_bw", "-R -q 4 -n 200"),
        bandwidth("ib_read_bw", "-R -b -n 500"),
        latency("ib_send_lat", "-R -c UD"),
        bandwidth("ib_send_bw", "-R -c UD -n 500"),
        bandwidth("ib_write_bw", "-R -T 96 -n 500"),
    ]
    .map(|pair| Case::pair(GROUP, BOTH, pair.found(Found::Service).limit(60)))
    .into()
}

/// Connections made and ended, one step for all at a time. The server serves for ever.
fn cmtime(world: &mut World, net: Net, connections: &str) -> Verdict {
    let pair = Pair::new("cmtime", &format!("-c {connections}"), Expect::Line("disconnect   :"))
        .own("", "-s")
        .found(Found::Service)
        .limit(60);
    let mut run = || {
        let deadline = Instant::now() + pair.limit;
        let mut server = pair.start_server(world, net)?;
        server.await_listening(deadline)?;
        let mut client = pair.start_client(world, net, server.port)?;
        let status = client.wait_until(deadline);
        let output = client.output();
        if !status.is_some_and(|status| status.success()) {
            return Err(format!("{status:?}:\n{}", tail(&output)));
        }
        let connect = output.lines().find(|line| line.starts_with("connect ")).unwrap_or_default();
        let each = connect.split_ascii_whitespace().last().unwrap_or_default().to_owned();
        pair.expect.check(&output).map(|_| format!("{each} us to connect"))
    };
    run().into()
}

/// A receiver in a group, and a sender to it.
fn mckey(world: &mut World, net: Net) -> Verdict {
    let mut run = || {
        let addresses = if net == Net::Lo { ["127.0.0.1"; 2] } else { crate::net::ADDRESSES };
        let group = std::net::Ipv4Addr::from(MCKEY).to_string();
        let words = |end: usize| ["mckey", "-m", &group, "-b", addresses[end]].map(str::to_owned);
        let mut start = |end: usize, more: &[&str]| {
            let words = words(end);
            let words: Vec<&str> = words.iter().map(String::as_str).chain(more.iter().copied()).collect();
            world.start(net, end, &Setting::default(), &words)
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut receiver = start(0, &[])?;
        while !receiver.is_in_group(MCKEY) {
            if receiver.ended().is_some() || Instant::now() > deadline {
                return Err(format!("the receiver does not join:\n{}", tail(&receiver.output())));
            }
            std::thread::sleep(Duration::from_millis(3));
        }
        let mut sender = start(1, &["-s"])?;
        for process in [&mut sender, &mut receiver] {
            let status = process.wait_until(deadline);
            let output = process.output();
            if !status.is_some_and(|status| status.success()) || !output.contains("return status 0") {
                return Err(format!("{status:?}:\n{}", tail(&output)));
            }
        }
        Ok("10 datagrams".to_owned())
    };
    run().into()
}
