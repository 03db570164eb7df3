"""Fixtures for several test files: a small corpus, a small recipe and the shipped files."""

import functools
import signal
import subprocess
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.core_seconds import seconds_of_tree
from threefold.config import loading
from threefold.config.loading import DEFAULT_RECIPE, REPOSITORY
from threefold.prove.shrink import write_corpus

# The files that take longest, each kind longest first, so that none comes last and runs alone.
# `make test` runs three files at a time on two cores: every third one mostly waits.
COMPUTING_FILES = (
    "engine/test_layouts.py",
    "test_pretrain.py",
    "trace/test_trace.py",
    "prove/test_prove.py",
    "convert/test_convert.py",
    "pretrain/evaluation/test_evaluator.py",
    "test_phases.py",
    "plan/test_planning.py",
    "gpu/test_gpu_checks.py",
    "pipeline/test_nccl_rules.py",
    "test_docs.py",
    "prepare_data/test_prepare_data.py",
    "models/test_transformer.py",
    "test_floors.py",
    "plan/test_traced_memory.py",
    "test_user_data.py",
)
WAITING_FILES = (
    "launch/test_launcher.py",
    "tracking/test_connection.py",
    "sweep/test_sweep.py",
    "supervision/test_supervisor.py",
    "checkpoint/test_resume.py",
    "tracking/test_tracker.py",
    "sweep/test_split_results.py",
    "sweep/test_split.py",
)
LONGEST_FILES = [
    name
    for two, waiting in zip(
        zip(COMPUTING_FILES[::2], COMPUTING_FILES[1::2], strict=True), WAITING_FILES, strict=True
    )
    for name in (*two, waiting)
]
TESTS = Path(__file__).resolve().parent
USER_FOLDERS = ("recipes", "ds_configs")  # in which users put files of their own


@functools.cache
def users_files() -> frozenset[Path]:
    """Return the files of USER_FOLDERS that git does not track; none without git."""
    command = ["git", "ls-files", "--others", "-z", *USER_FOLDERS]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return frozenset(REPOSITORY / name for name in listed.stdout.split("\0") if name)


def shipped_recipes() -> list[Path]:
    """Return the recipes of the repository, without a user's own, which need not be valid."""
    return [path for path in loading.recipes_in_repository() if path not in users_files()]


def shipped_configs() -> list[Path]:
    """Return the DeepSpeed JSON files of the repository, without a user's own."""
    return sorted(set((REPOSITORY / "ds_configs").glob("*.json")) - users_files())


def selected(
    request: pytest.FixtureRequest, test: Callable[..., None], parameter: str
) -> list[Any]:
    """Return the values of a parameter for which a test was selected, in order."""
    values = (
        item.callspec.params[parameter]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test
    )
    return list(dict.fromkeys(values))


def quick_and_long(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Return the values of a parameter, those that are not quick marked as long."""
    quick, values = list(quick), list(values)
    assert all(value in values for value in quick)
    marks = ([] if value in quick else [pytest.mark.long] for value in values)
    return [pytest.param(value, marks=mark) for value, mark in zip(values, marks, strict=True)]


@pytest.fixture(autouse=True)
def signal_handlers_restored() -> Iterator[None]:
    """Restore the signal handlers that a command changes in the tests' process.

    A suite that a script starts with "&" ignores SIGINT, and so would the processes of the tests.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


VOCAB_SIZE = 250  # divisible by neither 64 nor any tensor size in the tests: padding is exercised


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --portion: CI runs some of the exhaustive tests each day, other ones on other days."""
    parser.addoption("--portion", metavar="I/N", help="run every Nth of the tests, from number I")


@pytest.hookimpl(trylast=True)  # after the selection by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the longest files first; keep the order of the other files and within files."""
    ranks = {TESTS / name: rank for rank, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))
    if portion := config.getoption("portion"):
        first, step = map(int, portion.split("/"))
        kept = items[first::step]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


class TimePerFile:
    """Counter of the processor time and the wall time of each test file, for a table at the end.

    Orphaned processes are not counted here; `tests/core_seconds.py` counts all processes.
    """

    SHOWN = 10  # files

    def __init__(self) -> None:
        self.core_seconds: Counter[str] = Counter()
        self.wall_seconds: Counter[str] = Counter()
        self.last = 0.0, 0.0

    def now(self) -> tuple[float, float]:
        """Return the processor time so far, and the monotonic time."""
        return seconds_of_tree(psutil.Process()), time.monotonic()

    def add(self, file: str) -> None:
        """Count the time since the last call for a file."""
        now = self.now()
        self.core_seconds[file] += now[0] - self.last[0]
        self.wall_seconds[file] += now[1] - self.last[1]
        self.last = now

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterator[None]:
        """Count the time of a file after its last test."""
        if self.last == (0.0, 0.0):
            self.last = self.now()
        result = yield
        if nextitem is None or nextitem.path != item.path:
            self.add(str(item.path.relative_to(TESTS)))
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Give the numbers of a worker to the process that started it."""
        if hasattr(session.config, "workeroutput"):
            spent = self.core_seconds, self.wall_seconds
            session.config.workeroutput["spent"] = [dict(each) for each in spent]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the numbers of a worker that has ended."""
        for own, other in zip(
            (self.core_seconds, self.wall_seconds),
            getattr(node, "workeroutput", {}).get("spent", ({}, {})),
            strict=True,
        ):
            own.update(other)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the files with the most core-seconds."""
        if len(self.core_seconds) > 1:
            terminalreporter.write_sep("-", "files with the most core-seconds")
            for file, seconds in self.core_seconds.most_common(self.SHOWN):
                wall = self.wall_seconds[file]
                terminalreporter.write_line(f"{seconds:6.1f} in {wall:5.0f} s  {file}")


def pytest_configure(config: pytest.Config) -> None:
    """Count the time of the tests."""
    config.pluginmanager.register(TimePerFile())


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small corpus."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder / "data", VOCAB_SIZE)
    return folder / "data"


@pytest.fixture
def small(corpus: Path) -> dict[str, Any]:
    """Return the table of a recipe, as read from TOML: a smaller tiny.toml on the small corpus."""
    return small_recipe(corpus)


def small_recipe(corpus: Path) -> dict[str, Any]:
    """Return the table of a smaller tiny.toml on a corpus that `write_corpus` wrote."""
    table = deepcopy(tomllib.loads(DEFAULT_RECIPE.read_text()))
    table["model"] |= {
        "layers": 2,
        "hidden_size": 64,
        "heads": 4,
        "kv_heads": 2,
        "ffn_hidden_size": 96,
        "vocab_size": VOCAB_SIZE,
        "sequence_length": 32,
    }
    table["layout"] = {"pipeline": 1, "tensor": 1}
    table["batch"] = {"global_sequences": 8, "micro_sequences": 2}
    table["optimizer"]["schedule"]["warmup_steps"] = 5
    table["training"] = {"steps": 20, "evaluate_every": 20, "evaluation_batches": 2}
    table["data"] = {
        "train": [{"path": str(corpus / "train")}],
        "validation": str(corpus / "validation"),
        "tokenizer": str(corpus / "tokenizer"),
    }
    table["tracking"]["mode"] = "disabled"
    return table


def changed(table: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a copy of a recipe's table with changes `section__key=value`; None removes a key."""
    table = deepcopy(table)
    for name, value in changes.items():
        *sections, key = name.split("__")
        section = table
        for part in sections:
            section = section.setdefault(part, {})
        if value is None:
            section.pop(key)
        else:
            section[key] = value
    return table


GPT_SWITCHES = {
    "model__norm": "layernorm",
    "model__positions": "learned",
    "model__activation": "gelu",
    "model__bias": True,
    "model__tie_embeddings": True,
    "model__kv_heads": 4,
    "model__rope_theta": None,
}


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """A process group of one rank, for collective functions in the process of the tests."""
    import torch.distributed as dist  # takes seconds, which tests of the planner need not wait for

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
