"""The sections of a recipe, as frozen pydantic classes."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from models.config import nearest_multiples
from models.errors import UserError
from models.pipeline.schedule.order import SCHEDULES, last_stage, schedule_name
from recipes.training.recipe.blend_weights import check_weights

REPOSITORY = Path(__file__).resolve().parents[3]

SEVERAL_CHUNKS = [name for name, kind in SCHEDULES.items() if kind.chunks != 1]

Count = Annotated[int, Field(ge=1, le=10**9)]
NonNegative = Annotated[int, Field(ge=0, le=10**9)]
Probability = Annotated[float, Field(ge=0, lt=1)]


def repository_path(path: str) -> Path:
    """A path of a recipe: relative ones count from the repository's root."""
    return (REPOSITORY / path).resolve()


class Section(BaseModel):
    """What all sections share: nothing unknown, nothing converted, nothing changed later."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Layout(Section):
    """How the model is spread; data parallelism takes what is left of the world."""

    tensor: Count = 1
    pipeline: Count = 1
    schedule: Literal["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipev"] = "1f1b"
    chunks: Count = 1  # parts of the model that a stage holds; the schedule decides all but some
    layers_per_stage: list[Count] | None = None  # blocks of each part, in order; None: by cost
    sequence_parallel: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_interval: Count = 1  # of "full": blocks that are kept and computed again as one

    @model_validator(mode="before")
    @classmethod
    def _fill_in_chunks(cls, values: Any) -> Any:
        """Two where the schedule needs several and none are given."""
        if isinstance(values, dict) and values.get("schedule") in SEVERAL_CHUNKS:
            return {"chunks": 2} | values
        return values

    @model_validator(mode="after")
    def _check(self) -> "Layout":
        if self.recompute_interval > 1 and self.recompute != "full":
            raise UserError(
                f"layout.recompute_interval = {self.recompute_interval} does not go with "
                f'layout.recompute = "{self.recompute}"; use layout.recompute = "full", or leave '
                f"layout.recompute_interval out"
            )
        if self.schedule != "1f1b" and self.pipeline == 1:
            raise UserError(
                f'layout.schedule = "{self.schedule}" needs stages and layout.pipeline = 1 is one; '
                f'use layout.pipeline = 2 or more, or layout.schedule = "1f1b"'
            )
        possible = SCHEDULES[self.schedule].chunks
        if self.chunks != (possible or max(2, self.chunks)):
            raise UserError(
                f"layout.chunks = {self.chunks} does not go with layout.schedule = "
                f'"{self.schedule}"; use layout.chunks = {possible or 2}'
                + ("" if possible else " or more")
            )
        return self

    @property
    def schedule_name(self) -> str:
        """The schedule, with its chunks where they are chosen: "interleaved x 2"."""
        return schedule_name(self.schedule, self.chunks)

    @property
    def ends(self) -> set[int]:
        """The stages with the model's first layers, which take tokens, and last, which labels."""
        return {0, last_stage(self.schedule, self.pipeline, self.chunks)}


class Batch(Section):
    """Sequences per optimizer step and per micro-batch."""

    global_sequences: Count
    micro_sequences: Count

    @model_validator(mode="after")
    def _check(self) -> "Batch":
        if self.global_sequences % self.micro_sequences:
            raise UserError(
                f"batch.global_sequences = {self.global_sequences} is not divisible by "
                f"batch.micro_sequences = {self.micro_sequences}; use batch.global_sequences = "
                f"{nearest_multiples(self.global_sequences, self.micro_sequences)}"
            )
        return self


class Schedule(Section):
    """The learning rate over the steps; `learning_rate.py` has the formula."""

    warmup_steps: NonNegative
    decay: Literal["cosine", "linear", "wsd"]
    decay_steps: NonNegative = 0  # of "wsd"; the others decay over all that follows the warm-up
    minimum_learning_rate: Annotated[float, Field(ge=0)] = 0.0


class Optimizer(Section):
    """AdamW (arXiv 1711.05101); norms and biases are not decayed."""

    learning_rate: Annotated[float, Field(gt=0)]
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    gradient_clipping: Annotated[float, Field(ge=0)] = 1.0  # by global norm; 0: none
    schedule: Schedule

    @model_validator(mode="after")
    def _check(self) -> "Optimizer":
        schedule = self.schedule
        if schedule.minimum_learning_rate > self.learning_rate:
            raise UserError(
                f"optimizer.schedule.minimum_learning_rate = {schedule.minimum_learning_rate} is "
                f"above optimizer.learning_rate = {self.learning_rate}; "
                f"use {self.learning_rate / 10:g}"
            )
        if (schedule.decay == "wsd") != (schedule.decay_steps > 0):
            raise UserError(
                f"optimizer.schedule.decay_steps = {schedule.decay_steps} does not go with "
                f'optimizer.schedule.decay = "{schedule.decay}"; use decay_steps = 1 or more with '
                f'"wsd" and leave it out otherwise'
            )
        return self


class Training(Section):
    """Number of steps, and how often to validate and to compare replicas (0: never)."""

    steps: Count
    evaluate_every: NonNegative
    evaluation_batches: Count = 4  # global batches of the validation file
    compare_replicas_every: NonNegative = 100  # steps; `copies.py`
    initial_weights: str | None = None  # a checkpoint to start from; None: drawn from the seed
    # Compile the element-wise operations; "auto": on GPUs if there is a compiler. The first time,
    # compiling takes 10 to 20 seconds.
    compile: Literal[True, False, "auto"] = "auto"
    # On GPUs, use only algorithms with reproducible results, which are slower. On CPUs results are
    # always reproducible.
    deterministic: bool = False


class Source(Section):
    """One corpus (path without .bin/.idx) and its share of the samples."""

    path: str
    weight: Annotated[float, Field(gt=0)] = 1.0


class Data(Section):
    """Token files and the tokenizer that made them; windows go across documents."""

    train: Annotated[tuple[Source, ...], Field(min_length=1)]
    validation: str
    tokenizer: str
    separate_documents: bool = False  # attention stays within each (arXiv 2402.13991)

    @model_validator(mode="after")
    def _check(self) -> "Data":
        paths = [repository_path(source.path) for source in self.train]
        if len(set(paths)) < len(paths):
            raise UserError(
                f"data.train = {[source.path for source in self.train]} names a corpus twice; use "
                f"each path once, with its weight"
            )
        if repository_path(self.validation) in paths:
            raise UserError(
                f'data.validation = "{self.validation}" is trained on too (data.train); use a file '
                f"of its own, as prepare_data.py writes it"
            )
        check_weights([source.weight for source in self.train])
        return self


class Checkpoint(Section):
    """How often the run is saved (steps; the last step always) and which saves stay."""

    every: Count
    keep: Count = 2  # the newest so many
    keep_every: NonNegative = 0  # and those of every so many steps; 0: no more
    on_failure: Literal["continue", "stop"] = "continue"  # what a save that fails means for the run


class Supervision(Section):
    """Time limits without progress, and the limits for bad steps and slow ranks."""

    # End the run after this many seconds without progress in training; 0: never. On GPUs,
    # collectives of subgroups time out after 600 seconds in any case.
    hang_seconds: NonNegative = 300
    # The same limit before the first step (with compiled kernels, until its end), which covers
    # building the model, loading a checkpoint and compiling; 0: never.
    startup_seconds: NonNegative = 1800
    bad_steps: Count = 3  # in a row without finite numbers: it goes back to the last checkpoint
    loss_spike: Annotated[float, Field(ge=0)] = 3.0  # nats above the usual: likewise; 0: never
    # Rollbacks without a new checkpoint in between, then the run stops; 0: never roll back.
    rollbacks: NonNegative = 2
    compare_speed_every: NonNegative = 100  # steps between looks for slow ranks; 0: never
    slow_rank: Annotated[float, Field(gt=1)] = 1.5  # times its peers' time, to be named

    @property
    def patience_seconds(self) -> int | None:
        """The longest time that a rank may wait for others before supervision ends the run.

        None if there is no limit.
        """
        limits = self.hang_seconds, self.startup_seconds
        return max(limits) if all(limits) else None


class Tracking(Section):
    """Weights & Biases: "auto" is online with a key and offline without one."""

    project: Annotated[str, Field(pattern=r"^[^/\\#?%:]{1,128}$")] = "threefold"
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    tags: tuple[str, ...] = ()
    timeline_step: NonNegative = 0  # the first step of a measured timeline; 0: none
    timeline_steps: Count = 3


class Cluster(Section):
    """The machine this recipe is meant for; a run on any other size is refused."""

    nodes: Count
    gpus_per_node: Count
    gpu: str
