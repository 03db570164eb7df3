"""Comparison of our checkpoints with DeepSpeed's universal checkpoints.

DeepSpeed saves the state of each rank. Its converter then merges fragments, tensor ranks and stages
according to lists of patterns. The result must equal our checkpoint of the same step.
"""

import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from deepspeed.checkpoint import constants, ds_to_universal

from models.layer_specs import layer_names
from models.sharding import Sharding, sharding_of
from tests.conftest import changed, small_recipe
from tests.ranks import join_world, run_ranks
from threefold.checkpoint.state import CheckpointReader
from threefold.config.loading import parse_recipe
from threefold.config.recipe import Recipe
from threefold.convert.files import open_checkpoint
from threefold.prove.training import save, start, train_step
from threefold.run_folder.folder import RunFolder

KINDS = {"fp32": "weights", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
LAYOUTS = {
    "tensor 2 x pipeline 2": {"layout__tensor": 2, "layout__pipeline": 2},
    "data 2 x pipeline 2, tied": {"layout__pipeline": 2, "model__tie_embeddings": True},
    "tensor 2 x data 2, zero 2": {
        "layout__tensor": 2,
        "deepspeed": "ds_configs/zero2_fp32.json",
    },
}


def train_and_save(recipes: list[Recipe], folder: Path) -> None:
    """Train two steps on each rank, then save our checkpoint and DeepSpeed's."""
    world = join_world()
    for number, recipe in enumerate(recipes):
        engine, data = start(recipe, world)
        for step in (1, 2):
            train_step(engine, data, step)
        save(engine, data, RunFolder(folder / f"ours{number}"), step=2)
        shardings: dict[str, Sharding] = {}
        everyones = [None] * world.size
        own = [(name, sharding_of(p)) for name, p in engine.parameters()]
        torch.distributed.all_gather_object(everyones, own)
        for theirs in everyones:
            shardings |= dict(theirs)
        information = {constants.UNIVERSAL_CHECKPOINT_INFO: patterns(recipe, shardings)}
        engine.wrapped.save_checkpoint(
            str(folder / f"deepspeed{number}"), tag="2", client_state=information
        )


def deepspeed_name(recipe: Recipe, name: str) -> str:
    """Return the name of a parameter in DeepSpeed's modules."""
    if name.startswith("embedding.") and recipe.model.tie_embeddings:
        return f"tied_modules.{name}"
    names = layer_names(recipe.model)
    layer = next(layer for layer in names if name.startswith(f"{layer}."))
    return f"{names.index(layer)}.{name.removeprefix(f'{layer}.')}"


def patterns(recipe: Recipe, shardings: dict[str, Sharding]) -> dict[str, object]:
    """Return the patterns that tell DeepSpeed the sharding of each parameter."""
    rows, replicated, vocabulary, joined, widths = [], [], [], [], {}
    tensor_size = recipe.layout.tensor
    for name, sharding in shardings.items():
        pattern = re.escape(deepspeed_name(recipe, name)) + "$"
        if sharding.dimension is None:
            replicated.append(pattern)
        elif sharding.dimension == 1:
            rows.append(pattern)
        elif sharding.padded_size:
            vocabulary.append(pattern)
        elif len(sharding.blocks) > 1:
            shape = (tuple(sharding.blocks), *sharding.shape[1:])
            joined.append({"patterns": [pattern], "shape": shape, "partition_dim": 0})
            widths[pattern] = [[size // tensor_size] * tensor_size for size in sharding.blocks]
    tied = ["tied_modules.embedding.weight$"] if recipe.model.tie_embeddings else []
    return {
        constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        constants.ORIGINAL_VOCAB_SIZE: recipe.model.vocab_size,
        constants.VOCABULARY_PARAMETER_PATTERNS: vocabulary,
        constants.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: rows,
        constants.TP_REPLICATED_PARAMETER_PATTERNS: replicated,
        constants.PARAMETER_WITH_SUB_PARAMS: joined,
        constants.SUB_PARAM_SHARD_WIDTHS: widths,
        constants.PIPELINE_REPLICATED_PARAMETER_PATTERNS: tied,
    }


@pytest.fixture(scope="module")
def saved(
    corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Recipe, CheckpointReader, Path]]:
    """Return layout -> (recipe, our checkpoint, DeepSpeed's converted checkpoint)."""
    folder = tmp_path_factory.mktemp("universal")
    recipes = [
        parse_recipe(changed(small_recipe(corpus), **layout), name)
        for name, layout in LAYOUTS.items()
    ]
    run_ranks(4, train_and_save, recipes, folder)
    found = {}
    for number, (name, recipe) in enumerate(zip(LAYOUTS, recipes, strict=True)):
        universal = folder / f"universal{number}"
        ds_to_universal.main(
            Namespace(
                input_folder=str(folder / f"deepspeed{number}" / "2"),
                output_folder=str(universal),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=False,
            )
        )
        found[name] = recipe, open_checkpoint(folder / f"ours{number}"), universal / "zero"
    return found


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_deepspeeds_converter_finds_the_same_tensors(
    layout: str, saved: dict[str, tuple[Recipe, CheckpointReader, Path]]
) -> None:
    recipe, ours, universal = saved[layout]
    names = [name for name in ours.manifest.tensors if not name.startswith("exp_avg")]
    assert len(names) == len(list(universal.iterdir())) - 1  # optimizer_state.pt
    for name in names:
        for file, kind in KINDS.items():
            path = universal / deepspeed_name(recipe, name) / f"{file}.pt"
            theirs = torch.load(path, weights_only=False)["param"]
            assert torch.equal(ours.tensor(kind, name), theirs), (name, kind)
