#!/usr/bin/python3
"""Runs rdma-core's own tests (pyverbs), as Debian ships them, on the card, and tabulates what came of each.

usage: run.py [--board] [--table FILE] [--only TEXT] LIBRARY_DIRECTORY

With --board, the tests have an emulated board as their card (../bin/starverbs beside the library).

Needs the packages python3-pyverbs and rdma-core. The library for LD_PRELOAD is loaded too, if it lies there:
tests of the connection manager look for the device's network interface in /sys. Tests of other makers' cards
(mlx5, efa) are left out. Fails if a test fails, or if none passes. It must not know the library's inside, nor
change the tests.

Three tests want huge pages. Where there are none and this process may have some (root, nr_hugepages
writable), it has the kernel set 16 MiB aside while the tests run, and gives them back.
"""

import argparse
import contextlib
import gzip
import multiprocessing
import os
import platform
import pathlib
import subprocess
import sys
import tempfile
import unittest

SHIPPED = pathlib.Path("/usr/share/doc/rdma-core/tests")
OTHER_CARDS = ("mlx5", "efa")
# Longest a whole run may take, seconds.
LIMIT = 300
# Pages of 2 MiB, as the tests count them, and how many the tests need at once, with some to spare.
HUGE_PAGES = pathlib.Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
WANTED = 8
# Functions of a board: two processes of a test of the connection manager, beside this one.
FUNCTIONS = 3
RAW = ("not offered: raw Ethernet frames, and what steers and spreads them. It would take packet sockets, "
       "which are root's, beside the UDP port")
# What reasons of skips mean, by words in them.
MEANINGS = {
    "/dev/dri/": "this machine has no GPU, whose driver gives the tests a DMA-BUF. The card registers them",
    "cuda-python": "this machine has no NVIDIA GPU",
    "huge pages": "this machine has no huge pages to spare",
    "Tag matching": "not offered on a board: its send queues are the program's",
    "PHC": "not offered: a clock device (/dev/ptp) of the card. Its timestamps are the host's clocks",
    "Create QP type 8": RAW,
    "Raw Packet QP": RAW,
    "DMA Handle": "not offered: hints for PCIe (TPH). A card without a bus could only ignore them",
    "DM dmabuf export": "not offered: device memory as a DMA-BUF. It would take the kernel's /dev/udmabuf",
    "CC_DMA_BOUNCE": "for devices of confidential guests that reach only some memory. The card reaches all",
}


@contextlib.contextmanager
def huge_pages():
    """Has huge pages set aside meanwhile, if there are none and that is allowed."""
    def set_aside(more):
        before = int(HUGE_PAGES.read_text())
        HUGE_PAGES.write_text(str(max(before + more, 0)))
        return int(HUGE_PAGES.read_text()) - before

    try:
        added = set_aside(WANTED) if int(HUGE_PAGES.read_text()) == 0 else 0
    except OSError as error:
        print(f"pyverbs: no huge pages: {error}")
        added = 0
    try:
        yield
    finally:
        if added:
            set_aside(-added)


@contextlib.contextmanager
def emulated_board(library):
    """Has a board meanwhile; gives the variables by which the tests have it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [library.parent / "bin" / "starverbs", "board", "--socket", f"{folder}/board",
                   "--sockets", str(FUNCTIONS)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as board:
            try:
                # It tells of each function that is ready.
                for _ in range(FUNCTIONS):
                    board.stdout.readline()
                yield {"STARVERBS_DEVICE": f"board:{folder}/board"}
            finally:
                board.terminate()


def unpack(to):
    """Copies the tests to the folder `to`, as far as they are for any card."""
    to.mkdir()
    for file in sorted(SHIPPED.iterdir()):
        name = file.name.removesuffix(".gz")
        if name.startswith("test_") and any(card in name for card in OTHER_CARDS):
            continue
        data = file.read_bytes()
        (to / name).write_bytes(gzip.decompress(data) if file.suffix == ".gz" else data)


class Notes(unittest.TestResult):
    """What came of each test: (name, verdict, reason)."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def note(self, test, verdict, reason=""):
        self.rows.append((test.id().removeprefix("tests."), verdict, " ".join(reason.split())))
        print(f"{verdict:<7} {self.rows[-1][0]}   {self.rows[-1][2]}", flush=True)

    def addSuccess(self, test):
        self.note(test, "passed")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.note(test, "skipped", reason)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.note(test, "FAILED", str(err[1]))
        print(self.failures[-1][1])

    def addError(self, test, err):
        super().addError(test, err)
        self.note(test, "ERROR", str(err[1]))
        print(self.errors[-1][1])


def run_here(folder, only):
    """Runs the tests in this process, which has the library under test; gives the notes."""
    # One test hands itself to its children, which Python 3.14 no longer forks unless told to.
    multiprocessing.set_start_method("fork")
    sys.path[:0] = [str(folder), str(folder.parent)]
    sys.argv[1:] = []
    from args_parser import parser

    parser.parse_args()
    import tests

    def each(suite):
        for test in suite:
            yield from each(test) if isinstance(test, unittest.TestSuite) else [test]

    notes = Notes()
    found = unittest.defaultTestLoader.loadTestsFromModule(tests)
    unittest.TestSuite(test for test in each(found) if only in test.id()).run(notes)
    return notes


def meaning(reason):
    """What a reason for a skip means."""
    return next((text for words, text in MEANINGS.items() if words in reason), "")


def versions():
    """What the tests are of."""
    query = ["dpkg-query", "-W", "-f", "${Package} ${Version}, ", "rdma-core", "python3-pyverbs"]
    packages = subprocess.run(query, capture_output=True, text=True).stdout
    return f"{packages}Python {platform.python_version()}"


def table(rows, on_board):
    """The rows as Markdown."""
    verdicts = ("passed", "skipped", "FAILED", "ERROR")
    counts = {verdict: sum(row[1] == verdict for row in rows) for verdict in verdicts}
    device, target = ("board", "conformance-board") if on_board else ("card", "pyverbs")
    out = [f"# rdma-core's own tests on the {device}", "",
           f"Written by `make {target}` (tests/pyverbs); do not edit. The tests are those of Debian's "
           "rdma-core and python3-pyverbs, without",
           f"those for other makers' cards (mlx5, efa): {versions()}. Debian 12's are in "
           "[pyverbs.md](pyverbs.md), on an emulated",
           "[board](board.md) in [pyverbs-board.md](pyverbs-board.md), those of a newer Debian in "
           "[pyverbs-newer.md](pyverbs-newer.md):",
           "`make pyverbs ROOT=FOLDER`, where tests/pyverbs/newer.sh says what folder.", "",
           ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number) +
           f", of {len(rows)}.", "",
           "| why skipped | tests | what it means |", "|---|--:|---|"]
    reasons = [row[2] for row in rows if row[1] == "skipped"]
    for reason in sorted(set(reasons), key=lambda reason: (-reasons.count(reason), reason)):
        out.append(f"| {reason} | {reasons.count(reason)} | {meaning(reason)} |")
    out += ["", "| test | | |", "|---|---|---|"]
    out += [f"| {name} | {verdict} | {reason} |" for name, verdict, reason in sorted(rows)]
    return "\n".join(out) + "\n"


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--board", action="store_true")
    args.add_argument("--table", type=pathlib.Path)
    args.add_argument("--only", default="")
    args.add_argument("library", type=pathlib.Path)
    args = args.parse_args()
    library = args.library.resolve()
    if os.environ.get("LD_LIBRARY_PATH") != str(library):
        # The loader reads it at the start of a process only.
        environment = dict(os.environ, LD_LIBRARY_PATH=str(library), PYTHONDONTWRITEBYTECODE="1")
        preload = library / "libstarverbs.so"
        if preload.exists():
            environment["LD_PRELOAD"] = str(preload)
        with huge_pages(), emulated_board(library) if args.board else contextlib.nullcontext({}) as device:
            environment.update(device)
            return subprocess.run([sys.executable, *sys.argv], env=environment, timeout=LIMIT).returncode
    with tempfile.TemporaryDirectory() as folder:
        tests = pathlib.Path(folder) / "tests"
        unpack(tests)
        notes = run_here(tests, args.only)
    if args.table and not args.only:
        args.table.write_text(table(notes.rows, args.board))
    passed = sum(row[1] == "passed" for row in notes.rows)
    skipped, failed = len(notes.skipped), len(notes.failures) + len(notes.errors)
    print(f"pyverbs: {passed} passed, {skipped} skipped, {failed} failed")
    return 0 if notes.wasSuccessful() and passed > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
