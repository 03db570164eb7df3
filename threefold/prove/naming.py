"""Names of what is wrong in a layout that fails: the smallest layout, its axis, and the module.

Settings of the layout are given up one at a time as long as it still fails. What remains names the
axis. One step of the remaining layout is then recorded and compared, tensor by tensor in the order
of computation, with the same step in one process: the first tensor that leaves its band names the
module.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from threefold.prove.compare import BAND_FACTOR, Bands, TrainingResult, compare
from threefold.prove.layouts import ProofCase, perturbed, settings_beyond, simpler
from threefold.prove.ranks import run_cases

if TYPE_CHECKING:
    from threefold.prove.recording import Recording, Value

RECORDED_RUNS = 4  # perturbed recordings from which the bands of a step's tensors are derived
# A tensor that no perturbation changes may differ by a few roundings of fp32, in which sums and
# gradients are kept in every precision.
MIN_TENSOR_BAND = 2e-6
MAX_ROUNDS = 12  # of the search for a smaller layout; each gives up at least one setting


@dataclass(frozen=True)
class Cause:
    """The place of a fault.

    Attributes:
        case: the smallest layout that fails
        settings: its settings that one process does not have, such as "tensor", or "" if none
        module: module of the first tensor that leaves its band; empty if no tensor does
        phase: "forward", "backward" or "update"
        tensor: the tensor, in words
        difference: relative difference of the tensor
        band: its limit
    """

    case: ProofCase
    settings: tuple[str, ...]
    module: str = ""
    phase: str = ""
    tensor: str = ""
    difference: float = 0.0
    band: float = 0.0

    def __str__(self) -> str:
        axis = " and ".join(name.replace("_", " ") for name in self.settings) or "no axis"
        place = f"smallest layout that fails: {self.case.axes}, {self.case.method}"
        if not self.module:
            return f"{axis}: no tensor of the first step leaves its band; {place}"
        differs = f"differs by {self.difference:.1e} (band {self.band:.1e})"
        if math.isinf(self.difference):
            differs = "is missing or not a number, at least in part"
        return f"{axis}, {self.module}, {self.phase}: {self.tensor} {differs}; {place}"


def find_cause(
    case: ProofCase,
    first: ProofCase,
    expected: TrainingResult,
    *,
    bands: Bands | None,
    ranks: int,
    seconds: float,
) -> Cause:
    """Return the cause of the failure of a layout.

    Args:
        case: the layout
        first, expected: the reference and its result
        bands: as for `compare`
        ranks, seconds: as for `run_cases`
    """
    model = case.recipe.model

    def failing(cases: Sequence[ProofCase]) -> list[ProofCase]:
        found = []
        for tried, outcome in run_cases(cases, ranks=ranks, seconds=seconds):
            passes = (
                isinstance(outcome, TrainingResult)
                and compare(outcome, expected, model, bands).passes
            )
            if not passes:
                found.append(tried)
        return found

    case = smallest(case, first, failing)
    settings = tuple(settings_beyond(case, first))
    recorded = [replace(one, recorded=True) for one in (first, case)]
    runs = perturbed(recorded[0], RECORDED_RUNS)
    results = dict(run_cases([recorded[0], *runs, *recorded[1:]], ranks=ranks, seconds=seconds))
    recordings: dict[ProofCase, Any] = {
        one: result for one, result in results.items() if not isinstance(result, str)
    }
    if recorded[0] not in recordings or recorded[1] not in recordings:
        return Cause(case, settings)
    reference = recordings[recorded[0]]
    limits = bands_of([recordings[run] for run in runs if run in recordings], reference)
    return first_difference(recordings[recorded[1]], reference, limits, case, settings)


def smallest(
    case: ProofCase,
    first: ProofCase,
    failing: Callable[[Sequence[ProofCase]], list[ProofCase]],
) -> ProofCase:
    """Return a layout that fails, and passes if any one of its settings is given up.

    Args:
        failing: function that returns those of some layouts that fail
    """
    for _ in range(MAX_ROUNDS):
        failed = failing(simpler(case))
        if not failed:
            return case
        case = min(failed, key=lambda one: (one.world_size, len(settings_beyond(one, first))))
    return case


def bands_of(perturbed_runs: "Sequence[Recording]", reference: "Recording") -> "dict[Value, float]":
    """Return the limit of each tensor, from perturbed recordings of the reference."""
    return {
        value: max(
            MIN_TENSOR_BAND,
            *(BAND_FACTOR * tensor_difference(run, reference, value) for run in perturbed_runs),
        )
        for value in reference.values
    }


def first_difference(
    recording: "Recording",
    reference: "Recording",
    limits: "dict[Value, float]",
    case: ProofCase,
    settings: tuple[str, ...],
) -> Cause:
    """Return the first tensor that leaves its band, in the order in which the reference computes.

    The forward pass of all modules comes first, then the gradients of activations, then those of
    weights, then the update.
    """
    for value in reference.values:
        difference = tensor_difference(recording, reference, value)
        if not difference <= limits[value]:
            return Cause(
                case,
                settings,
                value.module,
                value.phase,
                value.tensor,
                difference,
                limits[value],
            )
    return Cause(case, settings)


def tensor_difference(recording: "Recording", reference: "Recording", value: "Value") -> float:
    """Return the largest relative difference of the copies of a tensor; infinite if it is missing.

    A part that no rank has computed is NaN, and so makes the difference infinite.
    """
    (expected,) = reference.values[value]
    size = float(expected.norm()) or 1.0
    copies = recording.values.get(value, [])
    differences = [float((copy - expected).norm()) / size for copy in copies]
    return max((d if d == d else math.inf for d in differences), default=math.inf)
