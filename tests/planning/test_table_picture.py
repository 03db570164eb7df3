"""The pictures of measured runs. The tests read the figure's axes, not its pixels."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from models.errors import UserError
from recipes.planning.measured.calibration import Calibration
from recipes.planning.measured.comparison import compare
from recipes.planning.measured.table import read_cells
from recipes.planning.output import table_picture
from recipes.training.recipe.loading import REPOSITORY

PUBLISHED = REPOSITORY / "recipes" / "planning" / "measured" / "published"


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
    above, below = table_picture.scatter(results).axes
    texts = [text.get_text() for text in above.get_legend().get_texts()]
    assert texts == ["within 10%", "predicted = measured", "many: 1.0%, 1000", "few: 6.2%, 2"]
    _, many, few = above.lines
    assert (len(many.get_xdata()), len(few.get_xdata())) == (1000, 2)
    assert many.get_zorder() < few.get_zorder() and many.get_markersize() < few.get_markersize()
    assert many.get_color() != few.get_color()
    assert list(below.lines[-1].get_ydata()) == pytest.approx([1 / 1.1, 3 / 2.9])


def test_an_empty_scatter_plot_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no row has both a predicted and a measured"):
        table_picture.draw_scatter({"t": result([(1.0, None)], None)}, file=tmp_path / "x.png")


def run(parameters: int, nodes: int, tensor: int, measured: float | None, predicted: float) -> dict:
    """Return a row of --table; the shares are in per cent, times follow from them."""
    return {
        "parameters": parameters,
        "sequence_length": 4096,
        "tokens_per_step": 1_048_576,
        "nodes": nodes,
        "layout": {
            "tensor": tensor, "pipeline": 2, "context": 1, "data": 8 * nodes // (2 * tensor),
            "micro_sequences": 4, "micro_batches": 16, "zero_stage": 1,
        },
        "measured_mfu_percent": measured,
        "predicted_mfu_percent": predicted,
        "measured_step_seconds": 100 / measured if measured else None,
        "predicted_step_seconds": 100 / predicted,
    }  # fmt: skip


def cells(axes: Axes) -> dict[tuple[int, int], str]:
    """Return the texts in the cells of a heat map: (row, column) -> text."""
    return {
        (int(text.get_position()[1]), int(text.get_position()[0])): text.get_text()
        for text in axes.texts
        if text.get_ha() == "center"
    }


def test_heat_maps_show_the_measured_and_the_predicted_fastest_runs() -> None:
    rows = [
        run(10**9, 1, tensor=1, measured=40.0, predicted=41.0),
        run(10**9, 1, tensor=2, measured=38.0, predicted=44.0),  # the planner's choice: 5.3% slower
        run(10**9, 4, tensor=1, measured=30.0, predicted=31.0),
        run(8 * 10**9, 4, tensor=4, measured=35.0, predicted=33.0),
        run(8 * 10**9, 4, tensor=2, measured=None, predicted=50.0),  # out of memory
    ]
    measured, predicted, bar = table_picture.heatmaps(
        {"a": {"rows": rows[:2]}, "b": {"rows": rows[2:]}}
    ).axes
    assert [label.get_text() for label in measured.get_xticklabels()] == ["1", "4"]
    labels = [label.get_text() for label in measured.get_yticklabels()]
    assert labels == [f"{size} B parameters\n1.05 M tokens, length 4,096" for size in (1, 8)]
    assert cells(measured) == {
        (0, 0): "1 x 2 x 4\n4 x 16, ZeRO-1\n40.0%",
        (0, 1): "1 x 2 x 16\n4 x 16, ZeRO-1\n30.0%",
        (1, 1): "4 x 2 x 4\n4 x 16, ZeRO-1\n35.0%",
    }
    assert cells(predicted) == {
        (0, 0): "2 x 2 x 2\n4 x 16, ZeRO-1\n44.0%",
        (0, 1): "1 x 2 x 16\n4 x 16, ZeRO-1\n31.0%",
        (1, 1): "4 x 2 x 4\n4 x 16, ZeRO-1\n33.0%",
    }
    (frame,) = [each for each in predicted.patches if isinstance(each, Rectangle)]
    assert frame.get_xy() == pytest.approx((-0.48, -0.47))
    assert [text.get_text() for text in predicted.texts if text.get_ha() == "right"] == ["+5.3%"]
    assert not measured.patches
    (image,), (other,) = measured.images, predicted.images
    assert image.get_clim() == other.get_clim() == (0.0, 0.5)
    assert bar.get_ylabel() == "MFU"


def test_a_heat_map_of_published_runs_has_their_rates() -> None:
    name = "narayanan2021"
    results, _ = compare(PUBLISHED / f"{name}.csv", Calibration())
    rows: dict[str, Mapping[str, Any]] = {row["row_id"]: row for row in results[name]["rows"]}
    for given in read_cells(PUBLISHED / f"{name}.csv"):
        row = rows[given["row_id"]]
        layout = row["layout"]
        assert layout["tensor"] == int(given["tp"]) and layout["pipeline"] == int(given["pp"])
        assert row["nodes"] == -(-int(given["gpus"]) // 8)
        assert 30 < row["measured_mfu_percent"] < 60
    measured, *_ = table_picture.heatmaps(results).axes
    assert len(cells(measured)) == len(rows)


def test_a_heat_map_without_times_is_rejected(tmp_path: Path) -> None:
    rows = [run(10**9, 1, tensor=1, measured=None, predicted=41.0)]
    with pytest.raises(UserError, match="--heatmap: no row has a measured step time; use a table"):
        table_picture.draw_heatmaps({"t": {"rows": rows}}, file=tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()
