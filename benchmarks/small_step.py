"""Compare the speed of a small model's step with nanoGPT's and with a plain loop on transformers.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/small_step.py --nanogpt nanoGPT
    python benchmarks/small_step.py --rounds 30 --json

All train nanoGPT's model for a CPU: 4 layers, 128 wide, 12 sequences of 64 characters, fp32. In
such a step everything besides the arithmetic counts.

- `ours`: recipes/pretrain.py with recipes/shakespeare-cpu.toml, as a user runs it: with
  supervision, the timeline of the steps, the prefetcher, metrics on disk and W&B (offline).
- `nanogpt`: train.py of the given clone, with the options of its README for a CPU.
- `transformers`: `plain_loop` of published_results.py around GPT-2 of transformers.

Contestants have separate processes on one core, and take turns of several steps. Ratios are medians
over the rounds, of wall time and of the CPU time of all processes and threads of a contestant. A
ratio above 1 means that the other contestant is slower than ours.
"""

import argparse
import json
import os
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # imports start at the repository, not at this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")

import psutil  # type: ignore[import-untyped]
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from threefold.runtime.output import stdout_for_json

with stdout_for_json(True):  # DeepSpeed logs to standard output while it is imported
    from benchmarks.one_step.contestants import warm_libraries
    from benchmarks.published_results import (
        RECIPE,
        REPOSITORY,
        SIZES,
        TEXT,
        plain_loop,
        prepare,
        python,
    )
    from benchmarks.taking_turns import Player, Turn, cores_at_hand, players
    from recipes import pretrain
    from threefold.config.loading import load_recipe
    from threefold.pretrain.run import Run
    from threefold.runtime.processes import keep_memory

OURS = "ours"
MORE_STEPS_THAN_TAKEN = 10**6
WARM_UP_ROUNDS = 3  # W&B's process starts in the first one
NANOGPT_OPTIONS = [  # README of nanoGPT, "I only have a macbook"
    "config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--eval_iters=20",
    "--log_interval=1", "--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4",
    "--n_embd=128", f"--max_iters={MORE_STEPS_THAN_TAKEN}", "--lr_decay_iters=2000",
    "--dropout=0.0", f"--eval_interval={MORE_STEPS_THAN_TAKEN}",
]  # fmt: skip
GPT2 = GPT2Config(
    **SIZES, n_positions=64, n_embd=128, n_layer=4, n_head=4, activation_function="gelu",
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip


def main() -> None:
    """Run the contestants, and print the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nanogpt", type=Path, help="clone of nanoGPT; default: without it")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds (default: 20)")
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn (default: 20)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.nanogpt and not (options.nanogpt / "train.py").is_file():
        parser.error(f"--nanogpt {options.nanogpt} has no train.py; use a clone of nanoGPT")
    os.environ["WANDB_SILENT"] = "true"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plays: dict[str, tuple[Any, ...]] = {OURS: (play_ours, folder / "run")}
        if options.nanogpt:
            copy_nanogpt(options.nanogpt, folder / "nanogpt")
            plays["nanogpt"] = play_nanogpt, folder / "nanogpt"
        plays["transformers"] = (play_transformers,)
        os.chdir(REPOSITORY)
        with stdout_for_json(options.json):
            prepare()
        cores = cores_at_hand()
        starts = {
            name: partial(Player, play, options.steps, *arguments, cores=cores)
            for name, (play, *arguments) in plays.items()
        }
        with stdout_for_json(options.json), players(starts) as contestants:
            rounds = [take_round(contestants) for _ in range(WARM_UP_ROUNDS + options.rounds)]
    report(rounds[WARM_UP_ROUNDS:], options.steps, as_json=options.json)


def copy_nanogpt(clone: Path, folder: Path) -> None:
    """Copy a clone of nanoGPT, and prepare its data from the text in this repository."""
    shutil.copytree(clone, folder, ignore=shutil.ignore_patterns(".git"))
    data = folder / "data/shakespeare_char"
    shutil.copy(REPOSITORY / TEXT, data / "input.txt")  # prepare.py would download it
    python(str(data / "prepare.py"))


def take_round(contestants: dict[str, Player]) -> dict[str, tuple[float, float]]:
    """Let each contestant take a turn; return its wall seconds and CPU seconds."""
    seconds = {}
    for name, player in contestants.items():
        player.settle()  # also the threads that have been started since
        before = cpu_seconds(player)
        turn = player.step()
        seconds[name] = turn.seconds, cpu_seconds(player) - before
    return seconds


def cpu_seconds(player: Player) -> float:
    """Return the CPU seconds of all processes of a contestant."""
    total = 0.0
    for process in player.ranks.processes:
        root = psutil.Process(process.pid)
        for member in [root, *root.children(recursive=True)]:
            times = member.cpu_times()
            total += times.user + times.system
    return total


def report(rounds: list[dict[str, tuple[float, float]]], steps: int, *, as_json: bool) -> None:
    """Print each contestant's milliseconds per step, and the ratios to ours."""
    rows = {}
    for name in rounds[0]:
        wall, cpu = (median(seconds[name][kind] for seconds in rounds) for kind in (0, 1))
        wall_ratio, cpu_ratio = (
            median(seconds[name][kind] / seconds[OURS][kind] for seconds in rounds)
            for kind in (0, 1)
        )
        rows[name] = {
            "wall_ms": 1e3 * wall / steps,
            "cpu_ms": 1e3 * cpu / steps,
            "wall_over_ours": wall_ratio,
            "cpu_over_ours": cpu_ratio,
        }
    if as_json:
        print(json.dumps(rows))
        return
    print("contestant     wall ms   CPU ms  wall/ours   CPU/ours   (per step)")
    for name, row in rows.items():
        print(
            f"{name:12s} {row['wall_ms']:9.1f} {row['cpu_ms']:8.1f} {row['wall_over_ours']:10.3f} "
            f"{row['cpu_over_ours']:10.3f}"
        )


class Turns:
    """A function to call after each step: it ends a turn, and waits for the next one."""

    def __init__(self, pipe: Connection, steps: int):
        self.pipe, self.steps, self.left = pipe, steps, 0
        self.started: float | None = None

    def __call__(self) -> None:
        """Count a step; after the last one of a turn, wait for the parent."""
        self.left -= 1
        if self.left > 0:
            return
        now = time.perf_counter()
        self.pipe.send("ready" if self.started is None else Turn(self.started, now))
        self.pipe.recv()
        self.started, self.left = time.perf_counter(), self.steps


def play_ours(pipe: Connection, steps: int, run_folder: Path) -> None:
    """Run recipes/pretrain.py."""
    torch.set_num_threads(1)
    keep_memory()  # as the run will
    warm_libraries()
    settings = (
        f"training.steps={MORE_STEPS_THAN_TAKEN}",
        f"checkpoint.every={MORE_STEPS_THAN_TAKEN}",
        "training.evaluate_every=0",
        "tracking.mode=offline",
    )
    words = [word for setting in settings for word in ("--set", setting)]
    sys.argv = ["pretrain.py", RECIPE, "--run-dir", str(run_folder), *words]
    pretrain.train = partial(_train_in_turns, Turns(pipe, steps), pretrain.train)
    pretrain.pretrain()


def _train_in_turns(turns: Turns, train: Callable[[Run, int], Any], run: Run, step: int) -> Any:
    """`pretrain.train` with a prefetcher that waits for the parent."""
    take = run.prefetcher.next

    def take_in_turn(number: int) -> Any:
        turns()
        return take(number)

    object.__setattr__(run.prefetcher, "next", take_in_turn)
    return train(run, step)


def play_nanogpt(pipe: Connection, steps: int, folder: Path) -> None:
    """Run nanoGPT's train.py, whose step ends with `optimizer.zero_grad`."""
    torch.set_num_threads(1)
    turns, clear = Turns(pipe, steps), torch.optim.AdamW.zero_grad

    def clear_and_wait(self: torch.optim.AdamW, set_to_none: bool = True) -> None:
        clear(self, set_to_none)
        turns()

    torch.optim.AdamW.zero_grad = clear_and_wait  # type: ignore[method-assign, assignment]
    os.environ.pop("RANK", None)  # otherwise train.py would use NCCL
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv = ["train.py", *NANOGPT_OPTIONS]
    runpy.run_path("train.py", run_name="__main__")


def play_transformers(pipe: Connection, steps: int) -> None:
    """Run a plain loop around transformers' GPT-2."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    turns, recipe = Turns(pipe, steps), load_recipe(REPOSITORY / RECIPE)
    for _ in plain_loop(AutoModelForCausalLM.from_config(GPT2), recipe, MORE_STEPS_THAN_TAKEN):
        turns()


if __name__ == "__main__":
    main()
