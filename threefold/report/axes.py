"""The three x axes of the page: steps, tokens and FLOPs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from threefold.report.run_record import RunRecord
from threefold.report.steps import Steps

TOKEN_UNITS = ((1e12, "trillions"), (1e9, "billions"), (1e6, "millions"), (1e3, "thousands"))
FLOP_UNITS = ((1e24, "10^24"), (1e21, "10^21"), (1e18, "10^18"), (1e15, "10^15"), (1e12, "10^12"))
MARGIN = 0.01  # of the width, on both sides


@dataclass(frozen=True)
class Axis:
    """An x axis.

    Attributes:
        label: its title, with the unit
        unit: tokens or FLOPs per unit of the axis
        start: left end of the whole range, in units of the axis
        end: right end, in the same units
    """

    label: str
    unit: float
    start: float
    end: float


def axes_of(runs: Sequence[RunRecord]) -> dict[str, Axis]:
    """Return the axes "step", "tokens" and "flops"; without "flops" if no recipe can be read."""
    tokens = max((_largest(run.steps.column("tokens")) for run in runs), default=0.0)
    flops = max(
        (_largest(run.flops(run.steps.column("tokens"))) for run in runs),
        default=0.0,
    )
    last = max((int(run.steps.step[-1]) for run in runs if len(run.steps)), default=0)
    token_unit, token_name = _unit(tokens, TOKEN_UNITS)
    flop_unit, flop_name = _unit(flops, FLOP_UNITS)
    found = {"step": _axis("step", 1.0, last)}
    found["tokens"] = _axis(f"tokens{f' ({token_name})' * bool(token_name)}", token_unit, tokens)
    if flops:
        label = f"training compute ({f'{flop_name} ' if flop_name else ''}FLOPs)"
        found["flops"] = _axis(label, flop_unit, flops)
    return found


def positions(
    steps: Steps, run: RunRecord, axes: dict[str, Axis], chosen: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the positions of some steps on each axis.

    Args:
        steps: kept or abandoned steps of the run
        run: the run
        axes: the axes of the page
        chosen: indices of the steps
    """
    tokens = steps.column("tokens")[chosen]
    found = {"step": steps.step[chosen].astype(np.int32 if _fits(steps.step) else np.float64)}
    found["tokens"] = (tokens / axes["tokens"].unit).astype(np.float32)
    if "flops" in axes:
        found["flops"] = (run.flops(tokens) / axes["flops"].unit).astype(np.float32)
    return found


def step_positions(
    at: Sequence[int], run: RunRecord, axes: dict[str, Axis]
) -> dict[str, np.ndarray]:
    """Return the positions of events at some steps; those at step 0 are at the left end."""
    tokens = run.steps.at(at, "tokens")
    tokens = np.where(np.array(at) <= 0, 0.0, tokens)
    found = {"step": np.array(at, np.float64), "tokens": tokens / axes["tokens"].unit}
    if "flops" in axes:
        found["flops"] = run.flops(tokens) / axes["flops"].unit
    return found


def _axis(label: str, unit: float, largest: float) -> Axis:
    width = max(largest / unit, 1e-9)
    return Axis(label, unit, -MARGIN * width, (1 + MARGIN) * width)


def _unit(largest: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    return next(((size, name) for size, name in units if largest >= size), (1.0, ""))


def _largest(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.max()) if len(finite) else 0.0


def _fits(steps: np.ndarray) -> bool:
    """Return True if the steps, which increase, fit into int32."""
    return not len(steps) or int(steps[-1]) < 2**31
