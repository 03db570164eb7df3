"""The pictures of measured runs. The tests read the figure's axes, not its pixels."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from models.errors import UserError
from threefold.config.loading import REPOSITORY
from threefold.plan import pictures
from threefold.plan.calibration.fit import Calibration, compare
from threefold.plan.calibration.runs_table import read_cells
from threefold.plan.job import PlannedLayout

PUBLISHED = REPOSITORY / "benchmarks" / "planner_accuracy"
SIZES = ("layers", "hidden", "seq", "vocab", "gbs", "gpus", "tp", "pp")
A100_FLOPS = 312e12  # fp16


def result(times: list[tuple[float, float | None]], error: float | None) -> dict:
    rows = [{"predicted_step_seconds": p, "measured_step_seconds": m} for p, m in times]
    return {"rows": rows, "summary": {"mean_absolute_error_percent": error}}


def test_a_scatter_plot_has_the_tables_with_times_and_the_largest_behind() -> None:
    results = {
        "few": result([(1.0, 1.1), (3.0, 2.9), (4.0, None)], 6.2),
        "memory": {"rows": [{"row_id": "x", "predicted_memory_gb": 3.0}], "summary": {}},
        "many": result([(0.1 + i / 500, 0.1 + i / 510) for i in range(1000)], 1.0),
        "unmeasured": result([(1.0, None)], None),
    }
    above, below = pictures.scatter(results).axes
    texts = [text.get_text() for text in above.get_legend().get_texts()]
    assert texts == ["within 10%", "predicted = measured", "many: 1.0%, 1000", "few: 6.2%, 2"]
    _, many, few = above.lines
    assert (len(many.get_xdata()), len(few.get_xdata())) == (1000, 2)
    assert many.get_zorder() < few.get_zorder() and many.get_markersize() < few.get_markersize()
    assert many.get_color() != few.get_color()
    assert list(below.lines[-1].get_ydata()) == pytest.approx([1 / 1.1, 3 / 2.9])


def test_an_empty_scatter_plot_is_rejected() -> None:
    with pytest.raises(UserError, match="no row has both a predicted and a measured"):
        pictures.scatter({"t": result([(1.0, None)], None)})


def run(
    parameters: int,
    gpus: int,
    *,
    measured: float | None,
    predicted: float,
    gpu: str = "H100",
    **layout: Any,
) -> dict[str, Any]:
    """Return a row of --table; MFUs are in per cent, and times follow from them."""
    layout = {"tensor": 1, "pipeline": 2, "micro_sequences": 4} | layout
    data = gpus // (layout["tensor"] * layout["pipeline"])
    return {
        "parameters": parameters,
        "sequence_length": 4096,
        "tokens_per_step": 1_048_576,
        "gpu": gpu,
        "gpus": gpus,
        "gpus_per_node": 8,
        "precision": "bf16",
        "software": "threefold",
        "layout": asdict(PlannedLayout(**layout, data=data)),
        "micro_batches": 16,
        "measured_mfu_percent": measured,
        "predicted_mfu_percent": predicted,
        "measured_step_seconds": 800 / measured / gpus if measured else None,
        "predicted_step_seconds": 800 / predicted / gpus,
    }


def cells(axes: Axes) -> dict[tuple[int, int], str]:
    """Return the texts in the cells of a heat map: (row, column) -> text."""
    return {
        (int(text.get_position()[1]), int(text.get_position()[0])): text.get_text()
        for text in axes.texts
        if text.get_horizontalalignment() == "center"
    }


def test_heat_maps_show_the_measured_and_the_predicted_fastest_runs() -> None:
    split = {"tensor": 2, "sequence_parallel": True, "schedule": "interleaved", "virtual_stages": 4}
    rows = [
        run(10**9, 8, measured=40.0, predicted=41.0),
        run(10**9, 8, measured=38.0, predicted=44.0, **split),  # the planner's choice: 5.3% slower
        run(10**9, 32, measured=30.0, predicted=31.0),
        run(8 * 10**9, 32, measured=35.0, predicted=33.0, tensor=4, zero_stage=0),
        run(8 * 10**9, 32, measured=None, predicted=50.0, tensor=2),  # out of memory
    ]
    results = {"a": {"rows": rows[:2]}, "b": {"rows": rows[2:]}}
    measured, predicted, bar = pictures.heatmaps(results).axes
    assert [label.get_text() for label in measured.get_xticklabels()] == ["1 x 8", "4 x 8"]
    assert [label.get_text() for label in measured.get_yticklabels()] == [
        f"{size} B parameters, H100 bf16\n1.05 M tokens, length 4,096" for size in (1, 8)
    ]
    assert cells(measured) == {
        (0, 0): "1 x 2 x 4\n4 x 16\n40.0%",
        (0, 1): "1 x 2 x 16\n4 x 16\n30.0%",
        (1, 1): "4 x 2 x 4\n4 x 16\nZeRO-0\n35.0%",
    }
    assert cells(predicted) == {
        (0, 0): "2 x 2 x 2\n4 x 16\nsequence parallel\ninterleaved x 4\n44.0%",
        (0, 1): "1 x 2 x 16\n4 x 16\n31.0%",
        (1, 1): "4 x 2 x 4\n4 x 16\nZeRO-0\n33.0%",
    }
    (frame,) = [each for each in predicted.patches if isinstance(each, Rectangle)]
    assert frame.get_xy() == pytest.approx((-0.48, -0.47))
    notes = [text for text in predicted.texts if text.get_horizontalalignment() == "right"]
    assert [note.get_text() for note in notes] == ["+5.3%"]
    assert not measured.patches
    (image,), (other,) = measured.images, predicted.images
    assert image.get_clim() == other.get_clim() == (0.0, 0.5)
    assert bar.get_ylabel() == "MFU"


@pytest.mark.parametrize(
    ("other", "rows", "columns"),
    [
        ({"gpu": "A100-80GB"}, 2, 1),
        ({"precision": "fp32"}, 2, 1),
        ({"software": "nanotron"}, 2, 1),
        ({"gpus_per_node": 4}, 1, 2),
        ({"gpus": 4}, 1, 2),
        ({"row_id": "b"}, 1, 1),
    ],
)
def test_only_runs_on_the_same_machine_share_a_cell(
    other: dict[str, Any], rows: int, columns: int
) -> None:
    first = run(10**9, 8, measured=40.0, predicted=41.0)
    slower = run(10**9, 8, measured=20.0, predicted=21.0) | other
    measured, *_ = pictures.heatmaps({"t": {"rows": [first, slower]}}).axes
    assert len(measured.get_yticklabels()) == rows
    assert len(measured.get_xticklabels()) == columns
    assert len(cells(measured)) == max(rows, columns)


def test_rates_of_published_runs_are_their_authors() -> None:
    """The times of these rows are computed from their published TFLOP/s by equation 3."""
    file = PUBLISHED / "narayanan2021.csv"
    results, _ = compare(file, Calibration())
    rows: dict[str, Mapping[str, Any]] = {row["row_id"]: row for row in results[file.stem]["rows"]}
    for given in read_cells(file):
        row, size = rows[given["row_id"]], {key: int(given[key]) for key in SIZES}
        assert row["layout"]["tensor"] == size["tp"] and row["layout"]["pipeline"] == size["pp"]
        # Equation 3 of arXiv 2104.04473 counts 4 passes with recomputation; an MFU counts 3.
        tokens, inner = size["gbs"] * size["seq"], size["hidden"]
        flops = 72 * tokens * size["layers"] * inner**2
        flops *= 1 + size["seq"] / (6 * inner) + size["vocab"] / (12 * size["layers"] * inner)
        for kind in ("measured", "predicted"):
            seconds = row[f"{kind}_step_seconds"]
            rate = 100 * flops / seconds / size["gpus"] / A100_FLOPS
            assert row[f"{kind}_mfu_percent"] == pytest.approx(rate, rel=0.01)
    measured, *_ = pictures.heatmaps(results).axes
    assert len(cells(measured)) == len(rows)


def test_the_parameters_that_a_row_states_label_its_picture(tmp_path: Path) -> None:
    text = (PUBLISHED / "narayanan2021.csv").read_text().splitlines()[:2]
    file = tmp_path / "table.csv"
    file.write_text(f"{text[0]},params_b\n{text[1]},1.34\n")
    results, _ = compare(file, Calibration())
    assert results["table"]["rows"][0]["parameters"] == 1_340_000_000


def test_a_heat_map_without_times_is_rejected() -> None:
    rows = [run(10**9, 8, measured=None, predicted=41.0)]
    with pytest.raises(UserError, match="--heatmap: no row has a measured step time; use a table"):
        pictures.heatmaps({"t": {"rows": rows}})
