"""Messages at the beginning of a run."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tomli_w

from recipes import plan
from recipes.training.recipe.loading import parse_recipe
from recipes.training.recipe.topology import Topology
from recipes.training.run_folder.progress import Progress
from recipes.training.tracking.messages import announce, crowding
from tests.commands import run_here
from tests.conftest import GPT_SWITCHES, changed


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, None),
        (GPT_SWITCHES, None),
        (GPT_SWITCHES | {"model__bias": False}, None),
        (GPT_SWITCHES | {"model__kv_heads": 2}, "with kv_heads = 2; use"),
        (GPT_SWITCHES | {"model__qk_norm": True}, "with qk_norm = true; use"),
        ({"model__bias": True}, "('rmsnorm', 'rope', 'swiglu') with bias = true; use"),
        ({"model__activation": "gelu"}, "('rmsnorm', 'rope', 'gelu'); use"),
        (
            {"model__experts": {"count": 4, "per_token": 2, "ffn_hidden_size": 48, "shared": 1}},
            "model.experts.shared = 1 without a sigmoid router; use",
        ),
    ],
)
def test_a_model_that_cannot_be_exported_is_named_at_the_start(
    changes: dict[str, Any],
    named: str | None,
    small: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = changed(small, **changes)
    found = mock.Mock(progress=Progress(), weights_only=False, path=None, in_memory=False)
    topology = Topology(pipeline=1, data=1, tensor=1)
    announce(parse_recipe(table, "test"), topology, ["a"], mock.Mock(path=tmp_path), found)
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(table))
    printed = capsys.readouterr().out
    options = ("--nodes", 1, "--gpus-per-node", 1, "--gpu", "H100", "--top", 0)
    planned = run_here(plan.main, tmp_path / "recipe.toml", *options).stdout
    for text in (printed, planned):
        lines = [line for line in text.splitlines() if "convert.py to-hf cannot export" in line]
        assert len(lines) == (named is not None), text
        assert not named or named in lines[0]


@pytest.mark.parametrize(
    ("ranks", "threads", "cores", "named"),
    [
        (2, 2, 2, ""),
        (1, 2, 4, ""),
        (2, 4, 2, "4 threads of 2 ranks share 2 cores"),
        (2, 4, 2, "set OMP_NUM_THREADS=1, or unset it"),
        (2, 16, 9, "set OMP_NUM_THREADS=4, or unset it"),
        (4, 4, 2, "slow each other down; start 2 ranks per node"),
        (4, 8, 2, "start 2 ranks per node with OMP_NUM_THREADS=1"),
    ],
)
def test_threads_that_exceed_the_cores_are_named(
    ranks: int, threads: int, cores: int, named: str
) -> None:
    message = crowding(ranks, threads, cores)
    assert named in message and bool(message) == bool(named)
