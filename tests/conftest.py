"""What several test files share: a small corpus and a small recipe on it."""

import json
import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.training.recipe import DEFAULT_RECIPE
from recipes.training.token_file import write_token_file

VOCAB_SIZE = 250  # divisible by neither 64 nor any tensor size in the tests: padding is exercised


def write_corpus(folder: Path) -> None:
    """Token files with something to learn: noisy arithmetic sequences."""
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps({"made": "for a test"}))
    random = np.random.default_rng(0)
    for name, count in (("train", 200), ("validation", 40)):
        documents = [
            (random.integers(VOCAB_SIZE) + 3 * np.arange(100) + random.integers(2, size=100))
            % VOCAB_SIZE
            for _ in range(count)
        ]
        write_token_file(folder / name, documents, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small corpus."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder / "data")
    return folder / "data"


@pytest.fixture
def small(corpus: Path) -> dict[str, Any]:
    """A recipe's table, as TOML would give it: tiny.toml made smaller, on the small corpus."""
    return small_recipe(corpus)


def small_recipe(corpus: Path) -> dict[str, Any]:
    """tiny.toml made smaller, on a corpus that `write_corpus` wrote."""
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
    """A copy of a recipe's table with `section__key=value` changed; None removes the key."""
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
