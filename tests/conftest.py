"""Fixtures for several test files: a small corpus, a small recipe and the shipped files."""

import functools
import re
import signal
import time
import tomllib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from threefold.config import loading
from threefold.config.loading import DEFAULT_RECIPE, REPOSITORY
from threefold.prove.shrink import write_corpus

TESTS = Path(__file__).resolve().parent
DAYS = 6  # in which `make long` and `make cluster` run all tests that take turns
TODAY = int(time.time()) // 86400
USER_FOLDERS = ("recipes", "ds_configs")  # in which users put files of their own


@functools.cache
def users_files() -> frozenset[Path]:
    """Return the files in USER_FOLDERS that git does not track, if there is git."""
    return frozenset().union(*map(loading.untracked_files, USER_FOLDERS))


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


def in_turn(number: int, *today: pytest.MarkDecorator) -> list[pytest.MarkDecorator]:
    """Return the marks of a test, numbered among similar ones that run on different days.

    On its day it has the marks `today`; on the others it is an exhaustive test.
    """
    if number % DAYS == TODAY % DAYS:
        return list(today)
    return [pytest.mark.exhaustive, pytest.mark.in_turn]


def long_in_turn(number: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for an expensive long test, numbered among those of other files."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        for each in in_turn(number, pytest.mark.long):
            test = each(test)
        return test

    return mark


def each_in_turn(values: Iterable[Any], quick: Container[Any] = ()) -> list[Any]:
    """Return the values of a parameter: those that are not quick are long tests that take turns."""
    marks = ([] if v in quick else in_turn(n, pytest.mark.long) for n, v in enumerate(values))
    return [pytest.param(value, marks=mark) for value, mark in zip(values, marks, strict=True)]


def in_turn_or_exhaustive(
    name: str, names: Sequence[str], *today: pytest.MarkDecorator
) -> list[pytest.MarkDecorator]:
    """Return the marks of a test; those that are not among `names` are always exhaustive."""
    return in_turn(names.index(name), *today) if name in names else [pytest.mark.exhaustive]


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
    """Add --portion: CI runs some of the exhaustive tests for each commit."""
    parser.addoption("--portion", metavar="I/N", help="run every Nth of the tests, from number I")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files without exhaustive tests if only these are selected: imports take minutes."""
    if config.option.markexpr != "exhaustive" or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    return None if re.search("exhaustive|in_turn", text) else True


@pytest.hookimpl(trylast=True)  # after the selection by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of a portion."""
    if portion := config.getoption("portion"):
        first, step = map(int, portion.split("/"))
        kept = [item for item in items if not item.get_closest_marker("in_turn")][first::step]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


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
