"""Average the weights of several checkpoints of a run.

The mean of the weights of the last saves often has a lower loss than the last weights, because the
noise of the learning rate averages out (LAWA, Kaddour 2022, arXiv 2209.14981).
"""

from collections.abc import Sequence
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
from threefold.checkpoint.state import WEIGHTS, CheckpointReader
from threefold.config.loading import value_text
from threefold.config.phases import table_at
from threefold.convert.verified_source import model_of, open_checkpoint, undamaged
from threefold.convert.weight_files import AVERAGED_FROM, write_weights
from threefold.run_folder.folder import versions

BLOCK_ELEMENTS = 2**24  # elements of a tensor that are averaged in float64 at a time


def sources_of(paths: Sequence[Path], last: int | None) -> list[CheckpointReader]:
    """Open and verify the checkpoints to average, oldest first.

    Args:
        paths: a run folder, or checkpoints
        last: number of the run's newest undamaged checkpoints; None: `paths` are checkpoints

    Raises:
        UserError: there are too few checkpoints, one is named twice, or they have different models
            or tokenizers.
    """
    if last is None:
        sources = [open_checkpoint(path) for path in paths]
    elif len(paths) > 1:
        raise UserError(
            f"--last {last} needs one run folder, but {len(paths)} folders are given; leave --last "
            f"out to average these checkpoints"
        )
    else:
        sources = undamaged(paths[0], last)
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
        output: folder to write
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
    found = torch.empty(shape)
    rows = max(1, BLOCK_ELEMENTS * shape[0] // max(1, found.numel()))
    for start in range(0, shape[0], rows):
        stop = min(start + rows, shape[0])
        total = sum(source.rows(WEIGHTS, name, start, stop).double() for source in sources)
        assert isinstance(total, Tensor)
        found[start:stop] = total / len(sources)
    return found


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
