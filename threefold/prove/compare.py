"""Differences between two training runs, and the limits up to which they are rounding errors.

In fp32 the limits are fixed. In other precisions they are derived: the recipe is trained in one
process several times with perturbations of the size of a rounding error, and a layout may differ
from the unperturbed run by a multiple of what the perturbed runs differ. Rounding errors that Adam
amplifies without limit are listed, but not compared.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

# The largest relative differences that pass in fp32. Moments need a larger tolerance, because most
# terms of their sums cancel: the moment of a key norm with eight columns changes by 1.1e-5 with the
# size of the micro-batch in one process, and by 2.1e-5 with the layout.
LOSS_TOLERANCE, GRAD_NORM_TOLERANCE, WEIGHT_TOLERANCE, MOMENT_TOLERANCE = 2e-6, 1e-5, 1e-5, 1e-4
# Log-likelihoods of continuations of a few tokens, and losses of parts of the sequence.
EVALUATION_TOLERANCE = 2e-6
FP32_TOLERANCES = {
    "loss": LOSS_TOLERANCE,
    "grad_norm": GRAD_NORM_TOLERANCE,
    "weights": WEIGHT_TOLERANCE,
    "moments": MOMENT_TOLERANCE,
    "evaluation": EVALUATION_TOLERANCE,
    "rerouted": 0.0,
}
RELAY_LOSS_TOLERANCE = (
    1e-6  # between a layout that continues and the layout that resumes from its checkpoint
)
# A derived limit is BAND_FACTOR times the largest difference of PERTURBED_RUNS runs. If the
# differences of layouts and of perturbed runs have the same normal distribution, a number exceeds
# its limit with a probability of 7e-8 (the integral of P(|z| > 5 m) over the maximum m of 16
# absolute values of z), that is in one of 700 proofs of 500 layouts with 40 numbers each. The norm
# of the difference of a tensor hardly varies between runs, and exceeds its limit more rarely.
PERTURBED_RUNS, BAND_FACTOR = 16, 5.0
# One rounding of the sums of a loss, which are in fp32 in every precision.
MIN_BAND = BAND_FACTOR * 2.0**-24
NOISE_SUFFIX = " (keys)"


@dataclass(frozen=True)
class TrainingResult:
    """Results of a training run that must not depend on the layout.

    Attributes:
        losses: the loss of every step, then the validation loss before the last step, in nats per
            token
        grad_norms: the gradient norm of every step, before clipping
        weights: the final logical tensors by name, in fp32, and their averages if the recipe has
            `optimizer.average`
        moments: AdamW's first moments and Muon's momenta by name
        diverged: a sentence for each weight whose replicas diverged
        expert_counts: number of tokens of each expert, by step and layer; empty for a dense model
        margin: smallest difference of the logits of a chosen and an unchosen expert, in all steps
        evaluations: the validation losses of the parts of the sequence and of the averaged weights,
            in nats per token, and the log-likelihoods of the continuations of a task, before the
            last step
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
class Quantity:
    """A number that is compared, such as the loss of a step.

    kind: a key of FP32_TOLERANCES, or "noise", which has no limit
    step: 1, 2, ... of a number of each step; 0 of one at the end of the run
    """

    kind: str
    name: str = ""
    step: int = 0

    def __str__(self) -> str:
        text = {
            "grad_norm": "gradient norm",
            "weights": "weight",
            "moments": "first moment",
            "rerouted": "tokens with another expert",
        }
        unit = "number" if self.kind == "evaluation" else "of step"
        words = [text.get(self.kind, self.kind), self.name, self.step and f"{unit} {self.step}"]
        return " ".join(str(word) for word in words if word)


Bands = Mapping[Quantity, float]  # limits of the numbers


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
        ratio: the largest difference relative to its limit
        worst: the number with this difference
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
    ratio: float = 0.0
    worst: str = ""

    @property
    def passes(self) -> bool:
        """True if the differences are within their limits, and no replicas diverged."""
        return self.ratio <= 1 and not self.diverged


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


def compare(
    outcome: TrainingResult,
    reference: TrainingResult,
    model: ModelConfig,
    bands: Bands | None = None,
) -> Difference:
    """Return the differences of `outcome` from `reference`; NaN counts as infinite.

    bands: derived limits; None: those of fp32
    """
    found = differences(outcome, reference, model)
    ratios = {
        quantity: _ratio(
            value, FP32_TOLERANCES[quantity.kind] if bands is None else bands[quantity]
        )
        for quantity, value in found.items()
        if quantity.kind != "noise"
    }
    worst = max(ratios, key=ratios.__getitem__)

    def largest(kind: str) -> Quantity:
        of_kind = (quantity for quantity in found if quantity.kind == kind)
        return max(of_kind, key=found.__getitem__, default=Quantity(kind))

    weight, moment = largest("weights"), largest("moments")
    return Difference(
        loss=found.get(largest("loss"), 0.0),
        grad_norm=found.get(largest("grad_norm"), 0.0),
        weights=found.get(weight, 0.0),
        parameter=weight.name,
        moments=found.get(moment, 0.0),
        moment=moment.name,
        diverged=outcome.diverged,
        noise=found.get(largest("noise"), 0.0),
        rerouted=int(found[Quantity("rerouted")]),
        margin=None if math.isinf(outcome.margin) else outcome.margin,
        evaluation=found.get(largest("evaluation"), 0.0),
        ratio=ratios[worst],
        worst=str(worst),
    )


def differences(
    outcome: TrainingResult, reference: TrainingResult, model: ModelConfig
) -> dict[Quantity, float]:
    """Return the relative difference of each number; NaN counts as infinite."""
    found: dict[Quantity, float] = {}
    steps = len(outcome.grad_norms)
    for kind, name, got, expected in (
        ("loss", "", outcome.losses[:steps], reference.losses[:steps]),
        ("loss", "of the validation", outcome.losses[steps:], reference.losses[steps:]),
        ("loss", "of further tokens", outcome.prediction_losses, reference.prediction_losses),
        ("grad_norm", "", outcome.grad_norms, reference.grad_norms),
        ("evaluation", "", outcome.evaluations, reference.evaluations),
    ):
        pairs = enumerate(zip(got, expected, strict=True), start=1)
        found |= {Quantity(kind, name, step): relative(*pair) for step, pair in pairs}
    for kind in ("weights", "moments"):
        distances, noise = _distances(getattr(outcome, kind), getattr(reference, kind), model)
        found |= {Quantity(kind, name): value for name, value in distances.items()}
        if kind == "weights":
            found |= {Quantity("noise", name): value for name, value in noise.items()}
    rerouted = _rerouted(outcome.expert_counts, reference.expert_counts)
    return found | {Quantity("rerouted"): float(rerouted)}


def derive_bands(
    perturbed: Sequence[TrainingResult], reference: TrainingResult, model: ModelConfig
) -> dict[Quantity, float]:
    """Return the limit of each number, from runs of the reference with perturbations.

    Differences grow with the steps, so the limit of a step is at least that of the step before.
    """
    runs = [differences(outcome, reference, model) for outcome in perturbed]
    bands: dict[Quantity, float] = {}
    for quantity in runs[0]:
        largest = BAND_FACTOR * max(run[quantity] for run in runs)
        before = bands.get(Quantity(quantity.kind, quantity.name, quantity.step - 1), 0.0)
        least = 0.0 if quantity.kind == "rerouted" else MIN_BAND
        bands[quantity] = max(largest, before, least)
    return bands


def _ratio(value: float, limit: float) -> float:
    """Return a difference relative to its limit."""
    if value == 0:
        return 0.0
    return value / limit if limit else math.inf


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
    distances: dict[str, float] = {}
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


def relative(got: float, expected: float) -> float:
    """Return the relative difference; NaN counts as infinite."""
    return _finite(abs(got - expected) / abs(expected))


def _finite(number: float) -> float:
    return number if number == number else float("inf")
