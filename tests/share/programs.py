"""What Python programs do with large memory: it prints the same with libstarverbs-share.so and without."""

import hashlib
import mmap
import multiprocessing
import os
import subprocess
import sys
import threading

MIB = 1 << 20


def digest(data):
    return hashlib.sha256(data).hexdigest()[:16]


def grown():
    data = bytearray()
    for step in range(200):
        data += bytes([step]) * 100_000
        if step % 50 == 49:
            del data[: MIB // 2]
    return digest(data)


def mapped():
    with mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        area[5 * MIB] = 7
        if hasattr(area, "madvise"):
            area.madvise(mmap.MADV_DONTNEED)
        area[1] = 9
        area.resize(16 * MIB)
        return digest(area), len(area)


def in_child(data):
    data[0] ^= 1
    return digest(data)


def forked():
    data = bytearray(os.urandom(1) * (20 * MIB))
    data[:] = b"x" * len(data)
    with multiprocessing.get_context("fork").Pool(3) as pool:
        results = pool.map(in_child, [data] * 4)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        data[1] = 0
        os.write(write, digest(data).encode())
        os._exit(0)
    data[2] = 0
    os.waitpid(child, 0)
    return results, os.read(read, 100), digest(data)


def threads():
    sums = [None] * 4

    def work(index):
        parts = [bytes([index]) * (MIB + part) for part in range(40)]
        sums[index] = digest(b"".join(parts))

    workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for worker in workers:
        worker.start()
    children = [subprocess.run(["true"], check=False).returncode for _ in range(5)]
    for worker in workers:
        worker.join()
    return sums, children


def arrays():
    try:
        import numpy
    except ImportError:
        return "no numpy"
    field = numpy.arange(3_000_000, dtype=numpy.float64)
    for _ in range(5):
        field = numpy.concatenate([field[::2] * 2, field[1::2]])
    return digest(field.tobytes())


if __name__ == "__main__":
    for part in (grown, mapped, forked, threads, arrays):
        print(part.__name__, part())
        sys.stdout.flush()
