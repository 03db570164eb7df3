"""Measure the memory of training over many short steps, and fail if it keeps growing.

pretrain.py trains a model of 4 layers that are 128 wide, on this machine's CPU with gloo: with one
rank and with two, with and without a pipeline. The table shows the resident memory of the rank that
grows most. Growth is the slope of a line through the samples after the first 300 steps, in which
allocators, buffers and imports reach their final size.

    python benchmarks/memory_growth.py [--steps 4000] [--only "1 rank"]
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # imports start at the repository, not at this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from models.errors import UserError
from threefold.config.loading import REPOSITORY
from threefold.prove.shrink import write_corpus
from threefold.run_folder.folder import RunFolder
from threefold.runtime.command_line import count
from threefold.runtime.ranks import CPU_VARIABLES, log_tails, start_interpreters

VOCABULARY = 512
SETTINGS = (  # of recipes/tiny.toml, changed for all cases
    *("model.hidden_size=128", "model.heads=4", "model.ffn_hidden_size=256"),
    *(f"model.vocab_size={VOCABULARY}", "model.sequence_length=64"),
    *("batch.global_sequences=4", "batch.micro_sequences=1", "training.evaluate_every=0"),
    "tracking.mode=disabled",
)
CASES = {  # name -> number of ranks, and more changes of the recipe
    "1 rank": (1, ["layout.pipeline=1"]),
    "2 ranks, data-parallel": (2, ["layout.pipeline=1"]),
    "2 ranks, data-parallel, ZeRO-3": (
        2,
        ["layout.pipeline=1", "deepspeed=ds_configs/zero3_fp32.json"],
    ),
    "2 ranks, pipeline": (2, ["layout.pipeline=2"]),
}
MAX_GROWTH = 5.0  # MB per 1,000 steps
SETTLED_STEPS = 300  # steps before growth is measured
SECONDS_BETWEEN_SAMPLES = 0.5
SHOWN_SAMPLES = 6  # of a case, in the table
MIN_SAMPLES = 10  # for a slope


class Sample(NamedTuple):
    """The resident memory of a rank when a step was the newest one that the run had recorded."""

    step: int
    megabytes: float


def main() -> None:
    """Train every case, print a line for each, and end with code 1 if one grows too fast."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=count, default=4000)
    parser.add_argument("--only", choices=CASES, help="train only this case")
    options = parser.parse_args()
    print("| | resident memory in MB at step | MB per 1,000 steps |\n|---|---|---|")
    too_fast = []
    for name in [options.only] if options.only else CASES:
        try:
            samples = max(train(name, options.steps), key=growth)
        except UserError as problem:
            parser.error(f"--steps {options.steps}, {name}: {problem}")
        print(f"| {name} | {table_cell(samples)} | {growth(samples):.1f} |", flush=True)
        if growth(samples) > MAX_GROWTH:
            too_fast.append(name)
    if too_fast:
        sys.exit(f"memory grows by more than {MAX_GROWTH:g} MB per 1,000 steps: {too_fast}")


def train(name: str, steps: int, variables: Mapping[str, str] | None = None) -> list[list[Sample]]:
    """Train a case, and return the samples of each rank.

    variables: environment variables of the ranks
    """
    size, changes = CASES[name]
    with tempfile.TemporaryDirectory(prefix="threefold-benchmark-") as name_of_folder:
        folder = Path(name_of_folder)
        corpus, run = folder / "corpus", RunFolder(folder / "run")
        write_corpus(corpus, VOCABULARY)
        command = [str(REPOSITORY / "recipes/pretrain.py"), "--run-dir", str(run.path)]
        for setting in (
            *(*SETTINGS, f"training.steps={steps}", f"checkpoint.every={steps}"),
            f'data.train=[{{path="{corpus}/train"}}]',
            *(f"data.{key}={corpus / key}" for key in ("validation", "tokenizer")),
            *changes,
        ):
            command += ["--set", setting]
        ranks = start_interpreters(
            size, command, logs=folder, variables=CPU_VARIABLES | dict(variables or {})
        )
        try:
            samples = watch(list(ranks.running.values()), run)
        finally:  # also after Ctrl-C
            ranks.stop()
        if any(ranks.ended().values()):
            sys.exit(f"{name} failed:\n{log_tails(folder.glob('rank*.log'))}")
    return samples


def watch(ranks: Sequence[subprocess.Popen[bytes]], run: RunFolder) -> list[list[Sample]]:
    """Sample the memory of each rank until all have ended."""
    samples: list[list[Sample]] = [[] for _ in ranks]
    metrics = run.path / "metrics.jsonl"
    while None in [rank.poll() for rank in ranks]:
        if any(rank.returncode for rank in ranks):
            for rank in ranks:
                rank.kill()
        step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        for rank, own in zip(ranks, samples, strict=True):
            if step and (megabytes := resident_megabytes(rank.pid)):
                own.append(Sample(step, megabytes))
        time.sleep(SECONDS_BETWEEN_SAMPLES)
    return samples


def resident_megabytes(process: int) -> float:
    """Return the resident memory of a process, in 10^6 bytes; 0 if the process has ended."""
    try:
        pages = Path(f"/proc/{process}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0.0
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6


def settled_samples(samples: Sequence[Sample], settled: int) -> list[Sample]:
    """Return the samples after the first steps, except those of the save after the last step."""
    last = samples[-1].step if samples else 0
    return [sample for sample in samples if settled < sample.step < last]


def growth(samples: Sequence[Sample], settled: int = SETTLED_STEPS) -> float:
    """Return the slope of resident memory over steps, in MB per 1,000 steps.

    Args:
        samples: the samples of a rank
        settled: number of steps before the first sample that counts

    Raises:
        UserError: there are too few samples after these steps.
    """
    counted = settled_samples(samples, settled)
    if len({sample.step for sample in counted}) < MIN_SAMPLES:
        raise UserError(
            f"only {len(counted)} samples of memory after step {settled}; use more --steps"
        )
    steps, megabytes = np.array(counted).T
    return 1000 * float(np.polyfit(steps, megabytes, 1)[0])


def table_cell(samples: Sequence[Sample]) -> str:
    """Return the memory at evenly spaced steps, such as "300: 444, 400: 445"."""
    counted = settled_samples(samples, SETTLED_STEPS)
    chosen = np.linspace(0, len(counted) - 1, SHOWN_SAMPLES).round().astype(int)
    return ", ".join(f"{counted[i].step}: {counted[i].megabytes:.0f}" for i in chosen)


if __name__ == "__main__":
    main()
