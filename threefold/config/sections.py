"""Sections of a recipe: data, evaluation, checkpoints, supervision, tracking and phases."""

import math
import os
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from models.errors import UserError, check_links, toml_value

# The base class of a recipe's sections, and the types of their numbers.
#
# The sections are frozen pydantic classes. The docstrings of their fields are the text of
# docs/recipe-reference.md, which threefold/plan/recipe_reference.py generates.

MAX_COUNT = 10**9
MAX_SEQUENCES = 10**13  # of a run
MAX_TOKENS = 10**16
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Sequences = Annotated[int, Field(ge=1, le=MAX_SEQUENCES)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
PathText = Annotated[str, Field(min_length=1)]  # "" would mean the repository
NonNegative = Annotated[int, Field(ge=0, le=MAX_COUNT)]
ScheduleLength = Sequences  # or steps
NonNegativeScheduleLength = Annotated[int, Field(ge=0, le=MAX_SEQUENCES)]
Probability = Annotated[float, Field(ge=0, lt=1)]
# 1 equals True in Python, so a number has to become something else before it is compared.
Switch = Annotated[
    Literal[True, False, "auto"],
    BeforeValidator(lambda value: value if isinstance(value, bool) else str(value)),
]


class Section(BaseModel):
    """Base class of all sections: rejects unknown keys, converts nothing and is frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


# The root of the repository, from which relative paths of a recipe start.

REPOSITORY = Path(__file__).resolve().parents[2]


def repository_path(path: str) -> Path:
    """Return a path of a recipe as an absolute path; relative ones start at the repository root.

    If the locale's encoding lacks a character of the path, the path is encoded in UTF-8.
    """
    return _in_repository(path).resolve()


def output_path(path: str) -> Path:
    """Return the path of a file or folder that a command writes, as `repository_path` does.

    Raises:
        UserError: a link in the path is dangling.
    """
    check_links(_in_repository(path), "use another --output")
    return repository_path(path)


def _in_repository(path: str) -> Path:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        path = os.fsdecode(path.encode("utf-8", "surrogateescape"))
    return REPOSITORY / path


def short(path: Path) -> Path:
    """Return a path relative to the current folder if it is inside, as a user would type it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


# The weights of a blend of corpora as whole numbers of samples.

PERIOD = 2**16  # samples, at most, after which the order of the sources repeats itself
LARGEST_ROUNDING = Fraction(1, 10)  # of a source's share, relative
# A source with this many samples per period or more loses less than LARGEST_ROUNDING of its share
# when it is rounded down.
SAMPLES_TO_ROUND = math.ceil(1 / LARGEST_ROUNDING)


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the samples of each source in a period.

    The shares are exact if a period of at most PERIOD samples can represent them. Otherwise they
    are rounded down to a multiple of 1 / PERIOD, and the largest source takes the rest. The order
    of a run's samples follows from these numbers, so a change here would change what resumed runs
    read.
    """
    return _whole_shares(tuple(weights))


@lru_cache(maxsize=16)  # every step needs those of its mixture
def _whole_shares(weights: tuple[float, ...]) -> tuple[int, ...]:
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    period = math.lcm(*((weight / total).denominator for weight in exact))
    if period <= PERIOD:
        return tuple(int(weight / total * period) for weight in exact)
    whole = [max(1, int(weight / total * PERIOD)) for weight in exact]
    whole[whole.index(max(whole))] += PERIOD - sum(whole)
    return tuple(whole)


def check_weights(weights: Sequence[float]) -> None:
    """Reject weights that are too small to be represented.

    Raises:
        UserError: names the key, the share that the weight would become, and a weight that works.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    total, shares = sum(exact), whole_shares(weights)
    for number, weight in enumerate(exact):
        share = Fraction(shares[number], sum(shares))
        if weight == max(exact) or abs(share * total / weight - 1) <= LARGEST_ROUNDING:
            continue
        least = SAMPLES_TO_ROUND * (total - weight) / (PERIOD - SAMPLES_TO_ROUND)
        raise UserError(
            f"data.train.{number}.weight = {weights[number]:g} is {float(weight / total):.3g} of "
            f"all samples, and would become {float(share):.3g}, because the order of the corpora "
            f"repeats after {PERIOD} samples; use weight = {_round_up(float(least)):g} or more, or "
            f"leave the corpus out"
        )


def _round_up(number: float) -> float:
    """Round up to two significant digits."""
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    return math.ceil(number / unit) * unit


MAX_TASK_NAME = 128  # characters
SET_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"  # a part of the names of metrics


class Source(Section):
    """One corpus of the training data."""

    path: PathText
    """Path of the token file, without .bin or .idx, relative to the repository root."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the samples, relative to the sum of all weights."""


class Data(Section):
    """Token files, and the tokenizer that made them."""

    train: Annotated[tuple[Source, ...], Field(min_length=1)]
    """Training corpora, each with a path and a weight. They are mixed evenly: at every step, each
    corpus is less than one sample from its share."""

    validation: str | dict[str, str] | None = None
    """Path of the validation file, without .bin or .idx, or a table with a name and a path for each
    of several sets: `{ code = "data/code/validation", web = "data/web/validation" }`. No validation
    file may be a training corpus of the same or an earlier phase. Leave it out to train without
    validation."""

    tokenizer: PathText
    """Folder of the tokenizer. Its hash must equal the one in the manifests of the corpora."""

    separate_documents: bool = False
    """Restrict attention to the tokens of the same document (arXiv 2402.13991). By default, a
    window of several documents is one sequence, and attention crosses their boundaries."""

    @model_validator(mode="after")
    def _check(self) -> "Data":
        paths = [repository_path(source.path) for source in self.train]
        if len(set(paths)) < len(paths):
            raise UserError(
                f"data.train = {[source.path for source in self.train]} names a corpus twice; use "
                f"each path once, with its weight"
            )
        sets = self.validation_sets
        files = {name: repository_path(path) for name, path in sets.items()}
        for name, path in sets.items():
            if files[name] in paths:
                raise UserError(
                    f'data.validation{f".{name}" if name else ""} = "{path}" is also a training '
                    f"corpus (data.train); use a file of its own, as prepare_data.py writes it"
                )
        if len(set(files.values())) < len(sets):
            raise UserError(
                f"data.validation = {toml_value(sets)} names a file twice; use each path once, "
                f"under one name"
            )
        check_weights([source.weight for source in self.train])
        return self

    @field_validator("validation", mode="before")
    @classmethod
    def _check_validation(cls, value: Any) -> Any:
        if value is None or (isinstance(value, str) and value):
            return value
        example = '{ code = "data/code/validation", web = "data/web/validation" }'
        if not isinstance(value, dict) or not value:
            raise UserError(
                f"data.validation = {toml_value(value)} is neither a path nor a table of paths; "
                f"use a path, or for example {example}"
            )
        for name, path in value.items():
            if not isinstance(path, str) or not path:
                raise UserError(
                    f"data.validation.{name} = {toml_value(path)} is not a path; use for example "
                    f"{example}"
                )
            if not re.fullmatch(SET_NAME, name):
                raise UserError(
                    f"data.validation has a set with the name {toml_value(name)}; use only the "
                    f"letters A to Z and a to z, digits, dots, hyphens and underscores, for "
                    f"example {example}"
                )
        return value

    @property
    def validation_sets(self) -> dict[str, str]:
        """The path of each validation set by name; the name is "" if there is a single path."""
        if isinstance(self.validation, str):
            return {"": self.validation}
        return dict(self.validation or {})


# The tasks on which a run evaluates its model.


class Task(Section):
    """A task of multiple-choice or cloze items."""

    name: Annotated[str, Field(pattern=f"^{SET_NAME}$", max_length=MAX_TASK_NAME)]
    """Name of the task in the metrics, `tasks/<name>/accuracy`."""

    path: PathText
    """Path of the task's JSON lines, relative to the repository root; `prepare_data.py tasks`
    writes such files."""

    limit: Count | None = None
    """Number of items to use, from the start of the file. Leave it out to use all items."""


class Evaluation(Section):
    """Tasks that the model is scored on during the run, by the log-likelihood of the answers."""

    every: NonNegative | None = None
    """Steps between evaluations of the tasks, which also follow the last step; 0: never. Leave it
    out to evaluate with every validation (`training.evaluate_every`)."""

    tasks: tuple[Task, ...] = ()
    """Tasks, each with a name and a path."""

    @model_validator(mode="after")
    def _check(self) -> "Evaluation":
        names = [task.name for task in self.tasks]
        if len(set(names)) < len(names):
            raise UserError(
                f"evaluation.tasks has a name twice: {', '.join(names)}; use another name for each "
                f"task"
            )
        if self.every is not None and not self.tasks:
            raise UserError(
                f"evaluation.every = {self.every} has no effect without evaluation.tasks; add a "
                f'task such as {{ name = "next_line", path = "data/tasks/next_line.jsonl" }}, or '
                f"leave evaluation.every out"
            )
        return self


# Checkpoints, supervision and tracking of a run.


class Checkpoint(Section):
    """The checkpoints that are written, and those that are kept."""

    every: Count
    """Steps between checkpoints. The last step is always saved."""

    keep: Count = 2
    """Newest checkpoints that are kept. Two, so that a damaged one has a predecessor."""

    keep_every: NonNegative = 0
    """Also save a checkpoint every this many steps, and never delete it; 0: off."""

    keep_best: NonNegative = 0
    """Also keep this many checkpoints with the lowest validation loss, the mean over all validation
    sets. Only checkpoints saved right after a validation are compared, so `every` must be a
    multiple of `training.evaluate_every`. A phase with other validation sets, another sequence
    length or another `data.separate_documents` begins a new comparison."""

    also_at: Annotated[tuple[Count, ...], Field(examples=[(1, 2, 4, 8, 16)])] = ()
    """More steps after which a checkpoint is saved, such as `[1, 2, 4, 8, 16]`. These checkpoints
    are always kept. Steps after `training.steps` have no effect."""

    on_failure: Literal["continue", "stop"] = "continue"
    """Reaction to a save that fails, for example because the disk is full: "continue" warns and
    tries again at the next save, "stop" ends the run."""

    room_seconds: NonNegative = 1800
    """Seconds that the save after the last step waits for room on a full disk, before the run ends
    without this checkpoint; 0: do not wait."""

    snapshot_every: NonNegative = 0
    """Steps between snapshots in the memory of the nodes, each file on two nodes, from which
    `launch.py` restarts the run after a failure; 0: none. `plan.py` predicts their cost and the
    best interval. Without `launch.py`, the key has no effect."""

    snapshot_folder: Annotated[str, Field(min_length=1)] = "/dev/shm"
    """Folder for snapshots, in the memory of each node. On average, snapshots take 24 bytes per
    parameter, divided by the number of nodes and multiplied by two, because the next snapshot is
    written before the last one is deleted."""

    def is_save_due(self, step: int, last: int) -> bool:
        """Return True if a checkpoint is due after a step of a run with `last` steps."""
        return step % self.every == 0 or self.is_always_kept(step) or step == last

    def is_always_kept(self, step: int) -> bool:
        """Return True if the checkpoint of a step is kept until the end of the run."""
        return step in self.also_at or (self.keep_every > 0 and step % self.keep_every == 0)


class Supervision(Section):
    """Limits for hangs, bad steps and slow ranks."""

    hang_seconds: NonNegative = 300
    """End the run after this many seconds without progress in training; 0: never."""

    startup_seconds: NonNegative = 1800
    """End the run if it makes no progress for this many seconds before the first step (with
    compiled kernels, until the end of that step); 0: never. The time covers building the model,
    loading a checkpoint and compiling."""

    node_seconds: Count = 10
    """Seconds without a sign of life after which `launch.py` counts a node as lost."""

    bad_steps: Count = 3
    """Successive steps with a loss or gradient norm that is not finite after which the run rolls
    back to the last checkpoint. A single such step is skipped."""

    loss_spike: Annotated[float, Field(ge=0)] = 3.0
    """Nats per token above the median of the recent losses at which the run rolls back; 0: never.
    The default is far beyond the usual noise."""

    rollbacks: NonNegative = 2
    """Rollbacks without a new checkpoint in between after which the run stops instead; 0: never
    roll back, stop at once."""

    compare_speed_every: NonNegative = 100
    """Steps between comparisons of the ranks' speeds; 0: never."""

    slow_rank: Annotated[float, Field(gt=1)] = 1.5
    """Ratio of a rank's time in forward passes to that of the other ranks of its stage above which
    it is reported as slow."""

    preflight: Switch = "auto"
    """Measure and check the devices and links before the first step of every start, which takes a
    few seconds. "auto" does so on GPUs."""

    preflight_ratio: Annotated[float, Field(gt=1)] = 1.5
    """Ratio of the median of the other ranks to a rank's measured rate above which the preflight
    names it as slow."""

    slow_comparisons: Count = 3
    """Successive comparisons in which a rank is slow after which its node counts as slow, and
    `cluster.on_slow_rank` applies."""

    @property
    def patience_seconds(self) -> int | None:
        """Seconds that a rank may wait before supervision ends the run; None if unlimited."""
        limits = self.hang_seconds, self.startup_seconds
        return max(limits) if all(limits) else None


class Tracking(Section):
    """Weights & Biases, and the timeline and profile of measured steps."""

    project: Annotated[str, Field(pattern=r"^[^/\\#?%:]{1,128}$")] = "threefold"
    """Weights & Biases project of the run."""

    team: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,128}$")] = ""
    """Weights & Biases team, or user, that owns the run; "": the default of your account."""

    group: Annotated[str, Field(max_length=128)] = ""
    """Weights & Biases group of the run, such as runs that differ only in the seed; "": none.
    `sweep.py` sets the group of its runs itself."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """Mode of Weights & Biases. "auto" is online if an API key is found and offline otherwise. The
    metrics are always in the run folder too."""

    tags: tuple[str, ...] = ()
    """Tags of the run in Weights & Biases."""

    artifacts: bool = False
    """Record each checkpoint in Weights & Biases as an artifact that refers to its folder. Its
    files are not uploaded."""

    timeline_step: NonNegative = 0
    """First step whose instructions are recorded on every rank, with their times; 0: record
    nothing. Needs ZeRO-1 or 2. Recorded steps are somewhat slower."""

    timeline_steps: Count = 3
    """Number of steps that are recorded from `timeline_step` on."""

    profile_step: NonNegative = 0
    """Step that torch.profiler records on `profile_ranks`; 0: none. It takes longer than others."""

    profile_ranks: Annotated[tuple[NonNegative, ...], Field(min_length=1)] = (0,)
    """Ranks of the profile. Ranks that the run does not have are ignored."""

    memory_snapshot: bool = False
    """Record allocations on GPUs, and save them into the run folder if memory runs out."""


# A phase of a run: the step at which it begins, and the keys of the recipe that it changes.

# Section -> the keys that a phase may change; None: any key.
CHANGEABLE: dict[str, tuple[str, ...] | None] = {
    "model": ("sequence_length", "rope_theta", "rope_scaling", "prediction"),
    "batch": ("global_sequences", "micro_sequences"),
    "data": ("train", "validation", "separate_documents"),
    "optimizer": ("learning_rate", "weight_decay", "schedule"),
    "layout": None,
}
Changes = dict[str, Any]
FIRST_PHASE = "first"  # the name of the steps before the first [[phase]]
FORMER_NAMES = {"stage": "phase"}  # key in records of earlier versions -> its current name


def with_current_keys(record: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded table of an earlier version with the current names of its keys."""
    return {FORMER_NAMES.get(key, key): value for key, value in record.items()}


class Phase(Section):
    """A later phase of the run. Its changes also apply to the following phases."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=64)]
    """Name of the phase in messages, events and `--set phase.NAME.section.key=value`. The steps
    before the first `[[phase]]` are the phase "first"."""

    start_step: Annotated[int, Field(ge=2)] | None = None
    """First step of the phase."""

    start_tokens: Tokens | None = None
    """Alternative to `start_step`: number of tokens. The phase begins with the first step before
    which the run has read at least that many."""

    model: Changes = Field(default_factory=dict)
    """Changes of `[model]`: `sequence_length`, `rope_theta`, `rope_scaling` and `prediction`."""

    batch: Changes = Field(default_factory=dict)
    """Changes of `[batch]`: `global_sequences` and `micro_sequences`."""

    data: Changes = Field(default_factory=dict)
    """Changes of `[data]`: `train` (a whole list, with weights), `validation` and
    `separate_documents`."""

    optimizer: Changes = Field(default_factory=dict)
    """Changes of `[optimizer]`: `learning_rate`, `weight_decay` and `schedule` (a whole table). A
    phase that sets `learning_rate` or `schedule` begins a schedule of its own, which ends before
    the next phase that does so, or with the run, or after its `schedule.steps`. Otherwise the
    earlier schedule continues."""

    layout: Changes = Field(default_factory=dict)
    """Changes of `[layout]`: any key."""

    @property
    def key(self) -> str:
        """The name of the phase in the option --set."""
        return f"phase.{self.name}"

    @property
    def begins_schedule(self) -> bool:
        """True if a new schedule of the learning rate begins with the phase."""
        return bool({"learning_rate", "schedule"} & self.optimizer.keys())

    @model_validator(mode="after")
    def _check(self) -> "Phase":
        if (self.start_step is None) == (self.start_tokens is None):
            given = "neither" if self.start_step is None else "both"
            raise UserError(
                f"{self.key} has {given} of start_step and start_tokens; use one of them, "
                f"for example start_step = 2 to begin the phase at step 2"
            )
        for section, keys in CHANGEABLE.items():
            for key in getattr(self, section):
                if keys is not None and key not in keys:
                    raise UserError(
                        f"{self.key}.{section}.{key} cannot change during a run; the keys of "
                        f"[phase.{section}] are {', '.join(keys)}"
                    )
        if not any(getattr(self, section) for section in CHANGEABLE):
            raise UserError(
                f"{self.key} changes nothing; use one of the sections "
                f"{', '.join(f'[phase.{section}]' for section in CHANGEABLE)}, or leave it out"
            )
        return self
