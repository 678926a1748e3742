//! Children: started, bounded in time, killed by their own process id.
//!
//! Owns everything about processes: where a program lies, pinning, readiness of a server, output, time
//! limits. It must not know what the programs measure.

use std::fs;
use std::io::Read;
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::error::{BenchError, Result};

/// How long a server may take until it listens.
const READY_LIMIT: Duration = Duration::from_secs(5);
/// How long a server may take to end once its client has ended.
const LINGER_LIMIT: Duration = Duration::from_secs(5);

/// How long a program may take to compile.
const COMPILE_LIMIT: Duration = Duration::from_secs(60);

/// What tells that a server can be talked to.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Ready {
    /// It listens on this TCP port.
    Tcp(u16),
    /// It has bound this UDP port.
    Udp(u16),
    /// It listens on the unix socket with this number in its name.
    Unix(u16),
}

/// Which processor a child is held to, if any.
pub(crate) type Cpu = Option<usize>;

/// What a child wrote and how it ended.
#[derive(Debug)]
pub(crate) struct Output {
    /// Its standard output.
    pub(crate) stdout: String,
    /// Its standard error.
    pub(crate) stderr: String,
}

/// Whether `tool` lies on PATH; an error names the package that has it.
pub(crate) fn require(tool: &str, package: &'static str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|dir| dir.join(tool))
        .find(|file| file.is_file())
        .ok_or_else(|| BenchError::Missing { tool: tool.to_owned(), package })
}

/// Compiles programs/`name`.c as any other program that uses verbs; gives the file, which the caller removes.
///
/// # Errors
/// No compiler, or one that fails.
pub(crate) fn compiled(name: &str, lib: &Path) -> Result<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("programs/{name}.c"));
    let program = std::env::temp_dir().join(format!("starverbs-{name}-{}", std::process::id()));
    let mut cc = Command::new(require("cc", "gcc")?);
    cc.args(["-O2", "-o"]).arg(&program).arg(source).arg("-L").arg(lib).args(["-lrdmacm", "-libverbs"]);
    run_one(cc, COMPILE_LIMIT)?;
    Ok(program)
}

/// A TCP port of the loopback address that was free a moment ago.
pub(crate) fn free_tcp_port() -> Result<u16> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .and_then(|socket| socket.local_addr())
        .map(|addr| addr.port())
        .map_err(|e| BenchError::from_io("bind", &e))
}

/// A UDP port of the loopback address that was free a moment ago.
pub(crate) fn free_udp_port() -> Result<u16> {
    UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))
        .and_then(|socket| socket.local_addr())
        .map(|addr| addr.port())
        .map_err(|e| BenchError::from_io("bind", &e))
}

/// Runs a server and its client to their ends; gives the client's output.
///
/// # Errors
/// A child that cannot be started, fails, or outlives `limit` (it is then killed).
pub(crate) fn run_pair(
    server: Command,
    client: Command,
    ready: Ready,
    cpus: (Cpu, Cpu),
    limit: Duration,
) -> Result<Output> {
    let mut server = Bounded::start(server, cpus.0)?;
    server.wait_ready(ready)?;
    let client = Bounded::start(client, cpus.1)?.finish(limit);
    match client {
        Ok(output) => {
            server.finish(LINGER_LIMIT)?;
            Ok(output)
        }
        // The server often knows better why the client failed.
        Err(BenchError::Failed { what, status, tail }) => {
            let said = server.finish(Duration::from_millis(500)).map_or_else(|e| e.to_string(), |o| o.stderr);
            Err(BenchError::Failed { what, status, tail: format!("{tail}; server: {}", tail_of(&said)) })
        }
        Err(error) => Err(error),
    }
}

/// Runs one child to its end.
///
/// # Errors
/// As [`run_pair`].
pub(crate) fn run_one(command: Command, limit: Duration) -> Result<Output> {
    run_one_on(command, None, limit)
}

/// The same, held to a processor.
///
/// # Errors
/// As [`run_pair`].
pub(crate) fn run_one_on(command: Command, cpu: Cpu, limit: Duration) -> Result<Output> {
    Bounded::start(command, cpu)?.finish(limit)
}

/// The last lines of a child's output, on one line, for an error message.
pub(crate) fn tail_of(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(3)..].join(" / ")
}

/// A child that works until this is dropped.
pub(crate) struct Background(#[expect(dead_code, reason = "its end ends the child")] Bounded);

impl Background {
    /// Starts it, and waits until it is ready.
    ///
    /// # Errors
    /// It cannot be started, ends, or is not ready in time.
    pub(crate) fn start(command: Command, is_ready: impl Fn() -> bool) -> Result<Self> {
        let mut child = Bounded::start(command, None)?;
        child.wait_until(is_ready)?;
        Ok(Self(child))
    }
}

/// A running child that is killed when dropped.
struct Bounded {
    name: String,
    child: Child,
    pidfd: OwnedFd,
    stdout: Option<JoinHandle<String>>,
    stderr: Option<JoinHandle<String>>,
}

impl Bounded {
    fn start(mut command: Command, cpu: Cpu) -> Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let name = name.rsplit('/').next().unwrap_or(&name).to_owned();
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // SAFETY: between fork and exec only two system calls are made; both are async-signal-safe and the
        // processor set is built on the stack.
        unsafe { command.pre_exec(move || prepare_child(cpu)) };
        let mut child = command.spawn().map_err(|e| BenchError::from_io("spawn", &e))?;
        let stdout = child.stdout.take().map(collect);
        let stderr = child.stderr.take().map(collect);
        let pidfd = match pidfd_open(child.id()) {
            Ok(fd) => fd,
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(error);
            }
        };
        Ok(Self { name, child, pidfd, stdout, stderr })
    }

    fn wait_ready(&mut self, ready: Ready) -> Result<()> {
        self.wait_until(|| is_bound(ready))
    }

    fn wait_until(&mut self, is_ready: impl Fn() -> bool) -> Result<()> {
        let start = Instant::now();
        while !is_ready() {
            let ended = self.child.try_wait().map_err(|e| BenchError::from_io("wait", &e))?;
            if ended.is_some() {
                return Err(self.failure());
            }
            if start.elapsed() > READY_LIMIT {
                return Err(BenchError::Timeout { what: self.name.clone(), limit: READY_LIMIT });
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn finish(mut self, limit: Duration) -> Result<Output> {
        if !self.ends_within(limit) {
            return Err(BenchError::Timeout { what: self.name.clone(), limit });
        }
        let status = self.child.wait().map_err(|e| BenchError::from_io("wait", &e))?;
        if !status.success() {
            return Err(self.failure());
        }
        Ok(self.output())
    }

    fn failure(&mut self) -> BenchError {
        let status = self.child.wait().map_or_else(|e| e.to_string(), |status| status.to_string());
        let output = self.output();
        let text = if output.stderr.trim().is_empty() { &output.stdout } else { &output.stderr };
        BenchError::Failed { what: self.name.clone(), status, tail: tail_of(text) }
    }

    fn output(&mut self) -> Output {
        let join =
            |handle: Option<JoinHandle<String>>| handle.and_then(|h| h.join().ok()).unwrap_or_default();
        Output { stdout: join(self.stdout.take()), stderr: join(self.stderr.take()) }
    }

    /// Sleeps until the child ends, without the wake-ups that would disturb it.
    fn ends_within(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            if poll(&mut [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)], timeout) == Ok(1) {
                return true;
            }
            if left.is_zero() {
                return false;
            }
        }
    }
}

impl Drop for Bounded {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

fn collect(mut pipe: impl Read + Send + 'static) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// In the child before exec: die with the parent, and stay on the processor asked for.
fn prepare_child(cpu: Cpu) -> std::io::Result<()> {
    // SAFETY: plain system calls on values of this frame; CPU_SET writes inside the zeroed set (cpu is
    // bounded by the check), and a zeroed cpu_set_t is a valid empty set.
    unsafe {
        if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
            return Err(std::io::Error::last_os_error());
        }
        let Some(cpu) = cpu else { return Ok(()) };
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if cpu < 8 * size_of::<libc::cpu_set_t>() {
            libc::CPU_SET(cpu, &mut set);
        }
        if libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) != 0 {
            return Err(std::io::Error::last_os_error());
        }
    }
    Ok(())
}

fn pidfd_open(pid: u32) -> Result<OwnedFd> {
    // SAFETY: the call takes two integers; the descriptor it returns is new and owned by nobody else.
    unsafe {
        let fd = libc::syscall(libc::SYS_pidfd_open, libc::c_long::from(pid), 0);
        let fd = i32::try_from(fd).unwrap_or(-1);
        if fd < 0 { Err(BenchError::os("pidfd_open")) } else { Ok(OwnedFd::from_raw_fd(fd)) }
    }
}

/// Reads the kernel's socket tables: probing a server by connecting would use up its one accept.
fn is_bound(ready: Ready) -> bool {
    let (files, port, state) = match ready {
        Ready::Tcp(port) => (["/proc/net/tcp", "/proc/net/tcp6"], port, Some("0A")),
        Ready::Udp(port) => (["/proc/net/udp", "/proc/net/udp6"], port, None),
        Ready::Unix(port) => {
            let name = format!("@{}", crate::samehost::socket_name(port));
            let table = fs::read_to_string("/proc/net/unix").unwrap_or_default();
            return table.lines().any(|line| line.split_whitespace().next_back() == Some(name.as_str()));
        }
    };
    let wanted = format!(":{port:04X}");
    files.iter().filter_map(|file| fs::read_to_string(file).ok()).any(|table| {
        table.lines().skip(1).any(|line| {
            let mut fields = line.split_whitespace().skip(1);
            let local = fields.next().unwrap_or("");
            let actual = fields.nth(1).unwrap_or("");
            local.ends_with(&wanted) && state.is_none_or(|s| s == actual)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_child_that_never_ends_is_killed() {
        let result = run_one(shell("exec sleep 60"), Duration::from_millis(50));
        assert!(matches!(result, Err(BenchError::Timeout { .. })), "{result:?}");
    }

    #[test]
    fn a_failure_carries_what_the_child_wrote() {
        let result = run_one(shell("echo no such device >&2; exit 3"), Duration::from_secs(20));
        let Err(BenchError::Failed { tail, status, .. }) = result else { panic!("{result:?}") };
        assert_eq!(tail, "no such device");
        assert!(status.contains('3'), "{status}");
    }

    #[test]
    fn a_listening_port_is_seen_and_a_closed_one_is_not() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(is_bound(Ready::Tcp(port)));
        drop(listener);
        assert!(!is_bound(Ready::Tcp(port)));
    }

    #[test]
    fn a_missing_tool_names_its_package() {
        let error = require("starverbs-no-such-tool", "some-package").unwrap_err();
        assert!(error.is_skip());
        assert!(error.to_string().contains("some-package"));
    }
}
