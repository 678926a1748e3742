//! A child process in a group of its own, its outputs in files, its life bounded.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// A started program. Dropping it kills its group.
pub struct Process {
    child: Child,
    output: PathBuf,
    status: Option<ExitStatus>,
}

impl Process {
    /// Starts `command` with its output in the file `output` and its errors in another beside it.
    pub fn start(mut command: Command, output: PathBuf) -> Result<Process, String> {
        let program = command_line(&command);
        let create = |path: &Path| File::create(path).map_err(|e| format!("{}: {e}", path.display()));
        let (stdout, stderr) = (create(&output)?, create(&errors(&output))?);
        command.stdin(Stdio::null()).stdout(stdout).stderr(stderr).process_group(0);
        // SAFETY: prctl is async-signal-safe and touches no memory of the parent.
        unsafe { command.pre_exec(|| Ok(nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?)) };
        let child = command.spawn().map_err(|error| format!("{program}: {error}"))?;
        Ok(Process { child, output, status: None })
    }

    /// Its number, also after its end.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The exit status, if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        if self.status.is_none() {
            self.status = self.child.try_wait().ok().flatten();
        }
        self.status
    }

    /// Waits until it ends or `deadline` comes.
    pub fn wait_until(&mut self, deadline: Instant) -> Option<ExitStatus> {
        loop {
            if let Some(status) = self.ended() {
                return Some(status);
            }
            if Instant::now() >= deadline {
                return None;
            }
            std::thread::sleep(Duration::from_millis(4));
        }
    }

    /// Kills the group at once, as `kill -9` does, and reaps the child.
    pub fn kill(&mut self) {
        if self.ended().is_none() {
            let _ = killpg(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGKILL);
            self.status = self.child.wait().ok();
        }
    }

    /// Asks the group to end, as `kill` does.
    pub fn terminate(&self) {
        self.signal(Signal::SIGTERM);
    }

    /// Sends its group a signal.
    pub fn signal(&self, signal: Signal) {
        let _ = killpg(Pid::from_raw(self.child.id().cast_signed()), signal);
    }

    /// All it wrote so far, errors last: programs keep the rest of their output back until they end, and what
    /// went wrong would be before it.
    pub fn output(&self) -> String {
        let mut bytes = std::fs::read(&self.output).unwrap_or_default();
        bytes.extend(std::fs::read(errors(&self.output)).unwrap_or_default());
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Whether it listens on TCP port `port`, in whatever network namespace it lives.
    pub fn listens(&self, port: u16) -> bool {
        let wanted = format!(":{port:04X}");
        ["tcp", "tcp6"].iter().any(|table| {
            let text =
                std::fs::read_to_string(format!("/proc/{}/net/{table}", self.pid())).unwrap_or_default();
            text.lines().any(|line| {
                let mut fields = line.split_ascii_whitespace().skip(1);
                let local = fields.next().unwrap_or_default();
                let state = fields.nth(1).unwrap_or_default();
                local.ends_with(&wanted) && state == "0A"
            })
        })
    }

    /// Whether somebody in its network namespace serves port `port` at the connection manager: a unix socket
    /// bears the name of the service.
    pub fn serves(&self, port: u16) -> bool {
        let text = std::fs::read_to_string(format!("/proc/{}/net/unix", self.pid())).unwrap_or_default();
        text.lines().any(|line| {
            let mut parts = line.split("@starverbs/").nth(1).unwrap_or_default().split('/').skip(1);
            let service = (parts.next() == Some("cm")).then(|| parts.next()).flatten();
            let service = service.and_then(|hex| u64::from_str_radix(hex, 16).ok());
            service.is_some_and(|id| id & 0xffff == u64::from(port))
        })
    }

    /// What its threads do: name, state, where in the kernel, CPU time used in ticks. For the report on one
    /// that does not end.
    pub fn threads(&self) -> String {
        let folder = format!("/proc/{}/task", self.pid());
        let threads = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|task| {
            let read = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
            let stat = read("stat");
            // Behind the name, which may hold anything, the state is the first field, both CPU times the 12th
            // and 13th.
            let fields: Vec<&str> =
                stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_ascii_whitespace().collect();
            let field = |at: usize| fields.get(at).copied().unwrap_or("?");
            let (name, place) = (read("comm"), read("wchan"));
            format!("{} {} {} {}+{}", name.trim(), field(0), place.trim(), field(11), field(12))
        });
        threads.collect::<Vec<_>>().join("; ")
    }

    /// Whether somebody in its network namespace is in an IPv4 multicast group.
    pub fn is_in_group(&self, group: [u8; 4]) -> bool {
        let wanted = format!("{:08X}", u32::from_ne_bytes(group));
        let text = std::fs::read_to_string(format!("/proc/{}/net/igmp", self.pid())).unwrap_or_default();
        text.lines().any(|line| line.trim_start().starts_with(&wanted))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Where the errors of a process with this output go.
fn errors(output: &Path) -> PathBuf {
    output.with_extension("errors")
}

/// The command as one would type it.
fn command_line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// The last lines of an output, for a report.
pub fn tail(output: &str) -> String {
    let lines: Vec<&str> = output.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(6)..].join("\n")
}
