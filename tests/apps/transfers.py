"""What the transfer engines' programs share: a registered buffer a side, words over TCP, and transfers whose
data is checked.

A transfer is (length of a block, blocks). The server's buffer is written, then read, by the client: block by
block, in reverse order, at addresses that are not aligned. All of either buffer is compared, so bytes beside
a block count, too."""

import ctypes
import json
import random
import socket
import sys

TRANSFERS = [(1, 1), (64, 100), (4096, 64), (65536, 64), (65537, 30), (1 << 20, 6), (7 << 20, 1)]
SIZE = 8 << 20


class Buffer:
    """Bytes at an address."""

    def __init__(self):
        self.bytes = ctypes.create_string_buffer(SIZE)
        self.address = ctypes.addressof(self.bytes)

    def fill(self, seed):
        """Fills all of it with bytes that `seed` tells."""
        ctypes.memmove(self.address, random.Random(seed).randbytes(SIZE), SIZE)

    def check(self, mine, theirs, blocks, what):
        """Ends the program unless the blocks hold the bytes of seed `theirs`, all else those of `mine`."""
        expected = bytearray(random.Random(mine).randbytes(SIZE))
        source = random.Random(theirs).randbytes(SIZE)
        for offset, length in blocks:
            expected[offset : offset + length] = source[offset : offset + length]
        if self.bytes.raw != expected:
            at = next(i for i, (a, b) in enumerate(zip(self.bytes.raw, expected)) if a != b)
            sys.exit(f"{what}: byte {at} is wrong")


class Words:
    """Lines of JSON between the two sides."""

    def __init__(self, side, address, port):
        if side == "server":
            with socket.create_server((address, port)) as listener:
                self.socket = listener.accept()[0]
        else:
            self.socket = socket.create_connection((address, port), timeout=60)
        self.socket.settimeout(300)
        self.lines = self.socket.makefile("r")

    def say(self, what):
        self.socket.sendall(json.dumps(what).encode() + b"\n")

    def hear(self):
        line = self.lines.readline()
        return json.loads(line) if line else sys.exit("the other side has gone")


def blocks(length, count):
    """Where the blocks of a transfer lie: (offset, length), last first."""
    return [(3 + number * (length + 5), length) for number in reversed(range(count))]


def serve(words, buffer):
    """The server's part: it only fills and compares; its memory is written and read meanwhile."""
    for number, (length, count) in enumerate(TRANSFERS):
        theirs, mine = 2 * number, 2 * number + 1
        buffer.fill(mine)
        words.say("filled")
        words.hear()
        buffer.check(mine, theirs, blocks(length, count), f"written, {count} blocks of {length}")
        buffer.fill(mine)
        words.say("checked")
        words.hear()
    words.say("done")
    print("server: all bytes are right")


def drive(words, buffer, write, read):
    """The client's part; `write` and `read` take a list of (offset, length), the same in both buffers."""
    moved = 0
    for number, (length, count) in enumerate(TRANSFERS):
        mine, theirs = 2 * number, 2 * number + 1
        words.hear()
        buffer.fill(mine)
        write(blocks(length, count))
        words.say("written")
        words.hear()
        read(blocks(length, count))
        buffer.check(mine, theirs, blocks(length, count), f"read, {count} blocks of {length}")
        words.say("read")
        moved += 2 * length * count
    words.hear()
    print(f"all {moved} bytes written and read are right")
