"""Measure the speed of reading windows in a run's order, and the start-up time on a huge corpus.

The corpus is a sparse file larger than this machine's memory, its windows have 2,048 tokens, and
everything runs on one core. The virtual corpus of 10^12 tokens has no file: only the indices of
its windows are computed.

    python benchmarks/reading.py
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # imports start at the repository, not at this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import os
import resource
import tempfile
import time

import numpy as np

from threefold.data.dataset import SequenceView
from threefold.data.sample_order import permuted
from threefold.data.token_file import HEADER, MAGIC, TokenFile

SEQUENCE_LENGTH = 2048
BATCH = 512  # windows whose indices are computed together, as for a step
SECONDS = 10.0
VIRTUAL_TOKENS = 10**12


def write_sparse(path: Path, tokens: int) -> None:
    """Write a sparse token file of zeros, in several documents because lengths are int32."""
    longest = 2**30
    count = -(-tokens // longest)
    lengths = np.full(count, longest, "<i8")
    lengths[-1] = tokens - (count - 1) * longest
    with path.with_name(path.name + ".bin").open("wb") as stream:
        stream.truncate(2 * tokens)
    with path.with_name(path.name + ".idx").open("wb") as stream:
        stream.write(HEADER.pack(MAGIC, 1, 8, count, count + 1))
        stream.write(lengths.astype("<i4").tobytes())
        stream.write(((np.cumsum(lengths) - lengths) * 2).astype("<i8").tobytes())
        stream.write(np.arange(count + 1, dtype="<i8").tobytes())


def memory() -> float:
    """Return the resident memory of this process in 10^6 bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    """Run the benchmark and print the results."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
    before, started = memory(), time.perf_counter()
    places = permuted(np.arange(BATCH) + 123_456_789, VIRTUAL_TOKENS // SEQUENCE_LENGTH, "1/0/0")
    seconds = time.perf_counter() - started
    assert len(set(places.tolist())) == BATCH
    print(f"first {BATCH} windows of 10^12 tokens, from sample 123,456,789 on: {seconds:.4f} s, ")
    print(f"  {memory() - before:.1f} MB more than the imports")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sparse"
        write_sparse(path, int(1.2 * machine) // 2)
        started = time.perf_counter()
        windows = SequenceView(TokenFile(path), SEQUENCE_LENGTH)
        seconds = time.perf_counter() - started
        print(f"opened {2 * windows.file.count / 1e9:.0f} GB in {seconds:.4f} s", end="")
        print(f" (this machine has {machine / 1e9:.0f} GB)")

        def read_batch(first: int) -> None:
            batch = permuted(np.arange(first, first + BATCH), windows.count, "1/0/0")
            np.stack([windows.read(index) for index in batch.tolist()]).astype(np.int64)

        read_batch(0)
        read, before, started = 0, memory(), time.perf_counter()
        while time.perf_counter() - started < SECONDS:
            read_batch(BATCH + read)
            read += BATCH
        speed = read / (time.perf_counter() - started)
        grown = memory() - before
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(f"{speed:,.0f} windows of {SEQUENCE_LENGTH} tokens per second, {read:,} in total")
    print(f"memory {grown:+.1f} MB meanwhile, at most {most:.0f} MB")


if __name__ == "__main__":
    main()
