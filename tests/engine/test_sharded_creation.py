"""ZeRO-3 creates each rank's part of the weights only, with the same values as other layouts."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import initialization
from models.attention import ModelAxes
from models.initialization import NormalRows, initial_std, initialize
from models.layer_specs import SequentialModel, layer_specs, logical_parameters
from models.parallel.collectives import TensorAxis
from models.sharding import place_of, sharding_of
from tests.conftest import GPT_SWITCHES, changed, long_in_turn, small_recipe
from tests.ranks import join_world, run_ranks
from threefold.config.deepspeed_json import build_deepspeed_config
from threefold.config.loading import REPOSITORY, parse_recipe
from threefold.engine.axes import build_axes
from threefold.engine.build import TORCH_LINEAR, build_model

CORPUS = Path("no corpus is read")
SMALL_CHUNK = 300  # elements; most weights have several chunks
FIRST_VALUE = -0.7910821437835693  # of torch.randn, for the seed and the name in the test


def table(**switches: Any) -> dict[str, Any]:
    """Return the table of a small recipe with ZeRO-3."""
    return changed(small_recipe(CORPUS), deepspeed="ds_configs/zero3_fp32.json", **switches)


def parts_of_rank(settings: dict[str, Any]) -> tuple[int, dict[str, tuple[int, Tensor]]]:
    """Return this rank's tensor rank, and for each weight its first own element and the values."""
    world = join_world()
    initialization.CHUNK_ELEMENTS = SMALL_CHUNK
    recipe = parse_recipe(settings, "test")
    dims = recipe.parallel_dims(world)
    config = build_deepspeed_config(recipe, dims)
    axes = build_axes(recipe, dims)
    model = build_model(recipe, axes, config=config)
    axis = axes.tensor
    parts = {}
    for name, parameter in logical_parameters(model, recipe.model):
        partitioned: Any = parameter
        assert parameter.numel() == 0  # nothing but the part is left
        share = partitioned.ds_tensor
        parts[name] = (dims.coordinates(world.rank).data * share.numel(), share.clone())
    return axis.rank, parts


@pytest.mark.parametrize("switches", [{}, GPT_SWITCHES], ids=["llama", "gpt, tied"])
def test_each_rank_has_its_part_of_the_same_values(
    switches: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = table(layout__tensor=2, **switches)
    found = run_ranks(4, parts_of_rank, settings)
    monkeypatch.setattr(initialization, "CHUNK_ELEMENTS", SMALL_CHUNK)
    recipe = parse_recipe(settings, "test")
    for tensor_rank in range(2):
        axis = TensorAxis(rank=tensor_rank, size=2)
        model = SequentialModel(layer_specs(recipe.model, ModelAxes(tensor=axis)))
        parameters = dict(logical_parameters(model, recipe.model))
        initialize(
            parameters.items(),
            recipe.model,
            seed=recipe.seed,
            tensor=TensorAxis(rank=tensor_rank, size=2),
        )
        holders = [parts for rank, parts in found if rank == tensor_rank]
        assert len(holders) == 2
        for parts in holders:
            assert parts.keys() == parameters.keys()
            for name, (first, values) in parts.items():
                own = parameters[name].detach().flatten()[first : first + values.numel()]
                assert torch.equal(values[: own.numel()], own), name
                assert not values[own.numel() :].any()  # padding


@pytest.mark.parametrize("tensor_rank", [0, 1])
def test_threads_draw_the_rows_of_the_logical_tensor(
    tensor_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initialization, "CHUNK_ELEMENTS", SMALL_CHUNK)
    monkeypatch.setattr(initialization, "CHUNKS_PER_THREAD", 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    config = parse_recipe(table(layout__tensor=2), "test").model
    axis = TensorAxis(rank=tensor_rank, size=2)
    parameters = dict(
        logical_parameters(SequentialModel(layer_specs(config, ModelAxes(tensor=axis))), config)
    )
    initialize(parameters.items(), config, seed=5, tensor=TensorAxis(rank=tensor_rank, size=2))
    drawn = 0
    for name, parameter in parameters.items():
        if name.endswith("norm.weight"):
            continue
        sharding = sharding_of(parameter)
        rows = NormalRows(sharding.shape, name=name, seed=5)
        std = initial_std(config, place_of(name, sharding.role))
        part = sharding.local_part(
            std * rows(0, sharding.shape[0]), TensorAxis(rank=tensor_rank, size=2)
        )
        assert torch.equal(parameter, part), name
        drawn += parameter.numel() > 4 * SMALL_CHUNK  # by three threads or more
    assert drawn == 10


def test_rows_do_not_depend_on_which_of_them_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialization, "CHUNK_ELEMENTS", 12)
    rows = NormalRows((10, 5), name="a", seed=1)
    everything = rows(0, 10)
    assert everything.shape == (10, 5) and len(everything.unique()) == 50
    for start, stop in ((0, 1), (1, 4), (3, 10), (9, 10), (4, 6)):
        drawn = NormalRows((10, 5), name="a", seed=1)(start, stop)
        assert torch.equal(drawn, everything[start:stop])


def test_only_chunks_with_needed_rows_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialization, "CHUNK_ELEMENTS", 10)
    rows, drawn = NormalRows((100, 5), name="a", seed=1), []
    draw = rows._draw
    monkeypatch.setattr(rows, "_draw", lambda number: drawn.append(number) or draw(number))
    for start in range(50, 60):  # a row at a time, of 2 rows in each chunk
        rows(start, start + 1)
    assert drawn == [25, 26, 27, 28, 29]


def test_a_tensor_of_one_chunk_is_drawn_at_once() -> None:
    """The values of a tensor that fits in one chunk do not depend on the size of a chunk."""
    name, shape = "blocks.0.mlp.up.weight", (6, 4)
    rows = NormalRows(shape, name=name, seed=1234)
    assert rows.rows_of_chunk >= 6
    assert float(rows(0, 6)[0, 0]) == pytest.approx(FIRST_VALUE, abs=1e-6)


@long_in_turn(1)
def test_host_memory_is_less_than_twice_the_part() -> None:
    command = [sys.executable, "benchmarks/zero3_start.py", "recipes/llama/7b.toml"]
    done = subprocess.run(
        [*command, "--ranks", "8", "--layers", "3", "--whole"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    ratios = {
        line.split(" | ")[0].strip("| "): float(line.strip("| ").split(" | ")[-1])
        for line in done.stdout.splitlines()[2:]
    }
    assert 0.9 < ratios["sharded"] < 2 < 6 < ratios["whole"], done.stdout


def kinds_of_linear() -> list[bool]:
    """Return for models with ZeRO-3, ZeRO-1 and ZeRO-3 if `F.linear` is torch's."""
    world = join_world()
    kinds = []
    for stage in (3, 1, 3):
        recipe = parse_recipe({**table(), "deepspeed": f"ds_configs/zero{stage}_fp32.json"}, "test")
        dims = recipe.parallel_dims(world)
        build_model(recipe, build_axes(recipe, dims), config=build_deepspeed_config(recipe, dims))
        kinds.append(torch.nn.functional.linear is TORCH_LINEAR)
    return kinds


def test_only_models_with_zero3_replace_the_linear_function() -> None:
    assert run_ranks(1, kinds_of_linear) == [[False, True, False]]
