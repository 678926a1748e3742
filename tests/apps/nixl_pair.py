#!/usr/bin/env python3
"""Two NIXL agents over UCX: WRITEs and READs of many blocks, with a notification each; all data checked.

usage: nixl_pair.py server|client ADDRESS PORT (the server's)
"""

import base64
import sys
import time

from nixl_cu12._api import nixl_agent

import transfers

PATIENCE = 120


def until(check, what):
    """Asks until it is so."""
    deadline = time.monotonic() + PATIENCE
    while not check():
        if time.monotonic() > deadline:
            sys.exit(f"{what}: not within {PATIENCE} s")


def main(side, address, port):
    agent, buffer = nixl_agent(side), transfers.Buffer()
    registered = agent.register_memory([(buffer.address, transfers.SIZE, 0, "buffer")], "DRAM")
    words = transfers.Words(side, address, int(port))
    words.say([base64.b64encode(agent.get_agent_metadata()).decode(), buffer.address])
    metadata, remote = words.hear()
    peer = agent.add_remote_agent(base64.b64decode(metadata))
    peer = peer.decode() if isinstance(peer, bytes) else peer
    notifications = 0

    def move(operation, blocks):
        nonlocal notifications
        here, there = (
            [(base + offset, length, 0) for offset, length in blocks] for base in (buffer.address, remote)
        )
        notifications += 1
        transfer = agent.initialize_xfer(
            operation,
            agent.get_xfer_descs(here, "DRAM"),
            agent.get_xfer_descs(there, "DRAM"),
            peer,
            b"%d" % notifications,
        )
        if agent.transfer(transfer) == "ERR":
            sys.exit(f"{operation}: refused")

        def is_done():
            state = agent.check_xfer_state(transfer)
            return sys.exit(f"{operation}: failed") if state == "ERR" else state == "DONE"

        until(is_done, operation)
        agent.release_xfer_handle(transfer)

    if side == "server":
        transfers.serve(words, buffer)
        expected = {b"%d" % number for number in range(1, 2 * len(transfers.TRANSFERS) + 1)}
        came = set()
        until(lambda: came.update(*agent.get_new_notifs().values()) or came >= expected, "notifications")
        words.say("notified")
    else:
        transfers.drive(words, buffer, lambda b: move("WRITE", b), lambda b: move("READ", b))
        words.hear()
    agent.remove_remote_agent(peer)
    agent.deregister_memory(registered)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
