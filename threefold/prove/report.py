"""Reports of a proof: tables, verdict and JSON."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from threefold.config.parallel_dims import IN_TEXTS
from threefold.prove.compare import (
    BAND_FACTOR,
    FP32_TOLERANCES,
    GRAD_NORM_TOLERANCE,
    LOSS_TOLERANCE,
    MOMENT_TOLERANCE,
    PERTURBED_RUNS,
    RELAY_LOSS_TOLERANCE,
    WEIGHT_TOLERANCE,
    Bands,
    Difference,
    ResumeResult,
)
from threefold.prove.layouts import ProofCase
from threefold.prove.naming import Cause

AXES = " x ".join(IN_TEXTS)  # followed by the expert ranks, if there are any
COLUMNS = f"| {AXES} | ranks | layouts | loss | gradient norm | weights | moments |"


@dataclass(frozen=True)
class CaseResult:
    """A case with its result, or with the text of its error.

    losses: the loss of every step and then of the validation, if the case was compared
    """

    case: ProofCase
    result: Difference | ResumeResult | str
    losses: Sequence[float] = ()

    @property
    def passes(self) -> bool:
        """True if the case trains like the reference, or resumed with nothing lost."""
        return not isinstance(self.result, str) and self.result.passes


def as_text(
    findings: Sequence[CaseResult],
    *,
    every_layout: bool,
    bands: Bands | None = None,
    cause: Cause | None = None,
) -> str:
    """Return the report of a proof for a terminal.

    Args:
        bands: derived limits; None: those of fp32
        cause: the cause of the smallest failure
    """
    ordered = sorted(findings, key=_axes)
    layouts = "\n".join(map(describe, ordered)) if every_layout else ""
    parts = [layouts, table(ordered), table_of_bands(bands) if bands else "", failures(ordered)]
    parts += [f"first difference: {cause}" if cause else "", verdict(ordered, bands)]
    return "\n\n".join(part for part in parts if part)


def table(findings: Sequence[CaseResult]) -> str:
    """Return a Markdown table with the largest differences for each set of axes."""
    lines = [COLUMNS, "|---|---|---|---|---|---|---|"]
    by_axes = groupby(sorted(findings, key=_axes), key=_axes)
    lines += [_row(list(group)) for _, group in by_axes]
    return "\n".join(lines)


def table_of_bands(bands: Bands) -> str:
    """Return a Markdown table of the limits of each step, and of the largest ones of tensors."""
    lines = ["| band | loss | gradient norm |", "|---|---|---|"]
    limits = {(quantity.kind, quantity.name, quantity.step): bands[quantity] for quantity in bands}
    steps = [step for kind, _, step in limits if kind == "grad_norm"]
    for step in steps:
        loss, norm = limits["loss", "", step], limits["grad_norm", "", step]
        lines.append(f"| step {step} | {loss:.1e} | {norm:.1e} |")
    largest = {
        kind: max((limit for (k, *_), limit in limits.items() if k == kind), default=0.0)
        for kind in FP32_TOLERANCES
    }
    lines.append(
        f"\nlargest bands of the tensors after the last step: weights {largest['weights']:.1e}, "
        f"first moments {largest['moments']:.1e}; of the evaluation {largest['evaluation']:.1e}"
    )
    if largest["rerouted"]:
        lines[-1] += f"; tokens with another expert {largest['rerouted']:.0f}"
    if max(largest["weights"], largest["moments"]) >= 1:
        lines.append(
            "A band of 1 or more is as large as the tensor itself, so that errors do not show; "
            "also run prove.py with --precision fp32."
        )
    return "\n".join(lines)


def failures(findings: Sequence[CaseResult]) -> str:
    """Describe the layouts that did not pass, one per line."""
    lines = []
    for finding in findings:
        if isinstance(finding.result, str):
            lines.append(f"failed: {_name(finding.case)}: {finding.result}")
        elif not finding.passes:
            lines.append(f"differs: {describe(finding)}")
    return "\n".join(lines)


def describe(finding: CaseResult) -> str:
    """Describe a layout in a line."""
    result = finding.result
    if isinstance(result, str):
        return f"{_name(finding.case)}: {result.splitlines()[0]}"
    if isinstance(result, ResumeResult):
        changed = f"changed: {', '.join(result.changed)}" if result.changed else "bit for bit"
        return f"{_name(finding.case)}: {changed}, losses after it {result.loss:.1e}"
    text = (
        f"{_name(finding.case)}: loss {result.loss:.1e}, gradient norm {result.grad_norm:.1e}, "
        f"weights {result.weights:.1e} ({result.parameter}), "
        f"first moments {result.moments:.1e} ({result.moment})"
    )
    text += f"; largest difference {result.ratio:.2g} of its limit ({result.worst})"
    if result.rerouted and result.margin is not None:
        text += (
            f"; {result.rerouted} tokens or more have another expert than in one process, and the "
            f"smallest margin of a choice is {result.margin:.1e}"
        )
    return "; ".join([text, *result.diverged])


def relay_as_text(findings: Sequence[CaseResult], *, every_layout: bool) -> str:
    """Return the report of a relay for a terminal, with layouts in the order of the relay."""
    layouts = "\n".join(map(describe, findings)) if every_layout else ""
    lines = [f"| {AXES} | ranks | layouts | bit for bit | losses after it |"]
    lines += ["|---|---|---|---|---|"]
    for (ranks, *sizes), group in groupby(sorted(findings, key=_axes), key=_axes):
        members = list(group)
        results = [
            finding.result for finding in members if isinstance(finding.result, ResumeResult)
        ]
        same = sum(not result.changed for result in results)
        loss = max((result.loss for result in results), default=math.inf)
        axes = _axes_text(sizes)
        lines.append(f"| {axes} | {ranks} | {len(members)} | {same} | {loss:.1e} |")
    handed = [finding for finding in findings if not getattr(finding.result, "first", False)]
    passed = sum(finding.passes for finding in handed)
    last = (
        f"{passed} of {len(handed)} layouts resumed from another layout's checkpoint with nothing "
        f"lost: weights and optimizer states equal bit for bit, losses to "
        f"{RELAY_LOSS_TOLERANCE:.0e}"
    )
    parts = [layouts, "\n".join(lines), failures(findings), last]
    return "\n\n".join(part for part in parts if part)


def verdict(findings: Sequence[CaseResult], bands: Bands | None = None) -> str:
    """Return the last lines of the report."""
    differences = [f.result for f in findings if isinstance(f.result, Difference)]
    noise = max((difference.noise for difference in differences), default=0)
    limits = (
        f"largest relative differences allowed: {LOSS_TOLERANCE:.0e} of the loss, "
        f"{GRAD_NORM_TOLERANCE:.0e} of the gradient norm, {WEIGHT_TOLERANCE:.0e} of the weights, "
        f"{MOMENT_TOLERANCE:.0e} of the first moments"
    )
    if bands is not None:
        limits = (
            f"each band is {BAND_FACTOR:.0f} times the largest difference of {PERTURBED_RUNS} "
            f"perturbed runs of one process"
        )
    text = f"{summary(findings)} ({limits})"
    if differences:
        worst = max(differences, key=lambda difference: difference.ratio)
        text += f"\nlargest difference: {worst.ratio:.2g} of its limit ({worst.worst})"
    if noise:
        text += (
            f"\nnot compared: the biases of the keys. Their exact gradient is zero, so that Adam "
            f"only follows rounding errors (they differ by {noise:.0e})"
        )
    return text


def summary(findings: Sequence[CaseResult]) -> str:
    """Return the number of layouts that pass, as a phrase."""
    passed = sum(finding.passes for finding in findings)
    return f"{passed} of {len(findings)} layouts train like one process"


def as_json(
    findings: Sequence[CaseResult],
    *,
    relay: bool = False,
    complete: bool = True,
    bands: Bands | None = None,
    cause: Cause | None = None,
) -> dict[str, Any]:
    """Return the report for other programs.

    Args:
        bands, cause: as for `as_text`
    """
    tolerances: dict[str, float] = FP32_TOLERANCES
    if bands is not None:
        tolerances = {str(quantity): limit for quantity, limit in bands.items()}
    return {
        "passed": complete and all(finding.passes for finding in findings),
        "complete": complete,
        "tolerances": {"loss": RELAY_LOSS_TOLERANCE} if relay else tolerances,
        "cause": None if cause is None else str(cause),
        "layouts": [_row_of_json(finding) for finding in findings],
    }


def _row_of_json(finding: CaseResult) -> dict[str, Any]:
    case, result = finding.case, finding.result
    layout = case.recipe.layout
    numbers = {"error": result} if isinstance(result, str) else asdict(result)
    return {
        **case.dims.sizes,
        "context_attention": layout.context_attention if layout.context > 1 else None,
        "expert_overlap": layout.expert_overlap,
        "zero": case.zero_stage,
        "reduce_every": layout.reduce_every,
        "schedule": layout.schedule,
        "virtual_stages": layout.virtual_stages,
        "sequence_parallel": layout.sequence_parallel,
        "recompute": layout.recompute,
        "recompute_interval": layout.recompute_interval,
        "micro_sequences": case.recipe.batch.micro_sequences,
        "passed": finding.passes,
        # JSON has no infinity
        **{key: None if value == math.inf else value for key, value in numbers.items()},
    }


def _axes(finding: CaseResult) -> tuple[int, ...]:
    dims = finding.case.dims
    grid = (getattr(dims, axis) for axis in IN_TEXTS)
    return dims.world_size, *grid, dims.expert, dims.expert_tensor


def _axes_text(sizes: Sequence[int]) -> str:
    """Return a cell of the table: "1 x 2 x 1 x 4", or "1 x 2 x 1 x 4, expert 2"."""
    *grid, expert, parts = sizes
    text = " x ".join(map(str, grid)) + (f", expert {expert}" if expert > 1 else "")
    return text + (f", expert tensor {parts}" if parts > 1 else "")


def _row(findings: list[CaseResult]) -> str:
    world_size, *sizes = _axes(findings[0])
    results = [finding.result for finding in findings if isinstance(finding.result, Difference)]
    passed = sum(finding.passes for finding in findings)
    count = f"{passed}" if passed == len(findings) else f"{passed} of {len(findings)}"
    largest = [
        f"{max((getattr(result, key) for result in results), default=math.inf):.1e}"
        for key in ("loss", "grad_norm", "weights", "moments")
    ]
    return f"| {_axes_text(sizes)} | {world_size} | {count} | {' | '.join(largest)} |"


def _name(case: ProofCase) -> str:
    return f"{case.axes}, {case.method}"
