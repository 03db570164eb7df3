"""Compare the speed of prepare_data.py with `datasets.map` and Megatron's IndexedDatasetBuilder.

Both read the same .jsonl (the Python sources of this environment), use the same tokenizer and two
processes on the same two cores, one after the other, several times; whole commands are timed.

    python benchmarks/preparing.py
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
import os
import statistics
import subprocess
import sysconfig
import tempfile
import time

import numpy as np

from threefold.config.loading import REPOSITORY
from threefold.data.token_file import TokenFile

PROCESSES = 2
PLAIN = """
import sys
import numpy, torch
from datasets import load_dataset
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from transformers import AutoTokenizer

source, folder, processes = sys.argv[1], sys.argv[2], int(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(folder + "/tokenizer", trust_remote_code=False)

def encode(batch):
    encoded = tokenizer(batch["text"], add_special_tokens=False, verbose=False)
    return {"tokens": [ids + [tokenizer.eos_token_id] for ids in encoded["input_ids"]]}

texts = load_dataset("json", data_files=source, split="train", cache_dir=folder + "/cache")
encoded = texts.map(encode, batched=True, num_proc=processes, remove_columns=texts.column_names)
builder = IndexedDatasetBuilder(folder + "/plain.bin", dtype=numpy.uint16)
for document in encoded:
    builder.add_document(torch.tensor(document["tokens"]), [len(document["tokens"])])
builder.finalize(folder + "/plain.idx")
"""


def main() -> None:
    """Measure and print both times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100, help="of text, at most")
    parser.add_argument("--vocab-size", type=int, default=16000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:PROCESSES])
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room)
        size = write_source(folder, options.megabytes * 10**6)
        make_tokenizer(folder, options.vocab_size)
        print(
            "| round | datasets.map + builder, s | prepare_data.py, s | ratio |\n|---|---|---|---|"
        )
        ratios = []
        for number in range(1, options.rounds + 1):
            if number % 2:
                plain, ours = run_plain(folder), run_ours(folder)
            else:
                ours, plain = run_ours(folder), run_plain(folder)
            ratios.append(plain / ours)
            print(f"| {number} | {plain:.1f} | {ours:.1f} | {ratios[-1]:.2f} |", flush=True)
        tokens = compare(folder)
        print(f"\n{size / 1e6:.0f} MB, {tokens:,} tokens; the same ones. "
              f"Median ratio {statistics.median(ratios):.2f}")  # fmt: skip


def write_source(folder: Path, most: int) -> int:
    """Write Python sources as a .jsonl, and return its size in bytes."""
    size = 0
    with (folder / "source.jsonl").open("w") as stream:
        stdlib, packages = (Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))
        files = [f for f in sorted(stdlib.rglob("*.py")) if not f.is_relative_to(packages)]
        for file in [*files, *sorted(packages.rglob("*.py"))]:
            text = file.read_text(errors="ignore")
            if text.strip() and size < most:
                size += stream.write(json.dumps({"text": text}) + "\n")
    return size


def make_tokenizer(folder: Path, vocab_size: int) -> None:
    """Train a tokenizer on the standard library."""
    command = ["--output", folder / "made", "--vocab-size", vocab_size]
    prepare(*command)
    (folder / "made" / "tokenizer").rename(folder / "tokenizer")


def run_plain(folder: Path) -> float:
    """Return the seconds of `datasets.map` and the builder."""
    subprocess.run(["rm", "-rf", folder / "cache", folder / "plain.bin", folder / "plain.idx"])
    started = time.perf_counter()
    arguments = [PLAIN, folder / "source.jsonl", folder, PROCESSES]
    subprocess.run(
        [sys.executable, "-c", *map(str, arguments)], check=True, stderr=subprocess.DEVNULL
    )
    return time.perf_counter() - started


def run_ours(folder: Path) -> float:
    """Return the seconds of prepare_data.py."""
    subprocess.run(["rm", "-rf", folder / "ours"])
    started = time.perf_counter()
    source = ["--source", folder / "source.jsonl", "--tokenizer", folder / "tokenizer"]
    prepare(*source, "--output", folder / "ours", "--processes", PROCESSES)
    return time.perf_counter() - started


def prepare(*arguments: object) -> None:
    """Run prepare_data.py."""
    command = [sys.executable, "recipes/prepare_data.py", *map(str, arguments)]
    subprocess.run(command, check=True, cwd=REPOSITORY, stdout=subprocess.DEVNULL)


def compare(folder: Path) -> int:
    """The number of tokens, which both must have, with the same number of each id."""
    ours = sum(counts(folder / "ours" / part) for part in ("train", "validation"))
    plain = counts(folder / "plain")
    assert np.array_equal(ours, plain), "the two have different tokens"
    return int(plain.sum())


def counts(path: Path) -> np.ndarray:
    """Return the number of occurrences of each id in a token file."""
    file = TokenFile(path)
    return np.bincount(file.read(0, file.count), minlength=2**16)


if __name__ == "__main__":
    main()
