//! kill -9 of either side at chosen and at random moments, then a clean run in the same place; nothing stays
//! behind.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use starverbs_core::rng::SplitMix64;

use crate::case::{BOTH, Case, Net, Verdict};
use crate::check::Expect;
use crate::pair::{Pair, Running, Server, await_traffic};
use crate::world::World;

/// The tests of the board kill its clients, too.
const STAYS: &str = "what is counted and what is left are the board's";

pub(crate) fn cases() -> Vec<Case> {
    let random = |name, kills, seed| {
        Case::special("kill -9", name, BOTH, move |world, net| random_kills(world, net, kills, seed).into())
            .of_software(STAYS)
    };
    vec![
        Case::special("kill -9", "the server, at several moments, then a clean run", BOTH, kill_server)
            .quick(&[Net::Lo]),
        Case::special("kill -9", "the client, at several moments, then a clean run", BOTH, kill_client)
            .quick(&[Net::Veth]),
        Case::special("kill -9", "both, then nothing is left behind", BOTH, leaves_nothing)
            .quick(&[Net::Veth])
            .of_software(STAYS),
        random("either side at 10 random moments, others live on", 10, 1).quick(&[Net::Lo]),
        random("either side at 100 random moments, others live on", 100, 2).quick(&[]),
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
    for (pair, moment) in traffic().into_iter().cycle().zip(MOMENTS) {
        let mut running = pair.start(world, net)?;
        // The moment of the kill is what is meant.
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

/// What the card would have left in the kernel's tables at both ends, and in shared memory.
#[derive(Debug, PartialEq, Eq)]
struct Traces {
    sockets: Vec<String>,
    files: BTreeSet<String>,
}

impl Traces {
    fn now(world: &World, net: Net) -> Result<Traces, String> {
        let mut sockets = Vec::new();
        for end in 0..2 {
            let command = &["cat", "/proc/net/udp", "/proc/net/udp6", "/proc/net/unix"];
            let output = world.command(net, end, command).output().map_err(|e| e.to_string())?;
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let ours = |line: &&str| line.contains(":12B7 ") || line.contains("@starverbs");
            sockets.extend(text.lines().filter(ours).map(str::to_owned));
        }
        let mut files = BTreeSet::new();
        for folder in ["/dev/shm", "/run", "/var/run", "/run/lock"] {
            let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
            files.extend(entries.map(|entry| entry.path().to_string_lossy().into_owned()));
        }
        Ok(Traces { sockets, files })
    }

    /// What is there now that was not before. Over loopback other programs of this host may come and go; a
    /// namespace is all our own.
    fn left_since(&self, world: &World, net: Net) -> Result<(), String> {
        if net == Net::Lo {
            return Ok(());
        }
        let now = Traces::now(world, net)?;
        let files: Vec<_> = now.files.difference(&self.files).collect();
        if now.sockets.is_empty() && files.is_empty() {
            Ok(())
        } else {
            Err(format!("left behind: {files:?}\n{}", now.sockets.join("\n")))
        }
    }
}

fn leaves_nothing(world: &mut World, net: Net) -> Verdict {
    let mut run = || {
        let before = Traces::now(world, net)?;
        for pair in traffic() {
            let mut running = pair.start(world, net)?;
            await_traffic(world, &mut [&mut running.client])?;
            running.server.kill();
            running.client.kill();
        }
        before.left_since(world, net)?;
        clean_run(world, net)?;
        Ok(String::new())
    };
    run().into()
}

/// Between 0.2 and about 800 ms, short ones as likely as long ones: starting up takes a few of them.
fn moment(random: &mut SplitMix64) -> Duration {
    let doublings = random.below(12) as u32;
    Duration::from_micros(200 * (1 << doublings) + random.below(200 * (1 << doublings)))
}

/// Processes that live through many kills: a server that waits for its client, and a pair at work.
struct Bystanders {
    server: Server,
    waiting: Pair,
    working: Pair,
    at_work: Option<Running>,
}

impl Bystanders {
    fn start(world: &mut World, net: Net) -> Result<Bystanders, String> {
        let waiting = Pair::new("ib_send_bw", "-e", Expect::Bandwidth(1));
        let mut server = waiting.start_server(world, net)?;
        server.await_listening(Instant::now() + waiting.limit)?;
        let working = Pair::new("ibv_rc_pingpong", "-g 0 -c -e -n 10000", Expect::PingPong).limit(120);
        Ok(Bystanders { server, waiting, working, at_work: None })
    }

    /// Sees to it that the pair works; one that has ended must have ended well.
    fn tend(&mut self, world: &mut World, net: Net) -> Result<(), String> {
        if let Some(mut running) = self.at_work.take() {
            if running.client.ended().is_none() {
                self.at_work = Some(running);
                return Ok(());
            }
            running.finish().map_err(|reason| format!("a pair that nobody killed: {reason}"))?;
        }
        self.at_work = Some(self.working.start(world, net)?);
        Ok(())
    }

    /// Both end well, the waiting server with a client of its own.
    fn finish(self, world: &mut World, net: Net) -> Result<(), String> {
        if let Some(running) = self.at_work {
            running.finish().map_err(|reason| format!("a pair that nobody killed: {reason}"))?;
        }
        let client = self.waiting.start_client(world, net, self.server.port)?;
        let running = self.waiting.running(self.server.process, client);
        running.finish().map(drop).map_err(|reason| format!("a server that waited meanwhile: {reason}"))
    }
}

fn random_kills(world: &mut World, net: Net, kills: u32, seed: u64) -> Result<String, String> {
    let before = Traces::now(world, net)?;
    let mut random = SplitMix64::new(seed);
    let mut bystanders = Bystanders::start(world, net)?;
    for kill in 1..=kills {
        let wrong = |reason| format!("seed {seed}, kill {kill}: {reason}");
        bystanders.tend(world, net).map_err(wrong)?;
        kill_at_random(world, net, &mut random).map_err(wrong)?;
    }
    bystanders.finish(world, net)?;
    before.left_since(world, net)?;
    Ok(format!("{kills} kills"))
}

/// One pair, one kill, and a clean run while the other side lives on. The moment of the kill is what the
/// sleeps are for.
fn kill_at_random(world: &mut World, net: Net, random: &mut SplitMix64) -> Result<(), String> {
    let pair = traffic()[random.below(3) as usize].clone();
    let (who, moment) = (random.below(3), moment(random));
    let victim = ["the server alone", "the server", "the client"][who as usize];
    let wrong = |reason| format!("{}: {victim} killed after {moment:?}, then: {reason}", pair.title());
    if who == 0 {
        let mut server = pair.start_server(world, net)?;
        std::thread::sleep(moment);
        server.process.kill();
        return clean_run(world, net).map(drop).map_err(wrong);
    }
    let mut running = pair.start(world, net)?;
    std::thread::sleep(moment);
    if who == 1 {
        running.server.kill()
    } else {
        running.client.kill()
    }
    let ran = clean_run(world, net).map(drop).map_err(wrong);
    running.server.kill();
    running.client.kill();
    ran
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_repeatable_and_bounded() {
        let moments = |seed| {
            let mut random = SplitMix64::new(seed);
            (0..1000).map(|_| moment(&mut random)).collect::<Vec<_>>()
        };
        assert_eq!(moments(1), moments(1));
        assert_ne!(moments(1), moments(2));
        assert!(moments(1).iter().all(|m| (200..820_000).contains(&m.as_micros())));
        assert!(moments(1).iter().any(|m| m.as_micros() < 400));
        assert!(moments(1).iter().any(|m| m.as_micros() > 500_000));
    }
}
