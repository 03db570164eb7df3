"""The stages of a run, the table of each, and the recipe that each step follows.

`StagePlan` is the only place that knows about `[[stage]]` tables and `batch.ramp`. Every other
module works with the plain recipe of a step, which has neither.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pydantic import ValidationError

from models.errors import UserError
from threefold.config.optimization import learning_rate
from threefold.config.parallel_dims import World
from threefold.config.recipe import Recipe
from threefold.config.sections import CHANGEABLE, FIRST_STAGE, Stage

# The table of each stage: the recipe's own table, with the changes of this and earlier stages.


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
    replaced as a whole. Another schedule of the pipeline removes the virtual stages and the
    layers per stage, which belong to the old one; a stage that begins a schedule by setting only
    the learning rate removes the length of the old schedule.
    """
    merged = deepcopy(table)
    for section in CHANGEABLE:
        changes = getattr(stage, section)
        merged[section] = {**merged[section], **deepcopy(changes)}
    if "schedule" in stage.layout:
        for key in ("virtual_stages", "layers_per_stage"):
            if key not in stage.layout:
                merged["layout"].pop(key, None)
    if stage.begins_schedule and "schedule" not in stage.optimizer:
        merged["optimizer"]["schedule"].pop("steps", None)
    merged["batch"].pop("ramp", None)  # it ends before the next stage, which plan.py checks
    return merged


def _length(stage: StageTable) -> int:
    return stage.table["model"]["sequence_length"]


# Keys that may change between two steps of a process. Any other change needs another engine.
IN_PLACE = {
    "batch": ("global_sequences",),
    "optimizer": ("learning_rate", "schedule"),
    "data": ("train", "validation", "separate_documents"),
}


@dataclass(frozen=True, kw_only=True)
class Span:
    """Successive steps with the same recipe: a stage, or the part of it with one batch size.

    Attributes:
        stage: name of the stage
        number: number of the stage, from 0
        first, last: first and last step
        recipe: the recipe of these steps, without stages and without a ramp
        schedule_first, schedule_last: first and last step of the learning rate's schedule
        part: number of the part of the data, from 0; a part ends where the corpora, their weights,
            the sequence length, the separation of documents or the rotary positions change
    """

    stage: str
    number: int
    first: int
    last: int
    recipe: Recipe
    schedule_first: int
    schedule_last: int
    part: int

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.last - self.first + 1

    @property
    def schedule_end(self) -> int:
        """The last step of the schedule, which may come after the last step of the run."""
        steps = self.recipe.optimizer.schedule.steps
        return self.schedule_first + steps - 1 if steps else self.schedule_last

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        own = step - self.schedule_first + 1
        return learning_rate(
            own, self.recipe.optimizer, self.schedule_last - self.schedule_first + 1
        )

    @cached_property
    def engine_settings(self) -> dict[str, Any]:
        """The settings from which an engine is built; a span with other settings needs another."""
        table = self.recipe.model_dump(mode="json")
        for section, keys in IN_PLACE.items():
            for key in keys:
                table[section].pop(key)
        return table


class StageRejected(Exception):
    """The recipe of a stage is not valid.

    Attributes:
        stage: name of the stage
        table: its recipe
        error: the errors of pydantic
    """

    def __init__(self, stage: str, table: dict[str, Any], error: ValidationError):
        super().__init__(stage)
        self.stage, self.table, self.error = stage, table, error


class StagePlan:
    """The spans of a run.

    Attributes:
        recipe: the recipe, with its stages
        spans: the spans, in the order of their steps

    Args:
        recipe: a valid recipe

    Raises:
        UserError: a stage does not fit into the run; the message names it.
        StageRejected: the recipe of a stage is not valid.
    """

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.spans = _spans(recipe)

    @property
    def stages(self) -> list[Span]:
        """The last span of each stage, which has the full batch."""
        return [
            span
            for span, following in zip(self.spans, [*self.spans[1:], None], strict=True)
            if following is None or following.number != span.number
        ]

    @property
    def is_pipelined(self) -> bool:
        """True if a stage of the run has a pipeline."""
        return any(span.recipe.layout.pipeline > 1 for span in self.spans)

    @property
    def names(self) -> list[str]:
        """The names of the stages."""
        return [span.stage for span in self.stages]

    def at(self, step: int) -> Span:
        """Return the span of a step; the last span for later steps, the first for step 0."""
        return next((span for span in self.spans if step <= span.last), self.spans[-1])

    def begins_stage(self, step: int) -> bool:
        """Return True if a step is the first one of a stage, but not of the run."""
        span = self.at(step)
        return step > 1 and step == span.first and self.at(step - 1).number != span.number

    def steps_of(self, stage: str) -> range:
        """Return the steps of a stage.

        Raises:
            UserError: there is no such stage.
        """
        spans = [span for span in self.spans if span.stage == stage]
        if not spans:
            raise UserError(f'there is no stage "{stage}"; use one of {", ".join(self.names)}')
        return range(spans[0].first, spans[-1].last + 1)

    def recipe_of(self, stage: str) -> Recipe:
        """Return the plain recipe of a stage, with its full batch.

        Raises:
            UserError: there is no such stage.
        """
        return self.at(self.steps_of(stage)[-1]).recipe

    def samples_before(self, step: int) -> int:
        """Return the number of samples that a run without rollbacks reads before a step."""
        return sum(
            (min(span.last, step - 1) - span.first + 1) * span.recipe.batch.global_sequences
            for span in self.spans
            if span.first < step
        )

    def tokens_before(self, step: int) -> int:
        """Return the number of tokens that a run without rollbacks reads before a step."""
        return sum(
            (min(span.last, step - 1) - span.first + 1) * span.recipe.tokens_per_step
            for span in self.spans
            if span.first < step
        )

    @property
    def total_tokens(self) -> int:
        """The tokens of the whole run."""
        return self.tokens_before(self.recipe.training.steps + 1)

    def length_of_part(self, part: int) -> int:
        """Return the sequence length of a part of the data."""
        return self.first_of_part(part).recipe.model.sequence_length

    def first_of_part(self, part: int) -> Span:
        """Return the first span of a part of the data.

        Raises:
            UserError: the recipe has no such part; a run that has read it rolled back to an earlier
                stage, and its recipe has changed since.
        """
        for span in self.spans:
            if span.part == part:
                return span
        raise UserError(
            f"the run has read data of {part + 1} stages before it rolled back, and the recipe has "
            f"only {len(self.parts)}; use the stages with which it was trained"
        )

    @property
    def parts(self) -> range:
        """The numbers of the parts of the data."""
        return range(self.spans[-1].part + 1)

    def last_step_of_engine(self, step: int) -> int:
        """Return the last step that the engine of a step can run."""
        settings, last = self.at(step).engine_settings, self.at(step).last
        for span in self.spans:
            if span.first > step and span.first == last + 1 and span.engine_settings == settings:
                last = span.last
        return last

    def check_world(self, world: World) -> None:
        """Check that every stage can run on a world.

        Raises:
            UserError: a stage cannot; the message names it.
        """
        for span in self.spans:
            with self.naming(span):
                span.recipe.topology(world)

    @contextmanager
    def naming(self, span: Span) -> Iterator[None]:
        """Add the name of a span's stage to a UserError, if the run has several spans."""
        try:
            yield
        except UserError as problem:
            raise UserError(f"{_about(self, span)}{problem}") from None


def recipe_at(recipe: Recipe, step: int) -> Recipe:
    """Return the plain recipe of a step."""
    return StagePlan(recipe).at(step).recipe


# Former names of keys, which checkpoints and run folders of older versions contain.
RENAMED = {"layout.chunks": "layout.virtual_stages", "layout.shard_group": "layout.dp_shard"}


def with_current_names(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the recorded table of a recipe with the current names of its keys."""
    recipe = deepcopy(recipe)
    stages = recipe.get("stage", [])
    for table in (recipe, *(stages if isinstance(stages, list) else [])):
        for old, new in RENAMED.items():
            section, key = old.split(".")
            values = table.get(section) if isinstance(table, dict) else None
            if isinstance(values, dict) and key in values:
                values[new.removeprefix(f"{section}.")] = values.pop(key)
    return recipe


def table_at(recipe: dict[str, Any], step: int) -> dict[str, Any]:
    """Return the plain table of a step, from the table of a recipe with or without stages.

    The table may be a manifest's. That of imported weights has no [training] and no stages.
    """
    if not recipe.get("stage"):
        return recipe
    return [each for each in stage_tables(recipe) if each.first <= max(1, step)][-1].table


def validate(table: dict[str, Any]) -> Recipe:
    """Return the recipe of a table without stages.

    Raises:
        ValidationError: the table is not a valid recipe.
    """
    return Recipe.model_validate_json(json.dumps(table))


def _spans(recipe: Recipe) -> tuple[Span, ...]:
    steps = recipe.training.steps
    if not recipe.stage and recipe.batch.ramp is None:
        whole = (1, steps)
        return (_span("first", 0, whole, recipe, schedule=whole, part=0),)
    tables = stage_tables(recipe.model_dump(mode="json"))
    schedules = [each.first for each in tables if each.begins_schedule]
    found: list[Span] = []
    for number, (stage, following) in enumerate(zip(tables, [*tables[1:], None], strict=True)):
        last = following.first - 1 if following else steps
        first_of_schedule = max(first for first in schedules if first <= stage.first)
        later = [first for first in schedules if first > stage.first]
        schedule = (first_of_schedule, later[0] - 1 if later else steps)
        for first, end, sequences in batches(stage.table["batch"], stage.first, last):
            assert end is not None
            plain = _plain_recipe(stage, sequences)
            part = _next_part(found[-1], plain) if found else 0
            found.append(
                _span(stage.name, number, (first, end), plain, schedule=schedule, part=part)
            )
        _check_stage(recipe, found[-1], stage)
    return tuple(found)


def _span(
    stage: str,
    number: int,
    steps: tuple[int, int],
    recipe: Recipe,
    *,
    schedule: tuple[int, int],
    part: int,
) -> Span:
    return Span(
        stage=stage,
        number=number,
        first=steps[0],
        last=steps[1],
        recipe=recipe,
        schedule_first=schedule[0],
        schedule_last=schedule[1],
        part=part,
    )


def _plain_recipe(stage: StageTable, sequences: int) -> Recipe:
    """Return the plain recipe of a stage.

    Args:
        stage: the table of the stage
        sequences: global batch, in sequences

    Raises:
        StageRejected: the recipe is not valid.
    """
    batch = {key: value for key, value in stage.table["batch"].items() if key != "ramp"}
    table = stage.table | {"batch": batch | {"global_sequences": sequences}}
    try:
        return validate(table)
    except ValidationError as error:
        raise StageRejected(stage.name, table, error) from None


def _next_part(before: Span, recipe: Recipe) -> int:
    """Return the number of the part of the data that a recipe reads after a span."""
    return before.part + (_data_of(before.recipe) != _data_of(recipe))


def _data_of(recipe: Recipe) -> tuple[Any, ...]:
    """Return the settings that decide which windows a step reads and how the model sees them."""
    model = recipe.model
    return (
        *(recipe.data.train, recipe.data.separate_documents),
        *(model.sequence_length, model.rope_theta, model.rope_scaling),
    )


def _check_stage(recipe: Recipe, span: Span, stage: StageTable) -> None:
    """Check the positions, the end of the ramp and the length of the schedule of a stage.

    Args:
        recipe: the whole recipe
        span: the last span of the stage
        stage: the table of the stage

    Raises:
        UserError: one of them does not fit the stage.
    """
    about = _about_stage(stage.name)
    model = span.recipe.model
    if model.positions == "learned" and model.sequence_length != recipe.model.sequence_length:
        raise UserError(
            f"{about}model.sequence_length = {model.sequence_length} needs other weights than "
            f'{recipe.model.sequence_length}, because model.positions = "learned" has a row per '
            f'position; use model.positions = "rope", or leave model.sequence_length out of '
            f"[stage.model]"
        )
    if stage.first == 1 and recipe.batch.ramp and recipe.stage:
        (*ramp, _) = batches(stage.table["batch"], 1, None)
        end = ramp[-1][1] or 0
        if end >= span.last:
            raise UserError(
                f"batch.ramp ends with step {end}, and stage.{recipe.stage[0].name} begins with "
                f"step {span.last + 1}, but a step with the full batch must come in between; let "
                f"the stage begin with step {end + 2} or later, or use fewer batch.ramp.samples"
            )
    steps = span.schedule_last - span.schedule_first + 1
    if stage.begins_schedule:
        try:
            span.recipe.optimizer.check_schedule(steps, "the steps of its schedule")
        except UserError as problem:
            raise UserError(f"{about}{problem}") from None


def _about(plan: StagePlan, span: Span) -> str:
    """Return the beginning of a message about a span; empty if the run has only one."""
    if len(plan.spans) == 1:
        return ""
    ramp = [each for each in plan.spans if each.number == span.number][-1] is not span
    return _about_stage(span.stage, span if ramp else None)


def _about_stage(name: str, span: Span | None = None) -> str:
    steps = f" (steps {span.first} .. {span.last} of batch.ramp)" if span else ""
    return f'stage "{name}"{steps}: '


def changes(before: Recipe, after: Recipe) -> dict[str, list[Any]]:
    """Return section.key -> [before, after] for the keys in which two plain recipes differ."""
    old, new = (each.model_dump(mode="json") for each in (before, after))
    return {
        f"{section}.{key}": [old[section].get(key), value]
        for section in CHANGEABLE
        for key, value in new[section].items()
        if value != old[section].get(key)
    }
