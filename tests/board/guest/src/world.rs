//! Where cases run: in a guest whose PCI devices are functions of an emulated board, and on the host, on the
//! card in software. Both are in a network namespace of their own.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use starverbs_conformance::command::{forget_settings, output};
use starverbs_conformance::process::{Process, tail};
use starverbs_guest::guest::{Found, Guest, Machine};
use starverbs_guest::kernel::Kernel;
use starverbs_guest::net::{ADDRESSES, Net};
use starverbs_guest::program::Program;
use starverbs_guest::qemu;

/// Functions of the board, each a device of the guest.
pub(crate) const FUNCTIONS: usize = 2;
/// Memory of a guest, in MiB.
const MEMORY: u32 = 1024;
const MTU: u32 = 1500;
/// How long the board may take to begin.
const BEGIN: Duration = Duration::from_secs(20);
const SETUP: &str = include_str!("../setup.sh");
/// Where the card in software and the board have their frames.
const WIRE: &str = "127.0.0.1";

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
    /// Gets all that is needed, as far as it is not there. `cache` takes it.
    pub(crate) fn prepare(cache: &Path, dist: &Path) -> Result<Parts, String> {
        std::fs::create_dir_all(cache).map_err(|e| format!("{}: {e}", cache.display()))?;
        let absolute = |path: &Path| path.canonicalize().map_err(|e| format!("{}: {e}", path.display()));
        let (cache, dist) = (absolute(cache)?, absolute(dist)?);
        let kernel = Kernel::prepare(&cache, &[])?;
        let qemu = qemu::with_vfio_user(&cache)?;
        let folder = cache.join("module");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("module.sh");
        output(Command::new(script).arg(kernel.release()).arg(&folder))?;
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

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Board(number) => write!(f, "star{number}"),
            Place::Host => f.write_str("software"),
        }
    }
}

/// The surroundings of all cases. Dropping it stops the guest and the board, and removes the namespace.
pub(crate) struct World {
    pub guest: Guest,
    pub board: Process,
    net: Net,
    lib: PathBuf,
    scratch: PathBuf,
    port: u16,
    outputs: u32,
}

impl World {
    /// Starts the board and boots the guest. `line` has further words for its kernel, `devices` for QEMU.
    pub(crate) fn new(parts: &Parts, line: &str, devices: &[&str], reboots: bool) -> Result<World, String> {
        let scratch = parts.cache.join(format!("run-{}", std::process::id()));
        std::fs::create_dir_all(&scratch).map_err(|e| format!("{}: {e}", scratch.display()))?;
        let net = Net::new("board", MTU, 1)?;
        let socket = scratch.join("board");
        let board = start_board(&net, parts, &socket)?;
        let sockets: Vec<PathBuf> = (0..FUNCTIONS).map(|number| socket_of(&socket, number)).collect();
        let mut words = qemu::accelerator();
        words.extend(devices.iter().map(|&word| word.to_owned()));
        words.extend(qemu::vfio_user_devices(MEMORY, &sockets));
        let module = parts.module.display();
        let machine = Machine {
            kernel: &parts.kernel,
            qemu: &parts.qemu,
            devices: words,
            memory: MEMORY,
            line,
            setup: &format!("MODULE='{module}' FUNCTIONS={FUNCTIONS}\n{SETUP}"),
            mtu: MTU,
            reboots,
            number: 0,
        };
        let guest = Guest::boot(&machine, &net, &scratch)?;
        Ok(World { guest, board, net, lib: parts.dist.join("lib"), scratch, port: 20000, outputs: 0 })
    }

    /// A TCP port that no case used before.
    pub(crate) fn next_port(&mut self) -> u16 {
        self.port += 1;
        self.port
    }

    /// Where `client` finds programs of `server`.
    pub(crate) fn address(server: Place, client: Place) -> &'static str {
        match (server, client) {
            (Place::Board(_), Place::Board(_)) | (Place::Host, Place::Host) => "127.0.0.1",
            (Place::Board(_), Place::Host) => ADDRESSES[1],
            (Place::Host, Place::Board(_)) => ADDRESSES[0],
        }
    }

    /// What a program in the guest is started with, to be on a function of the board.
    pub(crate) fn on_board(&self, number: usize) -> [String; 4] {
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
            return Ok(Program::There(self.guest.start(&words, Found::Tcp(port))?));
        }
        let mut command = self.net.command(words[0]);
        command.args(&words[1..]).current_dir(&self.scratch);
        forget_settings(&mut command);
        command.env("LD_LIBRARY_PATH", &self.lib).env("STARVERBS_ADDRS", WIRE);
        self.outputs += 1;
        let file = self.scratch.join(format!("output-{}", self.outputs));
        Ok(Program::Here(Process::start(command, file)?, Found::Tcp(port)))
    }

    /// Runs a script in the guest to its end, and gives what it wrote. An error: it failed, or did not end in
    /// time.
    pub(crate) fn run(&mut self, script: &str, limit: Duration) -> Result<String, String> {
        let mut job = Program::There(self.guest.script(script)?);
        match job.wait_until(Instant::now() + limit) {
            Some(true) => Ok(job.output()),
            Some(false) => Err(job.output()),
            None => Err(format!("does not end in {} s\n{}", limit.as_secs(), tail(&job.output()))),
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.guest.stop();
        self.board.kill();
        let _ = std::fs::remove_dir_all(&self.scratch);
    }
}

fn socket_of(first: &Path, number: usize) -> PathBuf {
    if number == 0 { first.to_owned() } else { PathBuf::from(format!("{}.{number}", first.display())) }
}

/// Starts a board and waits until all of its functions are there.
fn start_board(net: &Net, parts: &Parts, socket: &Path) -> Result<Process, String> {
    let program = parts.dist.join("bin/starverbs");
    let mut command = net.command(&program.display().to_string());
    forget_settings(&mut command);
    command.env("STARVERBS_ADDRS", WIRE).arg("board").arg("--socket").arg(socket);
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
