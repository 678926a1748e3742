#!/usr/bin/env python3
"""Makes a Python wheel of what `make build` made: the command and the libraries, for `pip install`.

Usage: wheel.py, with DIST= the folder to make it from (dist), for the machine that it was built for. CC is
that machine's compiler.

In an environment they lie as `make install` puts them: bin/starverbs, lib/starverbs. A wheel holds no links,
and a second copy of the library would be a second card. So librdmacm.so.1 and the names without number are
small libraries that need libibverbs.so.1 and have nothing of their own but its versions' names. Those in
preload find it loaded: libstarverbs.so has that name, too.
"""

import base64
import hashlib
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
ELF = ROOT / "tools/scripts/elf.sh"


def output(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def compiler(machine):
    """The C compiler for a machine, with its options."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    if machine == platform.machine():
        return ["cc"]
    gcc = f"{machine}-linux-gnu-gcc"
    if shutil.which(gcc) or not shutil.which("clang"):
        return [gcc]
    return ["clang", f"--target={machine}-linux-gnu", "-fuse-ld=lld"]


def alias(machine, library, folder, name):
    """A library of that name that leads to `library`, and has the versions that programs ask of it."""
    nodes = re.findall(r"^([A-Z_]+[0-9.]+) \{", (ROOT / "cdylib/abi/libibverbs.map").read_text(), re.M)
    script = folder / "nodes"
    script.write_text("".join(f"{node} {{ }};\n" for node in nodes))
    made = folder / name
    options = [f"-soname={name}", f"--version-script={script}", "--no-as-needed",
               "-rpath=$ORIGIN:$ORIGIN/..", "-znow"]
    options = [f"-Wl,{option}" for option in options]
    subprocess.run([*compiler(machine), "-shared", "-nostdlib", "-o", made, *options, library], check=True)
    return made


def contents(folder, dist, version):
    """What the wheel holds, but for its metadata: names, files, modes."""
    libraries = ("libibverbs.so.1", "libstarverbs.so", "libstarverbs-share.so")
    names = [dist / "bin/starverbs", *(dist / "lib" / library for library in libraries)]
    copies = [folder / path.name for path in names]
    for path, copy in zip(names, copies):
        copy.write_bytes(path.read_bytes())
    subprocess.run([ELF, "strip", *copies], check=True)
    machine = output(ELF, "machine", copies[0])
    glibc = output(ELF, "glibc", *copies)
    names = ("librdmacm.so.1", "libibverbs.so", "librdmacm.so")
    aliases = [alias(machine, copies[1], folder, name) for name in names]
    data = f"starverbs-{version}.data"
    files = [(f"{data}/scripts/starverbs", copies[0], 0o755)]
    lib = f"{data}/data/lib/starverbs"
    files += [(f"{lib}/{path.name}", path, 0o755) for path in [*copies[1:], *aliases]]
    files += [(f"{lib}/preload/{path.name}", path, 0o755) for path in aliases]
    pages = sorted((ROOT / "docs/man").glob("*.[0-9]"))
    files += [(f"{data}/data/share/man/man{path.suffix[1:]}/{path.name}", path, 0o644) for path in pages]
    # The platform that pip compares with its own: a glibc at least as new as the newest symbol that is
    # imported.
    return files, f"py3-none-manylinux_{glibc.replace('.', '_')}_{machine}"


def metadata(version):
    head = [
        "Metadata-Version: 2.1", "Name: starverbs", f"Version: {version}",
        "Summary: RDMA verbs without RDMA hardware: runs RDMA programs on a network card in software",
        "License: MIT OR Apache-2.0", "Requires-Python: >=3.7",
        "Classifier: Operating System :: POSIX :: Linux", "Description-Content-Type: text/markdown",
    ]
    return "\n".join(head) + "\n\n" + (ROOT / "README.md").read_text()


def write(target, files, epoch):
    """The wheel: files, and the record of them as its last."""
    record = []
    moment = time.gmtime(max(epoch, 315532800))[:6]
    name = next(name for name, _, _ in files if name.endswith("/WHEEL")).replace("WHEEL", "RECORD")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, content, mode in files:
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(content)}")
            add(wheel, path, content, mode, moment)
        add(wheel, name, "\n".join([*record, f"{name},,", ""]).encode(), 0o644, moment)


def add(wheel, path, content, mode, moment):
    entry = zipfile.ZipInfo(path, moment)
    entry.external_attr = (0o100000 | mode) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    wheel.writestr(entry, content)


def commit_time():
    command = ["git", "log", "-1", "--format=%ct"]
    output = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return int(os.environ.get("SOURCE_DATE_EPOCH") or output.stdout or time.time())


def main():
    dist = ROOT / os.environ.get("DIST", "dist")
    if not (dist / "bin/starverbs").exists():
        sys.exit(f"wheel.py: {dist} is not whole: `make build` first")
    version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.M)[1]
    with tempfile.TemporaryDirectory() as folder:
        files, tag = contents(pathlib.Path(folder), dist, version)
        files = [(name, path.read_bytes(), mode) for name, path, mode in files]
    info = f"starverbs-{version}.dist-info"
    about = f"Wheel-Version: 1.0\nGenerator: starverbs\nRoot-Is-Purelib: false\nTag: {tag}\n"
    notices = subprocess.run([ROOT / "tools/scripts/notices.py"], check=True, stdout=subprocess.PIPE).stdout
    texts = {"METADATA": metadata(version).encode(), "WHEEL": about.encode(), "licenses/crates.txt": notices}
    files += [(f"{info}/{name}", text, 0o644) for name, text in texts.items()]
    for path in sorted(ROOT.glob("LICENSE*")):
        files.append((f"{info}/licenses/{path.name}", path.read_bytes(), 0o644))
    target = dist / f"starverbs-{version}-{tag}.whl"
    write(target, files, commit_time())
    print(target.relative_to(ROOT))


if __name__ == "__main__":
    main()
