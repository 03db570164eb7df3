"""The phases of a run, the table of each, and the recipe that each step follows.

`PhasePlan` is the only place that interprets `[[phase]]` tables and `batch.ramp`. The modules that
work on a step get its plain recipe, which has neither.
"""

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from models.errors import UserError, toml_value
from threefold.config.optimization import Batch, learning_rate
from threefold.config.recipe import Recipe
from threefold.config.sections import (
    CHANGEABLE,
    FIRST_PHASE,
    Phase,
    repository_path,
    with_current_keys,
)

# The table of each phase: the recipe's own table, with the changes of this and earlier phases.


class PhaseTable(NamedTuple):
    """A phase of a recipe as a table without phases.

    Attributes:
        table: the recipe's table, with all changes up to this phase
        begins_schedule: True if a schedule of the learning rate begins with the phase
    """

    name: str
    first: int
    table: dict[str, Any]
    begins_schedule: bool


def phase_tables(recipe: dict[str, Any]) -> list[PhaseTable]:
    """Return the table of each phase of a recipe; that of the phase "first" has no changes.

    Args:
        recipe: the table of a recipe, with every default

    Raises:
        UserError: phases begin in the wrong order, or after the last step.
    """
    table = deepcopy(recipe)
    phases = [Phase.model_validate(phase) for phase in table.pop("phase", ())]
    steps = table["training"]["steps"]
    _check_names(phases)
    tables = [PhaseTable(FIRST_PHASE, 1, table, begins_schedule=True)]
    counter = _TokenCounter()
    for phase in phases:
        before = tables[-1]
        first = phase.start_step or counter.first_step(before, phase.start_tokens or 0)
        start = f"start_step = {first}"
        if phase.start_tokens is not None:
            start = f"start_tokens = {phase.start_tokens} (step {first})"
        if first <= before.first:
            earliest = _earliest_after(before)
            works = f"use {phase.key}.start_step = {earliest} or more"
            works += "" if phase.start_tokens is None else " in place of start_tokens"
            raise UserError(
                f'{phase.key}.{start} does not come after phase "{before.name}", which begins with '
                f"step {before.first}; {works if earliest <= steps else 'leave the phase out'}"
            )
        if first > steps:
            raise UserError(
                f"{phase.key}.{start} comes after training.steps = {steps}; use training.steps = "
                f"{first} or more, or leave the phase out"
            )
        counter.pass_through(before, first)
        merged = merge(before.table, phase)
        tables.append(PhaseTable(phase.name, first, merged, phase.begins_schedule))
    return tables


def _earliest_after(before: PhaseTable) -> int:
    """Return the first step at which a phase may follow, after a step with the full batch."""
    return batches(before.table["batch"], before.first, None)[-1][0] + 1


def _check_names(phases: list[Phase]) -> None:
    names = [FIRST_PHASE]
    for phase in phases:
        if phase.name in names:
            used = "is used by another phase"
            if phase.name == FIRST_PHASE:
                used = "is the name of the steps before the first [[phase]]"
            raise UserError(
                f'phase.name = "{phase.name}" {used}; use another name, for example '
                f'"{phase.name}-{len(names) + 1}"'
            )
        names.append(phase.name)


class _TokenCounter:
    """Counter of the tokens that a run reads before each phase, in integers."""

    def __init__(self) -> None:
        self.tokens = 0

    def pass_through(self, phase: PhaseTable, after: int) -> None:
        """Add the tokens of a phase, whose last step comes before the step `after`."""
        length = _length(phase)
        for first, last, sequences in batches(phase.table["batch"], phase.first, after - 1):
            assert last is not None
            self.tokens += (last - first + 1) * sequences * length

    def first_step(self, phase: PhaseTable, tokens: int) -> int:
        """Return the first step before which the run has read at least `tokens` tokens.

        The run is assumed to stay in `phase`. The step is at least the first step of the phase.
        """
        read, length = self.tokens, _length(phase)
        for first, last, sequences in batches(phase.table["batch"], phase.first, None):
            steps = max(0, -(-(tokens - read) // (sequences * length)))
            if last is None or first + steps <= last:
                return first + steps
            read += (last - first + 1) * sequences * length
        raise AssertionError("the last batch size has no last step")


def batches(
    batch: Mapping[str, Any], first: int, last: int | None
) -> list[tuple[int, int | None, int]]:
    """Return (first step, last step, global batch) for each batch size of a phase.

    With `batch.ramp`, the batch grows as Megatron's `RampupBatchsizeNumMicroBatchesCalculator`
    computes it, from the number of samples read before a step: start + increment x floor(samples
    read / (ramp.samples / number of increments)).

    Args:
        last: last step of the phase; None if it is not known
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


def merge(table: dict[str, Any], phase: Phase) -> dict[str, Any]:
    """Return a recipe's table with the changes of a phase.

    Lists and tables within a section (`data.train`, `model.rope_scaling`, `optimizer.schedule`) are
    replaced as a whole. Another schedule of the pipeline removes the virtual stages and the
    layers per stage, which belong to the old one; a phase that begins a schedule by setting only
    the learning rate removes the length of the old schedule.
    """
    merged = deepcopy(table)
    for section in CHANGEABLE:
        changes = getattr(phase, section)
        merged[section] = {**merged[section], **deepcopy(changes)}
    if "schedule" in phase.layout:
        for key in ("virtual_stages", "layers_per_stage"):
            if key not in phase.layout:
                merged["layout"].pop(key, None)
    if phase.begins_schedule and "schedule" not in phase.optimizer:
        merged["optimizer"]["schedule"].pop("steps", None)
    merged["batch"].pop("ramp", None)  # it ends before the phase, as `_check_phase` ensures
    return merged


def _length(phase: PhaseTable) -> int:
    """Return the sequence length of a phase.

    The table of the phase has not been validated yet, so the numbers that count its tokens are
    checked first.
    """
    examples = {"model.sequence_length": 4096, "batch.global_sequences": 32}
    for name, example in examples.items():
        section, key = name.split(".")
        value = phase.table[section][key]
        if not isinstance(value, int) or isinstance(value, bool):
            text = json.dumps(value, default=str)
            raise UserError(
                f'phase "{phase.name}": {name} = {text} is not an integer; use {key} = {example}'
            )
    return phase.table["model"]["sequence_length"]


# Keys that may change between two steps of a process. Any other change needs another engine.
IN_PLACE = {
    "batch": ("global_sequences",),
    "optimizer": ("learning_rate", "schedule"),
    "data": ("train", "validation"),
}


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Successive steps with the same recipe: a phase, or the part of it with one batch size.

    Attributes:
        number: number of the phase, from 0
        recipe: the recipe of these steps, without phases and without a ramp
        schedule_first, schedule_last: first and last step of the learning rate's schedule
        schedule_sequences: sequences that are read from the schedule's first step to this segment
        part: number of the part of the data, from 0; a part ends where the corpora, their weights,
            the sequence length, the separation of documents or the rotary positions change
    """

    phase: str
    number: int
    first: int
    last: int
    recipe: Recipe
    schedule_first: int
    schedule_last: int
    schedule_sequences: int
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

    @property
    def outlasts_warmup(self) -> bool:
        """True if steps of the schedule follow its warm-up, or if it counts sequences."""
        length = self.schedule_end - self.schedule_first + 1
        schedule = self.recipe.optimizer.schedule
        return schedule.counts == "sequences" or schedule.warmup_steps < length

    def rate_to_continue(self, step: int) -> float:
        """Return the learning rate with which training continues, maybe after the schedule.

        If the schedule ends with its warm-up, that is the peak, not the minimum. A warm-up that the
        end of the run has cut short continues.
        """
        if self.outlasts_warmup:
            return self.learning_rate(step)
        peak = self.schedule_first + self.recipe.optimizer.schedule.warmup_steps - 1
        return self.learning_rate(min(step, max(peak, self.schedule_end)))

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        own = step - self.schedule_first + 1
        if self.recipe.optimizer.schedule.counts == "sequences":
            batch = self.recipe.batch.global_sequences
            own = self.schedule_sequences + (step - self.first + 1) * batch
        return learning_rate(
            own, self.recipe.optimizer, self.schedule_last - self.schedule_first + 1
        )

    @cached_property
    def engine_settings(self) -> dict[str, Any]:
        """The settings from which an engine is built; other settings need another engine."""
        table = self.recipe.model_dump(mode="json")
        for section, keys in IN_PLACE.items():
            for key in keys:
                table[section].pop(key)
        return table


RAMP = "batch.ramp"


class PhaseRejected(Exception):
    """The recipe of a phase is not valid.

    Attributes:
        table: its recipe
        error: the errors of pydantic
    """

    def __init__(self, phase: str, table: dict[str, Any], error: ValidationError):
        super().__init__(phase)
        self.phase, self.table, self.error = phase, table, error


class PhasePlan:
    """The segments of a run.

    Attributes:
        segments: the segments, in the order of their steps

    Raises:
        UserError: a phase does not fit into the run; the message names it.
        PhaseRejected: the recipe of a phase is not valid.
    """

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.segments = _segments(recipe)

    @property
    def phases(self) -> list[Segment]:
        """The last segment of each phase: with the full batch, unless the run ends in the ramp."""
        return [
            segment
            for segment, following in zip(self.segments, [*self.segments[1:], None], strict=True)
            if following is None or following.number != segment.number
        ]

    @property
    def has_pipeline(self) -> bool:
        """True if a phase of the run has a pipeline."""
        return any(segment.recipe.layout.pipeline > 1 for segment in self.segments)

    @property
    def names(self) -> list[str]:
        """The names of the phases."""
        return [segment.phase for segment in self.phases]

    def at(self, step: int) -> Segment:
        """Return the segment of a step; the last segment for later steps, the first for step 0."""
        return next(
            (segment for segment in self.segments if step <= segment.last), self.segments[-1]
        )

    def begins_phase(self, step: int) -> bool:
        """Return True if a step is the first one of a phase, but not of the run."""
        segment = self.at(step)
        return step > 1 and step == segment.first and self.at(step - 1).number != segment.number

    def segments_of(self, phase: str) -> list[Segment]:
        """Return the segments of a phase, which differ only in the batch.

        Raises:
            UserError: the recipe has no phase of this name.
        """
        segments = [segment for segment in self.segments if segment.phase == phase]
        if not segments:
            raise UserError(f'there is no phase "{phase}"; use one of {", ".join(self.names)}')
        return segments

    def steps_of(self, phase: str) -> range:
        """Return the steps of a phase.

        Raises:
            UserError: the recipe has no phase of this name.
        """
        segments = self.segments_of(phase)
        return range(segments[0].first, segments[-1].last + 1)

    def recipe_of(self, phase: str) -> Recipe:
        """Return the plain recipe of a phase, with its full batch.

        Raises:
            UserError: the recipe has no phase of this name.
        """
        recipe = self.at(self.steps_of(phase)[-1]).recipe
        full = {"global_sequences": recipe.batch.whole.global_sequences}  # the run may end before
        return recipe.model_copy(update={"batch": recipe.batch.model_copy(update=full)})

    def samples_before(self, step: int) -> int:
        """Return the number of samples that a run without rollbacks reads before a step."""
        return sum(
            (min(segment.last, step - 1) - segment.first + 1)
            * segment.recipe.batch.global_sequences
            for segment in self.segments
            if segment.first < step
        )

    def tokens_before(self, step: int) -> int:
        """Return the number of tokens that a run without rollbacks reads before a step."""
        return sum(
            (min(segment.last, step - 1) - segment.first + 1) * segment.recipe.tokens_per_step
            for segment in self.segments
            if segment.first < step
        )

    def counting_after(self, step: int) -> str:
        """Return a setting after a step that depends on the samples read so far; or ""."""
        for segment in self.segments:
            if segment.last > step and segment.recipe.optimizer.schedule.counts == "sequences":
                return 'optimizer.schedule.counts = "sequences"'
        for phase in self.recipe.phase:
            if phase.start_tokens is not None:
                return f"{phase.key}.start_tokens = {phase.start_tokens}"
        batch = self.at(step + 1).recipe.batch  # of the last step, if the run has ended
        if batch.global_sequences < batch.whole.global_sequences:
            return RAMP
        return ""

    @property
    def notes(self) -> list[str]:
        """Notes about a warm-up, a ramp or an average for which the run is too short."""
        last, steps = self.segments[-1], self.recipe.training.steps
        notes = []
        for segment, following in zip(self.segments, [*self.segments[1:], None], strict=True):
            if following and following.schedule_first == segment.schedule_first:
                continue
            schedule = segment.recipe.optimizer.schedule
            length = segment.last - segment.schedule_first + 1
            if schedule.counts == "sequences":
                length = segment.schedule_sequences
                length += segment.steps * segment.recipe.batch.global_sequences
            # A schedule may end exactly at its peak, for the next one to continue there.
            if schedule.warmup_steps >= length + bool(following):
                end = f'phase "{following.phase}" begins' if following else "the run ends"
                unit = " sequences" if schedule.counts == "sequences" else ""
                notes.append(
                    f"the learning rate still rises when {end}: optimizer.schedule.warmup_steps = "
                    f"{schedule.warmup_steps}{unit}, in steps {segment.schedule_first} to "
                    f"{segment.last}; use for example warmup_steps = {max(1, length // 10)}"
                )
        batch, whole = last.recipe.batch.global_sequences, self.recipe.batch
        if whole.ramp and not self.recipe.phase and batch < whole.global_sequences:
            notes.append(
                f"the run ends within batch.ramp, at {batch} of batch.global_sequences = "
                f"{whole.global_sequences}; use a smaller batch.ramp.samples to reach all of it"
            )
        if average := self.recipe.optimizer.average:
            first = (average.start_step // average.every + 1) * average.every
            if first > steps:
                key = "start_step" if average.start_step >= steps else "every"
                notes.append(
                    f"optimizer.average begins with update {first}, after the last step; use a "
                    f"smaller optimizer.average.{key} to average the weights"
                )
        return notes

    @property
    def total_tokens(self) -> int:
        """The tokens of the whole run."""
        return self.tokens_before(self.recipe.training.steps + 1)

    def length_of_part(self, part: int) -> int:
        """Return the sequence length of a part of the data."""
        return self.first_of_part(part).recipe.model.sequence_length

    def first_of_part(self, part: int) -> Segment:
        """Return the first segment of a part of the data.

        Raises:
            UserError: the recipe has no such part; a run that has read it rolled back to an earlier
                phase, and its recipe has changed since.
        """
        for segment in self.segments:
            if segment.part == part:
                return segment
        raise UserError(
            f"the run has read data of {part + 1} phases before it rolled back, and the recipe has "
            f"only {len(self.parts)}; use the phases with which it was trained"
        )

    @property
    def parts(self) -> range:
        """The numbers of the parts of the data."""
        return range(self.segments[-1].part + 1)

    def last_step_of_engine(self, step: int) -> int:
        """Return the last step that the engine of a step can run."""
        settings, last = self.at(step).engine_settings, self.at(step).last
        for segment in self.segments:
            if segment.first == last + 1 and segment.engine_settings == settings:
                last = segment.last
        return last

    @contextmanager
    def naming(self, segment: Segment) -> Iterator[None]:
        """Add the name of a segment's phase to a UserError, if the run has several segments."""
        try:
            yield
        except UserError as problem:
            raise UserError(f"{_about(self, segment)}{problem}") from None


def recipe_at(recipe: Recipe, step: int) -> Recipe:
    """Return the plain recipe of a step."""
    return PhasePlan(recipe).at(step).recipe


# Former names of keys, which checkpoints and run folders of older versions contain.
RENAMED = {"layout.chunks": "layout.virtual_stages", "layout.shard_group": "layout.dp_shard"}


def with_current_names(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the recorded table of a recipe with the current names of its keys."""
    recipe = with_current_keys(recipe)
    if isinstance(phases := recipe.get("phase"), list):
        recipe["phase"] = [_with_current_layout(phase) for phase in phases]
    return _with_current_layout(recipe)


def _with_current_layout(table: Any) -> Any:
    layout = table.get("layout") if isinstance(table, dict) else None
    if not isinstance(layout, dict):
        return table
    names = {key: RENAMED.get(f"layout.{key}", f"layout.{key}") for key in layout}
    renamed = {names[key].removeprefix("layout."): value for key, value in layout.items()}
    return table | {"layout": renamed}


def table_at(recipe: dict[str, Any], step: int) -> dict[str, Any]:
    """Return the plain table of a step, from the table of a recipe with or without phases.

    The table may be a manifest's. That of imported weights has no [training] and no phases.
    """
    if not recipe.get("phase"):
        return recipe
    return [phase for phase in phase_tables(recipe) if phase.first <= max(1, step)][-1].table


def validate(table: dict[str, Any], whole: Batch | None = None) -> Recipe:
    """Return the plain recipe of a phase's table.

    Args:
        whole: the batch with its ramp, if the table's batch is a step of the ramp

    Raises:
        ValidationError: the table is not a valid recipe.
    """
    return Recipe.model_validate_json(json.dumps(table), context={"whole": whole})


def _segments(recipe: Recipe) -> tuple[Segment, ...]:
    steps = recipe.training.steps
    if not recipe.phase and recipe.batch.ramp is None:
        whole = (1, steps)
        return (_segment("first", 0, whole, recipe, schedule=whole, read=0, part=0),)
    tables = phase_tables(recipe.model_dump(mode="json"))
    schedules = [phase.first for phase in tables if phase.begins_schedule]
    segments: list[Segment] = []
    read = 0  # sequences since the schedule began
    trained: dict[Path, str] = {}  # corpus -> the first phase that trains on it
    for number, (phase, following) in enumerate(zip(tables, [*tables[1:], None], strict=True)):
        last = following.first - 1 if following else steps
        first_of_schedule = max(first for first in schedules if first <= phase.first)
        later = [first for first in schedules if first > phase.first]
        schedule = (first_of_schedule, later[0] - 1 if later else steps)
        read = 0 if phase.begins_schedule else read
        if number:
            _check_length_of_schedule(recipe.phase[number - 1], tables[number - 1])
        for first, end, sequences in batches(phase.table["batch"], phase.first, last):
            assert end is not None
            plain = _plain_recipe(phase, sequences, recipe.batch)
            part = segments[-1].part if segments else 0
            if segments and _data_of(segments[-1].recipe) != _data_of(plain):
                part += 1
            segments.append(
                _segment(
                    phase.name, number, (first, end), plain, schedule=schedule, read=read, part=part
                )
            )
            read += segments[-1].steps * sequences
        _check_phase(recipe, segments[-1], phase)
        data = segments[-1].recipe.data
        for source in data.train:
            trained.setdefault(repository_path(source.path), phase.name)
        for name, path in data.validation_sets.items():
            if earlier := trained.get(repository_path(path)):
                key = f"data.validation.{name}" if name else "data.validation"
                raise UserError(
                    f'{_about_phase(phase.name)}{key} = "{path}" is also a training corpus of '
                    f'phase "{earlier}"; use a file of its own, as prepare_data.py writes it'
                )
    return tuple(segments)


def _segment(
    phase: str,
    number: int,
    steps: tuple[int, int],
    recipe: Recipe,
    *,
    schedule: tuple[int, int],
    read: int,
    part: int,
) -> Segment:
    return Segment(
        phase=phase,
        number=number,
        first=steps[0],
        last=steps[1],
        recipe=recipe,
        schedule_first=schedule[0],
        schedule_last=schedule[1],
        schedule_sequences=read,
        part=part,
    )


def _plain_recipe(phase: PhaseTable, sequences: int, whole: Batch) -> Recipe:
    """Return the plain recipe of a phase.

    Args:
        whole: the batch of the recipe, with its ramp
        sequences: global batch, in sequences

    Raises:
        PhaseRejected: the recipe is not valid.
    """
    batch = {key: value for key, value in phase.table["batch"].items() if key != "ramp"}
    table = phase.table | {"batch": batch | {"global_sequences": sequences}}
    try:
        return validate(table, whole if phase.table["batch"].get("ramp") else None)
    except ValidationError as error:
        raise PhaseRejected(phase.name, table, error) from None


def _data_of(recipe: Recipe) -> tuple[Any, ...]:
    """Return the settings that decide which windows a step reads and how the model sees them."""
    model = recipe.model
    return (
        *(recipe.data.train, recipe.data.separate_documents),
        *(model.sequence_length, model.rope_theta, model.rope_scaling),
    )


def _check_phase(recipe: Recipe, segment: Segment, phase: PhaseTable) -> None:
    """Check the positions, predictions, end of the ramp and length of the schedule of a phase.

    Args:
        recipe: the whole recipe
        segment: the last segment of the phase

    Raises:
        UserError: one of them does not fit the phase.
    """
    about = _about_phase(phase.name)
    model = segment.recipe.model
    if model.positions == "learned" and model.sequence_length != recipe.model.sequence_length:
        raise UserError(
            f"{about}model.sequence_length = {model.sequence_length} needs other weights than "
            f'{recipe.model.sequence_length}, because model.positions = "learned" has a row per '
            f'position; use model.positions = "rope", or leave model.sequence_length out of '
            f"[phase.model]"
        )
    if model.prediction_depth != recipe.model.prediction_depth:
        depth = recipe.model.prediction_depth
        if not depth:
            raise UserError(
                f"{about}model.prediction is missing in [model], and a phase cannot add it; leave "
                f"prediction out of [phase.model], or add [model.prediction] with depth = "
                f"{model.prediction_depth} to the recipe"
            )
        raise UserError(
            f"{about}model.prediction.depth = {model.prediction_depth}, but [model.prediction] has "
            f"depth = {depth}, which a phase cannot change; use depth = {depth} here, and change "
            f"only loss_weight, for example loss_weight = 0.1"
        )
    if phase.first == 1 and recipe.batch.ramp and recipe.phase:
        batch = phase.table["batch"]
        end = _end_of_ramp(batch, batch["ramp"]["samples"])
        if end >= segment.last:
            later = f"begin the phase at step {end + 2} or later, or "
            fitting = bisect_left(  # the most samples that end in time
                range(1, batch["ramp"]["samples"]),
                segment.last,
                key=lambda samples: _end_of_ramp(batch, samples),
            )
            shorter = f"use batch.ramp.samples = {fitting}" if fitting else "leave batch.ramp out"
            raise UserError(
                f"batch.ramp ends with step {end}, and phase.{recipe.phase[0].name} begins with "
                f"step {segment.last + 1}, but a step with the full batch must come in between; "
                f"{later if end + 2 <= recipe.training.steps else ''}{shorter}"
            )
    steps = segment.schedule_last - segment.schedule_first + 1
    if phase.begins_schedule:
        works = partial(_shorter_schedule, recipe, segment, steps)
        try:
            segment.recipe.optimizer.check_schedule(steps, "the steps of its schedule", works)
        except UserError as problem:
            raise UserError(f"{about}{problem}") from None


def _end_of_ramp(batch: Mapping[str, Any], samples: int) -> int:
    """Return the last step of a ramp from step 1 that has another number of samples."""
    (*ramp, _) = batches({**batch, "ramp": batch["ramp"] | {"samples": samples}}, 1, None)
    return ramp[-1][1] or 0


def _shorter_schedule(recipe: Recipe, segment: Segment, steps: int) -> str:
    """Return settings with which the warm-up and the decay of a phase fit into its schedule.

    Args:
        recipe: the whole recipe
        segment: the last segment of the phase
        steps: steps of the schedule
    """
    shorter = {"warmup_steps": 0, "decay": "wsd", "decay_steps": steps}
    if not segment.number:
        return f"for example optimizer.schedule = {toml_value(shorter)}"
    phase, schedule = recipe.phase[segment.number - 1], segment.recipe.optimizer.schedule
    shorter = phase.optimizer.get("schedule", {}) | shorter
    works = f"for example {phase.key}.optimizer.schedule = {toml_value(shorter)}"
    first = segment.schedule_last + 1 - schedule.warmup_steps - schedule.decay_steps
    earlier = phase_tables(recipe.model_dump(mode="json"))[: segment.number]
    before, old = earlier[-1], earlier[-1].table["optimizer"]["schedule"]
    earliest = _earliest_after(before)
    if old["decay"] == "wsd" and not old.get("steps"):  # which has to fit before the phase
        begins = [table.first for table in earlier if table.begins_schedule][-1]
        earliest = max(earliest, begins + old["warmup_steps"] + old["decay_steps"])
    if first < earliest:
        return works
    instead = "" if phase.start_tokens is None else " in place of start_tokens"
    return f"{phase.key}.start_step = {first}{instead}, or {works}"


def _check_length_of_schedule(phase: Phase, before: PhaseTable) -> None:
    """Check that a phase that counts sequences has a number of them for its schedule.

    Args:
        before: the phase before it

    Raises:
        UserError: the phase sets only the learning rate, and the old schedule's length is not its
            own.
    """
    schedule = before.table["optimizer"]["schedule"]
    inherits = phase.begins_schedule and "schedule" not in phase.optimizer
    if inherits and schedule["counts"] == "sequences" and schedule["decay"] != "constant":
        kept = ("warmup_steps", "decay", "decay_steps", "counts", "steps")
        own = {key: schedule[key] for key in kept if key != "decay_steps" or schedule[key]}
        raise UserError(
            f"{phase.key}.optimizer.learning_rate begins a schedule, and with "
            f'optimizer.schedule.counts = "sequences" it needs a length of its own in sequences; '
            f"use for example {phase.key}.optimizer.schedule = {toml_value(own)}"
        )


def _about(plan: PhasePlan, segment: Segment) -> str:
    """Return the beginning of a message about a segment; empty if the run has only one."""
    if len(plan.segments) == 1:
        return ""
    ramp = [other for other in plan.segments if other.number == segment.number][-1] is not segment
    return _about_phase(segment.phase, segment if ramp else None)


def _about_phase(name: str, segment: Segment | None = None) -> str:
    steps = f" (steps {segment.first} .. {segment.last} of batch.ramp)" if segment else ""
    return f'phase "{name}"{steps}: '


def changes(before: Recipe, after: Recipe) -> dict[str, list[Any]]:
    """Return section.key -> [before, after] for the keys in which two plain recipes differ."""
    old, new = (recipe.model_dump(mode="json") for recipe in (before, after))
    return {
        f"{section}.{key}": [old[section].get(key), value]
        for section in CHANGEABLE
        for key, value in new[section].items()
        if value != old[section].get(key)
    }
