//! What a case is run with: the build under test, scratch space, ports, and the two ends of the net.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::board::{Board, BoardKind, Device, FUNCTIONS};
use crate::case::Net;
use crate::container::Container;
use crate::net::{ADDRESSES, Namespaces};
use crate::process::{Process, tail};
use starverbs_conformance::command::forget_settings;

/// Boards of several settings that run at a time, at most: the next case has others.
const MOST_BOARDS: usize = 2;

/// The surroundings of all cases. Dropping it removes them.
pub(crate) struct World {
    /// The folder made by `make build`, absolute.
    dist: PathBuf,
    /// `dist/bin/starverbs`, absolute.
    pub starverbs: PathBuf,
    /// `dist/lib`, absolute.
    pub lib: PathBuf,
    scratch: PathBuf,
    namespaces: Result<Namespaces, String>,
    port: u16,
    outputs: u32,
    /// How queue pairs of one host talk (STARVERBS_LINK).
    link: Option<String>,
    /// What the programs of each end have as their card.
    devices: [Device; 2],
    /// Where the boards are; another net has others.
    net: Net,
    boards: Vec<Board>,
}

/// How a program is started, beside its arguments.
#[derive(Debug, Clone, Default)]
pub(crate) struct Setting {
    /// Variables to set.
    pub env: Vec<(&'static str, String)>,
    /// `starverbs run --preload` instead of the search path.
    pub preload: bool,
    /// Another user to run as; needs root.
    pub user: Option<&'static str>,
    /// A container of its own to run in.
    pub container: Option<Container>,
}

impl World {
    pub(crate) fn new(
        dist: &Path,
        needs_namespaces: bool,
        link: Option<&str>,
        devices: [Device; 2],
    ) -> Result<World, String> {
        let absolute = |part: &str| {
            let path = dist.join(part);
            path.canonicalize().map_err(|e| format!("{}: {e} (`make build` first)", path.display()))
        };
        let (starverbs, lib) = (absolute("bin/starverbs")?, absolute("lib")?);
        let dist = absolute("")?;
        let scratch = std::env::temp_dir().join(format!("starverbs-conformance-{}", std::process::id()));
        std::fs::create_dir_all(&scratch).map_err(|e| format!("{}: {e}", scratch.display()))?;
        let namespaces = if needs_namespaces {
            Namespaces::new()
        } else {
            Err("no case of this run needs namespaces".to_owned())
        };
        let link = link.map(str::to_owned);
        let (net, boards) = (Net::Lo, Vec::new());
        /* another one's run beside this is to try others first */
        let (port, outputs) = (18600 + (std::process::id() * 31 % 13000) as u16, 0);
        Ok(World { dist, starverbs, lib, scratch, namespaces, port, outputs, link, devices, net, boards })
    }

    /// Makes the net ready; an error is the reason why cases there must be skipped.
    pub(crate) fn enter(&mut self, net: Net) -> Result<(), String> {
        let mtu = match net {
            Net::Lo => return Ok(()),
            Net::Veth => 1500,
            Net::Jumbo => 9000,
        };
        self.namespaces.as_mut().map_err(|reason| reason.clone())?.set_mtu(mtu)
    }

    /// Whether programs have boards.
    pub(crate) fn has_boards(&self) -> bool {
        self.devices.contains(&Device::Board)
    }

    /// The process of the board that has this setting, if there is one.
    pub(crate) fn board_of(&self, setting: (&str, &str)) -> Option<u32> {
        let has =
            |board: &&Board| board.kind.env.iter().any(|(name, value)| (*name, value.as_str()) == setting);
        self.boards.iter().find(has).map(Board::pid)
    }

    /// Kills all boards at once, as `kill -9` does; others are started when they are needed.
    pub(crate) fn kill_boards(&mut self) {
        self.boards.drain(..).for_each(Board::kill);
    }

    /// Whether all boards still run.
    pub(crate) fn check_boards(&mut self) -> Result<(), String> {
        self.boards.iter_mut().try_for_each(Board::check)
    }

    /// Ends boards that are of no use any more, before something is run in `net`.
    pub(crate) fn retire_boards(&mut self, net: Net) -> Result<(), String> {
        if net != self.net || self.boards.len() > MOST_BOARDS {
            self.end_boards()?;
        }
        self.net = net;
        Ok(())
    }

    /// Ends all boards.
    pub(crate) fn end_boards(&mut self) -> Result<(), String> {
        self.boards.drain(..).try_for_each(Board::end)
    }

    /// The board for a program, as STARVERBS_DEVICE names it.
    pub(crate) fn board(&mut self, net: Net, end: usize, setting: &Setting) -> Result<String, String> {
        let host = if net == Net::Lo { 0 } else { end };
        let kind = BoardKind { host, user: setting.user, env: setting.env.clone() };
        let found = self.boards.iter().position(|board| board.kind == kind);
        let at = match found {
            Some(at) => at,
            None => {
                let board = self.start_board(net, kind)?;
                self.boards.push(board);
                self.boards.len() - 1
            }
        };
        Ok(self.boards[at].name())
    }

    fn start_board(&mut self, net: Net, kind: BoardKind) -> Result<Board, String> {
        // A folder of its own, which the board's user may write to.
        let folder = self.scratch(&format!("board-{}", self.outputs));
        let open = std::fs::Permissions::from_mode(0o777);
        std::fs::create_dir(&folder)
            .and_then(|()| std::fs::set_permissions(&folder, open))
            .map_err(|e| format!("{}: {e}", folder.display()))?;
        let socket = folder.join("socket");
        let (starverbs, sockets) = (self.starverbs.to_string_lossy().into_owned(), FUNCTIONS.to_string());
        let path = socket.to_string_lossy().into_owned();
        let mut all: Vec<&str> = Vec::new();
        // Not runuser, which ends by itself what it is asked to end.
        if let Some(user) = kind.user {
            all.extend(["setpriv", "--reuid", user, "--clear-groups", "--"]);
        }
        all.extend([starverbs.as_str(), "board", "--socket", &path, "--sockets", &sockets]);
        let mut command = self.command(net, kind.host, &all);
        command.envs(kind.env.iter().map(|(name, value)| (*name, value.as_str())));
        Board::new(kind, self.launch(command)?, socket)
    }

    /// The address at which end 1 finds end 0.
    pub(crate) fn server_address(net: Net) -> &'static str {
        if net == Net::Lo { "127.0.0.1" } else { ADDRESSES[0] }
    }

    /// A TCP port on which nobody listens now.
    pub(crate) fn free_port(&mut self) -> u16 {
        loop {
            self.port = if self.port >= 32000 { 18600 } else { self.port + 1 };
            if TcpListener::bind(("0.0.0.0", self.port)).is_ok() {
                return self.port;
            }
        }
    }

    /// A file name in the scratch folder.
    pub(crate) fn scratch(&self, name: &str) -> PathBuf {
        self.scratch.join(name)
    }

    /// A command that runs at one end of the net, not on the card.
    pub(crate) fn command(&self, net: Net, end: usize, words: &[&str]) -> Command {
        let mut all = Vec::new();
        if let (true, Ok(namespaces)) = (net != Net::Lo, &self.namespaces) {
            all.extend(["ip", "netns", "exec", namespaces.name(end)]);
        }
        all.extend(words);
        let mut command = Command::new(all[0]);
        command.args(&all[1..]);
        forget_settings(&mut command);
        command
    }

    /// Starts a program on the card at one end of the net.
    pub(crate) fn start(
        &mut self,
        net: Net,
        end: usize,
        setting: &Setting,
        words: &[&str],
    ) -> Result<Process, String> {
        let on_board = self.devices[end] == Device::Board;
        let board = if on_board { Some(self.board(net, end, setting)?) } else { None };
        let starverbs = self.starverbs.to_string_lossy().into_owned();
        let dist = self.dist.to_string_lossy().into_owned();
        let mut all: Vec<&str> = Vec::new();
        if let Some(user) = setting.user {
            all.extend(["runuser", "-u", user, "--"]);
        }
        match setting.container {
            Some(container) => all.extend(container.words(&dist)),
            None => all.extend([starverbs.as_str(), "run"]),
        }
        if setting.preload {
            all.push("--preload");
        }
        all.push("--");
        all.extend(words);
        let mut command = self.command(net, end, &all);
        command.envs(self.link.iter().map(|link| ("STARVERBS_LINK", link)));
        command.envs(setting.env.iter().map(|(name, value)| (*name, value.as_str())));
        command.envs(board.map(|board| ("STARVERBS_DEVICE", board)));
        self.launch(command)
    }

    /// Runs one program on the card at one end and returns its output if it ends well.
    pub(crate) fn single(&mut self, net: Net, end: usize, words: &[&str]) -> Result<String, String> {
        let mut process = self.start(net, end, &Setting::default(), words)?;
        let status = process.wait_until(Instant::now() + Duration::from_secs(60));
        let output = process.output();
        match status {
            Some(status) if status.success() => Ok(output),
            Some(status) => Err(format!("{status}:\n{}", tail(&output))),
            None => Err(format!("does not end:\n{}", tail(&output))),
        }
    }

    /// Starts any command with its output in a new scratch file.
    pub(crate) fn launch(&mut self, mut command: Command) -> Result<Process, String> {
        self.outputs += 1;
        command.current_dir(&self.scratch);
        Process::start(command, self.scratch(&format!("output-{}", self.outputs)))
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.scratch);
    }
}
