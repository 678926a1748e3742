#!/usr/bin/env python3
"""How fast two of Mooncake's transfer engines on this host move batches of 64 blocks of 64 KiB: GB/s of
WRITEs and of READs.

usage: mooncake_speed.py [rdma|tcp] [SECONDS]
Under `starverbs run --`, in the virtual environment of `make apps` (target/apps-venv-mooncake)."""

import subprocess
import sys
import time

from mooncake.engine import TransferEngine

import transfers

ADDRESS, PORT = "127.0.0.1", 24999
BLOCK, BLOCKS = 64 << 10, 64


def start(protocol):
    """An engine with a registered buffer."""
    engine, buffer = TransferEngine(), transfers.Buffer()
    if engine.initialize(ADDRESS, "P2PHANDSHAKE", protocol, "star0" if protocol == "rdma" else "") != 0:
        sys.exit("the engine does not start")
    if engine.register_memory(buffer.address, transfers.SIZE) != 0:
        sys.exit("the buffer cannot be registered")
    return engine, buffer


def serve(protocol):
    """The side whose memory is written and read."""
    engine, buffer = start(protocol)
    words = transfers.Words("server", ADDRESS, PORT)
    words.say([f"{ADDRESS}:{engine.get_rpc_port()}", buffer.address])
    words.hear()


def drive(protocol, seconds):
    """The side that moves; prints what it did."""
    engine, buffer = start(protocol)
    deadline = time.monotonic() + 60
    while True:
        try:
            words = transfers.Words("client", ADDRESS, PORT)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                sys.exit("the other engine does not start")
            time.sleep(0.1)
    peer, remote = words.hear()
    here, there = ([base + n * BLOCK for n in range(BLOCKS)] for base in (buffer.address, remote))
    for name, transfer in (
        ("write", engine.batch_transfer_sync_write),
        ("read", engine.batch_transfer_sync_read),
    ):
        batches, began = 0, time.monotonic()
        while time.monotonic() < began + seconds:
            if transfer(peer, here, there, [BLOCK] * BLOCKS) != 0:
                sys.exit("a transfer failed")
            batches += 1
        print(f"{name} {batches * BLOCKS * BLOCK / (time.monotonic() - began) / 1e9:.2f} GB/s", flush=True)
    words.say("done")


def main():
    protocol = sys.argv[1] if len(sys.argv) > 1 else "rdma"
    if protocol == "server":
        return serve(sys.argv[2])
    server = subprocess.Popen([sys.executable, __file__, "server", protocol], stderr=subprocess.DEVNULL)
    try:
        drive(protocol, float(sys.argv[2]) if len(sys.argv) > 2 else 5)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
