"""Where the programs run: two network namespaces of this run's own, on this host's root folder or on another
one.

Owns the namespaces, the mounts and the processes in them, and takes all away. Needs root. The mounts are in a
mount namespace which run.py makes."""

import contextlib
import ctypes
import glob
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PREFIX = "sv-apps-"
# Seconds that what is left of a case has to end by itself.
GRACE = 5


class Failure(Exception):
    """Why a case did not pass, with the end of what the programs wrote."""


def quiet(*words):
    """Runs a command that must work; gives its output."""
    result = subprocess.run(words, capture_output=True, text=True)
    if result.returncode != 0:
        raise Failure(f"{' '.join(words)}: {result.stderr.strip()}")
    return result.stdout


def tail(text, lines=8):
    """The last lines that are not empty."""
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])


def die_with_parent():
    """In a child before exec: it is killed when this program is."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def remove_left_over():
    """Removes the namespaces of runs that were killed before they could tidy up."""
    for file in pathlib.Path("/run/netns").glob(f"{PREFIX}*"):
        if not pathlib.Path("/proc", file.name.removeprefix(PREFIX).split("-")[0]).exists():
            subprocess.run(["ip", "netns", "del", file.name], capture_output=True)


class Process:
    """A started program in a process group of its own, its output in a file."""

    def __init__(self, words, environment, folder, output):
        self.output = output
        with open(output, "wb") as file:
            self.child = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def text(self):
        return self.output.read_text(errors="replace")

    def wait_until(self, deadline):
        """The exit status, or None if it has not ended by then."""
        try:
            return self.child.wait(max(deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            return None

    def stop(self):
        """Ends it and its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()

    def listens(self, port):
        """Whether somebody in its network namespace listens on TCP port `port`, or serves it by rdma_cm."""
        net = pathlib.Path(f"/proc/{self.child.pid}/net")
        with contextlib.suppress(OSError):
            for table in ("tcp", "tcp6"):
                if re.search(rf"^ *\d+: \w+:{port:04X} \w+:0000 0A ", (net / table).read_text(), re.M):
                    return True
            # The port is the last 16 bits of the service's number.
            return bool(re.search(rf"@starverbs/\S+/cm/\w*{port:04x}\b", (net / "unix").read_text()))
        return False


class Place:
    """Two namespaces `a` and `b` joined by veth, and the folders under which programs find what they need."""

    def __init__(self, dist, apps, root=None):
        self.dist_here, self.root, self.outputs, self.port = dist, root, 0, 24000
        self.names = [f"{PREFIX}{os.getpid()}-{end}" for end in "ab"]
        self.written = pathlib.Path(tempfile.mkdtemp(prefix=PREFIX))
        if root:
            self.dist, self.apps, self.scratch = "/tmp/dist", "/tmp/apps", "/tmp/scratch"
            self.scratch_here = pathlib.Path(root + self.scratch)
        else:
            self.scratch_here = self.written / "scratch"
            self.dist, self.apps, self.scratch = str(dist), str(apps), str(self.scratch_here)
        self.apps_here = apps

    def __enter__(self):
        try:
            self._mounts()
            self._namespaces()
            self.scratch_here.mkdir(exist_ok=True)
            self._agent()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.end_all()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["umount", "--recursive", "--lazy", str(self.written)], capture_output=True)
        shutil.rmtree(self.written, ignore_errors=True)

    def _mounts(self):
        quiet("mount", "-t", "tmpfs", "tmpfs", str(self.written))
        if not self.root:
            return
        for folder in ("dev", "proc"):
            quiet("mount", "--rbind", f"/{folder}", f"{self.root}/{folder}")
        quiet("mount", "-t", "tmpfs", "tmpfs", f"{self.root}/tmp")
        for folder, what in (("dist", self.dist_here), ("apps", self.apps_here)):
            pathlib.Path(self.root, "tmp", folder).mkdir()
            quiet("mount", "--bind", str(what), f"{self.root}/tmp/{folder}")

    def _namespaces(self):
        remove_left_over()
        a, b = self.names
        for name in self.names:
            quiet("ip", "netns", "add", name)
            quiet("ip", "-n", name, "link", "set", "lo", "up")
        quiet("ip", "-n", a, "link", "add", "veth0", "type", "veth", "peer", "name", "veth0", "netns", b)
        for name, address in zip(self.names, ADDRESSES):
            quiet("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "veth0")
            quiet("ip", "-n", name, "link", "set", "veth0", "up")
        deadline = time.monotonic() + 10
        while any("state UP" not in quiet("ip", "-n", name, "link", "show", "veth0") for name in self.names):
            if time.monotonic() > deadline:
                raise Failure("veth0 has no carrier")
            time.sleep(0.02)

    def _agent(self):
        """What mpirun calls in ssh's place: HOST COMMAND, where host is an address of a namespace."""
        # Within a chroot there is no way back out to `ip netns`; nsenter of util-linux does with a
        # namespace's file.
        holders = {}
        for name, address in zip(self.names, ADDRESSES):
            file = self.scratch_here / f"net-{address}"
            file.touch()
            quiet("mount", "--bind", f"/run/netns/{name}", str(file))
            holders[address] = f"{self.scratch}/net-{address}"
        script = self.scratch_here / "agent"
        branches = "".join(f"{address}) net={file} ;;\n" for address, file in holders.items())
        script.write_text(
            '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\n'
            f"case $1 in\n{branches}*) exit 1 ;;\nesac\nshift\n"
            # A name of its own: Open MPI 6 takes hosts of one name for one host.
            'exec nsenter --net="$net" unshare --mount --uts --propagation unchanged '
            'sh -c "hostname ${net##*/net-} && mount -t sysfs sysfs /sys && $*"\n'
        )
        script.chmod(0o755)

    def free_port(self):
        """A port that no case of this run has had."""
        self.port += 1
        return self.port

    def words(self, end, words, one_cpu=False, on_card=True):
        """The command line that runs `words` at one end."""
        line = ["taskset", "-c", "0"] if one_cpu else []
        line += ["ip", "netns", "exec", self.names[end]]
        if self.root:
            line += ["sh", "-c", 'mount -t sysfs sysfs "$0/sys" && exec chroot "$0" "$@"', self.root]
        return line + ([f"{self.dist}/bin/starverbs", "run", "--"] if on_card else []) + list(words)

    def environment(self, more):
        """This process's environment, less what bends the programs, and `more`."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(
                ("STARVERBS_", "LD_", "UCX_", "FI_", "OMPI_", "PMIX_", "MPIR_", "MC_", "NIXL_")
            )
        }
        if self.root:
            kept["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
            kept["HOME"] = "/root"
        return kept | more

    def start(self, end, words, environment, one_cpu=False, on_card=True):
        self.outputs += 1
        return Process(
            self.words(end, words, one_cpu, on_card),
            self.environment(environment),
            None if self.root else self.scratch_here,
            self.written / f"output-{self.outputs}",
        )

    def ask(self, *words, limit=300):
        """Runs a command that is not on the card at end a; gives (status, output)."""
        process = self.start(0, words, {}, on_card=False)
        status = process.wait_until(time.monotonic() + limit)
        process.stop()
        return status, process.text()

    def has(self, command):
        """Whether the place has a program, or files that a pattern tells."""
        if command.startswith("/"):
            return bool(glob.glob((self.root or "") + command))
        return self.ask("sh", "-c", 'command -v "$0"', command)[0] == 0

    def frames(self):
        """Datagrams that both namespaces have sent so far: nothing but the card's wire is UDP there."""
        total = 0
        for name in self.names:
            for table, line in (
                ("snmp", r"^Udp: \d+ \d+ \d+ (\d+)"),
                ("snmp6", r"^Udp6OutDatagrams\s+(\d+)"),
            ):
                text = quiet("ip", "netns", "exec", name, "cat", f"/proc/net/{table}")
                total += int(re.search(line, text, re.M)[1])
        return total

    def pids(self):
        """The processes that live in the namespaces."""
        found = []
        for name in self.names:
            listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            found += [int(pid) for pid in listed.stdout.split()]
        return found

    def end_all(self):
        """Waits a moment for what is left in the namespaces, then kills it; gives how many that were."""
        deadline = time.monotonic() + GRACE
        while (left := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(left)
