"""Fixtures for several test files: a small corpus, a small recipe and the shipped files."""

import functools
import subprocess
import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from recipes.proving.proof_corpus import write_corpus
from recipes.training.recipe import loading
from recipes.training.recipe.loading import DEFAULT_RECIPE, REPOSITORY

# The longest files, longest first. `make test` gives each of its two processes one file at a time:
# if a long file came last, the other process would be idle meanwhile.
LONGEST_FILES = (
    "proving/test_prove.py",
    "test_pretrain.py",
    "training/engine/test_layouts.py",
    "training/supervision/test_supervisor.py",
    "planning/test_planning.py",
    "sweeping/test_sweep.py",
    "tracing/test_trace.py",
    "training/evaluation/test_evaluator.py",
    "test_docs.py",
    "launching/test_launcher.py",
    "sweeping/test_split.py",
    "converting/test_convert.py",
    "gpu/test_gpu_checks.py",
    "training/preflight/test_run.py",
    "sweeping/test_links.py",
    "planning/test_family.py",
    "models/pipeline/test_nccl_rules.py",
    "models/test_activation_memory.py",
    "sweeping/transfer/test_transfer_check.py",
    "test_stages.py",
)
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
    return [path for path in loading.shipped_recipes() if path not in users_files()]


def shipped_configs() -> list[Path]:
    """Return the DeepSpeed JSON files of the repository, without a user's own."""
    return sorted(set((REPOSITORY / "ds_configs").glob("*.json")) - users_files())


VOCAB_SIZE = 250  # divisible by neither 64 nor any tensor size in the tests: padding is exercised


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first; keep the order of the other files and within files."""
    ranks = {TESTS / name: rank for rank, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


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
