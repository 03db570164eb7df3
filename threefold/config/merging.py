"""The table of each stage: the recipe's own table, with the changes of this and earlier stages."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from models.errors import UserError
from threefold.config.stage import CHANGEABLE, FIRST_STAGE, Stage


class StageTable(NamedTuple):
    """A stage of a recipe as a table without stages.

    Attributes:
        name: name of the stage
        first: its first step
        table: the recipe's table, with all changes up to this stage
        begins_schedule: True if a schedule of the learning rate begins with the stage
    """

    name: str
    first: int
    table: dict[str, Any]
    begins_schedule: bool


def stage_tables(recipe: dict[str, Any]) -> list[StageTable]:
    """Return the table of each stage of a recipe; that of the stage "first" has no changes.

    Args:
        recipe: the table of a recipe, with every default

    Raises:
        UserError: stages begin in the wrong order, or after the last step.
    """
    table = deepcopy(recipe)
    stages = [Stage.model_validate(each) for each in table.pop("stage", ())]
    steps = table["training"]["steps"]
    _check_names(stages)
    found = [StageTable(FIRST_STAGE, 1, table, begins_schedule=True)]
    counter = _TokenCounter()
    for stage in stages:
        before = found[-1]
        first = stage.start_step or counter.first_step(before, stage.start_tokens or 0)
        start = f"start_step = {first}"
        if stage.start_tokens is not None:
            start = f"start_tokens = {stage.start_tokens} (step {first})"
        if first <= before.first:
            raise UserError(
                f'{stage.key}.{start} does not come after stage "{before.name}", which begins with '
                f"step {before.first}; use start_step = {before.first + 1} or more"
            )
        if first > steps:
            raise UserError(
                f"{stage.key}.{start} comes after training.steps = {steps}; use training.steps = "
                f"{first} or more, or leave the stage out"
            )
        counter.pass_through(before, first)
        merged = merge(before.table, stage)
        found.append(StageTable(stage.name, first, merged, stage.begins_schedule))
    return found


def _check_names(stages: list[Stage]) -> None:
    names = [FIRST_STAGE]
    for stage in stages:
        if stage.name in names:
            used = "is used by another stage"
            if stage.name == FIRST_STAGE:
                used = "is the name of the steps before the first [[stage]]"
            raise UserError(
                f'stage.name = "{stage.name}" {used}; use another name, for example '
                f'"{stage.name}-{len(names) + 1}"'
            )
        names.append(stage.name)


class _TokenCounter:
    """Counter of the tokens that a run reads before each stage, in integers."""

    def __init__(self) -> None:
        self.tokens = 0

    def pass_through(self, stage: StageTable, after: int) -> None:
        """Add the tokens of a stage, whose last step comes before the step `after`."""
        for first, last, sequences in batches(stage.table["batch"], stage.first, after - 1):
            assert last is not None
            self.tokens += (last - first + 1) * sequences * _length(stage)

    def first_step(self, stage: StageTable, tokens: int) -> int:
        """Return the first step before which the run has read at least `tokens` tokens.

        The run is assumed to stay in `stage`. The step is at least the first step of the stage.
        """
        read = self.tokens
        for first, last, sequences in batches(stage.table["batch"], stage.first, None):
            steps = max(0, -(-(tokens - read) // (sequences * _length(stage))))
            if last is None or first + steps <= last:
                return first + steps
            read += (last - first + 1) * sequences * _length(stage)
        raise AssertionError("the last batch size has no last step")


def batches(
    batch: Mapping[str, Any], first: int, last: int | None
) -> list[tuple[int, int | None, int]]:
    """Return (first step, last step, global batch) for each batch size of a stage.

    With `batch.ramp`, the batch grows as Megatron's `RampupBatchsizeNumMicroBatchesCalculator`
    computes it, from the number of samples read before a step: start + increment x floor(samples
    read / (ramp.samples / number of increments)).

    Args:
        batch: the [batch] table of the stage
        first: first step of the stage
        last: last step of the stage; None if it is not known
    """
    size, ramp = batch["global_sequences"], batch.get("ramp")
    found: list[tuple[int, int | None, int]] = []
    if ramp:
        increments = (size - ramp["start_sequences"]) // ramp["increment"]
        read = 0
        for number in range(increments):
            sequences = ramp["start_sequences"] + number * ramp["increment"]
            until = -(-(number + 1) * ramp["samples"] // increments)
            steps = -(-(until - read) // sequences)
            if steps <= 0 or (last is not None and first > last):
                continue
            end = first + steps - 1 if last is None else min(first + steps - 1, last)
            found.append((first, end, sequences))
            read += steps * sequences
            first += steps
    if last is None or first <= last:
        found.append((first, last, size))
    return found


def merge(table: dict[str, Any], stage: Stage) -> dict[str, Any]:
    """Return a recipe's table with the changes of a stage.

    Lists and tables within a section (`data.train`, `model.rope_scaling`, `optimizer.schedule`) are
    replaced as a whole. Another schedule of the pipeline removes the number of chunks and the
    layers per stage, which belong to the old one; a stage that begins a schedule by setting only
    the learning rate removes the length of the old schedule.
    """
    merged = deepcopy(table)
    for section in CHANGEABLE:
        changes = getattr(stage, section)
        merged[section] = {**merged[section], **deepcopy(changes)}
    if "schedule" in stage.layout:
        for key in ("chunks", "layers_per_stage"):
            if key not in stage.layout:
                merged["layout"].pop(key, None)
    if stage.begins_schedule and "schedule" not in stage.optimizer:
        merged["optimizer"]["schedule"].pop("steps", None)
    merged["batch"].pop("ramp", None)  # it ends before the next stage, which plan.py checks
    return merged


def _length(stage: StageTable) -> int:
    return stage.table["model"]["sequence_length"]
