"""The sections of a recipe, as frozen pydantic classes.

The docstrings of the fields are the text of docs/recipe-reference.md.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from models.config import nearest_multiples
from models.errors import UserError
from models.pipeline.schedule.order import SCHEDULES, last_stage, schedule_name
from recipes.training.recipe.blend_weights import check_weights

REPOSITORY = Path(__file__).resolve().parents[3]

SCHEDULES_WITH_CHUNKS = [name for name, kind in SCHEDULES.items() if kind.chunks != 1]

Count = Annotated[int, Field(ge=1, le=10**9)]
NonNegative = Annotated[int, Field(ge=0, le=10**9)]
Probability = Annotated[float, Field(ge=0, lt=1)]
# 1 equals True in Python, so a number has to become something else before it is compared.
Switch = Annotated[
    Literal[True, False, "auto"],
    BeforeValidator(lambda value: value if isinstance(value, bool) else str(value)),
]


def repository_path(path: str) -> Path:
    """Return a path of a recipe as an absolute path; relative ones start at the repository root."""
    return (REPOSITORY / path).resolve()


class Section(BaseModel):
    """Base class of all sections: rejects unknown keys, converts nothing and is frozen."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class Layout(Section):
    """The split of the model over ranks; data parallelism takes the remaining ranks."""

    tensor: Count = 1
    """Ranks that divide every matrix of a layer. They must be on one node, because they
    communicate several times per layer."""

    pipeline: Count = 1
    """Pipeline stages, which divide the layers. More than one requires ZeRO-1."""

    schedule: Literal["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipev"] = "1f1b"
    """Order of the forward and backward passes of a stage. All but "1f1b", the simplest, need two
    stages or more."""

    chunks: Count = 1
    """Virtual stages (model chunks) of each stage. Choose it for "interleaved", where 2 is the
    default and more shorten the pipeline bubble but add messages. The other schedules determine
    it: 2 for "zb-v" and "dualpipev", 1 for "1f1b" and "zb-h1"."""

    layers_per_stage: list[Count] | None = None
    """Transformer layers of each virtual stage, in the model's order. Leave it out to balance the
    stages by computing cost, which counts the output layer too."""

    sequence_parallel: bool = False
    """Also split norms, dropout and residuals over the tensor ranks, along the sequence. It saves
    activation memory at the same communication volume; it has no effect for `tensor = 1`."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass computes again instead of keeping: none of them, those of
    the attention core ("selective"), or those of whole layers ("full")."""

    recompute_interval: Count = 1
    """Layers that are recomputed together with `recompute = "full"`. Only the input of the first
    of them is kept."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_chunks(cls, values: Any) -> Any:
        """Set two chunks if the schedule needs several and the recipe has none."""
        if isinstance(values, dict) and values.get("schedule") in SCHEDULES_WITH_CHUNKS:
            return {"chunks": 2} | values
        return values

    @model_validator(mode="after")
    def _check(self) -> "Layout":
        if self.recompute_interval > 1 and self.recompute != "full":
            raise UserError(
                f"layout.recompute_interval = {self.recompute_interval} has no effect with "
                f'layout.recompute = "{self.recompute}"; use layout.recompute = "full", or leave '
                f"layout.recompute_interval out"
            )
        if self.schedule != "1f1b" and self.pipeline == 1:
            raise UserError(
                f'layout.schedule = "{self.schedule}" needs two stages or more, and '
                f"layout.pipeline = 1 has only one; use layout.pipeline = 2 or more, or "
                f'layout.schedule = "1f1b"'
            )
        possible = SCHEDULES[self.schedule].chunks
        if self.chunks != (possible or max(2, self.chunks)):
            raise UserError(
                f"layout.chunks = {self.chunks} is not possible with layout.schedule = "
                f'"{self.schedule}"; use layout.chunks = {possible or 2}'
                + ("" if possible else " or more")
            )
        return self

    @property
    def schedule_name(self) -> str:
        """The schedule, with its number of chunks if that is a choice: "interleaved x 2"."""
        return schedule_name(self.schedule, self.chunks)

    @property
    def ends(self) -> set[int]:
        """The stages that hold the first layer, which takes tokens, and the last, with labels."""
        return {0, last_stage(self.schedule, self.pipeline, self.chunks)}


class Batch(Section):
    """Batch sizes, in sequences of `model.sequence_length` tokens."""

    global_sequences: Count
    """Sequences per optimizer step, over all ranks. It stays the same in every layout."""

    micro_sequences: Count
    """Sequences per forward pass of a data rank. A larger number makes larger matrix
    multiplications, needs more activation memory and leaves a pipeline fewer micro-batches."""

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
    """Steps over which the learning rate rises linearly to its peak; 0: no warm-up."""

    decay: Literal["cosine", "linear", "wsd"]
    """Shape of the decay. "cosine" and "linear" fall from the end of the warm-up to the last step;
    "wsd" (warm-up-stable-decay) is constant until the last `decay_steps`, then falls linearly."""

    decay_steps: NonNegative = 0
    """Steps of the decay, only for `decay = "wsd"`, which requires it."""

    minimum_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at the last step; at most `optimizer.learning_rate`."""


class Optimizer(Section):
    """AdamW (arXiv 1711.05101); norms and biases have no weight decay."""

    learning_rate: Annotated[float, Field(gt=0)]
    """Peak learning rate."""

    betas: tuple[Probability, Probability] = (0.9, 0.95)
    """Decay rates of the first and second moments. The default second rate, smaller than Adam's
    0.999, is the usual one for language models."""

    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Term added to the denominator of the update."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay, multiplied by the learning rate in each step."""

    gradient_clipping: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. 0: no clipping."""

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
                f"optimizer.schedule.decay_steps = {schedule.decay_steps} is not possible with "
                f'optimizer.schedule.decay = "{schedule.decay}"; use decay_steps = 1 or more with '
                f'"wsd" and leave it out otherwise'
            )
        return self


class Training(Section):
    """Length of the run, validation, and comparison of replicas."""

    steps: Count
    """Optimizer steps of the whole run, including those before a resume."""

    evaluate_every: NonNegative
    """Steps between validations; 0: never."""

    evaluation_batches: Count = 4
    """Global batches of one validation. Every validation reads the same windows, spread evenly
    over the validation file."""

    compare_replicas_every: NonNegative = 100
    """Steps between bitwise comparisons of weights that several ranks hold; 0: never, neither
    during the run nor before a save. Replicas that diverged stop the run."""

    initial_weights: str | None = None
    """Checkpoint whose weights the run starts from, such as one that `convert.py from-hf` has
    written. Leave it out to draw the weights from the seed."""

    compile: Switch = "auto"
    """Compile the element-wise operations. "auto" compiles on GPUs if a compiler is installed. The
    first compilation takes 10 to 20 seconds."""

    deterministic: bool = False
    """On GPUs, use only algorithms with reproducible results, which are slower. Results on CPUs
    are always reproducible."""


class Source(Section):
    """One corpus of the training data."""

    path: str
    """Path of the token file, without .bin or .idx, relative to the repository root."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the samples, relative to the sum of all weights."""


class Data(Section):
    """Token files, and the tokenizer that made them."""

    train: Annotated[tuple[Source, ...], Field(min_length=1)]
    """Training corpora, each with a path and a weight. They are mixed evenly: at every step, each
    corpus is less than one sample from its share."""

    validation: str
    """Path of the validation file, without .bin or .idx. It must not be a training corpus."""

    tokenizer: str
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
        if repository_path(self.validation) in paths:
            raise UserError(
                f'data.validation = "{self.validation}" is also a training corpus (data.train); '
                f"use a file of its own, as prepare_data.py writes it"
            )
        check_weights([source.weight for source in self.train])
        return self


class Checkpoint(Section):
    """The checkpoints that are written, and those that are kept."""

    every: Count
    """Steps between checkpoints. The last step is always saved."""

    keep: Count = 2
    """Newest checkpoints that are kept. Two, so that a damaged one has a predecessor."""

    keep_every: NonNegative = 0
    """Also keep the checkpoint of every step that is a multiple of this number; 0: keep no more."""

    on_failure: Literal["continue", "stop"] = "continue"
    """Reaction to a save that fails, for example because the disk is full: "continue" warns and
    tries again at the next save, "stop" ends the run."""


class Supervision(Section):
    """Limits for hangs, bad steps and slow ranks."""

    hang_seconds: NonNegative = 300
    """End the run after this many seconds without progress in training; 0: never. On GPUs,
    collectives of subgroups time out after 600 seconds in any case."""

    startup_seconds: NonNegative = 1800
    """End the run if it makes no progress for this many seconds before the first step (with
    compiled kernels, until the end of that step); 0: never. The time covers building the model,
    loading a checkpoint and compiling."""

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

    @property
    def patience_seconds(self) -> int | None:
        """The longest time that a rank may wait for others before supervision ends the run.

        None if there is no limit.
        """
        limits = self.hang_seconds, self.startup_seconds
        return max(limits) if all(limits) else None


class Tracking(Section):
    """Weights & Biases, and the timeline of measured steps."""

    project: Annotated[str, Field(pattern=r"^[^/\\#?%:]{1,128}$")] = "threefold"
    """Weights & Biases project of the run."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """Mode of Weights & Biases. "auto" is online if an API key is found and offline otherwise. The
    metrics are always in the run folder too."""

    tags: tuple[str, ...] = ()
    """Tags of the run in Weights & Biases."""

    timeline_step: NonNegative = 0
    """First step whose instructions are recorded on every rank, with their times; 0: record
    nothing. Needs ZeRO-1. Recorded steps are somewhat slower."""

    timeline_steps: Count = 3
    """Number of steps that are recorded from `timeline_step` on."""


class Cluster(Section):
    """The cluster that the recipe is meant for; a run on another size is rejected."""

    nodes: Count
    """Number of nodes."""

    gpus_per_node: Count
    """GPUs per node, and therefore ranks per node."""

    gpu: str
    """Name of the GPU, for example "H100"; `recipes/gpus/` lists them. "cpu" trains on CPUs."""
