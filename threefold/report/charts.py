"""The panels of the page: groups of metrics that are drawn together, with titles and units."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from threefold.report.run_record import RunRecord
from threefold.report.summaries import Prediction

MAX_OTHER_PANELS = 16
LOSS = "loss"
VALIDATION = ("validation_loss", "validation/")
TASKS = "tasks/"
BITS_PER_BYTE = "bits_per_byte"
# Metrics that other parts of the page show.
SHOWN_ELSEWHERE = {"tokens", "slowest_rank", "tflops_per_gpu", "mfu"}


@dataclass(frozen=True)
class Reference:
    """A horizontal line that a curve is compared with.

    Attributes:
        label: text in the legend, such as "plan"
        run: index of the run; None if the line belongs to all runs
        value: height of the line, in the panel's unit
    """

    label: str
    run: int | None
    value: float


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A figure of the page.

    Attributes:
        key: part of the HTML element's id
        title: title above the figure
        axis: title of the y axis, with its unit
        metrics: metrics of the curves
        scale: factor from a metric to the unit of the axis
        logarithmic: use a logarithmic axis
        thousands: write the numbers of the axis as 12,000
        note: remark after the title
        references: lines that the curves are compared with
        wide: use the whole width of the page
    """

    key: str
    title: str
    axis: str
    metrics: Sequence[str]
    scale: float = 1.0
    logarithmic: bool = False
    thousands: bool = False
    note: str = ""
    references: Sequence[Reference] = field(default_factory=tuple)
    wide: bool = False


def panels_of(runs: Sequence[RunRecord], plans: Mapping[int, Prediction]) -> list[Panel]:
    """Return the panels of the metrics that at least one run has.

    Args:
        runs: the runs of the report
        plans: predictions by index of the run
    """
    names = list(dict.fromkeys(
        name
        for run in runs
        for steps in [run.steps, *run.abandoned]
        for name in steps.values
    ))  # fmt: skip
    validation = [name for name in names if name.startswith(VALIDATION)]
    bits = [name for name in validation if BITS_PER_BYTE in name]
    losses = [name for name in validation if name not in bits]
    in_loss_panel = [name for name in losses if name == "validation_loss"]
    clipping = [
        Reference("gradient_clipping", index, run.recipe.optimizer.gradient_clipping)
        for index, run in enumerate(runs)
        if run.recipe and run.recipe.optimizer.gradient_clipping
    ]
    slow = [
        Reference("supervision.slow_rank", index, run.recipe.supervision.slow_rank)
        for index, run in enumerate(runs)
        if run.recipe and "slowest_ratio" in run.steps.values
    ]
    found = [
        Panel(key="loss", title="Training loss", axis="loss (nats per token)", wide=True,
              metrics=[LOSS, *in_loss_panel]),
        Panel(key="validation", title="Validation loss", axis="loss (nats per token)",
              metrics=losses),
        Panel(key="bits", title="Validation, bits per byte", axis="bits per byte", metrics=bits),
        Panel(key="tasks", title="Task scores", axis="score",
              metrics=[name for name in names if name.startswith(TASKS)]),
        Panel(key="rate", title="Learning rate", axis="learning rate",
              metrics=["learning_rate"]),
        Panel(key="norm", title="Gradient norm", axis="norm before clipping",
              metrics=["grad_norm"], logarithmic=True, references=_shared(clipping, runs)),
        Panel(key="throughput", title="Throughput", axis="tokens per second",
              thousands=True,
              metrics=["tokens_per_second"],
              references=_planned(plans, "tokens_per_second", runs)),
        Panel(key="mfu", title="Model FLOPs utilisation", axis="MFU (%)", scale=100.0,
              metrics=["mfu"], references=_planned(plans, "mfu", runs, scale=100.0)),
        *_flops_per_second(runs, plans),
        Panel(key="step", title="Step time", axis="seconds per step",
              metrics=["step_seconds"], references=_planned(plans, "step_seconds", runs)),
        Panel(key="memory", title="Peak memory of rank 0", axis="memory (GB, 10^9 bytes)",
              metrics=["memory_gb"], references=_planned(plans, "memory_gb", runs)),
        Panel(key="outside", title="Time outside the passes", axis="seconds per step",
              metrics=[name for name in ("between_seconds", "data_seconds", "validation_seconds")
                       if name in names]),
        Panel(key="slowest", title="Slowest rank", axis="time relative to its peers",
              metrics=["slowest_ratio"], references=_shared(slow, runs)),
    ]  # fmt: skip
    drawn = {name for panel in found for name in panel.metrics} | SHOWN_ELSEWHERE
    others = [name for name in names if name not in drawn]
    found += [
        Panel(key=f"other-{number}", title=name, axis=name, metrics=[name])
        for number, name in enumerate(others[:MAX_OTHER_PANELS])
    ]
    return [panel for panel in found if any(name in names for name in panel.metrics)]


def _flops_per_second(
    runs: Sequence[RunRecord], plans: Mapping[int, Prediction]
) -> Iterator[Panel]:
    """Yield the panel of TFLOP/s if the peak of a run's device, and so its MFU, is not known."""
    without = [
        run.name
        for run in runs
        if "tflops_per_gpu" in run.steps.values and "mfu" not in run.steps.values
    ]
    if without:
        named = "" if len(without) == len(runs) else " of " + ", ".join(without)
        yield Panel(
            key="tflops", title="Model FLOPs per second", axis="TFLOP/s per device",
            metrics=["tflops_per_gpu"], references=_planned(plans, "tflops_per_gpu", runs),
            note=f"no MFU{named}: the peak of the device is not known",
        )  # fmt: skip


def _planned(
    plans: Mapping[int, Prediction],
    attribute: str,
    runs: Sequence[RunRecord],
    *,
    scale: float = 1.0,
) -> Sequence[Reference]:
    found = [
        Reference("plan", index, getattr(plan, attribute) * scale) for index, plan in plans.items()
    ]
    return _shared(found, runs)


def _shared(references: Sequence[Reference], runs: Sequence[RunRecord]) -> Sequence[Reference]:
    """Return one reference for all runs if all have the same value, otherwise all references."""
    same = len(references) == len(runs) and len({each.value for each in references}) == 1
    return [replace(references[0], run=None)] if same else references
