"""Differences between two training runs; rounding errors that Adam amplifies count separately."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

# The largest relative differences that pass. Moments need a larger tolerance, because most terms of
# their sums cancel: the moment of a key norm with eight columns changes by 1.1e-5 with the size of
# the micro-batch in one process, and by 2.1e-5 with the layout.
LOSS_TOLERANCE, GRAD_NORM_TOLERANCE, WEIGHT_TOLERANCE, MOMENT_TOLERANCE = 2e-6, 1e-5, 1e-5, 1e-4
# Log-likelihoods of continuations of a few tokens, and losses of parts of the sequence.
EVALUATION_TOLERANCE = 2e-6
RELAY_LOSS_TOLERANCE = (
    1e-6  # between a layout that continues and the layout that resumes from its checkpoint
)
NOISE_SUFFIX = " (keys)"


@dataclass(frozen=True)
class TrainingResult:
    """Results of a training run that must not depend on the layout.

    Attributes:
        losses: the loss of every step, then the validation loss before the last step, in nats per
            token
        grad_norms: the gradient norm of every step, before clipping
        weights: the final logical tensors by name
        moments: AdamW's first moments and Muon's momenta by name
        diverged: a sentence for each weight whose replicas diverged
        expert_counts: number of tokens of each expert, by step and layer; empty for a dense model
        margin: smallest difference of the logits of a chosen and an unchosen expert, in all steps
        evaluations: the validation losses of the parts of the sequence, in nats per token, and the
            log-likelihoods of the continuations of a task, before the last step
        prediction_losses: the losses of further tokens of every step, in nats per token
    """

    losses: list[float]
    grad_norms: list[float]
    weights: "dict[str, Tensor]"
    moments: "dict[str, Tensor]"
    diverged: list[str] = field(default_factory=list)
    expert_counts: list[list[list[int]]] = field(default_factory=list)
    margin: float = math.inf
    evaluations: list[float] = field(default_factory=list)
    prediction_losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Difference:
    """The largest relative differences between a training run and the reference.

    Attributes:
        loss: over all steps and the validation
        grad_norm: over all steps
        weights: over the final logical tensors, ||a - b|| / ||b||; for a bias, the divisor is the
            larger of its norm and its weight's norm
        parameter: the logical tensor with the largest difference
        moments: as `weights`, over `moments` of the outcomes
        moment: the parameter whose first moment has the largest difference
        diverged: a sentence for each weight whose replicas diverged
        noise: as `weights`, over the parameters whose exact gradient is zero, because Adam
            amplifies their rounding errors
        rerouted: lower bound of the number of tokens with another expert than in the reference
        margin: the smallest difference of a chosen and an unchosen logit; None for a dense model
        evaluation: over the losses of the parts of the sequence and the log-likelihoods of a task
    """

    loss: float
    grad_norm: float
    weights: float
    parameter: str
    moments: float
    moment: str
    diverged: list[str]
    noise: float
    rerouted: int = 0
    margin: float | None = None
    evaluation: float = 0.0

    @property
    def passes(self) -> bool:
        """True if the differences are no larger than rounding errors, and no replicas diverged."""
        close = self.loss <= LOSS_TOLERANCE and self.grad_norm <= GRAD_NORM_TOLERANCE
        same_state = self.weights <= WEIGHT_TOLERANCE and self.moments <= MOMENT_TOLERANCE
        same_scores = self.evaluation <= EVALUATION_TOLERANCE
        return close and same_state and same_scores and not self.diverged and not self.rerouted


@dataclass(frozen=True)
class ResumeResult:
    """A layout that resumed from another layout's checkpoint.

    Attributes:
        first: True for the first layout of a relay, which has no checkpoint to resume from
        changed: names of the weights and moments that differ from those that the other layout saved
        loss: the largest relative difference of the losses over the steps that both layouts ran
            after the checkpoint
    """

    first: bool
    changed: list[str]
    loss: float

    @property
    def passes(self) -> bool:
        """True if the layout resumed with the same state and computed the same losses."""
        return not self.changed and self.loss <= RELAY_LOSS_TOLERANCE


def compare(outcome: TrainingResult, reference: TrainingResult, model: ModelConfig) -> Difference:
    """Return the differences of `outcome` from `reference`; NaN counts as infinite."""
    weights, noise = _distances(outcome.weights, reference.weights, model)
    moments, _ = _distances(outcome.moments, reference.moments, model)
    parameter = max(weights, key=weights.__getitem__)
    moment = max(moments, key=moments.__getitem__)
    return Difference(
        loss=max(
            _largest(outcome.losses, reference.losses),
            _largest(outcome.prediction_losses, reference.prediction_losses),
        ),
        grad_norm=_largest(outcome.grad_norms, reference.grad_norms),
        weights=weights[parameter],
        parameter=parameter,
        moments=moments[moment],
        moment=moment,
        diverged=outcome.diverged,
        noise=max(noise.values(), default=0.0),
        rerouted=_rerouted(outcome.expert_counts, reference.expert_counts),
        margin=None if math.isinf(outcome.margin) else outcome.margin,
        evaluation=_largest(outcome.evaluations, reference.evaluations),
    )


def _rerouted(got: list[list[list[int]]], expected: list[list[list[int]]]) -> int:
    """Return the least number of tokens that explains the differences of the counts."""
    pairs = (
        pair
        for steps in zip(got, expected, strict=True)
        for layers in zip(*steps, strict=True)
        for pair in zip(*layers, strict=True)
    )
    return sum(max(0, one - other) for one, other in pairs)


def _distances(
    got: "dict[str, Tensor]", expected: "dict[str, Tensor]", model: ModelConfig
) -> tuple[dict[str, float], dict[str, float]]:
    """Return relative differences by parameter: those that count, and those that are noise."""
    assert got.keys() == expected.keys()
    distances: dict[str, float] = {"": 0.0}
    noise: dict[str, float] = {}
    for name, values in expected.items():
        # The difference of a bias is relative to its layer's weight, because both form one affine
        # map. A bias that has grown from zero in a few steps is too small to be the divisor.
        # The weight of "up_5_bias" is "up_5", and that of "up.bias" is "up.weight".
        of_weight = name.removesuffix("_bias").replace(".bias", ".weight")
        weight = expected.get(of_weight, values)
        for part, rows in split_noise(name, model).items():
            size = max(float(values[rows].norm()), float(weight[rows].norm()))
            difference = _finite(float((got[name][rows] - values[rows]).norm()) / (size or 1.0))
            (noise if part.endswith(NOISE_SUFFIX) else distances)[part] = difference
    return distances, noise


def split_noise(name: str, model: ModelConfig) -> dict[str, slice | list[int]]:
    """Return the rows of the parts of a parameter that are compared separately, by name.

    A bias of the keys shifts all scores of a query by the same amount, which softmax ignores. Its
    exact gradient is therefore zero, the computed gradient is a rounding error, and Adam divides
    that error by its own size. The bias has an ordinary gradient in the columns that rotary
    positions turn, with a norm of the keys, with sinks, and if scores are capped.
    """
    if not name.endswith("attention.qkv.bias"):
        return {name: slice(None)}
    layer, d = int(name.split(".")[1]), model.attention_head_size
    is_ordinary = model.qk_norm or model.attention_sinks or model.attention_soft_cap is not None
    turns = model.positions == "rope" and model.attention_kind(layer) != "nope"
    ordinary = d if is_ordinary else model.rotary_columns if turns else 0
    if ordinary == d:
        return {name: slice(None)}
    first, last = model.query_size, model.query_size + model.key_value_size
    keys = range(first, last)
    parts: dict[str, slice | list[int]] = {
        f"{name} (queries)": slice(0, first),
        name + NOISE_SUFFIX: [row for row in keys if (row - first) % d >= ordinary],
        f"{name} (values)": slice(last, None),
    }
    if ordinary:
        parts[f"{name} (rotated keys)"] = [row for row in keys if (row - first) % d < ordinary]
    return parts


def _largest(got: list[float], expected: list[float]) -> float:
    return max((relative(a, b) for a, b in zip(got, expected, strict=True)), default=0.0)


def relative(got: float, expected: float) -> float:
    """Return the relative difference; NaN counts as infinite."""
    return _finite(abs(got - expected) / abs(expected))


def _finite(number: float) -> float:
    return number if number == number else float("inf")
