#!/usr/bin/env python3
"""Writes docs/applications.md from the cases and from what run.py has noted.

usage: page.py PAGE RESULT.json...
"""

import json
import pathlib
import re
import sys
import textwrap
import tomllib

APPS = pathlib.Path(__file__).resolve().parent
HEAD = """# Applications on the card

Written by `make apps` (tests/apps); do not edit. {counts}.

Programs as their packages have them, and what a user must set. Each case ran on one host and between two
(network namespaces joined by veth, without RDMA hardware or a kernel module), free and once more with all its
processes on one CPU (`taskset -c 0`). Everything is started by `starverbs run --`, which finds the library
for programs of any kind. A case passes when all its runs end with status 0 within their time, say what they
should, leave no process, and when the card's frames have carried them (datagrams of the namespaces are
counted); on one host each runs once so, by packets (`STARVERBS_LINK=udp`), and once through shared memory. A
cell says how many runs that were, and their seconds together. The machine did other things as well;
`make bench` measures.
"""
COLUMNS = [("one", False), ("two", False), ("one", True), ("two", True)]
# What stands in a command for a part that only this run knows.
WORDS = {
    "server": "SERVER",
    "port": "PORT",
    "client": "OWN",
    "hosts": "HOSTS",
    "scratch": ".",
    "apps": "tests/apps",
    "python": "python3",
    "agent": "AGENT",
    "target": "target",
    "valkey": "VALKEY",
    "a": "HOST",
    "b": "HOST",
}


def command(case):
    """The case's command, as one would type it."""
    text = case.get("client", case.get("command"))
    return " ".join(re.sub(r"\{(\w+)\}", lambda match: WORDS.get(match[1], match[1].upper()), text).split())


def cell(row):
    """A result in few words."""
    if row is None:
        return ""
    if row["verdict"] == "ok":
        return (
            f"{row['runs']} ok, {row['seconds']:.0f} s" if row["runs"] > 1 else f"ok, {row['seconds']:.0f} s"
        )
    first = " ".join(row["reason"].split("\n")[0].split())
    return f"skipped: {first}" if row["verdict"] == "skipped" else f"**failed**: {first}"


def table(program, result):
    """What came of a program's cases on one system."""
    rows = {
        (row["case"], row["net"], row["one_cpu"]): row
        for row in result["rows"]
        if row["program"] == program["program"]
    }
    if not rows:
        return []
    version = result["versions"].get(program["program"])
    lines = [
        f"{result['system']}{': ' + version if version else ''}",
        "",
        "| case | one host | two hosts | one host, one CPU | two hosts, one CPU |",
        "|---|---|---|---|---|",
    ]
    for case in program["case"]:
        cells = [cell(rows.get((case["name"], *column))) for column in COLUMNS]
        if any(cells):
            lines.append(f"| {case['name']} | {' | '.join(cells)} |".replace("  ", " "))
    return lines + [""]


def prose(text, indent=""):
    """A paragraph in lines of the documents' width."""
    return textwrap.fill(
        " ".join(text.split()), 110, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def section(program, results):
    """All about one program."""
    tables = [line for result in results for line in table(program, result)]
    if not tables:
        return []
    lines = [f"## {program['program']}", "", *[prose(f"- {text}", "  ") for text in program["user"]], ""]
    lines += [prose(program["note"]), ""] if "note" in program else []
    commands = dict.fromkeys(command(case) for case in program["case"])
    variables = " ".join(
        f"{name}={value}" for name, value in program.get("env", {}).items() if "AS_ROOT" not in name
    )
    lines += ["```sh", *[f"{variables} {text}".strip() for text in commands], "```", ""]
    return lines + tables


def main(page, *files):
    results = [json.loads(pathlib.Path(file).read_text()) for file in files]
    verdicts = [row["verdict"] for result in results for row in result["rows"]]
    counts = ", ".join(
        f"{verdicts.count(verdict)} {word}"
        for verdict, word in (("ok", "passed"), ("skipped", "skipped"), ("FAILED", "failed"))
    )
    lines = [HEAD.format(counts=counts)]
    for file in sorted((APPS / "cases").glob("*.toml")):
        lines += section(tomllib.loads(file.read_text()), results)
    pathlib.Path(page).write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
