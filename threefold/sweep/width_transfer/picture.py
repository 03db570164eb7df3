"""Pictures of a transfer check: losses over learning rates and steps, sizes over widths."""

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from threefold.sweep.width_transfer.coordinates import CoordinateCheck, Moment
from threefold.sweep.width_transfer.learning_rates import (
    Comparison,
    RateResult,
    comparisons,
)

COLOURS = "viridis"  # of the widths of a family, from the smallest to the largest
LINE_STYLES = ("-", "--", ":", "-.")  # of the families
MOMENT_TITLES: dict[Moment, str] = {
    "start": "size at the start",
    "end": "size after the last step",
    "change": "change from the start to the last step",
}
GRID: dict[str, Any] = {"which": "major", "color": "0.92", "linewidth": 0.6}


def learning_rates(outcomes: Sequence[RateResult], title: str) -> Figure:
    """Return a figure of the final losses over the learning rates, one line for each curve."""
    compared = comparisons(outcomes)
    figure = Figure(figsize=(11.0 if compared else 6.8, 4.4), layout="constrained")
    axes = figure.subplots(1, 2 if compared else 1, squeeze=False)[0]
    for outcome in outcomes:
        draw_losses(axes[0], outcome, style_of(outcome, outcomes))
    axes[0].set(xscale="log", xlabel="learning rate", ylabel="validation loss after the last step")
    axes[0].set_ylim(*loss_limits(outcomes))
    rates = sorted({rate for outcome in outcomes for rate in outcome.losses})
    axes[0].set_xticks(rates, [f"{rate:.3g}" for rate in rates], fontsize=8, rotation=45)
    axes[0].minorticks_off()
    axes[0].set_title("star: best learning rate; cross: diverged or failed", fontsize=9)
    if compared:
        draw_steps(axes[1], outcomes, compared)
    for panel in axes:
        panel.grid(**GRID)
        panel.set_axisbelow(True)
        panel.legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10)
    return figure


def style_of(outcome: RateResult, outcomes: Sequence[RateResult]) -> dict[str, Any]:
    """Return the colour and the style of a curve's line: by width, and by family."""
    families = list(dict.fromkeys(outcome.curve.family for outcome in outcomes))
    widths = sorted({outcome.curve.width for outcome in outcomes})
    family = families.index(outcome.curve.family)
    if len(widths) == 1:
        return {"color": matplotlib.colormaps["tab10"](family % 10), "linestyle": "-"}
    share = widths.index(outcome.curve.width) / (len(widths) - 1)
    return {
        "color": matplotlib.colormaps[COLOURS](0.9 - 0.8 * share),
        "linestyle": LINE_STYLES[family % len(LINE_STYLES)],
    }


def draw_losses(axes: Axes, outcome: RateResult, style: dict[str, Any]) -> None:
    """Draw the final losses of a curve, a star at the best, and crosses without a final loss."""
    finite = {rate: loss for rate, loss in outcome.losses.items() if loss is not None}
    axes.plot(
        list(finite), list(finite.values()), marker="o", markersize=3.5, linewidth=1.3,
        label=outcome.curve.label, **style,
    )  # fmt: skip
    if outcome.best is not None:
        axes.plot(
            [outcome.best], [finite[outcome.best]], marker="*", markersize=13, linestyle="none",
            color=style["color"], markeredgecolor="black", markeredgewidth=0.6, zorder=5,
        )  # fmt: skip
    lost = [rate for rate, loss in outcome.losses.items() if loss is None]
    axes.plot(
        lost, [0.97] * len(lost), "x", color=style["color"], clip_on=False,
        transform=axes.get_xaxis_transform(),
    )  # fmt: skip


def loss_limits(outcomes: Sequence[RateResult]) -> tuple[float | None, float | None]:
    """Return the limits of the loss axis, which cut off runs that have barely learned."""
    best = [outcome.best_loss for outcome in outcomes if outcome.best_loss is not None]
    losses = [loss for outcome in outcomes for loss in outcome.losses.values() if loss is not None]
    if not losses:
        return None, None
    lowest, typical = min(best), max(best)
    highest = min(max(losses), typical + 3 * max(typical - lowest, 0.1 * lowest))
    margin = 0.06 * (highest - lowest) or 0.1
    return lowest - margin, highest + 2 * margin


def draw_steps(axes: Axes, outcomes: Sequence[RateResult], compared: Sequence[Comparison]) -> None:
    """Draw the validation loss over the steps at the best learning rate of each curve."""
    for outcome in outcomes:
        points = outcome.validation
        label = f"{outcome.curve.label}" + (f" ({outcome.best:.3g})" if outcome.best else "")
        axes.plot(
            [step for step, _ in points], [loss for _, loss in points], linewidth=1.3, marker="o",
            markersize=2.5, label=label, **style_of(outcome, outcomes),
        )  # fmt: skip
    for number, each in enumerate(compared):
        goal = each.reference.best_loss
        if goal is None:
            continue
        axes.axhline(goal, color="0.4", linewidth=0.8, linestyle=(0, (4, 3)))
        if each.step is not None:
            axes.annotate(
                f"step {each.step}", (each.step, goal), (0, 14 + 12 * number), ha="center",
                textcoords="offset points", fontsize=8,
                arrowprops={"arrowstyle": "->", "linewidth": 0.8},
            )  # fmt: skip
    axes.set(xlabel="step", ylabel="validation loss", yscale="log")
    axes.yaxis.set_major_formatter(lambda loss, _: f"{loss:.3g}")
    axes.yaxis.set_minor_formatter(lambda loss, _: f"{loss:.3g}")
    axes.tick_params(which="both", labelsize=8)
    axes.set_title("at the best learning rate; dashed: final loss of the first", fontsize=9)


def coordinates(checks: Sequence[CoordinateCheck], title: str) -> Figure:
    """Return a figure with a row for each family and a column for each moment."""
    figure = Figure(figsize=(11.0, 0.9 + 2.9 * len(checks)), layout="constrained")
    grid = figure.subplots(len(checks), len(MOMENT_TITLES), squeeze=False, sharex=True)
    for row, check in zip(grid, checks, strict=True):
        for axes, (moment, heading) in zip(row, MOMENT_TITLES.items(), strict=True):
            draw_sizes(axes, check, moment)
            axes.set_title(heading, fontsize=9)
        row[0].set_ylabel(f"{check.family}\nRMS" if check.family else "RMS", fontsize=8)
        row[-1].legend(
            loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, fontsize=7,
            frameon=False, title="largest / smallest\nof the solid lines", title_fontsize=7,
        )  # fmt: skip
    for axes in grid[-1]:
        axes.set_xlabel("width", fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def draw_sizes(axes: Axes, check: CoordinateCheck, moment: Moment) -> None:
    """Draw the sizes at one moment over the widths; those that are not judged are dotted."""
    places = list(dict.fromkeys(size.place for size in check.sizes))
    judged = check.judged
    for size in check.sizes:
        if size.moment != moment:
            continue
        widths, sizes = list(size.by_width), list(size.by_width.values())
        spreads = [other.spread for other in judged if other.place == size.place]
        label = f"{size.place}: {max(spreads):.2f}" if spreads else f"{size.place}: not judged"
        axes.plot(
            widths, sizes, marker="o", markersize=3, linewidth=1.2,
            linestyle="-" if size in judged else ":", label=label,
            color=matplotlib.colormaps["tab20"](places.index(size.place) % 20),
        )  # fmt: skip
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    axes.tick_params(labelsize=7)
    axes.grid(**GRID)
    axes.set_axisbelow(True)
