"""Convert a run's checkpoint to another layout, or average several.

A checkpoint holds logical tensors, so any layout can read it without conversion. This command
checks the new layout ahead of time, records it in the checkpoint's recipe, and distributes the
tensors evenly over one set of files per new rank.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from models.errors import UserError
from models.layer_specs import logical_shapes
from threefold.checkpoint.compatibility import (
    TRAINING_ONLY,
    differences,
    spelled_out,
)
from threefold.checkpoint.format import FileRecord, TensorFileWriter, tensor_key
from threefold.checkpoint.state import WEIGHTS, CheckpointReader
from threefold.checkpoint.writer import KINDS_OF_FILE, assign_owners
from threefold.config.deepspeed_json import build_deepspeed_config
from threefold.config.loading import apply_overrides, parse_recipe, value_text
from threefold.config.parallel_dims import LaunchEnvironment, ParallelDims
from threefold.config.phases import recipe_at, table_at
from threefold.config.recipe import Recipe
from threefold.convert.files import (
    AVERAGED_FROM,
    RESHAPED_FROM,
    model_of,
    open_checkpoint,
    undamaged,
    write_weights,
)
from threefold.run_folder.folder import layout_of, versions

# A change of these keys would make it another run.
FIXED_KEYS = ("model.", "seed", "data.", "optimizer.kind")


def new_recipe(
    source: CheckpointReader, overrides: list[str], *, ranks: int
) -> tuple[Recipe, ParallelDims]:
    """Return the checkpoint's recipe with the overrides, and its parallel axes on the new ranks.

    Raises:
        UserError: The new recipe describes another run, or its layout is not valid.
    """
    if "seed" not in source.manifest.recipe or not source.manifest.has_moments:
        raise UserError(
            f"{source.path} has only weights, so there is no run to reshape; name it in "
            f"training.initial_weights, which any layout can read"
        )
    table = deepcopy(source.manifest.recipe)
    table.pop("cluster", None)  # it describes the old machine
    before = parse_recipe(deepcopy(table), str(source.path))  # with the defaults of newer keys
    apply_overrides(table, overrides)
    recipe = parse_recipe(table, "".join(f"--set {override} " for override in overrides).strip())
    different = differences(before.model_dump(mode="json"), recipe.model_dump(mode="json"))
    changed = [key for key in different if key.startswith(FIXED_KEYS)]
    if changed:
        raise UserError(
            f"changing {changed[0]} would make it another run; keep the value in {source.path}"
        )
    phase = recipe_at(recipe, source.manifest.step + 1)  # in which the run resumes
    dims = phase.parallel_dims(LaunchEnvironment(size=ranks, local_size=ranks))
    build_deepspeed_config(phase, dims)
    return recipe, dims


def reshape(source: CheckpointReader, output: Path, *, recipe: Recipe, dims: ParallelDims) -> None:
    """Write the tensors into files of the new ranks, with one tensor in memory at a time."""
    shapes = logical_shapes(model_of(source))
    files: dict[str, FileRecord] = {}
    tensors: dict[str, str] = {}
    owners = assign_owners(shapes, dims.world_size)
    for rank in range(dims.world_size):
        names = [name for name in shapes if owners[name] == rank]
        for label, kinds in KINDS_OF_FILE.items():
            keys = {
                key: (kind, name)
                for kind in kinds
                for name in names
                if (key := tensor_key(kind, name)) in source.manifest.tensors
            }
            file = f"{label}-{rank:05d}.safetensors"
            own = {key: shapes[name] for key, (_, name) in keys.items()}
            if not own:
                continue
            with TensorFileWriter(output / file, own, dtype="F32") as writer:
                for key, (kind, name) in keys.items():
                    writer.write(key, source.tensor(kind, name).numpy().data)
            files[file] = writer.record
            tensors |= dict.fromkeys(own, file)
    replace(
        source.manifest,
        recipe=recipe.model_dump(mode="json"),
        layout=layout_of(recipe_at(recipe, source.manifest.step + 1), dims)
        | {RESHAPED_FROM: str(source.path)},
        versions=versions(),
        tensors=tensors,
        files=files,
    ).write(output)


# Average the weights of several checkpoints of a run.
#
# The mean of the weights of the last saves often has a lower loss than the last weights, because
# the noise of the learning rate averages out (LAWA, Kaddour 2022, arXiv 2209.14981).

BLOCK_ELEMENTS = 2**24  # elements of a tensor that are averaged in float64 at a time


def sources_of(paths: Sequence[Path], last: int | None) -> list[CheckpointReader]:
    """Open the checkpoints to average, oldest first, and verify the files of their weights.

    Args:
        paths: a run folder, or checkpoints
        last: number of the run's newest undamaged checkpoints; None: `paths` are checkpoints

    Raises:
        UserError: there are too few checkpoints, one is named twice, or they have different models
            or tokenizers.
    """
    if last is None:
        sources = [open_checkpoint(path, (WEIGHTS,)) for path in paths]
    elif len(paths) > 1:
        raise UserError(
            f"--last {last} needs one run folder, but {len(paths)} folders are given; leave --last "
            f"out to average these checkpoints"
        )
    else:
        sources = undamaged(paths[0], last, (WEIGHTS,))
        if len(sources) < last:
            fewer = f"use --last {len(sources)}, or " if len(sources) > 1 else ""
            raise UserError(
                f"--last {last}: {paths[0]} has {len(sources)} undamaged checkpoints; {fewer}keep "
                f"more of them with checkpoint.keep = {last} or checkpoint.keep_every"
            )
    if len({source.path.resolve() for source in sources}) < max(2, len(sources)):
        raise UserError(
            f"{', '.join(str(source.path) for source in sources)}: a mean needs two or more "
            f"different checkpoints; use --last 2 with a run folder, or name checkpoints"
        )
    sources.sort(key=lambda source: source.manifest.step)
    for source in sources[1:]:
        _check_same_model(sources[0], source)
    return sources


def average(sources: Sequence[CheckpointReader], output: Path) -> None:
    """Write a checkpoint with the mean of the weights, with one tensor in memory at a time.

    The checkpoint has the recipe, the step and the tokens of the last source, and no optimizer
    state.

    Args:
        sources: the checkpoints, oldest first
    """
    shapes = logical_shapes(model_of(sources[-1]))
    files, tensors = write_weights(output, shapes, lambda name: mean(sources, name, shapes[name]))
    replace(
        sources[-1].manifest,
        loss_scale=None,
        validation_loss=None,
        layout={AVERAGED_FROM: [str(source.path) for source in sources]},
        versions=versions(),
        tensors=tensors,
        files=files,
    ).write(output)


def mean(sources: Sequence[CheckpointReader], name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the mean of a weight over checkpoints, computed in float64, as fp32."""
    tensor = torch.empty(shape)
    rows = max(1, BLOCK_ELEMENTS * shape[0] // max(1, tensor.numel()))
    for start in range(0, shape[0], rows):
        stop = min(start + rows, shape[0])
        total = sum(source.rows(WEIGHTS, name, start, stop).double() for source in sources)
        assert isinstance(total, Tensor)
        tensor[start:stop] = total / len(sources)
    return tensor


def _check_same_model(first: CheckpointReader, other: CheckpointReader) -> None:
    models = (
        spelled_out(table_at(source.manifest.recipe, source.manifest.step)["model"])
        for source in (first, other)
    )
    changed = {
        f"model.{key}": values
        for key, values in differences(*models).items()
        if key not in TRAINING_ONLY
    }
    tokenizers = [source.manifest.data.get("tokenizer") for source in (first, other)]
    if not changed and len(set(tokenizers)) > 1:
        changed["SHA-256 of the tokenizer"] = tokenizers
    if changed:
        key = min(changed, key=lambda name: name != "model.parametrization")  # or the first one
        before, now = changed[key]
        raise UserError(
            f"{first.path} and {other.path} have different models: {key} = {value_text(before)} "
            f"and {value_text(now)}; average checkpoints of one run"
        )
