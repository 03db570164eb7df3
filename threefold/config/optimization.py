"""The batch, the optimizer, the learning rate of a step, and the length of a run."""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, ValidationInfo, model_validator

from models.config import nearest_multiples
from models.errors import UserError
from threefold.config.sections import (
    MAX_COUNT,
    Count,
    NonNegative,
    NonNegativeScheduleLength,
    PathText,
    Probability,
    ScheduleLength,
    Section,
    Sequences,
    Switch,
)


class Ramp(Section):
    """Growth of the global batch at the beginning of the run, as Megatron's `--rampup-batch-size`.

    The three keys have the order of Megatron's option.
    """

    start_sequences: Count
    """Global batch of the first step."""

    increment: Count
    """Sequences that each increase adds to the global batch; a divisor of `global_sequences` -
    `start_sequences`."""

    samples: Sequences
    """Sequences that the run reads before the global batch reaches `global_sequences`. Each batch
    size reads an equal share of these sequences, rounded up to whole steps."""


class Batch(Section):
    """Batch sizes, in sequences of `model.sequence_length` tokens."""

    global_sequences: Count
    """Sequences per optimizer step, over all ranks. It stays the same in every layout."""

    micro_sequences: Count
    """Sequences per forward pass of a data rank. A larger number makes larger matrix
    multiplications, needs more activation memory and leaves a pipeline fewer micro-batches."""

    ramp: Ramp | None = None
    """Let the global batch grow at the beginning of the run. Leave it out for a constant batch."""

    # The batch with its ramp, if this one is a step of the ramp.
    _whole: "Batch | None" = PrivateAttr(default=None)

    def model_post_init(self, context: Any) -> None:
        """Take the batch with its ramp from the context of the validation."""
        if context is not None:
            self._whole = context["whole"]

    @property
    def whole(self) -> "Batch":
        """The batch with its ramp; this one if it is not a step of a ramp."""
        return self._whole or self

    def _smaller_start(self, ramp: Ramp) -> str:
        """Return advice for a ramp that does not begin below the full batch."""
        increment = math.lcm(ramp.increment, self.micro_sequences)
        if increment >= self.global_sequences:
            return "leave batch.ramp out"
        advice = (
            f"use a smaller number, for example batch.ramp.start_sequences = "
            f"{self.global_sequences - increment}"
        )
        if increment != ramp.increment:
            advice += f" and batch.ramp.increment = {increment}"
        return advice

    def ramp_that_fits(self, divisor: int, least: int) -> str:
        """Return settings whose batches are all multiples of a number, for a message.

        Args:
            divisor: sequences of one micro-batch of all data ranks
            least: smallest batch, a multiple of `divisor`
        """
        assert self.ramp is not None

        def above(number: int) -> int:
            return max(least, -(-number // divisor) * divisor)

        last, start = above(self.global_sequences), above(self.ramp.start_sequences)
        change = "" if last == self.global_sequences else f"batch.global_sequences = {last}, "
        if start >= last:
            return f"{change or 'a constant batch, '}and leave batch.ramp out"
        increments = (last - start) // divisor
        wanted = -(-self.ramp.increment // divisor)
        size = next(n for n in range(min(wanted, increments), 0, -1) if increments % n == 0)
        return (
            f"{change}batch.ramp.start_sequences = {start} and batch.ramp.increment = "
            f"{size * divisor}"
        )

    @model_validator(mode="after")
    def _check(self) -> "Batch":
        if self.global_sequences % self.micro_sequences:
            raise UserError(
                f"batch.global_sequences = {self.global_sequences} is not divisible by "
                f"batch.micro_sequences = {self.micro_sequences}; use batch.global_sequences = "
                f"{nearest_multiples(self.global_sequences, self.micro_sequences, most=MAX_COUNT)}"
            )
        return self

    @model_validator(mode="after")
    def _check_ramp(self) -> "Batch":
        ramp = self.ramp
        if ramp is None:
            return self
        growth = self.global_sequences - ramp.start_sequences
        if growth <= 0:
            raise UserError(
                f"batch.ramp.start_sequences = {ramp.start_sequences} is not below "
                f"batch.global_sequences = {self.global_sequences}; {self._smaller_start(ramp)}"
            )
        if growth % ramp.increment:
            raise UserError(
                f"batch.ramp.increment = {ramp.increment} does not divide batch.global_sequences - "
                f"batch.ramp.start_sequences = {growth}; use "
                f"{self.ramp_that_fits(self.micro_sequences, self.micro_sequences)}"
            )
        for key in ("start_sequences", "increment"):
            if (count := getattr(ramp, key)) % self.micro_sequences:
                divisor = math.gcd(ramp.start_sequences, ramp.increment)
                raise UserError(
                    f"batch.ramp.{key} = {count} is not divisible by batch.micro_sequences = "
                    f"{self.micro_sequences}; use a multiple of it, or batch.micro_sequences = "
                    f"{divisor}"
                )
        return self


def is_of_a_phase(info: ValidationInfo) -> bool:
    """Return True if the plain recipe of a phase is validated.

    The context of such a validation is {"whole": the batch with its ramp, or None}.
    """
    return info.context is not None


class LearningRateSchedule(Section):
    """The learning rate over the steps."""

    warmup_steps: NonNegativeScheduleLength
    """Steps over which the learning rate rises linearly to its peak; 0: no warm-up."""

    decay: Literal["cosine", "linear", "wsd", "constant"]
    """Shape of the decay. "cosine" and "linear" fall from the end of the warm-up to the last step
    of the schedule; "wsd" (warm-up-stable-decay) is constant until the last `decay_steps`, then
    falls as `decay_shape` says; "constant" does not fall, for example because a later `[[phase]]`
    decays the learning rate."""

    steps: ScheduleLength | None = None
    """Steps of the schedule, from its first step to the end of the decay. Leave it out to use all
    steps of the run (`training.steps`), or those before the next `[[phase]]` with a schedule. A
    shorter run trains the first steps of the schedule; a longer one continues at the minimum."""

    decay_steps: NonNegativeScheduleLength = 0
    """Steps of the decay, only for `decay = "wsd"`, which requires it."""

    decay_shape: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay of "wsd": "linear", "sqrt" (1 - sqrt(x), where x is the completed share of
    `decay_steps`; the best shape in arXiv 2405.18392) or "cosine"."""

    counts: Literal["steps", "sequences"] = "steps"
    """Unit of `warmup_steps`, `steps` and `decay_steps`: optimizer steps, or sequences read since
    the schedule began, as Megatron's `--lr-decay-samples`. With "sequences", a batch that grows
    does not change the learning rate of a sample; `steps` is required unless the decay is
    "constant"."""

    minimum_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at the last step of the schedule; at most `optimizer.learning_rate`."""


MAX_AVERAGE_DECAY = 0.9999  # above it, rounding in fp32 would lose most updates


class Average(Section):
    """An exponential moving average of the weights (EMA), next to the weights that are trained.

    It is sharded and saved as the optimizer's moments are, is evaluated with every validation, and
    `convert.py to-hf --averaged` exports it. It takes 4 bytes per parameter, divided by the ranks
    that share the optimizer's state.
    """

    decay: Annotated[float, Field(gt=0, lt=1)]
    """Share of the average that stays in each averaging: average = decay x average +
    (1 - decay) x weight. The average covers about 1 / (1 - decay) averagings. Typical values are
    0.999 and 0.9999; 0.9999 is the maximum."""

    start_step: NonNegative = 0
    """Updates before the averaging begins; until then the average is equal to the weights. With 0,
    it begins at the initial weights."""

    every: Count = 1
    """Average after every N-th update. Updates that fp16 skips after an overflow do not count."""

    @model_validator(mode="after")
    def _check_decay(self) -> "Average":
        if self.decay > MAX_AVERAGE_DECAY:
            every = round(self.every * (1 - MAX_AVERAGE_DECAY) / (1 - self.decay))
            raise UserError(
                f"optimizer.average.decay = {self.decay} loses changes of the fp32 average to "
                f"rounding; use optimizer.average.decay = {MAX_AVERAGE_DECAY} and "
                f"optimizer.average.every = {min(every, MAX_COUNT)}, which cover about as many "
                f"updates"
            )
        return self


class Optimizer(Section):
    """The optimizer: AdamW (arXiv 1711.05101), or Muon for hidden matrices (arXiv 2502.16982).

    Norms and biases have no weight decay.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    """"adamw" for all parameters; or "muon" for the matrices inside the layers, and AdamW for
    embeddings, output layer, routers, norms and biases. Muon's updates are scaled to the size of
    AdamW's, so that both use the same learning rate and weight decay."""

    momentum: Probability = 0.95
    """Decay rate of Muon's momentum; used only with `kind = "muon"`."""

    learning_rate: Annotated[float, Field(gt=0)]
    """Peak learning rate."""

    betas: tuple[Probability, Probability] = (0.9, 0.95)
    """Decay rates of the first and second moments. The default second rate, smaller than Adam's
    0.999, is the usual one for language models."""

    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Term added to the denominator of the update."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay, multiplied by the learning rate in each step."""

    qk_clip: Annotated[float, Field(gt=0)] | None = None
    """Limit of the attention logits (QK-clip, arXiv 2507.20534, algorithm 1). After an update, the
    weights of the queries and keys of a head are rescaled if the head's largest logit of the step
    exceeds the limit. Kimi K2 uses 100 with Muon. Leave it out for no limit."""

    gradient_clipping: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. 0: no clipping."""

    schedule: LearningRateSchedule

    average: Average | None = None
    """Leave the section out to train without an average of the weights."""

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
        if schedule.decay != "wsd" and schedule.decay_shape != "linear":
            raise UserError(
                f'optimizer.schedule.decay_shape = "{schedule.decay_shape}" has no effect with '
                f'optimizer.schedule.decay = "{schedule.decay}"; use decay = "wsd", or leave '
                f"decay_shape out"
            )
        if schedule.decay == "constant" and schedule.minimum_learning_rate:
            raise UserError(
                f"optimizer.schedule.minimum_learning_rate = {schedule.minimum_learning_rate} has "
                f'no effect with optimizer.schedule.decay = "constant"; leave it out'
            )
        if schedule.steps is not None:
            self._check_schedule_steps(schedule.steps)
        elif schedule.counts == "sequences" and schedule.decay != "constant":
            raise UserError(
                'optimizer.schedule.counts = "sequences" needs the length of the schedule in '
                "sequences; use for example optimizer.schedule.steps = 1000000"
            )
        return self

    def _check_schedule_steps(self, steps: int) -> None:
        """Check that the schedule's own number of steps has an effect, and room for the warm-up.

        Without such a number, a run may end within its warm-up.
        """
        schedule, key = self.schedule, "optimizer.schedule.steps"
        if schedule.decay == "constant":
            raise UserError(
                f'{key} = {steps} has no effect with optimizer.schedule.decay = "constant"; leave '
                f"it out"
            )
        if schedule.warmup_steps >= steps:
            raise UserError(
                f"{key} = {steps} leaves no steps for the decay after "
                f"optimizer.schedule.warmup_steps = {schedule.warmup_steps}; use {key} = "
                f"{schedule.warmup_steps + max(1, schedule.decay_steps)} or more"
            )
        self.check_schedule(steps, key)

    def check_schedule(
        self, steps: int, setting: str, works: Callable[[], str] | None = None
    ) -> None:
        """Check that the warm-up and the decay fit into the steps of the schedule.

        Args:
            steps: number of steps of the schedule, if it does not set its own
            setting: the key or the description of this number, for the message
            works: returns settings that work, for the message, if the number is not a key's value

        Raises:
            UserError: they do not fit.
        """
        schedule = self.schedule
        if schedule.steps is not None:
            steps, setting, works = schedule.steps, "optimizer.schedule.steps", None
        least = schedule.warmup_steps + schedule.decay_steps
        if schedule.decay == "wsd" and least > steps:
            raise UserError(
                f"optimizer.schedule.warmup_steps = {schedule.warmup_steps} and decay_steps = "
                f"{schedule.decay_steps} do not fit into {setting} = {steps}; use "
                + (works() if works else f"{setting} = {least} or more")
            )


class Training(Section):
    """Length of the run, validation, and comparison of replicas."""

    steps: Count
    """Optimizer steps of the whole run, including those before a resume."""

    evaluate_every: NonNegative
    """Steps between validations; a validation also follows the last step. 0: never."""

    evaluation_batches: Count = 4
    """Global batches of one validation of each set. Every validation reads the same windows, spread
    evenly over the validation file; a file with fewer windows is read as a whole."""

    position_losses: NonNegative = 0
    """Number of equal parts of the sequence whose mean losses each validation reports, to see
    whether the model uses long contexts; a divisor of `model.sequence_length`. 0: report none."""

    compare_replicas_every: NonNegative = 100
    """Steps between bitwise comparisons of weights that several ranks hold; 0: never, neither
    during the run nor before a save. Replicas that diverged stop the run."""

    initial_weights: PathText | None = None
    """Checkpoint whose weights the run starts from, such as one that `convert.py from-hf` has
    written. Leave it out to draw the weights from the seed."""

    matmul_precision: Literal["weights", "fp8"] = "weights"
    """Precision of the matmuls of attention, MLPs and experts: that of the weights, or FP8 with one
    scale per 128 elements of an activation and per 128 x 128 of a weight; see docs/fp8.md. "fp8"
    needs weights in bf16 or fp32."""

    compile: Switch = "auto"
    """Compile the element-wise operations. "auto" compiles on GPUs if a compiler is installed. The
    first compilation takes 10 to 20 seconds."""

    deterministic: bool = False
    """On GPUs, use only algorithms with reproducible results, which are slower. Results on CPUs
    are always reproducible."""


# The learning rate as a function of the step, so that there is no scheduler to save.

MAX_RATE_CHANGE = 1.25  # ratio of two learning rates above which the change is called a jump


def is_jump(rate: float, other: float) -> bool:
    """Return True if two learning rates differ by more than a factor of MAX_RATE_CHANGE."""
    return max(rate, other) > MAX_RATE_CHANGE * min(rate, other)


def learning_rate(step: int, optimizer: Optimizer, steps: int) -> float:
    """The learning rate of step 1, 2, ...; a run may end within its warm-up.

    Linear warm-up, which reaches the peak at step `warmup_steps`, then down to the minimum at
    the last step: over all that is left ("cosine", arXiv 1608.03983, or "linear"), or constant
    until the last `decay_steps` and over these as `decay_shape` says ("wsd", warm-up-stable-decay,
    arXiv 2404.06395; "sqrt" is 1 - sqrt of arXiv 2405.18392, equation 1), or never ("constant").
    Later steps have the minimum.

    Args:
        step: number of the step, from the first one of the schedule; or of the sequences read by
            the end of the step, if the schedule counts these
        steps: number of steps of the schedule, if it does not set its own (`schedule.steps`)
    """
    peak, schedule = optimizer.learning_rate, optimizer.schedule
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.decay == "constant":
        return peak
    steps = schedule.steps or steps
    if step >= steps:
        return schedule.minimum_learning_rate
    is_wsd = schedule.decay == "wsd"
    length = schedule.decay_steps if is_wsd else steps - schedule.warmup_steps
    progress = max(0.0, 1 - (steps - step) / length)
    fall = peak - schedule.minimum_learning_rate
    shape = schedule.decay_shape if is_wsd else schedule.decay
    if shape == "cosine":
        return schedule.minimum_learning_rate + fall * (1 + math.cos(math.pi * progress)) / 2
    if shape == "sqrt":
        return schedule.minimum_learning_rate + fall * (1 - math.sqrt(progress))
    return schedule.minimum_learning_rate + fall * (1 - progress)
