#!/usr/bin/env python3
"""Two of Mooncake's transfer engines, protocol rdma: WRITEs and READs of many blocks; all data checked.

usage: mooncake_pair.py server|client ADDRESS PORT OWN_ADDRESS (address and port are the server's)
"""

import sys

from mooncake.engine import TransferEngine

import transfers

DEVICE = "star0"


def main(side, address, port, own):
    engine, buffer = TransferEngine(), transfers.Buffer()
    if engine.initialize(own, "P2PHANDSHAKE", "rdma", DEVICE) != 0:
        sys.exit("the engine does not start")
    if engine.register_memory(buffer.address, transfers.SIZE) != 0:
        sys.exit("the buffer cannot be registered")
    words = transfers.Words(side, address, int(port))
    words.say([f"{own}:{engine.get_rpc_port()}", buffer.address])
    peer, remote = words.hear()

    def move(transfer, blocks):
        here, there = ([base + offset for offset, _ in blocks] for base in (buffer.address, remote))
        if transfer(peer, here, there, [length for _, length in blocks]) != 0:
            sys.exit("a transfer failed")

    if side == "server":
        transfers.serve(words, buffer)
    else:
        transfers.drive(
            words,
            buffer,
            lambda b: move(engine.batch_transfer_sync_write, b),
            lambda b: move(engine.batch_transfer_sync_read, b),
        )
    if engine.unregister_memory(buffer.address) != 0:
        sys.exit("the buffer cannot be deregistered")


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
