//! Cases that are more than a server and a client: the device listing, hurt wires, captures, users, crowds.

use std::process::Command;

use crate::address::gids;
use crate::case::{BOTH, Case, Net, Verdict};
use crate::check::{CALIBRATIONS, Expect, UNCALIBRATED};
use crate::pair::Pair;
use crate::world::World;

const HURT_1: &str = "loss=1%,reorder=0.5%,dup=0.5%,seed=7";
const HURT_5: &str = "loss=5%,reorder=2%,dup=2%,seed=7";

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = vec![
        Case::special("device", "ibv_devices", BOTH, devices),
        Case::special("device", "ibv_devinfo -v", BOTH, devinfo),
        Case::special("capture", "STARVERBS_PCAP decoded by tshark", BOTH, capture)
            .of_software("a board's capture is its own: one file for all its functions"),
        Case::special("crowd", "eight pairs at once", BOTH, crowd),
    ];
    cases.extend(users());
    cases.extend(faults());
    cases
}

fn users() -> Vec<Case> {
    let pair = |args: &str| Pair::new("ibv_rc_pingpong", args, Expect::PingPong);
    let bandwidth = |args: &str| Pair::new("ib_write_bw", args, Expect::Bandwidth(1));
    let nobody = Some("nobody");
    let title = |mut case: Case, who: &str| {
        case.name = format!("{} ({who})", case.name);
        case
    };
    vec![
        title(Case::pair("users", BOTH, pair("-g 0 -c").users(nobody, nobody)), "both nobody")
            .quick(&[Net::Lo]),
        title(Case::pair("users", BOTH, pair("-g 0 -c").users(None, nobody)), "server root, client nobody")
            .quick(&[Net::Lo]),
        title(Case::pair("users", BOTH, pair("-g 0 -c").users(nobody, None)), "server nobody, client root"),
        title(Case::pair("users", BOTH, bandwidth("").users(None, nobody)), "server root, client nobody"),
        title(Case::pair("users", BOTH, bandwidth("").users(nobody, None)), "server nobody, client root"),
        Case::special("users", "two pairs of root and two of nobody at once", BOTH, mixed_crowd),
    ]
}

/// RC must finish with the right bytes; UC and UD may lose messages and must say so cleanly.
fn faults() -> Vec<Case> {
    let mut cases = Vec::new();
    for hurt in [HURT_1, HURT_5] {
        let mut add = |program, args: &str, expect, quick: bool| {
            let pair = Pair::new(program, args, expect).limit(120).env("STARVERBS_FAULT", hurt);
            cases.push(Case::pair("faults", BOTH, pair).quick(if quick { &[Net::Lo] } else { &[] }));
        };
        let first = hurt == HURT_1;
        add("ibv_rc_pingpong", "-g 0 -c", Expect::PingPong, true);
        add("ibv_rc_pingpong", "-g 0 -c -e -s 100000 -n 100", Expect::PingPong, !first);
        add("ibv_srq_pingpong", "-g 0 -c -n 200", Expect::PingPong, false);
        add("ib_send_lat", "", Expect::Latency(1), false);
        add("ib_send_bw", "-n 500", Expect::Bandwidth(1), true);
        add("ib_send_bw", "-b -e -q 4 -n 200", Expect::Bandwidth(1), false);
        add("ib_write_lat", "", Expect::Latency(1), false);
        add("ib_write_bw", "-n 500", Expect::Bandwidth(1), first);
        add("ib_write_bw", "-a -n 20", Expect::Bandwidth(23), false);
        add("ib_read_lat", "", Expect::Latency(1), false);
        add("ib_read_bw", "-n 500", Expect::Bandwidth(1), true);
        add("ib_atomic_lat", "", Expect::Latency(1), false);
        add("ib_atomic_bw", "-n 500", Expect::Bandwidth(1), true);
        add("ib_atomic_bw", "-n 500 -A CMP_AND_SWAP", Expect::Bandwidth(1), false);
        add("ib_write_bw", "-c UC -D 2", Expect::Bandwidth(1), false);
        add("ib_send_bw", "-c UC -D 2", Expect::Bandwidth(1), false);
        add("ib_send_bw", "-c UD -D 2", Expect::Bandwidth(1), first);
    }
    let slow = Pair::new("ibv_rc_pingpong", "-g 0 -c -n 200", Expect::PingPong);
    cases.push(Case::pair("faults", BOTH, slow.env("STARVERBS_FAULT", "delay=500us,jitter=500us,seed=3")));
    let bent = Pair::new("ibv_rc_pingpong", "-g 0 -c", Expect::PingPong).limit(60);
    cases.push(Case::pair("faults", BOTH, bent.env("STARVERBS_FAULT", "corrupt=2%,seed=3")));
    cases
}

fn devices(world: &mut World, net: Net) -> Verdict {
    let run = || {
        let output = world.single(net, 0, &["ibv_devices"])?;
        let line =
            output.lines().find(|line| line.contains("star0")).ok_or(format!("no star0:\n{output}"))?;
        let guid = line.split_ascii_whitespace().last().unwrap_or_default();
        let real = guid.len() == 16 && guid.chars().any(|c| c != '0');
        if real { Ok(line.trim().replace(['\t', ' '], " ")) } else { Err(format!("no GUID: {line}")) }
    };
    let mut run = run;
    run().into()
}

fn devinfo(world: &mut World, net: Net) -> Verdict {
    let mut run = || {
        let output = world.single(net, 0, &["ibv_devinfo", "-v"])?;
        let wanted = [
            "hca_id:\tstar0",
            "PORT_ACTIVE",
            "Ethernet",
            "atomic_cap:\t\t\tATOMIC_HCA",
            "RoCE v2",
            "max_srq:",
        ];
        match wanted.iter().find(|text| !output.contains(*text)) {
            Some(text) => Err(format!("{text:?} is missing:\n{output}")),
            None => Ok(format!("{} GIDs", gids(&output).len())),
        }
    };
    run().into()
}

fn capture(world: &mut World, net: Net) -> Verdict {
    if Command::new("tshark").arg("--version").output().is_err() {
        return Verdict::Skip("tshark is not installed".to_owned());
    }
    let mut run = || {
        let file = world.scratch("capture-%p.pcap");
        let pair = Pair::new("ibv_rc_pingpong", "-g 0 -c -n 50", Expect::PingPong);
        let pair = pair.env("STARVERBS_PCAP", &file.to_string_lossy());
        let running = pair.start(world, net)?;
        let pids = [running.server.pid(), running.client.pid()];
        running.finish()?;
        let mut frames = 0;
        for pid in pids {
            let file = world.scratch(&format!("capture-{pid}.pcap"));
            let count = |filter: &str| -> Result<usize, String> {
                let output = Command::new("tshark")
                    .args(["-r", &file.to_string_lossy(), "-Y", filter, "-T", "fields", "-e", "frame.number"])
                    .output()
                    .map_err(|e| e.to_string())?;
                if !output.status.success() {
                    return Err(String::from_utf8_lossy(&output.stderr).into_owned());
                }
                Ok(String::from_utf8_lossy(&output.stdout).lines().count())
            };
            let (all, ours) = (count("frame")?, count("infiniband.bth && udp.dstport == 4791")?);
            let broken = count("_ws.malformed")?;
            if ours < 100 || ours != all || broken != 0 {
                return Err(format!("{all} frames, {ours} of them RoCEv2, {broken} malformed"));
            }
            frames += ours;
        }
        Ok(format!("{frames} frames, none malformed"))
    };
    run().into()
}

/// Starts all pairs, then waits for all.
pub(crate) fn together(world: &mut World, net: Net, pairs: &[Pair]) -> Verdict {
    let mut result = all_at_once(world, net, pairs);
    /* as of a pair alone: the machine was too busy for perftest to measure the CPU's frequency */
    for _ in 1..CALIBRATIONS {
        if !result.as_ref().is_err_and(|reason| reason.contains(UNCALIBRATED)) {
            break;
        }
        result = all_at_once(world, net, pairs);
    }
    match result {
        Ok(()) => Verdict::Pass(format!("{} processes", 2 * pairs.len())),
        Err(reason) => Verdict::Fail(reason),
    }
}

/// All have ended; the first that did not end well says why.
fn all_at_once(world: &mut World, net: Net, pairs: &[Pair]) -> Result<(), String> {
    let mut started = Vec::new();
    for pair in pairs {
        let of_pair = |reason| format!("{}: {reason}", pair.title());
        started.push((pair.title(), pair.start(world, net).map_err(of_pair)?));
    }
    let mut result = Ok(());
    for (title, running) in started {
        let ended = running.finish().map_err(|reason| format!("{title}: {reason}"));
        result = result.and(ended.map(drop));
    }
    result
}

fn crowd_of_four() -> [Pair; 4] {
    [
        Pair::new("ibv_rc_pingpong", "-g 0 -c -n 2000", Expect::PingPong),
        Pair::new("ib_write_bw", "-n 1000", Expect::Bandwidth(1)),
        Pair::new("ibv_srq_pingpong", "-g 0 -c -e", Expect::PingPong),
        Pair::new("ib_read_bw", "-n 500", Expect::Bandwidth(1)),
    ]
    .map(|pair| pair.limit(60))
}

fn crowd(world: &mut World, net: Net) -> Verdict {
    together(world, net, &[crowd_of_four(), crowd_of_four()].concat())
}

fn mixed_crowd(world: &mut World, net: Net) -> Verdict {
    let [a, b, c, d] = crowd_of_four();
    let nobody = Some("nobody");
    together(world, net, &[a, b, c.users(nobody, nobody), d.users(nobody, nobody)])
}
