#!/usr/bin/env python3
"""Runs real programs on the card, as tests/apps/cases/*.toml say, and notes what came of each.

usage: run.py [--root FOLDER] [--filter RE] [--list] [--json FILE] DIST

DIST is the folder made by `make build`. Each case runs on one host and between two (network namespaces that
this program makes and removes), free and once more on one CPU. With --root, the programs are those of another
root folder, for instance of a newer Debian (tools/scripts/root.sh). A program that is not installed is
skipped, and the result says so. Fails if a case fails, or if none passes. Needs root."""

import argparse
import itertools
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib

from place import ADDRESSES, Failure, Place, tail

APPS = pathlib.Path(__file__).resolve().parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", APPS.parents[1] / "target")).resolve()
# Longest a case may take if it does not say, seconds: each run of it.
LIMIT = 60
NETS = {"one": "one host", "two": "two hosts"}


def cases(newer, pattern):
    """The cases of all files for this place: (file's table, case's table)."""
    where = "newer" if newer else "here"
    for file in sorted((APPS / "cases").glob("*.toml")):
        program = tomllib.loads(file.read_text())
        for case in program["case"]:
            wanted = where in case.get("where", program.get("where", ["here", "newer"]))
            if wanted and re.search(pattern, f"{program['program']}: {case['name']}"):
                yield program, case


def combinations(case):
    """Each assignment of the case's variables."""
    each = case.get("each", {})
    for values in itertools.product(*each.values()):
        yield dict(zip(each, values))


class Runner:
    """Runs cases in a place."""

    def __init__(self, place, newer):
        self.place, self.newer, self.ready = place, newer, {}

    def prepare(self, program):
        """Builds and installs what a program's cases need, once; gives why that cannot be, or None."""
        name = program["program"]
        if name not in self.ready:
            try:
                self.ready[name] = self._prepare(program)
            except Failure as failure:
                self.ready[name] = str(failure)
        return self.ready[name]

    def _prepare(self, program):
        if lacking := self.lacks(program):
            return lacking
        if "venv" in program:
            self._venv(program)
        for command in program.get("install", []):
            self._fetch(shlex.split(self.fill(command, program)))
        for command in program.get("build", []):
            status, output = self.place.ask(
                *shlex.split(self.fill(command, program)), limit=program.get("build_limit", 120)
            )
            if status != 0:
                raise Failure(f"{command}: {tail(output, 3) or status}")
        return None

    def lacks(self, what):
        """Why a program or a case cannot be run here, if something that it needs is not there."""
        needs = [self.fill(command, what) for command in what.get("needs", [])]
        missing = [command for command in needs if not self.place.has(command)]
        return f"{missing[0]} is not installed" if missing else None

    @staticmethod
    def _fetch(words):
        """Runs a command of this host, with its network."""
        result = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if result.returncode != 0:
            raise Failure(f"{' '.join(words)}: {tail(result.stderr + result.stdout, 1)}")

    def _venv(self, program):
        """A virtual environment under target/, kept from run to run."""
        folder = self.venv(program)
        wanted = "\n".join(program["venv"]) + sys.version
        if (folder / "wanted").exists() and (folder / "wanted").read_text() == wanted:
            return
        self._fetch([sys.executable, "-m", "venv", "--clear", str(folder)])
        for line in program["venv"]:
            self._fetch([f"{folder}/bin/pip", "install", "--quiet", *line.split()])
        (folder / "wanted").write_text(wanted)

    @staticmethod
    def venv(program):
        return TARGET / f"apps-venv-{program['program'].lower()}"

    def fill(self, text, program, **more):
        """Puts the place's words into a command."""
        words = {
            "dist": self.place.dist,
            "lib": f"{self.place.dist}/lib",
            "apps": self.place.apps,
            "scratch": self.place.scratch,
            "python": f"{self.venv(program)}/bin/python" if "venv" in program else "/usr/bin/python3",
            "target": str(TARGET),
            "valkey": os.environ.get("VALKEY", "/VALKEY"),
            "agent": f"{self.place.scratch}/agent",
            "a": ADDRESSES[0],
            "b": ADDRESSES[1],
        }
        return re.sub(r"\{(\w+)\}", lambda match: str((words | more)[match[1]]), text)

    def run(self, program, case, net, one_cpu):
        """Runs all combinations of a case; gives how many, or raises with the first that failed."""
        number = 0
        # On one host by packets, which shows that the program uses the card, and then as a user has it: RC
        # goes through shared memory.
        links = ("udp", "auto") if net == "one" else ("auto",)
        for values, link in itertools.product(combinations(case), links):
            before = self.place.frames()
            try:
                self._tries(program, case, net, one_cpu, values, link)
                left = self.place.end_all()
                if left:
                    raise Failure(f"{left} processes did not end")
                by_packets = net == "two" or link == "udp"
                if by_packets and self.place.frames() - before < case.get("frames", 50):
                    raise Failure("the card has sent next to nothing: the program has found another way")
            except Failure as failure:
                self.place.end_all()
                given = " ".join(f"{name}={value}" for name, value in (values | {"link": link}).items())
                raise Failure(f"{given}: {failure}") from None
            number += 1
        return number

    def _tries(self, program, case, net, one_cpu, values, link):
        """Runs one combination; again where the program has lost a race of its own, which its words tell."""
        for _ in range(case.get("tries", 1) - 1):
            try:
                return self._one(program, case, net, one_cpu, values, link)
            except Failure as failure:
                if not re.search(case["race"], str(failure)):
                    raise
                self.place.end_all()
        return self._one(program, case, net, one_cpu, values, link)

    def _one(self, program, case, net, one_cpu, values, link):
        limit = case.get("limit", program.get("limit", LIMIT))
        end = 1 if net == "two" else 0
        values = values | {
            "port": self.place.free_port(),
            "server": ADDRESSES[0],
            "client": ADDRESSES[end],
            "hosts": case.get("hosts", program.get("hosts", {})).get(net, ""),
        }
        # The text that stands for hosts has places to fill in itself.
        values["hosts"] = self.fill(values["hosts"], program, **values)
        environment = (
            program.get("env", {})
            | case.get("env", {})
            | (program.get("newer_env", {}) if self.newer else {})
        )
        environment = {name: self.fill(value, program, **values) for name, value in environment.items()}
        environment["STARVERBS_LINK"] = link
        command = lambda key: shlex.split(self.fill(case[key], program, **values))
        deadline = time.monotonic() + limit
        server = None
        if "server" in case:
            server = self.place.start(0, command("server"), environment, one_cpu)
            port = self.fill(str(case.get("listens", "{port}")), program, **values)
            self._await(server, int(port), deadline)
        client = self.place.start(
            end if server else 0, command("client" if server else "command"), environment, one_cpu
        )
        try:
            self._check(case, client, server, deadline)
        finally:
            for process in filter(None, (client, server)):
                process.stop()

    @staticmethod
    def _await(server, port, deadline):
        while not server.listens(port):
            status = server.wait_until(time.monotonic() + 0.02)
            if status is not None or time.monotonic() > deadline:
                server.stop()
                raise Failure(f"the server does not listen (status {status}):\n{tail(server.text())}")

    @staticmethod
    def _check(case, client, server, deadline):
        sides = [("client" if server else "program", client)]
        if server and not case.get("server_stays"):
            sides.append(("server", server))
        for side, process in sides:
            status = process.wait_until(deadline)
            if status is None:
                raise Failure(f"{side}: does not end\n{tail(process.text())}")
            if status != 0:
                other = f"\nserver:\n{tail(server.text())}" if server and process is client else ""
                raise Failure(f"{side}: status {status}\n{tail(process.text())}{other}")
        if not re.search(case["expect"], client.text(), re.M):
            raise Failure(f"{sides[0][0]}: does not say {case['expect']}\n{tail(client.text())}")


def version(place, program, runner):
    """What the program is and of which version."""
    found = []
    for package in program.get("packages", []):
        status, output = place.ask("dpkg-query", "-W", "-f", "${Version}", package)
        found += [f"{package} {output}"] if status == 0 else []
    for wheel in program.get("wheels", []) if (runner.venv(program) / "bin/pip").exists() else []:
        shown = subprocess.run(
            [f"{runner.venv(program)}/bin/pip", "show", wheel], capture_output=True, text=True
        )
        found += [f"{wheel} {number}" for number in re.findall(r"^Version: (.*)", shown.stdout, re.M)]
    crates = [word for command in program.get("install", []) for word in command.split() if "@" in word]
    return ", ".join(found + [crate.replace("@", " ") for crate in crates])


def run_all(place, args):
    """Runs the cases; gives the rows of the result."""
    todo = [
        (program, case, net, one_cpu)
        for program, case in cases(args.root, args.filter)
        for one_cpu in (False, True)
        for net in case.get("nets", ["one", "two"])
    ]
    runner, rows = Runner(place, bool(args.root)), []
    for number, (program, case, net, one_cpu) in enumerate(todo, 1):
        started = time.monotonic()
        reason, runs = runner.prepare(program) or runner.lacks(case), 0
        verdict = "skipped" if reason else "ok"
        if not reason:
            try:
                runs = runner.run(program, case, net, one_cpu)
            except Failure as failure:
                verdict, reason = "FAILED", str(failure)
        seconds = time.monotonic() - started
        where = f"{NETS[net]}{', one CPU' if one_cpu else ''}"
        detail = f"{runs} runs" if verdict == "ok" else reason.replace("\n", "\n        ")
        title = f"{program['program']}: {case['name']}"
        print(
            f"[{number:>3}/{len(todo)}] {verdict:<7} {seconds:6.1f}s {where:<18} {title}   {detail}",
            flush=True,
        )
        rows.append(
            {
                "program": program["program"],
                "case": case["name"],
                "net": net,
                "one_cpu": one_cpu,
                "verdict": verdict,
                "runs": runs,
                "reason": reason or "",
                "seconds": round(seconds, 1),
            }
        )
        if args.json:
            keep(args.json, rows[-1], place, program, runner)
    return rows


def keep(file, row, place, program, runner):
    """Puts a row into the file of results, in the place of an older one of the same case; the others stay."""
    result = json.loads(file.read_text()) if file.exists() else {"versions": {}, "rows": []}
    same = lambda other: all(other[key] == row[key] for key in ("program", "case", "net", "one_cpu"))
    result["rows"] = [other for other in result["rows"] if not same(other)] + [row]
    result["system"] = result.get("system") or system(place)
    if row["program"] not in result["versions"]:
        result["versions"][row["program"]] = version(place, program, runner)
    file.write_text(json.dumps(result, indent=1) + "\n")


def system(place):
    """The distribution, the kernel and the CPUs."""
    _, name = place.ask("sh", "-c", '. /etc/os-release; echo "$PRETTY_NAME"')
    return f"{name.strip()}, Linux {os.uname().release}, {os.cpu_count()} CPUs"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", help="a folder with another system, whose programs are run")
    parser.add_argument(
        "--filter", default="", help='only cases whose "program: name" matches this regular expression'
    )
    parser.add_argument("--list", action="store_true", help="list the cases, run none")
    parser.add_argument("--json", type=pathlib.Path, help="put what came of them into this file")
    parser.add_argument("dist", type=pathlib.Path, help="the folder made by `make build`")
    args = parser.parse_args()
    if args.list:
        for program, case in cases(args.root, args.filter):
            print(f"{program['program']}: {case['name']}")
        return 0
    if os.geteuid() != 0:
        sys.exit("run.py: network namespaces need root")
    if not os.environ.get("STARVERBS_APPS_MOUNTS"):
        # What is mounted meanwhile is seen by this program and its children alone, and gone with them.
        os.environ["STARVERBS_APPS_MOUNTS"] = "private"
        os.execvp("unshare", ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv])
    dist = args.dist.resolve()
    if not (dist / "bin/starverbs").exists():
        sys.exit(f"run.py: {dist} has no bin/starverbs: `make build` first")
    # What was started and made is taken away however this program ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("run.py: terminated"))
    root = os.path.realpath(args.root) if args.root else None
    with Place(dist, APPS, root) as place:
        rows = run_all(place, args)
    counts = {
        verdict: sum(row["verdict"] == verdict for row in rows) for verdict in ("ok", "skipped", "FAILED")
    }
    for row in rows:
        if row["verdict"] == "FAILED":
            print(
                f"FAILED {NETS[row['net']]}{', one CPU' if row['one_cpu'] else ''}  "
                f"{row['program']}: {row['case']}"
            )
    print(f"apps: {counts['ok']} passed, {counts['skipped']} skipped, {counts['FAILED']} failed")
    return 0 if counts["ok"] and not counts["FAILED"] else 1


if __name__ == "__main__":
    sys.exit(main())
