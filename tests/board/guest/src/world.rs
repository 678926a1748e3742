//! Where cases run: in a guest whose PCI devices are functions of an emulated board, and on the host, on the
//! card in software. Both are in a network namespace of their own.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use starverbs_conformance::command::{forget_settings, output};
use starverbs_conformance::process::{Process, tail};
use starverbs_guest::guest::{Found, Guest, Machine};
use starverbs_guest::kernel::Kernel;
use starverbs_guest::net::{ADDRESSES, Net};
use starverbs_guest::program::Program;
use starverbs_guest::{qemu, root};

use crate::liar;

/// Functions of the board, each a device of the guest.
pub(crate) const FUNCTIONS: usize = 2;
/// Memory of a guest, in MiB.
const MEMORY: u32 = 1024;
const MTU: u32 = 1500;
/// How long the board may take to begin.
const BEGIN: Duration = Duration::from_secs(20);
/// A guest that has died is noticed so soon.
const LOOK: Duration = Duration::from_secs(1);
const SETUP: &str = include_str!("../setup.sh");
/// Where the card in software and the board have their frames.
const WIRE: &str = "127.0.0.1";
/// Packages of a root folder that is made.
const NEWEST: &str = "qemu-system-x86,linux-image-amd64,linux-headers-amd64,make,sparse";

/// What guests are made from.
pub(crate) struct Parts {
    pub kernel: Kernel,
    pub qemu: Vec<String>,
    pub module: PathBuf,
    /// The folder made by `make build`, absolute.
    pub dist: PathBuf,
    pub cache: PathBuf,
}

impl Parts {
    /// Gets all that is needed, as far as it is not there: `cache` takes it. QEMU is that of the folder
    /// `root`, if it is named. The kernel is Debian 12's, or, if `is_newest`, that of the folder.
    pub(crate) fn prepare(
        cache: &Path,
        dist: &Path,
        root: Option<&Path>,
        is_newest: bool,
    ) -> Result<Parts, String> {
        std::fs::create_dir_all(cache).map_err(|e| format!("{}: {e}", cache.display()))?;
        let absolute = |path: &Path| path.canonicalize().map_err(|e| format!("{}: {e}", path.display()));
        let (cache, dist) = (absolute(cache)?, absolute(dist)?);
        let made = cache.join("root");
        let root = match (root, is_newest) {
            (Some(root), _) if root.exists() => Some(absolute(root)?),
            (None, false) => None,
            (named, _) => {
                let root = named.unwrap_or(&made);
                root::make(root, NEWEST)?;
                Some(absolute(root)?)
            }
        };
        let qemu = qemu::with_vfio_user(&cache, root.as_deref())?;
        let newest = root.filter(|_| is_newest);
        let kernel = match &newest {
            Some(root) => Kernel::of_root(root, &cache, &[])?,
            None => Kernel::prepare(&cache, &[])?,
        };
        let folder = cache.join(if is_newest { "module-newest" } else { "module" });
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("module.sh");
        output(Command::new(script).arg(kernel.release()).arg(&folder).args(newest))?;
        Ok(Parts { kernel, qemu, module: folder.join("starverbs.ko"), dist, cache })
    }
}

/// Where a program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the guest, on a function of the board.
    Board(usize),
    /// On the host, on the card in software.
    Host,
}

/// How guests are booted.
pub(crate) struct Boot {
    /// How many: one has all functions of the board, or each one of them
    pub guests: usize,
    /// Further words for the kernel
    pub line: &'static str,
    /// Further words for QEMU
    pub devices: &'static [&'static str],
    /// A guest may reboot
    pub reboots: bool,
    /// The board can lie: [`World::lies`]
    pub may_lie: bool,
    /// The board's STARVERBS_QPC_CACHE
    pub qpc_cache: &'static str,
}

impl Default for Boot {
    fn default() -> Boot {
        Boot { guests: 1, line: "", devices: &[], reboots: false, may_lie: false, qpc_cache: "off" }
    }
}

/// The surroundings of all cases. Dropping it stops the guests and the board, and removes the namespace.
pub(crate) struct World {
    pub guests: Vec<Guest>,
    pub board: Process,
    /// While it is set a board that can lies to its guests
    pub lies: Arc<AtomicBool>,
    /// The module's file
    pub module: PathBuf,
    /// Where the libraries are
    pub lib: PathBuf,
    net: Net,
    scratch: PathBuf,
    port: u16,
    outputs: u32,
}

impl World {
    /// Starts the board and boots the guests.
    pub(crate) fn new(parts: &Parts, boot: &Boot) -> Result<World, String> {
        let scratch = parts.cache.join(format!("run-{}", std::process::id()));
        let net = Net::new("board", MTU, boot.guests)?;
        let socket = scratch.join("board");
        std::fs::create_dir_all(&scratch).map_err(|e| format!("{}: {e}", scratch.display()))?;
        let board = start_board(&net, parts, &socket, boot.qpc_cache)?;
        let lib = parts.dist.join("lib");
        let (module, guests, lies) = (parts.module.clone(), Vec::new(), Arc::default());
        let mut world = World { guests, board, lies, module, net, lib, scratch, port: 20000, outputs: 0 };
        for number in 0..boot.guests {
            let sockets = (0..FUNCTIONS).filter(|function| function % boot.guests == number);
            let mut sockets: Vec<_> = sockets.map(|function| socket_of(&socket, function)).collect();
            if boot.may_lie {
                for (seed, socket) in (0..).zip(&mut sockets) {
                    let board = std::mem::replace(socket, socket.with_extension(format!("lies{seed}")));
                    liar::start(socket, &board, Arc::clone(&world.lies), seed)
                        .map_err(|e| format!("{}: {e}", socket.display()))?;
                }
            }
            let guest = world.boot(parts, boot, number, &sockets)?;
            world.guests.push(guest);
        }
        Ok(world)
    }

    fn boot(&self, parts: &Parts, boot: &Boot, number: usize, sockets: &[PathBuf]) -> Result<Guest, String> {
        let folder = self.scratch.join(format!("guest-{number}"));
        std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        let mut words = qemu::accelerator();
        words.extend(boot.devices.iter().map(|&word| word.to_owned()));
        words.extend(qemu::vfio_user_devices(MEMORY, sockets));
        let (module, functions) = (parts.module.display(), sockets.len());
        let machine = Machine {
            kernel: &parts.kernel,
            qemu: &parts.qemu,
            devices: words,
            memory: MEMORY,
            line: boot.line,
            setup: &format!("MODULE='{module}' FUNCTIONS={functions}\n{SETUP}"),
            mtu: MTU,
            reboots: boot.reboots,
            number,
        };
        Guest::boot(&machine, &self.net, &folder)
    }

    /// Has the first guest reboot, at once, and waits until it is up again.
    pub(crate) fn reboot(&mut self) -> Result<(), String> {
        let guest = &mut self.guests[0];
        let ready = guest.shared("ready");
        std::fs::remove_file(&ready).map_err(|e| format!("{}: {e}", ready.display()))?;
        let job = guest.script("busybox reboot -f\n")?;
        let up = guest.await_ready();
        /* it ended with the guest */
        std::mem::forget(job);
        up
    }

    /// The guest that has a function, and the function's number there.
    fn guest_of(&self, function: usize) -> (usize, usize) {
        let guests = self.guests.len();
        (function % guests, function / guests)
    }

    /// A TCP port that no case used before.
    pub(crate) fn next_port(&mut self) -> u16 {
        self.port += 1;
        self.port
    }

    /// Where `client` finds programs of `server`.
    pub(crate) fn address(&self, server: Place, client: Place) -> &'static str {
        let host = |place| match place {
            Place::Board(function) => self.guest_of(function).0 + 1,
            Place::Host => 0,
        };
        if host(server) == host(client) { "127.0.0.1" } else { ADDRESSES[host(server)] }
    }

    /// What a program in a guest is started with, to be on a function of the board.
    pub(crate) fn on_board(&self, function: usize) -> [String; 4] {
        let number = self.guest_of(function).1;
        let lib = self.lib.display();
        [
            "env".to_owned(),
            format!("LD_PRELOAD={lib}/libstarverbs.so"),
            format!("LD_LIBRARY_PATH={lib}/preload"),
            format!("STARVERBS_DEVICE=board:/dev/star{number}"),
        ]
    }

    /// Starts a program, whose clients find it at TCP port `port`.
    pub(crate) fn start(&mut self, place: Place, words: &[&str], port: u16) -> Result<Program, String> {
        if let Place::Board(number) = place {
            let on = self.on_board(number);
            let words: Vec<&str> = on.iter().map(String::as_str).chain(words.iter().copied()).collect();
            let guest = self.guest_of(number).0;
            return Ok(Program::There(self.guests[guest].start(&words, Found::Tcp(port))?));
        }
        let mut command = self.net.command(words[0]);
        command.args(&words[1..]).current_dir(&self.scratch);
        forget_settings(&mut command);
        command.env("LD_LIBRARY_PATH", &self.lib).env("STARVERBS_ADDRS", WIRE);
        self.outputs += 1;
        let file = self.scratch.join(format!("output-{}", self.outputs));
        Ok(Program::Here(Process::start(command, file)?, Found::Tcp(port)))
    }

    /// Runs a script in the first guest to its end, and gives what it wrote. An error: it failed, or did not
    /// end in time.
    pub(crate) fn run(&mut self, script: &str, limit: Duration) -> Result<String, String> {
        let guest = &mut self.guests[0];
        let mut job = Program::There(guest.script(script)?);
        let deadline = Instant::now() + limit;
        while job.wait_until(deadline.min(Instant::now() + LOOK)).is_none() {
            if guest.qemu().ended().is_some() {
                let (said, console) = (guest.qemu().output(), tail(&guest.console()));
                let (last, said) = (said.lines().last().unwrap_or_default(), tail(&said));
                return Err(format!("the guest has ended, and QEMU says: {last}\n{said}\n{console}"));
            }
            if Instant::now() > deadline {
                return Err(format!("does not end in {} s\n{}", limit.as_secs(), tail(&job.output())));
            }
        }
        if job.ended() == Some(true) { Ok(job.output()) } else { Err(job.output()) }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.guests.iter_mut().for_each(Guest::stop);
        self.board.kill();
        let _ = std::fs::remove_dir_all(&self.scratch);
    }
}

fn socket_of(first: &Path, number: usize) -> PathBuf {
    if number == 0 { first.to_owned() } else { PathBuf::from(format!("{}.{number}", first.display())) }
}

/// Starts a board and waits until all of its functions are there.
fn start_board(net: &Net, parts: &Parts, socket: &Path, qpc_cache: &str) -> Result<Process, String> {
    let program = parts.dist.join("bin/starverbs");
    let mut command = net.command(&program.display().to_string());
    forget_settings(&mut command);
    command
        .env("STARVERBS_ADDRS", WIRE)
        .env("STARVERBS_QPC_CACHE", qpc_cache)
        .arg("board")
        .arg("--socket")
        .arg(socket);
    command.args(["--sockets", &FUNCTIONS.to_string()]);
    let mut board = Process::start(command, socket.with_extension("output"))?;
    let deadline = Instant::now() + BEGIN;
    while board.output().lines().count() < FUNCTIONS {
        if board.ended().is_some() || Instant::now() > deadline {
            return Err(format!("no board: {}", tail(&board.output())));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(board)
}
