"""How far two trainings are apart, and what of it is Adam's noise."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

LOSS, GRAD_NORM, WEIGHTS = 2e-6, 1e-5, 1e-5  # the largest relative differences that pass
NOISE = " (keys)"


@dataclass(frozen=True)
class Outcome:
    """What must not depend on the layout.

    losses: of every step, and the validation loss before the last one; nats per token
    grad_norms: of every step, before clipping
    weights: the final logical tensors, by name
    drifted: what ranks should hold alike and do not, a sentence each
    """

    losses: list[float]
    grad_norms: list[float]
    weights: "dict[str, Tensor]"
    drifted: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Difference:
    """The largest relative differences between a training and the reference.

    loss: over all steps and the validation
    grad_norm: over all steps
    weights: over the final logical tensors, ||a - b|| / ||b||, a bias by its weight's norm if that
        is larger; `parameter` is the worst one
    drifted: copies that ranks should hold alike and do not
    noise: the same over the parameters whose exact gradient is zero, which Adam makes of rounding
    """

    loss: float
    grad_norm: float
    weights: float
    parameter: str
    drifted: list[str]
    noise: float

    @property
    def passes(self) -> bool:
        """Whether it is no more than rounding."""
        close = self.loss <= LOSS and self.grad_norm <= GRAD_NORM and self.weights <= WEIGHTS
        return close and not self.drifted


def compare(outcome: Outcome, reference: Outcome, model: ModelConfig) -> Difference:
    """How far `outcome` is from `reference`; NaN is infinitely far."""
    assert outcome.weights.keys() == reference.weights.keys()
    weights, noise = {"": 0.0}, [0.0]
    for name, expected in reference.weights.items():
        got = outcome.weights[name]
        # A bias is measured with the weight beside it: the two are one affine map, and a bias
        # that has grown from zero by a few small gradients is no scale for rounding.
        beside = reference.weights.get(name.replace(".bias", ".weight"), expected)
        for part, rows in split_noise(name, model).items():
            size = max(float(expected[rows].norm()), float(beside[rows].norm()))
            difference = _finite(float((got[rows] - expected[rows]).norm()) / (size or 1.0))
            if part.endswith(NOISE):
                noise.append(difference)
            else:
                weights[part] = difference
    parameter = max(weights, key=weights.__getitem__)
    return Difference(
        loss=_largest(outcome.losses, reference.losses),
        grad_norm=_largest(outcome.grad_norms, reference.grad_norms),
        weights=weights[parameter],
        parameter=parameter,
        drifted=outcome.drifted,
        noise=max(noise),
    )


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
        name + NOISE: slice(queries, queries + keys),
        f"{name} (values)": slice(queries + keys, None),
    }


def _largest(got: list[float], expected: list[float]) -> float:
    pairs = zip(got, expected, strict=True)
    return max(_finite(abs(a - b) / abs(b)) for a, b in pairs)


def _finite(number: float) -> float:
    return number if number == number else float("inf")
