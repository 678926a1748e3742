#!/usr/bin/env python3
"""BGSAVE of Valkey or Redis, whose memory is libstarverbs-share.so's: the snapshot is what was there at the
fork.

Usage: snapshot.py LIBRARY [PLAIN]. The server saves by a forked child, while a client overwrites all keys. A
server without the library then loads the file, and must find the old values of all. With PLAIN, a library to
be loaded behind the first (libc.so.6), its malloc takes the place of the server's own allocator.
"""

import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time

# Of its own allocator's memory all is shared; of glibc's, what is asked for in large pieces.
KEYS, SIZE, BATCH = (1000, 200000, 50) if len(sys.argv) > 2 else (20000, 10000, 500)


class Server:
    """A server in a folder, and a connection to it."""

    def __init__(self, folder, preload=""):
        self.path = folder / "socket"
        command = ["redis-server", "--port", "0", "--unixsocket", self.path, "--dir", folder, "--save", "",
                   "--appendonly", "no"]
        environment = dict(os.environ, **({"LD_PRELOAD": preload} if preload else {}))
        self.process = subprocess.Popen(command, executable=program(), env=environment,
                                        stdout=subprocess.DEVNULL)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(60)
        for _ in range(600):
            try:
                self.socket.connect(str(self.path))
                break
            except OSError:
                time.sleep(0.1)
        self.input = self.socket.makefile("rb")

    def send(self, *commands):
        text = b""
        for words in commands:
            words = [word if isinstance(word, bytes) else str(word).encode() for word in words]
            text += b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
        self.socket.sendall(text)

    def answer(self):
        line = self.input.readline().rstrip()
        if line.startswith(b"-"):
            raise SystemExit(f"the server says {line.decode()}")
        if not line.startswith(b"$"):
            return line
        length = int(line[1:])
        return self.input.read(length + 2)[:length] if length >= 0 else None

    def ask(self, *words):
        self.send(words)
        return self.answer()

    def info(self, name):
        return re.search(rb"%s:(\S+)" % name.encode(), self.ask("INFO", "all"))[1].decode()

    def write(self, generation):
        for first in range(0, KEYS, BATCH):
            keys = range(first, first + BATCH)
            self.send(*(("SET", f"key{key}", value(key, generation)) for key in keys))
            for _ in keys:
                self.answer()

    def end(self):
        self.process.kill()
        self.process.wait()
        self.path.unlink(missing_ok=True)


def program():
    """The server's file. Debian's redis-tools has it, too: it does what its first argument says."""
    names = ("valkey-server", "redis-server", "valkey-check-rdb", "redis-check-rdb")
    return next(filter(None, map(shutil.which, names)), None)


def value(key, generation):
    return (b"%d of %d; " % (key, generation)).ljust(SIZE, b"%d" % (key % 10))


def snapshot(folder, preload):
    server = Server(folder, preload)
    try:
        server.ask("PING")
        server.write(1)
        status = pathlib.Path(f"/proc/{server.process.pid}/status").read_text()
        shared = int(re.search(r"RssShmem:\s+(\d+)", status)[1]) // 1024 if preload else None
        if preload and shared < KEYS * SIZE >> 21:
            raise SystemExit(f"only {shared} MiB of the server's memory are shared")
        print(f"{server.ask('BGSAVE').decode()}; {shared} MiB shared", flush=True)
        server.write(2)
        for _ in range(600):
            if server.info("rdb_bgsave_in_progress") == "0":
                break
            time.sleep(0.1)
        assert server.info("rdb_last_bgsave_status") == "ok", "the child failed"
        fork = int(server.info("latest_fork_usec")) / 1000
        print(f"fork {fork:.0f} ms")
        assert server.ask("GET", "key7") == value(7, 2), "the parent's own value"
    finally:
        server.end()


def verify(folder):
    server = Server(folder)
    try:
        while server.info("loading") != "0":
            time.sleep(0.1)
        wrong = 0
        for first in range(0, KEYS, BATCH):
            keys = range(first, first + BATCH)
            server.send(*(("GET", f"key{key}") for key in keys))
            wrong += sum(server.answer() != value(key, 1) for key in keys)
        assert wrong == 0, f"{wrong} of {KEYS} keys are not as they were at the fork"
    finally:
        server.end()


def main():
    library = sys.argv[1]
    preload = ":".join([str(pathlib.Path(library).resolve()) if library else "", *sys.argv[2:]]).strip(":")
    if not program():
        print("skipped: neither valkey-server nor redis-server or redis-tools is installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        snapshot(folder, preload)
        verify(folder)
    print(f"{pathlib.Path(program()).name}: {KEYS} keys as they were at the fork")


main()
