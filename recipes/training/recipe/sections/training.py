"""The batch, the optimizer, and the length of a run."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from models.config import nearest_multiples
from models.errors import UserError
from recipes.training.recipe.sections.section import (
    MAX_COUNT,
    Count,
    NonNegative,
    Probability,
    Section,
    Switch,
)


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
                f"{nearest_multiples(self.global_sequences, self.micro_sequences, most=MAX_COUNT)}"
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
    """Global batches of one validation of each set. Every validation reads the same windows, spread
    evenly over the validation file; a file with fewer windows is read as a whole."""

    position_losses: NonNegative = 0
    """Number of equal parts of the sequence whose mean losses each validation reports, to see
    whether the model uses long contexts; it divides `model.sequence_length`. 0: report none."""

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
