"""Kill a run repeatedly, at random times, and check that nothing is lost.

A small run of four processes (pipeline 2 x data 2) saves every second step. One of its ranks,
several or all are killed repeatedly: while they start, in the middle of a step, in the middle of a
save. Before each restart every published checkpoint must pass verification. After the restart the
run must resume from the newest checkpoint. Every line of metrics.jsonl must equal, bit for bit,
that of an undisturbed run. The exit code is 1 if one of these conditions is violated.

    make soak
    python tests/fault_injection/soak.py --kills 20 --seed 7 --variants experts latent
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the repository, not tests/, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import tomli_w

from tests.conftest import VOCAB_SIZE, changed, small_recipe
from threefold.checkpoint.format import find_damages
from threefold.prove.ranks import PRELOADED_MODULES
from threefold.prove.shrink import write_corpus
from threefold.run_folder.history import INCOMPLETE, newest_step, published
from threefold.runtime.ranks import MAX_TRACEBACK_LINES, ForkedRanks, log_tails

IMPORTED = [
    *PRELOADED_MODULES,
    "recipes.pretrain",
    "threefold.tracking.tracker",
]
RANKS = 4
MAX_SECONDS = 120  # a run that takes longer hangs
TIMED = (
    "step_seconds", "between_seconds", "data_seconds", "validation_seconds", "tokens_per_second",
    "tflops_per_gpu", "memory_gb",
)  # fmt: skip
# Changes of the recipe. With `average`, every step validates the averaged weights.
VARIANTS: dict[str, dict[str, Any]] = {
    "experts": {
        "model__experts": {
            "count": 4, "per_token": 2, "ffn_hidden_size": 24, "router": "sigmoid",
            "normalize": True, "bias_update": 0.01, "balance_loss": 0.1,
        },
        "layout__expert": 2,
    },
    "latent": {
        "model__kv_heads": 4,
        "model__head_size": 16,
        "model__latent": {
            "query_rank": 16, "key_value_rank": 16, "rotary_size": 8, "value_size": 16,
        },
        "model__prediction": {"depth": 1, "loss_weight": 0.3},
    },
    "muon": {"optimizer__kind": "muon"},
    "average": {"optimizer__average": {"decay": 0.8}, "training__evaluate_every": 1},
}  # fmt: skip


@dataclass
class Report:
    """The results of a soak.

    kills: number of kills, by the phase of the run and the number of ranks
    """

    kills: Counter = field(default_factory=Counter)
    resumes: int = 0
    runs: int = 1
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"  {count:4} {phase}" for phase, count in sorted(self.kills.items())]
        return "\n".join(
            [
                f"{self.kills.total()} kills of {RANKS} ranks:",
                *lines,
                f"{self.resumes} times resumed, {self.runs} runs",
                *(f"wrong: {text}" for text in self.wrong),
                "nothing was lost" if not self.wrong else f"{len(self.wrong)} things are wrong",
            ]
        )


class Run:
    """A run folder and the processes that work on it."""

    def __init__(self, recipe: Path, folder: Path, fault: str | None):
        self.recipe, self.folder, self.fault = recipe, folder, fault
        self.checkpoints = folder / "checkpoints"
        self.logs = folder.with_name(f"{folder.name}-logs")
        self.processes: list[Any] = []
        self.debris: set[Path] = set()  # of killed saves, at the start of the run

    def start(self) -> None:
        """Start all ranks, forked from a server that has done the imports."""
        self.debris = set(self.checkpoints.glob(INCOMPLETE))
        self.logs.mkdir(exist_ok=True)
        job = self.recipe, self.folder, self.fault
        self.processes = ForkedRanks(RANKS, _rank, *job, logs=self.logs, preload=IMPORTED).processes

    @property
    def alive(self) -> bool:
        """Return True if all ranks are running."""
        return all(process.is_alive() for process in self.processes)

    def kill(self, ranks: list[int]) -> None:
        """Send SIGKILL to some ranks."""
        for rank in ranks:
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, signal.SIGKILL)

    def end(self, patience: float) -> list[int]:
        """End all ranks, as a launcher does when a rank has died; return the exit codes."""
        deadline = time.monotonic() + patience
        while any(p.is_alive() for p in self.processes) and time.monotonic() < deadline:
            time.sleep(0.002)
        self.kill(list(range(RANKS)))
        for process in self.processes:
            process.join()
        return [process.exitcode for process in self.processes]

    def finish(self) -> list[int]:
        """Wait for the end of an undisturbed run; return the exit codes."""
        return self.end(MAX_SECONDS)

    def metrics(self) -> dict[int, dict[str, Any]]:
        """Return the complete lines of metrics.jsonl by step, without times."""
        lines = self._lines("metrics.jsonl")
        return {x["step"]: {k: v for k, v in x.items() if k not in TIMED} for x in lines}

    def events(self) -> list[dict[str, Any]]:
        """Return the complete lines of events.jsonl."""
        return self._lines("events.jsonl")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / name
        text = file.read_text() if file.exists() else ""
        return [json.loads(x) for x in text.splitlines(keepends=True) if x.endswith("\n")]

    @property
    def saving(self) -> bool:
        """Return True while a checkpoint is being written."""
        return bool(set(self.checkpoints.glob(INCOMPLETE)) - self.debris)

    def phase(self, events: int) -> str:
        """Return the phase of the run.

        events: number of events at the start of the run
        """
        if self.saving:
            return "in a save"
        return "in a step" if len(self.events()) > events else "at the start"

    def newest(self) -> int:
        """Return the step of the newest published checkpoint; 0 if there is none."""
        return newest_step(self.checkpoints)

    def last_words(self) -> str:
        """Return the end of every rank's output."""
        return log_tails(sorted(self.logs.iterdir()), MAX_TRACEBACK_LINES)


def soak(
    folder: Path,
    *,
    kills: int,
    seed: int,
    resumes: int = 0,
    fault: str | None = None,
    variants: Sequence[str] = (),
) -> Report:
    """Kill runs until the numbers of kills and of resumed runs are reached.

    kills: number of kills
    seed: of the random times and victims
    resumes: number of resumed runs
    fault: one of `FAULTS`, to check that it is detected
    variants: names in `VARIANTS`; the changes of all of them apply
    """
    chance, report = random.Random(seed), Report()
    changes = {key: value for name in variants for key, value in VARIANTS[name].items()}
    recipe = write_recipe(folder, **changes)
    for name in ("imports", "undisturbed"):  # the first run waits for the server
        undisturbed = Run(recipe, folder / name, None)
        started = time.monotonic()
        undisturbed.start()
        codes = undisturbed.finish()
        seconds = time.monotonic() - started
        assert codes == [0] * RANKS, f"{codes}\n{undisturbed.last_words()}"
    expected = undisturbed.metrics()
    run = Run(recipe, folder / "run1", fault)
    while not report.wrong and (report.kills.total() < kills or report.resumes < resumes):
        before = run.newest()
        starts = len(run.events())
        run.start()
        phase = wait_for_an_instant(run, chance, seconds=seconds, events=starts)
        if phase is None:  # the run has ended before the kill
            codes = run.finish()
            report.wrong += compare(run, expected, before, starts)
            if any(codes) or run.metrics() != expected:
                report.wrong.append(f"{run.folder.name} ended with {codes}:\n{run.last_words()}")
            report.resumes += before > 0
            report.runs += 1
            run = Run(recipe, folder / f"run{report.runs}", fault)
            continue
        victims = chance.sample(range(RANKS), chance.choice([1, 1, 2, 3, RANKS]))
        run.kill(victims)
        run.end(chance.choice([0.0, 0.05, 0.5]))
        report.kills[f"{phase}, {len(victims)} rank{'s' * (len(victims) > 1)}"] += 1
        report.wrong += compare(run, expected, before, starts)
        resumed = [e for e in run.events()[starts:] if e["event"] == "resume"]
        report.resumes += bool(resumed)
        if report.kills.total() % 10 == 0:
            print(f"{report.kills.total()} kills", file=sys.stderr)
    return report


def wait_for_an_instant(
    run: Run, chance: random.Random, *, seconds: float, events: int
) -> str | None:
    """Wait until a random time, in half of the cases inside a save.

    seconds: duration of a whole run
    events: number of events at the start of the run

    Returns:
        The phase of the run; None if the run has ended.
    """
    deadline = time.monotonic() + chance.uniform(0, seconds)
    in_a_save = chance.random() < 0.5
    while run.alive and time.monotonic() < deadline:
        time.sleep(0.001)
    while in_a_save and run.alive and not run.saving:
        time.sleep(0.0005)
    if in_a_save:
        time.sleep(chance.uniform(0, 0.02))
    return run.phase(events) if run.alive else None


def compare(run: Run, expected: dict[int, dict], before: int, starts: int) -> list[str]:
    """Return the problems of a run folder after a kill.

    before: step of the newest checkpoint at the start of the run
    starts: number of events at the start of the run
    """
    name, wrong = run.folder.name, []
    for checkpoint in published(run.checkpoints):
        wrong += [f"{name}: {damage}" for damage in find_damages(checkpoint)]
    for event in run.events()[starts:]:
        if event["event"] in ("start", "resume") and event["step"] != before:
            wrong.append(f"{name}: {event['event']} at step {event['step']} instead of {before}")
        if event["event"] in ("skip", "stop", "warning"):
            wrong.append(f"{name}: {event}")
    if run.newest() < before:
        wrong.append(f"{name}: the checkpoint of step {before} is gone")
    saved = [event["step"] for event in run.events() if event["event"] == "save"]
    if saved and run.newest() < max(saved):
        wrong.append(f"{name}: step {max(saved)} was saved and is not there")
    lines = run.metrics()
    for step, line in lines.items():
        if line != expected[step]:
            wrong.append(f"{name}, step {step}: {line} instead of {expected[step]}")
    missing = [step for step in range(1, run.newest() + 1) if step not in lines]
    if missing:
        wrong.append(f"{name}: no metrics of the steps {missing}")
    return wrong


def write_recipe(folder: Path, **changes: Any) -> Path:
    """Write a corpus and a recipe whose run takes seconds; return the recipe's file.

    changes: changes of the recipe
    """
    write_corpus(folder / "data", VOCAB_SIZE)
    table = changed(
        small_recipe(folder / "data"),
        name="soak",
        layout__pipeline=2,
        model__dropout=0.1,
        training__steps=30,
        **{"training__evaluate_every": 10, "checkpoint__every": 2, **changes},
    )
    file = folder / "soak.toml"
    file.write_text(tomli_w.dumps(table))
    return file


def _rank(_: Connection, recipe: Path, folder: Path, fault: str | None) -> None:
    """Run the command in one process, as a launcher would start it."""
    from recipes import pretrain

    if fault:
        FAULTS[fault]()
    sys.argv = ["pretrain.py", str(recipe), "--run-dir", str(folder)]
    pretrain.main()


def _publish_early() -> None:
    """Give a checkpoint its final name before its files are written."""
    from threefold.checkpoint.writer import CheckpointWriter

    healthy = CheckpointWriter._write_together

    def write(self: Any, workspace: Path) -> Any:
        if self.rank == 0:
            workspace.with_name(workspace.name.split(".")[0]).mkdir()
        return healthy(self, workspace)

    CheckpointWriter._write_together = write


def _forget_moments() -> None:
    """Let a resumed run start with a new optimizer state."""
    from threefold.checkpoint.state import TrainingState

    healthy = TrainingState.restore

    def restore(self: Any, read: Callable, **settings: Any) -> None:
        healthy(self, read, **settings | {"updates": None})

    TrainingState.restore = restore


def _read_again() -> None:
    """Let a resumed run read the corpus from its beginning."""
    from threefold.data.dataset import TrainingData
    from threefold.run_folder.history import Progress

    healthy = TrainingData.resume

    def resume(self: Any, progress: Progress, *layout: Any) -> None:
        healthy(self, Progress(progress.step, samples=0), *layout)

    TrainingData.resume = resume


FAULTS = {
    "publish early": _publish_early,
    "forget moments": _forget_moments,
    "read again": _read_again,
}


def main() -> None:
    """Run the soak, and print its report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, help="default: 200")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--fault", choices=FAULTS, help="a fault that the soak must detect")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=[],
        help="variants of the model or optimizer to combine",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = soak(
            Path(folder),
            kills=options.kills,
            seed=options.seed,
            fault=options.fault,
            variants=options.variants,
        )
    print(report)
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
