"""One loss: the same recipe in every layout trains with the same losses, norms and weights."""

import contextlib
import math
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from models.layer_specs import logical_parameters
from recipes.training.data import TrainingData
from recipes.training.deepspeed_config import build_deepspeed_config
from recipes.training.engine import Engine, build_engine, start_processes
from recipes.training.learning_rate import learning_rate
from recipes.training.recipe import Recipe, parse_recipe
from recipes.training.topology import Coordinates, World
from tests.conftest import GPT_SWITCHES, changed, small_recipe
from tests.ranks import run_ranks

GPT = GPT_SWITCHES
ZERO2 = {"deepspeed": "ds_configs/zero2_fp32.json"}
ZERO3 = {"deepspeed": "ds_configs/zero3_fp32.json"}
PIPELINE2 = {"layout__pipeline": 2}
TENSOR2 = {"layout__tensor": 2}
SEQUENCE = {"layout__sequence_parallel": True}
CLIPPED = {"optimizer__gradient_clipping": 0.5}  # below every norm of the run

BF16 = {"deepspeed": "ds_configs/zero1_bf16.json"}

# world size -> name -> what differs from the one-rank run it is compared with
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "zero2": ZERO2,
        "zero3": ZERO3,
        "micro-batch 4": {"batch__micro_sequences": 4},
        "full recomputation": {"layout__recompute": "full"},
        "gpt zero3": GPT | CLIPPED | ZERO3,
    },
    2: {
        "pipeline 2": PIPELINE2,
        "tensor 2": TENSOR2,
        "data 2": {},
        "tensor 2 sequence-parallel": TENSOR2 | SEQUENCE,
        "zero2 data 2": ZERO2,
        "zero3 data 2": ZERO3,
        "zero2 tensor 2": ZERO2 | TENSOR2,
        "zero3 tensor 2": ZERO3 | TENSOR2,
        "gpt pipeline 2": GPT | CLIPPED | PIPELINE2,
        "gpt tensor 2": GPT | CLIPPED | TENSOR2,
        "gpt zero3 data 2": GPT | CLIPPED | ZERO3,
        "bf16 pipeline 2": BF16 | PIPELINE2,
        "bf16 tensor 2 sequence-parallel": BF16 | TENSOR2 | SEQUENCE,
        "bf16 data 2": BF16,
        "bf16 zero2 data 2": {"deepspeed": "ds_configs/zero2_bf16.json"},
        "bf16 zero3 data 2": {"deepspeed": "ds_configs/zero3_bf16.json"},
        "bf16-gpt pipeline 2": BF16 | GPT | CLIPPED | PIPELINE2,
    },
    4: {
        "pipeline 2 tensor 2": PIPELINE2 | TENSOR2,
        "pipeline 2 data 2": PIPELINE2,
        "pipeline 2 tensor 2 sequence-parallel selective": PIPELINE2
        | TENSOR2
        | SEQUENCE
        | {"layout__recompute": "selective"},
        "zero2 tensor 2 data 2": ZERO2 | TENSOR2,
        "gpt pipeline 2 tensor 2 sequence-parallel": GPT | CLIPPED | PIPELINE2 | TENSOR2 | SEQUENCE,
    },
}
MUTANTS = {  # seeded fault on two ranks -> layout, what is patched, with what
    "gpt: tied gradients stay apart": (
        GPT | CLIPPED | PIPELINE2,
        "deepspeed.pipe.PipelineModule.get_tied_weights_and_groups",
        lambda self: [],
    ),
    "both data ranks read the first one's samples": (
        {},
        "recipes.training.topology.Topology.coordinates",
        lambda self, rank: Coordinates(pipeline=0, data=0, tensor=0),
    ),
    "sharded parameters count once in the norm": (
        TENSOR2 | CLIPPED,
        "deepspeed.runtime.zero.stage_1_and_2.is_model_parallel_parameter",
        lambda parameter: False,
    ),
}
REFERENCES = {
    "": {},
    "gpt": GPT | CLIPPED,
    "clipped": CLIPPED,
    "bf16": BF16,
    "bf16-gpt": BF16 | GPT | CLIPPED,
}
CASES = [(world_size, name) for world_size, layouts in LAYOUTS.items() for name in layouts]


def train_worker(corpus: str, layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train every layout of this world size; losses, norms, validation loss, weights."""
    world = join_world()
    results: dict[str, Any] = {}
    for name, changes in layouts.items():
        with seeded_fault(name):
            results[name] = train_layout(world, Path(corpus), changes)
    dist.barrier()
    return results


def train_layout(world: World, corpus: Path, changes: dict[str, Any]) -> dict[str, Any]:
    recipe = parse_recipe(changed(small_recipe(corpus), **changes), "test")
    topology = recipe.topology(world)
    engine = build_engine(recipe, topology, build_deepspeed_config(recipe, topology))
    data = TrainingData(recipe, topology, topology.coordinates(world.rank).data)
    result = train(engine, data, recipe, range(1, recipe.training.steps + 1))
    result["validation"] = engine.evaluate(data.evaluation())
    if changes in REFERENCES.values():
        result["weights"] = weights(engine, recipe)
    return result


def seeded_fault(name: str) -> contextlib.AbstractContextManager:
    """What a case of MUTANTS breaks; nothing for the layouts."""
    if name not in MUTANTS:
        return contextlib.nullcontext()
    _, target, broken = MUTANTS[name]
    return mock.patch(target, broken)


def resume_worker(corpus: str, layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train, saving after step 4; load that into a fresh engine and train on."""
    world = join_world()
    results: dict[str, Any] = {}
    for name, changes in layouts.items():
        recipe = parse_recipe(changed(small_recipe(Path(corpus)), **changes), name)
        topology = recipe.topology(world)
        config = build_deepspeed_config(recipe, topology)
        data = TrainingData(recipe, topology, topology.coordinates(world.rank).data)
        folders = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folders)
        engine = build_engine(recipe, topology, config)
        train(engine, data, recipe, range(1, 5))
        engine.save(Path(folders[0]))
        undisturbed = train(engine, data, recipe, range(5, 9))
        dist.barrier()
        again = build_engine(recipe, topology, config)
        again.load(Path(folders[0]))
        results[name] = (undisturbed, train(again, data, recipe, range(5, 9)))
    dist.barrier()
    return results


def join_world() -> World:
    world = World.from_environment(os.environ)
    torch.set_num_threads(1)
    start_processes(world)
    return world


def train(engine: Engine, data: TrainingData, recipe: Recipe, steps: range) -> dict[str, Any]:
    results = [
        engine.train_step(
            step, data.step(step), learning_rate(step, recipe.optimizer, recipe.training.steps)
        )
        for step in steps
    ]
    return {
        "losses": [result.loss for result in results],
        "grad_norms": [result.grad_norm for result in results],
    }


def weights(engine: Engine, recipe: Recipe) -> dict[str, torch.Tensor]:
    parameters = logical_parameters(engine.wrapped.module, recipe.model)
    return {name: parameter.detach().clone() for name, parameter in parameters}


@pytest.fixture(scope="session")
def references(corpus: Path) -> dict[str, Any]:
    return run_ranks(1, train_worker, str(corpus), REFERENCES)[0]


@pytest.fixture(scope="session")
def trained(corpus: Path) -> dict[tuple[int, str], Any]:
    """Every layout's and mutant's results, one set of processes per world size."""
    mutants = {name: changes for name, (changes, *_) in MUTANTS.items()}
    return {
        (world_size, name): result
        for world_size, layouts in (LAYOUTS | {2: LAYOUTS[2] | mutants}).items()
        for name, result in run_ranks(world_size, train_worker, str(corpus), layouts)[0].items()
    }


@pytest.mark.parametrize(("world_size", "name"), CASES)
def test_losses_are_those_of_one_rank(
    world_size: int, name: str, trained: dict[tuple[int, str], Any], references: dict[str, Any]
) -> None:
    first = name.split()[0]
    expected = references[first if first in references else ""]
    got = trained[world_size, name]
    loss, norm = (2e-3, 2e-2) if first.startswith("bf16") else (1e-5, 1e-4)  # bf16 has 8 bits
    assert got["losses"] == pytest.approx(expected["losses"], rel=loss)
    assert got["grad_norms"] == pytest.approx(expected["grad_norms"], rel=norm)
    assert got["validation"] == pytest.approx(expected["validation"], rel=loss)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_seeded_fault_is_seen(
    name: str, trained: dict[tuple[int, str], Any], references: dict[str, Any]
) -> None:
    expected = references["gpt" if name.startswith("gpt") else ""]
    if "norm" in name:
        expected = references["clipped"]
    got = trained[2, name]
    same_losses = got["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert not (same_losses and got["grad_norms"] == pytest.approx(expected["grad_norms"], 1e-4))


def test_the_references_learn_and_clip(references: dict[str, Any]) -> None:
    for reference in references.values():
        assert reference["losses"][0] == pytest.approx(math.log(250), rel=0.02)
        assert reference["losses"][-1] < 0.9 * reference["losses"][0]
    assert min(references["gpt"]["grad_norms"]) > 0.5


def test_padding_rows_stay_zero(references: dict[str, Any]) -> None:
    for reference, name in (("", "head.weight"), ("gpt", "embedding.weight")):
        table = references[reference]["weights"][name]
        assert table.shape[0] == 256
        assert torch.count_nonzero(table[250:]) == 0 and torch.count_nonzero(table[:250]) > 0


def test_resuming_continues_bit_for_bit(corpus: Path) -> None:
    layouts = {
        "pipeline 2": PIPELINE2,
        "bf16": BF16 | PIPELINE2,
        "zero2": ZERO2,
        "zero3, gpt with dropout": GPT | ZERO3 | {"model__dropout": 0.1},
        "gpt with dropout": GPT | PIPELINE2 | {"model__dropout": 0.1},
        "tensor 2, gpt with dropout": GPT | TENSOR2 | {"model__dropout": 0.1},
    }
    for name, (undisturbed, resumed) in run_ranks(2, resume_worker, str(corpus), layouts)[
        0
    ].items():
        assert resumed == undisturbed, name
