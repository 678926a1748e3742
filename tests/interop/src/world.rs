//! Where cases run: on the card in the namespace, or on rdma_rxe in the guest.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use starverbs_conformance::command::{forget_settings, output};
use starverbs_conformance::process::Process;

pub(crate) use starverbs_guest::guest::Found;
use starverbs_guest::guest::{Guest, Job, Machine};
use starverbs_guest::kernel::Kernel;
use starverbs_guest::net::{ADDRESSES, ADDRESSES_V6, Net};
pub(crate) use starverbs_guest::program::Program;

/// The RDMA provider that a program runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Provider {
    /// starverbs, in the namespace.
    Star,
    /// The kernel's, in the guest.
    Rxe,
}

impl Provider {
    /// Its index in lists of both.
    fn index(self) -> usize {
        match self {
            Provider::Star => 0,
            Provider::Rxe => 1,
        }
    }
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(["starverbs", "rxe"][self.index()])
    }
}

/// Which addresses carry the frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ip {
    V4,
    V6,
}

/// IP MTU of the guest's interface: 4096 bytes of payload and all headers.
const GUEST_MTU: u32 = 4200;
const TAP_MTU: u32 = 9000;
/// Two programs that say nothing for so long have stopped: starting one takes the guest seconds on a busy
/// machine.
const QUIET: Duration = Duration::from_secs(60);
/// The guest's part of the world: rxe0, and its GIDs in a file.
const SETUP: &str = "rdma link add rxe0 type rxe netdev eth0
grep -H . /sys/class/infiniband/rxe0/ports/1/gids/? >$share/gids
";
/// Frames of the hosts' own (neighbours, routers) that say nothing of the programs.
const STRAY: u64 = 20;

/// The surroundings of all cases. Dropping it stops the guest and removes the namespace.
pub(crate) struct World {
    guest: Guest,
    /// The GIDs of rxe0, by index.
    gids: Vec<String>,
    pub net: Net,
    /// `dist/lib`, absolute.
    lib: PathBuf,
    pub scratch: PathBuf,
    /// tests/interop/peer.c, built.
    pub peer: String,
    port: u16,
    outputs: u32,
}

impl World {
    /// Makes the network, builds peer.c and boots the guest.
    pub(crate) fn new(kernel: &Kernel, dist: &Path, cache: &Path) -> Result<World, String> {
        let lib = dist
            .join("lib")
            .canonicalize()
            .map_err(|e| format!("{}: {e} (`make build` first)", dist.display()))?;
        let scratch = cache.join(format!("run-{}", std::process::id()));
        std::fs::create_dir_all(&scratch).map_err(|e| format!("{}: {e}", scratch.display()))?;
        let peer = scratch.join("peer");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("peer.c");
        output(
            Command::new("cc")
                .args(["-Wall", "-Wextra", "-O1", "-o"])
                .arg(&peer)
                .arg(source)
                .arg("-libverbs"),
        )?;
        let net = Net::new("interop", TAP_MTU, 1)?;
        /* plain emulation, whatever this host has: figures of loss are compared with those of other hosts */
        let emulation = "-accel tcg,thread=multi -cpu max".split(' ').map(str::to_owned);
        let machine = Machine {
            kernel,
            qemu: &["qemu-system-x86_64".to_owned()],
            devices: emulation.collect(),
            memory: 2048,
            line: "",
            setup: SETUP,
            mtu: GUEST_MTU,
            reboots: false,
            number: 0,
        };
        let guest = Guest::boot(&machine, &net, &scratch)?;
        let gids = read_gids(&guest.shared("gids"))?;
        let peer = peer.to_string_lossy().into_owned();
        Ok(World { guest, gids, net, lib, scratch, peer, port: 20000, outputs: 0 })
    }

    /// Waits until `program` ends, `deadline` comes or nothing more comes and goes between the two hosts.
    pub(crate) fn await_end(&self, program: &mut Program, deadline: Instant) -> Option<bool> {
        let (mut frames, mut since) = (self.guest.frames(), Instant::now());
        loop {
            let ended = program.wait_until(deadline.min(Instant::now() + Duration::from_secs(1)));
            if ended.is_some() || Instant::now() >= deadline || since.elapsed() > QUIET {
                return ended;
            }
            let now = self.guest.frames();
            if now > frames + STRAY {
                (frames, since) = (now, Instant::now());
            }
        }
    }

    /// A port, of TCP or the connection manager, that no case used before.
    pub(crate) fn next_port(&mut self) -> u16 {
        self.port += 1;
        self.port
    }

    /// `dist/lib`, absolute.
    pub(crate) fn lib(&self) -> &Path {
        &self.lib
    }

    /// Starts `words` in the guest.
    pub(crate) fn job(&mut self, words: &[&str]) -> Result<Job, String> {
        let port = self.next_port();
        self.guest.start(words, Found::Tcp(port))
    }

    /// The address of `provider`.
    pub(crate) fn address(provider: Provider, ip: Ip) -> &'static str {
        let addresses = if ip == Ip::V4 { ADDRESSES } else { ADDRESSES_V6 };
        addresses[provider.index()]
    }

    /// The index of `provider`'s GID for the address that carries the frames.
    pub(crate) fn gid(&self, provider: Provider, ip: Ip) -> usize {
        match (provider, ip) {
            (Provider::Star, Ip::V4) => 0,
            (Provider::Star, Ip::V6) => 1,
            (Provider::Rxe, ip) => {
                let wanted = if ip == Ip::V4 { "0000:0000:0000:0000:0000:ffff:" } else { "fd78:" };
                self.gids.iter().position(|gid| gid.starts_with(wanted)).unwrap_or(usize::MAX)
            }
        }
    }

    /// Starts a program on `provider`, with more variables for it where it is ours.
    pub(crate) fn start(
        &mut self,
        provider: Provider,
        env: &[(&str, &str)],
        words: &[&str],
        found: Found,
    ) -> Result<Program, String> {
        if provider == Provider::Rxe {
            return Ok(Program::There(self.guest.start(words, found)?));
        }
        let mut command = self.net.command(words[0]);
        command.args(&words[1..]).current_dir(&self.scratch);
        forget_settings(&mut command);
        command.env("LD_LIBRARY_PATH", &self.lib);
        command.env("STARVERBS_ADDRS", format!("{},{}", ADDRESSES[0], ADDRESSES_V6[0]));
        command.envs(env.iter().copied());
        self.outputs += 1;
        let file = self.scratch.join(format!("output-{}", self.outputs));
        Ok(Program::Here(Process::start(command, file)?, found))
    }
}

/// The GIDs of lines `FILE:GID`.
fn read_gids(file: &Path) -> Result<Vec<String>, String> {
    let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    Ok(text.lines().filter_map(|line| Some(line.split_once(':')?.1.to_owned())).collect())
}

impl Drop for World {
    fn drop(&mut self) {
        self.guest.stop();
        let _ = std::fs::remove_dir_all(&self.scratch);
    }
}
