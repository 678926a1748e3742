#!/usr/bin/env python3
"""The licences of the crates that the command and the libraries carry, with their texts.

Usage: notices.py >FILE. Asks cargo, and reads the crates where cargo unpacked them.
"""

import json
import pathlib
import subprocess
import sys

CARRIED = ("starverbs", "starverbs-cdylib", "starverbs-preload", "starverbs-share")
ROOT = pathlib.Path(__file__).resolve().parents[2]


def crates():
    """The packages of others that are linked in, by name."""
    host = subprocess.run(["rustc", "-vV"], check=True, stdout=subprocess.PIPE, text=True).stdout
    host = next(line.split()[1] for line in host.splitlines() if line.startswith("host:"))
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", host]
    output = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    packages = {package["id"]: package for package in output["packages"]}
    nodes = {node["id"]: node for node in output["resolve"]["nodes"]}
    todo = [identity for identity, package in packages.items() if package["name"] in CARRIED]
    seen = set(todo)
    while todo:
        for dependency in nodes[todo.pop()]["deps"]:
            linked = any(kind["kind"] is None for kind in dependency["dep_kinds"])
            macro = "proc-macro" in packages[dependency["pkg"]]["targets"][0]["kind"]
            if linked and not macro and dependency["pkg"] not in seen:
                seen.add(dependency["pkg"])
                todo.append(dependency["pkg"])
    others = [packages[identity] for identity in seen if packages[identity]["source"]]
    return sorted(others, key=lambda package: (package["name"], package["version"]))


def text(package):
    """The short one of the licences' texts that the crate brings; none, if it brings none."""
    folder = pathlib.Path(package["manifest_path"]).parent
    names = ("LICEN", "COPYING", "UNLICENSE")
    found = [path for path in folder.iterdir() if path.name.upper().startswith(names) and path.is_file()]
    files = sorted(found, key=lambda path: path.stat().st_size)
    return files[0].read_text(encoding="utf-8", errors="replace").strip() if files else ""


def main():
    print("starverbs carries these Rust crates, and Rust's standard library:")
    print("https://www.rust-lang.org, MIT OR Apache-2.0")
    for package in crates():
        where = package["repository"] or "https://crates.io/crates/" + package["name"]
        print(f"\n{'=' * 78}\n{package['name']} {package['version']}: {package['license']}\n{where}\n")
        print(text(package) or "\n".join(package["authors"]))


if __name__ == "__main__":
    sys.exit(main())
