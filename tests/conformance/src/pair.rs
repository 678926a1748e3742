//! A server and a client of one program, from start to checked output.

use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use starverbs_conformance::command::output;

use crate::case::Net;
use crate::check::{CALIBRATIONS, EARLY, Expect, HASTES, HELD, UNCALIBRATED};
use crate::container::Container;
use crate::process::{Process, tail};
use crate::world::{Setting, World};

/// How many times as long as on an idle machine a pair may take. The limits are there to end what hangs.
const BUSY: u64 = 4;
/// What a process has sent that is in the middle of its messages, packets and requests.
const TRAFFIC: u64 = 500;
/// How long it may take until then, with all that a program does before its first message.
const TRAFFIC_LIMIT: Duration = Duration::from_secs(60);
/// The counters of what a card sends: packets, or what takes their place on one host.
const SENT: [&str; 5] = ["tx_packets", "local_requests", "local_direct", "local_traced", "local_mapped"];

/// One program run on both sides.
#[derive(Clone)]
pub(crate) struct Pair {
    pub program: &'static str,
    /// The server's, where it is another one.
    pub server_program: Option<&'static str>,
    /// Where the server is found: a TCP port, or a service of the connection manager.
    pub found: Found,
    pub args: Vec<String>,
    /// Arguments of the server and of the client alone.
    pub own_args: [Vec<String>; 2],
    /// How server and client are started.
    pub settings: [Setting; 2],
    /// How long both may take together.
    pub limit: Duration,
    /// What the output must hold.
    pub expect: Expect,
    /// What the server's log must say, one of these lines.
    pub server_says: &'static str,
}

/// How a client finds its server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// By a TCP port that both are told
    Tcp,
    /// By a port of the connection manager that both are told
    Service,
    /// By a port of the connection manager that both know
    Fixed(u16),
}

impl Pair {
    pub(crate) fn new(program: &'static str, args: &str, expect: Expect) -> Pair {
        let args = args.split_ascii_whitespace().map(str::to_owned).collect();
        let limit = Duration::from_secs(30 * BUSY);
        Pair {
            program,
            server_program: None,
            found: Found::Tcp,
            args,
            own_args: Default::default(),
            settings: Default::default(),
            limit,
            expect,
            server_says: "",
        }
    }

    /// The server listens at the connection manager.
    pub(crate) fn found(mut self, found: Found) -> Pair {
        self.found = found;
        self
    }

    /// Arguments of the server and of the client alone.
    pub(crate) fn own(mut self, server: &str, client: &str) -> Pair {
        self.own_args = [server, client].map(|a| a.split_ascii_whitespace().map(str::to_owned).collect());
        self
    }

    /// For how long both may take, where nothing else runs.
    pub(crate) fn limit(mut self, seconds: u64) -> Pair {
        self.limit = Duration::from_secs(seconds * BUSY);
        self
    }

    /// Sets a variable for both sides.
    pub(crate) fn env(mut self, name: &'static str, value: &str) -> Pair {
        for setting in &mut self.settings {
            setting.env.push((name, value.to_owned()));
        }
        self
    }

    /// Sets a variable for each side.
    pub(crate) fn own_env(mut self, name: &'static str, values: [&str; 2]) -> Pair {
        for (setting, value) in self.settings.iter_mut().zip(values) {
            setting.env.push((name, value.to_owned()));
        }
        self
    }

    /// Sets a variable for the server.
    pub(crate) fn server_env(mut self, name: &'static str, value: &str) -> Pair {
        self.settings[0].env.push((name, value.to_owned()));
        self
    }

    /// The server's log must say one of these lines.
    pub(crate) fn server_says(self, lines: &'static str) -> Pair {
        let pair = Pair { server_says: lines, ..self };
        if lines.is_empty() { pair } else { pair.server_env("STARVERBS_LOG", "debug") }
    }

    pub(crate) fn preload(mut self) -> Pair {
        self.settings.iter_mut().for_each(|setting| setting.preload = true);
        self
    }

    /// Runs server and client as these users.
    pub(crate) fn users(mut self, server: Option<&'static str>, client: Option<&'static str>) -> Pair {
        self.settings[0].user = server;
        self.settings[1].user = client;
        self
    }

    /// Runs server and client in containers of their own, or not.
    pub(crate) fn containers(mut self, server: Option<Container>, client: Option<Container>) -> Pair {
        self.settings[0].container = server;
        self.settings[1].container = client;
        self
    }

    /// The command as a person would type it.
    pub(crate) fn title(&self) -> String {
        let mut title = String::new();
        for (name, value) in &self.settings[0].env {
            title += &format!("{name}={value} ");
        }
        title + &self.command()
    }

    /// The program and its arguments.
    pub(crate) fn command(&self) -> String {
        [&[self.program.to_owned()], self.args.as_slice()].concat().join(" ")
    }

    /// Runs both sides to their end and checks the output: a remark, or what went wrong. Again, when perftest
    /// could not measure the CPU's frequency, or was too early.
    pub(crate) fn run(&self, world: &mut World, net: Net) -> Result<String, String> {
        let (mut uncalibrated, mut too_early) = (0, 0);
        loop {
            let mut running = self.start(world, net)?;
            if too_early > 0 {
                running.hold_client_back(Duration::from_millis(4 << too_early));
            }
            let result = running.finish();
            let Err(reason) = &result else { return result };
            uncalibrated += u32::from(reason.contains(UNCALIBRATED));
            too_early += u32::from(early(reason).is_some());
            let again = reason.contains(UNCALIBRATED) && uncalibrated < CALIBRATIONS
                || early(reason).is_some() && too_early < HASTES;
            if !again {
                return result;
            }
        }
    }

    /// Starts both sides; the client as soon as the server listens.
    pub(crate) fn start(&self, world: &mut World, net: Net) -> Result<Running, String> {
        let deadline = Instant::now() + self.limit;
        let mut server = self.start_server(world, net)?;
        server.await_listening(deadline)?;
        let client = self.start_client(world, net, server.port)?;
        Ok(Running { deadline, port: server.port, ..self.running(server.process, client) })
    }

    /// Both sides under way, with all the time that they may take.
    pub(crate) fn running(&self, server: Process, client: Process) -> Running {
        let Pair { limit, expect, server_says, .. } = *self;
        Running { server, client, port: 0, deadline: Instant::now() + limit, expect, server_says }
    }

    /// Starts the server alone.
    pub(crate) fn start_server(&self, world: &mut World, net: Net) -> Result<Server, String> {
        let port = if let Found::Fixed(port) = self.found { port } else { world.free_port() };
        let words = self.words(self.server_program.unwrap_or(self.program), 0, port);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        Ok(Server { process: world.start(net, 0, &self.settings[0], &words)?, port, found: self.found })
    }

    /// The command of one side.
    fn words(&self, program: &str, side: usize, port: u16) -> Vec<String> {
        let mut words = vec![program.to_owned()];
        if !matches!(self.found, Found::Fixed(_)) {
            words.extend(["-p".to_owned(), port.to_string()]);
        }
        words.extend(self.args.iter().chain(&self.own_args[side]).cloned());
        words
    }

    /// Starts the client alone, of a server at `port`.
    pub(crate) fn start_client(&self, world: &mut World, net: Net, port: u16) -> Result<Process, String> {
        let words = self.words(self.program, 1, port);
        let mut words: Vec<&str> = words.iter().map(String::as_str).collect();
        words.push(World::server_address(net));
        world.start(net, 1, &self.settings[1], &words)
    }
}

/// The words by which perftest tells that it was too early, if it was.
fn early(output: &str) -> Option<&'static str> {
    EARLY.into_iter().find(|words| output.contains(words))
}

/// A server that waits for its client.
pub(crate) struct Server {
    pub process: Process,
    pub port: u16,
    found: Found,
}

impl Server {
    /// Waits until it listens.
    pub(crate) fn await_listening(&mut self, deadline: Instant) -> Result<(), String> {
        let listens = |process: &Process, port| match self.found {
            Found::Tcp => process.listens(port),
            Found::Service | Found::Fixed(_) => process.serves(port),
        };
        while !listens(&self.process, self.port) {
            if let Some(status) = self.process.ended() {
                return Err(format!(
                    "server ended before it listened ({status}):\n{}",
                    tail(&self.process.output())
                ));
            }
            if Instant::now() > deadline {
                return Err(format!("server does not listen:\n{}", tail(&self.process.output())));
            }
            std::thread::sleep(Duration::from_millis(3));
        }
        Ok(())
    }
}

/// Waits until each of these has sent [`TRAFFIC`] packets and requests: it is in the middle of its messages.
pub(crate) fn await_traffic(world: &World, busy: &mut [&mut Process]) -> Result<(), String> {
    let deadline = Instant::now() + TRAFFIC_LIMIT;
    for process in busy {
        while sent(world, process.pid()) < TRAFFIC {
            if let Some(status) = process.ended() {
                return Err(format!("ended before its traffic ({status}):\n{}", tail(&process.output())));
            }
            if Instant::now() > deadline {
                return Err(format!("sends nothing:\n{}", tail(&process.output())));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    Ok(())
}

/// What a process has sent, by the counters of its card; 0 before it has one.
pub(crate) fn sent(world: &World, pid: u32) -> u64 {
    let stat = output(Command::new(&world.starverbs).args(["stat", &pid.to_string()])).unwrap_or_default();
    let counters = stat.lines().filter_map(|line| line.trim().split_once(' '));
    let sent = counters.filter(|(name, _)| SENT.contains(name));
    sent.filter_map(|(_, value)| value.trim().parse::<u64>().ok()).sum()
}

/// Both sides under way.
pub(crate) struct Running {
    pub server: Process,
    pub client: Process,
    /// Where the server listens
    port: u16,
    deadline: Instant,
    expect: Expect,
    server_says: &'static str,
}

impl Running {
    /// Stops the client for most of the time until its server listens for the second time: it has to read the
    /// last output before that, and then would be faster than its server.
    fn hold_client_back(&mut self, stop: Duration) {
        let end = self.deadline.min(Instant::now() + HELD);
        let mut alone = false;
        while Instant::now() < end && self.client.ended().is_none() && self.server.ended().is_none() {
            let listens = self.server.serves(self.port);
            if listens && alone {
                break;
            }
            alone |= !listens;
            if alone {
                self.client.signal(Signal::SIGSTOP);
                std::thread::sleep(stop);
                self.client.signal(Signal::SIGCONT);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for both and checks their output.
    pub(crate) fn finish(mut self) -> Result<String, String> {
        let client = self.client.wait_until(self.deadline);
        // A client that failed leaves a server that may wait for ever.
        let patience = if client.is_some_and(|status| status.success()) { 10 * BUSY } else { 1 };
        let end = self.deadline.max(Instant::now() + Duration::from_millis(500));
        let server = self.server.wait_until(end.min(Instant::now() + Duration::from_secs(patience)));
        let sides = [("client", client, &mut self.client), ("server", server, &mut self.server)];
        let mut wrong = Vec::new();
        for (side, status, process) in sides {
            match status {
                Some(status) if status.success() => {}
                Some(status) => wrong.push(format!("{side}: {status}:\n{}", tail(&process.output()))),
                None => wrong.push(format!(
                    "{side}: had to be killed: {}\n{}",
                    process.threads(),
                    tail(&process.output())
                )),
            }
            process.kill();
        }
        let output = self.client.output();
        if !wrong.is_empty() {
            // It may be further up than what is shown.
            wrong.extend(early(&output).map(str::to_owned));
            return Err(wrong.join("\n"));
        }
        let log = self.server.output();
        if !self.server_says.is_empty() && !self.server_says.lines().any(|line| log.contains(line)) {
            return Err(format!("server does not say {:?}:\n{}", self.server_says, tail(&log)));
        }
        self.expect.check(&output).map_err(|reason| format!("client: {reason}:\n{}", tail(&output)))
    }
}
