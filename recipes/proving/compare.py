"""How far two trainings are apart, and what of it is Adam's noise."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

# The largest relative differences that pass. A moment is a sum in which much cancels: that of a
# key's norm over eight columns moves by 1.1e-5 when one process takes another micro-batch, and by
# 2.1e-5 in other layouts.
LOSS_TOLERANCE, GRAD_NORM_TOLERANCE, WEIGHT_TOLERANCE, MOMENT_TOLERANCE = 2e-6, 1e-5, 1e-5, 1e-4
RELAY_LOSS_TOLERANCE = 1e-6  # between a layout that goes on and another that has its checkpoint
NOISE_SUFFIX = " (keys)"


@dataclass(frozen=True)
class Outcome:
    """What must not depend on the layout.

    losses: of every step, and the validation loss before the last one; nats per token
    grad_norms: of every step, before clipping
    weights: the final logical tensors, by name
    moments: Adam's first moments, likewise
    drifted: what ranks should hold alike and do not, a sentence each
    """

    losses: list[float]
    grad_norms: list[float]
    weights: "dict[str, Tensor]"
    moments: "dict[str, Tensor]"
    drifted: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Difference:
    """The largest relative differences between a training and the reference.

    loss: over all steps and the validation
    grad_norm: over all steps
    weights: over the final logical tensors, ||a - b|| / ||b||, a bias by its weight's norm if that
        is larger; `parameter` is the worst one
    moments: the same over Adam's first moments; `moment` is the worst one's parameter
    drifted: copies that ranks should hold alike and do not
    noise: the same over the parameters whose exact gradient is zero, which Adam makes of rounding
    """

    loss: float
    grad_norm: float
    weights: float
    parameter: str
    moments: float
    moment: str
    drifted: list[str]
    noise: float

    @property
    def passes(self) -> bool:
        """Whether it is no more than rounding."""
        close = self.loss <= LOSS_TOLERANCE and self.grad_norm <= GRAD_NORM_TOLERANCE
        alike = self.weights <= WEIGHT_TOLERANCE and self.moments <= MOMENT_TOLERANCE
        return close and alike and not self.drifted


@dataclass(frozen=True)
class Leg:
    """A layout that went on from another one's checkpoint.

    first: it was handed nothing
    changed: weights and moments that are not bit for bit what the other one had saved
    loss: the largest relative difference over the steps that both have done after it
    """

    first: bool
    changed: list[str]
    loss: float

    @property
    def passes(self) -> bool:
        """Whether nothing was lost on the way."""
        return not self.changed and self.loss <= RELAY_LOSS_TOLERANCE


def compare(outcome: Outcome, reference: Outcome, model: ModelConfig) -> Difference:
    """How far `outcome` is from `reference`; NaN is infinitely far."""
    weights, noise = _distances(outcome.weights, reference.weights, model)
    moments, _ = _distances(outcome.moments, reference.moments, model)
    parameter = max(weights, key=weights.__getitem__)
    moment = max(moments, key=moments.__getitem__)
    return Difference(
        loss=_largest(outcome.losses, reference.losses),
        grad_norm=_largest(outcome.grad_norms, reference.grad_norms),
        weights=weights[parameter],
        parameter=parameter,
        moments=moments[moment],
        moment=moment,
        drifted=outcome.drifted,
        noise=max(noise.values(), default=0.0),
    )


def _distances(
    got: "dict[str, Tensor]", expected: "dict[str, Tensor]", model: ModelConfig
) -> tuple[dict[str, float], dict[str, float]]:
    """Relative differences by parameter: those that count, and those that are noise."""
    assert got.keys() == expected.keys()
    distances, noise = {"": 0.0}, {}
    for name, values in expected.items():
        # A bias is measured with the weight beside it: the two are one affine map, and a bias
        # that has grown from zero by a few small gradients is no scale for rounding.
        beside = expected.get(name.replace(".bias", ".weight"), values)
        for part, rows in split_noise(name, model).items():
            size = max(float(values[rows].norm()), float(beside[rows].norm()))
            difference = _finite(float((got[name][rows] - values[rows]).norm()) / (size or 1.0))
            (noise if part.endswith(NOISE_SUFFIX) else distances)[part] = difference
    return distances, noise


def split_noise(name: str, model: ModelConfig) -> dict[str, slice]:
    """The parts of a parameter that are compared by themselves: name -> rows.

    A bias added to all keys moves a query's scores alike, and softmax does not see it: the exact
    gradient is zero, what is computed is rounding, and Adam divides it by its own size. Rotary
    positions turn the bias by each key's place, and a norm after it sees it: there it has a
    gradient like any other.
    """
    if not name.endswith("attention.qkv.bias") or model.positions == "rope" or model.qk_norm:
        return {name: slice(None)}
    queries, keys = (heads * model.attention_head_size for heads in (model.heads, model.kv_heads))
    return {
        f"{name} (queries)": slice(0, queries),
        name + NOISE_SUFFIX: slice(queries, queries + keys),
        f"{name} (values)": slice(queries + keys, None),
    }


def _largest(got: list[float], expected: list[float]) -> float:
    return max(relative(a, b) for a, b in zip(got, expected, strict=True))


def relative(got: float, expected: float) -> float:
    """The relative difference; NaN is infinitely far."""
    return _finite(abs(got - expected) / abs(expected))


def _finite(number: float) -> float:
    return number if number == number else float("inf")
