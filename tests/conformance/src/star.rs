//! StaR: the same programs with one end's card keeping nothing of the connections, which they do not see;
//! and what the ends settle when one of them cannot or need not.

use std::time::{Duration, Instant};

use crate::case::{BOTH, Case, Net};
use crate::check::Expect;
use crate::pair::{Pair, await_traffic};
use crate::process::tail;
use crate::world::World;

const GROUP: &str = "StaR";
/// Why a program on a board is not killed here: `board_star` in provider/verbs does that.
const NOT_ITS_OWN: &str = "the counters that say who sends are the board's";

/// What the server's log says that a queue pair has become.
const STATELESS: &str = "stateless end";
const STATEFUL: &str = "stateful end";
const PLAIN: &str = "plain RoCEv2";

/// Who of server and client is stateless.
const ROLES: [(&str, [&str; 2], &str); 2] = [
    ("server stateless", ["stateless", "auto"], STATELESS),
    ("client stateless", ["auto", "stateless"], STATEFUL),
];

/// What the wire loses, of what each side sends.
const LOSSES: [(&str, &str); 2] = [("1% loss", "loss=1%,seed=7"), ("5% loss", "loss=5%,seed=7")];

/// perftest, by what it does, with the options that RC's cases have; in fewer iterations, as the wire and the
/// copies are what takes time.
const PERFTEST: [(&str, &[&str]); 8] = [
    ("ib_send_lat", &["", "-e", "-s 64 -I 64", "--use-srq", "-s 65536 -n 100"]),
    (
        "ib_send_bw",
        &[
            "-n 1000",
            "-e -n 1000",
            "-b -n 1000",
            "-q 16 -n 200",
            "-q 4 -b -n 200",
            "-l 16 -n 1600",
            "--use-srq -q 16 -n 200",
        ],
    ),
    ("ib_write_lat", &["", "-s 64 -I 64", "-s 65536 -n 100"]),
    (
        "ib_write_bw",
        &[
            "-n 1000",
            "-b -n 1000",
            "-q 16 -n 200",
            "-q 4 -b -n 200",
            "-l 16 -n 1600",
            "-s 8",
            "-s 1048576 -n 50",
        ],
    ),
    ("ib_read_lat", &["", "-e", "-s 65536 -n 100"]),
    (
        "ib_read_bw",
        &["-n 1000", "-b -n 1000", "-e -n 1000", "-q 16 -n 200", "-q 4 -b -n 200", "-s 1048576 -n 50"],
    ),
    ("ib_atomic_lat", &["", "-A CMP_AND_SWAP"]),
    ("ib_atomic_bw", &["-n 1000", "-b -n 1000", "-q 16 -n 200"]),
];

const PINGPONG: [(&str, &[&str]); 2] = [
    ("ibv_rc_pingpong", &["-c", "-e -c", "-s 100000 -c", "-n 10000 -r 16"]),
    ("ibv_srq_pingpong", &["-c", "-e -c", "-q 16 -s 65536 -c"]),
];

/// A quick look at each operation and each kind of end.
const QUICK: [&str; 6] = [
    "server stateless: ib_send_bw -q 16 -n 200",
    "client stateless: ib_read_lat",
    "server stateless: ib_atomic_bw -n 1000",
    "client stateless, 1% loss: ib_write_bw -n 300",
    "server stateless: ibv_srq_pingpong -g 0 -e -c",
    "client stateless: ibv_rc_pingpong -g 0 -c",
];

fn perftest(program: &'static str, args: &str) -> Pair {
    let expect = if program.ends_with("_bw") { Expect::Bandwidth(1) } else { Expect::Latency(1) };
    Pair::new(program, args, expect).limit(180)
}

fn pingpong(program: &'static str, args: &str) -> Pair {
    Pair::new(program, &format!("-g 0 {args}"), Expect::PingPong).limit(60)
}

/// Server and client with these preferences. Over the same host no connection needs StaR.
fn wanting(pair: Pair, preferences: [&str; 2]) -> Pair {
    pair.own_env("STARVERBS_STAR", preferences).env("STARVERBS_LINK", "udp")
}

/// Server and client with these settings; the server must say what it has become.
fn case(what: &str, preferences: [&str; 2], says: &'static str, pair: Pair) -> Case {
    let pair = wanting(pair, preferences).server_says(says);
    let mut case = Case::pair(GROUP, BOTH, pair.clone());
    case.name = format!("{what}: {}", pair.command());
    if QUICK.contains(&case.name.as_str()) { case.quick(&[Net::Lo]) } else { case }
}

fn on_a_good_wire() -> Vec<Case> {
    let mut cases = Vec::new();
    for (what, preferences, says) in ROLES {
        let mut add = |pair| cases.push(case(what, preferences, says, pair));
        for (program, options) in PERFTEST {
            options.iter().for_each(|args| add(perftest(program, args)));
        }
        for (program, options) in PINGPONG {
            options.iter().for_each(|args| add(pingpong(program, args)));
        }
    }
    cases
}

fn on_a_bad_wire() -> Vec<Case> {
    let mut cases = Vec::new();
    for ((what, preferences, says), (how, fault)) in
        ROLES.into_iter().flat_map(|role| LOSSES.map(|loss| (role, loss)))
    {
        let what = format!("{what}, {how}");
        let mut add =
            |pair: Pair| cases.push(case(&what, preferences, says, pair.env("STARVERBS_FAULT", fault)));
        for (program, _) in PERFTEST {
            add(perftest(program, "-n 300"));
        }
        add(perftest("ib_send_bw", "-q 4 -b -n 100"));
        for (program, _) in PINGPONG {
            add(pingpong(program, "-c"));
        }
    }
    cases
}

/// What the ends settle that want something else, or nothing.
fn settled() -> Vec<Case> {
    let send = || perftest("ib_send_bw", "-q 4 -n 300");
    let key = |byte: &str| byte.repeat(32);
    let sealed = |keys: [&str; 2]| {
        let keys = keys.map(key);
        send().own_env("STARVERBS_STAR_KEY", keys.each_ref().map(String::as_str))
    };
    let crowded = |pair: Pair| pair.env("STARVERBS_STAR_THRESHOLD", "0");
    let roles = ["stateless", "stateful"];
    vec![
        case("nobody has too many", ["auto", "auto"], PLAIN, send()).quick(&[Net::Lo]),
        case("both have too many", ["auto", "auto"], "stateless end\nstateful end", crowded(send()))
            .quick(&[Net::Lo]),
        case("the client is plain", ["stateless", "off"], PLAIN, send()).quick(&[Net::Lo]),
        case("the server is plain", ["off", "stateless"], "", send()),
        case("both are stateless", ["stateless", "stateless"], PLAIN, send()),
        case("both are stateful", ["stateful", "stateful"], PLAIN, pingpong("ibv_rc_pingpong", "-c")),
        case("under one key", roles, STATELESS, sealed(["5a", "5a"])).quick(&[Net::Lo]),
        case("under two keys", roles, PLAIN, sealed(["5a", "a5"])),
        case(
            "under a key, which the client has not",
            roles,
            PLAIN,
            send().server_env("STARVERBS_STAR_KEY", &key("5a")),
        ),
        case("a datagram has no role", roles, "", perftest("ib_send_lat", "-c UD")),
    ]
}

pub(crate) fn cases() -> Vec<Case> {
    [on_a_good_wire(), on_a_bad_wire(), settled(), killed()].concat()
}

/// kill -9 of either end, in either role.
fn killed() -> Vec<Case> {
    let mut cases = Vec::new();
    for (what, preferences, says) in ROLES {
        for victim in ["server", "client"] {
            let name = format!("{what}: kill -9 of the {victim}, then a clean run");
            let run = move |world: &mut World, net| kill(world, net, (preferences, says), victim).into();
            let quick: &[Net] = if (what, victim) == (ROLES[0].0, "client") { &[Net::Lo] } else { &[] };
            let case = Case::special(GROUP, &name, BOTH, run).of_software(NOT_ITS_OWN);
            cases.push(case.quick(quick));
        }
    }
    cases
}

/// How long a survivor may take to notice: perftest's seven retries, and what a busy machine adds.
const NOTICE: Duration = Duration::from_secs(120);

/// What is under way, and what whose peer is killed says: requests that nobody answers, or receives that are
/// flushed with them, if those are polled first.
const VICTIMS: [(&str, &[&str]); 2] =
    [("ib_send_bw", &["Failed status 12:", "Failed status 5:"]), ("ib_write_bw", &["Failed status 12:"])];

/// One end dies in the middle of traffic in both directions. The other's requests fail as RC's do, and what
/// runs next in the same place is clean.
fn kill(
    world: &mut World,
    net: Net,
    (preferences, says): ([&str; 2], &'static str),
    victim: &str,
) -> Result<String, String> {
    let with = |pair: Pair| wanting(pair, preferences).server_says(says);
    for (program, failures) in VICTIMS {
        let pair = with(perftest(program, "-b -n 1000000"));
        let mut running = pair.start(world, net)?;
        let settled = Instant::now() + NOTICE;
        while !running.server.output().contains(says) {
            if Instant::now() > settled {
                return Err(format!(
                    "{program}: the server is no {says}:\n{}",
                    tail(&running.server.output())
                ));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        await_traffic(world, &mut [&mut running.server, &mut running.client])?;
        let (dead, other) = if victim == "server" {
            (&mut running.server, &mut running.client)
        } else {
            (&mut running.client, &mut running.server)
        };
        dead.kill();
        let ended = other.wait_until(Instant::now() + NOTICE);
        let output = other.output();
        if ended.is_none() || !failures.iter().any(|failure| output.contains(failure)) {
            return Err(format!("{program}: who is left ends with {ended:?}:\n{}", tail(&output)));
        }
        with(perftest(program, "-n 300"))
            .run(world, net)
            .map_err(|reason| format!("{program}, then: {reason}"))?;
    }
    Ok("2 kills".to_owned())
}
