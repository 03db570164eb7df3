"""Measure the overhead of engine, tracking and data loading in a run of recipes/pretrain.py.

It is compared with a bare loop around the same model. The run is a real one, in its own folder and
with W&B off; before each step its prefetcher waits for the parent, and the step lasts until the
prefetcher is called again.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.one_step import contestants
from benchmarks.one_step.contestants import warm_libraries
from benchmarks.one_step.rows import OUR_BARE_ENTRY, OURS_BARE, Setting
from benchmarks.one_step.shapes import Shape
from benchmarks.taking_turns import Player, Turn, median_seconds, players, ratio, take_turns
from recipes import pretrain
from threefold.pretrain.run import Run
from threefold.prove.shrink import write_corpus
from threefold.runtime.processes import keep_memory, on_gpu

ENGINES = {"ZeRO-1": 1, "ZeRO-2": 2}  # on one data rank, ZeRO-2 runs as ZeRO-1
MORE_STEPS_THAN_TAKEN = 10**6  # the run is killed before it would save


def compare(setting: Setting, shape: Shape, precision: str) -> list[dict[str, Any]]:
    """Return a row for each engine with its overhead relative to the bare loop."""
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "corpus", shape.recipe(precision).model.vocab_size)
        starts: dict[str, Callable[[], Player]] = {
            OURS_BARE: partial(
                Player,
                contestants.play,
                OUR_BARE_ENTRY,
                shape,
                precision,
                {},
                cores=setting.cores,
            )
        }
        for engine, stage in ENGINES.items():
            recipe = write_recipe(Path(folder), shape, precision, stage)
            run_folder = Path(folder) / engine
            starts[engine] = partial(Player, play, recipe, run_folder, cores=setting.cores)
        with players(starts) as playing:
            turns = take_turns(playing, warm_up=setting.warm_up, rounds=setting.rounds)
    timed = {name: each[setting.warm_up :] for name, each in turns.items()}
    return [
        {
            "shape": shape.name,
            "precision": precision,
            "over_transformers_eager": None,
            "over_transformers_compiled": None,
            "memory_over_transformers": None,
            "engine_overhead": ratio(timed[engine], timed[OURS_BARE]) - 1,
            "engine": engine,
            "seconds": median_seconds(timed[engine]),
            "bare_seconds": median_seconds(timed[OURS_BARE]),
        }
        for engine in ENGINES
    ]


def write_recipe(folder: Path, shape: Shape, precision: str, zero_stage: int) -> Path:
    """Write the recipe of a run that does not end by itself, and return its path."""
    corpus = folder / "corpus"
    more = (
        f'data.train=[{{path = "{corpus / "train"}"}}]',
        f"data.validation={corpus / 'validation'}",
        f"data.tokenizer={corpus / 'tokenizer'}",
        f"training.steps={MORE_STEPS_THAN_TAKEN}",
        f"checkpoint.every={MORE_STEPS_THAN_TAKEN}",
        "training.evaluate_every=0",
        "tracking.mode=disabled",
    )
    recipe = shape.recipe(precision, zero_stage=zero_stage, more=more)
    file = folder / f"zero{zero_stage}.toml"
    file.write_text(recipe.toml())
    return file


def play(pipe: Connection, recipe: Path, run_folder: Path) -> None:
    """Run recipes/pretrain.py, one step for each request of the parent."""
    if not on_gpu():
        torch.set_num_threads(1)
        keep_memory()  # as the run will
    warm_libraries()
    sys.argv = ["pretrain.py", str(recipe), "--run-dir", str(run_folder)]
    pretrain.train = partial(train_in_turns, pipe, pretrain.train)
    pretrain.pretrain()


def train_in_turns(pipe: Connection, train: Callable[..., Any], run: Run, step: int) -> Any:
    """`pretrain.train` with a feed that waits for the parent."""
    object.__setattr__(run.prefetcher, "next", InTurns(pipe, run.prefetcher.next))
    return train(run, step)


class InTurns:
    """`Prefetcher.next`, which ends the step before and waits for the parent to begin the next."""

    def __init__(self, pipe: Connection, take: Callable[[int], Any]):
        self.pipe, self.take = pipe, take
        self.started: float | None = None

    def __call__(self, step: int) -> Any:
        """Return the step's micro-batches when it is this run's turn."""
        if on_gpu():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.pipe.send("ready" if self.started is None else Turn(self.started, now))
        self.pipe.recv()
        self.started = time.perf_counter()
        return self.take(step)
