//! A server on one provider and a client on the other, from start to checked output.

use std::time::{Duration, Instant};

use starverbs_conformance::check::{CALIBRATIONS, Expect, UNCALIBRATED};
use starverbs_conformance::process::tail;

use crate::world::{Found, Ip, Program, Provider, World};

/// Who serves whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Providers {
    pub server: Provider,
    pub client: Provider,
}

/// starverbs serves rxe.
pub(crate) const STAR_SERVES: Providers = Providers { server: Provider::Star, client: Provider::Rxe };
/// rxe serves starverbs.
pub(crate) const RXE_SERVES: Providers = Providers { server: Provider::Rxe, client: Provider::Star };
/// What the two are measured by.
pub(crate) const RXE_ALONE: Providers = Providers { server: Provider::Rxe, client: Provider::Rxe };

/// What is said of a client that did not end.
const STOPPED: &str = "client had to be killed";

/// One program at both ends. `{gid}` in an argument stands for the index of the end's GID, `{server}` for the
/// server's address.
#[derive(Debug, Clone)]
pub(crate) struct Pair {
    pub program: String,
    /// The server's, where it is another one.
    pub server_program: Option<&'static str>,
    pub args: String,
    /// Arguments of the server and of the client alone.
    pub own_args: [&'static str; 2],
    pub meets: Meets,
    pub ip: Ip,
    /// Variables for the end that is ours.
    pub env: Vec<(&'static str, &'static str)>,
}

/// How long a pair may take, however busy the machine is that plays the guest's CPU.
const LIMIT: Duration = Duration::from_secs(300);

/// perftest's local ACK timeout: 0.27 s, four times the usual, as an emulated CPU on a busy machine needs.
const TIMEOUT: [&str; 2] = ["-u", "16"];

/// How a client finds its server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Meets {
    /// By a TCP port that both are told.
    Tcp,
    /// By a port of the connection manager that both are told.
    Service,
    /// By a port of the connection manager that both know.
    Fixed(u16),
}

impl Pair {
    pub(crate) fn new(program: &str, args: &str) -> Pair {
        Pair {
            program: program.to_owned(),
            server_program: None,
            args: args.to_owned(),
            own_args: ["", "{server}"],
            meets: Meets::Tcp,
            ip: Ip::V4,
            env: Vec::new(),
        }
    }

    /// The server listens at the connection manager; these are the arguments of server and client alone.
    pub(crate) fn managed(mut self, meets: Meets, server: &'static str, client: &'static str) -> Pair {
        self.meets = meets;
        self.own_args = [server, client];
        self
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
    pub(crate) fn run(&self, world: &mut World, providers: Providers) -> Result<[String; 2], String> {
        let deadline = Instant::now() + LIMIT;
        let found = match self.meets {
            Meets::Tcp => Found::Tcp(world.next_port()),
            Meets::Service => Found::Service(world.next_port()),
            Meets::Fixed(port) => Found::Service(port),
        };
        let mut server = self.start(world, providers, 0, found)?;
        if !server.await_listening(deadline) {
            return Err(format!("server does not listen:\n{}", tail(&server.output())));
        }
        let mut client = self.start(world, providers, 1, found)?;
        let mut wrong = Vec::new();
        let mut finish = |side: &str, program: &mut Program, patience: Duration| {
            let ended = world.await_end(program, deadline.min(Instant::now() + patience));
            if ended != Some(true) {
                let how = if ended.is_some() { "failed" } else { "had to be killed" };
                wrong.push(format!("{side} {how}:\n{}", tail(&program.output())));
                program.kill();
            }
            ended == Some(true)
        };
        let well = finish("client", &mut client, LIMIT);
        // A client that failed leaves a server that may wait for ever.
        finish("server", &mut server, Duration::from_secs(if well { 20 } else { 2 }));
        if wrong.is_empty() { Ok([server.output(), client.output()]) } else { Err(wrong.join("\n")) }
    }

    /// Runs both ends and checks what the client printed: a remark, or what went wrong. Again, when perftest
    /// could not measure the CPU's frequency, and once when nothing went on: rdma_rxe of Linux 6.1 has
    /// been seen to stop for ever after an acknowledge of its last packet arrived while it sent that
    /// message again, with the guest short of CPU (docs/interop.md).
    pub(crate) fn check(
        &self,
        world: &mut World,
        providers: Providers,
        expect: Expect,
    ) -> Result<String, String> {
        let mut stopped = false;
        for _ in 1..CALIBRATIONS {
            match self.check_once(world, providers, expect) {
                Err(reason) if reason.contains(UNCALIBRATED) => {}
                Err(reason) if reason.starts_with(STOPPED) && !stopped => stopped = true,
                result => {
                    return result.map(|remark| if stopped { remark + " (second try)" } else { remark });
                }
            }
        }
        self.check_once(world, providers, expect)
    }

    fn check_once(&self, world: &mut World, providers: Providers, expect: Expect) -> Result<String, String> {
        let [_, client] = self.run(world, providers)?;
        expect.check(&client).map_err(|reason| format!("client: {reason}:\n{}", tail(&client)))
    }

    /// Starts one side: 0 is the server, 1 the client.
    fn start(
        &self,
        world: &mut World,
        providers: Providers,
        side: usize,
        found: Found,
    ) -> Result<Program, String> {
        let provider = [providers.server, providers.client][side];
        let gid = world.gid(provider, self.ip).to_string();
        let [args, own_args] = [self.args.as_str(), self.own_args[side]].map(|text| {
            text.replace("{gid}", &gid)
                .replace("{server}", World::address(providers.server, self.address_ip()))
        });
        let (Found::Tcp(port) | Found::Service(port)) = found;
        let number = port.to_string();
        let server_program = self.server_program.filter(|_| side == 0);
        let mut words = vec![server_program.unwrap_or(&self.program)];
        if !matches!(self.meets, Meets::Fixed(_)) {
            words.extend(["-p", &number]);
        }
        if self.program.starts_with("ib_") {
            words.extend(TIMEOUT);
        }
        words.extend(args.split_ascii_whitespace().chain(own_args.split_ascii_whitespace()));
        world.start(provider, &self.env, &words, found)
    }

    /// Which address the client is told: what meets over TCP does so over IPv4, whatever carries the frames.
    fn address_ip(&self) -> Ip {
        if self.meets == Meets::Tcp { Ip::V4 } else { self.ip }
    }
}
