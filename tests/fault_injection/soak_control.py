"""Interleave kills with starts, loads, saves, rollbacks, `--resume` requests and requeues.

A small run of two processes saves every fourth step. Its data contain bad samples that cause one
skipped step, two rollbacks with saves in between, and a last step that is bad twice. Each round
starts the run in one of four ways: as a requeued job would; with `--resume CHECKPOINT`, sometimes
with another learning rate at which the bad samples are harmless, so that the branches differ; with
`--resume never`; or with a user's mistake. Most starts are killed at a random time, while a
checkpoint is being loaded, or before, during or after one of the operations that change the run
folder. Sometimes the last lines of the files are torn as well.

After each round the run must be on the branch that was requested last: its metrics and samples
equal those of an undisturbed run of that branch, no step is duplicated or missing, every checkpoint
ever published still exists under some name, and no process is left running. A mistake must be
rejected without a traceback and without changing the folder.

    make soak
    python tests/fault_injection/soak_control.py --rounds 20 --seed 7
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the repository, not tests/, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import chain, pairwise
from multiprocessing.connection import Connection
from typing import Any

import tomli_w

from tests.conftest import VOCAB_SIZE, changed, small_recipe
from tests.fault_injection.soak import IMPORTED, TIMED
from tests.fault_injection.soak_faults import (
    FAULTS,
    die_at_operation,
    die_loading,
    poison_and_record,
)
from threefold.checkpoint.format import find_damages
from threefold.config.loading import load_recipe
from threefold.prove.shrink import write_corpus
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import newest_step, published, step_of
from threefold.run_folder.json_lines import LineFile
from threefold.runtime.exits import REJECTED
from threefold.runtime.ranks import ForkedRanks, log_file

RANKS, STEPS, EVERY = 2, 20, 4
MAX_SECONDS = 240  # a start that takes longer hangs
HEALTHY = "optimizer.learning_rate=0.0005"  # another branch, in which no step is bad
MISTAKES = (
    ("--resume", "nowhere"),
    ("--set", "seed=5"),
    ("--set", "training.stepz=9"),
    ("--set", "layout.pipeline=9"),
)
WAYS = ("automatic", "automatic", "automatic", "checkpoint", "checkpoint", "mistake", "never")
ENDINGS = {  # by the way in which the run was started; "" for a run that is not killed
    "never": ("operation", "", "loading"),
    "checkpoint": ("loading", "operation", "time"),
    "automatic": ("", "operation", "time", "time", "loading"),
}
TORN = (b'{"event": "rollback", "st', b"\0" * 200, b'{"step": 3, "lo\0\0\0')


@dataclass
class Branch:
    """A branch of the run, as it should be.

    Attributes:
        resume: the request, "never" or a checkpoint
        options: options of every start in this branch
        once: the name of the request
        metrics: metrics of an undisturbed run, by step
        discarded: metrics lines of steps that were rolled back
        reads: samples that the ranks read in each step
        announced: a start has printed that it is in this branch
    """

    resume: str
    options: tuple[str, ...]
    once: str
    metrics: dict[int, str]
    discarded: set[str]
    reads: dict[int, list[int]]
    announced: bool = False


@dataclass
class Report:
    """The number of rounds by kind, and the problems that were found."""

    seed: int
    rounds: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"  {count:4} {kind}" for kind, count in sorted(self.rounds.items())]
        lines += [f"wrong: {text}" for text in self.wrong]
        return "\n".join([f"seed {self.seed}, {self.rounds.total()} rounds:", *lines])


class Soak:
    """One run folder, the branch that it is in, and the undisturbed runs to compare with."""

    def __init__(self, home: Path, seed: int, fault: str | None):
        self.home, self.chance, self.fault = home, random.Random(seed), fault
        self.folder, self.recipe = home / "run", write_recipe(home)
        self.seen: set[bytes] = set()  # manifests of all checkpoints
        self.requests = 0
        self.pids: list[int] = []  # of the ranks of the newest start
        self.decks: dict[tuple[str, ...], list[str]] = {}
        self.report = Report(seed)
        started = time.monotonic()
        codes = self.start(home / "poisoned", [], None)
        self.seconds = time.monotonic() - started
        assert codes == [0, 0], self.words(home / "poisoned")
        self.undisturbed = {0: self.compared(home / "poisoned")}
        self.branch = self.new_branch("never", 0, ())

    def new_branch(self, resume: str, step: int, options: tuple[str, ...]) -> Branch:
        """Return the branch that a request leads to, with its undisturbed run."""
        key = step if options else 0
        if key not in self.undisturbed:
            folder = self.home / f"from{step}"
            source = self.home / "poisoned" / "checkpoints" / f"step-{step:07d}"
            words = ["--resume", str(source), *options]
            shutil.copy(reads_file(self.home / "poisoned"), reads_file(folder))
            assert self.start(folder, words, None) == [0, 0], self.words(folder)
            self.undisturbed[key] = self.compared(folder)
        self.requests += 1
        return Branch(resume, options, f"request{self.requests}", *self.undisturbed[key])

    def compared(self, folder: Path) -> tuple[dict[int, str], set[str], dict[int, list[int]]]:
        """Return metrics, discarded lines and samples of a run."""
        lines = RunFolder(folder).read_metrics()
        copies = [
            LineFile(file, keys={"step": (int,)}).read() for file in folder.glob("metrics.*.jsonl")
        ]
        discarded = {without_times(line) for copy in copies for line in copy}
        return {x["step"]: without_times(x) for x in lines}, discarded, reads_of(folder)

    def round(self) -> None:
        """Start the run in some way, kill it or let it end, and check the run folder."""
        kind, words = self.choose()
        plan = self.choose_plan(kind) if kind != "mistake" else None
        if kind == "automatic" and self.folder.exists() and self.chance.random() < 0.3:
            for name in ("events.jsonl", "metrics.jsonl"):
                with (self.folder / name).open("ab") as stream:
                    stream.write(self.chance.choice(TORN))
        before = snapshot(self.folder) if kind == "mistake" else {}
        codes = self.start(self.folder, words, plan)
        self.report.rounds[f"{kind}, {plan[0] if plan else 'not killed'}"] += 1
        where = f"round {self.report.rounds.total()}, {kind} {words}, {plan}: "
        wrong = left_over(self.pids)
        if kind == "mistake":
            if codes != [REJECTED] * RANKS or "Traceback" in self.words(self.folder):
                wrong.append(f"{codes} {self.words(self.folder)}")
            if snapshot(self.folder) != before:
                wrong.append("a mistake has changed the folder")
        else:
            self.branch.announced |= " into " in self.words(self.folder)
            wrong += self.check(codes, plan)
        self.report.wrong += [where + text for text in wrong]

    def choose(self) -> tuple[str, list[str]]:
        """Choose how the run is started next; return the kind and the command's options."""
        branch, steps = self.branch, [step_of(path) for path in self.published()]
        way = self.draw(WAYS) if branch.announced else "again"
        if way == "mistake" and steps:
            return "mistake", [
                *self.chance.choice(MISTAKES),
                "--set",
                f"training.steps={STEPS + 9}",
            ]
        if way in ("never", "checkpoint"):
            # Steps up to the one where a branch began are those of the poisoned run.
            begun = int(branch.resume[-7:]) if branch.options else STEPS
            choices = [step for step in steps if step <= min(begun, STEPS - EVERY)]
            if not choices or way == "never":
                self.branch = self.new_branch("never", 0, ())
            else:
                step = self.chance.choice(choices)
                options = ("--set", HEALTHY) if self.chance.random() < 0.7 else ()
                path = str(self.folder / "checkpoints" / f"step-{step:07d}")
                self.branch = self.new_branch(path, step, options)
        branch = self.branch
        if branch.announced:
            return "automatic", ["--resume", "auto", *branch.options]
        kind = "never" if branch.resume == "never" else "checkpoint"
        return kind, ["--resume", branch.resume, "--resume-once", branch.once, *branch.options]

    def choose_plan(self, kind: str) -> tuple[Any, ...] | None:
        """Choose how a start is killed: (kind, number); None if it is not killed."""
        ending = self.draw(ENDINGS[kind])
        if not ending:
            return None
        if ending == "operation":  # most of the first operations belong to a request
            return ending, self.chance.randrange(1, self.chance.choice([20, 200]))
        if ending == "loading":
            return ending, self.chance.randrange(RANKS)
        return "time", self.chance.uniform(0, self.seconds), self.chance.randrange(1, 2**RANKS)

    def draw(self, cards: tuple[str, ...]) -> str:
        """Draw from a shuffled deck, so that even a few rounds cover every kind."""
        deck = self.decks.setdefault(cards, [])
        if not deck:
            deck += self.chance.sample(cards, len(cards))
        return deck.pop()

    def start(
        self, folder: Path, options: list[str], plan: tuple[Any, ...] | None
    ) -> list[int | None]:
        """Start all ranks, kill some as planned, and end the others as a launcher does."""
        fault = self.fault if folder == self.folder else None
        job = self.recipe, folder, options, plan, fault
        logs = logs_folder(folder)
        logs.mkdir(exist_ok=True)
        ranks = ForkedRanks(RANKS, _rank, *job, logs=logs, preload=IMPORTED).processes
        self.pids = [process.pid for process in ranks]
        deadline = time.monotonic() + MAX_SECONDS
        if plan and plan[0] == "time":
            deadline = time.monotonic() + plan[1]
        while all(process.is_alive() for process in ranks) and time.monotonic() < deadline:
            time.sleep(0.005)
        if time.monotonic() >= deadline and plan and plan[0] == "time":
            for rank, process in enumerate(ranks):
                if plan[2] >> rank & 1 and process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
        if all(process.exitcode in (0, REJECTED, None) for process in ranks):
            for process in ranks:  # if one rank has ended by itself, the others should end too
                process.join(30)
        for process in ranks:
            process.kill()
            process.join()
        return [process.exitcode for process in ranks]

    def check(self, codes: list[int | None], plan: tuple[Any, ...] | None) -> list[str]:
        """Return the problems of the run folder after a start has ended.

        A rank that lost another rank may exit with 1. The rank that the plan kills may not.
        """
        wrong, branch = [], self.branch
        allowed = {0, 1, -signal.SIGKILL} if plan else {0}
        victim = {"operation": 0, "loading": plan[1]}.get(plan[0]) if plan else None
        if not set(codes) <= allowed or (victim is not None and codes[victim] == 1):
            wrong.append(f"ended with {codes}:\n{self.words(self.folder)}")
        wrong += [damage for path in self.published() for damage in find_damages(path)]
        self.seen |= {(path / "manifest.json").read_bytes() for path in self.published()}
        there = {
            file.read_bytes()
            for run in (self.folder, *self.home.glob("run.2*"))
            for file in run.glob("checkpoints/*step-???????/manifest.json")
        }
        if not self.seen <= there:
            wrong.append(f"{len(self.seen - there)} checkpoints are gone")
        if branch.announced:
            wrong += self.compare(set(codes) == {0})
        return wrong

    def compare(self, finished: bool) -> list[str]:
        """Return the differences from the undisturbed run of this branch."""
        # Ranks import this module too, and the ledger brings transformers, which takes seconds.
        from threefold.prepare_data.sample_lookup import samples_of

        wrong, branch, folder = [], self.branch, RunFolder(self.folder)
        lines = [(line["step"], without_times(line)) for line in folder.read_metrics()]
        if [step for step, _ in lines] != list(range(1, len(lines) + 1)):
            wrong.append(f"steps {[step for step, _ in lines]}")
        newest = newest_step(self.folder / "checkpoints")
        if len(lines) < newest:
            wrong.append(f"metrics end at step {len(lines)}, and step {newest} is saved")
        reads, recipe = reads_of(self.folder), load_recipe(self.recipe, [])
        for step, line in lines:
            if line != branch.metrics[step] and (step <= newest or line not in branch.discarded):
                wrong.append(f"step {step}: {line} instead of {branch.metrics[step]}")
            elif step <= newest:
                expected = branch.reads[step]
                if reads.get(step) != expected:
                    wrong.append(f"step {step} read {reads.get(step)} instead of {expected}")
                if list(samples_of(recipe, folder, step)) != expected:
                    wrong.append(f"the ledger says {samples_of(recipe, folder, step)} of {step}")
        if finished and len(lines) != STEPS:
            wrong.append(f"finished with {len(lines)} steps")
        return wrong

    def published(self) -> list[Path]:
        """Return the checkpoints that the run can resume from."""
        return published(self.folder / "checkpoints")

    def words(self, folder: Path) -> str:
        """Return the output of the ranks of the newest start."""
        logs = [log_file(logs_folder(folder), rank) for rank in range(RANKS)]
        return "\n".join(log.read_text(errors="replace")[-6000:] for log in logs if log.exists())


def soak(home: Path, *, rounds: int, seed: int, fault: str | None = None) -> Report:
    """Do rounds until something is wrong; fault: one of FAULTS, to check that it is detected."""
    run = Soak(home, seed, fault)
    while run.report.rounds.total() < rounds and not run.report.wrong:
        run.round()
        if run.report.rounds.total() % 10 == 0:
            print(f"{run.report.rounds.total()} rounds", file=sys.stderr)
    return run.report


def write_recipe(home: Path) -> Path:
    """Write a recipe whose run takes seconds, and its corpus."""
    write_corpus(home / "data", VOCAB_SIZE)
    table = changed(
        small_recipe(home / "data"),
        name="soak",
        model__layers=1,
        training__steps=STEPS,
        training__evaluate_every=STEPS,
        checkpoint__every=EVERY,
        checkpoint__keep=100,
        supervision__bad_steps=2,
        supervision__rollbacks=1,
        supervision__hang_seconds=MAX_SECONDS,
    )
    file = home / "soak.toml"
    file.write_text(tomli_w.dumps(table))
    return file


def without_times(line: dict[str, Any]) -> str:
    """Return the numbers in a line of metrics.jsonl as text, which compares NaNs as equal."""
    numbers = {key: value for key, value in line.items() if value is not None}
    return json.dumps({key: value for key, value in numbers.items() if key not in TIMED})


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return the content of all files of a run folder except the lock."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != "lock")
    return {str(file): file.read_bytes() for file in files}


def left_over(ranks: Collection[int], *, seconds: float = 10) -> list[str]:
    """Return the watchdog processes that have outlived their ranks.

    Args:
        ranks: process numbers of ranks that have ended
        seconds: for which their watchdogs may outlive them
    """
    deadline = time.monotonic() + seconds
    while True:
        left = []
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = process.read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            pairs = pairwise(words)  # watchdog.py PID NAME
            if any(a.endswith("watchdog.py") and b in map(str, ranks) for a, b in pairs):
                left.append(f"left: {' '.join(words)}")
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def reads_file(folder: Path) -> Path:
    """Return the file next to a run folder that lists the samples that were read."""
    return folder.with_name(f"{folder.name}-reads.jsonl")


def logs_folder(folder: Path) -> Path:
    """Return the folder next to a run folder that has the output of the ranks."""
    return folder.with_name(f"{folder.name}-logs")


def reads_of(folder: Path) -> dict[int, list[int]]:
    """Return the samples that the ranks have read when they last did each step."""
    newest: dict[int, dict[int, list[int]]] = {}
    for line in LineFile(reads_file(folder), keys={"step": (int,)}).read():
        newest.setdefault(line["step"], {})[line["rank"]] = line["samples"]
    return {step: sorted(chain(*ranks.values())) for step, ranks in newest.items()}


def _rank(
    _: Connection,
    recipe: Path,
    folder: Path,
    options: list[str],
    plan: tuple[Any, ...] | None,
    fault: str | None,
) -> None:
    """One process: the command, as a launcher would start it."""
    from recipes import pretrain

    rank = int(os.environ["RANK"])
    poison_and_record(rank, LineFile(reads_file(folder), keys={"step": (int,)}))
    if plan and plan[0] == "operation" and rank == 0:
        die_at_operation(plan[1])
    if plan and plan[0] == "loading" and rank == plan[1]:
        die_loading()
    if fault:
        FAULTS[fault]()
    sys.argv = ["pretrain.py", str(recipe), "--run-dir", str(folder), *options]
    pretrain.main()


def main() -> None:
    """Run the soak, and print the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", "--kills", type=int, default=200, help="default: 200")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument(
        "--fault",
        choices=FAULTS,
        help="inject this defect first, to check that the soak detects it",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        report = soak(Path(home), rounds=options.rounds, seed=options.seed, fault=options.fault)
    print(report)
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
