//! kill -9 of either side at several moments, then a clean run in the same place.

use std::time::{Duration, Instant};

use crate::case::{BOTH, Case, Net, Verdict};
use crate::check::Expect;
use crate::pair::Pair;
use crate::world::World;

pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::special("kill -9", "the server, at several moments, then a clean run", BOTH, kill_server)
            .quick(&[Net::Lo]),
        Case::special("kill -9", "the client, at several moments, then a clean run", BOTH, kill_client)
            .quick(&[Net::Veth]),
        Case::special("kill -9", "both, then nothing is left behind", BOTH, leaves_nothing)
            .quick(&[Net::Veth]),
    ]
}

/// Moments after the client's start, from before the QPs are connected to the middle of the traffic.
const MOMENTS: [u64; 5] = [2, 15, 60, 200, 600];

fn traffic() -> [Pair; 3] {
    [
        Pair::new("ib_write_bw", "-D 8", Expect::Bandwidth(1)),
        Pair::new("ib_send_bw", "-e -q 4 -b -n 100000", Expect::Bandwidth(1)),
        Pair::new("ib_read_bw", "-D 8", Expect::Bandwidth(1)),
    ]
}

fn clean_run(world: &mut World, net: Net) -> Result<String, String> {
    Pair::new("ibv_rc_pingpong", "-g 0 -c", Expect::PingPong).limit(15).run(world, net)
}

fn kill_one(world: &mut World, net: Net, server: bool) -> Result<String, String> {
    let mut kills = 0;
    for (pair, moment) in MOMENTS.iter().flat_map(|m| traffic().map(|pair| (pair, *m))) {
        let mut running = pair.start(world, net)?;
        std::thread::sleep(Duration::from_millis(moment));
        let (victim, other) = if server {
            (&mut running.server, &mut running.client)
        } else {
            (&mut running.client, &mut running.server)
        };
        victim.kill();
        // The other side notices by itself, or not, as the program is written; the next run must not care.
        other.wait_until(Instant::now() + Duration::from_millis(300));
        let wrong = |reason| format!("{} killed after {moment} ms, then: {reason}", pair.title());
        clean_run(world, net).map_err(wrong)?;
        other.kill();
        kills += 1;
    }
    clean_run(world, net)?;
    Ok(format!("{kills} kills"))
}

fn kill_server(world: &mut World, net: Net) -> Verdict {
    kill_one(world, net, true).into()
}

fn kill_client(world: &mut World, net: Net) -> Verdict {
    kill_one(world, net, false).into()
}

/// Lines of a /proc/net table, as seen at end 0, that the card would have put there.
fn traces(world: &World, net: Net) -> Result<String, String> {
    let command = &["cat", "/proc/net/udp", "/proc/net/udp6", "/proc/net/unix"];
    let output = world.command(net, 0, command).output().map_err(|e| e.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let ours = |line: &&str| line.contains(":12B7 ") || line.contains("@starverbs");
    Ok(text.lines().filter(ours).collect::<Vec<_>>().join("\n"))
}

fn shared_memory() -> usize {
    std::fs::read_dir("/dev/shm").map_or(0, Iterator::count)
}

fn leaves_nothing(world: &mut World, net: Net) -> Verdict {
    let mut run = || {
        let before = (traces(world, net)?, shared_memory());
        for pair in traffic() {
            let mut running = pair.start(world, net)?;
            std::thread::sleep(Duration::from_millis(300));
            running.server.kill();
            running.client.kill();
        }
        let after = (traces(world, net)?, shared_memory());
        // Over loopback other programs of this host may come and go; a namespace is all our own.
        if net != Net::Lo && !after.0.is_empty() {
            return Err(format!("left behind:\n{}", after.0));
        }
        if net != Net::Lo && after.1 > before.1 {
            return Err(format!("{} more files in /dev/shm", after.1 - before.1));
        }
        clean_run(world, net)?;
        Ok(String::new())
    };
    run().into()
}
