//! A server on one card and a client on another, from start to checked output.

use std::time::{Duration, Instant};

use starverbs_conformance::check::{CALIBRATIONS, Expect, UNCALIBRATED};
use starverbs_conformance::process::tail;

use crate::world::{Card, Ip, Program, World};

/// Who serves whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cards {
    pub server: Card,
    pub client: Card,
}

/// starverbs serves rxe.
pub(crate) const STAR_SERVES: Cards = Cards { server: Card::Star, client: Card::Rxe };
/// rxe serves starverbs.
pub(crate) const RXE_SERVES: Cards = Cards { server: Card::Rxe, client: Card::Star };
/// What the two are measured by.
pub(crate) const RXE_ALONE: Cards = Cards { server: Card::Rxe, client: Card::Rxe };

/// What is said of a client that did not end.
const STOPPED: &str = "client had to be killed";

/// One program at both ends. `{gid}` in an argument stands for the index of the end's GID.
#[derive(Debug, Clone)]
pub(crate) struct Pair {
    pub program: String,
    pub args: String,
    pub ip: Ip,
    /// Variables for the end that is ours.
    pub env: Vec<(&'static str, &'static str)>,
    /// How long both may take together.
    pub limit: Duration,
}

impl Pair {
    pub(crate) fn new(program: &str, args: &str) -> Pair {
        let limit = Duration::from_secs(60);
        Pair { program: program.to_owned(), args: args.to_owned(), ip: Ip::V4, env: Vec::new(), limit }
    }

    pub(crate) fn v6(mut self) -> Pair {
        self.ip = Ip::V6;
        self
    }

    pub(crate) fn env(mut self, name: &'static str, value: &'static str) -> Pair {
        self.env.push((name, value));
        self
    }

    /// The command, without what differs between the ends.
    pub(crate) fn title(&self) -> String {
        let program = self.program.rsplit('/').next().unwrap_or_default();
        let words = self.args.replace(" -g {gid}", "").replace(" -x {gid}", "");
        let env: String = self.env.iter().map(|(name, value)| format!("{name}={value} ")).collect();
        let ip = if self.ip == Ip::V6 { " (IPv6)" } else { "" };
        format!("{env}{program}{words}{ip}")
    }

    /// Runs both ends; the outputs of server and client, if both end well.
    pub(crate) fn run(&self, world: &mut World, cards: Cards) -> Result<[String; 2], String> {
        let deadline = Instant::now() + self.limit;
        let port = world.next_port();
        let mut server = self.start(world, cards.server, port, None)?;
        if !server.await_listening(deadline) {
            return Err(format!("server does not listen:\n{}", tail(&server.output())));
        }
        let mut client = self.start(world, cards.client, port, Some(World::address(cards.server)))?;
        let mut wrong = Vec::new();
        let mut judge = |side: &str, program: &mut Program, patience: Duration| {
            let ended = program.wait_until(deadline.min(Instant::now() + patience));
            if ended != Some(true) {
                let how = if ended.is_some() { "failed" } else { "had to be killed" };
                wrong.push(format!("{side} {how}:\n{}", tail(&program.output())));
                program.kill();
            }
            ended == Some(true)
        };
        let well = judge("client", &mut client, self.limit);
        // A client that failed leaves a server that may wait for ever.
        judge("server", &mut server, Duration::from_secs(if well { 20 } else { 2 }));
        if wrong.is_empty() { Ok([server.output(), client.output()]) } else { Err(wrong.join("\n")) }
    }

    /// Runs both ends and judges what the client printed: a remark, or what went wrong. Again, when perftest could not
    /// measure the CPU's frequency, and once when nothing went on: rdma_rxe of Linux 6.1 has been seen to stop
    /// for ever after an acknowledge of its last packet arrived while it sent that message again, with the guest short of
    /// CPU (docs/interop.md).
    pub(crate) fn judged(&self, world: &mut World, cards: Cards, expect: Expect) -> Result<String, String> {
        let mut stopped = false;
        for _ in 1..CALIBRATIONS {
            match self.judged_once(world, cards, expect) {
                Err(reason) if reason.contains(UNCALIBRATED) => {}
                Err(reason) if reason.starts_with(STOPPED) && !stopped => stopped = true,
                result => {
                    return result.map(|remark| if stopped { remark + " (second try)" } else { remark });
                }
            }
        }
        self.judged_once(world, cards, expect)
    }

    fn judged_once(&self, world: &mut World, cards: Cards, expect: Expect) -> Result<String, String> {
        let [_, client] = self.run(world, cards)?;
        expect.judge(&client).map_err(|reason| format!("client: {reason}:\n{}", tail(&client)))
    }

    fn start(
        &self,
        world: &mut World,
        card: Card,
        port: u16,
        server: Option<&str>,
    ) -> Result<Program, String> {
        let gid = world.gid(card, self.ip).to_string();
        let args = self.args.replace("{gid}", &gid);
        let number = port.to_string();
        let mut words = vec![self.program.as_str(), "-p", &number];
        words.extend(args.split_ascii_whitespace());
        words.extend(server);
        world.start(card, &self.env, &words, port)
    }
}
